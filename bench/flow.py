"""What flow control costs.

    python bench/flow.py            a table
    python bench/flow.py --json     {"added_us", "dispatch_hold_ms", …}

* `added_us`: what it adds to a request while the pool is not saturated, with 1,000 known flows and 100 endpoints: the
  same requests through two pipelines, one with and one without, in turns; median over batches. CPU time.
* `dispatch_hold_ms`: 10,000 requests of 1,000 flows wait for 100 endpoints that all open at once. The longest single
  call while the queue drains, on the clock on the wall: for so long nobody else is served. A call is what one event
  costs: the pipeline, the encoded answers, metrics and the log of decisions. Of two drains, with memory to spare and
  with so little that it has a price, the longer; of several passes over the same events, the quietest.
* `dispatch_hold_worst_ms`: the same in the worst pass, when others wanted the core. `dispatch_hold_cpu_ms`: in CPU
  time. `dispatch_hold_own_ms`: if each call had been as quick as in its best pass. `drain_s`: all calls.
* `holds`: the same for other things that a queue of 10,000 meets.

Memory is treated as `fairlead serve` treats it (`server/live/memory`), the collector of cycles included.
"""

import argparse
import logging
from statistics import median
from typing import Any

import msgspec

from _flow_holds import Hold, Size, holds
from _flow_world import FLOWS, Silent, World, chains, request
from _output import tell
from fairlead.server.live.memory import keep_heap

_NAMES = {
    "drain": "{queue:,} drain",
    "drain_scarce": "{queue:,} drain, memory is short",
    "arrive": "{queue:,} arrive",
    "expire": "{queue:,} times to live end at once",
    "cancel": "{queue:,} clients go away",
    "stop": "SIGTERM while {queue:,} wait",
    "joins": "an endpoint joins while {queue:,} wait",
    "leaves": "one with {leases:,} leases leaves while {queue:,} wait",
    "lapse": "{queue:,} leases expire at once",
}


def added(batches: int, size: int) -> float:
    """Microseconds per request."""
    beginnings = chains(3, 50, 4000)
    plain, controlled = World(False, Silent()), World(True, Silent())
    queues = controlled.flow_controller.flow.queues
    for i in range(FLOWS):  # make the flows known
        queues.put(request(-i - 1, 10, beginnings[0]), 0.0, 1e9, 10.0)
    queues.clear()
    difference = []
    for batch in range(batches):
        requests = [request(batch * size + i, 1000, beginnings[i % 50]) for i in range(size)]
        without = plain.serve(requests)
        difference.append((controlled.serve(requests) - without) / size * 1e6)
    assert len(controlled.flow_controller) == 0, "nothing may wait below saturation"
    return median(difference)


def measure(quick: bool, passes: int) -> dict[str, Any]:
    keep_heap()
    logging.disable()  # a line for each refusal would be the terminal's time
    added_us = added(2 if quick else 31, 100 if quick else 1000)
    size = Size(queue=200, leases=100) if quick else Size()
    found = holds(1 if quick else passes, size)
    drains = found["drain"], found["drain_scarce"]
    return {
        "added_us": round(added_us, 2),
        "dispatch_hold_ms": max(hold.wall_ms for hold in drains),
        "dispatch_hold_worst_ms": max(hold.worst_ms for hold in drains),
        "dispatch_hold_cpu_ms": max(hold.cpu_ms for hold in drains),
        "dispatch_hold_own_ms": max(hold.own_ms for hold in drains),
        "drain_s": max(hold.total_s for hold in drains),
        "dispatched": size.queue,
        "leases": size.leases,
        "passes": 1 if quick else passes,
        "holds": {name: msgspec.to_builtins(hold) for name, hold in found.items()},
    }


def show(result: dict[str, Any]) -> None:
    print(f"added below saturation        {result['added_us']:8.2f} µs/request   (target 20)")
    print(f"longest hold while draining   {result['dispatch_hold_ms']:8.3f} ms           (target 2)")
    print()
    print(f"longest call in ms, {result['passes']} passes; above 2 ms: all passes, in brackets those of 2 ms CPU time")
    print(f"{'':45}   calls  quietest   worst  CPU time  own  above 2 ms  all, s")
    for name, label in _NAMES.items():
        hold = msgspec.convert(result["holds"][name], Hold)
        named = label.format(queue=result["dispatched"], leases=result["leases"])
        above = f"{hold.long_calls} ({hold.long_by_cpu})"
        print(
            f"{named:45} {hold.calls:7,} {hold.wall_ms:9.2f} {hold.worst_ms:7.2f} {hold.cpu_ms:8.2f} {hold.own_ms:6.2f}"
            f" {above:>9} {hold.total_s:8.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="few batches, one pass, a short queue")
    parser.add_argument("--passes", type=int, default=3, help="passes over the same events (default 3)")
    arguments = parser.parse_args()
    result = measure(arguments.quick, max(arguments.passes, 1))
    tell(result, arguments.json, show)


if __name__ == "__main__":
    main()
