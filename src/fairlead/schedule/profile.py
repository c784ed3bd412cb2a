"""Filter → score → pick, as a Policy.

    candidates = alive ∧ every hard filter                        none left → refused, 503
    preferred  = candidates ∧ every load filter                   none left → round robin over candidates
    total      = Σ weight · score · Π demotion, -inf where not preferred
    pick       = picker(total)

A plugin that raises is left out of that decision, counted, and reported through `on_plugin_error`; the request goes on.
"""

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from fairlead.fleet.columns import BoolColumn, FloatColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.decision import Trace
from fairlead.model.errors import PluginError
from fairlead.model.request import Request
from fairlead.schedule.cycle import Context, Cycle
from fairlead.schedule.framework import PREFIX_SHARE, Demoter, Filter, Pick, Picker, Scorer

NO_ENDPOINTS = "rejected-no-endpoints"


class Profile:
    """A configured chain of plugins. `scorers` are (scorer, weight) pairs."""

    def __init__(
        self,
        name: str,
        filters: Sequence[Filter],
        scorers: Sequence[tuple[Scorer, float]],
        picker: Picker,
        on_plugin_error: Callable[[PluginError], None] | None = None,
    ) -> None:
        self.name = name
        self.filters = tuple(filters)
        self.scorers = tuple(scorers)
        self.picker = picker
        self._hard = tuple(f for f in filters if f.hard)
        self._soft = tuple(f for f in filters if not f.hard)
        self._demoters: tuple[tuple[str, Demoter], ...] = tuple((f.name, d) for f in filters if (d := _demoter(f)))
        self._report = on_plugin_error
        self._turn = -1

    def choose(self, requests: Sequence[Request], fleet: Fleet, context: Context) -> list[Pick]:
        return [self._choose(request, fleet, context) for request in requests]

    def _choose(self, request: Request, fleet: Fleet, context: Context) -> Pick:
        cycle = Cycle(context)
        table = fleet.table
        trace = Trace(endpoints=table.ids) if context.trace else None
        if not table.count:
            return self._none(trace, "the pool has no endpoints")
        alive = None if table.count == len(table) else table.alive
        candidates, culprit = self._filter(self._hard, alive, request, fleet, cycle, trace)
        if culprit:
            return self._none(trace, f"no endpoint can serve the request: filter {culprit} left none")
        preferred, culprit = self._filter(self._soft, candidates, request, fleet, cycle, trace)
        if culprit:
            slot = self._round_robin(candidates, len(table))
            return self._picked(slot, trace, cycle, overloaded=True)
        totals = self._totals(request, fleet, cycle, trace)
        if preferred is not None:
            totals = np.where(preferred, totals, -np.inf)
        if trace is not None:
            trace.total, trace.candidates = totals, preferred
        return self._picked(self._pick(request, fleet, totals, cycle), trace, cycle)

    def _filter(
        self,
        filters: Sequence[Filter],
        kept: BoolColumn | None,
        request: Request,
        fleet: Fleet,
        cycle: Cycle,
        trace: Trace | None,
    ) -> tuple[BoolColumn | None, str]:
        """(what is left, name of the filter that emptied it). `None` = all slots."""
        for plugin in filters:
            try:
                mask = plugin.keep(request, fleet, cycle)
            except Exception as error:
                self._failed(plugin.name, error)
                continue
            if mask is None:
                continue
            if trace is not None:
                trace.filters.append((plugin.name, mask))
            kept = mask if kept is None else kept & mask
            if not np.count_nonzero(kept):
                return kept, plugin.name
        return kept, ""

    def _totals(self, request: Request, fleet: Fleet, cycle: Cycle, trace: Trace | None) -> FloatColumn:
        totals = np.zeros(len(fleet.table))
        for plugin, weight in self.scorers:
            try:
                scores = plugin.score(request, fleet, cycle)
                if scores is None:
                    continue
                totals += weight * scores
            except Exception as error:
                self._failed(plugin.name, error)
                continue
            if trace is not None:
                trace.scorers.append((plugin.name, weight, scores))
        for name, demoter in self._demoters:
            try:
                factor = demoter.demote(request, fleet, cycle)
                if factor is not None:
                    totals *= factor
            except Exception as error:
                self._failed(name, error)
        return totals

    def _pick(self, request: Request, fleet: Fleet, totals: FloatColumn, cycle: Cycle) -> int:
        try:
            slot = self.picker.pick(request, fleet, totals, cycle)
            if totals[slot] > -np.inf:
                return slot
            self._failed(self.picker.name, ValueError(f"picked slot {slot}, which was filtered out"))
        except Exception as error:
            self._failed(self.picker.name, error)
        return int(totals.argmax())

    def _round_robin(self, candidates: BoolColumn | None, slots: int) -> int:
        """The next candidate after the last one chosen this way."""
        for step in range(1, slots + 1):
            slot = (self._turn + step) % slots
            if candidates is None or candidates[slot]:
                self._turn = slot
                return slot
        raise AssertionError("called without candidates")

    def _picked(self, slot: int, trace: Trace | None, cycle: Cycle, overloaded: bool = False) -> Pick:
        if trace is not None:
            trace.outcome = "fallback" if overloaded else "picked"
        share = cycle.get(PREFIX_SHARE)
        if share is None:
            return Pick(slot, overloaded=overloaded, trace=trace)
        return Pick(
            slot, overloaded=overloaded, hit_share=float(share[slot]), best_share=float(share.max()), trace=trace
        )

    def _none(self, trace: Trace | None, message: str) -> Pick:
        if trace is not None:
            trace.outcome = "none"
        return Pick(-1, reason=NO_ENDPOINTS, message=message, trace=trace)

    def _failed(self, plugin: str, error: Exception) -> None:
        if self._report is not None:
            self._report(PluginError(plugin, f"{type(error).__name__}: {error}"))


def _demoter(plugin: Filter) -> Demoter | None:
    return cast(Demoter, plugin) if hasattr(plugin, "demote") else None
