"""The requests that decode. They all advance together, one token per step, so nothing is stored per token.

A request has generated `steps - base` tokens. What will happen to a request is known when it joins: its last step
(`_endings`), and which step out of every `block_size` needs a new block or fills one (`ring`). A step looks only at
these, whatever the size of the batch.

A request that joins before step `s0` with `computed` tokens writes token `computed + s - s0` in step `s`. This token is
the first of a block when `s ≡ s0 - computed (mod block_size)`, which is the request's index in the ring. The step
before it fills a block.
"""

from heapq import heappop, heappush
from typing import NamedTuple

from fairlead.lab.engine.blocks import RequestBlocks
from fairlead.lab.engine.request import EngineRequest, Phase
from fairlead.lab.engine.spec import LatencyModel
from fairlead.lab.engine.stats import EngineStats, Run


class DecodeBatch:
    """Requests in the order in which they joined."""

    __slots__ = ("_endings", "_order", "block_size", "kv_tokens", "members", "ring", "steps")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.members: dict[EngineRequest, None] = {}
        #: Steps that have ended, including those without decoding requests.
        self.steps = 0
        #: Tokens in the cache, over all members, after the last step that ended.
        self.kv_tokens = 0
        self.ring: list[dict[EngineRequest, None]] = [{} for _ in range(block_size)]
        #: Requests by their last step, and these steps as a heap. Steps are removed when reached, so none is past.
        self._endings: dict[int, list[EngineRequest]] = {}
        self._order: list[int] = []

    def join(self, request: EngineRequest) -> None:
        """Add a request whose prefill is complete. Its `output` counts the token that the prefill produced."""
        steps = self.steps
        request.phase = Phase.DECODE
        request.base = steps - request.output
        request.ring = (steps - request.computed) % self.block_size
        request.end_step = request.base + request.limit
        self.members[request] = None
        self.kv_tokens += request.computed
        self.ring[request.ring][request] = None
        if request.end_step == steps:  # the caller ends it immediately
            return
        ending = self._endings.get(request.end_step)
        if ending is None:
            ending = self._endings[request.end_step] = []
            heappush(self._order, request.end_step)
        ending.append(request)

    def leave(self, request: EngineRequest) -> None:
        """Remove a request from the batch and update its `output`."""
        request.output = self.steps - request.base
        # The last sampled token is not in the cache yet.
        self.kv_tokens -= request.prompt_tokens + request.output - 1
        del self.members[request]
        del self.ring[request.ring][request]

    def advance(self) -> list[EngineRequest]:
        """End a step: every member got a token. Returns the requests that got their last token, still members."""
        self.steps += 1
        self.kv_tokens += len(self.members)
        if not self._order or self._order[0] != self.steps:
            return []
        ending = self._endings.pop(heappop(self._order))
        # A request that was aborted, or was preempted and came back, does not end at the step that was planned for it.
        return [r for r in ending if r.phase is Phase.DECODE and r.end_step == self.steps]

    def last(self) -> EngineRequest:
        return next(reversed(self.members))

    def growing(self) -> dict[EngineRequest, None]:
        """The requests that need a new block in the step that begins now."""
        return self.ring[self.steps % self.block_size]

    def filling(self) -> dict[EngineRequest, None]:
        """The requests whose last block becomes full in the step that begins now."""
        return self.ring[(self.steps + 1) % self.block_size]

    def steps_to_end(self) -> int:
        """Steps until the first request ends, counting the running step. After an abort, the number may be too small,
        but never too large."""
        return (self._order[0] if self._order else self.steps + 1) - self.steps

    def steps_to_shortage(self, free: int, most: int) -> int:
        """Steps after the running one, at most `most`, until a step needs more than `free` blocks."""
        for step in range(most):
            free -= len(self.ring[(self.steps + step + 1) % self.block_size])
            if free < 0:
                return step
        return most

    def validate(self, paused: bool = False) -> None:
        """Raise `AssertionError` if the ring, the counts and the requests disagree. `paused`: no request decodes in the
        running step, so none got a block for it."""
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


# Steps that only decode. They are most of a busy server's steps, so they have a loop of their own.
#
# Rules
# * The additions are the same, in the same order, as in a full step. So times, gauges and histograms are equal to the
#   last bit whether steps are taken one by one or here. Only what cannot happen in such steps is left out: no request
#   ends, joins, is preempted or has a prefill.
# * Blocks are taken and sealed step by step, because which block is evicted for which request, and when, is part of the
#   result.


class DecodeRun(NamedTuple):
    """When the running step began and will end, how many steps ended, and how many blocks the running step took."""

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
    """Finish the steps due by `now`, up to the last one before a request ends or finds no block. Times in seconds.

    The running step only decodes; it began at `began` and ends at `ends`. A step takes `factor` times the time of
    `latency`.
    """
    blocks, seal, caching = kv.blocks, kv.seal_last, kv.caching
    ring, size = decoding.ring, decoding.block_size
    members = len(decoding.members)
    fixed, per_token = latency.decode_s(members)
    itl = Run(stats.itl, members)
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
        if growing and caching:  # a request that needs a new block in the next step fills its last block in this step
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
    """When a request will next end, or need more than the `free` blocks, if all steps after `ends` only decode.

    A closed sum, so it may differ from the result of `run_decode_steps` by a rounding error.
    """
    more = decoding.steps_to_end() - 1
    if more <= 0:
        return ends
    count = len(decoding.members)
    if free < count * (more // decoding.block_size + 1):
        # The shortage causes a preemption, which may let other requests in, so look no further.
        more = decoding.steps_to_shortage(free, more)
        if more == 0:
            return ends
    kv_tokens = decoding.kv_tokens + count
    first = latency.step_s(0, 0.0, count, kv_tokens)
    growth = latency.step_s(0, 0.0, count, kv_tokens + count) - first
    return ends + factor * (more * first + growth * more * (more - 1) / 2)
