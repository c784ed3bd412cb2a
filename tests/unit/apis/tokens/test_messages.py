"""Messages and tools as templates get them: the forms that vLLM 0.32 makes of them."""

from typing import Any

import pytest

from fairlead.apis.tokens.chats import for_template, tools_for_template
from fairlead.apis.tokens.pieces import Absent

TEXT = {"type": "text", "text": "a"}


@pytest.mark.parametrize(
    ("content", "string", "parts"),
    [
        ("a", "a", [TEXT]),
        ("", "", [{"type": "text", "text": ""}]),
        (None, "", []),
        ([TEXT, {"type": "text", "text": "b"}], "a\nb", [TEXT, {"type": "text", "text": "b"}]),
        (["a", {"type": "input_text", "text": "b"}], "a\nb", [TEXT, {"type": "text", "text": "b"}]),
        ([TEXT, {"type": "text", "text": ""}], "a", [TEXT, {"type": "text", "text": ""}]),
        ([{"type": "refusal", "refusal": "no"}], "no", [{"type": "text", "text": "no"}]),
        ([{**TEXT, "cache": 1}], "a", [{**TEXT, "cache": 1}]),
    ],
)
def test_content(content: Any, string: str, parts: list[Any]) -> None:
    assert for_template([{"role": "user", "content": content}], "string") == [{"role": "user", "content": string}]
    assert for_template([{"role": "user", "content": content}], "openai") == [{"role": "user", "content": parts}]


def test_an_assistant_that_calls_tools() -> None:
    def call(arguments: Any) -> dict[str, Any]:
        return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}

    def arguments_of(sent: Any) -> Any:
        message = {"role": "assistant", "content": None, "tool_calls": [call(sent)], "reasoning": "hm", "extra": 1}
        (made,) = for_template([message], "string")
        assert made["content"] == "" and made["reasoning"] == made["reasoning_content"] == "hm"
        assert "extra" not in made
        return made["tool_calls"][0]["function"]["arguments"]

    assert arguments_of('{"x": [1, "ü"]}') == {"x": [1, "ü"]}
    assert arguments_of({"x": 1}) == {"x": 1}
    assert [arguments_of(sent) for sent in ("", None, "[1]", "{", 5, "[" * 100_000)] == [{}] * 6
    assert for_template([{"role": "assistant", "content": "a", "tool_calls": []}], "string") == [
        {"role": "assistant", "content": "a"}
    ]


def test_other_roles() -> None:
    tool = {"role": "tool", "tool_call_id": "1", "content": [TEXT, TEXT], "name": "f"}
    for form in ("string", "openai"):
        assert for_template([tool], form) == [{"role": "tool", "content": "a\na", "tool_call_id": "1", "name": "f"}]
    assert for_template([{"role": "developer", "content": "a"}], "string")[0]["tools"] is None
    system = {"role": "system", "content": [{"type": "text", "text": "x-anthropic-billing-header: cch=1"}, TEXT]}
    assert for_template([system], "string") == [{"role": "system", "content": "a"}]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("hi", "template"),
        ({}, "template"),
        ({"role": 1}, "template"),
        ({"role": "user", "content": 5}, "template"),
        ({"role": "user", "content": [5]}, "template"),
        ({"role": "user", "content": [{"type": "text"}]}, "template"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "media"),
        ({"role": "user", "content": [{"image_url": "x"}]}, "media"),
        ({"role": "user", "content": [{"type": ["text"]}]}, "media"),
        ({"role": "assistant", "tool_calls": 5}, "template"),
        ({"role": "assistant", "tool_calls": [5]}, "fields"),
        ({"role": "assistant", "tool_calls": [{"type": "custom"}]}, "fields"),
    ],
)
def test_what_cannot_be_translated(message: Any, reason: str) -> None:
    for form in ("string", "openai"):
        with pytest.raises(Absent) as caught:
            for_template([message], form)
        assert caught.value.reason == reason


def test_tools_have_all_fields_in_order() -> None:
    made = tools_for_template([{"function": {"parameters": {"b": 1, "a": 2}, "name": "f", "strict": True}}])
    assert made is not None
    assert str(made[0]) == str(
        {
            "type": "function",
            "function": {"name": "f", "description": None, "parameters": {"b": 1, "a": 2}, "strict": True},
        }
    )
    assert tools_for_template(None) is None and tools_for_template([]) == []


@pytest.mark.parametrize("tools", [5, [5], [{}], [{"type": "web", "function": {}}]])
def test_other_tools(tools: Any) -> None:
    with pytest.raises(Absent):
        tools_for_template(tools)
