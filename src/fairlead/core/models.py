"""Model names: how operators define them, and which target, priority and latency a request for a name gets."""

from bisect import bisect_right
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from math import inf, log
from random import Random
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from fairlead.core.apis import CONVERSATIONS, GRPC, GRPC_EMBED, MODELS, OTHER, RENDER, SGLANG, TOKENIZE
from fairlead.core.instructions import Instruction, Reject
from fairlead.core.records import DecisionRecord
from fairlead.core.request import PrefixChain, Request

# The definitions of model names: the three kinds of the Gateway API Inference Extension.
#
# `InferenceModel` (group `inference.networking.x-k8s.io`) defines a name that clients may ask for, its criticality and
# the models that serve it. Two successors replace it: `InferenceObjective` names a priority that a header refers to,
# `InferenceModelRewrite` (both also in group `llm-d.ai`) maps names to targets. Fields and defaults are those of the
# published CRDs. The rules further below say how the kinds work together.

#: The priority of each criticality: above 0 goes first, below 0 may be shed. `Default` is an older name of `Standard`,
#: which also applies if none is set.
CRITICALITY = {"Critical": 10, "Standard": 0, "Default": 0, "Sheddable": -10}


class Origin(Struct, frozen=True, kw_only=True):
    """Identifies an object, and says which pools it is for."""

    namespace: str
    name: str
    #: `metadata.creationTimestamp`, seconds since 1970. If objects conflict, the oldest wins. Optional in files.
    created: float = inf
    #: Names of the pools that it is for; empty = every pool.
    pools: tuple[str, ...] = ()

    @property
    def age_order(self) -> tuple[float, str, str]:
        """Sort key for objects of a kind: the one that wins comes first."""
        return self.created, self.namespace, self.name

    def is_for(self, pool: str, namespace: str) -> bool:
        """Whether it applies to the pool; an empty name matches all pools or namespaces."""
        if namespace and self.namespace != namespace:
            return False
        return not pool or not self.pools or pool in self.pools

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Target(Struct, frozen=True):
    """A model that serves a name. Its share of the traffic is weight / sum of weights."""

    name: str
    #: `None` = not given.
    weight: int | None = None


class Latency(Struct, frozen=True):
    """A latency objective in milliseconds; 0 = none."""

    ttft_ms: float = 0.0
    tpot_ms: float = 0.0


ANY_LATENCY = Latency()


class InferenceModel(Struct, frozen=True, kw_only=True):
    """A name that clients ask for."""

    origin: Origin
    #: The name in the request's body.
    model: str
    #: Empty = a model of the same name.
    targets: tuple[Target, ...] = ()
    #: A key of `CRITICALITY`.
    criticality: str = "Standard"
    latency: Latency = ANY_LATENCY


class InferenceObjective(Struct, frozen=True, kw_only=True):
    """A named priority and latency objective. Requests refer to it by header."""

    origin: Origin
    priority: int = 0
    latency: Latency = ANY_LATENCY


class RewriteRule(Struct, frozen=True):
    """Requests for one of `models` go to `targets`. Empty `models` = every request, also one that names no model."""

    models: tuple[str, ...]
    targets: tuple[Target, ...]


class InferenceModelRewrite(Struct, frozen=True, kw_only=True):
    origin: Origin
    rules: tuple[RewriteRule, ...] = ()


#: An object of any of the three kinds.
ModelDefinition = InferenceModel | InferenceObjective | InferenceModelRewrite


class ModelSet(Struct, frozen=True):
    """All objects that are defined at one time."""

    models: tuple[InferenceModel, ...] = ()
    objectives: tuple[InferenceObjective, ...] = ()
    rewrites: tuple[InferenceModelRewrite, ...] = ()

    @property
    def size(self) -> int:
        """The number of objects."""
        return len(self.models) + len(self.objectives) + len(self.rewrites)

    def of_pool(self, pool: str = "", namespace: str = "") -> "ModelSet":
        """Return the objects of the namespace that apply to the pool. An empty name matches all."""
        return self.where(lambda item: item.origin.is_for(pool, namespace))

    def where(self, kept: Callable[[ModelDefinition], bool]) -> "ModelSet":
        kinds = self.models, self.objectives, self.rewrites
        return ModelSet(*(tuple(filter(kept, items)) for items in kinds))  # type: ignore[arg-type]

    def __add__(self, other: "ModelSet") -> "ModelSet":
        return ModelSet(self.models + other.models, self.objectives + other.objectives, self.rewrites + other.rewrites)


class ModelRules(Struct, frozen=True, kw_only=True):
    """How strictly model names are checked. This is configuration; no manifest contains it."""

    #: Refuse requests for undefined names, once at least one InferenceModel is defined.
    reject_unmatched: bool = True
    #: Requests of one session always get the same target of a split.
    sticky_sessions: bool = False


# How the target model, the priority and the latency objective of a request are found.
#
# Rules, in this order (sources: the InferenceModel and InferenceModelRewrite CRDs, and the reference picker)
# 1. The incoming model is the body's `model`; it may be absent.
# 2. An InferenceModel of that name gives the target, by the weights of its targets, and a priority by its criticality.
# 3. The header `x-llm-d-model-name-rewrite` gives another target.
# 4. The InferenceModelRewrite rule that matches the *incoming* model overrides both. Only one rule is applied, never a
#    chain of rules. A rule that names the model beats one for all models; then the oldest object wins, then its first
#    rule.
# 5. An objective, named by header, overrides the priority. An undefined objective changes nothing.
# 6. The latency objective is that of the headers, else of the objective, else of the InferenceModel.
#
# If objects conflict, the oldest wins, by creation time, then by namespace and name. If only some targets of a split
# have weights, the others get no traffic; if none have weights, all get the same share.
#
# Once an InferenceModel is defined, names that neither 2 nor 4 knows are refused. So are undefined targets in the
# header: otherwise the header would bypass the check. `ModelRules.reject_unmatched` switches both off. If no model is
# named and the API does not need one, there is nothing to check: the request passes, and only its priority is looked
# up. A body on a path that we cannot read may name any model, so it is refused.

#: Names listed in an error message, at most.
_SHOWN = 20
#: Values of `Request.api` whose bodies need not name a model, or cannot. If such a body does name one, the name is
#: treated like any other.
_NAMELESS = frozenset((OTHER, MODELS, CONVERSATIONS, SGLANG, GRPC, GRPC_EMBED, TOKENIZE, RENDER))


#: OpenAI's machine-readable error code.
MODEL_NOT_FOUND = "model_not_found"


class Resolution(Struct, frozen=True, gc=False):
    """The target model, priority and latency objective of a request."""

    #: The model that the endpoint is asked for; empty = the request named none, and none is known.
    target: str
    priority: int
    #: The InferenceModelRewrite (`namespace/name`) that decided the target; empty = none.
    rewrite: str = ""
    latency: Latency = ANY_LATENCY


class Refusal(Struct, frozen=True):
    """Why a request is refused, as the client is told."""

    status: int
    code: str
    message: str
    param: str = "model"


def unnamed(request: Request, why: Refusal, now: float, policy: str, client: Any = None) -> list[Instruction]:
    """Return the answer to a request whose model is refused, and the record of it."""
    reject = Reject(
        request_id=request.id,
        status=why.status,
        reason=why.code,
        message=why.message,
        api=request.api,
        param=why.param,
        client=client,
    )
    record = DecisionRecord(request=request, at=now, policy=policy, outcome=why.code, status=why.status)
    return [reject, record]


def applied(request: Request, resolution: Resolution, nameless: bool) -> Request:
    """Return the request with its resolution. `nameless`: its prompt was hashed without the model, so the target is
    added to the hashes, because engines share no cached prefixes between models. What is known of a target's prefixes
    so stays known under another name, and when the targets of a name change."""
    target, prefix = resolution.target, request.prefix
    latency = resolution.latency
    if not nameless and target == request.model and resolution.priority == request.priority and latency == ANY_LATENCY:
        return request
    if nameless:
        prefix = salted(prefix, target)
    return replace(
        request,
        target=target if target != request.model else "",
        priority=resolution.priority,
        rewritten_by=resolution.rewrite,
        prefix=prefix,
        slo_ttft_ms=request.slo_ttft_ms or latency.ttft_ms,
        slo_tpot_ms=request.slo_tpot_ms or latency.tpot_ms,
    )


def salted(prefix: PrefixChain, model: str) -> PrefixChain:
    """Return the chain of a prompt that was hashed without the model, with the model."""
    salt = xxh3_64_intdigest(model.encode("utf-8", "surrogatepass"))
    return PrefixChain(tuple([block_hash ^ salt for block_hash in prefix.hashes]), prefix.ends)


class Split:
    """Targets and their shares of the traffic. `names` is empty if no target may get traffic."""

    __slots__ = ("_borders", "_weights", "names")

    def __init__(self, targets: Sequence[Target]) -> None:
        weighted = any(target.weight is not None for target in targets)
        shares = [(target.name, (target.weight or 0) if weighted else 1) for target in targets]
        shares = [(name, weight) for name, weight in shares if weight > 0]
        self.names = tuple(name for name, _ in shares)
        self._weights = [weight for _, weight in shares]
        self._borders = list(accumulate(self._weights))

    def choose(self, rng: Random, session: str = "") -> str:
        """Return a target, drawn by weight. A session always gets the same target while the weights stay the same; if
        they or the targets change, no more sessions move than necessary."""
        if len(self.names) == 1:
            return self.names[0]
        if session:
            # Weighted rendezvous hashing: exponential variates with the weights as rates, and the least one wins.
            key = session.encode("utf-8", "surrogatepass")
            seeds = [xxh3_64_intdigest(name.encode("utf-8", "surrogatepass")) for name in self.names]
            draws = [-log((xxh3_64_intdigest(key, seed) + 1) / 2**64) for seed in seeds]
            waits = [draw / weight for draw, weight in zip(draws, self._weights, strict=True)]
            return self.names[waits.index(min(waits))]
        index = bisect_right(self._borders, rng.random() * self._borders[-1])
        return self.names[min(index, len(self.names) - 1)]


class _Rule(Struct, frozen=True):
    origin: str
    split: Split


class _Name(Struct, frozen=True):
    split: Split
    priority: int
    created: int
    latency: Latency = ANY_LATENCY


class ModelCard(Struct, frozen=True, gc=False):
    """The entry of one model or adapter in an endpoint's list of models."""

    #: The JSON object, as received.
    said: Any
    #: Its `max_model_len`, in tokens; infinite = not given.
    context: float


class Listed(Struct, frozen=True):
    """A model that clients may ask for."""

    name: str
    #: Seconds since 1970; 0 = unknown.
    created: int
    #: What an endpoint that serves it says of it, as JSON; `None` = it is defined by manifests.
    said: Any = None


class Catalogue:
    """All defined objects, indexed for look-ups. Immutable. An empty catalogue changes no request."""

    def __init__(self, models: ModelSet = ModelSet(), rules: ModelRules = ModelRules()) -> None:  # noqa: B008 frozen
        self._rules = rules
        #: Objects that lose to an older one of the same name: (the loser, the winner).
        self.conflicts: list[tuple[str, str]] = []
        #: Of each rewrite that an older one overrules: the older one by model; empty = requests that no rule names.
        self.overruled: dict[str, dict[str, str]] = {}
        self._names = self._index_models(models.models)
        #: Names with targets of their own that a rewrite decides nevertheless: the rewrite by name.
        self.rewritten: dict[str, str] = {}
        self._exact: dict[str, _Rule] = {}
        self._generic: _Rule | None = None
        self._index_rewrites(models)
        for item in models.models:
            if (rule := self._exact.get(item.model, self._generic)) and item.targets:
                self.rewritten[item.model] = rule.origin
        self._objectives: dict[str, InferenceObjective] = {}
        for objective in sorted(models.objectives, key=lambda item: item.origin.age_order):
            self._objectives.setdefault(objective.origin.name, objective)
        #: The targets that may get requests; and every defined name: those that clients ask for, and targets.
        self.sent_for = self._targets()
        self.known = frozenset(self._names) | self.sent_for
        #: Whether only defined names are served.
        self.strict = rules.reject_unmatched and bool(self._names)
        #: Whether requests for other names are refused: no rule is for every request.
        self.only_defined = self.strict and self._generic is None
        #: Whether `resolve` may find a target other than the name in the body, for requests without a rewrite header.
        self.rewrites = bool(self._names or self._exact or self._generic)
        #: Whether the opening of a conversation may decide its target.
        self.sticky = self.rewrites and rules.sticky_sessions
        #: Whether nothing is defined.
        self.empty = not (self.rewrites or self._objectives)

    def _index_models(self, models: Iterable[InferenceModel]) -> dict[str, _Name]:
        by_name: dict[str, _Name] = {}
        owners: dict[str, str] = {}
        for item in sorted(models, key=lambda model: model.origin.age_order):
            if item.model in by_name:
                self.conflicts.append((str(item.origin), owners[item.model]))
                continue
            owners[item.model] = str(item.origin)
            created = item.origin.created
            split = Split(item.targets or (Target(item.model),))
            created = int(created) if created < 2**63 else 0
            by_name[item.model] = _Name(split, CRITICALITY[item.criticality], created, item.latency)
        return by_name

    def _index_rewrites(self, models: ModelSet) -> None:
        for item in sorted(models.rewrites, key=lambda rewrite: rewrite.origin.age_order):
            for rule in item.rules:
                ready = _Rule(str(item.origin), Split(rule.targets))
                if rule.models:
                    used = {model: self._exact.setdefault(model, ready) for model in rule.models}
                else:
                    self._generic = self._generic or ready
                    used = {"": self._generic}
                older = {model: first.origin for model, first in used.items() if first.origin != ready.origin}
                if older:
                    self.overruled.setdefault(ready.origin, {}).update(older)

    def _targets(self) -> frozenset[str]:
        splits = [name.split for name in self._names.values()] + [rule.split for rule in self._exact.values()]
        splits += [self._generic.split] if self._generic else []
        return frozenset(name for split in splits for name in split.names)

    @cached_property
    def listed(self) -> list[Listed]:
        """Models that clients may ask for, sorted by name; not the reserved ones, which have no target with a weight.
        Empty (not known) while no InferenceModel is defined."""
        if not self._names:
            return []
        names = {name: Listed(name, entry.created) for name, entry in self._names.items()}
        names.update({name: Listed(name, 0) for name in self._exact if name not in names})
        return [names[name] for name in sorted(names) if not self.is_reserved(name)]

    def offered(self, served: Mapping[str, ModelCard]) -> list[Listed]:
        """Return `listed`, and the names that endpoints serve (`served`) unless only defined names pass."""
        if self.strict:
            return self.listed
        names = {name: Listed(name, 0, card.said) for name, card in served.items()}
        names.update({name: Listed(name, 0) for name in self._exact})
        names.update({model.name: model for model in self.listed})
        return [names[name] for name in sorted(names) if not self.is_reserved(name)]

    def is_reserved(self, name: str) -> bool:
        """Whether the name is defined, and has no target with a weight: requests for it are refused."""
        split = self._way(name, "")[1]
        return split is not None and not split.names

    def undefined(self, base: Collection[str], adapters: Iterable[str]) -> set[str]:
        """Return which models of a server are not defined, so that no request may name them. Targets are left out, and
        so are the further names of a base model that may be named or is a target."""
        if not self.only_defined:
            return set()
        reached = self.known | self._exact.keys()
        hidden = set() if any(name in reached for name in base) else set(base)
        return hidden.union(name for name in adapters if name not in reached)

    def unserved(self, served: Container[str]) -> list[tuple[str, str]]:
        """Return the targets that are not `served`, each with the name that leads to it; `*` = every undefined name."""
        splits = {name: self._way(name, "")[1] for name in self._names.keys() | self._exact.keys()}
        splits["*"] = self._generic.split if self._generic else None
        pairs = [(name, target) for name, split in splits.items() if split for target in split.names]
        return sorted(pair for pair in pairs if pair[1] not in served)

    def resolve(self, request: Request, rng: Random) -> Resolution | Refusal:
        """Return the resolution of a request, or why it is refused. Draws from `rng` only if a target must be drawn and
        no session decides it."""
        if self.empty and not request.rewrite:
            return Resolution(request.model, request.priority)
        name = self._names.get(request.model)
        priority, latency = self._wanted(request, name)
        if not request.model and (request.unread or request.api in _NAMELESS):
            return self._unread(request) or Resolution("", priority, latency=latency)
        rule, split = self._way(request.model, request.rewrite)
        if self.strict and not rule:
            refusal = self._check(request, name)
            if refusal is not None:
                return refusal
        if split is None:
            return Resolution(request.rewrite or request.model, priority, latency=latency)
        if not split.names:
            return _gone(request.model)
        session = request.lasting_session if self.sticky else ""
        return Resolution(split.choose(rng, session), priority, rule.origin if rule else "", latency)

    def _way(self, model: str, rewrite: str) -> tuple[_Rule | None, Split | None]:
        """Return the rule of a request for `model` and the split that decides its target; `None` = nothing does."""
        rule, name = self._exact.get(model) or self._generic, self._names.get(model)
        return rule, rule.split if rule else name.split if name and not rewrite else None

    def targets(self, model: str, rewrite: str = "") -> tuple[str, ...]:
        """Return what requests for `model` may be sent for; `rewrite`: the name in the header, empty = none. Empty if
        they are refused, unless the name is unknown."""
        split = self._way(model, rewrite)[1]
        return (rewrite or model,) if split is None else split.names

    def _wanted(self, request: Request, name: _Name | None) -> tuple[int, Latency]:
        """Return the priority and the latency objective."""
        objective, latency = self._objectives.get(request.objective), name.latency if name else ANY_LATENCY
        if objective is not None:
            return objective.priority, latency if objective.latency == ANY_LATENCY else objective.latency
        return name.priority if name and not request.priority else request.priority, latency

    def _unread(self, request: Request) -> Refusal | None:
        """Return the refusal of a body that is present but could not be read, as it may name any model; `None` = it
        passes."""
        if not self.strict or request.unread in ("", "no-body"):
            return None
        if request.api in _NAMELESS and (request.api != OTHER or request.unread == "empty"):
            return None
        return Refusal(
            400, "model_required", f"the model's name cannot be read from the request body: {request.unread}"
        )

    def _check(self, request: Request, name: _Name | None) -> Refusal | None:
        """Return the refusal if the name in the body or in the header is not defined; `None` = both are."""
        if name is None and request.model:
            return self._unknown(request.model)
        if request.rewrite and request.rewrite not in self.known:
            return self._unknown(request.rewrite)
        if name is None and not request.rewrite:
            message = f"model not found in request body. {self._offer()}"
            return Refusal(400, "model_required", message)
        return None

    def _unknown(self, name: str) -> Refusal:
        return Refusal(404, MODEL_NOT_FOUND, f"The model `{name}` does not exist. {self._offer()}")

    def _offer(self) -> str:
        names = [model.name for model in self.listed[:_SHOWN]]
        hidden = len(self.listed) - len(names)
        more = f" and {hidden} more (see GET /v1/models)" if hidden else ""
        return f"Known models: {', '.join(names) or 'none'}{more}."


def _gone(model: str) -> Refusal:
    return Refusal(404, MODEL_NOT_FOUND, f"The model `{model}` is reserved: all of its targets have weight 0.")
