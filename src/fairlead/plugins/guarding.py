"""Keeps requests safe from flow-control plugins of other distributions: what fails is reported and done without.

An ordering that fails ranks by arrival. A fairness policy that fails is replaced by one queue per band, for good: what
it remembered can no longer be trusted. A saturation that fails counts as none, a ceiling that fails holds nobody back.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import isfinite

from fairlead.admit.fairness import Strict
from fairlead.admit.framework import Ceiling, Fairness, Flow, Ordering, Waiting
from fairlead.fleet.fleet import Fleet
from fairlead.model.errors import PluginError
from fairlead.plugins.contracts import Saturation

Report = Callable[[PluginError], None] | None


def _tell(report: Report, name: str, error: Exception) -> None:
    if report is not None:
        report(PluginError(name, f"{type(error).__name__}: {error}"))


class GuardedOrdering:
    def __init__(self, inner: Ordering, report: Report) -> None:
        self.name = inner.name
        self._inner = inner
        self._report = report

    def key(self, waiting: Waiting) -> float:
        try:
            key = float(self._inner.key(waiting))
            if isfinite(key):
                return key
            raise ValueError(f"{key} is no key")
        except Exception as error:
            _tell(self._report, self.name, error)
            return waiting.since


class GuardedFairness:
    """Beside the plugin it keeps the one queue that would take its place."""

    def __init__(self, inner: Fairness, report: Report) -> None:
        self.name = inner.name
        self._inner: Fairness | None = inner
        self._report = report
        self._plain = Strict()
        self._here: set[int] = set()

    def queued(self, waiting: Waiting) -> None:
        self._plain.queued(waiting)
        self._here.add(waiting.number)
        self._try(lambda inner: inner.queued(waiting))

    def left(self, waiting: Waiting) -> None:
        self._plain.left(waiting)
        self._here.discard(waiting.number)
        self._try(lambda inner: inner.left(waiting))

    def spent(self, flow: Flow, cost: float) -> None:
        before = flow.served
        self._try(lambda inner: inner.spent(flow, cost))
        flow.served = before + cost

    def turns(self, window: int) -> Iterable[list[Waiting]]:
        """The plugin's windows, without requests that do not wait; if it offers none, the one queue's."""
        offered = False
        for turn in self._offered(window):
            found = [waiting for waiting in turn if waiting.number in self._here][:window]
            if found:
                offered = True
                yield found
        if not offered:
            yield from self._plain.turns(window)

    def _offered(self, window: int) -> Iterator[list[Waiting]]:
        if self._inner is None:
            return
        try:
            for turn in self._inner.turns(window):
                yield list(turn)
        except Exception as error:
            self._failed(error)

    def _try(self, call: Callable[[Fairness], None]) -> None:
        if self._inner is None:
            return
        try:
            call(self._inner)
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self._inner = None
        _tell(self._report, self.name, error)


class GuardedCeiling:
    def __init__(self, inner: Ceiling, report: Report) -> None:
        self.name = inner.name
        self._inner = inner
        self._report = report

    def allowed(self, level: float, priorities: Sequence[int]) -> list[bool]:
        try:
            allowed = [bool(may) for may in self._inner.allowed(level, priorities)]
            if len(allowed) == len(priorities):
                return allowed
            raise ValueError(f"{len(allowed)} answers for {len(priorities)} bands")
        except Exception as error:
            _tell(self._report, self.name, error)
            return [True] * len(priorities)


class GuardedSaturation:
    def __init__(self, inner: Saturation, report: Report) -> None:
        self.name = inner.name
        self._inner = inner
        self._report = report

    def level(self, fleet: Fleet, now: float) -> float:
        try:
            level = float(self._inner.level(fleet, now))
            if level == level:
                return level
            raise ValueError("no number")
        except Exception as error:
            _tell(self._report, self.name, error)
            return 0.0
