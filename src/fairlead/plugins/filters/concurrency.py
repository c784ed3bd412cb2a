"""`concurrency`: avoid endpoints that have as many of our requests, or prompt tokens, in flight as they can take."""

from typing import Annotated, Literal

from msgspec import Meta

from fairlead.fleet.columns import BoolColumn, FloatColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.masks import below
from fairlead.plugins.params import Params
from fairlead.schedule.cycle import Cycle


class ConcurrencyParams(Params, frozen=True, kw_only=True):
    #: Requests in flight that an endpoint takes.
    max_concurrency: Annotated[float, Meta(gt=0)] = 100.0
    #: Uncached prompt tokens before their first token that it takes.
    max_token_concurrency: Annotated[float, Meta(gt=0)] = 1_000_000.0
    #: What counts; `hybrid` is the higher of both.
    concurrency_mode: Literal["requests", "tokens", "hybrid"] = "requests"
    #: How far past 1 an endpoint may be and still be kept.
    headroom: Annotated[float, Meta(ge=0)] = 0.0


class Concurrency:
    """Keeps endpoints with in-flight / maximum < 1 + headroom.

    Source: the reference picker's concurrency-detector, used as a filter.
    """

    type = "concurrency"
    Params = ConcurrencyParams
    hard = False

    def __init__(self, params: ConcurrencyParams, name: str = type) -> None:
        self.name = name
        self._params = params

    def keep(self, request: Request, fleet: Fleet, cycle: Cycle) -> BoolColumn | None:
        return below(self._ratio(fleet), 1.0 + self._params.headroom)

    def _ratio(self, fleet: Fleet) -> FloatColumn:
        requests = fleet.table.inflight / self._params.max_concurrency
        if self._params.concurrency_mode == "requests":
            return requests
        tokens = fleet.table.pending_tokens / self._params.max_token_concurrency
        return tokens if self._params.concurrency_mode == "tokens" else requests.clip(min=tokens)
