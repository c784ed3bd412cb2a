"""YAML (and with it JSON) to a plain tree with line numbers: mappings, lists, and scalars as text.

Rules
* Built from the parser's events with a depth limit. libyaml's own composer recurses in C: a megabyte of `[` kills the
  process with a segmentation fault (seen with PyYAML 6.0.3), and the pure Python one is 10 times slower.
* Scalars stay text as written, so `port: 08000` or a label `1.10` is not turned into another number on the way.
* An alias is the very node of its anchor; nothing is ever expanded, so nested aliases cost no memory.
"""

from collections.abc import Mapping
from typing import Any, Union

import yaml

MAX_DEPTH = 16
_Loader: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
_MISSING = frozenset({"", "~", "null", "Null", "NULL"})


class PlainYamlError(Exception):
    """The text is not YAML, or not plain enough. `line` counts from 1; 0 = unknown."""

    def __init__(self, message: str, line: int = 0) -> None:
        self.line = line
        super().__init__(message)


class Node:
    """A value and where it stands. `missing`: written as nothing or as null."""

    __slots__ = ("line", "missing", "value")

    def __init__(
        self, value: Union[str, "dict[str, Node]", "list[Node]"], line: int = 0, missing: bool = False
    ) -> None:
        self.value = value
        self.line = line
        self.missing = missing

    @classmethod
    def of(cls, value: Any, depth: int = 0) -> "Node":
        """A node of a plain value; deeper than the limit only its type's name is kept."""
        if value is None:
            return cls("", missing=True)
        if isinstance(value, bool):
            return cls("true" if value else "false")
        if depth < MAX_DEPTH:
            if isinstance(value, Mapping):
                return cls({str(key): cls.of(one, depth + 1) for key, one in value.items()})
            if isinstance(value, list | tuple):
                return cls([cls.of(one, depth + 1) for one in value])
        return cls(str(value) if isinstance(value, str | int | float) else f"<{type(value).__name__}>")


def parse_plain(text: bytes) -> Node:
    """The first document's tree. Raises `PlainYamlError`."""
    if text.lstrip()[:1] in (b"{", b"["):
        # Tabs may indent JSON but not YAML, and cannot stand inside a JSON string.
        text = text.replace(b"\t", b" ")
    builder = _Builder()
    try:
        for event in yaml.parse(text, Loader=_Loader):
            builder.take(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise PlainYamlError(error.problem or "not YAML", mark.line + 1 if mark else 0) from error
    except (yaml.YAMLError, UnicodeError, ValueError) as error:
        raise PlainYamlError(f"not YAML: {str(error).splitlines()[0][:200]}") from error
    return builder.root or Node("", 1, missing=True)


class _Builder:
    """A stack of open collections."""

    def __init__(self) -> None:
        self.root: Node | None = None
        self._open: list[Node] = []
        #: Per open mapping: the key that waits for its value.
        self._keys: list[str | None] = []
        self._anchors: dict[str, Node] = {}
        self._documents = 0

    def take(self, event: Any) -> None:
        line = event.start_mark.line + 1
        if isinstance(event, yaml.ScalarEvent):
            missing = event.style in (None, "") and event.value in _MISSING
            self._add(Node(event.value, line, missing), event.anchor, line)
        elif isinstance(event, yaml.AliasEvent):
            node = self._anchors.get(str(event.anchor))
            if node is None or node in self._open:
                raise PlainYamlError(f"the alias *{event.anchor} refers to nothing before it", line)
            self._add(node, None, line)
        elif isinstance(event, yaml.CollectionStartEvent):
            node = Node({} if isinstance(event, yaml.MappingStartEvent) else [], line)
            self._add(node, event.anchor, line)
            self._open.append(node)
            self._keys.append(None)
            if len(self._open) > MAX_DEPTH:
                raise PlainYamlError(f"nested deeper than {MAX_DEPTH}", line)
        elif isinstance(event, yaml.CollectionEndEvent):
            self._open.pop()
            self._keys.pop()
        elif isinstance(event, yaml.DocumentStartEvent):
            self._documents += 1
            if self._documents > 1:
                raise PlainYamlError("more than one document", line)

    def _add(self, node: Node, anchor: str | None, line: int) -> None:
        if anchor is not None:
            self._anchors[anchor] = node
        if not self._open:
            self.root = node
            return
        parent = self._open[-1].value
        if isinstance(parent, list):
            parent.append(node)
            return
        assert isinstance(parent, dict)
        key = self._keys[-1]
        if key is not None:
            parent[key] = node
            self._keys[-1] = None
        elif not isinstance(node.value, str):
            raise PlainYamlError("a key must be a scalar", line)
        elif node.value in parent:
            raise PlainYamlError(f"the key {node.value[:80]!r} stands twice in one mapping", line)
        else:
            self._keys[-1] = node.value
