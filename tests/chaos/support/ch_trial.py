"""One trial: steady load and a polite client beside it, something that happens to them, and what became of both.

`FAIRLEAD_CHAOS=full` is the long form: more seconds, whole sizes, a look at memory one minute later, and judged times.
The short form judges no time, because whatever else runs on the machine is in it; it prints them.
"""

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from gw_load import Mixed
from gw_processes import Serve
from msgspec import Struct
from msgspec.structs import asdict

from fairlead.lab.load.runner import run
from fairlead.lab.load.spec import Options, Record
from fairlead.lab.load.workload import Call, OpenLoop, Paced
from fairlead.lab.workload.arrivals import constant

FULL = os.environ.get("FAIRLEAD_CHAOS") == "full"
RATE = 200.0
POLITE_RATE = 20.0
CALM_S, WARM_S = (10.0, 60.0) if FULL else (0.7, 0.7)
#: How long what happens takes, where it is up to the trial.
LASTS_S = 10.0 if FULL else 1.2
#: After its end: what is late comes in, and after an attack memory is to be what it was.
AFTER_S, LATER_S = (5.0, 60.0) if FULL else (0.3, 0.3)
#: The polite client's p99 is allowed this much whatever it was before: below it lies what the machine does by itself.
LEAST_P99_MS = 25.0
MIB = 1 << 20


class Bounds(Struct, frozen=True, kw_only=True):
    """What may become of it. Counts are of requests, memory in MiB; `None` = whatever it is."""

    failed: int = 0
    cut: int = 0
    polite_failed: int = 0
    #: The polite client's p99 while it happens, in times of the calm one; and in milliseconds, where the fault itself
    #: keeps requests waiting for a known time.
    p99_times: float | None = 3.0
    p99_ms: float | None = None
    scheduler_mib: float | None = 256.0
    envoy_mib: float | None = None
    #: Memory at the end, in times of calm (the long form judges), and when each is looked at: so long after the load's
    #: beginning, so long after the end of what happens. What has just started has not touched all that it uses.
    after_times: float | None = None
    calm_s: float = CALM_S
    after_s: float = AFTER_S


class Row(Struct, kw_only=True):
    """`failed`: no answer, or a refusal; `cut`: one broke off after its head. Memory in MiB: calm, at most, after."""

    name: str
    requests: int = 0
    failed: int = 0
    cut: int = 0
    polite: int = 0
    polite_failed: int = 0
    calm_p99_ms: float = 0.0
    p99_ms: float = 0.0
    scheduler_mib: tuple[float, float, float] = (0.0, 0.0, 0.0)
    envoy_mib: tuple[float, float, float] = (0.0, 0.0, 0.0)
    errors: dict[str, int] = {}
    note: str = ""
    problems: list[str] = []


HEAD = (
    f"{'trial':34}{'requests':>9}{'failed':>7}{'cut':>5}{'polite':>8}{'failed':>7}{'p99 calm':>9}{'p99':>8}"
    f"{'scheduler MiB':>17}{'Envoy MiB':>17}"
)


def told(row: Row) -> str:
    memory = ("/".join(f"{value:.0f}" for value in values) for values in (row.scheduler_mib, row.envoy_mib))
    line = (
        f"{row.name:34}{row.requests:9}{row.failed:7}{row.cut:5}{row.polite:8}{row.polite_failed:7}"
        f"{row.calm_p99_ms:9.0f}{row.p99_ms:8.0f}" + "".join(f"{text:>17}" for text in memory)
    )
    extra = [text for text in (row.note, *row.problems, *(f"{n} × {e}" for e, n in row.errors.items())) if text]
    return line + "".join(f"\n    {text}" for text in extra)


def write(rows: list[Row], file: Path) -> None:
    """As JSON, for machines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"full": FULL, "trials": [asdict(row) for row in rows]}, indent=1) + "\n")


def resident(pid: int) -> float:
    """MiB; 0 when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    return float(text.split("VmRSS:")[1].split()[0]) / 1024 if "VmRSS:" in text else 0.0


class _Memory:
    """Of a scheduler and its Envoy, read four times a second."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self.now = (0.0, 0.0)
        self.peak = (0.0, 0.0)

    def look(self) -> tuple[float, float]:
        self.now = resident(self._serve.scheduler_pid()), sum(map(resident, self._serve.envoy_pids()))
        self.peak = max(self.peak[0], self.now[0]), max(self.peak[1], self.now[1])
        return self.now

    async def watch(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(0.25)


class _Until:
    """Equal gaps until told that it is over."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.over = False

    def offsets(self) -> Iterator[float]:
        for offset in Paced(constant(self.rate)).offsets():
            if self.over:
                return
            yield offset


class Polite:
    """Short questions, one after the other."""

    def calls(self) -> Iterator[Call]:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "x-bench": "mode=json;delay-ms=5"}
        while True:
            yield Call(body=json.dumps(body).encode())


def quantile_ms(records: list[Record], share: float = 0.99) -> float:
    """Of the whole answers, from when they were due; those that failed count as they ended."""
    times = sorted(record.e2e() for record in records)
    return times[min(int(len(times) * share), len(times) - 1)] * 1000 if times else 0.0


async def trial(
    name: str,
    serve: Serve,
    happens: Callable[[], Awaitable[object]],
    bounds: Bounds = Bounds(),  # noqa: B008, it is frozen
    rate: float = RATE,
    workload: Mixed | None = None,
) -> Row:
    """Load `serve` with `rate` requests a second while something happens. Returns a row with what broke the bounds."""
    memory = _Memory(serve)
    moments: list[float] = []
    arrivals = _Until(rate), _Until(POLITE_RATE)
    options = Options(duration_s=3600.0, timeout_s=30.0, time_limit_s=3600.0, gaps=False)
    target = f"http://127.0.0.1:{serve.port}"
    calm = after = (0.0, 0.0)

    async def script() -> None:
        nonlocal calm, after
        try:
            await asyncio.sleep(bounds.calm_s)
            calm = memory.look()
            moments.append(time.monotonic())
            await happens()
            moments.append(time.monotonic())
            await asyncio.sleep(bounds.after_s)
            after = memory.look()
        finally:
            for each in arrivals:
                each.over = True

    watching = asyncio.create_task(memory.watch())
    try:
        load, polite, _ = await asyncio.gather(
            run(target, workload or Mixed(chunks=20), _open(arrivals[0]), options),
            run(target, Polite(), _open(arrivals[1]), options),
            script(),
        )
    finally:
        watching.cancel()
    scheduler, envoy = ((calm[i], memory.peak[i], after[i]) for i in (0, 1))
    row = _row(name, load.records, polite.records, (moments[0], moments[1]))
    row.scheduler_mib, row.envoy_mib = scheduler, envoy
    row.problems = broken(row, bounds)
    return row


def _open(arrivals: _Until) -> OpenLoop:
    return arrivals


def _row(name: str, load: list[Record], polite: list[Record], during: tuple[float, float]) -> Row:
    begun, over = during
    before = [record for record in polite if record.end < begun]
    meanwhile = [record for record in polite if begun <= record.end and record.scheduled <= over]
    errors: dict[str, int] = {}
    for record in (*load, *polite):
        if record.error:
            errors[record.error] = errors.get(record.error, 0) + 1
    return Row(
        name=name,
        requests=len(load),
        failed=sum(bool(record.error) and record.status != 200 for record in load),
        cut=sum(bool(record.error) and record.status == 200 for record in load),
        polite=len(polite),
        polite_failed=sum(bool(record.error) for record in polite),
        calm_p99_ms=quantile_ms(before),
        p99_ms=quantile_ms(meanwhile),
        errors=errors,
    )


def broken(row: Row, bounds: Bounds) -> list[str]:
    """What of the bounds does not hold, in words."""
    found = [
        f"{what}: {value}, at most {limit}"
        for what, value, limit in (
            ("requests failed", row.failed, bounds.failed),
            ("answers cut", row.cut, bounds.cut),
            ("polite requests failed", row.polite_failed, bounds.polite_failed),
        )
        if value > limit
    ]
    for what, (calm, most, after), limit in (
        ("the scheduler", row.scheduler_mib, bounds.scheduler_mib),
        ("Envoy", row.envoy_mib, bounds.envoy_mib),
    ):
        if limit is not None and most > limit:
            found.append(f"{what} took {most:.0f} MiB, at most {limit:.0f}")
        if FULL and bounds.after_times is not None and after > bounds.after_times * calm:
            found.append(f"{what} has {after:.0f} MiB {bounds.after_s:g} s later, it had {calm:.0f}")
    limit_ms = max((bounds.p99_times or 0.0) * row.calm_p99_ms, LEAST_P99_MS, bounds.p99_ms or 0.0)
    if FULL and bounds.p99_times is not None and row.p99_ms > limit_ms:
        found.append(f"the polite client's p99 was {row.p99_ms:.0f} ms, at most {limit_ms:.0f}")
    return found
