"""START HERE: one request's way through the scheduler.

    received    io/receive reads the gateway's messages until the request is whole
    parsed      parse/ understands the body → `RequestArrived`
    named       `route/models` says which model it is for, and how urgent it is
    admitted    at once while endpoints are open, else it waits in `admit/` until one is
    scheduled   the policy chooses an endpoint; the lease is charged in the same call
    routed      `Route` or `Reject` goes back to io/receive, which answers the gateway
    observed    `FirstTokenSeen` frees the prefill, `ResponseEnded` the rest; `Record` tells metrics and journal

Rules
* `handle` is the only door: nothing else changes state. It is synchronous, does no I/O, reads no clock but the one it
  was given and no randomness but the generator it was given. So a log of events is a capture, and feeding it again is
  a replay.
* Every `RequestArrived` is answered by exactly one `Route` or `Reject`, at once or by a later call, unless its
  `StreamLost` comes first. Every routed request ends in exactly one `Record(OutcomeRecord)`, whatever mix of ends,
  cancels, losses, expiries and departures follows.
"""

from collections.abc import Callable
from random import Random
from typing import Any

from fairlead.admit.control import Bound
from fairlead.admit.desk import Desk
from fairlead.fleet.fleet import Fleet
from fairlead.fleet.ledger import Lease
from fairlead.model import events as ev
from fairlead.model.clock import Clock
from fairlead.model.decision import DecisionRecord, OutcomeRecord
from fairlead.model.errors import PluginError
from fairlead.model.instructions import Instruction, Record, Reject, Route, SetTimer
from fairlead.model.request import Request, Usage
from fairlead.model.snapshot import Snapshot
from fairlead.parse.tokens import TokenEstimator
from fairlead.route.models import Catalogue, Refusal, applied
from fairlead.schedule.cycle import Context
from fairlead.schedule.framework import Pick, Policy
from fairlead.schedule.parking import TIMER as REMOTE_TIMER
from fairlead.schedule.parking import Decided, Parking
from fairlead.schedule.shadow import CaseTaker

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
        desk: Desk | None = None,
    ) -> None:
        self._clock = clock
        self._rng = rng
        self.fleet = fleet
        self.policy = policy
        #: Read by parsers to estimate prompt tokens; learns only in here.
        self.tokens = tokens
        self._report = on_plugin_error
        #: Flow control; `None` = off, every request is scheduled at once.
        self.desk = desk
        #: What is defined of model names; an empty one changes nothing.
        self.models = Catalogue()
        #: Takes down what each decision was made from (`fleet.snapshot`); `None` = nobody wants to know.
        self.snapshot: Callable[[Fleet, float], Snapshot] | None = None
        #: Whom each decision is shown to afterwards; `None` = nobody.
        self.shadows: CaseTaker | None = None
        #: Requests that schedulers in other processes were asked for; `None` = there are none.
        self.parking: Parking | None = None
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
            ev.ModelsChanged: self._models_changed,
            ev.RemoteUp: self._remote,
            ev.RemoteDown: self._remote,
            ev.RemotePicked: self._remote,
            ev.ShadowsJudged: lambda event: [Record(record) for record in event.records],
            ev.StopAsked: self._stop_asked,
            ev.TimerFired: self._timer_fired,
        }

    def handle(self, event: ev.Event) -> list[Instruction]:
        """Take one fact, return what is to be done about it."""
        instructions = self._handlers[type(event)](event)
        if self.desk is not None and len(self.desk):
            instructions = instructions + self.desk.dispatched(self._bound, self.fleet, self._clock.time())
        return instructions

    def start(self) -> list[Instruction]:
        """The first instructions, before any event."""
        return [SetTimer(EXPIRY_TIMER, self._clock.time() + EXPIRY_PERIOD)]

    # ---- scheduled ----

    def _request_arrived(self, event: ev.RequestArrived) -> list[Instruction]:
        now = self._clock.time()
        found = self.models.resolve(event.request, self._rng)
        if isinstance(found, Refusal):
            return self._unnamed(event.request, found, now)
        request = applied(event.request, found)
        pick: Pick | None = None
        if self.desk is not None:
            pick = self._choose(request, now) if self.desk.asks(self.fleet, now) else None
            held = self.desk.arrived(request, self.fleet, now, pick.slot if pick else -1)
            if held is not None:
                return held
        if self.parking is not None:
            expected = self.tokens.estimate_output(request.target_model, request.max_tokens, request.api)
            asked = self.parking.ask(self.policy, request, self.fleet, now, expected)
            if asked:
                return asked
        return self._settle(request, pick or self._choose(request, now), now)

    def _settle(self, request: Request, pick: Pick, now: float) -> list[Instruction]:
        if pick.slot < 0:
            return [self._reject(request, pick), self._decided(request, pick, now)]
        return self._send(request, pick, now)

    def _remote(self, event: ev.RemoteUp | ev.RemoteDown | ev.RemotePicked) -> list[Instruction]:
        parking, now = self.parking, self._clock.time()
        return [] if parking is None else self._decide(parking.heard(event, self.fleet, now))

    def _decide(self, decided: list[Decided]) -> list[Instruction]:
        """Requests that were asked for elsewhere, one after the other: each sees the charges of those before it."""
        now, instructions = self._clock.time(), list[Instruction]()
        for one in decided:
            pick = one.pick or self._choose(one.request, now, one.policy)
            instructions += self._settle(one.request, pick, now)
        return instructions

    def _bound(self, bound: Bound, now: float) -> list[Instruction]:
        """A request that waited goes now."""
        pick = Pick(bound.slot, hit_share=bound.hit_share, best_share=bound.best_share)
        return self._send(bound.waiting.request, pick, now, (now - bound.waiting.since) * 1e3)

    def _send(self, request: Request, pick: Pick, now: float, queued_ms: float = 0.0) -> list[Instruction]:
        endpoint = self.fleet.table.endpoints[pick.slot]
        assert endpoint is not None, "policies pick among living endpoints"
        hit = int(pick.hit_share * request.prompt_tokens)
        expected = self.tokens.estimate_output(request.target_model, request.max_tokens, request.api)
        shown = self.shadows.take(request, pick, self.fleet, now, expected) if self.shadows is not None else []
        if self.fleet.exact is not None:
            self.fleet.exact.sent(request, pick.slot, pick.prefill_slot, now)
        other = self.fleet.table.endpoints[pick.prefill_slot] if pick.prefill_slot >= 0 else None
        if other is None:
            lease = self.fleet.charge(request, pick.slot, now, hit, expected)
        else:
            lease = self.fleet.charge_pair(request, pick.slot, pick.prefill_slot, now, hit, expected)
        route = Route(
            request.id,
            endpoint,
            prefill=other.address if other else "",
            target=request.target,
            shown=request.model if request.target else "",
            evictable=self.desk is not None and self.desk.may_evict(request),
        )
        return [route, self._decided(request, pick, now, lease, queued_ms), *shown]

    def _unnamed(self, request: Request, why: Refusal, now: float) -> list[Instruction]:
        """Nobody defined the model."""
        reject = Reject(
            request_id=request.id,
            status=why.status,
            reason=why.code,
            message=why.message,
            api=request.api,
            param=why.param,
        )
        record = DecisionRecord(request=request, at=now, policy=self.policy.name, outcome=why.code, status=why.status)
        return [reject, Record(record)]

    def _choose(self, request: Request, now: float, policy: Policy | None = None) -> Pick:
        policy = policy or self.policy
        try:
            pick = policy.choose((request,), self.fleet, Context(now, self._rng))[0]
            if self.snapshot is not None and pick.trace is not None:
                pick.trace.snapshot = self.snapshot(self.fleet, now)
            if pick.slot < 0 or self.fleet.table.endpoints[pick.slot] is not None:
                return pick
            raise IndexError(f"slot {pick.slot} has no endpoint")
        except Exception as error:  # a policy may come from anywhere: its failure must not become the client's
            if self._report is not None:
                self._report(PluginError(policy.name, f"{type(error).__name__}: {error}"))
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

    def _decided(
        self, request: Request, pick: Pick, now: float, lease: Lease | None = None, queued_ms: float = 0.0
    ) -> Record:
        endpoint = self.fleet.table.endpoints[pick.slot] if pick.slot >= 0 else None
        prefill = self.fleet.table.endpoints[pick.prefill_slot] if pick.prefill_slot >= 0 else None
        return Record(
            DecisionRecord(
                request=request,
                at=now,
                policy=pick.by or self.policy.name,
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

    # ---- observed ----

    def _first_token_seen(self, event: ev.FirstTokenSeen) -> list[Instruction]:
        self.fleet.first_token(event.request_id, self._clock.time())
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
            self.tokens.learn_output(request.target_model, usage.completion_tokens, request.max_tokens, request.api)

    def _response_ended(self, event: ev.ResponseEnded) -> list[Instruction]:
        lease = self.fleet.ledger.release(event.request_id)
        if lease is None:
            return []
        if not event.client_gone:
            self.fleet.answered(lease.slot, 0 < event.status < 500, self._clock.time())
        if event.usage is not None:
            self._learn(lease.request, event.usage)
        if 200 <= event.status < 300 and not event.client_gone:
            usage = event.usage or self._usage.get(event.request_id)
            tokens = usage.completion_tokens if usage else -1
            self.fleet.completed(lease, self._clock.time(), tokens, event.ttft_ms)
        return [self._ended(lease, event, "client-disconnect" if event.client_gone else "natural")]

    def _ended(self, lease: Lease, event: ev.ResponseEnded, cause: str) -> Record:
        usage = self._usage.pop(event.request_id, None)
        usage = event.usage or usage or Usage()
        if self.fleet.exact is not None:
            self.fleet.exact.ended(event.request_id, usage, 200 <= event.status < 300, self._clock.time())
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
                forecast=lease.forecast,
            )
        )

    def _stream_lost(self, event: ev.StreamLost) -> list[Instruction]:
        if self.parking is not None and self.parking.cancel(event.request_id):
            return []
        waited = self.desk.lost(event.request_id, self._clock.time()) if self.desk is not None else []
        evicted = self.desk is not None and self.desk.evicted(event.request_id)
        return waited or self._give_up(event.request_id, "evicted" if evicted else "stream-lost")

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

    def _models_changed(self, event: ev.ModelsChanged) -> list[Instruction]:
        self.models = Catalogue(event.models, event.rules)
        return []

    def _stop_asked(self, event: ev.StopAsked) -> list[Instruction]:
        return self.desk.stopping(self._clock.time()) if self.desk is not None else []

    def _timer_fired(self, event: ev.TimerFired) -> list[Instruction]:
        now = self._clock.time()
        if event.name == REMOTE_TIMER and self.parking is not None:
            return self._decide(self.parking.expired(now)) + self.parking.timer()
        if event.name != EXPIRY_TIMER:
            return self.desk.fired(event.name, self.fleet, now) if self.desk is not None else []
        expired = list(self.fleet.ledger.expired(now))
        instructions = [i for request_id in expired for i in self._give_up(request_id, "expired")]
        return [*instructions, SetTimer(EXPIRY_TIMER, now + EXPIRY_PERIOD)]

    def validate(self) -> None:
        """Raise `AssertionError` when an invariant of any part is broken."""
        self.fleet.validate()
        if self.desk is not None:
            self.desk.validate()
        if self.parking is not None:
            self.parking.validate()
        assert all(self.fleet.ledger.get(request_id) is not None for request_id in self._usage)
