"""Real processes for tests against the real Envoy: upstreams, `fairlead serve`, stubs, Envoy itself.

Every process is ended by its own id. Ports are free ones of this machine; a process that finds its port taken in
between fails loudly at its start.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
from child_environment import environment
from ports import free_ports

from fairlead.gateway.envoy.admin import EnvoyAdmin, GatewayError
from fairlead.gateway.envoy.binary import find_envoy
from fairlead.gateway.envoy.gateway import command

REPOSITORY = Path(__file__).parents[3]
UPSTREAM = REPOSITORY / "bench" / "_upstream.py"
START_SECONDS = 60.0
_END_SECONDS = 45.0

Json = dict[str, Any]


def require_envoy() -> str:
    """Path of Envoy. Without one the tests are skipped; `FAIRLEAD_REQUIRE_ALL=1` makes that a failure."""
    try:
        return find_envoy()
    except GatewayError as error:
        if os.environ.get("FAIRLEAD_REQUIRE_ALL"):
            pytest.fail(str(error))
        pytest.skip(str(error))


class Child:
    """A process whose output goes into a file. `end` is what every test must reach; fixtures see to it."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Exit code; `None` while it runs."""
        assert self._process is not None
        return self._process.poll()

    def spawn(self, *arguments: str) -> Self:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment()
            )
        return self

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def wait(self, seconds: float = _END_SECONDS) -> int:
        """Wait for its end; returns the exit code."""
        return await asyncio.to_thread(self._wait, seconds)

    def _wait(self, seconds: float) -> int:
        assert self._process is not None
        return self._process.wait(seconds)

    def end(self, gently: bool = True) -> None:
        """Harmless when repeated, or when it never started."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGTERM if gently else signal.SIGKILL)
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"{self.name} does not end on SIGTERM:\n{self.said()[-2000:]}") from None

    def poll_until(self, ready: Any) -> Any:
        """Poll `ready` until it returns something; the process must live meanwhile."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and self.code is None:
            with contextlib.suppress(OSError, ValueError):
                found = ready()
                if found:
                    return found
            time.sleep(0.05)
        raise AssertionError(f"{self.name} did not start (exit code {self.code}):\n{self.said()[-3000:]}")


class Upstream(Child):
    """`bench/_upstream.py` on some ports of one process."""

    def __init__(self, log: Path) -> None:
        super().__init__("the upstream", log)
        self.ports: list[int] = []

    def start(self, ports: int) -> Self:
        self.spawn(sys.executable, str(UPSTREAM), "--ports", str(ports))
        self.ports = self.poll_until(lambda: json.loads(self.said().splitlines()[-1])["ports"] if self.said() else None)
        return self

    @property
    def addresses(self) -> list[str]:
        return [f"127.0.0.1:{port}" for port in self.ports]


class Stub(Child):
    """`fairlead stub`: simulated model servers."""

    def __init__(self, log: Path) -> None:
        super().__init__("the stub", log)
        self.ports: list[int] = []

    def start(self, replicas: int, *arguments: str) -> Self:
        listed = self.log.with_suffix(".yaml")
        listed.unlink(missing_ok=True)
        self.spawn(
            sys.executable, "-m", "fairlead", "stub", "--port", "0", "--replicas", str(replicas), *arguments,
            "--out", str(listed),
        )  # fmt: skip
        text = self.poll_until(lambda: listed.exists() and listed.read_text())
        self.ports = [int(port) for port in re.findall(r"127\.0\.0\.1:(\d+)", text)]
        if not self.ports:
            self.ports = [int(port) for port in re.findall(r"port:\s*\D?(\d+)", text)]
        assert len(self.ports) == replicas, text
        for port in self.ports:
            self.poll_until(lambda port=port: get_page(f"http://127.0.0.1:{port}/health")[0] == 200)
        return self

    @property
    def addresses(self) -> list[str]:
        return [f"127.0.0.1:{port}" for port in self.ports]

    async def fault(self, index: int, **changes: Any) -> None:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.ports[index]}/fault",
            json.dumps(changes).encode(),
            {"content-type": "application/json"},
        )
        with await asyncio.to_thread(urllib.request.urlopen, request, timeout=5) as answer:
            assert answer.status == 200


class Serve(Child):
    """`python -m fairlead serve`. Ports that the configuration leaves out are free ones."""

    def __init__(self, directory: Path, name: str = "serve") -> None:
        super().__init__("fairlead serve", directory / f"{name}.log")
        self._file = directory / f"{name}.yaml"
        self.config: Json = {}
        self.workers = 1

    def start(self, config: Json, workers: int = 1) -> Self:
        self.workers = workers
        gateway, ext_proc, admin, envoy_admin = free_ports(4)
        given = config.get("gateway", {})
        given = {"mode": given} if isinstance(given, str) else given
        self.config = {
            "log": {"level": "info"},
            **config,
            "gateway": {"port": gateway, "adminPort": envoy_admin, "concurrency": 1, "paths": ["/*"], **given},
            "extProc": {"host": "127.0.0.1", "port": ext_proc, **config.get("extProc", {})},
            "admin": {"port": admin, **config.get("admin", {})},
        }
        return self.again()

    @property
    def file(self) -> Path:
        """The configuration file."""
        return self._file

    def again(self) -> Self:
        """Start (once more) with the same configuration, and wait until it is ready."""
        self._file.write_text(json.dumps(self.config))
        several = ("--workers", str(self.workers)) if self.workers > 1 else ()
        self.spawn(sys.executable, "-m", "fairlead", "serve", str(self._file), *several)
        self.poll_until(lambda: get_page(self.admin + "/readyz")[0] == 200)
        return self

    @property
    def admin(self) -> str:
        return f"http://127.0.0.1:{self.config['admin']['port']}"

    @property
    def ext_proc(self) -> str:
        return f"127.0.0.1:{self.config['extProc']['port']}"

    @property
    def port(self) -> int:
        """Of the embedded gateway."""
        return int(self.config["gateway"]["port"])

    @property
    def embedded(self) -> bool:
        return bool(self.config["gateway"].get("mode", "embedded") == "embedded")

    @property
    def gateway(self) -> EnvoyAdmin:
        """The admin page of the embedded Envoy."""
        return EnvoyAdmin(port=int(self.config["gateway"]["adminPort"]))

    def envoy_pids(self) -> list[int]:
        """Of the embedded Envoys that run."""
        return self._children(lambda line: any("envoy" in part for part in line) and "serve" not in line)

    def envoy_pid(self) -> int:
        """Of the embedded Envoy; 0 while there is none."""
        return next(iter(self.envoy_pids()), 0)

    def scheduler_pids(self) -> list[int]:
        """Of all workers behind the embedded gateway."""
        return self._children(lambda line: "serve" in line)

    def scheduler_pid(self) -> int:
        """Of the process that schedules: this one, or with the embedded gateway its child; 0 while there is none."""
        return next(iter(self._children(lambda line: "serve" in line)), 0) if self.embedded else self.pid

    def _children(self, wanted: Callable[[list[str]], bool]) -> list[int]:
        """Those whose command line is wanted, and which are what it says (no launcher any more)."""
        found = []
        for number in children_of(self.pid):
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{number}/cmdline").read_bytes().decode(errors="replace").split("\0")
                if not any("launcher" in part for part in line) and wanted(line):
                    found.append(number)
        return found

    def end(self, gently: bool = True) -> None:
        if self._process is not None and self.code is None and self.embedded:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.scheduler_pid() or self.pid, signal.SIGCONT)
        super().end(gently)

    async def page(self, path: str) -> str:
        status, text = await asyncio.to_thread(get_page, self.admin + path)
        assert status == 200, f"{path}: {status} {text[:300]}"
        return text

    async def endpoints(self) -> list[Json]:
        return list(json.loads(await self.page("/debug/endpoints"))["endpoints"])

    async def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that have these labels; 0 when there are none."""
        total = 0.0
        for line in (await self.page("/metrics")).splitlines():
            if line.startswith((name + "{", name + " ")) and all(f'{k}="{v}"' in line for k, v in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total

    async def decisions(self) -> int:
        return int(await self.metric("llm_d_epp_scheduler_attempts_total", status="success"))

    async def settled(self, seconds: float = 20.0) -> Json:
        """Wait until nothing is charged to any endpoint. Returns what is still charged: empty if all is well."""
        until = time.monotonic() + seconds
        while True:
            held = {e["address"]: e for e in await self.endpoints() if e["leases"] or e["pending_tokens"]}
            if (not held and not await self.metric("fairlead_leases")) or time.monotonic() > until:
                return held
            await asyncio.sleep(0.05)


class Envoy(Child):
    """An Envoy of our own, beside `serve`: any bootstrap."""

    def __init__(self, directory: Path, name: str = "envoy") -> None:
        super().__init__("Envoy", directory / f"{name}.log")
        self._file = directory / f"{name}.json"
        self._socket = directory / f"{name}.sock"
        self.port = 0
        self.admin = EnvoyAdmin(str(self._socket))

    def start(self, bootstrap: Json, concurrency: int = 1) -> Self:
        """`bootstrap` listens on one port, which is read off; its admin page is set here."""
        self._socket.unlink(missing_ok=True)
        self.port = bootstrap["static_resources"]["listeners"][0]["address"]["socket_address"]["port_value"]
        admin = {"address": {"pipe": {"path": str(self._socket), "mode": 0o600}}}
        self._file.write_text(json.dumps({**bootstrap, "admin": admin}))
        self.spawn(*command(find_envoy(), self._file, concurrency))
        self.poll_until(lambda: _unix_status(self._socket, "/ready") == 200)
        return self


async def stat(admin: EnvoyAdmin, name: str) -> int:
    """One of Envoy's counters or gauges; 0 while it does not exist."""
    return sum((await admin.stats(f"^{re.escape(name)}$")).values())


async def sees_the_scheduler(admin: EnvoyAdmin, seconds: float = 20.0) -> None:
    """Wait until Envoy's health check of the scheduler has passed: before that, requests go to the fallback."""
    until = time.monotonic() + seconds
    while not await stat(admin, "cluster.ext_proc.membership_healthy"):
        assert time.monotonic() < until, "Envoy does not find the scheduler"
        await asyncio.sleep(0.02)


def children_of(parent: int) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[1]) == parent:
                    found.append(int(entry))
    return found


def get_page(url: str | urllib.request.Request) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(errors="replace")


def _unix_status(path: Path, target: str) -> int:
    with socket.socket(socket.AF_UNIX) as asked:
        asked.settimeout(2.0)
        asked.connect(str(path))
        asked.sendall(f"GET {target} HTTP/1.1\r\nhost: envoy\r\nconnection: close\r\n\r\n".encode())
        return int(asked.recv(100).split(b" ")[1])
