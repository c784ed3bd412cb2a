"""YAML (or JSON) text → plain values, with the line of everything.

Rules
* The text is read by `fairlead.wire.plain_yaml`, which bounds bytes and nesting. Here aliases are unfolded, within
  bounds too: one that would unfold to too much is an error, not an OOM.
* A key that occurs twice is a problem, not a silent "last wins".
* YAML 1.1 without its traps: no dates, no base-60 numbers (`1:30` is a string), and `1e6` is a number as in JSON. Keys
  are strings as written.
* Anchors, aliases and merge keys (`<<`) work. Tags do not: a configuration constructs nothing.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import yaml
from msgspec import Struct

from fairlead.config.problems import describe
from fairlead.wire.plain_yaml import MAX_DEPTH, Node, Tree, YamlError, parse_yaml
from fairlead.wire.problem import Problem

#: Values after aliases are unfolded.
MAX_VALUES = 100_000
#: Longer plain scalars are strings, whatever they look like.
_MAX_NUMBER = 64

_PREFIX = "tag:yaml.org,2002:"
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
    """`value` consists of dict (with str keys), list, str, int, float, bool and None."""

    value: Any
    #: The same with every scalar as text, for who wants that.
    tree: Tree
    problems: list[Problem]


def parse(text: str | bytes) -> Document:
    """Never raises for any text: what is wrong with it stands in `problems`. An empty text has the value None."""
    try:
        tree = parse_yaml(text)
        value = _Expander().expand(tree.root, 0)
    except YamlError as error:
        return Document(None, Tree(Node("", 0), []), [error.problem])
    return Document(value, tree, tree.faults)


class _Expander:
    """Nodes → values."""

    def __init__(self) -> None:
        self._values = 0

    def expand(self, node: Node, depth: int) -> Any:
        self._values += 1
        if self._values > MAX_VALUES or depth > MAX_DEPTH:
            raise YamlError("the document is too large once its aliases are unfolded", node.line)
        value = node.value
        if isinstance(value, list):
            return [self.expand(item, depth + 1) for item in value]
        if isinstance(value, dict):
            return {key: self.expand(item, depth + 1) for key, item in value.items()}
        return scalar(node)


def scalar(node: Node) -> str | int | float | bool | None:
    """What a scalar stands for. Raises `YamlError` when it is not what its tag says."""
    text, tag = node.value, node.tag
    assert isinstance(text, str)
    if not tag:
        if not node.plain or len(text) > _MAX_NUMBER:
            return text
        tag = str(_RESOLVER.resolve(yaml.ScalarNode, text, (True, False))).removeprefix(_PREFIX)
        if tag == "str" and _EXPONENT.fullmatch(text):
            return float(text)
        if tag not in _READERS or ":" in text:
            return text
    try:
        read = _READERS[tag]
        value: str | int | float | bool | None = read(yaml.ScalarNode(_PREFIX + tag, text))
    except (ValueError, KeyError, IndexError, yaml.YAMLError):
        raise YamlError(f"{describe(text)} cannot be read as {tag}", node.line) from None
    return value
