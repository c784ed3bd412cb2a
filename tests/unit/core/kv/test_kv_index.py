"""Rules of the exact index that the captured streams do not show."""

import random
import time
import tracemalloc
from array import array

import msgspec
import pytest
from kv_blocks import apply_all, engine_keys, held
from xxhash import xxh3_64_digest

from fairlead.core.kv.cache import EVERYONE, MOST_SIZES, UNNAMED, RankCache
from fairlead.core.kv.events import STEP, AllCleared, BlocksRemoved, BlocksStored, apply
from fairlead.core.kv.index import KvIndex
from fairlead.core.kv.keys import EngineSpace, prompt_keys
from fairlead.core.kv.match import BlockChain, KvMatch
from fairlead.core.kv.snapshot import Place, Shelved, save
from fairlead.core.kv.tiers import Tier, tier_of

BLOCK = 4


def tokens(*contents: int) -> bytes:
    return b"".join(array("I", [content] * BLOCK).tobytes() for content in contents)


class Fixture:
    """An index of three endpoints."""

    def __init__(self, **options: int) -> None:
        self.index = KvIndex(**options)  # type: ignore[arg-type]
        for slot in range(3):
            self.index.add_slot(slot)

    def cache(self, slot: int = 0, rank: int = 0) -> RankCache:
        return self.index.rank(slot, rank, "m")

    def store(self, contents: range, parent: int = 0, slot: int = 0, **more: object) -> None:
        hashes = [100 + content for content in contents]
        rank = int(more.pop("rank", 0))  # type: ignore[call-overload]
        event = BlocksStored(hashes, parent, tokens(*contents), BLOCK, **more)  # type: ignore[arg-type]
        apply_all(self.index, self.cache(slot, rank), event, 0.0)

    def apply(self, event: BlocksStored | BlocksRemoved | AllCleared, slot: int = 0) -> None:
        apply_all(self.index, self.cache(slot), event, 0.0)

    def find(self, contents: range, lora: str = "") -> KvMatch | None:
        root = self.index.space.root("m", lora)
        return self.index.look_up(BlockChain(prompt_keys(root, tokens(*contents), BLOCK), BLOCK), 3)

    def depths(self, contents: range, lora: str = "") -> list[int]:
        found = self.find(contents, lora)
        self.index.validate()
        return [0, 0, 0] if found is None else [int(depth) for depth in found.blocks]


def test_groups_that_do_not_keep_whole_prefixes_are_skipped() -> None:
    one = Fixture()
    one.store(range(3), kind="sliding_window", group=1)
    assert one.depths(range(3)) == [0, 0, 0]
    one.store(range(3), group=1)  # its kind is remembered
    assert one.depths(range(3)) == [0, 0, 0]
    one.store(range(3), kind="mla_attention", group=0)
    assert one.depths(range(4)) == [3, 0, 0]


def test_a_hit_ends_where_every_group_holds_its_last_blocks() -> None:
    # As vLLM 0.32 reports a prompt of 10 blocks with a sliding window of 9 tokens: the sliding group first, with the
    # tokens of all blocks, but only its last blocks; then the group of full attention.
    one = Fixture()
    sliding = BlocksStored([108, 109], 0, tokens(*range(10)), BLOCK, group=0, kind="sliding_window", window=9)
    one.apply(sliding)
    one.store(range(10), group=1, kind="full_attention")
    assert one.depths(range(10)) == [10, 0, 0]
    assert one.depths(range(9)) == [0, 0, 0]  # a branch: the blocks of its window are gone
    one.apply(BlocksStored([103, 104], 0, tokens(*range(5)), BLOCK, group=0, kind="sliding_window", window=9))
    assert one.depths(range(7)) == [5, 0, 0]
    one.apply(sliding)
    one.apply(BlocksRemoved([109], group=0))
    assert one.depths(range(10)) == [10, 0, 0]  # one copy is left
    one.apply(BlocksRemoved([109], group=0))
    assert one.depths(range(10)) == [5, 0, 0]
    one.apply(AllCleared())
    one.store(range(10), group=1)
    assert one.depths(range(10)) == [0, 0, 0]


def test_a_hit_ends_with_a_state_of_each_mamba_group() -> None:
    one = Fixture()
    for group, ends in ((0, [101, 103]), (1, [101])):
        one.apply(BlocksStored(ends, 0, tokens(*range(4)), BLOCK, group=group, kind="mamba"))
    one.store(range(4), group=2, kind="full_attention")
    assert one.depths(range(4)) == [2, 0, 0]


def test_models_of_sliding_windows_only_are_matched_by_their_own_tokens() -> None:
    # As vLLM 0.32 reports it: the tokens of the whole prompt, and the hashes of what a hit at its end needs.
    window = {"group": 0, "kind": "sliding_window", "window": 9}
    one = Fixture()
    one.apply(BlocksStored([108, 109], 0, tokens(*range(10)), BLOCK, **window))  # type: ignore[arg-type]
    assert one.depths(range(12)) == [10, 0, 0]
    assert one.depths(range(9)) == [0, 0, 0]
    one.apply(BlocksStored([110], 109, tokens(10), BLOCK, **window))  # type: ignore[arg-type]
    assert one.depths(range(12)) == [11, 0, 0]
    assert one.cache().block_size == BLOCK and [head.hashes for head in one.cache().stores()] == []
    one.apply(BlocksRemoved([108], group=0))
    assert one.depths(range(10)) == [0, 0, 0]
    assert one.depths(range(12)) == [11, 0, 0]
    one.store(range(20, 23), slot=1, **window)  # a prompt within the window, and all its blocks
    assert one.depths(range(20, 22)) == [0, 2, 0]
    assert one.depths(range(20, 21)) == [0, 1, 0], "a beginning needs no more than there is"
    assert one.cache(1).stores(), "they say why a prediction failed"
    match = one.find(range(20, 23))
    assert match is not None and match.tiers[:, 1].tolist() == [3.0]
    two = Fixture()
    assert sum(Shelved(two.index, snapshot(one)).enter("a", 2, lambda cache, at: None)) == 2
    two.index.tend(0.0)
    assert two.depths(range(12)) == [0, 0, 11]
    one.apply(AllCleared())
    one.index.restarted(one.cache(1))
    assert one.depths(range(12)) == one.depths(range(20, 23)) == [0, 0, 0]


def test_ranks_of_a_model_of_sliding_windows_only() -> None:
    one = Fixture()
    for rank, end in ((0, 2), (1, 4)):
        one.store(range(end), rank=rank, group=0, kind="sliding_window", window=9)
    match = one.find(range(4))
    assert match is not None and match.by_rank(0) == [2, 4] and match.expected().blocks[0] == 3


def test_models_of_mamba_groups_only_are_matched_by_the_last_state_of_each_store() -> None:
    one = Fixture()
    one.apply(BlocksStored([101, 103], 0, tokens(*range(4)), BLOCK, group=0, kind="mamba"))
    one.apply(BlocksStored([105], 103, tokens(4, 5), BLOCK, group=0, kind="mamba"))
    one.apply(BlocksStored([109], 107, tokens(8, 9), BLOCK, group=0, kind="mamba"))  # a parent that is not known
    assert one.depths(range(12)) == [6, 0, 0]
    assert one.depths(range(5)) == [4, 0, 0]


@pytest.mark.parametrize("tokens_of", [3, 9, 0])
def test_stores_of_such_models_that_contradict_themselves_are_refused(tokens_of: int) -> None:
    one = Fixture()
    content = tokens(*range(4))[: 4 * tokens_of]
    event = BlocksStored([101, 102], 0, content, BLOCK, group=0, kind="sliding_window", window=9)
    if not content:
        one.apply(event)  # only hashes: they match nothing
        assert one.depths(range(2)) == [0, 0, 0]
        return
    with pytest.raises(ValueError, match="tokens"):
        one.apply(event)


def test_a_group_whose_kind_is_reported_late_is_no_longer_counted() -> None:
    one = Fixture()
    one.store(range(2), group=0)
    one.store(range(3), kind="full_attention", group=1)
    assert one.depths(range(3)) == [2, 0, 0]
    one.store(range(2, 3), 101, kind="sliding_window", group=0)
    assert one.depths(range(3)) == [3, 0, 0] and one.index.entries == 3


def test_unknown_blocks_of_another_tier_do_not_hide_the_known_ones() -> None:
    one = Fixture()
    one.apply(BlocksStored([7, 8], medium="CPU", group=0))
    one.store(range(3), kind="full_attention", group=1)
    assert one.depths(range(3)) == [3, 0, 0]


@pytest.mark.parametrize("content", [b"", tokens(0, 1)])
def test_events_without_a_group_are_of_the_first_one_that_is_indexed(content: bytes) -> None:
    one = Fixture()
    one.store(range(3), kind="sliding_window", group=0)
    one.store(range(3), kind="full_attention", group=1)
    one.apply(BlocksStored([100, 101], 0, content, BLOCK, medium="CPU", group=UNNAMED))
    one.apply(BlocksRemoved([100, 101, 102], "GPU", 1))
    assert one.depths(range(3)) == [2, 0, 0]
    one.apply(BlocksRemoved([101], "CPU", UNNAMED))
    assert one.depths(range(3)) == [1, 0, 0]


def test_events_without_a_group_neither_rename_nor_clear_another_group() -> None:
    one = Fixture()
    one.store(range(3), kind="full_attention", group=UNNAMED)
    one.store(range(3), kind="sliding_window", group=UNNAMED)
    assert one.depths(range(3)) == [3, 0, 0]
    one.store(range(1), kind="sliding_window", group=0)
    one.store(range(3), kind="full_attention", group=1)
    one.apply(BlocksStored([100], 0, tokens(0, 1), BLOCK, medium="CPU", group=UNNAMED, kind="sliding_window"))
    one.store(range(3, 4), 102, group=1)
    assert one.depths(range(4)) == [4, 0, 0]


def test_adapters_that_were_named_last_are_remembered() -> None:
    one = Fixture()
    names = [f"a{number}" for number in range(10_000)]
    for named in (names, names[:1], ["new"]):
        one.index.know_adapters(named)
    assert [*one.index.adapters] == [*names[2:], "a0", "new"]


def test_endless_groups_are_refused() -> None:
    one = Fixture()
    for group in range(64):
        one.store(range(1), group=group, kind="full_attention")
    with pytest.raises(ValueError, match="64"):
        one.store(range(1), group=64, kind="full_attention")
    assert one.depths(range(1)) == [1, 0, 0] and len(one.cache().kinds) == 64


def test_all_groups_must_have_a_block() -> None:
    one = Fixture()
    one.store(range(3), kind="full_attention", group=0)
    one.store(range(2), kind="full_attention", group=1)
    assert one.depths(range(3)) == [2, 0, 0]


def test_ranks_count_apart_and_the_best_is_named() -> None:
    one = Fixture()
    one.store(range(2), rank=0)
    one.store(range(5), rank=1)
    found = one.find(range(6))
    assert found is not None and found.blocks[0] == 5
    one.apply(AllCleared())
    assert one.depths(range(6)) == [5, 0, 0]
    apply_all(one.index, one.cache(0, 1), AllCleared(), 0.0)
    assert one.depths(range(6)) == [0, 0, 0] and one.index.entries == 0


def test_of_several_ranks_the_mean_is_expected() -> None:
    one = Fixture()
    one.store(range(2), rank=0)
    one.store(range(6), rank=1)
    one.store(range(4), slot=1)
    one.cache(0, 2)  # holds nothing yet
    one.cache(0, 3)
    found = one.find(range(8))
    assert found is not None
    assert [found.by_rank(slot) for slot in range(3)] == [[2, 6, 0, 0], [], []]
    expected = found.expected()
    assert (expected.blocks.tolist(), expected.tiers.sum(axis=0).tolist()) == ([2, 4, 0], [2, 4, 0])
    # A prompt of six blocks that was just sent is on one of the ranks: the four that lack 4, 0, 6 and 6 of its blocks
    # have it with that chance.
    keys = prompt_keys(one.index.space.root("m", ""), tokens(*range(8)), BLOCK)
    one.index.speculation.add(0, keys[:6], 9.0)
    found = one.find(range(8))
    assert found is not None and found.expected().blocks.tolist() == [2 + 16 / 4**2, 4, 0]
    # Ranks that no longer exist do not count.
    one.index.keep_ranks(0, {1})
    found = one.find(range(8))
    assert found is not None and found.expected().blocks.tolist() == [6, 4, 0]


def test_shared_storage_counts_for_ranks_that_hold_nothing() -> None:
    one = Fixture()
    one.index.add_slot(EVERYONE)
    event = BlocksStored([100, 101], 0, tokens(0, 1), BLOCK, medium="SHARED_STORAGE")
    apply_all(one.index, one.index.rank(EVERYONE, 0, "m"), event, 0.0)
    one.store(range(4), rank=0)
    one.cache(0, 1)
    found = one.find(range(4))
    assert found is not None
    assert (found.by_rank(0), found.expected().blocks.tolist()) == ([4, 2], [3, 2, 2])


def test_tiers() -> None:
    one = Fixture()
    one.store(range(6))
    one.apply(BlocksStored([102, 103, 104, 105], medium="CPU"))
    one.apply(BlocksStored([105], medium="NFS-7"))
    one.apply(BlocksRemoved([105, 104, 103], "GPU"))
    one.apply(BlocksRemoved([105], "CPU"))
    found = one.find(range(8))
    assert found is not None
    assert found.tiers[:, 0].tolist() == [3, 2, 0, 1] and found.blocks[0] == 6
    assert [tier_of(medium) for medium in (None, "", "GPU", "cpu", "Disk", "tape")] == [0, 0, 0, 1, 2, 3]


def test_storage_that_all_share() -> None:
    one = Fixture()
    one.index.add_slot(EVERYONE)
    one.store(range(4))
    one.store(range(2), slot=1)
    shared = one.index.rank(EVERYONE, 0, "m")
    apply_all(one.index, shared, BlocksStored([102, 103, 104], medium="SHARED_STORAGE"), 0.0)
    apply_all(one.index, shared, BlocksStored([104], 103, tokens(4), BLOCK, medium="SHARED_STORAGE"), 0.0)
    found = one.find(range(6))
    assert found is not None
    assert found.blocks.tolist() == [5, 5, 0]
    one.find([99])
    matcher = one.index.matcher
    assert (matcher.lookups, matcher.lookup_hits, matcher.slot_hits) == (2, 5, 5)
    assert found.tiers.tolist() == [[4, 2, 0], [0, 0, 0], [1, 3, 0]]
    one.index.clear(EVERYONE)
    assert one.depths(range(6)) == [4, 2, 0]


def test_shared_storage_counts_for_endpoints_that_hold_nothing() -> None:
    one = Fixture()
    one.index.add_slot(EVERYONE)
    shared = one.index.rank(EVERYONE, 0, "m")
    event = BlocksStored([101, 102], 0, tokens(0, 1), BLOCK, medium="SHARED_STORAGE")
    apply_all(one.index, shared, event, 0.0)
    assert one.depths(range(4)) == [2, 2, 2]
    one.store(range(3), slot=1)
    found = one.find(range(4))
    assert found is not None
    assert found.blocks.tolist() == [2, 3, 2]
    assert found.tiers.tolist() == [[0, 3, 0], [0, 0, 0], [2, 0, 2]]
    one.apply(AllCleared(), slot=1)
    assert one.depths(range(4)) == [2, 2, 2]
    one.index.validate()


def test_small_keys_are_valid() -> None:
    one = Fixture()
    one.index.store(one.index.shelf(one.cache(), 0, tier_of("GPU")), [7], [5], 0)
    one.index.validate()


def test_a_tier_update_of_unknown_blocks_is_ignored() -> None:
    one = Fixture()
    one.apply(BlocksStored([1, 2], medium="CPU"))
    assert one.index.entries == 0 and one.cache().counts.nameless == 2


def test_adapters_extras_and_models_keep_blocks_apart() -> None:
    one = Fixture()
    one.store(range(2), lora="a")
    assert one.depths(range(2)) == [0, 0, 0] and one.depths(range(2), "a") == [2, 0, 0]
    one.store(range(2), slot=1, extras=[("salt",), ()])
    assert one.depths(range(2)) == [0, 0, 0]
    other = one.index.rank(2, 0, "other")
    apply_all(one.index, other, BlocksStored([100, 101], 0, tokens(0, 1), BLOCK), 0.0)
    assert one.depths(range(2)) == [0, 0, 0]
    assert one.index.rank(2, 0, "m").blocks == 0  # another model on the same slot is another life
    while one.index.tend(0.0):
        pass
    one.index.validate()


def test_orphans_wait_for_their_parent_even_from_elsewhere() -> None:
    one = Fixture()
    one.store(range(3, 6), parent=102)
    one.store(range(6, 8), parent=105)
    assert one.depths(range(8)) == [0, 0, 0] and len(one.index.orphans) == 5
    one.apply(BlocksRemoved([107]))
    one.store(range(3), slot=1)
    assert len(one.index.orphans) == 0
    one.apply(BlocksStored([100, 101, 102], 0, tokens(0, 1, 2), BLOCK))
    assert one.depths(range(8)) == [7, 3, 0]


def test_a_parent_that_is_stored_again_and_again_is_noted_once() -> None:
    index, orphan, parent = Fixture().index, BlocksStored([101], 100, tokens(1), BLOCK), tokens(0)
    cache = index.rank(0, 0, "m")
    for _ in range(1000):  # its publisher is always busy, so no orphan is adopted meanwhile
        apply(index, cache, orphan, 0.0)
        apply(index, cache, BlocksStored([100], 0, parent, BLOCK), 0.0)
        assert len(index.orphans.known_parents) == 1
        apply(index, cache, BlocksRemoved([101]), 0.0)
        assert index.idle
        apply(index, cache, BlocksRemoved([100]), 0.0)


def test_an_orphan_with_many_copies_is_adopted_in_no_time() -> None:
    one = Fixture()
    one.store(range(1, 2), parent=100)
    (waiting,) = one.index.orphans.adopt("m", 100)
    for _ in range(300_000):
        one.index.orphans.add(waiting)
    apply(one.index, one.cache(), BlocksStored([100], 0, tokens(0), BLOCK), 0.0)
    started = time.thread_time()
    assert not one.index.tend(0.0)
    assert time.thread_time() - started < 0.5
    one.apply(BlocksRemoved([101]))
    assert one.depths(range(2)) == [2, 0, 0]
    assert one.cache().counts.copied == 299_999


def test_the_copies_of_an_orphan_are_added_to_those_that_came_after_its_parent() -> None:
    one = Fixture()
    for _ in range(3):
        one.store(range(1, 2), parent=100)
    for event in (BlocksStored([100], 0, tokens(0), BLOCK), BlocksStored([101], 100, tokens(1), BLOCK)):
        apply(one.index, one.cache(), event, 0.0)
    while one.index.tend(0.0):
        pass
    for left in (2, 2, 2, 1):
        one.apply(BlocksRemoved([101]))
        assert one.depths(range(2)) == [left, 0, 0]


def test_many_orphans_of_one_parent_are_adopted_in_parts() -> None:
    one = Fixture()
    for number in range(1, 251):
        one.store(range(number, number + 1), parent=100)
    apply(one.index, one.cache(), BlocksStored([100], 0, tokens(0), BLOCK), 0.0)
    for left in (150, 50, 0):
        assert one.index.tend(0.0) == (left > 0) and len(one.index.orphans) == left
    assert one.cache().blocks == 251


def test_orphans_of_large_blocks_are_bounded_by_their_bytes() -> None:
    one = Fixture()
    one.index.orphans.most_bytes = 100_000
    size = 1024
    for number in range(100):
        event = BlocksStored([200 + number], 7 + 1000 * number, bytes(4 * size), size, extras=[("x" * 100,)])
        one.apply(event)
    assert 15 < len(one.index.orphans) < 25
    assert 90_000 < one.index.orphans.nbytes <= 100_000
    assert one.index.nbytes > one.index.orphans.nbytes
    one.apply(BlocksRemoved([299]))
    one.index.validate()
    one.index.clear(0)
    while one.index.tend(0.0):
        pass
    assert one.index.orphans.nbytes == 0


def test_orphans_are_bounded_and_expire() -> None:
    one = Fixture(max_orphans=10, orphan_ttl=60)
    for first in range(0, 40, 2):
        one.store(range(first + 1, first + 2), parent=10_000 + first)
    assert len(one.index.orphans) == 10
    one.index.tend(59.0)
    assert len(one.index.orphans) == 10
    one.index.tend(60.0)
    assert len(one.index.orphans) == 0
    one.store(range(1, 2), parent=5)
    one.apply(AllCleared())
    assert len(one.index.orphans) == 0


def test_two_hashes_of_one_content() -> None:
    one = Fixture()
    one.store(range(2))
    one.apply(BlocksStored([900, 901], 0, tokens(0, 1), BLOCK))
    one.apply(BlocksRemoved([101]))
    assert one.depths(range(2)) == [2, 0, 0]
    one.apply(BlocksRemoved([901]))
    assert one.depths(range(2)) == [1, 0, 0]
    one.apply(AllCleared())
    assert one.index.entries == 0
    one.index.validate()


@pytest.mark.parametrize(
    "event",
    [
        BlocksStored([1, 2], 0, tokens(1), BLOCK),
        BlocksStored([1], 0, tokens(1), 0),
        BlocksStored([1], 0, tokens(1), -4),
        BlocksStored([1], 0, tokens(1)[:-2], BLOCK),
        BlocksStored([1], 0, tokens(1), BLOCK, extras=[(), ()]),
    ],
)
def test_events_that_contradict_themselves(event: BlocksStored) -> None:
    one = Fixture()
    with pytest.raises(ValueError):
        one.apply(event)
    assert one.index.entries == 0


class Zeros:
    """A stream of tokens that are all 0, and how many were taken at a time."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.taken: list[int] = []

    def __len__(self) -> int:
        return self.count

    def take(self, count: int) -> bytes:
        self.taken.append(count)
        return bytes(4 * count)


def test_large_blocks_take_a_step_each() -> None:
    one = Fixture()
    for size, blocks, of_each in ((1000, 9, [4, 4, 1]), (1056, 4, [3, 1]), (16_384, 2, [1, 1])):
        stream = Zeros(size * blocks)
        hashes = [size + number for number in range(blocks)]
        steps = apply(one.index, one.cache(), BlocksStored(hashes, 0, stream, size), 0.0)
        assert steps is not None and list(steps) == of_each
        assert stream.taken == [size * count for count in of_each]
    stream = Zeros(16_385)
    with pytest.raises(ValueError, match="a block of 16385 tokens has more than 16384"):
        apply(one.index, one.cache(), BlocksStored([7], 0, stream, 16_385), 0.0)
    assert not stream.taken and one.index.entries == 15


def test_long_events_take_several_steps() -> None:
    one = Fixture()
    count = 3 * STEP + 5
    hashes = [10_000 + at for at in range(count)]
    steps = apply(one.index, one.cache(), BlocksStored(hashes, 0, tokens(*range(count)), BLOCK), 0.0)
    assert steps is not None and one.index.entries == 0
    assert list(steps) == [STEP, STEP, STEP, 5]
    assert one.depths(range(count))[0] == count
    steps = apply(one.index, one.cache(), BlocksRemoved(hashes[::-1]), 0.0)
    assert steps is not None
    next(steps)
    assert one.depths(range(count))[0] == count - STEP
    one.index.drop_slot(0)  # the endpoint leaves in between
    assert sum(steps) == count - STEP
    while one.index.tend(0.0):
        pass
    one.index.validate()
    assert one.index.entries == 0


def test_clearing_is_at_once_and_cleaning_in_pieces() -> None:
    one = Fixture()
    rng = random.Random(1)
    hashes = [rng.getrandbits(64) for _ in range(20_000)]
    for start in range(0, 20_000, 100):
        one.apply(BlocksStored(hashes[start : start + 100], 0, tokens(*range(start, start + 100)), BLOCK))
    one.store(range(50), slot=1)
    one.index.clear(0)
    assert one.depths(range(50)) == [0, 50, 0]
    pieces = 1
    while one.index.tend(0.0):
        pieces += 1
    assert pieces > 15 and one.index.entries == 50
    one.index.validate()


def test_a_rank_that_clears_all_the_time_takes_little_memory() -> None:
    index, content = Fixture().index, tokens(0)
    cache = index.rank(0, 0, "m")
    tracemalloc.start()
    for _ in range(50):  # its publisher is always busy, so nothing is taken apart meanwhile
        for group in range(4):
            apply(index, cache, BlocksStored([100], 0, content, BLOCK, group=group), 0.0)
        apply(index, cache, AllCleared(), 0.0)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 1.5 * index.nbytes < 10_000_000


def test_the_bound_is_kept_and_used_prompts_stay() -> None:
    one = Fixture(max_blocks=4000)
    one.store(range(1000), slot=1)
    for prompt in range(300):
        contents = range(10_000 + prompt * 50, 10_050 + prompt * 50)
        one.store(contents)
        assert one.index.entries <= 4000
        assert one.depths(range(1000))[1] == 1000  # asked for all the time, and no more than its share
    assert one.cache().provisional  # the engine still has them
    assert one.cache().counts.evicted == one.index.evicted > 10_000
    assert one.index.admitted == one.index.entries + one.index.evicted == 16_000
    assert one.index.nbytes < 1_500_000
    kept = [one.depths(range(10_000 + prompt * 50, 10_050 + prompt * 50))[0] for prompt in range(240, 300)]
    assert sum(kept) > 500  # tails go first: what is left begins at the beginning


def test_where_only_last_blocks_are_kept_a_sent_prompt_counts_for_those_that_continue_it() -> None:
    one = Fixture()
    keys = prompt_keys(one.index.space.root("m", ""), tokens(*range(100)), BLOCK)
    sent = one.index.speculation.add(0, keys[:50], until=9.0)
    assert one.depths(range(40)) == [40, 0, 0], "it is not known yet that blocks are left out"
    one.apply(BlocksStored([208, 209], 0, tokens(*range(200, 210)), BLOCK, group=0, kind="sliding_window", window=9))
    one.store(range(200, 210), group=1, kind="full_attention")
    assert one.depths(range(40)) == [0, 0, 0]
    assert one.depths(range(60)) == one.depths(range(50)) == [50, 0, 0]
    shorter = one.index.speculation.add(0, keys[:30], until=9.0)
    assert one.depths(range(40)) == [30, 0, 0]
    assert sent is not None and shorter is not None
    one.index.speculation.release(shorter)
    one.index.speculation.release(sent)
    assert one.depths(range(60)) == [0, 0, 0]
    one.index.speculation.add(0, keys[:50], until=9.0)
    one.index.restarted(one.cache())
    assert one.depths(range(40)) == [40, 0, 0], "it may be another engine"
    one.index.drop_slot(0)
    assert len(one.index.speculation) == 0


def test_speculation_ends_with_its_lease() -> None:
    one = Fixture()
    keys = prompt_keys(one.index.space.root("m", ""), tokens(*range(100)), BLOCK)
    one.store(range(10), slot=1)
    first = one.index.speculation.add(0, keys, until=2.0)
    assert first is not None
    one.index.speculation.add(0, keys[:40], until=3.0)
    depths = one.depths(range(100))
    assert depths[1] == 10 and 94 <= depths[0] <= 100
    one.index.speculation.release(first)
    assert 37 <= one.depths(range(100))[0] <= 40
    one.index.speculation.release(first)
    one.index.tend(2.9)
    assert one.depths(range(100))[0] >= 37
    one.index.tend(3.0)
    assert one.depths(range(100)) == [0, 10, 0] and len(one.index.speculation) == 0
    one.index.speculation.add(2, keys, until=9.0)
    one.index.drop_slot(2)
    assert one.depths(range(100)) == [0, 10, 0]


def test_engine_space_needs_neither_tokens_nor_parents() -> None:
    index = KvIndex(space=EngineSpace())
    index.add_slot(0)
    cache = index.rank(0, 0, "m")
    apply_all(index, cache, BlocksStored([7, 8], parent=5, tokens=tokens(1, 2), block_size=BLOCK), 0.0)
    apply_all(index, cache, BlocksStored([5], medium="CPU"), 0.0)
    found = index.look_up(BlockChain(engine_keys("m", [5, 7, 8, 9]), BLOCK), 1)
    assert found is not None and found.blocks[0] == 3 and found.tiers[:, 0].tolist() == [2, 1]


def snapshot(one: Fixture) -> bytes:
    names = {0: "a", 1: "b", 2: "c"}
    return b"".join(save(one.index, names, lambda cache: held(Place(41 + cache.slot, 1.5))))


def test_snapshot_and_warm_start() -> None:
    one = Fixture()
    one.store(range(2000))
    one.store(range(1999, 2000), parent=2098)
    one.store(range(10), slot=1, kind="full_attention")
    one.apply(BlocksStored([105], medium="CPU"))
    one.apply(BlocksStored([4000], 0, tokens(*range(8)), 8 * BLOCK, medium="CPU"))
    content = snapshot(one)
    two = Fixture()
    two.index.drop_slot(2)
    two.index.add_slot(7)
    places = {}
    shelved = Shelved(two.index, content)
    entered = 0
    for name, slot in (("a", 7), ("b", 0)):
        entered += sum(shelved.enter(name, slot, lambda cache, at: places.update({cache.slot: at})))
    assert entered == 2012 == two.index.entries and places == {7: Place(41, 1.5), 0: Place(42, 1.5)}
    found = two.index.look_up(
        BlockChain(prompt_keys(two.index.space.root("m", ""), tokens(*range(2000)), BLOCK), BLOCK), 8
    )
    assert found is not None and found.blocks.tolist() == [10, 0, 0, 0, 0, 0, 0, 2000]
    assert two.index.rank(7, 0, "m").provisional
    assert (two.cache(7).block_size, two.cache(7).sizes) == (BLOCK, {BLOCK: Tier.GPU, 8 * BLOCK: Tier.HOST})
    apply_all(two.index, two.index.rank(7, 0, "m"), BlocksRemoved([2099]), 0.0)
    found = two.index.look_up(
        BlockChain(prompt_keys(two.index.space.root("m", ""), tokens(*range(2000)), BLOCK), BLOCK), 8
    )
    assert found is not None and found.blocks[7] == 2000  # there were two copies
    two.index.validate()


def test_a_snapshot_keeps_what_a_hit_needs_only_at_its_end() -> None:
    one = Fixture()
    sliding = BlocksStored([108, 109], 0, tokens(*range(10)), BLOCK, group=0, kind="sliding_window", window=9)
    one.apply(sliding)
    one.store(range(10), group=1, kind="full_attention")
    one.apply(sliding)  # a second copy
    one.store(range(20, 23), slot=1, group=1, kind="full_attention")
    one.apply(BlocksStored([122], 0, tokens(22), BLOCK, group=0, kind="mamba"), slot=1)
    one.apply(BlocksRemoved([122], group=0), slot=1)
    content = snapshot(one)
    assert content.startswith(b"fairlead-kv-2\n"), "former versions would load it without the tails"
    two = Fixture()
    shelved = Shelved(two.index, content)
    assert sum(sum(shelved.enter(name, slot, lambda cache, at: None)) for name, slot in (("a", 0), ("b", 1))) == 15
    assert two.depths(range(10)) == [10, 0, 0]
    assert two.depths(range(9)) == [0, 0, 0]
    assert two.depths(range(20, 23)) == [0, 0, 0], "its only state is gone"
    two.apply(BlocksRemoved([109], group=0))
    assert two.depths(range(10)) == [10, 0, 0]
    two.apply(BlocksRemoved([109], group=0))
    assert two.depths(range(10)) == [0, 0, 0]
    one.index.clear(0)
    one.index.clear(1)
    one.cache().tails, one.cache(1).tails = {}, {}
    one.store(range(4))
    assert snapshot(one).startswith(b"fairlead-kv-1\n")


@pytest.mark.parametrize(("needed", "size", "kind"), [(-1, 4, "mamba"), (1, 0, "mamba"), (1, 4, "full_attention")])
def test_a_snapshot_with_a_group_that_contradicts_itself_is_refused(needed: int, size: int, kind: str) -> None:
    one = Fixture()
    one.store(range(10))
    head, content = snapshot(one)[:14], snapshot(one)[22:]
    space, parts, adapters = msgspec.msgpack.decode(content, strict=False)
    packed = msgspec.msgpack.encode([space, [[*part[:5], kind, *part[6:16], needed, size] for part in parts], adapters])
    with pytest.raises(ValueError, match="damaged"):
        Shelved(Fixture().index, head + xxh3_64_digest(packed) + packed)


def test_snapshots_of_former_versions_do_not_say_whether_history_is_missing() -> None:
    one = Fixture()
    one.store(range(10))
    head, content = snapshot(one)[:14], snapshot(one)[22:]
    space, parts, _ = msgspec.msgpack.decode(content)
    packed = msgspec.msgpack.encode([space, [part[:13] for part in parts]])
    places: list[Place] = []
    former = head + xxh3_64_digest(packed) + packed
    assert sum(Shelved(Fixture().index, former).enter("a", 0, lambda cache, place: places.append(place))) == 10
    assert places == [Place(41, 1.5, True)]


def test_a_snapshot_with_sizes_that_cannot_be_is_loaded_without_them() -> None:
    one = Fixture()
    one.store(range(10))
    head, content = snapshot(one)[:14], snapshot(one)[22:]
    space, parts, adapters = msgspec.msgpack.decode(content, strict=False)
    sizes = {-1: 0, 8: 99, 32: 1} | dict.fromkeys(range(100, 110), 3)
    packed = msgspec.msgpack.encode([space, [[*part[:15], sizes] for part in parts], adapters])
    two = Fixture()
    assert (
        sum(Shelved(two.index, head + xxh3_64_digest(packed) + packed).enter("a", 0, lambda cache, place: None)) == 10
    )
    assert two.cache().block_size == BLOCK
    assert len(two.cache().sizes) == MOST_SIZES and not {-1, 8} & two.cache().sizes.keys()


def test_blocks_are_not_saved_if_it_is_unknown_what_came_later() -> None:
    one = Fixture()
    one.store(range(10))
    content = b"".join(save(one.index, {0: "a"}, lambda cache: held(Place())))
    assert list(Shelved(Fixture().index, content).enter("a", 0, lambda cache, place: None)) == []


def test_damaged_snapshots_load_nothing() -> None:
    one = Fixture()
    one.store(range(100))
    content = snapshot(one)
    two = Fixture()
    for bad in (b"", content[:30], content[:-1], b"x" + content, content[:60] + b"\0" + content[61:]):
        with pytest.raises(ValueError):
            Shelved(two.index, bad).enter("a", 0, lambda cache, place: None)
    with pytest.raises(ValueError, match="engine-1"):
        Shelved(KvIndex(space=EngineSpace()), content).enter("a", 0, lambda cache, place: None)
    assert two.index.entries == 0
