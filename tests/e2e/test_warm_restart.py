"""A restart forgets nothing: `fairlead serve` with the real Envoy and four model servers, whose caches stay.

Hit rates are what the model servers report of their caches, in hundred requests before a restart and after it.
"""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gw_hit_rate import Conversations
from gw_processes import Serve, Stub, sees_the_scheduler

from fairlead.lab.simulator.journal import one_run
from fairlead.lab.simulator.replay import replay
from fairlead.server.journal.records import EVENTS

PATIENCE = 60.0
MEASURED = 100
#: Points of the hit rate that a restart may cost.
COST = 2.0


async def scheduled(serve: Serve) -> Serve:
    await sees_the_scheduler(serve.gateway)
    return serve


async def stopped(serve: Serve) -> None:
    serve.signal(signal.SIGTERM)
    assert await serve.wait() == 0


async def written_since(serve: Serve) -> None:
    """Until all that was learned so far is on the disk."""
    async with asyncio.timeout(PATIENCE):
        before = await serve.metric("fairlead_state_writes_total")
        while await serve.metric("fairlead_state_writes_total") < before + 2:
            await asyncio.sleep(0.05)


async def next_scheduler(serve: Serve, killed: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while serve.scheduler_pid() in (0, killed):
            await asyncio.sleep(0.02)
        while serve.said().count("restored ") < 2:
            await asyncio.sleep(0.02)
    await scheduled(serve)


def config(stub: Stub, state: dict[str, Any] | None, journal: Path) -> dict[str, Any]:
    endpoints = [{"name": f"e{at}", "address": address} for at, address in enumerate(stub.addresses)]
    settings = {"endpoints": endpoints, "seed": 1, "journal": {"path": str(journal), "flush": 0.05}}
    return settings if state is None else {**settings, "state": state}


@pytest.mark.slow
async def test_the_hit_rate_is_that_of_before(
    stub: Callable[..., Stub], serve: Callable[..., Serve], tmp_path: Path, figures: list[str]
) -> None:
    """Ended and started again; its scheduler killed; and beside it one that keeps nothing."""
    servers, talk, journal = stub(4, "--model", "tiny"), Conversations(), tmp_path / "journal"
    child = await scheduled(serve(config(servers, {"interval": "200ms"}, journal)))
    await talk.hit_rate(child.port, 200)
    before = await talk.hit_rate(child.port)
    await stopped(child)
    child.again()
    assert "restored " in await child.page("/readyz")
    ended = await talk.hit_rate((await scheduled(child)).port)
    await written_since(child)
    killed = child.scheduler_pid()
    os.kill(killed, signal.SIGKILL)
    await next_scheduler(child, killed)
    after_kill = await talk.hit_rate(child.port)
    await stopped(child)

    run = one_run(journal)
    kinds = [kind for kind, _, _ in run.items() if kind in EVENTS]
    assert "Restored" in kinds
    again = await asyncio.to_thread(replay, run)
    assert again.exact
    assert again.identical
    assert again.replayed.decisions >= MEASURED

    child.config["state"] = {"enabled": False}
    child.again()
    cold = await talk.hit_rate((await scheduled(child)).port)
    figures.append(
        f"hit rate before a restart {before:.1f} %, after it {ended:.1f} %, after a kill {after_kill:.1f} %, "
        f"after a restart without the state {cold:.1f} %"
    )
    assert ended > before - COST
    assert after_kill > before - COST
    assert cold < before - COST, "nothing would be proven"
