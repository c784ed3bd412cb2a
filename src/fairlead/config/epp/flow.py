"""The reference's flow control → ours. It is on with the feature gate `flowControl` only; what the document does not
name has our defaults, not the reference's: its detector stops the pool when scrapes fail."""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from fairlead.config.builtins import Kind
from fairlead.config.epp.document import Band, FlowControl
from fairlead.config.epp.instances import Instance
from fairlead.config.epp.parameters import ConcurrencyDetector, StaticLimit, UtilizationDetector
from fairlead.config.problems import Report
from fairlead.config.queueing import Evicting
from fairlead.config.schema import LONGEST_WAIT, FlowSettings, FlowSpec, PluginSpec, QueueLimit, QueueLimits
from fairlead.plugins.ceilings import StaticCeilingParams
from fairlead.plugins.fairness import DeficitFairness
from fairlead.plugins.orderings import LeastWorkOrdering
from fairlead.plugins.params import NoParams
from fairlead.plugins.saturations import ConcurrencyDetectorParams, UtilizationDetectorParams
from fairlead.wire.problem import Place

AT: Place = ("flowControl",)
OURS = f"what is not named has Fairlead's defaults: {DeficitFairness.type}, {LeastWorkOrdering.type}, own ledger"
_TYPES = {
    "global-strict-fairness-policy": "global-strict",
    "round-robin-fairness-policy": "round-robin",
    "program-aware-fairness": "least-attained-service",
    "fcfs-ordering-policy": "fcfs",
    "edf-ordering-policy": "edf",
    "slo-deadline-ordering-policy": "edf",
}


class Named(Struct):
    """The plugins that the document refers to."""

    fairness: Instance | None = None
    ordering: Instance | None = None
    saturation: Instance | None = None
    limit: Instance | None = None


def flow_spec(flow: FlowControl, named: Named, bands: Sequence[Band], report: Report) -> FlowSpec:
    """What it says in our words; what has no counterpart is noted."""
    report.note(AT, OURS)
    band = QueueLimit(requests=5000, bytes=1_000_000_000)
    said = [one for one in bands if one.max_requests or one.max_bytes]
    if said:
        band = QueueLimit(requests=said[0].max_requests or None, bytes=said[0].max_bytes or None)
    if len({_rules(one) for one in bands}) > 1:
        report.note(AT, "all bands have the limits and policies of the first one that names them")
    ttl = _ttl(flow.default_request_ttl, 60.0)
    total = QueueLimit(requests=flow.max_requests or None, bytes=flow.max_bytes or None)
    settings = FlowSettings(
        ttl=ttl,
        no_endpoint_ttl=_ttl(flow.no_endpoint_request_ttl, ttl),
        limits=QueueLimits(total=total, band=band),
        eviction=Evicting() if flow.enable_eviction else None,
    )
    return FlowSpec(
        settings=settings,
        fairness=_spec("fairness", named.fairness, report),
        ordering=_spec("ordering", named.ordering, report),
        saturation=_spec("saturation", named.saturation, report),
        ceiling=_spec("ceiling", named.limit, report),
    )


def _rules(band: Band) -> tuple[Any, ...]:
    return band.max_requests, band.max_bytes, band.fairness_policy_ref, band.ordering_policy_ref


def _ttl(said: float | None, default: float) -> float:
    """0 = as long as a gateway waits."""
    return default if said is None else min(said or LONGEST_WAIT, LONGEST_WAIT)


def _spec(kind: Kind, one: Instance | None, report: Report) -> PluginSpec | None:
    if one is None:
        return None
    params: Any = NoParams()
    given = one.parameters
    if isinstance(given, UtilizationDetector):
        params = UtilizationDetectorParams(
            queue_depth_threshold=given.queue_depth_threshold,
            kv_cache_util_threshold=given.kv_cache_util_threshold,
        )
    elif isinstance(given, ConcurrencyDetector):
        params = ConcurrencyDetectorParams(
            max_concurrency=given.max_concurrency,
            max_token_concurrency=given.max_token_concurrency,
            concurrency_mode=given.concurrency_mode,
        )
    elif isinstance(given, StaticLimit):
        params = StaticCeilingParams(threshold=given.threshold)
    return PluginSpec(
        kind=kind,
        type=_TYPES.get(one.type, one.type),
        name=one.name,
        parameters=params,
        path=report.path(one.place),
        lines=one.lines,
        stands_for=one.type,
    )
