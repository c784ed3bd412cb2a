"""The embedded gateway with a real Envoy: routing, fail-open, endpoints that change, crashes."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Mapping
from ipaddress import ip_address
from pathlib import Path

import aiohttp
import pytest
from embedded_gateway import Gateway
from msgspec import structs
from ports import free_port
from tcp import TcpServer

from fairlead.core.errors import ConfigError
from fairlead.gateway import ext_proc
from fairlead.gateway.access_log import AccessLogEntry, read_entries, read_uploads
from fairlead.gateway.envoy.config import AT_ENTRY
from fairlead.gateway.envoy.gateway import prepare, remove_leftovers
from fairlead.gateway.envoy.options import Options
from fairlead.gateway.envoy.process import CONFIG, UNWATCHED, GatewayProcess
from fairlead.gateway.envoy.routes import TOWARD_UPSTREAM
from fairlead.gateway.ext_proc import CONTINUE, DESTINATION, LEASE_KEY, BodyMode, Incoming, Kind
from fairlead.gateway.h2_server import H2Server
from fairlead.gateway.health import EXT_PROC, HealthService
from fairlead.gateway.stream import HandlerFactory, ServerStream
from fairlead.server.live.scheduler import watch_gateway
from fairlead.server.observe.exposition import Registry
from fairlead.server.observe.troubles import Troubles

pytestmark = pytest.mark.envoy

PREFILLER = "x-prefiller-host-port"


class Upstream:
    """A model server: answers with what it got. `/stream` sends `n` chunks, an upgrade is echoed."""

    async def __aenter__(self) -> "Upstream":
        self.server = await TcpServer(self.serve).start()
        self.address = self.server.address
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await self.answer(reader, writer)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines if line)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if "upgrade" in headers:
            writer.write(b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
            while data := await reader.read(1000):
                writer.write(data.upper())
        elif "/stream" in first:
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            for i in range(10):
                writer.write(b"7\r\nchunk %d\r\n" % i)
                await asyncio.sleep(0.05)
            writer.write(b"0\r\n\r\n")
        else:
            told = json.dumps({"at": self.address, "headers": headers, "size": len(body)}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nserver: model\r\ncontent-length: %d\r\n\r\n" % len(told) + told)
        await writer.drain()


class Picker:
    """A scheduler that sends everything to `destination`. What it does is in `mode`."""

    def __init__(self) -> None:
        self.destination = ""
        self.mode = "pick"
        #: (kind, body size) of every message, and the attributes of the last response message.
        self.messages: list[tuple[Kind, int]] = []
        self.attributes: Mapping[str, object] = {}
        self.metadata: Mapping[str, str] = {}
        self.seen: Mapping[str, str] = {}
        self.entries: list[AccessLogEntry] = []
        self.uploads: list[tuple[str, int, str]] = []
        health = HealthService()
        health.set_ready(True)
        log = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"
        routes: dict[str, HandlerFactory] = {f"/{EXT_PROC}/Process": self.session, log: self.log}
        self.server = H2Server(routes | dict(health.routes()))

    async def __aenter__(self) -> "Picker":
        self.address = f"127.0.0.1:{await self.server.listen('127.0.0.1', 0)}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.close()

    def session(self, stream: ServerStream, metadata: Mapping[str, str]) -> "_Session":
        self.metadata = metadata
        return _Session(self, stream)

    def log(self, stream: ServerStream, metadata: Mapping[str, str]) -> "_Log":
        return _Log(self)


class _Session:
    def __init__(self, picker: Picker, stream: ServerStream) -> None:
        self.picker, self.stream, self.buffered = picker, stream, False

    def on_message(self, data: bytes) -> None:
        picker, message = self.picker, Incoming(data)
        kind, size = message.kind, 0
        modes = message.modes()
        self.buffered = modes[0] is BodyMode.BUFFERED if modes else self.buffered
        if kind is Kind.REQUEST_HEADERS:
            picker.seen, eos = message.headers()
            if eos or (modes and modes[0] is BodyMode.NONE):
                self.pick(Kind.REQUEST_HEADERS)
            elif self.buffered:
                self.stream.send(CONTINUE[kind])
        elif kind is Kind.REQUEST_BODY:
            size = len(message.body()[0])
            if self.buffered:
                self.pick(kind)
            else:
                self.pick(Kind.REQUEST_HEADERS, CONTINUE[kind])
        else:
            picker.attributes = message.attributes() or picker.attributes
            self.stream.send(CONTINUE[kind])
        picker.messages.append((kind, size))

    def pick(self, kind: Kind, *rest: bytes) -> None:
        picker = self.picker
        if picker.mode == "refuse":
            self.stream.send(ext_proc.immediate(429, {"content-type": "application/json"}, b'{"a":1}', "fairlead.full"))
        elif picker.mode == "pick":
            to = picker.destination.encode()
            mutation = ext_proc.set_header(DESTINATION, to) + ext_proc.set_header(PREFILLER, b"10.9.9.9:1")
            metadata = ext_proc.lb_metadata({DESTINATION: to, LEASE_KEY: b"lease-7"})
            self.stream.send(ext_proc.answer(kind, mutation, metadata, reroute=True), *rest)
        elif picker.mode == "leave":
            self.stream.finish()

    def on_half_close(self) -> None: ...

    def on_lost(self, why: str) -> None: ...


class _Log:
    def __init__(self, picker: Picker) -> None:
        self.picker = picker

    def on_message(self, data: bytes) -> None:
        uploads = read_uploads(data)
        self.picker.uploads += uploads
        if not uploads:
            self.picker.entries += read_entries(data)

    def on_half_close(self) -> None: ...

    def on_lost(self, why: str) -> None: ...


class Answer:
    def __init__(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.status, self.body, self.headers = status, body, headers

    def json(self) -> dict[str, object]:
        return dict(json.loads(self.body))


class World:
    """Two model servers, a scheduler, a gateway, a client."""

    def __init__(
        self, picker: Picker, upstreams: list[Upstream], gateway: Gateway, http: aiohttp.ClientSession
    ) -> None:
        self.picker, self.upstreams, self.gateway, self.http = picker, upstreams, gateway, http

    async def post(self, path: str = "/", headers: Mapping[str, str] | None = None, body: object = b"hello") -> Answer:
        url = f"http://{self.gateway.address}{path}"
        async with self.http.post(url, headers=headers, data=body) as response:
            return Answer(response.status, await response.read(), response.headers)

    async def served_by(self, requests: int = 6) -> set[str]:
        return {str((await self.post()).json()["at"]) for _ in range(requests)}

    async def until(self, what: set[str]) -> None:
        async with asyncio.timeout(10):
            while await self.served_by() != what:
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def world(directory: Path | None = None, **options: object) -> AsyncIterator[World]:
    async with contextlib.AsyncExitStack() as stack:
        picker = await stack.enter_async_context(Picker())
        upstreams = [await stack.enter_async_context(Upstream()) for _ in range(2)]
        picker.destination = upstreams[1].address
        options = {"paths": ("/*",), **options}
        chosen = Options(port=0, ext_proc=picker.address, als=picker.address, **options)  # type: ignore[arg-type]
        gateway = Gateway(chosen, [upstream.address for upstream in upstreams], directory=directory)
        await gateway.start()
        stack.push_async_callback(gateway.stop, 0.5)
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)))
        yield World(picker, upstreams, gateway, http)


SPOOFED = dict.fromkeys([*AT_ENTRY, *TOWARD_UPSTREAM], "10.6.6.6:1") | {"x-envoy-upstream-rq-timeout-ms": "1"}


async def test_the_scheduler_decides_and_clients_do_not() -> None:
    async with world() as w:
        told = [(await w.post(headers=SPOOFED)).json() for _ in range(4)]
        assert {t["at"] for t in told} == {w.picker.destination}
        for got in (t["headers"] for t in told):
            assert isinstance(got, dict)
            assert got.pop(PREFILLER) == "10.9.9.9:1"  # the scheduler's own survives
            assert not got.keys() & SPOOFED.keys()
            assert "10.6.6.6:1" not in got.values()
        assert not w.picker.seen.keys() & set(AT_ENTRY)
        assert w.picker.seen["x-llm-d-slo-ttft-ms"] == "10.6.6.6:1"  # what it is meant to read, it reads


async def test_headers_and_the_whole_body_are_one_exchange() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(50):
            yield b"x" * 10_000

    async with world() as w:
        answer = await w.post(body=pieces())
        assert answer.json()["size"] == 500_000
        kinds = [message for message in w.picker.messages if message[0] is not Kind.RESPONSE_BODY]
        assert kinds == [(Kind.REQUEST_HEADERS, 0), (Kind.REQUEST_BODY, 500_000)]
        assert w.picker.metadata["fairlead-whole-body"] == w.picker.metadata["fairlead-access-log"] == "1"
        assert w.picker.attributes["response.code"] == 200
        assert answer.headers["server"] == "model"


RESPONSES = {
    "first-chunk": {Kind.RESPONSE_BODY},
    "headers": {Kind.RESPONSE_HEADERS},
    "none": set(),
    "full": {Kind.RESPONSE_HEADERS, Kind.RESPONSE_BODY},
}


@pytest.mark.parametrize("response_mode", RESPONSES)
@pytest.mark.parametrize("request_mode", ["whole", "buffered"])
async def test_every_mode_serves_and_shows_what_it_says(request_mode: str, response_mode: str) -> None:
    async with world(request_mode=request_mode, response_mode=response_mode) as w:
        answer = await w.post()
        assert (answer.json()["at"], answer.json()["size"]) == (w.picker.destination, 5)
        assert (await w.post("/stream")).body.endswith(b"chunk 9")
        kinds = {kind for kind, _ in w.picker.messages}
        assert kinds == {Kind.REQUEST_HEADERS, Kind.REQUEST_BODY} | RESPONSES[response_mode]
        assert ("fairlead-whole-body" in w.picker.metadata) == (request_mode == "whole")


async def test_the_access_log_returns_leases_and_tells_of_unscheduled_requests() -> None:
    async with world(message_timeout=0.1) as w:
        await w.post("/stream")
        w.picker.mode = "hang"
        served = (await w.post()).json()["at"]
        async with asyncio.timeout(10):
            while len(w.picker.entries) < 2:
                await asyncio.sleep(0.02)
        chosen, unasked = w.picker.entries
        assert (chosen.lease, chosen.status, chosen.upstream) == ("lease-7", 200, w.picker.destination)
        assert 0 < chosen.ttft_ms < chosen.duration_ms
        assert (unasked.lease, unasked.status, unasked.upstream) == ("", 200, served)


async def test_without_the_scheduler_the_pool_is_served_and_followed() -> None:
    async with world() as w:
        await w.picker.server.close()
        one, two = (upstream.address for upstream in w.upstreams)
        assert await w.served_by() == {one, two}
        told = (await w.post(headers=SPOOFED)).json()
        assert isinstance(told["headers"], dict) and not told["headers"].keys() & SPOOFED.keys()
        w.gateway.set_endpoints([two])
        await w.until({two})
        w.gateway.set_endpoints([two, "127.0.0.1:1"])  # nothing listens there: connects fail, and are repeated
        assert await w.served_by(20) == {two}
        w.gateway.set_endpoints([one])
        await w.until({one})
        w.gateway.set_endpoints([])
        async with asyncio.timeout(10):
            while (answer := await w.post()).status == 200:
                await asyncio.sleep(0.02)
        assert answer.status == 503 and answer.json()["error"]["type"] == "Service Unavailable"  # type: ignore[index]
        assert answer.headers["retry-after"] == "1"
        for path in ("/v1/messages?beta=true", "/anthropic/v1/messages", "/a/b/v1/messages/count_tokens"):
            other = await w.post(path)
            assert (other.status, other.headers["retry-after"]) == (503, "1")
            assert other.json() == {
                "type": "error",
                "error": {"type": "overloaded_error", "message": "no healthy upstream"},
            }
        for path in ("/v1/messagesx", "/?to=/v1/messages"):
            assert "type" not in (await w.post(path)).json()


async def test_a_hung_scheduler_costs_its_timeout_and_no_request() -> None:
    async with world(message_timeout=0.1) as w:
        w.picker.mode = "hang"
        answers = await asyncio.gather(*(w.post() for _ in range(20)))
        assert {answer.status for answer in answers} == {200}
        assert {answer.json()["at"] for answer in answers} == {upstream.address for upstream in w.upstreams}


async def test_a_hung_scheduler_holds_a_limited_number_of_requests() -> None:
    async with world(max_streams=4) as w:
        w.picker.mode = "hang"
        answers = await asyncio.gather(*(w.post() for _ in range(20)))
        assert {answer.status for answer in answers} == {200}
        assert w.picker.messages.count((Kind.REQUEST_BODY, 5)) < 20


async def test_a_burst_of_changes_ends_with_the_last() -> None:
    async with world() as w:
        await w.picker.server.close()
        one, two = (upstream.address for upstream in w.upstreams)
        for i in range(100):
            w.gateway.set_endpoints([one, f"10.0.0.{i}:1"])
        w.gateway.set_endpoints([two])
        with pytest.raises(ConfigError):
            w.gateway.set_endpoints([one, "vllm-0:8000"])
        await w.until({two})


async def test_pages_of_allowed_origins_read_refusals_too() -> None:
    page = {"origin": "http://a.example"}
    async with world(allowed_origins=("http://a.example",)) as w:
        for mode, status in (("refuse", 429), ("pick", 200)):
            w.picker.mode = mode
            answer = await w.post(headers=page)
            assert (answer.status, answer.headers.get("access-control-allow-origin")) == (status, page["origin"])
        assert answer.headers["vary"] == "origin"
    async with world(allowed_origins=("*",), fail_open=False) as w:
        await w.picker.server.close()
        answer = await w.post(headers=page)
        assert (answer.status, answer.headers.get("access-control-allow-origin")) == (503, page["origin"])


async def test_fail_closed_refuses_what_nobody_scheduled() -> None:
    async with world(fail_open=False) as w:
        assert (await w.post()).status == 200
        w.picker.mode = "leave"
        assert (await w.post()).status == 503
        w.picker.mode = "hang"
        answer = await w.post()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["message"].startswith("the gateway's scheduler does not answer")  # type: ignore[index]
        await w.picker.server.close()
        answer = await w.post()
        assert answer.status == 503 and "error" in answer.json()


async def test_errors_have_one_form_and_refusals_pass_as_they_are() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"x" * 900
        yield b"x" * 900

    async with world(body_limit=1000) as w:
        answer = await w.post(body=b"x" * 1001)
        assert answer.status == 413 and answer.headers["content-type"] == "application/json"
        assert answer.json()["error"]["type"] == "RequestTooLargeError"  # type: ignore[index]
        w.picker.mode = "refuse"
        refused = await w.post()
        assert (refused.status, refused.body) == (429, b'{"a":1}')
        answer = await w.post(body=pieces())
        assert answer.status == 413, "whatever the scheduler says of the part that it saw"
        assert answer.json()["error"]["message"] == "the request body is larger than 1000 bytes"  # type: ignore[index]


async def raw(world_: World, request: bytes, *more: bytes) -> bytes:
    """Send `request`, then each of `more` after some answer; returns the last answer."""
    host, _, port = world_.gateway.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(10):
        for data in (request, *more):
            writer.write(data)
            answer = await reader.read(4096)
    writer.close()
    return answer


#: Requests that Envoy cannot parse, and its answer's status.
UNPARSEABLE = {
    b"FOO / HTTP/1.1\r\nhost: a\r\n\r\n": 400,
    b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n": 400,
    b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: x\r\n\r\n": 501,
    b"GET / HTTP/1.1\r\nhost: a\r\nx: %b\r\n\r\n" % (b"y" * 70_000): 431,
}


@pytest.mark.parametrize("mode", ["whole", "buffered"])
async def test_the_scheduler_is_not_asked_about_envoys_answer_to_what_cannot_be_parsed(mode: str) -> None:
    """It was, and its answer came after the end of the connection: the client got no body."""
    async with world(request_mode=mode) as w:
        for request, status in UNPARSEABLE.items():
            answer = await raw(w, request)
            assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert w.picker.messages == []
        for body in (b"", b"x", bytes(600_000)):
            assert (await w.post(body=body)).json()["at"] == w.picker.destination


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_request_has_many_headers_or_hears_that_these_are_too_many(path: str) -> None:
    """At the limit, the gateway's own headers were too many: 503 without a word, and the client asked again."""
    async with world() as w:
        for count in (90, 180, *range(186, 202, 3)):
            headers = {f"x-h{number}": "v" for number in range(count)}
            for size in (0, 5, 600_000) if count < 190 else (0, 5):
                answer = await w.post(path, headers=headers, body=bytes(size))
                if count < 185:
                    assert (answer.status, answer.json()["at"]) == (200, w.picker.destination)
                assert answer.status in (200, 431)
                if answer.status == 431:
                    assert "header" in answer.json()["error"]["message"].lower()  # type: ignore[index]


@pytest.mark.parametrize(("share", "reason"), [(1.0, "memory"), (0.25, "address")])
async def test_the_log_tells_whose_uploads_were_ended(share: float, reason: str) -> None:
    """Beside small uploads that pause, large ones go on. One that pauses too, as on a busy machine, is replaced."""
    small, large = (1_000, 800_000, 1_000, 800_000), 10 << 20
    async with (
        world(receive_idle=2.0, max_heap=128 << 20, upload_share=share) as w,
        contextlib.AsyncExitStack() as stack,
    ):
        host, _, port = w.gateway.address.rpartition(":")
        told = w.picker.uploads

        async def upload(size: int) -> asyncio.StreamWriter:
            _, writer = await asyncio.open_connection(host, int(port))
            stack.callback(writer.close)
            writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % (size + 9_000) + bytes(size))
            return writer

        for size in small:
            await upload(size)
        going = [await upload(large) for _ in range(12)]
        async with asyncio.timeout(60):
            while not any(why == reason for _, _, why in told):
                ended = sum(size > max(small) + 9_000 for _, size, _ in told)
                going += [await upload(large) for _ in range(12 + ended - len(going))]
                for writer in going:
                    writer.write(b"x")
                await asyncio.sleep(0.02)
            while len(told) < len(small) + len(going):
                await asyncio.sleep(0.02)
        # The second listener hears of loopback clients by the address of this machine.
        assert ("127.0.0.1", 1_000, "paused") in told and all(ip_address(client) for client, _, _ in told)
        assert min(size for _, size, why in told if why == reason) > 256 << 10
        await w.post(body=bytes(1 << 20))
        within = [entry for entry in w.picker.entries if entry.upstream.startswith("envoy://")]
        assert not any(entry.lease for entry in within)


async def test_websockets_pass_and_tunnels_do_not() -> None:
    upgrade = b"GET /ws HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    async with world() as w:
        assert await raw(w, upgrade, b"hello", b"again") == b"AGAIN"
        assert w.picker.messages == [(Kind.REQUEST_HEADERS, 0)]
        assert (await raw(w, b"CONNECT a:1 HTTP/1.1\r\nhost: a:1\r\n\r\n")).startswith(b"HTTP/1.1 405 ")
        assert (await raw(w, b"no HTTP at all\r\n\r\n")).startswith(b"HTTP/1.1 400 ")


async def test_a_crashed_envoy_comes_back_where_it_was(tmp_path: Path) -> None:
    async with world(directory=tmp_path) as w:
        address, pid = w.gateway.address, w.gateway.pid
        for file in tmp_path.glob("*/*"):  # as cleaners of /tmp do
            if file.is_file():
                file.unlink()
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    if w.gateway.pid != pid and (await w.post()).status == 200:
                        break
                await asyncio.sleep(0.05)
        assert (w.gateway.address, w.gateway.restarts) == (address, 1)
        w.gateway.set_endpoints([w.upstreams[0].address])
        await w.picker.server.close()
        await w.until({w.upstreams[0].address})


async def test_files_that_were_removed_are_written_again_until_it_stops(tmp_path: Path) -> None:
    """What the configuration file contained at the start, too: schedulers that start again read it."""
    plan = prepare(Options(port=0, ext_proc="127.0.0.1:1", paths=("/*",)), ["127.0.0.1:1"], directory=tmp_path)
    (directory := Path(plan.directory)).joinpath(CONFIG).write_text("policy: default\n")
    process = GatewayProcess(**structs.asdict(plan))
    await process.start()
    try:
        before = {path: path.read_bytes() for path in directory.iterdir() if path.is_file()}
        shutil.rmtree(directory)
        process.write_again()
        assert (directory / UNWATCHED).exists(), "this Envoy notices no change there"
        written = {path: path.read_bytes() for path in directory.iterdir() if path.name != UNWATCHED}
        assert directory / CONFIG in written
        assert written.items() <= before.items()
        remove_leftovers(tmp_path)
        assert directory.exists(), "it is locked again"
    finally:
        await process.stop(0.0)
    process.write_again()
    assert not directory.exists()


def test_a_directory_whose_name_is_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    (directory := tmp_path / ("x" * 100)).mkdir()
    with pytest.raises(OSError, match="too long for a UNIX socket"):
        prepare(Options(port=0, ext_proc="127.0.0.1:1", paths=("/*",)), directory=directory)
    assert not [*directory.iterdir()]


async def test_of_two_envoys_one_dies_and_nobody_else_notices(tmp_path: Path) -> None:
    """And no count of either is lost or counted twice."""
    async with Upstream() as upstream, aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
        options = Options(port=free_port(), ext_proc="127.0.0.1:1", paths=("/*",), envoys=2)
        plan = prepare(options, [upstream.address], directory=tmp_path)
        process, registry = GatewayProcess(**structs.asdict(plan)), Registry()
        refresh = watch_gateway(plan.admins, tmp_path / "counts.json", registry, Troubles(registry, lambda: 0.0))
        assert refresh is not None
        sent = 0

        async def post() -> int:
            nonlocal sent
            async with http.post(f"http://{process.address}/", data=b"x") as response:
                sent += 1
                return response.status

        async def shown() -> float:
            await refresh()
            return float(registry.render().partition(b"\nfairlead_unscheduled_requests_total ")[2].split()[0])

        try:
            await process.start()
            first, second = process.supervisors
            assert {await post() for _ in range(40)} == {200}
            (one, two), later = [[await admin.vitals() for admin in process.admins] for _ in range(2)]
            assert one and two and one.unscheduled and two.unscheduled, "both take from the one port"
            assert one.answers["2xx"] + two.answers["2xx"] == sent
            assert [vitals and vitals.asked for vitals in later] == [one.asked + 1, two.asked + 1]
            assert await shown() == sent
            other = second.pid
            os.kill(first.pid, signal.SIGKILL)
            async with asyncio.timeout(20):
                while not (first.restarts and first.pid and await first.admin.listens()):
                    try:
                        assert await post() == 200
                    except aiohttp.ClientConnectorError:
                        raise
                    except aiohttp.ClientError:
                        assert not first.restarts, "only those of the dead one"
            for _ in range(40):
                assert await post() == 200
                assert await shown() == sent
            assert (second.pid, second.restarts) == (other, 0)
        finally:
            await process.stop(0.5)
        assert not any(tmp_path.glob("fairlead-*"))


async def test_clients_are_listened_to_once_the_scheduler_answers(tmp_path: Path) -> None:
    async with Upstream() as upstream, Picker() as gone, aiohttp.ClientSession() as http:
        address = gone.address
        await gone.server.close()
        options = Options(port=free_port(), ext_proc=address, paths=("/*",))
        plan = prepare(options, [upstream.address], directory=tmp_path, scheduler_timeout=30.0)
        process = GatewayProcess(**structs.asdict(plan))
        starting = asyncio.create_task(process.start())
        try:
            await asyncio.sleep(1.0)
            assert not starting.done()
            with pytest.raises(aiohttp.ClientConnectorError):
                await http.post(f"http://127.0.0.1:{options.port}/")
            picker = Picker()
            picker.destination = upstream.address
            await picker.server.listen("127.0.0.1", int(address.rpartition(":")[2]))
            async with asyncio.timeout(10):
                await starting
            async with http.post(f"http://{process.address}/", data=b"x") as response:
                assert response.status == 200
            assert (Kind.REQUEST_BODY, 1) in picker.messages, "not even the first one goes past it"
            await picker.server.close()
        finally:
            await process.stop(0.0)


async def test_a_scheduler_that_never_answers_is_waited_for_no_longer_than_that(tmp_path: Path) -> None:
    async with Upstream() as upstream, aiohttp.ClientSession() as http:
        options = Options(port=0, ext_proc="127.0.0.1:1", paths=("/*",))
        plan = prepare(options, [upstream.address], directory=tmp_path, scheduler_timeout=0.3)
        process = GatewayProcess(**structs.asdict(plan))
        async with asyncio.timeout(10):
            await process.start()
        try:
            async with http.post(f"http://{process.address}/", data=b"x") as response:
                assert response.status == 200
        finally:
            await process.stop(0.0)
