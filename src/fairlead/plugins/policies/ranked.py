"""The base of policies that give every endpoint a cost and take the lowest.

Filters (role, subset, model, health, load), the fallback if all endpoints are overloaded and the refusal if none is
left are those of `Profile`. A subclass only implements `cost`; see docs/policies.md. A policy that remembers its
choices also has `chosen` (`core.policy.PickObserver`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from fairlead.core.columns import BoolColumn, FloatColumn
from fairlead.core.cost import Terms, Weights
from fairlead.core.errors import PLUGIN_FAILURES, hung
from fairlead.core.policy import HIGHEST, PREFIX_SHARE, Context, Cycle, Filter, Picker
from fairlead.core.profile import Profile
from fairlead.core.records import Trace
from fairlead.core.request import Request
from fairlead.core.view import FleetView
from fairlead.plugins.params import NoParams
from fairlead.plugins.pickers import MaxScore, MaxScoreParams

#: The total of an endpoint whose cost is infinite or NaN. Filtered endpoints have -inf.
_LOWEST = -HIGHEST


class Ranked(Profile, ABC):
    """A policy by cost. Subclass it, set `type`, and implement `cost`."""

    type: ClassVar[str]
    Params: ClassVar[Any] = NoParams
    takes_filters = True
    #: Whether costs are milliseconds. Other costs only rank endpoints, which is enough to choose one for a request.
    milliseconds: bool = False
    weights = Weights()

    def __init__(
        self, params: Any = None, name: str = "", filters: Sequence[Filter] = (), picker: Picker | None = None
    ) -> None:
        self.params = self.Params() if params is None else params
        picker = picker or MaxScore(MaxScoreParams(near_tie=0.0))
        super().__init__(name or self.type, filters, [], picker)
        self._points = 1.0

    @abstractmethod
    def cost(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn:
        """Return one number per slot, in any unit. The lowest is the best; ties are broken at random. Infinity means
        "only if all are".

        Called once per decision, for all slots, filtered or not. Read columns of `fleet.table`; change nothing.
        """

    def costs(
        self, requests: Sequence[Request], shares: FloatColumn, terms: Terms, fleet: FleetView, context: Context
    ) -> FloatColumn:
        """Return the costs of several requests, one row each, for late binding. Override it if there is a faster way
        than one request after another. `shares`: cached shares of the prompts; `terms`: the cost kernel's."""
        return np.array(
            [self._cost_of(request, share, fleet, context) for request, share in zip(requests, shares, strict=True)]
        )

    def _cost_of(self, request: Request, share: FloatColumn, fleet: FleetView, context: Context) -> FloatColumn:
        cycle = Cycle(context)
        cycle.once(PREFIX_SHARE, lambda: share if np.count_nonzero(share) else None)
        return self.cost(request, fleet, cycle)

    def _negated(self, request: Request, fleet: FleetView, cycle: Cycle, trace: Trace | None = None) -> FloatColumn:
        """Return the negated costs, all finite: an infinite cost is the highest. Report costs that are NaN or -inf."""
        try:
            totals: FloatColumn = np.negative(self.cost(request, fleet, cycle), dtype=np.float64)
            if totals.shape != (len(fleet.table),):
                raise ValueError(f"costs of shape {totals.shape} for {len(fleet.table)} slots")
            finite = np.isfinite(totals)
            if finite.all():
                return totals
            wrong = np.count_nonzero(~finite & (totals != -np.inf))
            if wrong:
                self._failed(self.name, ValueError(f"NaN or -inf for {wrong} of {len(totals)} slots"), trace)
            return np.where(finite, totals, _LOWEST)
        except PLUGIN_FAILURES as error:
            if hung(error):  # the caller lets the policy rest: each call holds up all requests
                raise
            if "ufunc 'negative'" in str(error):  # numpy's words for None, for example
                error = TypeError("`cost` must return a number for each slot")
            self._failed(self.name, error, trace)
            return np.zeros(len(fleet.table))

    def _overflow(self, available: BoolColumn | None, request: Request, fleet: FleetView, cycle: Cycle) -> int:
        """Return the slot with the lowest cost, instead of the next in turn: the choice matters most in overload."""
        totals = self._negated(request, fleet, cycle)
        if available is not None:
            totals = np.where(available, totals, -np.inf)
        return self._pick(request, fleet, totals, cycle)

    def _totals(self, request: Request, fleet: FleetView, cycle: Cycle, trace: Trace | None) -> FloatColumn:
        """Return the negated costs."""
        totals = self._negated(request, fleet, cycle, trace)
        if trace is not None:
            trace.scorers.append(("cost", 1.0, totals))
        return self._after_demotions(totals, request, fleet, cycle, trace) if self._demoters else totals
