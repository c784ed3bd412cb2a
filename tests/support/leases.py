"""Leases and requests that have left their queues, for tests of the scheduler's parts."""

from fairlead.core.fairness import Charge
from fairlead.core.fleet import Fleet
from fairlead.core.flow import Waiting
from fairlead.core.ledger import Lease
from fairlead.core.queues import Queues


def lease_of(known: Fleet, request_id: int) -> Lease:
    """The lease of a request. Raises `StopIteration` if it has none."""
    return next(lease for lease in known.ledger if lease.request.id == request_id and not lease.auxiliary)


def dispatched(queues: Queues, waiting: Waiting, now: float, ms: float, slot: int = 0) -> Charge:
    """Dispatch a request from its queue to an endpoint, and charge its flow `ms` milliseconds of work, all for its
    prompt.

    Returns the argument for `queues.settle` at its end."""
    band, flow = queues.of(waiting.request, now)
    charge = Charge(flow, slot, now, ms, 0.0, ms, band.demand.light(flow, ms))
    queues.dispatch(waiting, charge, 13.0)
    return charge
