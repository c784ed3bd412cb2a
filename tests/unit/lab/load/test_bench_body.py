from collections.abc import Callable
from pathlib import Path

import pytest

from fairlead.core.request import Usage
from fairlead.lab.load.connection import STREAM_TAIL, BodyWatch
from fairlead.pool.http1 import ResponseReader

CAPTURED = (Path(__file__).parents[3] / "data/bench/chat_stream_usage.http").read_bytes()
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n"
EVENT = b'data: {"choices":[{"delta":{"content":"' + b"x" * 200 + b'"}}]}\n\n'


def watch(data: bytes, step: int = 1 << 20) -> BodyWatch:
    reader = ResponseReader()
    body = BodyWatch(reader)
    reader.reset(body.pieces.append)
    for start in range(0, len(data), step):
        reader.feed(data[start : start + step])
        if start % 3 == 0:
            body.look()
    body.look()
    return body


@pytest.mark.parametrize("step", [1, 50, 1 << 20])
def test_usage_of_a_captured_stream(step: int) -> None:
    expected = Usage(prompt_tokens=125, completion_tokens=5, cached_tokens=96)
    assert watch(CAPTURED, step).close() == (expected, "")


@pytest.mark.parametrize("step", [1 << 20, 1000])
def test_a_long_stream_keeps_only_its_tail_and_still_finds_usage(step: int) -> None:
    last = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":900}}\n\ndata: [DONE]\n\n'
    body = watch(STREAM + EVENT * 900 + last, step)
    usage, failure = body.close()
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, failure) == (7, 900, "")


def test_a_stream_of_any_length_costs_no_memory(bytes_kept: Callable[[Callable[[], object]], int]) -> None:
    assert bytes_kept(lambda: watch(STREAM + EVENT * 20_000, 1000)) < 10 * STREAM_TAIL < len(EVENT) * 20_000


def test_usage_of_a_json_body() -> None:
    choices = b'{"choices":[{"message":{"content":"\\"usage\\":{}"}}],'
    text = choices + b'"usage":{"prompt_tokens":3,"completion_tokens":4},"x":null}'
    usage, failure = watch(JSON + text, 9).close()
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, failure) == (3, 4, -1, "")


def test_overload_inside_a_200_is_a_failure() -> None:
    event = (
        b'data: {"error": {"message": "The engine is currently busy", "type": "x", "code": 503}}\n\ndata: [DONE]\n\n'
    )
    assert watch(STREAM + event).close()[1] == "body_error_503"


def test_a_stream_that_breaks_off_politely_is_a_failure() -> None:
    assert watch(STREAM + EVENT * 3).close() == (None, "sse_incomplete")


def test_an_empty_body_says_nothing() -> None:
    assert watch(JSON).close() == (None, "")


def test_comments_are_no_token() -> None:
    body = watch(STREAM + b": keep-alive\n\n")
    assert not body.data_seen
    body.pieces.append(b": keep-alive\n\n")
    body.look()
    assert not body.data_seen
    body.pieces.append(b": keep-alive\n\ndata: {}\n\n")
    body.look()
    assert body.data_seen
