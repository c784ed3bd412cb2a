"""The stub over real sockets: streams, and clients that go away, stall, hurry or talk nonsense."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator

import pytest
from stub_http import QUICK, STUCK, Http

from fairlead.apis.engine_metrics import ENGINES, compile_engine
from fairlead.apis.prometheus import read_page
from fairlead.apis.request import parse_request
from fairlead.lab.engine.spec import EngineSpec, LatencyModel
from fairlead.lab.stub.config import StubConfig
from fairlead.lab.stub.pool import StubPool
from fairlead.testing import builders

_HTTP = Http()


@pytest.fixture
async def quick() -> AsyncIterator[StubPool]:
    async with StubPool(QUICK, replicas=2) as pool:
        yield pool


# ---------------------------------------------------------------- streams


async def test_the_head_of_a_stream_comes_before_the_prefill():
    async with StubPool(STUCK) as pool:
        reader, writer = await _HTTP.open(pool.addresses[0], "/v1/chat/completions", _chat("hi", stream=True))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.05)
        writer.close()


def _chat(text: str, **more: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], **more}


@pytest.mark.parametrize("interval", [1, 5])
async def test_stream_and_whole_answer_say_the_same(interval):
    config = StubConfig(engine=QUICK.engine, model="tiny", stream_interval=interval)
    async with StubPool(config) as pool:
        address = pool.addresses[0]
        asked = {"prompt": "tell me", "max_tokens": 23}
        _, whole = await _HTTP.post(address, "/v1/completions", asked)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        _, stream = await _HTTP.post(address, "/v1/completions", asked | options)
        events = _HTTP.events(stream)
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
    _, whole = await _HTTP.post(address, "/v1/completions", asked)
    answer = json.loads(whole)
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    assert answer["usage"]["completion_tokens"] == 24
    _, stream = await _HTTP.post(address, "/v1/completions", asked | {"stream": True})
    streamed = ["", "", "", ""]
    for event in _HTTP.events(stream):
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == texts


async def test_a_request_is_as_many_sequences_for_the_scheduler_as_for_the_server(quick):
    address = quick.addresses[0]
    asked = {"prompt": ["tell me " * 99, "tell us " * 99], "n": 3, "max_tokens": 30_000, "stream": True}
    parsed = parse_request("/v1/completions", json.dumps(asked).encode())
    fleet = builders.fleet("e0")
    lease = fleet.charge(builders.request(prompt_tokens=400, sequences=parsed.n), 0, 0.0, 0, 6 * 100.0)
    _, writer = await _HTTP.open(address, "/v1/completions", asked)
    for _ in range(2000):
        sample = read_page((await _HTTP.get(address, "/metrics"))[1], compile_engine(ENGINES["vllm"])).sample
        if sample.running >= 6:
            break
        await asyncio.sleep(0.005)
    writer.close()
    fleet.sampled("e0", 1.0, 1.0, sample)
    fleet.first_token(lease, 2.0)
    assert (sample.running, fleet.table.active[0]) == (6, 6)
    fleet.ledger.release(lease)
    assert fleet.table.active[0] == 0, "none of them was another client's"


async def test_a_chat_stream_of_two_choices_opens_both_and_ends_both(quick):
    _, stream = await _HTTP.post(
        quick.addresses[0], "/v1/chat/completions", _chat("hi", n=2, max_tokens=4, stream=True)
    )
    events = _HTTP.events(stream)
    roles = [e["choices"][0]["index"] for e in events if "role" in e["choices"][0]["delta"]]
    ends = [e["choices"][0]["index"] for e in events if e["choices"][0]["finish_reason"]]
    assert roles == [0, 1]
    assert sorted(ends) == [0, 1]
    assert [("system_fingerprint" in e) for e in events] == [False] * (len(events) - 1) + [True]


async def test_the_next_turn_of_a_conversation_hits_question_and_answer(quick):
    address = quick.addresses[0]
    first = _chat("a question of some length " * 20, max_tokens=64)
    _, body = await _HTTP.post(address, "/v1/chat/completions", first)
    answer = json.loads(body)
    reply = answer["choices"][0]["message"]["content"].strip()
    messages = [*first["messages"], {"role": "assistant", "content": reply}, {"role": "user", "content": "more"}]
    _, body = await _HTTP.post(address, "/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    usage = json.loads(body)["usage"]
    before = answer["usage"]["total_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == (before - 1) // 16 * 16


async def test_echo_puts_the_prompt_in_front(quick):
    asked = {"prompt": 'say "é"\n', "max_tokens": 2, "echo": True}
    _, body = await _HTTP.post(quick.addresses[0], "/v1/completions", asked)
    whole = json.loads(body)["choices"][0]["text"]
    assert whole.startswith('say "é"\n')
    _, stream = await _HTTP.post(quick.addresses[0], "/v1/completions", asked | {"stream": True})
    assert "".join(event["choices"][0]["text"] for event in _HTTP.events(stream)) == whole


async def test_token_ids_are_those_of_the_tokenizer_and_make_the_text(quick):
    address = quick.addresses[0]
    asked = {"prompt": "hello world!", "max_tokens": 3, "return_token_ids": True}
    choice = json.loads((await _HTTP.post(address, "/v1/completions", asked))[1])["choices"][0]
    tokens = json.loads((await _HTTP.post(address, "/tokenize", {"prompt": "hello world!"}))[1])["tokens"]
    assert choice["prompt_token_ids"] == tokens
    text = json.loads((await _HTTP.post(address, "/detokenize", {"tokens": choice["token_ids"]}))[1])["prompt"]
    assert text == choice["text"]
    _, stream = await _HTTP.post(address, "/v1/completions", asked | {"stream": True})
    events = _HTTP.events(stream)
    assert events[0]["choices"][0]["prompt_token_ids"] == tokens
    assert [i for event in events for i in event["choices"][0]["token_ids"]] == choice["token_ids"]


async def test_without_a_limit_the_model_stops_by_itself(quick):
    _, body = await _HTTP.post(quick.addresses[0], "/v1/chat/completions", _chat("hi"))
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
        writer.write(_HTTP.request("/v1/completions", asked))
        await _HTTP.until(lambda: replica.engine.running() == 1, "the request runs")
        writer.close()
        await _HTTP.until(lambda: replica.engine.running() == 0, "the request is gone")
        await _HTTP.until(lambda: replica.engine.stats.gauges.running == 0, "the gauge shows it")
    assert replica.in_flight == 0
    assert replica.engine.stats.finished == {"stop": 0, "length": 0}
    replica.engine.validate()


async def _connect_slowly(address: str, buffer: int = 32_768) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that takes little before the server has to wait for it."""
    host, _, port = address.rpartition(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    return await asyncio.open_connection(sock=sock, limit=16_384)


@pytest.mark.parametrize(("step_ms", "until_the_end", "buffer"), [(0.001, True, 4096), (0.02, False, 1_000_000)])
async def test_a_slow_client_costs_no_memory_and_gets_everything(step_ms, until_the_end, buffer):
    """It stops reading; the stub stops writing; when it reads again it gets the same text in fewer events."""
    problems: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    # An event for each token: eight megabytes come while the client does not read.
    count = 39_000
    spec = EngineSpec(latency=LatencyModel(step_ms), num_blocks=5000, max_model_len=40_000)
    async with StubPool(StubConfig(engine=spec, model="tiny", merge_events=False)) as pool:
        replica = pool.replica(0)
        reader, writer = await _connect_slowly(pool.addresses[0], buffer)
        asked = {"prompt": "x", "max_tokens": count, "stream": True}
        writer.write(_HTTP.request("/v1/completions", asked, "connection: close"))
        await _HTTP.until(lambda: pool.connections(0) == 1, "the connection is there")
        await _HTTP.until(lambda: pool.held(0)[0].waits, "the stub waits for the client")
        if until_the_end:
            await _HTTP.until(lambda: replica.engine.stats.finished["length"] == 1, "the engine is done")
        assert pool.held(0)[0].unsent < 200_000
        _, _, body = _HTTP.split(await asyncio.wait_for(reader.read(-1), 20))
        events = _HTTP.events(body)
        text = "".join(event["choices"][0]["text"] for event in events)
        assert len(text) == 4 * count
        assert len(events) < count
        writer.close()
    assert not problems


async def test_a_client_far_ahead_is_made_to_wait_and_gets_every_answer(quick):
    reader, writer = await _connect_slowly(quick.addresses[0])
    count = 250
    requests = _HTTP.request("/metrics", None, "x-padding: " + "p" * 2000, method="GET") * (count - 1)
    requests += _HTTP.request("/metrics", None, "connection: close", method="GET")
    writer.write(requests)
    await _HTTP.until(lambda: quick.connections(0) == 1, "the connection is there")
    await _HTTP.until(lambda: not quick.held(0)[0].reads, "the stub reads no further")
    assert quick.held(0)[0].unserved < 1_000_000
    answer = await asyncio.wait_for(reader.read(), 20)
    assert answer.count(b"HTTP/1.1 200 OK\r\n") == count
    writer.close()


async def test_pipelined_requests_are_answered_in_order(quick):
    requests = b"".join(
        _HTTP.request(
            "/v1/completions", {"prompt": "x" * i, "max_tokens": 5, "stream": i % 2 == 0, "request_id": str(i)}
        )
        for i in range(1, 7)
    )
    requests += _HTTP.request("/version", None, "connection: close", method="GET")
    answer = await _HTTP.ask(quick.addresses[0], requests)
    positions = [answer.index(b'"cmpl-%d"' % i) for i in range(1, 7)]
    assert positions == sorted(positions)
    assert answer.count(b"HTTP/1.1 200 OK") == 7
    assert answer.endswith(b'{"version":"0.32.0"}')


async def test_expect_100_continue_is_answered(quick):
    host, _, port = quick.addresses[0].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    whole = _HTTP.request(
        "/v1/completions", {"prompt": "x", "max_tokens": 1}, "expect: 100-continue", "connection: close"
    )
    head, _, body = whole.partition(b"\r\n\r\n")
    writer.write(head + b"\r\n\r\n")
    assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5) == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 200 OK\r\n")
    writer.close()


async def test_http_1_0_gets_a_stream_without_chunks(quick):
    body = json.dumps({"prompt": "x", "max_tokens": 3, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    status, headers, content = _HTTP.split(await _HTTP.ask(quick.addresses[0], head.encode() + body))
    assert status == "HTTP/1.1 200 OK"
    assert "transfer-encoding" not in dict(headers)
    assert len(_HTTP.events(content)) >= 1


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
        (b"POST /tokenize HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n", 400),
        (b"POST /tokenize HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"GET /health HTTP/1.1\r\nx: " + b"a" * 70_000, 431),
    ],
)
async def test_malformed_requests_are_refused_and_harm_nobody(quick, raw, status):
    answer = await _HTTP.ask(quick.addresses[0], raw)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert (await _HTTP.get(quick.addresses[0], "/health"))[0] == 200


async def test_a_body_in_chunks_is_understood(quick):
    body = json.dumps({"prompt": "x" * 3000, "max_tokens": 1}).encode()
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:10], body[10:2000], body[2000:]))
    head = b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n"
    answer = await _HTTP.ask(quick.addresses[0], head + b"connection: close\r\n\r\n" + chunks + b"0\r\n\r\n")
    assert json.loads(_HTTP.split(answer)[2])["usage"]["prompt_tokens"] == 750


@pytest.mark.parametrize("turns", range(5))
async def test_a_connection_that_is_being_accepted_is_cut_by_a_stop(turns: int) -> None:
    """At whichever turn of the loop the server stops: its client must not wait for ever."""
    async with StubPool(StubConfig()) as pool:
        host, _, port = pool.addresses[0].rpartition(":")
        with socket.create_connection((host, int(port))) as client:
            client.setblocking(False)
            for _ in range(turns):
                await asyncio.sleep(0)
            await pool.stop(0)
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1), 20) == b""
