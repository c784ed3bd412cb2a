import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fairlead.apis import usage as module
from fairlead.apis.response import scanner_for, scanner_unseen
from fairlead.apis.usage import TAIL_BYTES, WHOLE_BYTES, Document, Reply, UsageScanner, error_status_of, usage_of
from fairlead.core.request import Usage

DATA = Path(__file__).parents[2] / "data" / "vllm-0.32-responses"


def recorded(case: str) -> tuple[bool, bytes]:
    """Whether a recorded response is a stream, and its body without the transfer encoding."""
    head, _, body = (DATA / f"{case}.response.bin").read_bytes().partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head:
        pieces = []
        while body:
            size, _, body = body.partition(b"\r\n")
            pieces.append(body[: int(size, 16)])
            body = body[int(size, 16) + 2 :]
        body = b"".join(pieces)
    return b"text/event-stream" in head, body


def scan(stream: bool, *chunks: bytes) -> UsageScanner:
    scanner = UsageScanner(stream)
    for chunk in chunks:
        scanner.feed(chunk)
    return scanner


def result(scanner: UsageScanner) -> tuple[Usage | None, int, bool]:
    return scanner.usage, scanner.error_status, scanner.done


def usage(prompt: int, completion: int, cached: int = -1) -> Usage:
    return Usage(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached)


def sse(*events: Any) -> bytes:
    return b"".join(b"data: %b\n\n" % (e if isinstance(e, bytes) else json.dumps(e).encode()) for e in events)


RECORDED = {
    "chat": (usage(125, 8, 0), 0, False),
    "chat_cached": (usage(125, 8, 96), 0, False),
    "chat_stream": (None, 0, True),
    "chat_stream_usage": (usage(125, 5, 96), 0, True),
    "completion": (usage(121, 8, 0), 0, False),
    "completion_n2": (usage(2, 8, 0), 0, False),
    "completion_batch": (usage(4, 8, 0), 0, False),
    "completion_tokens": (usage(80, 4, 0), 0, False),
    "completion_stream": (None, 0, True),
    "completion_stream_usage_continuous": (usage(121, 3, 96), 0, True),
    "err_503_inside_200_chat_stream": (None, 503, True),
    "err_503_inside_200_completion_stream": (None, 503, True),
    "err_503_queue_full_stream_False": (None, 503, False),
    "err_model_404_chat_stream": (None, 404, False),
    "err_bad_json": (None, 400, False),
    "responses": (usage(11, 4, 0), 0, False),
    "get_v1_models": (None, 0, False),
}


@pytest.mark.parametrize("case", RECORDED)
def test_recorded_responses_cut_at_every_byte(case: str) -> None:
    stream, body = recorded(case)
    assert result(scan(stream, body)) == RECORDED[case]
    for cut in range(len(body) + 1):
        assert result(scan(stream, body[:cut], body[cut:])) == RECORDED[case], cut


@pytest.mark.parametrize("case", RECORDED)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_recorded_responses_in_small_chunks(case: str, size: int) -> None:
    stream, body = recorded(case)
    assert result(scan(stream, *(body[i : i + size] for i in range(0, len(body), size)))) == RECORDED[case]


@pytest.mark.parametrize("case", ["chat_stream_usage", "completion_stream_usage_continuous", "chat"])
def test_asking_in_between_changes_nothing(case: str) -> None:
    stream, body = recorded(case)
    scanner = UsageScanner(stream)
    for byte in body:
        scanner.feed(bytes([byte]))
        result(scanner)
    assert result(scanner) == RECORDED[case]


@pytest.mark.parametrize("end", [b"\r\n", b"\r\n\r\n", b"\n"])
def test_line_ends_and_spaces(end: bytes) -> None:
    body = b'data:{"usage":{"prompt_tokens":3,"completion_tokens":4}}' + end + b"data:   [DONE] " + end
    assert result(scan(True, body)) == (usage(3, 4), 0, True)


def test_a_last_line_without_its_end_counts() -> None:
    assert result(scan(True, sse({"usage": {"prompt_tokens": 1}})[:-2])) == (usage(1, -1), 0, False)
    scanner = scan(True, b"data: [DONE]")
    assert not scanner.finished, "its end may follow"
    assert scanner.done and scanner.finished


def test_the_last_usage_that_reports_wins() -> None:
    body = sse(
        {"usage": {"prompt_tokens": 3, "completion_tokens": 1}}, {"usage": {"prompt_tokens": 3, "total_tokens": 9}}
    )
    assert scan(True, body).usage == usage(3, 6)
    assert scan(True, body, sse({"usage": None}, {"usage": {}}, {"usage": "x"}, {"usage": []})).usage == usage(3, 6)


@pytest.mark.parametrize(
    "event",
    [
        {"choices": [{"delta": {"content": '"usage":{"prompt_tokens":1}'}}]},
        {"choices": [{"delta": {"content": '\\"usage\\":{"prompt_tokens":1}, "error": {"code": 503}'}}]},
        {"choices": [{"usage": {"prompt_tokens": 1}, "error": {"code": 503}}]},
        {"response": {"usage": {"prompt_tokens": 1}, "error": {"code": 503}}},
        {"x": ["usage", {"prompt_tokens": 1}, "error", {"code": 503}]},
        {"x": "usage", "y": "error", "usage": None, "error": None},
        ["usage", {"usage": {"prompt_tokens": 1}, "error": {"code": 503}}],
        '"usage":{"prompt_tokens":1}',
    ],
)
def test_only_the_top_level_counts(event: Any) -> None:
    assert result(scan(True, sse(event))) == (None, 0, False)
    assert result(scan(False, json.dumps(event).encode())) == (None, 0, False)


def test_other_lines_of_a_stream() -> None:
    body = b': keep-alive "usage"\n\nevent: usage\nid: {"usage":{"prompt_tokens":1}}\nretry: 5\n\n'
    assert result(scan(True, body)) == (None, 0, False)
    assert result(scan(True, b'{"error":{"code":429}}')) == (None, 429, False)
    assert result(scan(True, sse({"content": "[DONE]"}))) == (None, 0, False)


def test_errors_inside_a_stream() -> None:
    body = sse({"choices": []}, {"error": {"message": "dead", "code": 500}}, {"error": {"code": 503}}, b"[DONE]")
    assert result(scan(True, body)) == (None, 500, True)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ({"code": 503}, 503),
        ({"code": "503"}, 503),
        ({"code": 503.0}, 503),
        ({"code": "context_length_exceeded", "status": 400}, 400),
        ({"code": 200}, 500),
        ({"code": True}, 500),
        ({"code": None, "message": "x"}, 500),
        ({"code": float("nan")}, 500),
        ({"code": 10**400}, 500),
        ("broken", 500),
        (["broken"], 500),
        (True, 500),
        ({}, 0),
        ("", 0),
        (False, 0),
        (None, 0),
    ],
)
def test_error_status(error: Any, status: int) -> None:
    assert error_status_of(error) == status


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ({"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}, usage(5, 2)),
        ({"input_tokens": 5, "output_tokens": 2}, usage(5, 2)),
        ({"prompt_tokens": "5", "completion_tokens": " 2 ", "total_tokens": "7.0"}, usage(5, 2)),
        ({"prompt_tokens": 5.0}, usage(5, -1)),
        ({"prompt_tokens": 5, "total_tokens": 5}, usage(5, 0)),
        ({"completion_tokens": 2, "total_tokens": 7}, usage(5, 2)),
        ({"prompt_tokens": 5, "total_tokens": 3}, usage(5, -1)),
        ({"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}, usage(5, -1, 4)),
        ({"input_tokens": 5, "input_tokens_details": {"cached_tokens": "4"}}, usage(5, -1, 4)),
        ({"prompt_tokens": 5, "prompt_tokens_details": None}, usage(5, -1)),
        ({"prompt_tokens": 5, "prompt_tokens_details": [4]}, usage(5, -1)),
        ({"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": -4}}, usage(5, -1)),
        ({"prompt_tokens": None, "input_tokens": 5}, usage(5, -1)),
        ({"prompt_tokens": -1}, None),
        ({"prompt_tokens": True}, None),
        ({"prompt_tokens": "many"}, None),
        ({"prompt_tokens": "\ud800"}, None),
        ({"prompt_tokens": 10**12}, None),
        ({"prompt_tokens": float("inf")}, None),
        ({"total_tokens": 7}, None),
        ({}, None),
        ([1], None),
        ("5", None),
        (5, None),
        (None, None),
    ],
)
def test_usage_objects(sent: Any, read: Usage | None) -> None:
    assert usage_of(sent) == read


@pytest.mark.parametrize("api", ["rerank", "score", "embeddings", "pooling"])
def test_a_total_alone_is_that_of_the_prompt_where_nothing_is_generated(api: str) -> None:
    body = json.dumps({"model": "m", "usage": {"total_tokens": 50}}).encode()
    for scanner in (scanner_for("application/json", api=api), scanner_unseen(api, False)):
        assert scanner is not None
        scanner.feed(body)
        assert scanner.usage == usage(50, 0)
    other = scanner_unseen("chat", False)
    other.feed(body)
    assert other.usage is None


def test_what_only_lenient_parsers_read() -> None:
    body = b'{"choices":[{"logprobs":[-Infinity,NaN],"text":"\\ud83d"}],"usage":{"prompt_tokens":1}}'
    assert scan(False, body).usage == usage(1, -1)
    assert scan(True, b"data: " + body + b"\n\n").usage == usage(1, -1)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff" * 100, b'{"usage":', b'{"usage":{"prompt_tokens":1}', b"[" * 9999])
def test_broken_bodies_say_nothing(body: bytes) -> None:
    for stream in (True, False):
        assert result(scan(stream, body)) == (None, 0, False)
        assert result(scan(stream, b"data: " + body + b'"usage"\n', body)) == (None, 0, False)


def long_replies() -> Iterator[tuple[str, bytes, Usage | None]]:
    text = json.dumps("x" * WHOLE_BYTES + '"usage":{"prompt_tokens":99}').encode()
    many = json.dumps([{"usage": {"prompt_tokens": 99}}] * 3 + ["usage"] * 3).encode()
    numbers = b"[" + b"12," * (WHOLE_BYTES // 3) + b"1]"
    mine = b'"usage":{"prompt_tokens":5,"completion_tokens":6}'
    yield "last", b'{"text":%b,%b}' % (text, mine), usage(5, 6)
    yield "behind decoys", b'{"text":%b,"x":%b,%b}' % (text, many, mine), usage(5, 6)
    yield "before decoys", b'{"text":%b,%b,"x":%b}' % (text, mine, many), usage(5, 6)
    yield "first", b'{%b,"text":%b}' % (mine, text), usage(5, 6)
    yield "early", b'{"x":%b, "usage" :\t{"prompt_tokens":5},"text":%b}' % (many, text), usage(5, -1)
    yield "before numbers", b'{"text":"x",%b,"ids":%b}' % (mine, numbers), usage(5, 6)
    yield "nested early", b'{"x":{%b},"text":%b}' % (mine, text), None
    yield "nested late", b'{"text":%b,"x":{%b}}' % (text, mine), None
    yield "no object", b"[%b,{%b}]" % (text, mine), None
    yield "lenient first", b'{"x":[NaN,"\\ud83d"],%b,"text":%b}' % (mine, text), usage(5, 6)
    yield "lenient", b'{"text":%b,%b,"x":NaN}' % (text, mine), usage(5, 6)


@pytest.mark.parametrize(("name", "body", "expected"), [pytest.param(*case, id=case[0]) for case in long_replies()])
@pytest.mark.parametrize("size", [1000, 10**9])
def test_long_replies(name: str, body: bytes, expected: Usage | None, size: int) -> None:
    assert len(body) > WHOLE_BYTES
    line = b"data: " + body + b"\r\n\r\ndata: [DONE]\n\n"
    assert scan(False, *(body[i : i + size] for i in range(0, len(body), size))).usage == expected
    streamed = scan(True, *(line[i : i + size] for i in range(0, len(line), size)))
    assert result(streamed) == (expected, 0, True)


def test_usage_in_the_middle_of_a_long_reply_is_not_seen() -> None:
    text = b'"' + b"x" * WHOLE_BYTES + b'"'
    body = b'{"text":%b,"usage":{"prompt_tokens":5},"more":%b}' % (text, text)
    assert scan(False, body).usage is None
    assert scan(True, body[:9], body[9:] + b"\n").usage is None


def test_a_long_error() -> None:
    body = b'{"error":{"message":"%b","code":422}}' % (b"x" * 5000)
    assert scan(False, body[:-1], b',"echo":"' + b"x" * WHOLE_BYTES + b'"}').error_status == 422
    assert scan(True, b"data: " + body[:-1] + b',"echo":"' + b"x" * WHOLE_BYTES + b'"}\n').error_status == 422


def test_long_documents_are_kept_in_bounded_memory() -> None:
    document = Document()
    for _ in range(2_000):
        document.append(b"x" * 1000)
        assert document.complete() is None or len(document.complete() or b"") <= WHOLE_BYTES
        assert sum(map(len, document.ends())) <= WHOLE_BYTES + TAIL_BYTES
    assert document.complete() is None
    document.clear()
    assert document.complete() == b""


def test_a_line_is_parsed_once_however_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    read_whole = module.read_whole

    def counting(document: bytes) -> Reply:
        sizes.append(len(document))
        return read_whole(document)

    monkeypatch.setattr(module, "read_whole", counting)
    body = sse({"text": "x" * 50_000, "usage": {"prompt_tokens": 1}}) + sse({"text": "y"})
    scanner = scan(True, *(body[i : i + 1] for i in range(len(body))))
    assert scanner.usage == usage(1, -1)
    assert len(sizes) == 1


@pytest.mark.parametrize(
    "unit", [b'"usage"', b'"usage":', b'{"usage":', b'"usage":{"a":', b"[", b"\n", b'data: "usage"\n', b"\\"]
)
@pytest.mark.parametrize("stream", [True, False])
def test_hostile_responses_take_linear_time(unit: bytes, stream: bool) -> None:
    # Quadratic work on these 4 MB would take hours.
    chunk = unit * (8192 // len(unit))
    assert scan(stream, b"data: {", *([chunk] * 512)).usage is None


STARTED = {
    "type": "message_start",
    "message": {"type": "message", "usage": {"input_tokens": 29, "cache_read_input_tokens": 96, "output_tokens": 1}},
}


def named(*events: Any) -> bytes:
    return b"".join(b"event: %b\ndata: %b\n\n" % (e["type"].encode(), json.dumps(e).encode()) for e in events)


@pytest.mark.parametrize(
    ("delta", "expected"),
    [
        ({"output_tokens": 7}, usage(125, 7, 96)),
        ({"input_tokens": 29, "output_tokens": 7}, usage(125, 7, 96)),
        ({"input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 7}, usage(125, 7, 96)),
        ({"input_tokens": 13, "cache_read_input_tokens": 112, "output_tokens": 7}, usage(125, 7, 112)),
        ({"input_tokens": None, "output_tokens": None}, usage(125, 1, 96)),
        ({}, usage(125, 1, 96)),
        (None, usage(125, 1, 96)),
        ("x", usage(125, 1, 96)),
    ],
)
def test_anthropics_usage_comes_in_pieces(delta: Any, expected: Usage) -> None:
    body = named(STARTED, {"type": "ping"}, {"type": "message_delta", "delta": {}, "usage": delta})
    assert result(scan(True, body)) == (expected, 0, False)
    assert result(scan(True, body, named({"type": "message_stop"}))) == (expected, 0, True)


def test_anthropics_cached_tokens_may_be_told_late() -> None:
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 125, "output_tokens": 0}}}
    late = {"type": "message_delta", "usage": {"input_tokens": 29, "cache_read_input_tokens": 96, "output_tokens": 3}}
    assert scan(True, named(start)).usage == usage(125, 0)
    assert scan(True, named(start, late)).usage == usage(125, 3, 96)


@pytest.mark.parametrize(
    ("event", "status"),
    [
        ({"type": "error", "error": {"type": "overloaded_error"}}, 503),
        ({"type": "error", "error": {"type": "rate_limit_error"}}, 429),
        ({"type": "error", "error": {"type": "invalid_request_error"}}, 400),
        ({"type": "error", "error": {"type": "internal_error"}}, 500),
        ({"type": "error", "error": {"type": "NotFoundError"}}, 404),
        ({"type": "error", "error": {"type": ["x"]}}, 500),
        ({"type": "error", "code": "server_error", "message": "no"}, 500),
        ({"type": "response.failed", "response": {"error": {"code": "server_error"}}}, 500),
        ({"type": "response.failed", "response": {"error": {"code": 429}}}, 429),
        ({"type": "response.incomplete", "response": {"error": None, "usage": None}}, 0),
        ({"type": "message_start", "message": "x"}, 0),
        ({"type": "response.completed", "response": [1]}, 0),
        ({"type": 5, "error": None}, 0),
    ],
)
def test_events_that_fail(event: dict[str, Any], status: int) -> None:
    line = b"data: " + json.dumps(event).encode() + b"\n\n"
    assert scan(True, line).error_status == status
    assert scan(True, line).usage is None


@pytest.mark.parametrize("first", [True, False])
def test_a_long_last_event_of_the_responses_api(first: bool) -> None:
    text = "x" * WHOLE_BYTES + '"usage":{"input_tokens":99}'
    told = {"input_tokens": 11, "input_tokens_details": {"cached_tokens": 8}, "output_tokens": 4}
    response = {"error": None, "output": [{"text": text}], "usage": told, "user": None}
    kind = {"type": "response.completed"}
    event = kind | {"response": response} if first else {"response": response, "sequence_number": 9} | kind
    line = b"data: " + json.dumps(event).encode() + b"\n\n"
    assert len(line) > WHOLE_BYTES
    for size in (1000, 10**9):
        scanner = scan(True, *(line[i : i + size] for i in range(0, len(line), size)))
        assert result(scanner) == (usage(11, 4, 8), 0, True)
    nested = {"response": {"response": response}} | kind
    assert scan(True, b"data: " + json.dumps(nested).encode() + b"\n").usage is None


def test_a_long_reply_of_sglang() -> None:
    told = {"finish_reason": {"type": "stop"}, "prompt_tokens": 5, "completion_tokens": 6, "cached_tokens": 2}
    body = json.dumps({"text": "x" * WHOLE_BYTES, "meta_info": told}).encode()
    assert scan(False, body).usage == usage(5, 6, 2)


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ({"input_tokens": 5, "output_tokens": 2, "cache_read_input_tokens": 3}, usage(8, 2, 3)),
        ({"input_tokens": 5, "output_tokens": 2, "cache_creation_input_tokens": 3}, usage(8, 2, 0)),
        ({"input_tokens": 5, "cache_creation_input_tokens": 3, "cache_read_input_tokens": 2}, usage(10, -1, 2)),
        ({"input_tokens": 2**31 - 1, "cache_read_input_tokens": 2**31 - 1}, usage(2**31 - 1, -1, 2**31 - 1)),
        ({"output_tokens": 2, "cache_read_input_tokens": 3}, usage(-1, 2, 3)),
        ({"prompt_tokens": 5, "completion_tokens": 2, "cached_tokens": 4}, usage(5, 2, 4)),
    ],
)
def test_usage_objects_of_other_apis(sent: Any, read: Usage) -> None:
    assert usage_of(sent) == read
