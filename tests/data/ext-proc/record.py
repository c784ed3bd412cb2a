"""Records what the real Envoy sends over ext_proc: `python tests/data/ext-proc/record.py` writes the files beside it.

One file per stream: `origin`, `metadata` (what the gateway announced of itself in the stream's request headers),
`messages` (base64, each a whole ProcessingRequest as it came, until the scheduler left). The scheduler is the real one,
the model server is `fairlead stub`. `origin` names the body modes of request and response as
`tests/e2e/support/gw_modes.py` does.
"""

import asyncio
import base64
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "e2e" / "support"))
sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from gw_http1 import Http1
from gw_http2 import Http2
from gw_live import running
from gw_messages import JSON, Ask
from gw_modes import FULL_DUPLEX, Pair, bootstrap
from gw_processes import Envoy, Stub, sees_the_scheduler
from ports import free_ports

from fairlead.gateway import server
from fairlead.gateway.envoy.binary import find_envoy
from fairlead.gateway.host import Host
from fairlead.gateway.session import Session
from fairlead.gateway.stream import ServerStream

HERE = Path(__file__).parent
MODEL = "Qwen/Qwen3-32B"


def chat(stream: bool) -> bytes:
    message = {"role": "user", "content": "Which way?"}
    options = {"stream_options": {"include_usage": True}} if stream else {}
    return json.dumps({"model": MODEL, "messages": [message], "max_tokens": 4, "stream": stream, **options}).encode()


ASK = Ask(fields=[JSON], pieces=[chat(False)])
STREAM = Ask(fields=[JSON], pieces=[chat(True)])
GET = Ask("GET", "/v1/models")
TRAILERS = ASK._replace(trailers=[("x-checksum", "1")])

STAYING = Pair(FULL_DUPLEX, FULL_DUPLEX, log=False)
BUFFERED = Pair("buffered", "full", log=False)
POST_JSON, POST_SSE = "POST over HTTP/1.1, JSON response", "POST over HTTP/1.1, streamed response"
POST_TRAILERS, GET_JSON = "POST over HTTP/2 that ends by trailers, JSON response", "GET over HTTP/1.1"

#: Name of the file → what it is, the gateway, the request.
RECORDINGS = {
    "json-whole-log": (POST_JSON, Pair("whole", "first-chunk"), ASK),
    "json-buffered": (POST_JSON, BUFFERED, ASK),
    "json-streamed": (POST_JSON, Pair("STREAMED", "STREAMED", log=False), ASK),
    "json-full-duplex": (POST_JSON, STAYING, ASK),
    "json-full-duplex-log": (POST_JSON, Pair(FULL_DUPLEX, FULL_DUPLEX), ASK),
    "json-none": (POST_JSON, Pair("NONE", "NONE", log=False), ASK),
    "get-buffered": (GET_JSON, BUFFERED, GET),
    "get-full-duplex": (GET_JSON, STAYING, GET),
    "sse-whole-log": (POST_SSE, Pair("whole", "first-chunk"), STREAM),
    "sse-buffered": (POST_SSE, BUFFERED, STREAM),
    "sse-full-duplex": (POST_SSE, STAYING, STREAM),
    "trailers-whole": (POST_TRAILERS, Pair("whole", "full", log=False), TRAILERS),
    "trailers-full-duplex": (POST_TRAILERS, STAYING, TRAILERS),
}


class Recorder:
    """In place of `sessions`: hands everything on."""

    def __init__(self) -> None:
        self.streams: list[dict[str, Any]] = []

    def routes(self, host: Host, health: Any) -> Any:
        return {**server_routes(host, health), server.EXT_PROC: lambda stream, told: _Tap(self, host, stream, told)}


class _Tap:
    def __init__(self, recorder: Recorder, host: Host, stream: ServerStream, metadata: Mapping[str, str]) -> None:
        self._session = Session(host, stream, metadata)
        own = {name: value for name, value in metadata.items() if name.startswith("fairlead-")}
        self._seen: dict[str, Any] = {"metadata": own, "messages": []}
        recorder.streams.append(self._seen)

    def on_message(self, data: bytes) -> None:
        self._seen["messages"].append(base64.b64encode(data).decode())
        self._session.on_message(data)

    def on_half_close(self) -> None:
        self._session.on_half_close()

    def on_lost(self, why: str) -> None:
        self._session.on_lost(why)


server_routes = server.routes


async def record(pair: Pair, ask: Ask, stub: Stub, directory: Path) -> dict[str, Any]:
    recorder = Recorder()
    server.routes = recorder.routes
    try:
        async with running({"endpoints": stub.addresses, "policy": "round-robin"}, directory) as (live, _):
            (port,) = free_ports(1)
            gateway = Envoy(directory, f"envoy-{port}")
            address = f"127.0.0.1:{live.config.ext_proc.port}"
            try:
                gateway.start(bootstrap(pair, port, address, stub.addresses, message_timeout=5.0))
                await sees_the_scheduler(gateway.admin)
                async with Http2(port) if ask.trailers else Http1(port) as client:
                    for _ in range(2):  # the access log connects with the first one
                        assert (await client.ask(ask)).status == 200
                        await asyncio.sleep(0.5)
            finally:
                gateway.end()
    finally:
        server.routes = server_routes
    return recorder.streams[-1]


async def main(version: str) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        stub = Stub(directory / "stub.log").start(1)
        try:
            for name, (what, pair, ask) in RECORDINGS.items():
                seen = await record(pair, ask, stub, directory)
                origin = f"captured from Envoy {version}: {what}, {pair.name}"
                text = json.dumps({"origin": origin, **seen}, indent=1)
                (HERE / f"{name}.json").write_text(text + "\n")
                print(f"{name}: {len(seen['messages'])} messages, {len(text)} bytes")
        finally:
            stub.end()


if __name__ == "__main__":
    said = subprocess.run([find_envoy(), "--version"], capture_output=True, text=True, check=True).stdout
    asyncio.run(main(said.split("/")[-4]))
