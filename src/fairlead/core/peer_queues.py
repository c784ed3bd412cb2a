"""What other schedulers of the pool hold in their queues, as they told (`fairlead.core.facts.Held`).

Rules
* Bands are strict over all schedulers: while a peer holds a request of a higher band, an endpoint that opens is left to
  it for `YIELD` times as long as it takes to hear of each other. What it has not taken by then it cannot use, and a
  lower band may.
* Within a band, who holds the oldest request goes first, and the next one `TURN` times as long later, and so on: by
  then it has heard of a charge that closes the endpoint. If all went at once, they would meet at one endpoint.
* Service counts over all: what a peer gave a flow moves the flow's turn here, too.
"""

from collections.abc import Iterable
from math import inf

from fairlead.core.columns import BoolColumn
from fairlead.core.facts import AGE_UNIT, Held
from fairlead.core.flow import FlowKey
from fairlead.core.queues import Queues
from fairlead.core.table import EndpointTable

#: Multiples of the mean time from a charge until others know.
YIELD, TURN = 8.0, 3.0
#: That time, as long as it is not measured, and its bounds. Seconds.
DELAY_S, LEAST_S, MOST_S = 0.0125, 0.005, 0.1
#: Flows kept of one peer: clients choose tenants' names.
MOST_FLOWS = 10_000


class PeerQueues:
    """By origin. Priority `top` is the highest that waits anywhere else; -inf = nobody does."""

    def __init__(self) -> None:
        self._held: dict[str, dict[FlowKey, Held]] = {}
        self._waiting: dict[int, int] = {}
        self.top = -inf
        #: By slot: since when it is open to one more, and how many wait there for their first token.
        self._open_since: dict[int, tuple[float, float]] = {}
        #: By origin and priority: flows that wait, and since when their first request does. Clock seconds.
        self._heads: dict[tuple[str, int], dict[FlowKey, float]] = {}
        self._delay_s = DELAY_S

    def measured(self, delay_s: float) -> None:
        """From a charge until others know."""
        self._delay_s = min(max(delay_s, LEAST_S), MOST_S)

    def take(self, origin: str, held: Iterable[Held], queues: Queues, now: float) -> None:
        """A peer told of these flows; of others nothing has changed."""
        flows = self._held.setdefault(origin, {})
        for flow in held:
            key = FlowKey(flow.priority, flow.model, flow.tenant)
            before = flows.get(key)
            if before is None and len(flows) >= MOST_FLOWS:
                continue
            flows[key] = flow
            heads = self._heads.setdefault((origin, flow.priority), {})
            if flow.count:
                heads[key] = now - flow.age * AGE_UNIT
            else:
                heads.pop(key, None)
            # A smaller sum than before is that of a flow which was forgotten there meanwhile.
            if before is not None and flow.served_ms != before.served_ms:
                credited = before.served_ms if before.served_ms < flow.served_ms else 0.0
                queues.served_elsewhere(key, flow.served_ms - credited, now)
            self._count(flow.priority, flow.count - (before.count if before is not None else 0))

    def drop(self, origin: str) -> None:
        """It is lost, and so is what waited there."""
        for flow in self._held.pop(origin, {}).values():
            self._count(flow.priority, -flow.count)
            self._heads.pop((origin, flow.priority), None)

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

    def ahead(self, priority: int, since: float) -> int:
        """Others who hold an older request of the band."""
        return sum(
            band == priority and min(heads.values(), default=inf) < since for (_, band), heads in self._heads.items()
        )

    def left(
        self, priority: int, since: float, opened: BoolColumn, table: EndpointTable, now: float
    ) -> tuple[BoolColumn, float]:
        """Of the endpoints that are open those that a band may have whose oldest request waits `since` then, and the
        clock seconds when it may have more."""
        slots: list[int] = opened.nonzero()[0].tolist()
        before, self._open_since = self._open_since, {}
        for slot in slots:
            opened_at, pending = before.get(slot, (now, inf))
            there = table.pending.item(slot)
            self._open_since[slot] = (now if there > pending else opened_at), there
        turns = YIELD if priority < self.top else TURN * self.ahead(priority, since)
        wait_s = turns * self._delay_s
        yielded = [slot for slot in slots if now < self._open_since[slot][0] + wait_s]
        if not yielded:
            return opened, inf
        opened = opened.copy()
        opened[yielded] = False
        return opened, min(self._open_since[slot][0] for slot in yielded) + wait_s
