"""The structure of a configuration. Every field of a section is a field of the file, in camelCase.

The models are the single definition: the accepted values, the defaults, the JSON Schema and the reference page all come
from them. `checks` has the checks across fields. The scheduling part of the file (`policy`, `filters`, `scorers`,
`selection`) becomes a `PolicySpec`, `endpoints` an `EndpointSource`.
"""

from typing import Annotated, Any, Literal, Self, cast

from msgspec import Struct, field
from pydantic import ConfigDict, Field, field_validator, model_validator

from fairlead.config.builtins import BUILTINS, DEFAULT_POLICY, SPLITTING, Kind
from fairlead.config.endpoint_list import Listed
from fairlead.config.problems import Problem
from fairlead.config.registry import RegisteredPlugin
from fairlead.core.endpoint import MAX_PORTS
from fairlead.plugins.params import DURATION, SIZE, Bytes, Params, PositiveSeconds, Seconds, camel

Port = Annotated[int, Field(ge=0, le=65535)]
Share = Annotated[float, Field(ge=0, le=1)]
Percent = Annotated[float, Field(ge=0, le=100)]
Name = Annotated[str, Field(min_length=1)]
#: A serialized origin (RFC 6454, 6.2), as browsers send it; `*` = all.
Origin = Annotated[str, Field(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+)$")]
#: RFC 3986, `path`, without what Envoy would change before matching; `*` at the end stands for anything.
UrlPath = Annotated[str, Field(pattern=r"^/(?:[A-Za-z0-9._~!$&'()+,;=:@{}-]+/?)*\*?$")]
KubeName = Annotated[str, Field(max_length=253)]
#: A limit in requests.
Count = Annotated[int, Field(ge=1)]
#: The longest wait in flow control, in seconds. The embedded gateway waits 600 s at most for an answer. With a larger
#: limit it would not wait at all.
LONGEST_WAIT = 590.0
Wait = Annotated[float, Field(gt=0, le=LONGEST_WAIT), DURATION]
#: The longest time that an engine or a scheduler is asked about a request, in seconds. The embedded gateway gives up a
#: request after a second without an answer, and waiting for tokens may take half of it.
LONGEST_QUESTION = 0.4
#: The name of a policy, or `{type: …, parameters: {…}}`, as under `policy`.
PolicyEntry = str | dict[str, Any]
Trust = Literal["objective", "fairness", "slo", "session", "model-rewrite", "test-selection", "kv-transfer"]


class Section(Params):
    """A mapping in the file."""


#: Marks a path that is relative to the configuration's directory.
RELATIVE = "relative"
RelativePath = Annotated[str, RELATIVE]
#: Marks a path whose existence is checked elsewhere: the file is written, or has a check of its own.
CHECKED_ELSEWHERE = "checked elsewhere"


# ---- gateway and ports ----


class ApiKeys(Section):
    """Clients must send an API key, which determines their tenant."""

    file: Annotated[str, Field(min_length=1), RELATIVE, CHECKED_ELSEWHERE] = Field(
        description="One line per key, made by `fairlead key`: its SHA-256, a tenant and optionally an expiry date. "
        "Followed while running."
    )
    forward: bool = Field(default=False, description="Also pass the key to model servers.")


class JwtSettings(Section):
    """Clients must send a JSON Web Token, or an API key if both are configured. A claim names their tenant."""

    issuer: Name = Field(description="Required value of the claim `iss`.")
    audiences: tuple[Name, ...] = Field(default=(), description="`aud` must contain one of them; empty = any.")
    jwks_uri: str = Field(
        default="",
        pattern="^(https://.+|http://(localhost|127\\.[0-9.]+|\\[::1\\])(:[0-9]+)?/.*)?$",
        examples=["https://HOST/PATH", "http://localhost:PORT/PATH"],
        description="URL of the issuer's keys, read every five minutes. Plain HTTP only from this machine.",
    )
    jwks_file: RelativePath = Field(default="", description="Instead of `jwksUri`: file of keys (JWKS), followed.")
    ca_file: RelativePath = Field(default="", description="PEM bundle for `jwksUri`, followed; empty = the system's.")
    tenant_claim: Name = Field(
        default="sub",
        description="The claim that names the tenant; `a.b` is a claim inside another. A token without it is refused.",
    )
    forward: bool = Field(default=False, description="Also pass the token to model servers.")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if bool(self.jwks_uri) == bool(self.jwks_file):
            raise ValueError("give jwksUri or jwksFile, one of them")
        return self


class Gateway(Section):
    """The embedded Envoy. With mode `none`, your own gateway connects to `extProc`."""

    mode: Literal["embedded", "none"] = Field(
        default="embedded",
        description="`embedded`: Fairlead starts an Envoy. `none`: your own gateway talks to `extProc`.",
    )
    host: Name = Field(default="127.0.0.1", description="Address for clients; `'::'` also serves other machines.")
    port: Port = Field(default=8080, description="The port for clients.")
    admin_port: Port = Field(default=0, description="Envoy's admin page, on 127.0.0.1; 0 = off.")
    response_mode: Literal["streamed", "none"] = Field(
        default="streamed",
        description="How much of a response the scheduler sees. `streamed`: up to the first chunk, so TTFT is known at "
        "once, or to the end where names are mapped or usage is sampled. `none`: nothing; TTFT is known when the "
        "access log reports the request.",
    )
    retry: Literal["connect", "unanswered", "hedge"] = Field(
        default="hedge",
        description="When a request goes to its fallback endpoint. `connect`: if the chosen endpoint cannot be "
        "reached. `unanswered`: also if it answers 5xx, or breaks off before the first byte. `hedge`: also if that "
        "byte is overdue; the first to answer wins.",
    )
    fail_open: bool = Field(
        default=True,
        description="If the scheduler does not answer: `true` serves requests round robin over all endpoints, whatever "
        "their model; `false` answers 503, or 504 if the scheduler hangs.",
    )
    body_limit: Bytes = Field(default=64 << 20, lt=1 << 32, description="Larger request bodies get 413.")
    concurrency: int = Field(default=0, ge=0, le=1024, description="Envoy's worker threads; 0 = one per CPU.")
    paths: tuple[UrlPath, ...] = Field(
        default=(),
        examples=["/cohere/v2/chat", "/*"],
        description="Paths to accept besides those of the inference APIs, e.g. `/cohere/v2/chat`. `*` at the end "
        "stands for anything, so `/*` accepts every path. Where models are defined, bodies for such paths are still "
        "refused.",
    )
    allowed_origins: tuple[Origin, ...] = Field(
        default=(),
        examples=["*", "https://app.example"],
        description="Origins of web pages whose scripts may use the gateway (CORS), e.g. `https://app.example`; `*` = "
        "all. Default: the model servers decide, and `keys` or `jwt` refuse every script.",
    )
    max_heap: Bytes | None = Field(
        default=None,
        description="Envoy's heap limit. Well below the limit, the largest uploads are ended; close to it, all "
        "requests are refused. Default: half of the cgroup's or machine's memory, at most 4 GiB.",
    )
    max_connections: int = Field(default=20_000, ge=1, description="The most client connections at the same time.")
    envoys: int = Field(
        default=1,
        ge=1,
        le=16,
        description="Envoy processes that listen on `port`. If one dies, only its own connections are lost. They share "
        "`maxHeap`, `maxConnections` and `concurrency`. The second process has the next higher `adminPort`, and so on.",
    )
    wait_for_scheduler: Seconds = Field(
        default=30.0,
        description="At the start, how long to wait for the scheduler's first answer before clients are served without "
        "it. 0 = do not wait.",
    )
    upload_share: float = Field(
        default=0.25,
        gt=0,
        le=1,
        description="Share of `maxHeap` that unfinished bodies from one client address may hold, at least `bodyLimit`; "
        "further ones get 429. 1 = no limit, for clients behind one proxy.",
    )
    receive_idle: PositiveSeconds = Field(
        default=15.0, description="How long a request body may pause; a tenth of this when memory is short."
    )
    upstream_token_file: RelativePath = Field(
        default="",
        description="File with the bearer token that model servers require (`vllm serve --api-key`). They get it in "
        "place of the client's, also with Fairlead's own questions. Followed while running.",
    )
    keys: ApiKeys | None = Field(default=None, description="Clients must send an API key, which names their tenant.")
    jwt: JwtSettings | None = Field(
        default=None, description="Clients must send a JSON Web Token, or an API key if `keys` is set too."
    )

    @property
    def asks(self) -> bool:
        """Whether clients have to authenticate."""
        return self.keys is not None or self.jwt is not None

    @model_validator(mode="after")
    def _one_token(self) -> Self:
        if self.upstream_token_file and any(each and each.forward for each in (self.keys, self.jwt)):
            raise ValueError("upstreamTokenFile and forward exclude each other: model servers get one token")
        return self


class Tls(Section):
    cert_dir: Annotated[Name, RELATIVE] = Field(description="Directory with `tls.crt` and `tls.key`.")


class ExtProc(Section):
    """The endpoint picker's gRPC port."""

    host: str = Field(default="", description="Empty = 127.0.0.1 with the embedded gateway, else `'::'`.")
    port: Port = Field(default=9002, description="The gRPC port.")
    transport: Literal["http2", "grpc-aio"] = Field(
        default="http2", description="`grpc-aio` is slower and exists as a reference."
    )
    health_port: Port = Field(
        default=0, description="A separate port for the gRPC health service, usually 9003; 0 = none."
    )
    tls: Tls | None = Field(default=None, description="Serve TLS.")
    max_endpoints: int = Field(
        default=1,
        ge=1,
        description="How many endpoints an answer names, separated by commas: the chosen one, then the next best. More "
        "than 1 is only for gateways of your own that try them in order; Envoy's `ORIGINAL_DST` cluster answers 503.",
    )


class Als(Section):
    """Envoy's gRPC access log service, which reports how requests ended."""

    enabled: bool = Field(default=True, description="Accept the access log.")
    port: Port = Field(default=0, description="0 = the port of `extProc`.")


class Admin(Section):
    """Metrics, health and debug pages over HTTP."""

    host: Name = Field(default="127.0.0.1", description="Address to listen on; `'::'` opens it to the network.")
    port: Port = Field(default=9090, description="0 = any free port.")
    debug: bool = Field(
        default=True, description="Serve the dashboard and the pages that show endpoints and decisions."
    )
    metrics_host: str = Field(default="", description="Empty = `host`.")
    metrics_port: Port = Field(default=0, description="A separate port for metrics and health only; 0 = none.")
    hosts: list[Name] = Field(
        default_factory=list,
        description="Host names that clients may use for this port, besides IP addresses, `localhost` and the "
        "machine's own name. `.example.com` covers all names with this ending.",
    )
    token_file: RelativePath = Field(
        default="",
        description="File of bearer tokens, one per line; `#` begins a comment. One is required for everything but "
        "`/healthz` and `/readyz`; browsers send it as the password. Read again when the file changes. Empty = none is "
        "required.",
    )
    tls: Tls | None = Field(default=None, description="Serve TLS.")


# ---- the pool ----


class FileSource(Section):
    file: str = Field(min_length=1)
    watch: bool = True
    allow_empty: bool = Field(default=False, description="Let an empty list remove all endpoints; otherwise they stay.")


class ScrapeTls(Section):
    ca_file: RelativePath = Field(default="", description="PEM bundle, followed; empty = the system's.")
    verify: bool = Field(default=True, description="False accepts any certificate.")


#: The name of a metric, or several of which the first that a page has is used; `None` = the built-in ones.
MetricNames = str | list[str] | None


class EngineNames(Section):
    """Metric names of one engine. Absent names keep the built-in values. See `fairlead.apis.engine_metrics`."""

    waiting: MetricNames = Field(
        default=None,
        description="Gauge of waiting requests. Here and below: the name of a metric, `name{label=value}`, or a list "
        "of these; the first one that the page has is used.",
    )
    running: MetricNames = Field(default=None, description="Gauge of running requests.")
    kv_usage: MetricNames = Field(default=None, description="Gauge of the share of KV blocks in use.")
    lora: MetricNames = Field(default=None, description="Gauge whose labels name running and waiting adapters.")
    cache_info: MetricNames = Field(
        default=None, description="Gauge whose labels give the block size and the number of blocks."
    )
    rank_label: str | None = Field(
        default=None, description="Label that distinguishes data-parallel engines on one page."
    )
    block_size_label: str | None = Field(default=None, description="Label of `cacheInfo` with the block size.")
    num_blocks_label: str | None = Field(default=None, description="Label of `cacheInfo` with the number of blocks.")
    block_size: MetricNames = Field(
        default=None, description="Gauge of the block size in tokens, if no label gives it."
    )
    num_blocks: MetricNames = Field(default=None, description="Gauge of the number of blocks, if no label gives it.")
    prefix_queries: MetricNames = Field(default=None, description="Counter of tokens looked up in the prefix cache.")
    prefix_hits: MetricNames = Field(default=None, description="Counter of tokens found in that cache.")
    generation_tokens: MetricNames = Field(default=None, description="Counter of generated tokens.")
    started: MetricNames = Field(default=None, description="Gauge of the engine's start time.")
    extra: dict[str, str] = Field(
        default={}, description="More gauges by name, for the plugins `metric` and `metric-limit`."
    )


class Metrics(Section):
    """How model servers are scraped."""

    interval: PositiveSeconds = Field(default=0.2, description="Time between scrapes of an endpoint with work.")
    idle_interval: PositiveSeconds = Field(default=0.2, description="Time between scrapes of an idle endpoint.")
    timeout: PositiveSeconds = Field(default=1.0, description="Longest time for one scrape.")
    staleness: PositiveSeconds = Field(
        default=2.0,
        description="Scrapes older than this are not used; at least 1s more than `interval` and `idleInterval`.",
    )
    backoff_cap: PositiveSeconds = Field(default=2.0, description="Failures double an endpoint's interval, up to this.")
    max_rate: float = Field(
        default=1000.0, gt=0, description="Scrapes per second over all endpoints; all intervals grow to keep it."
    )
    max_page_bytes: Bytes = Field(default=4 << 20, description="A larger page is a failed scrape.")
    models_interval: Seconds = Field(
        default=30.0, description="How often `/v1/models` is read for models and loaded adapters; 0 = never."
    )
    token_file: RelativePath = Field(
        default="",
        description="File with a bearer token for metrics pages, read again when it changes. Also sent to `/v1/models` "
        "if that is at the same address.",
    )
    tls: ScrapeTls = Field(default_factory=ScrapeTls.model_construct)
    scheme: Literal["http", "https"] = Field(
        default="http",
        description="Scheme of the metrics pages of endpoints without `metricsUrl`. Pages are requested by IP address; "
        "if certificates are for host names, use `metricsUrl`.",
    )
    path: str = Field(
        default="",
        pattern="^(/[^ ]*)?$",
        description="Path of these pages. Empty = `/metrics`, or `/prometheus/metrics` for the engine `trtllm-serve`.",
    )
    port: Port = Field(
        default=0,
        description="Port of these pages; 0 = the port for requests. The label `metricsPort` and, for endpoints that "
        "are not pods, `metricsAddress` take precedence.",
    )
    default_engine: Name = Field(
        default="vllm",
        description="Engine of endpoints without the label `llm-d.ai/engine-type`, or with an unknown one.",
    )
    engines: dict[str, EngineNames] = Field(
        default={},
        description="Changes to the built-in metric names of `vllm`, `sglang`, `trtllm-serve`, `triton-tensorrt-llm`, "
        "`triton`, `lmdeploy`, `llamacpp` and `tgi`, or an engine of your own.",
    )


class LeaderElection(Section):
    """One of several replicas, the leader, answers; the others stand by."""

    enabled: bool = Field(default=False, description="Only one of several replicas answers.")
    lease_name: KubeName = Field(default="", description="Empty = `epp-NAMESPACE-POOL.fairlead`.")
    lease_duration: PositiveSeconds = Field(
        default=10.0,
        description="How long a leader may be silent before it is replaced. A leader whose process ended is replaced "
        "at once if replicas can connect to each other: with $POD_IP and `extProc.healthPort`, as in the chart.",
    )
    renew_deadline: PositiveSeconds = Field(
        default=7.0,
        description="A leader steps down when its renewals are refused for this long. While the API server does not "
        "answer at all, it keeps leading.",
    )
    retry_period: PositiveSeconds = Field(default=2.0, description="Time between two renewals of the lease.")
    overlap: Seconds = Field(
        default=5.0,
        description="How long a leader that stops continues to answer beside its successor. Gateways that use health "
        "checks need two check intervals and one second.",
    )
    service: KubeName = Field(
        default="",
        description="A Service without a selector, with numeric ports. The leader writes its address into the "
        "Service's EndpointSlice. Needs $POD_IP, better also $POD_NAME and $NODE_NAME. Empty = gateways use readiness.",
    )


class Kubernetes(Section):
    """Endpoints and model names from an API server. Off without `pool`, `namespaces` and `selector`."""

    pool: KubeName = Field(default="", description="Name of the InferencePool.")
    namespaces: tuple[KubeName, ...] = Field(
        default=(),
        description="Instead of `pool`: serve every InferencePool of these namespaces; `*` = of all namespaces. See "
        "docs/kubernetes.md#several-pools.",
    )
    pool_selector: dict[str, str] = Field(default={}, description="With `namespaces`: labels that pools must have.")
    pod_selector: dict[str, str] = Field(
        default={}, description="With `namespaces`: labels of the pods of all pools. Empty = every pod is read."
    )
    namespace: KubeName = Field(
        default="",
        description="Namespace of the pool. Empty = $NAMESPACE, else the namespace of the service account or of the "
        "kubeconfig's context, else `default`.",
    )
    group: Literal["inference.networking.k8s.io", "inference.networking.x-k8s.io"] = Field(
        default="inference.networking.k8s.io", description="API group of the InferencePool."
    )
    selector: dict[str, str] = Field(default={}, description="Without an InferencePool: labels that pods must have.")
    target_ports: tuple[Annotated[int, Field(ge=1, le=65535)], ...] = Field(
        default=(), json_schema_extra={"maxItems": MAX_PORTS}, description="With `selector`: the ports of these pods."
    )
    models: bool = Field(
        default=True, description="Follow InferenceModels, InferenceObjectives and InferenceModelRewrites."
    )
    status: bool = Field(default=True, description="Write `Accepted` to their status; only the leader does.")
    kubeconfig: RelativePath = Field(
        default="", description="Path. Empty = the service account in a pod, else $KUBECONFIG, else ~/.kube/config."
    )
    context: str = Field(default="", description="Context in the kubeconfig; empty = the current one.")
    leader_election: LeaderElection = Field(default_factory=LeaderElection.model_construct)

    @property
    def on(self) -> bool:
        return bool(self.pool or self.selector or self.namespaces)


class KvCurve(Section):
    """CurveZMQ encryption. Keys are Z85 text of 40 characters."""

    public_key_file: RelativePath = Field(description="File with Fairlead's public key.")
    secret_key_file: RelativePath = Field(description="File with Fairlead's secret key.")
    server_key: str = Field(default="", description="Without `bind`: the publishers' public key.")
    clients_file: RelativePath = Field(
        default="", description="With `bind`: file with the public keys of publishers that may connect, one per line."
    )


class KvIndexer(Section):
    """A prefix index in another process (`fairlead indexer`)."""

    url: str = Field(
        default="",
        description="Ask the indexer at this URL instead of listening to KV events in this process, e.g. "
        "`http://kv-cache-indexer:9090`; empty = this process has the index.",
    )
    budget: PositiveSeconds = Field(
        default=0.005, description="How long a request waits for the indexer; after that, the learned index is used."
    )
    warm_from: str = Field(
        default="",
        description="At the start, load the index of the indexer at this URL, e.g. `http://other:9090`; empty = load "
        "only `snapshot`, if it is set.",
    )


class KvEvents(Section):
    """KV events of the engines. If off, cached prefixes are only learned from the scheduler's own decisions."""

    enabled: bool = Field(default=False, description="Listen to KV events.")
    port: Port = Field(
        default=0,
        description="Port of rank 0's publisher at every endpoint. Rank n has the port n higher. 0 = ask each engine "
        "(`GET /kv_event_sources`).",
    )
    replay_port: Port = Field(default=0, description="With `port`: port for fetching missed events; 0 = none.")
    ranks: int = Field(default=1, ge=1, le=256, description="Data-parallel ranks per endpoint.")
    bind: str = Field(
        default="",
        description="Instead of `port`: the address on which publishers connect to Fairlead, e.g. "
        "`tcp://*:5555`, rank n to the port n higher. Events are accepted only from the pool's endpoints.",
    )
    curve: KvCurve | None = Field(default=None, description="Encrypt and authenticate by CurveZMQ.")
    snapshot: Annotated[str, RELATIVE, CHECKED_ELSEWHERE] = Field(
        default="", description="File that keeps the index over restarts, written by one process; empty = none."
    )
    snapshot_interval: PositiveSeconds = Field(default=60.0, description="How often the snapshot is written.")
    max_blocks: int = Field(
        default=4_000_000, ge=10_000, le=200_000_000, description="Block copies to remember, at about 50 bytes each."
    )
    keys: Literal["own", "engine"] = Field(
        default="own",
        description="How to match blocks. `own`: by token ids, no matter how the engine hashes. `engine`: by the "
        "engine's hashes, except prompts with adapters or media.",
    )
    hash_algorithm: Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"] = Field(
        default="sha256", description="With `keys: engine`: the engine's hash algorithm."
    )
    hash_seed: str | None = Field(
        default=None, description="With `keys: engine`: the engine's PYTHONHASHSEED; `null` = not set."
    )
    block_size: int = Field(default=0, ge=0, le=4096, description="Tokens per block; 0 = as given in the events.")
    check: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="Share of unstreamed answers whose cached tokens are compared with the prediction, once an "
        "endpoint has proved itself.",
    )
    indexer: KvIndexer = Field(default_factory=KvIndexer.model_construct)


class ModelTokens(Section):
    """The tokenizer of one model name."""

    model_path: RelativePath = Field(
        default="", description="Directory with `tokenizer.json` and other files, as the engine loads it."
    )
    tokenizer_file: RelativePath = Field(default="", description="A `tokenizer.json` instead of the directory's.")
    chat_template: RelativePath = Field(
        default="", description="A Jinja template to use instead of the model's: the engine's `--chat-template`."
    )
    template_kwargs: dict[str, Any] = Field(
        default={}, description="Variables for every rendering: the engine's `--default-chat-template-kwargs`."
    )
    render: Literal["local", "engine"] = Field(
        default="local", description="`local`: in this process. `engine`: ask an endpoint for the token ids."
    )


class Tokens(Section):
    """Token ids of prompts. Off without `models`: prompts are then matched by their bytes."""

    models: dict[str, ModelTokens] = Field(default={}, description="Tokenizers by model name; `*` = every other model.")
    cache_bytes: Bytes = Field(default=256 << 20, description="Cache for encoded pieces of prompts, over all models.")
    engine_timeout: Annotated[float, Field(gt=0, le=LONGEST_QUESTION), DURATION] = Field(
        default=0.2,
        description="With `render: engine`: the longest wait for token ids, then none are used. At most 400 ms.",
    )


# ---- requests ----


class LedgerSettings(Section):
    lease_ttl: PositiveSeconds = Field(
        default=900.0, description="A request whose end is not reported is dropped from its endpoint's load after this."
    )


class Parsing(Section):
    max_body_bytes: Bytes = Field(default=64 << 20, description="Larger request bodies are refused.")
    max_buffered_bytes: Bytes = Field(
        default=0,
        description="Memory for all incomplete requests, and for the bodies of waiting requests. Beyond it, clients "
        "get no HTTP/2 flow-control credit. 0 = an eighth of the cgroup's or machine's memory, at most 128 MiB.",
    )
    conversations: bool = Field(
        default=True,
        description="Recognise a conversation by its prompts when the client names neither session nor user.",
    )


class ModelEntry(Section):
    """A model name that clients use, and the models that serve it."""

    name: Annotated[str, Field(min_length=1, max_length=256)] = Field(description="The model name that clients send.")
    targets: dict[Name, Annotated[int, Field(ge=0, le=1_000_000)]] = Field(
        default={}, description="Weights of models that serve the name; 0 = no requests. Empty = the name itself."
    )
    criticality: Literal["Critical", "Standard", "Sheddable"] = Field(
        default="Standard", description="`Critical` = priority 10, `Standard` = 0, `Sheddable` = -10."
    )
    ttft: Seconds = Field(default=0.0, description="Objective for the time to the first token; 0 = none.")
    tpot: Seconds = Field(default=0.0, description="Objective for the time per further token; 0 = none.")

    @field_validator("targets", mode="before")
    @classmethod
    def _weighted(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            raise ValueError("expected each target with its weight, such as {llama-3-8b: 90, llama-3-8b-tuned: 10}")
        return given


class Models(Section):
    """The meaning of model names. A list is short for `{list: …}`."""

    list: tuple[ModelEntry, ...] = Field(
        default=(),
        description="Model names that clients send. They take precedence over manifests, but not over rewrites.",
    )
    file: Annotated[str, RELATIVE, CHECKED_ELSEWHERE] = Field(
        default="",
        description="A file of manifests (InferenceModel, InferenceObjective, InferenceModelRewrite), or a directory "
        "of `.yaml`, `.yml` and `.json` files.",
    )
    watch: bool = Field(default=True, description="Read `file` again when it changes.")
    allow_empty: bool = Field(
        default=False, description="Let an empty `file` remove all its definitions; otherwise they stay."
    )
    pool: str = Field(default="", description="Only objects for this pool count; empty = all.")
    namespace: str = Field(default="", description="Only objects of this namespace count; empty = all.")
    unmatched: Literal["reject", "pass"] = Field(
        default="reject",
        description="What to do with undefined names once an InferenceModel is defined: `reject` (404) or `pass`.",
    )
    sticky: Literal["none", "session"] = Field(
        default="none", description="`session`: all requests of a session keep their target of a traffic split."
    )

    @property
    def given(self) -> bool:
        """Whether anything is defined."""
        return bool(self.file or self.list)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if twice := _twice([entry.name for entry in self.list]):
            raise ValueError(f"two models are named '{twice[0]}': give the name once, with all of its targets")
        return self


class Headers(Section):
    trust: tuple[Trust, ...] = Field(
        default=("objective", "fairness", "slo", "session", "model-rewrite"),
        description="Which headers of clients are trusted; docs/models.md lists them. `test-selection` is for "
        "conformance tests only, `kv-transfer` for proxies that compute prompts elsewhere.",
    )


class Inspect(Section):
    usage_sampling: Share = Field(
        default=0.01,
        description="Share of responses that are read to their end, for their token counts. Below 1, at most one "
        "stream a minute is read. Unless this is 0, the first 20 responses of each model and API are read too. "
        "Streams of the OpenAI APIs have counts only if the client sets `stream_options.include_usage`.",
    )


class QueueLimit(Section):
    """Limits on what may wait; `None` = any number."""

    requests: Count | None = Field(default=None, description="Requests that may wait; none = any number.")
    bytes: Bytes | None = Field(default=None, description="Bytes of bodies that may wait; none = any number.")


class QueueLimits(Section):
    total: QueueLimit = Field(
        default_factory=QueueLimit.model_construct,
        description="For all bands together. At the limit, a request displaces the last requests of lower bands.",
    )
    band: QueueLimit = Field(
        default_factory=lambda: QueueLimit.model_construct(requests=5000, bytes=1_000_000_000),
        description="For the requests of one priority.",
    )
    flow: QueueLimit = Field(
        default_factory=QueueLimit.model_construct, description="For the requests of one model and tenant in a band."
    )


class BandSettings(Section):
    """The settings of an entry of `flowControl.bands`, without plugins. `None` = as for all bands."""

    priority: int = Field(description="The priority to which these settings apply.")
    ttl: Wait | None = Field(default=None, description="As `flowControl.ttl`, for this band.")
    limits: QueueLimit | None = Field(default=None, description="As `flowControl.limits.band`, for this band.")
    share: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Minimum share of the work while requests of this band wait; 0 = only what higher bands leave.",
    )


class FlowRules(Section):
    """An entry of `flowControl.flows`: the flows it applies to, and their settings. The first match applies."""

    model: str | None = Field(default=None, description="The model; absent = any.")
    fairness_id: str | None = Field(default=None, description="The tenant; absent = any.")
    ttl: Wait | None = Field(default=None, description="As `flowControl.ttl`, for these flows.")
    limits: QueueLimit | None = Field(default=None, description="As `flowControl.limits.flow`, for these flows.")
    weight: float = Field(
        default=1.0,
        ge=1,
        le=1000,
        description="The flow's part of the band's work, in proportion to the weights of the other waiting flows.",
    )


class Shedding(Section):
    """Requests below priority 0 are refused with probability min(saturation^power · scale, 1)."""

    power: float = Field(default=5.0, gt=0, le=100, description="The exponent.")
    scale: float = Field(default=300.0, gt=0, le=1e9, description="The factor.")


class Evicting(Section):
    """Running requests below priority 0 are ended to make room for requests of a higher priority."""

    after: PositiveSeconds = Field(default=0.25, description="How long a request of higher priority must wait.")


class FlowSettings(Section):
    """The settings of `flowControl`, without plugins and bands."""

    enabled: bool = Field(default=True, description="`false` = requests never wait here.")
    ttl: Wait = Field(
        default=60.0,
        description="How long a request may wait, at most 590 s. The request's header `x-fairlead-ttl-ms` takes "
        "precedence. 590 s if flow control is on by default.",
    )
    no_endpoint_ttl: Annotated[float, Field(ge=0, le=LONGEST_WAIT), DURATION] = Field(
        default=60.0,
        description="How long a request may wait while the pool has no endpoint, or none answers, within `ttl`; at "
        "least 30 s if it has some, but none for the request. 0 = such a pool refuses at once; this is the value if "
        "flow control is on by default.",
    )
    window: int = Field(
        default=256,
        ge=1,
        le=1024,
        description="From this many requests of the flow whose turn it is, a request and its endpoint are chosen.",
    )
    limits: QueueLimits = Field(default_factory=QueueLimits.model_construct)
    target_delay: PositiveSeconds = Field(
        default=1.0, description="If requests wait longer than this, more replicas are desired."
    )
    flows: tuple[FlowRules, ...] = Field(default=(), description="Rules for single flows; the first match applies.")
    early_shedding: Shedding | None = Field(
        default=None,
        description="Refuse requests below priority 0 with probability min(saturation^power · scale, 1). Absent = off.",
    )
    eviction: Evicting | None = Field(
        default=None, description="End running requests below priority 0 for waiting higher ones. Absent = off."
    )


# ---- other deciders: a scheduler in another process, a canary, shadows ----


class SchedulerTls(ScrapeTls):
    """TLS to a scheduler, with PEM files. Empty = the system's authorities, and no client certificate."""

    server_name: str = Field(default="", description="Name in its certificate; empty = the host of `address`.")
    cert_dir: RelativePath = Field(default="", description="Directory with Fairlead's own `tls.crt` and `tls.key`.")


class BreakerSettings(Section):
    failures: int = Field(
        default=5,
        ge=1,
        le=10_000,
        description="After this many late or unusable answers in a row, the scheduler is not asked for a while.",
    )
    cooldown: PositiveSeconds = Field(default=1.0, description="How long the scheduler is then not asked.")


class SchedulerSettings(Section):
    """A scheduler in another process; docs/replacement-scheduler.md."""

    address: str = Field(default="", description="`host:port` or `unix:/path`; empty = none.")
    budget: PositiveSeconds = Field(
        default=0.005, description="How long a request waits for an answer; then the built-in policy decides."
    )
    tls: SchedulerTls | None = Field(default=None, description="Use TLS; absent = plaintext.")
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
    """Another policy or scheduler decides a share of the requests, the same one for all requests of a session."""

    policy: PolicyEntry = Field(default="", description="Name of a policy, or a mapping with `type` and parameters.")
    scheduler: SchedulerSettings | None = Field(default=None, description="Or a scheduler in another process.")
    percent: Percent = Field(default=0.0, description="Share of the requests, in percent.")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _one_of(self.policy, self.scheduler, self.percent > 0)
        return self

    @property
    def splits(self) -> bool:
        """As `PolicySpec.splits`, of its policy."""
        policy = self.policy
        return (policy if isinstance(policy, str) else policy.get("type")) == SPLITTING


class Shadow(Section):
    """Decides copies of the requests. Its answers are only recorded."""

    name: str = Field(default="", max_length=100, description="In metrics and records; empty = the policy's name.")
    policy: PolicyEntry = Field(default="", description="Name of a policy, or a mapping with `type` and parameters.")
    scheduler: SchedulerSettings | None = Field(default=None, description="Or a scheduler in another process.")

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
        default=0.2, gt=0, le=1, description="Share of one CPU for all shadows; beyond it they skip decisions."
    )
    limit: PositiveSeconds = Field(default=0.1, description="A shadow that takes longer for a decision is cut off.")
    policies: tuple[Shadow, ...] = Field(default=(), description="Policies on trial.")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if twice := _twice([policy.label for policy in self.policies]):
            raise ValueError(f"two shadows are named '{twice[0]}': give one another name")
        return self


def _twice(names: list[str]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1})


def _one_of(policy: PolicyEntry, scheduler: SchedulerSettings | None, needed: bool) -> None:
    if policy and scheduler is not None:
        raise ValueError("give policy or scheduler, not both")
    if scheduler is not None and not scheduler.address:
        raise ValueError("field 'scheduler.address' is missing")
    if needed and not policy and scheduler is None:
        raise ValueError("give policy: or scheduler:")


# ---- records ----


class Log(Section):
    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="The least severe lines to print."
    )
    format: Literal["logfmt", "json"] = Field(default="logfmt", description="How lines are written.")


class JournalSettings(Section):
    """Decisions and events on disk, see docs/journal.md."""

    path: Annotated[str, RELATIVE, CHECKED_ELSEWHERE] = Field(default="", description="Directory; empty = off.")
    max_bytes: Annotated[int, Field(ge=1 << 20), SIZE] = Field(
        default=1 << 30, description="Largest size of all files of the journal together. Never exceeded."
    )
    segment_bytes: Annotated[int, Field(ge=256 << 10), SIZE] = Field(
        default=64 << 20, description="Largest size of one file; at most a quarter of `maxBytes`."
    )
    when_full: Literal["drop-oldest", "stop"] = Field(
        default="drop-oldest",
        description="`drop-oldest`: the oldest file is deleted. `stop`: nothing more is written, so the journal can be "
        "replayed from its start.",
    )
    sample: Share = Field(
        default=1.0,
        description="Share of the decisions whose scores and numbers are written. Events and outcomes always are.",
    )
    flush: PositiveSeconds = Field(default=0.25, description="How old a record may get before it is written.")
    fsync: Literal["never", "second", "always"] = Field(
        default="never",
        description="When to sync to disk, in case the machine fails. No record is lost if only the process ends.",
    )
    explain: bool = Field(
        default=False,
        description="Keep the numbers behind each decision in memory, for `fairlead explain`, also without `path`.",
    )
    header: str = Field(
        default="",
        pattern="^(x-[A-Za-z0-9-]{1,62})?$",
        examples=["x-fairlead-decision"],
        description="Response header with the decision's id, added by the embedded gateway; empty = none.",
    )


class StateSettings(Section):
    """Learned state on disk, for a restarted scheduler: see docs/operations.md."""

    enabled: bool = Field(default=True, description="Write the state file, and read it at the start.")
    file: Annotated[str, RELATIVE, CHECKED_ELSEWHERE] = Field(
        default="", description="Empty = `learned.state` in `journal.path`; none if that is empty too."
    )
    interval: PositiveSeconds = Field(
        default=10.0, description="How often it is written. A killed process loses what it learned since."
    )
    max_age: PositiveSeconds = Field(default=3600.0, description="Knowledge of caches older than this is not used.")
    max_bytes: Annotated[int, Field(ge=64 << 10), SIZE] = Field(
        default=64 << 20, description="Largest size of the file. The most recently used blocks are kept."
    )

    def path(self, journal: JournalSettings) -> str:
        """The path of the file; empty = no file."""
        beside = f"{journal.path}/learned.state" if journal.path else ""
        return (self.file or beside) if self.enabled else ""


#: A host, perhaps with a port, in a regular expression.
_HOST = r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?"


class ReplicaSettings(Section):
    """Several schedulers of one pool that decide as one, see docs/replicas.md. Off without `via`."""

    via: str = Field(
        default="",
        pattern=rf"^((valkey|redis)s?://([^@/?#\s]*@)?{_HOST}(/[0-9]{{1,5}})?"
        rf"|(valkey|redis)s?\+sentinel://([^@/?#\s]*@)?{_HOST}(,{_HOST})*/[^@/?#\s]+(/[0-9]{{1,5}})?"
        r"|unix://([^@/?#\s]*@)?/[^?#\s]+(\?db=[0-9]{1,5})?|file:///[^?#\s]+)?$",
        examples=["valkey://USER@HOST:PORT/DB", "valkey+sentinel://HOST,HOST/NAME", "unix:///PATH", "file:///PATH"],
        description="The Valkey or Redis server through which the schedulers exchange facts: "
        "`valkey://USER@HOST:PORT/DB`, `valkeys://…` with TLS, or `unix:///PATH`. What Sentinel calls NAME: "
        "`valkey+sentinel://USER@HOST:PORT,HOST:PORT/NAME/DB`, or `valkeys+sentinel://…`. `file:///PATH`: a directory, "
        "if all schedulers are on one machine.",
    )
    password_file: RelativePath = Field(default="", description="File with its password, read for each connection.")
    ca_file: RelativePath = Field(default="", description="PEM bundle for TLS; empty = the system's.")
    cert_dir: RelativePath = Field(default="", description="Directory with Fairlead's own `tls.crt` and `tls.key`.")
    pool: str = Field(
        default="",
        max_length=253,
        description="Name of the pool: the same for all schedulers of one pool, and different for each pool. Empty = "
        "`kubernetes.namespace` and `kubernetes.pool`.",
    )
    interval: Annotated[float, Field(ge=0.001, le=1.0), DURATION] = Field(
        default=0.01, description="How often a scheduler sends its news to the others, all together."
    )
    lease: Annotated[float, Field(ge=0.5, le=60.0), DURATION] = Field(
        default=3.0, description="A scheduler that has not renewed its lease for this long counts as gone."
    )


class Autoscaling(Section):
    """The targets of `fairlead_desired_replicas`: see docs/autoscaling.md."""

    ttft: PositiveSeconds = Field(default=2.0, description="95 % of requests get their first token within this.")
    tpot: PositiveSeconds = Field(default=0.05, description="Target: time per further token of an answer.")
    startup: Seconds = Field(default=120.0, description="Time from ordering an endpoint until it serves requests.")
    host: str = Field(default="", description="Address on which KEDA's external scaler listens; empty = all addresses.")
    port: Port = Field(default=0, description="gRPC port of KEDA's external scaler; 0 = off.")


class Place(Section):
    own: str = Field(
        default="", max_length=253, description="Zone or node of Fairlead; see docs/policies.md for the default."
    )
    cost: Seconds = Field(default=0.0, description="Added to the cost of endpoints that are elsewhere; 0 = none.")


class TopologySettings(Section):
    """The additional cost of endpoints in another zone, or on another node."""

    zone: Place = Field(default_factory=Place, description="By the label `topology.kubernetes.io/zone`.")
    node: Place = Field(default_factory=Place, description="By the label `kubernetes.io/hostname`.")


class Warming(Section):
    """New and restarted endpoints compute common prompt beginnings before clients use them: see docs/autoscaling.md."""

    enabled: bool = Field(default=False, description="Keep the text of shared beginnings in memory, and send it.")
    tokens: int = Field(default=100_000, ge=1, description="The most prompt tokens to send to one endpoint.")
    shared: int = Field(
        default=4, ge=2, le=1024, description="A shared beginning is one of this many of the last 1,024 prompts."
    )
    max_bytes: Annotated[int, Field(ge=64 << 10), SIZE] = Field(
        default=4 << 20, description="Bytes of prompt text to keep. Beginnings that fewer prompts share go first."
    )


class Tracing(Section):
    """OpenTelemetry traces. Off without `endpoint`: OpenTelemetry is then not loaded."""

    endpoint: str = Field(
        default="",
        pattern="^(https?://.+)?$",
        examples=["http://localhost:4318/v1/traces"],
        description="URL of an OTLP collector over HTTP, e.g. `http://localhost:4318/v1/traces`.",
    )
    sample: float = Field(
        default=0.1, ge=0, le=1, description="Share of requests to trace, if their caller has not decided it."
    )
    follow_parent: bool = Field(
        default=True,
        description="`true`: a caller's `traceparent` decides whether its request is traced. `false`: `sample` "
        "decides, and the caller's trace is still continued.",
    )
    max_rate: float = Field(default=100.0, gt=0, description="Traced requests per second, whatever callers ask for.")
    service_name: str = Field(default="fairlead", min_length=1, description="Fairlead's service name in the spans.")
    timeout: PositiveSeconds = Field(default=5.0, description="For sending a batch of spans; late spans are dropped.")


# ---- the results of reading a file ----


class EndpointSource(Struct, frozen=True, kw_only=True):
    """Endpoints from either a list in the configuration itself, or a file."""

    static: tuple[Listed, ...] = ()
    #: An absolute path, or as given if the configuration did not come from a file.
    file: str = ""
    #: Read the file again when it changes.
    watch: bool = True
    #: Remove all endpoints if the file becomes empty; otherwise they stay.
    allow_empty: bool = False


class PluginSpec(Struct, frozen=True, kw_only=True):
    """One configured plugin. `type` is the canonical name."""

    kind: Kind
    type: str
    name: str
    #: An instance of the plugin's own `Params`; `None` = a built-in one with its defaults that is not in the file.
    given: Any
    #: The weight of a scorer; 0 for other plugins.
    weight: float = 0.0
    #: Its place in the file, e.g. `$.scorers[0]`.
    path: str = "$"
    #: The lines of `type`, `weight` and the parameters in the file.
    lines: dict[str, int] = field(default_factory=dict)
    #: The type as written in the file, if it is the name of another picker's plugin; otherwise empty.
    stands_for: str = ""

    @property
    def parameters(self) -> Any:
        """An instance of the plugin's own `Params`."""
        return RegisteredPlugin(self.kind, self.type).params() if self.given is None else self.given


#: Filters that keep endpoints by labels of any name, so perhaps by their roles.
_BY_LABELS = ("by-label", "label-selector")


class PolicySpec(Struct, frozen=True, kw_only=True):
    """A profile (filters, with the built-in ability filters first; scorers; a picker), or a policy plugin."""

    name: str
    filters: tuple[PluginSpec, ...] = ()
    scorers: tuple[PluginSpec, ...] = ()
    #: `None` if and only if there is a `plugin`.
    picker: PluginSpec | None = None
    #: A policy plugin, instead of scorers and a picker. It gets the filters if it declares `takes_filters`.
    plugin: PluginSpec | None = None

    def plugins(self) -> tuple[PluginSpec, ...]:
        return (*self.filters, *self.scorers, *(spec for spec in (self.picker, self.plugin) if spec is not None))

    @property
    def splits(self) -> bool:
        """Whether it is the built-in policy that lets one endpoint compute the prompt for another."""
        return self.plugin is not None and self.plugin.type == SPLITTING

    @property
    def may_split(self) -> bool:
        """Whether it may let one endpoint compute the prompt for another. Policies that are not built in may."""
        return self.splits or (self.plugin is not None and self.plugin.type not in BUILTINS["policy"])

    @property
    def any_role(self) -> bool:
        """Whether endpoints that only prefill are sent whole requests too: it has no filter that keeps those that
        decode, as filters by label and those of others may. Not known of policies without filters."""
        if self.splits or (self.plugin is not None and not self.filters):
            return False
        return not any(
            spec.type in _BY_LABELS
            or spec.type not in BUILTINS["filter"]
            or (spec.type == "role" and spec.parameters.stage == "decode")
            for spec in self.filters
        )


class BandSpec(Struct, frozen=True, kw_only=True):
    """An entry of `flowControl.bands`. If a plugin is `None`, that of all bands applies."""

    settings: BandSettings
    fairness: PluginSpec | None = None
    ordering: PluginSpec | None = None


class FlowSpec(Struct, frozen=True, kw_only=True):
    """The mapping `flowControl`. If a plugin is `None`, the default applies."""

    settings: FlowSettings = field(default_factory=FlowSettings)
    fairness: PluginSpec | None = None
    ordering: PluginSpec | None = None
    saturation: PluginSpec | None = None
    ceiling: PluginSpec | None = None
    bands: tuple[BandSpec, ...] = ()
    #: Whether the file does not mention it.
    implied: bool = False

    def plugins(self) -> tuple[PluginSpec, ...]:
        """The named plugins, without those of single bands."""
        named = self.fairness, self.ordering, self.saturation, self.ceiling
        return tuple(spec for spec in named if spec is not None)


def implied_flow_control(policy: PolicySpec | None, given: "Settings") -> FlowSpec | None:
    """Flow control if the file does not mention it; `None` = off. It is on with the default policy and the embedded
    gateway (another may have short timeouts), unless another process also decides, or a canary that splits requests. It
    has no limits, so it refuses no request that would be served without it."""
    plugin, canary = policy.plugin if policy else None, given.canary
    elsewhere = given.scheduler.address or (canary.percent and (canary.scheduler is not None or canary.splits))
    if given.gateway.mode != "embedded" or elsewhere or plugin is None or plugin.type != DEFAULT_POLICY:
        return None
    settings = FlowSettings(ttl=LONGEST_WAIT, no_endpoint_ttl=0.0, limits=QueueLimits(band=QueueLimit()))
    return FlowSpec(settings=settings, implied=True)


class Settings(Section):
    """The sections that are read unchanged from the file, and `seed`."""

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
    autoscaling: Autoscaling = Field(default_factory=Autoscaling)
    warming: Warming = Field(default_factory=Warming)
    topology: TopologySettings = Field(default_factory=TopologySettings)
    tokens: Tokens = Field(default_factory=Tokens)
    kv_events: KvEvents = Field(default_factory=KvEvents)
    replicas: ReplicaSettings = Field(default_factory=ReplicaSettings)
    tracing: Tracing = Field(default_factory=Tracing)
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = Field(
        default=None, description="Seed of the random generator; `None` = a new one at each start."
    )

    @property
    def trusted(self) -> tuple[Trust, ...]:
        """The headers that are trusted. A gateway that authenticates clients sets the tenant header itself."""
        return (*self.headers.trust, "fairness") if self.gateway.asks else self.headers.trust


class Config(Settings):
    """A complete, valid configuration: defaults filled in, quantities in seconds and bytes."""

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
    pools: dict[str, Any] = Field(default={}, description="By `namespace/name`: the pool's own configuration.")


#: Sections that are read unchanged, by their name in the file.
SECTIONS: dict[str, type[Section]] = {
    camel(name): cast(type[Section], section.annotation)
    for name, section in Settings.model_fields.items()
    if name != "seed"
}
