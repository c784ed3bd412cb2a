"""A journal with waiting requests under another policy: what waits longer is answered later, not never."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fairlead.cli.options import change
from fairlead.core.events import Reconfigured, ResponseEnded, StreamLost
from fairlead.core.records import DecisionRecord
from fairlead.core.request import Request
from fairlead.lab.simulator.journal import Faults, one_run
from fairlead.lab.simulator.replay import Delaying, Player, Step, compare, needs_guide, steps
from fairlead.server.journal.records import Decided


def test_requests_that_wait_longer_end_too(record_run: Callable[..., Any], tmp_path: Path) -> None:
    record_run(tmp_path, "policy: default\nflowControl: {}", seconds=8.0, rate=60.0)
    run, (apply, _) = one_run(tmp_path), change("least-requests", None)
    assert apply is not None
    recorded, changed = Player(run.head, None, needs_guide(run)), Player(run.head, apply, None)
    delaying, answered, decided, later = Delaying(changed), set[int](), 0, 0
    for number, step in enumerate(steps(run, recorded, Faults(), [])):
        answered |= {choice.request_id for choice in step.recorded if choice.endpoint}
        decided += len(delaying.feed(step))
        later += len(delaying.until(step.time_s))
        if number % 25 == 0:  # it looks at everything
            changed.pipeline.validate()
    decided += len(delaying.until(float("inf")))
    assert later == 0 and decided > 0.6 * len(answered)
    assert not answered & {lease.request.id for lease in changed.pipeline.fleet.ledger}, "their ends were recorded"

    compared = compare(run, apply)
    waiting = sum(changed.waits(entry.request.id) for entry in changed.pipeline.requests)
    assert compared.after.decisions == decided
    assert any(note.startswith(f"{waiting:,} requests still wait") for note in compared.notes) == bool(waiting)


class Waits:
    """A player whose only request waits until time 15."""

    def __init__(self) -> None:
        self.fed: list[tuple[float, type]] = []

    def waits(self, request_id: int) -> bool:
        return not self.fed or self.fed[-1][0] < 15.0

    def feed(self, time_s: float, event: Any) -> list[DecisionRecord]:
        self.fed.append((time_s, type(event)))
        sent = DecisionRecord(request=Request(id=1, arrived=10.0), at=time_s, policy="p", endpoint="e")
        return [sent] if time_s == 15.0 else []


def player_after(*events: tuple[float, Any]) -> list[tuple[float, type]]:
    """What a player gets of these events of a request that was sent at time 10 as recorded."""
    player: Any = Waits()
    delaying = Delaying(player)
    sent = Decided(request_id=1, endpoint="e")
    for time_s, event in ((10.0, Reconfigured(None)), *events):
        recorded = (sent,) if time_s == 10.0 else ()
        delaying.feed(Step(time_s, event, [], recorded))  # type: ignore[arg-type]
    delaying.until(float("inf"))
    return [(time_s, kind) for time_s, kind in player.fed if kind is not Reconfigured]


def test_a_session_that_ends_after_its_answer_ends_after_the_later_answer_too() -> None:
    ended, lost = ResponseEnded(request_id=1), StreamLost(1)
    sent = 15.0, Reconfigured(None)
    assert player_after(sent, (16.0, ended), (18.0, lost)) == [(21.0, ResponseEnded), (23.0, StreamLost)]
    assert player_after((12.0, ended), (13.0, lost), sent) == [(17.0, ResponseEnded)], "it is over then"
    assert player_after((12.0, lost), sent) == [(12.0, StreamLost)], "the client left"
