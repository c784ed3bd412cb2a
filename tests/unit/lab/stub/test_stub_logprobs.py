"""Made-up log-probabilities: well formed, the same every time, the same streamed as in one piece."""

import json
import math
from itertools import chain

import pytest

_CHAT = {"messages": [{"role": "user", "content": "hi"}]}


async def _ask(http, address: str, body: dict) -> tuple[dict, list[dict]]:
    """The choice in one piece, and those of the stream."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    status, whole = await http.post(address, path, body)
    assert status == 200, whole
    _, streamed = await http.post(address, path, body | {"stream": True})
    return json.loads(whole)["choices"][0], [event["choices"][0] for event in http.events(streamed)]


def _joined(events: list[dict], key: str) -> list:
    return list(chain.from_iterable(event["logprobs"][key] for event in events))


@pytest.mark.parametrize("top", [0, 1, 5, 20])
async def test_completions(http, quick, top):
    asked = {"prompt": "abc", "max_tokens": 9, "logprobs": top}
    choice, events = await _ask(http, quick.addresses[0], asked)
    found = choice["logprobs"]
    assert list(found) == ["text_offset", "token_logprobs", "tokens", "top_logprobs"]
    assert "".join(found["tokens"]) == choice["text"]
    assert found["text_offset"] == list(range(0, 36, 4))
    for token, value, row in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert len(row) == max(1, top)
        assert row[token] == value == max(row.values()) < 0
        assert sum(map(math.exp, row.values())) <= 1.00001
    for key, values in found.items():
        assert _joined(events, key) == values
    again, _ = await _ask(http, quick.addresses[0], asked)
    assert again == choice


async def test_offsets_count_an_echoed_prompt(http, quick):
    asked = {"prompt": "abé", "max_tokens": 2, "logprobs": 1, "echo": True}
    choice, events = await _ask(http, quick.addresses[0], asked)
    assert choice["logprobs"]["text_offset"] == [3, 7]
    assert choice["text"][3:7] == choice["logprobs"]["tokens"][0]
    assert _joined(events, "text_offset") == [3, 7]


@pytest.mark.parametrize("top", [0, 1, 5, 20])
async def test_chat(http, quick, top):
    asked = {"max_tokens": 9, "logprobs": True, "top_logprobs": top} | _CHAT
    choice, (role, *events) = await _ask(http, quick.addresses[0], asked)
    assert list(choice["logprobs"]) == ["content"]
    content = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == choice["message"]["content"]
    for entry in content:
        assert list(entry) == ["token", "logprob", "bytes", "top_logprobs"]
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert len(entry["top_logprobs"]) == top
        if top:
            assert entry["top_logprobs"][0] == {key: entry[key] for key in ("token", "logprob", "bytes")}
            assert len({other["token"] for other in entry["top_logprobs"]}) == top
    assert role["logprobs"] is None
    assert _joined(events, "content") == content


async def test_nobody_gets_what_was_not_asked_for(http, quick):
    for body in ({"prompt": "x"}, _CHAT | {"logprobs": False, "max_tokens": 3}, _CHAT | {"max_tokens": 3}):
        choice, events = await _ask(http, quick.addresses[0], body)
        assert choice["logprobs"] is None
        assert all(event["logprobs"] is None for event in events)


async def test_tokens_of_a_stop_string_have_their_values_too(http, quick):
    choice, _ = await _ask(http, quick.addresses[0], {"prompt": "x", "max_tokens": 5, "logprobs": 0})
    stop = choice["text"][7:10]
    ended, events = await _ask(http, quick.addresses[0], {"prompt": "x", "max_tokens": 5, "logprobs": 0, "stop": stop})
    assert len(ended["text"]) == 7
    assert len(ended["logprobs"]["tokens"]) == 3
    assert _joined(events, "tokens") == ended["logprobs"]["tokens"]


@pytest.mark.parametrize(
    ("wrong", "says", "param"),
    [
        ({"prompt": "x", "logprobs": -1}, "`logprobs` must be a positive value.", "logprobs"),
        ({"prompt": "x", "logprobs": "many"}, "body.logprobs", "body.logprobs"),
        (
            {"prompt": "x", "logprobs": 21},
            "Requested sample logprobs of 21, which is greater than max allowed: 20 (parameter=logprobs, value=21)",
            "logprobs",
        ),
        (
            {"prompt": ["x"] * 50, "n": 20, "max_tokens": 501, "logprobs": 1},
            "at most 1,000,000 log-probabilities, this one could have 1,002,000; ask for fewer choices",
            "logprobs",
        ),
        (_CHAT | {"top_logprobs": 2}, "when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs"),
        (_CHAT | {"logprobs": True, "top_logprobs": -3}, "`top_logprobs` must be a positive value", "top_logprobs"),
        (_CHAT | {"logprobs": True, "top_logprobs": 99}, "greater than max allowed: 20", "logprobs"),
    ],
)
async def test_numbers_that_make_no_sense_are_refused(http, quick, wrong, says, param):
    path = "/v1/chat/completions" if "messages" in wrong else "/v1/completions"
    status, answer = await http.post(quick.addresses[0], path, wrong)
    error = json.loads(answer)["error"]
    assert status == 400
    assert says in error["message"]
    assert error["param"] == param
