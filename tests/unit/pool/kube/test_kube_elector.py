"""Of several replicas one leads; durations are short, and nothing asserts on the wall clock."""

import asyncio
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest
from fake_kube import FakeKube

from fairlead.pool.kube.auth import Access, FixedSecret, Secret, Where
from fairlead.pool.kube.client import KubeClient, KubeError, Unreachable
from fairlead.pool.kube.elector import ElectionSettings, Elector, LeaderWatch

LEASES = ("coordination.k8s.io/v1", "leases")


class Replica:
    def __init__(self, kube: FakeKube, name: str, duration: float, address: str, page: str) -> None:
        self.client = KubeClient(Access(Where(kube.url), FixedSecret(Secret())), Random(1))
        self.history: list[bool] = []
        self.troubles: list[str] = []
        settings = ElectionSettings(
            namespace="default",
            name="epp",
            identity=name,
            duration_s=duration,
            renew_s=duration * 0.6,
            retry_s=duration * 0.2,
            address=address,
            page=page,
        )
        self.elector = Elector(self.client, settings, self.changed, on_trouble=self.troubles.append)
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
async def replica(kube: FakeKube, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    monkeypatch.setattr(LeaderWatch, "ACCEPT_S", 10.0)  # a busy machine accepts late
    made: list[Replica] = []

    def make(name: str, duration: float = 30.0, address: str = "", page: str = "") -> Replica:
        made.append(Replica(kube, name, duration, address, page))
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


async def test_who_leads_next_knows_the_page_of_the_last_one(replica: Any, until: Any) -> None:
    a = replica("a", page="http://10.0.0.1:9090/learned/x")
    await until(lambda: a.leads)
    b = replica("b", page="http://10.0.0.2:9090/learned/y")
    await until(lambda: b.elector.holder == "a")
    await a.elector.release()
    await until(lambda: b.leads)
    assert b.elector.former.page == "http://10.0.0.1:9090/learned/x"
    await until(lambda: a.elector.former.page == "http://10.0.0.2:9090/learned/y")


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


class Answering:
    """The port at which a replica answers."""

    def __init__(self) -> None:
        self.peers: list[asyncio.StreamWriter] = []
        self.accepted = 0

    async def start(self) -> "Answering":
        self.server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    @property
    def address(self) -> str:
        host, port = self.server.sockets[0].getsockname()[:2]
        return f"{host}:{port}"

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(1):  # else it gave up connecting, as on a busy machine
            self.accepted += 1
            self.peers.append(writer)

    def hang_up(self) -> None:
        while self.peers:
            self.peers.pop().transport.abort()

    def end(self) -> None:
        self.server.close()
        self.hang_up()


async def test_who_is_seen_to_end_is_replaced_long_before(kube: FakeKube, replica: Any, until: Any) -> None:
    port = await Answering().start()
    a = replica("a", 300.0, port.address)
    await until(lambda: a.leads)
    b = replica("b", 300.0, "127.0.0.1:1")
    await until(lambda: port.accepted)
    await a.kill()
    port.end()
    await until(lambda: b.leads)
    assert lease(kube)["leaseTransitions"] == 1
    annotations = kube.objects[LEASES]["default/epp"]["metadata"]["annotations"]
    assert annotations == {"fairlead.dev/answers-at": "127.0.0.1:1"}


async def test_who_closes_a_connection_and_takes_another_lives(kube: FakeKube, replica: Any, until: Any) -> None:
    port = await Answering().start()
    a = replica("a", 300.0, port.address)
    await until(lambda: a.leads)
    b = replica("b", 300.0)
    for times in range(1, 4):
        await until(lambda: port.peers)
        assert port.accepted == times
        port.hang_up()
    await until(lambda: port.accepted == 4)
    assert (a.leads, b.leads, lease(kube)["leaseTransitions"]) == (True, False, 0)
    port.end()


async def test_who_was_never_reached_is_given_its_time(kube: FakeKube, replica: Any, until: Any) -> None:
    a = replica("a", 1.0, "127.0.0.1:1")
    await until(lambda: a.leads)
    b = replica("b", 1.0)
    renewed = lease(kube)["renewTime"]
    await until(lambda: b.elector.holder == "a" and lease(kube)["renewTime"] > renewed)
    assert (a.leads, b.leads) == (True, False)
    await a.kill()
    await until(lambda: b.leads)


async def test_who_led_on_unseen_stands_by(kube: FakeKube, replica: Any, until: Any) -> None:
    """Its port is gone, it is not: for a moment two lead, and then one."""
    port = await Answering().start()
    a = replica("a", 2.0, port.address)
    await until(lambda: a.leads)
    b = replica("b", 2.0)
    await until(lambda: port.accepted)
    port.end()
    await until(lambda: b.leads)
    await until(lambda: not a.leads)
    assert lease(kube)["holderIdentity"] == "b"


@pytest.mark.parametrize("address", ["", "nowhere", "10.0.0.1:port", "10.0.0.1:99999", ":", "[::1", f"{'x' * 70}.y:80"])
async def test_an_address_that_is_none_is_left_alone(kube: FakeKube, replica: Any, until: Any, address: str) -> None:
    a = replica("a", 1.0, address)
    await until(lambda: a.leads)
    b = replica("b", 1.0)
    await until(lambda: b.elector.holder == "a")
    await a.kill()
    await until(lambda: b.leads)


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


async def test_a_conflict_that_cannot_be_looked_into_is_no_reason_to_hurry(
    kube: FakeKube, replica: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of the API server answers, from an old state. It was asked without a pause."""
    pauses: list[float] = []

    async def note(woken: asyncio.Event, seconds: float) -> None:
        pauses.append(seconds)
        await asyncio.sleep(0)

    async def conflict(*arguments: Any) -> bytes:
        raise KubeError(409, "Conflict", "the object has been modified")

    async def silent(*arguments: Any) -> bytes:
        raise Unreachable("HTTP 503")

    monkeypatch.setattr("fairlead.pool.kube.elector.set_within", note)
    a = replica("a")
    await until(lambda: a.leads)
    monkeypatch.setattr(a.client, "put", conflict)
    monkeypatch.setattr(a.client, "read", silent)
    pauses.clear()
    await until(lambda: len(pauses) >= 3)
    assert min(pauses[1:]) > 1.0 and a.leads


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
