"""Finds plugin classes. The class of a built-in plugin is imported only when it is needed.

Rules
* Built-ins are in a table. Entry points (group `fairlead.plugins`, name = plugin type, value = class) are searched only
  if a configured type is not in it, so that foreign code is imported only if it was configured by name.
* A configured foreign plugin that cannot be loaded stops the start: `PluginError` names its distribution.
* A plugin is a class with `Params` (a pydantic model; none = no parameters) and the method of its kind
  (`builtins.METHODS`). It is created as `cls(params, name=…)`. A policy with `takes_filters = True` also gets
  `filters=[…]`: the configured filters, after the built-in ability filters.
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field
from pydantic import BaseModel

from fairlead.config.builtins import ALIASES, BUILTINS, METHODS, Kind
from fairlead.core.errors import PASSING, PluginError, described
from fairlead.plugins.params import NoParams

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "fairlead.plugins"


class RegisteredPlugin(Struct, frozen=True):
    """A plugin class with its canonical type."""

    kind: Kind
    type: str
    #: Parameters implied by the name in the file.
    implied: Mapping[str, Any] = field(default_factory=dict)
    #: The class, if it is from another distribution.
    foreign: Any = None

    @property
    def cls(self) -> Any:
        return self.foreign or BUILTINS[self.kind][self.type]

    @property
    def params(self) -> Any:
        return declared(self.cls, "Params", NoParams)


def declared(cls: type, name: str, default: Any = None) -> Any:
    """The attribute `name` of a class or of its bases."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), default)


def installed_plugins() -> "Iterable[EntryPoint]":
    """The entry points of all distributions."""
    from importlib.metadata import entry_points

    return entry_points(group=GROUP)


class Registry:
    """Finds plugin classes by kind and type. `installed` lists entry points; called only if a type is not built in."""

    def __init__(self, installed: "Callable[[], Iterable[EntryPoint]]" = installed_plugins) -> None:
        self._list = installed
        self._points: list[EntryPoint] | None = None

    def find(self, kind: Kind, name: str) -> RegisteredPlugin | None:
        """A plugin; `None` if nothing of that kind has that name. Raises `PluginError` if it cannot be loaded."""
        canonical, implied = ALIASES[kind].get(name, (name, {}))
        if canonical in BUILTINS[kind]:
            return RegisteredPlugin(kind, canonical, implied)
        if any(name in table for table in (*BUILTINS.values(), *ALIASES.values())):
            return None
        foreign = self._foreign(name)
        if foreign is None or declared(foreign, METHODS[kind]) is None:
            return None
        fault = _lacks(foreign, kind)
        if fault:
            raise PluginError(name, f"of {self._sources(name)} {fault}")
        return RegisteredPlugin(kind, name, foreign=foreign)

    def kind_of(self, name: str) -> Kind | None:
        return next((kind for kind in METHODS if self.find(kind, name) is not None), None)

    def types(self, kind: Kind) -> set[str]:
        """Names for suggestions: built-ins, their aliases unless these only append the kind, and installed plugins of
        any kind (only an import would show their kind)."""
        aliases = (name for name in ALIASES[kind] if not name.endswith(f"-{kind}"))
        return {*BUILTINS[kind], *aliases, *(point.name for point in self._installed())}

    def _installed(self) -> "list[EntryPoint]":
        """The entry points, listed once, because a scan of all distributions takes about 20 ms."""
        if self._points is None:
            self._points = list(self._list())
        return self._points

    def _sources(self, name: str) -> str:
        """The distributions that provide this plugin."""
        return " and ".join(sorted({_distribution(point) for point in self._installed() if point.name == name}))

    def _foreign(self, name: str) -> Any:
        points = [point for point in self._installed() if point.name == name]
        if not points:
            return None
        sources = self._sources(name)
        if len(points) > 1:
            raise PluginError(name, f"is offered more than once, by {sources}")
        try:
            cls = points[0].load()
        except PASSING:
            raise
        except BaseException as error:
            raise PluginError(name, f"of {sources} could not be loaded: {described(error)}") from error
        _note_code(points[0].module)
        fault = _fault(cls)
        if fault:
            raise PluginError(name, f"of {sources} {fault}")
        return cls


#: File of plugin code that this process has loaded → its size and time of change then.
_loaded: dict[str, tuple[int, int]] = {}


def _note_code(module: str) -> None:
    """Note the files of the package that a plugin has just been loaded from."""
    package = module.partition(".")[0]
    for name, loaded in list(sys.modules.items()):
        own = name.partition(".")[0] == package and isinstance(loaded, ModuleType)
        file = vars(loaded).get("__file__") if own else None
        if file and file not in _loaded and (stamp := _stamp(file)):
            _loaded[file] = stamp


def _stamp(file: str) -> tuple[int, int] | None:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def changed_code() -> list[str]:
    """The files of plugins whose code has changed since this process loaded it, or that are gone."""
    return sorted(file for file, stamp in _loaded.items() if _stamp(file) != stamp)


def _distribution(point: "EntryPoint") -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.value


def _fault(cls: Any) -> str:
    """Why a class is not a plugin; empty if it is one."""
    if not isinstance(cls, type):
        return "is not a class"
    params = declared(cls, "Params", NoParams)
    if not any(callable(declared(cls, method)) for method in METHODS.values()):
        return f"has none of the methods {', '.join(METHODS.values())}"
    if not (isinstance(params, type) and issubclass(params, BaseModel)):
        return "has a `Params` that is no pydantic model"
    return ""


def _lacks(cls: Any, kind: Kind) -> str:
    """What a class lacks that its `kind` requires in addition to the method; empty = nothing."""
    from fairlead.core.policy import Stage

    if kind == "filter" and not isinstance(declared(cls, "stage"), Stage):
        return "is a filter without `stage: Stage`"
    if kind == "metric-source" and not _names(declared(cls, "provides")):
        return "is a metric source without `provides: tuple[str, ...]`"
    if kind == "parser" and not _names(declared(cls, "paths")):
        return "is a parser without `paths: tuple[str, ...]`"
    return ""


def _names(value: object) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(name, str) for name in value)


def takes_filters(registry: Registry, policy: str) -> bool:
    """Whether the policy plugin takes the configured filters."""
    registered = registry.find("policy", policy)
    return registered is not None and declared(registered.cls, "takes_filters") is True
