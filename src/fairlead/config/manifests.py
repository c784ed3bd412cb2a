"""Kubernetes manifests of model names → nouns: InferenceModel, InferenceObjective, InferenceModelRewrite.

Rules
* What an object may say stands in `model_kinds`; every problem has its path and its line.
* A file holds any number of documents and of lists (`List`, `InferenceModelList`, …). Other kinds are notes, so that
  a file which also holds the pool and its Deployment can be used as it is.
* Nothing raises for any text. With any problem the file as a whole must not be used; `Manifests.problems` says why.
* Bounded as every YAML of ours: 1 MiB, and a limit on values once aliases are unfolded.
"""

import re
from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from fairlead.config import yamltree
from fairlead.config.model_kinds import GROUP, Noun, read_object
from fairlead.config.problems import Report, describe
from fairlead.model.inference import (
    InferenceModel,
    InferenceModelRewrite,
    InferenceObjective,
    ModelSet,
)
from fairlead.wire.plain_yaml import MAX_BYTES
from fairlead.wire.problem import Place, Problem, shorten

MAX_OBJECTS = 10_000
#: Values of all documents of a file.
_MAX_VALUES = 300_000
_MARKER = re.compile(rb"^---(?=[ \t\r\n]|$)", re.MULTILINE)
#: Lines that are no content of a document: comments, directives, markers.
_NO_CONTENT = re.compile(rb"(?:[ \t]*(?:#.*|%.*|\.\.\.[ \t]*|---[ \t]*(?:#.*)?)?\r?(?:\n|$))*+")


class Manifests(Struct, frozen=True):
    """What a file says."""

    models: ModelSet = ModelSet()
    problems: tuple[Problem, ...] = ()
    #: Not wrong, but worth knowing.
    notes: tuple[Problem, ...] = ()


def read_manifests(text: bytes) -> Manifests:
    """All documents of a YAML or JSON text."""
    if len(text) > MAX_BYTES:
        return Manifests(problems=(Problem("$", 0, f"the text is larger than {MAX_BYTES >> 20} MiB"),))
    reader = _Reader()
    for offset, document in _documents(text):
        if not reader.document(document, offset):
            break
    return reader.manifests()


def _documents(text: bytes) -> Iterator[tuple[int, bytes]]:
    """(lines before it, text) of each document. In YAML nothing but a marker can be three dashes at a line's start.

    What stands before a first marker and is no content (directives, comments) belongs to the document behind it.
    """
    borders = [found.start() for found in _MARKER.finditer(text)]
    starts = [0, *borders]
    found = _NO_CONTENT.match(text, 0, borders[0]) if borders else None
    if found and found.end() == borders[0]:
        starts = [0, *borders[1:]]
    line, last = 0, 0
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        line += text.count(b"\n", last, start)
        last = start
        yield line, text[start:end]


class _Reader:
    """Takes documents one after the other."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], tuple[str, Noun]] = {}
        self._problems: list[Problem] = []
        self._notes: list[Problem] = []
        self._values = 0
        self._objects = 0

    def manifests(self) -> Manifests:
        nouns = [noun for _, noun in self._found.values()]
        models = ModelSet(
            tuple(noun for noun in nouns if isinstance(noun, InferenceModel)),
            tuple(noun for noun in nouns if isinstance(noun, InferenceObjective)),
            tuple(noun for noun in nouns if isinstance(noun, InferenceModelRewrite)),
        )
        return Manifests(models, tuple(self._problems), tuple(self._notes))

    def document(self, text: bytes, offset: int) -> bool:
        """False = enough was wrong already, or read."""
        document = yamltree.parse(text)
        self._values += _count(document.value)
        if self._values > _MAX_VALUES:
            self._problems.append(Problem("$", offset + 1, f"more than {_MAX_VALUES} values in one file"))
            return False
        tree = document.tree
        report = Report(lambda place: offset + tree.line(place) if tree.line(place) else 0)
        report.extend([replace(problem, line=offset + problem.line) for problem in document.problems])
        if not document.problems and document.value is not None:
            self._take(document.value, (), report, "", "")
        report.close()
        self._problems += report.problems
        self._notes += report.notes[:100]
        return len(self._problems) < 100 and self._objects <= MAX_OBJECTS

    def _take(self, value: object, place: Place, report: Report, kind: str, version: str) -> None:
        own = value.get("kind", kind) if isinstance(value, dict) else ""
        if isinstance(value, dict) and isinstance(own, str) and own.endswith("List") and not place:
            items = value.get("items")
            if not isinstance(items, list):
                report.add(("items",), f"expected a list, got {describe(items)}")
                return
            version = value.get("apiVersion", "")
            for i, item in enumerate(items):
                typed = own.removesuffix("List")
                self._take(item, ("items", i), report, typed, version if typed else "")
            return
        self._objects += 1
        if self._objects > MAX_OBJECTS:
            report.add(place, f"more than {MAX_OBJECTS} objects in one file")
            return
        noun = read_object(value, report, place, kind, version)
        if noun is not None and isinstance(value, dict):
            self._keep(noun, str(value.get("apiVersion", version)).partition("/")[0], place, report)

    def _keep(self, noun: Noun, group: str, place: Place, report: Report) -> None:
        """Of one object in both groups the newer group counts, as where both CRDs are installed."""
        key = type(noun).__name__, str(noun.origin)
        former = self._found.get(key)
        if former is not None and former[0] == group:
            report.add(place, f"{key[0]} {shorten(key[1])} is given twice")
        elif former is not None:
            report.note(place, f"{key[0]} {shorten(key[1])} is given in both groups; {GROUP} counts")
        if former is None or group == GROUP:
            self._found[key] = group, noun


def _count(value: object) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(_count, value.values()))
    return 1 + sum(map(_count, value)) if isinstance(value, list) else 1
