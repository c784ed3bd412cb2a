"""Why this endpoint and not that one: a decision made again from the numbers that it was made from.

Rules
* The snapshot is what the policy saw. A policy without a memory of its own answers the same on it, so its terms add up
  to the recorded totals to the last digit; where they do not (`reproduced` is False: it remembers, or draws lots), the
  recorded totals stand and the terms are those of the repetition.
* Everything is said so that more is better (`total`); a policy that reckons in costs has negative totals, in
  milliseconds. `terms` have the sign of the total.
* What it would have taken is found by trying: the endpoint's own numbers are changed until it ties with the chosen one.
* The policy that is asked must be a fresh one: asking may change it.
"""

from collections.abc import Callable, Sequence
from math import isfinite
from random import Random
from typing import Any, cast

import numpy as np

from fairlead.fleet.columns import BoolColumn, FloatColumn
from fairlead.fleet.snapshot import Restored
from fairlead.model.decision import Trace
from fairlead.model.request import Request
from fairlead.schedule.cycle import Context, Cycle
from fairlead.schedule.explain_words import why
from fairlead.schedule.explained import Candidate, Explanation
from fairlead.schedule.framework import Policy

#: Halvings of a search: a prompt of 100,000 tokens to within a token.
_HALVINGS = 18
#: Candidates whose break-even is looked for one by one, where scores depend on the others'.
_ONE_BY_ONE = 12
#: Columns of the table that a shorter queue makes smaller.
_QUEUE = ("queue", "waiting", "pending", "pending_tokens", "queued_tokens", "queued_ms")


def again(policy: Policy, request: Request, trace: Trace, chance: int = 0) -> tuple[str, Trace]:
    """(endpoint, trace): what a fresh policy answers on the same numbers. Raises `ValueError` without a snapshot."""
    view = restored(trace)
    assert trace.snapshot is not None
    pick = policy.choose((request,), view, Context(trace.snapshot.at, Random(chance)))[0]
    found = pick.trace or Trace(endpoints=view.table.ids)
    endpoint = view.table.endpoints[pick.slot] if pick.slot >= 0 else None
    return (endpoint.id if endpoint else ""), found


def restored(trace: Trace) -> Restored:
    """The fleet as the decision saw it. Raises `ValueError` without a snapshot."""
    if trace.snapshot is None:
        raise ValueError("the numbers of this decision were not kept")
    return Restored(trace.snapshot, trace.held)


def explain(make: Callable[[], Policy], request: Request, trace: Trace, endpoint: str) -> Explanation:
    """`make` gives a fresh policy each time. Raises `ValueError` without a snapshot."""
    _, repeated = again(make(), request, trace)
    policy = make()
    view = restored(trace)
    totals = _column(trace.total, len(trace.endpoints))
    mine = _column(repeated.total, len(trace.endpoints))
    reproduced = bool(np.allclose(totals, mine, rtol=1e-9, atol=1e-9, equal_nan=True))
    terms, unit = terms_of(policy, request, view, trace)
    chosen = trace.endpoints.index(endpoint) if endpoint in trace.endpoints else -1
    limits = _Limits(make, request, trace, totals, chosen) if chosen >= 0 and reproduced else None
    candidates = _candidates(view, request, trace, totals, terms, chosen, limits)
    return Explanation(
        policy=policy.name,
        unit=unit,
        endpoint=endpoint,
        reproduced=reproduced,
        candidates=candidates,
        why=tuple(why(candidates, unit)),
    )


def terms_of(policy: Policy, request: Request, view: Restored, trace: Trace) -> tuple[list[tuple[str, Any]], str]:
    """([(name, column)], unit): what the totals are the sum of."""
    if hasattr(policy, "terms"):
        assert trace.snapshot is not None
        cycle = Cycle(Context(trace.snapshot.at, Random(0)))
        parts = cast(Any, policy).terms(request, view, cycle)
        return [(name, -np.broadcast_to(column, len(view.table))) for name, column in parts], "ms"
    return [(name, weight * np.asarray(column)) for name, weight, column in trace.scorers], "points"


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
) -> tuple[Candidate, ...]:
    table = view.table
    held = np.zeros(len(table)) if view.held is None else view.held
    rated = [slot for slot in range(len(table)) if table.endpoints[slot] is not None]
    order = sorted(rated, key=lambda slot: (slot != chosen, -_rank(float(totals[slot])), slot))
    behind = totals[chosen] - totals if chosen >= 0 else np.full(len(table), np.nan)
    cached, queued = limits.find(order) if limits else ({}, {})
    return tuple(
        Candidate(
            endpoint=trace.endpoints[slot],
            chosen=slot == chosen,
            removed_by=tuple(name for name, mask in trace.filters if not mask[slot]),
            cached_tokens=int(held[slot] * request.prompt_tokens),
            queued_requests=float(table.queue[slot]),
            queued_tokens=float(table.queued_tokens[slot]),
            running_requests=float(table.active[slot]),
            kv_usage=float(table.kv[slot]),
            total=_known(totals[slot]),
            behind=None if slot == chosen else _known(behind[slot]),
            terms={name: float(column[slot]) for name, column in terms},
            more_cached_tokens=cached.get(slot),
            fewer_queued_tokens=queued.get(slot),
        )
        for slot in order
    )


class _Limits:
    """Finds the numbers with which an endpoint would have tied with the chosen one."""

    def __init__(
        self, make: Callable[[], Policy], request: Request, trace: Trace, totals: FloatColumn, chosen: int
    ) -> None:
        self._make = make
        self._request = request
        self._trace = trace
        self._goal = totals[chosen]
        self._chosen = chosen
        self._behind = np.nan_to_num(totals, nan=-np.inf)
        #: One column at a time changes where scores of one endpoint depend on those of others.
        self._alone = not hasattr(make(), "terms")

    def find(self, order: Sequence[int]) -> tuple[dict[int, int], dict[int, float]]:
        """(more cached tokens, fewer queued tokens) by slot; who cannot tie is left out."""
        slots = [slot for slot in order if slot != self._chosen and -np.inf < self._behind[slot] < self._goal]
        groups = [[slot] for slot in slots[:_ONE_BY_ONE]] if self._alone else [slots] if slots else []
        cached: dict[int, int] = {}
        queued: dict[int, float] = {}
        tokens = self._request.prompt_tokens
        for group in groups:
            view = restored(self._trace)
            held = np.zeros(len(view.table)) if view.held is None else view.held
            for slot, share in self._search(group, held, 1.0 - held, 0.0):
                cached[slot] = int(np.ceil(share * (1.0 - held[slot]) * tokens))
            for slot, share in self._search(group, held, 0.0 * held, 1.0):
                queued[slot] = float(np.ceil(share * view.table.queued_tokens[slot]))
        return cached, queued

    def _search(
        self, group: Sequence[int], held: FloatColumn, more: FloatColumn, less: float
    ) -> list[tuple[int, float]]:
        """The least share x in 0..1 with which each ties when it holds `held + x·more` and has 1 - x·`less` of its
        queue; none if 1 is too little."""
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
        view = restored(self._trace)
        view.held = held if held.any() else None
        for name in _QUEUE:
            column = getattr(view.table, name)
            column *= 1.0 - less
        assert self._trace.snapshot is not None
        context = Context(self._trace.snapshot.at, Random(0))
        found = self._make().choose((self._request,), view, context)[0].trace
        totals = _column(found.total if found else None, len(held))
        ties: BoolColumn = np.nan_to_num(totals, nan=-np.inf) >= self._goal
        return ties


def _known(value: float) -> float | None:
    return float(value) if isfinite(value) else None


def _rank(value: float) -> float:
    return float(value) if isfinite(value) else -np.inf
