"""All queues: bands of flows of waiting requests, their limits, times to live and counts.

Rules
* `Queues` is the only thing that adds and removes. A request is in exactly one flow, once, until it is taken, cancelled
  or expired; `validate()` proves it, and that every count is the sum it claims to be.
* Limits hold for requests and bytes: of all, of a band, of a flow. A newcomer over a limit is refused, unless the limit
  is the global one and lower bands can make enough room: then the newest of the lowest give way.
* Nothing here looks at a clock; deadlines are compared with the time that is handed in.
* Idle flows are forgotten after `FLOW_MEMORY` seconds, or when there are `MOST_IDLE`: clients choose tenants' names.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from math import inf

from fairlead.admit.deadlines import Deadlines
from fairlead.admit.framework import SATURATED, Fairness, Flow, FlowKey, Limit, Ordering, Refused, Waiting
from fairlead.admit.limits import Limits
from fairlead.model.request import Request

FLOW_MEMORY = 300.0
MOST_IDLE = 10_000
#: Flows looked at per queued request to find idle ones.
_SWEEP = 2


class Band:
    """All flows of one priority."""

    def __init__(self, priority: int, fairness: Fairness, ordering: Ordering, limit: Limit) -> None:
        self.priority = priority
        self.limit = limit
        self.fairness = fairness
        self.ordering = ordering
        self.flows: dict[FlowKey, Flow] = {}
        #: Who waits, by number, so in the order of their arrival.
        self.members: OrderedDict[int, Waiting] = OrderedDict()
        self.count = 0
        self.bytes = 0

    def last(self) -> Waiting:
        """Who joined last. Raises `StopIteration` when nobody waits."""
        return next(reversed(self.members.values()))

    def longest_waiting(self) -> Waiting:
        """Raises `StopIteration` when nobody waits."""
        return next(iter(self.members.values()))

    def oldest(self) -> float:
        """Since when it waits; `inf` = nobody does."""
        return self.longest_waiting().since if self.members else inf


class Queues:
    """Requests that wait. `policies(priority)` makes the fairness policy and the ordering of a new band."""

    def __init__(self, policies: Callable[[int], tuple[Fairness, Ordering]], limits: Limits | None = None) -> None:
        self._policies = policies
        self.limits = limits or Limits()
        #: By priority, highest first when iterated over with `bands`.
        self._bands: dict[int, Band] = {}
        self._order: list[int] = []
        self._by_id: dict[int, Waiting] = {}
        self._deadlines = Deadlines()
        self._numbers = 0
        self._flows_made = 0
        #: The first is looked at next. (An ordered one: a plain dict would be walked through from its emptied front.)
        self._idle: OrderedDict[FlowKey, Flow] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def newest(self) -> int:
        """The number of the request that joined last."""
        return self._numbers

    def get(self, request_id: int) -> Waiting | None:
        return self._by_id.get(request_id)

    def bands(self) -> list[Band]:
        """Highest priority first; only those that ever had a request."""
        return [self._bands[-negative] for negative in self._order]

    # ---- in ----

    def put(self, request: Request, now: float, ttl: float, work: float) -> tuple[Waiting | Refused, list[Waiting]]:
        """Queue a request for at most `ttl` seconds. Returns what became of it, and who had to give way."""
        band = self._band(request.priority)
        key = FlowKey(request.priority, request.model, request.fairness_id)
        flow = band.flows.get(key) or self._flow(band, key, now)
        displaced = self._room(request, band, flow)
        if isinstance(displaced, Refused):
            self._forget_idle(now)
            return displaced, []
        self._numbers += 1
        waiting = Waiting(request, now, now + ttl, max(work, 1.0), self._numbers, flow=flow)
        waiting.key = band.ordering.key(waiting)
        self._idle.pop(key, None)
        insort(flow.waiting, (waiting.key, waiting.number, waiting))
        flow.seen = now
        flow.bytes += waiting.size
        band.count += 1
        band.members[waiting.number] = waiting
        band.bytes += waiting.size
        self.bytes += waiting.size
        self._by_id[request.id] = waiting
        self._deadlines.add(waiting)
        band.fairness.queued(waiting)
        self._forget_idle(now)
        return waiting, displaced

    def _room(self, request: Request, band: Band, flow: Flow) -> "list[Waiting] | Refused":
        size, limits = request.body_bytes, self.limits
        if flow.limit.full(len(flow), flow.bytes, size):
            return Refused(SATURATED, "too many requests of this model and tenant are waiting")
        if band.limit.full(band.count, band.bytes, size):
            return Refused(SATURATED, f"too many requests of priority {band.priority} are waiting")
        displaced: list[Waiting] = []
        if limits.total.full(len(self), self.bytes, size):
            lower = [other for other in self.bands() if other.priority < band.priority and other.count]
            count = len(self) - sum(other.count for other in lower)
            if not lower or limits.total.full(count, self.bytes - sum(other.bytes for other in lower), size):
                return Refused(SATURATED, "too many requests are waiting")
            while limits.total.full(len(self), self.bytes, size):
                while not lower[-1].count:
                    lower.pop()
                victim = lower[-1].last()
                self.remove(victim)
                displaced.append(victim)
        return displaced

    def _band(self, priority: int) -> Band:
        band = self._bands.get(priority)
        if band is None:
            fairness, ordering = self._policies(priority)
            band = self._bands[priority] = Band(priority, fairness, ordering, self.limits.of_band(priority))
            insort(self._order, -priority)
        return band

    def _flow(self, band: Band, key: FlowKey, now: float) -> Flow:
        self._flows_made += 1
        rule = self.limits.rule(key.model, key.tenant)
        made = Flow(key, self._flows_made, now, rule.limit or self.limits.flow, rule.weight)
        flow = band.flows[key] = self._idle[key] = made
        return flow

    def _forget_idle(self, now: float) -> None:
        for _ in range(min(_SWEEP, len(self._idle))):
            key, flow = self._idle.popitem(last=False)
            if now - flow.seen > FLOW_MEMORY or len(self._idle) >= MOST_IDLE:
                del self._bands[key.priority].flows[key]
            else:
                self._idle[key] = flow

    # ---- out ----

    def turns(self, band: Band, window: int) -> Iterator[list[Waiting]]:
        """Windows of a band, see `Fairness.turns`. Nothing may be added or removed while it is iterated over."""
        return iter(band.fairness.turns(window))

    def dispatch(self, waiting: Waiting, now: float, cost: float) -> None:
        """It goes to an endpoint now; `cost` as for `Fairness.spent`."""
        flow = waiting.flow
        assert flow is not None
        self._bands[flow.key.priority].fairness.spent(flow, cost)
        flow.dispatched += 1
        flow.seen = now
        self.remove(waiting)

    def cancel(self, request_id: int) -> Waiting | None:
        """The client is gone. `None` = it does not wait here."""
        waiting = self._by_id.get(request_id)
        if waiting is not None:
            self.remove(waiting)
        return waiting

    def remove(self, waiting: Waiting) -> None:
        flow = waiting.flow
        assert flow is not None and self._by_id.pop(waiting.request.id) is waiting
        band = self._bands[flow.key.priority]
        at = bisect_left(flow.waiting, (waiting.key, waiting.number))
        assert flow.waiting[at][2] is waiting
        del flow.waiting[at]
        flow.bytes -= waiting.size
        band.count -= 1
        del band.members[waiting.number]
        band.bytes -= waiting.size
        self.bytes -= waiting.size
        if not flow.waiting:
            self._idle[flow.key] = flow
        band.fairness.left(waiting)
        self._deadlines.remove(waiting)

    def _waits(self, waiting: Waiting) -> bool:
        return self._by_id.get(waiting.request.id) is waiting

    def next_deadline(self) -> float:
        """Clock seconds; `inf` = nobody has one."""
        first = self._deadlines.first()
        return inf if first is None else first.deadline

    def expire(self, now: float, most: float = inf) -> list[Waiting]:
        """Take out those whose time is over, the most overdue first, up to `most`."""
        late: list[Waiting] = []
        while len(late) < most and (first := self._deadlines.first()) is not None and first.deadline <= now:
            self.remove(first)
            late.append(first)
        return late

    def clear(self, most: float = inf) -> list[Waiting]:
        """Take out everybody, up to `most`: the highest band first, and in it who waits longest."""
        found: list[Waiting] = []
        for band in self.bands():
            while len(found) < most and band.count:
                found.append(band.longest_waiting())
                self.remove(found[-1])
        return found

    def validate(self) -> None:
        """Raise `AssertionError` unless every request is in exactly one place and every count is right."""
        seen: dict[int, Waiting] = {}
        assert sorted(self._order) == self._order == sorted(-priority for priority in self._bands)
        for priority, band in self._bands.items():
            for key, flow in band.flows.items():
                assert key == flow.key and key.priority == priority
                assert flow.waiting == sorted(flow.waiting)
                assert flow.bytes == sum(entry[2].size for entry in flow.waiting)
                assert bool(flow.waiting) != (key in self._idle)
                for sort_key, number, waiting in flow.waiting:
                    assert (sort_key, number) == (waiting.key, waiting.number) and waiting.flow is flow
                    assert waiting.request.id not in seen
                    seen[waiting.request.id] = waiting
            assert band.count == sum(map(len, band.flows.values())) == len(band.members)
            assert list(band.members) == sorted(band.members)
            assert all(self._waits(waiting) for waiting in band.members.values())
            assert band.bytes == sum(flow.bytes for flow in band.flows.values())
            offered = [w for turn in band.fairness.turns(1 << 30) for w in turn]
            assert len(set(map(id, offered))) == len(offered) and all(self._waits(w) for w in offered)
            assert bool(offered) == bool(band.count)
        assert seen == self._by_id
        assert self.bytes == sum(waiting.size for waiting in seen.values())
        assert self._deadlines.members() == {w.number for w in seen.values() if w.deadline < inf}
