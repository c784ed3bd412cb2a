"""Metrics of flow control: which requests wait, for how long, and how their wait ends. None while flow control is off.

Rules
* Gauges are set from the queues at every rendering; the counter and the histogram with each decision.
* Clients choose tenants and models. They are shown as `SchedulerMetrics.labels` returns them: `other` for labels
  without series of their own (see `metrics`).
* `requests_total` and the histogram count every request that flow control has seen, including those sent immediately.
* Published names and their deprecated twins are as in `request_families`; `fairlead_flow_*` are our own.
"""

from collections.abc import Callable, Collection, Sequence
from math import inf, nan
from operator import attrgetter
from typing import Any

from fairlead.core.fleet import Fleet
from fairlead.core.flow import Limit
from fairlead.core.flow_control import FlowController
from fairlead.core.queues import Band
from fairlead.core.records import DecisionRecord
from fairlead.core.request import Request
from fairlead.server.observe import instruments as buckets
from fairlead.server.observe.exposition import Registry
from fairlead.server.observe.instruments import counters, gauges, histograms
from fairlead.server.observe.metrics import SchedulerMetrics, grouped

#: Decisions that agree in these fields are counted together.
_KIND = attrgetter("outcome", "queued_ms", "request.model", "request.target", "request.fairness_id", "request.priority")
_FLOW = ("fairness_id", "priority", "model_name", "target_model_name")
_PREFIXES = ("llm_d_epp_flow_control_", "inference_extension_flow_control_")
#: Bounds in seconds: from only starting a process to also fetching weights.
_COLD = (1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)

#: Reason → the published outcome of a request that had not waited, and of one that had.
_OUTCOMES = {
    "routed": ("Dispatched", "Dispatched"),
    "rejected-saturated": ("RejectedCapacity", "RejectedCapacity"),
    "rejected-no-endpoints": ("RejectedNoEndpoints", "EvictedNoEndpoints"),
    "rejected-ttl-expired": ("EvictedTTL", "EvictedTTL"),
    "rejected-context-cancelled": ("EvictedContextCancelled", "EvictedContextCancelled"),
    "rejected-shutting-down": ("RejectedOther", "EvictedOther"),
}
_OTHERWISE = ("RejectedOther", "EvictedOther")


class FlowMetrics:
    """Metrics of flow control. `flow_controller`: `None` = flow control is off."""

    def __init__(self, metrics: SchedulerMetrics, pool: str, fleet: Fleet, now: Callable[[], float]) -> None:
        self.flow_controller: FlowController | None = None
        self._fleet = fleet
        self._now = now
        self._labels = metrics.labels
        self._requests = counters("outcome", "priority", cap=256, fold=("priority",))
        self._waits = histograms(*_FLOW, "outcome", bounds=buckets.QUEUE)
        self._size = gauges(*_FLOW)
        self._bytes = gauges(*_FLOW)
        self._used = {kind: gauges("priority", cap=256, fold=("priority",)) for kind in ("requests", "bytes")}
        self._age = gauges("priority", cap=256, fold=("priority",))
        self._jain = gauges("priority", cap=256, fold=("priority",))
        self._flow_age = gauges(*_FLOW)
        self._delays = gauges("priority", cap=256, fold=("priority",))
        #: As last refreshed.
        self._drains: dict[int, float] = {}
        self._cold_starts = histograms(bounds=_COLD)
        metrics.registry.before(self._refresh)
        self._show(metrics.registry, {"constant": {"inference_pool": pool}})

    def on_decisions(self, records: Sequence[DecisionRecord]) -> None:
        if self.flow_controller is None:
            return
        for (outcome, queued_ms, *_), group in grouped(list(map(_KIND, records)), records):
            request = group[0].request
            outcome = _OUTCOMES.get(outcome, _OTHERWISE)[queued_ms > 0.0]
            self._requests.child(outcome, str(request.priority)).value += len(group)
            self._waits.child(*self._flow(request), outcome).observe_all([queued_ms * 1e-3] * len(group))

    def _flow(self, request: Request) -> tuple[str, str, str, str]:
        model, target, fairness_id, priority = self._labels(request)
        return fairness_id, str(priority), model, target

    def on_endpoint(self) -> float:
        """Call this before an endpoint joins. If it is the pool's first, return how many seconds the oldest request has
        waited for it; 0 = the pool has endpoints, or no request waits."""
        controller = self.flow_controller
        if controller is None or self._fleet.table.count or not len(controller.flow):
            return 0.0
        waited = self._now() - controller.flow.oldest()
        self._cold_starts.child().observe(waited)
        return waited

    def forget(self, kept: Collection[tuple[str, ...]]) -> None:
        """Drop the wait times of all request labels (model, target, fairness id, priority) except `kept`."""
        self._waits.keep(("model_name", "target_model_name", "fairness_id", "priority"), kept)

    def _refresh(self) -> None:
        flows, bands = (self._size, self._bytes, self._flow_age), (self._age, self._delays, self._jain)
        for family in (*flows, *bands, *self._used.values()):
            family.children.clear()
        flow_controller = self.flow_controller
        if flow_controller is None or not flow_controller.flow.holds:
            self._cold_starts.children.clear()
        else:  # an alert tells by these series whether the pool may be empty
            self._cold_starts.child()
        if flow_controller is None:
            return
        now = self._now()
        queues = flow_controller.flow.queues
        self._drains = queues.drains_s(now)
        for band in queues.bands():
            self._band(band, band.limit, self._drains[band.priority], now)

    def _band(self, band: Band, limit: Limit, delay: float, now: float) -> None:
        priority = str(band.priority)
        self._delays.child(priority).set(delay)
        self._used["requests"].child(priority).set(_share(band.count, limit.requests))
        self._used["bytes"].child(priority).set(_share(band.bytes, limit.bytes))
        oldest = band.oldest()
        self._age.child(priority).set(0.0 if oldest == inf else now - oldest)
        served = [flow.served for flow in band.flows.values() if flow.served > 0.0 or len(flow)]
        self._jain.child(priority).set(jains_index(served))
        for flow in band.flows.values():
            if len(flow):
                labels = self._flow(flow.waiting[0][2].request)
                self._size.child(*labels).inc(len(flow))
                self._bytes.child(*labels).inc(flow.bytes)
                age = self._flow_age.child(*labels)
                age.set(max(age.value, now - min(entry[2].since for entry in flow.waiting)))

    def saturation(self) -> float | None:
        """The saturation that the gauge shows; `None` = flow control is off."""
        controller = self.flow_controller
        return None if controller is None else controller.flow.gate.level(self._fleet, self._now())

    def _reading(self, read: Callable[[FlowController], Any]) -> Callable[[], Any]:
        """A function for `Registry.follow` that returns `None` while flow control is off."""
        return lambda: None if self.flow_controller is None else read(self.flow_controller)

    def _effective(self, controller: FlowController) -> dict[str, float]:
        return {"effective": controller.flow.gate.level(self._fleet, self._now())}

    def _stale(self, controller: FlowController) -> int:
        table = self._fleet.table
        return int((table.alive & (self._now() - table.sampled_at > self._fleet.staleness)).sum())

    def _show(self, registry: Registry, pool: dict[str, dict[str, str]]) -> None:
        show, follow, of = registry.show, registry.follow, self._reading
        for prefix in _PREFIXES:
            text = "[ALPHA] Time from a request's arrival at flow control to its outcome."
            show(prefix + "request_queue_duration_seconds", text, self._waits, **pool)
            show(prefix + "queue_size", "[ALPHA] Requests that wait, by flow.", self._size, **pool)
            show(prefix + "queue_bytes", "[ALPHA] Body bytes of waiting requests, by flow.", self._bytes, **pool)
        prefix, *older = _PREFIXES
        text = "[ALPHA] How full the endpoints are on average: 1 = they take no more; above 1 = oversubscribed."
        saturation = follow("gauge", prefix + "pool_saturation", text, of(self._effective), "stage", **pool)
        for name in older:
            show(name + "pool_saturation", text, saturation, **pool)
        show(prefix + "requests_total", "[ALPHA] Requests by outcome.", self._requests, **pool)
        text = "[ALPHA] Running requests that had to make way for waiting ones."
        evicted = of(lambda controller: {str(priority): count for priority, count in controller.evicted.items()})
        follow("counter", prefix + "revocations_issued_total", text, evicted, "priority", **pool)
        for kind in ("requests", "bytes"):
            text = f"[ALPHA] Share of the limit of {kind} that is used, by band."
            show(f"{prefix}capacity_utilization_{kind}", text, self._used[kind], **pool)
            text = f"[ALPHA] Share of the global limit of {kind} that is used."
            follow("gauge", f"{prefix}global_capacity_utilization_{kind}", text, of(_USED[kind]), **pool)
        text = "[ALPHA] Endpoints whose metrics are too old to be used."
        follow("gauge", f"{prefix}stale_endpoints", text, of(self._stale), constant={"detector": "fairlead"})
        text = "Age of the request that waits longest, by band."
        show("fairlead_flow_head_age_seconds", text, self._age)
        text = "Age of the request that waits longest, by flow."
        show("fairlead_flow_queue_age_seconds", text, self._flow_age)
        text = "Jain's index of the work that the flows of a band were given out of the queue; 1 = all the same."
        show("fairlead_flow_fairness_index", text, self._jain)
        text = "How long the queue will take at the present pace of its models."
        delay = of(lambda controller: max(self._drains.values(), default=0.0))
        follow("gauge", "fairlead_flow_delay_seconds", text, delay)
        text = "How long the queue of a band and the bands above will take: the longest Retry-After."
        show("fairlead_flow_band_delay_seconds", text, self._delays)
        text = "How long requests had waited for a pool's first endpoint; absent if none may wait for it."
        show("fairlead_cold_start_seconds", text, self._cold_starts)
        waiting = of(lambda controller: len(controller.flow.queues))
        follow("gauge", "fairlead_flow_waiting_requests", "Requests that wait, in all.", waiting)


#: Functions that return the used share of a global limit.
_USED: dict[str, Callable[[FlowController], float]] = {
    "requests": lambda controller: _share(len(controller.flow.queues), controller.flow.queues.limits.total.requests),
    "bytes": lambda controller: _share(controller.flow.queues.bytes, controller.flow.queues.limits.total.bytes),
}


def _share(used: float, limit: float) -> float:
    return 0.0 if limit == inf else used / limit


def jains_index(work: list[float]) -> float:
    """Jain's index (Σx)² / (n·Σx²), from 1/n to 1; NaN = no flow got any work."""
    squares = sum(x * x for x in work)
    return sum(work) ** 2 / (len(work) * squares) if squares else nan
