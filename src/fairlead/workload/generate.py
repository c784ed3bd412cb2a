"""Generators by name: what `fairlead workload generate` makes, from parameters given as words."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from fairlead.workload import adversarial
from fairlead.workload.arrivals import Arrivals, bursty, constant, poisson, ramp
from fairlead.workload.catalogue import CATALOGUE
from fairlead.workload.conversation import Conversation, conversation
from fairlead.workload.record import Dispatch, Workload
from fairlead.workload.shared_prefix import SharedPrefix, shared_prefix

#: The adversarial set; each has its own parameters.
ADVERSARIAL: Mapping[str, Callable[..., Workload]] = {
    "paced-prefix": adversarial.paced_prefix,
    "cold-bursts": adversarial.cold_bursts,
    "viral-prompt": adversarial.viral_prompt,
    "long-and-short": adversarial.long_and_short,
    "cancel-storm": adversarial.cancel_storm,
    "overload": adversarial.overload,
}
KINDS = ("shared-prefix", "conversation", *CATALOGUE, *ADVERSARIAL)


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How much, and how fast. Sessions count where there are any, else requests; `seconds` bounds their starts."""

    rate: float = 10.0
    count: int = 0
    seconds: float = 0.0
    arrivals: str = "poisson"
    #: Of `bursty` arrivals: coefficient of variation of the gaps.
    cv: float = 3.0
    #: Of `ramp` arrivals: the last rate, reached after `seconds`.
    to_rate: float = 0.0
    dispatch: Dispatch | None = None
    seed: int = 0


def generate(kind: str, pace: Pace, parameters: Mapping[str, str]) -> Workload:
    """Raises `ValueError` for an unknown kind or parameter, or a value that cannot be."""
    if kind in ADVERSARIAL:
        if parameters:
            raise ValueError(f"{kind} takes no parameters; its seed is all that can be chosen")
        return ADVERSARIAL[kind](seed=pace.seed)
    if pace.count <= 0 and pace.seconds <= 0:
        raise ValueError("give a count or seconds, arrivals have no end of their own")
    arrivals = arrivals_of(pace)
    if kind == "shared-prefix":
        made = shared_prefix(
            _changed(SharedPrefix(), parameters),
            arrivals=arrivals,
            rate=pace.rate,
            seconds=pace.seconds,
            count=pace.count,
            seed=pace.seed,
        )
    elif kind == "conversation" or kind in CATALOGUE:
        spec = CATALOGUE[kind].spec if kind in CATALOGUE else Conversation()
        made = conversation(
            _changed(spec, parameters),
            sessions=pace.count,
            seconds=pace.seconds,
            arrivals=arrivals,
            seed=pace.seed,
            dispatch=pace.dispatch or "think",
            name=kind,
        )
    else:
        raise ValueError(f"unknown kind {kind!r}; known: {', '.join(KINDS)}")
    return msgspec.structs.replace(made, dispatch=pace.dispatch) if pace.dispatch else made


def arrivals_of(pace: Pace) -> Arrivals:
    """Raises `ValueError`."""
    if pace.arrivals == "poisson":
        return poisson(pace.rate)
    if pace.arrivals == "constant":
        return constant(pace.rate)
    if pace.arrivals == "bursty":
        return bursty(pace.rate, pace.cv)
    if pace.arrivals == "ramp":
        return ramp(pace.rate, pace.to_rate, pace.seconds)
    raise ValueError(f"unknown arrivals {pace.arrivals!r}; known: poisson, constant, bursty, ramp")


def _changed(spec: Any, parameters: Mapping[str, str]) -> Any:
    """`spec` with the given fields, converted from text."""
    fields = msgspec.structs.asdict(spec)
    for name in parameters:
        if name not in fields:
            raise ValueError(f"unknown parameter {name!r}; known: {', '.join(fields)}")
    try:
        return msgspec.convert({**fields, **parameters}, type(spec), strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
