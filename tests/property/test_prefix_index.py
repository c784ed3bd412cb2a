"""The prefix index against a naive model, and the chains it is fed with."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from prefix_matches import matches

from fairlead.core.prefix import ChainHasher, PrefixIndex
from fairlead.core.request import NO_PREFIX, PrefixChain

HASHER = ChainHasher(finest=4, growth=4)
MAX_ENTRIES = 40

#: Few letters, so that prompts share beginnings; a step of 4 bytes, so that they part at borders and between them.
prompts = st.lists(st.sampled_from([b"aaaa", b"bbbb", b"abab", b"x"]), max_size=16).map(b"".join)


def chain_of(prompt: bytes) -> PrefixChain:
    return HASHER.chain(b"root", prompt)


class Naive:
    """Per slot: blocks with their sizes and parents, oldest first."""

    def __init__(self) -> None:
        self.slots: dict[int, OrderedDict[int, int]] = {}
        #: Those of slots whose endpoint left and may come back.
        self.aside: dict[int, OrderedDict[int, int]] = {}
        self.capacity: dict[int, int] = {}
        self.parent: dict[int, int] = {}

    def insert(self, slot: int, chain: PrefixChain) -> None:
        starts = (0, *chain.ends)[: len(chain.ends)]
        previous = 0
        for block in chain.hashes:
            self.parent[block] = previous
            previous = block
        for block, start, end in reversed(list(zip(chain.hashes, starts, chain.ends, strict=True))):
            self.slots[slot].pop(block, None)
            self.slots[slot][block] = end - start

    def trim(self, slot: int) -> None:
        while sum(self.slots[slot].values()) > self.capacity[slot] and self.slots[slot]:
            self.slots[slot].popitem(last=False)

    def matched(self, slot: int, chain: PrefixChain) -> int:
        longest = 0
        for block, end in zip(chain.hashes, chain.ends, strict=True):
            if block not in self.slots[slot]:
                break
            longest = end
        return longest

    def holes(self) -> list[int]:
        """Blocks that an endpoint holds without the block before."""
        return [
            block
            for blocks in self.slots.values()
            for block in blocks
            if self.parent[block] and self.parent[block] not in blocks
        ]


class IndexMachine(RuleBasedStateMachine):
    """`max_entries` is out of reach here, so the model says exactly what must be known."""

    limit = 1_000_000

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(self.limit)
        self.model = Naive()

    slots = st.sampled_from([0, 1, 64])

    @initialize()
    def begin(self) -> None:
        for slot, capacity in ((0, 40), (1, 80)):
            self.add_slot(slot, capacity)

    def known(self, slot: int) -> bool:
        return slot in self.model.slots

    @rule(slot=slots, capacity=st.sampled_from([0, 20, 40, 80]))
    def add_slot(self, slot: int, capacity: int) -> None:
        if not self.known(slot):
            self.index.add_slot(slot, capacity)
            self.model.aside.pop(slot, None)
            self.model.slots[slot] = OrderedDict()
            self.model.capacity[slot] = capacity

    @rule(slot=slots)
    def drop_slot(self, slot: int) -> None:
        if self.known(slot):
            self.index.drop_slot(slot)
            del self.model.slots[slot], self.model.capacity[slot]

    @rule(slot=slots)
    def set_aside(self, slot: int) -> None:
        if self.known(slot):
            self.index.set_aside(slot)
            self.model.aside[slot] = self.model.slots.pop(slot)
            del self.model.capacity[slot]

    @rule(slot=slots, capacity=st.sampled_from([0, 20, 40, 80]))
    def bring_back(self, slot: int, capacity: int) -> None:
        if not self.known(slot):
            self.index.bring_back(slot, capacity)
            self.model.slots[slot] = self.model.aside.pop(slot, OrderedDict())
            self.model.capacity[slot] = capacity
            self.model.trim(slot)

    @rule(slot=slots)
    def forget(self, slot: int) -> None:
        self.index.forget(slot)
        self.model.aside.pop(slot, None)

    @rule(slot=slots)
    def clear(self, slot: int) -> None:
        if self.known(slot):
            self.index.drop_slot(slot)
            self.index.add_slot(slot, self.model.capacity[slot])
            self.model.slots[slot].clear()

    @rule(slot=slots, capacity=st.sampled_from([-5, 0, 7, 36, 64, 200]))
    def set_capacity(self, slot: int, capacity: int) -> None:
        if self.known(slot):
            self.index.set_capacity(slot, capacity)
            self.model.capacity[slot] = capacity
            self.model.trim(slot)

    @precondition(lambda self: self.model.slots)
    @rule(data=st.data(), prompt=prompts)
    def insert(self, data: st.DataObject, prompt: bytes) -> None:
        slot = data.draw(st.sampled_from(sorted(self.model.slots)))
        chain = chain_of(prompt)
        self.index.insert(slot, chain)
        self.model.insert(slot, chain)
        self.model.trim(slot)

    @precondition(lambda self: self.model.slots)
    @rule(data=st.data(), prompt=prompts)
    def take_back(self, data: st.DataObject, prompt: bytes) -> None:
        """What no other prompt goes on from, so that no hole remains."""
        slot = data.draw(st.sampled_from(sorted(self.model.slots)))
        held, hashes = self.model.slots[slot], chain_of(prompt).hashes
        stems = {self.model.parent[block] for block in held if block not in hashes}
        kept = max((depth for depth, block in enumerate(hashes, 1) if block in stems), default=0)
        self.index.take_back(slot, hashes[kept:])
        for block in hashes[kept:]:
            held.pop(block, None)

    @rule(prompt=prompts)
    def match(self, prompt: bytes) -> None:
        chain = chain_of(prompt)
        expected = {slot: m for slot in self.model.slots if (m := self.model.matched(slot, chain))}
        column = self.index.match(chain, 65)
        if expected:
            assert column is not None
            assert list(column) == [expected.get(slot, 0) for slot in range(65)]
        else:
            assert column is None

    @invariant()
    def consistent(self) -> None:
        self.index.validate()
        assert self.index.entries == sum(map(len, self.model.slots.values()))

    @invariant()
    def no_holes(self) -> None:
        assert self.model.holes() == []


class BoundedMachine(IndexMachine):
    """With a small `max_entries` the model cannot say who gives way, but what is left must still be sound."""

    limit = MAX_ENTRIES

    @rule(prompt=prompts)
    def match(self, prompt: bytes) -> None:
        chain = chain_of(prompt)
        for slot, matched in matches(self.index, chain).items():
            assert matched <= self.model.matched(slot, chain), "more than was ever inserted"

    @invariant()
    def consistent(self) -> None:
        self.index.validate()
        assert self.index.entries <= MAX_ENTRIES

    @invariant()
    def no_holes(self) -> None:
        blocks = {slot: set(lru) for slot, lru in self.index._lru.items()}
        for held in blocks.values():
            for block in held:
                assert self.model.parent[block] == 0 or self.model.parent[block] in held


TestExact = IndexMachine.TestCase
TestExact.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBounded = BoundedMachine.TestCase
TestBounded.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(0, 5), max_size=6)), max_size=12))
def test_hashes_that_collide_lose_no_block_and_raise_nothing(sent: list[tuple[int, list[int]]]) -> None:
    """Whoever knows the hash can make prompts whose blocks collide."""
    index = PrefixIndex()
    for slot in (0, 1):
        index.add_slot(slot)
    for slot, hashes in sent:
        index.insert(slot, PrefixChain(tuple(hashes), tuple(range(10, 10 * len(hashes) + 10, 10))))
        index.validate()
        assert {*hashes} <= {*index.newest(slot, 100)}


@given(shared=st.binary(max_size=400), one=st.binary(max_size=200), other=st.binary(max_size=200))
def test_chains_agree_up_to_the_last_border_that_the_prompts_share(shared: bytes, one: bytes, other: bytes) -> None:
    first, second = shared + one, shared + other
    common = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), -1)
    common = min(len(first), len(second)) if common < 0 else common
    left, right = chain_of(first), chain_of(second)
    agree = sum(a == b for a, b in zip(left.hashes, right.hashes, strict=False))
    assert agree == len(HASHER.borders(common)) - 1
    assert left.hashes[:agree] == right.hashes[:agree]
    assert left.ends[:agree] == right.ends[:agree]


@given(prompt=st.binary(min_size=4, max_size=600), root=st.binary(max_size=20))
def test_another_root_shares_nothing(prompt: bytes, root: bytes) -> None:
    chain = HASHER.chain(root, prompt)
    assert (set(chain.hashes) & set(chain_of(prompt).hashes) == set()) == (root != b"root")


@given(length=st.integers(0, 3000), finest=st.integers(1, 300), growth=st.integers(1, 64))
def test_chains_are_well_formed_and_short(length: int, finest: int, growth: int) -> None:
    hasher = ChainHasher(finest, growth, max_bytes=2000)
    chain = hasher.chain(b"", bytes(length))
    assert len(chain.hashes) == len(chain.ends) == len(set(chain.hashes))
    assert list(chain.ends) == sorted(set(chain.ends))
    covered = min(length, 2000)
    assert not chain.ends or chain.ends[-1] <= covered
    sizes = np.diff((0, *chain.ends))
    assert all(size >= finest for size in sizes)
    if chain != NO_PREFIX:
        assert covered - chain.ends[-1] < max(finest, chain.ends[-1] // growth)
    else:
        assert covered < finest


def test_growing_blocks_keep_long_prompts_short() -> None:
    hasher = ChainHasher()
    counts = [len(hasher.chain(b"", bytes(length)).hashes) for length in (255, 256, 24_000, 490_000, 64 << 20)]
    assert counts == [0, 1, 66, 165, 234]


@pytest.mark.parametrize(("finest", "growth"), [(0, 32), (256, 0), (-1, 1)])
def test_senseless_block_sizes_are_refused(finest: int, growth: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        ChainHasher(finest, growth)


def test_whoever_has_more_than_a_fair_share_gives_way() -> None:
    index = PrefixIndex(max_entries=20)
    for slot in (0, 1):
        index.add_slot(slot, 10_000)
    small = chain_of(b"s" * 16)
    index.insert(1, small)
    for letter in b"abcdefgh":
        index.insert(0, chain_of(bytes([letter]) * 40))
    index.validate()
    assert index.entries == 20
    assert matches(index, small) == {1: 16}, "the endpoint that fills the memory pays for it"
    index.add_slot(2, 10_000)
    index.insert(2, chain_of(b"t" * 16))
    assert matches(index, chain_of(b"t" * 16)) == {2: 16}, "a newcomer gets its share"
    assert matches(index, small) == {1: 16}
    index.validate()


def test_of_two_with_more_than_their_share_the_one_that_grows_gives_way() -> None:
    index = PrefixIndex(max_entries=18)
    for slot in (0, 1, 2):
        index.add_slot(slot, 10_000)
    old = chain_of(b"o" * 40)
    index.insert(2, old)
    for letter in b"cdef":
        index.insert(0, chain_of(bytes([letter]) * 40))
    assert matches(index, old) == {2: old.ends[-1]}
    index.validate()
