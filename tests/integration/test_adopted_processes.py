"""Commands that may be process 1 of a container collect the processes that they adopt."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from child_environment import environment

PATIENCE_S = 60.0
#: Becomes the command of its arguments, with one process that another one left. It prints that one's id.
_ADOPTS = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
if not os.fork():
    os.setsid()
    left = os.fork() or os.execvp("sleep", ["sleep", "60"])
    print(left, flush=True)
    os._exit(0)
os.wait()
os.execv(sys.executable, [sys.executable, "-m", "fairlead", *sys.argv[1:]])
"""


@pytest.mark.parametrize(
    "command",
    [
        ["serve", "f.yaml"],
        ["indexer", "f.yaml", "--listen", "127.0.0.1:0"],
        ["scheduler", "serve", "cost-model", "--listen", "127.0.0.1:0"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_what_ends_leaves_no_zombie(command: list[str], tmp_path: Path) -> None:
    text = "gateway: none\nendpoints: [127.0.0.1:1]\nextProc: {port: 0}\nadmin: {port: 0}\n"
    (tmp_path / "f.yaml").write_text(text)
    process = subprocess.Popen(
        [sys.executable, "-c", _ADOPTS, *command],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    left = int(process.stdout.readline())
    try:
        said = ""
        while "ready" not in said and "serving" not in said:
            line = process.stdout.readline()
            assert line, said
            said += line
        os.kill(left, signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE_S
        while Path("/proc", str(left)).exists():
            assert time.monotonic() < deadline, Path("/proc", str(left), "status").read_text()
            time.sleep(0.02)
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
