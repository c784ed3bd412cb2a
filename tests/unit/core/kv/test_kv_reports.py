"""Reports of hits (`kv_cache_report_mode: full`), which are no copies, and prompts computed again, which are.

The streams come from real servers of 40 blocks, and of a model with sliding windows; see `ORIGIN.md`.
"""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
from kv_blocks import apply_all, copies_of

from fairlead.core.kv.cache import EVERYONE
from fairlead.core.kv.events import STEP, AllCleared, BlocksRemoved, BlocksStored, KvEvent, apply
from fairlead.core.kv.index import KvIndex
from fairlead.core.kv.keys import prompt_keys
from fairlead.core.kv.match import BlockChain
from fairlead.core.kv.tiers import Tier
from fairlead.pool.kv_events.feed import Feed
from fairlead.pool.kv_events.wire import BatchDecoder, Frames, live

DATA = Path(__file__).parents[3] / "data" / "kv-events"
#: Reports that no new block follows in their batch, and how many blocks they have: they count as copies.
UNPROVEN = {"A report": 3, "B report": 15, "C report, answer 3 fills a block": 3}
#: Blocks of a window. Longer reports show in its groups, because they name blocks that were never kept.
NEEDED = 4


def captured(stream: str) -> list[tuple[str, Frames]]:
    with gzip.open(DATA / "reports.jsonl.gz") as file:
        rows = [row for row in map(json.loads, file) if row["stream"] == stream]
    return [(row["label"], live([bytes.fromhex(frame) for frame in row["frames"]])) for row in rows]


class Truth:
    """The copies that the engine has, by group and hash, and those that it only seems to have."""

    def __init__(self) -> None:
        self.copies: Counter[tuple[int, int]] = Counter()
        self.seeming: Counter[tuple[int, int]] = Counter()

    def take(self, label: str, event: KvEvent) -> None:
        if isinstance(event, AllCleared):
            self.copies, self.seeming = Counter(), Counter()
            return
        blocks = Counter((event.group, digest) for digest in event.hashes)
        if isinstance(event, BlocksRemoved):
            self.copies -= blocks
        elif "report" not in label or event.parent or not self.copies[event.group, event.hashes[-1]]:
            self.copies += blocks
        elif len(event.hashes) == UNPROVEN.get(label) and (
            event.kind == "full_attention" or len(event.hashes) <= NEEDED
        ):
            self.seeming += blocks


def decoded(frames: Frames) -> list[KvEvent]:
    return list(BatchDecoder().decode(frames.payload))


@pytest.mark.parametrize("stream", ["full attention", "sliding windows and full attention"])
def test_copies_are_those_of_the_engine(stream: str) -> None:
    index = KvIndex(max_blocks=10_000)
    index.add_slot(0)
    cache = index.rank(0, 0, "tiny")
    feed = Feed(index, cache, can_replay=False)
    truth = Truth()
    for label, frames in captured(stream):
        for event in decoded(frames):
            truth.take(label, event)
        feed.live(frames)
        while feed.step(0.0):
            pass
        index.validate()
        if label == "W+400 report, waits for room" and frames.sequence < 187:
            continue  # the prompt is reported in each batch, until there is room for it
        expected = truth.copies + truth.seeming
        for group, digest in expected:
            tail, shelf = cache.tails.get(group), cache.shelves.get((group, Tier.GPU))
            count = tail.copies.get(digest, 0) if tail else copies_of(shelf, digest) if shelf else 0
            assert count == expected[group, digest], (label, group)
        assert cache.blocks == len(expected)
    assert cache.counts.malformed == cache.counts.conflicts == 0


class Engine:
    """One endpoint in an index, and prompts of blocks 1, 2, 3 …, of four tokens each."""

    def __init__(self, slot: int = 0) -> None:
        self.index = KvIndex(max_blocks=10_000)
        self.index.add_slot(slot)
        self.cache = self.index.rank(slot, 0, "m")

    def batch(self, *events: KvEvent) -> None:
        self.cache.begin_batch()
        for event in events:
            apply_all(self.index, self.cache, event, 0.0)
        self.index.validate()

    def hit(self, blocks: int) -> int:
        keys = prompt_keys(self.index.space.root("m", ""), b"".join(map(content, range(blocks))), 4)
        found = self.index.look_up(BlockChain(keys, 4), 1)
        return int(found.blocks[0]) if found is not None else 0

    def copies(self, digest: int) -> int:
        return copies_of(self.cache.shelves[0, Tier.GPU], digest)


def content(number: int) -> bytes:
    return number.to_bytes(4, "little") * 4


def store(start: int, end: int, group: int = 0, kind: str = "", kept: int | None = None) -> BlocksStored:
    hashes, tokens = list(range(start + 1, end + 1)), b"".join(map(content, range(start, end)))
    window = 9 if kind == "sliding_window" else 0
    hashes = hashes if kept is None else hashes[len(hashes) - kept :]
    return BlocksStored(hashes, start, tokens, 4, "", "GPU", group, kind, None, window)


def removed(*hashes: int) -> BlocksRemoved:
    return BlocksRemoved(list(hashes), "GPU", 0)


@pytest.mark.parametrize(
    "batches",
    [
        [store(0, 4), store(4, 5)],  # the answer fills a block
        [store(0, 6), store(6, 7)],  # the event has new blocks, too
        [store(0, 4), store(4, 6)],  # a piece ends where the known blocks do
    ],
)
def test_prompts_that_are_computed_again_add_copies(batches: list[BlocksStored]) -> None:
    engine = Engine()
    engine.batch(store(0, 4))
    for event in batches:
        engine.batch(event)
    last = batches[-1].hashes[-1]
    assert engine.hit(last) == last
    engine.batch(removed(4, 3, 2, 1))
    assert engine.hit(last) == last
    engine.batch(removed(4, 3, 2, 1))
    assert engine.hit(last) == 0


def test_a_beginning_that_lost_its_window_adds_copies() -> None:
    """A hybrid model computes it again, with new blocks behind it."""
    engine = Engine()

    def computed(start: int, end: int, kept: int) -> None:
        engine.batch(store(start, end, 1, "sliding_window", kept), store(start, end, 0, "full_attention"))

    computed(0, 4, 2)
    computed(0, 8, 0)
    computed(8, 12, 2)
    assert engine.hit(12) == 12
    engine.batch(removed(4, 3, 2, 1))
    assert engine.hit(12) == 12


def computed(start: int, end: int, kept: int, window_first: bool) -> list[BlocksStored]:
    """A hybrid model computes blocks."""
    events = [store(start, end, 1, "sliding_window", kept), store(start, end, 0, "full_attention")]
    return events if window_first else events[::-1]


@pytest.mark.parametrize("window_first", [True, False])
def test_a_beginning_without_its_window_is_computed_for_several_requests_at_once(window_first: bool) -> None:
    """The others find it in the same batch, and continue it, or report it before."""
    engine = Engine()
    engine.batch(*computed(0, 4, 2, window_first))
    engine.batch(BlocksRemoved([3, 4], "GPU", 1))
    engine.batch(*computed(0, 4, 2, window_first), *computed(4, 6, 2, window_first))
    assert [engine.copies(digest) for digest in range(1, 7)] == [2] * 4 + [1] * 2
    engine.batch(removed(4, 3, 2, 1))
    assert engine.hit(6) == 6
    engine.batch(removed(6, 5), BlocksRemoved([6, 5, 4, 3], "GPU", 1))
    reported = computed(0, 4, 4, window_first)
    engine.batch(*computed(0, 4, 2, window_first), *reported, *computed(4, 7, 2, window_first))
    assert engine.copies(1) == 2


@pytest.mark.parametrize(("gone", "copies"), [(BlocksRemoved([3, 4], "GPU", 1), 2), (removed(4), 1)])
def test_a_group_that_held_a_beginning_counts_it_as_one_that_did_not(gone: BlocksRemoved, copies: int) -> None:
    engine = Engine()

    def of_three_groups(start: int, end: int) -> list[BlocksStored]:
        return [store(start, end, 2, "sliding_window", 2), *computed(start, end, 2, window_first=True)]

    engine.batch(*of_three_groups(0, 4))
    engine.batch(gone)
    engine.batch(*of_three_groups(0, 4), *of_three_groups(4, 6))
    assert engine.copies(3) == engine.cache.tails[2].copies[4] == 2
    assert engine.copies(4) == copies


def test_a_new_prompt_that_is_reported_at_once_has_one_copy() -> None:
    engine = Engine()
    engine.batch(*computed(0, 4, 2, True), *computed(0, 4, 4, True), *computed(4, 6, 2, True))
    assert [engine.copies(digest) for digest in range(1, 7)] == [1] * 6


def test_copies_that_another_request_continues_at_once_are_taken_for_a_report() -> None:
    """A limit: with `prompt_logprobs`, no event tells that the beginning was computed again."""
    engine = Engine()
    engine.batch(store(0, 4))
    engine.batch(store(0, 4), store(4, 6))  # the engine has two copies of 1 to 4
    assert [engine.copies(digest) for digest in range(1, 7)] == [1] * 6


def test_pieces_of_a_prompt_in_one_batch_add_copies() -> None:
    """The first one ends within the known blocks."""
    engine = Engine()
    engine.batch(store(0, 6))
    engine.batch(store(0, 4), store(4, 8))
    assert [engine.copies(digest) for digest in range(1, 9)] == [2] * 6 + [1] * 2


def test_a_report_is_followed_by_the_next_blocks_at_once() -> None:
    engine = Engine()
    engine.batch(store(0, 4))
    engine.batch(store(0, 4), removed(99), store(4, 6))
    assert [engine.copies(digest) for digest in range(1, 7)] == [1] * 6
    engine.batch(store(0, 5), store(5, 6))  # a prompt of six full blocks computes the last one again
    assert [engine.copies(digest) for digest in range(1, 7)] == [1] * 5 + [2]
    engine.batch(store(0, 4), store(10, 11), store(4, 7))
    assert engine.copies(1) == 2
    engine.batch(store(0, 7))
    engine.batch(store(10, 12))
    engine.batch(store(0, 7), store(7, 9))
    assert engine.copies(1) == 3


def test_a_prompt_that_waits_is_reported_in_each_batch() -> None:
    engine = Engine()
    engine.batch(store(0, 4), store(10, 20))
    for number in range(20, 25):
        engine.batch(store(number, number + 1), store(0, 4))
    engine.batch(store(25, 26), store(0, 4), store(4, 6))
    assert engine.copies(1) == 1
    engine.batch(store(0, 6))  # computed again
    engine.batch(store(0, 6), store(6, 7))
    assert engine.copies(1) == 2


def test_a_prompt_that_waits_may_lose_its_last_blocks_meanwhile() -> None:
    engine = Engine()
    engine.batch(store(0, 4), store(10, 20))
    for number in range(20, 25):
        engine.batch(store(number, number + 1), store(0, 4))
    engine.batch(removed(4), store(25, 26), store(0, 3))
    engine.batch(removed(3), store(26, 27), store(0, 2))
    engine.batch(store(0, 2), store(2, 6))
    assert [engine.copies(digest) for digest in range(1, 7)] == [1] * 6
    engine.batch(removed(6, 5, 4, 3))
    assert engine.hit(6) == 2


def test_a_prompt_that_waits_may_find_more_meanwhile() -> None:
    engine = Engine()
    engine.batch(store(0, 3))
    engine.batch(store(0, 3))
    engine.batch(store(3, 4), store(0, 4))
    engine.batch(store(0, 4), store(4, 6))
    assert [engine.copies(digest) for digest in range(1, 7)] == [1] * 6


def test_pieces_of_a_prompt_after_a_longer_one_add_copies() -> None:
    engine = Engine()
    engine.batch(store(0, 6))
    engine.batch(store(0, 6))
    engine.batch(store(0, 4), store(4, 8))
    assert [engine.copies(digest) for digest in range(1, 9)] == [3] * 6 + [1] * 2


def test_a_prompt_of_one_block_that_is_computed_again_adds_a_copy() -> None:
    engine = Engine()
    engine.batch(store(0, 1))
    engine.batch(store(0, 1), store(1, 2))
    assert engine.copies(1) == 2


def test_long_reports_are_taken_back_in_steps() -> None:
    engine = Engine()
    engine.batch(store(0, 1000))
    engine.batch(store(0, 1000), store(1000, 1200))
    assert [engine.copies(digest) for digest in (1, STEP, 1000, 1200)] == [1] * 4
    assert engine.hit(1200) == 1200


def test_shared_storage_keeps_what_is_reported() -> None:
    engine = Engine(slot=EVERYONE)
    engine.batch(store(0, 4))
    engine.batch(store(0, 4), store(4, 6))
    assert engine.cache.blocks == 6


def test_many_reports_of_a_prompt_that_waits_are_taken_back_in_one_pass() -> None:
    engine = Engine()
    engine.batch(store(0, 1000))
    for _ in range(30):
        engine.batch(store(0, 1000))
    engine.batch(removed(*range(1000, 700, -1)), store(0, 700))
    for _ in range(20):
        engine.batch(store(0, 700))
    engine.batch(store(0, 700))
    steps = apply(engine.index, engine.cache, store(700, 701), 0.0)
    assert steps is not None and sum(1 for _ in steps) <= 1000 // STEP + 2
    assert [engine.copies(digest) for digest in (1, STEP, 700, 701)] == [1] * 4
    assert engine.copies(702) == engine.copies(1000) == 0
