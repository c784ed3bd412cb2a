"""Exact prefix knowledge in decisions: what engines told of their caches, beside what was learned from own decisions.

`Fleet.match` stays the one question: the share of a prompt that each endpoint holds. Where this is switched on, the
learned column is corrected here, endpoint by endpoint, as far as its events can be relied on.

Theory. Keys are hashes of content, so an exact match cannot come about by accident, but an exact zero can: another
tokeniser, template, block size or seed than the engine's never matches, and looks just like an empty cache. So a
positive answer is believed from the beginning, a zero only of an endpoint that has proved its predictions.

Rules
* `learned`: no events were heard, or they are distrusted (`core.trust`). As if this module were not there.
* `either`: events are heard, but not proven: exact where it says more than nothing, else learned.
* `most`: history is missing, a replay is under way, or the connection is lost: whichever says more.
* `exact`: proven and up to date.
* A prompt that was just sent counts as held there until shortly after its first token, when its events have come.
* Answers are compared with the exact prediction also while it is not used (`core.trust`), so an endpoint that
  agrees again is believed again.
* Token ids are the prompt in other words. They are no part of a request, so that no record or log can show them: the
  request carries hashes (`Request.blocks`), the ids are kept here until it is sent, and then the hashes go too.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any

import numpy as np
from msgspec import Struct

from fairlead.core.columns import FloatColumn
from fairlead.core.kv.index import KvIndex
from fairlead.core.kv.match import BlockChain, KvMatch
from fairlead.core.kv.recipe import Recipe, TokenIds, new_index
from fairlead.core.kv.speculation import Guess
from fairlead.core.kv.tiers import Tier, TierCosts
from fairlead.core.request import Request, Usage
from fairlead.core.trust import Awaited, SelfCheck

_LEARNED, _EITHER, _MOST, _EXACT = range(4)
#: How far an endpoint's events are relied on; see the rules.
SOURCES = ("learned", "either", "most", "exact")

#: Seconds after the first token in which the engine's events come (vLLM 0.32: 6 ms at the median), and how long a
#: prompt counts after its decision at most.
SETTLING = 0.05
LEASE = 120.0
#: Bytes of token ids of prompts that wait to be sent. The oldest give way; what was learned serves them.
_MOST_WAITING = 64 << 20
#: Names of adapters that events may make us know.
_MOST_ADAPTERS = 10_000
#: Added before tokens become a share, so that turning it back and rounding down gives them again.
_ROUNDING = 1e-6


class PromptBlocks(Struct, eq=False, gc=False):
    """`Request.blocks`: what was found for a prompt. Columns are in tokens, one entry per slot; `None` = nobody holds
    anything. Empty once the request is decided."""

    #: For which model, and its blocks by size; `None` = not looked for yet.
    model: str = ""
    chains: dict[int, BlockChain] | None = None
    #: What it saves: less for what lies in a slower tier.
    credit: FloatColumn | None = None
    #: What the engine should report as cached.
    hits: FloatColumn | None = None
    #: The part of it that does not rest on prompts that were just sent.
    certain: FloatColumn | None = None

    def clear(self) -> None:
        """Keep nothing of the prompt: records keep requests."""
        self.chains = self.credit = self.hits = self.certain = None


class Predicted(Struct, eq=False, gc=False):
    """What was predicted of a request that was sent: what it holds meanwhile, and what its answer is awaited for."""

    guess: Guess | None
    awaited: Awaited | None


class Prepared(Struct, frozen=True, gc=False):
    """A prompt's blocks as they are named for a model, by block size; answers of another process are in the chains."""

    model: str
    chains: dict[int, BlockChain]


class ExactKnowledge:
    """Owned by `Fleet`, which tells it of endpoints and requests. Events reach `index` through `core.kv.events`."""

    def __init__(
        self, recipe: Recipe | None = None, index: KvIndex | None = None, costs: TierCosts | None = None
    ) -> None:
        self.recipe = recipe or Recipe()
        self.index = index if index is not None else new_index(self.recipe)
        self.check = SelfCheck(self.index, self.recipe)
        self._costs = costs or TierCosts()
        self._slots: set[int] = set()
        self._sources = np.zeros(0, np.int8)
        #: Tokens per block, of all engines.
        self.sizes: tuple[int, ...] = ()
        self._adapters: set[str] = set()
        #: Token ids of prompts that are not sent yet, and how many bytes they hold.
        self._offered: OrderedDict[PromptBlocks, TokenIds] = OrderedDict()
        self._waiting = 0
        #: Some endpoint has events and has not settled: answers should be followed for what they report.
        self.curious = False
        self._settling: deque[tuple[float, Guess]] = deque()

    # ---------------------------------------------------------------- endpoints

    def add_slot(self, slot: int) -> None:
        """An endpoint joined, with events or without."""
        self.index.add_slot(slot)
        self.check.add_slot(slot)
        self._slots.add(slot)
        if slot >= len(self._sources):
            self._sources = np.append(self._sources, np.zeros(slot + 1 - len(self._sources), np.int8))

    def drop_slot(self, slot: int) -> None:
        self.index.drop_slot(slot)
        self.check.drop_slot(slot)
        self._slots.discard(slot)
        self._sources[slot] = _LEARNED

    def refresh(self, sizes: tuple[int, ...] = ()) -> None:
        """Take over the state of all feeds; O(endpoints), some times a second. `sizes`: block sizes known otherwise."""
        block_sizes = set(sizes)
        self.curious = False
        for slot in self._slots:
            for cache in self.index.caches_of(slot):
                if cache.block_size:
                    block_sizes.add(cache.block_size)
                if len(self._adapters) < _MOST_ADAPTERS:
                    self._adapters.update(head.lora for head in cache.beginnings if head.lora)
            self._judge(slot)
        self.sizes = (self.recipe.block_size,) if self.recipe.block_size else tuple(sorted(block_sizes))

    def _judge(self, slot: int) -> None:
        """How far the endpoint's events are relied on now."""
        caches = self.index.caches_of(slot)
        self.check.lived(slot, sum(cache.lives for cache in caches))
        trust = self.check.trust(slot)
        heard = any(cache.heard for cache in caches)
        self.curious |= heard and not trust.settled
        if trust.distrusted or not heard:
            source = _LEARNED
        elif not all(cache.current for cache in caches):
            source = _MOST
        else:
            source = _EXACT if trust.proven else _EITHER
        self._sources[slot] = source

    def know_adapters(self, names: Iterable[str]) -> None:
        """Names that are adapters', as told otherwise than by events."""
        for name in names:
            if len(self._adapters) < _MOST_ADAPTERS:
                self._adapters.add(name)

    @property
    def adapters(self) -> frozenset[str]:
        return frozenset(self._adapters)

    def adapter(self, model: str) -> str:
        """The name as an adapter's; empty = it is none that is known."""
        return self._adapter(model)

    def source(self, slot: int) -> str:
        """One of `SOURCES`."""
        return SOURCES[self._sources[slot]]

    # ---------------------------------------------------------------- decisions

    def refine(
        self, request: Request, learned: FloatColumn | None, slots: int, recompute_ms: FloatColumn
    ) -> FloatColumn | None:
        """The learned column (shares of the prompt; `None` = all zero) with what is known better.

        `recompute_ms`: per slot, what computing one token takes.
        """
        look = self._look(request, slots, recompute_ms)
        if look is None:
            return learned
        sources = self._sources
        if len(sources) != slots:  # the table grows ahead of its endpoints
            self._sources = sources = np.append(sources[:slots], np.zeros(max(slots - len(sources), 0), np.int8))
        if look.credit is None:
            return None if learned is None else np.where(sources == _EXACT, 0.0, learned)
        held = look.credit > 0.0
        exact = np.where(held, (look.credit + _ROUNDING) / max(request.prompt_tokens, 1), 0.0)
        if learned is None:
            learned = np.zeros(slots)
        chosen: FloatColumn = np.choose(
            sources, (learned, np.where(held, exact, learned), np.maximum(exact, learned), exact)
        )
        return chosen

    def prepare(self, tokens: TokenIds, model: str) -> "Prepared":
        """Name the prompt's blocks before it is offered: where they are more than `recipe.long`, in another thread."""
        return Prepared(model, self._chains(tokens, model))

    def offer(self, tokens: TokenIds, prepared: "Prepared | None" = None) -> PromptBlocks:
        """The prompt of a request that is about to arrive, for its `blocks`."""
        look = PromptBlocks() if prepared is None else PromptBlocks(prepared.model, prepared.chains)
        self._offered[look] = tokens
        self._waiting += len(tokens.ids)
        while self._waiting > _MOST_WAITING and self._offered:
            self._forget(next(iter(self._offered)))
        return look

    def _forget(self, look: PromptBlocks) -> TokenIds | None:
        tokens = self._offered.pop(look, None)
        if tokens is not None:
            self._waiting -= len(tokens.ids)
        return tokens

    def dropped(self, request: Request) -> None:
        """It will not be sent."""
        if request.blocks is not None:
            self._forget(request.blocks)
            request.blocks.clear()

    def _look(self, request: Request, slots: int, recompute_ms: FloatColumn) -> PromptBlocks | None:
        look: PromptBlocks | None = request.blocks
        tokens = None if look is None else self._offered.get(look)
        if look is None or tokens is None:
            return None
        model = request.target_model
        if look.chains is None or self._adapter(look.model) != self._adapter(model):
            look.chains = self._chains(tokens, model)
        look.model = model
        if not all(map(self.index.knows, look.chains.values())):
            look.chains = {}
        if not look.chains:
            return None
        look.credit = look.hits = look.certain = None
        for chain in look.chains.values():
            match = self.index.look_up(chain, slots)
            if match is not None:
                self._add(look, match, request.prompt_tokens, recompute_ms)
        return look

    def _chains(self, tokens: TokenIds, model: str) -> dict[int, BlockChain]:
        lora = self._adapter(model)
        chains = {size: self.recipe.chain(self.index.space, tokens, size, lora) for size in self.sizes}
        return {size: chain for size, chain in chains.items() if chain is not None}

    def _adapter(self, model: str) -> str:
        return model if model in self._adapters else ""

    def _add(self, look: PromptBlocks, match: KvMatch, prompt: int, recompute_ms: FloatColumn) -> None:
        hits = match.hit_tokens(prompt)
        certain = np.minimum(match.tiers.sum(axis=0) * match.block_size, hits)
        credit = hits
        if len(match.tiers) > 1:
            fetching = np.zeros(len(hits))
            for tier in range(1, len(match.tiers)):
                price = self._costs.transfer_ms(Tier(tier)) / np.maximum(recompute_ms, 1e-9)
                fetching += match.tiers[tier] * np.minimum(price, 1.0)
            credit = np.maximum(hits - fetching * match.block_size, 0.0)
        if look.hits is None or look.certain is None or look.credit is None:
            look.hits, look.certain, look.credit = hits, certain, credit
        else:
            look.hits, look.certain = np.maximum(look.hits, hits), np.maximum(look.certain, certain)
            look.credit = np.maximum(look.credit, credit)

    def sent(self, request: Request, slot: int, prefill_slot: int, now: float) -> Any:
        """The request goes there: until events tell, its prompt counts as held. Returns what `first_token` and `ended`
        want to know of it again."""
        look: PromptBlocks | None = request.blocks
        if look is None:
            return None
        tokens, chains = self._forget(look), look.chains
        if tokens is None or not chains:
            look.clear()
            return None
        self._settle(now)
        guess = awaited = None
        computing = prefill_slot if prefill_slot >= 0 else slot
        chain = self._chain_at(chains, computing)
        if chain is not None:
            guess = self.index.speculation.add(computing, chain.keys, now + LEASE)
        if prefill_slot < 0:  # else its answer tells of the one that decodes
            hits, certain = _at(look.hits, slot), _at(look.certain, slot)
            awaited = self.check.expect(slot, tokens, self._adapter(look.model), hits, certain == hits)
        look.clear()
        return Predicted(guess, awaited)

    def _chain_at(self, chains: dict[int, BlockChain], slot: int) -> BlockChain | None:
        """In blocks of that endpoint, if it has events: without, nothing would confirm it."""
        for cache in self.index.caches_of(slot):
            if cache.heard and cache.block_size in chains:
                return chains[cache.block_size]
        return None

    # ---------------------------------------------------------------- afterwards

    def first_token(self, predicted: Any, now: float) -> None:
        """Its blocks are computed, and the engine tells of them any moment. `predicted`: as `sent` returned it."""
        if predicted is not None and predicted.guess is not None:
            self._settling.append((now + SETTLING, predicted.guess))
        self._settle(now)

    def ended(self, predicted: Any, usage: Usage, served: bool, now: float) -> None:
        """A request is over. Not `served`: nobody knows how far it came."""
        if served:
            self.first_token(predicted, now)
        if predicted is None:
            return
        if not served and predicted.guess is not None:
            self.index.speculation.release(predicted.guess)
        slot = self.check.ended(predicted.awaited, usage) if predicted.awaited is not None else -1
        if slot >= 0:
            self._judge(slot)

    def _settle(self, now: float) -> None:
        settling = self._settling
        while settling and settling[0][0] <= now:
            self.index.speculation.release(settling.popleft()[1])

    def validate(self) -> None:
        """Raise `AssertionError` when an invariant of any part is broken."""
        self.index.validate()
        assert self._waiting == sum(len(tokens.ids) for tokens in self._offered.values()) <= _MOST_WAITING
        assert not any(self._sources[slot] for slot in range(len(self._sources)) if slot not in self._slots)


def _at(column: FloatColumn | None, slot: int) -> int:
    return int(column[slot]) if column is not None else 0
