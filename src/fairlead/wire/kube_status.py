"""Status conditions: what we say of an object, and whether it stands there already.

Rules
* Only the condition `Accepted` is ours. It is written by server-side apply with a field manager of our own, so all
  others stay untouched, and two writers cannot lose each other's.
* `lastTransitionTime` changes with `status` only, and is not compared: otherwise each write would call for another.
"""

from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

ACCEPTED = "Accepted"
FIELD_MANAGER = "fairlead-epp"
#: Longest message of a condition, by the published schemas.
MAX_MESSAGE = 32768


class Condition(Struct, frozen=True):
    """What should stand there."""

    status: bool
    reason: str
    message: str
    type: str = ACCEPTED


def stands(wanted: Condition, item: dict[str, Any]) -> bool:
    """Does the object already say so, of its present generation?"""
    found = _current(item, wanted.type)
    return (
        found.get("status") == _word(wanted)
        and found.get("reason") == wanted.reason
        and found.get("message") == wanted.message[:MAX_MESSAGE]
        and found.get("observedGeneration", 0) == _generation(item)
    )


def status_patch(wanted: Condition, item: dict[str, Any], wall: float) -> dict[str, Any]:
    """The body of a server-side apply to the object's `status`. `wall`: seconds since 1970."""
    found = _current(item, wanted.type)
    since = found.get("lastTransitionTime") if found.get("status") == _word(wanted) else None
    metadata = item.get("metadata") or {}
    return {
        "apiVersion": item.get("apiVersion"),
        "kind": item.get("kind"),
        "metadata": {"name": metadata.get("name"), "namespace": metadata.get("namespace")},
        "status": {
            "conditions": [
                {
                    "type": wanted.type,
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


def _current(item: dict[str, Any], kind: str) -> dict[str, Any]:
    status = item.get("status")
    conditions = status.get("conditions") if isinstance(status, dict) else None
    for one in conditions if isinstance(conditions, list) else ():
        if isinstance(one, dict) and one.get("type") == kind:
            return one
    return {}


def _time(wall: float) -> str:
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
