"""Plain values → structs, by the annotations of the structs themselves. Reports every problem and goes on.

msgspec converts the leaves, and so decides what is a valid one; but it stops at the first error, knows no lines and
guesses no names. Hence the walk over structs, lists and mappings is ours.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from math import isfinite
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from fairlead.config import units
from fairlead.config.problems import Report, describe
from fairlead.plugins.durations import Duration
from fairlead.wire.problem import Place

#: Stands for a value that was wrong; the report has the reason.
INVALID: Final = type("Invalid", (), {"__repr__": lambda self: "INVALID"})()

_WORDS = {
    "str": "a string", "int": "an integer", "float": "a number", "bool": "true or false", "array": "a list",
    "object": "a mapping", "null": "nothing",
}  # fmt: skip
_AT = re.compile(r" - at `\$(.*)`$")
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")


def check(kind: Any, node: object, place: Place, report: Report) -> Any:
    """`node` as a value of the annotated type `kind`, or `INVALID` once the reason is reported."""
    if kind == Duration:
        return node if _quantity(kind, "duration", node, place, report) is not INVALID else INVALID
    base, unit = _unwrap(kind)
    if unit:
        return _quantity(kind, unit, node, place, report)
    if isinstance(base, type) and issubclass(base, Struct) and base.__struct_config__.tag is None:
        return struct(base, node, place, report)
    origin, arguments = get_origin(base), get_args(base)
    if origin in (Union, UnionType) and NoneType in arguments and len(arguments) == 2:
        inner = next(a for a in arguments if a is not NoneType)
        return None if node is None else check(inner, node, place, report)
    if origin in (list, tuple, Sequence) and (origin is not tuple or arguments[1:] == (...,)):
        return _sequence(origin, arguments[0], node, place, report)
    if origin in (dict, Mapping) and arguments[0] is str:
        return _mapping(arguments[1], node, place, report)
    if origin is Literal:
        return _choice(arguments, node, place, report)
    return _leaf(kind, node, place, report)


def struct(
    kind: type[Struct],
    node: object,
    place: Place,
    report: Report,
    places: Mapping[str, Place] | None = None,
    hints: Mapping[str, str] | None = None,
    siblings: Collection[str] = (),
) -> Any:
    """A `kind` from a mapping, or `INVALID`. Nothing at all counts as an empty mapping.

    `places` says where keys stand that do not stand under `place`; `hints` what to say about some unknown ones;
    `siblings` are names that the caller takes itself, for suggestions.
    """
    node = {} if node is None else node
    if not isinstance(node, dict):
        report.add(place, f"expected a mapping, got {describe(node)}")
        return INVALID
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    values: dict[str, Any] = {}
    failed = False
    for key, item in node.items():
        where = (places or {}).get(key, (*place, key))
        if key not in fields:
            report.unknown(where, "field", key, {*fields, *siblings}, (hints or {}).get(key, ""))
            failed = True
            continue
        value = check(fields[key].type, item, where, report)
        failed = failed or value is INVALID
        values[fields[key].name] = value
    for name, field in fields.items():
        if field.required and name not in node:
            report.add(place, f"field '{name}' is missing")
            failed = True
    if failed:
        return INVALID
    try:
        return kind(**values)
    except (ValueError, TypeError) as error:
        report.add(place, str(error))
        return INVALID


def _unwrap(kind: Any) -> tuple[Any, str]:
    """(the bare type, its unit if it is one of `units`)."""
    if get_origin(kind) is not Annotated:
        return kind, ""
    base, *extras = get_args(kind)
    for extra in extras:
        if isinstance(extra, Meta) and extra.extra:
            return base, str(extra.extra.get("unit", ""))
    return base, ""


def _quantity(kind: Any, unit: str, node: object, place: Place, report: Report) -> Any:
    if isinstance(node, str):
        try:
            node = units.duration(node) if unit == "duration" else units.size(node)
        except ValueError as error:
            report.add(place, f"{error}, got {describe(node)}")
            return INVALID
    return _leaf(float if kind == Duration else kind, node, place, report)


def _sequence(origin: Any, inner: Any, node: object, place: Place, report: Report) -> Any:
    if not isinstance(node, list):
        report.add(place, f"expected a list, got {describe(node)}")
        return INVALID
    values = [check(inner, item, (*place, i), report) for i, item in enumerate(node)]
    if any(value is INVALID for value in values):
        return INVALID
    return tuple(values) if origin is tuple else values


def _mapping(inner: Any, node: object, place: Place, report: Report) -> Any:
    if not isinstance(node, dict):
        report.add(place, f"expected a mapping, got {describe(node)}")
        return INVALID
    values = {key: check(inner, item, (*place, key), report) for key, item in node.items()}
    return INVALID if any(value is INVALID for value in values.values()) else values


def _choice(choices: tuple[Any, ...], node: object, place: Place, report: Report) -> Any:
    if any(node == choice and type(node) is type(choice) for choice in choices):
        return node
    if isinstance(node, str):
        report.unknown(place, "value", node, map(str, choices))
    else:
        report.add(place, f"expected one of {', '.join(map(str, choices))}; got {describe(node)}")
    return INVALID


def _leaf(kind: Any, node: object, place: Place, report: Report) -> Any:
    if isinstance(node, float) and not isfinite(node):
        report.add(place, "expected a finite number")
        return INVALID
    try:
        return msgspec.convert(node, kind)
    except (msgspec.ValidationError, OverflowError) as error:
        where, message = _translate(str(error))
        got = f", got {describe(node)}" if not where and "got" not in message else ""
        report.add((*place, *where), message + got)
        return INVALID


def _translate(message: str) -> tuple[Place, str]:
    """msgspec's words → (where inside the leaf, ours): "Expected `int`, got `str`" → "expected an integer, got …"."""
    at = _AT.search(message)
    where: Place = ()
    if at is not None:
        where = tuple(name or int(index) for name, index in _STEP.findall(at[1]))
        message = message[: at.start()]
    if not where:
        message = re.sub(r", got `[^`]*`$", "", message)
    message = re.sub(r"`([^`]*)`", lambda m: " or ".join(_WORDS.get(w, w) for w in m[1].split(" | ")), message)
    return where, message[:1].lower() + message[1:]
