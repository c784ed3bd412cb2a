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
from fairlead.config.schema import (
    SECTIONS,
    BandSettings,
    BandSpec,
    FlowSettings,
    FlowSpec,
    Metrics,
    PluginSpec,
    PolicySpec,
    Section,
)
from fairlead.plugins.metric_columns import COLUMNS
from fairlead.wire.problem import Place, Problem, shorten

METRIC_SOURCES, PARSERS, FLOW_CONTROL = "metricSources", "parsers", "flowControl"
#: Names in the file that belong here.
KEYS = tuple(key for key in (METRIC_SOURCES, PARSERS, FLOW_CONTROL) if key not in SECTIONS)
FLOW_KINDS: tuple[Kind, ...] = ("fairness", "ordering", "saturation", "ceiling")
BAND_KINDS: tuple[Kind, ...] = ("fairness", "ordering")
BANDS = "bands"
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
        settings, plugins = self._mixed(FlowSettings, node, (FLOW_CONTROL,), FLOW_KINDS, BANDS)
        bands = self._bands(node.get(BANDS))
        return FlowSpec(settings=FlowSettings() if settings is INVALID else settings, bands=bands, **plugins)

    def _mixed(
        self, kind: type[Section], node: dict[str, Any], at: Place, kinds: tuple[Kind, ...], *others: str
    ) -> Any:
        """A mapping of settings, plugins of `kinds` and `others`."""
        plain = {key: value for key, value in node.items() if key not in (*kinds, *others)}
        settings = struct(kind, plain, at, self._report, siblings=(*kinds, *others))
        given = [one for one in kinds if node.get(one) is not None]
        return settings, {one: self._reader.plugin(one, node[one], (*at, one)) for one in given}

    def _bands(self, node: object) -> tuple[BandSpec, ...]:
        at: Place = (FLOW_CONTROL, BANDS)
        if not isinstance(node, list | None):
            self._report.add(at, f"expected a list, got {describe(node)}")
            return ()
        found: dict[int, BandSpec] = {}
        for i, entry in enumerate(node or ()):
            if not isinstance(entry, dict):
                self._report.add((*at, i), f"expected a mapping, got {describe(entry)}")
                continue
            settings, plugins = self._mixed(BandSettings, entry, (*at, i), BAND_KINDS)
            if settings is INVALID:
                continue
            if settings.priority in found:
                self._report.add((*at, i, "priority"), f"the band of priority {settings.priority} is there already")
            found[settings.priority] = BandSpec(settings=settings, **plugins)
        if sum(band.settings.share for band in found.values()) > 1.0:
            self._report.add(at, "the shares of all bands must be at most 1 together")
        return tuple(found.values())


def check_metric_names(policy: PolicySpec, provided: Collection[str], metrics: Metrics, report: Report) -> None:
    """Reports plugins that look at a metric which nobody provides: it would be missing everywhere, silently."""
    known = {*COLUMNS, *provided, *(name for engine in engine_table(metrics).values() for name in engine.extra)}
    for spec in (*policy.filters, *policy.scorers):
        name = getattr(spec.parameters, "metric", None) if spec.type in ("metric", "metric-limit") else None
        if isinstance(name, str) and name not in known:
            line = spec.lines.get("metric") or spec.lines.get("parameters") or spec.lines.get("type", 0)
            hint = f"add it under metrics.engines.{metrics.default_engine}.extra; known: {', '.join(sorted(known))}"
            report.extend([Problem(f"{spec.path}.metric", line, f"unknown metric '{shorten(name)}'", hint)])
