"""The scheduling part of a configuration as plain values, for the journal, and the way back.

The values in force are recorded, including defaults, so that a replay also works under a later version with other
defaults. No other part of the configuration is recorded.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import structs

from fairlead.compat.load import load
from fairlead.config.builtins import Kind, a_kind
from fairlead.config.check import fields, plain, read
from fairlead.config.plugin_reader import BAND_KINDS, BANDS, FLOW_KINDS
from fairlead.config.problems import Report
from fairlead.config.registry import Registry
from fairlead.config.schema import (
    BandSettings,
    BandSpec,
    Canary,
    Config,
    FlowSettings,
    FlowSpec,
    PluginSpec,
    PolicySpec,
    Section,
    implied_flow_control,
)
from fairlead.config.yaml import Node, scalar
from fairlead.core.errors import ConfigError, PluginError


def record(config: Config) -> dict[str, Any]:
    """The scheduling part as plain values for msgpack and JSON."""
    canary = config.canary
    return {
        "policy": _plain(config.policy),
        "canary": {"policy": canary.policy, "percent": canary.percent} if canary.policy else {},
        "flow_control": _plain(config.flow_control),
        "lease_ttl": config.ledger.lease_ttl,
        "staleness": config.metrics.staleness,
        "beside": list(beside(config)),
    }


def beside(config: Config) -> tuple[str, ...]:
    """What influenced decisions besides the recorded policy and events, in words. A replay does not have it."""
    causes = []
    if config.kv_events.enabled:
        causes.append("KV events of the engines counted too, which are not in the journal")
    if config.scheduler.address or (config.canary.scheduler is not None and config.canary.percent):
        causes.append("a scheduler in another process decided too")
    return tuple(causes)


def restore(recorded: Any) -> Config:
    """A configuration with this scheduling part and no endpoints. Raises `ConfigError` or `PluginError`."""
    registry = Registry()
    base = load("policy: default\n", need_endpoints=False)
    try:
        flow = recorded["flow_control"]
        return base.model_copy(
            update={
                "policy": _read_policy(recorded["policy"], registry),
                "canary": Canary.model_validate(recorded.get("canary", {})),
                "flow_control": None if flow is None else _read_flow(flow, registry),
                "ledger": base.ledger.model_copy(update={"lease_ttl": float(recorded["lease_ttl"])}),
                "metrics": base.metrics.model_copy(update={"staleness": float(recorded["staleness"])}),
            }
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"the recorded configuration cannot be used: {error}", "$") from None


def with_policy(config: Config, source: Config) -> Config:
    """The recorded configuration with policy and canary of `source`, and its flow control if its text mentions that.
    Otherwise flow control stays as recorded, unless it was that which the recorded policy implies, or the policy
    cannot be combined with it."""
    flow = source.flow_control
    if (flow is None or flow.implied) and not source.policy.splits:
        implied = implied_flow_control(config.policy, config)
        if _plain(config.flow_control) != _plain(implied):
            flow = config.flow_control
    return config.model_copy(update={"policy": source.policy, "canary": source.canary, "flow_control": flow})


def changed(config: Config, setting: str) -> Config:
    """The configuration with one number changed: `SCORER=WEIGHT`, `PLUGIN.PARAMETER=VALUE`, or `PARAMETER=VALUE` of a
    policy.

    Raises `ConfigError` that lists what can be set.
    """
    name, equals, text = setting.partition("=")
    if not equals:
        raise ConfigError(f"expected NAME=VALUE, got {setting!r}", "$")
    plugin, _, parameter = name.strip().rpartition(".")
    policy = config.policy
    policy_spec = _changed(policy, plugin, parameter, text.strip())
    if policy_spec is None:
        known = ", ".join(_settable(policy)) or "nothing"
        raise ConfigError(f"policy '{policy.name}' has no setting {name.strip()!r}; it has: {known}", "$.policy")
    return config.model_copy(update={"policy": policy_spec})


def _changed(policy: PolicySpec, plugin: str, parameter: str, text: str) -> PolicySpec | None:
    if not plugin and any(spec.name == parameter for spec in policy.scorers):
        scorers = [
            structs.replace(spec, weight=_number(text)) if spec.name == parameter else spec for spec in policy.scorers
        ]
        return structs.replace(policy, scorers=tuple(scorers))
    parts = structs.asdict(policy)
    for field in ("plugin", "picker"):
        spec = parts[field]
        if spec is not None and plugin in ("", spec.name, "policy") and _has(spec, parameter):
            return structs.replace(policy, **{field: _with(spec, parameter, text)})
    for field in ("scorers", "filters"):
        specs = parts[field]
        if any(spec.name == plugin and _has(spec, parameter) for spec in specs):
            made = [_with(spec, parameter, text) if spec.name == plugin else spec for spec in specs]
            return structs.replace(policy, **{field: tuple(made)})
    return None


def _settable(policy: PolicySpec) -> list[str]:
    names = [spec.name for spec in policy.scorers]
    for spec in policy.plugins():
        own = "" if spec is policy.plugin else f"{spec.name}."
        names += [f"{own}{name}" for name in fields(type(spec.parameters))]
    return names


def _has(spec: PluginSpec, parameter: str) -> bool:
    return parameter in fields(type(spec.parameters))


def _with(spec: PluginSpec, parameter: str, text: str) -> PluginSpec:
    values = plain(spec.parameters) | {parameter: scalar(Node(text, 0, plain=True))}
    report = Report(lambda place: 0)
    made = read(type(spec.parameters), values, (), report)
    if made is None:
        message = report.problems[0].message
        raise ConfigError(f"{spec.name}.{parameter}={text}: {message}", "$.policy")
    return structs.replace(spec, given=made)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{text!r} is no weight", "$.policy") from None


# ---- to plain values ----


def _plain(value: Any) -> Any:
    """A spec with all of its parts as plain values. Whether flow control is implied is left out."""
    if isinstance(value, PluginSpec):
        return {
            "kind": value.kind,
            "type": value.type,
            "name": value.name,
            "weight": value.weight,
            "parameters": plain(value.parameters),
        }
    if isinstance(value, PolicySpec | FlowSpec | BandSpec):
        return {key: _plain(part) for key, part in structs.asdict(value).items() if key != "implied"}
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return plain(value) if isinstance(value, Section) else value


# ---- and back ----


def _read_plugin(values: Mapping[str, Any], registry: Registry) -> PluginSpec:
    kind, type_ = values["kind"], values["type"]
    registered = registry.find(kind, type_)
    if registered is None:
        raise PluginError(type_, f"is not installed here; the journal's policy uses it as {a_kind(kind)}")
    parameters = registered.params.model_validate(values["parameters"])
    return PluginSpec(kind=kind, type=type_, name=values["name"], weight=float(values["weight"]), given=parameters)


def _read_policy(values: Mapping[str, Any], registry: Registry) -> PolicySpec:
    picker, plugin = (
        None if values[key] is None else _read_plugin(values[key], registry) for key in ("picker", "plugin")
    )
    return PolicySpec(
        name=values["name"],
        filters=tuple(_read_plugin(spec, registry) for spec in values["filters"]),
        scorers=tuple(_read_plugin(spec, registry) for spec in values["scorers"]),
        picker=picker,
        plugin=plugin,
    )


def _read_flow(values: Mapping[str, Any], registry: Registry) -> FlowSpec:
    settings = FlowSettings.model_validate(values["settings"])
    bands = tuple(
        BandSpec(settings=BandSettings.model_validate(band["settings"]), **_read_named(band, BAND_KINDS, registry))
        for band in values.get(BANDS, ())
    )
    return FlowSpec(settings=settings, bands=bands, **_read_named(values, FLOW_KINDS, registry))


def _read_named(values: Mapping[str, Any], kinds: tuple[Kind, ...], registry: Registry) -> dict[str, Any]:
    return {kind: None if values.get(kind) is None else _read_plugin(values[kind], registry) for kind in kinds}
