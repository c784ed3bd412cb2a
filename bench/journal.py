"""What the decision journal costs: CPU per request on the event loop's thread, without and with it, warm and cold.

    python bench/journal.py [--json] [--requests 3000] [--repeat 5]

The events of a simulated run (shared-prefix workload, 8 endpoints: 1 arrival, 1 first token and 1 end per request, and
every tenth scrape, which makes as many per request as at 160 requests per second) are fed through the live driver
again, as fast as they come. `cold` sweeps 32 MB through the caches before each arrival, as a server does that parses
bodies and sleeps between requests. Figures are the lowest of the repetitions: neighbours
only add.

    off        the plain driver
    snapshots  and the numbers of each decision are taken down (journal.explain)
    taken      and all is put before the writing thread, which is not there
    written    and the thread packs and writes it; its own CPU stands beside

JSON: {"requests", "events", MODE: {"warm_us", "cold_us", "thread_us"}}.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from _output import tell
from fairlead.compat.load import load
from fairlead.compat.recorded import record
from fairlead.config.building import build_pipeline
from fairlead.core.clock import VirtualClock
from fairlead.core.events import MetricsSampled, RequestArrived
from fairlead.gateway.driver import Driver
from fairlead.lab.simulator.run import policy_from
from fairlead.lab.simulator.scenarios import headline
from fairlead.lab.simulator.simulation import Simulation
from fairlead.server.journal.recorder import RecordedDriver, Recorder, StillClock
from fairlead.server.journal.records import Segment
from fairlead.server.journal.writer import Directory, Writer
from fairlead.server.live.memory import settle_memory

Events = list[tuple[float, Any]]
COLD = np.zeros(32 << 20, dtype=np.uint8)


def events(requests: int) -> Events:
    """Of a run of about so many requests."""
    simulation = Simulation(headline(16.0, requests / 16.0), policy_from("policy: default"))
    found: Events = []
    scrapes = [0]
    handle = simulation.pipeline.handle

    def noted(event: Any) -> Any:
        scrapes[0] += type(event) is MetricsSampled
        if type(event) is not MetricsSampled or scrapes[0] % 10 == 0:
            found.append((simulation.kernel.now, event))
        return handle(event)

    simulation.pipeline.handle = noted  # type: ignore[method-assign]
    simulation.run()
    return found


class Nobody:
    def on_decision(self, record: Any, duration_s: float) -> None:
        pass

    def on_outcome(self, record: Any) -> None:
        pass

    def on_failure(self, instruction: str) -> None:
        pass


def run(mode: str, feed: Events, cold: bool, folder: str) -> tuple[float, float]:
    """(µs of the loop's thread, µs of the writing thread) per request."""
    config = load("policy: default", need_endpoints=False)
    kernel = VirtualClock(feed[0][0])
    still = StillClock(kernel)
    clock = still if mode in ("taken", "written") else kernel
    pipeline = build_pipeline(config, clock, Random(1), snapshots=mode != "off")
    recorder = Recorder(max_waiting=10_000_000)
    writer = None
    driver: Driver = Driver(pipeline, kernel, Nobody())
    if mode in ("taken", "written"):
        driver = RecordedDriver(pipeline, kernel, still, Nobody(), recorder)
    if mode == "written":
        head = Segment(run="bench", scheduling=record(config))
        writer = Writer(recorder, Directory(Path(folder), 1 << 30, 64 << 20, False, str(time.time_ns())), head)
        writer.start()
    requests, spent = _feed(driver.feed, kernel, feed, cold, recorder if mode == "taken" else None)
    if writer is not None:
        before = time.process_time() - time.thread_time()
        writer.close()
        thread = time.process_time() - time.thread_time() - before + _thread[0]
        return spent / requests * 1e6, thread / requests * 1e6
    return spent / requests * 1e6, 0.0


_thread = [0.0]


def _feed(
    feed_one: Callable[[Any], None], kernel: VirtualClock, feed: Events, cold: bool, drained: Recorder | None
) -> tuple[int, float]:
    requests, spent = 0, 0.0
    process, mine = time.process_time(), time.thread_time()
    for at, event in feed:
        kernel.now = at
        if type(event) is RequestArrived:
            requests += 1
            if drained is not None and requests % 32 == 0:
                drained.waiting.clear()
            if cold:
                COLD[::64].max()
        started = time.thread_time()
        feed_one(event)
        spent += time.thread_time() - started
    _thread[0] = (time.process_time() - process) - (time.thread_time() - mine)
    return requests, spent


MODES = ("off", "snapshots", "taken", "written")


def measure(requests: int, repeat: int) -> dict[str, Any]:
    settle_memory()  # as the server does
    feed = events(requests)
    rows: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="fairlead-journal-") as folder:
        for _ in range(repeat):
            for mode in MODES:
                for cold in (False, True):
                    rows.setdefault((mode, cold), []).append(run(mode, feed, cold, folder))
    least = {key: (min(one for one, _ in found), min(two for _, two in found)) for key, found in rows.items()}
    found: dict[str, Any] = {"requests": sum(type(event) is RequestArrived for _, event in feed), "events": len(feed)}
    for mode in MODES:
        (warm, thread), (cold, _) = least[mode, False], least[mode, True]
        found[mode] = {"warm_us": warm, "cold_us": cold, "thread_us": thread}
    return found


def show(found: dict[str, Any]) -> None:
    print(f"{found['requests']} requests, {found['events']} events, 8 endpoints")
    print(f"{'':10} {'warm µs/request':>18} {'added':>8} {'cold µs/request':>18} {'added':>8} {'thread µs':>10}")
    off = found["off"]
    for mode in MODES:
        row = found[mode]
        warm, cold = row["warm_us"], row["cold_us"]
        more = warm - off["warm_us"], cold - off["cold_us"]
        print(f"{mode:10} {warm:18.1f} {more[0]:8.1f} {cold:18.1f} {more[1]:8.1f} {row['thread_us']:10.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    found = measure(options.requests, options.repeat)
    tell(found, options.json, show)


if __name__ == "__main__":
    main()
