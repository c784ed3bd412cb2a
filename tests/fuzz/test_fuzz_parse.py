"""Random, mutated and adversarial bytes against the parsers, with Python's `json` as the oracle."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from body_spans import model_span
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from mutated import TOKENS, load, mutated

from fairlead.apis.errors import error_body
from fairlead.apis.request import parse_request
from fairlead.apis.usage import UsageScanner, usage_of
from fairlead.core.errors import ClientError
from fairlead.core.request import Usage

fuzz = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
bodies = pytest.mark.fuzzer("request bodies")
responses = pytest.mark.fuzzer("SSE usage")

DATA = Path(__file__).parents[1] / "data" / "vllm-0.32-responses"
REQUESTS = [p.read_bytes().partition(b"\r\n\r\n")[2] for p in sorted(DATA.glob("*.request.bin"))]
RESPONSES = [p.read_bytes().partition(b"\r\n\r\n")[2] for p in sorted(DATA.glob("*.response.bin"))]
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
TRUE = (True, 1, "true", "yes", "1")

text = st.text(st.characters(exclude_categories=()), max_size=12) | st.sampled_from(
    ["", "m", '"usage"', '\\"model\\":', "é", "🦊", "\ud83d", "[DONE]", "]", "}", "\\", "\n"]
)
strict_scalar = st.none() | st.booleans() | st.integers(-5, 10**20) | st.floats(-1e9, 1e9) | text
scalar = strict_scalar | st.floats()


def nested(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def extend(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3)

    return st.recursive(leaves, extend, max_leaves=8)


value, strict_value = nested(scalar), nested(strict_scalar)
KEYS = [
    "model",
    "stream",
    "max_tokens",
    "max_completion_tokens",
    "n",
    "messages",
    "prompt",
    "prompt_embeds",
    "user",
    "tools",
]
KEYS += ["cache_salt", "stream_options", "documents", "chat_template", "temperature", "usage", "error", "x"]
sane = {
    "model": text,
    "stream": st.booleans() | st.sampled_from(TRUE),
    "max_tokens": st.integers(-2, 10**12) | st.sampled_from(["5", 5.0]),
    "max_completion_tokens": st.none() | st.integers(0, 10**6),
    "messages": st.lists(st.dictionaries(st.sampled_from(["role", "content"]), text), min_size=1, max_size=3),
    "prompt": text | st.lists(st.integers(0, 10**5)) | st.lists(text),
}


@st.composite
def objects(draw: st.DrawFn) -> bytes:
    """A JSON object as bytes: keys may repeat or be escaped, white space anywhere, any encoding that `json` reads."""
    space = st.sampled_from(["", "", " ", "\n\t", "\r\n "])
    members = []
    for key in draw(st.lists(st.sampled_from(KEYS), max_size=8)):
        held = draw(sane[key] if key in sane and draw(st.integers(0, 4)) else value)
        name = json.dumps(key) if draw(st.integers(0, 9)) else '"' + "".join(f"\\u{ord(c):04x}" for c in key) + '"'
        shown = json.dumps(held, ensure_ascii=draw(st.booleans()))
        members.append(draw(space) + name + draw(space) + ":" + draw(space) + shown + draw(space))
    whole = draw(space) + "{" + ",".join(members) + "}" + draw(space)
    encoding = draw(st.sampled_from(["utf-8"] * 8 + ["utf-8-sig", "utf-16", "utf-32"]))
    return whole.encode(encoding, "surrogatepass")


anything = st.binary(max_size=200) | mutated(st.sampled_from(REQUESTS) | objects(), TOKENS) | objects()


def plain(held: Any) -> str:
    """Comparable text; unpaired surrogates may have been replaced."""
    return re.sub(r"[\ud800-\udfff]", "\ufffd", json.dumps(held, ensure_ascii=False))


def integral(held: Any) -> bool:
    try:
        return held is None or float(held) == int(float(held))
    except (TypeError, ValueError, OverflowError):
        return False


def acceptable(api: str, sent: Any) -> bool:
    """Whether a body must not be refused."""
    if not isinstance(sent, dict):
        return False
    model = sent.get("model")
    if not (model is None or (isinstance(model, str) and re.fullmatch("[^\ud800-\udfff]{0,1024}", model, re.DOTALL))):
        return False
    stream = sent.get("stream")
    if not (stream is None or stream in TRUE or stream in (False, 0)):
        return False
    if not all(integral(sent.get(key)) for key in ("max_tokens", "max_completion_tokens", "n")):
        return False
    options = sent.get("stream_options")
    if not (options is None or (isinstance(options, dict) and options.get("include_usage") in (None, True, False))):
        return False
    if api == "chat":
        return isinstance(sent.get("messages"), list) and bool(sent["messages"])
    return isinstance(sent.get("prompt"), str | list)


@pytest.mark.slow
@bodies
@fuzz
@given(body=anything, api=st.sampled_from(sorted(PATHS)))
@example(body=b'{"\xed\xa0\x80":1,"stream_options":{"\xed\xa0\x80":null},"messages":[1]}', api="chat")
def test_requests_agree_with_the_oracle(body: bytes, api: str) -> None:
    sent = load(body)
    try:
        parsed = parse_request(PATHS[api], body)
    except ClientError as error:
        assert not acceptable(api, sent)
        json.loads(error_body(api, error.status, error.message, param=error.param, code=error.code))
        return
    assert parsed.api == api
    if sent is None:
        # Numbers of thousands of digits in fields that are not read are the model server's to refuse.
        assert re.search(rb"\d{4000}", body)
        return
    assert parsed.model == (sent.get("model") or "")
    assert parsed.stream == (str(sent.get("stream")).lower() in ("true", "t", "yes", "y", "on", "1", "1.0"))
    limit = sent.get("max_tokens")
    if api == "chat" and sent.get("max_completion_tokens") is not None:
        limit = sent["max_completion_tokens"]
    assert parsed.max_tokens == min(max(int(float(limit or 0)), 0), 2**31 - 1)
    raw = b"".join(parsed.prompt)
    if api == "chat":
        assert plain(json.loads(raw + b"]")) == plain(sent["messages"])
    elif isinstance(sent.get("prompt"), str):
        assert plain(json.loads(b'"' + raw + b'"')) == plain(sent["prompt"])
    elif sent.get("prompt") is not None:
        assert plain(json.loads(raw + b"]")) == plain(sent["prompt"])
    assert parsed.prompt_bytes >= 0


@pytest.mark.slow
@bodies
@fuzz
@given(body=anything)
def test_the_span_holds_the_model(body: bytes) -> None:
    span = model_span(body)
    sent = load(body)
    if not isinstance(sent, dict) or body[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\x00" in body[:4]:
        return
    if isinstance(sent.get("model"), str):
        assert span is not None
        assert json.loads(body[slice(*span)]) == sent["model"]
        changed = json.loads(body[: span[0]] + b'"changed"' + body[span[1] :])
        assert json.dumps(changed) == json.dumps(sent | {"model": "changed"})
    else:
        assert span is None


@pytest.mark.slow
@bodies
@fuzz
@given(
    before=st.lists(strict_value, min_size=1, max_size=3),
    appended=st.lists(strict_value, min_size=1, max_size=3),
    pretty=st.booleans(),
)
def test_appending_messages_keeps_the_prefix(before: list[Any], appended: list[Any], pretty: bool) -> None:
    def prompt(messages: list[Any]) -> bytes:
        body = json.dumps({"messages": messages, "model": "m"}, indent=1 if pretty else None).encode()
        return b"".join(parse_request(PATHS["chat"], body).prompt)

    assert prompt(before + appended).startswith(prompt(before))


@st.composite
def chunked(draw: st.DrawFn, body: bytes) -> list[bytes]:
    cuts = sorted(draw(st.lists(st.integers(0, len(body)), max_size=12)))
    return [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]


def scan(stream: bool, chunks: list[bytes]) -> tuple[Usage | None, int, bool]:
    scanner = UsageScanner(stream)
    for chunk in chunks:
        scanner.feed(chunk)
    return scanner.usage, scanner.error_status, scanner.done


usages = st.fixed_dictionaries(
    {},
    optional={
        "prompt_tokens": scalar,
        "completion_tokens": st.integers(0, 10**6),
        "total_tokens": st.integers(0, 10**6) | text,
        "prompt_tokens_details": value | st.fixed_dictionaries({"cached_tokens": st.integers(0, 99)}),
    },
)
events = st.dictionaries(st.sampled_from(["choices", "usage", "id", "delta", "error "]), usages | value, max_size=4)
lines = st.one_of(
    events.map(lambda e: b"data: " + json.dumps(e).encode()),
    st.sampled_from([b"", b": keep-alive", b"data: [DONE]", b"event: usage", b"data:", b'data: "usage"']),
    st.binary(max_size=20).map(lambda b: b.replace(b"\n", b"")),
)


@pytest.mark.slow
@responses
@fuzz
@given(data=st.data(), body=st.lists(lines, max_size=6))
def test_streams_agree_with_the_oracle(data: st.DataObject, body: list[bytes]) -> None:
    expected = None
    for line in body:
        event = load(line.removeprefix(b"data:"))
        if isinstance(event, dict):
            expected = usage_of(event.get("usage")) or expected
    end = data.draw(st.sampled_from([b"\n", b"\n\n", b"\r\n"]))
    found, error, _ = scan(True, data.draw(chunked(b"".join(line + end for line in body))))
    assert found == expected
    assert error == 0


@responses
@fuzz
@given(data=st.data(), event=events, padding=st.sampled_from([0, 0, 0, 100_000, 140_000, 300_000]), last=st.booleans())
def test_bodies_agree_with_the_oracle(data: st.DataObject, event: dict[str, Any], padding: int, last: bool) -> None:
    text_first = {"text": '"usage" ' * (padding // 8)} | event
    body = json.dumps(text_first if last else event | {"text": "x" * padding}).encode()
    found, error, done = scan(False, data.draw(chunked(body)))
    assert found == usage_of(event.get("usage"))
    assert (error, done) == (0, False)


@responses
@fuzz
@given(
    data=st.data(),
    body=mutated(st.sampled_from(RESPONSES) | objects(), TOKENS) | st.binary(max_size=300),
    stream=st.booleans(),
)
def test_mangled_responses_never_raise_and_cuts_do_not_matter(data: st.DataObject, body: bytes, stream: bool) -> None:
    assert scan(stream, data.draw(chunked(body))) == scan(stream, [body])


@responses
@fuzz
@given(usage=value | usages)
def test_usage_objects_never_raise(usage: Any) -> None:
    found = usage_of(usage)
    if found is not None:
        assert max(found.prompt_tokens, found.completion_tokens) >= 0
        assert all(isinstance(n, int) for n in (found.prompt_tokens, found.completion_tokens, found.cached_tokens))


@bodies
@fuzz
@given(path=st.text(max_size=40), body=st.binary(max_size=100), kind=st.text(max_size=20), coding=st.text(max_size=20))
def test_headers_of_any_kind_never_raise_anything_else(path: str, body: bytes, kind: str, coding: str) -> None:
    for tail in (path, path + "/v1/completions", "/v1/completions?" + path):
        with contextlib.suppress(ClientError):
            parse_request(tail, body, kind, content_encoding=coding)
