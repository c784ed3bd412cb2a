"""Chunked bodies (RFC 9112 section 7.1), decoded in place while they arrive: the data moves down over the framing."""

_MAX_LINE = 1024


class ChunkError(Exception):
    """The peer's chunk framing is broken, or the body too large."""


class Chunks:
    """Decodes `buffer[start:]`. After `feed` returned true, `buffer[start:end]` is the body."""

    def __init__(self, start: int, max_body: int) -> None:
        self.end = start
        #: How far the framing has been read.
        self.consumed = start
        self._start = start
        self._max_body = max_body
        #: Data bytes missing of the current chunk; -1 = a size line is next, -2 = a trailer line is next.
        self._missing = -1

    def compact(self, buffer: bytearray, filled: int) -> int:
        """Move the unread rest down to the decoded data; returns the new `filled`. Framing then costs no memory."""
        rest = filled - self.consumed
        if self.consumed > self.end:
            buffer[self.end : self.end + rest] = buffer[self.consumed : filled]
            self.consumed = self.end
        return self.end + rest

    def feed(self, buffer: bytearray, filled: int) -> bool:
        """`buffer[:filled]` holds what came so far. True when the body is complete. Raises `ChunkError`."""
        while True:
            if self._missing >= 0:
                if not self._data(buffer, filled):
                    return False
                continue
            line_end = buffer.find(b"\r\n", self.consumed, filled)
            if line_end < 0:
                if filled - self.consumed > _MAX_LINE:
                    raise ChunkError("a chunk's size line is too long")
                return False
            line = bytes(buffer[self.consumed : line_end])
            self.consumed = line_end + 2
            if self._missing == -2:
                if not line:
                    return True
            else:
                self._size(line)

    def _size(self, line: bytes) -> None:
        digits = line.partition(b";")[0].strip()
        if not digits or len(digits) > 8 or not all(byte in b"0123456789abcdefABCDEF" for byte in digits):
            raise ChunkError("a malformed chunk size")
        size = int(digits, 16)
        if self.end - self._start + size > self._max_body:
            raise ChunkError(f"the page is larger than {self._max_body} bytes")
        self._missing = size if size else -2

    def _data(self, buffer: bytearray, filled: int) -> bool:
        """Move what has come of the chunk. False = more is needed."""
        take = min(self._missing, filled - self.consumed)
        if take:
            buffer[self.end : self.end + take] = buffer[self.consumed : self.consumed + take]
            self.end += take
            self.consumed += take
            self._missing -= take
        if self._missing or filled - self.consumed < 2:
            return False
        if buffer[self.consumed : self.consumed + 2] != b"\r\n":
            raise ChunkError("a chunk is not followed by a line end")
        self.consumed += 2
        self._missing = -1
        return True
