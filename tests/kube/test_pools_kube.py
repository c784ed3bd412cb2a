"""Several pools in one process: pools of two namespaces, one that appears later, one that is deleted, each behind an
Envoy that knows no more of the scheduler than a gateway of the Gateway API does: the Service of the pool. The
scheduler has the chart's rights."""

import asyncio
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from kc_objects import leader_service, model, pool, until
from kc_pods import PodServer, pod_servers
from kc_replicas import SLICE, ControlPlane, Replica, bootstrap_of, ext_proc_cluster, host
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
            # A younger one that names the Service of another takes nothing from it.
            younger = pool("younger", (pods[0].port,), app="younger")
            younger["spec"]["endpointPickerRef"]["name"] = "llama-epp"
            await asyncio.to_thread(kube.admin.apply, younger, first)
            async with asyncio.timeout(20):
                while f"{first}/younger (as {first}/llama)" not in (await world.page("/readyz"))[1]:
                    await asyncio.sleep(0.05)
            assert await answered(a) == 200
            await world.delete(first, "younger")
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
        assert journals == {f"{first}.llama", f"{first}.younger", f"{second}.llama", f"{second}.qwen"}
        assert f"pool={second}/llama policy=custom" in world.picker.said()
        assert "not allowed" not in world.picker.said()
        accepted = await asyncio.to_thread(kube.admin.get, model("chat", "chat"), first)
        assert accepted["status"]["conditions"][0]["reason"] == "Accepted"
    finally:
        for pod in pods:
            await pod.stop()


#: Seconds for which the schedulers' API server is away: longer than the lease.
AWAY_S = 6.0
OUTAGE_IPS = {"a": "10.244.0.7", "b": "10.244.0.8"}


class Outage:
    """Two schedulers of two pools, whose API server may be away while another one, of the same cluster, takes changes.
    The gateways find the leader as their control plane does."""

    def __init__(self, cluster: Cluster, away: Cluster, directory: Path, pods: list[PodServer]) -> None:
        self.cluster, self.away, self.directory, self.pods = cluster, away, directory, pods
        self.replicas: list[Replica] = []
        self.namespaces = [cluster.namespace("a"), cluster.namespace("b")]

    def apply(self, namespace: str, name: str, *indexes: int) -> None:
        """A pool with these pods, its Service and a model."""
        for index in indexes:
            self.pod(namespace, name, index)
        self.cluster.admin.apply(leader_service(f"{name}-epp"), namespace)
        wanted = pool(name, (self.pods[0].port,), app=name)
        wanted["spec"]["endpointPickerRef"]["name"] = f"{name}-epp"
        self.cluster.admin.apply(wanted, namespace)
        self.cluster.admin.apply(model(f"{name}-chat", "chat", of=name), namespace)

    def pod(self, namespace: str, name: str, index: int) -> None:
        self.cluster.pod(namespace, f"{name}-{index}", self.pods[index].address, labels={"app": name})

    async def replace(self, namespace: str, name: str, former: int, later: int) -> None:
        await asyncio.to_thread(self.pod, namespace, name, later)
        await asyncio.to_thread(self.cluster.delete_pod, namespace, f"{name}-{former}")
        await self.pods[former].drain()

    def start(self, processes: list[Child]) -> None:
        election = {"enabled": True, "leaseName": "epp", "leaseDuration": 4, "renewDeadline": 3, "retryPeriod": 1}
        kubeconfig = str(self.away.kubeconfig(self.directory / "kubeconfig"))
        settings = {"namespaces": ["*"], "namespace": "a", "kubeconfig": kubeconfig, "leaderElection": election}
        for name, ip in OUTAGE_IPS.items():
            replica = Replica(self.directory, name, ip)
            ext_proc, admin = free_ports(2)
            replica.config = {
                "gateway": {"mode": "none"},
                "kubernetes": settings,
                "extProc": {"host": "127.0.0.1", "port": ext_proc},
                "admin": {"port": admin},
            }
            processes.append(replica)
            self.replicas.append(replica.again())

    async def gateway(self, stack: AsyncExitStack, processes: list[Child], namespace: str, name: str) -> int:
        directory = self.directory / name
        await asyncio.to_thread(directory.mkdir)
        wanted = {**SLICE, "metadata": {"name": f"{name}-epp-ipv4"}}
        plane = ControlPlane(self.cluster, namespace, directory, endpoint_slice=wanted)
        plane.network = {replica.ip: replica.ext_proc for replica in self.replicas}
        await stack.enter_async_context(plane)
        text = json.dumps(plane.gateway(free_ports(1)[0], self.pods))
        authority = f'"authority": "{name}-epp.{namespace}.svc:9002"'
        envoy = Envoy(directory, f"envoy-{name}")
        processes.append(envoy)
        await asyncio.to_thread(envoy.start, json.loads(text.replace('"authority": "fairlead"', authority)))
        async with asyncio.timeout(30):
            while await answered(envoy.port) != 200:
                await asyncio.sleep(0.05)
        return envoy.port

    async def listed(self, replica: Replica, key: str) -> set[str]:
        status, page = await asyncio.to_thread(get_page, f"{replica.admin}/debug/endpoints?pool={key}")
        return {one["address"].partition(":")[0] for one in json.loads(page)["endpoints"]} if status == 200 else set()

    def named(self, namespace: str, name: str) -> list[str]:
        found = self.cluster.admin.get({**SLICE, "metadata": {"name": f"{name}-epp-ipv4"}}, namespace)
        return [address for one in found.get("endpoints") or () for address in one["addresses"]]

    def told(self, namespace: str, name: str) -> str:
        found = self.cluster.admin.get(model(f"{name}-chat", "chat"), namespace)
        conditions = found.get("status", {}).get("conditions", [{}])
        return str(conditions[0].get("reason"))

    async def loses_the_leader(self, to_qwen: int) -> None:
        """It dies during an outage in which a pool is deleted: the next one cleans up after it."""
        ready = [await replica.ready() for replica in self.replicas]
        assert sorted(ready) == [False, True]
        leader, other = (self.replicas[ready.index(state)] for state in (True, False))
        await asyncio.to_thread(self.away.kill)
        leader.signal(signal.SIGKILL)
        await leader.wait()
        await asyncio.to_thread(self.cluster.admin.delete, pool("later"), "a")
        assert await asyncio.to_thread(self.named, "a", "later") == [leader.ip]
        await asyncio.to_thread(self.away.start)
        await self.comes(lambda: self.named("b", "qwen"), [other.ip])
        await self.comes(lambda: self.named("a", "later"), [])
        await self.comes(lambda: self.told("a", "later"), "PoolNotFound")
        async with asyncio.timeout(20):
            while await answered(to_qwen) != 200:
                await asyncio.sleep(0.05)
        await asyncio.to_thread(other.end)
        assert 'a pool was deleted; its running requests may finish" pool=b/qwen' not in other.said()

    async def comes(self, check: Callable[[], object], wanted: object) -> None:
        async with asyncio.timeout(30):
            while await asyncio.to_thread(check) != wanted:
                await asyncio.sleep(0.1)


async def test_pods_and_pools_change_while_the_api_server_is_away(
    own_kube: Callable[..., Cluster], tmp_path: Path, processes: list[Child]
) -> None:
    require_envoy()
    cluster = await asyncio.to_thread(own_kube)
    await asyncio.to_thread(cluster.install_crds)
    away = await asyncio.to_thread(lambda: own_kube(twin_of=cluster))
    pods = await pod_servers(8)
    world = await asyncio.to_thread(Outage, cluster, away, tmp_path, pods)
    try:
        async with AsyncExitStack() as stack:
            for namespace, name, *indexes in (("a", "llama", 0, 1), ("b", "qwen", 2, 3), ("b", "former", 6)):
                await asyncio.to_thread(world.apply, namespace, name, *indexes)
            await asyncio.to_thread(world.start, processes)
            to_llama = await world.gateway(stack, processes, "a", "llama")
            to_qwen = await world.gateway(stack, processes, "b", "qwen")
            await world.comes(lambda: world.told("b", "former"), "Accepted")
            await world.comes(lambda: len(world.named("b", "former")), 1)
            async with Traffic(to_llama) as llama, Traffic(to_qwen) as qwen:
                await until(lambda: all(pod.served > 5 for pod in pods[:4]), "traffic to both pools")
                await asyncio.to_thread(away.kill)
                began = time.monotonic()
                await asyncio.sleep(1.0)
                await world.replace("a", "llama", 0, 4)
                await world.replace("b", "qwen", 2, 5)
                await asyncio.to_thread(cluster.admin.delete, pool("former"), "b")
                await asyncio.to_thread(world.apply, "a", "later", 7)
                seen = llama.total, qwen.total
                await until(lambda: llama.total > seen[0] + 200 and qwen.total > seen[1] + 200, "traffic goes on")
                await asyncio.sleep(began + AWAY_S - time.monotonic())
                await asyncio.to_thread(away.start)
                wanted = {"a/llama": {1, 4}, "b/qwen": {3, 5}, "a/later": {7}, "b/former": set[int]()}
                for replica in world.replicas:
                    async with asyncio.timeout(30):
                        for key, indexes_of in wanted.items():
                            while await world.listed(replica, key) != {pods[index].address for index in indexes_of}:
                                await asyncio.sleep(0.05)
                await until(lambda: pods[4].served > 5 and pods[5].served > 5, "traffic to the new pods")
                await world.comes(lambda: world.named("b", "former"), [])
                await world.comes(lambda: world.told("b", "former"), "PoolNotFound")
                await world.comes(lambda: world.told("a", "later"), "Accepted")
                for namespace, name in (("a", "llama"), ("b", "qwen"), ("a", "later")):
                    await world.comes(lambda space=namespace, of=name: len(world.named(space, of)), 1)  # type: ignore[misc]
            to_later = await world.gateway(stack, processes, "a", "later")
            assert await answered(to_later) == 200
            for traffic in (llama, qwen):
                assert set(traffic.statuses) == {200}, (traffic.statuses, traffic.answers[:3])
            await world.loses_the_leader(to_qwen)
    finally:
        for server in pods:
            await server.stop()
