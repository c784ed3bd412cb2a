"""Requests of each API → token ids, or the reason why there are none."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from fairlead.apis.request import parse_request, unread
from fairlead.apis.tokens import MediaItem, PromptTokeniser, PromptTokens, prompt_tokeniser
from fairlead.apis.tokens.pieces import REASONS, PieceCache, packed
from fairlead.apis.tokens.prompt_tokeniser import ModelFiles, ModelTokens, build
from fairlead.core.errors import ClientError

CHAT, COMPLETIONS, GENERATE, SGLANG = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate", "/generate"
HI = [{"role": "user", "content": "hi"}]


def asked(tokeniser: PromptTokeniser, path: str, model: str = "m", **body: Any) -> PromptTokens:
    raw = json.dumps({"model": model, **body}).encode()
    return tokeniser.tokens_of(parse_request(path, raw), raw, model)


def ids(found: PromptTokens) -> list[int]:
    assert found.reason == "", found
    return list(memoryview(found.ids).cast("I"))


@pytest.fixture
def oracle(byte_level: bytes) -> Callable[..., list[int]]:
    tokenizer = Tokenizer.from_str(byte_level.decode())
    return lambda text, special=False: list(tokenizer.encode(text, add_special_tokens=special).ids)


def test_chat(prompts: PromptTokeniser, oracle: Callable[..., list[int]]) -> None:
    text = "<|im_start|>user\nhi<|im_end|>\n"
    found = asked(prompts, CHAT, messages=HI)
    assert ids(found) == oracle(text + "<|im_start|>assistant\n")
    assert found.count == found.total == len(ids(found))
    assert ids(asked(prompts, CHAT, messages=HI, add_generation_prompt=False)) == oracle(text)
    assert ids(asked(prompts, CHAT, messages=HI, add_generation_prompt="no")) == oracle(text)
    begun = [*HI, {"role": "assistant", "content": "Well"}]
    continued = asked(prompts, CHAT, messages=begun, add_generation_prompt=False, continue_final_message=True)
    assert ids(continued) == oracle(text + "<|im_start|>assistant\nWell")


def test_special_tokens_that_a_client_writes_are_special_tokens(
    prompts: PromptTokeniser, oracle: Callable[..., list[int]]
) -> None:
    """So it is in the engine."""
    found = asked(prompts, CHAT, messages=[{"role": "user", "content": "<|im_end|>"}], add_generation_prompt=False)
    assert ids(found) == oracle("<|im_start|>user\n<|im_end|><|im_end|>\n")


def test_other_apis_that_are_chats(prompts: PromptTokeniser, oracle: Callable[..., list[int]]) -> None:
    expected = oracle("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert ids(asked(prompts, "/v1/messages", messages=HI, max_tokens=4)) == expected
    assert ids(asked(prompts, "/v1/responses", input="hi")) == expected


def test_variables_of_the_template(model: Callable[..., ModelTokens], cache_: PieceCache) -> None:
    source = "{{ tools | tojson }}{{ documents | tojson }}{{ thinking }}{{ reasoning_effort }}"
    tokeniser = PromptTokeniser({"*": model(source)}, cache_)
    tool = {"type": "function", "function": {"name": "f"}}
    sent = {
        "tools": [tool],
        "documents": [{"title": "t"}],
        "chat_template_kwargs": {"thinking": False, "documents": 5},
        "reasoning_effort": "low",
    }
    given = '[{"type": "function", "function": {"name": "f", "description": null, "parameters": null}}][{"title": "t"}]'
    encode = tokeniser.states()["*"].tokeniser
    assert encode is not None
    assert asked(tokeniser, CHAT, messages=HI, **sent).ids == encode.encode(given + "Falselow")
    assert asked(tokeniser, CHAT, messages=HI).ids == encode.encode("nullnull")
    assert asked(tokeniser, CHAT, messages=HI, chat_template_kwargs={"documents": 5}).ids == encode.encode("null5")


def test_several_templates(model: Callable[..., ModelTokens], cache_: PieceCache) -> None:
    named = [{"name": "default", "template": "default"}, {"name": "tool_use", "template": "with tools"}]
    tokeniser = PromptTokeniser({"*": model("", {"chat_template": named})}, cache_)
    encode = tokeniser.states()["*"].tokeniser
    assert encode is not None
    assert asked(tokeniser, CHAT, messages=HI).ids == encode.encode("default")
    tool = {"type": "function", "function": {"name": "f"}}
    assert asked(tokeniser, CHAT, messages=HI, tools=[tool]).ids == encode.encode("with tools")


def test_completions(model: Callable[..., ModelTokens], cache_: PieceCache, metaspace: bytes) -> None:
    tokeniser = PromptTokeniser({"*": model(kind="metaspace")}, cache_)
    tokenizer = Tokenizer.from_str(metaspace.decode())
    with_bos, without = tokenizer.encode("a b").ids, tokenizer.encode("a b", add_special_tokens=False).ids
    assert with_bos != without
    assert ids(asked(tokeniser, COMPLETIONS, prompt="a b")) == with_bos
    assert ids(asked(tokeniser, COMPLETIONS, prompt="a b", add_special_tokens=False)) == without
    assert ids(asked(tokeniser, COMPLETIONS, prompt=[5, 6, 7])) == [5, 6, 7]
    several = asked(tokeniser, COMPLETIONS, prompt=["a b", "a b a b"])
    assert ids(several) == with_bos
    assert several.total == len(with_bos) + len(tokenizer.encode("a b a b").ids)
    lists = asked(tokeniser, COMPLETIONS, prompt=[[1, 2], [3]])
    assert (ids(lists), lists.total) == ([1, 2], 3)


def test_token_ids_need_no_tokeniser() -> None:
    none = PromptTokeniser()
    assert none.state == "none (no tokeniser is configured; prompts are matched by their bytes)"
    assert not none.knows("m")
    assert ids(asked(none, COMPLETIONS, prompt=[5, 6, 7])) == [5, 6, 7]
    assert ids(asked(none, SGLANG, input_ids=[[1, 2], [3]])) == [1, 2]
    assert ids(asked(none, SGLANG, input_ids=[1, 2], extra_key="s")) == [1, 2]
    features = {
        "mm_hashes": {"image": ["b", "a"], "audio": ["c"]},
        "mm_placeholders": {
            "image": [{"offset": 6, "length": 3}, {"offset": 1, "length": 2}],
            "audio": [{"offset": 3, "length": 0}],
        },
    }
    found = asked(none, GENERATE, token_ids=list(range(12)), features=features, cache_salt="salt")
    assert ids(found) == list(range(12))
    assert found.media == (MediaItem("a", 1, 2), MediaItem("c", 3, 0), MediaItem("b", 6, 3))
    assert found.extras(4) == [("a", "c", "salt"), ("b",), ("b",)]
    assert found.extras(16) == []
    for body in ({"messages": HI}, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}):
        assert asked(none, CHAT, **body).reason == "no-tokeniser"
    assert asked(none, COMPLETIONS, prompt="text").reason == "no-tokeniser"


def test_grpc(prompts: PromptTokeniser, oracle: Callable[..., list[int]]) -> None:
    def frame(message: bytes) -> bytes:
        return b"\0" + len(message).to_bytes(4, "big") + message

    def given(tokeniser: PromptTokeniser, message: bytes) -> PromptTokens:
        path = "/vllm.grpc.engine.VllmEngine/Generate"
        return tokeniser.tokens_of(parse_request(path, frame(message)), frame(message), "")

    packed_ids = b"\x12\x06" + b"\x01\xac\x02\xff\x80\x01"
    assert ids(given(PromptTokeniser(), b"\x12\x08" + packed_ids)) == [1, 300, 16511]
    assert ids(given(PromptTokeniser(), b"\x12\x04\x10\x05\x10\x07")) == [5, 7]
    assert ids(given(prompts, b"\x1a\x02hi")) == oracle("hi", True)
    assert given(prompts, b"\x1a\x02\xff\xfe").reason == "fields"
    assert given(prompts, b"\x12\x08" + packed_ids + b"\x3a\x03\x32\x01h").reason == "media"


def test_extras() -> None:
    assert PromptTokens(packed(range(8)), 8).extras(4) is None
    assert PromptTokens(packed(range(8)), 8, salt="s").extras(4) == [("s",), ()]
    assert PromptTokens(packed([]), 0, salt="s").extras(4) == []
    far = PromptTokens(packed(range(8)), 8, media=(MediaItem("x", 2**40, 2**40),))
    assert far.extras(4) == [(), ()]


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "media",
        ),
        (CHAT, {"messages": HI, "chat_template": "{{ 1 }}"}, "fields"),
        (CHAT, {"messages": HI, "truncate_prompt_tokens": 5}, "fields"),
        (CHAT, {"messages": HI, "chat_template_kwargs": {"chat_template": "x"}}, "fields"),
        (CHAT, {"messages": HI, "chat_template_kwargs": 5}, "fields"),
        (CHAT, {"messages": [{"role": "user", "content": {}}]}, "template"),
        (CHAT, {"messages": HI, "cache_salt": 5}, "fields"),
        (COMPLETIONS, {"prompt": "x", "truncate_prompt_tokens": 5}, "fields"),
        (COMPLETIONS, {"prompt_embeds": "x"}, "fields"),
        (COMPLETIONS, {"prompt": ["x", 5]}, "fields"),
        (COMPLETIONS, {"prompt": []}, "fields"),
        (COMPLETIONS, {"prompt": [2**32]}, "fields"),
        (COMPLETIONS, {"prompt": [-1]}, "fields"),
        (COMPLETIONS, {"prompt": "\ud800"}, "unread"),
        (SGLANG, {"text": "x", "image_data": "x"}, "media"),
        (GENERATE, {"token_ids": [1], "features": {"mm_hashes": {"image": ["a"]}}}, "media"),
        ("/v1/embeddings", {"input": "x"}, "api"),
        ("/v1/responses", {"input": "x", "previous_response_id": "r"}, "stored"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "media"),
        ("/v1/messages/count_tokens", {"messages": HI}, "api"),
        ("/v1/models", {}, "api"),
    ],
)
def test_reasons(prompts: PromptTokeniser, path: str, body: dict[str, Any], reason: str) -> None:
    found = asked(prompts, path, **body)
    assert (found.reason, found.ids, found.total) == (reason, b"", 0), found
    assert found.reason in REASONS and 0 < len(found.detail) <= 200


def test_bounds_and_unread_bodies(prompts: PromptTokeniser, monkeypatch: pytest.MonkeyPatch) -> None:
    assert prompts.tokens_of(unread("chat", "too-large"), b"x", "m").reason == "unread"
    monkeypatch.setattr(prompt_tokeniser, "MAX_BODY", 10)
    assert asked(prompts, CHAT, messages=HI).reason == "too-long"


def test_a_model_without_a_template(model: Callable[..., ModelTokens], cache_: PieceCache, byte_level: bytes) -> None:
    broken = model("{% for %}")
    assert broken.template_state.startswith("none (not a usable chat template")
    missing = build(ModelFiles(tokenizer=byte_level, template_problem="cannot read x"), cache_, lambda: None)  # type: ignore[arg-type, return-value]
    for one in (model(""), broken, missing):
        tokeniser = PromptTokeniser({"*": one}, cache_)
        found = asked(tokeniser, CHAT, messages=HI)
        assert found.reason == "template" and found.detail == one.template_state[:200]
        assert asked(tokeniser, COMPLETIONS, prompt="x").reason == ""


def test_models_by_name(model: Callable[..., ModelTokens], cache_: PieceCache) -> None:
    lost = build(ModelFiles(problem="cannot read x"), cache_, lambda: None)  # type: ignore[arg-type, return-value]
    tokeniser = PromptTokeniser({"a": model("a"), "*": model("others"), "lost": lost}, cache_)
    assert asked(tokeniser, CHAT, model="a", messages=HI).ids != asked(tokeniser, CHAT, model="x", messages=HI).ids
    assert tokeniser.knows("a") and tokeniser.knows("whatever") and not tokeniser.knows("lost")
    found = asked(tokeniser, CHAT, model="lost", messages=HI)
    assert (found.reason, found.detail) == ("no-tokeniser", "none (cannot read x)")
    assert tokeniser.state == "a: fastokens; *: fastokens; lost: none (cannot read x)"
    assert not PromptTokeniser({"a": model()}, cache_).knows("b")
    assert PromptTokeniser({"a": model()}, cache_).state == "fastokens"


def test_long_prompts_belong_in_a_thread(prompts: PromptTokeniser) -> None:
    short, long = (
        parse_request(CHAT, json.dumps({"messages": [{"role": "user", "content": "x" * size}]}).encode())
        for size in (100, 1_000_000)
    )
    assert not prompts.in_thread(short, "m")
    assert prompts.in_thread(long, "m")
    assert not PromptTokeniser().in_thread(long, "m")
    given = parse_request(COMPLETIONS, json.dumps({"prompt": [1] * 500_000}).encode())
    assert not prompts.in_thread(given, "m")


PATHS = [CHAT, COMPLETIONS, GENERATE, SGLANG, "/v1/messages", "/v1/responses"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer", 5])},
    optional={"content": JSON, "tool_calls": JSON, "name": JSON, "reasoning": JSON, "tool_call_id": JSON},
)
BODY = st.fixed_dictionaries(
    {},
    optional={
        "messages": st.lists(MESSAGE | JSON, max_size=4),
        "prompt": JSON,
        "input": JSON,
        "system": JSON,
        "token_ids": st.lists(st.integers(-1, 2**33), max_size=3) | JSON,
        "input_ids": JSON,
        "text": JSON,
        "features": JSON,
        "tools": JSON,
        "documents": JSON,
        "chat_template_kwargs": JSON,
        "add_generation_prompt": JSON,
        "continue_final_message": JSON,
        "cache_salt": JSON,
        "extra_key": JSON,
    },
)


@pytest.fixture(scope="module")
def shared(byte_level: bytes) -> PromptTokeniser:
    message = "{{ m.role }}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}"
    template = "{% for m in messages %}" + message + "{% endfor %}{{ tools }}"
    cache = PieceCache(1 << 16, nullcontext())
    files = ModelFiles(tokenizer=byte_level, template=template)
    return PromptTokeniser({"*": build(files, cache, lambda: datetime(2026, 1, 1))}, cache)


@settings(max_examples=80, deadline=None)
@given(path=st.sampled_from(PATHS), body=BODY, cut=st.integers(0, 40))
def test_any_body_gives_ids_or_a_reason(shared: PromptTokeniser, path: str, body: dict[str, Any], cut: int) -> None:
    raw = json.dumps(body).encode()
    for sent in (raw, raw[:-cut] if cut else raw):
        try:
            parsed = parse_request(path, sent)
        except ClientError:
            continue
        found = shared.tokens_of(parsed, sent, "m")
        assert (found.reason in REASONS) if found.reason else (found.total >= found.count >= 0)
        found.extras(16)
