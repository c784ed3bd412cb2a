"""Captured requests of a real server are replayed against the stub, and the answers compared in structure.

Compared: status line, header names and their order, header values, JSON keys and their order, types, and every value
that is not in `_FREE`. Events of a stream are compared one by one; a run of equal ones may be of another length, since
the texts have other numbers of tokens.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from fairlead.lab.engine.spec import EngineSpec, LatencyModel
from fairlead.lab.stub.config import StubConfig
from fairlead.lab.stub.kv_publisher import KvEventsConfig
from fairlead.lab.stub.pool import StubPool

_DATA = Path(__file__).parents[3] / "data" / "vllm-0.32"
_CASES: dict[str, list[str]] = json.loads((_DATA / "http.json").read_text())
_DEFAULTS: dict[str, list[str]] = json.loads((_DATA / "http-defaults.json").read_text())

#: Values that must differ, or depend on the tokeniser and the model. Their types are compared all the same.
_FREE = {
    "id": "random",
    "created": "time",
    "created_at": "time",
    "system_fingerprint": "random",
    "root": "a path",
    "text": "the model",
    "content": "the model",
    "prompt": "the tokeniser",
    "tokens": "the tokeniser",
    "token_strs": "the tokeniser",
    "count": "the tokeniser",
    "token_ids": "the model",
    "token_logprobs": "the model",
    "text_offset": "the model",
    "top_logprobs": "the model",
    "time_to_first_token_ms": "time",
    "generation_time_ms": "time",
    "queue_time_ms": "time",
    "mean_itl_ms": "time",
    "tokens_per_second": "time",
    "prompt_token_ids": "the tokeniser",
    "prompt_tokens": "the tokeniser",
    "input_tokens": "the tokeniser",
    "completion_tokens": "ends at the context length in one case",
    "total_tokens": "the tokeniser",
    "cached_tokens": "the tokeniser",
    "created_cache_tokens": "the tokeniser",
    "endpoint": "the address that was bound",
    "replay_endpoint": "the address that was bound",
}
_FREE_HEADERS = {"date": "time", "content-length": "length of the above", "x-request-id": "random"}

_OUT_OF_SCOPE = {
    "chat_render": "the stub does not render for other servers",
    "completion_render": "the stub does not render for other servers",
    "inference_generate": "the stub has no token-in-token-out API",
    "completion_per_request_metrics": "the stub does not tell the times of a request",
    "completion_stream_queued_keepalive": "the stub sends no comments while a request waits",
}
_OTHER_SERVER = {
    "lora": [case for case in _CASES if case.startswith("lora_")],
    "full": [case for case in _CASES if case.startswith("err_503_")],
    "events": ["get_kv_event_sources"],
}

#: The captured server: context of 1024 tokens, blocks of 32, a vocabulary of 4096.
_SPEC = EngineSpec(latency=LatencyModel(1.0), num_blocks=200, block_size=32, max_model_len=1024, max_num_seqs=4)
_CAPTURED = StubConfig(
    engine=_SPEC,
    model="tiny",
    request_id_headers=True,
    vocab_size=4096,
    merge_events=False,
)


# ---------------------------------------------------------------- comparing answers


def _structure(value: Any, key: str = "") -> Any:
    if key in _FREE and not isinstance(value, (dict, list)):
        return type(value).__name__
    if isinstance(value, dict):
        return [(name, _structure(inner, name)) for name, inner in value.items()]
    if isinstance(value, list):
        if key in _FREE:
            return [sorted({type(item).__name__ for item in value})]
        return [_structure(item) for item in value]
    return value


def _body(body: bytes) -> Any:
    text = body.decode()
    if not text.startswith(("data: ", ": ")):
        return _structure(json.loads(text)) if text.startswith(("{", "[")) else text
    events: list[Any] = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        kind, _, data = event.partition(": ")
        shown = (kind, _structure(json.loads(data)) if data.startswith("{") else data)
        if not events or events[-1] != shown:
            events.append(shown)
    return events


def _assert_same(split: Any, case: str, answer: bytes, expected: bytes) -> None:
    status, headers, body = split(answer)
    real_status, real_headers, real_body = split(expected)
    assert status == real_status
    assert [name for name, _ in headers] == [name for name, _ in real_headers]
    values = [(n, "" if n in _FREE_HEADERS and "xreqid" not in case else v) for n, v in headers]
    real_values = [(n, "" if n in _FREE_HEADERS and "xreqid" not in case else v) for n, v in real_headers]
    if "xreqid" in case:
        for entries in (values, real_values):
            entries[:] = [(n, v) for n, v in entries if n not in ("date", "content-length")]
            if "bodyid" in case:
                entries[:] = [(n, v) for n, v in entries if n != "x-request-id"]
    assert values == real_values
    if "content-length" in dict(headers):
        assert int(dict(headers)["content-length"]) == len(body)
    assert _body(body) == _body(real_body)


# ---------------------------------------------------------------- replay


@pytest.fixture(scope="module")
def in_scope() -> list[str]:
    elsewhere = {case for cases in _OTHER_SERVER.values() for case in cases}
    return [case for case in _CASES if case not in _OUT_OF_SCOPE and case not in elsewhere]


def test_every_captured_case_is_replayed_or_has_a_reason(in_scope):
    elsewhere = [case for cases in _OTHER_SERVER.values() for case in cases]
    assert sorted([*in_scope, *elsewhere, *_OUT_OF_SCOPE]) == sorted(_CASES)
    assert len(in_scope) >= 55


async def test_answers_are_those_of_the_real_server(http, in_scope):
    async with StubPool(_CAPTURED) as pool:
        for case in in_scope:
            request, expected = (text.encode("latin-1") for text in _CASES[case])
            answer = await http.ask(pool.addresses[0], request)
            try:
                _assert_same(http.split, case, answer, expected)
            except AssertionError as error:
                raise AssertionError(f"{case}: {error}\n\n{answer.decode()}") from error


async def test_answers_are_those_of_the_real_server_without_flags(http):
    config = StubConfig(
        engine=_SPEC,
        model="tiny",
        prompt_tokens_details=False,
        vocab_size=4096,
        natural_output=0,
        merge_events=False,
        kv_events=KvEventsConfig(topic="-", replay=""),
    )
    assert len(_DEFAULTS) == 62
    async with StubPool(config) as pool:
        for case, texts in _DEFAULTS.items():
            request, expected = (text.encode("latin-1") for text in texts)
            answer = await http.ask(pool.addresses[0], request)
            try:
                _assert_same(http.split, case.replace("xreqid", ""), answer, expected)
            except AssertionError as error:
                raise AssertionError(f"{case}: {error}\n\n{answer.decode()}") from error


async def test_adapters_answer_as_on_the_real_server(http):
    config = StubConfig(
        engine=EngineSpec(latency=LatencyModel(1.0), num_blocks=200, max_model_len=1024, max_num_seqs=4, max_loras=2),
        model="tiny",
        natural_output=0,
        merge_events=False,
        loras=("lora-a", "lora-b"),
    )
    async with StubPool(config) as pool:
        address = pool.addresses[0]
        models = await http.ask(address, b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        expected = (_DATA / "models-with-adapters.json").read_bytes()
        assert _body(http.split(models)[2]) == _body(expected)
        loaded = await http.post(address, "/v1/load_lora_adapter", {"lora_name": "dyn-c", "lora_path": "./c"})
        assert loaded == (200, b"Success: LoRA adapter 'dyn-c' added successfully.")
        for wrong in (
            {"lora_name": "dyn-c"},
            {"lora_name": "dyn-c", "lora_path": "./c"},
            {"lora_name": "", "lora_path": "x"},
        ):
            assert (await http.post(address, "/v1/load_lora_adapter", wrong))[0] == 400
        assert (await http.post(address, "/v1/unload_lora_adapter", {}))[0] == 400
        order = ["completion_dynamic", "unload_dynamic", "completion_unloaded", "unload_unknown"]
        assert sorted(f"lora_{case}" for case in order) == sorted(_OTHER_SERVER["lora"])
        for case in order:
            request, answer = (text.encode("latin-1") for text in _CASES[f"lora_{case}"])
            _assert_same(http.split, case, await http.ask(address, request), answer)


@pytest.mark.parametrize("inside", [False, True])
async def test_a_full_queue_answers_as_on_the_real_server(http, inside):
    spec = EngineSpec(latency=LatencyModel(3_600_000.0), num_blocks=200, max_model_len=1024, max_num_seqs=1)
    config = StubConfig(
        engine=spec,
        model="tiny",
        max_queued=1,
        overload_in_stream=float(inside),
        request_id_headers=True,
    )
    async with StubPool(config) as pool:
        address = pool.addresses[0]
        held = [await http.open(address, "/v1/completions", {"prompt": "x", "stream": True}) for _ in range(2)]
        cases = [case for case in _OTHER_SERVER["full"] if ("inside" in case) == inside]
        assert cases
        for case in cases:
            request, expected = (text.encode("latin-1") for text in _CASES[case])
            _assert_same(http.split, case, await http.ask(address, request), expected)
        assert pool.replica(0).rejections == len(cases)
        for _, writer in held:
            writer.close()


async def test_sources_of_events_are_told_as_by_the_real_server(http):
    events = KvEventsConfig(topic="kv@127.0.0.1:8000@tiny")
    config = StubConfig(engine=_SPEC, model="tiny", request_id_headers=True, kv_events=events)
    async with StubPool(config) as pool:
        (case,) = _OTHER_SERVER["events"]
        request, expected = (text.encode("latin-1") for text in _CASES[case])
        _assert_same(http.split, case, await http.ask(pool.addresses[0], request), expected)
