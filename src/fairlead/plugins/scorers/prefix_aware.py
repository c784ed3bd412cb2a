"""`prefix-aware`: prefer endpoints that already hold the beginning of the prompt."""

from typing import Annotated

from msgspec import Meta, field

from fairlead.fleet.columns import FloatColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.params import Params
from fairlead.schedule.cycle import Cycle
from fairlead.schedule.framework import prefix_share


class PrefixAwareParams(Params, frozen=True, kw_only=True):
    #: Tokens of the finest hash block; blocks grow with depth. 3–20 for short prompts, 64 suits most.
    hash_block_size: Annotated[int, Meta(ge=1, le=1024)] = 5
    #: URL of a KV-cache indexer to ask for exact matches.
    cache_indexer_url: str = field(default="", name="cacheIndexerURL")


class PrefixAware:
    """Contiguously matched share of the prompt, 0..1."""

    type = "prefix-aware"
    Params = PrefixAwareParams
    weight = 100.0

    def __init__(self, params: PrefixAwareParams, name: str = type) -> None:
        self.name = name
        self.params = params

    def score(self, request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn | None:
        return prefix_share(request, fleet, cycle)
