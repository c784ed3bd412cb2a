"""Explains why a decision chose one endpoint over the others, by repeating it from its snapshot.

Rules
* The snapshot is what the policy saw. A policy without memory gives the same answer on it, so its terms add up exactly
  to the recorded totals. If they do not (`reproduced` is False: the policy has memory or chooses at random), the
  recorded totals are shown with the terms of the repetition.
* In `total` more is always better. A policy that computes costs has negative totals. `terms` have the sign of the
  total. `unit` says how to read both.
* What an endpoint would have needed is found by search: its own numbers are changed until it ties with the chosen one.
* Every repetition needs a fresh policy, because a decision may change a policy.
* For a request that waited, late binding chose a pair of request and endpoint. The totals are what it compared: the
  policy's costs and the other scorers of the trace. Endpoints that were not open are rated like the others. A policy
  without costs in milliseconds is not repeated; the terms are then those of the cost kernel.
"""

from collections.abc import Callable, Sequence
from math import ceil, isfinite, log10
from random import Random
from typing import Any

import numpy as np
from msgspec import Struct

from fairlead.core.columns import BoolColumn, FloatColumn
from fairlead.core.cost import Weights, parts
from fairlead.core.endpoint import STAGES, Endpoint
from fairlead.core.policy import Context, CostPolicy, Cycle, Explainable, Picked, Policy, interruptible
from fairlead.core.prefix import AS_FREE
from fairlead.core.profile import estimate
from fairlead.core.records import FLOW_CONTROL, SplitCosts, Trace, Waited
from fairlead.core.request import Request
from fairlead.core.snapshot import Restored
from fairlead.core.stalls import level_name
from fairlead.core.table import FLOATS

#: Accepted instead of a decision's id: the newest decision.
LAST = "last"
#: What vLLM puts before the request's id to make that of the answer.
_ANSWERS = ("chatcmpl-", "cmpl-", "resp_", "msg_", "embd-", "pool-", "score-", "rerank-", "classify-")
#: Share of the total within which the default policy may have treated endpoints as equal: its `nearTie` and a margin.
_NEAR = 0.12

#: Decimals of the smallest numbers that are shown.
_MOST_DIGITS = 9
#: A total beyond this, in either direction, stands for an infinite cost: chosen only if all costs are infinite.
_INFINITE = 1e99

# The parts of an explanation. Its JSON uses the same names.


class Candidate(Struct, frozen=True, kw_only=True):
    """One endpoint in one decision. Tokens and requests are the scheduler's estimates at that moment."""

    endpoint: str
    chosen: bool
    #: The filters that removed it.
    removed_by: tuple[str, ...] = ()
    #: What an endpoint that only prefills had to do with a split, in words; `removed_by` then has the filter by role.
    part: str = ""
    #: Whether it hung: `suspect` or `out` (`fairlead.core.stalls`); empty = it did not.
    hung: str = ""
    cached_tokens: int = 0
    queued_requests: float = 0.0
    queued_tokens: float = 0.0
    running_requests: float = 0.0
    kv_usage: float = 0.0
    #: Share of its KV cache that can take prompts before older ones must be dropped.
    free_cache: float = 0.0
    #: `None` = it was not rated.
    total: float | None = None
    #: The total of the chosen endpoint minus its own.
    behind: float | None = None
    terms: dict[str, float] = {}
    #: How many more cached prompt tokens, or fewer queued tokens, it would have needed to tie; `None` = no number would
    #: have been enough.
    more_cached_tokens: int | None = None
    fewer_queued_tokens: float | None = None


class Explanation(Struct, frozen=True, kw_only=True):
    """The explanation of one decision. `unit`: `ms` (costs, negative), `cost` (others, also negative) or `points`."""

    policy: str
    unit: str
    endpoint: str
    reproduced: bool
    #: The chosen endpoint first, then the others by total.
    candidates: tuple[Candidate, ...] = ()
    why: tuple[str, ...] = ()
    #: Why the request waited in our queue; `None` = it did not wait.
    waited: Waited | None = None
    #: What a split would have cost; `None` = none was possible.
    split: SplitCosts | None = None


def digits_of(candidates: Sequence[Candidate]) -> int:
    """Decimals for totals and terms: one, or as many as give the total of the first three significant digits, because
    costs and scores may be in any unit. If that is 0, the least distance to it counts."""
    first = candidates[0].total if candidates else None
    size = abs(first or 0.0) or min((abs(c.behind) for c in candidates if c.behind), default=1.0)
    return min(max(3 - ceil(log10(size)), 1), _MOST_DIGITS)


# The choice in words.


def why(candidates: Sequence[Candidate], unit: str, prefill: str = "") -> list[str]:
    """Return the reasons in words: against the best other endpoint, and against the one with most of the prompt
    cached. `prefill`: id of the endpoint that computes the prompt; empty = the chosen one."""
    if not candidates or not candidates[0].chosen:
        return ["no endpoint was chosen"]
    chosen, unchosen = candidates[0], [candidate for candidate in candidates[1:] if not candidate.part]
    rated = [candidate for candidate in unchosen if candidate.total is not None and not _gone(candidate)]
    if chosen.total is None and len(candidates) > 1:
        return [f"{chosen.endpoint} was taken without being rated: everything else was filtered out or overloaded"]
    rivals = [max(rated, key=lambda candidate: candidate.total or 0.0)] if rated else []
    held_most = max(unchosen, key=lambda candidate: candidate.cached_tokens, default=None)
    if held_most is not None and held_most.cached_tokens > chosen.cached_tokens and held_most not in rivals:
        rivals.append(held_most)
    digits = digits_of(candidates)
    lines = [_against(chosen, rival, unit, digits, prefill) for rival in rivals]
    if chosen.terms.get("reuse", 0.0) > 0.0:
        lines.append(f"{chosen.endpoint} has far fewer requests than the holders; later requests will use its copy too")
    lines += [f"{c.endpoint} made no progress for too long ({c.hung})" for c in candidates if c.hung]
    removed = [candidate for candidate in unchosen if _gone(candidate)]
    if removed:
        names = ", ".join(sorted({name for candidate in removed for name in candidate.removed_by}))
        lines.append(f"{len(removed)} of {len(candidates)} endpoints were filtered out by {names}")
    closed = sum(candidate.removed_by == (FLOW_CONTROL,) for candidate in unchosen)
    if closed:
        lines.append(f"{closed} of {len(candidates)} endpoints were not open")
    return lines or [
        f"{chosen.endpoint} was the only endpoint{' that decodes' if len(unchosen) < len(candidates) - 1 else ''}"
    ]


def _gone(candidate: Candidate) -> bool:
    """Whether a filter removed it. Endpoints that were just not open do not count: they are rated like the others."""
    return bool(candidate.removed_by) and candidate.removed_by != (FLOW_CONTROL,)


def _against(chosen: Candidate, rival: Candidate, unit: str, digits: int, prefill: str) -> str:
    if _gone(rival):
        held = f" although it holds {rival.cached_tokens - chosen.cached_tokens:,} more cached tokens"
        return f"{rival.endpoint} was filtered out by {', '.join(rival.removed_by)}{held}"
    ahead = rival.behind is not None and rival.behind < 0
    verb, comparative = ("scores", ("less", "more")) if unit == "points" else ("costs", ("more", "less"))
    behind = f"{abs(rival.behind or 0.0):,.{digits}f}{'' if unit == 'cost' else f' {unit}'}"
    text = f"{rival.endpoint} {verb} {behind} {comparative[ahead]}"
    more = rival.cached_tokens - chosen.cached_tokens
    text += f" {'and' if ahead else 'although it'} holds {more:,} more cached tokens" if more > 0 else ""
    text += f": {detail}" if (detail := _differences(chosen, rival, unit, digits, ahead)) else ""
    if ahead:
        return f"{text}. It was not chosen because {_passed_over(chosen, rival, prefill)}"
    tie = needed_to_tie(rival)
    return f"{text}. It needed {tie} to tie" if tie else text


def _passed_over(chosen: Candidate, rival: Candidate, prefill: str) -> str:
    """Return why an endpoint with a higher rating was not chosen."""
    if rival.endpoint == prefill:
        return "it computes the prompt"
    if rival.removed_by:
        return "it was not open"
    if chosen.free_cache - rival.free_cache > AS_FREE and abs(rival.behind or 0.0) <= _NEAR * abs(rival.total or 0.0):
        free = f"{chosen.free_cache:.0%} against {rival.free_cache:.0%}"
        return f"they are nearly equal, and prompts sent to {chosen.endpoint} leave more of its cache free ({free})"
    return "the policy chose at random, or to keep a latency objective"


def _differences(chosen: Candidate, rival: Candidate, unit: str, digits: int, ahead: bool) -> str:
    """Return the differences by term, as they change the rival's cost or score (`loading +10.0`). Terms that agree with
    the choice come first."""
    gains = _largest({name: value - rival.terms.get(name, 0.0) for name, value in chosen.terms.items()}, digits)
    sign = -1.0 if unit == "points" else 1.0
    agree = [f"{name} {signed(sign * gain, digits)}" for name, gain in gains if (gain < 0) is ahead]
    differ = [f"{name} {signed(sign * gain, digits)}" for name, gain in gains if (gain < 0) is not ahead]
    if agree and differ:
        differ[0] = f"{'but' if unit == 'points' or ahead else 'less'} {differ[0]}"
    return ", ".join(agree + differ)


def signed(value: float, digits: int) -> str:
    return f"{value:+,.{digits}f}".replace("-", "\N{MINUS SIGN}")


def needed_to_tie(candidate: Candidate) -> str:
    """Return what the endpoint would have needed to tie, in words; empty if neither of these would have been enough."""
    ways = []
    if candidate.more_cached_tokens:
        ways.append(f"{candidate.more_cached_tokens:,} more cached tokens")
    if candidate.fewer_queued_tokens:
        ways.append(f"{candidate.fewer_queued_tokens:,.0f} fewer queued tokens")
    return " or ".join(ways)


_KEPT_BY = {
    "room": "no open endpoint had memory for its prompt",
    "unable": "no open endpoint could serve it",
}


def why_waited(waited: Waited) -> list[str]:
    """Return the reasons of the wait in words."""
    reasons = []
    if waited.closed_ms > 0.0:
        reasons.append(f"{waited.closed_ms:,.1f} ms because no endpoint was open")
    if waited.kept_ms > 0.0:
        kept = _KEPT_BY.get(waited.kept_by, "other requests went before it")
        reasons.append(f"{waited.kept_ms:,.1f} ms because {kept}")
    lines = [
        f"it waited {' and '.join(reasons)}" if reasons else "it waited",
        f"other requests sent meanwhile: {waited.sent}",
    ]
    if waited.compared:
        lines.append(
            f"it was compared with {waited.compared} waiting requests; {waited.passed} of them were ahead of it"
        )
    return lines


def why_split(split: SplitCosts, endpoint: str) -> str:
    """Return in words who computed the prompt, with the costs of both ways."""
    alone, pair = ("infinite" if ms is None else f"{ms:,.1f} ms" for ms in (split.alone_ms, split.pair_ms))
    if split.taken:
        text = f"{split.prefill} computes the prompt and {endpoint} decodes: {pair} together, {alone} at one endpoint"
    else:
        text = f"it was not split: {alone} at one endpoint, {pair} if {split.prefill} computed the prompt"
    return text + ("; only this way was expected to keep the latency objective" if split.by_objective else "")


def _largest(gains: dict[str, float], digits: int) -> list[tuple[str, float]]:
    """The differences that are not shown as 0, the largest first."""
    shown = ((name, gain) for name, gain in gains.items() if abs(gain) >= 0.5 * 10**-digits)
    return sorted(shown, key=lambda gain_of: -abs(gain_of[1]))


#: Steps of a bisection: enough to find the token in a prompt of 100,000 tokens.
_HALVINGS = 18
#: Candidates whose break-even is searched one at a time, if the score of an endpoint depends on those of others.
_ONE_BY_ONE = 12
#: Rows of the table's columns that shrink with a shorter queue.
_QUEUE = [
    FLOATS.index(name) for name in ("queue", "waiting", "pending", "pending_tokens", "queued_tokens", "queued_ms")
]


def asked_again(policy: Policy, request: Request, trace: Trace) -> tuple[str, Trace]:
    """Return (endpoint, trace) of a fresh policy's decision from the same numbers. Raise `ValueError` without a
    snapshot."""
    view = restored(trace)
    assert trace.snapshot is not None
    pick = interruptible(policy.choose, request, view, Context(trace.snapshot.at, Random(0)))
    new_trace = pick.trace or Trace(endpoints=view.table.ids)
    endpoint = view.table.endpoints[pick.slot] if isinstance(pick, Picked) else None
    return (endpoint.id if endpoint else ""), new_trace


def restored(trace: Trace) -> Restored:
    """Return the fleet as the decision saw it. Raise `ValueError` without a snapshot."""
    if trace.snapshot is None:
        raise ValueError("the numbers of this decision were not kept")
    return Restored(trace.snapshot, trace.held, trace.loading)


def explain(make: Callable[[], Policy], request: Request, trace: Trace, endpoint: str) -> Explanation:
    """Return the explanation of a decision. `make` returns a fresh policy each time. Raise `ValueError` without a
    snapshot."""
    policy = make()
    view = restored(trace)
    totals = _column(trace.total, len(trace.endpoints))
    terms, unit = terms_of(policy, request, view, trace)
    chosen = trace.endpoints.index(endpoint) if endpoint in trace.endpoints else -1
    limits, reproduced = None, True
    if trace.waited is None or isinstance(policy, Explainable):  # otherwise the cost kernel chose instead of the policy
        _, repeated = asked_again(make(), request, trace)
        rated = rating(trace)
        here = np.isfinite(rated) if trace.waited is not None else slice(None)
        reproduced = bool(np.allclose(rated[here], rating(repeated)[here], rtol=1e-9, atol=1e-9, equal_nan=True))
        if chosen >= 0 and reproduced:
            limits = _Limits(make, request, trace, rated, chosen)
    failed, finite = policy.name in dict(trace.failed), totals[np.isfinite(totals)]
    unrated = failed and len(np.unique(finite)) == 1
    costless = "" if unrated else "NaN or infinite cost" if failed else "infinite cost"
    candidates = _candidates(view, request, trace, totals, terms, chosen, limits, costless)
    split = trace.split
    reasons = [] if split is None else [why_split(split, endpoint)]
    if split is not None and split.taken and _alone_prefills(split, view, candidates):
        reasons.append(f"{split.prefill} was the only endpoint that could compute the prompt for others")
    reasons += [f"{name} failed: {error}" for name, error in trace.failed]
    if unrated and len(finite) > 1:  # all ratings are equal, so they are no reasons
        reasons.append(f"{endpoint} was drawn at random, because nothing rated the endpoints")
    else:
        reasons += why(candidates, unit, split.prefill if split is not None and split.taken else "")
    reasons += [] if trace.waited is None else why_waited(trace.waited)
    return Explanation(
        policy=policy.name,
        unit=unit,
        endpoint=endpoint,
        reproduced=reproduced,
        candidates=candidates,
        why=tuple(reasons),
        waited=trace.waited,
        split=split,
    )


def _alone_prefills(split: SplitCosts, view: Restored, candidates: Sequence[Candidate]) -> bool:
    """Whether no other endpoint could have computed the prompt. The decoder does not count."""
    prefills = {endpoint.id for _, endpoint in view.table.slots() if endpoint.role in STAGES["prefill"]}
    unchosen = (row for row in candidates if not row.chosen and row.endpoint != split.prefill)
    return not any(row.part or (row.endpoint in prefills and not row.removed_by) for row in unchosen)


def rating(trace: Trace) -> FloatColumn:
    """Return the ratings of the policy itself, without what late binding added."""
    said = next((column for name, _, column in trace.scorers if name == "cost" and trace.waited is not None), None)
    return _column(trace.total if said is None else said, len(trace.endpoints))


def terms_of(policy: Policy, request: Request, view: Restored, trace: Trace) -> tuple[list[tuple[str, Any]], str]:
    """Return ([(name, column)], unit): the terms that add up to the totals."""
    late, own = trace.waited is not None, "points"
    if isinstance(policy, CostPolicy):
        own = "ms" if policy.milliseconds else "cost"
    if not isinstance(policy, Explainable) and (own == "ms" or not late):
        return [(name, weight * np.asarray(column)) for name, weight, column in trace.scorers], own
    assert trace.snapshot is not None
    cycle = Cycle(Context(trace.snapshot.at, Random(0)))
    if isinstance(policy, Explainable):
        costs = interruptible(policy.terms, request, view, cycle)
    else:
        costs = parts(
            estimate(request, view, cycle), policy.weights if isinstance(policy, CostPolicy) else Weights(), view
        )
    terms = [(name, -np.broadcast_to(column, len(view.table))) for name, column in costs]
    if late:
        terms += [(name, weight * np.asarray(column)) for name, weight, column in trace.scorers if name != "cost"]
        left = np.nan_to_num(_column(trace.total, len(view.table)), neginf=0.0) - sum(column for _, column in terms)
        if not isinstance(policy, Explainable) and np.abs(left[np.isfinite(trace.total)]).max(initial=0.0) > 1e-6:
            terms.append(("order", left))  # such a policy only ranks: it sets the order of the kernel's costs
    return terms, own if own == "cost" and not late else "ms"


def _column(values: Any, length: int) -> FloatColumn:
    return np.full(length, np.nan) if values is None else np.asarray(values, dtype=np.float64)


def _candidates(
    view: Restored,
    request: Request,
    trace: Trace,
    totals: FloatColumn,
    terms: Sequence[tuple[str, FloatColumn]],
    chosen: int,
    limits: "_Limits | None",
    costless: str,
) -> tuple[Candidate, ...]:
    table = view.table
    held = np.zeros(len(table)) if view.held is None else view.held
    rated = [slot for slot in range(len(table)) if table.endpoints[slot] is not None]
    order = sorted(rated, key=lambda slot: (slot != chosen, -_rank(float(totals[slot])), slot))
    removed_by = {
        slot: (
            *(name for name, mask in trace.filters if not mask[slot]),
            *([costless] if costless and -np.inf < totals[slot] < -_INFINITE else []),
        )
        for slot in rated
    }
    behind = totals[chosen] - totals if chosen >= 0 else np.full(len(table), np.nan)
    cached, queued = limits.find(order) if limits else ({}, {})
    return tuple(
        Candidate(
            endpoint=trace.endpoints[slot],
            chosen=slot == chosen,
            removed_by=removed_by[slot],
            part=_part(trace.split, table.endpoints[slot], removed_by[slot]),
            hung=level_name(table.suspicion[slot]) if table.suspicion[slot] else "",
            cached_tokens=int(held[slot] * request.prompt_tokens),
            queued_requests=float(table.queue[slot]),
            queued_tokens=float(table.queued_tokens[slot]),
            running_requests=float(table.active[slot]),
            kv_usage=float(table.kv[slot]),
            free_cache=float(table.free_cache[slot]),
            total=_known(totals[slot]),
            behind=None if slot == chosen else _known(behind[slot]),
            terms={name: float(column[slot]) for name, column in terms if abs(column[slot]) < _INFINITE},
            more_cached_tokens=cached.get(slot),
            fewer_queued_tokens=queued.get(slot),
        )
        for slot in order
    )


def _part(split: SplitCosts | None, endpoint: Endpoint | None, removed_by: tuple[str, ...]) -> str:
    if split is None or endpoint is None or not endpoint.only_prefills or len(removed_by) > 1:
        return ""
    return "computes the prompt" if split.taken and split.prefill == endpoint.id else "could compute the prompt"


class _Limits:
    """Finds what each endpoint would have needed to tie with the chosen one."""

    def __init__(
        self, make: Callable[[], Policy], request: Request, trace: Trace, totals: FloatColumn, chosen: int
    ) -> None:
        self._make = make
        self._request = request
        self._trace = trace
        self._goal = totals[chosen]
        self._chosen = chosen
        self._behind = np.nan_to_num(totals, nan=-np.inf)
        #: One fleet for all trials, and its numbers at the decision.
        self._view = restored(trace)
        self._before = self._view.table.floats.copy()
        policy = make()
        #: Whether endpoints are searched one at a time, because the score of one may depend on those of others. Such a
        #: policy may also depend on what it was asked before, so each trial gets a fresh one.
        self._alone = not isinstance(policy, Explainable)
        self._policy = None if self._alone else policy

    def find(self, order: Sequence[int]) -> tuple[dict[int, int], dict[int, float]]:
        """Return (more cached tokens, fewer queued tokens) by slot, without endpoints that cannot tie."""
        slots = [slot for slot in order if slot != self._chosen and -np.inf < self._behind[slot] < self._goal]
        groups = [[slot] for slot in slots[:_ONE_BY_ONE]] if self._alone else [slots] if slots else []
        cached: dict[int, int] = {}
        queued: dict[int, float] = {}
        tokens = self._request.prompt_tokens
        trace = self._trace
        held = np.zeros(len(self._behind)) if trace.held is None else np.asarray(trace.held)
        queued_tokens = self._before[FLOATS.index("queued_tokens")]
        for group in groups:
            for slot, share in self._search(group, held, 1.0 - held, 0.0):
                cached[slot] = int(np.ceil(share * (1.0 - held[slot]) * tokens))
            for slot, share in self._search(group, held, 0.0 * held, 1.0):
                queued[slot] = float(np.ceil(share * queued_tokens[slot]))
        return cached, queued

    def _search(
        self, group: Sequence[int], held: FloatColumn, more: FloatColumn, less: float
    ) -> list[tuple[int, float]]:
        """Return [(slot, x)]: the least x in 0..1 with which the slot ties if it has `held + x·more` cached and
        1 - x·`less` of its queue. Slots that do not tie with x = 1 are left out."""
        mask = np.zeros(len(self._behind), dtype=np.bool_)
        mask[list(group)] = True
        low, high = np.zeros(len(mask)), np.where(mask, 1.0, 0.0)
        ties = self._ties(held + high * more, less * high) & mask
        for _ in range(_HALVINGS):
            middle = 0.5 * (low + high)
            enough = self._ties(held + middle * more, less * middle)
            high, low = np.where(mask & enough, middle, high), np.where(mask & ~enough, middle, low)
        return [(slot, float(high[slot])) for slot in group if ties[slot]]

    def _ties(self, held: FloatColumn, less: FloatColumn) -> BoolColumn:
        view, table = self._view, self._view.table
        view.held = held if held.any() else None
        table.floats[:] = self._before
        table.floats[_QUEUE] *= 1.0 - less
        table.rewritten()
        assert self._trace.snapshot is not None
        context = Context(self._trace.snapshot.at, Random(0))
        policy = self._make() if self._policy is None else self._policy
        trace = interruptible(policy.choose, self._request, view, context).trace
        totals = _column(None, len(held)) if trace is None else rating(trace)
        ties: BoolColumn = np.nan_to_num(totals, nan=-np.inf) >= self._goal
        return ties


def _known(value: float) -> float | None:
    return float(value) if abs(value) < _INFINITE else None


def _rank(value: float) -> float:
    return float(value) if isfinite(value) else -np.inf


def of_answer(name: str) -> str:
    """The client's request id in the id of an answer (`chatcmpl-ID`); empty = it is none."""
    return next((name.removeprefix(prefix) for prefix in _ANSWERS if name.startswith(prefix)), "")
