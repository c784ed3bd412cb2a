import json
from pathlib import Path

import pytest

from fairlead.parse.errors import MAX_MESSAGE_CHARS, error_body

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
    error = json.loads(error_body("completions", 429, "full", type_="Mine", param="x", code="rejected-saturated"))[
        "error"
    ]
    assert error == {"message": "full", "type": "Mine", "param": "x", "code": "rejected-saturated"}


@pytest.mark.parametrize("message", ['"quoted"\n\x00', "\ud800", "é🦊", "x" * 10**6])
def test_any_text_gives_json(message: str) -> None:
    body = error_body("chat", 400, message, param=message, code=message)
    assert len(json.loads(body)["error"]["message"]) <= MAX_MESSAGE_CHARS
