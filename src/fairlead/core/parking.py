"""Requests that wait for the answer of a scheduler in another process. `core.remote` has the rules."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import inf

import numpy as np
from msgspec import Struct

from fairlead.core.columns import BoolColumn, FloatColumn
from fairlead.core.events import Outcome, RemotePick, RemotePicked
from fairlead.core.fleet import Fleet
from fairlead.core.instructions import AskRemote, Instruction, SetTimer
from fairlead.core.ledger import Lease
from fairlead.core.policy import Answer, Picked, Policy, Refused
from fairlead.core.remote import HALF_OPEN, REFUSED, AsksElsewhere, RemotePolicy
from fairlead.core.request import Request

# Reservations: flow control lets a request through, and a scheduler in another process is asked where it goes.
#
# Rules
# * Flow control decides *when*, the other scheduler *where*: it is asked once an endpoint is open, and may choose among
#   the open endpoints.
# * Until the answer, the request is charged to one of the open endpoints as a reservation in the ledger, so requests
#   that are let through meanwhile find less room. So the requests with open questions never need more room than there
#   is, whatever the answers are.
# * A request that waited already has an endpoint, chosen by late binding: it is charged there, and goes there if there
#   is no answer. A request that did not wait has none: it is charged where its prompt would be computed soonest. This
#   only places the charge; without an answer, the built-in policy decides.


class Reservation(Struct, eq=False):
    """`opened`: endpoints that may be sent another request; `None` = all."""

    opened: BoolColumn | None
    #: Clock seconds of the request's arrival, and its deadline for a decision.
    since: float
    until: float = inf
    #: Where it is charged; `None` = not known yet.
    pick: Picked | None = None
    #: The charge, while the scheduler is asked.
    lease: Lease | None = None
    #: The request waited in the queue, and late binding chose `pick` for it.
    waited: bool = False
    #: `table.ids` at that time.
    ids: tuple[str, ...] = ()

    @property
    def slot(self) -> int:
        """The slot where it is charged; -1 = not known yet."""
        return -1 if self.pick is None else self.pick.slot

    def queued_ms(self, now: float) -> float:
        """Return the milliseconds since its arrival if it waited in the queue, else 0."""
        return (now - self.since) * 1e3 if self.waited else 0.0

    def keep(self, request: Request, fleet: Fleet, hits: FloatColumn | None, able: BoolColumn | None, by: str) -> bool:
        """Choose where the request is charged, unless late binding did. `able`: where it may go. Return False if the
        chosen slot is not among these."""
        pick = self.pick = self.pick or _soonest(request, fleet, hits, able)
        pick.by = pick.by or by
        self.ids = fleet.table.ids
        return able is None or bool(able[pick.slot])

    def kept(self, fleet: Fleet) -> Picked | None:
        """Return the pick, if its endpoint is still in the pool."""
        pick, ids = self.pick, fleet.table.ids
        if pick is None or ids is self.ids:
            return pick if self.ids else None
        slot = pick.slot
        if slot >= min(len(ids), len(self.ids)) or ids[slot] != self.ids[slot]:
            return None
        pick.fallback_slot = -1  # its endpoint may have left
        return pick

    def fallback_slot(self, slot: int, fleet: Fleet) -> int:
        """Return the fallback slot of a request that waited and was then sent to `slot`: the one that late binding had
        chosen; -1 = none."""
        pick = self.kept(fleet) if self.waited else None
        return -1 if pick is None else pick.slot if pick.slot != slot else pick.fallback_slot


def _soonest(request: Request, fleet: Fleet, hits: FloatColumn | None, able: BoolColumn | None) -> Picked:
    table = fleet.table
    prompt = float(max(request.prompt_tokens, 1))
    own = prompt if hits is None else prompt * (1.0 - hits)
    work = fleet.predictor.rates.prefill[: len(table)] * (table.queued_tokens + own)
    slot = int(np.where(table.alive if able is None else able & table.alive, work, inf).argmin())
    if hits is None:
        return Picked(slot)
    return Picked(slot, hit_share=float(hits[slot]), best_share=float(hits.max()))


TIMER = "remote-deadline"
#: Requests that may be parked at the same time; the built-in policy decides any further ones.
MAX_PARKED = 4096


class Question(Struct, eq=False):
    """A request, the scheduler that is asked for it, and what the scheduler is told."""

    request: Request
    policy: RemotePolicy
    hits: FloatColumn | None
    able: BoolColumn | None
    #: `table.ids` when it was asked: the endpoint of each slot.
    ids: tuple[str, ...]
    #: Only under flow control.
    reservation: Reservation | None = None
    asked_at: float = 0.0
    deadline: float = inf
    #: It tests whether the scheduler that failed can be asked again.
    probes: bool = False

    def dropped(self) -> None:
        """The question is over without an answer, and its time was not up."""
        if self.probes:
            self.policy.breaker.dropped()


#: A question and its answer; `None` = the fallback policy has to choose. Reservations are still charged.
Decided = tuple[Question, Answer | None]


class Parking:
    """The requests of one pipeline that wait for answers, in the order in which they were asked for."""

    def __init__(self, remotes: Mapping[str, RemotePolicy] | None = None) -> None:
        #: Schedulers that may be asked, by name.
        self.remotes: Mapping[str, RemotePolicy] = remotes or {}
        self._parked: dict[Question, None] = {}
        #: When the timer fires; `inf` = it is not set.
        self._due = inf

    def __len__(self) -> int:
        return len(self._parked)

    @property
    def questions(self) -> Collection[Question]:
        """The open questions, in the order in which they were asked."""
        return self._parked.keys()

    def reaches(self, policy: Policy, request: Request, now: float) -> bool:
        """Whether a scheduler in another process can be asked for the request."""
        remote = _remote(policy, request)
        return remote is not None and not self._why_not(remote, now)

    def question(
        self, policy: Policy, request: Request, fleet: Fleet, now: float, reservation: Reservation | None = None
    ) -> Question | None:
        """Return the question to ask for the request; `None` = it is decided here. Changes only the pick of the
        `reservation` (which exists under flow control)."""
        remote = _remote(policy, request)
        if remote is None or self._why_not(remote, now) or not fleet.table.count:
            return None
        able = remote.able(request, fleet, now)
        if reservation is not None and reservation.opened is not None:
            able = reservation.opened if able is None else able & reservation.opened
        if able is not None and not able.any():
            return None  # the built-in policy will refuse it with its reason, or the request has to wait
        fleet.settle_prompts(now)
        hits = fleet.match(request)
        if reservation is not None and not reservation.keep(request, fleet, hits, able, remote.fallback.name):
            return None
        return Question(request, remote, hits, able, fleet.table.ids, reservation)

    def ask(self, question: Question, fleet: Fleet, now: float, output: float) -> list[Instruction]:
        """Ask the question, and charge the reservation. `output`: expected tokens of the answer."""
        remote, request, reservation = question.policy, question.request, question.reservation
        remote.breaker.allows(now)
        question.probes = remote.breaker.state == HALF_OPEN
        question.asked_at, question.deadline = now, now + remote.budget
        remote.stats.asked += 1
        if reservation is not None and reservation.pick is not None:
            pick = reservation.pick
            question.deadline = min(question.deadline, reservation.until)
            remote.stats.queued += reservation.waited
            hit = int(pick.hit_share * request.prompt_tokens)
            reservation.lease = fleet.charge(request, pick.slot, now, hit, output, reserved=True)
        self._parked[question] = None
        computes = remote.computes(request, fleet, now)
        ask = AskRemote(remote.name, request, question.hits, question.able, output, computes)
        return [ask, *self._by(question.deadline)]

    def missed(self, policy: Policy, request: Request, now: float) -> None:
        """Count the request if a scheduler should have been asked for it and could not be."""
        remote = _remote(policy, request)
        why = self._why_not(remote, now) if remote is not None else ""
        if remote is not None and why:
            remote.stats.fell_back(why)

    def _why_not(self, remote: RemotePolicy, now: float) -> str:
        if not remote.connected:
            return "down"
        if len(self._parked) >= MAX_PARKED:
            return "full"
        return "" if remote.breaker.ready(now) else "breaker"

    def timer(self) -> list[Instruction]:
        """Return the timer for the next deadline; nothing if it is already set, or no request waits."""
        return self._by(min((question.deadline for question in self._parked), default=inf))

    def _by(self, deadline: float) -> list[Instruction]:
        if deadline >= self._due:
            return []
        self._due = deadline
        return [SetTimer(TIMER, deadline)]

    def up(self, remote: str) -> None:
        """A scheduler has connected and may be asked."""
        policy = self.remotes.get(remote)
        if policy is not None:
            policy.connected = True
            policy.breaker.succeeded()  # failures before the reconnect say nothing about this connection

    def picked(
        self, event: RemotePicked, asked: Callable[[int], Question | None], fleet: Fleet, now: float
    ) -> list[Decided]:
        """Handle answers. `asked` returns the open question for a request id."""
        decided: list[Decided] = []
        for pick in event.picks:
            question = asked(pick.request_id)
            if question is None or question not in self._parked or question.policy.name != event.remote:
                remote = self.remotes.get(event.remote)
                if remote is not None:
                    remote.stats.late += 1
                continue
            del self._parked[question]
            decided.append((question, self._decide(question, pick, fleet, now)))
        return decided

    def _decide(self, question: Question, pick: RemotePick, fleet: Fleet, now: float) -> Answer | None:
        policy = question.policy
        stats = policy.stats
        picked, why = _believed(question, pick, fleet, now)
        if why == "invalid":
            policy.breaker.failed(now)
        else:
            policy.breaker.succeeded()
            policy.on_answer(now - question.asked_at)
        if picked is None:
            stats.fell_back(why)
        else:
            stats.answered += 1
            stats.refused += isinstance(picked, Refused)
            stats.alternatives += why == "alternative"
            picked.by = policy.name
        return picked

    def expired(self, now: float) -> list[Decided]:
        """Handle the timer: return the questions whose deadline has passed."""
        self._due = inf
        late = [question for question in self._parked if question.deadline <= now]
        for question in late:
            if question.deadline < question.asked_at + question.policy.budget:
                question.dropped()  # the request's own deadline was before the scheduler's budget ended
            else:
                question.policy.breaker.failed(now)
        return self._given_up(late, "deadline")

    def lost(self, remote: str) -> list[Decided]:
        """Handle the loss of the connection to a scheduler: return its open questions."""
        policy = self.remotes.get(remote)
        if policy is not None:
            policy.connected = False
            policy.breaker.dropped()
        return self._given_up([question for question in self._parked if question.policy.name == remote], "lost")

    def _given_up(self, questions: list[Question], why: str) -> list[Decided]:
        for question in questions:
            del self._parked[question]
            question.policy.stats.fell_back(why)
        return [(question, None) for question in questions]

    def cancel(self, question: Question) -> None:
        """Drop the question, because the client is gone. The reservation is still charged."""
        del self._parked[question]
        question.dropped()

    def validate(self) -> None:
        assert len(self._parked) <= MAX_PARKED
        assert all(self._due <= question.deadline for question in self._parked), "somebody waits without a deadline"


def _remote(policy: Policy, request: Request) -> RemotePolicy | None:
    """Return the scheduler to ask for the request; `None` = it is decided here."""
    return policy.remote_for(request) if isinstance(policy, AsksElsewhere) else None


def _believed(question: Question, pick: RemotePick, fleet: Fleet, now: float) -> tuple[Answer | None, str]:
    """Return (the answer, why): `why` says why there is no answer, or that an alternative was taken."""
    if pick.outcome == Outcome.PASSED:
        return None, "passed"
    if pick.outcome == Outcome.REFUSED:
        return Refused(REFUSED, pick.reason or "the scheduler refused the request"), ""
    if pick.outcome != Outcome.PICKED or not pick.endpoint:
        return None, "invalid"
    if pick.prefill and not _computes(question, pick.prefill, fleet, now):
        return None, "invalid"
    able = question.able
    if fleet.table.ids is not question.ids:  # endpoints joined, left or changed, so slots may have changed
        able = question.policy.able(question.request, fleet, now)
    gone = True
    names = pick.endpoint, *(name for name, _ in pick.alternatives)
    for rank, name in enumerate(names):
        slot = fleet.table.slot(name)
        if slot is None:
            gone = gone and name in question.ids
        elif able is None or able[slot]:
            picked = _pick(question, slot, pick.prefill, fleet)
            picked.alternatives = tuple(_alternatives(picked, names[rank + 1 :], able, fleet))
            picked.fallback_slot = picked.alternatives[0] if picked.alternatives else -1
            return picked, "alternative" if rank else ""
        else:
            gone = gone and fleet.table.ids is not question.ids
    return None, "gone" if gone else "invalid"


def _computes(question: Question, prefill: str, fleet: Fleet, now: float) -> bool:
    """Whether the endpoint can compute the prompt, or has left since the question: then it is sent to one endpoint."""
    slot, able = fleet.table.slot(prefill), question.policy.computes(question.request, fleet, now)
    return prefill in question.ids if slot is None else able is None or bool(able[slot])


def _alternatives(pick: Picked, names: Sequence[str], able: BoolColumn | None, fleet: Fleet) -> Iterator[int]:
    """Iterate over the slots of the alternatives that are in the pool and can serve the request."""
    for name in names:
        slot = fleet.table.slot(name)
        if slot is not None and slot not in (pick.slot, pick.prefill_slot) and (able is None or able[slot]):
            yield slot


def _pick(question: Question, slot: int, prefill: str, fleet: Fleet) -> Picked:
    prefill_slot = fleet.table.slot(prefill) if prefill else None
    picked = Picked(slot, prefill_slot=-1 if prefill_slot is None or prefill_slot == slot else prefill_slot)
    hits = question.hits
    if hits is not None:
        computing_slot = slot if picked.prefill_slot < 0 else picked.prefill_slot
        picked.hit_share = float(hits[computing_slot]) if computing_slot < len(hits) else 0.0
        picked.best_share = float(hits[hits.argmax()])
    return picked
