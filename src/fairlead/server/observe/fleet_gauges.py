"""The state of the fleet at one moment, for debug pages and as gauges."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import nan
from statistics import fmean, stdev

from msgspec import Struct

from fairlead.core.stalls import LEVELS
from fairlead.pool.scrape import ScrapeStats
from fairlead.server.observe.exposition import Registry
from fairlead.server.observe.instruments import Counter, Family, Gauge, Readings, counters, gauges


class EndpointStatus(Struct, frozen=True, kw_only=True):
    """One endpoint. `None` = not known, because the engine has never reported it."""

    id: str
    address: str
    labels: Mapping[str, str] = {}
    #: Its number among the endpoints of its pod.
    rank: int = 0
    #: Whether its last good scrape is recent enough to be used.
    fresh: bool = False
    #: Seconds since that scrape.
    age_s: float | None = None
    #: Why scrapes fail now; empty = they succeed, or have failed too few times to report.
    last_error: str = ""
    #: `well`, `suspect` or `out`, and for how many seconds the endpoint has made no progress although it has work
    #: (`fairlead.core.stalls`).
    suspicion: str = "well"
    silent_s: float = 0.0
    #: Requests, and the share of KV blocks in use, as the engine reported them.
    waiting: float | None = None
    running: float | None = None
    kv_usage: float | None = None
    #: Our own requests in flight, and their prompt tokens that are not prefilled yet.
    leases: int = 0
    pending_tokens: float = 0
    #: The names of its base model: the label's, else those that it lists; empty = not known.
    models: Sequence[str] = ()
    adapters: Sequence[str] = ()
    #: As the engine reported: tokens per KV block, blocks, prompt tokens looked up in its cache, and those found there.
    block_size: int | None = None
    num_blocks: int | None = None
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    #: The most sequences that the engine runs at the same time, as its metrics page says or as learned from scrapes.
    max_num_seqs: int | None = None
    #: Learned: how many times longer prefill and steps take than the prior predicts.
    prefill_factor: float = 1.0
    step_factor: float = 1.0


class FleetStatus(Struct, frozen=True, kw_only=True):
    """The whole pool."""

    endpoints: Sequence[EndpointStatus] = ()
    #: Entries of the prefix index.
    index_size: int = 0
    leases: int = 0
    scrapes: ScrapeStats | None = None


# Gauges about the pool, set from a `FleetStatus` at every rendering.

_STATES = ("kv_cache_utilization", "queue_size", "running_requests")


class FleetGauges:
    """Gauges about the pool. `pool`: the value of the label `name` in metrics with published names.

    Means and deviations are over fresh endpoints only. They are NaN without fresh endpoints, and deviations also with
    only one: NaN neither triggers an alert nor shows an outdated value.
    """

    def __init__(self, registry: Registry, pool: str, status: Callable[[], FleetStatus]) -> None:
        self._status = status
        self._mean = {state: gauges() for state in _STATES}
        self._deviation = {state: gauges() for state in _STATES}
        self._ready = gauges()
        self._queue = Readings("gauge", "model_server_endpoint")
        self._stale = Readings("gauge", "endpoint")
        self._age = Readings("gauge", "endpoint")
        self._suspicion = Readings("gauge", "endpoint")
        self._endpoint_leases = Readings("gauge", "endpoint")
        self._inflight = Readings("gauge", "endpoint_name", "namespace")
        self._tokens = Readings("gauge", "endpoint_name", "namespace")
        self._leases = gauges()
        self._index = gauges()
        self._scrapes = counters("result")
        self._failed = counters()
        self._scrape_bytes = counters()
        self._scrape_seconds = counters()
        registry.before(self.refresh)
        self._show_pool(registry, pool)
        self._show_own(registry)

    def refresh(self) -> None:
        status = self._status()
        fresh = [endpoint for endpoint in status.endpoints if endpoint.fresh]
        columns = {
            "kv_cache_utilization": _known(endpoint.kv_usage for endpoint in fresh),
            "queue_size": _known(endpoint.waiting for endpoint in fresh),
            "running_requests": _known(endpoint.running for endpoint in fresh),
        }
        for state, values in columns.items():
            self._mean[state].child().set(fmean(values) if values else nan)
            self._deviation[state].child().set(stdev(values) if len(values) > 1 else nan)
        self._ready.child().set(len(fresh))
        self._leases.child().set(status.leases)
        self._index.child().set(status.index_size)
        self._set_endpoints(status.endpoints)
        if status.scrapes is not None:
            self._scrapes.child("ok").value = status.scrapes.ok
            self._scrapes.child("failed").value = status.scrapes.failed
            self._failed.child().value = status.scrapes.failed
            self._scrape_bytes.child().value = status.scrapes.bytes
            self._scrape_seconds.child().value = status.scrapes.seconds

    def _set_endpoints(self, endpoints: Sequence[EndpointStatus]) -> None:
        self._queue.values = {(status.id,): status.waiting for status in endpoints if status.waiting is not None}
        self._stale.values = {(status.id,): 0 if status.fresh else 1 for status in endpoints}
        self._age.values = {(status.id,): round(status.age_s, 3) for status in endpoints if status.age_s is not None}
        self._endpoint_leases.values = {(status.id,): status.leases for status in endpoints}
        self._suspicion.values = {(status.id,): LEVELS.index(status.suspicion) for status in endpoints}
        names = [(name, namespace) for namespace, _, name in (status.id.rpartition("/") for status in endpoints)]
        self._inflight.values = dict(zip(names, (status.leases for status in endpoints), strict=True))
        self._tokens.values = dict(zip(names, (status.pending_tokens for status in endpoints), strict=True))

    def _show_pool(self, registry: Registry, pool: str) -> None:
        named = {"constant": {"name": pool}}
        for state in _STATES:
            text = f"[ALPHA] Mean {state.replace('_', ' ')} of the pool's fresh endpoints."
            registry.show(f"llm_d_epp_average_{state}", text, self._mean[state], **named)
            registry.show(f"inference_pool_average_{state}", text, self._mean[state], **named)
            text = f"[ALPHA] Standard deviation of {state.replace('_', ' ')} over the pool's fresh endpoints."
            registry.show(f"llm_d_epp_std_dev_{state}", text, self._deviation[state], **named)
        text = "[ALPHA] Endpoints with fresh metrics."
        registry.show("llm_d_epp_ready_endpoints", text, self._ready, **named)
        registry.show("inference_pool_ready_pods", text, self._ready, **named)
        text = "[ALPHA] Requests waiting in an endpoint's own queue."
        registry.show("llm_d_epp_per_endpoint_queue_size", text, self._queue, **named)
        pod = {"model_server_endpoint": "model_server_pod"}
        registry.show("inference_pool_per_pod_queue_size", text, self._queue, labels=pod, **named)
        ours = {"constant": {"producer_name": "fairlead"}}
        text = "[ALPHA] Requests in flight that are charged to an endpoint."
        registry.show("llm_d_epp_inflight_requests", text, self._inflight, **ours)
        text = "[ALPHA] Prompt tokens of requests in flight that are not computed yet."
        registry.show("llm_d_epp_inflight_tokens", text, self._tokens, **ours)
        source = {"labels": {}, "constant": {"source_type": "metrics-data-source"}}
        text = "[ALPHA] Scrapes of model servers that failed."
        for prefix in ("llm_d_epp_", "llm_d_inference_scheduler_"):
            registry.show(prefix + "datalayer_poll_errors_total", text, self._failed, **source)
        learned = {"constant": {"plugin_name": "prefix-index", "plugin_type": "prefix-cache-scorer"}}
        text = "[ALPHA] Entries of the prefix index."
        for prefix in ("llm_d_epp_", "inference_extension_"):
            registry.show(prefix + "prefix_indexer_size", text, self._index, **learned)

    def _show_own(self, registry: Registry) -> None:
        rows: tuple[tuple[str, str, Family[Gauge] | Family[Counter] | Readings], ...] = (
            ("index_size", "Entries of the prefix index.", self._index),
            ("fairlead_leases", "Requests in flight that are charged to an endpoint.", self._leases),
            (
                "fairlead_endpoint_leases",
                "Sequences in flight that are charged to the endpoint: the answers asked for.",
                self._endpoint_leases,
            ),
            ("fairlead_endpoint_stale", "1 while an endpoint's metrics are too old to be used.", self._stale),
            ("fairlead_endpoint_age_seconds", "Time since an endpoint's last good scrape.", self._age),
            ("fairlead_endpoint_suspicion", "1 while an endpoint seems to hang, 2 while it does.", self._suspicion),
            ("fairlead_scrape_total", "Scrapes of metrics pages, by result.", self._scrapes),
            ("fairlead_scrape_bytes_total", "Bytes of metrics pages read.", self._scrape_bytes),
            ("fairlead_scrape_seconds_total", "Time from asking for a page to having it.", self._scrape_seconds),
        )
        for name, text, family in rows:
            registry.show(name, text, family)


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
