"""Saturation: which endpoints may be sent one more request, and early shedding."""

from collections.abc import Callable
from functools import partial
from math import inf

import numpy as np

from fairlead.core.columns import BoolColumn, FloatColumn
from fairlead.core.cost import FULL, open_at, per_rank, step_ms, waits
from fairlead.core.view import FleetView

# Soft saturation: which endpoints may be sent one more request now.
#
# * `ledger` (the default) uses the cost kernel's forecasts. An endpoint is open while its queued prompts are at most
#   half of what one step computes. They then fit into the running step or leave room in the next one, so a request that
#   is sent is begun as early as the engine can. A request that is held may still be overtaken, or go elsewhere. The
#   endpoint is closed while all sequence slots are taken, and while requests wait there for memory. As in the kernel,
#   progress since the last scrape counts, and a late first token closes the endpoint. The gate also works without
#   scrapes.
# * The reference's detectors (`plugins.flow_control`) compute one number for the pool: all endpoints are open below 1,
#   none from 1 on. They are for users who know them.


class LedgerGate:
    """An endpoint is open if its queued prompts are computed within `steps` whole steps and fewer than `requests`
    requests wait there; both per engine, if several share the address."""

    name = "ledger"
    soft = True

    def __init__(self, steps: float = 0.5, requests: float = inf) -> None:
        if not (steps > 0 and requests > 0):
            raise ValueError("a gate that is never open would stop all traffic")
        self._steps = steps
        self._requests = requests
        #: See `core.flow_control.Gate`.
        self.admits: Callable[[int, FleetView, float], bool] = partial(open_at, steps, requests)

    def open(self, fleet: FleetView, now: float) -> BoolColumn | None:
        table = fleet.table
        waiting = per_rank(table.queue, table)
        opened: BoolColumn = (self._levels(fleet, now) <= 1.0) & (waiting < self._requests) & table.alive
        return None if np.count_nonzero(opened) == len(table) else opened

    def level(self, fleet: FleetView, now: float) -> float:
        table = fleet.table
        return mean(np.maximum(self._levels(fleet, now), per_rank(table.queue, table) / self._requests), table.alive)

    def _levels(self, fleet: FleetView, now: float) -> FloatColumn:
        """Return by slot the wait divided by the longest wait with which the endpoint is open."""
        table, learned = fleet.table, fleet.predictor
        queue, slots = waits(fleet, step_ms(fleet), now)
        waiting, running = per_rank(table.queue, table), per_rank(table.active, table)
        crowded = (table.kv > FULL) & (waiting >= 1.0)
        if np.count_nonzero(crowded):
            queue = np.maximum(queue, np.where(crowded, waiting * learned.hold_ms / np.maximum(running, 1.0), 0.0))
        longest = self._steps * learned.rates.prior.whole_step_ms * learned.rates.prefill
        levels: FloatColumn = (queue + slots) / longest
        return levels


class PoolGate:
    """All endpoints are open while the pool's saturation is below `ceiling`."""

    soft = False

    def __init__(self, name: str, saturation: Callable[[FleetView, float], float], ceiling: float = 1.0) -> None:
        self.name = name
        self._saturation = saturation
        self._ceiling = ceiling

    def open(self, fleet: FleetView, now: float) -> BoolColumn | None:
        if self._saturation(fleet, now) < self._ceiling:
            return None
        return np.zeros(len(fleet.table), dtype=np.bool_)

    def admits(self, slot: int, fleet: FleetView, now: float) -> bool:
        return self._saturation(fleet, now) < self._ceiling

    def level(self, fleet: FleetView, now: float) -> float:
        return self._saturation(fleet, now)


def mean(values: FloatColumn, over: BoolColumn) -> float:
    """Return the mean of the values selected by `over`; 0 if none is, so that an empty selection closes no gate."""
    count = np.count_nonzero(over)
    return float(values[over].sum() / count) if count else 0.0


# Early shedding: sheddable requests are refused, more and more of them, before the pool is full.
#
# A request with a priority below 0 is refused with probability `p = min(saturation^power · scale, 1)`, the reference's
# formula. Such requests never wait, and the rest of the pool's capacity is left to other requests.
#
# No random numbers are needed: the draws are multiples of the golden ratio modulo 1. Of any n requests in a row p·n are
# refused, to within a few, and the draws have no period that could coincide with a pattern of the clients.

_GOLDEN = 0.6180339887498949


class EarlyShedding:
    """Refuses a growing share of sheddable requests. Raises `ValueError` unless `power` and `scale` are positive."""

    def __init__(self, power: float = 5.0, scale: float = 300.0) -> None:
        if not (power > 0 and scale > 0):
            raise ValueError("power and scale must be positive")
        self._power, self._scale = power, scale
        self._draw = 0.0

    def probability(self, level: float) -> float:
        if level <= 0.0:
            return 0.0
        return 1.0 if level >= 1.0 else min(level**self._power * self._scale, 1.0)

    def sheds(self, level: float) -> bool:
        """Whether the next sheddable request is refused. `level`: as returned by `Gate.level`."""
        self._draw = (self._draw + _GOLDEN) % 1.0
        return self._draw < self.probability(level)
