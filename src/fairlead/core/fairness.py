"""Whose turn it is among the flows of a band, and who goes first within a flow."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from itertools import islice
from math import inf

from fairlead.core.flow import Flow, Waiting

# Fairness policies: whose turn it is among the flows of a band.
#
# Theory. A flow that sends more must not get more while others want some too. What is shared is work (tokens), not
# requests, since those differ 300-fold.
#
# * Deficit round robin (Shreedhar and Varghese, 1996), in the form that lets a flow overdraw: a flow spends while its
#   credit is positive, and the overdraft is paid in the next rounds. Between two busy flows the attained work never
#   differs by more than two quanta. A quantum is never below the largest cost seen, so that one refill a round is
#   enough.
# * Virtual token counter (Sheng et al., 2024): the flow that was served least goes first. A flow that comes back from
#   idling starts at the level of those that are there, or it would be owed what it never wanted. Between two busy
#   flows the counters never differ by more than twice the largest request.
#
# Both divide by weights: a flow of weight 3 gets three times the work of one of weight 1. Weights are at least 1.
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


class RoundRobin:
    """One request of each flow in turn."""

    name = "round-robin"

    def __init__(self) -> None:
        self._ring: deque[Flow] = deque()

    def queued(self, waiting: Waiting) -> None:
        flow = waiting.flow
        if flow is not None and len(flow) == 1:
            self._woken(flow)

    def left(self, waiting: Waiting) -> None:
        flow = waiting.flow
        if flow is not None and not len(flow):
            self._ring.remove(flow)

    def turns(self, window: int) -> Iterator[list[Waiting]]:
        for flow in list(islice(self._ring, MOST_TURNS)):
            yield flow.first(window)

    def spent(self, flow: Flow, cost: float) -> None:
        flow.served += cost
        self._ring.remove(flow)
        self._ring.append(flow)

    def _woken(self, flow: Flow) -> None:
        self._ring.append(flow)


class DeficitRoundRobin(RoundRobin):
    """Equal work for each flow, in rounds. `Flow.credit` is what it may still spend in this one."""

    name = "deficit-round-robin"

    def __init__(self, quantum: float = 8192.0) -> None:
        super().__init__()
        if not quantum > 0:
            raise ValueError("the quantum must be positive")
        self._quantum = quantum

    def spent(self, flow: Flow, cost: float) -> None:
        flow.served += cost
        self._quantum = max(self._quantum, cost)
        flow.credit -= cost
        if flow.credit <= 0:
            flow.credit += self._quantum * flow.weight
            self._ring.remove(flow)
            self._ring.append(flow)

    def _woken(self, flow: Flow) -> None:
        # Credit is not saved up while there is nothing to spend it on, and a debt was paid by waiting.
        flow.credit = self._quantum * flow.weight
        self._ring.append(flow)


class LeastAttained:
    """The flow that was served least goes first. `Flow.credit` is its virtual counter."""

    name = "least-attained-service"

    def __init__(self) -> None:
        self._ranked: list[tuple[float, int, Flow]] = []
        self._floor = 0.0

    def queued(self, waiting: Waiting) -> None:
        flow = waiting.flow
        if flow is None or len(flow) > 1:
            return
        level = self._ranked[0][0] if self._ranked else self._floor
        flow.credit = max(flow.credit, level)
        self._rank(flow)

    def left(self, waiting: Waiting) -> None:
        flow = waiting.flow
        if flow is not None and not len(flow):
            self._unrank(flow)
            self._floor = max(self._floor, flow.credit)

    def turns(self, window: int) -> Iterator[list[Waiting]]:
        for _, _, flow in self._ranked[:MOST_TURNS]:
            yield flow.first(window)

    def spent(self, flow: Flow, cost: float) -> None:
        flow.served += cost
        self._unrank(flow)
        flow.credit += cost / flow.weight
        self._rank(flow)

    def _rank(self, flow: Flow) -> None:
        insort(self._ranked, (flow.credit, flow.number, flow))

    def _unrank(self, flow: Flow) -> None:
        del self._ranked[bisect_left(self._ranked, (flow.credit, flow.number))]


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
