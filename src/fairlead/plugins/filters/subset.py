"""`subset`: only endpoints that the gateway's subset hint names.

An entry is `ip:port` or `ip` (all ports), IPv6 in brackets or, without a port, bare. No hint means no restriction; an
empty hint allows nothing.
Source: Gateway API Inference Extension, endpoint picker protocol 1.0.
"""

from fairlead.fleet.columns import BoolColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.params import NoParams
from fairlead.schedule.cycle import Cycle


class Subset:
    """Keeps endpoints whose address, or its host part, is in the request's subset."""

    type = "subset"
    Params = NoParams
    hard = True
    steady = True

    def __init__(self, params: NoParams, name: str = type) -> None:
        self.name = name

    def keep(self, request: Request, fleet: Fleet, cycle: Cycle) -> BoolColumn | None:
        subset = request.subset
        if subset is None:
            return None
        return fleet.table.keeping(("subset", subset), lambda _, e: _named(e.address, subset))


def _named(address: str, subset: frozenset[str]) -> bool:
    if address in subset:
        return True
    host = address.rpartition(":")[0]
    return host in subset or host.strip("[]") in subset
