"""Eviction: sheddable requests that run make way for more important ones that wait.

Only requests with a priority below 0 are evicted, for requests of a strictly higher priority, and only where that one
could run: the lowest priority first, of those the newest, which has the least to lose.

Rules
* A victim counts as gone when its lease is: the actuator closes its stream, and the gateway tells the model server,
  which gives up its memory within 0.3 s (measured, vLLM 0.32). Until then, and for `GRACE` seconds after the decision,
  nobody else is evicted: else one shortage would cost many victims.
* Whose end nobody confirms within `CONFIRM` seconds is not waited for, and not evicted a second time.
* At most `AT_ONCE` per decision.
"""

from math import inf

from fairlead.admit.control import FlowControl
from fairlead.admit.queues import Band
from fairlead.fleet.fleet import Fleet
from fairlead.fleet.ledger import Lease

GRACE = 0.5
CONFIRM = 10.0
AT_ONCE = 2


class Eviction:
    """`after`: seconds that a request must have waited before others make way for it. Raises `ValueError` if < 0."""

    def __init__(self, after: float = 0.25) -> None:
        if not after >= 0:
            raise ValueError("a time must not be negative")
        self._after = after
        #: Victims by request id, and when they were told.
        self._told: dict[int, float] = {}
        self._last = -inf

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._told

    def victims(self, flow: FlowControl, fleet: Fleet, now: float) -> list[Lease]:
        """Who has to go now."""
        self._told = {number: at for number, at in self._told.items() if fleet.ledger.get(number) is not None}
        if self.look_at(flow) > now or any(now < at + CONFIRM for at in self._told.values()):
            return []
        for band in flow.queues.bands():
            if band.count and band.oldest() + self._after <= now:
                found = self._for(band, flow, fleet, now)
                if found:
                    self._last = now
                    self._told.update((lease.request.id, now) for lease in found)
                    return found
        return []

    def _for(self, band: Band, flow: FlowControl, fleet: Fleet, now: float) -> list[Lease]:
        ledger = fleet.ledger
        running = [
            lease
            for slot, _ in fleet.table.slots()
            for lease in ledger.of_slot(slot)
            if lease.request.priority < min(band.priority, 0) and 0 <= lease.request.id not in self._told
        ]
        if not running:
            return []
        # What was known when it was queued may be of other endpoints at these slots.
        able = flow.binder.able(band.longest_waiting().request, fleet, now)
        if able is not None:
            running = [lease for lease in running if able[lease.slot]]
        running.sort(key=lambda lease: (lease.request.priority, -lease.charged_at, -lease.request.id))
        return running[:AT_ONCE]

    def look_at(self, flow: FlowControl) -> float:
        """Clock seconds before which nobody is evicted; `inf` = nobody waits."""
        oldest = min((band.oldest() for band in flow.queues.bands() if band.count), default=inf)
        return max(oldest + self._after, self._last + GRACE)
