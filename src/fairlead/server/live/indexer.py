"""A standalone indexer: only subscriber, index and tokenisers, with an HTTP port for schedulers and other clients.

The parts start in this order and stop in reverse order: subscriptions, endpoints, the HTTP port. On SIGTERM or SIGINT
the indexer first reports itself as not ready, then finishes the queries in progress.
"""

import asyncio
import contextlib
import signal
import time
from typing import Any

from fairlead.config.checks import is_loopback
from fairlead.config.schema import Config, KvIndexer
from fairlead.core.errors import cannot_listen
from fairlead.core.events import EndpointDown, EndpointUp
from fairlead.core.fleet import Fleet
from fairlead.gateway.memory import raise_file_limit
from fairlead.pool.endpoints_file import follow_endpoints
from fairlead.server.indexer.server import IndexServer, IndexSources
from fairlead.server.indexer.service import IndexService
from fairlead.server.live.knowledge import exact_knowledge
from fairlead.server.live.kube import Kube
from fairlead.server.live.kv import KvListening
from fairlead.server.live.memory import keep_heap, settle_memory
from fairlead.server.observe.component_metrics import KubeMetrics
from fairlead.server.observe.exposition import Registry
from fairlead.server.observe.kv_metrics import show_indexer
from fairlead.server.observe.log import get
from fairlead.server.observe.troubles import Troubles
from fairlead.server.supervise import collecting

log = get("indexer")

#: Seconds between two checks of troubles.
_LOOK_S = 0.5


class LiveIndexer:
    """`await run()` returns after `stop()` or a signal. `port` 0 = any free port; the attribute `port` then has the
    real one."""

    def __init__(self, config: Config, host: str, port: int, accept_snapshots: bool = False) -> None:
        self.config = config = alone(config)
        self._host = host
        self.port = port
        self._stopping = asyncio.Event()
        self._unready = {"start": "starting"}
        self.fleet = Fleet(exact=exact_knowledge(config))
        self._registry = Registry()
        self.kv = KvListening(config, self.fleet, self._registry)
        took = show_indexer(self._registry, self.kv.exact.index, lambda: self.service.asked)
        self.service = IndexService(self.kv.exact, self.fleet.table.slots, lambda: self.kv.prompts.tokeniser, took)
        self._kube_metrics = KubeMetrics(self._registry)
        self._troubles = Troubles(self._registry, time.monotonic)
        self._troubles.watch("kv-snapshot", self.kv.unsaved)
        self._troubles.watch("kv-events", self.kv.unheard)
        self._take = self.kv.take if accept_snapshots else None

    def stop(self) -> None:
        self._stopping.set()

    async def run(self) -> None:
        """Raises `ConfigError` if something that the configuration names cannot be used, e.g. a taken port."""
        loop = asyncio.get_running_loop()
        keep_heap()
        raise_file_limit()  # each publisher needs about four
        async with contextlib.AsyncExitStack() as stack:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.stop)
                stack.callback(loop.remove_signal_handler, number)
            stack.enter_context(collecting())
            stack.callback(self.service.close)
            await self.kv.start(stack)
            await self._follow(stack)
            await self._serve(stack)
            self._look(loop)
            stack.callback(lambda: self._timer.cancel())
            settle_memory()
            self._set_ready("start", "")
            log.info("ready", url=f"http://{self._host}:{self.port}/", endpoints=self.fleet.table.count)
            await self._stopping.wait()
            self._set_ready("stop", "shutting down")
            log.info("stopping")

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._troubles.look()
        self._timer = loop.call_later(_LOOK_S, self._look, loop)

    async def _follow(self, stack: contextlib.AsyncExitStack) -> None:
        config = self.config
        await follow_endpoints(stack, config.endpoints, self._endpoint, self._problem)
        if config.kubernetes.on:
            kube = Kube(config.kubernetes, self._endpoint, lambda models: None, self._set_ready, self._kube_metrics)
            await kube.start(stack)

    async def _serve(self, stack: contextlib.AsyncExitStack) -> None:
        sources = IndexSources(
            metrics=self._registry.parts,
            unready=self._reasons,
            notes=lambda: [*self._troubles.look().values()],
            snapshot=self.kv.snapshot,
            take=self._take,
            on_error=lambda page, error: log.error("a page failed", exc=error, page=page),
        )
        if not is_loopback(self._host):
            log.warning(
                "anyone who reaches this address can read and ask the index: let only schedulers reach it",
                address=f"{self._host}:{self.port}",
            )
        server = IndexServer(self.service, sources, self._host, self.port)
        try:
            await server.start()
        except OSError as error:
            raise cannot_listen(f"{self._host}:{self.port}", error) from None
        self.port = server.port
        stack.push_async_callback(server.close)

    def _endpoint(self, event: EndpointUp | EndpointDown) -> None:
        if isinstance(event, EndpointUp):
            self.fleet.up(event.endpoint)
            log.info("endpoint up", endpoint=event.endpoint.id, address=event.endpoint.address)
        else:
            self.fleet.down(event.endpoint_id)
            log.info("endpoint down", endpoint=event.endpoint_id)
        self.kv.endpoint(event)

    def _problem(self, problem: Any) -> None:
        log.warning("problem in the list of endpoints", problem=str(problem))

    def _reasons(self) -> list[str]:
        reasons = list(self._unready.values())
        if not self.fleet.table.count:
            reasons.append("no endpoints")
        return reasons

    def _set_ready(self, part: str, reason: str) -> None:
        self._unready.pop(part, None)
        if reason:
            self._unready[part] = reason


def alone(config: Config) -> Config:
    """A copy of `config` for an indexer: KV events are on; no other indexer is asked, there is no leader election, and
    neither model definitions are read nor status is written."""
    events = config.kv_events
    indexer = KvIndexer(warm_from=events.indexer.warm_from)
    election = config.kubernetes.leader_election.model_copy(update={"enabled": False})
    kubernetes = config.kubernetes.model_copy(update={"models": False, "status": False, "leader_election": election})
    events = events.model_copy(update={"enabled": True, "indexer": indexer})
    return config.model_copy(update={"kv_events": events, "kubernetes": kubernetes})
