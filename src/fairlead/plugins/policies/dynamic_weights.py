"""`dynamic-weights`: prefix and load weighed by how much of the traffic has been hitting.

The documents' tuning guide as a policy: where most of the prompts is cached follow the cache, where hardly anything is
spread the load, in between both count the same.
"""

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from fairlead.fleet.columns import scalar
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.params import Params
from fairlead.plugins.pickers.top_k import TopK, TopKParams
from fairlead.plugins.scorers.load_aware import LoadAware, LoadAwareParams
from fairlead.plugins.scorers.prefix_aware import PrefixAware, PrefixAwareParams
from fairlead.schedule.cycle import Context
from fairlead.schedule.framework import Filter, Pick
from fairlead.schedule.profile import Profile

Share = Annotated[float, Meta(ge=0, le=1)]
#: Weights of (prefix-aware, load-aware) at high, low and middling hit rates.
HIGH, LOW, MIDDLE = (100.0, 30.0), (20.0, 100.0), (60.0, 60.0)
#: The hit rate is that of the last hundred requests or so, by tokens.
MEMORY = 0.99


class DynamicWeightsParams(Params, frozen=True, kw_only=True):
    #: Hit rates (0..1) above which the cache counts most, and below which the load does.
    high_hit_rate: Share = 0.7
    low_hit_rate: Share = 0.2
    top_k: Annotated[int, Meta(ge=1)] = 3


class DynamicWeights(Profile):
    """Hits are those that were expected at the chosen endpoints."""

    type = "dynamic-weights"
    Params = DynamicWeightsParams
    takes_filters = True

    def __init__(
        self, params: DynamicWeightsParams | None = None, name: str = type, filters: Sequence[Filter] = ()
    ) -> None:
        params = params or DynamicWeightsParams()
        prefix, load = PrefixAware(PrefixAwareParams()), LoadAware(LoadAwareParams())
        super().__init__(name, filters, [(prefix, MIDDLE[0]), (load, MIDDLE[1])], TopK(TopKParams(k=params.top_k)))
        self._high, self._low = params.high_hit_rate, params.low_hit_rate
        self._ways = {
            pair: ((prefix, pair[0], scalar(pair[0])), (load, pair[1], scalar(pair[1]))) for pair in (HIGH, LOW, MIDDLE)
        }
        self._hits = self._tokens = 0.0

    @property
    def hit_rate(self) -> float:
        """Share of recent prompt tokens that were expected to be cached; 0.5 before any."""
        return self._hits / self._tokens if self._tokens else 0.5

    def choose(self, requests: Sequence[Request], fleet: Fleet, context: Context) -> list[Pick]:
        rate = self.hit_rate
        self._weighted = self._ways[HIGH if rate > self._high else LOW if rate < self._low else MIDDLE]
        picks = super().choose(requests, fleet, context)
        for request, pick in zip(requests, picks, strict=True):
            if pick.slot >= 0:
                self._hits = MEMORY * self._hits + pick.hit_share * request.prompt_tokens
                self._tokens = MEMORY * self._tokens + request.prompt_tokens
        return picks
