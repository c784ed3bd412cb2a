"""The queues of the pool's other schedulers (peers), as they report them (`fairlead.core.facts.Held`).

Rules
* Bands are strict across all schedulers: while a peer holds a request of a higher band, an endpoint that opens is left
  to the peer for `YIELD` times the report delay between schedulers. If the peer has not used it by then, it cannot, and
  a lower band may.
* Within a band, the scheduler with the oldest request goes first. Each next one goes `TURN` times the delay later: by
  then a charge that closes the endpoint has been reported to it. If all went at the same time, they would choose the
  same endpoint. The age says nothing of fairness: of two flows that wait at different schedulers, the one with the
  deeper queue gets more.
* Work is counted across all schedulers: what a peer gave to a flow moves the flow's turn here, too.
"""

from collections import OrderedDict
from collections.abc import Sequence
from math import inf

from msgspec.structs import replace

from fairlead.core.columns import BoolColumn
from fairlead.core.facts import AGE_UNIT, Held
from fairlead.core.flow import FlowKey
from fairlead.core.queues import Queues
from fairlead.core.table import EndpointTable

#: Multiples of the mean time from a charge until peers know of it.
YIELD, TURN = 8.0, 3.0
#: That time before it was measured, and its bounds. Seconds.
DELAY_S, LEAST_S, MOST_S = 0.0125, 0.005, 0.1
#: Flows kept per peer. The bound is needed because clients choose the names of models and tenants. Those that want
#: nothing are forgotten first.
MOST_FLOWS = 10_000


class PeerQueues:
    """The queues of all peers, by origin. `top`: the highest priority that waits at any peer; -inf = none waits."""

    def __init__(self) -> None:
        self._held: dict[str, dict[FlowKey, Held]] = {}
        #: By origin: its flows that want nothing, the longest idle first.
        self._idle: dict[str, OrderedDict[FlowKey, None]] = {}
        self.top = -inf
        #: By slot: since when it is open to another request, and how many requests there are before their first token.
        self._open_since: dict[int, tuple[float, float]] = {}
        #: By priority: waiting flows by origin, and since when their first request waits. Clock seconds.
        self._heads: dict[int, dict[tuple[str, FlowKey], float]] = {}
        self._delay_s = DELAY_S

    def measured(self, delay_s: float) -> None:
        """Take a new measurement of the time from a charge until peers know of it."""
        self._delay_s = min(max(delay_s, LEAST_S), MOST_S)

    def take(self, origin: str, held: Sequence[Held], queues: Queues, now: float, complete: bool = False) -> None:
        """Take over the flows that a peer reported; its other flows have not changed, or want nothing if the report is
        `complete`. Of more than `MOST_FLOWS` only the first count."""
        held = held[:MOST_FLOWS]
        flows, idle = self._held.setdefault(origin, {}), self._idle.setdefault(origin, OrderedDict())
        if complete:
            named = {FlowKey(flow.priority, flow.model, flow.tenant) for flow in held}
            ended = [flow for key, flow in flows.items() if key not in named and key not in idle]
            held = [*held, *(replace(flow, count=0, age=0, wanted=0) for flow in ended)]
        for flow in held:
            key = FlowKey(flow.priority, flow.model, flow.tenant)
            before = flows.get(key)
            if before is None and len(flows) >= MOST_FLOWS:
                if not idle:
                    continue
                forgotten = next(iter(idle))
                del flows[forgotten], idle[forgotten]
            flows[key] = flow
            idle.pop(key, None)
            if not (flow.wanted or flow.count):
                idle[key] = None
            if flow.count:
                self._heads.setdefault(key.priority, {})[origin, key] = now - flow.age * AGE_UNIT
            else:
                self._waits_no_more(origin, key)
            if before is not None and flow.served_ms != before.served_ms:
                # Only a flow that wanted nothing can have been forgotten by the peer, which then counts from 0 again. A
                # smaller sum of any other means that its requests took less work than predicted.
                restarted = flow.served_ms < before.served_ms and not before.wanted
                queues.served_elsewhere(key, flow.served_ms - (0.0 if restarted else before.served_ms), now)
        self.top = max(self._heads, default=-inf)

    def drop(self, origin: str) -> None:
        """Forget a lost peer and its waiting requests."""
        self._idle.pop(origin, None)
        for key in self._held.pop(origin, ()):
            self._waits_no_more(origin, key)
        self.top = max(self._heads, default=-inf)

    def _waits_no_more(self, origin: str, key: FlowKey) -> None:
        heads = self._heads.get(key.priority, {})
        if heads.pop((origin, key), None) is not None and not heads:
            del self._heads[key.priority]

    def beside(self, only: FlowKey) -> bool:
        """Whether any peer has requests of a flow other than `only`."""
        return any(
            len(flows) - len(idle) > (only in flows and only not in idle)
            for flows, idle in zip(self._held.values(), self._idle.values(), strict=True)
        )

    def reopen(self) -> None:
        """Treat open endpoints as opened now, because they were not looked at for a while."""
        self._open_since.clear()

    def ahead(self, priority: int, since: float) -> int:
        """Return the number of peers that hold a request of the band older than `since`."""
        return len({origin for (origin, _), waits in self._heads.get(priority, {}).items() if waits < since})

    def left(
        self, priority: int, since: float, opened: BoolColumn, table: EndpointTable, now: float
    ) -> tuple[BoolColumn, float]:
        """Return the open endpoints that a band may use whose oldest request waits since `since`, and the clock seconds
        when it may use more."""
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
