"""The load generator in a process of its own, so that it does not hold up the loop of the gateway it measures."""

import asyncio
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import msgspec

from fairlead.bench.runner import OnProgress
from fairlead.bench.spec import Progress, RunResult, RunSpec
from fairlead.bench.worker import EXIT_CONFIG
from fairlead.model.errors import ConfigError, FairleadError

_KEPT_ERRORS = 4000


async def run_in_process(spec: RunSpec, on_progress: OnProgress | None = None) -> RunResult:
    """Run `spec` in a child process. `on_progress` is called on this loop. Cancelling ends the child.

    Raises ConfigError for a spec that cannot be run, FairleadError if the child fails.
    """
    with tempfile.TemporaryDirectory(prefix="fairlead-load-") as folder:
        path = Path(folder, "result")
        arguments = (sys.executable, "-m", "fairlead.bench.worker", str(path))
        child = await asyncio.create_subprocess_exec(*arguments, stdin=PIPE, stdout=PIPE, stderr=PIPE)
        try:
            complaint = await _follow(child, spec, on_progress)
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
        if child.returncode == EXIT_CONFIG:
            raise ConfigError(complaint, "$", "load generator")
        if child.returncode:
            raise FairleadError(f"the load generator failed with exit code {child.returncode}: {complaint}")
        return await asyncio.to_thread(_read_result, path)


async def _follow(child: Process, spec: RunSpec, on_progress: OnProgress | None) -> str:
    """Hand over the spec, pass progress on until the child ends; returns what it wrote to standard error."""
    assert child.stdin is not None and child.stdout is not None and child.stderr is not None
    errors = asyncio.create_task(_read_tail(child.stderr))
    try:
        child.stdin.write(msgspec.json.encode(spec))
        child.stdin.close()
        while line := await child.stdout.readline():
            if on_progress is not None:
                on_progress(msgspec.json.decode(line, type=Progress))
        complaint = await errors
    finally:
        errors.cancel()
    await child.wait()
    return complaint


async def _read_tail(stream: asyncio.StreamReader) -> str:
    tail = b""
    while piece := await stream.read(65536):
        tail = (tail + piece)[-_KEPT_ERRORS:]
    return tail.decode(errors="replace").strip()


def _read_result(path: Path) -> RunResult:
    return msgspec.msgpack.decode(path.read_bytes(), type=RunResult)
