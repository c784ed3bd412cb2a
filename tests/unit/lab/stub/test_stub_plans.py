"""What requests ask for: fields, limits, refusals; and no JSON does harm."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead.lab.engine import tokens as tk
from fairlead.lab.engine.spec import EngineSpec, LatencyModel
from fairlead.lab.stub.config import StubConfig
from fairlead.lab.stub.fields import ApiError, parse_body
from fairlead.lab.stub.plans import Models, Plan, plan_chat, plan_completion

_CONFIG = StubConfig(
    engine=EngineSpec(latency=LatencyModel(1.0), num_blocks=100, max_model_len=1000), model="base", vocab_size=5000
)
_MODELS = Models("base", ("tuned",), 0)


def _plan(chat: bool = False, **body: object) -> Plan:
    make = plan_chat if chat else plan_completion
    default = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
    return make(default | body, _MODELS, _CONFIG)


def test_defaults_are_those_of_the_api():
    plan = _plan()
    assert (plan.max_tokens, plan.n, plan.stream, plan.stops, plan.lora) == ([16], 1, False, False, "")
    chat = _plan(chat=True)
    assert chat.max_tokens == [1000 - len(chat.prompts[0]) // 4]
    assert chat.stops
    assert not _plan(chat=True, ignore_eos=True).stops


def test_output_is_clamped_to_the_context():
    plan = _plan(prompt=["x" * 3200, "x" * 400], max_tokens=500)
    assert plan.max_tokens == [200, 500]


def test_max_completion_tokens_goes_before_max_tokens():
    assert _plan(chat=True, max_tokens=5, max_completion_tokens=7).max_tokens == [7]
    assert _plan(chat=True, max_tokens=5).max_tokens == [5]


def test_an_adapter_is_a_model_name():
    plan = _plan(model="tuned")
    assert (plan.model, plan.lora) == ("tuned", "tuned")
    assert _plan(model="").model == "base"
    assert plan.seed(0, 0) != _plan(model="base").seed(0, 0)


def test_seeds_differ_by_prompt_and_choice_and_not_by_request():
    plan = _plan(prompt=["a", "b"], n=2)
    seeds = [plan.seed(p, c) for p in (0, 1) for c in (0, 1)]
    assert len(set(seeds)) == 4
    assert _plan(prompt=["a", "b"], n=2).seed(1, 1) == seeds[3]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"n": 0}, 400, "n"),
        ({"n": 5000}, 400, "n"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 1.5}, 400, "body.max_tokens"),
        ({"max_tokens": []}, 400, "body.max_tokens"),
        ({"stream": "maybe"}, 400, "body.stream"),
        ({"temperature": "hot"}, 400, "body.temperature"),
        ({"temperature": math.nan}, 400, "temperature"),
        ({"temperature": -0.1}, 400, "temperature"),
        ({"model": 5}, 400, "body.model"),
        ({"model": "other"}, 404, "model"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [1, "a"]}, 400, "prompt"),
        ({"prompt": [[1], []]}, 400, "prompt"),
        ({"prompt": {}}, 400, "prompt"),
        ({"prompt": [5000]}, 400, None),
        ({"prompt": [-1]}, 400, None),
        ({"prompt": [1] * 1000}, 400, "input_tokens"),
        ({"stream_options": {}}, 400, "stream_options"),
        ({"stream": True, "stream_options": 3}, 400, "body.stream_options"),
        ({"cache_salt": 3}, 400, "body.cache_salt"),
    ],
)
def test_wrong_values_are_refused_with_their_name(body, status, param):
    with pytest.raises(ApiError) as caught:
        _plan(**body)
    assert (caught.value.status, caught.value.param) == (status, param)
    assert json.loads(caught.value.body())["error"]["code"] == status


@pytest.mark.parametrize(
    "messages", [[], "hi", [{}], [{"role": 5}], ["hi"], [{"role": "user", "content": [5]}], [None], 7]
)
def test_what_is_no_conversation_is_refused(messages):
    with pytest.raises(ApiError) as caught:
        _plan(chat=True, messages=messages)
    assert caught.value.status == 400


def test_coercions_are_those_of_the_real_server():
    plan = _plan(max_tokens="12", n=1.0, stream="true", stream_options={"include_usage": 1})
    assert (plan.max_tokens, plan.n, plan.stream, plan.include_usage) == ([12], 1, True, True)


def test_a_longer_conversation_begins_with_the_shorter_one():
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what?"}]
    short = _plan(chat=True, messages=turns).prompts[0]
    answer = tk.output(5, 0, 9)
    turns += [{"role": "assistant", "content": answer.decode().strip()}, {"role": "user", "content": "and?"}]
    long = _plan(chat=True, messages=turns).prompts[0]
    assert long.startswith(short + answer)
    assert len(long) % tk.TOKEN_BYTES == 0


def test_tools_and_parts_are_part_of_the_prompt():
    plain = _plan(chat=True).prompts[0]
    assert _plan(chat=True, tools=[{"type": "function"}]).prompts[0] != plain
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert _plan(chat=True, messages=[{"role": "user", "content": parts}]).prompts[0] == plain
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    assert _plan(chat=True, messages=[{"role": "user", "content": image}]).prompts[0] != plain


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
_NAMES = [
    *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "n", "stream", "stream_options", "echo"),
    *("temperature", "seed", "ignore_eos", "return_token_ids", "cache_salt", "request_id", "tools"),
]
_MESSAGE = st.fixed_dictionaries({"role": st.text(max_size=4), "content": _JSON}, optional={"tool_calls": _JSON})


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(st.sampled_from(_NAMES), _JSON, max_size=6),
    st.one_of(st.none(), st.lists(_MESSAGE, max_size=3)),
    st.booleans(),
)
def test_no_json_does_harm(body, messages, chat):
    if messages is not None:
        body["messages"] = messages
    raw = json.dumps(body).encode()
    plan, refusal = None, None
    try:
        plan = (plan_chat if chat else plan_completion)(parse_body(raw, "application/json"), _MODELS, _CONFIG)
    except ApiError as error:
        refusal = error
    if refusal is not None:
        assert refusal.status in (400, 404)
        assert json.loads(refusal.body())
        assert refusal.event().startswith(b'data: {"error"')
    else:
        assert plan is not None
        assert all(limit >= 1 for limit in plan.max_tokens)
        assert all(prompt and len(prompt) % 4 == 0 for prompt in plan.prompts)
        plan.seed(0, 0)
        tk.root_hash(plan.lora, plan.salt)


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_no_body_does_harm(raw):
    answer: object = None
    try:
        answer = parse_body(raw, "application/json; charset=utf-8")
    except ApiError as error:
        answer = json.loads(error.body())["error"]
    assert isinstance(answer, dict)


@pytest.mark.parametrize("raw", [b"[" * 100_000, b'{"a":' * 100_000, b"-" + b"9" * 5000, b"\xff", b"", b"[]", b"3"])
def test_extreme_bodies_are_refused(raw):
    with pytest.raises(ApiError):
        parse_body(raw, "application/json")


@pytest.mark.parametrize("kind", ["", "text/plain", "application/jsonx", "multipart/form-data"])
def test_other_content_types_are_refused(kind):
    with pytest.raises(ApiError, match="Unsupported Media Type"):
        parse_body(b"{}", kind)
