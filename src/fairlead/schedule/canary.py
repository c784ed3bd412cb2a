"""A share of the requests is decided by another policy: a canary.

Rules
* The requests of one session go one way, so that neither policy loses the other's cached prompts in mid-conversation;
  without a session each request is drawn for itself, by its number. No chance is involved: a replay goes the same ways.
* A canary that raises is replaced by the primary for that request, and reported.
"""

from collections.abc import Callable, Sequence
from typing import cast
from zlib import crc32

from fairlead.fleet.fleet import Fleet
from fairlead.model.errors import PluginError
from fairlead.model.request import Request
from fairlead.schedule.cycle import Context
from fairlead.schedule.framework import Pick, Policy
from fairlead.schedule.remote import RemotePolicy

_PARTS = 10_000


class Canary:
    """`percent` of the requests go by `canary`, the others by `primary`."""

    def __init__(
        self,
        primary: Policy,
        canary: Policy,
        percent: float,
        on_plugin_error: Callable[[PluginError], None] | None = None,
    ) -> None:
        self.primary = primary
        self.canary = canary
        self._below = round(percent * _PARTS / 100)
        self._report = on_plugin_error
        #: Decisions of each, by the name of the policy that was to decide.
        self.decided = {"primary": 0, "canary": 0}

    @property
    def name(self) -> str:
        return self.primary.name

    def takes(self, request: Request) -> bool:
        """Whether the canary decides it."""
        key = request.session or str(request.id)
        return crc32(key.encode("utf-8", "replace")) % _PARTS < self._below

    def remote_for(self, request: Request) -> RemotePolicy | None:
        choose = getattr(self.canary if self.takes(request) else self.primary, "remote_for", None)
        return cast("RemotePolicy | None", choose(request)) if choose is not None else None

    def choose(self, requests: Sequence[Request], fleet: Fleet, context: Context) -> list[Pick]:
        return [self._choose(request, fleet, context) for request in requests]

    def _choose(self, request: Request, fleet: Fleet, context: Context) -> Pick:
        if self.takes(request):
            try:
                pick = self.canary.choose((request,), fleet, context)[0]
                if pick.slot < 0 or fleet.table.endpoints[pick.slot] is not None:
                    pick.by = pick.by or self.canary.name
                    self.decided["canary"] += 1
                    return pick
                raise IndexError(f"slot {pick.slot} has no endpoint")
            except Exception as error:
                if self._report is not None:
                    self._report(PluginError(self.canary.name, f"{type(error).__name__}: {error}"))
        self.decided["primary"] += 1
        return self.primary.choose((request,), fleet, context)[0]
