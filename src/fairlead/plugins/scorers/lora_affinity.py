"""`lora-affinity`: prefer endpoints that have the adapter, then those that can take it, then those that wait for it."""

import numpy as np

from fairlead.fleet.columns import FloatColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.endpoint import MODEL_LABEL
from fairlead.model.request import Request
from fairlead.plugins.params import NoParams
from fairlead.schedule.cycle import Cycle

LOADED, FREE_SLOT, WAITING = 1.0, 0.8, 0.6


class LoraAffinity:
    """1 where the adapter is loaded, 0.8 where a slot is free, 0.6 where requests wait for it already, else 0.

    Silent when no adapter is asked for: the name is an endpoint's base model (`model-id`), or nobody has LoRA on.
    Source: the reference picker's lora-affinity-scorer.
    """

    type = "lora-affinity"
    Params = NoParams
    weight = 1.0

    def __init__(self, params: NoParams, name: str = type) -> None:
        self.name = name

    def score(self, request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn | None:
        table, model = fleet.table, request.target_model
        if not model or not np.count_nonzero(table.max_adapters):
            return None
        if np.count_nonzero(table.mask(("base", model), lambda _, e: e.labels.get(MODEL_LABEL) == model)):
            return None
        queued = [frozenset[str]() if sample is None else sample.waiting_adapters for sample in table.samples]
        waiting = np.fromiter((model in names for names in queued), np.bool_, len(queued))
        taken = table.loaded_adapters + np.fromiter(map(len, queued), np.float64, len(queued))
        score = np.where(waiting, WAITING, 0.0)
        score[taken < table.max_adapters] = FREE_SLOT
        loaded = table.holders(model)
        if loaded is not None:
            score[loaded] = LOADED
        return score
