"""Contracts of metric sources, parsers and saturation plugins, and guards around third-party plugins.

The contracts of filters, scorers, pickers and policies are in `core.policy`, those of fairness and ordering in
`core.flow`. The guards report the errors of a plugin and continue without it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import isfinite, isinf
from operator import index
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from msgspec import structs

from fairlead.apis.parsed import ParsedRequest, unread
from fairlead.apis.request import parse_request
from fairlead.core.apis import OTHER
from fairlead.core.columns import BoolColumn, FloatColumn
from fairlead.core.endpoint import Endpoint
from fairlead.core.errors import PLUGIN_FAILURES, ClientError, PluginError, hung, of_plugin
from fairlead.core.fairness import Strict
from fairlead.core.flow import Ceiling, Fairness, Flow, Ordering, Waiting
from fairlead.core.policy import (
    Cycle,
    Demoter,
    Filter,
    Guard,
    Picker,
    PickObserver,
    Refused,
    Refuser,
    SteadyFilter,
    checked_column,
    checked_refusal,
    highest,
    interruptible,
)
from fairlead.core.request import Request
from fairlead.core.view import FleetView

Report = Callable[[PluginError], None] | None
Now = Callable[[], float]


def _tell(report: Report, name: str, error: BaseException) -> None:
    if report is not None:
        report(of_plugin(name, error))


class MetricSource(Protocol):
    """Reads additional columns from metrics pages, next to those of `metrics.engines.NAME.extra`."""

    name: str
    #: Names of all columns that it may return.
    provides: tuple[str, ...]

    def measure(self, endpoint: Endpoint, page: bytes) -> Mapping[str, float]:
        """Return values by column name; called for every page that was read. A column that is absent keeps its older
        value; NaN removes it."""
        ...


class Parser(Protocol):
    """Parses request bodies of paths that Fairlead does not know, or in place of the built-in parser."""

    name: str
    #: Ends of request paths, without the query: `/v1/rank`. The longest that matches is used.
    paths: tuple[str, ...]

    def parse(self, path: str, body: bytes) -> ParsedRequest:
        """Return the parsed request. Raise `ClientError` for a body that no model server could read. After any other
        exception the request is scheduled unread."""
        ...


class Saturation(Protocol):
    """Measures how full the pool is."""

    name: str

    def level(self, fleet: FleetView, now: float) -> float:
        """Return the saturation: 1 = the set point at which requests begin to wait; above it, oversubscribed."""
        ...


# Calls metric sources for a page. No source can break a scrape.

#: Larger values are cut, so that sums over them stay finite.
_MOST = 1e300


class Measuring:
    """Returns the additional columns of a page. A source that raises or returns invalid values is skipped for that page
    and reported. `now`: returns seconds of any clock."""

    def __init__(self, sources: Sequence[MetricSource], report: Report = None, now: Now = lambda: 0.0) -> None:
        self._sources = [(source, Guard(source.name)) for source in sources]
        self._report, self._now = report, now

    def __call__(self, endpoint: Endpoint, page: bytes) -> dict[str, float]:
        values: dict[str, float] = {}
        now = self._now()
        for source, guard in self._sources:
            if guard.rests(now):
                continue
            try:
                measured = guard.call_apart(now, source.measure, endpoint, page)
                given = {name: float(value) for name, value in measured.items()}
                stray = given.keys() - {*source.provides}
                if stray:
                    raise ValueError(f"gave {min(stray)!r}, which it does not provide")
            except PLUGIN_FAILURES as error:
                _tell(self._report, source.name, error)
                continue
            values |= {n: (_MOST if v > 0 else -_MOST) if isinf(v) else v for n, v in given.items()}
        return values


# Calls parser plugins before the built-in parser. No plugin can break a request.


#: The kinds of the fields of a parsed request. Values of other kinds, such as numpy's, would fail later.
_KINDS = {name: type(value) for name, value in structs.asdict(ParsedRequest()).items()}


class Parsing:
    """Called like `parse_request`. If a plugin raises anything but `ClientError`, the error is reported and the request
    is scheduled unread. `now`: returns seconds of any clock."""

    def __init__(self, parsers: Sequence[Parser], report: Report = None, now: Now = lambda: 0.0) -> None:
        guards = [(parser, Guard(parser.name)) for parser in parsers]
        #: (end of the path, parser, its guard), the longest end first; equal ends in the configured order.
        self._ends = sorted(
            ((end, parser, guard) for parser, guard in guards for end in parser.paths),
            key=lambda entry: -len(entry[0]),
        )
        self._report, self._now = report, now

    def __call__(self, path: str, body: bytes, content_type: str = "", *, content_encoding: str = "") -> ParsedRequest:
        plain = path.partition("?")[0].removesuffix("/")
        for end, parser, guard in self._ends:
            if plain.endswith(end):
                return self._ask(parser, guard, path, body, content_encoding)
        return parse_request(path, body, content_type, content_encoding=content_encoding)

    def _ask(self, parser: Parser, guard: Guard, path: str, body: bytes, content_encoding: str) -> ParsedRequest:
        if content_encoding not in ("", "identity"):
            return unread(OTHER, "content-encoding", len(body))
        now = self._now()
        if guard.rests(now):
            return unread(OTHER, "path", len(body))
        try:
            parsed = guard.call_apart(now, parser.parse, path, body)
            if not isinstance(parsed, ParsedRequest):
                raise TypeError(f"gave a {type(parsed).__name__}, expected a ParsedRequest")
            parts: object = parsed.prompt
            if isinstance(parts, list):
                parsed = structs.replace(parsed, prompt=tuple(parts))
            for name, value in structs.asdict(parsed).items():
                if not isinstance(value, _KINDS[name]):
                    raise TypeError(f"{name} is {type(value).__name__}, expected {_KINDS[name].__name__}")
                if isinstance(value, int) and value < 0:
                    raise ValueError(f"{name} is {value}, expected 0 or more")
            for part in parsed.prompt:
                if not isinstance(part, bytes | memoryview):
                    raise TypeError(f"a part of prompt is {type(part).__name__}, expected bytes")
            return parsed
        except ClientError:
            raise
        except PLUGIN_FAILURES as error:
            _tell(self._report, parser.name, error)
            return unread(OTHER, "path", len(body))


# Protects the columns from third-party filters and pickers (for scorers: `core.policy.clamped`). What they write to
# columns is undone and raises, and the profile leaves them out of that decision. A picker gets a copy of the totals.


class GuardedFilter(Guard):
    """Has all optional methods of a filter. Those that `inner` lacks do nothing."""

    def __init__(self, inner: Filter) -> None:
        super().__init__(inner.name, inner)
        self.stage = inner.stage
        self.steady = isinstance(inner, SteadyFilter) and inner.steady
        self.inner = inner

    def keep(self, request: Request, fleet: FleetView, cycle: Cycle) -> BoolColumn | None:
        mask = self.call(cycle.now, fleet, self.inner.keep, request, fleet, cycle)
        return None if mask is None else np.asarray(mask)

    def demote(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn | None:
        inner = self.inner
        if not isinstance(inner, Demoter):
            return None
        factors = self.call(cycle.now, fleet, inner.demote, request, fleet, cycle)
        if factors is None:
            return None
        column = checked_column(factors, (len(fleet.table),), "a demotion")
        if np.isnan(column).any():
            raise ValueError("a demotion that is NaN")
        return np.clip(column, 0.0, 1.0)

    def refusal(self, request: Request, fleet: FleetView, cycle: Cycle) -> Refused | None:
        inner = self.inner
        if not isinstance(inner, Refuser):
            return None
        refusal = self.call(cycle.now, fleet, inner.refusal, request, fleet, cycle)
        return None if refusal is None else checked_refusal(refusal, fleet)

    def chosen(self, request: Request, slot: int, fleet: FleetView, cycle: Cycle) -> None:
        if isinstance(self.inner, PickObserver):
            self.call(cycle.now, fleet, self.inner.chosen, request, slot, fleet, cycle)


def is_a(plugin: Filter, kind: type) -> bool:
    """Whether a filter, guarded or not, is one of this class."""
    return isinstance(plugin.inner if isinstance(plugin, GuardedFilter) else plugin, kind)


class GuardedPicker(Guard):
    """While the picker rests, the highest total is taken."""

    def __init__(self, inner: Picker) -> None:
        super().__init__(inner.name, inner)
        self._inner = inner

    def pick(self, request: Request, fleet: FleetView, totals: FloatColumn, cycle: Cycle) -> int:
        if self.rests(cycle.now):
            return highest(totals)
        slot: Any = self.call(cycle.now, fleet, self._inner.pick, request, fleet, totals.copy(), cycle)
        return int(index(slot))

    def chosen(self, request: Request, slot: int, fleet: FleetView, cycle: Cycle) -> None:
        if isinstance(self._inner, PickObserver):
            self.call(cycle.now, fleet, self._inner.chosen, request, slot, fleet, cycle)


# Protects requests from errors of third-party flow-control plugins. Errors are reported.
#
# If an ordering fails or rests, the order of arrival is used. If a fairness policy fails, one queue per band replaces
# it permanently, because its state can no longer be trusted. If a saturation fails or rests, the pool counts as empty.
# If a ceiling fails, all bands may send. It gets no time, so one that did not return twice is not called again.


def _lists(fairness: Fairness, window: int) -> Iterator[list[Waiting]]:
    for turn in fairness.turns(window):
        listed = list(turn)
        for waiting in listed:
            if not isinstance(waiting, Waiting):
                raise TypeError(f"a turn with {type(waiting).__name__}, expected Waiting")
        yield listed


T = TypeVar("T", bound=Ordering | Ceiling | Saturation)


class _Guarded(Guard, Generic[T]):
    def __init__(self, inner: T, report: Report) -> None:
        super().__init__(inner.name)
        self._inner = inner
        self._report = report


class GuardedOrdering(_Guarded[Ordering]):
    def key(self, waiting: Waiting) -> float:
        now = waiting.since  # the key is asked for when the request is queued
        if self.rests(now):
            return now
        try:
            key = float(self.call_apart(now, self._inner.key, waiting))
            if isfinite(key):
                return key
            raise ValueError(f"the key {key} is not finite")
        except PLUGIN_FAILURES as error:
            _tell(self._report, self.name, error)
            return now


class GuardedFairness:
    """Keeps, next to the plugin, the single queue that would replace it."""

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

    def corrected(self, flow: Flow, more: float) -> None:
        before = flow.served
        self._try(lambda inner: inner.corrected(flow, more))
        flow.served = before + more

    def due(self, flow: Flow) -> bool:
        due: list[bool] = []
        self._try(lambda inner: due.append(bool(inner.due(flow))))
        return bool(due and due[0])

    def turns(self, window: int) -> Iterable[list[Waiting]]:
        """Iterate over the plugin's windows, without requests that do not wait; if there are none, over those of the
        single queue."""
        offered = False
        for turn in self._offered(window):
            kept = [waiting for waiting in turn if waiting.number in self._here][:window]
            if kept:
                offered = True
                yield kept
        if not offered:
            yield from self._plain.turns(window)

    def _offered(self, window: int) -> Iterator[list[Waiting]]:
        if self._inner is None:
            return
        try:
            turns = interruptible(_lists, self._inner, window)
            while (turn := interruptible(next, turns, None)) is not None:
                yield turn
        except PLUGIN_FAILURES as error:
            self._failed(error)

    def _try(self, call: Callable[[Fairness], None]) -> None:
        if self._inner is None:
            return
        try:
            interruptible(call, self._inner)
        except PLUGIN_FAILURES as error:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        self._inner = None
        _tell(self._report, self.name, error)


class GuardedCeiling(_Guarded[Ceiling]):
    _hung = 0

    def allowed(self, level: float, priorities: Sequence[int]) -> list[bool]:
        if self._hung < 2:
            try:
                answer = interruptible(self._inner.allowed, level, priorities)
                allowed = [bool(may) for may in answer]
                if len(allowed) == len(priorities):
                    return allowed
                raise ValueError(f"{len(allowed)} answers for {len(priorities)} bands")
            except PLUGIN_FAILURES as error:
                self._hung += hung(error)
                failure = of_plugin(self.name, error)
                over = self._hung == 2
                _tell(self._report, self.name, failure.with_note("it is left out until a restart") if over else failure)
        return [True] * len(priorities)


class GuardedSaturation(_Guarded[Saturation]):
    def level(self, fleet: FleetView, now: float) -> float:
        if self.rests(now):
            return 0.0
        try:
            answer: Any = self.call(now, fleet, self._inner.level, fleet, now)
            level = float(answer)
            if level == level:
                return level
            raise ValueError("the saturation is NaN")
        except PLUGIN_FAILURES as error:
            _tell(self._report, self.name, error)
            return 0.0
