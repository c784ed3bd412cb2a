"""A pod of the reference picker's, with our image in it: its arguments, environment and probes."""

import contextlib
import os
import socket
import sys
from pathlib import Path
from typing import Any

import grpc
from kr_runs import check
from ports import free_ports

sys.path.insert(0, str(Path(__file__).parents[2] / "e2e" / "support"))

from gw_processes import Child

ROOT = Path(__file__).parents[3]


def _ports() -> list[int]:
    """Of ext_proc, health and metrics; the port behind the last one is free too, for the admin pages."""
    while True:
        found = free_ports(3)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", found[-1] + 1))
            if found[-1] + 1 not in found:
                return found


class Picker(Child):
    """Its ports are others, and where its files are: `directory` has `kubeconfig`, and `config`, what is mounted."""

    def __init__(self, directory: Path, name: str, container: dict[str, Any], namespace: str) -> None:
        super().__init__(name, directory / f"{name}.log")
        self._container = container
        self.port, health, self.metrics = _ports()
        self.health = f"127.0.0.1:{health}"
        given = [word.replace("/config/", f"{directory}/config/") for word in container["args"]]
        given += [f"--grpc-port={self.port}", f"--grpc-health-port={health}", f"--metrics-port={self.metrics}"]
        path = f"PATH={Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        pod = (path, f"NAMESPACE={namespace}", f"POD_NAME={name}", f"KUBECONFIG={directory}/kubeconfig")
        self.spawn("env", *pod, str(ROOT / "deploy" / "entrypoint.sh"), *given)

    def answers(self, probe: str) -> bool:
        """As the kubelet asks."""
        with grpc.insecure_channel(self.health) as channel:
            try:
                return check(channel, self._container[probe]["grpc"]["service"])
            except grpc.RpcError:
                return False
