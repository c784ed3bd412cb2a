"""Filters that promise to be steady are asked once, and again when what they depend on has changed."""

from random import Random

import numpy as np
from msgspec.structs import replace

from fairlead.core.columns import BoolColumn
from fairlead.core.endpoint import BaseModels, Endpoint
from fairlead.core.fleet import Fleet
from fairlead.core.policy import Context, Cycle, Filter, Picked, Stage
from fairlead.core.request import Request
from fairlead.plugins.filters.ability import ModelCompatibility, Role, RoleParams, Subset
from fairlead.plugins.filters.availability import Health, HealthParams
from fairlead.plugins.params import NoParams
from fairlead.plugins.policies.cost_model import CostModel
from fairlead.testing import fleet, request


class Counting:
    """Keeps all, and counts how often it is asked."""

    name, stage, steady = "counting", Stage.ABILITY, True

    def __init__(self) -> None:
        self.asked = 0

    def keep(self, request: Request, fleet: Fleet, cycle: Cycle) -> BoolColumn | None:
        self.asked += 1
        return None


class Restless(Counting):
    name, steady = "restless", False


def usual() -> list[Filter]:
    return [Role(RoleParams()), Subset(NoParams()), ModelCompatibility(NoParams()), Health(HealthParams())]


def choose(policy: CostModel, known: Fleet, asked: Request) -> Picked:
    return policy.choose(asked, known, Context(1.0, Random(1)))


def test_they_are_asked_once_for_each_model() -> None:
    counting = Counting()
    policy, known = CostModel(filters=[*usual(), counting]), fleet("e0", "e1")
    for _ in range(3):
        choose(policy, known, request(model="a"))
    assert counting.asked == 1
    choose(policy, known, request(model="b"))
    assert counting.asked == 2


def test_a_request_that_is_too_long_is_not_taken_for_a_short_one_of_the_same_model() -> None:
    policy, known = CostModel(filters=usual()), fleet("e0", "e1")
    for name, tokens in (("e0", 512), ("e1", 2048)):
        known.adapters_listed(name, frozenset(), BaseModels(frozenset({"m"}), {"m": tokens}))
    short, long = request(model="m"), replace(request(model="m"), prompt_tokens=600)
    choose(policy, known, short)
    known.table.queue[1] = 50.0
    assert (choose(policy, known, short).slot, choose(policy, known, long).slot) == (0, 1)


def test_they_are_asked_again_when_the_table_has_changed_and_in_another_fleet() -> None:
    counting = Counting()
    policy, known = CostModel(filters=[counting]), fleet("e0", "e1")
    choose(policy, known, request())
    known.up(Endpoint("e2", "10.9.9.9:8000"))
    choose(policy, known, request())
    assert counting.asked == 2
    choose(policy, fleet("e0", "e1"), request())
    assert counting.asked == 3


def test_one_that_promises_nothing_is_always_asked_and_so_are_the_others() -> None:
    counting, restless = Counting(), Restless()
    policy, known = CostModel(filters=[counting, restless]), fleet("e0", "e1")
    for _ in range(3):
        choose(policy, known, request())
    assert (counting.asked, restless.asked) == (3, 3)


def test_a_subset_and_trouble_count_although_all_were_kept_before() -> None:
    policy, known = CostModel(filters=usual()), fleet("e0", "e1")
    for _ in range(3):
        assert choose(policy, known, request()).slot >= 0
    one = known.table.endpoints[1]
    assert one is not None
    assert {choose(policy, known, request(subset=frozenset((one.address,)))).slot for _ in range(9)} == {1}
    for _ in range(3):
        known.scrape_failed("e1", 1.0)
    assert known.table.troubled
    assert {choose(policy, known, request()).slot for _ in range(9)} == {0}
    known.table.failures[:] = 0.0
    known.table.judge_trouble()
    rng = Random(2)
    slots = [policy.choose(request(), known, Context(1.0, rng)).slot for _ in range(40)]
    assert np.unique(slots).tolist() == [0, 1]


def test_another_role_takes_an_endpoint_away() -> None:
    policy, known = CostModel(filters=usual()), fleet("e0", "e1")
    choose(policy, known, request())
    one = known.table.endpoints[0]
    assert one is not None
    known.up(Endpoint(one.id, one.address, {"llm-d.ai/role": "prefill"}))
    assert {choose(policy, known, request()).slot for _ in range(9)} == {1}


def test_models_that_clients_make_up_do_not_pile_up() -> None:
    policy, known = CostModel(filters=usual()), fleet("e0", "e1")
    for number in range(3000):
        choose(policy, known, request(model=f"made-up-{number}"))
    assert len(policy._passed) < 1100
