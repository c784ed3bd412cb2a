"""Snapshots of the fleet, each taken in 3 µs, and fleets restored from them.

Rules
* The columns are one array (`EndpointTable.floats`), so a snapshot is a copy of it and of the learned factors. The
  tuples of endpoints and adapters are only made again when the table's version rises.
* A restored fleet is only for asking policies. It has no leases. Instead of a prefix index, it has the share of the one
  prompt that each endpoint had cached.
"""

from typing import Any

import numpy as np

from fairlead.core.columns import FloatColumn, read_only
from fairlead.core.endpoint import BaseModels, Endpoint
from fairlead.core.fleet import Fleet
from fairlead.core.records import Snapshot
from fairlead.core.request import Request
from fairlead.core.table import FLOATS, EndpointTable


class Snapshots:
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
            {name: column.copy() for name, column in table.gauges.items()},
            table.waiting_adapters if table.lora else (),
        )


class Restored(Fleet):
    """A fleet as it was at the snapshot. `held`: the share of the prompt (0..1) that each slot had cached; `None` =
    none had any. `wait`: the result of `loading` for the request."""

    def __init__(self, snapshot: Snapshot, held: FloatColumn | None, wait: FloatColumn | None = None) -> None:
        super().__init__()
        _join(self.table, snapshot)
        for slot in range(len(self.table)):
            self.predictor.reset(slot)
        self.set_to(snapshot, held, wait)

    def set_to(self, snapshot: Snapshot, held: FloatColumn | None, wait: FloatColumn | None) -> None:
        """Set the fleet to another snapshot with the same endpoints and adapters."""
        self.held, self.wait = held, wait
        table, predictor = self.table, self.predictor
        floats = np.asarray(snapshot.floats, dtype=np.float64)
        table.floats[: len(floats)] = floats  # an older journal has fewer columns
        table.gauges = {name: np.array(column) for name, column in snapshot.gauges.items()}
        table.waiting_adapters = snapshot.waiting_adapters or (frozenset(),) * len(table)
        table.rewritten()
        predictor.rates.columns[:] = snapshot.learned
        predictor.hold_ms, predictor.answer_steps = snapshot.hold_ms, snapshot.answer_steps

    def match(self, request: Request) -> FloatColumn | None:
        return None if self.held is None else read_only(self.held)

    def loading(self, request: Request) -> FloatColumn | None:
        return None if self.wait is None else read_only(self.wait)


def _join(table: EndpointTable, snapshot: Snapshot) -> None:
    """Add every endpoint at the slot that it had."""
    free = []
    for slot, endpoint in enumerate(snapshot.endpoints):
        table.add(endpoint or Endpoint(f"\0{slot}", ""))
        if endpoint is None:
            free.append(slot)
        else:
            table.set_adapters(slot, snapshot.adapters[slot])
            table.set_listed(slot, snapshot.listed[slot])
            if snapshot.based:  # an older journal has no base models
                table.set_based(slot, snapshot.based[slot])
    for slot in free:
        table.remove(slot)


def column(snapshot: Snapshot, name: str) -> Any:
    """Return one column of a snapshot by its name in `FLOATS`."""
    return snapshot.floats[FLOATS.index(name)]
