"""`label-selector`: only endpoints whose labels match, as in Kubernetes (`matchLabels`, `matchExpressions`)."""

from collections.abc import Mapping
from typing import Literal

from msgspec import field

from fairlead.fleet.columns import BoolColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.params import Params
from fairlead.schedule.cycle import Cycle


class Requirement(Params, frozen=True, kw_only=True):
    key: str
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[str, ...] = ()


class LabelSelectorParams(Params, frozen=True, kw_only=True):
    match_labels: dict[str, str] = field(default_factory=dict)
    match_expressions: tuple[Requirement, ...] = ()


class LabelSelector:
    """Keeps endpoints that satisfy every label and every expression."""

    type = "label-selector"
    Params = LabelSelectorParams
    hard = True

    def __init__(self, params: LabelSelectorParams, name: str = type) -> None:
        self.name = name
        self._params = params
        self._key = ("labels", name, repr(params))

    def keep(self, request: Request, fleet: Fleet, cycle: Cycle) -> BoolColumn | None:
        return fleet.table.keeping(self._key, lambda _, e: self._matches(e.labels))

    def _matches(self, labels: Mapping[str, str]) -> bool:
        wanted = self._params.match_labels.items()
        return all(labels.get(key) == value for key, value in wanted) and all(
            _holds(requirement, labels) for requirement in self._params.match_expressions
        )


def _holds(requirement: Requirement, labels: Mapping[str, str]) -> bool:
    """Kubernetes semantics: `NotIn` also holds for an absent key."""
    present = requirement.key in labels
    match requirement.operator:
        case "In":
            return present and labels[requirement.key] in requirement.values
        case "NotIn":
            return not present or labels[requirement.key] not in requirement.values
        case "Exists":
            return present
        case "DoesNotExist":
            return not present
