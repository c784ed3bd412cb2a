"""Policies that are named inside `canary` and `shadows`: checked with the file, made when they are needed."""

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from fairlead.config.choosers import Canary, PolicyEntry, Shadows
from fairlead.config.plugin_reader import Source
from fairlead.config.policies import read_policy
from fairlead.config.problems import Report
from fairlead.config.registry import Registry, build_policy
from fairlead.config.schema import Config, PolicySpec
from fairlead.model.errors import ConfigError, PluginError
from fairlead.schedule.framework import Policy
from fairlead.wire.problem import Place


def entry(node: PolicyEntry, place: Place, report: Report, registry: Registry) -> PolicySpec | None:
    """What `policy: node` means; `None` when something is wrong with it, which the report then says."""
    return read_policy(Source({"policy": node}, {"policy": place}), report, registry)


def check_choosers(sections: dict[str, Any], report: Report, registry: Registry) -> None:
    canary: Canary = sections["canary"]
    shadows: Shadows = sections["shadows"]
    if canary.policy:
        entry(canary.policy, ("canary", "policy"), report, registry)
    for i, shadow in enumerate(shadows.policies):
        if shadow.policy:
            entry(shadow.policy, ("shadows", "policies", i, "policy"), report, registry)


def build_entry(
    node: PolicyEntry,
    config: Config,
    on_plugin_error: Callable[[PluginError], None] | None = None,
    registry: Registry | None = None,
) -> Policy:
    """A policy named in `canary` or `shadows`. Raises `PluginError`, or `ConfigError` where it was never checked."""
    registry = registry or Registry()
    report = Report(lambda place: 0)
    spec = entry(node, ("policy",), report, registry)
    if spec is None:
        raise ConfigError("; ".join(str(problem) for problem in report.problems), "$.policy")
    return build_policy(replace(config, policy=spec), on_plugin_error, registry)
