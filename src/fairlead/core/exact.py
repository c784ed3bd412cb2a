"""The exact index in decisions: what engines report about their caches, in addition to the learned index.

`Fleet.match` remains the only query: the share of a prompt that each endpoint has cached. If exact knowledge is
switched on, the learned column is corrected here for each endpoint, as far as its events can be relied on.

Theory. Keys are hashes of content, so an exact match cannot be an accident. An exact zero can: if we use another
tokeniser, template, block size or seed than the engine, nothing ever matches, which looks like an empty cache. So a
match is always believed, and a zero only for an endpoint whose predictions are proven.

Rules (`SOURCES`)
* `learned`: no events have arrived, or they are distrusted (`core.trust`). Only the learned index is used.
* `either`: events arrive but are not proven: the exact value if it is above zero, else the learned one.
* `most`: history is missing, a replay is running, or the connection is lost: the higher of both values.
* `exact`: proven and up to date.
* A prompt that was just sent counts as cached there until shortly after its first token, when its events have arrived.
* Engines whose events only number adapters (vLLM ≤ 0.15) have learned values for prompts of adapters.
* Answers are compared with the exact prediction even while it is not used (`core.trust`), so an endpoint whose
  predictions agree again is trusted again.
* Token ids reveal the prompt. So they are not part of a request, and no record or log can show them: the request has
  only hashes (`Request.blocks`). The ids are kept here until it is sent, and then the hashes are deleted, too.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from msgspec import Struct, field

from fairlead.core.columns import FloatColumn
from fairlead.core.kv.index import KvIndex
from fairlead.core.kv.match import BlockChain, KvMatch
from fairlead.core.kv.recipe import Recipe, TokenIds
from fairlead.core.kv.speculation import Guess
from fairlead.core.kv.tiers import TRANSFER_MS
from fairlead.core.request import Request, Usage
from fairlead.core.trust import Awaited, SelfCheck

_LEARNED, _EITHER, _MOST, _EXACT = range(4)
#: Which index is used for an endpoint; see the rules.
SOURCES = ("learned", "either", "most", "exact")

#: Seconds after the first token within which the engine's events arrive (vLLM 0.32: 6 ms at the median), and the
#: longest time that a prompt counts as cached after its decision.
SETTLING = 0.05
LEASE = 120.0
#: Bytes of token ids of prompts that wait to be sent. The oldest are dropped; the learned index serves these prompts.
_MOST_WAITING = 64 << 20
#: Added before tokens are converted to a share, so that converting back and rounding down gives the same tokens.
_ROUNDING = 1e-6


class PromptBlocks(Struct, eq=False, gc=False):
    """The value of `Request.blocks`: what was found for a prompt. Columns are in tokens, one entry per slot; `None` =
    no endpoint has any of it. Empty once the request is decided."""

    #: The model that it was looked up for, and its blocks by block size; `None` = not looked up yet.
    model: str = ""
    chains: dict[int, BlockChain] | None = None
    #: Tokens that need not be computed; tokens in a slower tier count for less.
    credit: FloatColumn | None = None
    #: Tokens that the engine should report as cached.
    hits: FloatColumn | None = None
    #: The part of `hits` that does not depend on prompts that were just sent.
    certain: FloatColumn | None = None
    #: What `hits` is made of, by block size.
    matches: list[KvMatch] = field(default_factory=list)

    def clear(self) -> None:
        """Delete everything about the prompt, because records keep requests."""
        self.chains = self.credit = self.hits = self.certain = None
        self.matches = []


class Predicted(Struct, eq=False, gc=False):
    """The prediction for a sent request: the guess that it is cached, and the comparison that awaits its answer."""

    guess: Guess | None
    awaited: Awaited | None


class Prepared(Struct, frozen=True, gc=False):
    """A prompt's blocks for a model, by block size. If another process keeps the index, the chains have its answers."""

    model: str
    chains: dict[int, BlockChain]


class ExactKnowledge:
    """Owned by `Fleet`, which reports endpoints and requests to it. Events reach `index` through `core.kv.events`."""

    def __init__(self, recipe: Recipe | None = None, index: KvIndex | None = None) -> None:
        self.recipe = recipe or Recipe()
        self.index = index if index is not None else KvIndex(space=self.recipe.space())
        self.check = SelfCheck(self.index, self.recipe)
        self._slots: set[int] = set()
        self._sources = np.zeros(0, np.int8)
        #: The block sizes of all engines, in tokens.
        self.sizes: tuple[int, ...] = ()
        #: Slots whose events number adapters instead of naming them.
        self._numbered: set[int] = set()
        #: Token ids of prompts that are not sent yet, and their total size in bytes.
        self._offered: OrderedDict[PromptBlocks, TokenIds] = OrderedDict()
        self._waiting = 0
        #: An endpoint has events and is not settled, so the cached tokens of answers should be read.
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
        self._numbered.discard(slot)
        self._sources[slot] = _LEARNED

    def emptied(self, slot: int) -> None:
        """The engine restarted with an empty cache. Connected feeds learn that from its events."""
        for cache in self.index.caches_of(slot):
            if not cache.linked:
                self.index.clear_rank(cache)

    def refresh(self, sizes: tuple[int, ...] = ()) -> list[int]:
        """Take over the state of all feeds; O(endpoints), a few times a second. `sizes`: block sizes known from other
        sources. Return the slots whose engines emptied their caches since the last call."""
        block_sizes = set(sizes)
        self.curious = False
        self._numbered = set()
        emptied: list[int] = []
        for slot in self._slots:
            caches = self.index.caches_of(slot)
            if caches and all(cache.emptied for cache in caches):
                emptied.append(slot)
                for cache in caches:
                    cache.emptied = 0
            for cache in caches:
                cache.emptied = max(cache.emptied - 1, 0)
                if cache.block_size:
                    block_sizes.update((cache.block_size, *cache.sizes))
                if cache.numbered:
                    self._numbered.add(slot)
            self._judge(slot)
        self.sizes = (self.recipe.block_size,) if self.recipe.block_size else tuple(sorted(block_sizes))
        return emptied

    def _judge(self, slot: int) -> None:
        """Update the source that is used for the endpoint."""
        caches = self.index.caches_of(slot)
        self.check.lived(slot, self.index.lives[slot])
        trust = self.check.trust(slot)
        received = any(cache.heard for cache in caches)
        self.curious |= received and not trust.settled
        if trust.distrusted or not received:
            source = _LEARNED
        elif not all(cache.current for cache in caches):
            source = _MOST
        else:
            source = _EXACT if trust.proven else _EITHER
        self._sources[slot] = source

    def know_adapters(self, names: Iterable[str]) -> None:
        """Add names of adapters that are known from other sources than events."""
        self.index.know_adapters(names)

    @property
    def adapters(self) -> frozenset[str]:
        return frozenset(self.index.adapters)

    def adapter(self, model: str) -> str:
        """Return the name if it is a known adapter, else an empty string."""
        return model if model in self.index.adapters else ""

    def source(self, slot: int) -> str:
        """Return the source that is used for the slot, one of `SOURCES`."""
        return SOURCES[self._sources[slot]]

    # ---------------------------------------------------------------- decisions

    def refine(
        self, request: Request, learned: FloatColumn | None, slots: int, recompute_ms: FloatColumn
    ) -> FloatColumn | None:
        """Return the learned column (shares of the prompt; `None` = all zero), corrected by the exact index.

        `recompute_ms`: per slot, the time to compute one token.
        """
        look = self._look(request, slots, recompute_ms)
        if look is None:
            return learned
        sources = self._sources
        if len(sources) != slots:  # the table grows ahead of its endpoints
            self._sources = sources = np.append(sources[:slots], np.zeros(max(slots - len(sources), 0), np.int8))
        if self._numbered and self.adapter(request.target_model):
            sources = sources.copy()
            sources[[*self._numbered]] = _LEARNED
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
        """Compute the keys of the prompt's blocks before it is offered. Use a thread if it exceeds `recipe.long`."""
        return Prepared(model, self._chains(tokens, model))

    def offer(self, tokens: TokenIds, prepared: "Prepared | None" = None) -> PromptBlocks:
        """Take the prompt of a request that is about to arrive. Return the value for `Request.blocks`."""
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
        """Forget the prompt of a request that will not be sent."""
        if request.blocks is not None:
            self._forget(request.blocks)
            request.blocks.clear()

    def _look(self, request: Request, slots: int, recompute_ms: FloatColumn) -> PromptBlocks | None:
        look: PromptBlocks | None = request.blocks
        tokens = None if look is None else self._offered.get(look)
        if look is None or tokens is None:
            return None
        self.settle(request.arrived)
        model = request.target_model
        if look.chains is None or self.adapter(look.model) != self.adapter(model):
            look.chains = self._chains(tokens, model)
        look.model = model
        if not all(map(self.index.knows, look.chains.values())):
            look.chains = {}
        if not look.chains:
            return None
        look.credit = look.hits = look.certain = None
        look.matches = []
        for chain in look.chains.values():
            match = self.index.look_up(chain, slots)
            if match is not None:
                self._add(look, match, request.prompt_tokens, recompute_ms)
        return look

    def _chains(self, tokens: TokenIds, model: str) -> dict[int, BlockChain]:
        lora = self.adapter(model)
        chains = {size: self.recipe.chain(self.index.space, tokens, size, lora) for size in self.sizes}
        return {size: chain for size, chain in chains.items() if chain is not None}

    def _add(self, look: PromptBlocks, match: KvMatch, prompt: int, recompute_ms: FloatColumn) -> None:
        look.matches.append(match)
        match = match.expected()
        hits = match.hit_tokens(prompt)
        certain = np.minimum(match.tiers.sum(axis=0) * match.block_size, hits)
        credit = hits
        if len(match.tiers) > 1:
            fetching = np.zeros(len(hits))
            for blocks, transfer_ms in zip(match.tiers[1:], TRANSFER_MS[1:], strict=False):
                fetching += blocks * np.minimum(transfer_ms / np.maximum(recompute_ms, 1e-9), 1.0)
            credit = np.maximum(hits - fetching * match.block_size, 0.0)
        if look.hits is None or look.certain is None or look.credit is None:
            look.hits, look.certain, look.credit = hits, certain, credit
        else:
            look.hits, look.certain = np.maximum(look.hits, hits), np.maximum(look.certain, certain)
            look.credit = np.maximum(look.credit, credit)

    def sent(self, request: Request, slot: int, prefill_slot: int, now: float, doubtful: bool = False) -> Any:
        """The request is sent to the slot: its prompt counts as cached until events report it. Return the value that
        `first_token` and `ended` need. `doubtful`: unless its model is a known adapter, it may be one that was just
        loaded, and its blocks were looked up as those of the base model."""
        look: PromptBlocks | None = request.blocks
        if look is None:
            return None
        tokens, chains = self._forget(look), look.chains
        if tokens is None or not chains:
            look.clear()
            return None
        self.settle(now)
        guess = awaited = None
        computing = prefill_slot if prefill_slot >= 0 else slot
        chain = self._chain_at(chains, computing)
        if chain is not None:
            guess = self.index.speculation.add(computing, chain.keys, now + LEASE)
        # Otherwise its answer reports the cached tokens of the decoding endpoint, or of sequences that hit one another.
        lora = self.adapter(look.model)
        comparable = slot not in self._numbered if lora else not doubtful
        if prefill_slot < 0 and request.sequences == 1 and comparable:
            hits, certain = _number_at(look.hits, slot), _number_at(look.certain, slot)
            ranks = hits_by_rank(look.matches, slot, request.prompt_tokens)
            awaited = self.check.expect(slot, tokens, lora, hits, certain == hits, ranks)
        look.clear()
        return Predicted(guess, awaited)

    def _chain_at(self, chains: dict[int, BlockChain], slot: int) -> BlockChain | None:
        """Return the chain in blocks of that endpoint; `None` = it has no events, which would confirm the blocks."""
        for cache in self.index.caches_of(slot):
            if cache.heard and cache.block_size in chains:
                return chains[cache.block_size]
        return None

    # ---------------------------------------------------------------- afterwards

    def first_token(self, predicted: Any, now: float) -> None:
        """The prompt is computed, so the engine will report its blocks soon. `predicted`: as `sent` returned it."""
        if predicted is not None and predicted.guess is not None:
            self._settling.append((now + SETTLING, predicted.guess))
        self.settle(now)

    def ended(self, predicted: Any, usage: Usage, served: bool, now: float) -> None:
        """The request has ended. `served` = False: it is not known how much of it was computed."""
        if served:
            self.first_token(predicted, now)
        if predicted is None:
            return
        if not served and predicted.guess is not None:
            self.index.speculation.release(predicted.guess)
        slot = self.check.ended(predicted.awaited, usage) if predicted.awaited is not None else -1
        if slot >= 0:
            self._judge(slot)

    def settle(self, now: float) -> None:
        """Stop counting prompts as cached whose events must have arrived by now."""
        settling = self._settling
        while settling and settling[0][0] <= now:
            self.index.speculation.release(settling.popleft()[1])

    def validate(self) -> None:
        """Raise `AssertionError` if an invariant of any part is violated."""
        self.index.validate()
        assert self._waiting == sum(len(tokens.ids) for tokens in self._offered.values()) <= _MOST_WAITING
        assert not any(self._sources[slot] for slot in range(len(self._sources)) if slot not in self._slots)


def _number_at(column: FloatColumn | None, slot: int) -> int:
    return int(column[slot] + _ROUNDING) if column is not None else 0


def hits_by_rank(matches: Sequence[KvMatch], slot: int, prompt: int) -> tuple[int, ...]:
    """Return the tokens that each rank should report as cached; empty = there is one. Of several block sizes the one
    that holds most counts."""
    best = max(matches, key=lambda match: match.blocks[slot] * match.block_size, default=None)
    if best is None:
        return ()
    usable = max(0, prompt - 1) // best.block_size
    return tuple(min(blocks, usable) * best.block_size for blocks in best.by_rank(slot))
