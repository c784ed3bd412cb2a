"""The predictor: the column form and the form for one slot agree, bands hold what they say, nothing drifts."""

from math import log
from random import Random

import numpy as np
import pytest
from leases import lease_of

from fairlead.core import cost as kernel
from fairlead.core.cost import LEAST_USAGE, PRIOR, cost
from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.fleet import Fleet
from fairlead.core.rates import FIRST, Band
from fairlead.core.records import Forecast
from fairlead.core.request import PrefixChain, Request


def pool(count: int, seed: int = 0) -> Fleet:
    rng = Random(seed)
    fleet = Fleet()
    for i in range(count):
        fleet.up(Endpoint(id=f"e{i}", address=f"10.0.0.{i}:80"))
        sample = Sample(waiting=0, running=rng.randrange(50), kv_usage=rng.random(), block_size=16, num_blocks=9000)
        if i % 5:
            fleet.sampled(f"e{i}", 0.0, 0.0, sample)
    return fleet


def sent(number: int, tokens: int, stream: bool = True) -> Request:
    return Request(id=number, arrived=0.0, prompt_tokens=tokens, stream=stream)


def forecast(fleet: Fleet, slot: int, prompt: float, uncached: float, now: float) -> Forecast:
    return kernel.forecast(slot, prompt, uncached, PRIOR.prefill_ms(prompt, uncached), fleet, now)


def test_columns_and_single_forecasts_agree() -> None:
    rng = Random(5)
    fleet = pool(12)
    for number in range(60):
        fleet.charge(sent(number, rng.randrange(1, 30_000)), rng.randrange(12), rng.random(), 0, 100.0)
    predictor = fleet.predictor
    for slot in range(12):
        predictor.rates.prefill[slot] = rng.uniform(0.5, 3.0)
        predictor.rates.step[slot] = rng.uniform(0.5, 3.0)
        predictor.kappa[slot] = rng.uniform(0.6, 2.0)
    for prompt in (1, 700, 20_000):
        hit = np.array([rng.choice([0.0, rng.random() * prompt]) for _ in range(12)])
        for column in (hit, None):
            terms = cost(float(prompt), column, fleet, 1.5)
            expected = terms.ttft + predictor.memory_wait(terms)
            for slot in range(12):
                uncached = max(prompt - hit[slot], 1.0) if column is not None else max(prompt, 1.0)
                found = forecast(fleet, slot, float(prompt), uncached, 1.5)
                assert found.ttft_ms == pytest.approx(expected[slot], rel=1e-9)
                assert predictor.ttft_quantile(terms, prompt, 0.95)[slot] == pytest.approx(
                    found.known_high_ms, rel=1e-9
                )
                assert found.low_ms < found.ttft_ms < found.high_ms


def test_progress_shortens_a_queue_by_one_step_at_most_and_being_late_lengthens_it() -> None:
    fleet = pool(1)
    fleet.charge(sent(1, 20_000), 0, 10.0, 0, 1.0)
    times = (10.0, 10.1, 10.3, 10.9, 11.5, 20.0, 30.0)
    waits = [forecast(fleet, 0, 100.0, 100.0, now).ttft_ms for now in times]
    assert waits[0] - waits[1] == pytest.approx(100.0)
    assert waits[1] > waits[2] > waits[3] == waits[4]
    assert waits[3] > 500.0
    assert waits[6] - waits[5] == pytest.approx(10_000.0), "the only one that waits is ten seconds later"
    fleet.charge(sent(2, 20_000), 0, 30.0, 0, 1.0)
    later = forecast(fleet, 0, 100.0, 100.0, 30.0).ttft_ms
    assert later == pytest.approx(2.0 * waits[6], rel=0.1), "the next one will be as late"
    terms = cost(100.0, None, fleet, 30.0)
    assert terms.ttft[0] == pytest.approx(later)


def test_a_first_token_that_nobody_sees_is_not_late() -> None:
    fleet = pool(1)
    fleet.charge(sent(1, 20_000, stream=False), 0, 10.0, 0, 1.0)
    assert forecast(fleet, 0, 100.0, 100.0, 12.0).ttft_ms == forecast(fleet, 0, 100.0, 100.0, 90.0).ttft_ms
    terms = cost(100.0, None, fleet, 90.0)
    assert terms.ttft[0] == pytest.approx(forecast(fleet, 0, 100.0, 100.0, 90.0).ttft_ms)


def test_an_engine_with_four_sequences_has_a_fifth_wait() -> None:
    fleet = pool(2)
    for number in range(1, 6):
        lease = fleet.charge(sent(number, 500), 0, 1.0, 0, 100.0)
        if number < 5:
            fleet.first_token(lease, 1.0)
    free = forecast(fleet, 0, 100.0, 100.0, 1.0)
    fleet.table.max_seqs[0] = 4.0
    fleet.table.rewritten()
    terms = cost(100.0, None, fleet, 1.0)
    assert terms.slots[1] == 0.0
    # Two are before it in the queue or end first: an answer of a hundred steps leaves every 25 of them.
    assert terms.slots[0] == pytest.approx(1.5 * 25.0 * float(terms.step[0]), rel=1e-6)
    held_up = forecast(fleet, 0, 100.0, 100.0, 1.0)
    assert held_up.ttft_ms == pytest.approx(free.ttft_ms + float(terms.slots[0]), rel=1e-6)
    assert held_up.kind != free.kind
    # What waits for a slot makes no progress.
    assert forecast(fleet, 0, 100.0, 100.0, 1.01).ttft_ms == held_up.ttft_ms
    assert cost(100.0, None, fleet, 1.01).queue[0] == terms.queue[0]


def test_waiting_for_memory_takes_its_share_of_the_hold_time() -> None:
    fleet = pool(2)
    fleet.sampled("e1", 0.0, 0.0, Sample(waiting=0, running=5, kv_usage=1.0, block_size=16, num_blocks=1000))
    fleet.predictor.hold_ms = 8000.0
    free = forecast(fleet, 0, 4000.0, 4000.0, 0.0).ttft_ms
    assert forecast(fleet, 1, 4000.0, 4000.0, 0.0).ttft_ms == pytest.approx(free + 2000.0, rel=0.1)
    assert 0.0 < LEAST_USAGE < 1.0


def test_the_band_holds_what_it_says_and_the_middle_is_the_median() -> None:
    rng = Random(8)
    fleet = pool(3)
    inside = below = judged = 0
    for number in range(6000):
        slot = number % 3
        lease = fleet.charge(sent(number, 2000), slot, float(number), 0, 10.0)
        truth = 0.25 * rng.lognormvariate(0.0, 0.4)
        fleet.first_token(lease_of(fleet, number), number + truth)
        fleet.ledger.release(lease_of(fleet, number))
        if number > 1000:
            forecast = lease.forecast
            judged += 1
            inside += forecast.low_ms <= truth * 1e3 <= forecast.high_ms
            below += truth * 1e3 < forecast.ttft_ms
    fleet.validate()
    assert 0.86 < inside / judged < 0.94
    assert 0.44 < below / judged < 0.56


def test_those_that_waited_have_bands_of_their_own() -> None:
    """One request in ten waits, and takes thrice as long or a third as often as not: no reason to doubt the others."""
    rng = Random(9)
    fleet = pool(3)
    inside, judged, widths = [0, 0], [0, 0], [0.0, 0.0]
    for number in range(6000):
        slot, waits = number % 3, number % 10 == 0
        lease = fleet.charge(sent(number, 2000), slot, float(number), 0, 10.0)
        if waits:
            lease.forecast = fleet.predictor.late(slot, lease.forecast)
        truth = 0.25 * rng.lognormvariate(0.0, 0.1) * (rng.choice((1 / 3, 1.0, 3.0)) if waits else 1.0)
        fleet.first_token(lease, number + truth)
        fleet.ledger.release(lease)
        if number > 1000:
            forecast = lease.forecast
            judged[waits] += 1
            inside[waits] += forecast.low_ms <= truth * 1e3 <= forecast.high_ms
            widths[waits] = forecast.high_ms / forecast.low_ms
    fleet.validate()
    for waits in (False, True):
        assert 0.85 < inside[waits] / judged[waits] < 0.95
    assert widths[True] > 3.0 * widths[False]


def test_only_streamed_answers_teach() -> None:
    fleet = pool(1)
    for number in range(50):
        fleet.charge(sent(number, 2000, stream=False), 0, float(number), 0, 10.0)
        fleet.first_token(lease_of(fleet, number), number + 30.0)
        fleet.ledger.release(lease_of(fleet, number))
    assert fleet.predictor.kappa[0] == 1.0
    assert fleet.predictor.rates.prefill[0] == 1.0


def test_work_of_answers_that_do_not_stream_ends_when_the_engine_runs_them() -> None:
    fleet = pool(2)
    for number in range(4):
        fleet.charge(sent(number, 5000, stream=False), 1, 0.0, 0, 10.0)
    assert fleet.table.queued_tokens[1] == 20_000
    fleet.sampled("e1", 1.0, 1.0, Sample(waiting=1, running=3))
    assert fleet.table.queued_tokens[1] == 5000
    fleet.sampled("e1", 2.0, 2.0, Sample(waiting=0, running=4))
    assert fleet.table.queued_tokens[1] == fleet.table.queued_ms[1] == 0.0
    fleet.validate()


def test_a_reused_slot_starts_over() -> None:
    fleet = pool(2)
    for number in range(40):
        fleet.charge(sent(number, 8000), 1, float(number), 0, 1.0)
        fleet.first_token(lease_of(fleet, number), number + 0.9)
        fleet.ledger.release(lease_of(fleet, number))
    assert float(fleet.predictor.rates.prefill[1]) > 1.8
    assert fleet.predictor.rates.own(1, 40.0)[1] > 1.0
    fleet.down("e1")
    fleet.up(Endpoint(id="e9", address="10.0.0.9:80"))
    assert fleet.table.slot("e9") == 1
    assert fleet.predictor.rates.own(1, 40.0)[1] == 0.0
    assert fleet.predictor.rates.prefill[1] == fleet.predictor.rates.prefill[0], "both look like nobody who was asked"
    assert fleet.predictor.kappa[1] == 1.0


@pytest.mark.parametrize("held_ms", [0.0, -1.0, float("nan"), float("inf"), 1e300])
def test_impossible_ends_are_ignored(held_ms: float) -> None:
    fleet = pool(1)
    before = fleet.predictor.hold_ms
    lease = fleet.charge(sent(1, 10), 0, 0.0, 0, 1.0)
    fleet.predictor.ended(lease, held_ms, 5, 1.0)
    assert fleet.predictor.hold_ms == before


def test_answers_push_prompts_out_of_the_believed_cache() -> None:
    fleet = Fleet()
    fleet.up(Endpoint(id="e0", address="10.0.0.1:80"))
    fleet.sampled("e0", 0.0, 0.0, Sample(waiting=0, running=0, block_size=16, num_blocks=100))
    prompt = Request(id=1, arrived=0.0, prompt_tokens=900, prompt_bytes=3600, prefix=PrefixChain((7,), (3600,)))
    lease = fleet.charge(prompt, 0, 0.0, 0, 100.0)
    fleet.ledger.release(lease_of(fleet, 1))
    fleet.completed(lease, 1.0, 100)
    assert fleet.match(prompt) is not None
    for number in range(2, 20):
        fleet.completed(fleet.charge(sent(number, 10), 0, 1.0, 0, 100.0), 2.0, 100)
    assert fleet.match(prompt) is None
    fleet.prefix.validate()


def add(band: Band, off: float) -> bool:
    """Whether it was within the band."""
    below, above = off < band.low, off > band.high
    band.add(off, below, above)
    return not (below or above)


def test_a_band_follows_a_stream_that_drifts() -> None:
    rng = Random(2)
    band = Band()
    for shift in (0.0, 1.0):
        for _ in range(2000):
            add(band, shift + rng.gauss(0.0, 0.3))
        inside = sum(band.low <= shift + rng.gauss(0.0, 0.3) <= band.high for _ in range(2000)) / 2000
        assert 0.84 < inside < 0.96


def test_what_was_not_yet_learned_in_the_beginning_leaves_a_band() -> None:
    band = Band()
    for _ in range(3):
        band.add(log(8.0))
    assert band.high > log(4.0)
    for _ in range(64):
        band.add(0.0)
    assert band.low == pytest.approx(band.high, abs=0.05) and band.middle == 0.0


def test_a_new_kind_borrows_a_band_only_until_it_has_its_own() -> None:
    """The first requests to an unknown engine are off by ten times; those of a later kind are not."""
    everything = Band()
    for _ in range(8):
        everything.add(log(10.0))
    kind = Band(everything)
    assert kind.high > log(8.0)
    for number in range(FIRST):
        kind.add(0.01 * number)
    assert log(0.8) < kind.low < kind.high < log(1.5)


@pytest.mark.parametrize("drift", [0.003, 0.01, 0.02])
def test_a_band_holds_what_it_says_while_all_gets_worse(drift: float) -> None:
    """Without noise each first token comes later than all before it, so later than any quantile of those."""
    band = Band()
    inside = [add(band, drift * (number % 200)) for number in range(600)]
    assert 0.85 < sum(inside[200:]) / 400 < 0.95


def test_quantiles_lie_between_observations() -> None:
    band = Band()
    assert [band.quantile(p) for p in (0.05, 0.5, 0.95)] == pytest.approx([log(0.5), 0.0, log(2.0)], rel=0.1)
    assert [band.low, band.high] == pytest.approx([log(1 / 16), log(16)], rel=0.1)
    for i in range(64):
        add(band, 37 * i % 65 / 65.0)
    assert [band.quantile(p) for p in (0.1, 0.3, 0.7)] == pytest.approx([0.1, 0.3, 0.7], abs=0.1)


def test_the_ends_of_a_band_come_closer_with_each_value_and_its_middle_stays() -> None:
    """An engine that nobody knows is off by any factor; so are kinds of forecasts while the engine is not known."""
    everything = Band()
    kind = Band(everything)
    assert kind.factors == pytest.approx(everything.factors, rel=0.05)
    spans = []
    for _ in range(FIRST):
        for band in (everything, kind):
            add(band, 0.0)
        assert everything.middle == kind.middle == 0.0
        spans.append((everything.high - everything.low, kind.high - kind.low))
    assert spans == sorted(spans, reverse=True) and spans[-1][0] < 0.5
    assert spans[3][1] < spans[3][0], "what all forecasts tell counts for the kind too"
    low, high, known_high = kind.factors[1:]
    assert high == pytest.approx(known_high) and low < 1.0
    late = Band(everything)
    assert late.high == pytest.approx(late.quantile(0.95)), "a kind that comes when the engine is known"


def test_a_kind_of_forecast_that_was_never_judged_has_the_band_of_all() -> None:
    fleet = pool(1)
    cold, new = forecast(fleet, 0, 900.0, 900.0, 0.0), forecast(fleet, 0, 900.0, 300.0, 0.0)
    for _ in range(20):
        fleet.predictor.judge(0, cold, 6.0 * cold.model_ttft_ms)
    first = forecast(fleet, 0, 900.0, 300.0, 0.0)
    assert first.kind == new.kind != cold.kind
    assert first.known_high_ms > 5.0 * first.model_ttft_ms > new.known_high_ms
    for _ in range(60):
        fleet.predictor.judge(0, first, first.model_ttft_ms)
    assert forecast(fleet, 0, 900.0, 300.0, 0.0).ttft_ms < 0.7 * forecast(fleet, 0, 900.0, 900.0, 0.0).ttft_ms * (
        first.model_ttft_ms / cold.model_ttft_ms
    )


@pytest.mark.parametrize("queued_ms", [0.0, 5000.0])
def test_a_first_token_that_only_the_log_tells_of_is_judged(queued_ms: float) -> None:
    """The log counts from the request's arrival, a forecast from when it was sent."""
    fleet = pool(1)
    for number in range(200):
        lease = fleet.charge(sent(number, 2000), 0, float(number), 0, 10.0)
        lease.queued_ms = queued_ms
        fleet.ledger.release(lease_of(fleet, number))
        fleet.completed(lease, number + 3.0, 50, ttft_ms=queued_ms + 400.0)
    assert forecast(fleet, 0, 2000.0, 2000.0, 999.0).ttft_ms == pytest.approx(400.0, rel=0.1)
    assert fleet.predictor.hold_ms < 4000.0


def test_corrections_do_not_chase_each_other_while_many_are_in_flight() -> None:
    fleet = pool(1)
    flying: list[tuple[float, int]] = []
    worst = 1.0
    for number in range(4000):
        now = 0.05 * number
        for due, other in flying[:-150]:
            fleet.first_token(lease_of(fleet, other), due)
            fleet.ledger.release(lease_of(fleet, other))
        flying = flying[-150:]
        forecast = fleet.charge(sent(number, 400), 0, now, 0, 10.0).forecast
        flying.append((now + 7.5, number))
        if number > 1500:
            worst = max(worst, forecast.ttft_ms / 7500.0, 7500.0 / forecast.ttft_ms)
    fleet.validate()
    assert worst < 2.0


def test_engines_that_compute_at_once_are_not_taken_for_a_faster_one() -> None:
    """Four engines compute a prompt each at the same time, again and again, exactly as fast as believed."""
    fleet = Fleet()
    fleet.up(Endpoint("e", "10.0.0.1:80"))
    fleet.sampled("e", 0.0, 0.0, Sample(waiting=0.0, running=0.0, kv_usage=0.0, ranks=4))
    now = 0.0
    for turn in range(60):
        leases = [fleet.charge(sent(4 * turn + each, 4000), 0, now, 0, 10.0) for each in range(4)]
        now += (PRIOR.prefill_ms(4000.0, 4000.0) + PRIOR.c0) * 1e-3
        for lease in leases:
            fleet.first_token(lease, now)
            fleet.ledger.release(lease)
        now += 0.1
    assert fleet.predictor.rates.prefill[0] == pytest.approx(1.0, rel=0.1)
    fleet.validate()


@pytest.mark.parametrize("told", [True, False], ids=["first token seen", "told by the log"])
def test_an_end_that_is_reported_late_makes_no_answer_longer(told: bool) -> None:
    """Two tokens, 20 ms apart; the gateway's log comes up to a second later, in whole milliseconds."""
    fleet, late = pool(1), pool(1)
    for number in range(200):
        for each, lateness in ((fleet, 0.0), (late, 0.1 * (number % 10))):
            now = 5.0 * number
            lease = each.charge(sent(number, 100), 0, now, 0, 2.0)
            if told:
                each.first_token(lease, now + 0.0504)
            each.ledger.release(lease)
            each.completed(lease, now + 0.0704 + lateness, 2, ttft_ms=50.4, duration_ms=70.0)
    assert late.predictor.hold_ms == pytest.approx(fleet.predictor.hold_ms, abs=1.0)
    assert forecast(late, 0, 100.0, 100.0, 2000.0).tpot_ms == pytest.approx(20.0, rel=0.15)


def test_prompts_that_were_computed_after_an_answer_are_not_part_of_its_time() -> None:
    """The end of each answer is reported a second late; meanwhile the engine computed other prompts."""
    fleet, late = pool(1), pool(1)
    for number in range(100):
        for each, lateness in ((fleet, 0.0), (late, 1.0)):
            now = 5.0 * number
            lease = each.charge(sent(2 * number, 100), 0, now, 0, 20.0)
            each.first_token(lease, now + 0.05)
            each.ledger.release(lease)
            if not lateness:
                each.completed(lease, now + 0.45, 21, ttft_ms=50.0, duration_ms=450.0)
            other = each.charge(sent(2 * number + 1, 4000), 0, now + 0.5, 0, 1.0)
            each.first_token(other, now + 0.9)
            each.ledger.release(other)
            if lateness:
                each.completed(lease, now + 0.45 + lateness, 21, ttft_ms=50.0, duration_ms=450.0)
    for of in ("prefill", "step"):
        learned, known = getattr(late.predictor.rates, of)[0], getattr(fleet.predictor.rates, of)[0]
        assert learned == pytest.approx(known, rel=0.25), of
