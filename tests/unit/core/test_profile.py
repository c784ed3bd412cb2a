"""Filter → score → pick: what is left, and what is picked."""

from math import inf
from random import Random

import pytest
from profiles import REQUEST, Demoting, Fixed, adds_up, choose, column, fleet_of, mask, profile

from fairlead.core.columns import FloatColumn
from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.errors import PluginError
from fairlead.core.fleet import Fleet
from fairlead.core.flow import NO_ENDPOINTS
from fairlead.core.policy import CANDIDATES, Context, Cycle, Filter, Refused, Scorer, Stage
from fairlead.core.profile import Profile
from fairlead.core.request import Request
from fairlead.plugins.filters.ability import ModelCompatibility, Subset
from fairlead.plugins.filters.availability import Health, HealthParams
from fairlead.plugins.filters.load import MemoryPressure, MemoryPressureParams, QueueDepth, QueueDepthParams
from fairlead.plugins.params import NoParams
from fairlead.plugins.pickers import RoundRobin
from fairlead.plugins.scorers.load import LoadAware, LoadAwareParams


def test_an_empty_pool() -> None:
    pick = choose(profile(), Fleet())
    assert isinstance(pick, Refused)
    assert (pick.reason, pick.message) == (NO_ENDPOINTS, "the pool has no endpoints")
    assert pick.trace is not None
    assert pick.trace.outcome == "none"
    fleet = fleet_of(1)
    fleet.down("e0")
    assert isinstance(choose(profile(), fleet), Refused)


def test_a_hard_filter_that_leaves_none_refuses_and_says_which() -> None:
    filters: list[Filter] = [Fixed(mask(1, 0, 0), "first", hard=True), Fixed(mask(0, 1, 1), "second", hard=True)]
    pick = choose(profile(filters), fleet_of(3))
    assert isinstance(pick, Refused)
    assert pick.reason == NO_ENDPOINTS
    assert pick.message == "no endpoint can serve the request: filter second left none of 1 that first left"
    assert pick.trace is not None
    assert [name for name, _ in pick.trace.filters] == ["first", "second"]
    assert pick.trace.outcome == "none"


def test_an_empty_subset_hint_refuses() -> None:
    request = Request(id=1, arrived=0.0, subset=frozenset())
    pick = choose(profile([Subset(NoParams())]), fleet_of(2), request)
    assert isinstance(pick, Refused)
    assert "filter subset left none" in pick.message


@pytest.mark.parametrize(("model", "status"), [("b", 503), ("typo", 404)])
def test_a_model_whose_endpoints_another_filter_took_exists(model: str, status: int) -> None:
    fleet = Fleet()
    for name in ("a", "b"):
        fleet.up(Endpoint(name, f"{name}:1", {"model-id": name}))
    request = Request(id=1, arrived=0.0, model=model, subset=frozenset({"a:1"}))
    pick = choose(profile([Subset(NoParams()), ModelCompatibility(NoParams())]), fleet, request)
    assert isinstance(pick, Refused)
    assert (pick.status, pick.trace and pick.trace.outcome) == (status, "none")


def test_of_a_target_that_nobody_serves_clients_read_the_name_that_they_asked_for() -> None:
    fleet = Fleet()
    fleet.up(Endpoint("a", "a:1", {"model-id": "v1"}))
    fleet.table.know({"chat", "v1", "v2"}, {"v1", "v2"})
    pick = choose(profile([ModelCompatibility(NoParams())]), fleet, Request(1, 0.0, model="chat", target="v2"))
    assert isinstance(pick, Refused)
    assert (pick.reason, pick.status, pick.message) == (NO_ENDPOINTS, 503, "no endpoint serves the model `chat` now")


def test_load_filters_that_leave_none_fall_back_to_round_robin() -> None:
    filters: list[Filter] = [
        Fixed(mask(0, 0, 1, 1), "load-a"),
        Fixed(mask(1, 1, 0, 1), "able", hard=True),
        Fixed(mask(1, 1, 1, 0), "load-b"),
    ]
    plan = profile(filters)
    fleet = fleet_of(4)
    picks = [choose(plan, fleet) for _ in range(6)]
    assert [pick.slot for pick in picks] == [0, 1, 3, 0, 1, 3], "over what can serve it, overloaded or not"
    assert all(pick.overloaded for pick in picks)
    trace = picks[0].trace
    assert trace is not None
    assert trace.outcome == "fallback"
    assert trace.candidates.tolist() == [True, True, False, True]
    assert [name for name, _ in trace.filters] == ["able", "load-a", "load-b"]


def test_a_real_overload() -> None:
    fleet = fleet_of(2)
    for name in ("e0", "e1"):
        fleet.sampled(name, 0.0, 0.0, Sample(waiting=60.0, running=1.0, kv_usage=0.5))
    plan = profile([QueueDepth(QueueDepthParams())], [(LoadAware(LoadAwareParams()), 50.0)])
    assert [choose(plan, fleet).slot for _ in range(3)] == [0, 1, 0]
    fleet.sampled("e1", 1.0, 1.0, Sample(waiting=49.0, running=1.0))
    pick = choose(plan, fleet)
    assert (pick.slot, pick.overloaded) == (1, False)


@pytest.mark.parametrize("health_first", [True, False])
def test_the_fallback_avoids_ill_endpoints(health_first: bool) -> None:
    fleet = fleet_of(3)
    for slot in (0, 1):
        fleet.sampled(f"e{slot}", 0.0, 0.0, Sample(waiting=60.0, running=1.0))
    for _ in range(3):
        fleet.scrape_failed("e2", 1.0)
    filters: list[Filter] = [QueueDepth(QueueDepthParams()), Health(HealthParams())]
    plan = profile(filters[::-1] if health_first else filters)
    picks = [choose(plan, fleet) for _ in range(4)]
    assert [pick.slot for pick in picks] == [0, 1, 0, 1], "overloaded is better than not answering"
    assert all(pick.overloaded for pick in picks)


def test_health_does_not_refuse_or_flag_when_only_the_ill_can_serve() -> None:
    fleet = fleet_of(2)
    for _ in range(3):
        fleet.scrape_failed("e0", 1.0)
    plan = profile([Health(HealthParams()), Subset(NoParams())])
    pick = choose(plan, fleet, Request(id=1, arrived=0.0, subset=frozenset({"10.0.0.0"})))
    assert (pick.slot, pick.overloaded) == (0, False)


def test_departed_endpoints_are_never_chosen() -> None:
    fleet = fleet_of(4)
    fleet.down("e1")
    fleet.down("e3")
    plan = profile([], [(Fixed(column(0.1, 1.0, 0.2, 1.0)), 1.0)])
    pick = choose(plan, fleet)
    assert pick.slot == 2
    assert pick.trace is not None
    assert pick.trace.endpoints == ("e0", "", "e2", "")
    assert pick.trace.total.tolist() == [0.1, -inf, 0.2, -inf]
    overloaded = profile([Fixed(mask(0, 1, 0, 1))])
    assert [choose(overloaded, fleet).slot for _ in range(4)] == [0, 2, 0, 2]
    spread = profile([], [], RoundRobin(NoParams()))
    assert [choose(spread, fleet).slot for _ in range(4)] == [0, 2, 0, 2]


def test_the_highest_weighted_sum_wins() -> None:
    scorers: list[tuple[Scorer, float]] = [
        (Fixed(column(1.0, 0.0, 0.5), "a"), 10.0),
        (Fixed(column(0.0, 1.0, 0.6), "b"), 10.0),
        (Fixed(None, "silent"), 1000.0),
    ]
    pick = choose(profile([], scorers), fleet_of(3))
    assert pick.slot == 2
    assert pick.trace is not None
    assert pick.trace.total.tolist() == [10.0, 10.0, 11.0]
    assert [(name, weight) for name, weight, _ in pick.trace.scorers] == [("a", 10.0), ("b", 10.0)]
    adds_up(pick)


def test_filtered_endpoints_do_not_win_however_good() -> None:
    pick = choose(profile([Fixed(mask(1, 0, 1))], [(Fixed(column(0.1, 1.0, 0.2)), 1.0)]), fleet_of(3))
    assert pick.slot == 2
    adds_up(pick)


def test_demotion_multiplies_and_stands_in_the_trace() -> None:
    plan = profile(
        [Demoting(column(1.0, 0.5, 0.75), "pressure"), Demoting(column(0.5, 1.0, 1.0), "other")],
        [(Fixed(column(0.5, 0.6, 0.4), "a"), 100.0), (Fixed(column(0.1, 0.1, 0.1), "b"), 50.0)],
    )
    pick = choose(plan, fleet_of(3))
    assert pick.trace is not None
    assert pick.trace.total.tolist() == pytest.approx([55 * 0.5, 65 * 0.5, 45 * 0.75])
    assert pick.slot == 2
    assert [name for name, _, _ in pick.trace.scorers] == ["a", "b", "pressure", "other"]
    for _, _, scores in pick.trace.scorers:
        assert ((scores >= 0) & (scores <= 1)).all()
    adds_up(pick)


def test_memory_pressure_demotes_what_it_keeps() -> None:
    fleet = fleet_of(2)
    for slot, kv in enumerate((0.94, 0.80)):
        fleet.sampled(f"e{slot}", 0.0, 0.0, Sample(waiting=0.0, running=1.0, kv_usage=kv))
    better_but_full: list[tuple[Scorer, float]] = [(Fixed(column(1.0, 0.7)), 100.0)]
    assert choose(profile([], better_but_full), fleet).slot == 0
    pick = choose(profile([MemoryPressure(MemoryPressureParams())], better_but_full), fleet)
    assert pick.slot == 1
    adds_up(pick)


def test_scorers_see_who_can_serve() -> None:
    seen: list[object] = []

    class Looking(Fixed):
        def score(self, request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn | None:
            candidates = cycle.get(CANDIDATES)
            seen.append(None if candidates is None else candidates.tolist())
            return None

    scorers: list[tuple[Scorer, float]] = [(Looking(None), 1.0)]
    fleet = fleet_of(3)
    choose(profile([], scorers), fleet)
    choose(profile([Fixed(mask(1, 1, 0), hard=True), Fixed(mask(0, 1, 1))], scorers), fleet)
    assert seen == [None, [True, True, False]], "load filters are not in it"


class Available(Fixed):
    def __init__(self, answer: object, name: str = "available") -> None:
        super().__init__(answer, name)
        self.stage = Stage.AVAILABILITY


def able(plan: Profile, fleet: Fleet) -> list[bool] | None:
    found = plan.able(REQUEST, fleet, Context(0.0, Random(1)))
    return None if found is None else found.tolist()


def test_able_asks_for_ability_and_availability_and_not_for_load() -> None:
    fleet = fleet_of(3)
    hard, there, busy = (
        Fixed(mask(1, 1, 0), hard=True),
        Available(mask(0, 1, 1), "there"),
        Fixed(mask(0, 0, 0), "busy"),
    )
    assert able(profile([busy, there, hard]), fleet) == [False, True, False]
    assert able(profile([busy]), fleet) is None
    assert able(profile([hard, Available(mask(0, 0, 1))]), fleet) == [True, True, False], "passed over"
    assert able(profile([Fixed(mask(0, 0, 0), hard=True)]), fleet) == [False, False, False]


def test_able_leaves_out_a_filter_that_fails() -> None:
    errors: list[PluginError] = []
    plan = profile([Fixed(ValueError("x"), hard=True), Fixed(mask(1, 0), "short", hard=True)], errors=errors)
    assert able(plan, fleet_of(3)) is None
    assert len(errors) == 2
