"""The contracts of everything that chooses. Plugins implement them over columns, never one endpoint at a time.

What the answers mean
* A column has one entry per slot of `fleet.table`; slots without an endpoint are masked by the profile itself.
* `None` from a filter means "keep all", from a scorer "nothing to say" (it then counts as 0 for all). Both save the
  work of a column, which is most of the cost of a decision over few endpoints.
* A refusal is a value (`Pick.slot == -1` with a reason), never an exception. A plugin that raises is the profile's
  problem: it is left out of that decision and reported.
"""

from collections.abc import Sequence
from typing import Protocol, cast

import numpy as np
from msgspec import Struct

from fairlead.fleet.columns import BoolColumn, FloatColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.decision import Trace
from fairlead.model.request import Request
from fairlead.schedule.cycle import Context, Cycle, Key

#: Slots that can serve the request and are up, before load filters; `None` = all. Written by the profile.
CANDIDATES: Key[BoolColumn | None] = Key("candidates")
#: Share of the prompt (0..1) that each endpoint is believed to hold; `None` = nobody holds any of it.
PREFIX_SHARE: Key[FloatColumn | None] = Key("prefix share")


def prefix_share(request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn | None:
    """The column of `PREFIX_SHARE`, looked up once per decision."""
    return cycle.once(PREFIX_SHARE, fleet.match, request)


class Pick(Struct):
    """The answer for one request."""

    #: Chosen slot; -1 = none, `reason` says why.
    slot: int
    #: Where the prompt is computed, if not there; -1 = there. `hit_share` is then that endpoint's.
    prefill_slot: int = -1
    reason: str = ""
    message: str = ""
    #: Every candidate was overloaded; the fallback chose. More replicas are wanted.
    overloaded: bool = False
    #: Share of the prompt believed to be cached at the chosen endpoint, and the best share anywhere.
    hit_share: float = 0.0
    best_share: float = 0.0
    trace: Trace | None = None
    #: Who decided, where a policy has others decide for it; empty = the policy that was asked.
    by: str = ""
    #: Who gets it if no connection to `slot` can be made; -1 = the runner-up of `trace`, if there is one.
    second: int = -1


class Policy(Protocol):
    """Requests and their fleet in, zero or one endpoint per request out. Same length and order as `requests`."""

    @property
    def name(self) -> str: ...

    def choose(self, requests: Sequence[Request], fleet: Fleet, context: Context) -> Sequence[Pick]: ...


class Filter(Protocol):
    """Removes endpoints. Called for every request before any scorer, in configured order within each of three kinds.

    `hard` filters are about ability (role, model, subset): what they remove can never serve the request. The others are
    about load: when they leave nothing, the profile falls back to the endpoints that they removed. A filter that is not
    hard may have the attribute `availability = True`: it runs before the load filters, the fallback respects it too,
    and where it would leave nothing it is passed over.

    With the attribute `steady = True` a filter promises that its answer to requests without a subset is one of the
    target model and of `fleet.table.version` alone, as long as the table is not `troubled`. Where all filters promise
    that, it is remembered for which models they kept every endpoint.
    """

    name: str
    hard: bool

    def keep(self, request: Request, fleet: Fleet, cycle: Cycle) -> BoolColumn | None: ...


class Scorer(Protocol):
    """Rates endpoints from 0 (worst) to 1 (best). Called with all slots, filtered or not.

    Built-in scorers keep to the range; others are wrapped in `Clamped`.
    """

    name: str

    def score(self, request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn | None: ...


class Demoter(Protocol):
    """A filter may also be one: what it keeps, it can still make less likely.

    `demote` gives a factor in [0, 1] per endpoint that the weighted sum is multiplied with; `None` = 1 for all.
    """

    def demote(self, request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn | None: ...


class Chosen(Protocol):
    """A filter, scorer or picker may also be one: it is told where each request goes.

    Called once per decision, after the pick (the fallback's too), with the same `cycle`; never when there was none.
    """

    def chosen(self, request: Request, slot: int, fleet: Fleet, cycle: Cycle) -> None: ...


class Clamped:
    """Keeps a scorer of unknown origin inside [0, 1]; NaN counts as 0."""

    def __init__(self, scorer: Scorer) -> None:
        self.name = scorer.name
        self._scorer = scorer
        if hasattr(scorer, "chosen"):
            self.chosen = cast(Chosen, scorer).chosen

    def score(self, request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn | None:
        scores = self._scorer.score(request, fleet, cycle)
        if scores is None:
            return None
        column = np.asarray(scores, dtype=np.float64)
        if column.shape != (len(fleet.table),):
            raise ValueError(f"scores of shape {column.shape} for {len(fleet.table)} slots")
        return np.nan_to_num(np.clip(column, 0.0, 1.0), nan=0.0)


class Picker(Protocol):
    """Takes one slot. `totals` is -inf where filtered out; at least one entry is finite."""

    name: str

    def pick(self, request: Request, fleet: Fleet, totals: FloatColumn, cycle: Cycle) -> int: ...
