"""A scheduler may send anything: the client's stream ends with a reason, raises nothing and holds a bounded amount."""

import asyncio
import os
from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings

from fairlead.io.remote.h2_stream import MAX_MESSAGE, GrpcStream
from fairlead.wire import h2
from fairlead.wire.grpc_frames import PREFIX

EXAMPLES = 20_000 if os.environ.get("FAIRLEAD_FUZZ_SECONDS") else 150
KINDS = st.sampled_from([*range(10), 77])
#: `:status: 200` and a content type, as servers send them.
OPENING = h2.frame(h2.HEADERS, h2.END_HEADERS, 1, b"\x88\x5f\x10application/grpc")


class Transport:
    """Takes what is written."""

    def __init__(self) -> None:
        self.written = 0
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written += len(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, name: str) -> None:
        return None

    def get_write_buffer_size(self) -> int:
        return 0


def frames() -> st.SearchStrategy[bytes]:
    body = st.binary(max_size=60) | st.builds(lambda m: PREFIX.pack(0, len(m)) + m, st.binary(max_size=40))
    framed = st.builds(h2.frame, KINDS, st.integers(0, 255), st.sampled_from([0, 1, 1, 1, 3]), body)
    return framed | st.just(OPENING) | st.binary(max_size=30)


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(frames(), max_size=12), st.booleans(), st.integers(1, 50))
def test_whatever_comes(parts: list[bytes], opened: bool, step: int) -> None:
    async def run() -> None:
        messages: list[bytes] = []
        ends: list[str] = []
        transport: Any = Transport()
        stream = GrpcStream("/a/b", "c", lambda stream: stream.send(b"hello"), messages.append, ends.append)
        stream.connection_made(transport)
        data = (OPENING if opened else b"") + b"".join(parts)
        for pos in range(0, len(data), step):
            stream.data_received(data[pos : pos + step])
            stream.send(b"x" * 10)
        assert len(ends) <= 1 and bool(ends) == transport.closed
        assert all(ends), "an end has a reason"
        assert len(stream._buffer) <= len(data) and sum(map(len, messages)) <= len(data) <= MAX_MESSAGE
        assert transport.written < 400 + 200 * (len(data) // step + len(parts) + 2) + 20 * len(data)
        stream.connection_lost(None)
        assert len(ends) == 1
        before = len(messages)
        stream.data_received(OPENING)
        stream.send(b"late")
        assert len(messages) == before

    asyncio.run(run())


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(st.binary(max_size=300), max_size=8), st.integers(1, 64))
def test_messages_arrive_whole_however_they_are_cut(wanted: list[bytes], step: int) -> None:
    async def run() -> None:
        messages: list[bytes] = []
        stream = GrpcStream("/a/b", "c", lambda stream: None, messages.append, lambda why: None)
        stream.connection_made(Transport())
        whole = b"".join(PREFIX.pack(0, len(one)) + one for one in wanted)
        data = OPENING + b"".join(h2.frame(h2.DATA, 0, 1, whole[i : i + 37]) for i in range(0, len(whole), 37))
        for pos in range(0, len(data), step):
            stream.data_received(data[pos : pos + step])
        assert messages == wanted
        stream.end("done")

    asyncio.run(run())
