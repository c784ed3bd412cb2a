"""Plugins beside the policy: `metricSources`, `parsers` and `flowControl`."""

from collections.abc import Collection
from typing import Any

import msgspec

from fairlead.config.builtins import Kind
from fairlead.config.check import INVALID, struct
from fairlead.config.engines import engine_table
from fairlead.config.plugin_reader import PluginReader, Source
from fairlead.config.problems import Report, describe
from fairlead.config.registry import Registry
from fairlead.config.schema import SECTIONS, FlowSettings, FlowSpec, Metrics, PluginSpec, PolicySpec
from fairlead.plugins.metric_columns import COLUMNS
from fairlead.wire.problem import Problem, shorten

METRIC_SOURCES, PARSERS, FLOW_CONTROL = "metricSources", "parsers", "flowControl"
#: Names in the file that belong here.
KEYS = tuple(key for key in (METRIC_SOURCES, PARSERS, FLOW_CONTROL) if key not in SECTIONS)
FLOW_KINDS: tuple[Kind, ...] = ("fairness", "ordering", "saturation")
FLOW_FIELDS = tuple(field.encode_name for field in msgspec.structs.fields(FlowSettings))


class Extras:
    """Reads the lists from the root of a file."""

    def __init__(self, root: dict[str, Any], report: Report, registry: Registry) -> None:
        self._root = root
        self._report = report
        self._registry = registry
        self._reader = PluginReader(Source({}, {}), report, registry)

    def list(self, kind: Kind, key: str) -> tuple[PluginSpec, ...]:
        node = self._root.get(key)
        return () if node is None else tuple(self._reader.plugins(kind, key, node))

    def provided(self, sources: tuple[PluginSpec, ...]) -> set[str]:
        """Names of the columns that metric sources give."""
        found = [self._registry.find(source.kind, source.type) for source in sources]
        return {name for one in found if one for name in one.cls.provides}

    def flow_control(self) -> FlowSpec | None:
        node = self._root.get(FLOW_CONTROL)
        if FLOW_CONTROL not in self._root or node is None:
            return None
        if not isinstance(node, dict):
            self._report.add((FLOW_CONTROL,), f"expected a mapping, got {describe(node)}")
            return None
        plain = {key: value for key, value in node.items() if key not in FLOW_KINDS}
        settings = struct(FlowSettings, plain, (FLOW_CONTROL,), self._report, siblings=FLOW_KINDS)
        plugins = {
            kind: self._reader.plugin(kind, node[kind], (FLOW_CONTROL, kind))
            for kind in FLOW_KINDS
            if node.get(kind) is not None
        }
        return FlowSpec(settings=FlowSettings() if settings is INVALID else settings, **plugins)


def check_metric_names(policy: PolicySpec, provided: Collection[str], metrics: Metrics, report: Report) -> None:
    """Reports plugins that look at a metric which nobody provides: it would be missing everywhere, silently."""
    known = {*COLUMNS, *provided, *(name for engine in engine_table(metrics).values() for name in engine.extra)}
    for spec in (*policy.filters, *policy.scorers):
        name = getattr(spec.parameters, "metric", None) if spec.type in ("metric", "metric-limit") else None
        if isinstance(name, str) and name not in known:
            line = spec.lines.get("metric") or spec.lines.get("parameters") or spec.lines.get("type", 0)
            hint = f"add it under metrics.engines.{metrics.default_engine}.extra; known: {', '.join(sorted(known))}"
            report.extend([Problem(f"{spec.path}.metric", line, f"unknown metric '{shorten(name)}'", hint)])
