"""Runs the pipeline under asyncio: takes events from a queue and carries out the instructions.

Rules
* One event at a time. An event that is fed while another is handled waits until that one's instructions are carried
  out. So `Pipeline.handle` is never re-entered, and all effects of an event come before the next event.
* Each instruction is carried out separately. If one fails, that is logged and counted, and the others are still carried
  out. If a request's client fails, the request is ended: the client gives up, and the pipeline gets `StreamLost`.
* A failure of the pipeline itself is raised to the caller of the `feed` that is running, which may have fed another
  event. The waiting events are handled in the next turn of the event loop.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, Protocol

from fairlead.core.clock import Clock, TimerHandle
from fairlead.core.events import Event, StreamLost, TimerFired
from fairlead.core.instructions import (
    AdoptConfiguration,
    AskRemote,
    Evict,
    Hold,
    Instruction,
    JudgeShadows,
    ListAdapters,
    Record,
    RefuseConfiguration,
    Reject,
    Route,
    SetTimer,
    WarmUp,
)
from fairlead.core.records import DecisionRecord, OutcomeRecord, ShadowRecord, StallRecord
from fairlead.core.request import Request
from fairlead.core.scheduler import Pipeline

log = logging.getLogger(__name__)


class Observer(Protocol):
    """Hears of decisions and outcomes: metrics, journal, logs."""

    def on_decision(self, record: DecisionRecord, duration_s: float) -> None:
        """A decision was made. `duration_s`: the seconds that the pipeline took for the event; 0 = they came with
        another decision of the same event."""

    def on_outcome(self, record: OutcomeRecord) -> None:
        """A routed request ended."""

    def on_failure(self, instruction: str) -> None:
        """An instruction of this type could not be carried out."""


class Incidents(Protocol):
    """Hears of requests that the pipeline never saw."""

    def on_client_error(
        self, api: str, status: int, reason: str, headers: Mapping[str, str] | None, tenant: str = ""
    ) -> None:
        """A request was answered with an error because it cannot be read, or not be changed. `headers`: its own, with
        `x-request-id`; `None` = the pipeline has seen the request. `tenant`: its fairness id; empty = none."""

    def on_left(self, request: Request) -> None:
        """The client of a request left while its prompt was read, before the pipeline saw it."""

    def on_protocol_error(self, reason: str) -> None:
        """A stream of the gateway was ended because a message on it is malformed or out of order."""

    def on_fallback(self, address: str, status: int) -> None:
        """The gateway served a request at `address` without asking us."""

    def on_upload_ended(self, client: str, received: int, reason: str) -> None:
        """The gateway ended an upload of `client` after `received` bytes: `memory`, `paused`, `slow` or `address`."""


class Client(Protocol):
    """The sender of a request, `RequestArrived.client`. It ignores instructions that come after it has gone."""

    def route(self, route: Route) -> None: ...

    def reject(self, reject: Reject) -> None:
        """Refuse the request, or end it after it was routed (eviction)."""

    def hold(self, seconds: float) -> None:
        """The request will wait in a queue for at most this many seconds."""

    def connected(self) -> bool:
        """Whether the connection that carries, or carried, the request is still up."""
        ...

    def fail(self) -> None:
        """An instruction to this client failed. Free all it holds, and end its stream: the gateway must not wait."""


#: Type of an instruction or record → the function that carries it out.
Handlers = Mapping[Any, Callable[[Any], object]]


class Driver:
    """Feeds events to a pipeline and carries out its instructions. All calls happen on the event loop's thread."""

    def __init__(
        self,
        pipeline: Pipeline,
        clock: Clock,
        observer: Observer,
        handlers: Handlers | None = None,
    ) -> None:
        """`handlers`: carry out instructions that do not concern a request's client (`AskRemote`, `JudgeShadows`,
        `ListAdapters`, `WarmUp`, `AdoptConfiguration`, `RefuseConfiguration`), and take each `ShadowRecord` and
        `StallRecord`. Instructions without a handler are ignored; an unanswered question ends at its deadline."""
        self.pipeline = pipeline
        self._clock = clock
        self._observer = observer
        self._timers: dict[str, TimerHandle] = {}
        self._handle = pipeline.handle
        self._events: deque[Event] = deque()
        self._busy = False
        self._handlers: dict[type, Callable[[Any], object]] = {
            Reject: _reject,
            Evict: self._evict,
            Hold: _hold,
            SetTimer: self._set_timer,
            AskRemote: _leave_undone,
            JudgeShadows: _leave_undone,
            ListAdapters: _leave_undone,
            WarmUp: _leave_undone,
            AdoptConfiguration: _leave_undone,
            RefuseConfiguration: _leave_undone,
            ShadowRecord: _leave_undone,
            StallRecord: _leave_undone,
            **(handlers or {}),
        }

    def start(self) -> None:
        for instruction in self.pipeline.start():
            self._carry_out(instruction)

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def feed(self, event: Event) -> None:
        """Hand an event to the pipeline and carry out its instructions: now, or after the events before it."""
        if self._events or self._busy:
            self._events.append(event)
            if self._busy:
                return
            event = self._events.popleft()
        self._busy = True
        instruction: Any  # comparing its type is faster than an isinstance
        try:
            while True:
                started = perf_counter()
                instructions = self._handle(event)
                duration = perf_counter() - started
                for instruction in instructions:
                    # The instructions of every request are carried out inline, to save a function call.
                    try:
                        kind = type(instruction)
                        if kind is Route:
                            if instruction.client is not None:
                                instruction.client.route(instruction)
                        elif kind is DecisionRecord:
                            self._observer.on_decision(instruction, duration)
                            duration = 0.0
                        elif kind is OutcomeRecord:
                            self._observer.on_outcome(instruction)
                        else:
                            self._carry_out(instruction)
                    except Exception:
                        self._failed(instruction)
                if not self._events:
                    self._busy = False
                    return
                event = self._events.popleft()
        except BaseException:  # of the pipeline: the waiting events are not to blame
            self._busy = False
            if self._events:
                self.later(0.0, self._go_on)
            raise

    def _go_on(self) -> None:
        if self._events:
            self.feed(self._events.pop())  # `feed` appends it again and takes the first: the order stays

    def later(self, seconds: float, callback: Callable[..., None], *args: Any) -> None:
        """Call `callback(*args)` after `seconds`, in a separate turn of the event loop."""
        self._clock.call_at(self._clock.time() + seconds, callback, *args)

    def _carry_out(self, instruction: Instruction) -> None:
        """Carry out an instruction that `feed` does not carry out inline."""
        try:
            self._handlers[type(instruction)](instruction)
        except Exception:
            self._failed(instruction)

    def _failed(self, instruction: Instruction) -> None:
        name = "Record" if isinstance(instruction, Record) else type(instruction).__name__
        about = instruction.reject if isinstance(instruction, Evict) else instruction
        then = "the others are carried out"
        if isinstance(about, Route | Reject | Hold):
            then = f"request {about.request_id} is ended"
        log.exception("an instruction could not be carried out: %s; %s", name, then)
        try:
            self._observer.on_failure(name)
        except Exception:
            log.exception("a failed instruction could not be counted: %s", name)
        if isinstance(instruction, Route | Reject | Hold):
            self._give_up(instruction.request_id, instruction.client)
        elif isinstance(instruction, Evict):
            self._give_up(instruction.reject.request_id, instruction.client)

    def _give_up(self, request_id: int, client: Client | None) -> None:
        """The request's client failed: end its stream, and free all that the pipeline holds for the request."""
        try:
            if client is not None:
                client.fail()
        except Exception:
            log.exception("an open request could not be aborted")
        self._events.append(StreamLost(request_id))

    def _evict(self, instruction: Evict) -> None:
        if instruction.client is not None:
            instruction.client.reject(instruction.reject)
            self._events.append(StreamLost(instruction.reject.request_id))

    def _set_timer(self, instruction: SetTimer) -> None:
        old = self._timers.get(instruction.name)
        if old is not None:
            old.cancel()
        self._timers[instruction.name] = self._clock.call_at(instruction.at, self._fire, instruction.name)

    def _fire(self, name: str) -> None:
        del self._timers[name]
        self.feed(TimerFired(name))


def _reject(instruction: Reject) -> None:
    if instruction.client is not None:
        instruction.client.reject(instruction)


def _hold(instruction: Hold) -> None:
    if instruction.client is not None:
        instruction.client.hold(instruction.seconds)


def _leave_undone(instruction: object) -> None:
    """Ignore an instruction or record that has no handler."""
