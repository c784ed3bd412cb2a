"""Leader election by a lease: the lease, the decision on the next step, and the elector that carries it out.

Theory
* A lease (coordination.k8s.io/v1) names its holder. Every write carries the version that was read, so one of several
  contenders wins and the others get 409.
* Clocks of machines differ, so replicas never compare the lease's times with their own clocks. A lease has expired when
  its *observed* content has not changed for its duration, by the observer's monotonic clock. The times in the lease are
  for people.
* A leader that stops on purpose gives the lease back: no holder, a duration of one second. Watchers see this
  immediately.
* A leader that dies cannot give it back. So an annotation of the lease has the holder's address, and the other replicas
  keep a connection to it (`LeaderWatch`). If the connection ends and a new one is refused, the lease is taken without
  waiting for it to expire. A silent connection counts as alive, because the network may be cut; then the lease must
  expire. If the old holder is alive after all, it sees the new holder in the lease and becomes a follower.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import Raw, Struct

from fairlead.pool.aio import cancelled, set_within
from fairlead.pool.kube.client import KubeClient, KubeError, Resource, Unreachable
from fairlead.pool.kube.objects import Meta, Unreadable, decoded
from fairlead.pool.kube.reflector import Reflector


class _Spec(Struct, frozen=True, rename="camel"):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class _Meta(Meta, frozen=True, rename="camel", gc=False):
    annotations: dict[str, str] | None = None


class _Lease(Struct, frozen=True):
    metadata: _Meta = _Meta()
    spec: _Spec = _Spec()


class Lease(Struct, frozen=True):
    """The content of a lease. `address`: ADDRESS:PORT of its holder, or empty. `version`: the resourceVersion. `page`:
    the URL where the holder tells what it learned, or empty."""

    holder: str = ""
    duration: int = 0
    acquired: str = ""
    renewed: str = ""
    transitions: int = 0
    version: str = ""
    address: str = ""
    page: str = ""

    @property
    def free(self) -> bool:
        return not self.holder


_decoder = msgspec.json.Decoder(_Lease)

#: The annotations with the address and the page of a lease's holder.
ADDRESS, PAGE = "fairlead.dev/answers-at", "fairlead.dev/learned-at"


def read_lease(text: bytes | Raw) -> Lease:
    """Read a lease. Raises `Unreadable`."""
    lease = decoded(_decoder, text)
    spec, annotations = lease.spec, lease.metadata.annotations or {}
    return Lease(
        spec.holder_identity or "",
        max(spec.lease_duration_seconds or 0, 0),
        spec.acquire_time or "",
        spec.renew_time or "",
        max(spec.lease_transitions or 0, 0),
        lease.metadata.resource_version,
        annotations.get(ADDRESS, ""),
        annotations.get(PAGE, ""),
    )


class Sight(Struct, frozen=True):
    """A lease (`None` = there is none), and since when (monotonic seconds) it has been seen with this content.
    `ended`: `LeaderWatch` has seen its holder end since then."""

    lease: Lease | None
    since: float
    ended: bool = False

    def seen(self, lease: Lease | None, now: float) -> "Sight":
        """Take note of a lease. An unchanged lease keeps its time."""
        return self if lease == self.lease else Sight(lease, now)


class Take(Struct, frozen=True):
    """Write the lease with this replica as holder."""


class Keep(Struct, frozen=True):
    """Renew the lease, which this replica holds."""


class Wait(Struct, frozen=True):
    """Another replica holds the lease. Decide again at this time (monotonic seconds), or when the lease changes."""

    until: float


def next_step(sight: Sight, me: str, now: float, duration: float) -> Take | Keep | Wait:
    """Decide what the replica `me` does. `duration`: its setting in seconds, used if the lease names no duration."""
    lease = sight.lease
    if lease is None or lease.free:
        return Take()
    if lease.holder == me:
        return Keep()
    runs_out = sight.since + (lease.duration or duration)
    return Take() if sight.ended or now >= runs_out else Wait(runs_out)


def claimed(old: Lease | None, me: str, duration: float, wall: float, address: str = "", page: str = "") -> Lease:
    """The lease that this replica writes to take or renew it. `wall`: seconds since 1970. `address`, `page`: this
    replica's."""
    now = micro_time(wall)
    seconds = max(round(duration), 1)
    if old is not None and old.holder == me:
        return Lease(me, seconds, old.acquired or now, now, old.transitions, old.version, address, page)
    if old is None:
        return Lease(me, seconds, now, now, 0, "", address, page)
    return Lease(me, seconds, now, now, old.transitions + 1, old.version, address, page)


def released(old: Lease, wall: float) -> Lease:
    """The lease that its holder writes to give it back. `wall`: seconds since 1970."""
    now = micro_time(wall)
    return Lease("", 1, old.acquired or now, now, old.transitions, old.version)


def lease_object(lease: Lease, namespace: str, name: str) -> dict[str, Any]:
    """The object for POST or, with a version, PUT."""
    metadata: dict[str, Any] = {"name": name, "namespace": namespace}
    if lease.version:
        metadata["resourceVersion"] = lease.version
    annotations = {ADDRESS: lease.address, PAGE: lease.page}
    if any(annotations.values()):
        metadata["annotations"] = {name: value for name, value in annotations.items() if value}
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
    """Format a time as metav1.MicroTime."""
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


# Leader election: one of several replicas leads, by a lease that all of them watch.
#
# Rules (`next_step` decides)
# * The holder renews every `retry_s`, with jitter. Other replicas wait until the lease has not changed for its
#   duration, by their own clocks. Only time in touch with the API server counts: after an outage they start again.
# * A replica that stops gives the lease back, and a watching replica takes it immediately. The same happens if the
#   holder was seen to end.
# * While the API server does not answer, no replica can take the lease, and the holder continues to lead. A pool
#   without a picker is worse than two leaders for a moment, because both decide well. The holder steps down if it sees
#   another holder, or if renewing is *refused* for `renew_s`.
# * Losing the lease does not end the process. The replica contends for it again.

GROUP, VERSION = "coordination.k8s.io", "v1"
_CONFLICT, _NOT_FOUND = 409, 404
_LAST_PORT = 65_535


class ElectionSettings(Struct, frozen=True, kw_only=True):
    """Times are in seconds. `identity` must be unique. `address`: this replica's ADDRESS:PORT, to which other replicas
    connect; if empty, they wait for the lease to expire. `page`: the URL where this replica tells what it learned."""

    namespace: str
    name: str
    identity: str
    duration_s: float = 15.0
    renew_s: float = 10.0
    retry_s: float = 2.0
    address: str = ""
    page: str = ""


class LeaderWatch:
    """Keeps a connection to an address. Calls `ended(address)` if it ended and no new connection was accepted.

    No requests are sent, so the cost is a socket on each side. Silently dropped packets are not detected.
    """

    #: Seconds to wait for a connection, and failed attempts until the leader counts as ended.
    ACCEPT_S, ATTEMPTS = 0.2, 2
    #: Seconds until the next attempt after a connection ended, and the longest pause if attempts fail or soon end.
    SOON_S, LATER_S = 0.05, 1.0
    #: The preface and empty SETTINGS that an HTTP/2 client must send first (RFC 9113, 3.4).
    HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"

    def __init__(self, ended: Callable[[str], object]) -> None:
        self._ended = ended
        self._address = ""
        self._task: asyncio.Task[None] | None = None

    def follow(self, address: str) -> None:
        """Connect to `address` (ADDRESS:PORT); empty = disconnect. The same address again changes nothing."""
        if address == self._address:
            return
        self._address = address
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.create_task(self._run(address), name="leader watch") if address else None

    async def close(self) -> None:
        task = self._task
        self.follow("")
        await cancelled(task)

    async def _run(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        if not port.isdecimal() or int(port) > _LAST_PORT:
            return
        connected, missed, soon = False, 0, self.SOON_S
        while True:
            lasted = await self._hold(host.strip("[]"), int(port))
            if lasted is not None:
                connected, missed = True, 0
                soon = self.SOON_S if lasted > self.LATER_S else min(2 * soon, self.LATER_S)
            elif connected:
                missed += 1
                if missed == self.ATTEMPTS:
                    connected = False
                    self._ended(address)
            await asyncio.sleep(soon if connected else self.LATER_S)

    async def _hold(self, host: str, port: int) -> float | None:
        """Connect and wait until the connection ends. Return the seconds it lasted; `None` = it was not accepted."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.ACCEPT_S):
                reader, writer = await asyncio.open_connection(host, port)
        except (OSError, TimeoutError, ValueError):  # ValueError: an impossible host name
            return None
        began = loop.time()
        try:
            writer.write(self.HELLO)
            while await reader.read(4096):
                pass
        except OSError:
            pass
        finally:
            writer.close()
        return loop.time() - began


class Elector:
    """Contends for the lease, and calls `changed(leading, holder)` for each change. `await run()` never returns; after
    it is cancelled, `await release()`."""

    def __init__(
        self,
        client: KubeClient,
        settings: ElectionSettings,
        changed: Callable[[bool, str], object],
        *,
        on_trouble: Callable[[str], object] = lambda trouble: None,
    ) -> None:
        self.leading = False
        self.holder = ""
        #: How often this replica became the leader.
        self.terms = 0
        #: The lease as the last other holder had it, who may have ended; without a holder, there was none.
        self.former = Lease()
        self._client = client
        self._settings = settings
        self._changed = changed
        self._on_trouble = on_trouble
        self._resource = Resource(GROUP, VERSION, "leases", settings.namespace)
        self._sight: Sight | None = None
        self._woken = asyncio.Event()
        self._renewed_at = 0.0
        self._trouble = ""
        self._releasing = False
        self._leader_watch = LeaderWatch(self._leader_ended)
        self.reflector: Reflector[Lease] = Reflector(
            client,
            self._resource,
            read_lease,
            lambda leases: self._seen(*leases.values()),
            query={"fieldSelector": f"metadata.name={settings.name}"},
            synced=self._synced,
            on_trouble=self._contact,
        )

    async def run(self) -> None:
        watching = asyncio.create_task(self.reflector.run(), name="lease watch")
        try:
            await self.reflector.ready.wait()
            while True:
                await self._turn()
        finally:
            await cancelled(watching)
            await self._leader_watch.close()

    async def release(self) -> None:
        """Stop leading and give the lease back. Never raises; if the API server does not answer, the lease expires."""
        was, self._releasing = self.leading, True
        self._lead(False, "")
        if not was:
            return
        for _ in range(2):
            sight = self._sight
            if sight is None or sight.lease is None or sight.lease.holder != self._settings.identity:
                return
            try:
                await self._put(released(sight.lease, time.time()))
                return
            except (KubeError, Unreachable) as error:
                if not isinstance(error, KubeError) or error.code != _CONFLICT:
                    self._on_trouble(f"the lease was not given back: {error}")
                    return
                await self._look()
            except Unreadable:
                return

    async def successor(self, timeout: float) -> str:
        """Wait until another replica leads, and return its identity; empty = none within `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self.holder in ("", self._settings.identity):
                    self._woken.clear()
                    await self._woken.wait()
                return self.holder
        return ""

    # ---- one turn ----

    async def _turn(self) -> None:
        loop = asyncio.get_running_loop()
        settings = self._settings
        self._woken.clear()
        sight = self._sight
        if self._releasing or sight is None:
            await self._woken.wait()
            return
        step = next_step(sight, settings.identity, loop.time(), settings.duration_s)
        match step:
            case Wait(until):
                self._lead(False, sight.lease.holder if sight.lease else "")
                connected = self.reflector.stats.connected
                await set_within(self._woken, until - loop.time() + 0.001 if connected else settings.retry_s)
            case Take() if not self.leading and not self.reflector.stats.connected:
                await set_within(self._woken, settings.retry_s)
            case Take() | Keep():
                await set_within(self._woken, await self._claim(sight.lease))

    async def _claim(self, lease: Lease | None) -> float:
        """Take or renew the lease. Return the seconds until the next turn."""
        loop = asyncio.get_running_loop()
        settings = self._settings
        asked = loop.time()
        pause = settings.retry_s * self._client.rng.uniform(0.8, 1.0)
        try:
            mine = settings.address, settings.page
            await self._put(claimed(lease, settings.identity, settings.duration_s, time.time(), *mine))
        except KubeError as error:
            if error.code in (_CONFLICT, _NOT_FOUND) and await self._look():
                return 0.0 if self.leading else self._client.rng.uniform(0.0, 0.05)
            self._say(str(error))
            if self.leading and loop.time() - self._renewed_at > settings.renew_s:
                self._lead(False, "")
        except (Unreachable, Unreadable) as error:
            self._say(f"the lease cannot be renewed: {error}" if self.leading else str(error))
        else:
            self._renewed_at = asked
            self._say("")
            if not self._releasing:
                self._lead(True, settings.identity)
        return pause

    async def _put(self, lease: Lease) -> None:
        settings = self._settings
        value = lease_object(lease, settings.namespace, settings.name)
        # Bounded, because one of several API servers may hang, and the lease must not expire meanwhile.
        try:
            async with asyncio.timeout(max(settings.renew_s / 2, settings.retry_s)):
                answer = await self._client.put(self._resource, settings.name, value, lease.version)
        except TimeoutError:
            raise Unreachable("no answer in time") from None
        self._note(read_lease(answer))

    async def _look(self) -> bool:
        """Read the present lease. Return whether it is known."""
        try:
            self._note(read_lease(await self._client.read(self._resource, self._settings.name)))
        except (KubeError, Unreachable, Unreadable) as error:
            if isinstance(error, KubeError) and error.code == _NOT_FOUND:
                self._note(None)
            else:
                self._say(str(error))
                return False
        return True

    # ---- what is seen ----

    def _seen(self, lease: Lease | None) -> None:
        self._note(lease)
        if lease is None or lease.holder != self._settings.identity:
            self._woken.set()

    def _synced(self) -> None:
        if self._sight is None:
            self._note(None)
        self._woken.set()

    def _note(self, lease: Lease | None) -> None:
        now = asyncio.get_running_loop().time()
        self._sight = Sight(lease, now) if self._sight is None else self._sight.seen(lease, now)
        if lease is not None and not lease.free and lease.holder != self._settings.identity:
            self.former = lease
        if self._releasing:
            self._leader_watch.follow("")
            if lease is not None:
                self.holder = lease.holder
        else:
            foreign = lease if lease is not None and lease.holder != self._settings.identity else None
            self._leader_watch.follow(foreign.address if foreign is not None else "")

    def _leader_ended(self, address: str) -> None:
        sight = self._sight
        if sight is not None and (lease := sight.lease) is not None and lease.address == address:
            self._sight = Sight(lease, sight.since, ended=True)
            self._woken.set()

    def _contact(self, trouble: str) -> None:
        if not trouble and self._sight is not None:  # the holder could not renew meanwhile: its time starts again
            self._sight = Sight(self._sight.lease, asyncio.get_running_loop().time())
        self._say(trouble)

    def _lead(self, leading: bool, holder: str) -> None:
        if (leading, holder) != (self.leading, self.holder):
            self.terms += leading and not self.leading
            self.leading, self.holder = leading, holder
            self._changed(leading, holder)

    def _say(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            self._on_trouble(trouble)
