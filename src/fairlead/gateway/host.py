"""How a gateway processes a stream: what it announces with the first message, and what follows from that.

The body modes come in the first message, the rest as initial metadata of the stream. Gateways announce the same with
every stream, so all streams alike share one `ProcessingMode`. Measured in tests/integration/pitfalls/README.md.
"""

from collections.abc import Callable
from enum import IntEnum
from functools import lru_cache

from msgspec import Struct

from fairlead.gateway.access_log import AccessLogs, Pulse
from fairlead.gateway.answers import Answers, Served, no_names
from fairlead.gateway.driver import Driver, Incidents
from fairlead.gateway.ext_proc import BodyMode, Modes
from fairlead.gateway.understand import Understanding

#: What the protocol demands of gateways that announce no modes.
_DEMANDED: Modes = (BodyMode.FULL_DUPLEX, BodyMode.FULL_DUPLEX, False)


class Leave(IntEnum):
    """Whether a session may leave at the pick without losing a byte, and who tells the request's end then."""

    #: The gateway sends no access log, or still waits for answers.
    NEVER = 0
    #: Nothing follows.
    ALWAYS = 1
    #: The gateway hands chunks over and forgets them: only if all answers leave in one write.
    IF_IT_FITS = 2
    #: The gateway keeps each chunk until it is answered. An answer that is streamed is worth its first chunk; the first
    #: byte of another one is its end, which the access log tells as well as we could.
    UNSTREAMED = 3


class ProcessingMode(Struct, frozen=True):
    """See the module's docstring."""

    #: Body modes of request and response, and whether the body is sent without waiting for the headers' answer.
    modes: Modes
    #: Body modes of the request and of the response.
    request: BodyMode
    response: BodyMode
    #: The end of every request is told by an access log.
    access_log: bool
    #: The first body message is all of the body, also when trailers follow.
    whole_body: bool
    #: The gateway takes the length off responses by itself, so that they may change.
    resizable: bool
    #: The gateway routes when the headers are answered: the choice is made on headers alone.
    on_headers: bool
    #: The headers are answered at once, and the pick rides on the answer to the body.
    buffered: bool
    #: One of the two: something is done as soon as the headers are there.
    at_once: bool
    leave: Leave
    #: Sessions see no first token, mostly.
    blind: bool


@lru_cache(maxsize=256)
def processing_mode(modes: Modes | None, access_log: bool, whole_body: bool, resizable: bool) -> ProcessingMode:
    """`modes`: as the first message tells them; `None` = it does not."""
    modes = request, response, eager = modes or _DEMANDED
    waits = request is BodyMode.STREAMED and not eager
    if not access_log:
        leave = Leave.NEVER
    elif response is BodyMode.NONE:
        leave = Leave.NEVER if waits else Leave.ALWAYS
    elif response is BodyMode.FULL_DUPLEX:
        leave = Leave.IF_IT_FITS
    else:
        leave = Leave.UNSTREAMED
    on_headers = waits or request is BodyMode.NONE
    buffered = request in (BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL)
    blind = response is BodyMode.NONE or leave is Leave.IF_IT_FITS
    return ProcessingMode(
        modes,
        request,
        response,
        access_log,
        whole_body,
        resizable,
        on_headers,
        buffered,
        on_headers or buffered,
        leave,
        blind,
    )


def without_access_log(mode: ProcessingMode) -> ProcessingMode:
    """The same, as if no access log told the end of the request."""
    return processing_mode(mode.modes, False, mode.whole_body, mode.resizable)


# What all sessions of a process share.


class Host:
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
        tells_served: bool = False,
        served: Served = no_names,
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
        #: For the list of models.
        self.served = served
        #: For conformance tests of gateways: responses tell who served.
        self.tells_served = tells_served
        self.logs = AccessLogs(driver, answers, incidents)
        self.pulse = Pulse(now)

    def keep_bodies_up_to(self, max_body: int) -> None:
        """Another limit, from the next message on."""
        self.max_body = max_body
