"""Every API, from a request's bytes over what is understood of it to the usage in the response's bytes."""

import json
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from fairlead.apis.prompt import MEDIA_BYTES
from fairlead.apis.request import ParsedRequest, parse_request
from fairlead.apis.response import scanner_for
from fairlead.core.request import Usage

JSON, SSE, GRPC = "application/json", "text/event-stream; charset=utf-8", "application/grpc"
FORM = "multipart/form-data; boundary=------------------------abc"


class Case(NamedTuple):
    path: str
    body: bytes
    #: What is understood, but for the prompt.
    parsed: ParsedRequest
    #: The prompt's parts as they are hashed.
    prompt: list[bytes]
    response_type: str
    response: bytes
    usage: Usage | None
    error: int = 0
    type: str = JSON


def usage(prompt: int, completion: int, cached: int = -1) -> Usage:
    return Usage(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached)


def compact(**members: Any) -> bytes:
    return json.dumps(members, separators=(",", ":")).encode()


def events(*members: dict[str, Any], done: bool = True) -> bytes:
    """A stream as OpenAI's servers send it."""
    lines = [b"data: %b\n\n" % json.dumps(event).encode() for event in members]
    return b"".join([*lines, b"data: [DONE]\n\n"] if done else lines)


def named_events(*members: dict[str, Any]) -> bytes:
    """A stream whose events have names, equal to the type in them."""
    return b"".join(b"event: %b\ndata: %b\n\n" % (e["type"].encode(), json.dumps(e).encode()) for e in members)


def field(number: int, payload: bytes) -> bytes:
    return bytes([number << 3 | 2, len(payload)]) + payload


def frame(message: bytes) -> bytes:
    return b"\0" + struct.pack(">I", len(message)) + message


def form(*parts: tuple[str, bytes]) -> bytes:
    line = b"--------------------------abc"
    body = b""
    for disposition, content in parts:
        body += b"--%b\r\nContent-Disposition: form-data; %b\r\n\r\n%b\r\n" % (line[2:], disposition.encode(), content)
    return body + b"--%b--\r\n" % line[2:]


USER = '[{"role":"user","content":"hi"}'
CHAT = compact(model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=9, stream=True, user="u")
ANTHROPIC = compact(
    model="m",
    max_tokens=7,
    system="be kind",
    stream=True,
    messages=[{"role": "user", "content": "hi"}],
    metadata={"user_id": "user_1_session_2"},
)
IMAGE_PART = '[{"role":"user","content":[{"type":"input_image","image_url":"https://x/y.png"}]}'

CASES = {
    "chat, streamed": Case(
        "/v1/chat/completions",
        CHAT,
        ParsedRequest("chat", "m", True, 9, root=b"chat 1:m", prompt_bytes=len(USER), user="u"),
        [USER.encode()],
        SSE,
        events(
            {"choices": [{"delta": {"content": '"usage":{"prompt_tokens":9}'}}]},
            {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}},
        ),
        usage(5, 3),
    ),
    "chat with an image": Case(
        "/v1/chat/completions",
        b'{"messages":%b],"prompt_cache_key":"k","user":"u"}' % IMAGE_PART.encode(),
        ParsedRequest("chat", root=b"chat 0:", prompt_bytes=len(IMAGE_PART) + MEDIA_BYTES, user="k", media=1),
        [IMAGE_PART.encode()],
        JSON,
        compact(choices=[], usage={"prompt_tokens": 900, "completion_tokens": 1}),
        usage(900, 1),
    ),
    "completions, token ids": Case(
        "/v1/completions",
        b'{"model":"m","prompt":[1,22,3],"max_tokens":4}',
        ParsedRequest("completions", "m", False, 4, root=b"completions 1:m", prompt_bytes=7, prompt_tokens=3),
        [b"[1,22,3"],
        JSON,
        compact(usage={"prompt_tokens": 3, "total_tokens": 7, "completion_tokens": 4}),
        usage(3, 4),
    ),
    "embeddings": Case(
        "/v1/embeddings",
        b'{"model":"e","input":["one","two"],"user":"u"}',
        ParsedRequest("embeddings", "e", n=2, root=b"embeddings 1:e", prompt_bytes=12, user="u"),
        [b'["one","two"'],
        JSON,
        compact(data=[{"embedding": [0.5]}], usage={"prompt_tokens": 6, "total_tokens": 6}),
        usage(6, 0),
    ),
    "responses, streamed": Case(
        "/v1/responses",
        b'{"model":"m","input":%b],"instructions":"be kind","max_output_tokens":8,"stream":true,'
        b'"conversation":{"id":"conv_1"},"tools":[1]}' % USER.encode(),
        ParsedRequest(
            "responses_stored",
            "m",
            True,
            8,
            True,
            root=b'responses 1:m tools 3:[1] conversation 15:{"id":"conv_1"}',
            prompt_bytes=len(USER) + 9 + 3,
            user="conv_1",
        ),
        [b'"be kind"', USER.encode()],
        SSE,
        named_events(
            {"type": "response.created", "response": {"usage": None}},
            {"type": "response.output_text.delta", "delta": '"usage": {"input_tokens": 1}'},
            {
                "type": "response.completed",
                "response": {
                    "error": None,
                    "usage": {"input_tokens": 11, "input_tokens_details": {"cached_tokens": 8}, "output_tokens": 4},
                },
            },
        ),
        usage(11, 4, 8),
    ),
    "responses that fail": Case(
        "/v1/responses",
        b'{"input":"hi","previous_response_id":"resp_1","prompt_cache_key":"k"}',
        ParsedRequest(
            "responses_stored",
            include_usage=True,
            root=b'responses 0: previous 8:"resp_1"',
            prompt_bytes=2,
            user="k",
        ),
        [b"hi"],
        SSE,
        named_events({"type": "response.failed", "response": {"error": {"code": "server_error"}, "usage": None}}),
        None,
        500,
    ),
    "conversations": Case(
        "/v1/conversations",
        b'{"items":[{"type":"message","role":"user","content":"hi"}]}',
        ParsedRequest("conversations"),
        [],
        JSON,
        b'{"id":"conv_1","object":"conversation"}',
        None,
    ),
    "messages, streamed": Case(
        "/v1/messages",
        ANTHROPIC,
        ParsedRequest(
            "messages",
            "m",
            True,
            7,
            True,
            root=b"messages 1:m",
            prompt_bytes=len(USER) + 9,
            user="user_1_session_2",
        ),
        [b'"be kind"', USER.encode()],
        SSE,
        named_events(
            {
                "type": "message_start",
                "message": {"usage": {"input_tokens": 20, "cache_read_input_tokens": 64, "output_tokens": 0}},
            },
            {"type": "content_block_delta", "delta": {"text": '"usage"'}},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 12}},
            {"type": "message_stop"},
        ),
        usage(84, 12, 64),
    ),
    "messages, overloaded": Case(
        "/v1/messages",
        ANTHROPIC,
        ParsedRequest(
            "messages",
            "m",
            True,
            7,
            True,
            root=b"messages 1:m",
            prompt_bytes=len(USER) + 9,
            user="user_1_session_2",
        ),
        [b'"be kind"', USER.encode()],
        SSE,
        named_events({"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}),
        None,
        503,
    ),
    "count_tokens": Case(
        "/v1/messages/count_tokens",
        ANTHROPIC,
        ParsedRequest("count_tokens", "m", user="user_1_session_2"),
        [],
        JSON,
        b'{"input_tokens":14}',
        None,
    ),
    "score": Case(
        "/score",
        b'{"model":"r","text_1":"a question","text_2":["one","two"]}',
        ParsedRequest("score", "r", n=2, root=b"score 1:r", prompt_bytes=22),
        [b"a question", b'["one","two"'],
        JSON,
        compact(data=[{"score": 0.5}], usage={"prompt_tokens": 9, "total_tokens": 9}),
        usage(9, 0),
    ),
    "rerank": Case(
        "/v2/rerank",
        b'{"model":"r","query":"q","documents":["one","two"],"top_n":1}',
        ParsedRequest("rerank", "r", n=2, root=b"rerank 1:r", prompt_bytes=13),
        [b"q", b'["one","two"'],
        JSON,
        compact(usage={"total_tokens": 9}, results=[{"index": 1}]),
        usage(9, 0),
    ),
    "pooling": Case(
        "/pooling",
        b'{"model":"r","input":"one"}',
        ParsedRequest("pooling", "r", root=b"pooling 1:r", prompt_bytes=3),
        [b"one"],
        JSON,
        compact(data=[], usage={"prompt_tokens": 3, "total_tokens": 3}),
        usage(3, 0),
    ),
    "transcription": Case(
        "/v1/audio/transcriptions",
        form(('name="model"', b"whisper"), ('name="file"; filename="a.wav"', b"\0\r\n--\r\n" * 99), ('name="n"', b"2")),
        ParsedRequest("audio", "whisper", n=2, prompt_bytes=MEDIA_BYTES, media=1),
        [],
        JSON,
        compact(text="hello", usage={"type": "tokens", "input_tokens": 14, "output_tokens": 5}),
        usage(14, 5),
        type=FORM,
    ),
    "image edit": Case(
        "/v1/images/edits",
        form(
            ('name="image[]"; filename="a.png"', b"PNG"),
            ('name="image[]"; filename="b.png"', b"PNG"),
            ('name="prompt"', b"a dog"),
            ('name="model"', b"draw"),
            ('name="user"', b"u"),
        ),
        ParsedRequest("images", "draw", prompt_bytes=5 + 2 * MEDIA_BYTES, user="u", media=2),
        [],
        JSON,
        compact(data=[{"b64_json": "A" * 300_000}], usage={"input_tokens": 600, "output_tokens": 1000}),
        usage(600, 1000),
        type=FORM,
    ),
    "image generation": Case(
        "/v1/images/generations",
        b'{"model":"draw","prompt":"a dog","n":3}',
        ParsedRequest("images", "draw", n=3, prompt_bytes=5),
        [],
        JSON,
        b'{"created":1,"data":[]}',
        None,
    ),
    "generate": Case(
        "/inference/v1/generate",
        b'{"model":"m","token_ids":[5,6],"sampling_params":{"max_tokens":3,"n":2},"features":'
        b'{"mm_hashes":{"image":["aa","bb"]}},"cache_salt":"s"}',
        ParsedRequest(
            "generate",
            "m",
            False,
            3,
            n=2,
            root=b'generate 1:m salt 3:"s" media 21:{"image":["aa","bb"]}',
            prompt_bytes=4,
            prompt_tokens=2,
            media=2,
        ),
        [b"[5,6"],
        SSE,
        events({"choices": [{"token_ids": [1]}], "usage": {"prompt_tokens": 2, "completion_tokens": 1}}),
        usage(2, 1),
    ),
    "sglang, streamed": Case(
        "/generate",
        b'{"input_ids":[1,2,3,4],"sampling_params":{"max_new_tokens":6},"stream":true,"extra_key":"s"}',
        ParsedRequest("sglang", "", True, 6, True, root=b'sglang 0: salt 3:"s"', prompt_bytes=8, prompt_tokens=4),
        [b"[1,2,3,4"],
        SSE,
        events(
            {"text": "a", "meta_info": {"prompt_tokens": 4, "completion_tokens": 1, "cached_tokens": 2}},
            {"text": '"meta_info"', "meta_info": {"prompt_tokens": 4, "completion_tokens": 6, "cached_tokens": 2}},
        ),
        usage(4, 6, 2),
    ),
    "TGI": Case(
        "/generate",
        b'{"inputs":"hi","parameters":{"max_new_tokens":5,"details":true,"adapter_id":"ad"}}',
        ParsedRequest("sglang", "", False, 5, True, root=b'sglang 0: adapter 4:"ad"', prompt_bytes=2),
        [b"hi"],
        JSON,
        b'{"generated_text":"a","details":{"finish_reason":"length","generated_tokens":5,"seed":null,"prefill":[]}}',
        usage(-1, 5),
    ),
    "TGI, streamed": Case(
        "/generate_stream",
        b'{"inputs":"hi","parameters":{"max_new_tokens":5,"details":true}}',
        ParsedRequest("sglang", "", True, 5, True, root=b"sglang 0:", prompt_bytes=2),
        [b"hi"],
        SSE,
        events(
            {"index": 1, "token": {"id": 7, "text": "a"}, "generated_text": None, "details": None},
            {"index": 2, "generated_text": "ab", "details": {"generated_tokens": 2, "input_length": 9}},
            done=False,
        ),
        usage(9, 2),
    ),
    "TGI, without details": Case(
        "/generate",
        b'{"inputs":"hi","parameters":{"adapter_id":null}}',
        ParsedRequest("sglang", "", False, 0, True, root=b"sglang 0:", prompt_bytes=2),
        [b"hi"],
        JSON,
        b'{"generated_text":"\\"generated_tokens\\"","details":null}',
        None,
    ),
    "sglang, a batch": Case(
        "/generate",
        b'{"text":["one","two"],"sampling_params":[{"max_new_tokens":6},{}],"lora_path":"ad","image_data":["x"]}',
        ParsedRequest(
            "sglang",
            "ad",
            False,
            6,
            True,
            n=2,
            root=b'sglang 0: lora 4:"ad" image 5:["x"]',
            prompt_bytes=12 + MEDIA_BYTES,
            media=1,
        ),
        [b'["one","two"'],
        JSON,
        json.dumps(
            [
                {"text": "a", "meta_info": {"prompt_tokens": 4, "completion_tokens": 1}},
                {"text": "b", "meta_info": {"prompt_tokens": 5, "completion_tokens": 2, "cached_tokens": 3}},
            ]
        ).encode(),
        usage(9, 3, 3),
    ),
    "grpc": Case(
        "/vllm.grpc.engine.VllmEngine/Generate",
        frame(field(1, b"id") + field(2, field(2, b"\x01\x85\x01\x03")) + field(4, b"\x40\x0c\x78\x02") + b"\x28\x01"),
        ParsedRequest("grpc", "", True, 12, True, 2, root=b"grpc", prompt_bytes=4, prompt_tokens=3),
        [b"\x01\x85\x01\x03"],
        GRPC,
        frame(field(1, field(1, b"\x07") + b"\x10\x03\x18\x01\x20\x02"))
        + frame(field(2, field(1, b"\x07\x08") + field(2, b"stop") + b"\x18\x03\x20\x02\x28\x02")),
        usage(3, 2, 2),
        type=GRPC,
    ),
    "grpc embed": Case(
        "/vllm.grpc.engine.VllmEngine/Embed",
        frame(field(1, b"id") + field(2, field(2, b"\x01\x02"))),
        ParsedRequest("grpc_embed", include_usage=True, root=b"grpc_embed", prompt_bytes=2, prompt_tokens=2),
        [b"\x01\x02"],
        GRPC,
        frame(field(1, b"\0" * 8) + b"\x10\x02"),
        usage(2, -1),
        type=GRPC,
    ),
    "tokenize": Case(
        "/tokenize",
        b'{"model":"m","prompt":"hi"}',
        ParsedRequest("tokenize", "m"),
        [],
        JSON,
        b'{"count":2,"tokens":[1,2]}',
        None,
    ),
    "render": Case(
        "/v1/chat/completions/render",
        CHAT,
        ParsedRequest("render", "m"),
        [],
        JSON,
        b'{"token_ids":[1,2]}',
        None,
    ),
}


def understood(case: Case) -> tuple[ParsedRequest, list[bytes]]:
    parsed = parse_request(case.path, case.body, case.type)
    prompt = [bytes(part) for part in parsed.prompt]
    bare = {name: getattr(parsed, name) for name in ParsedRequest.__struct_fields__ if name != "prompt"}
    return ParsedRequest(**bare), prompt


@pytest.mark.parametrize("name", CASES)
def test_requests(name: str) -> None:
    case = CASES[name]
    assert understood(case) == (case.parsed, case.prompt)


def scanned(case: Case, *chunks: bytes) -> tuple[Usage | None, int]:
    scanner = scanner_for(case.response_type, api=case.parsed.api)
    assert scanner is not None
    for chunk in chunks:
        scanner.feed(chunk)
    return scanner.usage, scanner.error_status


@pytest.mark.parametrize("name", CASES)
def test_responses_cut_at_every_byte(name: str) -> None:
    case = CASES[name]
    expected = (case.usage, case.error)
    assert scanned(case, case.response) == expected
    for cut in range(0, len(case.response) + 1, 1 + len(case.response) // 3000):
        assert scanned(case, case.response[:cut], case.response[cut:]) == expected, cut


@pytest.mark.parametrize("name", CASES)
def test_unknown_fields_change_nothing(name: str) -> None:
    case = CASES[name]
    if case.type == JSON:
        body = b'{"unknown":{"a":[1,{"model":"x"}]},"temperature":"warm","model_":"y",' + case.body[1:]
    elif case.type == FORM:
        body = form(('name="x"', b"y"), ('name="Model"', b"z")).removesuffix(b"--\r\n") + b"\r\n"
        body += case.body.partition(b"\r\n")[2]
    else:
        body = frame(case.body[5:] + field(15, b"unknown") + b"\xf8\x07\x01")
    assert understood(case._replace(body=body)) == (case.parsed, case.prompt)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.type == JSON])
def test_what_only_lenient_parsers_read(name: str) -> None:
    case = CASES[name]
    parsed = parse_request(case.path, b'{"x":[NaN,"\\ud83d"],' + case.body[1:])
    assert parsed.unread == ""
    assert parsed.prompt_bytes >= case.parsed.prompt_bytes  # dumped again, with other white space
    for field_name in ("api", "model", "stream", "max_tokens", "n", "prompt_tokens", "user", "media"):
        assert getattr(parsed, field_name) == getattr(case.parsed, field_name)


RECORDED = {
    "messages_anthropic": ("messages", 4, b'[{"role": "user", "content": "hi"}', usage(11, 4, 0)),
    "messages_defaults": ("messages", 4, b'[{"role": "user", "content": "hi"}', usage(11, 4)),
    "responses": ("responses", 4, b"hi", usage(11, 4, 0)),
    "inference_generate": ("generate", 4, None, usage(125, 4, 96)),
    "chat_stream_usage": ("chat", None, None, usage(125, 5, 96)),
    "completion_tokens": ("completions", 4, None, usage(80, 4, 0)),
    "tokenize_chat": ("tokenize", 0, b"", None),
    "tokenize_prompt": ("tokenize", 0, b"", None),
    "detokenize": ("tokenize", 0, b"", None),
    "chat_render": ("render", 0, b"", None),
    "completion_render": ("render", 0, b"", None),
    "render_server_chat": ("render", 0, b"", None),
}


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_exchanges(name: str, exchange: Callable[[str], tuple[str, str, bytes, str, bytes]]) -> None:
    api, limit, prompt, expected = RECORDED[name]
    path, kind, body, response_kind, response = exchange(name)
    parsed = parse_request(path, body, kind)
    sent = json.loads(body)
    assert (parsed.api, parsed.model, parsed.stream) == (api, "tiny", sent.get("stream", False))
    assert limit is None or parsed.max_tokens == limit
    if prompt is not None:
        assert b"".join(parsed.prompt) == prompt
    if api == "generate":
        assert json.loads(bytes(parsed.prompt[0]) + b"]") == sent["token_ids"]
        assert parsed.prompt_tokens == len(sent["token_ids"]) == 125
    for cut in range(len(response) + 1):
        scanner = scanner_for(response_kind)
        assert scanner is not None
        scanner.feed(response[:cut])
        scanner.feed(response[cut:])
        assert (scanner.usage, scanner.error_status) == (expected, 0), cut


@pytest.mark.parametrize(
    ("path", "query", "documents"),
    [("/rerank", "query", "documents"), ("/score", "queries", "documents"), ("/v1/score", "query", "items")],
)
def test_each_pair_is_a_sequence_and_one_query_counts_once(path: str, query: str, documents: str) -> None:
    texts = ["d"] * 50
    listed = len(json.dumps(texts)) - 1

    def read(asked: Any, given: Any) -> tuple[int, int]:
        parsed = parse_request(path, json.dumps({query: asked, documents: given}).encode())
        return parsed.n, parsed.prompt_bytes

    assert read("q" * 8000, texts) == (50, 8000 + listed)
    assert read("q" * 8000, "d") == (1, 8001)
    assert read(texts, texts) == (50, 2 * listed), "one with one"
