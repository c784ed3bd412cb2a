"""Observe and change the response to a request that a session follows.

`ResponseWatch` records the status, the first byte and token counts. `Renaming` maps the model's name back to the name
that the client used.

Rules of renaming
* Only responses to rewritten requests are renamed. For these, the session stays until the end of the response.
* Only responses that can be read are renamed: uncompressed JSON and event streams.
* The other name may have another length, so the response must not carry its content length. If the gateway shows the
  headers, their answer removes it. If not, the gateway announces (`RESIZABLE_METADATA`) that it removes the length
  itself; without that, a name is mapped only if it is as long as the client's.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from fairlead.apis.errors import grpc_error
from fairlead.apis.rename import ModelRenamer
from fairlead.apis.response import Scanner, scanner_for, scanner_unseen
from fairlead.core.apis import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    GENERATE,
    MESSAGES,
    OTHER,
    RESPONSES,
    RESPONSES_STORED,
    SGLANG,
    WITHOUT_MODEL,
)
from fairlead.core.events import ResponseEnded
from fairlead.core.headers import ANSWERED_BY, ATTEMPTS, GRPC_STATUS
from fairlead.core.request import Request, Usage
from fairlead.gateway.ext_proc import CONTINUE, BodyMode, Kind, resizable_response, rewrite_chunk

_RESIZABLE = resizable_response()
#: APIs whose answers are JSON, event streams or numbers. The latter may begin with `<`, but hardly with one of these.
_NO_PAGES = frozenset((CHAT, COMPLETIONS, RESPONSES, RESPONSES_STORED, MESSAGES, EMBEDDINGS, GENERATE, SGLANG))
#: APIs whose answers report no work of the model: their usage or error is that of something stored, or unknown.
_UNREAD = WITHOUT_MODEL | {OTHER}
_is_page = re.compile(
    rb"(?:\xef\xbb\xbf)?\s*<(?:!doctype|!--|\?xml"
    rb"|(?:html|head|title|meta|link|style|script|body|center|div|pre|table|h[1-6])[\s/>])",
    re.IGNORECASE,
).match
#: Enough where the headers call it HTML, as they also do of JSON.
_is_markup = re.compile(rb"(?:\xef\xbb\xbf)?\s*<").match


#: How lines begin that a stream may send before the prompt is computed: these events, and comments.
_EARLY = (b"event:response.created", b"event:response.queued", b"event:response.in_progress")
_PREAMBLE: tuple[bytes, ...] = (*_EARLY, b":", b"id:", b"retry:")
#: Bytes that tell what kind of line it is.
_KIND = 32


class _Page:
    """Takes the place of a scanner if the body is an HTML page, for example from a proxy before the model server."""

    usage, done, finished, error_status = None, False, False, 502

    def feed(self, chunk: bytes) -> None:
        """Ignore the page: it reports no tokens."""


class ResponseWatch:
    """Follows the response to a request. Times are clock seconds."""

    __slots__ = (
        "_bytes",
        "_grpc_error",
        "_is_page",
        "_line",
        "_request",
        "_scanner",
        "_starts",
        "_status",
        "_ttft_ms",
        "is_sse",
        "preceded",
    )

    def __init__(self, request: Request) -> None:
        self._request = request
        self._status = 0
        self._bytes = self._grpc_error = 0
        self._ttft_ms = -1.0
        self._scanner: Scanner | _Page | None = None
        self._is_page = _is_page
        self.is_sse = False
        #: Something came before the first token: the beginning of its last line, and how lines like it may begin.
        self.preceded, self._line, self._starts = False, b"", _PREAMBLE

    def headers(self, headers: Mapping[str, str]) -> None:
        status = headers.get(":status", "")
        self._status = int(status) if len(status) == 3 and status.isascii() and status.isdigit() else 0
        kind = headers.get("content-type", "").lower()
        self.is_sse = kind.startswith("text/event-stream")
        if kind.startswith(("text/html", "application/xhtml")):
            self._is_page = _is_markup
        request, encoding = self._request, headers.get("content-encoding", "")
        self._scanner = scanner_for(kind, encoding, request.api, request.sequences)
        self.trailers(headers)

    def trailers(self, trailers: Mapping[str, str]) -> None:
        """Take the trailers, or headers in place of them: those of a gRPC answer without a body."""
        if self._status < 300:
            self._grpc_error = self._grpc_error or grpc_error(trailers.get(GRPC_STATUS, ""))

    def attributes(self, attributes: Mapping[str, Any]) -> str | None:
        """Take the attributes of a response whose headers are not shown; its kind follows from the request and the
        first bytes. If the request was also sent to the fallback endpoint, return the address of the endpoint that
        answers (empty = unknown), otherwise `None`."""
        request = self._request
        status, attempts = attributes.get("response.code"), attributes.get(ATTEMPTS)
        self._status = int(status) if isinstance(status, float | int) and 0 <= status < 1000 else 0
        self.is_sse = request.stream
        self._scanner = scanner_unseen(request.api, request.stream, request.sequences)
        return str(attributes.get(ANSWERED_BY) or "") if isinstance(attempts, float | int) and attempts > 1 else None

    def chunk(self, chunk: bytes, now: Callable[[], float]) -> bool:
        """Take a piece of the body. Return whether it is the first with a part of the answer."""
        if not chunk:
            return False
        self._bytes += len(chunk)
        if self._scanner is not None:
            self._scanner.feed(chunk)
        if self._ttft_ms >= 0 or (self.is_sse and self._precedes(chunk)):
            return False
        self._ttft_ms = (now() - self._request.arrived) * 1e3
        if self._is_page(chunk) and self._status < 400 and self._request.api in _NO_PAGES:
            self._scanner, self._status = _Page(), 502
        return True

    def _precedes(self, chunk: bytes) -> bool:
        """Whether nothing of it needs a computed prompt."""
        if chunk.startswith(b"data:") and not self.preceded:  # the common case
            return False
        lines = (self._line + chunk).split(b"\n")
        for number, full in enumerate(lines, 1):
            line = self._line = full[:_KIND]
            line = line.rstrip(b"\r").replace(b": ", b":", 1)
            if not any(start.startswith(line[: len(start)]) for start in self._starts):
                return False
            if number < len(lines):  # it is complete
                if line.startswith(_EARLY):
                    self._starts = (*_PREAMBLE, b"data:")
                elif not line:
                    self._starts = _PREAMBLE
        self.preceded = True
        return True

    @property
    def _report(self) -> Scanner | _Page | None:
        """Reports token counts and errors; `None` = nothing does."""
        return self._scanner if self._request.api not in _UNREAD else None

    def usage(self) -> Usage | None:
        return report.usage if (report := self._report) is not None else None

    @property
    def finished(self) -> bool:
        """Like `complete`, but costs nothing: lines that have no end yet are not read."""
        return self._scanner is not None and self._scanner.finished

    @property
    def complete(self) -> bool:
        """Whether the response's last event was seen. The end itself may not be shown: trailers are not sent."""
        return self._scanner is not None and self._scanner.done

    @property
    def refused(self) -> bool:
        """Whether the body is the text of an error, without tokens."""
        return self._status >= 400

    @property
    def error_status(self) -> int:
        """The status of an error inside a response with status 200; 0 = none."""
        if self.refused and not isinstance(self._scanner, _Page):
            return 0
        return (report.error_status if (report := self._report) is not None else 0) or self._grpc_error

    def ended(self, now: float, client_gone: bool = False) -> ResponseEnded:
        """The event for the end. `client_gone`: the response broke off, after a 2xx perhaps by the model server."""
        return ResponseEnded(
            request_id=self._request.id,
            status=self.error_status or self._status,
            usage=self.usage(),
            ttft_ms=self._ttft_ms,
            duration_ms=(now - self._request.arrived) * 1e3,
            response_bytes=self._bytes,
            client_gone=client_gone,
            upstream_reset=client_gone and self._scanner is not None and 200 <= self._status < 300,
        )


class Renaming:
    """Renames the model in a response. `resizable`: the gateway announced it. `stream`: the request asked for one."""

    __slots__ = ("_mode", "_renamer", "_shown")

    def __init__(self, shown: str, mode: BodyMode, stream: bool, resizable: bool) -> None:
        self._shown = shown
        self._mode = mode
        self._renamer: ModelRenamer | None = ModelRenamer(shown, stream, same_length=not resizable)

    def headers(self, headers: Mapping[str, str]) -> bytes:
        """The answer to the response headers."""
        kind = headers.get("content-type", "").lower()
        stream = kind.startswith("text/event-stream")
        if "content-encoding" in headers or not (stream or "json" in kind):
            self._renamer = None
            return CONTINUE[Kind.RESPONSE_HEADERS]
        self._renamer = ModelRenamer(self._shown, stream)
        return _RESIZABLE

    def chunk(self, chunk: bytes, end_of_stream: bool) -> list[bytes]:
        """The answers to a message of the body."""
        if self._mode in (BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL):
            end_of_stream = True
        if self._renamer is not None:
            changed = self._renamer.feed(chunk, end_of_stream)
            if changed != chunk or self._mode is BodyMode.FULL_DUPLEX:
                return rewrite_chunk(self._mode, changed, end_of_stream)
        if self._mode is BodyMode.FULL_DUPLEX:
            return rewrite_chunk(self._mode, chunk, end_of_stream)
        return [CONTINUE[Kind.RESPONSE_BODY]]

    def tail(self) -> list[bytes]:
        """The messages to send before the answer to the trailers. Only full duplex has a place for them: in other
        modes, a response that breaks off inside a name loses that piece."""
        held = self._renamer.feed(b"", end=True) if self._renamer is not None else b""
        return rewrite_chunk(self._mode, held, False) if held and self._mode is BodyMode.FULL_DUPLEX else []
