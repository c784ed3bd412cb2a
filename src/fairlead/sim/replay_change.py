"""A journal under another policy: which decisions change, and why.

Two questions, answered in one pass
* One decision at a time: the recorded policy decides and is replayed exactly; the other one is asked beside it, on the
  very same state (`Beside`). What differs is the policy's doing: `reason` is `policy`, or `chance` where it rates the
  two endpoints as good as equal and drew lots.
* All the way: a second pipeline goes on with the other policy's decisions. Leases and cached prompts differ more and
  more, so most decisions do; what counts there are the sums: tokens believed to be cached, requests per endpoint.
"""

from collections import Counter
from collections.abc import Sequence
from math import isfinite
from random import Random
from typing import Any

from msgspec import Struct, field

from fairlead.config.registry import build_policy
from fairlead.fleet.fleet import Fleet
from fairlead.model.decision import DecisionRecord, Trace
from fairlead.model.request import Request
from fairlead.schedule.cycle import Context
from fairlead.schedule.framework import Pick, Policy
from fairlead.sim.journal import Faults, Run
from fairlead.sim.replay import Change, Player, Replayed, Tally, judge, needs_guide, steps

#: Totals within this share of the best count as equal: the cost model's near tie.
NEAR = 0.021
_KEPT = 1000


class Beside:
    """A policy that decides, and one that is only asked. Both are given the same chance."""

    def __init__(self, policy: Policy, other: Policy) -> None:
        self._policy = policy
        self._other = other
        self.name = policy.name
        #: What the other one would have done, by request; to be taken out by whoever reads it.
        self.answers: dict[int, tuple[str, Trace | None]] = {}

    def choose(self, requests: Sequence[Request], fleet: Fleet, context: Context) -> Sequence[Pick]:
        chance = Random(0)
        chance.setstate(context.rng.getstate())
        asked = self._other.choose(requests, fleet, Context(context.now, chance))
        for request, pick in zip(requests, asked, strict=True):
            endpoint = fleet.table.endpoints[pick.slot] if pick.slot >= 0 else None
            self.answers[request.id] = endpoint.id if endpoint else "", pick.trace
        return self._policy.choose(requests, fleet, context)


class Changed(Struct, frozen=True):
    """One decision that would have been another one on the same state."""

    request_id: int
    #: Clock seconds.
    at: float
    before: str
    after: str
    #: `policy` or `chance`.
    reason: str
    #: By how much the other policy rates its choice above the former, and the recorded one the former above it.
    gain: float | None = None
    cost: float | None = None


class Compared(Struct, kw_only=True):
    run: str
    policy: str
    #: Decisions that a policy made of those that arrived, one at a time.
    decisions: int = 0
    before: Tally = field(default_factory=Tally)
    reasons: Counter[str] = field(default_factory=Counter)
    #: The first thousand.
    changed: list[Changed] = field(default_factory=list)
    #: All the way.
    after: Tally = field(default_factory=Tally)
    hit_tokens: tuple[int, int] = (0, 0)
    spread: tuple[Counter[str], Counter[str]] = field(default_factory=lambda: (Counter(), Counter()))
    exact: bool = True
    notes: list[str] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Of the decisions, changed on the same state."""
        return sum(self.reasons.values()) / self.decisions if self.decisions else 0.0


def compare(run: Run, change: Change) -> Compared:
    """Raises `ConfigError`, `PluginError` or `OSError`."""
    faults, lost = Faults(), list[int]()
    one, other = Player(run.head, None, needs_guide(run)), Player(run.head, change)
    result = Compared(run=run.id, policy=other.config.policy.name)
    beside = [_beside(one, other)]

    def on_policy(scheduling: Any) -> None:
        other.reconfigured(scheduling)
        beside[0] = _beside(one, other)

    for step in steps(run, one, faults, lost, on_policy):
        for record in step.found:
            _asked(result, record, one.own.pop(record.request.id, record.endpoint), beside[0])
            _sum(result, record, result.before, 0)
        for record in other.feed(step.at, step.event):
            _sum(result, record, result.after, 1)
    judged = Replayed(run=run.id)
    judge(judged, run, faults, lost)
    result.exact, result.notes = judged.exact, judged.notes
    return result


def _beside(one: Player, other: Player) -> Beside:
    made = Beside(one.pipeline.policy, build_policy(other.config))
    one.pipeline.policy = made
    return made


def _asked(result: Compared, record: DecisionRecord, before: str, beside: Beside) -> None:
    answer = beside.answers.pop(record.request.id, None)
    if answer is None or record.trace is None:
        return
    after, trace = answer
    result.decisions += 1
    if before == after:
        return
    reason = "chance" if _near(trace, before, after) else "policy"
    result.reasons[reason] += 1
    if len(result.changed) < _KEPT:
        gain, cost = _margin(trace, after, before), _margin(record.trace, before, after)
        result.changed.append(Changed(record.request.id, record.at, before, after, reason, gain, cost))


def _sum(result: Compared, record: DecisionRecord, tally: Tally, index: int) -> None:
    tally.add(record.request.id, record.endpoint)
    hits = list(result.hit_tokens)
    hits[index] += record.hit_tokens
    result.hit_tokens = hits[0], hits[1]
    result.spread[index][record.endpoint] += 1


def _margin(trace: Trace | None, of: str, over: str) -> float | None:
    """How much higher one endpoint's total is than another's."""
    if trace is None or trace.total is None or of not in trace.endpoints or over not in trace.endpoints:
        return None
    found = float(trace.total[trace.endpoints.index(of)]) - float(trace.total[trace.endpoints.index(over)])
    return found if isfinite(found) else None


def _near(trace: Trace | None, one: str, other: str) -> bool:
    """Whether both are as good as the best there."""
    if trace is None or trace.total is None or one not in trace.endpoints or other not in trace.endpoints:
        return False
    best = float(max(trace.total))
    limit = best - NEAR * abs(best)
    return all(float(trace.total[trace.endpoints.index(name)]) >= limit for name in (one, other))
