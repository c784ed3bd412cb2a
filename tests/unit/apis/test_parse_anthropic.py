"""Prompts of the Messages API as clients grow them."""

import json
from typing import Any

import pytest

from fairlead.apis.prompt import MEDIA_BYTES
from fairlead.apis.request import ParsedRequest, parse_request

MARK = {"cache_control": {"type": "ephemeral"}}
LONG_MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value} | more


def turn(role: str, *content: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": list(content)}


def parse(separators: tuple[str, str] | None = None, **members: Any) -> ParsedRequest:
    return parse_request("/v1/messages", json.dumps({"model": "m"} | members, separators=separators).encode())


def joined(parsed: ParsedRequest) -> bytes:
    return b"".join(parsed.prompt)


@pytest.mark.parametrize("separators", [None, (",", ":")])
@pytest.mark.parametrize("mark", [MARK, LONG_MARK])
def test_cache_marks_that_move_do_not_break_the_prefix(
    separators: tuple[str, str] | None, mark: dict[str, Any]
) -> None:
    system = [text("You are kind."), text("Be brief.", **mark)]
    first = parse(separators, system=system, messages=[turn("user", text("one", **mark))])
    messages = [turn("user", text("one")), turn("assistant", text("two")), turn("user", text("three", **mark))]
    second = parse(separators, system=system, messages=messages)
    assert joined(second).startswith(joined(first))
    assert joined(second) != joined(first)
    assert b"cache_control" not in joined(second)
    assert second.root == first.root
    assert first.prompt_bytes == len(joined(first))


@pytest.mark.parametrize("style", [{"sort_keys": True}, {"indent": 2}, {"indent": 2, "sort_keys": True}])
def test_cache_marks_are_removed_however_they_are_written(style: dict[str, Any]) -> None:
    def send(*turns: dict[str, Any], **members: Any) -> ParsedRequest:
        body = {"model": "m", "max_tokens": 9, "messages": list(turns)} | members
        return parse_request("/v1/messages", json.dumps(body, **style).encode())

    first = send(turn("user", text("one", **MARK)), system=[text("Be kind.", **LONG_MARK)])
    second = send(
        turn("user", text("one")), turn("assistant", text("two", **MARK)), system=[text("Be kind.", **LONG_MARK)]
    )
    assert b"cache_control" not in joined(first) + joined(second)
    assert joined(second).rstrip().startswith(joined(first).rstrip())
    assert first.prompt_bytes == len(joined(first))


def test_marks_inside_of_text_stay() -> None:
    said = 'they sent ,"cache_control":{"type":"ephemeral"} to me'
    parsed = parse(messages=[turn("user", text(said))])
    assert json.loads(joined(parsed) + b"]")[0]["content"][0]["text"] == said


def test_the_header_of_claude_code_is_no_part_of_a_text() -> None:
    texts = [f"x-anthropic-billing-header: v; cch={number};\nHello there" for number in (1, 2)]
    first, second = (parse_request("/v1/responses", json.dumps({"input": text}).encode()) for text in texts)
    assert [bytes(part) for part in first.prompt] == [bytes(part) for part in second.prompt] == [b"Hello there"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("blocks", [True, False])
def test_the_header_of_claude_code_is_no_part_of_the_prompt(path: str, blocks: bool) -> None:
    def send(number: int, *said: str) -> ParsedRequest:
        header = f"x-anthropic-billing-header: cc_version=2.1.77.a1b; cc_entrypoint=cli; cch={number:05x};"
        system = [text(header), text("You are kind.", **MARK)] if blocks else f"{header}\nYou are kind."
        turns = [turn("user", text(one)) for one in said]
        if path == "/v1/messages":
            members = {"system": system, "messages": turns}
        elif blocks:
            members = {"input": [turn("system", text(header), text("You are kind.")), *turns]}
        else:
            members = {"instructions": system, "input": turns}
        return parse_request(path, json.dumps(members).encode())

    first, second = send(1, "one"), send(2, "one", "two")
    assert joined(second).startswith(joined(first))
    assert b"You are kind." in joined(first)
    assert first.prompt_bytes == len(joined(first))


def test_a_shared_system_prompt_is_a_shared_beginning() -> None:
    one = parse(system="x" * 1000, messages=[turn("user", text("a"))])
    other = parse(system="x" * 1000, messages=[turn("user", text("b"))])
    assert one.root == other.root
    assert joined(one)[:1000] == joined(other)[:1000]


@pytest.mark.parametrize(
    "change",
    [
        {"model": "n"},
        {"tools": [{"name": "t"}]},
        {"thinking": {"type": "disabled"}},
        {"output_config": {"effort": "high"}},
        {"chat_template_kwargs": {"k": 1}},
        {"cache_salt": "s"},
    ],
)
def test_what_scopes_the_prefix(change: dict[str, Any]) -> None:
    messages = [turn("user", text("a"))]
    assert parse(messages=messages, **change).root != parse(messages=messages).root


@pytest.mark.parametrize(
    ("path", "change", "same"),
    [
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 4000}}, {"thinking": {"type": "adaptive"}}),
        ("messages", {"thinking": None, "output_config": {"format": None}}, {"thinking": 5, "output_config": []}),
        ("messages", {"thinking": {"type": "disabled"}}, {"thinking": {"budget_tokens": 1, "type": "disabled"}}),
        ("messages", {"output_config": {"effort": "low"}}, {"output_config": {"format": {}, "effort": "low"}}),
        ("responses", {"reasoning": {"effort": "low"}}, {"reasoning": {"summary": "auto", "effort": "low"}}),
        ("responses", {"reasoning": {"summary": "auto"}}, {"reasoning": None}),
    ],
)
def test_settings_that_do_not_reach_the_template_scope_nothing(
    path: str, change: dict[str, Any], same: dict[str, Any]
) -> None:
    def root(members: dict[str, Any]) -> bytes:
        said = {"messages": [turn("user", text("a"))], "input": "a"}
        return parse_request(f"/v1/{path}", json.dumps(said | members).encode()).root

    assert root(change) == root(same)
    scopes = any(word in json.dumps(change) for word in ("disabled", "effort"))
    assert (root(change) != root({})) == scopes


@pytest.mark.parametrize("change", [{"reasoning": {"effort": "high"}}, {"chat_template_kwargs": {"k": 1}}])
def test_what_scopes_the_prefix_of_a_response(change: dict[str, Any]) -> None:
    plain, scoped = (parse_request("/v1/responses", json.dumps({"input": "a"} | m).encode()) for m in ({}, change))
    assert plain.root != scoped.root


def test_tools_are_part_of_the_prompt() -> None:
    tools = [{"name": "f" * 500, **MARK}]
    plain = parse(messages=[turn("user", text("a"))])
    counted = len(json.dumps([{"name": "f" * 500}]))
    assert parse(messages=[turn("user", text("a"))], tools=tools).prompt_bytes == plain.prompt_bytes + counted


def test_inline_images_are_not_measured_by_their_length() -> None:
    def picture(size: int) -> ParsedRequest:
        source = {"type": "base64", "media_type": "image/png", "data": "A" * size}
        return parse(messages=[turn("user", text("What?"), {"type": "image", "source": source})])

    assert picture(300).media == picture(300_000).media == 1
    assert picture(300).prompt_bytes == picture(300_000).prompt_bytes < MEDIA_BYTES + 200
