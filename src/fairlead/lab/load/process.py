"""The load generator in a process of its own, so that it does not block the loop of the gateway that it measures.

`run_in_process` starts `python -m fairlead.lab.load.process RESULT_FILE`. That reads a `RunSpec` as JSON from standard
input, writes progress as JSON lines to standard output, and the result as MessagePack to the file. If the parent exits,
the pipe of standard output breaks and the run ends.
"""

import asyncio
import os
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from pathlib import Path

import msgspec

from fairlead.core.errors import ConfigError, FairleadError
from fairlead.gateway.memory import raise_file_limit
from fairlead.lab.load.runner import OnProgress, run
from fairlead.lab.load.spec import Progress, RunResult, RunSpec
from fairlead.server.python import python_module

#: Exit code for a spec that cannot be run; the reason is on standard error.
EXIT_CONFIG = 2
#: Bytes of the child's standard error that are kept, the last ones.
_KEPT_ERRORS = 4000


def main(result_path: str) -> int:
    """Run the spec and return the exit code of the process."""
    raise_file_limit()  # each request in flight holds a socket
    output = sys.stdout.fileno()
    os.set_blocking(output, False)

    def report(progress: Progress) -> None:
        # A busy parent must not block the measurement. A short line is written completely or not at all.
        with suppress(BlockingIOError):
            os.write(output, msgspec.json.encode(progress) + b"\n")

    try:
        spec = msgspec.json.decode(sys.stdin.buffer.read(), type=RunSpec)
        result = asyncio.run(run(spec.target, spec.workload, spec.arrivals, spec.options, report, spec.name))
    except (ConfigError, msgspec.ValidationError) as error:
        print(error, file=sys.stderr)
        return EXIT_CONFIG
    except (BrokenPipeError, KeyboardInterrupt):
        return 1
    with open(result_path, "wb") as file:
        file.write(msgspec.msgpack.encode(result))
    return 0


async def run_in_process(spec: RunSpec, on_progress: OnProgress | None = None) -> RunResult:
    """Run `spec` in a child process. `on_progress` is called on this loop. Cancelling kills the child.

    Raises ConfigError for a spec that cannot be run, FairleadError if the child fails.
    """
    with tempfile.TemporaryDirectory(prefix="fairlead-load-") as folder:
        path = Path(folder, "result")
        arguments = (*python_module("fairlead.lab.load.process"), str(path))
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
    """Send the spec and pass on progress until the child ends. Returns what the child wrote to standard error."""
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
