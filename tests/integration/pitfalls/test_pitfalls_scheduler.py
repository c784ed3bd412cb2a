"""The scheduler dies, returns, is slow: what becomes of requests, and of the gateway's connections to it."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from gw_http1 import Http1
from gw_live import running
from gw_messages import Broken
from gw_mirror import Mirror
from gw_modes import Pair, bootstrap, ext_proc_filter
from gw_processes import Envoy, sees_the_scheduler
from gw_site import CHAT, EMBEDDED, FOREIGN, FOREIGN_WITH_LOG, GET, Site, headers, post, site
from ports import free_ports

from fairlead.core.headers import CONTROL_HEADERS, DESTINATION
from fairlead.gateway import ext_proc
from fairlead.gateway.ext_proc import CONTINUE, BodyMode, Incoming, Kind
from fairlead.gateway.h2_server import H2Server
from fairlead.gateway.health import EXT_PROC, HealthService
from fairlead.gateway.stream import ServerStream

pytestmark = pytest.mark.asyncio(loop_scope="module")

#: More than fits into any window.
BIG = CHAT.replace(b"Which", b"z" * 300_000)
SPOOFED = [(name.title(), "10.66.66.66:6") for name in sorted(CONTROL_HEADERS)]


async def test_one_connection_carries_many_streams(at: Site) -> None:
    """A low limit of concurrent streams would make Envoy open more connections; resets must not close any."""

    async def some() -> None:
        async with Http1(at.gateway.port) as client:
            for _ in range(5):
                assert (await client.ask(post())).status == 200

    await asyncio.gather(*(some() for _ in range(40)))
    # The access log has one of its own.
    assert await at.stat("cluster.ext_proc.upstream_cx_total") == 1


async def test_without_the_scheduler_requests_are_served_and_counted_and_clients_still_do_not_steer(
    tmp_path: Path,
) -> None:
    """With a header route and a dead scheduler, a client could reach any host through the gateway."""
    async with site(EMBEDDED, tmp_path) as at:
        await at.connect_log()
        at.live.health.set_ready(False)
        async with asyncio.timeout(20):
            while await at.stat("cluster.ext_proc.membership_healthy"):
                await asyncio.sleep(0.05)
        for ask in (post(CHAT, *SPOOFED), GET._replace(fields=SPOOFED)):
            told = await at.answer(ask)
            assert not CONTROL_HEADERS & headers(told).keys()
            assert told["at"] in at.addresses
        counted = b"fairlead_fallback_requests_total{"
        await at.until(lambda: counted in b"".join(at.live.watch.exposition()))


async def test_a_full_duplex_gateway_without_a_scheduler_answers_503(tmp_path: Path) -> None:
    """Not 500, which Envoy would say by itself."""
    async with site(FOREIGN, tmp_path) as at:
        await at.cable.cut()
        for _ in range(4):
            assert (await at.ask(post())).status == 503


@pytest.mark.parametrize("pair", [FOREIGN, FOREIGN_WITH_LOG], ids=["without log", "with log"])
async def test_leaving_at_the_pick_makes_full_duplex_streams_outlive_the_scheduler(pair: Pair, tmp_path: Path) -> None:
    """Without an access log nobody would tell the end of the request, so we stay, and the stream is cut."""
    async with site(pair, tmp_path) as at, Http1(at.gateway.port) as client:
        if pair.log:
            await at.connect_log()
        reading = asyncio.create_task(client.ask(post(path="/stream")))
        async with asyncio.timeout(20):
            while not await at.stat("cluster.dst.upstream_rq_active"):
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)  # some chunks are on their way
        await at.cable.cut()
        if pair.log:
            assert (await reading).body.endswith(b"data: [DONE]\n\n")
        else:
            with pytest.raises(Broken):
                await reading


@pytest.mark.parametrize("pair", [EMBEDDED, Pair("buffered", "first-chunk")], ids=["whole", "buffered"])
async def test_our_own_gateways_outlive_the_scheduler_at_any_moment(pair: Pair, tmp_path: Path) -> None:
    async with site(pair, tmp_path) as at, Http1(at.gateway.port) as client:
        reading = asyncio.create_task(client.ask(post(path="/stream")))
        async with asyncio.timeout(20):
            while not await at.stat("cluster.dst.upstream_rq_active"):
                await asyncio.sleep(0.02)
        await at.cable.cut()
        assert (await reading).body.endswith(b"data: [DONE]\n\n")
        for _ in range(4):
            assert (await at.ask(post())).status == 200


async def test_a_scheduler_that_returns_is_asked_again(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        mirror = await stack.enter_async_context(Mirror())
        (port, ext_port) = free_ports(2)
        config = {"endpoints": [mirror.address], "policy": "round-robin"}
        config["extProc"] = {"host": "127.0.0.1", "port": ext_port}
        gateway = Envoy(tmp_path)
        stack.callback(gateway.end)
        address = f"127.0.0.1:{ext_port}"
        await asyncio.to_thread(gateway.start, bootstrap(EMBEDDED, port, address, [mirror.address]))
        async with Http1(port) as client:
            for _ in range(2):
                assert (await client.ask(post())).status == 200, "nobody schedules"
                async with running(config, tmp_path) as (live, _):
                    await sees_the_scheduler(gateway.admin)
                    assert (await client.ask(post())).status == 200
                    assert sum(1 for _ in live.watch.decisions(10)) == 1


# ---- asking for more time ----


class Slow:
    """A scheduler that takes `seconds` for a decision, and asks for `announce` seconds when it knows the request."""

    def __init__(self, destination: str, seconds: float, announce: float) -> None:
        self.destination, self.seconds, self.announce = destination.encode(), seconds, announce

    def session(self, stream: ServerStream, metadata: Mapping[str, str]) -> "SlowSession":
        return SlowSession(self, stream)


class SlowSession:
    def __init__(self, slow: Slow, stream: ServerStream) -> None:
        self._slow, self._stream, self._buffered = slow, stream, False

    def on_message(self, data: bytes) -> None:
        message = Incoming(data)
        modes = message.modes()
        if modes is not None and modes[0] is BodyMode.BUFFERED:
            self._buffered = True
            self._stream.send(CONTINUE[Kind.REQUEST_HEADERS])
        elif message.kind is Kind.REQUEST_BODY:
            if self._slow.announce:
                self._stream.send(ext_proc.message_timeout(self._slow.announce))
            asyncio.get_running_loop().call_later(self._slow.seconds, self._pick)
        elif message.kind is Kind.RESPONSE_BODY:
            self._stream.finish()

    def _pick(self) -> None:
        # Envoy clears the route cache only together with a change of headers.
        pick = ext_proc.set_header(DESTINATION, self._slow.destination)
        metadata = ext_proc.lb_metadata({DESTINATION: self._slow.destination})
        if self._buffered:
            self._stream.send(ext_proc.answer(Kind.REQUEST_BODY, pick, metadata, reroute=True))
        else:
            head = ext_proc.answer(Kind.REQUEST_HEADERS, pick, metadata, reroute=True)
            self._stream.send(head, CONTINUE[Kind.REQUEST_BODY])

    def on_half_close(self) -> None: ...

    def on_lost(self, why: str) -> None: ...


@pytest.mark.parametrize("mode", ["whole", "buffered"])
@pytest.mark.parametrize(("announce", "scheduled"), [(10.0, True), (0.0, False)])
async def test_more_time_for_a_decision_must_be_asked_for_and_is_given(
    mode: str, announce: float, scheduled: bool, tmp_path: Path
) -> None:
    """Without `max_message_timeout` in the filter Envoy ignores the request. It hears one per answer that it awaits."""
    async with AsyncExitStack() as stack:
        chosen, other = [await stack.enter_async_context(Mirror()) for _ in range(2)]
        health = HealthService()
        health.set_ready(True)
        slow = Slow(chosen.address, 0.6, announce)
        server = H2Server({f"/{EXT_PROC}/Process": slow.session, **health.routes()})
        address = f"127.0.0.1:{await server.listen('127.0.0.1', 0)}"
        stack.push_async_callback(server.close)
        (port,) = free_ports(1)
        gateway = Envoy(tmp_path)
        stack.callback(gateway.end)
        pair = Pair(mode, "first-chunk", log=False)
        built = bootstrap(pair, port, address, [other.address], message_timeout=0.2)
        await asyncio.to_thread(gateway.start, built)
        await sees_the_scheduler(gateway.admin)
        async with Http1(port) as client:
            told = json.loads((await client.ask(post())).body)
        assert told["at"] == (chosen.address if scheduled else other.address)


#: Of the gateway, and what our own deadline is; both in milliseconds.
MESSAGE_TIMEOUT, TTL = 200, 500


@pytest.mark.parametrize("pair", [FOREIGN, FOREIGN_WITH_LOG], ids=["without log", "with log"])
async def test_a_full_duplex_gateway_waits_for_as_long_as_we_let_a_request_queue(pair: Pair, tmp_path: Path) -> None:
    """Its `message_timeout` bounds nothing there, and needs no asking for more; nobody but us ends a wait."""

    def impatient(built: dict[str, Any], _: list[str]) -> None:
        ext_proc_filter(built)["message_timeout"] = f"{MESSAGE_TIMEOUT / 1000}s"

    flow = {"saturation": {"type": "concurrency-detector", "maxConcurrency": 1}, "ttl": f"{TTL}ms"}
    async with site(pair, tmp_path, hosts=("127.0.0.1",), patch=impatient, flowControl=flow) as at:
        running_one = asyncio.create_task(at.ask(post(path="/stream")))
        await at.until(lambda: len(at.live.fleet.ledger) == 1)
        patient = ("x-fairlead-ttl-ms", "30000")
        held = [asyncio.create_task(at.ask(post(body, patient))) for body in (CHAT, BIG)]
        refused = await asyncio.gather(*(at.ask(post(body)) for body in (CHAT, BIG)))
        for got in refused:
            assert (got.status, got.field("x-llm-d-request-dropped-reason")) == (429, "rejected-ttl-expired")
            assert int(got.field("retry-after")) >= 1
            assert json.loads(got.body)["error"]["code"] == "rejected-ttl-expired"
        assert not at.told and not any(task.done() for task in held), "they wait behind the one that runs"
        assert (await running_one).body.endswith(b"data: [DONE]\n\n")
        for got, body in zip(await asyncio.gather(*held), (CHAT, BIG), strict=True):
            assert got.status == 200 and json.loads(got.body)["bytes"] == len(body)
        queued = [decision["queued_ms"] for decision in at.live.watch.decisions(10)]
        assert sum(1 for ms in queued if ms > MESSAGE_TIMEOUT) == 4, queued
        timeouts = await at.gateway.admin.stats("ext_proc.message_timeouts$")
        assert timeouts and not any(timeouts.values())
        await at.until(lambda: not at.live.fleet.ledger)
