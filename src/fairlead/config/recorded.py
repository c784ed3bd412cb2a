"""The scheduling part of a configuration as plain values, for the journal, and what is made of it again.

Recorded is what was in force, defaults included: a replay under a later version, with other defaults, still is one.
Nothing else of the configuration is recorded.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import structs

from fairlead.config.builtins import Kind
from fairlead.config.extras import BAND_KINDS, BANDS, FLOW_KINDS
from fairlead.config.load import load
from fairlead.config.registry import Registry
from fairlead.config.schema import BandSettings, BandSpec, Config, FlowSettings, FlowSpec, PluginSpec, PolicySpec
from fairlead.model.errors import ConfigError, PluginError


def record(config: Config) -> dict[str, Any]:
    """Plain values, msgpack and JSON can hold them."""
    return {
        "policy": _policy(config.policy),
        "flow_control": None if config.flow_control is None else _flow(config.flow_control),
        "lease_ttl": config.ledger.lease_ttl,
        "staleness": config.metrics.staleness,
    }


def restore(recorded: Any, registry: Registry | None = None) -> Config:
    """A configuration with this scheduling part and no endpoints. Raises `ConfigError` or `PluginError`."""
    registry = registry or Registry()
    base = load("policy: default\n", need_endpoints=False)
    try:
        flow = recorded["flow_control"]
        return structs.replace(
            base,
            policy=_read_policy(recorded["policy"], registry),
            flow_control=None if flow is None else _read_flow(flow, registry),
            ledger=structs.replace(base.ledger, lease_ttl=float(recorded["lease_ttl"])),
            metrics=structs.replace(base.metrics, staleness=float(recorded["staleness"])),
        )
    except (KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
        raise ConfigError(f"the recorded configuration cannot be used: {error}", "$") from None


def changed(config: Config, setting: str) -> Config:
    """The same with one number changed: `SCORER=WEIGHT`, `PLUGIN.PARAMETER=VALUE`, or `PARAMETER=VALUE` of a policy.

    Raises `ConfigError` that says what can be set.
    """
    name, equals, text = setting.partition("=")
    if not equals:
        raise ConfigError(f"expected NAME=VALUE, got {setting!r}", "$")
    plugin, _, parameter = name.strip().rpartition(".")
    policy = config.policy
    found = _changed(policy, plugin, parameter, text.strip())
    if found is None:
        known = ", ".join(_settable(policy)) or "nothing"
        raise ConfigError(f"policy '{policy.name}' has no setting {name.strip()!r}; it has: {known}", "$.policy")
    return structs.replace(config, policy=found)


def _changed(policy: PolicySpec, plugin: str, parameter: str, text: str) -> PolicySpec | None:
    if not plugin and any(spec.name == parameter for spec in policy.scorers):
        scorers = [
            structs.replace(spec, weight=_number(text)) if spec.name == parameter else spec for spec in policy.scorers
        ]
        return structs.replace(policy, scorers=tuple(scorers))
    for field in ("plugin", "picker"):
        spec = getattr(policy, field)
        if spec is not None and plugin in ("", spec.name, "policy") and _has(spec, parameter):
            return structs.replace(policy, **{field: _with(spec, parameter, text)})
    for field in ("scorers", "filters"):
        specs = getattr(policy, field)
        if any(spec.name == plugin and _has(spec, parameter) for spec in specs):
            made = [_with(spec, parameter, text) if spec.name == plugin else spec for spec in specs]
            return structs.replace(policy, **{field: tuple(made)})
    return None


def _settable(policy: PolicySpec) -> list[str]:
    names = [spec.name for spec in policy.scorers]
    for spec in policy.plugins():
        own = "" if spec is policy.plugin else f"{spec.name}."
        names += [f"{own}{field.encode_name}" for field in structs.fields(type(spec.parameters))]
    return names


def _has(spec: PluginSpec, parameter: str) -> bool:
    return any(field.encode_name == parameter for field in structs.fields(type(spec.parameters)))


def _with(spec: PluginSpec, parameter: str, text: str) -> PluginSpec:
    values = msgspec.to_builtins(spec.parameters) | {parameter: text}
    try:
        made = msgspec.convert(values, type(spec.parameters), strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{spec.name}.{parameter}={text}: {error}", "$.policy") from None
    return structs.replace(spec, parameters=made)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{text!r} is no weight", "$.policy") from None


# ---- to plain values ----


def _policy(policy: PolicySpec) -> dict[str, Any]:
    return {
        "name": policy.name,
        "filters": [_plugin(spec) for spec in policy.filters],
        "scorers": [_plugin(spec) for spec in policy.scorers],
        "picker": None if policy.picker is None else _plugin(policy.picker),
        "plugin": None if policy.plugin is None else _plugin(policy.plugin),
    }


def _plugin(spec: PluginSpec) -> dict[str, Any]:
    return {
        "kind": spec.kind,
        "type": spec.type,
        "name": spec.name,
        "weight": spec.weight,
        "parameters": msgspec.to_builtins(spec.parameters),
    }


def _flow(flow: FlowSpec) -> dict[str, Any]:
    return {"settings": msgspec.to_builtins(flow.settings), **_named(flow, FLOW_KINDS), BANDS: _bands(flow)}


def _bands(flow: FlowSpec) -> list[dict[str, Any]]:
    return [{"settings": msgspec.to_builtins(one.settings), **_named(one, BAND_KINDS)} for one in flow.bands]


def _named(of: FlowSpec | BandSpec, kinds: tuple[Kind, ...]) -> dict[str, Any]:
    plugins = {kind: getattr(of, kind) for kind in kinds}
    return {kind: None if spec is None else _plugin(spec) for kind, spec in plugins.items()}


# ---- and back ----


def _read_plugin(values: Mapping[str, Any], registry: Registry) -> PluginSpec:
    kind, type_ = values["kind"], values["type"]
    found = registry.find(kind, type_)
    if found is None:
        raise PluginError(type_, f"is not installed here; the journal's policy uses it as a {kind}")
    parameters = msgspec.convert(values["parameters"], found.params)
    return PluginSpec(kind=kind, type=type_, name=values["name"], weight=float(values["weight"]), parameters=parameters)


def _read_policy(values: Mapping[str, Any], registry: Registry) -> PolicySpec:
    picker, plugin = (
        None if values[key] is None else _read_plugin(values[key], registry) for key in ("picker", "plugin")
    )
    return PolicySpec(
        name=values["name"],
        filters=tuple(_read_plugin(one, registry) for one in values["filters"]),
        scorers=tuple(_read_plugin(one, registry) for one in values["scorers"]),
        picker=picker,
        plugin=plugin,
    )


def _read_flow(values: Mapping[str, Any], registry: Registry) -> FlowSpec:
    settings = msgspec.convert(values["settings"], FlowSettings)
    bands = tuple(
        BandSpec(settings=msgspec.convert(band["settings"], BandSettings), **_read_named(band, BAND_KINDS, registry))
        for band in values.get(BANDS, ())
    )
    return FlowSpec(settings=settings, bands=bands, **_read_named(values, FLOW_KINDS, registry))


def _read_named(values: Mapping[str, Any], kinds: tuple[Kind, ...], registry: Registry) -> dict[str, Any]:
    return {kind: None if values.get(kind) is None else _read_plugin(values[kind], registry) for kind in kinds}
