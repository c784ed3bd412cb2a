"""The chart's role is enough, and each verb of it is needed: without one, an error names it and the line to add."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml
from kc_objects import leader_service, model, pool, until
from kr_cluster import Cluster
from kr_helm import LABELS, Helm
from kr_helm import one as one_of

from fairlead.config.schema import Kubernetes, LeaderElection
from fairlead.server.live.kube import Kube
from fairlead.server.observe.component_metrics import KubeMetrics
from fairlead.server.observe.exposition import Registry

GIE, LEGACY, LLMD = "inference.networking.k8s.io", "inference.networking.x-k8s.io", "llm-d.ai"
SLICES = "discovery.k8s.io"
LEASE, SERVICE = "epp", "epp-leader"
NEEDED = [
    ("", "pods", ["list", "watch"]),
    (GIE, "inferencepools", ["list", "watch"]),
    (LEGACY, "inferencemodels", ["list", "watch"]),
    (LEGACY, "inferencemodels/status", ["patch"]),
    (LEGACY, "inferenceobjectives", ["list", "watch"]),
    (LEGACY, "inferencemodelrewrites", ["list", "watch"]),
    (LLMD, "inferenceobjectives", ["list", "watch"]),
    (LLMD, "inferencemodelrewrites", ["list", "watch"]),
    # What is to be created has no name yet; everything else may be limited to the one lease.
    ("coordination.k8s.io", "leases", ["create"]),
    ("coordination.k8s.io", "leases", ["get", "list", "watch", "update"]),
    ("", "services", ["get"]),
    (SLICES, "endpointslices", ["create"]),
    (SLICES, "endpointslices", ["get", "list", "watch", "update"]),
]
#: One verb of each kind of request; "get" of a lease is asked for only after a conflict.
MISSING = [
    ("", "pods", "list"),
    ("", "pods", "watch"),
    (GIE, "inferencepools", "list"),
    (GIE, "inferencepools", "watch"),
    (LEGACY, "inferencemodels", "list"),
    (LEGACY, "inferencemodels/status", "patch"),
    (LLMD, "inferenceobjectives", "watch"),
    ("coordination.k8s.io", "leases", "create"),
    ("coordination.k8s.io", "leases", "update"),
    ("coordination.k8s.io", "leases", "list"),
    ("", "services", "get"),
    (SLICES, "endpointslices", "create"),
    (SLICES, "endpointslices", "list"),
]
#: By resource: the one name that the rule is for.
NAMES = {"leases": LEASE, "services": SERVICE, "endpointslices": f"{SERVICE}-ipv4"}
_numbers = count(1)


@pytest.fixture(autouse=True)
def this_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_IP", "10.244.0.7")


def rules(without: tuple[str, str, str] = ("", "", "")) -> list[dict[str, Any]]:
    return [
        {
            "apiGroups": [group],
            "resources": [resource],
            "verbs": [verb for verb in verbs if (group, resource, verb) != without],
            **({"resourceNames": [NAMES[resource]]} if resource in NAMES and verbs != ["create"] else {}),
        }
        for group, resource, verbs in NEEDED
        if [verb for verb in verbs if (group, resource, verb) != without]
    ]


class Running:
    """Everything of `server.live.kube`, with what it said."""

    def __init__(self) -> None:
        self.unready: dict[str, str] = {}
        self.up: set[str] = set()

    def set_ready(self, part: str, reason: str) -> None:
        self.unready.pop(part, None)
        if reason:
            self.unready[part] = reason

    def feed(self, event: Any) -> None:
        if hasattr(event, "endpoint"):
            self.up.add(event.endpoint.id)


@asynccontextmanager
async def running(
    cluster: Cluster, tmp_path: Path, given: list[dict[str, Any]], lease: str = LEASE, service: str = SERVICE
) -> AsyncIterator[tuple[Running, Kube, str]]:
    """With a role of exactly these rules."""
    name = f"rbac-{next(_numbers)}"
    namespace = await asyncio.to_thread(cluster.namespace, name)
    token = await asyncio.to_thread(cluster.account, namespace, "epp", given)
    await asyncio.to_thread(cluster.admin.apply, pool(), namespace)
    await asyncio.to_thread(cluster.admin.apply, model("chat", "chat"), namespace)
    await asyncio.to_thread(cluster.pod, namespace, "a", "10.1.0.1", labels={"app": "vllm"})
    kubeconfig = cluster.kubeconfig(tmp_path / "kubeconfig", token, namespace)
    await asyncio.to_thread(cluster.admin.apply, leader_service(service), namespace)
    election = LeaderElection(
        enabled=True, lease_name=lease, lease_duration=4.0, renew_deadline=1.5, retry_period=0.5, service=service
    )
    settings = Kubernetes(pool="llama", namespace=namespace, kubeconfig=str(kubeconfig), leader_election=election)
    found = Running()
    async with AsyncExitStack() as stack:
        kube = Kube(settings, found.feed, lambda models: None, found.set_ready, KubeMetrics(Registry()))
        await kube.start(stack)
        yield found, kube, namespace


def said(caplog: pytest.LogCaptureFixture) -> str:
    return " ".join(str(getattr(record, "fields", "")) + record.getMessage() for record in caplog.records)


def written(cluster: Cluster, namespace: str) -> bool:
    found = cluster.admin.get(model("chat", "chat"), namespace)
    return any(one["type"] == "Accepted" for one in found.get("status", {}).get("conditions", []))


async def test_the_role_is_enough(kube: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running(kube, tmp_path, rules()) as (found, live, namespace):
        await until(lambda: not found.unready, str(found.unready))
        assert found.up == {f"{namespace}/a-rank-0"}
        assert live.elector is not None and live.elector.leading
        async with asyncio.timeout(20):
            while not await asyncio.to_thread(written, kube, namespace):
                await asyncio.sleep(0.05)
        (publisher,) = live.publishers.values()
        await until(lambda: publisher.writes == 1, "the slice that names the leader")
        await live.hand_over()
        assert publisher.writes == 2, "nobody came after it: the slice is emptied"
    assert "not allowed" not in said(caplog)


@pytest.mark.parametrize("missing", MISSING, ids=lambda one: f"{one[2]} {one[1]}")
async def test_a_missing_verb_is_named(
    kube: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture, missing: tuple[str, str, str]
) -> None:
    group, resource, verb = missing
    line = f'add to the role: - {{apiGroups: ["{group}"], resources: ["{resource}"], verbs: ["{verb}"]}}'

    async with running(kube, tmp_path, rules(missing)) as (found, _, namespace):
        await until(lambda: f"not allowed to {verb} {resource} in namespace {namespace}" in said(caplog))
        assert line in said(caplog)
        if resource == "leases":
            await until(lambda: line in found.unready.get("leader", ""), "readiness says why nobody leads")


async def test_exactly_the_charts_role_is_enough(
    kube: Cluster, helm: Helm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    things = await asyncio.to_thread(helm.render, *LABELS, "--set", "inferenceExtension.replicas=2")
    rules_of_chart = one_of(things, "Role")["rules"]
    config = yaml.safe_load(one_of(things, "ConfigMap")["data"]["fairlead.yaml"])
    election = config["kubernetes"]["leaderElection"]
    names = election["leaseName"], election["service"]
    async with running(kube, tmp_path, rules_of_chart, *names) as (found, live, namespace):
        await until(lambda: not found.unready, str(found.unready))
        async with asyncio.timeout(20):
            while not await asyncio.to_thread(written, kube, namespace):
                await asyncio.sleep(0.05)
        (publisher,) = live.publishers.values()
        await until(lambda: publisher.writes == 1, "the slice that names the leader")
        await live.hand_over()
        assert publisher.writes == 2, "nobody came after it: the slice is emptied"
    assert "not allowed" not in said(caplog)
