"""One Kubernetes object that says something of model names → a noun: InferenceModel, InferenceObjective,
InferenceModelRewrite.

The schemas are those of the published CRDs, unknown fields included: what an API server would refuse or drop is a
problem here. More is accepted only where a revision of the API has it: criticality `Default`, weight 0, `poolRefs` and
`poolSelector` of objectives. A noun for a name that nobody could ask for (an empty one) is refused as well.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from math import inf
from typing import Annotated, Any, Literal

from msgspec import Meta
from msgspec.structs import replace

from fairlead.config.check import INVALID, check, struct
from fairlead.config.problems import Report, describe
from fairlead.config.schema import Section
from fairlead.model.inference import (
    InferenceModel,
    InferenceModelRewrite,
    InferenceObjective,
    Origin,
    RewriteRule,
    Target,
)
from fairlead.wire.problem import Place, shorten

LEGACY_GROUP, GROUP = "inference.networking.x-k8s.io", "llm-d.ai"
_VERSIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "InferenceModel": {LEGACY_GROUP: ("v1alpha1", "v1alpha2")},
    "InferenceObjective": {GROUP: ("v1alpha2", "v1"), LEGACY_GROUP: ("v1alpha2",)},
    "InferenceModelRewrite": {GROUP: ("v1alpha2",), LEGACY_GROUP: ("v1alpha2",)},
}

Named = Annotated[str, Meta(min_length=1, max_length=253)]
Weight = Annotated[int, Meta(ge=0, le=1_000_000)]
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Noun = InferenceModel | InferenceObjective | InferenceModelRewrite


class PoolRef(Section, frozen=True, kw_only=True):
    #: Not compared: revisions of the CRDs have different defaults.
    group: str = ""
    kind: Annotated[str, Meta(min_length=1, max_length=63)] = "InferencePool"
    name: Named


class TargetModel(Section, frozen=True, kw_only=True):
    name: Named
    weight: Weight | None = None


class ModelSpec(Section, frozen=True, kw_only=True):
    model_name: Annotated[str, Meta(min_length=1, max_length=256)]
    criticality: Literal["Critical", "Standard", "Default", "Sheddable"] | None = None
    target_models: Annotated[tuple[TargetModel, ...], Meta(max_length=10)] = ()
    pool_ref: PoolRef


class ObjectiveSpec(Section, frozen=True, kw_only=True):
    priority: Int32 | None = None
    pool_ref: PoolRef | None = None
    pool_refs: tuple[PoolRef, ...] | None = None
    pool_selector: dict[str, Any] | None = None


class ModelMatch(Section, frozen=True, kw_only=True):
    type: Literal["Exact"] = "Exact"
    value: Annotated[str, Meta(min_length=1)]


class Match(Section, frozen=True, kw_only=True):
    model: ModelMatch


class RewriteTarget(Section, frozen=True, kw_only=True):
    model_rewrite: Annotated[str, Meta(min_length=1)]
    weight: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None


class Rule(Section, frozen=True, kw_only=True):
    matches: tuple[Match, ...] = ()
    targets: tuple[RewriteTarget, ...]


class RewriteSpec(Section, frozen=True, kw_only=True):
    pool_ref: PoolRef
    rules: tuple[Rule, ...]


def read_object(value: object, report: Report, place: Place = (), kind: str = "", version: str = "") -> Noun | None:
    """One object, from a file or an API server. `kind` and `version` stand for what items of a list leave out.

    `None` when it is wrong, or of a kind that says nothing of model names; the report has the reason.
    """
    if not isinstance(value, dict):
        report.add(place, f"expected an object, got {describe(value)}")
        return None
    kind = value.get("kind", kind)
    if not isinstance(kind, str) or not kind:
        report.add(place, "field 'kind' is missing")
        return None
    if kind not in _VERSIONS:
        report.note((*place, "kind"), f"{shorten(kind)} says nothing of model names; it is left out")
        return None
    before = len(report.problems)
    for key in value:
        if key not in ("apiVersion", "kind", "metadata", "spec", "status"):
            report.unknown((*place, key), "field", key, ("apiVersion", "kind", "metadata", "spec"))
    _check_version(kind, value.get("apiVersion", version), (*place, "apiVersion"), report)
    origin = _origin(value.get("metadata"), (*place, "metadata"), report)
    shape, make = _KINDS[kind]
    spec = INVALID
    if "spec" in value:
        spec = struct(shape, value["spec"], (*place, "spec"), report)
    else:
        report.add(place, "field 'spec' is missing")
    if spec is INVALID or origin is None or len(report.problems) > before:
        return None
    made = make(origin, spec, (*place, "spec"), report)
    return made if len(report.problems) == before else None


def _check_version(kind: str, found: object, place: Place, report: Report) -> None:
    known = [f"{group}/{version}" for group, versions in _VERSIONS[kind].items() for version in versions]
    if not found:
        report.add(place[:-1], "field 'apiVersion' is missing", f"known: {', '.join(known)}")
    elif found not in known:
        report.add(place, f"{kind} has no version {describe(found)}", f"known: {', '.join(known)}")


def _origin(metadata: object, place: Place, report: Report) -> Origin | None:
    """Of the metadata only what matters here is looked at; an API server adds much."""
    if not isinstance(metadata, dict):
        report.add(place, f"expected a mapping, got {describe(metadata)}")
        return None
    name = check(Named, metadata.get("name"), (*place, "name"), report)
    namespace = check(Named, metadata.get("namespace") or "default", (*place, "namespace"), report)
    created = _seconds(metadata.get("creationTimestamp"))
    if created is None:
        said = describe(metadata["creationTimestamp"])
        report.add((*place, "creationTimestamp"), f"expected a time such as 2026-01-31T12:00:00Z, got {said}")
    if name is INVALID or namespace is INVALID or created is None:
        return None
    return Origin(namespace=namespace, name=name, created=created)


def _seconds(stamp: object) -> float | None:
    if stamp is None:
        return inf
    try:
        moment = datetime.fromisoformat(stamp) if isinstance(stamp, str) else None
        return None if moment is None else moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()
    except (ValueError, OverflowError):
        return None


def _model(origin: Origin, spec: ModelSpec, place: Place, report: Report) -> InferenceModel:
    given = [target.weight is not None for target in spec.target_models]
    if any(given) and not all(given):
        report.add((*place, "targetModels"), "weights should be set for all models, or none of the models")
    return InferenceModel(
        origin=_of_pools(origin, [spec.pool_ref], (*place, "poolRef"), report),
        model=spec.model_name,
        targets=tuple(Target(target.name, target.weight) for target in spec.target_models),
        criticality=spec.criticality or "Standard",
    )


def _objective(origin: Origin, spec: ObjectiveSpec, place: Place, report: Report) -> InferenceObjective:
    refs = list(spec.pool_refs or ())
    if spec.pool_ref is not None:
        refs.append(spec.pool_ref)
    elif spec.pool_refs is None and spec.pool_selector is None:
        report.add(place, "field 'poolRef' is missing")
    if spec.pool_selector:
        report.note((*place, "poolSelector"), "labels of pools are not known here; it applies to every pool")
        refs = []
    return InferenceObjective(origin=_of_pools(origin, refs, (*place, "poolRef"), report), priority=spec.priority or 0)


def _rewrite(origin: Origin, spec: RewriteSpec, place: Place, report: Report) -> InferenceModelRewrite:
    rules = []
    for i, rule in enumerate(spec.rules):
        where = (*place, "rules", i, "targets")
        if not rule.targets:
            report.add(where, "at least one target is needed")
        given = [target.weight is not None for target in rule.targets]
        if any(given) and not all(given):
            report.note(where, "targets without a weight get nothing, because others have one")
        targets = tuple(Target(target.model_rewrite, target.weight) for target in rule.targets)
        rules.append(RewriteRule(tuple(match.model.value for match in rule.matches), targets))
    refs = [spec.pool_ref]
    return InferenceModelRewrite(origin=_of_pools(origin, refs, (*place, "poolRef"), report), rules=tuple(rules))


def _of_pools(origin: Origin, refs: list[PoolRef], place: Place, report: Report) -> Origin:
    for ref in refs:
        if ref.kind != "InferencePool":
            report.add((*place, "kind"), f"expected InferencePool, got {describe(ref.kind)}")
    return replace(origin, pools=tuple(ref.name for ref in refs))


_KINDS: dict[str, tuple[type[Section], Callable[..., Noun]]] = {
    "InferenceModel": (ModelSpec, _model),
    "InferenceObjective": (ObjectiveSpec, _objective),
    "InferenceModelRewrite": (RewriteSpec, _rewrite),
}
