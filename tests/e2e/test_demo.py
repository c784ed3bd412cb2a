"""`fairlead demo` as a user runs it, in a small form: what it leaves behind, and that what it prints works."""

import contextlib
import json
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from gw_processes import Child
from ports import free_port_block

pytestmark = pytest.mark.slow

_REQUESTS = 40
_SECONDS = 60.0


class Demo(NamedTuple):
    folder: Path
    port: int
    printed: str

    @property
    def commands(self) -> list[list[str]]:
        """What is to be typed to try it by hand, word by word."""
        lines = self.printed.partition("\nBy hand")[2].splitlines()
        return [shlex.split(line) for line in lines if line.startswith("  ")]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """Run in a folder whose name needs quotes, as those of people do."""
    folder, port = tmp_path_factory.mktemp("a demo's"), free_port_block()
    settings = (f"--requests={_REQUESTS}", "--time-ratio=40", "--replicas=2", f"--port={port}", "--out=out/small demo")
    command = [sys.executable, "-m", "fairlead", "demo", *settings]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=3 * _SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return Demo(folder, port, done.stdout)


def test_the_summary_has_its_keys_and_no_request_failed(demo: Demo) -> None:
    summary = json.loads((demo.folder / "out" / "small demo" / "summary.json").read_text())
    assert list(summary) == ["round-robin", "default"]
    for policy in summary.values():
        assert (policy["requests"], policy["failed"], policy["success_rate"]) == (_REQUESTS, 0, 1.0)
        assert all(policy["ttft_ms"][quantile] > 0 for quantile in ("p50", "p95", "p99"))
        assert policy["output_tokens_per_s"] > 0
        assert 0 <= policy["prefix_hit_rate"] < 1
        # Nobody has a prefix to hit but those that share the 6,000 tokens, of which forty requests have few.
        assert policy["prompt_tokens"] == pytest.approx(_REQUESTS * 7200, rel=0.05)
    assert summary["round-robin"]["name"] == "round robin"


def test_there_is_a_plot(demo: Demo) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'fairlead[report]'")
    assert (demo.folder / "out" / "small demo" / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_an_unusual_demo_is_not_judged(demo: Demo) -> None:
    assert "Written: out/small demo/summary.json" in demo.printed
    assert "missed" not in demo.printed
    assert "met " not in demo.printed


@pytest.fixture
def servers(demo: Demo, tmp_path: Path) -> Iterator[None]:
    """The printed servers, started from the demo's directory."""
    stub_command, serve_command, _ = demo.commands
    stub, serve = Child("stub", tmp_path / "stub.log"), Child("serve", tmp_path / "serve.log")
    with contextlib.chdir(demo.folder):
        try:
            stub.spawn(*stub_command)
            until_answered(f"http://127.0.0.1:{demo.port + 11}/health", stub)
            serve.spawn(*serve_command)
            until_answered(f"http://127.0.0.1:{demo.port + 2}/readyz", serve)
            yield
        finally:
            serve.end()
            stub.end()


def until_answered(url: str, child: Child) -> None:
    until = time.monotonic() + _SECONDS
    while child.code is None and time.monotonic() < until:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5.0):
            return
        time.sleep(0.05)
    raise AssertionError(f"{child.name} is not ready:\n{child.said()}")


@pytest.mark.usefixtures("servers")
def test_the_commands_to_try_by_hand_work_as_printed(demo: Demo) -> None:
    curl, url, _, header, _, body = demo.commands[2]
    assert curl == "curl"
    name, _, value = header.partition(": ")
    with urllib.request.urlopen(urllib.request.Request(url, body.encode(), {name: value}), timeout=_SECONDS) as answer:
        assert answer.status == 200
        told: dict[str, Any] = json.load(answer)
    assert told["usage"]["completion_tokens"] > 0
    # The scheduler chose, the gateway did not balance without it.
    with urllib.request.urlopen(f"http://127.0.0.1:{demo.port + 2}/debug/decisions?last=1", timeout=5.0) as decisions:
        assert "stub-" in decisions.read().decode()


def test_a_taken_port_is_told_once_with_what_to_do(tmp_path: Path) -> None:
    port = free_port_block()
    with socket.create_server(("127.0.0.1", port + 11)):
        command = [sys.executable, "-m", "fairlead", "demo", "--replicas=2", f"--port={port}"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=_SECONDS)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: cannot listen on 127.0.0.1:{port + 11}: ")
    assert done.stderr.endswith("choose others with --port\n")
    assert done.stderr.count("error:") == done.stderr.count("\n") == 1
