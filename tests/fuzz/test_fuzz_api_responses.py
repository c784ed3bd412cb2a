"""Streams and bodies of every API, cut anywhere, against an oracle that reads whole documents."""

import json
import struct
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairlead.apis.response import GrpcUsageScanner, Scanner, scanner_for
from fairlead.apis.usage import UsageScanner, error_status_of, summed, usage_of
from fairlead.core.request import Usage

fuzz = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
usages = pytest.mark.fuzzer("usage of every API")

counts = st.integers(0, 10**6) | st.none()
openai = st.fixed_dictionaries({"prompt_tokens": counts, "completion_tokens": counts})
anthropic = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("input_tokens", "output_tokens", "cache_read_input_tokens"), counts)
)
strings = st.text(max_size=10) | st.sampled_from(['"usage"', '"message_stop"', "[DONE]", '"meta_info":{', "🦊"])
events = st.one_of(
    st.fixed_dictionaries({"choices": st.lists(strings, max_size=2), "usage": openai | st.none()}),
    st.fixed_dictionaries({"text": strings, "meta_info": openai}),
    st.fixed_dictionaries({"type": st.just("message_start"), "message": st.fixed_dictionaries({"usage": anthropic})}),
    st.fixed_dictionaries({"type": st.just("message_delta"), "usage": anthropic}),
    st.fixed_dictionaries({"type": st.just("content_block_delta"), "delta": strings}),
    st.fixed_dictionaries({"type": st.just("message_stop")}),
    st.fixed_dictionaries(
        {
            "type": st.sampled_from(["response.completed", "response.created", "response.failed"]),
            "response": st.fixed_dictionaries(
                {"usage": anthropic | st.none(), "error": st.none() | st.just({"code": 429}), "x": strings}
            ),
        }
    ),
    st.fixed_dictionaries({"type": st.just("error"), "error": st.fixed_dictionaries({"type": strings})}),
)


@st.composite
def cut(draw: st.DrawFn, body: bytes) -> list[bytes]:
    cuts = sorted(draw(st.lists(st.integers(0, len(body)), max_size=10)))
    return [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]


def result(scanner: Scanner, chunks: list[bytes]) -> tuple[Usage | None, int, bool]:
    for chunk in chunks:
        scanner.feed(chunk)
    return scanner.usage, scanner.error_status, scanner.done


def expected(told: list[dict[str, Any]]) -> tuple[Usage | None, int, bool]:
    usage: Usage | None = None
    error, done, anthropic_ = 0, False, False
    pieces: dict[str, Any] = {}
    for event in told:
        kind = event.get("type", "")
        said, failed = event.get("usage"), event.get("error")
        if kind.startswith("message"):
            piece = event.get("message", {}).get("usage") if kind == "message_start" else said
            anthropic_ = anthropic_ or piece is not None
            for name, count in (piece or {}).items():
                if count or pieces.get(name) is None:
                    pieces[name] = count
            said = pieces
        elif kind.startswith("response."):
            said, failed = event["response"]["usage"], event["response"]["error"]
        elif "meta_info" in event:
            said = event["meta_info"]
        usage = usage_of(said) or usage
        error = error or (error_status_of(failed) if failed is not None else 0)
        # The end counts after a beginning.
        done = done or (anthropic_ and kind == "message_stop") or kind in ("response.completed", "response.failed")
    return usage, error, done


@usages
@fuzz
@given(data=st.data(), told=st.lists(events, max_size=6), end=st.sampled_from([b"\n", b"\n\n", b"\r\n\r\n"]))
def test_streams(data: st.DataObject, told: list[dict[str, Any]], end: bytes) -> None:
    body = b""
    for event in told:
        name = b"event: %b\n" % event["type"].encode() if "type" in event else b""
        shown = json.dumps(event, ensure_ascii=data.draw(st.booleans())).encode()
        body += name + b"data: " + shown + end
    assert result(UsageScanner(stream=True), data.draw(cut(body))) == expected(told)


@usages
@fuzz
@given(data=st.data(), batch=st.lists(st.fixed_dictionaries({"text": strings, "meta_info": openai}), max_size=4))
def test_batches(data: st.DataObject, batch: list[dict[str, Any]]) -> None:
    body = json.dumps(batch).encode()
    assert result(UsageScanner(stream=False), data.draw(cut(body)))[0] == summed([one["meta_info"] for one in batch])


@usages
@fuzz
@given(
    data=st.data(),
    body=st.binary(max_size=200)
    | st.lists(
        st.sampled_from(
            [
                b"data: ",
                b'{"type":"message_start","message":',
                b'{"usage":{"input_tokens":1}}',
                b"}",
                b"\n",
                b"[",
                b'"',
                b'"meta_info"',
                b'"message_stop"',
                b'{"type":"response.completed","response":',
                b"null",
                b"NaN",
                b"\xff",
            ]
        ),
        max_size=30,
    ).map(b"".join),
    kind=st.sampled_from(["text/event-stream", "application/json", "application/grpc"]),
    api=st.sampled_from(["chat", "grpc", "grpc_embed"]),
)
def test_any_bytes_never_raise_and_cuts_do_not_matter(data: st.DataObject, body: bytes, kind: str, api: str) -> None:
    one, other = scanner_for(kind, api=api), scanner_for(kind, api=api)
    assert one is not None
    assert other is not None
    assert result(one, data.draw(cut(body))) == result(other, [body])


def number(tag: int, value: int) -> bytes:
    out = bytes([tag << 3])
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


@usages
@fuzz
@given(
    data=st.data(),
    told=st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 10**6), st.integers(0, 10**6)), max_size=5),
    garbage=st.lists(st.binary(max_size=20), max_size=3),
)
def test_frames(data: st.DataObject, told: list[tuple[int, int, int]], garbage: list[bytes]) -> None:
    body = b"".join(b"\1" + struct.pack(">I", len(part)) + part for part in garbage)  # compressed: skipped
    for prompt, completion, cached in told:
        chunk = number(2, prompt) + number(3, completion) + number(4, cached)
        message = b"\x0a" + bytes([len(chunk)]) + chunk
        body += b"\0" + struct.pack(">I", len(message)) + message
    last = told[-1] if told else None
    usage = Usage(prompt_tokens=last[0], completion_tokens=last[1], cached_tokens=last[2]) if last else None
    assert result(GrpcUsageScanner(), data.draw(cut(body))) == (usage, 0, False)
