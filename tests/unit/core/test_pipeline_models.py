"""The pipeline with definitions of model names."""

from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from fairlead.core import events as ev
from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.fleet import Fleet
from fairlead.core.instructions import Instruction, ListAdapters, Record, Reject, Route
from fairlead.core.models import (
    InferenceModel,
    InferenceModelRewrite,
    InferenceObjective,
    Latency,
    ModelSet,
    Origin,
    RewriteRule,
    Target,
)
from fairlead.core.profile import Profile
from fairlead.core.records import DecisionRecord, OutcomeRecord
from fairlead.core.request import PrefixChain, Request, Usage
from fairlead.core.scheduler import Pipeline
from fairlead.core.tokens import TokenEstimator
from fairlead.plugins.filters.ability import ModelCompatibility
from fairlead.plugins.params import NoParams
from fairlead.plugins.pickers import RoundRobin
from fairlead.testing import SimClock

CHAIN = PrefixChain((11, 12, 13), (256, 512, 768))


def model(name: str, *targets: str, criticality: str = "Standard") -> InferenceModel:
    origin = Origin(namespace="n", name=name)
    return InferenceModel(origin=origin, model=name, targets=tuple(map(Target, targets)), criticality=criticality)


def pipeline(
    *models: InferenceModel, rewrites: tuple[InferenceModelRewrite, ...] = (), clock: SimClock | None = None
) -> Pipeline:
    policy = Profile("p", [ModelCompatibility(NoParams())], [], RoundRobin(NoParams()))
    made = Pipeline(clock or SimClock(), Random(3), Fleet(), policy, TokenEstimator())
    for name in ("a", "b"):
        made.handle(ev.EndpointUp(Endpoint(f"e-{name}", f"10.0.0.1:{ord(name)}", {"model-id": name})))
    made.handle(ev.ModelsChanged(ModelSet(models, rewrites=rewrites)))
    return made


def arrive(made: Pipeline, number: int = 1, **fields: Any) -> tuple[Instruction, Request]:
    """The instruction, and the request as it was recorded."""
    request = Request(id=number, arrived=0.0, api="chat", prefix=CHAIN, prompt_bytes=768, prompt_tokens=200, **fields)
    first, record = made.handle(ev.RequestArrived(request))
    assert isinstance(record, DecisionRecord)
    made.validate()
    return first, record.request


def test_the_target_is_what_endpoints_are_chosen_for() -> None:
    made = pipeline(model("chat", "b"), model("a"))
    route, request = arrive(made, model="chat")
    assert isinstance(route, Route)
    assert (route.endpoint.id, route.target, route.shown) == ("e-b", "b", "chat")
    assert (request.model, request.target, request.target_model) == ("chat", "b", "b")
    route, request = arrive(made, 2, model="a")
    assert isinstance(route, Route)
    assert (route.endpoint.id, route.target, route.shown) == ("e-a", "", "")
    assert request.target_model == "a"


def test_a_target_for_requests_without_a_model_has_no_name_to_show() -> None:
    rule = RewriteRule((), (Target("b"),))
    rewrites = (InferenceModelRewrite(origin=Origin(namespace="n", name="all"), rules=(rule,)),)
    route, request = arrive(pipeline(rewrites=rewrites))
    assert isinstance(route, Route)
    assert (route.target, route.shown, request.rewritten_by) == ("b", "", "n/all")


def test_tokens_of_a_prompt_are_learned_for_the_target() -> None:
    made = pipeline(model("chat", "b"), model("a"))
    arrive(made, model="chat")
    made.handle(ev.UsageReported(1, Usage(prompt_tokens=96, completion_tokens=1)))
    assert (
        made.tokens.bytes_per_token("b") > made.tokens.bytes_per_token("chat") == TokenEstimator().bytes_per_token("")
    )


@pytest.mark.parametrize("api", ["responses", "responses_stored"])
def test_a_history_that_a_server_has_stored_does_not_tell_how_much_text_caches_hold(api: str) -> None:
    made = pipeline(model("a"))
    before = made.fleet.bytes_per_token
    request = Request(id=1, arrived=0.0, api=api, model="a", prefix=CHAIN, prompt_bytes=768, prompt_tokens=200)
    made.handle(ev.RequestArrived(request))
    made.handle(ev.UsageReported(1, Usage(prompt_tokens=50_000, completion_tokens=1)))
    assert (made.fleet.bytes_per_token < before) is (api == "responses")


def test_tiny_prompts_of_one_api_do_not_tell_how_much_text_of_another_caches_hold() -> None:
    """Each API has its own ratio, but the caches are shared."""
    made = pipeline()
    numbers = iter(range(1, 1_000))

    def reports(api: str, prompt_bytes: int, tokens: int) -> None:
        number = next(numbers)
        made.handle(ev.RequestArrived(Request(id=number, arrived=0.0, api=api, model="a", prompt_bytes=prompt_bytes)))
        made.handle(ev.UsageReported(number, Usage(prompt_tokens=tokens, completion_tokens=1)))

    for _ in range(30):
        reports("chat", 8_000, 2_000)
        for _ in range(10):
            reports("responses", 36, 39)
    assert made.fleet.bytes_per_token == pytest.approx(4.0, rel=0.2)


def test_the_size_of_an_answer_is_learned_where_its_tokens_are_reported_before_its_end() -> None:
    """A session reports the tokens, and the access log the size."""
    made = pipeline()
    for number, tokens in enumerate((10, 200, 1000), 1):
        _, request = arrive(made, number, model="a")
        made.handle(ev.UsageReported(number, Usage(prompt_tokens=200, completion_tokens=tokens)))
        made.handle(ev.ResponseEnded(request_id=number, status=200, response_bytes=700 + 5 * tokens))
    assert made.tokens.answer_tokens(request, 700 + 1500) == 300


def test_prompts_of_other_targets_share_no_prefix() -> None:
    made = pipeline(model("chat", "a", "b"))
    chains = {arrive(made, i, model="chat")[1].target_model: arrive(made, 100 + i, model="chat")[1] for i in range(30)}
    assert set(chains) == {"a", "b"}
    seen = {request.target: request.prefix for request in chains.values()}
    assert len({chain.hashes for chain in seen.values()} | {CHAIN.hashes}) == 1 + len(seen)
    assert all(chain.ends == CHAIN.ends for chain in seen.values())


def test_a_refusal_charges_nothing() -> None:
    made = pipeline(model("chat", criticality="Critical"))
    reject, request = arrive(made, model="nope")
    assert isinstance(reject, Reject)
    assert (reject.status, reject.reason, reject.param, reject.retry_after_s) == (404, "model_not_found", "model", -1.0)
    assert len(made.fleet.ledger) == 0
    assert request.model == "nope"


def test_a_name_that_no_endpoint_ever_had_does_not_exist() -> None:
    made = pipeline()
    reject, request = arrive(made, model="typo")
    assert isinstance(reject, Reject)
    assert (reject.status, reject.reason, reject.param, reject.retry_after_s) == (404, "model_not_found", "model", -1.0)
    assert reject.message == "The model `typo` does not exist."
    assert request.model == "typo"
    made.handle(ev.EndpointUp(Endpoint("e-c", "10.0.0.1:99")))
    assert isinstance(arrive(made, 2, model="typo")[0], Route), "the one without a label may have it"


def test_a_name_without_an_endpoint_now_may_be_tried_again() -> None:
    departed = pipeline()
    departed.handle(ev.EndpointDown("e-b"))
    for made, name in ((departed, "b"), (pipeline(model("c")), "c"), (pipeline(model("chat", "c")), "chat")):
        reject, _ = arrive(made, model=name)
        assert isinstance(reject, Reject)
        assert (reject.status, reject.param, reject.retry_after_s) == (503, None, 1.0), name


PLAIN = Endpoint("e-x", "10.0.0.9:1", {"model-id": "a"})
PROMISING = replace(PLAIN, labels={"model-id": "a", "lora-adapters": "critic, sql"})


@pytest.mark.parametrize(
    "shown",
    [
        [ev.EndpointUp(PLAIN), ev.AdaptersListed("e-x", frozenset({"sql"}))],
        [ev.EndpointUp(PLAIN), ev.MetricsSampled("e-x", 0.0, Sample(adapters=frozenset({"sql"})))],
        [ev.EndpointUp(PROMISING)],
        [ev.EndpointUp(PLAIN), ev.EndpointUp(PROMISING)],
    ],
    ids=["listed", "running", "promised", "promised later"],
)
def test_an_adapter_whose_endpoints_are_away_may_be_tried_again(shown: list[ev.Event]) -> None:
    made = pipeline()
    for event in (*shown, ev.EndpointDown("e-x")):
        made.handle(event)
    reject, _ = arrive(made, model="sql")
    assert isinstance(reject, Reject)
    assert (reject.status, reject.retry_after_s) == (503, 1.0)


def test_priority() -> None:
    assert arrive(pipeline(model("a", criticality="Sheddable")), model="a")[1].priority == -10


def test_definitions_replace_each_other() -> None:
    made = pipeline(model("chat", "a"))
    made.handle(ev.ModelsChanged(ModelSet((model("chat", "b"),))))
    assert arrive(made, model="chat")[1].target == "b"
    made.handle(ev.ModelsChanged(ModelSet()))
    assert arrive(made, 2, model="anything")[1].target == ""


def test_the_same_events_give_the_same_targets() -> None:
    def targets() -> list[str]:
        made = pipeline(model("chat", "a", "b"))
        return [arrive(made, i, model="chat")[1].target for i in range(40)]

    assert targets() == targets()


def answered(made: Pipeline, number: int, status: int, name: str) -> list[Instruction]:
    """What follows from this answer to a request for the model `name`."""
    arrive(made, number, model=name)
    return made.handle(ev.ResponseEnded(request_id=number, status=status))


def test_a_404_has_the_list_of_adapters_read_again_and_changes_nothing_before() -> None:
    made = pipeline()
    for name in ("e-a", "e-b"):
        made.handle(ev.AdaptersListed(name, frozenset({"poet", "critic"})))
    assert [type(told) for told in answered(made, 1, 200, "poet")] == [OutcomeRecord]
    record, asked = answered(made, 2, 404, "poet")
    assert isinstance(record, Record) and asked == ListAdapters("e-b")
    assert made.fleet.table.listed == [frozenset({"poet", "critic"})] * 2, "the path may be unknown, not the adapter"
    made.handle(ev.AdaptersListed("e-b", frozenset({"critic"})))
    assert [arrive(made, number, model="poet")[0].endpoint.id for number in (3, 4)] == ["e-a", "e-a"]  # type: ignore[union-attr]
    made.handle(ev.AdaptersListed("e-b", frozenset({"poet"})))
    assert {arrive(made, number, model="poet")[0].endpoint.id for number in (5, 6)} == {"e-a", "e-b"}  # type: ignore[union-attr]


def test_a_404_for_the_base_model_is_no_matter_of_adapters() -> None:
    made = pipeline()
    assert [type(told) for told in answered(made, 1, 404, "a")] == [OutcomeRecord]
    assert [type(told) for told in answered(made, 2, 404, "")] == [OutcomeRecord]


def objective(name: str, priority: int = 0, **latency: float) -> InferenceObjective:
    return InferenceObjective(origin=Origin(namespace="n", name=name), priority=priority, latency=Latency(**latency))


def test_a_latency_is_the_header_s_else_the_objective_s_else_the_model_s() -> None:
    made = pipeline()
    chat = replace(model("chat"), latency=Latency(800.0, 60.0))
    urgent, batch = objective("urgent", 5, ttft_ms=200.0), objective("batch", -5)
    made.handle(ev.ModelsChanged(ModelSet((chat, model("a")), (urgent, batch))))

    def latency(number: int, **fields: Any) -> tuple[float, float]:
        request = arrive(made, number, **fields)[1]
        return request.slo_ttft_ms, request.slo_tpot_ms

    assert latency(1, model="chat") == (800.0, 60.0)
    assert latency(2, model="a") == (0.0, 0.0)
    assert latency(3, model="chat", objective="urgent") == (200.0, 0.0)
    assert latency(4, model="chat", objective="batch") == (800.0, 60.0)
    assert latency(5, model="a", objective="urgent", slo_ttft_ms=90.0) == (90.0, 0.0)


@pytest.mark.parametrize(("status", "cached"), [(200, True), (400, False), (503, True)])
def test_a_prompt_that_its_server_refused_is_not_cached_there(status: int, cached: bool) -> None:
    made = pipeline()
    _, request = arrive(made, model="b")
    made.handle(ev.ResponseEnded(request_id=1, status=status))
    assert (made.fleet.match(request) is not None) == cached


@pytest.mark.parametrize("event", [ev.StreamLost(1), ev.ResponseEnded(request_id=1, client_gone=True)])
@pytest.mark.parametrize(("after_s", "cached"), [(0.001, False), (30.0, True)])
def test_a_prompt_is_cached_if_its_client_left_late_enough(event: ev.Event, after_s: float, cached: bool) -> None:
    clock = SimClock()
    made = pipeline(clock=clock)
    _, request = arrive(made, model="b", stream=True)
    clock.advance(after_s)
    made.handle(event)
    assert (made.fleet.match(request) is not None) == cached


def test_a_prompt_whose_client_left_after_its_first_token_is_cached() -> None:
    made = pipeline()
    _, request = arrive(made, model="b", stream=True)
    made.handle(ev.FirstTokenSeen(1))
    made.handle(ev.ResponseEnded(request_id=1, client_gone=True))
    assert made.fleet.match(request) is not None


@pytest.mark.parametrize("status", [408, 429, 499])
def test_a_prompt_is_cached_where_tokens_came_before_the_error(status: int) -> None:
    """As of a gRPC call whose deadline ended it. It says nothing good about the endpoint either."""
    made = pipeline()
    _, request = arrive(made, model="b", stream=True)
    slot = next(iter(made.fleet.ledger)).slot
    made.fleet.table.errors[slot] = 2.0
    made.fleet.table.judge_trouble()
    made.handle(ev.FirstTokenSeen(1))
    made.handle(ev.ResponseEnded(request_id=1, status=status))
    assert made.fleet.match(request) is not None
    assert made.fleet.table.errors[slot] == (0.0 if status == 429 else 2.0)
