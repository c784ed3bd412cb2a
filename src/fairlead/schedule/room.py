"""Room that is kept for a request which flow control lets through, while a scheduler elsewhere is asked for it.

Rules
* *When* is flow control's word, *where* the scheduler's: it is asked once there is room, and may choose among the
  endpoints that have any.
* Until it is decided its room is kept, as a reservation in the ledger: what is let through meanwhile finds less. So
  those that are asked for never need more room than there is, whatever is answered, and when.
* Who waited has an endpoint already, late binding's: that is its room, and where it goes if nobody answers. Who goes at
  once has none: its room is kept where its prompt would be computed soonest. That is a place for the charge and no
  decision; if nobody answers, the built-in policy is asked.
"""

from math import inf

import numpy as np
from msgspec import Struct

from fairlead.fleet.columns import BoolColumn, FloatColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.schedule.framework import Pick


class Room(Struct):
    """`opened`: endpoints that may be sent one more request; `None` = all."""

    opened: BoolColumn | None
    #: Clock seconds since when the request has been here, and by when it must be decided.
    since: float
    until: float = inf
    #: Where it is kept; `None` = not known yet.
    pick: Pick | None = None
    #: It has waited in a queue, and `pick` was chosen for it.
    waited: bool = False
    #: Who held which slot then.
    ids: tuple[str, ...] = ()

    @property
    def slot(self) -> int:
        """-1 = not known yet."""
        return -1 if self.pick is None else self.pick.slot

    def queued_ms(self, now: float) -> float:
        """Milliseconds that it has been here, 0 if it went on at once."""
        return (now - self.since) * 1e3 if self.waited else 0.0

    def keep(self, request: Request, fleet: Fleet, hits: FloatColumn | None, able: BoolColumn | None, by: str) -> bool:
        """Find the place. `able`: where it may be. False = what was chosen is not among these."""
        pick = self.pick = self.pick or _soonest(request, fleet, hits, able)
        pick.by = pick.by or by
        self.ids = fleet.table.ids
        return able is None or bool(able[pick.slot])

    def kept(self, fleet: Fleet) -> Pick | None:
        """The place, if the endpoint is still there."""
        pick, ids = self.pick, fleet.table.ids
        if pick is None or ids is self.ids:
            return pick if self.ids else None
        slot = pick.slot
        if slot >= min(len(ids), len(self.ids)) or ids[slot] != self.ids[slot]:
            return None
        pick.second = -1  # it may have left
        return pick

    def second(self, slot: int, fleet: Fleet) -> int:
        """Who gets a request that waited, and was then sent to `slot`, if nobody is reached there: whom late binding
        had in mind; -1 = nobody."""
        pick = self.kept(fleet) if self.waited else None
        return -1 if pick is None else pick.slot if pick.slot != slot else pick.second


def _soonest(request: Request, fleet: Fleet, hits: FloatColumn | None, able: BoolColumn | None) -> Pick:
    table = fleet.table
    prompt = float(max(request.prompt_tokens, 1))
    own = prompt if hits is None else prompt * (1.0 - hits)
    work = fleet.predictor.rates.prefill[: len(table)] * (table.queued_tokens + own)
    slot = int(np.where(table.alive if able is None else able & table.alive, work, inf).argmin())
    if hits is None:
        return Pick(slot)
    return Pick(slot, hit_share=float(hits[slot]), best_share=float(hits.max()))
