"""Orderings: who goes first within a flow.

Starvation bounds, with requests arriving forever:
* `fcfs`: a request waits for those that arrived before it, no others.
* `edf`: one with a deadline is overtaken only by those with an earlier one, so not by any that arrives after its
  deadline less the shortest time to live. Without deadlines it is `fcfs` behind all that have one.
* `least-work`: a request of w tokens is overtaken only by those that arrive within w / `ageing` seconds after it.
"""

from math import inf

from fairlead.admit.framework import Waiting


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
