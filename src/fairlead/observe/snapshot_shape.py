"""What the dashboard and `fairlead top` are told, as plain structs. Field names say units; `None` = not known.

Times of day are seconds since 1970. Counts run since the start, rates are of the last ten seconds, sums per endpoint of
the last minute.
"""

from msgspec import Struct


class Notice(Struct, frozen=True):
    """Something that is not as it should be, in a sentence. `level`: `bad` (requests suffer) or `watch`."""

    level: str
    text: str


class EndpointRow(Struct, frozen=True, kw_only=True):
    """One endpoint, in the order in which they joined."""

    id: str
    address: str
    model: str
    role: str
    fresh: bool
    #: Seconds since its last good scrape.
    age_s: float | None
    #: As the engine reported.
    waiting: float | None
    running: float | None
    #: Share of its blocks in use: as reported, or estimated while it is not fresh.
    kv: float | None
    #: What decisions go by: the report, corrected by our own requests since.
    queue: float
    active: float
    #: Our own requests in flight.
    leases: int
    #: Failed responses in a row keep it out for so many seconds.
    avoided_s: float
    #: Last minute: requests sent, share of their prompt tokens that was predicted to be cached.
    sent: int
    hit_rate: float | None
    #: Mean times to first token of streamed answers, how many they are, and the share within the forecast's 90 % band.
    predicted_ms: float | None
    actual_ms: float | None
    judged: int
    inside: float | None
    failed: int
    #: Where knowledge of its cache comes from (`learned`, or how far KV events are relied on), and how often that came
    #: true: of events the share of compared answers, else how well predicted and reported tokens agree.
    source: str
    trust: float | None


class TrafficRow(Struct, frozen=True, kw_only=True):
    """Requests for one model in one band."""

    model: str
    #: Where it is another name than the model's.
    target: str
    priority: str
    requests: int
    errors: int
    running: int
    per_s: float | None
    refused_per_s: float | None
    hit_rate: float | None


class BandRow(Struct, frozen=True, kw_only=True):
    """What waits in one band."""

    priority: int
    waiting: int
    bytes: int
    flows: int
    oldest_s: float
    #: How long it will take at the present pace.
    delay_s: float
    #: Share of the band's limit of requests; 0 = it has none.
    used: float


class Queues(Struct, frozen=True, kw_only=True):
    """Flow control; absent where it is off."""

    waiting: int
    #: 1 = no endpoint may be sent one more request.
    saturation: float
    delay_s: float
    wanted_endpoints: int
    bands: list[BandRow]


class Quantiles(Struct, frozen=True):
    """Of the last ten seconds; `n` values."""

    n: int
    p50: float | None
    p95: float | None
    p99: float | None


class Latency(Struct, frozen=True, kw_only=True):
    """Milliseconds, of streamed answers (`ttft`, and what was predicted for them) and of all that went well."""

    ttft: Quantiles
    predicted: Quantiles
    answer: Quantiles
    #: Microseconds.
    deciding: Quantiles


class DecisionRow(Struct, frozen=True, kw_only=True):
    """One of the last decisions. `endpoint` is empty when it was refused."""

    #: Names it on `/debug/decisions/ID`.
    id: int
    at: float
    model: str
    priority: int
    endpoint: str
    outcome: str
    status: int
    stream: bool
    prompt_tokens: int
    hit_tokens: int
    queued_ms: float
    predicted_ms: float | None
    ttft_ms: float | None
    duration_ms: float | None
    #: Status of the answer; 0 = it has not ended.
    ended: int
    cause: str


class ShadowRow(Struct, frozen=True, kw_only=True):
    """A policy on trial. Milliseconds are forecasts, in the mean per decision."""

    name: str
    agree: int
    differ: int
    refuse: int
    error: int
    regret_ms: float | None
    primary_regret_ms: float | None
    #: Why it is cut off; empty = it is not.
    cut: str


class Totals(Struct, frozen=True, kw_only=True):
    """Since the start, but for what is said to be now."""

    requests: int
    errors: int
    refused: int
    #: Now.
    running: int
    per_s: float | None
    refused_per_s: float | None
    prompt_tokens: float
    hit_tokens: float
    #: Forecasts of times to first token, and those within their 90 % band.
    forecasts: int
    inside: int


class Point(Struct, frozen=True, kw_only=True):
    """One moment of the charts. Latencies are milliseconds; `None` = not known."""

    at: float
    ttft: tuple[float | None, float | None, float | None]
    predicted: float | None
    answer: tuple[float | None, float | None, float | None]
    per_s: float | None
    refused_per_s: float | None
    waiting: int | None = None
    engines_waiting: float | None = None
    engines_running: float | None = None
    saturation: float | None = None


class About(Struct, frozen=True, kw_only=True):
    """What does not change from moment to moment."""

    version: str
    pool: str
    #: Seconds since 1970.
    started: float
    #: Seconds between two snapshots, and between two points of the charts.
    tick_s: float
    point_s: float


class Snapshot(Struct, frozen=True, kw_only=True):
    """Everything at one moment."""

    at: float
    policy: str
    notices: list[Notice]
    endpoints: list[EndpointRow]
    totals: Totals
    traffic: list[TrafficRow]
    #: Rows that were too many; their requests are in `totals`.
    traffic_left_out: int
    latency: Latency
    queues: Queues | None
    decisions: list[DecisionRow]
    shadows: list[ShadowRow]
    #: Requests in flight that are charged to an endpoint.
    leases: int
    #: Entries of the prefix index, and whether KV events are listened to.
    index_size: int
    kv_events: bool
    #: The newest point of the charts.
    point: Point


class Beginning(Struct, frozen=True, kw_only=True):
    """What a viewer is told first."""

    about: About
    history: list[Point]
