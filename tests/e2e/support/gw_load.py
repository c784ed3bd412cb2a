"""Steady load through a gateway while something happens to it, and what became of every request."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator

from fairlead.lab.load.runner import run
from fairlead.lab.load.spec import Options, Record, RunResult
from fairlead.lab.load.workload import Call, Paced
from fairlead.lab.workload.arrivals import constant

_QUESTION = "What does a fairlead do on a ship? " * 40


class Mixed:
    """Streams and plain answers in turn. Settings of the benchmark upstream; times in milliseconds."""

    def __init__(self, chunks: int = 40, interval_ms: int = 25, prefill_ms: int = 50, json_ms: int = 20) -> None:
        stream = f"mode=sse;chunks={chunks};interval-ms={interval_ms};delay-ms={prefill_ms}"
        self._bodies = (_chat(stream, True), _chat(f"mode=json;delay-ms={json_ms}", False))

    def calls(self) -> Iterator[Call]:
        number = 0
        while True:
            yield Call(body=self._bodies[number % 2], group=number % 2)  # the group tells streams (0) from answers (1)
            number += 1


def _chat(settings: str, stream: bool) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": _QUESTION}], "stream": stream, "x-bench": settings}
    return json.dumps(body).encode()


class Story:
    """A run under load, and the moments that mattered (CLOCK_MONOTONIC seconds)."""

    def __init__(self, result: RunResult, moments: dict[str, float]) -> None:
        self.records = result.records
        self.moments = moments

    @property
    def failures(self) -> Counter[str]:
        return Counter(record.error for record in self.records if record.error)

    def running(self, moment: str, streams: bool = True) -> list[Record]:
        """Requests whose response was running (or, not `streams`, that were in flight) at that moment."""
        at = self.moments[moment]
        return [r for r in self.records if (r.first_byte if streams else r.sent) < at < r.end and r.first_byte]

    def slowest_ms(self) -> float:
        return max(record.ttft() for record in self.records) * 1000


Script = Callable[[Callable[[str], None]], Awaitable[None]]


async def under_load(
    target: str, script: Script, rate: float = 100.0, before_s: float = 1.3, workload: Mixed | None = None
) -> Story:
    """Send `rate` requests a second from `before_s` before the script starts until it is over, and wait for their ends.

    The script is called with a function that notes the present moment under a name.
    """
    moments: dict[str, float] = {}
    over = False

    def note(name: str) -> None:
        moments[name] = time.monotonic()

    class Arrivals:
        def offsets(self) -> Iterator[float]:
            for offset in Paced(constant(rate)).offsets():
                if over:
                    return
                yield offset

    async def play() -> None:
        nonlocal over
        try:
            await asyncio.sleep(before_s)
            await script(note)
        finally:
            over = True

    options = Options(duration_s=120.0, timeout_s=30.0, time_limit_s=150.0, gaps=False)
    playing = asyncio.create_task(play())
    result = await run(target, workload or Mixed(), Arrivals(), options)
    await playing
    return Story(result, moments)
