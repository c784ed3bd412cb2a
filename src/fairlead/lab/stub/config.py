"""The settings of a stub: `StubConfig`, fixed and the same for all replicas, and `Faults`, which change at run time."""

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Struct

from fairlead.apis.engine_metrics import DEFAULT_ENGINE, ENGINES
from fairlead.lab.engine.presets import DEFAULT_PRESET, preset
from fairlead.lab.engine.spec import EngineSpec
from fairlead.pool.http1 import MAX_BODY, MAX_HEAD

_Share = Annotated[float, Meta(ge=0, le=1)]
_Seconds = Annotated[float, Meta(ge=0, le=3600)]


class Faults(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Faults of a replica, all off by default, set through `POST /fault` or from Python. A change replaces the whole
    object. It does not change what was drawn for a running request when it arrived."""

    #: Multiplies the duration of every engine step.
    slow_factor: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    #: Share of generation requests that fail with `error_status`.
    error_rate: _Share = 0.0
    error_status: Annotated[int, Meta(ge=400, le=599)] = 500
    #: True: streams fail with an event inside a 200. Other requests still fail with `error_status`.
    error_in_stream: bool = False
    #: /metrics answers with the page of the first request after this was set.
    metrics_frozen: bool = False
    #: /metrics answers after this delay.
    metrics_delay_s: _Seconds = 0.0
    #: /metrics answers with this status; 0 = 200.
    metrics_status: Annotated[int, Meta(ge=0, le=599)] = 0
    #: The engine makes no step: requests are accepted and hang, /health is 200, gauges do not change.
    stall: bool = False
    #: Share of streams whose connection is cut after `disconnect_after` tokens.
    disconnect_rate: _Share = 0.0
    disconnect_after: Annotated[int, Meta(ge=0)] = 1
    #: The engine process is dead: requests fail with 500, running streams with an event, /health is 503.
    engine_dead: bool = False
    #: As after vLLM's POST /sleep: the metrics page and /is_sleeping report it, and requests are accepted and hang.
    asleep: bool = False
    #: /health and /ping answer with this status regardless of the real state; 0 = the real state.
    health_status: Annotated[int, Meta(ge=0, le=599)] = 0


NO_FAULTS = Faults()


def changed(faults: Faults, changes: dict[str, Any]) -> Faults:
    """`faults` with some fields changed. Raises `ValueError` that names the wrong field."""
    try:
        return msgspec.convert(msgspec.structs.asdict(faults) | changes, Faults)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


if TYPE_CHECKING:  # imports ZMQ, which only pools with events need
    from fairlead.lab.stub.kv_publisher import KvEventsConfig

VERSION = "0.32.0"
#: Ports per KV event publisher, and so from one replica's ports to the next's: one for events, one for replays.
KV_PORTS = 2
#: Far more than a CPU can follow. Beyond this, engine seconds would be too coarse for the steps of a server that has
#: run for a day.
MAX_TIME_RATIO = 1_000_000


class StubConfig(Struct, frozen=True, kw_only=True):
    """One configuration for all replicas of a pool. Defaults follow `vllm serve`, with the flag on that reports cached
    tokens. Raises `ValueError` if the engine could not start with it."""

    #: The engine whose metrics page is served, a name of `engine_metrics.ENGINES`. Everything else is as in vLLM.
    engine_type: str = DEFAULT_ENGINE
    #: The name of an engine preset, or the text of one.
    preset: str = DEFAULT_PRESET
    #: Served model name; empty = the preset's.
    model: str = ""
    #: Further names for it (`--served-model-name`). Answers have the first name, whichever was asked for.
    aliases: tuple[str, ...] = ()
    #: Engine seconds per second: 1 = time-accurate, 20 = twenty times faster. Times in /metrics are engine seconds.
    time_ratio: float = 1.0
    #: A stream sends one event per this many tokens, the first one immediately (`--stream-interval`).
    stream_interval: int = 1
    #: If several steps are handled together because they are late, they give one event with all their tokens, as under
    #: load on the real server. False = one event per token even then, for tests that count events.
    merge_events: bool = True

    #: Limits; 0 = the preset's.
    max_num_seqs: int = 0
    max_batched_tokens: int = 0
    max_model_len: int = 0
    kv_tokens: int = 0
    block_size: int = 0
    #: Adapters loaded at the start. With any, or with `max_loras`, adapters can also be loaded at run time.
    loras: tuple[str, ...] = ()
    #: Adapters in one batch; 0 = no adapters, or 1 if `loras` names some.
    max_loras: int = 0
    #: Requests that may wait before further requests are refused with 503 (`--max-num-queued-reqs`); 0 = no limit.
    max_queued: int = 0
    #: Share of refused streams whose 503 is inside a 200; below 0 = as measured, completions 0.55 and chat 0.85.
    overload_in_stream: float = -1.0
    #: Replaces everything that the engine takes from the preset and the fields above; for tests.
    engine: EngineSpec | None = None

    #: Approximate number of output tokens of a request without a limit, which then ends with `stop`. 0 = until the
    #: context length.
    natural_output: int = 256
    #: Token ids of a prompt must be below this. The stub's tokens are any four bytes.
    vocab_size: int = 1 << 32
    #: `--enable-prompt-tokens-details`, `--enable-request-id-headers`, `--enable-server-load-tracking`.
    prompt_tokens_details: bool = True
    request_id_headers: bool = False
    #: Send `x-inference-pod`, `x-inference-namespace` and `x-inference-port` with every response.
    identity_headers: bool = False
    namespace: str = "default"
    #: Publish what the KV cache stores and forgets (`--kv-events-config`); `None` = do not publish. Ports that are not
    #: free ones (`*`) are those of the first replica, see `kv_events_of`.
    kv_events: "KvEventsConfig | None" = None

    #: The key that clients must send for paths that begin with `/v1` (`--api-key`); empty = none.
    api_key: str = ""
    seed: int = 0
    max_head: int = MAX_HEAD
    max_body: int = MAX_BODY
    #: Close a connection that sends an incomplete request for this long; 0 = never.
    request_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        # Written so that NaN is refused too.
        if not 0 < self.time_ratio <= MAX_TIME_RATIO:
            raise ValueError(f"time_ratio must be above 0 and at most {MAX_TIME_RATIO:,}, got {self.time_ratio:g}")
        if self.engine_type not in ENGINES:
            raise ValueError(f"no metrics page of {self.engine_type!r}; known: {', '.join(ENGINES)}")
        if self.stream_interval < 1:
            raise ValueError("stream_interval must be at least 1")
        spec = self.spec()
        if self.loras and not spec.max_loras:
            raise ValueError("adapters need max_loras of at least 1")

    @property
    def served_model(self) -> str:
        return self.model or preset(self.preset).model

    def kv_events_of(self, index: int) -> "KvEventsConfig | None":
        """The KV event configuration of replica `index` (from 0); `None` = it publishes none. Each replica has ports
        `KV_PORTS` above those of the previous one. Free ports (`*`) stay free, and an address to connect to is the same
        for all replicas. Raises `ValueError` for ports beyond 65535."""
        config = self.kv_events
        if config is None:
            return None
        more = KV_PORTS * index
        events = config.events if config.connect else _shifted(config.events, more)
        return msgspec.structs.replace(config, events=events, replay=_shifted(config.replay, more))

    def spec(self) -> EngineSpec:
        if self.engine is not None:
            return self.engine
        return preset(self.preset).spec(
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_batched_tokens=self.max_batched_tokens,
            max_model_len=self.max_model_len,
            max_loras=self.max_loras or (1 if self.loras else 0),
            kv_tokens=self.kv_tokens,
        )


def _shifted(address: str, ports: int) -> str:
    head, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        return address
    if int(port) + ports > 65535:
        raise ValueError(f"KV events need ports above 65535, {ports} after {address}")
    return f"{head}:{int(port) + ports}"
