"""Filter → score → pick, as a Policy.

    candidates = alive ∧ every hard filter                        none left → refused, 503
    available  = candidates ∧ availability filters                each only as long as it leaves any
    preferred  = available ∧ every load filter                    none left → round robin over the available
    total      = Σ weight · score · Π demotion, -inf where not preferred
    pick       = picker(total)

A plugin that raises is left out of that decision, counted, and reported through `on_plugin_error`; the request goes on.

In a trace Σ weight · score is always the total: a demotion stands among the scorers, with minus the sum of their
weights and the share of it that it took away.
"""

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from fairlead.fleet.columns import BoolColumn, FloatColumn, scalar
from fairlead.fleet.fleet import Fleet
from fairlead.fleet.table import EndpointTable
from fairlead.model.decision import Trace
from fairlead.model.errors import PluginError
from fairlead.model.request import Request
from fairlead.schedule.cycle import Context, Cycle
from fairlead.schedule.framework import CANDIDATES, Chosen, Demoter, Filter, Pick, Picker, Scorer, prefix_share

NO_ENDPOINTS = "rejected-no-endpoints"
_ABILITY, _AVAILABILITY, _LOAD = range(3)
#: Clients choose the names.
_MAX_PASSED = 1024


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
        self._stages = sorted(((f, _stage(f)) for f in filters), key=lambda entry: entry[1])
        self._lasting = [entry for entry in self._stages if entry[1] != _LOAD]
        self._weighted = tuple((scorer, weight, scalar(weight)) for scorer, weight in scorers)
        self._points = sum(abs(weight) for _, weight in scorers)
        self._demoters: tuple[tuple[str, Demoter], ...] = tuple((f.name, d) for f in filters if (d := _demoter(f)))
        plugins: list[Filter | Scorer | Picker] = [*filters, *(scorer for scorer, _ in scorers), picker]
        self._told = tuple((plugin.name, cast(Chosen, plugin)) for plugin in plugins if hasattr(plugin, "chosen"))
        self._report = on_plugin_error
        self._turn = -1
        self._steady = all(getattr(plugin, "steady", False) for plugin in filters)
        #: Models for which the steady filters keep all, of this table in this version.
        self._passed: set[str] = set()
        self._table: EndpointTable | None = None
        self._version = -1

    def choose(self, requests: Sequence[Request], fleet: Fleet, context: Context) -> list[Pick]:
        return [self._choose(request, fleet, context) for request in requests]

    def _choose(self, request: Request, fleet: Fleet, context: Context) -> Pick:
        cycle = Cycle(context)
        table = fleet.table
        trace = Trace(endpoints=table.ids) if context.trace else None
        if not table.count:
            return self._none(trace, "the pool has no endpoints")
        if self._steady and self._lets_pass(request, table):
            kept = available = culprit = None
        else:
            kept, available, culprit = self._filter(request, fleet, cycle, trace, self._stages)
            if self._steady and kept is None and culprit is None:
                self._passed.add(request.target_model)
        if culprit is not None:
            if culprit.hard:
                return self._none(trace, f"no endpoint can serve the request: filter {culprit.name} left none")
            if trace is not None:
                trace.candidates = available
            slot = self._overflow(available, request, fleet, cycle)
            return self._picked(slot, request, fleet, cycle, trace, overloaded=True)
        if available is not None:
            cycle.once(CANDIDATES, lambda: available)
        slot = self._best(kept, request, fleet, cycle, trace)
        return self._picked(slot, request, fleet, cycle, trace)

    def _best(self, kept: BoolColumn | None, request: Request, fleet: Fleet, cycle: Cycle, trace: Trace | None) -> int:
        """The pick among those that the filters left."""
        totals = self._totals(request, fleet, cycle, trace)
        if kept is not None:
            totals = np.where(kept, totals, -np.inf)
        if trace is not None:
            trace.total, trace.candidates = totals, kept
        return self._pick(request, fleet, totals, cycle)

    def _lets_pass(self, request: Request, table: EndpointTable) -> bool:
        """Whether the filters, all of them steady, are known to keep every endpoint."""
        if table is not self._table or table.version != self._version or len(self._passed) > _MAX_PASSED:
            self._table, self._version = table, table.version
            self._passed.clear()
        if request.subset is not None or table.troubled:
            return False
        return (request.target or request.model) in self._passed

    def _filter(
        self, request: Request, fleet: Fleet, cycle: Cycle, trace: Trace | None, stages: Sequence[tuple[Filter, int]]
    ) -> tuple[BoolColumn | None, BoolColumn | None, Filter | None]:
        """(preferred, available, the filter that left nothing). `None` = all slots."""
        table = fleet.table
        kept = available = None if table.count == len(table) else table.alive
        for plugin, stage in stages:
            cycle.left = kept
            try:
                mask = plugin.keep(request, fleet, cycle)
                if mask is None:
                    continue
                _check(mask, len(table))
            except Exception as error:
                self._failed(plugin.name, error)
                continue
            if trace is not None:
                trace.filters.append((plugin.name, mask))
            left = mask if kept is None else kept & mask
            if not np.count_nonzero(left):
                if stage == _AVAILABILITY:
                    continue
                return kept, available, plugin
            kept = left
            if stage != _LOAD:
                available = left
        return kept, available, None

    def able(self, request: Request, fleet: Fleet, context: Context) -> BoolColumn | None:
        """Where the request can be served at all, busy or not: the hard filters, then those of availability. `None` =
        everywhere; nowhere = it would be refused. For flow control, which chooses among open endpoints itself."""
        kept, _, culprit = self._filter(request, fleet, Cycle(context), None, self._lasting)
        return kept if culprit is None else np.zeros(len(fleet.table), dtype=np.bool_)

    def _totals(self, request: Request, fleet: Fleet, cycle: Cycle, trace: Trace | None) -> FloatColumn:
        totals: FloatColumn | None = None
        shape = (len(fleet.table),)
        for plugin, weight, factor in self._weighted:
            try:
                scores = plugin.score(request, fleet, cycle)
                if scores is None:
                    continue
                points = factor * scores
                if points.shape != shape:
                    raise ValueError(f"scores of shape {points.shape} for {shape[0]} slots")
                totals = points if totals is None else totals + points
            except Exception as error:
                self._failed(plugin.name, error)
                continue
            if trace is not None:
                trace.scorers.append((plugin.name, weight, scores))
        if totals is None:
            totals = np.zeros(shape)
        for name, demoter in self._demoters:
            try:
                demotion = demoter.demote(request, fleet, cycle)
                if demotion is not None:
                    totals = self._demoted(name, totals, demotion, trace)
            except Exception as error:
                self._failed(name, error)
        return totals

    def _demoted(self, name: str, totals: FloatColumn, demotion: FloatColumn, trace: Trace | None) -> FloatColumn:
        lower = totals * demotion
        if lower.shape != totals.shape:
            raise ValueError(f"a demotion of shape {demotion.shape} for {len(totals)} slots")
        if trace is not None and self._points:
            trace.scorers.append((name, -self._points, (totals - lower) / self._points))
        return lower

    def _pick(self, request: Request, fleet: Fleet, totals: FloatColumn, cycle: Cycle) -> int:
        try:
            slot = self.picker.pick(request, fleet, totals, cycle)
            if slot >= 0 and totals[slot] > -np.inf:
                return int(slot)
            self._failed(self.picker.name, ValueError(f"picked slot {slot}, which was filtered out"))
        except Exception as error:
            self._failed(self.picker.name, error)
        return int(np.nan_to_num(totals, nan=-1e300, neginf=-np.inf).argmax())

    def report_to(self, on_plugin_error: Callable[[PluginError], None] | None) -> None:
        """Where failures of plugins go, for profiles that were made without saying so."""
        self._report = on_plugin_error

    def _overflow(self, available: BoolColumn | None, request: Request, fleet: Fleet, cycle: Cycle) -> int:
        """One of the available endpoints, all of which are overloaded."""
        return self._round_robin(available, len(fleet.table))

    def _round_robin(self, available: BoolColumn | None, slots: int) -> int:
        """The next one after the last one chosen this way."""
        for step in range(1, slots + 1):
            slot = (self._turn + step) % slots
            if available is None or available[slot]:
                self._turn = slot
                return slot
        raise AssertionError("called without candidates")

    def _picked(
        self, slot: int, request: Request, fleet: Fleet, cycle: Cycle, trace: Trace | None, overloaded: bool = False
    ) -> Pick:
        if trace is not None:
            trace.outcome = "fallback" if overloaded else "picked"
        for name, plugin in self._told:
            try:
                plugin.chosen(request, slot, fleet, cycle)
            except Exception as error:
                self._failed(name, error)
        share = prefix_share(request, fleet, cycle)
        if trace is not None:
            trace.held = share
        if share is None:
            return Pick(slot, overloaded=overloaded, trace=trace)
        best = float(share[share.argmax()])
        return Pick(slot, overloaded=overloaded, hit_share=float(share[slot]), best_share=best, trace=trace)

    def _none(self, trace: Trace | None, message: str) -> Pick:
        if trace is not None:
            trace.outcome = "none"
        return Pick(-1, reason=NO_ENDPOINTS, message=message, trace=trace)

    def _failed(self, plugin: str, error: Exception) -> None:
        if self._report is not None:
            self._report(PluginError(plugin, f"{type(error).__name__}: {error}"))


def _stage(plugin: Filter) -> int:
    if plugin.hard:
        return _ABILITY
    return _AVAILABILITY if getattr(plugin, "availability", False) else _LOAD


def _check(mask: BoolColumn, slots: int) -> None:
    if mask.dtype != np.bool_ or mask.shape != (slots,):
        raise ValueError(f"{mask.dtype} of shape {mask.shape} is no mask of {slots} slots")


def _demoter(plugin: Filter) -> Demoter | None:
    return cast(Demoter, plugin) if hasattr(plugin, "demote") else None
