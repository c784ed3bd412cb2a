"""A replay whose beginning is missing follows the recorded decisions: its state grows towards the recorded one."""

from collections.abc import Sequence

from fairlead.fleet.fleet import Fleet
from fairlead.model.request import Request
from fairlead.schedule.cycle import Context
from fairlead.schedule.framework import Pick, Policy


class Guided:
    """Sends requests where the journal says, and notes where the policy itself would have sent them."""

    def __init__(self, policy: Policy, recorded: dict[int, str], own: dict[int, str]) -> None:
        self._policy = policy
        self._recorded = recorded
        self._own = own
        self.name = policy.name

    def choose(self, requests: Sequence[Request], fleet: Fleet, context: Context) -> list[Pick]:
        picks = list(self._policy.choose(requests, fleet, context))
        for index, (request, pick) in enumerate(zip(requests, picks, strict=True)):
            endpoint = fleet.table.endpoints[pick.slot] if pick.slot >= 0 else None
            self._own[request.id] = endpoint.id if endpoint else ""
            slot = fleet.table.slot(self._recorded.get(request.id, ""))
            if slot is not None and slot != pick.slot:
                held = fleet.match(request)
                share = 0.0 if held is None else float(held[slot])
                picks[index] = Pick(slot, hit_share=share, best_share=max(pick.best_share, share), trace=pick.trace)
        return picks
