"""What a child says when it cannot start reaches the user once, without the command line. Children end with the demo,
however that ends."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from ports import free_port

from fairlead.core.errors import FairleadError
from fairlead.lab.demo import Child

_PARENT = """
import asyncio, os, sys
from fairlead.lab.demo import Child

async def main():
    async with Child("stub", "--port=" + sys.argv[1]) as child:
        await child.ready("http://127.0.0.1:" + sys.argv[1] + "/health")
        print(child.pid, flush=True)
        os.kill(os.getpid(), 9)

asyncio.run(main())
"""


async def test_the_childs_error_is_told_without_its_prefix() -> None:
    async with Child("serve", "/nowhere/at-all.yaml") as child:
        with pytest.raises(FairleadError) as told:
            await child.ready("http://127.0.0.1:1/", seconds=30.0)
    message = str(told.value)
    assert message.startswith("`fairlead serve` did not become ready: ")
    assert "at-all.yaml" in message
    assert "error:" not in message


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends children of a killed process on Linux only")
def test_a_killed_demo_leaves_no_child() -> None:
    command = [sys.executable, "-c", _PARENT, str(free_port())]
    parent = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)
    assert parent.returncode == -9
    command_line = Path(f"/proc/{int(parent.stdout)}/cmdline")
    until = time.monotonic() + 10.0
    while command_line.exists() and command_line.read_bytes():  # an ended process that nobody collected has none
        assert time.monotonic() < until
        time.sleep(0.05)
