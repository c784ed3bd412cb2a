"""Token counts, errors and the end, read from a response as it passes by in chunks cut anywhere.

Rules
* A JSON body is one document. A stream is a document per `data:` line (no engine splits an event over several lines;
  lines end in LF or CRLF). A bare JSON line counts too: an engine may answer a streaming request with a JSON error.
* A chunk of a stream costs four searches; only a line with one of a few words in it is parsed.
* Only the top level counts, and the events that nest it by their type, see `document`. The last usage that reports
  anything wins; Anthropic's comes in pieces (`message_start`, `message_delta`), of which the newest of each counts.
* vLLM 0.32 refuses a streaming request under overload with status 200 and `data: {"error": {…, "code": 503}}`: such a
  response failed, whatever its status line says.
* Memory is bounded: at most one document is kept, see `Document`. Malformed bytes are skipped.
"""

from typing import Any

from fairlead.model.request import Usage
from fairlead.parse.counts import error_status_of, summed, usage_of
from fairlead.parse.document import Document, Reply, read_ends, read_whole

__all__ = ["UsageScanner", "error_status_of", "usage_of"]

#: What the lines that matter contain.
_USAGE, _ERROR, _META, _DONE, _STOP = b'"usage"', b'"error"', b'"meta_info"', b"[DONE]", b'"message_stop"'

#: Anthropic tells the parts of a usage in two events, and cumulatively.
_PIECES = ("input_tokens", "output_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
#: Events of the Responses API after which nothing follows.
_LAST_EVENTS = frozenset(("response.completed", "response.incomplete", "response.failed"))


class UsageScanner:
    """Feed it every chunk of one response body, then ask. `stream`: the body is `text/event-stream`."""

    __slots__ = ("_document", "_done", "_error", "_fresh", "_partial", "_pieces", "_stream", "_usage")

    def __init__(self, stream: bool) -> None:
        self._stream = stream
        #: Of a stream: the line that is not complete yet.
        self._document = Document()
        #: The document is not empty.
        self._partial = False
        #: It has grown since it was last read.
        self._fresh = False
        self._usage: Usage | None = None
        #: Of Anthropic's usage; empty in streams of all others.
        self._pieces: dict[str, Any] = {}
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
        """The stream's own last word was seen: `data: [DONE]`, `message_stop`, `response.completed` and the like.
        Always false for a JSON body."""
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
        if _USAGE in lines or _ERROR in lines or _DONE in lines or _META in lines or (self._pieces and _STOP in lines):
            for line in lines.split(b"\n"):
                self._line(line)

    def _line(self, line: bytes) -> None:
        if _USAGE in line or _ERROR in line or _META in line or (self._pieces and _STOP in line):
            self._take(read_whole(line.removeprefix(b"data:")))
        elif _DONE in line and line.removeprefix(b"data:").strip() == _DONE:
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
        reported, error, kind = reply.usage, reply.error, reply.type
        if isinstance(kind, str):
            if kind.startswith("response."):
                inner = reply.nested("response")
                reported, error = inner.usage, inner.error
                self._done |= self._stream and kind in _LAST_EVENTS
            elif kind.startswith("message_"):
                reported = self._pieced(reply.nested("message").usage if kind == "message_start" else reported)
                self._done |= self._stream and kind == "message_stop"
            elif kind == "error":
                error = error or kind
        if reply.meta_info is not None and reported is None:
            reported = reply.meta_info
        usage = summed(reported) if isinstance(reported, list) else usage_of(reported)
        if usage is not None:
            self._usage = usage
        if error is not None and not self._error:
            self._error = error_status_of(error)

    def _pieced(self, usage: Any) -> dict[str, Any]:
        """All pieces told so far. Zero does not replace a number: it also stands for what a server cannot tell."""
        if isinstance(usage, dict):
            for name in _PIECES:
                if usage.get(name) or self._pieces.get(name) is None:
                    self._pieces[name] = usage.get(name)
        return self._pieces
