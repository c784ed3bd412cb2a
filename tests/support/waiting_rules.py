"""Rules about waiting requests of which a function says where they can be served; costs are the cost kernel's."""

from collections.abc import Callable

from fairlead.core.binding import WaitingRules
from fairlead.core.columns import BoolColumn
from fairlead.core.profile import Profile
from fairlead.core.request import Request
from fairlead.core.view import FleetView
from fairlead.plugins.pickers import MaxScore, MaxScoreParams

Able = Callable[[Request, FleetView, float], BoolColumn | None]


class AbleRules(WaitingRules):
    """Everything that is alive can serve a request, unless `able` says otherwise."""

    def __init__(self, able: Able = lambda request, fleet, now: None) -> None:
        profile = Profile("test", [], [], MaxScore(MaxScoreParams()))
        super().__init__(profile, profile)
        self.able = able

    def __call__(self, request: Request, fleet: FleetView, now: float) -> BoolColumn | None:
        return self.able(request, fleet, now)
