"""Leader election as a table: what a lease says, what we know, what to do next.

Theory
* A lease (coordination.k8s.io/v1) names its holder. Every write carries the version that was read, so of several
  contenders one wins and the others get 409.
* Clocks of machines differ. Nobody compares the lease's times with its own clock: a lease has run out when its
  *observed* content has not changed for its duration, by the observer's own monotonic clock. The times in it are for
  people.
* Who goes on purpose gives the lease back: no holder, a duration of one second. Watchers see that at once.
"""

from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import Raw, Struct

from fairlead.wire.kube_objects import Meta, Unreadable


class _Spec(Struct, frozen=True, rename="camel"):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class _Lease(Struct, frozen=True):
    metadata: Meta = Meta()
    spec: _Spec = _Spec()


class Lease(Struct, frozen=True):
    """What a lease says. `version` is its resourceVersion."""

    holder: str = ""
    duration: int = 0
    acquired: str = ""
    renewed: str = ""
    transitions: int = 0
    version: str = ""

    @property
    def free(self) -> bool:
        return not self.holder


_decoder = msgspec.json.Decoder(_Lease)


def read_lease(text: bytes | Raw) -> Lease:
    """Raises `Unreadable`."""
    try:
        found = _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unreadable(str(error)) from None
    spec = found.spec
    return Lease(
        spec.holder_identity or "",
        max(spec.lease_duration_seconds or 0, 0),
        spec.acquire_time or "",
        spec.renew_time or "",
        max(spec.lease_transitions or 0, 0),
        found.metadata.resource_version,
    )


class Sight(Struct, frozen=True):
    """A lease, and when (monotonic seconds) it was first seen to say what it says. `None` = there is none."""

    lease: Lease | None
    since: float

    def seen(self, lease: Lease | None, now: float) -> "Sight":
        """The same again starts no new time."""
        return self if lease == self.lease else Sight(lease, now)


class Take(Struct, frozen=True):
    """Write it with our name."""


class Keep(Struct, frozen=True):
    """It is ours: renew it."""


class Wait(Struct, frozen=True):
    """Somebody holds it. Look again at this moment, or when it changes."""

    until: float


def next_step(sight: Sight, me: str, now: float, duration: float) -> Take | Keep | Wait:
    """`duration` is ours; the one in a foreign lease counts as long as its holder may rely on it."""
    lease = sight.lease
    if lease is None or lease.free:
        return Take()
    if lease.holder == me:
        return Keep()
    runs_out = sight.since + (lease.duration or duration)
    return Take() if now >= runs_out else Wait(runs_out)


def claimed(old: Lease | None, me: str, duration: float, wall: float) -> Lease:
    """The lease as it should be once we hold it. `wall`: seconds since 1970."""
    now = micro_time(wall)
    seconds = max(round(duration), 1)
    if old is not None and old.holder == me:
        return Lease(me, seconds, old.acquired or now, now, old.transitions, old.version)
    if old is None:
        return Lease(me, seconds, now, now, 0, "")
    return Lease(me, seconds, now, now, old.transitions + 1, old.version)


def released(old: Lease, wall: float) -> Lease:
    """Given back."""
    now = micro_time(wall)
    return Lease("", 1, old.acquired or now, now, old.transitions, old.version)


def lease_object(lease: Lease, namespace: str, name: str) -> dict[str, Any]:
    """For POST and, with a version, PUT."""
    metadata = {"name": name, "namespace": namespace}
    if lease.version:
        metadata["resourceVersion"] = lease.version
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": metadata,
        "spec": {
            "holderIdentity": lease.holder,
            "leaseDurationSeconds": lease.duration,
            "acquireTime": lease.acquired,
            "renewTime": lease.renewed,
            "leaseTransitions": lease.transitions,
        },
    }


def micro_time(wall: float) -> str:
    """metav1.MicroTime."""
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
