"""Knowledge of blocks that another process keeps, in decisions."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_blocks import engine_keys
from msgspec.structs import replace

from fairlead.apis.tokens import PromptTokens
from fairlead.core.endpoint import Endpoint
from fairlead.core.exact import ExactKnowledge, Prepared
from fairlead.core.fleet import Fleet
from fairlead.core.kv.answered import AnsweredIndex, RankState, bounded
from fairlead.core.kv.index import KvIndex, keys_of, numbers
from fairlead.core.kv.keys import EngineSpace
from fairlead.core.kv.match import BlockChain, Held
from fairlead.core.kv.recipe import ANY_MODEL
from fairlead.core.kv.tiers import Tier
from fairlead.core.request import Request, Usage
from fairlead.core.trust import Finding

CURRENT = RankState(heard=True, linked=True, block_size=16)


def chain(index: AnsweredIndex, **held: tuple[float, ...]) -> BlockChain:
    found = tuple(Held(int(name[1:]), index.tenure(int(name[1:])), tiers) for name, tiers in held.items())
    return BlockChain(np.arange(4, dtype=np.uint64), 16, found)


def test_an_answer_is_looked_up_as_an_index_is() -> None:
    index = AnsweredIndex(ANY_MODEL)
    for slot in range(3):
        index.add_slot(slot)
    found = index.look_up(chain(index, s0=(4.0,), s2=(1.0, 2.0)), 3)
    assert found is not None
    assert found.blocks.tolist() == [4, 0, 3]
    assert found.tiers.tolist() == [[4, 0, 1], [0, 0, 2]]
    assert found.block_size == 16
    assert found.hit_tokens(64).tolist() == [48, 0, 48]
    # A slot beyond the columns is left out, and nothing at all is nothing.
    assert index.look_up(chain(index, s2=(1.0,)), 2) is None
    assert index.look_up(chain(index), 3) is None


def test_a_slot_that_another_endpoint_took_over_holds_nothing_of_the_answer() -> None:
    index = AnsweredIndex(ANY_MODEL)
    index.add_slot(0)
    asked = chain(index, s0=(4.0,))
    index.drop_slot(0)
    assert index.look_up(asked, 1) is None
    index.add_slot(0)
    assert index.look_up(asked, 1) is None
    assert index.look_up(chain(index, s0=(4.0,)), 1) is not None


def test_prompts_that_were_just_sent_count_beside_the_answer() -> None:
    index = AnsweredIndex(ANY_MODEL)
    index.add_slot(0)
    index.add_slot(1)
    asked = chain(index, s0=(1.0,))
    index.speculation.add(1, asked.keys, 10.0)
    found = index.look_up(asked, 2)
    assert found is not None and found.blocks.tolist() == [1, 4]


def test_of_several_ranks_each_has_what_the_answer_says() -> None:
    index = AnsweredIndex(ANY_MODEL)
    for slot, ranks in enumerate((2, 1, 3)):
        index.add_slot(slot)
        index.report(slot, [RankState(rank=rank, heard=True, linked=True, block_size=16) for rank in range(ranks)])
    held = (
        Held(0, index.tenure(0), (4.0,), (4, 0, 9)),
        Held(1, index.tenure(1), (3.0,)),
        Held(2, index.tenure(2), (2.0,)),
    )
    found = index.look_up(BlockChain(np.arange(4, dtype=np.uint64), 16, held), 3)
    assert found is not None
    # An indexer of another version says nothing of ranks.
    assert [found.by_rank(slot) for slot in range(3)] == [[4, 0], [], [2, 2, 2]]
    assert found.expected().blocks.tolist() == [2, 3, 2]
    # A prompt that was just sent counts although nobody holds any of it.
    index.speculation.add(0, np.arange(4, dtype=np.uint64), 9.0)
    found = index.look_up(BlockChain(np.arange(4, dtype=np.uint64), 16, ()), 3)
    assert found is not None and found.expected().blocks.tolist() == [2, 0, 0]


def test_the_state_of_ranks_is_taken_over() -> None:
    index = AnsweredIndex(ANY_MODEL)
    index.add_slot(0)
    index.report(0, [CURRENT, RankState(rank=1, heard=True, linked=True, block_size=32, lives=2, numbered=True)])
    assert [cache.current for cache in index.caches_of(0)] == [True, True]
    assert [cache.block_size for cache in index.caches_of(0)] == [16, 32]
    assert [cache.numbered for cache in index.caches_of(0)] == [False, True]
    index.report(0, [CURRENT])
    assert [cache.current for cache in index.caches_of(0)] == [True]
    index.silent()
    assert not any(cache.linked for cache in index.caches_of(0))
    index.validate()


def test_a_new_engine_is_noticed_rank_by_rank() -> None:
    index = AnsweredIndex(ANY_MODEL)
    index.add_slot(0)
    lives = []
    for reported in ((1, 1), (1, 1), (), (1, 1), (2,), (2, 0), (), (3, 3)):
        index.report(0, [RankState(rank=rank, lives=number) for rank, number in enumerate(reported)])
        lives.append(index.lives[0])
    # Neither an indexer that restarts nor a rank whose events arrive later is a new engine.
    assert lives == [0, 0, 0, 0, 1, 1, 1, 2]


def test_an_engine_that_emptied_its_cache_is_noticed_once() -> None:
    exact = ExactKnowledge(index=(index := AnsweredIndex(ANY_MODEL)))
    exact.add_slot(0)
    emptied = []
    for clears in (5, 5, 6, 6, 0, 0, 1):
        index.report(0, [replace(CURRENT, clears=clears)])
        emptied.append(exact.refresh())
    # What was before the first report, and an indexer that restarts, say nothing about now.
    assert emptied == [[], [], [0], [], [], [], [0]]


@pytest.mark.parametrize(
    ("tiers", "total", "found"),
    [((3, 2), 5, (3, 2)), ((9, 2), 5, (5, 0)), ((-1, 2), 5, (0, 2)), ((1, 1, 1, 1, 1), 9, (1, 1, 1, 1)), ((), 3, ())],
)
def test_what_others_count_is_bounded(tiers: tuple[float, ...], total: int, found: tuple[float, ...]) -> None:
    assert bounded(tiers, total) == found


class World:
    """Two endpoints whose blocks another process knows."""

    def __init__(self) -> None:
        self.index = AnsweredIndex(ANY_MODEL)
        self.exact = ExactKnowledge(index=self.index)
        self.fleet = Fleet(exact=self.exact)
        for at in range(2):
            self.fleet.up(Endpoint(f"e{at}", f"10.0.0.{at}:80"))
            self.index.report(at, [CURRENT])
        self.exact.refresh()

    def request(
        self, number: int, answered: bool, model: str = "m", asked: str = "m", **held: tuple[float, ...]
    ) -> Request:
        """For `model`; its blocks were `asked` for another one, perhaps."""
        tokens = PromptTokens(number.to_bytes(4, "little") * 64, 64)  # no two prompts are one
        prepared = self.exact.prepare(tokens, asked)
        if answered:
            both = tuple(Held(int(name[1:]), self.index.tenure(int(name[1:])), t) for name, t in held.items())
            prepared = Prepared(asked, {size: one._replace(held=both) for size, one in prepared.chains.items()})
        blocks = self.exact.offer(tokens, prepared)
        return Request(id=number, arrived=0.0, model=model, prompt_tokens=64, prompt_bytes=300, blocks=blocks)

    def prove(self, slot: int) -> None:
        for number in range(100 + 50 * slot, 116 + 50 * slot):
            request = self.request(number, True, **{f"s{slot}": (2.0,)})
            self.fleet.match(request)
            predicted = self.exact.sent(request, slot, -1, 0.0)
            self.exact.ended(predicted, Usage(prompt_tokens=64, completion_tokens=1, cached_tokens=32), True, 0.0)


def test_answers_are_believed_as_events_are() -> None:
    world = World()
    assert [world.exact.source(slot) for slot in range(2)] == ["either", "either"]
    share = world.fleet.match(world.request(1, True, s1=(2.0,)))
    assert share is not None and share[:2].tolist() == pytest.approx([0, 0.5], abs=1e-3)
    world.prove(0)
    world.prove(1)
    assert [world.exact.source(slot) for slot in range(2)] == ["exact", "exact"]
    world.fleet.validate()


def test_without_an_answer_the_learned_column_stays_as_it_is() -> None:
    world = World()
    world.prove(0)
    learned = np.array([0.7, 0.2])
    speed = np.ones(2)
    request = world.request(1, False)
    kept = world.exact.refine(request, learned, 2, speed)
    assert kept is learned
    # An answer that nobody holds anything is another thing: it is a zero of who is trusted.
    zeroed = world.exact.refine(world.request(2, True), learned, 2, speed)
    assert zeroed is not None and zeroed.tolist() == [0.0, 0.2]
    # Nothing is predicted without an answer, so nothing can come out wrong.
    predicted = world.exact.sent(request, 0, -1, 0.0)
    world.exact.ended(predicted, Usage(prompt_tokens=64, completion_tokens=1, cached_tokens=48), True, 0.0)
    assert world.exact.check.judged(0).off == 0


def test_a_target_that_is_an_adapter_has_other_blocks_than_were_asked_for() -> None:
    world = World()
    world.exact.know_adapters(["sql"])
    assert world.exact.adapters == {"sql"}
    learned = np.array([0.7, 0.2])
    for model, same in (("other", False), ("sql", True)):
        share = world.exact.refine(world.request(1, True, model, s1=(2.0,)), learned, 2, np.ones(2))
        assert (share is learned) is same


@pytest.mark.parametrize(("suspect", "cause"), [(None, "unknown"), (Finding("tokeniser", "m differs"), "tokeniser")])
def test_a_wrong_prediction_is_blamed_on_what_is_known_to_be_wrong(suspect: Finding | None, cause: str) -> None:
    world = World()
    world.exact.check.suspect(lambda slot: suspect if slot == 0 else Finding("chat-template"))
    for number in range(4):
        request = world.request(number, True)
        world.fleet.match(request)
        predicted = world.exact.sent(request, 0, -1, 0.0)
        world.exact.ended(predicted, Usage(prompt_tokens=64, completion_tokens=1, cached_tokens=48), True, 0.0)
    assert world.exact.check.judged(0).causes == {cause: 4}
    assert world.exact.source(0) == "learned"


def test_an_indexer_that_is_full_is_named_as_the_cause() -> None:
    world = World()
    for dropped in (True, False):
        world.index.report(0, [replace(CURRENT, dropped=dropped)])
        request = world.request(dropped, True)
        world.fleet.match(request)
        predicted = world.exact.sent(request, 0, -1, 0.0)
        world.exact.ended(predicted, Usage(prompt_tokens=64, completion_tokens=1, cached_tokens=48), True, 0.0)
    assert world.exact.check.judged(0).causes == {"index-full": 1, "unknown": 1}


# ---------------------------------------------------------------- engines' hashes


def held(index: KvIndex, slot: int, hashes: list[int], keys: list[int], tier: Tier = Tier.GPU, depth: int = 0) -> None:
    index.store(index.shelf(index.rank(slot, 0, ANY_MODEL), 0, tier), hashes, keys, depth)


@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_hashes_stand_for_the_keys_of_what_somebody_holds(seed: int, endpoints: int, blocks: int) -> None:
    rng = Random(seed)
    index = KvIndex()
    hashes = [rng.getrandbits(64) | 8 for _ in range(blocks)]
    keys = [rng.getrandbits(64) | 8 for _ in range(blocks)]
    known: set[int] = set()
    for slot in range(endpoints):
        index.add_slot(slot)
        split, end = sorted((rng.randint(0, blocks), rng.randint(0, blocks)))
        held(index, slot, hashes[:split], keys[:split])
        held(index, slot, hashes[split:end], keys[split:end], Tier.HOST, split)
        known |= {*range(end)}
    assert keys_of(index, hashes, ANY_MODEL).tolist() == keys[: len(known)]
    other = [*hashes[: blocks // 2], 5, *hashes[blocks // 2 :]]
    assert keys_of(index, other, ANY_MODEL).tolist() == keys[: min(blocks // 2, len(known))]


def test_hashes_are_keys_where_the_index_is_of_engine_keys() -> None:
    space = EngineSpace()
    found = keys_of(KvIndex(space=space), [1, 2, 3], ANY_MODEL)
    assert found.tolist() == engine_keys(ANY_MODEL, [1, 2, 3]).tolist()


def test_hashes_come_as_numbers_of_either_sign_and_as_text() -> None:
    assert numbers([1, 2**64 - 1]) == [1, 2**64 - 1]
    assert numbers([-1, "18446744073709551615", "-2", 7]) == [2**64 - 1, 2**64 - 1, 2**64 - 2, 7]
    assert numbers([]) == []
    for wrong in (2**64, -(2**63) - 1, "x", "", "1.0", "٣", "1" * 30, "--1"):
        with pytest.raises(ValueError, match="entry 1"):
            numbers([1, wrong])
