"""`flowControl` of a configuration → the desk at which requests wait."""

from collections.abc import Callable
from math import inf
from random import Random
from typing import cast

from fairlead.admit.binding import PairBinder
from fairlead.admit.control import FlowControl, Gate
from fairlead.admit.desk import Desk
from fairlead.admit.eviction import Eviction
from fairlead.admit.framework import Ceiling, Fairness, Limit, Ordering
from fairlead.admit.gates import LedgerGate, PoolGate
from fairlead.admit.limits import FlowRule, Limits, Times
from fairlead.admit.queues import Queues
from fairlead.admit.shares import Shares
from fairlead.admit.shedding import EarlyShedding
from fairlead.config.registry import Registry, make
from fairlead.config.schema import LONGEST_WAIT, Config, FlowSpec, PluginSpec, QueueLimit
from fairlead.fleet.columns import BoolColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.errors import PluginError
from fairlead.model.request import Request
from fairlead.plugins.fairness import DeficitFairness
from fairlead.plugins.guarding import GuardedCeiling, GuardedFairness, GuardedOrdering, GuardedSaturation
from fairlead.plugins.orderings import LeastWorkOrdering
from fairlead.plugins.pickers.max_score import MaxScore, MaxScoreParams
from fairlead.schedule.cycle import Context
from fairlead.schedule.framework import Filter, Policy
from fairlead.schedule.profile import Profile

Report = Callable[[PluginError], None] | None
Able = Callable[[Request, Fleet, float], BoolColumn | None]


def build_desk(
    config: Config, policy: Policy, on_plugin_error: Report = None, registry: Registry | None = None
) -> Desk | None:
    """`None` when flow control is off. Raises `PluginError` when a plugin cannot be made."""
    flow = config.flow_control
    if flow is None or not flow.settings.enabled:
        return None
    registry = registry or Registry()
    settings = flow.settings
    for priority in {0, *(band.settings.priority for band in flow.bands)}:
        _bands(flow, registry, None)(priority)  # what cannot be made must stop the start
    queues = Queues(_bands(flow, registry, on_plugin_error), _limits(flow))
    shedding, eviction = settings.early_shedding, settings.eviction
    control = FlowControl(
        queues,
        _gate(flow.saturation, registry, on_plugin_error),
        PairBinder(able_by(config, policy, registry)),
        _times(flow),
        window=settings.window,
        shares=Shares({band.settings.priority: band.settings.share for band in flow.bands}),
        ceiling=_ceiling(flow.ceiling, registry, on_plugin_error),
        shedding=EarlyShedding(shedding.power, shedding.scale) if shedding else None,
    )
    return Desk(control, policy.name, settings.target_delay, Eviction(eviction.after) if eviction else None)


def _limits(flow: FlowSpec) -> Limits:
    limits = flow.settings.limits
    return Limits(
        total=_limit(limits.total),
        band=_limit(limits.band),
        flow=_limit(limits.flow),
        bands={one.settings.priority: _limit(one.settings.limits) for one in flow.bands if one.settings.limits},
        rules=tuple(
            FlowRule(
                model=rule.model,
                tenant=rule.fairness_id,
                ttl=rule.ttl or 0.0,
                limit=None if rule.limits is None else _limit(rule.limits),
                weight=rule.weight,
            )
            for rule in flow.settings.flows
        ),
    )


def _times(flow: FlowSpec) -> Times:
    settings = flow.settings
    bands = {one.settings.priority: one.settings.ttl for one in flow.bands if one.settings.ttl}
    return Times(settings.ttl, settings.no_endpoint_ttl, LONGEST_WAIT, bands)


def able_by(config: Config, policy: Policy, registry: Registry | None = None) -> Able:
    """Where a request can be served, by the filters of the configured policy, which `policy` is."""
    if isinstance(policy, Profile):
        chain = policy
    else:
        filters = [cast(Filter, make(spec, registry or Registry())) for spec in config.policy.filters]
        chain = Profile(policy.name, filters, [], MaxScore(MaxScoreParams()))
    rng = Random(0)
    return lambda request, fleet, now: chain.able(request, fleet, Context(now, rng))


def _bands(flow: FlowSpec, registry: Registry, report: Report) -> Callable[[int], tuple[Fairness, Ordering]]:
    own = {band.settings.priority: band for band in flow.bands}

    def made(priority: int) -> tuple[Fairness, Ordering]:
        band = own.get(priority)
        shares = (band.fairness if band else None) or flow.fairness
        ranks = (band.ordering if band else None) or flow.ordering
        fairness: Fairness = DeficitFairness()
        if shares is not None:
            fairness = make(shares, registry)
            if _foreign(shares, registry):
                fairness = GuardedFairness(fairness, report)
        ordering: Ordering = LeastWorkOrdering()
        if ranks is not None:
            ordering = make(ranks, registry)
            if _foreign(ranks, registry):
                ordering = GuardedOrdering(ordering, report)
        return fairness, ordering

    return made


def _gate(spec: PluginSpec | None, registry: Registry, report: Report) -> Gate:
    if spec is None:
        return LedgerGate()
    plugin = make(spec, registry)
    if _foreign(spec, registry):
        plugin = GuardedSaturation(plugin, report)
    return PoolGate(plugin.name, plugin.level)


def _ceiling(spec: PluginSpec | None, registry: Registry, report: Report) -> Ceiling | None:
    if spec is None:
        return None
    plugin: Ceiling = make(spec, registry)
    return GuardedCeiling(plugin, report) if _foreign(spec, registry) else plugin


def _foreign(spec: PluginSpec, registry: Registry) -> bool:
    found = registry.find(spec.kind, spec.type)
    return found is not None and found.foreign


def _limit(limit: QueueLimit) -> Limit:
    return Limit(inf if limit.requests is None else limit.requests, inf if limit.bytes is None else limit.bytes)
