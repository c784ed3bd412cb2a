"""Turn an InferencePool and its pods into endpoints.

Rules (the reference picker's datastore; Kubernetes' own for readiness)
* A pod counts while its condition `Ready` is True, it has not ended and is not being deleted. The phase matters because
  a node that dies leaves pods that are `Failed` but still `Ready`. Readiness gates are part of `Ready`.
* Each of the pool's target ports is an endpoint, `<namespace>/<pod>-rank-<index>`. The annotation
  `llm-d.ai/active-ports` limits them to the ports that it lists; an unreadable annotation is ignored.
* The pod's labels are the endpoint's labels. Older label names are also added under their current names. The pod's node
  is the label `kubernetes.io/hostname`. The label `metricsAddress` is left out: metrics, and the token for them, are of
  the pod itself.
"""

import asyncio
from collections.abc import Callable, Mapping
from ipaddress import ip_address

import msgspec
from msgspec import Raw, Struct

from fairlead.config.endpoint_list import MAX_LABELS
from fairlead.core.endpoint import NODE_LABEL, Endpoint, host_port
from fairlead.core.events import EndpointDown, EndpointUp
from fairlead.pool.aio import Turns, call_consumer, cancelled
from fairlead.pool.kube.client import KubeClient, Resource
from fairlead.pool.kube.objects import VERSIONS, Meta, Pool, Unreadable, decoded, read_pool, selector_text
from fairlead.pool.kube.reflector import Reflector

ACTIVE_PORTS = ("llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports")
#: Older label names and their current names.
_RENAMED = {"inference.networking.k8s.io/engine-type": "llm-d.ai/engine-type"}


class _PodMeta(Meta, frozen=True, rename="camel"):
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class _Condition(Struct, frozen=True, gc=False):
    type: str = ""
    status: str = ""


class _Status(Struct, frozen=True, rename={"pod_ip": "podIP"}):
    phase: str = ""
    pod_ip: str = ""
    conditions: list[_Condition] | None = None


class _Spec(Struct, frozen=True, rename="camel"):
    node_name: str = ""


class _Pod(Struct, frozen=True):
    metadata: _PodMeta = _PodMeta()
    spec: _Spec = _Spec()
    status: _Status = _Status()


_decoder = msgspec.json.Decoder(_Pod)


#: Phases of a pod whose containers have all ended.
_OVER = ("Failed", "Succeeded")


class Pod(Struct, frozen=True):
    """The fields of a pod that matter. If they are all equal, nothing relevant has changed."""

    namespace: str
    name: str
    uid: str
    #: The pod can serve requests: it is ready, not being deleted, and has an address.
    serves: bool
    address: str = ""
    labels: Mapping[str, str] = {}
    #: The labels that selectors see: those of the pod itself.
    own_labels: Mapping[str, str] = {}
    #: Ports in use; `None` = all.
    active_ports: frozenset[int] | None = None


def read_pod(text: bytes | Raw) -> Pod:
    """Read a pod. Raises `Unreadable`."""
    pod = decoded(_decoder, text)
    meta, status = pod.metadata, pod.status
    if not meta.name:
        raise Unreadable("metadata.name is missing")
    ready = any(condition.type == "Ready" and condition.status == "True" for condition in status.conditions or ())
    over = status.phase in _OVER or meta.deletion_timestamp is not None
    if not ready or over or not _is_address(status.pod_ip):
        return Pod(meta.namespace, meta.name, meta.uid, False)
    own = meta.labels or {}
    labels = dict(list(own.items())[:MAX_LABELS])
    for old, new in _RENAMED.items():
        if old in labels:
            labels.setdefault(new, labels[old])
    labels.pop("metricsAddress", None)
    if pod.spec.node_name:
        labels.setdefault(NODE_LABEL, pod.spec.node_name)
    ports = _active_ports(meta.annotations or {})
    return Pod(meta.namespace, meta.name, meta.uid, True, status.pod_ip, labels, own, ports)


def endpoints_of(pod: Pod, ports: tuple[int, ...]) -> list[Endpoint]:
    """The pod's endpoints at a pool's target ports, by rank."""
    if not pod.serves:
        return []
    return [
        Endpoint(
            f"{pod.namespace}/{pod.name}-rank-{rank}", host_port(pod.address, port), pod.labels, rank=rank, uid=pod.uid
        )
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


# Rules of following a pool
# * The pool determines the pods and ports. If its selector changes, pods are listed again and compared; pods that both
#   selectors select stay up. If its ports change, they are applied to the known pods.
# * If a pool is removed, its endpoints go down. A pool that cannot be read changes nothing.
# * If a pod is replaced by another pod of the same name, its endpoints go down, then up.
# * Of pods that change together, endpoints that come are sent before those that go: the pool is never empty meanwhile.
# * `EndpointUp` is sent only for new or changed endpoints, `EndpointDown` only for removed ones, however often pods are
#   listed. If many change at once, their events are sent in several turns of the event loop (`Turns`).

Feed = Callable[[EndpointUp | EndpointDown], object]
OnTrouble = Callable[[str, str], object]


class PodEndpoints:
    """The endpoints of a set of pods; sends their events by the last three rules above."""

    def __init__(self, feed: Feed, turns: Turns | None = None) -> None:
        """`turns`: shared with other sets; `None` = there are none."""
        self._feed = feed
        self._turns = turns or Turns()
        self._closed = False
        self._by_pod: dict[str, tuple[str, dict[str, Endpoint]]] = {}

    @property
    def pods(self) -> list[str]:
        """Keys of the pods that have endpoints."""
        return list(self._by_pod)

    @property
    def endpoints(self) -> list[Endpoint]:
        """The endpoints that are up."""
        return [endpoint for _, by_id in self._by_pod.values() for endpoint in by_id.values()]

    def take(self, pods: Mapping[str, Pod | None], ports: tuple[int, ...]) -> None:
        """Take note of the present state of pods by key; `None` = it is gone."""
        gone: list[EndpointDown] = []
        for key, pod in pods.items():
            uid, known = self._by_pod.pop(key, ("", {}))
            wanted = {endpoint.id: endpoint for endpoint in endpoints_of(pod, ports)} if pod is not None else {}
            for endpoint in wanted.values():
                if pod is not None and uid != pod.uid and endpoint.id in known:
                    self._emit(EndpointDown(endpoint.id), EndpointUp(endpoint))
                elif known.get(endpoint.id) != endpoint:
                    self._emit(EndpointUp(endpoint))
            gone += [EndpointDown(endpoint_id) for endpoint_id in known if endpoint_id not in wanted]
            if wanted and pod is not None:
                self._by_pod[key] = (pod.uid, wanted)
        for event in gone:
            self._emit(event)

    def make(self, call: Callable[[], object]) -> None:
        """Make the call, which must not raise, once the events so far were sent."""
        self._turns.make(lambda: None if self._closed else call())

    def close(self) -> None:
        """Drop the events and calls that were not sent or made yet."""
        self._closed = True

    def _emit(self, *events: EndpointUp | EndpointDown) -> None:
        def send() -> None:
            for event in events:
                call_consumer(lambda event=event: self._feed(event), f"the consumer of {event!r}")  # type: ignore[misc]

        self.make(send)


class PoolEndpoints:
    """Follows a pool. Calls `on_trouble(resource, trouble)` when contact to the API server is lost or (empty) back, and
    `changed()` after the pool changed or was listed, or its pods were listed. `await run()` never returns."""

    def __init__(
        self,
        client: KubeClient,
        pool: Pool,
        group: str,
        feed: Feed,
        *,
        on_trouble: OnTrouble = lambda resource, trouble: None,
        report: Callable[[str], object] = lambda problem: None,
        changed: Callable[[], object] = lambda: None,
    ) -> None:
        """`pool`: if it has a selector, it is used as it is; otherwise the InferencePool of its name is followed."""
        #: The present pool; `None` = there is none.
        self.pool: Pool | None = pool if pool.selector else None
        self._wanted = pool
        self._client = client
        self._on_trouble = on_trouble
        self._report = report
        self._changed = changed
        #: The pods of the present pool were listed once.
        self._listed = False
        self._pod_endpoints = PodEndpoints(feed)
        self._pods: Reflector[Pod] | None = None
        self._pods_task: asyncio.Task[None] | None = None
        self._pools: Reflector[Pool] | None = None
        if not pool.selector:
            self._pools = Reflector(
                client,
                Resource(group, VERSIONS[group], "inferencepools", pool.namespace),
                read_pool,
                lambda pools: self._pool_changed(*pools.values()),
                query={"fieldSelector": f"metadata.name={pool.name}"},
                synced=changed,
                on_trouble=lambda trouble: on_trouble("inferencepools", trouble),
                report=report,
            )

    @property
    def reflectors(self) -> dict[str, Reflector[Pod] | Reflector[Pool]]:
        """The running reflectors, by resource."""
        by_resource: dict[str, Reflector[Pod] | Reflector[Pool]] = {}
        if self._pools is not None:
            by_resource["inferencepools"] = self._pools
        if self._pods is not None:
            by_resource["pods"] = self._pods
        return by_resource

    @property
    def absent(self) -> bool:
        """Whether it is known that there is no such InferencePool."""
        return self._pools is not None and self._pools.complete and self.pool is None

    @property
    def missing(self) -> str:
        """Why the endpoints are not known yet, in words; empty = they are."""
        if self._pools is not None and not self._pools.ready.is_set():
            return "the InferencePool was not read yet"
        if self.pool is None:
            return f"there is no InferencePool {self._wanted.namespace}/{self._wanted.name}"
        if not self._listed:
            return "the pods were not listed yet"
        return ""

    @property
    def endpoints(self) -> list[Endpoint]:
        return self._pod_endpoints.endpoints

    async def run(self) -> None:
        try:
            if self._pools is None:
                self._follow_pods(self._wanted)
                await asyncio.Event().wait()
            else:
                await self._pools.run()
        finally:
            task, self._pods_task = self._pods_task, None
            self._pod_endpoints.close()
            await cancelled(task)

    # ---- the pool ----

    def _pool_changed(self, pool: Pool | None) -> None:
        old, self.pool = self.pool, pool
        if pool is None:
            self._unfollow()
            self._pods_changed(dict.fromkeys(self._pod_endpoints.pods))
        elif old is None or old.selector != pool.selector:
            self._follow_pods(pool)
        if pool is not None and old is not None and old.ports != pool.ports and self._pods is not None:
            self._pods_changed(self._pods.items)
        self._tell(False if pool is None else None)

    def _unfollow(self) -> None:
        if self._pods_task is not None:
            self._pods_task.cancel()
        self._pods_task = self._pods = None

    def _follow_pods(self, pool: Pool) -> None:
        known = self._pods.items if self._pods is not None else {}
        self._unfollow()
        self._pods = Reflector(
            self._client,
            Resource("", "v1", "pods", pool.namespace),
            read_pod,
            self._pods_changed,
            query={"labelSelector": selector_text(pool.selector)},
            synced=lambda: self._tell(True),
            on_trouble=lambda trouble: self._on_trouble("pods", trouble),
            report=self._report,
            items=known,
        )
        self._pods_task = asyncio.create_task(self._pods.run(), name="pods")

    # ---- pods ----

    def _tell(self, listed: bool | None) -> None:
        """Once the events so far were sent: note whether the pods are listed (`None` = as before), call `changed`."""

        def tell() -> None:
            self._listed = self._listed if listed is None else listed
            self._changed()

        self._pod_endpoints.make(lambda: call_consumer(tell, "the follower of a pool"))

    def _pods_changed(self, pods: Mapping[str, Pod | None]) -> None:
        self._pod_endpoints.take(pods, self.pool.ports if self.pool is not None else ())
