"""`fairlead sim compare --cluster` with a real Dask scheduler and worker, each a process of its own."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

WITHIN_S = 60.0


def start(tmp_path: Path, stack: list[subprocess.Popen[bytes]], *command: str) -> None:
    with (tmp_path / f"log-{len(stack)}").open("wb") as log:
        stack.append(subprocess.Popen([sys.executable, *command], cwd=tmp_path, stdout=log, stderr=log))


@pytest.fixture(autouse=True)
def dask() -> None:
    if find_spec("distributed") is None:
        if os.environ.get("FAIRLEAD_REQUIRE_ALL"):
            pytest.fail("distributed is not installed")
        pytest.skip("distributed is not installed: pip install 'fairlead[cluster]'")


@pytest.fixture
def scheduler(dask: None, tmp_path: Path) -> Iterator[str]:
    """Address of a scheduler with one worker."""
    children: list[subprocess.Popen[bytes]] = []
    file = tmp_path / "scheduler.json"
    arguments = ("--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(file))
    start(tmp_path, children, "-m", "distributed.cli.dask_scheduler", *arguments)
    try:
        deadline = time.monotonic() + WITHIN_S
        while not file.is_file() or not file.read_bytes():
            assert time.monotonic() < deadline and children[0].poll() is None, "no scheduler"
            time.sleep(0.1)
        address = str(json.loads(file.read_bytes())["address"])
        options = ("--nthreads", "1", "--no-nanny", "--no-dashboard", "--memory-limit", "0")
        start(tmp_path, children, "-m", "distributed.cli.dask_worker", address, *options)
        while b"Registered to" not in (tmp_path / "log-1").read_bytes():
            assert time.monotonic() < deadline and children[1].poll() is None, "no worker"
            time.sleep(0.1)
        yield address
    finally:
        for child in reversed(children):
            child.kill()
        for child in children:
            child.wait()


def compare(out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fairlead", "sim", "compare", "-w", "paced-prefix", "-p", "default"]
    command += ["-p", "round-robin", "--requests", "6", "--out", str(out), "--processes", "1", *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_a_cluster_finds_what_one_machine_finds(scheduler: str, tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        there = pool.submit(compare, tmp_path / "there", "--cluster", scheduler)
        here = compare(tmp_path / "here")
    assert there.result().returncode == 0, there.result().stderr
    assert here.returncode == 0, here.stderr
    found = [json.loads((tmp_path / name / "results.json").read_bytes())["cells"] for name in ("there", "here")]
    hashes = [[cell["figures"]["decision_hash"] for cell in cells] for cells in found]
    assert hashes[0] == hashes[1]
    assert len(hashes[0]) == 2
    assert len((tmp_path / "there" / "cells.jsonl").read_bytes().splitlines()) == 2


@pytest.mark.slow
def test_a_cluster_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = compare(tmp_path / "out", "--cluster", "tcp://127.0.0.1:1")
    assert done.returncode == 2
    assert "no Dask scheduler answers at tcp://127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr
