"""The base class of plugin parameters, and quantities as people write them (`64MiB`, `1m30s`).

The sections of a configuration file use them, too.
"""

import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


def camel(name: str) -> str:
    """`max_queue_length` → `maxQueueLength`."""
    first, *following = name.split("_")
    return first + "".join(word.title() for word in following)


class Params(BaseModel):
    """Parameters of a plugin. Subclass it, with a default for every field that has a sensible one.

    Fields are camelCase in files, unknown fields are errors, and nothing is converted: `"5"` is not a number. Instances
    are immutable. A list in the file becomes a tuple if the annotation says so.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        alias_generator=camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        defer_build=True,
        protected_namespaces=(),
    )

    @model_validator(mode="before")
    @classmethod
    def _from_nothing(cls, values: Any) -> Any:
        """Accept a missing value as an empty mapping, so that a file may leave it out."""
        return {} if values is None else values

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _take_lists(schema)
        return schema


def _take_lists(schema: Any) -> None:
    """Accept lists for tuples, because files have no tuples. All other types remain strict."""
    if isinstance(schema, dict):
        if schema.get("type") == "tuple":
            schema["strict"] = False
        schema = list(schema.values())
    if isinstance(schema, list):
        for inner in schema:
            _take_lists(inner)


class NoParams(Params):
    """For plugins without parameters."""


P = TypeVar("P", bound=Params)


class Plain(Generic[P]):
    """The base of a plugin that needs only its parameters (`Params`), if any."""

    type: ClassVar[str]
    Params: ClassVar[Any] = NoParams
    weight = 1.0

    def __init__(self, params: P | None = None, name: str = "") -> None:
        super().__init__()
        self.name = name or self.type
        self._params: P = self.Params() if params is None else params


_UNIT = "(?:ms|us|s|secs?|seconds?|m|mins?|minutes?|h|hours?)"
_DURATION = re.compile(rf"(?:[0-9]+(?:\.[0-9]+)? ?{_UNIT} ?)+|0")
_PART = re.compile(r"([0-9.]+) ?(ms|us|[smh])")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([kKMGT])(i?))?B?")
_POWERS = {"k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


def duration(text: str) -> float:
    """Return the duration in seconds. Raise `ValueError` if the text is not a duration."""
    if not _DURATION.fullmatch(text):
        raise ValueError("expected a duration such as 250ms, 5s, 1m30s, 15min, or a number of seconds")
    value = sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(text))
    if value > 1e9:
        raise ValueError("expected a duration of less than 30 years")
    return float(value)


def typed_duration(text: str) -> float:
    """Like `duration`, for a command line, where a plain number of seconds is text too."""
    return duration(f"{text}s" if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) else text)


def size(text: str) -> int:
    """Return the size in bytes. `k`, `M`, `G`, `T` are powers of 1000, with `i` of 1024; a `B` may follow.

    Raise `ValueError` if the text is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("expected a size such as 64MiB, 1G or 4096")
    number, prefix, binary = match.groups()
    factor = (1024 if binary else 1000) ** _POWERS[prefix] if prefix else 1
    value = float(number) * factor
    if value > 2**60:
        raise ValueError("expected a size that fits into a machine")
    return int(number) * factor if number.isdigit() else round(value)


class Quantity:
    """Marks a number that may also be written as text; `read` converts the text."""

    def __init__(self, unit: str, read: Callable[[str], float], pattern: str) -> None:
        self.unit = unit
        self._read = read
        self._pattern = pattern

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._number, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        number = handler(schema)
        return {**number, "type": [number["type"], "string"], "pattern": self._pattern}

    def _number(self, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._read(value)
        except ValueError as error:
            raise PydanticCustomError("quantity", str(error)) from None


DURATION = Quantity("duration", duration, rf"^(\d+(\.\d+)? ?{_UNIT} ?)+$|^0$")
SIZE = Quantity("size", size, r"^\s*\d+(\.\d+)?\s*([kKMGT]i?)?B?\s*$")

#: Seconds in Python; in a file a number of seconds or text such as `1m30s`.
Seconds = Annotated[float, Field(ge=0), DURATION]
#: Like `Seconds`, but above 0.
PositiveSeconds = Annotated[float, Field(gt=0), DURATION]
#: Bytes in Python; in a file a whole number of bytes or text such as `64MiB`.
Bytes = Annotated[int, Field(ge=1), SIZE]
