"""The composition root: configuration → objects → one running scheduler → graceful stop.

Started in this order, stopped in the reverse one, whatever happens in between: knowledge (scraper, endpoints), the port
that answers, the admin page. On SIGTERM or SIGINT readiness goes off first, then running streams finish, then the rest
goes. The embedded gateway is not in here: it must outlive a scheduler that dies, see `embedded`.
"""

import asyncio
import contextlib
import ctypes
import gc
import secrets
import signal
from collections.abc import Callable
from random import Random
from typing import Any

from fairlead.config.engines import engine_table
from fairlead.config.flow import able_by, build_desk
from fairlead.config.registry import build_hasher, build_measure, build_parse, build_policy
from fairlead.config.reload import plan_reload
from fairlead.config.schema import Config
from fairlead.fleet.fleet import Fleet
from fairlead.io.admin import Admin, AdminSources
from fairlead.io.config_file import ConfigFile
from fairlead.io.discovery import follow_endpoints
from fairlead.io.loop_lag import LoopLag
from fairlead.io.models_file import follow_models
from fairlead.io.receive.answers import Answers
from fairlead.io.receive.driver import Driver
from fairlead.io.receive.health import HealthService
from fairlead.io.receive.server import Server
from fairlead.io.receive.session import Host
from fairlead.io.receive.understand import Understanding
from fairlead.io.scrape import Scraper
from fairlead.io.scrape_target import ScrapeOptions
from fairlead.io.tls import ServerTls
from fairlead.model.errors import ConfigError, PluginError
from fairlead.model.events import EndpointDown, EndpointUp, ModelsChanged, StopAsked
from fairlead.model.inference import ModelRules, ModelSet
from fairlead.observe.log import get
from fairlead.observe.log import setup as setup_log
from fairlead.observe.watch import Watch
from fairlead.parse.tokens import TokenEstimator
from fairlead.pipeline import Pipeline
from fairlead.wire.endpoint_list import Listing
from fairlead.wire.problem import Problem

log = get("serve")

#: Tells a scheduler that the gateway is about to end, and itself after that.
ENDING = signal.SIGUSR1
#: Seconds that requests in flight get to finish at shutdown.
DRAIN_SECONDS = 30.0
_POLL = 0.05
#: Streamed answers that are followed to their end at first, to learn token counts before sampling sets in.
FIRST_INSPECTED = 20
STREAM_GAP = 60.0
#: Problems of a changed configuration that are logged; `fairlead validate` prints all.
_SHOWN = 5


class Live:
    """A scheduler in this process: `await run()` returns after `stop()` or a signal."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._stopping = asyncio.Event()
        #: What keeps us from being ready, by part.
        self._unready = {"start": "starting"}

    def stop(self) -> None:
        self._stopping.set()

    async def run(self) -> None:
        """Raises `ConfigError` when something that the configuration names cannot be used, e.g. a taken port."""
        loop = asyncio.get_running_loop()
        _keep_heap()
        self._build(loop)
        async with contextlib.AsyncExitStack() as stack:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.stop)
                stack.callback(loop.remove_signal_handler, number)
            loop.add_signal_handler(ENDING, self._empty_queue)
            stack.callback(loop.remove_signal_handler, ENDING)
            await self._start(stack, loop)
            _settle_memory()
            self._set_ready("start", "")
            log.info("ready", **self._whereabouts())
            await self._stopping.wait()
            log.info("stopping", grace_s=DRAIN_SECONDS)
            self._set_ready("stop", "shutting down")
            self._empty_queue()

    def _empty_queue(self) -> None:
        """We end, or all of us do: nobody waits any longer."""
        self.driver.feed(StopAsked())

    def _build(self, loop: asyncio.AbstractEventLoop) -> None:
        """The pure core and what listens to it."""
        config = self.config
        rng = Random(config.seed)
        self.fleet = Fleet(lease_ttl=config.ledger.lease_ttl, staleness=config.metrics.staleness)
        self.watch = Watch(self.fleet, loop.time)
        tokens = TokenEstimator()
        policy = build_policy(config, self.watch.on_plugin_error)
        desk = build_desk(config, policy, self.watch.on_plugin_error)
        self.pipeline = Pipeline(loop, rng, self.fleet, policy, tokens, self.watch.on_plugin_error, desk)
        self.watch.watch_queue(desk)
        self.driver = Driver(self.pipeline, loop, self.watch)
        self.health = HealthService()
        self.host = Host(
            self.driver,
            Understanding(
                tokens,
                build_hasher(config),
                loop.time,
                conversations=config.parsing.conversations,
                trusted=config.headers.trust,
                parse=build_parse(config, self.watch.on_plugin_error),
            ),
            Answers(secrets.token_hex(4)),
            self.watch,
            loop.time,
            config.parsing.max_body_bytes,
            sampler(config.inspect.usage_sampling, Random(rng.random()), loop.time),
        )
        self.host.tells_served = "test-selection" in config.headers.trust

    async def _start(self, stack: contextlib.AsyncExitStack, loop: asyncio.AbstractEventLoop) -> None:
        config = self.config
        self.driver.start()
        stack.callback(self.driver.close)
        self.scraper = Scraper(
            loop,
            self.driver.feed,
            engine_table(config.metrics),
            _scrape_options(config),
            default_engine=config.metrics.default_engine,
            report=self.watch.on_page,
            measure=build_measure(config, self.watch.on_plugin_error),
        )
        stack.push_async_callback(self.scraper.close)
        self.watch.on_routed = self.scraper.wake
        self.watch.scrapes = self.scraper.stats
        stack.callback(LoopLag(loop, self._turned).close)
        self._listed = await follow_endpoints(stack, config.endpoints, self._endpoint, self._file_problem)
        await follow_models(stack, config.models, self._models, self._models_problem)
        tls = ServerTls.from_directory(config.ext_proc.tls.cert_dir) if config.ext_proc.tls else None
        server = Server(config.ext_proc.transport, self.host, self.health, tls, config.parsing.max_body_bytes)
        stack.push_async_callback(self._finish, server)
        log_port = config.als.port if config.als.enabled else 0
        await server.start(config.ext_proc.host, config.ext_proc.port, config.ext_proc.health_port, log_port)
        await self._start_admin(stack)
        if config.source:
            file = ConfigFile(config.source, self._changed, self._unusable)
            stack.push_async_callback(file.close)
            await file.start()

    def _changed(self, new: Config) -> None:
        """The configuration file says something else: take over what can be, between two decisions."""
        changes, refused = plan_reload(self.config, new)
        config = changes.config
        for problem in refused:
            log.warning("a change of the configuration is refused", file=new.source, problem=str(problem))
        if not changes.paths:
            return
        try:
            policy = build_policy(config, self.watch.on_plugin_error) if changes.policy else self.pipeline.policy
        except PluginError as error:
            self._unusable([str(error)])
            return
        self.config = config
        self.pipeline.policy = policy
        if changes.policy and self.pipeline.desk is not None:
            self.pipeline.desk.follow(policy.name, able_by(config, policy))
        self.fleet.ledger.ttl = config.ledger.lease_ttl
        self.host.max_body = config.parsing.max_body_bytes
        if any(path.startswith("$.inspect") for path in changes.paths):
            self.host.inspect = sampler(config.inspect.usage_sampling, Random(), asyncio.get_running_loop().time)
        if any(path.startswith("$.log") for path in changes.paths):
            setup_log(config.log.level, config.log.format)
        if changes.endpoints and self._listed is not None:
            self._listed.apply(Listing(config.endpoints.static))
        log.info("the configuration changed", file=config.source, applied=" ".join(changes.paths))

    def _unusable(self, problems: list[str]) -> None:
        for problem in problems[:_SHOWN]:
            log.error("the changed configuration cannot be used; the old one stays", problem=problem)

    async def _finish(self, server: Server) -> None:
        """Give requests in flight their time. A gateway's access log tells their ends and has none itself: it ends with
        the last of them."""
        loop = asyncio.get_running_loop()
        until = loop.time() + DRAIN_SECONDS
        server.drain()
        while len(self.fleet.ledger) and loop.time() < until:
            await asyncio.sleep(_POLL)
        self.host.end_access_logs()
        await server.close(max(until - loop.time(), 0.0))

    def _turned(self, late_s: float) -> None:
        """The event loop turned, so much later than it should."""
        self.watch.metrics.families.loop_lag.child().observe(late_s)
        self.host.beat()

    def _endpoint(self, event: EndpointUp | EndpointDown) -> None:
        """An endpoint came, changed or went: everybody who knows endpoints is told."""
        self.driver.feed(event)
        if isinstance(event, EndpointUp):
            self.watch.on_endpoint(event.endpoint)
            self.scraper.up(event.endpoint)
            log.info("endpoint up", endpoint=event.endpoint.id, address=event.endpoint.address)
        else:
            self.scraper.down(event.endpoint_id)
            log.info("endpoint down", endpoint=event.endpoint_id)

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
            unready=self._reasons,
            endpoints=self.watch.endpoints,
            decisions=self.watch.decisions,
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
        self.health.set_ready(not self._unready)

    def _whereabouts(self) -> dict[str, object]:
        config = self.config
        found: dict[str, object] = {
            "policy": config.policy.name,
            "endpoints": self.fleet.table.count,
            "ext_proc": f"{config.ext_proc.host}:{config.ext_proc.port}",
            "admin": f"http://{config.admin.host}:{self.admin.port}/",
        }
        if config.gateway.mode == "embedded":
            found["gateway"] = f"http://{config.gateway.host}:{config.gateway.port}/"
        return found


def sampler(share: float, rng: Random, now: Callable[[], float]) -> Callable[[bool], bool]:
    """Decides which responses are followed to their end: `share` of them, none when it is 0.

    A stream costs work for every chunk: after the first `FIRST_INSPECTED` of them at most one in `STREAM_GAP` seconds
    is followed. The argument says whether the response is a stream.
    """
    left = FIRST_INSPECTED
    next_at = 0.0

    def inspect(stream: bool) -> bool:
        nonlocal left, next_at
        if share <= 0:
            return False
        if not stream:
            return rng.random() < share
        if left > 0:
            left -= 1
            return True
        if rng.random() >= share or now() < next_at:
            return False
        next_at = now() + STREAM_GAP
        return True

    return inspect


def _settle_memory() -> None:
    """What exists now lives to the end, and what comes later dies by reference count: the cycle collector need not walk
    the former, and need not look at the latter often. Its pauses would land in the middle of decisions."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def _keep_heap() -> None:
    """Have glibc keep freed memory. By default it gives back and faults in again the pages of every large body: 0.51 ms
    instead of 0.09 ms for reading one of 500 KB (bench/transport.py). Other C libraries are left alone."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for option, value in ((_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 256 << 20), (_M_TOP_PAD, 16 << 20)):
            mallopt(option, value)


#: mallopt(3)
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


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
