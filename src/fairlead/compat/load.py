"""Reads a configuration file (or text) into a `Config`, or reports every problem in it."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from fairlead.compat.locate import (
    CUSTOM,
    ESTIMATED,
    EXTENSION,
    KIND,
    LEARNED,
    OF_THE_CHART,
    ROUTER,
    Located,
    document_fields,
    in_config_map,
    in_values,
    is_document,
)
from fairlead.config import yaml
from fairlead.config.builtins import SPLITTING
from fairlead.config.check import read
from fairlead.config.checks import (
    SPECIAL,
    asked_elsewhere,
    check_files,
    is_special,
    note_pool,
    note_unknown_engines,
    note_unranked,
    outlasting,
    resolve,
)
from fairlead.config.endpoint_list import parse_endpoints_text, read_endpoints
from fairlead.config.plugin_reader import (
    EXTRA_KEYS,
    FLOW_CONTROL,
    KEYS,
    METRIC_SOURCES,
    OF_A_POOL,
    PARSERS,
    POOLS,
    PluginReader,
    Source,
    check_choosers,
    check_metric_names,
    read_policy,
)
from fairlead.config.problems import InvalidConfig, Place, Problem, Report, describe, shorten
from fairlead.config.registry import Registry
from fairlead.config.schema import (
    SECTIONS,
    Canary,
    Config,
    EndpointSource,
    FileSource,
    FlowSpec,
    PluginSpec,
    PolicySpec,
    Section,
    Settings,
    implied_flow_control,
)
from fairlead.config.yaml import MAX_BYTES, Tree
from fairlead.core.errors import ConfigError
from fairlead.plugins.params import camel

if TYPE_CHECKING:
    from fairlead.compat.translate import Translation

FIELDS = (*KEYS, *EXTRA_KEYS, *SECTIONS, "endpoints", "seed", POOLS, EXTENSION)

#: Defaults for documents of the reference picker, which has no gateway of its own and a health port.
_LISTENS: Mapping[str, Mapping[str, object]] = {"gateway": {"mode": "none"}, "extProc": {"healthPort": 9003}}
#: Fields of `kvEvents` that say where events come from. With one of them, a document does not.
_KV_SOURCES = ("port", "bind", "indexer")
#: Fields that may be next to those of another picker's configuration.
BESIDE = (*SECTIONS, METRIC_SOURCES, PARSERS, "endpoints", "seed", POOLS)
BY_DISCOVERY = "endpoints come from here: kubernetes.pool (--pool-name) and kubernetes.selector have no effect"
_NO_ENDPOINTS = "list them under endpoints:, name a file: there, or a pool: under kubernetes:"
_NO_DISCOVERY = "add endpoints: or kubernetes: {pool: NAME}, or a file-discovery plugin and dataLayer.discovery"


def read_bytes(path: Path) -> bytes:
    """The content of a configuration file; of a file that is too large, only enough to detect that."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror or error}", "$", str(path)) from None


def load(
    source: Path | str,
    *,
    need_endpoints: bool = True,
    registry: Registry | None = None,
    flags: Mapping[str, Any] | None = None,
    content: bytes | None = None,
) -> Config:
    """Read a file (`Path`) or a text (`str`), YAML or JSON.

    Raises `InvalidConfig` (a `ConfigError`) with all problems, or `PluginError` if the only problem is an installed
    plugin that cannot be loaded. `need_endpoints=False` accepts a configuration without endpoints. `flags`: values that
    take precedence over those of the file, in the same structure. `content`: the text to use instead of the file's.
    """
    config, report = _read(source, need_endpoints, registry, flags=flags or {}, content=content)
    if config is None:
        if len(report.plugin_errors) == len(report.problems):
            raise report.plugin_errors[0]
        raise InvalidConfig(report.problems, str(source) if isinstance(source, Path) else "")
    return config


def problems(source: Path | str, *, need_endpoints: bool = True, registry: Registry | None = None) -> list[Problem]:
    """All problems; empty for a configuration that loads. Raises `ConfigError` if the file cannot be read."""
    return _read(source, need_endpoints, registry)[1].problems


def examine(source: Path) -> tuple[Config | None, Report]:
    """Like `load`, but plugins are also built and an endpoints file is read, and their problems are in the report.

    A configuration of the reference picker need not name endpoints, because it usually takes them from Kubernetes.
    """
    return _read(source, True, None, thorough=True)


def _read(
    source: Path | str,
    need_endpoints: bool,
    registry: Registry | None,
    thorough: bool = False,
    flags: Mapping[str, Any] = MappingProxyType({}),
    content: bytes | None = None,
) -> tuple[Config | None, Report]:
    text = source if isinstance(source, str) else read_bytes(source) if content is None else content
    document, place = in_config_map(yaml.parse(text))
    report = Report(document.tree.line, place)
    report.extend(document.problems)
    if document.value is None and document.problems:
        return None, report
    root = {} if document.value is None else document.value
    if not isinstance(root, dict):
        report.add((), f"expected a mapping, got {describe(root)}")
        return None, report
    base = source.absolute().parent if isinstance(source, Path) else None
    name = str(source) if isinstance(source, Path) else ""
    if "gateway" in flags and isinstance(root.get("gateway"), str):
        root = {**root, "gateway": {"mode": root["gateway"]}}  # the short form, to be merged with the flags
    root = overlaid(root, flags)
    assembly = _Assembly(root, document.tree, report, base, registry or Registry(), thorough)
    config = assembly.config(name, need_endpoints)
    report.close()
    if config is not None and flags:
        config = config.model_copy(update={"flags": dict(flags)})
    return (None if report.problems else config), report


class _Assembly(Struct, eq=False):
    """Reads the mapping at the root of a document into a `Config`, once."""

    root: dict[str, Any]
    tree: Tree
    report: Report
    base: Path | None
    registry: Registry
    thorough: bool
    translation: "Translation | None" = None

    def config(self, source: str, need_endpoints: bool) -> Config | None:
        policy = self._policy()
        # In a document of the reference, `flowControl` has the reference's structure, and `translation` has read it.
        keys = [key for key in EXTRA_KEYS if key in self.root and not (self.translation and key == FLOW_CONTROL)]
        extras = PluginReader(Source({key: self.root[key] for key in keys}, {}), self.report, self.registry)
        sources = extras.named("metric-source", METRIC_SOURCES)
        parsers = extras.named("parser", PARSERS)
        flow_control = self.translation.flow if self.translation else extras.flow_control()
        settings = self._settings(policy)
        moot = (LEARNED,) * settings.kv_events.enabled + (ESTIMATED,) * bool(settings.tokens.models)
        self.report.notes[:] = [note for note in self.report.notes if not note.message.endswith(moot)]
        if self.root.get(FLOW_CONTROL) is None and self.translation is None:
            flow_control = implied_flow_control(policy, settings)
        if flow_control is None:
            note_unranked(settings.models, self.report)
        if policy is not None:
            check_metric_names(policy, extras.provided(sources), settings.metrics, self.report)
        endpoints = self._endpoints(need_endpoints and not settings.kubernetes.on)
        if settings.kubernetes.on and self.translation is not None and endpoints is self.translation.endpoints:
            self.report.note(("dataLayer", "discovery"), BY_DISCOVERY)
            off = settings.kubernetes.model_copy(update={"pool": "", "selector": {}, "namespaces": ()})
            settings = settings.model_copy(update={"kubernetes": off})
        elif settings.kubernetes.on and (endpoints.static or endpoints.file):
            hint = "leave out endpoints:, or kubernetes: and --pool-name"
            self.report.add(("endpoints",), "endpoints come from Kubernetes already", hint)
        if not self.report.problems:  # with problems, the indices of entries may differ from those in the file
            note_unknown_engines(endpoints.static, settings.metrics, ("endpoints",), self.report)
            if policy is not None:
                note_pool(endpoints.static, policy, settings, ("endpoints",), self.report)
        check_choosers(settings.canary, settings.shadows, self.report, self.registry)
        self._check_splitting(policy, settings.canary, flow_control)
        if self.thorough:
            beside = (*sources, *parsers, *(flow_control.plugins() if flow_control else ()))
            self._check_made(*(policy.plugins() if policy else ()), *beside)
            self._check_endpoints_file(endpoints.file, settings, policy)
            check_files(settings, self.report)
        if policy is None or self.report.problems:
            return None
        if self.root.get(POOLS) and not settings.kubernetes.namespaces:
            self.report.add((POOLS,), "there are not several pools", "set kubernetes.namespaces, or leave pools out")
        return Config.model_construct(
            **dict(settings),
            policy=policy,
            metric_sources=sources,
            parsers=parsers,
            flow_control=flow_control,
            endpoints=endpoints,
            source=source,
            notes=tuple(self.report.notes),
            pools=self._pools(source),
        )

    def _pools(self, source: str) -> dict[str, Config]:
        """The complete configuration of each pool that has settings of its own: these, plus the rest of the file."""
        value = self.root.get(POOLS) or {}
        if not isinstance(value, dict):
            self.report.add((POOLS,), f"expected a mapping from namespace/name, got {describe(value)}")
            return {}
        pools: dict[str, Config] = {}
        for key, own in value.items():
            place = (POOLS, key)
            namespace, slash, name = key.partition("/")
            if not (namespace and slash and name) or "/" in name:
                self.report.add(place, f"'{shorten(key)}' names no pool", "write namespace/name")
            elif not isinstance(own, dict):
                self.report.add(place, f"expected a mapping, got {describe(own)}")
            elif unknown := [field for field in own if field not in OF_A_POOL]:
                for field in unknown:
                    hint = "all pools share it: write it at the top of the file" if field in FIELDS else ""
                    self.report.unknown((*place, field), "field", field, OF_A_POOL, hint)
            elif (config := self._pool(place, own, source)) is not None:
                pools[key] = config
        return pools

    def _pool(self, place: Place, own: dict[str, Any], source: str) -> Config | None:
        root = {key: value for key, value in self.root.items() if key != POOLS}
        if any(key in KEYS for key in own):  # a pool's policy replaces the file's as a whole; they are not merged
            shared = BESIDE if self.translation else (*BESIDE, FLOW_CONTROL)
            root = {key: value for key, value in root.items() if key in shared}
        report = Report(lambda inner: self.tree.line((*place, *inner)), place)
        merged = _Assembly({**root, **own}, self.tree, report, self.base, self.registry, self.thorough)
        config = merged.config(source, need_endpoints=False)
        self.report.take(report)
        return config

    def _check_made(self, *specs: PluginSpec) -> None:
        """Check that the plugins named in the file can be built. Default plugins always can."""
        named = [spec for spec in specs if spec.given is not None]
        if named:
            from fairlead.config.plugins import check_made

            check_made(named, self.registry, self.report)

    def _check_splitting(self, policy: PolicySpec | None, canary: Canary, flow_control: FlowSpec | None) -> None:
        if flow_control is None or not flow_control.settings.enabled:
            return
        if policy and policy.splits:
            hint = "take another policy, or leave flowControl out"
            self.report.add((FLOW_CONTROL,), f"requests that wait cannot be split as '{SPLITTING}' does it", hint)
        if canary.percent and canary.splits:
            self.report.note(("canary", "policy"), "its requests that wait are not split: leave flowControl out")

    def _check_endpoints_file(self, path: str, settings: Settings, policy: PolicySpec | None) -> None:
        if not path:
            return
        place = ("endpoints", "file") if "endpoints" in self.root else ("dataLayer", "discovery")
        if is_special(path):
            self.report.add(place, f"{path} is {SPECIAL}")
            return
        try:
            listing = parse_endpoints_text(read_bytes(Path(path)))
        except ConfigError as error:
            self.report.add(place, str(error))
            return
        for problem in listing.problems:
            self.report.add(place, problem.render(path))
        note_unknown_engines(listing.entries, settings.metrics, place, self.report, path)
        if policy is not None:
            note_pool(listing.entries, policy, settings, place, self.report, path)

    def _policy(self) -> PolicySpec | None:
        """The policy, from a document of the reference picker (file or Helm values), or from Fairlead's own fields."""
        if is_document(self.root):
            allowed = document_fields()
            for key in self.root:
                if key not in (*allowed, *BESIDE):
                    self.report.unknown((key,), "field", key, (*allowed, *BESIDE))
            values = {key: value for key, value in self.root.items() if key in allowed}
            return self._foreign(Located(values, self.report))
        located = in_values(self.root, self.tree, self.report)
        taken = {located.place[0]} if located else {ROUTER} if ROUTER in self.root else set()
        known = BESIDE if taken else FIELDS
        for key in self.root:
            if key not in known and key not in taken:
                hint = f"it belongs to a file with kind: {KIND}" if key in document_fields() else ""
                self.report.unknown((key,), "field", key, known, hint)
        if located is not None:
            for key in located.values:
                if key not in document_fields():
                    located.report.unknown((key,), "field", key, document_fields())
            policy = self._foreign(located)
            self.report.take(located.report)
            return policy
        if taken:
            self.report.add((ROUTER,), f"no {KIND} in it", "it is expected under epp.pluginsCustomConfig")
            return None
        return read_policy(self._scheduling(), self.report, self.registry)

    def _foreign(self, located: Located) -> PolicySpec | None:
        from fairlead.compat.translate import Translator

        self.translation = Translator(located.values, located.report, self.registry, self.base).translation()
        return self.translation.policy

    def _scheduling(self) -> Source:
        """The keys of the scheduling part, from the top level of the file or from the chart's values."""
        source = Source({k: v for k, v in self.root.items() if k in KEYS}, {k: (k,) for k in self.root if k in KEYS})
        chart = self.root.get(EXTENSION)
        if chart is None:
            return source
        if not isinstance(chart, dict):
            self.report.add((EXTENSION,), f"expected a mapping, got {describe(chart)}")
            return source
        for key in chart:
            if key != CUSTOM and CUSTOM in chart:
                self.report.note((EXTENSION, key), OF_THE_CHART)
            elif key != CUSTOM:
                self.report.unknown((EXTENSION, key), "field", key, [CUSTOM])
        self._merge(chart.get(CUSTOM), (EXTENSION, CUSTOM), source)
        return source

    def _merge(self, custom: object, place: Place, into: Source) -> None:
        if custom is None:
            return
        if not isinstance(custom, dict):
            self.report.add(place, f"expected a mapping, got {describe(custom)}")
            return
        for key, value in custom.items():
            if key not in KEYS:
                hint = "it belongs at the top of the file" if key in FIELDS else ""
                self.report.unknown((*place, key), "field", key, KEYS, hint)
            elif key in into.values:
                self.report.add((*place, key), f"'{key}' is given at the top of the file too", "give it once")
            else:
                into.values[key] = value
                into.places[key] = (*place, key)

    def _settings(self, policy: PolicySpec | None) -> Settings:
        """All sections. An absent or wrong section gets its defaults without validation, which saves start time."""
        sections: dict[str, Any] = {}
        for name in Settings.model_fields:
            model = SECTIONS.get(camel(name))
            if model is not None:
                sections[name] = self._section(camel(name), model) or model.model_construct()
        if self.root.get("seed") is not None and read(Settings, {"seed": self.root["seed"]}, (), self.report):
            sections["seed"] = self.root["seed"]
        if self.translation is not None:
            sections["metrics"] = outlasting(sections["metrics"], self.report)
        settings = Settings.model_construct(**sections)  # each is validated: building a validator of all takes 20 ms
        settings = resolve(settings, self.base, self.report)
        if self.translation is not None:
            own = {f"$.{key}.{name}" for key in SECTIONS for name in self._own(key)}
            places = self.translation.said_at
            self.report.move({path: places[path] for path in places if path not in own})
        scorers = policy.scorers if policy else ()
        urls = [spec.parameters.cache_indexer_url for spec in scorers if spec.type == "prefix-aware"]
        kv_events = asked_elsewhere(settings.kv_events, urls, self.report)
        return settings.model_copy(update={"kv_events": kv_events})

    def _section(self, key: str, model: type[Section]) -> Section | None:
        node = self.root.get(key)
        places: dict[str, Place] = {}
        if key == "gateway" and key in self.root and not isinstance(node, dict):
            if not isinstance(node, str):
                self.report.add((key,), f"expected embedded, none or a mapping; got {describe(node)}")
                return None
            node, places = {"mode": node}, {"mode": (key,)}  # `gateway: none` is short for `gateway: {mode: none}`
        if key == "models" and isinstance(node, list):
            node, places = {"list": node}, {"list": (key,)}
        said = self._said(key)
        if said and (node is None or isinstance(node, dict)):
            node = {**said, **(node or {})}
        if node is None or node == {}:
            return None
        return read(model, node, (key,), self.report, places)

    def _said(self, key: str) -> dict[str, object]:
        """What a document of the reference sets in a section."""
        own = self._own(key)
        if self.translation is None or (key == "gateway" and own):
            return {}
        if key == "kvEvents" and not (own.get("enabled") is True and own.keys().isdisjoint(_KV_SOURCES)):
            return {}
        return {**_LISTENS.get(key, {}), **self.translation.settings.get(key, {})}

    def _own(self, key: str) -> dict[str, Any]:
        """A section of the file itself, if it is a mapping."""
        node = self.root.get(key)
        return node if isinstance(node, dict) else {}

    def _endpoints(self, needed: bool) -> EndpointSource:
        value = self.root.get("endpoints")
        value = None if value == {} else value
        named = self.translation.endpoints if self.translation else None
        if value is None and named is not None:
            return named
        if value is None or value == []:
            if needed and self.thorough and self.translation:
                self.report.note((), f"no endpoints: to serve, {_NO_DISCOVERY}")
            elif needed:
                place: Place = ("endpoints",) if "endpoints" in self.root else ()
                self.report.add(place, "no endpoints", _NO_DISCOVERY if self.translation else _NO_ENDPOINTS)
            return EndpointSource()
        return self._endpoint_source(value)

    def _endpoint_source(self, value: object) -> EndpointSource:
        """A list, or a `FileSource`."""
        if isinstance(value, list):
            assert isinstance(self.tree.root.value, dict)
            listing = read_endpoints(self.tree.root.value["endpoints"], ("endpoints",))
            self.report.extend(listing.problems)
            return EndpointSource(static=listing.entries)
        if not isinstance(value, dict):
            self.report.add(("endpoints",), f"expected a list, or file: and a path; got {describe(value)}")
            return EndpointSource()
        source = read(FileSource, value, ("endpoints",), self.report)
        if source is None:
            return EndpointSource()
        file = str(self.base / source.file) if self.base else source.file
        return EndpointSource(file=file, watch=source.watch, allow_empty=source.allow_empty)


def overlaid(root: Mapping[str, object], flags: Mapping[str, object]) -> dict[str, object]:
    """A configuration's mapping with the values of command-line flags added; nested mappings are merged."""
    merged = dict(root)
    for key, value in flags.items():
        inner = merged.get(key)
        if isinstance(value, Mapping) and isinstance(inner, Mapping):
            merged[key] = overlaid(inner, value)
        else:
            merged[key] = value
    return merged
