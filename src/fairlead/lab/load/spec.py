"""The data types of a load run: what to send, how, and the results. All are plain data, for use across processes.

Times are seconds on CLOCK_MONOTONIC, which processes of one host share; 0.0 = it never happened. Latency counts from
`scheduled`, the time when the request should have been sent. A generator that counts from the actual send hides the
waiting of requests that it sends late because the server stalls (coordinated omission).
"""

from collections.abc import Sequence
from math import exp, log
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import asdict

from fairlead.core.errors import ConfigError
from fairlead.lab.load.workload import AnyArrivals, AnyWorkload, Poisson, SharedPrefix

#: Neighbouring buckets differ by this factor, so a quantile is off by less than 1 %.
_STEP = log(1.02)
_PER_LOG = 1 / _STEP
#: Bucket 0 holds everything up to one microsecond, the last bucket everything from about five hours.
_SHORTEST = 1e-6
_SHIFT = -log(_SHORTEST) * _PER_LOG
_LAST = 1200


class Histogram(msgspec.Struct):
    """A histogram of durations in seconds."""

    count: int = 0
    total: float = 0.0
    #: Bucket index -> number of durations in it.
    buckets: dict[int, int] = {}

    def add_all(self, durations: Sequence[float]) -> None:
        """Add durations in seconds. With many at a time, each costs 30 ns."""
        if not durations:
            return
        seconds = np.maximum(np.asarray(durations), _SHORTEST)
        indices = np.minimum(np.log(seconds) * _PER_LOG + _SHIFT, _LAST).astype(int)
        self.count += len(durations)
        self.total += float(np.sum(durations))
        for index, count in zip(*np.unique(indices, return_counts=True), strict=True):
            self.buckets[int(index)] = self.buckets.get(int(index), 0) + int(count)

    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """The duration in seconds below which `share` (0-1) of all durations are; None without durations."""
        if not self.count:
            return None
        wanted = share * self.count
        seen = 0
        index = 0
        for index in sorted(self.buckets):
            seen += self.buckets[index]
            if seen >= wanted:
                break
        return _SHORTEST * exp((index + 0.5) * _STEP)


#: `Record.error` of a request that its client gave up, as the workload says. It counts as neither failed nor answered.
CANCELLED = "cancelled"


class Record(msgspec.Struct, gc=False):
    """The times and results of one request."""

    index: int
    scheduled: float
    sent: float = 0.0
    #: When the head of the final response was read.
    headers: float = 0.0
    #: First byte of the response body.
    first_byte: float = 0.0
    #: First byte of the body that is not an SSE comment: the first token of a stream.
    first_data: float = 0.0
    #: Last arrival of body bytes.
    last_data: float = 0.0
    end: float = 0.0
    status: int = 0
    body_bytes: int = 0
    #: The number of chunks of a chunked response.
    chunks: int = 0
    #: Why the request failed; empty = success. See `fairlead.lab.load.connection` for the values.
    error: str = ""
    #: `-1` = not reported.
    prompt_tokens: int = -1
    completion_tokens: int = -1
    cached_tokens: int = -1
    #: The prefix group of the workload; -1 = none.
    group: int = -1
    #: Answers that it asked for.
    n: int = 1

    def ttft(self) -> float:
        """Seconds from the scheduled arrival to the first token (or the response head, if it is not a stream)."""
        return (self.first_data or self.headers) - self.scheduled

    def e2e(self) -> float:
        """Seconds from the scheduled arrival to the end of the response."""
        return self.end - self.scheduled


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to run. At least one of `requests` and `duration_s` must bound the run."""

    #: Requests to schedule; 0 = no bound.
    requests: int = 0
    #: Seconds in which arrivals are scheduled; 0 = no bound.
    duration_s: float = 0.0
    #: Further arrivals wait, and the wait counts as latency. Each request in flight holds a socket: check `ulimit -n`.
    max_in_flight: int = 2000
    #: Limit on the time from the send to the end of the response.
    timeout_s: float = 300.0
    #: Hard bound on the whole run: requests that are not finished then have failed.
    time_limit_s: float = 3600.0
    #: Read token counts and in-stream errors from the responses.
    read_usage: bool = True
    #: Measure the gaps between arrivals of body bytes (ITL).
    gaps: bool = True
    #: Headers of every request, in place of a request's own of the same name.
    headers: dict[str, str] = {}
    #: The server's model time runs this many times faster than the wall clock.
    time_ratio: float = 1.0
    progress_s: float = 0.25

    def __post_init__(self) -> None:
        if self.requests <= 0 and self.duration_s <= 0:
            raise ConfigError("set requests or duration_s, a run must end", "$.options")
        values = asdict(self)
        for name in ("max_in_flight", "timeout_s", "time_limit_s", "time_ratio", "progress_s"):
            if not values[name] > 0:
                raise ConfigError("must be above 0", f"$.options.{name}")


class RunSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A complete run as data."""

    #: `http://host:port`
    target: str
    #: The name in reports: the policy under test.
    name: str = ""
    workload: AnyWorkload = msgspec.field(default_factory=SharedPrefix)
    arrivals: AnyArrivals = msgspec.field(default_factory=Poisson)
    options: Options = Options(requests=1000)


class Progress(msgspec.Struct):
    done: int
    #: Requests of the whole run; 0 = unknown, because the run is bounded by time.
    total: int
    failed: int
    in_flight: int
    #: Requests that are scheduled but held back by `max_in_flight`.
    waiting: int
    #: Completions per second since the previous report.
    rate: float
    elapsed_s: float
    #: Wall-clock milliseconds, over all requests whose first token has arrived; None before the first.
    ttft_p50_ms: float | None


class RunResult(msgspec.Struct, kw_only=True):
    name: str = ""
    target: str = ""
    records: list[Record]
    #: Gaps between arrivals of body bytes, over all streams, from the first token on.
    gaps: Histogram = msgspec.field(default_factory=Histogram)
    #: CLOCK_MONOTONIC seconds of offset 0 of the arrivals.
    origin: float = 0.0
    #: Unix time of the origin.
    started_unix: float = 0.0
    #: Seconds from the origin to the last response.
    duration_s: float = 0.0
    #: CPU seconds of the generator's process during the run.
    cpu_s: float = 0.0
    #: Whether the hard time bound ended the run.
    cut: bool = False
    time_ratio: float = 1.0
    #: Workload, arrivals and options as plain data, to be published together with the results.
    config: dict[str, Any] = {}
