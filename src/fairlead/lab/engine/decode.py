"""The requests that decode. They all advance together, one token per step, so nothing is stored per token.

A request's output is `steps - base`. What will happen to it is known when it joins: which step is its last
(`_endings`), and which steps of every `block_size` need a new block or fill one (`ring`). A step looks only into
these, whatever the size of the batch.

With `computed` tokens when it joins before step `s0`, a request writes token `computed + s - s0` in step `s`. That is
the first of a block when `s ≡ s0 - computed (mod block_size)`: its place in the ring. The step before fills a block.
"""

from heapq import heappop, heappush
from typing import NamedTuple

from fairlead.lab.engine.blocks import RequestBlocks
from fairlead.lab.engine.request import EngineRequest, Phase
from fairlead.lab.engine.spec import LatencyModel
from fairlead.lab.engine.stats import EngineStats


class DecodeBatch:
    """Requests in the order in which they joined."""

    __slots__ = ("_endings", "_order", "block_size", "kv_tokens", "members", "ring", "steps")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.members: dict[EngineRequest, None] = {}
        #: Steps that ended, with or without anybody here.
        self.steps = 0
        #: Tokens in the cache, over all members, as of the last step that ended.
        self.kv_tokens = 0
        self.ring: list[dict[EngineRequest, None]] = [{} for _ in range(block_size)]
        #: By step, and these steps as a heap. A step is always taken out when it comes, so none lies in the past.
        self._endings: dict[int, list[EngineRequest]] = {}
        self._order: list[int] = []

    def join(self, request: EngineRequest) -> None:
        """A request whose prefill is complete; its `output` counts the token that the prefill gave."""
        steps = self.steps
        request.phase = Phase.DECODE
        request.base = steps - request.output
        request.ring = (steps - request.computed) % self.block_size
        request.end_step = request.base + request.limit
        self.members[request] = None
        self.kv_tokens += request.computed
        self.ring[request.ring][request] = None
        if request.end_step == steps:  # the caller ends it at once
            return
        ending = self._endings.get(request.end_step)
        if ending is None:
            ending = self._endings[request.end_step] = []
            heappush(self._order, request.end_step)
        ending.append(request)

    def leave(self, request: EngineRequest) -> None:
        """Out of the batch, with `output` brought up to date."""
        request.output = self.steps - request.base
        # The last token that was sampled is not in the cache yet.
        self.kv_tokens -= request.prompt_tokens + request.output - 1
        del self.members[request]
        del self.ring[request.ring][request]

    def advance(self) -> list[EngineRequest]:
        """A step ended: everybody got a token. Returns those for whom it was the last one; they are still members."""
        self.steps += 1
        self.kv_tokens += len(self.members)
        if not self._order or self._order[0] != self.steps:
            return []
        ending = self._endings.pop(heappop(self._order))
        # Whoever was aborted, or was preempted and came back, is not at the step that was foreseen.
        return [r for r in ending if r.phase is Phase.DECODE and r.end_step == self.steps]

    def last(self) -> EngineRequest:
        return next(reversed(self.members))

    def growing(self) -> dict[EngineRequest, None]:
        """Who needs a new block in the step that begins now."""
        return self.ring[self.steps % self.block_size]

    def filling(self) -> dict[EngineRequest, None]:
        """Whose last block becomes full in the step that begins now."""
        return self.ring[(self.steps + 1) % self.block_size]

    def steps_to_end(self) -> int:
        """Steps until the first one ends, the one that runs included; maybe too few after an abort, never too many."""
        return (self._order[0] if self._order else self.steps + 1) - self.steps

    def steps_to_shortage(self, free: int, most: int) -> int:
        """Steps after the one that runs, at most `most`, before one begins for which `free` blocks are not enough."""
        for step in range(most):
            free -= len(self.ring[(self.steps + step + 1) % self.block_size])
            if free < 0:
                return step
        return most

    def validate(self, paused: bool = False) -> None:
        """Raises `AssertionError` where the ring, the counts and the requests disagree. `paused`: nobody decodes in the
        step that runs, so nobody got a block for it."""
        assert len(self.members) == sum(map(len, self.ring)), "ring and batch disagree"
        kv_tokens = 0
        for request in self.members:
            assert request.phase is Phase.DECODE, f"{request.id} is in the batch and not decoding"
            output = self.steps - request.base
            assert 1 <= output < request.limit, f"{request.id} has {output} of {request.limit} tokens"
            assert request in self._endings[request.end_step], f"{request.id} would never end"
            tokens = request.prompt_tokens + output - 1
            kv_tokens += tokens
            blocks = -(-(tokens + (not paused)) // self.block_size)
            assert len(request.blocks) == blocks, f"{request.id}: {len(request.blocks)} blocks for {tokens} tokens"
        assert kv_tokens == self.kv_tokens, "KV tokens of the batch are miscounted"


# Steps in which nothing happens but decoding: most of a busy server's, so they are worth a loop of their own.
#
# Rules
# * The same additions in the same order as in a full step, so that times, gauges and histograms are equal to the last
#   bit whether steps are taken one by one or here. Only what cannot happen in such steps is left out: nobody ends,
#   joins, is preempted or has a prefill.
# * Blocks are taken and sealed step by step: which block is evicted for whom, and when, is part of the result.


class DecodeRun(NamedTuple):
    """When the step that now runs began and will end, how many ended, and how many blocks were taken for it."""

    began: float
    ends: float
    steps: int
    taken: int


def run_decode_steps(
    decoding: DecodeBatch,
    kv: RequestBlocks,
    latency: LatencyModel,
    factor: float,
    stats: EngineStats,
    began: float,
    ends: float,
    now: float,
) -> DecodeRun:
    """Finish steps due by `now`, up to the last one before somebody ends or finds no block. Seconds.

    A step that only decodes runs since `began` until `ends`; `factor` is how much slower than `latency` it is.
    """
    blocks, seal, caching = kv.blocks, kv.seal_last, kv.caching
    ring, size = decoding.ring, decoding.block_size
    members = len(decoding.members)
    fixed, per_token = latency.decode_s(members)
    itl = stats.itl.run(members)
    low, high, itl_sum, seen = 1.0, 0.0, itl.sum, 0
    kv_tokens, steps = decoding.kv_tokens, decoding.steps
    first, last, taken = steps, steps + decoding.steps_to_end() - 1, 0
    growing = ring[(steps + 1) % size]
    while ends <= now and steps < last:
        if growing and blocks.free < len(growing):
            break
        gap = ends - began
        if not low < gap <= high:
            low, high = itl.move(gap, seen)
            seen = 0
        seen += 1
        itl_sum += gap * members
        steps += 1
        kv_tokens += members
        began = ends
        taken = len(growing)
        if taken:
            for request in growing:
                request.blocks += blocks.take(1)
        growing = ring[(steps + 1) % size]
        if growing and caching:  # whoever needs a new block in the next step fills its last one in this
            for request in growing:
                seal(request)
        ends = began + factor * (fixed + per_token * kv_tokens)
    done = steps - first
    if done:
        decoding.steps, decoding.kv_tokens = steps, kv_tokens
        itl.close(itl_sum, seen)
        stats.iteration_tokens.observe(members, done)
        stats.generation_tokens += members * done
    return DecodeRun(began, ends, done, taken)


def foresee(decoding: DecodeBatch, free: int, latency: LatencyModel, factor: float, ends: float) -> float:
    """When somebody will end or find none of the `free` blocks, if nothing but decoding goes on after `ends`.

    A closed sum, so it may differ from what `run_decode_steps` comes to by a rounding error.
    """
    more = decoding.steps_to_end() - 1
    if more <= 0:
        return ends
    count = len(decoding.members)
    if free < count * (more // decoding.block_size + 1):
        # Whoever is preempted may let others in: look no farther than that.
        more = decoding.steps_to_shortage(free, more)
        if more == 0:
            return ends
    kv_tokens = decoding.kv_tokens + count
    first = latency.step_s(0, 0.0, count, kv_tokens)
    growth = latency.step_s(0, 0.0, count, kv_tokens + count) - first
    return ends + factor * (more * first + growth * more * (more - 1) / 2)
