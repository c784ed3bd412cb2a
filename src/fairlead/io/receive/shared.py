"""What all sessions of a process share."""

import asyncio
from collections.abc import Callable

from msgspec.structs import replace

from fairlead.io.receive.answers import Answers
from fairlead.io.receive.departures import Departures
from fairlead.io.receive.driver import Driver, Incidents
from fairlead.io.receive.pulse import Pulse
from fairlead.io.receive.understand import Understanding
from fairlead.model.events import RequestArrived
from fairlead.model.request import Request


class Shared:
    """One per process."""

    def __init__(
        self,
        driver: Driver,
        understanding: Understanding,
        answers: Answers,
        incidents: Incidents,
        now: Callable[[], float],
        max_body: int = 64 << 20,
        inspect: Callable[[bool], bool] = lambda stream: False,
    ) -> None:
        self.driver = driver
        self.understanding = understanding
        self.answers = answers
        self.incidents = incidents
        self.now = now
        #: Bytes of a request body that are kept; more is answered 413.
        self.max_body = max_body
        #: Asked once per response that could be left early (is it a stream?): stay, to learn its token counts?
        self.inspect = inspect
        #: For conformance tests of gateways: responses tell who served.
        self.tells_served = False
        self.departures = Departures(driver)
        #: Access-log streams that are connected, and how to end each: they have no end of their own.
        self.access_logs = 0
        self.log_ends: set[Callable[[], None]] = set()
        self.pulse = Pulse(now)

    def arrive(self, request: Request) -> None:
        """A request is understood. While its prompt is still being read, it is not there yet."""
        reading = self.understanding.reading
        job = reading.get(request.id) if reading else None
        if job is None:
            self.driver.feed(RequestArrived(request))
        else:
            job.add_done_callback(lambda done: self._read(request, done))

    def _read(self, request: Request, done: asyncio.Task[int]) -> None:
        if request.id in self.driver.waiting:  # else its client went away meanwhile
            counted = 0 if done.cancelled() or done.exception() is not None else done.result()
            self.driver.feed(RequestArrived(replace(request, prompt_tokens=counted) if counted else request))

    def end_access_logs(self) -> None:
        for end in list(self.log_ends):
            end()

    def beat(self) -> None:
        """See `Pulse`."""
        self.pulse.beat()
