"""Feeds the events of a journal through the pipeline again: the third driver, after live server and simulator.

`replay` checks that the decisions are the recorded ones; `compare` shows which of them another policy would change.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import count
from math import inf
from random import Random
from typing import Any

from msgspec import Struct, field, structs
from xxhash import xxh3_64

from fairlead import __version__
from fairlead.compat.recorded import restore
from fairlead.config.building import SchedulingBuilder, build_pipeline
from fairlead.config.registry import Registry
from fairlead.config.schema import Config
from fairlead.core.clock import VirtualClock
from fairlead.core.errors import PLUGIN_FAILURES, PluginError, of_plugin
from fairlead.core.events import (
    EndpointUp,
    Event,
    FirstTokenSeen,
    Reconfigured,
    RemotePicked,
    RemoteUp,
    RequestArrived,
    RequestMoved,
    ResponseBegan,
    ResponseEnded,
    ShadowsJudged,
    StreamLost,
    UsageReported,
)
from fairlead.core.policy import HIGHEST, Answer, Context, Guard, Picked, Policy, Refused, choose_or_raise, notified
from fairlead.core.records import DecisionRecord, Trace
from fairlead.core.reports import SharedFleet
from fairlead.core.request import Request
from fairlead.core.scheduling import Scheduling
from fairlead.core.view import FleetView
from fairlead.lab.simulator.journal import Faults, Run
from fairlead.server.journal.records import DECIDED, EVENTS, LOST, Decided, Segment
from fairlead.server.plugin_watch import watched


class Guided(Struct, frozen=True):
    """Follows the decisions in `recorded`, by request id, and notes in `own` the endpoint that the policy itself would
    have chosen; empty = refused."""

    name: str
    policy: Policy
    recorded: dict[int, Decided]
    own: dict[int, str]

    def asks(self) -> tuple[Policy]:
        return (self.policy,)

    def choose(self, request: Request, fleet: FleetView, context: Context) -> Answer:
        pick = self.policy.choose(request, fleet, context)
        own = pick.slot if isinstance(pick, Picked) else -1
        self.own[request.id] = _name(pick, fleet)
        choice = self.recorded.get(request.id)
        if choice is None:
            return pick
        if not choice.endpoint:
            return Refused(choice.outcome, status=choice.status, trace=pick.trace)
        slot, prefill = fleet.table.slot(choice.endpoint), fleet.table.slot(choice.prefill)
        prefill = -1 if prefill is None else prefill
        if slot is None or (isinstance(pick, Picked) and (slot, prefill) == (own, pick.prefill_slot)):
            return pick
        held = fleet.match(request)
        share = 0.0 if held is None else float(held[slot if prefill < 0 else prefill])
        best = pick.best_share if isinstance(pick, Picked) else 0.0
        notify = pick.notify if isinstance(pick, Picked) else None
        best = max(best, share)
        return Picked(slot, prefill_slot=prefill, hit_share=share, best_share=best, trace=pick.trace, notify=notify)


class Beside(Struct, frozen=True):
    """A policy that decides, and another policy (`guide`) that is only queried. Both get the same random numbers.

    `answers`: request id → the endpoint that the queried policy would have chosen, and its trace. `errors`: its
    failures; these requests have no answer, and neither have those for which `guard` lets it rest.
    """

    name: str
    policy: Policy
    guide: Policy
    answers: dict[int, tuple[str, Trace | None]]
    errors: list[PluginError]
    guard: Guard

    def asks(self) -> tuple[Policy, Policy]:
        return self.policy, self.guide

    def choose(self, request: Request, fleet: FleetView, context: Context) -> Answer:
        if not self.guard.rests(context.now):
            chance = Random(0)
            chance.setstate(context.rng.getstate())
            own = Context(context.now, chance)
            try:
                asked = self.guard.call_apart(context.now, choose_or_raise, self.guide, request, fleet, own)
                pick = notified(asked, request, fleet)
                self.answers[request.id] = _name(pick, fleet), pick.trace
            except PLUGIN_FAILURES as error:
                self.errors.append(of_plugin(self.guide.name, error))
        return self.policy.choose(request, fleet, context)


def _name(pick: Answer, fleet: FleetView) -> str:
    """The name of the chosen endpoint; empty = none."""
    endpoint = fleet.table.endpoints[pick.slot] if isinstance(pick, Picked) else None
    return endpoint.id if endpoint else ""


# The player of a journal, and `replay`.
#
# Rules
# * With the recorded policy, from the start of a process and without a gap, the decisions are exactly the same, and so
#   is their hash. Otherwise `exact` is False, and `notes` give the reasons.
# * With another policy, the events are still the recorded ones: first tokens and ends come at the recorded times. So
#   the replay shows which decisions change; only the simulator can show what would have followed from them.
# * A replay that begins later than its process (the oldest segments are gone) knows the endpoints and the policy, but
#   not the earlier leases and prompts. It follows the recorded decisions, so that its state becomes the recorded one,
#   and compares each with what the policy would have done. It does the same if something that is not recorded took part
#   in the decisions. A request about which a scheduler in another process was asked arrives there when it was decided.

#: Turns a recorded configuration into a changed one.
Change = Callable[[Config], Config]


class _Clock(VirtualClock):
    """Shows the times of the journal; nothing that is replayed sets timers."""

    def move_to(self, now: float) -> None:
        self.now = now


class Player:
    """A pipeline in the state at the beginning of a segment; `feed` it that segment's events."""

    def __init__(
        self,
        head: Segment,
        change: Change | None = None,
        guided: bool | None = False,
        beside: Change | None = None,
        registry: Registry | None = None,
    ) -> None:
        """`guided`: follow the recorded decisions; False = only once something that is not recorded takes part in them;
        `None` = never. `beside`: for each decision, also query the policy of the configuration that this returns.
        `registry`: the plugins that what these two return may name; `None` = the installed ones."""
        self._change = change
        self._beside = beside
        self._builder = SchedulingBuilder(lambda error: self.plugin_errors.append(error), registry if change else None)
        self._asked = SchedulingBuilder(registry=registry)
        #: The answers of the queried policy, as in `Beside`. The caller removes the entries.
        self.answers: dict[int, tuple[str, Trace | None]] = {}
        self.asked_errors: list[PluginError] = []
        #: For guided policies: the journal's decisions, and where the policy would have sent the requests.
        self.recorded: dict[int, Decided] = {}
        self.own: dict[int, str] = {}
        self._guided = guided
        #: What takes part in the decisions without being recorded, since the beginning or a reload, in words.
        self.influences: list[str] = []
        self._heed(head.scheduling)
        self.config = self._configured(head.scheduling)
        self.plugin_errors: list[PluginError] = []
        self._clock = _Clock()
        rng = Random(0)
        if head.chance is not None:
            version, state, gauss = head.chance
            rng.setstate((version, tuple(state), gauss))
        ledger, metrics = self.config.ledger, self.config.metrics
        #: Not `None` if the scheduler reported to its peers. These reports are made again, because the recorded reports
        #: of the peers leave out what the peers learned from them.
        self._shared = SharedFleet(lease_ttl=ledger.lease_ttl, staleness=metrics.staleness) if head.shared else None
        self.pipeline = build_pipeline(
            self.config,
            self._clock,
            rng,
            build=self._build,
            fleet=self._shared,
            on_plugin_error=self.plugin_errors.append,
        )
        self._head: Segment | None = head
        self.pipeline.start()

    @property
    def guided(self) -> bool:
        """Whether it follows the recorded decisions."""
        return bool(self._guided)

    def feed(self, time_s: float, event: Event) -> list[DecisionRecord]:
        """Handle an event and return the decisions that it caused. A `Reconfigured` has its document as recorded."""
        if type(event) is Reconfigured:
            self.config = self._configured(event.document)
            self._heed(event.document)
            event = Reconfigured(self.config)
        self._clock.move_to(time_s)
        if self._head is not None:
            head, self._head = self._head, None
            for endpoint in head.endpoints:
                self.pipeline.handle(EndpointUp(endpoint))
            if head.models is not None:
                self.pipeline.handle(head.models)
            for listed in head.listed:
                self.pipeline.handle(listed)
        records = [record for record in self.pipeline.handle(event) if isinstance(record, DecisionRecord)]
        if self._shared is not None:
            self._shared.reports.batch(time_s)
        return records

    def waits(self, request_id: int) -> bool:
        """Whether this request has arrived and is not decided."""
        entry = self.pipeline.requests.get(request_id)
        return entry is not None and entry.lease is None

    def asked(self, choice: Decided) -> None:
        """Note how long the request waited before this decision: it arrived here only now."""
        entry = self.pipeline.requests.get(choice.request_id)
        if entry is not None and entry.lease is not None:
            entry.lease.sent_after(choice.queued_ms + choice.asked_ms)

    def _heed(self, scheduling: Any) -> None:
        """Note what takes part in the decisions from here on without being recorded."""
        beside = scheduling.get("beside", ()) if isinstance(scheduling, dict) else ()
        self.influences += [text for text in beside if text not in self.influences]
        if self._guided is False and self.influences:
            self._guided = True

    def _build(self, config: Config) -> Scheduling:
        """Build like the live scheduler. Wrap the policy in one that follows the journal or queries another policy."""
        built = self._builder(config)
        policy = Guided(built.policy.name, built.policy, self.recorded, self.own) if self._guided else built.policy
        if self._beside is not None:
            asked = self._asked(self._beside(config)).base
            policy = Beside(policy.name, policy, asked, self.answers, self.asked_errors, Guard(asked.name))
        return structs.replace(built, policy=policy)

    def _configured(self, scheduling: Any) -> Config:
        config = restore(scheduling)
        return config if self._change is None else self._change(config)


class Tally(Struct):
    """The number of decisions, and a hash of (request, endpoint) in their order."""

    decisions: int = 0
    refused: int = 0
    digest: Any = field(default_factory=xxh3_64)

    def add(self, request_id: int, endpoint: str) -> None:
        self.decisions += 1
        self.refused += not endpoint
        self.digest.update(f"{request_id}>{endpoint};".encode("utf-8", "backslashreplace"))

    @property
    def hash(self) -> str:
        return str(self.digest.hexdigest())


class Replayed(Struct, kw_only=True):
    """The result of a replay next to the content of the journal."""

    run: str
    events: int = 0
    recorded: Tally = field(default_factory=Tally)
    replayed: Tally = field(default_factory=Tally)
    #: Decisions that are both recorded and replayed; how many of these chose the same endpoint; and how many of those
    #: have other numbers (hits, forecast).
    both: int = 0
    same: int = 0
    unlike: int = 0
    #: (request id, recorded endpoint, replayed endpoint) of the first differences.
    different: list[tuple[int, str, str]] = field(default_factory=list)
    #: Whether the journal begins with its process and lacks nothing up to its end.
    exact: bool = True
    notes: list[str] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        """Whether the decisions, their order and their numbers are the same."""
        return self.recorded.hash == self.replayed.hash and not self.unlike


_SHOWN = 20


class Step(Struct, frozen=True):
    """One event, the decisions that the player made for it, and those in the journal."""

    time_s: float
    event: Any
    decided: list[DecisionRecord]
    recorded: list[Decided]


def steps(run: Run, player: Player, faults: Faults, lost: list[int]) -> Iterator[Step]:
    """All events of a run. For each gap in the journal, the number of missing records is added to `lost`."""
    waiting: tuple[float, Any] | None = None
    decided: list[Decided] = []
    parked: dict[int, RequestArrived] | None = None
    for kind, time_s, body in run.items(faults):
        if kind == DECIDED:
            decided.append(body)
        elif kind == ShadowsJudged.__name__:
            pass  # it changes nothing
        elif kind in EVENTS or kind == LOST:
            if waiting is not None:
                yield _step(player, *waiting, decided, parked)
            waiting, decided = ((time_s, body) if kind in EVENTS else None), []
            if parked is None and isinstance(body, RemoteUp | RemotePicked):
                parked = {}
            if kind == LOST:
                lost.append(body.records)
    if waiting is not None:
        yield _step(player, *waiting, decided, parked)


def _step(
    player: Player, time_s: float, event: Any, decided: list[Decided], parked: dict[int, RequestArrived] | None
) -> Step:
    """Feed the event, then the parked requests that it decided. `parked`: arrivals about which a scheduler in another
    process was asked; `None` = none was connected yet."""
    player.recorded.update((choice.request_id, choice) for choice in decided)
    records: list[DecisionRecord] = []
    if parked is None or not player.guided:
        records = player.feed(time_s, event)
    elif isinstance(event, RequestArrived) and event.request.id not in player.recorded:
        parked[event.request.id] = event
    else:
        if isinstance(event, StreamLost):
            parked.pop(event.request_id, None)
        records = player.feed(time_s, event)
        for choice in decided:
            if choice.request_id in parked:
                records += player.feed(time_s, parked.pop(choice.request_id))
                player.asked(choice)
    player.recorded.clear()
    return Step(time_s, event, records, decided)


def needs_guide(run: Run) -> bool:
    """Whether something that took part in the decisions is missing from the journal."""
    return not run.complete or bool(run.head.beside)


@watched()
def replay(run: Run, change: Change | None = None) -> Replayed:
    """Replay a run. Raises `ConfigError`, `PluginError` or `OSError`."""
    result, faults, lost = Replayed(run=run.id), Faults(), list[int]()
    player = Player(run.head, change, needs_guide(run))
    for step in steps(run, player, faults, lost):
        result.events += 1
        for choice in step.recorded:
            result.recorded.add(choice.request_id, choice.endpoint)
        recorded = {choice.request_id: choice for choice in step.recorded}
        for record in step.decided:
            endpoint = player.own.pop(record.request.id, record.endpoint)
            result.replayed.add(record.request.id, endpoint)
            _compare(result, record, endpoint, recorded.get(record.request.id))
    judge(result, run, faults, lost, player.influences)
    if result.both < result.recorded.decisions:
        result.notes.append(f"{result.recorded.decisions - result.both:,} recorded decisions could not be compared")
    if not result.identical and run.head.program != __version__:
        writer = f"version {run.head.program}" if run.head.program else "an older version"
        result.notes.append(f"{writer} of Fairlead wrote it and this is {__version__}, which may decide differently")
    if player.plugin_errors:
        result.notes.append(f"{len(player.plugin_errors)} times a plugin failed: {player.plugin_errors[0]}")
    return result


def _compare(result: Replayed, record: DecisionRecord, endpoint: str, choice: Decided | None) -> None:
    if choice is None:
        return
    result.both += 1
    if choice.endpoint != endpoint:
        if len(result.different) < _SHOWN:
            result.different.append((choice.request_id, choice.endpoint, endpoint))
        return
    result.same += 1
    result.unlike += choice.hit_tokens != record.hit_tokens or choice.forecast != record.forecast


def judge(result: Replayed, run: Run, faults: Faults, lost: list[int], more_notes: list[str]) -> None:
    """Record whether the replay can be exact, and why not. `more_notes`: what took part without being recorded."""
    numbers = [head.number for _, head in run.segments]
    if numbers[0]:
        result.notes.append(
            f"the first {numbers[0]} segments are gone; the replay begins without their leases and prompts"
        )
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        result.notes.append("segments are missing in the middle")
    result.notes += dict.fromkeys((*run.head.beside, *more_notes))
    if lost:
        why = "the scheduler was busy, the disk full, or another scheduler wrote the journal"
        result.notes.append(f"{sum(lost)} records were not written when {why}")
    if needs_guide(run) or more_notes:
        result.notes.append("it follows the recorded decisions, compared with what the policy would have done")
    result.exact = not result.notes and not faults.damaged and not faults.unreadable
    result.notes += faults.describe() + run.notes
    if run.beside:
        result.notes.append(f"other workers decided too; replay them with --run: {', '.join(r.id for r in run.beside)}")


# A journal under another policy: which decisions change, and why.
#
# Answers two questions in one pass
# * One decision at a time: the recorded policy decides and is replayed exactly. The other policy is queried for each
#   decision on exactly the same state (`Beside`). A difference is caused by the policy: `reason` is `policy`, or
#   `chance` if the policy rates the two endpoints as about equal and chose at random. A policy that rates all as equal,
#   such as round robin, does not choose at random: that is `chance` only if the recorded policy rates both as equal.
# * The whole run: a second pipeline continues with the other policy's decisions. Leases and cached prompts differ more
#   and more, and so do most decisions. The totals are what counts there: tokens believed to be cached, requests per
#   endpoint. A request that waits longer than recorded gets its first token and end as much later.

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
    #: The lead of `after` over `before` in the totals of the other policy, and of `before` over `after` in those of the
    #: recorded policy; `None` = not known, infinite, or the other policy rates all as equal.
    gain: float | None = None
    cost: float | None = None


class Compared(Struct, kw_only=True):
    run: str
    policy: str
    #: Decisions that both policies made on arrival, on the same state. Requests that waited are left out.
    decisions: int = 0
    before: Tally = field(default_factory=Tally)
    reasons: Counter[str] = field(default_factory=Counter)
    #: The first thousand changed decisions.
    changed: list[Changed] = field(default_factory=list)
    #: The whole run with the other policy.
    after: Tally = field(default_factory=Tally)
    #: Tokens believed to be cached, and requests per endpoint, each (with the recorded policy, with the other one).
    hit_tokens: tuple[int, int] = (0, 0)
    spread: tuple[Counter[str], Counter[str]] = field(default_factory=lambda: (Counter(), Counter()))
    exact: bool = True
    notes: list[str] = field(default_factory=list)
    #: How often a plugin of the other policy failed.
    failed: int = 0

    @property
    def share(self) -> float:
        """The share of decisions that changed on the same state."""
        return sum(self.reasons.values()) / self.decisions if self.decisions else 0.0


#: What follows from the sending of a request.
_ANSWERS = (FirstTokenSeen, ResponseBegan, UsageReported, RequestMoved, ResponseEnded, StreamLost)


class Delaying:
    """Feeds a player whose requests may wait longer than recorded. Their first tokens and ends come as much later:
    those that came while a request waits would be lost, and its lease would never end."""

    def __init__(self, player: Player) -> None:
        self._player = player
        #: By request: when it was sent as recorded, the events that came while it waits, how much later it was sent.
        self._sent: dict[int, float] = {}
        self._early: dict[int, list[tuple[float, Any]]] = {}
        self._delays: dict[int, float] = {}
        #: (clock seconds, number, event), a heap.
        self._later: list[tuple[float, int, Any]] = []
        self._numbers = count()

    def feed(self, step: Step) -> list[DecisionRecord]:
        """Feed what is due before the event, then the event, unless it comes later."""
        records, event = self.until(step.time_s), step.event
        self._sent.update((choice.request_id, step.time_s) for choice in step.recorded if choice.endpoint)
        if not isinstance(event, _ANSWERS):
            return records + self._fed(step.time_s, event)
        if self._player.waits(event.request_id):
            if not isinstance(event, StreamLost):
                self._early.setdefault(event.request_id, []).append((step.time_s, event))
            elif event.request_id not in self._early:
                records += self._fed(step.time_s, event)  # its client leaves; else its session ends with its answer
        elif delay := self._delays.get(event.request_id, 0.0):
            self._put(step.time_s + delay, event)
        else:
            records += self._fed(step.time_s, event)
        return records

    def until(self, time_s: float) -> list[DecisionRecord]:
        """Feed what is due by this time."""
        records = list[DecisionRecord]()
        while self._later and self._later[0][0] <= time_s:
            due, _, event = heappop(self._later)
            records += self._fed(due, event)
        return records

    def _put(self, time_s: float, event: Any) -> None:
        heappush(self._later, (time_s, next(self._numbers), event))

    def _fed(self, time_s: float, event: Any) -> list[DecisionRecord]:
        records = self._player.feed(time_s, event)
        if isinstance(event, ResponseEnded | StreamLost):
            for known in (self._sent, self._delays, self._early):
                known.pop(event.request_id, None)
        for record in records:
            number = record.request.id
            delay = time_s - self._sent.get(number, time_s)
            early = self._early.pop(number, ())
            if record.endpoint and delay > 0.0:
                self._delays[number] = delay
                for came, late in early:
                    self._put(came + delay, late)
        return records


@watched()
def compare(run: Run, change: Change, registry: Registry | None = None) -> Compared:
    """Compare the recorded policy with the changed one. `registry`: see `Player`. Raises `ConfigError`, `PluginError`,
    or `OSError`."""
    faults, lost = Faults(), list[int]()
    recorded_player = Player(run.head, None, needs_guide(run), change, registry)
    changed_player = Player(run.head, change, None, registry=registry)
    result, delaying = Compared(run=run.id, policy=changed_player.config.policy.name), Delaying(changed_player)
    for step in steps(run, recorded_player, faults, lost):
        for record in step.decided:
            _asked(result, record, recorded_player.own.pop(record.request.id, record.endpoint), recorded_player.answers)
            _sum(result, record, result.before, 0)
        for record in delaying.feed(step):
            _sum(result, record, result.after, 1)
    for record in delaying.until(inf):
        _sum(result, record, result.after, 1)
    judged = Replayed(run=run.id)
    judge(judged, run, faults, lost, recorded_player.influences)
    result.exact, result.notes = judged.exact, judged.notes
    left = sum(changed_player.waits(entry.request.id) for entry in changed_player.pipeline.requests)
    if left:
        result.notes.append(f"{left:,} requests still wait under {result.policy} when the journal ends")
    errors = recorded_player.asked_errors or changed_player.plugin_errors
    if errors:
        result.failed = len(errors)
        result.notes.append(f"{len(errors)} times a plugin failed, so these are not its decisions: {errors[0]}")
    return result


def _asked(result: Compared, record: DecisionRecord, before: str, answers: dict[int, tuple[str, Trace | None]]) -> None:
    answer = answers.pop(record.request.id, None)
    if answer is None or record.trace is None or record.trace.waited is not None:  # the answer may be out of date
        return
    after, trace = answer
    result.decisions += 1
    if before == after:
        return
    near = _near(trace, before, after) and (_rates(trace) or _near(record.trace, before, after))
    reason = "chance" if near else "policy"
    result.reasons[reason] += 1
    if len(result.changed) < _KEPT:
        gain = _margin(trace, after, before) if _rates(trace) else None
        cost = _margin(record.trace, before, after)
        result.changed.append(Changed(record.request.id, record.at, before, after, reason, gain, cost))


def _sum(result: Compared, record: DecisionRecord, tally: Tally, index: int) -> None:
    tally.add(record.request.id, record.endpoint)
    hits = list(result.hit_tokens)
    hits[index] += record.hit_tokens
    result.hit_tokens = hits[0], hits[1]
    result.spread[index][record.endpoint] += 1


def _margin(trace: Trace | None, of: str, over: str) -> float | None:
    """How much higher the total of endpoint `of` is than that of endpoint `over`; `None` = not known, or infinitely."""
    if trace is None or trace.total is None or of not in trace.endpoints or over not in trace.endpoints:
        return None
    margin = float(trace.total[trace.endpoints.index(of)]) - float(trace.total[trace.endpoints.index(over)])
    return margin if abs(margin) < HIGHEST / 2 else None


def _rates(trace: Trace | None) -> bool:
    """Whether the totals of the endpoints differ."""
    return trace is not None and trace.total is not None and len({*map(float, trace.total)} - {-inf}) > 1


def _near(trace: Trace | None, endpoint: str, rival: str) -> bool:
    """Whether both endpoints are about as good as the best one."""
    if trace is None or trace.total is None or endpoint not in trace.endpoints or rival not in trace.endpoints:
        return False
    best = float(max(trace.total))
    limit = best - NEAR * abs(best)
    return all(float(trace.total[trace.endpoints.index(name)]) >= limit for name in (endpoint, rival))
