"""How fast each endpoint computes, learned from the times at which first tokens come.

Theory
* A step of an engine takes `c0 + c_pf·new + c_attn·pairs + c_seq·B + c_kv·KV` milliseconds: B decoding sequences
  with KV tokens, `new` prompt tokens whose attention touches `pairs` token pairs. From one accelerator to the next
  the five coefficients keep their proportions well enough, so two factors per endpoint are learned: one for prefill
  (c_pf, c_attn), one for the rest of a step.
* What is observed is a stretch of prefill: from the moment an endpoint had something to compute to the first token
  after which it has nothing more, or, when there is always more, over enough tokens that it matters little where the
  border fell inside a step. Not single TTFTs: a small prompt shares its step with the beginning of a long one behind
  it, and would teach that small prompts are slow.
* Both factors come from least squares over the endpoint's last few dozen stretches, relative to what was expected
  (`observed / expected = a·prefill share + b·step share`). Two weak priors decide what the stretches do not: `a` is
  near the pool's mean, so an endpoint that has answered nothing is taken for an average one, and `b/a` is near the
  pool's, so where steps are a small part of every stretch a slow accelerator is slow in both.

Rules
* One stretch counts at most as `OUTLIER` times what was expected, and at least as the inverse; the farther off, the
  less it weighs. A stall, or a beginning that was not cached after all, then moves a factor little, while hardware
  that is ten times slower is known after a few requests.
* Who is not asked teaches nothing, and who is believed to be slow is not asked. So an endpoint that has taught
  nothing has the pool's mean of now, not of when it came, and the little that another taught long ago is weighed
  against it anew, one endpoint after the other, and counts for less each time. Without that, of eight servers six
  times faster than the prior, the first two that were tried got all requests.
* Factors stay within `SLOWEST` of the prior. Everything is finite whatever clocks and clients do.
"""

from math import log

import numpy as np
from msgspec import Struct, field

from fairlead.core.columns import BoolColumn, FloatColumn
from fairlead.core.cost import PRIOR, StepModel

# How far off forecasts are: quantiles of log(observed / forecast), tracked without keeping the observations.
#
# Theory (Robbins and Monro 1951). A tracked quantile goes up by p steps when an observation is above it, and down by
# 1 - p when one is below. It rests where a share p lies below, whatever the distribution, and follows one that drifts.

#: The band is that of the middle 90 %.
LOW, HIGH = 0.05, 0.95
#: In log ratio.
STEP = 0.06
#: Quantiles stay within ± this.
LIMIT = 5.0


class Quantile(Struct):
    """One quantile of a stream."""

    p: float
    value: float

    def add(self, x: float) -> None:
        self.value = min(max(self.value + STEP * (self.p - (x < self.value)), -LIMIT), LIMIT)


class Band(Struct):
    """The middle 90 % of a stream of log ratios, and its median. Before any: half to twice what was forecast."""

    low: Quantile = field(default_factory=lambda: Quantile(LOW, log(0.5)))
    middle: Quantile = field(default_factory=lambda: Quantile(0.5, 0.0))
    high: Quantile = field(default_factory=lambda: Quantile(HIGH, log(2.0)))

    def at(self, p: float) -> float:
        """The quantile `p`, between those that are tracked."""
        middle = self.middle.value
        neighbour = self.low if p < self.middle.p else self.high
        return middle + (neighbour.value - middle) * (p - self.middle.p) / (neighbour.p - self.middle.p)

    def add(self, x: float) -> None:
        self.low.add(x)
        self.middle.add(x)
        self.high.add(x)

    def validate(self) -> None:
        assert all(-LIMIT <= quantile.value <= LIMIT for quantile in (self.low, self.middle, self.high))


OUTLIER = 3.0
#: Factors are kept in 1/SLOWEST … SLOWEST.
SLOWEST = 100.0
#: Share that older stretches lose with each new one: 30 count.
FORGET = 1 / 30
#: So many stretches weigh as much as the prior of the prefill factor, and of the ratio of the two.
PRIOR_WEIGHT = 0.5
RATIO_WEIGHT = 3.0
#: A stretch that took e^0.3 of what was expected, or e^-0.3, has full weight; beyond, less and less.
INLIER = 0.3
#: Weight of an endpoint's newest factors in the pool's mean, once there were enough of them for a mean.
POOL_SHARE = 0.02
#: What weighs less is little, and loses this share each time that it is weighed again.
LITTLE = 2.0
STALE = 0.01


class _Fit:
    """Normal equations of `observed = a·x + b·y`, all relative to what was expected."""

    __slots__ = ("oxx", "oxy", "xx", "xy", "yy")

    def __init__(self) -> None:
        self.xx = self.xy = self.yy = self.oxx = self.oxy = 0.0

    def add(self, x: float, y: float, observed: float, weight: float) -> None:
        keep = 1.0 - FORGET
        self.xx = keep * self.xx + weight * x * x
        self.xy = keep * self.xy + weight * x * y
        self.yy = keep * self.yy + weight * y * y
        self.oxx = keep * self.oxx + weight * observed * x
        self.oxy = keep * self.oxy + weight * observed * y

    def fade(self, keep: float) -> None:
        self.xx *= keep
        self.xy *= keep
        self.yy *= keep
        self.oxx *= keep
        self.oxy *= keep

    def solve(self, a: float, b: float) -> tuple[float, float]:
        """The pair that fits best, its first drawn to `a`, its ratio to `b / a`. The priors keep it solvable."""
        near, ratio, tied = PRIOR_WEIGHT / (a * a), b / a, RATIO_WEIGHT / (b * b)
        xx, xy, yy = self.xx + near + tied * ratio * ratio, self.xy - tied * ratio, self.yy + tied
        p, q = self.oxx + near * a, self.oxy
        det = xx * yy - xy * xy
        return (p * yy - q * xy) / det, (q * xx - p * xy) / det


class Rates:
    """Columns of factors, one entry per slot: `prefill` and `step` multiply the coefficients of `PRIOR`."""

    def __init__(self, prior: StepModel = PRIOR, stale: set[int] | None = None) -> None:
        """`stale`: is told the slots whose factors changed."""
        self.prior = prior
        self._stale = set() if stale is None else stale
        self.prefill: FloatColumn = np.ones(0)
        self.step: FloatColumn = np.ones(0)
        self._fits: list[_Fit] = []
        #: Slots that have taught nothing.
        self._untried: BoolColumn = np.ones(0, dtype=np.bool_)
        self._pool = (1.0, 1.0)
        self._stretches = 0
        self._turn = 0

    def reset(self, slot: int) -> None:
        """A new endpoint stands at `slot` and is taken for an average one."""
        while slot >= len(self._fits):
            self._fits.append(_Fit())
            self.prefill = np.append(self.prefill, self._pool[0])
            self.step = np.append(self.step, self._pool[1])
            self._untried = np.append(self._untried, True)
        self._fits[slot] = _Fit()
        self._untried[slot] = True
        self._stale.add(slot)
        self.prefill[slot], self.step[slot] = self._pool

    def step_ms(self, slot: int, sequences: float, kv_tokens: float) -> float:
        """Milliseconds of a step that only decodes."""
        return float(self.step[slot]) * float(self.prior.step_ms(sequences, kv_tokens))

    def observe(self, slot: int, work_ms: float, steps: float, decode_ms: float, took_ms: float) -> None:
        """A stretch took `took_ms`. It was prefill of `work_ms` at the prior's speed, in `steps` steps that, without it
        and at the endpoint's present factor, take `decode_ms` each."""
        prefill = float(self.prefill[slot]) * work_ms
        decode_total = steps * decode_ms
        expected = prefill + decode_total
        if not (0.0 < expected < 1e9 and 0.0 < took_ms < 1e9):
            return
        observed = min(max(took_ms / expected, 1.0 / OUTLIER), OUTLIER)
        a, b = float(self.prefill[slot]), float(self.step[slot])
        fit = self._fits[slot]
        weight = min(1.0, INLIER / max(abs(log(observed)), 1e-9))
        fit.add(prefill / expected / a, decode_total / expected / b, observed, weight)
        mean = self._pool
        a, b = self._solved(slot)
        self._stretches += 1
        share = max(POOL_SHARE, 3.0 / (2 + self._stretches))  # the first ones still move, and count for less
        self._pool = (mean[0] + share * (a - mean[0]), mean[1] + share * (b - mean[1]))
        self._untried[slot] = False
        if np.count_nonzero(self._untried):
            self.prefill[self._untried], self.step[self._untried] = self._pool
            self._stale.update(self._untried.nonzero()[0].tolist())
        self._weigh_again(slot)

    def _weigh_again(self, taught: int) -> None:
        """The next endpoint in turn, unless it is the one that has just taught."""
        self._turn = turn = (self._turn + 1) % len(self._fits)
        fit = self._fits[turn]
        if turn != taught and not self._untried[turn] and fit.xx + fit.yy < LITTLE:
            fit.fade(1.0 - STALE)
            self._solved(turn)

    def _solved(self, slot: int) -> tuple[float, float]:
        a, b = (min(max(value, 1.0 / SLOWEST), SLOWEST) for value in self._fits[slot].solve(*self._pool))
        self.prefill[slot], self.step[slot] = a, b
        self._stale.add(slot)
        return a, b

    def validate(self) -> None:
        for column in (self.prefill, self.step):
            assert np.isfinite(column).all()
            assert ((column >= 1.0 / SLOWEST) & (column <= SLOWEST)).all()
