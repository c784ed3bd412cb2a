"""Running in Kubernetes: a pool's endpoints and models from the API server, and leader election between replicas.

Readiness: only after pool, pods and definitions were read once and, with leader election, only while this replica
leads. Losing the API server later changes neither: routing continues with what was known. Liveness depends on none of
this.

Handing over: gateways must find the next leader before they lose the last one. They find it either by health checks,
each at its own pace, whose results Envoy delivers to its workers at most once a second (`update_merge_window`;
measured: with no overlap 300 of 960 requests found no healthy picker for that second), or by addresses from a control
plane. So both replicas answer for `overlap`, and the last leader continues until gateways have noticed.
"""

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from ipaddress import ip_address
from random import Random
from typing import Any

from fairlead.config.schema import Kubernetes
from fairlead.core.endpoint import host_port
from fairlead.core.errors import ConfigError
from fairlead.core.models import ModelSet
from fairlead.pool.aio import cancelled
from fairlead.pool.kube.auth import find_access
from fairlead.pool.kube.client import KubeClient
from fairlead.pool.kube.elector import ElectionSettings, Elector
from fairlead.pool.kube.endpoint_slice import EndpointSlicePublisher, Place
from fairlead.pool.kube.models import PoolModels
from fairlead.pool.kube.objects import Pool
from fairlead.pool.kube.pods import Feed, PoolEndpoints
from fairlead.pool.kube.reflector import Reflector
from fairlead.pool.kube.status import StatusWriter
from fairlead.server.observe.component_metrics import KubeMetrics
from fairlead.server.observe.log import get

log = get("kubernetes")

#: Seconds that the start waits for the first lists. If they arrive later, only readiness is delayed.
START_S = 5.0
#: Seconds that an ending leader waits for a successor, and after the overlap for gateways to notice its end.
SUCCESSOR_S, NOTICE_S = 3.0, 3.0


class KubeLink:
    """What following one pool and following several share: the API client, leader election, readiness, metrics.
    `set_ready(part, reason)`: an empty reason clears it."""

    def __init__(
        self,
        settings: Kubernetes,
        set_ready: Callable[[str, str], object],
        metrics: KubeMetrics,
        pool: str,
        health_port: int = 0,
    ) -> None:
        """`pool` is part of the lease's name. `health_port`: where other replicas see whether this one has ended.
        Raises `ConfigError` if no API server is configured or found."""
        self._settings = settings
        self._set_ready = set_ready
        self._metrics = metrics
        self._rng = Random()
        self._synced = asyncio.Event()
        #: The lease was given back on purpose: readiness lasts until the successor is known.
        self._ending = False
        self._troubles: dict[str, str] = {}
        self.client = KubeClient(find_access(settings.kubeconfig, settings.context))
        self.namespace = namespace_of(settings, self.client)
        self._lease = settings.leader_election.lease_name or f"epp-{self.namespace}-{pool}.fairlead"
        self.elector = self._elector(health_port) if settings.leader_election.enabled else None
        #: What runs for as long as Kubernetes is followed, each with its name.
        self.work: list[tuple[Callable[[], Coroutine[Any, Any, None]], str]] = []
        #: By pool or namespace.
        self.writers: dict[str, StatusWriter] = {}
        #: By namespace and service.
        self.publishers: dict[tuple[str, str], EndpointSlicePublisher] = {}

    # ---- what subclasses fill in ----

    @property
    def missing(self) -> str:
        """What keeps this replica from being ready; empty = nothing."""
        raise NotImplementedError

    @property
    def reflectors(self) -> Mapping[str, Reflector[Any]]:
        """By resource."""
        raise NotImplementedError

    # ---- common to all ----

    @property
    def misled(self) -> str:
        """Why gateways do not find this leader; empty = they do."""
        troubles = [publisher.trouble for publisher in self.publishers.values() if publisher.trouble]
        return "; ".join(troubles) if self._may_write() else ""

    @property
    def lease(self) -> str:
        """The leader's lease, as `NAMESPACE/NAME`."""
        return f"{self.namespace}/{self._lease}"

    async def start(self, stack: AsyncExitStack) -> None:
        """Follow everything for as long as `stack` is open."""
        stack.push_async_callback(self.client.close)
        self._judge()
        log.info("following", server=self.client.server, namespace=self.namespace, pool=self._settings.pool)
        for work, name in self.work:
            self._run(stack, work, f"kubernetes {name}")
        if self.elector is not None:
            self._set_ready("leader", "standby: no leader is known yet")
            self._run(stack, self.elector.run, "kubernetes lease")
        self._metrics.follow(self._followed)
        try:
            async with asyncio.timeout(START_S):
                await self._synced.wait()
        except TimeoutError:
            log.warning("not ready: no state from Kubernetes yet", reason="; ".join(self._troubles.values()) or "")

    async def hand_over(self) -> None:
        """This replica is about to end: let another one lead, and let gateways find it before they lose this one.

        Both are ready for a moment. Otherwise a gateway might find no ready replica between two health checks.
        """
        elector = self.elector
        if elector is None or not elector.leading:
            return
        self._ending = True
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

        def ended(task: "asyncio.Task[None]") -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("watching Kubernetes failed", exc=error, part=name)

        task.add_done_callback(ended)
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
        )
        return Elector(
            self.client, settings, self._leads, self._rng, on_trouble=lambda why: self._on_trouble("leases", why)
        )

    # ---- what happens ----

    def _leads(self, leading: bool, holder: str) -> None:
        for publisher in self.publishers.values():
            publisher.lead(leading)
        self._metrics.leader.child(self._lease).set(leading)
        if not self._ending:
            self._set_ready("leader", "" if leading else f"standby: {holder or 'nobody'} leads")
        if leading:
            log.info("this replica is the leader", lease=self._lease)
        else:
            log.info("this replica is on standby", lease=self._lease, leader=holder)
        for writer in self.writers.values():
            writer.wake()

    def _may_write(self) -> bool:
        return self.elector is None or self.elector.leading

    def _judge(self) -> None:
        """Set readiness by whether everything that it requires is known."""
        missing = self.missing
        if missing and self._troubles:
            missing = f"{missing}: {'; '.join(dict.fromkeys(self._troubles.values()))}"
        self._set_ready("kubernetes", missing)
        if not missing:
            self._synced.set()

    def _on_trouble(self, resource: str, trouble: str) -> None:
        before = self._troubles.pop(resource, "")
        if trouble:
            self._troubles[resource] = trouble
            if trouble != before:
                log.warning(
                    "trouble with Kubernetes; the last known state stays in use", resource=resource, reason=trouble
                )
        elif before:
            log.info("no more trouble with Kubernetes", resource=resource)
        self._judge()

    def _followed(self) -> Mapping[str, Reflector[Any]]:
        reflectors = dict(self.reflectors)
        if self.elector is not None:
            reflectors["leases"] = self.elector.reflector
        for name, writer in self.writers.items():
            self._metrics.wrote(name, writer.writes)
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
    ) -> None:
        """Raises `ConfigError` if no API server is configured or found."""
        super().__init__(settings, set_ready, metrics, settings.pool or "pods", health_port)
        self.endpoints = PoolEndpoints(
            self.client,
            wanted_pool(settings, self.namespace),
            settings.group,
            feed,
            self._rng,
            on_trouble=self._on_trouble,
            report=report_unreadable,
            changed=self._judge,
        )
        self.work.append((self.endpoints.run, "endpoints"))
        writer = self.writers[settings.pool] = StatusWriter(self.client, self._may_write, log.warning)
        self.models: PoolModels | None = None
        if settings.models and settings.pool:
            self.models = PoolModels(
                self.client,
                self.namespace,
                writer,
                self._rng,
                on_trouble=self._on_trouble,
                report=report_unreadable,
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
                self._rng,
                on_trouble=lambda why: self._on_trouble("endpointslices", why),
            )
            self.work.append((publisher.run, "leader's service"))

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
    """This replica's name on the lease. It contains the pod's uid, so that a restarted container takes its own lease
    back immediately; outside of Kubernetes a random part."""
    name, uid = socket.gethostname(), os.environ.get("POD_UID", "")
    return f"{name}_{uid or secrets.token_hex(4)}"


def _pod_ip() -> str:
    """This pod's address from the chart's environment; empty = not set."""
    try:
        return str(ip_address(os.environ.get("POD_IP", "")))
    except ValueError:
        return ""


def _answers_at(port: int) -> str:
    """ADDRESS:PORT of this pod; empty = it has no address that other pods can reach."""
    address = _pod_ip()
    return host_port(address, port) if address and port else ""


def own_place(namespace: str = "") -> Place:
    """This pod, from the chart's environment. Raises `ConfigError`."""
    address = _pod_ip()
    if not address:
        path = "$.kubernetes.leaderElection"
        raise ConfigError("the service cannot lead here: $POD_IP must be the address of this pod", path)
    return Place(address, os.environ.get("POD_NAME", ""), os.environ.get("NODE_NAME", ""), namespace)


def namespace_of(settings: Kubernetes, client: KubeClient) -> str:
    return settings.namespace or os.environ.get("NAMESPACE", "") or client.namespace or "default"


def wanted_pool(settings: Kubernetes, namespace: str) -> Pool:
    """The configured pool: with a selector if the configuration has one, else by name only."""
    return Pool(namespace, settings.pool, settings.selector, settings.target_ports)


async def follow_pool(stack: AsyncExitStack, settings: Kubernetes, feed: Feed) -> str:
    """Follow a pool's endpoints only, for gateways that balance by themselves. Returns the pool's `appProtocol`; `http`
    while it is unknown.

    Raises `ConfigError` as `Kube` does.
    """
    client = KubeClient(find_access(settings.kubeconfig, settings.context))
    stack.push_async_callback(client.close)
    pool = wanted_pool(settings, namespace_of(settings, client))
    protocols: list[str] = []
    read = asyncio.Event()

    def changed() -> None:
        if endpoints.pool is None:
            return
        protocol = endpoints.pool.app_protocol
        if protocols and protocol != protocols[-1]:
            log.error(
                "the pool's appProtocol changed; restart the gateway to apply it",
                app_protocol=protocol,
                before=protocols[-1],
            )
        if not protocols or protocol != protocols[-1]:
            protocols.append(protocol)
        read.set()

    endpoints = PoolEndpoints(client, pool, settings.group, feed, Random(), changed=changed)
    task = asyncio.create_task(endpoints.run(), name="pool")
    stack.callback(task.cancel)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(START_S):
            await read.wait()
    if not protocols:
        protocols.append(pool.app_protocol)
    return protocols[0]
