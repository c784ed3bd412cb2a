"""The journal of a running scheduler: made of its settings, begun before the first event, ended after the last."""

import time
from pathlib import Path
from random import Random

from fairlead.config.recorded import record
from fairlead.config.registry import build_policy
from fairlead.config.schema import Config
from fairlead.fleet.snapshot import Snapshots
from fairlead.io.journal.directory import Directory, Full
from fairlead.io.journal.recorder import RecordedDriver, Recorder, StillClock
from fairlead.io.journal.writer import Writer
from fairlead.io.receive.driver import Driver, Observer
from fairlead.model.clock import Clock
from fairlead.model.errors import ConfigError
from fairlead.observe.journal_metrics import show_journal
from fairlead.observe.log import get
from fairlead.observe.watch import Watch
from fairlead.pipeline import Pipeline
from fairlead.wire.journal.records import Segment

log = get("journal")


class LiveJournal:
    """`clock` is the pipeline's; `driver` makes the driver; `begin` opens the files; `close` ends it."""

    def __init__(self, config: Config, clock: Clock, run: str) -> None:
        self._config = config
        self._outer = clock
        self._run = run
        self.clock = StillClock(clock)
        self.recorder = Recorder()
        self._writer: Writer | None = None

    def driver(self, pipeline: Pipeline, observer: Observer) -> RecordedDriver:
        return RecordedDriver(pipeline, self._outer, self.clock, observer, self.recorder)

    def begin(self, rng: Random, watch: Watch) -> None:
        """`rng` is the pipeline's, as it is before the first event. Raises `ConfigError`."""
        settings = self._config.journal
        wall = time.time()
        head = Segment(
            run=self._run,
            epoch=wall - self._outer.time(),
            scheduling=record(self._config),
            chance=rng.getstate(),
            beside=_beside(self._config),
            sample=settings.sample,
        )
        label = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(wall))}-{self._run}"
        stop = settings.when_full == "stop"
        try:
            directory = Directory(Path(settings.path), settings.max_bytes, settings.segment_bytes, stop, label)
            writer = Writer(
                self.recorder,
                directory,
                head,
                flush_s=settings.flush,
                fsync=settings.fsync,
                on_trouble=lambda text: log.error("the journal lacks records", path=settings.path, reason=text),
            )
            writer.start()
        except Full:
            raise ConfigError(f"{settings.path} holds maxBytes already, and whenFull is stop", "$.journal") from None
        except OSError as error:
            raise ConfigError(f"cannot write to {settings.path}: {error.strerror or error}", "$.journal.path") from None
        self._writer = writer
        show_journal(watch.metrics.registry, self.recorder.counts)

    def changed(self, config: Config) -> None:
        """Another policy is in force, from the next event on."""
        self.recorder.policy_changed(self._outer.time(), record(config))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _beside(config: Config) -> tuple[str, ...]:
    """What a replay has not."""
    found = []
    if config.kv_events.enabled:
        found.append("KV events of the engines counted too, which are not in the journal")
    if config.scheduler.address or config.canary.percent:
        found.append("a scheduler in another process or a canary decided too")
    return tuple(found)


def open_journal(config: Config, clock: Clock, run: str) -> LiveJournal | None:
    """`None` when it is off."""
    return LiveJournal(config, clock, run) if config.journal.path else None


def drive(journal: LiveJournal | None, pipeline: Pipeline, clock: Clock, observer: Observer) -> Driver:
    return Driver(pipeline, clock, observer) if journal is None else journal.driver(pipeline, observer)


def begin(journal: LiveJournal | None, config: Config, pipeline: Pipeline, rng: Random, watch: Watch) -> None:
    """To be called when all is made and nothing was decided."""
    if config.journal.path or config.journal.explain:
        pipeline.snapshot = Snapshots()
    watch.make_policy = lambda: build_policy(config)
    if journal is not None:
        journal.begin(rng, watch)
