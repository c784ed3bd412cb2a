"""A command that is told to end does so at once: one line, no traceback. Nothing that it started goes on. Simulations
end even if the command is killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ports import free_port_block

PATIENCE_S = 60.0


def until(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def others_of(session: int) -> list[int]:
    """Processes of a session, its first one left out."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[3] == str(session) and fields[0] != "Z" and folder.name != str(session):
            found.append(int(folder.name))
    return found


COMPARE = ("sim", "compare", "-w", "deep-research", "-p", "default", "-p", "random", "--seeds", "40")
PLAN = ("plan", "-w", "deep-research", "--slo", "ttft_p95=10s", "--seeds", "40")
ASKED = (signal.SIGINT, signal.SIGTERM)


@pytest.mark.parametrize(
    ("command", "asked", "where"),
    [
        *((command, asked, "foreground") for command in (COMPARE, ("demo",), PLAN) for asked in ASKED),
        *((command, signal.SIGTERM, "background") for command in (COMPARE, PLAN)),
        *((command, signal.SIGKILL, "foreground") for command in (COMPARE, PLAN)),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "name", None) or value[0],
)
def test_a_command_that_is_ended_takes_its_children_with_it(
    tmp_path: Path, command: tuple[str, ...], asked: signal.Signals, where: str
) -> None:
    more = ("--out", str(tmp_path / "out")) if command[0] != "demo" else ("--port", str(free_port_block()))
    # Shells start background jobs with SIGINT ignored; this test may be part of one.
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN if where == "background" else signal.default_int_handler)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "fairlead", *command, *more],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            start_new_session=True,
        )
    finally:
        signal.signal(signal.SIGINT, usual)
    try:
        until(lambda: len(others_of(process.pid)) >= 2 or process.poll() is not None, "it started nothing")
        if asked == signal.SIGINT:
            os.killpg(process.pid, asked)  # Ctrl-C
        else:
            process.send_signal(asked)
        said = process.communicate(timeout=PATIENCE_S)[1]
        if asked != signal.SIGKILL:
            assert process.returncode == 128 + asked, said
            assert "Traceback" not in said
            assert said.rstrip().endswith("interrupted" if asked == signal.SIGINT else "terminated")
        until(lambda: not others_of(process.pid), f"left over: {others_of(process.pid)}")
    finally:
        for left in [*others_of(process.pid), *([process.pid] if process.poll() is None else [])]:
            os.kill(left, signal.SIGKILL)
        process.wait()
