"""Random, mutated and adversarial bodies against the reader of every API."""

import contextlib
import json
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from mutated import TOKENS, load, mutated

from fairlead.apis import engine_grpc
from fairlead.apis.body import is_utf8
from fairlead.apis.errors import error_body
from fairlead.apis.multipart import read_form
from fairlead.apis.request import ParsedRequest, parse_request
from fairlead.core.apis import OTHER, RESPONSES, RESPONSES_STORED, api_of
from fairlead.core.errors import ClientError
from fairlead.core.prefix import ChainHasher
from fairlead.gateway.understand import Conversations

fuzz = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
json_bodies = pytest.mark.fuzzer("bodies of every API")
forms_and_frames = pytest.mark.fuzzer("forms and gRPC frames")

DATA = Path(__file__).parents[1] / "data"
REQUESTS = [
    path.read_bytes().partition(b"\r\n\r\n")[2]
    for folder in ("vllm-0.32-apis", "vllm-0.32-responses")
    for path in sorted((DATA / folder).glob("*.request.bin"))
]
JSON_PATHS = [
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/conversations", "/v1/messages",
    "/v1/messages/count_tokens", "/score", "/v1/rerank", "/pooling", "/v1/audio/speech", "/v1/images/generations",
    "/inference/v1/generate", "/generate", "/tokenize", "/v1/chat/completions/render",
]  # fmt: skip
GRPC_PATHS = ["/vllm.grpc.engine.VllmEngine/Generate", "/vllm.grpc.engine.VllmEngine/Embed"]
KEYS = [
    "model", "stream", "n", "user", "cache_salt", "messages", "system", "tools", "metadata", "max_tokens", "prompt",
    "input", "instructions", "conversation", "previous_response_id", "items", "query", "documents", "queries", "text_1",
    "text_2", "token_ids", "input_ids", "text", "sampling_params", "features", "image_data", "extra_key", "lora_path",
    "stream_options", "thinking", "max_output_tokens", "x",
]  # fmt: skip

text = st.text(st.characters(exclude_categories=()), max_size=8) | st.sampled_from(
    ["m", "user", "text", "image", "input_audio", ";base64,AAAA", ',"cache_control":{}', "é", "🦊", "\ud83d", "]", '"']
)
scalar = st.none() | st.booleans() | st.integers(-5, 10**20) | st.floats() | text
names = st.sampled_from(
    ["id", "type", "content", "role", "max_tokens", "max_new_tokens", "n", "mm_hashes", "user_id", "include_usage"]
)
value = st.recursive(
    scalar,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names | text, inner, max_size=3),
    max_leaves=6,
)
likely = st.one_of(
    st.lists(st.integers(0, 99), min_size=1, max_size=4),
    st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": value}), min_size=1, max_size=2),
    text,
)


@st.composite
def objects(draw: st.DrawFn) -> bytes:
    members = []
    for key in draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=8)):
        shown = json.dumps(draw(likely if draw(st.booleans()) else value), ensure_ascii=draw(st.booleans()))
        members.append(json.dumps(key) + ":" + shown)
    return ("{" + ",".join(members) + "}").encode("utf-8", "surrogatepass")


bodies = objects() | mutated(objects() | st.sampled_from(REQUESTS), TOKENS) | st.binary(max_size=100)


def sound(parsed: ParsedRequest, path: str, body: bytes) -> None:
    """What holds for everything that was understood."""
    api = RESPONSES if parsed.api == RESPONSES_STORED else parsed.api
    assert api == api_of(path) != OTHER
    assert 0 <= parsed.max_tokens < 2**31
    assert 1 <= parsed.n <= 16384
    assert parsed.prompt_bytes >= 0
    assert parsed.prompt_tokens >= 0
    assert parsed.media >= 0
    assert len(parsed.model) <= 1024
    assert len(parsed.user) <= 1024
    parsed.model.encode()
    prompt = b"".join(parsed.prompt)
    # Lists that were read the lenient way are dumped again, and may grow by white space and escapes.
    assert len(prompt) <= 6 * len(body) + 9
    chain = ChainHasher(finest=16).chain(parsed.root, prompt)
    known = Conversations(limit=4)
    for _ in range(2):
        known.of(chain, prompt)
        known.validate()


def refused(api: str, error: ClientError) -> None:
    assert error.status == 400
    assert error.message
    error_body(api, error.status, error.message, param=error.param, code=error.code).decode()


@json_bodies
@fuzz
@given(body=bodies, path=st.sampled_from(JSON_PATHS))
@example(b'{"model":null,"stream_options":"\xed\xa0\x80"}', "/v1/chat/completions")  # a surrogate, no object
def test_json_bodies(body: bytes, path: str) -> None:
    sent = load(body)
    try:
        parsed = parse_request(path, body, "application/json")
    except ClientError as error:
        refused(api_of(path), error)
        return
    sound(parsed, path, body)
    if isinstance(sent, dict) and path != "/generate":
        assert parsed.model == (sent.get("model") or "")
    if isinstance(sent, dict) and path == "/v1/messages" and ',"cache_control"' not in body.decode("utf-8", "replace"):
        assert len(json.loads(bytes(parsed.prompt[-1]) + b"]")) == len(sent["messages"])


@json_bodies
@fuzz
@given(body=objects(), more=objects(), path=st.sampled_from(JSON_PATHS))
def test_unknown_members_change_nothing(body: bytes, more: bytes, path: str) -> None:
    grown = b'{"unknown":' + more + b"," + body[1:]
    # With broken text anywhere a body is read the second way, which drops such a name instead of mending it.
    broken = b"\\ud" in grown.lower() or not is_utf8(grown)
    outcomes = []
    for one in (body, grown):
        try:
            parsed = parse_request(path, one)
            user = "" if broken else parsed.user
            outcomes.append((parsed.model, parsed.stream, parsed.max_tokens, user, parsed.media, parsed.n))
        except ClientError as error:
            outcomes.append((error.param, error.message.split(" (character")[0].split(" (byte")[0]))
    assert outcomes[0] == outcomes[1]


DISPOSITIONS = [
    b'Content-Disposition: form-data; name="model"',
    b'Content-Disposition: form-data; name="stream"',
    b'Content-Disposition: form-data; name="file"; filename="a"',
    b"content-disposition:form-data;name=n",
    b'Content-Disposition: form-data; name="prompt"; x="\\"',
    b"X: y",
    b"",
]


@st.composite
def forms(draw: st.DrawFn) -> bytes:
    parts = draw(st.lists(st.tuples(st.sampled_from(DISPOSITIONS), st.binary(max_size=20)), max_size=5))
    body = b"".join(b"--B\r\n" + head + b"\r\n\r\n" + content + b"\r\n" for head, content in parts)
    return body + b"--B--\r\n"


@forms_and_frames
@fuzz
@given(body=forms() | mutated(forms(), [b"\r\n", b"--B", b"\r\n--B--", b'"', b";", b"\r\n\r\n", b"="]))
def test_forms(body: bytes) -> None:
    for path in ("/v1/audio/transcriptions", "/v1/images/edits"):
        try:
            sound(parse_request(path, body, "multipart/form-data; boundary=B"), path, body)
        except ClientError as error:
            refused(api_of(path), error)
    with contextlib.suppress(ClientError):
        form = read_form(body, "multipart/form-data; boundary=B")
        assert form is not None
        assert sum(map(len, form.fields.values())) + sum(form.files) <= len(body)


@forms_and_frames
@fuzz
@given(kind=st.text(max_size=60), body=forms())
def test_content_types_of_any_kind(kind: str, body: bytes) -> None:
    for content_type in (kind, "multipart/form-data;" + kind, "multipart/form-data; boundary=" + kind):
        with contextlib.suppress(ClientError):
            parse_request("/v1/audio/transcriptions", body, content_type)


def varint(number: int) -> bytes:
    out = b""
    while number > 0x7F:
        out += bytes([number & 0x7F | 0x80])
        number >>= 7
    return out + bytes([number])


@st.composite
def messages(draw: st.DrawFn, depth: int = 2) -> bytes:
    body = b""
    for _ in range(draw(st.integers(0, 5))):
        number, kind = draw(st.integers(1, 12)), draw(st.sampled_from([0, 2, 2, 2, 1, 5]))
        body += varint(number << 3 | kind)
        if kind == 0:
            body += varint(draw(st.integers(0, 2**64 - 1)))
        elif kind == 2:
            inner = draw(messages(depth - 1)) if depth and draw(st.booleans()) else draw(st.binary(max_size=10))
            body += varint(len(inner)) + inner
        else:
            body += draw(st.binary(min_size=8, max_size=8))[: 8 if kind == 1 else 4]
    return body


@forms_and_frames
@fuzz
@given(message=messages() | mutated(messages(), [b"\xff", b"\0", b"\x12", b"\x80"]) | st.binary(max_size=50))
def test_frames(message: bytes) -> None:
    body = b"\0" + struct.pack(">I", len(message)) + message
    for path in GRPC_PATHS:
        for data in (body, body[:-1], message):
            try:
                sound(parse_request(path, data, "application/grpc"), path, data)
            except ClientError as error:
                refused(api_of(path), error)
    with contextlib.suppress(engine_grpc.Malformed):
        for field in engine_grpc.walk(message, engine_grpc.Budget()):
            assert 0 <= field.start <= field.end <= len(message)


@forms_and_frames
@fuzz
@given(ids=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_token_ids_are_counted(ids: list[int]) -> None:
    data = b"".join(map(varint, ids))
    inner = b"\x12" + varint(len(data)) + data
    message = b"\x12" + varint(len(inner)) + inner
    parsed = parse_request(GRPC_PATHS[0], b"\0" + struct.pack(">I", len(message)) + message)
    assert parsed.prompt_tokens == len(ids)
    assert b"".join(parsed.prompt) == data


#: What repeats in bodies made to be slow.
UNITS = [
    b"[", b'{"a":', b'"', b"\\", b'",', b'"type"', b'"type":"image"', b";base64,", b'"data":"', b',"cache_control":{',
    b',"cache_control":{"a":"b"}', b"\\ud83d", b"1", b"[1],", b"\r\n--B", b"\r\n", b"--B\r\n", b"\x12\x00", b"\x80",
]  # fmt: skip


@json_bodies
@settings(fuzz, max_examples=40)
@given(
    unit=st.sampled_from(UNITS),
    path=st.sampled_from([*JSON_PATHS, *GRPC_PATHS]),
    head=st.sampled_from(
        [b"", b'{"messages":[', b'{"messages":["', b'{"input":["', b'{"token_ids":[1,', b'{"model":"', b'{"x":"']
    ),
)
def test_bodies_made_to_be_slow(unit: bytes, path: str, head: bytes) -> None:
    # Quadratic work on this megabyte would take hours.
    body = head + unit * ((1 << 20) // len(unit))
    with contextlib.suppress(ClientError):
        parse_request(path, body)
    with contextlib.suppress(ClientError):
        parse_request("/v1/audio/transcriptions", b"--B\r\n" + body, "multipart/form-data; boundary=B")
