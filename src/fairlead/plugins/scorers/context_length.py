"""`context-length`: prefer endpoints that are meant for prompts of this length, by a label such as `0-8192`."""

import numpy as np

from fairlead.fleet.columns import FloatColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.context_ranges import LABEL, ContextRanges
from fairlead.plugins.params import Params
from fairlead.schedule.cycle import Cycle

UNLABELLED = 0.5


class ContextLengthScorerParams(Params, frozen=True, kw_only=True):
    #: Label with the range, in tokens.
    label: str = LABEL


class ContextLengthScorer:
    """In range 0.3 + 0.7 · (0.7 / (1 + width/10000) + 0.3 · headroom/width); outside 0.3 / (1 + distance/1000); 0.5
    without a label.

    Narrow ranges win over wide ones, then those with room above the prompt. Source: the reference picker's
    context-length-aware.
    """

    type = "context-length"
    Params = ContextLengthScorerParams
    weight = 1.0

    def __init__(self, params: ContextLengthScorerParams, name: str = type) -> None:
        self.name = name
        self._ranges = ContextRanges(params.label)

    def score(self, request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn | None:
        if not self._ranges.read(fleet):
            return None
        low, high, tokens = self._ranges.low, self._ranges.high, float(request.prompt_tokens)
        width = np.maximum(high - low, 1.0)
        inside = 0.3 + 0.7 * (0.7 / (1.0 + width / 10_000.0) + 0.3 * (high - tokens) / width)
        distance = np.maximum(low - tokens, tokens - high)
        outside = 0.3 / (1.0 + np.maximum(distance, 0.0) / 1000.0)
        score = np.where(distance <= 0, np.clip(inside, 0.0, 1.0), outside)
        return np.where(np.isnan(low), UNLABELLED, score)
