"""A file (or text) → a `Config`, or every problem it has."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from fairlead.config import kv_events, yamltree
from fairlead.config.check import INVALID, check, struct
from fairlead.config.choosers import CHOOSERS
from fairlead.config.choosing import check_choosers
from fairlead.config.endpoints import check_file, read_source
from fairlead.config.engines import check_engines, note_unknown_engines
from fairlead.config.epp import document as epp
from fairlead.config.epp.locate import ROUTER, Located, in_values, is_document
from fairlead.config.epp.translate import FIELDS as DOCUMENT_FIELDS
from fairlead.config.epp.translate import Translation, translate
from fairlead.config.extras import FLOW_CONTROL, METRIC_SOURCES, PARSERS, Extras, check_metric_names
from fairlead.config.extras import KEYS as EXTRA_KEYS
from fairlead.config.files import read_bytes
from fairlead.config.kube import check_kubernetes, overlaid
from fairlead.config.plugin_reader import Source
from fairlead.config.policies import KEYS, read_policy
from fairlead.config.problems import InvalidConfig, Report, describe
from fairlead.config.registry import Registry, check_made
from fairlead.config.schema import (
    SECTIONS,
    Als,
    Config,
    EndpointSource,
    ExtProc,
    FlowSpec,
    Gateway,
    Metrics,
    Models,
    PolicySpec,
    Seed,
)
from fairlead.config.tokens import check_tokens, located
from fairlead.wire.plain_yaml import Tree
from fairlead.wire.problem import Place, Problem

#: Where the scheduling part may stand instead: the values of the extension's Helm chart.
CHART = "inferenceExtension"
CUSTOM = "pluginsCustomConfig"
FIELDS = (*KEYS, *EXTRA_KEYS, *SECTIONS, "endpoints", "seed", CHART)

#: The policy that gives a request two endpoints; the queue gives it one.
SPLITTING = "prefill-decode"
#: The scraper repeats an idle endpoint's unchanged page once in this many seconds.
REPEAT = 1.0
_IN_DOCUMENT = f"it belongs to a file with kind: {epp.KIND}"
#: What may stand beside the fields of another picker's configuration.
BESIDE = (*SECTIONS, METRIC_SOURCES, PARSERS, "endpoints", "seed")
_NO_ENDPOINTS = "list them under endpoints:, name a file: there, or a pool: under kubernetes:"
_NO_DISCOVERY = "add endpoints: or kubernetes: {pool: NAME}, or a file-discovery plugin and dataLayer.discovery"


__all__ = ["FIELDS", "examine", "load", "problems", "read_bytes"]


def load(
    source: Path | str,
    *,
    need_endpoints: bool = True,
    registry: Registry | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Config:
    """Read a file (`Path`) or a text (`str`), YAML or JSON.

    Raises `InvalidConfig` (a `ConfigError`) with all problems, or `PluginError` when the only thing wrong is that an
    installed plugin cannot be loaded. `need_endpoints=False` accepts a configuration without endpoints.
    `flags`: values that count before those of the file, in its shape.
    """
    config, report = _read(source, need_endpoints, registry, flags=flags or {})
    if config is None:
        if len(report.plugin_errors) == len(report.problems):
            raise report.plugin_errors[0]
        raise InvalidConfig(report.problems, str(source) if isinstance(source, Path) else "")
    return config


def problems(source: Path | str, *, need_endpoints: bool = True, registry: Registry | None = None) -> list[Problem]:
    """All that is wrong; empty for a configuration that loads. Raises `ConfigError` when the file cannot be read."""
    return _read(source, need_endpoints, registry)[1].problems


def examine(source: Path, registry: Registry | None = None) -> tuple[Config | None, Report]:
    """As `load`, and further: plugins are made and an endpoints file is read, with what is wrong there in the report.

    A configuration of the reference picker need not name endpoints: it usually takes them from Kubernetes.
    """
    return _read(source, True, registry, thorough=True)


def _read(
    source: Path | str,
    need_endpoints: bool,
    registry: Registry | None,
    thorough: bool = False,
    flags: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Config | None, Report]:
    document = yamltree.parse(read_bytes(source) if isinstance(source, Path) else source)
    report = Report(document.tree.line)
    report.extend(document.problems)
    if document.value is None and document.problems:
        return None, report
    root = {} if document.value is None else document.value
    if not isinstance(root, dict):
        report.add((), f"expected a mapping, got {describe(root)}")
        return None, report
    base = source.absolute().parent if isinstance(source, Path) else None
    name = str(source) if isinstance(source, Path) else ""
    root = overlaid(root, flags)
    assembly = _Assembly(root, document.tree, report, base, registry or Registry(), thorough)
    config = assembly.config(name, need_endpoints)
    report.close()
    if config is not None and flags:
        config = msgspec.structs.replace(config, flags=dict(flags))
    return (None if report.problems else config), report


class _Assembly:
    """One pass over the root mapping."""

    def __init__(
        self,
        root: dict[str, Any],
        tree: Tree,
        report: Report,
        base: Path | None,
        registry: Registry,
        thorough: bool = False,
    ) -> None:
        self._root = root
        self._tree = tree
        self._report = report
        self._base = base
        self._registry = registry
        self._thorough = thorough
        self._translation: Translation | None = None

    def config(self, source: str, need_endpoints: bool) -> Config | None:
        policy = self._policy()
        # In a document of the reference `flowControl` is the reference's.
        keys = [key for key in EXTRA_KEYS if key in self._root and not (self._translation and key in DOCUMENT_FIELDS)]
        extras = Extras({key: self._root[key] for key in keys}, self._report, self._registry)
        sources = extras.list("metric-source", METRIC_SOURCES)
        parsers = extras.list("parser", PARSERS)
        flow_control = self._translation.flow if self._translation else extras.flow_control()
        sections = {key: self._section(key) for key in SECTIONS}
        self._resolve(sections)
        check_engines(sections["metrics"], ("metrics",), self._report)
        check_tokens(sections["tokens"], self._report)
        kv_events.check_kv_events(sections["kvEvents"], self._report)
        named = [getattr(one.parameters, "cache_indexer_url", "") for one in (policy.scorers if policy else ())]
        sections["kvEvents"] = kv_events.asked_elsewhere(sections["kvEvents"], named, self._report)
        if policy is not None:
            check_metric_names(policy, extras.provided(sources), sections["metrics"], self._report)
        endpoints = self._endpoints(need_endpoints and not sections["kubernetes"].on)
        if not self._report.problems:  # or the entries are not where they stand in the file
            note_unknown_engines(endpoints.static, sections["metrics"], ("endpoints",), self._report)
        check_kubernetes(sections["kubernetes"], bool(endpoints.static or endpoints.file), self._report)
        check_choosers(sections, self._report, self._registry)
        self._check_splitting(policy, flow_control)
        if self._thorough:
            beside = (*sources, *parsers, *(flow_control.plugins() if flow_control else ()))
            check_made((*(policy.plugins() if policy else ()), *beside), self._registry, self._report)
            self._check_endpoints_file(endpoints.file, sections["metrics"])
        seed = check(Seed | None, self._root.get("seed"), ("seed",), self._report)
        if policy is None or self._report.problems:
            return None
        return Config(
            policy=policy,
            metric_sources=sources,
            parsers=parsers,
            flow_control=flow_control,
            gateway=sections["gateway"],
            ext_proc=sections["extProc"],
            als=sections["als"],
            endpoints=endpoints,
            metrics=sections["metrics"],
            admin=sections["admin"],
            ledger=sections["ledger"],
            parsing=sections["parsing"],
            inspect=sections["inspect"],
            models=sections["models"],
            kubernetes=sections["kubernetes"],
            **{key: sections[key] for key in CHOOSERS},
            headers=sections["headers"],
            log=sections["log"],
            journal=sections["journal"],
            tokens=located(sections["tokens"], self._base),
            kv_events=kv_events.located(sections["kvEvents"], self._base),
            tracing=sections["tracing"],
            seed=seed,
            source=source,
            notes=tuple(self._report.notes),
        )

    def _check_splitting(self, policy: PolicySpec | None, flow_control: FlowSpec | None) -> None:
        plugin = policy.plugin if policy else None
        if flow_control and flow_control.settings.enabled and plugin and plugin.type == SPLITTING:
            hint = "take another policy, or leave flowControl out"
            self._report.add((FLOW_CONTROL,), f"requests that wait cannot be split as '{SPLITTING}' does it", hint)

    def _check_endpoints_file(self, file: str, metrics: Metrics) -> None:
        if file:
            key = ("endpoints", "file") if "endpoints" in self._root else ("dataLayer", "discovery")
            check_file(file, key, self._report, metrics)

    def _policy(self) -> PolicySpec | None:
        """From a configuration of the reference picker, wherever it stands, or from our own fields."""
        if is_document(self._root):
            for key in self._root:
                if key not in (*DOCUMENT_FIELDS, *BESIDE):
                    self._report.unknown((key,), "field", key, (*DOCUMENT_FIELDS, *BESIDE))
            values = {key: value for key, value in self._root.items() if key in DOCUMENT_FIELDS}
            return self._foreign(Located(values, self._report))
        located = in_values(self._root, self._tree, self._report)
        taken = {located.place[0]} if located else {ROUTER} if ROUTER in self._root else set()
        known = BESIDE if taken else FIELDS
        for key in self._root:
            if key not in known and key not in taken:
                self._report.unknown((key,), "field", key, known, _IN_DOCUMENT if key in DOCUMENT_FIELDS else "")
        if located is not None:
            for key in located.values:
                if key not in DOCUMENT_FIELDS:
                    located.report.unknown((key,), "field", key, DOCUMENT_FIELDS)
            policy = self._foreign(located)
            self._report.take(located.report)
            return policy
        if taken:
            self._report.add((ROUTER,), f"no {epp.KIND} in it", "it is expected under epp.pluginsCustomConfig")
            return None
        return read_policy(self._scheduling(), self._report, self._registry)

    def _foreign(self, located: Located) -> PolicySpec | None:
        found = translate(located.values, located.report, self._registry, self._base)
        self._translation = found
        return found.policy

    def _scheduling(self) -> Source:
        """The keys of the scheduling part, from the top or from under the chart's values."""
        source = Source({k: v for k, v in self._root.items() if k in KEYS}, {k: (k,) for k in self._root if k in KEYS})
        chart = self._root.get(CHART)
        if chart is None:
            return source
        if not isinstance(chart, dict):
            self._report.add((CHART,), f"expected a mapping, got {describe(chart)}")
            return source
        for key in chart:
            if key != CUSTOM and CUSTOM in chart:
                self._report.note((CHART, key), "belongs to the Helm chart; it has no effect here")
            elif key != CUSTOM:
                self._report.unknown((CHART, key), "field", key, [CUSTOM])
        self._merge(chart.get(CUSTOM), (CHART, CUSTOM), source)
        return source

    def _merge(self, custom: object, place: Place, into: Source) -> None:
        if custom is None:
            return
        if not isinstance(custom, dict):
            self._report.add(place, f"expected a mapping, got {describe(custom)}")
            return
        for key, value in custom.items():
            if key not in KEYS:
                hint = "it belongs at the top of the file" if key in FIELDS else ""
                self._report.unknown((*place, key), "field", key, KEYS, hint)
            elif key in into.values:
                self._report.add((*place, key), f"'{key}' is given at the top of the file too", "give it once")
            else:
                into.values[key] = value
                into.places[key] = (*place, key)

    def _section(self, key: str) -> Any:
        """The section, or its defaults where it is absent or wrong."""
        kind = SECTIONS[key]
        node = self._root.get(key)
        if key == "gateway" and key in self._root and not isinstance(node, dict):
            node = self._gateway_mode(node)
        said = self._translation.settings.values.get(key) if self._translation else None
        if said and (node is None or isinstance(node, dict)):
            node = {**said, **(node or {})}
        found = struct(kind, node, (key,), self._report)
        return kind() if found is INVALID else found

    def _gateway_mode(self, node: object) -> object:
        """`gateway: none` for `gateway: {mode: none}`."""
        if isinstance(node, str):
            found = check(msgspec.structs.fields(Gateway)[0].type, node, ("gateway",), self._report)
            return {} if found is INVALID else {"mode": found}
        self._report.add(("gateway",), f"expected embedded, none or a mapping; got {describe(node)}")
        return {}

    def _resolve(self, sections: dict[str, Any]) -> None:
        """Fills in what depends on other sections, and checks what must fit together."""
        gateway: Gateway = sections["gateway"]
        ext_proc: ExtProc = sections["extProc"]
        als: Als = sections["als"]
        if not ext_proc.host:
            host = "127.0.0.1" if gateway.mode == "embedded" else "0.0.0.0"
            ext_proc = sections["extProc"] = msgspec.structs.replace(ext_proc, host=host)
        if not als.port:
            als = sections["als"] = msgspec.structs.replace(als, port=ext_proc.port)
        models: Models = sections["models"]
        if models.file and self._base:
            sections["models"] = msgspec.structs.replace(models, file=str(self._base / models.file))
        self._ports(sections)
        metrics: Metrics = sections["metrics"]
        if metrics.staleness < metrics.idle_interval + REPEAT:
            hint = f"at least {metrics.idle_interval + REPEAT:g}s with this idleInterval"
            self._report.add(("metrics", "staleness"), "idle endpoints would look stale between two reports", hint)

    def _ports(self, sections: Mapping[str, Any]) -> None:
        """No two listeners on one port."""
        gateway, ext_proc, als = sections["gateway"], sections["extProc"], sections["als"]
        wanted: list[tuple[Place, int]] = []
        if gateway.mode == "embedded":
            wanted += [(("gateway", "port"), gateway.port), (("gateway", "adminPort"), gateway.admin_port)]
        wanted += [(("extProc", "port"), ext_proc.port), (("extProc", "healthPort"), ext_proc.health_port)]
        wanted.append((("admin", "port"), sections["admin"].port))
        if als.enabled and als.port != ext_proc.port:
            wanted.append((("als", "port"), als.port))
        taken: dict[int, str] = {}
        for place, port in wanted:
            if port and port in taken:
                self._report.add(place, f"port {port} is taken by {taken[port]} already")
            taken.setdefault(port, ".".join(map(str, place)))

    def _endpoints(self, needed: bool) -> EndpointSource:
        value = self._root.get("endpoints")
        value = None if value == {} else value
        named = self._translation.endpoints if self._translation else None
        if value is None and named is not None:
            return named
        if value is None or value == []:
            if needed and self._thorough and self._translation:
                self._report.note((), f"no endpoints: to serve, {_NO_DISCOVERY}")
            elif needed:
                place: Place = ("endpoints",) if "endpoints" in self._root else ()
                self._report.add(place, "no endpoints", _NO_DISCOVERY if self._translation else _NO_ENDPOINTS)
            return EndpointSource()
        assert isinstance(self._tree.root.value, dict)
        return read_source(value, self._tree.root.value["endpoints"], ("endpoints",), self._report, self._base)
