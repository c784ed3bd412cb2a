"""What a conversation begins with: equal in all its turns."""

import json
from typing import Any

import pytest

from fairlead.apis.prompt import openings
from fairlead.apis.request import parse_request


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def all_of(*messages: Any) -> list[bytes]:
    return list(openings(json.dumps(messages)[:-1].encode()))


def of(*messages: Any) -> bytes:
    return next(iter(all_of(*messages)), b"")


SYSTEM, ANSWER = {"role": "system", "content": "It is 10:03."}, {"role": "assistant", "content": "hello"}


@pytest.mark.parametrize(
    "turn",
    [
        [SYSTEM, user("hi")],
        [SYSTEM, user("hi"), ANSWER, user("more")],
        [{"role": "developer", "content": "It is 10:05."}, user("hi"), ANSWER],
        [user([{"type": "text", "text": "hi"}])],
        [user([{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]), ANSWER],
        [user("hi"), {"type": "function_call", "name": "f"}],
        [user("hi"), *[ANSWER, user("more")] * 20],
    ],
)
def test_every_turn_begins_alike(turn: list[Any]) -> None:
    assert of(*turn) == b"hi"


def test_all_that_was_written_before_the_first_answer_counts() -> None:
    assert of(user("a"), user("b"), ANSWER) == of(user("a"), user("b")) != of(user("a"))
    image = {"type": "image_url", "image_url": {"url": "https://x/y.png"}}
    assert of(user([image, {"type": "text", "text": "a"}])) == of(user("a"))
    both = of(user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]))
    assert both not in (of(user("a")), of(user("b")))


def test_a_text_is_the_first_message() -> None:
    parsed = parse_request("/v1/responses", b'{"model":"m","input":"hi"}')
    assert [*openings(parsed.prompt[-1])] == all_of(user("hi")) == [b"hi"]


def test_later_openings_have_what_was_written_before_later_answers() -> None:
    assert all_of(SYSTEM, user("a"), ANSWER, user("b"), SYSTEM, user("c")) == [b"a", b"a\nb\nc"]
    call, result = {"role": "assistant", "tool_calls": []}, {"role": "tool", "content": "1"}
    assert all_of(user("a"), call, result, ANSWER) == [b"a"], "one answer of several messages"
    assert len(all_of(*[user("more"), ANSWER] * 20)) == 8
    assert all_of(user("a"), ANSWER, 1) == [b"a"]


@pytest.mark.parametrize(
    "messages", [[], [ANSWER], [1], [None], ["a"], [{"role": 1}], [user(""), {"content": []}], [[]]]
)
def test_no_opening(messages: list[Any]) -> None:
    assert of(*messages) == b""


@pytest.mark.parametrize("raw", [b"", b"[", b'[{"role":"user"', b"[[[" * 10_000])
def test_broken_messages_have_none(raw: bytes) -> None:
    assert [*openings(raw)] == []
