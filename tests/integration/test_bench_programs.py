"""Every program under bench/, with as little to do as it can have: a table, and with --json one JSON object."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "bench"
#: Least work, and keys that the JSON object must have ("a/b" = key b of what is under a).
PROGRAMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "flow": ("--quick", ("added_us", "dispatch_hold_ms")),
    "dashboard": (
        "--slots 4 --slot 0.8 --rate 60 --viewers 1 --endpoints 2",
        ("nobody/p99_ms", "looking/p99_ms", "p99_ratio"),
    ),
    "transport": ("--quick", ()),
    "kube": ("--pods 20", ("resync_cpu_s", "memory_mb", "kept")),
    "kv": (
        "--blocks 20000 --seconds 0.3 --prompts 1 --rounds 1",
        ("blocks_per_s", "lookup_1000x100_us", "loop_hold_p99_ms"),
    ),
    "extproc": (
        "--scenario json_200rps --rounds 1 --requests 40",
        tuple(
            f"json_200rps/{side}/{key}"
            for side in ("direct", "fairlead", "grpc_aio")
            for key in ("requests", "failed", "epp_ms", "envoy_ms", "p50_ms", "p99_ms", "ttfb_p50_ms", "ttfb_p99_ms")
        ),
    ),
    "indexer": ("--questions 5 --prompts 2", ("server_hashes_p50_ms",)),
    "remote": ("--seconds 0.4 --exchanges 50", ("routing", "exchange")),
    "idle": ("--endpoints 5 --seconds 1 --trials 1", ("endpoints", "page_kb", "cores")),
    "start": ("--rounds 1", ("here/first_200_ms", "here/parent_mb", "here/scheduler_mb")),
    "tuning": ("--head 4 --seeds 1 --lengths 1 --processes 1", ("settings", "recognised")),
    "autoscale": ("--quick --hours 0.008", ("misses_ratio", "hours_ratio", "signals/fairlead_desired_replicas/misses")),
    "configs": ("", ("same_meaning", "noted", "refused", "unlisted", "other")),
    "plan": ("--quick", ("workloads/agents/planned", "workloads/agents/brute_force", "most_off", "slowest_cpu_s")),
    "path": ("", ("bytecodes", "functions", "files", "parts/session", "parts/policy")),
    "tokens": ("--rounds 1 --files 8", ("cold_100k_ms",)),
    "shadows": ("--count 40 --rounds 1", ("plain/p99_ms", "shadowed/p99_ms", "p99_ratio")),
    "replicas": (
        "--quick --processes 1",
        ("us_per_request", "bytes_per_request", "snapshot_ms", "join_ms", "scenarios/agents/4 shared/ttft_ratio"),
    ),
    "groups": ("--quick --processes 1", ("cells", "summary/warm/ttft", "sessions/3/1")),
    "state": ("--blocks 160 --repeat 1", ("8/snapshot_ms", "8/restore_longest_ms", "512/bytes", "512/grown_mb")),
    "journal": ("--requests 40 --repeat 1", ("off/warm_us", "written/thread_us")),
    "decision": ("--repeats 1", ("endpoints_8_us", "endpoints_100_us", "endpoints_1000_us")),
    "parse": ("--batches 1", ("chat_24kb_us", "chat_500kb_us")),
    "engines": (
        "--shape slots-4 --shape lock-in-low --policy default --policy round-robin --requests 10 --seeds 2"
        " --processes 1",
        ("shapes/slots-4/rules/default/ttft_ms", "worst_regret_ttft", "worst_regret_e2e", "behind_round_robin"),
    ),
    "metrics": ("--endpoints 20 --rounds 1", ("plain/series",)),
    #: Without an installation it tells what is kept: nothing.
    "real": ("--report --out {out}", ("rows", "summary/runs")),
    "quality": (
        "--head 20 --policy default --scenario agents --fresh --processes 1 --out {out}",
        ("scenarios/agents/default", "known/agents/default", "summary/development/policies/default/goodput/worst"),
    ),
}
#: They take a minute whatever they are told. tests/kube/test_pools_kube.py and tests/e2e/test_warming.py do the same.
LONG = {"pools", "warming"}
#: Runs a program with --json, and prints its table on stderr, after `MARK`: one run tells both.
BOTH = """
import runpy, sys
from contextlib import redirect_stdout
folder, mark, name, *arguments = sys.argv[1:]
sys.path.insert(0, folder)
import _output
genuine = _output.tell

def tell(found, as_json, show):
    assert as_json
    print(mark, file=sys.stderr)
    with redirect_stdout(sys.stderr):
        genuine(found, False, show)
    genuine(found, True, show)

_output.tell = tell
sys.argv = [f"{folder}/{name}.py", *arguments]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
MARK = "the table:"
#: Those whose table comes in another way is not looked at: it would take as long once more.
OWN_WAY = {"idle", "indexer", "kv", "parse", "path", "real", "tokens", "transport"}
TABLES = [name for name in PROGRAMS if name not in OWN_WAY]
#: Lines of a table, where it is shorter than three.
LINES = {"start": 2, "state": 2}
Run = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Run]]]:
    """Two at a time: no figure is looked at."""
    out = str(tmp_path_factory.mktemp("out"))

    def run(name: str) -> Run:
        arguments = PROGRAMS[name][0].format(out=out).split()
        command = [sys.executable, "-c", BOTH, str(FOLDER), MARK, name, "--json", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=out, check=False)

    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(run, name) for name in PROGRAMS}
        pool.shutdown(cancel_futures=True)


def test_real_engines_say_what_is_missing(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "real.py"), "--home", str(tmp_path), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert str(tmp_path) in done.stderr and "--install" in done.stderr and "Traceback" not in done.stderr


def test_none_is_forgotten() -> None:
    assert {path.stem for path in FOLDER.glob("[a-z]*.py")} == {*PROGRAMS, *LONG}


@pytest.mark.parametrize("name", TABLES)
def test_the_option_decides_between_object_and_table(name: str) -> None:
    """Programs are run with `--json` only, see `BOTH`."""
    calls = [node for node in ast.walk(ast.parse((FOLDER / f"{name}.py").read_text())) if isinstance(node, ast.Call)]
    asked = [ast.unparse(call.args[1]) for call in calls if ast.unparse(call.func) == "tell" and len(call.args) == 3]
    assert asked and all(option in ("options.json", "arguments.json") for option in asked)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_json_object(runs: dict[str, Future[Run]], name: str) -> None:
    done = runs[name].result()
    assert done.returncode == 0, done.stderr[-2000:]
    found: Any = json.loads(done.stdout)
    assert isinstance(found, dict) and found
    for path in PROGRAMS[name][1]:
        at = found
        for key in path.split("/"):
            at = at[key]
        if path.endswith("/failed"):
            assert at == 0, f"{path}: {at} requests failed"


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_a_table(runs: dict[str, Future[Run]], name: str) -> None:
    done = runs[name].result()
    assert done.returncode == 0, done.stderr[-2000:]
    table = done.stderr.rpartition(f"{MARK}\n")[2]
    assert MARK in done.stderr and len(table.splitlines()) >= LINES.get(name, 3)
    assert "…" not in table, "figures are not cut off"
    with pytest.raises(json.JSONDecodeError):
        json.loads(table)
