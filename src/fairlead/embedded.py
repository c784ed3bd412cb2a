"""The embedded gateway: a parent with two children, Envoy and the scheduler, neither of which needs the other to live.

    fairlead serve ──┬── Envoy        serves clients, asks the scheduler, balances plainly without it
                     └── scheduler    the same command with --scheduler-only

The parent does nothing but keep both running, so that a scheduler which dies or hangs costs no request: Envoy goes on
with the endpoints that the parent tells it, and a new scheduler is asked again within about a second. Both children end
with the parent, even when it is killed (see `io.envoy.launcher`).
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fairlead.config.reload import plan_reload
from fairlead.config.schema import Config
from fairlead.io.config_file import ConfigFile
from fairlead.io.discovery import follow_endpoints
from fairlead.io.endpoint_set import EndpointSet
from fairlead.io.envoy import launcher
from fairlead.io.envoy.gateway import Gateway
from fairlead.io.envoy.options import Options, Tls
from fairlead.live import DRAIN_SECONDS, ENDING
from fairlead.live.kube import follow_pool
from fairlead.live.past import requests_past
from fairlead.model.errors import FairleadError
from fairlead.model.events import EndpointDown, EndpointUp
from fairlead.observe.log import get
from fairlead.wire.endpoint_list import Listing
from fairlead.wire.kube_pool import H2C

log = get("serve")

#: Seconds before a scheduler that died is started again; doubled up to the cap while it keeps dying early.
_BACKOFF_FIRST, _BACKOFF_CAP = 0.1, 5.0
_HEALTHY_SECONDS = 10.0
#: Seconds after which a new scheduler has listened, and the gateway has noticed.
_ASKED_AGAIN_S = 3.0
#: Exit code of a scheduler that cannot use its configuration: starting it again helps only once the file has changed.
_WRONG_CONFIG = 2


class SchedulerFailed(FairleadError):
    """The scheduler ended at its start; it has said why."""


class Outage:
    """Counts the requests that the gateway balances from a scheduler's death until another one is asked again."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._before: int | None = None

    async def begin(self) -> None:
        """A scheduler died. If the one before had not been told of, they are one outage."""
        if self._before is None:
            self._before = await requests_past(self._gateway.admin)

    @contextlib.asynccontextmanager
    async def over(self) -> AsyncIterator[None]:
        """A scheduler runs for as long as this lasts. Tells of the outage once it has surely been asked again."""
        teller = asyncio.create_task(self._tell())
        try:
            yield
        finally:
            teller.cancel()

    async def _tell(self) -> None:
        if self._before is None:
            return
        await asyncio.sleep(_ASKED_AGAIN_S)
        now = await requests_past(self._gateway.admin)
        if now is not None and now > self._before:
            log.warning("the gateway balanced without the scheduler", requests=now - self._before)
        self._before = None


class Embedded:
    """`await run()` until a signal. `file` is the configuration, read again by the scheduler process."""

    def __init__(self, config: Config, file: Path) -> None:
        self._config = config
        self._file = file
        self._gateway = Gateway(gateway_options(config))
        self._pool: dict[str, str] = {}
        self._stopping = asyncio.Event()
        self._process: Process | None = None

    async def run(self) -> None:
        """Raises `FairleadError` when a child cannot be started at all."""
        loop = asyncio.get_running_loop()
        async with contextlib.AsyncExitStack() as stack:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._stopping.set)
                stack.callback(loop.remove_signal_handler, number)
            listed = await follow_endpoints(stack, self._config.endpoints, self._endpoint, lambda problem: None)
            if listed is not None:
                # The scheduler follows the file too, and says what is wrong with it.
                file = ConfigFile(
                    self._file, lambda new: self._relist(listed, new), lambda problems: None, flags=self._config.flags
                )
                stack.push_async_callback(file.close)
                await file.start()
            if self._config.kubernetes.on:
                protocol = await follow_pool(stack, self._config.kubernetes, self._endpoint)
                self._gateway.speak_http2(protocol == H2C)
            await self._gateway.start()
            stack.push_async_callback(self._gateway.stop, 0.0)
            stack.push_async_callback(self._end_scheduler)
            keeper = asyncio.create_task(self._keep_scheduler(), name="scheduler supervisor")
            stack.callback(keeper.cancel)
            stopped = asyncio.create_task(self._stopping.wait())
            stack.callback(stopped.cancel)
            await asyncio.wait((keeper, stopped), return_when=asyncio.FIRST_COMPLETED)
            if keeper.done():
                keeper.result()
            # Clients first: while they finish, the scheduler still answers the gateway. Whoever waits is told to go.
            self._tell_scheduler()
            await self._gateway.stop(DRAIN_SECONDS)

    def _relist(self, listed: EndpointSet, new: Config) -> None:
        """The configuration lists other endpoints now: the gateway balances over them when it is on its own."""
        changes, _ = plan_reload(self._config, new)
        self._config = changes.config
        if changes.endpoints:
            listed.apply(Listing(changes.config.endpoints.static))

    def _endpoint(self, event: EndpointUp | EndpointDown) -> None:
        if isinstance(event, EndpointUp):
            self._pool[event.endpoint.id] = event.endpoint.address
        else:
            self._pool.pop(event.endpoint_id, None)
        self._gateway.set_endpoints(self._pool.values())

    async def _keep_scheduler(self) -> None:
        """One scheduler after another. Returns never; raises when the first start fails for good. Later ones may fail
        too, for the file may have changed since: then the gateway goes on without, until one can be started."""
        loop = asyncio.get_running_loop()
        pause = _BACKOFF_FIRST
        outage = Outage(self._gateway)
        first = True
        while True:
            started = loop.time()
            self._process = process = await self._spawn(self._config.flags if first else pinned(self._config))
            log.info("the scheduler runs", pid=process.pid)
            async with outage.over():
                code = await process.wait()
            if self._stopping.is_set():
                return
            if code == _WRONG_CONFIG and first:
                raise SchedulerFailed("the scheduler could not start, see above")
            first = False
            pause = _BACKOFF_FIRST if loop.time() - started > _HEALTHY_SECONDS else min(pause * 2, _BACKOFF_CAP)
            what = "cannot start with its configuration" if code == _WRONG_CONFIG else "died"
            log.error(f"the scheduler {what}; the gateway balances without it", exit_code=code, restart_in_s=pause)
            await outage.begin()
            await asyncio.sleep(pause)

    async def _spawn(self, flags: dict[str, Any]) -> Process:
        fairlead = [sys.executable, "-m", "fairlead", "serve", str(self._file), "--scheduler-only"]
        fairlead += ["--gateway-admin", self._gateway.admin_at]
        if flags:
            fairlead += ["--flags", json.dumps(flags)]
        tied = (sys.executable, "-I", "-S", str(Path(launcher.__file__)), str(os.getpid()), *fairlead)
        # A session of its own: Ctrl-C reaches only the parent, which then ends things in order.
        return await asyncio.create_subprocess_exec(*tied, start_new_session=True)

    def _tell_scheduler(self) -> None:
        """The end is near."""
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(ENDING)

    async def _end_scheduler(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(DRAIN_SECONDS + 5.0):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def pinned(config: Config) -> dict[str, Any]:
    """The flags of a scheduler that takes over: the file may tell other ports by then, which the running gateway would
    never ask."""
    flags = {name: dict(section) for name, section in config.flags.items()}
    flags.setdefault("extProc", {})["port"] = config.ext_proc.port
    flags.setdefault("als", {}).update(enabled=config.als.enabled, port=config.als.port)
    return flags


def gateway_options(config: Config) -> Options:
    """What the configuration says of the embedded gateway, in the gateway's own terms."""
    gateway, ext_proc = config.gateway, config.ext_proc
    return Options(
        host=gateway.host,
        port=gateway.port,
        admin_port=gateway.admin_port,
        ext_proc=f"127.0.0.1:{ext_proc.port}",
        als=f"127.0.0.1:{config.als.port}" if config.als.enabled else "",
        # Our own process on the loopback: its certificate is for others, and may be renewed while Envoy runs.
        tls=Tls(verify=False) if ext_proc.tls else None,
        response_mode="first-chunk" if gateway.response_mode == "streamed" else "none",
        body_limit=gateway.body_limit,
        concurrency=gateway.concurrency or os.cpu_count() or 1,
        decision_header=config.journal.header,
    )
