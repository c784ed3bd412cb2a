"""`model-compatibility`: only endpoints that serve the requested model or adapter.

vLLM lists an adapter only while requests use it (`vllm:lora_requests_info`), so "nobody lists it" does not mean
"nobody has it". An endpoint is kept when

* its label `model-id` is the requested model, or
* it reports the requested name as an adapter, or its label `lora-adapters` (comma list) promises it, or
* nobody reports or promises the name, and it has no label `model-id` (nothing is known of it), or
* nobody reports or promises the name or has it as `model-id`, and it has adapter slots (it may load it on demand).
"""

import numpy as np

from fairlead.fleet.columns import BoolColumn
from fairlead.fleet.fleet import Fleet
from fairlead.fleet.table import EndpointTable
from fairlead.model.endpoint import MODEL_LABEL, Endpoint
from fairlead.model.request import Request
from fairlead.plugins.masks import unless_all
from fairlead.plugins.params import NoParams
from fairlead.schedule.cycle import Cycle

ADAPTERS_LABEL = "lora-adapters"


class ModelCompatibility:
    """Keeps endpoints that can serve the request's model. Requests without a model pass everywhere."""

    type = "model-compatibility"
    Params = NoParams
    hard = True
    steady = True

    def __init__(self, params: NoParams, name: str = type) -> None:
        self.name = name

    def keep(self, request: Request, fleet: Fleet, cycle: Cycle) -> BoolColumn | None:
        model = request.target_model
        if not model:
            return None
        return fleet.table.answer(("compatible", model), lambda: _compatible(fleet.table, model))


def _compatible(table: EndpointTable, model: str) -> BoolColumn | None:
    promised = table.mask(("promised", model), lambda _, e: _promises(e, model))
    loaded = table.holders(model)
    if loaded is not None or np.count_nonzero(promised):
        able = promised | _has_base(table, model)
        return unless_all(able if loaded is None else able | loaded)
    plain = table.keeping(("serves", model), lambda _, e: e.labels.get(MODEL_LABEL, model) == model)
    if plain is None or np.count_nonzero(_has_base(table, model)):
        return plain
    return unless_all(plain | (table.max_adapters > 0))


def _has_base(table: EndpointTable, model: str) -> BoolColumn:
    return table.mask(("base", model), lambda _, e: e.labels.get(MODEL_LABEL) == model)


def _promises(endpoint: Endpoint, model: str) -> bool:
    promised = endpoint.labels.get(ADAPTERS_LABEL, "")
    return bool(promised) and model in [name.strip() for name in promised.split(",")]
