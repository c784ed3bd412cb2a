"""Requests and answers of vLLM's gRPC engine service, encoded by an independent codec."""

import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from fairlead.apis.body import MAX_COUNT
from fairlead.apis.engine_grpc import MAX_FIELDS, Budget, Malformed, packed, varint, walk
from fairlead.apis.parsed import MAX_N
from fairlead.apis.prompt import MEDIA_BYTES
from fairlead.apis.request import ParsedRequest, parse_request
from fairlead.apis.response import MAX_FRAME, GrpcUsageScanner, scanner_for, scanner_unseen
from fairlead.core.errors import ClientError
from fairlead.core.request import Usage

GENERATE, EMBED = "/vllm.grpc.engine.VllmEngine/Generate", "/vllm.grpc.engine.VllmEngine/Embed"
IDS = [0, 1, 127, 128, 16383, 16384, 2**32 - 1]


def frame(message: Any, flag: int = 0) -> bytes:
    data = message if isinstance(message, bytes) else message.SerializeToString()
    return bytes([flag]) + struct.pack(">I", len(data)) + data


def generate(message: Any) -> ParsedRequest:
    return parse_request(GENERATE, frame(message), "application/grpc")


def refused(body: bytes) -> str:
    with pytest.raises(ClientError) as error:
        parse_request(GENERATE, body, "application/grpc")
    assert error.value.status == 400
    assert "application/json" not in error.value.message
    return error.value.message


def test_tokens(newer: SimpleNamespace) -> None:
    message = newer.GenerateRequest(
        request_id="r-1",
        tokenized={"original_text": "hello", "input_ids": IDS},
        sampling_params={"temperature": 0.5, "max_tokens": 77, "stop": ["x"], "n": 3},
        stream=True,
        data_parallel_rank=-1,
    )
    parsed = generate(message)
    assert (parsed.api, parsed.model, parsed.stream, parsed.max_tokens, parsed.n) == ("grpc", "", True, 77, 3)
    assert parsed.prompt_tokens == len(IDS)
    assert parsed.prompt_bytes == len(b"".join(parsed.prompt)) == sum((1, 1, 1, 2, 2, 3, 5))
    grown = newer.GenerateRequest(tokenized={"input_ids": [*IDS, 5]})
    assert b"".join(generate(grown).prompt).startswith(b"".join(parsed.prompt))
    assert generate(grown).root == parsed.root


def test_text(newer: SimpleNamespace) -> None:
    parsed = generate(newer.GenerateRequest(text="hello", media_refs={"items": [{"url": "a"}, {"url": "b"}]}))
    assert [bytes(part) for part in parsed.prompt] == [b"hello"]
    assert (parsed.prompt_tokens, parsed.media, parsed.prompt_bytes) == (0, 2, 5 + 2 * MEDIA_BYTES)
    assert (parsed.stream, parsed.max_tokens, parsed.n) == (False, 0, 1)


def test_media_scope_the_placeholders(newer: SimpleNamespace) -> None:
    def parsed(*hashes: str, more: tuple[str, ...] = ()) -> ParsedRequest:
        extra = [{"mm_hashes": more}] if more else []
        inputs = {"pixel_values": b"\0" * 1000, "mm_hashes": hashes}
        return generate(newer.GenerateRequest(tokenized={"input_ids": IDS}, mm_inputs=inputs, extra_mm_inputs=extra))

    assert parsed("aa", "bb", more=("cc",)).media == 3
    roots = {parsed("aa", "bb").root, parsed("aab", "b").root, parsed("aa").root, parsed("aa", more=("bb", "c")).root}
    assert len(roots) == 4


def test_limits_are_forced_into_bounds(newer: SimpleNamespace) -> None:
    parsed = generate(newer.GenerateRequest(text="x", sampling_params={"max_tokens": 2**32 - 1, "n": 2**32 - 1}))
    assert (parsed.max_tokens, parsed.n) == (MAX_COUNT, MAX_N)


def test_embed(newer: SimpleNamespace) -> None:
    body = frame(newer.EmbedRequest(request_id="r", tokenized={"input_ids": IDS}))
    parsed = parse_request(EMBED, body, "application/grpc+proto")
    assert (parsed.api, parsed.prompt_tokens, parsed.stream) == ("grpc_embed", len(IDS), False)


def test_token_ids_need_not_be_packed(newer: SimpleNamespace) -> None:
    one_by_one = b"".join(b"\x10" + bytes([i]) for i in (1, 2, 3))
    in_pieces = b"\x12\x02\x01\x02\x12\x01\x03"
    for ids in (one_by_one, in_pieces):
        parsed = generate(b"\x12" + bytes([len(ids)]) + ids)
        assert b"".join(parsed.prompt) == b"\x01\x02\x03"
        assert parsed.prompt_tokens == 3


def test_of_two_prompts_the_last_one_counts() -> None:
    tokens, text = b"\x12\x04\x12\x02\x01\x02", b"\x1a\x02hi"
    assert [bytes(part) for part in generate(tokens + text).prompt] == [b"hi"]
    assert generate(text + tokens).prompt_tokens == 2


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "no body"),
        (b"\0\0\0\0", "not one gRPC frame"),
        (b"\0\0\0\0\x05\x1a\x02hi", "not one gRPC frame"),
        (frame(b"\x1a\x02hi") * 2, "not one gRPC frame"),
        (b"\x02" + frame(b"\x1a\x02hi")[1:], "not one gRPC frame"),
        (b'{"prompt":"hi"}', "not one gRPC frame"),
        (frame(b""), "'tokenized'"),
        (frame(b"\x12\x00"), "'tokenized'"),
        (frame(b"\x1a\x00"), "'tokenized'"),
        (frame(b"\x0a\x02ok"), "'tokenized'"),
        (frame(b"\x1a\x05hi"), "runs past"),
        (frame(b"\x1a"), "bad varint"),
        (frame(b"\x1a" + b"\xff" * 10 + b"\x01"), "bad varint"),
        (frame(b"\x00\x01"), "bad tag"),
        (frame(b"\x0b\x0c"), "wire type 3"),
        (frame(b"\x0f"), "wire type 7"),
        (frame(b"\x0d\x01\x02"), "runs past"),
        (frame(b"\x12\x03\x12\x01\x80"), "breaks off"),
        (frame(b"\x12\x02\x12\x09"), "runs past"),
        (frame(b"\x28\x01" * (MAX_FIELDS + 1)), "fields"),
        (frame((b"\x5a\x7e" + b"\x28\x01" * 63) * (MAX_FIELDS // 64 + 1)), "fields"),
    ],
)
def test_what_is_refused(body: bytes, says: str) -> None:
    assert says in refused(body)


def test_compressed_messages_are_scheduled_unread() -> None:
    parsed = parse_request(GENERATE, frame(b"\x1f\x8b", flag=1), "application/grpc")
    assert (parsed.api, parsed.unread, parsed.stream) == ("grpc", "grpc-encoding", True)


def test_the_reader_skips_what_it_does_not_need() -> None:
    message = b"\x09" + b"\x01" * 8 + b"\x15" + b"\x02" * 4 + b"\xf8\xff\xff\xff\x0f\x96\x01" + b"\x22\x01x"
    assert [(f.number, f.kind, f.value) for f in walk(message, Budget())] == [
        (1, 1, 0),
        (2, 5, 0),
        (536870911, 0, 150),
        (4, 2, 0),
    ]
    assert varint(b"\xff" * 9 + b"\x01", 0, 10) == (2**64 - 1, 10)
    assert packed(b"", 0, 0) == 0
    with pytest.raises(Malformed):
        list(walk(message[:-1], Budget()))


def usage(prompt: int, completion: int, cached: int = 0) -> Usage:
    return Usage(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached)


def scanned(*chunks: bytes, embed: bool = False) -> tuple[Usage | None, int]:
    scanner = GrpcUsageScanner(embed)
    for chunk in chunks:
        scanner.feed(chunk)
    return scanner.usage, scanner.error_status


def ended(*messages: bytes, embed: bool = False, sequences: int = 1) -> bool:
    scanner = GrpcUsageScanner(embed, sequences)
    for message in messages:
        scanner.feed(frame(message))
    return scanner.done


@pytest.mark.parametrize("layout", ["newer", "older"])
def test_the_last_message_is_known_by_its_kind(layout: str, request: pytest.FixtureRequest) -> None:
    pb = request.getfixturevalue(layout)
    named = {"request_id": "id"} if layout == "older" else {}
    chunk = pb.Response(**named, chunk={"token_ids": [5], "prompt_tokens": 9, "completion_tokens": 1})
    complete = pb.Response(**named, complete={"finish_reason": "stop", "prompt_tokens": 9, "completion_tokens": 1})
    assert [ended(), ended(chunk, chunk), ended(chunk, complete), ended(complete)] == [False, False, True, True]
    several = (chunk, complete), (complete, chunk, complete), (complete, complete, complete)
    assert [ended(*messages, sequences=2) for messages in several] == [False, True, True]


def test_an_error_of_the_older_layout_is_the_last_message(older: SimpleNamespace) -> None:
    assert ended(older.Response(request_id="id", error={"message": "busy"}))


def test_an_embedding_is_all_there_is(newer: SimpleNamespace) -> None:
    assert ended(newer.EmbedResponse(embedding=[0.5], prompt_tokens=9), embed=True)
    assert not ended(embed=True)


@pytest.mark.parametrize("layout", ["newer", "older"])
def test_streams_cut_at_every_byte(layout: str, request: pytest.FixtureRequest) -> None:
    pb = request.getfixturevalue(layout)
    named = {"request_id": "id"} if layout == "older" else {}
    chunk = {"token_ids": [5, 300], "prompt_tokens": 1000, "completion_tokens": 2, "cached_tokens": 96}
    complete = {"output_ids": [5, 300, 7], "finish_reason": "stop", "prompt_tokens": 1000, "completion_tokens": 3}
    body = frame(pb.Response(**named, chunk=chunk))
    first = len(body)
    body += frame(pb.Response(**named, complete=complete | {"cached_tokens": 96}))
    assert scanned(body[:first]) == (usage(1000, 2, 96), 0)
    for cut in range(len(body) + 1):
        assert scanned(body[:cut], body[cut:]) == (usage(1000, 3, 96), 0)
    assert scanned(*(body[i : i + 1] for i in range(len(body)))) == (usage(1000, 3, 96), 0)
    nothing_cached = frame(pb.Response(**named, complete=complete))
    assert scanned(nothing_cached) == (usage(1000, 3), 0)


@pytest.mark.parametrize("cumulative", [False, True])
@pytest.mark.parametrize("last", [1, 5])
def test_tokens_of_a_stream_are_added(cumulative: bool, last: int, newer: SimpleNamespace) -> None:
    """Chunks count their own tokens or all so far; the end repeats the last ones or counts all."""
    messages = [
        newer.Response(chunk={"token_ids": [300] * n, "prompt_tokens": 9, "completion_tokens": so_far})
        for n, so_far in ((2, 2), (2, 4 if cumulative else 2), (1, 5 if cumulative else 1))
    ]
    complete = newer.Response(complete={"finish_reason": "stop", "prompt_tokens": 9, "completion_tokens": last})
    assert scanned(*map(frame, messages)) == (usage(9, 5), 0)
    assert scanned(*map(frame, [*messages, complete])) == (usage(9, 5), 0)


def test_several_completions_are_added(newer: SimpleNamespace) -> None:
    complete = [
        frame(newer.Response(complete={"finish_reason": "stop", "prompt_tokens": 9, "completion_tokens": n}))
        for n in (7, 3, 4)
    ]
    assert scanned(*complete) == (usage(9, 14), 0)


@pytest.mark.parametrize(("code", "status"), [("429", 429), ("503", 503), ("200", 500), ("x", 500), ("", 500)])
def test_errors_in_the_older_layout(code: str, status: int, older: SimpleNamespace) -> None:
    body = frame(older.Response(request_id="id", error={"message": "no", "http_status_code": code}))
    assert scanned(body) == (None, status)


def test_embeddings(newer: SimpleNamespace, older: SimpleNamespace) -> None:
    expected = Usage(prompt_tokens=9)
    assert scanned(frame(newer.EmbedResponse(embedding=[0.5] * 9, prompt_tokens=9)), embed=True) == (expected, 0)
    complete = {"embedding": [0.5] * 9, "prompt_tokens": 9}
    assert scanned(frame(older.EmbedResponse(request_id="x", complete=complete)), embed=True) == (expected, 0)
    error = {"message": "no"}
    assert scanned(frame(older.EmbedResponse(request_id="x", error=error)), embed=True) == (None, 500)


def test_long_and_compressed_frames_are_skipped(newer: SimpleNamespace) -> None:
    small = frame(newer.Response(chunk={"prompt_tokens": 4, "completion_tokens": 1}))
    long = frame(newer.Response(complete={"output_ids": [300] * MAX_FRAME, "prompt_tokens": 9, "completion_tokens": 9}))
    packed_ = frame(b"\x1f\x8b\x00", flag=1)
    body = long + packed_ + small + long
    for size in (1000, 65_536, len(body)):
        assert scanned(*(body[i : i + size] for i in range(0, len(body), size))) == (usage(4, 1), 0)


@pytest.mark.parametrize("data", [b"\0\xff\xff\xff\xff" + b"x" * 10_000, b"\0\0\x03\xff\xff" + b"x" * 1000])
def test_memory_is_bounded(data: bytes, bytes_kept: Callable[[Callable[[], object]], int]) -> None:
    def fed() -> GrpcUsageScanner:
        scanner = GrpcUsageScanner()
        for _ in range(1000):
            scanner.feed(data)
        return scanner

    assert bytes_kept(fed) < 2 * MAX_FRAME + 20_000


@pytest.mark.parametrize(
    "data", [b"\xff" * 50, b"\0" * 50, b"\0\0\0\0\x02\x0b\x0c" * 9, b"\0\0\0\0\x03\x12\x01\x10" * 9]
)
def test_garbage_says_nothing(data: bytes) -> None:
    assert scanned(data) == (None, 0)
    assert scanned(data, embed=True) == (None, 0)


@pytest.mark.parametrize(
    ("content_type", "encoding", "kind"),
    [
        ("application/grpc", "", "GrpcUsageScanner"),
        ("application/grpc+proto", "identity", "GrpcUsageScanner"),
        ("text/event-stream; charset=utf-8", "", "UsageScanner"),
        ("Application/JSON", "", "UsageScanner"),
        ("application/problem+json", "", "UsageScanner"),
        ("application/json", "gzip", "NoneType"),
        ("audio/wav", "", "NoneType"),
        ("", "", "NoneType"),
    ],
)
def test_which_scanner(content_type: str, encoding: str, kind: str) -> None:
    assert type(scanner_for(content_type, encoding)).__name__ == kind


@pytest.mark.parametrize(("api", "kind"), [("grpc", "Grpc"), ("grpc_embed", "Grpc"), ("chat", "Usage"), ("", "Usage")])
def test_which_scanner_when_the_headers_are_not_shown(api: str, kind: str) -> None:
    for streaming in (True, False):
        assert type(scanner_unseen(api, streaming)).__name__.startswith(kind)
    embedding = frame(b"\x0a\x04\0\0\0\0\x10\x09")
    complete = frame(b"\x12\x06\x12\x04stop")
    for scanner in (scanner_unseen("grpc", True, 2), scanner_for("application/grpc", "", "grpc", 2)):
        assert scanner is not None
        scanner.feed(complete)
        assert not scanner.done
        scanner.feed(complete)
        assert scanner.done
    scanner = scanner_unseen("grpc_embed", False)
    scanner.feed(embedding)
    assert scanner.usage == Usage(prompt_tokens=9)
