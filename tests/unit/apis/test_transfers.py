"""Bodies that name hosts to the engine."""

import json
from typing import Any

import pytest

from fairlead.apis.body import SALVAGE_LIMIT, TransferError, without_transfers
from fairlead.apis.request import parse_request
from fairlead.core.apis import CHAT
from fairlead.core.prefix import ChainHasher
from fairlead.core.tokens import TokenEstimator
from fairlead.gateway.understand import Understanding

PARAMS = {"do_remote_prefill": True, "remote_host": "169.254.169.254", "remote_port": 80, "remote_block_ids": [1]}
CHATS, MESSAGE = "/v1/chat/completions", {"role": "user", "content": "hello"}
BODIES: dict[str, dict[str, Any]] = {
    CHATS: {"model": "m", "messages": [MESSAGE]},
    "/v1/completions": {"model": "m", "prompt": "hello"},
    "/v1/responses": {"model": "m", "input": "hello"},
    "/v1/messages": {"model": "m", "messages": [MESSAGE], "max_tokens": 5},
    "/v1/chat/completions/render": {"model": "m", "messages": [MESSAGE]},
    "/inference/v1/generate": {"model": "m", "token_ids": [1, 2], "sampling_params": {}},
    "/generate": {"text": "hello"},
}


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params", "bootstrap_host"])
@pytest.mark.parametrize("path", BODIES)
def test_clients_name_no_hosts_to_the_engine(path: str, name: str) -> None:
    for value in (PARAMS, "10.0.0.1", [], False):
        with pytest.raises(TransferError, match=name):
            parse_request(path, json.dumps(BODIES[path] | {name: value}).encode())
    assert parse_request(path, json.dumps(BODIES[path] | {name: None}).encode()).unread == ""


def test_nor_in_the_sampling_parameters() -> None:
    for more in ({}, {"n": {}}, {"temperature": float("nan")}):
        sampling = {"extra_args": {"kv_transfer_params": PARAMS}} | more
        body = json.dumps({"token_ids": [1], "sampling_params": sampling}).encode()
        with pytest.raises(TransferError):
            parse_request("/inference/v1/generate", body)
    harmless = {"token_ids": [1], "sampling_params": {"extra_args": {"kv": 1}, "n": 2}}
    assert parse_request("/inference/v1/generate", json.dumps(harmless).encode()).n == 2


def large(**more: Any) -> str:
    """A body that is read only once, and not strict JSON."""
    return json.dumps(BODIES[CHATS] | {"temperature": float("nan"), "user": "x" * SALVAGE_LIMIT} | more)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32-be"])
def test_nor_in_a_body_that_is_left_unread(encoding: str) -> None:
    assert parse_request(CHATS, large(note='"kv_transfer_params":').encode(encoding)).unread == "too-large"
    for text in (large(kv_transfer_params=PARAMS), large(kv_transfer_params=PARAMS).replace("kv_", "kv\\u005f")):
        with pytest.raises(TransferError):
            parse_request(CHATS, text.encode(encoding))


def test_a_trusted_proxy_may() -> None:
    body = json.dumps(BODIES[CHATS] | {"kv_transfer_params": PARAMS, "stream": True}).encode()
    head = {":path": CHATS, ":method": "POST"}
    for trusted in (("session",), ("session", "kv-transfer")):
        reader = Understanding(TokenEstimator(), ChainHasher(), lambda: 0.0, trusted=trusted)
        if "kv-transfer" not in trusted:
            with pytest.raises(TransferError):
                reader.request(reader.head(head), body)
        else:
            request, _ = reader.request(reader.head(head), body)
            plain, _ = reader.request(reader.head(head), without_transfers(body))
            assert (request.api, request.model, request.stream) == (CHAT, "m", True)
            assert request.prefix == plain.prefix and request.prompt_bytes == plain.prompt_bytes
            unread, _ = reader.request(reader.head(head), large(kv_transfer_params=PARAMS).encode())
            assert (unread.api, unread.unread) == (CHAT, "too-large")


def test_what_cannot_be_read_is_returned_as_it_is() -> None:
    assert without_transfers(b"[1") == b"[1"
