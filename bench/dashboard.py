"""What five viewers of the dashboard change for clients: requests while nobody looks and while five do, in turns.

    python bench/dashboard.py [--json] [--rate 200] [--slots 72] [--slot 2.5] [--viewers 5] [--endpoints 8]

One scheduler behind one Envoy, one run of load; viewers come and go in slots of some seconds, in the order ABBA, so
that whatever else the machine does meets both sides alike. A request belongs to the slot in which it was due; the first
`SETTLE` seconds of a slot count for neither. Latencies are wall-clock milliseconds of whole answers, counted from the
scheduled arrival; the model servers' answers take no time, so all of it is the way through gateway and scheduler. The
viewers read everything at once. The interval is a bootstrap over pairs of slots.
"""

import argparse
import asyncio
import contextlib
import math
import random
import selectors
import socket
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from statistics import median
from typing import Any

from msgspec import Struct

from _gateway import Processes, Side, free_ports
from _output import tell
from _process import usage
from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.fleet import Fleet
from fairlead.core.records import DecisionRecord
from fairlead.core.request import Request
from fairlead.lab.load.process import run_in_process
from fairlead.lab.load.spec import Options, RunSpec
from fairlead.lab.load.workload import Chat, Poisson
from fairlead.server.dashboard import frame
from fairlead.server.observe.snapshot import TICK, SnapshotMaker
from fairlead.server.observe.watch import Watch

SIDE = Side("watched", *free_ports(3))
#: Seconds after a change of sides, and resamples of the bootstrap.
SETTLE, DRAWS = 0.3, 400
_ASK = b"GET /dashboard/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


class Viewers:
    """So many connections that read the stream, in one thread: real ones would not take the server's CPU."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.events = self.bytes = 0

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        sockets = [socket.create_connection(("127.0.0.1", SIDE.admin)) for _ in range(self._count)]
        with selectors.DefaultSelector() as selector:
            for one in sockets:
                one.sendall(_ASK)
                selector.register(one, selectors.EVENT_READ)
            reader = threading.Thread(target=self._read, args=(selector, len(sockets)))
            reader.start()
            try:
                yield
            finally:
                for one in sockets:
                    one.shutdown(socket.SHUT_RDWR)
                reader.join()
                for one in sockets:
                    one.close()

    def _read(self, selector: selectors.BaseSelector, left: int) -> None:
        while left:
            for key, _ in selector.select():
                assert isinstance(key.fileobj, socket.socket)
                data = b""
                with contextlib.suppress(ConnectionError):  # we hung up while it wrote
                    data = key.fileobj.recv(1 << 18)
                self.events += data.count(b"event: now")
                self.bytes += len(data)
                if not data:
                    selector.unregister(key.fileobj)
                    left -= 1


def one_snapshot(endpoints: int) -> dict[str, float]:
    """Microseconds to make and encode a snapshot, and its size, for so many endpoints and a full journal."""
    fleet = Fleet(staleness=1e9)
    watch = Watch(fleet, time.monotonic)
    for i in range(endpoints):
        fleet.up(Endpoint(f"default/server-{i}", f"10.0.0.{i}:80"))
        fleet.sampled(f"default/server-{i}", 0.0, time.monotonic(), Sample(waiting=1, running=4, kv_usage=0.5))
    maker = SnapshotMaker(watch, time.monotonic, lambda: 0.0, pool="default", policy=str, reasons=list)
    for i in range(1000):
        request = Request(id=i, arrived=time.monotonic(), model=f"model-{i % 5}", prompt_tokens=1000, stream=True)
        name = f"default/server-{i % endpoints}"
        watch.on_decision(DecisionRecord(request=request, at=time.monotonic(), policy="p", endpoint=name), 1e-4)
    began = time.perf_counter()
    maker.begin()
    begin = (time.perf_counter() - began) * 1e6
    times, size = [], 0
    for _ in range(100):
        began = time.perf_counter()
        size = len(frame("now", maker.take()))
        times.append((time.perf_counter() - began) * 1e6)
    return {"endpoints": endpoints, "first_us": round(begin), "median_us": round(median(times)), "bytes": size}


class Slot(Struct, frozen=True):
    """CLOCK_MONOTONIC seconds, and CPU seconds of the scheduler."""

    viewers: bool
    begin: float
    end: float
    cpu_s: float


async def take_turns(processes: Processes, viewers: Viewers, count: int, seconds: float) -> list[Slot]:
    slots = []
    for number in range(count):
        looking = number % 4 in (1, 2)
        with viewers.looking() if looking else contextlib.nullcontext():
            await asyncio.sleep(SETTLE)
            begin, before = time.monotonic(), usage(processes.pids[SIDE.name])
            await asyncio.sleep(seconds - SETTLE)
            spent = usage(processes.pids[SIDE.name]) - before
            slots.append(Slot(looking, begin, time.monotonic(), spent.cpu_s))
    return slots


def quantile(slots: list[list[float]], share: float) -> float:
    ordered = sorted(value for slot in slots for value in slot)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def interval(nobody: list[list[float]], looked: list[list[float]], share: float) -> tuple[float, float]:
    """95 % of the ratios with/without, of as many pairs of slots drawn with replacement."""
    rng = random.Random(1)
    ratios = []
    for _ in range(DRAWS):
        drawn = rng.choices(range(len(nobody)), k=len(nobody))
        ratios.append(quantile([looked[i] for i in drawn], share) / quantile([nobody[i] for i in drawn], share))
    ratios.sort()
    return round(ratios[int(0.025 * DRAWS)], 3), round(ratios[int(0.975 * DRAWS)], 3)


async def run(options: argparse.Namespace) -> dict[str, Any]:
    viewers = Viewers(options.viewers)
    with Processes([SIDE], free_ports(options.endpoints)) as processes:
        spec = RunSpec(
            target=f"http://127.0.0.1:{SIDE.port}",
            name="dashboard",
            workload=Chat(body_bytes=4096, output_tokens=10, stream=False),
            arrivals=Poisson(options.rate),
            options=Options(duration_s=options.slots * options.slot + 8.0, read_usage=False, gaps=False, timeout_s=60),
        )
        begun = asyncio.Event()
        load = asyncio.create_task(run_in_process(spec, lambda _: begun.set()))
        # Its process takes long to start where others use the machine: a slot before would have no request.
        await asyncio.wait((load, asyncio.create_task(begun.wait())), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(3.0)
        slots = await take_turns(processes, viewers, options.slots, options.slot)
        result = await load
    failed = [record.error for record in result.records if record.error or record.status != 200]
    assert not failed, failed[:3]
    sides: dict[bool, list[list[float]]] = {False: [], True: []}
    records = sorted(result.records, key=lambda record: record.scheduled)
    times = [record.scheduled for record in records]
    for slot in slots:
        found = records[bisect_left(times, slot.begin) : bisect_left(times, slot.end)]
        sides[slot.viewers].append([record.e2e() * 1e3 for record in found])
    return {
        "rate_per_s": options.rate,
        "slot_s": options.slot,
        "slots": options.slots,
        "viewers": options.viewers,
        "tick_s": TICK,
        "events": viewers.events,
        "stream_bytes": viewers.bytes,
        **{name: summary(slots, sides[side], side) for name, side in (("nobody", False), ("looking", True))},
        "p99_ratio": round(quantile(sides[True], 0.99) / quantile(sides[False], 0.99), 4),
        "p99_ratio_95": interval(sides[False], sides[True], 0.99),
        # Slots without viewers against slots without viewers: what the machine alone makes of it.
        "p99_ratio_95_of_nothing": interval(sides[False][::2], sides[False][1::2], 0.99),
        "snapshot": [one_snapshot(count) for count in (8, 100, 1000)],
    }


def summary(slots: list[Slot], latencies: list[list[float]], looking: bool) -> dict[str, float]:
    requests = sum(map(len, latencies))
    cpu = sum(slot.cpu_s for slot in slots if slot.viewers is looking)
    return {
        "requests": requests,
        **{f"p{share * 100:g}_ms": round(quantile(latencies, share), 3) for share in (0.5, 0.95, 0.99)},
        "cpu_us_per_request": round(cpu / requests * 1e6, 1),
    }


def show(found: dict[str, Any]) -> None:
    print(
        f"{found['rate_per_s']:g} requests/s, {found['slots']} slots of {found['slot_s']:g} s in turns; "
        f"{found['viewers']} viewers read {found['events']:,} events, {found['stream_bytes'] / 1e6:.1f} MB\n"
    )
    keys = ("requests", "p50_ms", "p95_ms", "p99_ms", "cpu_us_per_request")
    print(f"{'':<10}" + "".join(f"{key:>20}" for key in keys))
    for side in ("nobody", "looking"):
        print(f"{side:<10}" + "".join(f"{found[side][key]:>20,}" for key in keys))
    low, high = found["p99_ratio_95"]
    print(f"\np99 with viewers / without: {found['p99_ratio']:.3f} (95 %: {low:.3f} to {high:.3f})")
    low, high = found["p99_ratio_95_of_nothing"]
    print(f"of slots without viewers against slots without viewers (95 %): {low:.3f} to {high:.3f}")
    for one in found["snapshot"]:
        print("one snapshot: " + ", ".join(f"{key} {value:,}" for key, value in one.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--slots", type=int, default=72, help="a multiple of four")
    parser.add_argument("--slot", type=float, default=2.5, help="seconds")
    parser.add_argument("--viewers", type=int, default=5)
    parser.add_argument("--endpoints", type=int, default=8)
    options = parser.parse_args()
    found = asyncio.run(run(options))
    tell(found, options.json, show)


if __name__ == "__main__":
    main()
