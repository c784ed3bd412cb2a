"""Objects of a pool, and who follows its pods in the test's own process."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fairlead.core.events import EndpointDown, EndpointUp
from fairlead.pool.kube.auth import find_access
from fairlead.pool.kube.client import KubeClient
from fairlead.pool.kube.objects import GROUP, Pool
from fairlead.pool.kube.pods import PoolEndpoints

Object = dict[str, Any]
POOL_V1 = "inference.networking.k8s.io/v1"
LEGACY = "inference.networking.x-k8s.io/v1alpha2"
LLMD = "llm-d.ai/v1alpha2"


def pool(name: str = "llama", ports: tuple[int, ...] = (8000,), **labels: str) -> Object:
    spec = {
        "selector": {"matchLabels": labels or {"app": "vllm"}},
        "targetPorts": [{"number": port} for port in ports],
        "endpointPickerRef": {"name": "epp", "port": {"number": 9002}},
    }
    return {"apiVersion": POOL_V1, "kind": "InferencePool", "metadata": {"name": name}, "spec": spec}


def leader_service(name: str) -> Object:
    """Without a selector: who leads says where it leads to."""
    port = {"name": "grpc-ext-proc", "port": 9002, "targetPort": 9002}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": {"ports": [port]}}


def model(name: str, asked: str, *targets: tuple[str, int], criticality: str = "Standard", of: str = "llama") -> Object:
    spec: Object = {
        "modelName": asked,
        "criticality": criticality,
        "poolRef": {"name": of, "group": "inference.networking.k8s.io"},
    }
    if targets:
        spec["targetModels"] = [{"name": target, "weight": weight} for target, weight in targets]
    return {"apiVersion": LEGACY, "kind": "InferenceModel", "metadata": {"name": name}, "spec": spec}


def rewrite(name: str, asked: str, *targets: tuple[str, int], of: str = "llama") -> Object:
    rule = {
        "matches": [{"model": {"type": "Exact", "value": asked}}],
        "targets": [{"modelRewrite": target, "weight": weight} for target, weight in targets],
    }
    spec = {"poolRef": {"name": of, "group": "inference.networking.k8s.io"}, "rules": [rule]}
    return {"apiVersion": LLMD, "kind": "InferenceModelRewrite", "metadata": {"name": name}, "spec": spec}


async def until(condition: Callable[[], Any], what: str = "", seconds: float = 30.0) -> float:
    """Wait for something to become true; returns how long it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.005)
    return time.monotonic() - began


class Followed:
    """Endpoints of a pool as the product's own client sees them, and every event in order."""

    def __init__(self, kubeconfig: Path, namespace: str, name: str = "llama") -> None:
        self.up: dict[str, str] = {}
        self.events: list[str] = []
        self.troubles: list[str] = []
        self.client = KubeClient(find_access(str(kubeconfig)))
        self.pods = PoolEndpoints(
            self.client,
            Pool(namespace, name, {}, ()),
            GROUP,
            self._feed,
            on_trouble=lambda resource, trouble: self.troubles.append(trouble),
        )

    async def __aenter__(self) -> "Followed":
        self._task = asyncio.create_task(self.pods.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.client.close()

    def _feed(self, event: EndpointUp | EndpointDown) -> None:
        if isinstance(event, EndpointUp):
            self.up[event.endpoint.id] = event.endpoint.address
            self.events.append("+" + short(event.endpoint.id))
        else:
            del self.up[event.endpoint_id]
            self.events.append("-" + short(event.endpoint_id))

    @property
    def table(self) -> dict[str, str]:
        return {short(name): address for name, address in self.up.items()}

    def news(self) -> list[str]:
        told, self.events = self.events, []
        return sorted(told)


def short(endpoint_id: str) -> str:
    """`serving/a-rank-0` → `a/0`."""
    return endpoint_id.partition("/")[2].replace("-rank-", "/")
