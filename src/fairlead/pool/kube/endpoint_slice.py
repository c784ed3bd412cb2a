"""Publish the leader's address to gateways in an EndpointSlice (discovery.k8s.io/v1) of a Service without a selector.

Kubernetes' own controller does not write the slices of such a Service. A pod of an ordinary Service is removed when
its deletion is requested; here, a leader that ends stays listed until its successor is. A leader that died is replaced
by the same write, however long its node counts as ready.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import Raw, Struct

from fairlead.pool.aio import cancelled, set_within
from fairlead.pool.kube.client import KubeClient, KubeError, Resource, Unreachable
from fairlead.pool.kube.objects import Meta, Unreadable, decoded
from fairlead.pool.kube.reflector import Reflector

GROUP, VERSION = "discovery.k8s.io", "v1"
#: The labels that name a slice's service, and the program that maintains the slice.
SERVICE_LABEL, KEEPER_LABEL = "kubernetes.io/service-name", "endpointslice.kubernetes.io/managed-by"
KEEPER = "fairlead"
#: The annotation of a slice with the lease, `NAMESPACE/NAME`, whose holder wrote it.
LEASE = "fairlead.dev/lease"


class Place(Struct, frozen=True):
    """Where a replica runs: its pod's address, name and node, and its namespace if it differs from the service's. All
    but the address are for people and for gateways that look up pods; each may be empty."""

    address: str
    pod: str = ""
    node: str = ""
    namespace: str = ""

    @property
    def family(self) -> str:
        return "IPv6" if ":" in self.address else "IPv4"


class Port(Struct, frozen=True):
    """A port of a slice: the pod's port, with its name in the service."""

    name: str
    port: int
    protocol: str = "TCP"


class Service(Struct, frozen=True):
    name: str
    uid: str
    ports: tuple[Port, ...]
    #: The port numbers by which clients of the service know these ports.
    numbers: tuple[int, ...] = ()


class Slice(Struct, frozen=True):
    """The fields of a slice that matter. `version`: its resourceVersion; empty = the slice does not exist yet."""

    version: str = ""
    addresses: tuple[str, ...] = ()
    pod: str = ""
    ports: frozenset[Port] = frozenset()
    #: The slice's service: its name (a label) and its uid (the owner reference); and the lease of the slice's writer.
    service: str = ""
    owner: str = ""
    lease: str = ""
    #: Gateways may use its addresses.
    usable: bool = True


def wanted_slice(service: Service, place: Place, lease: str, version: str = "") -> Slice:
    """The slice that names this place, written by the holder of this lease."""
    return Slice(version, (place.address,), place.pod, frozenset(service.ports), service.name, service.uid, lease)


class _ServicePort(Struct, frozen=True, rename="camel"):
    name: str = ""
    port: int = 0
    protocol: str = "TCP"
    target_port: int | str = 0


class _ServiceSpec(Struct, frozen=True):
    ports: list[_ServicePort] | None = None
    selector: dict[str, str] | None = None


class _Service(Struct, frozen=True):
    metadata: Meta = Meta()
    spec: _ServiceSpec = _ServiceSpec()


class _Target(Struct, frozen=True):
    name: str = ""


class _Conditions(Struct, frozen=True):
    ready: bool | None = True
    serving: bool | None = True
    terminating: bool | None = False


class _Endpoint(Struct, frozen=True, rename="camel"):
    addresses: tuple[str, ...] = ()
    target_ref: _Target | None = None
    conditions: _Conditions = _Conditions()


class _SlicePort(Struct, frozen=True):
    name: str | None = None
    port: int | None = None
    protocol: str | None = None


class _Owner(Struct, frozen=True):
    uid: str = ""


class _SliceMeta(Meta, frozen=True, rename="camel"):
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    owner_references: tuple[_Owner, ...] = ()


class _Slice(Struct, frozen=True):
    metadata: _SliceMeta = _SliceMeta()
    endpoints: list[_Endpoint] | None = None
    ports: list[_SlicePort] | None = None


def read_service(text: bytes | Raw) -> Service:
    """Read a service. Raises `Unreadable`, also if its slices cannot be written here: it has a selector, or a port has
    no number."""
    service = decoded(msgspec.json.Decoder(_Service), text)
    name = service.metadata.name
    if service.spec.selector:
        raise Unreadable(f"the service {name} has a selector; one that names the leader must have none")
    ports = []
    for port in service.spec.ports or ():
        number = port.target_port or port.port
        if not isinstance(number, int) or not 0 < number < 65536:
            raise Unreadable(f"the service {name}: targetPort must be a number, got '{number}'")
        ports.append(Port(port.name, number, port.protocol))
    return Service(name, service.metadata.uid, tuple(ports), tuple(port.port for port in service.spec.ports or ()))


def read_slice(text: bytes | Raw) -> Slice:
    """Read a slice. Raises `Unreadable`."""
    listed = decoded(msgspec.json.Decoder(_Slice), text)
    meta, endpoints = listed.metadata, listed.endpoints or []
    return Slice(
        meta.resource_version,
        tuple(address for endpoint in endpoints for address in endpoint.addresses),
        next((endpoint.target_ref.name for endpoint in endpoints if endpoint.target_ref is not None), ""),
        frozenset(Port(port.name or "", port.port or 0, port.protocol or "TCP") for port in listed.ports or ()),
        meta.labels.get(SERVICE_LABEL, ""),
        next((owner.uid for owner in meta.owner_references), ""),
        meta.annotations.get(LEASE, ""),
        all(endpoint.conditions == _Conditions() for endpoint in endpoints),
    )


def slice_name(service: str, place: Place) -> str:
    """The name of the slice: one for each address family, because a slice cannot change its family."""
    return f"{service}-{place.family.lower()}"


def slice_object(
    service: Service, namespace: str, place: Place, lease: str, version: str = "", empty: bool = False
) -> dict[str, Any]:
    """The object for POST or, with a version, PUT. `empty`: there is no leader. It is deleted with its service."""
    metadata: dict[str, Any] = {
        "name": slice_name(service.name, place),
        "namespace": namespace,
        "labels": {SERVICE_LABEL: service.name, KEEPER_LABEL: KEEPER},
        "annotations": {LEASE: lease},
        "ownerReferences": [{"apiVersion": "v1", "kind": "Service", "name": service.name, "uid": service.uid}],
    }
    if version:
        metadata["resourceVersion"] = version
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "EndpointSlice",
        "metadata": metadata,
        "addressType": place.family,
        "ports": [{"name": port.name, "port": port.port, "protocol": port.protocol} for port in service.ports],
        "endpoints": [] if empty else [_endpoint(place, namespace)],
    }


async def empty_slice(client: KubeClient, namespace: str, seen: Slice) -> None:
    """Remove the addresses of a slice that a former leader wrote, unless it has changed since. Raises `KubeError` and
    `Unreachable`."""
    place = Place(seen.addresses[0])
    service = Service(seen.service, seen.owner, tuple(sorted(seen.ports, key=lambda port: port.name)))
    value = slice_object(service, namespace, place, seen.lease, seen.version, empty=True)
    slices = Resource(GROUP, VERSION, "endpointslices", namespace)
    await client.put(slices, slice_name(seen.service, place), value, seen.version)


def _endpoint(place: Place, namespace: str) -> Mapping[str, Any]:
    made: dict[str, Any] = {
        "addresses": [place.address],
        "conditions": {"ready": True, "serving": True, "terminating": False},
    }
    if place.pod:
        made["targetRef"] = {"kind": "Pod", "namespace": place.namespace or namespace, "name": place.pod}
    if place.node:
        made["nodeName"] = place.node
    return made


# Publishes the leader's address: each new leader overwrites the same EndpointSlice.
#
# Rules
# * Only the leader writes, each time with the version that it read. So one of two writers gets 409 and reads again.
# * If another writer changed the slice, the leader corrects it, but after a delay: a replica that was suspended and
#   still believes that it leads must learn of its successor first.
# * A leader that ends leaves the slice to its successor. If there is none, it empties the slice, so that gateways know
#   that no replica answers.
# * The service is read again about every `SERVICE_S`: its ports may change, and a recreated service has another uid.
# * A slice that the holder of another lease wrote is left unchanged for a while, and reported: two releases serve one
#   pool. Then it is overwritten, because its writer may be gone. The wait doubles each time the other holder writes.
# * Without permission nothing is written, and the missing rule is reported. Leading never depends on it.

#: Seconds before changes by others are corrected, and seconds after a failure.
REPAIR_S, RETRY_S = 1.0, 1.0
#: Seconds after which the service is read again. Seconds for which a slice written by another lease's holder is left
#: unchanged: at first, and at most.
SERVICE_S, FOREIGN_S, FOREIGN_MAX_S = 30.0, 30.0, 3600.0
#: Codes of an answer to a write: the object is another one by now, or is gone.
CONFLICTS = (404, 409)


class EndpointSlicePublisher:
    """Writes the slice of `service`: after `lead(True)`, it names `place`. `await run()` never returns."""

    def __init__(
        self,
        client: KubeClient,
        namespace: str,
        service: str,
        place: Place,
        lease: str,
        *,
        on_trouble: Callable[[str], object] = lambda trouble: None,
        reflector: Reflector[Slice] | None = None,
    ) -> None:
        """`lease`: the lease of the leader election, as `NAMESPACE/NAME`. `reflector`: a shared reflector of several
        slices, whose owner calls `see`; `None` = create one."""
        #: How often the slice was written.
        self.writes = 0
        self._client = client
        self._namespace = namespace
        self._name = service
        self._place = place
        self._lease = lease
        self._on_trouble = on_trouble
        self._services = Resource("", "v1", "services", namespace)
        self._slices = Resource(GROUP, VERSION, "endpointslices", namespace)
        self._service: Service | None = None
        #: `_service` was read recently, and nothing indicates that the service has changed since.
        self._current = False
        #: The version of the slice that another lease's holder wrote, when it may be overwritten (loop time), and the
        #: next wait in seconds.
        self._foreign, self._foreign_until, self._patience = "", 0.0, FOREIGN_S
        self._seen = Slice()
        self._leading = False
        #: The slice has named this replica since this replica became the leader.
        self._named = False
        #: Why the last attempt to name this replica in the slice failed; empty = it succeeded, or there was none. Of a
        #: replica that does not lead: why its own reflector cannot read the slice.
        self.trouble = ""
        self._woken = asyncio.Event()
        self._writing = asyncio.Lock()
        self._own = reflector is None
        self.reflector: Reflector[Slice] = reflector or Reflector(
            client,
            self._slices,
            read_slice,
            lambda slices: self.see(*slices.values()),
            query={"fieldSelector": f"metadata.name={slice_name(service, place)}"},
            synced=self._woken.set,
            on_trouble=self._contact,
        )

    def lacks(self, port: int) -> str:
        """Why nobody who asks at this port of the service reaches it; empty = the port exists, or is not known yet."""
        known = () if self._service is None else self._service.numbers
        if not known or port in known:
            return ""
        has = ", ".join(map(str, known))
        return f"no port {port} at the service {self._namespace}/{self._name}, which has {has}"

    def lead(self, leading: bool) -> None:
        self._leading, self._named = leading, False
        self._foreign, self._patience = "", FOREIGN_S
        if not leading:
            self._say("")
        self._woken.set()

    async def run(self) -> None:
        watching = asyncio.create_task(self.reflector.run(), name="leader's slice") if self._own else None
        try:
            await self.reflector.ready.wait()
            while True:
                self._woken.clear()
                pause = await self._round() if self._leading else None
                if not await set_within(self._woken, pause):
                    self._current = False
        finally:
            await cancelled(watching)

    async def withdraw(self) -> None:
        """Empty the slice, because no replica leads. Never raises. A slice that names another replica stays."""
        with contextlib.suppress(KubeError, Unreachable, Unreadable, TimeoutError):
            # A write in flight may be naming this replica; its result is known once it has ended.
            async with asyncio.timeout(RETRY_S), self._writing:
                service = self._service
                if service is not None and not self._leading and self._names(service):
                    await self._put(service, empty=True)

    def _names(self, service: Service) -> bool:
        return self._seen == wanted_slice(service, self._place, self._lease, self._seen.version)

    async def _round(self) -> float:
        """Write the slice if needed. Return the seconds until the next round."""
        try:
            if self._service is None or not self._current:
                self._current = False
                self._service = read_service(await self._client.read(self._services, self._name))
                self._current = True
            if self._named and not self._names(self._service):
                await asyncio.sleep(REPAIR_S)
            if not self._names(self._service):
                if (pause := self._left_to_other()) > 0:
                    return pause
                if not self._leading:
                    return SERVICE_S
                async with self._writing:
                    await self._put(self._service)
            if not self._named:
                await self._empty_other_family(self._service)
            self._named = True
            self._say("")
        except (KubeError, Unreachable, Unreadable) as error:
            if isinstance(error, KubeError) and error.code in CONFLICTS and self._current:
                return await self._look()
            self._say(f"the service {self._namespace}/{self._name} does not point to this replica: {error}")
            return RETRY_S
        return SERVICE_S * self._client.rng.uniform(0.8, 1.2)

    async def _empty_other_family(self, service: Service) -> None:
        """Empty the slice of the other address family, which a former leader may have written. Never raises."""
        former = Place("::" if self._place.family == "IPv4" else "0.0.0.0")
        name = slice_name(service.name, former)
        with contextlib.suppress(KubeError, Unreachable, Unreadable):
            seen = read_slice(await self._client.read(self._slices, name))
            if seen.addresses and seen.lease == self._lease and self._leading:
                await empty_slice(self._client, self._namespace, seen)

    def _left_to_other(self) -> float:
        """Seconds for which the slice is still left to the holder of another lease; not positive = overwrite it now."""
        seen = self._seen
        if not seen.addresses or seen.lease in ("", self._lease):
            return 0.0
        now = asyncio.get_running_loop().time()
        if seen.version != self._foreign:
            self._foreign, self._foreign_until = seen.version, now + self._patience
            self._patience = min(2 * self._patience, FOREIGN_MAX_S)
        self._say(
            f"the service {self._namespace}/{self._name} points to {seen.addresses[0]}, by the lease"
            f" {seen.lease} of another release; only one of them may serve its pool"
        )
        return self._foreign_until - now

    async def _put(self, service: Service, empty: bool = False) -> None:
        seen = self._seen
        value = slice_object(service, self._namespace, self._place, self._lease, seen.version, empty)
        answer = await self._client.put(self._slices, slice_name(self._name, self._place), value, seen.version)
        self.writes += 1
        self._seen = read_slice(answer)

    async def _look(self) -> float:
        """Read the slice, and later its service, again after another write."""
        self._current = False
        try:
            self._seen = read_slice(await self._client.read(self._slices, slice_name(self._name, self._place)))
        except (KubeError, Unreachable, Unreadable) as error:
            if not isinstance(error, KubeError) or error.code != 404:
                self._say(str(error))
                return RETRY_S
            self._seen = Slice()
        return 0.0

    def see(self, listed: Slice | None) -> None:
        """Take note of the present slice; `None` = there is none."""
        self._seen = listed or Slice()
        if self._service is not None and self._seen.owner != self._service.uid:
            self._current = False  # perhaps the service was made again: its old slice is deleted
        self._woken.set()

    def _contact(self, trouble: str) -> None:
        if trouble or not self._leading:
            self._say(trouble)
        elif self.trouble:
            self._woken.set()

    def _say(self, trouble: str) -> None:
        if not self._leading:
            trouble = self.reflector.stats.trouble if self._own else ""
        if trouble != self.trouble:
            self.trouble = trouble
            self._on_trouble(trouble)
