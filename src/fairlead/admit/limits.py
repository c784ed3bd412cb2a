"""How much may wait, and for how long: of all, of each band, of each flow."""

from collections.abc import Mapping
from math import inf

from msgspec import Struct

from fairlead.admit.framework import Limit
from fairlead.model.request import Request


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
