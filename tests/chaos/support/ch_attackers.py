"""Hostile clients, as a process of their own: `python ch_attackers.py KIND PORT COUNT`. Prints `up` once the attack is
in force, and goes on until it is ended."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, RemoteSettingsChanged

MB = 1_000_000
#: What an upload and a gRPC message announce, and how much of it comes.
DECLARED, SENT = 67 * MB, 62 * MB
MESSAGE = 60 << 20
PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
#: Seconds after which an attack that makes no way is taken for one in force: it was held back.
HELD_BACK_S = 20.0

Begun = Callable[[], None]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def upload(port: int, begun: Begun) -> None:
    """A large body that stops short of its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    try:
        writer.write(f'{head}content-length: {DECLARED}\r\n\r\n{{"model": "m", "prompt": "'.encode())
        for _ in range(SENT // MB):
            writer.write(b"x" * MB)
            await writer.drain()
        begun()
        await reader.read()
    finally:
        writer.transport.abort()


async def stream(port: int, begun: Begun) -> None:
    """A gRPC message to the scheduler that lacks its last byte, as fast as its windows allow."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    client = H2Connection(H2Configuration(client_side=True))
    client.initiate_connection()
    left = MESSAGE - 1
    opened = False
    try:
        while True:
            while opened and left and (room := min(client.local_flow_control_window(1), 16_384, left)):
                client.send_data(1, bytes(room))
                left -= room
            writer.write(client.data_to_send())
            await writer.drain()
            if not left:
                begun()
            data = await reader.read(1 << 16)
            if not data:
                return
            for event in client.receive_data(data):
                if isinstance(event, ConnectionTerminated):
                    return
                if isinstance(event, RemoteSettingsChanged) and not opened:
                    opened = True
                    names = {":method": "POST", ":scheme": "http", ":authority": "a", ":path": PROCESS}
                    client.send_headers(1, [*names.items(), ("te", "trailers"), ("content-type", "application/grpc")])
                    client.send_data(1, b"\0" + MESSAGE.to_bytes(4, "big"))
    finally:
        writer.transport.abort()


async def _answers(port: int, begun: Begun, request: Callable[[int], bytes]) -> None:
    """Requests one after the other over one connection; it is opened again when it is closed."""
    number = 0
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
            try:
                while True:
                    writer.write(request(number))
                    number += 1
                    await _read(reader)
                    if number == 2:
                        begun()
            finally:
                writer.transport.abort()
        await asyncio.sleep(0.05)


async def _read(reader: asyncio.StreamReader) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    if "content-length: " in head:
        await reader.readexactly(int(head.split("content-length: ")[1].split("\r\n")[0]))
        return
    while size := int(await reader.readuntil(b"\r\n"), 16):
        await reader.readexactly(size + 2)
    await reader.readexactly(2)


async def read_decisions(port: int, begun: Begun) -> None:
    """Asks for the dearest of the admin pages, again and again."""
    await _answers(port, begun, lambda _: b"GET /debug/decisions?last=200 HTTP/1.1\r\nhost: localhost\r\n\r\n")


async def read_metrics(port: int, begun: Begun) -> None:
    await _answers(port, begun, lambda _: b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n")


async def name_models(port: int, begun: Begun) -> None:
    """Asks for models that nobody has, another one each time; the model servers answer 404."""
    own = os.urandom(4).hex()

    def request(number: int) -> bytes:
        body = json.dumps({"model": f"bogus-{own}-{number}", "prompt": "x"}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        head += f"x-bench-mode: early\r\nx-bench-status: 404\r\ncontent-length: {len(body)}\r\n\r\n"
        return head.encode() + body

    await _answers(port, begun, request)


KINDS: dict[str, Callable[[int, Begun], Awaitable[None]]] = {
    "uploads": upload,
    "streams": stream,
    "decisions": read_decisions,
    "metrics": read_metrics,
    "models": name_models,
}


def give_way() -> None:
    """Attackers elsewhere take none of this machine's processors from those whose time is measured."""
    os.nice(10)
    with contextlib.suppress(OSError):  # where the kernel shares processors by session, nice counts within one only
        Path("/proc/self/autogroup").write_text("10")


async def attack(kind: str, port: int, count: int) -> None:
    started = 0
    in_force = asyncio.Event()

    def begun() -> None:
        nonlocal started
        started += 1
        if started >= count:
            in_force.set()

    async def one() -> None:
        while True:
            with contextlib.suppress(OSError):
                await KINDS[kind](port, begun)
            await asyncio.sleep(0.5)

    tasks = [asyncio.create_task(one()) for _ in range(count)]
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(in_force.wait(), HELD_BACK_S)
    print("up", flush=True)
    await asyncio.gather(*tasks)


if __name__ == "__main__":
    give_way()
    asyncio.run(attack(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
