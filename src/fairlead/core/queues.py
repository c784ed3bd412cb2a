"""The queues of waiting requests: bands and their flows, with limits, deadlines, counts and minimum shares.

Rules
* Only `Queues` adds and removes requests. A request is in exactly one flow, once, until it is sent, cancelled or
  expired. `validate()` proves this, and that every count equals the sum that it stands for.
* Limits apply to requests and bytes: in total, per band, per flow. A new request over a limit is refused. The exception
  is the total limit if lower bands can make enough room: then the newest requests of the lowest band are displaced.
* The time is always passed in.
* Idle flows are forgotten after `FLOW_MEMORY` seconds, or when there are more than `MOST_IDLE`, because clients choose
  the names of tenants.
"""

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from math import inf
from operator import attrgetter

from msgspec import Struct

from fairlead.core.fairness import Charge, Demand, Strict
from fairlead.core.flow import SATURATED, Fairness, Flow, FlowKey, Limit, Limits, Ordering, Waiting
from fairlead.core.policy import Refused
from fairlead.core.request import Request

# The deadlines of waiting requests. They are kept in buckets, so that removing a request early costs no more than
# expiring it.
#
# A heap would keep removed requests until their deadlines, or block all others while it is cleaned. Here only the
# bucket that is due next is sorted, once. Most of it is already in order, because requests are added as they arrive.

#: Buckets per second.
_PER_SECOND = 8
_deadline = attrgetter("deadline")


class Deadlines:
    """Waiting requests by deadline. Requests without a deadline (`inf`) are not kept."""

    def __init__(self) -> None:
        self._buckets: dict[int, dict[int, Waiting]] = {}
        #: Heap of the keys of `_buckets`, and of some buckets that are already gone.
        self._keys: list[int] = []
        #: The bucket that is due next: its key, and the negated deadlines and the numbers of its members and of some
        #: removed ones, the first due last. Two plain lists, because thousands of tuples would trigger the cycle
        #: collector. No references to members, because thousands of them would then be freed in one call.
        self._next = -1
        self._times: list[float] = []
        self._numbers: list[int] = []

    def add(self, waiting: Waiting) -> None:
        if waiting.deadline == inf:
            return
        key = int(waiting.deadline * _PER_SECOND)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = {}
            heappush(self._keys, key)
        bucket[waiting.number] = waiting
        if key == self._next:
            place = bisect_left(self._times, -waiting.deadline)
            self._times.insert(place, -waiting.deadline)
            self._numbers.insert(place, waiting.number)

    def remove(self, waiting: Waiting) -> None:
        if waiting.deadline == inf:
            return
        key = int(waiting.deadline * _PER_SECOND)
        bucket = self._buckets[key]
        del bucket[waiting.number]
        if not bucket:
            del self._buckets[key]
            if key == self._next:
                self._next = -1

    def first(self) -> Waiting | None:
        """Return the request with the earliest deadline; among equals the one that arrived first."""
        keys = self._keys
        while keys and keys[0] not in self._buckets:
            heappop(keys)
        if not keys:
            return None
        bucket = self._buckets[keys[0]]
        if keys[0] != self._next:
            self._next = keys[0]
            members = sorted(bucket.values(), key=_deadline)  # stable: equal deadlines keep the order of arrival
            members.reverse()
            self._times = [-waiting.deadline for waiting in members]
            self._numbers = [waiting.number for waiting in members]
        while self._numbers[-1] not in bucket:
            self._numbers.pop()
            self._times.pop()
        return bucket[self._numbers[-1]]

    def members(self) -> set[int]:
        """Return the numbers of all requests that are kept."""
        return {number for bucket in self._buckets.values() for number in bucket}


# The pace at which the waiting requests of one model are sent.
#
# Rules
# * Each model has its own, because different endpoints may serve models.
# * It is the mean time from one to the next, over the last `RECENT_S` seconds or `RECENT` requests, whichever is more.
#   Times in which none waited do not count.
# * A silence counts as soon as it makes the mean longer. The next request is not expected sooner than after as much
#   time again. Until one is sent nothing else is known: many may be sent at once.
# * When requests wait again after none did, the former pace counts as one measurement; `PACE_MEMORY` seconds after it
#   was measured not at all.

RECENT_S, RECENT = 10.0, 16.0
PACE_MEMORY = 60.0


class Pace(Struct):
    """The pace of one model. Times are clock seconds."""

    #: Number of waiting requests by priority.
    waiting: dict[int, int] = {}
    #: Requests sent lately, and the seconds that these took.
    sent: float = 0.0
    took_s: float = 0.0
    #: When the last one was sent, or when the first one joined after none had waited.
    since: float = -inf
    measured: float = -inf

    def joined(self, priority: int, now: float) -> None:
        if not self.waiting:
            recent = self.sent > 0.0 and now - self.measured <= PACE_MEMORY
            self.sent, self.took_s = (1.0, self.took_s / self.sent) if recent else (0.0, 0.0)
            self.since = now
        self.waiting[priority] = self.waiting.get(priority, 0) + 1

    def left(self, priority: int) -> None:
        self.waiting[priority] -= 1
        if not self.waiting[priority]:
            del self.waiting[priority]

    def dispatched(self, now: float) -> None:
        """Take note that one is sent that has waited. Call it before `left`."""
        sent, took_s = self.sent + 1.0, self.took_s + now - self.since
        recent = min(max(RECENT / sent, RECENT_S / max(took_s, RECENT_S)), 1.0)
        self.sent, self.took_s, self.since = sent * recent, took_s * recent, now
        self.measured = now

    def drains_s(self, now: float) -> Iterator[tuple[int, float]]:
        """By priority of those that wait, the highest first: seconds until all of this and higher ones are sent."""
        silence, each_s, count = now - self.since, 0.0, 0
        if self.sent:
            each_s = max(self.took_s / self.sent, (self.took_s + silence) / (self.sent + 1.0))
        for priority in sorted(self.waiting, reverse=True):
            count += self.waiting[priority]
            yield priority, max(count * each_s, silence)


FLOW_MEMORY = 300.0
MOST_IDLE = 10_000
#: Bands, before no more are made for what others report.
MOST_BANDS = 256
#: Idle flows checked for removal per queued request.
_SWEEP = 2


class Band:
    """All flows of one priority."""

    def __init__(self, priority: int, fairness: Fairness, ordering: Ordering, limit: Limit) -> None:
        self.priority = priority
        self.limit = limit
        self.fairness = fairness
        self.ordering = ordering
        #: Whether flows are protected from each other; and the work that they want.
        self.fair = not isinstance(fairness, Strict)
        self.demand = Demand()
        self.flows: dict[FlowKey, Flow] = {}
        #: Waiting requests by number, which is the order of arrival.
        self.members: OrderedDict[int, Waiting] = OrderedDict()
        self.count = 0
        self.bytes = 0

    def last(self) -> Waiting:
        """Return the request that joined last. Raise `StopIteration` if none waits."""
        return next(reversed(self.members.values()))

    def longest_waiting(self) -> Waiting:
        """Return the request that joined first. Raise `StopIteration` if none waits."""
        return next(iter(self.members.values()))

    def oldest(self) -> float:
        """Return the clock seconds since when the longest-waiting request waits; `inf` = none waits."""
        return self.longest_waiting().since if self.members else inf


class Queues:
    """All waiting requests. `policies(priority)` creates the fairness policy and the ordering of a new band."""

    def __init__(self, policies: Callable[[int], tuple[Fairness, Ordering]], limits: Limits | None = None) -> None:
        self._policies = policies
        self.limits = limits or Limits()
        #: By priority. `_order` has the negated priorities, sorted.
        self._bands: dict[int, Band] = {}
        self._order: list[int] = []
        #: Number of waiting requests.
        self.count = 0
        self._deadlines = Deadlines()
        #: By target model: those of which requests wait, and the last ones of which none wait any more.
        self._paces: dict[str, Pace] = {}
        self._idle_paces: OrderedDict[str, Pace] = OrderedDict()
        #: The number of the request that joined last.
        self.newest = 0
        self._flows_made = 0
        #: Idle flows, the longest idle first. (In a plain dict, each search for the first entry would pass over all
        #: deleted ones.)
        self._idle: OrderedDict[FlowKey, Flow] = OrderedDict()
        self.bytes = 0
        #: Flows whose changes were not yet reported to peers; `None` = there are no peers to report to.
        self.changed: set[FlowKey] | None = None

    def __len__(self) -> int:
        return self.count

    def members(self) -> list[Waiting]:
        """Return all waiting requests, highest priority first."""
        return [waiting for band in self.bands() for waiting in band.members.values()]

    def bands(self) -> list[Band]:
        """Return all bands that ever had a request, highest priority first."""
        return [self._bands[-negative] for negative in self._order]

    @property
    def models(self) -> Collection[str]:
        """The target models of which requests wait."""
        return self._paces.keys()

    # ---- in ----

    def put(
        self, request: Request, now: float, ttl: float, work: float, output: float = 0.0, ms: float = 0.0
    ) -> tuple[Waiting | Refused, list[Waiting]]:
        """Queue a request for at most `ttl` seconds. `work`, `output`, `ms`: see `Waiting`. Return the waiting request
        or its refusal, and the requests that it displaced."""
        band, flow = self.of(request, now)
        key = flow.key
        displaced = self._make_way(request, band, flow)
        if isinstance(displaced, Refused):
            self._forget_idle(now)
            return displaced, []
        self.newest += 1
        waiting = Waiting(request, now, now + ttl, max(work, 1.0), self.newest, flow=flow, output=output, ms=ms)
        waiting.key = band.ordering.key(waiting)
        self._idle.pop(key, None)
        insort(flow.waiting, (waiting.key, waiting.number, waiting))
        flow.seen = now
        flow.bytes += waiting.size
        band.count += 1
        band.members[waiting.number] = waiting
        band.bytes += waiting.size
        self.bytes += waiting.size
        self.count += 1
        self._deadlines.add(waiting)
        self._pace(request).joined(request.priority, now)
        band.demand.queued(waiting)
        band.fairness.queued(waiting)
        self._note(key)
        self._forget_idle(now)
        return waiting, displaced

    def _pace(self, request: Request) -> Pace:
        model = request.target_model
        pace = self._paces.get(model)
        if pace is None:
            pace = self._paces[model] = self._idle_paces.pop(model) if model in self._idle_paces else Pace()
        return pace

    def _make_way(self, request: Request, band: Band, flow: Flow) -> "list[Waiting] | Refused":
        size, limits = request.body_bytes, self.limits
        if flow.limit.full(len(flow), flow.bytes, size):
            return Refused(SATURATED, "too many requests of this model and tenant are waiting", status=429)
        if band.limit.full(band.count, band.bytes, size):
            return Refused(SATURATED, f"too many requests of priority {band.priority} are waiting", status=429)
        displaced: list[Waiting] = []
        if limits.total.full(len(self), self.bytes, size):
            lower = [
                lower_band for lower_band in self.bands() if lower_band.priority < band.priority and lower_band.count
            ]
            count = len(self) - sum(lower_band.count for lower_band in lower)
            if not lower or limits.total.full(count, self.bytes - sum(lower_band.bytes for lower_band in lower), size):
                return Refused(SATURATED, "too many requests are waiting", status=429)
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

    def _forget_idle(self, now: float) -> None:
        idle = self._idle
        for _ in range(_SWEEP):
            if not idle:
                return
            key = next(iter(idle))
            if now - idle[key].seen <= FLOW_MEMORY and len(idle) <= MOST_IDLE:
                return
            del idle[key], self._bands[key.priority].flows[key]

    # ---- out ----

    def turns(self, band: Band, window: int) -> Iterator[list[Waiting]]:
        """Iterate over the windows of a band, see `Fairness.turns`. Do not add or remove requests meanwhile."""
        return iter(band.fairness.turns(window))

    def active(self) -> list[FlowKey]:
        """Return the flows that have requests waiting or in flight."""
        return [key for band in self._bands.values() for key, flow in band.flows.items() if flow.wanted]

    def guarding(self, priority: int) -> bool:
        """Whether heavy requests of the band may have to wait at some endpoint."""
        band = self._bands.get(priority)
        return band is not None and band.demand.guarding

    def of(self, request: Request, now: float) -> tuple[Band, Flow]:
        """Return the band and the flow of the request, which are created if needed."""
        return self.named(FlowKey(request.priority, request.model, request.fairness_id), now)

    def named(self, key: FlowKey, now: float) -> tuple[Band, Flow]:
        band = self._band(key.priority)
        flow = band.flows.get(key)
        if flow is None:
            self._flows_made += 1
            rule = self.limits.rule(key.model, key.tenant)
            flow = Flow(key, self._flows_made, now, rule.limit or self.limits.flow, rule.weight)
            band.flows[key] = self._idle[key] = flow
        return band, flow

    def keep(self, key: FlowKey, now: float) -> None:
        """Remember the flow for another `FLOW_MEMORY` seconds, although it has no requests that are counted."""
        if key in self._idle:
            self._idle[key].seen = now
            self._idle.move_to_end(key)

    def served_elsewhere(self, key: FlowKey, ms: float, now: float) -> None:
        """Account for `ms` of work that another scheduler gave to the flow, unless it has one priority too many.
        Negative = what it gave before took so much less than predicted."""
        if key.priority not in self._bands and len(self._bands) >= MOST_BANDS:
            return
        self._forget_idle(now)
        band, flow = self.named(key, now)
        if ms < 0.0:
            band.fairness.corrected(flow, ms)
        else:
            band.fairness.spent(flow, ms)
        flow.served -= ms

    def sent(self, charge: Charge, step_ms: float) -> None:
        """Charge the flow for a request that is sent to an endpoint now. See `Demand.charge`; `settle` ends it."""
        flow = charge.flow
        band = self._bands[flow.key.priority]
        band.fairness.spent(flow, charge.ms)
        band.demand.charge(charge, step_ms)
        flow.seen = charge.since
        self._idle.pop(flow.key, None)
        self._note(flow.key)

    def settle(self, charge: Charge, done_ms: float, took_ms: float, now: float) -> None:
        """Settle the charge of a request that ended. See `Demand.settle`."""
        flow = charge.flow
        band = self._bands[flow.key.priority]
        band.fairness.corrected(flow, done_ms - charge.ms)
        band.demand.settle(charge, done_ms, took_ms, now)
        self._note(flow.key)
        if not flow.wanted:
            self._idle[flow.key] = flow
            self._forget_idle(now)

    def dispatch(self, waiting: Waiting, charge: Charge, step_ms: float) -> None:
        """Take the request out of its queue and charge its flow: it is sent to an endpoint now."""
        waiting.charge = charge
        self.sent(charge, step_ms)
        charge.flow.dispatched += 1
        if waiting.since < charge.since:
            self._pace(waiting.request).dispatched(charge.since)
        self.remove(waiting)

    def remove(self, waiting: Waiting) -> None:
        """Take the request out of its queue: it is sent, it expired, or its client is gone."""
        flow = waiting.flow
        assert flow is not None
        band = self._bands[flow.key.priority]
        index = bisect_left(flow.waiting, (waiting.key, waiting.number))
        assert flow.waiting[index][2] is waiting
        del flow.waiting[index]
        self.count -= 1
        flow.bytes -= waiting.size
        band.count -= 1
        del band.members[waiting.number]
        band.bytes -= waiting.size
        self.bytes -= waiting.size
        band.demand.left(waiting)
        if not flow.wanted:
            self._idle[flow.key] = flow
        band.fairness.left(waiting)
        self._deadlines.remove(waiting)
        self._note(flow.key)
        pace, model = self._pace(waiting.request), waiting.request.target_model
        pace.left(waiting.request.priority)
        if not pace.waiting:
            self._idle_paces[model] = self._paces.pop(model)
            if len(self._idle_paces) > MOST_IDLE:
                self._idle_paces.popitem(last=False)

    def _note(self, key: FlowKey) -> None:
        if self.changed is not None:
            self.changed.add(key)

    def _waits(self, waiting: Waiting) -> bool:
        return self._bands[waiting.request.priority].members.get(waiting.number) is waiting

    def drain_s(self, now: float, priority: int, model: str) -> float:
        """Return the seconds until the waiting requests of a target model of this and higher priorities are sent, at
        the present pace. Another one of this priority would wait that long."""
        pace = self._paces.get(model)
        drains = () if pace is None else pace.drains_s(now)
        return max((seconds for p, seconds in drains if p >= priority), default=0.0)

    def drains_s(self, now: float) -> dict[int, float]:
        """The longest such times of all models, by band, the highest first."""
        longest, drains = 0.0, dict.fromkeys((band.priority for band in self.bands()), 0.0)
        for pace in self._paces.values():
            for priority, seconds in pace.drains_s(now):
                drains[priority] = max(drains[priority], seconds)
        for priority in drains:
            longest = drains[priority] = max(drains[priority], longest)
        return drains

    def model_drains_s(self, now: float, least: float) -> dict[str, float]:
        """Such times for all waiting requests of each target model; 0 where the pace was measured with fewer than
        `least` requests."""
        return {
            model: max(seconds for _, seconds in pace.drains_s(now)) if pace.sent >= least else 0.0
            for model, pace in self._paces.items()
        }

    def next_deadline(self) -> float:
        """Return the earliest deadline in clock seconds; `inf` = there is none."""
        first = self._deadlines.first()
        return inf if first is None else first.deadline

    def expire(self, now: float, most: float = inf) -> list[Waiting]:
        """Take out up to `most` requests whose deadline has passed, the most overdue first."""
        late: list[Waiting] = []
        while len(late) < most and (first := self._deadlines.first()) is not None and first.deadline <= now:
            self.remove(first)
            late.append(first)
        return late

    def clear(self, most: float = inf, now: float = inf, after: float = 0.0) -> list[Waiting]:
        """Take out up to `most` requests that have waited for `after` seconds: the highest band first, in each band the
        longest-waiting first."""
        removed: list[Waiting] = []
        for band in self.bands():
            while len(removed) < most and band.count and band.oldest() + after <= now:
                removed.append(band.longest_waiting())
                self.remove(removed[-1])
        return removed

    def validate(self) -> None:
        """Raise `AssertionError` unless every request is in exactly one flow and every count is right."""
        seen: dict[Waiting, None] = {}
        assert sorted(self._order) == self._order == sorted(-priority for priority in self._bands)
        for priority, band in self._bands.items():
            for key, flow in band.flows.items():
                assert key == flow.key and key.priority == priority
                assert flow.waiting == sorted(flow.waiting)
                assert flow.bytes == sum(entry[2].size for entry in flow.waiting)
                assert bool(flow.wanted) != (key in self._idle)
                for sort_key, number, waiting in flow.waiting:
                    assert (sort_key, number) == (waiting.key, waiting.number) and waiting.flow is flow
                    assert waiting not in seen
                    seen[waiting] = None
            assert band.count == sum(map(len, band.flows.values())) == len(band.members)
            assert list(band.members) == sorted(band.members)
            assert all(self._waits(waiting) for waiting in band.members.values())
            assert band.bytes == sum(flow.bytes for flow in band.flows.values())
            band.demand.validate(list(band.flows.values()))
            offered = [w for turn in band.fairness.turns(1 << 30) for w in turn]
            assert len(set(map(id, offered))) == len(offered) and all(self._waits(w) for w in offered)
            assert bool(offered) == bool(band.count)
        assert set(seen) == set(self.members()) and len(seen) == self.count
        assert self.bytes == sum(waiting.size for waiting in seen)
        counted = Counter((waiting.request.target_model, waiting.request.priority) for waiting in seen)
        assert counted == {(name, p): n for name, pace in self._paces.items() for p, n in pace.waiting.items()}
        assert not self._idle_paces.keys() & self._paces.keys()
        assert self._deadlines.members() == {w.number for w in seen if w.deadline < inf}


# Minimum shares: the work that a lower band gets even if higher bands want all of it.
#
# Theory. Bands are strict, so a lower band may starve. While a band with a share `s` waits, it is owed `s` of all work
# that leaves the queues, and the work that it gets is deducted. While it is owed work it goes before all other bands;
# otherwise it keeps its place below the higher ones. So a waiting band gets at least its share, late by at most `MOST`
# ms, and never more than its share at the expense of a higher band.
#
# Rules
# * A band is owed nothing for times in which none of its requests wait.
# * The debt is bounded, so a band that could not be served for a while does not take everything afterwards.
# * Without shares nothing is counted.

#: Milliseconds of work that a band can be owed at most, and owe unless a single request cost more.
MOST = 3000.0


class Shares:
    """Minimum shares of bands. `of`: priority → share of the work, 0..1. Raises `ValueError` if the sum exceeds 1."""

    def __init__(self, of: Mapping[int, float]) -> None:
        self._of = {priority: share for priority, share in of.items() if share > 0.0}
        if any(not 0.0 <= share <= 1.0 for share in of.values()) or sum(of.values()) > 1.0:
            raise ValueError(f"the bands' shares must be at least 0, and at most 1 together: {dict(of)}")
        #: Priority → milliseconds of work that the band is owed.
        self.owed = dict.fromkeys(self._of, 0.0)

    def order(self, bands: Sequence[Band]) -> Sequence[Band]:
        """Return `bands` in the order in which they are served: those that are owed work first, the most owed first."""
        if not self._of:
            return bands
        owed = self.owed
        return sorted(bands, key=lambda band: -max(owed.get(band.priority, 0.0), 0.0))

    def spent(self, bands: Sequence[Band], priority: int, cost: float) -> None:
        """Account for a request of the band that is sent to an endpoint. Call it while the request still counts in its
        band."""
        if not self._of:
            return
        waiting = {band.priority for band in bands if band.count}
        for band_priority, share in self._of.items():
            if band_priority not in waiting:
                self.owed[band_priority] = 0.0
                continue
            owed = self.owed[band_priority] + share * cost
            if band_priority == priority:  # of its largest requests too, a band pays back all that they cost
                owed = max(owed - cost, min(owed, -max(cost, MOST)))
            self.owed[band_priority] = min(owed, MOST)
