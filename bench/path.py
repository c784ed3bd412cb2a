"""What one request costs the scheduler, counted: bytecodes, functions and files on the way of a 1 KB chat.

    python bench/path.py                    a table by part and by file
    python bench/path.py --functions        every function in the order of its first call
    python bench/path.py --top 20           the functions that run most bytecodes, those first
    python bench/path.py --json             one JSON object: bytecodes, functions, files, calls, parts, by_file
    python bench/path.py --against REV      the same with the sources of another revision of this repository, then both

The bytes that the embedded gateway sends for one request (`tests/data/path`, recorded) go through the real objects in
one process: HTTP/2 connection, session, pipeline, answer; the access log's entry ends it, eight requests later. There
are no sockets, and no other work. Each request has a prompt and ids of its own. Counting begins when caches are warm;
`bytecodes` and `calls` are means over `COUNTED` requests, so work that is done for many requests at once counts for its
share. The clock moves `STEP` seconds with each request. A function is on the way if it is called for most requests or
runs at least one bytecode per request; only the files of these count. Comprehensions belong to the function around
them.

Counts do not depend on the machine, but on the minor version of Python. A call into C is one bytecode however long it
takes: an operation of numpy over eight endpoints costs as much as dozens of bytecodes. So a change that replaces one
by the other is judged by `bench/extproc.py --against` and `bench/decision.py`.
"""

import argparse
import asyncio
import base64
import gc
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections import deque
from pathlib import Path
from random import Random
from types import CodeType, FrameType
from typing import Any

from _gateway import checked_out

ROOT = Path(__file__).parents[1]
RECORDING = ROOT / "tests" / "data" / "path" / "chat-1k.json"
ENDPOINTS = 8
IN_FLIGHT = 8
WARM = 256
#: A multiple of the records that observers count in one go.
COUNTED = 128
#: Seconds between two requests, on a clock of our own: what is done five times a second must not depend on how long
#: the counting takes.
STEP = 0.005
_SIBLINGS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")
_ID = re.compile(rb"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_WORDS = re.compile(rb'(?<="content":")[a-z ]+(?=")')

#: Beginning of a file's path → part; the first that fits counts.
PARTS = {
    "gateway/h2": "transport",
    "gateway/grpc_frames": "transport",
    "gateway/understand": "parse",
    "gateway/": "session",
    "core/headers": "session",
    "apis/": "parse",
    "core/apis": "parse",
    "core/tokens": "parse",
    "server/": "records",
    "core/records": "records",
    "plugins/": "policy",
    "core/policy": "policy",
    "core/profile": "policy",
    "core/predictor": "policy",
    "core/rates": "policy",
    "core/cost": "policy",
    "core/scheduler": "pipeline",
    "core/requests": "pipeline",
    "core/models": "pipeline",
    "core/events": "pipeline",
    "core/instructions": "pipeline",
    "core/": "fleet",
    "": "other",
}


class Transport:
    """In place of the socket's: keeps what was written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    family = socket.AF_INET

    def setsockopt(self, *_: Any) -> None: ...

    def get_extra_info(self, name: str) -> Any:
        return self if name == "socket" else None

    def set_write_buffer_limits(self, high: int) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def abort(self) -> None:
        raise AssertionError("the scheduler cut the connection")

    close = can_write_eof = abort


class Owner:
    """Of the connections."""

    def made(self, connection: Any) -> bool:
        return True

    def lost(self, connection: Any) -> None: ...


class Counter:
    """Counts what runs between `on` and `off`, this file excepted: bytecodes and calls by code object."""

    def __init__(self) -> None:
        self.bytecodes: dict[CodeType, int] = {}
        self.calls: dict[CodeType, int] = {}

    def _opcode(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            self.bytecodes[frame.f_code] += 1
        return self._opcode

    def _call(self, frame: FrameType, _event: str, _: Any) -> Any:
        code = frame.f_code
        if code.co_filename == __file__:
            return None
        self.calls[code] = self.calls.get(code, 0) + 1
        self.bytecodes.setdefault(code, 0)
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._opcode

    def _started(self, code: CodeType, _offset: int) -> Any:
        if code.co_filename == __file__:
            return sys.monitoring.DISABLE
        self.calls[code] = self.calls.get(code, 0) + 1
        return None

    def _instruction(self, code: CodeType, _offset: int) -> Any:
        if code.co_filename == __file__:
            return sys.monitoring.DISABLE
        self.bytecodes[code] = self.bytecodes.get(code, 0) + 1
        return None

    def on(self) -> None:
        if sys.version_info < (3, 12):
            sys.settrace(self._call)
            return
        monitoring = sys.monitoring
        monitoring.use_tool_id(monitoring.PROFILER_ID, "path")
        monitoring.register_callback(monitoring.PROFILER_ID, monitoring.events.PY_START, self._started)
        monitoring.register_callback(monitoring.PROFILER_ID, monitoring.events.INSTRUCTION, self._instruction)
        monitoring.set_events(monitoring.PROFILER_ID, monitoring.events.PY_START | monitoring.events.INSTRUCTION)

    def off(self) -> None:
        if sys.version_info < (3, 12):
            sys.settrace(None)
            return
        sys.monitoring.set_events(sys.monitoring.PROFILER_ID, 0)
        sys.monitoring.free_tool_id(sys.monitoring.PROFILER_ID)


class Time:
    """Of the scheduler that is counted."""

    now = 1000.0

    @classmethod
    def read(cls) -> float:
        return cls.now


class Gateway:
    """Plays the recorded bytes to two connections of one scheduler, with fresh ids and prompts."""

    def __init__(self) -> None:
        from fairlead.gateway import h2

        self._h2 = h2
        kept: dict[str, bytes] = {}
        for key, text in json.loads(RECORDING.read_text()).items():
            if key != "origin":
                kept[key] = base64.b64decode(text)
        self._request, self._entry = kept["request"], kept["log_entry"]
        self._opening, self._log_opening = kept["opening"], kept["log_opening"]
        found = re.search(rb"[0-9a-f]{8}\.[0-9a-f]{16}", self._entry)
        assert found is not None
        self._recorded_lease = found.group()
        self._stream = 7
        self._rng = Random(1)
        self._waiting: deque[bytes] = deque()
        self._requests, self._log = Transport(), Transport()

    def connect(self, server: Any) -> None:
        """`server()` makes a connection."""
        self._connection, self._log_connection = server(), server()
        self._connection.connection_made(self._requests)
        self._log_connection.connection_made(self._log)
        self._feed(self._log_connection, self._log_opening)
        self._feed(self._log_connection, self._h2.SETTINGS_ACK)
        self._feed(self._connection, self._opening)

    def play(self, counter: Counter | None) -> None:
        """One request, and the end of another one."""
        Time.now += STEP
        request, entry = self._next_request(), b""
        if len(self._waiting) == IN_FLIGHT:
            entry = self._entry.replace(self._recorded_lease, self._waiting.popleft())
        self._requests.written.clear()
        if counter is not None:
            counter.on()
        self._feed(self._connection, request)
        if entry:
            self._feed(self._log_connection, entry)
        if counter is not None:
            counter.off()
        (answer,) = self._requests.written
        found = re.search(rb"[0-9a-f]{8}\.[0-9a-f]{16}", answer)
        assert found is not None, "the request was not routed"
        self._waiting.append(found.group())

    def _feed(self, connection: Any, data: bytes) -> None:
        connection.get_buffer(-1)[: len(data)] = data
        connection.buffer_updated(len(data))

    def _next_request(self) -> bytes:
        """The recorded one as the next stream of its connection. Its closing RST_STREAM comes first, as that of the
        stream before: the gateway's resets are read with the next request."""
        data, frames, last = self._request, list[bytes](), b""
        pos, stream = 0, self._stream
        while pos < len(data):
            length, flags, _ = self._h2.HEAD.unpack_from(data, pos)
            stop = pos + self._h2.HEAD_SIZE + (length >> 8)
            payload = data[pos + self._h2.HEAD_SIZE : stop]
            if length & 0xFF == self._h2.RST_STREAM:
                last = self._h2.HEAD.pack(length, flags, stream - 2) + payload if stream > 7 else b""
            else:
                frames.append(self._h2.HEAD.pack(length, flags, stream) + payload)
            pos = stop
        self._stream += 2
        whole = _ID.sub(lambda _: str(_uuid(self._rng)).encode(), last + b"".join(frames))
        return _WORDS.sub(lambda words: _shuffled(words.group(), self._rng), whole)


def _uuid(rng: Random) -> str:
    digits = f"{rng.getrandbits(128):032x}"
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _shuffled(text: bytes, rng: Random) -> bytes:
    words = text.split(b" ")
    rng.shuffle(words)
    return b" ".join(words)


def _scheduler() -> Any:
    """What makes connections of a scheduler as `fairlead serve` runs it, over endpoints that were sampled once."""
    from fairlead.compat.load import load
    from fairlead.core.endpoint import Endpoint, Sample
    from fairlead.core.events import EndpointUp, MetricsSampled
    from fairlead.gateway.h2_connection import H2Connection, Scratch
    from fairlead.gateway.h2_limits import H2Limits
    from fairlead.gateway.health import HealthService
    from fairlead.gateway.server import routes
    from fairlead.server.live import wiring

    loop = asyncio.get_running_loop()
    loop.time = Time.read  # type: ignore[method-assign]
    clock = vars(wiring).get("LoopClock")  # older revisions have none
    if clock is not None:
        clock.time = staticmethod(Time.read)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"seed": 1, "endpoints": [{"address": "127.0.0.1", "port": 8000}]}, file)
        file.flush()
        core = wiring.Core(load(Path(file.name)), loop, None, print, print)
    core.driver.start()
    for number in range(ENDPOINTS):
        endpoint = Endpoint(f"default/e{number}", f"127.0.0.1:{8000 + number}")
        core.scraper.up(endpoint)
        core.driver.feed(EndpointUp(endpoint))
        sample = Sample(waiting=0.0, running=1.0, kv_usage=0.1, block_size=16, num_blocks=27_000)
        core.driver.feed(MetricsSampled(endpoint.id, loop.time(), sample))
    served, limits, scratch = routes(core.host, HealthService()), H2Limits(), Scratch()
    return lambda: H2Connection(served, Owner(), limits, scratch, merge_wakeups=True)


async def count() -> Counter:
    gateway, counter = Gateway(), Counter()
    gateway.connect(_scheduler())
    for _ in range(WARM):
        gateway.play(None)
    gc.collect()
    gc.disable()
    try:
        for _ in range(COUNTED):
            gateway.play(counter)
    finally:
        gc.enable()
    return counter


def _where(code: CodeType) -> str:
    """Short name of a function's file."""
    before, _, file = code.co_filename.rpartition("/src/fairlead/")
    return file if before else "/".join(Path(code.co_filename).parts[-2:])


def _part(file: str) -> str:
    return next(part for prefix, part in PARTS.items() if file.startswith(prefix))


def summarise(counter: Counter) -> dict[str, Any]:
    """Figures per request. `order`: (file, function, calls, bytecodes), in the order of the first calls."""
    order: dict[tuple[str, str], list[float]] = {}
    for code, calls in counter.calls.items():
        name, sibling = code.co_qualname, code.co_name in _SIBLINGS
        row = order.setdefault((_where(code), name.rpartition(".<locals>")[0] if sibling else name), [0.0, 0.0])
        row[0] += 0.0 if sibling else calls / COUNTED
        row[1] += counter.bytecodes.get(code, 0) / COUNTED
    on_the_way = {key: row for key, row in order.items() if row[0] >= 0.5 or row[1] >= 1.0}
    files: dict[str, float] = {}
    parts: dict[str, float] = {}
    for (file, _), (_, bytecodes) in on_the_way.items():
        files[file] = files.get(file, 0.0) + bytecodes
        parts[_part(file)] = parts.get(_part(file), 0.0) + bytecodes
    return {
        "bytecodes": round(sum(row[1] for row in order.values())),
        "functions": len(on_the_way),
        "files": len(files),
        "calls": round(sum(row[0] for row in order.values())),
        "parts": _descending(parts),
        "by_file": _descending(files),
        "order": [[file, name, round(calls, 2), round(n, 1)] for (file, name), (calls, n) in on_the_way.items()],
    }


def _descending(figures: dict[str, float]) -> dict[str, int]:
    return {name: round(figure) for name, figure in sorted(figures.items(), key=lambda item: -item[1])}


def measure(root: Path) -> dict[str, Any]:
    """The same in a process of its own, with the program and the sources under `root`."""
    program = root / "bench" / "path.py"
    command = [sys.executable, str(program if program.exists() else __file__), "--json", "--functions"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(root / "src")}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{root}: {done.stderr.strip()[-2000:]}")
    return dict(json.loads(done.stdout))


def show(found: dict[str, Any], functions: bool, top: int) -> None:
    whole = found["bytecodes"]
    print(
        f"{whole} bytecodes in {found['calls']} calls of {found['functions']} functions in {found['files']} files,"
        f" for one request"
    )
    for kind in ("parts", "by_file"):
        print()
        for name, number in found[kind].items():
            print(f"{number:7} {number / whole:6.1%}  {name}")
    if functions or top:
        rows = sorted(found["order"], key=lambda row: -row[3])[:top] if top else found["order"]
        print("\n  calls  bytecodes")
        for file, name, calls, number in rows:
            print(f"{calls:7} {number:10}  {file}: {name}")


def compare(found: dict[str, Any], other: dict[str, Any], revision: str) -> None:
    print(f"{'':30} {'here':>8} {revision[:12]:>12}")
    for key in ("bytecodes", "functions", "files", "calls"):
        print(f"{key:30} {found[key]:8} {other[key]:12}")
    print()
    for key in ("parts", "by_file"):
        rows = {name: (found[key].get(name, 0), other[key].get(name, 0)) for name in {*found[key], *other[key]}}
        for name, (present, former) in sorted(rows.items(), key=lambda item: -max(item[1])):
            print(f"{name:30} {present:8} {former:12}")
        print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--functions", action="store_true", help="every function, in the order of its first call")
    parser.add_argument("--top", type=int, default=0, metavar="N", help="the N functions that run most bytecodes")
    parser.add_argument("--against", metavar="REV", help="count another revision of this repository too")
    arguments = parser.parse_args()
    if arguments.against:
        with checked_out(arguments.against) as place:
            found, other = measure(ROOT), measure(place)
        if arguments.json:
            print(json.dumps({"here": found, arguments.against: other}))
        else:
            compare(found, other, arguments.against)
        return
    found = summarise(asyncio.run(count()))
    if arguments.json:
        if not arguments.functions:
            del found["order"]
        print(json.dumps(found))
    else:
        show(found, arguments.functions, arguments.top)


if __name__ == "__main__":
    main()
