"""Builds plugins from their specs, and the objects that use them: policy, metrics reader, body parser, hasher."""

from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any, cast

from fairlead.apis.parsed import ParsedRequest
from fairlead.apis.request import parse_request
from fairlead.config.builtins import BYTES_PER_TOKEN, HASH_BLOCK_SIZE, a_kind
from fairlead.config.problems import Problem, Report
from fairlead.config.registry import Registry, takes_filters
from fairlead.config.schema import Config, PluginSpec, PolicySpec
from fairlead.core.errors import PASSING, PluginError, described
from fairlead.core.policy import Filter, Picker, Policy, ReportsErrors, Scorer, clamped
from fairlead.core.prefix import ChainHasher
from fairlead.core.profile import Profile
from fairlead.plugins.guarding import GuardedFilter, GuardedPicker, Measuring, Parsing

#: The type of the scorers by which prompts are cut.
CUTS = "prefix-aware"


def _named(policy: Any) -> Any:
    if not isinstance(policy, Policy):
        raise TypeError("it has no `name`; an `__init__` of its own must call `super().__init__(*given, **named)`")
    return policy


_GUARDS: dict[str, Callable[[Any], Any]] = {
    "filter": GuardedFilter,
    "scorer": clamped,
    "picker": GuardedPicker,
    "policy": _named,
}


def build_policy(
    config: Config, on_plugin_error: Callable[[PluginError], None] | None = None, registry: Registry | None = None
) -> Policy:
    """The policy that `config.policy` describes: a profile, unless it names a policy plugin.

    Raises `PluginError` if a plugin cannot be built.
    """
    registry = registry or Registry()
    policy = config.policy
    filters = [cast(Filter, make(spec, registry)) for spec in policy.filters]
    if policy.plugin is not None:
        more = {"filters": filters} if takes_filters(registry, policy.plugin.type) else {}
        made = make(policy.plugin, registry, **more)
        if isinstance(made, ReportsErrors):
            made.report_to(on_plugin_error)
        return cast(Policy, made)
    assert policy.picker is not None
    return Profile(
        policy.name,
        filters,
        [(cast(Scorer, make(spec, registry)), spec.weight) for spec in policy.scorers],
        cast(Picker, make(policy.picker, registry)),
        on_plugin_error,
    )


def check_made(specs: Iterable[PluginSpec], registry: Registry, report: Report) -> None:
    for spec in specs:
        more: dict[str, Any] = {}
        if spec.kind == "policy" and takes_filters(registry, spec.type):
            more["filters"] = []
        try:
            make(spec, registry, **more)
        except PluginError as error:
            report.extend([Problem(spec.path, spec.lines.get("type", 0), str(error))])


def make(spec: PluginSpec, registry: Registry, **more: Any) -> Any:
    """Build the plugin that a spec describes. Filters, scorers and pickers of other distributions are guarded. Raises
    `PluginError`."""
    registered = registry.find(spec.kind, spec.type)
    if registered is None:
        raise PluginError(spec.type, f"is no longer there as {a_kind(spec.kind)}")
    try:
        plugin = registered.cls(spec.parameters, name=spec.name, **more)
        return _GUARDS[spec.kind](plugin) if registered.foreign and spec.kind in _GUARDS else plugin
    except PASSING:
        raise
    except BaseException as error:
        why = described(error)
        called_here = error.__traceback__ is not None and error.__traceback__.tb_next is None  # not from inside
        if isinstance(error, TypeError) and called_here:
            why += f"; it is called with (parameters, {', '.join(f'{key}=…' for key in ('name', *more))})"
        raise PluginError(spec.name, f"({spec.path}) could not be made: {why}") from error


def build_measure(config: Config, on_plugin_error: Callable[[PluginError], None] | None = None) -> Measuring | None:
    """What reads additional columns from metrics pages; `None` if no source is configured. Raises `PluginError`."""
    registry = Registry()
    sources = [make(spec, registry) for spec in config.metric_sources]
    return Measuring(sources, on_plugin_error, monotonic) if sources else None


def build_parse(
    config: Config, on_plugin_error: Callable[[PluginError], None] | None = None
) -> Callable[..., ParsedRequest]:
    """The function that reads request bodies. Raises `PluginError`."""
    registry = Registry()
    parsers = [make(spec, registry) for spec in config.parsers]
    return Parsing(parsers, on_plugin_error, monotonic) if parsers else parse_request


def build_hasher(config: Config) -> ChainHasher:
    """A hasher with the finest block size of the configured `prefix-aware` scorers."""
    return ChainHasher(finest=round(finest_block(config.policy) * BYTES_PER_TOKEN))


def finest_block(policy: PolicySpec, default: int = HASH_BLOCK_SIZE) -> int:
    """The finest block size of the `prefix-aware` scorers; `default` if there are none."""
    return min((spec.parameters.hash_block_size for spec in policy.scorers if spec.type == CUTS), default=default)
