"""`flowControl` of a configuration → the desk at which requests wait."""

from collections.abc import Callable
from math import inf
from random import Random
from typing import cast

from fairlead.admit.binding import PairBinder
from fairlead.admit.control import FlowControl, Gate, Times
from fairlead.admit.desk import Desk
from fairlead.admit.framework import Fairness, Ordering
from fairlead.admit.gates import LedgerGate, PoolGate
from fairlead.admit.queues import Limit, Limits, Queues
from fairlead.config.registry import Registry, make
from fairlead.config.schema import LONGEST_WAIT, Config, FlowSpec, PluginSpec, QueueLimit
from fairlead.fleet.columns import BoolColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.errors import PluginError
from fairlead.model.request import Request
from fairlead.plugins.fairness import DeficitFairness
from fairlead.plugins.guarding import GuardedFairness, GuardedOrdering, GuardedSaturation
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
    _bands(flow, registry, None)(0)  # what cannot be made must stop the start, not the first request of a band
    limits = settings.limits
    queues = Queues(
        _bands(flow, registry, on_plugin_error),
        Limits(total=_limit(limits.total), band=_limit(limits.band), flow=_limit(limits.flow)),
    )
    control = FlowControl(
        queues,
        _gate(flow.saturation, registry, on_plugin_error),
        PairBinder(able_by(config, policy, registry)),
        Times(settings.ttl, settings.no_endpoint_ttl, LONGEST_WAIT),
        window=settings.window,
    )
    return Desk(control, policy.name, settings.target_delay)


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
    def made(priority: int) -> tuple[Fairness, Ordering]:
        fairness: Fairness = DeficitFairness()
        if flow.fairness is not None:
            fairness = make(flow.fairness, registry)
            if _foreign(flow.fairness, registry):
                fairness = GuardedFairness(fairness, report)
        ordering: Ordering = LeastWorkOrdering()
        if flow.ordering is not None:
            ordering = make(flow.ordering, registry)
            if _foreign(flow.ordering, registry):
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


def _foreign(spec: PluginSpec, registry: Registry) -> bool:
    found = registry.find(spec.kind, spec.type)
    return found is not None and found.foreign


def _limit(limit: QueueLimit) -> Limit:
    return Limit(inf if limit.requests is None else limit.requests, inf if limit.bytes is None else limit.bytes)
