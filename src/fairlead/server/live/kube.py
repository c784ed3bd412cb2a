"""Running in Kubernetes: a pool's endpoints and models from the API server, and leader election between replicas.

Readiness: a replica is ready once pool, pods and model definitions were read and, with leader election, only while it
leads. Losing the API server later does not change that: routing continues with the last known state. Liveness depends
on none of this.

Handing over: gateways must find the next leader before they lose the last one. Some find it by health checks, each at
its own pace, and Envoy delivers the results to its workers at most once a second (`update_merge_window`). Measured
without an overlap: for that second, 300 of 960 requests found no healthy picker. Other gateways get addresses from a
control plane. So both replicas are ready for `overlap`, and the last leader answers until gateways have noticed.
"""

import asyncio
import os
import secrets
import socket
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from ipaddress import ip_address
from typing import Any

from fairlead.config.schema import Kubernetes
from fairlead.core.endpoint import host_port
from fairlead.core.errors import ConfigError
from fairlead.core.models import ModelSet
from fairlead.pool.aio import cancelled, set_within
from fairlead.pool.kube.auth import find_access
from fairlead.pool.kube.client import KubeClient
from fairlead.pool.kube.elector import ElectionSettings, Elector
from fairlead.pool.kube.endpoint_slice import EndpointSlicePublisher, Place
from fairlead.pool.kube.models import PoolModels
from fairlead.pool.kube.objects import PickerRef, Pool
from fairlead.pool.kube.pods import Feed, PoolEndpoints
from fairlead.pool.kube.reflector import Reflector
from fairlead.pool.kube.status import StatusWriter
from fairlead.server.live.handover import Handover
from fairlead.server.observe.component_metrics import KubeMetrics
from fairlead.server.observe.log import get

log = get("kubernetes")

#: Seconds that the start waits for the first lists. If they take longer, only readiness is delayed.
START_S = 5.0
#: Seconds that a stopping leader waits for a successor, and after the overlap for gateways to notice that it stops.
SUCCESSOR_S, NOTICE_S = 3.0, 3.0


class KubeLink:
    """The common part of following one pool and several: the API client, leader election, readiness, metrics.
    `set_ready(part, reason)` reports why a part is not ready; an empty reason = it is ready."""

    def __init__(
        self,
        settings: Kubernetes,
        set_ready: Callable[[str, str], object],
        metrics: KubeMetrics,
        pool: str,
        health_port: int = 0,
        handover: Handover | None = None,
    ) -> None:
        """`pool` is part of the lease's default name. `health_port`: other replicas check there whether this one has
        stopped; 0 = they cannot. `handover`: tells the next leader what this one learned. Raises `ConfigError` if no
        API server is configured or found."""
        self._settings = settings
        self._set_ready = set_ready
        self._metrics = metrics
        self._synced = asyncio.Event()
        #: This replica released the lease because it stops. It stays ready until the successor is known.
        self._ending = False
        #: Why this replica stands by, without the trouble with the lease; empty = it leads.
        self._standby = "standby: no leader is known yet" if settings.leader_election.enabled else ""
        self._troubles: dict[str, str] = {}
        self.client = KubeClient(find_access(settings.kubeconfig, settings.context))
        self.namespace = namespace_of(settings, self.client)
        self._lease = settings.leader_election.lease_name or f"epp-{self.namespace}-{pool}.fairlead"
        self._handover = handover
        self.elector = self._elector(health_port) if settings.leader_election.enabled else None
        #: Coroutine functions to run while Kubernetes is followed, each with a name.
        self.work: list[tuple[Callable[[], Coroutine[Any, Any, None]], str]] = []
        #: Status writers by pool or namespace.
        self.writers: dict[str, StatusWriter] = {}
        #: EndpointSlice publishers by namespace and service.
        self.publishers: dict[tuple[str, str], EndpointSlicePublisher] = {}

    # ---- what subclasses fill in ----

    @property
    def missing(self) -> str:
        """The state from Kubernetes that is not known yet, so that this replica is not ready; empty = none."""
        raise NotImplementedError

    @property
    def reflectors(self) -> Mapping[str, Reflector[Any]]:
        """The reflectors by resource."""
        raise NotImplementedError

    @property
    def pools(self) -> Iterable[Pool]:
        """The InferencePools that are known to exist."""
        raise NotImplementedError

    # ---- common to all ----

    @property
    def misled(self) -> str:
        """Why gateways do not find this leader; empty = they do, or this replica does not lead."""
        troubles = [publisher.trouble for publisher in self.publishers.values() if publisher.trouble]
        for pool in self.pools:
            ref = pool.picker or PickerRef("")
            publisher = self.publishers.get((pool.namespace, ref.name))
            if publisher is not None and (lacks := publisher.lacks(ref.port)):
                troubles.append(f"the endpointPickerRef of {pool.namespace}/{pool.name}: {lacks}")
        return "; ".join(troubles) if self._may_write() else ""

    @property
    def lease(self) -> str:
        """The leader's lease, as `NAMESPACE/NAME`."""
        return f"{self.namespace}/{self._lease}"

    async def start(self, stack: AsyncExitStack) -> None:
        """Follow Kubernetes for as long as `stack` is open. Waits at most `START_S` for the first state."""
        stack.push_async_callback(self.client.close)
        self._judge()
        log.info("following", server=self.client.server, namespace=self.namespace, pool=self._settings.pool)
        for work, name in self.work:
            self._run(stack, work, f"kubernetes {name}")
        if self.elector is not None:
            self._metrics.leader.child(self._lease).set(False)
            self._run(stack, self.elector.run, "kubernetes lease")
            if self._handover is not None:
                self._run(stack, partial(self._handover.run, self.elector), "what the leader learned")
        self._metrics.follow(self._followed, lambda: {name: writer.writes for name, writer in self.writers.items()})
        if not await set_within(self._synced, START_S):
            log.warning("not ready: no state from Kubernetes yet", reason="; ".join(self._troubles.values()) or "")

    async def hand_over(self) -> None:
        """Let another replica lead, because this one stops, and let gateways find it before they lose this one.

        Both replicas are ready for a moment. Otherwise a gateway might find no ready one between two health checks.
        """
        elector = self.elector
        if elector is None or not elector.leading:
            return
        self._ending = True
        if self._handover is not None:
            await self._handover.prepare()
        await elector.release()
        successor = await elector.successor(SUCCESSOR_S)
        log.info("released the leader lease", successor=successor)
        if successor:
            await asyncio.sleep(self._settings.leader_election.overlap)
        else:
            await asyncio.gather(*(publisher.withdraw() for publisher in self.publishers.values()))
        self._set_ready("leader", f"{successor or 'nobody'} leads, this replica ends")
        if successor:
            await asyncio.sleep(NOTICE_S)

    def _run(self, stack: AsyncExitStack, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        task = asyncio.create_task(work(), name=name)
        task.add_done_callback(log.failure("watching Kubernetes failed", part=name))
        stack.push_async_callback(cancelled, task)

    def _elector(self, health_port: int) -> Elector:
        wanted = self._settings.leader_election
        settings = ElectionSettings(
            namespace=self.namespace,
            name=self._lease,
            identity=own_identity(),
            duration_s=wanted.lease_duration,
            renew_s=wanted.renew_deadline,
            retry_s=wanted.retry_period,
            address=_answers_at(health_port),
            page=self._handover.page if self._handover is not None else "",
        )
        return Elector(self.client, settings, self._leads, on_trouble=lambda why: self._on_trouble("leases", why))

    # ---- callbacks ----

    def _leads(self, leading: bool, holder: str) -> None:
        for publisher in self.publishers.values():
            publisher.lead(leading)
        if self._handover is not None:
            self._handover.changed(leading)
        self._metrics.leader.child(self._lease).set(leading)
        self._standby = "" if leading else f"standby: {holder or 'nobody'} leads"
        self._judge()
        if leading:
            log.info("this replica is the leader", lease=self._lease)
        else:
            log.info("this replica is on standby", lease=self._lease, leader=holder)
        for writer in self.writers.values():
            writer.wake()

    def _may_write(self) -> bool:
        return self.elector is None or self.elector.leading

    def _judge(self) -> None:
        """Set readiness: ready once nothing is missing, and not while this replica stands by."""
        missing, standby, lease = self.missing, self._standby, self._troubles.get("leases", "")
        if missing and self._troubles:
            missing = f"{missing}: {'; '.join(dict.fromkeys(self._troubles.values()))}"
        self._set_ready("kubernetes", missing)
        if not self._ending:
            self._set_ready("leader", f"{standby}: {lease}" if standby and lease else standby)
        if not missing:
            self._synced.set()

    def _on_trouble(self, resource: str, trouble: str) -> None:
        before = self._troubles.pop(resource, "")
        if trouble:
            self._troubles[resource] = trouble
            if trouble != before:
                state = "the last known state stays in use" if self._synced.is_set() else "no state is known yet"
                log.warning(f"trouble with Kubernetes; {state}", resource=resource, reason=trouble)
        elif before:
            log.info("no more trouble with Kubernetes", resource=resource)
        self._judge()

    def _followed(self) -> Mapping[str, Reflector[Any]]:
        reflectors = dict(self.reflectors)
        if self.elector is not None:
            reflectors["leases"] = self.elector.reflector
        return reflectors


class Kube(KubeLink):
    """Follows one pool."""

    def __init__(
        self,
        settings: Kubernetes,
        feed: Feed,
        models: Callable[[ModelSet], object],
        set_ready: Callable[[str, str], object],
        metrics: KubeMetrics,
        health_port: int = 0,
        handover: Handover | None = None,
        speaks_for_gateway: bool = False,
    ) -> None:
        """`speaks_for_gateway`: log what an embedded gateway applies only at its start. Of several workers, one does.
        Raises `ConfigError` if no API server is configured or found."""
        super().__init__(settings, set_ready, metrics, settings.pool or "pods", health_port, handover)
        self._speaks_for_gateway = speaks_for_gateway
        self.endpoints = PoolEndpoints(
            self.client,
            wanted_pool(settings, self.namespace),
            settings.group,
            feed,
            on_trouble=self._on_trouble,
            report=report_unreadable,
            changed=self._pool_changed,
        )
        #: The pool's `appProtocol` as last read; empty = it was not read yet.
        self._protocol = ""
        self.work.append((self.endpoints.run, "endpoints"))
        writer = self.writers[settings.pool] = StatusWriter(self.client, self._may_write, log.warning)
        self.models: PoolModels | None = None
        if settings.models and settings.pool:
            self.models = PoolModels(
                self.client,
                self.namespace,
                writer,
                on_trouble=self._on_trouble,
                report=report_unreadable,
                absent=lambda _, pool: pool == settings.pool and self.endpoints.absent,
                pool_group=settings.group,
            )

            def defined(model_set: ModelSet) -> None:
                models(model_set)
                self._judge()

            self.models.follow(self.namespace, settings.pool, defined)
            self.work.append((self.models.run, "models"))
        if settings.status:
            self.work.append((writer.run, "status"))
        service = settings.leader_election.service
        if self.elector is not None and service:
            publisher = self.publishers[self.namespace, service] = EndpointSlicePublisher(
                self.client,
                self.namespace,
                service,
                own_place(),
                self.lease,
                on_trouble=lambda why: self._on_trouble("endpointslices", why),
            )
            self.work.append((publisher.run, "leader's service"))

    def _pool_changed(self) -> None:
        if self.models is not None:
            self.models.look_again()
        if self.endpoints.pool is not None:
            before, self._protocol = self._protocol, self.endpoints.pool.app_protocol
            if self._speaks_for_gateway and before and self._protocol != before:
                text = "the pool's appProtocol changed; the embedded gateway applies it when it is started again"
                log.warning(text, app_protocol=self._protocol, before=before)
        self._judge()

    @property
    def pools(self) -> Iterable[Pool]:
        return () if self.endpoints.pool is None else (self.endpoints.pool,)

    @property
    def missing(self) -> str:
        return self.endpoints.missing or (self.models.missing if self.models is not None else "")

    @property
    def reflectors(self) -> Mapping[str, Reflector[Any]]:
        reflectors: dict[str, Reflector[Any]] = dict(self.endpoints.reflectors)
        if self.models is not None:
            reflectors |= self.models.reflectors
        for publisher in self.publishers.values():
            reflectors["endpointslices"] = publisher.reflector
        return reflectors


def report_unreadable(problem: str) -> None:
    log.warning("ignored an invalid Kubernetes object; its last valid version stays in use", problem=problem)


def own_identity() -> str:
    """This replica's name on the lease. It contains the pod's uid, so that a restarted container can take back its own
    lease immediately. Outside of Kubernetes it contains a random part instead."""
    name, uid = socket.gethostname(), os.environ.get("POD_UID", "")
    return f"{name}_{uid or secrets.token_hex(4)}"


def pod_ip() -> str:
    """This pod's address from `$POD_IP`, which the chart sets; empty = not set, or no IP address."""
    try:
        return str(ip_address(os.environ.get("POD_IP", "")))
    except ValueError:
        return ""


def _answers_at(port: int) -> str:
    """ADDRESS:PORT of this pod's health port; empty = it has none that other pods can reach."""
    address = pod_ip()
    return host_port(address, port) if address and port else ""


def own_place(namespace: str = "") -> Place:
    """This pod's address and names, from the variables that the chart sets. Raises `ConfigError` without `$POD_IP`."""
    address = pod_ip()
    if not address:
        path = "$.kubernetes.leaderElection"
        raise ConfigError("the service cannot point to this replica: $POD_IP must be the address of this pod", path)
    return Place(address, os.environ.get("POD_NAME", ""), os.environ.get("NODE_NAME", ""), namespace)


def namespace_of(settings: Kubernetes, client: KubeClient) -> str:
    return settings.namespace or os.environ.get("NAMESPACE", "") or client.namespace or "default"


def wanted_pool(settings: Kubernetes, namespace: str) -> Pool:
    """The configured pool: with a selector if the configuration has one, else by name only."""
    return Pool(namespace, settings.pool, settings.selector, settings.target_ports)


async def follow_pool(stack: AsyncExitStack, settings: Kubernetes, feed: Feed) -> str:
    """Follow only a pool's endpoints, until the stack is closed. Returns the pool's `appProtocol`, as read first; the
    default (`http`) while it is unknown.

    Raises `ConfigError` as `Kube` does.
    """
    client = KubeClient(find_access(settings.kubeconfig, settings.context))
    stack.push_async_callback(client.close)
    pool = wanted_pool(settings, namespace_of(settings, client))
    read = asyncio.Event()

    def changed() -> None:
        if endpoints.pool is not None:
            read.set()

    endpoints = PoolEndpoints(client, pool, settings.group, feed, changed=changed)
    task = asyncio.create_task(endpoints.run(), name="pool")
    stack.callback(task.cancel)
    await set_within(read, START_S)
    return (endpoints.pool or pool).app_protocol
