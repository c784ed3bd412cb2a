"""One load run against a live server: takes arrivals and a workload, returns records.

Rules
* A request is sent at its scheduled time whether or not earlier requests were answered (open loop), unless
  `max_in_flight` holds it back. If it is held back or late, its latency still counts from its scheduled time. Of
  `Turns`, only the answer before decides when a turn is scheduled.
* Every scheduled request gets exactly one record. At the hard time bound, requests in flight end as `time_limit` and
  those held back as `not_sent`; requests that were not scheduled yet get no record.
* Nothing that the server does raises. An exception in the caller's workload, arrivals or callback ends the run, and
  `run` raises it.
"""

import asyncio
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import msgspec

from fairlead.lab.load.connection import Client
from fairlead.lab.load.reactor import Alarm, Reactor
from fairlead.lab.load.spec import CANCELLED, Options, Progress, Record, RunResult
from fairlead.lab.load.workload import Call, ClosedLoop, OpenLoop, Turns, Workload

#: Requests sent before the loop can read responses again.
_BURST = 32
#: The error of requests that were not done when the run was interrupted.
_INTERRUPTED = "interrupted"

OnProgress = Callable[[Progress], object]


async def run(
    target: str,
    workload: Workload,
    arrivals: OpenLoop | ClosedLoop | Turns,
    options: Options,
    on_progress: OnProgress | None = None,
    name: str = "",
    interruptible: bool = False,
) -> RunResult:
    """Run to the end and return the measurements. Raises ConfigError for a target or header that cannot be used.

    `on_progress` is called on the loop about every `options.progress_s` and once at the end. Cancelling closes all
    connections. `interruptible`: SIGINT ends the run early; the result has the requests that were answered until then.
    """
    with ExitStack() as stack:
        reactor = Reactor(asyncio.get_running_loop())
        stack.callback(reactor.close)
        client = Client(target, options, reactor)
        stack.callback(client.close)
        await client.open()
        load = _Load(client, workload.calls(), arrivals, options)
        stack.callback(load.close)
        cpu = time.process_time()
        if interruptible:
            client.loop.add_signal_handler(signal.SIGINT, load.interrupt)
            stack.callback(client.loop.remove_signal_handler, signal.SIGINT)
        await load.run(on_progress)
        cpu = time.process_time() - cpu
    return RunResult(
        name=name,
        target=target,
        records=[record for record in load.records if record.error != _INTERRUPTED],
        gaps=client.gaps,
        origin=load.origin,
        started_unix=load.started_unix,
        duration_s=load.last_end - load.origin,
        cpu_s=cpu,
        cut=load.cut,
        time_ratio=options.time_ratio,
        config={"workload": _plain(workload), "arrivals": _plain(arrivals), "options": _plain(options)},
    )


def _plain(value: object) -> Any:
    return msgspec.to_builtins(value) if isinstance(value, msgspec.Struct) else {"type": type(value).__name__}


class _Load:
    def __init__(
        self, client: Client, calls: Iterator[Call], arrivals: OpenLoop | ClosedLoop | Turns, options: Options
    ) -> None:
        self.records: list[Record] = []
        self.cut = False
        self.origin = self.last_end = time.monotonic()
        self.started_unix = time.time()
        self._client = client
        self._calls = calls
        self._options = options
        self._finished: asyncio.Future[None] = client.loop.create_future()
        self._alarm = Alarm(client.loop, self._pump)
        self._closed_loop = arrivals if isinstance(arrivals, ClosedLoop) else None
        self._turns = arrivals if isinstance(arrivals, Turns) else None
        self._offsets: Iterator[float] = iter(()) if isinstance(arrivals, ClosedLoop | Turns) else arrivals.offsets()
        #: Offset of the next arrival of an open loop, in seconds after `origin`; None = no more.
        self._next: float | None = None
        self._scheduled = 0
        self._exhausted = False
        #: Scheduled times of requests that `max_in_flight` holds back, oldest first.
        self._waiting: deque[float] = deque()
        self._failed = 0
        self._last_look = (self.origin, 0)

    async def run(self, on_progress: OnProgress | None) -> None:
        limit = self._client.loop.call_later(self._options.time_limit_s, self._guard, self._cut_off)
        looks = asyncio.create_task(self._look_regularly(on_progress)) if on_progress else None
        try:
            self._guard(self._begin)
            await self._finished
        finally:
            limit.cancel()
            if looks is not None:
                looks.cancel()
                with suppress(asyncio.CancelledError):
                    await looks
        if on_progress:
            on_progress(self._look())

    def interrupt(self) -> None:
        """End the run now."""
        self._waiting.clear()
        self._guard(self._cut_off, _INTERRUPTED)

    def close(self) -> None:
        self._alarm.close()

    def _guard(self, step: Callable[..., None], *arguments: Any) -> None:
        """Run one step of the run; an exception ends the run."""
        if self._finished.done():
            return
        try:
            step(*arguments)
            idle = self._next is None and not self._waiting and not self._client.in_flight
            if idle and not self._finished.done():
                self._finished.set_result(None)
        except Exception as error:
            if not self._finished.done():
                self._finished.set_exception(error)

    def _begin(self) -> None:
        if self._closed_loop is None:
            self._advance()
            self._send_due()
            return
        for _ in range(self._closed_loop.workers):
            self._arrive(self.origin)

    def _pump(self) -> None:
        self._guard(self._send_due)

    def _send_due(self) -> None:
        """Send what is due, and set the alarm for the next arrival."""
        now = time.monotonic()
        for _ in range(_BURST):
            if self._next is None:
                return
            if self.origin + self._next > now:
                self._alarm.set(self.origin + self._next)
                return
            self._arrive(self.origin + self._next)
            self._advance()
        self._client.loop.call_soon(self._pump)

    def _advance(self) -> None:
        if self._scheduled_enough():
            self._next = None
        else:
            self._next = next(self._offsets, None) if self._turns is None else self._turns.next
        if self._next is not None and 0 < self._options.duration_s <= self._next:
            self._next = None

    def _scheduled_enough(self) -> bool:
        return self._exhausted or 0 < self._options.requests <= self._scheduled

    def _arrive(self, scheduled: float) -> None:
        if self._scheduled_enough():
            return
        self._scheduled += 1
        if self._turns is not None:
            self._turns.begin()
        if self._client.in_flight < self._options.max_in_flight:
            self._send(scheduled)
        else:
            self._waiting.append(scheduled)

    def _send(self, scheduled: float) -> None:
        call = next(self._calls, None)
        if call is None:
            # The workload has ended; requests scheduled after its end are not part of the run.
            self._exhausted = True
            self._waiting.clear()
            self._next = None
            return
        record = Record(len(self.records), scheduled, group=call.group, n=call.n)
        self.records.append(record)
        self._client.send(call, record, self._on_done)

    def _on_done(self, record: Record, now: float) -> None:
        self._guard(self._take_result, record, now)

    def _take_result(self, record: Record, now: float) -> None:
        self.last_end = max(self.last_end, now)
        if record.error and record.error != CANCELLED:
            self._failed += 1
        if self.cut:
            return
        if self._waiting:
            self._send(self._waiting.popleft())
        if self._turns is not None:
            self._turns.ended(record.index, now - self.origin)
            self._advance()
            self._send_due()
        if self._closed_loop is not None and not 0 < self._options.duration_s <= now - self.origin:
            self._arrive(now)

    def _cut_off(self, why: str = "time_limit") -> None:
        self.cut = True
        self._next = None
        now = time.monotonic()
        for scheduled in self._waiting:
            self.records.append(Record(len(self.records), scheduled, end=now, error="not_sent"))
        self._failed += len(self._waiting)
        self._waiting.clear()
        self.last_end = now
        self._client.abort(why)

    async def _look_regularly(self, on_progress: OnProgress) -> None:
        while True:
            await asyncio.sleep(self._options.progress_s)
            try:
                on_progress(self._look())
            except Exception as error:
                if not self._finished.done():
                    self._finished.set_exception(error)
                return

    def _look(self) -> Progress:
        now = time.monotonic()
        done = len(self.records) - self._client.in_flight
        before, done_before = self._last_look
        self._last_look = now, done
        self._client.count()
        ttft = self._client.ttfts.quantile(0.5)
        return Progress(
            done=done,
            total=self._options.requests if not self._options.duration_s else 0,
            failed=self._failed,
            in_flight=self._client.in_flight,
            waiting=len(self._waiting),
            rate=(done - done_before) / max(now - before, 1e-9),
            elapsed_s=now - self.origin,
            ttft_p50_ms=None if ttft is None else ttft * 1000,
        )
