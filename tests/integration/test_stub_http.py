"""The stub over real sockets: captured requests of a real server are replayed, and the answers compared in structure.

Compared: status line, header names and their order, header values, JSON keys and their order, types, and every value
that is not in `_FREE`. Events of a stream are compared one by one; a run of equal ones may be of another length, since
the texts have other numbers of tokens.
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fairlead.engine.spec import EngineSpec, LatencyModel
from fairlead.stub.config import StubConfig
from fairlead.stub.pool import StubPool

_DATA = Path(__file__).parents[1] / "data" / "vllm-0.32"
_CASES: dict[str, list[str]] = json.loads((_DATA / "http.json").read_text())
_DEFAULTS: dict[str, list[str]] = json.loads((_DATA / "http-defaults.json").read_text())

#: Values that must differ, or depend on the tokeniser and the model. Their types are compared all the same.
_FREE = {
    "id": "random",
    "created": "time",
    "system_fingerprint": "random",
    "root": "a path",
    "text": "the model",
    "content": "the model",
    "prompt": "the tokeniser",
    "tokens": "the tokeniser",
    "token_strs": "the tokeniser",
    "count": "the tokeniser",
    "token_ids": "the model",
    "prompt_token_ids": "the tokeniser",
    "prompt_tokens": "the tokeniser",
    "completion_tokens": "ends at the context length in one case",
    "total_tokens": "the tokeniser",
    "cached_tokens": "the tokeniser",
    "created_cache_tokens": "the tokeniser",
}
_FREE_HEADERS = {"date": "time", "content-length": "length of the above", "x-request-id": "random"}

_OUT_OF_SCOPE = {
    "chat_render": "the stub does not render for other servers",
    "completion_render": "the stub does not render for other servers",
    "inference_generate": "the stub has no token-in-token-out API",
    "completion_logprobs": "the stub has no probabilities",
    "completion_per_request_metrics": "the stub has no --enable-per-request-metrics",
    "get_kv_event_sources": "the stub publishes no KV events",
    "messages_anthropic": "the stub has no /v1/messages",
    "responses": "the stub has no /v1/responses",
}
_OTHER_SERVER = {
    "lora": [case for case in _CASES if case.startswith("lora_")],
    "full": [case for case in _CASES if case.startswith("err_503_")],
    "keep-alive": ["completion_stream_queued_keepalive"],
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


async def _ask(address: str, request: bytes) -> bytes:
    """Send and read until the server closes."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request)
        return await asyncio.wait_for(reader.read(), 20)
    finally:
        writer.close()


# ---------------------------------------------------------------- comparing answers


def _split(response: bytes) -> tuple[str, list[tuple[str, str]], bytes]:
    head, _, body = response.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = [(name, value) for name, _, value in (line.partition(": ") for line in lines[1:])]
    if dict(headers).get("transfer-encoding") == "chunked":
        body = _dechunk(body)
    return lines[0], headers, body


def _dechunk(body: bytes) -> bytes:
    parts = []
    while True:
        size, _, body = body.partition(b"\r\n")
        count = int(size, 16)
        if not count:
            assert body == b"\r\n", f"after the last chunk: {body!r}"
            return b"".join(parts)
        parts.append(body[:count])
        assert body[count : count + 2] == b"\r\n"
        # The real server sends an event per chunk.
        assert parts[-1].endswith(b"\n\n") and parts[-1].count(b"\n\n") == 1
        body = body[count + 2 :]


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


def _assert_same(case: str, answer: bytes, expected: bytes) -> None:
    status, headers, body = _split(answer)
    real_status, real_headers, real_body = _split(expected)
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


async def test_answers_are_those_of_the_real_server(in_scope):
    async with StubPool(_CAPTURED) as pool:
        for case in in_scope:
            request, expected = (text.encode("latin-1") for text in _CASES[case])
            answer = await _ask(pool.addresses[0], request)
            try:
                _assert_same(case, answer, expected)
            except AssertionError as error:
                raise AssertionError(f"{case}: {error}\n\n{answer.decode()}") from error


async def test_answers_are_those_of_the_real_server_without_flags():
    config = StubConfig(
        engine=_SPEC,
        model="tiny",
        prompt_tokens_details=False,
        vocab_size=4096,
        natural_output=0,
        merge_events=False,
    )
    async with StubPool(config) as pool:
        for case, texts in _DEFAULTS.items():
            request, expected = (text.encode("latin-1") for text in texts)
            _assert_same(case.replace("xreqid", ""), await _ask(pool.addresses[0], request), expected)


async def test_adapters_answer_as_on_the_real_server():
    config = StubConfig(
        engine=EngineSpec(latency=LatencyModel(1.0), num_blocks=200, max_model_len=1024, max_num_seqs=4, max_loras=2),
        model="tiny",
        natural_output=0,
        merge_events=False,
        loras=("lora-a", "lora-b"),
    )
    async with StubPool(config) as pool:
        address = pool.addresses[0]
        models = await _ask(address, b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        expected = (_DATA / "models-with-adapters.json").read_bytes()
        assert _body(_split(models)[2]) == _body(expected)
        loaded = await _post(address, "/v1/load_lora_adapter", {"lora_name": "dyn-c", "lora_path": "./c"})
        assert loaded == (200, b"Success: LoRA adapter 'dyn-c' added successfully.")
        order = ["completion_dynamic", "unload_dynamic", "completion_unloaded", "unload_unknown"]
        assert sorted(f"lora_{case}" for case in order) == sorted(_OTHER_SERVER["lora"])
        for case in order:
            request, answer = (text.encode("latin-1") for text in _CASES[f"lora_{case}"])
            _assert_same(case, await _ask(address, request), answer)


@pytest.mark.parametrize("inside", [False, True])
async def test_a_full_queue_answers_as_on_the_real_server(inside):
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
        held = [await _open(address, "/v1/completions", {"prompt": "x", "stream": True}) for _ in range(2)]
        cases = [case for case in _OTHER_SERVER["full"] if ("inside" in case) == inside]
        assert cases
        for case in cases:
            request, expected = (text.encode("latin-1") for text in _CASES[case])
            _assert_same(case, await _ask(address, request), expected)
        assert pool.replica(0).rejections == len(cases)
        for _, writer in held:
            writer.close()


async def test_a_queued_stream_is_kept_alive_as_on_the_real_server():
    config = StubConfig(
        engine=EngineSpec(latency=LatencyModel(150.0), num_blocks=200, max_model_len=1024),
        model="tiny",
        request_id_headers=True,
        sse_keepalive_s=0.02,
        merge_events=False,
        time_ratio=1.0,
    )
    request, expected = (text.encode("latin-1") for text in _CASES["completion_stream_queued_keepalive"])
    request = request.replace(b'"max_tokens": 200', b'"max_tokens":   3')
    async with StubPool(config) as pool:
        _assert_same("keepalive", await _ask(pool.addresses[0], request), expected)


# ---------------------------------------------------------------- helpers


def _request(path: str, body: object, *extra: str, method: str = "POST") -> bytes:
    data = json.dumps(body).encode() if body is not None else b""
    lines = [f"{method} {path} HTTP/1.1", "host: x", "content-type: application/json", *extra]
    return "\r\n".join([*lines, f"content-length: {len(data)}", "", ""]).encode() + data


async def _post(address: str, path: str, body: object, method: str = "POST") -> tuple[int, bytes]:
    answer = await _ask(address, _request(path, body, "connection: close", method=method))
    status, _, content = _split(answer)
    return int(status.split(" ")[1]), content


async def _get(address: str, path: str) -> tuple[int, bytes]:
    return await _post(address, path, None, "GET")


async def _open(address: str, path: str, body: object) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request and read the head of its answer."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(_request(path, body))
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    return reader, writer


async def _until(condition: Any, what: str) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"in ten seconds: {what}")


#: A step per millisecond.
_QUICK = StubConfig(engine=EngineSpec(latency=LatencyModel(1.0), num_blocks=5000, max_model_len=40_000), model="tiny")
#: A step per hour: nothing ends by itself.
_STUCK = StubConfig(
    engine=EngineSpec(latency=LatencyModel(3_600_000.0), num_blocks=5000, max_model_len=40_000), model="tiny"
)


@pytest.fixture
async def quick() -> AsyncIterator[StubPool]:
    async with StubPool(_QUICK, replicas=2) as pool:
        yield pool


# ---------------------------------------------------------------- streams


async def test_the_head_of_a_stream_comes_before_the_prefill():
    async with StubPool(_STUCK) as pool:
        reader, writer = await _open(pool.addresses[0], "/v1/chat/completions", _chat("hi", stream=True))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.05)
        writer.close()


def _chat(text: str, **more: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], **more}


def _events(body: bytes) -> list[Any]:
    lines = [event.removeprefix("data: ") for event in body.decode().removesuffix("\n\n").split("\n\n")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("interval", [1, 5])
async def test_stream_and_whole_answer_say_the_same(interval):
    config = StubConfig(engine=_QUICK.engine, model="tiny", stream_interval=interval)
    async with StubPool(config) as pool:
        address = pool.addresses[0]
        asked = {"prompt": "tell me", "max_tokens": 23}
        _, whole = await _post(address, "/v1/completions", asked)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        _, stream = await _post(address, "/v1/completions", asked | options)
        events = _events(stream)
        text = "".join(event["choices"][0]["text"] for event in events[:-1])
        answer = json.loads(whole)
        assert text == answer["choices"][0]["text"]
        assert len(text) == 4 * 23
        assert events[-1]["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"] == 23
        lengths = [len(event["choices"][0]["text"]) // 4 for event in events[:-1]]
        assert all(length >= interval for length in lengths[1:-1])
        assert len(lengths) <= 2 + 22 // interval


async def test_choices_of_several_prompts_keep_their_index_and_text(quick):
    address = quick.addresses[0]
    asked = {"prompt": ["one", "two"], "n": 2, "max_tokens": 6}
    _, whole = await _post(address, "/v1/completions", asked)
    answer = json.loads(whole)
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    assert answer["usage"]["completion_tokens"] == 24
    _, stream = await _post(address, "/v1/completions", asked | {"stream": True})
    streamed = ["", "", "", ""]
    for event in _events(stream):
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == texts


async def test_a_chat_stream_of_two_choices_opens_both_and_ends_both(quick):
    _, stream = await _post(quick.addresses[0], "/v1/chat/completions", _chat("hi", n=2, max_tokens=4, stream=True))
    events = _events(stream)
    roles = [e["choices"][0]["index"] for e in events if "role" in e["choices"][0]["delta"]]
    ends = [e["choices"][0]["index"] for e in events if e["choices"][0]["finish_reason"]]
    assert roles == [0, 1]
    assert sorted(ends) == [0, 1]
    assert [("system_fingerprint" in e) for e in events] == [False] * (len(events) - 1) + [True]


async def test_the_next_turn_of_a_conversation_hits_question_and_answer(quick):
    address = quick.addresses[0]
    first = _chat("a question of some length " * 20, max_tokens=64)
    _, body = await _post(address, "/v1/chat/completions", first)
    answer = json.loads(body)
    reply = answer["choices"][0]["message"]["content"].strip()
    messages = [*first["messages"], {"role": "assistant", "content": reply}, {"role": "user", "content": "more"}]
    _, body = await _post(address, "/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    usage = json.loads(body)["usage"]
    before = answer["usage"]["total_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == (before - 1) // 16 * 16


async def test_echo_puts_the_prompt_in_front(quick):
    asked = {"prompt": 'say "é"\n', "max_tokens": 2, "echo": True}
    _, body = await _post(quick.addresses[0], "/v1/completions", asked)
    whole = json.loads(body)["choices"][0]["text"]
    assert whole.startswith('say "é"\n')
    _, stream = await _post(quick.addresses[0], "/v1/completions", asked | {"stream": True})
    assert "".join(event["choices"][0]["text"] for event in _events(stream)) == whole


async def test_token_ids_are_those_of_the_tokenizer_and_make_the_text(quick):
    address = quick.addresses[0]
    asked = {"prompt": "hello world!", "max_tokens": 3, "return_token_ids": True}
    choice = json.loads((await _post(address, "/v1/completions", asked))[1])["choices"][0]
    tokens = json.loads((await _post(address, "/tokenize", {"prompt": "hello world!"}))[1])["tokens"]
    assert choice["prompt_token_ids"] == tokens
    text = json.loads((await _post(address, "/detokenize", {"tokens": choice["token_ids"]}))[1])["prompt"]
    assert text == choice["text"]
    _, stream = await _post(address, "/v1/completions", asked | {"stream": True})
    events = _events(stream)
    assert events[0]["choices"][0]["prompt_token_ids"] == tokens
    assert [i for event in events for i in event["choices"][0]["token_ids"]] == choice["token_ids"]


async def test_without_a_limit_the_model_stops_by_itself(quick):
    _, body = await _post(quick.addresses[0], "/v1/chat/completions", _chat("hi"))
    answer = json.loads(body)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert 128 <= answer["usage"]["completion_tokens"] < 128 + 256


# ---------------------------------------------------------------- clients that go, stall or hurry


async def test_a_client_that_goes_away_is_aborted_in_the_engine(quick):
    replica = quick.replica(0)
    for stream in (True, False):
        asked = {"prompt": "x", "max_tokens": 30_000, "stream": stream}
        host, _, port = quick.addresses[0].rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(_request("/v1/completions", asked))
        await _until(lambda: replica.engine.running() == 1, "the request runs")
        writer.close()
        await _until(lambda: replica.engine.running() == 0, "the request is gone")
        await _until(lambda: replica.engine.stats.gauges.running == 0, "the gauge shows it")
    assert replica.in_flight == 0
    assert replica.engine.stats.finished == {"stop": 0, "length": 0}
    replica.engine.validate()


async def test_a_slow_client_costs_no_memory_and_gets_everything():
    """It stops reading; the stub stops writing; when it reads again it gets the same text in fewer events."""
    # A step per microsecond, and an event for each: eight megabytes come while the client does not read.
    count = 39_000
    spec = EngineSpec(latency=LatencyModel(0.001), num_blocks=5000, max_model_len=40_000)
    async with StubPool(StubConfig(engine=spec, model="tiny", merge_events=False)) as pool:
        replica = pool.replica(0)
        host, _, port = pool.addresses[0].rpartition(":")
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        reader, writer = await asyncio.open_connection(sock=sock, limit=4096)
        asked = {"prompt": "x", "max_tokens": count, "stream": True}
        writer.write(_request("/v1/completions", asked, "connection: close"))
        await _until(lambda: replica.engine.stats.finished["length"] == 1, "the engine is done")
        (connection,) = pool._servers[0]._connections
        assert connection.paused
        assert connection._transport.get_write_buffer_size() < 200_000
        _, _, body = _split(await asyncio.wait_for(reader.read(-1), 20))
        events = _events(body)
        text = "".join(event["choices"][0]["text"] for event in events)
        assert len(text) == 4 * count
        assert len(events) < count
        writer.close()


async def test_pipelined_requests_are_answered_in_order(quick):
    requests = b"".join(
        _request("/v1/completions", {"prompt": "x" * i, "max_tokens": 5, "stream": i % 2 == 0, "request_id": str(i)})
        for i in range(1, 7)
    )
    requests += _request("/version", None, "connection: close", method="GET")
    answer = await _ask(quick.addresses[0], requests)
    positions = [answer.index(b'"cmpl-%d"' % i) for i in range(1, 7)]
    assert positions == sorted(positions)
    assert answer.count(b"HTTP/1.1 200 OK") == 7
    assert answer.endswith(b'{"version":"0.32.0"}')


async def test_a_client_that_pipelines_and_never_reads_is_stopped(quick):
    host, _, port = quick.addresses[0].rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    flood = _request("/metrics", None, method="GET") * 3000
    writer.write(flood)
    await asyncio.sleep(0.3)
    (connection,) = quick._servers[0]._connections
    assert connection._transport.get_write_buffer_size() < 1_000_000
    assert connection._parser.buffered < 1_000_000
    writer.transport.abort()
    await _until(lambda: quick.connections(0) == 0, "the connection is gone")


async def test_expect_100_continue_is_answered(quick):
    host, _, port = quick.addresses[0].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    whole = _request("/v1/completions", {"prompt": "x", "max_tokens": 1}, "expect: 100-continue", "connection: close")
    head, _, body = whole.partition(b"\r\n\r\n")
    writer.write(head + b"\r\n\r\n")
    assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5) == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 200 OK\r\n")
    writer.close()


async def test_http_1_0_gets_a_stream_without_chunks(quick):
    body = json.dumps({"prompt": "x", "max_tokens": 3, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    status, headers, content = _split(await _ask(quick.addresses[0], head.encode() + body))
    assert status == "HTTP/1.1 200 OK"
    assert "transfer-encoding" not in dict(headers)
    assert len(_events(content)) >= 1


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET /health\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nbad header\r\n\r\n", 400),
        (b"POST /tokenize HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (b"POST /tokenize HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n", 400),
        (b"POST /tokenize HTTP/1.1\r\ncontent-length: 99999999999\r\n\r\n", 413),
        (b"POST /tokenize HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nffffffffff\r\n", 413),
        (b"POST /tokenize HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"GET /health HTTP/1.1\r\nx: " + b"a" * 70_000, 431),
    ],
)
async def test_malformed_requests_are_refused_and_harm_nobody(quick, raw, status):
    answer = await _ask(quick.addresses[0], raw)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert (await _get(quick.addresses[0], "/health"))[0] == 200


async def test_connections_that_keep_still_are_closed():
    config = StubConfig(engine=_QUICK.engine, model="tiny", idle_timeout_s=0.01, request_timeout_s=0.01)
    async with StubPool(config) as pool:
        host, _, port = pool.addresses[0].rpartition(":")
        for sent in (b"", b"GET /hea", _request("/health", None, method="GET")):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            await asyncio.wait_for(reader.read(), 10)
            writer.close()


async def test_a_body_in_chunks_is_understood(quick):
    body = json.dumps({"prompt": "x" * 3000, "max_tokens": 1}).encode()
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:10], body[10:2000], body[2000:]))
    head = b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n"
    answer = await _ask(quick.addresses[0], head + b"connection: close\r\n\r\n" + chunks + b"0\r\n\r\n")
    assert json.loads(_split(answer)[2])["usage"]["prompt_tokens"] == 750


# ---------------------------------------------------------------- faults


async def test_faults_are_shown_changed_and_ended_over_http(quick):
    address = quick.addresses[0]
    assert (await _post(address, "/fault", {"error_rate": 1.0, "error_status": 429}))[0] == 200
    status, body = await _post(address, "/v1/completions", {"prompt": "x"})
    assert (status, json.loads(body)["error"]["code"]) == (429, 429)
    for wrong in ({"nonsense": 1}, {"error_rate": 2}, {"slow_factor": 0}, {"error_rate": 0, "stall": 3}):
        status, body = await _post(address, "/fault", wrong)
        assert status == 400, body
    assert json.loads((await _get(address, "/fault"))[1])["error_status"] == 429
    assert (await _post(address, "/v1/completions", {"prompt": "x"}))[0] == 429
    assert (await _post(address, "/fault", None, "DELETE"))[0] == 200
    assert (await _post(address, "/v1/completions", {"prompt": "x", "max_tokens": 1}))[0] == 200


async def test_an_injected_error_may_come_inside_the_stream(quick):
    quick.set_faults(0, error_rate=1.0, error_status=503, error_in_stream=True)
    asked = {"prompt": "x", "max_tokens": 1}
    status, body = await _post(quick.addresses[0], "/v1/completions", asked | {"stream": True})
    assert status == 200
    assert _events(body)[0]["error"]["code"] == 503
    assert (await _post(quick.addresses[0], "/v1/completions", asked))[0] == 503
    quick.set_faults(0, error_rate=0.0)


async def test_a_stalled_replica_hangs_and_goes_on_where_it_stood(quick):
    replica = quick.replica(0)
    quick.set_faults(0, stall=True)
    asked = asyncio.create_task(_post(quick.addresses[0], "/v1/completions", {"prompt": "x", "max_tokens": 3}))
    await _until(lambda: replica.in_flight == 1, "the request arrives")
    await asyncio.sleep(0.05)
    assert not asked.done()
    assert (await _get(quick.addresses[0], "/health"))[0] == 200
    assert replica.engine.stats.steps == 0 and replica.engine.stats.generation_tokens == 0
    quick.set_faults(0, stall=False)
    assert (await asyncio.wait_for(asked, 10))[0] == 200


async def test_a_stream_can_be_cut_after_some_tokens(quick):
    quick.set_faults(0, disconnect_rate=1.0, disconnect_after=3)
    reader, writer = await _open(
        quick.addresses[0], "/v1/completions", {"prompt": "x", "max_tokens": 900, "stream": True}
    )
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await asyncio.wait_for(reader.readuntil(b"[DONE]"), 10)
    await _until(lambda: quick.replica(0).in_flight == 0, "the request is aborted")
    writer.close()


async def test_a_dead_engine_fails_everything_and_health_may_lie():
    async with StubPool(_STUCK) as pool:
        address = pool.addresses[0]
        reader, writer = await _open(address, "/v1/completions", {"prompt": "x", "stream": True})
        whole = asyncio.create_task(_post(address, "/v1/completions", {"prompt": "x"}))
        await _until(lambda: pool.replica(0).in_flight == 2, "both requests arrive")
        pool.set_faults(0, engine_dead=True)
        tail = await asyncio.wait_for(reader.readuntil(b"[DONE]"), 10)
        assert b'"code": 500' in tail
        assert (await whole)[0] == 500
        assert (await _post(address, "/v1/completions", {"prompt": "x", "stream": True}))[0] == 500
        assert (await _get(address, "/health"))[0] == 503
        pool.set_faults(0, health_status=200)
        assert (await _get(address, "/health"))[0] == 200
        pool.set_faults(0, engine_dead=False, health_status=0)
        assert (await _get(address, "/health"))[0] == 200
        assert pool.replica(0).engine.running() == 0
        writer.close()


async def test_metrics_can_be_frozen_slow_or_broken(quick):
    address = quick.addresses[0]
    quick.set_faults(0, metrics_frozen=True)
    before = (await _get(address, "/metrics"))[1]
    await _post(address, "/v1/completions", {"prompt": "x", "max_tokens": 3})
    assert (await _get(address, "/metrics"))[1] == before
    quick.set_faults(0, metrics_frozen=False, metrics_delay_s=3600)
    slow = asyncio.create_task(_get(address, "/metrics"))
    await asyncio.sleep(0.05)
    assert not slow.done()
    slow.cancel()
    quick.set_faults(0, metrics_delay_s=0, metrics_status=503)
    assert (await _get(address, "/metrics"))[0] == 503
    quick.set_faults(0, metrics_status=0)
    assert b'vllm:generation_tokens_total{engine="0",model_name="tiny"} 3.0' in (await _get(address, "/metrics"))[1]


# ---------------------------------------------------------------- pool


async def test_a_replica_is_stopped_and_restarted_on_its_port(quick):
    first, second = quick.addresses
    asked = {"prompt": "y" * 400, "max_tokens": 1}
    await _post(second, "/v1/completions", asked)
    reader, writer = await _open(second, "/v1/completions", {"prompt": "x", "max_tokens": 9000, "stream": True})
    await quick.stop(1)
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await asyncio.wait_for(reader.readuntil(b"[DONE]"), 10)
    writer.close()
    with pytest.raises(OSError):
        await _get(second, "/health")
    with pytest.raises(LookupError, match="stub-1 is stopped"):
        quick.replica(1)
    assert len(quick.replicas) == 1
    assert (await _get(first, "/health"))[0] == 200
    await quick.restart(1)
    assert quick.addresses == [first, second]
    _, body = await _post(second, "/v1/completions", asked)
    assert json.loads(body)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_replicas_may_be_unlike_and_say_who_they_are():
    odd = StubConfig(preset="llama-8b-l40s", model="tiny", identity_headers=True, request_id_headers=True)
    async with StubPool(_QUICK, replicas=2, configs={1: odd}, name="pod") as pool:
        answer = await _ask(
            pool.addresses[1], b"GET /health HTTP/1.1\r\nX-Request-Id: abc\r\nconnection: close\r\n\r\n"
        )
        headers = dict(_split(answer)[1])
        port = pool.addresses[1].rpartition(":")[2]
        assert headers["x-inference-pod"] == "pod-1"
        assert headers["x-inference-namespace"] == "default"
        assert headers["x-inference-port"] == port
        assert headers["x-request-id"] == "abc"
        assert pool.replica(1).spec.kv_tokens != pool.replica(0).spec.kv_tokens


async def test_a_taken_port_is_named():
    from fairlead.stub.pool import PortTaken

    async with StubPool(_QUICK) as pool:
        port = int(pool.addresses[0].rpartition(":")[2])
        with pytest.raises(PortTaken, match=f"cannot listen on 127.0.0.1:{port}"):
            async with StubPool(_QUICK, ports=[port]):
                pass


async def test_the_prefix_cache_can_be_reset(quick):
    address = quick.addresses[0]
    asked = {"prompt": "z" * 400, "max_tokens": 1}
    await _post(address, "/v1/completions", asked)
    assert json.loads((await _post(address, "/reset_prefix_cache", None))[1]) == {"success": True}
    _, body = await _post(address, "/v1/completions", asked)
    assert json.loads(body)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_load_counts_requests_in_flight():
    async with StubPool(_STUCK) as pool:
        _, writer = await _open(pool.addresses[0], "/v1/completions", {"prompt": "x", "stream": True})
        assert json.loads((await _get(pool.addresses[0], "/load"))[1]) == {"server_load": 1}
        writer.close()
