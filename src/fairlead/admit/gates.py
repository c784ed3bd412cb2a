"""Soft saturation: which endpoints may be sent one more request now.

* `ledger` (the default) asks what we ourselves have sent there and not yet seen begin: more than a step or two of
  uncomputed prompt, or eight requests, only make a queue that nobody can reorder any more. Scrapes correct it; without
  them it goes on. Memory is not judged: an engine that runs short of it lets requests wait, which shows as the former.
  (Closing at promised instead of used memory took TTFT from 0.40 to 3.7 s on the headline workload at 14 requests/s.)
  Half as many tokens make requests wait that had better go: there 0.28 instead of 0.19 s.
* `utilization` and `concurrency` are the reference's detectors, for those who know and want them: one number for the
  pool, all endpoints open below 1, none from 1 on.
"""

from collections.abc import Callable

import numpy as np

from fairlead.fleet.columns import BoolColumn, FloatColumn, top
from fairlead.fleet.fleet import Fleet


class LedgerGate:
    """Open: queued work of at most `tokens` (of an average endpoint), and fewer than `requests` not yet begun."""

    name = "ledger"

    def __init__(self, tokens: float = 10_240.0, requests: float = 8.0) -> None:
        if not (tokens > 0 and requests > 0):
            raise ValueError("a gate that is never open would stop all traffic")
        self._tokens = tokens
        self._requests = requests

    def open(self, fleet: Fleet, now: float) -> BoolColumn | None:
        table = fleet.table
        work = fleet.predictor.rates.prefill[: len(table)] * table.queued_tokens
        if top(work) <= self._tokens and top(table.queue) < self._requests:
            return None if table.count == len(table) else table.alive
        opened: BoolColumn = (work <= self._tokens) & (table.queue < self._requests) & table.alive
        return opened

    def level(self, fleet: Fleet, now: float) -> float:
        table = fleet.table
        work = fleet.predictor.rates.prefill[: len(table)] * table.queued_tokens
        return _mean(np.maximum(work / self._tokens, table.queue / self._requests), table.alive)


class PoolGate:
    """All endpoints are open while the pool's saturation is below `ceiling`."""

    def __init__(self, name: str, saturation: Callable[[Fleet, float], float], ceiling: float = 1.0) -> None:
        self.name = name
        self._saturation = saturation
        self._ceiling = ceiling

    def open(self, fleet: Fleet, now: float) -> BoolColumn | None:
        if self._saturation(fleet, now) < self._ceiling:
            return None
        return np.zeros(len(fleet.table), dtype=np.bool_)

    def level(self, fleet: Fleet, now: float) -> float:
        return self._saturation(fleet, now)


class Utilization:
    """Mean over endpoints of max(queue / `queue`, KV usage / `kv`). Endpoints without fresh metrics are left out,
    unlike in the reference: there they count as full, and a failing scrape stops the pool."""

    def __init__(self, queue: float = 5.0, kv: float = 0.8) -> None:
        self._queue = queue
        self._kv = kv

    def __call__(self, fleet: Fleet, now: float) -> float:
        table = fleet.table
        fresh = table.alive & (now - table.sampled_at <= fleet.staleness)
        return _mean(np.maximum(table.queue / self._queue, table.kv / self._kv), fresh)


class Concurrency:
    """Mean over endpoints of the larger of requests / `requests` and KV tokens / `tokens`, of our own alone."""

    def __init__(self, requests: float = 100.0, tokens: float = 1e6) -> None:
        self._requests = requests
        self._tokens = tokens

    def __call__(self, fleet: Fleet, now: float) -> float:
        table = fleet.table
        return _mean(np.maximum(table.inflight / self._requests, table.kv_tokens / self._tokens), table.alive)


def _mean(values: FloatColumn, over: BoolColumn) -> float:
    """0 when there is nothing to take it over: no news does not close a gate."""
    count = np.count_nonzero(over)
    return float(values[over].sum() / count) if count else 0.0
