"""Moving sums of the decisions and answers of the last seconds.

Rules
* Records arrive only while the dashboard has viewers. Earlier records come from the journal of decisions, as far back
  as it reaches (`covered_since`).
* Adding a record is O(1). Old records leave the sums by whole bins, so reading costs nothing between two bins.
* Whatever clients send, a window has at most `MAX_KEYS` keys; further ones are added up under one key.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from math import ceil, inf
from typing import Generic, TypeVar

from msgspec import Struct

from fairlead.core.flow import LEFT
from fairlead.core.models import MODEL_NOT_FOUND
from fairlead.core.records import DecisionRecord, OutcomeRecord
from fairlead.server.observe.instruments import OTHER

#: Seconds that rates and percentiles cover, and that sums per endpoint cover.
SHORT, LONG = 10.0, 60.0
#: Seconds that the sums of traffic cover in the mean: their newest bin is not over.
COVERED = SHORT - 0.5
MAX_KEYS = 1000
MAX_LABEL = 200

Key = TypeVar("Key", bound=Hashable)


class Window(Generic[Key]):
    """Sums of `width` columns per key over the last `seconds`, in bins of `bin_s` seconds. Keys beyond `MAX_KEYS` count
    as the key `folded`."""

    def __init__(self, seconds: float, bin_s: float, width: int, folded: Key) -> None:
        self._span = round(seconds / bin_s)
        self._bin_s = bin_s
        self._width = width
        self._folded = folded
        self._bins: deque[tuple[int, dict[Key, list[float]]]] = deque()
        self.sums: dict[Key, list[float]] = {}

    def add(self, key: Key, now: float, values: Sequence[float]) -> None:
        """Add values to a key. Records arrive almost in the order of time; a late one is added to the newest bin."""
        number = int(now // self._bin_s)
        if not self._bins or number > self._bins[-1][0]:
            self._bins.append((number, {}))
            self._expire(number)
        if key not in self.sums and len(self.sums) >= MAX_KEYS:
            key = self._folded
        for rows in (self._bins[-1][1], self.sums):
            row = rows.get(key)
            if row is None:
                row = rows[key] = [0.0] * self._width
            for i, value in enumerate(values):
                row[i] += value

    def move(self, now: float) -> None:
        """Drop bins that are too old."""
        self._expire(int(now // self._bin_s))

    def _expire(self, newest: int) -> None:
        while self._bins and self._bins[0][0] <= newest - self._span:
            for key, values in self._bins.popleft()[1].items():
                row = self.sums[key]
                row[:] = [mine - old for mine, old in zip(row, values, strict=True)]
                if row[0] <= 0.0:
                    del self.sums[key]


class EndpointSums(Struct, frozen=True, gc=False):
    """One endpoint over the last `LONG` seconds; all fields are sums."""

    #: Records of any kind. The row is dropped when this is 0.
    records: float = 0.0
    routed: float = 0.0
    #: Of a pair, those of the endpoint that computes the prompt.
    prompt_tokens: float = 0.0
    hit_tokens: float = 0.0
    #: Streamed answers, and their milliseconds from sending to the first token; those with a forecast, their predicted
    #: milliseconds, and how many were within the 90 % band.
    streamed: float = 0.0
    actual_ms: float = 0.0
    judged: float = 0.0
    predicted_ms: float = 0.0
    inside: float = 0.0
    #: Answers that reported cached tokens: predicted tokens, reported tokens, and the sum of the differences.
    predicted_hit: float = 0.0
    reported_hit: float = 0.0
    hit_error: float = 0.0
    #: Requests that failed there, also those that another endpoint then answered.
    failed: float = 0.0


_NOTHING = EndpointSums()
_OUTCOME_ZEROS = (0.0,) * 9
Traffic = tuple[str, str, int]


class Recent:
    """Call `seed` once, then `take` for new records, and `move(now)` before reading. `now` is read from the clock of
    the records' `at`."""

    def __init__(self) -> None:
        #: All records since then (clock seconds) are included.
        self.covered_since = inf
        self._endpoints: Window[str] = Window(LONG, 5.0, len(EndpointSums.__struct_fields__), OTHER)
        self.traffic: Window[Traffic] = Window(SHORT, 1.0, 2, (OTHER, OTHER, 0))

    def seed(self, records: Iterable[tuple[DecisionRecord, OutcomeRecord | None]], since: float) -> None:
        """Begin with earlier records, oldest first. They are complete from `since` (clock seconds) on."""
        self.covered_since = since
        self.take(record for pair in records for record in pair if record is not None)

    def take(self, records: Iterable[DecisionRecord | OutcomeRecord]) -> None:
        for record in sorted(records, key=lambda record: record.at):
            if isinstance(record, OutcomeRecord):
                self.on_outcome(record)
            else:
                self.on_decision(record)

    def on_decision(self, record: DecisionRecord) -> None:
        request, now = record.request, record.at
        refused = not record.endpoint
        self.traffic.add(_traffic(record), now, (1.0, float(refused and record.outcome != LEFT.reason)))
        if not refused:
            decided = (1.0, 1.0, request.prompt_tokens, record.hit_tokens)
            self._endpoints.add(record.prefill or record.endpoint, now, decided + _OUTCOME_ZEROS)
            if record.prefill:
                self._endpoints.add(record.endpoint, now, (1.0, 1.0, 0.0, 0.0, *_OUTCOME_ZEROS))

    def on_outcome(self, record: OutcomeRecord) -> None:
        now, forecast = record.at, record.forecast
        streamed = actual = judged = predicted = inside = 0.0
        if record.request.stream and record.ttft_ms >= 0.0:
            streamed, actual = 1.0, record.sent_ttft_ms
            if forecast is not None and forecast.ttft_ms > 0.0:
                judged, predicted = 1.0, forecast.ttft_ms
                inside = float(forecast.low_ms <= actual <= forecast.high_ms)
        expected = reported = apart = 0.0
        if record.cached_tokens >= 0:
            expected, reported = record.hit_tokens, record.cached_tokens
            apart = abs(expected - reported)
        failed = float(record.failed)
        timed = streamed, actual, judged, predicted, inside
        sums = (1.0, 0.0, 0.0, 0.0, *timed, expected, reported, apart, failed)
        self._endpoints.add(record.endpoint, now, sums)
        if record.unreached:
            self._endpoints.add(record.unreached, now, (1.0, 0.0, 0.0, 0.0, *_OUTCOME_ZEROS[1:], 1.0))

    def move(self, now: float) -> None:
        self._endpoints.move(now)
        self.traffic.move(now)

    def endpoint(self, name: str) -> EndpointSums:
        row = self._endpoints.sums.get(name)
        return _NOTHING if row is None else EndpointSums(*row)

    def per_second(self, count: float, now: float) -> float | None:
        """The rate per second of a sum in `traffic`; `None` = less than a second is covered."""
        span = min(COVERED, now - self.covered_since)
        return count / span if span >= 1.0 else None

    def per_minute(self, count: float, now: float) -> int | None:
        """The sum per `LONG` seconds of one in `endpoint`, from what is covered; `None` = less than a second is."""
        span = min(LONG, now - self.covered_since)
        return round(count * LONG / span) if span >= 1.0 else None


def percentiles(values: Iterable[float], shares: Sequence[float]) -> list[float | None]:
    """Percentiles by nearest rank, one per share (0..1); all `None` if there are no values."""
    ordered = sorted(values)
    return [ordered[max(ceil(share * len(ordered)) - 1, 0)] if ordered else None for share in shares]


def _traffic(record: DecisionRecord) -> Traffic:
    """Model, target and band. The name of a model that is not defined may be made up."""
    request = record.request
    if record.outcome == MODEL_NOT_FOUND:
        return OTHER, OTHER, 0
    return request.model[:MAX_LABEL], request.target_model[:MAX_LABEL], request.priority
