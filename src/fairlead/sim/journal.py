"""Reads journals: files → runs → records in order. What is damaged is skipped and counted, never trusted.

A journal's directory holds the segments of one or several runs (processes). A segment may still be growing.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from fairlead.model.errors import FairleadError
from fairlead.wire.journal.blocks import Damage, blocks
from fairlead.wire.journal.details import Unpacker
from fairlead.wire.journal.records import DETAIL, SEGMENT, VERSION, Item, Segment, Unknown, decode

SUFFIX = ".journal"


class JournalError(FairleadError):
    """There is no journal, or none that can be used for this."""


class Faults(Struct):
    """What was passed over while reading."""

    #: Bytes in the middle of segments, and behind the last good block of one.
    damaged: int = 0
    unfinished: int = 0
    #: Records that this program cannot read.
    unreadable: int = 0
    #: The first of them.
    problem: str = ""

    def describe(self) -> list[str]:
        """One line per kind."""
        lines = []
        if self.damaged:
            lines.append(f"{self.damaged} damaged bytes were skipped")
        if self.unfinished:
            lines.append(f"{self.unfinished} bytes of an unfinished block at the end were left out")
        if self.unreadable:
            lines.append(f"{self.unreadable} records could not be read: {self.problem}")
        return lines


class Run(Struct):
    """One process's part of a journal."""

    id: str
    #: Segments in order, each with its head.
    segments: list[tuple[Path, Segment]]

    @property
    def head(self) -> Segment:
        return self.segments[0][1]

    @property
    def whole(self) -> bool:
        """From the start of the process, and without a hole between segments."""
        return [head.number for _, head in self.segments] == list(range(len(self.segments)))

    def items(self, faults: Faults | None = None) -> Iterator[Item]:
        """All records behind the heads; details as `Detail`. A kind that is not known is left out."""
        faults = Faults() if faults is None else faults
        for path, _ in self.segments:
            for item in _items(path.read_bytes(), faults):
                if item[0] != SEGMENT:
                    yield item


def runs(path: Path) -> list[Run]:
    """Of a directory, or of one segment; the oldest first. Raises `JournalError` or `OSError`."""
    files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    found: dict[str, list[tuple[Path, Segment]]] = {}
    for file in files:
        head = _head(file)
        if head is None:
            continue
        if head.version > VERSION:
            raise JournalError(f"{file} has version {head.version}; this program knows {VERSION}")
        found.setdefault(head.run, []).append((file, head))
    if not found:
        raise JournalError(f"{path} holds no journal (files *{SUFFIX} that `journal.path` of a configuration writes)")
    return [Run(run, sorted(segments, key=lambda one: one[1].number)) for run, segments in found.items()]


def one_run(path: Path, run: str = "") -> Run:
    """The named run of a journal, or its last. Raises `JournalError` that lists what there is."""
    there = runs(path)
    if not run:
        return there[-1]
    for one in there:
        if one.id == run:
            return one
    raise JournalError(f"{path} has no run {run!r}; it has {', '.join(one.id for one in there)}")


#: A head is one block; those of pools with very many endpoints are some hundred KiB.
_HEAD_BYTES = 16 << 20


def _head(path: Path) -> Segment | None:
    with path.open("rb") as file:
        data = file.read(_HEAD_BYTES)
    for kind, _, body in _items(data, Faults()):
        return body if kind == SEGMENT and isinstance(body, Segment) else None
    return None


def _items(data: bytes, faults: Faults) -> Iterator[Item]:
    for found in blocks(data):
        if isinstance(found, Damage):
            if found.at_end:
                faults.unfinished += found.size
            else:
                faults.damaged += found.size
            continue
        unpacker = Unpacker()
        try:
            for kind, at, body in decode(found[1]):
                value = _value(kind, body, unpacker, faults)
                if value is not None:
                    yield kind, at, value
        except msgspec.DecodeError as error:
            faults.unreadable += 1
            faults.problem = faults.problem or str(error)


def _value(kind: str, body: Any, unpacker: Unpacker, faults: Faults) -> Any:
    if isinstance(body, Unknown):
        faults.unreadable += 1
        faults.problem = faults.problem or f"{kind}: {body.problem}"
        return None
    if kind != DETAIL:
        return body
    try:
        return unpacker.unpack(body)
    except ValueError as error:
        faults.unreadable += 1
        faults.problem = faults.problem or str(error)
        return None
