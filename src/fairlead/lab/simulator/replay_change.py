"""A journal under another policy: which decisions change, and why.

Answers two questions in one pass
* One decision at a time: the recorded policy decides and is replayed exactly. The other policy is queried for each
  decision on exactly the same state (`Beside`). A difference is caused by the policy: `reason` is `policy`, or `chance`
  if the policy rates the two endpoints as about equal and chose at random.
* The whole run: a second pipeline continues with the other policy's decisions. Leases and cached prompts differ more
  and more, and so do most decisions. The totals are what counts there: tokens believed to be cached, requests per
  endpoint.
"""

from collections import Counter
from math import isfinite

from msgspec import Struct, field

from fairlead.core.records import DecisionRecord, Trace
from fairlead.lab.simulator.journal import Faults, Run
from fairlead.lab.simulator.replay import Change, Player, Replayed, Tally, judge, needs_guide, steps

#: Totals within this share of the best count as equal: the near tie of the cost model.
NEAR = 0.021
_KEPT = 1000


class Changed(Struct, frozen=True):
    """A decision that would have been different on the same state."""

    request_id: int
    #: Clock seconds.
    at: float
    before: str
    after: str
    #: `policy` or `chance`.
    reason: str
    #: How much the other policy prefers its choice to the recorded one, and the recorded policy the recorded one to it.
    gain: float | None = None
    cost: float | None = None


class Compared(Struct, kw_only=True):
    run: str
    policy: str
    #: Decisions that a policy made on arrival, one at a time.
    decisions: int = 0
    before: Tally = field(default_factory=Tally)
    reasons: Counter[str] = field(default_factory=Counter)
    #: The first thousand changed decisions.
    changed: list[Changed] = field(default_factory=list)
    #: The whole run with the other policy.
    after: Tally = field(default_factory=Tally)
    hit_tokens: tuple[int, int] = (0, 0)
    spread: tuple[Counter[str], Counter[str]] = field(default_factory=lambda: (Counter(), Counter()))
    exact: bool = True
    notes: list[str] = field(default_factory=list)

    @property
    def share(self) -> float:
        """The share of decisions that changed on the same state."""
        return sum(self.reasons.values()) / self.decisions if self.decisions else 0.0


def compare(run: Run, change: Change) -> Compared:
    """Compare the two policies. Raises `ConfigError`, `PluginError` or `OSError`."""
    faults, lost = Faults(), list[int]()
    recorded_player, changed_player = Player(run.head, None, needs_guide(run), change), Player(run.head, change, None)
    result = Compared(run=run.id, policy=changed_player.config.policy.name)
    for step in steps(run, recorded_player, faults, lost):
        for record in step.decided:
            _asked(result, record, recorded_player.own.pop(record.request.id, record.endpoint), recorded_player.answers)
            _sum(result, record, result.before, 0)
        for record in changed_player.feed(step.at, step.event):
            _sum(result, record, result.after, 1)
    judged = Replayed(run=run.id)
    judge(judged, run, faults, lost, recorded_player.influences)
    result.exact, result.notes = judged.exact, judged.notes
    return result


def _asked(result: Compared, record: DecisionRecord, before: str, answers: dict[int, tuple[str, Trace | None]]) -> None:
    answer = answers.pop(record.request.id, None)
    if answer is None or record.trace is None or record.trace.waited is not None:  # the answer may be out of date
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
    """How much higher the total of endpoint `of` is than that of endpoint `over`."""
    if trace is None or trace.total is None or of not in trace.endpoints or over not in trace.endpoints:
        return None
    margin = float(trace.total[trace.endpoints.index(of)]) - float(trace.total[trace.endpoints.index(over)])
    return margin if isfinite(margin) else None


def _near(trace: Trace | None, endpoint: str, rival: str) -> bool:
    """Whether both endpoints are about as good as the best one."""
    if trace is None or trace.total is None or endpoint not in trace.endpoints or rival not in trace.endpoints:
        return False
    best = float(max(trace.total))
    limit = best - NEAR * abs(best)
    return all(float(trace.total[trace.endpoints.index(name)]) >= limit for name in (endpoint, rival))
