"""The contracts of flow control: how and how long requests wait, their order in a flow, and the turns of flows.

    band      all requests of one priority. Strict: a lower band is served only when no higher one can be.
    flow      the requests of one model and one tenant (fairness id) in a band
    ordering  the order of requests within a flow             `Ordering.key`, smallest first
    fairness  whose turn it is among the flows of a band      `Fairness.turns`, charged by `Fairness.spent`

What the answers mean
* An ordering's key must not change while a request waits. Ageing is expressed as a key that grows with the arrival
  time, which gives the same order. Only keys of the same ordering are compared.
* Fairness takes no requests out of the queues; it only gives the order in which flows may spend. The caller may pass
  over a flow whose endpoints are all busy and take a request of a later flow, to avoid head-of-line blocking.
* `spent` receives the predicted cost of each request that goes to an endpoint, whether it waited or not, in
  milliseconds of an engine (`core.cost.work_ms`). `corrected` receives the later correction. Requests that leave for
  another reason cost nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any, Protocol

from msgspec import Struct

from fairlead.core.policy import Refused
from fairlead.core.request import Request


class FlowKey(Struct, frozen=True, order=True):
    """Identifies a flow. `model`: as the client named it; `tenant`: the request's fairness id, empty = none."""

    priority: int
    model: str
    tenant: str


class Limit(Struct, frozen=True):
    """The maximum number of requests, and of bytes of their bodies; `inf` = unlimited."""

    requests: float = inf
    bytes: float = inf

    def full(self, requests: int, size: int, more: int) -> bool:
        """Whether one more request of `more` bytes would exceed it. A single request may have any number of bytes."""
        return requests + 1 > self.requests or (requests > 0 and size + more > self.bytes)


class Waiting(Struct, eq=False):
    """A request in the queue."""

    request: Request
    #: Clock seconds when it was queued, and its deadline; `inf` = none.
    since: float
    deadline: float
    #: Predicted work, in uncached prompt tokens; at least 1.
    work: float
    #: Rises with each queued request. It breaks ties, so that equal keys go in the order of arrival.
    number: int
    #: The ordering's key.
    key: float = 0.0
    flow: "Flow | None" = None
    #: What late binding remembers about the request.
    known: Any = None
    #: Expected tokens of the answer, and milliseconds of work in total.
    output: float = 0.0
    ms: float = 0.0
    #: What its flow was charged for it (`core.fairness.Charge`), once it was sent.
    charge: Any = None
    #: Why it was not sent in the last pass that sent no request although an endpoint was open.
    kept_by: str = ""
    #: The counts of `WaitReasons` when it was queued.
    counted: tuple[float, float, int] = (0.0, 0.0, 0)

    @property
    def size(self) -> int:
        """Bytes of memory that it takes while it waits: its body."""
        return self.request.body_bytes


class Flow(Struct, eq=False):
    """The waiting requests of one flow, ordered by key. Only `Queues` adds and removes them."""

    key: FlowKey
    #: Unique among all flows, past and present.
    number: int
    #: Clock seconds of its last arrival or dispatch.
    seen: float
    limit: Limit = Limit()
    #: Its share of the band's work is `weight` / sum of the weights of the flows that wait; at least 1.
    weight: float = 1.0
    #: (key, number, waiting), sorted.
    waiting: list[tuple[float, int, Waiting]] = []
    bytes: int = 0
    #: For the fairness policy: the tag that decides its turn, and the milliseconds of work that it got.
    tag: float = 0.0
    served: float = 0.0
    #: Number of requests sent from the queue to an endpoint.
    dispatched: int = 0
    #: `in_flight`: requests at endpoints. `wanted`: these and the waiting ones; `wanted_ms`: their work.
    in_flight: int = 0
    wanted: int = 0
    wanted_ms: float = 0.0

    def __len__(self) -> int:
        return len(self.waiting)

    def first(self, count: int) -> list[Waiting]:
        """Return the first `count` requests, or fewer, in order."""
        return [entry[2] for entry in self.waiting[:count]]


class Ordering(Protocol):
    """Ranks the requests of one flow."""

    @property
    def name(self) -> str: ...

    def key(self, waiting: Waiting) -> float:
        """Return the sort key; the smallest goes first."""
        ...


class Fairness(Protocol):
    """Shares one band among its flows. One instance per band."""

    @property
    def name(self) -> str: ...

    def queued(self, waiting: Waiting) -> None:
        """Called when a request joined its flow; it is already in `waiting.flow.waiting`."""

    def left(self, waiting: Waiting) -> None:
        """Called when a request has left its flow: it was sent, cancelled, or it expired."""

    def turns(self, window: int) -> Iterable[list[Waiting]]:
        """Iterate over windows of up to `window` requests. The next request is chosen from the first window; if none of
        it can be sent now, from the second, and so on. Flows without waiting requests have no window."""
        ...

    def spent(self, flow: Flow, cost: float) -> None:
        """Called when a request of the flow is sent to an endpoint; if it waited, before it leaves the queue."""

    def corrected(self, flow: Flow, more: float) -> None:
        """Called when a sent request took `more` work than `spent` received; negative = less."""

    def due(self, flow: Flow) -> bool:
        """Whether a light request of the flow, which has none waiting, may go before the waiting requests."""
        ...


class Ceiling(Protocol):
    """Decides up to which saturation of the pool a band is served."""

    @property
    def name(self) -> str: ...

    def allowed(self, level: float, priorities: Sequence[int]) -> Sequence[bool]:
        """Return for each band (highest priority first, at least one) whether it may send requests now. `level` is the
        pool's saturation, 1 = the gate's set point."""
        ...


#: Drop reasons.
SATURATED = "rejected-saturated"
EXPIRED = "rejected-ttl-expired"
NO_ENDPOINTS = "rejected-no-endpoints"
SHUTTING_DOWN = "rejected-shutting-down"
DISPLACED = Refused(SATURATED, "a more important request needed the place in the queue", status=429)
EVICTED = Refused("evicted", "the request made way for a more important one; try again", status=429)
#: Not sent to anyone. The gateway resets the stream alike when the client left and when it does not wait any longer.
LEFT = Refused("rejected-context-cancelled", "the gateway closed the stream (its client left, or it waited too long)")

# How many requests may wait, and for how long: in total, per band and per flow.


class FlowRule(Struct, frozen=True, kw_only=True):
    """Settings for some flows. `model` and `tenant`: `None` = any."""

    model: str | None = None
    tenant: str | None = None
    #: Seconds; 0 = that of the band.
    ttl: float = 0.0
    #: `None` = that of all flows.
    limit: Limit | None = None
    #: Its part of the band's work, relative to other flows.
    weight: float = 1.0

    def fits(self, model: str, tenant: str) -> bool:
        return self.model in (None, model) and self.tenant in (None, tenant)


ANY = FlowRule()


class Limits(Struct, frozen=True):
    """Limits in total, per band and per flow. `bands`: bands with other limits. The first of `rules` that fits
    applies."""

    total: Limit = Limit()
    band: Limit = Limit(5000, 1e9)
    flow: Limit = Limit()
    bands: Mapping[int, Limit] = {}
    rules: tuple[FlowRule, ...] = ()

    def of_band(self, priority: int) -> Limit:
        return self.bands.get(priority, self.band)

    def rule(self, model: str, tenant: str) -> FlowRule:
        return next((rule for rule in self.rules if rule.fits(model, tenant)), ANY)


class Times(Struct, frozen=True):
    """Seconds that a request may wait; `inf` = forever. The request's own time comes first, then that of its flow's
    rule, then that of its band."""

    ttl: float = 60.0
    #: The most while the pool has no endpoints, from its last endpoint or the request's arrival; 0 = none may wait.
    no_endpoints: float = 60.0
    #: The most in any case, whatever a request asks for.
    longest: float = inf
    bands: Mapping[int, float] = {}

    def of(self, request: Request, rule: FlowRule, endpoints: int) -> float:
        said = request.ttl_s or rule.ttl or self.bands.get(request.priority, self.ttl)
        own = min(said, self.longest)
        return own if endpoints or self.no_endpoints else 0.0
