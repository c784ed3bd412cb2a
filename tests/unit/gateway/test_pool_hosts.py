"""Which pool a stream is for, by what gateways send."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from fairlead.gateway.pools import PickerService, PoolHosts


class Stream:
    def __init__(self) -> None:
        self.ends: list[tuple[int, str]] = []

    def finish(self, code: int = 0, message: str = "") -> None:
        self.ends.append((code, message))


class Opened:
    """In place of a session."""

    def __init__(self, host: Any, stream: Any, metadata: Mapping[str, str]) -> None:
        self.host = host


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> PoolHosts:
    """Two pools of one name in two namespaces, and two that share a Service but not its port."""
    monkeypatch.setattr("fairlead.gateway.pools.Session", Opened)
    made = PoolHosts()
    for pool, service in {
        "a/llama": PickerService("a", "epp", 9002),
        "b/llama": PickerService("b", "epp", 9002),
        "c/one": PickerService("c", "shared", 9002),
        "c/two": PickerService("c", "shared", 9012),
        "c/hidden": None,
    }.items():
        host: Any = SimpleNamespace(pool=pool)
        made.put(pool, host, service)
    return made


def asked(hosts: PoolHosts, metadata: Mapping[str, str]) -> str:
    """The pool whose session was opened; empty = the stream was refused."""
    stream: Any = Stream()
    session = hosts.begin(stream, metadata)
    if not isinstance(session, Opened):
        (end,) = stream.ends
        assert end[0] == 14
        return ""
    assert not stream.ends
    return str(session.host.pool)


@pytest.mark.parametrize(
    ("authority", "pool"),
    [
        ("epp.a.svc:9002", "a/llama"),  # kgateway, Envoy AI Gateway
        ("epp.b:9002", "b/llama"),
        ("epp.b.svc.cluster.local", "b/llama"),
        ("EPP.A.svc.cluster.local:9002", "a/llama"),
        ("outbound|9002||epp.b.svc.cluster.local", "b/llama"),  # Istio's cluster
        ("outbound_.9002_._.epp.b.svc.cluster.local", "b/llama"),
        ("shared.c.svc:9012", "c/two"),
        ("outbound|9002||shared.c.svc.cluster.local", "c/one"),
        ("epp.a.svc:9003", ""),
        ("shared.c.svc", ""),  # either of two
        ("epp", ""),
        ("epp.d.svc:9002", ""),
        ("fairlead", ""),
        ("", ""),
        ("epp.a.svc:9002\n", ""),
        ("." * 10_000, ""),
    ],
)
async def test_the_authority_names_the_pickers_service(hosts: PoolHosts, authority: str, pool: str) -> None:
    assert [asked(hosts, {":authority": authority}) for _ in range(2)] == [pool, pool]
    assert hosts.refused == (0 if pool else 2)


async def test_a_gateway_may_name_the_pool_itself(hosts: PoolHosts) -> None:
    assert asked(hosts, {":authority": "epp.a.svc:9002", "fairlead-pool": "c/hidden"}) == "c/hidden"
    assert asked(hosts, {":authority": "epp.a.svc:9002", "fairlead-pool": "c/nobody"}) == ""


async def test_pools_change_their_service_and_go(hosts: PoolHosts) -> None:
    to_a = {":authority": "epp.a.svc:9002"}
    assert asked(hosts, to_a) == "a/llama"
    other: Any = SimpleNamespace(pool="a/llama")
    hosts.put("a/llama", other, PickerService("a", "other", 9002))
    assert asked(hosts, to_a) == ""
    assert asked(hosts, {":authority": "other.a.svc:9002"}) == "a/llama"
    hosts.drop("a/llama")
    assert asked(hosts, {":authority": "other.a.svc:9002"}) == ""
    assert asked(hosts, {":authority": "epp.b.svc:9002"}) == "b/llama"


async def test_made_up_authorities_take_no_memory(hosts: PoolHosts) -> None:
    for number in range(3000):
        assert not asked(hosts, {":authority": f"epp.made-up-{number}.svc:9002"})
    assert len(hosts.known) <= 1024


async def test_the_oldest_of_several_pools_keeps_their_service(hosts: PoolHosts) -> None:
    """Whatever the order in which they become known."""
    one, to_it = PickerService("d", "epp", 9002), {":authority": "epp.d.svc:9002"}
    for pool, day in {"d/b": "02", "d/c": "01", "d/a": "02"}.items():
        host: Any = SimpleNamespace(pool=pool)
        hosts.put(pool, host, one, f"2026-01-{day}T00:00:00Z")
    assert asked(hosts, to_it) == asked(hosts, {":authority": "epp.d.svc"}) == "d/c"
    assert hosts.shadowed == {"d/a": "d/c", "d/b": "d/c"}
    assert asked(hosts, {**to_it, "fairlead-pool": "d/b"}) == "d/b"
    hosts.drop("d/c")
    assert asked(hosts, to_it) == "d/a"
    assert hosts.shadowed == {"d/b": "d/a"}
    hosts.put("d/b", host, PickerService("d", "own", 9002))
    assert not hosts.shadowed
