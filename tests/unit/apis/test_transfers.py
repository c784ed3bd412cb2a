"""Bodies that name hosts to the engine."""

import json
import time
from typing import Any

import pytest

from fairlead.apis.body import SALVAGE_LIMIT, TransferError, refuse_transfers, without_transfers
from fairlead.apis.request import parse_request
from fairlead.core.apis import CHAT
from fairlead.core.errors import ClientError
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


def test_nor_among_the_arguments_of_extensions() -> None:
    """vLLM puts these where it looks for the parameters. A text there ends the engine of a server with a connector."""
    for path in (CHATS, "/v1/completions", "/v1/responses"):
        for name in ("kv_transfer_params", "ec_transfer_params"):
            with pytest.raises(TransferError, match=name):
                parse_request(path, json.dumps(BODIES[path] | {"vllm_xargs": {"a": 1, name: "x"}}).encode())
        for harmless in (None, {}, {"kv_cache_report_mode": "full", "list": [1, "a"]}):
            assert parse_request(path, json.dumps(BODIES[path] | {"vllm_xargs": harmless}).encode()).model == "m"
    with pytest.raises(ClientError, match="'vllm_xargs': expected an object"):
        parse_request(CHATS, json.dumps(BODIES[CHATS] | {"vllm_xargs": 5}).encode())


@pytest.mark.parametrize("path", ["/invocations", "/v1/chat/completions/batch"])
def test_nor_on_paths_that_are_not_known(path: str) -> None:
    body = json.dumps(BODIES[CHATS] | {"kv_transfer_params": PARAMS}).encode()
    with pytest.raises(TransferError):
        parse_request(path, body, "application/json; charset=utf-8")
    assert parse_request(path, body, "application/octet-stream").unread == "path"
    for content in ("hello", r"/[\u0061-\u007a]/ in JavaScript"):
        plain = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()
        assert parse_request(path, plain, "application/json").unread == "path"
    with pytest.raises(TransferError):
        parse_request(path, rb'{"a": "\\", "kv\u005ftransfer_params": 1, "b": "\\u0061"}', "application/json")


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
    harmless = large(note='"kv_transfer_params": \x7f')  # Python writes \\u007f
    assert parse_request(CHATS, harmless.encode(encoding)).unread == "too-large"
    for text in (large(kv_transfer_params=PARAMS), large(kv_transfer_params=PARAMS).replace("kv_", "kv\\u005f")):
        with pytest.raises(TransferError):
            parse_request(CHATS, text.encode(encoding))


def test_the_search_holds_up_nobody() -> None:
    """One expression for all names took 20 ms per MB, so a body of 64 MB stopped all decisions for over a second."""
    text = b"kept by the kernel: keb " * (4 << 20 >> 4)
    began = time.thread_time()
    refuse_transfers(text)
    assert time.thread_time() - began < 0.01 * len(text) / 1e6


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
