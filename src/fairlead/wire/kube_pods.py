"""A pod → the endpoints that it is.

Rules (the reference picker's datastore; Kubernetes' own for readiness)
* A pod counts while its condition `Ready` is True and it is not being deleted. Readiness gates are part of `Ready`.
* Each of the pool's target ports is one endpoint, `<namespace>/<pod>-rank-<index>`; the annotation
  `llm-d.ai/active-ports` leaves out the ports that it does not list. One that cannot be read counts as absent.
* Labels of the pod are the endpoint's labels; older names of ours are known under the current ones too.
"""

from collections.abc import Mapping
from ipaddress import ip_address

import msgspec
from msgspec import Raw, Struct

from fairlead.model.endpoint import Endpoint
from fairlead.wire.endpoint_entry import MAX_LABELS, join
from fairlead.wire.kube_objects import Meta, Unreadable

ACTIVE_PORTS = ("llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports")
#: Older label names and the current ones.
_RENAMED = {"inference.networking.k8s.io/engine-type": "llm-d.ai/engine-type"}


class _PodMeta(Meta, frozen=True, rename="camel"):
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class _Condition(Struct, frozen=True, gc=False):
    type: str = ""
    status: str = ""


class _Status(Struct, frozen=True, rename={"pod_ip": "podIP"}):
    pod_ip: str = ""
    conditions: list[_Condition] | None = None


class _Pod(Struct, frozen=True):
    metadata: _PodMeta = _PodMeta()
    status: _Status = _Status()


_decoder = msgspec.json.Decoder(_Pod)


class Pod(Struct, frozen=True):
    """What matters of a pod. Equal in every field means that nothing changed for us."""

    namespace: str
    name: str
    uid: str
    #: Can be sent requests: ready, not being deleted, with an address.
    serves: bool
    address: str = ""
    labels: Mapping[str, str] = {}
    #: `None` = all.
    active_ports: frozenset[int] | None = None


def read_pod(text: bytes | Raw) -> Pod:
    """Raises `Unreadable`."""
    try:
        pod = _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unreadable(str(error)) from None
    meta, status = pod.metadata, pod.status
    if not meta.name:
        raise Unreadable("metadata.name is missing")
    ready = any(one.type == "Ready" and one.status == "True" for one in status.conditions or ())
    if not ready or meta.deletion_timestamp is not None or not _is_address(status.pod_ip):
        return Pod(meta.namespace, meta.name, meta.uid, False)
    labels = dict(list((meta.labels or {}).items())[:MAX_LABELS])
    for old, new in _RENAMED.items():
        if old in labels:
            labels.setdefault(new, labels[old])
    ports = _active_ports(meta.annotations or {})
    return Pod(meta.namespace, meta.name, meta.uid, True, status.pod_ip, labels, ports)


def endpoints_of(pod: Pod, ports: tuple[int, ...]) -> list[Endpoint]:
    """Its endpoints at a pool's target ports, by rank."""
    if not pod.serves:
        return []
    return [
        Endpoint(f"{pod.namespace}/{pod.name}-rank-{rank}", join(pod.address, port), pod.labels)
        for rank, port in enumerate(ports)
        if pod.active_ports is None or port in pod.active_ports
    ]


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return "%" not in text


def _active_ports(annotations: Mapping[str, str]) -> frozenset[int] | None:
    said = next((annotations[key] for key in ACTIVE_PORTS if key in annotations), None)
    if said is None:
        return None
    words = [word.strip() for word in said.split(",") if word.strip()]
    if not all(word.isascii() and word.isdigit() and len(word) <= 5 for word in words):
        return None
    return frozenset(int(word) for word in words)
