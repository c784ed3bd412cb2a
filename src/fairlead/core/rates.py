"""How fast each endpoint computes, learned from the times at which first tokens come; and how far off forecasts are.

Theory
* A step of an engine takes `c0 + c_pf·new + c_attn·pairs + c_seq·B + c_kv·KV` milliseconds: B decoding sequences
  with KV tokens, `new` prompt tokens whose attention touches `pairs` token pairs. Three factors are learned that
  multiply the coefficients of the prior: one for prefill (c_pf, c_attn), one for what every step costs (c0), one for
  the load that it carries (c_seq, c_kv). So a stretch that took long beside many answers says that answers cost time
  there, and not that the endpoint is slow.
* What is observed is a stretch of prefill: from the moment an endpoint had something to compute to the first token
  after which it has nothing more, or, when there is always more, over enough tokens that it matters little where the
  border fell inside a step. Not single TTFTs: a small prompt shares its step with the beginning of a long one behind
  it, and would teach that small prompts are slow. And whole answers, where their tokens are known: so many steps, and
  the prompts that were computed meanwhile.
* A prompt that comes in the middle of a step waits for its end, and with asynchronous scheduling for one more, which
  was settled before. This *lag* is learned beside the factors, in steps at the prior's speed. Without it they would
  have to make up for it: where nearly all of each prompt is cached, the lag is several times the prompt's own work,
  and prefill would look that slow. What stretches cannot tell apart, the prior decides: engines lag more easily than
  they are slow.
* What is believed to be cached may not be. A part of it, `MISSED`, counts as noise, so stretches that compute next to
  nothing say little. And a stretch makes older ones forgotten only as far as it says something.
* Endpoints that look alike (`Fleet.up`) are a class. The factors are those of the class: least squares over all its
  stretches, relative to what was expected, drawn weakly to the pool's mean. A class without a stretch follows that
  mean: where the prior is far off it is so for all of the pool, and who keeps it would be shunned or overrun.
* What an endpoint is besides, is one number: how much longer it takes than its class. Most endpoints are what they
  look like, and a few are something else altogether. As a prior: with probability 1 - UNLIKE the logarithm of that
  number is about 0 (within LIKE_SD), else anything (within UNLIKE_SD). Its posterior mean ("spike and slab", Mitchell
  and Beauchamp 1988) is 0 for all that chance explains, and follows the observations where they say more: 30 % after a
  dozen stretches with the usual noise, six times after the first ones.

Rules
* Who is believed to be slow is asked less, and would never be known better. So evidence loses half its weight every
  `HALF_LIFE` seconds in which it is not renewed. A small difference is forgotten within a minute or two, a large one
  that was seen often lasts some minutes; then one request or two find out how it is. That is what exploring costs.
* One stretch counts at most as `OUTLIER` times what was expected, and at least as the inverse; the farther off, the
  less it weighs. A stall, or a beginning that was not cached after all, then moves a factor little, while hardware
  that is ten times slower is known after a few requests.
* Factors stay within `SLOWEST` of the prior. Everything is finite whatever clocks and clients do.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Hashable, Sequence
from math import exp, log, sqrt
from typing import cast

import numpy as np
from msgspec import Struct

from fairlead.core.columns import FloatColumn
from fairlead.core.cost import PRIOR, StepModel
from fairlead.core.learned import ClassLearned, Look, SpeedsLearned

# How far off forecasts are: quantiles of log(observed / forecast) among the last `WINDOW` of them. No distribution is
# assumed, so a band holds what it says. What a new band begins with leaves it one by one as its own values come: an
# engine that nobody knew yet is off by ten times, and must not widen the bands of the next sixty requests.
#
# Quantiles of the past hold for the future only if that is like it: in a growing queue each first token comes later
# than those before. So the distance of each end from the middle is multiplied by e^(0.95·WIDEN) for a first token
# beyond that end, and by e^(-0.05·WIDEN) for another one. Over N of them, whatever they are, the share beyond an end is
# then 5 % give or take log(WIDEST / NARROWEST) / (WIDEN·N), unless a bound is reached (adaptive conformal inference,
# Gibbs and Candès 2021).

#: The band is that of the middle 90 %.
LOW, HIGH = 0.05, 0.95
#: Values that are kept, and those of a new band: the fewest whose lowest is their 5 % quantile.
WINDOW, FIRST = 64, 19
#: Log ratios stay within ± this.
LIMIT = 5.0
#: How fast an end of a band learns, the bounds of its distance from the middle as a multiple of the quantile's, and
#: what is added to the latter, a logarithm: nobody needs to know more exactly.
WIDEN, NARROWEST, WIDEST, FINEST = 0.1, 0.5, 8.0, 0.02
#: What a new band begins with: half to twice what was forecast, the logarithms evenly spread.
_BEFORE = tuple(log(2.0) / (HIGH - 0.5) * ((i + 0.5) / FIRST - 0.5) for i in range(FIRST))
#: Forecasts for an unknown engine are off by ten times and more. So a new band gets a margin, this logarithm at each
#: end, which shrinks with every value of its own. Only people see it: it does not move the middle, from which `kappa`
#: learns, and hedges and stall detection leave it out.
UNKNOWN = log(8.0)


class Band:
    """The middle 90 % of a stream of log ratios, and its median. A new one begins with `FIRST` values of its parent,
    or with half to twice what was forecast."""

    __slots__ = ("_above", "_below", "_borrowed", "_parent", "_ranked", "_recent", "factors", "high", "low", "middle")

    def __init__(self, parent: "Band | None" = None, values: Sequence[float] = ()) -> None:
        """`values`: those that another one had (`values`)."""
        #: Of those that are kept, the ones that are not its own.
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
        """The quantile `p` (0.05..0.95), without the margin for unknown engines: the share of further observations that
        will be below."""
        off = self._quantile(p) - self.middle + FINEST * (p - 0.5) / (HIGH - 0.5)
        return min(max(self.middle + off * (self._below if p < 0.5 else self._above), -LIMIT), LIMIT)

    def _quantile(self, p: float) -> float:
        ranked = self._ranked
        place = min(max(p * (len(ranked) + 1) - 1.0, 0.0), len(ranked) - 1.0)
        below = int(place)
        above = min(below + 1, len(ranked) - 1)
        return ranked[below] + (place - below) * (ranked[above] - ranked[below])

    def add(self, x: float, below: bool = False, above: bool = False) -> None:
        """`below`, `above`: it is beyond that end of the band, without the margin, as of when the forecast was made."""
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
        #: What a forecast is multiplied with: for the middle, both ends, and the upper end without the margin.
        self.factors = exp(self.middle), exp(self.low), exp(self.high), exp(high)

    def validate(self) -> None:
        assert self._ranked == sorted(self._recent) and len(self._ranked) <= WINDOW
        assert -LIMIT - UNKNOWN <= self.low <= self.middle <= self.high <= LIMIT + UNKNOWN


OUTLIER = 3.0
#: Factors are kept in 1/SLOWEST … SLOWEST.
SLOWEST = 1000.0
#: Share that older stretches lose with each new one, of an endpoint and of a class.
FORGET, CLASS_FORGET = 1 / 12, 1 / 100
#: More than that where a class is no longer what it was: the mean of the last ten or so stretches is off by more than
#: chance explains.
CHANGED_FORGET, DRIFT_SHARE, STEADY = 0.15, 0.1, 0.25
#: So many stretches weigh as much as the pool's mean does: of the prefill factor, of the ratio of c0's to it, of the
#: load's to c0's, and of the lag to c0's. The last two are weak: the load is a small part of most steps, and tells as
#: little of its factor; and a lag is no step or one, as the engine schedules.
PRIOR_WEIGHTS = (1.0, 3.0, 10.0 / 64.0, 1.0 / 16.0)
#: Share of what is believed to be cached that may have to be computed after all: a standard deviation.
MISSED = 0.05
#: A stretch that took e^0.3 of what was expected, or e^-0.3, has full weight; beyond, less and less.
INLIER = 0.3
#: Weight of a class's newest factors in the pool's mean, once there were enough of them for a mean.
POOL_SHARE = 0.02
#: Seconds, see above.
HALF_LIFE = 30.0
#: Share of endpoints that are not what they look like, and standard deviations of the logarithm of what they take in
#: proportion to their class: of those that are, and of those that are not.
UNLIKE, LIKE_SD, UNLIKE_SD = 0.1, 0.02, 1.0
#: Variance of the logarithm of one stretch's observed / expected: to begin with, at least, and the newest one's weight.
NOISE, LEAST_NOISE, NOISE_SHARE = 0.09, 0.01, 0.02
#: Of about so many scrapes of late, how many are enough to believe in a limit of sequences.
LIMIT_SCRAPES, LIMIT_HITS = 20.0, 1.9
_LIKE, _UNLIKE = LIKE_SD * LIKE_SD, UNLIKE_SD * UNLIKE_SD
_LOG_OUTLIER = log(OUTLIER)
#: Of an endpoint's own mean, which is a logarithm.
_MOST_OWN = 2.0 * log(SLOWEST)
#: Shares of prefill, steps and their load in a stretch.
TYPICAL = (0.75, 0.2, 0.05)
#: Least of a factor of a class after one more observation, as a share of what it was.
FALL = 0.3
#: Classes that a scheduler is given, at most.
MOST_CLASSES = 256
#: Change of a class's factors that all its members are told.
CHANGED = 0.005

_Three = tuple[float, float, float]
_Five = tuple[float, float, float, float, float]


class _Limit(Struct):
    """Sequences that engines of a class run at once, found from scrapes: requests wait although there is memory, and
    again and again as many run as ever did, or, when one has just ended, one less. Whoever waits for the token budget
    of a step instead runs soon after, and the number that runs goes up and down."""

    #: The most that were ever seen running, and how often lately that many and fewer did while others waited.
    peak: float = 0.0
    at_peak: float = 0.0
    below: float = 0.0
    #: The limit; 0 = none is known.
    known: float = 0.0

    def sampled(self, waiting: float, running: float) -> None:
        if running > self.peak:
            # One more than the limit while others wait: it is that much higher, and not gone.
            self.known = running if self.known and waiting >= 1.0 else 0.0
            self.peak, self.at_peak, self.below = running, 0.0, 0.0
        if waiting >= 1.0:
            keep = 1.0 - 1.0 / LIMIT_SCRAPES
            below = running < self.peak - max(1.0, 0.1 * self.peak)
            self.at_peak = keep * self.at_peak + (running == self.peak)
            self.below = keep * self.below + below
            if self.at_peak < self.below:
                self.known = 0.0
            elif self.at_peak >= LIMIT_HITS and self.at_peak >= 3.0 * self.below:
                self.known = self.peak


class _Class:
    """Endpoints that look alike: normal equations of `observed = prefill·x + step·y + load·z + lag·w`, all relative to
    what was expected, and the factors that solve them. Plain floats: arrays of three cost four times as much."""

    def __init__(self, factors: _Three) -> None:
        self.begin(factors)
        self.noise = NOISE
        #: Of the members' own means: their weights, and the weighted sum.
        self.weight = self.sum = 0.0
        self.limit = _Limit()
        self.members: set[int] = set()
        #: Mean of late of the logarithm of observed / expected, in standard deviations of one.
        self._drift = 0.0
        self._squares: _Three = (0.0, 0.0, 0.0)
        #: x·y, x·z, y·z.
        self._products: _Three = (0.0, 0.0, 0.0)
        self._observed: _Three = (0.0, 0.0, 0.0)
        #: x·w, y·w, z·w, w·w, observed·w.
        self._lagged: _Five = (0.0, 0.0, 0.0, 0.0, 0.0)

    def begin(self, factors: _Three) -> None:
        """Take these for as long as nothing was observed here."""
        #: The factors now, and those that the members' columns were made of.
        self.factors = self.published = factors
        self.lag = factors[1]
        self.level = _level(factors)

    @property
    def is_untried(self) -> bool:
        return not any(self._squares)

    def add(self, row: _Three, lag: float, observed: float, weight: float, pool: _Three) -> None:
        """`row` and `lag`: what multiplies each factor, as shares of what was expected."""
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
        # The prior: `near` of (a/A - 1)², `tied` of (b/B - a/A)², `loose` of (c/C - b/B)², `free` of (l/B - b/B)², with
        # the pool's A, B and C.
        near, tied, loose, free = PRIOR_WEIGHTS
        a, b, c = 1.0 / pool[0], 1.0 / pool[1], 1.0 / pool[2]
        xx, ox = xx + (near + tied) * a * a, ox + near * a
        yy, zz = yy + (tied + loose + free) * b * b, zz + loose * c * c
        xy, yz = xy - tied * a * b, yz - loose * b * c
        yw, ww = yw - free * b * b, ww + free * b * b
        # What the lag explains is taken out; where that would have to be negative, it explains nothing.
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
        """`None` = its equations are none that observations lead to, and may have no solution."""
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
    """Cramer's rule; the prior makes the matrix positive definite."""
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
    """The logarithm of what a stretch takes, more or less."""
    return log(sum(factor * share for factor, share in zip(factors, TYPICAL, strict=True)))


class _Own:
    """How much longer an endpoint takes than the prior has it: a mean of logarithms, the weight behind it, and when it
    was renewed (clock seconds)."""

    __slots__ = ("mean", "renewed", "weight")

    def __init__(self) -> None:
        self.mean = self.weight = self.renewed = 0.0

    def add(self, x: float, now: float, alike: _Class) -> None:
        self.count(alike, -1.0)
        self._age(now)
        self.weight = self.weight * (1.0 - FORGET) + 1.0
        self.mean += (x - self.mean) / self.weight
        self.count(alike, 1.0)

    def count(self, alike: _Class, sign: float) -> None:
        """Add it to the sums of its class, or take it out of them."""
        alike.weight += sign * self.weight
        alike.sum += sign * self.weight * self.mean

    def _age(self, now: float) -> None:
        self.weight *= 0.5 ** (max(now - self.renewed, 0.0) / HALF_LIFE)
        self.renewed = now

    def ratio(self, alike: _Class, now: float) -> float:
        """The posterior mean of what it takes in proportion to its class."""
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
        """`stale`: is told the slots whose factors changed."""
        self.prior = prior
        self.columnwise = prior.columnwise()
        self._stale = set() if stale is None else stale
        #: 5 × slots, its rows, and the same by slot: the factors of first tokens and of output tokens (`core.predictor`
        #: learns them), of prefill, of a step and of its load.
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
        """A new endpoint stands at `slot`, or the engine there was started anew: it is what it looks like."""
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
        self._publish(alike)

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
    ) -> None:
        """A stretch took `took_ms`. It was prefill of `work_ms` in `steps` steps that carried a load of `load_ms` each,
        all at the prior's speed. `lags`: how often what was computed next had come in the middle of a step; `cached`:
        prompt tokens that were not to be computed."""
        alike = self._classes[self._looks[slot]]
        a, b, c = alike.factors
        lag_ms = lags * (self.prior.c0 + load_ms)
        fixed_ms, load_ms = steps * self.prior.c0, steps * load_ms
        expected = a * work_ms + b * fixed_ms + c * load_ms + alike.lag * lag_ms
        if not (0.0 < expected < 1e9 and 0.0 < took_ms < 1e9):
            return
        own = self._own[slot]
        usual = log(own.ratio(alike, now))
        off = min(max(log(took_ms / expected) - usual, -_LOG_OUTLIER), _LOG_OUTLIER)
        own.add(alike.level + usual + off, now, alike)
        alike.noise += NOISE_SHARE * (max(off * off, LEAST_NOISE) - alike.noise)
        missed = a * self.prior.c_pf * MISSED * cached / expected
        weight = min(1.0, INLIER / max(abs(off), 1e-9)) * alike.noise / (alike.noise + missed * missed)
        row = (work_ms / expected, fixed_ms / expected, load_ms / expected)
        alike.add(row, lag_ms / expected, exp(off), weight, self._pool)
        self._observed += 1
        share = max(POOL_SHARE, 3.0 / (2 + self._observed))  # the first ones still move, and count for less
        a, b, c = (mean + share * (new - mean) for mean, new in zip(self._pool, alike.factors, strict=True))
        self._pool = (a, b, c)
        self._ratios[slot] = own.ratio(alike, now)
        if max(abs(new / old - 1.0) for new, old in zip(alike.factors, alike.published, strict=True)) > CHANGED:
            self._publish(alike)
        else:
            self._write(slot, alike)
        # Whose evidence gets old, in turn.
        self._turn = turn = (self._turn + 1) % len(self._own)
        alike = self._classes[self._looks[turn]]
        if alike.is_untried:
            alike.begin(self._pool)
        self._ratios[turn] = self._own[turn].ratio(alike, now)
        self._write(turn, alike)

    def sampled(self, slot: int, waiting: float, running: float) -> None:
        """A scrape of an endpoint with memory to spare."""
        self._classes[self._looks[slot]].limit.sampled(waiting, running)

    def limit(self, slot: int) -> float:
        """How many sequences it runs at once; 0 = not known."""
        return self._classes[self._looks[slot]].limit.known

    def _publish(self, alike: _Class) -> None:
        """All members of a class its factors."""
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

    # ---- taken down, and given back ----

    def learned(self) -> SpeedsLearned:
        """Classes that nobody is in (yet) come last: their engines may only be down."""
        classes = sorted(self._classes.items(), key=lambda each: not each[1].members)
        return SpeedsLearned(self._pool, self._observed, tuple(alike.learned(look) for look, alike in classes))

    def restore(self, learned: SpeedsLearned) -> None:
        """Before any endpoint joins: what a class has learned meanwhile stays."""
        self._pool, self._observed = _bounded(learned.pool), learned.observed
        for each in learned.classes[:MOST_CLASSES]:
            alike = None if each.look in self._classes else _Class.restored(each)
            if alike is not None:
                self._classes[each.look] = alike

    def own(self, slot: int, now: float) -> tuple[float, float, float, float]:
        """The mean of an endpoint, its weight, what it takes in proportion to its class, and the seconds since that was
        found."""
        own = self._own[slot]
        return own.mean, own.weight, float(self._ratios[slot]), max(now - own.renewed, 0.0)

    def restore_own(self, slot: int, mean: float, weight: float, ratio: float, idle_s: float, now: float) -> None:
        """Evidence gets old while nobody runs, too. The ratio is found anew once all of the class are there."""
        own, alike = self._own[slot], self._classes[self._looks[slot]]
        own.count(alike, -1.0)
        own.mean, own.weight = min(max(mean, -_MOST_OWN), _MOST_OWN), min(weight, 1.0 / FORGET)
        own.renewed = now - idle_s
        own.count(alike, 1.0)
        self._ratios[slot] = min(max(ratio, 1.0 / SLOWEST), SLOWEST) ** 0.5 ** (idle_s / HALF_LIFE)
        self._write(slot, alike)

    def validate(self) -> None:
        for column in (self.prefill, self.step, self.load):
            assert np.isfinite(column).all()
            assert ((column >= 1.0 / SLOWEST) & (column <= SLOWEST)).all()
        assert all(slot in self._classes[look].members for slot, look in enumerate(self._looks))
