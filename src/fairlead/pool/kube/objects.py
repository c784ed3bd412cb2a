"""Read the needed fields of what an API server sends: lists, watch events, errors, InferencePools.

Items stay raw bytes until they are read, so that an unreadable object does not affect the others.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct

from fairlead.core.endpoint import MAX_PORTS

T = TypeVar("T")


class Meta(Struct, frozen=True, rename="camel", gc=False):
    """The fields of `metadata` that are read."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    deletion_timestamp: str | None = None


class Named(Struct, frozen=True, gc=False):
    """Any object, of which only the metadata is read."""

    metadata: Meta = Meta()


class ListMeta(Struct, frozen=True, rename="camel", gc=False):
    resource_version: str = ""
    #: The token of the next page; empty = this is the last.
    continue_: str = msgspec.field(name="continue", default="")


class Page(Struct, frozen=True):
    """A page of a list. Some servers send null as the `items` of an empty list."""

    metadata: ListMeta = ListMeta()
    items: list[Raw] | None = None


class WatchEvent(Struct, frozen=True):
    """An event of a watch. `type`: ADDED, MODIFIED, DELETED, BOOKMARK or ERROR."""

    type: str
    object: Raw = Raw(b"{}")


class Failure(Struct, frozen=True):
    """A `Status` object, which says why a request failed."""

    code: int = 0
    reason: str = ""
    message: str = ""


class Unreadable(Exception):
    """The bytes cannot be read as the expected object."""


_page = msgspec.json.Decoder(Page)
_event = msgspec.json.Decoder(WatchEvent)
_named = msgspec.json.Decoder(Named)
_failure = msgspec.json.Decoder(Failure)


def read_page(text: bytes) -> Page:
    """Read a page of a list. Raises `Unreadable`."""
    return decoded(_page, text)


def read_event(line: bytes) -> WatchEvent:
    """Read a line of a watch. Raises `Unreadable`."""
    return decoded(_event, line)


def read_meta(text: bytes | Raw) -> Meta:
    """Read the metadata of an object. Raises `Unreadable`."""
    return decoded(_named, text).metadata


def read_failure(text: bytes | Raw) -> Failure:
    """Read a `Status`; an empty `Failure` if the text is something else."""
    try:
        return decoded(_failure, text)
    except Unreadable:
        return Failure()


def read_plain(text: bytes | Raw) -> dict[str, Any]:
    """Read an object as plain values. Raises `Unreadable` for anything but a JSON object."""
    value = decoded(_plain, text)
    if not isinstance(value, dict):
        raise Unreadable("expected an object")
    return value


_plain: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


def decoded(decoder: msgspec.json.Decoder[T], text: bytes | Raw) -> T:
    """Decode `text`. Raises `Unreadable`."""
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Unreadable(str(error)) from None


def key_of(meta: Meta) -> str:
    """The key of an object: `namespace/name`."""
    return f"{meta.namespace}/{meta.name}"


# Reads the fields of an InferencePool that an endpoint picker needs.
#
# Both forms are read: `inference.networking.k8s.io/v1`, and `inference.networking.x-k8s.io/v1alpha2` with its flat
# selector, one port and `extensionRef`. The API server has checked the objects against their schemas. The fields that
# are used are checked again, because the schemas of early versions were laxer.

GROUP, LEGACY_GROUP = "inference.networking.k8s.io", "inference.networking.x-k8s.io"
#: The version that is read, by group.
VERSIONS = {GROUP: "v1", LEGACY_GROUP: "v1alpha2"}
#: `appProtocol` of pods that accept cleartext HTTP/2 with prior knowledge; `http` is HTTP/1.1.
H2C = "kubernetes.io/h2c"
#: The default if a reference to the picker names no port.
PICKER_PORT = 9002


class PickerRef(Struct, frozen=True):
    """`endpointPickerRef`: the service that gateways shall ask, and what they do if it does not answer."""

    name: str
    port: int = PICKER_PORT
    kind: str = "Service"
    failure_mode: str = "FailClose"


class Pool(Struct, frozen=True):
    namespace: str
    name: str
    #: All the labels that a pod must have. Never empty, which would select every pod of the namespace.
    selector: Mapping[str, str]
    #: 1 to 8 different ports. Each port of each pod is an endpoint.
    ports: tuple[int, ...]
    app_protocol: str = "http"
    picker: PickerRef | None = None
    uid: str = ""
    #: `metadata.creationTimestamp`, whose alphabetical order is that of time.
    created: str = ""


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


class _PoolMeta(Meta, frozen=True, rename="camel"):
    creation_timestamp: str | None = None


class _Pool(Struct, frozen=True):
    metadata: _PoolMeta = _PoolMeta()
    spec: _Spec = _Spec()


_decoder = msgspec.json.Decoder(_Pool)


def read_pool(text: bytes | Raw) -> Pool:
    """Read a pool. Raises an `Unreadable` that says what is wrong."""
    pool = decoded(_decoder, text)
    spec = pool.spec
    ref = spec.endpoint_picker_ref or spec.extension_ref
    return Pool(
        pool.metadata.namespace,
        pool.metadata.name,
        _selector(spec.selector or {}),
        _ports(spec),
        spec.app_protocol or "http",
        _picker(ref) if ref else None,
        pool.metadata.uid,
        pool.metadata.creation_timestamp or "",
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
    """The labels as a query parameter `labelSelector`."""
    return ",".join(f"{key}={labels[key]}" for key in sorted(labels))
