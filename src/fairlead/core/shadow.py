"""Shadows, which are policies on trial: they decide copies of the requests, and their answers are only recorded.

Theory. A shadow only decides in states that another policy led to. If it really decided, its next choice would depend
on where it had sent the last request. So its agreement and regret show how differently it chooses, by the forecasts of
the reference cost. The effect on latencies can only be found with the simulator or a canary.

Rules
* A case is taken before the request is charged, so the shadow sees what the policy saw. In the call that decides, only
  the case is taken (about 5 µs).
* Shadows may be judged anywhere, for instance in another thread: a case shares no changing data, and policies on trial
  are separate instances.
* Exceptions and invalid results of a shadow become the `error` of its verdict.
"""

from collections.abc import Callable, Sequence
from math import nan
from operator import index
from random import Random

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from fairlead.core.columns import BoolColumn, FloatColumn
from fairlead.core.cost import cost as expected_cost
from fairlead.core.errors import PLUGIN_FAILURES, described
from fairlead.core.events import Outcome, RemotePick
from fairlead.core.fleet import Fleet
from fairlead.core.instructions import Instruction, JudgeShadows
from fairlead.core.policy import Able, Context, Cycle, Picked, Policy, Refused, choose_or_raise, notified
from fairlead.core.records import ShadowCase, ShadowRecord, ShadowVerdict, Snapshot
from fairlead.core.request import NO_PREFIX, Request
from fairlead.core.snapshot import Restored, Snapshots

#: The reference cost by slot, in milliseconds of all requests together. Choices are compared by it.
Reference = Callable[[Request, Fleet, Cycle], FloatColumn]
_MAX_ERROR = 200


class CaseTaker:
    """Takes a case of a `share` of the decisions, drawn with its own `rng`, so that shadows affect no other draw."""

    def __init__(self, share: float, rng: Random) -> None:
        self._share = share
        self._rng = rng
        self._snapshots = Snapshots()
        #: Cases that could not be taken.
        self.failed = 0

    def take(self, request: Request, pick: Picked, fleet: Fleet, now: float, expected: float) -> list[Instruction]:
        """Take a case before the request is charged. Return the order to judge it, or nothing. Never raises, so that
        the request is not affected."""
        if self._share < 1.0 and self._rng.random() >= self._share:
            return []
        try:
            return [JudgeShadows(self._case(request, pick, fleet, now, expected))]
        except Exception:
            self.failed += 1
            return []

    def _case(self, request: Request, pick: Picked, fleet: Fleet, now: float, expected: float) -> ShadowCase:
        endpoint = fleet.table.endpoints[pick.slot]
        trace = pick.trace
        held, loading = (trace.held, trace.loading) if trace is not None else (fleet.match(request), None)
        snapshot = trace.snapshot if trace is not None else None
        bare = replace(request, prefix=NO_PREFIX, blocks=None)
        name = endpoint.id if endpoint is not None else ""
        snapshot = snapshot or self._snapshots(fleet, now)
        pair = pick.prefill_slot, pick.handover_ms
        return ShadowCase(bare, pick.slot, name, snapshot, held, expected, loading, *pair)


class Replica:
    """A fleet that is set to one case after another. It is rebuilt only if endpoints change."""

    def __init__(self) -> None:
        self._last: Snapshot | None = None
        self._fleet: Restored | None = None

    def fleet(self, case: ShadowCase) -> Restored:
        snapshot, last, fleet = case.snapshot, self._last, self._fleet
        same = last is not None and snapshot.endpoints is last.endpoints and snapshot.adapters is last.adapters
        self._last = snapshot
        if fleet is None or not same:
            fleet = self._fleet = Restored(snapshot, case.held, case.loading)
        else:
            fleet.set_to(snapshot, case.held, case.loading)
        return fleet


class Terms(Struct):
    """Costs of one case, by slot."""

    cost: FloatColumn
    ttft: FloatColumn
    able: BoolColumn | None
    lowest: float


#: A case and its computed costs.
Opened = tuple[ShadowCase, Terms]


class Bench:
    """Judges one case after another, in one thread. `reference`: cost of each choice; `able`: slots that can serve."""

    def __init__(self, reference: Reference, able: Able, rng: Random) -> None:
        self._reference = reference
        self._able = able
        self._rng = rng
        self._replica = Replica()
        self._opened: Opened | None = None

    def open(self, case: ShadowCase) -> Restored:
        """Begin with this case. Return the fleet as it was."""
        fleet = self._replica.fleet(case)
        request, now = case.request, case.snapshot.at
        cycle = Cycle(Context(now, self._rng, trace=False))
        able = self._able(request, fleet, now)
        alive = fleet.table.alive
        allowed = alive if able is None else alive & able
        cost = self._reference(request, fleet, cycle)
        held = None if case.held is None else case.held * request.prompt_tokens
        ttft = expected_cost(request.prompt_tokens, held, fleet, now, case.loading).ttft
        lowest = float(cost[allowed].min()) if allowed.any() else 0.0
        self._opened = case, Terms(cost, ttft, allowed, lowest)
        return fleet

    @property
    def opened(self) -> Opened:
        """The open case, for a later `reopen`."""
        assert self._opened is not None
        return self._opened

    def reopen(self, opened: Opened) -> None:
        self._opened = opened

    def decide(self, name: str, policy: Policy) -> ShadowVerdict:
        """Return the verdict on what a policy would have done. Never raises."""
        case, _ = self.opened
        try:
            fleet = self._replica.fleet(case)
            context = Context(case.snapshot.at, self._rng, trace=False)
            pick = notified(choose_or_raise(policy, case.request, fleet, context), case.request, fleet)
            if isinstance(pick, Refused):
                return self.verdict(name, -1)
            return self.verdict(name, pick.slot, pick.prefill_slot, pick.handover_ms)
        except PLUGIN_FAILURES as error:
            return ShadowVerdict(name, error=described(error, _MAX_ERROR))

    def answered(self, name: str, pick: RemotePick, took_us: float) -> ShadowVerdict:
        """Return the verdict on what a scheduler in another process would have done. Never raises."""
        try:
            return replace(self._answered(name, pick), took_us=took_us)
        except ValueError as error:
            return ShadowVerdict(name, error=str(error)[:_MAX_ERROR], took_us=took_us)

    def _answered(self, name: str, pick: RemotePick) -> ShadowVerdict:
        case, _ = self.opened
        if pick.outcome == Outcome.PASSED:
            return ShadowVerdict(name, error="passed")
        if pick.outcome != Outcome.PICKED:
            return self.verdict(name, -1)
        slots = {endpoint.id: i for i, endpoint in enumerate(case.snapshot.endpoints) if endpoint is not None}
        for endpoint in filter(None, (pick.endpoint, pick.prefill)):
            if endpoint not in slots:
                raise ValueError(f"picked {endpoint!r}, which is not an endpoint")
        slot, prefill_slot = slots[pick.endpoint], slots.get(pick.prefill, -1)
        return self.verdict(name, slot, -1 if prefill_slot == slot else prefill_slot)

    def verdict(self, name: str, slot: int, prefill_slot: int = -1, handover_ms: float = -1.0) -> ShadowVerdict:
        """Return the verdict on a choice; `slot` -1 = it would have refused the request. The rest is as in `Picked`.
        Raise `ValueError` or `TypeError` for an invalid choice."""
        case, terms = self.opened
        slot, prefill_slot = index(slot), index(prefill_slot)
        for picked in (slot, prefill_slot):
            if not -1 <= picked < len(terms.cost):
                raise ValueError(f"picked slot {picked} of {len(terms.cost)}")
        if slot < 0:
            return ShadowVerdict(name)
        endpoint = case.snapshot.endpoints[slot]
        if endpoint is None or (terms.able is not None and not terms.able[slot]):
            raise ValueError(f"picked slot {slot}, which cannot serve the request")
        prefill = case.snapshot.endpoints[prefill_slot] if prefill_slot >= 0 else None
        if prefill is None and prefill_slot >= 0:
            raise ValueError(f"picked slot {prefill_slot} for the prompt, where no endpoint is")
        made = self._ttft(case.slot, case.prefill_slot, case.handover_ms)
        return ShadowVerdict(
            name,
            endpoint.id,
            (slot, prefill_slot) == (case.slot, case.prefill_slot),
            self._regret(slot, prefill_slot),
            float(np.nan_to_num(made - self._ttft(slot, prefill_slot, handover_ms))),
            prefill=prefill.id if prefill is not None else "",
        )

    def _ttft(self, slot: int, prefill_slot: int, handover_ms: float) -> float:
        """Return the TTFT forecast of a choice in milliseconds; NaN = it is a pair, and its handover is unknown."""
        ttft = self.opened[1].ttft
        if prefill_slot < 0:
            return float(ttft[slot])
        return float(ttft[prefill_slot]) + handover_ms if handover_ms >= 0.0 else nan

    def record(self, verdicts: Sequence[ShadowVerdict]) -> ShadowRecord:
        case, _ = self.opened
        regret = self._regret(case.slot, case.prefill_slot)
        return ShadowRecord(case.request.id, case.snapshot.at, case.endpoint, regret, tuple(verdicts))

    def _regret(self, slot: int, prefill_slot: int) -> float:
        terms = self.opened[1]
        return max(float(terms.cost[slot]) - terms.lowest, 0.0) if prefill_slot < 0 else 0.0
