"""Which model a request is for, how urgent it is, and which name its endpoint is asked for.

Rules, in this order (sources: the InferenceModel and InferenceModelRewrite CRDs, and the reference picker)
1. The incoming model is the body's `model`; it may be absent.
2. An InferenceModel of that name gives the target, by the weights of its targets, and a priority by its criticality.
3. The header `x-llm-d-model-name-rewrite` gives another target.
4. The InferenceModelRewrite rule that matches the *incoming* model overrides both. One rule is applied, never several
   one after the other. A rule that names the model beats one for all models; then the oldest object counts, then the
   first rule in it.
5. An objective, named by header, gives the priority instead. One that nobody defined changes nothing.

Of equals the oldest object counts, by creation time, then by namespace and name. Of a split with weights on some
targets only, the others get nothing; without any weights all get the same.

Once an InferenceModel is defined, a name that neither 2 nor 4 knows is refused, and so is a header's target that
nobody defined: otherwise the header would be the way around. `ModelRules.reject_unmatched` switches that off. Where no
model is named and the API does not need one, there is nothing to check: such a request passes, and only its priority is
looked up.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from random import Random

from msgspec import Struct
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from fairlead.model.decision import DecisionRecord
from fairlead.model.inference import CRITICALITY, InferenceModel, ModelRules, ModelSet, Target
from fairlead.model.instructions import Instruction, Record, Reject
from fairlead.model.request import PrefixChain, Request

#: Names in an error message.
_SHOWN = 20
#: Values of `Request.api` whose bodies need not name a model, or have no place for one. A name that one of them does
#: give counts like any other.
_NAMELESS = frozenset(("other", "models", "conversations", "sglang", "grpc", "grpc_embed", "tokenize", "render"))


#: Machine-readable, as OpenAI has it.
MODEL_NOT_FOUND = "model_not_found"


class Resolution(Struct, frozen=True, gc=False):
    """What a request turned out to be for."""

    #: What the endpoint is asked for; empty = no model was named, and none is known.
    target: str
    priority: int
    #: The InferenceModelRewrite (`namespace/name`) that decided the target; empty = none did.
    rewrite: str = ""


class Refusal(Struct, frozen=True):
    """Why a request cannot be served, as the client is told."""

    status: int
    code: str
    message: str
    param: str = "model"


def unnamed(request: Request, why: Refusal, now: float, policy: str) -> list[Instruction]:
    """Nobody defined the model: the answer, and the record of it."""
    reject = Reject(
        request_id=request.id,
        status=why.status,
        reason=why.code,
        message=why.message,
        api=request.api,
        param=why.param,
    )
    record = DecisionRecord(request=request, at=now, policy=policy, outcome=why.code, status=why.status)
    return [reject, Record(record)]


def applied(request: Request, found: Resolution) -> Request:
    """The request with what was found for it. Its prompt counts as another one for another target: engines share no
    cached prefix between models."""
    target = found.target if found.target != request.model else ""
    if not target and found.priority == request.priority:
        return request
    prefix = request.prefix
    if target and prefix.hashes:
        salt = xxh3_64_intdigest(target.encode("utf-8", "surrogatepass"))
        prefix = PrefixChain(tuple([one ^ salt for one in prefix.hashes]), prefix.ends)
    return replace(request, target=target, priority=found.priority, rewritten_by=found.rewrite, prefix=prefix)


class Split:
    """Targets and their shares of the traffic. `names` is empty if no target may get any."""

    __slots__ = ("_borders", "names")

    def __init__(self, targets: Sequence[Target]) -> None:
        weighted = any(target.weight is not None for target in targets)
        shares = [(target.name, (target.weight or 0) if weighted else 1) for target in targets]
        shares = [(name, weight) for name, weight in shares if weight > 0]
        self.names = tuple(name for name, _ in shares)
        self._borders = list(accumulate(weight for _, weight in shares))

    def choose(self, rng: Random, session: str = "") -> str:
        """A target by chance; with a session always the same one, as long as the weights stay. When they change, no
        more sessions move than must."""
        if len(self.names) == 1:
            return self.names[0]
        if session:
            share = xxh3_64_intdigest(session.encode("utf-8", "surrogatepass")) / 2**64
        else:
            share = rng.random()
        at = bisect_right(self._borders, share * self._borders[-1])
        return self.names[min(at, len(self.names) - 1)]


class _Rule(Struct, frozen=True):
    origin: str
    split: Split


class _Name(Struct, frozen=True):
    split: Split
    priority: int
    created: int


class Listed(Struct, frozen=True):
    """A model that clients may ask for."""

    name: str
    #: Seconds since 1970; 0 = unknown.
    created: int


class Catalogue:
    """What is defined at a time, made ready for look-ups. An empty one changes nothing. Never changes itself."""

    def __init__(self, models: ModelSet = ModelSet(), rules: ModelRules = ModelRules()) -> None:  # noqa: B008 frozen
        self._rules = rules
        #: Objects that lose to an older one of the same name: (the loser, the one that counts).
        self.conflicts: list[tuple[str, str]] = []
        self._names = self._index_models(models.models)
        self._exact: dict[str, _Rule] = {}
        self._generic: _Rule | None = None
        self._index_rewrites(models)
        self._objectives: dict[str, int] = {}
        for objective in sorted(models.objectives, key=lambda one: one.origin.age_order):
            self._objectives.setdefault(objective.origin.name, objective.priority)
        #: Every name that is defined, be it asked for or a target.
        self.known = frozenset(self._names) | self._targets()
        #: Only defined names are served.
        self.strict = rules.reject_unmatched and bool(self._names)
        #: Nothing is defined.
        self.empty = not (self._names or self._exact or self._generic or self._objectives)

    def _index_models(self, models: Iterable[InferenceModel]) -> dict[str, _Name]:
        found: dict[str, _Name] = {}
        owners: dict[str, str] = {}
        for one in sorted(models, key=lambda model: model.origin.age_order):
            if one.model in found:
                self.conflicts.append((str(one.origin), owners[one.model]))
                continue
            owners[one.model] = str(one.origin)
            created = one.origin.created
            split = Split(one.targets or (Target(one.model),))
            found[one.model] = _Name(split, CRITICALITY[one.criticality], int(created) if created < 2**63 else 0)
        return found

    def _index_rewrites(self, models: ModelSet) -> None:
        for one in sorted(models.rewrites, key=lambda rewrite: rewrite.origin.age_order):
            for rule in one.rules:
                ready = _Rule(str(one.origin), Split(rule.targets))
                for model in rule.models:
                    self._exact.setdefault(model, ready)
                if not rule.models and self._generic is None:
                    self._generic = ready

    def _targets(self) -> frozenset[str]:
        splits = [name.split for name in self._names.values()] + [rule.split for rule in self._exact.values()]
        splits += [self._generic.split] if self._generic else []
        return frozenset(name for split in splits for name in split.names)

    @property
    def listed(self) -> list[Listed]:
        """What a client may ask for, by name. Empty while no InferenceModel is defined: then nobody knows."""
        if not self._names:
            return []
        names = {name: Listed(name, found.created) for name, found in self._names.items()}
        names.update({name: Listed(name, 0) for name in self._exact if name not in names})
        return [names[name] for name in sorted(names)]

    def may_rewrite(self, request: Request) -> bool:
        """Whether `resolve` could find another target than the name in the body. False for most of an empty one."""
        return bool(request.rewrite) or bool(self._names or self._exact or self._generic)

    def resolve(self, request: Request, rng: Random) -> Resolution | Refusal:
        """Decide for one request. Draws from `rng` only for a split that no session decides."""
        if self.empty and not request.rewrite:
            return Resolution(request.model, request.priority)
        name = self._names.get(request.model)
        priority = self._priority(request, name)
        if not request.model and (request.unread or request.api in _NAMELESS):
            return self._unread(request) or Resolution("", priority)
        rule = self._exact.get(request.model) or self._generic
        split = rule.split if rule else name.split if name and not request.rewrite else None
        if self.strict and not rule:
            refusal = self._check(request, name)
            if refusal is not None:
                return refusal
        if split is None:
            return Resolution(request.rewrite or request.model, priority)
        if not split.names:
            return _gone(request.model)
        session = request.session if self._rules.sticky_sessions else ""
        return Resolution(split.choose(rng, session), priority, rule.origin if rule else "")

    def _priority(self, request: Request, name: _Name | None) -> int:
        if request.objective in self._objectives:
            return self._objectives[request.objective]
        return name.priority if name else request.priority

    def _unread(self, request: Request) -> Refusal | None:
        """A body that is there and could not be read may name anything."""
        if not self.strict or request.api in _NAMELESS or request.unread in ("", "no-body"):
            return None
        return Refusal(
            400, "model_required", f"the model's name cannot be read from the request body: {request.unread}"
        )

    def _check(self, request: Request, name: _Name | None) -> Refusal | None:
        """Is the name that the client gave, in body and header, one that somebody defined?"""
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
        names = [one.name for one in self.listed]
        more = f" and {len(names) - _SHOWN} more (see GET /v1/models)" if len(names) > _SHOWN else ""
        return f"Known models: {', '.join(names[:_SHOWN])}{more}."


def _gone(model: str) -> Refusal:
    return Refusal(404, MODEL_NOT_FOUND, f"The model `{model}` is reserved: all of its targets have weight 0.")
