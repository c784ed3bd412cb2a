"""The journal in memory: the last decisions with their reasons and outcomes, as plain values, to answer "why this
endpoint?".

Rules
* A ring of `size` decisions. Traces have a cell per endpoint and step. All traces together have at most `max_cells`, so
  with a large fleet fewer decisions are kept, and the memory stays the same.
* Recording keeps only references (0.4 us); rendering happens when somebody asks.
* It never contains a prompt: of a request it shows model, sizes and ids.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, repeat
from math import isfinite
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from fairlead.core.errors import PLUGIN_FAILURES, FairleadError, described
from fairlead.core.explain import LAST, Explanation, explain, of_answer, why_split, why_waited
from fairlead.core.flow import LEFT
from fairlead.core.records import DecisionRecord, Forecast, OutcomeRecord, Snapshot, SplitCosts, Trace, Waited

#: At most this many candidates are shown per decision: the chosen one first, then the best.
MAX_SHOWN = 100
_ID, _TRACE = attrgetter("request.id"), attrgetter("trace")


#: Returns the decision id of one of our request numbers.
DecisionId = Callable[[int], str]


class _Entry(Struct):
    decision: DecisionRecord
    cells: int
    outcome: OutcomeRecord | None = None


class RecentDecisions:
    """Keeps the newest decisions, with their outcomes."""

    def __init__(self, size: int = 1000, max_cells: int = 200_000) -> None:
        """Raises `ValueError` unless both are positive."""
        if size < 1 or max_cells < 1:
            raise ValueError("recent decisions need room for at least one decision and one cell")
        self._entries: deque[_Entry] = deque()
        self._by_id: dict[int, _Entry] = {}
        self._size = size
        self._max_cells = max_cells
        #: The number of cells of all traces that are kept.
        self.cells = 0
        #: Whether older decisions were dropped.
        self.full = False

    def __len__(self) -> int:
        return len(self._entries)

    def on_decisions(self, records: Sequence[DecisionRecord]) -> None:
        sizes = [
            len(trace.endpoints)
            * (1 + len(trace.filters) + len(trace.scorers) + (0 if trace.snapshot is None else _rows(trace.snapshot)))
            if trace is not None
            else 0
            for trace in map(_TRACE, records)
        ]
        entries = list(map(_Entry, records, sizes))
        self._by_id.update(zip(map(_ID, records), entries, strict=True))
        self._entries.extend(entries)
        self.cells += sum(sizes)
        while len(self._entries) > self._size or (self.cells > self._max_cells and len(self._entries) > 1):
            self._drop_oldest()

    def on_outcomes(self, records: Sequence[OutcomeRecord]) -> None:
        """Add each outcome to its decision, if that is still kept."""
        for entry, record in zip(map(self._by_id.pop, map(_ID, records), repeat(None)), records, strict=False):
            if entry is not None:
                entry.outcome = record

    def each(self, count: int, max_shown: int = MAX_SHOWN) -> Iterator[dict[str, Any]]:
        """The newest `count` decisions, newest first, as plain values for JSON. Each is rendered only when it is taken
        from the iterator."""
        newest = list(self._entries)[-count:] if count > 0 else []
        return (render(entry.decision, entry.outcome, max_shown) for entry in reversed(newest))

    def newest(self, count: int) -> list[tuple[DecisionRecord, OutcomeRecord | None]]:
        """The records of the newest `count` decisions, newest first."""
        return [(entry.decision, entry.outcome) for entry in islice(reversed(self._entries), count)]

    def find(
        self, wanted: str, decision_id: DecisionId | None = None
    ) -> tuple[DecisionRecord, OutcomeRecord | None] | None:
        """The newest decision with that name; `None` = there is none. A name is our request number, a decision id, or
        the client's x-request-id, also in the id of an answer. Our own names count first, as clients may choose a
        number. `LAST` = the newest decision of all. `decision_id`: see `request_number`."""
        number = request_number(wanted, decision_id)
        for entry in reversed(self._entries):
            if wanted == LAST or entry.decision.request.id == number:
                return entry.decision, entry.outcome
        for entry in reversed(self._entries):
            if wanted and entry.decision.request.external_id == wanted:
                return entry.decision, entry.outcome
        inner = of_answer(wanted)
        return self.find(inner, decision_id) if inner else None

    def _drop_oldest(self) -> None:
        entry = self._entries.popleft()
        self.full = True
        self.cells -= entry.cells
        if self._by_id.get(entry.decision.request.id) is entry:
            del self._by_id[entry.decision.request.id]


def _rows(snapshot: Snapshot) -> int:
    return len(snapshot.floats) + len(snapshot.learned) + len(snapshot.gauges)


def request_number(wanted: str, decision_id: DecisionId | None = None) -> int:
    """The request number in a decision id (`RUN.NUMBER`, hexadecimal) or in a plain number; -1 = it is neither.
    `decision_id`: makes the ids of this run, so that those of other runs and workers are none; `None` = any run."""
    _, dot, text = wanted.rpartition(".")
    try:
        number = int(text, 16) if dot else int(text)
    except ValueError:
        return -1
    if not dot and str(number) != wanted:  # such as 0012, which only clients write
        return -1
    return -1 if dot and decision_id is not None and decision_id(number) != wanted else number


def render(decision: DecisionRecord, outcome: OutcomeRecord | None, max_shown: int = MAX_SHOWN) -> dict[str, Any]:
    """One decision as plain values. Times are clock seconds, or milliseconds in fields `*_ms`; `None` = unknown."""
    request = decision.request
    return {
        "request_id": request.id,
        "external_id": request.external_id,
        "at": decision.at,
        "waited_ms": round((decision.at - request.arrived) * 1000, 3),
        "queued_ms": round(decision.queued_ms, 3),
        "asked_ms": round(decision.asked_ms, 3),
        "model": request.model,
        "target_model": request.target_model,
        "rewritten_by": request.rewritten_by or None,
        "api": request.api,
        "stream": request.stream,
        "priority": request.priority,
        "fairness_id": request.fairness_id,
        "prompt_tokens": request.prompt_tokens,
        "policy": decision.policy,
        "outcome": decision.outcome,
        "status": None if decision.outcome == LEFT.reason else decision.status,  # nobody received it
        "endpoint": decision.endpoint or None,
        "address": decision.address or None,
        "prefill_endpoint": decision.prefill or None,
        "answered_by": answered_by(decision, outcome) or None,
        "predicted_hit_tokens": decision.hit_tokens,
        "best_hit_tokens": decision.best_hit_tokens,
        "overloaded": decision.overloaded,
        "forecast": None if (forecast := forecast_of(decision)) is None else _forecast(forecast),
        "waiting": None if decision.trace is None or decision.trace.waited is None else _waited(decision.trace.waited),
        "split": None if decision.trace is None else _split(decision.trace.split, decision.endpoint),
        "trace": None if decision.trace is None else _trace(decision.trace, decision.endpoint, max_shown),
        "result": None if outcome is None else _result(outcome),
    }


def answered_by(decision: DecisionRecord, outcome: OutcomeRecord | None) -> str:
    """The endpoint that answered instead of the chosen one; empty = that did, or nobody has."""
    return "" if outcome is None or outcome.endpoint == decision.endpoint else outcome.endpoint


def _trace(trace: Trace, chosen: str, max_shown: int) -> dict[str, Any]:
    endpoints = trace.endpoints
    totals = _values(trace.total, len(endpoints))
    kept = _values(trace.candidates, len(endpoints), True)
    taken = (i for i, name in enumerate(endpoints) if name)  # slots without an endpoint have no name
    order = sorted(taken, key=lambda i: (endpoints[i] != chosen, not kept[i], -_rank(totals[i]), i))
    shown = order[:max_shown]
    filters = [(name, _values(column, len(endpoints))) for name, column in trace.filters]
    scorers = [(name, weight, _values(column, len(endpoints))) for name, weight, column in trace.scorers]
    return {
        "outcome": trace.outcome,
        "weights": {name: _plain(weight) for name, weight, _ in scorers},
        "left_out": len(order) - len(shown),
        "candidates": [
            {
                "endpoint": endpoints[i],
                "chosen": endpoints[i] == chosen,
                "kept": _plain(kept[i]),
                "filters": {name: _plain(column[i]) for name, column in filters},
                "scores": {name: _plain(column[i]) for name, _, column in scorers},
                "total": _plain(totals[i]),
            }
            for i in shown
        ],
    }


def _waited(waited: Waited) -> dict[str, Any]:
    rounded = msgspec.to_builtins(waited)
    rounded["closed_ms"], rounded["kept_ms"] = round(waited.closed_ms, 3), round(waited.kept_ms, 3)
    return {**rounded, "why": why_waited(waited)}


def _split(split: SplitCosts | None, endpoint: str) -> dict[str, Any] | None:
    return None if split is None else {**msgspec.to_builtins(split), "why": [why_split(split, endpoint)]}


def forecast_of(decision: DecisionRecord) -> Forecast | None:
    """The forecast; `None` = there is none. A request that is split into prefill and decode has none, because the time
    of the transfer is not known."""
    return decision.forecast if decision.forecast is not None and decision.forecast.ttft_ms > 0.0 else None


def _forecast(forecast: Forecast) -> dict[str, Any]:
    return {
        "ttft_ms": round(forecast.ttft_ms, 3),
        "band_ms": [round(forecast.low_ms, 3), round(forecast.high_ms, 3)],
        "tpot_ms": round(forecast.tpot_ms, 3),
    }


def _result(outcome: OutcomeRecord) -> dict[str, Any]:
    return {
        "at": outcome.at,
        "endpoint": outcome.endpoint,
        "status": outcome.status or None,
        "cause": outcome.cause,
        "ttft_ms": _known(outcome.ttft_ms),
        "duration_ms": _known(outcome.duration_ms),
        "request_bytes": outcome.request.body_bytes,
        "response_bytes": _known(outcome.response_bytes),
        "prompt_tokens": _known(outcome.prompt_tokens),
        "completion_tokens": _known(outcome.completion_tokens),
        "cached_tokens": _known(outcome.cached_tokens),
    }


def _values(column: Any, length: int, default: Any = None) -> Sequence[Any]:
    """A column as a list. If it is missing or has another length, all values are `default`."""
    values = [] if column is None else np.asarray(column).tolist()
    return values if len(values) == length else [default] * length


def _rank(total: Any) -> float:
    return total if isinstance(total, float) and isfinite(total) else float("-inf")


def _plain(value: Any) -> Any:
    """Floats rounded. Infinities and NaN, which JSON lacks, become `None`; scores of filtered endpoints are such."""
    if isinstance(value, float):
        return round(value, 6) if isfinite(value) else None
    return value


def _known(value: float) -> float | None:
    return value if value >= 0 else None


def explained(
    decision: DecisionRecord, outcome: OutcomeRecord | None, make_policy: Callable[[], Any] | None
) -> dict[str, Any]:
    """One decision in full, as plain values: the fields of `render`, and in addition `explanation` (the reasons in
    milliseconds, see `fairlead.core.explain`; `None` = `unexplained` says why) and `prediction` (forecast and actual).
    `make_policy` returns a fresh copy of the policy that decided; `None` = nothing is explained."""
    explanation, problem = _explanation(decision, make_policy)
    return {
        **render(decision, outcome),
        "session": decision.request.session or None,
        "max_tokens": decision.request.max_tokens or None,
        "prediction": prediction(decision, outcome),
        "explanation": None if explanation is None else plain(explanation),
        "unexplained": problem or None,
    }


def _explanation(decision: DecisionRecord, make_policy: Callable[[], Any] | None) -> tuple[Explanation | None, str]:
    trace = decision.trace
    if trace is None or not trace.endpoints:
        if decision.outcome == LEFT.reason:
            return None, LEFT.message
        if not decision.endpoint:
            return None, "it was refused: no policy rated it"
        return None, f"{decision.policy} gave none: it names no costs, decides in another process, or failed"
    if trace.snapshot is None or make_policy is None:
        return None, "the numbers were not kept; set journal.explain or journal.path"
    try:
        return explain(make_policy, decision.request, trace, decision.endpoint), ""
    except (FairleadError, ValueError) as error:
        return None, str(error)
    except PLUGIN_FAILURES as error:
        return None, f"{decision.policy} failed when it was asked again: {described(error)}"


def plain(explanation: Explanation) -> dict[str, Any]:
    """The explanation as plain values. Loads are rounded; terms and totals keep all digits, so that they add up."""
    made: dict[str, Any] = msgspec.to_builtins(explanation)
    for candidate in made["candidates"]:
        for name in ("queued_requests", "queued_tokens", "running_requests", "kv_usage"):
            candidate[name] = round(candidate[name], 4)
    return made


def prediction(decision: DecisionRecord, outcome: OutcomeRecord | None) -> dict[str, Any] | None:
    """How good the forecast was; `None` = there was no forecast. Times to first token begin when the request was sent,
    after `queued_ms` and `asked_ms`. Ratios are actual / predicted; `None` = unknown, or another endpoint answered."""
    forecast = forecast_of(decision)
    if forecast is None:
        return None
    ttft = round(outcome.sent_ttft_ms, 6) if outcome is not None and outcome.ttft_ms >= 0 else None
    cached = outcome.cached_tokens if outcome is not None and outcome.cached_tokens >= 0 else None
    streamed = decision.request.stream
    judged = streamed and not answered_by(decision, outcome)
    tpot = outcome.tpot_ms if streamed and outcome is not None and outcome.tpot_ms > 0.0 else None
    return {
        "ttft_ms": {
            "predicted": round(forecast.ttft_ms, 3),
            "band": [round(forecast.low_ms, 3), round(forecast.high_ms, 3)],
            "actual": ttft,
            "ratio": round(ttft / forecast.ttft_ms, 4) if judged and ttft and forecast.ttft_ms > 0 else None,
            "within": forecast.low_ms <= ttft <= forecast.high_ms if judged and ttft is not None else None,
        },
        "tpot_ms": {"predicted": round(forecast.tpot_ms, 3), "actual": None if tpot is None else round(tpot, 3)},
        "cached_tokens": {"predicted": decision.hit_tokens, "actual": cached},
    }
