"""Decisions with KV events: what counts, from when on, and what does not outlive its request."""

from itertools import count
from random import Random
from typing import Any

import numpy as np
import pytest
from kv_blocks import apply_all
from leases import lease_of
from msgspec.structs import replace
from waiting_rules import AbleRules

from fairlead.apis.tokens import PromptTokens
from fairlead.core.binding import PairBinder
from fairlead.core.endpoint import BaseModels, Endpoint, Sample
from fairlead.core.events import (
    AdaptersListed,
    EndpointDown,
    EndpointUp,
    FirstTokenSeen,
    MetricsSampled,
    ModelsChanged,
    RequestArrived,
    ResponseEnded,
)
from fairlead.core.exact import SETTLING, ExactKnowledge
from fairlead.core.fleet import Fleet
from fairlead.core.instructions import Reject, Route
from fairlead.core.kv.events import AllCleared, BlocksRemoved, BlocksStored
from fairlead.core.kv.index import KvIndex
from fairlead.core.kv.recipe import ANY_MODEL, Recipe
from fairlead.core.models import InferenceModel, ModelSet, Origin
from fairlead.core.prefix import ChainHasher
from fairlead.core.records import DecisionRecord, OutcomeRecord
from fairlead.core.request import NO_PREFIX, Request, Usage
from fairlead.core.scheduler import Pipeline
from fairlead.core.tokens import TokenEstimator
from fairlead.plugins.policies.cost_model import CostModel
from fairlead.testing import SimClock

BLOCK = 16


def packed(ids: list[int]) -> bytes:
    return np.array(ids, "<u4").tobytes()


class Engine:
    """What an engine with that cache would tell, in its own hashes."""

    def __init__(self, world: "World", slot: int, block: int = BLOCK) -> None:
        self.world, self.slot, self.block = world, slot, block
        self.cache = world.exact.index.rank(slot, 0, ANY_MODEL)
        self.cache.heard = self.cache.linked = True
        self._names: dict[tuple[int, ...], int] = {}

    def name(self, ids: list[int], blocks: int) -> int:
        return self._names.setdefault(tuple(ids[: blocks * self.block]), 1000 * self.slot + len(self._names) + 1)

    def store(self, ids: list[int], start: int = 0, lora: str = "", medium: str = "GPU") -> None:
        """All full blocks from block `start` on."""
        end = len(ids) // self.block
        hashes = [self.name(ids, at + 1) for at in range(start, end)]
        parent = self.name(ids, start) if start else 0
        tokens = packed(ids[start * self.block : end * self.block])
        self.tell(BlocksStored(hashes, parent, tokens, self.block, lora, medium))

    def forget(self, ids: list[int], start: int) -> None:
        self.tell(BlocksRemoved([self.name(ids, at + 1) for at in range(start, len(ids) // self.block)], "GPU"))

    def tell(self, event: BlocksStored | BlocksRemoved | AllCleared) -> None:
        apply_all(self.world.exact.index, self.cache, event, self.world.clock.time())
        self.world.fleet.refresh_exact(())


class World:
    """A pipeline over some endpoints."""

    def __init__(self, endpoints: int = 2, recipe: Recipe | None = None) -> None:
        self.clock = SimClock()
        self.exact = ExactKnowledge(recipe)
        self.fleet = Fleet(exact=self.exact)
        self.pipeline = Pipeline(self.clock, Random(1), self.fleet, CostModel(), TokenEstimator())
        self.verdicts: list[tuple[int, bool, str]] = []
        self.exact.check.tell(
            lambda v: self.verdicts.append((v.slot, v.trusted, v.finding.cause if v.finding else "")), lambda: None
        )
        self._ids = count(1)
        self._hasher = ChainHasher(64)
        for number in range(endpoints):
            self.up(f"e{number}", number)

    def up(self, name: str, number: int) -> None:
        self.pipeline.handle(EndpointUp(Endpoint(name, f"10.0.0.{number + 1}:8000")))

    def request(self, ids: list[int], model: str = "m", salt: str = "", **fields: Any) -> Request:
        raw = packed(ids)
        return Request(
            id=next(self._ids), arrived=self.clock.time(), api="completions", model=model, prompt_bytes=len(raw),
            prompt_tokens=len(ids), prefix=self._hasher.chain(b"", raw),
            blocks=self.exact.offer(PromptTokens(ids=raw, total=len(ids), salt=salt)),
            **fields,
        )  # fmt: skip

    def shares(self, ids: list[int], **more: Any) -> list[int]:
        """Tokens of the prompt that each endpoint is believed to hold."""
        column = self.fleet.match(self.request(ids, **more))
        return [0] * len(self.fleet.table) if column is None else (column * len(ids)).astype(int).tolist()

    def send(self, ids: list[int], **more: Any) -> tuple[Request, DecisionRecord]:
        request = self.request(ids, **more)
        (route, record) = self.pipeline.handle(RequestArrived(request))
        assert isinstance(route, Route) and isinstance(record, DecisionRecord)
        return request, record

    def end(self, request: Request, prompt: int, cached: int) -> OutcomeRecord:
        self.pipeline.handle(FirstTokenSeen(request.id))
        usage = Usage(prompt_tokens=prompt, completion_tokens=1, cached_tokens=cached)
        (record,) = self.pipeline.handle(ResponseEnded(request_id=request.id, status=200, usage=usage))
        assert isinstance(record, OutcomeRecord)
        self.clock.advance(1.0)
        self.pipeline.validate()
        return record

    def prove(self, engine: Engine, answers: int = 3) -> None:
        """Requests at that endpoint alone whose predictions come true."""
        for number in range(answers):
            ids = [7_000_000 + 1000 * number + i for i in range(64)]
            engine.store(ids)
            while True:
                request, decision = self.send(ids)
                here = decision.endpoint == f"e{engine.slot}"
                self.end(request, 64, 48 if here else 0)
                if here:
                    break


@pytest.fixture
def world() -> World:
    return World()


def prompt(length: int, seed: int = 0) -> list[int]:
    return [seed * 100_000 + i for i in range(length)]


def test_the_endpoint_that_told_of_the_blocks_gets_the_request(world: World) -> None:
    ids = prompt(100)
    Engine(world, 0)
    Engine(world, 1).store(ids)
    _, decision = world.send(ids)
    assert (decision.endpoint, decision.hit_tokens, decision.best_hit_tokens) == ("e1", 96, 96)


def test_of_whole_blocks_the_last_is_computed_again(world: World) -> None:
    Engine(world, 0).store(prompt(96))
    assert world.shares(prompt(96)) == [80, 0]
    assert world.shares(prompt(97)) == [96, 0]


def test_without_token_ids_nothing_changes(world: World) -> None:
    Engine(world, 0).store(prompt(100))
    blind = Request(id=99, arrived=0.0, prompt_tokens=100, prompt_bytes=400)
    assert world.fleet.match(blind) is None


def test_an_endpoint_without_events_stays_on_what_was_learned(world: World) -> None:
    ids, other = prompt(128), prompt(128, 1)
    engine = Engine(world, 1)
    engine.store(ids)
    world.prove(engine)
    world.fleet.prefix.insert(0, world.request(ids[:100] + other[:28]).prefix)
    world.fleet.prefix.insert(1, world.request(other).prefix)
    shares = world.shares(ids)
    assert [world.exact.source(0), world.exact.source(1)] == ["learned", "exact"]
    assert (90 < shares[0] <= 100, shares[1]) == (True, 112)
    # What was learned of an endpoint with proven events counts no more.
    assert world.shares(other) == [0, 0]


def test_a_zero_counts_once_the_endpoint_is_proven(world: World) -> None:
    ids = prompt(128)
    engine = Engine(world, 0)
    engine.store(prompt(64, 3))
    world.fleet.prefix.insert(0, world.request(ids).prefix)
    assert world.exact.source(0) == "either"
    assert world.shares(ids)[0] > 100
    world.prove(engine)
    assert world.exact.source(0) == "exact"
    assert world.shares(ids)[0] == 0


def test_while_something_is_missing_whoever_says_more_counts(world: World) -> None:
    ids = prompt(128)
    engine = Engine(world, 0)
    world.prove(engine)
    engine.store(ids)
    world.fleet.prefix.insert(0, world.request([*ids[:64], *prompt(64, 2)]).prefix)
    for name in ("provisional", "behind"):
        setattr(engine.cache, name, True)
        world.exact.refresh()
        assert world.exact.source(0) == "most"
        assert world.shares(ids)[0] == 112
        assert world.shares([*ids[:64], *prompt(64, 2)])[0] > 64
        setattr(engine.cache, name, False)
    engine.cache.linked = False
    world.exact.refresh()
    assert world.exact.source(0) == "most"


def test_what_a_full_index_dropped_is_no_zero() -> None:
    exact = ExactKnowledge(index=KvIndex(max_blocks=40))
    exact.add_slot(0)
    cache = exact.index.rank(0, 0, ANY_MODEL)
    cache.heard = cache.linked = True
    blind = Request(id=1, arrived=0.0, prompt_tokens=160, prompt_bytes=640)

    def ask(number: int) -> None:
        exact.refresh()
        tokens = PromptTokens(ids=packed(prompt(160, number)), total=160)
        request = replace(blind, id=number, blocks=exact.offer(tokens))
        share = exact.refine(request, np.array([0.9]), 1, np.ones(1))
        assert share is not None and share[0] == pytest.approx(0.9, abs=0.01)
        predicted = exact.sent(request, 0, -1, 0.0)
        exact.ended(predicted, Usage(prompt_tokens=160, completion_tokens=1, cached_tokens=144), True, 0.0)

    for number in range(8):
        event = BlocksStored([100 * number + at for at in range(1, 11)], 0, packed(prompt(160, number)), BLOCK)
        apply_all(exact.index, cache, event, 0.0)
    for number in range(8):
        ask(number)
    judged = exact.check.judged(0)
    assert judged.off > 2 and judged.causes == {"index-full": judged.off}
    # What is missing of the next engine was not dropped.
    exact.index.restarted(cache)
    cache.provisional = True
    apply_all(exact.index, cache, BlocksStored([1], 0, packed(prompt(16, 9)), BLOCK), 0.0)
    ask(10)
    assert judged.causes.pop("index-full") == judged.off - 1 and judged.causes == {"unknown": 1}


def test_a_prompt_that_was_just_sent_counts_until_its_events_come(world: World) -> None:
    world = World(1)
    Engine(world, 0).store(prompt(32, 9))
    ids = prompt(100)
    request, first = world.send(ids)
    _, second = world.send(ids)
    assert (first.hit_tokens, second.hit_tokens) == (0, 96)
    world.pipeline.handle(FirstTokenSeen(request.id))
    world.clock.advance(SETTLING / 2)
    assert max(world.shares(ids)) == 96
    world.clock.advance(SETTLING)
    world.send(prompt(20, 5))
    world.exact.index.speculation.validate()
    assert len(world.exact.index.speculation) == 2  # the second of the same prompt, and this one


def test_a_request_that_waited_is_looked_up_at_the_time_of_its_decision() -> None:
    world = World(1)
    world.prove(Engine(world, 0))
    ids = prompt(100)
    waiting = world.request(ids)
    first, _ = world.send(ids)
    world.pipeline.handle(FirstTokenSeen(first.id))
    world.clock.advance(2 * SETTLING)
    binder = PairBinder(AbleRules(lambda request, fleet, now: None))
    _, known = binder.look(waiting, world.fleet, world.clock.time())
    assert known.share.max() == 0.0


def test_a_prompt_that_was_sent_before_a_pause_counts_no_more(world: World) -> None:
    engine = Engine(world, 0)
    world.prove(engine)
    ids = prompt(100)
    request, decision = world.send(ids)
    assert decision.endpoint == "e0"
    world.end(request, 100, 0)
    engine.store(ids)
    engine.tell(AllCleared())  # in the pause
    again, decision = world.send(ids)
    assert decision.hit_tokens == 0
    world.end(again, 100, 0)


def test_a_request_that_fails_leaves_nothing_behind(world: World) -> None:
    Engine(world, 0).store(prompt(32, 9))
    Engine(world, 1).store(prompt(32, 9))
    ids = prompt(100)
    request, _ = world.send(ids)
    world.pipeline.handle(ResponseEnded(request_id=request.id, status=503))
    assert len(world.exact.index.speculation) == 0


def test_a_request_that_is_refused_for_its_model_leaves_no_prompt_behind(world: World) -> None:
    other = InferenceModel(origin=Origin(namespace="n", name="a"), model="other")
    world.pipeline.handle(ModelsChanged(ModelSet((other,))))
    ids = prompt(100)
    Engine(world, 0).store(ids)
    assert world.fleet.match(world.request(ids)) is not None
    refused = world.request(ids)
    reject, _ = world.pipeline.handle(RequestArrived(refused))
    assert isinstance(reject, Reject)
    assert world.fleet.match(refused) is None


def test_blocks_that_were_named_before_count_for_the_model_they_were_named_for(world: World) -> None:
    ids = prompt(100)
    Engine(world, 0).store(ids)
    Engine(world, 1).store(ids[:48], lora="poet")
    tokens = PromptTokens(ids=packed(ids), total=100)
    base, poet = [96, 0], [0, 48]
    for named, asked, expected in (("m", "m", base), ("poet", "poet", poet), ("m", "poet", poet), ("poet", "m", base)):
        request = world.request(ids, model=asked)
        request = replace(request, blocks=world.exact.offer(tokens, world.exact.prepare(tokens, named)))
        column = world.fleet.match(request)
        assert column is not None
        assert (column * 100).astype(int).tolist() == expected


def test_removed_and_cleared_blocks_count_no_more(world: World) -> None:
    engine = Engine(world, 0)
    engine.store(prompt(100))
    engine.forget(prompt(100), 3)
    assert world.shares(prompt(100)) == [48, 0]
    engine.tell(AllCleared())
    assert world.shares(prompt(100)) == [0, 0]


def learned(world: World, ids: list[int], slot: int) -> float:
    """The share of a prompt without token ids that an endpoint is believed to hold."""
    column = world.fleet.match(replace(world.request(ids), blocks=None))
    return 0.0 if column is None else float(column[slot])


def test_what_was_learned_ends_with_the_cache_of_the_engine(world: World) -> None:
    engine, ids = Engine(world, 0), prompt(100)
    second = world.exact.index.rank(0, 1, ANY_MODEL)
    world.fleet.refresh_exact(())
    world.fleet.prefix.insert(0, world.request(ids).prefix)
    world.fleet.prefix.insert(1, world.request(ids).prefix)
    engine.cache.behind = True
    engine.tell(AllCleared())  # of a replay: long ago
    engine.cache.behind = False
    engine.tell(AllCleared())  # the other rank still has its blocks
    assert learned(world, ids, 0) > 0.9
    apply_all(world.exact.index, second, AllCleared(), 0.0)
    world.fleet.refresh_exact(())
    assert (learned(world, ids, 0), learned(world, ids, 1) > 0.9) == (0.0, True)
    world.fleet.prefix.insert(0, world.request(ids).prefix)
    world.fleet.refresh_exact(())
    assert learned(world, ids, 0) > 0.9
    for cache in (engine.cache, second):  # perhaps only the connection was lost
        world.exact.index.restarted(cache)
    world.fleet.refresh_exact(())
    assert learned(world, ids, 0) > 0.9
    engine.tell(AllCleared())
    for _ in range(200):
        world.fleet.refresh_exact(())
    apply_all(world.exact.index, second, AllCleared(), 0.0)  # long after the first one
    world.fleet.refresh_exact(())
    assert learned(world, ids, 0) > 0.9
    engine.tell(AllCleared())
    assert learned(world, ids, 0) == 0.0
    world.pipeline.validate()


def test_another_rank_is_no_cleared_cache(world: World) -> None:
    engine, ids = Engine(world, 0), prompt(100)
    engine.tell(AllCleared())
    world.fleet.prefix.insert(0, world.request(ids).prefix)
    world.exact.index.rank(0, 1, ANY_MODEL)
    world.fleet.refresh_exact(())
    world.exact.index.keep_ranks(0, {0})
    world.fleet.refresh_exact(())
    assert learned(world, ids, 0) > 0.9
    engine.tell(AllCleared())
    assert learned(world, ids, 0) == 0.0


def test_slower_tiers_count_by_what_fetching_costs(world: World) -> None:
    engine = Engine(world, 0)
    ids = prompt(161)
    engine.store(ids[:80])
    everything = world.shares([*ids[:80], 1])[0]
    engine.store(ids, 5, medium="cpu")
    host = world.shares(ids)[0]
    assert everything == 80
    # At the prior's 0.043 ms a token, fetching one from the host's memory (0.005 ms) costs a ninth of that.
    assert 80 + 80 * 0.85 < host < 80 + 80 * 0.92


def test_blocks_of_different_sizes_live_side_by_side(world: World) -> None:
    Engine(world, 0, 16).store(prompt(100))
    Engine(world, 1, 32).store(prompt(100))
    assert world.shares(prompt(100)) == [96, 96]
    assert world.shares(prompt(64)) == [48, 32]


def chunk(ids: list[int]) -> BlocksStored:
    """What a connector tells of its copies in the host's memory, in chunks of 64 tokens."""
    chunks = len(ids) // 64
    return BlocksStored([9000 + ids[0] + at for at in range(chunks)], 0, packed(ids[: 64 * chunks]), 64, medium="CPU")


@pytest.mark.parametrize("first", [True, False])
def test_chunks_of_a_connector_hide_no_blocks(first: bool) -> None:
    world = World(1)
    ids, other = prompt(160), prompt(160, 1)
    engine = Engine(world, 0)
    if first:
        engine.tell(chunk(ids))
    engine.store(ids)
    if not first:
        engine.tell(chunk(ids))
    engine.tell(chunk(other))
    assert (engine.cache.block_size, world.exact.sizes) == (16, (16, 64))
    assert {head.block_size for head in engine.cache.stores()[-1:]} == {16}
    assert world.shares(ids) == [144]
    assert 110 < world.shares(other)[0] <= 128  # two chunks, in the host's memory
    world.send(prompt(60, 2))
    assert world.shares(prompt(60, 2)) == [48]  # it counts at once, in the GPU's blocks
    engine.tell(AllCleared())
    assert (engine.cache.block_size, world.exact.sizes) == (16, (16,))


def test_endless_block_sizes_are_forgotten(world: World) -> None:
    engine = Engine(world, 0)
    engine.store(prompt(100))
    for size in range(20, 60):
        engine.tell(BlocksStored([size], 0, packed(prompt(size, size)), size, medium="cpu"))
    assert world.exact.sizes == (16, 57, 58, 59)
    assert engine.cache.block_size == 16


def test_an_adapter_has_blocks_of_its_own(world: World) -> None:
    engine = Engine(world, 0)
    engine.store(prompt(100), lora="poet")
    assert world.shares(prompt(100), model="poet") == [96, 0]
    assert world.shares(prompt(100), model="m") == [0, 0]


def test_an_adapter_is_known_by_an_event_that_continues_a_prompt() -> None:
    world = World(1)
    Engine(world, 0).store(prompt(100), start=2, lora="poet")
    assert world.exact.adapters == {"poet"}


def test_adapters_that_events_only_number_have_learned_prefixes() -> None:
    world = World(1)
    engine = Engine(world, 0)
    world.prove(engine)
    ids = prompt(100)
    engine.store(ids, lora="#1")
    world.exact.know_adapters(["poet"])
    for number in range(40):
        engine.store(prompt(32, 100 + number))
    for _ in range(8):
        request, _ = world.send(ids, model="poet")
        world.end(request, 100, 96)
    judged = world.exact.check.judged(0)
    assert (judged.off, judged.idle, world.exact.source(0)) == (0, 0, "exact")
    assert world.shares(ids, model="poet")[0] > 60  # learned by what was sent
    assert world.shares(ids) == [0]
    # Once it names them, they count.
    engine.store(prompt(48, 50), lora="poet")
    assert world.shares(prompt(50, 50), model="poet") == [48]


def test_adapters_are_numbered_in_large_blocks_too_until_a_new_engine_comes() -> None:
    world = World(1)
    engine = Engine(world, 0, block=528)
    engine.store(prompt(1056), lora="#1")
    assert engine.cache.numbered
    engine.store(prompt(1056, 1))
    assert engine.cache.numbered
    world.exact.index.restarted(engine.cache)
    assert not engine.cache.numbered


def test_a_salt_sets_prompts_apart(world: World) -> None:
    engine = Engine(world, 0)
    ids = prompt(48)
    hashes = [engine.name(ids, at + 1) for at in range(3)]
    engine.tell(BlocksStored(hashes, 0, packed(ids), BLOCK, extras=[("pepper",), (), ()]))
    assert world.shares([*ids, 1], salt="pepper") == [48, 0]
    assert world.shares([*ids, 1], salt="sugar") == [0, 0]
    assert world.shares([*ids, 1]) == [0, 0]


def test_predictions_that_fail_end_the_trust_and_those_that_agree_bring_it_back(world: World) -> None:
    world = World(1)
    engine = Engine(world, 0)
    world.prove(engine)
    for number in range(4):
        request, decision = world.send(prompt(128, 10 + number))
        assert decision.hit_tokens == 0
        world.end(request, 128, 112)
    assert world.verdicts == [(0, True, ""), (0, False, "unknown")]
    assert world.exact.source(0) == "learned"
    assert world.exact.curious
    # It still predicts, so it can be believed again.
    for number in range(4):
        ids = prompt(128, 30 + number)
        engine.store(ids)
        request, decision = world.send(ids)
        assert decision.hit_tokens == 0
        world.end(request, 128, 112)
    assert world.verdicts[-1] == (0, True, "")
    assert world.exact.source(0) == "exact"
    judged = world.exact.check.judged(0)
    assert (judged.equal, judged.close, judged.off) == (7, 0, 4)


def test_a_new_life_of_the_engine_must_prove_itself(world: World) -> None:
    world = World(1)
    engine = Engine(world, 0)
    world.prove(engine, 20)
    assert not world.exact.curious
    world.exact.index.restarted(engine.cache)
    world.exact.refresh()
    assert world.exact.source(0) == "either"
    assert world.exact.curious


def test_an_engine_with_fewer_ranks_does_not_inherit_trust(world: World) -> None:
    world = World(1)
    engine, index = Engine(world, 0), world.exact.index
    caches = [engine.cache, index.rank(0, 1, ANY_MODEL)]
    for cache in caches:
        cache.heard = cache.linked = True
        index.restarted(cache)
    world.exact.refresh()
    for _ in range(3):
        world.exact.check.trust(0).judge(True)
    world.exact.refresh()
    assert world.exact.source(0) == "exact"
    # A rank whose first events arrive later is of the same engine.
    late = index.rank(0, 2, ANY_MODEL)
    late.heard = late.linked = True
    world.exact.refresh()
    assert world.exact.source(0) == "exact"
    for cache in index.caches_of(0):
        index.restarted(cache)
    index.keep_ranks(0, {0})
    world.exact.refresh()
    assert world.exact.source(0) == "either"


def test_answers_of_a_departed_endpoint_judge_nobody(world: World) -> None:
    world = World(1)
    Engine(world, 0)
    request, _ = world.send(prompt(128))
    predicted = lease_of(world.fleet, request.id).predicted
    world.pipeline.handle(EndpointDown("e0"))
    world.up("e9", 9)
    assert world.exact.source(0) == "learned"
    world.exact.ended(predicted, Usage(prompt_tokens=128, cached_tokens=112), True, 1.0)
    assert world.exact.check.judged(0).off == 0


@pytest.mark.parametrize("ranks", [2, 8])
def test_an_engine_that_chooses_among_ranks_keeps_its_trust(ranks: int) -> None:
    world, rng = World(1), Random(5)
    engines = [Engine(world, 0) for _ in range(ranks)]
    for rank, engine in enumerate(engines):
        engine.cache = world.exact.index.rank(0, rank, ANY_MODEL)
        engine.cache.heard = engine.cache.linked = True
    predicted = reported = 0
    talks = [prompt(320, seed) for seed in range(8)]
    for turn in range(400):
        number = rng.randrange(len(talks))
        ids = talks[number] = [*talks[number], *prompt(80, 100 + turn)] if turn % 40 else prompt(320, 1000 + turn)
        held, chosen = depths(world, ids), rng.randrange(ranks)
        request, decision = world.send(ids)
        cached = min(held[chosen], (len(ids) - 1) // BLOCK) * BLOCK
        predicted, reported = predicted + decision.hit_tokens, reported + cached
        engines[chosen].store(ids, cached // BLOCK)
        world.end(request, len(ids), cached)
    judged = world.exact.check.judged(0)
    assert (judged.off, world.exact.source(0)) == (0, "exact")
    assert judged.equal > 50
    assert predicted == pytest.approx(reported, rel=0.15)


def depths(world: World, ids: list[int]) -> list[int]:
    """Blocks that each rank of the first endpoint holds."""
    index = world.exact.index
    chain = world.exact.recipe.chain(index.space, PromptTokens(ids=packed(ids), total=len(ids)), BLOCK, "")
    found = index.look_up(chain, 1) if chain is not None else None
    return found.by_rank(0) if found is not None else [0] * len(index.caches_of(0))


def test_what_rests_on_a_guess_judges_nobody(world: World) -> None:
    world = World(1)
    Engine(world, 0).store(prompt(16, 4))
    ids = prompt(100)
    first, _ = world.send(ids)
    second, decision = world.send(ids)
    assert decision.hit_tokens == 96
    world.end(second, 100, 0)
    world.end(first, 100, 0)
    judged = world.exact.check.judged(0)
    assert (judged.idle, judged.off) == (2, 0)


def test_too_little_is_no_wonder_while_events_are_missing_but_too_much_is(world: World) -> None:
    world = World(1)
    engine = Engine(world, 0)
    world.prove(engine)
    engine.cache.linked = False
    for number in range(20):
        request, _ = world.send(prompt(128, 10 + number))
        world.end(request, 128, 112)
    world.exact.refresh()
    assert world.exact.source(0) == "most"
    # The engine goes on without telling, and forgets what it once told.
    for number in range(20):
        ids = prompt(128, 40 + number)
        engine.store(ids)
        request, _ = world.send(ids)
        world.end(request, 128, 0)
    assert world.exact.source(0) == "learned"
    assert world.verdicts[-1] == (0, False, "evicted")


def test_of_a_pair_the_endpoint_that_computes_the_prompt_will_hold_it(world: World) -> None:
    Engine(world, 0).store(prompt(32, 8))
    Engine(world, 1).store(prompt(32, 8))
    ids = prompt(100)
    request = world.request(ids)
    world.fleet.match(request)
    predicted = world.exact.sent(request, 0, 1, 0.0)
    assert world.shares(ids) == [0, 96]
    # The answer is the other one's: it says nothing of this prediction.
    world.exact.ended(predicted, Usage(prompt_tokens=100, cached_tokens=96), True, 0.0)
    assert world.exact.check.judged(0).off == world.exact.check.judged(1).off == 0


def test_engine_keys_need_the_engines_seed(world: World) -> None:
    recipe = Recipe("engine", "sha256_cbor", "7")
    world = World(1, recipe)
    assert recipe.hasher is not None
    engine = Engine(world, 0)
    ids = prompt(100)
    hashes = recipe.hasher.hashes(ids, BLOCK)
    engine.tell(BlocksStored(hashes, 0, packed(ids[:96]), BLOCK))
    assert world.shares(ids) == [96]
    salted = recipe.hasher.hashes(ids, BLOCK, salt="pepper")
    engine.tell(BlocksStored(salted, 0, packed(ids[:96]), BLOCK, extras=[("pepper",), *[()] * 5]))
    assert world.shares(ids, salt="pepper") == [96]
    assert world.shares(ids, salt="sugar") == [0]


def test_prompts_that_are_never_sent_are_bounded(world: World) -> None:
    Engine(world, 0).store(prompt(32))
    ids = prompt(1_000_000)
    first = world.request(ids)
    for _ in range(40):
        world.request(ids)
        world.exact.validate()
    _, decision = world.send(prompt(40))
    assert decision.hit_tokens == 32
    # Of what gave way nothing is known, and nothing breaks.
    assert world.fleet.match(replace(first, prefix=NO_PREFIX)) is None


def test_sequences_that_hit_the_first_one_of_their_request_prove_nothing() -> None:
    world = World(1)
    world.prove(Engine(world, 0))
    for number in range(4):
        request, decision = world.send(prompt(100, number), sequences=2)
        assert decision.hit_tokens == 0
        world.end(request, 100, 96)
    assert (world.exact.source(0), world.verdicts[-1][1]) == ("exact", True)


def test_a_prompt_that_the_engine_computes_again_hits_nothing_and_proves_nothing() -> None:
    world = World()
    engine = Engine(world, 0)
    world.prove(engine)
    for number in range(4):
        ids = prompt(100, number)
        engine.store(ids)
        request, decision = world.send(ids, recomputed=True)
        assert (decision.hit_tokens, decision.best_hit_tokens) == (0, 0)
        world.end(request, 100, 0)
    assert (world.exact.source(0), world.verdicts[-1][1]) == ("exact", True)
    assert world.fleet.prefix.match(request.prefix, 2) is not None, "it is cached afterwards"
    assert world.shares(ids)[0] == 96


def test_a_name_that_may_be_an_adapter_which_was_just_loaded_proves_nothing() -> None:
    world = World(1)
    engine = Engine(world, 0)
    world.prove(engine)
    engine.store(prompt(100))
    world.pipeline.handle(AdaptersListed("e0", frozenset(), BaseModels(frozenset("m"))))
    judged = world.exact.check.judged(0)

    def compared(model: str, cached: int, seed: int = 0) -> int:
        before = judged.equal + judged.off
        request, _ = world.send(prompt(100, seed), model=model)
        world.end(request, 100, cached)
        return judged.equal + judged.off - before

    assert compared("any", 96) == 1, "a server without adapters may not read the name"
    sample = Sample(waiting=0.0, running=0.0, kv_usage=0.0, adapters=frozenset(), max_adapters=4.0)
    world.pipeline.handle(MetricsSampled("e0", world.clock.time(), sample))
    assert (compared("poet", 0), compared("m", 96)) == (0, 1)
    engine.store(prompt(100, 1), lora="poet")
    assert compared("poet", 96, seed=1) == 1
    assert judged.off == 0


@pytest.mark.parametrize("linked", [True, False])
def test_blocks_of_a_restarted_engine_without_a_feed_are_forgotten(world: World, linked: bool) -> None:
    engine, ids = Engine(world, 0), prompt(64)
    engine.store(ids)
    assert world.shares(ids)[0] > 0
    engine.cache.linked = linked
    for queries in (1000.0, 10.0):
        sample = Sample(waiting=0.0, running=0.0, prefix_queries=queries)
        world.pipeline.handle(MetricsSampled("e0", world.clock.time(), sample))
    world.exact.refresh()
    assert (world.shares(ids)[0] > 0) is linked, "a feed reports the restart itself"
