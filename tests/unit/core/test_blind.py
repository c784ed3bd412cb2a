"""Answers whose first token nobody sees: they are not streamed, or the gateway shows no responses."""

import pytest

from fairlead.core.cost import PRIOR, forecast
from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.fleet import Fleet
from fairlead.core.ledger import Lease
from fairlead.core.request import Request
from fairlead.core.tokens import TokenEstimator


def pool(count: int = 1) -> Fleet:
    fleet = Fleet()
    for i in range(count):
        fleet.up(Endpoint(id=f"e{i}", address=f"10.0.0.{i}:80"))
    return fleet


def sent(fleet: Fleet, number: int, tokens: int, now: float, *, stream: bool = True, slot: int = 0) -> Lease:
    request = Request(id=number, arrived=now, prompt_tokens=tokens, stream=stream, blind=stream)
    return fleet.charge(request, slot, now, 0, 100.0)


def scraped(fleet: Fleet, now: float, waiting: float, running: float) -> None:
    fleet.sampled("e0", now, now, Sample(waiting=waiting, running=running, kv_usage=0.1))
    fleet.validate()


@pytest.mark.parametrize("stream", [True, False])
def test_prompts_count_as_computed_once_a_scrape_shows_them_running(stream: bool) -> None:
    fleet = pool()
    first, second, third = (sent(fleet, number, 4000, 0.0, stream=stream) for number in range(3))
    scraped(fleet, 0.01, 0.0, 3.0)
    assert [lease.pending for lease in (first, second, third)] == [True] * 3, "no engine is that quick"
    later = 1e-3 * third.forecast.ttft_ms + 0.01
    scraped(fleet, later, 1.0, 2.0)
    assert [lease.pending for lease in (first, second, third)] == [False, False, True], "the last one waits"
    assert fleet.table.queued_tokens[0] == 4000.0
    scraped(fleet, later + 0.1, 0.0, 3.0)
    assert not third.pending and fleet.table.queued_tokens[0] == 0.0
    assert fleet.table.active[0] == 3.0


def test_a_queue_is_believed_to_be_worked_off_without_anybody_seeing_it() -> None:
    fleet = pool()
    seen = Fleet()
    seen.up(Endpoint(id="e0", address="10.0.0.0:80"))
    for number in range(20):
        sent(fleet, number, 8000, 0.0)
        seen.charge(Request(id=number, arrived=0.0, prompt_tokens=8000, stream=True), 0, 0.0, 0, 100.0)
    alone = PRIOR.prefill_ms(100.0, 100.0)
    assert forecast(0, 100.0, 100.0, alone, seen, 60.0).ttft_ms > 5_000.0, "not one first token in a minute"
    assert forecast(0, 100.0, 100.0, alone, fleet, 60.0).ttft_ms < 500.0
    assert forecast(0, 100.0, 100.0, alone, fleet, 1.0).ttft_ms > 5_000.0


@pytest.mark.parametrize("stream", [True, False])
def test_how_fast_an_engine_is_can_be_learned_from_answers_that_are_over(stream: bool) -> None:
    """All takes three times as long at `e1`."""
    fleet = pool(2)
    for number in range(120):
        for slot, slower in ((0, 1.0), (1, 3.0)):
            now = 10.0 * number
            lease = sent(fleet, 2 * number + slot, 6000, now, stream=stream, slot=slot)
            ttft_ms = slower * (PRIOR.prefill_ms(6000.0, 6000.0) + 1.5 * PRIOR.c0)
            whole_ms = ttft_ms + slower * 99.0 * (PRIOR.c0 + PRIOR.load_ms(1.0, 6050.0))
            fleet.ledger.release(lease)
            fleet.completed(lease, now + 1e-3 * whole_ms, 100, ttft_ms if stream else whole_ms, whole_ms)
    rates = fleet.predictor.rates
    assert rates.step[1] / rates.step[0] == pytest.approx(3.0, rel=0.2)
    assert rates.prefill[1] / rates.prefill[0] == pytest.approx(3.0, rel=0.2)
    assert fleet.predictor.hold_ms < 5_000.0


#: Sizes of answers of real vLLM 0.32 by their tokens.
SIZES = {
    "completions": {1: 610, 8: 654, 64: 923, 300: 1948},
    "chat": {1: 747, 8: 786, 64: 1077, 300: 2151},
    "responses": {1: 1084, 8: 1199, 64: 1435, 300: 2557},
    "messages": {1: 258, 8: 298, 64: 547, 300: 1688},
}


@pytest.mark.parametrize("api", SIZES)
@pytest.mark.parametrize("lengths", [(64,), (1, 8), (64, 300)])
def test_what_is_around_the_text_is_no_text(api: str, lengths: tuple[int, ...]) -> None:
    """Whichever lengths it knows, it knows the others."""
    tokens, request = TokenEstimator(), Request(id=1, arrived=0.0, api=api, model="m")
    for count in 5 * lengths:
        tokens.learn_answer(request, SIZES[api][count], count)
    for count, size in SIZES[api].items():
        assert abs(tokens.answer_tokens(request, size) - count) <= max(0.2 * count, 10.0)


def test_the_size_of_an_answer_tells_its_tokens() -> None:
    tokens = TokenEstimator()
    whole, streamed = (Request(id=1, arrived=0.0, api="chat", model="m", stream=stream) for stream in (False, True))
    assert tokens.answer_tokens(whole, 5000) == -1, "nothing is known yet"
    tokens.learn_answer(streamed, 90_000, 500)
    assert tokens.answer_tokens(whole, 5000) == -1
    for count in (10, 200, 1000):
        tokens.learn_answer(whole, 745 + 5 * count, count)
    assert tokens.answer_tokens(whole, 745 + 1500) == 300
    assert tokens.answer_tokens(whole, 0) == -1
    assert tokens.answer_tokens(whole, 10**30) > 0
    assert tokens.answer_tokens(streamed, 5000) == -1
    stored = Request(id=1, arrived=0.0, api="responses_stored", model="m")
    tokens.learn_answer(stored, 1850, 300)
    assert tokens.answer_tokens(stored, 1850) == -1, "it may only begin in the background"
