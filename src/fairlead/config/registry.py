"""Which plugins there are. Nothing here imports the class of a built-in one before it is asked for.

Rules
* Built-ins are a table. Entry points (group `fairlead.plugins`, name = plugin type, value = class) are only looked at
  when a configured type is not in it, so that nothing foreign is imported unless it was asked for by name.
* A foreign plugin that was asked for and cannot be loaded stops the start: `PluginError` names its distribution.
* A plugin is a class with `Params` (a pydantic model; none = no parameters) and one method that tells its kind: `keep`
  (filter; also has `stage`), `score` (scorer), `pick` (picker) or `choose` (policy). It is called as
  `cls(params, name=…)`. A policy with `takes_filters = True` is also given `filters=[…]`: the configured ones, behind
  the built-in ability filters.
* Foreign scorers are `clamped`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field
from pydantic import BaseModel

from fairlead.config.builtins import ALIASES, BUILTINS, METHODS, Kind
from fairlead.core.errors import PluginError
from fairlead.plugins.params import NoParams

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "fairlead.plugins"


class RegisteredPlugin(Struct, frozen=True):
    """A plugin class, under its canonical type."""

    kind: Kind
    type: str
    #: Parameters that the name which was used implies.
    implied: Mapping[str, Any] = field(default_factory=dict)
    #: The class, if it is of another distribution.
    foreign: Any = None

    @property
    def cls(self) -> Any:
        return self.foreign or BUILTINS[self.kind][self.type]

    @property
    def params(self) -> Any:
        """The model of its parameters."""
        return declared(self.cls, "Params", NoParams)


def declared(cls: type, name: str, default: Any = None) -> Any:
    """What a class that was found by its name, or one of its bases, has under `name`."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), default)


def _installed() -> "Iterable[EntryPoint]":
    from importlib.metadata import entry_points

    return entry_points(group=GROUP)


class Registry:
    """Finds plugin classes by kind and type. `installed` lists entry points; asked only when a type is not built in."""

    def __init__(self, installed: "Callable[[], Iterable[EntryPoint]]" = _installed) -> None:
        self._list = installed
        self._points: list[EntryPoint] | None = None

    def find(self, kind: Kind, name: str) -> RegisteredPlugin | None:
        """`None` when nothing of that kind has that name. Raises `PluginError` when it cannot be loaded."""
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
        """The kind that `name` does exist as."""
        return next((kind for kind in METHODS if self.find(kind, name) is not None), None)

    def types(self, kind: Kind) -> set[str]:
        """Names for suggestions: built-ins, their other names unless those are longer by the kind only, and installed
        ones of whatever kind (they are not imported to find out)."""
        aliases = (name for name in ALIASES[kind] if not name.endswith(f"-{kind}"))
        return {*BUILTINS[kind], *aliases, *(point.name for point in self._installed())}

    def _installed(self) -> "list[EntryPoint]":
        """Listed once: a scan of all distributions takes about 20 ms."""
        if self._points is None:
            self._points = list(self._list())
        return self._points

    def _sources(self, name: str) -> str:
        """The distributions that offer it."""
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
        except Exception as error:
            raise PluginError(name, f"of {sources} could not be loaded: {type(error).__name__}: {error}") from error
        fault = _fault(cls)
        if fault:
            raise PluginError(name, f"of {sources} {fault}")
        return cls


def _distribution(point: "EntryPoint") -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.value


def _fault(cls: Any) -> str:
    """Why a class is no plugin; empty when it is one."""
    if not isinstance(cls, type):
        return "is not a class"
    params = declared(cls, "Params", NoParams)
    if not any(callable(declared(cls, method)) for method in METHODS.values()):
        return f"has none of the methods {', '.join(METHODS.values())}"
    if not (isinstance(params, type) and issubclass(params, BaseModel)):
        return "has a `Params` that is no pydantic model"
    return ""


def _lacks(cls: Any, kind: Kind) -> str:
    """What a class of that kind has to have besides its method and has not."""
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
    """Whether the policy plugin wants the filters handed in."""
    registered = registry.find("policy", policy)
    return registered is not None and declared(registered.cls, "takes_filters") is True
