"""The policy that filters, scores and picks; and the fallback endpoint of a pick.

    candidates = alive ∧ every ability filter                     none left → refused, 503
    available  = candidates ∧ availability filters                a filter that would leave none is ignored
    preferred  = available ∧ every load filter                    none left → round robin over the available
    total      = Σ weight · score · Π demotion, -inf where not preferred
    pick       = picker(total)

A plugin that raises is left out of that decision and reported through `on_plugin_error`; the request continues.

In a trace the total always equals Σ weight · score. A demotion is therefore listed among the scorers: its weight is
minus the sum of their absolute weights, its score the share of that sum that it took away.
"""

from collections.abc import Callable, Sequence
from math import inf

import numpy as np

from fairlead.core.columns import BoolColumn, FloatColumn, read_only, scalar
from fairlead.core.cost import Terms, cost
from fairlead.core.errors import PLUGIN_FAILURES, PluginError, described, of_plugin
from fairlead.core.flow import NO_ENDPOINTS
from fairlead.core.policy import (
    CANDIDATES,
    Answer,
    Context,
    Cycle,
    Demoter,
    Filter,
    GuardedObserver,
    Key,
    Notification,
    Picked,
    Picker,
    PickObserver,
    Refused,
    Refuser,
    Scorer,
    Stage,
    SteadyFilter,
    highest,
    loading,
    own,
    prefix_share,
)
from fairlead.core.records import Trace
from fairlead.core.request import Request
from fairlead.core.table import EndpointTable
from fairlead.core.view import FleetView

# The estimated cost of a request at every endpoint, computed once per decision.

#: Terms of the cost kernel over all slots.
ESTIMATE: Key[Terms] = Key("estimate")


def estimate(request: Request, fleet: FleetView, cycle: Cycle) -> Terms:
    """Return what the latency model expects of the request at each endpoint. Computed once per decision."""
    return cycle.once(ESTIMATE, _estimate, request, fleet, cycle)


def _estimate(request: Request, fleet: FleetView, cycle: Cycle) -> Terms:
    share = prefix_share(request, fleet, cycle)
    prompt = float(request.prompt_tokens)
    cached = None if share is None else share * scalar(prompt)
    return cost(prompt, cached, fleet, cycle.now, loading(request, fleet, cycle)).read_only()


#: Models remembered in `Profile._passed`. The bound is needed because clients choose the names.
_MAX_PASSED = 1024
#: Characters of a plugin's error that a trace keeps.
_MAX_ERROR = 200


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
        self._chain = sorted(filters, key=lambda plugin: plugin.stage)
        self._lasting = [plugin for plugin in self._chain if plugin.stage is not Stage.LOAD]
        self._weighted = tuple((scorer, weight, scalar(weight)) for scorer, weight in scorers)
        self._points = sum(abs(weight) for _, weight in scorers)
        self._demoters = tuple((plugin.name, plugin) for plugin in filters if isinstance(plugin, Demoter))
        plugins: list[Filter | Scorer | Picker] = [*filters, *(scorer for scorer, _ in scorers), picker]
        self._observers: list[tuple[str, PickObserver]] = [
            (plugin.name, plugin) for plugin in plugins if isinstance(plugin, PickObserver)
        ]
        if isinstance(self, PickObserver):
            self._observers.append((name, self if own(self) else GuardedObserver(name, self)))
        self._report = on_plugin_error
        self._turn = -1
        self._steady = all(isinstance(plugin, SteadyFilter) and plugin.steady for plugin in filters)
        #: Models that load no adapter and for which the steady filters keep every endpoint of `_table` in `_version`.
        self._passed: set[str] = set()
        self._table: EndpointTable | None = None
        self._version = -1

    def choose(self, request: Request, fleet: FleetView, context: Context) -> Answer:
        cycle = Cycle(context)
        table = fleet.table
        trace = Trace(endpoints=table.ids) if context.trace else None
        if not table.count:
            return self._none(trace, Refused(NO_ENDPOINTS, "the pool has no endpoints"))
        if self._steady and self._lets_pass(request, table):
            kept = available = culprit = None
        else:
            kept, available, culprit = self._filter(request, fleet, cycle, trace, self._chain)
            if self._steady and kept is None and culprit is None and loading(request, fleet, cycle) is None:
                self._passed.add(request.target_model)
        if culprit is not None:
            if culprit.stage is Stage.ABILITY:
                why = self._refusal(culprit, request, fleet, cycle)
                return self._none(trace, why or self._unable(culprit, kept, table))
            if trace is not None:
                trace.candidates = available
            slot = self._overflow(available, request, fleet, cycle)
            return self._picked(slot, request, fleet, cycle, trace, overloaded=True)
        if available is not None:
            cycle.once(CANDIDATES, read_only, available)
        slot = self._best(kept, request, fleet, cycle, trace)
        return self._picked(slot, request, fleet, cycle, trace)

    def _best(
        self, kept: BoolColumn | None, request: Request, fleet: FleetView, cycle: Cycle, trace: Trace | None
    ) -> int:
        """Return the pick among the slots that the filters left."""
        totals = self._totals(request, fleet, cycle, trace)
        if kept is not None:
            totals = np.where(kept, totals, -np.inf)
        if trace is not None:
            trace.total, trace.candidates = totals, kept
        return self._pick(request, fleet, totals, cycle)

    def _lets_pass(self, request: Request, table: EndpointTable) -> bool:
        """Whether the filters are known to keep every endpoint for the request. Only for steady filters."""
        if table is not self._table or table.version != self._version or len(self._passed) > _MAX_PASSED:
            self._table, self._version = table, table.version
            self._passed.clear()
        if request.subset is not None or table.troubled:
            return False
        return (request.target or request.model) in self._passed

    def _filter(
        self, request: Request, fleet: FleetView, cycle: Cycle, trace: Trace | None, chain: Sequence[Filter]
    ) -> tuple[BoolColumn | None, BoolColumn | None, Filter | None]:
        """Return (preferred, available, the filter that left no endpoint). `None` = all slots; no such filter."""
        table = fleet.table
        kept = available = None if table.count == len(table) else table.alive
        for plugin in chain:
            cycle.left = kept
            try:
                mask = plugin.keep(request, fleet, cycle)
                if mask is None:
                    continue
                _check(mask, len(table))
            except PLUGIN_FAILURES as error:
                self._failed(plugin.name, error, trace)
                continue
            if trace is not None:
                trace.filters.append((plugin.name, mask))
            left = mask if kept is None else kept & mask
            if not np.count_nonzero(left):
                if plugin.stage is Stage.AVAILABILITY:
                    continue
                return kept, available, plugin
            kept = left
            if plugin.stage is not Stage.LOAD:
                available = left
        return kept, available, None

    def able(self, request: Request, fleet: FleetView, context: Context) -> BoolColumn | None:
        """Return the slots that can serve the request, busy or not, by the ability and availability filters. `None` =
        all; no slot = the request would be refused. For flow control, which itself chooses among open endpoints."""
        kept, _, culprit = self._filter(request, fleet, Cycle(context), None, self._lasting)
        return kept if culprit is None else np.zeros(len(fleet.table), dtype=np.bool_)

    def _totals(self, request: Request, fleet: FleetView, cycle: Cycle, trace: Trace | None) -> FloatColumn:
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
            except PLUGIN_FAILURES as error:
                self._failed(plugin.name, error, trace)
                continue
            if trace is not None:
                trace.scorers.append((plugin.name, weight, scores))
        return self._after_demotions(np.zeros(shape) if totals is None else totals, request, fleet, cycle, trace)

    def _after_demotions(
        self, totals: FloatColumn, request: Request, fleet: FleetView, cycle: Cycle, trace: Trace | None
    ) -> FloatColumn:
        for name, demoter in self._demoters:
            try:
                demotion = demoter.demote(request, fleet, cycle)
                if demotion is not None:
                    lower = totals * demotion
                    if lower.shape != totals.shape:
                        raise ValueError(f"a demotion of shape {demotion.shape} for {len(totals)} slots")
                    if trace is not None and self._points:
                        trace.scorers.append((name, -self._points, (totals - lower) / self._points))
                    totals = lower
            except PLUGIN_FAILURES as error:
                self._failed(name, error, trace)
        return totals

    def _pick(self, request: Request, fleet: FleetView, totals: FloatColumn, cycle: Cycle) -> int:
        try:
            slot = self.picker.pick(request, fleet, totals, cycle)
            if slot >= 0 and totals[slot] > -np.inf:
                return int(slot)
            self._failed(self.picker.name, ValueError(f"picked slot {slot}, which was filtered out"))
        except PLUGIN_FAILURES as error:
            self._failed(self.picker.name, error)
        return highest(totals)

    def report_to(self, on_plugin_error: Callable[[PluginError], None] | None) -> None:
        """Set the callback for failures of plugins, if the constructor did not get it."""
        self._report = on_plugin_error

    def _overflow(self, available: BoolColumn | None, request: Request, fleet: FleetView, cycle: Cycle) -> int:
        """Return one of the available slots, all of which are overloaded."""
        return self._round_robin(available, len(fleet.table))

    def _round_robin(self, available: BoolColumn | None, slots: int) -> int:
        """Return the next available slot after the last one that was chosen this way."""
        for step in range(1, slots + 1):
            slot = (self._turn + step) % slots
            if available is None or available[slot]:
                self._turn = slot
                return slot
        raise AssertionError("called without candidates")

    def _picked(
        self, slot: int, request: Request, fleet: FleetView, cycle: Cycle, trace: Trace | None, overloaded: bool = False
    ) -> Picked:
        if trace is not None:
            trace.outcome = "fallback" if overloaded else "picked"
        notify, share = self.notifier(cycle), prefix_share(request, fleet, cycle)
        if trace is not None:
            trace.held, trace.loading = share, loading(request, fleet, cycle)
        if share is None:
            return Picked(slot, overloaded=overloaded, trace=trace, notify=notify)
        best = float(share[share.argmax()])
        return Picked(
            slot, overloaded=overloaded, hit_share=float(share[slot]), best_share=best, trace=trace, notify=notify
        )

    def notifier(self, cycle: Cycle) -> Notification | None:
        """Return what tells the plugins that remember picks; `None` = there are none."""
        return Notification(self._observers, cycle, self._failed) if self._observers else None

    def _refusal(self, culprit: Filter, request: Request, fleet: FleetView, cycle: Cycle) -> Refused | None:
        try:
            return culprit.refusal(request, fleet, cycle) if isinstance(culprit, Refuser) else None
        except PLUGIN_FAILURES as error:
            self._failed(culprit.name, error)
            return None

    def _unable(self, culprit: Filter, kept: BoolColumn | None, table: EndpointTable) -> Refused:
        left = table.count if kept is None else int(np.count_nonzero(kept))
        before = ", ".join(plugin.name for plugin in self._chain[: self._chain.index(culprit)])
        message = f"no endpoint can serve the request: filter {culprit.name} left none"
        return Refused(NO_ENDPOINTS, message + (f" of {left} that {before} left" if left < table.count else ""))

    def _none(self, trace: Trace | None, why: Refused) -> Refused:
        if trace is not None:
            trace.outcome = "none"
        why.trace = trace
        return why

    def _failed(self, plugin: str, error: BaseException, trace: Trace | None = None) -> None:
        if trace is not None:
            trace.failed.append((plugin, described(error, _MAX_ERROR)))
        if self._report is not None:
            self._report(of_plugin(plugin, error))


def _check(mask: BoolColumn, slots: int) -> None:
    if mask.dtype != np.bool_ or mask.shape != (slots,):
        raise ValueError(f"{mask.dtype} of shape {mask.shape} is not a mask of {slots} slots")


# The fallback endpoint: the endpoint that gets a request when no connection to the chosen endpoint can be made.
#
# Rules
# * It is the runner-up of the same decision, so it can serve the request and is believed to be healthy. If all
#   endpoints are overloaded and were not rated, it is the least loaded endpoint that can serve the request.
# * Late binding names the endpoint that would compute the prompt soonest, an open one if another is open. A scheduler
#   in another process names the first of its alternatives that is in the pool; if it has none and the request waited,
#   late binding's choice is used. A pick without any of these has no fallback endpoint, and neither has a pick to which
#   the filters left no choice.
# * It is never the endpoint that computes the prompt of a prefill/decode pair.
# * The gateway repeats a request by itself and reports it afterwards, with the response or at the end. The lease then
#   moves to the fallback endpoint, and the chosen endpoint is counted as failed: after a few failures it is avoided.
# * The forecast for the chosen endpoint does not apply to the fallback endpoint, so nothing is learned from such a
#   request.


def runner_up(pick: Picked, table: EndpointTable) -> int:
    """Return the slot of the fallback endpoint: the one that the pick names, else the best slot that the pick does not
    use; -1 = none. Takes 1.0 us for 8 endpoints, 2 us for 1000."""
    if pick.fallback_slot not in (-1, pick.slot):
        return pick.fallback_slot if pick.fallback_slot != pick.prefill_slot else -1
    trace = pick.trace
    if trace is None or trace.endpoints is not table.ids or table.count < 2:  # columns must match this table's slots
        return -1
    points = np.array(_by_load(trace.candidates, table) if trace.total is None else trace.total)
    points[pick.slot] = -inf
    if pick.prefill_slot >= 0:
        points[pick.prefill_slot] = -inf
    slot = int(points.argmax())
    return slot if points[slot] > -inf else -1


def in_order(pick: Picked, runner_up: int, table: EndpointTable, most: int) -> list[int]:
    """Return at most `most` slots: the pick, its `runner_up` (-1 = none), then the others, the best first."""
    named = dict.fromkeys((pick.slot, runner_up, *pick.alternatives))
    order = [slot for slot in named if slot >= 0 and slot != pick.prefill_slot][:most]
    trace = pick.trace
    if trace is None or trace.endpoints is not table.ids:
        return order
    points = np.array(_by_load(trace.candidates, table) if trace.total is None else trace.total)
    points[[*order, pick.prefill_slot] if pick.prefill_slot >= 0 else order] = -inf
    behind = np.argsort(-points, kind="stable")[: max(most - len(order), 0)]
    return [*order, *(int(slot) for slot in behind if points[slot] > -inf)]


def _by_load(able: BoolColumn | None, table: EndpointTable) -> FloatColumn:
    return np.where(table.alive if able is None else able & table.alive, -(table.queue + table.active), -inf)
