"""`prefix-length`: prefer endpoints that hold much of the prompt, where a long match counts for more than a short
one."""

from typing import Annotated

import numpy as np
from msgspec import Meta

from fairlead.fleet.columns import FloatColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.params import Params
from fairlead.schedule.cycle import Cycle
from fairlead.schedule.framework import prefix_share


class PrefixLengthParams(Params, frozen=True, kw_only=True):
    #: Share of the score that the length of the match decides; the rest is the matched share of the prompt.
    match_length_weight: Annotated[float, Meta(ge=0, le=1)] = 0.0
    #: Matched tokens that count as full.
    match_length_scale_tokens: Annotated[int, Meta(ge=1)] = 8192


class PrefixLength:
    """w · min(1, matched tokens / scale)² + (1 - w) · matched share.

    Source: the reference picker's prefix-cache-scorer.
    """

    type = "prefix-length"
    Params = PrefixLengthParams
    weight = 1.0

    def __init__(self, params: PrefixLengthParams, name: str = type) -> None:
        self.name = name
        self._weight = params.match_length_weight
        self._scale = params.match_length_scale_tokens

    def score(self, request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn | None:
        share = prefix_share(request, fleet, cycle)
        if share is None:
            return None
        length = np.minimum(share * (request.prompt_tokens / self._scale), 1.0)
        return np.clip(self._weight * length * length + (1.0 - self._weight) * share, 0.0, 1.0)
