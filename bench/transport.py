"""What one exchange costs inside the gRPC transports: `python bench/transport.py [--json] [--quick]`.

The client imitates Envoy: raw HTTP/2 frames, byte-identical header blocks, one stream per request, a lone RST_STREAM
when the answer's trailers are there. The server runs in a process of its own and reports its CPU time (getrusage).

* `unary`: HEADERS and one message in, one message and trailers out.
* `pick`: HEADERS and three messages in, two messages and trailers out, as when the picker leaves with the pick.

"saturated" keeps 64 streams in flight on one connection; "200/s" sends one exchange every 5 ms.
"""

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from hpack import Encoder

from fairlead.gateway import h2
from fairlead.gateway.grpc_server import GrpcServer
from fairlead.gateway.h2_server import H2Server
from fairlead.gateway.stream import ServerStream

PATH = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
IN_FLIGHT = 64
MESSAGE = b"m" * 120
#: Label → arguments of the server process.
SERVERS = {
    "own, TCP": ["own", "tcp"],
    "own, TCP, merged wake-ups": ["merge", "tcp"],
    "own, Unix socket": ["own", "unix"],
    "grpc.aio, TCP": ["aio", "tcp"],
}
#: Messages in, messages out.
SHAPES = {"unary": (1, 1), "pick": (3, 2)}


# ---- the server process ----


class Answering:
    """Answers the `awaited`-th message with `answers` messages and OK."""

    def __init__(self, stream: ServerStream, awaited: int, answers: int) -> None:
        self._stream = stream
        self._left = awaited
        self._answers = (MESSAGE,) * answers

    def on_message(self, message: bytes) -> None:
        self._left -= 1
        if not self._left:
            self._stream.send(*self._answers)
            self._stream.finish()

    def on_half_close(self) -> None:
        self._stream.finish()

    def on_lost(self, why: str) -> None:
        pass


async def serve(kind: str, where: str, shape: str) -> None:
    """Prints the address; then, for every line on stdin, CPU seconds so far and the own transport's counters."""
    awaited, answers = SHAPES[shape]

    def factory(stream: ServerStream, headers: Mapping[str, str]) -> Answering:
        return Answering(stream, awaited, answers)

    server: Any = (
        GrpcServer({PATH: factory}) if kind == "aio" else H2Server({PATH: factory}, merge_wakeups=kind == "merge")
    )
    if where == "tcp":
        print(await server.listen("127.0.0.1"), flush=True)
    else:
        path = os.path.join(tempfile.mkdtemp(), "transport.sock")
        await server.listen_unix(path)
        print(path, flush=True)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.readline():
        usage = resource.getrusage(resource.RUSAGE_SELF)
        print(json.dumps([usage.ru_utime, usage.ru_stime, usage.ru_nvcsw]), flush=True)
    await server.close()


# ---- the client ----


class Gateway(asyncio.BufferedProtocol):
    """Opens exchanges, counts those whose trailers came, resets each as Envoy does."""

    def __init__(self, messages: int) -> None:
        encoder = Encoder()
        encoder.header_table_size = 0
        fields = [(":method", "POST"), (":scheme", "http"), (":path", PATH), (":authority", "ext_proc")]
        fields += [("te", "trailers"), ("content-type", "application/grpc"), ("x-envoy-internal", "true")]
        fields += [("x-forwarded-for", "10.0.0.1")]
        self._size_update = encoder.encode([])
        self._block = encoder.encode(fields, huffman=True)
        self._body = b"\0" + len(MESSAGE).to_bytes(4, "big") + MESSAGE
        self._messages = messages
        self._buffer = bytearray(1 << 20)
        self._carry = b""
        self._next = 1
        self._to_open = 0
        self.done = 0
        self.target = 0
        self.reached: asyncio.Future[None] | None = None
        self.ready = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(h2.PREFACE + h2.settings({h2.INITIAL_WINDOW_SIZE: 65536}) + h2.window_update(0, 2**30))

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = self._carry + bytes(memoryview(self._buffer)[:nbytes])
        pos, out, ended = 0, [], 0
        while len(data) - pos >= h2.HEAD_SIZE:
            length, flags, stream = h2.HEAD.unpack_from(data, pos)
            stop = pos + h2.HEAD_SIZE + (length >> 8)
            if stop > len(data):
                break
            kind = length & 0xFF
            if kind == h2.HEADERS and flags & h2.END_STREAM:
                ended += 1
                out.append(h2.rst_stream(stream, 0))
            elif kind == h2.SETTINGS and not flags & h2.ACK:
                out.append(h2.SETTINGS_ACK)
                self.ready.set_result(None)
            elif kind == h2.PING and not flags & h2.ACK:
                out.append(h2.ping(data[stop - 8 : stop], ack=True))
            elif kind == h2.GOAWAY or (kind == h2.RST_STREAM and data[stop - 4 : stop] != b"\0\0\0\0"):
                self._fail(RuntimeError(f"the server sent frame {kind}: {data[pos:stop]!r}"))
            pos = stop
        self._carry = data[pos:]
        self.done += ended
        again = min(ended, self._to_open)
        self._to_open -= again
        out += [self._exchange() for _ in range(again)]
        if out:
            self._transport.write(b"".join(out))
        if self.reached is not None and self.done >= self.target and not self.reached.done():
            self.reached.set_result(None)

    def _fail(self, error: Exception) -> None:
        if self.reached is not None and not self.reached.done():
            self.reached.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(ConnectionError("the server closed the connection"))

    def _exchange(self) -> bytes:
        stream, self._next = self._next, self._next + 2
        block, self._size_update = self._size_update + self._block, b""
        data = h2.frame(h2.DATA, 0, stream, self._body) * self._messages
        return h2.frame(h2.HEADERS, h2.END_HEADERS, stream, block) + data

    def aim(self, count: int) -> asyncio.Future[None]:
        """Done after `count` further exchanges."""
        self.target = self.done + count
        self.reached = asyncio.get_running_loop().create_future()
        return self.reached

    def open(self, count: int = 1, later: int = 0) -> None:
        """Open `count` exchanges now and `later` more as others end."""
        self._to_open = later
        self._transport.write(b"".join(self._exchange() for _ in range(count)))


async def connect(address: str, messages: int) -> Gateway:
    loop = asyncio.get_running_loop()
    if address.isdigit():
        _, gateway = await loop.create_connection(lambda: Gateway(messages), "127.0.0.1", int(address))
    else:
        _, gateway = await loop.create_unix_connection(lambda: Gateway(messages), address)
    await gateway.ready
    return gateway


async def saturate(gateway: Gateway, count: int) -> None:
    reached = gateway.aim(count)
    gateway.open(IN_FLIGHT, count - IN_FLIGHT)
    await reached


async def trickle(gateway: Gateway, count: int) -> None:
    reached = gateway.aim(count)
    loop = asyncio.get_running_loop()
    start = loop.time()
    for turn in range(count):
        await asyncio.sleep(start + turn * 0.005 - loop.time())
        gateway.open()
    await reached


# ---- measuring ----


def usage(server: "subprocess.Popen[str]") -> list[float]:
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write("\n")
    server.stdin.flush()
    return list(json.loads(server.stdout.readline()))


async def measure(kind: str, where: str, shape: str, load: Callable[[Gateway, int], Any], count: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--serve", kind, where, shape]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
    try:
        assert server.stdout is not None
        gateway = await connect(server.stdout.readline().strip(), SHAPES[shape][0])
        await saturate(gateway, 2 * IN_FLIGHT)
        loop = asyncio.get_running_loop()
        before, started = usage(server), loop.time()
        await load(gateway, count)
        after, ended = usage(server), loop.time()
    finally:
        assert server.stdin is not None
        server.stdin.close()
        server.wait(60)
    user, system, wakeups = (b - a for a, b in zip(before, after, strict=True))
    return {
        "cpu_us": round((user + system) / count * 1e6, 1),
        "user_us": round(user / count * 1e6, 1),
        "system_us": round(system / count * 1e6, 1),
        "wakeups": round(wakeups / count, 3),
        "per_second": round(count / (ended - started)),
    }


async def run(quick: bool) -> dict[str, dict[str, Any]]:
    """Label → the round with the least CPU. Other work on the machine only ever adds, and comes in phases: so every
    round measures everything once."""
    rounds, scale = (1, 1) if quick else (5, 60)
    results: dict[str, dict[str, Any]] = {}
    for _ in range(rounds):
        for shape in SHAPES:
            for label, (kind, where) in SERVERS.items():
                saturated = 100 * scale if kind == "aio" else 500 * scale
                for name, load, count in (("saturated", saturate, saturated), ("200/s", trickle, 10 * scale)):
                    row = await measure(kind, where, shape, load, count)
                    best = results.setdefault(f"{shape}, {label}, {name}", row)
                    if row["cpu_us"] < best["cpu_us"]:
                        results[f"{shape}, {label}, {name}"] = row
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="fewer exchanges, one round")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve(*arguments.serve))
        return
    results = asyncio.run(run(arguments.quick))
    if arguments.json:
        print(json.dumps(results))
        return
    print(f"{'CPU of the server, µs per exchange':48} {'all':>7} {'user':>7} {'system':>7} {'reads':>7} {'per s':>7}")
    for label, row in results.items():
        print(
            f"{label:48} {row['cpu_us']:7.1f} {row['user_us']:7.1f} {row['system_us']:7.1f} {row['wakeups']:7.2f}"
            f" {row['per_second']:7}"
        )


if __name__ == "__main__":
    main()
