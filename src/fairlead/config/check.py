"""Converts values from a file to pydantic models, and pydantic's errors to Fairlead's messages.

Every problem is reported with its place in the file. Nearly correct names are suggested.
"""

import re
from collections.abc import Collection, Mapping
from math import inf, isfinite
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from fairlead.config.problems import MAX_PROBLEMS, Place, Report, describe
from fairlead.plugins.params import Params, camel

Model = TypeVar("Model", bound=BaseModel)

#: What was expected, by pydantic's error type.
_EXPECTED = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
}
#: Limits by pydantic's error type: the key in the error's context, and Fairlead's text.
_LIMITS = {
    "greater_than": ("gt", "{kind} > {limit}"),
    "greater_than_equal": ("ge", "{kind} >= {limit}"),
    "less_than": ("lt", "{kind} < {limit}"),
    "less_than_equal": ("le", "{kind} <= {limit}"),
    "string_too_short": ("min_length", "a string of length >= {limit}"),
    "string_too_long": ("max_length", "a string of length <= {limit}"),
    "too_short": ("min_length", "a list of length >= {limit}"),
    "too_long": ("max_length", "a list of length <= {limit}"),
    "string_pattern_mismatch": ("pattern", "a string matching regex '{limit}'"),
}


def fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a model by their names in files."""
    named = camel if issubclass(model, Params) else str  # older pydantic generates aliases with the validator only
    return {str(field.validation_alias or named(name)): field for name, field in model.model_fields.items()}


def plain(model: BaseModel) -> dict[str, Any]:
    """The values by the fields' names in files, as plain JSON values."""
    return dict(zip(fields(type(model)), model.model_dump(mode="json").values(), strict=False))


def read(
    model: type[Model],
    node: object,
    place: Place,
    report: Report,
    places: Mapping[str, Place] | None = None,
    hints: Mapping[str, str] | None = None,
    siblings: Collection[str] = (),
) -> Model | None:
    """Read a `model` from a mapping; `None` counts as an empty one. Reports problems, and then returns `None`.

    `places`: the places of keys that are not under `place`. `hints`: hints for some unknown keys. `siblings`: names
    that the caller handles itself, as suggestions for keys under `place`.
    """
    if node is not None and not isinstance(node, dict):
        report.add(place, f"expected a mapping, got {describe(node)}")
        return None
    try:
        return model.model_validate(node)
    except ValidationError as error:
        every = error.errors(include_url=False)
    faults = every[:MAX_PROBLEMS]
    report.omit(len(every) - len(faults))
    by_place: dict[Place, list[ErrorDetails]] = {}
    for fault in faults:
        by_place.setdefault(_steps(node, fault["loc"]), []).append(fault)
    for steps in sorted(by_place, key=lambda steps: _position(node, steps, by_place[steps][0])):
        where = place if not steps else (*(places or {}).get(str(steps[0]), (*place, steps[0])), *steps[1:])
        deeper = any(
            len(deeper_steps) > len(steps) and deeper_steps[: len(steps)] == steps for deeper_steps in by_place
        )
        for message in _mismatches(by_place[steps], deeper):
            report.add(where, message)
        for fault in by_place[steps]:
            if fault["type"] == "extra_forbidden":
                name = str(steps[-1])
                beside = len(steps) == 1 and name not in (places or {})
                known = {*fields(_kind(model, steps[:-1])), *(siblings if beside else ())}
                report.unknown(where, "field", name, known, (hints or {}).get(name, "") if len(steps) == 1 else "")
            elif fault["type"] == "literal_error" and isinstance(fault["input"], str):
                report.unknown(where, "value", fault["input"], _choices(fault))
            elif fault["type"] == "string_pattern_mismatch" and (examples := _examples(model, steps)):
                report.add(where, f"expected a value like {examples}, got {describe(fault['input'])}")
            elif fault["type"] not in _EXPECTED:
                report.add(where, _message(fault, _kind(model, steps)))
    return None


def any_case(kind: Any, node: Any) -> Any:
    """Change the field names in `node` to the model's spelling, whatever their case: Go's encoding/json ignores case.
    `kind`: the model, or an annotation that contains models."""
    if isinstance(node, list):
        return [any_case(_kind(kind, (i,)), value) for i, value in enumerate(node)]
    if not (isinstance(node, dict) and isinstance(kind, type) and issubclass(kind, BaseModel)):
        return node
    names = {name.casefold(): name for name in fields(kind)}
    renamed: dict[Any, Any] = {}
    for key, value in node.items():
        name = names.get(str(key).casefold(), key)
        renamed[key if name in node else name] = any_case(_kind(kind, (str(name),)), value)
    return renamed


def only_known(kind: Any, node: Any, place: Place, report: Report, strict: Collection[Any] = ()) -> Any:
    """The value without the fields that its model does not have, which are noted. Models in `strict` keep theirs."""
    if isinstance(node, list):
        return [only_known(_kind(kind, (i,)), value, (*place, i), report, strict) for i, value in enumerate(node)]
    model = isinstance(kind, type) and issubclass(kind, BaseModel) and kind not in strict
    if not (model and isinstance(node, dict)):
        return node
    known = fields(kind)
    for key in node:
        if key not in known:
            report.note((*place, str(key)), "unknown field; it is left out")
    return {
        key: only_known(_kind(kind, (key,)), value, (*place, key), report, strict)
        for key, value in node.items()
        if key in known
    }


def _steps(node: Any, loc: tuple[str | int, ...]) -> Place:
    """The part of an error's location that exists in the file. The rest names members of unions, or missing keys."""
    steps: list[str | int] = []
    for step in loc:
        listed = isinstance(node, list | tuple) and isinstance(step, int) and step < len(node)
        if listed or (isinstance(node, dict) and step in node):
            node = node[step]
            steps.append(step)
    return tuple(steps)


def _position(node: Any, steps: Place, fault: ErrorDetails) -> tuple[float, ...]:
    """A sort key that puts errors in the order of the file's text. Missing keys come after existing ones."""
    order: list[float] = []
    for step in steps:
        order.append(step if isinstance(step, int) else list(node).index(step))
        node = node[step]
    return (*order, inf) if fault["type"] == "missing" else tuple(order)


def _kind(kind: Any, steps: Place) -> Any:
    """The type annotation of the value at the path `steps` inside a value of type `kind`."""
    for step in steps:
        inner = (_inner(member, step) for member in _members(kind))
        kind = next((option for option in inner if option is not None), None)
    return next((option for option in _members(kind) if option is not type(None)), None)


def _members(kind: Any) -> list[Any]:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _members(arguments[0])
    if origin in (Union, UnionType):
        return [member for argument in arguments for member in _members(argument)]
    return [kind]


def _inner(kind: Any, step: str | int) -> Any:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        field = fields(kind).get(str(step))
        return field.annotation if field else None
    arguments = get_args(kind)
    if isinstance(step, str):
        return arguments[1] if get_origin(kind) is dict else None
    if get_origin(kind) not in (list, tuple):
        return None
    return arguments[0] if arguments[-1] is ... or len(arguments) <= step else arguments[step]


def _mismatches(faults: list[ErrorDetails], deeper: bool) -> list[str]:
    """The expected kinds of values: several for a union, unless a member matched and the error is deeper."""
    kinds = list(dict.fromkeys(_EXPECTED[fault["type"]] for fault in faults if fault["type"] in _EXPECTED))
    if not kinds or deeper:
        return []
    node = faults[0]["input"]
    if isinstance(node, float) and not isfinite(node) and not {"a list", "a mapping"} & {*kinds}:
        return ["expected a finite number"]
    return [f"expected {' or '.join(kinds)}, got {describe(node)}"]


def _examples(model: Any, steps: Place) -> str:
    """The examples of the field at the path `steps`, which may lead into its list; empty = there are none."""
    steps = steps[:-1] if isinstance(steps[-1], int) else steps
    kind = _kind(model, steps[:-1])
    field = fields(kind).get(str(steps[-1])) if isinstance(kind, type) and issubclass(kind, BaseModel) else None
    return " or ".join(f"'{example}'" for example in (field and field.examples) or ())


def _choices(fault: ErrorDetails) -> list[str]:
    return re.findall(r"'([^']*)'", fault["ctx"]["expected"])


def _message(fault: ErrorDetails, kind: Any) -> str:
    type_, node, context = fault["type"], fault["input"], fault.get("ctx", {})
    got = f", got {describe(node)}"
    if type_ == "missing" and isinstance(fault["loc"][-1], str):
        return f"field '{fault['loc'][-1]}' is missing"
    if type_ in ("missing", "too_long") and get_origin(kind) is tuple and ... not in get_args(kind):
        return f"expected a list of length {len(get_args(kind))}, got {len(node)}"
    if type_ in ("value_error", "assertion_error"):
        return str(context["error"])
    if type_ == "finite_number":
        return "expected a finite number"
    if type_ == "literal_error":
        return f"expected one of {', '.join(_choices(fault))}; got {describe(node)}"
    if type_ in _LIMITS:
        key, words = _LIMITS[type_]
        limit = context[key]
        return f"expected {words.format(kind='an integer' if isinstance(limit, int) else 'a number', limit=limit)}{got}"
    message = fault["msg"]
    return f"{message[:1].lower()}{message[1:]}{got}"
