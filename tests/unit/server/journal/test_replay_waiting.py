"""A journal with waiting requests under another policy: what waits longer is answered later, not never."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fairlead.cli.options import change
from fairlead.lab.simulator.journal import Faults, one_run
from fairlead.lab.simulator.replay import Delaying, Player, compare, needs_guide, steps


def test_requests_that_wait_longer_end_too(record_run: Callable[..., Any], tmp_path: Path) -> None:
    record_run(tmp_path, "policy: default\nflowControl: {}", seconds=8.0, rate=60.0)
    run, apply = one_run(tmp_path), change("least-requests", None)
    assert apply is not None
    recorded, changed = Player(run.head, None, needs_guide(run)), Player(run.head, apply, None)
    delaying, answered, decided, later = Delaying(changed), set[int](), 0, 0
    for step in steps(run, recorded, Faults(), []):
        answered |= {choice.request_id for choice in step.recorded if choice.endpoint}
        decided += len(delaying.feed(step))
        later += len(delaying.until(step.time_s))
        changed.pipeline.validate()
    decided += len(delaying.until(float("inf")))
    assert later == 0 and decided > 0.6 * len(answered)
    assert not answered & {lease.request.id for lease in changed.pipeline.fleet.ledger}, "their ends were recorded"

    compared = compare(run, apply)
    waiting = sum(changed.waits(entry.request.id) for entry in changed.pipeline.requests)
    assert compared.after.decisions == decided
    assert any(note.startswith(f"{waiting:,} requests still wait") for note in compared.notes) == bool(waiting)
