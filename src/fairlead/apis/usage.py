"""Read token counts and error statuses from the JSON of responses."""

import json
import re
from typing import Any

from msgspec import DecodeError, Raw, Struct
from msgspec.json import Decoder
from msgspec.json import decode as decode_json

from fairlead.apis.errors import ANTHROPIC_TYPES, TYPES
from fairlead.core.request import Usage

#: Larger counts are ignored: no engine can have counted them.
MAX_TOKENS = 2**31 - 1

#: Statuses by error type, for errors that carry no status. vLLM 0.32 uses its own names in Anthropic's shape too, and
#: `internal_error` (`/v1/messages`).
_STATUS_OF_TYPE = {name: status for status, name in (*TYPES.items(), *ANTHROPIC_TYPES.items())} | {
    "overloaded_error": 503
}


def usage_of(value: Any, prompts_only: bool = False) -> Usage | None:
    """Token counts from a usage object of OpenAI's or Anthropic's APIs, or from SGLang's `meta_info`; `None` if it
    reports nothing usable. `prompts_only`: the API has no output, so a total alone is that of the prompt.

    Anthropic's `input_tokens` leave out tokens read from or written to a cache (so do vLLM 0.32's), so the prompt is
    the sum of the three.
    """
    if not isinstance(value, dict):
        return None
    prompt = _either(value, "prompt_tokens", "input_tokens")
    completion = _either(value, "completion_tokens", "output_tokens")
    total = tokens(value.get("total_tokens"))
    if prompts_only and prompt < 0 and completion < 0:
        prompt = total
    if completion < 0 and total >= prompt >= 0:
        completion = total - prompt
    if prompt < 0 and total >= completion >= 0:
        prompt = total - completion
    cached = _cached(value)
    read, created = tokens(value.get("cache_read_input_tokens")), tokens(value.get("cache_creation_input_tokens"))
    if read >= 0 or created >= 0:
        cached = max(read, 0)
        if prompt >= 0:
            prompt = min(prompt + cached + max(created, 0), MAX_TOKENS)
    if prompt < 0 and completion < 0:
        return None
    return Usage(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached)


def summed(values: list[Any]) -> Usage | None:
    """The usage of a batch: the sum of what its parts report."""
    parts = [usage for usage in map(usage_of, values) if usage is not None]
    if not parts:
        return None
    return Usage(
        prompt_tokens=_sum([part.prompt_tokens for part in parts]),
        completion_tokens=_sum([part.completion_tokens for part in parts]),
        cached_tokens=_sum([part.cached_tokens for part in parts]),
    )


def error_status_of(error: Any) -> int:
    """The HTTP status that an error object names in `code`, `status` or by its `type`; 500 if it names none, 0 if the
    error is empty."""
    if not error:
        return 0
    if isinstance(error, dict):
        for name in ("code", "status", "http_status_code"):
            status = tokens(error.get(name))
            if 400 <= status <= 599:
                return status
        kind = error.get("type")
        if isinstance(kind, str):
            return _STATUS_OF_TYPE.get(kind, 500)
    return 500


def tokens(value: Any) -> int:
    """Read a count from a number or a string of digits; -1 for anything else."""
    if isinstance(value, str):
        try:
            value = decode_json(value.strip(), type=int | float)
        except (DecodeError, UnicodeError):
            return -1
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_TOKENS:
        return -1
    return int(value)


def _cached(value: dict[str, Any]) -> int:
    for name in ("prompt_tokens_details", "input_tokens_details"):
        details = value.get(name)
        if isinstance(details, dict):
            cached = tokens(details.get("cached_tokens"))
            if cached >= 0:
                return cached
    return tokens(value.get("cached_tokens"))


def _either(value: dict[str, Any], name: str, alternative: str) -> int:
    count = tokens(value.get(name))
    return count if count >= 0 else tokens(value.get(alternative))


def _sum(counts: list[int]) -> int:
    """The sum of the counts that are known; -1 if none is."""
    known = [count for count in counts if count >= 0]
    return min(sum(known), MAX_TOKENS) if known else -1


# Keeps one JSON document of a response in bounded memory, and reads usage and errors from its top level.
#
# Two APIs nest these members one level deeper, in events that their `type` identifies: OpenAI's Responses API in
# `response`, Anthropic's `message_start` in `message`. These two members are kept raw, see `nested`.
#
# Theory. A document that is kept whole is parsed. For a longer one: inside a JSON string every quote is escaped, so
# the bytes `"usage"` never occur within text. Each occurrence is a complete string token, a key or a value, at some
# depth, and the depth can be found from either end:
# * from the tail: `{` + everything from the occurrence on is a valid document exactly if the occurrence is a key at
#   depth 1 (of a complete document), and `{"response":{` + the same exactly if it is a key at depth 2;
# * from the head: everything up to the end of the value + `}` is a valid document exactly if the value was at depth 1.
# So a head (error replies, servers that send usage first) and a tail (nearly all servers send usage among the last
# keys) are enough. If the usage lies between them, it stays unknown.

#: A document up to this many bytes is kept whole.
WHOLE_BYTES = 131072
HEAD_BYTES = 16384
TAIL_BYTES = WHOLE_BYTES - HEAD_BYTES
#: At most this many occurrences are tried from each end. Only documents made to be slow have more.
_TRIES = 8
_ABSENT = Raw(b"")


class Reply(Struct, gc=False):
    """The members that are read of a response body or stream event. Values are as sent, of any JSON type."""

    usage: Any = None
    error: Any = None
    #: SGLang's `meta_info`; for a batch, a list of them.
    meta_info: Any = None
    #: TGI's, if the request asked for them.
    details: Any = None
    type: Any = None
    message: Raw = _ABSENT
    response: Raw = _ABSENT

    def nested(self, name: str) -> "Reply":
        """Read the member `message` or `response`; an empty reply if it was not sent, or is not an object."""
        return read_whole(bytes(self.message if name == "message" else self.response))


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
            # Trimming only at twice the tail's size moves every byte at most once more.
            elif len(kept) < 2 * TAIL_BYTES:
                return
            del kept[:-TAIL_BYTES]

    def clear(self) -> None:
        self._head = b""
        self._bytes.clear()

    def complete(self) -> bytes | None:
        """The whole document; `None` if its middle was dropped."""
        return None if self._head else bytes(self._bytes)

    def ends(self) -> tuple[bytes, bytes]:
        """The beginning and the end, once the middle was dropped."""
        return self._head, bytes(self._bytes)


def read_whole(document: bytes) -> Reply:
    """Read a whole document; an empty reply if it is not a JSON object. Never raises."""
    try:
        return _decode(document)
    except (DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        # Engines may send JSON that the strict parser refuses, such as -Infinity for a log probability.
        members = json.loads(document)
        return _reply_of(members) if isinstance(members, dict) else _batch_of(members)
    except (ValueError, RecursionError):
        return Reply()


def _reply_of(members: dict[str, Any]) -> Reply:
    return Reply(
        members.get("usage"),
        members.get("error"),
        members.get("meta_info"),
        members.get("details"),
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
        start = len(tail)
        for _ in range(_TRIES):
            start = tail.rfind(key, 0, start)
            if start < 0:
                break
            reply = read_whole(b"{" + tail[start:])
            if reply.usage is not None or reply.meta_info is not None:
                return reply
            reply = read_whole(b'{"response":{' + tail[start:])
            if reply.response is not _ABSENT:
                return reply
    return Reply()


def _from_head(head: bytes, key: bytes) -> Any:
    # One byte is one character in Latin-1, and JSON's structure is ASCII.
    text = head.decode("latin-1")
    for match, _ in zip(re.finditer(rb'"%b"[ \t\r\n]*:[ \t\r\n]*' % key, head), range(_TRIES), strict=False):
        try:
            value, end = _raw_decode(text, match.end())
            json.loads(head[:end] + b"}")
        except (ValueError, RecursionError):
            continue
        if value is not None:
            return value
    return None


# Reads token counts, errors and the end from a response that arrives in chunks cut anywhere.
#
# Rules
# * A JSON body is one document. A stream has one document per `data:` line (no engine splits an event over several
#   lines; lines end in LF or CRLF). A bare JSON line counts too: an engine may answer a streaming request with a JSON
#   error.
# * A chunk of a stream costs four searches. Only lines that contain one of a few words are parsed.
# * Only the top level counts, and the nested members of some events, see above. The last usage that reports anything
#   wins. Anthropic's usage arrives in pieces (`message_start`, `message_delta`), and the newest of each piece counts.
# * vLLM 0.32 refuses a streaming request under overload with status 200 and `data: {"error": {…, "code": 503}}`. Such
#   a response failed in spite of its status line.
# * Memory is bounded: at most one document is kept, see `Document`. Malformed bytes are skipped.

#: Only lines that contain one of these are read.
_USAGE, _ERROR, _META, _DONE, _STOP = b'"usage"', b'"error"', b'"meta_info"', b"[DONE]", b'"message_stop"'
#: The same for bodies that are no streams.
_GENERATED = b'"generated_tokens"'

#: Anthropic reports these parts of a usage in two events, cumulatively.
_PIECES = ("input_tokens", "output_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
#: The events that end a stream of the Responses API.
_LAST_EVENTS = frozenset(("response.completed", "response.incomplete", "response.failed"))


class UsageScanner:
    """Takes every chunk of one response body and reports its usage. `stream`: the body is `text/event-stream`.
    `prompts_only`: see `usage_of`."""

    __slots__ = (
        "_document",
        "_error",
        "_fresh",
        "_partial",
        "_pieces",
        "_prompts_only",
        "_stream",
        "_usage",
        "finished",
    )

    def __init__(self, stream: bool, prompts_only: bool = False) -> None:
        self._stream = stream
        self._prompts_only = prompts_only
        #: The body; for a stream, the line that is not complete yet.
        self._document = Document()
        #: A stream's incomplete line is not empty.
        self._partial = False
        #: The document has grown since it was last read.
        self._fresh = False
        self._usage: Usage | None = None
        #: The parts of Anthropic's usage; empty in streams of other APIs.
        self._pieces: dict[str, Any] = {}
        self._error = 0
        #: As `done`, but a last line without its line end is not read.
        self.finished = False

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes. Amortised linear in their number; never raises."""
        if not self._stream:
            self._document.append(chunk)
            self._fresh = True
            return
        end = chunk.rfind(b"\n") + 1
        if end:
            self._lines(chunk[:end] if end < len(chunk) else chunk)
        if end < len(chunk):
            self._document.append(chunk[end:] if end else chunk)
            self._partial = self._fresh = True

    @property
    def usage(self) -> Usage | None:
        """The last usage reported; `None` = none so far."""
        self._pending()
        return self._usage

    @property
    def error_status(self) -> int:
        """The status of the first error inside the body, 500 if the error names none; 0 = no error."""
        self._pending()
        return self._error

    @property
    def done(self) -> bool:
        """Whether the stream's last event was seen: `data: [DONE]`, `message_stop`, `response.completed` and the like.
        Always false for a JSON body."""
        self._pending()
        return self.finished

    def _lines(self, lines: bytes) -> None:
        """Read complete lines. The first one may have begun in an earlier chunk."""
        if self._partial:
            first, _, lines = lines.partition(b"\n")
            self._document.append(first)
            self._read()
            self._document.clear()
            self._partial = self._fresh = False
        if (
            _USAGE in lines
            or _ERROR in lines
            or _DONE in lines
            or _META in lines
            or _GENERATED in lines
            or (self._pieces and _STOP in lines)
        ):
            for line in lines.split(b"\n"):
                self._line(line)

    def _line(self, line: bytes) -> None:
        if _USAGE in line or _ERROR in line or _META in line or _GENERATED in line or (self._pieces and _STOP in line):
            self._take(read_whole(line.removeprefix(b"data:")))
        elif _DONE in line and line.removeprefix(b"data:").strip() == _DONE:
            self.finished = True

    def _pending(self) -> None:
        """Read the body, or a last line without its line end, unless it was already read."""
        if self._fresh:
            self._fresh = False
            self._read()

    def _read(self) -> None:
        document = self._document.complete()
        if document is not None:
            self._line(document)
        else:
            head, tail = self._document.ends()
            self._take(read_ends(head.removeprefix(b"data:"), tail))

    def _take(self, reply: Reply) -> None:
        reported, error, kind = reply.usage, reply.error, reply.type
        if isinstance(kind, str):
            if kind.startswith("response."):
                inner = reply.nested("response")
                reported, error = inner.usage, inner.error
                self.finished |= self._stream and kind in _LAST_EVENTS
            elif kind.startswith("message_"):
                reported = self._pieced(reply.nested("message").usage if kind == "message_start" else reported)
                self.finished |= self._stream and kind == "message_stop"
            elif kind == "error":
                error = error or kind
        if reply.meta_info is not None and reported is None:
            reported = reply.meta_info
        if isinstance(reply.details, dict) and reported is None:
            details = reply.details
            reported = {
                "prompt_tokens": details.get("input_length"),
                "completion_tokens": details.get("generated_tokens"),
            }
        usage = summed(reported) if isinstance(reported, list) else usage_of(reported, self._prompts_only)
        if usage is not None:
            self._usage = usage
        if error is not None and not self._error:
            self._error = error_status_of(error)

    def _pieced(self, usage: Any) -> dict[str, Any]:
        """All pieces reported so far. Zero does not replace a number: servers also send it for unknown values."""
        if isinstance(usage, dict):
            for name in _PIECES:
                if usage.get(name) or self._pieces.get(name) is None:
                    self._pieces[name] = usage.get(name)
        return self._pieces
