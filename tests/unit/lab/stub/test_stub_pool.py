"""Pools: replicas that stop, restart, differ and introduce themselves."""

import asyncio
import json

import pytest

from fairlead.lab.stub.config import StubConfig
from fairlead.lab.stub.pool import PortTaken, StubPool


async def test_a_replica_is_stopped_and_restarted_on_its_port(http, quick):
    first, second = quick.addresses
    asked = {"prompt": "y" * 400, "max_tokens": 1}
    await http.post(second, "/v1/completions", asked)
    reader, writer = await http.open(second, "/v1/completions", {"prompt": "x", "max_tokens": 9000, "stream": True})
    await quick.stop(1)
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await asyncio.wait_for(reader.readuntil(b"[DONE]"), 10)
    writer.close()
    with pytest.raises(OSError):
        await http.get(second, "/health")
    with pytest.raises(LookupError, match="stub-1 is stopped"):
        quick.replica(1)
    assert len(quick.replicas) == 1
    assert (await http.get(first, "/health"))[0] == 200
    await quick.restart(1)
    assert quick.addresses == [first, second]
    _, body = await http.post(second, "/v1/completions", asked)
    assert json.loads(body)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_replicas_say_who_they_are(http):
    config = StubConfig(preset="llama-8b-l40s", model="tiny", identity_headers=True, request_id_headers=True)
    async with StubPool(config, replicas=2) as pool:
        answer = await http.ask(
            pool.addresses[1], b"GET /health HTTP/1.1\r\nX-Request-Id: abc\r\nconnection: close\r\n\r\n"
        )
        headers = dict(http.split(answer)[1])
        port = pool.addresses[1].rpartition(":")[2]
        assert headers["x-inference-pod"] == "stub-1"
        assert headers["x-inference-namespace"] == "default"
        assert headers["x-inference-port"] == port
        assert headers["x-request-id"] == "abc"


async def test_a_taken_port_is_named(quick_config):
    async with StubPool(quick_config) as pool:
        port = int(pool.addresses[0].rpartition(":")[2])
        with pytest.raises(PortTaken, match=f"cannot listen on 127.0.0.1:{port}"):
            async with StubPool(quick_config, ports=[port]):
                pass


async def test_the_prefix_cache_can_be_reset(http, quick):
    address = quick.addresses[0]
    asked = {"prompt": "z" * 400, "max_tokens": 1}
    await http.post(address, "/v1/completions", asked)
    assert json.loads((await http.post(address, "/reset_prefix_cache", None))[1]) == {"success": True}
    _, body = await http.post(address, "/v1/completions", asked)
    assert json.loads(body)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_load_counts_requests_in_flight(stuck_config, http):
    async with StubPool(stuck_config) as pool:
        _, writer = await http.open(pool.addresses[0], "/v1/completions", {"prompt": "x", "stream": True})
        assert json.loads((await http.get(pool.addresses[0], "/load"))[1]) == {"server_load": 1}
        writer.close()
