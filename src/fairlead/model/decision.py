"""What was decided and why, and what came of it. Records keep references to the decision's own arrays, no copies."""

from typing import Any

from msgspec import Struct, field

from fairlead.model.forecast import Forecast
from fairlead.model.request import Request
from fairlead.model.snapshot import Snapshot

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
    #: What was known of the endpoints just then, where that is kept.
    snapshot: Snapshot | None = None


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


class OutcomeRecord(Struct, frozen=True, kw_only=True, gc=False):
    """How a routed request ended."""

    request: Request
    at: float
    endpoint: str
    status: int = 0
    #: `natural`, `client-disconnect`, `stream-lost`, `expired`, `reconciled`, `endpoint-gone`.
    cause: str = "natural"
    ttft_ms: float = -1.0
    duration_ms: float = -1.0
    request_bytes: int = -1
    response_bytes: int = -1
    prompt_tokens: int = -1
    completion_tokens: int = -1
    cached_tokens: int = -1
    #: What was predicted at decision time, to compare with `cached_tokens` and `ttft_ms`.
    hit_tokens: int = 0
    forecast: Forecast | None = None
    #: Id of the endpoint that was chosen for it and could not be reached; empty = `endpoint` was chosen.
    unreached: str = ""
