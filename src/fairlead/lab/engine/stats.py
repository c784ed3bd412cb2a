"""What the engine counts for the metrics page: counters, histograms, and the gauges at the end of the last step."""

from bisect import bisect_left
from collections.abc import Sequence
from math import inf

from msgspec import Struct

from fairlead.lab.engine.request import EngineRequest

# Bucket bounds of vLLM 0.32.0; +Inf is implied.
TTFT_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BOUNDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
LATENCY_BOUNDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
ITERATION_BOUNDS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
PARAMS_N_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0)
PREEMPTION_BOUNDS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)


def token_bounds(max_model_len: int) -> tuple[float, ...]:
    """1, 2, 5, 10, … up to `max_model_len`."""
    bounds = []
    decade = 1
    while decade <= max_model_len:
        bounds += [float(m * decade) for m in (1, 2, 5) if m * decade <= max_model_len]
        decade *= 10
    return tuple(bounds)


class Histogram:
    """Counts per bucket (not cumulative) and the sum of what was observed."""

    __slots__ = ("bounds", "buckets", "count", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.buckets = [0] * (len(self.bounds) + 1)
        self.count = 0
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.buckets[bisect_left(self.bounds, value)] += times
        self.count += times
        self.sum += value * times


class Run:
    """A series of observations that mostly fall into the same bucket, so that the caller need not search for it each
    time.

    The caller keeps the sum and counts the observations. Nothing else may write to the histogram meanwhile.
    """

    __slots__ = ("_bucket", "_histogram", "_times", "sum")

    def __init__(self, histogram: Histogram, times: int) -> None:
        self._histogram = histogram
        self._times = times
        self._bucket = 0
        #: The histogram's sum at the beginning.
        self.sum = histogram.sum

    def move(self, value: float, seen: int) -> tuple[float, float]:
        """Count the `seen` observations in the current bucket and find the bucket of the next one, `value`. Returns
        that bucket's bounds, (exclusive lower, inclusive upper)."""
        self._count(seen)
        bounds = self._histogram.bounds
        self._bucket = bucket = bisect_left(bounds, value)
        return bounds[bucket - 1] if bucket else -inf, bounds[bucket] if bucket < len(bounds) else inf

    def close(self, total: float, seen: int) -> None:
        """Count the `seen` observations in the current bucket; `total` is the sum including all observations."""
        self._count(seen)
        self._histogram.sum = total

    def _count(self, seen: int) -> None:
        self._histogram.buckets[self._bucket] += seen * self._times
        self._histogram.count += seen * self._times


class Gauges(Struct):
    """Values at the end of the last step, as on a real server: later changes do not show yet."""

    #: 0 while the engine sleeps.
    awake: int = 1
    running: int = 0
    #: Requests in the queue, deferred ones included.
    waiting: int = 0
    #: The part of `waiting` that waits for an adapter slot.
    deferred: int = 0
    #: Share of blocks held by running requests, 0..1. Cached blocks that no request holds count as free.
    kv_usage: float = 0.0
    #: In the order of the requests; empty if the engine has no adapters.
    running_loras: tuple[str, ...] = ()
    waiting_loras: tuple[str, ...] = ()


class EngineStats:
    """Totals since the start. Times are in engine seconds."""

    def __init__(self, max_model_len: int) -> None:
        self.gauges = Gauges()
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.preemptions = 0
        self.prompt_tokens = 0
        self.prompt_tokens_cached = 0
        self.generation_tokens = 0
        self.finished = {"stop": 0, "length": 0}

        tokens = token_bounds(max_model_len)
        self.ttft = Histogram(TTFT_BOUNDS)
        self.itl = Histogram(ITL_BOUNDS)
        self.tpot = Histogram(ITL_BOUNDS)
        self.e2e = Histogram(LATENCY_BOUNDS)
        self.queue_time = Histogram(LATENCY_BOUNDS)
        self.inference_time = Histogram(LATENCY_BOUNDS)
        self.prefill_time = Histogram(LATENCY_BOUNDS)
        self.decode_time = Histogram(LATENCY_BOUNDS)
        self.request_prompt_tokens = Histogram(tokens)
        self.request_generation_tokens = Histogram(tokens)
        self.request_max_generation_tokens = Histogram(tokens)
        self.request_max_tokens = Histogram(tokens)
        self.request_computed_tokens = Histogram(tokens)
        self.request_n = Histogram(PARAMS_N_BOUNDS)
        self.request_preemptions = Histogram(PREEMPTION_BOUNDS)
        self.iteration_tokens = Histogram(ITERATION_BOUNDS)

    def first_token(self, request: EngineRequest) -> None:
        self.ttft.observe(request.first_token_at - request.arrived)
        self.prompt_tokens += request.prompt_tokens
        self.prompt_tokens_cached += request.cached_tokens

    def done(self, request: EngineRequest) -> None:
        """Count a request that ended by itself. Aborted requests are not counted at all, as measured on vLLM 0.32.0."""
        self.finished[request.finish_reason] += 1
        end, first, start = request.finished_at, request.first_token_at, request.scheduled_at
        self.e2e.observe(end - request.arrived)
        self.queue_time.observe(start - request.arrived)
        self.inference_time.observe(end - start)
        self.prefill_time.observe(first - start)
        self.decode_time.observe(end - first)
        if request.output > 1:
            self.tpot.observe((end - first) / (request.output - 1))
        self.request_prompt_tokens.observe(request.prompt_tokens)
        self.request_generation_tokens.observe(request.output)
        self.request_max_generation_tokens.observe(request.output)
        self.request_max_tokens.observe(request.max_tokens)
        self.request_computed_tokens.observe(request.prompt_tokens - request.cached_tokens)
        self.request_preemptions.observe(request.preemptions)
        if request.params_n:
            self.request_n.observe(request.params_n)
