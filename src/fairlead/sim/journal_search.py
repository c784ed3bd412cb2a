"""Finds one decision in a journal, with what led to it and what came of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

from fairlead.model.decision import DecisionRecord, OutcomeRecord, Trace
from fairlead.model.events import RequestArrived
from fairlead.model.request import Request
from fairlead.sim.journal import Faults, JournalError, Run, runs
from fairlead.wire.journal.details import Detail
from fairlead.wire.journal.records import DECIDED, DETAIL, ENDED, POLICY, Decided, Ended


class Found(Struct):
    """A decision as it was. `scheduling` is the configuration that was in force."""

    run: str
    decision: DecisionRecord
    scheduling: Any
    outcome: OutcomeRecord | None = None


def search(path: Path, wanted: str, run: str = "") -> Found:
    """By our number for the request, a decision id (`run.number`), or the client's x-request-id; of several the newest.

    Raises `JournalError` or `OSError`.
    """
    named, dot, digits = wanted.rpartition(".")
    there = runs(path)
    if dot and any(one.id == named for one in there):
        run, wanted = named, str(_number(digits))
    for one in reversed(there):
        if run in ("", one.id):
            found = _in_run(one, wanted)
            if found is not None:
                return found
    what = f"run {run}" if run else f"{len(there)} run{'s' if len(there) > 1 else ''}"
    raise JournalError(f"no decision {wanted!r} in {what} of {path}; it may have been dropped, or not sampled")


def decisions(run: Run, faults: Faults | None = None) -> Iterator[Found]:
    """All decisions of a run, each when its end is known or the journal ends, with traces where there are details."""
    scheduling = run.head.scheduling
    open_: dict[int, Found] = {}
    requests: dict[int, Request] = {}
    for kind, at, body in run.items(faults):
        if kind == RequestArrived.__name__:
            requests[body.request.id] = body.request
        elif kind == POLICY:
            scheduling = body
        elif kind == DECIDED:
            request = requests.pop(body.request_id, None) or Request(id=body.request_id, arrived=at)
            found = Found(run.id, decision_record(at, body, request, None), scheduling)
            if body.endpoint:
                open_[body.request_id] = found
            else:
                yield found
        elif kind == DETAIL:
            mine = open_.get(body.request.id)
            if mine is not None:
                mine.decision = with_detail(mine.decision, body)
        elif kind == ENDED:
            mine = open_.pop(body.request_id, None)
            if mine is not None:
                mine.outcome = outcome_record(at, body, mine.decision)
                yield mine
    yield from open_.values()


def _in_run(run: Run, wanted: str) -> Found | None:
    number = _number(wanted, 10)
    found: Found | None = None
    for one in decisions(run):
        request = one.decision.request
        if request.id == number or (request.external_id and request.external_id == wanted):
            found = one
    return found


def _number(text: str, base: int = 16) -> int:
    try:
        return int(text, base)
    except ValueError:
        return -1


def decision_record(at: float, decided: Decided, request: Request, trace: Trace | None) -> DecisionRecord:
    """The record that the live process had."""
    return DecisionRecord(
        request=request,
        at=at,
        policy=decided.policy,
        endpoint=decided.endpoint,
        address=decided.address,
        prefill=decided.prefill,
        hit_tokens=decided.hit_tokens,
        best_hit_tokens=decided.best_hit_tokens,
        outcome=decided.outcome,
        status=decided.status,
        overloaded=decided.overloaded,
        queued_ms=decided.queued_ms,
        forecast=decided.forecast,
        trace=trace,
    )


def with_detail(record: DecisionRecord, detail: Detail) -> DecisionRecord:
    values = {name: getattr(record, name) for name in record.__struct_fields__}
    return DecisionRecord(**(values | {"request": detail.request, "trace": detail.trace}))


def outcome_record(at: float, ended: Ended, decision: DecisionRecord) -> OutcomeRecord:
    return OutcomeRecord(
        request=decision.request,
        at=at,
        endpoint=ended.endpoint,
        status=ended.status,
        cause=ended.cause,
        ttft_ms=ended.ttft_ms,
        duration_ms=ended.duration_ms,
        request_bytes=decision.request.body_bytes,
        response_bytes=ended.response_bytes,
        prompt_tokens=ended.prompt_tokens,
        completion_tokens=ended.completion_tokens,
        cached_tokens=ended.cached_tokens,
        hit_tokens=decision.hit_tokens,
        forecast=decision.forecast,
    )
