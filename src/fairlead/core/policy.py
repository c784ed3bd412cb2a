"""The contracts of everything that chooses. Plugins implement them over columns, never one endpoint at a time.

What the answers mean
* A column has one entry per slot of `fleet.table`; slots without an endpoint are masked by the profile itself.
* `None` from a filter means "keep all", from a scorer "nothing to say" (it then counts as 0 for all). Both save the
  work of a column, which is most of the cost of a decision over few endpoints.
* A refusal is a value (`Refused`), never an exception. A plugin that raises is the profile's
  problem: it is left out of that decision and reported.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from random import Random
from typing import Any, Generic, Protocol, TypeVar, TypeVarTuple, runtime_checkable

import numpy as np
from msgspec import Struct

from fairlead.core.columns import BoolColumn, FloatColumn
from fairlead.core.cost import Terms, Weights
from fairlead.core.errors import PluginError
from fairlead.core.records import Trace
from fairlead.core.request import Request
from fairlead.core.view import FleetView

# Typed state of one decision: written once, read by every plugin of the same decision.

T = TypeVar("T")
Args = TypeVarTuple("Args")


class Key(Generic[T]):
    """Names a value of type `T` in a `Cycle`. Make one per module, at import; compared by identity."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Key({self.name})"


class Context(Struct, frozen=True, gc=False):
    """What a policy may know besides request and fleet: time and chance, both handed in."""

    #: Clock seconds of this decision.
    now: float
    rng: Random
    #: Whether the reasons are wanted (`Picked.trace`).
    trace: bool = True


class Cycle:
    """One decision's scratch space. `once` computes a value at the first question and remembers it."""

    __slots__ = ("_values", "left", "now", "rng")

    def __init__(self, context: Context) -> None:
        self.now = context.now
        self.rng = context.rng
        #: For filters: a mask of what those before them left; `None` = all slots.
        self.left: BoolColumn | None = None
        self._values: dict[Key[Any], Any] = {}

    def once(self, key: Key[T], compute: Callable[[*Args], T], *args: *Args) -> T:
        try:
            value: T = self._values[key]
        except KeyError:
            value = self._values[key] = compute(*args)
        return value

    def get(self, key: Key[T]) -> T | None:
        return self._values.get(key)


#: Slots that can serve the request and are up, before load filters; `None` = all. Written by the profile.
CANDIDATES: Key[BoolColumn | None] = Key("candidates")
#: Share of the prompt (0..1) that each endpoint is believed to hold; `None` = nobody holds any of it.
PREFIX_SHARE: Key[FloatColumn | None] = Key("prefix share")


#: What `FleetView.loading` says of the request; `None` too where nobody has slots for adapters.
LOADING: Key[FloatColumn | None] = Key("loading")


def loading(request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn | None:
    """The column of `LOADING`, found once per decision."""
    return cycle.once(LOADING, fleet.loading, request) if fleet.table.lora else None


def prefix_share(request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn | None:
    """The column of `PREFIX_SHARE`, looked up once per decision."""
    return cycle.once(PREFIX_SHARE, fleet.match, request)


class Picked(Struct):
    """The answer for a request that goes somewhere."""

    #: Chosen slot.
    slot: int
    #: Where the prompt is computed, if not there; -1 = there. `hit_share` is then that endpoint's.
    prefill_slot: int = -1
    #: Every candidate was overloaded; the fallback chose. More replicas are wanted.
    overloaded: bool = False
    #: Share of the prompt believed to be cached at the chosen endpoint, and the best share anywhere.
    hit_share: float = 0.0
    best_share: float = 0.0
    trace: Trace | None = None
    #: Who decided, where a policy has others decide for it; empty = the policy that was asked.
    by: str = ""
    #: Who gets it if no connection to `slot` can be made; -1, or `slot` itself, = the runner-up of `trace`, if there is
    #: one.
    fallback_slot: int = -1
    #: Who comes behind, for callers that take several; the best first.
    alternatives: tuple[int, ...] = ()


class Refused(Struct):
    """The answer for a request that nobody can serve, or that may not wait, or wait any longer."""

    #: Machine-readable; and for the client.
    reason: str
    message: str = ""
    trace: Trace | None = None
    #: As in `Picked`.
    by: str = ""
    #: Of the HTTP answer.
    status: int = 503


Answer = Picked | Refused


@runtime_checkable
class Policy(Protocol):
    """A request and a fleet in, a living endpoint or a refusal out. It reads the fleet and changes nothing."""

    @property
    def name(self) -> str: ...

    def choose(self, request: Request, fleet: FleetView, context: Context) -> Answer: ...


@runtime_checkable
class CostPolicy(Policy, Protocol):
    """A policy that gives every endpoint a cost and takes the lowest. It decides for requests that wait, too."""

    #: Its costs are milliseconds, so that those of different requests can be compared. Else they only rank endpoints.
    milliseconds: bool
    #: How it weighs the time of others; for the price of memory, and of waiting.
    weights: Weights

    def costs(
        self, requests: Sequence[Request], shares: FloatColumn, terms: Terms, fleet: FleetView, context: Context
    ) -> FloatColumn:
        """requests × slots. `shares` of the prompts are believed to be cached; `terms` are the cost kernel's."""
        ...


@runtime_checkable
class Explainable(Protocol):
    """A policy that can say what its costs are made of."""

    def terms(self, request: Request, fleet: FleetView, cycle: Cycle) -> list[tuple[str, FloatColumn]]:
        """The parts of an endpoint's cost in milliseconds, by name."""
        ...


class Stage(IntEnum):
    """When a filter runs, and what it means that it removed an endpoint."""

    #: It can never serve the request (role, model, subset). Where no endpoint is left, the request is refused.
    ABILITY = 0
    #: It had better not. The fallback respects that too; where the filter would leave nothing it is passed over.
    AVAILABILITY = 1
    #: It is overloaded. Where no endpoint is left, the fallback takes one of those that load filters removed.
    LOAD = 2


class Filter(Protocol):
    """Removes endpoints. Called for every request before any scorer, by stage, in configured order within each."""

    name: str
    stage: Stage

    def keep(self, request: Request, fleet: FleetView, cycle: Cycle) -> BoolColumn | None: ...


@runtime_checkable
class SteadyFilter(Filter, Protocol):
    """With `steady = True` it promises that its answer to requests without a subset is one of the target model and of
    `fleet.table.version` alone, as long as the table is not `troubled`. Where all filters promise that, it is
    remembered for which models they kept every endpoint."""

    steady: bool


class Scorer(Protocol):
    """Rates endpoints from 0 (worst) to 1 (best). Called with all slots, filtered or not.

    Built-in scorers keep to the range; others are `clamped`.
    """

    name: str

    def score(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn | None: ...


@runtime_checkable
class Demoter(Protocol):
    """A filter may also be one: what it keeps, it can still make less likely.

    `demote` gives a factor in [0, 1] per endpoint that the weighted sum is multiplied with; `None` = 1 for all.
    """

    def demote(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn | None: ...


@runtime_checkable
class PickObserver(Protocol):
    """A filter, scorer, picker or profile may also be one: it is told where each request goes.

    Called once per decision, after the pick (the fallback's too), with the same `cycle`; never when there was none.
    """

    def chosen(self, request: Request, slot: int, fleet: FleetView, cycle: Cycle) -> None: ...


@runtime_checkable
class ReportsErrors(Protocol):
    """A policy that says which of its plugins failed."""

    def report_to(self, on_plugin_error: Callable[[PluginError], None] | None) -> None: ...


class Clamped:
    """Keeps a scorer of unknown origin inside [0, 1]; NaN counts as 0. For one that observes picks see `clamped`."""

    def __init__(self, scorer: Scorer) -> None:
        self.name = scorer.name
        self._scorer = scorer

    def score(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn | None:
        scores = self._scorer.score(request, fleet, cycle)
        if scores is None:
            return None
        column = np.asarray(scores, dtype=np.float64)
        if column.shape != (len(fleet.table),):
            raise ValueError(f"scores of shape {column.shape} for {len(fleet.table)} slots")
        return np.nan_to_num(np.clip(column, 0.0, 1.0), nan=0.0)


class _ClampedObserver(Clamped):
    """Passes picks on to its scorer."""

    def __init__(self, scorer: Scorer, observer: PickObserver) -> None:
        super().__init__(scorer)
        self._observer = observer

    def chosen(self, request: Request, slot: int, fleet: FleetView, cycle: Cycle) -> None:
        self._observer.chosen(request, slot, fleet, cycle)


def clamped(scorer: Scorer) -> Scorer:
    """The scorer, kept inside [0, 1]."""
    return _ClampedObserver(scorer, scorer) if isinstance(scorer, PickObserver) else Clamped(scorer)


class Picker(Protocol):
    """Takes one slot. `totals` is -inf where filtered out; at least one entry is finite."""

    name: str

    def pick(self, request: Request, fleet: FleetView, totals: FloatColumn, cycle: Cycle) -> int: ...
