"""Who decides in this process: the policy of the file, schedulers in other processes, and the canary.

Rules
* A scheduler whose settings have not changed keeps its connection, its counts and its breaker through a reload.
* A name stands for one connection: `scheduler` (the primary), `canary`, and the names of shadows.
"""

import asyncio

from msgspec import Struct

from fairlead.config.choosers import SchedulerSettings
from fairlead.config.choosing import build_entry
from fairlead.config.flow import able_by
from fairlead.config.schema import Config
from fairlead.fleet.fleet import Fleet
from fairlead.io.receive.driver import Driver
from fairlead.io.remote.client import RemoteClient
from fairlead.live.remote_options import remote_options
from fairlead.observe.log import get
from fairlead.observe.watch import Watch
from fairlead.schedule.breaker import BreakerRules
from fairlead.schedule.canary import Canary
from fairlead.schedule.framework import Policy
from fairlead.schedule.parking import Parking
from fairlead.schedule.remote import RemotePolicy

log = get("scheduler")

PRIMARY, CANARY = "scheduler", "canary"


class _Kept(Struct):
    settings: SchedulerSettings
    client: RemoteClient
    policy: RemotePolicy


class Choosers:
    """`policy()` at the start and after each reload, then `start()`."""

    def __init__(self, fleet: Fleet, driver: Driver, watch: Watch) -> None:
        self.remotes: dict[str, RemotePolicy] = {}
        self.canary: Canary | None = None
        self._fleet = fleet
        self._driver = driver
        self._report = watch.on_plugin_error
        self._metrics = watch.choosers
        self._metrics.remotes = lambda: self.remotes
        self._metrics.canary = lambda: self.canary
        self._kept: dict[str, _Kept] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def policy(self, config: Config, built: Policy) -> Policy:
        """What decides, where `built` is the policy of the file. Raises `PluginError` or `ConfigError`."""
        canary = config.canary
        other = build_entry(canary.policy, config, self._report) if canary.policy and canary.percent else built
        wanted = {PRIMARY: (config.scheduler, built)} if config.scheduler.address else {}
        if canary.scheduler is not None and canary.percent:
            wanted[CANARY] = (canary.scheduler, built)
        made = {name: self._remote(name, *pair, config) for name, pair in wanted.items()}
        for name in [name for name in self._kept if name not in wanted]:
            self._drop(name)
        self.remotes = made
        parking = self._driver.pipeline.parking
        if parking is None and made:
            parking = self._driver.pipeline.parking = Parking()
        if parking is not None:
            parking.remotes = made
        primary: Policy = made.get(PRIMARY, built)
        second: Policy = made.get(CANARY, other)
        if canary.percent and (canary.policy or canary.scheduler is not None):
            self.canary = Canary(primary, second, canary.percent, self._report)
            return self.canary
        self.canary = None
        return primary

    def start(self) -> None:
        """Connect to those that are new."""
        for kept in self._kept.values():
            kept.client.start()

    async def close(self) -> None:
        for name in list(self._kept):
            self._drop(name)
        if self._closing:
            await asyncio.gather(*self._closing)

    def _remote(self, name: str, settings: SchedulerSettings, fallback: Policy, config: Config) -> RemotePolicy:
        kept = self._kept.get(name)
        if kept is not None and kept.settings == settings:
            kept.policy.fallback, kept.policy.able = fallback, able_by(config, fallback)
            return kept.policy
        options = remote_options(name, settings, config)
        if kept is not None:
            self._drop(name)
        breaker = BreakerRules(failures=settings.breaker.failures, cooldown=settings.breaker.cooldown)
        policy = RemotePolicy(name, fallback, able_by(config, fallback), settings.budget, breaker)
        policy.on_answer = self._metrics.took(name).observe

        def told(what: str, why: str) -> None:
            tell = log.info if "is connected" in what else log.warning
            tell(what, scheduler=name, reason=why)

        client = RemoteClient(options, self._fleet, self._driver.feed, told)
        self._kept[name] = _Kept(settings, client, policy)
        self._driver.remotes[name] = client.ask
        return policy

    def _drop(self, name: str) -> None:
        kept = self._kept.pop(name)
        self._driver.remotes.pop(name, None)
        task = asyncio.ensure_future(kept.client.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
