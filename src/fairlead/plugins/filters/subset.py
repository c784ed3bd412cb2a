"""`subset`: only endpoints that the gateway's subset hint names.

An entry is `ip:port` or `ip` (all ports), IPv6 in brackets. No hint means no restriction; an empty hint allows nothing.
Source: Gateway API Inference Extension, endpoint picker protocol 1.0.
"""

from fairlead.fleet.columns import BoolColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.masks import unless_all
from fairlead.plugins.params import NoParams
from fairlead.schedule.cycle import Cycle


class Subset:
    """Keeps endpoints whose address, or its host part, is in the request's subset."""

    type = "subset"
    Params = NoParams
    hard = True

    def __init__(self, params: NoParams, name: str = type) -> None:
        self.name = name

    def keep(self, request: Request, fleet: Fleet, cycle: Cycle) -> BoolColumn | None:
        subset = request.subset
        if subset is None:
            return None
        key = ("subset", *sorted(subset))
        return unless_all(
            fleet.table.mask(key, lambda _, e: e.address in subset or e.address.rpartition(":")[0] in subset)
        )
