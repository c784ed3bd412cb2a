"""What is known of the endpoints at one moment, taken down in 3 µs, and a fleet made of it again.

Rules
* The columns are one array (`EndpointTable.floats`), so a snapshot is a copy of it and one of what was learned;
  endpoints and adapters are tuples that are made anew only when the table's version rises.
* A restored fleet is for asking policies, not for going on: it has no leases, and instead of a prefix index the column
  of what each endpoint held of the one prompt. Gauges of one's own (`Sample.extra`) are not in it.
"""

from typing import Any

import numpy as np

from fairlead.core.columns import FloatColumn
from fairlead.core.endpoint import BaseModels, Endpoint
from fairlead.core.fleet import Fleet
from fairlead.core.records import Snapshot
from fairlead.core.request import Request
from fairlead.core.table import FLOATS, EndpointTable


class Snapshots:
    """Takes them, of one fleet."""

    def __init__(self) -> None:
        self._version = -1
        self._endpoints: tuple[Endpoint | None, ...] = ()
        self._adapters: tuple[frozenset[str] | None, ...] = ()
        self._listed: tuple[frozenset[str] | None, ...] = ()
        self._based: tuple[BaseModels, ...] = ()

    def __call__(self, fleet: Fleet, now: float) -> Snapshot:
        table, predictor = fleet.table, fleet.predictor
        if table.version != self._version:
            self._version = table.version
            self._endpoints, self._adapters = tuple(table.endpoints), tuple(table.adapters)
            self._listed, self._based = tuple(table.listed), tuple(table.based)
        return Snapshot(
            now,
            self._endpoints,
            self._adapters,
            self._listed,
            table.floats.copy(),
            predictor.rates.columns.copy(),
            predictor.hold_ms,
            predictor.answer_steps,
            self._based,
        )


class Restored(Fleet):
    """A fleet as it was. `held`: share of the prompt that each slot held; `None` = nobody any of it. `wait`: until each
    could run the request's adapter, as `loading` says."""

    def __init__(self, snapshot: Snapshot, held: FloatColumn | None, wait: FloatColumn | None = None) -> None:
        super().__init__()
        _join(self.table, snapshot)
        for slot in range(len(self.table)):
            self.predictor.reset(slot)
        self.set_to(snapshot, held, wait)

    def set_to(self, snapshot: Snapshot, held: FloatColumn | None, wait: FloatColumn | None) -> None:
        """To another moment with the same endpoints and adapters."""
        self.held, self.wait = held, wait
        table, predictor = self.table, self.predictor
        floats = np.asarray(snapshot.floats, dtype=np.float64)
        table.floats[: len(floats)] = floats  # an older journal has fewer
        table.rewritten()
        predictor.rates.columns[:] = snapshot.learned
        predictor.hold_ms, predictor.answer_steps = snapshot.hold_ms, snapshot.answer_steps

    def match(self, request: Request) -> FloatColumn | None:
        return None if self.held is None else self.held.copy()

    def loading(self, request: Request) -> FloatColumn | None:
        return None if self.wait is None else self.wait.copy()


def _join(table: EndpointTable, snapshot: Snapshot) -> None:
    """Every endpoint at the slot that it had."""
    free = []
    for slot, endpoint in enumerate(snapshot.endpoints):
        table.add(endpoint or Endpoint(f"\0{slot}", ""))
        if endpoint is None:
            free.append(slot)
        else:
            table.set_adapters(slot, snapshot.adapters[slot])
            table.set_listed(slot, snapshot.listed[slot])
            if snapshot.based:  # an older journal has none
                table.set_based(slot, snapshot.based[slot])
    for slot in free:
        table.remove(slot)


def column(snapshot: Snapshot, name: str) -> Any:
    """One column of `FLOATS` by its name."""
    return snapshot.floats[FLOATS.index(name)]
