"""The plugins that a document declares, by their names."""

from typing import Any

from msgspec import Struct, structs

from fairlead.config.builtins import METHODS, Kind
from fairlead.config.check import INVALID, check, struct
from fairlead.config.epp.catalogue import CATALOGUE
from fairlead.config.epp.document import Plugin
from fairlead.config.epp.entry import Around, Entry, Settings, Use
from fairlead.config.epp.parameters import ApproxPrefix, PrecisePrefix
from fairlead.config.problems import Report, describe
from fairlead.config.registry import Found, Registry
from fairlead.model.errors import PluginError
from fairlead.wire.problem import Place, shorten

#: The reference hashes blocks of at least so many tokens, whatever is configured.
LEAST_BLOCK = 64
PROFILE_KINDS: tuple[Kind, ...] = ("filter", "scorer", "picker")
_PRODUCER_REFS = ("prefix_match_info_producer_name", "in_flight_load_producer_name", "producer_name")


class Instance(Struct):
    """One declared plugin. `entry` is `None` where the type is ours or an installed one."""

    name: str
    type: str
    place: Place
    parameters: Any
    entry: Entry | None
    uses: tuple[Use, ...] = ()
    #: Lines of `type` and `parameters`.
    lines: dict[str, int] = {}

    @property
    def role(self) -> str:
        return self.entry.role if self.entry else "profile"

    def fits(self, role: str) -> bool:
        return role == self.role or (self.entry is not None and role == self.entry.also)


class Instances:
    def __init__(self, report: Report, registry: Registry) -> None:
        self._report = report
        self._registry = registry
        self.by_name: dict[str, Instance] = {}
        self.settings = Settings()
        #: Names whose declaration is wrong: references to them are not reported once more.
        self._broken: set[str] = set()

    def read(self, node: object, place: Place) -> None:
        if node is None:
            return
        if not isinstance(node, list):
            self._report.add(place, f"expected a list, got {describe(node)}")
            return
        for i, item in enumerate(node):
            self._declare(item, (*place, i))
        block = Around(self._block())
        for one in self.by_name.values():
            self._check_refs(one)
            if one.entry is not None and one.entry.use is not None:
                self._translate(one, block)

    def ref(self, name: str, place: Place, role: str) -> Instance | None:
        """The plugin of that name. Reports when there is none, or when it is of another kind than wanted."""
        found = self.by_name.get(name)
        if found is None:
            if name not in self._broken:
                self._report.unknown(place, "plugin", name, self.by_name, self._declare_hint(name))
            return None
        if not found.fits(role):
            self._report.add(
                place, f"'{shorten(name)}' ({found.type}) cannot stand here", f"it is a {found.role} plugin"
            )
            return None
        return found

    def _declare_hint(self, name: str) -> str:
        return f"declare it under plugins: {{type: {name}}}" if name in CATALOGUE else ""

    def _declare(self, item: object, place: Place) -> None:
        plugin = check(Plugin, item, place, self._report)
        if plugin is INVALID:
            if isinstance(item, dict):
                self._broken |= {name for key in ("name", "type") if isinstance(name := item.get(key), str)}
            return
        name = plugin.name or plugin.type
        if name in self.by_name:
            first = self._report.path(self.by_name[name].place)
            self._report.add(
                place,
                f"a plugin named '{shorten(name)}' is there already, at {first}",
                "give one of them a name of its own",
            )
            return
        entry = CATALOGUE.get(plugin.type)
        made = self._ours(name, plugin, place) if entry is None else self._theirs(name, plugin, place, entry)
        if made is None:
            self._broken.add(name)
            return
        given = ("type", "parameters") if plugin.parameters else ("type",)
        made.lines = {key: self._report.line((*place, key)) for key in given}
        self.by_name[name] = made

    def _theirs(self, name: str, plugin: Plugin, place: Place, entry: Entry) -> Instance | None:
        if isinstance(entry.refused, str) and entry.refused:
            self._report.add((*place, "type"), f"'{plugin.type}' has no counterpart here", entry.refused)
            return None
        at = (*place, "parameters")
        parameters = struct(entry.params, plugin.parameters, at, self._report)
        if parameters is INVALID:
            return None
        refusal = entry.refusal(parameters)
        if refusal:
            self._report.add(at, f"'{plugin.type}' cannot do that here", refusal)
            return None
        remark = entry.remark(parameters)
        if remark:
            self._report.note(place, f"{plugin.type}: {remark}")
        if entry.settings is not None:
            entry.settings(parameters, self.settings)
        return Instance(name, plugin.type, place, parameters, entry)

    def _ours(self, name: str, plugin: Plugin, place: Place) -> Instance | None:
        """A type that the reference does not have."""
        found = self._find(plugin.type, (*place, "type"))
        if found is None:
            return None
        kind, cls = found
        values = {**cls.implied, **(plugin.parameters or {})}
        parameters = struct(cls.params, values, (*place, "parameters"), self._report)
        if parameters is INVALID:
            return None
        return Instance(name, plugin.type, place, parameters, None, (Use(kind, cls.type, parameters),))

    def _find(self, type: str, place: Place) -> tuple[Any, Found] | None:
        try:
            for kind in PROFILE_KINDS:
                found = self._registry.find(kind, type)
                if found is not None:
                    return kind, found
        except PluginError as error:
            self._report.plugin(place, error)
            return None
        ours = {name for kind in METHODS for name in self._registry.types(kind)}
        self._report.unknown(place, "plugin type", type, {*CATALOGUE, *ours})
        return None

    def _block(self) -> int:
        """Tokens of a prefix block, by the first producer that says so."""
        for one in self.by_name.values():
            if isinstance(one.parameters, ApproxPrefix):
                return max(one.parameters.block_size_tokens, LEAST_BLOCK)
            if isinstance(one.parameters, PrecisePrefix):
                tokens = one.parameters.token_processor_config
                return max(tokens.block_size_tokens or tokens.block_size or 0, LEAST_BLOCK)
        return LEAST_BLOCK

    def _check_refs(self, one: Instance) -> None:
        """Producers that a plugin names must be declared."""
        for attribute in _PRODUCER_REFS:
            name = getattr(one.parameters, attribute, "")
            if name:
                keys = {field.name: field.encode_name for field in structs.fields(one.parameters)}
                self.ref(name, (*one.place, "parameters", keys[attribute]), "producer")

    def _translate(self, one: Instance, around: Around) -> None:
        assert one.entry is not None and one.entry.use is not None
        try:
            one.uses = tuple(one.entry.use(one.parameters, around))
        except (ValueError, TypeError) as error:
            self._report.add((*one.place, "parameters"), str(error))
