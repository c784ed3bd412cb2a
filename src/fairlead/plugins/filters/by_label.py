"""`by-label`: only endpoints whose label has one of some values."""

from fairlead.fleet.columns import BoolColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.plugins.params import Params
from fairlead.schedule.cycle import Cycle


class ByLabelParams(Params, frozen=True, kw_only=True):
    label: str
    valid_values: tuple[str, ...] = ()
    #: Keep endpoints without the label too.
    allows_no_label: bool = False


class ByLabel:
    """Keeps endpoints whose `label` is one of `validValues`; those without it as `allowsNoLabel` says."""

    type = "by-label"
    Params = ByLabelParams
    hard = True

    def __init__(self, params: ByLabelParams, name: str = type) -> None:
        self.name = name
        self._label = params.label
        values: set[str | None] = {*params.valid_values}
        if params.allows_no_label:
            values.add(None)
        self._values = frozenset(values)
        self._key = ("by label", self._label, self._values)

    def keep(self, request: Request, fleet: Fleet, cycle: Cycle) -> BoolColumn | None:
        return fleet.table.keeping(self._key, lambda _, e: e.labels.get(self._label) in self._values)
