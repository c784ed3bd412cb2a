"""`sticky-until-saturated`: stay where the prompt is cached until that costs 18 s of waiting, else the least tokens.

The default of the reference picker's guides since August 2026: its prefix-cache-affinity filter, then token load.
"""

from collections.abc import Sequence
from typing import Any

from fairlead.plugins.filters.prefix_affinity import PrefixAffinity, PrefixAffinityParams
from fairlead.plugins.params import NoParams
from fairlead.plugins.pickers.max_score import MaxScore, MaxScoreParams
from fairlead.plugins.scorers.inflight_tokens import InflightTokens, InflightTokensParams
from fairlead.schedule.framework import Filter
from fairlead.schedule.profile import Profile

#: Tokens in flight at which an endpoint counts as full.
QUEUE_THRESHOLD_TOKENS = 4_194_304


class StickyUntilSaturated(Profile):
    """The filter is the last one, behind those that are configured."""

    type = "sticky-until-saturated"
    Params = NoParams
    takes_filters = True

    def __init__(self, params: Any = None, name: str = type, filters: Sequence[Filter] = ()) -> None:
        load = InflightTokens(InflightTokensParams(threshold_tokens=QUEUE_THRESHOLD_TOKENS))
        super().__init__(
            name,
            [*filters, PrefixAffinity(PrefixAffinityParams())],
            [(load, 1.0)],
            MaxScore(MaxScoreParams(near_tie=0.0)),
        )
