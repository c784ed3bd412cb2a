"""What the generator reads out of a response body: token usage, errors inside a 200, a digest.

vLLM 0.32 answers a stream with 200 at once and reports overload or a dead engine as an SSE event `data: {"error": …}`
inside it, so a status alone does not tell success. It may also send `: keep-alive` comments while a request is queued;
those are no token.

Usage and errors stand in the last events of a stream, so only its tail is kept, and read once: that costs a chunk 0.2
µs, where scanning each one costs 0.8 µs.
"""

import hashlib

from fairlead.bench.http1 import MessageReader
from fairlead.model.request import Usage
from fairlead.parse.usage import UsageScanner

#: Bytes of a stream's end that are read for usage, errors and `[DONE]`.
STREAM_TAIL = 4096


class BodyWatch:
    """One response body. A `MessageReader` fills `pieces`; `look` takes them from there, now and then."""

    __slots__ = ("_digest", "_reader", "_scanner", "_stream", "_tail", "data_seen", "pieces")

    def __init__(self, reader: MessageReader, digest: bool = False) -> None:
        self._reader = reader
        self._digest = hashlib.sha256() if digest else None
        self._scanner: UsageScanner | None = None
        self._stream = False
        self._tail = b""
        self.pieces: list[bytearray] = []
        #: Something other than an SSE comment was among what was looked at.
        self.data_seen = False

    def look(self) -> None:
        """Use up `pieces`."""
        if not self.pieces:
            return
        new = b"".join(self.pieces)
        self.pieces.clear()
        if self._scanner is None:
            self._stream = self._reader.field(b"content-type").startswith(b"text/event-stream")
            self._scanner = UsageScanner(self._stream)
        if not self.data_seen:
            self.data_seen = not new.startswith(b":") or b"\ndata:" in new
        if self._digest is not None:
            self._digest.update(new)
        if self._stream:
            self._keep_tail(new)
        else:
            self._scanner.feed(new)

    def close(self) -> tuple[Usage | None, str]:
        """What the whole body, all looked at, says of tokens, and why it failed all the same (empty = it did not)."""
        scanner = self._scanner
        if scanner is None:
            return None, ""
        if self._stream:
            scanner.feed(self._tail)
        status = scanner.error_status
        if status:
            return scanner.usage, f"body_error_{status}"
        # A server that dies politely ends its chunked body, but never says [DONE].
        return scanner.usage, "sse_incomplete" if self._stream and not scanner.done else ""

    def sha256(self) -> str:
        """Hex digest of the body so far; empty unless asked for."""
        return self._digest.hexdigest() if self._digest is not None else ""

    def _keep_tail(self, new: bytes) -> None:
        tail = self._tail + new
        if len(tail) > STREAM_TAIL:
            # From the next line on: half an event cannot be read.
            tail = tail[tail.find(b"\n", len(tail) - STREAM_TAIL) + 1 :]
        self._tail = tail
