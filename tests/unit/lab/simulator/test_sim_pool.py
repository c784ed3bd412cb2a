"""The endpoints of a recorded run, and servers like them."""

from fairlead.core.endpoint import ROLE_LABEL, Endpoint
from fairlead.core.events import EndpointDown, EndpointUp
from fairlead.lab.simulator.pool import Pool, like, mixed
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
    made = like(replicas(3, block_size=64), [endpoint("d", "decode"), endpoint("p", "prefill")])
    assert [server.labels[ROLE_LABEL] for server in made] == ["decode", "prefill", "decode"]
    assert like(made, []) == made


def test_a_rollout_does_not_make_the_pool_larger() -> None:
    pool = Pool()
    pool.begin(Segment(run="r", endpoints=(endpoint("a"), endpoint("b"))))
    for name, new in (("a", "c"), ("b", "d")):
        pool.take("EndpointUp", EndpointUp(endpoint(new)))
        pool.take("EndpointDown", EndpointDown(name))
    pool.take("EndpointDown", EndpointDown("c"))
    assert list(pool.last) == ["d"]
    assert list(pool.most) == ["b", "c", "d"]
