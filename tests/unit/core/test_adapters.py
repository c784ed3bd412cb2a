"""What an adapter costs where: it runs, it is loaded, it could be loaded, or there is no slot for it."""

from random import Random

import numpy as np
import pytest
from msgspec import structs
from waiting_rules import AbleRules

from fairlead.compat.load import load
from fairlead.core.adapters import ACTIVATE_MS, LOAD_MS
from fairlead.core.binding import PairBinder
from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.events import AdaptersListed, EndpointUp, MetricsSampled
from fairlead.core.explain import explain
from fairlead.core.fleet import Fleet
from fairlead.core.flow import Waiting
from fairlead.core.instructions import ListAdapters
from fairlead.core.records import DecisionRecord
from fairlead.core.request import Request
from fairlead.core.scheduler import Pipeline
from fairlead.core.tokens import TokenEstimator
from fairlead.lab.simulator.simulation import Simulation
from fairlead.lab.simulator.world import Scenario, replicas
from fairlead.lab.workload.conversation import Conversation, conversation
from fairlead.lab.workload.record import Workload
from fairlead.plugins.filters.ability import ModelCompatibility
from fairlead.plugins.params import NoParams
from fairlead.plugins.policies.cost_model import CostModel
from fairlead.testing.builders import SimClock, cycle

HOLD_MS = 4000.0


def fleet_of(count: int, slots: int = 2) -> Fleet:
    fleet = Fleet()
    fleet.predictor.hold_ms = HOLD_MS
    for number in range(count):
        fleet.up(Endpoint(f"e{number}", f"10.0.0.{number}:8000", {"model": "base"}))
        page(fleet, number, slots=slots)
    return fleet


def page(fleet: Fleet, slot: int, *names: str, at: float = 0.0, slots: int = 2) -> None:
    fleet.sampled(f"e{slot}", at, at, Sample(adapters=frozenset(names), max_adapters=slots))


def asked(number: int, model: str = "poet") -> Request:
    return Request(id=number, arrived=0.0, model=model, prompt_tokens=1000, stream=True)


def waits(fleet: Fleet, model: str = "poet") -> list[float]:
    found = fleet.loading(asked(0, model))
    assert found is not None
    return [float(value) for value in found]


def test_what_begins_is_followed_step_by_step() -> None:
    rng, fleet, leases = Random(7), fleet_of(6), []
    names = ["poet", "critic", "clerk", "scribe"]
    for number in range(6):
        fleet.adapters_listed(f"e{number}", frozenset(names))
    for number in range(400):
        match rng.randrange(4):
            case 0 | 1:
                leases.append(fleet.charge(asked(number, rng.choice(names)), rng.randrange(6), 0.0, 0, 100.0))
            case 2 if leases:
                lease = leases.pop(rng.randrange(len(leases)))
                if number % 2:
                    fleet.first_token(lease, number * 0.01)
                else:
                    fleet.ledger.release(lease)
            case _:
                page(fleet, rng.randrange(6), *rng.sample(names, rng.randrange(4)), at=number * 0.01)
        if number % 3 == 0:
            waits(fleet, rng.choice(names))
        fleet.adapters.validate()
    fleet.down("e2")
    fleet.adapters.validate()


def test_a_choice_among_many_computes_the_waits_of_an_adapter_once() -> None:
    fleet, looked = fleet_of(3), []
    page(fleet, 0, "poet")
    page(fleet, 1, "critic")
    binder = PairBinder(AbleRules())
    window = [
        Waiting(asked(number, name), 0.0, 1e9, 1000.0, number)
        for number, name in enumerate(("poet", "critic", "base") * 20)
    ]
    for waiting in window:
        _, waiting.known = binder.look(waiting.request, fleet, 0.0)
    of_all, loading = fleet.table.alive.copy(), fleet.loading
    fleet.loading = lambda request: looked.append(request.target_model) or loading(request)  # type: ignore[method-assign]
    binder.bind(window, fleet, of_all, 0.0)
    assert len(looked) <= 4, "three models, and the request that is sent"


def test_where_it_runs_where_it_is_loaded_and_where_no_slot_is_left() -> None:
    fleet = fleet_of(4)
    for number in range(4):
        fleet.adapters_listed(f"e{number}", frozenset({"poet", "critic", "clerk"}))
    page(fleet, 0, "poet")
    page(fleet, 2, "critic")
    page(fleet, 3, "critic", "clerk")
    assert waits(fleet) == [0.0, ACTIVATE_MS, ACTIVATE_MS, ACTIVATE_MS + HOLD_MS]
    assert waits(fleet, "critic") == [ACTIVATE_MS, ACTIVATE_MS, 0.0, 0.0]
    assert fleet.loading(asked(1, "base")) is None, "nobody has it as an adapter"


def test_what_was_just_sent_takes_a_slot_before_any_page_tells() -> None:
    fleet = fleet_of(2, slots=1)
    for number in range(2):
        fleet.adapters_listed(f"e{number}", frozenset({"poet", "critic"}))
    lease = fleet.charge(asked(1, "critic"), 0, 0.0, 0, 100.0)
    assert waits(fleet) == [ACTIVATE_MS + HOLD_MS, ACTIVATE_MS]
    assert waits(fleet, "critic") == [0.0, ACTIVATE_MS], "the next one follows"
    fleet.charge(asked(2), 0, 0.0, 0, 100.0)
    assert waits(fleet)[0] == HOLD_MS, "it waits there for the same slot"
    fleet.validate()
    fleet.ledger.release(lease)
    fleet.down("e0")
    fleet.validate()
    assert fleet.ledger.starting == {}


def test_the_forecast_has_the_wait_in_it() -> None:
    fleet = fleet_of(1, slots=1)
    fleet.adapters_listed("e0", frozenset({"poet", "critic"}))
    free = fleet.charge(asked(1, "base"), 0, 0.0, 0, 100.0).forecast
    page(fleet, 0, "critic", slots=1)
    fleet.ledger.release(next(iter(fleet.ledger)))
    queued = fleet.charge(asked(2), 0, 0.0, 0, 100.0).forecast
    assert queued.ttft_ms == pytest.approx(free.ttft_ms + ACTIVATE_MS + HOLD_MS)
    assert queued.low_ms < queued.ttft_ms < queued.high_ms
    assert queued.kind != free.kind


@pytest.mark.parametrize("really_ms", [0.0, 200.0])
def test_loading_is_learned(really_ms: float) -> None:
    fleet = fleet_of(1)
    fleet.adapters_listed("e0", frozenset({"poet"}))
    now = 0.0
    for number in range(300):
        now += 10.0
        cold = number % 2 == 0
        page(fleet, 0, *(() if cold else ("poet",)), at=now)
        lease = fleet.charge(asked(number), 0, now, 0, 100.0)
        fleet.first_token(lease, now + 0.1 + cold * really_ms * 1e-3)
        fleet.ledger.release(lease)
    page(fleet, 0, at=now + 10.0)
    assert waits(fleet)[0] == pytest.approx(really_ms, abs=10.0)
    assert fleet.predictor.rates.prefill[0] < 2.0, "the engine is not taken for slower"


def able(fleet: Fleet) -> list[bool]:
    found = ModelCompatibility(NoParams()).keep(asked(0), fleet, cycle())
    return [True] * len(fleet.table) if found is None else [bool(value) for value in found]


def test_engines_that_load_on_demand_are_found_and_all_of_them_can_serve_it() -> None:
    fleet = Fleet()
    made = Pipeline(SimClock(), Random(0), fleet, CostModel(), TokenEstimator())
    for number in range(3):
        made.handle(EndpointUp(Endpoint(f"e{number}", f"10.0.0.{number}:8000", {"model": "base"})))
        made.handle(MetricsSampled(f"e{number}", 0.0, Sample(adapters=frozenset(), max_adapters=2)))
        made.handle(AdaptersListed(f"e{number}", frozenset()))
    assert able(fleet) == [True] * 3, "nobody has it"
    runs = MetricsSampled("e1", 1.0, Sample(adapters=frozenset({"poet"}), max_adapters=2))
    assert made.handle(runs) == [ListAdapters("e1")]
    assert made.handle(runs) == []
    assert able(fleet) == [False, True, False]
    made.handle(AdaptersListed("e1", frozenset({"poet"})))
    assert able(fleet) == [False, True, False], "it may have been told to load it"
    made.handle(AdaptersListed("e0", frozenset()))
    assert able(fleet) == [True] * 3, "the others were not"
    assert waits(fleet) == [LOAD_MS, 0.0, LOAD_MS]
    assert fleet.without_model(2, "unheard-of") and able(fleet) == [True] * 3
    assert fleet.without_model(2, "poet")
    assert able(fleet) == [False, True, False], "it does not load it after all"
    made.handle(AdaptersListed("e0", frozenset()))
    assert able(fleet) == [False, True, False]


def lora(adapters: int, slots: int, rate: float = 3.0) -> Scenario:
    spec = Conversation(
        systems=20, system_tokens=1024, first_tokens=2000, turn_tokens=600, output_tokens=200, gap_s=8.0
    )
    made = conversation(spec, seconds=60.0, rate=rate, seed=1, dispatch="timestamp")
    rng, names = Random(3), [f"a{number}" for number in range(adapters)] or [""]
    of = {record.session: rng.choice(names) for record in made.records}
    records = [structs.replace(record, lora=of[record.session]) for record in made.records]
    return Scenario(
        name="lora",
        workload=Workload(name="lora", records=records, dispatch=made.dispatch),
        replicas=replicas(3, block_size=64, max_loras=slots),
    )


def mean_ttft(scenario: Scenario, told: list[DecisionRecord] | None = None) -> float:
    def watch(record: object) -> None:
        if told is not None and isinstance(record, DecisionRecord):
            told.append(record)

    config = load("policy: default\n", need_endpoints=False)
    simulation = Simulation(scenario, config, 0, watch=watch, snapshots=told is not None)
    simulation.run()
    assert {job.status for job in simulation.jobs} == {"done"}
    return float(np.mean([job.ttft_ms for job in simulation.jobs]))


def test_more_adapters_than_slots_are_kept_apart() -> None:
    """Six slots for four adapters. Where any adapter goes anywhere, they wait for each other's answers."""
    told: list[DecisionRecord] = []
    plain = mean_ttft(lora(0, 2))
    assert mean_ttft(lora(1, 2)) < 1.1 * plain
    assert mean_ttft(lora(4, 2), told) < 4.0 * plain
    named = 0
    for record in told[::20]:
        assert record.trace is not None
        found = explain(CostModel, record.request, record.trace, record.endpoint)
        assert found.reproduced
        for one in found.candidates:
            assert sum(one.terms.values()) == pytest.approx(one.total, rel=1e-12)
        named += any(one.terms.get("loading", 0.0) < 0.0 for one in found.candidates)
    assert named
