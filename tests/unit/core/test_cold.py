"""Endpoints whose caches are empty are told of: new ones and restarted ones, and no others."""

from random import Random

from fairlead.core import events as ev
from fairlead.core.endpoint import Sample
from fairlead.core.instructions import WarmUp
from fairlead.core.models import InferenceModel, ModelSet, Origin
from fairlead.core.scheduler import Pipeline
from fairlead.core.tokens import TokenEstimator
from fairlead.plugins.policies.by_load import LeastRequests
from fairlead.testing import SimClock, builders


def pipeline() -> Pipeline:
    made = Pipeline(SimClock(), Random(1), builders.Fleet(), LeastRequests(), TokenEstimator())
    made.handle(ev.EndpointUp(builders.endpoint("e0")))
    return made


def cold(made: Pipeline, queries: float | None) -> bool:
    sampled = ev.MetricsSampled("e0", 0.0, Sample(waiting=0.0, running=0.0, prefix_queries=queries))
    return WarmUp("e0") in made.handle(sampled)


def test_a_new_endpoint_is_cold_once() -> None:
    made = pipeline()
    assert cold(made, 0.0)
    assert not cold(made, 0.0) and not cold(made, 500.0)


def test_one_that_has_computed_prompts_is_not() -> None:
    assert not cold(pipeline(), 500.0)


def test_a_restarted_one_is_cold_before_its_first_prompt() -> None:
    made = pipeline()
    assert not cold(made, 500.0)
    assert cold(made, 0.0)
    assert not cold(made, None), "a page that says nothing of it tells no restart"


def test_a_low_priority_stays_low_under_a_model_s_own() -> None:
    made = pipeline()
    origin = Origin(namespace="n", name="chat")
    made.handle(ev.ModelsChanged(ModelSet((InferenceModel(origin=origin, model="m", criticality="Critical"),))))
    _, record = made.handle(ev.RequestArrived(builders.request("hello", model="m", priority=-9)))
    assert record.request.priority == -9  # type: ignore[union-attr]
