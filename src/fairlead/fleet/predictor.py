"""What a request's first token would take at each endpoint, and how far off such a forecast is.

Theory. At endpoint i, for a prompt of n tokens of which u must be computed, in milliseconds:

    P    = c_pf·u + c_attn·u·(n - u/2)                  computing the prompt itself
    S    = c0 + c_seq·B + c_kv·KV                       a step that only decodes: B sequences with KV tokens in all
    Q    = Σ P of our requests before their first token, less the time since the head of them began (one step at most)
    M    = hold · (kv + (W + u)/capacity - 1) / kv, ≥ 0 waiting for memory, of which the share kv is in use and given
                                                        back within `hold`; where it is full, no less than
                                                        hold · waiting / B: answers end one by one (forecasts only)
    TTFT = kappa · (Q + P + S·⌈(W + u)/8192⌉ + S/2 + M) S/2 is what is left of the running step; W queued tokens

`kappa` is the geometric mean of observed / forecast at that endpoint, and takes up what the model leaves out. The
error band comes from the quantiles of observed / forecast among forecasts of the same kind (idle or queued, with or
without a cached beginning): no distribution is assumed, so it holds what it says.

Rules
* A forecast is stored with its lease, before the request is charged, and judged by the first token of that lease.
* Only streamed answers teach: in others the first byte is the last.
* Nothing learned leaves its bounds, whatever clocks and clients do.
"""

from math import exp, log

import numpy as np
from msgspec import Struct

from fairlead.fleet.bands import Band
from fairlead.fleet.columns import FloatColumn, scalar
from fairlead.fleet.rates import PRIOR, STEP_TOKENS, Rates
from fairlead.fleet.table import EndpointTable
from fairlead.model.forecast import Forecast

#: Bounds of `kappa`, and the weight of the newest ratio.
KAPPA = (0.5, 4.0)
KAPPA_SHARE = 0.03
#: The same of the time per output token.
TPOT_KAPPA = (0.1, 10.0)
TPOT_SHARE = 0.1
#: What all endpoints have in common is for the bands' middle: `kappa` leaks back to 1 where nothing holds it.
KAPPA_LEAK = 0.01
#: Milliseconds that a request holds its memory after the first token; to begin with, and the newest one's weight.
HOLD_MS = 10_000.0
HOLD_SHARE = 0.02
#: Steps from an answer's first token to its last; to begin with.
ANSWER_STEPS = 250.0
#: First tokens closer together than this (seconds) came from one step.
SAME_STEP = 0.001
#: A stretch ends after so many tokens even if there is more to compute.
LONG_STRETCH = 5 * STEP_TOKENS
#: Memory comes back at a rate that is proportional to what is in use; no less than this share of it.
LEAST_USAGE = 0.1
#: KV utilisation above which who waits, waits for memory: one goes in for each answer that ends.
FULL = 0.98
#: KV utilisation from which memory has a price, the inverse of the range over which it rises, and how much a request
#: that is still to come counts beside one that waits already.
FULL_FROM, FULL_SLOPE, PASSING = 0.75, 5.0, 0.3
#: KV utilisation above which stretches may contain waits for memory and do not teach rates.
CROWDED = 0.9
#: Kinds of forecasts, with and without a cached beginning: idle endpoint, 0, 1, more requests queued there, no memory.
KINDS = 5
_ZERO, _HALF, _ONE = scalar(0.0), scalar(0.5), scalar(1.0)
_C_0, _C_SEQ, _C_KV = scalar(PRIOR.c0), scalar(PRIOR.c_seq), scalar(PRIOR.c_kv)
_C_PF, _C_ATTN, _HALF_ATTN = PRIOR.c_pf, PRIOR.c_attn, scalar(0.5 * PRIOR.c_attn)
_PER_STEP, _STEP_MS = scalar(1.0 / STEP_TOKENS), scalar(PRIOR.c_pf * STEP_TOKENS)


class Estimate(Struct):
    """The terms over all slots: columns, or a number where it is the same for all. Milliseconds and tokens."""

    uncached: FloatColumn
    prefill: FloatColumn
    step: FloatColumn
    #: Without the wait for memory.
    ttft: FloatColumn
    #: KV tokens that the endpoint would need, over its capacity; 0 where that is unknown.
    used: FloatColumn


class _Stretch(Struct):
    """Prefill without a pause at one endpoint."""

    start: float
    end: float = 0.0
    tokens: float = 0.0
    work_ms: float = 0.0
    steps: float = 0.0
    #: Tokens of the first tokens that came last, at one moment.
    newest: float = 0.0
    #: The endpoint waited for memory.
    spoiled: bool = False


def _steps(tokens: float) -> float:
    return float(-(-tokens // STEP_TOKENS))


class Predictor:
    """Columns have one entry per slot of the table."""

    def __init__(self, table: EndpointTable) -> None:
        self._table = table
        self.rates = Rates()
        self.kappa: FloatColumn = np.ones(0)
        self.tpot_kappa: FloatColumn = np.ones(0)
        self.hold_ms = HOLD_MS
        self.answer_steps = ANSWER_STEPS
        self._bands = [Band() for _ in range(2 * KINDS)]
        self._stretches: list[_Stretch | None] = []

    def reset(self, slot: int) -> None:
        """A new endpoint stands at `slot`."""
        self.rates.reset(slot)
        while slot >= len(self._stretches):
            self._stretches.append(None)
            self.kappa = np.append(self.kappa, 1.0)
            self.tpot_kappa = np.append(self.tpot_kappa, 1.0)
        self._stretches[slot] = None
        self.kappa[slot] = self.tpot_kappa[slot] = 1.0

    # ---- forecasts ----

    def estimate(self, prompt: float, hit: FloatColumn | None, now: float) -> Estimate:
        """All slots at once. `hit` are tokens believed to be cached, `None` = none anywhere.

        Constants are 0-d arrays and the fewest possible operations: at few endpoints each costs half a microsecond.
        """
        table, rates = self._table, self.rates
        if hit is None:
            uncached: FloatColumn = scalar(max(prompt, 1.0))
            prefill = rates.prefill * scalar(rates.prior.prefill_ms(prompt, max(prompt, 1.0)))
        else:
            uncached = np.maximum(scalar(prompt) - hit, _ONE)
            prefill = rates.prefill * (uncached * (scalar(_C_PF + _C_ATTN * prompt) - _HALF_ATTN * uncached))
        step = self.steps()
        tokens = table.queued_tokens + uncached
        ttft = prefill + step * (np.ceil(_PER_STEP * tokens) + _HALF)
        if np.count_nonzero(table.queued_tokens):
            ttft += self.ahead(now)
        used = table.kv + tokens * table.per_capacity
        return Estimate(uncached, prefill, step, self.kappa * ttft, used)

    def steps(self) -> FloatColumn:
        """S of each endpoint."""
        table = self._table
        steps: FloatColumn = self.rates.step * (_C_0 + _C_SEQ * table.active + _C_KV * table.kv_tokens)
        return steps

    def ahead(self, now: float) -> FloatColumn:
        """Q of each endpoint. Only where something is queued does it say anything."""
        table, prefill = self._table, self.rates.prefill
        done = np.minimum(scalar(now * 1e3) - table.prefill_since_ms, _STEP_MS * prefill)
        ahead: FloatColumn = np.maximum(prefill * table.queued_ms - done, _ZERO)
        return ahead

    def parts(self, terms: Estimate, now: float) -> tuple[FloatColumn, FloatColumn, FloatColumn]:
        """What `Estimate.ttft` is made of: the own prompt, the prompts before it, the steps that both share."""
        table = self._table
        own = self.kappa * terms.prefill
        queue = self.kappa * (self.ahead(now) if np.count_nonzero(table.queued_tokens) else np.zeros(len(table)))
        steps = self.kappa * terms.step * (np.ceil(_PER_STEP * (table.queued_tokens + terms.uncached)) + _HALF)
        return own, queue, steps

    def memory_wait(self, used: FloatColumn) -> FloatColumn:
        """M: milliseconds until endpoints have room, by `Estimate.used`."""
        short = np.maximum(used - 1.0, 0.0)
        return self.kappa * short * (self.hold_ms / np.maximum(self._table.kv, LEAST_USAGE))

    def ttft_quantile(self, terms: Estimate, prompt: float, p: float) -> FloatColumn:
        """TTFT that is kept with probability `p` (0.05..0.95), the wait for memory included."""
        table = self._table
        busy = np.minimum(table.pending, 2.0) + np.minimum(table.queued_tokens + table.active, 1.0)
        busy = np.where(terms.used > 1.0, KINDS - 1.0, np.minimum(busy, KINDS - 2.0))
        kinds = (busy + KINDS * (terms.uncached < prompt)).astype(np.intp)
        factors = np.array([exp(band.at(p)) for band in self._bands])
        quantile: FloatColumn = (terms.ttft + self.memory_wait(terms.used)) * factors[kinds]
        return quantile

    def forecast(self, slot: int, prompt: float, uncached: float, now: float) -> Forecast:
        """The same for one slot, with the wait for memory and the band. `uncached` is at least 1."""
        table, rates = self._table, self.rates
        factor = float(rates.prefill[slot])
        queued, running = float(table.queued_tokens[slot]), float(table.active[slot])
        step = self._step_ms(slot)
        ttft = factor * rates.prior.prefill_ms(prompt, uncached) + step * (_steps(queued + uncached) + 0.5)
        if queued:
            done = min(now * 1e3 - float(table.prefill_since_ms[slot]), factor * float(_STEP_MS))
            ttft += max(factor * float(table.queued_ms[slot]) - done, 0.0)
        usage = float(table.kv[slot])
        short = usage + (queued + uncached) * float(table.per_capacity[slot]) - 1.0
        if short > 0.0:
            ttft += short * self.hold_ms / max(usage, LEAST_USAGE)
        waiting = float(table.queue[slot])
        if waiting >= 1.0 and usage > FULL:
            ttft = max(ttft, waiting * self.hold_ms / max(running, 1.0))
        busy = min(int(table.pending[slot]), 2) + 1 if queued or running else 0
        kind = KINDS * (uncached < prompt) + (KINDS - 1 if short > 0.0 else busy)
        band = self._bands[kind]
        kappa = float(self.kappa[slot])
        tpot = step + float(rates.step[slot]) * rates.prior.c_seq
        return Forecast(
            ttft_ms=ttft * kappa * exp(band.middle.value),
            low_ms=ttft * kappa * exp(band.low.value),
            high_ms=ttft * kappa * exp(band.high.value),
            tpot_ms=tpot * float(self.tpot_kappa[slot]),
            model_ttft_ms=ttft,
            model_tpot_ms=tpot,
            kind=kind,
        )

    def _step_ms(self, slot: int) -> float:
        """A decode step now. It reads a shared beginning once per sequence, so the ledger's sum counts, not the memory
        in use."""
        return self.rates.step_ms(slot, float(self._table.active[slot]), float(self._table.kv_tokens[slot]))

    # ---- learning ----

    def first_token(
        self, slot: int, forecast: Forecast, uncached: float, work_ms: float, sent: float, now: float
    ) -> None:
        """A request charged at `sent` got its first token. Call it before the ledger learns of it."""
        self.judge(slot, forecast, (now - sent) * 1e3)
        self._stretch(slot, uncached, work_ms, now)

    def judge(self, slot: int, forecast: Forecast, took_ms: float) -> None:
        """A first token took so long."""
        if not (0.0 < took_ms < 1e8 and forecast.model_ttft_ms > 0.0):
            return
        band = self._bands[forecast.kind]
        kappa = float(self.kappa[slot])
        off = log(min(max(took_ms / forecast.model_ttft_ms, 1e-2), 1e2) / kappa)
        bounded = min(max(off - band.middle.value, -0.3), 0.3)
        band.add(off)
        low, high = KAPPA
        self.kappa[slot] = min(max(kappa * exp(KAPPA_SHARE * bounded - KAPPA_LEAK * log(kappa)), low), high)

    def _stretch(self, slot: int, uncached: float, work_ms: float, now: float) -> None:
        """Add a first token to the open stretch, and close that if it ends or is long enough."""
        table = self._table
        stretch = self._stretches[slot]
        running, usage = float(table.active[slot]), float(table.kv[slot])
        if stretch is None:
            stretch = self._stretches[slot] = _Stretch(float(table.prefill_since_ms[slot]) * 1e-3)
            stretch.steps = 0.5 * min(running, 1.0)
        if now - stretch.end < SAME_STEP:
            stretch.steps -= _steps(stretch.newest)
            stretch.newest += uncached
        else:
            stretch.newest = uncached
        stretch.steps += _steps(stretch.newest)
        stretch.end = now
        stretch.tokens += uncached
        stretch.work_ms += work_ms
        stretch.spoiled |= usage > CROWDED
        more = float(table.queued_tokens[slot]) - uncached
        if more <= 0.0 or stretch.tokens >= LONG_STRETCH:
            if not stretch.spoiled:
                took = (now - stretch.start) * 1e3
                self.rates.observe(slot, stretch.work_ms, stretch.steps, self._step_ms(slot), took)
            self._stretches[slot] = _Stretch(now) if more > 0.0 else None

    def ended(self, slot: int, forecast: Forecast, held_ms: float, completion_tokens: int) -> None:
        """An answer ended `held_ms` after its first token, with so many tokens (-1 = not known)."""
        if not 0.0 < held_ms < 1e8:
            return
        self.hold_ms += HOLD_SHARE * (held_ms - self.hold_ms)
        kappa, model = float(self.tpot_kappa[slot]), forecast.model_tpot_ms
        if model <= 0.0:
            return
        steps = min(held_ms / (kappa * model), 1e6)
        self.answer_steps += HOLD_SHARE * (steps - self.answer_steps)
        if completion_tokens > 1:
            ratio = held_ms / (completion_tokens - 1) / (kappa * model)
            low, high = TPOT_KAPPA
            self.tpot_kappa[slot] = min(max(kappa * min(max(ratio, 0.25), 4.0) ** TPOT_SHARE, low), high)

    def validate(self) -> None:
        self.rates.validate()
        low, high = KAPPA
        assert ((self.kappa >= low) & (self.kappa <= high)).all()
        assert np.isfinite(self.tpot_kappa).all() and 0.0 <= self.hold_ms < 1e9 and 0.0 <= self.answer_steps <= 1e6
        for band in self._bands:
            band.validate()
