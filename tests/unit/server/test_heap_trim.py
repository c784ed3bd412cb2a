"""Freed memory is given back once it is not used again."""

import asyncio
import subprocess
import sys

import pytest

from fairlead.server.live.memory import HeapTrim

PROGRAM = """
import asyncio
from fairlead.server.live.memory import HeapTrim, keep_heap

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

async def main():
    keep_heap()
    trim = HeapTrim(asyncio.get_running_loop(), interval_s=0.05)
    calm = resident()
    kept = [bytes(1 << 20) for _ in range(150)]
    last = bytes(1 << 20)  # above them: without a trim they stay
    busy = resident()
    await asyncio.sleep(0.2)
    del kept
    await asyncio.sleep(0.5)
    trims = trim.trims
    await asyncio.sleep(0.3)
    print(busy - calm > 100 << 20, resident() - calm < 30 << 20, trims, trim.trims)
    trim.close()

asyncio.run(main())
"""


def test_the_process_is_small_again_after_a_burst() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    busy, small, trims, later = done.stdout.split()
    assert (busy, small, trims) == ("True", "True", later), done.stdout
    assert int(trims) in (1, 2)


async def test_without_glibc_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError

    monkeypatch.setattr("ctypes.CDLL", missing)
    HeapTrim(asyncio.get_running_loop()).close()
