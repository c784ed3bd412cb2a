"""The block manager against a naive model of the same rules, and the rules one by one."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fairlead.lab.engine.blocks import BlockManager


class Recorder:
    def __init__(self) -> None:
        self.events: list[object] = []

    def stored(self, hashes, parent, tokens, lora) -> None:
        self.events.append(("stored", tuple(hashes), parent, tokens(), lora))

    def removed(self, digest: int) -> None:
        self.events.append(("removed", digest))

    def cleared(self) -> None:
        self.events.append("cleared")


def test_new_blocks_come_from_the_least_recently_used_end():
    blocks = BlockManager(4)
    first = blocks.take(2)
    second = blocks.take(2)
    blocks.release(second)
    blocks.release(first)
    assert blocks.take(4) == [*reversed(second), *reversed(first)]


def test_of_a_chain_the_tail_is_forgotten_before_the_head():
    blocks = BlockManager(3)
    chain = blocks.take(3)
    blocks.seal(chain, [10, 11, 12])
    blocks.release(chain)
    blocks.take(1)
    assert blocks.find([10, 11, 12], 3) == chain[:2]
    blocks.take(1)
    assert blocks.find([10, 11, 12], 3) == chain[:1]


def test_a_free_block_that_is_held_again_is_not_evicted():
    blocks = BlockManager(2)
    (kept,) = blocks.take(1)
    blocks.seal([kept], [7])
    blocks.release([kept])
    assert blocks.idle([kept]) == 1
    blocks.hold([kept])
    assert blocks.idle([kept]) == 0
    assert blocks.free == 1
    assert blocks.take(1) != [kept]
    assert blocks.find([7], 1) == [kept]


def test_both_copies_are_kept_and_the_older_is_found():
    recorder = Recorder()
    blocks = BlockManager(2, recorder)
    old = blocks.take(1)
    new = blocks.take(1)
    blocks.seal(old, [5])
    blocks.seal(new, [5])
    assert blocks.find([5], 1) == old
    blocks.release(old)
    blocks.take(1)
    assert blocks.find([5], 1) == new
    blocks.release(new)
    blocks.take(1)
    assert blocks.find([5], 1) == []
    assert recorder.events == [("removed", 5), ("removed", 5)]
    blocks.validate()


def test_clearing_is_refused_while_a_block_is_held():
    recorder = Recorder()
    blocks = BlockManager(2, recorder)
    held = blocks.take(1)
    blocks.seal(held, [1])
    assert not blocks.clear()
    assert blocks.find([1], 1) == held
    blocks.release(held)
    assert blocks.clear()
    assert blocks.find([1], 1) == []
    assert recorder.events == ["cleared"]


class Naive:
    """The same rules in the most obvious way: lists, and a search for everything."""

    def __init__(self, total: int) -> None:
        self.queue = list(range(total))
        self.refs = dict.fromkeys(range(total), 0)
        self.sealed: list[tuple[int, int]] = []

    def find(self, hashes: list[int], limit: int) -> list[int]:
        found = []
        for digest in hashes[:limit]:
            copies = [block for d, block in self.sealed if d == digest]
            if not copies:
                break
            found.append(copies[0])
        return found

    def take(self) -> int:
        block = self.queue.pop(0)
        self.sealed = [(d, b) for d, b in self.sealed if b != block]
        self.refs[block] = 1
        return block

    def hold(self, block: int) -> None:
        if block in self.queue:
            self.queue.remove(block)
        self.refs[block] += 1

    def release(self, block: int) -> None:
        self.refs[block] -= 1
        if not self.refs[block]:
            self.queue.append(block)


class BlockMachine(RuleBasedStateMachine):
    """Requests come, share prefixes, grow and leave, in any order."""

    @initialize(total=st.integers(1, 12))
    def start(self, total: int) -> None:
        self.real = BlockManager(total)
        self.naive = Naive(total)
        self.requests: list[tuple[list[int], list[int]]] = []

    @rule(hashes=st.lists(st.integers(0, 3), max_size=6, unique=True), extra=st.integers(0, 3))
    def arrive(self, hashes: list[int], extra: int) -> None:
        hits = self.real.find(hashes, len(hashes))
        assert hits == self.naive.find(hashes, len(hashes))
        idle = sum(1 for block in hits if block in self.naive.queue)
        assert self.real.idle(hits) == idle
        missing = len(hashes) - len(hits) + extra
        if missing > self.real.free - idle:
            return
        self.real.hold(hits)
        for block in hits:
            self.naive.hold(block)
        new = self.real.take(missing)
        assert new == [self.naive.take() for _ in range(missing)]
        filled = new[: len(hashes) - len(hits)]
        self.real.seal(filled, hashes[len(hits) :])
        self.naive.sealed += list(zip(hashes[len(hits) :], filled, strict=True))
        self.requests.append((hits + new, hashes))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), digest=st.integers(0, 3))
    def fill(self, data: st.DataObject, digest: int) -> None:
        """A decode fills a block that others may have filled with the same."""
        held, hashes = data.draw(st.sampled_from(self.requests))
        if len(held) > len(hashes) and digest not in hashes:
            block = held[len(hashes)]
            self.real.seal([block], [digest])
            self.naive.sealed.append((digest, block))
            hashes.append(digest)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.requests) - 1))
        held, _ = self.requests.pop(index)
        self.real.release(held)
        for block in reversed(held):
            self.naive.release(block)

    @rule()
    def clear(self) -> None:
        idle = not any(held for held, _ in self.requests)
        assert self.real.clear() == idle
        if idle:
            self.naive.sealed = []
            self.requests = []

    @invariant()
    def same(self) -> None:
        if hasattr(self, "real"):
            self.real.validate([held for held, _ in self.requests])
            assert self.real.free == len(self.naive.queue)
            assert self.real.used == self.real.total - len(self.naive.queue)
            assert self.real.sealed() == len({digest for digest, _ in self.naive.sealed})

    def teardown(self) -> None:
        """Blocks are taken in the order in which they became free."""
        if hasattr(self, "real"):
            assert self.real.take(self.real.free) == self.naive.queue


TestBlockMachine = BlockMachine.TestCase
TestBlockMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
