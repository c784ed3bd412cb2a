"""`fairlead tune` except its probes (`tune_probe`): what a server reports, its step model, and advice from both.

`ask_facts` queries the server once; what the server does not report stays unknown. Everything else is pure.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from http.client import HTTPException
from math import isfinite
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import asdict

from fairlead.apis.engine_metrics import ENGINES, compile_engine
from fairlead.apis.prometheus import read_page
from fairlead.core.errors import FairleadError
from fairlead.lab.engine.presets import Preset
from fairlead.lab.engine.spec import LatencyModel
from fairlead.lab.load.probe import MODELS_PATH, exchanged, models_of


class Facts(Struct, kw_only=True, frozen=True):
    """What a server reports. 0 or empty = not reported."""

    model: str = ""
    max_model_len: int = 0
    block_size: int = 0
    num_blocks: int = 0
    max_num_seqs: int = 0
    #: The token budget of one step.
    max_batched_tokens: int = 0
    #: See `EngineSpec`. `None` = not reported.
    async_scheduling: bool | None = None
    #: Share of the prompt tokens since the server's start that were found in its cache; below 0 = unknown.
    hit_rate: float = -1.0

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds. One block is the null block, which holds nothing (vLLM 0.32)."""
        return self.block_size * max(self.num_blocks - 1, 0)


class _SchedulerLimits(Struct):
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    async_scheduling: bool | None = None


class _VllmConfig(Struct):
    scheduler_config: _SchedulerLimits


class _ServerInfo(Struct):
    """The configuration that vLLM reports in development mode (`VLLM_SERVER_DEV_MODE=1`)."""

    vllm_config: _VllmConfig


def ask_facts(target: str, headers: dict[str, str], model: str = "") -> Facts:
    """Query the server at `http://host:port`. `model`: empty = the first that it serves. If a page is missing or cannot
    be read, its fields stay unknown."""
    facts = Facts(model=model)
    for name, entry in models_of(_get(target, MODELS_PATH, headers)).items():
        if not model or name == model:
            length = int(entry.context) if isfinite(entry.context) else 0
            facts = msgspec.structs.replace(facts, model=name, max_model_len=length)
            break
    info = _ServerInfo(_VllmConfig(_SchedulerLimits()))
    with suppress(msgspec.DecodeError):
        info = msgspec.json.decode(_get(target, "/server_info?config_format=json", headers), type=_ServerInfo)
    limits = info.vllm_config.scheduler_config
    facts = msgspec.structs.replace(
        facts,
        max_num_seqs=max(limits.max_num_seqs, 0),
        max_batched_tokens=max(limits.max_num_batched_tokens, 0),
        async_scheduling=limits.async_scheduling,
    )
    page = _get(target, "/metrics", headers)
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


def _get(target: str, path: str, headers: dict[str, str]) -> bytes:
    """The content of a page; empty if there is no such page."""
    try:
        status, body = exchanged(target, path, headers)
    except (OSError, HTTPException):
        return b""
    return body if 200 <= status < 300 else b""


# From the times of single requests to the step model of `fairlead.lab.engine.spec.LatencyModel`.
#
# Theory. A step takes `c0 + c_pf·new + c_attn·pairs + c_seq·B + c_kv·KV`. So, in milliseconds,
#
#     a request alone, u of its n prompt tokens uncached:  TTFT = h + c0·⌈u/C⌉ + c_pf·u + c_attn·u·(n - u/2)
#     B requests that decode together, m tokens each:      TPOT = c0 + c_seq·B + c_kv·B·m
#     a request among W clients, `a` tokens of answer:     E2E = c0·(a + 1) + W·(c_pf·u + c_attn·u·(n - u/2))
#                                                                + W·(a - 1)·(c_seq + c_kv·(n + a/2))
#
# `h` is the time of a request outside its steps (HTTP, tokenizing, network), C the token budget of one step. A
# client sends its next request when its previous one ends. During one answer, each of the other clients also gets one.
# A new request waits for the end of a step, or of two with asynchronous scheduling; a client alone pays `h` instead.
#
# The equations are linear in the six unknowns, which are fitted by least squares of relative errors, with reduced
# weights for outliers and no negative values. Observations beside a busy neighbour show by what factor steps are then
# longer: the mean over clients, or over kinds of decoding. They also show how long a request then takes outside its
# steps: the median of its time to first token less its steps.
#
# Rules
# * Requests that waited for others are not used for prefill, and answers of a few tokens are not used for decoding.
# * A term that no observation separates from another one cannot be fitted: it stays 0 and is listed in `unknown`.

#: Default token budget of one step: vLLM's on data-centre GPUs.
STEP_TOKENS = 8192
#: Answers shorter than this are not used for the time per token.
LEAST_ANSWER = 8
_NAMES = ("overhead_ms", "c0_ms", "c_pf_ms", "c_attn_ms", "c_seq_ms", "c_kv_ms")
_ROUNDS = 8
_Array = np.ndarray[Any, Any]
#: Relative error above which an observation gets a reduced weight.
_INLIER = 0.05
#: If the relative error of clients' times is above this, asynchronous scheduling may be the reason.
ASYNC_ERROR = 0.01
#: What to do about too few or contradictory observations. Answers that did not decode together, or that a busy machine
#: read in one piece, are left out.
_REPEAT = "measure longer, on a server and a machine without other work"


class TooLittle(FairleadError):
    """The observations are not enough for the fit."""


class Observation(Struct, kw_only=True, frozen=True):
    """One answered request. In a line of JSON, additional fields are ignored. Milliseconds; -1 = unknown."""

    prompt_tokens: int
    #: -1 = unknown; the observation is then not used for prefill.
    cached_tokens: int = 0
    completion_tokens: int = -1
    ttft_ms: float = -1.0
    #: From the request to the end of its answer; called `duration_ms` in journals.
    e2e_ms: float = -1.0
    duration_ms: float = -1.0
    #: Requests that decoded together, including this one. 0 = unknown; without `clients`, it is then not used.
    batch: int = 0
    #: Clients that each sent a request like this one as soon as their previous one ended; 0 = not such traffic.
    clients: int = 0
    #: Servers on the same machine that computed at the same time.
    neighbours: int = 0

    def problem(self) -> str:
        """What is impossible in it; empty = nothing."""
        if self.cached_tokens > self.prompt_tokens >= 0:
            return f"{self.cached_tokens} cached_tokens of {self.prompt_tokens} prompt_tokens"
        for name, value in asdict(self).items():
            if value < 0 and value != -1:
                return f"{name} is {value:g}; -1 means unknown"
        return ""

    @property
    def used(self) -> bool:
        """Whether it says enough for a fit: the time of the first token alone, or of tokens at a known load."""
        if self.clients:
            return self.tpot_ms > 0 and self.cached_tokens >= 0
        return any(True for _ in _rows(self, STEP_TOKENS))

    @property
    def end_ms(self) -> float:
        """From the request to the end of its answer; below 0 = unknown."""
        return self.e2e_ms if self.e2e_ms >= 0 else self.duration_ms

    @property
    def tpot_ms(self) -> float:
        """Milliseconds per output token; -1 = unknown."""
        if self.completion_tokens < LEAST_ANSWER or not 0 <= self.ttft_ms < self.end_ms:
            return -1.0
        return (self.end_ms - self.ttft_ms) / (self.completion_tokens - 1)


class Residual(Struct, kw_only=True, frozen=True):
    """Observations that are alike, and their value by the fit: medians, in milliseconds."""

    kind: Literal["prefill", "decode", "traffic"]
    #: Tokens of the prompt.
    tokens: int
    cached: int
    #: Requests that decoded together, or clients.
    batch: int
    neighbours: int
    count: int
    observed_ms: float
    fitted_ms: float

    @property
    def error(self) -> float:
        """The relative error, above 0 if the fit is too slow."""
        return self.fitted_ms / self.observed_ms - 1.0

    def __str__(self) -> str:
        what = {
            "prefill": f"prefill of {self.tokens - self.cached:,} of {self.tokens:,} tokens",
            "decode": f"step of {self.batch} decoding behind {self.tokens:,} tokens",
            "traffic": f"answers to {self.batch} clients with prompts of {self.tokens:,} tokens",
        }[self.kind] + " beside a busy neighbour" * bool(self.neighbours)
        return (
            f"{what}: {self.observed_ms:.1f} ms, fitted {self.fitted_ms:.1f} ({self.error:+.0%}), {self.count} observed"
        )


class Fitted(Struct, kw_only=True, frozen=True):
    """A step model, and how well it reproduces the observations."""

    latency: LatencyModel
    #: Time of a request outside its steps.
    overhead_ms: float
    #: By what share steps take longer while a server on the same machine computes (0 = no longer, or not observed); and
    #: the time of a request outside its steps then.
    contention: float = 0.0
    contended_overhead_ms: float = 0.0
    #: Median relative errors.
    prefill_error: float
    decode_error: float
    prefills: int
    decodes: int
    #: Terms that the observations do not separate from others.
    unknown: tuple[str, ...] = ()
    residuals: tuple[Residual, ...] = ()
    step_tokens: int = STEP_TOKENS
    #: See `EngineSpec`: as reported by the server, or as it explains the times of clients better.
    async_scheduling: bool = False

    @property
    def traffic_error(self) -> float:
        """The largest relative error of the times that clients observed without a busy neighbour; 0 = none did."""
        alone = (residual for residual in self.residuals if residual.kind == "traffic" and not residual.neighbours)
        return max((abs(residual.error) for residual in alone), default=0.0)

    def prefill_ms(self, prompt: float, uncached: float = -1.0) -> float:
        """The TTFT of a request that runs alone. `uncached`: tokens to compute; below 0 = the whole prompt."""
        uncached = prompt if uncached < 0 else uncached
        return self.overhead_ms + _prefill(self.latency, prompt, uncached, self.step_tokens)

    def step_ms(self, batch: float, tokens: float) -> float:
        """The time of a step with `batch` decoding sequences of `tokens` each."""
        model = self.latency
        return model.c0_ms + batch * (model.c_seq_us * 1e-3 + model.c_kv_ns * 1e-6 * tokens)


def _prefill(model: LatencyModel, prompt: float, uncached: float, step_tokens: int) -> float:
    pairs = uncached * (prompt - uncached / 2)
    steps = -(-uncached // step_tokens)
    return model.c0_ms * steps + model.c_pf_us * 1e-3 * uncached + model.c_attn_ns * 1e-6 * pairs


class _Row(NamedTuple):
    """The equation of one observation: `value` (milliseconds) is the scalar product of `terms` and the six unknowns."""

    kind: Literal["prefill", "decode", "traffic"]
    seen: Observation
    terms: tuple[float, ...]
    value: float
    #: The number of requests of which `value` is the mean.
    requests: int = 1


def fit(observations: Sequence[Observation], step_tokens: int = 0, async_scheduling: bool | None = None) -> Fitted:
    """Fit a step model. `step_tokens`: the token budget of a step, 0 = `STEP_TOKENS`. `async_scheduling`: `None` =
    whichever explains the times of clients. Raises `TooLittle` that says what is missing or wrong."""
    step_tokens = step_tokens or STEP_TOKENS
    fitted = _fit(observations, step_tokens, bool(async_scheduling))
    if async_scheduling is None and (error := fitted.traffic_error) > ASYNC_ERROR:
        ahead = _fit(observations, step_tokens, True)
        if ahead.traffic_error < 0.5 * error:
            fitted = ahead
    if fitted.latency.c0_ms <= 0:
        raise TooLittle(f"the observations contradict each other: they leave no time for a step itself; {_REPEAT}")
    return fitted


def _fit(observations: Sequence[Observation], step_tokens: int, async_scheduling: bool) -> Fitted:
    rows = [row for seen in observations for row in _rows(seen, step_tokens)]
    rows += _traffic(observations, 2.0 if async_scheduling else 1.0)
    alone = [row for row in rows if not row.seen.neighbours]
    prefills = sum(row.kind == "prefill" for row in alone)
    decodes = sum(row.kind == "decode" for row in alone)
    if prefills < 3 or decodes < 3:
        raise TooLittle(
            f"{prefills} requests that ran alone (ttft_ms, batch 1) and {decodes} answers of at least {LEAST_ANSWER} "
            f"tokens with a known batch were observed; at least 3 of each are needed; {_REPEAT}"
        )
    values = np.array([row.value for row in alone])
    matrix = np.array([row.terms for row in alone]) / values[:, None]
    solved, unknown = _solve(matrix, np.array([row.requests for row in alone]) ** 0.5)
    errors = np.abs(matrix @ solved - 1.0)
    prefill, decode = (np.array([row.kind == kind for row in alone]) for kind in ("prefill", "decode"))
    if solved[0]:
        left = [row.value - float(np.dot(row.terms[1:], solved[1:])) for row in alone if row.kind == "prefill"]
        solved[0] = max(_clipped_mean(left), 0.0)
    h, c0, c_pf, c_attn, c_seq, c_kv = (float(value) for value in solved)
    contention, contended = _contended(rows, solved)
    return Fitted(
        latency=LatencyModel(c0, c_pf * 1e3, c_attn * 1e6, c_seq * 1e3, c_kv * 1e6),
        overhead_ms=h,
        contention=contention,
        contended_overhead_ms=contended,
        prefill_error=float(np.median(errors[prefill])),
        decode_error=float(np.median(errors[decode])),
        prefills=prefills,
        decodes=decodes,
        unknown=unknown,
        residuals=_residuals(rows, solved, contention, contended),
        step_tokens=step_tokens,
        async_scheduling=async_scheduling,
    )


def _contended(rows: Sequence[_Row], solved: _Array) -> tuple[float, float]:
    """By what share steps take longer while a neighbour computes, and the milliseconds of a request outside its steps
    then."""
    overhead = float(solved[0])
    kinds = [alike for alike in _residuals(rows, solved, 0.0, overhead) if alike.neighbours]
    if not kinds:
        return 0.0, overhead
    observed = {alike.kind for alike in kinds}
    kind = "traffic" if "traffic" in observed else "decode" if "decode" in observed else "prefill"
    steps = [alike for alike in kinds if alike.kind == kind]
    contention = max(float(np.mean([alike.observed_ms / alike.fitted_ms for alike in steps])) - 1.0, 0.0)
    besides = [
        row.value - (1.0 + contention) * float(np.dot(row.terms[1:], solved[1:]))
        for row in rows
        if row.seen.neighbours and row.kind == "prefill"
    ]
    return contention, max(float(np.median(besides)), overhead) if besides else overhead


def _clipped_mean(values: Sequence[float]) -> float:
    """The mean with the lowest and highest tenth clipped: occasional waits for a processor count, outliers do not."""
    return float(np.mean(np.clip(values, *np.quantile(values, (0.1, 0.9)))))


def _rows(seen: Observation, step_tokens: int) -> Iterator[_Row]:
    if seen.clients:
        return
    prompt = float(seen.prompt_tokens)
    uncached = max(prompt - seen.cached_tokens, 1.0)
    if seen.batch == 1 and seen.ttft_ms > 0 and prompt > 0 and seen.cached_tokens >= 0:
        steps = float(-(-uncached // step_tokens))
        terms = (1.0, steps, uncached, uncached * (prompt - uncached / 2), 0.0, 0.0)
        yield _Row("prefill", seen, terms, seen.ttft_ms)
    if seen.batch > 0 and seen.tpot_ms > 0:
        tokens = prompt + seen.completion_tokens / 2
        yield _Row("decode", seen, (0.0, 1.0, 0.0, 0.0, float(seen.batch), seen.batch * tokens), seen.tpot_ms)


def _traffic(observations: Sequence[Observation], missed: float) -> Iterator[_Row]:
    """One equation per number of clients, with the means of their observations. `missed`: the steps that a new request
    waits for if there are other clients."""
    alike: dict[tuple[int, int], list[Observation]] = {}
    for seen in observations:
        if seen.clients > 0 and seen.tpot_ms > 0 and seen.cached_tokens >= 0:
            alike.setdefault((seen.clients, seen.neighbours), []).append(seen)
    for (clients, _), group in alike.items():
        prompt, cached, answer, took = np.array(
            [(seen.prompt_tokens, seen.cached_tokens, seen.completion_tokens, seen.end_ms) for seen in group], float
        ).T
        uncached, decoded = np.maximum(prompt - cached, 1.0), clients * (answer - 1.0)
        pairs = uncached * (prompt - uncached / 2)
        lone = np.full(len(group), float(clients == 1))
        steps = answer + missed * (1.0 - lone)
        terms = (lone, steps, clients * uncached, clients * pairs, decoded, decoded * (prompt + answer / 2))
        yield _Row("traffic", group[0], tuple(float(term.mean()) for term in terms), float(took.mean()), len(group))


def _residuals(rows: Sequence[_Row], solved: _Array, contention: float, contended: float) -> tuple[Residual, ...]:
    """One residual per group of rows that are alike. Their token counts may differ by up to a tenth, because a
    tokenizer makes different counts from the same number of words."""

    def fitted(row: _Row) -> float:
        if not row.seen.neighbours:
            return float(np.dot(row.terms, solved))
        steps = (1.0 + contention) * float(np.dot(row.terms[1:], solved[1:]))
        return steps + row.terms[0] * contended

    groups: dict[tuple[Any, ...], list[_Row]] = {}
    for row in rows:
        seen = row.seen
        size = round(8 * np.log2(max(seen.prompt_tokens, 1)))
        cached = row.kind == "prefill" and seen.cached_tokens > 0
        groups.setdefault((seen.neighbours, row.kind, cached, size, seen.clients or seen.batch), []).append(row)
    return tuple(
        Residual(
            kind=alike[0].kind,
            tokens=int(np.median([row.seen.prompt_tokens for row in alike])),
            cached=int(np.median([max(row.seen.cached_tokens, 0) for row in alike])),
            batch=alike[0].seen.clients or alike[0].seen.batch,
            neighbours=alike[0].seen.neighbours,
            count=sum(row.requests for row in alike),
            observed_ms=float(np.median([row.value for row in alike])),
            fitted_ms=float(np.median([fitted(row) for row in alike])),
        )
        for _, alike in sorted(groups.items())
    )


def _solve(matrix: _Array, trust: _Array) -> tuple[_Array, tuple[str, ...]]:
    """Robust least squares of `matrix @ values = 1`, each row weighted with `trust`, without negative coefficients:
    terms with a negative result are dropped, the worst first. Returns the values, and the names of unknown terms."""
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    kept = list(range(matrix.shape[1]))
    unknown = [name for name, column in zip(_NAMES, np.abs(matrix).max(axis=0), strict=True) if column == 0]
    weights = trust
    values = np.zeros(len(scale))
    for _ in range(_ROUNDS * len(scale)):
        part = (matrix / scale)[:, kept] * weights[:, None]
        solution, _, rank, _ = np.linalg.lstsq(part, weights, rcond=1e-6)
        values = np.zeros(len(scale))
        values[kept] = solution / scale[kept]
        if solution.min() < 0:
            kept.pop(int(solution.argmin()))
            continue
        if rank < len(kept):
            unknown += [_NAMES[kept.pop()]]
            continue
        errors = np.abs(matrix @ values - 1.0)
        fresh = trust * np.minimum(1.0, _INLIER / np.maximum(errors, 1e-12))
        if np.allclose(fresh, weights, atol=1e-3):
            break
        weights = fresh
    return values, tuple(dict.fromkeys(unknown))


class Measured(Struct):
    """The result of probing a server."""

    facts: Facts
    observations: list[Observation] = []

    def fit(self) -> Fitted:
        """Fit the observations. Raises `TooLittle`."""
        return fit(self.observations, self.facts.max_batched_tokens, self.facts.async_scheduling)

    def preset(self, fitted: Fitted, name: str) -> Preset:
        """The preset of the server. What the server does not report is taken from a data-centre GPU."""
        facts, usual = self.facts, Preset(latency=fitted.latency)
        return Preset(
            name=name,
            model=facts.model or usual.model,
            latency=fitted.latency,
            overhead_ms=round(fitted.overhead_ms, 2),
            contention=round(fitted.contention, 3),
            contended_overhead_ms=round(fitted.contended_overhead_ms, 2) if fitted.contention else 0.0,
            kv_tokens=facts.kv_tokens or max(usual.kv_tokens, facts.max_model_len),
            block_size=facts.block_size,
            max_model_len=facts.max_model_len or min(usual.max_model_len, facts.kv_tokens or usual.max_model_len),
            max_num_seqs=facts.max_num_seqs or usual.max_num_seqs,
            max_batched_tokens=facts.max_batched_tokens or usual.max_batched_tokens,
            async_scheduling=fitted.async_scheduling,
        )


# Advice for parameters that people set by hand, derived from the fitted times, each with its reason.
# The default policy needs none of these parameters, because it learns how fast the engines are. They are for profiles
# of filters and scorers, for flow control, and for configurations of the reference picker.

#: Bounds and divisor for `hashBlockSize` in llm-d's tuning guide.
BLOCK_LEAST, BLOCK_MOST, BLOCK_PER = 3, 20, 200
#: The recommended share of the engine's sequences for `maxQueueLength` (docs/tuning.md).
QUEUE_SHARE = 0.8
#: Below this hit rate, caches save little.
LOW = 0.2


class Traffic(Struct, kw_only=True, frozen=True):
    """The properties of the expected requests, which a probe cannot know: mean tokens, hit rate, latency limits."""

    prompt_tokens: float = 4000.0
    output_tokens: float = 300.0
    #: Below 0 = unknown.
    hit_rate: float = -1.0
    ttft_ms: float = 2000.0
    tpot_ms: float = 50.0


def traffic_of(observations: Sequence[Observation]) -> Traffic:
    """The properties of recorded requests."""
    prompts = sum(observation.prompt_tokens for observation in observations)
    answers = [observation.completion_tokens for observation in observations if observation.completion_tokens > 0]
    if not prompts:
        return Traffic()
    return Traffic(
        prompt_tokens=prompts / len(observations),
        output_tokens=sum(answers) / len(answers) if answers else Traffic().output_tokens,
        hit_rate=sum(max(observation.cached_tokens, 0) for observation in observations) / prompts,
    )


class Advice(Struct, frozen=True):
    """A recommended value of one parameter."""

    parameter: str
    value: float | int | str
    reason: str


#: The assumed limit of sequences of an engine that does not report it.
USUAL_SLOTS = 256


def advise(fitted: Fitted, facts: Facts, traffic: Traffic) -> list[Advice]:
    if facts.max_model_len:  # leave a part of the context for the answer
        most = 0.7 * facts.max_model_len
        traffic = msgspec.structs.replace(traffic, prompt_tokens=min(traffic.prompt_tokens, most))
    return [
        _block_size(traffic),
        *_weights(traffic),
        _queue_length(fitted, facts, traffic),
        _concurrency(fitted, facts, traffic),
        _waiting_tokens(fitted, traffic),
        _peak(fitted),
        *_capacity(facts),
    ]


def _block_size(traffic: Traffic) -> Advice:
    value = max(BLOCK_LEAST, min(BLOCK_MOST, round(traffic.prompt_tokens / BLOCK_PER)))
    why = (
        f"mean prompt of {traffic.prompt_tokens:,.0f} tokens / {BLOCK_PER}, within {BLOCK_LEAST} and {BLOCK_MOST}: "
        "smaller blocks find shorter shared beginnings, larger ones cost less per decision"
    )
    return Advice("hashBlockSize", value, why)


def _weights(traffic: Traffic) -> list[Advice]:
    rate, prefix = traffic.hit_rate, 30
    why = "requests still find their caches, and no hot spot stays; a higher prefix weight would outweigh any queue"
    if 0 <= rate < LOW:
        prefix, why = 20, f"hit rate {rate:.0%}: below {LOW:.0%}, caches save little"
    return [Advice("prefix-aware weight", prefix, why), Advice("load-aware weight", 100, why)]


def _queue_length(fitted: Fitted, facts: Facts, traffic: Traffic) -> Advice:
    uncached = max(traffic.prompt_tokens * (1.0 - max(traffic.hit_rate, 0.0)), 1.0)
    own = fitted.prefill_ms(traffic.prompt_tokens, uncached) - fitted.overhead_ms
    slots = facts.max_num_seqs or USUAL_SLOTS
    most = max(1, int(QUEUE_SHARE * slots))
    takes = f"{QUEUE_SHARE:.0%} of the engine's {slots} sequences; computing {most} prompts takes {most * own:,.0f} ms"
    return Advice("maxQueueLength", most, f"{takes}, but if all queues exceed a lower limit, prefixes stop counting")


def _concurrency(fitted: Fitted, facts: Facts, traffic: Traffic) -> Advice:
    tokens = traffic.prompt_tokens + traffic.output_tokens / 2
    per_sequence = fitted.step_ms(1, tokens) - fitted.step_ms(0, tokens)
    by_time = (traffic.tpot_ms - fitted.latency.c0_ms) / per_sequence if per_sequence > 0 else float("inf")
    by_memory = facts.kv_tokens / tokens if facts.kv_tokens else float("inf")
    slots = facts.max_num_seqs or USUAL_SLOTS
    value = max(1, int(min(by_time, by_memory, slots)))
    if not isfinite(min(by_time, by_memory)) or value == slots:
        why = f"the engine's own limit of {slots} is reached before the time per token or the memory limits it"
    elif by_memory < by_time:
        why = f"its KV cache of {facts.kv_tokens:,} tokens holds no more requests of {tokens:,.0f} unshared tokens"
    else:
        why = f"with more answers at once, a token takes longer than {traffic.tpot_ms:g} ms"
    return Advice("maxConcurrency", value, why)


def _waiting_tokens(fitted: Fitted, traffic: Traffic) -> Advice:
    per_token = 1e3 / _tokens_per_s(fitted)
    pace = f"at {per_token * 1e3:,.1f} µs per token, they take half of the TTFT limit of {traffic.ttft_ms:,.0f} ms"
    why = f"{pace}; the other half is left for the request itself"
    return Advice("waiting prompt tokens per endpoint", int((traffic.ttft_ms / 2) / per_token), why)


def _tokens_per_s(fitted: Fitted) -> float:
    return fitted.step_tokens / max(fitted.prefill_ms(fitted.step_tokens) - fitted.overhead_ms, 1e-3) * 1e3


def _peak(fitted: Fitted) -> Advice:
    pace = f"prompt tokens per second in a step of {fitted.step_tokens}"
    why = f"{pace}; `prefix-cache-affinity-filter` converts tokens to time with it"
    return Advice("peakPrefillThroughput", round(_tokens_per_s(fitted)), why)


def _capacity(facts: Facts) -> list[Advice]:
    if not facts.num_blocks:
        return []
    blocks = f"the engine reports {facts.num_blocks:,} blocks of {facts.block_size} tokens"
    why = f"{blocks}; a larger index would list blocks that the engine has evicted"
    return [Advice("lruCapacityPerServer", facts.num_blocks, why)]
