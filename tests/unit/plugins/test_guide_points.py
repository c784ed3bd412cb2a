"""Points of the scheduler guide, from its configuration to the decision."""

from random import Random

import pytest

from fairlead.compat.load import load
from fairlead.config.plugins import build_policy
from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.fleet import Fleet
from fairlead.core.policy import Context, Picked
from fairlead.core.request import Request

GUIDE = """
filters: [{type: queue-depth}, {type: memory-pressure}, {type: model-compatibility}]
scorers: [{type: load-aware, weight: 50}, {type: lora-aware}]
selection: {topK: 1}
endpoints: ['10.0.0.1:8000']
"""


def points(model: str, *samples: Sample) -> dict[str, list[float]]:
    """Weight times score of each endpoint, by scorer."""
    fleet = Fleet()
    for number, sample in enumerate(samples):
        fleet.up(Endpoint(f"e{number}", f"10.0.0.{number}:8000"))
        fleet.sampled(f"e{number}", 0.0, 0.0, sample)
    request = Request(id=1, arrived=0.0, model=model)
    pick = build_policy(load(GUIDE)).choose(request, fleet, Context(0.0, Random(0)))
    assert isinstance(pick, Picked) and pick.trace is not None
    return {name: [round(weight * float(score), 6) for score in column] for name, weight, column in pick.trace.scorers}


def test_load_counts_50_points_less_one_for_each_that_waits() -> None:
    waiting = [0.0, 10.0, 25.0, 40.0, 50.0]
    found = points("m", *(Sample(waiting=queue, running=17.0) for queue in waiting))
    assert found == {"load-aware": [50.0, 40.0, 25.0, 10.0, 0.0]}


@pytest.mark.parametrize(("model", "expected"), [("poet", [100.0, 50.0, 0.0]), ("other", [0.0, 50.0, 0.0])])
def test_an_adapter_counts_100_points_where_it_is_loaded_and_50_where_a_slot_is_free(
    model: str, expected: list[float]
) -> None:
    loaded = [frozenset({"poet", "critic"}), frozenset({"critic"}), frozenset({"critic", "cook"})]
    found = points(model, *(Sample(waiting=0.0, adapters=names, max_adapters=2) for names in loaded))
    assert found["lora-aware"] == expected
