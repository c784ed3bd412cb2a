"""How long one call into the scheduler's core holds the event loop, in what a queue of 10,000 requests meets.

Virtual time: every pass feeds the same events, so the n-th call of one pass does the same work as the n-th of another.
What differs is the machine's doing: a core taken away, pages that the hypervisor has to find first.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial

from msgspec import Struct

from _flow_world import ENDPOINTS, World, chains, request
from fairlead.core import events as ev
from fairlead.core.endpoint import Sample
from fairlead.core.requests import RequestState

_FIRST = 100_000
_CHAINS = chains(5, 200, 24_000)

#: Wall and CPU seconds of each call.
Calls = list[tuple[float, float]]


class Size(Struct, frozen=True):
    """Requests that wait, and leases of the endpoint that leaves."""

    queue: int = 10_000
    leases: int = 5_000


class Hold(Struct, frozen=True):
    """Milliseconds of the longest call: in the quietest and in the worst pass; the thread's own CPU time, in the
    quietest pass; and if each call had been as quick as it was in its best pass. `long_calls`: above 2 ms, in all
    passes, and how many of them had 2 ms of CPU time. `total_s`: all calls, in the quietest pass."""

    calls: int
    wall_ms: float
    worst_ms: float
    cpu_ms: float
    own_ms: float
    long_calls: int
    long_by_cpu: int
    total_s: float


def timed(world: World, act: Callable[[World], None]) -> Calls:
    """Every call into the driver while `act` runs."""
    walls, cpus = list[float](), list[float]()  # no tuples: the cycle collector would look at them
    genuine, wall, cpu = world.driver.feed, time.perf_counter, time.thread_time

    def feed(event: ev.Event) -> None:
        wall_s, cpu_s = wall(), cpu()
        genuine(event)
        cpu_s, wall_s = cpu() - cpu_s, wall() - wall_s
        walls.append(wall_s)
        cpus.append(cpu_s)

    world.driver.feed = feed  # type: ignore[method-assign]
    act(world)
    world.driver.feed = genuine  # type: ignore[method-assign]
    return list(zip(walls, cpus, strict=True))


def busy(scarce: bool = False) -> World:
    """Every endpoint has what it may have. `scarce`: memory has its price."""
    world = World(True)
    for number in range(1, 3 * ENDPOINTS):
        world.arrive(request(number, 20_000, _CHAINS[0]))
    for slot in range(ENDPOINTS if scarce else 0):
        sample = Sample(waiting=2.0, running=20.0, kv_usage=0.9, block_size=16, num_blocks=16_875)
        world.driver.feed(ev.MetricsSampled(f"e{slot}", world.clock.time(), sample))
    return world


def arrive(world: World, queue: int) -> None:
    number = _FIRST
    while len(world.flow_controller) < queue:
        number += 1
        world.arrive(request(number, 6000, _CHAINS[number % 200]))


def drain(world: World) -> None:
    ledger, table = world.fleet.ledger, world.fleet.table
    while len(world.flow_controller) or len(ledger):
        for number in [lease.request.id for slot, _ in table.slots() for lease in ledger.of_slot(slot)]:
            world.driver.feed(ev.FirstTokenSeen(number))
            world.driver.feed(ev.ResponseEnded(request_id=number, status=200))
        world.clock.advance(0.05)


def cancel(world: World) -> None:
    for number in [entry.request.id for entry in world.pipeline.requests if entry.waiting is not None]:
        world.driver.feed(ev.StreamLost(number))
    assert not len(world.flow_controller)


def expire(world: World) -> None:
    world.clock.advance(60.0)
    assert not len(world.flow_controller)


def stop(world: World) -> None:
    world.driver.feed(ev.StopAsked())
    world.clock.advance(0.0)
    assert not len(world.flow_controller)


def joins(world: World) -> None:
    world.join(ENDPOINTS)
    world.clock.advance(1.0)


def leaves(world: World, leases: int) -> None:
    before = len(world.fleet.ledger)
    world.driver.feed(ev.EndpointDown("e7"))
    world.clock.advance(1.0)
    assert before - len(world.fleet.ledger) >= leases


def lapse(world: World) -> None:
    world.clock.advance(world.fleet.ledger.ttl + 10.0)
    assert not len(world.fleet.ledger)


def _leases(world: World, slots: int, count: int) -> None:
    """So many requests run there."""
    slot = world.fleet.table.slot("e7") or 0
    for number in range(count):
        one = request(2 * _FIRST + number, 6000, _CHAINS[number % 200])
        entry = world.pipeline.requests.add(one)
        entry.lease = world.fleet.charge(one, (slot + number % slots) % ENDPOINTS, world.clock.time(), 0, 100.0)
        world.pipeline.requests.move(entry, ev.RequestArrived, RequestState.ROUTED)


def one_pass(size: Size) -> Iterator[tuple[str, Calls]]:
    """(situation, its calls), all of them once."""
    queue = size.queue
    world = busy()
    yield "arrive", timed(world, partial(arrive, queue=queue))
    yield "drain", timed(world, drain)
    world = busy(scarce=True)
    arrive(world, queue)
    yield "drain_scarce", timed(world, drain)
    for name, act in (("expire", expire), ("stop", stop), ("cancel", cancel), ("joins", joins)):
        world = busy()
        arrive(world, queue)
        yield name, timed(world, act)
    world = busy()
    arrive(world, queue)
    _leases(world, 1, size.leases)
    yield "leaves", timed(world, partial(leaves, leases=size.leases))
    world = World(True)
    _leases(world, ENDPOINTS, queue)
    yield "lapse", timed(world, lapse)


def holds(passes: int, size: Size) -> dict[str, Hold]:
    """By situation."""
    found: dict[str, list[Calls]] = {}
    for _ in range(passes):
        for name, calls in one_pass(size):
            found.setdefault(name, []).append(calls)
    return {name: _judged(each) for name, each in found.items()}


def _judged(passes: list[Calls]) -> Hold:
    longest = sorted(max(wall for wall, _ in calls) for calls in passes)
    long_calls = [cpu for calls in passes for wall, cpu in calls if wall > 2e-3]
    best = [min(wall for wall, _ in same) for same in zip(*passes, strict=True)]
    return Hold(
        calls=len(best),
        wall_ms=round(longest[0] * 1e3, 3),
        worst_ms=round(longest[-1] * 1e3, 3),
        cpu_ms=round(min(max(cpu for _, cpu in calls) for calls in passes) * 1e3, 3),
        own_ms=round(max(best) * 1e3, 3),
        long_calls=len(long_calls),
        long_by_cpu=sum(cpu > 2e-3 for cpu in long_calls),
        total_s=round(min(sum(wall for wall, _ in calls) for calls in passes), 3),
    )
