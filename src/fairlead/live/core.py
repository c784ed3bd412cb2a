"""The pure core and what listens to it, built from a configuration."""

import asyncio
import secrets
from random import Random

from fairlead.config.flow import build_desk
from fairlead.config.registry import build_hasher, build_parse, build_policy
from fairlead.config.schema import Config
from fairlead.fleet.fleet import Fleet
from fairlead.io.receive.answers import Answers
from fairlead.io.receive.session import Host
from fairlead.io.receive.understand import Understanding
from fairlead.live.choosers import Choosers
from fairlead.live.journal import begin, drive, open_journal
from fairlead.live.knowing import knowledge
from fairlead.live.sampling import sampler
from fairlead.live.shadows import LiveShadows
from fairlead.observe.watch import POOL, Watch
from fairlead.parse.tokens import TokenEstimator
from fairlead.pipeline import Pipeline


class Core:
    """Fleet, pipeline, driver, and the host of the gateway's streams. Nothing here listens on a port."""

    def __init__(self, config: Config, loop: asyncio.AbstractEventLoop) -> None:
        rng = Random(config.seed)
        self.fleet = Fleet(lease_ttl=config.ledger.lease_ttl, staleness=config.metrics.staleness)
        self.watch = Watch(self.fleet, loop.time, config.kubernetes.pool or POOL)
        self.kv = knowledge(config, self.fleet, self.watch.metrics.registry)
        tokens = TokenEstimator()
        policy = build_policy(config, self.watch.on_plugin_error)
        desk = build_desk(config, policy, self.watch.on_plugin_error)
        run = secrets.token_hex(4)
        self.journal = open_journal(config, loop, run)
        clock = loop if self.journal is None else self.journal.clock
        self.pipeline = Pipeline(clock, rng, self.fleet, policy, tokens, self.watch.on_plugin_error, desk)
        self.watch.watch_queue(desk)
        self.driver = drive(self.journal, self.pipeline, loop, self.watch)
        self.choosers = Choosers(self.fleet, self.driver, self.watch)
        self.pipeline.policy = self.choosers.policy(config, policy)
        self.shadows = LiveShadows(self.fleet, self.driver, self.watch)
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
            Answers(run),
            self.watch,
            loop.time,
            config.parsing.max_body_bytes,
            sampler(config.inspect.usage_sampling, Random(rng.random()), loop.time),
        )
        self.host.tells_served = "test-selection" in config.headers.trust
        if self.kv is not None:
            self.kv.serve(self.host)
        self.watch.naming(self.host.answers.lease)
        begin(self.journal, config, self.pipeline, rng, self.watch)
