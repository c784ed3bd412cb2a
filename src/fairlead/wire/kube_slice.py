"""An EndpointSlice (discovery.k8s.io/v1) that names one replica: where a Service without a selector leads to.

Such a Service belongs to whoever writes its slices: Kubernetes' own controller leaves it alone. So a leader that ends
is not taken out before another one is in, as a pod of an ordinary Service is at the moment its deletion is asked for,
and one that died is replaced by the same write, however long its node counts as ready.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw, Struct

from fairlead.wire.kube_objects import Meta, Unreadable

GROUP, VERSION = "discovery.k8s.io", "v1"
#: What ties a slice to its service, and who keeps it.
SERVICE_LABEL, KEEPER_LABEL = "kubernetes.io/service-name", "endpointslice.kubernetes.io/managed-by"
KEEPER = "fairlead"


class Place(Struct, frozen=True):
    """Where a replica is: its pod's address, name and node. The names are for people, and for gateways that look a pod
    up; either may be empty."""

    address: str
    pod: str = ""
    node: str = ""

    @property
    def family(self) -> str:
        return "IPv6" if ":" in self.address else "IPv4"


class Port(Struct, frozen=True):
    """Of a slice: the pod's own port, by the name that it has in the service."""

    name: str
    port: int
    protocol: str = "TCP"


class Service(Struct, frozen=True):
    name: str
    uid: str
    ports: tuple[Port, ...]


class Slice(Struct, frozen=True):
    """What counts of a slice. `version` is its resourceVersion; empty = there is none yet."""

    version: str = ""
    addresses: tuple[str, ...] = ()
    pod: str = ""
    ports: frozenset[Port] = frozenset()

    def names(self, place: Place, service: Service) -> bool:
        """It says just what it should."""
        return self.addresses == (place.address,) and self.pod == place.pod and self.ports == {*service.ports}


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


class _Endpoint(Struct, frozen=True, rename="camel"):
    addresses: tuple[str, ...] = ()
    target_ref: _Target | None = None


class _SlicePort(Struct, frozen=True):
    name: str | None = None
    port: int | None = None
    protocol: str | None = None


class _Slice(Struct, frozen=True):
    metadata: Meta = Meta()
    endpoints: list[_Endpoint] | None = None
    ports: list[_SlicePort] | None = None


def read_service(text: bytes | Raw) -> Service:
    """Raises `Unreadable` also for one that cannot be kept by us: Kubernetes keeps it, or a port has no number."""
    try:
        found = msgspec.json.decode(text, type=_Service)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unreadable(str(error)) from None
    name = found.metadata.name
    if found.spec.selector:
        raise Unreadable(f"the service {name} has a selector; one that names the leader must have none")
    ports = []
    for port in found.spec.ports or ():
        number = port.target_port or port.port
        if not isinstance(number, int) or not 0 < number < 65536:
            raise Unreadable(f"the service {name}: targetPort must be a number, got '{number}'")
        ports.append(Port(port.name, number, port.protocol))
    return Service(name, found.metadata.uid, tuple(ports))


def read_slice(text: bytes | Raw) -> Slice:
    """Raises `Unreadable`."""
    try:
        found = msgspec.json.decode(text, type=_Slice)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unreadable(str(error)) from None
    endpoints = found.endpoints or []
    return Slice(
        found.metadata.resource_version,
        tuple(address for endpoint in endpoints for address in endpoint.addresses),
        next((one.target_ref.name for one in endpoints if one.target_ref is not None), ""),
        frozenset(Port(one.name or "", one.port or 0, one.protocol or "TCP") for one in found.ports or ()),
    )


def slice_name(service: str, place: Place) -> str:
    """One for each address family, as a slice cannot change its own."""
    return f"{service}-{place.family.lower()}"


def slice_object(
    service: Service, namespace: str, place: Place, version: str = "", empty: bool = False
) -> dict[str, Any]:
    """For POST and, with a version, PUT. `empty`: nobody leads. It goes with its service."""
    metadata: dict[str, Any] = {
        "name": slice_name(service.name, place),
        "namespace": namespace,
        "labels": {SERVICE_LABEL: service.name, KEEPER_LABEL: KEEPER},
        "ownerReferences": [{"apiVersion": "v1", "kind": "Service", "name": service.name, "uid": service.uid}],
    }
    if version:
        metadata["resourceVersion"] = version
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "EndpointSlice",
        "metadata": metadata,
        "addressType": place.family,
        "ports": [{"name": one.name, "port": one.port, "protocol": one.protocol} for one in service.ports],
        "endpoints": [] if empty else [_endpoint(place, namespace)],
    }


def _endpoint(place: Place, namespace: str) -> Mapping[str, Any]:
    made: dict[str, Any] = {
        "addresses": [place.address],
        "conditions": {"ready": True, "serving": True, "terminating": False},
    }
    if place.pod:
        made["targetRef"] = {"kind": "Pod", "namespace": namespace, "name": place.pod}
    if place.node:
        made["nodeName"] = place.node
    return made
