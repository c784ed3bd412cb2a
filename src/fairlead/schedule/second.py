"""The second choice: who gets a request when no connection to the chosen endpoint can be made.

Rules
* It is the runner-up of the same decision, so it can serve the request and is thought to be well. Where all are
  overloaded and nobody rated them it is the least loaded of those that can.
* Late binding names who would compute the prompt soonest, of those that are open if there is another. A scheduler in
  another process names the first of its alternatives that is there; if it has none, it is late binding's for a request
  that waited. A pick without any of this has no second; nor has one to which the filters left no choice.
* It is never who computes the prompt of a pair.
* The gateway repeats a request by itself and tells afterwards, when a response comes or at the end. The lease moves
  then, and the endpoint that was chosen counts as having failed: after a few of those it is avoided.
* What was foretold for the one endpoint says nothing of the other, so nothing is learned from such a request.
"""

from math import inf
from typing import Any

import numpy as np

from fairlead.fleet.fleet import Fleet
from fairlead.fleet.table import EndpointTable
from fairlead.model.events import RequestMoved
from fairlead.model.forecast import Forecast
from fairlead.model.instructions import Instruction
from fairlead.schedule.framework import Pick


def second(pick: Pick, table: EndpointTable) -> str:
    """Address of the second choice; empty = none."""
    slot = runner_up(pick, table)
    endpoint = table.endpoints[slot] if slot >= 0 else None
    return endpoint.address if endpoint is not None else ""


def runner_up(pick: Pick, table: EndpointTable) -> int:
    """Its slot: as the pick says, else the best beside those of the pick; -1 = none. 1.0 us for 8 endpoints, 2 us for
    1000."""
    if pick.second >= 0:
        return pick.second if pick.second != pick.prefill_slot else -1
    trace = pick.trace
    if trace is None or trace.endpoints is not table.ids or table.count < 2:  # else its columns are no columns of ours
        return -1
    total = trace.total if trace.total is not None else _by_load(trace.candidates, table)
    return _in_list(pick, total) if isinstance(total, list) else _in_column(pick, total)


def _in_list(pick: Pick, total: list[float]) -> int:
    best, found = -inf, -1
    for slot, points in enumerate(total):
        if points > best and slot != pick.slot and slot != pick.prefill_slot:
            best, found = points, slot
    return found


def _in_column(pick: Pick, total: np.ndarray) -> int:
    rest = total.copy()
    rest[pick.slot] = -inf
    if pick.prefill_slot >= 0:
        rest[pick.prefill_slot] = -inf
    slot = int(rest.argmax())
    return slot if rest[slot] > -inf else -1


def _by_load(able: Any, table: EndpointTable) -> np.ndarray:
    return np.where(table.alive if able is None else able & table.alive, -(table.queue + table.active), -inf)


def moved(event: RequestMoved, fleet: Fleet, now: float) -> list[Instruction]:
    """Charge the request to the endpoint that has it. Nothing when that is known already, or is not of the pool."""
    lease = fleet.ledger.get(event.request_id)
    if lease is None or lease.unreached:
        return []
    there = (slot for slot, endpoint in fleet.table.slots() if endpoint.address == event.address)
    slot = next(there, lease.slot)
    if slot == lease.slot:
        return []
    fleet.ledger.release(event.request_id)
    fleet.answered(lease.slot, False, now)
    other = fleet.charge(lease.request, slot, now, 0, 2 * lease.growth_tokens)
    other.unreached = lease.endpoint_id
    other.forecast = Forecast()
    fleet.ledger.first_token(event.request_id)
    if lease.request.stream:
        other.first_token_at = now
    return []
