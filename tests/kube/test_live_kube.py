"""The whole product on a real API server: `fairlead serve`, its Envoy, model servers that are pods, and traffic."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from kc_objects import model, pool, rewrite, until
from kc_pods import H2Pod, PodServer, pod_servers
from kc_traffic import Traffic, load, one
from kr_cluster import Cluster
from ports import free_ports

from gw_processes import Serve, get_page, require_envoy, sees_the_scheduler  # isort: skip  (kc_traffic shows where it is)


class World:
    """A pool with pods, and what serves it."""

    def __init__(self, cluster: Cluster, namespace: str, serve: Serve, pods: list[PodServer]) -> None:
        self.cluster, self.namespace, self.serve, self.pods = cluster, namespace, serve, pods

    async def call(self, function: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        return await asyncio.to_thread(lambda: function(*arguments, **more))

    async def apply(self, value: Any) -> None:
        await self.call(self.cluster.admin.apply, value, self.namespace)

    async def delete(self, value: Any) -> None:
        await self.call(self.cluster.admin.delete, value, self.namespace)

    async def pod(self, index: int, ready: bool = True) -> None:
        labels = {"app": "vllm"}
        address = self.pods[index].address
        await self.call(self.cluster.pod, self.namespace, f"pod-{index}", address, ready=ready, labels=labels)

    async def listed(self) -> set[str]:
        return {one["address"] for one in await self.serve.endpoints()}

    async def has(self, *indexes: int) -> None:
        wanted = {f"{self.pods[i].address}:{self.pods[i].port}" for i in indexes}
        async with asyncio.timeout(20):
            while await self.listed() != wanted:
                await asyncio.sleep(0.01)

    async def accepted(self, value: Any) -> dict[str, Any]:
        found = await self.call(self.cluster.admin.get, value, self.namespace)
        conditions = found.get("status", {}).get("conditions", [])
        return next((one for one in conditions if one["type"] == "Accepted"), {})

    async def condition(self, value: Any, status: str, reason: str) -> dict[str, Any]:
        async with asyncio.timeout(20):
            while True:
                found = await self.accepted(value)
                if (found.get("status"), found.get("reason")) == (status, reason):
                    return found
                await asyncio.sleep(0.05)


@pytest.fixture
def processes() -> Iterator[list[Serve]]:
    started: list[Serve] = []
    yield started
    for serve in reversed(started):
        serve.end()


@asynccontextmanager
async def served(
    cluster: Cluster, namespace: str, tmp_path: Path, processes: list[Serve], servers: int = 4, running: int = 3
) -> AsyncIterator[World]:
    """Model servers, some of them pods, and traffic possible."""
    require_envoy()
    async with AsyncExitStack() as stack:
        pods = await pod_servers(servers)
        for server in pods:
            stack.push_async_callback(server.stop)
        serve = Serve(tmp_path)
        processes.append(serve)
        made = World(cluster, namespace, serve, pods)
        await made.apply(pool(ports=(pods[0].port,)))
        for index in range(running):
            await made.pod(index)
        kubeconfig = cluster.kubeconfig(tmp_path / "kubeconfig")
        config = {"kubernetes": {"pool": "llama", "namespace": namespace, "kubeconfig": str(kubeconfig)}}
        await asyncio.to_thread(serve.start, config)
        await sees_the_scheduler(serve.gateway)
        yield made


@pytest.fixture
async def world(kube: Cluster, namespace: str, tmp_path: Path, processes: list[Serve]) -> AsyncIterator[World]:
    async with served(kube, namespace, tmp_path, processes) as made:
        yield made


async def test_pods_come_and_go_under_traffic(world: World) -> None:
    """No request fails, and none reaches a pod once the change is seen."""
    await world.has(0, 1, 2)
    async with Traffic(world.serve.port) as traffic:
        await until(lambda: all(pod.served for pod in world.pods[:3]), "traffic to all pods")
        await world.pod(3)
        await world.has(0, 1, 2, 3)
        await until(lambda: world.pods[3].served > 5, "traffic to the new pod")
        await world.call(world.cluster.set_ready, world.namespace, "pod-0", False)
        await world.has(1, 2, 3)
        await world.call(world.cluster.delete_pod, world.namespace, "pod-1", 30)  # stays, terminating
        await world.has(2, 3)
        seen = traffic.total
        await until(lambda: traffic.total > seen + 20, "what was on its way has arrived")
        before = world.pods[0].served, world.pods[1].served
        seen = traffic.total
        await until(lambda: traffic.total > seen + 500, "traffic goes on")
        assert (world.pods[0].served, world.pods[1].served) == before
        await world.call(world.cluster.set_ready, world.namespace, "pod-0", True)
        await world.has(0, 2, 3)
        await until(lambda: world.pods[0].served > before[0], "traffic to the pod that is ready again")
    assert set(traffic.statuses) == {200}, (traffic.statuses, traffic.answers[:3])
    print(f"{traffic.total} requests, all answered")


async def test_a_pool_without_pods_is_ready(world: World) -> None:
    for index in range(3):
        await world.call(world.cluster.set_ready, world.namespace, f"pod-{index}", False)
    await world.has()
    status, page = await world.call(get_page, world.serve.admin + "/readyz")
    assert (status, page.splitlines()[0]) == (200, "ready")
    assert "- no endpoints" in page.splitlines()
    assert (await one(world.serve.port, "x")).status == 503


#: Conversations with a long beginning of their own, and requests between two replacements of a server.
CONVERSATIONS, REQUESTS = 48, int(os.environ.get("FAIRLEAD_ROLLOUT_REQUESTS", "1500")) // 6


def turn_of_a_conversation(client: int, turn: int) -> str:
    number = (turn * 8 + client) % CONVERSATIONS
    return f"conversation {number}\n{f'What was said in {number}. ' * 200}\n{client} {turn}"


async def test_all_model_servers_are_replaced_under_traffic(
    kube: Cluster, namespace: str, tmp_path: Path, processes: list[Serve]
) -> None:
    """Each is told to end the moment that its deletion is asked for, and drains. None of the requests fails."""
    async with served(kube, namespace, tmp_path, processes, servers=8, running=4) as world:
        for pod in world.pods:
            pod.delay = 0.02
        await world.has(*range(4))

        async def hit_share(traffic: Traffic) -> float:
            """Of the next requests, those whose conversation had been served where they came."""
            hits, served = sum(pod.hits for pod in world.pods), sum(pod.served for pod in world.pods)
            seen = traffic.total
            await until(lambda: traffic.total >= seen + REQUESTS, "traffic goes on", 120 + REQUESTS / 10)
            return (sum(pod.hits for pod in world.pods) - hits) / (sum(pod.served for pod in world.pods) - served)

        async with Traffic(world.serve.port, clients=8, text=turn_of_a_conversation) as traffic:
            await hit_share(traffic)
            shares = []
            for index in range(4):
                await world.pod(index + 4)
                await world.has(*range(index, index + 5))
                await world.call(world.cluster.delete_pod, world.namespace, f"pod-{index}", 30)
                await asyncio.gather(world.pods[index].drain(), world.has(*range(index + 1, index + 5)))
                await world.call(world.cluster.delete_pod, world.namespace, f"pod-{index}")
                shares.append(await hit_share(traffic))
            shares.append(await hit_share(traffic))
    print(f"{traffic.total} requests: {dict(traffic.statuses)}; hits after each replacement, and at the end: {shares}")
    assert set(traffic.statuses) == {200}, (traffic.statuses, traffic.answers[:3])
    assert shares[-1] > 0.9


async def test_models_splits_and_their_status(world: World) -> None:
    chat = model("chat", "chat", ("base", 90), ("canary", 10), criticality="Critical")
    await world.apply(chat)
    written = await world.condition(chat, "True", "Accepted")
    assert written["observedGeneration"] == 1
    assert (await one(world.serve.port, "chat")).status == 200
    unknown = await one(world.serve.port, "nobody-knows")
    assert unknown.status == 404
    assert json.loads(unknown.body)["error"]["code"] == "model_not_found"
    for pod in world.pods:
        pod.models.clear()
    assert await load(world.serve.port, "chat", 3_000) == {200: 3_000}
    canary = sum(pod.models["canary"] for pod in world.pods)
    print(f"canary got {canary / 30:.2f} % of 3,000 requests; 10 % were wanted")
    assert abs(canary - 300) <= 100
    later = model("chat-again", "chat", ("other", 1))
    await world.apply(later)
    lost = await world.condition(later, "False", "ModelNameInUse")
    assert f"{world.namespace}/chat" in lost["message"]
    await world.delete(chat)
    await world.condition(later, "True", "Accepted")
    await until(lambda: True)
    assert json.loads((await one(world.serve.port, "chat")).body)["model"] == "chat"  # mapped back from `other`
    assert sum(pod.models["other"] for pod in world.pods) == 1
    over = rewrite("over", "chat", ("rewritten", 1))
    await world.apply(over)
    await world.condition(over, "True", "Accepted")
    await one(world.serve.port, "chat")
    assert sum(pod.models["rewritten"] for pod in world.pods) == 1
    assert await world.serve.metric("fairlead_kube_status_writes_total") == 4
    assert 'inference_pool_ready_pods{name="llama"} 3' in await world.serve.page("/metrics")


async def test_the_api_server_may_die(own_kube: Callable[..., Cluster], tmp_path: Path, processes: list[Serve]) -> None:
    """Routing and readiness go on; the metric says so; afterwards everything is as it should be."""
    cluster = await asyncio.to_thread(own_kube)
    await asyncio.to_thread(cluster.install_crds)
    await asyncio.to_thread(cluster.namespace, "serving")
    async with served(cluster, "serving", tmp_path, processes) as world:
        await no_api_server(world)


async def no_api_server(world: World) -> None:
    await world.apply(model("chat", "chat"))
    await world.has(0, 1, 2)
    async with Traffic(world.serve.port) as traffic:
        await world.call(world.cluster.kill)
        async with asyncio.timeout(20):
            while await world.serve.metric("fairlead_kube_connected", resource="pods"):
                await asyncio.sleep(0.02)
        assert await world.serve.page("/readyz")
        await world.has(0, 1, 2)
        seen = traffic.total
        await until(lambda: traffic.total > seen + 200)
        await world.call(world.cluster.start)
        await world.call(world.cluster.set_ready, world.namespace, "pod-2", False)
        await world.has(0, 1)
        assert await world.serve.metric("fairlead_kube_connected", resource="pods")
    assert set(traffic.statuses) == {200}, (traffic.statuses, traffic.answers[:3])
    assert "trouble with Kubernetes" in world.serve.said()
    assert "no more trouble with Kubernetes" in world.serve.said()


async def test_flags_reach_the_scheduler_behind_the_embedded_gateway(world: World, tmp_path: Path) -> None:
    world.serve.end()
    config = {key: value for key, value in world.serve.config.items() if key != "kubernetes"}
    file = tmp_path / "flags.json"
    file.write_text(json.dumps(config))
    kubeconfig = str(tmp_path / "kubeconfig")
    flags = ["--pool-name", "llama", f"--pool-namespace={world.namespace}", "--kubeconfig", kubeconfig]
    world.serve.spawn(sys.executable, "-m", "fairlead", "serve", str(file), *flags)
    world.serve.poll_until(lambda: get_page(world.serve.admin + "/readyz")[0] == 200)
    await world.has(0, 1, 2)
    assert (await one(world.serve.port, "x")).status == 200


async def test_pods_that_speak_http2_are_spoken_to_so(
    kube: Cluster, namespace: str, tmp_path: Path, processes: list[Serve]
) -> None:
    """`appProtocol: kubernetes.io/h2c`: by the scheduler's choice, and by the gateway alone."""
    require_envoy()
    server = await H2Pod("127.0.0.2").start()
    wanted = pool(ports=(server.port,))
    wanted["spec"]["appProtocol"] = "kubernetes.io/h2c"
    await asyncio.to_thread(kube.admin.apply, wanted, namespace)
    await asyncio.to_thread(kube.pod, namespace, "pod-0", server.address, labels={"app": "vllm"})
    serve = Serve(tmp_path)
    processes.append(serve)
    kubeconfig = str(kube.kubeconfig(tmp_path / "kubeconfig"))
    config = {"kubernetes": {"pool": "llama", "namespace": namespace, "kubeconfig": kubeconfig}}
    await asyncio.to_thread(serve.start, config)
    await sees_the_scheduler(serve.gateway)
    decided = await serve.decisions()
    answer = await one(serve.port, "chat")
    assert (answer.status, answer.body) == (200, b"by HTTP/2")
    assert await serve.decisions() == decided + 1
    os.kill(serve.scheduler_pid(), signal.SIGSTOP)  # now the gateway is on its own
    answer = await one(serve.port, "chat")
    assert (answer.status, answer.body, server.served) == (200, b"by HTTP/2", 2)
    await server.stop()


async def test_no_pool_no_readiness(world: World) -> None:
    await world.has(0, 1, 2)
    await world.call(world.cluster.admin.delete, pool(), world.namespace)
    await world.has()
    with pytest.raises(AssertionError, match=f"there is no InferencePool {world.namespace}/llama"):
        await world.serve.page("/readyz")
    await world.apply(pool(ports=(world.pods[0].port,)))
    await world.has(0, 1, 2)
    async with asyncio.timeout(20):
        while (await one(world.serve.port, "x")).status != 200:
            await asyncio.sleep(0.05)


async def test_workers_and_the_gateway_die_while_the_api_server_is_away(
    own_kube: Callable[..., Cluster], tmp_path: Path, processes: list[Serve]
) -> None:
    """And pods are replaced meanwhile, as a second API server of the same cluster is told."""
    require_envoy()
    cluster = await asyncio.to_thread(own_kube)
    await asyncio.to_thread(cluster.install_crds)
    away = await asyncio.to_thread(lambda: own_kube(twin_of=cluster))
    pods = await pod_servers(4)
    serve = Serve(tmp_path)
    processes.append(serve)
    world = World(cluster, "default", serve, pods)
    try:
        await world.apply(pool(ports=(pods[0].port,)))
        for index in range(3):
            await world.pod(index)
        kubeconfig = away.kubeconfig(tmp_path / "kubeconfig")
        first = free_ports(4)[0]
        config = {
            "kubernetes": {"pool": "llama", "namespace": "default", "kubeconfig": str(kubeconfig)},
            "extProc": {"port": first},
            "admin": {"port": first + 2},
        }
        await asyncio.to_thread(serve.start, config, 2)
        await sees_the_scheduler(serve.gateway)
        async with Traffic(serve.port) as traffic:
            await until(lambda: all(pod.served > 5 for pod in pods[:3]), "traffic to all pods")
            await asyncio.to_thread(away.kill)
            await asyncio.sleep(1.0)
            await world.pod(3)
            await world.call(cluster.delete_pod, "default", "pod-0")
            await pods[0].drain()
            seen = traffic.total
            await until(lambda: traffic.total > seen + 200, "traffic goes on without pod-0")
            for number in serve.scheduler_pids():
                os.kill(number, signal.SIGKILL)
                enough = traffic.total + 500
                await until(lambda enough=enough: traffic.total > enough, "traffic goes on")  # type: ignore[misc]
        # What runs when Envoy dies, and for a moment after it, fails. The new one knows the last endpoints.
        assert set(traffic.statuses) == {200}, (traffic.statuses, traffic.answers[:3])
        former = serve.envoy_pid()
        os.kill(former, signal.SIGKILL)
        await until(lambda: serve.envoy_pid() not in (0, former), "a new Envoy")
        await asyncio.to_thread(serve.poll_until, lambda: get_page(f"http://127.0.0.1:{serve.port}/v1/models")[0])
        async with Traffic(serve.port) as traffic:
            await until(lambda: traffic.total > 200, "traffic goes on with a new Envoy")
            await asyncio.to_thread(away.start)
            await until(lambda: pods[3].served > 5, "traffic to the new pod")
            await world.has(1, 2, 3)
        assert set(traffic.statuses) == {200}, (traffic.statuses, traffic.answers[:3])
    finally:
        for server in pods:
            await server.stop()
