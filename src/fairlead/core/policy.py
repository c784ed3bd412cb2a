"""The contracts of policies and of their plugins. Plugins work on columns, never on one endpoint at a time.

What the answers mean
* A column has one entry per slot of `fleet.table`; the profile masks slots without an endpoint.
* `None` from a filter means "keep all endpoints". `None` from a scorer means "no opinion" and counts as 0 for all
  endpoints. Both save a column, and columns are most of the cost of a decision over few endpoints.
* A refusal is a value (`Refused`), never an exception. If a plugin raises, the profile leaves it out of that decision
  and reports it.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from math import inf, isfinite
from operator import index
from random import Random
from typing import Any, Generic, Protocol, TypeVar, TypeVarTuple, runtime_checkable

import numpy as np
from msgspec import Struct, structs

from fairlead.core.columns import BoolColumn, FloatColumn, read_only
from fairlead.core.cost import Terms, Weights
from fairlead.core.errors import PASSING, PLUGIN_FAILURES, REST_S, PluginError, Stray, described, hung, rests_until
from fairlead.core.records import OutcomeRecord, Trace
from fairlead.core.request import Request
from fairlead.core.table import FLOATS
from fairlead.core.view import FleetView

# Typed state of one decision: written once, read by all plugins that take part in it.

T = TypeVar("T")
Args = TypeVarTuple("Args")


class Key(Generic[T]):
    """Names a value of type `T` in a `Cycle`. Create keys at import time: they are compared by identity."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Key({self.name})"


class Context(Struct, frozen=True, gc=False):
    """What a policy receives in addition to the request and the fleet: the time and a random generator."""

    #: Clock seconds of this decision.
    now: float
    rng: Random
    #: Whether the answer should carry its reasons (`Picked.trace`).
    trace: bool = True


class Cycle:
    """The scratch space of one decision. `once` computes a value on the first call and remembers it."""

    __slots__ = ("_values", "left", "now", "rng")

    def __init__(self, context: Context) -> None:
        self.now = context.now
        self.rng = context.rng
        #: For filters: a mask of the slots that the filters before them left; `None` = all slots.
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

    def protect(self) -> None:
        """Make `left` read only, as the columns of the keys below are: other plugins of the decision read them too."""
        self.left = None if self.left is None else read_only(self.left)


#: Slots that can serve the request and are up, before load filters; `None` = all. Written by the profile.
CANDIDATES: Key[BoolColumn | None] = Key("candidates")
#: Estimated share of the prompt (0..1) that each endpoint has cached; `None` = no endpoint has any of it.
PREFIX_SHARE: Key[FloatColumn | None] = Key("prefix share")


#: The result of `FleetView.loading` for the request; also `None` where no endpoint has slots for adapters.
LOADING: Key[FloatColumn | None] = Key("loading")


def loading(request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn | None:
    """Return the column of `LOADING`, computed once per decision."""
    return cycle.once(LOADING, _shared, fleet.loading, request) if fleet.table.lora else None


def prefix_share(request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn | None:
    """Return the share of the prompt (0..1) that each endpoint has cached; `None` = none has any. Looked up once per
    decision."""
    return cycle.once(PREFIX_SHARE, _shared, fleet.match, request)


def _shared(ask: Callable[[Request], FloatColumn | None], request: Request) -> FloatColumn | None:
    """Return an answer of the fleet for all plugins of a decision, and for its trace."""
    column = ask(request)
    return None if column is None else read_only(column)


class Notification(Struct, frozen=True):
    """Tells the plugins of a profile that remember picks (`PickObserver`) where a request goes."""

    observers: "Sequence[tuple[str, PickObserver]]"
    cycle: Cycle
    #: Receives the names of plugins that fail, and their errors.
    failed: Callable[[str, BaseException], None]

    def __call__(self, request: Request, slot: int, fleet: FleetView) -> None:
        for name, observer in self.observers:
            try:
                observer.chosen(request, slot, fleet, self.cycle)
            except PLUGIN_FAILURES as error:
                self.failed(name, error)


class Picked(Struct):
    """The answer for a request that is sent to an endpoint."""

    #: Chosen slot.
    slot: int
    #: The slot that computes the prompt, if it is another one; -1 = `slot` does. If set, `hit_share` refers to it.
    prefill_slot: int = -1
    #: Every candidate was overloaded, so the profile's fallback chose. More replicas are needed.
    overloaded: bool = False
    #: Estimated share of the prompt that is cached at the chosen endpoint.
    hit_share: float = 0.0
    #: The highest such share in the pool.
    best_share: float = 0.0
    #: The reasons, if the context asks for them.
    trace: Trace | None = None
    #: The policy that decided, if the policy that was called delegates; empty = the called policy itself.
    by: str = ""
    #: The slot that gets the request if no connection to `slot` can be made; -1 or `slot` itself = the runner-up of
    #: `trace`, if there is one.
    fallback_slot: int = -1
    #: Further slots for callers that accept several, the best first.
    alternatives: tuple[int, ...] = ()
    #: In a pair: milliseconds expected from the computed prompt to the first token at `slot`; below 0 = unknown.
    handover_ms: float = -1.0
    #: Set by profiles, and called when the request is sent; `None` = no plugin wants to know. A policy that changes the
    #: pick of a profile passes it on.
    notify: Notification | None = None


class Refused(Struct):
    """The answer for a request that no endpoint can serve, that may not wait, or that has waited too long."""

    #: For machines.
    reason: str
    #: For the client.
    message: str = ""
    trace: Trace | None = None
    #: As in `Picked`.
    by: str = ""
    #: HTTP status of the answer.
    status: int = 503


Answer = Picked | Refused


def checked(answer: Any, fleet: FleetView) -> Answer:
    """Return the answer of a policy that may come from anywhere, with plain values in place of numpy's. Raise
    `TypeError` or `ValueError` if it cannot be carried out."""
    if isinstance(answer, Refused):
        return checked_refusal(answer, fleet)
    if not isinstance(answer, Picked):
        hint = f"; for slot {answer} return Picked({answer})" if isinstance(answer, int | np.integer) else ""
        raise TypeError(f"answered {type(answer).__name__}, expected Picked or Refused{hint}")
    endpoints = fleet.table.endpoints
    slots = [_integer("a slot", slot) for slot in (answer.slot, answer.prefill_slot, answer.fallback_slot)]
    alternatives = tuple(_integer("a slot", slot) for slot in answer.alternatives)
    for slot in (slots[0], *(slot for slot in slots[1:] if slot != -1), *alternatives):
        if not 0 <= slot < len(endpoints) or endpoints[slot] is None:
            raise ValueError(f"slot {slot} has no endpoint")
    if not isinstance(answer.overloaded, bool | np.bool_):
        raise TypeError(f"overloaded is {type(answer.overloaded).__name__}, expected bool")
    if not isinstance(answer.notify, Notification | None):
        raise TypeError(f"notify is {type(answer.notify).__name__}, expected that of a profile's pick")
    numbers = (answer.hit_share, answer.best_share, answer.handover_ms)
    if not all(map(isfinite, numbers)):
        raise ValueError("hit_share, best_share and handover_ms must be finite")
    hit_share, best_share, handover_ms = map(float, numbers)
    return Picked(
        slots[0],
        slots[1],
        bool(answer.overloaded),
        hit_share,
        best_share,
        _checked_trace(answer.trace, fleet),
        _text("by", answer.by),
        slots[2],
        alternatives,
        handover_ms,
        answer.notify,
    )


def checked_refusal(answer: Any, fleet: FleetView) -> Refused:
    """As `checked`, for an answer that must be a refusal."""
    if not isinstance(answer, Refused):
        raise TypeError(f"answered {type(answer).__name__}, expected Refused")
    status = _integer("status", answer.status)
    if not 400 <= status <= 599:
        raise ValueError(f"a refusal with HTTP status {status}, expected 400 to 599")
    reason, message = _text("reason", answer.reason), _text("message", answer.message)
    return Refused(reason, message, _checked_trace(answer.trace, fleet), _text("by", answer.by), status)


def _integer(name: str, value: Any) -> int:
    try:
        return int(index(value))
    except TypeError:
        raise TypeError(f"{name} is {type(value).__name__}, expected int") from None


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} is {type(value).__name__}, expected str")
    return value.encode().decode()  # raises for text that is no UTF-8


def _checked_trace(trace: Any, fleet: FleetView) -> Trace | None:
    """Return the trace with plain names and weights, and with its columns as arrays."""
    if trace is None:
        return None
    if not isinstance(trace, Trace):
        raise TypeError(f"trace is {type(trace).__name__}, expected Trace")
    endpoints, ids = trace.endpoints, fleet.table.ids
    if endpoints is not ids:
        endpoints = tuple(_text("an endpoint of the trace", name) for name in endpoints)
    count = len(endpoints)
    return structs.replace(
        trace,
        endpoints=endpoints,
        filters=[(_text("a filter", name), _traced(name, column, count)) for name, column in trace.filters],
        scorers=[
            (_text("a scorer", name), float(weight), _traced(name, column, count))
            for name, weight, column in trace.scorers
        ],
        outcome=_text("outcome", trace.outcome),
        total=_traced("total", trace.total, count),
        candidates=_traced("candidates", trace.candidates, count),
        held=_traced("held", trace.held, count),
        loading=_traced("loading", trace.loading, count),
    )


def _traced(name: str, values: Any, count: int) -> Any:
    if values is None:
        return None
    column = np.asarray(values)
    if column.shape != (count,) or column.dtype.kind not in "bif":
        raise ValueError(f"{name} of the trace is {column.dtype} of shape {column.shape} for {count} endpoints")
    return column


def checked_column(values: Any, shape: tuple[int, ...], what: str) -> FloatColumn:
    """Return the numbers that a plugin gave. Raise `ValueError` or `TypeError` if they are not of this shape."""
    column = np.asarray(values, dtype=np.float64)
    if column.shape != shape:
        raise ValueError(f"{what} of shape {column.shape}, expected {shape}: one number per slot")
    return column


@runtime_checkable
class Policy(Protocol):
    """Chooses a live endpoint for a request, or refuses it. A policy reads the fleet and never changes it."""

    @property
    def name(self) -> str: ...

    def choose(self, request: Request, fleet: FleetView, context: Context) -> Answer: ...


#: (request, fleet, now) → the slots that can serve the request; `None` = all.
Able = Callable[[Request, FleetView, float], BoolColumn | None]
#: Stands for an infinite cost, so that sums with it stay finite.
HIGHEST = 1e100


@runtime_checkable
class CostPolicy(Policy, Protocol):
    """A policy that gives every endpoint a cost and takes the lowest. It also decides for requests that wait."""

    #: Whether its costs are milliseconds, so that costs of different requests are comparable. If not, they only rank
    #: endpoints.
    milliseconds: bool
    #: How much the time of other requests counts. Also sets the price of memory and of waiting.
    weights: Weights

    def costs(
        self, requests: Sequence[Request], shares: FloatColumn, terms: Terms, fleet: FleetView, context: Context
    ) -> FloatColumn:
        """Return the costs (requests × slots); infinity means "only if all are". `shares`: estimated cached share of
        each prompt, same shape. `terms`: the cost kernel's."""
        ...


@runtime_checkable
class Explainable(Protocol):
    """A policy that can list the parts of its costs."""

    def terms(self, request: Request, fleet: FleetView, cycle: Cycle) -> list[tuple[str, FloatColumn]]:
        """Return the parts of each endpoint's cost as (name, column in milliseconds)."""
        ...


class Stage(IntEnum):
    """When a filter runs, and why it removes an endpoint."""

    #: The endpoint can never serve the request (role, model, subset). If no endpoint is left, the request is refused.
    ABILITY = 0
    #: The endpoint should not get requests now. The fallback respects this, too. A filter that would leave no endpoint
    #: is ignored.
    AVAILABILITY = 1
    #: The endpoint is overloaded. If no endpoint is left, the fallback takes one that the load filters removed.
    LOAD = 2


class Filter(Protocol):
    """Removes endpoints. Filters run for every request before the scorers: by stage, then in configured order."""

    name: str
    stage: Stage

    def keep(self, request: Request, fleet: FleetView, cycle: Cycle) -> BoolColumn | None: ...


@runtime_checkable
class SteadyFilter(Filter, Protocol):
    """A filter whose answer can be remembered. `steady = True` promises: for requests without a subset, and while the
    table is not `troubled`, the answer depends only on the target model and on `fleet.table.version`. If all filters
    of a profile promise this, the profile remembers the models for which they kept every endpoint."""

    steady: bool


class Scorer(Protocol):
    """Rates endpoints from 0 (worst) to 1 (best). It rates all slots, filtered or not.

    Built-in scorers stay in the range; the scores of others are `clamped`.
    """

    name: str

    def score(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn | None: ...


@runtime_checkable
class Demoter(Protocol):
    """A filter that also makes endpoints less likely which it keeps.

    `demote` returns one factor in [0, 1] per endpoint, by which the weighted sum is multiplied; `None` = 1 for all.
    """

    def demote(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn | None: ...


@runtime_checkable
class Refuser(Protocol):
    """An ability filter that knows what to answer where it left no endpoint."""

    def refusal(self, request: Request, fleet: FleetView, cycle: Cycle) -> Refused | None:
        """`None` = the profile's own answer."""
        ...


@runtime_checkable
class PickObserver(Protocol):
    """A filter, scorer, picker or profile that is notified of each pick.

    `chosen` is called once for each request that is sent, also to the fallback, with the `cycle` of the pick; if late
    binding or a recorded decision chose another slot, with that slot.
    """

    def chosen(self, request: Request, slot: int, fleet: FleetView, cycle: Cycle) -> None: ...


@runtime_checkable
class OutcomeObserver(Protocol):
    """A policy, filter, scorer or picker that learns from how requests ended.

    `ended` is called once for each request that was sent to an endpoint, whoever had chosen it: when it has been
    answered, was cut short or given up. In the outcome, -1 = unknown: few answers report their cached tokens.

    A shadow and a scheduler in another process hear of it up to half a second later, and of nothing while they are too
    slow. A shadow's requests were sent by another policy: an outcome says how `outcome.endpoint` did, never what the
    shadow's own choice would have done.
    """

    def ended(self, outcome: OutcomeRecord) -> None: ...


@runtime_checkable
class Delegates(Protocol):
    """A policy that asks others."""

    def asks(self) -> Sequence[Policy]: ...


@runtime_checkable
class ReportsErrors(Protocol):
    """A policy that reports which of its plugins failed."""

    def report_to(self, on_plugin_error: Callable[[PluginError], None] | None) -> None: ...


def guarded(fleet: FleetView, call: Callable[[*Args], T], *args: *Args) -> T:
    """Return the answer of a plugin that may come from anywhere. Raise what it raises, and `ValueError` if it wrote to
    a column; the columns are then as they were. The columns of a `Cycle` in `args` are read only."""
    for cycle in args:
        if isinstance(cycle, Cycle):
            cycle.protect()
    floats = fleet.table.floats
    before = floats.tobytes()
    try:
        answer = interruptible(call, *args)
    finally:
        changed = floats.tobytes() != before
        if changed:
            rows = np.frombuffer(before).reshape(floats.shape)
            names = [
                name for name, row, old in zip(FLOATS, floats, rows, strict=True) if row.tobytes() != old.tobytes()
            ]
            floats[:] = rows
    if changed:
        raise ValueError(f"wrote to {', '.join(names)} of fleet.table, which are read only")
    return answer


def interruptible(call: Callable[[*Args], T], *args: *Args) -> T:
    """Call a plugin that gets no columns, or for `guarded`. What it raises is one of `PLUGIN_FAILURES`, or ends the
    command or the thread. `server.plugin_watch` interrupts what runs in this."""
    try:
        return call(*args)
    except BaseException as error:
        if not isinstance(error, (*PLUGIN_FAILURES, *PASSING)):
            raise Stray from error
        raise


def own(policy: Policy) -> bool:
    """Whether the policy's class is Fairlead's, so that its calls need no guard."""
    return type(policy).__module__.startswith("fairlead.")


def choice_of(policy: Policy, request: Request, fleet: FleetView, context: Context) -> Answer:
    """Return the checked answer of a policy that may come from anywhere. Raise what `guarded` raises."""
    return checked(guarded(fleet, policy.choose, request, fleet, context), fleet)


def _raise(error: PluginError) -> None:
    raise error from None


def choose_or_raise(
    policy: Policy,
    request: Request,
    fleet: FleetView,
    context: Context,
    report: Callable[[PluginError], None] | None = _raise,
) -> Answer:
    """As `choice_of`; also raise what the policy reports of its plugins. From then on it reports to `report`."""
    if not isinstance(policy, ReportsErrors):
        return choice_of(policy, request, fleet, context)
    policy.report_to(_raise)
    try:
        return choice_of(policy, request, fleet, context)
    finally:
        policy.report_to(report)


def notified(answer: Answer, request: Request, fleet: FleetView) -> Answer:
    """Return the answer, after its observers were told: for those who do not send the request."""
    if isinstance(answer, Picked) and answer.notify is not None:
        answer.notify(request, answer.slot, fleet)
    return answer


class Guard:
    """Calls a plugin from anywhere. One that has failed to return for the second time rests, as a policy does
    (`errors.rests_until`)."""

    def __init__(self, name: str, plugin: object = None) -> None:
        self.name, self.plugin = name, plugin
        self._rests_until = -inf

    def rests(self, now: float) -> bool:
        return now < self._rests_until

    def call(self, now: float, fleet: FleetView, call: Callable[[*Args], T], *args: *Args) -> T | None:
        """Return the answer; `None` while the plugin rests. Raise what `guarded` raises."""
        if self.rests(now):
            return None
        try:
            return guarded(fleet, call, *args)
        except PLUGIN_FAILURES as error:
            self._failed(error, now)
            raise

    def call_apart(self, now: float, call: Callable[[*Args], T], *args: *Args) -> T:
        """As `call`, for a plugin that gets no columns and does not rest."""
        try:
            return interruptible(call, *args)
        except PLUGIN_FAILURES as error:
            self._failed(error, now)
            raise

    def _failed(self, error: BaseException, now: float) -> None:
        """Raise a `PluginError` if the plugin did not return."""
        if hung(error):
            self._rests_until = rests_until(self._rests_until, now)
            failure = PluginError(self.name, described(error))
            raise failure.with_note(f"it is left out for {REST_S:.0f} s") if self.rests(now) else failure from error


class Clamped(Guard):
    """Limits the scores of a third-party scorer to [0, 1]; NaN counts as 0. What it writes to columns is undone and
    raises. Use `clamped` if it may observe picks."""

    def __init__(self, scorer: Scorer) -> None:
        super().__init__(scorer.name, scorer)
        self._scorer = scorer

    def score(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn | None:
        scores = self.call(cycle.now, fleet, self._scorer.score, request, fleet, cycle)
        if scores is None:
            return None
        column = checked_column(scores, (len(fleet.table),), "scores")
        return np.nan_to_num(np.clip(column, 0.0, 1.0), nan=0.0)


class GuardedObserver(Guard):
    """Passes picks on to a policy from anywhere, which remembers them itself."""

    def __init__(self, name: str, observer: PickObserver) -> None:
        super().__init__(name)
        self._observer = observer

    def chosen(self, request: Request, slot: int, fleet: FleetView, cycle: Cycle) -> None:
        self.call(cycle.now, fleet, self._observer.chosen, request, slot, fleet, cycle)


class _ClampedObserver(Clamped):
    """Passes picks on to the scorer that it wraps."""

    def __init__(self, scorer: Scorer, observer: PickObserver) -> None:
        super().__init__(scorer)
        self._observer = observer

    def chosen(self, request: Request, slot: int, fleet: FleetView, cycle: Cycle) -> None:
        self.call(cycle.now, fleet, self._observer.chosen, request, slot, fleet, cycle)


def clamped(scorer: Scorer) -> Scorer:
    """Return the scorer, with its scores limited to [0, 1]."""
    return _ClampedObserver(scorer, scorer) if isinstance(scorer, PickObserver) else Clamped(scorer)


def highest(totals: FloatColumn) -> int:
    """The slot with the highest total, of those that were not filtered out."""
    return int(np.nan_to_num(totals, nan=-1e300, neginf=-np.inf).argmax())


class Picker(Protocol):
    """Picks one slot. `totals` is -inf for slots that were filtered out; at least one entry is finite."""

    name: str

    def pick(self, request: Request, fleet: FleetView, totals: FloatColumn, cycle: Cycle) -> int: ...
