"""The same traffic in the simulator: a preset tuned from one of the servers, captures of what was sent.

Everything by the commands that a user has: `fairlead tune`, `journal capture`, `sim run`.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from _gateway import environment
from _real_pool import Server
from _real_run import scheduling

TUNE_S, PATIENCE_S = 60.0, 180.0


def tuned(servers: Sequence[Server], preset: Path, say: Callable[[str], None]) -> None:
    """Write a preset of the idle servers, which share a machine. Anew each time: the machine may be slower by a third
    than an hour ago."""
    preset.unlink(missing_ok=True)
    say(f"tuning a preset from server {servers[0].name} ({TUNE_S:g} s)")
    neighbour = ["--neighbour", servers[1].url] if len(servers) > 1 else []
    command = ["tune", servers[0].url, *neighbour, "--seconds", f"{TUNE_S:g}", "--out", str(preset)]
    problem = _fairlead(*command)[1]
    if problem:
        say(f"    {problem}")


def simulated(rows: Iterable[dict[str, Any]], journals: Path, preset: Path, servers: int) -> list[dict[str, Any]]:
    """For each run without faults: its figures, and those of the simulation of what its journal says was sent."""
    found = []
    for row in rows:
        if row["fault"] != "none" or "@" in row["policy"] or not row["ttft_ms"]:
            continue
        folder = journals / row["key"]
        traffic = folder / "traffic.jsonl"
        policy, *options = row["policy"].split("+")
        problem = _fairlead("journal", "capture", str(folder / "journal"), "--out", str(traffic))[1]
        figures: dict[str, Any] = {}
        if not problem:
            document = folder / "policy.json"
            document.write_text(json.dumps(scheduling(policy, options)))
            command = ["sim", "run", str(traffic), "--replicas", str(servers), "--engine", str(preset)]
            command += ["--policy", str(document), "--seed", str(row["seed"]), "--json"]
            text, problem = _fairlead(*command, *(["--kv-lag-ms", "50"] if "events" in options else []))
            figures = json.loads(text)["figures"] if not problem else {}
        found.append(
            {
                "key": row["key"],
                "problem": problem,
                "ttft_ms": [row["ttft_ms"]["mean"], figures.get("ttft_mean_ms")],
                "e2e_ms": [row["e2e_ms"]["mean"], figures.get("e2e_mean_ms")],
            }
        )
    return found


def _fairlead(*arguments: str) -> tuple[str, str]:
    """What the command printed, and why it failed (empty = it did not)."""
    command = [sys.executable, "-m", "fairlead", *arguments]
    try:
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "", f"fairlead {arguments[0]} took more than {PATIENCE_S:g} s"
    words = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:] or ["it said nothing"]
    return done.stdout, f"fairlead {arguments[0]} failed: {words[0]}" if done.returncode else ""
