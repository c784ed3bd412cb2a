"""The process of `apiserver/`: started, spoken to, stopped, killed, frozen."""

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: Most of the server's CPU time is Go's collector, unless it may use some memory: with a limit of 160 MiB, three
#: quarters of it.
MEMORY = {"GOGC": "400", "GOMEMLIMIT": "640MiB"}


class Failed(AssertionError):
    """The process ended or refused; the text holds the end of its log."""


class Process:
    """`directory` must be short: etcd's socket lies in it, and a socket's path has 107 characters at most."""

    def __init__(self, binary: Path, directory: Path, arguments: Sequence[str] = ()) -> None:
        self.log = directory / "apiserver.log"
        with open(self.log, "ab") as log:
            self._child = subprocess.Popen(
                [str(binary), "-dir", str(directory), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **MEMORY},
            )
        self.pid = self._child.pid
        self.url: str = self._answer()["url"]

    def ask(self, command: str) -> dict[str, Any]:
        """A line to standard input, and the answer."""
        assert self._child.stdin is not None
        self._child.stdin.write(f"{command}\n")
        self._child.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            self.stop()
            raise Failed(f"the API server ended: {self.log.read_text()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        if answer["event"] == "failed":
            raise Failed(answer["error"])
        return answer

    @property
    def running(self) -> bool:
        return self._child.poll() is None

    def stop(self) -> None:
        """As at the end of a test: standard input ends, and so does the process, within 6 s."""
        if self._child.stdin is not None:
            self._child.stdin.close()
        try:
            self._child.wait(15)
        except subprocess.TimeoutExpired:
            self._child.kill()
        self._reap()

    def kill(self) -> None:
        self._child.kill()
        self._reap()

    def freeze(self) -> None:
        """Connections stay open, and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def _reap(self) -> None:
        self._child.wait()
        for stream in (self._child.stdin, self._child.stdout):
            if stream is not None and not stream.closed:
                stream.close()
