"""Contracts of plugins beside the policy.

Those of filters, scorers, pickers and policies are in `core.policy`, of fairness and ordering in
`core.flow`. What goes wrong in those of other distributions is done without, see `plugins.guarding`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import isfinite, isinf
from typing import Protocol

from fairlead.apis.request import ParsedRequest, parse_request, unread
from fairlead.core.apis import OTHER
from fairlead.core.endpoint import Endpoint
from fairlead.core.errors import ClientError, PluginError
from fairlead.core.fairness import Strict
from fairlead.core.flow import Ceiling, Fairness, Flow, Ordering, Waiting
from fairlead.core.view import FleetView


class MetricSource(Protocol):
    """Reads further columns from metrics pages. They stand beside those of `metrics.engines.NAME.extra`."""

    name: str
    #: Names of all columns that it may give.
    provides: tuple[str, ...]

    def measure(self, endpoint: Endpoint, page: bytes) -> Mapping[str, float]:
        """Called for every page that was read. What is absent keeps its older value; NaN takes it away."""
        ...


class Parser(Protocol):
    """Understands request bodies of paths that Fairlead does not know, or knows otherwise."""

    name: str
    #: Ends of request paths, without the query: `/v1/rank`. The longest that fits decides.
    paths: tuple[str, ...]

    def parse(self, path: str, body: bytes) -> ParsedRequest:
        """Raises `ClientError` for a body that no model server could read. After any other exception the request is
        scheduled unread."""
        ...


class Saturation(Protocol):
    """How full the pool is."""

    name: str

    def level(self, fleet: FleetView, now: float) -> float:
        """1 = the set point at which requests begin to wait; above it, oversubscribed."""
        ...


# Asks metric sources about a page; no source can break a scrape.

#: Larger values are cut: sums over them stay finite.
_MOST = 1e300


class Measuring:
    """The further columns of a page. A source that raises or says nonsense is left out for that page and reported."""

    def __init__(self, sources: Sequence[MetricSource], report: Callable[[PluginError], None] | None = None) -> None:
        self._sources = tuple(sources)
        self._report = report

    def __call__(self, endpoint: Endpoint, page: bytes) -> dict[str, float]:
        values: dict[str, float] = {}
        for source in self._sources:
            try:
                given = {name: float(value) for name, value in source.measure(endpoint, page).items()}
                stray = given.keys() - {*source.provides}
                if stray:
                    raise ValueError(f"gave {min(stray)!r}, which it does not provide")
            except Exception as error:
                if self._report is not None:
                    self._report(PluginError(source.name, f"{type(error).__name__}: {error}"))
                continue
            values |= {n: (_MOST if v > 0 else -_MOST) if isinf(v) else v for n, v in given.items()}
        return values


# Parser plugins before the built-in parser; no plugin can break a request.


class Parsing:
    """Called as `parse_request` is. A plugin that raises anything but `ClientError` is reported, and its request
    scheduled unread."""

    def __init__(self, parsers: Sequence[Parser], report: Callable[[PluginError], None] | None = None) -> None:
        #: (end of the path, parser), the longest end first; of equal ones the first parser configured.
        self._ends = sorted(
            ((end, parser) for parser in parsers for end in parser.paths), key=lambda entry: -len(entry[0])
        )
        self._report = report

    def __call__(self, path: str, body: bytes, content_type: str = "", *, content_encoding: str = "") -> ParsedRequest:
        plain = path.partition("?")[0].removesuffix("/")
        for end, parser in self._ends:
            if plain.endswith(end):
                return self._ask(parser, path, body, content_encoding)
        return parse_request(path, body, content_type, content_encoding=content_encoding)

    def _ask(self, parser: Parser, path: str, body: bytes, content_encoding: str) -> ParsedRequest:
        if content_encoding not in ("", "identity"):
            return unread(OTHER, "content-encoding", len(body))
        try:
            parsed = parser.parse(path, body)
            if not isinstance(parsed, ParsedRequest):
                raise TypeError(f"gave a {type(parsed).__name__}, expected a ParsedRequest")
            return parsed
        except ClientError:
            raise
        except Exception as error:
            if self._report is not None:
                self._report(PluginError(parser.name, f"{type(error).__name__}: {error}"))
            return unread(OTHER, "path", len(body))


# Keeps requests safe from flow-control plugins of other distributions: what fails is reported and done without.
#
# An ordering that fails ranks by arrival. A fairness policy that fails is replaced by one queue per band, for good:
# what it remembered can no longer be trusted. A saturation that fails counts as none, a ceiling that fails holds
# nobody back.

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

    def corrected(self, flow: Flow, more: float) -> None:
        before = flow.served
        self._try(lambda inner: inner.corrected(flow, more))
        flow.served = before + more

    def due(self, flow: Flow) -> bool:
        due: list[bool] = []
        self._try(lambda inner: due.append(bool(inner.due(flow))))
        return bool(due and due[0])

    def turns(self, window: int) -> Iterable[list[Waiting]]:
        """The plugin's windows, without requests that do not wait; if it offers none, the one queue's."""
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

    def level(self, fleet: FleetView, now: float) -> float:
        try:
            level = float(self._inner.level(fleet, now))
            if level == level:
                return level
            raise ValueError("no number")
        except Exception as error:
            _tell(self._report, self.name, error)
            return 0.0
