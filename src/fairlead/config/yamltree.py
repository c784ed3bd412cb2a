"""YAML (or JSON) text → plain values, with the line of everything.

Rules
* Built from the parser's events with an explicit depth, never by the library's recursive composer: nesting, aliases
  and sizes are bounded before anything is built. An alias that would unfold to too much is an error, not an OOM.
* A key that occurs twice is a problem, not a silent "last wins".
* YAML 1.1 without its traps: no dates, no base-60 numbers (`1:30` is a string), and `1e6` is a number as in JSON.
* Anchors, aliases and merge keys (`<<`) work. Tags do not: a configuration constructs nothing.
"""

import re
from collections.abc import Iterator
from typing import Any

import yaml
from msgspec import Struct

from fairlead.config.problems import Place, Problem, describe, shorten, show

MAX_BYTES = 1 << 20
MAX_DEPTH = 64
#: Values after aliases are unfolded.
MAX_VALUES = 100_000
#: Longer plain scalars are strings, whatever they look like.
_MAX_NUMBER = 64

_PREFIX = "tag:yaml.org,2002:"
_PLAIN_TAGS = {_PREFIX + name for name in ("str", "int", "float", "bool", "null", "map", "seq")}
_MERGE = _PREFIX + "merge"
_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")


class Document(Struct):
    """`value` consists of dict (with str keys), list, str, int, float, bool and None. `lines` count from 1."""

    value: Any
    lines: dict[Place, int]
    problems: list[Problem]


class _Node(Struct):
    line: int


class _Scalar(_Node):
    value: Any
    text: str
    merge: bool = False


class _List(_Node):
    items: list[_Node]


class _Map(_Node):
    pairs: list[tuple[_Node, _Node]]


class _Stop(Exception):
    """The text cannot be read any further."""

    def __init__(self, line: int, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.problem = Problem("$", line, message, hint)


def parse(text: str | bytes) -> Document:
    """Never raises for any text: what is wrong with it stands in `problems`. An empty text has the value None."""
    try:
        root = _compose(_decoded(text))
        expander = _Expander()
        value = expander.expand(root, (), 0) if root is not None else None
    except _Stop as stop:
        return Document(None, {}, [stop.problem])
    return Document(value, expander.lines, expander.problems)


def _decoded(text: str | bytes) -> bytes:
    try:
        raw = text.encode() if isinstance(text, str) else text
        if isinstance(text, bytes):
            text.decode()
    except UnicodeError:
        raise _Stop(0, "the text is not valid UTF-8") from None
    if len(raw) > MAX_BYTES:
        raise _Stop(0, f"the text is larger than {MAX_BYTES >> 20} MiB")
    return raw


def _compose(raw: bytes) -> _Node | None:
    loader = yaml.CSafeLoader(raw)
    try:
        return _Composer(loader).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        last = len(raw.decode().splitlines())  # the parser may notice only behind the end
        raise _Stop(
            min(mark.line + 1, last) if mark else 0, f"not valid YAML: {error.problem or error.context}"
        ) from None
    except yaml.reader.ReaderError as error:
        line = raw[: error.position].count(b"\n") + 1
        raise _Stop(line, f"not valid YAML: {error.reason}") from None
    finally:
        loader.dispose()


class _Composer:
    """Events → nodes. An anchor is known once its node is complete, so no node can contain itself."""

    def __init__(self, loader: "yaml.CSafeLoader") -> None:
        self._loader: Any = loader
        self._anchors: dict[str, _Node] = {}

    def document(self) -> _Node | None:
        events = self._events()
        root: _Node | None = None
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    raise _Stop(_line(event), "a second document begins here", "one file, one document")
                root = self._node(next(events), events, 0)
        return root

    def _events(self) -> Iterator[Any]:
        while self._loader.check_event():
            yield self._loader.get_event()

    def _node(self, event: Any, events: Iterator[Any], depth: int) -> _Node:
        line = _line(event)
        if isinstance(event, yaml.AliasEvent):
            anchor = str(event.anchor)
            if anchor not in self._anchors:
                raise _Stop(line, f"alias *{shorten(anchor)} stands for nothing that is complete before it")
            return self._anchors[anchor]
        if depth > MAX_DEPTH:
            raise _Stop(line, f"nested more than {MAX_DEPTH} levels deep")
        tag = getattr(event, "tag", None)
        if tag is not None and tag != "!" and tag not in _PLAIN_TAGS:
            raise _Stop(line, f"tags such as {shorten(tag)} are not supported")
        node = self._content(event, events, depth, line)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        return node

    def _content(self, event: Any, events: Iterator[Any], depth: int, line: int) -> _Node:
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event, line)
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[_Node] = []
            while not isinstance(inner := next(events), yaml.SequenceEndEvent):
                items.append(self._node(inner, events, depth + 1))
            return _List(line, items)
        pairs: list[tuple[_Node, _Node]] = []
        while not isinstance(inner := next(events), yaml.MappingEndEvent):
            key = self._node(inner, events, depth + 1)
            pairs.append((key, self._node(next(events), events, depth + 1)))
        return _Map(line, pairs)

    def _scalar(self, event: Any, line: int) -> _Scalar:
        text = event.value
        tag = event.tag if event.tag and event.tag != "!" else None
        if tag is None:
            tag = self._loader.resolve(yaml.ScalarNode, text, event.implicit)
            if tag == _MERGE:
                return _Scalar(line, text, text, merge=True)
            if tag not in _PLAIN_TAGS or len(text) > _MAX_NUMBER or (":" in text and tag != _PREFIX + "str"):
                return _Scalar(line, text, text)
            if tag == _PREFIX + "str" and event.implicit[0] and _EXPONENT.fullmatch(text):
                return _Scalar(line, float(text), text)
        try:
            value = self._loader.construct_object(yaml.ScalarNode(tag, text))
        except (ValueError, KeyError, IndexError, yaml.YAMLError):
            raise _Stop(line, f"{describe(text)} cannot be read as {tag.removeprefix(_PREFIX)}") from None
        return _Scalar(line, value, text)


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


class _Expander:
    """Nodes → values. Unfolds aliases within bounds, merges `<<`, and notes lines and repeated keys."""

    def __init__(self) -> None:
        self.lines: dict[Place, int] = {}
        self.problems: list[Problem] = []
        self._values = 0

    def expand(self, node: _Node, place: Place, depth: int) -> Any:
        self._count(node, depth)
        self.lines.setdefault(place, node.line)
        if isinstance(node, _List):
            return [self.expand(item, (*place, i), depth + 1) for i, item in enumerate(node.items)]
        if isinstance(node, _Map):
            return self._mapping(node, place, depth)
        assert isinstance(node, _Scalar)
        return node.value

    def _mapping(self, node: _Map, place: Place, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        merged: list[_Node] = []
        for key, value in node.pairs:
            if isinstance(key, _Scalar) and key.merge:
                merged.extend(value.items if isinstance(value, _List) else [value])
                continue
            name = self._key(key, place)
            if name is None:
                continue
            if name in found:
                first = self.lines[(*place, name)]
                self._problem((*place, name), key.line, f"'{shorten(name)}' is given twice", f"first in line {first}")
                continue
            self.lines[(*place, name)] = key.line
            found[name] = self.expand(value, (*place, name), depth + 1)
        for source in merged:
            self._merge(source, found, place, depth)
        return found

    def _merge(self, source: _Node, into: dict[str, Any], place: Place, depth: int) -> None:
        """`<<: *source`: keys that are not there yet."""
        if not isinstance(source, _Map):
            self._problem(place, source.line, "<< needs a mapping, or a list of mappings")
            return
        self._count(source, depth)
        lines = self.lines
        self.lines = {}
        unfolded = self._mapping(source, place, depth + 1)
        for where, line in self.lines.items():
            if len(where) > len(place) and where[len(place)] not in into:
                lines[where] = line
        self.lines = lines
        for name, value in unfolded.items():
            into.setdefault(name, value)

    def _count(self, node: _Node, depth: int) -> None:
        self._values += 1
        if self._values > MAX_VALUES or depth > MAX_DEPTH:
            raise _Stop(node.line, "the document is too large once its aliases are unfolded")

    def _key(self, key: _Node, place: Place) -> str | None:
        if isinstance(key, _Scalar) and isinstance(key.value, str):
            return key.value
        text = key.text if isinstance(key, _Scalar) else "a list or mapping"
        self._problem(place, key.line, f"keys are strings, not {shorten(text) or 'nothing'}", "quote it")
        return None

    def _problem(self, place: Place, line: int, message: str, hint: str = "") -> None:
        self.problems.append(Problem(show(place), line, message, hint))
