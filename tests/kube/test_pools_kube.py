"""Several pools in one process: pools of two namespaces, one that appears later, one that is deleted, each behind an
Envoy that knows no more of the scheduler than a gateway of the Gateway API does: the Service of the pool. The
scheduler has the chart's rights."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kc_objects import leader_service, model, pool, until
from kc_pods import PodServer, pod_servers
from kc_replicas import Replica, bootstrap_of, ext_proc_cluster, host
from kc_traffic import Traffic, one
from kr_client import Refused
from kr_cluster import Cluster
from kr_helm import Helm, of_kind
from ports import free_ports

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e" / "support"))

from gw_processes import Child, Envoy, get_page, require_envoy

#: What it takes for its pod's address; a slice cannot name a loopback one.
PICKER_IP = "10.244.0.7"


class World:
    """A scheduler of several pools, and what stands around it."""

    def __init__(self, cluster: Cluster, directory: Path, processes: list[Child]) -> None:
        self.cluster, self.directory, self.processes = cluster, directory, processes
        self.picker = Replica(directory, "picker", PICKER_IP)
        processes.append(self.picker)

    async def make(self, namespace: str, name: str, pods: list[PodServer]) -> None:
        """A pool, its pods and, as its users do it, a Service without a selector for its picker."""
        await asyncio.to_thread(self.apply, namespace, name, pods)

    def apply(self, namespace: str, name: str, pods: list[PodServer]) -> None:
        for i, pod in enumerate(pods):
            self.cluster.pod(namespace, f"{name}-{i}", pod.address, labels={"app": name})
        service = leader_service(f"{name}-epp")
        service["spec"]["ports"][0]["targetPort"] = self.picker.config["extProc"]["port"]
        self.cluster.admin.apply(service, namespace)
        wanted = pool(name, (pods[0].port,), app=name)
        wanted["spec"]["endpointPickerRef"]["name"] = f"{name}-epp"
        self.cluster.admin.apply(wanted, namespace)

    async def delete(self, namespace: str, name: str) -> None:
        await asyncio.to_thread(self.cluster.admin.delete, pool(name), namespace)

    async def gateway(self, namespace: str, name: str, pods: list[PodServer]) -> int:
        """A gateway's port, for one pool. It fails closed, so who is answered was scheduled."""
        slices = {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice"}
        kept = {**slices, "metadata": {"name": f"{name}-epp-ipv4"}}
        async with asyncio.timeout(20):
            while True:
                try:
                    found = await asyncio.to_thread(self.cluster.admin.get, kept, namespace)
                    break
                except Refused:
                    await asyncio.sleep(0.01)
        assert found["endpoints"][0]["addresses"] == [PICKER_IP]
        address = f"127.0.0.1:{found['ports'][0]['port']}"
        bootstrap = bootstrap_of(free_ports(1)[0], ["127.0.0.1:1"], pods)
        cluster = ext_proc_cluster(bootstrap)
        cluster["load_assignment"]["endpoints"][0]["lb_endpoints"] = [host(address)]
        text = json.dumps(bootstrap).replace(
            '"authority": "fairlead"', f'"authority": "{name}-epp.{namespace}.svc:9002"'
        )
        envoy = Envoy(self.directory, f"envoy-{namespace}-{name}")
        self.processes.append(envoy)
        await asyncio.to_thread(envoy.start, json.loads(text))
        return envoy.port

    async def page(self, path: str) -> tuple[int, str]:
        return await asyncio.to_thread(get_page, self.picker.admin + path)

    async def decisions(self, key: str) -> list[dict[str, Any]]:
        status, page = await self.page(f"/debug/decisions?pool={key}&last=200")
        assert status == 200, page
        return list(json.loads(page)["decisions"])


@pytest.fixture
def processes() -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    for child in reversed(started):
        child.end()


async def answered(port: int, model: str = "chat") -> int:
    return int((await one(port, model)).status)


def with_the_charts_rights(kube: Cluster, helm: Helm, directory: Path, namespaces: list[str]) -> Path:
    """The kubeconfig of the account that the chart makes in the first namespace."""
    own = namespaces[0]
    rendered = helm.render("--set-json", f"inferencePool.namespaces={json.dumps(namespaces)}", namespace=own)
    for kind in ("ServiceAccount", "Role", "RoleBinding"):
        for thing in of_kind(rendered, kind):
            kube.admin.apply(thing, thing["metadata"]["namespace"])
    return kube.kubeconfig(directory / "kubeconfig", kube.token(own, "one-epp"), own)


async def test_pools_come_and_go_in_one_process(
    kube: Cluster, namespace: str, helm: Helm, tmp_path: Path, processes: list[Child]
) -> None:
    require_envoy()
    first, second = namespace, await asyncio.to_thread(kube.namespace, f"{namespace}-b")
    pods = await pod_servers(4)
    world = World(kube, tmp_path, processes)
    kubeconfig = str(await asyncio.to_thread(with_the_charts_rights, kube, helm, tmp_path, [first, second]))
    ext_proc, admin = free_ports(2)
    election = {"enabled": True, "leaseName": "one-epp", "leaseDuration": 4, "renewDeadline": 3, "retryPeriod": 1}
    world.picker.config = {
        "gateway": {"mode": "none"},
        "kubernetes": {
            "namespaces": [first, second],
            "namespace": first,
            "kubeconfig": kubeconfig,
            "leaderElection": election,
        },
        "extProc": {"host": "127.0.0.1", "port": ext_proc},
        "admin": {"port": admin},
        "journal": {"path": str(tmp_path / "journal")},
        "pools": {f"{second}/llama": {"scorers": [{"type": "load-aware", "weight": 1}]}},
    }
    try:
        await world.make(first, "llama", pods[:2])
        await world.make(second, "llama", pods[2:3])
        await asyncio.to_thread(kube.admin.apply, model("chat", "chat"), first)
        await asyncio.to_thread(world.picker.again)
        await world.picker.until_ready()
        a = await world.gateway(first, "llama", pods)
        b = await world.gateway(second, "llama", pods)
        async with asyncio.timeout(20):
            while (await answered(a), await answered(b)) != (200, 200):
                await asyncio.sleep(0.02)
        async with Traffic(a) as to_a, Traffic(b) as to_b:
            await until(lambda: all(pod.served > 5 for pod in pods[:3]), "traffic to both pools")
            # Each has its own definitions: the first pool has one, so it knows no other name.
            assert await answered(a, "nobody-knows") == 404
            assert await answered(b, "nobody-knows") == 200
            # One that appears is served without a restart.
            await world.make(second, "qwen", pods[3:])
            c = await world.gateway(second, "qwen", pods)
            async with asyncio.timeout(20):
                while await answered(c) != 200:
                    await asyncio.sleep(0.02)
            assert pods[3].served
            # One that is deleted is not; the others go on.
            seen = to_a.total
            await world.delete(second, "llama")
            await until(lambda: 503 in to_b.statuses, "the deleted pool's gateway is refused")
            await until(lambda: to_a.total > seen + 50, "the other pools go on")
        assert set(to_a.statuses) == {200}, (to_a.statuses, to_a.answers[:3])
        assert set(to_b.statuses) == {200, 503}, (to_b.statuses, to_b.answers[:3])
        assert {d["policy"] for d in await world.decisions(f"{first}/llama")} == {"cost-model"}
        assert len(await world.decisions(f"{second}/qwen")) >= 1
        status, page = await world.page("/debug/endpoints")
        assert status == 404
        assert all(key in page for key in (f"{first}/llama", f"{second}/qwen"))
        page = (await world.page("/metrics"))[1]
        assert "fairlead_pools 2\n" in page
        assert page.count("# TYPE llm_d_epp_request_total counter\n") == 1
        ready = [line for line in page.splitlines() if line.startswith("llm_d_epp_ready_endpoints{")]
        assert sorted(line.rpartition("} ")[2] for line in ready) == ["1", "2"]
        assert all(f'inference_pool="{key}"' in page for key in (f"{first}/llama", f"{second}/qwen"))
        assert f'inference_pool="{second}/llama"' not in page
        journals = {path.name for path in (tmp_path / "journal").iterdir()}
        assert journals == {f"{first}.llama", f"{second}.llama", f"{second}.qwen"}
        assert f"pool={second}/llama policy=custom" in world.picker.said()
        assert "not allowed" not in world.picker.said()
        accepted = await asyncio.to_thread(kube.admin.get, model("chat", "chat"), first)
        assert accepted["status"]["conditions"][0]["reason"] == "Accepted"
    finally:
        for pod in pods:
            await pod.stop()
