"""START HERE: one request's way through the scheduler.

    received    the ext_proc session reads the gateway's messages until the request is complete
    parsed      `apis` reads the body → `RequestArrived`
    named       `core/models` determines the request's target model and priority
    admitted    at once if an endpoint is open, else the request waits in `core/flow_control` until one is
    scheduled   the policy chooses an endpoint; the lease is charged in the same call
    routed      `Route` or `Reject` goes back to the session, which answers the gateway
    observed    `FirstTokenSeen` releases the prefill part of the lease, `ResponseEnded` the rest; metrics and the
                journal get a record

Rules
* Only `handle` changes state, except the index of KV events (`pool.kv_events.pump`). It is synchronous, does no I/O,
  and uses only the clock and the random generator that it was given. So feeding a log of events to it again replays
  the same decisions.
* Every request here has one entry in `requests`. The entry's state determines which events are valid and what is held
  for the request: see `fairlead.core.requests`. Only `handle` ignores late events.
* Every `RequestArrived` is answered by exactly one `Route` or `Reject`, at once or by a later call, unless its
  `StreamLost` comes first. Every routed request ends in exactly one `OutcomeRecord`, whatever mix of ends,
  cancels, losses, expiries and departures follows.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from math import inf
from random import Random

import numpy as np
from msgspec import structs

from fairlead.core import events as ev
from fairlead.core.apis import BEGUN_ONCE, RESPONSES_STORED
from fairlead.core.binding import Bound
from fairlead.core.clock import Clock
from fairlead.core.errors import PLUGIN_FAILURES, REST_S, ConfigError, PluginError, described, hung, rests_until
from fairlead.core.fleet import BYTES_SHARE, Fleet
from fairlead.core.flow import DISPLACED, EVICTED, LEFT, FlowKey, Waiting
from fairlead.core.flow_control import ANYBODY, MARGIN, FlowControl, FlowController
from fairlead.core.instructions import (
    AdoptConfiguration,
    Evict,
    Hold,
    Instruction,
    ListAdapters,
    RefuseConfiguration,
    Reject,
    Route,
    SetTimer,
    WarmUp,
)
from fairlead.core.learned import Common
from fairlead.core.ledger import Lease
from fairlead.core.models import MODEL_NOT_FOUND, Catalogue, Refusal, applied, unnamed
from fairlead.core.outcomes import OutcomeObservers
from fairlead.core.parking import TIMER as REMOTE_TIMER
from fairlead.core.parking import Decided, Parking, Question, Reservation
from fairlead.core.peers import TIMER as PEERS_TIMER
from fairlead.core.peers import Peers
from fairlead.core.policy import Able, Answer, Context, Picked, Policy, Refused, choice_of, own
from fairlead.core.profile import Profile, in_order, runner_up
from fairlead.core.queues import Queues
from fairlead.core.records import DecisionRecord, OutcomeRecord, Snapshot
from fairlead.core.remote import RemotePolicy
from fairlead.core.reports import SharedFleet
from fairlead.core.request import Request, Usage
from fairlead.core.requests import OF_REQUEST, TRANSITIONS, RequestEntry, Requests, RequestState, Trigger
from fairlead.core.scheduling import Build
from fairlead.core.shadow import CaseTaker
from fairlead.core.stalls import TIMED_S
from fairlead.core.tokens import TokenEstimator, report_weight

#: Name of the timer that ends more requests, and how many one call ends.
ENDINGS_TIMER, MOST = "endings", 64
#: Name and period (seconds) of the timer that looks for expired leases.
EXPIRY_TIMER = "expire-leases"
EXPIRY_PERIOD = 5.0
STALLS_TIMER = "look-for-stalls"
#: Statuses of requests that the client gave up, by a gRPC deadline for example: they say nothing about the endpoint.
GIVEN_UP = (408, 499)
#: With more requests than this, flow control goes on counting them when one flow is left: if another comes, all must be
#: counted in one call.
COUNTED_AT_ONCE = 1000
S, T = RequestState, Trigger
_UNKNOWN = Usage()


class _NoQueues:
    """Stands in for the queues when there is no flow control: no request waits."""

    count = 0


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
        flow_controller: FlowController | None = None,
        *,
        remotes: Mapping[str, RemotePolicy] | None = None,
        shadows: CaseTaker | None = None,
        snapshot: Callable[[Fleet, float], Snapshot] | None = None,
        build: Build | None = None,
        alternatives: int = 0,
        drawn_from: Able = lambda request, fleet, now: None,
    ) -> None:
        """`flow_controller`: `None` = every request is scheduled at once. `remotes`: schedulers in other processes
        that `policy` may ask, by name. `shadows`: gets a copy of each decision for the policies on trial. `snapshot`:
        copies what each decision was made from. `build`: builds a scheduler from a `Reconfigured`; `None` = each is
        refused. `alternatives`: how many a `Route` names. `drawn_from`: slots to draw from if `policy` fails."""
        self._clock, self._rng = clock, rng
        self.fleet, self._stalls, self._stalled = fleet, fleet.stalls, fleet.stalls.changes
        self._decide_by(policy, drawn_from)
        #: Parsers read it to estimate prompt tokens; only the pipeline makes it learn.
        self.tokens = tokens
        self._report, self._build = on_plugin_error, build
        self._put_in_control(flow_controller)
        #: The definitions of model names; an empty catalogue changes no request.
        self.models = Catalogue()
        self.snapshot, self.shadows, self.alternatives = snapshot, shadows, alternatives
        #: Questions to schedulers in other processes; `None` = there are none.
        self.parking: Parking | None = None if remotes is None else Parking(remotes)
        self.peers = Peers(clock, fleet, flow_controller.flow if flow_controller is not None else None)
        self.requests = Requests()
        self._endings = Endings(clock, self._over)
        self._by_kind: dict[type, Callable[..., list[Instruction]]] = {
            ev.RequestArrived: self._request_arrived,
            ev.FirstTokenSeen: self._first_token_seen,
            ev.ResponseBegan: self._response_began,
            ev.RequestMoved: self._request_moved,
            ev.UsageReported: self._usage_reported,
            ev.ResponseEnded: self._response_ended,
            ev.StreamLost: self._stream_lost,
            ev.GatewayAnswered: self._gateway_answered,
            ev.EndpointUp: self._endpoint_up,
            ev.EndpointDown: self._endpoint_down,
            ev.MetricsSampled: self._metrics_sampled,
            ev.MetricsFailed: self._metrics_failed,
            ev.AdaptersListed: self._adapters_listed,
            ev.ModelsChanged: self._models_changed,
            ev.Reconfigured: self._reconfigured,
            ev.Restored: self._restored,
            **dict.fromkeys((ev.PeerHeard, ev.PeerSnapshot, ev.PeerLost), self._peer),
            **dict.fromkeys((ev.RemoteUp, ev.RemoteDown, ev.RemotePicked), self._remote),
            ev.ShadowsJudged: lambda event: list(event.records),
            ev.StopAsked: self._stop_asked,
            ev.TimerFired: self._timer_fired,
        }
        self._listen()

    def handle(self, event: ev.Event) -> list[Instruction]:
        """Process one event and return the instructions that follow from it."""
        kind = type(event)
        if kind not in OF_REQUEST:
            instructions = self._handlers[kind](event)
        else:
            entry = self.requests.get(event.request_id)  # type: ignore[union-attr]
            if entry is None or not TRANSITIONS[entry.state][kind]:
                instructions = []  # late
            else:
                instructions = self._handlers[kind](entry, event)
        if self._stalled:
            instructions = [*instructions, *self._stalls.take_changes()]
        if self._queues.count:
            flow = self.flow_controller
            assert flow is not None, "somebody waits"
            instructions = instructions + flow.dispatched(self._bound, self._evict, self.fleet, self._clock.time())
            if flow.flow.draining:
                self._drained(flow)
        return instructions

    def start(self) -> list[Instruction]:
        """The first instructions, before any event."""
        now = self._clock.time()
        return [SetTimer(EXPIRY_TIMER, now + EXPIRY_PERIOD), SetTimer(STALLS_TIMER, now + TIMED_S)]

    # ---- scheduled ----

    def _request_arrived(self, event: ev.RequestArrived) -> list[Instruction]:
        now = self._clock.time()
        if now >= self._stalls.due:
            self._stalls.look(now)
        request = event.request
        if not self.models.empty or request.rewrite:
            resolution = self.models.resolve(request, self._rng)
            if isinstance(resolution, Refusal):
                if self.fleet.exact is not None:
                    self.fleet.exact.dropped(request)
                return unnamed(request, resolution, now, self.policy.name, event.client)
            request = applied(request, resolution, self.models.rewrites or bool(request.rewrite))
        entry = self.requests.add(request, event.client)
        flow = self.flow_controller
        if flow is not None:
            control = flow.flow
            only = control.only
            if only is not None:
                key = FlowKey(request.priority, request.model, request.fairness_id)
                if self.parking is None and (key == only or only is ANYBODY):
                    control.only = key
                    pick = self._choose(self.policy, request, now)
                    if isinstance(pick, Picked) and control.gate.admits(pick.slot, self.fleet, now):
                        return self._route(entry, ev.RequestArrived, pick, now)
                    self._count(control)
                    return self._admitted(flow, entry, now, pick)
                self._count(control)
            return self._admitted(flow, entry, now, None)
        if self.parking is not None:
            asked = self._ask(self.parking, entry, ev.RequestArrived, now)
            if asked:
                return asked
        return self._send(entry, ev.RequestArrived, self._choose(self.policy, request, now), now)

    def _admitted(
        self, flow: FlowController, entry: RequestEntry, now: float, pick: Answer | None
    ) -> list[Instruction]:
        """Let flow control send, queue or refuse the request. If a remote scheduler decides, one open endpoint anywhere
        is enough to send it. `pick`: the policy's answer; `None` = it was not asked yet."""
        question = None
        request, control, arrived = entry.request, flow.flow, ev.RequestArrived
        reservation = Reservation(None, now)
        if control.asks(request, self.fleet, now):
            if self.parking is not None and self.parking.reaches(self.policy, request, now):
                reservation.opened = flow.opened(self.fleet, now)
                question = self.parking.question(self.policy, request, self.fleet, now, reservation)
            elif pick is None:
                pick = self._choose(self.policy, request, now)
        slot = reservation.slot if pick is None else pick.slot if isinstance(pick, Picked) else -1
        outcome = control.arrived(request, self.fleet, now, slot, self._output)
        if outcome is None:
            if self.parking is not None:
                asked = self._ask(self.parking, entry, arrived, now, reservation, question)
                if asked:
                    return asked
            return self._send(entry, arrived, pick or self._choose(self.policy, request, now), now)
        if isinstance(outcome, Refused):
            self._unrouted(entry, arrived)
            return flow.refused(request, outcome, now, entry.client)
        waiting, displaced = outcome
        entry.waiting = waiting
        self.requests.move(entry, arrived, S.QUEUED)
        given_way = self._sent_away(((moved, DISPLACED) for moved in displaced), T.DISPLACED, now)
        return [*given_way, Hold(request.id, waiting.deadline - now + MARGIN, entry.client)]

    def _count(self, control: FlowControl) -> None:
        """Count requests by flow from now on, including those in flight."""
        sent = [(entry, entry.lease) for entry in self.requests if entry.lease is not None and entry.charge is None]
        charges = control.count([(lease, 2.0 * lease.growth_tokens) for _, lease in sent], self.fleet)
        for (entry, _), charge in zip(sent, charges, strict=True):
            entry.charge = charge

    def _output(self, request: Request) -> int:
        """Return the output tokens expected of the request, summed over its sequences."""
        tokens = self.tokens.estimate_output(request.target_model, request.max_tokens, request.api)
        return tokens * request.sequences

    def _ask(
        self,
        parking: Parking,
        entry: RequestEntry,
        trigger: type | Trigger,
        now: float,
        reservation: Reservation | None = None,
        question: Question | None = None,
    ) -> list[Instruction]:
        """Ask the scheduler in another process about the request. No instructions = decide the request here."""
        request = entry.request
        question = question or parking.question(self.policy, request, self.fleet, now, reservation)
        if question is None:
            parking.missed(self.policy, request, now)
            return []
        entry.question = question
        self.requests.move(entry, trigger, S.ASKED_ELSEWHERE)
        return parking.ask(question, self.fleet, now, self._output(request))

    def _refused(
        self, entry: RequestEntry, trigger: type | Trigger, pick: Refused, now: float, queued_ms: float
    ) -> list[Instruction]:
        self._unrouted(entry, trigger)
        request, unknown = entry.request, pick.reason == MODEL_NOT_FOUND
        record = DecisionRecord(
            request=request,
            at=now,
            policy=pick.by or self.policy.name,
            outcome=pick.reason,
            status=pick.status,
            queued_ms=queued_ms,
            trace=pick.trace,
        )
        reject = Reject(
            request_id=request.id,
            status=pick.status,
            reason=pick.reason,
            message=pick.message,
            retry_after_s=-1.0 if unknown else 1.0,
            api=request.api,
            param="model" if unknown else None,
            client=entry.client,
        )
        return [reject, record]

    def _unrouted(self, entry: RequestEntry, trigger: type | Trigger) -> None:
        """End a request that was never sent to an endpoint."""
        self._settle(entry)
        self.requests.end(entry, trigger)
        if self.fleet.exact is not None:
            self.fleet.exact.dropped(entry.request)

    def _settle(self, entry: RequestEntry, status: int = 0, tokens: int = -1, duration_ms: float = 0.0) -> None:
        """Charge the request's flow for the work done, and stop counting the request as in flight.

        `tokens`: of the answer, -1 = unknown. `duration_ms`: 0 = it did not run, -1 = unknown."""
        if entry.charge is not None and self.flow_controller is not None:
            self.flow_controller.flow.settle(entry.charge, status, tokens, duration_ms, self._clock.time())
            entry.charge = None

    def _remote(self, event: ev.RemoteUp | ev.RemoteDown | ev.RemotePicked) -> list[Instruction]:
        parking, now = self.parking, self._clock.time()
        if parking is None:
            return []
        if isinstance(event, ev.RemotePicked):
            return self._decide(parking.picked(event, self._question, self.fleet, now), ev.RemotePicked)
        if isinstance(event, ev.RemoteDown):
            return self._decide(parking.lost(event.remote), ev.RemoteDown)
        parking.up(event.remote)
        return []

    def _question(self, request_id: int) -> Question | None:
        entry = self.requests.get(request_id)
        return entry.question if entry is not None else None

    def _decide(self, over: Iterable[Decided], trigger: type | Trigger) -> list[Instruction]:
        """Send or refuse the requests whose question to a remote scheduler is over, one after the other. Each decision
        sees the charges of the requests before it and the reservations of those after it."""
        now, instructions = self._clock.time(), list[Instruction]()
        for question, picked in over:
            entry, kept = self._unasked(question), question.reservation
            queued_ms = kept.queued_ms(now) if kept is not None else 0.0
            pick = picked or self._instead(question, now)
            if isinstance(pick, Picked) and pick.fallback_slot < 0 and kept is not None:
                pick.fallback_slot = kept.fallback_slot(pick.slot, self.fleet)
            sent = self._send(entry, trigger, pick, now, queued_ms)
            instructions += sent if queued_ms else self._after_question(entry, sent, (now - question.asked_at) * 1e3)
        return instructions

    def _after_question(self, entry: RequestEntry, sent: list[Instruction], asked_ms: float) -> list[Instruction]:
        """Note the time of the question in the lease and in the record: the model servers did not take it."""
        if entry.lease is not None:
            entry.lease.sent_after(asked_ms)
        return [structs.replace(i, asked_ms=asked_ms) if isinstance(i, DecisionRecord) else i for i in sent]

    def _unasked(self, question: Question) -> RequestEntry:
        """Remove a question that is over from its request, and release its reservation. Return the request's entry."""
        entry = self.requests.get(question.request.id)
        assert entry is not None and entry.question is question
        entry.question = None
        if question.reservation is not None and question.reservation.lease is not None:
            self.fleet.ledger.release(question.reservation.lease)
        return entry

    def _instead(self, question: Question, now: float) -> Answer:
        """Decide a request that a remote scheduler left undecided. If the request waited, late binding's choice is
        kept. Otherwise the policy chooses; if its endpoint is not open, the reserved endpoint is used."""
        reservation = question.reservation
        kept = reservation.kept(self.fleet) if reservation is not None else None
        if kept is not None and reservation is not None and reservation.waited:
            return kept
        self.fleet.settle_prompts(now)
        pick = self._choose(question.policy or self.policy, question.request, now)
        flow = self.flow_controller
        opened = flow.opened(self.fleet, now) if flow is not None and kept is not None else None
        if kept is None or opened is None or isinstance(pick, Refused) or opened[pick.slot]:
            return pick
        kept.notify = pick.notify
        return kept

    def _bound(self, bound: Bound, now: float) -> list[Instruction]:
        """Send a waiting request to the endpoint that late binding chose, or ask a remote scheduler about it."""
        waiting, flow = bound.waiting, self.flow_controller
        assert flow is not None
        entry = self._unqueued(waiting)
        trace = bound.trace
        if self.snapshot is not None and trace is not None:
            trace.snapshot = self.snapshot(self.fleet, now)
        by = bound.by or flow.policy
        pick = Picked(bound.slot, hit_share=bound.hit_share, best_share=bound.best_share, by=by, trace=trace)
        pick.fallback_slot, pick.notify = bound.fallback_slot, bound.notify
        if self.parking is not None:
            opened = flow.opened(self.fleet, now)
            reservation = Reservation(opened, waiting.since, waiting.deadline, pick, waited=True)
            asked = self._ask(self.parking, entry, T.DISPATCHED, now, reservation)
            if asked:
                return asked
        return self._send(entry, T.DISPATCHED, pick, now, (now - waiting.since) * 1e3)

    def _unqueued(self, waiting: Waiting) -> RequestEntry:
        entry = self.requests.get(waiting.request.id)
        assert entry is not None and entry.waiting is waiting
        entry.waiting, entry.charge = None, waiting.charge
        return entry

    def _sent_away(self, refused: Iterable[tuple[Waiting, Refused]], trigger: Trigger, now: float) -> list[Instruction]:
        """Refuse requests that have left their queue."""
        instructions: list[Instruction] = []
        for waiting, why in refused:
            entry = self._unqueued(waiting)
            self._unrouted(entry, trigger)
            assert self.flow_controller is not None
            instructions += self.flow_controller.refused(waiting.request, why, now, entry.client, waiting)
        return instructions

    def _send(
        self, entry: RequestEntry, trigger: type | Trigger, pick: Answer, now: float, queued_ms: float = 0.0
    ) -> list[Instruction]:
        if isinstance(pick, Refused):
            return self._refused(entry, trigger, pick, now, queued_ms)
        return self._route(entry, trigger, pick, now, queued_ms)

    def _route(
        self, entry: RequestEntry, trigger: type | Trigger, pick: Picked, now: float, queued_ms: float = 0.0
    ) -> list[Instruction]:
        """Charge the request to the picked endpoint. Return the `Route`, the record and what shadows ask for."""
        request, fleet, slot = entry.request, self.fleet, pick.slot
        if pick.notify is not None:
            pick.notify(request, slot, fleet)
        endpoint, flow = fleet.table.endpoints[slot], self.flow_controller
        assert endpoint is not None, "policies pick among living endpoints"
        model, hit = request.target or request.model, int(pick.hit_share * request.prompt_tokens)
        expected = request.sequences * self.tokens.estimate_output(model, request.max_tokens, request.api)
        shown = self.shadows.take(request, pick, fleet, now, expected) if self.shadows is not None else []
        prefill = fleet.table.endpoints[pick.prefill_slot] if pick.prefill_slot >= 0 else None
        if prefill is None:
            lease = fleet.charge(request, slot, now, hit, expected)
        else:
            lease = fleet.charge_pair(request, slot, pick.prefill_slot, now, hit, expected, pick.handover_ms)
        if self._stalls.retried:
            self._stalls.charged((slot, pick.prefill_slot), now)
        if fleet.exact is not None:
            lease.predicted = fleet.exact.sent(request, slot, pick.prefill_slot, now, fleet.unlisted(model, slot))
        if queued_ms:
            lease.queued_ms, lease.forecast = queued_ms, fleet.predictor.late(slot, lease.forecast)
        entry.lease = lease
        if flow is not None and flow.flow.only is None and entry.charge is None:
            entry.charge = flow.flow.sent(request, slot, lease.computed, expected, fleet, now)
        self.requests.move(entry, trigger, S.ROUTED)
        fallback_slot = pick.fallback_slot  # `runner_up` returns it too: this saves the call
        if fallback_slot < 0 or fallback_slot == slot or prefill is not None:
            fallback_slot = runner_up(pick, fleet.table)
        fallback = fleet.table.endpoints[fallback_slot] if fallback_slot >= 0 else None
        route = Route(
            request.id,
            endpoint,
            prefill.address if prefill else "",
            fallback.address if fallback else "",
            request.target,
            request.model if request.target else "",
            request.priority < 0 and flow is not None and flow.evicts,
            entry.client,
            repeatable=request.api not in BEGUN_ONCE,
            hedge_after_ms=self._stalls.hedge_after_ms(lease) if fallback else 0.0,
        )
        if self.alternatives:
            route = self._with_alternatives(route, pick, fallback_slot)
        record = DecisionRecord(
            request=request,
            at=now,
            policy=pick.by or self.policy.name,
            endpoint=endpoint.id,
            address=endpoint.address,
            prefill=prefill.id if prefill else "",
            hit_tokens=hit,
            best_hit_tokens=int(pick.best_share * request.prompt_tokens),
            overloaded=pick.overloaded,
            queued_ms=queued_ms,
            forecast=lease.forecast,
            trace=pick.trace,
        )
        return [route, record, *shown]

    def _with_alternatives(self, route: Route, pick: Picked, fallback_slot: int) -> Route:
        table = self.fleet.table
        endpoints = [table.endpoints[slot] for slot in in_order(pick, fallback_slot, table, self.alternatives + 1)]
        addresses = [endpoint.address for endpoint in endpoints if endpoint is not None]
        return structs.replace(route, destination=",".join(addresses))

    def _decide_by(self, policy: Policy, drawn_from: Able) -> None:
        self.policy, self._drawn_from = policy, drawn_from
        if isinstance(self.fleet, SharedFleet):
            self.fleet.reports.decide_by(policy.name)
        #: The policy if it is one of Fairlead's profiles, whose picks need no check; else `None`.
        self._own_policy = policy if isinstance(policy, Profile) and own(policy) else None
        #: Clock seconds until which it is not called (`errors.rests_until`).
        self._rests_until = -inf

    def _listen(self) -> None:
        """Tell the policy's plugins from now on how requests end. Without such plugins this costs nothing."""
        observers, handlers = OutcomeObservers(self.policy, self._report), self._by_kind
        if observers:
            handlers = {kind: observers.after(handler, self._clock) for kind, handler in handlers.items()}
        self._handlers = handlers

    def _choose(self, policy: Policy, request: Request, now: float) -> Answer:
        try:
            if policy is self._own_policy:
                pick = policy.choose(request, self.fleet, Context(now, self._rng))
            elif policy is self.policy and now < self._rests_until:
                return self._anywhere(request, now)
            else:
                pick = choice_of(policy, request, self.fleet, Context(now, self._rng))
            if self.snapshot is not None and pick.trace is not None:
                pick.trace.snapshot = self.snapshot(self.fleet, now)
            return pick
        except PLUGIN_FAILURES as error:  # a policy may come from anywhere: its failure must not become the client's
            failure = PluginError(policy.name, described(error))
            if policy is self.policy and hung(error):
                self._rests_until = rests_until(self._rests_until, now)
                if now < self._rests_until:
                    failure = failure.with_note(f"it decides nothing for {REST_S:.0f} s: endpoints are drawn at random")
            if self._report is not None:
                self._report(failure)
        return self._anywhere(request, now)

    def _anywhere(self, request: Request, now: float) -> Answer:
        """Return a choice at random, for a policy that failed, also where no endpoint is left to draw from."""
        table = self.fleet.table
        if not table.count:
            return Refused("rejected-no-endpoints", "the pool has no endpoints")
        able = self._drawn_from(request, self.fleet, now)
        slots = np.flatnonzero(able if able is not None and np.count_nonzero(able) else table.alive)
        return Picked(int(slots[int(self._rng.random() * len(slots))]))

    # ---- observed ----

    def _first_token_seen(self, entry: RequestEntry, event: ev.FirstTokenSeen) -> list[Instruction]:
        assert entry.lease is not None
        self.requests.move(entry, ev.FirstTokenSeen, S.ANSWERING)
        self.fleet.first_token(entry.lease, self._clock.time())
        return []

    def _response_began(self, entry: RequestEntry, event: ev.ResponseBegan) -> list[Instruction]:
        assert entry.lease is not None
        entry.lease.preceded = True
        return []

    def _request_moved(self, entry: RequestEntry, event: ev.RequestMoved) -> list[Instruction]:
        """Move the lease to the endpoint that answers the request, at most once."""
        lease = entry.lease
        assert lease is not None
        there = (slot for slot, endpoint in self.fleet.table.slots() if endpoint.address == event.address)
        slot = next(there, -1)
        elsewhere = slot >= 0 and self.fleet.table.ids[slot] != lease.endpoint_id
        if not lease.unreached and elsewhere:
            self._endings.orphans.pop(entry, None)
            entry.lease = self.fleet.move(lease, slot, self._clock.time(), event.first_token)
            self.requests.move(entry, ev.RequestMoved, S.ANSWERING)
        elif not lease.unreached and lease.held:  # the gateway began a second attempt, but the first one answered
            self.fleet.stalls.hedged_in_vain()
        return []

    def _usage_reported(self, entry: RequestEntry, event: ev.UsageReported) -> list[Instruction]:
        entry.usage = event.usage
        self._learn(entry.request, event.usage)
        return []

    def _learn(self, request: Request, usage: Usage) -> None:
        model = request.target_model
        if usage.prompt_tokens > 0 and request.prompt_bytes > 0:
            ratio = self.tokens.learn(model, request.prompt_bytes, usage.prompt_tokens, request.api)
            if request.api != RESPONSES_STORED:  # most of its prompt may be stored, and not in its body
                self.fleet.measured(ratio, BYTES_SHARE * report_weight(request.prompt_bytes))
        if usage.completion_tokens > 0:
            tokens = -(-usage.completion_tokens // request.sequences)
            self.tokens.learn_output(model, tokens, request.max_tokens, request.api)

    def _response_ended(self, entry: RequestEntry, event: ev.ResponseEnded) -> list[Instruction]:
        lease, fleet = entry.lease, self.fleet
        assert lease is not None
        now = self._clock.time()
        if not fleet.ledger.release(lease):
            return [self._orphan_ended(entry, lease, event, now)]
        if event.client_gone or event.upstream_reset:
            return [self._cut_short(entry, lease, event, now)]
        done = 200 <= event.status < 300
        if (not done or fleet.table.troubled) and event.status not in GIVEN_UP and not event.unsent:
            fleet.ended(lease, 0 < event.status < 500, now)
        usage, tokens = entry.usage, -1
        if event.usage is not None:
            usage = entry.usage = event.usage
            self._learn(entry.request, usage)
        if usage is not None:
            tokens = usage.completion_tokens
            self.tokens.learn_answer(entry.request, event.response_bytes, tokens)
        if done:
            if lease.mark is not None and lease.blind and tokens < 0:
                tokens = self.tokens.answer_tokens(entry.request, event.response_bytes)
            fleet.completed(lease, now, tokens, event.ttft_ms, event.duration_ms)
        elif (event.unsent or 400 <= event.status < 500) and lease.first_token_at < 0.0:
            fleet.refused(lease)
            if event.status == 404 and fleet.without_model(lease.slot, entry.request.target_model):
                ended = self._ended(entry, lease, ev.ResponseEnded, event, "natural", now)
                return [ended, ListAdapters(lease.endpoint_id)]
        return [self._ended(entry, lease, ev.ResponseEnded, event, "natural", now)]

    def _orphan_ended(self, entry: RequestEntry, lease: Lease, event: ev.ResponseEnded, now: float) -> OutcomeRecord:
        """End a request whose endpoint left. Learn nothing for its slot, which another endpoint may have now."""
        self._endings.orphans.pop(entry, None)
        if event.usage is not None:
            entry.usage = event.usage
            self._learn(entry.request, event.usage)
        cause = "natural"
        if event.client_gone:
            cause = "client-disconnect"
        elif event.upstream_reset:
            cause = "evicted" if lease.evicted_at >= 0.0 else T.ENDPOINT_GONE.value
        return self._ended(entry, lease, ev.ResponseEnded, event, cause, now)

    def _cut_short(self, entry: RequestEntry, lease: Lease, event: ev.ResponseEnded, now: float) -> OutcomeRecord:
        """The client or the model server ended a response before it was complete."""
        entry.usage = event.usage or entry.usage
        cause = "upstream-reset"
        if event.client_gone:
            cause = "client-disconnect"
            if entry.state is S.ROUTED:
                self.fleet.left(lease, now)
            if event.upstream_reset and lease.evicted_at < 0.0 and self.fleet.unfinished(lease, now):
                cause = "upstream-reset"
        elif lease.evicted_at >= 0.0:
            cause = "evicted"
        else:
            self.fleet.ended(lease, False, now)
        return self._ended(entry, lease, ev.ResponseEnded, event, cause, now)

    def _ended(
        self,
        entry: RequestEntry,
        lease: Lease,
        trigger: type | Trigger,
        event: ev.ResponseEnded,
        cause: str,
        now: float,
    ) -> OutcomeRecord:
        """End a routed request whose lease is released already. Return its record."""
        usage = entry.usage or _UNKNOWN
        if self.fleet.exact is not None:
            self.fleet.exact.ended(lease.predicted, usage, 200 <= event.status < 300, now)
        if entry.charge is not None:
            tokens = usage.completion_tokens
            if tokens < 0 and cause == "natural" and 200 <= event.status < 300:  # the estimate may have improved since
                tokens = self._output(entry.request)
            self._settle(entry, event.status, tokens, event.duration_ms)
        self.requests.end(entry, trigger)
        ttft_ms = event.ttft_ms if event.status < 300 else -1.0  # an error has no tokens
        if lease.request.stream and ttft_ms >= 0.0:
            ttft_ms = lease.ttft_ms(ttft_ms)
        return OutcomeRecord(
            request=entry.request,
            at=now,
            endpoint=lease.endpoint_id,
            status=event.status,
            cause=cause,
            ttft_ms=ttft_ms,
            duration_ms=event.duration_ms,
            response_bytes=event.response_bytes,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            hit_tokens=lease.hit_tokens,
            forecast=lease.forecast,
            unreached=lease.unreached,
            queued_ms=lease.queued_ms,
        )

    def _stream_lost(self, entry: RequestEntry, event: ev.StreamLost) -> list[Instruction]:
        now, flow = self._clock.time(), self.flow_controller
        if entry.lease is not None:
            self._endings.orphans.pop(entry, None)
            if entry.lease.evicted_at < 0.0:
                return self._given_up(entry, ev.StreamLost, "stream-lost")
            self._settle(entry, duration_ms=-1.0)  # charged for as long as it ran
            status = EVICTED.status if entry.state is S.ROUTED else 0  # 0: an answer had begun
            return self._given_up(entry, ev.StreamLost, "evicted", status)
        queued_ms, waiting = 0.0, entry.waiting
        if waiting is not None and flow is not None:
            flow.flow.queues.remove(waiting)
            entry.waiting = None
        elif entry.question is not None and self.parking is not None:
            question = entry.question
            self.parking.cancel(question)
            self._unasked(question)
            queued_ms = question.reservation.queued_ms(now) if question.reservation is not None else 0.0
        self._unrouted(entry, ev.StreamLost)
        return [] if flow is None else [flow.record(entry.request, LEFT, now, waiting, queued_ms)]

    def _given_up(self, entry: RequestEntry, trigger: type | Trigger, cause: str, status: int = 0) -> list[Instruction]:
        assert entry.lease is not None
        now = self._clock.time()
        self.fleet.ledger.release(entry.lease)
        if trigger is ev.StreamLost and entry.state is S.ROUTED:
            self.fleet.left(entry.lease, now)
        end = ev.ResponseEnded(request_id=entry.request.id, status=status)
        return [self._ended(entry, entry.lease, trigger, end, cause, now)]

    def _over(self, entry: RequestEntry, why: Trigger) -> list[Instruction]:
        """End one request of a batch in `Endings`."""
        if why is T.ENDPOINT_GONE:
            self._orphaned(entry)
            return []
        cause = T.ENDPOINT_GONE if entry.state is S.ENDING else why
        return self._given_up(entry, why, cause.value) if TRANSITIONS[entry.state][why] else []

    def _orphaned(self, entry: RequestEntry) -> None:
        """Keep a request whose endpoint left: the endpoint may still answer it. Its end is awaited until its lease
        would have expired."""
        lease = entry.lease
        if entry.state is S.ENDING and lease is not None:
            self._settle(entry, duration_ms=-1.0)
            if self.fleet.exact is not None:
                self.fleet.exact.ended(lease.predicted, _UNKNOWN, False, self._clock.time())
                lease.predicted = None
            self._endings.orphans[entry] = lease.charged_at + self.fleet.ledger.ttl

    def _evict(self, lease: Lease, rejection: Reject) -> Evict:
        entry = self.requests.get(lease.request.id)
        assert entry is not None and entry.lease is lease
        self.requests.move(entry, T.EVICTED, entry.state)
        lease.evicted_at = self._clock.time()
        client, entry.client = entry.client, None
        return Evict(rejection, client)

    # ---- the fleet ----

    def _gateway_answered(self, event: ev.GatewayAnswered) -> list[Instruction]:
        self._stalls.gateway_answered(self._clock.time())
        return []

    def _endpoint_up(self, event: ev.EndpointUp) -> list[Instruction]:
        flow = self.flow_controller
        if not self.fleet.table.count and flow is not None and len(flow.flow) and flow.flow.holds:
            self.fleet.doubt(self._clock.time())
        abandoned = self._abandoned(self.fleet.up(event.endpoint, event.listing))
        self.peers.joined(event.endpoint.id)
        return abandoned

    def _endpoint_down(self, event: ev.EndpointDown) -> list[Instruction]:
        return self._abandoned(self.fleet.down(event.endpoint_id))

    def _abandoned(self, leases: list[Lease]) -> list[Instruction]:
        """Begin to end the requests of an endpoint that left. Their `leases` are released already."""
        entries = self._entries(leases)
        for entry in entries:
            self.requests.move(entry, T.ENDPOINT_GONE, S.ENDING)
        return self._endings.add(entries, T.ENDPOINT_GONE)

    def _entries(self, leases: Iterable[Lease]) -> list[RequestEntry]:
        return [entry for lease in leases if (entry := self.requests.get(lease.request.id)) is not None]

    def _metrics_sampled(self, event: ev.MetricsSampled) -> list[Instruction]:
        now = self._clock.time()
        self.peers.sampled(event.endpoint_id, event.started)
        held_no_more = self.fleet.sampled(event.endpoint_id, event.started, now, event.sample)
        if now >= self._stalls.due:
            self._stalls.look(now)
        asked: list[Instruction] = [ListAdapters(event.endpoint_id)] if self.fleet.adapters.news() else []
        if self.fleet.cold:
            asked += map(WarmUp, self.fleet.cold)
            self.fleet.cold.clear()
        return asked + self._endings.add(self._entries(held_no_more), T.RECONCILED) if held_no_more else asked

    def _metrics_failed(self, event: ev.MetricsFailed) -> list[Instruction]:
        now = self._clock.time()
        self.fleet.scrape_failed(event.endpoint_id, now, event.answered)
        flow = self.flow_controller
        if flow is not None and flow.flow.only is not None and flow.flow.deserted(self.fleet):
            self._count(flow.flow)  # so that each request is asked whether it waits
        if now >= self._stalls.due:
            self._stalls.look(now)
        return []

    def _adapters_listed(self, event: ev.AdaptersListed) -> list[Instruction]:
        self.fleet.adapters_listed(event.endpoint_id, event.adapters, event.base)
        return []

    def _models_changed(self, event: ev.ModelsChanged) -> list[Instruction]:
        self.models = Catalogue(event.models, event.rules)
        self.fleet.table.know(self.models.known, self.models.sent_for)
        return []

    def _reconfigured(self, event: ev.Reconfigured) -> list[Instruction]:
        """Adopt or refuse a new configuration. The next decision already follows it."""
        if self._build is None:
            return [RefuseConfiguration(event.document, "this scheduler keeps the configuration that it began with")]
        try:
            scheduling = self._build(event.document)
        except (PluginError, ConfigError) as error:
            return [RefuseConfiguration(event.document, str(error))]
        self._decide_by(scheduling.policy, scheduling.able)
        self._listen()
        self.shadows = scheduling.shadows
        self.fleet.ledger.ttl = scheduling.lease_ttl
        self._turn(scheduling.flow)
        if self.flow_controller is not None:
            self.flow_controller.follow(scheduling.base.name, scheduling.waiting)
        parking = Parking() if self.parking is None else self.parking
        parking.remotes = scheduling.remotes
        self.parking = parking if parking.remotes or len(parking) else None
        return [AdoptConfiguration(event.document, scheduling)]

    def _put_in_control(self, flow: FlowController | None) -> None:
        self.flow_controller = flow
        #: The queues of flow control, checked after every event.
        self._queues: Queues | _NoQueues = _NoQueues() if flow is None else flow.flow.queues

    def _turn(self, flow: FlowController | None) -> None:
        """Turn flow control on or off. It stays until the requests that wait have been sent."""
        before = self.flow_controller
        if before is None:
            self._put_in_control(flow)
            if flow is not None:
                self.peers.follow(flow.flow)
                if isinstance(self.fleet, SharedFleet):
                    self.fleet.reports.follow(flow.flow)
        elif flow is None:
            before.flow.drain()
            self._drained(before)
        elif before.flow.draining:
            before.flow.drain(flow.flow.gate)

    def _drained(self, flow: FlowController) -> None:
        """Remove flow control that was turned off, once no request waits. Reports keep it, to tell peers that its flows
        want nothing any more."""
        if not flow.flow.queues.count:
            for entry in self.requests:
                self._settle(entry, duration_ms=-1.0)
            flow.flow.only = None
            self._put_in_control(None)
            self.peers.follow(None)

    def _restored(self, event: ev.Restored) -> list[Instruction]:
        if isinstance(event.part, Common):
            self.tokens.restore(event.part.models)
        self.fleet.restore(event.part, event.age_s, self._clock.time(), event.instead)
        return []

    def _peer(self, event: ev.PeerHeard | ev.PeerSnapshot | ev.PeerLost) -> list[Instruction]:
        if isinstance(event, ev.PeerHeard):
            self.peers.batch(event.origin, event.payload, event.lag_s, event.to, event.at_once)
        elif isinstance(event, ev.PeerSnapshot):
            self.peers.snapshot(event.origin, event.payload)
        else:
            self.peers.lost(event.origin)
        if self.flow_controller is not None:
            control = self.flow_controller.flow
            if control.only is not None and control.peers.beside(control.only):
                self._count(control)
        return self._rest_of_snapshots() if isinstance(event, ev.PeerSnapshot) else []

    def _rest_of_snapshots(self) -> list[Instruction]:
        return [SetTimer(PEERS_TIMER, self._clock.time())] if self.peers.unfinished else []

    def _stop_asked(self, event: ev.StopAsked) -> list[Instruction]:
        flow, now = self.flow_controller, self._clock.time()
        return self._sent_away(flow.flow.stop(now), T.STOPPED, now) if flow is not None else []

    def _timer_fired(self, event: ev.TimerFired) -> list[Instruction]:
        now = self._clock.time()
        if event.name == REMOTE_TIMER and self.parking is not None:
            return self._decide(self.parking.expired(now), T.TIMED_OUT) + self.parking.timer()
        if event.name == ENDINGS_TIMER:
            return self._endings.end_some()
        if event.name == STALLS_TIMER:
            self._stalls.timed(now)
            return [SetTimer(STALLS_TIMER, now + TIMED_S)]
        if event.name == PEERS_TIMER:
            self.peers.take_some()
            return self._rest_of_snapshots()
        if event.name != EXPIRY_TIMER:
            flow = self.flow_controller
            return [] if flow is None else self._sent_away(flow.fired(event.name, self.fleet, now), T.TIMED_OUT, now)
        if self.flow_controller is not None:
            control = self.flow_controller.flow
            if len(self.requests) <= COUNTED_AT_ONCE and not control.deserted(self.fleet):
                control.relax()
            if control.draining:
                self._drained(self.flow_controller)
        if self.parking is not None and not (self.parking.remotes or len(self.parking)):
            self.parking = None
        self.peers.expire(now)
        expired = self.fleet.ledger.expired(now, MOST)
        next_expiry = now if len(expired) == MOST else now + EXPIRY_PERIOD
        late = [entry for entry, until in self._endings.orphans.items() if until <= now]
        for entry in late:
            del self._endings.orphans[entry]
        return [*self._endings.add([*self._entries(expired), *late], T.EXPIRED), SetTimer(EXPIRY_TIMER, next_expiry)]

    def validate(self) -> None:
        """Raise `AssertionError` when an invariant of any part is broken, or parts disagree about a request."""
        self.requests.validate()
        self.fleet.validate()
        waiting: list[Waiting] = []
        questions: list[Question] = []
        leases: list[Lease | None] = []
        for entry in self.requests:
            if entry.waiting is not None:
                waiting.append(entry.waiting)
            elif entry.question is not None:
                questions.append(entry.question)
                leases.append(entry.question.reservation.lease if entry.question.reservation else None)
            elif entry.lease is not None:
                assert entry.lease.held == (entry.state is not S.ENDING)
                assert not entry.lease.held or entry not in self._endings.orphans
                routed = entry.state is S.ROUTED
                lease = entry.lease
                assert lease.pending == routed or lease.blind or lease.unshown or entry.state is S.ENDING
                leases += entry.lease, entry.lease.prefill
        if self.flow_controller is not None:
            self.flow_controller.validate()
            charged = sum(entry.charge is not None for entry in self.requests)
            assert sum(len(band.demand) for band in self.flow_controller.flow.queues.bands()) == charged
            assert set(map(id, waiting)) == set(map(id, self.flow_controller.flow.queues.members()))
        if self.parking is not None:
            self.parking.validate()
            assert set(self.parking.questions) == set(questions)
        held = {lease for lease in leases if lease is not None and lease.held}
        assert held | self.peers.leases == set(self.fleet.ledger), "a lease is on the books that no request has"


# Requests that end without an event of their own: their endpoint left or no longer has them, or their lease expired.
#
# Thousands can end at once, and each takes 6 µs to release, record and count. They are therefore ended in batches, each
# in its own turn of the event loop, so that other requests are served in between.


class Endings:
    """Requests that still have to be ended, in order. `end` ends one of them unless it has ended meanwhile."""

    def __init__(self, clock: Clock, end: Callable[[RequestEntry, Trigger], list[Instruction]]) -> None:
        self._clock = clock
        self._end = end
        self._left: deque[tuple[deque[RequestEntry], Trigger]] = deque()
        #: Requests that an endpoint which left may still answer → clock seconds until which to wait for their end.
        self.orphans: dict[RequestEntry, float] = {}

    def add(self, entries: Iterable[RequestEntry], why: Trigger) -> list[Instruction]:
        """End these requests after those already waiting. More than `MOST` are left to later calls of `end_some`."""
        batch = deque(entries)
        if not batch:
            return []
        self._left.append((batch, why))
        return [self._timer()] if len(batch) > MOST else self.end_some()

    def end_some(self) -> list[Instruction]:
        """End the first `MOST`. If any are left, the returned instructions include a timer for them."""
        instructions: list[Instruction] = []
        for _ in range(MOST):
            if not self._left:
                return instructions
            batch, why = self._left[0]
            entry = batch.popleft()
            if not batch:
                self._left.popleft()
            instructions += self._end(entry, why)
        if self._left:
            instructions.append(self._timer())
        return instructions

    def _timer(self) -> SetTimer:
        return SetTimer(ENDINGS_TIMER, self._clock.time())
