import sys

import pytest

from fairlead.core import apis
from fairlead.core.apis import STREAMING, WITHOUT_OUTPUT, api_of


@pytest.mark.parametrize(
    ("path", "api"),
    [
        ("/v1/chat/completions", "chat"),
        ("/v1/completions", "completions"),
        ("/v1/chat/completions/", "chat"),
        ("/v1/completions?api-version=1&x=/v1/chat/completions", "completions"),
        ("/v1/completions/?a=b", "completions"),
        ("/openai/v1/chat/completions", "chat"),
        ("/a/b/v1/completions", "completions"),
        ("/v1/foocompletions", "other"),
        ("/foov1/completions", "other"),
        ("/v1/chat/completions/x", "other"),
        ("/v1/completions//", "other"),
        ("/v1/chat%2Fcompletions", "other"),
        ("/V1/completions", "other"),
        ("/chat/completions", "other"),
        ("/v1/embedding", "other"),
        ("/?/v1/completions", "other"),
        ("/openai/v1/responses/resp_1?stream=true", "conversations"),
        ("/v1/responses/resp_1/cancel", "conversations"),
        ("/v1/conversations/conv_1/items/msg_1/", "conversations"),
        ("/v1/conversations/conv_1/items/msg_1/x", "other"),
        ("/v1/responses/compact", "other"),
        ("/v1/responses/resp_1/../../load_lora_adapter", "other"),
        ("", "other"),
        ("/", "other"),
        ("*", "other"),
    ],
)
def test_paths(path: str, api: str) -> None:
    assert api_of(path) == api


PATHS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/embeddings": "embeddings",
    "/v1/responses": "responses",
    "/v1/conversations": "conversations",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "count_tokens",
    "/v1/score": "score",
    "/score": "score",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/rerank": "rerank",
    "/pooling": "pooling",
    "/classify": "pooling",
    "/v1/audio/transcriptions": "audio",
    "/v1/audio/translations": "audio",
    "/v1/audio/speech": "audio",
    "/v1/images/generations": "images",
    "/v1/images/edits": "images",
    "/v1/images/variations": "images",
    "/inference/v1/generate": "generate",
    "/generate": "sglang",
    "/generate_stream": "sglang",
    "/vllm.grpc.engine.VllmEngine/Generate": "grpc",
    "/vllm.grpc.engine.VllmEngine/Embed": "grpc_embed",
    "/tokenize": "tokenize",
    "/detokenize": "tokenize",
    "/v1/chat/completions/render": "render",
    "/v1/completions/render": "render",
    "/v1/models": "models",
}


@pytest.mark.parametrize(("path", "api"), PATHS.items())
def test_every_path_speaks_its_api(path: str, api: str) -> None:
    assert api_of(path) == api
    assert api_of(path + "/?x=1") == api
    behind_anything = api if "/v" in path and not path.startswith("/vllm") else "other"
    assert api_of("/openai" + path) == behind_anything
    assert api_of(path + "/x") == "other"
    assert api_of(path.replace("/", "/x", 1)) == "other"


def test_the_names_are_labels() -> None:
    names = {value for name, value in vars(apis).items() if name.isupper() and isinstance(value, str)}
    assert names == {*PATHS.values(), "other", "responses_stored"}
    assert names >= STREAMING | WITHOUT_OUTPUT
    # Images may be streamed, in pieces that are no tokens.
    assert {"images"} == STREAMING & WITHOUT_OUTPUT


def test_a_path_of_any_length_is_looked_at_once() -> None:
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    path = "/v1" * 50_000
    sys.setprofile(count)
    try:
        api = api_of(path)
    finally:
        sys.setprofile(None)
    assert (api, calls < 60) == ("other", True)
