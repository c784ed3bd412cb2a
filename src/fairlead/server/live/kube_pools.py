"""Follows every InferencePool of some namespaces: opens each when it appears, and closes it when it is deleted.

An `endpointPickerRef` names a Service in the pool's own namespace. With leader election that Service has no selector,
and the leader maintains its EndpointSlice, as with a single pool. So gateways of pools in any namespace reach this
process.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from typing import Any
from weakref import WeakValueDictionary

from msgspec import Struct, field

from fairlead.config.schema import Kubernetes
from fairlead.core.models import ModelSet
from fairlead.pool.aio import cancelled, set_within
from fairlead.pool.kube.client import KubeError, Resource, Unreachable
from fairlead.pool.kube.endpoint_slice import (
    CONFLICTS,
    GROUP,
    KEEPER,
    KEEPER_LABEL,
    RETRY_S,
    VERSION,
    EndpointSlicePublisher,
    Slice,
    empty_slice,
    read_slice,
    slice_name,
)
from fairlead.pool.kube.models import PoolModels
from fairlead.pool.kube.objects import Pool
from fairlead.pool.kube.pools import Pools
from fairlead.pool.kube.reflector import Reflector
from fairlead.pool.kube.status import StatusWriter
from fairlead.server.live.handover import Handover
from fairlead.server.live.kube import KubeLink, own_place, report_unreadable
from fairlead.server.live.pools import OpenedPool
from fairlead.server.observe.component_metrics import KubeMetrics
from fairlead.server.observe.log import get

log = get("kubernetes")

#: The entry in `kubernetes.namespaces` that means all namespaces.
EVERYWHERE = "*"


class _Entry(Struct, eq=False):
    """A pool that exists. `served`: its scheduler; `None` = it is not open yet. `gone`: set when it is deleted."""

    pool: Pool
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    served: OpenedPool | None = None

    def opened(self, served: OpenedPool) -> None:
        self.served = served
        served.changed(self.pool)

    def changed(self, pool: Pool) -> None:
        self.pool = pool
        if self.served is not None:
            self.served.changed(pool)


class _Watched(Struct, eq=False):
    """What is followed in one namespace, or in all namespaces. `None` = models or slices are not followed."""

    pools: Pools
    models: PoolModels | None
    slices: Reflector[Slice] | None

    @property
    def refused(self) -> bool:
        return self.pools.refused or (self.models is not None and self.models.refused)


#: Seconds until slices are looked at again, because contact with the API server may be back.
LOOK_AGAIN_S = 30.0


class KubePools(KubeLink):
    """Calls `open_pool(key, pool)` for each pool that appears; `key` is `namespace/name`."""

    def __init__(
        self,
        settings: Kubernetes,
        open_pool: Callable[[str, Pool], Awaitable[OpenedPool]],
        set_ready: Callable[[str, str], object],
        metrics: KubeMetrics,
        health_port: int = 0,
        handover: Handover | None = None,
    ) -> None:
        """Raises `ConfigError` if no API server is configured or found, or if this pod's address is unknown."""
        super().__init__(settings, set_ready, metrics, "pools", health_port, handover)
        self._open = open_pool
        self._entries: dict[str, _Entry] = {}
        #: By key: held while a pool is opened, so that a former pool of that name is first.
        self._opening = WeakValueDictionary[str, asyncio.Lock]()
        self._place = own_place(self.namespace) if self.elector is not None else None
        #: The tasks that maintain the EndpointSlice of each service, by namespace and service.
        self._keeping: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        #: Set when there may be slices to empty.
        self._leftover = asyncio.Event()
        if self._place is not None:
            self.work.append((self._empty_leftovers, "slices of deleted pools"))
        namespaces = ("",) if EVERYWHERE in settings.namespaces else settings.namespaces
        self._watched = {namespace: self._watch(namespace) for namespace in namespaces}

    def _watch(self, namespace: str) -> _Watched:
        settings = self._settings

        def on_trouble(resource: str, why: str) -> None:
            self._on_trouble(_named(resource, namespace), why)

        writer = self.writers[namespace or EVERYWHERE] = StatusWriter(self.client, self._may_write, log.warning)
        pools = Pools(
            self.client,
            namespace,
            settings.group,
            self._changed,
            pool_labels=settings.pool_selector,
            pod_labels=settings.pod_selector,
            on_trouble=on_trouble,
            report=report_unreadable,
            synced=self._listed,
        )
        self.work.append((pools.run, _named("pools", namespace)))
        models = slices = None
        if settings.models:
            models = PoolModels(
                self.client,
                namespace,
                writer,
                on_trouble=on_trouble,
                report=report_unreadable,
                # With a selector, another scheduler may serve a pool that is not seen here.
                absent=lambda *pool: not settings.pool_selector and pools.lacks("/".join(pool)),
                pool_group=settings.group,
            )
            self.work.append((models.run, _named("models", namespace)))
        if self._place is not None:
            slices = Reflector(
                self.client,
                Resource(GROUP, VERSION, "endpointslices", namespace),
                read_slice,
                self._slices_changed,
                query={"labelSelector": f"{KEEPER_LABEL}={KEEPER}"},
                on_trouble=lambda why: on_trouble("endpointslices", why),
                report=report_unreadable,
            )
            self.work.append((slices.run, _named("slices", namespace)))
        if settings.status:
            self.work.append((writer.run, _named("status", namespace)))
        return _Watched(pools, models, slices)

    def _listed(self) -> None:
        self._leftover.set()
        for watched in self._watched.values():
            if watched.models is not None:
                watched.models.look_again()
        self._judge()

    def _leads(self, leading: bool, holder: str) -> None:
        self._leftover.set()
        super()._leads(leading, holder)

    def _of(self, namespace: str) -> _Watched:
        return self._watched.get(namespace) or self._watched[""]

    async def start(self, stack: AsyncExitStack) -> None:
        stack.push_async_callback(self._end)
        await super().start(stack)

    async def _end(self) -> None:
        await cancelled(*self._keeping.values(), *self._tasks)

    # ---- what the base class needs ----

    @property
    def missing(self) -> str:
        if self._synced.is_set():
            return ""  # a pool that appears later does not delay the readiness of other pools
        allowed = [watched for watched in self._watched.values() if not watched.refused]
        for watched in allowed or self._watched.values():  # a namespace without rights does not delay the others
            missing = watched.pools.missing or (watched.models.missing if watched.models is not None else "")
            if missing:
                return missing
        opening = [key for key, entry in self._entries.items() if entry.served is None]
        return f"the pool {opening[0]} is not served yet" if opening else ""

    @property
    def reflectors(self) -> Mapping[str, Reflector[Any]]:
        reflectors: dict[str, Reflector[Any]] = {}
        for namespace, watched in self._watched.items():
            all_of: dict[str, Reflector[Any]] = {"inferencepools": watched.pools.pools, "pods": watched.pools.pods}
            if watched.models is not None:
                all_of |= watched.models.reflectors
            if watched.slices is not None:
                all_of["endpointslices"] = watched.slices
            reflectors |= {_named(resource, namespace): reflector for resource, reflector in all_of.items()}
        return reflectors

    # ---- pools ----

    def _changed(self, key: str, pool: Pool | None) -> None:
        entry = self._entries.get(key)
        if pool is None:
            namespace, _, name = key.partition("/")
            if entry is not None:
                del self._entries[key]
                entry.gone.set()
            if (models := self._of(namespace).models) is not None:
                models.leave(namespace, name)
        elif entry is None:
            entry = self._entries[key] = _Entry(pool)
            serving = asyncio.create_task(self._serve(key, entry), name=f"pool {key}")
            self._tasks.add(serving)
            serving.add_done_callback(self._tasks.discard)
        else:
            entry.changed(pool)
        asyncio.get_running_loop().call_soon(self._publish)  # a pool made again keeps its Service
        self._judge()

    async def _serve(self, key: str, entry: _Entry) -> None:
        watched, namespace, name = self._of(entry.pool.namespace), entry.pool.namespace, entry.pool.name
        opening = self._opening.setdefault(key, asyncio.Lock())
        try:
            async with opening:
                if entry.gone.is_set():
                    return
                served = await self._open(key, entry.pool)
        except Exception as error:
            log.error("cannot serve a pool; correct its configuration, then update the pool", exc=error, pool=key)
            if self._entries.get(key) is entry:
                del self._entries[key]
            self._judge()
            return
        try:
            if not entry.gone.is_set():
                entry.opened(served)
                if watched.models is not None:  # first, because it is ready once its endpoints are known
                    watched.models.follow(namespace, name, lambda models: self._defined(served, models))
                watched.pools.follow(key, served.endpoint)
                self._judge()
                await entry.gone.wait()
            await served.close()
        except asyncio.CancelledError:
            await served.close(at_once=True)
            raise

    def _defined(self, served: OpenedPool, models: ModelSet) -> None:
        served.defined("kubernetes", models)
        self._judge()

    # ---- the Services of pools ----

    @property
    def pools(self) -> Iterable[Pool]:
        return (pool for watched in self._watched.values() for pool in watched.pools.pools.items.values())

    def _publish(self) -> None:
        """Point the Services of all existing pools at the leader."""
        place = self._place
        if place is None or self.elector is None:
            return
        wanted = self._services()
        for key in wanted - self.publishers.keys():
            namespace, service = key
            slices = self._of(namespace).slices
            publisher = self.publishers[key] = EndpointSlicePublisher(
                self.client,
                namespace,
                service,
                place,
                self.lease,
                on_trouble=lambda why, key=key: self._on_trouble(f"the service {'/'.join(key)}", why),  # type: ignore[misc]
                reflector=slices,
            )
            if slices is not None:
                publisher.see(slices.items.get(f"{namespace}/{slice_name(service, place)}"))
            publisher.lead(self.elector.leading)
            self._keeping[key] = asyncio.create_task(publisher.run(), name=f"service {namespace}/{service}")
        for key in self.publishers.keys() - wanted:
            self.publishers.pop(key).lead(False)
            self._keeping.pop(key).cancel()
        self._leftover.set()

    def _services(self) -> set[tuple[str, str]]:
        """The Services, by namespace and name, that existing pools refer to, also those that cannot be served."""
        refs = {(pool.namespace, pool.picker) for pool in self.pools}
        return {(namespace, ref.name) for namespace, ref in refs if ref is not None and ref.kind == "Service"}

    async def _empty_leftovers(self) -> None:
        """Empty the slices that no pool needs any more, also of pools that were deleted while nobody led. Never
        returns."""
        while True:
            self._leftover.clear()
            pause, trouble = LOOK_AGAIN_S, ""
            for key, seen in self._leftovers():
                namespace = key.partition("/")[0]
                if not self._may_write() or (namespace, seen.service) in self._services():
                    continue
                try:
                    await empty_slice(self.client, namespace, seen)
                except (KubeError, Unreachable) as error:
                    pause = RETRY_S
                    if not isinstance(error, KubeError) or error.code not in CONFLICTS:  # else the watch brings it
                        trouble = trouble or f"{namespace}/{seen.service} still points to a scheduler: {error}"
            self._on_trouble("slices of deleted pools", trouble)
            await set_within(self._leftover, pause)

    def _leftovers(self) -> list[tuple[str, Slice]]:
        """The slices of this lease whose services no pool refers to, by key. None of a namespace while it is uncertain
        which pools it has."""
        services = self._services()
        return [
            (key, seen)
            for watched in self._watched.values()
            if watched.slices is not None and watched.pools.pools.complete
            for key, seen in watched.slices.items.items()
            if seen.addresses and seen.lease == self.lease and (key.partition("/")[0], seen.service) not in services
        ]

    def _slices_changed(self, slices: Mapping[str, Slice | None]) -> None:
        self._leftover.set()
        for (namespace, service), publisher in self.publishers.items():
            if self._place is not None and (key := f"{namespace}/{slice_name(service, self._place)}") in slices:
                publisher.see(slices[key])


def _named(what: str, namespace: str) -> str:
    return f"{namespace}/{what}" if namespace else what
