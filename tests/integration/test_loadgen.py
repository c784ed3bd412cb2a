"""The load generator against real sockets: scripted servers that misbehave on purpose, and the benchmark upstream."""

import asyncio
import hashlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fairlead.core.errors import ConfigError
from fairlead.lab.load.process import run_in_process
from fairlead.lab.load.report import summarise
from fairlead.lab.load.runner import run
from fairlead.lab.load.spec import Options, Progress, RunResult, RunSpec
from fairlead.lab.load.workload import Call, Chat, ClosedLoop, Paced, Poisson, Replay, SharedPrefix, Turns
from fairlead.lab.workload.arrivals import constant
from fairlead.lab.workload.record import Record

REPOSITORY = Path(__file__).parents[2]
OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Fixed(msgspec.Struct):
    """The same request repeatedly."""

    body: str = ""
    headers: dict[str, str] = {}

    def calls(self) -> Iterator[Call]:
        while True:
            yield Call(body=self.body.encode(), headers=self.headers)


SMALL = Fixed(body='{"messages":[]}')

Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter
Answer = Callable[[Reader, Writer], Awaitable[None]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def read_request(reader: Reader) -> bytes:
    """Head and body of the next request; raises IncompleteReadError when the client has gone."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return head + await reader.readexactly(length)


class Server:
    def __init__(self) -> None:
        self.target = ""
        self.connections = 0
        self.open = 0


async def all_closed(server: Server) -> None:
    async with asyncio.timeout(20):
        while server.open:
            await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[Server]:
    """A server that handles each connection with `answer`."""
    state = Server()

    async def handle(reader: Reader, writer: Writer) -> None:
        state.connections += 1
        state.open += 1
        try:
            await answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            state.open -= 1
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, backlog=200)
    state.target = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield state
    finally:
        server.close()
        # Handlers see their connection close; none may outlive the test.
        await all_closed(state)


def replying(*pieces: bytes, close: bool = False, reset: bool = False) -> Answer:
    """Every request gets `pieces`, each in a packet of its own as far as the kernel lets it."""

    async def answer(reader: Reader, writer: Writer) -> None:
        while True:
            await read_request(reader)
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if reset:
                linger_not = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_not)
                return
            if close:
                return

    return answer


def reasons(result: RunResult) -> Counter[str]:
    return Counter(record.error for record in result.records)


@pytest.fixture(scope="module")
def upstream() -> Iterator[list[str]]:
    """Targets of a benchmark upstream with two ports."""
    command = [sys.executable, str(REPOSITORY / "bench/_upstream.py"), "--ports", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        ports = json.loads(process.stdout.readline())["ports"]
        yield [f"http://127.0.0.1:{port}" for port in ports]
        process.terminate()


async def test_json_answers_with_usage(upstream: list[str]) -> None:
    result = await run(upstream[0], SMALL, ClosedLoop(8), Options(requests=200))
    assert reasons(result) == {"": 200}
    assert all(record.status == 200 and record.completion_tokens == 110 for record in result.records)
    assert sorted(record.index for record in result.records) == list(range(200))
    for record in result.records:
        assert result.origin <= record.scheduled <= record.sent < record.end
        assert record.headers <= record.first_byte <= record.first_data <= record.end


async def test_streams_are_timed_and_their_usage_read(upstream: list[str]) -> None:
    fields = {"x-bench-chunks": "10", "x-bench-interval-ms": "4", "x-bench-delay-ms": "3", "x-bench-cached": "1"}
    workload = Fixed(body='{"stream": true, "messages": []}', headers=fields)
    result = await run(upstream[1], workload, Poisson(200), Options(requests=30))
    assert reasons(result) == {"": 30}
    for record in result.records:
        assert (record.chunks, record.completion_tokens, record.cached_tokens) == (12, 10, 1)
        assert record.headers <= record.first_data <= record.last_data <= record.end
    # After a pause of the machine a whole stream may be read at once.
    assert sum(record.headers < record.first_data < record.last_data for record in result.records) > 15
    assert result.gaps.count >= 30
    summary = summarise(result)
    assert summary["output_tokens"] == 300
    assert summary["tpot_ms"]["p50"] > 0


async def test_irregular_streams_are_read_to_their_end(upstream: list[str]) -> None:
    class Seeds:
        def calls(self) -> Iterator[Call]:
            for seed in range(30):
                yield Call(headers={"x-bench-mode": "verify", "x-bench-seed": str(seed)})

    result = await run(upstream[0], Seeds(), ClosedLoop(4), Options(requests=100))
    assert reasons(result) == {"": 30}
    assert sum(record.body_bytes for record in result.records) > 5_000_000
    framed_by_length = [record for record in result.records if not record.chunks]
    assert 0 < len(framed_by_length) < 30


async def test_uploads_arrive_whole(upstream: list[str]) -> None:
    workload = Fixed(body="x" * 3_000_000, headers={"x-bench-mode": "echo"})
    bodies: list[Any] = []

    async def relay(reader: Reader, writer: Writer) -> None:
        # In between, to look at the answer, which the generator does not keep.
        request = await read_request(reader)
        host, port = upstream[0].removeprefix("http://").split(":")
        up_reader, up_writer = await asyncio.open_connection(host, int(port))
        up_writer.write(request)
        head = await up_reader.readuntil(b"\r\n\r\n")
        body = await up_reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
        bodies.append(json.loads(body))
        writer.write(head + body)
        up_writer.close()

    async with serving(relay) as server:
        result = await run(server.target, workload, ClosedLoop(1), Options(requests=1))
    assert reasons(result) == {"": 1}
    digest = hashlib.sha256(b"x" * 3_000_000).hexdigest()
    assert bodies == [{"bytes": 3_000_000, "sha256": digest}]


@pytest.mark.parametrize("close", ["0", "1"])
async def test_an_answer_before_the_upload_was_read_counts(upstream: list[str], close: str) -> None:
    fields = {"x-bench-mode": "early", "x-bench-status": "413", "x-bench-close": close}
    workload = Fixed(body="x" * 2_000_000, headers=fields)
    result = await run(upstream[0], workload, ClosedLoop(2), Options(requests=6))
    assert reasons(result) == {"status_413": 6}


BUSY = b'data: {"error": {"message": "The engine is currently busy", "code": 503}}\n\ndata: [DONE]\n\n'
LENGTH_9 = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (replying(OK), ""),
        (replying(*(OK[at : at + 1] for at in range(len(OK)))), ""),
        (replying(b"HTTP/1.0 200 OK\r\n\r\nuntil the end", close=True), ""),
        (replying(SSE, chunk(b"data: {}\n\n"), chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n"), ""),
        (replying(b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n"), "status_503"),
        (replying(b"HTTP/1.1 429 Slow\r\ncontent-length: 0\r\n\r\n"), "status_429"),
        (replying(SSE + chunk(BUSY) + b"0\r\n\r\n"), "body_error_503"),
        (replying(SSE, chunk(b"data: {}\n\n"), b"0\r\n\r\n"), "sse_incomplete"),
        (replying(SSE, chunk(b"data: {}\n\n"), close=True), "chunked_unterminated"),
        (replying(LENGTH_9 + b"short", close=True), "short_body"),
        (replying(b"HTTP/1.1 200 OK\r\nconte", close=True), "closed_in_headers"),
        (replying(close=True), "closed_before_response"),
        (replying(reset=True), "reset"),
        (replying(b"HTTP/1.1 two hundred\r\n\r\n"), "malformed"),
        (replying(SSE + b"zz\r\n"), "malformed"),
        (replying(OK + b"more"), "extra_bytes"),
    ],
)
async def test_every_way_to_answer_gets_its_word(answer: Answer, reason: str) -> None:
    async with serving(answer) as server:
        result = await run(server.target, SMALL, ClosedLoop(2), Options(requests=6))
    assert reasons(result) == {reason: 6}


async def test_nobody_listens() -> None:
    async with serving(replying(OK)) as server:
        target = server.target
    result = await run(target, SMALL, ClosedLoop(3), Options(requests=2000))
    assert reasons(result) == {"connect_econnrefused": 2000}


@pytest.mark.parametrize("others", [["::1"], ["::1", "127.0.0.9"]])
async def test_of_several_addresses_one_that_listens_is_used(
    monkeypatch: pytest.MonkeyPatch, others: list[str]
) -> None:
    """Where hosts files list `::1 localhost`, it is the first address."""

    def look_up(host: str, port: int, *_: object) -> list[tuple[Any, ...]]:
        return [
            (socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port))
            for ip in (*others, "127.0.0.1")
        ]

    async with serving(replying(OK)) as server:
        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        named = server.target.replace("127.0.0.1", "localhost")
        assert reasons(await run(named, SMALL, ClosedLoop(1), Options(requests=3))) == {"": 3}


async def test_silence_times_out() -> None:
    async def silent(reader: Reader, writer: Writer) -> None:
        await reader.read()

    async with serving(silent) as server:
        result = await run(server.target, SMALL, Paced(constant(1000)), Options(requests=5, timeout_s=0.1))
    assert reasons(result) == {"timeout": 5}
    assert not result.cut


async def test_connections_are_kept_and_reused() -> None:
    async with serving(replying(OK)) as server:
        result = await run(server.target, SMALL, ClosedLoop(3), Options(requests=60))
        assert server.connections == 3
    assert reasons(result) == {"": 60}


async def test_a_connection_that_is_to_close_is_not_reused() -> None:
    answer = OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    async with serving(replying(answer, close=True)) as server:
        result = await run(server.target, SMALL, ClosedLoop(3), Options(requests=12))
        assert server.connections == 12
    assert reasons(result) == {"": 12}


async def test_latency_counts_from_the_schedule_when_the_server_stalls() -> None:
    """One stalled answer holds back all requests behind it; each must be charged the time since it should have left."""
    stall_over = asyncio.Event()
    released = 0.0

    async def stalling(reader: Reader, writer: Writer) -> None:
        while True:
            await read_request(reader)
            await stall_over.wait()
            writer.write(OK)

    def watch(progress: Progress) -> None:
        nonlocal released
        # Only when all 50 have been scheduled, and 49 of them held back, does the server wake up.
        if progress.waiting == 49 and not stall_over.is_set():
            released = time.monotonic()
            stall_over.set()

    options = Options(requests=50, max_in_flight=1, progress_s=0.01)
    async with serving(stalling) as server:
        result = await run(server.target, SMALL, Paced(constant(1000)), options, watch)
    assert reasons(result) == {"": 50}
    for record in result.records:
        assert record.scheduled == pytest.approx(result.origin + record.index / 1000, abs=1e-9)
        assert record.end > released > record.scheduled
        assert record.e2e() >= released - record.scheduled
        assert record.ttft() >= released - record.scheduled
    held_back = result.records[1:]
    assert all(record.sent > released for record in held_back)
    # What an uncoordinated generator would have reported: shorter for every single one.
    assert all(record.end - record.sent < record.e2e() for record in held_back)
    assert summarise(result)["send_lag_ms"]["p50"] > 0


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    arrived = 0
    all_here = asyncio.Event()

    async def wait_for_all(reader: Reader, writer: Writer) -> None:
        nonlocal arrived
        await read_request(reader)
        arrived += 1
        if arrived == 40:
            all_here.set()
        await all_here.wait()
        writer.write(OK)

    async with serving(wait_for_all) as server:
        result = await run(server.target, SMALL, Paced(constant(2000)), Options(requests=40))
        assert server.connections == 40
    assert reasons(result) == {"": 40}


@pytest.mark.parametrize("at_once", [1, 100])
async def test_turns_wait_for_the_answer_before_and_a_pause(at_once: int) -> None:
    """Also of an answer that failed, and where later conversations begin meanwhile."""

    async def slow(reader: Reader, writer: Writer) -> None:
        while True:
            body = await read_request(reader)
            await asyncio.sleep(0.05)
            writer.write(OK if b"s1" in body else b"HTTP/1.1 500 Odd\r\ncontent-length: 0\r\n\r\n")

    records = [
        Record(
            id=f"{session}.{turn}",
            in_tokens=9,
            out_tokens=2,
            arrival_us=session * 100_000 + turn,
            parent=f"{session}.{turn - 1}",
            think_ms=30.0,
            session=f"s{session}",
        )
        for turn in range(3)
        for session in range(3)
    ]
    turns = Turns(sorted(records, key=lambda record: record.arrival_us))
    options = Options(requests=9, max_in_flight=at_once, headers={"X-Session-Id": "s1"} if at_once == 1 else {})
    async with serving(slow) as server:
        result = await run(server.target, Replay(turns.begun), turns, options)
    assert reasons(result) == ({"": 9} if at_once == 1 else {"": 3, "status_500": 6})
    begun = [record.scheduled for record in result.records]
    assert begun == sorted(begun)
    first = {result.origin + at for at in (0.0, 0.1, 0.2)}
    later = [at for at in begun if min(abs(at - own) for own in first) > 1e-6]
    assert len(later) == 6
    assert all(min(abs(at - 0.03 - record.end) for record in result.records) < 1e-6 for at in later)


async def test_a_client_that_gives_up_disconnects() -> None:
    left = 0

    async def slow(reader: Reader, writer: Writer) -> None:
        nonlocal left
        while True:
            if b'"max_tokens":1,' not in await read_request(reader):
                left += not await reader.read(1)
                return
            writer.write(OK)

    records = [
        Record(id=str(number), in_tokens=8, out_tokens=number, cancel_after_ms=50.0 if number > 1 else 10_000.0)
        for number in (1, 2, 3)
    ]
    async with serving(slow) as server:
        result = await run(server.target, Replay(records), ClosedLoop(workers=1), Options(requests=3))
    assert reasons(result) == {"": 1, "cancelled": 2}
    assert left == 2
    assert all(0.05 <= record.e2e() < 1.0 for record in result.records[1:])


async def test_the_hard_bound_ends_a_run_and_forgets_no_request() -> None:
    async def silent(reader: Reader, writer: Writer) -> None:
        await reader.read()

    options = Options(requests=30, max_in_flight=4, time_limit_s=0.3)
    async with serving(silent) as server:
        result = await run(server.target, SMALL, Paced(constant(10_000)), options)
    assert reasons(result) == {"time_limit": 4, "not_sent": 26}
    assert result.cut


async def test_sigint_ends_a_run_with_what_was_answered() -> None:
    answered = 0

    async def some(reader: Reader, writer: Writer) -> None:
        nonlocal answered
        while answered < 3:
            await read_request(reader)
            answered += 1
            writer.write(OK)
        os.kill(os.getpid(), signal.SIGINT)
        await reader.read()

    options = Options(requests=30, max_in_flight=1)
    async with serving(some) as server:
        result = await run(server.target, SMALL, Paced(constant(10_000)), options, interruptible=True)
    assert (reasons(result), result.cut) == ({"": 3}, True)


async def test_a_run_leaves_the_signals_of_its_caller_alone() -> None:
    loop, heard = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGINT, heard.set)
    try:
        async with serving(replying(OK)) as server:
            await run(server.target, SMALL, Paced(constant(100)), Options(requests=1))
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(heard.wait(), 10)
    finally:
        loop.remove_signal_handler(signal.SIGINT)


async def test_a_run_bounded_by_time_schedules_what_lies_within_it() -> None:
    async with serving(replying(OK)) as server:
        result = await run(server.target, SMALL, Paced(constant(100)), Options(duration_s=0.2))
    assert reasons(result) == {"": 20}


async def test_progress_ends_with_everything_done() -> None:
    looks: list[Progress] = []
    async with serving(replying(OK)) as server:
        await run(server.target, SMALL, Paced(constant(200)), Options(requests=20, progress_s=0.02), looks.append)
    assert [look.done for look in looks] == sorted(look.done for look in looks)
    last = looks[-1]
    assert (last.done, last.total, last.in_flight, last.waiting, last.failed) == (20, 20, 0, 0, 0)
    assert last.ttft_p50_ms is not None


async def test_a_broken_workload_or_callback_ends_the_run_with_its_error() -> None:
    class Broken:
        def calls(self) -> Iterator[Call]:
            yield Call()
            raise RuntimeError("no more ideas")

    def complain(_progress: Progress) -> None:
        raise RuntimeError("no ears")

    async with serving(replying(OK)) as server:
        with pytest.raises(RuntimeError, match="no more ideas"):
            await run(server.target, Broken(), Paced(constant(500)), Options(requests=5))
        with pytest.raises(RuntimeError, match="no ears"):
            await run(server.target, SMALL, Paced(constant(10)), Options(requests=50, progress_s=0.01), complain)
        with pytest.raises(ConfigError):
            await run(server.target, Fixed(headers={"a": "b\r\nc: d"}), ClosedLoop(1), Options(requests=1))


@pytest.mark.parametrize(
    "target", ["https://h", "localhost:80", "http://", "http://h:99999", "http://h/path", "http://[::1"]
)
async def test_impossible_targets_are_refused(target: str) -> None:
    with pytest.raises(ConfigError):
        await run(target, SMALL, ClosedLoop(1), Options(requests=1))


async def test_cancelling_drops_all_connections() -> None:
    started = asyncio.Event()

    async def silent(reader: Reader, writer: Writer) -> None:
        await read_request(reader)
        started.set()
        await reader.read()

    async with serving(silent) as server:
        running = asyncio.create_task(run(server.target, SMALL, ClosedLoop(5), Options(requests=5)))
        await started.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await all_closed(server)


async def test_in_a_process_of_its_own(upstream: list[str]) -> None:
    looks: list[Progress] = []
    workload = SharedPrefix(groups=3, prompts=2, system_tokens=50, question_tokens=10, output_tokens=5)
    options = Options(requests=40, progress_s=0.05, time_ratio=20.0)
    spec = RunSpec(target=upstream[0], name="mine", workload=workload, arrivals=Poisson(200), options=options)
    result = await run_in_process(spec, looks.append)
    assert reasons(result) == {"": 40}
    assert (result.name, result.time_ratio) == ("mine", 20.0)
    assert {record.group for record in result.records} == {0, 1, 2}
    assert result.config["arrivals"] == {"type": "poisson", "rate": 200.0, "seed": 0}
    assert looks[-1].done == 40
    # Both processes read the same clock.
    assert all(record.end < time.monotonic() for record in result.records)


async def test_a_process_reports_what_is_wrong_with_its_spec() -> None:
    with pytest.raises(ConfigError, match="not http://host:port"):
        await run_in_process(RunSpec(target="ftp://x"))


async def test_cancelling_ends_the_process() -> None:
    reached = asyncio.Event()

    async def silent(reader: Reader, writer: Writer) -> None:
        await read_request(reader)
        reached.set()
        await reader.read()

    async with serving(silent) as server:
        spec = RunSpec(target=server.target, workload=Chat(), arrivals=ClosedLoop(2), options=Options(requests=2))
        running = asyncio.create_task(run_in_process(spec))
        await reached.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_a_callback_that_fails_ends_the_process(upstream: list[str]) -> None:
    def complain(_progress: Progress) -> None:
        raise RuntimeError("no ears")

    spec = RunSpec(target=upstream[0], workload=Chat(), arrivals=Poisson(50), options=Options(duration_s=60))
    with pytest.raises(RuntimeError, match="no ears"):
        await run_in_process(spec, complain)


async def test_runs_leave_no_descriptor_open() -> None:
    async with serving(replying(OK, close=True)) as server:
        await run(server.target, SMALL, ClosedLoop(3), Options(requests=30))
        await all_closed(server)
        before = set(os.listdir("/proc/self/fd"))
        await run(server.target, SMALL, ClosedLoop(3), Options(requests=30))
        await all_closed(server)
        assert set(os.listdir("/proc/self/fd")) == before
