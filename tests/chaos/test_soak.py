"""Hours of ordinary traffic, with clients that leave and servers that fail among it: nothing may grow.

`make soak-hours HOURS=8`. `FAIRLEAD_SOAK_HOURS` below a sixth is too short for slopes, which are then not judged.
"""

import asyncio
import contextlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from ch_slopes import PARTS, Slope, slope
from ch_trial import resident
from gw_processes import Serve

from fairlead.core.headers import FAIRNESS_HEADERS
from fairlead.lab.load.runner import run
from fairlead.lab.load.spec import Options
from fairlead.lab.load.workload import Call, Poisson, text

HOURS = float(os.environ.get("FAIRLEAD_SOAK_HOURS", "0.0012"))
JUDGED_FROM_HOURS = 1 / 6
RATE = float(os.environ.get("FAIRLEAD_SOAK_RATE", "50"))
#: Of the load: clients that hang up in the middle, and requests that model servers refuse.
LEAVE, REFUSED = 0.04, 0.04
#: Values per gauge, at least; a minute apart at most.
SAMPLES = 240
#: One load run after the other, so that their records do not pile up.
TURN_S = 60.0
GROUPS, QUESTIONS, TENANTS, MODELS = 500, 20, 10, 2
#: By what each gauge may step once: memory is taken in large pieces, a connection comes and goes, and the first rare
#: event of its kind makes a histogram of two dozen series.
GRAINS = {"MiB": 1.0, "descriptors": 2.0, "series": 25.0, "leases": 0.5}
Starting = Callable[..., Awaitable[Serve]]


class Visitors:
    """Conversations of many tenants over a limited number of prompts, so that what is remembered of them is soon
    complete. `settings`: of the benchmark upstream."""

    def __init__(self, seed: int, settings: str = "") -> None:
        self._chance = Random(seed)
        self._settings = settings

    def calls(self) -> Iterator[Call]:
        chance = self._chance
        while True:
            group, question = chance.randrange(GROUPS), chance.randrange(QUESTIONS)
            stream = chance.random() < 0.5
            settings = "mode=sse;chunks=16;interval-ms=20;delay-ms=30" if stream else "mode=json;delay-ms=20"
            body = {
                "model": f"m{group % MODELS}",
                "messages": [
                    {"role": "system", "content": text(300, Random(group)).decode()},
                    {"role": "user", "content": text(40, Random(f"{group}/{question}")).decode()},
                ],
                "stream": stream,
                "x-bench": self._settings or settings,
            }
            tenant = {FAIRNESS_HEADERS[0]: f"tenant-{group % TENANTS}"}
            yield Call(body=json.dumps(body).encode(), headers=tenant)


class Gauges:
    """What must not grow, as it was at each look."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self.values: dict[str, list[float]] = {}
        #: Series by family, at each look.
        self.families: list[Counter[str]] = []

    async def look(self) -> None:
        serve = self._serve
        page = (await serve.page("/metrics")).splitlines()
        self.families.append(Counter(re.split("[{ ]", line, maxsplit=1)[0] for line in page if line[:1] != "#"))
        now = {
            "series": float(self.families[-1].total()),
            "leases": sum(float(line.rsplit(" ", 1)[1]) for line in page if line.startswith("fairlead_leases ")),
        }
        for name, pid in (("scheduler", serve.scheduler_pid()), ("Envoy", serve.envoy_pid()), ("parent", serve.pid)):
            now[f"{name} MiB"] = resident(pid)
            now[f"{name} descriptors"] = float(len(list(Path(f"/proc/{pid}/fd").iterdir())))
        for name, value in now.items():
            self.values.setdefault(name, []).append(value)

    def new_series(self) -> str:
        """Families that have more of them than after the first half."""
        more = self.families[-1] - self.families[len(self.families) // 2]
        return ", ".join(f"{name} +{count}" for name, count in more.most_common(8))

    def slopes(self, hours: float) -> dict[str, Slope]:
        return {n: slope(values, hours, GRAINS[n.rpartition(" ")[2]]) for n, values in sorted(self.values.items())}


async def traffic(target: str, seed: int, seconds: float) -> tuple[int, dict[str, int]]:
    """How many were sent, and errors that are nobody's wish."""
    options = Options(duration_s=seconds, timeout_s=30.0, time_limit_s=seconds + 40.0, gaps=False)
    short = Options(duration_s=seconds, timeout_s=0.15, time_limit_s=seconds + 40.0, gaps=False)
    refused = "mode=early;status=500"
    results = await asyncio.gather(
        run(target, Visitors(seed), Poisson(RATE * (1 - LEAVE - REFUSED), seed), options),
        run(target, Visitors(seed + 1, "mode=sse;chunks=50;interval-ms=20"), Poisson(RATE * LEAVE, seed + 1), short),
        run(target, Visitors(seed + 2, refused), Poisson(RATE * REFUSED, seed + 2), options),
    )
    errors: dict[str, int] = {}
    for result, wanted in zip(results, ("", "timeout", "status_500"), strict=True):
        for record in result.records:
            if record.error != wanted:
                errors[record.error or "answered"] = errors.get(record.error or "answered", 0) + 1
    return sum(len(result.records) for result in results), errors


async def test_nothing_grows(own: Starting, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    serve = await own(
        {
            "journal": {"path": str(tmp_path / "journal"), "maxBytes": "16Mi", "segmentBytes": "2Mi"},
            "shadows": {"policies": [{"policy": "round-robin", "name": "rr"}]},
            "inspect": {"usageSampling": 0.1},
            "flowControl": {},
        }
    )
    gauges, seconds = Gauges(serve), HOURS * 3600
    pids = serve.scheduler_pid(), serve.envoy_pid()
    requests, errors = 0, dict[str, int]()
    began = time.monotonic()

    async def watch() -> None:
        for number in range(1, 1 << 30):
            await gauges.look()
            due = began + number * min(seconds / SAMPLES, 60.0)
            await asyncio.sleep(due - time.monotonic())

    watching = asyncio.create_task(watch())
    try:
        turn = 0
        while (left := seconds - (time.monotonic() - began)) > 0:
            sent, wrong = await traffic(f"http://127.0.0.1:{serve.port}", 3 * turn, min(left, TURN_S))
            turn, requests = turn + 1, requests + sent
            errors = {name: errors.get(name, 0) + wrong.get(name, 0) for name in {*errors, *wrong}}
            assert not watching.done() or watching.result() is None
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    hours = (time.monotonic() - began) / 3600
    found = gauges.slopes(hours)
    with capsys.disabled():
        print(table(gauges, found, f"{requests} requests in {hours:.3f} h; errors: {errors or 'none'}"))
    if file := os.environ.get("FAIRLEAD_SOAK_JSON"):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(json.dumps({"hours": hours, "requests": requests, "values": gauges.values}))
    assert errors == {}
    assert (serve.scheduler_pid(), serve.envoy_pid()) == pids, "nobody died"
    assert await serve.settled() == {}
    growing = {
        name: f"{each.per_hour:+.3g} ± {each.band:.3g} per hour" for name, each in found.items() if not each.zero
    }
    assert hours < JUDGED_FROM_HOURS or growing == {}


def table(gauges: Gauges, found: dict[str, Slope], said: str) -> str:
    lines = [f"\n{said}", f"{'':24}{'first':>10}{'half':>10}{'last':>10}{'per hour':>12}{'±':>10}"]
    for name, each in found.items():
        values = gauges.values[name]
        told = "" if each.zero or HOURS < JUDGED_FROM_HOURS else "  grows" if each.per_hour > 0 else "  falls"
        lines.append(
            f"{name:24}{values[0]:10.1f}{values[len(values) // 2]:10.1f}{values[-1]:10.1f}"
            f"{each.per_hour:12.3f}{each.band:10.3f}{told}"
        )
    return "\n".join((*lines, f"new series in the second half: {gauges.new_series() or 'none'}"))


def noise(seed: int) -> list[float]:
    chance = Random(seed)
    return [100 + chance.gauss(0, 0.5) for _ in range(SAMPLES)]


@pytest.mark.parametrize("seed", range(5))
def test_a_leak_is_found_and_noise_is_none(seed: int) -> None:
    level = noise(seed)
    assert slope(level, 1.0, 1.0).zero
    leaking = [value + 6.0 * i / SAMPLES for i, value in enumerate(level)]
    found = slope(leaking, 1.0, 1.0)
    assert not found.zero
    assert abs(found.per_hour - 6.0) < 1.0


def test_a_warm_up_and_a_single_small_step_are_no_leaks() -> None:
    warming = [min(i, SAMPLES // 3) + value for i, value in enumerate(noise(0))]
    assert slope(warming, 1.0, 1.0).zero
    stepping = [(i > 0.75 * SAMPLES) * 0.6 for i in range(SAMPLES)]
    assert slope(stepping, 1.0, 1.0).zero
    assert not slope([10 * value for value in stepping], 1.0, 1.0).zero


def test_few_values_have_no_slope() -> None:
    with pytest.raises(ValueError, match="at least"):
        slope([1.0] * PARTS, 1.0, 1.0)
