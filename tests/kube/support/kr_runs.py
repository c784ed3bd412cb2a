"""What the chart writes, run on this machine: fairlead as child processes, and the objects in an API server."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from kr_cluster import Cluster
from kr_helm import one

PATIENCE = 60.0


class Children:
    """`children(*arguments)` runs fairlead until `end()`; child n's log is `n.log` of the directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._all: list[subprocess.Popen[str]] = []

    def __call__(self, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "fairlead", *arguments]
        with open(self.log(len(self._all)), "w") as log:
            self._all.append(
                subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **environment}
                )
            )
        return self._all[-1]

    def log(self, number: int) -> Path:
        return self._directory / f"{number}.log"

    def end(self) -> None:
        for child in reversed(self._all):
            child.send_signal(signal.SIGTERM)
        for child in self._all:
            child.communicate(timeout=45)


def stub_port(start: Children, *arguments: str) -> int:
    """The port of a stub that is started."""
    child = start("stub", "--port", "0", "--time-ratio", "20", *arguments)
    assert child.stdout is not None
    for line in child.stdout:
        for word in line.split():
            if word.startswith("http://"):
                return int(word.rpartition(":")[2].strip("/"))
    raise AssertionError("the stub ended")


def installed(kube: Cluster, namespace: str, objects: list[dict[str, Any]], kubeconfig: Path, part: str = "") -> None:
    """Apply all but the pods' controllers, and write a kubeconfig of the chart's account, `-epp` or `-indexer`."""
    for thing in objects:
        if thing["kind"] not in ("Deployment", "StatefulSet"):
            kube.admin.apply(thing)
    account = one(objects, "ServiceAccount", part)["metadata"]["name"]
    kube.kubeconfig(kubeconfig, kube.token(namespace, account), namespace)


def until(attempt: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, grpc.RpcError):
            answer = attempt()
            if answer:
                return answer
        time.sleep(0.1)
    raise AssertionError(f"{what}: not within {PATIENCE:.0f} s")


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as response:
        return str(response.read().decode())


def check(channel: grpc.Channel, service: str) -> bool:
    """grpc.health.v1.Health/Check: SERVING?"""
    call = channel.unary_unary("/grpc.health.v1.Health/Check")
    return bool(call(b"\x0a" + bytes([len(service)]) + service.encode(), timeout=5) == b"\x08\x01")
