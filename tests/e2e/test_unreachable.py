"""A chosen endpoint that cannot be reached: the request is repeated once at another one, and nothing else changes.

`round-robin` without filters never learns that an endpoint is gone, so every fourth request is sent there first.
"""

import asyncio
import hashlib
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from gw_http1 import Http1
from gw_http2 import Http2
from gw_load import under_load
from gw_messages import JSON, Ask, Fields, Got
from gw_modes import Pair, bootstrap
from gw_processes import Envoy, Serve, Stub, Upstream, sees_the_scheduler, stat
from gw_site import EMBEDDED, post, site
from gw_traffic import Tally, exchanges, run
from ports import free_ports
from tcp import TcpServer

from fairlead.core import stalls
from fairlead.core.endpoint import Endpoint
from fairlead.core.events import EndpointUp, RequestArrived
from fairlead.lab.load.workload import Call
from fairlead.server.live import Live

Note = Callable[[str], None]
PATH = "/v1/chat/completions"
MODEL = "Qwen/Qwen3-32B"
BLIND = {"policy": "round-robin", "builtinFilters": False}
#: Most requests wait, and late binding decides.
QUEUED = {"flowControl": {"saturation": {"type": "concurrency-detector", "maxConcurrency": 2}}}
PAIRS = [Pair("whole", "first-chunk"), Pair("whole", "none"), Pair("whole", "headers"), Pair("buffered", "first-chunk")]
#: Larger bodies are not kept to be sent again.
REPEATABLE = 1 << 20
RATE = 60.0
STREAMS = int(os.environ.get("FAIRLEAD_SOAK_STREAMS", "200"))


class World:
    """A scheduler in this process, its gateway, and three model servers behind one that is not there."""

    def __init__(self, live: Live, envoy: Envoy) -> None:
        self.live, self.envoy = live, envoy
        self.before: Counter[str] = Counter()

    async def counts(self) -> Counter[str]:
        """Since the start of the test: repetitions as Envoy counts them and as we do, by endpoint, and ends."""
        lines = b"".join(self.live.watch.exposition()).decode().splitlines()
        found: Counter[str] = Counter()
        for line in lines:
            if line.startswith(("fairlead_repeated_total{", "fairlead_request_end_total{")):
                found[line.split('"')[1]] += int(float(line.rsplit(" ", 1)[1]))
        found["retries"] = await stat(self.envoy.admin, "cluster.dst_or_second.upstream_rq_retry")
        found["second"] = await stat(self.envoy.admin, "cluster.dst_second.upstream_rq_total")
        return found - self.before

    async def ask(self, body: bytes, *fields: tuple[str, str], path: str = PATH, chunked: bool = False) -> Got:
        pieces = [body[i : i + 50_000] for i in range(0, len(body), 50_000)] if chunked else [body]
        async with Http1(self.envoy.port) as client:
            return await client.ask(Ask(path=path, fields=[JSON, *fields], pieces=pieces, chunked=chunked))

    async def settled(self) -> None:
        pipeline = self.live.pipeline
        async with asyncio.timeout(30):
            while len(pipeline.fleet.ledger):
                pipeline.validate()
                await asyncio.sleep(0.02)
        pipeline.validate()


@asynccontextmanager
async def world(
    live: Any, envoy: Any, addresses: list[str], pair: Pair = PAIRS[0], gone: str = ""
) -> AsyncIterator[World]:
    """`gone`: one more model server, that takes part only once the others have answered."""
    listed = [
        {"name": f"e{i}", "address": "127.0.0.1", "port": int(a.rpartition(":")[2])} for i, a in enumerate(addresses)
    ]
    running, _ = await live({"endpoints": listed, **BLIND})
    (port,) = free_ports(1)
    # On a busy machine a decision may take seconds, and each request is to be decided: they are counted.
    text = bootstrap(pair, port, f"127.0.0.1:{running.config.ext_proc.port}", addresses, message_timeout=30.0)
    at = World(running, await asyncio.to_thread(envoy, text))
    await sees_the_scheduler(at.envoy.admin)
    async with Http1(port) as client, asyncio.timeout(30):
        for _ in addresses:  # Envoy connects its access log when it has something to say
            await client.ask(Ask("GET", "/v1/models"))
        while not running.host.logs.connected:
            await asyncio.sleep(0.01)
    await at.settled()
    if gone:
        running.driver.feed(EndpointUp(Endpoint("default/mute", gone)))
    at.before = await at.counts()
    yield at


def nobody() -> str:
    return f"127.0.0.1:{free_ports(1)[0]}"


def chat(tokens: int, stream: bool, content: str = "What does a fairlead do on a ship? " * 20) -> bytes:
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": tokens}
    return json.dumps(body | {"stream": stream, "ignore_eos": True}).encode()


def uploads() -> Iterator[tuple[bytes, bool]]:
    chance = Random(3)
    for size in (0, 1, 500, 32_767, 32_769, 70_000, 300_000, REPEATABLE):
        for chunked in (False, True):
            yield chance.randbytes(size), chunked


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
async def test_requests_are_repeated_byte_for_byte(
    live: Callable[..., Awaitable[Any]], envoy: Callable[..., Envoy], upstream: Upstream, pair: Pair
) -> None:
    gone = nobody()
    async with world(live, envoy, [gone, *upstream.addresses[:3]], pair) as at:
        asked = 0
        for body, chunked in uploads():
            for _ in range(4):  # so that each is chosen once
                got = await at.ask(body, ("x-bench-mode", "echo"), path="/upload", chunked=chunked)
                told = {"bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}
                assert (got.status, json.loads(got.body)) == (200, told), got
                asked += 1
        for seed in range(16):
            fields: Fields = [("x-bench-mode", "verify"), ("x-bench-seed", str(seed)), ("x-bench-max-bytes", "20000")]
            got = await at.ask(chat(5, stream=True), *fields)
            assert got.status == 200 and got.sha256 == got.field("x-bench-sha256")
            asked += 1
        await at.settled()
        once = asked // 4
        assert await at.counts() == {"retries": once, "second": once, "default/e0": once, "natural": asked}


class Mute:
    """A model server that reads requests and never answers a byte: `dies` hangs up after the request, `begins` after
    the head of an answer, `hangs` keeps the connection."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.address = ""
        self.heads: list[str] = []

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["Mute"]:
        async with TcpServer(self._serve, limit=1 << 22) as server:
            self.address = server.address
            yield self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        if "get /metrics" in head:
            writer.write(b"HTTP/1.1 404 No\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            writer.close()
            return
        self.heads.append(head)
        await reader.readexactly(int(head.partition("content-length: ")[2].partition("\r\n")[0]))
        if self.how == "begins":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            await writer.drain()
            await asyncio.sleep(0.05)
        if self.how == "hangs":
            await asyncio.Event().wait()
        writer.transport.abort()


@pytest.mark.parametrize("how", ["dies", "begins", "hangs"])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
async def test_what_got_no_byte_is_answered_elsewhere_byte_for_byte(
    live: Callable[..., Awaitable[Any]],
    envoy: Callable[..., Envoy],
    upstream: Upstream,
    monkeypatch: pytest.MonkeyPatch,
    pair: Pair,
    how: str,
) -> None:
    monkeypatch.setattr(stalls, "OVERDUE_S", 0.3)
    monkeypatch.setattr(stalls, "OVERDUE_WHOLE_S", 0.3)
    monkeypatch.setattr(stalls, "OVERDUE", 1e-5)
    steering = [("x-envoy-retry-on", "5xx"), ("x-envoy-upstream-rq-per-try-timeout-ms", "1")]
    async with Mute(how).listening() as mute, world(live, envoy, [*upstream.addresses[:3]], pair, mute.address) as at:
        asked = 0
        for size in (10, 32_769, 300_000):
            for stream in (False, True):
                for _ in range(4):
                    body = chat(5, stream, "x" * size)
                    got = await at.ask(body, ("x-bench-mode", "echo"), *steering)
                    told = {"bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}
                    assert (got.status, json.loads(got.body)) == (200, told), got
                    asked += 1
        await at.settled()
        counts = await at.counts()
        assert counts["default/mute"] == counts["retries"] == asked // 4, (
            "only what went there, whatever clients ask for"
        )
        assert len(mute.heads) == asked // 4
        for name, _ in steering:
            assert not any(name in head for head in mute.heads), "what is for the gateway stays there"


class Answering:
    """A model server whose answers to all requests are alike: with `status`, `after` seconds."""

    def __init__(self, status: int, after: float) -> None:
        self.status, self.after = status, after
        self.asked = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower():
            await reader.readexactly(int(head.partition("content-length: ")[2].partition("\r\n")[0] or 0))
            known = head.startswith("post")
            if known:
                self.asked += 1
                await asyncio.sleep(self.after)
            body = b"%d" % (self.status if known else 404)
            writer.write(b"HTTP/1.1 %b X\r\ncontent-length: %d\r\n\r\n%b" % (body, len(body), body))


@pytest.mark.parametrize("status", [429, 503])
async def test_a_refusal_does_not_win_over_an_answer_that_is_still_to_come(
    live: Callable[..., Awaitable[Any]],
    envoy: Callable[..., Envoy],
    monkeypatch: pytest.MonkeyPatch,
    status: int,
) -> None:
    """The refusal comes when both have the request, whoever got it first."""
    monkeypatch.setattr(stalls, "OVERDUE_S", 0.3)
    monkeypatch.setattr(stalls, "OVERDUE_WHOLE_S", 0.3)
    monkeypatch.setattr(stalls, "OVERDUE", 1e-5)
    servers = [Answering(200, 1.5), Answering(status, 0.6)]
    async with (
        TcpServer(servers[0].serve) as one,
        TcpServer(servers[1].serve) as other,
        world(live, envoy, [one.address, other.address]) as at,
    ):
        for stream in (True, True, False, False):
            got = await at.ask(chat(5, stream))
            assert (got.status, got.body) == (200, b"200")
            assert not any("fairlead" in name for name, _ in got.fields)
        assert servers[0].asked + servers[1].asked > 6, "most requests went to both"
        assert at.envoy.code is None


async def _invalid_or_slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A model server that answers with a header that HTTP/2 forbids if asked to, and otherwise takes 0.8 s."""
    while head := (await reader.readuntil(b"\r\n\r\n")).lower():
        body = await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0))
        invalid = b"te: gzip\r\n" * (b"invalid" in body)
        writer.write(b"HTTP/1.1 200 OK\r\n%bcontent-length: 4\r\n\r\ns" % invalid)
        if body and not invalid:
            await asyncio.sleep(0.8)
        writer.write(b"low")


async def test_an_unknown_interim_answer_is_left_out(
    live: Callable[..., Awaitable[Any]], envoy: Callable[..., Envoy]
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := (await reader.readuntil(b"\r\n\r\n")).lower():
            await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0))
            writer.write(b"HTTP/1.1 199 Soon\r\n\r\n")
            await asyncio.sleep(0.1)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nlate")

    async with (
        TcpServer(serve) as one,
        TcpServer(serve) as other,
        world(live, envoy, [one.address, other.address]) as at,
    ):
        for stream in (True, False):
            got = await at.ask(chat(5, stream))
            assert (got.status, got.body) == (200, b"late")
        assert at.envoy.code is None


async def test_an_invalid_answer_to_an_upload_cuts_no_other(
    live: Callable[..., Awaitable[Any]], envoy: Callable[..., Envoy]
) -> None:
    async with TcpServer(_invalid_or_slow, limit=1 << 22) as one, world(live, envoy, [one.address]) as at:
        asked = [asyncio.create_task(at.ask(chat(5, False, "x" * 300_000))) for _ in range(4)]
        await asyncio.sleep(0.4)
        refused = await at.ask(chat(5, False, "invalid" + "x" * 300_000))
        assert refused.status == 502
        assert [got.body for got in await asyncio.gather(*asked)] == [b"slow"] * 4


async def test_a_websocket_with_a_large_body_cuts_no_other(
    live: Callable[..., Awaitable[Any]], envoy: Callable[..., Envoy]
) -> None:
    async with TcpServer(_invalid_or_slow, limit=1 << 22) as one, world(live, envoy, [one.address]) as at:
        body = chat(5, False, "x" * 300_000)
        asked = [asyncio.create_task(at.ask(body)) for _ in range(4)]
        await asyncio.sleep(0.4)
        _, writer = await asyncio.open_connection("127.0.0.1", at.envoy.port)
        head = f"POST {PATH} HTTP/1.1\r\nhost: a\r\nconnection: Upgrade\r\nupgrade: WebSocket\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        assert [got.body for got in await asyncio.gather(*asked)] == [b"slow"] * 4
        assert await stat(at.envoy.admin, "cluster.uploads.upstream_rq_total") == 4
        writer.close()


async def test_what_nobody_knows_is_not_begun_twice(
    live: Callable[..., Awaitable[Any]], envoy: Callable[..., Envoy], upstream: Upstream
) -> None:
    async with Mute("dies").listening() as mute, world(live, envoy, [*upstream.addresses[:3]], gone=mute.address) as at:
        statuses = [(await at.ask(b"{}", ("x-bench-mode", "echo"), path="/v1/load")).status for _ in range(8)]
        await at.settled()
        assert sorted(statuses) == [200] * 6 + [503] * 2
        assert (await at.counts())["retries"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
async def test_streams_of_all_kinds_are_repeated(
    live: Callable[..., Awaitable[Any]],
    envoy: Callable[..., Envoy],
    upstream: Upstream,
    tallies: list[Tally],
    pair: Pair,
) -> None:
    async with world(live, envoy, [nobody(), *upstream.addresses[:3]], pair) as at:
        tally = Tally(f"{pair.name}, 1 of 4 gone")
        tallies.append(tally)
        await run(tally, at.envoy.port, exchanges(seed=STREAMS, count=STREAMS, largest=REPEATABLE))
        await at.settled()
        assert tally.differences[:5] == [] and tally.streams == STREAMS
        assert (await at.counts())["retries"] == STREAMS // 4


@pytest.mark.parametrize("pair", [PAIRS[0], PAIRS[3]], ids=lambda pair: pair.name)
async def test_a_body_that_is_too_large_to_be_kept_fails_as_before(
    live: Callable[..., Awaitable[Any]], envoy: Callable[..., Envoy], upstream: Upstream, pair: Pair
) -> None:
    body = b"x" * (3 * REPEATABLE)
    async with world(live, envoy, [nobody(), *upstream.addresses[:3]], pair) as at:
        statuses = [(await at.ask(body, ("x-bench-mode", "echo"), path="/upload")).status for _ in range(8)]
        await at.settled()
        assert sorted(statuses) == [200] * 6 + [503] * 2
        assert await at.counts() == {"natural": 8}


async def test_the_lease_is_where_the_request_runs(
    live: Callable[..., Awaitable[Any]], envoy: Callable[..., Envoy], upstream: Upstream
) -> None:
    gone = nobody()
    async with world(live, envoy, [gone, *upstream.addresses[:3]]) as at:
        fleet = at.live.pipeline.fleet
        slot = fleet.table.slot("default/e0")
        before = fleet.table.errors[slot]
        settings = [("x-bench-mode", "sse"), ("x-bench-chunks", "40"), ("x-bench-interval-ms", "50")]
        clients = [Http1(at.envoy.port) for _ in range(8)]
        readers = [await c.begin(Ask(fields=[JSON, *settings], pieces=[chat(5, stream=True)])) for c in clients]
        for reader in readers:
            await reader.readuntil(b"data: ")
        async with asyncio.timeout(20):
            while fleet.table.inflight[slot]:
                await asyncio.sleep(0.01)
        at.live.pipeline.validate()
        assert len(fleet.ledger) == 8, "all of them run"
        assert fleet.table.errors[slot] == before + 2, "each attempt in vain is a failed response of that endpoint"
        assert sum(bool(lease.unreached) for lease in fleet.ledger) == 2
        for client in clients:
            client.abort()
        await at.settled()


async def test_when_nobody_can_be_reached_the_client_is_told_so_at_once(
    live: Callable[..., Awaitable[Any]], envoy: Callable[..., Envoy]
) -> None:
    addresses = [f"127.0.0.1:{port}" for port in free_ports(4)]
    async with world(live, envoy, addresses) as at:
        answers = await asyncio.gather(*(at.ask(chat(5, stream=bool(i % 2))) for i in range(40)))
        await at.settled()
        assert {(got.status, got.field("content-type")) for got in answers} == {(503, "application/json")}
        assert {json.loads(got.body)["error"]["code"] for got in answers} == {503}
        counts = await at.counts()
        assert counts["retries"] == 40 == counts["natural"], "once each"
        assert [counts[f"default/e{i}"] for i in range(4)] == [10] * 4


@pytest.mark.parametrize("host", ["::1", "127.0.0.1"])
async def test_over_http2_and_to_any_kind_of_address(tmp_path: Path, host: str) -> None:
    async with (
        site(EMBEDDED, tmp_path, hosts=(host, host), builtinFilters=False) as at,
        Http2(at.gateway.port) as client,
    ):
        await at.mirrors[0].vanish()
        for number in range(8):
            body = bytes(40_000 * number)
            got = await client.ask(post(body, path="/upload"))
            told = json.loads(got.body)
            assert (got.status, told["at"], told["bytes"]) == (200, at.mirrors[1].address, len(body))
        assert await at.stat("cluster.dst_or_second.upstream_rq_retry") == 4


@pytest.mark.parametrize("pair", [PAIRS[0], PAIRS[3]], ids=lambda pair: pair.name)
async def test_a_request_with_trailers_is_sent_once(tmp_path: Path, pair: Pair) -> None:
    """Envoy would double the body of what it may have to send again."""
    trailers = [("x-checksum", "1")]
    async with site(pair, tmp_path, builtinFilters=False) as at, Http2(at.gateway.port) as client:
        for mirror in at.mirrors:
            mirror.told.clear()
        for size in (10, 150_000) * 4:
            got = await client.ask(post(bytes(size), path="/upload", trailers=trailers))
            assert (got.status, json.loads(got.body)["bytes"]) == (200, size)
        assert sorted(told["bytes"] for mirror in at.mirrors for told in mirror.told) == [10] * 4 + [150_000] * 4
        await at.mirrors[0].vanish()
        statuses = [
            (await client.ask(post(bytes(150_000), path="/upload", trailers=trailers))).status for _ in range(4)
        ]
        assert sorted(statuses) == [200, 200, 503, 503], "as before"


@pytest.mark.parametrize("size", [10, 70_000, 150_000, 1_000_000])
async def test_what_nobody_scheduled_is_sent_once_too(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler hangs, and the request ends by trailers: the fallback route may repeat it, but not its bytes."""
    async with site(EMBEDDED, tmp_path, message_timeout=0.2) as at, Http2(at.gateway.port) as client:
        host = at.live.host
        feed = host.feed
        monkeypatch.setattr(host, "feed", lambda event: isinstance(event, RequestArrived) or feed(event))
        for mirror in at.mirrors:
            mirror.told.clear()
        for trailers in ([("x-checksum", "1")], []):
            got = await client.ask(post(bytes(size), path="/upload", trailers=trailers))
            assert (got.status, json.loads(got.body)["bytes"]) == (200, size)
        assert [told["bytes"] for mirror in at.mirrors for told in mirror.told] == [size] * 2
        assert await at.stat("cluster.all_endpoints.upstream_rq_total") == 2


class Chats:
    """Streams and plain answers in turn."""

    def calls(self) -> Iterator[Call]:
        bodies = chat(60, stream=True), chat(20, stream=False)
        number = 0
        while True:
            yield Call(body=bodies[number % 2], group=number % 2)
            number += 1


@pytest.mark.slow
@pytest.mark.parametrize("rules", [{}, BLIND, BLIND | QUEUED], ids=["default", "blind", "queued"])
async def test_a_killed_model_server_costs_only_what_ran_there(
    serve: Callable[..., Serve],
    ending: Callable[[Stub], Stub],
    tmp_path: Path,
    figures: list[str],
    rules: dict[str, Any],
) -> None:
    stubs = [ending(Stub(tmp_path / f"stub{i}.log")) for i in range(4)]
    await asyncio.gather(*(asyncio.to_thread(stub.start, 1, "--time-ratio", "5") for stub in stubs))
    started = await asyncio.to_thread(serve, {"endpoints": [stub.addresses[0] for stub in stubs], "seed": 1, **rules})
    await sees_the_scheduler(started.gateway)
    running = 0

    async def script(note: Note) -> None:
        nonlocal running
        held = {e["address"]: int(e["leases"]) for e in await started.endpoints()}
        busiest = max(stubs, key=lambda stub: held[stub.addresses[0]])
        running = held[busiest.addresses[0]]
        note("the kill")
        os.kill(busiest.pid, signal.SIGKILL)
        await busiest.wait()  # now its sockets are closed: until then the kernel takes connections for it
        note("the end")
        await asyncio.sleep(2.0)  # 120 requests

    story = await under_load(f"http://127.0.0.1:{started.port}", script, RATE, workload=Chats())  # type: ignore[arg-type]
    failed = [record for record in story.records if record.error]
    late = [record.error for record in failed if record.sent > story.moments["the end"]]
    repeated = await started.metric("fairlead_repeated_total")
    took = story.moments["the end"] - story.moments["the kill"]
    figures.append(
        f"kill -9 of a model server ({rules}): requests {len(story.records)}, at it "
        f"{running}, failed {len(failed)}, repeated {repeated:.0f}, dead after {took * 1e3:.0f} ms"
    )
    # A head goes on only with the first byte behind it. That byte may still be with the scheduler when the server dies.
    assert [record.error for record in failed if not record.headers] == [], "what had no byte is repeated elsewhere"
    assert late == [], "and so is what was sent later"
    assert len(failed) <= running + 2 * RATE * took + 5, "only what it had"
    assert repeated >= (20 if "policy" in rules else 1)
    assert await started.settled(60.0) == {}
    assert await started.metric("fairlead_request_end_total") == len(story.records)


@pytest.mark.slow
@pytest.mark.parametrize("hang", ["engine", "server"])
async def test_a_model_server_that_hangs_costs_no_request_and_is_soon_spared(
    serve: Callable[..., Serve], ending: Callable[[Stub], Stub], tmp_path: Path, figures: list[str], hang: str
) -> None:
    """Its engine makes no step while its page answers, or the whole server is stopped."""
    stubs = [ending(Stub(tmp_path / f"stub{i}.log")) for i in range(3)]
    await asyncio.gather(*(asyncio.to_thread(stub.start, 1, "--time-ratio", "5") for stub in stubs))
    started = await asyncio.to_thread(serve, {"endpoints": [stub.addresses[0] for stub in stubs], "seed": 1})
    await sees_the_scheduler(started.gateway)
    hung = stubs[0]
    asked: list[float] = []

    async def sent_there() -> float:
        return await started.metric("llm_d_epp_scheduler_attempts_total", port=str(hung.ports[0]), status="success")

    async def level() -> str:
        return next(e["suspicion"] for e in await started.endpoints() if e["address"] == hung.addresses[0])

    async def script(note: Note) -> None:
        nonlocal hung
        await asyncio.sleep(2.0)
        while not (held := {e["address"]: int(e["leases"]) for e in await started.endpoints()}) or not max(
            held.values()
        ):
            await asyncio.sleep(0.01)
        hung = max(stubs, key=lambda stub: held[stub.addresses[0]])
        note("the hang")
        if hang == "server":
            os.kill(hung.pid, signal.SIGSTOP)
        else:
            await hung.fault(0, stall=True)
        await asyncio.sleep(2.0)
        asked.append(await sent_there())
        await asyncio.sleep(3.0)  # 40 requests would go there
        asked.append(await sent_there())
        async with asyncio.timeout(30):
            while await level() != "out":
                await asyncio.sleep(0.1)
        assert await started.metric("fairlead_endpoint_suspicion") == 2.0
        if hang == "server":
            os.kill(hung.pid, signal.SIGCONT)
        else:
            await hung.fault(0, stall=False)
        note("it goes on")
        while await level() != "well":
            await asyncio.sleep(0.1)
        note("it is well")
        while await sent_there() <= asked[-1]:
            await asyncio.sleep(0.1)

    story = await under_load(f"http://127.0.0.1:{started.port}", script, 40.0, workload=Chats())  # type: ignore[arg-type]
    failed = [record.error for record in story.records if record.error]
    there = [record for record in story.records if record.ttft() > 2.0]
    repeated = await started.metric("fairlead_repeated_total")
    figures.append(
        f"a hung {hang}: requests {len(story.records)}, failed {len(failed)}, sent there from 2 s on "
        f"{asked[1] - asked[0]:.0f}, first byte after more than 2 s {len(there)}, answered elsewhere {repeated:.0f}, "
        f"slowest TTFT {story.slowest_ms():.0f} ms"
    )
    assert failed == []
    assert asked[1] - asked[0] <= 3, "who hangs is spared"
    assert repeated >= 1, "what was overdue there was answered elsewhere"
    assert "an endpoint seems to hang: out" in started.said()
    assert "an endpoint makes progress again" in started.said()
    assert await started.settled(60.0) == {}
