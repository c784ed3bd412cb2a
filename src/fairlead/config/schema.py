"""What a configuration consists of. Every field of a section is a field of the file, in camelCase.

The scheduling part of the file (`policy`, `filters`, `scorers`, `selection`) becomes a `PolicySpec`, see `policies`;
`endpoints` becomes `EndpointSource`, see `endpoints`. All other sections are read as they stand here.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from fairlead.config.choosers import CHOOSERS, Canary, SchedulerSettings, Shadows
from fairlead.config.kube import Kubernetes
from fairlead.config.kv_events import KvEvents
from fairlead.config.queueing import LONGEST_WAIT as LONGEST_WAIT
from fairlead.config.queueing import BandSettings as BandSettings
from fairlead.config.queueing import FlowSettings as FlowSettings
from fairlead.config.queueing import QueueLimit as QueueLimit
from fairlead.config.queueing import QueueLimits as QueueLimits
from fairlead.config.section import Section as Section
from fairlead.config.tokens import Tokens
from fairlead.config.tracing import Tracing
from fairlead.config.units import SIZE, Bytes, PositiveSeconds
from fairlead.wire.endpoint_entry import Listed
from fairlead.wire.problem import Problem

Port = Annotated[int, Meta(ge=0, le=65535)]
Share = Annotated[float, Meta(ge=0, le=1)]
Name = Annotated[str, Meta(min_length=1)]


class Gateway(Section, frozen=True, kw_only=True):
    """The embedded Envoy. `none`: a gateway of your own speaks to `extProc`."""

    mode: Literal["embedded", "none"] = "embedded"
    #: Where clients connect.
    host: Name = "127.0.0.1"
    port: Port = 8080
    #: Envoy's admin page, on 127.0.0.1; 0 = off.
    admin_port: Port = 0
    #: What Envoy shows of responses: the body until the first chunk was seen, or nothing (TTFT comes with the log).
    response_mode: Literal["streamed", "none"] = "streamed"
    #: Larger request bodies are answered 413.
    body_limit: Bytes = 64 << 20
    #: Envoy's worker threads; 0 = one per CPU.
    concurrency: Annotated[int, Meta(ge=0, le=1024)] = 0


class Tls(Section, frozen=True, kw_only=True):
    #: Directory with `tls.crt` and `tls.key`.
    cert_dir: Name


class ExtProc(Section, frozen=True, kw_only=True):
    """The endpoint picker's gRPC port."""

    #: Empty = 127.0.0.1 with the embedded gateway, else 0.0.0.0.
    host: str = ""
    port: Port = 9002
    transport: Literal["http2", "grpc-aio"] = "http2"
    #: gRPC health service on a port of its own; 0 = none.
    health_port: Port = 0
    tls: Tls | None = None


class Als(Section, frozen=True, kw_only=True):
    """Envoy's gRPC access log service: how ends of requests come back."""

    enabled: bool = True
    #: 0 = the port of `extProc`.
    port: Port = 0


class EndpointSource(Section, frozen=True, kw_only=True):
    """Either a list in the configuration itself, or a file."""

    static: tuple[Listed, ...] = ()
    #: Absolute, or as given when the configuration did not come from a file.
    file: str = ""
    #: Read the file again when it changes.
    watch: bool = True


class ScrapeTls(Section, frozen=True, kw_only=True):
    #: PEM bundle; empty = the system's.
    ca_file: str = ""
    #: False accepts any certificate.
    verify: bool = True


class EngineNames(Section, frozen=True, kw_only=True):
    """Metric names of one engine; what is absent keeps the built-in names. See `fairlead.wire.engine_metrics`."""

    waiting: str | list[str] | None = None
    running: str | list[str] | None = None
    kv_usage: str | list[str] | None = None
    lora: str | list[str] | None = None
    cache_info: str | list[str] | None = None
    block_size_label: str | None = None
    num_blocks_label: str | None = None
    block_size: str | list[str] | None = None
    num_blocks: str | list[str] | None = None
    prefix_queries: str | list[str] | None = None
    prefix_hits: str | list[str] | None = None
    extra: dict[str, str] = field(default_factory=dict)


class Metrics(Section, frozen=True, kw_only=True):
    """How model servers are scraped."""

    #: For endpoints with work, and for all others.
    interval: PositiveSeconds = 0.2
    idle_interval: PositiveSeconds = 0.2
    timeout: PositiveSeconds = 1.0
    #: Older readings no longer count; the own ledger does then.
    staleness: PositiveSeconds = 2.0
    #: Failures double an endpoint's interval up to this.
    backoff_cap: PositiveSeconds = 2.0
    #: Scrapes per second over all endpoints; above it all intervals are stretched.
    max_rate: Annotated[float, Meta(gt=0)] = 1000.0
    max_page_bytes: Bytes = 4 << 20
    #: Bearer token, read again when the file changes.
    token_file: str = ""
    tls: ScrapeTls = ScrapeTls()
    #: For endpoints without the label `llm-d.ai/engine-type`.
    default_engine: Name = "vllm"
    engines: dict[str, EngineNames] = field(default_factory=dict)


class Admin(Section, frozen=True, kw_only=True):
    """Metrics, health and debug pages over HTTP."""

    host: Name = "127.0.0.1"
    port: Port = 9090
    #: The pages that show endpoints and decisions.
    debug: bool = True


class LedgerSettings(Section, frozen=True, kw_only=True):
    #: A request whose end nobody reports stops counting after this.
    lease_ttl: PositiveSeconds = 900.0


class Parsing(Section, frozen=True, kw_only=True):
    #: Larger request bodies are refused.
    max_body_bytes: Bytes = 64 << 20
    #: Recognise a conversation by its prompts when the client names neither session nor user.
    conversations: bool = True


class Models(Section, frozen=True, kw_only=True):
    """What model names mean: manifests of InferenceModel, InferenceObjective and InferenceModelRewrite."""

    #: A file, or a directory of files; empty = nothing is defined. Relative to the configuration.
    file: str = ""
    #: Read it again when it changes.
    watch: bool = True
    #: Only objects for this pool, or of this namespace, count; empty = all.
    pool: str = ""
    namespace: str = ""
    #: Requests for a name that nobody defined, once an InferenceModel is defined.
    unmatched: Literal["reject", "pass"] = "reject"
    #: `session`: requests of one session keep their target of a split.
    sticky: Literal["none", "session"] = "none"


Trust = Literal["objective", "fairness", "slo", "session", "model-rewrite", "test-selection"]


class Headers(Section, frozen=True, kw_only=True):
    #: Which of a client's headers are listened to; see `fairlead.route.headers.TRUST`.
    trust: tuple[Trust, ...] = ("objective", "fairness", "slo", "session", "model-rewrite")


class Inspect(Section, frozen=True, kw_only=True):
    #: Share of responses that are followed to their end to read the token counts.
    usage_sampling: Share = 0.01


class Log(Section, frozen=True, kw_only=True):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["logfmt", "json"] = "logfmt"


class JournalSettings(Section, frozen=True, kw_only=True):
    """Decisions and events on disk, see docs/journal.md."""

    #: Directory; empty = off.
    path: str = ""
    #: Of all files in it together, and of one.
    max_bytes: Annotated[int, Meta(ge=1 << 20, extra={"unit": "size"}, extra_json_schema=SIZE)] = 1 << 30
    segment_bytes: Annotated[int, Meta(ge=256 << 10, extra={"unit": "size"}, extra_json_schema=SIZE)] = 64 << 20
    #: At `maxBytes` the oldest segment goes, or writing ends: then what there is can be replayed from its beginning.
    when_full: Literal["drop-oldest", "stop"] = "drop-oldest"
    #: Share of the decisions whose scores and numbers are written. Events and outcomes always are.
    sample: Share = 1.0
    #: Written at least this often, and when the disk must have it: never said, once a second, or with every write.
    flush: PositiveSeconds = 0.25
    fsync: Literal["never", "second", "always"] = "never"
    #: Keep with the decisions in memory the numbers they were made from, also without `path`.
    explain: bool = False
    #: Response header with the decision's id, added by the embedded gateway; empty = none.
    header: Annotated[str, Meta(pattern="^(x-[A-Za-z0-9-]{1,62})?$")] = ""


class PluginSpec(Struct, frozen=True, kw_only=True):
    """One configured plugin. `type` is the canonical name, `parameters` an instance of the plugin's own `Params`."""

    kind: Literal[
        "filter",
        "scorer",
        "picker",
        "policy",
        "metric-source",
        "parser",
        "fairness",
        "ordering",
        "saturation",
        "ceiling",
    ]
    type: str
    name: str
    parameters: Any
    #: Scorers only.
    weight: float = 0.0
    #: Where it stands in the file, e.g. `$.scorers[0]`.
    path: str = "$"
    #: The lines of `type`, `weight` and those parameters that the file gives.
    lines: dict[str, int] = field(default_factory=dict)
    #: The type in the file, where that is another picker's.
    stands_for: str = ""


class PolicySpec(Struct, frozen=True, kw_only=True):
    """A profile (filters, with the built-in ability filters first; scorers; a picker), or a policy plugin."""

    name: str
    filters: tuple[PluginSpec, ...] = ()
    scorers: tuple[PluginSpec, ...] = ()
    #: `None` exactly where there is a `plugin`.
    picker: PluginSpec | None = None
    #: A policy of its own. It gets the filters if it wants them.
    plugin: PluginSpec | None = None

    def plugins(self) -> tuple[PluginSpec, ...]:
        """All of them."""
        return (*self.filters, *self.scorers, *(one for one in (self.picker, self.plugin) if one is not None))


class BandSpec(Struct, frozen=True, kw_only=True):
    """An entry of `flowControl.bands`. A plugin that is `None` is that of all bands."""

    settings: BandSettings
    fairness: PluginSpec | None = None
    ordering: PluginSpec | None = None


class FlowSpec(Struct, frozen=True, kw_only=True):
    """The mapping `flowControl`. A plugin that is `None` has its default."""

    settings: FlowSettings = FlowSettings()
    fairness: PluginSpec | None = None
    ordering: PluginSpec | None = None
    saturation: PluginSpec | None = None
    ceiling: PluginSpec | None = None
    bands: tuple[BandSpec, ...] = ()

    def plugins(self) -> tuple[PluginSpec, ...]:
        """Those that are named, but for single bands."""
        named = self.fairness, self.ordering, self.saturation, self.ceiling
        return tuple(one for one in named if one is not None)


class Config(Struct, frozen=True, kw_only=True):
    """A whole, valid configuration: defaults filled in, quantities in seconds and bytes."""

    policy: PolicySpec
    metric_sources: tuple[PluginSpec, ...] = ()
    parsers: tuple[PluginSpec, ...] = ()
    #: `None` = the mapping is absent: requests are never queued.
    flow_control: FlowSpec | None = None
    gateway: Gateway
    ext_proc: ExtProc
    als: Als
    endpoints: EndpointSource
    metrics: Metrics
    admin: Admin
    ledger: LedgerSettings
    parsing: Parsing
    inspect: Inspect
    models: Models
    kubernetes: Kubernetes = Kubernetes()
    scheduler: SchedulerSettings = SchedulerSettings()
    canary: Canary = Canary()
    shadows: Shadows = Shadows()
    headers: Headers
    log: Log
    journal: JournalSettings = JournalSettings()
    tokens: Tokens = Tokens()
    kv_events: KvEvents = KvEvents()
    tracing: Tracing = Tracing()
    #: Of the random generator; `None` = another one at each start.
    seed: int | None = None
    #: File it came from; empty = text.
    source: str = ""
    #: Values that the command line gave, in the shape of the file.
    flags: dict[str, Any] = {}
    #: What was accepted and has no effect.
    notes: tuple[Problem, ...] = ()


#: Sections that are read as they stand, by their name in the file.
SECTIONS: dict[str, type[Section]] = {
    "gateway": Gateway,
    "extProc": ExtProc,
    "als": Als,
    "metrics": Metrics,
    "admin": Admin,
    "ledger": LedgerSettings,
    "parsing": Parsing,
    "inspect": Inspect,
    "models": Models,
    "kubernetes": Kubernetes,
    **CHOOSERS,
    "headers": Headers,
    "log": Log,
    "journal": JournalSettings,
    "tokens": Tokens,
    "kvEvents": KvEvents,
    "tracing": Tracing,
}
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
