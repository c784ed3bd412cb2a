"""What was decided and why, and what came of it. Records keep references to the decision's own arrays, no copies."""

from typing import Any

from msgspec import Struct, field

from fairlead.core.endpoint import Endpoint
from fairlead.core.request import Request

# What a decision expected of its request, to be compared with what came.


class Forecast(Struct, frozen=True, gc=False):
    """Of one request at one endpoint, in milliseconds. Made when it is sent and judged from then: what it waited in a
    queue of ours before is known, and no forecast."""

    ttft_ms: float = 0.0
    #: 90 % of first tokens come in between.
    low_ms: float = 0.0
    high_ms: float = 0.0
    #: Between output tokens.
    tpot_ms: float = 0.0
    #: Both as the model has them, before what was learned of its errors. Errors are judged by these: what is learned
    #: moves while requests are in flight, and judged by it the corrections would chase each other.
    model_ttft_ms: float = 0.0
    model_tpot_ms: float = 0.0
    #: Which forecasts it is compared with.
    kind: int = 0


# The numbers that one decision was made from: enough to make it again, by the same policy or another.


class Snapshot(Struct, frozen=True, gc=False):
    """Of all endpoints, at the moment before the choice. Arrays are copies, or never change; taking one costs 3 µs."""

    #: Clock seconds.
    at: float
    #: By slot; `None` = free.
    endpoints: tuple[Endpoint | None, ...]
    #: By slot; `None` = the endpoint reports none.
    adapters: tuple[frozenset[str] | None, ...]
    #: By slot, of its list of models; `None` = not known.
    listed: tuple[frozenset[str] | None, ...]
    #: (columns of `fleet.table.FLOATS`) × slots.
    floats: Any
    #: 5 × slots: the learned factors of first tokens, of output tokens, of prefill, of a step and of its load.
    learned: Any
    #: Learned for the pool: how long memory is held (ms), and the steps of an answer.
    hold_ms: float = 0.0
    answer_steps: float = 0.0


#: In a trace of late binding: the filters of the policy together, and what leaves those that may be sent one more.
ABLE, FLOW_CONTROL = "able", "flow-control"


class Waited(Struct, frozen=True, gc=False):
    """Why a request waited in a queue of ours. Milliseconds add up to its wait."""

    #: No endpoint was open. Some were, and nobody went.
    closed_ms: float = 0.0
    kept_ms: float = 0.0
    #: Requests that went meanwhile.
    sent: int = 0
    #: With so many others it was compared when it went; of these, so many stood before it in the order of the queue.
    compared: int = 0
    passed: int = 0
    #: Why it waited although some were open, at the last look at which nobody went; empty =
    #: others' turn.
    kept_by: str = ""


#: A numpy array over the endpoints of one decision, in the order of `Trace.endpoints`.
Column = Any


class Trace(Struct, gc=False):
    """How one profile came to its pick. Columns are parallel to `endpoints`."""

    endpoints: tuple[str, ...] = ()
    #: (filter name, bool column of those that it kept).
    filters: list[tuple[str, Column]] = field(default_factory=list)
    #: (scorer name, weight, float column in [0, 1]).
    scorers: list[tuple[str, float, Column]] = field(default_factory=list)
    #: Weighted sum; `-inf` where filtered out.
    total: Column = None
    #: Bool column of what was left for the picker; `None` = all.
    candidates: Column = None
    #: `picked`, `fallback` (all overloaded), `none`.
    outcome: str = ""
    #: Share of the prompt that each endpoint was believed to hold; `None` = nobody any of it.
    held: Column = None
    #: Milliseconds until each could run the request's adapter; `None` = there was none, or no difference.
    loading: Column = None
    #: What was known of the endpoints just then, where that is kept.
    snapshot: Snapshot | None = None
    #: Late binding: it had waited. `None` = it was decided at once.
    waited: Waited | None = None


class DecisionRecord(Struct, frozen=True, kw_only=True, gc=False):
    """One decision. `endpoint` is empty when the request was refused."""

    request: Request
    at: float
    policy: str
    endpoint: str = ""
    address: str = ""
    #: Id of the endpoint that computes the prompt; empty = the same.
    prefill: str = ""
    #: Prompt tokens predicted to be cached at the chosen endpoint.
    hit_tokens: int = 0
    #: The best predicted hit anywhere.
    best_hit_tokens: int = 0
    #: `routed`, or the reject reason.
    outcome: str = "routed"
    status: int = 200
    #: All candidates were overloaded and the fallback chose: more replicas are wanted.
    overloaded: bool = False
    #: Milliseconds that it waited in a queue of ours.
    queued_ms: float = 0.0
    #: `None` when it was refused.
    forecast: Forecast | None = None
    trace: Trace | None = None


#: Causes of an end that are a failure of the endpoint, or of the way to it.
LOST = ("stream-lost", "endpoint-gone")


class OutcomeRecord(Struct, frozen=True, kw_only=True, gc=False):
    """How a routed request ended."""

    request: Request
    at: float
    endpoint: str
    status: int = 0
    #: `natural`, `client-disconnect`, `stream-lost`, `expired`, `reconciled`, `endpoint-gone`.
    cause: str = "natural"
    #: -1 = no first token came, as in every answer but a 2xx.
    ttft_ms: float = -1.0
    duration_ms: float = -1.0
    response_bytes: int = -1
    prompt_tokens: int = -1
    completion_tokens: int = -1
    cached_tokens: int = -1
    #: What was predicted at decision time, to compare with `cached_tokens` and `sent_ttft_ms`.
    hit_tokens: int = 0
    forecast: Forecast | None = None
    #: Id of the endpoint that was chosen for it and could not be reached; empty = `endpoint` was chosen.
    unreached: str = ""
    #: Of `ttft_ms` and `duration_ms`, what it waited in a queue of ours.
    queued_ms: float = 0.0

    @property
    def failed(self) -> bool:
        """At the endpoint, or on the way to it: no fault of the client's."""
        return self.status >= 500 or self.cause in LOST

    @property
    def sent_ttft_ms(self) -> float:
        """From when it was sent, which is when its forecast was made; below 0 = not known."""
        return max(self.ttft_ms - self.queued_ms, 0.0) if self.ttft_ms >= 0.0 else -1.0


class StallRecord(Struct, frozen=True, gc=False):
    """An endpoint seems to hang, or moves again; see `fairlead.core.stalls`."""

    endpoint: str
    #: Clock seconds.
    time_s: float
    #: `well`, `suspect`, `out`.
    level: str
    #: How long nothing moved, and how long that was plausible, in seconds.
    silent_s: float
    plausible_s: float
    #: Our requests there.
    leases: int


# What policies on trial would have done, beside what was done.


class ShadowCase(Struct, frozen=True, gc=False):
    """One decision, as it is handed to shadows: everything in it is a copy, or never changes."""

    request: Request
    #: Where it went.
    slot: int
    endpoint: str
    #: The fleet as it was before the request was charged.
    snapshot: Snapshot
    #: Column over slots: share of the prompt that each was believed to hold; `None` = nobody any of it.
    held: Any
    expected_output: float = 0.0
    #: As in `Trace`.
    loading: Any = None


class ShadowVerdict(Struct, frozen=True, gc=False):
    """What one shadow would have done. Milliseconds are the reference cost's forecasts, never measured ones."""

    shadow: str
    #: Where it would have sent the request; empty = nowhere.
    endpoint: str = ""
    agrees: bool = False
    #: Reference cost there, above the lowest anywhere.
    regret_ms: float = 0.0
    #: Forecast of the time to the first token where the request went, less that where the shadow would have sent it.
    gain_ms: float = 0.0
    #: What deciding took.
    took_us: float = 0.0
    #: Why there is no choice; empty = there is one.
    error: str = ""


class ShadowRecord(Struct, frozen=True, gc=False):
    request_id: int
    #: Clock seconds of the decision.
    at: float
    #: Where the request went, and the reference cost there above the lowest anywhere.
    endpoint: str
    regret_ms: float = 0.0
    verdicts: tuple[ShadowVerdict, ...] = ()
