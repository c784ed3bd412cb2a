"""What was learned, taken down and given back: the same knowledge, bounds kept, restarted engines not believed."""

from random import Random

import numpy as np
import pytest
from msgspec.structs import replace

from fairlead.compat.load import load
from fairlead.config.building import build_pipeline
from fairlead.core.clock import VirtualClock
from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.events import EndpointUp, Restored
from fairlead.core.fleet import Fleet
from fairlead.core.learned import Common, EndpointLearned, Part, PrefixesLearned
from fairlead.core.prefix import ChainHasher, PrefixIndex
from fairlead.core.request import PrefixChain, Request
from fairlead.core.state import ENDPOINT_BLOCKS, PART_BLOCKS, Head, decode, encode, taken
from fairlead.core.tokens import TokenEstimator

HASHER = ChainHasher()
PAGE = Sample(
    waiting=0.0, running=0.0, kv_usage=0.1, block_size=16, num_blocks=20_000, prefix_queries=50_000.0,
    prefix_hits=20_000.0, generation_tokens=1000.0, started=1.7e9,
)  # fmt: skip
CAPACITY = 16 * 20_000


def chain(name: str, size: int = 24_000) -> PrefixChain:
    return HASHER.chain(b"m", Random(name).randbytes(size))


def request(number: int, prefix: PrefixChain) -> Request:
    return Request(number, 0.0, prompt_tokens=6000, prompt_bytes=24_000, prefix=prefix, stream=True)


def pool(count: int = 2, page: Sample | None = PAGE) -> Fleet:
    fleet = Fleet()
    for number in range(count):
        fleet.up(Endpoint(f"e{number}", f"10.0.0.{number}:8000", {"gpu": "fast"}))
        if page is not None:
            fleet.sampled(f"e{number}", 0.0, 0.0, page)
    return fleet


def experienced(count: int = 2) -> tuple[Fleet, TokenEstimator]:
    """Twenty prompts at each endpoint, the second of which takes four times as long as the others."""
    fleet, tokens = pool(count), TokenEstimator()
    now = 0.0
    for number in range(20 * count):
        slot, now = number % count, now + 0.01
        lease = fleet.charge(request(number, chain(f"{number}")), slot, now, 0, 100.0)
        now += 1.2 if slot == 1 else 0.3
        fleet.first_token(lease, now)
        fleet.ledger.release(lease)
        now += 0.01
        fleet.completed(lease, now, -1)
        fleet.measured(3.5)
        tokens.learn("m", 24_000, 6000)
        tokens.learn_output("m", 100)
    fleet.adapters.restore(25.0, 900.0)
    fleet.validate()
    return fleet, tokens


def known(fleet: Fleet, tokens: TokenEstimator, now: float = 50.0, most: int = 1 << 20) -> list[Part]:
    """As it comes from a file."""
    parts = [decode(encode(part)) for part in taken(fleet, tokens, now, most)]
    assert not any(isinstance(part, Head) for part in parts)
    return parts  # type: ignore[return-value]


def give(fleet: Fleet, parts: list[Part], age_s: float = 5.0, now: float = 0.0) -> None:
    for part in parts:
        fleet.restore(part, age_s, now)
        fleet.validate()


def hits(fleet: Fleet, count: int = 40) -> np.ndarray:
    columns = (fleet.match(request(0, chain(f"{number}"))) for number in range(count))
    return np.array([np.zeros(len(fleet.table)) if column is None else column for column in columns])


def test_the_same_is_known_after_a_restart() -> None:
    fleet, tokens = experienced(4)
    fresh = pool(4, None)
    give(fresh, known(fleet, tokens), age_s=0.0)
    assert hits(fleet).sum() > 20
    assert (hits(fresh) == hits(fleet)).all()
    for number in range(4):
        fresh.sampled(f"e{number}", 0.0, 0.0, PAGE)
    fresh.validate()
    assert (hits(fresh) == hits(fleet)).all()
    old, new = fleet.predictor, fresh.predictor
    assert new.kappa == pytest.approx(old.kappa)
    assert (new.hold_ms, new.answer_steps) == (old.hold_ms, old.answer_steps)
    assert old.rates.prefill[1] > 2.0 * old.rates.prefill[0]
    assert new.rates.prefill[0] == pytest.approx(old.rates.prefill[0], rel=0.1)
    assert new.rates.prefill[1] > 1.8 * new.rates.prefill[0]
    assert fresh.bytes_per_token == pytest.approx(fleet.bytes_per_token)
    assert (fresh.adapters.activate_ms, fresh.adapters.load_ms) == (25.0, 900.0)
    estimator = TokenEstimator()
    estimator.restore(tokens.learned())
    assert estimator.learned() == tokens.learned()


def test_the_oldest_give_way_first_before_and_after() -> None:
    """The restored endpoint forgets in the order in which it was used, as if nothing had happened."""
    fleet, tokens = experienced()
    fresh = pool(2, None)
    give(fresh, known(fleet, tokens))
    for each in (fleet, fresh):
        each.prefix.set_capacity(0, 130_000)
        each.validate()
    kept = hits(fleet)[::2, 0]
    assert 0 < np.count_nonzero(kept) < 20
    assert (hits(fresh)[::2, 0] == kept).all()
    assert (np.diff(kept > 0) >= 0).all(), "those used last"


def test_what_differs_of_an_endpoint_is_forgotten_while_nobody_runs() -> None:
    """Half its weight in half a minute, as if nobody had asked it. What holds for all of its class stays."""
    fleet, tokens = experienced(4)
    parts = known(fleet, tokens)
    soon, late = pool(4, None), pool(4, None)
    give(soon, parts, 1.0)
    give(late, parts, 31.0)
    for each in (soon, late):
        each.sampled("e0", 0.0, 0.0, PAGE)
        each.sampled("e1", 0.0, 0.0, PAGE)
    ratios = [each.predictor.rates.own(1, 0.0)[2] for each in (soon, late)]
    assert 1.0 < ratios[1] == pytest.approx(ratios[0] ** 0.5)
    assert late.predictor.rates.learned().classes == soon.predictor.rates.learned().classes


def test_what_is_known_of_engines_outlasts_a_run_in_which_they_were_down() -> None:
    fleet, tokens = experienced()
    for _ in range(4):
        fleet.sampled("e0", 60.0, 60.0, replace(PAGE, waiting=2.0, running=8.0))
    assert fleet.table.max_seqs[0] == 8.0
    between, after = pool(2, None), pool(2, None)
    give(between, known(fleet, tokens))
    give(after, known(between, tokens))
    after.sampled("e0", 0.0, 0.0, PAGE)
    assert after.table.max_seqs[0] == 8.0


@pytest.mark.parametrize(
    "page",
    [
        replace(PAGE, prefix_queries=10.0, prefix_hits=0.0),
        replace(PAGE, started=1.7e9 + 5),
        replace(PAGE, started=None),
    ],
    ids=["its counters began again", "another start", "an engine that does not tell its start"],
)
@pytest.mark.parametrize("scraped_first", [False, True])
def test_an_engine_that_was_restarted_is_not_believed(page: Sample, scraped_first: bool) -> None:
    fleet, tokens = experienced()
    fresh, parts = pool(2, None), known(fleet, tokens)
    if scraped_first:
        fresh.sampled("e0", 0.0, 0.0, page)
        give(fresh, parts)
    else:
        give(fresh, parts)
        assert hits(fresh)[:, 0].sum() > 10
        fresh.sampled("e0", 0.0, 0.0, page)
    fresh.sampled("e1", 0.0, 0.0, PAGE)
    fresh.validate()
    assert hits(fresh)[:, 0].sum() == 0
    assert (hits(fresh)[:, 1] == hits(fleet)[:, 1]).all()
    assert fresh.predictor.kappa[0] == 1.0


def test_another_scheduler_that_served_until_now_knows_better() -> None:
    """This one led once, and stood by since: what it knows goes. Its scrape is older than the other's."""
    fleet, tokens = experienced()
    successor = pool(2, replace(PAGE, prefix_queries=40_000.0))
    lease = successor.charge(request(0, chain("old")), 0, 0.0, 0, 100.0)
    successor.ledger.release(lease)
    for part in known(fleet, tokens):
        successor.restore(part, 1.0, 5.0, instead=True)
        successor.validate()
    assert (hits(successor) == hits(fleet)).all()
    assert successor.match(request(0, chain("old"))) is None
    successor.sampled("e0", 3.0, 5.1, replace(PAGE, prefix_queries=45_000.0))  # sent before the other's last one
    assert (hits(successor) == hits(fleet)).all()
    for number in range(2):
        successor.sampled(f"e{number}", 5.2, 5.3, replace(PAGE, prefix_queries=50_001.0))
    successor.validate()
    assert (hits(successor) == hits(fleet)).all()
    restarted = pool(2, None)
    give(restarted, known(fleet, tokens), 1.0, 5.0)
    for number in range(2):
        restarted.sampled(f"e{number}", 5.2, 5.3, PAGE)
    assert (successor.predictor.kappa == restarted.predictor.kappa).all()
    assert (successor.predictor.rates.columns == restarted.predictor.rates.columns).all(), "the speeds of all engines"


def test_an_engine_that_restarted_during_the_handover_is_not_believed() -> None:
    fleet, tokens = experienced()
    successor = pool(2)
    for part in known(fleet, tokens):
        successor.restore(part, 1.0, 5.0, instead=True)
    successor.sampled("e0", 5.2, 5.3, replace(PAGE, prefix_queries=10.0, started=1.8e9))
    successor.sampled("e1", 5.2, 5.3, PAGE)
    successor.validate()
    assert hits(successor)[:, 0].sum() == 0
    assert (hits(successor)[:, 1] == hits(fleet)[:, 1]).all()


def test_what_an_engine_computed_meanwhile_pushes_out_the_oldest() -> None:
    fleet, tokens = experienced()
    fresh = pool(2, None)
    give(fresh, known(fleet, tokens))
    fresh.sampled("e0", 0.0, 0.0, replace(PAGE, prefix_queries=PAGE.prefix_queries + CAPACITY - 60_000))
    fresh.validate()
    left = hits(fresh)[::2, 0]
    assert 0 < np.count_nonzero(left) < 20
    assert (np.diff(left > 0) >= 0).all(), "those used last are left"
    fresh.sampled("e1", 0.0, 0.0, replace(PAGE, prefix_hits=PAGE.prefix_queries, generation_tokens=2.0 * CAPACITY))
    assert hits(fresh)[:, 1].sum() == 0


def test_other_endpoints_and_other_addresses_get_nothing() -> None:
    fleet, tokens = experienced()
    fresh = Fleet()
    fresh.up(Endpoint("e0", "10.0.0.99:8000"))
    fresh.up(Endpoint("another", "10.0.0.1:8000"))
    give(fresh, known(fleet, tokens))
    assert fresh.prefix.entries == 0
    assert hits(fresh).sum() == 0


def test_an_endpoint_that_leaves_in_the_middle_takes_all_along() -> None:
    fleet, tokens = experienced()
    parts = [part for part in known(fleet, tokens) if getattr(part, "endpoint_id", "") == "e0"]
    fresh = pool(1, None)
    fresh.restore(parts[0], 0.0, 0.0)
    fresh.down("e0")
    fresh.up(Endpoint("e9", "10.0.0.9:8000"))  # in the same slot
    give(fresh, parts[1:])
    fresh.sampled("e9", 0.0, 0.0, PAGE)
    assert fresh.prefix.entries == 0
    assert fresh.predictor.kappa[0] == 1.0


def many(count: int) -> Fleet:
    """One endpoint with so many blocks, of prompts of eight."""
    fleet = pool(1)
    fleet.prefix.set_capacity(0, 1 << 40)
    for begin in range(0, count, 8):
        hashes = tuple(range(1 + begin, 9 + begin))
        fleet.prefix.insert(0, PrefixChain(hashes, tuple(range(256, 2304, 256))))
    return fleet


def test_parts_are_small_and_an_endpoint_is_cut_to_its_newest() -> None:
    fleet = many(ENDPOINT_BLOCKS + 8000)
    parts = [part for part in known(fleet, TokenEstimator()) if isinstance(part, PrefixesLearned)]
    assert [part.number for part in parts] == list(range(len(parts)))
    assert max(len(part.blocks) for part in parts) == PART_BLOCKS
    assert sum(len(part.blocks) for part in parts) == ENDPOINT_BLOCKS
    few = [part for part in known(fleet, TokenEstimator(), most=5000) if isinstance(part, PrefixesLearned)]
    assert sum(len(part.blocks) for part in few) == 5000
    assert few[0] == parts[0]


def test_a_part_that_is_missing_leaves_no_hole() -> None:
    fleet = many(3 * PART_BLOCKS)
    parts = [part for part in known(fleet, TokenEstimator()) if not isinstance(part, Common)]
    fresh = pool(1)
    give(fresh, [parts[0], parts[1], *parts[3:]])
    assert fresh.prefix.entries == PART_BLOCKS


def test_what_is_forgotten_between_two_parts_ends_the_rest() -> None:
    fleet = many(2 * PART_BLOCKS)
    parts = [part for part in known(fleet, TokenEstimator()) if not isinstance(part, Common)]
    fresh = pool(1)
    give(fresh, parts[:2])
    fresh.prefix.set_capacity(0, 256 * (PART_BLOCKS - 10))
    fresh.prefix.set_capacity(0, 1 << 40)
    give(fresh, parts[2:])
    assert fresh.prefix.entries == PART_BLOCKS - 10


def test_blocks_that_gave_way_while_it_is_taken_down_are_left_out() -> None:
    fleet = many(2 * PART_BLOCKS)
    parts = taken(fleet, TokenEstimator(), 0.0, 1 << 20)
    begun = [next(parts), next(parts), next(parts)]
    assert isinstance(begun[2], PrefixesLearned)
    fleet.prefix.set_capacity(0, 256 * (PART_BLOCKS + 5))
    (rest,) = parts
    assert isinstance(rest, PrefixesLearned)
    assert len(rest.blocks) == 5
    parts = taken(fleet, TokenEstimator(), 0.0, 1 << 20)
    next(parts), next(parts)
    fleet.down("e0")
    assert list(parts) == []


def test_an_answer_takes_its_place_again() -> None:
    index = PrefixIndex()
    index.add_slot(0, 1000)
    index.insert(0, PrefixChain((7,), (400,)))
    index.occupy(0, 300)
    other = PrefixIndex()
    other.add_slot(0, 1000)
    blocks = index.newest(0, 10)
    other.extend(0, blocks, index.sizes(0, blocks), None)
    other.validate()
    other.occupy(0, 350)
    other.validate()
    assert other.newest(0, 10)[-1] < 0, "the prompt was the oldest, and gave way"


def test_equations_without_a_solution_are_not_taken() -> None:
    fleet, tokens = experienced()
    common = next(part for part in known(fleet, tokens) if isinstance(part, Common))
    speeds = common.forecasts.speeds
    odd = replace(speeds.classes[0], squares=(1.0, 1.0, 1.0), products=(9.0, 9.0, 9.0))
    fresh = Fleet()
    fresh.restore(
        replace(common, forecasts=replace(common.forecasts, speeds=replace(speeds, classes=(odd,)))), 0.0, 0.0
    )
    fresh.up(Endpoint("e0", "10.0.0.0:8000", {"gpu": "fast"}))
    fresh.sampled("e0", 0.0, 0.0, PAGE)
    fresh.validate()
    assert fresh.predictor.rates.prefill[0] == pytest.approx(speeds.pool[0])


def test_a_name_that_is_no_unicode_is_left_out() -> None:
    tokens = TokenEstimator()
    tokens.learn("\ud800", 100, 25)
    tokens.learn("m", 100, 25)
    assert [each.model for each in tokens.learned()] == ["m"]


def test_it_enters_by_the_one_door() -> None:
    fleet, tokens = experienced()
    pipeline = build_pipeline(load("policy: default", need_endpoints=False), VirtualClock(), Random(0))
    pipeline.handle(EndpointUp(Endpoint("e0", "10.0.0.0:8000", {"gpu": "fast"})))
    for part in known(fleet, tokens):
        assert pipeline.handle(Restored(part, 1.0)) == []
    pipeline.validate()
    assert pipeline.tokens.bytes_per_token("m") == pytest.approx(tokens.bytes_per_token("m"))
    assert (hits(pipeline.fleet)[:, 0] == hits(fleet)[:, 0]).all()


def test_an_endpoint_that_was_never_scraped_is_taken_down_as_it_was() -> None:
    fleet, tokens = experienced()
    fresh = pool(2, None)
    give(fresh, known(fleet, tokens))
    again = [part for part in known(fresh, tokens) if isinstance(part, EndpointLearned)]
    assert [part.sample for part in again] == [PAGE, PAGE]
