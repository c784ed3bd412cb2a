"""Stop strings: where texts end, in one piece and streamed, with usage and reasons."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead.lab.engine import tokens as tk
from fairlead.lab.engine.spec import EngineSpec, LatencyModel
from fairlead.lab.stub.config import StubConfig
from fairlead.lab.stub.pool import StubPool
from fairlead.lab.stub.sampling import StopStrings

_CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def _by_hand(strings: list[str], seed: int, limit: int, include: bool) -> tuple[int, int, str] | None:
    """Token by token, as the real server looks for them."""
    for tokens in range(1, limit + 1):
        text = tk.output(seed, 0, tokens).decode()
        for string in strings:
            at = text.find(string)
            if at >= 0:
                return tokens, at + len(string) if include else at, string
    return None


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 64),
    limit=st.integers(1, 40),
    cuts=st.lists(st.tuples(st.integers(0, 160), st.integers(1, 9)), min_size=1, max_size=4),
    other=st.text(max_size=3),
    include=st.booleans(),
)
def test_a_text_ends_at_the_first_token_that_completes_a_string(seed, limit, cuts, other, include):
    text = tk.output(seed, 0, 50).decode()
    strings = [text[at : at + count] for at, count in cuts] + ([other] if other else [])
    assert StopStrings(strings, include).find(seed, limit) == _by_hand(strings, seed, limit, include)


@pytest.mark.parametrize("seed", [5, tk.PERIOD - 3, 40_000])
@pytest.mark.parametrize("place", [1022, 1024, 30_000, tk.PERIOD - 2])
def test_a_far_string_is_found_where_it_is(seed, place):
    """Also where it lies across the end of the near text, and of the table."""
    limit = 2 * tk.PERIOD
    text = tk.output(seed, 0, limit).decode()
    string = text[4 * place + 2 : 4 * place + 19]
    found = StopStrings([string], False).find(seed, limit)
    assert found is not None
    at = text.find(string)
    assert found == (-(-(at + 17) // 4), at, string)
    assert StopStrings([string], False).find(seed, found.tokens - 1) is None
    assert StopStrings([string], False).find(seed, found.tokens) == found


def test_what_never_comes_stops_nothing():
    for string in ("\n", "END", "é", "\ud800", "x" * 300_000, tk.output(0, 0, tk.PERIOD + 9).decode()[1:]):
        assert StopStrings([string], False).find(3, 70_000) is None


def _choice(body: bytes) -> dict:
    return json.loads(body)["choices"][0]


async def _texts(http, address: str, asked: dict, chat: bool) -> tuple[str, dict, list[str], list[dict]]:
    """Text and end in one piece, then the pieces and choices of the stream."""
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body = asked | (_CHAT if chat else {"prompt": "hello"})
    status, whole = await http.post(address, path, body)
    assert status == 200, whole
    choice = _choice(whole)
    text = choice["message"]["content"] if chat else choice["text"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    _, streamed = await http.post(address, path, body | options)
    events = http.events(streamed)
    assert events[-1]["usage"]["completion_tokens"] == json.loads(whole)["usage"]["completion_tokens"]
    choices = [event["choices"][0] for event in events[:-1]]
    pieces = [(part["delta"]["content"] if chat else part["text"]) for part in choices]
    return text, choice | {"usage": json.loads(whole)["usage"]}, pieces, choices


@pytest.mark.parametrize("chat", [False, True])
async def test_answers_end_before_a_stop_string(http, quick, chat):
    address = quick.addresses[0]
    full, end, _, _ = await _texts(http, address, {"max_tokens": 30}, chat)
    assert (end["finish_reason"], end["stop_reason"], len(full)) == ("length", None, 120)
    for stop, include in ((full[41:47], False), ([full[38:41], "nope"], False), (full[41:47], True), (full[2], False)):
        string = stop if isinstance(stop, str) else stop[0]
        at = full.find(string)
        asked = {"max_tokens": 30, "stop": stop, "include_stop_str_in_output": include}
        text, end, pieces, choices = await _texts(http, address, asked, chat)
        assert text == full[: at + len(string) if include else at]
        assert (end["finish_reason"], end["stop_reason"]) == ("stop", string)
        assert end["usage"]["completion_tokens"] == -(-(at + len(string)) // 4)
        assert "".join(pieces) == text
        assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", string)
        assert all(part["finish_reason"] is None for part in choices[:-1])


async def test_a_stream_keeps_back_what_may_begin_a_stop_string(http):
    spec = EngineSpec(latency=LatencyModel(1.0), num_blocks=500, max_model_len=1000)
    async with StubPool(StubConfig(engine=spec, model="tiny", merge_events=False)) as pool:
        asked = {"max_tokens": 6, "stop": "0123456789"}
        _, _, pieces, choices = await _texts(http, pool.addresses[0], asked, False)
        assert [len(piece) for piece in pieces] == [0, 0, 3, 4, 4, 13]
        assert choices[-1]["finish_reason"] == "length" and choices[-1]["stop_reason"] is None


async def test_a_string_that_the_last_token_completes_is_the_reason(http, quick):
    address = quick.addresses[0]
    _, body = await http.post(address, "/v1/completions", {"prompt": "x", "max_tokens": 3})
    last = _choice(body)["text"][-2:]
    _, body = await http.post(address, "/v1/completions", {"prompt": "x", "max_tokens": 3, "stop": last})
    assert (_choice(body)["finish_reason"], _choice(body)["stop_reason"]) == ("stop", last)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"stop": ""}, "stop cannot contain an empty string."),
        ({"stop": ["a", ""]}, "stop cannot contain an empty string."),
        ({"stop": ["a", 5]}, "body.stop"),
        ({"stop": 7}, "body.stop"),
        ({"stop": list(map(str, range(33)))}, "at most 32 strings, got 33"),
        ({"top_p": 5}, "top_p must be in (0, 1], got 5.0. (parameter=top_p, value=5.0)"),
        ({"top_p": float("nan")}, "top_p must be in (0, 1], got nan."),
        ({"top_p": "much"}, "body.top_p"),
        ({"top_k": -7}, "top_k must be 0 (disable), or at least 1, got -7."),
        ({"min_p": 1.5}, "min_p must be in [0, 1], got 1.5."),
        ({"presence_penalty": 3}, "presence_penalty must be in [-2, 2], got 3.0."),
        ({"frequency_penalty": -2.5}, "frequency_penalty must be in [-2, 2], got -2.5."),
        ({"repetition_penalty": 0}, "repetition_penalty must be greater than zero, got 0.0."),
        ({"repetition_penalty": float("inf")}, "repetition_penalty must be a finite number, got inf."),
    ],
)
async def test_sampling_that_makes_no_sense_is_refused(http, quick, wrong, says):
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", _CHAT)):
        status, answer = await http.post(quick.addresses[0], path, body | wrong)
        assert status == 400
        assert says in json.loads(answer)["error"]["message"]


async def test_sampling_that_makes_sense_is_taken(http, quick):
    asked = {"prompt": "x", "top_p": 0.1, "top_k": -1, "min_p": 0.5, "repetition_penalty": 1.1, "stop": [], "n": 2}
    assert (await http.post(quick.addresses[0], "/v1/completions", asked))[0] == 200
