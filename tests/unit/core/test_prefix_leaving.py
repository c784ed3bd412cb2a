"""What endpoints held that left: never matched again, and removed little by little."""

from random import Random

import pytest
from prefix_matches import matches

from fairlead.core.prefix import _PARTS, _SWEEP, PrefixIndex
from fairlead.core.request import PrefixChain

LONG = 5 * _SWEEP


def chain(seed: int, blocks: int) -> PrefixChain:
    rng = Random(seed)
    return PrefixChain(tuple(rng.getrandbits(64) for _ in range(blocks)), tuple(range(10, 10 * blocks + 10, 10)))


def marked(index: PrefixIndex) -> int:
    return sum(map(len, index._holders))


@pytest.fixture
def index() -> PrefixIndex:
    """Two endpoints hold the same long prompt, the second one also another."""
    index = PrefixIndex()
    for slot in (0, 1):
        index.add_slot(slot)
        index.insert(slot, chain(1, LONG))
    index.insert(1, chain(2, LONG))
    return index


def test_who_left_holds_nothing(index: PrefixIndex) -> None:
    index.drop_slot(1)
    assert matches(index, chain(1, LONG)) == {0: 10 * LONG}
    assert index.match(chain(2, LONG), 2) is None
    assert index.entries == LONG
    index.validate()


def test_its_blocks_go_with_the_prompts_that_come(index: PrefixIndex) -> None:
    index.drop_slot(1)
    left = marked(index)
    for number in range(10):
        index.insert(0, chain(100 + number, 1))
        assert left - _SWEEP <= marked(index) - 1 <= left, "no prompt pays for all of them"
        assert matches(index, chain(1, LONG)) == {0: 10 * LONG}
        index.validate()
        left = marked(index)
    assert marked(index) == LONG + 10 == index.entries


def test_who_comes_into_its_place_starts_with_nothing(index: PrefixIndex) -> None:
    index.drop_slot(1)
    index.insert(0, chain(3, 1))
    index.add_slot(1)
    assert index.match(chain(2, LONG), 2) is None
    index.insert(1, chain(2, 1))
    assert matches(index, chain(2, LONG)) == {1: 10}
    index.validate()


def test_who_left_gives_way_before_anybody_else() -> None:
    index = PrefixIndex(max_entries=2 * LONG)
    for slot in (0, 1, 2):
        index.add_slot(slot)
    index.insert(0, chain(1, LONG))
    index.insert(1, chain(2, LONG))
    index.drop_slot(1)
    index.insert(2, chain(3, LONG))
    index.validate()
    assert index.match(chain(1, LONG), 3) is not None and index.entries == 2 * LONG


def test_who_was_set_aside_gives_way_before_anybody_in_the_pool() -> None:
    index = PrefixIndex(max_entries=2 * LONG)
    for slot in (0, 1, 2):
        index.add_slot(slot)
    index.insert(0, chain(1, LONG))
    index.insert(1, chain(2, LONG))
    index.set_aside(1)
    assert index.entries == LONG
    index.insert(2, chain(3, LONG // 2))
    index.validate()
    assert matches(index, chain(1, LONG)) == {0: 10 * LONG}
    index.bring_back(1, 1 << 20)
    index.validate()
    assert index.match(chain(2, LONG), 3) is None, "what is being removed does not come back"


def test_blocks_are_spread_evenly() -> None:
    index = PrefixIndex()
    index.add_slot(0, 1 << 40)
    index.insert(0, chain(1, 40 * _PARTS))
    for number in range(40 * _PARTS):  # as prompts that end are remembered
        index.insert(0, PrefixChain((-number - 1,), (10,)))
    assert max(map(len, index._holders)) < 2 * 80
