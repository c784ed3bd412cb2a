"""The edge of the embedded gateway against a real Envoy: uploads that stall, paths that are nobody's business."""

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from hashlib import sha256
from http.client import HTTPConnection
from itertools import product
from pathlib import Path
from urllib.parse import unquote
from urllib.request import urlopen

import pytest
from embedded_gateway import Gateway
from h2.connection import H2Connection
from h2.events import ResponseReceived
from tcp import TcpServer

from fairlead.gateway.envoy import routes
from fairlead.gateway.envoy.authentication import Key, new_key, write_keys, write_upstream_token
from fairlead.gateway.envoy.options import Options
from fairlead.gateway.envoy.uploads import DISCARDED

pytestmark = pytest.mark.envoy

MB = 1 << 20
CHAT = "/v1/chat/completions"
#: Resident memory of an Envoy beside its heap: its program and the runtime of a WebAssembly module.
BESIDE = 80 * MB
ROUTES = Path(__file__).parents[1] / "data" / "vllm-0.32" / "routes.txt"

Answer = Callable[[str, bytes], Awaitable[bytes]]


class Upstream:
    """Decodes paths as uvicorn does, and tells what it was asked. `pause`: seconds before it answers. `header`: a line
    of its answers."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.header = b""
        self.pause = 0.0

    async def __aenter__(self) -> "Upstream":
        self._server = await TcpServer(self._serve).start()
        self.address = self._server.address
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = dict(line.split(": ", 1) for line in lines if line)
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            self.asked.append(unquote(first.split(" ")[1].partition("?")[0]))
            await asyncio.sleep(self.pause)
            told = json.dumps({"size": len(body), "headers": headers}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\n%bcontent-length: %d\r\n\r\n%b" % (self.header, len(told), told))


class Edge:
    def __init__(self, gateway: Gateway, upstream: Upstream) -> None:
        self.gateway, self.upstream = gateway, upstream

    async def connect(self, source: str = "127.0.0.1") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self.gateway.address.rpartition(":")
        return await asyncio.open_connection(host, int(port), local_addr=(source, 0))

    async def ask(
        self,
        path: str = CHAT,
        body: bytes = b"hello",
        method: str = "POST",
        chunked: bool = False,
        more: str = "",
        source: str = "127.0.0.1",
    ) -> bytes:
        """The whole answer."""
        length = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % len(body)
        sent = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body
        if method == "GET" or (not body and method == "OPTIONS"):
            length = b"accept: */*"  # as browsers send them
        head = f"{method} {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n{more}".encode("latin-1")
        reader, writer = await self.connect(source)
        async with asyncio.timeout(30):
            writer.write(head + length + b"\r\n\r\n" + sent)
            answer = await reader.read()
        writer.close()
        return answer

    async def status(
        self,
        path: str = CHAT,
        body: bytes = b"hello",
        method: str = "POST",
        chunked: bool = False,
        source: str = "127.0.0.1",
    ) -> int:
        return int((await self.ask(path, body, method, chunked, source=source))[9:12])

    async def stall(self, size: int, ended: list[bytes], drip: float = 0.0) -> None:
        """All of a body but its end; then nothing, or a byte each `drip` seconds. Its answer goes into `ended`."""
        reader, writer = await self.connect()
        answer = asyncio.ensure_future(reader.read())
        try:
            writer.write(b"POST %b HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), size + 1000))
            for _ in range(0, size, 65_536):
                writer.write(bytes(min(size, 65_536)))
                await writer.drain()
            while drip and not answer.done():
                await asyncio.sleep(drip)
                writer.write(b"x")
                await writer.drain()
            ended.append(await answer)
        except OSError:
            ended.append(b"reset")
        finally:
            answer.cancel()
            writer.close()

    def resident(self) -> int:
        status = Path(f"/proc/{self.gateway.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) * 1024


@contextlib.asynccontextmanager
async def edge(**options: object) -> AsyncIterator[Edge]:
    async with Upstream() as upstream:
        options = {"port": 0, "ext_proc": "127.0.0.1:1", **options}
        async with Gateway(Options(**options), [upstream.address]) as gateway:  # type: ignore[arg-type]
            yield Edge(gateway, upstream)


# ---- uploads ----


async def test_idle_uploads_above_the_heap_limit_cost_nobody_else_a_request() -> None:
    """24 connections send 10 MB and stop: twice the limit. Before, all others got 503 for as long as they liked."""
    async with edge(max_heap=128 * MB, upload_share=1.0) as at:
        ended: list[bytes] = []
        stalling = []
        refused: list[tuple[int, bytes]] = []
        peak = 0
        for i in range(120):
            if i < 24:
                stalling.append(asyncio.create_task(at.stall(10 * MB, ended)))
            answer = await at.ask()
            if not answer.startswith(b"HTTP/1.1 200 "):
                refused.append((i, answer))
            peak = max(peak, at.resident())
            await asyncio.sleep(0.02)
        for task in stalling:
            task.cancel()
        await asyncio.gather(*stalling, return_exceptions=True)
    # With a busy CPU, four uploads may arrive before Envoy looks at its heap again, and reach its last limit.
    assert len(refused) < 3 and all(i < 24 and b"envoy overloaded" in answer for i, answer in refused), refused
    assert peak < 128 * MB + BESIDE
    assert len(ended) > 8, "the largest uploads are ended"


async def test_memory_is_given_back_once_uploads_have_ended() -> None:
    """Small requests between them take a little of many pages, which the allocator would keep for minutes."""
    async with edge(max_heap=1024 * MB, upload_share=1.0) as at, asyncio.timeout(60):
        before = at.resident()
        stalling = [asyncio.create_task(at.stall(6 * MB, [])) for _ in range(24)]
        while at.resident() < before + 120 * MB:
            assert await at.status() == 200
        for task in stalling:
            task.cancel()
        await asyncio.gather(*stalling, return_exceptions=True)
        while at.resident() > before + 40 * MB:
            assert await at.status() == 200


async def test_so_are_small_blocks_of_them() -> None:
    """Envoy's allocator keeps freed blocks between its threads: 8 MiB of 24 uploads for as long as it ran."""

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def kept() -> int:
        with urlopen(f"http://127.0.0.1:{port}/memory/tcmalloc", timeout=20) as answer:
            page = answer.read().decode().partition("Bytes in transfer cache freelist")[0]
        return int(page.rpartition("MALLOC: +")[2].split()[0])

    async with edge(max_heap=1024 * MB, upload_share=1.0, admin_port=port) as at, asyncio.timeout(60):
        stalling = [asyncio.create_task(at.stall(6 * MB, [])) for _ in range(24)]
        before = at.resident()
        while at.resident() < before + 120 * MB:
            assert await at.status() == 200
        for task in stalling:
            task.cancel()
        await asyncio.gather(*stalling, return_exceptions=True)
        while await asyncio.to_thread(kept) > MB:
            assert await at.status() == 200


async def answer_of(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(20):
        head = await reader.readuntil(b"\r\n\r\n")
        size = re.search(rb"content-length: (\d+)", head)
        return head + (await reader.readexactly(int(size[1])) if size else b"")


@pytest.mark.parametrize(("path", "named"), [(CHAT, "RequestTooLargeError"), ("/v1/messages", "request_too_large")])
async def test_a_body_that_announces_far_too_much_is_refused_before_it_comes(path: str, named: str) -> None:
    page = "https://app.example"
    async with edge(body_limit=8 * MB, allowed_origins=(page,)) as at:
        reader, writer = await at.connect()
        head = "POST {} HTTP/1.1\r\nhost: a\r\norigin: {}\r\ncontent-length: {}\r\n\r\n"
        writer.write(head.format(path, page, 8 * MB + DISCARDED + 1).encode())
        answer = (await answer_of(reader)).decode()
        assert answer.startswith("HTTP/1.1 413 ")
        assert f"access-control-allow-origin: {page}\r\n" in answer
        error = json.loads(answer.partition("\r\n\r\n")[2])["error"]
        assert (error["type"], error["message"]) == (named, "the request body is larger than 8388608 bytes")
        writer.close()
        assert await at.status(path, body=bytes(8 * MB)) == 200


@pytest.mark.parametrize("chunked", [False, True], ids=["announced", "unannounced"])
@pytest.mark.parametrize("size", [MB + 1, 16 * MB])
async def test_a_client_that_sends_its_whole_body_first_reads_why_it_is_too_large(size: int, chunked: bool) -> None:
    def ask(port: int) -> tuple[int, str | None, bytes]:
        with contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=30)) as client:
            body = (bytes(min(MB, size - at)) for at in range(0, size, MB)) if chunked else bytes(size)
            client.request("POST", CHAT, body, {"origin": page}, encode_chunked=chunked)
            answer = client.getresponse()
            return answer.status, answer.getheader("access-control-allow-origin"), answer.read()

    page = "https://app.example"
    one_address = {
        "max_heap": 512 * MB,
        "upload_share": 8 / 512,
    }  # less than some send: what is discarded does not count
    async with edge(body_limit=MB, allowed_origins=(page,), **one_address) as at:
        status, allowed, body = await asyncio.to_thread(ask, int(at.gateway.address.rpartition(":")[2]))
        assert (status, allowed, at.upstream.asked) == (413, page, [])
        assert json.loads(body)["error"]["message"] == "the request body is larger than 1048576 bytes"
        assert await at.status(chunked=chunked, body=bytes(MB)) == 200


async def test_a_body_of_unknown_length_is_not_read_for_ever() -> None:
    async with edge(body_limit=MB) as at, asyncio.timeout(30):
        reader, writer = await at.connect()
        writer.write(b"POST %b HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n" % CHAT.encode())
        answer = asyncio.create_task(answer_of(reader))
        sent = 0
        while not answer.done():
            writer.write(b"100000\r\n%b\r\n" % bytes(MB))
            sent += MB
            await asyncio.sleep(0)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
        assert DISCARDED < sent < 2 * DISCARDED
        assert b" 413 " in await answer and b"larger than 1048576 bytes" in await answer
        writer.close()


@pytest.mark.parametrize("chunked", [False, True], ids=["announced", "unannounced"])
async def test_an_address_holds_no_more_than_its_share_and_others_go_on(chunked: bool) -> None:
    """Five uploads of 6 MB that stop, from one address that may hold 20 MB."""
    async with edge(max_heap=512 * MB, upload_share=20 / 512, body_limit=8 * MB) as at, asyncio.timeout(30):
        before = at.resident()
        length = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % (6 * MB)
        head = b"POST %b HTTP/1.1\r\nhost: a\r\n%b\r\n\r\n" % (CHAT.encode(), length)
        piece = b"80000\r\n%b\r\n" % bytes(MB // 2) if chunked else bytes(MB // 2)

        async def upload() -> tuple[asyncio.StreamWriter, "asyncio.Task[bytes]"]:
            reader, writer = await at.connect()
            writer.write(head)
            return writer, asyncio.create_task(answer_of(reader))

        async def refused(least: int) -> None:
            while sum(answer.done() for _, answer in uploads) < least:
                await asyncio.sleep(0.01)

        uploads = [await upload() for _ in range(5)]
        await refused(0 if chunked else 2)  # what was announced is refused at once
        for writer, answer in uploads:
            for _ in range(0 if answer.done() else 11):
                writer.write(piece)
                await writer.drain()
        assert at.resident() - before < 20 * MB + BESIDE
        assert await at.status(body=bytes(6 * MB), source="127.0.0.2") == 200
        assert await at.status(body=bytes(6 * MB), chunked=True, source="127.0.0.2") == 200
        assert await at.status() == 200, "a short one from there"
        for writer, answer in uploads:
            if not answer.done():
                writer.write(piece + b"0\r\n\r\n" * chunked)
                await writer.drain()
        answers = await asyncio.gather(*(answer for _, answer in uploads))
        for writer, _ in uploads:
            writer.close()
        wrong = [answer for answer in answers if not answer.startswith(b"HTTP/1.1 200 ")]
        # Those that come at the same time without a length may all be too much.
        assert len(wrong) == 2 or (chunked and len(wrong) > 2)
        assert all(answer.startswith(b"HTTP/1.1 429 ") and b'"type":"RateLimitError"' in answer for answer in wrong)
        assert await at.status(body=bytes(6 * MB)) == 200, "what ended holds nothing"
        assert at.upstream.asked.count(CHAT) == 5 - len(wrong) + 4, "no refused one reached a model server"


async def test_so_do_uploads_over_http2_that_announce_nothing() -> None:
    """These do not take the way of large ones."""
    sent = asyncio.Event()

    async def upload(at: Edge) -> str:
        reader, writer = await at.connect()
        client = H2Connection()
        client.initiate_connection()
        client.send_headers(1, [(":method", "POST"), (":scheme", "http"), (":authority", "a"), (":path", CHAT)])
        left, status = 6 * MB, ""
        while not status:
            while left and (room := min(client.local_flow_control_window(1), 16_384, left)):
                client.send_data(1, bytes(room))
                left -= room
            if not left and not sent.is_set():
                writer.write(client.data_to_send())
                await sent.wait()
                client.end_stream(1)
            writer.write(client.data_to_send())
            await writer.drain()
            for event in client.receive_data(await reader.read(1 << 16)):
                if isinstance(event, ResponseReceived):
                    status = str(dict(event.headers)[b":status"], "ascii")
        writer.close()
        return status

    async with edge(max_heap=512 * MB, upload_share=20 / 512, body_limit=8 * MB) as at, asyncio.timeout(30):
        before = at.resident()
        uploads = [asyncio.create_task(upload(at)) for _ in range(5)]
        while sum(int(n) for n in (await at.gateway.admin.stats("downstream_cx_rx_bytes_total")).values()) < 30 * MB:
            await asyncio.sleep(0.02)
        assert at.resident() - before < 20 * MB + BESIDE
        sent.set()
        statuses = await asyncio.gather(*uploads)
        assert statuses.count("429") >= 2 and statuses.count("200") == 5 - statuses.count("429")
        assert len(at.upstream.asked) == statuses.count("200")


async def test_uploads_whose_client_left_hold_nothing() -> None:
    async with edge(max_heap=512 * MB, upload_share=20 / 512, body_limit=8 * MB) as at:
        ended: list[bytes] = []
        for _ in range(8):
            task = asyncio.create_task(at.stall(6 * MB, ended))
            await asyncio.wait([task], timeout=0.2)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        answer = 0
        async with asyncio.timeout(10):
            while answer != 200:
                with contextlib.suppress(OSError):  # a refused one may be reset while it is sent
                    answer = await at.status(body=bytes(6 * MB))


@pytest.mark.parametrize("size", [1000, 2 * MB], ids=["small", "large"])
async def test_an_upload_that_pauses_is_ended(size: int) -> None:
    async with edge(receive_idle=0.5) as at:
        ended: list[bytes] = []
        async with asyncio.timeout(10):
            await at.stall(size, ended)
    (answer,) = ended
    assert answer.startswith(b"HTTP/1.1 408 ") and b'"type":"APITimeoutError"' in answer


@pytest.mark.parametrize("size", [1000, 2 * MB], ids=["small", "large"])
async def test_an_upload_that_drips_is_ended(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "TOTAL", ((routes.LARGE, 0.5), (8 << 20, 0.7)))
    async with edge(receive_idle=5.0) as at:
        ended: list[bytes] = []
        async with asyncio.timeout(4):
            await at.stall(size, ended, drip=0.05)
    assert ended[0].startswith(b"HTTP/1.1 408 ") or ended == [b"reset"]


async def test_what_is_here_may_wait_as_long_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "TOTAL", ((routes.LARGE, 0.5), (8 << 20, 0.5)))
    monkeypatch.setattr(routes, "TOTAL_REST", 0.5)
    async with edge(receive_idle=0.3) as at:
        at.upstream.pause = 1.5
        got = await asyncio.gather(
            at.status(),
            at.status(body=bytes(MB)),
            at.status(body=b"x", chunked=True),
            at.status(body=bytes(MB), chunked=True),
            at.status("/v1/models", method="GET"),
            at.status("/v1/responses/resp_1/cancel", b""),
        )
    assert got == [200] * 6


async def test_large_uploads_arrive_as_they_were_sent() -> None:
    async with edge() as at:
        for size, chunked in ((routes.LARGE - 1, False), (routes.LARGE, False), (5 * MB, False), (7, True), (MB, True)):
            told = json.loads((await at.ask(body=bytes(size), chunked=chunked)).partition(b"\r\n\r\n")[2])
            assert told["size"] == size
            names = set(told["headers"])
            assert routes.CHUNKED not in names
            assert told["headers"]["x-envoy-external-address"] == "127.0.0.1"
        large = await at.gateway.admin.stats(r"^cluster\.uploads\.upstream_rq_total$")
    assert list(large.values()) == [4]


# ---- protocols ----


async def test_clients_of_http_1_0_are_served() -> None:
    """nginx speaks it toward upstreams by default, without a host if the client names none."""
    async with edge() as at:
        for size in (5, MB):
            reader, writer = await at.connect()
            head = f"POST {CHAT} HTTP/1.0\r\nconnection: keep-alive\r\ncontent-length: {size}\r\n\r\n"
            async with asyncio.timeout(30):
                for kept in (head, head.replace("keep-alive", "close")):
                    writer.write(kept.encode() + bytes(size))
                    answer = (await reader.readuntil(b"\r\n\r\n")).decode()
                    assert answer.startswith("HTTP/1.0 200 ") and "chunked" not in answer
                    length = int(re.search(r"content-length: (\d+)", answer)[1])  # type: ignore[index]
                    sent = json.loads(await reader.readexactly(length))
                    assert sent["size"] == size and sent["headers"]["host"] == "localhost"
                assert await reader.read() == b""
            writer.close()


#: Requests that Envoy itself refuses, and what its answer says. Where the first four end is not known.
REFUSED = (
    ("FOO /health HTTP/1.1\r\nhost: a\r\n", 400, "Bad Request"),
    ("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n", 400, "Bad Request"),
    ("POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: x\r\n", 501, "Not Implemented"),
    (f"GET / HTTP/1.1\r\nhost: a\r\nx: {'y' * 70_000}\r\n", 431, "Request Header Fields Too Large"),
    ("GET /v1/models HTTP/1.1\r\n", 400, "no host header"),
    ("GET /v1/models#x HTTP/1.1\r\nhost: a\r\n", 400, "#"),
    ("GET /v1/models%00 HTTP/1.1\r\nhost: a\r\n", 400, "%00"),
    ("GET / HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: x\r\n", 403, "WebSocket"),
    ("CONNECT a:443 HTTP/1.1\r\nhost: a:443\r\n", 405, "CONNECT"),
)


async def test_envoys_own_refusals_say_why() -> None:
    async with edge() as at, asyncio.timeout(30):
        for number, (request, status, message) in enumerate(REFUSED):
            reader, writer = await at.connect()
            writer.write(request.encode() + b"\r\n")
            answer = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = int(re.search(r"content-length: (\d+)", answer)[1])  # type: ignore[index]
            error = json.loads(await reader.readexactly(length))["error"]
            writer.close()
            assert answer.startswith(f"HTTP/1.1 {status} ")
            assert message in error["message"] and error["code"] == status
            assert "connection: close" in answer or number > 3


# ---- keys ----


@pytest.mark.parametrize("forward", [False, True])
async def test_model_servers_get_the_key_only_if_told(forward: bool, tmp_path: Path) -> None:
    key, kept = new_key("team-a")
    write_keys(tmp_path / "keys.json", [kept], forward)
    async with edge(keys_file=str(tmp_path / "keys.json")) as at:
        for name, value in (("authorization", f"Bearer {key}"), ("x-api-key", key)):
            for size in (5, MB):
                answer = await at.ask(body=bytes(size), more=f"{name}: {value}\r\n")
                told = json.loads(answer.partition(b"\r\n\r\n")[2])["headers"]
                assert told.get(name) == (value if forward else None)
                assert not [value for value in told.values() if "team-a" in value]


@pytest.mark.parametrize("asks", [True, False])
async def test_model_servers_get_their_own_token(asks: bool, tmp_path: Path) -> None:
    key, kept = new_key("team-a")
    write_keys(tmp_path / "keys.json", [kept], False)
    write_upstream_token(tmp_path / "token.json", "first%20%REQ(x)%")
    more = {"keys_file": str(tmp_path / "keys.json")} if asks else {}

    async def sent(size: int, *, name: str = "authorization", value: str = f"Bearer {key}") -> dict[str, str]:
        answer = await at.ask(body=bytes(size), more=f"{name}: {value}\r\n")
        return dict(json.loads(answer.partition(b"\r\n\r\n")[2])["headers"])

    async with edge(upstream_token_file=str(tmp_path / "token.json"), **more) as at:
        for size in (5, MB):
            told = await sent(size)
            assert told["authorization"] == "Bearer first%20%REQ(x)%"
            assert not [value for value in told.values() if key in value]
            assert (await sent(size, name="x-api-key", value=key))["authorization"] == told["authorization"]
        write_upstream_token(tmp_path / "token.json", "second")
        async with asyncio.timeout(20):
            while (await sent(5))["authorization"] != "Bearer second":
                await asyncio.sleep(0.02)
        assert at.upstream.asked and (await at.ask("/v1/models", method="GET"))[9:12] == (b"401" if asks else b"200")


@pytest.mark.parametrize(
    ("upgrade", "status"), [("websocket", 401), ("CONNECT", 405), ("connect", 405), ("h2c", 401), ("other", 403)]
)
async def test_no_request_for_an_upgrade_passes_without_a_key(upgrade: str, status: int, tmp_path: Path) -> None:
    _, kept = new_key("team-a")
    write_keys(tmp_path / "keys.json", [kept], False)
    more = f"connection: upgrade\r\nupgrade: {upgrade}\r\n"
    async with edge(keys_file=str(tmp_path / "keys.json")) as at:
        for path, method, body in (("/v1/models", "GET", b""), (CHAT, "POST", b"{}")):
            assert (await at.ask(path, body, method, more=more))[9:12] == b"%d" % status
        assert at.upstream.asked == []


async def test_keys_of_any_length_are_compared_by_their_sha256(tmp_path: Path) -> None:
    keys = ["".join(chr(33 + (i * size) % 90) for i in range(size)) for size in range(513)]
    kept = [Key(sha256(key.encode()).hexdigest(), "team-a") for key in keys]
    write_keys(tmp_path / "keys.json", kept, False)
    sizes = [*range(14, 18), *range(50, 70), *range(110, 132), 511, 512, 513]
    async with edge(keys_file=str(tmp_path / "keys.json")) as at:
        got = {size: (await at.ask(more=f"x-api-key: {keys[size]}\r\n"))[9:12] for size in sizes if size < 513}
        got[513] = (await at.ask(more=f"x-api-key: {'x' * 513}\r\n"))[9:12]
    assert got == {size: b"200" if 16 <= size <= 512 else b"401" for size in sizes}


def fields(answer: bytes) -> dict[str, str]:
    lines = answer.partition(b"\r\n\r\n")[0].decode().split("\r\n")[1:]
    pairs = [line.split(": ", 1) for line in lines]
    assert len({name for name, _ in pairs}) == len(pairs), "each header comes once"
    return {name: value for name, value in pairs if name.startswith("access-control-")}


@pytest.mark.parametrize("origins", [("*",), ("https://b.example:8443", "http://a.example")])
async def test_pages_of_allowed_origins_may_use_a_gateway_that_asks_for_keys(
    origins: tuple[str, ...], tmp_path: Path
) -> None:
    """A browser first asks whether it may send a key, and never sends one with this question."""
    key, kept = new_key("team-a")
    write_keys(tmp_path / "keys", [kept], False)
    question = "access-control-request-method: POST\r\naccess-control-request-headers: authorization,x-api-key\r\n"
    async with edge(allowed_origins=origins, keys_file=str(tmp_path / "keys")) as at:
        at.upstream.header = b"access-control-allow-origin: *\r\n"  # as vLLM answers
        for origin, allowed in (("http://a.example", True), ("http://evil.example", origins == ("*",))):
            said = {"access-control-allow-origin": origin, "access-control-expose-headers": "*"} if allowed else {}
            page = f"origin: {origin}\r\n"
            private = "access-control-request-private-network: true\r\n"
            asked = await at.ask(method="OPTIONS", body=b"", more=page + question + private)
            got = fields(asked)
            assert asked.startswith(b"HTTP/1.1 200") and said.items() <= got.items()
            assert ("access-control-allow-origin" in got) is allowed
            assert got["access-control-allow-private-network"] == "true"
            assert (got["access-control-allow-methods"], got["access-control-allow-headers"]) == (
                "GET, POST, DELETE",
                "authorization, *",
            )
            for more, status in ((f"authorization: Bearer {key}\r\n", 200), ("", 401)):
                answer = await at.ask(more=page + more)
                assert (int(answer[9:12]), fields(answer)) == (status, said)
        assert at.upstream.asked == [CHAT] * 2
        assert fields(await at.ask(more=f"authorization: Bearer {key}\r\n")) == {}, "no page asks"


async def ask_whether(at: Edge, path: str) -> bytes:
    """The answer to a browser's preflight."""
    question = "origin: http://a.example\r\naccess-control-request-method: POST\r\n"
    return await at.ask(path, b"", "OPTIONS", more=question)


@pytest.mark.parametrize("fail_open", [True, False])
@pytest.mark.parametrize("keys", [True, False])
async def test_pages_read_all_refusals_of_the_gateway(keys: bool, fail_open: bool, tmp_path: Path) -> None:
    """Also of requests without a body or its length, and of paths that are not forwarded."""
    key, kept = new_key("team-a")
    write_keys(tmp_path / "keys", [kept], False)
    more = {"keys_file": str(tmp_path / "keys")} if keys else {}
    page = "origin: http://a.example\r\n"
    with_key = f"{page}authorization: Bearer {key}\r\n"
    said = {"access-control-allow-origin": "http://a.example", "access-control-expose-headers": "*"}
    scheduled = 200 if fail_open else 503
    async with edge(allowed_origins=("http://a.example",), fail_open=fail_open, **more) as at:
        paths = {CHAT: scheduled, "/v1/models": scheduled, "/sleep": 404}
        for preflight in await asyncio.gather(*(ask_whether(at, path) for path in paths)):
            assert preflight.startswith(b"HTTP/1.1 200") and said.items() <= fields(preflight).items()
        sent = list(product(paths, ("GET", "POST", "DELETE"), (True, False)))
        answers = await asyncio.gather(
            *(at.ask(path, method=method, more=with_key if right else page) for path, method, right in sent)
        )
        for (path, method, right), answer in zip(sent, answers, strict=True):
            status = 401 if keys and not right else paths[path]
            assert (int(answer[9:12]), fields(answer)) == (status, said), (path, method)
        elsewhere = await at.ask("/sleep", more=with_key.replace("a.example", "evil.example"))
        assert (elsewhere[9:12], fields(elsewhere)) == (b"404", {})
        assert set(at.upstream.asked) == ({CHAT, "/v1/models"} if fail_open else set())


@pytest.mark.parametrize("size", [5, MB], ids=["small", "through the second listener"])
async def test_a_client_of_this_machine_is_named_by_its_own_address(size: int) -> None:
    async with edge() as at:
        for before in ("", "203.0.113.9", "203.0.113.9, 10.0.0.1"):
            more = f"x-forwarded-for: {before}\r\n" if before else ""
            told = json.loads((await at.ask(body=bytes(size), more=more)).partition(b"\r\n\r\n")[2])
            hops = told["headers"]["x-forwarded-for"].replace(" ", "").split(",")
            assert hops == [*filter(None, before.replace(" ", "").split(",")), "127.0.0.1"]


@pytest.mark.parametrize("origins", [("http://a.example", "http://b.example"), ("*",), ()])
async def test_pages_of_other_origins_open_no_websocket(origins: tuple[str, ...]) -> None:
    """Browsers send no preflight before they open one."""
    async with edge(allowed_origins=origins) as at:
        for origin in ("http://b.example", "http://evil.example", ""):
            page = f"origin: {origin}\r\n" * bool(origin)
            socket = f"GET {CHAT} HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: WebSocket\r\n{page}\r\n"
            reader, writer = await at.connect()
            writer.write(socket.encode())
            answer = await answer_of(reader)
            writer.close()
            refused = "evil" in origin and "http://a.example" in origins
            assert (b" 403 " in answer and b"gateway.allowedOrigins" in answer) is refused, answer
            assert len(at.upstream.asked) == (not refused), answer
            at.upstream.asked.clear()


async def test_without_allowed_origins_the_model_server_decides() -> None:
    async with edge() as at:
        at.upstream.header = b"access-control-allow-origin: *\r\n"
        for method in ("OPTIONS", "POST"):
            answer = await at.ask(method=method, more="origin: http://a\r\naccess-control-request-method: POST\r\n")
            assert fields(answer) == {"access-control-allow-origin": "*"}
        assert at.upstream.asked == [CHAT] * 2


@pytest.mark.parametrize("broken", ["error('x')", "do return end"])
async def test_a_check_that_fails_lets_nobody_in(broken: str, tmp_path: Path) -> None:
    """Envoy goes on when a script raises."""
    key, kept = new_key("team-a")
    file = tmp_path / "keys.json"
    write_keys(file, [kept], False)
    begin = "function envoy_on_request(handle)"
    assert begin in file.read_text()
    file.write_text(file.read_text().replace(begin, f"{begin} {broken}"))
    async with edge(keys_file=str(file)) as at:
        minted = f"authorization: Bearer {key}\r\nx-llm-d-inference-fairness-id: minted\r\n"
        assert (await at.ask(more=minted))[9:12] == b"403"
        assert at.upstream.asked == []


# ---- paths ----

#: What clients of vLLM 0.32 need of its routes; of the others many are dangerous, and of some no model is known.
PASSED = {
    *("POST /classify", "POST /detokenize", "GET /health", "POST /inference/v1/generate", "POST /pooling"),
    *("POST /rerank", "POST /score", "POST /tokenize", "POST /v1/audio/transcriptions", "POST /v1/audio/translations"),
    *("POST /v1/chat/completions", "POST /v1/chat/completions/render", "POST /v1/completions"),
    *("POST /v1/completions/render", "POST /v1/embeddings", "POST /v1/messages", "POST /v1/messages/count_tokens"),
    *("GET /v1/models", "POST /v1/rerank", "POST /v1/responses", "GET /v1/responses/resp_1"),
    *("POST /v1/responses/resp_1/cancel", "POST /v1/score", "POST /v2/rerank"),
}


async def test_of_all_routes_of_vllm_those_of_inference_pass() -> None:
    lines = ROUTES.read_text().replace("{response_id}", "resp_1").splitlines()
    async with edge() as at:
        got = await asyncio.gather(*(at.status(line.split()[1], method=line.split()[0]) for line in lines))
        statuses = dict(zip(lines, got, strict=True))
        refused = await at.ask("/sleep?level=1")
        assert "/sleep" not in at.upstream.asked
    assert {line for line, status in statuses.items() if status == 200} == PASSED
    assert set(statuses.values()) == {200, 404}
    assert b'"type":"NotFoundError"' in refused and b"gateway.paths" in refused


async def test_further_paths_pass_when_they_are_named() -> None:
    async with edge(paths=("/cohere/v2/chat", "/static/*")) as at:
        paths = ("/cohere/v2/chat", "/cohere/v2/chat/render", "/static/a/b", "/static", "/xcohere/v2/chat", "/sleep")
        got = await asyncio.gather(*map(at.status, paths))
    assert got == [200, 404, 200, 404, 404, 404]


SPELLINGS = (
    *("/v1/chat%2Fcompletions", "/v1%2fchat%2Fcompletions", "/v1/chat%252Fcompletions", "//v1/chat/completions"),
    *(
        "/v1//chat///completions",
        "/v1/./chat/completions",
        "/v1/x/../chat/completions",
        "/x/%2e%2e/v1/chat/completions",
    ),
    *("/v1/ch%61t/completions", "/v1/chat/%63ompletions", "/%76%31/chat/completions", "/v1/chat\\completions"),
    *("/v1/chat%5Ccompletions", "/v1/chat/completions/", "/v1/chat/completions//", "/v1/chat/completions?x=%2F"),
    *("/v1/chat/completions;a=b", "/v1/chat;a/completions", "/v1/chat/completions%3Fx", "/v1/chat/completions%23x"),
    *("/v1/chat/completions%00", "/v1/chat/completions%20", "/v1/chat/completions%0a", "/V1/Chat/Completions"),
    *("/v1/chat/completions#x", "/v1/%2e/chat/completions", "/v1/x/%2e%2e%2fchat/completions", "/v1/chat/completions."),
    *("http://a/v1/chat%2Fcompletions", "/v1/chat/%2e%2e/chat/completions", "/%2fv1/chat/completions"),
    *(
        "/v1/%63%68%61%74/completions",
        "/v1/chat/completion%73",
        "/openai/v1/chat%2Fcompletions",
        "/v1/chat/completions%2F",
    ),
    *("/v1/chat%2F%2Fcompletions", "/v1/..%2fv1/chat/completions", "/v1/chat/completions%2F..", "/sl%65ep", "/%73leep"),
    *("/v1/chat/completions/../../../sleep", "/v1/models/../../sleep", "/v1/models%2F..%2F..%2Fsleep", "/sleep%2F"),
    *("/v1/models/..%5c..%5csleep", "/x/v1/models/%2e%2e/%2e%2e/%2e%2e/sleep", "//sleep", "/;/sleep", "/sleep;x"),
)


async def test_no_spelling_takes_a_client_to_a_path_that_was_not_let_in() -> None:
    """Whatever the model server makes of what it gets is what the gateway took it for, and the rules with it."""
    async with edge() as at:
        statuses = dict(zip(SPELLINGS, await asyncio.gather(*map(at.status, SPELLINGS)), strict=True))
        asked = set(at.upstream.asked)
    assert all(path.removesuffix("/").endswith("/v1/chat/completions") or "/v1/models/" in path for path in asked), (
        asked
    )
    assert statuses["/v1/chat%2Fcompletions"] == 200
    assert not any(status >= 500 for status in statuses.values()), statuses
