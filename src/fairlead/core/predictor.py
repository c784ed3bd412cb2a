"""Learns the cost kernel's parameters, and how far off its forecasts are.

`kappa` is the geometric mean of observed / forecast at an endpoint. It makes up for what the model (`core.cost`) leaves
out. The error band comes from the quantiles of observed / forecast among forecasts of the same kind (idle or queued,
with or without a cached beginning). No distribution is assumed, so 90 % of the values really are in the band. A kind
without any judged forecast has the band of all kinds.

Rules
* A forecast is made before the request is charged and stored with its lease. The lease's first token judges it.
* Only streamed answers judge forecasts, because in others the first byte comes with the last. The engines' speed is
  also learned from answers that are not streamed or that the gateway does not report. Such a whole answer is a stretch:
  its steps, and the prompts that were computed meanwhile. If its tokens are not reported, they are estimated from its
  size (`core.tokens`).
* Engines behind one address compute at the same time, and it is unknown which engine has which request. There, each
  first token is a stretch of its own if fewer requests wait than there are engines. Prompts that were computed in the
  meantime count as shared equally among the engines.
* All learned values stay within their bounds, whatever clocks and clients do.
"""

from collections.abc import Hashable
from math import exp, log

import numpy as np
from msgspec import Struct

from fairlead.core.columns import FloatColumn
from fairlead.core.cost import (
    CROWDED,
    KINDS,
    PRIOR,
    READY,
    STEP_TOKENS,
    Ready,
    StepModel,
    Terms,
    memory_wait,
    per_rank,
    renew,
)
from fairlead.core.learned import ForecastsLearned, OwnLearned
from fairlead.core.ledger import Lease
from fairlead.core.rates import Band, Rates
from fairlead.core.records import Forecast
from fairlead.core.table import EndpointTable

#: Bounds of `kappa`, and the weight of the newest ratio.
KAPPA = (0.5, 4.0)
KAPPA_SHARE = 0.03
#: The same for `tpot_kappa`, the correction of the time per output token.
TPOT_KAPPA = (0.1, 10.0)
TPOT_SHARE = 0.1
#: With each forecast, the logarithm of `kappa` loses this share, so that errors which all endpoints have in common move
#: the bands' middle instead.
KAPPA_LEAK = 0.01
#: Milliseconds that a request holds its memory after the first token: initial value, and weight of the newest value.
HOLD_MS = 10_000.0
HOLD_SHARE = 0.02
#: Initial number of steps from an answer's first token to its last.
ANSWER_STEPS = 250.0
#: First tokens closer together than this (seconds) came from one step.
SAME_STEP = 0.001
#: Even with more queued, a stretch ends after `LONG_STRETCH` tokens, or `LONG_STEPS` steps and `LONG_S` seconds.
LONG_STRETCH, LONG_STEPS, LONG_S = 5 * STEP_TOKENS, 4.0, 1.0

#: How far off the handover that a policy expects may be: it takes up to so many times as long, or less, where more than
#: this share of the time would be its own. What that explains teaches nothing, and no prompt seems computed in less
#: than two thirds of the time until its first token.
HANDOVER_MOST, HANDOVER_SHARE = 3.0, 1.0 / 3.0


class _Stretch(Struct):
    """Prefill without a pause at one endpoint (see `core.rates`). Times are clock seconds."""

    start: float
    #: When the last first token came, in this stretch or just before it (0 = none), and seconds of a step then.
    end: float = 0.0
    step_s: float = 0.0
    #: Sums over its prompts: tokens computed, tokens cached, milliseconds of work at the prior's speed.
    tokens: float = 0.0
    cached: float = 0.0
    work_ms: float = 0.0
    steps: float = 0.0
    #: How many prompts had arrived in the middle of a step.
    lags: float = 0.0
    #: Uncached tokens of the prompts whose first tokens came last, in one step.
    newest: float = 0.0
    #: It may have begun so many milliseconds later, as far as is known.
    unsure_ms: float = 0.0
    #: Nothing is learned from it, because the endpoint waited for memory or an adapter.
    spoiled: bool = False


def _steps(tokens: float) -> float:
    return float(-(-tokens // STEP_TOKENS))


class Predictor:
    """The learned parameters. Columns have one entry per slot of the table."""

    def __init__(self, table: EndpointTable, prior: StepModel = PRIOR) -> None:
        self._table = table
        self.rates = Rates(prior, table.stale)
        self.whole_step_ms = prior.whole_step_ms
        self.kappa, self.tpot_kappa = self.rates.kappa, self.rates.tpot_kappa
        self.hold_ms = HOLD_MS
        self.answer_steps = ANSWER_STEPS
        self._answers = 0
        #: The precomputed values: see `READY` and `Learned` in `core.cost`.
        self.rows: list[FloatColumn] = []
        self.by_slot: FloatColumn = np.zeros((0, READY))
        self.slots: list[Ready] = []
        self._all = Band()
        self.bands = [self._all] * (2 * KINDS + 4)
        self._stretches: list[_Stretch | None] = []
        self._computed_ms: list[float] = []
        #: By slot: clock seconds from which the next blind lease gets a mark, so that something is learned from it.
        self.marks_at: list[float] = []

    def reset(self, slot: int, look: Hashable = None) -> None:
        """Begin with a new endpoint or restarted engine at `slot`. `look`: its class (`Fleet._looks_like`)."""
        self.rates.reset(slot, look)
        while slot >= len(self._stretches):
            self._stretches.append(None)
            self._computed_ms.append(0.0)
            self.marks_at.append(0.0)
            ready = np.hstack((self.by_slot.T, np.zeros((READY, 1))))
            self.rows, self.by_slot = list(ready), ready.T
            self.slots.append(Ready(*[0.0] * len(Ready.__struct_fields__)))
        self.kappa, self.tpot_kappa = self.rates.kappa, self.rates.tpot_kappa
        self._stretches[slot] = None
        self.kappa[slot] = self.tpot_kappa[slot] = 1.0

    # ---- forecasts ----

    def memory_wait(self, terms: Terms) -> FloatColumn:
        """Return the expected milliseconds until endpoints have memory for the request."""
        wait: FloatColumn = terms.kappa * memory_wait(terms.used, self._table.kv, self.hold_ms)
        return wait

    def ttft_quantile(self, terms: Terms, prompt: float, p: float) -> FloatColumn:
        """Return by slot the TTFT in ms that is kept with probability `p` (0.05..0.95), with the wait for memory."""
        table = self._table
        pending = np.floor(per_rank(table.pending, table))
        busy = np.minimum(pending, 2.0) + np.minimum(table.queued_tokens + table.active, 1.0)
        busy = np.where((terms.used > 1.0) | (terms.slots > 0.0), KINDS - 1.0, np.minimum(busy, KINDS - 2.0))
        kinds = (busy + KINDS * (terms.uncached < prompt)).astype(np.intp)
        factors = np.array([exp(band.quantile(p)) for band in self.bands])
        quantile: FloatColumn = (terms.ttft + self.memory_wait(terms)) * factors[kinds]
        return quantile

    def behind(self, slot: int, forecast: Forecast, wait_ms: float) -> Forecast:
        """Return the forecast of a request that first waits `wait_ms` for its adapter."""
        kind = forecast.kind
        if wait_ms >= self.hold_ms:
            kind = 2 * KINDS - 1 if kind >= KINDS else KINDS - 1
        return self._of_kind(slot, forecast, forecast.model_ttft_ms + wait_ms, kind)

    def late(self, slot: int, forecast: Forecast) -> Forecast:
        """Return the forecast of a request that waited in Fairlead's queue. Its kind has a band of its own, because the
        model lacks effects that come with queues: prompts are evicted from caches, and several requests go to one
        endpoint at the same moment."""
        cached, scarce = forecast.kind >= KINDS, forecast.kind % KINDS == KINDS - 1
        return self._of_kind(slot, forecast, forecast.model_ttft_ms, 2 * KINDS + cached + 2 * scarce)

    def _of_kind(self, slot: int, forecast: Forecast, ttft: float, kind: int) -> Forecast:
        expected = ttft * float(self.kappa[slot])
        middle, low, high, known_high = (expected * factor for factor in self.bands[kind].factors)
        return Forecast(middle, low, high, forecast.tpot_ms, ttft, forecast.model_tpot_ms, kind, known_high)

    # ---- learning ----

    def first_token(self, lease: Lease, now: float) -> None:
        """Learn from the first token of a request. Call it before the ledger releases the prefill part."""
        slot, took_ms, cold = lease.slot, (now - lease.charged_at) * 1e3, lease.cold is not None
        self.judge(slot, lease.forecast, took_ms)
        if self._table.per_rank is None or self._table.ranks[slot] <= 1.0:
            self._computed_ms[slot] += lease.work_us * 1e-3
            self._stretch(lease, now, cold)
        else:
            self._stretches[slot] = None
            self._computed_ms[slot] += lease.work_us * 1e-3 * float(self._table.per_rank[slot])
            if not cold and self._table.kv[slot] <= CROWDED:
                self.logged(lease, took_ms, self.mark(slot)[1], now, lease.hit_tokens)

    def handed_over(self, part: Lease, now: float, cold: bool) -> None:
        """Learn from a prompt that was computed for another endpoint (`part`), as in `first_token`. `now`: clock
        seconds of the first token there. `cold`: one of the two waited for its adapter. The ledger may have released
        the prompt before, so what was queued is judged by when prompts were sent. Its forecast is not judged, because
        the handover is only believed: it can have taken more or less (`HANDOVER_MOST`)."""
        slot, sent, handover_ms = part.slot, part.charged_at, part.handover_ms
        total_ms = (now - sent) * 1e3
        least_ms = min(handover_ms, HANDOVER_SHARE * total_ms)
        took_ms, unsure_ms = total_ms - least_ms, HANDOVER_MOST * handover_ms - least_ms
        done = sent + took_ms * 1e-3
        if self._table.per_rank is not None and self._table.ranks[slot] > 1.0:
            self.logged(part, took_ms, self.mark(slot)[1], now, part.hit_tokens, unsure_ms)
            return
        stretch = self._stretches[slot]
        if stretch is None or sent > stretch.end:
            self._stretches[slot] = _Stretch(sent, unsure_ms=unsure_ms)
        self._stretch(part, done, cold)
        if self._stretches[slot] is None:
            self._stretches[slot] = _Stretch(done, done)

    def judge(self, slot: int, forecast: Forecast, took_ms: float) -> None:
        """Judge a forecast by the milliseconds that its first token took."""
        if not (0.0 < took_ms < 1e8 and forecast.model_ttft_ms > 0.0):
            return
        band = self.bands[forecast.kind]
        kappa = float(self.kappa[slot])
        if band is self._all:
            band = self.bands[forecast.kind] = Band(band)
        off = log(min(max(took_ms / forecast.model_ttft_ms, 1e-2), 1e2) / kappa)
        bounded = min(max(off - band.middle, -0.3), 0.3)
        known_high_ms = forecast.known_high_ms
        below, above = took_ms * known_high_ms < forecast.low_ms * forecast.high_ms, took_ms > known_high_ms
        band.add(off, below, above)
        self._all.add(off, below, above)
        low, high = KAPPA
        self._table.stale.add(slot)
        self.kappa[slot] = min(max(kappa * exp(KAPPA_SHARE * bounded - KAPPA_LEAK * log(kappa)), low), high)

    def _stretch(self, lease: Lease, now: float, cold: bool) -> None:
        """Add a first token to the slot's open stretch. Learn from the stretch if it ends or is long enough. `cold`:
        it waited for an adapter, too."""
        table, slot, uncached = self._table, lease.slot, lease.uncached_tokens
        stretch = self._stretches[slot]
        running, usage, slots = float(table.active[slot]), float(table.kv[slot]), float(table.max_seqs[slot])
        if stretch is None:
            stretch = self._stretches[slot] = _Stretch(float(table.prefill_since_ms[slot]) * 1e-3)
        if now - stretch.end < SAME_STEP:
            stretch.steps -= _steps(stretch.newest)
            stretch.newest += uncached
        else:
            begun = stretch.end
            if begun:
                lag = float(lease.charged_at > begun - stretch.step_s)
            else:
                begun, lag = stretch.start, min(running, 1.0)
                stretch.steps = 0.5 * lag
            stretch.lags += lag
            stretch.step_s = (now - begun) / (1.0 + lag)
            stretch.newest = uncached
        stretch.steps += _steps(stretch.newest)
        stretch.end = now
        stretch.tokens += uncached
        stretch.cached += lease.hit_tokens
        stretch.work_ms += lease.work_us * 1e-3
        stretch.spoiled |= cold or usage > CROWDED
        more = float(table.queued_tokens[slot]) - uncached
        if 0.0 < slots <= running + 1.0:  # the other requests wait for a sequence slot
            more = 0.0
        long = stretch.steps >= LONG_STEPS and now - stretch.start >= LONG_S
        if more <= 0.0 or long or stretch.tokens >= LONG_STRETCH:
            if not stretch.spoiled:
                # A step reads a shared beginning once per sequence. So the ledger's sum is used, not the memory in use.
                load_ms = self.rates.prior.load_ms(running, float(table.kv_tokens[slot]))
                took = (now - stretch.start) * 1e3
                sums = stretch.work_ms, stretch.steps
                self.rates.observe(slot, *sums, load_ms, took, now, stretch.lags, stretch.cached, stretch.unsure_ms)
            self._stretches[slot] = _Stretch(now, now, stretch.step_s) if more > 0.0 else None

    def logged(
        self, lease: Lease, took_ms: float, load_ms: float, now: float, cached: float = 0.0, unsure_ms: float = 0.0
    ) -> None:
        """Learn from a first token that is in no stretch, because it is reported only after the answer, or because
        several engines share the address. If no request was queued before it, it is a stretch of its own; else it is
        ignored. `load_ms`: milliseconds that decoding added to a step when the request was charged. `unsure_ms`: as in
        `Rates.observe`."""
        kind, work_ms = lease.forecast.kind, lease.work_us * 1e-3
        if kind < 2 * KINDS and kind % KINDS < 2:
            lags = float(kind % KINDS)
            steps = _steps(lease.uncached_tokens) + 0.5 * lags
            self.rates.observe(lease.slot, work_ms, steps, load_ms, took_ms, now, lags, cached, unsure_ms)

    def complete(
        self,
        lease: Lease,
        uncached: float,
        took_ms: float,
        completion_tokens: int,
        mark: tuple[float, float],
        blind_ms: float,
        now: float,
    ) -> None:
        """Learn from a whole answer whose first token was not seen. `uncached`: prompt tokens that its endpoint had to
        compute. `took_ms`: from its charge to its end. `mark`: the mark at its charge. `blind_ms`: as for `blind_mark`,
        now."""
        slot = lease.slot
        (before_ms, load_then), (computed_ms, load_ms) = mark, self.blind_mark(slot, blind_ms, now)
        computed_ms += lease.work_us * 1e-3 * (1.0 - self._share(slot))
        steps, load_ms = _steps(uncached) + completion_tokens - 1.0, 0.5 * (load_then + load_ms)
        self.rates.observe(slot, max(computed_ms - before_ms, 0.0), steps, load_ms, took_ms, now)

    def blind_mark(self, slot: int, blind_ms: float, now: float) -> tuple[float, float]:
        """Return the mark of a blind lease. `blind_ms`: work of all blind leases ever charged there, including those
        still queued (`Ledger.blind_ms`)."""
        computed_ms, load_ms = self.mark(slot)
        if slot in self._table.stale:
            renew((slot,), self._table, self)
        ready = self.slots[slot]
        return computed_ms + blind_ms * self._share(slot) - ready.wait_ms(now) / ready.factor, load_ms

    def mark(self, slot: int) -> tuple[float, float]:
        """Return the prompt work that an engine of the endpoint has computed so far, and what decoding adds to one of
        its steps now. Both in milliseconds at the prior's speed."""
        table = self._table
        load_ms = self.rates.prior.load_ms(float(table.active[slot]), float(table.kv_tokens[slot]))
        return self._computed_ms[slot], load_ms * self._share(slot)

    def _share(self, slot: int) -> float:
        """Return the share of an endpoint's load that one of its engines has."""
        per_rank = self._table.per_rank
        return 1.0 if per_rank is None else float(per_rank[slot])

    def ended(self, lease: Lease, held_ms: float, completion_tokens: int, now: float) -> None:
        """Learn from an answer that ended `held_ms` after its first token. `completion_tokens`: -1 = unknown."""
        if not 0.0 < held_ms < 1e8:
            return
        self._answers += 1
        share = max(HOLD_SHARE, 1.0 / (10.0 + self._answers))
        self.hold_ms += share * (held_ms - self.hold_ms)
        slot, model = lease.slot, lease.forecast.model_tpot_ms
        kappa = float(self.tpot_kappa[slot])
        if model <= 0.0:
            return
        steps = min(max(held_ms / (kappa * model), 1.0), 1e6)
        self.answer_steps += share * (steps - self.answer_steps)
        if completion_tokens > 1:
            (before_ms, load_then), (computed_ms, load_ms) = lease.mark or (0.0, 0.0), self.mark(slot)
            steps = completion_tokens - 1.0
            # The part of the work that was done until the end. The end itself is reported late.
            work_ms = (computed_ms - before_ms) * held_ms / max((now - lease.first_token_at) * 1e3, held_ms)
            self.rates.observe(slot, work_ms, steps, 0.5 * (load_then + load_ms), held_ms, now)
            ratio = held_ms / (completion_tokens - 1) / (kappa * model)
            low, high = TPOT_KAPPA
            self.tpot_kappa[slot] = min(max(kappa * min(max(ratio, 0.25), 4.0) ** TPOT_SHARE, low), high)

    # ---- saved and restored ----

    def learned(self) -> ForecastsLearned:
        bands = tuple(() if band is self._all else band.values for band in self.bands)
        return ForecastsLearned(
            self.hold_ms, self.answer_steps, self._answers, self._all.values, bands, self.rates.learned()
        )

    def restore(self, learned: ForecastsLearned, instead: bool = False) -> None:
        """Restore what was learned of the whole pool: before anything else is learned, or `instead` of that."""
        self.hold_ms, self.answer_steps = min(learned.hold_ms, 1e8), min(max(learned.answer_steps, 1.0), 1e6)
        self._answers = learned.answers
        self._all = Band(values=learned.all_kinds)
        bands = [Band(values=values) if values else self._all for values in learned.bands]
        self.bands = (bands + [self._all] * len(self.bands))[: len(self.bands)]
        self.rates.restore(learned.speeds, instead)
        self._table.rewritten()

    def own(self, slot: int, now: float) -> OwnLearned:
        return OwnLearned(*self.rates.own(slot, now), float(self.kappa[slot]), float(self.tpot_kappa[slot]))

    def restore_own(self, slot: int, own: OwnLearned, age_s: float, now: float) -> None:
        """Restore what was learned of an endpoint whose engine is still the same. `age_s`: seconds since the saving."""
        self.rates.restore_own(slot, own, own.idle_s + age_s, now)
        self.kappa[slot] = min(max(own.kappa, KAPPA[0]), KAPPA[1])
        self.tpot_kappa[slot] = min(max(own.tpot_kappa, TPOT_KAPPA[0]), TPOT_KAPPA[1])
        self._table.stale.add(slot)

    def validate(self) -> None:
        self.rates.validate()
        for slot in set(range(len(self._stretches))) - self._table.stale:
            before = self.slots[slot], self.by_slot[slot].tolist()
            renew((slot,), self._table, self)
            assert before == (self.slots[slot], self.by_slot[slot].tolist()), (
                f"slot {slot} changed, and nobody was told"
            )
        low, high = KAPPA
        assert ((self.kappa >= low) & (self.kappa <= high)).all()
        assert np.isfinite(self.tpot_kappa).all() and 0.0 <= self.hold_ms < 1e9 and 1.0 <= self.answer_steps <= 1e6
        for band in self.bands:
            band.validate()
