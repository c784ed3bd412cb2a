"""Of several replicas one leads; durations are short, and nothing asserts on the wall clock."""

import asyncio
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest
from fake_kube import FakeKube

from fairlead.pool.kube.auth import Access, FixedSecret, Secret, Where
from fairlead.pool.kube.client import KubeClient
from fairlead.pool.kube.elector import ElectionSettings, Elector

LEASES = ("coordination.k8s.io/v1", "leases")


class Replica:
    def __init__(self, kube: FakeKube, name: str, duration: float) -> None:
        self.client = KubeClient(Access(Where(kube.url), FixedSecret(Secret())))
        self.history: list[bool] = []
        self.troubles: list[str] = []
        settings = ElectionSettings(
            namespace="default",
            name="epp",
            identity=name,
            duration_s=duration,
            renew_s=duration * 0.6,
            retry_s=duration * 0.2,
        )
        self.elector = Elector(self.client, settings, self.changed, Random(1), on_trouble=self.troubles.append)
        self.task = asyncio.create_task(self.elector.run())

    def changed(self, leading: bool, holder: str) -> None:
        self.history.append(leading)

    async def kill(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.client.close()

    @property
    def leads(self) -> bool:
        return self.elector.leading


@pytest.fixture
async def replica(kube: FakeKube) -> AsyncIterator[Any]:
    made: list[Replica] = []

    def make(name: str, duration: float = 30.0) -> Replica:
        made.append(Replica(kube, name, duration))
        return made[-1]

    yield make
    for one in made:
        await one.kill()


def lease(kube: FakeKube) -> Any:
    return kube.objects[LEASES]["default/epp"]["spec"]


async def test_the_first_one_leads_and_others_wait(kube: FakeKube, replica: Any, until: Any) -> None:
    a = replica("a")
    await until(lambda: a.leads)
    b = replica("b")
    await until(lambda: b.elector.holder == "a")
    assert not b.leads
    spec = lease(kube)
    assert (spec["holderIdentity"], spec["leaseDurationSeconds"], spec["leaseTransitions"]) == ("a", 30, 0)


async def test_of_many_that_start_together_one_leads(replica: Any, until: Any) -> None:
    many = [replica(f"r{i}") for i in range(8)]
    await until(lambda: all(one.elector.holder for one in many))
    assert sum(one.leads for one in many) == 1
    assert len({one.elector.holder for one in many}) == 1


async def test_who_goes_hands_over_at_once(kube: FakeKube, replica: Any, until: Any) -> None:
    a = replica("a")
    await until(lambda: a.leads)
    b = replica("b")
    await until(lambda: b.elector.holder == "a")
    await a.elector.release()
    assert not a.leads
    assert await a.elector.successor(10) == "b"  # of a lease that would run out after 30 s
    await until(lambda: b.leads)
    assert lease(kube)["leaseTransitions"] == 1


async def test_a_release_without_others_gives_up_waiting(kube: FakeKube, replica: Any, until: Any) -> None:
    a = replica("a")
    await until(lambda: a.leads)
    await a.elector.release()
    assert await a.elector.successor(0.05) == ""
    assert lease(kube)["holderIdentity"] == ""


async def test_who_dies_is_replaced_once_the_lease_has_run_out(kube: FakeKube, replica: Any, until: Any) -> None:
    a = replica("a", 1.0)
    await until(lambda: a.leads)
    b = replica("b", 1.0)
    await until(lambda: b.elector.holder == "a")
    await a.kill()
    renewed = lease(kube)["renewTime"]
    await until(lambda: b.leads)
    assert lease(kube)["holderIdentity"] == "b"
    assert lease(kube)["renewTime"] > renewed


async def test_the_holder_renews(kube: FakeKube, replica: Any, until: Any) -> None:
    a = replica("a", 1.0)
    await until(lambda: a.leads)
    first = lease(kube)["renewTime"]
    await until(lambda: lease(kube)["renewTime"] > first)
    assert a.history == [True]


async def test_an_outage_changes_no_leader(kube: FakeKube, replica: Any, until: Any) -> None:
    a = replica("a", 1.0)
    await until(lambda: a.leads)
    b = replica("b", 1.0)
    await until(lambda: b.elector.holder == "a")
    await kube.stop()
    await until(lambda: a.troubles and a.troubles[-1])
    await asyncio.sleep(1.5)  # longer than the lease
    assert a.leads
    assert not b.leads
    await kube.start()
    await until(lambda: a.elector.reflector.stats.connected and b.elector.reflector.stats.connected)
    renewed = lease(kube)["renewTime"]
    await until(lambda: lease(kube)["renewTime"] > renewed)
    assert (a.history, b.history) == ([True], [False])


async def test_who_sees_another_holder_steps_down(kube: FakeKube, replica: Any, until: Any) -> None:
    a = replica("a")
    await until(lambda: a.leads)
    spec = {**lease(kube), "holderIdentity": "thief"}
    kube.put(*LEASES, {"metadata": {"name": "epp", "namespace": "default"}, "spec": spec})
    await until(lambda: a.history == [True, False])
    assert a.elector.holder == "thief"


async def test_who_may_not_renew_steps_down_in_time(kube: FakeKube, replica: Any, until: Any) -> None:
    a = replica("a", 1.0)
    await until(lambda: a.leads)
    kube.forbidden.add(("update", "leases"))
    await until(lambda: a.history == [True, False])
    assert any('resources: ["leases"], verbs: ["update"]' in trouble for trouble in a.troubles)


async def test_a_lease_that_somebody_deletes_is_made_again(kube: FakeKube, replica: Any, until: Any) -> None:
    a = replica("a", 1.0)
    await until(lambda: a.leads)
    kube.drop(*LEASES, "epp")
    await until(lambda: kube.objects[LEASES])
    await until(lambda: a.leads)
    assert a.history == [True]


async def test_nonsense_in_the_lease_hurts_nobody(kube: FakeKube, replica: Any, until: Any) -> None:
    kube.put(*LEASES, {"metadata": {"name": "epp", "namespace": "default"}, "spec": {"holderIdentity": 7}})
    a = replica("a", 1.0)
    await until(lambda: a.elector.reflector.stats.unreadable)
    kube.put(*LEASES, {"metadata": {"name": "epp", "namespace": "default"}, "spec": {}})
    await until(lambda: a.leads)
