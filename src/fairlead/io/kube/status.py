"""Writes conditions to the status of objects: only the leader, only what is not there yet, never in a loop.

Rules
* Written by server-side apply, see `wire.kube_status`; a 404 or a changed object is nothing to worry about, for the
  next event brings the object as it is.
* An object that keeps being changed back is written ever more seldom.
* Without permission nothing is written, and the missing rule is told once. Routing never depends on it.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from fairlead.io.kube.client import APPLY, KubeClient, KubeError, Resource, Unreachable
from fairlead.wire.kube_objects import Unreadable, read_plain
from fairlead.wire.kube_status import FIELD_MANAGER, Condition, stands, status_patch

#: Writes to one object in a minute that need no pause; each further one doubles it.
_FREE = 3
_WINDOW_S = 60.0
_LONGEST_PAUSE_S = 60.0
_REFUSED_PAUSE_S = 60.0
_RETRY_S = 2.0

Target = tuple[Resource, str]


class Wish(Struct, frozen=True):
    """What should stand on an object, and the object as it was last seen."""

    condition: Condition
    item: dict[str, Any]


class StatusWriter:
    """`want(...)` replaces all wishes; `may_write` says whether we lead. `await run()` never returns."""

    def __init__(
        self,
        client: KubeClient,
        may_write: Callable[[], bool],
        told: Callable[[str], object],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.writes = 0
        self._client = client
        self._may_write = may_write
        self._told = told
        self._wall = wall
        self._wishes: dict[Target, Wish] = {}
        #: By object: writes within the window, and when it may be written again.
        self._pace: dict[Target, tuple[int, float, float]] = {}
        self._woken = asyncio.Event()
        self._trouble = ""

    def want(self, wishes: Mapping[Target, Wish]) -> None:
        self._wishes = dict(wishes)
        for target in [target for target in self._pace if target not in self._wishes]:
            del self._pace[target]
        self._woken.set()

    def wake(self) -> None:
        """We may have come to lead."""
        self._woken.set()

    async def run(self) -> None:
        while True:
            self._woken.clear()
            pause = await self._round() if self._may_write() else None
            # Not `wait_for`: until Python 3.12 it loses a cancellation that comes together with the result.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._woken.wait()

    async def _round(self) -> float | None:
        """Write what is due. Returns seconds until something else is, `None` = nothing is wanted."""
        loop = asyncio.get_running_loop()
        waits: list[float] = []
        for target, wish in list(self._wishes.items()):
            if stands(wish.condition, wish.item) or self._wishes.get(target) is not wish:
                continue
            wait = self._pace.get(target, (0, 0.0, 0.0))[2] - loop.time()
            if wait > 0:
                waits.append(wait)
                continue
            trouble, pause = await self._write(target, wish)
            self._say(trouble)
            if pause:
                return pause
            waits.append(self._after(target))
        return min(waits) if waits else None

    async def _write(self, target: Target, wish: Wish) -> tuple[str, float]:
        """(what is wrong, seconds to leave everything alone)."""
        resource, name = target
        body = status_patch(wish.condition, wish.item, self._wall())
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        try:
            answer = await self._client.patch(resource, name, body, APPLY, "status", query)
        except KubeError as error:
            if error.code == 403:
                return f"no status is written: {error}", _REFUSED_PAUSE_S
            return "" if error.code in (404, 409) else f"status of {resource.plural} {name}: {error}", 0.0
        except Unreachable as error:
            return f"no status is written: {error}", _RETRY_S
        self.writes += 1
        if self._wishes.get(target) is wish:
            with contextlib.suppress(Unreadable):  # else the watch will bring it
                self._wishes[target] = Wish(wish.condition, read_plain(answer))
        return "", 0.0

    def _after(self, target: Target) -> float:
        """Note a write; seconds until the next one to this object."""
        now = asyncio.get_running_loop().time()
        count, since, _ = self._pace.get(target, (0, now, now))
        if now - since > _WINDOW_S:
            count, since = 0, now
        count += 1
        # Even the first waits a moment: what was written has to come back by the watch.
        pause = 0.5 if count < _FREE else min(2.0 ** (count - _FREE), _LONGEST_PAUSE_S)
        self._pace[target] = (count, since, now + pause)
        return pause

    def _say(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            if trouble:
                self._told(trouble)
