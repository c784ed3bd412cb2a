"""The load generator as a process of its own: `python -m fairlead.bench.worker RESULT_FILE`, started by
`process.run_in_process`.

A `RunSpec` comes in as JSON on standard input, progress goes out as JSON lines on standard output, the result as
MessagePack into the file. A parent that goes away breaks the pipe, and with it the run.
"""

import asyncio
import os
import resource
import sys
from contextlib import suppress

import msgspec

from fairlead.bench.runner import run_spec
from fairlead.bench.spec import Progress, RunSpec
from fairlead.model.errors import ConfigError

#: Exit code for a run that its spec makes impossible; standard error then holds the reason.
EXIT_CONFIG = 2


def main(result_path: str) -> int:
    """Returns the process's exit code."""
    allow_many_sockets()
    output = sys.stdout.fileno()
    os.set_blocking(output, False)

    def report(progress: Progress) -> None:
        # A parent too busy to read must not stop the clock of what is measured. A short line goes out whole or not at
        # all.
        with suppress(BlockingIOError):
            os.write(output, msgspec.json.encode(progress) + b"\n")

    try:
        spec = msgspec.json.decode(sys.stdin.buffer.read(), type=RunSpec)
        result = asyncio.run(run_spec(spec, report))
    except (ConfigError, msgspec.ValidationError) as error:
        print(error, file=sys.stderr)
        return EXIT_CONFIG
    except (BrokenPipeError, KeyboardInterrupt):
        return 1
    with open(result_path, "wb") as file:
        file.write(msgspec.msgpack.encode(result))
    return 0


def allow_many_sockets() -> None:
    """Each request in flight holds a socket; a common soft limit is 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else 1 << 20
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
