"""What the benchmarks with a gateway say when they cannot start: words, no traceback, and nobody is left behind."""

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "bench"


def _run(script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"from _gateway import *\n{script}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=FOLDER, check=False)


@pytest.fixture
def foreign() -> Iterator[int]:
    """The port of a program that speaks, but no HTTP."""
    server = socket.create_server(("127.0.0.1", 0))

    def talk() -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            with client:
                client.sendall(b"hello\r\n")

    thread = threading.Thread(target=talk, daemon=True)
    thread.start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join(10)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_a_port_of_another_program_is_named(foreign: int) -> None:
    done = _run(f"with Processes([Side('direct', {foreign})], [{_free_port()}]): pass")
    assert done.returncode == 1
    assert done.stderr.startswith(f"cannot use port {foreign} of 127.0.0.1: Address already in use.")
    assert "Traceback" not in done.stderr


def test_a_port_that_was_taken_meanwhile_is_told_by_the_child_that_wanted_it(foreign: int) -> None:
    done = _run(
        "Processes._free = lambda self: None\n"
        f"processes = Processes([Side('direct', {_free_port()})], [{foreign}])\n"
        "try:\n"
        "    processes.__enter__()\n"
        "finally:\n"
        "    print(*[child.returncode is not None for child in processes._children.values()])\n"
    )
    assert done.returncode == 1
    assert done.stderr.startswith("upstream ended with status ")
    assert "address already in use" in done.stderr.lower()
    assert done.stdout.split() == ["True", "True"], "no child is left behind"


def test_an_answer_that_is_no_http_is_no_traceback(foreign: int) -> None:
    done = _run(f"print(wait_for('http://127.0.0.1:{foreign}/readyz', lambda: None, 0.3))")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("hello")
