"""Scorers that prefer endpoints with the beginning of the prompt cached, and spread prompts that are cached nowhere."""

import numpy as np
from pydantic import Field

from fairlead.core.columns import FloatColumn
from fairlead.core.policy import CANDIDATES, Cycle, prefix_share
from fairlead.core.request import Request
from fairlead.core.view import FleetView
from fairlead.plugins.params import Params, Plain


class PrefixAwareParams(Params):
    hash_block_size: int = Field(
        default=5,
        ge=1,
        le=1024,
        description="Tokens of the finest hash block; blocks grow with depth. 3–20 for short prompts, 64 suits most.",
    )
    cache_indexer_url: str = Field(
        default="",
        validation_alias="cacheIndexerURL",
        serialization_alias="cacheIndexerURL",
        description="URL of a KV-cache indexer to ask for exact matches.",
    )


class PrefixAware(Plain[PrefixAwareParams]):
    """The share of the prompt, from its beginning, that is cached: 0..1."""

    type = "prefix-aware"
    Params = PrefixAwareParams
    weight = 100.0

    def score(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn | None:
        return prefix_share(request, fleet, cycle)


# `prefix-length`: prefers endpoints that hold much of the prompt. In addition, the length of the match counts.


class PrefixLengthParams(Params):
    match_length_weight: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of the score that the length of the match decides; the rest is the matched share of the "
        "prompt.",
    )
    match_length_scale_tokens: int = Field(default=8192, ge=1, description="Matched tokens that count as full.")


class PrefixLength(Plain[PrefixLengthParams]):
    """w · min(1, matched tokens / scale)² + (1 - w) · matched share.

    Source: the reference picker's prefix-cache-scorer.
    """

    type = "prefix-length"
    Params = PrefixLengthParams

    def score(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn | None:
        share = prefix_share(request, fleet, cycle)
        if share is None:
            return None
        length = np.minimum(share * (request.prompt_tokens / self._params.match_length_scale_tokens), 1.0)
        weight = self._params.match_length_weight
        return np.clip(weight * length * length + (1.0 - weight) * share, 0.0, 1.0)


class NoHitLruParams(Params):
    lru_size: int = Field(default=1024, ge=1, description="Endpoints whose last cold request is remembered.")


class NoHitLru(Plain[NoHitLruParams]):
    """For a prompt that is cached nowhere (cold), scores fall from 1 to 0: first the endpoints that never got a cold
    prompt, in pool order, then the others, the least recent first. For other prompts 0.5 for all.

    Source: the reference picker's no-hit-lru-scorer.
    """

    type = "no-hit-lru"
    Params = NoHitLruParams

    def __init__(self, params: NoHitLruParams, name: str = type) -> None:
        super().__init__(params, name)
        #: Endpoint ids in the order of their last cold request.
        self._used: dict[str, None] = {}

    def score(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn | None:
        ids = fleet.table.ids
        if prefix_share(request, fleet, cycle) is not None:
            return np.full(len(ids), 0.5)
        candidates = cycle.get(CANDIDATES)
        slots = {name: slot for slot, name in enumerate(ids) if name and (candidates is None or candidates[slot])}
        unused = [slot for name, slot in slots.items() if name not in self._used]
        score = np.ones(len(ids))
        for rank, slot in enumerate(unused + [slots[name] for name in self._used if name in slots]):
            score[slot] = 1.0 - rank / max(len(slots) - 1, 1)
        return score

    def chosen(self, request: Request, slot: int, fleet: FleetView, cycle: Cycle) -> None:
        """Remember the endpoint if the prompt is cold."""
        if prefix_share(request, fleet, cycle) is None:
            name = fleet.table.ids[slot]
            self._used.pop(name, None)
            self._used[name] = None
            if len(self._used) > self._params.lru_size:
                del self._used[next(iter(self._used))]
