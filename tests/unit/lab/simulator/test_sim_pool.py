"""The endpoints of a recorded run, and servers like them."""

from fairlead.core.endpoint import ADAPTERS_LABEL, ROLE_LABEL, Endpoint, Sample
from fairlead.core.events import AdaptersListed, EndpointDown, EndpointUp, MetricsSampled
from fairlead.lab.simulator.capture import Pool, mixed
from fairlead.lab.simulator.world import replicas
from fairlead.server.journal.records import Segment


def endpoint(name: str, role: str = "") -> Endpoint:
    return Endpoint(name, f"{name}:1", {ROLE_LABEL: role} if role else {})


def roles(endpoints: list[Endpoint]) -> str:
    return "".join(each.labels.get(ROLE_LABEL, "-")[0] for each in endpoints)


def test_the_first_of_them_have_the_roles_of_all() -> None:
    prefill, decode = ([endpoint(f"{role}{i}", role) for i in range(6)] for role in ("prefill", "decode"))
    assert roles(mixed(prefill[:2] + decode[:2])) == "dpdp"
    assert roles(mixed(prefill[:2] + decode)) == "ddpdddpd"
    assert roles(mixed(prefill + decode[:2])) == "pdpppdpp"
    assert mixed(plain := [endpoint("b"), endpoint("a")]) == plain
    assert mixed([]) == []


def test_servers_get_the_labels_in_turn() -> None:
    made = Pool().like(replicas(3, block_size=64), [endpoint("d", "decode"), endpoint("p", "prefill")])
    assert [server.labels[ROLE_LABEL] for server in made] == ["decode", "prefill", "decode"]
    assert Pool().like(made, []) == made


def test_a_rollout_does_not_make_the_pool_larger() -> None:
    pool = Pool()
    pool.begin(Segment(run="r", endpoints=(endpoint("a"), endpoint("b"))))
    for name, new in (("a", "c"), ("b", "d")):
        pool.take("EndpointUp", EndpointUp(endpoint(new)))
        pool.take("EndpointDown", EndpointDown(name))
    pool.take("EndpointDown", EndpointDown("c"))
    assert list(pool.last) == ["d"]
    assert list(pool.most) == ["b", "c", "d"]


def test_servers_have_the_adapter_slots_that_were_reported() -> None:
    pool, servers = Pool(), replicas(3, block_size=64)
    listed = (AdaptersListed("a", frozenset({"listed"})), AdaptersListed("b", None))
    promises = Endpoint("a", "a:1", {ADAPTERS_LABEL: "promised"})
    pool.begin(Segment(run="r", endpoints=(promises, endpoint("b"), endpoint("c")), listed=listed))
    assert pool.adapters == {"promised", "listed"}
    present = list(pool.last.values())
    assert [server.engine.max_loras for server in pool.like(servers, present)] == [8, 8, 8], "nothing is reported"
    for name, slots in (("a", 1), ("b", 3)):
        sample = Sample(adapters=frozenset({"used"}), waiting_adapters=frozenset({"waits"}), max_adapters=slots)
        pool.take("MetricsSampled", MetricsSampled(name, 0.0, sample))
    pool.take("MetricsSampled", MetricsSampled("c", 0.0, Sample()))
    pool.take("AdaptersListed", AdaptersListed("c", frozenset({"loaded"})))
    assert pool.adapters == {"promised", "listed", "used", "waits", "loaded"}
    assert [server.engine.max_loras for server in pool.like(servers, present)] == [1, 3, 3]
