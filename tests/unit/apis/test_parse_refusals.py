"""What every API refuses, in its own shape and with the reason; and what it leaves to the model server."""

import json
import re
from typing import Any

import pytest

from fairlead.apis.body import MAX_COUNT
from fairlead.apis.errors import error_body
from fairlead.apis.parsed import MAX_MODEL_CHARS, MAX_USER_CHARS
from fairlead.apis.request import ParsedRequest, parse_request, parser_of
from fairlead.core.apis import WITHOUT_OUTPUT
from fairlead.core.errors import ClientError

#: For each API that reads JSON: path, and a body that is enough.
ENOUGH: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    "completions": ("/v1/completions", {"prompt": "hi"}),
    "embeddings": ("/v1/embeddings", {"input": "hi"}),
    "responses": ("/v1/responses", {"input": "hi"}),
    "conversations": ("/v1/conversations", {}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}]}),
    "count_tokens": ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
    "score": ("/v1/score", {"queries": "a", "documents": ["b"]}),
    "rerank": ("/rerank", {"query": "a", "documents": ["b"]}),
    "pooling": ("/pooling", {"input": "hi"}),
    "audio": ("/v1/audio/speech", {"input": "hi"}),
    "images": ("/v1/images/generations", {"prompt": "hi"}),
    "generate": ("/inference/v1/generate", {"token_ids": [1]}),
    "sglang": ("/generate", {"text": "hi"}),
    "tokenize": ("/tokenize", {"prompt": "hi"}),
    "render": ("/v1/completions/render", {"prompt": "hi"}),
}
apis = pytest.mark.parametrize("api", ENOUGH)


def parse(api: str, body: bytes, **options: str) -> ParsedRequest:
    return parse_request(ENOUGH[api][0], body, **options)


def with_members(api: str, text: str) -> bytes:
    """A sufficient body with more members, as JSON text."""
    enough = json.dumps(ENOUGH[api][1])
    return ("{" + text + ("" if enough == "{}" else ", ") + enough[1:]).encode()


def refusal(api: str, body: bytes) -> ClientError:
    with pytest.raises(ClientError) as error:
        parse(api, body)
    refused = error.value
    assert refused.status == 400
    assert refused.message.endswith(".")
    shown = json.loads(error_body(api, 400, refused.message, param=refused.param))
    assert shown["error"]["message"] == refused.message
    assert (shown.get("type") == "error") == (api in ("messages", "count_tokens"))
    return refused


@apis
def test_enough_is_enough(api: str) -> None:
    parsed = parse(api, json.dumps(ENOUGH[api][1]).encode())
    assert (parsed.api, parsed.model, parsed.stream, parsed.unread) == (api, "", False, "")


@apis
@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "no body"),
        (b"{", "not valid JSON"),
        (b"nonsense", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b'"x"', "must be a JSON object"),
        (b'{"model":"\xff"}', "not valid utf-8"),
        (b'{"x":"\xc3("}', "not valid utf-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"messages":' * 50_000, "nested too deeply"),
        (b'{"x":' + b"[" * 50_000 + b"]" * 50_000 + b"}", "nested too deeply"),
        (b'{"model":["m"]}', "'model': expected a string"),
        (b'{"model":7}', "'model': expected a string"),
        (b"\x1f\x8b\x08\x00\x00\x00\x00\x00", "not valid utf-8"),
    ],
)
def test_what_nobody_can_read(api: str, body: bytes, says: str) -> None:
    assert says in refusal(api, body).message


@apis
def test_models_that_cannot_be(api: str) -> None:
    long = "x" * (MAX_MODEL_CHARS + 1)
    assert refusal(api, with_members(api, f'"model": "{long}"')).param == "model"
    assert refusal(api, with_members(api, '"model": "\\ud800"')).param == "model"


@apis
@pytest.mark.parametrize("value", ["true", '"yes"', "1", "1.0"])
def test_flags_are_read_as_pydantic_reads_them(api: str, value: str) -> None:
    if parse(api, with_members(api, '"stream": true')).stream:
        assert parse(api, with_members(api, f'"stream": {value}')).stream
        assert refusal(api, with_members(api, '"stream": "perhaps"')).param == "stream"
    else:
        assert api in WITHOUT_OUTPUT


LIMITS = {
    "chat": "max_tokens",
    "completions": "max_tokens",
    "responses": "max_output_tokens",
    "messages": "max_tokens",
    "audio": "max_completion_tokens",
}


@pytest.mark.parametrize(("api", "name"), LIMITS.items())
def test_limits(api: str, name: str) -> None:
    def limit(value: str) -> int:
        return parse(api, with_members(api, f'"{name}": {value}')).max_tokens

    assert [limit(value) for value in ("7", '"7"', "7.0", "-1", "null")] == [7, 7, 7, 0, 0]
    assert limit("1" * 400) == MAX_COUNT
    assert limit("1e300") == MAX_COUNT
    for wrong in ("[]", '"many"', "1.5", "{}"):
        assert refusal(api, with_members(api, f'"{name}": {wrong}')).param == name
    assert "too many digits" in refusal(api, with_members(api, f'"{name}": ' + "1" * 10_000)).message


@pytest.mark.parametrize(("api", "name"), [("generate", "max_tokens"), ("sglang", "max_new_tokens")])
def test_limits_among_the_sampling_parameters(api: str, name: str) -> None:
    def limit(value: str) -> int:
        return parse(api, with_members(api, f'"sampling_params": {value}')).max_tokens

    numbers = ("7", '"7"', "-1", "null", "1" * 400)
    assert [limit(f'{{"{name}": {value}}}') for value in numbers] == [7, 7, 0, 0, MAX_COUNT]
    assert [limit(value) for value in ("null", "[]", "5", '"x"', "[[]]", '{"x":1}')] == [0] * 6
    assert refusal(api, with_members(api, f'"sampling_params": {{"{name}": "many"}}')).param == name


@apis
def test_of_equal_keys_the_last_one_counts(api: str) -> None:
    assert parse(api, with_members(api, '"model": 5, "model": "a", "mod\\u0065l": "b"')).model == "b"


@apis
def test_compressed_bodies_are_scheduled_unread(api: str) -> None:
    packed = parse(api, b"\x1f\x8b\x08", content_encoding="gzip")
    assert (packed.api, packed.unread, packed.prompt_bytes, packed.model) == (api, "content-encoding", 3, "")
    plain = json.dumps(ENOUGH[api][1]).encode()
    assert parse(api, plain, content_encoding="Identity").unread == ""


@apis
def test_large_bodies_that_only_lenient_parsers_read_are_scheduled_unread(api: str) -> None:
    body = with_members(api, '"x": NaN, "y": "' + "y" * (1 << 20) + '"')
    parsed = parse(api, body)
    assert (parsed.api, parsed.unread, parsed.prompt_bytes) == (api, "too-large", len(body))


@pytest.mark.parametrize("api", [api for api in ENOUGH if api not in ("audio", "images")])
def test_wrong_content_types_are_mentioned(api: str) -> None:
    with pytest.raises(ClientError, match="Its content type is 'text/plain'"):
        parse(api, b"nonsense", content_type="text/plain")
    assert parse(api, json.dumps(ENOUGH[api][1]).encode(), content_type="text/plain").unread == ""


@pytest.mark.parametrize("api", ["audio", "images"])
def test_what_is_neither_a_form_nor_json_is_the_model_servers_to_refuse(api: str) -> None:
    parsed = parse(api, b"RIFF....", content_type="audio/wav")
    assert (parsed.api, parsed.unread, parsed.stream) == (api, "content-type", True)


@pytest.mark.parametrize(
    ("api", "body", "param"),
    [
        ("embeddings", "{}", "input"),
        ("embeddings", '{"input":null}', "input"),
        ("embeddings", '{"input":5}', "input"),
        ("embeddings", '{"input":{}}', "input"),
        ("embeddings", '{"messages":[]}', "messages"),
        ("responses", "{}", "input"),
        ("responses", '{"input":null}', "input"),
        ("responses", '{"input":true}', "input"),
        ("conversations", '{"items":"x"}', "items"),
        ("messages", "{}", "messages"),
        ("messages", '{"messages":[ ]}', "messages"),
        ("messages", '{"messages":"hi"}', "messages"),
        ("count_tokens", '{"messages":[]}', "messages"),
        ("rerank", '{"query":"q"}', "documents"),
        ("rerank", '{"documents":["d"]}', "query"),
        ("score", '{"queries":"q"}', None),
        ("score", '{"text_1":"q","data_2":"d"}', None),
        ("generate", "{}", "token_ids"),
        ("generate", '{"token_ids":[]}', "token_ids"),
        ("generate", '{"token_ids":["a"]}', "token_ids"),
        ("generate", '{"token_ids":"1,2"}', "token_ids"),
        ("sglang", "{}", "input_ids"),
        ("sglang", '{"text":5}', "input_ids"),
    ],
)
def test_what_is_missing_is_named(api: str, body: str, param: str | None) -> None:
    refused = refusal(api, body.encode())
    assert refused.param == param
    assert param is None or re.search(rf"'{param}'", refused.message)


@pytest.mark.parametrize(
    ("api", "body"),
    [
        ("embeddings", '{"messages":[{"role":"user","content":"hi"}]}'),
        ("embeddings", '{"input":[]}'),
        ("responses", '{"input":[],"max_output_tokens":-5,"tools":"x","user":["u"]}'),
        ("conversations", '{"items":null,"metadata":{}}'),
        ("messages", '{"messages":[5],"system":{},"tools":7,"metadata":[],"max_tokens":null}'),
        ("rerank", '{"query":{"content":[]},"documents":"d"}'),
        ("score", '{"query":"a","items":["b"]}'),
        ("score", '{"data_1":{"content":[]},"data_2":["b"]}'),
        ("pooling", "{}"),
        ("pooling", '{"data":{"image":"x"}}'),
        ("audio", "{}"),
        ("images", '{"n":0}'),
        ("generate", '{"token_ids":[[1],[2]],"features":[5]}'),
        ("generate", '{"token_ids":[1],"features":{"mm_hashes":{"image":null,"x":["h"]}}}'),
        ("sglang", '{"input_embeds":[[0.5]],"image_data":"http://x","audio_data":[1,2],"video_data":null}'),
        ("sglang", '{"inputs":["a","b"],"parameters":null}'),
        ("sglang", '{"prompt":"hi","max_tokens":5}'),
        ("tokenize", '{"tokens":[1]}'),
        ("tokenize", "{}"),
        ("render", '{"messages":[]}'),
    ],
)
def test_the_rest_is_the_model_servers_to_answer(api: str, body: str) -> None:
    parsed = parse(api, body.encode())
    assert (parsed.api, parsed.unread) == (api, "")


@pytest.mark.parametrize(
    ("members", "stored"),
    [
        ({"input": "x", "store": False, "background": None, "previous_response_id": None}, False),
        ({"input": "x", "previous_response_id": "resp_1"}, True),
        ({"input": "x", "conversation": 5}, True),
        ({"input": "x", "store": True}, True),
        ({"input": "x", "background": True}, True),
        ({"prompt": {"id": "pmpt_1"}}, True),
    ],
)
def test_responses_that_depend_on_what_a_server_stores_are_told_apart(members: dict[str, Any], stored: bool) -> None:
    parsed = parse("responses", json.dumps(members).encode())
    assert (parsed.api, parsed.unread) == ("responses_stored" if stored else "responses", "")


@pytest.mark.parametrize("name", ["conversation", "prompt_cache_key", "user"])
def test_session_hints_of_the_responses_api(name: str) -> None:
    def hint(**members: Any) -> str:
        return parse("responses", json.dumps({"input": "x"} | members).encode()).user

    assert hint(**{name: "s"}) == "s"
    assert hint(**{name: 5}) == hint(**{name: None}) == hint(**{name: "x" * (MAX_USER_CHARS + 1)}) == ""
    assert hint(conversation={"id": "c"}, prompt_cache_key="k", user="u") == "c"
    assert hint(conversation={"id": 5}, prompt_cache_key="", user="u") == "u"


@pytest.mark.parametrize(
    ("metadata", "user"),
    [({"user_id": "u"}, "u"), ({"user_id": 5}, ""), ({}, ""), (None, ""), ("u", ""), ([{"user_id": "u"}], "")],
)
def test_session_hints_of_the_messages_api(metadata: Any, user: str) -> None:
    body = json.dumps(ENOUGH["messages"][1] | {"metadata": metadata}).encode()
    assert parse("messages", body).user == user


@pytest.mark.parametrize("path", ["/v1/responses/resp_1/cancel", "/openai/v1/conversations/conv_1/?x=1"])
@pytest.mark.parametrize("body", ["null", "[]", "a=b", '{"items":{}}', '{"model":1}', ""])
def test_what_is_sent_to_something_stored_is_the_model_servers_to_judge(path: str, body: str) -> None:
    parsed = parse_request(path, body.encode())
    assert (parsed.api, parsed.unread, parsed.stream) == ("conversations", "path", False)
    assert parser_of(path) is None
    with pytest.raises(ClientError):
        parse_request("/v1/conversations/conv_1/v1/messages", body.encode())
