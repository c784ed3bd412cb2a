"""A disk that is full, descriptors, memory and time that run out, an API server that is away."""

import asyncio
import contextlib
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from ch_site import MEMORY_MIB, ModelServer, limited
from ch_trial import LASTS_S, MIB, Bounds, Row, trial
from fake_kube import FakeKube
from gw_load import Mixed
from gw_processes import Serve

Judge = Callable[[Row], None]
Starting = Callable[..., Awaitable[Serve]]
DISK_MIB = 2
OPEN_FILES = 256
JUMP_S = 3600.0
POD = {
    "metadata": {"name": "m", "namespace": "default", "labels": {"app": "m"}},
    "spec": {"containers": []},
    "status": {"podIP": "127.0.0.1", "phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
}


async def lasts() -> None:
    await asyncio.sleep(LASTS_S)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that is soon full."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(place)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no small file system can be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


async def test_the_disk_of_the_journal_is_full(own: Starting, small_disk: Path, judged: Judge) -> None:
    serve = await own({"journal": {"path": str(small_disk / "journal")}})
    filler = small_disk / "filler"

    async def happens() -> None:
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        await lasts()
        filler.unlink()

    judged(await trial("disk of the journal full", serve, happens))
    assert "No space left" in serve.said(), "it is told in the log"


async def test_descriptors_run_out(own: Starting, judged: Judge) -> None:
    """A usual soft limit that is far too low, and may be raised."""
    serve = await own({}, *limited(f"ulimit -Sn {OPEN_FILES}"))
    long = Mixed(chunks=80)  # two hundred in flight, with two descriptors each
    judged(await trial(f"{OPEN_FILES} descriptors (soft limit)", serve, lasts, workload=long))


async def test_memory_is_short(memory_limit: tuple[list[str], str], own: Starting, judged: Judge) -> None:
    """The chart's limit for all processes together, and large bodies beside the load."""
    prefix, said = memory_limit
    serve = await own({}, *prefix)
    first = serve.envoy_pid(), serve.scheduler_pid()
    body = b'{"model": "m", "x-bench": "mode=json", "prompt": "' + b"x" * (8 * MIB) + b'"}'

    async def happens() -> None:
        until = time.monotonic() + LASTS_S
        while time.monotonic() < until:
            statuses = await asyncio.gather(*(asyncio.to_thread(post, serve.port, body) for _ in range(8)))
            assert set(statuses) <= {0, 200, 413, 429, 503}, statuses

    row = await trial("memory limit, 8 bodies of 8 MiB", serve, happens, Bounds(p99_times=None, envoy_mib=MEMORY_MIB))
    row.note = said
    judged(row)
    assert (serve.envoy_pid(), serve.scheduler_pid()) == first, "nobody was killed for memory"


def post(port: int, body: bytes) -> int:
    """The status; 0 where it was not seen. Who is refused before all is sent has a second to read that: then Envoy
    closes the connection."""
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(asked, timeout=300) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except urllib.error.URLError as error:
        if isinstance(error.reason, ConnectionError):
            return 0
        raise


@pytest.mark.parametrize("direction", [1, pytest.param(-1, marks=pytest.mark.long_form)], ids=["forward", "back"])
async def test_the_clock_jumps(own: Starting, tmp_path: Path, judged: Judge, direction: int) -> None:
    """The wall clock, as after a correction by NTP. The monotonic one cannot jump."""
    offset = tmp_path / "offset"
    offset.write_text("0")
    here = Path(__file__).parent / "support" / "clock"
    inherited = os.environ.get("PYTHONPATH", "")
    path = f"PYTHONPATH={here}{os.pathsep + inherited if inherited else ''}"
    serve = await own({"journal": {"path": str(tmp_path / "journal")}}, "env", path, f"CHAOS_CLOCK={offset}")

    async def happens() -> None:
        offset.write_text(str(direction * JUMP_S))
        await lasts()

    row = await trial(f"wall clock jumps {direction * JUMP_S:+g} s", serve, happens)
    row.note = "injected into the scheduler's Python; Envoy keeps its clock"
    judged(row)
    assert await serve.settled() == {}


async def test_the_api_server_is_away(tmp_path: Path, servers: list[ModelServer], own: Starting, judged: Judge) -> None:
    """Its last word counts meanwhile. One pod with four ranks."""
    kube = FakeKube()
    await kube.start()
    try:
        kube.put("v1", "pods", POD)
        ports = [server.port for server in servers]
        found = {"selector": {"app": "m"}, "targetPorts": ports, "kubeconfig": str(kube.write_kubeconfig(tmp_path))}
        serve = await own({"endpoints": None, "kubernetes": found})

        async def happens() -> None:
            await kube.stop()
            await lasts()
            await kube.start()

        judged(await trial("API server away", serve, happens))
    finally:
        await kube.stop()
