"""All parts of a running scheduler, made from a configuration in the order in which they need each other.

How the parts are connected
* The gateway's sessions, the scraper, connections to other schedulers, and shadows feed events to the driver.
* The driver has the pipeline handle them and carries out its instructions: routes and rejections go back to the
  sessions, questions to the connections, cases to the shadows, records to the watch (metrics, decisions page, log).
* A reload is an event too (`Reconfigured`). `PoolScheduler` carries out the resulting instruction.
"""

import asyncio
import os
import secrets
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from random import Random
from socket import gethostname
from threading import Thread

from fairlead import __version__
from fairlead.compat.recorded import beside, record
from fairlead.config.building import SchedulingBuilder, build_pipeline
from fairlead.config.checks import engine_table
from fairlead.config.plugins import build_hasher, build_measure, build_parse
from fairlead.config.schema import Config
from fairlead.core.beginnings import Beginnings
from fairlead.core.clock import Clock
from fairlead.core.demand import Objective
from fairlead.core.endpoint import NODE_LABEL, ZONE_LABEL, Topology
from fairlead.core.errors import ConfigError
from fairlead.core.events import Event
from fairlead.core.fleet import Fleet
from fairlead.core.instructions import (
    AdoptConfiguration,
    AskRemote,
    JudgeShadows,
    ListAdapters,
    RefuseConfiguration,
    WarmUp,
)
from fairlead.core.records import ShadowRecord, StallRecord
from fairlead.core.reports import SharedFleet
from fairlead.gateway.answers import Answers
from fairlead.gateway.driver import Driver, Handlers
from fairlead.gateway.host import Host
from fairlead.gateway.session import Inspection
from fairlead.gateway.understand import Understanding
from fairlead.pool.aio import set_within
from fairlead.pool.scrape import Pace, ScrapeOptions, Scraper
from fairlead.pool.served_models import ServedModels
from fairlead.server.journal.recorder import RecordedDriver, Recorder, StillClock
from fairlead.server.journal.records import Segment
from fairlead.server.journal.writer import Directory, Writer, former_workers, label
from fairlead.server.live.choosers import Connections, check_schedulers
from fairlead.server.live.knowledge import Knowledge, exact_knowledge
from fairlead.server.live.kv import KvListening
from fairlead.server.live.kv_lookup import KvLookup
from fairlead.server.live.shadows import LiveShadows
from fairlead.server.live.warming import Noticing, Warming
from fairlead.server.observe.component_metrics import (
    show_journal,
    show_replicas,
    show_state,
    show_unheard,
    show_warming,
)
from fairlead.server.observe.exposition import Registry
from fairlead.server.observe.log import get
from fairlead.server.observe.tracing import Tracing, make_provider
from fairlead.server.observe.watch import POOL, Watch
from fairlead.server.own_file import HANGS_S
from fairlead.server.replicas import RUN_DIGITS, Facts, Own, Replicas, split_via
from fairlead.server.replicas_files import FileReplicas
from fairlead.server.replicas_valkey import ValkeyReplicas
from fairlead.server.running_gateway import NONE_RUNS, RunningGateway
from fairlead.server.state import StateFile


class LoopClock:
    """The event loop's clock. Calls `time.monotonic` directly, which is faster than asyncio's function in Python: the
    clock is read several times per request."""

    time = staticmethod(time.monotonic)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.call_at = loop.call_at


class TimeOfDay:
    """Calling it returns the seconds to add to the clock `now` to get seconds since 1970. The value changes only if the
    system's clock is set."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._offset = time.time() - now()

    def __call__(self) -> float:
        offset = time.time() - self._now()
        if abs(offset - self._offset) > _CLOCK_SET_S:
            self._offset = offset
        return self._offset


#: A change of the offset by more than this many seconds means that the system's clock was set.
_CLOCK_SET_S = 1.0


class LiveJournal:
    """The journal of a running scheduler. Call `begin` before the first event, which opens the files, and `close` after
    the last. `clock` and `rng` are those of the pipeline. `workers`: how many schedulers the gateway has."""

    def __init__(
        self, config: Config, clock: Clock, run: str, rng: Random, registry: Registry, workers: int = 1
    ) -> None:
        self._config, self._workers = config, workers
        self._outer = clock
        self._run = run
        self._rng = rng
        self.clock = StillClock(clock)
        self.recorder = Recorder()
        self._writer: Writer | None = None
        show_journal(registry, self.recorder.counts)

    def begin(self) -> None:
        """Raises `ConfigError`. Call this before the first decision: it records the state of the random generator."""
        settings = self._config.journal
        head = Segment(
            run=self._run,
            program=__version__,
            scheduling=record(self._config),
            chance=self._rng.getstate(),
            beside=beside(self._config),
            sample=settings.sample,
            shared=bool(self._config.replicas.via),
        )
        stop, path = settings.when_full == "stop", Path(settings.path)
        try:
            named = label(path, self._run, time.time())
            former = former_workers(path, self._workers)
            directory = Directory(path, settings.max_bytes, settings.segment_bytes, stop, named, former)
            writer = Writer(
                self.recorder,
                directory,
                head,
                epoch=TimeOfDay(self._outer.time),
                flush_s=settings.flush,
                fsync=settings.fsync,
                on_trouble=lambda text: get("journal").error(
                    "the journal is missing records", path=settings.path, reason=text
                ),
            )
            writer.start()
        except OSError as error:
            raise ConfigError(f"cannot write to {settings.path}: {error.strerror or error}", "$.journal.path") from None
        self._writer = writer

    def hung(self) -> str:
        """Why records wait; empty = none waits for long."""
        waits_s = self._outer.time() - self.recorder.oldest
        text = f"records have waited {waits_s:.0f} s for the journal's disk, which hangs or is far too slow"
        return text if waits_s > HANGS_S else ""

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


#: At the end, sending the last spans may take this many seconds longer than `tracing.timeout`.
_GRACE = 1.0

log = get("tracing")


class Core:
    """All parts of the scheduler of one pool. Making it opens no port and no connection, and handles no event."""

    def __init__(
        self,
        config: Config,
        loop: asyncio.AbstractEventLoop,
        tracing: Tracing | None,
        adopt: Callable[[AdoptConfiguration], object],
        refuse: Callable[[RefuseConfiguration], object],
        one_of: Pace | None = None,
        gateway: RunningGateway = NONE_RUNS,
        begun: Config | None = None,
    ) -> None:
        """`adopt` and `refuse` receive the outcome of a `Reconfigured`. The other arguments and the exceptions are
        those of `PoolScheduler`."""
        check_schedulers(config)
        self._config, self._tracing, self._clock = config, tracing, LoopClock(loop)
        self._begun = begun or config
        rng, self._run = Random(config.seed), secrets.token_hex(RUN_DIGITS // 2)
        sampling = config.inspect.usage_sampling
        self.inspection = Inspection(sampling, Random(rng.random()), self._clock.time, self._serves)
        self.fleet = _fleet(config)
        self.connections = Connections(self.fleet, self._feed)
        self.shadows = LiveShadows(self.fleet, self._feed, lambda error: self.watch.on_plugin_error(error))
        self._observe(loop, one_of, gateway)
        watch, registry = self.watch, self.watch.metrics.registry
        self.kv = knowledge(config, self.fleet, registry)
        self.builder = SchedulingBuilder(
            watch.on_plugin_error, on_answer=lambda name: watch.choosers.took(name).observe
        )
        self.journal = None
        if config.journal.path:
            self.journal = LiveJournal(config, self._clock, self._run, rng, registry, gateway.workers)
        self.pipeline = build_pipeline(
            config,
            self._clock if self.journal is None else self.journal.clock,
            rng,
            build=self.builder,
            fleet=self.fleet,
            on_plugin_error=watch.on_plugin_error,
            snapshots=bool(config.journal.path or config.journal.explain),
        )
        watch.watch_queue(self.pipeline.flow_controller)
        understanding = self._understanding()
        #: Sends shared beginnings to cold endpoints; `None` = warming is off.
        self.warming: Warming | None = None
        if isinstance(understanding, Noticing):
            self.warming = Warming(config, self.fleet, understanding, self._feed)
            show_warming(registry, self.warming.counts)
        self.driver = self._driver(adopt, refuse)
        #: The link to other replicas that schedule for the same pool; `None` = facts are not shared.
        self.replicas = self._replicas(gateway)
        self._deliver = self.replicas.feed if isinstance(self.replicas, FileReplicas) else self.driver.feed
        self.host = self._host(understanding)
        #: Learned state on disk; `None` = it is not kept.
        self.state = self._state_file()

    def _feed(self, event: Event) -> None:
        """Feed an event. Parts that are made before the driver get this method."""
        self._deliver(event)

    def _driver(
        self, adopt: Callable[[AdoptConfiguration], object], refuse: Callable[[RefuseConfiguration], object]
    ) -> Driver:
        watch, warming = self.watch, self.warming
        handlers: Handlers = {
            AskRemote: self.connections.ask,
            JudgeShadows: self.shadows.judge,
            ListAdapters: lambda asked: self.served.look(asked.endpoint_id),
            WarmUp: warming.warm if warming is not None else lambda asked: None,
            ShadowRecord: watch.shadows.on_shadow,
            StallRecord: watch.on_stall,
            AdoptConfiguration: adopt,
            RefuseConfiguration: refuse,
        }
        if self.journal is None:
            return Driver(self.pipeline, self._clock, watch, handlers)
        journal = self.journal
        return RecordedDriver(self.pipeline, self._clock, journal.clock, watch, journal.recorder, handlers)

    def _understanding(self) -> Understanding:
        config, kv, tracing, settings = self._config, self.kv, self._tracing, self._config.warming
        make = partial(Noticing, Beginnings(settings.shared, settings.max_bytes)) if settings.enabled else Understanding
        return make(
            self.pipeline.tokens,
            build_hasher(self._begun),
            self._clock.time,
            conversations=config.parsing.conversations,
            trusted=config.trusted,
            parse=build_parse(config, self.watch.on_plugin_error),
            prompts=kv.prompts if kv is not None else None,
            trace=tracing.arrived if tracing is not None else None,
        )

    def _state_file(self) -> StateFile | None:
        settings, clock = self._config.state, self._clock
        path = settings.path(self._config.journal)
        if not path:
            return None
        state = StateFile(Path(path), settings, self.pipeline, build_hasher(self._begun), self.driver.feed, clock.time)
        show_state(self.watch.metrics.registry, state.counts)
        return state

    def _replicas(self, gateway: RunningGateway) -> Replicas | None:
        """The link to other replicas; `None` = there is none. Raises `ConfigError` if Valkey's client is missing."""
        config, pipeline, clock = self._config, self.pipeline, self._clock
        settings, kubernetes, fleet = config.replicas, config.kubernetes, pipeline.fleet
        if not isinstance(fleet, SharedFleet):
            return None
        reports, peers = fleet.reports, pipeline.peers
        facts = Facts(
            lambda: reports.batch(clock.time()),
            reports.snapshot,
            peers.gaps,
            lambda: reports.sequence,
            lambda name: peers.views[name].newest if name in peers.views else 0,
            lambda: bool(pipeline.flow_controller),
            peers.problem,
            peers.difference,
        )
        pool = settings.pool or "/".join(filter(None, (kubernetes.namespace, kubernetes.pool))) or POOL
        origin = f"{gethostname()}-{gateway.mark}{self._run}"
        kind = FileReplicas if split_via(settings.via).scheme == "file" else ValkeyReplicas
        replicas = kind(
            Own(
                settings=settings,
                pool=pool,
                origin=origin,
                facts=facts,
                feed=self.driver.feed,
                counted=self.scraper.share,
                worker=gateway.worker,
                workers=gateway.workers,
            )
        )
        show_replicas(self.watch.metrics.registry, replicas)
        self.watch.watch_peers(peers.load, lambda: bool(replicas.problem))
        return replicas

    def _observe(self, loop: asyncio.AbstractEventLoop, pace: Pace | None, gateway: RunningGateway) -> None:
        """Make the scraper, the reader of model lists, and the watch. The watch wakes the scraper and reports its
        results."""
        config, options, scaling = self._config, scrape_options(self._config), self._config.autoscaling
        self.scraper = Scraper(
            loop,
            self._feed,
            engine_table(config.metrics),
            options,
            default_engine=config.metrics.default_engine,
            report=lambda endpoint, lacks: self.watch.on_page(endpoint, lacks),
            measure=build_measure(config, lambda error: self.watch.on_plugin_error(error)),
            silence=lambda endpoint, reason: self.watch.on_silence(endpoint, reason),
            pace=pace,
        )
        self.served = ServedModels(loop, self._feed, options, pace=pace, scraped=self.scraper.reads)
        self.watch = Watch(
            self.fleet,
            loop.time,
            pool_label(config, pace is not None),
            on_routed=self.scraper.wake,
            awake=self.scraper.awake,
            tracing=self._tracing,
            scrapes=self.scraper.stats,
            served=self.served.names,
            skipped=self.shadows.skipped,
            cut=self.shadows.cut,
            counts_log=gateway.is_counted_here,
            one_of_several=pace is not None,
            objective=Objective(ttft_ms=scaling.ttft * 1e3, tpot_ms=scaling.tpot * 1e3, startup_s=scaling.startup),
        )

        show_unheard(self.watch.metrics.registry, lambda: self.connections.unheard() | self.shadows.unheard())

    def _serves(self, model: str) -> bool:
        """Whether a model is defined, or an endpoint lists it; true for any name unless all endpoints list theirs."""
        served = self.served
        return not served.knows_all() or model in served.union(True) or model in self.pipeline.models.known

    def _host(self, understanding: Understanding) -> Host:
        config, watch, inspection = self._config, self.watch, self.inspection
        answers = Answers(self._run, config.gateway.retry)
        watch.naming(answers.lease)
        inspect = inspection if self.kv is None else self.kv.inspecting(inspection)
        tells, max_body = "test-selection" in config.headers.trust, config.parsing.max_body_bytes
        driver, now, known = self.driver, self._clock.time, self.served.union
        return Host(driver, understanding, answers, watch, now, max_body, inspect, tells, known, self._deliver)


def _fleet(config: Config) -> Fleet:
    kind = SharedFleet if config.replicas.via else Fleet
    zone, node = config.topology.zone, config.topology.node
    places = (
        (ZONE_LABEL, zone.own or os.environ.get("ZONE", ""), zone.cost * 1e3),
        (NODE_LABEL, node.own or os.environ.get("NODE_NAME", ""), node.cost * 1e3),
    )
    topology = Topology(tuple(place for place in places if place[1]))
    return kind(config.ledger.lease_ttl, config.metrics.staleness, exact=exact_knowledge(config), topology=topology)


def pool_label(config: Config, one_of_several: bool) -> str:
    """The pool's name in metrics and on pages."""
    kubernetes = config.kubernetes
    return f"{kubernetes.namespace}/{kubernetes.pool}" if one_of_several else kubernetes.pool or POOL


def knowledge(config: Config, fleet: Fleet, registry: Registry) -> Knowledge | None:
    """Make the part that knows more of prompts than their bytes; `None` = neither KV events nor tokenisers are
    configured."""
    if config.kv_events.enabled:
        return (KvLookup if config.kv_events.indexer.url else KvListening)(config, fleet, registry)
    return Knowledge(config, fleet, registry) if config.tokens.models else None


def scrape_options(config: Config) -> ScrapeOptions:
    metrics = config.metrics
    return ScrapeOptions(
        fast_s=metrics.interval,
        idle_s=metrics.idle_interval,
        timeout_s=metrics.timeout,
        models_s=metrics.models_interval,
        backoff_cap_s=metrics.backoff_cap,
        max_rate=metrics.max_rate,
        max_page=metrics.max_page_bytes,
        token_file=metrics.token_file,
        upstream_token_file=config.gateway.upstream_token_file,
        ca_file=metrics.tls.ca_file,
        verify=metrics.tls.verify,
    )


def start_tracing(stack: AsyncExitStack, config: Config, loop: asyncio.AbstractEventLoop) -> Tracing | None:
    """Start tracing until `stack` is closed; `None` = tracing is off. Raises `ConfigError` if it is configured and
    OpenTelemetry is not installed."""
    settings = config.tracing
    if not settings.endpoint:
        return None
    try:
        provider = make_provider(
            settings.endpoint, settings.service_name, settings.timeout, lambda spans: tracing.drop(spans)
        )
    except ImportError as error:
        why = f"tracing needs OpenTelemetry ({error}): pip install 'fairlead[tracing]'"
        raise ConfigError(why, "$.tracing.endpoint") from None
    tracing = Tracing(provider.get_tracer("fairlead"), settings, Random(), loop.time, TimeOfDay(loop.time))

    sent = asyncio.Event()

    def send_rest() -> None:
        provider.shutdown()
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(sent.set)

    async def close() -> None:
        tracing.close()
        # Not `to_thread`, for which the process would wait at its end.
        Thread(target=send_rest, name="last spans", daemon=True).start()
        await set_within(sent, settings.timeout + _GRACE)

    stack.push_async_callback(close)
    log.info("tracing requests", endpoint=settings.endpoint, sample=settings.sample)
    return tracing
