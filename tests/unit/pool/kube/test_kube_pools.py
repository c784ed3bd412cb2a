"""Pools of several namespaces, on a fake API server: opened, told their own, closed."""

import asyncio
import copy
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fake_kube import FakeKube

from fairlead.config.schema import Kubernetes, LeaderElection
from fairlead.core.errors import ConfigError
from fairlead.core.events import EndpointUp
from fairlead.core.models import ModelSet
from fairlead.pool.aio import IN_ONE_TURN
from fairlead.pool.kube import endpoint_slice, reflector
from fairlead.pool.kube.client import KubeClient
from fairlead.pool.kube.endpoint_slice import Place, Port, Service, slice_object
from fairlead.pool.kube.objects import Pool
from fairlead.pool.kube.pods import Pod
from fairlead.pool.kube.pools import Pools
from fairlead.server.live import kube as live_kube
from fairlead.server.live import kube_pools as live_pools
from fairlead.server.live.kube_pools import KubePools
from fairlead.server.observe.component_metrics import KubeMetrics
from fairlead.server.observe.exposition import Registry

V1 = "inference.networking.k8s.io/v1"
X = "inference.networking.x-k8s.io/v1alpha2"
SLICES = "discovery.k8s.io/v1", "endpointslices"

#: Seconds until something is tried again, or put right.
PAUSE_S = 0.1


def pool(name: str, namespace: str, ports: tuple[int, ...] = (8000,), **labels: str) -> Any:
    spec = {
        "selector": {"matchLabels": labels},
        "targetPorts": [{"number": port} for port in ports],
        "endpointPickerRef": {"name": f"{name}-epp", "port": {"number": 9002}},
    }
    return {"metadata": {"name": name, "namespace": namespace}, "spec": spec}


def pod(name: str, namespace: str, **labels: str) -> Any:
    conditions = [{"type": "Ready", "status": "True"}]
    return {
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "status": {"podIP": "10.0.0.1", "conditions": conditions},
    }


class Opened:
    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.up: dict[str, str] = {}
        self.models: ModelSet | None = None
        self.closed = ""
        #: How few endpoints were up after any event.
        self.fewest = 1_000

    def endpoint(self, event: Any) -> None:
        if isinstance(event, EndpointUp):
            self.up[event.endpoint.id] = event.endpoint.address
        else:
            del self.up[event.endpoint_id]
        self.fewest = min(self.fewest, len(self.up))

    def defined(self, where: str, models: ModelSet) -> None:
        self.models = models

    def changed(self, pool: Pool) -> None:
        self.pool = pool

    async def close(self, *, at_once: bool = False) -> None:
        self.closed = "at once" if at_once else "drained"


class Followed:
    def __init__(self, kube: FakeKube, tmp_path: Path, **settings: Any) -> None:
        self.unready: dict[str, str] = {}
        self.was_unready: list[str] = []
        self.opened: dict[str, Opened] = {}
        self.broken: set[str] = set()
        #: Keys of pools that are being opened, which takes until this is set.
        self.opening: list[str] = []
        self.may_open = asyncio.Event()
        self.may_open.set()
        self.registry = Registry()
        self.kube = KubePools(
            Kubernetes(namespace="default", kubeconfig=str(kube.write_kubeconfig(tmp_path)), **settings),
            self.open,
            self.set_ready,
            KubeMetrics(self.registry),
        )

    async def open(self, key: str, pool: Pool) -> Opened:
        self.opening.append(key)
        await self.may_open.wait()
        self.opening.remove(key)
        if key in self.broken:
            raise ConfigError("no such directory", "$.journal.path")
        self.opened[key] = Opened(pool)
        return self.opened[key]

    def set_ready(self, part: str, reason: str) -> None:
        self.unready.pop(part, None)
        if reason:
            self.unready[part] = reason
            self.was_unready.append(reason)


@pytest.fixture
async def stack(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AsyncExitStack]:
    monkeypatch.setattr(live_kube, "START_S", 5.0)
    monkeypatch.setattr(live_kube, "SUCCESSOR_S", PAUSE_S)
    monkeypatch.setattr(endpoint_slice, "REPAIR_S", PAUSE_S)
    monkeypatch.setattr(live_pools, "RETRY_S", PAUSE_S)
    monkeypatch.setattr(reflector, "REFUSED_PAUSE_S", PAUSE_S)
    monkeypatch.setenv("POD_IP", "10.244.0.7")
    async with AsyncExitStack() as opened:
        yield opened


def accepted(kube: FakeKube, key: str) -> bool:
    return bool(kube.objects[X, "inferencemodels"][key].get("status", {}).get("conditions"))


async def test_a_pool_waits_for_the_events_of_all_its_pods_and_gets_none_once_left(client: KubeClient) -> None:
    pools, missing = None, list[str]()

    def synced() -> None:
        missing.append(pools.missing)

    labels: dict[str, Any] = {"pool_labels": {}, "pod_labels": {}}
    reports: dict[str, Any] = {"on_trouble": print, "report": print, "synced": synced}
    group = "inference.networking.k8s.io"
    pools = Pools(client, "a", group, lambda key, pool: None, **labels, **reports)
    pools.pools.items["a/one"] = Pool("a", "one", {"app": "x"}, (8000,))
    many = 3 * IN_ONE_TURN
    for number in range(many):
        seen = Pod("a", f"p{number}", f"u{number}", True, "10.0.0.1", {"app": "x"}, {"app": "x"}, None)
        pools.pods.items[f"a/p{number}"] = seen
    pools.pools.ready.set()
    pools.pods.ready.set()
    first, second = list[Any](), list[Any]()
    pools.follow("a/one", first.append)
    assert (len(first), pools.missing) == (IN_ONE_TURN, "endpoints of the pool a/one are not known yet")
    pools.follow("a/one", second.append)
    while pools.missing:
        await asyncio.sleep(0)
    assert (len(first), len(second), missing) == (IN_ONE_TURN, many, [""])
    last = list[Any]()
    pools.follow("a/one", last.append)
    sent = len(last)
    pools.leave("a/one")
    for _ in range(5):
        await asyncio.sleep(0)
    assert (len(last), pools.missing) == (sent, "") and 0 < sent < many


async def test_pools_share_the_turns_of_their_events(client: KubeClient) -> None:
    labels: dict[str, Any] = {"pool_labels": {}, "pod_labels": {}}
    reports: dict[str, Any] = {"on_trouble": print, "report": print, "synced": lambda: None}
    group = "inference.networking.k8s.io"
    pools = Pools(client, "a", group, lambda key, pool: None, **labels, **reports)
    events = list[Any]()
    for name in ("one", "two", "three"):
        pools.pools.items[f"a/{name}"] = Pool("a", name, {"app": "x"}, (8000,))
        for number in range(IN_ONE_TURN):
            pods = pools.pods.items
            pods[f"a/p{number}"] = Pod(
                "a", f"p{number}", f"u{number}", True, "10.0.0.1", {"app": "x"}, {"app": "x"}, None
            )
        pools.follow(f"a/{name}", events.append)
    sent = [len(events)]
    while len(events) < 3 * IN_ONE_TURN:
        await asyncio.sleep(0)
        sent.append(len(events))
    assert max(after - before for before, after in pairwise([0, *sent])) == IN_ONE_TURN


async def test_a_pool_whose_selector_changes_is_never_empty(
    kube: FakeKube, tmp_path: Path, stack: AsyncExitStack, until: Any
) -> None:
    for number in range(2 * IN_ONE_TURN):
        kube.put("v1", "pods", pod(f"old-{number}", "a", app="old"))
        kube.put("v1", "pods", pod(f"put-{number}", "a", app="new"))
    kube.put(V1, "inferencepools", pool("llama", "a", app="old"))
    followed = Followed(kube, tmp_path, namespaces=("*",))
    await followed.kube.start(stack)
    opened = followed.opened["a/llama"]
    assert len(opened.up) == 2 * IN_ONE_TURN
    opened.fewest = 1_000
    kube.put(V1, "inferencepools", pool("llama", "a", app="new"))
    await until(lambda: "a/put-0-rank-0" in opened.up and len(opened.up) == 2 * IN_ONE_TURN)
    assert opened.fewest >= 2 * IN_ONE_TURN


@pytest.mark.parametrize("namespaces", [("*",), ("a", "b")])
async def test_each_pool_is_told_its_own(
    kube: FakeKube, tmp_path: Path, stack: AsyncExitStack, until: Any, namespaces: tuple[str, ...]
) -> None:
    kube.put(V1, "inferencepools", pool("llama", "a", app="vllm"))
    kube.put(V1, "inferencepools", pool("llama", "b", app="vllm"))
    kube.put(V1, "inferencepools", pool("all", "b", (1, 2)))  # selects nothing: it cannot be read
    for namespace in "ab":
        kube.put("v1", "pods", pod("one", namespace, app="vllm", tier="gold"))
        kube.put("v1", "pods", pod("other", namespace, app="redis"))
    chat = {"modelName": "chat", "poolRef": {"name": "llama"}}
    kube.put(X, "inferencemodels", {"metadata": {"name": "chat", "namespace": "a"}, "spec": chat})
    followed = Followed(kube, tmp_path, namespaces=namespaces)
    await followed.kube.start(stack)
    assert not followed.unready
    opened = followed.opened
    assert set(opened) == {"a/llama", "b/llama"}
    assert {key: set(one.up) for key, one in opened.items()} == {
        "a/llama": {"a/one-rank-0"},
        "b/llama": {"b/one-rank-0"},
    }
    await until(lambda: opened["a/llama"].models and opened["a/llama"].models.models)
    assert opened["b/llama"].models == ModelSet()
    await until(lambda: accepted(kube, "a/chat"))
    # What changes of one pool, or of a pod that two select, reaches just those.
    before = len(followed.was_unready)
    kube.put(V1, "inferencepools", pool("gold", "a", (8000, 8001), tier="gold"))
    await until(lambda: "a/gold" in opened and len(opened["a/gold"].up) == 2)
    kube.put("v1", "pods", pod("two", "a", app="vllm", tier="gold"))
    await until(lambda: len(opened["a/gold"].up) == 4 and len(opened["a/llama"].up) == 2)
    kube.put(V1, "inferencepools", pool("gold", "a", (8000,), app="redis"))
    await until(lambda: set(opened["a/gold"].up) == {"a/other-rank-0"})
    assert opened["a/gold"].pool.ports == (8000,)
    kube.drop("v1", "pods", "one", "a")
    await until(lambda: set(opened["a/llama"].up) == {"a/two-rank-0"})
    assert set(opened["b/llama"].up) == {"b/one-rank-0"}
    # One that is gone is closed, and its pods tell it nothing.
    kube.drop(V1, "inferencepools", "llama", "a")
    await until(lambda: opened["a/llama"].closed == "drained")
    kube.drop("v1", "pods", "two", "a")
    kube.put("v1", "pods", pod("three", "a", app="redis"))
    await until(lambda: len(opened["a/gold"].up) == 2)
    assert set(opened["a/llama"].up) == {"a/two-rank-0"}
    assert len(followed.was_unready) == before, "pools that come and go make nobody else wait"


async def test_a_pool_selects_by_the_labels_that_pods_have_themselves(
    kube: FakeKube, tmp_path: Path, stack: AsyncExitStack
) -> None:
    """As the API server would. Endpoints also have labels for the node and under newer names."""
    names = {"node": "kubernetes.io/hostname", "engine": "llm-d.ai/engine-type"}
    for name, label in names.items():
        kube.put(V1, "inferencepools", pool(name, "a", **{label: "vllm"}))
    kube.put("v1", "pods", pod("labelled", "a", **dict.fromkeys(names.values(), "vllm")))
    enriched = pod("enriched", "a", **{"inference.networking.k8s.io/engine-type": "vllm"})
    kube.put("v1", "pods", {**enriched, "spec": {"nodeName": "vllm"}})
    followed = Followed(kube, tmp_path, namespaces=("a",))
    await followed.kube.start(stack)
    assert [set(followed.opened[f"a/{name}"].up) for name in names] == [{"a/labelled-rank-0"}] * 2


async def test_a_pool_that_was_made_again_is_another_pool(
    kube: FakeKube, tmp_path: Path, stack: AsyncExitStack, until: Any
) -> None:
    """Seen by a list: only the uid tells. The former one hears nothing from then on. Its Service stays."""
    ports = [{"name": "grpc", "port": 9002, "targetPort": 9002}]
    kube.put("v1", "services", {"metadata": {"name": "llama-epp", "namespace": "a"}, "spec": {"ports": ports}})
    kube.put("v1", "pods", pod("one", "a", app="vllm"))
    kube.put(V1, "inferencepools", pool("llama", "a", app="vllm"))
    followed = Followed(kube, tmp_path, namespaces=("*",), leader_election=LeaderElection(enabled=True))
    await followed.kube.start(stack)
    await until(lambda: kube.objects.get(SLICES))
    former, published = followed.opened["a/llama"], copy.deepcopy(kube.objects[SLICES])
    await kube.stop()
    kube.drop(V1, "inferencepools", "llama", "a")
    kube.put(V1, "inferencepools", pool("llama", "a", app="vllm"))
    kube.put("v1", "pods", pod("two", "a", app="vllm"))
    kube.compact()
    await kube.start()
    await until(lambda: followed.opened["a/llama"] is not former)
    await until(lambda: set(followed.opened["a/llama"].up) == {"a/one-rank-0", "a/two-rank-0"})
    await until(lambda: former.closed == "drained" and followed.opened["a/llama"].models is not None)
    assert kube.objects[SLICES] == published


@pytest.mark.parametrize("opening", [False, True])
async def test_a_pool_that_is_made_again_at_once_is_opened_after_the_former_one(
    kube: FakeKube, tmp_path: Path, stack: AsyncExitStack, until: Any, opening: bool
) -> None:
    """Deleted while it is open, or still opens."""
    kube.put("v1", "pods", pod("one", "a", app="vllm"))
    followed = Followed(kube, tmp_path, namespaces=("*",))
    await followed.kube.start(stack)
    followed.may_open.clear()
    kube.put(V1, "inferencepools", pool("llama", "a", app="vllm"))
    await until(lambda: followed.opening)
    if not opening:
        followed.may_open.set()
        await until(lambda: followed.opened and followed.opened["a/llama"].up)
        former = followed.opened["a/llama"]
        former.fewest = 1_000
        followed.may_open.clear()
    kube.drop(V1, "inferencepools", "llama", "a")
    kube.put(V1, "inferencepools", pool("llama", "a", (9000,), app="vllm"))
    seen = {name: reflector.items for name, reflector in followed.kube.reflectors.items()}
    await until(lambda: seen["inferencepools"]["a/llama"].ports == (9000,))
    kube.put("v1", "pods", pod("two", "a", app="vllm"))
    await until(lambda: "a/two" in seen["pods"])
    assert followed.opening == ["a/llama"], "the former one must have been opened before"
    followed.may_open.set()
    await until(lambda: followed.opened and followed.opened["a/llama"].pool.ports == (9000,))
    current = followed.opened["a/llama"]
    await until(lambda: current.up == {f"a/{name}-rank-0": "10.0.0.1:9000" for name in ("one", "two")})
    if not opening:
        await until(lambda: former.closed == "drained")
        assert former.fewest == 1_000 and former.pool.ports == (8000,), "it got events of the later one"


async def test_labels_limit_what_is_read(kube: FakeKube, tmp_path: Path, stack: AsyncExitStack, until: Any) -> None:
    ours = pool("ours", "a", app="vllm")
    ours["metadata"]["labels"] = {"picker": "fairlead"}
    kube.put(V1, "inferencepools", ours)
    kube.put(V1, "inferencepools", pool("theirs", "a", app="vllm"))
    kube.put("v1", "pods", pod("seen", "a", app="vllm", serving="true"))
    kube.put("v1", "pods", pod("unseen", "a", app="vllm"))
    selectors = {"pool_selector": {"picker": "fairlead"}, "pod_selector": {"serving": "true"}}
    followed = Followed(kube, tmp_path, namespaces=("*",), **selectors)
    await followed.kube.start(stack)
    assert set(followed.opened) == {"a/ours"}
    assert set(followed.opened["a/ours"].up) == {"a/seen-rank-0"}


async def test_a_pool_that_cannot_be_opened_keeps_nobody_waiting(
    kube: FakeKube, tmp_path: Path, stack: AsyncExitStack, until: Any
) -> None:
    kube.put(V1, "inferencepools", pool("good", "a", app="vllm"))
    kube.put(V1, "inferencepools", pool("bad", "a", app="vllm"))
    followed = Followed(kube, tmp_path, namespaces=("*",))
    followed.broken.add("a/bad")
    await followed.kube.start(stack)
    assert not followed.unready
    assert set(followed.opened) == {"a/good"}
    followed.broken.clear()
    kube.put(V1, "inferencepools", pool("bad", "a", (1,), app="vllm"))
    await until(lambda: "a/bad" in followed.opened)


@pytest.mark.parametrize("plurals", [("pods", "inferencepools"), ("inferenceobjectives",)])
async def test_a_namespace_without_rights_does_not_hold_up_the_others(
    kube: FakeKube,
    tmp_path: Path,
    stack: AsyncExitStack,
    until: Any,
    monkeypatch: pytest.MonkeyPatch,
    plurals: tuple[str, ...],
) -> None:
    monkeypatch.setattr(live_kube, "START_S", 0.1)
    for namespace in "ab":
        kube.put(V1, "inferencepools", pool("llama", namespace, app="vllm"))
    kube.forbidden |= {("list", f"b/{plural}") for plural in plurals}
    nowhere = Followed(kube, tmp_path, namespaces=("b",))
    await nowhere.kube.start(stack)
    await until(lambda: "not allowed to list" in nowhere.unready.get("kubernetes", ""))
    followed = Followed(kube, tmp_path, namespaces=("a", "b"))
    await followed.kube.start(stack)
    await until(lambda: not followed.unready)
    assert set(followed.opened) == ({"a/llama"} if "pods" in plurals else {"a/llama", "b/llama"})
    lines = followed.registry.render().decode().splitlines()
    assert f'fairlead_kube_connected{{resource="b/{plurals[0]}"}} 0' in lines


async def test_the_leader_keeps_the_services_of_all_pools(
    kube: FakeKube, tmp_path: Path, stack: AsyncExitStack, until: Any
) -> None:
    def named(service: str) -> list[str]:
        found = kube.objects.get(SLICES, {}).get(f"{service}-ipv4", {})
        return [address for one in found.get("endpoints", ()) for address in one["addresses"]]

    for namespace in "ab":
        port = {"name": "grpc", "port": 9002, "targetPort": 9002}
        kube.put(
            "v1", "services", {"metadata": {"name": "llama-epp", "namespace": namespace}, "spec": {"ports": [port]}}
        )
    kube.put(V1, "inferencepools", pool("llama", "a", app="vllm"))
    followed = Followed(kube, tmp_path, namespaces=("*",), leader_election=LeaderElection(enabled=True))
    await followed.kube.start(stack)
    await until(lambda: named("a/llama-epp") == ["10.244.0.7"])
    kube.put(V1, "inferencepools", pool("llama", "b", app="vllm"))
    await until(lambda: named("b/llama-epp") == ["10.244.0.7"])
    # Others' changes are put right; a pool that goes takes the address with it.
    kube.patch(*SLICES, "llama-epp-ipv4", {"endpoints": []}, "b")
    await until(lambda: named("b/llama-epp") == ["10.244.0.7"])
    kube.drop(V1, "inferencepools", "llama", "a")
    await until(lambda: not named("a/llama-epp"))
    assert 'fairlead_kube_connected{resource="endpointslices"} 1' in followed.registry.render().decode()
    await followed.kube.hand_over()
    assert not named("b/llama-epp")


async def test_a_leader_empties_the_slices_of_pools_that_were_deleted_while_nobody_led(
    kube: FakeKube, tmp_path: Path, stack: AsyncExitStack, until: Any
) -> None:
    followed = Followed(kube, tmp_path, namespaces=("*",), leader_election=LeaderElection(enabled=True))
    ports = (Port("grpc", 9002),)
    place = Place("10.244.0.3", "a-former-leader")
    for name, lease in (("kept", followed.kube.lease), ("gone", followed.kube.lease), ("other", "b/another-release")):
        service = Service(f"{name}-epp", f"uid-of-{name}", ports)
        kube.put(*SLICES, slice_object(service, "a", place, lease))
    kept = pool("kept", "a", app="vllm")
    kube.put(V1, "inferencepools", kept)

    def named(name: str) -> list[str]:
        found = kube.objects[SLICES][f"a/{name}-epp-ipv4"]
        return [address for one in found["endpoints"] for address in one["addresses"]]

    kube.forbidden.add(("list", "inferencepools"))
    starting = asyncio.create_task(followed.kube.start(stack))
    await until(lambda: "not allowed to list" in followed.unready.get("kubernetes", ""))
    await asyncio.sleep(0.3)
    assert named("gone") == [place.address], "which pools there are is not known yet"
    kube.forbidden.clear()
    await starting
    await until(lambda: named("gone") == [])
    gone = kube.objects[SLICES]["a/gone-epp-ipv4"]
    assert gone["ports"] == [{"name": "grpc", "port": 9002, "protocol": "TCP"}]
    assert gone["metadata"]["ownerReferences"][0]["uid"] == "uid-of-gone"
    assert named("kept") == named("other") == [place.address]


async def test_a_deleted_pools_slice_is_emptied_once_the_api_server_takes_it(
    kube: FakeKube, tmp_path: Path, stack: AsyncExitStack, until: Any
) -> None:
    def named(name: str) -> list[str]:
        found = kube.objects.get(SLICES, {}).get(f"a/{name}-epp-ipv4", {})
        return [address for one in found.get("endpoints", ()) for address in one["addresses"]]

    for name in ("llama", "qwen"):
        ports = [{"name": "grpc", "port": 9002, "targetPort": 9002}]
        kube.put("v1", "services", {"metadata": {"name": f"{name}-epp", "namespace": "a"}, "spec": {"ports": ports}})
        kube.put(V1, "inferencepools", pool(name, "a", app="vllm"))
    followed = Followed(kube, tmp_path, namespaces=("*",), leader_election=LeaderElection(enabled=True))
    await followed.kube.start(stack)
    await until(lambda: named("llama") and named("qwen"))
    kube.forbidden.add(("update", "endpointslices"))
    kube.drop(V1, "inferencepools", "llama", "a")
    await until(lambda: followed.opened["a/llama"].closed)
    await asyncio.sleep(0.2)
    assert named("llama")
    kube.forbidden.clear()
    await until(lambda: not named("llama"))
    assert named("qwen") == ["10.244.0.7"]


async def test_objects_of_deleted_pools_are_told_and_accepted_again(
    kube: FakeKube, tmp_path: Path, stack: AsyncExitStack, until: Any
) -> None:
    def told(name: str) -> str:
        status = kube.objects[X, "inferencemodels"][f"a/{name}"].get("status", {})
        return ", ".join(f"{one['status']} {one['reason']}" for one in status.get("conditions", ()))

    def put(name: str, of: str, **status: Any) -> None:
        spec = {"modelName": name, "poolRef": {"name": of}}
        kube.put(X, "inferencemodels", {"metadata": {"name": name, "namespace": "a"}, "spec": spec, **status})

    accepted = {"conditions": [{"type": "Accepted", "status": "True", "reason": "Accepted"}]}
    put("chat", "llama")
    put("new", "nowhere")
    put("former", "deleted-meanwhile", status=accepted)
    kube.put(V1, "inferencepools", pool("llama", "a", app="vllm"))
    kube.put(V1, "inferencepools", pool("qwen", "b", app="vllm"))
    followed = Followed(kube, tmp_path, namespaces=("*",))
    await followed.kube.start(stack)
    await until(lambda: told("chat") == "True Accepted" and told("former") == "False PoolNotFound")
    for _ in range(2):
        kube.drop(V1, "inferencepools", "llama", "a")
        await until(lambda: told("chat") == "False PoolNotFound")
        kube.put(V1, "inferencepools", pool("llama", "a", app="vllm"))
        await until(lambda: told("chat") == "True Accepted")
    assert told("new") == "", "it may be for another scheduler"


async def test_objects_of_pools_that_a_selector_hides_are_left_alone(
    kube: FakeKube, tmp_path: Path, stack: AsyncExitStack, until: Any
) -> None:
    accepted = {"conditions": [{"type": "Accepted", "status": "True", "reason": "Accepted"}]}
    spec = {"modelName": "chat", "poolRef": {"name": "theirs"}}
    metadata = {"name": "chat", "namespace": "a"}
    kube.put(X, "inferencemodels", {"metadata": metadata, "spec": spec, "status": accepted})
    kube.put(V1, "inferencepools", pool("theirs", "a", app="vllm"))
    followed = Followed(kube, tmp_path, namespaces=("*",), pool_selector={"picker": "fairlead"})
    await followed.kube.start(stack)
    await asyncio.sleep(0.3)
    assert kube.objects[X, "inferencemodels"]["a/chat"]["status"] == accepted


async def test_what_belongs_to_pools_that_may_exist_is_left_alone(
    kube: FakeKube, tmp_path: Path, stack: AsyncExitStack, until: Any
) -> None:
    """One pool cannot be opened, one cannot be read, and one is of another API group."""
    followed = Followed(kube, tmp_path, namespaces=("*",), leader_election=LeaderElection(enabled=True))
    followed.broken.add("a/broken")
    accepted = {"conditions": [{"type": "Accepted", "status": "True", "reason": "Accepted"}]}
    for name, group in (("unreadable", {}), ("theirs", {"group": X.partition("/")[0]})):
        spec = {"modelName": name, "poolRef": {"name": name, **group}}
        model = {"metadata": {"name": name, "namespace": "a"}, "spec": spec, "status": accepted}
        kube.put(X, "inferencemodels", model)
    service = Service("unreadable-epp", "uid", (Port("grpc", 9002),))
    kube.put(*SLICES, slice_object(service, "a", Place("10.244.0.3", "former"), followed.kube.lease))
    ports = [{"name": "grpc", "port": 9002, "targetPort": 9002}]
    kube.put("v1", "services", {"metadata": {"name": "broken-epp", "namespace": "a"}, "spec": {"ports": ports}})
    kube.put(V1, "inferencepools", pool("broken", "a", app="vllm"))
    unreadable = pool("unreadable", "a", app="vllm")
    unreadable["spec"]["selector"] = {"matchLabels": {}}
    kube.put(V1, "inferencepools", unreadable)
    await followed.kube.start(stack)
    await until(lambda: "a/broken-epp-ipv4" in kube.objects[SLICES])
    await asyncio.sleep(3 * PAUSE_S)
    written = {name: value["metadata"]["resourceVersion"] for name, value in kube.objects[SLICES].items()}
    kube.put(*SLICES, slice_object(Service("more-epp", "uid", ()), "a", Place("10.244.0.3", "former"), "b/other"))
    await asyncio.sleep(3 * PAUSE_S)
    assert {name: kube.objects[SLICES][name]["metadata"]["resourceVersion"] for name in written} == written
    assert all(kube.objects[SLICES][name]["endpoints"] for name in written)
    for name in ("unreadable", "theirs"):
        assert kube.objects[X, "inferencemodels"][f"a/{name}"]["status"] == accepted


@pytest.mark.parametrize("group", ["inference.networking.k8s.io", ""])
async def test_another_groups_pool_is_not_known_to_be_absent(
    kube: FakeKube, tmp_path: Path, stack: AsyncExitStack, until: Any, group: str
) -> None:
    accepted = {"conditions": [{"type": "Accepted", "status": "True", "reason": "Accepted"}]}
    for name, of in (("gone", group), ("theirs", X.partition("/")[0])):
        spec = {"modelName": name, "poolRef": {"name": "x", "group": of}}
        model = {"metadata": {"name": name, "namespace": "a"}, "spec": spec, "status": accepted}
        kube.put(X, "inferencemodels", model)
    await Followed(kube, tmp_path, namespaces=("*",)).kube.start(stack)

    def reason(name: str) -> str:
        return str(kube.objects[X, "inferencemodels"][f"a/{name}"]["status"]["conditions"][0]["reason"])

    await until(lambda: reason("gone") == "PoolNotFound")
    assert reason("theirs") == "Accepted"
