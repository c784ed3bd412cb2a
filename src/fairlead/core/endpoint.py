"""A replica of a model server: its roles, its models, what reaching it costs, and the values of one scrape."""

from collections.abc import Mapping
from math import inf

from msgspec import Struct, field

#: Source of this label and its values: the reference picker's decode-filter and prefill-filter.
ROLE_LABEL = "llm-d.ai/role"
#: For each stage the roles that include it; an endpoint without the label decodes. `both` is an old `prefill-decode`.
STAGES = {
    "decode": {"", "decode", "prefill-decode", "encode-decode", "both", "encode-prefill-decode"},
    "prefill": {"prefill", "encode-prefill", "prefill-decode", "both", "encode-prefill-decode"},
    "encode": {"encode", "encode-prefill", "encode-decode", "encode-prefill-decode"},
}
#: All values of the role label.
ROLES = frozenset().union(*STAGES.values()) - {""}
#: Roles that prefill and do not decode.
PREFILL_ONLY = STAGES["prefill"] - STAGES["decode"]
MODEL_LABEL, ADAPTERS_LABEL = "model-id", "lora-adapters"
ZONE_LABEL, NODE_LABEL = "topology.kubernetes.io/zone", "kubernetes.io/hostname"
#: Ports of an InferencePool, at most; each port is a separate endpoint.
MAX_PORTS = 8


def host_port(host: str, port: int) -> str:
    """Return `HOST:PORT`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Endpoint(Struct, frozen=True):
    """A replica that requests can be sent to. It is unchanged if all fields are equal."""

    #: Unique in the pool, e.g. `default/vllm-0`.
    id: str
    #: The address that Envoy connects to: `10.0.0.1:8000` or `[fd00::1]:8000`. Always a literal address.
    address: str
    labels: Mapping[str, str] = field(default_factory=dict)
    #: URL of the metrics page; empty = `http://{address}/metrics`.
    metrics_url: str = ""
    #: Its place among the endpoints of its pod, which has one per port: the data-parallel rank.
    rank: int = 0
    #: The uid of its pod; empty = it is no pod's.
    uid: str = ""

    @property
    def role(self) -> str:
        """Its role by the label; empty = none."""
        return self.labels.get(ROLE_LABEL, "")

    @property
    def only_prefills(self) -> bool:
        """Whether it computes prompts for others only, by its role."""
        return self.role in PREFILL_ONLY

    @property
    def scrape_url(self) -> str:
        return self.metrics_url or f"http://{self.address}/metrics"

    @property
    def pod(self) -> str:
        """The name of its pod, which it shares with the endpoints of other ranks; its own id if it is no pod's. Only
        pods' ids have a namespace."""
        return self.id.removesuffix(f"-rank-{self.rank}") if "/" in self.id else self.id

    @property
    def promised(self) -> set[str]:
        """The adapters that its label promises."""
        label = self.labels.get(ADAPTERS_LABEL)
        return {name.strip() for name in label.split(",")} - {""} if label else set()

    @property
    def labelled_models(self) -> set[str]:
        """The models and adapters that its labels name."""
        return self.promised | ({self.labels[MODEL_LABEL]} if MODEL_LABEL in self.labels else set())


class BaseModels(Struct, frozen=True):
    """The base models in an endpoint's list of models, without its adapters."""

    #: Empty = not known.
    names: frozenset[str] = frozenset()
    #: Context length by model name, if known: most tokens of prompt and answer together.
    contexts: Mapping[str, int] = field(default_factory=dict)
    #: The list was not read yet, and is about to be.
    unread: bool = False

    def context(self, model: str) -> float:
        """Return the context length for a model name in tokens; infinite = not known. For an adapter or an empty name:
        the context length of the base models, if all have the same."""
        if model in self.names:
            return self.contexts.get(model, inf)
        known = {*self.contexts.values()}
        return known.pop() if len(known) == 1 else inf


NOT_LISTED, NOT_READ = BaseModels(), BaseModels(unread=True)


class Topology(Struct, frozen=True):
    """The cost of reaching endpoints in other places, such as other zones."""

    #: (label, our own value, milliseconds if the endpoint's value differs). Without the label nothing is added.
    places: tuple[tuple[str, str, float], ...] = ()

    def ms(self, labels: Mapping[str, str]) -> float:
        return sum(ms for label, own, ms in self.places if labels.get(label, own) != own)


class Sample(Struct, frozen=True, kw_only=True):
    """The values of one scrape of an endpoint. `None` = the page did not contain it; the older value stays in force."""

    #: Number of data-parallel engines on the page, among which its server divides requests; 0 = unknown.
    ranks: int = 0
    #: Requests waiting in the engine's own queue, summed over the ranks.
    waiting: float | None = None
    #: Requests in the running batch, summed over the ranks.
    running: float | None = None
    #: Share of KV blocks held by running requests, 0..1; the highest of the ranks.
    kv_usage: float | None = None
    #: Adapters loaded and active; empty when LoRA is off. `None` = not reported.
    adapters: frozenset[str] | None = None
    #: Adapters with requests waiting for a slot.
    waiting_adapters: frozenset[str] = frozenset()
    #: Slots for adapters; 0 = unknown.
    max_adapters: int = 0
    #: Tokens per KV block; 0 = unknown.
    block_size: int = 0
    #: KV blocks of all ranks; 0 = unknown.
    num_blocks: int = 0
    #: Whether the engine reuses what it computed for the same prefix; `True` also if the page does not say.
    prefix_caching: bool = True
    #: Prefix cache counters of the engine, in tokens, cumulative.
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    #: Tokens generated, cumulative.
    generation_tokens: float | None = None
    #: Whether `generation_tokens`, the prefix counters and `kv_usage` change at each step of the engine.
    each_step: bool = True
    #: Start of the engine's process, seconds since 1970.
    started: float | None = None
    #: Additional gauges by configured name.
    extra: Mapping[str, float] = field(default_factory=dict)
