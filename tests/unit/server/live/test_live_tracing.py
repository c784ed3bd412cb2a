"""Tracing that is off loads nothing; tracing that cannot be says what to install."""

import asyncio
import subprocess
import sys
import threading
import time
from contextlib import AsyncExitStack, suppress

import pytest
import requests
from aiohttp import web
from aiohttp.test_utils import TestServer
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult

from fairlead.compat.load import load
from fairlead.config.schema import Config
from fairlead.core.errors import ConfigError
from fairlead.core.request import Request
from fairlead.server.live.wiring import start_tracing
from fairlead.server.observe.tracing import make_provider

ON = "tracing: {endpoint: 'http://localhost:4318/v1/traces', sample: 0.5, followParent: false, timeout: 250ms}"


def config(text: str) -> Config:
    return load(text, need_endpoints=False)


async def test_off_there_is_none() -> None:
    async with AsyncExitStack() as stack:
        assert start_tracing(stack, config("policy: default"), asyncio.get_running_loop()) is None


def test_the_scheduler_loads_nothing_of_opentelemetry() -> None:
    code = (
        "import sys, fairlead.server.live, fairlead.cli.serve; print([m for m in sys.modules if 'opentelemetry' in m])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("status", "dropped"), [(200, 0), (307, 1), (400, 1)])
async def test_spans_that_the_collector_does_not_take_are_counted(
    status: int, dropped: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxies of the environment are not asked, since the collector is on this machine."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status, headers={"Location": "/elsewhere"})

    app = web.Application()
    app.router.add_post("/v1/traces", answer)
    async with TestServer(app) as server:
        async with AsyncExitStack() as stack:
            text = ON.replace("localhost:4318", f"127.0.0.1:{server.port}").replace("250ms", "10s")
            tracing = start_tracing(stack, config(text.replace("0.5", "1")), asyncio.get_running_loop())
            assert tracing is not None
            assert tracing.arrived(Request(id=1, arrived=0.0), {})
        assert tracing.dropped == dropped, "the end sends what there is"
    lost = [vars(record)["fields"]["problem"] for record in caplog.records if record.message == "spans are lost"]
    assert lost == [f"status {status}"] * dropped, "a line of its own for each reason"


LONG = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"
CHUNKED = b"HTTP/1.1 503 Busy\r\nTransfer-Encoding: chunked\r\n\r\nffff\r\n"
SHORT = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"


class Dripping:
    """A collector that sends `head`, and further bytes for as long as the client takes them."""

    def __init__(self, head: bytes) -> None:
        self._head = head
        self.connections = self.ended = 0
        self.asked = asyncio.Queue[None]()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(OSError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                (length,) = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                await reader.readexactly(int(length[15:]))
                self.asked.put_nowait(None)
                writer.write(self._head)
                for _ in range(2 if self._head == SHORT else 10_000):
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(0.01)
        writer.close()
        self.ended += 1


@pytest.mark.parametrize(
    ("head", "connections", "dropped"), [(LONG, 2, 0), (CHUNKED, 2, 2), (SHORT, 1, 0)], ids=["long", "chunked", "short"]
)
async def test_an_answer_that_drips_does_not_stop_tracing(head: bytes, connections: int, dropped: int) -> None:
    """A connection whose answer was read to its end is used again."""
    collector = Dripping(head)
    server = await asyncio.start_server(collector, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, asyncio.timeout(20):
        async with AsyncExitStack() as stack:
            text = ON.replace("localhost:4318", f"127.0.0.1:{port}").replace("0.5", "1")
            tracing = start_tracing(stack, config(text), asyncio.get_running_loop())
            assert tracing is not None
            for number in range(2):
                tracing.unread("chat", 400, "invalid", {})
                await collector.asked.get()
                while tracing.dropped < min(dropped, number + 1):
                    await asyncio.sleep(0.01)
        while collector.ended < collector.connections:
            await asyncio.sleep(0.01)
    assert (collector.connections, tracing.dropped) == (connections, dropped)


def test_the_end_does_not_wait_for_a_collector_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(TracerProvider, "shutdown", lambda provider: may_end.wait(30))

    async def work() -> None:
        async with AsyncExitStack() as stack:
            start_tracing(stack, config(ON), asyncio.get_running_loop())

    began = time.monotonic()
    asyncio.run(work())
    assert time.monotonic() - began < 15
    may_end.set()


@pytest.mark.parametrize("error", [requests.HTTPError, requests.ConnectionError])
def test_spans_are_counted_where_opentelemetry_raises(
    monkeypatch: pytest.MonkeyPatch, error: type[requests.RequestException]
) -> None:
    def export(exporter: OTLPSpanExporter, spans: object) -> SpanExportResult:
        raise error

    monkeypatch.setattr(OTLPSpanExporter, "export", export)
    dropped: list[int] = []
    provider = make_provider("http://127.0.0.1:1/v1/traces", "fairlead", 1.0, dropped.append)
    provider.get_tracer("test").start_span("gateway.request").end()
    provider.shutdown()
    assert dropped == [1]


@pytest.mark.parametrize("which", ["", "_TRACES"])
def test_credentials_for_the_collector_come_from_opentelemetrys_own_plugin(
    monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    monkeypatch.setenv(f"OTEL_PYTHON_EXPORTER_OTLP_HTTP{which}_CREDENTIAL_PROVIDER", "no-such-plugin")
    with pytest.raises(RuntimeError, match="'no-such-plugin' not found"):
        make_provider("http://127.0.0.1:1/v1/traces", "fairlead", 1.0, print)


async def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    async with AsyncExitStack() as stack:
        with pytest.raises(ConfigError, match=r"pip install 'fairlead\[tracing\]'") as raised:
            start_tracing(stack, config(ON), asyncio.get_running_loop())
    assert "$.tracing.endpoint" in str(raised.value)


def test_settings() -> None:
    tracing = config(ON).tracing
    assert (tracing.sample, tracing.follow_parent, tracing.timeout, tracing.max_rate) == (0.5, False, 0.25, 100.0)
    assert config("policy: default").tracing.endpoint == ""
    for wrong in ("endpoint: localhost:4317", "sample: 2", "maxRate: 0", "serviceName: ''", "timeout: 0"):
        with pytest.raises(ConfigError, match=r"\$\.tracing"):
            config(f"tracing: {{{wrong}}}")
