"""What is told of a decision and of its end: to the client where nobody serves it, and to those who count."""

from fairlead.fleet.fleet import Fleet
from fairlead.fleet.lease import Lease
from fairlead.model.decision import DecisionRecord, OutcomeRecord
from fairlead.model.events import ResponseEnded
from fairlead.model.instructions import Record, Reject
from fairlead.model.request import Request, Usage
from fairlead.schedule.framework import Pick


def refused(request: Request, pick: Pick) -> Reject:
    """The answer to a request for which no endpoint was picked."""
    return Reject(
        request_id=request.id,
        status=503,
        reason=pick.reason,
        message=pick.message,
        retry_after_s=1.0,
        api=request.api,
    )


def decided(
    request: Request,
    pick: Pick,
    fleet: Fleet,
    now: float,
    policy: str,
    lease: Lease | None = None,
    queued_ms: float = 0.0,
) -> Record:
    """`policy` decided, unless the pick says who did; `lease` is what was charged, `None` = it was refused."""
    endpoint = fleet.table.endpoints[pick.slot] if pick.slot >= 0 else None
    prefill = fleet.table.endpoints[pick.prefill_slot] if pick.prefill_slot >= 0 else None
    return Record(
        DecisionRecord(
            request=request,
            at=now,
            policy=pick.by or policy,
            endpoint=endpoint.id if endpoint else "",
            address=endpoint.address if endpoint else "",
            prefill=prefill.id if prefill else "",
            hit_tokens=int(pick.hit_share * request.prompt_tokens),
            best_hit_tokens=int(pick.best_share * request.prompt_tokens),
            outcome="routed" if endpoint else pick.reason,
            status=200 if endpoint else 503,
            overloaded=pick.overloaded,
            queued_ms=queued_ms,
            forecast=lease.forecast if lease else None,
            trace=pick.trace,
        )
    )


def ended(lease: Lease, event: ResponseEnded, usage: Usage, cause: str, now: float) -> Record:
    """A routed request is over; `lease` is what was charged for it."""
    return Record(
        OutcomeRecord(
            request=lease.request,
            at=now,
            endpoint=lease.endpoint_id,
            status=event.status,
            cause=cause,
            ttft_ms=event.ttft_ms,
            duration_ms=event.duration_ms,
            request_bytes=lease.request.body_bytes,
            response_bytes=event.response_bytes,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            hit_tokens=lease.hit_tokens,
            forecast=lease.forecast,
            unreached=lease.unreached,
        )
    )
