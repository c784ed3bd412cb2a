"""One running scheduler, of one pool or several: starts it, applies configuration changes, and stops it.

The parts start in this order: pools (scraper, endpoints), admin port, KEDA's external scaler, the watch of the
configuration file, ext_proc port. On SIGTERM or SIGINT the scheduler first reports itself as not ready, and answers
until gateways have noticed. Then running streams finish while the admin port still serves pages. Then the other parts
stop, the pools last. The embedded gateway is not part of this: it must outlive a scheduler that dies, see `embedded`.
"""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fairlead.config.endpoint_list import Listing
from fairlead.config.registry import changed_code
from fairlead.config.reload import plan_reload
from fairlead.config.schema import Config, Tls
from fairlead.core.endpoint import host_port
from fairlead.core.errors import cannot_listen
from fairlead.core.events import EndpointDown, EndpointUp, GatewayAnswered
from fairlead.gateway.envoy.admin import EnvoyAdmin
from fairlead.gateway.envoy.clusters import PoolWriter
from fairlead.gateway.envoy.process import BOOTSTRAP, LAST_CONFIG, NAMES
from fairlead.gateway.h2_limits import ByteBudget
from fairlead.gateway.health import EXT_PROC, HealthService, ServingStatus
from fairlead.gateway.memory import FEW_FILES, memory_limit, raise_file_limit
from fairlead.gateway.server import Server
from fairlead.gateway.tls import ServerTls
from fairlead.pool.aio import cancelled, until_set
from fairlead.pool.endpoints_file import EndpointSet, EndpointsFile, follow_endpoints
from fairlead.server.admin import Admin, admin_access
from fairlead.server.external_scaler import ExternalScaler
from fairlead.server.followed_files import ConfigFile, followed_keys
from fairlead.server.live.handover import Handover, reachable
from fairlead.server.live.kube import Kube, KubeLink, pod_ip
from fairlead.server.live.kube_pools import KubePools
from fairlead.server.live.memory import HeapTrim, LoopErrors, LoopLag, keep_heap, settle_memory
from fairlead.server.live.pool_scheduler import REFUSE_S, PoolScheduler
from fairlead.server.live.pools import LivePools
from fairlead.server.live.wiring import start_tracing
from fairlead.server.observe.component_metrics import GatewayMetrics, show_budget, show_spans
from fairlead.server.observe.exposition import Registry
from fairlead.server.observe.log import get
from fairlead.server.observe.log import setup as setup_log
from fairlead.server.observe.troubles import Troubles, children_descriptors, descriptors
from fairlead.server.plugin_watch import PluginWatch
from fairlead.server.running_gateway import NONE_RUNS, RunningGateway
from fairlead.server.supervise import DRAIN_SECONDS, ENDING, Ending, collecting

log = get("serve")

#: The key in `Live._unready` while a restarted scheduler knows no endpoints although the gateway has some.
_ENDPOINTS = "endpoints"
_STOPPING = "shutting down"

#: Seconds between two checks while something is waited for.
POLL_S = 0.05
#: Seconds between two questions whether the embedded gateway is alive; well below `core.stalls.GATEWAY_S`.
_ASKED_S = 0.5
#: Seconds in which a gateway notices that this scheduler is not ready: two health checks of `fairlead envoy config`.
NOTICE_S = 2.5
#: The default limit of `parsing.maxBufferedBytes`; lower on machines with little memory.
_MOST_BUFFERED = 128 << 20


class Live:
    """A scheduler in this process: `await run()` returns after `stop()` or a signal."""

    def __init__(self, config: Config, gateway: RunningGateway = NONE_RUNS, begun: Config | None = None) -> None:
        """`begun`: the configuration that the gateway began with, without the ports, files and seed of this worker;
        `None` = the same as `config`."""
        self.config = config
        self._begun = begun or config
        #: Paths of the settings in the file that differ and need a restart.
        self._refused: list[str] = []
        self._beside, self._gateway = gateway, gateway.admins
        pool = gateway.pool_file
        self._pool = PoolWriter(pool) if pool else None
        #: The file with Envoy's request counts. Its directory, that of the pool file, lives as long as the gateway.
        self._kept = pool.with_name("counts.json") if pool else None
        # Every worker follows the key files, so that a revoked key is removed even while another worker is down.
        self._keys = followed_keys(config.gateway, Path(gateway.directory)) if gateway.directory else []
        self._ending = Ending(child=bool(gateway.directory))
        self._endpoints_known = asyncio.Event()
        #: Why this scheduler is not ready, by part; empty = it is ready.
        self._unready = {"start": "starting"}
        #: Whether Envoy's admin page has shown that the embedded gateway asks this scheduler.
        self._is_asked = False
        self.serving: PoolScheduler | LivePools
        self.kube: KubeLink | None = None
        self.health = HealthService()
        self._listed: EndpointSet | EndpointsFile | None = None
        #: With leader election: what the leader learned.
        self._handover: Handover | None = None

    def stop(self) -> None:
        self._ending.asked.set()

    async def run(self) -> None:
        """Raises `ConfigError` if something that the configuration names cannot be used, e.g. a taken port."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(LoopErrors())
        keep_heap()
        files = raise_file_limit()
        if files < FEW_FILES:
            log.warning(
                "the limit of open files is low; the gateway needs two for each concurrent request", limit=files
            )
        async with contextlib.AsyncExitStack() as stack:
            tracing = start_tracing(stack, self.config, loop)
            if self.config.kubernetes.namespaces:
                self.serving = LivePools(self.config, tracing, self._reasons)
            else:
                pool = PoolScheduler(
                    self.config, tracing, unready=self._reasons, gateway=self._beside, begun=self._begun
                )
                self._take(pool)
            url = reachable(self.config.admin, pod_ip())
            if self.config.kubernetes.leader_election.enabled and url:
                self._handover = Handover(lambda: self.serving.states, url)
            if tracing is not None:
                troubles, why = self.serving.troubles, "spans cannot be sent to tracing.endpoint; the log says why"
                show_spans(self.serving.registry, lambda: tracing.dropped)
                troubles.lately("tracing", lambda: tracing.dropped, why)
            if self._pool is not None:
                stack.callback(self._pool.close)
            self._ending.listen(stack)
            stack.enter_context(collecting())
            ending = self._beside.ending if self._gateway else ENDING
            loop.add_signal_handler(ending, self._leave)
            stack.callback(loop.remove_signal_handler, ending)
            await self._start(stack, loop)
            if isinstance(self.serving, PoolScheduler):
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
            await self._ending.asked.wait()
            if self.kube is not None:
                await self.kube.hand_over()

    def _take(self, pool: PoolScheduler) -> None:
        """Store the scheduler of the only pool and shortcuts to its parts."""
        self.serving, self.core = pool, pool.core
        self.fleet, self.watch, self.pipeline = pool.fleet, pool.watch, pool.pipeline
        self.driver, self.host, self.scraper = pool.driver, pool.host, pool.scraper

    async def _start(self, stack: contextlib.AsyncExitStack, loop: asyncio.AbstractEventLoop) -> None:
        config, serving = self.config, self.serving
        stack.callback(LoopLag(loop, serving.turned).close)
        stack.callback(HeapTrim(loop).close)
        watch = PluginWatch(loop)
        stack.callback(watch.close)
        why = "a plugin did not return and held up all requests; the log names it"
        serving.troubles.lately("plugins", lambda: watch.count, why)
        if isinstance(serving, LivePools):
            settle_memory()  # before any pool exists: pools come and go, and the collector must be able to free them
            stack.push_async_callback(serving.close)
            port = config.ext_proc.health_port
            self.kube = KubePools(config.kubernetes, serving.open, self._set_ready, serving.kube, port, self._handover)
            await self.kube.start(stack)
        else:
            await self._start_pool(stack, serving)
        tls = self._tls("ext-proc-certificate", config.ext_proc.tls, "h2")
        budget = self._budget = ByteBudget(_buffered(config), loop.time)
        show_budget(serving.registry, budget)
        self._watch_troubles(budget)
        max_body = self._begun.parsing.max_body_bytes
        server = Server(config.ext_proc.transport, serving.host, self.health, tls, max_body, budget)
        log_port = config.als.port if config.als.enabled and not config.kubernetes.namespaces else 0
        await self._start_admin(stack)
        if config.autoscaling.port:
            pool = self.watch
            scaler = ExternalScaler(pool.desired_replicas, pool.present_replicas, lambda: pool.roles)
            stack.push_async_callback(scaler.close)
            await scaler.start(config.autoscaling.host, config.autoscaling.port)
        if config.source:
            kept = self._beside.directory and not self._beside.worker  # all workers follow the same file
            keep = Path(self._beside.directory, LAST_CONFIG) if kept else None
            file = ConfigFile(config.source, self._changed, serving.refuse, flags=self._begun.flags, keep=keep)
            stack.push_async_callback(file.close)
            file.start()
        # Starts last and stops first: the admin port must serve pages while requests still run.
        stack.push_async_callback(self._finish, server)
        if _ENDPOINTS in self._unready:  # until its next health check, Envoy asks any scheduler that listens
            await until_set(self._ending.asked, self._endpoints_known.wait())
        await server.start(config.ext_proc.host, config.ext_proc.port, config.ext_proc.health_port, log_port)

    async def _start_pool(self, stack: contextlib.AsyncExitStack, pool: PoolScheduler) -> None:
        config = self.config
        await pool.start(stack)
        first = not self._beside.restarted
        listed = await follow_endpoints(
            stack, config.endpoints, self._endpoint, self._file_problem, required=first, kept=self._kept_names()
        )
        self._listed = listed
        pool.troubles.watch("endpoints", lambda: listed.problem)
        for keys in self._keys:
            stack.push_async_callback(keys.close)
            await keys.begin()
        if config.kubernetes.on:
            port, defined = config.ext_proc.health_port, partial(pool.defined, "kubernetes")
            speaks = bool(self._beside.admins) and not self._beside.worker
            self.kube = Kube(
                config.kubernetes, self._endpoint, defined, self._set_ready, pool.kube, port, self._handover, speaks
            )
            await self.kube.start(stack)
        await pool.settle(stack)
        if not (pool.endpoints or config.endpoints.allow_empty or config.kubernetes.on) and await self._pool_size():
            reason = "no endpoints are known here; the gateway goes on with those that it has"
            log.warning(reason)
            self._set_ready(_ENDPOINTS, reason)

    def _kept_names(self) -> Path | None:
        """The file with the last addresses of host names: beside the gateway's list, or else the state file."""
        if self._beside.directory:
            return Path(self._beside.directory, NAMES)
        state = self.config.state.path(self.config.journal)
        return Path(f"{state}.names") if state else None

    async def _pool_size(self) -> int:
        """The number of endpoints that the gateway got from a scheduler that died. At the first start, when this
        scheduler knows no endpoints, the gateway has none either."""
        return max([await EnvoyAdmin.from_address(where).pool_size() for where in self._gateway], default=0)

    def _tls(self, what: str, settings: Tls | None, protocol: str) -> ServerTls | None:
        """Load the certificate of a port; `None` = no TLS. `what`: the name of the trouble that is reported while the
        newest certificate files cannot be used."""
        if settings is None:
            return None
        required = not self._beside.restarted or self.config.ext_proc.transport == "grpc-aio"
        tls = ServerTls.from_directory(settings.cert_dir, protocol=protocol, required=required)
        now = asyncio.get_running_loop().time
        self.serving.troubles.watch(what, lambda: tls.trouble(now()))
        return tls

    def _watch_troubles(self, budget: ByteBudget) -> None:
        troubles = self.serving.troubles
        if (kube := self.kube) is not None:
            troubles.watch("leader-service", lambda: kube.misled)
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
        troubles.watch("restart", self._needs_restart)
        if (pool := self._pool) is not None:
            troubles.watch("gateway-endpoints", lambda: pool.problem)
        if self._keys:
            troubles.watch("keys", lambda: "; ".join(keys.unusable for keys in self._keys if keys.unusable))

    # ---- a changed configuration ----

    def _needs_restart(self) -> str:
        refused = [*self._refused, *self.serving.refused]
        return f"the file has changes that need a restart: {', '.join(refused)}" if refused else ""

    def _changed(self, new: Config) -> None:
        """Apply a changed configuration file through the pipeline. Settings that need a restart keep their values."""
        changes, refused = plan_reload(self.config, new, self._begun)
        if self._beside.workers > 1:
            from fairlead.server.embedded import for_workers  # only the parent needs the rest of it

            refused = for_workers(refused, new, self._beside.workers)
        self._refused = [problem.path for problem in refused]
        for problem in refused:
            log.warning("rejected a configuration change", file=new.source, problem=str(problem))
        if changed := changed_code():
            log.warning("plugins have other code than this process runs; restart to run it", files=" ".join(changed))
        if not self.serving.reconfigure(changes):
            return
        self.config = config = changes.config
        self._budget.resize(_buffered(config))
        if any(path.startswith("$.log") for path in changes.paths):
            setup_log(config.log.level, config.log.format)
        if changes.endpoints and isinstance(self._listed, EndpointSet):
            self._listed.apply(Listing(config.endpoints.static))
        log.info("applied a configuration change", file=config.source, applied=" ".join(changes.paths))
        _log_notes(config)

    # ---- shutdown ----

    def _leave(self) -> None:
        """The embedded gateway is stopping. It accepts no new connections, but asks this scheduler until its last
        request has ended."""
        self.health.leave()
        if self._pool is not None:
            self._pool.close()  # the gateway removes the file at its end
        self.serving.empty_queue()

    def _is_checked(self) -> bool:
        """Whether a gateway takes this scheduler as healthy and may have others to ask. An embedded gateway has none
        but the other workers, and when it stops, it has sent its last request. Schedulers behind a gateway of their own
        share `replicas.via`, or a leader's lease in Kubernetes; independent ones are not recognized."""
        if self._gateway:
            alone = self._beside.workers == 1 or self.health.leaving
        else:
            alone = not (self.config.replicas.via or self.config.kubernetes.on)
        return self.health.asked and not alone and self.health.status(EXT_PROC) is ServingStatus.SERVING

    async def _finish(self, server: Server) -> None:
        """Give requests in flight time to finish. A second signal cuts them off, and those that wait are refused."""
        await until_set(self._ending.at_once, self._drain(server))
        if self._ending.at_once.is_set():
            self.serving.empty_queue()  # refuses the first few, and the others from a timer
            await _until_none(lambda: self.serving.waiting, asyncio.get_running_loop().time() + REFUSE_S)
            await asyncio.sleep(POLL_S)  # the last refusals are sent
            await server.close(0.0)

    async def _drain(self, server: Server) -> None:
        """Report this scheduler as not ready, and go on answering until the gateway has noticed. Then wait until no
        request runs, all in all up to `DRAIN_SECONDS`, and close the server. The gateway's access log stream reports
        the ends of requests and never ends by itself, so it is closed after the last request."""
        loop = asyncio.get_running_loop()
        until = loop.time() + DRAIN_SECONDS
        notice_s = NOTICE_S if self._is_checked() else 0.0
        self._set_ready("stop", _STOPPING)
        await asyncio.sleep(notice_s)
        self.serving.empty_queue()  # only now, because a stopped queue refuses new requests
        server.drain()
        await _until_none(lambda: self.serving.leases, until)
        if isinstance(self.serving, PoolScheduler):
            self.serving.host.logs.end()
        self.health.end_watches()
        await server.close(max(until - loop.time(), 0.0))

    # ---- endpoints and readiness ----

    def _endpoint(self, event: EndpointUp | EndpointDown) -> None:
        assert isinstance(self.serving, PoolScheduler)
        self.serving.endpoint(event)
        if self._pool is not None:
            self._pool.changed(event)
        if isinstance(event, EndpointUp):
            self._set_ready(_ENDPOINTS, "")
            self._endpoints_known.set()

    def _file_problem(self, problem: Any) -> None:
        source = self.config.endpoints.file or self.config.source
        log.warning("problem in the list of endpoints", file=source, problem=str(problem))

    async def _start_admin(self, stack: contextlib.AsyncExitStack) -> None:
        serving = self.serving
        if isinstance(serving, PoolScheduler):
            admins = self._gateway if self._pool else ()
            slow = serving.watch.tempo.slow
            ask = watch_gateway(
                admins, self._kept, serving.registry, serving.troubles, lambda: slow() or bool(descriptors())
            )
            sources = serving.sources(refresh=ask)
            if ask is not None:
                stack.push_async_callback(cancelled, asyncio.create_task(self._look_at_gateway(ask)))
            if self._gateway:
                stack.push_async_callback(cancelled, asyncio.create_task(self._hear_gateway()))
        else:
            sources = serving.sources()
        settings = self.config.admin
        handover = self._handover
        free = () if handover is None else (handover.path,)
        access = admin_access(settings.hosts, settings.token_file, not self._beside.restarted, free)
        serving.troubles.watch("admin-tokens", access.problem)
        self.admin = Admin(
            sources,
            host=settings.host,
            port=settings.port,
            debug=settings.debug,
            access=access,
            tls=self._tls("admin-certificate", settings.tls, "http/1.1"),
            metrics=(settings.metrics_host or settings.host, settings.metrics_port) if settings.metrics_port else None,
            on_error=lambda page, error: log.error("an admin page failed", exc=error, page=page),
            pools=serving.pages if isinstance(serving, LivePools) else None,
            secret=None if handover is None else (handover.path, handover.serve),
        )
        try:
            await self.admin.start()
        except OSError as error:
            where = f"{settings.host}:{settings.port}" if not self.admin.port else f"{settings.metrics_port}"
            raise cannot_listen(where, error, "$.admin") from None
        stack.push_async_callback(self.admin.close)

    def _reasons(self) -> list[str]:
        reasons = [_STOPPING] if self.health.leaving else list(self._unready.values())
        if isinstance(self.serving, PoolScheduler) and not self.serving.may_be_empty and not self.serving.endpoints:
            reasons.append("no endpoints")
        if self.config.gateway.mode == "embedded" and not (self._is_asked if self._gateway else self.health.asked):
            reasons.append("the embedded gateway has not asked yet")
        troubles = self.serving.troubles.present
        if "gateway" in troubles:
            reasons += [reason for what, reason in troubles.items() if what.startswith("gateway")]
        return reasons

    async def _wait_for_gateway(self, admins: list[EnvoyAdmin]) -> None:
        """Wait until the embedded gateway asks this scheduler, then announce readiness. A busy machine may answer
        Envoy's health check late, and then Envoy sends nothing until its next check. Clients send as soon as they see
        `ready`, so the announcement also waits until Envoy listens."""
        beside = bool(self.config.replicas.via) and self._pool is None  # Envoys may ask another worker instead
        for admin in admins:
            while not ((self.health.asked or not beside) and await admin.asks_scheduler() and await admin.listens()):
                await asyncio.sleep(POLL_S)
        self._is_asked = True
        self._announce()

    async def _look_at_gateway(self, ask: Callable[[], Awaitable[None]]) -> None:
        """Every second, read the gateway's statistics and check the file descriptors of its processes."""
        reason, mark = "", f"{self._beside.directory}/{BOOTSTRAP.partition('{')[0]}"
        self.serving.troubles.watch("gateway-descriptors", lambda: reason)
        while True:
            try:
                await ask()
                reason = await asyncio.to_thread(children_descriptors, os.getppid(), mark)
            except (OSError, RuntimeError) as error:  # no file can be opened, or no thread started
                log.warning("cannot look at the gateway", reason=str(error))
            await asyncio.sleep(1.0)

    async def _hear_gateway(self) -> None:
        """Report to the pipeline that the gateway is alive. While an Envoy is not, answers may wait there."""
        admins, now = [EnvoyAdmin.from_address(where) for where in self._gateway], asyncio.get_running_loop().time
        while True:
            due = now() + _ASKED_S
            if all(await asyncio.gather(*(admin.lives() for admin in admins))):
                self.driver.feed(GatewayAnswered())
            await asyncio.sleep(due - now())

    def _announce(self) -> None:
        if self.serving.endpoints:
            log.info("ready", **self._whereabouts())
        else:
            log.warning("running, but there are no endpoints yet", **self._whereabouts())

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
            "endpoints": self.serving.endpoints,
            "ext_proc": host_port(config.ext_proc.host, config.ext_proc.port),
            "admin": f"http{'s' if config.admin.tls else ''}://{host_port(config.admin.host, self.admin.port)}/",
        }
        if config.gateway.mode == "embedded":
            places["gateway"] = f"http://{host_port(config.gateway.host, config.gateway.port)}/"
        return places


def _log_notes(config: Config) -> None:
    """Log the notes that `fairlead validate` prints about a valid file."""
    for note in config.notes:
        log.warning("note on the configuration", file=config.source, note=str(note))


async def _until_none(left: Callable[[], int], until: float) -> None:
    """Return once there are none left, at the latest at `until` (seconds of the event loop's clock)."""
    loop = asyncio.get_running_loop()
    while left() and loop.time() < until:
        await asyncio.sleep(POLL_S)


def _buffered(config: Config) -> int:
    """The number of bytes that unfinished requests may hold."""
    return config.parsing.max_buffered_bytes or min(memory_limit() // 8, _MOST_BUFFERED)


def watch_gateway(
    where: Sequence[str],
    keep: Path | None,
    registry: Registry,
    troubles: Troubles,
    slow: Callable[[], bool] = lambda: False,
) -> Callable[[], Awaitable[None]] | None:
    """Show in metrics how many requests the embedded gateway balanced by itself, its memory, and whether it answers.

    Returns a function that reads these values from Envoy; await it before each metrics page and every second.
    `None` = there is no gateway to ask.

    The access log reports most requests that the gateway balanced by itself, each with its endpoint. It reports none
    that ended while no scheduler was running. Envoy counts all of them, and its counts survive the death of a
    scheduler. The file `keep` has the counts of Envoys that died.

    `where`: the admin page of each of its Envoys, a socket's path or a port of 127.0.0.1; empty = no embedded gateway.
    `slow`: whether this process is too slow to read their answers in time, or cannot ask.
    """
    if not where:
        return None
    admins = [EnvoyAdmin.from_address(each) for each in where]
    now = asyncio.get_running_loop().time
    shown = GatewayMetrics(registry, keep, len(admins), now, slow)

    def silent() -> str:
        reason = shown.trouble()
        for path in where if reason else ():
            if not path.isdigit() and not os.path.exists(path):  # Envoy cannot be asked, nor does it notice new files
                return f"{reason}: {path} is missing; if a cleaner of old files removed it, restart fairlead serve"
        return reason

    troubles.watch("gateway", silent)
    troubles.watch("issuer", shown.keyless)

    async def ask() -> None:
        shown.take(await asyncio.gather(*(admin.vitals() for admin in admins)))

    return ask
