"""Bodies and headers pass through unharmed, in both directions."""

import hashlib
import json
from pathlib import Path

import pytest
from gw_http1 import Http1
from gw_http2 import Http2
from gw_messages import Ask
from gw_modes import Pair
from gw_site import CHAT, GATEWAYS, GET, Site, headers, post, site

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("size", [1, 61_999, 62_000, 62_001, 200_000, 5 << 20])
async def test_uploads_of_any_size_arrive_whole_with_their_own_length(at: Site, size: int) -> None:
    """Envoy lets us send 64 KiB ahead: what is handed back waits for its WINDOW_UPDATEs.

    A length that does not fit would let the rest of a body be read as the next request of the connection.
    """
    body = (bytes(range(256)) * (size // 256 + 1))[:size]
    async with Http1(at.gateway.port) as client:
        for chunked in (False, True):
            told = json.loads((await client.ask(post(body, path="/upload", chunked=chunked))).body)
            assert (told["bytes"], told["sha256"]) == (size, hashlib.sha256(body).hexdigest())
            framing = headers(told)
            if "content-length" in framing:
                assert framing["content-length"] == str(size)
                assert "transfer-encoding" not in framing
            else:
                assert chunked
                assert framing["transfer-encoding"] == "chunked"
        assert client.opened == 1


async def test_expect_100_continue(at: Site) -> None:
    got = await at.ask(post(bytes(100_000), path="/upload", expect=True))
    assert got.continued
    assert json.loads(got.body)["bytes"] == 100_000


@pytest.mark.parametrize("size", [0, 62_001, 300_000, 24 << 20])
async def test_large_responses_pass(at: Site, size: int) -> None:
    """In chunks above what Envoy takes back, and with more bytes than our connection window holds, also late ones."""
    for ask in (post(path=f"/bytes/{size}"), Ask("GET", f"/bytes/{size}")):
        assert len((await at.ask(ask)).body) == size


async def test_requests_that_end_by_trailers(at: Site) -> None:
    """No body message says end of stream then; under full duplex the trailers are a message of their own."""
    before = await at.stat("cluster.dst.upstream_rq_total")
    async with Http2(at.gateway.port) as client:
        for size in (100, 150_000, 100):
            got = await client.ask(post(bytes(size), path="/upload", trailers=[("x-checksum", "1")]))
            assert (got.status, json.loads(got.body)["bytes"]) == (200, size)
    assert await at.stat("cluster.dst.upstream_rq_total") - before == 3, "each was scheduled"


@pytest.mark.parametrize("pair", [*GATEWAYS.values(), Pair("buffered", "first-chunk")], ids=lambda pair: pair.name)
async def test_trailers_without_a_body_hold_nobody_up(pair: Pair, tmp_path: Path) -> None:
    """Our gateways show nothing but headers that promise a body then. Such a request is served by whoever is next,
    at the latest when the gateway's patience (`message_timeout`) is over.
    """
    async with site(pair, tmp_path, message_timeout=0.2) as at, Http2(at.gateway.port) as client:
        for _ in range(2):
            got = await client.ask(post(b"", path="/upload", trailers=[("x-checksum", "1")]))
            assert (got.status, json.loads(got.body)["bytes"]) == (200, 0)
        assert not at.live.fleet.ledger or at.live.host.logs.connected


async def test_requests_without_a_body_are_scheduled_like_others(at: Site) -> None:
    before = await at.stat("cluster.dst.upstream_rq_total")
    assert {(await at.answer(GET))["at"] for _ in range(6)} == set(at.addresses)
    head = await at.ask(Ask("HEAD", "/v1/models"))
    assert (head.status, head.body) == (200, b"")
    assert (await at.answer(post(b"")))["bytes"] == 0
    async with Http2(at.gateway.port) as client:
        assert json.loads((await client.ask(GET)).body)["method"] == "get"
    assert await at.stat("cluster.dst.upstream_rq_total") - before == 9


async def test_repeated_response_headers_survive(at: Site) -> None:
    """A header that is handed back overwrites all of its kind."""
    assert (await at.ask(post())).all("set-cookie") == ["a=1", "b=2"]


async def test_the_client_s_request_id_and_other_headers_reach_the_model_server(at: Site) -> None:
    own = [("x-request-id", "my-own-id"), ("x-custom", "1"), ("x-custom", "2"), ("accept", "text/event-stream")]
    told = await at.answer(post(CHAT, *own))
    assert headers(told)["x-request-id"] == "my-own-id"
    assert ",".join(value for name, value in told["headers"] if name == "x-custom").replace(" ", "") == "1,2"
    assert headers(told)["accept"] == "text/event-stream"
    assert headers(await at.answer(post())).get("x-request-id"), "or it gets one"


async def test_many_different_header_blocks_on_one_connection(at: Site) -> None:
    """The first block of a connection uses the dynamic table, before our SETTINGS forbid it; then sizes are updated."""
    async with Http1(at.gateway.port) as client:
        for number in range(40):
            fields = [(f"x-n{number % 7}", "v" * number), ("x-session-id", str(number))]
            told = json.loads((await client.ask(post(CHAT, *fields))).body)
            assert headers(told)[f"x-n{number % 7}"] == "v" * number
