"""Which plugins there are, and how a configuration becomes the policy that uses them.

Rules
* Built-ins are a table. Entry points (group `fairlead.plugins`, name = plugin type, value = class) are only looked at
  when a configured type is not in it, so that nothing foreign is imported unless it was asked for by name.
* A foreign plugin that was asked for and cannot be loaded stops the start: `PluginError` names its distribution.
* A plugin is a class with `Params` (a msgspec struct; none = no parameters) and one method that tells its kind: `keep`
  (filter; also has `hard`), `score` (scorer) or `pick` (picker). It is called as `cls(params, name=…)`.
* Foreign scorers are wrapped in `Clamped`.
"""

from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, cast

from msgspec import Struct, field

from fairlead.config.defaults import BYTES_PER_TOKEN, HASH_BLOCK_SIZE
from fairlead.config.schema import Config, PluginSpec
from fairlead.fleet.prefix import ChainHasher
from fairlead.model.errors import PluginError
from fairlead.plugins.filters.health import Health
from fairlead.plugins.filters.label_selector import LabelSelector
from fairlead.plugins.filters.memory_pressure import MemoryPressure
from fairlead.plugins.filters.model_compatibility import ModelCompatibility
from fairlead.plugins.filters.queue_depth import QueueDepth
from fairlead.plugins.filters.role import Role
from fairlead.plugins.filters.subset import Subset
from fairlead.plugins.params import NoParams
from fairlead.plugins.pickers.max_score import MaxScore
from fairlead.plugins.pickers.round_robin import RoundRobin, Uniform
from fairlead.plugins.pickers.top_k import TopK
from fairlead.plugins.pickers.weighted_random import WeightedRandom
from fairlead.plugins.scorers.inflight_tokens import InflightTokens
from fairlead.plugins.scorers.kv_utilization import KvUtilization
from fairlead.plugins.scorers.load_aware import LoadAware
from fairlead.plugins.scorers.lora_aware import LoraAware
from fairlead.plugins.scorers.prefix_aware import PrefixAware, PrefixAwareParams
from fairlead.plugins.scorers.session_affinity import SessionAffinity
from fairlead.schedule.framework import Clamped, Filter, Picker, Scorer
from fairlead.schedule.profile import Profile

Kind = Literal["filter", "scorer", "picker"]
GROUP = "fairlead.plugins"
#: The method that makes a class a plugin of a kind.
METHODS: Mapping[Kind, str] = {"filter": "keep", "scorer": "score", "picker": "pick"}


def _by_type(*classes: Any) -> dict[str, Any]:
    return {cls.type: cls for cls in classes}


BUILTINS: Mapping[Kind, Mapping[str, Any]] = {
    "filter": _by_type(Role, Subset, ModelCompatibility, Health, QueueDepth, MemoryPressure, LabelSelector),
    "scorer": _by_type(PrefixAware, LoadAware, KvUtilization, InflightTokens, LoraAware, SessionAffinity),
    "picker": _by_type(MaxScore, TopK, WeightedRandom, RoundRobin, Uniform),
}

#: Other names of built-ins with the same meaning, and the parameters that they imply. Names of other pickers whose
#: formula differs (`lora-affinity-scorer`, `load-aware-scorer`) are left out on purpose.
ALIASES: Mapping[Kind, Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "filter": {
        "queue-depth-filter": ("queue-depth", {}),
        "memory-pressure-filter": ("memory-pressure", {}),
        "model-compatibility-filter": ("model-compatibility", {}),
        "health-filter": ("health", {}),
        "label-selector-filter": ("label-selector", {}),
        "by-label-selector": ("label-selector", {}),
        "decode-filter": ("role", {"stage": "decode"}),
        "prefill-filter": ("role", {"stage": "prefill"}),
        "encode-filter": ("role", {"stage": "encode"}),
    },
    "scorer": {
        "prefix-aware-scorer": ("prefix-aware", {}),
        "prefix-cache-scorer": ("prefix-aware", {}),
        "kv-utilization-scorer": ("kv-utilization", {}),
        "kv-cache-utilization": ("kv-utilization", {}),
        "kv-cache-utilization-scorer": ("kv-utilization", {}),
        "inflight-tokens-scorer": ("inflight-tokens", {}),
        "lora-aware-scorer": ("lora-aware", {}),
    },
    "picker": {
        "max-score-picker": ("max-score", {}),
        "top-k-picker": ("top-k", {}),
        "random-picker": ("random", {}),
        "weighted-random-picker": ("weighted-random", {}),
        "round-robin-picker": ("round-robin", {}),
    },
}


class Found(Struct, frozen=True):
    """A plugin class, under its canonical type."""

    type: str
    cls: Any
    #: Parameters that the name which was used implies.
    implied: Mapping[str, Any] = field(default_factory=dict)
    foreign: bool = False

    @property
    def params(self) -> Any:
        """The struct of its parameters."""
        return getattr(self.cls, "Params", NoParams)


def _installed() -> Iterable[EntryPoint]:
    return entry_points(group=GROUP)


class Registry:
    """Finds plugin classes by kind and type. `installed` lists entry points; asked only when a type is not built in."""

    def __init__(self, installed: Callable[[], Iterable[EntryPoint]] = _installed) -> None:
        self._list = installed
        self._points: list[EntryPoint] | None = None

    def find(self, kind: Kind, name: str) -> Found | None:
        """`None` when nothing of that kind has that name. Raises `PluginError` when it cannot be loaded."""
        canonical, implied = ALIASES[kind].get(name, (name, {}))
        cls = BUILTINS[kind].get(canonical)
        if cls is not None:
            return Found(canonical, cls, implied)
        if any(name in table for table in (*BUILTINS.values(), *ALIASES.values())):
            return None
        foreign = self._foreign(name)
        return Found(name, foreign, foreign=True) if foreign is not None and hasattr(foreign, METHODS[kind]) else None

    def kind_of(self, name: str) -> Kind | None:
        """The kind that `name` does exist as."""
        return next((kind for kind in METHODS if self.find(kind, name) is not None), None)

    def types(self, kind: Kind) -> set[str]:
        """Names for suggestions: built-ins, and installed ones of whatever kind (they are not imported to find out)."""
        return {*BUILTINS[kind], *(point.name for point in self._installed())}

    def _installed(self) -> list[EntryPoint]:
        """Listed once: a scan of all distributions takes about 20 ms."""
        if self._points is None:
            self._points = list(self._list())
        return self._points

    def _foreign(self, name: str) -> Any:
        points = [point for point in self._installed() if point.name == name]
        if not points:
            return None
        sources = " and ".join(sorted({_distribution(point) for point in points}))
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


def _distribution(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.value


def _fault(cls: Any) -> str:
    """Why a class is no plugin; empty when it is one."""
    params = getattr(cls, "Params", NoParams)
    if not isinstance(cls, type):
        return "is not a class"
    if not any(callable(getattr(cls, method, None)) for method in METHODS.values()):
        return f"has none of the methods {', '.join(METHODS.values())}"
    if hasattr(cls, "keep") and not isinstance(getattr(cls, "hard", None), bool):
        return "is a filter without `hard: bool`"
    if not (isinstance(params, type) and issubclass(params, Struct)):
        return "has a `Params` that is no msgspec.Struct"
    return ""


def build_policy(
    config: Config,
    on_plugin_error: Callable[[PluginError], None] | None = None,
    registry: Registry | None = None,
) -> Profile:
    """The profile that `config.policy` describes. Raises `PluginError` when a plugin cannot be made."""
    registry = registry or Registry()
    policy = config.policy
    return Profile(
        policy.name,
        [cast(Filter, _make(spec, registry)) for spec in policy.filters],
        [(cast(Scorer, _make(spec, registry)), spec.weight) for spec in policy.scorers],
        cast(Picker, _make(policy.picker, registry)),
        on_plugin_error,
    )


def _make(spec: PluginSpec, registry: Registry) -> Filter | Scorer | Picker:
    found = registry.find(spec.kind, spec.type)
    if found is None:
        raise PluginError(spec.type, f"is no longer there as a {spec.kind}")
    try:
        plugin = found.cls(spec.parameters, name=spec.name)
    except Exception as error:
        raise PluginError(spec.name, f"({spec.path}) could not be made: {type(error).__name__}: {error}") from error
    if found.foreign and spec.kind == "scorer":
        return Clamped(plugin)
    return cast(Filter | Scorer | Picker, plugin)


def build_hasher(config: Config) -> ChainHasher:
    """Cuts prompts as finely as the finest of the configured `prefix-aware` scorers wants."""
    sizes = [
        spec.parameters.hash_block_size
        for spec in config.policy.scorers
        if isinstance(spec.parameters, PrefixAwareParams)
    ]
    return ChainHasher(finest=round(min(sizes, default=HASH_BLOCK_SIZE) * BYTES_PER_TOKEN))
