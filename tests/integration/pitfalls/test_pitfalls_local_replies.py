"""Responses that the gateway makes by itself, before there is a pick: they reach the client as they are."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from gw_http1 import Http1
from gw_messages import Got
from gw_modes import FULL_DUPLEX, Pair, connection_manager, virtual_host
from gw_site import CHAT, Site, post, site

FAULT = {
    "name": "envoy.filters.http.fault",
    "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.fault.v3.HTTPFault",
        "abort": {"header_abort": {}, "percentage": {"numerator": 100}},
    },
}
HALF = b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 9000\r\n\r\n" + CHAT
REFUSED = post(CHAT, ("x-envoy-fault-abort-request", "403"))
#: How requests are handed over, each with the ways in which responses are shown.
PAIRS = [
    Pair(request, response, log=False)
    for request in ("BUFFERED_PARTIAL", FULL_DUPLEX, "STREAMED", "NONE", "BUFFERED")
    for response in ("NONE", "STREAMED", FULL_DUPLEX)
]


def impatient(built: dict[str, Any], _: list[str]) -> None:
    """Refuses what a header says, and waits neither for clients nor for the scheduler."""
    manager = connection_manager(built)
    manager["http_filters"].insert(0, FAULT)
    manager["request_timeout"] = "0.3s"
    for route in virtual_host(built)["routes"]:
        if "route" in route:
            route["route"]["idle_timeout"] = "0.4s"


#: One request at a time, and others wait.
ONE = {"saturation": {"type": "concurrency-detector", "maxConcurrency": 1}, "ttl": "60s"}


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
async def test_a_local_reply_reaches_the_client_at_any_moment(pair: Pair, tmp_path: Path) -> None:
    async with site(pair, tmp_path, hosts=("127.0.0.1",), patch=impatient, flowControl=ONE) as at:
        refused = await at.ask(REFUSED)
        assert (refused.status, b"fault filter abort" in refused.body) == (403, True), "before we saw the request"
        reader, writer = await asyncio.open_connection("127.0.0.1", at.gateway.port)
        writer.write(HALF)
        assert (await reader.readuntil(b"request timeout")).startswith(b"HTTP/1.1 408 "), "while the body is awaited"
        writer.close()
        if pair.request not in ("NONE", "STREAMED") and pair.response != "NONE":  # there no lease lasts for long
            waiting = await _stalled(at)
            assert (waiting.status, b"stream timeout" in waiting.body) == (504, True), "while it waits for an endpoint"
        assert (await at.ask(post())).status == 200
        await at.until(lambda: not at.live.fleet.ledger)
        at.live.pipeline.validate()


async def _stalled(at: Site) -> Got:
    """The answer to a request that waits behind another one, for longer than the gateway does."""
    while True:
        async with Http1(at.gateway.port) as client:
            await client.begin(post(path="/stream"))
            await at.until(lambda: len(at.live.fleet.ledger) == 1)
            got = await at.ask(post())
            if got.status != 200:  # else the other one ended first
                return got
        await at.until(lambda: not at.live.fleet.ledger)
