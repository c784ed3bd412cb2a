"""One decision in full, as plain values: what the journal page shows, with the reasons in milliseconds.

Shape: that of `journal.render`, and beside it `explanation` (see `fairlead.schedule.explain`; null where the numbers
were not kept), `prediction` (forecast against what came), `decision_id`.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from fairlead.model.decision import DecisionRecord, OutcomeRecord
from fairlead.model.errors import FairleadError
from fairlead.observe.journal import render
from fairlead.schedule.explain import explain
from fairlead.schedule.explained import Explanation


def explained(
    decision: DecisionRecord, outcome: OutcomeRecord | None, make_policy: Callable[[], Any] | None
) -> dict[str, Any]:
    """`make_policy` gives a fresh copy of the policy that decided."""
    found, problem = _explanation(decision, make_policy)
    return {
        **render(decision, outcome),
        "session": decision.request.session or None,
        "max_tokens": decision.request.max_tokens or None,
        "prediction": prediction(decision, outcome),
        "explanation": None if found is None else plain(found),
        "unexplained": problem or None,
    }


def _explanation(decision: DecisionRecord, make_policy: Callable[[], Any] | None) -> tuple[Explanation | None, str]:
    trace = decision.trace
    if trace is None:
        return None, "it was bound by the queue, chosen elsewhere, or refused: no policy rated it"
    if trace.snapshot is None or make_policy is None:
        return None, "the numbers were not kept; set journal.explain or journal.path"
    try:
        return explain(make_policy, decision.request, trace, decision.endpoint), ""
    except (FairleadError, ValueError) as error:
        return None, str(error)


def plain(explanation: Explanation) -> dict[str, Any]:
    """Numbers rounded to what is meant; totals and terms keep enough digits to add up."""
    made: dict[str, Any] = msgspec.to_builtins(explanation)
    for candidate in made["candidates"]:
        for name in ("queued_requests", "queued_tokens", "running_requests", "kv_usage"):
            candidate[name] = round(candidate[name], 4)
    return made


def prediction(decision: DecisionRecord, outcome: OutcomeRecord | None) -> dict[str, Any] | None:
    """How good it was. Ratios are actual / predicted; unknown = null."""
    forecast = decision.forecast
    if forecast is None:
        return None
    ttft = outcome.ttft_ms if outcome is not None and outcome.ttft_ms >= 0 else None
    cached = outcome.cached_tokens if outcome is not None and outcome.cached_tokens >= 0 else None
    tpot = None
    if outcome is not None and outcome.completion_tokens > 1 and outcome.duration_ms > outcome.ttft_ms >= 0:
        tpot = (outcome.duration_ms - outcome.ttft_ms) / (outcome.completion_tokens - 1)
    streamed = decision.request.stream
    return {
        "ttft_ms": {
            "predicted": round(forecast.ttft_ms, 3),
            "band": [round(forecast.low_ms, 3), round(forecast.high_ms, 3)],
            "actual": ttft,
            "ratio": round(ttft / forecast.ttft_ms, 4) if streamed and ttft and forecast.ttft_ms > 0 else None,
            "within": forecast.low_ms <= ttft <= forecast.high_ms if streamed and ttft is not None else None,
        },
        "tpot_ms": {"predicted": round(forecast.tpot_ms, 3), "actual": None if tpot is None else round(tpot, 3)},
        "cached_tokens": {"predicted": decision.hit_tokens, "actual": cached},
    }
