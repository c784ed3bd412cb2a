"""The embedded gateway's process: start, drain, end. This module is all that a supervising process has to import.

The files that it needs are written before, see `gateway.prepare`.
"""

import asyncio
import contextlib
import json
import logging
import os
import shutil
from collections.abc import Coroutine, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fairlead.gateway.directories import lock_directory
from fairlead.gateway.envoy.admin import LISTENER, EnvoyAdmin, GatewayError
from fairlead.gateway.envoy.supervisor import Supervisor
from fairlead.gateway.memory import raise_file_limit

log = logging.getLogger("fairlead.gateway")

#: Files in the gateway's directory. Each Envoy has its own two of the first line, by number.
ADMIN_SOCKET, BOOTSTRAP = "admin-{}.sock", "bootstrap-{}.json"
ENDPOINTS, KEYS, JWT, UPSTREAM = "endpoints.json", "keys.json", "jwt.json", "upstream.json"
JWKS_CA = "jwks-ca.json"
#: The directory in the gateway's one where workers tell each other what they do.
FACTS = "facts"
#: What the configuration file contained at the start, and when a scheduler could use it last.
CONFIG, LAST_CONFIG = "config.yaml", "last-config.yaml"
#: The last addresses of the host names of endpoints.
NAMES = "names.json"
#: The current listeners, and those to open when clients may connect.
LISTENERS, LISTENERS_LATER = "listeners.json", "listeners-later.json"
#: Is in a directory that was removed and made again: Envoys that run watch the old one and notice nothing in the new.
UNWATCHED = "unwatched"
#: The prefix of the metrics of the client listener.
STAT_PREFIX = LISTENER
_ACTIVE = rf"^http\.{STAT_PREFIX}\.downstream_rq_active$"
_POLL = 0.05
#: Seconds between SIGTERM and the end of listening. Connections that Envoy has not accepted when it closes the listener
#: are reset, so a request sent just before SIGTERM needs time to be accepted.
_LAME_DUCK = 0.25
_T = TypeVar("_T")


class GatewayProcess:
    """One or several running Envoys between `start` and `stop`, which all accept connections from one port
    (SO_REUSEPORT). Belongs to one event loop."""

    def __init__(
        self,
        directory: str,
        commands: list[list[str]],
        admins: list[str],
        last_log: float,
        start_timeout: float,
        scheduler_timeout: float = 0.0,
        schedulers: int = 1,
    ) -> None:
        """`directory` is removed at the end. `admins`: for each of `commands`, see `EnvoyAdmin.from_address`.
        `last_log`: seconds until the last entries of the access log are sent. `scheduler_timeout`: seconds to wait for
        all `schedulers` before the gateway listens for clients."""
        self._directory = Path(directory)
        self._lock = -1
        self._last_log = last_log
        self._start_timeout, self._scheduler_timeout = start_timeout, scheduler_timeout
        self._schedulers = schedulers
        self.admins = [EnvoyAdmin.from_address(where) for where in admins]
        alone = len(commands) == 1
        self.supervisors = [
            Supervisor(
                command,
                admin,
                name="the gateway" if alone else f"Envoy {number + 1} of {len(commands)}",
                start_timeout=start_timeout,
                on_restart=partial(self._before_restart, number),
            )
            for number, (command, admin) in enumerate(zip(commands, self.admins, strict=True))
        ]
        #: Files without which no Envoy or scheduler starts again as before, as they were at the start.
        self._kept: dict[Path, bytes] = {}
        #: The address for clients, e.g. `127.0.0.1:8080`; empty before `start`.
        self.address = ""

    async def start(self) -> None:
        """Start, and return when requests are served. Raises `GatewayError`."""
        raise_file_limit()  # inherited by Envoy, which needs two descriptors per request
        try:
            self._take_lock()
            await _all(envoy.start() for envoy in self.supervisors)
            if self._scheduler_timeout:
                await self._wait_for_scheduler()
            host, port = await self._listen()
        except BaseException as error:
            await self.stop(0.0)
            if isinstance(error, OSError):
                raise GatewayError(f"Envoy's admin page does not answer: {error}") from error
            raise
        self._keep_port(port)
        numbers = range(len(self.supervisors))
        names = (LISTENERS, ENDPOINTS, CONFIG, *(BOOTSTRAP.format(number) for number in numbers))
        paths = (self._directory / name for name in names)
        self._kept = {path: path.read_bytes() for path in paths if path.exists()}
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        log.info(
            "the gateway is listening on %s, pid %s",
            self.address,
            ", ".join(str(envoy.pid) for envoy in self.supervisors),
        )

    def _take_lock(self) -> None:
        """Lock the directory: Envoy is restarted from its files. systemd-tmpfiles removes old files of /tmp, but
        nothing from a locked directory (tmpfiles.d(5)), nor do other gateways that start."""
        lock = lock_directory(self._directory)
        self._unlock()
        self._lock = lock

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    async def _wait_for_scheduler(self) -> None:
        """Wait until Envoy would query it. Until then, model names would not be mapped, and rules would not apply."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._scheduler_timeout):
                while not all([await admin.asks_scheduler(self._schedulers) for admin in self.admins]):
                    await asyncio.sleep(_POLL)
                return
        log.warning("no answer from the scheduler after %g s, serving without it", self._scheduler_timeout)

    async def _listen(self) -> tuple[str, int]:
        os.replace(self._directory / LISTENERS_LATER, self._directory / LISTENERS)
        return (await _all(self._listens(envoy) for envoy in self.supervisors))[0]

    async def _listens(self, envoy: Supervisor) -> tuple[str, int]:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._start_timeout):
                while not envoy.cannot_bind:
                    where = await envoy.admin.address(LISTENER)
                    if where is not None:
                        return where
                    await asyncio.sleep(_POLL)
        raise GatewayError(envoy.explain())

    def _keep_port(self, port: int) -> None:
        """Keep the port for restarts, even if any free port was requested. Envoy only notices files that are moved, so
        this change has no effect yet."""
        path = self._directory / LISTENERS
        listeners: Any = json.loads(path.read_text(encoding="utf-8"))
        where = listeners["resources"][0]["address"]["socket_address"]
        if where["port_value"] != port:
            where["port_value"] = port
            path.write_text(json.dumps(listeners), encoding="utf-8")

    def _before_restart(self, number: int) -> None:
        (self._directory / ADMIN_SOCKET.format(number)).unlink(missing_ok=True)
        self.write_again()
        (self._directory / UNWATCHED).unlink(missing_ok=True)

    def write_again(self) -> None:
        """Write files again that somebody has removed, as cleaners of /tmp do. The first scheduler that runs brings the
        endpoints up to date."""
        for path, content in self._kept.items():
            if not path.exists():
                log.warning("%s was removed, and is written again; keep cleaners away from it", path)
                with contextlib.suppress(OSError):
                    if not self._directory.exists():
                        self._directory.mkdir(mode=0o700)
                        (self._directory / UNWATCHED).touch()
                    self._take_lock()  # it may be another directory by now
                    path.write_bytes(content)

    async def stop(self, grace: float = 30.0) -> None:
        """Accept nothing new, let running requests finish for at most `grace` seconds, then end. Never raises."""
        self._kept = {}
        await _all(self._stop(envoy, grace) for envoy in self.supervisors)
        shutil.rmtree(self._directory, ignore_errors=True)
        self._unlock()

    async def _stop(self, envoy: Supervisor, grace: float) -> None:
        if grace > 0 and envoy.pid:
            with contextlib.suppress(OSError, TimeoutError):
                await self._drain(envoy.admin, grace)
        await envoy.stop()

    async def _drain(self, admin: EnvoyAdmin, grace: float) -> None:
        await admin.post("/healthcheck/fail")  # from now on, answers say `connection: close`
        await asyncio.sleep(min(_LAME_DUCK, grace))
        await admin.post("/drain_listeners")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                while any((await admin.stats(_ACTIVE)).values()):
                    await asyncio.sleep(_POLL)
        await asyncio.sleep(self._last_log)


async def _all(ones: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """The results of the coroutines, after all have ended. Raises the first error."""
    results = await asyncio.gather(*ones, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results  # type: ignore[return-value]
