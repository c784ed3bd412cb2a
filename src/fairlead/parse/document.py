"""One JSON document of a response, kept in bounded memory, and what its top level says of usage and errors.

Two APIs put what matters one level deeper, in events that say so by their `type`: OpenAI's Responses API into
`response`, Anthropic's `message_start` into `message`. These members are kept as they are, see `nested`.

Theory. A document that is kept whole is simply parsed. For a longer one: inside a JSON string every quote is escaped,
so the bytes `"usage"` never occur within text. An occurrence is a string token of its own, a key or a value, at some
depth, and the depth shows from either end:
* from the tail: `{` + everything from the occurrence on is a valid document exactly if the occurrence is a key at
  depth 1 (of a document that is complete), and `{"response":{` + the same exactly if it is one at depth 2;
* from the head: everything up to the end of the value + `}` is a valid document exactly if the value was at depth 1.
So a head (error replies, servers that send usage first) and a tail (usage is among the last keys of nearly all) are
enough. What lies between is not seen; then the usage stays unknown.
"""

import json
import re
from typing import Any

from msgspec import DecodeError, Raw, Struct
from msgspec.json import Decoder

#: A document up to this many bytes is kept whole.
WHOLE_BYTES = 131072
HEAD_BYTES = 16384
TAIL_BYTES = WHOLE_BYTES - HEAD_BYTES
#: Occurrences looked at from each end; only documents made to be slow have more.
_TRIES = 8
_ABSENT = Raw(b"")


class Reply(Struct, gc=False):
    """What matters of a response body or of one event of a stream. Values are as sent, of any JSON type."""

    usage: Any = None
    error: Any = None
    #: SGLang's `meta_info`; of a batch a list of them.
    meta_info: Any = None
    type: Any = None
    message: Raw = _ABSENT
    response: Raw = _ABSENT

    def nested(self, name: str) -> "Reply":
        """What the member `message` or `response` says; nothing if it was not sent, or is no object."""
        return read_whole(bytes(getattr(self, name)))


_decode = Decoder(Reply).decode
_raw_decode = json.JSONDecoder().raw_decode


class Document:
    """Collects a document piece by piece; holds at most `WHOLE_BYTES` + `TAIL_BYTES` (240 kB) plus the last piece."""

    __slots__ = ("_bytes", "_head")

    def __init__(self) -> None:
        self._head = b""
        self._bytes = bytearray()

    def append(self, piece: bytes) -> None:
        kept = self._bytes
        kept += piece
        if len(kept) > WHOLE_BYTES:
            if not self._head:
                self._head = bytes(kept[:HEAD_BYTES])
            # Trimming only at twice the tail moves every byte at most once more.
            elif len(kept) < 2 * TAIL_BYTES:
                return
            del kept[:-TAIL_BYTES]

    def clear(self) -> None:
        self._head = b""
        self._bytes.clear()

    def whole(self) -> bytes | None:
        """All that was collected; `None` if the middle is gone."""
        return None if self._head else bytes(self._bytes)

    def ends(self) -> tuple[bytes, bytes]:
        """The beginning and the end, once the middle is gone."""
        return self._head, bytes(self._bytes)


def read_whole(document: bytes) -> Reply:
    """Read a whole document; an empty reply if it is not a JSON object. Never raises."""
    try:
        return _decode(document)
    except (DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        # Engines may send what the strict parser refuses, such as -Infinity for a log probability.
        members = json.loads(document)
        return _reply_of(members) if isinstance(members, dict) else _batch_of(members)
    except (ValueError, RecursionError):
        return Reply()


def _reply_of(members: dict[str, Any]) -> Reply:
    return Reply(
        members.get("usage"),
        members.get("error"),
        members.get("meta_info"),
        members.get("type"),
        Raw(json.dumps(members.get("message")).encode()),
        Raw(json.dumps(members.get("response")).encode()),
    )


def _batch_of(document: Any) -> Reply:
    if not isinstance(document, list):
        return Reply()
    return Reply(meta_info=[part["meta_info"] for part in document if isinstance(part, dict) and "meta_info" in part])


def read_ends(head: bytes, tail: bytes) -> Reply:
    """Read a document of which only the beginning and the end are known. Never raises."""
    reply = _from_tail(tail)
    if reply.usage is None:
        reply.usage = _from_head(head, b"usage")
    reply.type = reply.type or _from_head(head, b"type")
    reply.error = _from_head(head, b"error")
    return reply


def _from_tail(tail: bytes) -> Reply:
    for key in (b'"usage"', b'"meta_info"'):
        at = len(tail)
        for _ in range(_TRIES):
            at = tail.rfind(key, 0, at)
            if at < 0:
                break
            reply = read_whole(b"{" + tail[at:])
            if reply.usage is not None or reply.meta_info is not None:
                return reply
            reply = read_whole(b'{"response":{' + tail[at:])
            if reply.response is not _ABSENT:
                return reply
    return Reply()


def _from_head(head: bytes, key: bytes) -> Any:
    # One byte is one character in Latin-1, and JSON's structure is ASCII.
    text = head.decode("latin-1")
    for found, _ in zip(re.finditer(rb'"%b"[ \t\r\n]*:[ \t\r\n]*' % key, head), range(_TRIES), strict=False):
        try:
            value, end = _raw_decode(text, found.end())
            json.loads(head[:end] + b"}")
        except (ValueError, RecursionError):
            continue
        if value is not None:
            return value
    return None
