"""From what single requests took to the step model of `fairlead.engine.spec.LatencyModel`. Pure.

Theory. A step takes `c0 + c_pf·new + c_attn·pairs + c_seq·B + c_kv·KV`. So, in milliseconds,

    a request alone, u of its n prompt tokens uncached:  TTFT = h + c0·⌈u/C⌉ + c_pf·u + c_attn·u·(n - u/2)
    B requests that decode together, m tokens each:      TPOT = c0 + c_seq·B + c_kv·B·m

`h` is what a request takes besides (HTTP, tokenising, network), C the tokens of one step. All of it is linear in the
six unknowns: least squares of relative errors, with outliers weighed down, and none of them below 0.

Rules
* Requests that waited for others say nothing of prefill, and answers of a few tokens nothing of decoding.
* What was not varied cannot be fitted: a term that no observation tells from another is left at 0 and said so.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from fairlead.engine.spec import LatencyModel
from fairlead.model.errors import FairleadError

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
    found, unknown = _solve(matrix, target)
    errors = np.abs(matrix @ found - target)
    prefill = np.array([kind == "prefill" for kind in kinds])
    h, c0, c_pf, c_attn, c_seq, c_kv = (float(value) for value in found)
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
    for one in observations:
        prompt = float(one.prompt_tokens)
        uncached = max(prompt - max(one.cached_tokens, 0), 1.0)
        if one.batch == 1 and one.ttft_ms > 0 and prompt > 0:
            steps = float(-(-uncached // STEP_TOKENS))
            rows.append([1.0, steps, uncached, uncached * (prompt - uncached / 2), 0.0, 0.0])
            values.append(one.ttft_ms)
            kinds.append("prefill")
        if one.batch > 0 and one.tpot_ms > 0:
            tokens = prompt + one.completion_tokens / 2
            rows.append([0.0, 1.0, 0.0, 0.0, float(one.batch), one.batch * tokens])
            values.append(one.tpot_ms)
            kinds.append("decode")
    return rows, values, kinds


def _solve(matrix: _Array, target: _Array) -> tuple[_Array, tuple[str, ...]]:
    """Robust least squares without negative coefficients: what comes out below 0 is left out, the worst first."""
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    kept = list(range(matrix.shape[1]))
    unknown = [name for name, column in zip(_NAMES, np.abs(matrix).max(axis=0), strict=True) if column == 0]
    weights = np.ones(len(target))
    found = np.zeros(len(scale))
    for _ in range(_ROUNDS * len(scale)):
        part = (matrix / scale)[:, kept] * weights[:, None]
        solution, _, rank, _ = np.linalg.lstsq(part, target * weights, rcond=1e-6)
        found = np.zeros(len(scale))
        found[kept] = solution / scale[kept]
        if solution.min() < 0:
            kept.pop(int(solution.argmin()))
            continue
        if rank < len(kept):
            unknown += [_NAMES[kept.pop()]]
            continue
        errors = np.abs(matrix @ found - target)
        fresh = np.minimum(1.0, _INLIER / np.maximum(errors, 1e-12))
        if np.allclose(fresh, weights, atol=1e-3):
            break
        weights = fresh
    return found, tuple(dict.fromkeys(unknown))
