"""Several replicas of a picker, the pods they serve, and gateways that find the one that leads."""

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from kc_pods import PodServer
from kr_client import Refused
from kr_cluster import Cluster

from fairlead.gateway.envoy.config import build
from fairlead.gateway.envoy.options import Options

sys.path.insert(0, str(Path(__file__).parents[2] / "e2e" / "support"))

from gw_processes import Envoy, Serve, get_page

LEASE = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "epp"}}
SLICE = {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": {"name": "epp-leader-ipv4"}}


class Replica(Serve):
    """One of several: it has started when it answers, ready or not. `ip`: what it takes for its pod's address."""

    def __init__(self, directory: Path, name: str, ip: str = "") -> None:
        super().__init__(directory, name)
        self.ip = ip

    def again(self) -> Self:
        self._file.write_text(json.dumps(self.config))
        name = self._file.stem
        pod = (f"POD_IP={self.ip}", f"POD_NAME={name}", f"POD_UID=uid-of-{name}")
        self.spawn("env", *pod, sys.executable, "-m", "fairlead", "serve", str(self._file))
        self.poll_until(lambda: get_page(self.admin + "/healthz")[0] == 200)
        return self

    async def ready(self) -> bool:
        return (await asyncio.to_thread(get_page, self.admin + "/readyz"))[0] == 200

    async def until_ready(self, seconds: float = 60.0) -> float:
        began = time.monotonic()
        while not await self.ready():
            assert time.monotonic() - began < seconds, self.said()[-2000:]
            await asyncio.sleep(0.01)
        return time.monotonic() - began


def bootstrap_of(
    gateway: int, pickers: Sequence[str], pods: list[PodServer], fail_open: bool = False, log: bool = False
) -> dict[str, Any]:
    endpoints = tuple(f"{pod.address}:{pod.port}" for pod in pods)
    picker, *others = pickers
    als = picker if log else ""
    return build(
        Options(
            port=gateway,
            ext_proc=picker,
            peers=tuple(others),
            als=als,
            endpoints=endpoints,
            fail_open=fail_open,
            response_mode="first-chunk" if fail_open else "none",
        )
    )


def ext_proc_cluster(bootstrap: dict[str, Any]) -> dict[str, Any]:
    return next(one for one in bootstrap["static_resources"]["clusters"] if one["name"] == "ext_proc")


def host(address: str) -> dict[str, Any]:
    ip, _, port = address.rpartition(":")
    return {"endpoint": {"address": {"socket_address": {"address": ip, "port_value": int(port)}}}}


def two_schedulers(gateway: int, addresses: list[str], pods: list[PodServer], fail_open: bool) -> dict[str, Any]:
    """A gateway that knows both and goes by health checks, whose results reach its workers as late as Envoy likes."""
    bootstrap = bootstrap_of(gateway, addresses, pods, fail_open, log=True)
    del ext_proc_cluster(bootstrap)["common_lb_config"]["update_merge_window"]
    return bootstrap


class ControlPlane:
    """What Istio and its like do: a Service's EndpointSlice becomes the gateway's endpoints, a moment later.

    No health checks: of the Kubernetes gateways hardly one asks. `network`: where a pod's address really is.
    """

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        directory: Path,
        delay_s: float = 0.5,
        endpoint_slice: Mapping[str, Any] = SLICE,
    ) -> None:
        self.network: dict[str, str] = {}
        self.seen: list[tuple[str, ...]] = []
        self._cluster, self._namespace, self._delay_s, self._slice = cluster, namespace, delay_s, endpoint_slice
        self._file = directory / "pickers.json"
        self._write(())

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def gateway(self, port: int, pods: list[PodServer]) -> dict[str, Any]:
        """Closed: a request that nobody schedules is answered 503."""
        bootstrap = bootstrap_of(port, ["127.0.0.1:1"], pods)
        cluster = ext_proc_cluster(bootstrap)
        for key in ("load_assignment", "health_checks"):
            del cluster[key]
        source = {"path": str(self._file), "watched_directory": {"path": str(self._file.parent)}}
        cluster["type"] = "EDS"
        config = {"path_config_source": source, "resource_api_version": "V3"}
        cluster["eds_cluster_config"] = {"service_name": "pickers", "eds_config": config}
        return bootstrap

    async def _run(self) -> None:
        while True:
            found = await asyncio.to_thread(self._read)
            if found is not None and (not self.seen or found != self.seen[-1]):
                await asyncio.sleep(self._delay_s)
                self.seen.append(found)
                self._write(tuple(self.network[address] for address in found))
            await asyncio.sleep(0.05)

    def _read(self) -> tuple[str, ...] | None:
        try:
            found: Mapping[str, Any] = self._cluster.admin.get(dict(self._slice), self._namespace)
        except Refused as error:
            if error.status == 404:
                return None
            raise
        ready = [one for one in found.get("endpoints") or () if one["conditions"]["ready"]]
        return tuple(address for one in ready for address in one["addresses"])

    def _write(self, addresses: tuple[str, ...]) -> None:
        assignment = {
            "@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
            "cluster_name": "pickers",
            "endpoints": [{"lb_endpoints": [host(address) for address in addresses]}],
        }
        text = json.dumps({"version_info": str(len(self.seen)), "resources": [assignment]})
        aside = self._file.with_suffix(".new")
        aside.write_text(text)
        os.replace(aside, self._file)


__all__ = ["LEASE", "SLICE", "ControlPlane", "Envoy", "Replica", "two_schedulers"]
