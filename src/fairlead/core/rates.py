"""How fast each endpoint computes, learned from the times of first tokens and answers; how far off forecasts are.

Theory
* A step of an engine takes `c0 + c_pf·new + c_attn·pairs + c_seq·B + c_kv·KV` milliseconds: B decoding sequences
  with KV tokens, `new` prompt tokens whose attention touches `pairs` token pairs. Three learned factors multiply the
  coefficients of the prior: one for prefill (c_pf, c_attn), one for the constant cost of a step (c0), one for its
  decoding load (c_seq, c_kv). So a stretch that took long while many answers ran shows that answers cost time there,
  not that the endpoint is slow.
* An observation is a *stretch* of prefill. It begins when an endpoint has something to compute and ends with the first
  token after which nothing is left. If something is always left, it ends after enough tokens that it hardly matters
  where in a step it was cut. Single TTFTs are not used: a small prompt shares its step with the beginning of a long
  one behind it, so small prompts would look slow. Whole answers of known length are observations too: their steps,
  and the prompts that were computed meanwhile.
* A prompt that comes in the middle of a step waits for the end of that step and, with asynchronous scheduling, for one
  more that was planned before. This *lag* is learned beside the factors, in steps at the prior's speed. Without it the
  factors would have to absorb it: where nearly all of each prompt is cached, the lag is several times the prompt's own
  work, and prefill would look that slow. Where stretches cannot separate the two, the prior weights attribute the time
  to lag rather than to slowness.
* Tokens believed to be cached may not be. The share `MISSED` of them counts as noise, so stretches that compute almost
  nothing have little weight. And a stretch reduces the weight of older ones only in proportion to its own weight.
* Endpoints that look alike (`Fleet._looks_like`) form a class. The factors belong to the class: least squares over all
  its stretches, relative to the expected time, pulled weakly to the pool's mean. A class without a stretch uses that
  mean: if the prior is far off, it is so for the whole pool, and a class that kept the prior would get far too few or
  too many requests.
* Each endpoint has one number of its own: its time relative to its class. Most endpoints are like their class; a few
  differ strongly. As a prior, the logarithm of that number is about 0 (within LIKE_SD) with probability
  1 - UNLIKE, else anything (within UNLIKE_SD). Its posterior mean ("spike and slab", Mitchell and Beauchamp 1988) is
  about 0 for differences that chance explains, and follows larger ones. With the usual noise it follows a difference of
  30 % after a dozen stretches, and a factor of six after the first few.

Rules
* An endpoint that is believed to be slow gets fewer requests, so a wrong belief would never be corrected. Therefore
  evidence loses half its weight every `HALF_LIFE` seconds in which it is not renewed. A small difference is forgotten
  within a minute or two. A large one that was seen often lasts some minutes; then one or two requests test the endpoint
  again. That is the cost of exploring.
* One stretch counts as at most `OUTLIER` times the expected time, and at least as the inverse; the farther off, the
  lower its weight. So a stall, or a beginning that was not cached after all, moves a factor little, while hardware
  that is ten times slower is recognised after a few requests.
* Factors stay within 1/`SLOWEST` … `SLOWEST` times the prior. All values stay finite, whatever clocks and clients do.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Hashable, Sequence
from math import exp, inf, log, sqrt
from typing import cast

import numpy as np
from msgspec import Struct

from fairlead.core.columns import FloatColumn
from fairlead.core.cost import PRIOR, StepModel
from fairlead.core.learned import ClassLearned, Look, OwnLearned, SpeedsLearned

# Error bands: how far off forecasts are. Quantiles of log(observed / forecast) over the last `WINDOW` forecasts. No
# distribution is assumed, so 90 % of the values really are in the band. Each own value replaces an initial one:
# forecasts for an unknown engine are off by ten times, and must not widen the bands of the next sixty requests.
#
# Past quantiles only hold if the future is like the past: in a growing queue, each first token comes later than those
# before. So the distance of each end from the middle is multiplied by e^(0.95·WIDEN) for a first token beyond that end,
# and by e^(-0.05·WIDEN) for any other. Then over any N first tokens the share beyond an end is 5 % plus or minus
# log(WIDEST / NARROWEST) / (WIDEN·N), unless a bound is reached (adaptive conformal inference, Gibbs and Candès 2021).

#: A band contains the middle 90 %.
LOW, HIGH = 0.05, 0.95
#: Number of values that are kept, and number of initial values: the fewest whose lowest one is their 5 % quantile.
WINDOW, FIRST = 64, 19
#: Log ratios stay within ± this.
LIMIT = 5.0
#: How fast an end of a band learns; the bounds of the factor on its distance from the middle; and the least distance,
#: which is added to the quantile's (a logarithm), because more precision is of no use.
WIDEN, NARROWEST, WIDEST, FINEST = 0.1, 0.5, 8.0, 0.02
#: Initial values of a band: evenly spread logarithms, whose 5 % and 95 % quantiles are half and twice the forecast.
_BEFORE = tuple(log(2.0) / (HIGH - 0.5) * ((i + 0.5) / FIRST - 0.5) for i in range(FIRST))
#: Forecasts for an unknown engine are off by ten times and more. So a new band gets a margin of this logarithm at each
#: end, which shrinks with each own value. It only affects the displayed band: it does not move the middle, from which
#: `kappa` learns, and hedges and stall detection use `Forecast.known_high_ms`, which is without it.
UNKNOWN = log(8.0)


class Band:
    """The middle 90 % of a stream of log ratios, and its median. It begins with values of its parent, or `_BEFORE`."""

    __slots__ = ("_above", "_below", "_borrowed", "_parent", "_ranked", "_recent", "factors", "high", "low", "middle")

    def __init__(self, parent: "Band | None" = None, values: Sequence[float] = ()) -> None:
        """`values`: restores another band from its property `values`."""
        #: How many of the kept values are initial ones.
        self._borrowed = 0 if values else FIRST
        self._parent = parent
        if values:
            values = [min(max(x, -LIMIT), LIMIT) for x in values[-WINDOW:]]
        else:
            values = _BEFORE if parent is None else [parent.quantile((i + 0.5) / FIRST) for i in range(FIRST)]
        self._recent, self._ranked = deque(values), sorted(values)
        self._below = self._above = 1.0
        self._measure()

    @property
    def values(self) -> tuple[float, ...]:
        return tuple(self._recent)

    @property
    def unknown(self) -> float:
        """The margin at each end, see `UNKNOWN`."""
        return (UNKNOWN if self._parent is None else self._parent.unknown) * self._borrowed / FIRST

    def quantile(self, p: float) -> float:
        """Return the log ratio below which the share `p` (0.05..0.95) of future observations is expected, without the
        margin for unknown engines."""
        off = self._quantile(p) - self.middle + FINEST * (p - 0.5) / (HIGH - 0.5)
        return min(max(self.middle + off * (self._below if p < 0.5 else self._above), -LIMIT), LIMIT)

    def _quantile(self, p: float) -> float:
        ranked = self._ranked
        place = min(max(p * (len(ranked) + 1) - 1.0, 0.0), len(ranked) - 1.0)
        below = int(place)
        above = min(below + 1, len(ranked) - 1)
        return ranked[below] + (place - below) * (ranked[above] - ranked[below])

    def add(self, x: float, below: bool = False, above: bool = False) -> None:
        """Add a log ratio. `below`, `above`: it was beyond that end of the band (without the margin) that held when the
        forecast was made."""
        x = min(max(x, -LIMIT), LIMIT)
        self._recent.append(x)
        insort(self._ranked, x)
        if self._borrowed or len(self._recent) > WINDOW:
            self._borrowed = max(self._borrowed - 1, 0)
            del self._ranked[bisect_left(self._ranked, self._recent.popleft())]
        self._below = min(max(self._below * exp(WIDEN * (below - LOW)), NARROWEST), WIDEST)
        self._above = min(max(self._above * exp(WIDEN * (above - LOW)), NARROWEST), WIDEST)
        self._measure()

    def _measure(self) -> None:
        self.middle = self._quantile(0.5)
        unknown = self.unknown
        high = self.quantile(HIGH)
        self.low, self.high = self.quantile(LOW) - unknown, high + unknown
        #: Factors on a forecast: for the middle, the lower end, the upper end, the upper end without the margin.
        self.factors = exp(self.middle), exp(self.low), exp(self.high), exp(high)

    def validate(self) -> None:
        assert self._ranked == sorted(self._recent) and len(self._ranked) <= WINDOW
        assert -LIMIT - UNKNOWN <= self.low <= self.middle <= self.high <= LIMIT + UNKNOWN


#: Observed / expected of one stretch is limited to 1/OUTLIER … OUTLIER.
OUTLIER = 3.0
#: Factors stay within 1/SLOWEST … SLOWEST.
SLOWEST = 1000.0
#: Share of its weight that older evidence loses with each new stretch: of an endpoint, and of a class.
FORGET, CLASS_FORGET = 1 / 12, 1 / 100
#: Additional loss if a class has changed: its maximum; the weight of the newest stretch in the mean deviation (of about
#: the last ten). Chance explains that mean while its square, in units of the noise, is at most `STEADY`.
CHANGED_FORGET, DRIFT_SHARE, STEADY = 0.15, 0.1, 0.25
#: Weight of the pool's mean, as a number of stretches: for the prefill factor, for the ratio of c0's factor to it, of
#: the load's factor to c0's, and of the lag to c0's factor. The last two are weak: the load is a small part of most
#: steps, so stretches say little about its factor; and the lag is no step or one, depending on the engine.
PRIOR_WEIGHTS = (1.0, 3.0, 10.0 / 64.0, 1.0 / 16.0)
#: Standard deviation of the share of tokens believed to be cached that must be computed after all.
MISSED = 0.05
#: A stretch has full weight up to this deviation, |log(observed / expected)|; beyond, the weight falls.
INLIER = 0.3
#: Weight of a class's newest factors in the pool's mean; higher for the first ones.
POOL_SHARE = 0.02
#: Seconds after which evidence about an endpoint that is not renewed has half its weight.
HALF_LIFE = 30.0
#: Share of endpoints that differ from their class, and standard deviations of the logarithm of their time relative to
#: the class: of endpoints that are like their class, and of those that differ.
UNLIKE, LIKE_SD, UNLIKE_SD = 0.1, 0.02, 1.0
#: Variance of log(observed / expected) of one stretch: initial value, minimum, and weight of the newest value.
NOISE, LEAST_NOISE, NOISE_SHARE = 0.09, 0.01, 0.02
#: A limit of sequences is believed if about `LIMIT_HITS` of the last `LIMIT_SCRAPES` scrapes show it.
LIMIT_SCRAPES, LIMIT_HITS = 20.0, 1.9
#: The time constant of `PrefillShare`, s: several steps.
SHARE_S = 2.0
#: Scrapes in which as many run as the limit and none waits, until one more is let through to see whether it waits.
LIMIT_TRUSTED = 100
_LIKE, _UNLIKE = LIKE_SD * LIKE_SD, UNLIKE_SD * UNLIKE_SD
_LOG_OUTLIER = log(OUTLIER)
#: Bound of an endpoint's own mean, which is a logarithm.
_MOST_OWN = 2.0 * log(SLOWEST)
#: Typical shares of prefill, constant step cost and decoding load in the time of a stretch.
TYPICAL = (0.75, 0.2, 0.05)
#: One observation can reduce a class's factor at most to this share of its former value.
FALL = 0.3
#: Upper bound of classes that are restored from a state file.
MOST_CLASSES = 256
#: Relative change of a class's factors from which the columns of all its members are written again.
CHANGED = 0.005

_Three = tuple[float, float, float]
_Five = tuple[float, float, float, float, float]


class _Limit(Struct):
    """The limit of sequences that engines of a class run at once, found from scrapes with memory to spare.

    The limit is reached if requests wait and, in several scrapes, the highest number ever seen runs (or one less, if
    one has just ended). Requests that wait for the token budget of a step run soon after instead, and the number of
    running requests goes up and down. Where answers end together, a page shows few running until the step that begins
    the next requests is over. So few count only from the second such state on."""

    #: The most sequences ever seen running, and decaying counts of the scrapes with waiting requests in which that
    #: many ran, and in which clearly fewer ran.
    peak: float = 0.0
    at_peak: float = 0.0
    below: float = 0.0
    #: The limit; 0 = unknown.
    known: float = 0.0
    #: Scrapes of the endpoint that tests it, since the limit was last seen to keep requests waiting, in which as many
    #: ran and none waited.
    untested: int = 0

    def sampled(self, waiting: float, running: float, tests: bool, shows: bool, before: tuple[float, float]) -> None:
        """`tests`: the scrape is of the endpoint that tests the limit. `shows`: what waits there can only wait for a
        sequence slot. Any other scrape can refute the limit, but makes none likelier. `before`: the endpoint's last
        (waiting, running)."""
        self.untested = 0 if waiting >= 1.0 else self.untested + (shows and tests and running >= self.known)
        if running > self.peak:
            # More than the known limit run while others wait: then the limit is higher, but there still is one.
            self.known = running if self.known and waiting >= 1.0 and shows else 0.0
            self.peak, self.at_peak, self.below = running, 0.0, 0.0
        if waiting >= 1.0:
            keep = 1.0 - 1.0 / LIMIT_SCRAPES
            below = before != (waiting, running) and max(before[1], running) < self.peak - max(1.0, 0.1 * self.peak)
            self.at_peak = keep * self.at_peak + (shows and running == self.peak)
            self.below = keep * self.below + (shows and below)
            if self.at_peak < self.below:
                self.known = 0.0
            elif self.at_peak >= LIMIT_HITS and self.at_peak >= 3.0 * self.below:
                self.known = self.peak


class PrefillShare(Struct):
    """The share of its time that an engine with waiting requests spends on prompts, by the prior's speed."""

    _sampled_at: float = inf
    _done_us: float = 0.0
    #: Mean over about the last `SHARE_S` seconds; 1 while none waits.
    value: float = 1.0

    def sampled(self, now: float, done_us: float, waiting: bool) -> None:
        """Take a reading. `done_us`: the work per engine of all prompts so far that were computed."""
        seconds, done = now - self._sampled_at, 1e-6 * (done_us - self._done_us)
        self._sampled_at, self._done_us = now, done_us
        if seconds > 0.0:
            share = min(done / seconds, 2.0) if waiting and done >= 0.0 else 1.0
            self.value += min(seconds / SHARE_S, 1.0) * (share - self.value)


class _Class:
    """A class of endpoints that look alike: the normal equations of `observed = prefill·x + step·y + load·z + lag·w`,
    relative to the expected time, and their solution. Plain floats: numpy arrays of three take four times as long."""

    def __init__(self, factors: _Three) -> None:
        self.begin(factors)
        self.noise = NOISE
        #: Over the members' own means: sum of their weights, and weighted sum.
        self.weight = self.sum = 0.0
        self.limit = _Limit()
        self.members: set[int] = set()
        #: Moving average of log(observed / expected), in standard deviations of one stretch.
        self._drift = 0.0
        self._squares: _Three = (0.0, 0.0, 0.0)
        #: Sums of x·y, x·z, y·z; above of x², y², z², below of observed·x, ·y, ·z.
        self._products: _Three = (0.0, 0.0, 0.0)
        self._observed: _Three = (0.0, 0.0, 0.0)
        #: Sums of x·w, y·w, z·w, w·w, observed·w.
        self._lagged: _Five = (0.0, 0.0, 0.0, 0.0, 0.0)

    def begin(self, factors: _Three) -> None:
        """Set the factors that hold until something is observed."""
        #: The current factors, and those from which the members' columns were computed.
        self.factors = self.published = factors
        self.lag = factors[1]
        self.level = _level(factors)

    @property
    def tester(self) -> int:
        """The member at which a limit that is long untested is tested."""
        return next(iter(self.members))

    @property
    def is_untried(self) -> bool:
        return not any(self._squares)

    def add(self, row: _Three, lag: float, observed: float, weight: float, pool: _Three) -> None:
        """Add a stretch and solve for the factors. `row`, `lag`: the multiplier of each factor and of the lag, as
        shares of the expected time. `observed`: observed / expected. `pool`: the pool's mean factors."""
        self._drift += DRIFT_SHARE * (log(observed) / sqrt(self.noise) - self._drift)
        changed = min(max(self._drift * self._drift - STEADY, 0.0), 1.0)
        keep = 1.0 - weight * (CLASS_FORGET + changed * CHANGED_FORGET)
        x, y, z = row
        (xx, yy, zz), (xy, xz, yz), (ox, oy, oz) = self._squares, self._products, self._observed
        xx, yy, zz = keep * xx + weight * x * x, keep * yy + weight * y * y, keep * zz + weight * z * z
        xy, xz, yz = keep * xy + weight * x * y, keep * xz + weight * x * z, keep * yz + weight * y * z
        seen = weight * observed
        ox, oy, oz = keep * ox + seen * x, keep * oy + seen * y, keep * oz + seen * z
        self._squares, self._products, self._observed = (xx, yy, zz), (xy, xz, yz), (ox, oy, oz)
        xw, yw, zw, ww, ow = (keep * sum_ for sum_ in self._lagged)
        if lag:
            w = weight * lag
            xw, yw, zw, ww, ow = xw + w * x, yw + w * y, zw + w * z, ww + w * lag, ow + w * observed
        self._lagged = (xw, yw, zw, ww, ow)
        # The prior adds near·(a/A - 1)² + tied·(b/B - a/A)² + loose·(c/C - b/B)² + free·(lag/B - b/B)² to the sum of
        # squares. A, B and C are the pool's factors.
        near, tied, loose, free = PRIOR_WEIGHTS
        a, b, c = 1.0 / pool[0], 1.0 / pool[1], 1.0 / pool[2]
        xx, ox = xx + (near + tied) * a * a, ox + near * a
        yy, zz = yy + (tied + loose + free) * b * b, zz + loose * c * c
        xy, yz = xy - tied * a * b, yz - loose * b * c
        yw, ww = yw - free * b * b, ww + free * b * b
        # Eliminate the lag from the equations. If its solution is negative, solve again without a lag.
        p, q, r = xw / ww, yw / ww, zw / ww
        matrix = (xx - p * xw, yy - q * yw, zz - r * zw, xy - p * yw, xz - p * zw, yz - q * zw)
        solution = _solved(*matrix, ox - p * ow, oy - q * ow, oz - r * ow)
        self.lag = ow / ww - p * solution[0] - q * solution[1] - r * solution[2]
        if self.lag < 0.0:
            self.lag, solution = 0.0, _solved(xx, yy, zz, xy, xz, yz, ox, oy, oz)
        a, b, c = (
            min(max(new, FALL * old, 1.0 / SLOWEST), SLOWEST) for new, old in zip(solution, self.factors, strict=True)
        )
        self.factors = (a, b, c)
        self.level = _level(self.factors)

    def learned(self, look: Hashable) -> ClassLearned:
        limit = self.limit
        return ClassLearned(
            cast(Look, look),
            self.factors,
            self.noise,
            self._drift,
            (limit.peak, limit.at_peak, limit.below, limit.known),
            self._squares,
            self._products,
            self._observed,
            self._lagged,
        )

    @classmethod
    def restored(cls, learned: ClassLearned) -> "_Class | None":
        """Return a class of a state file; `None` = no observations lead to its equations, which may be unsolvable."""
        (xx, yy, zz), (xy, xz, yz), (xw, yw, zw, ww, _) = learned.squares, learned.products, learned.lagged
        matrix = np.array([[xx, xy, xz, xw], [xy, yy, yz, yw], [xz, yz, zz, zw], [xw, yw, zw, ww]])
        if np.linalg.eigvalsh(matrix)[0] < -1e-9 * matrix.trace():
            return None
        alike = cls(_bounded(learned.factors))
        alike.noise, alike._drift = max(learned.noise, LEAST_NOISE), learned.drift
        alike.limit = _Limit(*learned.limit)
        alike._squares, alike._products, alike._observed = learned.squares, learned.products, learned.observed
        alike._lagged = learned.lagged
        return alike


def _solved(
    xx: float, yy: float, zz: float, xy: float, xz: float, yz: float, ox: float, oy: float, oz: float
) -> _Three:
    """Solve three linear equations by Cramer's rule. The prior makes the matrix positive definite."""
    first, second, third = yy * zz - yz * yz, xz * yz - xy * zz, xy * yz - xz * yy
    det = xx * first + xy * second + xz * third
    return (
        (ox * first + oy * second + oz * third) / det,
        (ox * second + oy * (xx * zz - xz * xz) + oz * (xy * xz - xx * yz)) / det,
        (ox * third + oy * (xy * xz - xx * yz) + oz * (xx * yy - xy * xy)) / det,
    )


def _bounded(factors: _Three) -> _Three:
    a, b, c = (min(max(factor, 1.0 / SLOWEST), SLOWEST) for factor in factors)
    return a, b, c


def _level(factors: _Three) -> float:
    """Return the logarithm of the factor on the time of a typical stretch."""
    return log(sum(factor * share for factor, share in zip(factors, TYPICAL, strict=True)))


class _Own(Struct, eq=False):
    """How much longer an endpoint takes than by the prior: the mean of logarithms, the weight of the evidence, and the
    clock seconds when it was renewed."""

    mean: float = 0.0
    weight: float = 0.0
    renewed: float = 0.0

    def add(self, x: float, now: float, alike: _Class) -> None:
        self.count(alike, -1.0)
        self._age(now)
        self.weight = self.weight * (1.0 - FORGET) + 1.0
        self.mean += (x - self.mean) / self.weight
        self.count(alike, 1.0)

    def count(self, alike: _Class, sign: float) -> None:
        """Add the endpoint to the sums of its class (`sign` = 1), or subtract it (-1)."""
        alike.weight += sign * self.weight
        alike.sum += sign * self.weight * self.mean

    def _age(self, now: float) -> None:
        self.weight *= 0.5 ** (max(now - self.renewed, 0.0) / HALF_LIFE)
        self.renewed = now

    def ratio(self, alike: _Class, now: float) -> float:
        """Return the posterior mean of the endpoint's time relative to its class; 1 = equal."""
        self.count(alike, -1.0)
        self._age(now)
        self.count(alike, 1.0)
        if self.weight < 1e-3:
            return 1.0
        mean, error = self.mean - alike.sum / alike.weight, alike.noise / self.weight
        square = mean * mean
        like, unlike = _LIKE + error, _UNLIKE + error
        gain = exp(min(0.5 * square * (1.0 / like - 1.0 / unlike), 50.0))
        odds = UNLIKE / (1.0 - UNLIKE) * sqrt(like / unlike) * gain
        share = odds / (1.0 + odds)
        return exp(mean * (share * _UNLIKE / unlike + (1.0 - share) * _LIKE / like))


class Rates:
    """Columns of factors, one entry per slot: `prefill` multiplies c_pf and c_attn of `PRIOR`, `step` c0, and `load`
    c_seq and c_kv."""

    kappa: FloatColumn
    tpot_kappa: FloatColumn
    prefill: FloatColumn
    step: FloatColumn
    load: FloatColumn

    def __init__(self, prior: StepModel = PRIOR, stale: set[int] | None = None) -> None:
        """`stale`: slots whose factors changed are added to it."""
        self.prior = prior
        self.columnwise = prior.columnwise()
        self._stale = set() if stale is None else stale
        #: 5 × slots: `kappa` and `tpot_kappa` (`core.predictor` learns them), `prefill`, `step`, `load`.
        self.columns: FloatColumn = np.ones((5, 0))
        self._name_rows()
        self._ratios: FloatColumn = np.ones(0)
        self._classes: dict[Hashable, _Class] = {}
        self._looks: list[Hashable] = []
        self._own: list[_Own] = []
        self._pool: _Three = (1.0, 1.0, 1.0)
        self._observed = 0
        self._turn = 0

    def _name_rows(self) -> None:
        self.kappa, self.tpot_kappa, self.prefill, self.step, self.load = self.columns
        self.by_slot = self.columns.T

    def reset(self, slot: int, look: Hashable = None) -> None:
        """Put a new endpoint or restarted engine at `slot` into the class `look`; its own ratio is 1."""
        while slot >= len(self._own):
            self._own.append(_Own())
            self._looks.append(None)
            self.columns = np.hstack((self.columns, np.ones((5, 1))))
            self._name_rows()
            self._ratios = np.append(self._ratios, 1.0)
        before = self._classes.get(self._looks[slot])
        if before is not None and slot in before.members:
            self._own[slot].count(before, -1.0)
            before.members.discard(slot)
            if not before.members and self._looks[slot] != look:
                del self._classes[self._looks[slot]]
        alike = self._classes.get(look)
        if alike is None:
            alike = self._classes[look] = _Class(self._pool)
        alike.members.add(slot)
        self._looks[slot] = look
        self._own[slot] = _Own()
        self._ratios[slot] = 1.0
        self._write(slot, alike)

    def observe(
        self,
        slot: int,
        work_ms: float,
        steps: float,
        load_ms: float,
        took_ms: float,
        now: float,
        lags: float = 0.0,
        cached: float = 0.0,
        unsure_ms: float = 0.0,
    ) -> None:
        """Learn from a stretch that took `took_ms`: prefill of `work_ms` in `steps` steps, each with a decoding load of
        `load_ms`, all at the prior's speed. `lags`: how many of its prompts had arrived in the middle of a step.
        `cached`: prompt tokens that were believed to be cached. `unsure_ms`: it may have taken up to so much less. If
        that includes the expected time, nothing is learned."""
        alike = self._classes[self._looks[slot]]
        a, b, c = alike.factors
        lag_ms = lags * (self.prior.c0 + load_ms)
        fixed_ms, load_ms = steps * self.prior.c0, steps * load_ms
        expected = a * work_ms + b * fixed_ms + c * load_ms + alike.lag * lag_ms
        if not (0.0 < expected < 1e9 and 0.0 < took_ms < 1e9):
            return
        own = self._own[slot]
        usual = log(own.ratio(alike, now))
        if unsure_ms and took_ms > expected * exp(usual):
            took_ms -= unsure_ms
            if took_ms < expected * exp(usual):
                return
        off = min(max(log(took_ms / expected) - usual, -_LOG_OUTLIER), _LOG_OUTLIER)
        own.add(alike.level + usual + off, now, alike)
        alike.noise += NOISE_SHARE * (max(off * off, LEAST_NOISE) - alike.noise)
        missed = a * self.prior.c_pf * MISSED * cached / expected
        weight = min(1.0, INLIER / max(abs(off), 1e-9)) * alike.noise / (alike.noise + missed * missed)
        row = (work_ms / expected, fixed_ms / expected, load_ms / expected)
        alike.add(row, lag_ms / expected, exp(off), weight, self._pool)
        self._observed += 1
        share = max(POOL_SHARE, 3.0 / (2 + self._observed))  # the first factors are still inaccurate
        a, b, c = (mean + share * (new - mean) for mean, new in zip(self._pool, alike.factors, strict=True))
        self._pool = (a, b, c)
        self._ratios[slot] = own.ratio(alike, now)
        if max(abs(new / old - 1.0) for new, old in zip(alike.factors, alike.published, strict=True)) > CHANGED:
            self._publish(alike)
        else:
            self._write(slot, alike)
        # With each stretch, update one other slot in turn, because the evidence about it gets older.
        self._turn = turn = (self._turn + 1) % len(self._own)
        alike = self._classes[self._looks[turn]]
        if alike.is_untried:
            alike.begin(self._pool)
        self._ratios[turn] = self._own[turn].ratio(alike, now)
        self._write(turn, alike)

    def sampled(
        self, slot: int, waiting: float, running: float, shows: bool = True, before: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        """Learn the limit of sequences from a scrape. `shows`: what waits there can only wait for a sequence slot.
        `before`: its last (waiting, running)."""
        alike = self._classes[self._looks[slot]]
        alike.limit.sampled(waiting, running, slot == alike.tester, shows, before)

    def limit(self, slot: int) -> float:
        """Return how many sequences the endpoint runs at once; 0 = unknown. One more at one endpoint of the class once
        the limit is long untested: a wrong one would keep itself from being shown."""
        alike = self._classes[self._looks[slot]]
        limit = alike.limit
        tests = limit.known and limit.untested >= LIMIT_TRUSTED and slot == alike.tester
        return limit.known + 1.0 if tests else limit.known

    def _publish(self, alike: _Class) -> None:
        """Write the factors of a class to the columns of all its members."""
        members = list(alike.members)
        alike.published = alike.factors
        ratios = self._ratios[members]
        for column, factor in zip((self.prefill, self.step, self.load), alike.factors, strict=True):
            column[members] = np.clip(factor * ratios, 1.0 / SLOWEST, SLOWEST)
        self._stale.update(members)

    def _write(self, slot: int, alike: _Class) -> None:
        ratio = float(self._ratios[slot])
        for column, factor in zip((self.prefill, self.step, self.load), alike.published, strict=True):
            column[slot] = min(max(factor * ratio, 1.0 / SLOWEST), SLOWEST)
        self._stale.add(slot)

    # ---- saved and restored ----

    def learned(self) -> SpeedsLearned:
        """Return the state to save. Classes without members, whose engines may only be down, come last."""
        classes = sorted(self._classes.items(), key=lambda each: not each[1].members)
        return SpeedsLearned(self._pool, self._observed, tuple(alike.learned(look) for look, alike in classes))

    def restore(self, learned: SpeedsLearned, instead: bool = False) -> None:
        """Restore the pool's mean and the classes. Classes that exist already stay, unless others come `instead`; then
        what was learned of their members goes too."""
        self._pool, self._observed = _bounded(learned.pool), learned.observed
        for each in learned.classes[:MOST_CLASSES]:
            before = self._classes.get(each.look)
            alike = _Class.restored(each) if before is None or instead else None
            if alike is None:
                continue
            self._classes[each.look] = alike
            for slot in before.members if before is not None else ():
                alike.members.add(slot)
                self._own[slot], self._ratios[slot] = _Own(), 1.0
                self._write(slot, alike)

    def own(self, slot: int, now: float) -> tuple[float, float, float, float]:
        """Return an endpoint's own mean, its weight, its ratio, and the seconds since its evidence was renewed."""
        own = self._own[slot]
        return own.mean, own.weight, float(self._ratios[slot]), max(now - own.renewed, 0.0)

    def restore_own(self, slot: int, learned: OwnLearned, idle_s: float, now: float) -> None:
        """Restore what was learned of an endpoint. `idle_s`: seconds since its evidence was renewed, including the time
        when no scheduler ran. The ratio is decayed here and computed again with later stretches."""
        own, alike = self._own[slot], self._classes[self._looks[slot]]
        own.count(alike, -1.0)
        own.mean, own.weight = min(max(learned.mean, -_MOST_OWN), _MOST_OWN), min(learned.weight, 1.0 / FORGET)
        own.renewed = now - idle_s
        own.count(alike, 1.0)
        self._ratios[slot] = min(max(learned.ratio, 1.0 / SLOWEST), SLOWEST) ** 0.5 ** (idle_s / HALF_LIFE)
        self._write(slot, alike)

    def validate(self) -> None:
        for column in (self.prefill, self.step, self.load):
            assert np.isfinite(column).all()
            assert ((column >= 1.0 / SLOWEST) & (column <= SLOWEST)).all()
        assert all(slot in self._classes[look].members for slot, look in enumerate(self._looks))
