"""Fairlead's commands as processes, for tests of what a person does."""

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from child_environment import environment

from fairlead.config.endpoint_list import parse_endpoints_text

FAIRLEAD = (sys.executable, "-m", "fairlead")
PATIENCE_S = 60.0


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*FAIRLEAD, *arguments],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@contextmanager
def running(folder: Path, *arguments: str) -> "Iterator[subprocess.Popen[bytes]]":
    with (folder / f"{arguments[0]}.log").open("wb") as log:
        process = subprocess.Popen([*FAIRLEAD, *arguments], cwd=folder, env=environment(), stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_S)


def until(true: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, "".join(log.read_text() for log in folder.glob("*.log"))
        time.sleep(0.1)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0) as answer:
            return answer.status == 200
    except OSError:
        return False


def ask(gateway: int) -> list[object]:
    """One short question through a gateway. Returns the answer's choices."""
    body = {"model": "Qwen/Qwen3-32B", "max_tokens": 5, "messages": [{"role": "user", "content": "Hello"}]}
    request = urllib.request.Request(
        f"http://127.0.0.1:{gateway}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        choices: list[object] = json.load(answer)["choices"]
    return choices


@contextmanager
def stub(folder: Path, name: str, *options: str) -> Iterator[list[str]]:
    """Addresses of its replicas."""
    file = folder / f"{name}.yaml"
    with running(folder, "stub", "--port", "0", "--time-ratio", "50", "--out", str(file), *options) as it:
        until(lambda: file.exists() or it.poll() is not None, folder)
        addresses = [entry.endpoint.address for entry in parse_endpoints_text(file.read_bytes()).entries]
        until(lambda: all(answers(f"http://{address}/health") for address in addresses), folder)
        yield addresses
