"""`sglang-cache-aware`: the rule of SGLang's router.

Where loads differ too much (max - min > 64 requests and max > 1.5 · min) the shortest queue; else the longest match if
it is more than 0.3 of the prompt; else the endpoint that was sent the fewest new tokens (the smallest tree).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fairlead.fleet.columns import FloatColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.policies.ranked import Ranked
from fairlead.schedule.cycle import Cycle
from fairlead.schedule.framework import Filter, prefix_share

MAX_DIFFERENCE = 64
MAX_RATIO = 1.5
MIN_MATCH = 0.3
#: Trees shrink as engines evict: half of what was sent is forgotten after so many tokens.
TREE_TOKENS = 1_000_000.0


class SglangCacheAware(Ranked):
    """Remembers only how much each endpoint was sent."""

    type = "sglang-cache-aware"

    def __init__(self, params: Any = None, name: str = type, filters: Sequence[Filter] = ()) -> None:
        super().__init__(params, name, filters)
        #: New tokens sent, by endpoint id.
        self.trees: dict[str, float] = {}

    def cost(self, request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn:
        table = fleet.table
        load = table.queue + table.active
        living = load[table.alive]
        if living.max() - living.min() > MAX_DIFFERENCE and living.max() > MAX_RATIO * living.min():
            return load
        share = prefix_share(request, fleet, cycle)
        if share is not None and share[table.alive].max() > MIN_MATCH:
            return -share
        trees = self.trees
        return np.array([trees.get(name, 0.0) for name in table.ids])

    def sent(self, request: Request, slot: int, fleet: Fleet, cycle: Cycle) -> None:
        share = prefix_share(request, fleet, cycle)
        new = request.prompt_tokens * (1.0 - (float(share[slot]) if share is not None else 0.0))
        ids = fleet.table.ids
        trees = self.trees
        if len(trees) > 2 * len(ids):
            for name in trees.keys() - set(ids):
                del trees[name]
        name = ids[slot]
        trees[name] = trees.get(name, 0.0) * 0.5 ** (new / TREE_TOKENS) + new
