"""Decode and check the header blocks of requests, and cache the results by the blocks' bytes.

Theory
* A block is self-contained once the peer's dynamic table has size zero (RFC 7541, 4.2). The server announces size zero,
  so after the peer's size update the same bytes always decode to the same headers. Envoy sends byte-identical blocks
  for most streams (1.40; measured 117 bytes). A lookup costs a hash, decoding costs 50 µs.
* Blocks that arrive earlier are decoded with the table and never cached.
* Two generations bound the cache. A full young generation becomes the old one, and a hit in the old generation is
  copied to the young one. A block that is looked up at least once per generation stays.

Rules checked here: RFC 9113, 8.2 (field names and values), 8.2.2 (connection-specific fields), 8.3.1 (pseudo-headers),
and the gRPC request rules (POST, content-type). A malformed request fails only its stream, so it is reported as a
value, `Opening.malformed`. Only a block that cannot be decoded raises a `ProtocolError`, which ends the connection.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType

from hpack import Decoder, HPACKError, OversizedHeaderListError
from msgspec import Struct

from fairlead.core.errors import ProtocolError
from fairlead.gateway.h2 import ErrorCode

#: Longer blocks are not cached.
_CACHED_BLOCK = 1024
#: Cached blocks per generation.
_CACHED_BLOCKS = 64

_REQUIRED = (":method", ":scheme", ":path")
_PSEUDO = {*_REQUIRED, ":authority", ":protocol"}
_FORBIDDEN = {"connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade"}
#: Lower-case visible ASCII without the colon; RFC 9113, 8.2.1.
_NAME = re.compile(r"[!-9;-@\[-`a-~{-~]+\Z")
_BAD_VALUE = re.compile(r"[\0\r\n]|\A[ \t]|[ \t]\Z")


class Opening(Struct, frozen=True, gc=False):
    """The content of a HEADERS block. `headers` has `:authority` and no other pseudo-header. If a name is repeated, the
    last value counts."""

    path: str = ""
    headers: Mapping[str, str] = MappingProxyType({})
    #: Why the request is malformed; empty = it is valid.
    malformed: str = ""
    #: The HTTP status of the answer to a valid request that is not gRPC; 0 = it is gRPC.
    http_status: int = 0
    #: The block has no pseudo-header and breaks no field rule, so it can be the trailers of a stream.
    trailers: bool = False


class HeaderBlocks:
    """The receiving side of HPACK for one connection."""

    def __init__(self, max_list_size: int) -> None:
        self._decoder = Decoder(max_list_size)
        self._static = False
        #: The young generation; empty as long as blocks may refer to a table.
        self.recent: dict[bytes, Opening] = {}
        self._old: dict[bytes, Opening] = {}

    def forbid_table(self) -> None:
        """Forbid the dynamic table, after the peer has acknowledged size zero (RFC 9113, 4.3.1)."""
        self._decoder.max_allowed_table_size = 0

    def __len__(self) -> int:
        """The number of cached blocks."""
        return len(self.recent) + len(self._old)

    def read(self, block: bytes) -> Opening:
        """Read the next block; read all, in order. Raises `ProtocolError` if the decoder's state is lost."""
        if self._static:
            opening = self.recent.get(block)
            if opening is not None:
                return opening
            opening = self._old.get(block)
            if opening is not None:
                self._remember(block, opening)
                return opening
        opening = self._decode(block)
        self._static = self._decoder.header_table_size == 0
        if not self._static:
            self.recent, self._old = {}, {}
        elif len(block) <= _CACHED_BLOCK:
            self._remember(block, opening)
        return opening

    def _remember(self, block: bytes, opening: Opening) -> None:
        if len(self.recent) >= _CACHED_BLOCKS:
            self._old, self.recent = self.recent, {}
        self.recent[block] = opening

    def _decode(self, block: bytes) -> Opening:
        try:
            fields = self._decoder.decode(block, raw=True)
        except OversizedHeaderListError:
            raise ProtocolError("the header list is too large", ErrorCode.ENHANCE_YOUR_CALM) from None
        except (HPACKError, IndexError, ValueError) as error:
            raise ProtocolError(f"bad header block: {error}", ErrorCode.COMPRESSION_ERROR) from None
        # Latin-1, not UTF-8: obsolete text in a value is allowed (RFC 9110, 5.5) and must not end the connection.
        return check([(bytes(name).decode("latin-1"), bytes(value).decode("latin-1")) for name, value in fields])


def check(fields: list[tuple[str, str]]) -> Opening:
    """Check the fields of a block, given in their order."""
    pseudo: dict[str, str] = {}
    headers: dict[str, str] = {}
    for name, value in fields:
        if _BAD_VALUE.search(value):
            return Opening(malformed=f"the value of {name!r} is malformed")
        if name[:1] == ":":
            if name not in _PSEUDO or name in pseudo or headers:
                return Opening(malformed=f"{name!r} is unknown, repeated or late")
            pseudo[name] = value
        elif not _NAME.match(name):
            return Opening(malformed=f"the header name {name!r} is malformed")
        elif name in _FORBIDDEN or (name == "te" and value != "trailers"):
            return Opening(malformed=f"the header {name!r} is connection-specific")
        else:
            headers[name] = value
    if any(not pseudo.get(name) for name in _REQUIRED):
        return Opening(headers=MappingProxyType(headers), malformed="a pseudo-header is missing", trailers=not pseudo)
    if ":authority" in pseudo:
        headers[":authority"] = pseudo[":authority"]
    return Opening(pseudo[":path"], MappingProxyType(headers), http_status=_http_status(pseudo[":method"], headers))


def _http_status(method: str, headers: Mapping[str, str]) -> int:
    """The HTTP status of a request that is not gRPC: 405 unless POST, 415 for another content-type; 0 = it is gRPC."""
    if method != "POST":
        return 405
    kind = headers.get("content-type", "")
    if not kind.startswith("application/grpc") or kind[16:17] not in ("", "+", ";"):
        return 415
    return 0
