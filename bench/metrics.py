"""What rendering the metrics page costs: a large pool after traffic of some models, with and without KV events.

    python bench/metrics.py            a table
    python bench/metrics.py --json     {"plain": {"endpoints": 1000, "series": 7800, "page_kb": 610.0, …}, …}

All times are processor time. `render_ms` is the median from asking for the page to having it whole, `longest_ms` the
longest piece, during which the event loop cannot turn; `first_ms` also makes the constant part of each line. The
whole is made anew each time from a table of endpoints that changes in between.
"""

import argparse
import statistics
import time
from itertools import count
from random import Random

from _output import tell
from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.exact import ExactKnowledge
from fairlead.core.fleet import Fleet
from fairlead.core.records import DecisionRecord, OutcomeRecord
from fairlead.core.request import Request
from fairlead.server.observe.kv_metrics import KvFeedStatus, KvMetrics
from fairlead.server.observe.watch import Watch

NOW = 100.0
MODELS = 10
REQUESTS = 5000


def make_watch(endpoints: int) -> Watch:
    """A scheduler's observers after some traffic."""
    chance, fleet = Random(1), Fleet()
    watch = Watch(fleet, lambda: NOW)
    pool = [Endpoint(f"serving/pool-{i}", f"10.1.{i >> 8}.{i & 255}:8000") for i in range(endpoints)]
    for endpoint in pool:
        fleet.up(endpoint)
    sample(fleet, chance)
    for number in range(REQUESTS):
        chosen = pool[chance.randrange(endpoints)]
        asked = Request(id=number, arrived=NOW, model=f"model-{number % MODELS}", stream=True, prompt_tokens=900)
        decided = DecisionRecord(request=asked, at=NOW, policy="p", endpoint=chosen.id, address=chosen.address)
        watch.on_decision(decided, chance.uniform(0, 0.002))
        outcome = OutcomeRecord(
            request=asked,
            at=NOW,
            endpoint=chosen.id,
            status=200,
            ttft_ms=chance.uniform(10, 900),
            duration_ms=chance.uniform(1000, 9000),
            prompt_tokens=900,
            completion_tokens=chance.randrange(1, 400),
            cached_tokens=500,
        )
        watch.on_outcome(outcome)
    return watch


def sample(fleet: Fleet, chance: Random) -> None:
    """Every endpoint says something new."""
    for _, endpoint in fleet.table.slots():
        said = Sample(waiting=chance.randrange(9), running=chance.randrange(60), kv_usage=chance.random())
        fleet.sampled(endpoint.id, NOW - 0.1, NOW - chance.random(), said)


def with_kv_events(watch: Watch) -> None:
    """A feed for each endpoint."""
    slots = [(slot, endpoint.id) for slot, endpoint in watch.fleet.table.slots()]
    zeros = dict.fromkeys(("bad", "lost", "gaps", "restarts", "replays", "failed_replays", "reconnections"), 0)
    looks = count(1)

    def feeds() -> list[KvFeedStatus]:
        """Every time they have told more."""
        n = next(looks)
        return [
            KvFeedStatus(name, slot, 0, True, False, False, blocks=9000 + n, batches=slot + n, events=9 * n, **zeros)
            for slot, name in slots
        ]

    exact = ExactKnowledge()
    for slot, _ in slots:
        exact.add_slot(slot)
    KvMetrics(watch.metrics.registry, exact, lambda: slots, feeds, lambda: 0, {"no-model": 3})


def measure(watch: Watch, rounds: int) -> dict[str, float]:
    chance, whole, longest = Random(2), list[float](), list[float]()
    size = series = 0
    for _ in range(rounds + 1):
        sample(watch.fleet, chance)
        parts, pieces = watch.exposition(), list[bytes]()
        steps, start = list[float](), time.process_time()
        last = start
        for piece in parts:
            pieces.append(piece)
            now = time.process_time()
            steps.append(now - last)
            last = now
        page = b"".join(pieces)
        whole.append((time.process_time() - start) * 1e3)
        longest.append(max(steps) * 1e3)
        size, series = len(page), page.count(b"\n") - 2 * page.count(b"# TYPE")
    return {
        "endpoints": watch.fleet.table.count,
        "series": series,
        "page_kb": round(size / 1e3, 1),
        "first_ms": round(whole[0], 2),
        "render_ms": round(statistics.median(whole[1:]), 2),
        "longest_ms": round(statistics.median(longest[1:]), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--endpoints", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    watch = make_watch(options.endpoints)
    found = {"plain": measure(watch, options.rounds)}
    with_kv_events(watch)
    found["kv_events"] = measure(watch, options.rounds)
    tell(found, options.json, show)


def show(found: dict[str, dict[str, float]]) -> None:
    names = list(found["plain"])
    print(f"{'':<12}" + "".join(f"{name:>12}" for name in names))
    for what, row in found.items():
        print(f"{what:<12}" + "".join(f"{row[name]:>12g}" for name in names))


if __name__ == "__main__":
    main()
