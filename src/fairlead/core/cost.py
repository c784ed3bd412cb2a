"""The cost kernel: what requests cost at endpoints, in milliseconds and by term. Only this module computes it.

Theory. At endpoint i, for a prompt of n tokens of which u must be computed:

    prefill       P = c_pf·u + c_attn·u·(n - u/2)       computing the prompt itself
    step          S = c0 + c_seq·B + c_kv·KV            a step that only decodes: B sequences with KV tokens in all
    queue         Q = Σ P of our requests before their first token, less what the engine has done of that work. It has
                      worked since the first of them began, but one step at most is subtracted: after more, a first
                      token would have been seen. Where first tokens are not seen, all of the time is subtracted, and
                      nothing while the sequence slots are full. If the next first token is late (`LATE`) and
                      memory is not the cause, the engine is slower than believed: Q is then at least the delay, times
                      the work of all requests over the work of the first
    steps         S·⌈(W + u)/8192⌉ + S/2                the steps that compute the prompt and the W queued tokens before
                                                        it, and the rest of the running step
    slots         A·S/N for each answer that must end before the request gets a sequence slot. The engine runs N
                      sequences at once. An answer takes A steps (learned), so on average one ends every A·S/N ms
    loading       until the endpoint can run the request's adapter, if it needs one (`core.adapters`)
    TTFT          kappa·(P + Q + steps + slots + loading)
                                                        kappa is learned and makes up for what the model leaves out
    interference  w·(B + waiting)·P·(1 + 0.3·P/(2·A·S)) every running answer pauses while the prompt is computed;
                                                        requests that wait there will run by then. By Little's law
                                                        (B + waiting)·P/(A·S) more come meanwhile and wait for half of
                                                        P. They can still go elsewhere, so each counts 0.3
    decode        w·A·S                                 the answer takes A steps of length S
    pauses        w·min(until - now, A·S)               w is that of decode. Few answers run where a long prompt was
                                                        computed, so the next long one tends to go there as well.
                                                        Answers that began in between then pause; at most their own
                                                        duration is counted. A prompt of `LONG_TOKENS` or more adds 2·P
                                                        to the later of `until` and now, up to now + 4·P (so a shorter
                                                        one may reduce it). So long prompts keep other requests away for
                                                        twice as long as they take
    memory        w·full·(1 + waiting + 0.3·B)·hold·u/capacity
                                                        charged only where memory is short. The prompt takes u tokens of
                                                        the cache for `hold` ms (learned). All requests that wait there
                                                        wait that much longer, and so do those that come before the
                                                        memory is released: by Little's law about as many as run there.
                                                        They can still go elsewhere, so each counts 0.3. `full` rises
                                                        from 0 at 75 % of the capacity to 1 at 95 %: answers grow.
    patience      (TTFT - 3·T)² / (2·T)                 T is the least TTFT that any endpoint offers. Up to 3·T, a
                                                        millisecond of the request's own wait counts like one of other
                                                        requests. Above, each costs 1 + (TTFT - 3·T)/T. Without this
                                                        term a long prompt would give way to any queue, because the
                                                        other terms are linear in the wait and in the prompt's length.
                                                        It is relative to T, not to a fixed time: in an overload all
                                                        wait, and no request should leave the endpoint that has cached
                                                        its prompt.
    reuse         -kappa·P·3/4·(u - v)/u                a discount for making another copy of a cached beginning. v is
                                                        the least u anywhere, at the endpoints that have cached most
                                                        of the prompt. A copy serves about three more requests, so
                                                        this one pays a quarter of computing it. Without the discount
                                                        a new endpoint would stay empty: a copy is expensive for one
                                                        request and cheap for all. It is given only where no prompt is
                                                        queued, so that copies are made one at a time, and where far
                                                        fewer requests are than at any endpoint where u = v.
                                                        Far fewer: by three standard deviations of the difference that
                                                        chance makes between equal loads. Smaller differences even out
                                                        by themselves, and a copy takes memory. P in interference and
                                                        TTFT in patience are lower by the same share

The coefficients are those of `PRIOR`, times three learned factors per endpoint. `core.rates` learns these and N,
`core.predictor` learns `kappa`, `hold` and A.

An address may divide its requests among R engines (data-parallel ranks; its metrics page reports R). It counts as one
engine with a share of the load: W, B, KV, N, Q and the waiting requests are divided by R. The cost of one prompt is not
divided: one engine computes it, in a memory of capacity/R. If only p < R prompts are computed there, another one meets
one of them with a probability of p/R, and on average half of that one is left: Q = Σ P/2R.

For endpoints in other places, `topology` is added: the configured cost of reaching them.

Shapes. One request: `prompts` is a number, `cached` a column, and so are the terms. R requests: `prompts` is an R × 1
array, `cached` R × slots, and terms are matrices. A term that is the same everywhere may be a number (0-d array).
"""

from collections.abc import Iterable, Sequence
from math import ceil, inf, sqrt
from operator import itemgetter
from typing import Any, Protocol

import numpy as np
from msgspec import Struct
from msgspec.structs import astuple, replace

from fairlead.core.columns import FloatColumn, read_only, scalar
from fairlead.core.records import Forecast
from fairlead.core.table import FLOATS, EndpointTable

#: Up to `FEW` slots, the precomputed columns (`READY`) are always used. With more slots they are used if at most
#: `CHANGED` slots changed since the last decision. Otherwise the table's columns are used, and `CHANGED` slots renewed.
FEW = CHANGED = 16
#: Prompt tokens that one step computes at most; vLLM's default on data-centre GPUs.
STEP_TOKENS = 8192
#: KV utilisation from which memory has a price, the inverse of the range over which the price rises to its full value,
#: and the weight of a request that is still to come, relative to one that waits already.
FULL_FROM, FULL_SLOPE, PASSING = 0.75, 5.0, 0.3
#: `PASSING` for requests that come while a prompt is computed: on average they wait for half of it.
COMING = 0.5 * PASSING
#: A prompt is long if at least this many tokens, three whole steps, have to be computed.
LONG_TOKENS = 3 * STEP_TOKENS
#: The share of computing a copy of a cached beginning that later requests owe: three of four.
OWED = 0.75
#: The least number of requests that can exceed another endpoint's by more than chance, see `fewer_than`.
UNEVEN_FROM = 10.0
#: Multiple of the least TTFT that a request can wait before the term `patience` begins.
FAIR = 3.0
#: KV utilisation above which waiting requests may wait for memory, so that waits say nothing about the speed.
CROWDED = 0.9
#: KV utilisation above which waiting requests do wait for memory: one starts for each answer that ends.
FULL = 0.98
#: Memory is released at a rate proportional to the KV utilisation, which counts as at least this much.
LEAST_USAGE = 0.1
#: `COMING` for a division by the column `steps` of `READY`, which is one and a half steps.
_COMING = 1.5 * COMING
_ZERO, _ONE, _PASSING, _STEPS = scalar(0.0), scalar(1.0), scalar(PASSING), scalar(1.0 / 1.5)
_FULL_FROM, _FULL_SLOPE, _LEAST_USAGE = scalar(FULL_FROM), scalar(FULL_SLOPE), scalar(LEAST_USAGE)


class StepModel(Struct, frozen=True):
    """Coefficients of a step in milliseconds: constant, per prompt token, token pair, sequence and KV token.

    The methods take numbers, columns or matrices, and return the same kind.
    """

    c0: float
    c_pf: float
    c_attn: float
    c_seq: float
    c_kv: float

    def prefill_ms(self, prompt: Any, uncached: Any) -> Any:
        """Return the milliseconds that computing the last `uncached` of `prompt` tokens adds to their steps."""
        return uncached * ((self.c_pf + self.c_attn * prompt) - self.c_attn * 0.5 * uncached)

    def load_ms(self, sequences: Any, kv_tokens: Any) -> Any:
        """Return the milliseconds that decoding adds to a step."""
        return self.c_seq * sequences + self.c_kv * kv_tokens

    @property
    def whole_step_ms(self) -> float:
        """The prefill milliseconds of a step with `STEP_TOKENS` tokens: the most that counts as progress of a queue."""
        return self.c_pf * STEP_TOKENS

    def columnwise(self) -> "StepModel":
        """Return the model with 0-d arrays, which numpy multiplies with a column in 0.25 instead of 0.40 µs."""
        arrays: list[Any] = [scalar(value) for value in astuple(self)]
        return StepModel(*arrays)


#: Qwen3-32B on two H100: a least-squares fit to a vendor's measured kernels. Any model will do to begin with.
PRIOR = StepModel(c0=13.16, c_pf=43.34e-3, c_attn=1.642e-6, c_seq=25.9e-3, c_kv=45.32e-6)
#: Kinds of forecasts by the state of the endpoint: idle; busy with 0, 1, or more requests queued; without memory or
#: slot. Each exists with and without a cached beginning (2 · `KINDS`). Four more kinds are for requests that waited in
#: Fairlead's queue: with and without a cached beginning, with and without memory and slot.
KINDS = 5
#: A first token is late if it takes more than this multiple of the expected time.
LATE = 1.5
_PER_STEP = 1.0 / STEP_TOKENS


class Factors(Protocol):
    """Columns of factors on the prior: `prefill` on c_pf and c_attn, `step` on c0, `load` on c_seq and c_kv."""

    prior: StepModel
    #: Slots × 5: `kappa`, `tpot_kappa`, `prefill`, `step`, `load`.
    by_slot: FloatColumn
    #: `prior.columnwise()`.
    columnwise: StepModel
    prefill: FloatColumn
    step: FloatColumn
    load: FloatColumn


class Quantiles(Protocol):
    """How far off forecasts of one kind are. A forecast is multiplied with `factors` for: the middle, the lower end,
    the upper end, and the upper end without the margin for unknown engines."""

    factors: tuple[float, float, float, float]


class Learned(Protocol):
    """The learned values that the kernel uses."""

    @property
    def rates(self) -> Factors: ...

    @property
    def bands(self) -> Sequence[Quantiles]:
        """By kind of forecast."""
        ...

    kappa: FloatColumn
    tpot_kappa: FloatColumn
    #: Milliseconds for which a request holds its memory.
    hold_ms: float
    #: Decoding steps of an answer, at least 1.
    answer_steps: float
    #: `StepModel.whole_step_ms` of the prior.
    whole_step_ms: float
    #: The precomputed values, see `READY`: as columns, as an array slots × `READY`, and as one `Ready` per slot.
    rows: list[FloatColumn]
    by_slot: FloatColumn
    slots: list["Ready"]


class Known(Protocol):
    """The parts of a fleet that the kernel uses."""

    @property
    def table(self) -> EndpointTable: ...

    @property
    def predictor(self) -> Learned: ...


#: Default of `Weights.decode`.
DECODE = 0.03


class Weights:
    """How much a millisecond of other requests counts, relative to one of the request itself. 1 = equally."""

    __slots__ = ("decode", "interference", "memory")

    def __init__(self, interference: float = 0.1, decode: float = DECODE, memory: float = 1.0) -> None:
        self.interference = scalar(interference)
        self.decode = decode
        self.memory = memory


class Terms(Struct, frozen=True):
    """The terms of the cost by slot, in milliseconds unless said otherwise, without weights (see `weighed`)."""

    #: Prompt tokens that are not cached there, at least 1.
    uncached: FloatColumn
    #: Computing them.
    prefill: FloatColumn
    #: Prefill of other requests that comes first.
    queue: FloatColumn
    #: The steps meanwhile, besides prefill.
    steps: FloatColumn
    #: One step that only decodes.
    step: FloatColumn
    #: KV tokens that the endpoint would need, over its capacity; 0 where that is unknown.
    used: FloatColumn
    #: TTFT by the model, without the wait for memory.
    model_ttft: FloatColumn
    #: TTFT as expected: `model_ttft` times `kappa`.
    ttft: FloatColumn
    #: What the model leaves out, as a learned factor.
    kappa: FloatColumn
    #: Waiting for a sequence slot of the engine.
    slots: FloatColumn = _ZERO
    #: Loading the adapter.
    loading: FloatColumn = _ZERO
    #: How long the answer may pause for long prompts that come later; not multiplied with `kappa`.
    pauses: FloatColumn = _ZERO

    def of(self, rows: Sequence[int]) -> "Terms":
        """Return the terms of some of several requests. What is equal for all has one row, or none."""
        return Terms(*(term[rows] if np.ndim(term) == 2 and len(term) > 1 else term for term in astuple(self)))

    def read_only(self) -> "Terms":
        """Return the same terms for code that may come from anywhere."""
        return Terms(*(read_only(term) if isinstance(term, np.ndarray) else term for term in astuple(self)))


def cost(
    prompts: Any, cached: FloatColumn | None, fleet: Known, now: float, loading: FloatColumn | None = None
) -> Terms:
    """Return the terms at all endpoints. `cached`: tokens believed to be cached there; `None` = one request, nothing
    cached. `now`: clock seconds. `loading`: milliseconds until the request's adapter runs there; `None` = no waits."""
    table, learned = fleet.table, fleet.predictor
    uncached = max(prompts, 1.0) if cached is None else np.maximum(prompts - cached, _ONE)
    rates = learned.rates
    step = step_ms(fleet)
    queue, slots = waits(fleet, step, now)
    prefill = rates.prefill * rates.prior.prefill_ms(prompts, uncached)
    tokens = per_rank(table.queued_tokens, table) + uncached
    steps = step * (np.ceil(tokens * _PER_STEP) + 0.5)
    used = table.kv + tokens * table.per_capacity
    model_ttft, kappa = prefill + steps + queue + slots, learned.kappa
    terms = Terms(uncached, prefill, queue, steps, step, used, model_ttft, kappa * model_ttft, kappa, slots)
    if table.long_until > now * 1e3:
        terms = replace(terms, pauses=pauses(step, fleet, now * 1e3))
    if loading is not None:
        model_ttft = model_ttft + loading
        terms = replace(terms, loading=loading, model_ttft=model_ttft, ttft=kappa * model_ttft)
    return terms


def per_rank(column: FloatColumn, table: EndpointTable) -> FloatColumn:
    """Divide a load by the number of engines that share the endpoint's address."""
    return column if table.per_rank is None else column * table.per_rank


def step_ms(fleet: Known) -> FloatColumn:
    """Return the milliseconds of a step that only decodes, by slot."""
    table, rates = fleet.table, fleet.predictor.rates
    load = per_rank(rates.load * rates.columnwise.load_ms(table.active, table.kv_tokens), table)
    return rates.step * rates.columnwise.c0 + load


def waits(fleet: Known, step: FloatColumn, now: float) -> tuple[Any, Any]:
    """Return two columns of milliseconds: until the queued prompts are computed, and until a sequence slot is free."""
    table, learned = fleet.table, fleet.predictor
    queue: Any = _ZERO
    slots: Any = _ZERO
    if np.count_nonzero(table.queued_tokens):
        factor, since = learned.rates.prefill, now * 1e3 - table.prefill_since_ms
        queued_ms = per_rank(factor * table.queued_ms, table)
        full = (table.max_seqs > 0.0) & (table.active >= table.max_seqs)
        seen = table.head_ms < inf
        step_long = np.where(seen, factor * learned.rates.prior.whole_step_ms, inf)
        progress = np.where(full, 0.0, np.minimum(since, step_long))
        if table.per_rank is not None:
            idle = seen & (table.pending < table.ranks) & (table.ranks > 1.0)
            queued_ms, progress = np.where(idle, 0.5 * queued_ms, queued_ms), np.where(idle, 0.0, progress)
        # With nothing queued, the queue is 0 even if `prefill_since_ms` is in the future: a blind lease that ended
        # early leaves the time for which its first token was forecast.
        waiting = table.queued_tokens > 0.0
        queue = np.maximum(np.where(waiting, queued_ms - progress, 0.0), 0.0)
        first = factor * np.where(seen, table.head_ms, 0.0) + 2.0 * step
        late = since - LATE * first
        moving = seen & waiting & (table.kv <= CROWDED) & ~full
        queue = np.maximum(queue, np.where(moving, late * (queued_ms + 2.0 * step) / first, 0.0))
    if np.count_nonzero(table.max_seqs):
        answer = 2.0 * table.growth_tokens / np.maximum(table.inflight, _ONE)
        there, most = per_rank(table.queue + table.active, table), per_rank(table.max_seqs, table)
        slots = slot_wait(there, most, answer * learned.tpot_kappa * step)
    return queue, slots


def weighed(terms: Terms, weights: Weights, fleet: Known) -> FloatColumn:
    """Return the weighed cost in milliseconds, the request's own time and that of others: the sum of `parts`."""
    table, learned = fleet.table, fleet.predictor
    decode = weights.decode * learned.answer_steps
    there = per_rank(table.active + table.queue, table)
    later = owed(terms.uncached, there, table.queued_tokens)
    ttft = terms.ttft if later is None else terms.ttft - terms.kappa * terms.prefill * later
    cost: FloatColumn = ttft + interference(terms, weights, fleet, there, later) + decode * terms.step
    cost += weights.decode * terms.pauses
    distance = table.distance_ms if table.distant else None
    for more in memory_price(terms, weights, fleet), patience_price(ttft, best_offer(terms.ttft, table)), distance:
        if more is not None:
            cost = cost + more
    return cost


def parts(terms: Terms, weights: Weights, fleet: Known) -> list[tuple[str, FloatColumn]]:
    """Return the (name, ms) columns that add up to `weighed`, for people. Rare terms that are all 0 are left out."""
    table, learned = fleet.table, fleet.predictor
    there = per_rank(table.active + table.queue, table)
    later = owed(terms.uncached, there, table.queued_tokens)
    reuse = None if later is None else -terms.kappa * terms.prefill * later
    ttft = terms.ttft if reuse is None else terms.ttft + reuse
    memory, patience = memory_price(terms, weights, fleet), patience_price(ttft, best_offer(terms.ttft, table))
    listed = [
        ("prefill", terms.kappa * terms.prefill),
        ("queue", terms.kappa * terms.queue),
        ("steps", terms.kappa * terms.steps),
        ("interference", interference(terms, weights, fleet, there, later)),
        ("decode", weights.decode * learned.answer_steps * terms.step),
        ("memory", np.zeros(len(table)) if memory is None else memory),
    ]
    own = (("slots", terms.slots), ("loading", terms.loading))
    listed += [(name, terms.kappa * term) for name, term in own if np.any(term)]
    listed += [("pauses", weights.decode * terms.pauses)] if np.any(terms.pauses) else []
    listed += [("topology", table.distance_ms)] if table.distant else []
    listed += [] if reuse is None else [("reuse", reuse)]
    return listed if patience is None else [*listed, ("patience", patience)]


def owed(uncached: Any, there: FloatColumn, queued: FloatColumn) -> FloatColumn | None:
    """Return the share of each prefill that later requests with the same beginning owe (term `reuse`); `None` = 0 for
    all. `there`: requests that run or wait, per engine. `queued`: prompt tokens still to be computed there."""
    most = there.item(there.argmax())
    if most < UNEVEN_FROM or not isinstance(uncached, np.ndarray) or fewer_than(most) <= there.item(there.argmin()):
        return None
    if uncached.ndim == 1:
        fewest: Any = uncached.item(uncached.argmin())
        fewer = there < fewer_than(min(there[(uncached == fewest).nonzero()[0]].tolist()))
    else:
        fewest = uncached.min(axis=-1, keepdims=True)
        holders = np.where(uncached == fewest, there, inf).min(axis=-1)
        fewer = there < np.array([[fewer_than(load)] for load in holders.tolist()])
    fewer &= queued == 0.0
    return (OWED - OWED * fewest / uncached) * fewer if np.count_nonzero(fewer) else None


def fewer_than(load: float) -> float:
    """Return the load below which an endpoint has far fewer requests than one with `load`: the x with (load - x)² =
    9·(load + x + 1), as the variance of a number of arrivals is its mean. With equal means, chance makes the smaller
    load that small in one of 700 cases."""
    return load + 4.5 - sqrt(18.0 * load + 29.25)


def interference(
    terms: Terms, weights: Weights, fleet: Known, there: FloatColumn, later: FloatColumn | None
) -> FloatColumn:
    """Return the term `interference`, weighed, in milliseconds. `there`: as for `owed`; `later`: its result."""
    prefill = terms.prefill if later is None else terms.prefill * (1.0 - later)
    coming = prefill / terms.step * (COMING / fleet.predictor.answer_steps)
    return prefill * (weights.interference * there) * (1.0 + coming)


def pauses(step: FloatColumn, fleet: Known, now_ms: float) -> FloatColumn:
    """Return by slot the milliseconds for which an answer that begins now may pause for later long prompts."""
    left: FloatColumn = fleet.table.long_until_ms - now_ms
    return left.clip(_ZERO, step * fleet.predictor.answer_steps)


def patience_price(ttft: FloatColumn, best: FloatColumn) -> FloatColumn | None:
    """Return the term `patience` in ms; `None` = 0 for all. `ttft`: less what later ones owe. `best`: least TTFT."""
    excess = np.maximum(ttft - FAIR * best, _ZERO)
    return excess * excess * (0.5 / best) if np.count_nonzero(excess) else None


def best_offer(ttft: FloatColumn, table: EndpointTable) -> FloatColumn:
    """Return the least TTFT among the endpoints in the pool, with the last axis kept (length 1)."""
    offered = ttft if table.count == len(table.endpoints) else np.where(table.alive, ttft, inf)
    best: FloatColumn = offered.min(axis=-1, keepdims=True)
    return best


def memory_price(terms: Terms, weights: Weights, fleet: Known) -> FloatColumn | None:
    """Return the term `memory`, weighed, in milliseconds; `None` = all endpoints have enough memory."""
    per_token = memory_price_per_token(terms.used, weights, fleet)
    return None if per_token is None else per_token * terms.uncached


def shortage(used: FloatColumn) -> FloatColumn:
    """Return how likely others wait for memory, 0 to 1, if the share `used` of the memory will be in use."""
    short: FloatColumn = used - _FULL_FROM
    short *= _FULL_SLOPE
    return short.clip(_ZERO, _ONE)


def memory_price_per_token(used: FloatColumn, weights: Weights, fleet: Known) -> FloatColumn | None:
    """Return the price in ms per token; `None` = enough memory everywhere. `used`: share of memory to be used."""
    if used.item(used.argmax()) <= FULL_FROM:
        return None
    table = fleet.table
    price = shortage(used)
    price *= per_rank(table.queue + _PASSING * table.active, table) + _ONE
    price *= table.per_capacity
    price *= weights.memory * fleet.predictor.hold_ms
    return price


def work_ms(slot: int, prompt: float, uncached: float, fleet: Known) -> tuple[float, float, float]:
    """Return the milliseconds of the engine's time in which fair shares are measured, at the speed of the slot: for
    the prompt, for one token of the answer, and for a step that only decodes.

    A token counts as the share `DECODE` of the constant part of a step, which all running requests share, plus the
    time to read the request's own KV tokens. The result does not depend on other requests."""
    factors = fleet.predictor.rates
    prior, step = factors.prior, float(factors.step[slot]) * factors.prior.c0
    token = DECODE * step + float(factors.load[slot]) * prior.load_ms(1.0, prompt)
    return float(factors.prefill[slot]) * prior.prefill_ms(prompt, uncached), token, step


def slot_wait(there: Any, slots: Any, answer_ms: Any) -> Any:
    """Return the milliseconds until another request gets a sequence slot. `there`: requests that run or wait. `slots`:
    sequences that run at once, 0 = no limit. `answer_ms`: duration of an answer."""
    ahead = np.where(there >= slots, there + 0.5 - slots, _ZERO)
    return np.where(slots > 0.0, ahead * answer_ms / np.maximum(slots, _ONE), _ZERO)


def memory_wait(used: Any, usage: Any, hold_ms: float) -> Any:
    """Return the milliseconds until the memory suffices. `used`: the share of the capacity needed with the request.
    `usage`: the share in use now, which determines the rate of release."""
    return np.maximum(used - 1.0, _ZERO) * (hold_ms / np.maximum(usage, _LEAST_USAGE))


# The fast path. Values that do not depend on the request are precomputed slot by slot, because a request changes only
# one or two slots. Over few endpoints a numpy operation computes for some nanoseconds but costs half a microsecond,
# with cold caches several. Without the fast path a whole request takes 11 % more CPU at 8 endpoints
# (`bench/extproc.py`, closed loop of 32). Over many endpoints it halves the operations. A test compares both ways.

# `Learned.rows` are these columns. They are up to date for all slots that are not in `EndpointTable.stale`.
#
#     own, pausing        per millisecond of prefill at the prior's speed: milliseconds of the request's own TTFT, and
#                         milliseconds lost by the answers that run meanwhile (without weight)
#     steps, step         milliseconds of one and a half steps times `kappa`, and of a step that only decodes
#     done_ms, left_ms    clock milliseconds when the queued prompts would be computed without a pause, and the
#                         milliseconds of them that are left at least, because progress counts for at most one step;
#                         both include the wait for a slot
#     due_ms, pace        clock milliseconds after which the next first token is late (infinite = none is expected), and
#                         the milliseconds by which the queue gets later for each millisecond since then
#     kappa
#     easy                number of tokens to compute up to which one step is enough and memory has no price
#     there               requests that run or wait
READY = 11
#: Returns the values that `renew` reads from the list of a slot's column values.
_LOAD_OF = itemgetter(
    *map(
        FLOATS.index,
        (
            "kv", "queue", "active", "inflight", "pending", "queued_tokens", "queued_ms", "prefill_since_ms",
            "kv_tokens", "growth_tokens", "head_ms", "per_capacity", "max_seqs", "ranks",
        ),
    )
)  # fmt: skip


class Ready(Struct, gc=False):
    """The precomputed values for one slot, with those of the table's columns that forecasts need. They are per engine
    if several engines share the endpoint's address."""

    step: float
    #: Milliseconds of a step with one more sequence.
    next_step: float
    done_ms: float
    left_ms: float
    due_ms: float
    pace: float
    kappa: float
    #: The learned factor of prefill (`Factors.prefill`).
    factor: float
    queued_tokens: float
    queue: float
    active: float
    pending: float
    kv: float
    per_capacity: float
    max_seqs: float

    def wait_ms(self, now: float) -> float:
        """Return the sum of the two `waits` at the slot, in milliseconds."""
        now_ms = now * 1e3
        return max(self.done_ms - now_ms, self.left_ms, (now_ms - self.due_ms) * self.pace)


def renew(slots: Iterable[int], table: EndpointTable, learned: Learned) -> None:
    """Update the `READY` values of these slots from their columns, and remove the slots from `EndpointTable.stale`."""
    prior = learned.rates.prior
    for slot in slots:
        (
            kv, queue, active, held, pending, queued, queued_ms, since_ms, kv_tokens, growth, head_ms, per_capacity,
            limit, ranks,
        ) = _LOAD_OF(table.by_slot[slot].tolist())  # fmt: skip
        if ranks > 1.0:
            queue, active, pending, limit = queue / ranks, active / ranks, pending / ranks, limit / ranks
            queued, queued_ms, kv_tokens = queued / ranks, queued_ms / ranks, kv_tokens / ranks
        kappa, tpot_kappa, factor, base, load = learned.rates.by_slot[slot].tolist()
        step = base * prior.c0 + load * (prior.c_seq * active + prior.c_kv * kv_tokens)
        left_ms, due_ms, pace = 0.0, inf, 1.0
        if queued:
            queued_ms *= factor
            done_ms = since_ms + queued_ms
            if head_ms < inf:
                left_ms = max(queued_ms - factor * prior.c_pf * STEP_TOKENS, 0.0)
                if pending < 1.0 < ranks:
                    queued_ms *= 0.5
                    done_ms, left_ms = -inf, queued_ms
                if kv <= CROWDED:
                    first_ms = factor * head_ms + 2.0 * step
                    due_ms, pace = since_ms + LATE * first_ms, (queued_ms + 2.0 * step) / first_ms
        else:
            done_ms = -inf
        if limit and queue + active >= limit:
            if active >= limit:
                done_ms, left_ms, due_ms, pace = -inf, queued_ms, inf, 1.0
            answer_ms = 2.0 * growth / max(held, 1.0) * tpot_kappa * step
            wait = (queue + active + 0.5 - limit) * answer_ms / limit
            done_ms, left_ms, due_ms = done_ms + wait, left_ms + wait, due_ms - wait / pace
        free = (FULL_FROM - kv) / per_capacity if per_capacity else inf if kv <= FULL_FROM else 0.0
        learned.by_slot[slot] = (
            kappa * factor, factor * (active + queue), 1.5 * kappa * step, step, done_ms, left_ms, due_ms, pace, kappa,
            (free if free < STEP_TOKENS else STEP_TOKENS) - queued, active + queue,
        )  # fmt: skip
        learned.slots[slot] = Ready(
            step, step + load * prior.c_seq, done_ms, left_ms, due_ms, pace, kappa, factor,
            queued, queue, active, pending, kv, per_capacity, limit,
        )  # fmt: skip
    table.stale.difference_update(slots)


def open_at(steps: float, requests: float, slot: int, fleet: Known, now: float) -> bool:
    """Whether a slot is open (`core.gates.LedgerGate`): its queue will be computed within `steps` whole steps, fewer
    than `requests` requests wait there, and none of them waits for memory."""
    learned = fleet.predictor
    if slot in fleet.table.stale:
        renew((slot,), fleet.table, learned)
    ready = learned.slots[slot]
    if ready.kv > FULL or ready.queue >= requests:
        return False
    return ready.wait_ms(now) <= steps * learned.whole_step_ms * ready.factor


def forecast(slot: int, prompt: float, uncached: float, alone_ms: float, fleet: Known, now: float) -> Forecast:
    """Return the forecast for a request at one slot, with the wait for memory and the error band. `uncached`: tokens to
    compute, at least 1. `alone_ms`: milliseconds that takes at the prior's speed. Where memory is full, a request
    starts when an answer ends, so it waits for the requests before it."""
    learned = fleet.predictor
    if slot in fleet.table.stale:
        renew((slot,), fleet.table, learned)
    ready = learned.slots[slot]
    tokens = ready.queued_tokens + uncached
    ttft = ready.factor * alone_ms + ready.step * (ceil(tokens * _PER_STEP) + 0.5) + ready.wait_ms(now)
    used = ready.kv + tokens * ready.per_capacity
    if used > 1.0:
        ttft += (used - 1.0) * (learned.hold_ms / max(ready.kv, LEAST_USAGE))
        kind = KINDS - 1
    elif ready.max_seqs and ready.queue + ready.active >= ready.max_seqs:
        kind = KINDS - 1
    else:
        kind = min(int(ready.pending), 2) + 1 if ready.queued_tokens or ready.active else 0
    if ready.queue >= 1.0 and ready.kv > FULL:
        ttft = max(ttft, ready.queue * learned.hold_ms / max(ready.active, 1.0))
    if uncached < prompt:
        kind += KINDS
    middle, low, high, known_high = learned.bands[kind].factors
    expected = ttft * ready.kappa
    return Forecast(
        expected * middle,
        expected * low,
        expected * high,
        ready.next_step * learned.tpot_kappa.item(slot),
        ttft,
        ready.next_step,
        kind,
        expected * known_high,
    )


def cost_of_one(prompt: float, share: FloatColumn | None, weights: Weights, fleet: Known, now: float) -> FloatColumn:
    """Return `weighed` for one request without an adapter, by the fast path. `share`: the share of the prompt that each
    endpoint has cached, in whole tokens; `None` = 0 for all. Adds `table.collisions` if it is `None`."""
    table, learned = fleet.table, fleet.predictor
    slots = len(table.endpoints)
    if slots > FEW and len(table.stale) > CHANGED:
        renew([table.stale.pop() for _ in range(CHANGED)], table, learned)
        cached = None if share is None else share * scalar(prompt)
        costs = weighed(cost(prompt, cached, fleet, now), weights, fleet)
        return costs + table.collisions if share is None and table.collisions is not None else costs
    if table.stale:
        renew(table.stale, table, learned)
    own, pausing, steps, step, done_ms, left_ms, due_ms, pace, kappa, easy, there = learned.rows
    uncached: Any = prompt or 1.0
    crowded = easy[easy.argmin()] < uncached
    later = None
    if share is not None:
        uncached = np.maximum(prompt - share * prompt, _ONE)
        if there[there.argmax()] >= UNEVEN_FROM:
            later = owed(uncached, there, table.queued_tokens)
    now_ms = now * 1e3
    alone = learned.rates.prior.prefill_ms(prompt, uncached)
    answer = learned.answer_steps
    ttft: FloatColumn = own * alone
    if later is None:
        coming = ttft * (_COMING / answer) / steps
    else:
        owing, alone = ttft * later, alone * (_ONE - later)
        coming = (ttft - owing) * (_COMING / answer) / steps
    coming += _ONE
    coming *= pausing * alone
    total: FloatColumn = coming * weights.interference + step * (weights.decode * answer)
    ttft += steps + kappa * np.maximum(np.maximum(done_ms - now_ms, left_ms), (now_ms - due_ms) * pace)
    if crowded:
        tokens = per_rank(table.queued_tokens, table) + uncached
        ttft += steps * ((np.ceil(tokens * _PER_STEP) - _ONE) * _STEPS)
        per_token = memory_price_per_token(table.kv + tokens * table.per_capacity, weights, fleet)
        if per_token is not None:
            total += per_token * uncached
    best = ttft[ttft.argmin()] if table.count == slots else best_offer(ttft, table)
    if later is not None:
        ttft -= owing
    excess = np.maximum(ttft - FAIR * best, _ZERO)
    excess *= excess * (0.5 / best)
    total += ttft + excess
    if table.long_until > now_ms:
        total += pauses(step, fleet, now_ms) * weights.decode
    if table.distant:
        total += table.distance_ms
    if share is None and table.collisions is not None:
        total += table.collisions
    return total
