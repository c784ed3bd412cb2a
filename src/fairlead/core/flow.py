"""The contracts of flow control: how requests wait, in which order a flow's requests go, and whose turn it is.

    band      all requests of one priority. Strict: a lower band is served only when no higher one can be.
    flow      the requests of one model and one tenant (fairness id) inside a band
    ordering  within a flow: who is first                     `Ordering.key`, smallest first
    fairness  between the flows of a band: whose turn it is   `Fairness.turns`, charged by `Fairness.spent`

What the answers mean
* An ordering's key must not change while a request waits: ageing is written as a key that grows with the arrival time,
  which ranks alike. Keys of one ordering are compared with each other only.
* Fairness does not take requests out; it says in which order flows may spend. Who chooses a request may pass over a
  flow (its endpoints are all busy) and take one of a later flow: strictness must not become head-of-line blocking.
* `spent` is told the predicted cost of each request that goes to an endpoint, whether it waited or not, in milliseconds
  of an engine (`core.cost.work_ms`), and `corrected` what it turned out to be. Requests that leave otherwise cost
  nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any, Protocol

from msgspec import Struct

from fairlead.core.policy import Refused
from fairlead.core.request import Request


class FlowKey(Struct, frozen=True, order=True):
    """Names a flow. `model` as the client named it; `tenant` = the request's fairness id, empty = none."""

    priority: int
    model: str
    tenant: str


class Limit(Struct, frozen=True):
    """At most so many requests, and bytes of their bodies; `inf` = any."""

    requests: float = inf
    bytes: float = inf

    def full(self, requests: int, size: int, more: int) -> bool:
        """Whether one further request of `more` bytes is too much. One alone always fits, however large."""
        return requests + 1 > self.requests or (requests > 0 and size + more > self.bytes)


class Waiting(Struct, eq=False):
    """One request in a queue."""

    request: Request
    #: Clock seconds when it was queued, and when it must be answered at the latest; `inf` = never.
    since: float
    deadline: float
    #: Predicted work, in uncached prompt tokens; at least 1.
    work: float
    #: Rises with each queued request: breaks ties, so equal keys go in the order of arrival.
    number: int
    #: The ordering's key.
    key: float = 0.0
    flow: "Flow | None" = None
    #: The binder's memory of the request.
    known: Any = None
    #: Expected tokens of the answer, and milliseconds of work in all.
    output: float = 0.0
    ms: float = 0.0
    #: What its flow is charged for it (`core.fairness.Charge`), once it has gone.
    charge: Any = None
    #: Why it did not go at the last look at which nobody did although an endpoint was open.
    kept_by: str = ""
    #: What `Tally` had counted when it was queued.
    counted: tuple[float, float, int] = (0.0, 0.0, 0)

    @property
    def size(self) -> int:
        """Bytes that waiting costs: the body, which is held."""
        return self.request.body_bytes


class Flow:
    """The waiting requests of one flow, in the order of their keys. Only `Queues` adds and removes."""

    __slots__ = (
        "bytes", "dispatched", "in_flight", "key", "limit", "number", "seen", "served", "tag", "waiting", "wanted",
        "wanted_ms", "weight",
    )  # fmt: skip

    def __init__(
        self, key: FlowKey, number: int, now: float, limit: "Limit | None" = None, weight: float = 1.0
    ) -> None:
        self.key = key
        self.limit = limit or Limit()
        #: Its share of the band's work is `weight` / sum of the weights of the flows that wait; at least 1.
        self.weight = weight
        #: Unique among all flows that there were.
        self.number = number
        #: (key, number, waiting), sorted.
        self.waiting: list[tuple[float, int, Waiting]] = []
        self.bytes = 0
        #: Clock seconds of its last arrival or dispatch.
        self.seen = now
        #: For the fairness policy's use: whose turn it is, and the milliseconds of work that it was given.
        self.tag = 0.0
        self.served = 0.0
        #: Requests that went to an endpoint from the queue.
        self.dispatched = 0
        #: Requests at endpoints, those and the waiting ones, and their milliseconds of work.
        self.in_flight = self.wanted = 0
        self.wanted_ms = 0.0

    def __len__(self) -> int:
        return len(self.waiting)

    def first(self, count: int) -> list[Waiting]:
        """Up to `count` requests, the first of the order first."""
        return [entry[2] for entry in self.waiting[:count]]


class Ordering(Protocol):
    """Ranks the requests of one flow."""

    @property
    def name(self) -> str: ...

    def key(self, waiting: Waiting) -> float:
        """The smallest goes first."""
        ...


class Fairness(Protocol):
    """Shares one band among its flows. One instance per band."""

    @property
    def name(self) -> str: ...

    def queued(self, waiting: Waiting) -> None:
        """A request joined its flow; it is in `waiting.flow.waiting` already."""

    def left(self, waiting: Waiting) -> None:
        """A request is no longer in its flow: sent, cancelled, expired."""

    def turns(self, window: int) -> Iterable[list[Waiting]]:
        """Windows of up to `window` requests each: those among which the next may be chosen; if none of them can go
        now, those of the next window, and so on. Flows without waiting requests do not occur."""
        ...

    def spent(self, flow: Flow, cost: float) -> None:
        """A request of the flow is sent to an endpoint; called before it leaves the queue, if it waited."""

    def corrected(self, flow: Flow, more: float) -> None:
        """One that was sent took so much more work than `spent` was told; negative = less."""

    def due(self, flow: Flow) -> bool:
        """Whether a light request of the flow, none of which waits, may go before those that wait."""
        ...


class Ceiling(Protocol):
    """How full the pool may be for a band to be served."""

    @property
    def name(self) -> str: ...

    def allowed(self, level: float, priorities: Sequence[int]) -> Sequence[bool]:
        """Which bands (highest priority first, at least one) may send requests now. `level` is the pool's saturation, 1
        = the gate's set point."""
        ...


#: Drop reasons.
SATURATED = "rejected-saturated"
EXPIRED = "rejected-ttl-expired"
NO_ENDPOINTS = "rejected-no-endpoints"
SHUTTING_DOWN = "rejected-shutting-down"
DISPLACED = Refused(SATURATED, "a more important request needed the place in the queue", status=429)
EVICTED = Refused("evicted", "the request made way for a more important one; try again", status=429)
#: Nobody is told: its client is gone.
LEFT = Refused("rejected-context-cancelled", "client disconnected")
NEVER = inf

# How much may wait, and for how long: of all, of each band, of each flow.


class FlowRule(Struct, frozen=True, kw_only=True):
    """What is said of some flows. `None` stands for every name."""

    model: str | None = None
    tenant: str | None = None
    #: Seconds; 0 = as its band.
    ttl: float = 0.0
    #: `None` = as all flows.
    limit: Limit | None = None
    #: Its part of the band's work, relative to other flows.
    weight: float = 1.0

    def fits(self, model: str, tenant: str) -> bool:
        return self.model in (None, model) and self.tenant in (None, tenant)


ANY = FlowRule()


class Limits(Struct, frozen=True):
    """What may wait in total, per band and per flow. `bands`: those that differ. Of `rules` the first that fits."""

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
    """Seconds that a request may wait; `inf` = for ever. What the request says goes first, then its flow's rule, then
    its band."""

    ttl: float = 60.0
    #: While the pool has no endpoint at all.
    no_endpoints: float = 60.0
    #: Whatever a request says.
    longest: float = inf
    bands: Mapping[int, float] = {}

    def of(self, request: Request, rule: FlowRule, endpoints: int) -> float:
        said = request.ttl_s or rule.ttl or self.bands.get(request.priority, self.ttl)
        own = min(said, self.longest)
        return own if endpoints else min(own, self.no_endpoints)
