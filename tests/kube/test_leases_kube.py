"""Two replicas and an Envoy that may ask either, which does not fail open: every request needs a scheduler."""

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

import pytest
from kc_objects import pool, until
from kc_pods import PodServer, pod_servers
from kc_traffic import Traffic
from kr_cluster import Cluster

from fairlead.io.envoy.config import build
from fairlead.io.envoy.options import Options

from gw_processes import Child, Envoy, Serve, _get, free_ports, require_envoy, stat  # isort: skip

LEASE = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "epp-serving-llama.fairlead"}}
DURATION_S = 4


class Replica(Serve):
    """One of several: it has started when it answers, ready or not."""

    def again(self) -> Self:
        self._file.write_text(json.dumps(self.config))
        self.spawn(sys.executable, "-m", "fairlead", "serve", str(self._file))
        self._until(lambda: _get(self.admin + "/healthz")[0] == 200)
        return self

    async def ready(self) -> bool:
        return (await asyncio.to_thread(_get, self.admin + "/readyz"))[0] == 200

    async def until_ready(self, seconds: float = 60.0) -> float:
        began = time.monotonic()
        while not await self.ready():
            assert time.monotonic() - began < seconds, self.said()[-2000:]
            await asyncio.sleep(0.01)
        return time.monotonic() - began


class World:
    def __init__(self, cluster: Cluster, replicas: list[Replica], envoy: Envoy, pods: list[PodServer]) -> None:
        self.cluster, self.replicas, self.envoy, self.pods = cluster, replicas, envoy, pods

    async def lease(self) -> dict[str, Any]:
        found = await asyncio.to_thread(self.cluster.admin.get, LEASE, "serving")
        return dict(found["spec"])


def two_schedulers(gateway: int, addresses: list[str], pods: list[PodServer], fail_open: bool) -> dict[str, Any]:
    """A bootstrap whose ext_proc cluster has both."""
    bootstrap: dict[str, Any] = build(
        Options(
            port=gateway,
            ext_proc=addresses[0],
            endpoints=tuple(f"{pod.address}:{pod.port}" for pod in pods),
            fail_open=fail_open,
        )
    )
    cluster = next(one for one in bootstrap["static_resources"]["clusters"] if one["name"] == "ext_proc")
    hosts = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    other = json.loads(json.dumps(hosts[0]))
    other["endpoint"]["address"]["socket_address"]["port_value"] = int(addresses[1].rpartition(":")[2])
    hosts.append(other)
    return bootstrap


@pytest.fixture
def processes() -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    for child in reversed(started):
        child.end()


@pytest.fixture
async def world(
    own_kube: Callable[..., Cluster], tmp_path: Path, processes: list[Child], request: pytest.FixtureRequest
) -> AsyncIterator[World]:
    require_envoy()
    cluster = await asyncio.to_thread(own_kube)
    await asyncio.to_thread(cluster.install_crds)
    await asyncio.to_thread(cluster.namespace, "serving")
    async with AsyncExitStack() as stack:
        pods = await pod_servers(2)
        for i, server in enumerate(pods):
            stack.push_async_callback(server.stop)
            await asyncio.to_thread(cluster.pod, "serving", f"p{i}", server.address, labels={"app": "vllm"})
        await asyncio.to_thread(cluster.admin.apply, pool(ports=(pods[0].port,)), "serving")
        election = {"enabled": True, "leaseDuration": DURATION_S, "renewDeadline": 3, "retryPeriod": 1}
        kubernetes = {
            "pool": "llama",
            "namespace": "serving",
            "kubeconfig": str(cluster.kubeconfig(tmp_path / "kubeconfig")),
            "leaderElection": election,
        }
        replicas = [Replica(tmp_path, f"epp-{i}") for i in range(2)]
        for replica in replicas:
            processes.append(replica)
            config = {"kubernetes": kubernetes, "gateway": "none", "als": {"enabled": False}}
            await asyncio.to_thread(replica.start, config)
            if replica is replicas[0]:
                await replica.until_ready()
        (gateway,) = free_ports(1)
        envoy = Envoy(tmp_path)
        processes.append(envoy)
        addresses = [replica.ext_proc for replica in replicas]
        fail_open = bool(getattr(request, "param", False))
        await asyncio.to_thread(envoy.start, two_schedulers(gateway, addresses, pods, fail_open))
        async with asyncio.timeout(20):
            while await stat(envoy.admin, "cluster.ext_proc.membership_healthy") != 1:
                await asyncio.sleep(0.02)
        yield World(cluster, replicas, envoy, pods)


async def test_a_leader_that_is_told_to_stop_loses_no_request(world: World) -> None:
    leader, standby = world.replicas
    assert not await standby.ready()
    assert len(await standby.endpoints()) == 2, "a standby is warm"
    async with Traffic(world.envoy.port) as traffic:
        await until(lambda: traffic.total > 50)
        leader.signal(signal.SIGTERM)
        took = await standby.until_ready(10)
        seen = traffic.total
        await leader.wait()
        await until(lambda: traffic.total > seen + 300)
    print(
        f"the standby was ready {took * 1000:.0f} ms after SIGTERM; {traffic.total} requests: {dict(traffic.statuses)}"
    )
    assert took < 1.0
    assert set(traffic.statuses) == {200}, (traffic.statuses, traffic.answers[:3])
    lease = await world.lease()
    assert lease["leaseTransitions"] == 1
    assert await standby.metric("fairlead_kube_leader") == 1
    assert leader.code == 0


@pytest.mark.parametrize("world", [True], indirect=True, ids=["fail open"])
async def test_a_leader_that_is_killed_is_replaced_when_its_lease_runs_out(world: World) -> None:
    leader, standby = world.replicas
    async with Traffic(world.envoy.port) as traffic:
        await until(lambda: traffic.total > 50)
        leader.signal(signal.SIGKILL)
        took = await standby.until_ready(DURATION_S + 10)
        decided = await standby.decisions()
        async with asyncio.timeout(10):
            while await standby.decisions() <= decided:
                await asyncio.sleep(0.05)
    print(f"ready {took:.2f} s after SIGKILL, lease {DURATION_S} s; {traffic.total} requests: {dict(traffic.statuses)}")
    assert took < DURATION_S + 1
    assert set(traffic.statuses) == {200}, (traffic.statuses, traffic.answers[:3])


async def test_liveness_never_depends_on_leading_or_the_api_server(world: World) -> None:
    leader, standby = world.replicas
    await asyncio.to_thread(world.cluster.kill)
    await asyncio.sleep(DURATION_S + 2)
    assert await leader.ready(), "nobody can take the lease"
    assert not await standby.ready()
    for replica in world.replicas:
        assert (await asyncio.to_thread(_get, replica.admin + "/healthz"))[0] == 200
    await asyncio.to_thread(world.cluster.start)
    renewed = (await world.lease())["renewTime"]
    async with asyncio.timeout(20):
        while (await world.lease())["renewTime"] == renewed:
            await asyncio.sleep(0.05)
    assert await leader.ready()
    assert not await standby.ready()
    assert (await world.lease())["leaseTransitions"] == 0
