"""What is asked of each pair of a waiting request and an endpoint: milliseconds, rows are requests, columns slots.

`uncached[r, i]` are the tokens of r's prompt that i does not hold, `inf` milliseconds mean that i cannot serve r.
"""

import numpy as np
from numpy.typing import NDArray

from fairlead.fleet.columns import BoolColumn, FloatColumn
from fairlead.fleet.fleet import Fleet
from fairlead.fleet.predictor import FULL_FROM, FULL_SLOPE, LEAST_USAGE, PASSING


def promised(fleet: Fleet) -> FloatColumn:
    """Share of each endpoint's KV capacity that is in use, or will be by prompts that it has not computed yet."""
    table = fleet.table
    return table.kv + table.queued_tokens * table.per_capacity


def ahead(fleet: Fleet, now: float) -> FloatColumn:
    """Until each endpoint has computed the prompts that were sent there; 0 where none are."""
    queued = fleet.table.queued_tokens
    if not np.count_nonzero(queued):
        return np.zeros(len(queued))
    return np.where(queued > 0.0, fleet.predictor.ahead(now), 0.0)


def room_waits(uncached: FloatColumn, used: FloatColumn, fleet: Fleet, slots: NDArray[np.intp]) -> FloatColumn | None:
    """Until these endpoints have given back enough memory for each prompt; `None` = all have. Who runs nothing has
    nothing to give back, whatever its gauges say."""
    table = fleet.table
    short = uncached[:, slots] * table.per_capacity[slots] + (used[slots] - 1.0)
    if not np.count_nonzero(short > 0.0):
        return None
    pace = fleet.predictor.hold_ms / np.maximum(table.kv[slots], LEAST_USAGE)
    pace[table.active[slots] + table.queue[slots] <= 0.0] = 0.0
    waits: FloatColumn = np.maximum(short, 0.0) * pace
    return waits


def memory_prices(uncached: FloatColumn, used: FloatColumn, fleet: Fleet) -> tuple[FloatColumn, FloatColumn] | None:
    """What others wait because a request's tokens are held there: those that are cached elsewhere, and those that are
    nowhere. `None` = there is room everywhere."""
    table = fleet.table
    full = np.clip((used - FULL_FROM) * FULL_SLOPE, 0.0, 1.0)
    if not np.count_nonzero(full):
        return None
    delayed = full * (table.queue + PASSING * table.active + 1.0) * (fleet.predictor.hold_ms * table.per_capacity)
    least = uncached.min(axis=1)[:, None]
    return (uncached - least) * delayed, least * delayed


def with_memory(used: FloatColumn, alive: BoolColumn) -> BoolColumn:
    """Endpoints where memory has no price."""
    return (used < FULL_FROM) & alive


def saved_elsewhere(own: FloatColumn, rivals: FloatColumn | None = None) -> FloatColumn:
    """How much less than `own` the best other slot takes, by `rivals` (else also `own`); negative = more, `inf` where
    `own` is."""
    elsewhere = least_elsewhere(own if rivals is None else rivals)
    saved: FloatColumn = np.subtract(own, elsewhere, out=np.full(own.shape, np.inf), where=own < np.inf)
    return saved


def least_elsewhere(own: FloatColumn) -> FloatColumn:
    """For each slot the least of the other slots' values, row by row; `inf` where there is no other."""
    if own.shape[1] < 2:
        return np.full(own.shape, np.inf)
    rows = np.arange(len(own))
    best = own.argmin(axis=1)
    others = own.copy()
    others[rows, best] = np.inf
    elsewhere = np.repeat(own[rows, best][:, None], own.shape[1], axis=1)
    elsewhere[rows, best] = others.min(axis=1)
    return elsewhere


def soonest(work: FloatColumn, besides: int, opened: NDArray[np.intp]) -> int:
    """The slot with the least of `work`, one row, beside one of them: an open one if there is any; -1 = none."""
    work[besides] = np.inf
    slot = int(opened[work[opened].argmin()])
    if work[slot] == np.inf:
        slot = int(work.argmin())
    return slot if work[slot] < np.inf else -1
