"""What a model server says of itself: name, context length, KV cache, prefix hits. Asked once, all optional."""

from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException
from math import isfinite
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
from msgspec import Struct

from fairlead.apis.engine_metrics import ENGINES, compile_engine
from fairlead.apis.prometheus import read_page
from fairlead.core.errors import FairleadError
from fairlead.lab.engine.spec import LatencyModel

_MOST_BYTES = 8 << 20


class Facts(Struct, kw_only=True, frozen=True):
    """0 or empty = it does not say."""

    model: str = ""
    max_model_len: int = 0
    block_size: int = 0
    num_blocks: int = 0
    #: Of all prompt tokens since its start, the share found in its cache; below 0 = nothing was asked yet.
    hit_rate: float = -1.0

    @property
    def kv_tokens(self) -> int:
        return self.block_size * self.num_blocks


class _Model(Struct):
    id: str
    max_model_len: int | None = None


class _Models(Struct):
    data: list[_Model]


def ask_facts(target: str, headers: dict[str, str], model: str = "", timeout_s: float = 10.0) -> Facts:
    """Of `http://host:port`. A page that does not come or cannot be read leaves its part unknown."""
    facts = Facts(model=model)
    try:
        listed = msgspec.json.decode(_get(target, "/v1/models", headers, timeout_s), type=_Models).data
    except (OSError, HTTPException, msgspec.DecodeError):
        listed = []
    for entry in listed:
        if not model or entry.id == model:
            facts = msgspec.structs.replace(facts, model=entry.id, max_model_len=max(entry.max_model_len or 0, 0))
            break
    try:
        page = _get(target, "/metrics", headers, timeout_s)
    except (OSError, HTTPException):
        return facts
    for engine in ENGINES.values():
        sample = read_page(page, compile_engine(engine)).sample
        if sample.num_blocks:
            asked, hits = sample.prefix_queries or 0.0, sample.prefix_hits or 0.0
            return msgspec.structs.replace(
                facts,
                block_size=sample.block_size,
                num_blocks=sample.num_blocks,
                hit_rate=hits / asked if asked > 0 else -1.0,
            )
    return facts


def _get(target: str, path: str, headers: dict[str, str], timeout_s: float) -> bytes:
    parts = urlsplit(target)
    connection = HTTPConnection(parts.hostname or "", parts.port or 80, timeout=timeout_s)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        body = answer.read(_MOST_BYTES)
        return body if 200 <= answer.status < 300 else b""
    finally:
        connection.close()


# From what single requests took to the step model of `fairlead.lab.engine.spec.LatencyModel`. Pure.
#
# Theory. A step takes `c0 + c_pf·new + c_attn·pairs + c_seq·B + c_kv·KV`. So, in milliseconds,
#
#     a request alone, u of its n prompt tokens uncached:  TTFT = h + c0·⌈u/C⌉ + c_pf·u + c_attn·u·(n - u/2)
#     B requests that decode together, m tokens each:      TPOT = c0 + c_seq·B + c_kv·B·m
#
# `h` is what a request takes besides (HTTP, tokenising, network), C the tokens of one step. All of it is linear in the
# six unknowns: least squares of relative errors, with outliers weighed down, and none of them below 0.
#
# Rules
# * Requests that waited for others say nothing of prefill, and answers of a few tokens nothing of decoding.
# * What was not varied cannot be fitted: a term that no observation tells from another is left at 0 and said so.

#: Tokens of one step: vLLM's default on data-centre GPUs.
STEP_TOKENS = 8192
#: Answers shorter than this say nothing of the time per token.
LEAST_ANSWER = 8
_NAMES = ("overhead_ms", "c0_ms", "c_pf_ms", "c_attn_ms", "c_seq_ms", "c_kv_ms")
_ROUNDS = 8
_Array = np.ndarray[Any, Any]
#: Relative error from which an observation is weighed down.
_INLIER = 0.05


class TooLittle(FairleadError):
    """The observations cannot tell what is asked of them."""


class Observation(Struct, kw_only=True, frozen=True):
    """One answered request. As a line of JSON, further fields are ignored. Milliseconds; -1 = not known."""

    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = -1
    ttft_ms: float = -1.0
    #: From the request to the end of its answer; journals call it `duration_ms`.
    e2e_ms: float = -1.0
    duration_ms: float = -1.0
    #: Requests that decoded together, this one included. 0 = not known: then it says nothing.
    batch: int = 0

    @property
    def tpot_ms(self) -> float:
        """-1 where it is not known."""
        end = self.e2e_ms if self.e2e_ms >= 0 else self.duration_ms
        if self.completion_tokens < LEAST_ANSWER or not 0 <= self.ttft_ms < end:
            return -1.0
        return (end - self.ttft_ms) / (self.completion_tokens - 1)


class Fitted(Struct, kw_only=True, frozen=True):
    """A step model, and how well it repeats what was observed."""

    latency: LatencyModel
    #: Of a request besides its steps.
    overhead_ms: float
    #: Median relative errors.
    prefill_error: float
    decode_error: float
    prefills: int
    decodes: int
    #: Terms that the observations do not tell apart from others.
    unknown: tuple[str, ...] = ()

    def prefill_ms(self, prompt: float, uncached: float = -1.0) -> float:
        """TTFT of a request alone."""
        uncached = prompt if uncached < 0 else uncached
        return self.overhead_ms + _prefill(self.latency, prompt, uncached)

    def step_ms(self, batch: float, tokens: float) -> float:
        """A step of `batch` decoding sequences of `tokens` each."""
        model = self.latency
        return model.c0_ms + batch * (model.c_seq_us * 1e-3 + model.c_kv_ns * 1e-6 * tokens)


def _prefill(model: LatencyModel, prompt: float, uncached: float) -> float:
    pairs = uncached * (prompt - uncached / 2)
    steps = -(-uncached // STEP_TOKENS)
    return model.c0_ms * steps + model.c_pf_us * 1e-3 * uncached + model.c_attn_ns * 1e-6 * pairs


def fit(observations: Sequence[Observation]) -> Fitted:
    """Raises `TooLittle` with what to observe as well."""
    rows, values, kinds = _rows(observations)
    prefills, decodes = kinds.count("prefill"), kinds.count("decode")
    if prefills < 3 or decodes < 3:
        raise TooLittle(
            f"{prefills} requests that ran alone (ttft_ms, batch 1) and {decodes} answers of at least {LEAST_ANSWER} "
            "tokens with a known batch were observed; at least 3 of each are needed"
        )
    matrix, target = np.array(rows) / np.array(values)[:, None], np.ones(len(values))
    solved, unknown = _solve(matrix, target)
    errors = np.abs(matrix @ solved - target)
    prefill = np.array([kind == "prefill" for kind in kinds])
    h, c0, c_pf, c_attn, c_seq, c_kv = (float(value) for value in solved)
    return Fitted(
        latency=LatencyModel(c0, c_pf * 1e3, c_attn * 1e6, c_seq * 1e3, c_kv * 1e6),
        overhead_ms=h,
        prefill_error=float(np.median(errors[prefill])),
        decode_error=float(np.median(errors[~prefill])),
        prefills=prefills,
        decodes=decodes,
        unknown=unknown,
    )


def _rows(observations: Sequence[Observation]) -> tuple[list[list[float]], list[float], list[str]]:
    rows: list[list[float]] = []
    values: list[float] = []
    kinds: list[str] = []
    for observation in observations:
        prompt = float(observation.prompt_tokens)
        uncached = max(prompt - max(observation.cached_tokens, 0), 1.0)
        if observation.batch == 1 and observation.ttft_ms > 0 and prompt > 0:
            steps = float(-(-uncached // STEP_TOKENS))
            rows.append([1.0, steps, uncached, uncached * (prompt - uncached / 2), 0.0, 0.0])
            values.append(observation.ttft_ms)
            kinds.append("prefill")
        if observation.batch > 0 and observation.tpot_ms > 0:
            tokens = prompt + observation.completion_tokens / 2
            rows.append([0.0, 1.0, 0.0, 0.0, float(observation.batch), observation.batch * tokens])
            values.append(observation.tpot_ms)
            kinds.append("decode")
    return rows, values, kinds


def _solve(matrix: _Array, target: _Array) -> tuple[_Array, tuple[str, ...]]:
    """Robust least squares without negative coefficients: what comes out below 0 is left out, the worst first."""
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    kept = list(range(matrix.shape[1]))
    unknown = [name for name, column in zip(_NAMES, np.abs(matrix).max(axis=0), strict=True) if column == 0]
    weights = np.ones(len(target))
    values = np.zeros(len(scale))
    for _ in range(_ROUNDS * len(scale)):
        part = (matrix / scale)[:, kept] * weights[:, None]
        solution, _, rank, _ = np.linalg.lstsq(part, target * weights, rcond=1e-6)
        values = np.zeros(len(scale))
        values[kept] = solution / scale[kept]
        if solution.min() < 0:
            kept.pop(int(solution.argmin()))
            continue
        if rank < len(kept):
            unknown += [_NAMES[kept.pop()]]
            continue
        errors = np.abs(matrix @ values - target)
        fresh = np.minimum(1.0, _INLIER / np.maximum(errors, 1e-12))
        if np.allclose(fresh, weights, atol=1e-3):
            break
        weights = fresh
    return values, tuple(dict.fromkeys(unknown))


# What the fitted times mean for parameters that people set by hand, each with its reason. Pure.
#
# The default policy needs none of them: it learns its speeds. They are for profiles of filters and scorers, for flow
# control, and for the reference picker's configurations.

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
    prompts = sum(observation.prompt_tokens for observation in observations)
    answers = [observation.completion_tokens for observation in observations if observation.completion_tokens > 0]
    if not prompts:
        return Traffic()
    return Traffic(
        prompt_tokens=prompts / len(observations),
        output_tokens=sum(answers) / len(answers) if answers else Traffic().output_tokens,
        hit_rate=sum(max(observation.cached_tokens, 0) for observation in observations) / prompts,
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
