"""Builds pipelines from a configuration: policy, flow control, other schedulers. For server, simulator and replay."""

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from random import Random
from typing import Any, cast

from msgspec import Struct, structs

from fairlead.config.builtins import ABILITY_FILTERS
from fairlead.config.plugin_reader import read_entry
from fairlead.config.plugins import build_policy, make
from fairlead.config.problems import Report as Problems
from fairlead.config.registry import Registry, takes_filters
from fairlead.config.reload import meaning
from fairlead.config.schema import (
    LONGEST_WAIT,
    Config,
    FlowSpec,
    PluginSpec,
    PolicyEntry,
    PolicySpec,
    QueueLimit,
    SchedulerSettings,
)
from fairlead.core.binding import PairBinder, WaitingRules
from fairlead.core.canary import Canary, CanaryRules
from fairlead.core.clock import Clock
from fairlead.core.errors import ConfigError, PluginError
from fairlead.core.fleet import Fleet
from fairlead.core.flow import Fairness, FlowRule, Limit, Limits, Ordering, Times
from fairlead.core.flow_control import Eviction, FlowControl, FlowController, Gate
from fairlead.core.gates import EarlyShedding, LedgerGate, PoolGate
from fairlead.core.policy import Filter, Policy
from fairlead.core.profile import Profile
from fairlead.core.queues import Queues, Shares
from fairlead.core.remote import BreakerRules, RemotePolicy
from fairlead.core.reports import SharedFleet
from fairlead.core.scheduler import Pipeline
from fairlead.core.scheduling import Build, Scheduling
from fairlead.core.shadow import CaseTaker
from fairlead.core.snapshot import Snapshots
from fairlead.core.tokens import TokenEstimator
from fairlead.plugins.filters.ability import Role
from fairlead.plugins.flow_control import LeastWork, StartTimeFairness
from fairlead.plugins.guarding import GuardedCeiling, GuardedFairness, GuardedOrdering, GuardedSaturation, is_a
from fairlead.plugins.pickers import MaxScore, MaxScoreParams

OnPluginError = Callable[[PluginError], None] | None

#: The names of the schedulers in other processes that decide (shadows only record).
PRIMARY, CANARY = "scheduler", "canary"


def schedulers(config: Config) -> dict[str, SchedulerSettings]:
    """The settings of the schedulers in other processes that decide, without shadows, by name."""
    by_role = {PRIMARY: config.scheduler} if config.scheduler.address else {}
    if config.canary.scheduler is not None and config.canary.percent:
        by_role[CANARY] = config.canary.scheduler
    return by_role


#: So many policies are remembered, to explain what they decided before they were replaced.
_KEPT = 8


class _Built(Struct, frozen=True):
    config: Config
    scheduling: Scheduling
    #: The policy that decides the canary's share, if the canary is a policy.
    canary_policy: Policy | None


class SchedulingBuilder:
    """Builds successive configurations; the `Build` of a pipeline.

    What two successive configurations have in common stays the same object, with everything it has learned: the policy,
    a scheduler's connection, counts and breaker. A configuration that cannot be built changes nothing.

    `on_answer`: for the name of a scheduler in another process, returns the function that is called with the duration
    of each of its answers, in seconds.
    """

    def __init__(
        self,
        on_plugin_error: OnPluginError = None,
        registry: Registry | None = None,
        on_answer: Callable[[str], Callable[[float], object]] = lambda name: lambda seconds: None,
    ) -> None:
        self._report = on_plugin_error
        self._registry = registry
        self._on_answer = on_answer
        self._last: _Built | None = None
        #: What makes a fresh copy of each policy that decided, by its name, the newest last.
        self._makers: dict[str, Callable[[], Policy]] = {}

    def __call__(self, config: Config) -> Scheduling:
        """Build a configuration. Raises `PluginError`, or `ConfigError` if the configuration was never checked."""
        last = self._last
        if last is not None and meaning(last.config.policy) == meaning(config.policy):
            base, able = last.scheduling.base, last.scheduling.able
        else:
            base = build_policy(config, self._report, self._registry)
            able = able_by(config, base, self._registry, self._report)
        canary, of_canary = self._canary_policy(config, last), canary_of(config, self._registry)
        ttl = config.ledger.lease_ttl
        built = Scheduling(policy=base, base=base, able=able, waiting=able, flow=None, lease_ttl=ttl)
        remotes = {name: self._remote(name, built, config, last) for name in schedulers(config)}
        if last is not None and base is last.scheduling.base and last.config.shadows == config.shadows:
            shadows, on_trial = last.scheduling.shadows, last.scheduling.on_trial
        else:
            shadows, on_trial = self._shadows(config)
        label, waiting = "".join(of_canary), able
        policy = self._deciding(config, remotes.get(PRIMARY, base), remotes.get(CANARY, canary or base), label)
        if canary is not None and isinstance(policy, Canary):
            waiting = CanaryRules(policy, able_by(of_canary[label], canary, self._registry, self._report), able)
        flow = build_flow_controller(config, base, self._report, self._registry, waiting)
        if flow is not None and last is not None and last.scheduling.flow is not None:
            flow = last.scheduling.flow
        built = structs.replace(
            built, policy=policy, waiting=waiting, flow=flow, remotes=remotes, shadows=shadows, on_trial=on_trial
        )
        self._last = _Built(config, built, canary)
        for name, each in [*of_canary.items(), (base.name, config)]:
            self._keep(name, partial(build_policy, each, registry=self._registry))
        return built

    def _keep(self, name: str, make: Callable[[], Policy]) -> None:
        self._makers.pop(name, None)
        self._makers[name] = make
        if len(self._makers) > _KEPT:
            del self._makers[next(iter(self._makers))]

    @property
    def scheduling(self) -> Scheduling:
        """The result of the last build."""
        assert self._last is not None, "something was built"
        return self._last.scheduling

    def fresh(self, name: str) -> Policy:
        """A new copy of the policy with this name that has learned nothing, for explaining decisions: as it was last
        configured, also if another one has replaced it. The configured policy if none of the last ones had the name."""
        assert self._last is not None, "something was built"
        return self._makers.get(name, self._makers[self._last.scheduling.base.name])()

    def _canary_policy(self, config: Config, last: _Built | None) -> Policy | None:
        canary = config.canary
        if not (canary.policy and canary.percent):
            return None
        if last is not None and last.canary_policy is not None and last.config.canary.policy == canary.policy:
            return last.canary_policy
        return build_entry(canary.policy, config, self._report, self._registry)

    def _deciding(self, config: Config, primary: Policy, canary: Policy, label: str) -> Policy:
        settings, last = config.canary, self._last
        if not (settings.percent and (settings.policy or settings.scheduler is not None)):
            return primary
        before = last.scheduling.policy if last is not None and last.config.canary == settings else None
        if isinstance(before, Canary) and before.primary is primary and before.canary is canary:
            return before
        return Canary(primary, canary, settings.percent, self._report, label)

    def _remote(self, name: str, built: Scheduling, config: Config, last: _Built | None) -> RemotePolicy:
        settings = schedulers(config)[name]
        if last is not None and schedulers(last.config).get(name) == settings:
            before = last.scheduling.remotes[name]
            computes = computes_by(config, self._registry, self._report)
            return before if before.fallback is built.base else before.behind(built.base, built.able, computes)
        rules = BreakerRules(failures=settings.breaker.failures, cooldown=settings.breaker.cooldown)
        answered, computes = self._on_answer(name), computes_by(config, self._registry, self._report)
        return RemotePolicy(name, built.base, built.able, settings.budget, rules, answered, computes)

    def _shadows(self, config: Config) -> tuple[CaseTaker | None, dict[str, Policy]]:
        settings = config.shadows
        on_trial = {
            shadow.label: build_entry(shadow.policy, config, registry=self._registry)
            for shadow in settings.policies
            if shadow.policy
        }
        return CaseTaker(settings.sample, Random()) if settings.policies and settings.sample else None, on_trial


def given(policy: Policy) -> Build:
    """A `Build` that uses an existing policy instead of the configured one."""

    def build(config: Config) -> Scheduling:
        flow = build_flow_controller(config, policy)
        able, ttl = able_by(config, policy), config.ledger.lease_ttl
        return Scheduling(policy=policy, base=policy, able=able, waiting=able, flow=flow, lease_ttl=ttl)

    return build


def build_pipeline(
    config: Config,
    clock: Clock,
    rng: Random,
    *,
    build: Build | None = None,
    fleet: Fleet | None = None,
    on_plugin_error: OnPluginError = None,
    registry: Registry | None = None,
    snapshots: bool = False,
) -> Pipeline:
    """The pipeline of a configuration. Later configurations reach it as `Reconfigured`, and `build` builds them too.

    `snapshots`: record what each decision is made from. Raises `PluginError` or `ConfigError`.
    """
    build = build or SchedulingBuilder(on_plugin_error, registry)
    scheduling = build(config)
    fleet = fleet or Fleet(lease_ttl=config.ledger.lease_ttl, staleness=config.metrics.staleness)
    if scheduling.flow is not None and isinstance(fleet, SharedFleet):
        fleet.reports.follow(scheduling.flow.flow)
    return Pipeline(
        clock,
        rng,
        fleet,
        scheduling.policy,
        TokenEstimator(),
        on_plugin_error,
        scheduling.flow,
        remotes=scheduling.remotes or None,
        shadows=scheduling.shadows,
        snapshot=Snapshots() if snapshots else None,
        build=build,
        alternatives=config.ext_proc.max_endpoints - 1,
        drawn_from=scheduling.able,
    )


def build_entry(
    node: PolicyEntry, config: Config, on_plugin_error: OnPluginError = None, registry: Registry | None = None
) -> Policy:
    """A policy named in `canary` or `shadows`. Raises `PluginError`, or `ConfigError` if it was never checked."""
    registry = registry or Registry()
    return build_policy(config.model_copy(update={"policy": named_policy(node, registry)}), on_plugin_error, registry)


def canary_of(config: Config, registry: Registry | None = None) -> dict[str, Config]:
    """The configuration of a canary's policy, by the name under which its decisions are recorded: the primary may be a
    policy of the same name. Empty if no policy is a canary. Raises what `build_entry` raises."""
    canary = config.canary
    if not (canary.policy and canary.percent):
        return {}
    spec = named_policy(canary.policy, registry or Registry())
    name = spec.plugin.name if spec.plugin is not None else spec.name
    return {f"{CANARY}:{name}": config.model_copy(update={"policy": spec})}


def named_policy(node: PolicyEntry, registry: Registry) -> PolicySpec:
    """What `build_entry` builds. Raises the same."""
    problems = Problems(lambda place: 0)
    spec = read_entry(node, ("policy",), problems, registry)
    if spec is None:
        raise ConfigError("; ".join(str(problem) for problem in problems.problems), "$.policy")
    return spec


# `flowControl` of a configuration → the flow controller.


def build_flow_controller(
    config: Config,
    policy: Policy,
    on_plugin_error: OnPluginError = None,
    registry: Registry | None = None,
    rules: WaitingRules | None = None,
) -> FlowController | None:
    """The flow controller; `None` if flow control is off. `rules`: for requests that wait; `None` = the policy's.
    Raises `PluginError` if a plugin cannot be built."""
    flow = config.flow_control
    if flow is None or not flow.settings.enabled:
        return None
    registry = registry or Registry()
    settings = flow.settings
    priorities = {0, *(band.settings.priority for band in flow.bands)}
    for priority in priorities:
        _bands(flow, registry, None)(priority)  # a plugin that cannot be built must stop the start
    queues = Queues(_bands(flow, registry, on_plugin_error), _limits(flow))
    shedding, eviction = settings.early_shedding, settings.eviction
    control = FlowControl(
        queues,
        _gate(flow.saturation, registry, on_plugin_error),
        PairBinder(rules or able_by(config, policy, registry, on_plugin_error)),
        _times(flow),
        window=settings.window,
        shares=Shares({band.settings.priority: band.settings.share for band in flow.bands}),
        ceiling=_guarded(flow.ceiling, registry, GuardedCeiling, on_plugin_error) if flow.ceiling else None,
        shedding=EarlyShedding(shedding.power, shedding.scale) if shedding else None,
        drains=flow.implied,
        priorities=priorities,
    )
    return FlowController(control, policy.name, settings.target_delay, Eviction(eviction.after) if eviction else None)


def _limits(flow: FlowSpec) -> Limits:
    limits = flow.settings.limits
    return Limits(
        total=_limit(limits.total),
        band=_limit(limits.band),
        flow=_limit(limits.flow),
        bands={band.settings.priority: _limit(band.settings.limits) for band in flow.bands if band.settings.limits},
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
    bands = {band.settings.priority: band.settings.ttl for band in flow.bands if band.settings.ttl}
    return Times(settings.ttl, settings.no_endpoint_ttl, LONGEST_WAIT, bands)


def able_by(
    config: Config, policy: Policy, registry: Registry | None = None, on_plugin_error: OnPluginError = None
) -> WaitingRules:
    """The rules for binding a waiting request: which endpoints the filters of `policy`, the configured one, allow, and
    what it costs there."""
    chain = policy if isinstance(policy, Profile) else _chain(policy.name, _filters(config.policy, registry))
    return WaitingRules(policy, chain, on_plugin_error)


def computes_by(
    config: Config, registry: Registry | None = None, on_plugin_error: OnPluginError = None
) -> WaitingRules:
    """The rules for the endpoint that computes a prompt for another one: the filters of the policy without roles."""
    filters = [plugin for plugin in _filters(config.policy, registry) if not is_a(plugin, Role)]
    chain = _chain(config.policy.name, filters)
    return WaitingRules(chain, chain, on_plugin_error)


def _filters(policy: PolicySpec, registry: Registry | None) -> list[Filter]:
    """The filters of the policy; the built-in ones if it is a plugin that takes no filters."""
    registry, specs = registry or Registry(), policy.filters
    if policy.plugin is not None and not takes_filters(registry, policy.plugin.type):
        types = (entry["type"] for entry in ABILITY_FILTERS)
        specs = tuple(PluginSpec(kind="filter", type=name, name=name, given=None) for name in types)
    return [cast(Filter, make(spec, registry)) for spec in specs]


def _chain(name: str, filters: Sequence[Filter]) -> Profile:
    return Profile(name, filters, [], MaxScore(MaxScoreParams()))


def _bands(flow: FlowSpec, registry: Registry, report: OnPluginError) -> Callable[[int], tuple[Fairness, Ordering]]:
    own = {band.settings.priority: band for band in flow.bands}

    def made(priority: int) -> tuple[Fairness, Ordering]:
        band = own.get(priority)
        shares = (band.fairness if band else None) or flow.fairness
        ranks = (band.ordering if band else None) or flow.ordering
        fairness = _guarded(shares, registry, GuardedFairness, report) if shares else StartTimeFairness()
        ordering = _guarded(ranks, registry, GuardedOrdering, report) if ranks else LeastWork()
        return fairness, ordering

    return made


def _gate(spec: PluginSpec | None, registry: Registry, report: OnPluginError) -> Gate:
    if spec is None:
        return LedgerGate()
    plugin = _guarded(spec, registry, GuardedSaturation, report)
    return PoolGate(plugin.name, plugin.level)


def _guarded(spec: PluginSpec, registry: Registry, guard: Callable[..., Any], report: OnPluginError) -> Any:
    """Build a plugin. An installed (not built-in) plugin is wrapped in `guard`, because it may raise."""
    made, plugin = make(spec, registry), registry.find(spec.kind, spec.type)
    return guard(made, report) if plugin is not None and plugin.foreign else made


def _limit(limit: QueueLimit) -> Limit:
    return Limit(inf if limit.requests is None else limit.requests, inf if limit.bytes is None else limit.bytes)
