"""Policies on trial see what the decision saw, whatever happened since; what they do wrong is their verdict."""

import re
from random import Random
from typing import Any

import numpy as np
import pytest

from fairlead.core.endpoint import Sample
from fairlead.core.events import EndpointUp, Outcome, RemotePick, RequestArrived, ShadowsJudged
from fairlead.core.fleet import Fleet
from fairlead.core.instructions import JudgeShadows
from fairlead.core.policy import Picked
from fairlead.core.records import ShadowCase, ShadowRecord
from fairlead.core.scheduler import Pipeline
from fairlead.core.shadow import Bench, CaseTaker
from fairlead.core.tokens import TokenEstimator
from fairlead.gateway.driver import Driver
from fairlead.plugins.filters.ability import Role, RoleParams
from fairlead.plugins.params import NoParams
from fairlead.plugins.policies.by_load import LeastRequests
from fairlead.plugins.policies.cost_model import CostModel, CostModelParams
from fairlead.plugins.policies.prefill_decode import PrefillDecode, PrefillDecodeParams
from fairlead.plugins.scorers.lora import LoraAffinity
from fairlead.testing import SimClock, builders

EXACT = CostModelParams(near_tie=0.0)


class Rig:
    """A pipeline under virtual time, whose cases are collected."""

    def __init__(self, endpoints: int = 6, share: float = 1.0) -> None:
        self.clock = SimClock()
        self.fleet = builders.fleet(*(f"e{i}" for i in range(endpoints)))
        taker = CaseTaker(share, Random(2)) if share else None
        self.pipeline = Pipeline(self.clock, Random(1), self.fleet, CostModel(EXACT), TokenEstimator(), shadows=taker)
        self.cases: list[ShadowCase] = []
        self.told: list[ShadowRecord] = []
        handlers = {JudgeShadows: lambda judge: self.cases.append(judge.case), ShadowRecord: self.told.append}
        self.driver = Driver(self.pipeline, self.clock, self, handlers)
        self.endpoints: list[str] = []

    def on_decision(self, record: Any, duration_s: float) -> None:
        self.endpoints.append(record.endpoint)

    def on_outcome(self, record: Any) -> None: ...

    def arrive(self, prompt: str) -> None:
        self.driver.feed(RequestArrived(builders.request(prompt, stream=True)))


def bench() -> Bench:
    return Bench(CostModel(EXACT).cost, lambda request, fleet, now: None, Random(3))


def burst(rig: Rig, count: int = 60) -> None:
    chance = Random(4)
    for i in range(count):
        rig.clock.advance(0.01)
        rig.arrive("shared " * chance.choice([0, 500]) + f"{i} " * chance.randrange(1, 400))


def test_judged_long_after_the_same_policy_decides_the_same() -> None:
    """Every case is judged when all are charged already: by its own numbers it is where it was."""
    rig, judge = Rig(), bench()
    burst(rig)
    same = CostModel(EXACT)
    assert [case.endpoint for case in rig.cases] == rig.endpoints
    different = 0
    for case in rig.cases:
        judge.open(case)
        verdict = judge.decide("same", same)
        assert (verdict.error, verdict.regret_ms, judge.record([verdict]).regret_ms) == ("", 0.0, 0.0)
        different += not verdict.agrees
    assert different <= len(rig.cases) // 5, "only where costs are equal"


def test_regret_and_gain_are_those_of_the_reference() -> None:
    rig, judge = Rig(2), bench()
    builders.busy(rig.fleet, "e0", [builders.request("x" * 40_000) for _ in range(5)])
    others = list(rig.fleet.ledger)
    rig.arrive("hello")
    for lease in others:  # they were no requests of the pipeline's
        rig.fleet.ledger.release(lease)
    judge.open(rig.cases[0])
    assert rig.cases[0].endpoint == "e1"
    good, bad = judge.verdict("s", 1), judge.verdict("s", 0)
    assert (good.agrees, good.regret_ms, good.gain_ms) == (True, 0.0, 0.0)
    assert not bad.agrees and bad.regret_ms > 100.0 and bad.gain_ms < -50.0


def test_configured_gauges_are_as_they_were() -> None:
    rig, judge = Rig(2), bench()
    for heat in (3.0, 4.0):
        rig.fleet.sampled("e1", rig.clock.time(), rig.clock.time(), Sample(extra={"heat": heat}))
        rig.arrive("a")
    for case, heat in zip(rig.cases, (3.0, 4.0), strict=True):
        column = judge.open(case).table.extra("heat")
        assert np.isnan(column[0]) and column[1] == heat


def test_adapters_for_which_requests_wait_are_as_they_were() -> None:
    rig, judge = Rig(2), bench()
    for waiting in ({"sql"}, set()):
        sample = Sample(adapters=frozenset({"x"}), waiting_adapters=frozenset(waiting), max_adapters=1)
        rig.fleet.sampled("e1", rig.clock.time(), rig.clock.time(), sample)
        rig.arrive("a")
    scorer, request = LoraAffinity(NoParams()), builders.request("a", model="sql")
    for case, score in zip(rig.cases, (0.6, 0.0), strict=True):
        column = scorer.score(request, judge.open(case), builders.cycle())
        assert column is not None and column[1] == score


def test_endpoints_may_come_and_go_between_cases() -> None:
    rig, judge = Rig(2), bench()
    rig.arrive("a")
    rig.driver.feed(EndpointUp(builders.endpoint("e9")))
    rig.arrive("b")
    sizes = [len(judge.open(case).table) for case in (*rig.cases, rig.cases[0])]
    assert sizes == [2, 3, 2]


class Nasty:
    name = "nasty"

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def choose(self, request: Any, fleet: Fleet, context: Any) -> Any:
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer


@pytest.mark.parametrize(
    "answer",
    [
        RuntimeError("no"),
        SystemExit(3),
        None,
        [],
        [Picked(0)],
        Picked(99),
        Picked(-7),
        Picked(-1),
        "e0",
        Picked("e0"),
        5,
    ],  # type: ignore[arg-type]
    ids=str,
)
def test_whatever_a_shadow_does_becomes_its_verdict(answer: Any) -> None:
    rig, judge = Rig(2), bench()
    rig.arrive("a")
    judge.open(rig.cases[0])
    verdict = judge.decide("nasty", Nasty(answer))
    assert verdict.error and not verdict.endpoint and len(verdict.error) <= 200
    assert judge.decide("good", LeastRequests()).error == "", "others are not touched"


def test_a_shadow_whose_cost_fails_has_failed() -> None:
    class Fails(LeastRequests):
        def cost(self, request: Any, fleet: Any, cycle: Any) -> Any:
            raise RuntimeError("no")

    rig, judge = Rig(2), bench()
    rig.arrive("a")
    judge.open(rig.cases[0])
    error = judge.decide("f", Fails(name="f")).error
    assert re.fullmatch(r"PluginError: plugin f: RuntimeError: no \(test_shadow\.py, line \d+\)", error)


def test_a_shadow_that_writes_to_its_fleet_changes_no_real_one() -> None:
    class Writes:
        name = "writes"

        def choose(self, request: Any, fleet: Fleet, context: Any) -> Any:
            fleet.table.floats[:] = 1e9
            fleet.predictor.kappa[:] = 4.0
            return Picked(0)

    rig, judge = Rig(3), bench()
    burst(rig, 10)
    before = rig.fleet.table.floats.copy()
    for case in rig.cases:
        judge.open(case)
        judge.decide("w", Writes())
    assert np.array_equal(rig.fleet.table.floats, before, equal_nan=True)
    rig.pipeline.validate()


def test_what_a_scheduler_answers_is_judged_too() -> None:
    rig, judge = Rig(2), bench()
    rig.arrive("a")
    judge.open(rig.cases[0])
    opened = judge.opened
    rig.arrive("b")
    judge.open(rig.cases[1])
    judge.reopen(opened)
    agrees = judge.answered("s", RemotePick(1, Outcome.PICKED, rig.cases[0].endpoint), 5.0)
    assert agrees.agrees and agrees.took_us == 5.0
    assert judge.answered("s", RemotePick(1, Outcome.PICKED, "nobody"), 5.0).error
    assert judge.answered("s", RemotePick(1, Outcome.PASSED), 5.0).error == "passed"
    refused = judge.answered("s", RemotePick(1, Outcome.REFUSED), 5.0)
    assert (refused.endpoint, refused.error) == ("", "")


def test_sampling_takes_its_share_and_disturbs_no_decision() -> None:
    shadowed, plain = Rig(share=0.3), Rig(share=0.0)
    burst(shadowed, 200)
    burst(plain, 200)
    assert shadowed.endpoints == plain.endpoints
    assert 30 < len(shadowed.cases) < 90 and plain.cases == []


def test_a_case_that_cannot_be_taken_costs_no_request() -> None:
    rig = Rig(2)
    assert rig.pipeline.shadows is not None
    rig.pipeline.shadows._snapshots = None  # type: ignore[assignment]
    rig.arrive("a")
    assert rig.cases == [] and len(rig.endpoints) == 1 and rig.pipeline.shadows.failed == 1


def test_records_go_to_whom_they_concern() -> None:
    rig = Rig(2)
    record = ShadowRecord(1, 2.0, "e0")
    rig.driver.feed(ShadowsJudged((record,)))
    assert rig.told == [record]


def test_cases_hold_no_prompt() -> None:
    rig = Rig(2)
    rig.arrive("secret " * 100)
    assert rig.cases[0].request.prefix.hashes == ()


@pytest.mark.parametrize("always", [True, False], ids=["pairs", "whole"])
def test_a_pair_is_another_choice_than_one_endpoint(always: bool) -> None:
    """Either may decide or be the shadow. They differ in who computes the prompt, and in TTFT by the handover."""
    clock, filters = SimClock(), [Role(RoleParams())]
    pairs = PrefillDecode(PrefillDecodeParams(always=True), filters=filters)
    whole = CostModel(EXACT, filters=filters)
    fleet = builders.fleet(
        *(builders.endpoint(name, labels={"llm-d.ai/role": role}) for name, role in (("p", "prefill"), ("d", "decode")))
    )
    decides, on_trial = (pairs, whole) if always else (whole, pairs)
    taker = CaseTaker(1.0, Random(2))
    pipeline = Pipeline(clock, Random(1), fleet, decides, TokenEstimator(), shadows=taker)
    said = pipeline.handle(RequestArrived(builders.request("long " * 9000, stream=True)))
    (case,) = [instruction.case for instruction in said if isinstance(instruction, JudgeShadows)]
    judge = bench()
    judge.open(case)
    other, same = judge.decide("other", on_trial), judge.decide("same", decides)
    assert (other.agrees, same.agrees) == (False, True)
    assert (other.prefill, same.prefill) == (("", "p") if always else ("p", ""))
    assert same.gain_ms == 0.0
    assert other.gain_ms == pytest.approx(157.0 if always else -157.0, rel=0.1)
    assert judge.record([other]).regret_ms == 0.0
    pick = RemotePick(1, Outcome.PICKED, "d", prefill="p")
    answered = judge.answered("s", pick, 5.0)
    assert (answered.agrees, answered.prefill, answered.gain_ms, answered.error) == (always, "p", 0.0, "")
    assert judge.answered("s", RemotePick(1, Outcome.PICKED, "d", prefill="nobody"), 5.0).error
    assert judge.answered("s", RemotePick(1, Outcome.PICKED, "d", prefill="d"), 5.0).agrees is not always
    for unknown in (2, -2):
        with pytest.raises(ValueError, match=f"picked slot {unknown} of 2"):
            judge.verdict("s", 1, unknown)
