"""`fairlead serve --workers`: several schedulers behind one Envoy decide as one, whatever dies among them."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import Request

import pytest
from gw_hit_rate import Conversations
from gw_load import Story, under_load
from gw_processes import Child, Serve, Stub, Upstream, get_page, stat
from ports import free_ports
from valkey.asyncio import Valkey
from valkey_server import ValkeyServer

from fairlead.gateway.envoy.authentication import new_key

PATIENCE = 60.0
#: Points of the hit rate that several workers may cost.
COST = 2.0
HEALTHY = "cluster.ext_proc.membership_healthy"


class Workers:
    """`fairlead serve --workers`, and what each worker says."""

    def __init__(self, directory: Path, count: int) -> None:
        self.count = count
        self.serve = Serve(directory)

    async def start(self, addresses: list[str], **config: Any) -> "Workers":
        first = free_ports(2 * self.count)[0]
        ports = {"extProc": {"port": first}, "admin": {"port": first + self.count}}
        settings = {"endpoints": addresses, "seed": 1, **ports, **config}
        await asyncio.to_thread(self.serve.start, settings, self.count)
        await self.all_asked()
        return self

    async def all_asked(self) -> None:
        async with asyncio.timeout(PATIENCE):
            while await stat(self.serve.gateway, HEALTHY) < self.count:
                await asyncio.sleep(0.02)

    async def page(self, worker: int, path: str) -> str:
        port = self.serve.config["admin"]["port"] + worker
        return (await asyncio.to_thread(get_page, f"http://127.0.0.1:{port}{path}"))[1]

    async def replicas(self) -> list[dict[str, Any]]:
        return [json.loads(await self.page(worker, "/debug/replicas")) for worker in range(self.count)]

    async def agree(self) -> None:
        """Wait until each hears all others and lacks nothing of them."""
        async with asyncio.timeout(PATIENCE):
            while True:
                with suppress(OSError):  # one is being started
                    said = await self.replicas()
                    heard = all(one["connected"] and len(one["replicas"]) == self.count - 1 for one in said)
                    if heard and not any(one["missing"] for one in said):
                        return
                await asyncio.sleep(0.05)

    async def state_written(self) -> None:
        """Until all that each worker has learned so far is on the disk."""
        name = "fairlead_state_writes_total "
        for worker in range(self.count):
            before = 0.0
            async with asyncio.timeout(PATIENCE):
                while (written := await self.metric(worker, name)) < (before := before or written) + 2:
                    await asyncio.sleep(0.02)

    async def metric(self, worker: int, name: str) -> float:
        """Sum of its samples; `name` with what follows it on the page."""
        lines = (await self.page(worker, "/metrics")).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    async def end(self, gently: bool) -> None:
        """All processes at once."""
        pids = [*self.serve.scheduler_pids(), *self.serve.envoy_pids()]
        if not gently:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(self.serve.end, gently)

    async def until_said(self, text: str, times: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while self.serve.said().count(text) < times:
                await asyncio.sleep(0.02)


@pytest.fixture
def workers(tmp_path: Path, ending: Callable[[Child], Child]) -> Callable[..., Awaitable[Workers]]:
    def start(count: int, addresses: list[str], **config: Any) -> Awaitable[Workers]:
        started = Workers(tmp_path, count)
        ending(started.serve)
        return started.start(addresses, **config)

    return start


@pytest.mark.slow
async def test_four_find_as_much_cached_as_one(
    stub: Callable[..., Stub], workers: Callable[..., Awaitable[Workers]], figures: list[str]
) -> None:
    rates = {}
    for count in (1, 4):
        # New conversations each time: nothing of them is cached before.
        talk, servers = Conversations(), stub(8, "--model", "tiny")
        started = await workers(count, servers.addresses)
        await talk.hit_rate(started.serve.port, 200)
        rates[count] = await talk.hit_rate(started.serve.port, 200)
        if count > 1:
            said = await started.replicas()
            assert all(one["sent"] for one in said), "each has decided"
            await started.agree()
            shown = [json.loads(await started.page(worker, "/dashboard/snapshot")) for worker in range(count)]
            assert {each["now"]["schedulers"] for each in shown} == {count}, "each says that it is one of several"
        started.serve.end()
        servers.end()
    figures.append(f"hit rate by workers: {rates}")
    assert rates[4] >= rates[1] - COST


@pytest.mark.slow
async def test_killed_workers_cost_nothing_and_join_again(
    upstream: Upstream, workers: Callable[..., Awaitable[Workers]], figures: list[str]
) -> None:
    """The second kill hits one that was there all the time, when the first one is back."""
    three = await workers(3, upstream.addresses)
    killed = three.serve.scheduler_pids()[1:]

    async def script(note: Callable[[str], None]) -> None:
        for times, pid in enumerate(killed, 1):
            os.kill(pid, signal.SIGKILL)
            await three.until_said(" died; the gateway goes on without it", times)
            await three.all_asked()
            await three.agree()

    story = await under_load(f"http://127.0.0.1:{three.serve.port}", script)
    figures.append(f"two of three workers killed: {_summary(story)}")
    assert not story.failures
    assert not {*killed} & {*three.serve.scheduler_pids()}
    assert await three.serve.settled() == {}


@pytest.mark.slow
async def test_all_workers_start_again_with_what_they_had_learned(
    stub: Callable[..., Stub], workers: Callable[..., Awaitable[Workers]], tmp_path: Path, figures: list[str]
) -> None:
    """Ended and started again; then all of it killed at once, the gateway too."""
    talk, servers = Conversations(), stub(4, "--model", "tiny")
    state = {"file": str(tmp_path / "learned.state"), "interval": "200ms"}
    three = await workers(3, servers.addresses, state=state)
    await talk.hit_rate(three.serve.port, 150)
    rates = [await talk.hit_rate(three.serve.port)]
    for gently in (True, False):
        await three.state_written()
        await three.end(gently)
        await asyncio.to_thread(three.serve.again)
        await three.all_asked()
        await three.agree()
        rates.append(await talk.hit_rate(three.serve.port))
    figures.append(f"hit rate of three workers, after a restart, after SIGKILL to all: {rates}")
    assert min(rates[1:]) > rates[0] - COST


@pytest.mark.slow
async def test_requests_past_hung_workers_are_counted_once(
    upstream: Upstream, workers: Callable[..., Awaitable[Workers]]
) -> None:
    two = await workers(2, upstream.addresses)
    await two.agree()
    pids = two.serve.scheduler_pids()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        status, _ = await asyncio.to_thread(get_page, f"http://127.0.0.1:{two.serve.port}/v1/models")
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert status == 200
    counted = "fairlead_fallback_requests_total{"
    async with asyncio.timeout(PATIENCE):
        while not await two.metric(0, counted):
            await asyncio.sleep(0.05)
    assert await two.metric(0, counted) == 1
    await two.all_asked()
    assert not await two.metric(1, counted)


@pytest.mark.slow
async def test_valkey_dies_hangs_and_fills_up_under_load(
    upstream: Upstream, workers: Callable[..., Awaitable[Workers]], tmp_path: Path, figures: list[str]
) -> None:
    server = ValkeyServer(tmp_path).start()
    try:
        await _valkey_in_trouble(server, await workers(2, upstream.addresses, replicas={"via": server.url}), figures)
    finally:
        server.kill()


async def _valkey_in_trouble(server: ValkeyServer, two: Workers, figures: list[str]) -> None:
    await two.agree()

    async def alone() -> None:
        async with asyncio.timeout(PATIENCE):
            while "decides alone" not in await two.page(0, "/readyz"):
                await asyncio.sleep(0.05)
        assert await two.metric(0, "fairlead_replicas_connected ") == 0
        assert await two.metric(0, 'fairlead_trouble{what="replicas"} ') == 1

    async def script(note: Callable[[str], None]) -> None:
        server.kill()
        await alone()
        await asyncio.to_thread(server.start)
        await two.until_said("connected to the other replicas", 4)
        await two.agree()
        server.signal(signal.SIGSTOP)
        try:
            await alone()
        finally:
            server.signal(signal.SIGCONT)
        await two.agree()
        async with Valkey.from_url(server.url) as client:
            await client.config_set("maxmemory", "1")
            await alone()
            assert "maxmemory" in await two.page(0, "/readyz")
            await client.config_set("maxmemory", "0")
        await two.agree()

    story = await under_load(f"http://127.0.0.1:{two.serve.port}", script)
    figures.append(f"Valkey killed, stopped, full: {_summary(story)}")
    assert not story.failures


async def test_a_hung_worker_is_missed_and_keys_are_revoked_all_the_same(
    upstream: Upstream, workers: Callable[..., Awaitable[Workers]], tmp_path: Path
) -> None:
    """The first worker too, which alone writes the endpoints."""
    (kept, kept_entry), (gone, gone_entry) = new_key("a"), new_key("b")
    file = tmp_path / "keys.txt"
    file.write_text(f"{kept_entry.digest} a\n{gone_entry.digest} b\n")
    three = await workers(3, upstream.addresses, gateway={"keys": {"file": str(file)}}, replicas={"lease": "1s"})
    await three.agree()

    async def status(key: str) -> int:
        url = f"http://127.0.0.1:{three.serve.port}/v1/models"
        return (await asyncio.to_thread(get_page, Request(url, headers={"authorization": f"Bearer {key}"})))[0]

    assert [await status(kept), await status(gone)] == [200, 200]
    first = next(line for line in three.serve.said().splitlines() if '"worker 0 runs"' in line)
    pid = int(first.rpartition("pid=")[2])
    os.kill(pid, signal.SIGSTOP)
    try:
        file.write_text(f"{kept_entry.digest} a\n")
        async with asyncio.timeout(PATIENCE):
            while await status(gone) != 401:
                await asyncio.sleep(0.05)
            while "only 2 of 3 workers are heard" not in await three.page(1, "/readyz"):
                await asyncio.sleep(0.05)
            while await three.metric(2, 'fairlead_trouble{what="replicas"}') != 1:
                await asyncio.sleep(0.05)
    finally:
        os.kill(pid, signal.SIGCONT)
    await three.agree()
    assert await status(kept) == 200
    async with asyncio.timeout(PATIENCE):
        while "only 2 of 3" in await three.page(1, "/readyz"):
            await asyncio.sleep(0.1)
    own = [line for line in three.serve.said().splitlines() if "component=replicas" in line]
    assert {line.partition(" worker=")[2].partition(" ")[0] for line in own} == {"0", "1", "2"}
    assert [page["worker"] for page in await three.replicas()] == [0, 1, 2]


@pytest.mark.parametrize("count", [1, 2])
async def test_a_scheduler_that_starts_again_has_the_settings_of_the_gateway_and_the_others(
    upstream: Upstream, workers: Callable[..., Awaitable[Workers]], count: int
) -> None:
    started = await workers(count, upstream.addresses)
    started.serve.file.write_text(json.dumps({**started.serve.config, "seed": 2}))
    restart = 'fairlead_trouble{what="restart"}'

    async def all_say_so() -> None:
        async with asyncio.timeout(PATIENCE):
            while True:
                with suppress(OSError):  # it is being started
                    if [await started.metric(worker, restart) for worker in range(count)] == [1] * count:
                        return
                await asyncio.sleep(0.05)

    await all_say_so()
    os.kill(started.serve.scheduler_pids()[-1], signal.SIGKILL)
    await started.until_said(" died; the gateway goes on without it", 1)
    await started.all_asked()
    if count > 1:
        await started.agree()
    await all_say_so()


async def test_what_workers_cannot_have_together_is_said(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("endpoints: ['127.0.0.1:1']\nadmin: {port: 9004}\n")
    child = Child("fairlead serve", tmp_path / "log")
    child.spawn(sys.executable, "-m", "fairlead", "serve", str(file), "--workers", "3")
    assert await child.wait() == 2
    assert "3 workers need 3 ports from 9004 on, and 9004 is that of extProc.port" in child.said()


def _summary(story: Story) -> str:
    failed = sum(story.failures.values())
    return f"requests {len(story.records)}, failed {failed}, slowest TTFT {story.slowest_ms():.0f} ms"
