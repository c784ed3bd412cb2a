"""`model-compatibility`: only endpoints that serve the requested model or adapter.

vLLM lists an adapter only while requests use it (`vllm:lora_requests_info`), so "not listed" does not mean "not there".
An endpoint is kept when one of these holds:

* its label `model-id` is the requested model, or it has no such label (nothing is known of it);
* the requested name is an adapter that it reports, or that its label `lora-adapters` (comma list) promises;
* nobody reports the name, and it has adapter slots: it may load it on demand.
"""

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

    def __init__(self, params: NoParams, name: str = type) -> None:
        self.name = name

    def keep(self, request: Request, fleet: Fleet, cycle: Cycle) -> BoolColumn | None:
        model = request.model
        if not model:
            return None
        table = fleet.table
        return unless_all(table.mask(("model", model), lambda slot, e: _serves(table, slot, e, model)))


def _serves(table: EndpointTable, slot: int, endpoint: Endpoint, model: str) -> bool:
    label = endpoint.labels.get(MODEL_LABEL)
    if label == model or _has_adapter(table, slot, endpoint, model):
        return True
    if any(_has_adapter(table, other, e, model) for other, e in table.slots()):
        return False
    return label is None or table.max_adapters[slot] > 0


def _has_adapter(table: EndpointTable, slot: int, endpoint: Endpoint, model: str) -> bool:
    adapters = table.adapters[slot]
    if adapters and model in adapters:
        return True
    promised = endpoint.labels.get(ADAPTERS_LABEL, "")
    return bool(promised) and model in [name.strip() for name in promised.split(",")]
