"""Connections to schedulers in other processes that decide instead of this one, one for each name in the configuration.

Rules
* A scheduler whose settings have not changed keeps its connection through a reload.
* There is one connection per name: `scheduler` (the primary) and `canary`. Shadows have their own (`live.shadows`).
"""

import asyncio
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from fairlead.config.building import schedulers
from fairlead.config.schema import Config, SchedulerSettings
from fairlead.core.events import Event
from fairlead.core.fleet import Fleet
from fairlead.core.instructions import AskRemote
from fairlead.server.observe.log import get
from fairlead.server.observe.watch import Listener
from fairlead.server.remote.client import RemoteClient
from fairlead.server.remote.stream import check_tls

log = get("scheduler")


class Connections(Struct, eq=False):
    """Call `follow(config)` at the start and after each reload, `await close()` at the end."""

    _fleet: Fleet
    _feed: Callable[[Event], None]
    _open: dict[str, tuple[SchedulerSettings, RemoteClient]] = {}
    _closing: set[asyncio.Task[None]] = set()

    def ask(self, question: AskRemote) -> None:
        """Send a question to its scheduler. Without a connection of that name it gets no answer, and its deadline
        passes."""
        connection = self._open.get(question.remote)
        if connection is not None:
            connection[1].ask(question)

    def listeners(self) -> list[Listener]:
        """What takes the ends of requests, whoever decided them, to the schedulers."""
        return [client.hear for _, client in self._open.values()]

    def unheard(self) -> dict[str, int]:
        """The number of outcomes that a scheduler was too slow for, by name."""
        return {name: client.unheard for name, (_, client) in self._open.items()}

    def follow(self, config: Config) -> None:
        """Open connections that are new in `config` and close those that it no longer has. `check_schedulers(config)`
        must have passed."""
        wanted = schedulers(config)
        for name, (settings, _) in list(self._open.items()):
            if wanted.get(name) != settings:
                self._leave(name)
        for name, settings in wanted.items():
            if name not in self._open:
                client = RemoteClient(name, settings, self._fleet, self._feed, _teller(name), **of_gateway(config))
                self._open[name] = settings, client
                client.start()

    async def close(self) -> None:
        for name in list(self._open):
            self._leave(name)
        await asyncio.gather(*self._closing)

    def _leave(self, name: str) -> None:
        _, client = self._open.pop(name)
        task = asyncio.ensure_future(client.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _teller(name: str) -> Callable[[str, str], None]:
    def notify(what: str, why: str) -> None:
        tell = log.info if "is connected" in what else log.warning
        tell(what, scheduler=name, reason=why)

    return notify


def check_schedulers(config: Config) -> None:
    """Raise `ConfigError` if the TLS files of a remote scheduler or a remote shadow cannot be used."""
    for settings in (*schedulers(config).values(), *(shadow.scheduler for shadow in config.shadows.policies)):
        if settings is not None and settings.tls is not None:
            check_tls(settings.tls)


def of_gateway(config: Config) -> dict[str, Any]:
    """The arguments of `RemoteClient` that tell a scheduler about the gateway that asks it."""
    pool = config.models.pool or config.kubernetes.pool or "default"
    return {"pool": pool, "max_endpoints": max(config.ext_proc.max_endpoints, 2)}
