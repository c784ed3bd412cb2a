"""What operators say about model names: the three kinds of the Gateway API Inference Extension, as nouns.

`InferenceModel` (group `inference.networking.x-k8s.io`) defines a name that clients may ask for, how urgent it is and
which models serve it. Its successors split that up: `InferenceObjective` names a priority that a header refers to,
`InferenceModelRewrite` (both also in group `llm-d.ai`) maps names to targets. Fields and defaults are those of the
published CRDs; how they act together stands in `fairlead.route.models`.
"""

from math import inf

from msgspec import Struct

#: What a criticality means as a priority: above 0 goes first, below 0 may be shed. `Default` is the older name of the
#: middle one, which also holds where none is set.
CRITICALITY = {"Critical": 10, "Standard": 0, "Default": 0, "Sheddable": -10}


class Origin(Struct, frozen=True, kw_only=True):
    """Whose object it is."""

    namespace: str
    name: str
    #: `metadata.creationTimestamp`, seconds since 1970; of several objects the oldest counts. A file need not say it.
    created: float = inf
    #: Names of the pools it is for; empty = every pool.
    pools: tuple[str, ...] = ()

    @property
    def age_order(self) -> tuple[float, str, str]:
        """Sorts the objects of a kind, the one that counts first."""
        return self.created, self.namespace, self.name

    def is_for(self, pool: str, namespace: str) -> bool:
        """Empty names stand for all."""
        if namespace and self.namespace != namespace:
            return False
        return not pool or not self.pools or pool in self.pools

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Target(Struct, frozen=True):
    """A model that serves a name, and its share of the traffic: weight / sum of weights."""

    name: str
    #: `None` = not given.
    weight: int | None = None


class InferenceModel(Struct, frozen=True, kw_only=True):
    """A name that clients ask for."""

    origin: Origin
    #: As it stands in the request's body.
    model: str
    #: Empty = the name itself.
    targets: tuple[Target, ...] = ()
    #: A key of `CRITICALITY`.
    criticality: str = "Standard"


class InferenceObjective(Struct, frozen=True, kw_only=True):
    """A priority with a name; requests refer to it by header."""

    origin: Origin
    priority: int = 0


class RewriteRule(Struct, frozen=True):
    """Requests for one of `models` go to `targets`; no models at all means every request, also one without a model."""

    models: tuple[str, ...]
    targets: tuple[Target, ...]


class InferenceModelRewrite(Struct, frozen=True, kw_only=True):
    origin: Origin
    rules: tuple[RewriteRule, ...] = ()


class ModelSet(Struct, frozen=True):
    """All that is defined at a time."""

    models: tuple[InferenceModel, ...] = ()
    objectives: tuple[InferenceObjective, ...] = ()
    rewrites: tuple[InferenceModelRewrite, ...] = ()

    def of_pool(self, pool: str = "", namespace: str = "") -> "ModelSet":
        """What is for one pool: objects of its namespace that refer to it. An empty name stands for all of them."""
        return ModelSet(
            tuple(one for one in self.models if one.origin.is_for(pool, namespace)),
            tuple(one for one in self.objectives if one.origin.is_for(pool, namespace)),
            tuple(one for one in self.rewrites if one.origin.is_for(pool, namespace)),
        )

    def __add__(self, other: "ModelSet") -> "ModelSet":
        return ModelSet(self.models + other.models, self.objectives + other.objectives, self.rewrites + other.rewrites)


class ModelRules(Struct, frozen=True, kw_only=True):
    """How strictly names are taken; no manifest says this."""

    #: Requests for a name that nobody defined are refused, once at least one InferenceModel is defined.
    reject_unmatched: bool = True
    #: Requests of one session always get the same target of a split.
    sticky_sessions: bool = False
