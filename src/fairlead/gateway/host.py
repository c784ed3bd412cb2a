"""How a gateway processes a stream, as it announces at the beginning; and `Host`: what all sessions of a pool share.

The body modes are in the first message, the rest is in the initial metadata of the stream. A gateway announces the same
for every stream, so equal streams share a `ProcessingMode`. Measured in tests/integration/pitfalls/README.md.
"""

from collections.abc import Callable
from enum import IntEnum
from functools import lru_cache

from msgspec import Struct

from fairlead.core.events import Event
from fairlead.core.request import Request
from fairlead.gateway.access_log import AccessLogs, HangDetector
from fairlead.gateway.answers import Answers, Served, no_names
from fairlead.gateway.driver import Driver, Incidents
from fairlead.gateway.ext_proc import BodyMode, Modes
from fairlead.gateway.understand import Understanding

#: The modes that the protocol demands, for gateways that announce none.
_DEMANDED: Modes = (BodyMode.FULL_DUPLEX, BodyMode.FULL_DUPLEX, False)


class Leave(IntEnum):
    """Whether a session may leave its stream at the pick without losing a byte, and what reports the end then."""

    #: Never: the gateway sends no access log, or still waits for answers.
    NEVER = 0
    #: Always: the gateway sends no further messages.
    ALWAYS = 1
    #: Only if all answers leave in one write: the gateway does not keep the chunks that it sends.
    IF_IT_FITS = 2
    #: Only from responses that are not streamed: the gateway keeps each chunk until it is answered. The session stays
    #: for the first chunk of a stream. Other responses end with their first byte, and the access log reports the end.
    UNSTREAMED = 3


class ProcessingMode(Struct, frozen=True):
    """The announced modes, and what follows from them."""

    #: Body modes of request and response, and whether the body is sent without waiting for the headers' answer.
    modes: Modes
    #: Body modes of the request and of the response.
    request: BodyMode
    response: BodyMode
    #: The request's body mode: under full duplex its body must be handed back, if streamed each chunk is answered.
    full_duplex: bool
    streamed: bool
    #: An access log reports the end of every request.
    access_log: bool
    #: The first body message is the whole body, even if trailers follow.
    whole_body: bool
    #: The gateway removes the length of responses, so that they may be changed.
    resizable: bool
    #: The gateway routes as soon as the headers are answered, so the endpoint is chosen by the headers alone.
    on_headers: bool
    #: The headers are answered immediately, and the answer to the body carries the pick.
    buffered: bool
    #: `on_headers` or `buffered`: the session acts as soon as the headers arrive.
    at_once: bool
    leave: Leave
    #: Most sessions do not see the first token.
    blind: bool


@lru_cache(maxsize=256)
def processing_mode(modes: Modes | None, access_log: bool, whole_body: bool, resizable: bool) -> ProcessingMode:
    """The mode of a stream. `modes`: as in the first message; `None` = it has none."""
    modes = request, response, eager = modes or _DEMANDED
    waits = request is BodyMode.STREAMED and not eager
    whole_body = whole_body and request is BodyMode.STREAMED and eager  # in other modes it would not be true
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
        request is BodyMode.FULL_DUPLEX,
        request is BodyMode.STREAMED,
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
    """The same mode without an access log."""
    return processing_mode(mode.modes, False, mode.whole_body, mode.resizable)


#: Of a request, and whether its response is a stream.
Inspect = Callable[[Request, bool], bool]


class Host:
    """The objects that all sessions of a pool share."""

    def __init__(
        self,
        driver: Driver,
        understanding: Understanding,
        answers: Answers,
        incidents: Incidents,
        now: Callable[[], float],
        max_body: int = 64 << 20,
        inspect: Inspect = lambda request, stream: False,
        tells_served: bool = False,
        served: Served = no_names,
        feed: Callable[[Event], None] | None = None,
    ) -> None:
        """`feed`: takes the events of sessions and passes them to `driver.feed`; `None` = `driver.feed` itself."""
        self.driver = driver
        self.feed = feed or driver.feed
        self.understanding = understanding
        self.answers = answers
        self.incidents = incidents
        self.now = now
        #: The largest request body, in bytes; a larger body is answered with 413.
        self.max_body = max_body
        #: Asked once for each response that a session could leave early: stay for the token counts?
        self.inspect = inspect
        #: The served names, for the list of models.
        self.served = served
        #: For conformance tests of gateways: responses name the endpoint that served.
        self.tells_served = tells_served
        self.logs = AccessLogs(driver, answers, incidents, feed=feed)
        self.pulse = HangDetector(now)

    def keep_bodies_up_to(self, max_body: int) -> None:
        """Set another limit, which applies from the next message on."""
        self.max_body = max_body
