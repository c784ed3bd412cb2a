"""Anthropic's and the Responses API become the chats that vLLM makes of them."""

import json
from typing import Any

import pytest

from fairlead.apis.tokens.chats import from_messages, from_responses
from fairlead.apis.tokens.pieces import Absent

HI = {"role": "user", "content": "hi"}


def anthropic(*messages: Any, **more: Any) -> list[Any]:
    return from_messages(json.dumps({"model": "m", "messages": messages, **more}).encode()).messages


def responses(**body: Any) -> list[Any]:
    return from_responses(json.dumps(body).encode()).messages


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


def test_texts_and_system() -> None:
    assert anthropic(HI) == [HI]
    assert anthropic(HI, system="Be brief.") == [{"role": "system", "content": "Be brief."}, HI]
    blocks = [{**text("x-anthropic-billing-header: cch=1;")}, {**text("Be "), "cache_control": {}}, text("brief.")]
    assert anthropic(HI, system=blocks) == [{"role": "system", "content": "Be brief."}, HI]
    assert anthropic({"role": "user", "content": [text("hi")]}) == [HI]
    two = {"role": "user", "content": [text("a"), text("b"), text("")]}
    assert anthropic(two) == [{"role": "user", "content": [text("a"), text("b")]}]
    assert anthropic(HI, {"role": "user", "content": [text("")]}) == [HI]


def test_tools() -> None:
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}}
    asked = {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, call]}
    answered = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "2"}, text("so?")]}
    function = {"arguments": '{"x": 1}', "name": "f"}
    assert anthropic(asked, answered) == [
        {
            "role": "assistant",
            "content": None,
            "reasoning": "hm",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "2"},
        {"role": "user", "content": "so?"},
    ]
    only = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [text("2")]}]}
    assert anthropic(only) == [{"role": "tool", "tool_call_id": "1", "content": "2"}]
    body = {"messages": [HI], "tools": [{"name": "f", "input_schema": {"a": 1}}], "cache_salt": "s"}
    fields = from_messages(json.dumps(body).encode())
    named = {"name": "f", "description": None, "parameters": {"a": 1}}
    assert (fields.tools, fields.cache_salt) == ([{"type": "function", "function": named}], "s")


def test_responses() -> None:
    assert responses(input="hi", instructions="Be brief.") == [{"role": "system", "content": "Be brief."}, HI]
    parts = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
    assert responses(input=[HI, parts]) == [HI, parts]
    fields = from_responses(b'{"input": "hi"}')
    assert fields.add_special_tokens and fields.add_generation_prompt and not fields.continue_final_message


def test_what_an_assistant_thought_called_and_said_is_one_message() -> None:
    def call(number: str) -> dict[str, str]:
        return {"type": "function_call", "call_id": number, "name": "f", "arguments": "{}"}

    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}], "summary": []}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": t} for t in "ab"]}
    told = {"type": "function_call_output", "call_id": "1", "output": "2"}
    function = {"name": "f", "arguments": "{}"}
    calls = [{"id": number, "function": function, "type": "function"} for number in "12"]
    assert responses(input=[HI, thought, said, call("1"), call("2"), told, said, said]) == [
        HI,
        {"role": "assistant", "reasoning": "hm", "content": "a", "tool_calls": calls},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "a"},
    ]
    fields = from_responses(json.dumps({"input": [HI, {**said, "status": "incomplete"}]}).encode())
    assert fields.continue_final_message and not fields.add_generation_prompt


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"input": "hi", "previous_response_id": "r"}, "stored"),
        ({"input": "hi", "conversation": "c"}, "stored"),
        ({"prompt": {"id": "p"}}, "stored"),
        ({"input": "hi", "tools": [{"type": "web_search"}]}, "fields"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x", "summary": []}]}, "fields"),
        ({"input": [{"type": "function_call", "namespace": "n", "name": "f"}]}, "fields"),
        ({"input": [{"type": "message", "role": "assistant", "content": [{"type": "refusal"}]}]}, "fields"),
        ({"input": [{"type": "message"}]}, "fields"),
        ({"input": [{"type": "function_call_output"}]}, "fields"),
        ({"input": [5]}, "fields"),
        ({}, "fields"),
        ({"input": 5}, "fields"),
    ],
)
def test_responses_that_only_the_engine_knows(body: dict[str, Any], reason: str) -> None:
    with pytest.raises(Absent) as caught:
        responses(**body)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([{"type": "image", "source": {}}], "media"),
        ([5], "fields"),
        ([{"type": "tool_result", "content": [text("a"), text("b")]}], "fields"),
        ([{"type": "tool_result"}], "fields"),
        ([{"type": "tool_result", "content": [{"type": "image"}]}], "media"),
    ],
)
def test_messages_that_only_the_engine_knows(content: Any, reason: str) -> None:
    with pytest.raises(Absent) as caught:
        anthropic({"role": "user", "content": content})
    assert caught.value.reason == reason


def test_other_bodies() -> None:
    for body in (b"{", b"{}", b'{"messages": 5}', b'{"messages": [5]}', b'{"messages": [], "tools": [5]}'):
        with pytest.raises(Absent):
            from_messages(body)
