"""The last hour of each endpoint: its load, its cache and its times to first token, in one array.

Rules
* A point is kept every `STEP` seconds, with or without viewers. This takes 4 kB per endpoint.
* An endpoint that leaves loses its history. If it comes back, it starts without one.
"""

from collections.abc import Iterable

import numpy as np
from msgspec import Struct

from fairlead.core.columns import FloatColumn
from fairlead.core.records import OutcomeRecord
from fairlead.core.table import EndpointTable

#: Seconds between two points, and how many are kept.
STEP, POINTS = 15.0, 240


class EndpointPoint(Struct, frozen=True):
    """One moment of one endpoint. `time`: seconds since 1970."""

    time: float
    #: Requests before their first token (queue) and past it (active), as decisions use them.
    queue: float | None
    active: float | None
    #: Share of its KV blocks in use.
    kv: float | None
    #: Mean milliseconds to the first token since the last point; `None` = there were no first tokens.
    ttft_ms: float | None


class EndpointHistory:
    """Call `keep` regularly; `of` returns the points of an endpoint."""

    def __init__(self) -> None:
        self._values = np.full((POINTS, 4, 0), np.nan, dtype=np.float32)
        self._times = np.full(POINTS, np.nan)
        self._ids: tuple[str, ...] = ()
        self._next, self._last = 0, -np.inf

    def keep(self, table: EndpointTable, newest: Iterable[OutcomeRecord], now: float) -> None:
        """Add a point if it is due. `newest`: recent ends of requests."""
        if now < self._last + STEP:
            return
        self._follow(table)
        row = self._values[self._next]
        # Until an endpoint's first scrape, only our own requests there are known.
        known = (table.sampled_at > -np.inf) | (table.inflight > 0)
        for place, column in enumerate((table.queue, table.active, table.kv)):
            row[place] = np.where(known, column, np.nan)
        row[3] = self._first_tokens(table, newest)
        self._times[self._next] = self._last = now
        self._next = (self._next + 1) % POINTS

    def of(self, slot: int, table: EndpointTable, wall: float) -> list[EndpointPoint]:
        """The points of a slot, oldest first. `wall`: seconds to add to the clock to get the time of day."""
        self._follow(table)
        order = [(self._next + i) % POINTS for i in range(POINTS)]
        points = []
        for i in order:
            values = [None if np.isnan(value) else round(float(value), 4) for value in self._values[i, :, slot]]
            if values[0] is not None:
                points.append(EndpointPoint(float(self._times[i]) + wall, *values))
        return points

    def _follow(self, table: EndpointTable) -> None:
        """Clear the history of slots that belong to another endpoint now."""
        if self._ids == table.ids:
            return
        known = len(self._ids)
        if len(table) > known:
            self._values = np.pad(self._values, ((0, 0), (0, 0), (0, len(table) - known)), constant_values=np.nan)
        for slot, name in enumerate(table.ids):
            if slot < known and self._ids[slot] != name:
                self._values[:, :, slot] = np.nan
        self._ids = table.ids

    def _first_tokens(self, table: EndpointTable, newest: Iterable[OutcomeRecord]) -> FloatColumn:
        sums, counts = np.zeros(len(table)), np.zeros(len(table))
        for record in newest:
            if record.at > self._last and record.ttft_ms >= 0.0 and record.request.stream:
                slot = table.slot(record.endpoint)
                if slot is not None:
                    sums[slot] += record.ttft_ms
                    counts[slot] += 1
        means: FloatColumn = np.divide(sums, counts, out=np.full(len(table), np.nan), where=counts > 0)
        return means
