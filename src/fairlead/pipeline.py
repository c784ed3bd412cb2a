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
from fairlead.fleet import endings
from fairlead.fleet.fleet import Fleet
from fairlead.fleet.ledger import Lease
from fairlead.model import events as ev
from fairlead.model.clock import Clock
from fairlead.model.errors import PluginError
from fairlead.model.instructions import Instruction, Record, Route, SetTimer
from fairlead.model.request import Request, Usage
from fairlead.model.snapshot import Snapshot
from fairlead.parse.tokens import TokenEstimator
from fairlead.route.models import Catalogue, Refusal, applied, unnamed
from fairlead.schedule.cycle import Context
from fairlead.schedule.framework import Pick, Policy
from fairlead.schedule.parking import TIMER as REMOTE_TIMER
from fairlead.schedule.parking import Decided, Parking, Question
from fairlead.schedule.records import decided, ended, refused
from fairlead.schedule.room import Room
from fairlead.schedule.second import moved, second
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
        self._endings = endings.Endings(clock, self._ended, self._give_up)
        self._handlers: dict[type, Callable[[Any], list[Instruction]]] = {
            ev.RequestArrived: self._request_arrived,
            ev.FirstTokenSeen: self._first_token_seen,
            ev.RequestMoved: lambda event: moved(event, self.fleet, clock.time()),
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
            return unnamed(event.request, found, now, self.policy.name)
        request = applied(event.request, found)
        if self.desk is not None:
            return self._admitted(self.desk, request, now)
        return self._ask(request, now) or self._settle(request, self._choose(request, now), now)

    def _admitted(self, desk: Desk, request: Request, now: float) -> list[Instruction]:
        """Flow control. Where another process decides, having room somewhere is enough to go on."""
        question = pick = None
        room = Room(None, now)
        if desk.asks(self.fleet, now):
            if self.parking is not None and self.parking.reaches(self.policy, request, now):
                room.opened = desk.opened(self.fleet, now)
                question = self.parking.question(self.policy, request, self.fleet, now, room)
            else:
                pick = self._choose(request, now)
        held = desk.arrived(request, self.fleet, now, pick.slot if pick else room.slot)
        if held is not None:
            return held
        asked = self._ask(request, now, room, question)
        return asked or self._settle(request, pick or self._choose(request, now), now)

    def _ask(
        self, request: Request, now: float, room: Room | None = None, question: Question | None = None
    ) -> list[Instruction]:
        """Put it to the scheduler in another process; nothing = it is decided here."""
        if self.parking is None:
            return []
        expected = self.tokens.estimate_output(request.target_model, request.max_tokens, request.api)
        return self.parking.ask(self.policy, request, self.fleet, now, expected, room, question)

    def _settle(self, request: Request, pick: Pick, now: float, queued_ms: float = 0.0) -> list[Instruction]:
        if pick.slot < 0:
            record = decided(request, pick, self.fleet, now, self.policy.name, queued_ms=queued_ms)
            return [refused(request, pick), record]
        return self._send(request, pick, now, queued_ms)

    def _remote(self, event: ev.RemoteUp | ev.RemoteDown | ev.RemotePicked) -> list[Instruction]:
        parking, now = self.parking, self._clock.time()
        return [] if parking is None else self._decide(parking.heard(event, self.fleet, now))

    def _decide(self, over: list[Decided]) -> list[Instruction]:
        """Requests that were asked for elsewhere, one after the other: each sees the charges of those before it, and
        the room that is kept for those after it."""
        now, instructions = self._clock.time(), list[Instruction]()
        for one in over:
            self.fleet.unreserve(one.request.id)
            queued_ms = one.room.queued_ms(now) if one.room is not None else 0.0
            pick = one.pick or self._instead(one, now)
            if pick.second < 0 and one.room is not None:
                pick.second = one.room.second(pick.slot, self.fleet)
            instructions += self._settle(one.request, pick, now, queued_ms)
        return instructions

    def _instead(self, one: Decided, now: float) -> Pick:
        """A scheduler did not decide: late binding has, or the policy does, unless what it wants has no room."""
        kept = one.room.kept(self.fleet) if one.room is not None else None
        if kept is not None and one.room is not None and one.room.waited:
            return kept
        pick = self._choose(one.request, now, one.policy)
        opened = self.desk.opened(self.fleet, now) if self.desk is not None and kept is not None else None
        return pick if kept is None or opened is None or pick.slot < 0 or opened[pick.slot] else kept

    def _bound(self, bound: Bound, now: float) -> list[Instruction]:
        """A request that waited goes now."""
        assert self.desk is not None
        waiting, by = bound.waiting, self.desk.policy
        pick = Pick(bound.slot, hit_share=bound.hit_share, best_share=bound.best_share, by=by, second=bound.second)
        if self.parking is not None:
            room = Room(self.desk.opened(self.fleet, now), waiting.since, waiting.deadline, pick, waited=True)
            asked = self._ask(waiting.request, now, room)
            if asked:
                return asked
        return self._send(waiting.request, pick, now, (now - waiting.since) * 1e3)

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
            second=second(pick, self.fleet.table),
            target=request.target,
            shown=request.model if request.target else "",
            evictable=self.desk is not None and self.desk.may_evict(request),
        )
        return [route, decided(request, pick, self.fleet, now, self.policy.name, lease, queued_ms), *shown]

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
        return ended(lease, event, usage, cause, self._clock.time())

    def _stream_lost(self, event: ev.StreamLost) -> list[Instruction]:
        asked = self.parking.cancel(event.request_id) if self.parking is not None else None
        if asked is not None:
            return self._asked_in_vain(asked)
        waited = self.desk.lost(event.request_id, self._clock.time()) if self.desk is not None else []
        evicted = self.desk is not None and self.desk.evicted(event.request_id)
        return waited or self._give_up(event.request_id, "evicted" if evicted else "stream-lost")

    def _asked_in_vain(self, question: Question) -> list[Instruction]:
        """The client went away while a scheduler was asked."""
        self.fleet.unreserve(question.request.id)
        if self.desk is None or question.room is None:
            return []
        now = self._clock.time()
        return [self.desk.gone(question.request, now, question.room.queued_ms(now))]

    def _give_up(self, request_id: int, cause: str) -> list[Instruction]:
        lease = self.fleet.ledger.release(request_id)
        return [] if lease is None else [self._ended(lease, ev.ResponseEnded(request_id=request_id), cause)]

    # ---- the fleet ----

    def _endpoint_up(self, event: ev.EndpointUp) -> list[Instruction]:
        return self._endings.add(self.fleet.up(event.endpoint), "endpoint-gone")

    def _endpoint_down(self, event: ev.EndpointDown) -> list[Instruction]:
        return self._endings.add(self.fleet.down(event.endpoint_id), "endpoint-gone")

    def _metrics_sampled(self, event: ev.MetricsSampled) -> list[Instruction]:
        held_no_more = self.fleet.sampled(event.endpoint_id, event.started, self._clock.time(), event.sample)
        return self._endings.add(held_no_more, "reconciled")

    def _metrics_failed(self, event: ev.MetricsFailed) -> list[Instruction]:
        self.fleet.scrape_failed(event.endpoint_id, self._clock.time(), event.answered)
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
        if event.name == endings.TIMER:
            return self._endings.some()
        if event.name != EXPIRY_TIMER:
            return self.desk.fired(event.name, self.fleet, now) if self.desk is not None else []
        expired = self.fleet.ledger.expired(now, endings.MOST)
        again = now if len(expired) == endings.MOST else now + EXPIRY_PERIOD
        return [*self._endings.add(expired, "expired"), SetTimer(EXPIRY_TIMER, again)]

    def validate(self) -> None:
        """Raise `AssertionError` when an invariant of any part is broken."""
        self.fleet.validate()
        if self.desk is not None:
            self.desk.validate()
        if self.parking is not None:
            self.parking.validate()
        held = self.fleet.ledger.get
        assert all(held(request_id) is not None or request_id in self._endings for request_id in self._usage)
