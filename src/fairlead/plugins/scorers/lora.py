"""Scorers that prefer endpoints with the requested adapter loaded."""

import numpy as np

from fairlead.core.columns import FloatColumn
from fairlead.core.policy import Cycle
from fairlead.core.request import Request
from fairlead.core.table import EndpointTable
from fairlead.core.view import FleetView
from fairlead.plugins.params import NoParams, Plain


def _is_adapter(model: str, table: EndpointTable) -> bool:
    """A name counts as an adapter unless it is an endpoint's base model, or no endpoint has LoRA slots."""
    if not model or not np.count_nonzero(table.max_adapters):
        return False
    return not np.count_nonzero(table.base(model))


class LoraAware(Plain[NoParams]):
    """1 where the adapter is loaded, 0.5 where a slot is free, else 0. No score if no adapter is requested."""

    type = "lora-aware"
    weight = 100.0

    def score(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn | None:
        table, model = fleet.table, request.target_model
        if not _is_adapter(model, table):
            return None
        score = np.where(table.loaded_adapters < table.max_adapters, 0.5, 0.0)
        loaded = table.holders(model)
        if loaded is not None:
            score[loaded] = 1.0
        return score


LOADED, FREE_SLOT, WAITING = 1.0, 0.8, 0.6


class LoraAffinity(Plain[NoParams]):
    """1 where the adapter is loaded, 0.8 where a slot is free, 0.6 where requests already wait for it, else 0.

    No score if no adapter is requested. Source: the reference picker's lora-affinity-scorer.
    """

    type = "lora-affinity"

    def score(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn | None:
        table, model = fleet.table, request.target_model
        if not _is_adapter(model, table):
            return None
        queued = table.waiting_adapters
        waiting = np.fromiter((model in names for names in queued), np.bool_, len(queued))
        taken = table.loaded_adapters + np.fromiter(map(len, queued), np.float64, len(queued))
        score = np.where(waiting, WAITING, 0.0)
        score[taken < table.max_adapters] = FREE_SLOT
        loaded = table.holders(model)
        if loaded is not None:
            score[loaded] = LOADED
        return score
