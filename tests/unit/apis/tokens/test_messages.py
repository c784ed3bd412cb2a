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
        ([TEXT, {"type": "text", "text": None}, {"type": "refusal"}], "a", [TEXT]),
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


def test_developers_become_one_system_message_where_the_template_does_not_know_them() -> None:
    def made(*said: tuple[str, Any]) -> list[tuple[str, Any]]:
        translated = for_template([{"role": role, "content": content} for role, content in said], "string", False)
        assert all(message.keys() == {"role", "content"} for message in translated)
        return [(message["role"], message["content"]) for message in translated]

    assert made(("developer", "a"), ("user", "x")) == [("system", "a"), ("user", "x")]
    late = made(("system", "a"), ("user", "x"), ("developer", [TEXT, TEXT]), ("user", "y"))
    assert late == [("system", "a\n\na\na"), ("user", "x"), ("user", "y")]
    assert made(("system", "a"), ("user", "x"), ("system", "b"))[2] == ("system", "b"), "nobody is a developer"
    empty = for_template([{"role": "user", "content": "x"}, {"role": "developer", "content": []}], "openai", False)
    assert empty[0] == {"role": "system", "content": ""}


def test_a_header_that_differs_with_each_request_is_left_out() -> None:
    header = "x-anthropic-billing-header: cch=1;"
    for content, kept in ((f"{header}\na\nb", "a\nb"), (header, ""), ([TEXT, {"type": "text", "text": header}], "a")):
        assert for_template([{"role": "system", "content": content}], "string")[0]["content"] == kept
    assert for_template([{"role": "user", "content": header}], "string")[0]["content"] == header


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("hi", "template"),
        ({}, "template"),
        ({"role": 1}, "template"),
        ({"role": "user", "content": 5}, "template"),
        ({"role": "user", "content": [5]}, "template"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "template"),
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
