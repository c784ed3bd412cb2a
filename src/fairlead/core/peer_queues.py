"""What other schedulers of the pool hold in their queues, as they told (`fairlead.core.facts.Held`).

Rules
* Bands are strict over all schedulers: while a peer holds a request of a higher band, an endpoint that opens is left to
  it for `YIELD_S`. What it has not taken by then it cannot use, and a lower band may.
* Service counts over all: what a peer gave a flow moves the flow's turn here, too.
* Limits of an endpoint may be exceeded by one request per further scheduler that holds one of the same band: each sees
  it open, and hears of the others' charges only later.
"""

from collections.abc import Iterable
from math import inf

import numpy as np

from fairlead.core.columns import BoolColumn
from fairlead.core.facts import Held
from fairlead.core.flow import FlowKey
from fairlead.core.queues import Queues

#: Longer than a peer takes to hear that an endpoint opened, and to be heard that it sent a request there.
YIELD_S = 0.05
#: Flows kept of one peer: clients choose tenants' names.
MOST_FLOWS = 10_000


class PeerQueues:
    """By origin. Priority `top` is the highest that waits anywhere else; -inf = nobody does."""

    def __init__(self) -> None:
        self._held: dict[str, dict[FlowKey, Held]] = {}
        self._waiting: dict[int, int] = {}
        self.top = -inf
        self._open_since: dict[int, float] = {}

    def take(self, origin: str, held: Iterable[Held], queues: Queues, now: float) -> None:
        """A peer told of these flows; of others nothing has changed."""
        flows = self._held.setdefault(origin, {})
        for flow in held:
            key = FlowKey(flow.priority, flow.model, flow.tenant)
            before = flows.get(key)
            if before is None and len(flows) >= MOST_FLOWS:
                continue
            flows[key] = flow
            # A smaller sum than before is that of a flow which was forgotten there meanwhile.
            if before is not None and flow.served_ms != before.served_ms:
                credited = before.served_ms if before.served_ms < flow.served_ms else 0.0
                queues.served_elsewhere(key, flow.served_ms - credited, now)
            self._count(flow.priority, flow.count - (before.count if before is not None else 0))

    def drop(self, origin: str) -> None:
        """It is lost, and so is what waited there."""
        for flow in self._held.pop(origin, {}).values():
            self._count(flow.priority, -flow.count)

    def _count(self, priority: int, more: int) -> None:
        if more:
            self._waiting[priority] = self._waiting.get(priority, 0) + more
            self.top = max((band for band, count in self._waiting.items() if count), default=-inf)

    def beside(self, only: FlowKey) -> bool:
        """Whether some peer has requests of another flow."""
        return any(key != only and flow.wanted for flows in self._held.values() for key, flow in flows.items())

    def reopen(self) -> None:
        """Nobody has looked for a while: what is open counts as opened now."""
        self._open_since.clear()

    def waiting(self, key: FlowKey) -> int:
        """Requests of the flow that wait elsewhere."""
        return sum(flows[key].count for flows in self._held.values() if key in flows)

    def left(self, priority: int, opened: BoolColumn, now: float) -> tuple[BoolColumn, float]:
        """Of the endpoints that are open those that a band may have, and the clock seconds when it may have more."""
        slots = np.flatnonzero(opened).tolist()
        self._open_since = {slot: self._open_since.get(slot, now) for slot in slots}
        if priority >= self.top:
            return opened, inf
        yielded = [slot for slot in slots if now < self._open_since[slot] + YIELD_S]
        if not yielded:
            return opened, inf
        opened = opened.copy()
        opened[yielded] = False
        return opened, min(self._open_since[slot] for slot in yielded) + YIELD_S
