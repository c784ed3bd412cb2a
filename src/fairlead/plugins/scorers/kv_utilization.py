"""`kv-utilization`: prefer endpoints with free KV memory."""

from fairlead.fleet.columns import FloatColumn, scalar
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.params import NoParams
from fairlead.schedule.cycle import Cycle

_ONE = scalar(1.0)


class KvUtilization:
    """1 - share of KV blocks held by running requests, as scraped."""

    type = "kv-utilization"
    Params = NoParams
    weight = 1.0

    def __init__(self, params: NoParams, name: str = type) -> None:
        self.name = name

    def score(self, request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn | None:
        return _ONE - fleet.table.kv
