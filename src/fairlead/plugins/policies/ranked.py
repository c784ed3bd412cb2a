"""The base of a policy that gives every endpoint a cost and takes the lowest.

Filters (role, subset, model, health, load), the fallback when all are overloaded and the refusal when none is left are
those of `Profile`. What is left to write is `cost`; see docs/policies.md.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from fairlead.fleet.columns import BoolColumn, FloatColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.params import NoParams
from fairlead.plugins.pickers.max_score import MaxScore, MaxScoreParams
from fairlead.schedule.cycle import Cycle
from fairlead.schedule.framework import Filter, Picker
from fairlead.schedule.profile import Profile


class Ranked(Profile):
    """Subclass it, set `type`, implement `cost`."""

    type: ClassVar[str]
    Params: ClassVar[Any] = NoParams
    takes_filters = True

    def __init__(
        self, params: Any = None, name: str = "", filters: Sequence[Filter] = (), picker: Picker | None = None
    ) -> None:
        self.params = self.Params() if params is None else params
        picker = picker or MaxScore(MaxScoreParams(near_tie=0.0))
        super().__init__(name or self.type, filters, [(_Cost(self), 1.0)], picker)

    @abstractmethod
    def cost(self, request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn:
        """One finite number per slot, any unit, the lowest is the best; ties are broken at random.

        Called once per decision with all slots, filtered or not. Read columns of `fleet.table`, change nothing.
        """

    def _overflow(self, available: BoolColumn | None, request: Request, fleet: Fleet, cycle: Cycle) -> int:
        """Overload is when the choice matters most: the lowest cost, not the next in turn."""
        totals = -self.cost(request, fleet, cycle)
        if available is not None:
            totals = np.where(available, totals, -np.inf)
        return self._pick(request, fleet, totals, cycle)

    def sent(self, request: Request, slot: int, fleet: Fleet, cycle: Cycle) -> None:
        """Called after each pick. For policies that remember."""
        return


class _Cost:
    """The policy's cost in the shape of a scorer."""

    name = "cost"

    def __init__(self, policy: Ranked) -> None:
        self._policy = policy
        if type(policy).sent is not Ranked.sent:
            self.chosen = policy.sent

    def score(self, request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn:
        return -self._policy.cost(request, fleet, cycle)
