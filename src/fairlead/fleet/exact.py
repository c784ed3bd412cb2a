"""Exact prefix knowledge in decisions: what engines told of their caches, beside what was learned from own decisions.

`Fleet.match` stays the one question: the share of a prompt that each endpoint holds. Where this is switched on, the
learned column is corrected here, endpoint by endpoint, as far as its events can be relied on.

Theory. Keys are hashes of content, so an exact match cannot come about by accident, but an exact zero can: another
tokeniser, template, block size or seed than the engine's never matches, and looks just like an empty cache. So a
positive answer is believed from the beginning, a zero only of an endpoint that has proved its predictions.

Rules
* `learned`: no events were heard, or they are distrusted (`fleet.trust`). As if this module were not there.
* `either`: events are heard, but not proven: exact where it says more than nothing, else learned.
* `most`: history is missing, a replay is under way, or the connection is lost: whichever says more.
* `exact`: proven and up to date.
* A prompt that was just sent counts as held there until shortly after its first token, when its events have come.
* Answers are compared with the exact prediction also while it is not used (`fleet.selfcheck`), so an endpoint that
  agrees again is believed again.
* Token ids are the prompt in other words. They are no part of a request, so that no record or log can show them: they
  are offered here beside it, and kept until it is sent.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable

import numpy as np
from msgspec import Struct

from fairlead.fleet.columns import FloatColumn
from fairlead.fleet.kv.index import KvIndex
from fairlead.fleet.kv.match import BlockChain, KvMatch
from fairlead.fleet.kv.tiers import Tier, TierCosts
from fairlead.fleet.recipe import Recipe, TokenIds, new_index
from fairlead.fleet.selfcheck import SelfCheck
from fairlead.model.request import Request, Usage

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


class _Look(Struct, gc=False):
    """What was found for a prompt. Columns are in tokens, one entry per slot; `None` = nobody holds anything."""

    tokens: TokenIds
    #: For which model, and its blocks by size; `None` = not looked for yet.
    model: str = ""
    chains: dict[int, BlockChain] | None = None
    #: What it saves: less for what lies in a slower tier.
    credit: FloatColumn | None = None
    #: What the engine should report as cached.
    hits: FloatColumn | None = None
    #: The part of it that does not rest on prompts that were just sent.
    certain: FloatColumn | None = None


class Prepared(Struct, frozen=True, gc=False):
    """A prompt's blocks as they are named for a model, by block size; answers of another process are in the chains."""

    model: str
    chains: dict[int, BlockChain]


class ExactKnowledge:
    """Owned by `Fleet`, which tells it of endpoints and requests. Events reach `index` through `fleet.kv.apply`."""

    def __init__(
        self, recipe: Recipe | None = None, index: KvIndex | None = None, costs: TierCosts | None = None
    ) -> None:
        self.recipe = recipe or Recipe()
        self.index = index if index is not None else new_index(self.recipe)
        self.check = SelfCheck(self.index, self.recipe)
        self._costs = costs or TierCosts()
        self._slots: set[int] = set()
        self._sources = np.zeros(0, np.int8)
        self._sizes: tuple[int, ...] = ()
        self._adapters: set[str] = set()
        #: By request, and how many bytes of ids they hold.
        self._looks: OrderedDict[int, _Look] = OrderedDict()
        self._waiting = 0
        #: Some endpoint has events and has not settled: answers should be followed for what they report.
        self.curious = False
        self._settling: deque[tuple[float, int]] = deque()

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
        found = set(sizes)
        self.curious = False
        for slot in self._slots:
            for cache in self.index.caches_of(slot):
                if cache.block_size:
                    found.add(cache.block_size)
                if len(self._adapters) < _MOST_ADAPTERS:
                    self._adapters.update(head.lora for head in cache.beginnings if head.lora)
            self._judge(slot)
        self._sizes = (self.recipe.block_size,) if self.recipe.block_size else tuple(sorted(found))

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

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens per block, of all engines."""
        return self._sizes

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

    def offer(self, request_id: int, tokens: TokenIds, prepared: "Prepared | None" = None) -> None:
        """The prompt of a request that is about to arrive."""
        self._forget(request_id)
        model, chains = (prepared.model, prepared.chains) if prepared is not None else ("", None)
        self._looks[request_id] = _Look(tokens, model, chains)
        self._waiting += len(tokens.ids)
        while self._waiting > _MOST_WAITING and self._looks:
            self._forget(next(iter(self._looks)))

    def _forget(self, request_id: int) -> _Look | None:
        look = self._looks.pop(request_id, None)
        if look is not None:
            self._waiting -= len(look.tokens.ids)
        return look

    def _look(self, request: Request, slots: int, recompute_ms: FloatColumn) -> _Look | None:
        look = self._looks.get(request.id)
        if look is None:
            return None
        model = request.target_model
        if look.chains is None or self._adapter(look.model) != self._adapter(model):
            look.chains = self._chains(look.tokens, model)
        look.model = model
        if not all(map(self.index.knows, look.chains.values())):
            look.chains = {}
        if not look.chains:
            return None
        look.credit = look.hits = look.certain = None
        for chain in look.chains.values():
            found = self.index.look_up(chain, slots)
            if found is not None:
                self._add(look, found, request.prompt_tokens, recompute_ms)
        return look

    def _chains(self, tokens: TokenIds, model: str) -> dict[int, BlockChain]:
        lora = self._adapter(model)
        chains = {size: self.recipe.chain(self.index.space, tokens, size, lora) for size in self._sizes}
        return {size: chain for size, chain in chains.items() if chain is not None}

    def _adapter(self, model: str) -> str:
        return model if model in self._adapters else ""

    def _add(self, look: _Look, found: KvMatch, prompt: int, recompute_ms: FloatColumn) -> None:
        hits = found.hit_tokens(prompt)
        certain = np.minimum(found.tiers.sum(axis=0) * found.block_size, hits)
        credit = hits
        if len(found.tiers) > 1:
            fetching = np.zeros(len(hits))
            for tier in range(1, len(found.tiers)):
                price = self._costs.transfer_ms(Tier(tier)) / np.maximum(recompute_ms, 1e-9)
                fetching += found.tiers[tier] * np.minimum(price, 1.0)
            credit = np.maximum(hits - fetching * found.block_size, 0.0)
        if look.hits is None or look.certain is None or look.credit is None:
            look.hits, look.certain, look.credit = hits, certain, credit
        else:
            look.hits, look.certain = np.maximum(look.hits, hits), np.maximum(look.certain, certain)
            look.credit = np.maximum(look.credit, credit)

    def sent(self, request: Request, slot: int, prefill_slot: int, now: float) -> None:
        """The request goes there: until events tell, its prompt counts as held."""
        look = self._forget(request.id)
        if look is None or not look.chains:
            return
        self._settle(now)
        computing = prefill_slot if prefill_slot >= 0 else slot
        chain = self._chain_at(look.chains, computing)
        if chain is not None:
            self.index.speculation.add(request.id, computing, chain.keys, now + LEASE)
        if prefill_slot < 0:  # else its answer tells of the one that decodes
            hits, certain = _at(look.hits, slot), _at(look.certain, slot)
            self.check.expect(request.id, slot, look.tokens, self._adapter(look.model), hits, certain == hits)

    def _chain_at(self, chains: dict[int, BlockChain], slot: int) -> BlockChain | None:
        """In blocks of that endpoint, if it has events: without, nothing would confirm it."""
        for cache in self.index.caches_of(slot):
            if cache.heard and cache.block_size in chains:
                return chains[cache.block_size]
        return None

    # ---------------------------------------------------------------- afterwards

    def first_token(self, request_id: int, now: float) -> None:
        """Its blocks are computed, and the engine tells of them any moment."""
        self._settling.append((now + SETTLING, request_id))
        self._settle(now)

    def ended(self, request_id: int, usage: Usage, served: bool, now: float) -> None:
        """A request is over. Not `served`: nobody knows how far it came."""
        if served:
            self.first_token(request_id, now)
        else:
            self.index.speculation.release(request_id)
        slot = self.check.ended(request_id, usage)
        if slot >= 0:
            self._judge(slot)

    def _settle(self, now: float) -> None:
        settling = self._settling
        while settling and settling[0][0] <= now:
            self.index.speculation.release(settling.popleft()[1])

    def validate(self) -> None:
        """Raise `AssertionError` when an invariant of any part is broken."""
        self.index.validate()
        assert self._waiting == sum(len(look.tokens.ids) for look in self._looks.values()) <= _MOST_WAITING
        assert not any(self._sources[slot] for slot in range(len(self._sources)) if slot not in self._slots)


def _at(column: FloatColumn | None, slot: int) -> int:
    return int(column[slot]) if column is not None else 0
