"""The memory of an engine: its paged KV cache, the blocks of each request, and the slots of adapters.

Theory of the cache (as in vLLM 0.32's block pool)
* The reference count of a block is the number of requests that read or write it now. A block is *free* at zero.
* A full block is *sealed*: it can be found under the hash of its tokens and all tokens before them. It can still be
  found after it becomes free, so a later request can use it again. It is forgotten only when it is taken to hold other
  tokens.
* Free blocks are in a queue. New blocks are taken from its head. Released blocks join its tail, the last block of a
  request first. So the least recently used block is evicted first, and within a chain the tail before the head, because
  a head is useful without its tail but not the other way round.
* Two requests may compute the same tokens at the same time. Both copies are kept, and a lookup finds the older copy.

Rules
* `free + used == total` at all times, and no block is both in the queue and in use.
* Nothing here raises for lack of free blocks: the caller checks `free` first."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from fairlead.lab.engine import tokens as tk
from fairlead.lab.engine.request import EngineRequest


class BlockHooks(Protocol):
    """Receives what the cache stores and forgets, in order. Called synchronously; must not call the cache back."""

    def salted(self, salt: str) -> None:
        """The next stored block begins a sequence with this cache salt."""

    def stored(self, hashes: Sequence[int], parent: int, tokens: Callable[[], bytes], lora: str) -> None:
        """Consecutive full blocks were sealed. `parent` is the hash of the block before the first of them, 0 at the
        beginning of a sequence. `tokens()` returns their token ids as little-endian 32-bit integers and may be called
        only during this call."""

    def removed(self, digest: int) -> None:
        """One copy of a block was forgotten."""

    def cleared(self) -> None:
        """All blocks were forgotten."""


class BlockManager:
    """All KV blocks of one engine. Blocks are integers from 0."""

    __slots__ = ("_cached", "_copies", "_free", "_hash_of", "_refs", "hooks", "total")

    def __init__(self, total: int, hooks: BlockHooks | None = None) -> None:
        self.total = total
        self.hooks = hooks
        self._refs = [0] * total
        self._hash_of: list[int | None] = [None] * total
        #: Free blocks in the order of eviction: the first one is evicted next.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(total))
        #: By hash: the oldest copy of each sealed block, and its further copies, if any, from old to new.
        self._cached: dict[int, int] = {}
        self._copies: dict[int, list[int]] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks held by requests."""
        return self.total - len(self._free)

    def find(self, hashes: Sequence[int], limit: int) -> list[int]:
        """The blocks of the longest cached prefix of this chain, at most `limit`. It ends at the first unknown hash."""
        hits = []
        cached = self._cached
        for digest in hashes[:limit]:
            block = cached.get(digest)
            if block is None:
                break
            hits.append(block)
        return hits

    def idle(self, blocks: Iterable[int]) -> int:
        """The number of these blocks that are free now, so that holding them reduces `free`."""
        refs = self._refs
        return sum(1 for block in blocks if refs[block] == 0)

    def hold(self, blocks: Iterable[int]) -> None:
        """Add one user to each of these sealed blocks."""
        refs = self._refs
        for block in blocks:
            if refs[block] == 0:
                del self._free[block]
            refs[block] += 1

    def take(self, count: int) -> list[int]:
        """Take empty blocks for one request, evicting the least recently used ones. Needs `free >= count`."""
        taken = []
        pop = self._free.popitem
        hash_of, refs, cached, copies = self._hash_of, self._refs, self._cached, self._copies
        hooked = self.hooks is not None
        for _ in range(count):
            block = pop(last=False)[0]
            digest = hash_of[block]
            if digest is None:
                pass
            elif hooked or digest in copies:
                self._forget(block, digest)
            else:  # the usual case, inlined to save a call
                hash_of[block] = None
                del cached[digest]
            refs[block] = 1
            taken.append(block)
        return taken

    def seal(self, blocks: Sequence[int], hashes: Sequence[int]) -> None:
        """Record that these held blocks are full, so that each can be found under its hash."""
        cached, hash_of = self._cached, self._hash_of
        for block, digest in zip(blocks, hashes, strict=True):
            hash_of[block] = digest
            if cached.setdefault(digest, block) != block:
                self._copies.setdefault(digest, []).append(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Release the blocks of a request, given in the order of its tokens."""
        refs = self._refs
        free = self._free
        for block in reversed(blocks):
            left = refs[block] - 1
            refs[block] = left
            if left == 0:
                free[block] = None

    def clear(self) -> bool:
        """Forget all blocks. Returns False, and does nothing, while a request holds a block."""
        if len(self._free) != self.total:
            return False
        self._hash_of = [None] * self.total
        self._cached.clear()
        self._copies.clear()
        if self.hooks is not None:
            self.hooks.cleared()
        return True

    def sealed(self) -> int:
        """The number of distinct hashes that can be found."""
        return len(self._cached)

    def _forget(self, block: int, digest: int) -> None:
        self._hash_of[block] = None
        copies = self._copies.get(digest)
        if copies is None:
            del self._cached[digest]
        else:
            if self._cached[digest] == block:
                self._cached[digest] = copies.pop(0)
            else:
                copies.remove(block)
            if not copies:
                del self._copies[digest]
        if self.hooks is not None:
            self.hooks.removed(digest)

    def validate(self, held: Iterable[Sequence[int]] | None = None) -> None:
        """Raise `AssertionError` if a rule is broken. `held` (the blocks of every request): check the counts too."""
        for block, refs in enumerate(self._refs):
            assert refs >= 0, f"block {block} has {refs} references"
            assert (refs == 0) == (block in self._free), f"block {block}: {refs} references, free {block in self._free}"
        entries = list(self._cached.items())
        for digest, copies in self._copies.items():
            assert copies and digest in self._cached, f"hash {digest} has no first copy, or an empty list of others"
            entries += [(digest, block) for block in copies]
        assert all(self._hash_of[block] == digest for digest, block in entries), "a hash and its block disagree"
        assert len({block for _, block in entries}) == len(entries), "a block is listed twice"
        assert len(entries) == sum(digest is not None for digest in self._hash_of), "a sealed block cannot be found"
        if held is not None:
            counted = [0] * self.total
            for blocks in held:
                assert len(set(blocks)) == len(blocks), "a request holds a block twice"
                for block in blocks:
                    counted[block] += 1
            assert counted == self._refs, "references and holders disagree"


class LoraSlots:
    """LoRA slots: requests of at most `limit` adapters run at a time. The `held` most recently used adapters stay in
    memory. The base model needs no slot."""

    __slots__ = ("_held", "_running", "changed", "held", "limit")

    def __init__(self, limit: int, held: int = 0) -> None:
        self.limit = limit
        self.held = max(held, limit)
        #: Adapters in memory, the most recently used last.
        self._held: dict[str, None] = {}
        #: Running requests per adapter, in the order in which the adapters became active.
        self._running: dict[str, int] = {}
        #: Whether the set of active adapters has changed since the last reset, so deferred requests may be admitted.
        self.changed = False

    def admits(self, lora: str) -> bool:
        return not lora or lora in self._running or len(self._running) < self.limit

    def enter(self, lora: str) -> bool:
        """Add a request of this adapter; True if the adapter must be loaded first."""
        if not lora:
            return False
        count = self._running.get(lora, 0)
        self._running[lora] = count + 1
        self.changed |= count == 0
        missing = lora not in self._held
        self._held.pop(lora, None)
        self._held[lora] = None
        if len(self._held) > self.held:
            del self._held[next(name for name in self._held if name not in self._running)]
        return missing

    def leave(self, lora: str) -> None:
        if lora:
            count = self._running[lora] - 1
            if count:
                self._running[lora] = count
            else:
                del self._running[lora]
                self.changed = True

    def running(self) -> tuple[str, ...]:
        return tuple(self._running)


def adapters_of(requests: Iterable[EngineRequest]) -> tuple[str, ...]:
    """The adapters of these requests without repetition, in the order of their first request."""
    return tuple(dict.fromkeys(request.lora for request in requests if request.lora))


# A request's side of the KV cache: which blocks its tokens need, and the hashes under which these can be found.


class RequestBlocks:
    """Gives blocks to requests and takes them back. Its only state is the block manager."""

    __slots__ = ("block_size", "blocks", "caching")

    def __init__(self, blocks: BlockManager, block_size: int, caching: bool) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.caching = caching

    def begin(self, request: EngineRequest, target: int) -> bool:
        """Hold the cached blocks of the first `target` tokens. Returns False, and changes nothing, if not all would
        fit.

        At least one token is left to compute, because only a computed token gives logits: when a prompt of exactly n
        blocks is repeated, n - 1 of them are hits (vLLM 0.32, measured).
        """
        size = self.block_size
        hits: list[int] = []
        if self.caching:
            full_blocks = (target - 1) // size
            self._know(request, full_blocks)
            assert request.hashes is not None
            hits = self.blocks.find(request.hashes, full_blocks)
        needed = -(-target // size) - len(hits)
        if needed > self.blocks.free - self.blocks.idle(hits):
            return False
        self.blocks.hold(hits)
        request.blocks = hits
        request.computed = len(hits) * size
        request.target = target
        # Another server computed these tokens. After a preemption, this engine computes them, so `loaded` counts once.
        loaded, request.loaded = min(request.loaded, target - 1), 0
        if loaded > request.computed:
            self.extend(request, loaded)
            request.computed = loaded
        return True

    def extend(self, request: EngineRequest, end: int) -> bool:
        """Take the blocks that the tokens before `end` need, and seal the blocks that they fill. Returns False, and
        changes nothing, if too few blocks are free."""
        held = request.blocks
        missing = -(-end // self.block_size) - len(held)
        if missing > self.blocks.free:
            return False
        if missing > 0:
            held += self.blocks.take(missing)
        if self.caching:
            self._seal(request, request.computed // self.block_size, end // self.block_size)
        return True

    def seal_last(self, request: EngineRequest) -> None:
        """Seal the request's last block, which gets its last token in this step."""
        last = len(request.blocks)
        self._seal(request, last - 1, last)

    def drop(self, request: EngineRequest) -> None:
        self.blocks.release(request.blocks)
        request.blocks = []
        request.computed = 0

    def _seal(self, request: EngineRequest, first: int, end: int) -> None:
        if first >= end:
            return
        self._know(request, end)
        hashes = request.hashes
        assert hashes is not None
        self.blocks.seal(request.blocks[first:end], hashes[first:end])
        hooks = self.blocks.hooks
        if hooks is not None:
            parent = hashes[first - 1] if first else 0
            if request.salt and not first:
                hooks.salted(request.salt)
            hooks.stored(hashes[first:end], parent, lambda: self._tokens(request, first, end), request.lora)

    def _know(self, request: EngineRequest, count: int) -> None:
        """Compute the first `count` block hashes if they are not known yet."""
        hashes = request.hashes
        if hashes is None:
            root = tk.root_hash(request.lora, request.salt)
            hashes = request.hashes = tk.chain(request.tokens, self.block_size, root)
        while len(hashes) < count:
            index = len(hashes)
            parent = hashes[index - 1] if index else tk.root_hash(request.lora, request.salt)
            hashes.append(tk.block_hash(parent, self._tokens(request, index, index + 1)))

    def _tokens(self, request: EngineRequest, first: int, end: int) -> bytes:
        """Token ids of the blocks from `first` to before `end`: prompt, then output."""
        start, stop = first * self.block_size, end * self.block_size
        prompt = request.prompt_tokens
        part = request.tokens[start * tk.TOKEN_BYTES : stop * tk.TOKEN_BYTES] if start < prompt else b""
        if stop <= prompt:
            return part
        return part + tk.output(request.seed, max(0, start - prompt), stop - prompt)
