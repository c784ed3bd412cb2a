"""KV events of engines, independent of their format (`fairlead.pool.kv_events.wire`), and their effect on the index.

`hashes` are 64-bit patterns as unsigned integers. Names in other documents: `block_created` = `BlocksStored`,
`block_evicted` = `BlocksRemoved`, `block_offloaded` = `BlocksStored` without tokens and with a slower medium.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Protocol

from msgspec import Struct

from fairlead.core.kv.cache import (
    EVERYONE,
    HEAD_TOKENS,
    UNNAMED,
    WHOLE_PREFIX_KINDS,
    Head,
    Orphan,
    RankCache,
    Shelf,
    Tail,
)
from fairlead.core.kv.index import KvIndex
from fairlead.core.kv.keys import TOKEN_BYTES
from fairlead.core.kv.tiers import Tier, tier_of


class TokenStream(Protocol):
    """Token ids that are read piece by piece, because there are too many to read in one go."""

    def __len__(self) -> int: ...

    def take(self, count: int) -> bytes:
        """Return the next `count` token ids as little-endian 32-bit integers. Raise `ValueError` for an invalid id."""
        ...


class BlocksStored(Struct, gc=False):
    """Consecutive full blocks of one request were stored."""

    hashes: list[int]
    #: Hash of the block before the first; 0 = the sequence starts here.
    parent: int = 0
    #: Token ids as little-endian 32-bit integers, `block_size` for each hash. Empty = known blocks were put into
    #: another tier, and only their hashes are reported.
    tokens: bytes | TokenStream = b""
    block_size: int = 0
    #: Name of the LoRA adapter; `#3` for older engines that report only its number. Empty = base model.
    lora: str = ""
    medium: str = ""
    group: int = UNNAMED
    #: Kind of the group's attention; empty = not reported.
    kind: str = ""
    #: What else identifies each block (multimodal items, cache salt), without the adapter; `None` = nothing.
    extras: Sequence[tuple[str, ...]] | None = None
    #: Tokens that a sliding-window group attends to; 0 = not reported.
    window: int = 0


class BlocksRemoved(Struct, gc=False):
    """One copy of each of these blocks is gone."""

    hashes: list[int]
    medium: str = ""
    group: int = UNNAMED


class AllCleared(Struct, gc=False):
    """The rank has forgotten everything, in all tiers."""


KvEvent = BlocksStored | BlocksRemoved | AllCleared

# Applies the events of one rank to the index, in small steps.
#
# Rules
# * Events of one rank are applied in order, each completely before the next. The caller may do other things between
#   two steps. A step handles at most `STEP` blocks (about 0.1 ms) and, unless its block is larger, `_STEP_TOKENS`
#   tokens (0.5 ms).
# * A bad event raises `ValueError` before it changes anything, or after its valid part was applied. The caller counts
#   it and continues with the next event.
# * Stores with an unknown parent become orphans, except in a self-contained key space, where the parent is not needed.

STEP = 64
_STEP_TOKENS = 4096
#: Tokens of a block, at most. Hybrid models have blocks of some thousands.
_MOST_TOKENS = 16_384


def apply(index: KvIndex, cache: RankCache, event: KvEvent, now: float) -> Iterator[int] | None:
    """Apply an event. Raise `ValueError` if it contradicts itself.

    An event of more than one step is not begun. Instead an iterator is returned: each iteration does one step and
    yields its number of blocks.
    """
    if isinstance(event, BlocksStored):
        return _store(index, cache, event, now)
    if isinstance(event, AllCleared):
        index.clear_rank(cache)
        cache.provisional = False  # nothing of the time before counts any more
        if not cache.behind:  # a replay tells what happened long ago
            cache.note_emptied()
        return None
    group = cache.group_of(event.group)
    if tail := cache.tails.get(group):
        return _in_steps(_each(event.hashes, tail.remove), len(event.hashes))
    shelf = cache.shelves.get((group, tier_of(event.medium)))
    if shelf is None:
        cache.counts.removed_unknown += len(event.hashes)
        return None
    return _in_steps(_each(event.hashes, partial(index.remove, shelf)), len(event.hashes))


def _store(index: KvIndex, cache: RankCache, event: BlocksStored, now: float) -> Iterator[int] | None:
    hashes, group, tier = event.hashes, cache.group_of(event.group), tier_of(event.medium)
    place = group, tier
    if event.group == UNNAMED and event.kind and event.kind not in WHOLE_PREFIX_KINDS:
        return None
    if not cache.indexable(group, event.kind):
        if event.group != UNNAMED:
            index.clear_group(cache, group)  # its first events may have come without its kind
            needed = cache.needed(group, event.block_size, event.window)
            if tail := index.tail(cache, group, event.block_size, needed):
                if _only_used(cache, tail, event):
                    return None
                cache.sparse |= _token_count(event) > event.block_size * len(hashes)
                undo = _reported(cache, place, event, tail.copies.__contains__, tail.remove)
                _note_beginning(cache, place, event, all(digest in tail.copies for digest in hashes[-needed:]))
                if not cache.units and event.tokens:
                    return _both(undo, _store_sole(index, cache, tail, event))
                return _both(undo, _in_steps(_each(hashes, partial(index.store_tail, cache, tail)), len(hashes)))
        return None
    if not hashes:
        return None
    size, tokens, undo = event.block_size, event.tokens, None
    if not tokens:
        most = STEP
        steps = _store_nameless(index, cache, group, tier, event)
    else:
        count = _token_count(event)
        if size < 1 or count != size * len(hashes):
            raise ValueError(f"{len(hashes)} blocks of {size} tokens cannot have {count} tokens")
        most = _check_blocks(event)
        shelf = index.shelf(cache, group, tier)
        undo = _reported(
            cache, place, event, lambda digest: shelf.key_of(digest) is not None, partial(index.remove, shelf)
        )
        store = _Store(index, shelf, event, now)
        if len(hashes) <= most:
            store.step(hashes, tokens if isinstance(tokens, bytes) else tokens.take(count), event.extras)
            return undo
        steps = store.steps(most)
    return _both(undo, _in_steps(steps, len(hashes), most))


def _only_used(cache: RankCache, tail: Tail, event: BlocksStored) -> bool:
    """Whether an event tells of a hit (see `_reported`): then it names all blocks before, also those that are gone."""
    several = cache.sparse and len(event.hashes) > tail.needed and not event.parent
    dense = _token_count(event) == event.block_size * len(event.hashes)
    return several and dense and event.hashes[-1] in tail.copies


def _token_count(event: BlocksStored) -> int:
    return len(event.tokens) // TOKEN_BYTES if isinstance(event.tokens, bytes) else len(event.tokens)


def _tokens_between(event: BlocksStored, start: int, end: int) -> bytes:
    """Return the tokens of the blocks from `start` to `end`. Must be called for one part after the other."""
    if isinstance(event.tokens, bytes):
        width = event.block_size * TOKEN_BYTES
        return event.tokens[start * width : end * width]
    return event.tokens.take((end - start) * event.block_size)


def _check_blocks(event: BlocksStored) -> int:
    """Return the blocks per step. Raise `ValueError` for blocks that are too large, or extra keys for other blocks."""
    size = event.block_size
    if size > _MOST_TOKENS:
        raise ValueError(f"a block of {size} tokens has more than {_MOST_TOKENS}")
    if event.extras is not None and len(event.extras) != len(event.hashes):
        raise ValueError(f"{len(event.hashes)} blocks, but extra keys for {len(event.extras)}")
    return min(STEP, max(1, _STEP_TOKENS // size))


def _store_sole(index: KvIndex, cache: RankCache, tail: Tail, event: BlocksStored) -> Iterator[int] | None:
    """Store blocks of a group that a hit needs only at its end, in a model without full attention."""
    size, count = event.block_size, _token_count(event)
    if size < 1 or count % size or count < size * len(event.hashes):
        raise ValueError(f"{len(event.hashes)} blocks of {size} tokens cannot have {count} tokens")
    most = _check_blocks(event)
    cache.note_size(size, Tier.GPU)
    return _in_steps(_sole_steps(index, cache, tail, event, most), count // size, most)


def _sole_steps(index: KvIndex, cache: RankCache, tail: Tail, event: BlocksStored, most: int) -> Iterator[int]:
    """The tokens may be those of more blocks, of which vLLM 0.32 keeps what a hit at the prompt's end needs, or none if
    the end is further away. It does not say which. They are the last ones, but a prompt of full blocks computes its
    last block again, so they end one block before it. Fewer than needed, all but one, tell that. Otherwise they are
    taken for the last ones until a prompt that continues them tells (`_settle`)."""
    space, size, kept = index.space, event.block_size, len(event.hashes)
    root = space.root(cache.model, event.lora)
    count = _token_count(event) // size
    skipped = count - kept - (kept == count - 1 < tail.needed)
    certain = skipped + kept - tail.needed if count > kept else 0
    before: int | None = root
    recent: list[int] = []
    for start in range(0, count, most):
        end = min(start + most, count)
        content = _tokens_between(event, start, end)
        if start == 0 and event.parent and not space.self_contained:
            before = _settle(index, cache, event, content[: size * TOKEN_BYTES])
            before = tail.begun if before is None else before
        lead = min(max(skipped - start, 0), end - start)
        own = slice(max(start - skipped, 0), max(end - skipped, 0))
        hashes = event.hashes[own]
        remainder = end - start - lead - len(hashes)
        extras = None
        if event.extras is not None:
            extras = [()] * lead + list(event.extras[own]) + [()] * remainder
        if start == 0 and not lead and not remainder and (not event.parent or len(hashes) > 1):
            _keep_head(cache, event, hashes, content, extras)
        keys: list[int] = []
        if before is not None:
            keys = space.keys(before, root, [0] * lead + hashes + [0] * remainder, content, size, extras)
            before = keys[-1]
            recent = [*recent, *keys][-tail.needed - 1 :]
        for place, digest in enumerate(hashes, lead):
            index.store_tail(cache, tail, digest)
            if keys and start + place >= certain:
                tail.name(digest, keys[place])
        yield end - start
    if kept == tail.needed < count and len(recent) > kept and not space.self_contained:
        tail.doubt(event.hashes, recent)
    elif not kept and (count > 1 or not event.parent):  # a single block is one of an answer
        tail.begin(before)


def _settle(index: KvIndex, cache: RankCache, event: BlocksStored, content: bytes) -> int | None:
    """Return the key of the block before an event, whose first block has this `content`; `None` = not known. If that
    block was taken for the one that now follows it, it and those before it are moved by one."""
    for tail in cache.tails.values():
        if doubtful := tail.doubtful.get(event.parent):
            earlier = doubtful[1][-2:]
            root = index.space.root(cache.model, event.lora)
            if index.space.keys(earlier[0], root, [0], content, event.block_size, None) == earlier[1:]:
                tail.move(event.parent)
    return cache.tail_key(event.parent)


def _in_steps(steps: Iterator[int], blocks: int, most: int = STEP) -> Iterator[int] | None:
    """Return the steps of a change of so many blocks, or do it if it has no more than one step."""
    if blocks > most:
        return steps
    for _ in steps:
        pass
    return None


def _each(hashes: list[int], change: Callable[[int], None]) -> Iterator[int]:
    for start in range(0, len(hashes), STEP):
        step = hashes[start : start + STEP]
        for digest in step:
            change(digest)
        yield len(step)


def _reported(
    cache: RankCache,
    place: tuple[int, Tier],
    event: BlocksStored,
    held: Callable[[int], bool],
    remove: Callable[[int, int], None],
) -> Iterator[int] | None:
    """Take back the copies of the store before, if this one shows that it only reported a hit.

    With `kv_cache_report_mode: full`, which single requests ask for, vLLM 0.32 repeats the blocks that a prompt found
    cached, without a parent. Blocks that it computes again look alike, but they are copies: for `prompt_logprobs`, or
    because the window of another group is gone. Measured there:

    * After a report, the prompt's next blocks are the next store of the group, in the same batch. A prompt that is
      computed again has them in the same event, or in a later batch. With asynchronous scheduling (not measured) two
      pieces may share a batch, but seldom does the first one end exactly where the known blocks do.
    * Another request may find the blocks of a prompt that is computed again in the same batch, and continue them. If a
      window was gone, its group tells, since it did not hold its blocks. With `prompt_logprobs` nothing tells: such
      copies, which end where the known blocks do, are taken for a report.
    * A prompt that waits for memory is reported again in each batch, until it is computed. The reports get shorter if
      its last blocks are evicted meanwhile. Two in a row may as well be one prompt computed again and one reported.
    * A report that no new block follows cannot be told apart. It counts as copies, so its blocks seem to be cached
      until the engine is restarted, or empties its cache. That is the smaller error: if one of two copies is taken for
      the only one, its removal hides the prompt and all that continue it. Simulated with three engines, each prompt
      going to the one that seems to have most of it: if all prompts are reported, 1 to 6 % of the predictions are too
      high, and the engines compute up to 9 % more. If 2 % of the prompts are computed again, which is not counted, 2
      to 9 % of the predictions are too low, and the engines compute 9 to 14 % more.
    """
    former, hashes = cache.repeated.get(place), event.hashes
    if former is None or former.batch != cache.batch:
        return None
    del cache.repeated[place]
    judged = cache.computed.get(former.hashes[-1])
    if judged is not None and place not in judged:
        judged.add(place)
        return None
    reports, waited = former.times, sum(former.times.values()) > 2
    # A prompt of full blocks computes its last one again. What only reports left is not held.
    computed_again = len(hashes) > 1 and held(hashes[0]) and not (waited and hashes[0] in former.longest)
    if event.parent != former.hashes[-1] or computed_again:
        return None
    if not waited:
        reports = {len(former.hashes): 1}
    return _in_steps(_taken_back(former.longest, reports, remove), max(reports))


def _taken_back(hashes: list[int], reports: dict[int, int], remove: Callable[[int, int], None]) -> Iterator[int]:
    """Remove the copies of all reports in one pass. `reports`: how often so many of the blocks were reported."""
    start, times = 0, sum(reports.values())
    for count in sorted(reports):
        yield from _each(hashes[start:count], partial(_remove, remove, times))
        start, times = count, times - reports[count]


def _remove(remove: Callable[[int, int], None], copies: int, digest: int) -> None:
    remove(digest, copies)


def _note_beginning(cache: RankCache, place: tuple[int, Tier], event: BlocksStored, known: bool) -> None:
    """Remember a store, and whether its blocks were known, for `_reported`. A prompt of exactly one block is always
    computed again, and shared storage counts no copies."""
    if event.parent or not event.hashes or cache.slot == EVERYONE:
        return
    if not known:
        cache.computed.setdefault(event.hashes[-1], set()).add(place)
    elif len(event.hashes) > 1:
        cache.note_repeated(place, event.hashes)


def _both(first: Iterator[int] | None, second: Iterator[int] | None) -> Iterator[int] | None:
    """Return the steps of two changes; `None` = no step is left."""
    return chain(first, second) if first and second else first or second


class _Store:
    """A store in progress, and its position in the chain."""

    __slots__ = ("_before", "_depth", "_event", "_fresh", "_index", "_new", "_now", "_parent", "_root", "_shelf")

    def __init__(self, index: KvIndex, shelf: Shelf, event: BlocksStored, now: float) -> None:
        cache = shelf.cache
        self._index = index
        self._shelf = shelf
        self._event = event
        self._now = now
        cache.note_size(event.block_size, shelf.tier)
        if event.lora:
            cache.numbered = event.lora.startswith("#")
            if not cache.numbered:
                index.know_adapters((event.lora,))
        #: Whether these are the blocks of a prompt, and none was stored yet. (During decode, blocks arrive singly.)
        self._fresh = not event.parent or len(event.hashes) > 1
        self._root = root = index.space.root(cache.model, event.lora)
        self._depth = self._new = 0
        self._parent = event.parent
        #: Key of the block before; `None` = unknown.
        self._before: int | None = root
        if event.parent:
            self._before = index.resolve(cache, event.parent, shelf)
            if self._before is not None:
                self._depth = index.blocks.depth_of(self._before)
            elif index.space.self_contained:
                self._before = root

    def steps(self, most: int) -> Iterator[int]:
        """Store `most` blocks per step."""
        event = self._event
        for start in range(0, len(event.hashes), most):
            hashes = event.hashes[start : start + most]
            end = start + len(hashes)
            self.step(
                hashes,
                _tokens_between(event, start, end),
                event.extras[start:end] if event.extras is not None else None,
            )
            yield len(hashes)

    def step(self, hashes: list[int], tokens: bytes, extras: Sequence[tuple[str, ...]] | None) -> None:
        if self._before is None:
            self._keep_orphans(hashes, tokens, extras)
            return
        if self._fresh:
            self._fresh = False
            _keep_head(self._shelf.cache, self._event, hashes, tokens, extras)
        keys = self._index.space.keys(self._before, self._root, hashes, tokens, self._event.block_size, extras)
        self._new += self._index.store(self._shelf, hashes, keys, self._depth)
        self._before = keys[-1]
        self._depth += len(hashes)
        if self._depth == len(self._event.hashes):
            _note_beginning(self._shelf.cache, (self._shelf.group, self._shelf.tier), self._event, not self._new)

    def _keep_orphans(self, hashes: list[int], tokens: bytes, extras: Sequence[tuple[str, ...]] | None) -> None:
        shelf, event, orphans = self._shelf, self._event, self._index.orphans
        if shelf.dead:
            return
        width = event.block_size * TOKEN_BYTES
        shelf.cache.counts.orphaned += len(hashes)
        until = self._now + orphans.ttl
        for index, digest in enumerate(hashes):
            more = extras[index] if extras is not None else ()
            content = tokens[index * width : (index + 1) * width]
            orphans.add(Orphan(digest, self._parent, shelf, content, event.block_size, event.lora, more, until))
            self._parent = digest


def _keep_head(
    cache: RankCache, event: BlocksStored, hashes: list[int], tokens: bytes, extras: Sequence[tuple[str, ...]] | None
) -> None:
    """Remember the first blocks of a store."""
    size = event.block_size
    count = min(len(hashes), max(1, HEAD_TOKENS // size))
    if size == cache.block_size <= HEAD_TOKENS:  # a connector's chunks have other hashes
        more = tuple(extras[:count]) if extras is not None else ()
        content = tokens[: count * size * TOKEN_BYTES]
        first = not event.parent
        head = Head(first, tuple(hashes[:count]), content, size, event.lora, more)
        (cache.beginnings if first else cache.rests).append(head)


def _store_nameless(index: KvIndex, cache: RankCache, group: int, tier: Tier, event: BlocksStored) -> Iterator[int]:
    """Store blocks that are identified only by their hashes, because they were put into another tier. Raise
    `ValueError` at the end if no tier is named and a block is not known: our own keys can only be made from tokens."""
    space, before, shelf = index.space, cache.counts.nameless, cache.shelves.get((group, tier))
    root = space.root(cache.model, event.lora)
    hashes = event.hashes
    for start in range(0, len(hashes), STEP):
        step = hashes[start : start + STEP]
        for digest in step:
            key = index.resolve(cache, digest, shelf)
            if key is None and space.self_contained:
                key = space.keys(root, root, [digest], b"", 0, None)[0]
            if key is None:
                cache.counts.nameless += 1
            else:
                shelf = shelf or index.shelf(cache, group, tier)
                index.store(shelf, [digest], [key], max(0, index.blocks.depth_of(key) - 1))
        yield len(step)
    if not event.medium and cache.counts.nameless > before:
        raise ValueError("blocks without token_ids can be read with keys: engine only")
