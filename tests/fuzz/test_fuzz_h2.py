"""Random bytes and mutated conversations against the HTTP/2 connection: it never crashes, hangs or leaks."""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hpack import Encoder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairlead.gateway import h2
from fairlead.gateway.h2_connection import H2Connection, Scratch
from fairlead.gateway.h2_limits import H2Limits
from fairlead.gateway.stream import ServerStream

fuzz = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
pytestmark = pytest.mark.fuzzer("HTTP/2 frames")

PATH = "/s/M"
LIMITS = H2Limits(
    max_streams=4, stream_window=2000, connection_window=70_000, max_frame=20_000, max_header_list=2000,
    max_message=30_000, max_stream_bytes=50_000, max_pending=400_000, resets_per_second=0, reset_burst=30,
    control_per_second=0, control_burst=60,
)  # fmt: skip


class Transport:
    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.over = False

    def get_extra_info(self, name: str) -> None:
        return None

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return True

    def write(self, data: bytes) -> None:
        assert data and not self.over
        self.written.append(data)

    def write_eof(self) -> None:
        self.over = True

    def close(self) -> None:
        self.over = True

    abort = close


class Fickle:
    """Does what the first byte of a message says; notes what it is told."""

    def __init__(self, stream: ServerStream, everybody: "list[Fickle]") -> None:
        self.stream: Any = stream
        self.over = False
        self.lost = 0
        self._everybody = everybody
        everybody.append(self)

    def on_message(self, message: bytes) -> None:
        assert not self.over
        assert len(message) <= LIMITS.max_message
        self.act(message[0] if message else 0, message)

    def act(self, kind: int, body: bytes = b"") -> None:
        kind %= 9
        if kind < 3:
            self.stream.send(body, b"", body * kind)
        elif kind == 3:
            self.stream.send(b"x" * 90_000)
        elif kind == 4:
            self.over = True
            self.stream.finish(len(body) % 20, body.decode("latin-1"))
        elif kind == 5:
            # A decision for one request often routes another one.
            self._everybody[len(body) % len(self._everybody)].stream.send(body)
        elif kind == 6:
            self.stream.watch_cancel(len(body) % 2 == 0)
        elif kind == 7:
            assert self.stream.writable_bytes() >= 0
        else:
            raise RuntimeError("on purpose")

    def on_half_close(self) -> None:
        assert not self.over
        self.act(4, b"end")

    def on_lost(self, why: str) -> None:
        assert not self.over and not self.lost
        self.over = True
        self.lost += 1


class Session:
    """One connection from accept to the end."""

    def __init__(self) -> None:
        self.handlers: list[Fickle] = []
        self.gone = False
        self.connection = H2Connection({PATH: self._make}, self, LIMITS, Scratch(), merge_wakeups=True)
        self.transport = Transport()
        self.connection.connection_made(self.transport)

    def _make(self, stream: ServerStream, headers: Mapping[str, str]) -> Fickle:
        return Fickle(stream, self.handlers)

    def made(self, connection: Any) -> bool:
        return True

    def lost(self, connection: Any) -> None:
        self.gone = True

    def broke(self, peer: str, why: str) -> None:
        assert why

    def feed(self, data: bytes) -> None:
        size = len(self.connection.get_buffer(-1))
        for pos in range(0, len(data), size):
            part = data[pos : pos + size]
            self.connection.get_buffer(-1)[: len(part)] = part
            self.connection.buffer_updated(len(part))
        self.check()

    def check(self) -> None:
        """Nothing grows without bound, the books agree, and nothing waits without a reason."""
        c = self.connection
        c.validate()
        assert c.window >= 0
        assert c.queued <= LIMITS.max_pending + 90_005
        assert not c.closing or self.transport.over or self.gone

    def end(self) -> None:
        self.connection.connection_lost(None)
        c = self.connection
        assert self.gone and not (c.streams or c.lingering or c.blocked or c.queued or c.watched or c.partial or c.out)
        assert all(handler.stream.finished for handler in self.handlers)
        self.check_output()

    def check_output(self) -> None:
        """Whole frames; nothing of a stream after its end; GOAWAY is the last word of an error."""
        data, pos, ended = b"".join(self.transport.written), 0, set()
        while pos < len(data):
            length, flags, stream = h2.HEAD.unpack_from(data, pos)
            kind, end = length & 255, pos + 9 + (length >> 8)
            assert end <= len(data) and length >> 8 <= 2**24
            if kind in (h2.DATA, h2.HEADERS):
                assert stream not in ended
            if (kind in (h2.DATA, h2.HEADERS) and flags & h2.END_STREAM) or kind == h2.RST_STREAM:
                ended.add(stream)
            if kind == h2.GOAWAY:
                assert data[pos + 13 : pos + 17] != b"\0\0\0\2", "internal error"
            pos = end


class Loop:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()

    def play(self, steps: list[Any], cuts: list[int]) -> None:
        async def run() -> None:
            session = Session()
            turn = 0
            for step in steps:
                if isinstance(step, bytes):
                    while step:
                        size = cuts[turn % len(cuts)] if cuts else len(step)
                        turn += 1
                        session.feed(step[:size])
                        step = step[size:]
                else:
                    disturb(session, *step)
                    await asyncio.sleep(0)
                    session.check()
            session.end()
            await asyncio.sleep(0)

        self.loop.run_until_complete(run())


def disturb(session: Session, what: str, number: int) -> None:
    """What happens besides input: handlers act on their own, time passes, the transport stops and goes on."""
    connection = session.connection
    if what == "act" and session.handlers:
        handler = session.handlers[number % len(session.handlers)]
        if number % 9 != 8:
            over = handler.over
            handler.act(number, b"b" * (number % 5))
            handler.over |= over
    elif what == "tick":
        connection.tick(connection.loop.time() + number)
    elif what == "pause" and not connection.closing:
        connection.pause_writing()
    elif what == "resume" and connection.paused:
        connection.resume_writing()
    elif what == "drain":
        connection.drain()


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    logging.disable(logging.ERROR)  # handlers raise on purpose
    made = Loop()
    yield made
    made.loop.close()
    logging.disable(logging.NOTSET)


def block(path: str = PATH, **more: str) -> bytes:
    encoder = Encoder()
    fields = [(":method", "POST"), (":scheme", "http"), (":path", path), ("content-type", "application/grpc")]
    return bytes(encoder.encode([*fields, *more.items()]))


HELLO = h2.PREFACE + h2.settings({}) + h2.SETTINGS_ACK
OPENING = b"\x20" + block()
GRPC_ROOT = b"\x83\x86\x84\x5f\x10application/grpc"
ODD_BLOCKS = [block("/no/Such"), block(connection="x"), GRPC_ROOT, b"", b"\x00\x01x\x01y"]
BLOCKS = [OPENING] * 3 + [b"\x20" + odd for odd in ODD_BLOCKS] + [block(), b"\x3f\xe1\x1f"]

small = st.integers(0, 300) | st.sampled_from([0, 1, 16383, 16384, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1])


def message(body: bytes) -> bytes:
    return b"\0" + len(body).to_bytes(4, "big") + body


messages = st.lists(st.binary(max_size=30) | st.integers(0, 3000).map(bytes), min_size=1, max_size=3).map(
    lambda bodies: b"".join(map(message, bodies))
)
#: Frames that break something more often than not.
odd_frames = st.one_of(
    st.builds(h2.frame, st.integers(0, 12), st.integers(0, 255), st.integers(0, 2**32 - 1), st.binary(max_size=50)),
    st.builds(h2.frame, st.integers(0, 12), st.integers(0, 255), st.integers(0, 9), st.binary(max_size=50)),
    st.builds(lambda k, v: h2.settings({k: v % 2**32}), st.integers(0, 8), small),
    st.builds(lambda s, n: h2.window_update(s, n % 2**32), st.integers(0, 9), small),
    st.builds(
        lambda s, f, b: h2.frame(h2.HEADERS, f, s, b), st.integers(0, 9), st.integers(0, 63), st.sampled_from(BLOCKS)
    ),
)
#: What a well-behaved peer does, by weight.
KINDS = ["data"] * 12 + ["open"] * 6 + ["act"] * 6 + ["window"] * 3 + ["reset", "end", "settings", "ping", "refused"]
KINDS += ["trailers", "tick", "pause", "resume", "padded", "pieces"]


@st.composite
def conversations(draw: st.DrawFn) -> list[Any]:
    """Mostly in order: bytes, and events for `disturb`. Ends with what breaks it, or does not."""
    steps: list[Any] = [HELLO]
    last = -1
    for kind in draw(st.lists(st.sampled_from(KINDS), max_size=60)):
        stream = max(1, last - 2 * draw(st.integers(0, 3)))
        if kind == "open" or last < 0:
            last += 2
            steps.append(h2.frame(h2.HEADERS, h2.END_HEADERS, last, OPENING))
        elif kind == "refused":
            last += 2
            steps.append(h2.frame(h2.HEADERS, 5, last, b"\x20" + draw(st.sampled_from(ODD_BLOCKS))))
        elif kind == "pieces":
            last += 2
            cut = draw(st.integers(0, len(OPENING)))
            first = h2.frame(h2.HEADERS, 0, last, OPENING[:cut])
            steps.append(first + h2.frame(h2.CONTINUATION, h2.END_HEADERS, last, OPENING[cut:]))
        elif kind == "data":
            payload = draw(messages)
            cut = draw(st.integers(0, len(payload)))
            whole = draw(st.booleans())
            steps.append(h2.frame(h2.DATA, 0, stream, payload if whole else payload[:cut]))
            if not whole and draw(st.booleans()):
                steps.append(h2.frame(h2.DATA, 0, stream, payload[cut:]))
        elif kind == "padded":
            steps.append(h2.frame(h2.DATA, h2.PADDED, stream, b"\x05" + draw(messages) + bytes(5)))
        elif kind == "end":
            steps.append(h2.frame(h2.DATA, h2.END_STREAM, stream, draw(messages)))
        elif kind == "trailers":
            steps.append(h2.frame(h2.HEADERS, 5, stream, b"\x00\x01x\x01y"))
        elif kind == "window":
            size = draw(st.integers(1, 200) | st.integers(1, 100_000))
            steps.append(h2.window_update(draw(st.sampled_from([0, stream])), size))
        elif kind == "reset":
            steps.append(h2.rst_stream(stream, draw(st.integers(0, 9))))
        elif kind == "settings":
            steps.append(h2.settings({4: draw(st.integers(0, 100_000)), 5: 16384 + draw(st.integers(0, 9999)), 1: 0}))
        elif kind == "ping":
            steps.append(h2.ping(draw(st.sampled_from([b"fairlead", b"12345678"])), draw(st.booleans())))
        else:
            steps.append((kind, draw(st.integers(0, 100))))
    ending = draw(st.sampled_from(["nothing", "drain", "goaway", "odd"]))
    if ending == "drain":
        steps.insert(draw(st.integers(1, len(steps))), ("drain", 0))
    elif ending == "goaway":
        steps.insert(draw(st.integers(1, len(steps))), h2.goaway(0, 0))
    elif ending == "odd":
        steps.insert(draw(st.integers(1, len(steps))), draw(odd_frames))
    return steps


cuts = st.lists(st.integers(1, 60) | st.integers(1, 20_000), max_size=8)


@given(st.binary(max_size=400), st.booleans(), cuts)
@fuzz
def test_random_bytes(loop: Loop, data: bytes, greeted: bool, cuts: list[int]) -> None:
    loop.play([HELLO + data if greeted else data], cuts)


@given(conversations(), cuts)
@fuzz
def test_conversations(loop: Loop, steps: list[Any], cuts: list[int]) -> None:
    loop.play(steps, cuts)


@pytest.mark.slow
@given(conversations(), st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), min_size=1, max_size=4), cuts)
@fuzz
def test_mutated_conversations(loop: Loop, steps: list[Any], flips: list[tuple[int, int]], cuts: list[int]) -> None:
    """Bytes of otherwise well-formed frames are changed, so lengths and boundaries go wrong."""
    for place, change in flips:
        step = steps[place % len(steps)]
        if isinstance(step, bytes):
            changed = bytearray(step)
            changed[place % min(len(step), 40)] ^= change
            steps[place % len(steps)] = bytes(changed)
    loop.play(steps, cuts)
