"""Which changes of a configuration apply to a running scheduler.

Rules
* Changes that can take effect between two decisions apply: the policy, limits, log level, the list of endpoints.
* Changes to settings with which a socket, a process or a scrape connection was opened are refused, with the reason. The
  old value stays, and all other changes in the same file still apply.
* What is in force depends on how the scheduler began and on what the file contains now, not on what it contained
  between. So schedulers that start at different times have the same. The exception is flow control that was off at
  the start: until a restart it keeps the settings with which it was turned on.
* Places in the file are not compared: a file that was only rearranged changes nothing.
"""

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from fairlead.config.check import fields
from fairlead.config.plugins import CUTS, finest_block
from fairlead.config.problems import Problem
from fairlead.config.schema import (
    BandSpec,
    Config,
    EndpointSource,
    FlowSpec,
    Models,
    Parsing,
    PluginSpec,
    PolicySpec,
    Section,
    Settings,
    implied_flow_control,
)
from fairlead.plugins.params import camel

_PORTS: Final = "its port is open already"
_PLUGINS: Final = "these plugins are built at the start"
#: Fields of `Config` whose changes never apply, and why.
_FIXED: Final[Mapping[str, str]] = {
    "gateway": "the gateway was started with it",
    "ext_proc": _PORTS,
    "als": _PORTS,
    "admin": _PORTS,
    "metrics": "the scraper was started with it",
    "kubernetes": "its watches were started with it",
    "headers": "sessions were started with it",
    "journal": "its files are open already",
    "state": "its file was read at the start",
    "autoscaling": "its targets were read at the start",
    "topology": "endpoints got their zone and node by it when they came up",
    "warming": "prompts are counted by it from the start on",
    "tokens": "tokenisers are loaded at the start",
    "replicas": "the connection to other schedulers was opened with it",
    "tracing": "its exporter was started with it",
    "kv_events": "its subscriptions were started with it",
    "seed": "the random generator was seeded at the start",
    "metric_sources": _PLUGINS,
    "parsers": _PLUGINS,
}
_QUEUES: Final = "its queues were created with it, and requests may wait in them"
_HIGHER: Final = "the ports were opened with the lower limit"
_CONVERSATIONS: Final = "conversations are recognised from the start on, or not at all"
_SOURCE: Final = "they come from Kubernetes, or not, as at the start"
_PARENT: Final = "the process that keeps the gateway running writes so too"
_MANIFESTS: Final = "the content of the files is followed, but not this setting"
#: Fields that are not settings.
_IGNORED: Final = frozenset({"source", "notes", "flags", "pools"})


class Changes(Struct, frozen=True):
    """The changes that apply. `config` is the old configuration with just these; `paths` are JSON paths for people."""

    config: Config
    paths: tuple[str, ...] = ()
    #: Whether the listed endpoints changed.
    endpoints: bool = False


def plan_reload(old: Config, new: Config, begun: Config | None = None) -> tuple[Changes, list[Problem]]:
    """Compare two configurations: (changes that apply, changes that are refused). None is modified. `begun`: what the
    scheduler began with, if `old` is not that. `begun` and `new` may lack what this worker has of its own."""
    begun = begun or old
    if (begun.als.port, new.als.port) == (begun.ext_proc.port, new.ext_proc.port):  # als.port follows extProc.port
        new = new.model_copy(update={"als": new.als.model_copy(update={"port": begun.als.port})})
    if begun.gateway.mode != new.gateway.mode and (new.flow_control is None or new.flow_control.implied):
        implied = implied_flow_control(new.policy, new.model_copy(update={"gateway": begun.gateway}))
        new = new.model_copy(update={"flow_control": implied})
    fixed = dict(_FIXED)
    if begun.kubernetes.on != new.kubernetes.on:  # the other source is not started, so this one stays
        fixed["endpoints"] = _SOURCE
    applied: dict[str, Any] = {"source": new.source, "notes": new.notes, "pools": new.pools}
    paths: list[str] = []
    refused: list[Problem] = []
    if begun.gateway.mode == "embedded" and new.log.format != begun.log.format:
        refused.append(_refusal("$.log.format", _PARENT))
        new = new.model_copy(update={"log": new.log.model_copy(update={"format": begun.log.format})})
    values = [
        (name, first, before, after) for (name, first), (_, before), (_, after) in zip(begun, old, new, strict=True)
    ]
    for name, first, before, after in sorted(values, key=lambda value: value[0] in Settings.model_fields):
        if name in _IGNORED or meaning(first if name in fixed else before) == meaning(after):
            continue
        if name in fixed:
            refused += [_refusal(path, fixed[name]) for path in _differences(first, after, f"$.{camel(name)}")]
            continue
        kept, changed = _section(name, first, before, after, refused)
        if changed:
            applied[name] = kept
            paths += changed
    return Changes(old.model_copy(update=applied), tuple(paths), endpoints="endpoints" in applied), refused


def _section(name: str, first: Any, before: Any, after: Any, refused: list[Problem]) -> tuple[Any, list[str]]:
    """Compare a value of three configurations: (the new value without refused changes, the paths that changed)."""
    path = f"$.{camel(name)}"
    if isinstance(before, PolicySpec):
        size = finest_block(first)
        if finest_block(after, size) != size:
            refused.append(_refusal(f"{path}.hashBlockSize", "the prefix index has blocks of the old size"))
            after = _cut_to(after, size)
    if isinstance(before, EndpointSource):
        if before.file or after.file:
            refused.append(_refusal(path, "another file, or a list in the place of a file, is not followed"))
            return before, []
        return after, [path]
    if _queues(after):
        made = first if _queues(first) else before
        if _queues(made) and meaning(made) != meaning(after):
            refused.append(_refusal(path, _QUEUES))
            after = made
    if isinstance(before, Models):
        followed = {"file": before.file, "watch": before.watch, "pool": before.pool, "namespace": before.namespace}
        given, after = after, after.model_copy(update=followed)
        refused += [_refusal(difference, _MANIFESTS) for difference in _differences(after, given, path)]
    if isinstance(before, Parsing):
        if after.max_body_bytes > first.max_body_bytes:
            refused.append(_refusal(f"{path}.maxBodyBytes", _HIGHER))
            after = after.model_copy(update={"max_body_bytes": first.max_body_bytes})
        if after.conversations != before.conversations:
            refused.append(_refusal(f"{path}.conversations", _CONVERSATIONS))
            after = after.model_copy(update={"conversations": before.conversations})
    if isinstance(before, Section):
        return after, _differences(before, after, path)
    return after, [path] if meaning(before) != meaning(after) else []


def _queues(value: Any) -> bool:
    """Whether flow control is on."""
    return isinstance(value, FlowSpec) and value.settings.enabled


def _differences(before: Any, after: Any, path: str) -> list[str]:
    """The paths of the fields of a section that differ. Any other value differs as a whole."""
    if not (isinstance(before, Section) and type(before) is type(after)):
        return [path] if before != after else []
    return [
        difference
        for (key, (_, old)), (_, new) in zip(zip(fields(type(before)), before, strict=True), after, strict=True)
        for difference in _differences(old, new, f"{path}.{key}")
    ]


def meaning(value: Any) -> Any:
    """A value without its place in the file, for comparisons."""
    if isinstance(value, PolicySpec):
        return value.name, *map(meaning, (value.filters, value.scorers, value.picker, value.plugin))
    if isinstance(value, PluginSpec):
        return value.kind, value.type, value.name, value.weight, value.parameters
    if isinstance(value, FlowSpec):
        return value.implied, value.settings, *map(meaning, value.plugins()), *map(meaning, value.bands)
    if isinstance(value, BandSpec):
        return value.settings, meaning(value.fairness), meaning(value.ordering)
    if isinstance(value, tuple):
        return tuple(map(meaning, value))
    return value


def _cut_to(policy: PolicySpec, size: int) -> PolicySpec:
    """The policy with this block size in all its `prefix-aware` scorers."""
    cut = (
        replace(spec, given=spec.parameters.model_copy(update={"hash_block_size": size})) if spec.type == CUTS else spec
        for spec in policy.scorers
    )
    return replace(policy, scorers=tuple(cut))


def _refusal(path: str, reason: str) -> Problem:
    return Problem(path, 0, f"does not apply while running: {reason}", "restart to apply it")
