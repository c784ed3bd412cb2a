"""`session-affinity`: keep a session at one endpoint.

Rendezvous hashing: the session's endpoint is the one with the highest hash of (session, endpoint id). Nothing is
stored, so several schedulers agree, a restart forgets nothing, and when an endpoint leaves only its sessions move.
"""

from collections import OrderedDict

import numpy as np
from xxhash import xxh3_64_intdigest

from fairlead.fleet.columns import FloatColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.params import NoParams
from fairlead.schedule.cycle import Cycle

_CACHE = 4096


class SessionAffinity:
    """1 for the session's endpoint, 0 for the others. Silent for requests without a session."""

    type = "session-affinity"
    Params = NoParams
    weight = 1.0

    def __init__(self, params: NoParams, name: str = type) -> None:
        self.name = name
        self._homes: OrderedDict[tuple[int, str], int] = OrderedDict()

    def score(self, request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn | None:
        if not request.session:
            return None
        key = (fleet.table.version, request.session)
        home = self._homes.get(key)
        if home is None:
            seed = xxh3_64_intdigest(request.session.encode())
            home = max(fleet.table.slots(), key=lambda entry: xxh3_64_intdigest(entry[1].id.encode(), seed))[0]
            self._homes[key] = home
            if len(self._homes) > _CACHE:
                self._homes.popitem(last=False)
        column = np.zeros(len(fleet.table))
        column[home] = 1.0
        return column
