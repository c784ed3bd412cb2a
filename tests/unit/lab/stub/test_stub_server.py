"""The server around a replica: handlers that fail, connections that keep still."""

import asyncio
import json

from fairlead.lab.stub.config import StubConfig
from fairlead.lab.stub.pool import StubPool


async def test_a_handler_that_fails_is_a_500_and_the_server_goes_on(http, quick, caplog, monkeypatch):
    def fail() -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(quick.replica(0).engine, "clear_cache", fail)
    status, body = await http.post(quick.addresses[0], "/reset_prefix_cache", {})
    assert status == 500
    assert json.loads(body)["error"]["type"] == "InternalServerError"
    assert "on purpose" in caplog.text
    assert (await http.get(quick.addresses[0], "/health"))[0] == 200


async def test_connections_that_keep_still_are_closed(http, quick_config):
    config = StubConfig(engine=quick_config.engine, model="tiny", idle_timeout_s=0.01, request_timeout_s=0.01)
    async with StubPool(config) as pool:
        host, _, port = pool.addresses[0].rpartition(":")
        for sent in (b"", b"GET /hea", http.request("/health", None, method="GET")):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            await asyncio.wait_for(reader.read(), 10)
            writer.close()
