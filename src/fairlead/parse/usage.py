"""Token counts, errors and the end, read from a response as it passes by in chunks cut anywhere.

Rules
* A JSON body is one document. A stream is a document per `data:` line (no engine splits an event over several lines;
  lines end in LF or CRLF). A bare JSON line counts too: an engine may answer a streaming request with a JSON error.
* A chunk of a stream costs three searches; only a line with `"usage"`, `"error"` or `[DONE]` in it is parsed.
* Only the top level counts, see `document`. The last usage that reports anything wins.
* vLLM 0.32 refuses a streaming request under overload with status 200 and `data: {"error": {…, "code": 503}}`: such a
  response failed, whatever its status line says.
* Memory is bounded: at most one document is kept, see `Document`. Malformed bytes are skipped.
"""

from typing import Any

from msgspec import DecodeError
from msgspec.json import decode as decode_json

from fairlead.model.request import Usage
from fairlead.parse.document import Document, Reply, read_ends, read_whole

#: Counts above this are nonsense.
MAX_TOKENS = 2**31 - 1


class UsageScanner:
    """Feed it every chunk of one response body, then ask. `stream`: the body is `text/event-stream`."""

    __slots__ = ("_document", "_done", "_error", "_fresh", "_partial", "_stream", "_usage")

    def __init__(self, stream: bool) -> None:
        self._stream = stream
        #: Of a stream: the line that is not complete yet.
        self._document = Document()
        #: The document is not empty.
        self._partial = False
        #: It has grown since it was last read.
        self._fresh = False
        self._usage: Usage | None = None
        self._error = 0
        self._done = False

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
        """Status of an error inside the body, 500 if it names none; 0 = no error. The first one counts."""
        self._pending()
        return self._error

    @property
    def done(self) -> bool:
        """`data: [DONE]` was seen. Always false for a JSON body."""
        self._pending()
        return self._done

    def _lines(self, lines: bytes) -> None:
        """Complete lines; the first one may have begun in an earlier chunk."""
        if self._partial:
            first, _, lines = lines.partition(b"\n")
            self._document.append(first)
            self._read()
            self._document.clear()
            self._partial = self._fresh = False
        if b'"usage"' in lines or b'"error"' in lines or b"[DONE]" in lines:
            for line in lines.split(b"\n"):
                self._line(line)

    def _line(self, line: bytes) -> None:
        if b'"usage"' in line or b'"error"' in line:
            self._take(read_whole(line.removeprefix(b"data:")))
        elif b"[DONE]" in line and line.removeprefix(b"data:").strip() == b"[DONE]":
            self._done = True

    def _pending(self) -> None:
        """Read a body, or a last line without its line end, unless that was done already."""
        if self._fresh:
            self._fresh = False
            self._read()

    def _read(self) -> None:
        whole = self._document.whole()
        if whole is not None:
            self._line(whole)
        else:
            head, tail = self._document.ends()
            self._take(read_ends(head.removeprefix(b"data:"), tail))

    def _take(self, reply: Reply) -> None:
        usage = usage_of(reply.usage)
        if usage is not None:
            self._usage = usage
        if reply.error is not None and not self._error:
            self._error = error_status_of(reply.error)


def usage_of(value: Any) -> Usage | None:
    """Token counts from an OpenAI usage object of either naming; `None` if it reports nothing usable."""
    if not isinstance(value, dict):
        return None
    prompt = _either(value, "prompt_tokens", "input_tokens")
    completion = _either(value, "completion_tokens", "output_tokens")
    total = _tokens(value.get("total_tokens"))
    if completion < 0 and total >= prompt >= 0:
        completion = total - prompt
    if prompt < 0 and total >= completion >= 0:
        prompt = total - completion
    cached = -1
    for name in ("prompt_tokens_details", "input_tokens_details"):
        details = value.get(name)
        if cached < 0 and isinstance(details, dict):
            cached = _tokens(details.get("cached_tokens"))
    if prompt < 0 and completion < 0:
        return None
    return Usage(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached)


def error_status_of(error: Any) -> int:
    """HTTP status that an error object names in `code` or `status`; 500 if it names none. 0 for an empty error."""
    if not error:
        return 0
    if isinstance(error, dict):
        for name in ("code", "status"):
            status = _tokens(error.get(name))
            if 400 <= status <= 599:
                return status
    return 500


def _either(value: dict[str, Any], name: str, other: str) -> int:
    tokens = _tokens(value.get(name))
    return tokens if tokens >= 0 else _tokens(value.get(other))


def _tokens(value: Any) -> int:
    """A count from a number or a string of digits; -1 for anything else."""
    if isinstance(value, str):
        try:
            value = decode_json(value.strip(), type=int | float)
        except (DecodeError, UnicodeError):
            return -1
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_TOKENS:
        return -1
    return int(value)
