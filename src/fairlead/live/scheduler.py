"""One running scheduler: started, told of changes, stopped.

Started in this order, stopped in the reverse one, whatever happens in between: knowledge (scraper, endpoints), the port
that answers, the admin page. On SIGTERM or SIGINT readiness goes off first, then running streams finish, then the rest
goes. The embedded gateway is not in here: it must outlive a scheduler that dies, see `embedded`.
"""

import asyncio
import contextlib
import signal
from typing import Any

from fairlead.config.engines import engine_table
from fairlead.config.registry import build_measure
from fairlead.config.schema import Config
from fairlead.io.admin import Admin, AdminSources
from fairlead.io.config_file import ConfigFile
from fairlead.io.discovery import follow_endpoints
from fairlead.io.loop_lag import LoopLag
from fairlead.io.models_file import follow_models
from fairlead.io.receive.health import HealthService
from fairlead.io.receive.server import Server
from fairlead.io.scrape import Scraper
from fairlead.io.scrape_target import ScrapeOptions
from fairlead.io.tls import ServerTls
from fairlead.live.core import Core
from fairlead.live.dashboard import dashboard
from fairlead.live.kube import Kube
from fairlead.live.memory import keep_heap, settle_memory
from fairlead.live.past import watch_gateway
from fairlead.live.reload import take_over, unusable
from fairlead.live.tracing import start_tracing
from fairlead.model.errors import ConfigError
from fairlead.model.events import EndpointDown, EndpointUp, ModelsChanged, StopAsked
from fairlead.model.inference import ModelRules, ModelSet
from fairlead.observe.log import get
from fairlead.wire.endpoint_entry import join
from fairlead.wire.engine_metrics import unknown_engine
from fairlead.wire.problem import Problem

log = get("serve")

#: Tells a scheduler that the gateway is about to end, and itself after that.
ENDING = signal.SIGUSR1
#: Seconds that requests in flight get to finish at shutdown.
DRAIN_SECONDS = 30.0
_POLL = 0.05


class Live:
    """A scheduler in this process: `await run()` returns after `stop()` or a signal. `gateway`: where the embedded
    gateway's admin page is, if somebody runs one for us; see `past`."""

    def __init__(self, config: Config, gateway: str = "") -> None:
        self.config = config
        self._gateway = gateway
        self._stopping = asyncio.Event()
        #: What keeps us from being ready, by part.
        self._unready = {"start": "starting"}
        self.kube: Kube | None = None
        self._definitions: dict[str, ModelSet] = {}

    def stop(self) -> None:
        self._stopping.set()

    async def run(self) -> None:
        """Raises `ConfigError` when something that the configuration names cannot be used, e.g. a taken port."""
        loop = asyncio.get_running_loop()
        keep_heap()
        self.core = core = Core(self.config, loop)
        self.fleet, self.watch, self.pipeline = core.fleet, core.watch, core.pipeline
        self.driver, self.host = core.driver, core.host
        self.health = HealthService()
        async with contextlib.AsyncExitStack() as stack:
            if core.journal is not None:
                stack.callback(core.journal.close)
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.stop)
                stack.callback(loop.remove_signal_handler, number)
            loop.add_signal_handler(ENDING, self._empty_queue)
            stack.callback(loop.remove_signal_handler, ENDING)
            await self._start(stack, loop)
            settle_memory()
            self._set_ready("start", "")
            if self.fleet.table.count:
                log.info("ready", **self._whereabouts())
            else:
                log.warning("up, but there are no endpoints yet", **self._whereabouts())
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
        config = self.config
        start_tracing(stack, config, self.core, loop)
        self.driver.start()
        stack.callback(self.driver.close)
        stack.push_async_callback(self.core.choosers.close)
        self.core.choosers.start()
        stack.push_async_callback(self.core.shadows.close)
        self.core.shadows.follow(config)
        self.scraper = Scraper(
            loop,
            self.driver.feed,
            engine_table(config.metrics),
            _scrape_options(config),
            default_engine=config.metrics.default_engine,
            report=self.watch.on_page,
            measure=build_measure(config, self.watch.on_plugin_error),
            silence=self.watch.on_silence,
        )
        stack.push_async_callback(self.scraper.close)
        self.watch.on_routed = self.scraper.wake
        self.watch.scrapes = self.scraper.stats
        stack.callback(LoopLag(loop, self._turned).close)
        if self.core.kv is not None:
            await self.core.kv.start(stack)
        self._listed = await follow_endpoints(stack, config.endpoints, self._endpoint, self._file_problem)
        await follow_models(stack, config.models, lambda found: self._defined("files", found), self._models_problem)
        if config.kubernetes.on:
            self.kube = Kube(
                config.kubernetes,
                self._endpoint,
                lambda found: self._defined("kubernetes", found),
                self._set_ready,
                self.watch.kube,
            )
            await self.kube.start(stack)
        tls = ServerTls.from_directory(config.ext_proc.tls.cert_dir) if config.ext_proc.tls else None
        server = Server(config.ext_proc.transport, self.host, self.health, tls, config.parsing.max_body_bytes)
        stack.push_async_callback(self._finish, server)
        log_port = config.als.port if config.als.enabled else 0
        await server.start(config.ext_proc.host, config.ext_proc.port, config.ext_proc.health_port, log_port)
        await self._start_admin(stack)
        if config.source:
            file = ConfigFile(config.source, self._changed, unusable, flags=config.flags)
            stack.push_async_callback(file.close)
            await file.start()

    def _changed(self, new: Config) -> None:
        listed = self._listed.apply if self._listed is not None else None
        self.config = take_over(self.core, self.config, new, listed)

    async def _finish(self, server: Server) -> None:
        """Give requests in flight their time. A gateway's access log tells their ends and has none itself: it ends with
        the last of them."""
        loop = asyncio.get_running_loop()
        until = loop.time() + DRAIN_SECONDS
        server.drain()
        while len(self.fleet.ledger) and loop.time() < until:
            await asyncio.sleep(_POLL)
        self.host.end_access_logs()
        self.health.end_watches()
        await server.close(max(until - loop.time(), 0.0))

    def _turned(self, late_s: float) -> None:
        """The event loop turned, so much later than it should."""
        self.watch.metrics.families.loop_lag.child().observe(late_s)
        self.host.beat()

    def _endpoint(self, event: EndpointUp | EndpointDown) -> None:
        """An endpoint came, changed or went: everybody who knows endpoints is told."""
        self.driver.feed(event)
        if self.core.kv is not None:
            self.core.kv.endpoint(event)
        if isinstance(event, EndpointUp):
            self.watch.on_endpoint(event.endpoint)
            self.scraper.up(event.endpoint)
            engine = unknown_engine(event.endpoint.labels, self.scraper.specs)
            if engine:
                read_as = self.config.metrics.default_engine
                log.warning("nobody described this engine", endpoint=event.endpoint.id, engine=engine, read_as=read_as)
            log.info("endpoint up", endpoint=event.endpoint.id, address=event.endpoint.address)
        else:
            self.scraper.down(event.endpoint_id)
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
            refresh=watch_gateway(self._gateway, self.watch.metrics.registry),
            openmetrics=lambda: self.watch.exposition(openmetrics=True),
            unready=self._reasons,
            endpoints=self.watch.endpoints,
            decisions=self.watch.decisions,
            decision=self.watch.decision,
            knowledge=self.core.kv.page if self.core.kv is not None else lambda: None,
            dashboard=dashboard(self.config, self.core, asyncio.get_running_loop().time, self._reasons),
        )
        settings = self.config.admin
        self.admin = Admin(
            sources,
            host=settings.host,
            port=settings.port,
            debug=settings.debug,
            on_error=self.watch.on_admin_error,
        )
        try:
            await self.admin.start()
        except OSError as error:
            where = f"{settings.host}:{settings.port}"
            raise ConfigError(f"cannot listen on {where}: {error.strerror or error}", "$.admin.port") from None
        stack.push_async_callback(self.admin.close)

    def _reasons(self) -> list[str]:
        reasons = list(self._unready.values())
        if not self.fleet.table.count:
            reasons.append("no endpoints")
        if self.config.gateway.mode == "embedded" and not self.health.asked:
            reasons.append("the embedded gateway has not asked yet")
        return reasons

    def _set_ready(self, part: str, reason: str) -> None:
        """Note why a part is not ready; an empty reason clears it."""
        self._unready.pop(part, None)
        if reason:
            self._unready[part] = reason
        self.health.set_ready(not self._unready, warm=self._unready.keys() <= {"leader"})

    def _whereabouts(self) -> dict[str, object]:
        config = self.config
        found: dict[str, object] = {
            "policy": config.policy.name,
            "endpoints": self.fleet.table.count,
            "ext_proc": join(config.ext_proc.host, config.ext_proc.port),
            "admin": f"http://{join(config.admin.host, self.admin.port)}/",
        }
        if config.gateway.mode == "embedded":
            found["gateway"] = f"http://{join(config.gateway.host, config.gateway.port)}/"
        return found


def _scrape_options(config: Config) -> ScrapeOptions:
    metrics = config.metrics
    return ScrapeOptions(
        fast_s=metrics.interval,
        idle_s=metrics.idle_interval,
        timeout_s=metrics.timeout,
        backoff_cap_s=metrics.backoff_cap,
        max_rate=metrics.max_rate,
        max_page=metrics.max_page_bytes,
        token_file=metrics.token_file,
        ca_file=metrics.tls.ca_file,
        verify=metrics.tls.verify,
    )
