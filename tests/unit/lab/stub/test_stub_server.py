"""The server around a replica: handlers that fail, connections that keep still."""

import asyncio
import json

import aiohttp

from fairlead.apis.response import UsageScanner
from fairlead.lab.stub.config import StubConfig
from fairlead.lab.stub.pool import StubPool


async def test_a_handler_that_fails_is_a_500_and_the_server_goes_on(http, quick, caplog, monkeypatch):
    def fail(_) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(type(quick.replica(0).engine.blocks), "clear", fail)
    status, body = await http.post(quick.addresses[0], "/reset_prefix_cache", {})
    assert status == 500
    assert json.loads(body)["error"]["type"] == "InternalServerError"
    assert "on purpose" in caplog.text
    assert (await http.get(quick.addresses[0], "/health"))[0] == 200


async def test_a_server_with_a_key_refuses_who_does_not_send_it(quick_config):
    config = StubConfig(engine=quick_config.engine, model="tiny", api_key="secret")
    async with StubPool(config) as pool, aiohttp.ClientSession(f"http://{pool.addresses[0]}") as session:

        async def get(path: str, sent: str) -> tuple[int, bytes]:
            async with session.get(path, headers={"Authorization": sent}) as answer:
                return answer.status, await answer.read()

        for sent in ("", "Bearer", "Bearer secret2", "Basic secret"):
            assert await get("/v1/models", sent) == (401, b'{"error":"Unauthorized"}')
            assert (await get("/metrics", sent))[0] == 200
        assert (await get("/v1/models", "Bearer secret"))[0] == 200


async def test_connections_that_stop_in_a_request_are_closed(http, quick_config):
    config = StubConfig(engine=quick_config.engine, model="tiny", request_timeout_s=0.01)
    async with StubPool(config) as pool:
        host, _, port = pool.addresses[0].rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /hea")
        await asyncio.wait_for(reader.read(), 10)
        writer.close()


def _read_events(body: bytes) -> list[tuple[str, dict[str, object]]]:
    pairs = []
    for event in body.decode().split("\n\n"):
        name, _, data = event.removeprefix("event: ").partition("\ndata: ")
        if data:
            pairs.append((name, json.loads(data)))
    assert all(data["type"] == name for name, data in pairs)
    return pairs


_TOOL_TURNS = [
    {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "7"},
]


async def test_streams_of_the_responses_api(http, quick):
    body = {"model": "tiny", "input": _TOOL_TURNS, "max_output_tokens": 5, "instructions": "be brief"}
    _, plain = await http.post(quick.addresses[0], "/v1/responses", body)
    status, streamed = await http.post(quick.addresses[0], "/v1/responses", {**body, "stream": True})
    events = _read_events(streamed)
    assert status == 200 and [data["sequence_number"] for _, data in events] == list(range(len(events)))
    names = [name.removeprefix("response.") for name, _ in events if not name.endswith("delta")]
    assert names == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    text = "".join(str(data["delta"]) for name, data in events if name.endswith("delta"))
    response = events[-1][1]["response"]
    assert response["output"][0]["content"][0]["text"] == text and len(text) == 20
    expected = json.loads(plain)
    assert response.keys() == expected.keys() and response["output"][0]["content"] == expected["output"][0]["content"]
    assert response["usage"]["output_tokens"] == 5 and response["incomplete_details"] == expected["incomplete_details"]
    scanner = UsageScanner(stream=True)
    scanner.feed(streamed)
    assert scanner.done and scanner.usage is not None and scanner.usage.completion_tokens == 5
    missing = await http.post(quick.addresses[0], "/v1/responses", {**body, "previous_response_id": "resp_1"})
    assert missing[0] == 404


async def test_streams_of_the_messages_api(http, quick):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "system": "be brief"}
    _, plain = await http.post(quick.addresses[0], "/v1/messages", body)
    status, streamed = await http.post(quick.addresses[0], "/v1/messages", {**body, "stream": True})
    events = _read_events(streamed)
    names = [name for name, _ in events if name != "content_block_delta"]
    assert (status, names) == (
        200,
        ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"],
    )
    text = "".join(data["delta"]["text"] for name, data in events if name == "content_block_delta")
    expected = json.loads(plain)
    assert text == expected["content"][0]["text"] and len(text) == 20
    last = events[-2][1]
    assert last["delta"]["stop_reason"] == expected["stop_reason"] == "max_tokens"
    assert last["usage"]["output_tokens"] == 5
    assert events[0][1]["message"]["usage"]["input_tokens"] == expected["usage"]["input_tokens"]
    scanner = UsageScanner(stream=True)
    scanner.feed(streamed)
    assert scanner.done and scanner.usage is not None and scanner.usage.completion_tokens == 5
    without_limit = {name: value for name, value in body.items() if name != "max_tokens"}
    assert (await http.post(quick.addresses[0], "/v1/messages", without_limit))[0] == 400
    _, counted = await http.post(quick.addresses[0], "/v1/messages/count_tokens", without_limit)
    assert json.loads(counted) == {"input_tokens": expected["usage"]["input_tokens"]}
