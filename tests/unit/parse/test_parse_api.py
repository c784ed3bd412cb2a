import pytest

from fairlead.parse.api import api_of


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
        ("/v1/chat/completions/render", "other"),
        ("/v1/completions//", "other"),
        ("/v1/chat%2Fcompletions", "other"),
        ("/V1/completions", "other"),
        ("/chat/completions", "other"),
        ("/v1/embeddings", "other"),
        ("/?/v1/completions", "other"),
        ("", "other"),
        ("/", "other"),
        ("*", "other"),
    ],
)
def test_paths(path: str, api: str) -> None:
    assert api_of(path) == api


@pytest.mark.parametrize(
    ("path", "prefix", "api"),
    [
        ("/openai/v1/completions", "/openai", "completions"),
        ("/openai/v1/completions", "/openai/", "completions"),
        ("/v1/completions", "/openai", "completions"),
        ("/azure/v1/completions", "/openai", "other"),
        ("/x/openai/v1/completions", "/openai", "other"),
        ("/openai/v1/completions", "", "other"),
        ("/v1/completions", "", "completions"),
    ],
)
def test_a_configured_prefix_is_the_only_one(path: str, prefix: str, api: str) -> None:
    assert api_of(path, prefix) == api
