"""Converts YAML (and therefore JSON) to a tree of nodes: mappings, lists, and scalars as text. All YAML is read here.

Rules
* Nothing raises except `YamlError`, for any bytes, and nothing takes long: bytes, values and depth are bounded before
  anything is built. Any input of 1 MiB costs less than a second of CPU and 150 MB.
* The tree is built from the parser's events with an explicit stack. The library's composer recurses in C: a megabyte
  of `[` kills the process with a segmentation fault (PyYAML 6.0.3), and the pure Python composer is 10 times slower.
* Scalars and keys stay text as written, so that `port: 08000` or a label `1.10` does not become another number. Callers
  that want numbers resolve them (`scalar`, `parse`) as in YAML 1.1 without its traps: no dates, no base-60 numbers
  (`1:30` is a string), and `1e6` is a number as in JSON.
* An alias is the same node as its anchor. Nothing is ever copied, so nested aliases cost no memory. An anchor is known
  once its node is complete, so no node can contain itself. `parse` expands aliases within bounds: a document that would
  expand to too much is an error and does not exhaust memory.
* `<<` merges, and the merged values count against the limit. Tags that would construct an object are refused.
* A duplicate key, or a `<<` that cannot be merged, does not affect other keys: it is recorded in `Tree.faults`.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any, Union

import yaml
from msgspec import Struct

from fairlead.config.problems import Place, Problem, shorten, show

MAX_BYTES = 1 << 20
MAX_DEPTH = 64
_TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep"
#: libyaml's error (from PyYAML 6.0.4 on) for more than a thousand levels. It comes before the first event.
_MUCH_TOO_DEEP = "exceeded maximum nesting depth"
#: Values of a document, including merged ones. Ten thousand endpoints with some labels have half as many.
MAX_VALUES = 300_000
MAX_FAULTS = 200
#: libyaml compares each tag directive with all earlier ones: a megabyte of them takes 5 s.
_MAX_TAG_DIRECTIVES = 100
_TAG_PREFIX = "tag:yaml.org,2002:"
_TAGS = frozenset({"str", "int", "float", "bool", "null", "map", "seq"})
_MISSING = frozenset({"", "~", "null", "Null", "NULL"})
_ESCAPE = re.compile(rb"\\(?:u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})|.)", re.DOTALL)
_Loader: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)


class YamlError(Exception):
    """The text cannot be read (any further)."""

    def __init__(self, message: str, line: int = 0, hint: str = "") -> None:
        self.problem = Problem("$", line, message, hint)
        super().__init__(message)


class Node:
    """A value and the line (from 1; 0 = an empty document) where it begins."""

    __slots__ = ("key_lines", "line", "plain", "tag", "value")

    def __init__(
        self, value: Union[str, "dict[str, Node]", "list[Node]"], line: int, plain: bool = False, tag: str = ""
    ) -> None:
        self.value = value
        self.line = line
        #: Whether it is a scalar without quotes.
        self.plain = plain
        #: The explicit type: `str`, `int`, `float`, `bool`, `null`; empty = none.
        self.tag = tag
        #: For a mapping: the line of each key.
        self.key_lines: dict[str, int] = {} if isinstance(value, dict) else _NO_LINES

    @property
    def missing(self) -> bool:
        """Whether the value is empty or null."""
        return self.tag == "null" or (self.plain and not self.tag and self.value in _MISSING)


_NO_LINES: dict[str, int] = {}


class Tree(Struct):
    """A document. An empty one has a `missing` root."""

    root: Node
    faults: list[Problem]

    def line(self, place: Place) -> int:
        """The line of `place`, or of the nearest enclosing value in the text; 0 = none."""
        return [line for line, _ in self._way(place)][-1]

    def node(self, place: Place) -> Node | None:
        nodes = [node for _, node in self._way(place)]
        return nodes[-1] if len(nodes) > len(place) else None

    def _way(self, place: Place) -> Iterator[tuple[int, Node]]:
        """Yield line and value of the root and of each step towards `place`, as far as there are values."""
        node = self.root
        yield node.line, node
        for step in place:
            inner = node.value
            if isinstance(inner, dict) and isinstance(step, str) and step in inner:
                line, node = node.key_lines[step], inner[step]
            elif isinstance(inner, list) and isinstance(step, int) and step < len(inner):
                node = inner[step]
                line = node.line
            else:
                return
            yield line, node


def parse_yaml(text: bytes | str) -> Tree:
    """Parse one document. Raises `YamlError`."""
    raw = _checked(text)
    builder = _Builder()
    try:
        for event in yaml.parse(raw, Loader=_Loader):
            builder.take(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        lines = raw.decode().splitlines()
        line = min(mark.line + 1, len(lines)) if mark else 0  # the parser may detect the error only after the end
        if mark and mark.line < len(lines) and "\t" in lines[mark.line][: mark.column + 1]:
            tab = "not valid YAML: a tab, where only spaces may indent"
            raise YamlError(tab, line, "replace each tab with two spaces") from None
        if error.problem == _MUCH_TOO_DEEP:
            raise YamlError(_TOO_DEEP, line) from None
        raise YamlError(f"not valid YAML: {error.problem or error.context}", line) from None
    except yaml.reader.ReaderError as error:
        raise YamlError(f"not valid YAML: {error.reason}", raw[: error.position].count(b"\n") + 1) from None
    except (yaml.YAMLError, ValueError) as error:
        raise YamlError(f"not valid YAML: {shorten(str(error))}") from None
    return Tree(builder.root or Node("", 0, plain=True), builder.faults)


def _checked(text: bytes | str) -> bytes:
    try:
        raw = text.encode() if isinstance(text, str) else text
        if isinstance(text, bytes):
            text.decode()
    except UnicodeError:
        raise YamlError("the text is not valid UTF-8") from None
    if len(raw) > MAX_BYTES:
        raise YamlError(f"the text is larger than {MAX_BYTES >> 20} MiB")
    if raw.count(b"%TAG") > _MAX_TAG_DIRECTIVES:
        raise YamlError("too many %TAG directives")
    if raw.lstrip()[:1] in (b"{", b"["):
        # JSON allows tabs (never inside a string) and escaped surrogates, which YAML does not.
        raw = _ESCAPE.sub(_joined, raw.replace(b"\t", b" "))
    return raw


def _joined(escape: re.Match[bytes]) -> bytes:
    """`\\ud83d\\ude00` → `\\U0001f600`; any other escape is unchanged."""
    high, low = escape.groups()
    if high is None:
        return escape[0]
    return b"\\U%08x" % (0x10000 + ((int(high, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00)


class _Open(Struct, eq=False):
    """A collection that is not complete yet."""

    node: Node
    anchor: str | None
    #: The key that waits for its value, the key's line, and whether the key is `<<`.
    key: str | None = None
    key_line: int = 0
    merge: bool = False
    merges: list[Node] = []


class _Builder:
    """A stack of open collections."""

    def __init__(self) -> None:
        self.root: Node | None = None
        self.faults: list[Problem] = []
        self._stack: list[_Open] = []
        self._anchors: dict[str, Node] = {}
        self._values = 0
        self._documents = 0

    def take(self, event: Any) -> None:
        line = int(event.start_mark.line) + 1
        if isinstance(event, yaml.ScalarEvent):
            self._count(1, line)
            self._complete(Node(event.value, line, event.implicit[0], _tag(event, line)), event.anchor, line)
        elif isinstance(event, yaml.AliasEvent):
            self._count(1, line)
            node = self._anchors.get(str(event.anchor))
            if node is None:
                raise YamlError(
                    f"alias *{shorten(str(event.anchor))} stands for nothing that is complete before it", line
                )
            self._complete(node, None, line)
        elif isinstance(event, yaml.CollectionStartEvent):
            self._begin(Node({} if isinstance(event, yaml.MappingStartEvent) else [], line), event, line)
        elif isinstance(event, yaml.CollectionEndEvent):
            done = self._stack.pop()
            for source in done.merges:
                self._merge(done, source)
            self._complete(done.node, done.anchor, done.node.line)
        elif isinstance(event, yaml.DocumentStartEvent):
            self._documents += 1
            if self._documents > 1:
                raise YamlError("a second document begins here", line, "one file, one document")

    def _begin(self, node: Node, event: Any, line: int) -> None:
        self._count(1, line)
        _tag(event, line)
        if self._stack and isinstance(self._stack[-1].node.value, dict) and self._stack[-1].key is None:
            raise YamlError("keys are strings, not lists or mappings", line)
        self._stack.append(_Open(node, event.anchor))
        if len(self._stack) > MAX_DEPTH:
            raise YamlError(_TOO_DEEP, line)

    def _complete(self, node: Node, anchor: str | None, line: int) -> None:
        """Add a value (or a key) to the innermost open collection."""
        if anchor is not None:
            self._anchors[anchor] = node
        if not self._stack:
            self.root = node
            return
        around = self._stack[-1]
        inner = around.node.value
        if isinstance(inner, list):
            inner.append(node)
        elif around.key is None:
            if not isinstance(node.value, str):
                raise YamlError("keys are strings, not lists or mappings", line)
            around.key, around.key_line = node.value, line
            around.merge = node.plain and node.value == "<<"
        else:
            self._pair(around, node)
            around.key = None

    def _pair(self, around: _Open, node: Node) -> None:
        inner, lines, key = around.node.value, around.node.key_lines, around.key
        assert isinstance(inner, dict) and key is not None
        if around.merge:
            sources = node.value if isinstance(node.value, list) else [node]
            self._count(len(sources), around.key_line)
            around.merges += sources
        elif key in inner:
            first = f"first in line {lines[key]}"
            self._fault(around.key_line, f"'{shorten(key)}' is given twice", first)
        else:
            inner[key] = node
            lines[key] = around.key_line

    def _merge(self, into: _Open, source: Node) -> None:
        """`<<: *source`: add the keys that are not there yet."""
        inner = into.node.value
        assert isinstance(inner, dict)
        if not isinstance(source.value, dict):
            self._fault(source.line, "<< needs a mapping, or a list of mappings")
            return
        self._count(len(source.value), into.node.line)
        for key, node in source.value.items():
            if key not in inner:
                inner[key] = node
                into.node.key_lines[key] = source.key_lines[key]

    def _fault(self, line: int, message: str, hint: str = "") -> None:
        """Record a fault in the innermost open collection."""
        if len(self.faults) < MAX_FAULTS:
            levels = ((level.node.value, level.key or "") for level in self._stack)
            place = tuple(len(inner) if isinstance(inner, list) else key for inner, key in levels)
            self.faults.append(Problem(show(place), line, message, hint))

    def _count(self, values: int, line: int) -> None:
        self._values += values
        if self._values > MAX_VALUES:
            raise YamlError(f"more than {MAX_VALUES} values", line)


def _tag(event: Any, line: int) -> str:
    """The explicit type that the event's tag names; empty = none. Raises `YamlError` for an unsupported tag."""
    if event.tag is None or event.tag == "!":
        return ""
    tag = str(event.tag).removeprefix(_TAG_PREFIX)
    if tag not in _TAGS or tag == event.tag:
        raise YamlError(f"tags such as {shorten(event.tag)} are not supported", line)
    return tag


# ---- values ----

#: Values after aliases are expanded.
MAX_UNFOLDED = 100_000
#: Longer plain scalars are always strings.
_MAX_NUMBER = 64

_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")
_RESOLVER: Any = yaml.resolver.Resolver()
_CONSTRUCTOR = yaml.constructor.SafeConstructor()
_READERS: Mapping[str, Callable[[Any], Any]] = {
    "int": _CONSTRUCTOR.construct_yaml_int,
    "float": _CONSTRUCTOR.construct_yaml_float,
    "bool": _CONSTRUCTOR.construct_yaml_bool,
    "null": _CONSTRUCTOR.construct_yaml_null,
    "str": _CONSTRUCTOR.construct_yaml_str,
}


class Document(Struct):
    """The value of a text: dict (with str keys), list, str, int, float, bool and None."""

    value: Any
    #: The same document with every scalar as text.
    tree: Tree
    problems: list[Problem]


def parse(text: str | bytes) -> Document:
    """Parse a text. Never raises: errors are in `problems`. An empty text has the value None."""
    try:
        tree = parse_yaml(text)
        value = _expanded(tree.root, 0, count(1))
    except YamlError as error:
        return Document(None, Tree(Node("", 0), []), [error.problem])
    return Document(value, tree, tree.faults)


def _expanded(node: Node, depth: int, values: Iterator[int]) -> Any:
    """The value of a node. `values` counts all values of the document from 1."""
    if next(values) > MAX_UNFOLDED or depth > MAX_DEPTH:
        raise YamlError("the document is too large once its aliases are unfolded", node.line)
    value = node.value
    if isinstance(value, list):
        return [_expanded(item, depth + 1, values) for item in value]
    if isinstance(value, dict):
        return {key: _expanded(item, depth + 1, values) for key, item in value.items()}
    return scalar(node)


def scalar(node: Node) -> str | int | float | bool | None:
    """The value of a scalar. Raises `YamlError` if it does not match its tag."""
    text, tag = node.value, node.tag
    assert isinstance(text, str)
    if not tag:
        if not node.plain or len(text) > _MAX_NUMBER:
            return text
        tag = str(_RESOLVER.resolve(yaml.ScalarNode, text, (True, False))).removeprefix(_TAG_PREFIX)
        if tag == "str" and _EXPONENT.fullmatch(text):
            return float(text)
        if tag not in _READERS or ":" in text:
            return text
    try:
        read = _READERS[tag]
        value: str | int | float | bool | None = read(yaml.ScalarNode(_TAG_PREFIX + tag, text))
    except (ValueError, KeyError, IndexError, yaml.YAMLError):
        raise YamlError(f"'{shorten(text)}' cannot be read as {tag}", node.line) from None
    return value
