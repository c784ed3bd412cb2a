"""An InferencePool → what an endpoint picker needs of it.

Both forms are read: `inference.networking.k8s.io/v1`, and `inference.networking.x-k8s.io/v1alpha2` with its flat
selector, one port and `extensionRef`. An API server has checked the objects against their schemas; what matters here is
checked again, because schemas of early versions were laxer.
"""

from collections.abc import Mapping

import msgspec
from msgspec import Raw, Struct

from fairlead.wire.kube_objects import Meta, Unreadable

GROUP, LEGACY_GROUP = "inference.networking.k8s.io", "inference.networking.x-k8s.io"
#: The versions that are read, by group.
VERSIONS = {GROUP: "v1", LEGACY_GROUP: "v1alpha2"}
MAX_PORTS = 8
#: `appProtocol` of pods that take cleartext HTTP/2 by prior knowledge; `http` is HTTP/1.1.
H2C = "kubernetes.io/h2c"
#: Where a reference to the picker names no port.
PICKER_PORT = 9002


class PickerRef(Struct, frozen=True):
    """`endpointPickerRef`: the service that gateways are told to ask, and what they do when it does not answer."""

    name: str
    port: int = PICKER_PORT
    kind: str = "Service"
    failure_mode: str = "FailClose"


class Pool(Struct, frozen=True):
    namespace: str
    name: str
    #: Labels that a pod must have, all of them. Never empty: that would be every pod of the namespace.
    selector: Mapping[str, str]
    #: 1 to 8 different ones; each port of each pod is an endpoint.
    ports: tuple[int, ...]
    app_protocol: str = "http"
    picker: PickerRef | None = None


class _Port(Struct, frozen=True):
    number: int = 0


class _Ref(Struct, frozen=True, rename="camel"):
    name: str = ""
    kind: str | None = None
    port: _Port | None = None
    port_number: int | None = None
    failure_mode: str | None = None


class _Spec(Struct, frozen=True, rename="camel"):
    selector: dict[str, object] | None = None
    target_ports: list[_Port] | None = None
    target_port_number: int | None = None
    app_protocol: str | None = None
    endpoint_picker_ref: _Ref | None = None
    extension_ref: _Ref | None = None


class _Pool(Struct, frozen=True):
    metadata: Meta = Meta()
    spec: _Spec = _Spec()


_decoder = msgspec.json.Decoder(_Pool)


def read_pool(text: bytes | Raw) -> Pool:
    """Raises `Unreadable` with what is wrong."""
    try:
        found = _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unreadable(str(error)) from None
    spec = found.spec
    ref = spec.endpoint_picker_ref or spec.extension_ref
    return Pool(
        found.metadata.namespace,
        found.metadata.name,
        _selector(spec.selector or {}),
        _ports(spec),
        spec.app_protocol or "http",
        _picker(ref) if ref else None,
    )


def _selector(said: dict[str, object]) -> dict[str, str]:
    labels = said.get("matchLabels", said)
    if not isinstance(labels, dict) or not labels:
        raise Unreadable("spec.selector names no labels; it would select every pod")
    if not all(isinstance(value, str) for value in labels.values()):
        raise Unreadable("spec.selector: labels are strings; only matchLabels is known")
    return labels


def _ports(spec: _Spec) -> tuple[int, ...]:
    if spec.target_ports is not None:
        ports = [port.number for port in spec.target_ports]
    else:
        ports = [] if spec.target_port_number is None else [spec.target_port_number]
    if not 1 <= len(ports) <= MAX_PORTS or len({*ports}) < len(ports) or not all(0 < port < 65536 for port in ports):
        raise Unreadable(f"spec.targetPorts: expected 1 to {MAX_PORTS} different ports, got {ports[:9]}")
    return tuple(ports)


def _picker(ref: _Ref) -> PickerRef:
    port = ref.port.number if ref.port else ref.port_number
    return PickerRef(ref.name, port or PICKER_PORT, ref.kind or "Service", ref.failure_mode or "FailClose")


def selector_text(labels: Mapping[str, str]) -> str:
    """For the query parameter `labelSelector`."""
    return ",".join(f"{key}={labels[key]}" for key in sorted(labels))
