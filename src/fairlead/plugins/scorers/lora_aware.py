"""`lora-aware`: prefer endpoints that have the requested adapter loaded, then those with a free slot."""

import numpy as np

from fairlead.fleet.columns import FloatColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.endpoint import MODEL_LABEL
from fairlead.model.request import Request
from fairlead.plugins.params import NoParams
from fairlead.schedule.cycle import Cycle


class LoraAware:
    """1 where the adapter is loaded, 0.5 where a slot is free, else 0. Silent when no adapter is asked for.

    A name counts as an adapter unless an endpoint carries it as its base model (`model-id`), or nobody has LoRA on.
    """

    type = "lora-aware"
    Params = NoParams
    weight = 100.0

    def __init__(self, params: NoParams, name: str = type) -> None:
        self.name = name

    def score(self, request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn | None:
        table, model = fleet.table, request.target_model
        if not model or not np.count_nonzero(table.max_adapters):
            return None
        is_base = table.mask(("base", model), lambda _, e: e.labels.get(MODEL_LABEL) == model)
        if np.count_nonzero(is_base):
            return None
        score = np.where(table.loaded_adapters < table.max_adapters, 0.5, 0.0)
        loaded = table.holders(model)
        if loaded is not None:
            score[loaded] = 1.0
        return score
