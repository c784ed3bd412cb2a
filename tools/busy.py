"""Runs a command while every core is kept busy, as on a machine that others use too.

    python tools/busy.py COMMAND …      exit code of the command

The burning processes end with the command, and in any case after two hours.
"""

import multiprocessing
import os
import subprocess
import sys
import time

MOST_SECONDS = 2 * 3600


def burn(parent: int) -> None:
    """Ends when its parent has gone, too."""
    end = time.monotonic() + MOST_SECONDS
    while time.monotonic() < end and os.getppid() == parent:
        for _ in range(1_000_000):
            pass


def main(command: list[str]) -> int:
    count = len(os.sched_getaffinity(0))
    burners = [multiprocessing.Process(target=burn, args=(os.getpid(),), daemon=True) for _ in range(count)]
    for burner in burners:
        burner.start()
    try:
        return subprocess.run(command, check=False).returncode
    finally:
        for burner in burners:
            burner.terminate()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
