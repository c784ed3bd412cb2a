"""The demo's pool to play with: a configuration next to the results, and commands that work as they are printed.

The commands are for the directory in which the demo was run, whether or not `fairlead` is on PATH there.
"""

import json
import os
import shlex
import sys
from pathlib import Path

from msgspec import Struct

from fairlead.demo.plan import HOST, MODEL, Plan

_REPLICAS = 4

_CONFIG = """\
# Written by `fairlead demo`: its gateway and scheduler, to try by hand. Change it while it runs: most settings follow.
policy: default
gateway: {{mode: embedded, host: {host}, port: {gateway}, concurrency: 1}}
extProc: {{host: {host}, port: {ext_proc}}}
admin: {{host: {host}, port: {admin}}}
# Written by `fairlead stub`.
endpoints: {{file: {endpoints}, watch: true}}
"""


class Commands(Struct, frozen=True):
    """Lines for a shell: two servers, each in a terminal of its own, then a request; and a page to look at."""

    stub: str
    serve: str
    curl: str
    dashboard: str


def prepare(plan: Plan) -> Commands:
    """Write `by-hand.yaml` into the demo's folder; returns the commands that use it."""
    config, endpoints = plan.out / "by-hand.yaml", plan.out / "by-hand-endpoints.yaml"
    gateway, ext_proc, admin = plan.own_ports
    written = json.dumps(str(endpoints.absolute()), ensure_ascii=False)
    config.write_text(
        _CONFIG.format(host=HOST, gateway=gateway, ext_proc=ext_proc, admin=admin, endpoints=written), encoding="utf-8"
    )
    fairlead = program()
    stub = ("stub", f"--port={plan.replica_ports[0]}", f"--replicas={min(_REPLICAS, plan.replicas)}")
    body = {"model": MODEL, "max_tokens": 50, "messages": [{"role": "user", "content": "Hello"}]}
    url = f"http://{HOST}:{gateway}/v1/chat/completions"
    curl = ("curl", url, "-H", "content-type: application/json", "-d", json.dumps(body))
    return Commands(
        stub=shlex.join((*fairlead, *stub, f"--write-endpoints={endpoints}")),
        serve=shlex.join((*fairlead, "serve", str(config))),
        curl=shlex.join(curl),
        dashboard=f"http://{HOST}:{admin}/",
    )


def program() -> list[str]:
    """How to start this very `fairlead` from the current directory."""
    called = Path(sys.argv[0])
    for candidate in (called, Path(sys.executable).with_name("fairlead")):
        if candidate.name == "fairlead" and candidate.is_file() and os.access(candidate, os.X_OK):
            return [_shown(candidate)]
    return [_shown(Path(sys.executable)), "-m", "fairlead"]


def _shown(file: Path) -> str:
    """Relative to the current directory where it lies below it; with a slash, or the shell would search PATH."""
    path = file.absolute()
    here = Path.cwd()
    if not path.is_relative_to(here):
        return str(path)
    relative = str(path.relative_to(here))
    return relative if "/" in relative else f"./{relative}"
