"""Parts that die or hang under load. tests/e2e/test_survival.py looks closer, and judges no times."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable

import pytest
from ch_site import ModelServer
from ch_trial import LASTS_S, RATE, Bounds, Row, trial
from gw_processes import Serve

Judge = Callable[[Row], None]
#: A dead Envoy takes what it was serving with it, and what comes until its successor listens.
ENVOY_AWAY_S = 1.0
#: Of two it takes what it was serving: about 55 of 200 a second that take half a second, half of them there.
CONNECTED = 60
#: From the look at what a server has until its death has been noticed.
NOTICED_S = 0.5
#: Longer than a model server may be silent.
HUNG_S = 3.0
Starting = Callable[..., Awaitable[Serve]]


async def until(happened: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30.0):
        while not await happened():
            await asyncio.sleep(0.02)


async def decides(serve: Serve) -> bool:
    with contextlib.suppress(OSError):  # its admin page is away as well
        return await serve.decisions() > 0
    return False


async def stopped_for(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.long_form
async def test_the_scheduler_dies(site: Serve, judged: Judge) -> None:
    async def happens() -> None:
        for _ in range(3):
            os.kill(site.scheduler_pid(), signal.SIGKILL)
            await asyncio.sleep(LASTS_S / 3)
        await until(lambda: decides(site))

    judged(await trial("scheduler: SIGKILL, three times", site, happens))


@pytest.mark.long_form
async def test_the_scheduler_hangs(site: Serve, judged: Judge) -> None:
    async def happens() -> None:
        await stopped_for(site.scheduler_pid(), LASTS_S)

    # Until Envoy's health check has noticed, each request waits a second for an answer.
    judged(await trial("scheduler: SIGSTOP", site, happens, Bounds(p99_ms=1500.0)))


@pytest.mark.long_form
@pytest.mark.parametrize("envoys", [1, 2])
async def test_a_gateway_dies(own: Starting, judged: Judge, envoys: int) -> None:
    """Of two, who is not connected to the dead one notices nothing."""
    site = await own({"gateway": {"paths": [], "envoys": envoys}})

    async def happens() -> None:
        first = site.envoy_pid()
        os.kill(first, signal.SIGKILL)

        async def another() -> bool:
            running = site.envoy_pids()
            return len(running) == envoys and first not in running

        await until(another)
        await asyncio.sleep(LASTS_S)

    away = int(ENVOY_AWAY_S * RATE) if envoys == 1 else CONNECTED
    bounds = Bounds(
        failed=away, cut=away, polite_failed=away // 10, p99_times=None if envoys == 1 else 3.0, p99_ms=250.0
    )
    judged(await trial(f"one of {envoys} Envoys: SIGKILL", site, happens, bounds))


async def test_the_gateway_hangs(site: Serve, judged: Judge) -> None:
    """Model servers are not blamed for what waits in it."""

    async def happens() -> None:
        await stopped_for(site.envoy_pid(), HUNG_S)
        await asyncio.sleep(LASTS_S)

    # How soon it catches up is up to the machine.
    row = await trial(f"Envoy: SIGSTOP of {HUNG_S:g} s", site, happens, Bounds(p99_times=None))
    blamed = sum("an endpoint seems to hang" in line for line in site.said().splitlines())
    if blamed:
        row.problems.append(f"model servers are taken for hung, {blamed} times")
    judged(row)


async def test_a_model_server_dies(site: Serve, servers: list[ModelServer], judged: Judge) -> None:
    held = 0

    async def happens() -> None:
        nonlocal held
        address = f"127.0.0.1:{servers[0].port}"
        held = next(each["leases"] for each in await site.endpoints() if each["address"] == address)
        servers[0].end(gently=False)
        await asyncio.sleep(LASTS_S)
        await asyncio.to_thread(servers[0].again)

    # What it was streaming is lost with it: about 17, a quarter of half a second's requests, and more where the machine
    # is behind. A quarter of those that come meanwhile go there too, until it is known to be gone.
    row = await trial("model server: SIGKILL", site, happens, Bounds(cut=int(RATE)))
    most = held + int(RATE / 4 * NOTICED_S)
    row.note = f"it had {held}"
    if row.cut > most:
        row.problems.append(f"answers cut: {row.cut}, at most {most}")
    judged(row)


@pytest.mark.long_form
async def test_a_model_server_hangs(site: Serve, servers: list[ModelServer], judged: Judge) -> None:
    async def happens() -> None:
        await stopped_for(servers[1].pid, LASTS_S)

    # What was sent there, and is no stream, waits for it. After two seconds nothing more is sent.
    judged(await trial("model server: SIGSTOP", site, happens, Bounds(p99_ms=LASTS_S * 1000 + 1000)))
