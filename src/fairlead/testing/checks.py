"""Checks of a plugin's contract. Each check runs the plugin on realistic pools and raises `AssertionError` on a breach.

    from fairlead.testing import check_scorer
    def test_contract() -> None:
        check_scorer(MyScorer(MyScorer.Params(), name="mine"))

The cases: pools of one, some and a hundred endpoints, with empty slots of departed endpoints, before the first scrape,
idle, busy and full; requests with and without model, session, prompt and SLO. Filters and scorers are called twice: the
same seed must give the same answer."""

import reprlib
from collections.abc import Callable, Collection, Iterator
from functools import partial
from random import Random
from typing import Any

import numpy as np

from fairlead.core.errors import PLUGIN_FAILURES
from fairlead.core.fleet import Fleet
from fairlead.core.policy import (
    CANDIDATES,
    Answer,
    Context,
    Cycle,
    Filter,
    Picked,
    Picker,
    Policy,
    Refused,
    Scorer,
    Stage,
    choose_or_raise,
    notified,
)
from fairlead.core.request import Request
from fairlead.core.table import FLOATS
from fairlead.testing.builders import busy, endpoint, fleet, holds, request


def check_filter(plugin: Filter) -> None:
    """Check that `keep` returns `None` or a mask of one bool per slot, and changes nothing."""
    _named(plugin)
    assert isinstance(plugin.stage, Stage), f"stage is {plugin.stage!r}, expected a Stage"
    for case, known, asked in _cases():
        _twice(case, known, partial(plugin.keep, asked, known), True)


def check_scorer(plugin: Scorer) -> None:
    """Check that `score` returns `None`, or one float64 per slot, including slots of departed endpoints. The scores of
    present endpoints must be from 0 to 1."""
    _named(plugin)
    for case, known, asked in _cases():
        scores = _twice(case, known, partial(plugin.score, asked, known), 1.0)
        if scores is None:
            continue
        living = scores[known.table.alive]
        assert not np.isnan(living).any(), f"{case}: a score is NaN"
        span = f"scores from {living.min()} to {living.max()}, expected 0 to 1"
        assert ((living >= 0) & (living <= 1)).all(), f"{case}: {span}"


def check_picker(plugin: Picker) -> None:
    """Check that `pick` returns a slot that was not filtered out, that is, whose total is not -inf."""
    _named(plugin)
    for case, known, asked in _cases():
        for totals in _totals(known):
            rng = Random(1)
            slot = plugin.pick(asked, known, totals.copy(), Cycle(Context(1.0, rng)))
            is_slot = isinstance(slot, int | np.integer)
            assert is_slot, f"{case}: pick returned {_shown(slot)}, expected a slot: an int, like int(totals.argmax())"
            assert 0 <= slot < len(totals), f"{case}: picked slot {slot} of {len(totals)}"
            assert totals[slot] > -np.inf, f"{case}: picked slot {slot}, which was filtered out"


def check_policy(policy: Policy) -> None:
    """Check that `choose` returns one valid answer: a picked slot has an endpoint, a refusal has a reason."""
    _named(policy)
    for case, known, asked in [*_cases(), ("nobody there", Fleet(), request("hello"))]:
        try:
            pick = notified(choose_or_raise(policy, asked, known, Context(1.0, Random(1))), asked, known)
        except PLUGIN_FAILURES as error:
            raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
        assert isinstance(pick, Picked) or pick.reason, f"{case}: a refusal without a reason"


def _named(plugin: Any) -> None:
    assert isinstance(plugin.name, str) and plugin.name, f"name is {plugin.name!r}, expected a string"


def _twice(case: str, known: Fleet, ask: Callable[[Cycle], Any], value: Any) -> Any:
    """The answer, after checking that it is `None` or a column of values like `value`, that a second call gives the
    same answer, and that no column changed."""
    before, alive = known.table.floats.copy(), known.table.alive.copy()
    first, second = ask(_cycle(known)), ask(_cycle(known))
    for answer in (first, second):
        _column(case, answer, np.full(len(known.table), value))
    same = (first is None) == (second is None) and (first is None or np.array_equal(first, second, equal_nan=True))
    assert same, f"{case}: the same question with the same seed was answered differently"
    assert np.array_equal(alive, known.table.alive), f"{case}: the plugin changed table.alive"
    for name, old, new in zip(FLOATS, before, known.table.floats, strict=True):
        assert np.array_equal(old, new, equal_nan=True), f"{case}: the plugin changed table.{name}"
    return first


def _cycle(known: Fleet) -> Cycle:
    cycle = Cycle(Context(1.0, Random(1)))
    candidates = None if known.table.count == len(known.table) else known.table.alive
    cycle.once(CANDIDATES, lambda: candidates)
    return cycle


def _column(case: str, answer: Any, like: Any) -> None:
    fits = isinstance(answer, np.ndarray) and (answer.shape, answer.dtype) == (like.shape, like.dtype)
    assert answer is None or fits, (
        f"{case}: returned {_shown(answer)}, expected None or a numpy array of {like.dtype} with shape {like.shape}, "
        f"one for each slot: for example np.full(len(fleet.table), {like[0].item()})"
    )


def _shown(answer: Any) -> str:
    if isinstance(answer, np.ndarray):
        return f"an array of {answer.dtype} with shape {answer.shape}"
    return "None" if answer is None else f"{reprlib.repr(answer)} ({type(answer).__name__})"


def _totals(known: Fleet) -> Iterator[Any]:
    """Totals as a profile makes them: -inf for endpoints that are filtered out, at least one finite value."""
    slots = np.flatnonzero(known.table.alive)
    for keep in (slots, slots[:1], slots[-1:]):
        for value in (0.0, 1.0, -3.0):
            totals = np.full(len(known.table), -np.inf)
            totals[keep] = value + np.arange(len(keep)) * (value != 0)
            yield totals


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
        cases += [(f"{pool}, {name}", endpoints, prompt) for name, prompt in asked]
    return cases


def choose(policy: Policy, request: Request, fleet: Fleet, *, now: float = 0.0, seed: int = 0) -> Answer:
    """Make one decision of `policy` without charging a lease; the answer has the trace. `now`: clock seconds."""
    return notified(policy.choose(request, fleet, Context(now, Random(seed))), request, fleet)


def assert_routed(
    policy: Policy, request: Request, fleet: Fleet, to: str | Collection[str], *, seeds: int = 20, now: float = 0.0
) -> None:
    """Assert that with every seed the request goes to endpoint `to`. If `to` has several, assert that it goes to one of
    them with every seed, and to each of them with some seed."""
    allowed = {to} if isinstance(to, str) else set(to)
    reached = set()
    for seed in range(seeds if len(allowed) < 2 else max(seeds, 20 * len(allowed))):
        pick = choose(policy, request, fleet, now=now, seed=seed)
        endpoint = fleet.table.ids[pick.slot] if isinstance(pick, Picked) else ""
        went = f"nobody ({pick.reason})" if isinstance(pick, Refused) else endpoint
        assert endpoint in allowed, f"went to {went}, not to {_list(allowed)}"
        reached.add(endpoint)
    assert reached == allowed, f"never went to {_list(allowed - reached)}"


def assert_refused(policy: Policy, request: Request, fleet: Fleet, reason: str = "") -> None:
    """Assert that the request is refused, with this `reason` unless it is empty."""
    pick = choose(policy, request, fleet)
    if isinstance(pick, Picked):
        raise AssertionError(f"went to {fleet.table.ids[pick.slot]}")
    assert not reason or pick.reason == reason, f"refused as {pick.reason!r}, not {reason!r}"


def _list(names: Collection[str]) -> str:
    return " or ".join(sorted(names))
