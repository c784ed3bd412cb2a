"""What the fitted times mean for parameters that people set by hand, each with its reason. Pure.

The default policy needs none of them: it learns its speeds. They are for profiles of filters and scorers, for flow
control, and for the reference picker's configurations.
"""

from collections.abc import Sequence
from math import isfinite

from msgspec import Struct

from fairlead.bench.tune_facts import Facts
from fairlead.bench.tune_fit import Fitted, Observation

#: The tuning guide's bounds and divisor for `hashBlockSize`.
BLOCK_LEAST, BLOCK_MOST, BLOCK_PER = 3, 20, 200
#: Its shares of prefix and load weights by hit rate, above `HIGH` and below `LOW`.
HIGH, LOW = 0.7, 0.2


class Traffic(Struct, kw_only=True, frozen=True):
    """What requests are like; a probe cannot know."""

    prompt_tokens: float = 4000.0
    output_tokens: float = 300.0
    #: Below 0 = not known.
    hit_rate: float = -1.0
    ttft_ms: float = 2000.0
    tpot_ms: float = 50.0
    max_num_seqs: int = 256


def traffic_of(observations: Sequence[Observation]) -> Traffic:
    """What recorded requests were like."""
    prompts = sum(one.prompt_tokens for one in observations)
    answers = [one.completion_tokens for one in observations if one.completion_tokens > 0]
    if not prompts:
        return Traffic()
    return Traffic(
        prompt_tokens=prompts / len(observations),
        output_tokens=sum(answers) / len(answers) if answers else Traffic().output_tokens,
        hit_rate=sum(max(one.cached_tokens, 0) for one in observations) / prompts,
    )


class Advice(Struct, kw_only=True, frozen=True):
    """One parameter."""

    parameter: str
    value: float | int | str
    reason: str


def advise(fitted: Fitted, facts: Facts, traffic: Traffic) -> list[Advice]:
    return [
        _block_size(traffic),
        *_weights(traffic),
        _queue_length(fitted, traffic),
        _concurrency(fitted, facts, traffic),
        _waiting_tokens(fitted, traffic),
        _peak(fitted),
        *_capacity(facts),
    ]


def _block_size(traffic: Traffic) -> Advice:
    value = max(BLOCK_LEAST, min(BLOCK_MOST, round(traffic.prompt_tokens / BLOCK_PER)))
    return Advice(
        parameter="hashBlockSize",
        value=value,
        reason=f"mean prompt of {traffic.prompt_tokens:,.0f} tokens / {BLOCK_PER}, within {BLOCK_LEAST} and "
        f"{BLOCK_MOST}: smaller finds short shared beginnings, larger costs less per decision",
    )


def _weights(traffic: Traffic) -> list[Advice]:
    rate = traffic.hit_rate
    if rate < 0:
        why = "the hit rate is not known (give --hit-rate); these suit mixed traffic"
    else:
        why = f"hit rate {rate:.0%}: " + (
            f"above {HIGH:.0%} the cache is worth more than an even load"
            if rate > HIGH
            else f"below {LOW:.0%} there is little to find in caches"
            if rate < LOW
            else f"between {LOW:.0%} and {HIGH:.0%} both matter"
        )
    prefix, load = (100, 30) if rate > HIGH else (20, 100) if 0 <= rate < LOW else (60, 60)
    return [
        Advice(parameter="prefix-aware weight", value=prefix, reason=why),
        Advice(parameter="load-aware weight", value=load, reason=why),
    ]


def _queue_length(fitted: Fitted, traffic: Traffic) -> Advice:
    own = fitted.prefill_ms(traffic.prompt_tokens, _uncached(traffic)) - fitted.overhead_ms
    value = max(1, min(traffic.max_num_seqs, int((traffic.ttft_ms - fitted.overhead_ms) / max(own, 1e-3))))
    return Advice(
        parameter="maxQueueLength",
        value=value,
        reason=f"a waiting prompt takes {own:,.1f} ms; behind more of them the first token is later than "
        f"{traffic.ttft_ms:,.0f} ms",
    )


def _concurrency(fitted: Fitted, facts: Facts, traffic: Traffic) -> Advice:
    tokens = traffic.prompt_tokens + traffic.output_tokens / 2
    per_sequence = fitted.step_ms(1, tokens) - fitted.step_ms(0, tokens)
    by_time = (traffic.tpot_ms - fitted.latency.c0_ms) / per_sequence if per_sequence > 0 else float("inf")
    by_memory = facts.kv_tokens / tokens if facts.kv_tokens else float("inf")
    value = max(1, int(min(by_time, by_memory, traffic.max_num_seqs)))
    if not isfinite(min(by_time, by_memory)) or value == traffic.max_num_seqs:
        why = f"neither time per token nor memory is short before the engine's own limit of {traffic.max_num_seqs}"
    elif by_memory < by_time:
        why = f"its KV cache of {facts.kv_tokens:,} tokens has no room for more of {tokens:,.0f} that share nothing"
    else:
        why = f"with more answers at once a token takes longer than {traffic.tpot_ms:g} ms"
    return Advice(parameter="maxConcurrency", value=value, reason=why)


def _waiting_tokens(fitted: Fitted, traffic: Traffic) -> Advice:
    per_token = max(fitted.prefill_ms(8192) - fitted.overhead_ms, 1e-3) / 8192
    value = int((traffic.ttft_ms / 2) / per_token)
    return Advice(
        parameter="waiting prompt tokens per endpoint",
        value=value,
        reason=f"half of {traffic.ttft_ms:,.0f} ms at {per_token * 1e3:,.1f} µs per token: with more in front the "
        "other half must do for the rest",
    )


def _peak(fitted: Fitted) -> Advice:
    value = 8192 / max(fitted.prefill_ms(8192) - fitted.overhead_ms, 1e-3) * 1e3
    return Advice(
        parameter="peakPrefillThroughput",
        value=round(value),
        reason="prompt tokens per second in a step of 8192; `prefix-cache-affinity-filter` turns tokens into time",
    )


def _capacity(facts: Facts) -> list[Advice]:
    if not facts.num_blocks:
        return []
    return [
        Advice(
            parameter="lruCapacityPerServer",
            value=facts.num_blocks,
            reason=f"the engine reports {facts.num_blocks:,} blocks of {facts.block_size} tokens; a larger memory of "
            "prefixes believes in blocks that are gone",
        )
    ]


def _uncached(traffic: Traffic) -> float:
    return max(traffic.prompt_tokens * (1.0 - max(traffic.hit_rate, 0.0)), 1.0)
