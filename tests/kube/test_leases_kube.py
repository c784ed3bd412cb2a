"""Two replicas and an Envoy that may ask either, which does not fail open: every request needs a scheduler."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from kc_objects import pool, until
from kc_pods import pod_servers
from kc_replicas import LEASE, Envoy, Replica, two_schedulers
from kc_traffic import Traffic
from kr_cluster import Cluster
from ports import free_ports

from gw_processes import Child, get_page, require_envoy, stat  # isort: skip

DURATION_S, LONG_S = 4, 300
CLIENTS = int(os.environ.get("FAIRLEAD_CLIENTS", "4"))


class World:
    def __init__(self, cluster: Cluster, namespace: str, replicas: list[Replica], envoy: Envoy) -> None:
        self.cluster, self.namespace, self.replicas, self.envoy = cluster, namespace, replicas, envoy

    async def lease(self) -> dict[str, Any]:
        found = await asyncio.to_thread(self.cluster.admin.get, LEASE, self.namespace)
        return dict(found["spec"])


@pytest.fixture
def processes() -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    for child in reversed(started):
        child.end(gently=False)  # a leader that is told to stop waits for gateways to notice


@asynccontextmanager
async def two_replicas(
    cluster: Cluster,
    namespace: str,
    tmp_path: Path,
    processes: list[Child],
    fail_open: bool = False,
    duration_s: int = DURATION_S,
    keeps: bool = False,
) -> AsyncIterator[World]:
    """`keeps`: with state files, and admin ports that other pods reach."""
    require_envoy()
    async with AsyncExitStack() as stack:
        pods = await pod_servers(2)
        for i, server in enumerate(pods):
            stack.push_async_callback(server.stop)
            await asyncio.to_thread(cluster.pod, namespace, f"p{i}", server.address, labels={"app": "vllm"})
        await asyncio.to_thread(cluster.admin.apply, pool(ports=(pods[0].port,)), namespace)
        election = {
            "enabled": True,
            "leaseDuration": duration_s,
            "renewDeadline": 3,
            "retryPeriod": 1,
            "leaseName": "epp",
        }
        kubernetes = {
            "pool": "llama",
            "namespace": namespace,
            "kubeconfig": str(cluster.kubeconfig(tmp_path / "kubeconfig")),
            "leaderElection": election,
        }
        replicas = [Replica(tmp_path, f"epp-{i}", "127.0.0.1") for i in range(2)]
        for replica in replicas:
            processes.append(replica)
            (health,) = free_ports(1)
            config: dict[str, Any] = {"kubernetes": kubernetes, "gateway": "none", "extProc": {"healthPort": health}}
            if keeps:
                config["state"] = {"file": str(tmp_path / f"epp-{len(processes)}.state"), "interval": 1}
                config["admin"] = {"host": "0.0.0.0"}
            await asyncio.to_thread(replica.start, config)
            if replica is replicas[0]:
                await replica.until_ready()
        (gateway,) = free_ports(1)
        envoy = Envoy(tmp_path)
        processes.append(envoy)
        addresses = [replica.ext_proc for replica in replicas]
        await asyncio.to_thread(envoy.start, two_schedulers(gateway, addresses, pods, fail_open))
        async with asyncio.timeout(20):
            while await stat(envoy.admin, "cluster.ext_proc.membership_healthy") != 1:
                await asyncio.sleep(0.02)
        yield World(cluster, namespace, replicas, envoy)


@pytest.fixture
async def world(kube: Cluster, namespace: str, tmp_path: Path, processes: list[Child]) -> AsyncIterator[World]:
    async with two_replicas(kube, namespace, tmp_path, processes) as made:
        yield made


async def test_a_leader_that_is_told_to_stop_loses_no_request(world: World) -> None:
    leader, standby = world.replicas
    assert not await standby.ready()
    assert len(await standby.endpoints()) == 2, "a standby is warm"
    async with Traffic(world.envoy.port, clients=CLIENTS) as traffic:
        await until(lambda: traffic.total > 50)
        leader.signal(signal.SIGTERM)
        took = await standby.until_ready(10)
        seen = traffic.total
        await leader.wait()
        await until(lambda: traffic.total > seen + 300)
    print(
        f"the standby was ready {took * 1000:.0f} ms after SIGTERM; {traffic.total} requests: {dict(traffic.statuses)}"
    )
    assert took < DURATION_S / 2, "long before the lease runs out"
    assert set(traffic.statuses) == {200}, (traffic.statuses, traffic.answers[:3])
    lease = await world.lease()
    assert lease["leaseTransitions"] == 1
    assert await standby.metric("fairlead_kube_leader") == 1
    assert leader.code == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["told to stop", "killed"])
async def test_a_new_leader_knows_what_the_last_one_learned(
    kube: Cluster, namespace: str, tmp_path: Path, processes: list[Child], number: signal.Signals
) -> None:
    async with two_replicas(kube, namespace, tmp_path, processes, duration_s=LONG_S, keeps=True) as world:
        leader, standby = world.replicas
        async with Traffic(world.envoy.port, clients=CLIENTS, text=lambda client, turn: f"{client}" * 4000) as traffic:
            await until(lambda: traffic.total > 50)
        await asyncio.sleep(5.0 if number == signal.SIGKILL else 0.0)
        leader.signal(number)
        await standby.until_ready(20)
        async with asyncio.timeout(10):
            while not await standby.metric("fairlead_state_restored_prefixes"):
                await asyncio.sleep(0.05)
        await leader.wait()


@pytest.mark.parametrize("fail_open", [True, False], ids=["fail open", "fail closed"])
@pytest.mark.parametrize("again", [False, True], ids=["pod gone", "container restarted"])
async def test_no_request_fails_when_the_leader_is_killed(
    kube: Cluster, namespace: str, tmp_path: Path, processes: list[Child], fail_open: bool, again: bool
) -> None:
    """The standby sees its connection to the leader end, long before the lease runs out."""
    async with two_replicas(kube, namespace, tmp_path, processes, fail_open, LONG_S) as world:
        leader, standby = world.replicas
        async with Traffic(world.envoy.port, clients=CLIENTS) as traffic:
            await until(lambda: traffic.total > 50)
            decided = await standby.decisions()
            leader.signal(signal.SIGKILL)
            await leader.wait()
            restarted = asyncio.create_task(asyncio.to_thread(leader.again)) if again else None
            took = await standby.until_ready(20)
            async with asyncio.timeout(10):
                while await standby.decisions() <= decided:
                    await asyncio.sleep(0.05)
            if restarted is not None:
                await restarted
            seen = traffic.total
            await until(lambda: traffic.total > seen + 300)
        print(f"ready {took * 1000:.0f} ms after SIGKILL; {traffic.total} requests: {dict(traffic.statuses)}")
        assert set(traffic.statuses) == {200}, (traffic.statuses, traffic.answers[:3])
        assert (await world.lease())["leaseTransitions"] == 1
        if again:
            assert not await leader.ready(), "one leads"


async def test_a_leader_that_nobody_sees_end_is_replaced_when_its_lease_runs_out(
    kube: Cluster, namespace: str, tmp_path: Path, processes: list[Child]
) -> None:
    """It hangs with all its connections open."""
    async with two_replicas(kube, namespace, tmp_path, processes, fail_open=True) as world:
        leader, standby = world.replicas
        async with Traffic(world.envoy.port) as traffic:
            await until(lambda: traffic.total > 50)
            leader.signal(signal.SIGSTOP)
            took = await standby.until_ready(DURATION_S + 10)
            leader.signal(signal.SIGCONT)
            async with asyncio.timeout(20):
                while await leader.ready():
                    await asyncio.sleep(0.05)
        print(f"ready {took:.2f} s after SIGSTOP, lease {DURATION_S} s; {dict(traffic.statuses)}")
        assert set(traffic.statuses) == {200}, (traffic.statuses, traffic.answers[:3])


async def test_a_leader_that_was_alone_takes_its_own_lease_back(
    kube: Cluster, namespace: str, tmp_path: Path, processes: list[Child]
) -> None:
    """Its container was restarted: long before the lease runs out."""
    async with two_replicas(kube, namespace, tmp_path, processes, fail_open=True, duration_s=LONG_S) as world:
        leader, standby = world.replicas
        standby.signal(signal.SIGTERM)
        await standby.wait()
        before = await world.lease()
        async with Traffic(world.envoy.port) as traffic:
            await until(lambda: traffic.total > 50)
            leader.signal(signal.SIGKILL)
            await leader.wait()
            await asyncio.to_thread(leader.again)
            took = await leader.until_ready(20)
            decided = await leader.decisions()
            async with asyncio.timeout(20):
                while await leader.decisions() <= decided:
                    await asyncio.sleep(0.05)
        print(f"leads again {took:.2f} s after it answers; {traffic.total} requests: {dict(traffic.statuses)}")
        assert set(traffic.statuses) == {200}, (traffic.statuses, traffic.answers[:3])
        after = await world.lease()
        assert (after["holderIdentity"], after["leaseTransitions"]) == (before["holderIdentity"], 0)


async def test_liveness_never_depends_on_leading_or_the_api_server(
    own_kube: Callable[..., Cluster], tmp_path: Path, processes: list[Child]
) -> None:
    cluster = await asyncio.to_thread(own_kube)
    await asyncio.to_thread(cluster.install_crds)
    await asyncio.to_thread(cluster.namespace, "serving")
    async with two_replicas(cluster, "serving", tmp_path, processes) as world:
        await no_api_server(world)


async def no_api_server(world: World) -> None:
    leader, standby = world.replicas
    await asyncio.to_thread(world.cluster.kill)
    await asyncio.sleep(DURATION_S + 2)
    assert await leader.ready(), "nobody can take the lease"
    assert not await standby.ready()
    for replica in world.replicas:
        assert (await asyncio.to_thread(get_page, replica.admin + "/healthz"))[0] == 200
    await asyncio.to_thread(world.cluster.start)
    renewed = (await world.lease())["renewTime"]
    async with asyncio.timeout(20):
        while (await world.lease())["renewTime"] == renewed:
            await asyncio.sleep(0.05)
    assert await leader.ready()
    assert not await standby.ready()
    assert (await world.lease())["leaseTransitions"] == 0
