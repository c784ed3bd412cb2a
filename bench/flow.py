"""What flow control costs.

    python bench/flow.py            a table
    python bench/flow.py --json     {"added_us", "dispatch_hold_ms", …}

* `added_us`: what it adds to a request while the pool is not saturated, with 1,000 known flows and 100 endpoints: the
  same requests through two pipelines, one with and one without, in turns; median over batches. CPU time.
* `dispatch_hold_ms`: 10,000 requests of 1,000 flows wait for 100 endpoints that all open at once. The longest single
  call into the pipeline while the queue drains, in CPU time: for so long nobody else is served. The worse of two runs:
  with memory to spare (`dispatch_hold_ample_ms`), and with so little that it has a price. `drain_s`: all.
"""

import argparse
import gc
import json
import time
from random import Random
from statistics import median

from fairlead.admit.binding import PairBinder
from fairlead.admit.control import FlowControl
from fairlead.admit.desk import Desk
from fairlead.admit.fairness import DeficitRoundRobin
from fairlead.admit.framework import Limit
from fairlead.admit.gates import LedgerGate
from fairlead.admit.limits import Limits
from fairlead.admit.ordering import LeastWork
from fairlead.admit.queues import Queues
from fairlead.config.load import load
from fairlead.config.registry import build_policy
from fairlead.fleet.fleet import Fleet
from fairlead.fleet.prefix import ChainHasher
from fairlead.io.receive.driver import Driver
from fairlead.model import events as ev
from fairlead.model.endpoint import Endpoint, Sample
from fairlead.model.request import PrefixChain, Request
from fairlead.parse.tokens import TokenEstimator
from fairlead.pipeline import Pipeline
from fairlead.testing import SimClock

FLOWS = 1000
ENDPOINTS = 100
QUEUE = 10_000


class Silent:
    """Hears everything, says nothing."""

    def on_decision(self, record: object, duration_s: float) -> None: ...

    def on_outcome(self, record: object) -> None: ...


class Subject:
    """A pipeline under virtual time."""

    def __init__(self, flow_control: bool) -> None:
        self.clock = SimClock()
        self.desk: Desk | None = None
        if flow_control:
            queues = Queues(
                lambda priority: (DeficitRoundRobin(), LeastWork()), Limits(total=Limit(20_000), band=Limit(20_000))
            )
            self.desk = Desk(FlowControl(queues, LedgerGate(), PairBinder(lambda *_: None)))
        policy = build_policy(load("endpoints: []", need_endpoints=False))
        self.pipeline = Pipeline(self.clock, Random(1), Fleet(), policy, TokenEstimator(), desk=self.desk)
        self.driver = Driver(self.pipeline, self.clock, Silent())
        self.driver.start()
        for i in range(ENDPOINTS):
            self.driver.feed(ev.EndpointUp(Endpoint(f"e{i}", f"10.0.{i // 250}.{i % 250}:8000")))

    def serve(self, requests: list[Request]) -> float:
        """CPU seconds; each request ends before the next arrives."""
        feed = self.driver.feed
        start = time.process_time()
        for request in requests:
            feed(ev.RequestArrived(request))
            feed(ev.ResponseEnded(request_id=request.id, status=200))
        return time.process_time() - start


def settle_memory() -> None:
    """As `fairlead serve` does once it has started."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def request(number: int, tokens: int, chain: PrefixChain, stream: bool = True) -> Request:
    return Request(
        id=number,
        arrived=0.0,
        api="chat",
        model=f"model-{number % 10}",
        fairness_id=f"tenant-{number % FLOWS // 10}",
        prompt_tokens=tokens,
        prompt_bytes=tokens * 4,
        prefix=chain,
        stream=stream,
    )


def added(batches: int, size: int) -> float:
    """Microseconds per request."""
    hasher, rng = ChainHasher(), Random(3)
    chains = [hasher.chain(b"bench", [rng.randbytes(4000)]) for _ in range(50)]
    plain, controlled = Subject(False), Subject(True)
    assert controlled.desk is not None
    for i in range(FLOWS):  # make the flows known
        controlled.desk.flow.queues.put(request(-i - 1, 10, chains[0]), 0.0, 1e9, 10.0)
    controlled.desk.flow.queues.clear()
    difference = []
    for batch in range(batches):
        requests = [request(batch * size + i, 1000, chains[i % 50]) for i in range(size)]
        without = plain.serve(requests)
        difference.append((controlled.serve(requests) - without) / size * 1e6)
    assert len(controlled.desk) == 0, "nothing may wait below saturation"
    return median(difference)


def drain(scarce: bool) -> tuple[float, float, int]:
    """(longest call in milliseconds, all calls in seconds, requests dispatched). `scarce`: memory has its price."""
    hasher, rng = ChainHasher(), Random(5)
    chains = [hasher.chain(b"bench", [rng.randbytes(24_000)]) for _ in range(200)]
    subject = Subject(True)
    desk = subject.desk
    assert desk is not None
    blockers = [request(i, 20_000, chains[0]) for i in range(1, 3 * ENDPOINTS)]
    for blocker in blockers:
        subject.driver.feed(ev.RequestArrived(blocker))
    if scarce:
        for slot in range(ENDPOINTS):
            sample = Sample(waiting=2.0, running=20.0, kv_usage=0.9, block_size=16, num_blocks=16_875)
            subject.driver.feed(ev.MetricsSampled(f"e{slot}", subject.clock.time(), sample))
    number = 100_000
    while len(desk) < QUEUE:
        number += 1
        subject.driver.feed(ev.RequestArrived(request(number, 6000, chains[number % 200])))
    running = {r.id for r in blockers}
    settle_memory()
    holds: list[float] = []
    pipeline = subject.pipeline
    genuine = pipeline.handle

    def timed(event: ev.Event) -> list[object]:
        start = time.thread_time()
        instructions = genuine(event)
        holds.append(time.thread_time() - start)
        return list(instructions)

    pipeline.handle = timed  # type: ignore[method-assign,assignment]
    ledger = pipeline.fleet.ledger
    while len(desk) or running:
        subject.clock.advance(0.05)
        running = {lease.request.id for slot, _ in pipeline.fleet.table.slots() for lease in ledger.of_slot(slot)}
        for number in running:
            subject.driver.feed(ev.FirstTokenSeen(number))
            subject.driver.feed(ev.ResponseEnded(request_id=number, status=200))
    holds.sort()
    return holds[-1] * 1e3, sum(holds), QUEUE


def measure(quick: bool) -> dict[str, float]:
    added_us = added(5 if quick else 31, 200 if quick else 1000)
    hold_ms, drain_s, count = drain(False)
    scarce_ms, _, _ = drain(True)
    return {
        "added_us": round(added_us, 2),
        "dispatch_hold_ms": round(max(hold_ms, scarce_ms), 3),
        "dispatch_hold_ample_ms": round(hold_ms, 3),
        "drain_s": round(drain_s, 2),
        "dispatched": count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="few batches")
    arguments = parser.parse_args()
    result = measure(arguments.quick)
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"added below saturation        {result['added_us']:8.2f} µs/request   (target 15)")
    print(f"longest hold while draining   {result['dispatch_hold_ms']:8.3f} ms           (target 2)")
    print(f"drain of {result['dispatched']:,} requests    {result['drain_s']:8.2f} s of CPU")


if __name__ == "__main__":
    main()
