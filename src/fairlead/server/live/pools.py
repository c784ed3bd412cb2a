"""Several pools in one process: a scheduler for each pool, opened and closed while the other pools keep running."""

import asyncio
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from fairlead.config.reload import Changes, plan_reload
from fairlead.config.schema import Config
from fairlead.core.events import EndpointDown, EndpointUp
from fairlead.core.models import ModelSet
from fairlead.gateway.pools import PickerService, PoolHosts
from fairlead.pool.kube.objects import Pool
from fairlead.pool.scrape import Pace
from fairlead.server.admin import AdminSources
from fairlead.server.live.pool_scheduler import REFUSE_S, PoolScheduler, log_unusable
from fairlead.server.observe.component_metrics import KubeMetrics
from fairlead.server.observe.exposition import Registry, page_of
from fairlead.server.observe.log import get
from fairlead.server.observe.tracing import Tracing
from fairlead.server.observe.troubles import Troubles, named, watch_process
from fairlead.server.state import StateFile
from fairlead.server.supervise import DRAIN_SECONDS

log = get("pools")

_POLL = 0.05


def of_pool(config: Config, key: str) -> Config:
    """The configuration of the pool `key` (`namespace/name`): its own settings if it has any, else those of `config`.
    Its journal, state file and snapshot get paths of their own, next to those of the other pools."""
    own: Config = config.pools.get(key, config)
    namespace, _, name = key.partition("/")
    directory = f"{namespace}.{name}"
    journal, state = config.journal, config.state
    if journal.path:
        journal = journal.model_copy(update={"path": str(Path(journal.path, directory))})
    if state.file:
        file = Path(state.file)
        state = state.model_copy(update={"file": str(file.with_name(f"{directory}.{file.name}"))})
    events = own.kv_events
    if events.snapshot and events.snapshot == config.kv_events.snapshot:
        file = Path(events.snapshot)
        events = events.model_copy(update={"snapshot": str(file.with_name(f"{directory}.{file.name}"))})
    kubernetes = config.kubernetes.model_copy(update={"pool": name, "namespace": namespace, "namespaces": ()})
    parts = {"kubernetes": kubernetes, "journal": journal, "state": state, "kv_events": events, "pools": {}}
    return own.model_copy(update=parts)


class LivePools:
    """The schedulers of all pools, and what they share. `Live` uses it like a `PoolScheduler`."""

    def __init__(self, config: Config, tracing: Tracing | None, unready: Callable[[], Sequence[str]]) -> None:
        now = asyncio.get_running_loop().time
        #: What the process began with, and what is in force.
        self.begun = self.config = config
        self.host = PoolHosts()
        self.pools: dict[str, OpenedPool] = {}
        self._tracing, self._unready = tracing, unready
        self._pace = Pace()
        self._unusable = ""
        self._refused: dict[str, list[str]] = {}
        #: Pools that are gone but still have running requests.
        self._ending: dict[str, OpenedPool] = {}
        self.registry = Registry()
        self.troubles = Troubles(self.registry, now)
        self.kube = KubeMetrics(self.registry)
        watch_process(self.troubles)
        self.troubles.watch("kubernetes", self.kube.trouble)
        self.troubles.watch("configuration", lambda: self._unusable)
        unknown = "gateways ask for pools that are not served here, or are not told apart; the log names the last one"
        self.troubles.lately("pools", lambda: self.host.refused, unknown)
        self.troubles.watch("pool-services", self._shadowed)
        self.registry.follow("gauge", "fairlead_pools", "InferencePools that are served.", lambda: len(self.pools))

    # ---- pools ----

    def _shadowed(self) -> str:
        pools = [f"{pool} (as {older})" for pool, older in self.host.shadowed.items()]
        reason = "gateways do not reach pools with the Service and port of an older pool; give each pool its own: "
        return reason + named(pools) if pools else ""

    async def open(self, key: str, pool: Pool) -> "OpenedPool":
        """Start the scheduler of a pool. Raises `ConfigError` or `PluginError`."""
        before = self._ending.get(key)
        if before is not None:  # the pool was deleted and is back: its old scheduler must release its files
            await before.close(at_once=True)
        opened = OpenedPool(self, key, pool)
        try:
            await opened.start()
        except BaseException:
            await opened.close(at_once=True)
            raise
        return opened

    async def close(self) -> None:
        for pool in (*self.pools.values(), *self._ending.values()):
            await pool.close(at_once=True)

    @property
    def states(self) -> dict[str, StateFile]:
        """The state files by pool."""
        return {key: state for key, pool in self.pools.items() for state in pool.scheduler.states.values()}

    @property
    def leases(self) -> int:
        return sum(pool.scheduler.leases for pool in (*self.pools.values(), *self._ending.values()))

    @property
    def waiting(self) -> int:
        return sum(pool.scheduler.waiting for pool in (*self.pools.values(), *self._ending.values()))

    @property
    def endpoints(self) -> int:
        return sum(pool.scheduler.endpoints for pool in self.pools.values())

    def empty_queue(self) -> None:
        for pool in self.pools.values():
            pool.scheduler.empty_queue()

    def turned(self, late_s: float) -> None:
        self.troubles.look()
        for pool in self.pools.values():
            pool.scheduler.turned(late_s)

    # ---- a changed configuration ----

    def reconfigure(self, changes: Changes) -> bool:
        """Apply the changes to each pool. False = nothing changed."""
        self._unusable = ""
        self.config = changes.config
        self._refused = {}
        changed = False
        for key, pool in self.pools.items():
            changed = pool.scheduler.reconfigure(self.plan(key, pool.scheduler.config, pool.begun)) or changed
        return changed or bool(changes.paths)

    def plan(self, key: str, old: Config, begun: Config) -> Changes:
        """What changes for a pool, from `old` to what is in force. What needs a restart is logged."""
        changes, refused = plan_reload(old, of_pool(self.config, key), begun)
        self._refused[key] = [problem.path for problem in refused]
        for problem in refused:
            log.warning("rejected a configuration change", pool=key, problem=str(problem))
        return changes

    @property
    def refused(self) -> list[str]:
        """Changes of pools that need a restart."""
        return [f"{key} {path}" for key, paths in self._refused.items() if key in self.pools for path in paths]

    def refuse(self, problems: Sequence[str]) -> None:
        self._unusable = log_unusable(problems)

    # ---- pages ----

    def exposition(self, openmetrics: bool = False) -> Iterator[bytes]:
        for pool in self.pools.values():
            pool.scheduler.watch.count()
        registries = [pool.scheduler.registry for pool in self.pools.values()]
        return page_of([self.registry, *registries], openmetrics)

    def sources(self) -> AdminSources:
        """The sources of the pages about the whole process. For those of each pool see `pages`."""
        return AdminSources(
            metrics=self.exposition,
            openmetrics=lambda: self.exposition(openmetrics=True),
            unready=self._unready,
            notes=self._notes,
            endpoints=list,
            decisions=lambda count: (),
        )

    def pages(self) -> Mapping[str, AdminSources]:
        return {key: pool.sources for key, pool in self.pools.items()}

    def _notes(self) -> list[str]:
        served = {key: pool.scheduler for key, pool in self.pools.items()}
        notes = [f"{key}: {note}" for key, pool in served.items() for note in pool.notes()]
        return [*self.troubles.look().values(), *notes]


class OpenedPool:
    """A pool that is served, with its scheduler."""

    def __init__(self, pools: LivePools, key: str, pool: Pool) -> None:
        self._pools, self._key, self._pool = pools, key, pool
        self._stack = AsyncExitStack()
        self._closed = asyncio.Event()
        self._closing = False
        # Own settings that the file got since count from now on.
        came = key in pools.config.pools and key not in pools.begun.pools
        self.begun = of_pool(pools.config if came else pools.begun, key)
        config = pools.plan(key, self.begun, self.begun).config
        self.scheduler = PoolScheduler(
            config, pools._tracing, one_of=pools._pace, unready=pools._unready, begun=self.begun
        )
        self.scheduler.watch.watch_lead(lambda: pools.kube.standby)
        self.sources = self.scheduler.sources()

    async def start(self) -> None:
        await self.scheduler.start(self._stack)
        await self.scheduler.settle(self._stack)
        self._pools.pools[self._key] = self
        self.changed(self._pool)
        log.info("serving a pool", pool=self._key, policy=self.scheduler.config.policy.name)

    def endpoint(self, event: EndpointUp | EndpointDown) -> None:
        self.scheduler.endpoint(event)

    def defined(self, where: str, models: ModelSet) -> None:
        self.scheduler.defined(where, models)

    def changed(self, pool: Pool) -> None:
        """The InferencePool has changed to `pool`."""
        ref = pool.picker
        service = None if ref is None else PickerService(pool.namespace, ref.name, ref.port)
        if service is None:
            log.warning("a pool has no endpointPickerRef, so no gateway will ask for it", pool=self._key)
        self._pools.host.put(self._key, self.scheduler.host, service, pool.created)

    async def close(self, *, at_once: bool = False) -> None:
        """Accept no new requests, refuse those that wait, let running requests finish (unless `at_once`), and free all
        resources."""
        if self._closed.is_set():
            return
        pools, scheduler, loop = self._pools, self.scheduler, asyncio.get_running_loop()
        if pools.pools.get(self._key) is self:
            del pools.pools[self._key]
            pools.host.drop(self._key)
            pools._ending[self._key] = self
            scheduler.empty_queue()
            if not at_once:
                log.info(
                    "a pool was deleted; its running requests may finish", pool=self._key, running=scheduler.leases
                )
        until = loop.time() + (REFUSE_S if at_once else DRAIN_SECONDS)
        while scheduler.waiting or (scheduler.leases and not at_once):
            if loop.time() >= until or self._closed.is_set():
                break
            await asyncio.sleep(_POLL)
        if self._closing:
            await self._closed.wait()
            return
        self._closing = True
        try:
            await self._stack.aclose()
        finally:
            self._closed.set()
            if pools._ending.get(self._key) is self:
                del pools._ending[self._key]
        gc.collect()
