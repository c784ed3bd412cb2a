"""One script, two API servers: the real one and `FakeKube` must show the same endpoints and the same events after every
step. That is what the unit tests' trust in the fake rests on."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytest
from fake_kube import FakeKube
from kc_objects import POOL_V1, Followed, Object, pool, until
from kr_cluster import Cluster, running


class World(Protocol):
    """What the script can do."""

    async def pool(self, value: Object) -> None: ...
    async def no_pool(self) -> None: ...
    async def pod(self, name: str, address: str, **labels: str) -> None: ...
    async def change(self, name: str, change: Object) -> None: ...
    async def status(self, name: str, status: Object) -> None: ...
    async def delete(self, name: str) -> None: ...


class Real:
    """kube-apiserver and etcd."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster, self._namespace = cluster, namespace
        self._admin = cluster.admin

    async def pool(self, value: Object) -> None:
        await asyncio.to_thread(self._admin.apply, value, self._namespace)

    async def no_pool(self) -> None:
        await asyncio.to_thread(self._admin.delete, pool(), self._namespace)

    async def pod(self, name: str, address: str, **labels: str) -> None:
        labels = {"app": "vllm", **labels}
        await asyncio.to_thread(self._cluster.pod, self._namespace, name, address, labels=labels)

    async def change(self, name: str, change: Object) -> None:
        await asyncio.to_thread(self._admin.patch, self._thing(name), change, self._namespace)

    async def status(self, name: str, status: Object) -> None:
        await asyncio.to_thread(self._admin.patch, self._thing(name), {"status": status}, self._namespace, "status")

    async def delete(self, name: str) -> None:
        await asyncio.to_thread(self._cluster.delete_pod, self._namespace, name)

    def _thing(self, name: str) -> Object:
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}}


class Fake:
    """The same through its back door."""

    def __init__(self, kube: FakeKube, namespace: str) -> None:
        self._kube, self._namespace = kube, namespace

    async def pool(self, value: Object) -> None:
        metadata = {**value["metadata"], "namespace": self._namespace}
        self._kube.put(POOL_V1, "inferencepools", {**value, "metadata": metadata})

    async def no_pool(self) -> None:
        self._kube.drop(POOL_V1, "inferencepools", "llama", self._namespace)

    async def pod(self, name: str, address: str, **labels: str) -> None:
        metadata = {"name": name, "namespace": self._namespace, "labels": {"app": "vllm", **labels}}
        self._kube.put("v1", "pods", {"metadata": metadata})
        await self.status(name, running(address, True))

    async def change(self, name: str, change: Object) -> None:
        self._kube.patch("v1", "pods", name, change, self._namespace)

    async def status(self, name: str, status: Object) -> None:
        self._kube.patch("v1", "pods", name, {"status": status}, self._namespace)

    async def delete(self, name: str) -> None:
        self._kube.drop("v1", "pods", name, self._namespace)


class Step(NamedTuple):
    """What is done, and what must have happened then, no more and no less."""

    name: str
    do: Callable[[World], Any]
    events: str


def ready(value: bool) -> Object:
    return {"conditions": [{"type": "Ready", "status": "True" if value else "False"}]}


SCRIPT = [
    Step("a pool without pods", lambda w: w.pool(pool()), ""),
    Step("a pod", lambda w: w.pod("a", "10.1.0.1"), "+a/0"),
    Step("a pod of IPv6", lambda w: w.pod("b", "fd00::2"), "+b/0"),
    Step("a pod of somebody else", lambda w: w.pod("x", "10.1.0.9", app="web"), ""),
    Step("unready", lambda w: w.status("a", ready(False)), "-a/0"),
    Step("ready again", lambda w: w.status("a", ready(True)), "+a/0"),
    Step("a label that matters to nobody", lambda w: w.change("a", {"metadata": {"annotations": {"x": "y"}}}), ""),
    Step("a label of ours", lambda w: w.change("a", {"metadata": {"labels": {"llm-d.ai/role": "prefill"}}}), "+a/0"),
    Step("no more one of ours", lambda w: w.change("b", {"metadata": {"labels": {"app": "web"}}}), "-b/0"),
    Step("one of ours again", lambda w: w.change("b", {"metadata": {"labels": {"app": "vllm"}}}), "+b/0"),
    Step("two ports", lambda w: w.pool(pool(ports=(8000, 8001))), "+a/1 +b/1"),
    Step(
        "one port of a pod",
        lambda w: w.change("a", {"metadata": {"annotations": {"llm-d.ai/active-ports": "8001"}}}),
        "-a/0",
    ),
    Step(
        "all ports of it",
        lambda w: w.change("a", {"metadata": {"annotations": {"llm-d.ai/active-ports": None}}}),
        "+a/0",
    ),
    Step("one port", lambda w: w.pool(pool(ports=(8000,))), "-a/1 -b/1"),
    Step("another selector", lambda w: w.pool(pool(app="web")), "+x/0 -a/0 -b/0"),
    Step("the old selector", lambda w: w.pool(pool()), "+a/0 +b/0 -x/0"),
    Step("a pod is deleted", lambda w: w.delete("a"), "-a/0"),
    Step("and made anew", lambda w: w.pod("a", "10.1.0.1"), "+a/0"),
    Step("no pool", lambda w: w.no_pool(), "-a/0 -b/0"),
    Step("the pool again", lambda w: w.pool(pool()), "+a/0 +b/0"),
]

Server = tuple[World, Path, str]
_numbers = itertools.count(1)


@asynccontextmanager
async def fake(tmp_path: Path) -> AsyncIterator[Server]:
    server = FakeKube()
    await server.start()
    file = server.write_kubeconfig(tmp_path, namespace="default")
    try:
        yield Fake(server, "default"), file, "default"
    finally:
        await server.stop()


@asynccontextmanager
async def real(cluster: Cluster, tmp_path: Path) -> AsyncIterator[Server]:
    namespace = await asyncio.to_thread(cluster.namespace, f"script-{next(_numbers)}")
    file = cluster.kubeconfig(tmp_path / "kubeconfig", namespace=namespace)
    yield Real(cluster, namespace), file, namespace


@pytest.fixture(params=["fake", "real"])
async def server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Server]:
    if request.param == "fake":
        async with fake(tmp_path) as made:
            yield made
    else:
        async with real(request.getfixturevalue("kube"), tmp_path) as made:
            yield made


async def test_every_step_shows_the_same(server: Server) -> None:
    world, kubeconfig, namespace = server
    async with Followed(kubeconfig, namespace) as followed:
        for step in SCRIPT:
            await step.do(world)
            wanted = sorted(step.events.split())
            await until(lambda wanted=wanted: sorted(followed.events) == wanted, f"{step.name}: {followed.events}")
            if (shown := followed.pods.pool) is not None:
                # Nothing more comes: a pod that comes and goes later shows that all earlier changes were told.
                await world.pod("mark", "10.9.9.9", **shown.selector)
                await until(lambda: "mark/0" in followed.table, step.name)
                await world.delete("mark")
                await until(lambda: not any("mark" in name for name in followed.table), step.name)
            assert [event for event in followed.news() if "mark" not in event] == wanted, step.name
    assert followed.table == {"a/0": "10.1.0.1:8000", "b/0": "[fd00::2]:8000"}
    assert not any(followed.troubles)
