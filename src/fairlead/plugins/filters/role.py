"""`role`: only endpoints whose label `llm-d.ai/role` allows a stage (decode, prefill, encode)."""

from typing import Literal

from fairlead.fleet.columns import BoolColumn
from fairlead.fleet.fleet import Fleet
from fairlead.model.endpoint import ROLE_LABEL
from fairlead.model.request import Request
from fairlead.plugins.params import Params
from fairlead.schedule.cycle import Cycle

#: Role labels that include each stage; an endpoint without the label decodes. `both` is the older `prefill-decode`.
STAGES = {
    "decode": {"", "decode", "prefill-decode", "encode-decode", "both", "encode-prefill-decode"},
    "prefill": {"prefill", "encode-prefill", "prefill-decode", "both", "encode-prefill-decode"},
    "encode": {"encode", "encode-prefill", "encode-decode", "encode-prefill-decode"},
}


class RoleParams(Params, frozen=True, kw_only=True):
    stage: Literal["decode", "prefill", "encode"] = "decode"


class Role:
    """Keeps endpoints whose role includes `stage`."""

    type = "role"
    Params = RoleParams
    hard = True
    steady = True

    def __init__(self, params: RoleParams, name: str = type) -> None:
        self.name = name
        self._key = ("role", params.stage)
        self._roles = STAGES[params.stage]

    def keep(self, request: Request, fleet: Fleet, cycle: Cycle) -> BoolColumn | None:
        return fleet.table.keeping(self._key, lambda _, e: e.labels.get(ROLE_LABEL, "") in self._roles)
