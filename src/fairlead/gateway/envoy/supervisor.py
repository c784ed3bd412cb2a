"""Keeps one Envoy running: starts it, reads its log, restarts it when it dies, ends it.

Envoy runs in its own session, so that Ctrl-C at a terminal reaches only us and we can drain first. The kernel ends it
with us (see `launcher`). A crash is followed by a restart after 0.2 s, which doubles up to 10 s while Envoy keeps
dying.
"""

import asyncio
import contextlib
import logging
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import deque
from collections.abc import Callable, Sequence

from fairlead.core.errors import PROCESS_LIMIT
from fairlead.gateway.envoy.admin import EnvoyAdmin, GatewayError
from fairlead.gateway.envoy.binary import explain, parse
from fairlead.gateway.envoy.launcher import tied

log = logging.getLogger("fairlead.gateway")
access = logging.getLogger("fairlead.gateway.access")

BACKOFF_FIRST, BACKOFF_CAP = 0.2, 10.0
#: A process that ran this long was healthy: the delay before its next restart is the first one again.
HEALTHY_SECONDS = 30.0
_POLL = 0.02
_KILL_AFTER = 3.0
_TAIL_LINES = 40
_MAX_LINE = 16_384


class Supervisor:
    """Runs one Envoy after another. `command` starts it; `admin` is its admin page."""

    def __init__(
        self,
        command: Sequence[str],
        admin: EnvoyAdmin,
        *,
        name: str = "the gateway",
        start_timeout: float = 20.0,
        kill_after: float = _KILL_AFTER,
        on_restart: Callable[[], None],
    ) -> None:
        """`name`: for the log. `kill_after`: seconds for it to end by itself. `on_restart` is called after each
        unexpected death, before the next start."""
        self.command = tuple(command)
        self.admin = admin
        self._name = name
        self._start_timeout = start_timeout
        self._kill_after = kill_after
        self._on_restart = on_restart
        self._process: Process | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._keeper: asyncio.Task[None] | None = None
        self._stopping = False
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        #: The number of unexpected deaths.
        self.restarts = 0

    @property
    def pid(self) -> int:
        """The process id of the running Envoy; 0 if none runs."""
        return 0 if self._process is None or self._process.returncode is not None else self._process.pid

    async def start(self) -> None:
        """Start, and return when Envoy serves. Raises `GatewayError` if it does not; no process then runs."""
        try:
            await self._spawn_whole()
            await self._wait_ready()
        except BaseException:
            await self._end(0.0)
            raise
        self._keeper = asyncio.create_task(self._keep(), name="gateway supervisor")

    async def stop(self) -> None:
        """End it now. Draining is the caller's task."""
        self._stopping = True
        try:
            if self._keeper is not None:
                self._keeper.cancel()
                await asyncio.gather(self._keeper, return_exceptions=True)
                self._keeper = None
        finally:
            await self._end(self._kill_after)

    @property
    def cannot_bind(self) -> bool:
        """Whether Envoy said that it cannot open its listener. It runs on without one."""
        return any("cannot bind" in line for line in self._tail)

    def explain(self) -> str:
        """Why Envoy does not work, from its last output."""
        return explain(self._tail)

    # ---- one Envoy ----

    async def _spawn_whole(self) -> None:
        """Complete a start even if it is cancelled; otherwise it would leave an unknown process running."""
        spawn = asyncio.ensure_future(self._spawn())
        try:
            await asyncio.shield(spawn)
        except asyncio.CancelledError:
            await spawn
            raise

    async def _spawn(self) -> None:
        self._tail.clear()
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *tied(*self.command), stdin=DEVNULL, stdout=PIPE, stderr=PIPE, start_new_session=True
            )
        except (BlockingIOError, RuntimeError) as error:  # no process, or no thread that waits for it
            raise GatewayError(f"Envoy cannot be started: {PROCESS_LIMIT}") from error
        except OSError as error:
            raise GatewayError(f"Envoy cannot be started: {error}") from error
        assert process.stdout is not None and process.stderr is not None
        self._readers = [
            asyncio.create_task(_lines(process.stderr, self._logged)),
            asyncio.create_task(_lines(process.stdout, access.info)),
        ]

    async def _wait_ready(self) -> None:
        process = self._process
        assert process is not None
        try:
            async with asyncio.timeout(self._start_timeout):
                while process.returncode is None:
                    with contextlib.suppress(OSError, TimeoutError):
                        if await self.admin.ready(self.command):
                            return
                    await asyncio.sleep(_POLL)
        except TimeoutError:
            words = "\n".join(self._tail) or "(it said nothing)"
            raise GatewayError(f"Envoy is not ready after {self._start_timeout:g} s:\n{words}") from None
        await self._drained()
        raise GatewayError(explain(self._tail, process.returncode))

    async def _end(self, grace: float) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            _signal(process, signal.SIGTERM if grace > 0 else signal.SIGKILL)
            try:
                async with asyncio.timeout(grace or None):
                    await process.wait()
            except TimeoutError:
                log.warning("Envoy did not exit in time, killing it")
                _signal(process, signal.SIGKILL)
                await process.wait()
        await self._drained()

    async def _drained(self) -> None:
        """Wait for the last lines of its output."""
        if self._readers:
            await asyncio.wait(self._readers, timeout=1.0)
            for reader in self._readers:
                reader.cancel()
            self._readers = []

    # ---- restarts ----

    async def _keep(self) -> None:
        delay = BACKOFF_FIRST
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            assert self._process is not None
            code = await self._process.wait()
            await self._drained()
            if loop.time() - started >= HEALTHY_SECONDS:
                delay = BACKOFF_FIRST
            self.restarts += 1
            self._on_restart()
            log.error("%s died, restarting it in %.1f s: %s", self._name, delay, explain((), code))
            await asyncio.sleep(delay)
            delay = min(2 * delay, BACKOFF_CAP)
            try:
                await self._spawn_whole()
                await self._wait_ready()
                log.warning("%s is back, pid %d", self._name, self.pid)
            except GatewayError as error:
                log.error("%s cannot be restarted: %s", self._name, error)
                await self._end(0.0)

    def _logged(self, line: str) -> None:
        self._tail.append(line)
        parsed = parse(line)
        if parsed is None:
            log.log(logging.DEBUG if _OWN_LIMIT in line else logging.WARNING, "envoy: %s", line)
        else:
            level, component, text = parsed
            if self._stopping:
                level = min(level, logging.INFO)  # "caught SIGTERM" is expected
            log.log(level, "envoy %s: %s", component, text)


#: tcmalloc's warning at our own `soft_memory_limit_bytes`, which only makes it give memory back: none is short.
_OWN_LIMIT = "Couldn't respect usage limit"


async def _lines(stream: asyncio.StreamReader, take: Callable[[str], None]) -> None:
    """Call `take` for each line. Long lines are accepted, but cut off."""
    unfinished = b""
    while data := await stream.read(65_536):
        *lines, unfinished = (unfinished + data).split(b"\n")
        unfinished = unfinished[:_MAX_LINE]
        for line in lines:
            if line.strip():
                take(line[:_MAX_LINE].decode(errors="replace").rstrip())
    if unfinished.strip():
        take(unfinished.decode(errors="replace"))


def _signal(process: Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)
