"""Requests that wait for the answer of a scheduler in another process; the rules are those of `remote`."""

from collections.abc import Sequence
from math import inf
from typing import cast

from msgspec import Struct

from fairlead.fleet.columns import BoolColumn, FloatColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.events import RemoteDown, RemotePicked, RemoteUp
from fairlead.model.instructions import AskRemote, Instruction, SetTimer
from fairlead.model.remote import Outcome, RemotePick
from fairlead.model.request import Request
from fairlead.schedule.framework import Pick, Policy
from fairlead.schedule.remote import REFUSED, RemotePolicy
from fairlead.schedule.room import Room

TIMER = "remote-deadline"
#: Requests that may be parked at once; more are decided by the built-in policy.
MAX_PARKED = 4096


class Question(Struct):
    """A request, whom to ask for it, and what to tell."""

    request: Request
    policy: RemotePolicy
    hits: FloatColumn | None
    able: BoolColumn | None
    #: `table.ids` when it was asked for: who stood where.
    ids: tuple[str, ...]
    #: What flow control keeps for it; `None` = nothing.
    room: Room | None = None
    at: float = 0.0
    deadline: float = inf


class Decided(Struct):
    """`pick` is `None` where the policy behind has to choose. A room is still kept."""

    request: Request
    policy: RemotePolicy
    pick: Pick | None
    room: Room | None


class Parking:
    """The requests of one pipeline that wait for answers, in the order in which they were asked for."""

    def __init__(self) -> None:
        #: Those that may be asked, by name.
        self.remotes: dict[str, RemotePolicy] = {}
        self._parked: dict[int, Question] = {}
        #: When the timer fires; `inf` = it is not set.
        self._due = inf

    def __len__(self) -> int:
        return len(self._parked)

    def reaches(self, policy: Policy, request: Request, now: float) -> bool:
        """Whether somebody elsewhere can be asked for the request."""
        remote = _remote(policy, request)
        return remote is not None and not self._why_not(remote, now)

    def question(
        self, policy: Policy, request: Request, fleet: Fleet, now: float, room: Room | None = None
    ) -> Question | None:
        """What to ask for the request; `None` = it is decided here. Changes nothing. `room`: under flow control."""
        remote = _remote(policy, request)
        if remote is None or self._why_not(remote, now) or not fleet.table.count:
            return None
        able = remote.able(request, fleet, now)
        if room is not None and room.opened is not None:
            able = room.opened if able is None else able & room.opened
        if able is not None and not able.any():
            return None  # a refusal, and the built-in policy words it; or it has to wait
        hits = fleet.match(request)
        if room is not None and not room.keep(request, fleet, hits, able, remote.fallback.name):
            return None
        return Question(request, remote, hits, able, fleet.table.ids, room)

    def ask(
        self,
        policy: Policy,
        request: Request,
        fleet: Fleet,
        now: float,
        output: float,
        room: Room | None = None,
        question: Question | None = None,
    ) -> list[Instruction]:
        """Nothing = decide it here. `output` are the tokens that the answer is expected to have; `question` is what was
        found to be asked a moment ago."""
        question = question or self.question(policy, request, fleet, now, room)
        if question is None:
            self._missed(policy, request, now)
            return []
        remote = question.policy
        remote.breaker.allows(now)
        question.at, question.deadline = now, now + remote.budget
        remote.stats.asked += 1
        if room is not None and room.pick is not None:
            question.deadline = min(question.deadline, room.until)
            remote.stats.queued += room.waited
            fleet.reserve(request, room.pick.slot, now, int(room.pick.hit_share * request.prompt_tokens), output)
        self._parked[request.id] = question
        return [AskRemote(remote.name, request, question.hits, question.able, output), *self._by(question.deadline)]

    def _missed(self, policy: Policy, request: Request, now: float) -> None:
        """Counted, if somebody should have been asked and could not be."""
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
        """For the next deadline; nothing when it is set already, or nobody waits."""
        return self._by(min((one.deadline for one in self._parked.values()), default=inf))

    def _by(self, deadline: float) -> list[Instruction]:
        if deadline >= self._due:
            return []
        self._due = deadline
        return [SetTimer(TIMER, deadline)]

    def heard(self, event: RemoteUp | RemoteDown | RemotePicked, fleet: Fleet, now: float) -> list[Decided]:
        """News of a scheduler. Returns what is decided by it."""
        if isinstance(event, RemotePicked):
            return self._picked(event, fleet, now)
        if isinstance(event, RemoteDown):
            return self._lost(event.remote)
        policy = self.remotes.get(event.remote)
        if policy is not None:
            policy.connected = True
            policy.breaker.succeeded()  # what went wrong before says nothing about this one
        return []

    def _picked(self, event: RemotePicked, fleet: Fleet, now: float) -> list[Decided]:
        decided: list[Decided] = []
        for pick in event.picks:
            parked = self._parked.get(pick.request_id)
            if parked is None or parked.policy.name != event.remote:
                remote = self.remotes.get(event.remote)
                if remote is not None:
                    remote.stats.late += 1
                continue
            del self._parked[pick.request_id]
            decided.append(self._decide(parked, pick, fleet, now))
        return decided

    def _decide(self, parked: Question, pick: RemotePick, fleet: Fleet, now: float) -> Decided:
        policy = parked.policy
        stats = policy.stats
        found, why = _believed(parked, pick, fleet, now)
        if why == "invalid":
            policy.breaker.failed(now)
        else:
            policy.breaker.succeeded()
            policy.on_answer(now - parked.at)
        if found is None:
            stats.fell_back(why)
        else:
            stats.answered += 1
            stats.refused += found.slot < 0
            stats.alternatives += why == "alternative"
            found.by = policy.name
        return Decided(parked.request, policy, found, parked.room)

    def expired(self, now: float) -> list[Decided]:
        """The timer fired: who has waited for too long."""
        self._due = inf
        late = [one for one in self._parked.values() if one.deadline <= now]
        for one in late:
            if one.deadline < one.at + one.policy.budget:
                one.policy.breaker.dropped()  # the request's own time was over first
            else:
                one.policy.breaker.failed(now)
        return self._given_up(late, "deadline")

    def _lost(self, remote: str) -> list[Decided]:
        policy = self.remotes.get(remote)
        if policy is not None:
            policy.connected = False
            policy.breaker.dropped()
        return self._given_up([one for one in self._parked.values() if one.policy.name == remote], "lost")

    def _given_up(self, parked: list[Question], why: str) -> list[Decided]:
        for one in parked:
            del self._parked[one.request.id]
            one.policy.stats.fell_back(why)
        return [Decided(one.request, one.policy, None, one.room) for one in parked]

    def cancel(self, request_id: int) -> Question | None:
        """The client went away; `None` = the request is not parked here. A room is still kept."""
        parked = self._parked.pop(request_id, None)
        if parked is not None:
            parked.policy.breaker.dropped()
        return parked

    def validate(self) -> None:
        assert len(self._parked) <= MAX_PARKED
        assert all(key == one.request.id for key, one in self._parked.items())
        assert all(self._due <= one.deadline for one in self._parked.values()), "somebody waits without a deadline"


def _remote(policy: Policy, request: Request) -> RemotePolicy | None:
    """Who is to be asked for it; `None` = nobody elsewhere."""
    choose = getattr(policy, "remote_for", None)
    return None if choose is None else cast("RemotePolicy | None", choose(request))


def _believed(parked: Question, pick: RemotePick, fleet: Fleet, now: float) -> tuple[Pick | None, str]:
    """(the pick; why there is none, or that an alternative stands in)."""
    if pick.outcome == Outcome.PASSED:
        return None, "passed"
    if pick.outcome == Outcome.REFUSED:
        return Pick(-1, reason=REFUSED, message=pick.reason or "the scheduler refused the request"), ""
    if pick.outcome != Outcome.PICKED or not pick.endpoint:
        return None, "invalid"
    able = parked.able
    if fleet.table.ids is not parked.ids:  # endpoints came, went or changed: slots may be others now
        able = parked.policy.able(parked.request, fleet, now)
    gone = True
    names = pick.endpoint, *(name for name, _ in pick.alternatives)
    for rank, name in enumerate(names):
        slot = fleet.table.slot(name)
        if slot is None:
            gone = gone and name in parked.ids
        elif able is None or able[slot]:
            found = _pick(parked, slot, pick.prefill, fleet)
            found.second = _second(found, names[rank + 1 :], able, fleet)
            return found, "alternative" if rank else ""
        else:
            gone = gone and fleet.table.ids is not parked.ids
    return None, "gone" if gone else "invalid"


def _second(pick: Pick, names: Sequence[str], able: BoolColumn | None, fleet: Fleet) -> int:
    """The first of these alternatives that is there and can serve it; -1 = none."""
    for name in names:
        slot = fleet.table.slot(name)
        if slot is not None and slot not in (pick.slot, pick.prefill_slot) and (able is None or able[slot]):
            return slot
    return -1


def _pick(parked: Question, slot: int, prefill: str, fleet: Fleet) -> Pick:
    other = fleet.table.slot(prefill) if prefill else None
    found = Pick(slot, prefill_slot=-1 if other is None or other == slot else other)
    hits = parked.hits
    if hits is not None:
        at = slot if found.prefill_slot < 0 else found.prefill_slot
        found.hit_share = float(hits[at]) if at < len(hits) else 0.0
        found.best_share = float(hits[hits.argmax()])
    return found
