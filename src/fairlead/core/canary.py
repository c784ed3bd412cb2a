"""A canary: another policy decides a share of the requests.

Rules
* All requests of a session are decided by the same policy, so that its cached prompts are not lost in the middle of a
  conversation (`Request.lasting_session`). A request without a session is assigned by its number and its time: numbers
  alone begin at 1 in every process, which would all assign alike. No randomness is involved, so a replay assigns
  requests in the same way.
* It decides its requests also if they waited (`CanaryRules`).
* If a canary or one of its plugins raises, the primary decides that request, and the error is reported. Otherwise
  random choices would count as the canary's.
* A canary that did not return decides nothing any more, until it is configured differently.
"""

from collections.abc import Callable
from struct import Struct
from zlib import crc32

from fairlead.core.binding import Pairs, WaitingRules
from fairlead.core.columns import BoolColumn, FloatColumn
from fairlead.core.errors import PLUGIN_FAILURES, PluginError, hung, of_plugin
from fairlead.core.policy import Answer, Context, Notification, Policy, choose_or_raise
from fairlead.core.remote import AsksElsewhere, RemotePolicy
from fairlead.core.request import Request
from fairlead.core.view import FleetView

_PARTS = 10_000
_number_and_time = Struct("<qd").pack


class Canary(AsksElsewhere):
    """`canary` decides `percent` of the requests, `primary` the others. `label`: the name under which the canary's
    decisions are recorded, because both may have the same; empty = the canary's own."""

    def __init__(
        self,
        primary: Policy,
        canary: Policy,
        percent: float,
        on_plugin_error: Callable[[PluginError], None] | None = None,
        label: str = "",
    ) -> None:
        self.primary = primary
        self.canary = canary
        self.label = label or canary.name
        self._below = round(percent * _PARTS / 100)
        self._report = on_plugin_error

    @property
    def name(self) -> str:
        return self.primary.name

    def asks(self) -> tuple[Policy, Policy]:
        return self.primary, self.canary

    def takes(self, request: Request) -> bool:
        """Whether the canary decides the request."""
        session = request.lasting_session
        key = session.encode("utf-8", "replace") if session else _number_and_time(request.id, request.arrived)
        return crc32(key) % _PARTS < self._below

    def remote_for(self, request: Request) -> RemotePolicy | None:
        policy = self.canary if self.takes(request) else self.primary
        return policy.remote_for(request) if isinstance(policy, AsksElsewhere) else None

    def choose(self, request: Request, fleet: FleetView, context: Context) -> Answer:
        if self.takes(request):
            try:
                pick = choose_or_raise(self.canary, request, fleet, context, self._report)
                if not (pick.by and isinstance(self.canary, AsksElsewhere)):
                    pick.by = self.label
                return pick
            except PLUGIN_FAILURES as error:
                self.failed(error)
        return self.primary.choose(request, fleet, context)

    def failed(self, error: BaseException) -> None:
        """Report that the canary failed. If it did not return, it takes no more requests."""
        reported = of_plugin(self.canary.name, error)
        if hung(error):
            self._below = 0
            reported = reported.with_note("this canary decides nothing more until its settings change")
        if self._report is not None:
            self._report(reported)


class CanaryRules(WaitingRules):
    """The rules of late binding: the canary's `own` for the requests that it takes, those of the `primary` for the
    others, and for all in a choice in which the canary fails."""

    def __init__(self, canary: Canary, own: WaitingRules, primary: WaitingRules) -> None:
        self._canary, self._own_rules, self._primary = canary, own, primary
        #: Whether the canary's costs took part in the last choice.
        self._counted = False

    def __call__(self, request: Request, fleet: FleetView, now: float) -> BoolColumn | None:
        return (self._own_rules if self._canary.takes(request) else self._primary)(request, fleet, now)

    def notifier(self, request: Request, now: float) -> Notification | None:
        return (self._own_rules if self.by(request) else self._primary).notifier(request, now)

    def by(self, request: Request) -> str:
        return self._canary.label if self._counted and self._canary.takes(request) else ""

    def costs(self, pairs: Pairs, fleet: FleetView, now: float) -> FloatColumn:
        costs = self._primary.costs(pairs, fleet, now)
        taken, self._counted = [row for row, request in enumerate(pairs.requests) if self._canary.takes(request)], False
        if taken:
            try:
                own, costs = self._own_rules.asked(pairs.of(taken), fleet, now), costs.copy()
                costs[taken], self._counted = own, True
            except PLUGIN_FAILURES as error:
                self._canary.failed(error)
        return costs
