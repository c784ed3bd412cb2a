"""From when to when a certificate is valid. Python's `ssl` tells that only of certificates that a peer has shown."""

import re
import ssl
from datetime import UTC, datetime
from math import inf

_BLOCK = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
#: Tags of DER: the version of a certificate, and a time whose year has two digits (RFC 5280, 4.1).
_VERSION, _UTC_TIME = 0xA0, 0x17


def validity(pem: bytes) -> tuple[float, float]:
    """From when to when the first certificate of a PEM text is valid, in seconds since 1970. What cannot be read is
    valid for ever."""
    block = _BLOCK.search(pem)
    if block is None:
        return -inf, inf
    try:
        der = ssl.PEM_cert_to_DER_cert(block[0].decode())
        position, _ = _content(der, 0)  # the certificate's first part
        position, _ = _content(der, position)
        if der[position] == _VERSION:
            _, position = _content(der, position)
        for _ in range(3):  # serial number, algorithm, issuer
            _, position = _content(der, position)
        position, _ = _content(der, position)
        return _time(der, position), _time(der, _content(der, position)[1])
    except (ValueError, IndexError, OverflowError):
        return -inf, inf


def _content(der: bytes, position: int) -> tuple[int, int]:
    """The first and the last offset, exclusive, of the content of the value at this offset."""
    length, start = der[position + 1], position + 2
    if length & 0x80:
        size = length & 0x7F
        length, start = int.from_bytes(der[start : start + size]), start + size
    return start, start + length


def _time(der: bytes, position: int) -> float:
    start, end = _content(der, position)
    text = der[start:end].decode("ascii")
    if der[position] == _UTC_TIME:
        text = ("20" if text < "5" else "19") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
