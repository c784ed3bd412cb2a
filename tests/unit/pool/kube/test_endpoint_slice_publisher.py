"""The slice that names the leader, on a fake API server."""

import asyncio
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest
from fake_kube import FakeKube

from fairlead.pool.kube import endpoint_slice, reflector
from fairlead.pool.kube.auth import Access, FixedSecret, Secret, Where
from fairlead.pool.kube.client import KubeClient
from fairlead.pool.kube.endpoint_slice import EndpointSlicePublisher, Place

SLICES = ("discovery.k8s.io/v1", "endpointslices")
NAME = "default/epp-leader-ipv4"
SERVICE = {
    "metadata": {"name": "epp-leader"},
    "spec": {"ports": [{"name": "grpc-ext-proc", "port": 9002, "targetPort": 9002, "protocol": "TCP"}]},
}


class Replica:
    def __init__(self, kube: FakeKube, number: int, lease: str = "default/epp") -> None:
        self.place = Place(f"10.244.0.{number}" if number else "fd00::7", f"epp-{number}")
        self.troubles: list[str] = []
        self.client = KubeClient(Access(Where(kube.url), FixedSecret(Secret())), Random(number))
        self.publisher = EndpointSlicePublisher(
            self.client, "default", "epp-leader", self.place, lease, on_trouble=self.troubles.append
        )
        self.task = asyncio.create_task(self.publisher.run())


@pytest.fixture
async def replica(kube: FakeKube, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    monkeypatch.setattr(endpoint_slice, "REPAIR_S", 0.02)
    monkeypatch.setattr(endpoint_slice, "RETRY_S", 0.05)
    monkeypatch.setattr(reflector, "REFUSED_PAUSE_S", 0.05)
    kube.put("v1", "services", SERVICE)
    made: list[Replica] = []

    def make(number: int, *lease: str) -> Replica:
        made.append(Replica(kube, number, *lease))
        return made[-1]

    yield make
    for one in made:
        one.task.cancel()
        await asyncio.gather(one.task, return_exceptions=True)
        await one.client.close()


def named(kube: FakeKube) -> list[str]:
    found = kube.objects.get(SLICES, {}).get(NAME, {})
    return [address for one in found.get("endpoints", ()) for address in one["addresses"]]


async def test_only_who_leads_writes_and_the_next_one_writes_over(kube: FakeKube, replica: Any, until: Any) -> None:
    a, b = replica(1), replica(2)
    await until(lambda: a.publisher.reflector.ready.is_set() and b.publisher.reflector.ready.is_set())
    assert not kube.objects.get(SLICES)
    a.publisher.lead(True)
    await until(lambda: named(kube) == ["10.244.0.1"])
    a.publisher.lead(False)
    b.publisher.lead(True)
    await until(lambda: named(kube) == ["10.244.0.2"])
    await until(lambda: b.publisher.writes)  # counted when the answer is there
    assert (a.publisher.writes, b.publisher.writes) == (1, 1), "in one write each, and never empty in between"
    await a.publisher.withdraw()
    assert named(kube) == ["10.244.0.2"], "who is not named takes nothing away"


async def test_the_address_of_a_former_leader_of_another_family_is_taken_out(
    kube: FakeKube, replica: Any, until: Any
) -> None:
    a, b = replica(0), replica(1)
    a.publisher.lead(True)
    await until(lambda: "default/epp-leader-ipv6" in kube.objects.get(SLICES, {}))
    a.publisher.lead(False)
    b.publisher.lead(True)
    await until(lambda: not kube.objects[SLICES]["default/epp-leader-ipv6"]["endpoints"])
    assert named(kube) == ["10.244.0.1"]
    assert kube.objects[SLICES]["default/epp-leader-ipv6"]["addressType"] == "IPv6"


async def test_who_ends_without_a_successor_takes_itself_out(kube: FakeKube, replica: Any, until: Any) -> None:
    a = replica(1)
    a.publisher.lead(True)
    await until(lambda: named(kube) == ["10.244.0.1"])
    a.publisher.lead(False)
    await a.publisher.withdraw()
    assert kube.objects[SLICES][NAME]["endpoints"] == []


async def test_who_ends_while_it_is_being_named_takes_itself_out(
    kube: FakeKube, replica: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, answered = replica(1), asyncio.Event()
    put = a.client.put

    async def answered_late(*arguments: Any) -> Any:
        answer = await put(*arguments)
        await answered.wait()
        return answer

    monkeypatch.setattr(a.client, "put", answered_late)
    a.publisher.lead(True)
    await until(lambda: named(kube) == ["10.244.0.1"])
    a.publisher.lead(False)
    leaving = asyncio.create_task(a.publisher.withdraw())
    await asyncio.sleep(0)
    answered.set()
    await leaving
    assert kube.objects[SLICES][NAME]["endpoints"] == []


async def test_what_others_change_is_put_right(kube: FakeKube, replica: Any, until: Any) -> None:
    a = replica(1)
    a.publisher.lead(True)
    await until(lambda: named(kube) == ["10.244.0.1"])
    kube.patch(*SLICES, "epp-leader-ipv4", {"endpoints": []})
    await until(lambda: named(kube) == ["10.244.0.1"])
    kube.drop(*SLICES, "epp-leader-ipv4")
    await until(lambda: named(kube) == ["10.244.0.1"])
    assert not a.troubles


@pytest.mark.parametrize(
    "change",
    [
        {"metadata": {"labels": {"kubernetes.io/service-name": None}}},
        {"endpoints": [{"addresses": ["10.244.0.1"], "conditions": {"ready": False}, "targetRef": {"name": "epp-1"}}]},
    ],
)
async def test_a_slice_that_gateways_would_not_use_is_put_right(
    kube: FakeKube, replica: Any, until: Any, change: Any
) -> None:
    a = replica(1)
    a.publisher.lead(True)
    await until(lambda: named(kube) == ["10.244.0.1"])
    right = kube.objects[SLICES][NAME]
    kube.patch(*SLICES, "epp-leader-ipv4", change)
    await until(lambda: a.publisher.writes == 2)
    assert kube.objects[SLICES][NAME]["metadata"]["labels"] == right["metadata"]["labels"]
    assert kube.objects[SLICES][NAME]["endpoints"] == right["endpoints"]


async def test_the_slice_follows_the_ports_of_its_service(
    kube: FakeKube, replica: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_slice, "SERVICE_S", 0.05)
    a = replica(1)
    a.publisher.lead(True)
    await until(lambda: named(kube) == ["10.244.0.1"])
    kube.patch(
        "v1", "services", "epp-leader", {"spec": {"ports": [{"name": "grpc", "port": 9002, "targetPort": 9004}]}}
    )
    await until(lambda: [port["port"] for port in kube.objects[SLICES][NAME]["ports"]] == [9004])


async def test_a_service_that_was_made_again_gets_a_slice_of_its_own(kube: FakeKube, replica: Any, until: Any) -> None:
    """Garbage collection deletes what the deleted service owned."""
    a = replica(1)
    a.publisher.lead(True)
    await until(lambda: named(kube) == ["10.244.0.1"])
    kube.drop("v1", "services", "epp-leader")
    kube.put("v1", "services", {**SERVICE, "metadata": {"name": "epp-leader", "uid": "another"}})
    kube.drop(*SLICES, "epp-leader-ipv4")
    await until(lambda: named(kube) == ["10.244.0.1"])
    assert kube.objects[SLICES][NAME]["metadata"]["ownerReferences"][0]["uid"] == "another"


async def test_the_slice_of_another_release_is_left_alone_for_a_while_and_told(
    kube: FakeKube, replica: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = replica(1), replica(2, "other/epp")
    a.publisher.lead(True)
    await until(lambda: named(kube) == ["10.244.0.1"])
    b.publisher.lead(True)
    await until(lambda: "the lease default/epp of another release" in b.publisher.trouble)
    assert named(kube) == ["10.244.0.1"]
    monkeypatch.setattr(endpoint_slice, "FOREIGN_S", 0.05)
    a.publisher.lead(True)
    b.publisher.lead(True)
    await until(lambda: named(kube) == ["10.244.0.2"])  # its writer might be gone
    await until(lambda: "the lease other/epp of another release" in a.publisher.trouble)
    await until(lambda: named(kube) == ["10.244.0.1"])  # but it is not
    b.publisher.lead(False)
    a.publisher.lead(False)
    await a.publisher.withdraw()
    b.publisher.lead(True)
    await until(lambda: named(kube) == ["10.244.0.2"] and not b.publisher.trouble)


async def test_who_lost_the_lease_meanwhile_does_not_write_over_its_successor(
    kube: FakeKube, replica: Any, until: Any
) -> None:
    """It sees the other one's name first, and a moment later that it leads no more."""
    a, b = replica(1), replica(2)
    a.publisher.lead(True)
    await until(lambda: named(kube) == ["10.244.0.1"])
    b.publisher.lead(True)
    await until(lambda: named(kube) == ["10.244.0.2"])
    a.publisher.lead(False)
    await asyncio.sleep(5 * endpoint_slice.REPAIR_S)
    assert named(kube) == ["10.244.0.2"]
    assert a.publisher.writes == 1


@pytest.mark.parametrize("verb", ["get services", "create endpointslices", "list endpointslices"])
async def test_a_missing_permission_is_told_and_tried_again(
    kube: FakeKube, replica: Any, until: Any, verb: str
) -> None:
    allowed = tuple(verb.split())
    kube.forbidden.add(allowed)  # type: ignore[arg-type]
    a = replica(1)
    a.publisher.lead(True)
    await until(lambda: any(f"not allowed to {verb}" in trouble for trouble in a.troubles))
    assert not named(kube)
    kube.forbidden.clear()
    await until(lambda: named(kube) == ["10.244.0.1"])
    await until(lambda: a.troubles[-1] == "")


async def test_a_service_that_kubernetes_keeps_is_left_alone(kube: FakeKube, replica: Any, until: Any) -> None:
    kube.patch("v1", "services", "epp-leader", {"spec": {"selector": {"app": "epp"}}})
    a = replica(1)
    a.publisher.lead(True)
    await until(lambda: any("has a selector" in trouble for trouble in a.troubles))
    assert not kube.objects.get(SLICES)


async def test_an_outage_is_outlived(kube: FakeKube, replica: Any, until: Any) -> None:
    a = replica(1)
    await until(a.publisher.reflector.ready.is_set)
    await kube.stop()
    a.publisher.lead(True)
    await until(lambda: a.troubles)
    await kube.start()
    await until(lambda: named(kube) == ["10.244.0.1"])


async def test_who_leads_no_more_has_no_trouble(kube: FakeKube, replica: Any, until: Any) -> None:
    kube.drop("v1", "services", "epp-leader")
    a = replica(1)
    a.publisher.lead(True)
    await until(lambda: "does not point to this replica" in a.publisher.trouble)
    a.publisher.lead(False)
    assert (a.publisher.trouble, a.troubles[-1]) == ("", "")


async def test_the_end_of_an_outage_is_seen_by_a_standby(kube: FakeKube, replica: Any, until: Any) -> None:
    a = replica(1)
    await until(a.publisher.reflector.ready.is_set)
    await kube.stop()
    await until(lambda: a.publisher.trouble)
    a.publisher.lead(False)
    assert a.publisher.trouble, "no API server answers still"
    await kube.start()
    await until(lambda: not a.publisher.trouble)
