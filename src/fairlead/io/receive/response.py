"""What a session sees of a response: status, first byte, token counts."""

from collections.abc import Callable, Mapping
from typing import Any

from fairlead.io.receive.driver import Driver
from fairlead.model.events import FirstTokenSeen, RequestMoved, ResponseEnded
from fairlead.model.request import Usage
from fairlead.parse.response import Scanner, scanner_for, scanner_unseen
from fairlead.route.headers import ATTEMPTS


class ResponseWatch:
    """Follows one response. `arrived`: clock seconds at which its request came; `streaming`: it asked for a stream;
    `api`: see `parse.api`; `second`: who has the request if its endpoint could not be reached."""

    __slots__ = (
        "_api", "_arrived", "_bytes", "_now", "_scanner", "_second", "_status", "_streaming", "_ttft_ms", "is_sse",
        "started",
    )  # fmt: skip

    def __init__(
        self, arrived: float, streaming: bool, now: Callable[[], float], api: str = "", second: str = ""
    ) -> None:
        self._api = api
        self._arrived = arrived
        self._streaming = streaming
        self._now = now
        self._status = 0
        self._bytes = 0
        self._ttft_ms = -1.0
        self._scanner: Scanner | None = None
        self._second = second
        #: A response message was seen: the model server has the request.
        self.started = False
        self.is_sse = False

    def headers(self, headers: Mapping[str, str]) -> None:
        self.started = True
        status = headers.get(":status", "")
        self._status = int(status) if len(status) == 3 and status.isascii() and status.isdigit() else 0
        kind = headers.get("content-type", "")
        self.is_sse = kind.startswith("text/event-stream")
        self._scanner = scanner_for(kind, headers.get("content-encoding", ""), self._api)

    def attributes(self, attributes: Mapping[str, Any], driver: Driver, request_id: int) -> None:
        """Of a response whose headers are not shown; what it is shows in its request and in its first bytes."""
        self.started = True
        status, attempts = attributes.get("response.code"), attributes.get(ATTEMPTS)
        if self._second and isinstance(attempts, float | int) and attempts > 1:
            driver.feed(RequestMoved(request_id, self._second))
        self._status = int(status) if isinstance(status, float | int) and 0 <= status < 1000 else 0
        self.is_sse = self._streaming
        self._scanner = scanner_unseen(self._api, self._streaming)

    def chunk(self, chunk: bytes, driver: Driver, request_id: int) -> bool:
        """Note a piece of the body. True for the first one that has content."""
        self.started = True
        self._bytes += len(chunk)
        if self._scanner is not None and chunk:
            self._scanner.feed(chunk)
        if self._ttft_ms >= 0 or not chunk:
            return False
        self._ttft_ms = (self._now() - self._arrived) * 1e3
        driver.feed(FirstTokenSeen(request_id))
        return True

    def usage(self) -> Usage | None:
        return self._scanner.usage if self._scanner is not None else None

    @property
    def complete(self) -> bool:
        """The response's own last word was seen. Its end may not be shown: trailers are not sent to us."""
        return self._scanner is not None and self._scanner.done

    @property
    def error_status(self) -> int:
        """Status of an error reported inside a 200 stream; 0 = none."""
        return (self._scanner.error_status or 0) if self._scanner is not None else 0

    def ended(self, request_id: int, client_gone: bool = False) -> ResponseEnded:
        return ResponseEnded(
            request_id=request_id,
            status=self.error_status or self._status,
            usage=self.usage(),
            ttft_ms=self._ttft_ms,
            duration_ms=(self._now() - self._arrived) * 1e3,
            response_bytes=self._bytes,
            client_gone=client_gone,
        )
