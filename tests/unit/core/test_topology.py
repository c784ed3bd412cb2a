"""Endpoints elsewhere cost more, in the kernel, in a choice and in what is shown of it."""

from random import Random

import numpy as np
import pytest

from fairlead.core.cost import FEW, Weights, cost, cost_of_one, parts, weighed
from fairlead.core.endpoint import ZONE_LABEL, Endpoint, Topology
from fairlead.core.fleet import Fleet
from fairlead.core.policy import Context, Picked
from fairlead.core.snapshot import Restored, Snapshots
from fairlead.core.table import FLOATS
from fairlead.plugins.policies.cost_model import CostModel
from fairlead.testing import builders

HERE = Topology(((ZONE_LABEL, "a", 40.0), ("node", "n1", 2.0)))


def fleet(slots: int = 4, topology: Topology = HERE) -> Fleet:
    made = Fleet(topology=topology)
    for slot in range(slots):
        made.up(Endpoint(f"e{slot}", f"10.0.0.{slot}:80", {ZONE_LABEL: "a" if slot == 2 else "b"}))
    return made


def test_labels_say_how_far() -> None:
    assert HERE.ms({ZONE_LABEL: "a", "node": "n2"}) == 2.0
    assert HERE.ms({ZONE_LABEL: "b", "node": "n2"}) == 42.0
    assert HERE.ms({}) == 0.0, "an endpoint without the label may be here"
    made = fleet()
    assert made.table.distance_ms.tolist() == [40.0, 40.0, 0.0, 40.0]
    made.up(Endpoint("e0", "10.0.0.0:80", {ZONE_LABEL: "a"}))
    assert made.table.distance_ms[0] == 0.0
    made.down("e1")
    assert made.table.distance_ms[1] == 0.0


@pytest.mark.parametrize("slots", [4, FEW + 4])
def test_it_is_a_part_of_the_cost(slots: int) -> None:
    near, far = fleet(slots, Topology()), fleet(slots)
    for made in near, far:
        total = weighed(terms := cost(500.0, None, made, 0.0), Weights(), made)
        assert np.allclose(total, cost_of_one(500.0, None, Weights(), made, 0.0))
        assert np.allclose(total, sum(column for _, column in parts(terms, Weights(), made)))
    more = cost_of_one(500.0, None, Weights(), far, 0.0) - cost_of_one(500.0, None, Weights(), near, 0.0)
    assert np.allclose(more, far.table.distance_ms)
    assert "topology" in dict(parts(cost(500.0, None, far, 0.0), Weights(), far))
    assert "topology" not in dict(parts(cost(500.0, None, near, 0.0), Weights(), near))


def test_the_nearest_is_chosen_unless_another_is_worth_the_way() -> None:
    made, policy, prompt = fleet(), CostModel(), builders.request("word " * 4000)
    chosen = policy.choose(prompt, made, Context(0.0, Random(1)))
    assert isinstance(chosen, Picked) and chosen.slot == 2
    builders.holds(made, "e3", prompt)
    chosen = policy.choose(prompt, made, Context(0.0, Random(1)))
    assert isinstance(chosen, Picked) and chosen.slot == 3


def test_a_recorded_decision_shows_it() -> None:
    snapshot = Snapshots()(fleet(), 0.0)
    restored = Restored(snapshot, None)
    assert dict(parts(cost(500.0, None, restored, 0.0), Weights(), restored))["topology"].tolist() == [40, 40, 0, 40]
    snapshot.floats.resize((FLOATS.index("distance_ms"), 4), refcheck=False)
    assert not Restored(snapshot, None).table.distant, "a journal of an older version has no such column"
