"""Turns the pipeline's crank under asyncio: feeds events in, carries instructions out."""

from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

from fairlead.model.clock import Clock, TimerHandle
from fairlead.model.decision import DecisionRecord, OutcomeRecord
from fairlead.model.endpoint import Endpoint
from fairlead.model.events import Event, StreamLost, TimerFired
from fairlead.model.instructions import (
    AskRemote,
    Evict,
    Hold,
    Instruction,
    JudgeShadows,
    Record,
    Reject,
    Route,
    SetTimer,
)
from fairlead.model.shadow import ShadowCase, ShadowRecord
from fairlead.pipeline import Pipeline


class Observer(Protocol):
    """Who wants to know: metrics, journal, logs."""

    def on_decision(self, record: DecisionRecord, duration_s: float) -> None:
        """A decision was made; `duration_s` is what it cost."""

    def on_outcome(self, record: OutcomeRecord) -> None:
        """A routed request ended."""


class Incidents(Protocol):
    """Who wants to know of requests that the pipeline never saw."""

    def on_client_error(self, api: str, status: int) -> None:
        """A request was answered with an error before it could be scheduled."""

    def on_fallback(self, address: str, status: int) -> None:
        """The gateway served a request at `address` without asking us."""


class Waiting(Protocol):
    """A request that waits for its answer."""

    def route(self, endpoint: Endpoint, target: str = "", shown: str = "", prefill: str = "", second: str = "") -> None:
        """All but the first: see `Route`."""

    def reject(self, reject: Reject) -> None: ...

    def hold(self, seconds: float) -> None:
        """It waits for so long at most."""

    def stay(self) -> None:
        """It will be routed, and must then be followed to its end: it may have to be ended by `reject`."""


class Driver:
    """One per process. All calls happen on the event loop's thread."""

    def __init__(self, pipeline: Pipeline, clock: Clock, observer: Observer) -> None:
        self.pipeline = pipeline
        self._clock = clock
        self._observer = observer
        #: Requests that arrived and are not yet answered.
        self.waiting: dict[int, Waiting] = {}
        #: Who asks schedulers in other processes, by the scheduler's name.
        self.remotes: dict[str, Callable[[AskRemote], None]] = {}
        #: Who has policies on trial judge a decision, and who is told what they would have done.
        self.judge: Callable[[ShadowCase], object] = lambda case: None
        self.on_shadow: Callable[[ShadowRecord], object] = lambda record: None
        #: Requests that were routed and may have to make way.
        self.evictable: dict[int, Waiting] = {}
        self._timers: dict[str, TimerHandle] = {}
        self._handlers: dict[type, Any] = {
            Route: self._route,
            Reject: self._reject,
            Evict: self._evict,
            Hold: self._hold,
            AskRemote: self._ask_remote,
            JudgeShadows: lambda instruction: self.judge(instruction.case),
            SetTimer: self._set_timer,
        }

    def start(self) -> None:
        self._carry_out(self.pipeline.start(), 0.0)

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def feed(self, event: Event) -> None:
        """Let the pipeline know, and do what it says."""
        started = perf_counter()
        instructions = self.pipeline.handle(event)
        if instructions:
            self._carry_out(instructions, perf_counter() - started)

    def later(self, seconds: float, callback: Callable[..., None], *args: Any) -> None:
        """Call it in a turn of the event loop of its own."""
        self._clock.call_at(self._clock.time() + seconds, callback, *args)

    def _carry_out(self, instructions: list[Instruction], duration: float) -> None:
        for instruction in instructions:
            if type(instruction) is Record:
                record = instruction.record
                if type(record) is DecisionRecord:
                    self._observer.on_decision(record, duration)
                elif type(record) is OutcomeRecord:
                    self._observer.on_outcome(record)
                    if self.evictable:
                        self.evictable.pop(record.request.id, None)
                elif type(record) is ShadowRecord:
                    self.on_shadow(record)
            else:
                self._handlers[type(instruction)](instruction)

    def _route(self, instruction: Route) -> None:
        waiting = self.waiting.pop(instruction.request_id, None)
        if waiting is not None:
            if instruction.evictable:
                self.evictable[instruction.request_id] = waiting
                waiting.stay()
            others = instruction.prefill, instruction.second
            waiting.route(instruction.endpoint, instruction.target, instruction.shown, *others)

    def _reject(self, instruction: Reject) -> None:
        waiting = self.waiting.pop(instruction.request_id, None)
        if waiting is not None:
            waiting.reject(instruction)

    def _evict(self, instruction: Evict) -> None:
        running = self.evictable.pop(instruction.told.request_id, None)
        if running is not None:
            running.reject(instruction.told)
            self.later(0.0, self.feed, StreamLost(instruction.told.request_id))

    def _hold(self, instruction: Hold) -> None:
        waiting = self.waiting.get(instruction.request_id)
        if waiting is not None:
            waiting.hold(instruction.seconds)

    def _ask_remote(self, instruction: AskRemote) -> None:
        ask = self.remotes.get(instruction.remote)
        if ask is not None:  # else nobody answers, and its deadline comes
            ask(instruction)

    def _set_timer(self, instruction: SetTimer) -> None:
        old = self._timers.get(instruction.name)
        if old is not None:
            old.cancel()
        self._timers[instruction.name] = self._clock.call_at(instruction.at, self._fire, instruction.name)

    def _fire(self, name: str) -> None:
        del self._timers[name]
        self.feed(TimerFired(name))
