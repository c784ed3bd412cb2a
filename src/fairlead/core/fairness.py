"""Whose turn it is among the flows of a band, what flows have in flight, and who goes first within a flow."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from itertools import islice
from math import inf

import numpy as np
from msgspec import Struct

from fairlead.core.columns import BoolColumn
from fairlead.core.flow import Flow, Waiting
from fairlead.core.table import EndpointTable

# Fairness policies: whose turn it is among the flows of a band.
#
# Theory. A flow that sends more must not get more while others want some too. What is shared is work, in milliseconds
# of an engine (`core.cost.work_ms`), not requests, since those differ 300-fold.
#
# Start-time fair queueing (Goyal, Vin and Cheng, 1996). A request of cost c that goes gets its flow's start tag S and
# the flow the finish tag F = S + c/weight. The flow with the smallest tag goes first. Virtual time v is the start tag
# of the request that went last; a flow that begins to wait gets S = max(F, v), or it would be owed what it never
# wanted. So while two flows both wait, the work that they are given, over their weights, never differs by more than
# c_f/w_f + c_g/w_g, the largest requests of each (the last one before they waited included):
#   Whoever goes has the smallest tag, v, so each that waits has a tag between v and v + c/w: at first, because its last
#   request had a start tag of at most v; and later, because a tag grows by c/w only when it was v. What a flow is given
#   over its weight is what its tag grows by, so two flows' differ by no more than their two ranges do.
# The bound holds for turns: where those whose turn it is cannot go, others may, and pay for it all the same. A cost
# that was said too high or too low moves the tag when the truth is known, so it is made up for in later turns. There is
# no quantum: a huge request delays nobody but its own flow.
#
# What a look at a band costs does not depend on the number of its flows: rings and sorted lists are kept, not made.

#: Flows that one look at a band considers when those whose turn it is cannot go now.
MOST_TURNS = 64


class Strict:
    """No fairness: the first of all by the ordering, whoever's it is. With `fcfs` this is one queue per band."""

    name = "global-strict"

    def __init__(self) -> None:
        self._all: list[tuple[float, int, Waiting]] = []

    def queued(self, waiting: Waiting) -> None:
        insort(self._all, (waiting.key, waiting.number, waiting))

    def left(self, waiting: Waiting) -> None:
        del self._all[bisect_left(self._all, (waiting.key, waiting.number))]

    def turns(self, window: int) -> Iterator[list[Waiting]]:
        if self._all:
            yield [entry[2] for entry in self._all[:window]]

    def spent(self, flow: Flow, cost: float) -> None:
        flow.served += cost

    corrected = spent

    def due(self, flow: Flow) -> bool:
        return False


class RoundRobin:
    """One request of each flow in turn."""

    name = "round-robin"

    def __init__(self) -> None:
        self._ring: deque[Flow] = deque()

    def queued(self, waiting: Waiting) -> None:
        flow = waiting.flow
        if flow is not None and len(flow) == 1:
            self._ring.append(flow)

    def left(self, waiting: Waiting) -> None:
        flow = waiting.flow
        if flow is not None and not len(flow):
            self._ring.remove(flow)

    def turns(self, window: int) -> Iterator[list[Waiting]]:
        for flow in list(islice(self._ring, MOST_TURNS)):
            yield flow.first(window)

    def spent(self, flow: Flow, cost: float) -> None:
        flow.served += cost
        if len(flow):
            self._ring.remove(flow)
            self._ring.append(flow)

    def corrected(self, flow: Flow, more: float) -> None:
        flow.served += more

    def due(self, flow: Flow) -> bool:
        return True


class StartTimeFair:
    """The flow that was given the least work goes first. `Flow.tag` is the finish tag of what it was given last."""

    name = "start-time-fair"

    def __init__(self) -> None:
        self._ranked: list[tuple[float, int, Flow]] = []
        self._time = 0.0

    def queued(self, waiting: Waiting) -> None:
        flow = waiting.flow
        if flow is not None and len(flow) == 1:
            flow.tag = max(flow.tag, self._now())
            self._rank(flow)

    def left(self, waiting: Waiting) -> None:
        flow = waiting.flow
        if flow is not None and not len(flow):
            self._unrank(flow)

    def turns(self, window: int) -> Iterator[list[Waiting]]:
        for _, _, flow in self._ranked[:MOST_TURNS]:
            yield flow.first(window)

    def spent(self, flow: Flow, cost: float) -> None:
        if not flow.waiting:
            now = self._now()
            if flow.tag < now:
                flow.tag = now
        if flow.tag > self._time:
            self._time = flow.tag
        self.corrected(flow, cost)

    def corrected(self, flow: Flow, more: float) -> None:
        flow.served += more
        waits = bool(flow.waiting)
        if waits:
            self._unrank(flow)
        flow.tag += more / flow.weight
        if waits:
            self._rank(flow)

    def due(self, flow: Flow) -> bool:
        # What it has in flight was not given to it yet.
        return not self._ranked or flow.tag - flow.wanted_ms / flow.weight <= self._ranked[0][0]

    def _now(self) -> float:
        # Flows that could not go while others did are behind the start tag of who went last.
        return min(self._time, self._ranked[0][0]) if self._ranked else self._time

    def _rank(self, flow: Flow) -> None:
        insort(self._ranked, (flow.tag, flow.number, flow))

    def _unrank(self, flow: Flow) -> None:
        del self._ranked[bisect_left(self._ranked, (flow.tag, flow.number))]


# What flows want: turns alone protect nobody whose requests do not wait, or whose neighbours' do not.
#
# Theory. An engine computes all that it holds at the same pace, so a flow's share of what is in flight is its share of
# the engines now. D is the work that is in flight or waits, of all flows of a band, of which f has d_f; n flows (by
# weight) have some.
#
# * A request of c ms of a flow with d_f + c <= (D + c)/2n, half an even share, is light. If it is its flow's turn, it
#   goes at once, also where the gate says closed: engines are full of others' requests. Light requests in flight stay
#   below half of all work in flight, so the gate's bound holds to a factor of two.
# * A flow with d_f + c > (D + c)/min(n, 4), more than an even share and than a quarter of all, is heavy. At an endpoint
#   where light requests run, or did within `LINGER` seconds, its requests are spaced so that computing their prompts
#   takes `SHARE` of the time: a step there is then at most 1/(1 - SHARE) times as long. A prompt of more than a step
#   counts as one step, or as its own length (spacing those out further would cost throughput, and the steps that they
#   are in are long all the same), and one that was refused as the time that it was there. Where the engine runs few
#   sequences at once, as many are left free as light requests were seen there. Nobody is held by this for more than
#   `PATIENCE` seconds: where heavy flows need more, they get it.

#: Of an even share what is light at most (and of all work in flight), and of all work what is heavy at least.
LIGHT, HEAVY = 0.5, 0.25
SHARE, LINGER, PATIENCE = 0.2, 0.25, 5.0


class Charge(Struct, eq=False):
    """What a flow was charged for a request that is in flight."""

    flow: Flow
    slot: int
    #: Clock seconds when it went.
    since: float
    #: Milliseconds of work: computing its prompt, one token of its answer, and all.
    prompt_ms: float
    token_ms: float
    ms: float
    light: bool

    def done_ms(self, status: int, tokens: int, took_ms: float) -> float:
        """Of the work that was charged, what the model server can have done: none of what it refused (by HTTP status),
        and of one that broke off or of which nobody counted `tokens` (< 0) no more than `took_ms`, what it had time
        for."""
        if status >= 400:
            return 0.0
        if 200 <= status < 300 and tokens >= 0:
            return self.prompt_ms + tokens * self.token_ms
        return min(self.ms, took_ms)


class _Guard(Struct):
    """Of an endpoint where light requests are or were: how many are and were at most, until when it is guarded once
    there are none, and clock seconds before which the next heavy one may not go."""

    count: int = 0
    most: int = 0
    until: float = -inf
    paced: float = -inf

    def stands(self, now: float) -> bool:
        return self.count > 0 or now < self.until


class Demand:
    """What the flows of a band want, and where heavy ones must wait. Milliseconds of work; slots are endpoints'."""

    def __init__(self) -> None:
        self._wanted_ms = self._in_flight_ms = self._light_ms = self._weight = 0.0
        self._count = self._in_flight = 0
        self._guards: dict[int, _Guard] = {}

    def __len__(self) -> int:
        """Requests in flight."""
        return self._in_flight

    def _add(self, flow: Flow, ms: float) -> None:
        if not flow.wanted:
            self._weight += flow.weight
        self._count += 1
        self._wanted_ms += ms
        flow.wanted += 1
        flow.wanted_ms += ms

    def _remove(self, flow: Flow, ms: float) -> None:
        self._count -= 1
        self._wanted_ms -= ms
        flow.wanted -= 1
        flow.wanted_ms -= ms
        if not flow.wanted:
            self._weight -= flow.weight
            flow.wanted_ms = 0.0
        if not self._count:  # sums of floats
            self._wanted_ms = self._weight = 0.0

    def queued(self, waiting: Waiting) -> None:
        assert waiting.flow is not None
        self._add(waiting.flow, waiting.ms)

    def left(self, waiting: Waiting) -> None:
        assert waiting.flow is not None
        self._remove(waiting.flow, waiting.ms)

    def charge(self, charge: Charge, step_ms: float) -> None:
        """It goes. `step_ms`: a step there that only decodes."""
        flow, slot, now = charge.flow, charge.slot, charge.since
        guard = self._guards.get(slot)
        if charge.light:
            if guard is None or not guard.stands(now):
                guard = self._guards[slot] = _Guard()
            guard.count += 1
            guard.most = max(guard.most, guard.count)
        elif guard is not None and self.heavy(flow, 0.0):
            space_ms = max(min(charge.prompt_ms, step_ms) / SHARE, charge.prompt_ms)
            guard.paced = max(guard.paced, now - step_ms * 1e-3) + space_ms * 1e-3
            if not guard.stands(now):
                del self._guards[slot]
        self._add(flow, charge.ms)
        flow.in_flight += 1
        self._in_flight += 1
        self._in_flight_ms += charge.ms
        self._light_ms += charge.ms if charge.light else 0.0

    def settle(self, charge: Charge, done_ms: float, took_ms: float, now: float) -> None:
        """It is over, with `done_ms` of work done, and was there for `took_ms`."""
        self._remove(charge.flow, charge.ms)
        charge.flow.in_flight -= 1
        self._in_flight -= 1
        self._in_flight_ms -= charge.ms
        guard = self._guards.get(charge.slot)
        if charge.light and guard is not None:
            guard.count -= 1
            guard.until = now + LINGER
            self._light_ms -= charge.ms
        elif guard is not None and done_ms < charge.ms:
            # It was refused, or broke off: what it cost the endpoint is not known better than by the time it was there.
            guard.paced = min(guard.paced, now + took_ms * 1e-3 * (1.0 / SHARE - 1.0))
        if not self._in_flight:
            self._in_flight_ms = self._light_ms = 0.0

    @property
    def guarding(self) -> bool:
        """Whether heavy requests may have to wait somewhere."""
        return bool(self._guards)

    def light(self, flow: Flow, ms: float) -> bool:
        """Whether one more request of the flow would be light."""
        return flow.wanted_ms + ms <= LIGHT * self._even(flow, ms)

    def fits(self, ms: float) -> bool:
        """Whether one more light request may go where the gate says closed."""
        return self._light_ms + ms <= LIGHT * (self._in_flight_ms + ms)

    def heavy(self, flow: Flow, ms: float) -> bool:
        """Whether the flow would be heavy with one more request."""
        wanted_ms = flow.wanted_ms + ms
        return wanted_ms > self._even(flow, ms) * (1.0 + 1e-6) and wanted_ms > HEAVY * (self._wanted_ms + ms)

    def _even(self, flow: Flow, ms: float) -> float:
        """An even share of what would be wanted with `ms` more of this flow, by weight."""
        weight = self._weight if flow.wanted else self._weight + flow.weight
        return (self._wanted_ms + ms) * flow.weight / weight

    def held(self, slot: int, table: EndpointTable, now: float) -> float:
        """Clock seconds before which a heavy request must not go there; `inf` = before another ends,
        `-inf` = it may go."""
        guard = self._guards.get(slot)
        if guard is None or not guard.stands(now):
            return -inf
        limit = table.max_seqs[slot]
        away = min(guard.most, max(limit // 4, 1)) - guard.count
        if limit and table.queue[slot] + table.active[slot] >= limit - max(away, 0):
            return inf
        return guard.paced if now < guard.paced else -inf

    def calm(self, table: EndpointTable, now: float) -> tuple[BoolColumn | None, float]:
        """Where a heavy request may go now (`None` = everywhere), and the clock seconds when that is more."""
        held = {slot: until for slot in self._guards if (until := self.held(slot, table, now)) > now}
        if not held:
            return None, inf
        calm = np.ones(len(table), dtype=np.bool_)
        calm[list(held)] = False
        return calm, min(held.values())

    def validate(self, flows: list[Flow]) -> None:
        """Raise `AssertionError` unless the sums are those of `flows`, which are all that there are."""
        wanted = sum(flow.wanted_ms for flow in flows)
        assert abs(self._wanted_ms - wanted) <= 1e-6 * max(wanted, 1.0)
        assert abs(self._weight - sum(flow.weight for flow in flows if flow.wanted)) < 1e-6
        assert all(flow.wanted == flow.in_flight + len(flow) for flow in flows)
        assert self._count == sum(flow.wanted for flow in flows)
        assert self._in_flight == sum(flow.in_flight for flow in flows)
        assert sum(guard.count for guard in self._guards.values()) <= self._in_flight


# Orderings: who goes first within a flow.
#
# Starvation bounds, with requests arriving forever:
# * `fcfs`: a request waits for those that arrived before it, no others.
# * `edf`: one with a deadline is overtaken only by those with an earlier one, so not by any that arrives after its
#   deadline less the shortest time to live. Without deadlines it is `fcfs` behind all that have one.
# * `least-work`: a request of w tokens is overtaken only by those that arrive within w / `ageing` seconds after it.


class Fcfs:
    """First come, first served."""

    name = "fcfs"

    def key(self, waiting: Waiting) -> float:
        return waiting.since


class EarliestDeadline:
    """The most urgent first: the earlier of the time to live's end and the client's TTFT objective."""

    name = "edf"

    def key(self, waiting: Waiting) -> float:
        slo = waiting.request.slo_ttft_ms
        return min(waiting.deadline, waiting.request.arrived + slo / 1000.0 if slo > 0 else inf)


class LeastWork:
    """The least predicted work first; `ageing` tokens of it are forgiven for each second that a request waits longer.

    work - ageing · (now - since) ranks like work + ageing · since, which does not change while it waits.
    """

    name = "least-work"

    def __init__(self, ageing: float = 1000.0) -> None:
        if not ageing > 0:
            raise ValueError("without ageing the largest request of a busy flow would wait for ever")
        self.ageing = ageing

    def key(self, waiting: Waiting) -> float:
        return waiting.work + self.ageing * waiting.since
