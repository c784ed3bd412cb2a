"""How long the embedded gateway takes to its first answer, what memory it holds, and what commands cost to start.

    python bench/start.py [--json] [--rounds 7] [--against REV]

One stub endpoint answers `/v1/models`. `first_200_ms` is the wall clock from starting `fairlead serve` to the first
200 through the gateway, `cpu_ms` the CPU time that scheduler and parent have used until then. `parent_mb` and
`scheduler_mb` are resident memory (shared pages count in full) two seconds later, when the scheduler has been asked.
Medians over the rounds; with `--against` two revisions of this repository take turns.

`help_ratio` and `validate_ratio` are the CPU time of `fairlead --help` and `fairlead validate examples/minimal.yaml`
over that of `python -c pass`: the least of the rounds each.

JSON: {SIDE: {"first_200_ms", "cpu_ms", "parent_mb", "scheduler_mb", "help_ratio", "validate_ratio", "rounds"}}; SIDE is
`here` or the revision.
"""

import argparse
import contextlib
import http.server
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from _gateway import checked_out, environment, free_ports
from _output import tell
from _process import children, cpu_s, rss

HERE = Path(__file__).parents[1]
GATEWAY, ADMIN, EXT_PROC, ALS = free_ports(4)
PATIENCE_S, SETTLED_S = 60.0, 2.0


class Models(http.server.BaseHTTPRequestHandler):
    """A model server that is always ready."""

    def do_GET(self) -> None:
        body = b'{"object":"list","data":[]}' if self.path == "/v1/models" else b"vllm:num_requests_running 0.0\n"
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nobody reads it."""


@contextlib.contextmanager
def endpoint() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Models) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def is_envoy(pid: int) -> bool:
    return "envoy" in Path(f"/proc/{pid}/comm").read_text()


def first_answer(process: "subprocess.Popen[bytes]", begin: float) -> float:
    """Milliseconds since `begin`."""
    while time.perf_counter() - begin < PATIENCE_S:
        if process.poll() is not None:
            raise SystemExit(f"fairlead serve ended with status {process.returncode}")
        url = f"http://127.0.0.1:{GATEWAY}/v1/models"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2) as answer:
            if answer.status == 200:
                return (time.perf_counter() - begin) * 1e3
        time.sleep(0.002)
    raise SystemExit(f"no answer within {PATIENCE_S:g} s")


def start(place: Path, config: Path) -> dict[str, float]:
    """One start of the revision at `place`, from nothing to its end."""
    command = [sys.executable, "-m", "fairlead", "serve", str(config)]
    begin = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=environment(str(place / "src")), stderr=log)
        try:
            took = first_answer(process, begin)
            schedulers = [child for child in children(process.pid) if not is_envoy(child)]
            cpu_ms = (cpu_s(process.pid) + sum(map(cpu_s, schedulers))) * 1e3
            time.sleep(SETTLED_S)
            if [child for child in children(process.pid) if not is_envoy(child)] != schedulers or not schedulers:
                log.seek(0)
                raise SystemExit(f"the scheduler of {place} ended:\n{log.read().decode()[-2000:]}")
            return {
                "first_200_ms": took,
                "cpu_ms": cpu_ms,
                "parent_mb": rss(process.pid) / 2**20,
                "scheduler_mb": rss(schedulers[0]) / 2**20,
            }
        finally:
            process.terminate()
            process.wait()


def command_ms(place: Path, *arguments: str) -> float:
    """CPU milliseconds of one Python process. Byte code stays beside the sources, as where it is installed (a directory
    of its own for it costs a tenth more)."""
    silent = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_WRONLY, 0) for number in (1, 2)]
    command = [sys.executable, *arguments]
    around = environment(str(place / "src")) | {"PYTHONDONTWRITEBYTECODE": ""}
    pid = os.posix_spawn(command[0], command, around, file_actions=silent)
    _, status, used = os.wait4(pid, 0)
    if status:
        raise SystemExit(f"{arguments} of {place} ended with {os.waitstatus_to_exitcode(status)}")
    return (used.ru_utime + used.ru_stime) * 1e3


def ratios(place: Path, rounds: int) -> dict[str, float]:
    """Commands over `python -c pass`."""
    commands = {
        "help_ratio": ("-m", "fairlead", "--help"),
        "validate_ratio": ("-m", "fairlead", "validate", str(HERE / "examples" / "minimal.yaml")),
    }
    took: dict[str, list[float]] = {name: [] for name in ("pass", *commands)}
    for _ in range(rounds):
        took["pass"].append(command_ms(place, "-c", "pass"))
        for name, command in commands.items():
            took[name].append(command_ms(place, *command))
    return {name: round(min(took[name]) / min(took["pass"]), 1) for name in commands}


def measure(sides: dict[str, Path], rounds: int) -> dict[str, Any]:
    rows: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    with endpoint() as port, tempfile.TemporaryDirectory(prefix="fairlead-bench-") as folder:
        config = Path(folder) / "start.json"
        document = {
            "endpoints": [{"name": "e0", "address": "127.0.0.1", "port": port}],
            "gateway": {"port": GATEWAY},
            "admin": {"port": ADMIN},
            "extProc": {"host": "127.0.0.1", "port": EXT_PROC},
            "als": {"port": ALS},
        }
        config.write_text(json.dumps(document))
        for place in sides.values() if rounds > 1 else ():
            start(place, config)  # files are read from disk, byte code is written
        for number in range(rounds):
            for side in sorted(sides, reverse=number % 2 == 1):
                rows[side].append(start(sides[side], config))
    return {
        side: {key: round(median(row[key] for row in taken), 1) for key in taken[0]}
        | ratios(sides[side], rounds)
        | {"rounds": rounds}
        for side, taken in rows.items()
    }


def show(found: dict[str, Any]) -> None:
    print(f"{'':<14}{'first 200':>12}{'CPU till then':>16}{'parent':>10}{'scheduler':>12}{'--help':>9}{'validate':>10}")
    for side, row in found.items():
        print(
            f"{side:<14}{row['first_200_ms']:>9.0f} ms{row['cpu_ms']:>13.0f} ms{row['parent_mb']:>7.1f} MB"
            f"{row['scheduler_mb']:>9.1f} MB{row['help_ratio']:>8.1f}×{row['validate_ratio']:>9.1f}×"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--against", metavar="REV", help="another revision of this repository, in turns")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        sides = {"here": HERE}
        if options.against:
            sides[options.against] = stack.enter_context(checked_out(options.against))
        found = measure(sides, options.rounds)
    tell(found, options.json, show)


if __name__ == "__main__":
    main()
