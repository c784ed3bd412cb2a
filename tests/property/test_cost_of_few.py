"""The cost model over few endpoints gives the numbers, the picks and the draws of the one over columns."""

from random import Random
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead.fleet.columns import BoolColumn, FloatColumn
from fairlead.fleet.fleet import Fleet
from fairlead.fleet.table import FLOATS
from fairlead.model.endpoint import Endpoint
from fairlead.model.request import Request
from fairlead.plugins.policies.cost_model import CostModel, CostModelParams
from fairlead.plugins.policies.cost_of_few import FEW
from fairlead.schedule.cycle import Context, Cycle

NOW = 1000.0
#: Highest values of the columns that the model reads.
RANGES = {
    "kv": 1.0, "queue": 300.0, "active": 300.0, "queued_tokens": 2e5, "queued_ms": 9e4, "kv_tokens": 1e6,
}  # fmt: skip


class Known(Fleet):
    """`held`: what `match` answers."""

    held: FloatColumn | None = None

    def match(self, request: Request) -> FloatColumn | None:
        return None if self.held is None else self.held.copy()


class Some:
    """Keeps the slots of a mask."""

    name, hard = "some", False

    def __init__(self, mask: BoolColumn) -> None:
        self._mask = mask

    def keep(self, request: Request, fleet: Fleet, cycle: Cycle) -> BoolColumn | None:
        return self._mask


class ByColumns(CostModel):
    """Does as if there were many endpoints."""

    def cost(self, request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn:
        return super().cost(request, fleet, cycle)


def column(rng: Random, slots: int, most: float) -> list[float]:
    """Nothing, the same everywhere, or numbers of all sizes."""
    kind = rng.randrange(4)
    if kind < 2:
        return [kind * most * rng.random()] * slots
    return [0.0 if rng.random() < 0.3 else most * rng.random() ** (1 + 8 * (kind == 3)) for _ in range(slots)]


def world(rng: Random, slots: int) -> Known:
    fleet = Known()
    for slot in range(slots):
        fleet.up(Endpoint(f"e{slot}", f"10.0.0.{slot}:8000"))
    table, predictor = fleet.table, fleet.predictor
    for name, most in RANGES.items():
        table.floats[FLOATS.index(name)] = column(rng, slots, most)
    latest = rng.choice((0.0, 0.0, 500.0))
    table.prefill_since_ms[:] = [1e3 * NOW + latest - 900.0 * rng.random() for _ in range(slots)]
    table.per_capacity[:] = [rng.choice((0.0, 1e-6, 1e-5, 1e-4)) for _ in range(slots)]
    predictor.kappa[:] = [rng.uniform(0.5, 4.0) for _ in range(slots)]
    if rng.random() < 0.7:
        predictor.rates.prefill[:] = [rng.uniform(0.01, 9.0) for _ in range(slots)]
        predictor.rates.step[:] = [rng.uniform(0.01, 9.0) for _ in range(slots)]
    predictor.hold_ms, predictor.answer_steps = 2e4 * rng.random(), 1e3 * rng.random()
    if rng.random() < 0.6:
        fleet.held = np.array([rng.choice((0.0, 0.0, 1.0, rng.random())) for _ in range(slots)])
    if slots > 1 and rng.random() < 0.2:
        fleet.down("e0")
    return fleet


def asked(rng: Random) -> Request:
    tokens = rng.choice((0, 1, 250, 8192, rng.randrange(200_000)))
    slo: dict[str, Any] = {"slo_ttft_ms": rng.uniform(1.0, 1e4)} if rng.random() < 0.1 else {}
    return Request(id=1, arrived=NOW, prompt_tokens=tokens, priority=rng.choice((0, -1)), **slo)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, FEW))
def test_over_few_endpoints_it_is_the_same_to_the_last_bit(seed: int, slots: int) -> None:
    rng = Random(seed)
    fleet, request = world(rng, slots), asked(rng)
    weights = [rng.choice((0.0, 0.1, 1.0, 7.3)) for _ in range(3)]
    params = CostModelParams(
        interference=weights[0], decode=weights[1], memory=weights[2], near_tie=rng.choice((0.0, 0.02, 0.5))
    )
    filters = [Some(np.array([rng.random() < 0.6 for _ in range(slots)]))] if rng.random() < 0.3 else []
    draws = Random(seed), Random(seed)
    few, many = (
        policy(params, filters=filters).choose((request,), fleet, Context(NOW, chance))[0]
        for policy, chance in zip((CostModel, ByColumns), draws, strict=True)
    )
    assert draws[0].getstate() == draws[1].getstate()
    assert (few.slot, few.overloaded) == (many.slot, many.overloaded)
    assert (few.hit_share, few.best_share) == (many.hit_share, many.best_share)
    assert few.trace is not None and many.trace is not None
    assert few.trace.outcome == many.trace.outcome
    for mine, theirs in ((few.trace.total, many.trace.total), (few.trace.candidates, many.trace.candidates)):
        assert (mine is None) == (theirs is None)
        assert mine is None or np.asarray(mine).tobytes() == np.asarray(theirs).tobytes()
    mine, theirs = ([(*one[:2], np.asarray(one[2]).tobytes()) for one in t.scorers] for t in (few.trace, many.trace))
    assert mine == theirs


def test_few_endpoints_are_not_looked_at_through_columns() -> None:
    fleet = world(Random(1), FEW)
    pick = CostModel().choose((Request(id=1, arrived=NOW, prompt_tokens=100),), fleet, Context(NOW, Random(1)))[0]
    assert pick.trace is not None and isinstance(pick.trace.total, list)
    fleet.up(Endpoint("one-more", "10.0.1.1:8000"))
    pick = CostModel().choose((Request(id=2, arrived=NOW, prompt_tokens=100),), fleet, Context(NOW, Random(1)))[0]
    assert pick.trace is not None and not isinstance(pick.trace.total, list)
