"""A scheduler in another process decides for requests that wait in Fairlead: `fairlead serve`, its Envoy, `stub`.

The servers are as slow as real ones; one and a half times as much is sent as they can compute, so that most requests
wait. The scheduler is killed meanwhile, and started again.
"""

import asyncio
import json
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from gw_http1 import Http1
from gw_messages import JSON, Ask
from gw_processes import Child, Serve, Stub, sees_the_scheduler
from gw_schedulers import SchedulerProcess, build

MODEL = "Qwen/Qwen3-32B"
SERVERS = 3
TOKENS = 3000
#: A server of the preset computes such a prompt in 0.145 s, and steps beside it.
RATE = 1.5 * SERVERS / 0.15
#: Seconds of load before the kill, without a scheduler, and after its return.
ALIVE, DEAD, BACK = 2.5, 2.5, 2.5


class Answer(NamedTuple):
    status: int
    sent: float
    ended: float


async def ask(at: Serve, number: int) -> Answer:
    prompt = Random(number).choices(range(1000, 9000), k=TOKENS)  # fast: this must keep the pace on a busy machine
    body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 2, "stream": True}).encode()
    client = Http1(at.port)
    sent = time.monotonic()
    try:
        reader = await client.begin(Ask(path="/v1/completions", fields=[JSON], pieces=[body]))
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        if status == 200:
            await reader.readuntil(b"[DONE]")
        return Answer(status, sent, time.monotonic())
    finally:
        client.abort()


async def load(at: Serve, script: Callable[[], Any]) -> list[Answer]:
    """Steady arrivals for as long as the script takes; returns when all are answered."""
    playing = asyncio.ensure_future(script())
    begun, tasks = time.monotonic(), list[asyncio.Task[Answer]]()
    while not playing.done():
        await asyncio.sleep(max(begun + len(tasks) / RATE - time.monotonic(), 0.0))
        tasks.append(asyncio.create_task(ask(at, len(tasks))))
    await playing
    return list(await asyncio.gather(*tasks))


class Decisions:
    """Those of a scheduler. It shows the last 200 only: to be asked every few seconds."""

    def __init__(self, at: Serve) -> None:
        self._at = at
        self._known: set[int] = set()

    async def new(self) -> Counter[tuple[str, bool]]:
        """(who decided, whether it had waited) of those since the last call."""
        found = json.loads(await self._at.page("/debug/decisions?last=200"))["decisions"]
        news = [one for one in found if one["request_id"] not in self._known and one["outcome"] == "routed"]
        self._known |= {one["request_id"] for one in news}
        return Counter((one["policy"], one["queued_ms"] > 0) for one in news)


@pytest.mark.slow
async def test_it_decides_for_those_that_waited_and_its_death_costs_none(
    tmp_path: Path,
    stub: Callable[..., Stub],
    serve: Callable[..., Serve],
    ending: Callable[[Child], Child],
    figures: list[str],
) -> None:
    scheduler = SchedulerProcess("python", build("python", tmp_path), tmp_path)
    ending(scheduler)
    try:
        await asyncio.to_thread(scheduler.again)
        servers = await asyncio.to_thread(stub, SERVERS, "--time-ratio", "1")
        at = await asyncio.to_thread(
            serve,
            {
                "endpoints": servers.addresses,
                "flowControl": {"ttl": "60s"},
                "scheduler": {"address": scheduler.address, "budget": 0.1},
            },
        )
        await sees_the_scheduler(at.gateway)
        decisions = Decisions(at)
        seen: list[Counter[tuple[str, bool]]] = []

        async def script() -> None:
            await asyncio.sleep(ALIVE)
            seen.append(await decisions.new())
            scheduler.signal(signal.SIGKILL)
            await scheduler.wait()
            await asyncio.sleep(DEAD)
            seen.append(await decisions.new())
            await asyncio.to_thread(scheduler.again)
            await asyncio.sleep(BACK)
            seen.append(await decisions.new())

        answers = await load(at, script)
        alive, dead, back = seen
        counts = {name: dict(sorted((f"{by}{' late' * late}", n) for (by, late), n in phase.items()))
                  for name, phase in (("alive", alive), ("dead", dead), ("back", back))}  # fmt: skip
        figures.append(f"scheduler and flow control: {len(answers)} requests, decided by {counts}")
        assert Counter(answer.status for answer in answers) == {200: len(answers)}
        assert alive["scheduler", True] > ALIVE * RATE / 4, "most wait, and it decides for them"
        assert alive["scheduler", True] + alive["scheduler", False] > 0.9 * sum(alive.values())
        assert dead["cost-model", True] > DEAD * RATE / 4, "late binding decides while there is none"
        assert back["scheduler", True] > BACK * RATE / 4
        queued = await at.metric("fairlead_scheduler_requests_total", event="queued")
        assert queued >= alive["scheduler", True] + back["scheduler", True]
        assert await at.settled() == {}, "the ledger is empty again"
    finally:
        scheduler.end()
