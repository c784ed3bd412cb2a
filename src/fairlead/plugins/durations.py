"""Durations as people write them: `5s`, `250ms`, `1m30s`, or plain seconds."""

import re
from typing import Annotated

from msgspec import Meta

_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|us|s|m|h)")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PATTERN = r"^(\d+(\.\d+)?(ms|us|s|m|h))+$|^0$"

#: A duration in a configuration file: a number of seconds or a string such as `1m30s`.
Duration = Annotated[str, Meta(pattern=_PATTERN)] | Annotated[float, Meta(ge=0)]


def seconds(duration: "str | float") -> float:
    """Seconds. Raises `ValueError` for a string that is no duration."""
    if not isinstance(duration, str):
        return float(duration)
    if not re.match(_PATTERN, duration):
        raise ValueError(f"{duration!r} is not a duration such as 5s, 250ms or 1m30s")
    return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(duration))
