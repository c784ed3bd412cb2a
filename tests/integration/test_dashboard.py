"""The dashboard's page and stream, over real sockets."""

import asyncio
import re
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import pytest

from fairlead.server.admin import Admin, AdminSources
from fairlead.server.dashboard import SHARE, Dashboard, encode, frame

TICK = 0.02


class Source:
    """Counts what it is asked for."""

    def __init__(self) -> None:
        self.begun = self.ended = self.taken = 0
        self.size = 10
        self.error: Exception | None = None
        #: Seconds that making one takes, and when they were begun.
        self.cost = 0.0
        self.times: list[float] = []
        self.tick = TICK

    def begin(self) -> None:
        self.begun += 1

    def end(self) -> None:
        self.ended += 1

    def take(self) -> dict[str, Any]:
        assert self.begun > self.ended, "nothing is asked for while nobody looks"
        self.times.append(time.monotonic())
        until = time.thread_time() + self.cost
        while time.thread_time() < until:
            pass
        if self.error is not None:
            raise self.error
        self.taken += 1
        return {"n": self.taken, "filling": "x" * self.size}

    @property
    def sources(self) -> Any:
        return SimpleNamespace(
            begin=self.begin, end=self.end, beginning=lambda: {"about": "us"}, take=self.take, tick=self.tick,
            answers={"numbers": self.answer},
        )  # fmt: skip

    def answer(self, query: Mapping[str, str]) -> int | None:
        return None if query["n"] == "unknown" else msgspec.convert(query["n"], int, strict=False)


class Served:
    def __init__(self, source: Source, runner: aiohttp.web.AppRunner, dashboard: Dashboard) -> None:
        self.source, self.dashboard, self._runner = source, dashboard, runner
        self.problems: list[str] = []

    @property
    def port(self) -> int:
        return int(self._runner.addresses[0][1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def close(self) -> None:
        await self._runner.cleanup()


Serve = Callable[..., Any]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    made: list[Served] = []

    async def start(**options: Any) -> Served:
        source = Source()
        source.tick = options.pop("tick", TICK)
        problems: list[str] = []
        dashboard = Dashboard(
            source.sources, on_error=lambda path, error: problems.append(f"{path} {error}"), **options
        )
        app = aiohttp.web.Application()
        dashboard.add_to(app)

        async def page(request: aiohttp.web.Request) -> aiohttp.web.Response:
            return dashboard.page(request)

        app.router.add_get("/", page)
        runner = aiohttp.web.AppRunner(app, shutdown_timeout=5.0)
        await runner.setup()
        await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
        served = Served(source, runner, dashboard)
        served.problems = problems
        made.append(served)
        return served

    yield start
    for served in made:
        await served.close()


async def until(true: Callable[[], object], seconds: float = 20.0) -> None:
    end = asyncio.get_running_loop().time() + seconds
    while not true():
        assert asyncio.get_running_loop().time() < end, "it never became true"
        await asyncio.sleep(0.01)


async def events(response: aiohttp.ClientResponse, count: int) -> list[tuple[str, Any]]:
    """The next `count` events of a stream."""
    found: list[tuple[str, Any]] = []
    name = ""
    while len(found) < count:
        line = (await asyncio.wait_for(response.content.readline(), 20.0)).decode()
        assert line, "the stream has ended"
        if line.startswith("event: "):
            name = line[7:].strip()
        elif line.startswith("data: "):
            found.append((name, msgspec.json.decode(line[6:])))
    return found


async def test_a_viewer_whose_token_is_revoked_sees_nothing_more(serve: Serve) -> None:
    allowed = [True]
    served = await serve(allows=lambda request: allowed[0])
    async with aiohttp.ClientSession() as session, session.get(f"{served.url}/dashboard/stream") as response:
        assert [name for name, _ in await events(response, 3)] == ["beginning", "now", "now"]
        allowed[0] = False
        async with asyncio.timeout(20.0):
            await response.read()  # it ends
    await until(lambda: len(served.dashboard) == 0)


async def test_large_snapshots_are_made_less_often(serve: Serve) -> None:
    served = await serve()
    served.source.cost = 0.002
    async with aiohttp.ClientSession() as session, session.get(f"{served.url}/dashboard/stream") as response:
        await events(response, 5)
    first, second, third = served.source.times[1:4]
    assert min(second - first, third - second) >= 0.002 / SHARE


async def test_a_viewer_is_told_the_beginning_and_then_each_moment(serve: Serve) -> None:
    served = await serve()
    async with aiohttp.ClientSession() as session, session.get(f"{served.url}/dashboard/stream") as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        told = await events(response, 6)
    assert told[0] == ("beginning", {"about": "us"})
    assert [name for name, _ in told[1:]] == ["now"] * 5
    numbers = [value["n"] for _, value in told[1:]]
    assert numbers == sorted(set(numbers))


async def test_one_snapshot_per_tick_whatever_the_number_of_viewers(serve: Serve) -> None:
    served = await serve()
    async with aiohttp.ClientSession() as session:
        viewers = [await session.get(f"{served.url}/dashboard/stream") for _ in range(5)]
        told = await asyncio.gather(*(events(viewer, 12) for viewer in viewers))
        for viewer in viewers:
            viewer.close()
    seen = [{value["n"] for name, value in one if name == "now"} for one in told]
    # Each viewer's first one is made for it; the later ones are the same for all.
    assert len(set.union(*seen)) <= 5 + 12 + 3
    assert served.source.begun == 1


async def test_without_viewers_nothing_is_made(serve: Serve) -> None:
    served = await serve()
    for _ in range(2):
        async with aiohttp.ClientSession() as session, session.get(f"{served.url}/dashboard/stream") as response:
            await events(response, 3)
        await until(lambda: len(served.dashboard) == 0)
        taken = served.source.taken
        await asyncio.sleep(5 * TICK)
        assert served.source.taken == taken
    assert (served.source.begun, served.source.ended) == (2, 2)
    async with aiohttp.ClientSession() as session, session.head(f"{served.url}/dashboard/stream") as response:
        assert response.status == 404


async def test_too_many_viewers_are_told_why(serve: Serve) -> None:
    served = await serve(viewers=2)
    async with aiohttp.ClientSession() as session:
        first = await session.get(f"{served.url}/dashboard/stream")
        second = await session.get(f"{served.url}/dashboard/stream")
        async with session.get(f"{served.url}/dashboard/stream") as third:
            assert (third.status, await third.text()) == (503, "2 viewers are connected; close one and try again\n")
        first.close()
        await until(lambda: len(served.dashboard) == 1)
        async with session.get(f"{served.url}/dashboard/stream") as third:
            assert third.status == 200
        second.close()


async def test_who_takes_nothing_is_dropped_and_others_do_not_wait(serve: Serve) -> None:
    served = await serve(patience=0.3)
    served.source.size = 400_000
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect(("127.0.0.1", served.port))
    slow.sendall(b"GET /dashboard/stream HTTP/1.1\r\nHost: x\r\n\r\n")
    try:
        stream = f"{served.url}/dashboard/stream"
        async with aiohttp.ClientSession() as session, session.get(stream, read_bufsize=1 << 21) as response:
            await events(response, 10)
            while not served.dashboard.dropped:
                await events(response, 1)
            assert len(served.dashboard) == 1
    finally:
        slow.close()


async def test_who_reads_slowly_gets_nothing_old(serve: Serve) -> None:
    served = await serve()
    served.source.size = 40_000
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect(("127.0.0.1", served.port))
    slow.sendall(b"GET /dashboard/stream HTTP/1.1\r\nHost: x\r\n\r\n")
    await until(lambda: served.source.taken >= 100)  # 4 MB
    reader, writer = await asyncio.open_connection(sock=slow)
    try:
        read, oldest = b"", served.source.taken
        while max([0, *map(int, re.findall(rb'"n":(\d+)', read))]) < oldest:
            read += await asyncio.wait_for(reader.read(4096), 20.0)
            assert len(read) < 500_000, "old snapshots were kept for it"
        assert not served.dashboard.dropped
    finally:
        writer.close()


async def test_a_snapshot_that_fails_is_told_and_the_stream_goes_on(serve: Serve) -> None:
    served = await serve()
    async with aiohttp.ClientSession() as session, session.get(f"{served.url}/dashboard/stream") as response:
        await events(response, 3)
        served.source.error = ValueError("no")
        while (await events(response, 1))[0][0] != "broken":
            pass
        served.source.error = None
        while (await events(response, 1))[0][0] != "now":
            pass
    assert served.problems and served.problems[0] == "/dashboard/stream no"


async def test_the_snapshot_alone_is_made_once_per_tick(serve: Serve) -> None:
    served = await serve(tick=600.0)
    async with aiohttp.ClientSession() as session:
        for _ in range(3):
            async with session.get(f"{served.url}/dashboard/snapshot") as response:
                assert (await response.json())["now"]["n"] == 1
    assert served.source.taken == 1


async def test_a_snapshot_alone_that_fails(serve: Serve) -> None:
    served = await serve()
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{served.url}/dashboard/snapshot") as response:
            assert (await response.json())["about"] == {"about": "us"}
        assert (served.source.begun, served.source.ended) == (1, 1)
        served.source.error = ValueError("no")
        await asyncio.sleep(2 * TICK)
        async with session.get(f"{served.url}/dashboard/snapshot") as response:
            assert response.status == 500
        async with session.get(f"{served.url}/dashboard/stream") as response:
            await events(response, 1)
            assert (await response.content.read()).strip() == b""
    assert served.problems == ["/dashboard/snapshot no", "/dashboard/stream no"]
    assert (served.source.begun, served.source.ended) == (3, 3)


@pytest.mark.parametrize(
    ("query", "status", "text"),
    [
        ("n=3", 200, "3"),
        ("n=x", 400, "Expected `int`, got `str`\n"),
        (
            "n=unknown",
            404,
            "There is nothing of that name (any more). The dashboard and /debug/endpoints show what is there.\n",
        ),
        ("m=3", 500, "/dashboard/numbers failed: KeyError\n"),
    ],
)
async def test_questions_are_answered_or_told_what_is_wrong(serve: Serve, query: str, status: int, text: str) -> None:
    served = await serve()
    async with aiohttp.ClientSession() as session, session.get(f"{served.url}/dashboard/numbers?{query}") as response:
        assert (response.status, await response.text()) == (status, text)
    assert bool(served.problems) is (status == 500)


async def test_viewers_end_with_the_server(serve: Serve) -> None:
    served = await serve()
    async with aiohttp.ClientSession() as session:
        response = await session.get(f"{served.url}/dashboard/stream")
        await events(response, 2)
        await asyncio.wait_for(served.close(), 3.0)
        rest = await response.content.read()
        assert rest == b"" or rest.endswith(b"\n"), "it ends between two lines"
    assert len(served.dashboard) == 0


async def test_files_are_strict_and_complete(serve: Serve) -> None:
    served = await serve()
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{served.url}/") as response:
            page = await response.text()
            policy = response.headers["Content-Security-Policy"]
        assert "unsafe" not in policy and policy.startswith("default-src 'none'; script-src 'self';")
        named = re.findall(r'(?:src|href)="(dashboard/[^"]+\.\w+)"', page)
        scripts = {name for name in named if name.endswith(".js")}
        assert len(scripts) == 2
        for name in {*named}:
            async with session.get(f"{served.url}/{name}") as response:
                assert response.status == 200, name
                text, tag = await response.text(), response.headers["ETag"]
            scripts |= {f"dashboard/{one}" for one in re.findall(r'from "\./([\w.]+)"', text)}
            async with session.get(f"{served.url}/{name}", headers={"If-None-Match": tag}) as response:
                assert response.status == 304
        for name in scripts:
            async with session.get(f"{served.url}/{name}") as response:
                assert (response.status, response.content_type) == (200, "text/javascript"), name
        for name in ("nothing.js", "index.html", "__init__.py", "..%2Fio%2Fadmin.py"):
            async with session.get(f"{served.url}/dashboard/{name}") as response:
                assert response.status == 404
    assert "<script>" not in page and " style=" not in page and " onclick=" not in page
    assert not re.findall(r'(?:src|href)="(?:https?:)?//', page)


@pytest.mark.parametrize("debug", [True, False])
async def test_the_admin_port_shows_it_to_browsers_unless_told_otherwise(debug: bool) -> None:
    source = Source()
    sources = AdminSources(
        metrics=list, unready=list, endpoints=list, decisions=lambda count: [], dashboard=source.sources
    )
    admin = Admin(sources, port=0, debug=debug)
    await admin.start()
    url = f"http://127.0.0.1:{admin.port}"
    try:
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{url}/", headers={"Accept": "text/html,*/*"}) as response:
                assert (response.content_type == "text/html") is debug
            async with session.get(f"{url}/") as response:
                assert response.content_type == "text/plain"
                assert ("/dashboard/stream" in await response.text()) is debug
            async with session.get(f"{url}/dashboard/stream") as response:
                assert response.status == (200 if debug else 404)
            async with session.post(f"{url}/dashboard/snapshot") as response:
                assert response.status == (405 if debug else 404)
    finally:
        await admin.close()


def test_names_that_are_no_text_do_not_break_the_stream() -> None:
    assert encode({"a": ["\ud83d", {"\ud83d": float("nan")}]}) == b'{"a":["?",{"?":null}]}'
    assert frame("now", {"a": "x\ny"}) == b'event: now\ndata: {"a":"x\\ny"}\n\n'
