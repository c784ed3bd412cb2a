"""The usual profile: its traces add up, do not change afterwards, and its picks spread."""

from collections import Counter
from math import inf
from random import Random

import pytest
from profiles import CHAIN, REQUEST, Fixed, adds_up, choose, fleet_of, mask, profile

from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.errors import PluginError
from fairlead.core.fleet import Fleet
from fairlead.core.policy import Context, Picker
from fairlead.core.profile import Profile
from fairlead.core.request import Request
from fairlead.plugins.filters.ability import Role, RoleParams, Subset
from fairlead.plugins.filters.availability import Health, HealthParams
from fairlead.plugins.filters.load import MemoryPressure, MemoryPressureParams, QueueDepth, QueueDepthParams
from fairlead.plugins.params import NoParams
from fairlead.plugins.pickers import RoundRobin
from fairlead.plugins.scorers.load import (
    InflightTokens,
    InflightTokensParams,
    KvUtilization,
    LoadAware,
    LoadAwareParams,
)
from fairlead.plugins.scorers.prefix import PrefixAware, PrefixAwareParams
from fairlead.plugins.scorers.session_affinity import SessionAffinity


def busy_fleet(count: int, rng: Random) -> Fleet:
    fleet = fleet_of(count)
    for slot in range(count):
        sample = Sample(waiting=float(rng.randrange(60)), running=float(rng.randrange(60)), kv_usage=rng.random())
        fleet.sampled(f"e{slot}", 0.0, 0.0, sample)
        if rng.random() < 0.3:
            fleet.prefix.insert(slot, CHAIN)
    if rng.random() < 0.5:
        fleet.down(f"e{rng.randrange(count)}")
    return fleet


def usual(errors: list[PluginError] | None = None) -> Profile:
    return profile(
        [
            Role(RoleParams()),
            Subset(NoParams()),
            Health(HealthParams()),
            QueueDepth(QueueDepthParams()),
            MemoryPressure(MemoryPressureParams()),
        ],
        [
            (PrefixAware(PrefixAwareParams()), 100.0),
            (LoadAware(LoadAwareParams()), 50.0),
            (KvUtilization(NoParams()), 50.0),
            (InflightTokens(InflightTokensParams()), 100.0),
            (SessionAffinity(NoParams()), 20.0),
        ],
        errors=errors,
    )


@pytest.mark.parametrize("seed", range(40))
def test_traces_of_the_usual_profile_are_complete_and_add_up(seed: int) -> None:
    rng = Random(seed)
    fleet = busy_fleet(rng.randrange(2, 12), rng)
    errors: list[PluginError] = []
    pick = choose(usual(errors), fleet)
    assert errors == []
    assert fleet.table.endpoints[pick.slot] is not None
    trace = pick.trace
    assert trace is not None
    assert trace.endpoints == fleet.table.ids
    if trace.outcome == "fallback":
        assert pick.overloaded
        return
    assert trace.outcome == "picked"
    assert pick.slot == trace.total.argmax()
    adds_up(pick)
    kept = fleet.table.alive.copy()
    for _, verdict in trace.filters:
        kept &= verdict
    assert (trace.total > -inf).tolist() == kept.tolist()


def test_a_trace_does_not_change_afterwards() -> None:
    fleet = fleet_of(3)
    fleet.down("e2")
    pick = choose(usual(), fleet)
    trace = pick.trace
    assert trace is not None
    before = (trace.candidates.tolist(), trace.total.tolist(), [s.tolist() for _, _, s in trace.scorers])
    fleet.up(Endpoint("e9", "10.0.0.9:8000"))
    fleet.down("e0")
    fleet.charge(REQUEST, pick.slot if pick.slot else 1, 0.0, 0, 0.0)
    fleet.sampled("e1", 1.0, 1.0, Sample(waiting=9.0, running=9.0, kv_usage=0.9))
    assert (trace.candidates.tolist(), trace.total.tolist(), [s.tolist() for _, _, s in trace.scorers]) == before


def test_tracing_does_not_change_the_choice() -> None:
    fleet = busy_fleet(9, Random(3))
    with_trace, without = choose(usual(), fleet), choose(usual(), fleet, trace=False)
    assert with_trace.slot == without.slot
    assert without.trace is None


@pytest.mark.parametrize("picker", [None, RoundRobin(NoParams())], ids=["scores", "looks at nothing"])
def test_the_pick_says_what_is_cached_there_and_at_best(picker: Picker | None) -> None:
    fleet = fleet_of(3)
    fleet.prefix.insert(2, CHAIN)
    half = REQUEST.prefix.hashes[:8]
    fleet.prefix.insert(0, type(CHAIN)(half, CHAIN.ends[:8]))
    pick = choose(profile([Fixed(mask(1, 1, 0))], [], picker), fleet)
    assert (pick.hit_share, pick.best_share) == ({0: 0.5, 1: 0.0}[pick.slot], 1.0)
    fallback = choose(profile([Fixed(mask(0, 0, 0))]), fleet)
    assert (fallback.slot, fallback.hit_share, fallback.best_share) == (0, 0.5, 1.0)
    cold = choose(profile(), fleet, Request(id=2, arrived=0.0))
    assert (cold.hit_share, cold.best_share) == (0.0, 0.0)


def test_a_burst_between_two_scrapes_spreads() -> None:
    fleet = fleet_of(4)
    for name in ("e0", "e1", "e2", "e3"):
        fleet.sampled(name, 0.0, 0.0, Sample(waiting=0.0, running=0.0, kv_usage=0.0))
    plan, rng = usual(), Random(5)
    counts: Counter[int] = Counter()
    for number in range(40):
        request = Request(id=number, arrived=1.0, prompt_tokens=1000)
        pick = plan.choose(request, fleet, Context(1.0, rng))
        fleet.charge(request, pick.slot, 1.0, 0, 100.0)
        counts[pick.slot] += 1
    assert counts == {0: 10, 1: 10, 2: 10, 3: 10}
