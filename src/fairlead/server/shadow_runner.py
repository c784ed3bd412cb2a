"""Runs policies on trial in a thread, apart from the event loop.

Rules
* The event loop hands cases over and takes verdicts back; it never waits. A case is skipped and counted while
  `MAX_WAITING` cases wait, or after the shadows have used more CPU than the budget. Outcomes wait in the same queue.
* A shadow that does not return within the limit is cut off: an exception ends its thread at the next line of Python
  that it runs, and a new thread continues without that shadow. A shadow that took longer than the limit, or failed
  `MAX_FAILURES` times in a row, is cut off as well. It stays cut off until the configuration changes.
* Waits for the interpreter, which the event loop may hold for a large body, do not count: a decision is measured by the
  CPU of its thread, and one in progress by the clock without the time by which the event loop was late.
* The thread releases the interpreter lock after every policy, and the switch interval is lowered. So the event loop
  waits for tens of microseconds at most, or for `SWITCH` seconds if a shadow computes without end.
"""

import asyncio
import ctypes
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from fairlead.core.errors import EndsThread, PluginError
from fairlead.core.outcomes import OutcomeObservers
from fairlead.core.records import OutcomeRecord, ShadowCase, ShadowRecord, ShadowVerdict
from fairlead.core.shadow import Bench

MAX_WAITING = 64
MAX_FAILURES = 20
#: The `error` of a verdict when the shadow chose nothing on purpose. This is no failure.
PASSED = "passed"
#: The interpreter's thread switch interval while there are shadows, in seconds.
SWITCH = 0.0005
#: Seconds that the end of a decision may be late without a further look.
_SLACK = 0.001
#: Seconds of CPU that may be used in one burst.
_BURST = 0.05


class RunnerStats(Struct):
    judged: int = 0
    #: Skipped cases: too many were waiting, or the CPU budget was used up.
    crowded: int = 0
    over_budget: int = 0
    #: Outcomes that were left out for these reasons.
    unheard: int = 0
    cpu_s: float = 0.0
    #: Shadow → why it is cut off.
    cut: dict[str, str] = field(default_factory=dict)


class ShadowRunner:
    """`policies` by name; `make_bench` makes one per thread. `judged` is called on the event loop with each record,
    `report` with the errors of policies that learn from outcomes."""

    def __init__(
        self,
        policies: Mapping[str, Any],
        make_bench: Callable[[], Bench],
        judged: Callable[[ShadowRecord], None],
        cut: Callable[[str, str], None] = lambda shadow, why: None,
        report: Callable[[PluginError], object] = lambda error: None,
        *,
        cpu: float = 0.2,
        limit: float = 0.1,
    ) -> None:
        self.stats = RunnerStats()
        self._policies = dict(policies)
        self._make_bench = make_bench
        self._judged = judged
        self._cut = cut
        self._cpu, self._limit = cpu, limit
        self._loop = asyncio.get_running_loop()
        listeners = {name: OutcomeObservers(policy, self._reported(report)) for name, policy in policies.items()}
        self._listeners = {name: observers for name, observers in listeners.items() if observers}
        self._cases: deque[ShadowCase | Sequence[OutcomeRecord]] = deque()
        self._failures: dict[str, int] = {}
        self._thread: _Worker | None = None
        self._watch: asyncio.TimerHandle | None = None
        #: Monotonic seconds when `_look` is due; what the thread was doing then, and by how many seconds `_look` was
        #: late while it did.
        self._due = 0.0
        self._seen: tuple[str, float] | None = None
        self._late = 0.0
        self._began = self._loop.time()
        self._switch = sys.getswitchinterval()
        sys.setswitchinterval(min(SWITCH, self._switch))

    def close(self) -> None:
        sys.setswitchinterval(self._switch)
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._thread is not None:
            self._thread.stop()
            self._thread = None
        self._policies.clear()

    def judge(self, case: ShadowCase) -> None:
        """Queue a case for the thread, unless a limit is reached."""
        if not self._policies:
            return
        if len(self._cases) >= MAX_WAITING:
            self.stats.crowded += 1
        elif self._over_budget():
            self.stats.over_budget += 1
        else:
            self._cases.append(case)
            self._work()

    def hear(self, outcomes: Sequence[OutcomeRecord]) -> None:
        """Queue outcomes for the shadows that learn from them, unless a limit is reached."""
        if not self._listeners:
            return
        if len(self._cases) >= MAX_WAITING or self._over_budget():
            self.stats.unheard += len(outcomes)
        else:
            self._cases.append(outcomes)
            self._work()

    def _over_budget(self) -> bool:
        return self.stats.cpu_s > _BURST + self._cpu * (self._loop.time() - self._began)

    def _reported(self, report: Callable[[PluginError], object]) -> Callable[[PluginError], None]:
        def tell(error: PluginError) -> None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(report, error)

        return tell

    def _work(self) -> None:
        if self._thread is None:
            made = self._make_bench(), dict(self._policies), dict(self._listeners), self._cases
            self._thread = _Worker(*made, self._loop, self._done, self._used)
        self._thread.wake()
        if self._watch is None:
            self._look_in(self._limit)

    # ---- on the event loop ----

    def _done(self, worker: "_Worker", record: ShadowRecord, cpu_s: float) -> None:
        if worker is not self._thread:
            return  # from a thread that was abandoned
        self.stats.judged += 1
        self.stats.cpu_s += cpu_s
        for verdict in record.verdicts:
            name = verdict.shadow
            failed = bool(verdict.error) and verdict.error != PASSED
            self._failures[name] = self._failures.get(name, 0) + 1 if failed else 0
            if verdict.took_us > self._limit * 1e6:
                self._cut_off(name, f"took {verdict.took_us / 1e3:.0f} ms of CPU for one decision")
            elif self._failures[name] >= MAX_FAILURES:
                self._cut_off(name, f"failed {MAX_FAILURES} times in a row: {verdict.error}")
        self._judged(record)

    def _used(self, cpu_s: float) -> None:
        self.stats.cpu_s += cpu_s

    def _look_in(self, delay: float) -> None:
        self._due = time.monotonic() + delay
        self._watch = self._loop.call_later(delay, self._look)

    def _look(self) -> None:
        """Cut off a shadow that has been deciding for longer than the limit, except while the event loop was busy."""
        self._watch = None
        worker = self._thread
        if worker is None:
            return
        now, doing = time.monotonic(), worker.doing
        late = max(now - self._due, 0.0)
        self._late = self._late + late if doing is self._seen else min(late, now - doing[1]) if doing else 0.0
        self._seen = doing
        left = self._limit if doing is None else self._limit - (now - doing[1] - self._late)
        if doing is not None and left < 0.0:
            worker.abandon()
            self._thread = None
            self._cases = deque(self._cases)
            self._cut_off(doing[0], f"did not come back within {self._limit * 1e3:.0f} ms")
            if not self._policies:
                self._cases.clear()
            elif self._cases:
                self._work()
        elif doing is not None or self._cases:
            self._look_in(self._limit / 2 if doing is None else left + _SLACK)

    def _cut_off(self, name: str, why: str) -> None:
        if self._policies.pop(name, None) is None:
            return
        self._listeners.pop(name, None)
        self.stats.cut[name] = why
        if self._thread is not None:
            self._thread.drop(name)
        self._cut(name, why)


class _Worker(Struct, eq=False):
    """A thread and its bench. `done` is called on the event loop with each record and its seconds of CPU, `used` with
    those of learning from outcomes."""

    bench: Bench
    policies: dict[str, Any]
    listeners: dict[str, OutcomeObservers]
    cases: deque[ShadowCase | Sequence[OutcomeRecord]]
    loop: asyncio.AbstractEventLoop
    done: Callable[["_Worker", ShadowRecord, float], None]
    used: Callable[[float], None]
    #: (shadow, monotonic seconds when it was asked) while a shadow decides or learns.
    doing: tuple[str, float] | None = None
    wanted: threading.Event = field(default_factory=threading.Event)
    stopped: bool = False
    #: The thread's identifier; 0 = it has not begun yet.
    ident: int = 0

    def __post_init__(self) -> None:
        threading.Thread(target=self._run, name="shadows", daemon=True).start()

    def wake(self) -> None:
        self.wanted.set()

    def stop(self) -> None:
        self.stopped = True
        self.wanted.set()

    def abandon(self) -> None:
        """End the thread from outside. Otherwise a policy that computes without end would run as long as the
        process."""
        self.stop()
        if self.ident:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident), ctypes.py_object(EndsThread))

    def drop(self, name: str) -> None:
        self.policies.pop(name, None)
        self.listeners.pop(name, None)

    def _run(self) -> None:
        self.ident = threading.get_ident()
        try:
            while not self.stopped:
                self.wanted.wait()
                self.wanted.clear()
                while self.cases and not self.stopped:
                    case = self.cases.popleft()
                    if isinstance(case, ShadowCase):
                        self._judge(case)
                    else:
                        self._tell(case)
        except EndsThread:
            return

    def _judge(self, case: ShadowCase) -> None:
        before = time.thread_time()
        try:
            self.bench.open(case)
            verdicts = [self._ask(name, policy) for name, policy in list(self.policies.items())]
            record = self.bench.record(verdicts)
        except Exception as error:  # even an error of the bench must not end the thread
            failed = ShadowVerdict("reference", error=f"{type(error).__name__}: {error}"[:200])
            record = ShadowRecord(case.request.id, case.snapshot.at, case.endpoint, verdicts=(failed,))
        self._call(self.done, self, record, time.thread_time() - before)

    def _tell(self, outcomes: Sequence[OutcomeRecord]) -> None:
        before = time.thread_time()
        for name, listeners in list(self.listeners.items()):
            for outcome in outcomes:
                self.doing = (name, time.monotonic())
                try:
                    listeners.tell(outcome, outcome.at)
                finally:
                    self.doing = None
            time.sleep(0)
        self._call(self.used, time.thread_time() - before)

    def _call(self, call: Callable[..., None], *given: Any) -> None:
        """Call it on the event loop."""
        if not self.stopped:
            try:
                self.loop.call_soon_threadsafe(call, *given)
            except RuntimeError:
                self.stopped = True  # the loop is closed

    def _ask(self, name: str, policy: Any) -> ShadowVerdict:
        began = time.thread_time()
        self.doing = (name, time.monotonic())
        try:
            verdict = self.bench.decide(name, policy)
        finally:
            self.doing = None
        time.sleep(0)
        return replace(verdict, took_us=(time.thread_time() - began) * 1e6)
