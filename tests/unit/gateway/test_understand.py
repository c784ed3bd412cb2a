import json
import tracemalloc
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from fairlead.core.errors import ClientError
from fairlead.core.headers import PATH_HEADERS, REWRITE_HEADERS
from fairlead.core.models import (
    Catalogue,
    InferenceModel,
    InferenceModelRewrite,
    ModelRules,
    ModelSet,
    Origin,
    Resolution,
    RewriteRule,
    Target,
    applied,
)
from fairlead.core.prefix import ChainHasher
from fairlead.core.request import NO_PREFIX, RECOGNISED, Request
from fairlead.core.tokens import TokenEstimator
from fairlead.gateway.understand import MAX_NAME, MAX_STARTS, PromptKnown, Understanding

PATHS = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "embeddings": "/v1/embeddings",
}
HASHER = ChainHasher()


def maker(conversations: bool = True) -> Callable[..., Request]:
    understanding = Understanding(TokenEstimator(), HASHER, lambda: 5.0, conversations)

    def make(api: str, headers: dict[str, str] | None = None, **members: Any) -> Request:
        body = json.dumps({"model": "m"} | members).encode()
        return understanding.request(understanding.head({":path": PATHS[api], **(headers or {})}), body)[0]

    return make


def messages(*turns: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": turn * 300} for i, turn in enumerate(turns)]


def test_what_becomes_of_a_body() -> None:
    image = {"type": "image_url", "image_url": {"url": "https://x/y.png"}}
    content = [{"type": "text", "text": "x" * 1000}, image]
    request = maker()("chat", messages=[{"role": "user", "content": content}], stream=True, max_tokens=3)
    assert (request.api, request.model, request.stream, request.max_tokens) == ("chat", "m", True, 3)
    assert (request.media, request.unread, request.session) == (1, "", "")
    assert request.prompt_tokens > 1000
    assert len(request.prefix.hashes) == 4


@pytest.mark.parametrize(("api", "name"), [("chat", "messages"), ("messages", "messages"), ("responses", "input")])
def test_a_conversation_without_a_session_id_is_recognised(api: str, name: str) -> None:
    make = maker()
    grown = [messages("a"), messages("a", "b", "c"), messages("a", "b", "c", "d", "e")]
    sessions = [make(api, **{name: turns}).session for turns in grown]
    assert sessions[0] == ""
    assert sessions[1][0] == "~"
    assert sessions[2] == sessions[1]
    other = [make(api, **{name: turns}).session for turns in (messages("x"), messages("x", "y", "z"))]
    assert other[1] not in ("", sessions[1])


def test_recognising_can_be_switched_off() -> None:
    make = maker(conversations=False)
    grown = [messages("a"), messages("a", "b", "c")]
    assert [make("chat", messages=turns).session for turns in grown] == ["", ""]


def test_what_the_client_says_goes_first() -> None:
    make = maker()
    make("chat", messages=messages("a"))
    grown = messages("a", "b", "c")
    assert make("chat", {"x-session-id": "s"}, messages=grown, user="u").session == "s"
    assert make("chat", messages=grown, user="u").session == "u"
    assert make("chat", messages=grown, prompt_cache_key="k", user="u").session == "k"
    assert make("messages", messages=grown, metadata={"user_id": "u" * 999}).session == "u" * MAX_NAME
    assert make("responses", input="hi", conversation="c").session == "c"
    assert make("chat", messages=grown).session.startswith("~")


def test_what_is_no_conversation_has_none() -> None:
    make = maker()
    assert make("embeddings", input="x" * 1000).session == ""
    assert make("embeddings", input="x" * 2000).session == ""
    assert make("embeddings", input="x" * 2000, user="u").session == "u"


def test_a_system_prompt_of_its_own_is_hashed_before_the_messages() -> None:
    make = maker()
    one = make("messages", system="s" * 2000, messages=messages("a"))
    other = make("messages", system="s" * 2000, messages=messages("b"))
    shared = [a for a, b in zip(one.prefix.hashes, other.prefix.hashes, strict=True) if a == b]
    assert shared == list(one.prefix.hashes[: len(shared)])
    assert one.prefix.ends[len(shared) - 1] in range(1700, 2001)


@pytest.mark.parametrize(
    ("path", "api", "stream"),
    [("/v1/models", "models", False), ("/v1/messages", "messages", True), ("/v1/unknown", "other", False)],
)
def test_a_request_without_a_body(path: str, api: str, stream: bool) -> None:
    understanding = Understanding(TokenEstimator(), HASHER, lambda: 5.0)
    request, _ = understanding.request(understanding.head({":path": path}), b"")
    assert (request.api, request.stream, request.unread, request.prefix) == (api, stream, "no-body", NO_PREFIX)


def test_a_compressed_body() -> None:
    understanding = Understanding(TokenEstimator(), HASHER, lambda: 5.0)
    headers = {":path": "/v1/messages", "content-encoding": "br"}
    request, _ = understanding.request(understanding.head(headers), b"\x0b\x02")
    assert (request.api, request.stream, request.unread, request.body_bytes) == (
        "messages",
        True,
        "content-encoding",
        2,
    )


def test_the_api_of_what_cannot_be_understood() -> None:
    understanding = Understanding(TokenEstimator(), HASHER, lambda: 5.0)
    headers = {":path": "", "x-original-path": "/v1/messages?beta=true"}
    assert understanding.api(headers) == "messages"
    assert understanding.api({}) == "other"
    with pytest.raises(ClientError):
        understanding.request(understanding.head(headers), b"{")


def test_what_a_conversation_begins_with_is_read_only_where_something_depends_on_it() -> None:
    understanding = Understanding(TokenEstimator(), HASHER, lambda: 5.0)

    def opening(*turns: str) -> str:
        head = understanding.head({":path": PATHS["chat"]})
        return understanding.request(head, json.dumps({"model": "m", "messages": messages(*turns)}).encode())[0].opening

    assert opening("a") == ""
    understanding.canary(True)
    assert opening("a")[:1] == RECOGNISED
    assert opening("a") == opening("a", "answer", "b") != opening("b")
    understanding.canary(False)
    assert opening("a") == ""


def test_responses_that_are_stored_begin_conversations_as_others_do() -> None:
    understanding = Understanding(TokenEstimator(), HASHER, lambda: 5.0)
    understanding.canary(True)
    head = understanding.head({":path": PATHS["responses"]})
    bodies = [{"model": "m", "input": messages("a"), **more} for more in ({}, {"store": True}, {"background": True})]
    requests = [understanding.request(head, json.dumps(body).encode())[0] for body in bodies]
    assert [request.api for request in requests] == ["responses", "responses_stored", "responses_stored"]
    assert len({request.opening for request in requests}) == 1
    assert requests[0].opening


@pytest.mark.parametrize("sticky", [False, True])
def test_an_opening_that_many_requests_share_is_none_of_a_conversation(sticky: bool) -> None:
    """By it, a canary or a target of a split would take all of them, or none."""
    understanding = Understanding(TokenEstimator(), HASHER, lambda: 5.0)
    if sticky:
        split = InferenceModel(origin=Origin(namespace="", name="m"), model="m", targets=(Target("a"), Target("b")))
        understanding.define(Catalogue(ModelSet((split,)), ModelRules(sticky_sessions=True)))
    else:
        understanding.canary(True)

    def opening(*turns: str) -> str:
        head = understanding.head({":path": PATHS["chat"]})
        return understanding.request(head, json.dumps({"model": "m", "messages": messages(*turns)}).encode())[0].opening

    examples = "example", "answer"
    asked = [opening(*examples, f"question {number} ") for number in range(20)]
    assert len({*asked[:MAX_STARTS]}) == 1 and len({*asked[MAX_STARTS:]}) == 20 - MAX_STARTS
    later = [opening(*examples, f"question {number} ", "answer", "more") for number in range(MAX_STARTS, 20)]
    assert later == asked[MAX_STARTS:], "each is a conversation of its own"
    repeated = [opening("a prompt in a loop") for _ in range(20)]
    assert len({*repeated[:MAX_STARTS]}) == 1 and {*repeated[MAX_STARTS:]} == {""}
    turns = [text for number in range(20) for text in (f"question {number} ", "answer")]
    assert "" not in {opening(*turns[:end]) for end in range(1, 40, 2)}


@pytest.mark.parametrize("text", ["The quick brown fox. ", "Der schnelle Fuchs – 日本語 🦊 "])
def test_nothing_of_a_large_chat_is_copied(text: str) -> None:
    turns = [{"role": ("user", "assistant")[i % 2], "content": text * 100} for i in range(200)]
    body = json.dumps({"model": "m", "messages": turns}, ensure_ascii=False).encode()
    assert len(body) > 400_000
    understanding = Understanding(TokenEstimator(), HASHER, lambda: 5.0)
    headers = {":path": PATHS["chat"], "content-type": "application/json"}
    understanding.request(understanding.head(headers), b'{"messages":[1]}')
    tracemalloc.start()
    try:
        request, _ = understanding.request(understanding.head(headers), body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(request.prefix.hashes) > 100
    assert peak < 100_000


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/v1/chat%2Fcompletions",
            "/v1%2fchat%2Fcompletions?a=b",
            "/v1/chat%252Fcompletions",
            "//v1/chat//completions",
        ),
        *(
            "/v1/./chat/completions",
            "/x/../v1/chat/completions",
            "/x/%2e%2e/v1/chat/completions",
            "/v1/ch%61t/completions",
        ),
        *("/v1/chat\\completions", "/v1/chat%5Ccompletions", "/v1/chat;x=1/completions", "/v1/chat/completions;x"),
        *("/v1/chat/completions%20", "/v1/chat/completions%3Fx", "http://a/v1/chat/completions", "v1/chat/completions"),
        *("/openai/v1/chat%2Fcompletions", "/v1/chat/completions/", "/v1/chat/completions%2F"),
    ],
)
def test_no_spelling_of_a_path_hides_the_model(path: str) -> None:
    understanding = Understanding(TokenEstimator(), HASHER, lambda: 5.0)
    body = json.dumps({"model": "forbidden", "messages": messages("a")}).encode()
    for name in (":path", PATH_HEADERS[0]):
        request, _ = understanding.request(understanding.head({name: path}), body)
        assert (request.api, request.model) == ("chat", "forbidden")
        assert understanding.api({name: path}) == "chat"


@pytest.mark.parametrize(
    "path", ["/v1/files%2F1", "/a//b", "/v1/chat/../completion", "/%zz", "*", "", "/" + "%25" * 5000]
)
def test_a_path_of_nobody_stays_as_it_is(path: str) -> None:
    understanding = Understanding(TokenEstimator(), HASHER, lambda: 5.0)
    request, _ = understanding.request(understanding.head({":path": path}), b"{}")
    assert (request.api, request.path, request.unread) == ("other", path, "path")


def defined() -> Catalogue:
    """`a` and `b` are names of `base`, `rule` is rewritten to it, and `split` is sent to it or to `new`."""
    origin = Origin(namespace="n", name="o")
    names = {"a": ("base",), "b": ("base",), "base": (), "split": ("base", "new")}
    models = [
        InferenceModel(origin=origin, model=name, targets=tuple(Target(target, 1) for target in targets))
        for name, targets in names.items()
    ]
    rule = RewriteRule(models=("rule",), targets=(Target("base", 1),))
    return Catalogue(ModelSet(tuple(models), rewrites=(InferenceModelRewrite(origin=origin, rules=(rule,)),)))


@pytest.mark.parametrize(("api", "name"), [("chat", "messages"), ("messages", "messages"), ("responses", "input")])
def test_names_of_one_target_share_its_prefixes_and_token_ratio(api: str, name: str) -> None:
    catalogue, tokens, rng = defined(), TokenEstimator(), Random(1)
    understanding = Understanding(tokens, HASHER, lambda: 5.0)
    understanding.define(catalogue)
    tokens.learn("base", 1000, 1000, api)

    def of(model: str, **headers: str) -> Request:
        body = json.dumps({"model": model, name: messages("a")}).encode()
        request = understanding.request(understanding.head({":path": PATHS[api], **headers}), body)[0]
        resolution = catalogue.resolve(request, rng)
        assert isinstance(resolution, Resolution)
        assert request.model == model
        return applied(request, resolution, catalogue.rewrites)

    same = [of("base"), of("a"), of("b"), of("rule"), of("a", **{REWRITE_HEADERS[0]: "base"})]
    assert {request.target_model for request in same} == {"base"}
    assert len({request.prefix.hashes for request in same}) == 1
    assert len({request.prompt_tokens for request in same}) == 1
    drawn = [of("split") for _ in range(20)]
    assert {request.target_model for request in drawn} == {"base", "new"}
    assert len({request.prefix.hashes for request in drawn}) == 2
    assert {request.prefix.hashes for request in drawn if request.target_model == "base"} == {same[0].prefix.hashes}
    assert {request.prompt_tokens for request in drawn} == {same[0].prompt_tokens}, "estimated as for the first target"


def test_the_first_models_that_are_defined_while_a_prompt_is_read_leave_it_without_prefix() -> None:
    understanding = Understanding(TokenEstimator(), HASHER, lambda: 5.0)
    understanding.define(defined())
    head = understanding.head({":path": PATHS["chat"]})
    request = understanding.request(head, json.dumps({"model": "a", "messages": messages("a")}).encode())[0]
    assert understanding.known(request, PromptKnown(7), head).prefix == request.prefix != NO_PREFIX
    understanding.define(defined())
    assert understanding.known(request, PromptKnown(7), head).prefix == request.prefix, "the core adds the new target"
    understanding.define(Catalogue())
    assert understanding.known(request, PromptKnown(7), head).prefix == NO_PREFIX
    before = Understanding(TokenEstimator(), HASHER, lambda: 5.0)
    head = before.head({":path": PATHS["chat"]})
    before.define(defined())
    assert before.known(request, PromptKnown(7), head).prefix == NO_PREFIX, "there were no definitions yet"
