import numpy as np
import pytest

from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.fleet import Fleet
from fairlead.core.gates import LedgerGate, PoolGate
from fairlead.core.request import Request
from fairlead.plugins.flow_control import ConcurrencyDetector, ConcurrencyDetectorParams, UtilizationDetector

NOW = 100.0


def pool(count: int = 3, capacity_blocks: int = 10_000) -> Fleet:
    fleet = Fleet()
    for i in range(count):
        fleet.up(Endpoint(f"e{i}", f"10.0.0.{i}:80"))
        sample(fleet, i, capacity_blocks=capacity_blocks)
    return fleet


def sample(fleet, i, waiting=0.0, running=0.0, kv=0.0, capacity_blocks=10_000, at=NOW):
    reading = Sample(waiting=waiting, running=running, kv_usage=kv, block_size=16, num_blocks=capacity_blocks)
    fleet.sampled(f"e{i}", at, at, reading)


def charge(fleet, slot, tokens=100, output=0.0, count=1):
    for _ in range(count):
        charge.last += 1
        request = Request(id=charge.last, arrived=NOW, prompt_tokens=tokens, stream=True)
        fleet.charge(request, slot, NOW, 0, output)


charge.last = 0


def test_an_idle_pool_is_open_everywhere():
    assert LedgerGate().open(pool(), NOW) is None


def test_more_than_the_running_step_takes_with_it_closes_an_endpoint():
    fleet = pool()
    charge(fleet, 1, tokens=3500)
    assert LedgerGate().open(fleet, NOW) is None
    charge(fleet, 1, tokens=1500)
    assert LedgerGate().open(fleet, NOW).tolist() == [True, False, True]
    assert LedgerGate().level(fleet, NOW) == pytest.approx(5000 / 4096 / 3, rel=0.1)


def test_four_engines_behind_an_address_compute_four_times_as_much_at_once():
    fleet = pool()
    fleet.sampled("e1", NOW, NOW, Sample(waiting=0.0, running=0.0, kv_usage=0.0, ranks=4))
    charge(fleet, 1, tokens=3500, count=4)
    assert LedgerGate().open(fleet, NOW) is None and LedgerGate().admits(1, fleet, NOW)
    charge(fleet, 1, tokens=3500)
    assert LedgerGate().open(fleet, NOW).tolist() == [True, False, True]
    assert not LedgerGate().admits(1, fleet, NOW)


def test_it_opens_again_as_the_prompts_are_computed():
    fleet = pool()
    charge(fleet, 1, tokens=6000)
    assert LedgerGate().open(fleet, NOW).tolist() == [True, False, True]
    assert LedgerGate().open(fleet, NOW + 0.2) is None


def test_a_step_takes_as_many_tokens_at_a_slow_endpoint():
    fleet = pool()
    fleet.predictor.rates.prefill[2] = 2.5
    charge(fleet, 2, tokens=3500)
    assert LedgerGate().open(fleet, NOW) is None
    assert LedgerGate().open(fleet, NOW + 2.5).tolist() == [True, True, False], "its first token is late"


def test_many_short_prompts_are_one_step():
    fleet = pool()
    charge(fleet, 0, tokens=10, count=30)
    assert LedgerGate().open(fleet, NOW) is None
    assert LedgerGate(requests=8).open(fleet, NOW).tolist() == [False, True, True]


def test_who_waits_for_memory_or_a_slot_closes_an_endpoint():
    fleet = pool()
    fleet.table.kv[0] = 0.99
    assert LedgerGate().open(fleet, NOW) is None
    charge(fleet, 0, tokens=10)
    fleet.table.kv[0] = 0.99
    fleet.table.max_seqs[1], fleet.table.active[1], fleet.table.inflight[1] = 4.0, 4.0, 4.0
    fleet.table.growth_tokens[1] = 400.0
    assert LedgerGate().open(fleet, NOW).tolist() == [False, False, True]


def test_where_first_tokens_are_not_seen_the_forecast_and_the_engines_own_count_stand_for_them():
    fleet = pool()
    for slot in (0, 1):
        request = Request(id=1000 + slot, arrived=NOW, prompt_tokens=9000, stream=False)
        lease = fleet.charge(request, slot, NOW, 0, 10)
    assert LedgerGate().open(fleet, NOW + 0.1).tolist() == [False, False, True], "no forecast is that short"
    soon = NOW + 1e-3 * lease.forecast.ttft_ms + 0.01
    sample(fleet, 0, waiting=0.0, running=1.0, at=soon)
    sample(fleet, 1, waiting=1.0, running=0.0, at=soon)
    assert LedgerGate().open(fleet, soon).tolist() == [True, False, True]
    assert LedgerGate().open(fleet, NOW + 100.0) is None, "and if it says nothing, it is open"


def test_stale_metrics_do_not_close_the_gate():
    fleet = pool()
    for gate in (LedgerGate(), PoolGate("utilization-detector", UtilizationDetector().level)):
        assert gate.open(fleet, NOW + 1e6) is None


def test_departed_endpoints_are_not_open():
    fleet = pool()
    fleet.down("e1")
    assert LedgerGate().open(fleet, NOW).tolist() == [True, False, True]


def test_utilization_is_the_mean_of_the_worse_share():
    fleet = pool(2)
    sample(fleet, 0, waiting=5.0, kv=0.1)
    sample(fleet, 1, waiting=0.0, kv=0.8)
    assert UtilizationDetector().level(fleet, NOW) == pytest.approx(1.0)
    gate = PoolGate("utilization-detector", UtilizationDetector().level)
    assert not np.count_nonzero(gate.open(fleet, NOW))


def test_concurrency_counts_our_own():
    fleet = pool(2)
    charge(fleet, 0, count=100, tokens=1)
    hybrid = ConcurrencyDetector(ConcurrencyDetectorParams(concurrency_mode="hybrid"))
    assert hybrid.level(fleet, NOW) == pytest.approx(0.5)
    busy = ConcurrencyDetector(ConcurrencyDetectorParams(max_concurrency=50))
    assert PoolGate("concurrency-detector", busy.level).open(fleet, NOW) is not None


@pytest.mark.parametrize("arguments", [(0.0,), (1.0, 0.0), (float("nan"), 8.0)])
def test_a_gate_that_never_opens_is_refused(arguments):
    with pytest.raises(ValueError, match="never open"):
        LedgerGate(*arguments)


def test_concurrency_by_tokens_counts_uncached_ones_until_the_first_token():
    fleet = pool(2)
    detector = ConcurrencyDetector(ConcurrencyDetectorParams(concurrency_mode="tokens", max_token_concurrency=10_000))
    lease = fleet.charge(Request(id=1, arrived=NOW, prompt_tokens=10_000), 0, NOW, 8000, 500.0)
    assert detector.level(fleet, NOW) == pytest.approx(0.1)
    fleet.first_token(lease, NOW + 1)
    assert detector.level(fleet, NOW + 1) == 0.0
