"""Messages of `fairlead.scheduler.v1` as values; the contract is `proto/fairlead/scheduler/v1/scheduler.proto`.

`scheduler_ask` and `scheduler_answer` turn them into bytes and back.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from fairlead.model.remote import RemotePick
from fairlead.model.request import Request

VERSION = 1
#: gRPC path of the stream.
PATH = "/fairlead.scheduler.v1.Scheduler/Schedule"

Floats = NDArray[np.float64]
Slots = NDArray[np.intp]

#: Columns of `Load` by field number; names as in `fleet.table`, the last four as in `fleet.predictor`.
COLUMNS: Mapping[int, str] = {
    2: "waiting",
    3: "running",
    4: "kv",
    5: "queue",
    6: "active",
    7: "inflight",
    8: "pending",
    9: "pending_tokens",
    10: "queued_tokens",
    11: "queued_ms",
    12: "prefill_since_ms",
    13: "kv_tokens",
    14: "growth_tokens",
    15: "sampled_at",
    16: "failures",
    17: "errors",
    18: "ejected_until",
    19: "max_adapters",
    20: "capacity_tokens",
    21: "prefill_factor",
    22: "step_factor",
    23: "ttft_factor",
    24: "tpot_factor",
}
#: Highest slot that is taken from a peer: columns are as long as the highest one.
MAX_SLOT = 65_535

_NO_SLOTS: Slots = np.zeros(0, dtype=np.intp)


class Hello(Struct, frozen=True, kw_only=True):
    version: int = VERSION
    gateway: str = ""
    pool: str = ""
    budget_us: int = 0


class EndpointState(Struct, frozen=True, kw_only=True):
    slot: int
    id: str
    address: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    #: `None` = not reported.
    adapters: tuple[str, ...] | None = None


class Speeds(Struct, frozen=True, kw_only=True):
    c0: float = 0.0
    c_pf: float = 0.0
    c_attn: float = 0.0
    c_seq: float = 0.0
    c_kv: float = 0.0
    hold_ms: float = 0.0
    answer_steps: float = 0.0


class State(Struct, kw_only=True):
    version: int = 0
    full: bool = False
    endpoints: list[EndpointState] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    #: Slots whose columns changed, and those columns by field number, parallel to it.
    slots: Slots = field(default_factory=lambda: _NO_SLOTS)
    columns: dict[int, Floats] = field(default_factory=dict)
    settled: int = 0
    speeds: Speeds | None = None


class Forecast(Struct, kw_only=True):
    """One entry per slot, milliseconds; `used` is a share of the KV memory."""

    ttft_ms: Floats
    prefill_ms: Floats
    step_ms: Floats
    used: Floats


class Asked(Struct, kw_only=True):
    """One request of a batch, with what is known about it at endpoints."""

    request: Request
    expected_output: float = 0.0
    hit_slots: Slots = field(default_factory=lambda: _NO_SLOTS)
    hit_shares: Floats = field(default_factory=lambda: np.zeros(0))
    #: `None` = every endpoint can serve it.
    candidates: Slots | None = None
    forecast: Forecast | None = None


class Batch(Struct, kw_only=True):
    number: int = 0
    now: float = 0.0
    requests: list[Asked] = field(default_factory=list)


class Ask(Struct, kw_only=True):
    hello: Hello | None = None
    state: State | None = None
    batch: Batch | None = None


class Welcome(Struct, frozen=True, kw_only=True):
    version: int = VERSION
    scheduler: str = ""
    policy: str = ""
    wants_forecasts: bool = False


class Picks(Struct, frozen=True, kw_only=True):
    batch: int = 0
    picks: tuple[RemotePick, ...] = ()


class Answer(Struct, frozen=True, kw_only=True):
    welcome: Welcome | None = None
    picks: Picks | None = None


def as_floats(values: Any) -> Floats:
    """A column of doubles as protobuf packs them."""
    return np.ascontiguousarray(values, dtype="<f8")
