"""Requests that wait for the answer of a scheduler in another process; the rules are those of `remote`."""

from msgspec import Struct

from fairlead.fleet.columns import BoolColumn, FloatColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.events import RemoteDown, RemotePicked, RemoteUp
from fairlead.model.instructions import AskRemote, Instruction, SetTimer
from fairlead.model.remote import Outcome, RemotePick
from fairlead.model.request import Request
from fairlead.schedule.framework import Pick, Policy
from fairlead.schedule.remote import REFUSED, RemotePolicy

TIMER = "remote-deadline"
#: Requests that may be parked at once; more are decided by the built-in policy.
MAX_PARKED = 4096


class _Parked(Struct):
    request: Request
    policy: RemotePolicy
    hits: FloatColumn | None
    able: BoolColumn | None
    #: `table.ids` when it was asked for: who stood where.
    ids: tuple[str, ...]
    at: float
    deadline: float


class Decided(Struct):
    """`pick` is `None` where the policy behind has to choose."""

    request: Request
    policy: RemotePolicy
    pick: Pick | None


class Parking:
    """The requests of one pipeline that wait for answers, in the order in which they were asked for."""

    def __init__(self) -> None:
        #: Those that may be asked, by name.
        self.remotes: dict[str, RemotePolicy] = {}
        self._parked: dict[int, _Parked] = {}
        self._armed = False

    def __len__(self) -> int:
        return len(self._parked)

    def ask(self, policy: Policy, request: Request, fleet: Fleet, now: float, output: float) -> list[Instruction]:
        """Nothing = decide it here. `output` are the tokens that the answer is expected to have."""
        choose = getattr(policy, "remote_for", None)
        remote: RemotePolicy | None = choose(request) if choose is not None else None
        if remote is None:
            return []
        why = self._why_not(remote, now)
        if why:
            remote.stats.fell_back(why)
            return []
        able = remote.able(request, fleet, now)
        if not fleet.table.count or (able is not None and not able.any()):
            remote.breaker.dropped()
            return []  # a refusal, and the built-in policy words it
        hits = fleet.match(request)
        ids = fleet.table.ids
        self._parked[request.id] = _Parked(request, remote, hits, able, ids, now, now + remote.budget)
        remote.stats.asked += 1
        return [AskRemote(remote.name, request, hits, able, output), *self.timer()]

    def _why_not(self, remote: RemotePolicy, now: float) -> str:
        if not remote.connected:
            return "down"
        if len(self._parked) >= MAX_PARKED:
            return "full"
        return "" if remote.breaker.allows(now) else "breaker"

    def timer(self) -> list[Instruction]:
        """For the next deadline; nothing when one is set already, or nobody waits."""
        if self._armed or not self._parked:
            return []
        self._armed = True
        return [SetTimer(TIMER, min(one.deadline for one in self._parked.values()))]

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

    def _decide(self, parked: _Parked, pick: RemotePick, fleet: Fleet, now: float) -> Decided:
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
        return Decided(parked.request, policy, found)

    def expired(self, now: float) -> list[Decided]:
        """The timer fired: who has waited for too long."""
        self._armed = False
        late = [one for one in self._parked.values() if one.deadline <= now]
        for one in late:
            one.policy.breaker.failed(now)
        return self._given_up(late, "deadline")

    def _lost(self, remote: str) -> list[Decided]:
        policy = self.remotes.get(remote)
        if policy is not None:
            policy.connected = False
            policy.breaker.dropped()
        return self._given_up([one for one in self._parked.values() if one.policy.name == remote], "lost")

    def _given_up(self, parked: list[_Parked], why: str) -> list[Decided]:
        for one in parked:
            del self._parked[one.request.id]
            one.policy.stats.fell_back(why)
        return [Decided(one.request, one.policy, None) for one in parked]

    def cancel(self, request_id: int) -> bool:
        """The client went away; True if the request was parked here."""
        parked = self._parked.pop(request_id, None)
        if parked is not None:
            parked.policy.breaker.dropped()
        return parked is not None

    def validate(self) -> None:
        assert len(self._parked) <= MAX_PARKED
        assert all(key == one.request.id for key, one in self._parked.items())
        assert self._armed or not self._parked, "somebody waits without a deadline"


def _believed(parked: _Parked, pick: RemotePick, fleet: Fleet, now: float) -> tuple[Pick | None, str]:
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
    for rank, name in enumerate((pick.endpoint, *(name for name, _ in pick.alternatives))):
        slot = fleet.table.slot(name)
        if slot is None:
            gone = gone and name in parked.ids
        elif able is None or able[slot]:
            return _pick(parked, slot, pick.prefill, fleet), "alternative" if rank else ""
        else:
            gone = gone and fleet.table.ids is not parked.ids
    return None, "gone" if gone else "invalid"


def _pick(parked: _Parked, slot: int, prefill: str, fleet: Fleet) -> Pick:
    other = fleet.table.slot(prefill) if prefill else None
    found = Pick(slot, prefill_slot=-1 if other is None or other == slot else other)
    hits = parked.hits
    if hits is not None:
        at = slot if found.prefill_slot < 0 else found.prefill_slot
        found.hit_share = float(hits[at]) if at < len(hits) else 0.0
        found.best_share = float(hits[hits.argmax()])
    return found
