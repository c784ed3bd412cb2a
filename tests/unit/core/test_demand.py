"""How many endpoints the load asks for."""

from itertools import pairwise
from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.core.demand import (
    AHEAD,
    APART_S,
    DECODE,
    LATE_SHARE,
    MOST,
    PREFILL,
    Demand,
    Objective,
    Totals,
    in_time,
)
from fairlead.core.endpoint import ROLE_LABEL, Endpoint, Sample
from fairlead.core.fleet import Fleet
from fairlead.core.request import Request


def fleet(count: int = 4) -> Fleet:
    made = Fleet()
    for index in range(count):
        made.up(Endpoint(f"e{index}", f"10.0.0.{index}:8000"))
    return made


def asked(rate: float, prompt: float = 4000.0, cached: float = 0.0, count: int = 4, **objective: float) -> int | None:
    demand = Demand(Objective(**objective))
    for step in range(40):
        at = 5.0 * step
        demand.observe(Totals(at, rate * at, rate * at * prompt, rate * at * cached))
    return demand.endpoints(fleet(count))


@pytest.mark.parametrize(
    ("ports", "endpoints", "pods"), [(1, 0, 0), (1, 7, 7), (4, 0, 0), (4, 1, 1), (4, 8, 2), (4, 9, 3), (3, 9, 3)]
)
def test_an_autoscaler_is_told_pods_of_which_each_port_is_an_endpoint(ports: int, endpoints: int, pods: int) -> None:
    demand, known = Demand(), Fleet()
    served = [Endpoint(f"ns/vllm-{pod}-rank-{i}", f"10.0.0.{pod}:{i}", rank=i) for pod in (0, 1) for i in range(ports)]
    for endpoint in served:
        known.up(endpoint)
    assert demand.present(known) == 2
    assert demand.pods(endpoints, known) == pods
    for endpoint in served:
        known.down(endpoint.id)
    assert demand.present(known) == 0
    assert demand.pods(endpoints, known) == pods, "new pods will be like the last ones"
    assert Demand().pods(endpoints, known) == endpoints, "nothing is known of pods yet"


def test_names_that_only_look_like_those_of_pods_are_endpoints_of_their_own() -> None:
    demand, known = Demand(), Fleet()
    for number, name in enumerate(("gpu-a", "gpu-a-rank-0", "gpu-b-rank-0")):
        known.up(Endpoint(name, f"10.0.0.{number}:8000"))
    assert demand.present(known) == 3
    assert demand.pods(3, known) == 3


def erlang_c(servers: int, load: float) -> float:
    """Exact share of those that wait: the recurrence of Erlang's B."""
    blocked = 1.0
    for n in range(1, servers + 1):
        blocked = load * blocked / (n + load * blocked)
    return blocked / (1.0 - load / servers * (1.0 - blocked))


def test_nothing_is_known_at_first_and_nothing_is_asked_for_where_nothing_comes() -> None:
    demand = Demand()
    assert demand.endpoints(fleet()) is None
    demand.observe(Totals(0.0, 0, 0, 0))
    demand.observe(Totals(10.0, 100, 1000, 0))
    assert demand.endpoints(fleet()) is None, "ten seconds say little"
    quiet = Demand()
    for step in range(20):
        quiet.observe(Totals(5.0 * step, 7, 70, 0))
    assert quiet.endpoints(fleet()) == 0


def test_what_still_runs_keeps_endpoints_although_nothing_new_comes() -> None:
    demand, known = Demand(), fleet(2)
    for step in range(20):
        demand.observe(Totals(5.0 * step, 7, 70, 0))
    leases = [known.charge(Request(id=n, arrived=0.0, prompt_tokens=20_000), 0, 0.0, 0, 9000.0) for n in range(20)]
    assert demand.endpoints(known) == 1
    known.table.kv[:2] = 0.99
    assert demand.endpoints(known) == 3, "the answers' memory grows"
    for lease in leases:
        known.ledger.release(lease)
    assert demand.endpoints(known) == 0, "nobody uses what the engines still report"


def test_answers_that_other_clients_or_an_earlier_process_asked_for_keep_an_endpoint() -> None:
    demand, known = Demand(), fleet(2)
    for step in range(20):
        demand.observe(Totals(5.0 * step, 0, 0, 0))
    known.sampled("e1", 90.0, 90.1, Sample(running=1, kv_usage=0.2))
    assert demand.endpoints(known) == 1
    known.sampled("e1", 95.0, 95.1, Sample(running=0, kv_usage=0.0))
    assert demand.endpoints(known) == 0


@given(st.floats(0.1, 200.0), st.floats(1.0, 4.0), st.floats(100.0, 20_000.0), st.floats(0.0, 0.9))
def test_more_load_never_asks_for_less(rate: float, times: float, prompt: float, cached: float) -> None:
    less, more = asked(rate, prompt, prompt * cached), asked(rate * times, prompt, prompt * cached)
    assert less is not None and more is not None
    assert 1 <= less <= more <= MOST


def test_engines_behind_one_address_count_as_so_many() -> None:
    demand = Demand(Objective())
    for step in range(40):
        at = 5.0 * step
        demand.observe(Totals(at, 80.0 * at, 80.0 * at * 4000.0, 0.0))
    ranked = fleet()
    for slot in range(4):
        ranked.table.set_ranks(slot, 4.0)
    one, four = demand.endpoints(fleet()), demand.endpoints(ranked)
    assert one is not None and four is not None
    assert four == -(-one // 4)


def test_what_is_cached_need_not_be_computed() -> None:
    cold, warm = asked(20.0, 6000.0), asked(20.0, 6000.0, 5500.0)
    assert cold is not None and warm is not None
    assert warm < 0.5 * cold


def test_a_tighter_objective_asks_for_more() -> None:
    ttft = [asked(0.5, 20_000.0, ttft_ms=ms) for ms in (20_000.0, 4_000.0, 1_500.0)]
    tpot = [asked(20.0, 4000.0, tpot_ms=ms) for ms in (100.0, 40.0, 25.0)]
    for answers in ttft, tpot:
        assert all(loose is not None and tight is not None and loose <= tight for loose, tight in pairwise(answers))
        assert answers[0] != answers[-1]


def test_a_time_per_token_that_no_number_of_endpoints_keeps_counts_no_more() -> None:
    """A step takes 13 ms, and the mean may be `tpot` / 1.4. Up to four times the load is asked for, not ten times."""
    needs = {ms: asked(20.0, 4000.0, tpot_ms=ms) for ms in (100.0, 24.0, 18.0, 10.0, 1.0)}
    loose, hardly, none, less, least = needs.values()
    assert loose is not None and hardly is not None and none is not None
    assert loose < none < hardly <= 4 * loose
    assert none == less == least


def test_engines_that_are_slower_are_more() -> None:
    slow = fleet()
    slow.predictor.rates.prefill[:] = 3.0
    demand = Demand()
    for step in range(40):
        demand.observe(Totals(5.0 * step, 100.0 * step, 400_000.0 * step, 0))
    few, many = demand.endpoints(fleet()), demand.endpoints(slow)
    assert few is not None and many is not None
    assert many > 2 * few


def growing(direction: float, startup_s: float) -> int:
    demand, total = Demand(Objective(startup_s=startup_s)), 0.0
    for step in range(60):
        total += APART_S * (20.0 + direction * step / 60.0 * 10.0)
        demand.observe(Totals(APART_S * step, total, 4000.0 * total, 0))
    number = demand.endpoints(fleet())
    assert number is not None
    return number


def test_growth_is_ordered_ahead_and_a_fall_is_not() -> None:
    assert growing(1.0, 300.0) > growing(1.0, 0.0)
    assert growing(-1.0, 300.0) == growing(-1.0, 0.0)
    assert growing(1.0, 1e6) <= AHEAD * growing(1.0, 0.0) + 1


def test_a_restarted_count_begins_anew() -> None:
    demand = Demand()
    for step in range(20):
        demand.observe(Totals(5.0 * step, 100.0 * step, 1e5 * step, 0))
    demand.observe(Totals(101.0, 3, 3000, 0))
    assert demand.endpoints(fleet()) is None


def test_totals_that_come_too_often_are_bounded() -> None:
    demand = Demand()
    for step in range(100_000):
        demand.observe(Totals(0.01 * step, step, step, 0))
    assert len(demand) <= 64


def test_memory_in_use_asks_for_endpoints_that_have_some() -> None:
    full = fleet(4)
    full.table.kv[:] = 0.95
    demand = Demand()
    for step in range(40):
        demand.observe(Totals(5.0 * step, 5.0 * step, 500.0 * step, 0))
    assert demand.endpoints(full) == 5


@pytest.mark.parametrize("load", [0.2, 1.5, 7.0, 60.0])
@pytest.mark.parametrize("patience", [1.0, 3.0, 10.0])
def test_so_many_arein_time_by_erlangs_own_formula(load: float, patience: float) -> None:
    servers = in_time(load, patience)
    exact = next(n for n in range(int(load) + 1, 1000) if erlang_c(n, load) * exp(-(n - load) * patience) <= LATE_SHARE)
    assert abs(servers - exact) <= 1


def parted(*roles: str) -> Fleet:
    made = Fleet()
    for index, role in enumerate(roles):
        made.up(Endpoint(f"e{index}", f"10.0.0.{index}:8000", {ROLE_LABEL: role} if role else {}))
    return made


def by_role(known: Fleet, requests: float, tokens: float, cached: float = 0.0, **objective: float) -> list[int | None]:
    demands = [Demand(Objective(**objective), role) for role in (PREFILL, DECODE)]
    for demand in demands:
        for step in range(40):
            demand.observe(Totals(5.0 * step, requests * step, tokens * step, cached * step))
    return [demand.endpoints(known) for demand in demands]


def test_an_endpoint_that_does_both_counts_as_one_that_decodes() -> None:
    known = parted("prefill", "encode-prefill", "decode", "both", "prefill-decode", "")
    assert [Demand(role=role).present(known) for role in (PREFILL, DECODE, "")] == [2, 4, 6]


def test_pods_with_several_ports_count_once_in_each_role() -> None:
    known = Fleet()
    for pod, (role, ports) in enumerate((("prefill", 1), ("decode", 4), ("decode", 4))):
        for rank in range(ports):
            labels = {ROLE_LABEL: role}
            known.up(Endpoint(f"ns/vllm-{pod}-rank-{rank}", f"10.0.0.{pod}:{8000 + rank}", labels, rank=rank))
    demands = [Demand(role=role) for role in (PREFILL, DECODE)]
    assert [demand.present(known) for demand in demands] == [1, 2]
    assert [demand.pods(8, known) for demand in demands] == [8, 2]


@pytest.mark.parametrize("busy", [0, 1])
def test_what_runs_keeps_an_endpoint_of_its_role_only(busy: int) -> None:
    known = parted("prefill", "decode")
    known.sampled(f"e{busy}", 0.0, 0.1, Sample(running=1, kv_usage=0.99))
    expected: list[int | None] = [0, 0]
    expected[busy] = 2  # by memory
    assert by_role(known, 0, 0) == expected
    known.sampled(f"e{busy}", 1.0, 1.1, Sample(running=1, kv_usage=0.0))
    expected[busy] = 1
    assert by_role(known, 0, 0) == expected


def test_the_time_per_token_says_nothing_of_servers_that_write_none() -> None:
    known = parted("prefill", "decode")
    loose, tight = (by_role(known, 100.0, 400_000.0, tpot_ms=ms) for ms in (200.0, 20.0))
    assert loose[0] == tight[0]
    assert (loose[1] or 0) < (tight[1] or 0)


def test_a_slow_kind_of_server_needs_more_of_its_kind() -> None:
    known = parted("prefill", "decode")
    before = by_role(known, 100.0, 800_000.0)
    known.predictor.rates.prefill[0] = 3.0
    after = by_role(known, 100.0, 800_000.0)
    assert (after[0] or 0) > 2 * (before[0] or 0)
    assert after[1] == before[1]
