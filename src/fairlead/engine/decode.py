"""The requests that decode. They all advance together, one token per step, so nothing is stored per token.

A request's output is `steps - base`. What will happen to it is known when it joins: which step is its last
(`_endings`), and which steps of every `block_size` need a new block or fill one (`_ring`). A step looks only into
these, whatever the size of the batch.

With `computed` tokens when it joins before step `s0`, a request writes token `computed + s - s0` in step `s`. That is
the first of a block when `s ≡ s0 - computed (mod block_size)`: its place in the ring. The step before fills a block.
"""

from fairlead.engine.request import EngineRequest, Phase


class DecodeBatch:
    """Requests in the order in which they joined."""

    __slots__ = ("_endings", "_ring", "block_size", "kv_tokens", "members", "steps")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.members: dict[EngineRequest, None] = {}
        #: Steps that ended, with or without anybody here.
        self.steps = 0
        #: Tokens in the cache, over all members, as of the last step that ended.
        self.kv_tokens = 0
        self._ring: list[dict[EngineRequest, None]] = [{} for _ in range(block_size)]
        self._endings: dict[int, list[EngineRequest]] = {}

    def join(self, request: EngineRequest) -> None:
        """A request whose prefill is complete; its `output` counts the token that the prefill gave."""
        steps = self.steps
        request.phase = Phase.DECODE
        request.base = steps - request.output
        request.ring = (steps - request.computed) % self.block_size
        request.end_step = request.base + request.limit
        self.members[request] = None
        self.kv_tokens += request.computed
        self._ring[request.ring][request] = None
        self._endings.setdefault(request.end_step, []).append(request)

    def leave(self, request: EngineRequest) -> None:
        """Out of the batch, with `output` brought up to date."""
        request.output = self.steps - request.base
        # The last token that was sampled is not in the cache yet.
        self.kv_tokens -= request.prompt_tokens + request.output - 1
        del self.members[request]
        del self._ring[request.ring][request]

    def advance(self) -> list[EngineRequest]:
        """A step ended: everybody got a token. Returns those for whom it was the last one; they are still members."""
        self.steps += 1
        self.kv_tokens += len(self.members)
        ending = self._endings.pop(self.steps, None)
        if ending is None:
            return []
        # Whoever was aborted, or was preempted and came back, is not at the step that was foreseen.
        return [r for r in ending if r.phase is Phase.DECODE and r.end_step == self.steps]

    def last(self) -> EngineRequest:
        return next(reversed(self.members))

    def growing(self) -> dict[EngineRequest, None]:
        """Who needs a new block in the step that begins now."""
        return self._ring[self.steps % self.block_size]

    def filling(self) -> dict[EngineRequest, None]:
        """Whose last block becomes full in the step that begins now."""
        return self._ring[(self.steps + 1) % self.block_size]

    def steps_to_end(self) -> int:
        """Steps until the first one ends, the one that runs included; maybe too few after an abort, never too many."""
        return min(self._endings, default=self.steps + 1) - self.steps

    def validate(self) -> None:
        """Raises `AssertionError` where the ring, the counts and the requests disagree."""
        assert len(self.members) == sum(map(len, self._ring)), "ring and batch disagree"
        kv_tokens = 0
        for request in self.members:
            assert request.phase is Phase.DECODE, f"{request.id} is in the batch and not decoding"
            output = self.steps - request.base
            assert 1 <= output < request.limit, f"{request.id} has {output} of {request.limit} tokens"
            assert request in self._endings[request.end_step], f"{request.id} would never end"
            tokens = request.prompt_tokens + output - 1
            kv_tokens += tokens
            blocks = -(-(tokens + 1) // self.block_size)
            assert len(request.blocks) == blocks, f"{request.id}: {len(request.blocks)} blocks for {tokens} tokens"
        assert kv_tokens == self.kv_tokens, "KV tokens of the batch are miscounted"
