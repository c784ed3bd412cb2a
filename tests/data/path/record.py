"""Records what the embedded gateway sends for a 1 KB chat: `python tests/data/path/record.py` writes `chat-1k.json`.

A tap between the real Envoy, configured as `fairlead serve` does, and the real scheduler notes what each connection
carries to the scheduler. `extproc` and `log` are the bytes of the two connections (base64), in pieces: first what opens
the connection, then one piece for each request. `bench/path.py` feeds them again.
"""

import asyncio
import base64
import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "e2e" / "support"))
sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from gw_processes import Envoy, Serve, Upstream, sees_the_scheduler
from ports import free_ports

from fairlead.gateway import h2
from fairlead.gateway.access_log import GATEWAY_ID
from fairlead.gateway.envoy.config import build
from fairlead.gateway.envoy.options import Options
from fairlead.lab.load.process import run_in_process
from fairlead.lab.load.spec import Options as LoadOptions
from fairlead.lab.load.spec import RunSpec
from fairlead.lab.load.workload import Chat, ClosedLoop

HERE = Path(__file__).parent
#: Name of the tag that holds all the scheduler reads of an entry.
SUMMARY_TAG_BYTES = b"\x0a\x08fairlead\x12"
REQUESTS = 4
#: Seconds until the access log has told of a request.
PAUSE = 0.5


class Tap:
    """A TCP proxy that keeps what clients send, by connection."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.sent: list[bytearray] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream = await asyncio.open_connection("127.0.0.1", self._port)
        kept = bytearray()
        self.sent.append(kept)
        await asyncio.gather(self._copy(reader, upstream[1], kept), self._copy(upstream[0], writer, None))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray | None) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            while data := await reader.read(1 << 16):
                if kept is not None:
                    kept += data
                writer.write(data)
        writer.close()


async def record(directory: Path) -> dict[str, Any]:
    upstream = Upstream(directory / "upstream.log").start(1)
    scheduler, gateway = Serve(directory), Envoy(directory)
    gateway_port, tap_port = free_ports(2)
    endpoints = [{"name": "e0", "address": "127.0.0.1", "port": upstream.ports[0]}]
    try:
        scheduler.start({"gateway": "none", "endpoints": endpoints})
        scheduler_port = scheduler.config["extProc"]["port"]
        tap = Tap(scheduler_port)
        await asyncio.start_server(tap.serve, "127.0.0.1", tap_port)
        told = f"127.0.0.1:{tap_port}"
        options = Options(port=gateway_port, ext_proc=told, als=told, endpoints=tuple(upstream.addresses))
        gateway.start(build(options))
        await sees_the_scheduler(gateway.admin)
        pieces: list[list[bytes]] = []
        for _ in range(REQUESTS):
            before = [len(kept) for kept in tap.sent]
            spec = RunSpec(
                target=f"http://127.0.0.1:{gateway_port}",
                workload=Chat(body_bytes=1024, output_tokens=100, stream=False),
                arrivals=ClosedLoop(1),
                options=LoadOptions(requests=1, read_usage=False, gaps=False),
            )
            await run_in_process(spec)
            await asyncio.sleep(PAUSE)
            before += [0] * (len(tap.sent) - len(before))
            pieces.append([bytes(kept[start:]) for kept, start in zip(tap.sent, before, strict=True)])
    finally:
        gateway.end()
        for child in (upstream, scheduler):
            await asyncio.to_thread(child.end)  # the tap goes on meanwhile
    connections = list(zip(*pieces, strict=True))  # the first request opens the last of them
    (requests,) = [parts for parts in connections if GATEWAY_ID.encode() in parts[-1]]
    (log,) = [parts for parts in connections if SUMMARY_TAG_BYTES in parts[-1]]
    return {
        "origin": "captured from Envoy 1.40.0, configured as `fairlead serve` does: 1 KB chats, JSON answers",
        # With the second request the gateway confirms our table size.
        "opening": requests[0] + requests[1],
        "request": requests[-1],
        # Without its first message, which also describes the gateway, in 60 KB.
        "log_opening": log[0][: log[0].index(_message_frames(log[0])[0])],
        "log_entry": log[-1],
    }


def _message_frames(data: bytes) -> list[bytes]:
    """The DATA frames in bytes that a connection carried."""
    pos = len(h2.PREFACE) if data.startswith(h2.PREFACE) else 0
    frames = []
    while pos < len(data):
        length, _, _ = h2.HEAD.unpack_from(data, pos)
        stop = pos + h2.HEAD_SIZE + (length >> 8)
        if length & 0xFF == h2.DATA:
            frames.append(data[pos:stop])
        pos = stop
    return frames


async def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        found = await record(Path(directory))
    told = {key: value if isinstance(value, str) else base64.b64encode(value).decode() for key, value in found.items()}
    (HERE / "chat-1k.json").write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
