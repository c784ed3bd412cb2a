"""Where requests go, and that nobody but the scheduler says so: steering clients, subset hints, routes, refusals."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import pytest_asyncio
from google.protobuf.struct_pb2 import Value
from gw_http1 import Http1
from gw_http2 import Http2
from gw_live import running
from gw_messages import JSON, Ask, Got
from gw_mirror import Mirror
from gw_modes import Pair, bootstrap, connection_manager, connection_managers, ext_proc_filter
from gw_processes import Envoy, sees_the_scheduler, stat
from gw_rewriter import Rewriter
from gw_site import CHAT, EMBEDDED, FOREIGN, GET, Site, headers, post, site
from ports import free_ports

from fairlead.core.headers import CONTROL_HEADERS, DESTINATION
from fairlead.gateway.envoy.config import build
from fairlead.gateway.envoy.options import Options
from fairlead.gateway.ext_proc import SUBSET_KEY, SUBSET_NAMESPACE

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAIRS = {"embedded": EMBEDDED, "foreign": FOREIGN}
BOTH = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
ASKS = pytest.mark.parametrize("ask", [post(), GET], ids=["post", "get"])
SPOOFED = [(name.title(), "10.66.66.66:6") for name in sorted(CONTROL_HEADERS)]
INET6 = Path("/proc/net/if_inet6")
HAS_IPV6 = INET6.exists() and "00000000000000000000000000000001" in INET6.read_text()


# ---- clients cannot steer ----


@pytest.mark.parametrize("method", ["POST", "GET"])
async def test_control_headers_of_clients_have_no_effect_and_reach_nobody(at: Site, method: str) -> None:
    ask = Ask(method, "/v1/models", [JSON, *SPOOFED, *SPOOFED], [CHAT] if method == "POST" else [])
    for client in (Http1(at.gateway.port), Http2(at.gateway.port)):
        async with client:
            got = await client.ask(ask)
        told = json.loads(got.body)
        leaked = CONTROL_HEADERS & headers(told).keys()
        # A gateway that routes by the header passes it on; it holds what the scheduler said.
        assert leaked - {DESTINATION} == set()
        assert headers(told).get(DESTINATION, told["at"]) == told["at"]
        assert "10.66.66.66" not in got.body.decode()


# ---- the subset hint ----

HINT = "x-test-hint"


def hinting(built: dict[str, Any], addresses: list[str]) -> None:
    """Metadata that a filter before ours sets: a hint at some endpoints, taken from a header of the test's request."""
    value = {"metadata_namespace": SUBSET_NAMESPACE, "key": SUBSET_KEY, "type": "PROTOBUF_VALUE", "encode": "BASE64"}
    rule = {"header": HINT, "on_header_present": value, "remove": True}
    config = {"@type": "type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config"}
    connection_manager(built)["http_filters"].insert(
        0, {"name": "envoy.filters.http.header_to_metadata", "typed_config": {**config, "request_rules": [rule]}}
    )
    ext_proc_filter(built)["metadata_options"]["forwarding_namespaces"] = {"untyped": [SUBSET_NAMESPACE]}


def hint(ask: Ask, entries: list[str]) -> Ask:
    value = Value()
    value.list_value.extend(entries)
    value.list_value.SetInParent()
    return ask._replace(fields=[*ask.fields, (HINT, base64.b64encode(value.SerializeToString()).decode())])


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=PAIRS)
async def hinted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    async with site(PAIRS[request.param], tmp_path_factory.mktemp("hinted"), patch=hinting) as at:
        yield at


@ASKS
async def test_a_subset_hint_is_kept_to(hinted: Site, ask: Ask) -> None:
    for address in hinted.addresses:
        assert {(await hinted.answer(hint(ask, [address])))["at"] for _ in range(4)} == {address}
        unknown = ["10.0.0.99:80", "127.0.0.1:1", address]
        assert (await hinted.answer(hint(ask, unknown)))["at"] == address
    assert {(await hinted.answer(ask))["at"] for _ in range(4)} == set(hinted.addresses), "no hint, no limit"


@ASKS
@pytest.mark.parametrize("entries", [[], ["10.0.0.99:80"], ["127.0.0.1:1"]], ids=["empty", "unmatched", "other port"])
async def test_a_subset_hint_that_leaves_nobody_is_a_503(hinted: Site, ask: Ask, entries: list[str]) -> None:
    hinted.forget()
    refused(await hinted.ask(hint(ask, entries)))
    assert not hinted.told


# ---- routes ----


@pytest.mark.parametrize("mode", get_args(get_type_hints(Options)["request_mode"]))
async def test_our_gateways_ask_before_they_choose(mode: str) -> None:
    """With `request_header_mode: SKIP` Envoy chooses the endpoint before the scheduler has said a word."""
    processing = ext_proc_filter(build(Options(request_mode=mode)))["processing_mode"]  # type: ignore[arg-type]
    assert processing["request_header_mode"] == "SEND"


@pytest.mark.parametrize(
    "pair", [EMBEDDED, Pair("buffered", "first-chunk"), FOREIGN], ids=["whole", "buffered", "foreign"]
)
async def test_a_gateway_that_does_not_show_headers_chooses_before_it_asks(pair: Pair, tmp_path: Path) -> None:
    """What the scheduler says later has no effect: the fallback serves, or where there is none, nobody does."""

    def skip(built: dict[str, Any], _: list[str]) -> None:
        ext_proc_filter(built)["processing_mode"]["request_header_mode"] = "SKIP"

    asks = (post(), GET, post(b""))
    async with site(pair, tmp_path, patch=skip) as at:
        for ask in asks:
            assert (await at.ask(ask)).status == (200 if pair.fails_open else 503)
        assert await at.stat("cluster.dst.upstream_rq_total") == 0
        assert len(at.told) == (len(asks) if pair.fails_open else 0)
        await at.until(lambda: not at.live.fleet.ledger)


@pytest.mark.parametrize("mode", ["whole", "buffered"])
async def test_the_route_is_chosen_anew_when_the_destination_is_known(mode: str, tmp_path: Path) -> None:
    """Without clear_route_cache the first route, the one for requests that nobody scheduled, would stay."""
    async with site(Pair(mode, "first-chunk"), tmp_path) as at:
        for ask in (post(), GET, post(bytes(200_000), path="/upload")):
            await at.answer(ask)
        assert await at.stat("cluster.dst.upstream_rq_total") == 3
        assert await at.stat("cluster.all_endpoints.upstream_rq_total") == 0


@pytest.mark.skipif(not HAS_IPV6, reason="this machine has no [::1]")
@BOTH
async def test_an_ipv6_endpoint_is_written_with_brackets(pair: Pair, tmp_path: Path) -> None:
    async with site(pair, tmp_path, hosts=("::1",)) as at:
        for ask in (post(), GET):
            assert (await at.answer(ask))["at"].startswith("[::1]:")
        assert await at.stat("cluster.dst.upstream_rq_total") == 2


@BOTH
async def test_envoy_dials_an_endpoint_with_a_host_name_by_its_address(pair: Pair, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        mirror = await stack.enter_async_context(Mirror())
        port = mirror.address.rpartition(":")[2]
        config = {"endpoints": [f"localhost:{port}"]}
        live, _ = await stack.enter_async_context(running(config, tmp_path))
        gateway = await opened(stack, pair, f"127.0.0.1:{live.config.ext_proc.port}", mirror, tmp_path)
        async with Http1(gateway.port) as client:
            for ask in (post(), GET):
                told = json.loads((await client.ask(ask)).body)
                assert told["at"] == mirror.address
                assert headers(told).get(DESTINATION, mirror.address) == mirror.address
        assert await stat(gateway.admin, "cluster.dst.upstream_rq_total") == 2


@BOTH
async def test_envoy_dials_one_literal_address_only(pair: Pair, tmp_path: Path) -> None:
    """So names are resolved by us, and no list is sent."""
    async with AsyncExitStack() as stack:
        mirror = await stack.enter_async_context(Mirror())
        rewriter = await stack.enter_async_context(Rewriter())
        gateway = await opened(stack, pair, rewriter.address, mirror, tmp_path)
        port = mirror.address.rpartition(":")[2]
        async with Http1(gateway.port) as client:
            for destination in (f"localhost:{port}", f"{mirror.address},{mirror.address}", f"::1:{port}"):
                rewriter.destination = destination
                assert (await client.ask(post())).status == 503, destination
            assert not mirror.told
            rewriter.destination = mirror.address
            assert (await client.ask(post())).status == 200


async def opened(stack: AsyncExitStack, pair: Pair, scheduler: str, mirror: Mirror, directory: Path) -> Envoy:
    """A gateway that asks the scheduler at this address."""
    (port,) = free_ports(1)
    gateway = Envoy(directory)
    stack.callback(gateway.end)
    await asyncio.to_thread(gateway.start, bootstrap(pair, port, scheduler, [mirror.address], message_timeout=5.0))
    await sees_the_scheduler(gateway.admin)
    return gateway


# ---- refusals ----


def refused(got: Got) -> None:
    assert got.status == 503
    assert got.field("content-type") == "application/json"
    assert got.field("x-llm-d-request-dropped-reason") == "rejected-no-endpoints"
    assert int(got.field("retry-after")) >= 1
    assert json.loads(got.body)["error"]["code"] in (503, "rejected-no-endpoints")


@BOTH
async def test_no_endpoint_is_a_503_that_says_why_and_when_to_come_back(pair: Pair, tmp_path: Path) -> None:
    async with site(pair, tmp_path, endpoints=False) as at, Http1(at.gateway.port) as client:
        for ask in (post(), GET, post(bytes(100_000), path="/upload"), GET):
            refused(await client.ask(ask))
        assert client.opened == 1, "a refusal ends no connection"


async def test_a_body_that_nobody_can_read_is_a_400_before_it_reaches_a_model_server(at: Site) -> None:
    got = await at.ask(post(b'{"model": "m", "messages": '))
    assert (got.status, got.field("content-type")) == (400, "application/json")
    assert json.loads(got.body)["error"]["code"] == 400
    assert not at.told


async def test_a_body_above_the_limit_of_the_embedded_gateway_is_a_413(tmp_path: Path) -> None:
    limit = 100_000

    def patch(built: dict[str, Any], _: list[str]) -> None:
        for manager in connection_managers(built):
            buffer = next(f for f in manager["http_filters"] if f["name"].endswith("buffer"))
            buffer["typed_config"]["max_request_bytes"] = limit

    async with site(EMBEDDED, tmp_path, patch=patch) as at:
        assert (await at.answer(post(bytes(limit), path="/upload")))["bytes"] == limit
        for chunked in (False, True):
            got = await at.ask(post(bytes(2 * limit), path="/upload", chunked=chunked))
            assert (got.status, got.field("content-type")) == (413, "application/json")
            assert json.loads(got.body)["error"]["code"] == 413
        assert len(at.told) == 1


async def test_a_body_above_the_scheduler_s_own_limit_is_a_413(tmp_path: Path) -> None:
    """A full-duplex gateway has no limit, so ours keeps a client from filling our memory."""
    async with site(FOREIGN, tmp_path, parsing={"maxBodyBytes": 100_000}) as at:
        assert (await at.answer(post(bytes(90_000), path="/upload")))["bytes"] == 90_000
        got = await at.ask(post(bytes(3_000_000), path="/upload"))
        assert (got.status, got.field("content-type")) == (413, "application/json")
        assert not at.live.fleet.ledger
