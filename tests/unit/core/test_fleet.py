"""The one door: endpoints coming and going, readings, charges."""

from math import inf, nan

import pytest
from msgspec.structs import replace

from fairlead.core.cost import LONG_TOKENS, PRIOR
from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.fleet import BYTES_PER_TOKEN, EJECT_SECONDS, Fleet
from fairlead.core.learned import SpeedsLearned
from fairlead.core.ledger import Lease
from fairlead.core.prefix import ChainHasher
from fairlead.core.request import Request
from fairlead.testing import builders

CHAIN = ChainHasher().chain(b"m", b"x" * 4096)


def fleet_of(count: int) -> Fleet:
    fleet = Fleet()
    for number in range(count):
        fleet.up(Endpoint(f"e{number}", f"10.0.0.{number}:8000"))
    return fleet


def request(number: int, tokens: int = 1000) -> Request:
    return Request(id=number, arrived=0.0, prompt_tokens=tokens, prompt_bytes=4096, prefix=CHAIN)


def test_the_same_endpoint_again_changes_nothing() -> None:
    fleet = fleet_of(1)
    fleet.charge(request(1), 0, 0.0, 0, 100.0)
    fleet.sampled("e0", 0.0, 0.0, Sample(waiting=3.0, running=4.0))
    assert fleet.up(Endpoint("e0", "10.0.0.0:8000")) == []
    assert (fleet.table.inflight[0], fleet.table.waiting[0]) == (1, 3)
    assert fleet.match(request(2)) is not None


def test_new_labels_keep_load_and_prefixes() -> None:
    fleet = fleet_of(1)
    fleet.charge(request(1), 0, 0.0, 0, 100.0)
    assert fleet.up(Endpoint("e0", "10.0.0.0:8000", {"tier": "gold"})) == []
    assert fleet.table.endpoints[0] == Endpoint("e0", "10.0.0.0:8000", {"tier": "gold"})
    assert fleet.table.inflight[0] == 1
    assert fleet.match(request(2)) is not None


def test_what_one_engine_runs_at_once_is_known_of_all_that_look_alike() -> None:
    """Also where a long queue never shows it: what waits there may only not be computed yet."""
    fleet = fleet_of(2)
    fleet.charge(request(1, 50_000), 1, 9.9, 0, 100.0)
    for moment in range(10, 14):
        fleet.sampled("e0", moment, moment, Sample(waiting=2.0, running=4.0, kv_usage=0.1))
        fleet.sampled("e1", 10.0, 10.0, Sample(waiting=9.0, running=3.0, kv_usage=0.1))
    assert fleet.table.max_seqs[:2].tolist() == [4.0, 4.0]


def test_what_an_engine_runs_at_once_is_found_although_waiting_for_it_was_learned_as_slow_prefill() -> None:
    """Twenty wait, one begins every quarter of a second, and all would be computed in a quarter by the prior."""
    fleet = Fleet()
    fleet.predictor.rates.restore(SpeedsLearned((4.0, 1.0, 1.0), 100, ()))
    fleet.up(Endpoint("e0", "10.0.0.0:8000"))
    requests = [builders.request("x" * 600, id=number, stream=True) for number in range(32)]
    for step, lease in enumerate([fleet.charge(each, 0, 0.0, 0, 100.0) for each in requests][:12]):
        now = 10.0 + 0.25 * step
        if step:
            fleet.sampled("e0", now, now, Sample(waiting=20.0, running=8.0, kv_usage=0.1))
            assert fleet.predictor.rates.prefill[0] * fleet.table.queued_ms[0] > 250.0 > fleet.table.queued_ms[0]
        fleet.first_token(lease, now)
    assert fleet.table.max_seqs[0] == 8.0


def test_another_address_is_another_process() -> None:
    fleet = fleet_of(2)
    fleet.charge(request(1), 0, 0.0, 0, 100.0)
    fleet.charge(request(2), 1, 0.0, 0, 100.0)
    fleet.sampled("e0", 0.0, 0.0, Sample(waiting=3.0, running=4.0, kv_usage=0.5, adapters=frozenset("a")))
    leases = fleet.up(Endpoint("e0", "10.0.0.77:8000"))
    assert [lease.request.id for lease in leases] == [1]
    assert [lease.request.id for lease in fleet.ledger] == [2]
    slot = fleet.table.slot("e0")
    assert slot is not None
    assert fleet.table.count == 2
    assert fleet.table.endpoints[slot] == Endpoint("e0", "10.0.0.77:8000")
    assert fleet.table.queue[slot] == fleet.table.active[slot] == fleet.table.kv[slot] == 0
    assert fleet.age(slot, 1.0) == inf
    match = fleet.match(request(3))
    assert match is not None
    assert match.tolist() == [0.0, 1.0], "the new process has an empty cache"
    fleet.validate()


def test_a_successor_inherits_nothing() -> None:
    fleet = fleet_of(1)
    old = fleet.charge(request(1), 0, 0.0, 0, 100.0)
    fleet.sampled("e0", 0.0, 0.0, Sample(waiting=30.0, running=4.0, block_size=16, num_blocks=10))
    assert [lease.request.id for lease in fleet.down("e0")] == [1]
    assert fleet.down("e0") == []
    fleet.up(Endpoint("other", "10.0.0.9:8000"))
    assert fleet.table.queue[0] == fleet.table.capacity_tokens[0] == 0
    assert fleet.match(request(2)) is None
    fleet.charge(request(3), 0, 0.0, 0, 100.0)
    assert fleet.table.queue[0] == 1
    fleet.ledger.release(old)  # comes late and does nothing
    assert fleet.table.queue[0] == 1
    fleet.validate()


def test_readings_of_unknown_endpoints_are_ignored() -> None:
    fleet = fleet_of(1)
    assert fleet.sampled("gone", 0.0, 0.0, Sample(waiting=1.0, running=1.0)) == []
    fleet.scrape_failed("gone", 0.0)
    assert fleet.table.failures[0] == 0


def test_a_starting_endpoint_that_was_refused_once_is_no_lasting_trouble() -> None:
    fleet = fleet_of(1)
    fleet.scrape_failed("e0", 0.5)
    assert fleet.table.troubled
    fleet.scrape_failed("e0", 1.0, answered=True)
    assert not fleet.table.troubled


def test_a_finished_prefill_leaves_only_the_next_at_the_head() -> None:
    fleet = fleet_of(2)
    pairs = [
        fleet.charge_pair(Request(id=number, arrived=0.0, stream=True, prompt_tokens=tokens), 0, 1, 0.0, 0, 10.0)
        for number, tokens in ((1, 4000), (2, 2000))
    ]
    fleet.first_token(pairs[0], 0.2)
    head = fleet.table.head_ms[1]
    assert 0.0 < head == fleet.table.queued_ms[1]
    fleet.charge_pair(Request(id=3, arrived=0.2, stream=True, prompt_tokens=3000), 0, 1, 0.25, 0, 10.0)
    assert fleet.table.head_ms[1] == head < fleet.table.queued_ms[1]
    fleet.validate()


def test_a_reading_fills_the_row() -> None:
    fleet = fleet_of(1)
    fleet.scrape_failed("e0", 0.5)
    fleet.sampled(
        "e0",
        1.0,
        1.1,
        Sample(
            waiting=2.0,
            running=5.0,
            kv_usage=0.25,
            adapters=frozenset({"a"}),
            max_adapters=4,
            block_size=16,
            num_blocks=1000,
        ),
    )
    table = fleet.table
    assert (table.waiting[0], table.running[0], table.queue[0], table.active[0], table.kv[0]) == (2, 5, 2, 5, 0.25)
    assert (table.max_adapters[0], table.loaded_adapters[0], table.capacity_tokens[0]) == (4, 1, 16_000)
    assert table.failures[0] == 0
    assert fleet.age(0, 2.1) == pytest.approx(1.0)
    assert not fleet.stale(0, 3.0)
    assert fleet.stale(0, 3.2)


def shares(fleet: Fleet, request: Request) -> list[float]:
    column = fleet.match(request)
    assert column is not None
    return [*map(float, column[: len(fleet.table)])]


def test_an_engine_that_reuses_no_prefix_is_expected_to_find_none() -> None:
    """vLLM with `--no-enable-prefix-caching`; the setting may change with a restart."""
    fleet = fleet_of(2)
    page = Sample(waiting=0.0, running=0.0, block_size=16, num_blocks=1000)
    for number, endpoint_id in enumerate(("e0", "e1")):
        fleet.charge(request(number + 1), number, 0.0, 0, 100.0)
        fleet.sampled(endpoint_id, 0.1, 0.1, replace(page, prefix_caching=endpoint_id == "e1"))
    assert shares(fleet, request(3)) == [0.0, 1.0]
    fleet.charge(request(4), 0, 0.2, 0, 100.0)
    fleet.measured(8.0, 1.0)
    fleet.sampled("e0", 0.3, 0.3, replace(page, prefix_caching=False))
    assert shares(fleet, request(5)) == [0.0, 1.0] and fleet.table.capacity_tokens[0] == 16_000
    fleet.sampled("e0", 0.4, 0.4, page)
    fleet.charge(request(6), 0, 0.5, 0, 100.0)
    assert shares(fleet, request(7)) == [1.0, 1.0] and fleet.prefix.capacity(0) == 128_000
    fleet.validate()


def test_engines_behind_an_address_share_its_load_and_each_has_its_memory() -> None:
    fleet = fleet_of(2)
    assert fleet.table.per_rank is None
    fleet.sampled("e1", 0.0, 0.0, Sample(waiting=0.0, block_size=16, num_blocks=4000, ranks=4))
    assert fleet.table.ranks.tolist() == [0.0, 4.0]
    assert fleet.table.per_rank is not None and fleet.table.per_rank.tolist() == [1.0, 0.25]
    assert fleet.table.per_capacity[1] == 4.0 / 64_000
    fleet.sampled("e1", 1.0, 1.0, Sample(waiting=0.0))
    assert fleet.table.ranks[1] == 4.0, "the page said nothing of them"
    fleet.sampled("e1", 2.0, 2.0, Sample(waiting=0.0, ranks=2))
    assert fleet.table.per_capacity[1] == 2.0 / 64_000
    fleet.down("e1")
    assert fleet.table.per_rank is None


def test_what_a_page_does_not_say_stays_in_force() -> None:
    fleet = fleet_of(1)
    fleet.sampled("e0", 0.0, 0.0, Sample(waiting=2.0, running=5.0, kv_usage=0.25, adapters=frozenset("a")))
    fleet.sampled("e0", 1.0, 1.0, Sample(waiting=4.0))
    table = fleet.table
    assert (table.queue[0], table.active[0], table.kv[0], table.adapters[0]) == (4, 5, 0.25, frozenset("a"))
    fleet.sampled("e0", 2.0, 2.0, Sample())
    assert (table.queue[0], table.active[0], table.sampled_at[0]) == (4, 5, 2.0)


def test_adapters_that_are_reported_as_gone_are_gone() -> None:
    fleet = fleet_of(1)
    fleet.sampled("e0", 0.0, 0.0, Sample(waiting=0.0, adapters=frozenset({"sql"}), max_adapters=4))
    assert fleet.table.holders("sql") is not None
    fleet.sampled("e0", 1.0, 1.0, Sample(waiting=0.0, adapters=frozenset()))
    assert fleet.table.holders("sql") is None
    assert (fleet.table.loaded_adapters[0], fleet.table.max_adapters[0]) == (0, 0)


@pytest.mark.parametrize(
    ("reading", "expected"), [(nan, 2.0), (inf, 2.0), (-inf, 0.0), (-5.0, 0.0), (1e300, 1e9), (0.5, 0.5)]
)
def test_nonsense_in_gauges(reading: float, expected: float) -> None:
    fleet = fleet_of(1)
    fleet.sampled("e0", 0.0, 0.0, Sample(waiting=2.0, running=2.0, kv_usage=0.5))
    fleet.sampled("e0", 1.0, 1.0, Sample(waiting=reading, running=reading, kv_usage=reading))
    assert fleet.table.waiting[0] == fleet.table.running[0] == expected
    assert 0 <= fleet.table.kv[0] <= 1
    fleet.validate()


@pytest.mark.parametrize(
    ("block_size", "num_blocks", "tokens"),
    [(16, 0, 0), (0, 100, 0), (-16, 100, 0), (16, 100, 1600), (10**400, 10**9, 1e9)],
)
def test_capacities(block_size: int, num_blocks: int, tokens: float) -> None:
    fleet = fleet_of(1)
    fleet.sampled("e0", 0.0, 0.0, Sample(block_size=block_size, num_blocks=num_blocks, max_adapters=-3))
    assert fleet.table.capacity_tokens[0] == tokens
    fleet.validate()


def test_the_prefix_budget_follows_the_kv_capacity() -> None:
    fleet = fleet_of(1)
    fleet.charge(request(1), 0, 0.0, 0, 0.0)
    fleet.sampled("e0", 0.0, 0.0, Sample(block_size=16, num_blocks=16))
    column = fleet.match(request(2))
    assert column is not None
    assert 0 < column[0] * 4096 <= 256 * BYTES_PER_TOKEN


def test_the_prefix_budget_follows_the_bytes_that_a_token_takes() -> None:
    fleet = fleet_of(2)
    fleet.sampled("e0", 0.0, 0.0, Sample(block_size=16, num_blocks=16))
    shares = []
    for bytes_per_token in (8.0, 2.0):
        for _ in range(40):
            fleet.measured(bytes_per_token)
        fleet.charge(request(1, tokens=200), 0, 0.0, 0, 0.0)
        column = fleet.match(request(2))
        assert column is not None
        shares.append(column[0] * 4096 / 256)
    assert BYTES_PER_TOKEN < shares[0] <= 8.2
    assert 0 < shares[1] <= 2.1
    fleet.validate()


def test_memory_use_survives_the_gap_between_two_batches() -> None:
    """A vLLM whose whole batch ended shows running 0, kv 0, waiting 28 until the next step ends."""
    fleet = fleet_of(1)
    fleet.sampled("e0", 0.0, 0.0, Sample(waiting=28.0, running=4.0, kv_usage=0.8))
    fleet.sampled("e0", 0.1, 0.1, Sample(waiting=28.0, running=0.0, kv_usage=0.0))
    assert fleet.table.kv[0] == 0.8
    fleet.sampled("e0", 0.2, 0.2, Sample(waiting=28.0, running=0.0, kv_usage=0.0))
    assert fleet.table.kv[0] == 0.0, "twice in a row is believed"
    fleet.sampled("e0", 0.3, 0.3, Sample(waiting=0.0, running=4.0, kv_usage=0.8))
    fleet.sampled("e0", 0.4, 0.4, Sample(waiting=0.0, running=0.0, kv_usage=0.0))
    assert fleet.table.kv[0] == 0.0, "nobody waits: it is idle indeed"


def test_stale_readings_give_way_to_our_own_accounting() -> None:
    fleet = fleet_of(1)
    fleet.charge(request(1, tokens=1000), 0, 0.0, 0, 1000.0)
    sample = Sample(waiting=20.0, running=30.0, kv_usage=0.9, block_size=16, num_blocks=625)
    fleet.sampled("e0", 0.5, 0.5, sample)
    fleet.scrape_failed("e0", 1.0)
    assert (fleet.table.queue[0], fleet.table.active[0], fleet.table.kv[0]) == (20, 30, 0.9), "one miss: still fresh"
    fleet.scrape_failed("e0", 3.0)
    assert fleet.table.failures[0] == 2
    assert (fleet.table.queue[0], fleet.table.active[0]) == (1, 0)
    assert fleet.table.kv[0] == 1500 / 10_000, "an endpoint that went silent must not look emptier than it is"
    fleet.validate()


def test_failures_in_a_row_eject_for_a_moment() -> None:
    fleet = fleet_of(1)
    for ok in (False, False, True, False, False):
        fleet.answered(0, ok, now=10.0)
    assert fleet.table.ejected_until[0] == -inf
    fleet.answered(0, ok=False, now=10.0)
    assert fleet.table.ejected_until[0] == 10.0 + EJECT_SECONDS
    fleet.answered(0, ok=True, now=10.5)
    assert fleet.table.ejected_until[0] == -inf, "a response that works ends it"
    assert fleet.table.errors[0] == 0


def broken_off(fleet: Fleet, clients: int, now: float = 0.0) -> list[bool]:
    """One answer to each of so many clients."""
    prompts = [ChainHasher().chain(b"m", b"%02d" % number * 999) for number in range(clients)]
    asked = [Request(id=1, arrived=0.0, prompt_tokens=9, prefix=prompt) for prompt in prompts]
    return [fleet.unfinished(fleet.charge(one, 0, now, 0, 9.0), now) for one in asked]


def test_an_endpoint_that_still_breaks_off_every_answer_is_avoided_again() -> None:
    fleet = fleet_of(2)
    assert broken_off(fleet, 12) == [False] * 11 + [True]
    assert broken_off(fleet, 1, 10.0) == [True]
    assert fleet.table.ejected_until[0] == 10.0 + EJECT_SECONDS
    assert broken_off(fleet, 1, 20.0) == [True], "of the same client, too"


def test_an_answer_that_ends_or_a_new_endpoint_makes_up_for_those_that_broke_off() -> None:
    fleet = fleet_of(2)
    broken_off(fleet, 3)
    fleet.answered(0, ok=True, now=0.0)
    fleet.answered(0, ok=False, now=0.0)
    broken_off(fleet, 3)
    assert fleet.table.errors[0] == 1.75, "each of the clients counts again"
    fleet.down("e0")
    fleet.up(Endpoint("e9", "10.0.0.9:8000"))
    fleet.answered(0, ok=False, now=0.0)
    broken_off(fleet, 3)
    assert fleet.table.errors[0] == 1.75


@pytest.mark.parametrize(
    ("tokens", "hit", "output", "uncached", "kv"),
    [
        (1000, 0, 300.0, 1000, 1150),
        (1000, 400, 300.5, 600, 1150),
        (1000, 1000, 0.0, 1, 1000),
        (1000, 5000, 0.0, 1, 1000),
        (1000, -5, nan, 1005, 1),
        (0, 0, -inf, 1, 1),
        (10**12, 0, inf, 1e9, 1e9),
    ],
)
def test_charges_are_whole_and_bounded(tokens: int, hit: int, output: float, uncached: float, kv: float) -> None:
    fleet = fleet_of(1)
    lease = fleet.charge(request(1, tokens), 0, 0.0, hit, output)
    assert (lease.uncached_tokens, lease.kv_tokens) == (uncached, kv)
    assert fleet.table.pending_tokens[0] == uncached
    fleet.validate()


def test_a_prompt_that_the_engine_will_refuse_is_no_work_and_leaves_nothing_in_its_cache() -> None:
    fleet = fleet_of(2)
    fleet.sampled("e0", 0.0, 0.0, Sample(block_size=16, num_blocks=100))
    for slot, charged in ((0, (1, 1)), (1, (1601, 1651))):
        lease = fleet.charge(request(1, 1601), slot, 0.0, 0, 100.0)
        assert (lease.uncached_tokens, lease.kv_tokens) == charged
    column = fleet.match(request(2))
    assert column is not None
    assert (column > 0).tolist() == [False, True], "nothing is known of the memory there"
    assert fleet.charge(request(3, 1700), 0, 0.0, 200, 0.0).uncached_tokens == 1500, "the rest is there already"
    fleet.validate()


@pytest.mark.parametrize("api", ["chat", "responses", "generate", "other"])
def test_answers_share_one_prompt_that_the_engine_will_refuse_and_a_list_has_many(api: str) -> None:
    fleet = fleet_of(1)
    fleet.sampled("e0", 0.0, 0.0, Sample(block_size=16, num_blocks=100))
    answers = replace(request(1, 6400), sequences=4, api=api)
    assert fleet.charge(answers, 0, 0.0, 0, 100.0).uncached_tokens == 1
    assert fleet.match(request(2)) is None, "nothing is in its cache"
    for lists in ("rerank", "score", "embeddings", "completions", "sglang"):
        pairs = replace(answers, api=lists)
        assert fleet.charge(pairs, 0, 0.0, 0, 100.0).uncached_tokens == 6400, "each of its prompts is short"
        assert fleet.charge(replace(pairs, sequences=3), 0, 0.0, 0, 100.0).uncached_tokens == 1
    fleet.validate()


def test_what_a_refused_prompt_added_is_taken_back() -> None:
    fleet = fleet_of(1)
    hasher, text = ChainHasher(), b"x" * 8192

    def sent(number: int, size: int, hit: int, recomputed: bool = False, at: float = 0.0) -> Lease:
        prefix = hasher.chain(b"m", text[:size])
        prompt = Request(
            id=number, arrived=0.0, prompt_tokens=size // 4, prompt_bytes=size, prefix=prefix, recomputed=recomputed
        )  # fmt: skip
        return fleet.charge(prompt, 0, at, hit, 0.0)

    def refused(lease: Lease) -> float:
        fleet.ledger.release(lease)
        fleet.refused(lease)
        column = fleet.match(Request(id=99, arrived=0.0, prefix=hasher.chain(b"m", text)))
        fleet.validate()
        assert fleet.table.free_cache[0] == fleet.prefix.free(0)
        return 0.0 if column is None else float(column[0]) * 8192

    assert refused(sent(1, 4096, 0)) == 0.0
    fleet.ledger.release(sent(2, 2048, 0))
    assert refused(sent(3, 4096, 512)) == 2048, "that was there before"
    first, second = sent(4, 4096, 512), sent(5, 8192, 1024)
    assert refused(first) == 8192, "another one computes it, or"
    assert refused(second) == 2048, "is refused, too"
    assert refused(sent(6, 2048, 0, recomputed=True)) == 2048, "nobody looked up what was there before"
    first, second = sent(7, 8192, 512), sent(8, 4096, 1024)
    fleet.ledger.release(second)
    fleet.completed(second, 0.5, 9)
    assert refused(first) == 4096, "another one was answered meanwhile, before the gateway said so of the first"
    fleet.prefix.take_back(0, hasher.chain(b"m", text).hashes)
    assert refused(sent(10, 4096, 0, at=1.0)) == 0.0, "that answer was pushed out before"
    fleet.down("e0")
    fleet.up(Endpoint("e0", "10.0.0.0:8000"))
    assert refused(sent(9, 4096, 0)) == 0.0, "that was in the memory of the one before"


def test_long_prompts_keep_others_away_for_as_long_again_as_they_take() -> None:
    fleet = fleet_of(3)
    fleet.predictor.rates.prefill[:] = 2.0
    fleet.charge(request(1, LONG_TOKENS - 1), 0, 1.0, 0, 100.0)
    fleet.charge(request(2, 2 * LONG_TOKENS), 0, 1.0, LONG_TOKENS + 1, 100.0)
    fleet.charge(request(3, LONG_TOKENS), 1, 1.0, 0, 100.0, reserved=True)
    assert fleet.table.long_until == 0.0, "short ones, also by what is cached, and who may go elsewhere"
    took_ms = 2.0 * PRIOR.prefill_ms(LONG_TOKENS, LONG_TOKENS)
    for number, times in ((4, 2.0), (5, 4.0), (6, 4.0)):
        fleet.charge(request(number, LONG_TOKENS), 1, 1.0, 0, 100.0)
        assert fleet.table.long_until_ms.tolist() == pytest.approx([0.0, 1000.0 + times * took_ms, 0.0])
        fleet.validate()
    fleet.charge(request(7, LONG_TOKENS), 2, 900.0, 0, 100.0)
    assert fleet.table.long_until == fleet.table.long_until_ms[2] == pytest.approx(900_000.0 + 2.0 * took_ms)
    fleet.down("e2")
    assert fleet.table.long_until_ms[2] == 0.0


def test_the_share_of_a_prompt_stays_a_share() -> None:
    """`prompt_bytes` counts an inline image as a thousand tokens, the chain covers all its bytes."""
    fleet = fleet_of(2)
    fleet.charge(request(1), 1, 0.0, 0, 0.0)
    with_image = Request(id=2, arrived=0.0, prompt_bytes=500, prefix=CHAIN)
    column = fleet.match(with_image)
    assert column is not None
    assert column.tolist() == [0.0, 1.0]
    longer = Request(id=3, arrived=0.0, prompt_bytes=8192, prefix=CHAIN)
    column = fleet.match(longer)
    assert column is not None
    assert column.tolist() == [0.0, CHAIN.ends[-1] / 8192]
    assert fleet.match(Request(id=4, arrived=0.0, prompt_bytes=100)) is None


def test_a_restarted_engine_has_an_empty_cache_of_the_same_size() -> None:
    fleet = fleet_of(1)
    page = Sample(waiting=0.0, running=0.0, block_size=16, num_blocks=100_000, prefix_queries=50.0)
    fleet.sampled("e0", 0.0, 0.0, page)
    capacity = fleet.prefix.capacity(0)
    fleet.charge(request(1), 0, 0.0, 0, 100.0)
    fleet.sampled("e0", 1.0, 1.0, Sample(waiting=0.0, running=0.0, block_size=16, num_blocks=100_000, prefix_queries=1))
    assert fleet.match(request(2)) is None
    assert fleet.prefix.capacity(0) == capacity > 5_000_000
