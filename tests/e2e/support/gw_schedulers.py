"""Schedulers in other processes: the Python one, and the examples in Go and JavaScript, copied away and built there."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Self

import pytest
from gw_processes import REPOSITORY, Child
from ports import free_ports

from fairlead.cli.scheduler import contract

sys.path.insert(0, str(REPOSITORY / "tests" / "kube" / "support"))

from kr_build import COMPILER  # isort: skip  (the same, so that Go compiles once what both need)

EXAMPLES = REPOSITORY / "examples"
KINDS = ("python", "go", "node")
_BUILD_SECONDS = 300.0


def missing(what: str) -> None:
    """Skip, with the reason; on CI nothing may be missing."""
    if os.environ.get("FAIRLEAD_REQUIRE_ALL"):
        pytest.fail(what)
    pytest.skip(what)


def _run(directory: Path, *command: str) -> None:
    try:
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=_BUILD_SECONDS)
    except subprocess.TimeoutExpired:
        missing(f"{' '.join(command)} took longer than {_BUILD_SECONDS:g} s")
        return
    if done.returncode:
        missing(f"{' '.join(command)} failed (is the registry within reach?): {done.stderr[-1500:]}")


def build(kind: str, directory: Path) -> list[str]:
    """The command that serves on the address which is put behind it."""
    if kind == "python":
        return [sys.executable, "-m", "fairlead", "scheduler", "serve", "cost-model", "--listen"]
    if kind == "go":
        if shutil.which("go") is None:
            missing("go is not installed")
        copied = shutil.copytree(EXAMPLES / "scheduler-go", directory / "source")
        settings = ("-trimpath", COMPILER, "-ldflags=-s -w")
        _run(copied, "env", "CGO_ENABLED=0", "go", "build", *settings, "-o", str(directory / "scheduler-go"), ".")
        return [str(directory / "scheduler-go"), "-listen"]
    if shutil.which("node") is None or shutil.which("npm") is None:
        missing("node or npm is not installed")
    without = shutil.ignore_patterns("node_modules", "scheduler.proto")
    copied = shutil.copytree(EXAMPLES / "scheduler-node", directory / "source", ignore=without)
    (copied / "scheduler.proto").write_text(contract())
    quiet = ("--no-audit", "--no-fund", "--ignore-scripts")
    _run(copied, "npm", "pack", "--ignore-scripts", "--pack-destination", str(directory))
    (package,) = directory.glob("*.tgz")
    _run(directory, "npm", "install", "--prefix", str(directory), "--prefer-offline", *quiet, str(package))
    return [str(directory / "node_modules" / ".bin" / "fairlead-scheduler-node"), "--listen"]


class SchedulerProcess(Child):
    """One on a free port; `again` starts it there once more."""

    def __init__(self, kind: str, command: list[str], directory: Path) -> None:
        super().__init__(f"the scheduler in {kind}", directory / f"scheduler-{kind}.log")
        self._command = command
        self.address = f"127.0.0.1:{free_ports(1)[0]}"

    def again(self) -> Self:
        self.spawn(*self._command, self.address)
        self.poll_until(self._listens)
        return self

    def end(self, gently: bool = False) -> None:
        """At once: one that sleeps over its work would do so for as long as there is some."""
        super().end(gently)

    def _listens(self) -> bool:
        host, port = self.address.split(":")
        with socket.create_connection((host, int(port)), timeout=5):
            return True
