"""A scheduler in another process decides for the real gateway: in Python, Go and JavaScript; alive, killed and hung."""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest
from gw_load import Story, under_load
from gw_processes import Child, Serve, Upstream, sees_the_scheduler
from gw_schedulers import KINDS, SchedulerProcess, build

from fairlead.server.sdk.check import CHECKS, Checker

RATE = 80.0
#: How many are late depends on more than the rate: at this one a fifth of a second's requests is a bound.
HANG_RATE = 150.0
Note = Callable[[str], None]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def command(kind: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return build(kind, tmp_path_factory.mktemp(kind))


@pytest.fixture
def scheduler(
    kind: str, command: list[str], tmp_path_factory: pytest.TempPathFactory, ending: Callable[[Child], Child]
) -> Iterator[SchedulerProcess]:
    child = SchedulerProcess(kind, command, tmp_path_factory.mktemp("scheduler"))
    ending(child)
    try:
        yield child.again()
    finally:
        child.end(gently=False)


async def until(happened: Callable[[], Awaitable[object]], what: str) -> None:
    async with asyncio.timeout(60):
        while not await happened():
            await asyncio.sleep(0.02)


async def answered(serve: Serve) -> float:
    return await serve.metric("fairlead_scheduler_requests_total", event="answered")


def told(name: str, story: Story, **more: object) -> str:
    parts = {"requests": len(story.records), "failed": sum(story.failures.values()), **more}
    parts["slowest TTFT"] = f"{story.slowest_ms():.0f} ms"
    return f"{name}: " + ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in parts.items())


@pytest.mark.slow
async def test_it_keeps_the_contract(scheduler: SchedulerProcess) -> None:
    results = await Checker(scheduler.address, budget_ms=5000.0).run()
    assert [(result.name, result.detail) for result in results if not result.ok] == []
    assert len(results) == len(CHECKS)


@pytest.mark.slow
async def test_killing_and_starting_it_again_costs_no_request(
    kind: str, scheduler: SchedulerProcess, upstream: Upstream, serve: Callable[..., Serve], figures: list[str]
) -> None:
    gateway = serve({"endpoints": upstream.addresses, "scheduler": {"address": scheduler.address, "budget": 0.05}})
    await sees_the_scheduler(gateway.gateway)

    async def connected() -> bool:
        return await gateway.metric("fairlead_scheduler_connected") == 1

    await until(connected, "the connection")
    back = dead = 0.0

    async def decided() -> bool:
        return await answered(gateway) > 0.5 * RATE

    async def script(note: Note) -> None:
        nonlocal back, dead
        await until(decided, "half a second's decisions")
        note("the kill")
        scheduler.signal(signal.SIGKILL)
        await scheduler.wait()
        await asyncio.sleep(1.0)
        dead = await answered(gateway)
        await asyncio.to_thread(scheduler.again)
        returned = time.monotonic()

        async def decides() -> bool:
            return await answered(gateway) > dead + 5

        await until(decides, "decisions after the return")
        back = time.monotonic() - returned
        await asyncio.sleep(0.3)

    story = await under_load(f"http://127.0.0.1:{gateway.port}", script, RATE)
    fell = await gateway.metric("fairlead_scheduler_fallbacks_total")
    figures.append(told(f"scheduler in {kind} killed", story, decided_here=int(fell), back_after=f"{back:.2f} s"))
    assert story.failures == {}
    assert fell >= 0.5 * RATE, "the built-in policy decided meanwhile"
    assert await gateway.settled(60.0) == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["python"], indirect=True)
async def test_one_that_hangs_is_left_alone_and_taken_back(
    scheduler: SchedulerProcess, kind: str, upstream: Upstream, serve: Callable[..., Serve], figures: list[str]
) -> None:
    gateway = serve({"endpoints": upstream.addresses, "scheduler": {"address": scheduler.address, "budget": 0.05}})
    await sees_the_scheduler(gateway.gateway)
    late = 0.0

    async def script(note: Note) -> None:
        nonlocal late
        scheduler.signal(signal.SIGSTOP)
        await asyncio.sleep(2.0)
        opened = await gateway.metric("fairlead_scheduler_breaker_opened_total")
        assert opened >= 1
        late = await gateway.metric("fairlead_scheduler_fallbacks_total", reason="deadline")
        before = await answered(gateway)
        scheduler.signal(signal.SIGCONT)

        async def decides() -> bool:
            return await answered(gateway) > before + 5

        await until(decides, "decisions after it went on")

    story = await under_load(f"http://127.0.0.1:{gateway.port}", script, HANG_RATE)
    figures.append(told(f"scheduler in {kind} hung", story, late=int(late)))
    assert story.failures == {}
    assert 0 < late < 0.2 * HANG_RATE, "only the first few, and one probe per cooldown, wait for it"
    assert await gateway.settled(60.0) == {}
