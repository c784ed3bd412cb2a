"""Order, gaps and restarts of one publisher, without sockets."""

from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
from kv_blocks import copies_of

from fairlead.core.kv.cache import RankCache
from fairlead.core.kv.events import AllCleared, BlocksRemoved, BlocksStored
from fairlead.core.kv.index import KvIndex
from fairlead.core.kv.keys import EngineSpace, KeySpace, OwnSpace
from fairlead.core.kv.snapshot import Place, Shelved, save
from fairlead.lab.stub.kv_publisher import encode_batch
from fairlead.pool.kv_events.feed import Feed, Sync
from fairlead.pool.kv_events.wire import Frames


def batch(number: int, ts: float | None = None, life: int = 0) -> Frames:
    """Batch `number` of an engine's life stores block 1000·life + number + 1."""
    digest = 1000 * life + number + 1
    event = BlocksStored([digest], 0, array("I", [digest]).tobytes(), 1, "", "GPU")
    return Frames(b"", number, encode_batch(100.0 * life + number if ts is None else ts, [event]))


class Case:
    """A feed and what its index holds."""

    def __init__(self, can_replay: bool, space: KeySpace | None = None, max_blocks: int = 10_000) -> None:
        self.index = KvIndex(max_blocks, space)
        self.index.add_slot(0)
        self.feed = Feed(self.index, self.index.rank(0, 0, "m"), can_replay)

    def work(self) -> None:
        while self.feed.step(0.0):
            pass

    def live(self, *batches: Frames) -> None:
        for one in batches:
            self.work()
            assert self.feed.hungry
            self.feed.live(one)
        self.work()

    def replay(self, batches: Iterable[Frames], complete: bool = True) -> int:
        """Answer the replay that is wanted; returns its start."""
        assert self.feed.sync is Sync.WANTED
        start = self.feed.wanted
        self.feed.replay_begins()
        for one in batches:
            if one.sequence >= start:
                self.feed.replayed(one)
                while self.feed.busy:
                    self.feed.step(0.0)
        self.feed.replay_ends(complete)
        self.work()
        return start

    @property
    def blocks(self) -> list[int]:
        shelf = next(iter(self.feed.cache.shelves.values()), None)
        if shelf is None:
            return []
        return [digest for digest in range(1, 10_000) if copies_of(shelf, digest)]


@pytest.mark.parametrize("first", [0, 1])
def test_batches_in_order(first: int) -> None:
    case = Case(can_replay=False)
    case.live(*(batch(number) for number in range(first, 5)))
    assert case.blocks == list(range(first + 1, 6))
    assert not case.feed.cache.provisional and case.feed.count.lost == 0


def test_history_is_fetched_first() -> None:
    case = Case(can_replay=True)
    assert case.feed.cache.behind
    assert case.replay([batch(0), batch(1), batch(2)]) == 0
    case.live(batch(2), batch(3))
    assert case.blocks == [1, 2, 3, 4]
    assert not case.feed.cache.provisional and not case.feed.cache.behind


def test_history_that_is_cut_off_is_provisional() -> None:
    case = Case(can_replay=True)
    case.replay([batch(number) for number in range(500, 503)])
    assert case.blocks == [501, 502, 503] and case.feed.cache.provisional
    case.live(batch(503))
    assert case.blocks[-1] == 504


def test_joining_late_without_replay_is_provisional() -> None:
    case = Case(can_replay=False)
    case.live(batch(77), batch(78))
    assert case.blocks == [78, 79] and case.feed.cache.provisional


def test_a_gap_is_filled_before_what_comes_after() -> None:
    case = Case(can_replay=True)
    case.replay([])
    case.live(batch(0), batch(1), batch(5))
    assert case.blocks == [1, 2] and not case.feed.hungry and case.feed.cache.behind
    assert case.replay([batch(number) for number in range(6)]) == 1
    assert case.blocks == [1, 2, 3, 4, 5, 6]
    assert case.feed.count.lost == case.feed.count.gaps == case.feed.count.restarts == 0


@pytest.mark.parametrize("first", [0, 1])
def test_the_first_batch_is_asked_for_if_it_may_be_lost(first: int) -> None:
    case = Case(can_replay=True)
    case.replay([])
    case.live(batch(1))
    case.replay([batch(number) for number in range(first, 2)])
    case.live(batch(2))
    assert case.blocks == list(range(first + 1, 4))
    assert not case.feed.cache.provisional and case.feed.sync is Sync.LIVE


def test_a_gap_without_replay_is_counted() -> None:
    case = Case(can_replay=False)
    case.live(batch(0), batch(4))
    assert case.blocks == [1, 5] and case.feed.count.lost == 3 and case.feed.count.gaps == 1
    assert case.feed.cache.provisional


def test_a_gap_that_nobody_can_fill() -> None:
    case = Case(can_replay=True)
    case.replay([])
    case.live(batch(0), batch(8))
    history = [batch(number) for number in range(4, 10)]
    case.replay(history)  # the batches between are not in the buffer any more: asked once more
    assert case.blocks == [1]
    assert case.replay(history) == 0
    assert case.blocks == [1, 5, 6, 7, 8, 9] and case.feed.count.lost == 3 and case.feed.cache.provisional
    case.live(batch(9))
    assert case.blocks[-1] == 10


def test_a_replay_does_not_jump_over_batches_that_wait() -> None:
    case = Case(can_replay=True)
    case.replay([])
    case.live(batch(0), batch(4))
    case.replay([batch(8), batch(9)])  # 5 to 7 are in the live queue
    case.live(batch(5))
    assert case.blocks == [1, 5, 6] and case.feed.count.lost == 3


def test_connecting_during_a_replay_asks_once_more() -> None:
    case = Case(can_replay=True)
    case.feed.connected()
    case.replay([batch(0)])
    assert case.replay([batch(0), batch(1)]) == 0
    assert case.blocks == [1, 2] and case.feed.sync is Sync.LIVE


def test_no_answer_to_a_replay() -> None:
    case = Case(can_replay=True)
    case.replay([], complete=False)
    assert case.feed.sync is Sync.WANTED and case.feed.count.failed_replays == 1
    case.feed.give_up()
    case.live(batch(30))
    assert case.feed.sync is Sync.WANTED  # there is something to fetch now: asked once more
    case.feed.give_up()
    case.live(batch(31))
    assert case.blocks == [31, 32] and case.feed.cache.provisional


def test_restart_by_number_with_replay() -> None:
    case = Case(can_replay=True)
    case.replay([batch(0), batch(1), batch(2)])
    case.live(batch(1, life=1))
    assert case.blocks == []
    assert case.replay([batch(0, life=1), batch(1, life=1)]) == 0
    assert case.blocks == [1001, 1002] and case.feed.count.restarts == 1
    assert not case.feed.cache.provisional


def test_a_new_engine_may_have_other_groups() -> None:
    case = Case(can_replay=False)
    window = BlocksStored([7], 0, array("I", [1]).tobytes(), 1, kind="sliding_window")
    case.live(Frames(b"", 0, encode_batch(1.0, [window])), batch(1))
    assert case.blocks == []
    case.live(batch(0, life=1))
    assert case.blocks == [1001]


def test_restart_by_number_without_replay() -> None:
    case = Case(can_replay=False)
    case.live(batch(0), batch(1), batch(0, life=1), batch(1, life=1))
    assert case.blocks == [1001, 1002] and case.feed.count.restarts == 1
    assert case.feed.cache.emptied


def test_a_repeated_batch_is_no_restart() -> None:
    case = Case(can_replay=False)
    case.live(batch(0), batch(1), batch(1), batch(0), batch(2))
    assert case.blocks == [1, 2, 3]
    assert case.feed.count.restarts == 0


def test_a_restarted_engine_that_is_further_on_is_found_by_its_time_stamps() -> None:
    case = Case(can_replay=True)
    case.replay([batch(0), batch(1)])
    case.live(batch(6, life=1))
    history = [batch(number, life=1) for number in range(7)]
    assert case.replay(history) == 1
    assert case.feed.count.restarts == 1 and case.blocks == []
    assert case.feed.cache.emptied
    assert case.replay(history) == 0
    assert case.blocks == [1000 + number for number in range(1, 8)]


def test_reconnecting_asks_whether_it_is_the_same_life() -> None:
    case = Case(can_replay=True)
    case.replay([batch(0), batch(1)])
    case.feed.connection_lost()
    case.feed.connected()
    assert case.replay([batch(1), batch(2)]) == 1
    assert case.blocks == [1, 2, 3] and case.feed.count.restarts == 0
    case.feed.connection_lost()
    case.feed.connected()
    case.replay([])  # not even the batch that we know: another life
    assert case.blocks == [] and case.feed.count.restarts == 1
    assert not case.feed.cache.emptied, "nor is it sure that the engine lost its blocks"
    case.replay([batch(0, life=1)])
    assert case.blocks == [1001]


@pytest.mark.parametrize("known", [0, 1, 2])
def test_a_connection_lost_during_a_replay_is_no_restart(known: int) -> None:
    """`known`: batches that the replay has sent before."""
    case, history = Case(can_replay=True), [batch(0), batch(1), batch(2)]
    case.replay(history[:1])
    case.feed.connected()
    case.feed.replay_begins()
    for reply in history[:known]:
        case.feed.replayed(reply)
        case.work()
    case.feed.connection_lost()
    for reply in history[known:]:
        case.feed.replayed(reply)
        case.work()
    case.feed.replay_ends(complete=True)
    case.feed.connected()
    while case.feed.sync is Sync.WANTED:
        case.replay(history)
    assert case.blocks == [1, 2, 3] and case.feed.count.restarts == 0


def test_an_engine_that_restarts_during_a_replay_is_seen() -> None:
    case = Case(can_replay=True)
    case.replay([batch(0)])
    case.feed.connected()
    case.feed.replay_begins()
    case.feed.replayed(batch(0))
    case.feed.connection_lost()
    case.feed.replay_ends(complete=False)
    case.feed.connected()
    while case.feed.sync is Sync.WANTED:
        case.replay([batch(0, life=1), batch(1, life=1)])
    assert case.blocks == [1001, 1002] and case.feed.count.restarts == 1


def test_a_batch_that_waits_when_its_engine_dies_is_not_the_next_engines() -> None:
    case = Case(can_replay=True)
    case.replay([batch(0), batch(1)])
    case.live(batch(40))  # after a gap
    case.feed.connection_lost()
    case.feed.connected()
    case.replay([batch(0, life=1), batch(1, life=1)], complete=False)
    while case.feed.sync is Sync.WANTED:
        case.replay([batch(0, life=1), batch(1, life=1)])
    assert case.blocks == [1001, 1002]
    count = case.feed.count
    assert (count.restarts, count.lost, case.feed.cache.provisional) == (1, 0, False)


def test_an_unreadable_batch_at_the_end_of_the_history_is_no_restart() -> None:
    case = Case(can_replay=True)
    history = [batch(0), batch(1), Frames(b"", 2, b"\xc1")]
    case.replay(history)
    for _ in range(2):
        case.feed.connection_lost()
        case.feed.connected()
        assert case.replay(history) == 2
    assert case.blocks == [1, 2]
    count = case.feed.count
    assert (count.restarts, count.lost, case.feed.cache.provisional) == (0, 1, True)
    case.feed.connection_lost()
    case.feed.connected()
    case.replay([batch(2, life=1)])
    assert count.restarts == 1


def test_reconnecting_without_replay() -> None:
    case = Case(can_replay=False)
    case.live(batch(0), batch(1))
    case.feed.connection_lost()
    case.feed.connected()
    case.live(batch(2))
    assert case.blocks == [1, 2, 3]  # it goes on where it was
    assert case.feed.count.connections == 1
    case.feed.connection_lost()
    case.live(batch(9, life=1))
    assert case.blocks == [1010] and case.feed.count.restarts == 1 and case.feed.cache.provisional


def test_an_engine_whose_clock_was_ahead_is_heard_after_its_restart() -> None:
    case = Case(can_replay=False)
    case.live(batch(0), batch(7, ts=1e14))
    case.feed.connection_lost()
    case.live(batch(0, life=1), batch(1, life=1))
    assert case.blocks == [1001, 1002] and case.feed.count.restarts == 1


def test_resuming_from_a_snapshot() -> None:
    case = Case(can_replay=True)
    case.feed.resume(Place(1, 1.0))
    assert case.replay([batch(1), batch(2)]) == 1
    assert case.blocks == [3] and case.feed.count.restarts == 0
    other = Case(can_replay=True)
    other.feed.resume(Place(1, 1.0))
    other.replay([batch(1, life=1)])
    assert other.feed.count.restarts == 1 and other.feed.wanted == 0


@contextmanager
def hold(case: Case, cache: RankCache) -> Iterator[Callable[[], Place | None]]:
    cache.holds += 1
    yield lambda: case.feed.applied
    cache.holds -= 1


def test_a_snapshot_that_is_made_while_events_go_on_counts_no_copy_twice() -> None:
    case, history = Case(can_replay=False), [batch(number) for number in range(3000)]
    case.live(*history[:1500])
    case.feed.live(history[1500])
    following = iter(history[1501:])
    pieces = []
    for piece in save(case.index, {0: "a"}, lambda cache: hold(case, cache)):
        pieces.append(piece)
        for _ in range(200):
            if not case.feed.step(0.0) and case.feed.hungry:
                case.feed.live(next(following))
    case.work()
    case.live(*following)
    other = Case(can_replay=True)
    places: list[Place] = []
    for _ in Shelved(other.index, b"".join(pieces)).enter("a", 0, lambda cache, place: places.append(place)):
        pass
    other.feed.resume(places[0])
    assert other.replay(history) >= 1500
    removed = Frames(b"", 3000, encode_batch(3000.0, [BlocksRemoved([digest]) for digest in range(1, 3001)]))
    for each in (case, other):
        assert each.index.entries == 3000
        each.live(removed)
        assert each.index.entries == 0


def test_a_snapshot_keeps_that_history_is_missing() -> None:
    case, history = Case(can_replay=True), [batch(number) for number in range(500, 510)]
    case.replay(history)
    places = []
    for _ in range(2):
        content = b"".join(save(case.index, {0: "a"}, lambda cache, case=case: hold(case, cache)))
        case = Case(can_replay=True)
        for _ in Shelved(case.index, content).enter("a", 0, lambda cache, place: places.append(place)):
            pass
        case.feed.resume(places[-1])
    case.replay(history)
    assert case.feed.cache.provisional and places == [Place(509, 509.0, True)] * 2


def test_confirming_a_snapshot_does_not_bring_back_what_a_full_index_dropped() -> None:
    case, history = Case(can_replay=True), [batch(number) for number in range(6000)]
    case.replay(history)
    places: list[Place] = []
    for missing in (False, True):
        content = b"".join(save(case.index, {0: "a"}, lambda cache, case=case: hold(case, cache)))
        case = Case(can_replay=True, max_blocks=4000)
        for _ in Shelved(case.index, content).enter("a", 0, lambda cache, place: places.append(place)):
            pass
        case.feed.resume(places[-1])
        assert places[-1].provisional is missing
    case.replay(history[-1:])
    assert case.feed.cache.provisional
    case.live(Frames(b"", 6000, encode_batch(6000.0, [AllCleared()])))
    assert not case.feed.cache.provisional


def test_loaded_blocks_stay_complete_until_they_are_confirmed_or_something_is_lost() -> None:
    case = Case(can_replay=True)
    case.feed.cache.provisional = True  # as loading says
    case.feed.resume(Place(1, 1.0))
    assert case.feed.applied == Place(1, 1.0)
    case.feed.give_up()
    case.live(batch(2))
    assert case.feed.applied == Place(2, 2.0) and case.feed.cache.provisional
    case.live(batch(5))
    case.feed.give_up()
    case.work()
    assert case.feed.applied == Place(5, 5.0, True)
    case.feed.retry()
    case.replay([batch(5)])
    assert case.feed.cache.provisional
    # The next life begins with what is known of it.
    other = Case(can_replay=True)
    other.feed.resume(Place(1, 1.0))
    other.replay([batch(8, life=1)])
    other.replay([batch(8, life=1)])
    other.feed.connected()
    other.replay([batch(8, life=1)])
    assert other.blocks == [1009] and other.feed.cache.provisional


def test_a_batch_that_waits_for_a_replay_waits_for_a_snapshot_too() -> None:
    case = Case(can_replay=True)
    case.replay([])
    case.live(batch(0), batch(2))
    case.feed.cache.holds += 1
    case.replay([])
    assert case.blocks == [1] and case.feed.busy
    case.feed.cache.holds -= 1
    case.work()
    assert case.blocks == [1, 3]


def test_what_is_no_batch_costs_only_itself() -> None:
    case = Case(can_replay=False)
    case.live(batch(0), Frames(b"", 1, b"\xc1"), batch(2))
    assert case.blocks == [1, 3] and case.feed.count.bad_batches == 1 and case.feed.count.lost == 1
    replaying = Case(can_replay=True)
    replaying.replay([batch(0), Frames(b"", 1, b"\xc1"), batch(2)])
    assert replaying.blocks == [1, 3] and replaying.feed.count.lost == 1


def test_bad_events_are_counted_and_skipped() -> None:
    case = Case(can_replay=False)
    good = BlocksStored([7], 0, array("I", [1]).tobytes(), 1)
    wrong = BlocksStored([8, 9], 0, array("I", [1]).tobytes(), 1)
    case.live(Frames(b"", 0, encode_batch(1.0, [wrong, good, AllCleared(), good])))
    assert case.blocks == [7] and case.feed.cache.counts.malformed == 1
    assert (case.feed.count.bad_events, case.feed.count.bad_reason) == (1, "2 blocks of 1 tokens cannot have 1 tokens")


@pytest.mark.parametrize("keys", ["own", "engine"])
@pytest.mark.parametrize("name", ["blocks", "block_hashes"])
def test_events_as_the_guides_have_them_are_used_or_counted(keys: str, name: str) -> None:
    case = Case(can_replay=False, space=OwnSpace() if keys == "own" else EngineSpace())
    created = {"type": "block_created", name: [7, 8]}
    case.live(Frames(b"", 0, msgspec.msgpack.encode({"ts": 1.0, "events": [created]})))
    if keys == "engine":
        assert (case.blocks, case.feed.count.bad_events) == ([7, 8], 0)
    else:
        assert (case.blocks, case.feed.count.bad_events) == ([], 1)
        assert "keys: engine" in case.feed.count.bad_reason
    with_tokens = {**created, "token_ids": [1, 2], "block_size": 1}
    case.live(Frames(b"", 1, msgspec.msgpack.encode({"ts": 2.0, "events": [with_tokens]})))
    assert case.blocks == [7, 8]


def test_clearing_comes_in_order() -> None:
    case = Case(can_replay=False)
    case.live(batch(0), Frames(b"", 1, encode_batch(1.0, [AllCleared()])), batch(2))
    assert case.blocks == [3]


def test_nothing_is_missing_after_clearing() -> None:
    case = Case(can_replay=False)
    case.live(batch(77))
    assert case.feed.cache.provisional
    case.live(Frames(b"", 78, encode_batch(78.0, [AllCleared()])))
    assert not case.feed.cache.provisional


def test_a_rank_that_has_left() -> None:
    case = Case(can_replay=False)
    case.feed.live(batch(0))
    case.feed.gone()
    assert not case.feed.step(0.0)
