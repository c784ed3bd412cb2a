"""One running scheduler: started, told of changes, stopped.

Started in this order, stopped in the reverse one, whatever happens in between: knowledge (scraper, endpoints), the port
that answers, the admin page. On SIGTERM or SIGINT readiness goes off first, then running streams finish, then the rest
goes. The embedded gateway is not in here: it must outlive a scheduler that dies, see `embedded`.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from fairlead.apis.engine_metrics import unknown_engine
from fairlead.config.endpoint_list import Listing, join
from fairlead.config.problems import Problem
from fairlead.config.reload import plan_reload
from fairlead.config.schema import Config
from fairlead.core.errors import ConfigError
from fairlead.core.events import EndpointDown, EndpointUp, ModelsChanged, Reconfigured, StopAsked
from fairlead.core.instructions import AdoptConfiguration, RefuseConfiguration
from fairlead.core.models import ModelRules, ModelSet
from fairlead.core.scheduling import Scheduling
from fairlead.gateway.envoy.admin import EnvoyAdmin
from fairlead.gateway.envoy.clusters import PoolWriter
from fairlead.gateway.h2_limits import ByteBudget
from fairlead.gateway.health import HealthService
from fairlead.gateway.memory import FEW_FILES, memory_limit, raise_file_limit
from fairlead.gateway.server import Server
from fairlead.gateway.tls import ServerTls
from fairlead.pool.endpoints_file import follow_endpoints
from fairlead.pool.models_file import follow_models, listed_models
from fairlead.server.admin import Admin, AdminSources, admin_access
from fairlead.server.config_file import ConfigFile
from fairlead.server.dashboard import DashboardSources
from fairlead.server.external_scaler import ExternalScaler
from fairlead.server.journal.writer import segments
from fairlead.server.live.choosers import check_schedulers
from fairlead.server.live.keys import followed_keys
from fairlead.server.live.kube import Kube
from fairlead.server.live.memory import HeapTrim, LoopLag, keep_heap, settle_memory
from fairlead.server.live.wiring import start_tracing, wire
from fairlead.server.observe.component_metrics import GatewayMetrics, show_budget
from fairlead.server.observe.exposition import Registry
from fairlead.server.observe.log import get
from fairlead.server.observe.log import setup as setup_log
from fairlead.server.observe.snapshot import TICK, SnapshotMaker
from fairlead.server.observe.watch import POOL
from fairlead.server.supervise import DRAIN_SECONDS, ENDING

log = get("serve")

_POLL = 0.05
#: Problems of a changed configuration that are logged; `fairlead validate` prints all.
_SHOWN = 5
#: Bytes of unfinished requests where the configuration does not say.
_MOST_BUFFERED = 128 << 20


class Live:
    """A scheduler in this process: `await run()` returns after `stop()` or a signal. `gateway`: where the embedded
    gateway's admin pages are, if one runs beside us (see `watch_gateway`); `pool`: the file with the endpoints that it
    balances over by itself."""

    def __init__(self, config: Config, gateway: Sequence[str] = (), pool: str = "") -> None:
        self.config = config
        self._gateway = gateway
        self._pool = PoolWriter(Path(pool)) if pool else None
        #: What the gateway counted, beside that file, which lives as long as the gateway does.
        self._kept = Path(pool).with_name("counts.json") if pool else None
        self._keys = followed_keys(config.gateway, Path(pool).parent) if pool else []
        self._stopping = asyncio.Event()
        #: What keeps us from being ready, by part.
        self._unready = {"start": "starting"}
        #: The embedded gateway's own word that it asks us, as far as its admin page is known.
        self._is_asked = False
        #: What is wrong with the file that was changed last.
        self._file_unusable = ""
        self.kube: Kube | None = None
        self.health = HealthService()
        self._definitions: dict[str, ModelSet] = {}

    def stop(self) -> None:
        self._stopping.set()

    async def run(self) -> None:
        """Raises `ConfigError` when something that the configuration names cannot be used, e.g. a taken port."""
        loop = asyncio.get_running_loop()
        keep_heap()
        files = raise_file_limit()
        if files < FEW_FILES:
            log.warning("few open files are allowed; the gateway takes two for each request at a time", limit=files)
        async with contextlib.AsyncExitStack() as stack:
            tracing = start_tracing(stack, self.config, loop)
            # Beside an embedded gateway the first worker has the file of the pool.
            counts = self._pool is not None or not self._gateway
            self.core = core = wire(self.config, loop, tracing, self._adopt, self._refuse, counts)
            self.fleet, self.watch, self.pipeline = core.fleet, core.watch, core.pipeline
            self.driver, self.host, self.scraper = core.driver, core.host, core.scraper
            self._maker = self._snapshots(loop.time)
            if core.journal is not None:
                core.journal.begin()
                stack.callback(core.journal.close)
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.stop)
                stack.callback(loop.remove_signal_handler, number)
            loop.add_signal_handler(ENDING, self._empty_queue)
            stack.callback(loop.remove_signal_handler, ENDING)
            await self._start(stack, loop)
            settle_memory()
            self._set_ready("start", "")
            _log_notes(self.config)
            if self._gateway:
                waiting = asyncio.create_task(
                    self._wait_for_gateway([EnvoyAdmin.from_address(where) for where in self._gateway])
                )
                stack.callback(waiting.cancel)
            else:
                self._announce()
            await self._stopping.wait()
            log.info("stopping", grace_s=DRAIN_SECONDS)
            if self.kube is not None:
                await self.kube.hand_over()
            self._set_ready("stop", "shutting down")
            self._empty_queue()

    def _empty_queue(self) -> None:
        """We end, or all of us do: nobody waits any longer."""
        self.driver.feed(StopAsked())

    async def _start(self, stack: contextlib.AsyncExitStack, loop: asyncio.AbstractEventLoop) -> None:
        config, core = self.config, self.core
        self.driver.start()
        stack.callback(self.driver.close)
        if core.state is not None:
            stack.push_async_callback(core.state.close)
            await core.state.start()
        stack.push_async_callback(core.connections.close)
        stack.push_async_callback(core.shadows.close)
        self._follow(config, core.builder.scheduling)
        stack.push_async_callback(self.scraper.close)
        stack.push_async_callback(core.served.close)
        stack.callback(LoopLag(loop, self._turned).close)
        stack.callback(HeapTrim(loop).close)
        if core.kv is not None:
            await core.kv.start(stack)
        self._listed = await follow_endpoints(stack, config.endpoints, self._endpoint, self._file_problem)
        if config.models.list:
            self._defined("configuration", listed_models(config.models))
        await follow_models(
            stack, config.models, lambda model_set: self._defined("files", model_set), self._models_problem
        )
        for keys in self._keys:
            stack.push_async_callback(keys.close)
            await keys.start()
        if config.kubernetes.on:
            self.kube = Kube(
                config.kubernetes,
                self._endpoint,
                lambda model_set: self._defined("kubernetes", model_set),
                self._set_ready,
                self.watch.kube,
            )
            await self.kube.start(stack)
        if core.state is not None:
            await core.state.settled()
        if core.replicas is not None:
            stack.push_async_callback(core.replicas.close)
            await core.replicas.start()
        tls = ServerTls.from_directory(config.ext_proc.tls.cert_dir) if config.ext_proc.tls else None
        budget = self._budget = ByteBudget(_buffered(config), loop.time)
        show_budget(self.watch.metrics.registry, budget)
        self._watch_troubles(budget)
        max_body = config.parsing.max_body_bytes
        server = Server(config.ext_proc.transport, self.host, self.health, tls, max_body, budget)
        stack.push_async_callback(self._finish, server)
        log_port = config.als.port if config.als.enabled else 0
        await server.start(config.ext_proc.host, config.ext_proc.port, config.ext_proc.health_port, log_port)
        await self._start_admin(stack)
        if config.autoscaling.port:
            scaler = ExternalScaler(self.watch.desired_endpoints, lambda: self.fleet.table.count)
            stack.push_async_callback(scaler.close)
            await scaler.start(config.autoscaling.host, config.autoscaling.port)
        if config.source:
            file = ConfigFile(config.source, self._changed, self._unusable, flags=config.flags)
            stack.push_async_callback(file.close)
            await file.start()

    def _watch_troubles(self, budget: ByteBudget) -> None:
        troubles = self.watch.troubles
        troubles.watch("configuration", lambda: self._file_unusable)
        troubles.watch(
            "memory",
            lambda: (
                f"{budget.waiting} uploads wait for room among {budget.used >> 20} MiB of unfinished requests"
                if budget.waiting
                else ""
            ),
        )
        refused = "requests are refused or cut off: unfinished ones fill the memory for them (parsing.maxBufferedBytes)"
        troubles.lately("uploads", lambda: budget.refused + budget.cut, refused)
        if self._keys:
            troubles.watch("keys", lambda: "; ".join(keys.unusable for keys in self._keys if keys.unusable))
        state = self.core.state
        if state is not None:
            troubles.watch("state", lambda: state.problem)
        if self.core.replicas is not None:
            troubles.watch("replicas", self.core.replicas.trouble)
        if self.core.journal is not None:
            counts = self.core.journal.recorder.counts
            failing = "the journal cannot be written: its disk fails or is full; records are lost"
            troubles.lately("journal", lambda: counts.errors + counts.unwritten, failing)
            troubles.lately("journal-speed", lambda: counts.dropped, "the journal does not keep up; records are lost")

    # ---- a changed configuration ----

    def _changed(self, new: Config) -> None:
        """The file changed: what only a restart can change stays, the rest is put to the pipeline."""
        self._file_unusable = ""
        changes, refused = plan_reload(self.config, new)
        for problem in refused:
            log.warning("a change of the configuration is refused", file=new.source, problem=str(problem))
        if not changes.paths:
            return
        config = changes.config
        try:
            check_schedulers(config)
        except ConfigError as error:
            self._unusable([str(error)])
            return
        self.driver.feed(Reconfigured(config))
        if self.config is not config:
            return
        if any(path.startswith("$.log") for path in changes.paths):
            setup_log(config.log.level, config.log.format)
        if any(path.startswith("$.models") for path in changes.paths):
            self._defined("configuration", listed_models(config.models))
        if changes.endpoints and self._listed is not None:
            self._listed.apply(Listing(config.endpoints.static))
        log.info("the configuration changed", file=config.source, applied=" ".join(changes.paths))
        _log_notes(config)

    def _adopt(self, instruction: AdoptConfiguration) -> None:
        self.config = config = instruction.document
        self._follow(config, instruction.scheduling)
        self.watch.watch_queue(self.pipeline.flow_controller)
        self.host.keep_bodies_up_to(config.parsing.max_body_bytes)
        self._budget.resize(_buffered(config))
        self.core.inspection.follow(config.inspect.usage_sampling)

    def _refuse(self, instruction: RefuseConfiguration) -> None:
        self._unusable([instruction.problem])

    def _unusable(self, problems: list[str]) -> None:
        self._file_unusable = "the changed configuration cannot be used; the old one stays"
        for problem in problems[:_SHOWN]:
            log.error(self._file_unusable, problem=problem)

    def _follow(self, config: Config, scheduling: Scheduling) -> None:
        """Connect to whom the configuration names, show shadows what they are to judge."""
        self.core.connections.follow(config)
        self.core.shadows.follow(config, scheduling.on_trial)
        self.watch.choosers.follow(scheduling.remotes, scheduling.policy)

    # ---- the end of requests ----

    async def _finish(self, server: Server) -> None:
        """Give requests in flight their time. A gateway's access log tells their ends and has none itself: it ends with
        the last of them."""
        loop = asyncio.get_running_loop()
        until = loop.time() + DRAIN_SECONDS
        server.drain()
        while len(self.fleet.ledger) and loop.time() < until:
            await asyncio.sleep(_POLL)
        self.host.logs.end()
        self.health.end_watches()
        await server.close(max(until - loop.time(), 0.0))

    # ---- what becomes known ----

    def _turned(self, late_s: float) -> None:
        """The event loop turned, so much later than it should."""
        self.watch.metrics.families.loop_lag.child().observe(late_s)
        self.host.pulse.beat()
        self.watch.troubles.look()
        self._maker.history.look(asyncio.get_running_loop().time())

    def _endpoint(self, event: EndpointUp | EndpointDown) -> None:
        """An endpoint came, changed or went: everybody who knows endpoints is told."""
        self.driver.feed(event)
        if self._pool is not None:
            self._pool.changed(event)
        if self.core.kv is not None:
            self.core.kv.endpoint(event)
        if isinstance(event, EndpointUp):
            if self.core.state is not None:
                self.core.state.joined(event.endpoint)
            self.scraper.up(event.endpoint)
            self.core.served.up(event.endpoint)
            engine = unknown_engine(event.endpoint.labels, self.scraper.specs)
            if engine:
                read_as = self.config.metrics.default_engine
                log.warning("nobody described this engine", endpoint=event.endpoint.id, engine=engine, read_as=read_as)
            log.info("endpoint up", endpoint=event.endpoint.id, address=event.endpoint.address)
        else:
            self.scraper.down(event.endpoint_id)
            self.core.served.down(event.endpoint_id)
            self.watch.on_endpoint_gone(event.endpoint_id)
            log.info("endpoint down", endpoint=event.endpoint_id)

    def _defined(self, where: str, models: ModelSet) -> None:
        self._definitions[where] = models
        self._models(sum(self._definitions.values(), ModelSet()))

    def _models(self, models: ModelSet) -> None:
        """What is defined of model names has changed."""
        settings = self.config.models
        sticky = settings.sticky == "session"
        rules = ModelRules(reject_unmatched=settings.unmatched == "reject", sticky_sessions=sticky)
        self.driver.feed(ModelsChanged(models, rules))
        catalogue = self.pipeline.models
        self.watch.on_models(catalogue.known, catalogue.conflicts)
        counts = {"models": len(models.models), "objectives": len(models.objectives), "rewrites": len(models.rewrites)}
        log.info("model names defined", **counts)

    def _models_problem(self, file: str, problem: Problem) -> None:
        log.warning("a definition of model names has a problem", file=file, problem=str(problem))

    def _file_problem(self, problem: Any) -> None:
        source = self.config.endpoints.file or self.config.source
        log.warning("the list of endpoints has a problem", file=source, problem=str(problem))

    async def _start_admin(self, stack: contextlib.AsyncExitStack) -> None:
        sources = AdminSources(
            metrics=self.watch.exposition,
            refresh=watch_gateway(self._gateway if self._pool else "", self._kept, self.watch.metrics.registry),
            openmetrics=lambda: self.watch.exposition(openmetrics=True),
            unready=self._reasons,
            notes=self._notes,
            endpoints=self.watch.endpoints,
            decisions=self.watch.each_decision,
            decision=lambda name: self.watch.decision(name, self.core.builder.fresh),
            knowledge=self.core.kv.page if self.core.kv is not None else lambda: None,
            journal=lambda: segments(self.config.journal.path),
            replicas=self.core.replicas.page if self.core.replicas is not None else lambda: None,
            dashboard=self._dashboard(),
        )
        settings = self.config.admin
        self.admin = Admin(
            sources,
            host=settings.host,
            port=settings.port,
            debug=settings.debug,
            access=admin_access(settings.hosts, settings.token_file),
            tls=ServerTls.from_directory(settings.tls.cert_dir, protocol="http/1.1") if settings.tls else None,
            metrics=(settings.metrics_host or settings.host, settings.metrics_port) if settings.metrics_port else None,
            on_error=self.watch.on_admin_error,
        )
        try:
            await self.admin.start()
        except OSError as error:
            where = f"{settings.host}:{settings.port}" if not self.admin.port else f"{settings.metrics_port}"
            raise ConfigError(f"cannot listen on {where}: {error.strerror or error}", "$.admin") from None
        stack.push_async_callback(self.admin.close)

    def _snapshots(self, now: Callable[[], float]) -> SnapshotMaker:
        return SnapshotMaker(
            self.watch,
            now,
            time.time() - now(),
            pool=self.config.kubernetes.pool or POOL,
            policy=lambda: self.pipeline.policy.name,
            reasons=self._reasons,
            replicas=self._replicas,
        )

    def _replicas(self) -> str:
        replicas = self.core.replicas
        return "" if replicas is None else replicas.trouble() or replicas.note()

    def _dashboard(self) -> DashboardSources:
        maker = self._maker
        return DashboardSources(
            begin=maker.begin,
            end=maker.end,
            beginning=maker.beginning,
            take=maker.take,
            answers={"decisions": maker.search, "endpoint": maker.endpoint},
            tick=TICK,
        )

    def _notes(self) -> list[str]:
        """For `/readyz`: what cannot be done, and what was known from the start."""
        state, replicas = self.core.state, self.core.replicas
        notes = [state.note] if state is not None and state.note else []
        if replicas is not None and not replicas.problem:
            notes.append(f"replicas: {replicas.note()}")
        return [*self.watch.troubles.look().values(), *notes]

    def _reasons(self) -> list[str]:
        reasons = list(self._unready.values())
        if not self.fleet.table.count:
            reasons.append("no endpoints")
        if self.config.gateway.mode == "embedded" and not (self._is_asked if self._gateway else self.health.asked):
            reasons.append("the embedded gateway has not asked yet")
        return reasons

    async def _wait_for_gateway(self, admins: list[EnvoyAdmin]) -> None:
        """A busy machine may answer Envoy's health check too late, and then Envoy asks nothing until the next one. Only
        then does it listen: who is told that we are ready sends requests at once."""
        beside = bool(self.config.replicas.via) and self._pool is None  # they may ask another worker and not us
        for admin in admins:
            while not ((self.health.asked or not beside) and await admin.asks_scheduler() and await admin.listens()):
                await asyncio.sleep(_POLL)
        self._is_asked = True
        self._announce()

    def _announce(self) -> None:
        if self.fleet.table.count:
            log.info("ready", **self._whereabouts())
        else:
            log.warning("up, but there are no endpoints yet", **self._whereabouts())

    def _set_ready(self, part: str, reason: str) -> None:
        """Note why a part is not ready; an empty reason clears it."""
        self._unready.pop(part, None)
        if reason:
            self._unready[part] = reason
        self.health.set_ready(not self._unready, warm=self._unready.keys() <= {"leader"})

    def _whereabouts(self) -> dict[str, object]:
        config = self.config
        places: dict[str, object] = {
            "policy": config.policy.name,
            "endpoints": self.fleet.table.count,
            "ext_proc": join(config.ext_proc.host, config.ext_proc.port),
            "admin": f"http://{join(config.admin.host, self.admin.port)}/",
        }
        if config.gateway.mode == "embedded":
            places["gateway"] = f"http://{join(config.gateway.host, config.gateway.port)}/"
        return places


def _log_notes(config: Config) -> None:
    """What `fairlead validate` says of a file that can be used."""
    for note in config.notes:
        log.warning("a note on the configuration", file=config.source, note=str(note))


def _buffered(config: Config) -> int:
    """Bytes that unfinished requests may hold."""
    return config.parsing.max_buffered_bytes or min(memory_limit() // 8, _MOST_BUFFERED)


def watch_gateway(where: Sequence[str], keep: Path | None, registry: Registry) -> Callable[[], Awaitable[None]] | None:
    """Show how many requests the embedded gateway balanced by itself, by its own count, and its memory. Returns what to
    await before the metrics page is made; `None` = nothing to ask.

    The access log tells of most of these requests, one by one and with the endpoint, but of none that ended while no
    scheduler was there to be told. Envoy counts them all, and a scheduler that dies takes nothing of that along; what
    an Envoy that died had counted is in the file `keep`.

    `where`: the admin page of each of its Envoys, a socket's path or a port of 127.0.0.1; empty = it is not ours.
    """
    if not where:
        return None
    admins = [EnvoyAdmin.from_address(each) for each in where]
    shown = GatewayMetrics(registry, keep, len(admins))

    async def ask() -> None:
        shown.take(await asyncio.gather(*(admin.vitals() for admin in admins)))

    return ask
