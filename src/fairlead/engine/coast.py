"""Steps in which nothing happens but decoding: most of a busy server's, so they are worth a loop of their own.

Rules
* The same additions in the same order as in a full step, so that times, gauges and histograms are equal to the last
  bit whether steps are taken one by one or here. Only what cannot happen in such steps is left out: nobody ends, joins,
  is preempted or has a prefill.
* Blocks are taken and sealed step by step: which block is evicted for whom, and when, is part of the result.
"""

from typing import NamedTuple

from fairlead.engine.decode import DecodeBatch
from fairlead.engine.kv import RequestBlocks
from fairlead.engine.spec import LatencyModel
from fairlead.engine.stats import EngineStats


class Coasted(NamedTuple):
    """When the step that now runs began and will end, how many ended, and how many blocks were taken for it."""

    began: float
    ends: float
    steps: int
    taken: int


def coast(
    decoding: DecodeBatch,
    kv: RequestBlocks,
    latency: LatencyModel,
    factor: float,
    stats: EngineStats,
    began: float,
    ends: float,
    now: float,
) -> Coasted:
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
    return Coasted(began, ends, done, taken)


def foresee(decoding: DecodeBatch, free: int, latency: LatencyModel, factor: float, ends: float) -> float:
    """When somebody will end or find none of the `free` blocks, if nothing but decoding goes on after `ends`.

    A closed sum, so it may differ from what `coast` comes to by a rounding error.
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
