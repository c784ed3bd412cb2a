"""Records: decisions with their forecasts and reasons, outcomes, stalls, and what policies on trial would have done."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

from fairlead.core.endpoint import BaseModels, Endpoint
from fairlead.core.request import Request

# The forecast of a decision, to be compared with the outcome.


class Forecast(Struct, frozen=True, gc=False):
    """The forecast for a request at one endpoint, in milliseconds from the moment the request is sent. The time in
    Fairlead's queue is not part of it."""

    ttft_ms: float = 0.0
    #: 90 % of first tokens arrive between these two.
    low_ms: float = 0.0
    high_ms: float = 0.0
    #: Time between output tokens.
    tpot_ms: float = 0.0
    #: Both values from the model alone, without the learned correction of its errors. Errors are measured against
    #: these: the correction changes while requests are in flight, so corrections measured against it would oscillate.
    model_ttft_ms: float = 0.0
    model_tpot_ms: float = 0.0
    #: The group of forecasts with which its error is compared, see `KINDS` in `fairlead.core.cost`.
    kind: int = 0
    #: The upper end without the margin for unknown engines: hedges and stall detection use it.
    known_high_ms: float = 0.0


# The numbers that one decision was made from: enough to repeat it, with the same policy or another.


class Snapshot(Struct, frozen=True, gc=False):
    """All endpoints as they were just before the choice. Its arrays are copies, or never change. It takes 3 µs."""

    #: Clock seconds.
    at: float
    #: By slot; `None` = the slot is free.
    endpoints: tuple[Endpoint | None, ...]
    #: Adapters by slot; `None` = the endpoint reports none.
    adapters: tuple[frozenset[str] | None, ...]
    #: Adapters in the endpoint's list of models, by slot; `None` = not known.
    listed: tuple[frozenset[str] | None, ...]
    #: (columns of `fleet.table.FLOATS`) × slots.
    floats: Any
    #: 5 × slots: the learned factors for first tokens, output tokens, prefill, a step, and a step's load.
    learned: Any
    #: Learned for the whole pool: how long a request holds memory (ms), and the steps of an answer.
    hold_ms: float = 0.0
    answer_steps: float = 0.0
    #: Base models by slot.
    based: tuple[BaseModels, ...] = ()
    #: The columns of configured gauges, by name.
    gauges: Mapping[str, Any] = {}
    #: Adapters that requests in the engine's queue wait for, by slot; empty = none anywhere.
    waiting_adapters: tuple[frozenset[str], ...] = ()


#: Filter names in a trace of late binding: all filters of the policy together, and the gate that removes endpoints
#: which may not be sent another request now.
ABLE, FLOW_CONTROL = "able", "flow-control"


class Waited(Struct, frozen=True, gc=False):
    """Why a request waited in our queue. The milliseconds add up to its wait."""

    #: Time in which no endpoint was open; and time in which some were open and no request was sent.
    closed_ms: float = 0.0
    kept_ms: float = 0.0
    #: Requests that were sent meanwhile.
    sent: int = 0
    #: How many other requests it was compared with when it was sent, and how many of these were ahead of it in the
    #: queue.
    compared: int = 0
    passed: int = 0
    #: Why it waited while endpoints were open, from the last pass that sent no request; empty = it was the turn of
    #: other requests.
    kept_by: str = ""


class SplitCosts(Struct, frozen=True, gc=False):
    """What a policy compared that can split a request, in milliseconds; `None` = it could not be rated."""

    #: At the best endpoint for both stages, and at the best pair.
    alone_ms: float | None
    pair_ms: float | None
    #: Id of the pair's endpoint that computes the prompt, and whether the pair was taken.
    prefill: str
    taken: bool
    #: Whether only one of both ways was expected to keep the request's latency objective, which decides.
    by_objective: bool = False


#: A numpy array over the endpoints of one decision, in the order of `Trace.endpoints`.
Column = Any


class Trace(Struct, gc=False):
    """How a profile arrived at its pick. Columns are parallel to `endpoints`: the decision's own, not copied."""

    endpoints: tuple[str, ...] = ()
    #: (filter name, bool column: True = kept).
    filters: list[tuple[str, Column]] = field(default_factory=list)
    #: (scorer name, weight, float column in [0, 1]).
    scorers: list[tuple[str, float, Column]] = field(default_factory=list)
    #: Weighted sum; `-inf` where filtered out.
    total: Column = None
    #: Bool column of the slots that the picker could choose from; `None` = all.
    candidates: Column = None
    #: `picked`, `fallback` (all overloaded), `none`.
    outcome: str = ""
    #: Estimated share of the prompt that each endpoint had cached; `None` = no endpoint had any of it.
    held: Column = None
    #: Milliseconds until each endpoint could run the request's adapter; `None` = it has none, or all are equal.
    loading: Column = None
    #: The state of the endpoints just before the decision, if it is kept.
    snapshot: Snapshot | None = None
    #: Why the request waited before late binding sent it; `None` = it was decided on arrival.
    waited: Waited | None = None
    #: What a split would have cost; `None` = none was possible.
    split: SplitCosts | None = None
    #: (name, error) of each plugin that failed and was left out.
    failed: list[tuple[str, str]] = field(default_factory=list)


class DecisionRecord(Struct, frozen=True, kw_only=True, gc=False):
    """One decision. `endpoint` is empty if the request was refused."""

    request: Request
    at: float
    policy: str
    endpoint: str = ""
    address: str = ""
    #: Id of the endpoint that computes the prompt; empty = `endpoint` does.
    prefill: str = ""
    #: Prompt tokens predicted to be cached at the chosen endpoint.
    hit_tokens: int = 0
    #: The largest predicted prefix hit at any endpoint, in tokens.
    best_hit_tokens: int = 0
    #: `routed`, or the reject reason.
    outcome: str = "routed"
    status: int = 200
    #: All candidates were overloaded and the profile's fallback chose: more replicas are needed.
    overloaded: bool = False
    #: Milliseconds in our queue.
    queued_ms: float = 0.0
    #: Milliseconds in which another process was asked, if the request did not wait in our queue.
    asked_ms: float = 0.0
    #: `None` if the request was refused.
    forecast: Forecast | None = None
    trace: Trace | None = None


#: Causes of an end that count as a failure of the endpoint or of the path to it. `stream-lost` does not: the client
#: left, the gateway died, or the gateway does not report responses. If it does, it reports a failure of the endpoint as
#: one of these causes.
LOST = ("endpoint-gone", "upstream-reset")


class OutcomeRecord(Struct, frozen=True, kw_only=True, gc=False):
    """How a routed request ended."""

    request: Request
    #: Clock seconds of the end.
    at: float
    #: Id of the endpoint that answered.
    endpoint: str
    #: HTTP status of the answer; 0 = there was none.
    status: int = 0
    #: `natural`, `client-disconnect`, `upstream-reset`, `stream-lost`, `evicted`, `expired`, `reconciled`,
    #: `endpoint-gone`.
    cause: str = "natural"
    #: -1 = there was no first token, as in every answer other than a 2xx.
    ttft_ms: float = -1.0
    #: -1 = unknown, here and in the fields below.
    duration_ms: float = -1.0
    response_bytes: int = -1
    prompt_tokens: int = -1
    completion_tokens: int = -1
    cached_tokens: int = -1
    #: Predicted at decision time, to be compared with `cached_tokens` and `sent_ttft_ms`.
    hit_tokens: int = 0
    #: What was predicted of its times.
    forecast: Forecast | None = None
    #: Id of the endpoint that was chosen, if the fallback endpoint answered instead; empty = `endpoint` was chosen.
    unreached: str = ""
    #: The part of `ttft_ms` and `duration_ms` before it was sent: in our queue, or while another process was asked.
    queued_ms: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether it failed at the endpoint or on the path to it, through no fault of the client."""
        return self.status >= 500 or self.cause in LOST

    @property
    def sent_ttft_ms(self) -> float:
        """TTFT from the moment the request was sent, as in its forecast; below 0 = not known."""
        return max(self.ttft_ms - self.queued_ms, 0.0) if self.ttft_ms >= 0.0 else -1.0

    @property
    def tpot_ms(self) -> float:
        """Time per output token after the first one, if the answer was streamed; below 0 = not known. The engine
        computes all sequences of a request at the same time, so the longest counts: at least the mean, rounded up."""
        longest = -(-self.completion_tokens // self.request.sequences)
        if longest <= 1 or not 0.0 <= self.ttft_ms <= self.duration_ms:
            return -1.0
        return (self.duration_ms - self.ttft_ms) / (longest - 1)


class StallRecord(Struct, frozen=True, gc=False):
    """An endpoint seems to hang, or makes progress again; see `fairlead.core.stalls`."""

    endpoint: str
    #: Clock seconds.
    time_s: float
    #: `well`, `suspect`, `out`.
    level: str
    #: Seconds without progress, and seconds for which that was plausible; 0 = one request may test it, or does.
    silent_s: float
    plausible_s: float
    #: Our requests at the endpoint.
    leases: int

    @property
    def tried(self) -> bool:
        """Whether the record only says that one request may test the endpoint, or does."""
        return self.level == "suspect" and self.plausible_s == 0.0


# What policies on trial would have done, next to what was done.


class ShadowCase(Struct, frozen=True, gc=False):
    """One decision, as shadows receive it: everything in it is a copy, or never changes."""

    request: Request
    #: Where the request was sent.
    slot: int
    endpoint: str
    #: The fleet before the request was charged.
    snapshot: Snapshot
    #: Column over slots: estimated share of the prompt that each had cached; `None` = no endpoint had any of it.
    held: Any
    expected_output: float = 0.0
    #: As in `Trace`.
    loading: Any = None
    #: As in `Picked`: where the prompt was sent, if it was split.
    prefill_slot: int = -1
    handover_ms: float = -1.0


class ShadowVerdict(Struct, frozen=True, gc=False):
    """What one shadow would have done. Milliseconds are forecasts of the reference cost, not measurements."""

    shadow: str
    #: The endpoint that it would have chosen; empty = none.
    endpoint: str = ""
    agrees: bool = False
    #: Reference cost at that endpoint minus the lowest reference cost of any endpoint; 0 for a pair, which has none.
    regret_ms: float = 0.0
    #: TTFT forecast of the decision that was made minus that of the shadow's; 0 if one is a pair whose handover nobody
    #: forecast.
    gain_ms: float = 0.0
    #: CPU of the decision; of a scheduler in another process, the time until its answer.
    took_us: float = 0.0
    #: Why the shadow made no choice; empty = it made one.
    error: str = ""
    #: The endpoint that would have computed the prompt; empty = `endpoint`.
    prefill: str = ""


class ShadowRecord(Struct, frozen=True, gc=False):
    request_id: int
    #: Clock seconds of the decision.
    at: float
    #: The endpoint that got the request, and its reference cost minus the lowest of any endpoint; 0 for a pair.
    endpoint: str
    regret_ms: float = 0.0
    verdicts: tuple[ShadowVerdict, ...] = ()
