"""Status conditions: compare the conditions of objects with the desired ones, and write those that differ.

Rules
* Only the condition `Accepted` is written. Server-side apply with a separate field manager leaves all other conditions
  untouched, and two writers cannot overwrite each other's.
* `lastTransitionTime` changes only with `status`, and is not compared. Otherwise each write would cause another.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

from fairlead.pool.aio import set_within
from fairlead.pool.kube.client import KubeClient, KubeError, Resource, Unreachable
from fairlead.pool.kube.objects import Unreadable, read_plain

ACCEPTED = "Accepted"
FIELD_MANAGER = "fairlead-epp"
#: The longest message of a condition that the published schemas allow.
MAX_MESSAGE = 32768


class Condition(Struct, frozen=True):
    status: bool
    reason: str
    message: str


def stands(wanted: Condition, item: dict[str, Any]) -> bool:
    """Whether the object already has this condition, for its present generation."""
    current = _current(item)
    return (
        current.get("status") == _word(wanted)
        and current.get("reason") == wanted.reason
        and current.get("message") == wanted.message[:MAX_MESSAGE]
        and current.get("observedGeneration", 0) == _generation(item)
    )


def status_patch(wanted: Condition, item: dict[str, Any], wall: float) -> dict[str, Any]:
    """The body of a server-side apply to the object's `status`. `wall`: seconds since 1970."""
    current = _current(item)
    since = current.get("lastTransitionTime") if current.get("status") == _word(wanted) else None
    metadata = item.get("metadata") or {}
    return {
        "apiVersion": item.get("apiVersion"),
        "kind": item.get("kind"),
        "metadata": {"name": metadata.get("name"), "namespace": metadata.get("namespace")},
        "status": {
            "conditions": [
                {
                    "type": ACCEPTED,
                    "status": _word(wanted),
                    "reason": wanted.reason,
                    "message": wanted.message[:MAX_MESSAGE],
                    "observedGeneration": _generation(item),
                    "lastTransitionTime": since if isinstance(since, str) else _time(wall),
                }
            ]
        },
    }


def _word(wanted: Condition) -> str:
    return "True" if wanted.status else "False"


def _generation(item: dict[str, Any]) -> int:
    metadata = item.get("metadata")
    generation = metadata.get("generation", 0) if isinstance(metadata, dict) else 0
    return generation if isinstance(generation, int) else 0


def accepted_conditions(item: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The conditions `Accepted` in an object's status, as far as it can be read."""
    status = item.get("status")
    conditions = status.get("conditions") if isinstance(status, dict) else None
    listed = conditions if isinstance(conditions, list) else []
    return [condition for condition in listed if isinstance(condition, dict) and condition.get("type") == ACCEPTED]


def _current(item: dict[str, Any]) -> dict[str, Any]:
    return next(iter(accepted_conditions(item)), {})


def _time(wall: float) -> str:
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# Writes conditions to the status of objects. Only the leader writes, only conditions that differ, and never in a loop.
#
# Rules
# * A 404 or a conflict is ignored, because the next event of the watch brings the present object.
# * If another writer keeps changing a condition back, the pauses between writes to that object double.
# * Without permission an object is left for a minute, and the missing rule is reported once. Routing never depends on
#   it, nor does the status of other objects: a role may allow one kind, and a webhook may refuse one object.

#: From this many writes to one object within a minute on, each write doubles the pause.
_FREE = 3
_WINDOW_S = 60.0
_LONGEST_PAUSE_S = 60.0
_REFUSED_PAUSE_S = 60.0
_RETRY_S = 2.0

Target = tuple[Resource, str]


class DesiredCondition(Struct, frozen=True):
    """The desired condition of an object, and the object as last seen."""

    condition: Condition
    item: dict[str, Any]


class StatusWriter:
    """Writes conditions. `want(...)` replaces all desired conditions. `may_write`: whether this replica leads. `await
    run()` never returns."""

    def __init__(self, client: KubeClient, may_write: Callable[[], bool], on_trouble: Callable[[str], object]) -> None:
        self.writes = 0
        self._client = client
        self._may_write = may_write
        self._on_trouble = on_trouble
        self._desired: dict[Target, DesiredCondition] = {}
        #: By object: writes within the window, start of the window, and when the object may be written again.
        self._pace: dict[Target, tuple[int, float, float]] = {}
        #: Why the last write failed, by object.
        self._troubles: dict[Target, str] = {}
        self._woken = asyncio.Event()

    def want(self, desired: Mapping[Target, DesiredCondition]) -> None:
        self._desired = dict(desired)
        self._pace = {target: pace for target, pace in self._pace.items() if target in desired}
        self._troubles = {target: trouble for target, trouble in self._troubles.items() if target in desired}
        self._woken.set()

    def wake(self) -> None:
        """Check again whether this replica may write."""
        self._woken.set()

    async def run(self) -> None:
        while True:
            self._woken.clear()
            pause = await self._round() if self._may_write() else None
            await set_within(self._woken, pause)

    async def _round(self) -> float | None:
        """Write the conditions that are due. Return the seconds until the next is due; `None` = none is left."""
        loop = asyncio.get_running_loop()
        waits: list[float] = []
        for target, desired in list(self._desired.items()):
            if stands(desired.condition, desired.item) or self._desired.get(target) is not desired:
                continue
            wait = self._pace.get(target, (0, 0.0, 0.0))[2] - loop.time()
            if wait > 0:
                waits.append(wait)
                continue
            try:
                trouble, least = await self._write(target, desired)
            except Unreachable as error:
                self._say(target, f"no status is written: {error}")
                return _RETRY_S + error.after
            self._say(target, trouble)
            waits.append(self._after(target, least))
        return min(waits) if waits else None

    async def _write(self, target: Target, desired: DesiredCondition) -> tuple[str, float]:
        """Write a condition. Return what went wrong (empty = nothing), and for how many seconds to leave the object at
        least. Raises `Unreachable`."""
        resource, name = target
        body = status_patch(desired.condition, desired.item, time.time())
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        try:
            answer = await self._client.patch(resource, name, body, query)
        except KubeError as error:
            if error.code == 403:
                return f"no status is written: {error}", _REFUSED_PAUSE_S
            return "" if error.code in (404, 409) else f"status of {resource.plural} {name}: {error}", 0.0
        self.writes += 1
        if self._desired.get(target) is desired:
            with contextlib.suppress(Unreadable):  # otherwise the watch brings the object
                self._desired[target] = DesiredCondition(desired.condition, read_plain(answer))
        return "", 0.0

    def _after(self, target: Target, least: float) -> float:
        """Note a write. Return the seconds until the next write to this object, `least` or more."""
        now = asyncio.get_running_loop().time()
        count, since, _ = self._pace.get(target, (0, now, now))
        if now - since > _WINDOW_S:
            count, since = 0, now
        count += 1
        # Even the first write causes a pause, until the watch has brought the written object.
        pause = max(0.5 if count < _FREE else min(2.0 ** (count - _FREE), _LONGEST_PAUSE_S), least)
        self._pace[target] = (count, since, now + pause)
        return pause

    def _say(self, target: Target, trouble: str) -> None:
        if trouble and trouble not in self._troubles.values():
            self._on_trouble(trouble)
        self._troubles[target] = trouble
