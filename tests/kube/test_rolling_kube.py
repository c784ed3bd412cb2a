"""A rolling update of two replicas, one after the other, behind a gateway that knows only what the leader says."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from kc_objects import leader_service, pool, until
from kc_pods import PodServer, pod_servers
from kc_replicas import LEASE, SLICE, ControlPlane, Envoy, Replica
from kc_traffic import Traffic
from kr_client import Refused
from kr_cluster import Cluster
from kr_runs import check
from ports import free_ports

from gw_processes import Child, require_envoy, stat  # isort: skip

DURATION_S = 4


def warm(address: str) -> bool:
    """What the chart's readiness probe asks."""
    with grpc.insecure_channel(address) as channel:
        return check(channel, "warm")


class World:
    def __init__(self, cluster: Cluster, namespace: str, directory: Path, pods: list[PodServer], plane: ControlPlane):
        self.cluster, self.namespace, self.directory, self.pods, self.plane = cluster, namespace, directory, pods, plane
        self.started: list[Child] = []
        self.replicas: list[Replica] = []
        self._kubeconfig = str(cluster.kubeconfig(directory / "kubeconfig"))

    async def replica(self) -> Replica:
        """One more, warm: as a Deployment that waits for it to be ready."""
        number = len(self.replicas)
        made = Replica(self.directory, f"epp-{number}", f"10.244.0.{number + 1}")
        self.replicas.append(made)
        self.started.append(made)
        election = {
            "enabled": True,
            "leaseName": LEASE["metadata"]["name"],
            "leaseDuration": DURATION_S,
            "renewDeadline": 3,
            "retryPeriod": 1,
            "overlap": "3s",
            "service": "epp-leader",
        }
        kubernetes = {
            "pool": "llama",
            "namespace": self.namespace,
            "kubeconfig": self._kubeconfig,
            "leaderElection": election,
        }
        config = {"kubernetes": kubernetes, "gateway": "none", "als": {"enabled": False}}
        await asyncio.to_thread(made.start, config)
        self.plane.network[made.ip] = made.ext_proc
        async with asyncio.timeout(30):
            while not await asyncio.to_thread(warm, made.ext_proc):
                await asyncio.sleep(0.05)
        return made

    async def gateway(self) -> Envoy:
        envoy = Envoy(self.directory)
        self.started.append(envoy)
        (port,) = free_ports(1)
        await asyncio.to_thread(envoy.start, self.plane.gateway(port, self.pods))
        async with asyncio.timeout(20):
            while await stat(envoy.admin, "cluster.ext_proc.membership_healthy") != 1:
                await asyncio.sleep(0.02)
        return envoy

    async def get(self, what: dict[str, Any]) -> dict[str, Any]:
        return dict(await asyncio.to_thread(self.cluster.admin.get, what, self.namespace))

    async def led_by(self, replica: Replica) -> bool:
        found = await self.get(SLICE)
        named = [(one["addresses"], one["targetRef"]["name"]) for one in found["endpoints"] or ()]
        return named == [([replica.ip], replica.file.stem)]


@pytest.fixture
def processes() -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    for child in reversed(started):
        child.end()


@pytest.fixture
async def world(kube: Cluster, namespace: str, tmp_path: Path, processes: list[Child]) -> AsyncIterator[World]:
    require_envoy()
    async with AsyncExitStack() as stack:
        pods = await pod_servers(2)
        for i, server in enumerate(pods):
            stack.push_async_callback(server.stop)
            await asyncio.to_thread(kube.pod, namespace, f"p{i}", server.address, labels={"app": "vllm"})
        for value in (pool(ports=(pods[0].port,)), leader_service("epp-leader")):
            await asyncio.to_thread(kube.admin.apply, value, namespace)
        plane = await stack.enter_async_context(ControlPlane(kube, namespace, tmp_path))
        made = World(kube, namespace, tmp_path, pods, plane)
        made.started = processes
        yield made


async def test_a_rolling_update_loses_no_request(world: World) -> None:
    """The worst order: the leader goes first, so that the other old one leads for a while."""
    old = [await world.replica() for _ in range(2)]
    await old[0].until_ready()
    assert not await old[1].ready(), "a standby is warm, and gateways must not ask it"
    envoy = await world.gateway()
    async with Traffic(envoy.port) as traffic:
        await until(lambda: traffic.total > 50)
        for outgoing in old:
            incoming = await world.replica()
            outgoing.signal(signal.SIGTERM)
            assert await outgoing.wait() == 0
            seen = traffic.total
            await until(lambda seen=seen: traffic.total > seen + 100)
    lease = (await world.get(LEASE))["spec"]
    print(f"{traffic.total} requests: {dict(traffic.statuses)}; gateways were told {world.plane.seen}")
    assert set(traffic.statuses) == {200}, (traffic.statuses, traffic.answers[:3])
    assert lease["leaseTransitions"] == len(world.plane.seen) - 1 >= 1
    assert await incoming.ready() or await world.replicas[2].ready()
    owner = (await world.get(SLICE))["metadata"]["ownerReferences"][0]
    assert (owner["kind"], owner["name"]) == ("Service", "epp-leader")


async def test_a_leader_that_dies_is_replaced_where_gateways_look(world: World) -> None:
    """Its pod may count as ready for long; the slice is written over. So it is when others change it."""
    leader, standby = [await world.replica() for _ in range(2)]
    await leader.until_ready()
    async with asyncio.timeout(10):
        while not await world.led_by(leader):
            await asyncio.sleep(0.02)
    await asyncio.to_thread(world.cluster.admin.delete, SLICE, world.namespace)
    async with asyncio.timeout(10):
        while SLICE not in await asyncio.to_thread(listed, world) or not await world.led_by(leader):
            await asyncio.sleep(0.05)
    envoy = await world.gateway()
    leader.signal(signal.SIGKILL)
    await standby.until_ready(DURATION_S + 10)
    async with asyncio.timeout(5):
        while not await world.led_by(standby):
            await asyncio.sleep(0.02)
    await until(lambda: world.plane.seen[-1] == (standby.ip,))
    async with Traffic(envoy.port) as traffic:
        await until(lambda: traffic.statuses[200] > 100)
        lost = traffic.total - traffic.statuses[200]
        await until(lambda: traffic.statuses[200] > 200)
    assert traffic.total - traffic.statuses[200] == lost, "once it is found, every request finds it"
    standby.signal(signal.SIGTERM)
    await standby.wait()
    assert (await world.get(SLICE))["endpoints"] in (None, []), "nobody answers, and gateways know"


def listed(world: World) -> list[dict[str, Any]]:
    """SLICE if it is there."""
    try:
        world.cluster.admin.get(SLICE, world.namespace)
    except Refused:
        return []
    return [SLICE]
