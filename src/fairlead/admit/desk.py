"""Flow control as the pipeline sees it: events in, instructions out.

Rules
* A request that waits is told so once (`Hold`): its gateway must be patient for as long as it may wait.
* Two timers, both exact: the earliest deadline, and the moment at which a request stops waiting for the endpoint that
  holds its prompt's beginning (or at once, when one look was not enough for all that can go).
* Refusals carry `Retry-After`: how long those of the same or a higher priority that wait will take at the pace of the
  last dispatches.
"""

from collections.abc import Callable
from math import ceil, inf

from fairlead.admit.control import Bound, FlowControl
from fairlead.admit.eviction import Eviction
from fairlead.admit.framework import Refused, Waiting
from fairlead.fleet.columns import BoolColumn
from fairlead.fleet.fleet import Fleet
from fairlead.fleet.ledger import Lease
from fairlead.model.decision import DecisionRecord
from fairlead.model.instructions import Evict, Hold, Instruction, Record, Reject, SetTimer
from fairlead.model.request import Request

DEADLINE_TIMER = "queue-deadline"
DISPATCH_TIMER = "queue-dispatch"
#: Seconds that a gateway gets beyond a request's deadline, so that it hears our refusal.
MARGIN = 1.0
#: Bounds of `Retry-After`, in seconds.
RETRY = (1.0, 60.0)
#: More endpoints than so many times those that are there are never asked for at once.
GROWTH = 4.0
#: Seconds between two looks for somebody to evict, at least.
_MOMENT = 0.05
#: Weight of the newest gap between two dispatches.
_PACE = 0.05

#: (request, fleet, now): where it can be served at all; `None` = everywhere.
Able = Callable[[Request, Fleet, float], BoolColumn | None]
#: (what goes where, now): charge it, and route it.
Send = Callable[[Bound, float], list[Instruction]]


class Desk:
    """One per pipeline. `policy` is the name under which its decisions are recorded, `target_s` how long requests may
    wait before more endpoints are wanted."""

    def __init__(
        self, flow: FlowControl, policy: str = "", target_s: float = 1.0, eviction: Eviction | None = None
    ) -> None:
        self.flow = flow
        self._eviction = eviction
        self.policy = policy
        self._target_s = target_s
        self._deadline = inf
        self._look = inf
        self._gap = 0.05
        self._last = -inf

    def __len__(self) -> int:
        return len(self.flow)

    def follow(self, policy: str, able: Able) -> None:
        """Another policy decides from now on; its rules about who can serve what hold for those that wait too."""
        self.policy = policy
        self.flow.binder.follow(able)

    def asks(self, fleet: Fleet, now: float) -> bool:
        """Whether `arrived` must be told what the policy chooses."""
        return self.flow.asks(fleet, now)

    def opened(self, fleet: Fleet, now: float) -> BoolColumn | None:
        """Which endpoints may be sent one more request now; `None` = all of them."""
        return self.flow.gate.open(fleet, now)

    def arrived(self, request: Request, fleet: Fleet, now: float, slot: int = -1) -> list[Instruction] | None:
        """`None` = schedule it now. `slot`: the policy's choice for it, if it `asks`; < 0 = none."""
        outcome = self.flow.arrived(request, fleet, now, slot)
        if outcome is None:
            return None
        if isinstance(outcome, Refused):
            return self._refuse(request, outcome, now)
        waiting, displaced = outcome
        why = Refused("rejected-saturated", "a more important request needed the place in the queue")
        given_way = [i for victim in displaced for i in self._refuse(victim.request, why, now, victim)]
        return [*given_way, Hold(request.id, waiting.deadline - now + MARGIN)]

    def dispatched(self, send: Send, fleet: Fleet, now: float) -> list[Instruction]:
        """To be called after every event while somebody waits."""
        instructions: list[Instruction] = []
        for bound in () if self.flow.overdue(now) else self.flow.dispatch(fleet, now):
            instructions += send(bound, now)
            if self._last > -inf:
                self._gap += _PACE * (now - self._last - self._gap)
            self._last = now
        if not len(self.flow):
            self._last = -inf  # the time until somebody waits again says nothing about the pace
        if self._eviction is not None and not self.flow.more:
            instructions += [self._evict(lease) for lease in self._eviction.victims(self.flow, fleet, now)]
        return instructions + self._timers(now)

    def _evict(self, lease: Lease) -> Evict:
        why = Refused("evicted", "the request made way for a more important one; try again")
        return Evict(self._answer(lease.request, why))

    def may_evict(self, request: Request) -> bool:
        """Whether it may have to make way once it runs."""
        return self._eviction is not None and request.priority < 0

    def evicted(self, request_id: int) -> bool:
        """Whether a request that was lost had been told to make way."""
        return self._eviction is not None and request_id in self._eviction

    def _timers(self, now: float) -> list[Instruction]:
        timers: list[Instruction] = []
        deadline = self.flow.next_deadline()
        if deadline != self._deadline:
            self._deadline = deadline
            if deadline < inf:
                timers.append(SetTimer(DEADLINE_TIMER, max(deadline, now)))
        look = now if self.flow.more else max(self.flow.look_again, now)
        if self._eviction is not None:
            look = min(look, max(self._eviction.look_at(self.flow), now + _MOMENT))
        if len(self.flow) and look < inf and (look < self._look or self._look <= now):
            self._look = look
            timers.append(SetTimer(DISPATCH_TIMER, look))
        return timers

    def fired(self, name: str, fleet: Fleet, now: float) -> list[Instruction]:
        """A timer is due; `dispatched` follows."""
        if name == DISPATCH_TIMER:
            self._look = inf
        if name != DEADLINE_TIMER:
            return []
        self._deadline = inf
        late = self.flow.expire(fleet, now)
        return [i for waiting, why in late for i in self._refuse(waiting.request, why, now, waiting)]

    def lost(self, request_id: int, now: float) -> list[Instruction]:
        """The client went away; nothing if the request does not wait here."""
        waiting = self.flow.cancel(request_id)
        return [] if waiting is None else [self.gone(waiting.request, now, _waited_ms(waiting, now))]

    def gone(self, request: Request, now: float, queued_ms: float) -> Record:
        """The client of a request went away before it was sent anywhere."""
        return self._record(request, Refused("rejected-context-cancelled", "client disconnected", 503), now, queued_ms)

    def stopping(self, now: float) -> list[Instruction]:
        """The process ends: those that wait are told to try again elsewhere, and so are all that come from now on.
        Where many wait, some are told by each call that follows."""
        told = self.flow.stop(now)
        return [i for waiting, why in told for i in self._refuse(waiting.request, why, now, waiting)]

    def drain_s(self, priority: float = -inf) -> float:
        """Seconds until those that wait with this priority or a higher one have gone, at the pace of the last
        dispatches: how long one more of this priority would wait."""
        if priority == -inf:
            return len(self.flow) * self._gap
        return sum(band.count for band in self.flow.queues.bands() if band.priority >= priority) * self._gap

    def wanted(self, endpoints: int, now: float) -> int:
        """How many endpoints would keep the queue below `target_s` seconds, at `GROWTH` times as many at most."""
        if not len(self.flow):
            return endpoints
        delay = max(self.drain_s(), now - self.flow.oldest())
        return max(ceil(endpoints * min(max(delay / self._target_s, 1.0), GROWTH)), 1)

    def _refuse(self, request: Request, why: Refused, now: float, waiting: Waiting | None = None) -> list[Instruction]:
        return [self._answer(request, why), self._record(request, why, now, _waited_ms(waiting, now))]

    def _answer(self, request: Request, why: Refused) -> Reject:
        low, high = RETRY
        return Reject(
            request_id=request.id,
            status=why.status,
            reason=why.reason,
            message=why.message,
            retry_after_s=min(max(self.drain_s(request.priority), low), high),
            api=request.api,
        )

    def _record(self, request: Request, why: Refused, now: float, queued_ms: float) -> Record:
        return Record(
            DecisionRecord(
                request=request,
                at=now,
                policy=self.policy,
                outcome=why.reason,
                status=why.status,
                queued_ms=queued_ms,
            )
        )

    def validate(self) -> None:
        self.flow.validate()
        assert self._deadline <= self.flow.next_deadline()


def _waited_ms(waiting: Waiting | None, now: float) -> float:
    return (now - waiting.since) * 1e3 if waiting else 0.0
