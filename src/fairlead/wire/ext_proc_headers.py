"""Headers in ext_proc messages (envoy.config.core.v3.HeaderMap) → a dict."""

from fairlead.model.errors import ProtocolError
from fairlead.wire.protobuf import fields, read_varint

#: Entries of these names are nearly always the same few; those that were seen, as they came and read.
_REPEATED = (b":path", b":method", b"content-type")
_ENTRIES: dict[bytes, tuple[str, str]] = {}
_MAX_ENTRIES = 256
#: Tags of HeaderValue.value and .raw_value.
_VALUE_TAGS = b"\x12\x1a"


def read_headers(data: bytes, start: int, end: int, out: dict[str, str]) -> None:
    """HeaderMap → dict. Latin-1, so every byte survives and nothing can fail.

    Envoy writes each entry as `0a size 0a size name 1a size value` with one-byte sizes nearly always: that form is read
    in place, any other by the general walk.
    """
    pos = start
    while pos < end:
        try:
            size = data[pos + 1]
            stop = pos + 2 + size
            known = _ENTRIES.get(data[pos:stop])
            if known is not None and stop <= end:
                out[known[0]] = known[1]
                pos = stop
                continue
            middle = pos + 4 + data[pos + 3]
            # An inner size of two bytes would run past `stop`.
            if (
                size < 0x80
                and middle + 2 + data[middle + 1] == stop <= end
                and data[middle] in _VALUE_TAGS
                and data[pos] == 0x0A == data[pos + 2]
            ):
                name, value = (
                    data[pos + 4 : middle].decode("latin-1").lower(),
                    data[middle + 2 : stop].decode("latin-1"),
                )
                out[name] = value
                if data[pos + 4 : middle] in _REPEATED:
                    _remember(data[pos:stop], name, value)
                pos = stop
                continue
        except IndexError:
            pass
        pos = _read_header(data, pos, end, out)


def _remember(entry: bytes, name: str, value: str) -> None:
    if len(_ENTRIES) >= _MAX_ENTRIES:  # clients choose some of them
        _ENTRIES.clear()
    _ENTRIES[entry] = name, value


def _read_header(data: bytes, pos: int, end: int, out: dict[str, str]) -> int:
    """Read the entry at `pos` field by field; returns the position behind it."""
    tag, pos = read_varint(data, pos, end)
    size, pos = read_varint(data, pos, end)
    stop = pos + size
    if tag != 0x0A or stop > end:
        raise ProtocolError("malformed header map")
    name = value = ""
    for inner, x, y in fields(data, pos, stop):
        if y < 0:
            continue
        if inner == 1:
            name = data[x:y].decode("latin-1")
        elif y > x:  # 2 = value, 3 = raw_value; Envoy fills one of them
            value = data[x:y].decode("latin-1")
    out[name.lower()] = value
    return stop
