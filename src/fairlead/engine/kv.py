"""A request's side of the KV cache: which blocks it needs for its tokens and under which hashes they are known."""

from fairlead.engine import tokens as tk
from fairlead.engine.blocks import BlockManager
from fairlead.engine.request import EngineRequest


class RequestBlocks:
    """Gives blocks to requests and takes them back. Holds no state of its own beside the block manager."""

    __slots__ = ("block_size", "blocks", "caching")

    def __init__(self, blocks: BlockManager, block_size: int, caching: bool) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.caching = caching

    def begin(self, request: EngineRequest, target: int) -> bool:
        """Hold what is cached of the first `target` tokens, provided that all of them will fit; False changes nothing.

        At least one token is left to compute, since only a computed token gives logits: a prompt of exactly n blocks
        repeats with n - 1 of them (vLLM 0.32, measured).
        """
        size = self.block_size
        hits: list[int] = []
        if self.caching:
            whole = (target - 1) // size
            self._know(request, whole)
            assert request.hashes is not None
            hits = self.blocks.find(request.hashes, whole)
        needed = -(-target // size) - len(hits)
        if needed > self.blocks.free - self.blocks.idle(hits):
            return False
        self.blocks.hold(hits)
        request.blocks = hits
        request.computed = len(hits) * size
        request.target = target
        self._load(request, min(request.loaded, target - 1))
        return True

    def _load(self, request: EngineRequest, tokens: int) -> None:
        """The KV of the first `tokens` came from another server. Once: after a preemption they are computed here."""
        request.loaded = 0
        if tokens > request.computed:
            self.extend(request, tokens)
            request.computed = tokens

    def extend(self, request: EngineRequest, end: int) -> bool:
        """Have blocks for the tokens before `end`, and seal those that will be full then; False for lack of room."""
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
        """The request's last block gets its last token in this step."""
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
        """Make the first `count` block hashes known."""
        hashes = request.hashes
        if hashes is None:
            root = tk.root_hash(request.lora, request.salt)
            hashes = request.hashes = tk.chain(request.tokens, self.block_size, root)
        while len(hashes) < count:
            at = len(hashes)
            parent = hashes[at - 1] if at else tk.root_hash(request.lora, request.salt)
            hashes.append(tk.block_hash(parent, self._tokens(request, at, at + 1)))

    def _tokens(self, request: EngineRequest, first: int, end: int) -> bytes:
        """Token ids of the blocks `first`..`end`: prompt, then output."""
        start, stop = first * self.block_size, end * self.block_size
        prompt = request.prompt_tokens
        part = request.tokens[start * tk.TOKEN_BYTES : stop * tk.TOKEN_BYTES] if start < prompt else b""
        if stop <= prompt:
            return part
        return part + tk.output(request.seed, max(0, start - prompt), stop - prompt)
