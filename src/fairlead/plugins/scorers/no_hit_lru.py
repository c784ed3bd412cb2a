"""`no-hit-lru`: spread prompts that nobody knows, so that new prefixes do not pile up at one endpoint."""

from typing import Annotated

import numpy as np
from msgspec import Meta

from fairlead.fleet.columns import FloatColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.params import Params
from fairlead.schedule.cycle import Cycle
from fairlead.schedule.framework import CANDIDATES, prefix_share


class NoHitLruParams(Params, frozen=True, kw_only=True):
    #: Endpoints whose last cold request is remembered.
    lru_size: Annotated[int, Meta(ge=1)] = 1024


class NoHitLru:
    """Cold prompt: 1 for endpoints that never got one, then falling to 0 for the one that got one last. Else 0.5 for
    all.

    Source: the reference picker's no-hit-lru-scorer. There the never used are ranked among themselves as well, by
    their position in a list; here they are equal and the picker draws.
    """

    type = "no-hit-lru"
    Params = NoHitLruParams
    weight = 1.0

    def __init__(self, params: NoHitLruParams, name: str = type) -> None:
        self.name = name
        self._size = params.lru_size
        #: Endpoint ids, the one that got a cold request last at the end.
        self._used: dict[str, None] = {}

    def score(self, request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn | None:
        ids = fleet.table.ids
        if prefix_share(request, fleet, cycle) is not None:
            return np.full(len(ids), 0.5)
        candidates = cycle.get(CANDIDATES)
        slots = {name: slot for slot, name in enumerate(ids) if name and (candidates is None or candidates[slot])}
        used = [slots[name] for name in self._used if name in slots]
        score = np.ones(len(ids))
        unused = len(slots) - len(used)
        for rank, slot in enumerate(used, start=unused):
            score[slot] = 1.0 - rank / (len(slots) - 1) if len(slots) > 1 else 1.0
        return score

    def chosen(self, request: Request, slot: int, fleet: Fleet, cycle: Cycle) -> None:
        """The decision went to `slot`."""
        if prefix_share(request, fleet, cycle) is None:
            name = fleet.table.ids[slot]
            self._used.pop(name, None)
            self._used[name] = None
            if len(self._used) > self._size:
                del self._used[next(iter(self._used))]
