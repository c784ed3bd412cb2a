"""Faults of a replica, set at run time through `POST /fault` or from Python."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

_Share = Annotated[float, Meta(ge=0, le=1)]
_Seconds = Annotated[float, Meta(ge=0, le=3600)]


class Faults(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All off by default. A change replaces the whole value; requests that run keep what they drew."""

    #: Multiplies the time of every engine step.
    slow_factor: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    #: Share of generation requests that fail with `error_status`.
    error_rate: _Share = 0.0
    error_status: Annotated[int, Meta(ge=400, le=599)] = 500
    #: Streams fail inside their 200, as an event; others fail with the status all the same.
    error_in_stream: bool = False
    #: /metrics answers with the page of the moment this was set.
    metrics_frozen: bool = False
    #: /metrics answers that much later.
    metrics_delay_s: _Seconds = 0.0
    #: /metrics answers with this status; 0 = 200.
    metrics_status: Annotated[int, Meta(ge=0, le=599)] = 0
    #: The engine makes no step: requests are accepted and hang, /health is 200, gauges stand still.
    stall: bool = False
    #: Share of streams whose connection is cut after `disconnect_after` tokens.
    disconnect_rate: _Share = 0.0
    disconnect_after: Annotated[int, Meta(ge=0)] = 1
    #: The engine process is dead: requests fail with 500, running streams with an event, /health is 503.
    engine_dead: bool = False
    #: /health and /ping answer with this status whatever the truth is; 0 = the truth.
    health_status: Annotated[int, Meta(ge=0, le=599)] = 0


NO_FAULTS = Faults()


def changed(faults: Faults, changes: dict[str, Any]) -> Faults:
    """`faults` with some fields changed. Raises `ValueError` that names the wrong one; then nothing has changed."""
    try:
        return msgspec.convert(msgspec.structs.asdict(faults) | changes, Faults)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
