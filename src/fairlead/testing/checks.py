"""Does a plugin keep its contract? Each check drives it through pools that occur, and raises `AssertionError` if not.

    from fairlead.testing import check_scorer
    def test_contract() -> None:
        check_scorer(MyScorer(MyScorer.Params(), name="mine"))

What is tried: pools of one, some and a hundred endpoints, with holes where endpoints left, before the first scrape,
idle, busy and full; requests with and without model, session, prompt, SLO. The same seed must give the same answer.
"""

from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any

import numpy as np

from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.schedule.cycle import Context, Cycle
from fairlead.schedule.framework import CANDIDATES, Filter, Picker, Policy, Scorer
from fairlead.testing.builders import busy, endpoint, fleet, holds, request

_COLUMNS = ("waiting", "running", "kv", "queue", "active", "inflight", "pending_tokens", "alive")


def check_filter(plugin: Filter) -> None:
    """`keep` gives `None` or a mask of one bool per slot, and changes nothing."""
    _named(plugin)
    assert isinstance(plugin.hard, bool), f"hard is {plugin.hard!r}, expected True or False"
    for case, known, asked in _cases():
        mask = _twice(case, known, partial(plugin.keep, asked, known))
        if mask is not None:
            _column(case, mask, known, np.bool_)


def check_scorer(plugin: Scorer) -> None:
    """`score` gives `None` or one number from 0 to 1 per slot (slots of departed endpoints included)."""
    _named(plugin)
    for case, known, asked in _cases():
        scores = _twice(case, known, partial(plugin.score, asked, known))
        if scores is None:
            continue
        _column(case, scores, known, np.float64)
        living = scores[known.table.alive]
        assert not np.isnan(living).any(), f"{case}: a score is NaN"
        assert ((living >= 0) & (living <= 1)).all(), f"{case}: scores from {living.min()} to {living.max()}"


def check_picker(plugin: Picker) -> None:
    """`pick` gives a slot whose total is finite."""
    _named(plugin)
    for case, known, asked in _cases():
        for totals in _totals(known):
            rng = Random(1)
            slot = plugin.pick(asked, known, totals.copy(), Cycle(Context(1.0, rng)))
            assert 0 <= int(slot) < len(totals), f"{case}: picked slot {slot} of {len(totals)}"
            assert totals[slot] > -np.inf, f"{case}: picked slot {slot}, which was filtered out"


def check_policy(policy: Policy) -> None:
    """`choose` gives one answer per request, in order; a chosen slot has an endpoint, a refusal a reason."""
    _named(policy)
    for case, known, asked in [*_cases(), ("nobody there", _empty(), request("hello"))]:
        requests = [asked, request("another prompt")]
        picks = policy.choose(requests, known, Context(1.0, Random(1)))
        assert len(picks) == len(requests), f"{case}: {len(picks)} answers for {len(requests)} requests"
        for pick in picks:
            if pick.slot < 0:
                assert pick.reason, f"{case}: a refusal without a reason"
            else:
                assert pick.slot < len(known.table), f"{case}: slot {pick.slot} of {len(known.table)}"
                assert known.table.endpoints[pick.slot] is not None, f"{case}: slot {pick.slot} has no endpoint"


def _named(plugin: Any) -> None:
    assert isinstance(plugin.name, str) and plugin.name, f"name is {plugin.name!r}, expected a string"


def _twice(case: str, known: Fleet, ask: Callable[[Cycle], Any]) -> Any:
    """The answer, after proving that asking again gives the same and changes no column."""
    before = {name: getattr(known.table, name).copy() for name in _COLUMNS}
    first, second = ask(_cycle(known)), ask(_cycle(known))
    same = (first is None) == (second is None) and (first is None or np.array_equal(first, second, equal_nan=True))
    assert same, f"{case}: the same question with the same seed was answered differently"
    for name, column in before.items():
        assert np.array_equal(column, getattr(known.table, name)), f"{case}: the plugin changed table.{name}"
    return first


def _cycle(known: Fleet) -> Cycle:
    cycle = Cycle(Context(1.0, Random(1)))
    candidates = None if known.table.count == len(known.table) else known.table.alive
    cycle.once(CANDIDATES, lambda: candidates)
    return cycle


def _column(case: str, column: Any, known: Fleet, dtype: type) -> None:
    assert isinstance(column, np.ndarray), f"{case}: {type(column).__name__} is no numpy array"
    expected = (len(known.table),)
    assert column.shape == expected, f"{case}: shape {column.shape}, expected {expected}"
    assert column.dtype == dtype, f"{case}: dtype {column.dtype}, expected {np.dtype(dtype)}"


def _totals(known: Fleet) -> Iterator[Any]:
    """Totals as a profile makes them: -inf for what is filtered out, at least one finite."""
    slots = np.flatnonzero(known.table.alive)
    for keep in (slots, slots[:1], slots[-1:]):
        for value in (0.0, 1.0, -3.0):
            totals = np.full(len(known.table), -np.inf)
            totals[keep] = value + np.arange(len(keep)) * (value != 0)
            yield totals


def _empty() -> Fleet:
    return Fleet()


def _pools() -> list[tuple[str, Fleet]]:
    full = {"waiting": 80, "running": 256, "kv_usage": 1.0}
    hundred = fleet(*(f"e{i}" for i in range(100)), samples={f"e{i}": {"waiting": i, "running": i} for i in range(90)})
    holes = fleet("e0", "e1", "e2", "e3", samples={"e1": full})
    holes.down("e0")
    holes.down("e2")
    loaded = fleet(samples={"e0": {"waiting": 2, "running": 8, "kv_usage": 0.4, "adapters": frozenset({"a"})}})
    busy(loaded, "e1", [request("x" * 40_000) for _ in range(5)])
    labelled = fleet(endpoint("e0", labels={"model-id": "m", "llm-d.ai/role": "decode"}), endpoint("e1"))
    return [
        ("one endpoint, never scraped", fleet("e0")),
        ("three idle endpoints", fleet(samples={name: {"waiting": 0, "running": 0} for name in ("e0", "e1", "e2")})),
        ("some load", loaded),
        ("a full pool", fleet(samples=dict.fromkeys(("e0", "e1", "e2"), full))),
        ("slots without endpoints", holes),
        ("labels", labelled),
        ("a hundred endpoints", hundred),
    ]


def _cases() -> list[tuple[str, Fleet, Request]]:
    known = request("a prompt that some endpoint holds " * 50, model="m", session="s", slo_ttft_ms=200.0)
    asked = [("a plain request", request()), ("everything set", known), ("an adapter", request("hi", model="a"))]
    cases = []
    for pool, endpoints in _pools():
        slot = endpoints.table.slots()[0][0]
        holds(endpoints, endpoints.table.ids[slot], known)
        cases += [(f"{pool}, {name}", endpoints, one) for name, one in asked]
    return cases


__all__ = ["check_filter", "check_picker", "check_policy", "check_scorer"]
