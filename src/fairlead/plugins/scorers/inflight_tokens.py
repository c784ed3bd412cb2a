"""`inflight-tokens`: prefer endpoints with little prompt work ahead of their first tokens."""

from typing import Annotated

from msgspec import Meta

from fairlead.fleet.columns import FloatColumn, scalar
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.masks import not_negative
from fairlead.plugins.params import Params
from fairlead.schedule.cycle import Cycle
from fairlead.schedule.framework import prefix_share


class InflightTokensParams(Params, frozen=True, kw_only=True):
    #: Uncached prompt tokens in flight at which the score reaches 0. 65,536 is about 4 s of prefill of a 32B model.
    threshold_tokens: Annotated[float, Meta(gt=0)] = 65_536


class InflightTokens:
    """1 - (uncached tokens charged and not yet prefilled + those of this request) / threshold, at least 0."""

    type = "inflight-tokens"
    Params = InflightTokensParams
    weight = 1.0

    def __init__(self, params: InflightTokensParams, name: str = type) -> None:
        self.name = name
        self._threshold = params.threshold_tokens
        self._per_token = scalar(1.0 / params.threshold_tokens)

    def score(self, request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn | None:
        own = request.prompt_tokens / self._threshold
        score = scalar(1.0 - own) - self._per_token * fleet.table.pending_tokens
        share = prefix_share(request, fleet, cycle)
        if share is not None:
            score += scalar(own) * share
        return not_negative(score)
