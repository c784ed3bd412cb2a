"""The history of the last hour, kept with or without viewers: chart points, rates, and since when every request fails.

Rules
* Call `look` twice a second. It does almost no work per request: counts are differences of the metrics' own counts,
  latencies are those of the last ten seconds in `watch.newest`.
* An endpoint is out of use when the `health` filter removes it: its scrapes fail, its answers fail, or it hangs.
* Every request fails if there were `FAILED` or more server errors and no good answer in between.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping
from math import inf
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from fairlead.core.stalls import FORGOTTEN_S, OUT_OF_USE, WELL
from fairlead.core.table import EndpointTable
from fairlead.pool.scrape import TOLD_AFTER
from fairlead.server.observe.endpoint_history import EndpointHistory
from fairlead.server.observe.log import get
from fairlead.server.observe.metrics import MOST_DECLARED
from fairlead.server.observe.model_rows import ModelHistory, models_out
from fairlead.server.observe.recent import MAX_LABEL, SHORT, percentiles
from fairlead.server.observe.snapshot_shape import (
    FAILS,
    HANGS,
    MODELS_OUT,
    REFUSED,
    Failures,
    Latency,
    Point,
    Quantiles,
    momentary,
)
from fairlead.server.observe.troubles import HOLD_S, Happened, named
from fairlead.server.observe.watch import Watch

log = get("schedule")

#: Seconds between two points of the charts, and seconds that points are kept.
POINT, HISTORY = 5.0, 3600.0
#: After this many failures without a good answer in between, every request counts as failing.
FAILED = 5
_SHARES = (0.5, 0.95, 0.99)
#: The label `why` of the metric, by reason. Any other reason is that of a failed scrape; its label is `silent`.
_WHY = {HANGS: "hangs", FAILS: "fails", REFUSED: "refused"}


class _Counts(NamedTuple):
    """The counts at one moment, since the start."""

    time_s: float
    #: Requests that arrived, including those that wait in the queue.
    arrived: float
    requests: float
    refused: float
    answered: int
    client_errors: int
    server_errors: int


class Rates(Struct, frozen=True):
    """Rates per second over the last ten seconds; `None` = less than a second is covered."""

    arrived_per_s: float | None = None
    #: Requests that were sent to an endpoint or refused.
    per_s: float | None = None
    refused_per_s: float | None = None
    client_errors_per_s: float | None = None
    server_errors_per_s: float | None = None
    #: Share of the ended requests that failed.
    error_rate: float | None = None


class Out(Struct, frozen=True):
    """Why an endpoint is out of use, and since when (clock seconds)."""

    reason: str
    since: float


class History:
    """Call `look(now)` twice a second. `wall`: seconds to add to the clock to get the time of day."""

    def __init__(self, watch: Watch, now: float, wall: Callable[[], float]) -> None:
        self._watch = watch
        self._wall = wall
        self._counts = deque([self._count(now)])
        self._next_point = now + POINT
        self.points: deque[Point] = deque(maxlen=int(HISTORY / POINT))
        self.rates = Rates()
        #: Clock seconds since when every request fails; `None` = some are answered, or there are no requests.
        self.failing_since: float | None = None
        self._failed_since, self._failed, self._failed_at = now, 0, -inf
        #: Endpoints out of use, by id. Those of `_hung` and `_failing` stay, although requests test both now and then.
        self.out: dict[str, Out] = {}
        #: Endpoints of which only the metrics fail: they are sent requests all the same, and answer.
        self._answering: dict[str, Out] = {}
        #: Endpoints out of use because of hangs, until they make progress.
        self._hung: set[str] = set()
        #: Endpoints that failing answers have put out of use, until one of their answers is good, or until nothing has
        #: been known of them for `FORGOTTEN_S`.
        self._failing: set[str] = set()
        text = "1 while an endpoint is out of use, or only tested because it hangs or fails."
        show = watch.metrics.registry.follow
        show("gauge", "fairlead_endpoint_out", text, self._shown, "endpoint", "why")
        #: Models that no endpoint in use can answer, and since when (clock seconds); what they were judged by.
        self.models_out: dict[str, float] = {}
        self._judged: tuple[int, bool, Collection[str], Collection[str]] = (-1, False, (), ())
        text = "1 while endpoints or definitions have a model, or an adapter, and no endpoint in use can answer for it."
        show("gauge", "fairlead_model_out", text, lambda: dict.fromkeys(self.models_out, 1), "model_name")
        watch.troubles.watch(MODELS_OUT, self._trouble)
        self.endpoints = EndpointHistory()
        self.models = ModelHistory()
        #: Which of the counters that should not grow have grown within the last minute.
        self.happened = Happened(HOLD_S)

    def look(self, now: float) -> None:
        self._watch.count()
        before, counts = self._counts[-1], self._count(now)
        if now - before.time_s >= 0.25:
            self._counts.append(counts)
            while self._counts[1].time_s <= now - SHORT:
                self._counts.popleft()
            self._judge(before, counts)
            self.rates = _rates(self._counts[0], counts)
        self._look_at_endpoints(now)
        for name, count in momentary(self._watch).items():
            self.happened.lately(name, count, now)
        self.endpoints.keep(self._watch.fleet.table, self._watch.newest, now)
        self.models.keep(self._watch, now)
        if now >= self._next_point:
            self.points.append(self.point(now))
            self._next_point = now - now % POINT + POINT

    def _answer(self, out: Mapping[str, Out], now: float) -> set[str]:
        """Which of these endpoints, of which no scrape works, completed an answer within the last minute to a request
        that was sent after that. One that broke off, or that its client gave up, may have had no more than headers."""
        answers = ((each, out[each.endpoint]) for each in self._watch.newest if out and each.endpoint in out)
        return {
            answer.endpoint
            for answer, silent in answers
            if 200 <= answer.status < 400 and answer.cause == "natural" and silent.reason not in _WHY
            if answer.at > now - HOLD_S and answer.at - max(answer.duration_ms, 0.0) / 1e3 > silent.since
        }

    def _shown(self) -> dict[tuple[str, str], int]:
        return {(endpoint, _WHY.get(out.reason, "silent")): 1 for endpoint, out in self.out.items()}

    def _trouble(self) -> str:
        return f"no endpoint in use can answer for {named([*self.models_out])}" if self.models_out else ""

    def notes(self) -> list[str]:
        """Lines for `/readyz` on endpoints that only get tests."""
        kinds = {HANGS: "endpoints that hang", FAILS: "endpoints whose answers fail"}
        names = {why: [name for name, out in self.out.items() if out.reason == why] for why in kinds}
        return [f"{text}: {named(names[why])}" for why, text in kinds.items() if names[why]]

    def failures(self) -> Failures:
        """The failures that the notices mention."""
        since, rates = self.failing_since, self.rates
        errors = (rates.client_errors_per_s or 0.0) + (rates.server_errors_per_s or 0.0)
        share = (rates.server_errors_per_s or 0.0) / errors * (rates.error_rate or 0.0) if errors else 0.0
        models = {name: began + self._wall() for name, began in self.models_out.items()}
        return Failures(None if since is None else since + self._wall(), share, models)

    def point(self, now: float) -> Point:
        table, rates = self._watch.fleet.table, self.rates
        latency = self.latency(now)
        return Point(
            at=now + self._wall(),
            ttft=(latency.ttft.p50, latency.ttft.p95, latency.ttft.p99),
            predicted=latency.predicted.p50,
            answer=(latency.answer.p50, latency.answer.p95, latency.answer.p99),
            arrived_per_s=rates.arrived_per_s,
            per_s=rates.per_s,
            client_errors_per_s=rates.client_errors_per_s,
            server_errors_per_s=rates.server_errors_per_s,
            waiting=self._waiting(),
            engines_waiting=float(table.queue[table.alive].sum()),
            engines_running=float(table.active[table.alive].sum()),
        )

    def latency(self, now: float) -> Latency:
        """Latencies of the answers of the last ten seconds."""
        good = [record for record in self._watch.newest if record.at > now - SHORT and record.status < 400]
        streamed = [record for record in good if record.request.stream and record.ttft_ms >= 0.0]
        return Latency(
            ttft=_quantiles([record.ttft_ms for record in streamed]),
            predicted=_quantiles(
                [
                    record.queued_ms + record.forecast.ttft_ms
                    for record in streamed
                    if record.forecast is not None and record.forecast.ttft_ms > 0.0
                ]
            ),
            answer=_quantiles([record.duration_ms for record in good if record.duration_ms >= 0.0]),
        )

    def _count(self, now: float) -> _Counts:
        metrics = self._watch.metrics
        requests = sum(child.value for child in metrics.families.requests.children.values()) + metrics.unproven
        refused = sum(child.value for child in metrics.families.rejected.children.values())
        arrived = requests + (self._waiting() or 0)
        return _Counts(now, arrived, requests, refused, metrics.answered, metrics.client_errors, metrics.server_errors)

    def _waiting(self) -> int | None:
        controller = self._watch.queue.flow_controller
        return None if controller is None else len(controller.flow.queues)

    def _judge(self, before: _Counts, counts: _Counts) -> None:
        """Update since when every request fails."""
        failed = counts.server_errors - before.server_errors
        if counts.answered > before.answered:
            self._failed = 0
        elif failed:
            self._failed_since = self._failed_since if self._failed else before.time_s
            self._failed += failed
            self._failed_at = counts.time_s
        is_failing = self._failed >= FAILED and counts.time_s - self._failed_at < 6 * SHORT
        self.failing_since = self._failed_since if is_failing else None

    def _look_at_endpoints(self, now: float) -> None:
        watch, table, out = self._watch, self._watch.fleet.table, dict[str, Out]()
        self._hung = _named(table, table.suspicion >= OUT_OF_USE) | self._hung & _named(table, table.suspicion > WELL)
        if table.troubled:
            silent, hangs, fails = table.failures >= TOLD_AFTER, table.suspicion > WELL, table.errors >= 1.0
            avoided = table.ejected_until > now
            for slot in np.flatnonzero((silent | hangs | fails | avoided) & table.alive).tolist():
                name = table.ids[slot]
                known = self.out.get(name) or self._answering.get(name)
                if silent[slot]:
                    reason = watch.unread(name)
                    reason = REFUSED if "refused" in reason.lower() else reason
                elif name in self._hung:
                    reason = HANGS
                elif avoided[slot] or name in self._failing:
                    reason = FAILS
                else:
                    continue
                out[name] = Out(reason, known.since if known else now)
        self._answering = {name: out.pop(name) for name in self._answer(out, now)}
        self.out = out
        if (judged := (table.version, watch.any_role, frozenset(out), table.targets)) != self._judged:
            self._judged = judged
            names = sorted({name[:MAX_LABEL] for name in models_out(table, out, watch.any_role)})[:MOST_DECLARED]
            self.models_out = {name: self.models_out.get(name, now) for name in names}
        failing = _named(table, (table.errors >= 1.0) & (table.ejected_until > now - FORGOTTEN_S))
        failing &= self._failing | {name for name, each in out.items() if each.reason == FAILS}
        for name in failing - self._failing:
            log.warning("an endpoint's answers fail; it is out of use, and tried every few seconds", endpoint=name)
        for name in self._failing - failing:
            place = table.slot(name)
            if place is None or not table.alive[place]:
                text = "an endpoint whose answers failed was removed"
            elif table.ejected_until[place] == -inf:  # a good answer came, even if one has failed since
                text = "an endpoint's answers no longer all fail"
            else:
                text = "an endpoint whose answers failed is in use again: no request has tried it for a minute"
            log.info(text, endpoint=name)
        self._failing = failing


def _named(table: EndpointTable, which: NDArray[np.bool_]) -> set[str]:
    """Return the ids of the endpoints that are `which`."""
    return {table.ids[slot] for slot in np.flatnonzero(which & table.alive).tolist()}


def _rates(oldest: _Counts, newest: _Counts) -> Rates:
    seconds = newest.time_s - oldest.time_s
    if seconds < 1.0:
        return Rates()
    _, arrived, requests, refused, answered, client_errors, server_errors = (
        b - a for a, b in zip(oldest, newest, strict=True)
    )
    errors = client_errors + server_errors
    return Rates(
        max(arrived, 0.0) / seconds,
        requests / seconds,
        refused / seconds,
        client_errors / seconds,
        server_errors / seconds,
        errors / (errors + answered) if errors + answered else None,
    )


def _quantiles(values: Collection[float]) -> Quantiles:
    return Quantiles(len(values), *(None if q is None else round(q, 2) for q in percentiles(values, _SHARES)))
