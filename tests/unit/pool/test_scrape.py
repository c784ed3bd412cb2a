"""When the scraper asks, what it feeds, and how it fails: in virtual time, against servers in memory."""

import asyncio
import errno
import heapq
import random
from collections.abc import AsyncIterator, Callable
from itertools import count, pairwise
from typing import Any, cast

import pytest

from fairlead.apis.engine_metrics import ENGINES, EngineMetrics
from fairlead.core.endpoint import Endpoint
from fairlead.core.events import MetricsFailed, MetricsSampled
from fairlead.pool.scrape import GRID, Pace, ScrapeOptions, Scraper

OPTIONS = ScrapeOptions()


def page(waiting: float = 0, running: float = 0) -> bytes:
    return f"vllm:num_requests_waiting {waiting}\nvllm:num_requests_running {running}\n".encode()


class Server:
    """A model server in memory. `reply` makes the answer's bytes; `None` = never answers."""

    def __init__(self) -> None:
        self.body = page()
        self.status = 200
        self.refuse = self.unasked = False
        self.silent = False
        self.drop_idle = False
        self.asked_at: list[float] = []
        self.links: list[Link] = []

    @property
    def open_links(self) -> int:
        return sum(not link.closed for link in self.links)


class Link(asyncio.Transport):
    """One connection in memory."""

    def __init__(self, world: "World", server: Server, protocol: asyncio.BufferedProtocol) -> None:
        super().__init__()
        self.world = world
        self.server = server
        self.protocol = protocol
        self.closed = False
        server.links.append(self)
        protocol.connection_made(self)

    def write(self, data: Any) -> None:
        assert bytes(data).startswith(b"GET /metrics HTTP/1.1\r\n")
        self.server.asked_at.append(self.world.now)
        if self.server.drop_idle and len(self.server.links) % 2:
            self.world.loop.call_soon(self.abort)
        elif not self.server.silent:
            self.world.loop.call_soon(self.answer)

    def answer(self) -> None:
        body, status = self.server.body, self.server.status
        data = b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body
        if not self.closed:
            self.protocol.get_buffer(-1)[: len(data)] = data
            self.protocol.buffer_updated(len(data))

    def abort(self) -> None:
        if not self.closed:
            self.closed = True
            self.world.loop.call_soon(self.protocol.connection_lost, None)

    def is_closing(self) -> bool:
        return self.closed


class World:
    """A loop whose time stands still until `advance`, with servers by port."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.now = 1000.0
        self.servers: dict[int, Server] = {}
        self.errors: list[dict[str, Any]] = []
        self._timers: list[tuple[float, int, asyncio.TimerHandle, Callable[[], object]]] = []
        self._order = count()
        self.create_task = self.loop.create_task

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self.loop)
        heapq.heappush(self._timers, (when, next(self._order), handle, lambda: callback(*args)))
        return handle

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context)

    async def create_connection(self, factory: Callable[[], Any], host: str, port: int) -> None:
        server = self.servers[port]
        if server.unasked:
            raise OSError(errno.EMFILE, "Too many open files")
        if server.refuse:
            raise ConnectionRefusedError(111, "Connection refused")
        Link(self, server, factory())

    async def settle(self) -> None:
        for _ in range(12):
            await asyncio.sleep(0)

    async def advance(self, seconds: float) -> None:
        until = self.now + seconds
        while self._timers and self._timers[0][0] <= until:
            when, _, handle, run = heapq.heappop(self._timers)
            if not handle.cancelled():
                self.now = max(self.now, when)
                run()
                await self.settle()
        self.now = until
        await self.settle()


class Bench:
    """A scraper, its world, and all that it fed."""

    def __init__(self, options: ScrapeOptions = OPTIONS, engines: Any = ENGINES, **more: Any) -> None:
        self.world = World()
        self.fed: list[MetricsSampled | MetricsFailed] = []
        self.reports: list[tuple[str, tuple[str, ...]]] = []
        self.silences: list[tuple[str, str]] = []
        self.scraper = Scraper(
            cast(asyncio.AbstractEventLoop, self.world),
            lambda event: self.fed.append(event),
            engines,
            options,
            rng=random.Random(1),
            report=lambda endpoint_id, problems: self.reports.append((endpoint_id, problems)),
            silence=lambda endpoint_id, reason: self.silences.append((endpoint_id, reason)),
            **more,
        )

    def up(self, name: str = "a", port: int = 1, **labels: str) -> Server:
        server = self.world.servers.setdefault(port, Server())
        self.scraper.up(Endpoint(name, f"10.0.0.1:{port}", labels))
        return server

    @property
    def samples(self) -> list[tuple[float | None, float | None]]:
        return [(e.sample.waiting, e.sample.running) for e in self.fed if isinstance(e, MetricsSampled)]

    @property
    def failures(self) -> list[str]:
        return [event.reason for event in self.fed if isinstance(event, MetricsFailed)]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    await bench.scraper.close()


async def test_the_first_sample_comes_within_one_idle_interval(bench: Bench) -> None:
    bench.up().body = page(3, 2)
    await bench.world.advance(OPTIONS.idle_s)
    assert bench.samples[0] == (3.0, 2.0)
    event = bench.fed[0]
    assert isinstance(event, MetricsSampled)
    assert (event.endpoint_id, event.started) == ("a", bench.world.servers[1].asked_at[0])


async def test_one_connection_serves_all_scrapes(bench: Bench) -> None:
    server = bench.up()
    await bench.world.advance(5)
    assert len(server.asked_at) >= 24
    assert len(server.links) == 1


async def test_idle_endpoints_are_asked_each_idle_interval_and_reported_each_second(bench: Bench) -> None:
    server = bench.up()
    await bench.world.advance(10)
    gaps = [after - before for before, after in zip(server.asked_at, server.asked_at[1:], strict=False)]
    assert all(OPTIONS.idle_s - 0.011 <= gap <= OPTIONS.idle_s + 0.011 for gap in gaps)
    assert 9 <= len(bench.samples) <= 11


async def test_busy_endpoints_are_asked_fast_and_always_reported(bench: Bench) -> None:
    server = bench.up()
    server.body = page(0, 1)
    await bench.world.advance(OPTIONS.idle_s)
    before = len(bench.samples)
    await bench.world.advance(5)
    assert len(bench.samples) - before in range(48, 53)
    assert len(bench.samples) == bench.scraper.stats.ok


async def test_traffic_from_elsewhere_is_seen_within_a_quarter_of_a_second(bench: Bench) -> None:
    server = bench.up()
    await bench.world.advance(3.03)
    for step in range(1, 30):
        server.body = page(step % 2, step)
        await bench.world.advance(0.25)
        assert bench.samples[-1] == (step % 2, step)
        server.body = page()
        await bench.world.advance(1.07)
        assert bench.samples[-1] == (0.0, 0.0)


async def test_our_own_traffic_makes_it_fast_for_a_while(bench: Bench) -> None:
    server = bench.up()
    await bench.world.advance(2)
    asked = len(server.asked_at)
    bench.scraper.wake("a")
    await bench.world.advance(OPTIONS.fast_s)
    assert len(server.asked_at) > asked
    asked = len(server.asked_at)
    await bench.world.advance(0.8)
    assert len(server.asked_at) - asked in (7, 8, 9)
    await bench.world.advance(1)
    asked = len(server.asked_at)
    await bench.world.advance(1)
    assert len(server.asked_at) - asked in (4, 5, 6)
    bench.scraper.wake("nobody")


async def test_waking_again_and_again_does_not_ask_more_often(bench: Bench) -> None:
    server = bench.up()
    for _ in range(300):
        bench.scraper.wake("a")
        await bench.world.advance(0.01)
    assert len(server.asked_at) in range(28, 33)


async def test_who_was_woken_is_awake_until_its_next_scrape(bench: Bench) -> None:
    bench.up()
    await bench.world.advance(2)
    bench.scraper.wake("a")
    assert bench.scraper.awake == {"a"}
    await bench.world.advance(2 * OPTIONS.fast_s)
    assert bench.scraper.awake == set()
    bench.scraper.wake("a")
    bench.scraper.down("a")
    bench.scraper.wake("nobody")
    assert bench.scraper.awake == set()


async def test_pages_that_take_long_to_read_are_asked_for_less_often(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = count(step=0.04)  # each reading takes 40 ms
    monkeypatch.setattr("fairlead.pool.scrape.thread_time", lambda: next(clock))
    server = bench.up()
    for _ in range(200):
        await bench.world.advance(0.1)
        bench.scraper.wake("a")
    assert len(server.asked_at) in range(24, 29)
    monkeypatch.setattr("fairlead.pool.scrape.thread_time", lambda: 0.0)
    await bench.world.advance(5)
    asked = len(server.asked_at)
    await bench.world.advance(1)
    assert len(server.asked_at) - asked in (4, 5, 6)


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("reading_s", [0.046, 0.12, 0.5])
async def test_pages_that_take_long_to_read_make_no_endpoint_stale(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, reading_s: float, busy: bool
) -> None:
    clock = count(step=reading_s)
    monkeypatch.setattr("fairlead.pool.scrape.thread_time", lambda: next(clock))
    bench.up().body = page(running=int(busy))
    await bench.world.advance(30)
    heard = [event.started for event in bench.fed if isinstance(event, MetricsSampled)]
    least = OPTIONS.idle_s + OPTIONS.repeat_s  # the least that metrics.staleness may be
    assert max(after - before for before, after in pairwise(heard)) < least


async def test_intervals_stretch_at_the_maximal_rate() -> None:
    bench = Bench(ScrapeOptions(max_rate=50.0))
    servers = [bench.up(f"e{i}", i + 1) for i in range(40)]
    await bench.world.advance(2)
    before = sum(len(server.asked_at) for server in servers)
    await bench.world.advance(10)
    assert 450 <= sum(len(server.asked_at) for server in servers) - before <= 520
    await bench.scraper.close()


@pytest.mark.parametrize(
    ("schedulers", "busy_s", "idle_s"), [(1, 0.1, 0.2), (3, 0.3, 0.6), (4, 0.4, 0.8), (16, 1.0, 1.0)]
)
async def test_several_schedulers_take_turns(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, schedulers: int, busy_s: float, idle_s: float
) -> None:
    """Up to a second each; and what is known of an idle endpoint stays as fresh as with one scheduler."""
    monkeypatch.setattr("fairlead.pool.scrape.thread_time", lambda: 0.0)  # pages that take long are read less often
    bench.scraper.share(schedulers)
    busy, idle = bench.up("busy", 1), bench.up("idle", 2)
    busy.body = page(0, 1)
    await bench.world.advance(12)
    for server, pause_s in ((busy, busy_s), (idle, idle_s)):
        gaps = [after - before for before, after in zip(server.asked_at[2:], server.asked_at[3:], strict=False)]
        assert gaps and all(gap == pytest.approx(pause_s, abs=0.011) for gap in gaps)
    heard = [event.started for event in bench.fed if isinstance(event, MetricsSampled) and event.endpoint_id == "idle"]
    most_s = OPTIONS.repeat_s + OPTIONS.idle_s
    assert max(after - before for before, after in pairwise(heard)) <= most_s + 0.011
    bench.scraper.share(1)
    asked = len(busy.asked_at)
    await bench.world.advance(3)
    assert len(busy.asked_at) - asked >= 20


async def test_scrapers_share_the_maximal_rate() -> None:
    pace = Pace()
    bench, other = (Bench(ScrapeOptions(max_rate=50.0), pace=pace) for _ in range(2))
    servers = [bench.up(f"e{i}", i + 1) for i in range(10)]
    for i in range(40):
        other.up(f"e{i}", i + 1)
    await bench.world.advance(2)
    before = sum(len(server.asked_at) for server in servers)
    await bench.world.advance(10)
    assert 80 <= sum(len(server.asked_at) for server in servers) - before <= 110
    await other.scraper.close()
    assert (pace.targets, pace.fast) == (10, 0)
    await bench.scraper.close()


async def test_that_we_have_no_descriptor_left_is_no_failure_of_the_endpoint(bench: Bench) -> None:
    bench.up().unasked = True
    await bench.world.advance(10)
    events = [event for event in bench.fed if isinstance(event, MetricsFailed)]
    assert {(event.reason, event.answered) for event in events} == {("cannot connect: Too many open files", True)}


async def test_failures_back_off_up_to_the_cap_and_recover(bench: Bench) -> None:
    server = bench.up()
    server.refuse = True
    await bench.world.advance(20)
    assert set(bench.failures) == {"cannot connect: Connection refused"}
    assert 8 <= len(bench.failures) <= 18
    server.refuse = False
    bench.fed.clear()
    await bench.world.advance(OPTIONS.backoff_cap_s * 1.25 + 0.02)
    assert bench.samples
    server.status = 500
    await bench.world.advance(0.3)
    assert bench.failures == ["status 500"]
    server.status = 200
    fed = len(bench.samples)
    await bench.world.advance(0.6)
    assert len(bench.samples) > fed  # unchanged, but news after a failure


async def test_why_metrics_cannot_be_read_is_told_once_per_reason(bench: Bench) -> None:
    server = bench.up()
    await bench.world.advance(1)
    server.status = 500
    await bench.world.advance(0.3)
    assert len(bench.failures) == 1 and bench.silences == [], "one alone is common"
    server.status = 200
    await bench.world.advance(1)
    assert bench.silences == []
    server.status = 404
    await bench.world.advance(10)
    assert bench.silences == [("a", "status 404")]
    server.status, server.body = 200, b"<html>\n"
    await bench.world.advance(10)
    assert bench.silences[1:] == [("a", "an HTML page came instead of metrics")]
    server.body = page()
    await bench.world.advance(10)
    assert bench.silences[2:] == [("a", "")]


async def test_what_was_told_is_taken_back_although_the_page_is_elsewhere_by_now(bench: Bench) -> None:
    bench.up().status = 404
    await bench.world.advance(10)
    assert bench.silences == [("a", "status 404")]
    bench.up(port=2)
    await bench.world.advance(1)
    assert bench.silences[1:] == [("a", "")]


@pytest.mark.parametrize(("status", "body", "answered"), [(404, b"", True), (200, b"<html>", True), (503, b"", False)])
async def test_who_answered_something_is_there(bench: Bench, status: int, body: bytes, answered: bool) -> None:
    server = bench.up()
    server.status, server.body = status, body
    await bench.world.advance(1)
    assert {event.answered for event in bench.fed if isinstance(event, MetricsFailed)} == {answered}


async def test_waking_a_failing_endpoint_does_not_hammer_it(bench: Bench) -> None:
    bench.up().refuse = True
    for _ in range(1000):
        bench.scraper.wake("a")
        await bench.world.advance(0.01)
    assert len(bench.failures) <= 12


async def test_a_silent_server_times_out_and_is_connected_anew(bench: Bench) -> None:
    server = bench.up()
    server.silent = True
    await bench.world.advance(OPTIONS.idle_s + OPTIONS.timeout_s)
    assert bench.failures == ["no answer within 1 s"]
    assert server.open_links == 0
    server.silent = False
    await bench.world.advance(2)
    assert bench.samples == [(0.0, 0.0)] * len(bench.samples) != []
    assert (len(server.links), server.open_links) == (2, 1)


async def test_a_scrape_has_more_time_if_this_process_was_too_slow_to_see_the_page(bench: Bench) -> None:
    server = bench.up()
    await bench.world.advance(1)
    server.silent = True
    await bench.world.advance(OPTIONS.idle_s + GRID)
    bench.world.now += OPTIONS.timeout_s  # it stands still meanwhile
    await bench.world.advance(0.1)
    assert bench.failures == []
    server.links[-1].answer()
    assert len(server.links) == 1 and bench.scraper.stats.failed == 0
    await bench.world.advance(OPTIONS.idle_s + OPTIONS.timeout_s)
    assert bench.failures == ["no answer within 1 s"], "from then on, time counts as ever"
    before = len(bench.failures)
    for _ in range(10):  # it is slow all the time
        bench.world.now += 2 * OPTIONS.timeout_s
        await bench.world.advance(2 * GRID)
    assert len(bench.failures) > before, "a server that never answers is found all the same"


async def test_a_kept_connection_that_the_server_closed_is_replaced_without_a_failure(bench: Bench) -> None:
    server = bench.up()
    await bench.world.advance(1)
    server.drop_idle = True
    await bench.world.advance(3)
    assert bench.failures == []
    assert len(server.links) == 2


async def test_a_server_that_always_closes_is_a_failure_not_a_loop(bench: Bench) -> None:
    server = bench.up()
    await bench.world.advance(1)
    server.drop_idle = True
    for link in server.links:
        link.abort()
    server.links.clear()
    asked = len(server.asked_at)
    await bench.world.advance(0.35)
    assert bench.failures == ["connection closed before the page was complete"]
    assert len(server.asked_at) - asked <= 2


async def test_after_down_nothing_is_fed_and_the_connection_is_closed(bench: Bench) -> None:
    server = bench.up()
    await bench.world.advance(1)
    bench.fed.clear()
    bench.scraper.down("a")
    bench.scraper.down("a")
    await bench.world.advance(3)
    assert (bench.fed, server.open_links) == ([], 0)


async def test_down_in_the_middle_of_a_scrape(bench: Bench) -> None:
    server = bench.up()
    server.silent = True
    await bench.world.advance(0.5)
    bench.scraper.down("a")
    for link in server.links:
        link.answer()
    await bench.world.advance(3)
    assert (bench.fed, server.open_links) == ([], 0)


async def test_close_leaves_nothing_behind() -> None:
    bench = Bench()
    servers = [bench.up(f"e{i}", i + 1) for i in range(5)]
    servers[0].refuse = True
    servers[1].silent = True
    await bench.world.advance(0.9)
    await bench.scraper.close()
    bench.fed.clear()
    await bench.world.advance(5)
    assert bench.fed == []
    assert sum(server.open_links for server in servers) == 0


async def test_a_change_of_labels_keeps_the_connection_and_one_of_address_does_not(bench: Bench) -> None:
    server = bench.up()
    await bench.world.advance(1)
    bench.up(zone="b")
    await bench.world.advance(1)
    assert len(server.links) == 1
    other = bench.up(port=2)
    other.body = page(9)
    await bench.world.advance(1)
    assert server.open_links == 0
    assert bench.samples[-1] == (9.0, 0.0)


async def test_the_default_engine_is_that_of_endpoints_without_a_label() -> None:
    bench = Bench(default_engine="sglang")
    server = bench.up("s", 1)
    server.body = b"sglang:num_queue_reqs 4\nsglang:num_running_reqs 5\nsglang:token_usage 0.5\n"
    bench.up("v", 2, **{"llm-d.ai/engine-type": "vllm"})
    await bench.world.advance(1)
    assert (4, 5) in bench.samples
    assert (0, 0) in bench.samples
    assert bench.failures == []
    await bench.scraper.close()


async def test_the_engine_label_chooses_the_names(bench: Bench) -> None:
    server = bench.up("s", 1, **{"llm-d.ai/engine-type": "sglang"})
    server.body = b"sglang:num_queue_reqs 4\nsglang:num_running_reqs 1\nsglang:token_usage 0.5\n"
    await bench.world.advance(0.2)
    assert bench.samples[0] == (4.0, 1.0)
    bench.up("s", 1, **{"llm-d.ai/engine-type": "vllm"})
    await bench.world.advance(0.2)
    assert bench.failures == ["the page has no load metric of engine 'vllm'"]


async def test_an_engine_that_sleeps_fails_until_it_wakes(bench: Bench) -> None:
    server = bench.up()
    await bench.world.advance(1)
    assert bench.failures == []
    server.body = page() + b'vllm:engine_sleep_state{sleep_state="awake"} 0.0\n'
    await bench.world.advance(10)
    assert len(bench.failures) >= 3 and bench.silences == [("a", "the engine sleeps; wake it with POST /wake_up")]
    assert set(bench.failures) == {"the engine sleeps; wake it with POST /wake_up"}
    server.body = page(3) + b'vllm:engine_sleep_state{sleep_state="awake"} 1.0\n'
    await bench.world.advance(3)
    assert bench.samples[-1] == (3.0, 0.0) and bench.silences[-1] == ("a", "")


async def test_configured_names() -> None:
    bench = Bench(engines={"vllm": EngineMetrics(waiting=("depth{lane=a}",))})
    bench.up().body = b'depth{lane="a"} 7\ndepth{lane="b"} 9\n'
    await bench.world.advance(0.2)
    assert bench.samples[0] == (7.0, None)
    await bench.scraper.close()


async def test_problems_are_reported_when_they_change(bench: Bench) -> None:
    server = bench.up()
    await bench.world.advance(2)
    missing = ("kv_usage: vllm:kv_cache_usage_perc is not on the page",)
    assert bench.reports == [("a", missing)]
    server.body = page() + b"vllm:kv_cache_usage_perc 0.5\n"
    await bench.world.advance(2)
    assert bench.reports == [("a", missing), ("a", ())]


async def test_a_bad_metrics_url_is_fed_as_a_failure(bench: Bench) -> None:
    bench.scraper.up(Endpoint("x", "10.0.0.1:1", metrics_url="ftp://x/"))
    await bench.world.advance(1)
    assert bench.failures == ["'ftp://x/' is neither http nor https"]


async def test_a_consumer_that_raises_does_not_stop_the_scraping() -> None:
    world = World()
    world.servers[1] = server = Server()

    def feed(event: object) -> None:
        raise RuntimeError("broken consumer")

    scraper = Scraper(cast(asyncio.AbstractEventLoop, world), feed)
    scraper.up(Endpoint("a", "10.0.0.1:1"))
    await world.advance(5)
    assert len(server.asked_at) >= 24
    assert str(world.errors[0]["exception"]) == "broken consumer"
    await scraper.close()


async def test_many_endpoints_start_spread_out(bench: Bench) -> None:
    servers = [bench.up(f"e{i}", i + 1) for i in range(100)]
    await bench.world.advance(OPTIONS.idle_s)
    first = [server.asked_at[0] for server in servers]
    assert all(first.count(at) <= 32 for at in first)
    assert len(set(first)) >= 4


@pytest.mark.parametrize(
    ("body", "came"),
    [
        (b"\xef\xbb\xbf\n <!DOCTYPE html>", "an HTML page"),
        (b' {"error": "no"}', "JSON"),
        (b"[]", "JSON"),
        (b"\n", "an empty page"),
    ],
)
async def test_what_comes_instead_of_metrics_is_named(bench: Bench, body: bytes, came: str) -> None:
    bench.up().body = body
    await bench.world.advance(10)
    assert bench.silences == [("a", f"{came} came instead of metrics")]
    assert not bench.reports
