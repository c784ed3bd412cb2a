"""The beginning of a prompt as a request of its own: verbatim, whole JSON, and nothing but the prompt."""

import json
from typing import Any

import pytest

from fairlead.apis.beginning import beginning
from fairlead.apis.request import parse_request
from fairlead.core.prefix import ChainHasher

SYSTEM = 'Nöthing "is" as 漢字 \n as 👍🏽 it seems. ' * 200
CHAT = {
    "model": "m",
    "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "My name is Ada."}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "max_tokens": 500,
    "temperature": 0.3,
    "user": "ada@example.org",
    "n": 3,
}
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


def chain(api: str, body: bytes) -> tuple[int, ...]:
    parsed = parse_request(PATHS[api], body)
    return ChainHasher().chain(parsed.root, b"".join(parsed.prompt)).hashes


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
@pytest.mark.parametrize("ascii", [True, False])
def test_a_cut_chat_begins_with_the_same_blocks(separators: tuple[str, str], ascii: bool) -> None:
    body = json.dumps(CHAT, separators=separators, ensure_ascii=ascii).encode()
    whole = parse_request(PATHS["chat"], body)
    ends = ChainHasher().chain(whole.root, b"".join(whole.prompt)).ends
    for depth in range(1, len(ends)):
        cut = beginning("chat", body, ends[depth - 1])
        same = [one == other for one, other in zip(chain("chat", cut), chain("chat", body), strict=False)]
        assert same[: depth - 1] == [True] * (depth - 1)  # the last one may end within an escape
        given = json.loads(cut)
        assert SYSTEM.startswith(given["messages"][0]["content"])
        assert given["messages"][-1] == {"role": "user", "content": "."}
        assert (given["max_tokens"], given["stream"], given["model"]) == (1, True, "m")
        assert given.keys() == {"model", "messages", "tools", "max_tokens", "stream"}


def test_whole_messages_are_kept_and_a_user_s_turn_is_cut() -> None:
    body = json.dumps(CHAT).encode()
    messages = body[body.index(b"[") :]
    cut = json.loads(beginning("chat", body, messages.index(b"Ada")))
    assert [message["content"] for message in cut["messages"]] == [SYSTEM, "My name is "]


def test_a_role_behind_the_content_stays() -> None:
    body = json.dumps({"messages": [{"content": SYSTEM, "role": "system"}]}).encode()
    first = json.loads(beginning("chat", body, 1000))["messages"][0]
    assert first["role"] == "system" and SYSTEM.startswith(first["content"]) and first["content"]


@pytest.mark.parametrize("limit", [None, 400])
def test_a_prompt_of_which_the_engine_reads_the_end_has_no_beginning(limit: int | None) -> None:
    body = json.dumps(CHAT | {"truncate_prompt_tokens": limit}).encode()
    assert bool(beginning("chat", body, 1000)) == (limit is None)


def test_completions_are_cut_too() -> None:
    body = json.dumps({"model": "m", "prompt": SYSTEM, "echo": True}).encode()
    cut = beginning("completions", body, 3000)
    assert SYSTEM.startswith(json.loads(cut)["prompt"])
    assert chain("completions", cut)[:10] == chain("completions", body)[:10]
    ids = json.dumps({"prompt": [*range(1000, 3000)]}).encode()
    assert json.loads(beginning("completions", ids, 600))["prompt"] == [*range(1000, 1100)]


@pytest.mark.parametrize(
    ("api", "body"),
    [
        ("chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": SYSTEM}]}]}),
        ("chat", {"messages": [7]}),
        ("chat", {"messages": {}}),
        ("chat", {}),
        ("chat", []),
        ("completions", {"prompt": [SYSTEM, SYSTEM]}),
        ("completions", {"prompt": [[1, 2], [3]]}),
        ("completions", {"prompt": 7}),
        ("messages", CHAT),
    ],
)
def test_what_cannot_be_cut_is_left(api: str, body: Any) -> None:
    assert beginning(api, json.dumps(body).encode(), 1000) == b""


@pytest.mark.parametrize("end", [-5, 0, 1, 2, 3, 10**9])
def test_odd_ends_do_no_harm(end: int) -> None:
    for api, body in (("chat", CHAT), ("completions", {"prompt": '\\u12 "' * 9})):
        cut = beginning(api, json.dumps(body).encode(), end)
        assert not cut or json.loads(cut)["max_tokens"] == 1
    for broken in (b"", b"{", b"\xff", b'{"messages":[{"role":"user","content":"\\ud83d"}]}'):
        assert isinstance(beginning("chat", broken, 30), bytes)
