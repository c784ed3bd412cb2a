"""The last decisions with all that led to them, and what came of each: for "why this endpoint?".

Rules
* A ring of `size` decisions in memory. Traces have a cell per endpoint and step; together they hold at most
  `max_cells`, so a large fleet keeps fewer decisions rather than more memory.
* Recording keeps references only (0.4 us); all rendering happens when somebody asks.
* Never a prompt: a request is its model, sizes and ids.
"""

from collections import deque
from collections.abc import Sequence
from itertools import islice
from math import isfinite
from typing import Any

from msgspec import Struct

from fairlead.model.decision import DecisionRecord, OutcomeRecord, Trace
from fairlead.model.forecast import Forecast

#: Candidates shown per decision, the best first; the chosen one always.
MAX_SHOWN = 100


class _Entry(Struct):
    decision: DecisionRecord
    cells: int
    outcome: OutcomeRecord | None = None


class Journal:
    """Takes records, in any number; gives the newest back."""

    def __init__(self, size: int = 1000, max_cells: int = 200_000) -> None:
        """Raises `ValueError` unless both are positive."""
        if size < 1 or max_cells < 1:
            raise ValueError("a journal needs room for at least one decision and one cell")
        self._entries: deque[_Entry] = deque()
        self._by_id: dict[int, _Entry] = {}
        self._size = size
        self._max_cells = max_cells
        self._cells = 0
        self._dropped = False

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def cells(self) -> int:
        """Cells of all traces held."""
        return self._cells

    def on_decision(self, record: DecisionRecord) -> None:
        trace = record.trace
        cells = _cells(trace) if trace is not None else 0
        entry = _Entry(record, cells)
        self._entries.append(entry)
        self._by_id[record.request.id] = entry
        self._cells += cells
        while len(self._entries) > self._size or (self._cells > self._max_cells and len(self._entries) > 1):
            self._drop_oldest()

    def on_outcome(self, record: OutcomeRecord) -> None:
        """Joined with its decision, if that is still held."""
        entry = self._by_id.pop(record.request.id, None)
        if entry is not None:
            entry.outcome = record

    def last(self, count: int, max_shown: int = MAX_SHOWN) -> list[dict[str, Any]]:
        """The newest `count` decisions, newest first, as plain values that JSON can hold."""
        newest = list(self._entries)[-count:] if count > 0 else []
        return [render(entry.decision, entry.outcome, max_shown) for entry in reversed(newest)]

    def newest(self, count: int) -> list[tuple[DecisionRecord, OutcomeRecord | None]]:
        """The newest `count`, newest first, as they were recorded."""
        return [(entry.decision, entry.outcome) for entry in islice(reversed(self._entries), count)]

    @property
    def full(self) -> bool:
        """Older ones were let go."""
        return self._dropped

    def find(self, wanted: str) -> tuple[DecisionRecord, OutcomeRecord | None] | None:
        """The newest decision of that name: our number for the request, a decision id, or the client's x-request-id."""
        number = request_number(wanted)
        for entry in reversed(self._entries):
            request = entry.decision.request
            if request.id == number or (wanted and request.external_id == wanted):
                return entry.decision, entry.outcome
        return None

    def _drop_oldest(self) -> None:
        entry = self._entries.popleft()
        self._dropped = True
        self._cells -= entry.cells
        if self._by_id.get(entry.decision.request.id) is entry:
            del self._by_id[entry.decision.request.id]


def request_number(wanted: str) -> int:
    """The request that a decision id (`run.number`, hexadecimal) or a plain number names; -1 = it is neither."""
    _, dot, number = wanted.rpartition(".")
    try:
        return int(number, 16) if dot else int(number)
    except ValueError:
        return -1


def _cells(trace: Trace) -> int:
    columns = 1 + len(trace.filters) + len(trace.scorers)
    if trace.snapshot is not None:
        columns += len(trace.snapshot.floats) + len(trace.snapshot.learned)
    return len(trace.endpoints) * columns


def render(decision: DecisionRecord, outcome: OutcomeRecord | None, max_shown: int = MAX_SHOWN) -> dict[str, Any]:
    """One decision as plain values. Times in clock seconds or, where named so, milliseconds; unknown = null."""
    request = decision.request
    return {
        "request_id": request.id,
        "external_id": request.external_id,
        "at": decision.at,
        "waited_ms": round((decision.at - request.arrived) * 1000, 3),
        "queued_ms": round(decision.queued_ms, 3),
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
        "status": decision.status,
        "endpoint": decision.endpoint or None,
        "address": decision.address or None,
        "predicted_hit_tokens": decision.hit_tokens,
        "best_hit_tokens": decision.best_hit_tokens,
        "overloaded": decision.overloaded,
        "forecast": None if decision.forecast is None else _forecast(decision.forecast),
        "trace": None if decision.trace is None else _trace(decision.trace, decision.endpoint, max_shown),
        "result": None if outcome is None else _result(outcome),
    }


def _trace(trace: Trace, chosen: str, max_shown: int) -> dict[str, Any]:
    endpoints = trace.endpoints
    totals = _values(trace.total, len(endpoints))
    kept = _values(trace.candidates, len(endpoints), True)
    order = sorted(range(len(endpoints)), key=lambda i: (endpoints[i] != chosen, not kept[i], -_rank(totals[i]), i))
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
        "request_bytes": _known(outcome.request_bytes),
        "response_bytes": _known(outcome.response_bytes),
        "prompt_tokens": _known(outcome.prompt_tokens),
        "completion_tokens": _known(outcome.completion_tokens),
        "cached_tokens": _known(outcome.cached_tokens),
    }


def _values(column: Any, length: int, default: Any = None) -> Sequence[Any]:
    """A column as a list; one that is missing, or of another length, is `default` throughout."""
    values = [] if column is None else column.tolist() if hasattr(column, "tolist") else list(column)
    return values if len(values) == length else [default] * length


def _rank(total: Any) -> float:
    return total if isinstance(total, float) and isfinite(total) else float("-inf")


def _plain(value: Any) -> Any:
    """JSON has no infinities; a score that was filtered out is null."""
    if isinstance(value, float):
        return round(value, 6) if isfinite(value) else None
    return value


def _known(value: float) -> float | None:
    return value if value >= 0 else None
