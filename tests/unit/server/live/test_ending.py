"""A scheduler without an embedded gateway: what ends it, and its exit code."""

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from aiohttp import ClientSession
from msgspec.structs import replace
from ports import free_port

from fairlead.compat.load import load
from fairlead.core.events import PeerHeard, RequestArrived, ResponseEnded
from fairlead.core.reports import SharedFleet
from fairlead.gateway.health import EXT_PROC, LIVENESS, READINESS, ServingStatus
from fairlead.gateway.server import Server
from fairlead.server.live.pool_scheduler import PoolScheduler
from fairlead.server.live.scheduler import Live
from fairlead.server.supervise import ENDING, IGNORED
from fairlead.testing import request

FILE = """
gateway: none
extProc: {host: 127.0.0.1, port: 0}
als: {enabled: false}
admin: {port: 0}
endpoints: ['127.0.0.1:1']
"""


class Busy(NamedTuple):
    live: Live
    run: asyncio.Task[None]


@pytest.fixture
async def busy(tmp_path: Path) -> AsyncIterator[Busy]:
    """A scheduler with a request in flight that never ends."""
    collector, file = gc.get_threshold(), tmp_path / "f.yaml"
    file.write_text(FILE)
    live = Live(load(file))
    run = asyncio.create_task(live.run())
    async with asyncio.timeout(30):
        while not hasattr(live, "admin"):
            await asyncio.sleep(0.01)
    live.driver.feed(RequestArrived(replace(request(model="m"), id=1, arrived=0.0)))
    assert live.serving.leases == 1
    yield Busy(live, run)
    if not run.done():
        run.cancel()
    # `Live` tunes the collector for a process of its own.
    gc.unfreeze()
    gc.set_threshold(*collector)


@pytest.mark.parametrize("setting", ["admin", "extProc", "als"])
async def test_a_taken_port_is_no_wrong_configuration(tmp_path: Path, setting: str) -> None:
    """It may be free later: exit code 1, not 2."""
    file = tmp_path / "f.yaml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = {"gateway": "none", "endpoints": ["127.0.0.1:1"], "extProc": {"host": "127.0.0.1", "port": 0}}
        settings |= {"als": {"enabled": setting == "als"}, "admin": {"port": 0}}
        settings[setting] = {"host": "127.0.0.1", "port": port} if setting != "als" else {"port": port}
        file.write_text(json.dumps(settings))
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-m", "fairlead", "serve", str(file)], capture_output=True, text=True
        )
    assert done.returncode == 1
    assert f"$.{setting}" in done.stderr and "cannot listen on 127.0.0.1" in done.stderr


async def test_a_second_signal_ends_requests_in_flight(busy: Busy, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "fairlead"):
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(20):
            while "stopping; a second signal cuts off requests in flight" not in caplog.text:
                await asyncio.sleep(0.01)
            assert not busy.run.done()
            async with ClientSession() as client, client.get(f"http://127.0.0.1:{busy.live.admin.port}/readyz") as page:
                assert (page.status, "shutting down" in await page.text()) == (503, True), "it tells until the end"
            os.kill(os.getpid(), signal.SIGTERM)
            await busy.run


async def test_while_the_gateway_ends_it_is_not_ready_and_asked_all_the_same(busy: Busy) -> None:
    """The gateway listens no more, and its last requests may still need a scheduler."""
    page = f"http://127.0.0.1:{busy.live.admin.port}/readyz"
    async with asyncio.timeout(20), ClientSession() as client:
        while busy.live.health.status(READINESS) is not ServingStatus.SERVING:
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), ENDING)
        text = ""
        while "shutting down" not in text:
            async with client.get(page) as answer:
                text = await answer.text()
        assert answer.status == 503
    statuses = [busy.live.health.status(service) for service in (READINESS, EXT_PROC, LIVENESS)]
    assert statuses == [ServingStatus.NOT_SERVING, ServingStatus.SERVING, ServingStatus.SERVING]
    busy.live.driver.feed(ResponseEnded(request_id=1, status=200))
    busy.live.stop()
    await busy.run


async def test_requests_of_other_schedulers_are_not_waited_for(busy: Busy) -> None:
    """Otherwise workers that are restarted one after the other would all end together."""
    peer, serving = SharedFleet(), busy.live.serving
    assert isinstance(serving, PoolScheduler)
    ((_, endpoint),) = serving.fleet.table.slots()
    peer.up(endpoint)
    peer.charge(request(), 0, 0.0, 0, 8.0)
    serving.driver.feed(PeerHeard("p", peer.reports.batch(0.0)))
    assert (len(serving.fleet.ledger), serving.leases) == (2, 1)
    serving.driver.feed(ResponseEnded(request_id=1, status=200))
    assert len(serving.fleet.ledger) == 1
    busy.live.stop()
    async with asyncio.timeout(20):
        await busy.run


async def test_signals_of_other_servers_end_nothing(busy: Busy, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "fairlead"):
        for number in IGNORED:
            os.kill(os.getpid(), number)
        async with asyncio.timeout(20):
            while not all(f"{number.name} changes nothing" in caplog.text for number in IGNORED):
                await asyncio.sleep(0.01)
            assert not busy.live.health.leaving
            os.kill(os.getpid(), signal.SIGTERM)
            while "stopping;" not in caplog.text:
                await asyncio.sleep(0.01)
    assert not busy.run.done()


@contextlib.asynccontextmanager
async def checked(
    tmp_path: Path, more: str
) -> AsyncIterator[tuple[Live, asyncio.Task[None], Callable[[], Awaitable[bytes]]]]:
    """A scheduler that a gateway has found healthy, its run, and another check."""
    grpc = pytest.importorskip("grpc", reason="needs grpcio: pip install 'fairlead[grpc]'")
    collector, file, port = gc.get_threshold(), tmp_path / "f.yaml", free_port()
    file.write_text(FILE.replace("port: 0}\nals", f"port: {port}}}\nals") + more)
    live = Live(load(file))
    run = asyncio.create_task(live.run())

    async def check() -> bytes:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            asks = channel.unary_unary("/grpc.health.v1.Health/Check")
            answer: bytes = await asks(b"\x0a" + bytes([len(EXT_PROC)]) + EXT_PROC.encode(), wait_for_ready=True)
            return answer

    try:
        async with asyncio.timeout(30):
            while await check() != b"\x08\x01":
                await asyncio.sleep(0.01)
            yield live, run, check
            await run
    finally:
        run.cancel()
        gc.unfreeze()
        gc.set_threshold(*collector)


#: It has others, although none can be reached.
SHARED = "replicas: {via: 'valkey://127.0.0.1:1'}"


async def test_a_gateway_that_checks_its_health_notices_before_it_closes(tmp_path: Path) -> None:
    """Otherwise requests go past the other schedulers of that gateway until its next health check."""
    async with checked(tmp_path, SHARED) as (live, _, check):
        live.stop()
        await asyncio.sleep(1.0)
        assert await check() == b"\x08\x02", "a new connection is told that it is not ready"
        live.driver.feed(RequestArrived(replace(request(model="m"), id=1, arrived=0.0)))
        assert live.serving.leases == 1, "requests are still decided"
        live.driver.feed(ResponseEnded(request_id=1, status=200))


async def test_nobody_waits_for_a_gateway_that_has_no_other_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairlead.server.live.scheduler.NOTICE_S", 600.0)
    async with checked(tmp_path, "") as (live, run, _):
        live.stop()
        await run


async def test_a_second_signal_refuses_who_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the gateway sends them past the schedulers, to endpoints that are full."""
    monkeypatch.setattr("fairlead.server.live.scheduler.NOTICE_S", 600.0)
    refused = list[bool]()
    async with checked(tmp_path, SHARED) as (live, run, _):
        monkeypatch.setattr(live.serving, "empty_queue", lambda: refused.append(True))
        os.kill(os.getpid(), signal.SIGTERM)
        while live.health.status(READINESS) is ServingStatus.SERVING:
            await asyncio.sleep(0.01)
        assert not refused
        os.kill(os.getpid(), signal.SIGTERM)
        await run
    assert refused


async def test_after_a_second_signal_the_whole_queue_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`StopAsked` refuses the first few only; timers refuse the others."""
    monkeypatch.setattr("fairlead.server.live.scheduler.NOTICE_S", 600.0)
    monkeypatch.setattr("fairlead.server.live.scheduler.POLL_S", 0.0)
    saturation = "{type: concurrency-detector, parameters: {maxConcurrency: 1}}"
    left = list[int]()
    async with checked(tmp_path, f"{SHARED}\nflowControl: {{saturation: {saturation}}}") as (live, run, _):
        for number in range(1, 500):
            arrived = asyncio.get_running_loop().time()
            live.driver.feed(RequestArrived(replace(request(model="m"), id=number, arrived=arrived)))
        assert live.serving.waiting > 200
        os.kill(os.getpid(), signal.SIGTERM)
        while live.health.status(READINESS) is ServingStatus.SERVING:
            await asyncio.sleep(0.01)
        close = Server.close

        async def closed(server: Server, grace_s: float) -> None:
            left.append(live.serving.waiting)
            await close(server, grace_s)

        monkeypatch.setattr(Server, "close", closed)
        os.kill(os.getpid(), signal.SIGTERM)
        await run
    assert left == [0]


async def test_lines_that_count_are_written_in_time(busy: Busy, monkeypatch: pytest.MonkeyPatch) -> None:
    serving, looks = busy.live.serving, list[bool]()
    assert isinstance(serving, PoolScheduler)
    monkeypatch.setattr(serving.watch, "look", lambda at_end=False: looks.append(at_end))
    serving.turned(0.0)
    assert looks == [False]
    serving.driver.feed(ResponseEnded(request_id=1, status=200))
    busy.live.stop()
    await busy.run


async def test_last_addresses_of_names_are_kept_beside_the_state_file(tmp_path: Path) -> None:
    state, file = tmp_path / "state" / "learned.state", tmp_path / "f.yaml"
    kept = state.with_name("learned.state.names")

    async def addresses(name: str) -> list[str]:
        file.write_text(FILE.replace("127.0.0.1:1", f"{name}:1") + f"state: {{file: {state}}}\n")
        collector, live = gc.get_threshold(), Live(load(file))
        run = asyncio.create_task(live.run())
        async with asyncio.timeout(30):
            while not hasattr(live, "admin") or not kept.exists():
                await asyncio.sleep(0.01)
        found = [endpoint.address for _, endpoint in live.fleet.table.slots()]
        live.stop()
        await run
        # `Live` tunes the collector for a process of its own.
        gc.unfreeze()
        gc.set_threshold(*collector)
        return found

    assert await addresses("localhost") == ["127.0.0.1:1"]
    kept.write_text(kept.read_text().replace("localhost", "gone.invalid"))
    assert await addresses("gone.invalid") == ["127.0.0.1:1"]
