"""A pool and its pods become endpoints, and nothing flaps."""

import asyncio
from typing import Any

import pytest
from fake_kube import FakeKube

from fairlead.core.events import EndpointDown, EndpointUp
from fairlead.pool.aio import IN_ONE_TURN
from fairlead.pool.kube.client import KubeClient
from fairlead.pool.kube.objects import GROUP, LEGACY_GROUP, Pool
from fairlead.pool.kube.pods import PoolEndpoints

V1 = "inference.networking.k8s.io/v1"


def pool(ports: tuple[int, ...] = (8000,), app: str = "vllm") -> Any:
    return {
        "metadata": {"name": "llama", "namespace": "default"},
        "spec": {"selector": {"matchLabels": {"app": app}}, "targetPorts": [{"number": port} for port in ports]},
    }


class Followed:
    def __init__(self, client: KubeClient, wanted: Pool, group: str = GROUP) -> None:
        self.up: dict[str, str] = {}
        self.events: list[str] = []
        self.problems: list[str] = []
        #: How few endpoints were up after any event since the last `news`.
        self.fewest = 1_000
        self.pods = PoolEndpoints(client, wanted, group, self.feed, report=self.problems.append)

    def feed(self, event: EndpointUp | EndpointDown) -> None:
        if isinstance(event, EndpointUp):
            self.up[event.endpoint.id] = event.endpoint.address
            self.events.append(f"+{event.endpoint.id}")
        else:
            del self.up[event.endpoint_id]
            self.events.append(f"-{event.endpoint_id}")
        self.fewest = min(self.fewest, len(self.up))

    def news(self) -> list[str]:
        self.fewest = 1_000
        told, self.events = self.events, []
        return sorted(told)


@pytest.fixture
def followed(client: KubeClient) -> Followed:
    return Followed(client, Pool("default", "llama", {}, ()))


async def test_each_port_of_each_ready_pod_is_an_endpoint(
    kube: FakeKube, followed: Followed, pod: Any, tasks: Any, until: Any
) -> None:
    kube.put(V1, "inferencepools", pool((8000, 8001)))
    kube.put("v1", "pods", pod("a", "10.0.0.1"))
    kube.put("v1", "pods", pod("b", "fd00::1"))
    kube.put("v1", "pods", pod("c", "10.0.0.3", ready=False))
    kube.put("v1", "pods", pod("d", "10.0.0.4", deletionTimestamp="2026-01-01T00:00:00Z"))
    for phase in ("Failed", "Succeeded"):
        over = pod(phase.lower(), "10.0.0.6")
        kube.put("v1", "pods", {**over, "status": {**over["status"], "phase": phase}})
    kube.put("v1", "pods", pod("e", "10.0.0.5", annotations={"llm-d.ai/active-ports": "8001"}))
    kube.put("v1", "pods", {**pod("other"), "metadata": {"name": "other", "labels": {"app": "web"}}})
    tasks(followed.pods.run())
    await until(lambda: not followed.pods.missing)
    assert followed.up == {
        "default/a-rank-0": "10.0.0.1:8000",
        "default/a-rank-1": "10.0.0.1:8001",
        "default/b-rank-0": "[fd00::1]:8000",
        "default/b-rank-1": "[fd00::1]:8001",
        "default/e-rank-1": "10.0.0.5:8001",
    }
    assert all(endpoint.id.endswith(f"-rank-{endpoint.rank}") for endpoint in followed.pods.endpoints)


async def test_many_pods_come_and_go_in_several_turns_and_are_known_when_all_have_come(
    kube: FakeKube, followed: Followed, pod: Any, tasks: Any, until: Any
) -> None:
    kube.put(V1, "inferencepools", pool())
    for number in range(3 * IN_ONE_TURN):
        kube.put("v1", "pods", pod(f"p{number}", f"10.0.0.{number}"))
    tasks(followed.pods.run())
    async with asyncio.timeout(20):
        while not followed.up:
            await asyncio.sleep(0)
    assert len(followed.up) <= IN_ONE_TURN and followed.pods.missing
    await until(lambda: not followed.pods.missing)
    assert len(followed.up) == 3 * IN_ONE_TURN
    kube.drop(V1, "inferencepools", "llama")
    await until(lambda: not followed.up)


async def test_unready_and_deleted_pods_go_at_once(
    kube: FakeKube, followed: Followed, pod: Any, tasks: Any, until: Any
) -> None:
    kube.put(V1, "inferencepools", pool())
    for name in "abc":
        kube.put("v1", "pods", pod(name, f"10.0.0.{ord(name)}"))
    tasks(followed.pods.run())
    await until(lambda: len(followed.up) == 3)
    followed.news()
    kube.put("v1", "pods", pod("a", "10.0.0.97", ready=False))
    kube.drop("v1", "pods", "b")
    kube.put("v1", "pods", pod("c", "10.0.0.99", labels={"app": "retired"}))
    await until(lambda: not followed.up)
    assert followed.news() == ["-default/a-rank-0", "-default/b-rank-0", "-default/c-rank-0"]
    kube.put("v1", "pods", pod("a", "10.0.0.97"))
    await until(lambda: followed.up)


async def test_a_pod_that_was_replaced_under_its_name_is_new(
    kube: FakeKube, followed: Followed, pod: Any, tasks: Any, until: Any
) -> None:
    kube.put(V1, "inferencepools", pool())
    kube.put("v1", "pods", pod("a", uid="one"))
    tasks(followed.pods.run())
    await until(lambda: followed.up)
    followed.news()
    await kube.stop()
    kube.put("v1", "pods", pod("a", uid="two"))
    await kube.start()
    await until(lambda: len(followed.events) == 2)
    assert followed.events == ["-default/a-rank-0", "+default/a-rank-0"]
    assert [endpoint.uid for endpoint in followed.pods.endpoints] == ["two"]


async def test_the_pool_is_never_empty_while_all_its_pods_are_replaced(
    kube: FakeKube, followed: Followed, pod: Any, tasks: Any, until: Any
) -> None:
    """A rollout behind the reflector's back: of the old pods some are gone, some still end."""
    many = 2 * IN_ONE_TURN
    kube.put(V1, "inferencepools", pool((8000, 8001)))
    for number in range(many):
        kube.put("v1", "pods", pod(f"old-{number}", f"10.0.0.{number}"))
    kube.put("v1", "pods", pod("both", "10.0.2.1"))
    tasks(followed.pods.run())
    await until(lambda: len(followed.up) == 2 * many + 2)
    followed.news()
    await kube.stop()
    for number in range(many):
        kube.put("v1", "pods", pod(f"put-{number}", f"10.0.1.{number}"))
        if number % 2:
            kube.drop("v1", "pods", f"old-{number}")
        else:
            kube.put("v1", "pods", pod(f"old-{number}", f"10.0.0.{number}", ready=False))
    kube.compact()
    await kube.start()
    await until(lambda: len(followed.events) == 4 * many)
    assert followed.fewest >= 2 * many and len(followed.up) == 2 * many + 2
    assert not [event for event in followed.events if "both" in event]


async def test_another_selector_moves_only_what_differs(
    kube: FakeKube, followed: Followed, pod: Any, tasks: Any, until: Any
) -> None:
    kube.put(V1, "inferencepools", pool())
    kube.put("v1", "pods", pod("old", "10.0.0.1"))
    kube.put("v1", "pods", pod("both", "10.0.0.2", labels={"new": "yes"}))
    kube.put("v1", "pods", pod("new", "10.0.0.3", labels={"app": "other", "new": "yes"}))
    tasks(followed.pods.run())
    await until(lambda: len(followed.up) == 2)
    followed.news()
    changed = pool()
    changed["spec"]["selector"]["matchLabels"] = {"new": "yes"}
    kube.put(V1, "inferencepools", changed)
    await until(lambda: "default/new-rank-0" in followed.up)
    assert followed.news() == ["+default/new-rank-0", "-default/old-rank-0"]
    assert not followed.pods.missing


async def test_other_ports_apply_to_pods_that_are_known(
    kube: FakeKube, followed: Followed, pod: Any, tasks: Any, until: Any
) -> None:
    kube.put(V1, "inferencepools", pool((8000,)))
    kube.put("v1", "pods", pod("a"))
    tasks(followed.pods.run())
    await until(lambda: followed.up)
    followed.news()
    kube.put(V1, "inferencepools", pool((8000, 9000)))
    await until(lambda: len(followed.up) == 2)
    assert followed.news() == ["+default/a-rank-1"]


async def test_a_pool_that_is_gone_takes_its_endpoints_along(
    kube: FakeKube, followed: Followed, pod: Any, tasks: Any, until: Any
) -> None:
    tasks(followed.pods.run())
    await until(lambda: followed.pods.missing == "there is no InferencePool default/llama")
    kube.put(V1, "inferencepools", pool())
    kube.put("v1", "pods", pod("a"))
    await until(lambda: followed.up)
    assert not followed.pods.missing
    kube.drop(V1, "inferencepools", "llama")
    await until(lambda: not followed.up)
    assert "no InferencePool" in followed.pods.missing
    kube.put(V1, "inferencepools", pool())
    await until(lambda: followed.up)


async def test_a_pool_that_cannot_be_read_changes_nothing(
    kube: FakeKube, followed: Followed, pod: Any, tasks: Any, until: Any
) -> None:
    kube.put(V1, "inferencepools", pool())
    kube.put("v1", "pods", pod("a"))
    tasks(followed.pods.run())
    await until(lambda: followed.up)
    everything = pool()
    everything["spec"]["selector"] = {"matchLabels": {}}
    kube.put(V1, "inferencepools", everything)
    await until(lambda: followed.problems)
    assert "every pod" in followed.problems[0]
    assert len(followed.up) == 1


async def test_the_older_form_of_a_pool(kube: FakeKube, client: KubeClient, pod: Any, tasks: Any, until: Any) -> None:
    followed = Followed(client, Pool("default", "llama", {}, ()), LEGACY_GROUP)
    spec = {"selector": {"app": "vllm"}, "targetPortNumber": 8080, "extensionRef": {"name": "epp"}}
    old = {"metadata": {"name": "llama"}, "spec": spec}
    kube.put("inference.networking.x-k8s.io/v1alpha2", "inferencepools", old)
    kube.put("v1", "pods", pod("a"))
    tasks(followed.pods.run())
    await until(lambda: followed.up == {"default/a-rank-0": "10.0.0.1:8080"})


async def test_pods_without_a_pool(kube: FakeKube, client: KubeClient, pod: Any, tasks: Any, until: Any) -> None:
    followed = Followed(client, Pool("default", "", {"app": "vllm"}, (8000,)))
    kube.put("v1", "pods", pod("a"))
    tasks(followed.pods.run())
    await until(lambda: followed.up == {"default/a-rank-0": "10.0.0.1:8000"})
    assert not followed.pods.missing
    assert all("inferencepools" not in path for _, path in kube.requests)
