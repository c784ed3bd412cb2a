"""Reads journals: files → runs → records in order, and the decisions in them. Damaged data is skipped and counted.

A journal's directory holds the segments of one or more runs (processes). A segment may still be growing. With
`serve --workers`, the segments of the other workers are in its subdirectories.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from fairlead.core.errors import ConfigError
from fairlead.core.events import RequestArrived
from fairlead.core.explain import LAST, of_answer
from fairlead.core.records import DecisionRecord, OutcomeRecord
from fairlead.core.request import Request
from fairlead.server.journal.blocks import Damage, blocks
from fairlead.server.journal.records import (
    DECIDED,
    DETAIL,
    ENDED,
    POLICY,
    SEGMENT,
    VERSION,
    WORKER,
    Decided,
    Ended,
    Item,
    Segment,
    Unknown,
    Unpacker,
    decode,
)

SUFFIX = ".journal"


class JournalError(ConfigError):
    """There is no journal, or it cannot be used for the purpose, or it lacks the requested run or decision."""


class Faults(Struct):
    """What was skipped while reading."""

    #: Damaged bytes in the middle of segments; and bytes after the last good block of a segment.
    damaged: int = 0
    unfinished: int = 0
    #: Records that this program cannot read.
    unreadable: int = 0
    #: What is wrong with the first of these records.
    problem: str = ""

    def add_unreadable(self, problem: str) -> None:
        self.unreadable += 1
        self.problem = self.problem or problem

    def describe(self) -> list[str]:
        """One line per kind of fault."""
        lines = []
        if self.damaged:
            lines.append(f"{self.damaged} damaged bytes were skipped")
        if self.unfinished:
            lines.append(f"{self.unfinished} bytes of an unfinished block at the end were left out")
        if self.unreadable:
            lines.append(f"{self.unreadable} records could not be read: {self.problem}")
        return lines


class Run(Struct):
    """The part of a journal that one process wrote."""

    id: str
    #: The segments in order, each with its head.
    segments: list[tuple[Path, Segment]]
    #: The runs of workers of the same gateway that ran together, whose clock is the same.
    beside: "list[Run]" = []
    #: Files that were left out, in words.
    notes: list[str] = []

    @property
    def directory(self) -> Path:
        return self.segments[0][0].parent

    @property
    def head(self) -> Segment:
        return self.segments[0][1]

    @property
    def complete(self) -> bool:
        """Whether the segments begin at the start of the process and none is missing."""
        return [head.number for _, head in self.segments] == list(range(len(self.segments)))

    def items(self, faults: Faults | None = None) -> Iterator[Item]:
        """All records except the segments' heads, details as `Detail`. Records of an unknown kind are left out. Raises
        `JournalError` for a file with several segments, or that was deleted meanwhile."""
        for path, _ in self.segments:
            heads = 0
            for item in _items(_content(path), faults):
                if item[0] != SEGMENT:
                    yield item
                    continue
                heads += 1
                if heads > 1:
                    raise JournalError(f"{path} has a second segment behind the first; each needs a file of its own")

    def until(self) -> float:
        """When its last record was made, in seconds since 1970."""
        path, head = self.segments[-1]
        return head.epoch + max((time_s for _, time_s, _ in _items(_content(path))), default=0.0)

    def since(self) -> float:
        """When the first record that the journal still has was made, in seconds since 1970."""
        return self.head.epoch + next((time_s for _, time_s, _ in self.items()), 0.0)


def runs(path: Path) -> list[Run]:
    """The runs in a directory, including those of other workers, or in one segment; the oldest first. Raises
    `JournalError` or `OSError`."""
    files = [path]
    if path.is_dir():
        next(path.iterdir(), None)  # raises if it cannot be read, which `glob` does not
        files = sorted([*path.glob(f"*{SUFFIX}"), *path.glob(f"{WORKER}*/*{SUFFIX}")], key=lambda file: file.name)
    segments_of: dict[str, dict[int, tuple[Path, Segment]]] = {}
    copies, unusable = dict[str, list[str]](), list[tuple[Path, str]]()
    for file in files:
        try:
            head = _head(file)
        except FileNotFoundError:
            if file == path:
                raise
            continue  # deleted meanwhile, as a journal's oldest segments are
        if not isinstance(head, Segment):
            unusable += [(file, "the first block is damaged, without which the others cannot be read")] if head else []
            continue
        if head.version > VERSION:
            unusable.append((file, f"it has version {head.version}; this program knows {VERSION}"))
            continue
        numbers = segments_of.setdefault(head.run, {})
        known = numbers.get(head.number)
        if known is not None:
            longer, shorter = _by_length(file, known[0], head)
            copies.setdefault(head.run, []).append(f"{shorter} was left out: it is a copy of {longer.name}")
            file = longer
        numbers[head.number] = file, head
    if not segments_of and unusable:
        raise JournalError(": ".join(map(str, unusable[0])))
    if not segments_of:
        raise JournalError(f"{path} holds no journal (files *{SUFFIX} that `journal.path` of a configuration writes)")
    lost = [f"{file} was left out: {why}" for file, why in unusable]
    return [
        Run(run, [numbers[number] for number in sorted(numbers)], notes=[*copies.get(run, ()), *lost])
        for run, numbers in segments_of.items()
    ]


def _by_length(first: Path, second: Path, head: Segment) -> tuple[Path, Path]:
    """The longer and the shorter of two files with the same segment. One may have been copied while it grew. Raises
    `JournalError` if they differ otherwise."""
    shorter, longer = sorted(((file.read_bytes(), file) for file in (first, second)), key=lambda each: len(each[0]))
    if not longer[0].startswith(shorter[0]):
        raise JournalError(
            f"{first} and {second} are both segment {head.number} of run {head.run} and differ; remove one"
        )
    return longer[1], shorter[1]


def one_run(path: Path, run: str = "") -> Run:
    """The run of a journal with the id `run`. Empty = its last run, with those of the same workers in `beside`. Raises
    `JournalError` that lists the existing runs."""
    there = runs(path)
    if not run:
        own = [candidate for candidate in there if candidate.directory == path]
        last = (own or there)[-1]
        if any(candidate.directory != last.directory for candidate in there):
            return replace(last, beside=_beside(last, there))
        return last
    for candidate in there:
        if candidate.id == run:
            return candidate
    raise JournalError(f"{path} has no run {run!r}; it has {', '.join(candidate.id for candidate in there)}")


def _beside(last: Run, there: Sequence[Run]) -> list[Run]:
    """The runs of workers that ran together, without the last one, oldest first: those that overlap it, and those that
    overlap these, because one that dies begins another run."""
    spans = {each.id: (each.since(), each.until()) for each in there}
    together = [last.id]
    for name in together:  # it grows meanwhile
        since, until = spans[name]
        together += [
            run for run, (began, end) in spans.items() if end >= since and began <= until and run not in together
        ]
    return [each for each in there if each.id in together and each is not last]


#: Upper bound for a segment's head, which is one block: some hundred KiB for pools with very many endpoints.
_HEAD_BYTES = 16 << 20


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        why = "the scheduler deletes its oldest segments (journal.maxBytes). Try again"
        raise JournalError(f"{path} was deleted while the journal was read: {why}") from None


def _head(path: Path) -> Segment | bool:
    """A segment's head. False = nothing in the file can be read; True = other records can."""
    with path.open("rb") as file:
        data = file.read(_HEAD_BYTES)
    for kind, _, body in _items(data):
        return body if kind == SEGMENT and isinstance(body, Segment) else True
    return False


def _items(data: bytes, faults: Faults | None = None) -> Iterator[Item]:
    faults = Faults() if faults is None else faults
    for block in blocks(data):
        if isinstance(block, Damage):
            if block.at_end:
                faults.unfinished += block.size
            else:
                faults.damaged += block.size
            continue
        unpacker = Unpacker()
        try:
            for kind, time_s, body in decode(block[1]):
                value = _value(kind, body, unpacker, faults)
                if value is not None:
                    yield kind, time_s, value
        except msgspec.DecodeError as error:
            faults.add_unreadable(str(error))


def _value(kind: str, body: Any, unpacker: Unpacker, faults: Faults) -> Any:
    if isinstance(body, Unknown):
        faults.add_unreadable(f"{kind}: {body.problem}")
        return None
    if kind != DETAIL:
        return body
    try:
        return unpacker.unpack(body)
    except ValueError as error:
        faults.add_unreadable(str(error))
        return None


# Finds one decision in a journal, together with its request and its outcome.


class JournaledDecision(Struct):
    """A decision as it was made. `scheduling` is the configuration that was in force."""

    run: str
    decision: DecisionRecord
    scheduling: Any
    outcome: OutcomeRecord | None = None


def search(path: Path, wanted: str, run: str = "") -> JournaledDecision:
    """Find a decision by our number for the request, a decision id (`run.number`), or the client's x-request-id, also
    in the id of an answer. If several match, the newest is returned, but in one run a number counts first as ours,
    because clients may choose numbers. `LAST` finds the newest decision. `run`: search only this one; empty = all.

    Raises `JournalError` or `OSError`.
    """
    named, dot, digits = wanted.rpartition(".")
    there, number = runs(path), None
    if wanted == LAST and not run:
        newest = dict[Path, tuple[float, JournaledDecision]]()  # of each worker
        for candidate in reversed(there):
            directory = candidate.segments[0][0].parent
            if directory not in newest and (entry := _in_run(candidate, LAST)) is not None:
                newest[directory] = candidate.head.epoch + entry.decision.at, entry
        if newest:
            return max(newest.values(), key=lambda pair: pair[0])[1]
    if dot and any(candidate.id == named for candidate in there):
        run, number = named, _number(digits)
    meant: list[str | int] = [wanted] if number is None else [number]
    if number is None and re.fullmatch("0|[1-9][0-9]{,18}", wanted):
        meant = [int(wanted), wanted]
    for candidate in reversed(there):
        if run in ("", candidate.id):
            for name in meant:
                if (entry := _in_run(candidate, name)) is not None:
                    return entry
    if inner := of_answer(wanted):
        return search(path, inner, run)
    what = f"run {run}" if run else f"{len(there)} run{'s' if len(there) > 1 else ''}"
    raise JournalError(f"no decision {wanted!r} in {what} of {path}; the journal may have dropped or not sampled it")


#: A request that arrives this many numbers before others arrived in an older segment.
_DISORDER = 10_000


class _Decisions:
    """Puts decisions together, with their traces if the journal has them, from the records of a run in their order."""

    def __init__(self, run: str, scheduling: Any, wanted: str | int = LAST) -> None:
        """`scheduling`: the configuration in force before the first record. `wanted`: leave out the decisions of
        requests that this does not name; `LAST` = none."""
        self._run, self._scheduling, self._wanted = run, scheduling, wanted
        #: By request: what has arrived and is not decided, and decisions whose request has not ended.
        self.undecided: dict[int, Request] = {}
        self.open: dict[int, JournaledDecision] = {}
        #: The requests that were decided and had arrived before the first record, and when they were decided.
        self.earlier: dict[int, float] = {}

    def add(self, kind: str, time_s: float, body: Any) -> JournaledDecision | None:
        """Add a record. Returns the decision that it completes: its request has ended, or was refused."""
        if kind == RequestArrived.__name__:
            self.undecided[body.request.id] = body.request
        elif kind == POLICY:
            self._scheduling = body.document
        elif kind == DECIDED:
            return self._decided(time_s, body)
        elif kind == DETAIL:
            mine = self.open.get(body.request.id)
            if mine is not None:
                mine.decision = replace(mine.decision, request=body.request, trace=body.trace)
        elif kind == ENDED:
            mine = self.open.pop(body.request_id, None)
            if mine is not None:
                mine.outcome = OutcomeRecord(
                    request=mine.decision.request,
                    at=time_s,
                    hit_tokens=mine.decision.hit_tokens,
                    forecast=mine.decision.forecast,
                    queued_ms=mine.decision.queued_ms + mine.decision.asked_ms,
                    **_shared(body, OutcomeRecord),
                )
                return mine
        return None

    def _decided(self, time_s: float, body: Decided) -> JournaledDecision | None:
        request = self.undecided.pop(body.request_id, None)
        if request is None:
            self.earlier[body.request_id] = time_s
            request = Request(id=body.request_id, arrived=time_s)
        elif not _is_named(request, self._wanted):
            return None
        # The pipeline sets these fields after the request has arrived.
        request = replace(
            request, target=body.target, rewritten_by=body.rewritten_by, priority=body.priority or request.priority
        )
        record = DecisionRecord(request=request, at=time_s, **_shared(body, DecisionRecord))
        entry = JournaledDecision(self._run, record, self._scheduling)
        if not body.endpoint:
            return entry
        self.open[body.request_id] = entry
        return None

    def finish(self, segments: Iterable[tuple[Path, Segment]], request_id: int) -> JournaledDecision | None:
        """Add the records of further segments until the decision of this request is complete, and return it as complete
        as it is; `None` = there is none."""
        for path, _ in segments:
            for item in _items(path.read_bytes()):
                entry = self.add(*item)
                if entry is not None and entry.decision.request.id == request_id:
                    return entry
        return self.open.get(request_id)


def decisions(run: Run) -> Iterator[JournaledDecision]:
    """All decisions of a run, with their traces if the journal has them. A decision is yielded when its request has
    ended, or at the end of the journal; a refusal immediately."""
    made = _Decisions(run.id, run.head.scheduling)
    for item in run.items():
        entry = made.add(*item)
        if entry is not None:
            yield entry
    yield from made.open.values()


def in_force(run: Run) -> tuple[Any, float]:
    """The recorded configuration by which most requests were decided, in a run and the runs beside it, and the share of
    the decisions that are its own. Reloads change it."""
    counts = list[tuple[Any, int]]()
    for each in (run, *run.beside):
        now, decided = each.head.scheduling, 0
        for kind, _, body in each.items():
            if kind == POLICY:
                counts.append((now, decided))
                now, decided = body.document, 0
            decided += kind == DECIDED
        counts.append((now, decided))
    sums = [(sum(n for later, n in counts if later == document), document) for document, _ in counts]
    most, document = max(sums, key=lambda pair: pair[0])
    total = sum(n for _, n in counts)
    return document, most / total if total else 1.0


def _in_run(run: Run, wanted: str | int) -> JournaledDecision | None:
    """Return the newest decision that `wanted` names; a number is our number for the request. Reads the newest segments
    first, and no older ones than necessary: journals may have GiB. Each is read once, unless the decision extends over
    several."""
    later, lacking = dict[int, float](), None
    for index in reversed(range(len(run.segments))):
        path, head = run.segments[index]
        made = _Decisions(run.id, head.scheduling, wanted)
        entry = _newest(made, path, wanted)
        # What arrived here and was decided in a later segment was decided after all others here.
        waited = [
            number
            for number, request in made.undecided.items()
            if _is_named(request, wanted) and (number in later or number == wanted)
        ]
        if waited:
            number = max(waited, key=lambda number: (later.get(number, 0.0), number))
            return made.finish(run.segments[index + 1 :], number) or lacking
        if entry is not None:
            number = entry.decision.request.id
            if number in made.open:
                entry = made.finish(run.segments[index + 1 :], number) or entry
            if number not in made.earlier or entry.decision.trace is not None:
                return entry
            wanted, lacking = number, entry  # the request itself is in an older segment, if the journal has it
        later = made.earlier | later
    return lacking


def _newest(made: _Decisions, path: Path, wanted: str | int) -> JournaledDecision | None:
    """Add a segment's records, or as many as are needed. Returns the newest of its decisions that `wanted` names."""
    newest, number = None, wanted if isinstance(wanted, int) else inf
    for kind, time_s, body in _items(path.read_bytes()):
        entry = made.add(kind, time_s, body)
        if entry is not None and _is_named(entry.decision.request, wanted):
            newest = max(entry, newest or entry, key=_order)
            if number < inf:
                break
        # Numbers rise, nearly: prompts that take longer to read arrive later.
        late = kind == RequestArrived.__name__ and body.request.id > number + _DISORDER
        if late and number not in made.undecided and number not in made.open:
            break
    for entry in made.open.values():
        if _is_named(entry.decision.request, wanted):
            newest = max(entry, newest or entry, key=_order)
    return newest


def _order(entry: JournaledDecision) -> tuple[float, int]:
    return entry.decision.at, entry.decision.request.id


def _is_named(request: Request, wanted: str | int) -> bool:
    return wanted in (LAST, request.id, request.external_id)


def _number(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError:
        return -1


def _shared(short: Decided | Ended, kind: type[DecisionRecord] | type[OutcomeRecord]) -> dict[str, Any]:
    """The fields that a journaled record has in common with the record in the live process."""
    return {name: value for name, value in asdict(short).items() if name in kind.__struct_fields__}
