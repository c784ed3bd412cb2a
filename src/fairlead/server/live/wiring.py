"""All parts of a running scheduler, made from a configuration in the order in which they need each other.

How the parts are connected
* The gateway's sessions, the scraper, connections to other schedulers, and shadows feed events to the driver.
* The driver has the pipeline handle them and carries out its instructions: routes and rejections go back to the
  sessions, questions to the connections, cases to the shadows, records to the watch (metrics, journal page, log).
* A reload is an event too (`Reconfigured`). What the pipeline makes of it is carried out by `PoolScheduler`.
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
from urllib.parse import urlsplit

from msgspec import Struct

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
from fairlead.core.errors import ConfigError, Unavailable
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
from fairlead.core.scheduler import Pipeline
from fairlead.core.tokens import TokenEstimator
from fairlead.gateway.answers import Answers
from fairlead.gateway.driver import Driver, Handlers
from fairlead.gateway.host import Host
from fairlead.gateway.session import Inspection
from fairlead.gateway.understand import Understanding
from fairlead.pool.scrape import Pace, ScrapeOptions, Scraper
from fairlead.pool.served_models import ServedModels
from fairlead.server.files import Held
from fairlead.server.journal.recorder import RecordedDriver, Recorder, StillClock
from fairlead.server.journal.records import Segment
from fairlead.server.journal.writer import Directory, Writer, label
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
    show_warming,
)
from fairlead.server.observe.exposition import Registry
from fairlead.server.observe.log import get
from fairlead.server.observe.tracing import Sampling, Tracing, make_provider
from fairlead.server.observe.watch import POOL, Watch
from fairlead.server.replicas import RUN_DIGITS, Facts, Replicas
from fairlead.server.replicas_files import FileReplicas
from fairlead.server.replicas_valkey import ValkeyReplicas
from fairlead.server.running_gateway import NONE_RUNS, RunningGateway
from fairlead.server.state import StateFile


class LoopClock:
    """The event loop's clock, without asyncio's Python function: it is read several times per request."""

    time = staticmethod(time.monotonic)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.call_at = loop.call_at


class TimeOfDay:
    """What to add to a clock to get seconds since 1970. It stays the same, unless the system's clock was set."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._offset = time.time() - now()

    def __call__(self) -> float:
        offset = time.time() - self._now()
        if abs(offset - self._offset) > _CLOCK_SET_S:
            self._offset = offset
        return self._offset


#: Seconds of difference from which on the system's clock was set.
_CLOCK_SET_S = 1.0


# The journal of a running scheduler: `begin` before the first event, `close` after the last.


class LiveJournal:
    """`clock` and `rng` are those of the pipeline. `begin` opens the files; `close` ends the journal."""

    def __init__(self, config: Config, clock: Clock, run: str, rng: Random, registry: Registry) -> None:
        self._config = config
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
            directory = Directory(path, settings.max_bytes, settings.segment_bytes, stop, named)
            writer = Writer(
                self.recorder,
                directory,
                head,
                epoch=TimeOfDay(self._outer.time),
                flush_s=settings.flush,
                fsync=settings.fsync,
                on_trouble=lambda text: log.error("the journal is missing records", path=settings.path, reason=text),
            )
            writer.start()
        except OSError as error:
            kind = Unavailable if isinstance(error, Held) else ConfigError
            raise kind(f"cannot write to {settings.path}: {error.strerror or error}", "$.journal.path") from None
        self._writer = writer

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


#: Seconds beyond the timeout that sending the last spans may take at the end.
_GRACE = 1.0

log = get("tracing")


class Core(Struct):
    """Complete once it is made. Nothing in it listens on a port, is connected or has handled an event."""

    fleet: Fleet
    scraper: Scraper
    served: ServedModels
    watch: Watch
    kv: Knowledge | None
    builder: SchedulingBuilder
    journal: LiveJournal | None
    #: Learned state on disk; `None` = it is not kept.
    state: StateFile | None
    #: Other replicas that schedule for the same pool; `None` = none are informed.
    replicas: Replicas | None
    pipeline: Pipeline
    connections: Connections
    shadows: LiveShadows
    driver: Driver
    inspection: Inspection
    host: Host
    #: Sends shared beginnings to cold endpoints; `None` = warming is off.
    warming: Warming | None


def wire(
    config: Config,
    loop: asyncio.AbstractEventLoop,
    tracing: Tracing | None,
    adopt: Callable[[AdoptConfiguration], object],
    refuse: Callable[[RefuseConfiguration], object],
    counts_fallbacks: bool = True,
    one_of: Pace | None = None,
    gateway: RunningGateway = NONE_RUNS,
) -> Core:
    """`adopt` and `refuse` receive the outcome of a `Reconfigured`. For the rest, and errors, see `PoolScheduler`."""
    check_schedulers(config)
    rng, run, clock = Random(config.seed), secrets.token_hex(RUN_DIGITS // 2), LoopClock(loop)
    inspection = Inspection(config.inspect.usage_sampling, Random(rng.random()), clock.time)
    fleet, tokens = _fleet(config), TokenEstimator()

    def feed(event: Event) -> None:  # for parts that are made before the driver
        deliver(event)

    connections, shadows = Connections(fleet, feed), LiveShadows(fleet, feed)
    scraper, served, watch = _observers(config, loop, fleet, feed, shadows, tracing, counts_fallbacks, one_of)
    kv = knowledge(config, fleet, watch.metrics.registry)
    builder = SchedulingBuilder(watch.on_plugin_error, on_answer=lambda name: watch.choosers.took(name).observe)
    journal = LiveJournal(config, clock, run, rng, watch.metrics.registry) if config.journal.path else None
    pipeline = build_pipeline(
        config,
        clock if journal is None else journal.clock,
        rng,
        build=builder,
        fleet=fleet,
        tokens=tokens,
        on_plugin_error=watch.on_plugin_error,
        snapshots=bool(config.journal.path or config.journal.explain),
    )
    watch.watch_queue(pipeline.flow_controller)
    understanding = _understanding(config, tokens, clock.time, watch, kv, tracing)
    registry, warming = watch.metrics.registry, None
    if isinstance(understanding, Noticing):
        warming = Warming(config.warming.tokens, fleet, understanding, feed, clock.time)
        show_warming(registry, warming.counts)
    handlers: Handlers = {
        AskRemote: connections.ask,
        JudgeShadows: shadows.judge,
        ListAdapters: lambda asked: served.look(asked.endpoint_id),
        WarmUp: warming.warm if warming is not None else lambda asked: None,
        ShadowRecord: watch.shadows.on_shadow,
        StallRecord: watch.on_stall,
        AdoptConfiguration: adopt,
        RefuseConfiguration: refuse,
    }
    driver = Driver(pipeline, clock, watch, handlers)
    if journal is not None:
        driver = RecordedDriver(pipeline, clock, journal.clock, watch, journal.recorder, handlers)
    inspected = inspection if kv is None else kv.inspecting(inspection)
    shared = config, pipeline, driver, clock, registry
    replicas = _replicas(gateway, run, scraper, watch, *shared)
    deliver = replicas.feed if isinstance(replicas, FileReplicas) else driver.feed
    host = _host(config, clock.time, run, driver, understanding, watch, inspected, served, deliver)
    parts = fleet, scraper, served, watch, kv, builder, journal, _state_file(*shared), replicas
    return Core(*parts, pipeline, connections, shadows, driver, inspection, host, warming)


def _understanding(
    config: Config,
    tokens: TokenEstimator,
    now: Callable[[], float],
    watch: Watch,
    kv: Knowledge | None,
    tracing: Tracing | None,
) -> Understanding:
    settings = config.warming
    make = partial(Noticing, Beginnings(settings.shared, settings.max_bytes)) if settings.enabled else Understanding
    return make(
        tokens,
        build_hasher(config),
        now,
        conversations=config.parsing.conversations,
        trusted=config.trusted,
        parse=build_parse(config, watch.on_plugin_error),
        prompts=kv.prompts if kv is not None else None,
        trace=tracing.arrived if tracing is not None else None,
    )


def _fleet(config: Config) -> Fleet:
    kind = SharedFleet if config.replicas.via else Fleet
    zone, node = config.topology.zone, config.topology.node
    places = (
        (ZONE_LABEL, zone.own or os.environ.get("ZONE", ""), zone.cost * 1e3),
        (NODE_LABEL, node.own or os.environ.get("NODE_NAME", ""), node.cost * 1e3),
    )
    topology = Topology(tuple(place for place in places if place[1]))
    return kind(config.ledger.lease_ttl, config.metrics.staleness, exact=exact_knowledge(config), topology=topology)


def _state_file(
    config: Config, pipeline: Pipeline, driver: Driver, clock: Clock, registry: Registry
) -> StateFile | None:
    """The file of learned state; `None` = none is kept."""
    path = config.state.path(config.journal)
    if not path:
        return None
    state = StateFile(Path(path), config.state, pipeline, build_hasher(config), driver.feed, clock.time)
    show_state(registry, state.counts)
    return state


def _replicas(
    gateway: RunningGateway,
    run: str,
    scraper: Scraper,
    watch: Watch,
    config: Config,
    pipeline: Pipeline,
    driver: Driver,
    clock: Clock,
    registry: Registry,
) -> Replicas | None:
    """The link to other replicas; `None` = there is none. Raises `ConfigError` if Valkey's client is not installed."""
    settings, fleet = config.replicas, pipeline.fleet
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
    )
    pool = settings.pool or "/".join(filter(None, (config.kubernetes.namespace, config.kubernetes.pool))) or POOL
    origin = f"{gethostname()}-{gateway.mark}{run}"
    kind = FileReplicas if urlsplit(settings.via).scheme == "file" else ValkeyReplicas
    replicas = kind(settings, pool, origin, facts, driver.feed, scraper.share)
    replicas.expect(gateway.worker, gateway.workers)
    show_replicas(registry, replicas)
    watch.watch_peers(peers.load, lambda: bool(replicas.problem))
    return replicas


def _observers(
    config: Config,
    loop: asyncio.AbstractEventLoop,
    fleet: Fleet,
    feed: Callable[[Event], None],
    shadows: LiveShadows,
    tracing: Tracing | None,
    counts_fallbacks: bool,
    pace: Pace | None,
) -> tuple[Scraper, ServedModels, Watch]:
    """The scraper, the reader of model lists, and the watch, which wakes the scraper and reports what it finds."""
    scraper = Scraper(
        loop,
        feed,
        engine_table(config.metrics),
        scrape_options(config),
        default_engine=config.metrics.default_engine,
        report=lambda endpoint, lacks: watch.on_page(endpoint, lacks),
        measure=build_measure(config, lambda error: watch.on_plugin_error(error)),
        silence=lambda endpoint, reason: watch.on_silence(endpoint, reason),
        pace=pace,
    )
    served = ServedModels(loop, feed, scrape_options(config), pace=pace)
    scaling = config.autoscaling
    watch = Watch(
        fleet,
        loop.time,
        pool_label(config, pace is not None),
        on_routed=scraper.wake,
        awake=scraper.awake,
        tracing=tracing,
        scrapes=scraper.stats,
        served=served.names,
        skipped=shadows.skipped,
        cut=shadows.cut,
        counts_fallbacks=counts_fallbacks,
        one_of_several=pace is not None,
        objective=Objective(ttft_ms=scaling.ttft * 1e3, tpot_ms=scaling.tpot * 1e3, startup_s=scaling.startup),
    )
    return scraper, served, watch


def pool_label(config: Config, one_of_several: bool) -> str:
    """The pool's name in metrics and on pages."""
    kubernetes = config.kubernetes
    return f"{kubernetes.namespace}/{kubernetes.pool}" if one_of_several else kubernetes.pool or POOL


def _host(
    config: Config,
    now: Callable[[], float],
    run: str,
    driver: Driver,
    understanding: Understanding,
    watch: Watch,
    inspect: Callable[[bool], bool],
    served: ServedModels,
    feed: Callable[[Event], None],
) -> Host:
    answers = Answers(run, config.gateway.retry)
    watch.naming(answers.lease)
    tells = "test-selection" in config.headers.trust
    max_body = config.parsing.max_body_bytes
    return Host(driver, understanding, answers, watch, now, max_body, inspect, tells, served.union, feed)


def knowledge(config: Config, fleet: Fleet, registry: Registry) -> Knowledge | None:
    """What is known of prompts; `None` = their bytes only."""
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
        ca_file=metrics.tls.ca_file,
        verify=metrics.tls.verify,
    )


def start_tracing(stack: AsyncExitStack, config: Config, loop: asyncio.AbstractEventLoop) -> Tracing | None:
    """`None` = tracing is off. Raises `ConfigError` if it is configured and OpenTelemetry is not installed."""
    settings = config.tracing
    if not settings.endpoint:
        return None
    try:
        provider = make_provider(settings.endpoint, settings.service_name, settings.timeout)
    except ImportError as error:
        why = f"tracing needs OpenTelemetry ({error}): pip install 'fairlead[tracing]'"
        raise ConfigError(why, "$.tracing.endpoint") from None
    sampling = Sampling(settings.sample, settings.follow_parent, settings.max_rate)
    tracing = Tracing(provider.get_tracer("fairlead"), sampling, Random(), loop.time, TimeOfDay(loop.time))

    async def close() -> None:
        tracing.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(provider.shutdown), settings.timeout + _GRACE)

    stack.push_async_callback(close)
    log.info("tracing requests", endpoint=settings.endpoint, sample=settings.sample)
    return tracing
