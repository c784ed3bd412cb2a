"""The turns of flows in a band, and the work that flows have in flight."""

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
# Theory. A flow that sends more requests must not get more while other flows want work, too. The shared quantity is
# work in milliseconds of an engine (`core.cost.work_ms`), not requests, since the cost of requests differs 300-fold.
#
# Start-time fair queueing (Goyal, Vin and Cheng, 1996). A request of cost c is sent with its flow's start tag S, and
# the flow gets the finish tag F = S + c/weight. The flow with the smallest tag goes first. Virtual time v is the start
# tag of the request that was sent last. A flow that begins to wait gets S = max(F, v); otherwise it would be owed work
# for times when it wanted none. While two flows f and g both wait, the work that they get, divided by their weights,
# never differs by more than c_f/w_f + c_g/w_g, where c is the largest request of each (including the last one before
# they waited). Proof:
#   The flow that goes has the smallest tag, v. So each waiting flow has a tag between v and v + c/w: at first, because
#   its last request had a start tag of at most v; later, because a tag grows by c/w only when it was v. A flow's tag
#   grows by the work that it gets, divided by its weight, so the work of two flows differs by no more than the two
#   ranges together.
# The bound holds for turns: if a flow whose turn it is cannot send, others may, and they are charged all the same. A
# cost that was predicted too high or too low is corrected in the tag once the real cost is known, so later turns
# compensate for it. There is no quantum: a huge request delays only its own flow.
#
# A pass over a band does not depend on the number of its flows: rings and sorted lists are maintained, not rebuilt.

#: Flows considered in one pass over a band if those whose turn it is cannot send now.
MOST_TURNS = 64


class Strict:
    """No fairness: the requests of all flows in one order. With the ordering `fcfs` this is one queue per band."""

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
        # Its tag already includes the work that it has in flight, which it has not received yet.
        return not self._ranked or flow.tag - flow.wanted_ms / flow.weight <= self._ranked[0][0]

    def _now(self) -> float:
        # Flows that could not send while others did have tags below the start tag of the last sent request.
        return min(self._time, self._ranked[0][0]) if self._ranked else self._time

    def _rank(self, flow: Flow) -> None:
        insort(self._ranked, (flow.tag, flow.number, flow))

    def _unrank(self, flow: Flow) -> None:
        del self._ranked[bisect_left(self._ranked, (flow.tag, flow.number))]


# The work that flows want. Turns alone do not protect a flow whose requests do not wait, or whose neighbours' requests
# do not wait.
#
# Theory. An engine computes all of its requests at the same pace, so a flow's share of the work in flight is its
# current share of the engines. D is the work in flight or waiting of all flows of a band; d_f is that of flow f; n
# flows (by weight) have some.
#
# * A request of c ms is light if d_f + c <= (D + c)/2n, half an even share. If it is its flow's turn, it is sent
#   immediately, even to endpoints that the gate has closed: the engines are full with requests of other flows. Light
#   requests stay below half of all work in flight, so the gate's bound is exceeded by at most a factor of two.
# * A flow is heavy if d_f + c > (D + c)/min(n, 4), more than an even share and more than a quarter of all work. At an
#   endpoint where light requests run, or ran within the last `LINGER` seconds, heavy requests are spaced so that
#   computing their prompts takes `SHARE` of the time. A step there is then at most 1/(1 - SHARE) times as long. A
#   prompt that takes longer than a step is spaced like one step, or by its own time if that is more (more space would
#   cost throughput, and its own steps are long in any case). A refused request counts as the time that it spent there.
#   If the engine runs few sequences at once, as many sequences are kept free as light requests were seen there. No
#   request is held by this for more than `PATIENCE` seconds: heavy flows that need more get it.

#: A light request: the largest share of an even share (and of all work in flight). A heavy flow: the smallest share of
#: all work.
LIGHT, HEAVY = 0.5, 0.25
SHARE, LINGER, PATIENCE = 0.2, 0.25, 5.0


class Charge(Struct, eq=False):
    """What a flow was charged for a request in flight."""

    flow: Flow
    slot: int
    #: Clock seconds when it was sent.
    since: float
    #: Milliseconds of work: computing its prompt, one token of its answer, and the whole request.
    prompt_ms: float
    token_ms: float
    ms: float
    light: bool

    def done_ms(self, status: int, tokens: int, took_ms: float) -> float:
        """Return the milliseconds of work that the model server can have done: none if it refused the request (by HTTP
        status), and at most `took_ms` if the answer broke off or its `tokens` are not known (< 0)."""
        if status >= 400:
            return 0.0
        if 200 <= status < 300 and tokens >= 0:
            return self.prompt_ms + tokens * self.token_ms
        return min(self.ms, took_ms)


class _Guard(Struct):
    """Protects an endpoint that has or had light requests. `count`: light requests there, `most`: the highest count,
    `until`: end of the protection once there are none, `paced`: earliest time for the next heavy request. Times are
    clock seconds."""

    count: int = 0
    most: int = 0
    until: float = -inf
    paced: float = -inf

    def stands(self, now: float) -> bool:
        return self.count > 0 or now < self.until


class Demand:
    """The work that the flows of a band want, in milliseconds, and the endpoints at which heavy flows must wait."""

    def __init__(self) -> None:
        self._wanted_ms = self._in_flight_ms = self._light_ms = self._weight = 0.0
        self._count = self._in_flight = 0
        self._guards: dict[int, _Guard] = {}

    def __len__(self) -> int:
        """The number of requests in flight."""
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
        if not self._count:  # clears rounding errors of the sums
            self._wanted_ms = self._weight = 0.0

    def queued(self, waiting: Waiting) -> None:
        assert waiting.flow is not None
        self._add(waiting.flow, waiting.ms)

    def left(self, waiting: Waiting) -> None:
        assert waiting.flow is not None
        self._remove(waiting.flow, waiting.ms)

    def charge(self, charge: Charge, step_ms: float) -> None:
        """Charge a request that is sent. `step_ms`: a decode-only step at its endpoint."""
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
        """End the charge of a request that took `done_ms` of work and was at its endpoint for `took_ms`."""
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
            # It was refused or broke off: the best estimate of its cost is the time that it was there.
            guard.paced = min(guard.paced, now + took_ms * 1e-3 * (1.0 / SHARE - 1.0))
        if not self._in_flight:
            self._in_flight_ms = self._light_ms = 0.0

    @property
    def guarding(self) -> bool:
        """Whether heavy requests may have to wait at some endpoint."""
        return bool(self._guards)

    def light(self, flow: Flow, ms: float) -> bool:
        """Whether one more request of the flow would be light."""
        return flow.wanted_ms + ms <= LIGHT * self._even(flow, ms)

    def fits(self, ms: float) -> bool:
        """Whether one more light request may be sent to an endpoint that the gate has closed."""
        return self._light_ms + ms <= LIGHT * (self._in_flight_ms + ms)

    def heavy(self, flow: Flow, ms: float) -> bool:
        """Whether the flow would be heavy with one more request."""
        wanted_ms = flow.wanted_ms + ms
        return wanted_ms > self._even(flow, ms) * (1.0 + 1e-6) and wanted_ms > HEAVY * (self._wanted_ms + ms)

    def _even(self, flow: Flow, ms: float) -> float:
        """Return the flow's even share, by weight, of all work if it wanted `ms` more."""
        weight = self._weight if flow.wanted else self._weight + flow.weight
        return (self._wanted_ms + ms) * flow.weight / weight

    def held(self, slot: int, table: EndpointTable, now: float) -> float:
        """Return the clock seconds before which no heavy request may go to the slot; `-inf` = it may go now, `inf` =
        not before another request ends."""
        guard = self._guards.get(slot)
        if guard is None or not guard.stands(now):
            return -inf
        limit = table.max_seqs[slot]
        away = min(guard.most, max(limit // 4, 1)) - guard.count
        if limit and table.queue[slot] + table.active[slot] >= limit - max(away, 0):
            return inf
        return guard.paced if now < guard.paced else -inf

    def calm(self, table: EndpointTable, now: float) -> tuple[BoolColumn | None, float]:
        """Return the slots to which a heavy request may go now (`None` = all), and the clock seconds when there will be
        more."""
        held = {slot: until for slot in self._guards if (until := self.held(slot, table, now)) > now}
        if not held:
            return None, inf
        calm = np.ones(len(table), dtype=np.bool_)
        calm[list(held)] = False
        return calm, min(held.values())

    def validate(self, flows: list[Flow]) -> None:
        """Raise `AssertionError` unless the sums match `flows`, which must be all flows of the band."""
        wanted = sum(flow.wanted_ms for flow in flows)
        assert abs(self._wanted_ms - wanted) <= 1e-6 * max(wanted, 1.0)
        assert abs(self._weight - sum(flow.weight for flow in flows if flow.wanted)) < 1e-6
        assert all(flow.wanted == flow.in_flight + len(flow) for flow in flows)
        assert self._count == sum(flow.wanted for flow in flows)
        assert self._in_flight == sum(flow.in_flight for flow in flows)
        assert sum(guard.count for guard in self._guards.values()) <= self._in_flight
