import json
from pathlib import Path

import pytest

from fairlead.apis.errors import MAX_MESSAGE_CHARS, content_type, error_body, grpc_status

DATA = Path(__file__).parents[2] / "data" / "vllm-0.32-responses"


@pytest.mark.parametrize(
    "case",
    ["err_empty_prompt", "err_negative_max_tokens", "err_503_queue_full_stream_False", "err_model_404_chat_stream"],
)
def test_the_same_shape_and_types_as_the_engine(case: str) -> None:
    recorded = json.loads((DATA / f"{case}.response.bin").read_bytes().partition(b"\r\n\r\n")[2])
    error = recorded["error"]
    body = error_body("chat", error["code"], error["message"], param=error["param"])
    assert json.loads(body) == recorded


@pytest.mark.parametrize("status", [400, 404, 418, 429, 500, 503, 599])
def test_every_status_has_a_type_and_is_its_own_code(status: int) -> None:
    error = json.loads(error_body("other", status, "no"))["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["type"]
    assert error["param"] is None
    assert error["code"] == status


def test_given_names_win() -> None:
    error = json.loads(error_body("completions", 429, "full", param="x", code="rejected-saturated"))["error"]
    assert error == {"message": "full", "type": "RateLimitError", "param": "x", "code": "rejected-saturated"}


@pytest.mark.parametrize("message", ['"quoted"\n\x00', "\ud800", "é🦊", "x" * 10**6])
def test_any_text_gives_json(message: str) -> None:
    body = error_body("chat", 400, message, param=message, code=message)
    assert len(json.loads(body)["error"]["message"]) <= MAX_MESSAGE_CHARS


@pytest.mark.parametrize("api", ["messages", "count_tokens"])
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (529, "overloaded_error"),
    ],
)
def test_anthropics_shape(api: str, status: int, kind: str) -> None:
    body = error_body(api, status, "no", param="x", code="rejected-saturated")
    assert json.loads(body) == {"type": "error", "error": {"type": kind, "message": "no"}}
    assert content_type(api) == "application/json"
    assert grpc_status(api, status) == -1


@pytest.mark.parametrize("api", ["grpc", "grpc_embed"])
def test_grpc_has_no_bodies_but_statuses(api: str) -> None:
    assert error_body(api, 400, "bad \ud800 é") == "bad ? é".encode()
    assert content_type(api).startswith("text/plain")
    expected = {400: 3, 401: 16, 403: 7, 404: 5, 408: 4, 413: 8, 429: 8, 500: 13, 502: 14, 503: 14, 504: 4, 418: 2}
    assert {status: grpc_status(api, status) for status in expected} == expected


@pytest.mark.parametrize("api", ["chat", "generate", "sglang", "embeddings", "rerank", "audio", "tokenize", "other"])
def test_all_others_speak_openais_shape(api: str) -> None:
    assert json.loads(error_body(api, 503, "busy"))["error"]["code"] == 503
    assert content_type(api) == "application/json"
