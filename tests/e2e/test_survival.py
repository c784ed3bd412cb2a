"""What clients see when a part of Fairlead dies, hangs or ends: the embedded gateway under 100 requests a second.

`fairlead serve` is three processes: a parent, and as its children Envoy and the scheduler. Killed or stopped is the
scheduler, then Envoy, then the parent.
"""

import asyncio
import contextlib
import json
import os
import signal
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from gw_http1 import Http1
from gw_load import Mixed, Story, under_load
from gw_messages import JSON, Ask, Broken
from gw_processes import Envoy, Serve, Upstream, get_page, sees_the_scheduler, stat
from ports import free_ports

from fairlead.gateway.envoy.config import build
from fairlead.gateway.envoy.options import Options

#: For what must happen at some time. Times are measured and printed, not judged.
PATIENCE = 30.0
RATE = 100.0
#: The gateway must use a scheduler again this long after it is back. Told in requests that went past it.
RETURN_SECONDS = 2.0
#: Requests that went past the scheduler: as Envoy counts them, and as the scheduler learns of them.
UNSCHEDULED = "cluster.all_endpoints.upstream_rq_total"
COUNTED = "fairlead_fallback_requests_total"
OWN_COUNT = "fairlead_unscheduled_requests_total"

ASK = Ask(
    fields=[("x-bench-mode", "json"), JSON],
    pieces=[b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'],
)

Note = Callable[[str], None]


async def until(happened: Callable[[], Awaitable[object]], what: str) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await happened():
            await asyncio.sleep(0.05)


def told(name: str, story: Story, **more: object) -> str:
    running = {f"streams running at {moment}": len(story.running(moment)) for moment in story.moments}
    parts = {"requests": len(story.records), "failed": sum(story.failures.values()), **running, **more}
    parts["slowest TTFT"] = f"{story.slowest_ms():.0f} ms"
    return f"{name}: " + ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in parts.items())


async def listening(address: str) -> bool:
    host, port = address.split(":")
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.close()
        return True
    return False


def config(upstream: Upstream, response_mode: str = "streamed") -> dict[str, object]:
    pool = {"endpoints": upstream.addresses, "policy": "least-requests", "seed": 1}
    return {**pool, "gateway": {"responseMode": response_mode}}


MODES = ("streamed", "none")


@pytest.fixture(scope="module", params=MODES)
def survivor(
    request: pytest.FixtureRequest, upstream: Upstream, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serve]:
    """One for all tests that it must survive."""
    child = Serve(tmp_path_factory.mktemp(str(request.param)))
    try:
        yield child.start(config(upstream, request.param))
    finally:
        child.end()


@pytest.fixture(params=MODES)
def crashing(request: pytest.FixtureRequest, upstream: Upstream, serve: Callable[..., Serve]) -> Serve:
    """One whose gateway may be killed: the next gateway counts from 0."""
    return serve(config(upstream, request.param))


@pytest.fixture
async def mortal(upstream: Upstream, serve: Callable[..., Serve]) -> Serve:
    started = serve(config(upstream))
    await sees_the_scheduler(started.gateway)
    return started


def mode(serve: Serve) -> str:
    return str(serve.config["gateway"]["responseMode"])


async def next_scheduler(serve: Serve) -> int:
    """Wait until the parent has started a scheduler; returns its id."""

    async def started() -> bool:
        return serve.scheduler_pid() > 0

    await until(started, "the start of a new scheduler")
    return serve.scheduler_pid()


@pytest.mark.slow
async def test_a_killed_scheduler_costs_no_request_and_cuts_no_stream(survivor: Serve, figures: list[str]) -> None:
    serve = survivor
    await sees_the_scheduler(serve.gateway)
    before, counted_before = await stat(serve.gateway, UNSCHEDULED), await serve.metric(OWN_COUNT)
    assert counted_before == before
    back = 0.0
    missed = 0

    async def decides() -> bool:
        with contextlib.suppress(OSError):  # its admin page is away as well
            return await serve.decisions() > 0
        return False

    async def script(note: Note) -> None:
        nonlocal back, missed
        note("the kill")
        os.kill(serve.scheduler_pid(), signal.SIGKILL)
        await asyncio.sleep(0.5)
        os.kill(await next_scheduler(serve), signal.SIGKILL)
        await next_scheduler(serve)
        await until(lambda: listening(serve.ext_proc), "a new scheduler")
        returned = time.monotonic()
        unscheduled = await stat(serve.gateway, UNSCHEDULED)
        await until(decides, "a decision after the return")
        back = time.monotonic() - returned
        missed = await stat(serve.gateway, UNSCHEDULED) - unscheduled
        await asyncio.sleep(0.5)

    story = await under_load(f"http://127.0.0.1:{serve.port}", script, RATE)
    unscheduled = await stat(serve.gateway, UNSCHEDULED) - before
    line = told(
        f"kill -9, twice ({mode(serve)})", story, unscheduled=unscheduled, scheduled_again_after=f"{back:.2f} s"
    )
    figures.append(line)
    assert story.failures == {}
    assert missed <= RETURN_SECONDS * RATE, "requests went past a scheduler that was back"
    assert len(story.running("the kill")) > 0.25 * RATE
    assert unscheduled > 0.5 * RATE, "the pool was served meanwhile"
    assert await serve.settled(60.0) == {}
    assert await serve.metric(OWN_COUNT) - counted_before == await stat(serve.gateway, UNSCHEDULED) - before, (
        "all are counted"
    )

    async def outage_is_told() -> bool:
        return "the gateway routed requests without the scheduler" in serve.said()

    await until(outage_is_told, "a line of how many there were")


@pytest.mark.slow
async def test_a_scheduler_that_hangs_costs_no_request_and_is_missed_visibly(
    survivor: Serve, figures: list[str]
) -> None:
    serve = survivor
    await sees_the_scheduler(serve.gateway)
    before, counted_before = await stat(serve.gateway, UNSCHEDULED), await serve.metric(COUNTED)
    back = 0.0
    missed = 0

    async def script(note: Note) -> None:
        nonlocal back, missed
        note("the stop")
        os.kill(serve.scheduler_pid(), signal.SIGSTOP)
        await asyncio.sleep(3.0)
        os.kill(serve.scheduler_pid(), signal.SIGCONT)
        resumed = time.monotonic()
        chosen = await stat(serve.gateway, "cluster.dst.upstream_rq_total")
        unscheduled = await stat(serve.gateway, UNSCHEDULED)

        async def chosen_again() -> bool:
            return await stat(serve.gateway, "cluster.dst.upstream_rq_total") > chosen + 5

        # What waited in its socket is decided for nobody; its return shows in requests that go where it said.
        await until(chosen_again, "scheduled requests after the stop")
        back = time.monotonic() - resumed
        missed = await stat(serve.gateway, UNSCHEDULED) - unscheduled
        await asyncio.sleep(0.5)

    story = await under_load(f"http://127.0.0.1:{serve.port}", script, RATE)
    unscheduled = await stat(serve.gateway, UNSCHEDULED) - before
    held = await serve.settled(60.0)
    counted = await serve.metric(COUNTED) - counted_before
    line = told(
        f"SIGSTOP of 3 s ({mode(serve)})", story, unscheduled=unscheduled, scheduled_again_after=f"{back:.2f} s"
    )
    figures.append(line)
    assert story.failures == {}
    assert missed <= RETURN_SECONDS * RATE, "requests went past a scheduler that was back"
    assert len(story.running("the stop")) > 0.25 * RATE
    assert unscheduled > 0.5 * RATE
    assert 0 < counted <= unscheduled
    assert "the gateway routed requests without asking the scheduler" in serve.said()
    assert held == {}, held


async def test_a_crashed_gateway_is_restarted_and_serves_again(crashing: Serve, figures: list[str]) -> None:
    serve = crashing
    await sees_the_scheduler(serve.gateway)
    first, scheduler = serve.envoy_pid(), serve.scheduler_pid()
    async with Http1(serve.port) as client:
        assert (await client.ask(ASK)).status == 200
        before = await serve.decisions()
        os.kill(first, signal.SIGKILL)
        crashed = time.monotonic()

        async def served() -> bool:
            with contextlib.suppress(Broken):
                return (await client.ask(ASK)).status == 200
            return False

        async def decided() -> bool:
            await served()
            return await serve.decisions() > before

        await until(served, "an answer after the crash")
        down = time.monotonic() - crashed
        await until(decided, "a decision after the crash")
    back = time.monotonic() - crashed
    figures.append(
        f"kill -9 of Envoy ({mode(serve)}): served again after {down:.2f} s, scheduled again after {back:.2f} s"
    )
    assert serve.envoy_pid() not in (0, first)
    assert serve.scheduler_pid() == scheduler
    assert await serve.settled() == {}


@pytest.mark.slow
async def test_sigterm_under_load_finishes_what_runs(mortal: Serve, figures: list[str]) -> None:
    serve = mortal
    children = serve.envoy_pid(), serve.scheduler_pid()
    took = 0.0

    async def script(note: Note) -> None:
        nonlocal took
        note("SIGTERM")
        serve.signal(signal.SIGTERM)
        told = time.monotonic()
        assert await serve.wait() == 0
        took = time.monotonic() - told

    story = await under_load(f"http://127.0.0.1:{serve.port}", script, RATE, workload=Mixed(chunks=60))
    in_flight = [record for record in story.records if record.sent < story.moments["SIGTERM"] < record.end]
    later = [record for record in story.records if record.sent >= story.moments["SIGTERM"]]
    refused = [record for record in later if not record.status]
    counts = {"in_flight": len(in_flight), "later": len(later), "of_them_refused": len(refused)}
    figures.append(told("SIGTERM", story, **counts, ended_after=f"{took:.2f} s"))
    assert len(in_flight) > 0.4 * RATE
    assert [record.error for record in in_flight if record.error] == []
    assert [r.error for r in later if r.status and r.error] == [], "what got an answer got all of it"
    soon = [record for record in later if record.sent < story.moments["SIGTERM"] + 0.1]
    assert [record.error for record in soon if record.error] == [], "the listener is open a little longer"
    assert {r.error for r in refused} <= {"connect_econnrefused", "closed_before_response", "reset"}
    assert not any(os.path.exists(f"/proc/{pid}") for pid in children)
    assert serve.said().count("a second signal") == 1


@pytest.mark.slow
async def test_a_file_that_cannot_be_used_does_not_end_the_gateway(mortal: Serve) -> None:
    """The scheduler dies while its configuration on disk is broken, as one that is running tolerates."""
    serve = mortal
    good = serve.file.read_text()
    serve.file.write_text("nonsense: 1\n")
    os.kill(serve.scheduler_pid(), signal.SIGKILL)
    async with Http1(serve.port) as client:

        async def decides() -> bool:
            assert (await client.ask(ASK)).status == 200
            with contextlib.suppress(OSError):
                return await serve.decisions() > 0.0
            return False

        await until(decides, "a decision beside the broken file")

        async def troubled() -> bool:
            return 'fairlead_trouble{what="configuration"} 1' in await serve.page("/metrics")

        async def mended() -> bool:
            return not await troubled()

        await until(troubled, "the trouble with the file")
        serve.file.write_text(good)
        await until(mended, "the end of the trouble")


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["endpoints: [", None], ids=["unreadable", "removed"])
async def test_a_scheduler_that_dies_beside_a_broken_pool_file_starts_again(
    broken: str | None, upstream: Upstream, serve: Callable[..., Serve], tmp_path: Path
) -> None:
    """The gateway goes on with the endpoints that it has, until the file is mended."""
    pool, tokens = tmp_path / "pool.yaml", tmp_path / "tokens"
    good = json.dumps({"endpoints": upstream.addresses})
    pool.write_text(good)
    tokens.write_text("secret")
    at = serve(config(upstream) | {"endpoints": {"file": str(pool)}, "admin": {"tokenFile": str(tokens)}})
    tokens.write_text("")
    pool.write_text(broken) if broken else pool.unlink()
    killed = at.scheduler_pid()
    os.kill(killed, signal.SIGKILL)

    async def readyz() -> tuple[int, str]:
        with contextlib.suppress(OSError):
            return await asyncio.to_thread(get_page, at.admin + "/readyz")
        return 0, ""

    async def waits() -> bool:
        return "no endpoints are known here" in (await readyz())[1]

    async def is_ready() -> bool:
        return (await readyz())[0] == 200

    await until(waits, "the next scheduler")
    assert at.scheduler_pid() != killed
    async with Http1(at.port) as client:
        assert (await client.ask(ASK)).status == 200
        request = urllib.request.Request(at.admin + "/metrics", headers={"authorization": "Bearer secret"})
        assert (await asyncio.to_thread(get_page, request))[0] == 401, "nobody gets in"
        pool.write_text(good)
        tokens.write_text("secret")
        await until(is_ready, "the mended files")
        assert (await asyncio.to_thread(get_page, request))[0] == 200
        assert (await client.ask(ASK)).status == 200


@pytest.mark.slow
async def test_a_gateway_that_fails_closed_waits_for_the_next_scheduler(
    upstream: Upstream, serve: Callable[..., Serve], envoy: Callable[..., Envoy], figures: list[str]
) -> None:
    """It has nobody else to ask, and serves nothing unscheduled: requests wait. With `response_mode` none, for a stream
    that waits for its first byte would be lost with the scheduler that watches for it."""
    picker = serve(config(upstream) | {"gateway": "none"})
    (port,) = free_ports(1)
    asked = picker.ext_proc
    options = Options(
        port=port,
        ext_proc=asked,
        als=asked,
        endpoints=tuple(upstream.addresses),
        fail_open=False,
        response_mode="none",
    )
    gateway = await asyncio.to_thread(envoy, build(options))
    await sees_the_scheduler(gateway.admin)

    async def script(note: Note) -> None:
        note("the kill")
        picker.signal(signal.SIGKILL)
        await picker.wait()
        await asyncio.sleep(0.3)
        await asyncio.to_thread(picker.again)
        note("the start")
        await asyncio.sleep(1.0)

    for _ in range(3):
        story = await under_load(f"http://127.0.0.1:{port}", script, RATE)
        # Requests wait for about four seconds. A start takes one or two, but more where other tests take the cores.
        if story.moments["the start"] - story.moments["the kill"] < 3.4:
            break
    else:
        pytest.skip("this machine is too busy: three starts of the scheduler took more than 3.4 s")
    figures.append(told("kill -9, fail-closed, started again", story))
    assert story.failures == {}
    assert len(story.running("the kill")) > 0.25 * RATE
    assert await stat(gateway.admin, UNSCHEDULED) == 0


@pytest.mark.slow
async def test_a_scheduler_that_takes_over_listens_where_the_gateway_asks(mortal: Serve) -> None:
    """The file tells another port, which the running scheduler has refused: it takes a restart of all."""
    serve = mortal
    (other,) = free_ports(1)
    changed = json.loads(serve.file.read_text())
    changed["extProc"]["port"] = other
    serve.file.write_text(json.dumps(changed))

    async def refused() -> bool:
        return "$.extProc.port" in serve.said()

    await until(refused, "a word about the port")
    killed = serve.scheduler_pid()
    os.kill(killed, signal.SIGKILL)

    async def another() -> bool:
        return serve.scheduler_pid() not in (0, killed)

    await until(another, "the next scheduler")
    async with Http1(serve.port) as client:

        async def decides() -> bool:
            assert (await client.ask(ASK)).status == 200
            with contextlib.suppress(OSError):
                return await serve.decisions() > 0
            return False

        await until(decides, "a decision")
    assert not await listening(f"127.0.0.1:{other}")


async def test_a_health_watch_does_not_hold_up_the_end(upstream: Upstream, serve: Callable[..., Serve]) -> None:
    """Clients that check health by `Watch` keep it open for ever: it is told that the server ends."""
    grpc = pytest.importorskip("grpc", reason="needs grpcio: pip install 'fairlead[grpc]'")
    started = serve(config(upstream) | {"gateway": "none"})
    async with grpc.aio.insecure_channel(started.ext_proc) as channel:
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
        assert await watch.read() == b"\x08\x01"
        started.signal(signal.SIGTERM)
        assert await watch.read() == b"\x08\x02"
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await watch.read()
    assert "the server ends" in ended.value.details()
    assert await started.wait() == 0


async def test_nothing_survives_a_killed_parent(mortal: Serve) -> None:
    serve = mortal
    children = serve.envoy_pid(), serve.scheduler_pid()
    assert all(children)
    shown = Path(f"/proc/{serve.pid}/cmdline").read_text().replace("\0", " ")
    assert " fairlead serve /" in shown, "ps and pkill -f do not find the parent"
    serve.signal(signal.SIGKILL)
    await serve.wait()

    async def gone() -> bool:
        return not any(os.path.exists(f"/proc/{pid}") for pid in children)

    await until(gone, "the end of both children")
