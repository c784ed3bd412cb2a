"""An endpoint that leaves for a moment, as when its readiness probe fails, is known again when it comes back."""

from random import Random

import pytest
from msgspec.structs import replace

from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.fleet import KEPT_S, Fleet
from fairlead.core.prefix import ChainHasher
from fairlead.core.request import Request

HASHER = ChainHasher()
PAGE = Sample(
    waiting=0.0, running=0.0, kv_usage=0.1, block_size=16, num_blocks=20_000, prefix_queries=50_000.0,
    prefix_hits=20_000.0, generation_tokens=1000.0, started=1.7e9,
)  # fmt: skip
A, B, C = (Endpoint(f"n/{name}-rank-0", f"10.0.0.{number}:8000", uid=name) for number, name in enumerate("abc"))


def request(number: int) -> Request:
    prefix = HASHER.chain(b"m", Random(number).randbytes(24_000))
    return Request(number, 0.0, prompt_tokens=6000, prompt_bytes=24_000, prefix=prefix, stream=True)


@pytest.fixture
def fleet() -> Fleet:
    """Two endpoints; prompt 0 was sent to the first, prompt 1 to the second, which takes four times as long."""
    fleet = Fleet()
    for endpoint in (A, B):
        fleet.up(endpoint)
        fleet.sampled(endpoint.id, 0.0, 0.0, PAGE)
    for number in range(40):
        lease = fleet.charge(request(number % 2), number % 2, number, 0, 100.0)
        fleet.first_token(lease, number + 0.2 + 0.6 * (number % 2))
        fleet.ledger.release(lease)
    scrape(fleet, A, B, now=40.0)
    return fleet


def scrape(fleet: Fleet, *endpoints: Endpoint, now: float, page: Sample = PAGE) -> None:
    for endpoint in endpoints:
        fleet.sampled(endpoint.id, now, now, page)
    fleet.validate()


def cached(fleet: Fleet, number: int, endpoint: Endpoint) -> bool:
    column, slot = fleet.match(request(number)), fleet.table.slot(endpoint.id)
    return column is not None and slot is not None and column[slot] > 0.9


def test_it_is_known_again(fleet: Fleet) -> None:
    before = fleet.predictor.rates.prefill.tolist()
    free = fleet.table.free_cache.tolist()
    fleet.down(B.id)
    assert fleet.match(request(1)) is None
    scrape(fleet, A, now=42.0)
    fleet.up(B)
    assert cached(fleet, 1, B) and not cached(fleet, 0, B)
    scrape(fleet, B, now=42.0)
    assert cached(fleet, 0, A) and cached(fleet, 1, B)
    assert fleet.predictor.rates.prefill.tolist() == pytest.approx(before, rel=0.1)
    assert fleet.table.free_cache.tolist() == pytest.approx(free)
    assert not fleet.cold


def test_all_of_them_at_once_in_another_order(fleet: Fleet) -> None:
    fleet.down(A.id)
    fleet.down(B.id)
    fleet.up(B)
    fleet.up(A)
    scrape(fleet, A, B, now=42.0)
    assert cached(fleet, 0, A) and cached(fleet, 1, B)
    assert not cached(fleet, 0, B) and not cached(fleet, 1, A)


def test_one_that_flaps_between_two_scrapes(fleet: Fleet) -> None:
    for _ in range(3):
        fleet.down(B.id)
        fleet.up(B)
    scrape(fleet, B, now=42.0)
    assert cached(fleet, 1, B)


@pytest.mark.parametrize(
    "page",
    [replace(PAGE, prefix_queries=0.0, prefix_hits=0.0), replace(PAGE, started=1.7e9 + 5)],
    ids=["its counters began again", "another start"],
)
def test_an_engine_that_was_restarted_begins_with_nothing(fleet: Fleet, page: Sample) -> None:
    fleet.down(B.id)
    fleet.up(B)
    scrape(fleet, B, now=60.0, page=page)
    assert not cached(fleet, 1, B)
    assert fleet.cold == [B.id]


@pytest.mark.parametrize("change", [{"uid": "another"}, {"address": "10.0.0.9:8000"}, {"id": "n/x-rank-0"}])
def test_another_gets_nothing(fleet: Fleet, change: dict[str, str]) -> None:
    fleet.down(B.id)
    other = replace(B, **change)
    fleet.up(other)
    assert fleet.match(request(1)) is None
    scrape(fleet, other, now=42.0)
    assert fleet.match(request(1)) is None


def test_who_takes_its_place_ends_it(fleet: Fleet) -> None:
    fleet.down(B.id)
    fleet.up(C)
    fleet.down(C.id)
    fleet.up(B)
    scrape(fleet, B, now=42.0)
    assert fleet.match(request(1)) is None


def test_after_some_minutes_it_is_forgotten(fleet: Fleet) -> None:
    fleet.down(B.id)
    scrape(fleet, A, now=40.0 + KEPT_S + 1.0)
    fleet.up(B)
    scrape(fleet, B, now=40.0 + KEPT_S + 2.0)
    assert fleet.match(request(1)) is None


def test_one_that_was_never_scraped_leaves_nothing() -> None:
    """A later scrape could not show whether its engine is the same."""
    fleet = Fleet()
    fleet.up(A)
    fleet.prefix.insert(0, request(0).prefix)
    fleet.down(A.id)
    fleet.up(A)
    assert fleet.match(request(0)) is None


def test_what_it_computed_meanwhile_counts(fleet: Fleet) -> None:
    fleet.down(B.id)
    fleet.up(B)
    scrape(fleet, B, now=42.0, page=replace(PAGE, generation_tokens=1e9))
    assert not cached(fleet, 1, B)
