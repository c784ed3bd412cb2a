"""The admin port, over real sockets."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from msgspec import structs

from fairlead.core.endpoint import Endpoint
from fairlead.server import http_port
from fairlead.server.admin import MAX_DECISIONS, MOST_AT_ONCE, Admin, AdminSources
from fairlead.server.http_port import MOST_CONNECTIONS, HttpPort


class Sources:
    """Pages of our own."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.listed: Any = [Endpoint("a", "10.0.0.1:80", {"zone": "x"})]
        self.asked: list[int] = []

    def metrics(self) -> Iterator[bytes]:
        yield b"a 1\n"
        yield b"b 2\n"

    def decisions(self, count: int) -> list[dict[str, int]]:
        self.asked.append(count)
        return [{"request_id": 1}]

    def decision(self, name: str) -> Any:
        raise LookupError(name)

    @property
    def all(self) -> AdminSources:
        return AdminSources(
            metrics=self.metrics,
            unready=lambda: self.reasons,
            endpoints=lambda: self.listed,
            decisions=self.decisions,
            decision=self.decision,
        )


class Page:
    def __init__(self, status: int, kind: str, text: str) -> None:
        self.status = status
        self.kind = kind
        self.text = text


class Visitor:
    """A started admin port and a client."""

    def __init__(self, **options: Any) -> None:
        self.sources = Sources()
        self.errors: list[tuple[str, str]] = []
        on_error = lambda path, error: self.errors.append((path, repr(error)))  # noqa: E731
        self.admin = Admin(self.sources.all, port=0, on_error=on_error, **options)

    async def get(self, path: str, method: str = "GET") -> Page:
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, f"http://127.0.0.1:{self.admin.port}{path}") as response,
        ):
            return Page(response.status, response.headers.get("Content-Type", ""), await response.text())


@pytest.fixture
async def visitor() -> AsyncIterator[Visitor]:
    visitor = Visitor()
    await visitor.admin.start()
    yield visitor
    await visitor.admin.close()


async def test_health_and_readiness(visitor: Visitor) -> None:
    assert (await visitor.get("/healthz")).status == 200
    assert (await visitor.get("/readyz")).text == "ready\n"
    visitor.sources.reasons = ["no endpoints yet", "the configuration is not loaded"]
    page = await visitor.get("/readyz")
    assert (page.status, page.text) == (503, "not ready\n- no endpoints yet\n- the configuration is not loaded\n")
    assert (await visitor.get("/healthz")).status == 200
    assert (await visitor.get("/healthz", "HEAD")).status == 200


async def test_names_from_outside_forge_no_line_of_readiness(visitor: Visitor) -> None:
    visitor.sources.reasons = ["facts of x\n- keys are off\x1b[2J\u202e are missing"]
    assert (await visitor.get("/readyz")).text == "not ready\n- facts of x - keys are off\ufffd[2J\ufffd are missing\n"


async def test_metrics(visitor: Visitor) -> None:
    page = await visitor.get("/metrics")
    assert (page.status, page.kind, page.text) == (200, "text/plain; version=0.0.4; charset=utf-8", "a 1\nb 2\n")


async def test_endpoints(visitor: Visitor) -> None:
    page = await visitor.get("/debug/endpoints")
    assert page.kind == "application/json"
    assert page.text == (
        '{"endpoints":[{"id":"a","address":"10.0.0.1:80","labels":{"zone":"x"},"metrics_url":"","rank":0,"uid":""}]}\n'
    )


async def test_names_that_are_no_text(visitor: Visitor) -> None:
    visitor.sources.listed = [Endpoint("\ud83d", "x", {})]
    assert r'"id": "\ud83d"' in (await visitor.get("/debug/endpoints")).text


async def test_decisions(visitor: Visitor) -> None:
    assert (await visitor.get("/debug/decisions?last=3")).text == '{"decisions":[{"request_id":1}]}\n'
    await visitor.get("/debug/decisions")
    await visitor.get("/debug/decisions?last=999999")
    assert visitor.sources.asked == [3, 20, MAX_DECISIONS]


@pytest.mark.parametrize("query", ["last=0", "last=-1", "last=x", "last=", "last=1.5", "last=9999999999", "lats=3"])
async def test_bad_queries_say_why(visitor: Visitor, query: str) -> None:
    page = await visitor.get(f"/debug/decisions?{query}")
    assert page.status == 400
    assert query.partition("=")[0] in page.text
    assert visitor.sources.asked == []


async def test_the_index_lists_what_exists(visitor: Visitor) -> None:
    text = (await visitor.get("/")).text
    for path in ("/healthz", "/readyz", "/metrics", "/debug/endpoints", "/debug/decisions"):
        assert path in text
    assert (await visitor.get("/nothing")).status == 404
    lost = await visitor.get("/v1/chat/completions", "POST")
    assert (lost.status, lost.text.startswith("this is Fairlead's admin port")) == (404, True)


async def test_readers_of_the_journal_that_stop_reading_hold_no_file_and_no_other_page(tmp_path: Path) -> None:
    segment = tmp_path / "a.journal"
    segment.write_bytes(bytes(16 << 20))
    admin = Admin(structs.replace(Sources().all, journal=lambda: [segment]), port=0)
    await admin.start()

    def opened() -> int:
        links = [Path(link) for link in Path("/proc/self/fd").iterdir()]
        return sum(link.is_symlink() and os.readlink(link) == str(segment) for link in links)

    readers = []
    try:
        for _ in range(MOST_CONNECTIONS + 20):
            _, writer = await asyncio.open_connection("127.0.0.1", admin.port, limit=1024)
            writer.write(b"GET /debug/journal/a.journal HTTP/1.1\r\nhost: localhost\r\n\r\n")
            readers.append(writer)
        async with asyncio.timeout(30):
            while opened() < MOST_AT_ONCE:
                await asyncio.sleep(0.01)
            async with aiohttp.ClientSession(f"http://127.0.0.1:{admin.port}") as visitor:
                for page, status in ("/healthz", 200), ("/debug/endpoints", 200), ("/debug/journal/a.journal", 503):
                    async with visitor.get(page) as answer:
                        assert answer.status == status
            for writer in readers:
                writer.transport.abort()
            while opened():
                await asyncio.sleep(0.01)
    finally:
        await admin.close()


async def test_the_journal_is_told_segment_by_segment(tmp_path: Path) -> None:
    kept: list[Path] = []
    sources = structs.replace(Sources().all, journal=lambda: kept or None)
    visitor = Visitor()
    visitor.admin = Admin(sources, port=0)
    await visitor.admin.start()
    try:
        none = await visitor.get("/debug/journal")
        assert none.status == 404 and "set journal.path" in none.text
        kept.append(tmp_path / "a.journal")
        kept[0].write_bytes(b"a segment")
        (tmp_path / "secret").write_text("not a segment")
        assert (await visitor.get("/debug/journal")).text == '{"segments":[["a.journal",9]]}\n'
        assert (await visitor.get("/debug/journal/a.journal")).text == "a segment"
        for name in ("secret", "..%2Fsecret", "%2Fetc%2Fpasswd", "b.journal"):
            assert (await visitor.get(f"/debug/journal/{name}")).status == 404
    finally:
        await visitor.admin.close()


async def test_debug_pages_can_be_off() -> None:
    visitor = Visitor(debug=False)
    await visitor.admin.start()
    assert (await visitor.get("/debug/endpoints")).status == 404
    assert (await visitor.get("/debug/decisions")).status == 404
    assert (await visitor.get("/metrics")).status == 200
    assert "/debug" not in (await visitor.get("/")).text
    await visitor.admin.close()


async def test_a_source_that_raises_costs_its_own_page(visitor: Visitor) -> None:
    visitor.sources.listed = object()
    page = await visitor.get("/debug/endpoints")
    assert (page.status, page.text) == (500, "/debug/endpoints failed: TypeError\n")
    assert (await visitor.get("/debug/decisions/a%0Ab")).text == "/debug/decisions/{name} failed: LookupError\n"
    assert [path for path, _ in visitor.errors] == ["/debug/endpoints", "/debug/decisions/{name}"]
    assert (await visitor.get("/healthz")).status == 200


async def test_a_port_that_is_taken(visitor: Visitor) -> None:
    second = Admin(visitor.sources.all, port=visitor.admin.port)
    with pytest.raises(OSError, match="Address already in use"):
        await second.start()
    await second.close()


async def test_only_this_machine_is_served_by_default(visitor: Visitor) -> None:
    for address, served in (("127.0.0.1", True), ("127.0.0.2", False)):  # of the loopback network, as all 127.x are
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(address, visitor.admin.port)
            writer.close()
            assert served
            continue
        assert not served


# ---- many at once ----


async def hang_up(writers: list[asyncio.StreamWriter]) -> None:
    for writer in writers:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def busy(seconds: float) -> None:
    until = perf_counter() + seconds
    while perf_counter() < until:
        pass


async def test_all_who_ask_at_once_get_one_page(visitor: Visitor) -> None:
    made: list[int] = []

    def metrics() -> Iterator[bytes]:
        made.append(len(made))
        yield b"number %d\n" % len(made)

    sources = Sources()
    sources.metrics = metrics  # type: ignore[method-assign]
    await visitor.admin.close()
    visitor.admin = Admin(sources.all, port=0)
    await visitor.admin.start()
    pages = await asyncio.gather(*(visitor.get("/metrics") for _ in range(32)))
    assert {page.status for page in pages} == {200}
    assert len(made) < 16
    assert (await visitor.get("/metrics")).text == f"number {len(made)}\n", "who comes later gets a new one"


async def test_pages_that_nobody_reads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairlead.server.admin.SEND_S", 600.0)
    monkeypatch.setattr("fairlead.server.admin.MOST_SENT", 24 << 20)
    sources, made = Sources(), []

    def metrics() -> Iterator[bytes]:
        made.append(1)
        yield b"x" * (10 << 20)

    sources.metrics = metrics  # type: ignore[method-assign]
    visitor = Visitor()
    visitor.admin = Admin(sources.all, port=0)
    await visitor.admin.start()

    async def not_read(count: int) -> list[asyncio.StreamWriter]:
        writers = []
        for _ in range(count):  # one after the other, so that each would have a page of its own
            _, writer = await asyncio.open_connection("127.0.0.1", visitor.admin.port, limit=1024)
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            writers.append(writer)
            await asyncio.sleep(0.02)
        return writers

    writers = await not_read(12)
    assert len(made) <= 4, "and one that was being made"
    await hang_up(writers)
    monkeypatch.setattr("fairlead.server.admin.SEND_S", 1.0)
    writers = await not_read(4)
    before = len(made)
    async with asyncio.timeout(30):
        while len(made) == before:  # until the readers are cut off, who comes gets a page that is being sent
            assert len((await visitor.get("/metrics")).text) == 10 << 20
    await hang_up(writers)
    await visitor.admin.close()


async def test_debug_pages_are_made_one_at_a_time_and_few_wait() -> None:
    sources, steps = Sources(), []

    def decisions(count: int) -> Iterator[int]:
        for i in range(count):
            steps.append(i)
            busy(0.002)
            yield i

    sources.decisions = decisions  # type: ignore[method-assign, assignment]
    visitor = Visitor()
    visitor.admin = Admin(sources.all, port=0)
    await visitor.admin.start()
    pages = await asyncio.gather(*(visitor.get("/debug/decisions?last=10") for _ in range(32)))
    answered = [page for page in pages if page.status == 200]
    assert {page.status for page in pages} == {200, 503}
    assert len(answered) >= 8
    assert steps == [*range(10)] * len(answered)
    assert (await visitor.get("/healthz")).status == 200
    assert (await visitor.get("/debug/decisions?last=2")).text == '{"decisions":[0,1]}\n'
    await visitor.admin.close()


async def test_a_long_page_leaves_the_loop_most_of_its_time() -> None:
    sources, loop = Sources(), asyncio.get_running_loop()

    def decisions(count: int) -> Iterator[int]:
        for i in range(10):
            busy(0.01)
            yield i

    sources.decisions = decisions  # type: ignore[method-assign, assignment]
    visitor = Visitor()
    visitor.admin = Admin(sources.all, port=0)
    await visitor.admin.start()
    started = loop.time()
    assert (await visitor.get("/debug/decisions")).status == 200
    assert loop.time() - started >= 0.4
    await visitor.admin.close()


async def test_connections_are_bounded_and_the_oldest_that_ask_nothing_make_room(
    monkeypatch: pytest.MonkeyPatch, visitor: Visitor
) -> None:
    monkeypatch.setattr("fairlead.server.http_port.MOST_CONNECTIONS", 5)
    held = [await asyncio.open_connection("127.0.0.1", visitor.admin.port) for _ in range(9)]
    # Who is accepted hears nothing until it asks.
    ended = [asyncio.create_task(reader.read(1)) for reader, _ in held]
    try:
        assert await asyncio.gather(*ended[:4]) == [b""] * 4
        assert not any(task.done() for task in ended[4:])
        held[5][1].write(b"GET /healthz HTTP/1.1\r\nHost: loc")
        assert (await visitor.get("/healthz")).status == 200
        assert await ended[4] == b""
        assert not any(task.done() for task in ended[5:])
    finally:
        await hang_up([writer for _, writer in held])
        await asyncio.gather(*ended, return_exceptions=True)


async def test_requests_in_progress_are_not_cut_off_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairlead.server.http_port.MOST_CONNECTIONS", 2)
    asked, answer = asyncio.Semaphore(0), asyncio.Event()

    async def slow(request: web.Request) -> web.Response:
        asked.release()
        await answer.wait()
        return web.Response(text="done")

    def app() -> web.Application:
        app = web.Application()
        app.router.add_get("/", slow)
        return app

    port = HttpPort("127.0.0.1", 0, 1.0, make_app=app)
    await port.start()
    readers, writers = zip(*[await asyncio.open_connection("127.0.0.1", port.port) for _ in range(2)], strict=True)
    for writer in writers:
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        await asked.acquire()
    reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
    assert await reader.read() == b""
    answer.set()
    assert all([(await reader.read()).endswith(b"done") for reader in readers])
    await hang_up([*writers, writer])
    await port.close()


async def test_who_does_not_read_the_answer_makes_room_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairlead.server.http_port.MOST_CONNECTIONS", 2)
    page, answered = b"." * (16 << 20), asyncio.Semaphore(0)

    async def large(request: web.Request) -> web.Response:
        answered.release()
        return web.Response(body=page)

    def app() -> web.Application:
        app = web.Application()
        app.router.add_get("/", large)
        return app

    port = HttpPort("127.0.0.1", 0, 1.0, make_app=app)
    await port.start()
    readers, writers = [], []
    for _ in range(4):
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port, limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        await answered.acquire()
        readers.append(reader)
        writers.append(writer)
    sizes = await asyncio.gather(*[received(reader) for reader in readers])
    # The first two were cut off, not only closed: their answers would have stayed in memory until somebody read them.
    assert all(size < len(page) for size in sizes[:2])
    assert all(size > len(page) for size in sizes[2:])
    await hang_up(writers)
    await port.close()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
async def test_everywhere_is_ipv4_and_ipv6() -> None:
    port = HttpPort("::", 0, 1.0)
    await port.start()
    for host in ("127.0.0.1", "::1"):
        _, writer = await asyncio.open_connection(host, port.port)
        await hang_up([writer])
    await port.close()


async def test_a_start_that_fails_leaves_no_socket_open(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_STREAM)  # no server can listen on the second
    sockets = [socket.socket(type=kind) for kind in kinds]
    monkeypatch.setattr(http_port, "listening_sockets", lambda *args: sockets)
    with pytest.raises(ValueError, match="Stream Socket"):
        await HttpPort("localhost", 0, 1.0).start()
    assert [sock.fileno() for sock in sockets] == [-1, -1, -1]


async def received(reader: asyncio.StreamReader) -> int:
    """How many bytes arrive before the end, also a rough one."""
    size = 0
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 20):
            size += len(data)
    return size


@pytest.mark.parametrize(
    "sent", [b"", b"GET /healthz HTTP/1.1\r\nHost: loc", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET"]
)
async def test_who_sends_no_whole_head_is_disconnected(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr("fairlead.server.http_port.IDLE_S", 0.05)
    visitor = Visitor()
    await visitor.admin.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", visitor.admin.port)
    writer.write(sent)
    answered = await reader.read()
    assert answered.count(b"HTTP/1.1 200 OK") == (sent.endswith(b"GET"))
    await hang_up([writer])
    await visitor.admin.close()
