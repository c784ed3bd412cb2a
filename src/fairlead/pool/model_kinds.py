"""Read the Kubernetes objects that define model names: InferenceModel, InferenceObjective, InferenceModelRewrite.

Rules
* The schemas are those of the published CRDs. Whatever an API server would refuse or drop, including unknown fields, is
  a problem here, with its path and line. In objects of an API server unknown fields are those of a newer CRD, whose
  defaults all objects get: they are left out and noted, but not within a match, which they would widen.
* Anything beyond the CRDs is accepted only if some revision of the API has it: criticality `Default`, weight 0,
  `poolRefs` and `poolSelector` of objectives. Empty model names are refused too: no client could ask for them.
* A file may contain any number of documents and lists (`List`, `InferenceModelList`, …). Other kinds cause notes, so
  that a file that also contains the pool and its Deployment can be used unchanged.
* No text raises an exception. A file with any problem must not be used at all; `Manifests.problems` says why. For
  objects of an API server, only the object with the problem is left out, and its condition says so.
* Sizes are bounded as for every YAML file here: 1 MiB, and a limit on values after aliases are expanded.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from math import inf
from typing import Annotated, Any, Literal

from msgspec import Struct
from msgspec.structs import replace
from pydantic import Field

from fairlead.config import yaml
from fairlead.config.check import only_known, read
from fairlead.config.problems import Place, Problem, Report, describe, shorten
from fairlead.config.schema import Section
from fairlead.config.yaml import MAX_BYTES
from fairlead.core.models import (
    ANY_LATENCY,
    Catalogue,
    InferenceModel,
    InferenceModelRewrite,
    InferenceObjective,
    Latency,
    ModelDefinition,
    ModelSet,
    Origin,
    RewriteRule,
    Target,
)
from fairlead.pool.kube.status import ACCEPTED, Condition, accepted_conditions

# ---- one object ----

LEGACY_GROUP, GROUP = "inference.networking.x-k8s.io", "llm-d.ai"
#: The groups and versions of each kind. The first group that has an object counts, in its first installed version.
_VERSIONS = {
    "InferenceModel": ((LEGACY_GROUP, "v1alpha2"), (LEGACY_GROUP, "v1alpha1")),
    "InferenceObjective": ((GROUP, "v1alpha2"), (GROUP, "v1"), (LEGACY_GROUP, "v1alpha2")),
    "InferenceModelRewrite": ((GROUP, "v1alpha2"), (LEGACY_GROUP, "v1alpha2")),
}
#: The reason of an object whose pool does not exist. The published APIs have none for it.
POOL_NOT_FOUND = "PoolNotFound"
#: The kind of each plural.
KINDS = {f"{kind.lower()}s": kind for kind in _VERSIONS}
#: The groups and versions of each plural, as above.
SERVED = {plural: _VERSIONS[kind] for plural, kind in KINDS.items()}

Named = Annotated[str, Field(min_length=1, max_length=253)]
Weight = Annotated[int, Field(ge=0, le=1_000_000)]
Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]


class Metadata(Section):
    """The fields of an object's metadata that are read here. An API server adds many others."""

    name: Named
    namespace: Named


class PoolRef(Section):
    group: str = Field(default="", description="Not compared: revisions of the CRDs have different defaults.")
    kind: str = Field(default="InferencePool", min_length=1, max_length=63)
    name: Named


class TargetModel(Section):
    name: Named
    weight: Weight | None = None


class ModelSpec(Section):
    model_name: str = Field(min_length=1, max_length=256)
    criticality: Literal["Critical", "Standard", "Default", "Sheddable"] | None = None
    target_models: tuple[TargetModel, ...] = Field(default=(), max_length=10)
    pool_ref: PoolRef


class ObjectiveSpec(Section):
    priority: Int32 | None = None
    pool_ref: PoolRef | None = None
    pool_refs: tuple[PoolRef, ...] | None = None
    pool_selector: dict[str, Any] | None = None


class ModelMatch(Section):
    type: Literal["Exact"] = "Exact"
    value: str = Field(min_length=1)


class Match(Section):
    model: ModelMatch


class RewriteTarget(Section):
    model_rewrite: str = Field(min_length=1)
    weight: Annotated[int, Field(ge=1, le=1_000_000)] | None = None


class Rule(Section):
    matches: tuple[Match, ...] = ()
    targets: tuple[RewriteTarget, ...]


class RewriteSpec(Section):
    pool_ref: PoolRef
    rules: tuple[Rule, ...]


def read_object(
    value: object, report: Report, place: Place = (), kind: str = "", version: str = ""
) -> ModelDefinition | None:
    """Read an object from a file or an API server. `kind` and `version`: defaults for items of a list, which omit them.

    Returns `None` if the object is wrong or of another kind; the report has the reason.
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
    spec = None
    if "spec" in value:
        spec = read(shape, value["spec"], (*place, "spec"), report)
    else:
        report.add(place, "field 'spec' is missing")
    if spec is None or origin is None or len(report.problems) > before:
        return None
    made = make(origin, spec, (*place, "spec"), report)
    latency = _latency(value["metadata"], (*place, "metadata", "annotations"), report)
    if latency != ANY_LATENCY and not isinstance(made, InferenceModelRewrite):
        made = replace(made, latency=latency)
    return made if len(report.problems) == before else None


def _check_version(kind: str, given: object, place: Place, report: Report) -> None:
    known = ["/".join(served) for served in _VERSIONS[kind]]
    if not given:
        report.add(place[:-1], "field 'apiVersion' is missing", f"known: {', '.join(known)}")
    elif given not in known:
        report.add(place, f"{kind} has no version {describe(given)}", f"known: {', '.join(known)}")


def _origin(metadata: object, place: Place, report: Report) -> Origin | None:
    if not isinstance(metadata, dict):
        report.add(place, f"expected a mapping, got {describe(metadata)}")
        return None
    given = {"name": metadata.get("name"), "namespace": metadata.get("namespace") or "default"}
    named = read(Metadata, given, place, report)
    created = _seconds(metadata.get("creationTimestamp"))
    if created is None:
        said = describe(metadata["creationTimestamp"])
        report.add((*place, "creationTimestamp"), f"expected a time such as 2026-01-31T12:00:00Z, got {said}")
    if named is None or created is None:
        return None
    return Origin(namespace=named.namespace, name=named.name, created=created)


def _latency(metadata: Mapping[str, Any], place: Place, report: Report) -> Latency:
    annotations = metadata.get("annotations")
    annotations = annotations if isinstance(annotations, dict) else {}
    milliseconds = dict.fromkeys(("ttft", "tpot"), 0.0)
    for name in milliseconds:
        said = annotations.get(key := f"fairlead.dev/slo-{name}-ms", "0")
        try:
            milliseconds[name] = float(said)
        except (TypeError, ValueError):
            milliseconds[name] = -1.0
        if not 0.0 <= milliseconds[name] < 1e9:
            report.add((*place, key), f"expected milliseconds such as '500', got {describe(said)}")
    return Latency(**{f"{name}_ms": value for name, value in milliseconds.items()})


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


_KINDS: dict[str, tuple[type[Section], Callable[..., ModelDefinition]]] = {
    "InferenceModel": (ModelSpec, _model),
    "InferenceObjective": (ObjectiveSpec, _objective),
    "InferenceModelRewrite": (RewriteSpec, _rewrite),
}


def _model_set(definitions: Iterable[ModelDefinition]) -> ModelSet:
    given = list(definitions)
    return ModelSet(
        tuple(definition for definition in given if isinstance(definition, InferenceModel)),
        tuple(definition for definition in given if isinstance(definition, InferenceObjective)),
        tuple(definition for definition in given if isinstance(definition, InferenceModelRewrite)),
    )


# ---- a file of objects ----

MAX_OBJECTS = 10_000
#: The most values in all documents of a file.
_MAX_VALUES = 300_000
_MARKER = re.compile(rb"^---(?=[ \t\r\n]|$)", re.MULTILINE)
#: Lines without content: comments, directives, markers.
_NO_CONTENT = re.compile(rb"(?:[ \t]*(?:#.*|%.*|\.\.\.[ \t]*|---[ \t]*(?:#.*)?)?\r?(?:\n|$))*+")


class Manifests(Struct, frozen=True):
    """The content of a file."""

    models: ModelSet = ModelSet()
    problems: tuple[Problem, ...] = ()
    #: Not problems, but worth knowing.
    notes: tuple[Problem, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether the file has no objects, also of other kinds: those are noted."""
        return not (self.models.size or self.problems or self.notes)


def read_manifests(text: bytes) -> Manifests:
    """Read all documents of a YAML or JSON text."""
    if len(text) > MAX_BYTES:
        return Manifests(problems=(Problem("$", 0, f"the text is larger than {MAX_BYTES >> 20} MiB"),))
    reader = _Reader()
    for offset, document in _documents(text):
        if not reader.document(document, offset):
            break
    return reader.manifests()


def _documents(text: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (lines before it, text) of each document. In YAML, three dashes at the start of a line are always a marker.

    Directives and comments before the first marker belong to the document after it.
    """
    borders = [match.start() for match in _MARKER.finditer(text)]
    starts = [0, *borders]
    match = _NO_CONTENT.match(text, 0, borders[0]) if borders else None
    if match and match.end() == borders[0]:
        starts = [0, *borders[1:]]
    line, last = 0, 0
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        line += text.count(b"\n", last, start)
        last = start
        yield line, text[start:end]


class _Reader:
    def __init__(self) -> None:
        self._definitions: dict[tuple[str, str], tuple[str, ModelDefinition]] = {}
        self._problems: list[Problem] = []
        self._notes: list[Problem] = []
        self._values = 0
        self._objects = 0

    def manifests(self) -> Manifests:
        models = _model_set(definition for _, definition in self._definitions.values())
        return Manifests(models, tuple(self._problems), tuple(self._notes))

    def document(self, text: bytes, offset: int) -> bool:
        """Read a document. Return false if there are already too many problems or objects."""
        document = yaml.parse(text)
        self._values += _count(document.value)
        if self._values > _MAX_VALUES:
            self._problems.append(Problem("$", offset + 1, f"more than {_MAX_VALUES} values in one file"))
            return False
        tree = document.tree
        report = Report(lambda place: offset + tree.line(place) if tree.line(place) else 0)
        report.extend([replace(problem, line=offset + problem.line) for problem in document.problems])
        if not document.problems and document.value is not None:
            self._take(document.value, (), report, "", "")
        report.close()
        self._problems += report.problems
        self._notes += report.notes[:100]
        return len(self._problems) < 100 and self._objects <= MAX_OBJECTS

    def _take(self, value: object, place: Place, report: Report, kind: str, version: str) -> None:
        own = value.get("kind", kind) if isinstance(value, dict) else ""
        if isinstance(value, dict) and isinstance(own, str) and own.endswith("List") and not place:
            items = value.get("items")
            if not isinstance(items, list):
                report.add(("items",), f"expected a list, got {describe(items)}")
                return
            version = value.get("apiVersion", "")
            for i, item in enumerate(items):
                typed = own.removesuffix("List")
                self._take(item, ("items", i), report, typed, version if typed else "")
            return
        self._objects += 1
        if self._objects > MAX_OBJECTS:
            report.add(place, f"more than {MAX_OBJECTS} objects in one file")
            return
        definition = read_object(value, report, place, kind, version)
        if definition is not None and isinstance(value, dict):
            self._keep(definition, str(value.get("apiVersion", version)).partition("/")[0], place, report)

    def _keep(self, definition: ModelDefinition, group: str, place: Place, report: Report) -> None:
        """Keep an object. If it is given in both groups, the newer group counts, as when both CRDs are installed."""
        key = type(definition).__name__, str(definition.origin)
        former = self._definitions.get(key)
        if former is not None and former[0] == group:
            report.add(place, f"{key[0]} {shorten(key[1])} is given twice")
        elif former is not None:
            report.note(place, f"{key[0]} {shorten(key[1])} is given in both groups; {GROUP} counts")
        if former is None or group == GROUP:
            self._definitions[key] = group, definition


def _count(value: object) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(_count, value.values()))
    return 1 + sum(map(_count, value)) if isinstance(value, list) else 1


# ---- objects of an API server, and the conditions for their status ----

_SHOWN = 5
#: The most bytes of an object that is read. Meanwhile nothing is decided: it takes 0.7 ms per KiB.
MAX_OBJECT = 256 << 10


class ModelObject(Struct, frozen=True):
    """An object of an API server. `item`: for writing its status. `definition`: `None` if it is unusable."""

    kind: str
    item: dict[str, Any]
    definition: ModelDefinition | None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def pools(self) -> Sequence[str]:
        """The pools that it names; empty = it may be for any."""
        pools: Sequence[str] = self.item["spec"]["pools"] if self.definition is None else self.definition.origin.pools
        return pools


def read_model_object(value: Mapping[str, Any], kind: str, version: str, size: int = 0) -> ModelObject:
    """Read an object of an API server. `version`: `group/version`. `size`: its bytes. Never raises."""
    report, known, definition = Report(lambda place: 0), dict(value), None
    if size > MAX_OBJECT:
        report.add(("spec",), f"the object is larger than {MAX_OBJECT >> 10} KiB")
    else:
        if "spec" in known:
            known["spec"] = only_known(_KINDS[kind][0], known["spec"], ("spec",), report, (Match,))
        definition = read_object(known, report, (), kind, version)
    report.close()
    metadata = value.get("metadata")
    metadata, refs = metadata if isinstance(metadata, dict) else {}, _pool_refs(value)
    item = {
        "apiVersion": value.get("apiVersion") or version,
        "kind": value.get("kind") or kind,
        "metadata": {key: metadata.get(key) for key in ("name", "namespace", "generation")},
        "spec": {"pools": [ref["name"] for ref in refs], "groups": [ref.get("group") or "" for ref in refs]},
        "status": {"conditions": accepted_conditions(value)},
    }
    problems = tuple(str(problem) for problem in report.problems[:_SHOWN])
    return ModelObject(kind, item, definition, problems, tuple(str(note) for note in report.notes[:_SHOWN]))


def model_set(objects: Mapping[str, Mapping[str, ModelObject]], pool: str, namespace: str) -> ModelSet:
    """The definitions for a pool, from objects by plural and key."""
    definitions = (
        item.definition for table in objects.values() for item in table.values() if item.definition is not None
    )
    return _model_set(definitions).of_pool(pool, namespace)


def conditions(
    objects: Mapping[str, Mapping[str, ModelObject]], pool: str, namespace: str
) -> dict[tuple[str, str], Condition]:
    """The condition for each object of the pool, by plural and key. Objects of other pools are left out."""
    catalogue = Catalogue(model_set(objects, pool, namespace))
    owners = dict(catalogue.conflicts)
    result: dict[tuple[str, str], Condition] = {}
    for plural, table in objects.items():
        for key, item in table.items():
            if item.definition is not None and not item.definition.origin.is_for(pool, namespace):
                continue
            if item.definition is None and pool not in item.pools:
                continue
            if plural == "inferencemodels":
                result[plural, key] = _condition(item, owners.get(key))
            else:
                older = catalogue.overruled.get(key, {}) if plural == "inferencemodelrewrites" else {}
                said = [f"the older {used} decides for {name or 'all other models'}" for name, used in older.items()]
                result[plural, key] = _condition(item, None, said[:_SHOWN])
    return result


def _condition(item: ModelObject, owner: str | None, overruled: Sequence[str] = ()) -> Condition:
    if item.definition is None:
        return Condition(False, "Invalid", "; ".join(item.problems))
    if owner is not None and isinstance(item.definition, InferenceModel):
        message = f"modelName {item.definition.model} is taken by the older InferenceModel {owner}"
        return Condition(False, "ModelNameInUse", message)
    return Condition(True, ACCEPTED, "; ".join(("in use", *overruled, *item.notes)))


def without_pools(item: ModelObject, group: str) -> Condition | None:
    """The condition for an object none of whose pools exists. `None` = leave it, because it was never accepted, or it
    names a pool of another group than `group`, which another scheduler may serve."""
    if any(named not in ("", group) for named in item.item["spec"]["groups"]):
        return None
    said: Mapping[str, Any] = next(iter(item.item["status"]["conditions"]), {})
    if said.get("status") != "True" and said.get("reason") != POOL_NOT_FOUND:
        return None
    return Condition(False, POOL_NOT_FOUND, f"there is no usable InferencePool {' or '.join(item.pools)}")


def _pool_refs(value: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The pools that an object refers to, as far as they can be read."""
    spec = value.get("spec")
    if not isinstance(spec, dict):
        return []
    several = spec.get("poolRefs")
    refs = [spec.get("poolRef"), *(several if isinstance(several, list) else ())]
    return [ref for ref in refs if isinstance(ref, dict) and isinstance(ref.get("name"), str)]
