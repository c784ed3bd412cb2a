"""The parent of the embedded gateway: it only keeps Envoy and the schedulers running.

It lives as long as the gateway and must stay small, so it imports only what supervising needs: neither the
configuration nor numpy nor an HTTP library. The process that has read the configuration becomes the parent by exec,
when the first schedulers are already its children (see `embedded`). Schedulers use `Ending` too.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import fairlead
from fairlead.core.errors import FairleadError
from fairlead.gateway.envoy.admin import EnvoyAdmin
from fairlead.gateway.envoy.launcher import tied
from fairlead.gateway.envoy.process import GatewayProcess
from fairlead.pool.aio import cancelled, until_set
from fairlead.server.observe.log import get, in_background, setup

log = get("serve")

#: The signal that tells a scheduler that the gateway is stopping, and that the scheduler will be stopped after it. Who
#: sends signals to all processes of a service does not send this one.
ENDING = int(signal.SIGRTMIN)
#: Signals that stop the process.
ENDS = (signal.SIGTERM, signal.SIGINT)
#: Signals that end nothing: closed terminals send SIGHUP, and other servers reload or rotate logs at these.
IGNORED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
#: Seconds that requests in flight get to finish at shutdown.
DRAIN_SECONDS = 30.0
#: Seconds that a scheduler gets to exit after that, or after a second signal.
_END_SECONDS = 5.0
#: Seconds before a dead scheduler is started again; doubled up to the cap each time it dies within `_HEALTHY_SECONDS`,
#: the first time included. The cap is also how long a corrected configuration may wait: short where no other scheduler
#: decides meanwhile.
_BACKOFF_FIRST, _BACKOFF_CAP, _ONLY_CAP = 0.1, 20.0, 5.0
_HEALTHY_SECONDS = 10.0
#: After this many seconds, a new scheduler certainly listens, and the gateway certainly asks it.
ASKED_AGAIN_S = 3.0
#: Exit codes, as in `cli.basics`. `_WRONG_CONFIG`: a restart helps only once the configuration file has changed.
#: `_FAILED`, for example because a port is taken: a restart may help.
_WRONG_CONFIG, _FAILED, _INTERRUPTED = 2, 1, 130


class SchedulerFailed(FairleadError):
    """A scheduler exited at its start with the exit code `code`. It has logged why."""

    def __init__(self, code: int) -> None:
        super().__init__("the scheduler could not start, see above")
        self.code = code


class Ending:
    """Handles signals. The first SIGTERM or Ctrl-C sets `asked` (stop), a second one `at_once` (cut off what still
    runs). Those in `IGNORED` are only logged. `child`: log nothing of the others, because the parent gets the same
    signals and logs them."""

    def __init__(self, child: bool = False) -> None:
        self._child = child
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()

    def listen(self, stack: contextlib.AsyncExitStack) -> None:
        """Handle the signals until `stack` is closed."""
        loop = asyncio.get_running_loop()
        for number in (*ENDS, *IGNORED):
            loop.add_signal_handler(number, self._on_signal, number)
            stack.callback(loop.remove_signal_handler, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if number in IGNORED:
            name = number.name
            log.info(f"{name} changes nothing: the configuration file is followed without it, and logs go to stderr")
        elif not self.asked.is_set():
            if not self._child:
                log.info("stopping; a second signal cuts off requests in flight", grace_s=DRAIN_SECONDS)
            self.asked.set()
        elif not self.at_once.is_set():
            if not self._child:
                log.warning("a second signal: requests in flight are cut off")
            self.at_once.set()


def _installed() -> int:
    """A number that changes when another version of Fairlead is installed; 0 = its files cannot be read."""
    try:
        return Path(fairlead.__file__).stat().st_mtime_ns
    except OSError:
        return 0


class Outage:
    """Counts the requests that the gateway balances by itself from a scheduler's death until it asks the new one. All
    workers share it: the gateway's count does not say which of them it did not reach."""

    def __init__(self, admins: list[EnvoyAdmin]) -> None:
        self._admins = admins
        self._before: int | None = None
        #: How many outages were reported.
        self._number = 0

    async def begin(self) -> None:
        """Note that a scheduler died. Until the outage is reported, further deaths belong to the same outage."""
        if self._before is None:
            self._before = await self._unscheduled()

    @contextlib.asynccontextmanager
    async def over(self) -> AsyncIterator[None]:
        """A context during which a scheduler runs. Logs the outage once the gateway certainly asks that scheduler."""
        teller = asyncio.create_task(self._tell())
        try:
            yield
        finally:
            teller.cancel()

    async def _tell(self) -> None:
        if self._before is None:
            return
        number = self._number
        await asyncio.sleep(ASKED_AGAIN_S)
        now = await self._unscheduled()
        if number != self._number:  # another worker is asked, and this outage was reported
            return
        if now is not None and now > self._before:
            log.warning("the gateway routed requests without the scheduler", requests=now - self._before)
        self._number, self._before = number + 1, None

    async def _unscheduled(self) -> int | None:
        vitals = await asyncio.gather(*(admin.vitals() for admin in self._admins))
        return None if None in vitals else sum(each.unscheduled for each in vitals if each is not None)


class Child:
    """A child process, however it was started."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def runs(self) -> bool:
        return not self._ended.done()

    async def wait(self) -> int:
        """Wait until the process ends. Returns the exit code, or minus the number of the signal that killed it."""
        return await asyncio.shield(self._ended)

    def reap(self) -> None:
        """Check whether this child has ended. Call this whenever some child has."""
        if self.runs:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._ended.set_result(os.waitstatus_to_exitcode(status))

    def signal(self, number: int) -> None:
        # A child that was not reaped keeps its process id, so the signal cannot hit another process.
        if self.runs:
            os.kill(self.pid, number)


def spawn_tied(command: list[str]) -> int:
    """Start a process that is killed when this one ends. Returns its process id."""
    # In a process session of its own: Ctrl-C must reach only the parent, which ends its children in order.
    return os.posix_spawn(sys.executable, tied(*command), os.environ, setsid=True)


def reap_adopted() -> None:
    """Collect ended processes that this one adopted, as process 1 of a container does. Our own children each lead a
    process session, those of plugins may be in ours, and who started them collects them. An adopted process like these
    is left alone, too."""
    for children in Path("/proc/self/task").glob("*/children"):
        pids: list[str] = []
        with contextlib.suppress(OSError):  # the thread has ended
            pids = children.read_text(encoding="utf-8").split()
        for pid in map(int, pids):
            with contextlib.suppress(ChildProcessError, ProcessLookupError):  # somebody else has collected it
                if os.getsid(pid) not in (pid, os.getsid(0)):
                    os.waitpid(pid, os.WNOHANG)


@contextlib.contextmanager
def collecting(ended: Callable[[], None] = reap_adopted) -> Iterator[None]:
    """A context during which the event loop calls `ended` whenever a child process has ended. Every command that may
    be process 1 of a container runs in it."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGCHLD, ended)
    try:
        ended()  # for those that ended before
        yield
    finally:
        loop.remove_signal_handler(signal.SIGCHLD)


class Keeper:
    """Keeps one process running. Make this on the event loop, when the first process already runs."""

    def __init__(
        self, name: str, first: int, command: list[str], gateway: GatewayProcess, outage: Outage, *, only: bool
    ) -> None:
        """`first`: the id of the running process. `command`: starts the next one, which reads files of `gateway`.
        `only`: there is no other scheduler."""
        self.name = name
        self._cap = _ONLY_CAP if only else _BACKOFF_CAP
        self._command = command
        self._gateway = gateway
        self._outage = outage
        self._installed = _installed()
        self.child = Child(first)

    async def keep(self, stopping: asyncio.Event, gateway: asyncio.Future[None]) -> None:
        """Restart the process until `stopping` is set. `gateway`: done once the gateway has started.

        Raises `SchedulerFailed` if the first process exits because of its configuration, or with `_FAILED` before the
        gateway has started. Later processes are tried again; the gateway continues without them."""
        loop = asyncio.get_running_loop()
        pause, deaths = _BACKOFF_FIRST, 0
        first = True
        while True:
            started = loop.time()
            if not first:
                try:
                    self._gateway.write_again()
                    self.child = Child(await asyncio.to_thread(spawn_tied, self._command))
                except (OSError, RuntimeError) as error:  # too many processes, or Python is just being replaced
                    pause = min(pause * 2, self._cap)
                    log.error(f"{self.name} cannot be started", reason=str(error), restart_in_s=pause)
                    await asyncio.sleep(pause)
                    continue
            self.child.reap()  # it may have ended already
            log.info(f"{self.name} runs", pid=self.child.pid)
            async with self._outage.over():
                code = await self.child.wait()
            if stopping.is_set():
                return
            if first and (code == _WRONG_CONFIG or (code == _FAILED and not gateway.done())):
                raise SchedulerFailed(code)
            first = False
            if loop.time() - started > _HEALTHY_SECONDS:
                pause, deaths = _BACKOFF_FIRST, 1
            else:
                pause, deaths = min(pause * 2, self._cap), deaths + 1
            what = "cannot start with its configuration" if code == _WRONG_CONFIG else "died"
            if _installed() != self._installed:
                what += "; Fairlead's files have changed since this process started, so restart it"
            log.error(
                f"{self.name} {what}; the gateway goes on without it",
                exit_code=code,
                deaths_in_a_row=deaths,
                restart_in_s=pause,
            )
            await self._outage.begin()
            await asyncio.sleep(pause)

    async def end(self, at_once: asyncio.Event) -> None:
        """Stop the process. It gets `DRAIN_SECONDS` + `_END_SECONDS`, or `_END_SECONDS` from when `at_once` is set;
        then it is killed."""
        child = self.child
        if not child.runs:
            return
        child.signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS + _END_SECONDS):
                await until_set(at_once, child.wait())
        if at_once.is_set():
            child.signal(signal.SIGINT)  # not SIGTERM again: two equal signals may arrive as one
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_SECONDS):
                    await child.wait()
        child.signal(signal.SIGKILL)
        await child.wait()


class Parent:
    """`await run()` until a signal. Raises `FairleadError` if a child cannot be started at all."""

    def __init__(self, gateway: GatewayProcess, schedulers: list[tuple[int, list[str]]]) -> None:
        """`schedulers`: for each one its process id, and the command that starts the next process."""
        self._gateway = gateway
        self._ending = Ending()
        names = [f"worker {i}" if len(schedulers) > 1 else "the scheduler" for i in range(len(schedulers))]
        outage = Outage(gateway.admins)
        self._schedulers = [
            Keeper(name, pid, command, gateway, outage, only=len(schedulers) == 1)
            for name, (pid, command) in zip(names, schedulers, strict=True)
        ]

    async def run(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            self._ending.listen(stack)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
            stack.enter_context(collecting(self._reap))
            stack.push_async_callback(self._gateway.stop, 0.0)
            stack.push_async_callback(self._end_schedulers)
            started = asyncio.create_task(self._gateway.start(), name="gateway")
            kept = [
                asyncio.create_task(keeper.keep(self._ending.asked, started), name=f"{keeper.name} supervisor")
                for keeper in self._schedulers
            ]
            stopped = asyncio.create_task(self._ending.asked.wait())
            for task in (started, *kept, stopped):
                stack.push_async_callback(cancelled, task)
            await asyncio.wait((started, *kept, stopped), return_when=asyncio.FIRST_COMPLETED)
            if started.done():
                started.result()
                await asyncio.wait((*kept, stopped), return_when=asyncio.FIRST_COMPLETED)
            for task in kept:
                if task.done():
                    task.result()
            # Clients finish first. Meanwhile the schedulers still answer the gateway, and end the wait of queued
            # requests.
            for keeper in self._schedulers:
                keeper.child.signal(ENDING)
            if started.done():
                await until_set(self._ending.at_once, self._gateway.stop(DRAIN_SECONDS))

    def _reap(self) -> None:
        for keeper in self._schedulers:
            keeper.child.reap()
        reap_adopted()

    async def _end_schedulers(self) -> None:
        await asyncio.gather(*(keeper.end(self._ending.at_once) for keeper in self._schedulers))


async def _run(handover: dict[str, Any]) -> None:
    gateway = GatewayProcess(**handover["gateway"])
    await Parent(gateway, handover["schedulers"]).run()


def main(handover: dict[str, Any]) -> int:
    """Run the parent. Returns the exit code of the command."""
    setup(*handover["log"])
    try:
        with in_background():
            asyncio.run(_run(handover))
    except FairleadError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return error.code if isinstance(error, SchedulerFailed) else _FAILED
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0
