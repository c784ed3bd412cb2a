"""Runs the blocks of a page that are marked `run`, as a reader would.

    ```sh run                              must end with 0
    ```console run                         `$ command` lines, and what they must print; … stands for anything
    ```sh run background until="text"      stays until the page's end; the next block waits for the text
    ```yaml run file=NAME                  a file, for the blocks after it

All blocks of a page share a new directory, in which `examples` is the repository's. Ports are moved to free ones, so
that pages can be tested beside a running Fairlead: 8080 (gateway), 9090 (admin), 9002 (ext_proc), 9100 (scheduler),
8000 to 8009.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from child_environment import environment
from msgspec import Struct
from ports import free_ports

ROOT = Path(__file__).parents[3]
LIMIT_S = 240.0
_BLOCK = re.compile(r"^```(?P<kind>\w+) run(?P<words>[^\n]*)\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL)
_PORTS = (*range(8000, 8010), 8080, 9090, 9002, 9100)


class Block(Struct, frozen=True):
    kind: str
    body: str
    file: str = ""
    until: str = ""
    background: bool = False


def blocks(text: str) -> list[Block]:
    found = []
    for block in _BLOCK.finditer(text):
        file = re.search(r"\bfile=(\S+)", block["words"])
        until = re.search(r'\buntil="([^"]+)"', block["words"])
        found.append(
            Block(
                block["kind"],
                block["body"],
                file[1] if file else "",
                until[1] if until else "",
                "background" in block["words"].split(),
            )
        )
    return found


class Page:
    """A reader with a shell."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
        self._left: list[subprocess.Popen[bytes]] = []
        self._env = {
            **environment(),
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
            "HOME": str(folder),
            "NO_COLOR": "1",
            "COLUMNS": "200",
            # What a page installs is gone with its directory: nobody's environment changes, and nothing is downloaded.
            "PIP_TARGET": str(folder / "installed"),
            "PIP_NO_DEPS": "1",
            "PIP_NO_BUILD_ISOLATION": "0",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(folder / "installed"), os.environ.get("PYTHONPATH")))),
        }
        (folder / "examples").symlink_to(ROOT / "examples")

    def run(self, text: str) -> int:
        """How many blocks were run. Raises `AssertionError` with the block and what it printed."""
        found = blocks(text)
        for block in found:
            self._one(block)
        return len(found)

    def close(self) -> None:
        for process in reversed(self._left):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in self._left:
            try:
                process.wait(20.0)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(5.0)

    def _one(self, block: Block) -> None:
        body = self._moved(block.body)
        if block.file:
            (self._folder / block.file).write_text(body + self._listening(block, body))
        elif block.background:
            self._start(body, block.until)
        elif block.kind == "console":
            self._console(body)
        else:
            self._shell(body)

    def _moved(self, text: str) -> str:
        return re.sub(r"(?<![\d.])\d{4}(?!\d)", lambda found: str(self._ports.get(int(found[0]), found[0])), text)

    def _listening(self, block: Block, body: str) -> str:
        """A configuration with endpoints is one to serve: its own ports are the defaults, and move too."""
        if block.kind not in ("yaml", "yml") or not body.startswith("endpoints:"):
            return ""
        ports = {"gateway": 8080, "admin": 9090, "extProc": 9002}
        return "".join(
            f"{key}: {{port: {self._ports[port]}}}\n" for key, port in ports.items() if f"\n{key}:" not in body
        )

    def _shell(self, body: str) -> str:
        body = self._explained(body)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", body],
            cwd=self._folder,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, f"exit code {done.returncode} of\n{body}\n{done.stdout}"
        return done.stdout

    def _explained(self, body: str) -> str:
        """`fairlead explain ID` asks the admin port, whose default moved."""
        return re.sub(r"(fairlead explain \S+)$", rf"\1 http://127.0.0.1:{self._ports[9090]}", body, flags=re.MULTILINE)

    def _console(self, body: str) -> None:
        for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
            command, *wanted = part.strip("\n").split("\n")
            printed = self._shell(command).splitlines()
            rest = iter(printed)
            for line in wanted:
                pattern = ".*".join(map(re.escape, line.strip().split("…")))
                assert any(re.fullmatch(pattern, one.strip()) for one in rest), (
                    f"`{command}` does not print {line!r} (in this order) but\n" + "\n".join(printed)
                )

    def _start(self, body: str, until: str) -> None:
        log = self._folder / f"background-{len(self._left)}.log"
        with log.open("wb") as out:
            command = ["bash", "-c", f"exec {body.strip()}"]
            process = subprocess.Popen(
                command,
                cwd=self._folder,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._left.append(process)
        deadline = time.monotonic() + LIMIT_S
        while until not in log.read_text():
            assert process.poll() is None, f"ended with {process.returncode}:\n{body}\n{log.read_text()}"
            assert time.monotonic() < deadline, f"{until!r} never came:\n{body}\n{log.read_text()}"
            time.sleep(0.05)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    made = Page(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="session")
def runnable() -> Callable[[str], list[Block]]:
    return blocks
