"""Gauges about the pool, set anew from a `FleetStatus` at every rendering."""

from collections.abc import Callable, Iterable
from math import nan
from statistics import fmean, stdev

from fairlead.observe.exposition import Registry
from fairlead.observe.instruments import Counter, Family, Gauge, counters, gauges
from fairlead.observe.status import EndpointStatus, FleetStatus

_ENDPOINTS = 10_000
_STATES = ("kv_cache_utilization", "queue_size", "running_requests")


class FleetGauges:
    """`pool`: the value of the label `name` in the published names.

    Means and deviations are over fresh endpoints only; with none (or, for deviations, one) they are NaN, which neither
    fires nor hides behind an old value.
    """

    def __init__(self, registry: Registry, pool: str, status: Callable[[], FleetStatus]) -> None:
        self._status = status
        self._mean = {state: gauges() for state in _STATES}
        self._deviation = {state: gauges() for state in _STATES}
        self._ready = gauges()
        self._queue = gauges("model_server_endpoint", cap=_ENDPOINTS)
        self._stale = gauges("endpoint", cap=_ENDPOINTS)
        self._age = gauges("endpoint", cap=_ENDPOINTS)
        self._endpoint_leases = gauges("endpoint", cap=_ENDPOINTS)
        self._leases = gauges()
        self._index = gauges()
        self._scrapes = counters("result")
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
            self._scrape_bytes.child().value = status.scrapes.bytes
            self._scrape_seconds.child().value = status.scrapes.seconds

    def _set_endpoints(self, endpoints: Iterable[EndpointStatus]) -> None:
        for family in (self._queue, self._stale, self._age, self._endpoint_leases):
            family.children.clear()
        for endpoint in endpoints:
            if endpoint.waiting is not None:
                self._queue.child(endpoint.id).value = endpoint.waiting
            self._stale.child(endpoint.id).value = not endpoint.fresh
            if endpoint.age_s is not None:
                self._age.child(endpoint.id).value = round(endpoint.age_s, 3)
            self._endpoint_leases.child(endpoint.id).value = endpoint.leases

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

    def _show_own(self, registry: Registry) -> None:
        rows: tuple[tuple[str, str, Family[Gauge] | Family[Counter]], ...] = (
            ("index_size", "Entries of the prefix index.", self._index),
            ("fairlead_leases", "Requests in flight that are charged to an endpoint.", self._leases),
            ("fairlead_endpoint_leases", "Of those, per endpoint.", self._endpoint_leases),
            ("fairlead_endpoint_stale", "1 while an endpoint's metrics are too old to be believed.", self._stale),
            ("fairlead_endpoint_age_seconds", "Time since an endpoint's last good scrape.", self._age),
            ("fairlead_scrape_total", "Scrapes of metrics pages, by result.", self._scrapes),
            ("fairlead_scrape_bytes_total", "Bytes of metrics pages read.", self._scrape_bytes),
            ("fairlead_scrape_seconds_total", "Time from asking for a page to having it.", self._scrape_seconds),
        )
        for name, text, family in rows:
            registry.show(name, text, family)


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
