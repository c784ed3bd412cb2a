"""Feeds the events of a journal through the pipeline again: the third driver beside the live one and the simulator.

Rules
* With the recorded policy, from the start of a process and without a hole, the decisions are the very same, and so is
  their hash. Anything else is said: `exact` is False, and `notes` tell why.
* With another policy, what happens is still what happened: first tokens and ends come when they came. So the replay
  says which decisions change; what would have come of them, the simulator says.
* A replay that begins later than its process (the oldest segments are gone) knows the endpoints and the policy, but not
  the leases and prompts of before. It follows the recorded decisions, so that its state becomes the recorded one, and
  compares each with what the policy would have done; likewise where more decided than is recorded.
"""

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from msgspec import Struct, field
from xxhash import xxh3_64

from fairlead.config.flow import able_by, build_desk
from fairlead.config.recorded import restore
from fairlead.config.registry import build_policy
from fairlead.config.schema import Config
from fairlead.fleet.fleet import Fleet
from fairlead.model.decision import DecisionRecord
from fairlead.model.errors import PluginError
from fairlead.model.events import EndpointUp, Event
from fairlead.model.instructions import Record
from fairlead.parse.tokens import TokenEstimator
from fairlead.pipeline import Pipeline
from fairlead.schedule.framework import Policy
from fairlead.sim.journal import Faults, Run
from fairlead.sim.kernel import Kernel
from fairlead.sim.replay_guided import Guided
from fairlead.wire.journal.records import DECIDED, EVENTS, LOST, POLICY, Decided, Segment

#: What a changed configuration does to a recorded one.
Change = Callable[[Config], Config]


class Player:
    """A pipeline in the state of a segment's beginning; `feed` it that segment's events."""

    def __init__(self, head: Segment, change: Change | None = None, guided: bool = False) -> None:
        self._change = change
        #: Where the journal says that requests went, and where the policy would have sent them; for guided ones.
        self.recorded: dict[int, str] = {}
        self.own: dict[int, str] = {}
        self._guided = guided
        self.config = self._configured(head.scheduling)
        self.plugin_errors: list[PluginError] = []
        self._clock = Kernel()
        rng = Random(0)
        if head.chance is not None:
            version, state, gauss = head.chance
            rng.setstate((version, tuple(state), gauss))
        policy = build_policy(self.config, self.plugin_errors.append)
        self.pipeline = Pipeline(
            self._clock,
            rng,
            Fleet(lease_ttl=self.config.ledger.lease_ttl, staleness=self.config.metrics.staleness),
            self._guide(policy),
            TokenEstimator(),
            self.plugin_errors.append,
            build_desk(self.config, policy, self.plugin_errors.append),
        )
        self._head: Segment | None = head
        self.pipeline.start()

    def feed(self, at: float, event: Event) -> list[DecisionRecord]:
        """What was decided upon it."""
        self._clock.now = at
        if self._head is not None:
            head, self._head = self._head, None
            for endpoint in head.endpoints:
                self.pipeline.handle(EndpointUp(endpoint))
            if head.models is not None:
                self.pipeline.handle(head.models)
        records = [one.record for one in self.pipeline.handle(event) if type(one) is Record]
        return [record for record in records if type(record) is DecisionRecord]

    def reconfigured(self, scheduling: Any) -> None:
        """As `live.reload` does it."""
        config = self.config = self._configured(scheduling)
        policy = build_policy(config, self.plugin_errors.append)
        self.pipeline.policy = self._guide(policy)
        if self.pipeline.desk is not None:
            self.pipeline.desk.follow(policy.name, able_by(config, policy))
        self.pipeline.fleet.ledger.ttl = config.ledger.lease_ttl

    def _guide(self, policy: Policy) -> Policy:
        return Guided(policy, self.recorded, self.own) if self._guided else policy

    def _configured(self, scheduling: Any) -> Config:
        config = restore(scheduling)
        return config if self._change is None else self._change(config)


class Tally(Struct):
    """Decisions, and a hash of (request, endpoint) in their order."""

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
    """What a replay came to, beside what the journal says."""

    run: str
    events: int = 0
    recorded: Tally = field(default_factory=Tally)
    replayed: Tally = field(default_factory=Tally)
    #: Decisions that both know, those on the same endpoint, and of these the ones with other numbers (hits, forecast).
    both: int = 0
    same: int = 0
    unlike: int = 0
    #: (request id, endpoint recorded, endpoint replayed) of the first ones that differ.
    different: list[tuple[int, str, str]] = field(default_factory=list)
    #: The journal begins with its process and lacks nothing up to its end.
    exact: bool = True
    notes: list[str] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        """The same decisions in the same order, with the same numbers."""
        return self.recorded.hash == self.replayed.hash and not self.unlike


_SHOWN = 20


class Step(Struct, frozen=True):
    """One event, what the player decided upon it, and what the journal says was decided."""

    at: float
    event: Any
    found: list[DecisionRecord]
    recorded: list[Decided]


def steps(
    run: Run, player: Player, faults: Faults, lost: list[int], on_policy: Callable[[Any], object] = lambda _: None
) -> Iterator[Step]:
    """All events of a run. `lost` gets the numbers of records that the journal lacks; `on_policy` hears of changes."""
    waiting: tuple[float, Any] | None = None
    decided: list[Decided] = []
    for kind, at, body in run.items(faults):
        if kind == DECIDED:
            decided.append(body)
        elif kind in EVENTS or kind in (POLICY, LOST):
            if waiting is not None:
                yield _step(player, *waiting, decided)
            waiting, decided = ((at, body) if kind in EVENTS else None), []
            if kind == POLICY:
                player.reconfigured(body)
                on_policy(body)
            elif kind == LOST:
                lost.append(body.records)
    if waiting is not None:
        yield _step(player, *waiting, decided)


def _step(player: Player, at: float, event: Any, decided: list[Decided]) -> Step:
    player.recorded.update((one.request_id, one.endpoint) for one in decided)
    found = player.feed(at, event)
    player.recorded.clear()
    return Step(at, event, found, decided)


def needs_guide(run: Run) -> bool:
    """Something is missing that decided."""
    return not run.whole or bool(run.head.beside)


def replay(run: Run, change: Change | None = None) -> Replayed:
    """Raises `ConfigError`, `PluginError` or `OSError`."""
    result, faults, lost = Replayed(run=run.id), Faults(), list[int]()
    player = Player(run.head, change, needs_guide(run))
    for step in steps(run, player, faults, lost):
        result.events += 1
        for one in step.recorded:
            result.recorded.add(one.request_id, one.endpoint)
        recorded = {one.request_id: one for one in step.recorded}
        for record in step.found:
            endpoint = player.own.pop(record.request.id, record.endpoint)
            result.replayed.add(record.request.id, endpoint)
            _compare(result, record, endpoint, recorded.get(record.request.id))
    judge(result, run, faults, lost)
    if player.plugin_errors:
        result.notes.append(f"{len(player.plugin_errors)} times a plugin failed: {player.plugin_errors[0]}")
    return result


def _compare(result: Replayed, record: DecisionRecord, endpoint: str, one: Decided | None) -> None:
    if one is None:
        return
    result.both += 1
    if one.endpoint != endpoint:
        if len(result.different) < _SHOWN:
            result.different.append((one.request_id, one.endpoint, endpoint))
        return
    result.same += 1
    result.unlike += one.hit_tokens != record.hit_tokens or one.forecast != record.forecast


def judge(result: Replayed, run: Run, faults: Faults, lost: list[int]) -> None:
    """Whether it can be exact, and if not why."""
    numbers = [head.number for _, head in run.segments]
    if numbers[0]:
        result.notes.append(
            f"the first {numbers[0]} segments are gone; this begins without the leases and prompts of before"
        )
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        result.notes.append("segments are missing in the middle")
    result.notes += run.head.beside
    if lost:
        result.notes.append(f"{sum(lost)} records were not written when the scheduler was busy or the disk full")
    if needs_guide(run):
        result.notes.append("it follows the recorded decisions, each compared with what the policy would have done")
    result.exact = not result.notes and not faults.damaged and not faults.unreadable
    result.notes += faults.describe()
