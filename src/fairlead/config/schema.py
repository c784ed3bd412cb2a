"""What a configuration consists of. Every field of a section is a field of the file, in camelCase.

The models are the one definition: what is accepted, the defaults, the JSON Schema and the reference page all come from
them. `check` holds what must fit together across fields. The scheduling part of the file (`policy`, `filters`,
`scorers`, `selection`) becomes a `PolicySpec`, `endpoints` an `EndpointSource`.
"""

from typing import Annotated, Any, Literal, Self, cast

from msgspec import Struct, field
from pydantic import ConfigDict, Field, model_validator

from fairlead.config.builtins import DEFAULT_POLICY, Kind
from fairlead.config.endpoint_list import Listed
from fairlead.config.problems import Problem
from fairlead.core.endpoint import MAX_PORTS
from fairlead.plugins.params import DURATION, SIZE, Bytes, Params, PositiveSeconds, Seconds, camel

Port = Annotated[int, Field(ge=0, le=65535)]
Share = Annotated[float, Field(ge=0, le=1)]
Percent = Annotated[float, Field(ge=0, le=100)]
Name = Annotated[str, Field(min_length=1)]
KubeName = Annotated[str, Field(max_length=253)]
#: Requests, in a limit.
Count = Annotated[int, Field(ge=1)]
#: The embedded gateway waits for 600 s at most; a gateway that is told more does not wait at all.
LONGEST_WAIT = 590.0
Wait = Annotated[float, Field(gt=0, le=LONGEST_WAIT), DURATION]
#: The name of a policy, or `{type: …, parameters: {…}}`, as under `policy`.
PolicyEntry = str | dict[str, Any]
Trust = Literal["objective", "fairness", "slo", "session", "model-rewrite", "test-selection"]


class Section(Params):
    """A mapping of the file."""


class Relative:
    """Marks a path that is relative to the configuration's directory."""


RELATIVE = Relative()
RelativePath = Annotated[str, RELATIVE]


# ---- gateway and ports ----


class ApiKeys(Section):
    """Clients have to show an API key, which names their tenant."""

    file: Annotated[str, Field(min_length=1), RELATIVE] = Field(
        description="A line for each key, made by `fairlead key`: its SHA-256, a tenant, and if you like when it "
        "expires. Followed while running.",
    )
    forward: bool = Field(default=False, description="Model servers get the key too.")


class JwtSettings(Section):
    """Clients have to show a JSON Web Token, or a key where both are set. A claim of it names their tenant."""

    issuer: Name = Field(description="What the claim `iss` has to be.")
    audiences: tuple[Name, ...] = Field(default=(), description="One of them has to be in `aud`; empty = any.")
    jwks_uri: str = Field(
        default="",
        pattern="^(https://.+|http://(localhost|127\\.[0-9.]+|\\[::1\\])(:[0-9]+)?/.*)?$",
        description="Where the issuer's keys are fetched, again every five minutes; without TLS from this machine "
        "only.",
    )
    jwks_file: RelativePath = Field(default="", description="Or a file with them (JWKS), read at the start.")
    ca_file: RelativePath = Field(default="", description="PEM bundle for `jwksUri`; empty = the system's.")
    tenant_claim: Name = Field(
        default="sub", description="Names the tenant; dots lead into nested claims. A token without it is refused."
    )
    forward: bool = Field(default=False, description="Model servers get the token too.")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if bool(self.jwks_uri) == bool(self.jwks_file):
            raise ValueError("give jwksUri or jwksFile, one of them")
        return self


class Gateway(Section):
    """The embedded Envoy. `none`: a gateway of your own speaks to `extProc`."""

    mode: Literal["embedded", "none"] = "embedded"
    host: Name = Field(default="127.0.0.1", description="Where clients connect.")
    port: Port = 8080
    admin_port: Port = Field(default=0, description="Envoy's admin page, on 127.0.0.1; 0 = off.")
    response_mode: Literal["streamed", "none"] = Field(
        default="streamed",
        description="What Envoy shows of responses: the body until the first chunk was seen, or nothing (TTFT comes "
        "with the log).",
    )
    retry: Literal["connect", "unanswered", "hedge"] = Field(
        default="hedge",
        description="When a request is sent to its second choice: if no connection to the first came about; also if "
        "that broke off before the first byte of an answer; also if that byte is overdue (the first one to answer "
        "wins).",
    )
    body_limit: Bytes = Field(default=64 << 20, description="Larger request bodies are answered 413.")
    concurrency: int = Field(default=0, ge=0, le=1024, description="Envoy's worker threads; 0 = one per CPU.")
    paths: tuple[str, ...] = Field(
        default=(),
        description="Let in besides the paths of inference, e.g. `/cohere/v2/chat`; `*` at the end stands for "
        "anything, so `/*` lets everything in. Where models are defined, bodies for such paths are refused all the "
        "same.",
    )
    max_heap: Bytes | None = Field(
        default=None,
        description="Of Envoy: large uploads are ended below it, the largest first, and requests refused close to it. "
        "By default half of what the cgroup or the machine has, at most 4 GiB.",
    )
    max_connections: int = Field(default=20_000, ge=1, description="Client connections at once.")
    envoys: int = Field(
        default=1,
        ge=1,
        le=16,
        description="Envoys behind the one port: what dies takes only its own connections along. They share heap, "
        "connections and threads; the second one's `adminPort` is the next one.",
    )
    wait_for_scheduler: Seconds = Field(
        default=30.0, description="At the start clients are listened to once the scheduler answers, or after this."
    )
    receive_idle: PositiveSeconds = Field(
        default=15.0, description="A request body may pause this long; a tenth of it when memory is short."
    )
    keys: ApiKeys | None = None
    jwt: JwtSettings | None = None

    @property
    def asks(self) -> bool:
        """Clients have to say who they are."""
        return self.keys is not None or self.jwt is not None


class Tls(Section):
    cert_dir: Name = Field(description="Directory with `tls.crt` and `tls.key`.")


class ExtProc(Section):
    """The endpoint picker's gRPC port."""

    host: str = Field(default="", description="Empty = 127.0.0.1 with the embedded gateway, else 0.0.0.0.")
    port: Port = 9002
    transport: Literal["http2", "grpc-aio"] = "http2"
    health_port: Port = Field(default=0, description="gRPC health service on a port of its own; 0 = none.")
    tls: Tls | None = None


class Als(Section):
    """Envoy's gRPC access log service: how ends of requests come back."""

    enabled: bool = True
    port: Port = Field(default=0, description="0 = the port of `extProc`.")


class Admin(Section):
    """Metrics, health and debug pages over HTTP."""

    host: Name = "127.0.0.1"
    port: Port = 9090
    debug: bool = Field(default=True, description="The pages that show endpoints and decisions.")
    metrics_host: str = Field(default="", description="Empty = `host`.")
    metrics_port: Port = Field(
        default=0, description="Metrics and health, and nothing else, on a port of their own as well; 0 = none."
    )
    hosts: list[Name] = Field(
        default_factory=list,
        description="Names under which the port may be asked, beside addresses, `localhost` and the machine's own "
        "name; `.example.com` stands for all that end so.",
    )
    token_file: str = Field(
        default="",
        description="Bearer tokens, a line each, one of which everything but `/healthz` and `/readyz` asks for; "
        "browsers give it as password. Empty = none.",
    )
    tls: Tls | None = None


# ---- the pool ----


class FileSource(Section):
    file: str = Field(min_length=1)
    watch: bool = True
    allow_empty: bool = Field(default=False, description="A list that has become empty takes all endpoints away.")


class ScrapeTls(Section):
    ca_file: str = Field(default="", description="PEM bundle; empty = the system's.")
    verify: bool = Field(default=True, description="False accepts any certificate.")


class EngineNames(Section):
    """Metric names of one engine; what is absent keeps the built-in names. See `fairlead.apis.engine_metrics`."""

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
    generation_tokens: str | list[str] | None = None
    started: str | list[str] | None = None
    extra: dict[str, str] = {}


class Metrics(Section):
    """How model servers are scraped."""

    interval: PositiveSeconds = Field(default=0.2, description="For endpoints with work, and for all others.")
    idle_interval: PositiveSeconds = 0.2
    timeout: PositiveSeconds = 1.0
    staleness: PositiveSeconds = Field(
        default=2.0, description="Older readings no longer count; the own ledger does then."
    )
    backoff_cap: PositiveSeconds = Field(default=2.0, description="Failures double an endpoint's interval up to this.")
    max_rate: float = Field(
        default=1000.0, gt=0, description="Scrapes per second over all endpoints; above it all intervals are stretched."
    )
    max_page_bytes: Bytes = 4 << 20
    models_interval: Seconds = Field(
        default=30.0, description="How often `/v1/models` is read, which says what adapters are loaded; 0 = never."
    )
    token_file: str = Field(default="", description="Bearer token, read again when the file changes.")
    tls: ScrapeTls = Field(default_factory=ScrapeTls.model_construct)
    default_engine: Name = Field(default="vllm", description="For endpoints without the label `llm-d.ai/engine-type`.")
    engines: dict[str, EngineNames] = {}


class LeaderElection(Section):
    """One of several replicas answers, the others stand by."""

    enabled: bool = False
    lease_name: KubeName = Field(default="", description="Empty = `epp-NAMESPACE-POOL.fairlead`.")
    lease_duration: PositiveSeconds = Field(default=10.0, description="A replica that dies is replaced after this.")
    renew_deadline: PositiveSeconds = Field(
        default=7.0, description="A leader whose renewals are refused for so long stops leading."
    )
    retry_period: PositiveSeconds = 2.0
    overlap: Seconds = Field(
        default=5.0,
        description="A leader that ends answers beside its successor for so long: gateways must find that one before "
        "they lose it.",
    )
    service: KubeName = Field(
        default="",
        description="A Service without a selector that leads to the leader; needs $POD_IP. Empty = gateways go by "
        "readiness.",
    )


class Kubernetes(Section):
    """Endpoints and model names from an API server. Off without `pool` and `selector`."""

    pool: KubeName = Field(default="", description="Name of the InferencePool.")
    namespace: KubeName = Field(
        default="",
        description="Empty = $NAMESPACE, else that of the service account or of the kubeconfig's context, else "
        "`default`.",
    )
    group: Literal["inference.networking.k8s.io", "inference.networking.x-k8s.io"] = "inference.networking.k8s.io"
    selector: dict[str, str] = Field(
        default={}, description="Without an InferencePool object: labels of the pods, and their ports."
    )
    target_ports: tuple[Annotated[int, Field(ge=1, le=65535)], ...] = Field(
        default=(), json_schema_extra={"maxItems": MAX_PORTS}
    )
    models: bool = Field(
        default=True, description="Follow InferenceModels, InferenceObjectives and InferenceModelRewrites too."
    )
    status: bool = Field(default=True, description="Write conditions to their status.")
    kubeconfig: str = Field(
        default="", description="Empty = the service account in a pod, else $KUBECONFIG, else ~/.kube/config."
    )
    context: str = ""
    leader_election: LeaderElection = Field(default_factory=LeaderElection.model_construct)

    @property
    def on(self) -> bool:
        return bool(self.pool or self.selector)


class KvCurve(Section):
    """CurveZMQ. Keys are Z85 text of 40 characters."""

    public_key_file: RelativePath = Field(description="Files with our own keys.")
    secret_key_file: RelativePath
    server_key: str = Field(default="", description="The publishers' public key, where we connect to them.")
    clients_file: RelativePath = Field(
        default="", description="Public keys of publishers that may dial in, one a line."
    )


class KvIndexer(Section):
    """An index that another process keeps (`fairlead indexer`)."""

    url: str = Field(
        default="",
        description="Ask it instead of listening here, e.g. `http://kv-cache-indexer:9090`; empty = the index is in "
        "this process.",
    )
    budget: PositiveSeconds = Field(
        default=0.005, description="How long a request waits for its answer; then learned prefixes count."
    )
    warm_from: str = Field(
        default="",
        description="Begin with the index of another one, e.g. `http://other:9090`; empty = with that of `snapshot`, "
        "if any.",
    )


class KvEvents(Section):
    """Off unless `enabled`: prefixes are then known from own decisions only."""

    enabled: bool = False
    port: Port = Field(
        default=0,
        description="Of rank 0 at every endpoint; 0 = each engine is asked (`GET /kv_event_sources`). Rank n has "
        "ports n higher.",
    )
    replay_port: Port = Field(default=0, description="Beside `port`: where missed events can be fetched; 0 = nowhere.")
    ranks: int = Field(default=1, ge=1, le=256)
    bind: str = Field(
        default="",
        description="Let publishers dial in here instead, e.g. `tcp://0.0.0.0:5555`. Those of the pool's endpoints "
        "are believed.",
    )
    curve: KvCurve | None = None
    snapshot: RelativePath = Field(default="", description="File that keeps the index over restarts; empty = none.")
    snapshot_interval: PositiveSeconds = 60.0
    max_blocks: int = Field(
        default=4_000_000,
        ge=10_000,
        le=200_000_000,
        description="Copies of blocks that are remembered, at about 50 bytes each.",
    )
    keys: Literal["own", "engine"] = Field(
        default="own",
        description="`own`: by token ids, nothing need be known of the engine's hashes. `engine`: by the engine's own.",
    )
    hash_algorithm: Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"] = Field(
        default="sha256",
        description="Of the engine, with `keys: engine`: its hash algorithm and PYTHONHASHSEED (`null` = not set).",
    )
    hash_seed: str | None = None
    block_size: int = Field(default=0, ge=0, le=4096, description="Tokens per block; 0 = as the events say.")
    check: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="Share of answers whose cached tokens are compared with the prediction, once an endpoint has "
        "proved itself.",
    )
    indexer: KvIndexer = Field(default_factory=KvIndexer.model_construct)


class ModelTokens(Section):
    """Of one model name."""

    model_path: RelativePath = Field(
        default="", description="Directory with `tokenizer.json` and what belongs to it, as the engine loads it."
    )
    tokenizer_file: RelativePath = Field(default="", description="A `tokenizer.json`, instead of the directory's.")
    chat_template: RelativePath = Field(
        default="",
        description="A Jinja template, instead of the model's own: what the engine was started with as `--chat-"
        "template`.",
    )
    template_kwargs: dict[str, Any] = Field(
        default={},
        description="Variables for every rendering: what the engine was started with as `--default-chat-template-"
        "kwargs`.",
    )
    render: Literal["local", "engine"] = Field(
        default="local", description="`local`: in this process. `engine`: an endpoint is asked for the ids."
    )


class Tokens(Section):
    """Off without `models`: prompts are then matched by their bytes."""

    models: dict[str, ModelTokens] = Field(default={}, description="By model name; `*` = every other one.")
    cache_bytes: Bytes = Field(
        default=256 << 20, description="For pieces of prompts that were encoded before, over all models."
    )
    engine_timeout: PositiveSeconds = Field(
        default=0.2, description="With `render: engine`: a request goes on without ids after this."
    )


# ---- requests ----


class LedgerSettings(Section):
    lease_ttl: PositiveSeconds = Field(
        default=900.0, description="A request whose end nobody reports stops counting after this."
    )


class Parsing(Section):
    max_body_bytes: Bytes = Field(default=64 << 20, description="Larger request bodies are refused.")
    max_buffered_bytes: Bytes = Field(
        default=0,
        description="Of all requests that are not whole yet, or that wait and whose bodies are kept, together; 0 = an "
        "eighth of the memory that the cgroup or the machine has, at most 128 MiB. More waits without flow-control "
        "credit.",
    )
    conversations: bool = Field(
        default=True,
        description="Recognise a conversation by its prompts when the client names neither session nor user.",
    )


class Models(Section):
    """What model names mean: manifests of InferenceModel, InferenceObjective and InferenceModelRewrite."""

    file: RelativePath = Field(
        default="",
        description="A file, or a directory of files; empty = nothing is defined. Relative to the configuration.",
    )
    watch: bool = Field(default=True, description="Read it again when it changes.")
    pool: str = Field(default="", description="Only objects for this pool, or of this namespace, count; empty = all.")
    namespace: str = ""
    unmatched: Literal["reject", "pass"] = Field(
        default="reject", description="Requests for a name that nobody defined, once an InferenceModel is defined."
    )
    sticky: Literal["none", "session"] = Field(
        default="none", description="`session`: requests of one session keep their target of a split."
    )


class Headers(Section):
    trust: tuple[Trust, ...] = Field(
        default=("objective", "fairness", "slo", "session", "model-rewrite"),
        description="Which of a client's headers are listened to; see `fairlead.core.headers.TRUST`.",
    )


class Inspect(Section):
    usage_sampling: Share = Field(
        default=0.01, description="Share of responses that are followed to their end to read the token counts."
    )


class QueueLimit(Section):
    """What may wait at most; `None` = any number."""

    requests: Count | None = None
    bytes: Bytes | None = None


class QueueLimits(Section):
    total: QueueLimit = Field(default_factory=QueueLimit.model_construct)
    band: QueueLimit = Field(
        default_factory=lambda: QueueLimit.model_construct(requests=5000, bytes=1_000_000_000),
        description="Of one priority.",
    )
    flow: QueueLimit = Field(
        default_factory=QueueLimit.model_construct, description="Of one model and one tenant in a band."
    )


class BandSettings(Section):
    """Of one entry of `flowControl.bands`, what is no plugin. What is `None` is as for all bands."""

    priority: int
    ttl: Wait | None = None
    limits: QueueLimit | None = None
    share: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of the work that the band gets at least while it waits; 0 = what higher ones leave.",
    )


class FlowRules(Section):
    """An entry of `flowControl.flows`: of which flows it speaks, and what it says. The first that fits counts."""

    model: str | None = Field(default=None, description="`None` = any.")
    fairness_id: str | None = None
    ttl: Wait | None = None
    limits: QueueLimit | None = None
    weight: float = Field(
        default=1.0, ge=1, le=1000, description="Its part of the band's work is this over the sum of those that wait."
    )


class Shedding(Section):
    """Requests below priority 0 are refused with probability min(saturation^power · scale, 1)."""

    power: float = Field(default=5.0, gt=0, le=100)
    scale: float = Field(default=300.0, gt=0, le=1e9)


class Evicting(Section):
    """Requests below priority 0 that run make way for higher ones."""

    after: PositiveSeconds = Field(default=0.25, description="Which have waited for so long.")


class FlowSettings(Section):
    """Of `flowControl`, what is neither a plugin nor a band."""

    enabled: bool = True
    ttl: Wait = Field(
        default=60.0,
        description="How long a request may wait, unless it says otherwise itself; the latter while the pool is empty.",
    )
    no_endpoint_ttl: Annotated[float, Field(ge=0, le=LONGEST_WAIT), DURATION] = Field(
        default=60.0, description="0 = a request that finds no endpoint is refused."
    )
    window: int = Field(
        default=256,
        ge=1,
        le=1024,
        description="Requests of the flow in turn among which the pair (request, endpoint) is chosen.",
    )
    limits: QueueLimits = Field(default_factory=QueueLimits.model_construct)
    target_delay: PositiveSeconds = Field(
        default=1.0, description="Waiting for longer than this means that more replicas are wanted."
    )
    flows: tuple[FlowRules, ...] = ()
    early_shedding: Shedding | None = Field(default=None, description="`None` = off.")
    eviction: Evicting | None = None


# ---- who decides beside the policy: another process, for some requests, on trial ----


class SchedulerTls(Section):
    """TLS to a scheduler. PEM files; empty = the system's authorities, no certificate of our own."""

    ca_file: str = ""
    verify: bool = Field(default=True, description="False accepts any certificate.")
    server_name: str = Field(default="", description="Name in its certificate; empty = the host of `address`.")
    cert_dir: str = Field(default="", description="Directory with `tls.crt` and `tls.key` that we show.")


class BreakerSettings(Section):
    failures: int = Field(
        default=5,
        ge=1,
        le=10_000,
        description="Late or unusable answers in a row after which the scheduler is left alone.",
    )
    cooldown: PositiveSeconds = 1.0


class SchedulerSettings(Section):
    """A scheduler in another process; docs/replacement-scheduler.md."""

    address: str = Field(default="", description="`host:port` or `unix:/path`; empty = none.")
    budget: PositiveSeconds = Field(
        default=0.005, description="How long a request waits for its answer; then the built-in policy decides."
    )
    tls: SchedulerTls | None = None
    breaker: BreakerSettings = Field(default_factory=BreakerSettings.model_construct)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        address = self.address
        if not address:
            return self
        host, _, port = address.rpartition(":")
        plain = bool(host) and port.isdecimal() and 0 < int(port) < 65_536
        if not (plain or (address.startswith("unix:") and len(address) > len("unix:"))):
            raise ValueError("field 'address' is neither host:port nor unix:/path")
        if self.budget > 10.0:
            raise ValueError("field 'budget' is above 10s: requests wait that long when the scheduler hangs")
        return self


class Canary(Section):
    """Another policy, or a scheduler, decides a share of the requests; those of one session go one way."""

    policy: PolicyEntry = ""
    scheduler: SchedulerSettings | None = None
    percent: Percent = 0.0

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _one_of(self.policy, self.scheduler, self.percent > 0)
        return self


class Shadow(Section):
    """Decides the same requests, and nothing comes of it but figures."""

    name: str = Field(default="", max_length=100, description="In metrics and records; empty = that of the policy.")
    policy: PolicyEntry = ""
    scheduler: SchedulerSettings | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _one_of(self.policy, self.scheduler, True)
        if not self.name and self.scheduler is not None:
            raise ValueError("a shadow with a scheduler needs a name")
        return self

    @property
    def label(self) -> str:
        if self.name:
            return self.name
        return self.policy if isinstance(self.policy, str) else str(self.policy.get("type", ""))


class Shadows(Section):
    sample: float = Field(default=1.0, ge=0, le=1, description="Share of the decisions that shadows see.")
    cpu: float = Field(
        default=0.2,
        gt=0,
        le=1,
        description="Share of one CPU that all of them may use; decisions beyond it are left out.",
    )
    limit: PositiveSeconds = Field(default=0.1, description="A shadow that takes longer for one decision is cut off.")
    policies: tuple[Shadow, ...] = ()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        labels = [policy.label for policy in self.policies]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"two shadows are named '{twice[0]}': give one another name")
        return self


def _one_of(policy: PolicyEntry, scheduler: SchedulerSettings | None, needed: bool) -> None:
    if policy and scheduler is not None:
        raise ValueError("give policy or scheduler, not both")
    if scheduler is not None and not scheduler.address:
        raise ValueError("field 'scheduler.address' is missing")
    if needed and not policy and scheduler is None:
        raise ValueError("give policy: or scheduler:")


# ---- records ----


class Log(Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["logfmt", "json"] = "logfmt"


class JournalSettings(Section):
    """Decisions and events on disk, see docs/journal.md."""

    path: str = Field(default="", description="Directory; empty = off.")
    max_bytes: Annotated[int, Field(ge=1 << 20), SIZE] = Field(
        default=1 << 30, description="Of all files in it together, and of one."
    )
    segment_bytes: Annotated[int, Field(ge=256 << 10), SIZE] = 64 << 20
    when_full: Literal["drop-oldest", "stop"] = Field(
        default="drop-oldest",
        description="At `maxBytes` the oldest segment goes, or writing ends: then what there is can be replayed from "
        "its beginning.",
    )
    sample: Share = Field(
        default=1.0,
        description="Share of the decisions whose scores and numbers are written. Events and outcomes always are.",
    )
    flush: PositiveSeconds = Field(
        default=0.25,
        description="Written at least this often, and when the disk must have it: never said, once a second, or with "
        "every write.",
    )
    fsync: Literal["never", "second", "always"] = "never"
    explain: bool = Field(
        default=False,
        description="Keep with the decisions in memory the numbers they were made from, also without `path`.",
    )
    header: str = Field(
        default="",
        pattern="^(x-[A-Za-z0-9-]{1,62})?$",
        description="Response header with the decision's id, added by the embedded gateway; empty = none.",
    )


class StateSettings(Section):
    """What was learned, on disk, so that a restarted scheduler goes on with it: see docs/operations.md."""

    enabled: bool = True
    file: str = Field(default="", description="Empty = `learned.state` in `journal.path`; off where that is empty too.")
    interval: PositiveSeconds = Field(
        default=10.0, description="How often it is written; a process that is killed loses as much."
    )
    max_age: PositiveSeconds = Field(
        default=3600.0, description="What endpoints have in their caches is not believed when it is older."
    )
    max_bytes: Annotated[int, Field(ge=64 << 10), SIZE] = Field(
        default=64 << 20, description="Of the file. The blocks of prompts used last are kept."
    )

    def path(self, journal: JournalSettings) -> str:
        """Of the file; empty = none is kept."""
        beside = f"{journal.path}/learned.state" if journal.path else ""
        return (self.file or beside) if self.enabled else ""


class Tracing(Section):
    """Off without `endpoint`: then nothing of OpenTelemetry is loaded or called."""

    endpoint: str = Field(
        default="",
        pattern="^(https?://.+)?$",
        description="Where OTLP over HTTP is taken, e.g. `http://localhost:4318/v1/traces`.",
    )
    sample: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Share of the requests that are traced, of those that no caller has decided about.",
    )
    follow_parent: bool = Field(
        default=True,
        description="A caller's `traceparent` decides whether its request is traced. `false`: `sample` does, and the "
        "trace goes on.",
    )
    max_rate: float = Field(default=100.0, gt=0, description="Traced requests per second, whatever callers ask for.")
    service_name: str = Field(default="fairlead", min_length=1)
    timeout: PositiveSeconds = Field(
        default=5.0, description="For sending a batch of spans; what could not be sent by then is dropped."
    )


# ---- what is made of a file ----


class EndpointSource(Struct, frozen=True, kw_only=True):
    """Either a list in the configuration itself, or a file."""

    static: tuple[Listed, ...] = ()
    #: Absolute, or as given when the configuration did not come from a file.
    file: str = ""
    #: Read the file again when it changes.
    watch: bool = True
    #: Believe a file that has become empty.
    allow_empty: bool = False


class PluginSpec(Struct, frozen=True, kw_only=True):
    """One configured plugin. `type` is the canonical name, `parameters` an instance of the plugin's own `Params`."""

    kind: Kind
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
        return (*self.filters, *self.scorers, *(spec for spec in (self.picker, self.plugin) if spec is not None))


class BandSpec(Struct, frozen=True, kw_only=True):
    """An entry of `flowControl.bands`. A plugin that is `None` is that of all bands."""

    settings: BandSettings
    fairness: PluginSpec | None = None
    ordering: PluginSpec | None = None


class FlowSpec(Struct, frozen=True, kw_only=True):
    """The mapping `flowControl`. A plugin that is `None` has its default."""

    settings: FlowSettings = field(default_factory=FlowSettings)
    fairness: PluginSpec | None = None
    ordering: PluginSpec | None = None
    saturation: PluginSpec | None = None
    ceiling: PluginSpec | None = None
    bands: tuple[BandSpec, ...] = ()
    #: The file says nothing of it.
    implied: bool = False

    def plugins(self) -> tuple[PluginSpec, ...]:
        """Those that are named, but for single bands."""
        named = self.fairness, self.ordering, self.saturation, self.ceiling
        return tuple(spec for spec in named if spec is not None)


def implied_flow_control(policy: PolicySpec | None, given: "Settings") -> FlowSpec | None:
    """Flow control where the file says nothing of it: with the default policy, unless the gateway is not ours and may
    be impatient, or another process decides too. It has no limits, so that nothing is refused that was not before."""
    plugin = policy.plugin if policy else None
    elsewhere = given.scheduler.address or given.canary.percent
    if given.gateway.mode != "embedded" or elsewhere or plugin is None or plugin.type != DEFAULT_POLICY:
        return None
    settings = FlowSettings(ttl=LONGEST_WAIT, no_endpoint_ttl=0.0, limits=QueueLimits(band=QueueLimit()))
    return FlowSpec(settings=settings, implied=True)


class Settings(Section):
    """What is read as it stands in the file: the sections, and `seed`."""

    gateway: Gateway = Field(default_factory=Gateway)
    ext_proc: ExtProc = Field(default_factory=ExtProc)
    als: Als = Field(default_factory=Als)
    metrics: Metrics = Field(default_factory=Metrics)
    admin: Admin = Field(default_factory=Admin)
    ledger: LedgerSettings = Field(default_factory=LedgerSettings)
    parsing: Parsing = Field(default_factory=Parsing)
    inspect: Inspect = Field(default_factory=Inspect)
    models: Models = Field(default_factory=Models)
    kubernetes: Kubernetes = Field(default_factory=Kubernetes)
    scheduler: SchedulerSettings = Field(default_factory=SchedulerSettings)
    canary: Canary = Field(default_factory=Canary)
    shadows: Shadows = Field(default_factory=Shadows)
    headers: Headers = Field(default_factory=Headers)
    log: Log = Field(default_factory=Log)
    journal: JournalSettings = Field(default_factory=JournalSettings)
    state: StateSettings = Field(default_factory=StateSettings)
    tokens: Tokens = Field(default_factory=Tokens)
    kv_events: KvEvents = Field(default_factory=KvEvents)
    tracing: Tracing = Field(default_factory=Tracing)
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = Field(
        default=None, description="Of the random generator; `None` = another one at each start."
    )

    @property
    def trusted(self) -> tuple[Trust, ...]:
        """The headers that are listened to: a gateway that knows the tenant writes its name itself."""
        return (*self.headers.trust, "fairness") if self.gateway.asks else self.headers.trust


class Config(Settings):
    """A whole, valid configuration: defaults filled in, quantities in seconds and bytes."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    policy: PolicySpec
    metric_sources: tuple[PluginSpec, ...] = ()
    parsers: tuple[PluginSpec, ...] = ()
    flow_control: FlowSpec | None = Field(default=None, description="`None` = requests never wait.")
    endpoints: EndpointSource = Field(default_factory=EndpointSource)
    source: str = Field(default="", description="File it came from; empty = text.")
    flags: dict[str, Any] = Field(
        default={}, description="Values that the command line gave, in the shape of the file."
    )
    notes: tuple[Problem, ...] = Field(default=(), description="What was accepted and has no effect.")


#: Sections that are read as they stand, by their name in the file.
SECTIONS: dict[str, type[Section]] = {
    camel(name): cast(type[Section], one.annotation) for name, one in Settings.model_fields.items() if name != "seed"
}
