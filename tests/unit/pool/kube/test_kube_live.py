"""Everything of one pool together, against the fake: readiness, outages, hand-over, metrics."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from fake_kube import FakeKube

from fairlead.config.schema import Kubernetes, LeaderElection
from fairlead.core.errors import ConfigError
from fairlead.core.events import EndpointUp
from fairlead.core.models import ModelSet
from fairlead.pool.kube import endpoint_slice
from fairlead.server.live import kube as live_kube
from fairlead.server.live.kube import Kube, follow_pool
from fairlead.server.observe.component_metrics import KubeMetrics
from fairlead.server.observe.exposition import Registry

V1 = "inference.networking.k8s.io/v1"
X = "inference.networking.x-k8s.io/v1alpha2"
POOL = {
    "metadata": {"name": "llama", "namespace": "default"},
    "spec": {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [{"number": 8000}]},
}
MODEL = {
    "metadata": {"name": "chat", "namespace": "default"},
    "spec": {"modelName": "chat", "poolRef": {"name": "llama"}},
}


class Replica:
    def __init__(self, kubeconfig: Path, speaks: bool = False, **more: Any) -> None:
        self.unready: dict[str, str] = {}
        self.up: set[str] = set()
        self.models = ModelSet()
        self.registry = Registry()
        settings = Kubernetes(pool="llama", namespace="default", kubeconfig=str(kubeconfig), **more)
        self.metrics = KubeMetrics(self.registry)
        self.kube = Kube(settings, self.feed, self.take, self.set_ready, self.metrics, speaks_for_gateway=speaks)

    def feed(self, event: Any) -> None:
        if isinstance(event, EndpointUp):
            self.up.add(event.endpoint.id)
        else:
            self.up.discard(event.endpoint_id)

    def take(self, models: ModelSet) -> None:
        self.models = models

    def set_ready(self, part: str, reason: str) -> None:
        self.unready.pop(part, None)
        if reason:
            self.unready[part] = reason

    def metric(self, line: str) -> bool:
        return line in self.registry.render().decode().splitlines()


@pytest.fixture
def kubeconfig(kube: FakeKube, tmp_path: Path) -> Path:
    return kube.write_kubeconfig(tmp_path)


@pytest.fixture
async def stack(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AsyncExitStack]:
    monkeypatch.setattr(live_kube, "START_S", 0.1)
    monkeypatch.setattr(live_kube, "NOTICE_S", 0.01)
    async with AsyncExitStack() as opened:
        yield opened


async def test_ready_once_everything_was_read(
    kube: FakeKube, kubeconfig: Path, stack: AsyncExitStack, pod: Any, until: Any
) -> None:
    replica = Replica(kubeconfig)
    await replica.kube.start(stack)
    assert "no InferencePool default/llama" in replica.unready["kubernetes"]
    kube.put(V1, "inferencepools", POOL)
    kube.put("v1", "pods", pod("a"))
    kube.put(X, "inferencemodels", MODEL)
    await until(lambda: not replica.unready and replica.models.models)
    assert replica.up == {"default/a-rank-0"}
    await until(lambda: kube.objects[X, "inferencemodels"]["default/chat"].get("status"))
    assert replica.metric('fairlead_kube_connected{resource="pods"} 1')
    assert replica.metric('fairlead_kube_objects{resource="inferencemodels"} 1')


async def test_models_of_a_deleted_pool_are_told_and_accepted_again(
    kube: FakeKube, kubeconfig: Path, stack: AsyncExitStack, until: Any
) -> None:
    def told(name: str) -> tuple[str, str]:
        status = kube.objects[X, "inferencemodels"][f"default/{name}"].get("status", {})
        return next(((one["status"], one["reason"]) for one in status.get("conditions", ())), ("", ""))

    other = {"metadata": {"name": "other"}, "spec": {"modelName": "chat", "poolRef": {"name": "of-another-scheduler"}}}
    accepted = {"status": {"conditions": [{"type": "Accepted", "status": "True", "reason": "Accepted"}]}}
    kube.put(X, "inferencemodels", MODEL)
    kube.put(X, "inferencemodels", {**other, **accepted})
    replica = Replica(kubeconfig)
    await replica.kube.start(stack)
    assert told("chat") == ("", ""), "there is no pool yet"
    for _ in range(2):
        kube.put(V1, "inferencepools", POOL)
        await until(lambda: told("chat") == ("True", "Accepted"))
        kube.drop(V1, "inferencepools", "llama")
        await until(lambda: told("chat") == ("False", "PoolNotFound"))
    assert told("other") == ("True", "Accepted")


async def test_an_outage_changes_nothing_but_the_metric(
    kube: FakeKube, kubeconfig: Path, stack: AsyncExitStack, pod: Any, until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    kube.put(V1, "inferencepools", POOL)
    kube.put("v1", "pods", pod("a"))
    replica = Replica(kubeconfig)
    await replica.kube.start(stack)
    await until(lambda: not replica.unready)
    await kube.stop()
    await until(lambda: replica.metric('fairlead_kube_connected{resource="pods"} 0'))
    await until(lambda: "trouble with Kubernetes; the last known state stays in use" in caplog.text)
    assert not replica.unready
    assert replica.up == {"default/a-rank-0"}
    await kube.start()
    await until(lambda: replica.metric('fairlead_kube_connected{resource="pods"} 1'))


async def test_starting_without_an_api_server(
    kube: FakeKube, kubeconfig: Path, stack: AsyncExitStack, pod: Any, until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    kube.put(V1, "inferencepools", POOL)
    kube.put("v1", "pods", pod("a"))
    await kube.stop()
    replica = Replica(kubeconfig)
    await replica.kube.start(stack)
    assert replica.unready["kubernetes"].startswith("the InferencePool was not read yet: ")
    assert "trouble with Kubernetes; no state is known yet" in caplog.text
    assert "last known state" not in caplog.text
    await kube.start()
    await until(lambda: not replica.unready)


async def test_why_it_is_not_ready_is_told_where_people_look(
    kube: FakeKube, kubeconfig: Path, stack: AsyncExitStack, until: Any
) -> None:
    kube.put(V1, "inferencepools", POOL)
    kube.forbidden.add(("list", "pods"))
    replica = Replica(kubeconfig)
    await replica.kube.start(stack)
    await until(lambda: 'resources: ["pods"], verbs: ["list"]' in replica.unready["kubernetes"])


async def test_a_standby_is_warm_and_not_ready_until_it_leads(
    kube: FakeKube, kubeconfig: Path, stack: AsyncExitStack, pod: Any, until: Any
) -> None:
    kube.put(V1, "inferencepools", POOL)
    kube.put("v1", "pods", pod("a"))
    election = LeaderElection(enabled=True, lease_duration=30.0, renew_deadline=20.0, retry_period=1.0, overlap=0.01)
    leader, standby = (Replica(kubeconfig, leader_election=election) for _ in range(2))
    await leader.kube.start(stack)
    await until(lambda: not leader.unready)
    await standby.kube.start(stack)
    await until(lambda: standby.up and "kubernetes" not in standby.unready)
    await until(lambda: standby.unready["leader"].endswith(" leads") and "nobody" not in standby.unready["leader"])
    lease = "epp-default-llama.fairlead"
    assert leader.metric(f'fairlead_kube_leader{{lease="{lease}"}} 1')
    assert (leader.metrics.standby, standby.metrics.standby) == (False, True)
    await leader.kube.hand_over()
    await until(lambda: not standby.unready)
    assert (leader.metrics.standby, standby.metrics.standby) == (True, False)
    assert "leader" in leader.unready
    await leader.kube.hand_over()  # who does not lead has nothing to hand over


async def test_a_leader_that_gateways_do_not_find_says_so(
    kube: FakeKube, kubeconfig: Path, stack: AsyncExitStack, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_slice, "RETRY_S", 0.05)
    monkeypatch.setenv("POD_IP", "10.244.0.7")
    kube.put(V1, "inferencepools", POOL)
    replica = Replica(kubeconfig, leader_election=LeaderElection(enabled=True, service="llama-epp-leader"))
    await replica.kube.start(stack)
    await until(lambda: "the service default/llama-epp-leader does not point to this replica" in replica.kube.misled)
    await until(lambda: not replica.unready)
    kube.put("v1", "services", {"metadata": {"name": "llama-epp-leader"}, "spec": {"ports": [{"port": 9002}]}})
    await until(lambda: not replica.kube.misled)


async def test_a_leader_that_gateways_ask_at_a_port_which_its_service_lacks_says_so(
    kube: FakeKube, kubeconfig: Path, stack: AsyncExitStack, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POD_IP", "10.244.0.7")
    kube.put("v1", "services", {"metadata": {"name": "llama-epp-leader"}, "spec": {"ports": [{"port": 9002}]}})
    ref = {"name": "llama-epp-leader", "port": {"number": 9003}}
    kube.put(V1, "inferencepools", {**POOL, "spec": {**POOL["spec"], "endpointPickerRef": ref}})
    replica = Replica(kubeconfig, leader_election=LeaderElection(enabled=True, service="llama-epp-leader"))
    await replica.kube.start(stack)
    lacks = "no port 9003 at the service default/llama-epp-leader, which has 9002"
    await until(lambda: replica.kube.misled == f"the endpointPickerRef of default/llama: {lacks}")
    kube.put(V1, "inferencepools", {**POOL, "spec": {**POOL["spec"], "endpointPickerRef": {"name": ref["name"]}}})
    await until(lambda: not replica.kube.misled)


@pytest.mark.parametrize("speaks", [True, False])
async def test_a_changed_protocol_of_the_pods_is_logged_where_a_gateway_reads_it(
    kube: FakeKube, kubeconfig: Path, stack: AsyncExitStack, until: Any, caplog: Any, speaks: bool
) -> None:
    """An embedded gateway reads it when it is started. Other gateways apply it themselves."""
    kube.put(V1, "inferencepools", POOL)
    replica = Replica(kubeconfig, speaks)
    await replica.kube.start(stack)
    await until(lambda: not replica.unready)
    assert "appProtocol" not in caplog.text
    kube.put(V1, "inferencepools", {**POOL, "spec": {**POOL["spec"], "appProtocol": "kubernetes.io/h2c"}})
    await until(lambda: replica.kube.endpoints.pool.app_protocol == "kubernetes.io/h2c")
    assert ("the pool's appProtocol changed" in caplog.text) == speaks


async def test_the_protocol_of_the_pods_is_read_for_the_gateways_parent(
    kube: FakeKube, kubeconfig: Path, stack: AsyncExitStack
) -> None:
    kube.put(V1, "inferencepools", {**POOL, "spec": {**POOL["spec"], "appProtocol": "kubernetes.io/h2c"}})
    settings = Kubernetes(pool="llama", namespace="default", kubeconfig=str(kubeconfig))
    assert await follow_pool(stack, settings, lambda event: None) == "kubernetes.io/h2c"


async def test_endpoints_alone_for_the_gateways_parent(
    kube: FakeKube, kubeconfig: Path, stack: AsyncExitStack, pod: Any, until: Any
) -> None:
    kube.put("v1", "pods", pod("a"))
    up: list[Any] = []
    settings = Kubernetes(
        selector={"app": "vllm"}, target_ports=(8000,), namespace="default", kubeconfig=str(kubeconfig)
    )
    await follow_pool(stack, settings, up.append)
    await until(lambda: [event.endpoint.address for event in up] == ["10.0.0.1:8000"])


def test_a_kubeconfig_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Replica(tmp_path / "absent")
