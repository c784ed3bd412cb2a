"""START HERE: one request's way through the scheduler.

    received    io/receive reads the gateway's messages until the request is whole
    parsed      parse/ understands the body → `RequestArrived`
    admitted    at once at this stage; a queue belongs between here and the next line
    scheduled   the policy chooses an endpoint; the lease is charged in the same call
    routed      `Route` or `Reject` goes back to io/receive, which answers the gateway
    observed    `FirstTokenSeen` frees the prefill, `ResponseEnded` the rest; `Record` tells metrics and journal

Rules
* `handle` is the only door: nothing else changes state. It is synchronous, does no I/O, reads no clock but the one it
  was given and no randomness but the generator it was given. So a log of events is a capture, and feeding it again is
  a replay.
* Every `RequestArrived` is answered by exactly one `Route` or `Reject`, and every routed request ends in exactly one
  `Record(OutcomeRecord)`, whatever mix of ends, cancels, losses, expiries and departures follows.
"""

from collections.abc import Callable
from random import Random
from typing import Any

from fairlead.fleet.fleet import Fleet
from fairlead.fleet.ledger import Lease
from fairlead.model import events as ev
from fairlead.model.clock import Clock
from fairlead.model.decision import DecisionRecord, OutcomeRecord
from fairlead.model.errors import PluginError
from fairlead.model.instructions import Instruction, Record, Reject, Route, SetTimer
from fairlead.model.request import Request, Usage
from fairlead.parse.tokens import TokenEstimator
from fairlead.schedule.cycle import Context
from fairlead.schedule.framework import Pick, Policy

#: Name and period (seconds) of the timer that looks for expired leases.
EXPIRY_TIMER = "expire-leases"
EXPIRY_PERIOD = 5.0


class Pipeline:
    """Owns all mutable state of the scheduler."""

    def __init__(
        self,
        clock: Clock,
        rng: Random,
        fleet: Fleet,
        policy: Policy,
        tokens: TokenEstimator,
        on_plugin_error: Callable[[PluginError], None] | None = None,
    ) -> None:
        self._clock = clock
        self._rng = rng
        self.fleet = fleet
        self.policy = policy
        #: Read by parsers to estimate prompt tokens; learns only in here.
        self.tokens = tokens
        self._report = on_plugin_error
        self._usage: dict[int, Usage] = {}
        self._handlers: dict[type, Callable[[Any], list[Instruction]]] = {
            ev.RequestArrived: self._request_arrived,
            ev.FirstTokenSeen: self._first_token_seen,
            ev.UsageReported: self._usage_reported,
            ev.ResponseEnded: self._response_ended,
            ev.StreamLost: self._stream_lost,
            ev.EndpointUp: self._endpoint_up,
            ev.EndpointDown: self._endpoint_down,
            ev.MetricsSampled: self._metrics_sampled,
            ev.MetricsFailed: self._metrics_failed,
            ev.TimerFired: self._timer_fired,
        }

    def handle(self, event: ev.Event) -> list[Instruction]:
        """Take one fact, return what is to be done about it."""
        return self._handlers[type(event)](event)

    def start(self) -> list[Instruction]:
        """The first instructions, before any event."""
        return [SetTimer(EXPIRY_TIMER, self._clock.time() + EXPIRY_PERIOD)]

    # ---- scheduled ----

    def _request_arrived(self, event: ev.RequestArrived) -> list[Instruction]:
        request = event.request
        now = self._clock.time()
        pick = self._choose(request, now)
        if pick.slot < 0:
            return [self._reject(request, pick), self._decided(request, pick, now)]
        endpoint = self.fleet.table.endpoints[pick.slot]
        assert endpoint is not None, "policies pick among living endpoints"
        hit = int(pick.hit_share * request.prompt_tokens)
        expected = self.tokens.estimate_output(request.model, request.max_tokens, request.api)
        self.fleet.charge(request, pick.slot, now, hit, expected)
        return [Route(request.id, endpoint), self._decided(request, pick, now)]

    def _choose(self, request: Request, now: float) -> Pick:
        try:
            pick = self.policy.choose((request,), self.fleet, Context(now, self._rng))[0]
            if pick.slot < 0 or self.fleet.table.endpoints[pick.slot] is not None:
                return pick
            raise IndexError(f"slot {pick.slot} has no endpoint")
        except Exception as error:  # a policy may come from anywhere: its failure must not become the client's
            if self._report is not None:
                self._report(PluginError(self.policy.name, f"{type(error).__name__}: {error}"))
        alive = self.fleet.table.slots()
        if not alive:
            return Pick(-1, reason="rejected-no-endpoints", message="the pool has no endpoints")
        return Pick(alive[int(self._rng.random() * len(alive))][0], reason="policy-failed")

    def _reject(self, request: Request, pick: Pick) -> Reject:
        return Reject(
            request_id=request.id,
            status=503,
            reason=pick.reason,
            message=pick.message,
            retry_after_s=1.0,
            api=request.api,
        )

    def _decided(self, request: Request, pick: Pick, now: float) -> Record:
        endpoint = self.fleet.table.endpoints[pick.slot] if pick.slot >= 0 else None
        return Record(
            DecisionRecord(
                request=request,
                at=now,
                policy=self.policy.name,
                endpoint=endpoint.id if endpoint else "",
                address=endpoint.address if endpoint else "",
                hit_tokens=int(pick.hit_share * request.prompt_tokens),
                best_hit_tokens=int(pick.best_share * request.prompt_tokens),
                outcome="routed" if endpoint else pick.reason,
                status=200 if endpoint else 503,
                overloaded=pick.overloaded,
                trace=pick.trace,
            )
        )

    # ---- observed ----

    def _first_token_seen(self, event: ev.FirstTokenSeen) -> list[Instruction]:
        self.fleet.ledger.first_token(event.request_id)
        return []

    def _usage_reported(self, event: ev.UsageReported) -> list[Instruction]:
        lease = self.fleet.ledger.get(event.request_id)
        if lease is not None:
            self._usage[event.request_id] = event.usage
            self._learn(lease.request, event.usage)
        return []

    def _learn(self, request: Request, usage: Usage) -> None:
        if usage.prompt_tokens > 0 and request.prompt_bytes > 0:
            self.tokens.learn(request.model, request.prompt_bytes, usage.prompt_tokens, request.api)
        if usage.completion_tokens > 0:
            self.tokens.learn_output(request.model, usage.completion_tokens, request.max_tokens, request.api)

    def _response_ended(self, event: ev.ResponseEnded) -> list[Instruction]:
        lease = self.fleet.ledger.release(event.request_id)
        if lease is None:
            return []
        if not event.client_gone:
            self.fleet.answered(lease.slot, 0 < event.status < 500, self._clock.time())
        if event.usage is not None:
            self._learn(lease.request, event.usage)
        return [self._ended(lease, event, "client-disconnect" if event.client_gone else "natural")]

    def _ended(self, lease: Lease, event: ev.ResponseEnded, cause: str) -> Record:
        usage = self._usage.pop(event.request_id, None)
        usage = event.usage or usage or Usage()
        return Record(
            OutcomeRecord(
                request=lease.request,
                at=self._clock.time(),
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
            )
        )

    def _stream_lost(self, event: ev.StreamLost) -> list[Instruction]:
        return self._give_up(event.request_id, "stream-lost")

    def _give_up(self, request_id: int, cause: str) -> list[Instruction]:
        lease = self.fleet.ledger.release(request_id)
        return [] if lease is None else [self._ended(lease, ev.ResponseEnded(request_id=request_id), cause)]

    # ---- the fleet ----

    def _endpoint_up(self, event: ev.EndpointUp) -> list[Instruction]:
        return self._gone(self.fleet.up(event.endpoint))

    def _endpoint_down(self, event: ev.EndpointDown) -> list[Instruction]:
        return self._gone(self.fleet.down(event.endpoint_id))

    def _gone(self, leases: list[Lease]) -> list[Instruction]:
        return [self._ended(lease, ev.ResponseEnded(request_id=lease.request.id), "endpoint-gone") for lease in leases]

    def _metrics_sampled(self, event: ev.MetricsSampled) -> list[Instruction]:
        held_no_more = self.fleet.sampled(event.endpoint_id, event.started, self._clock.time(), event.sample)
        return [i for request_id in held_no_more for i in self._give_up(request_id, "reconciled")]

    def _metrics_failed(self, event: ev.MetricsFailed) -> list[Instruction]:
        self.fleet.scrape_failed(event.endpoint_id, self._clock.time())
        return []

    def _timer_fired(self, event: ev.TimerFired) -> list[Instruction]:
        if event.name != EXPIRY_TIMER:
            return []
        now = self._clock.time()
        expired = list(self.fleet.ledger.expired(now))
        instructions = [i for request_id in expired for i in self._give_up(request_id, "expired")]
        return [*instructions, SetTimer(EXPIRY_TIMER, now + EXPIRY_PERIOD)]

    def validate(self) -> None:
        """Raise `AssertionError` when an invariant of any part is broken."""
        self.fleet.validate()
        assert all(self.fleet.ledger.get(request_id) is not None for request_id in self._usage)
