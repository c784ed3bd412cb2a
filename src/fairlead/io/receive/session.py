"""One ext_proc stream = one HTTP request: collects it, has it scheduled, answers the gateway, leaves when it is safe.

Rules (Envoy 1.40; docs/gateway.md has the measurements)
* The answer to headers precedes every answer to a body. Under full duplex the headers answer waits until the body is
  whole, and the body must be handed back; otherwise the gateway keeps the body itself.
* BUFFERED and BUFFERED_PARTIAL: headers are answered at once, the pick rides on the body answer. A truncated
  BUFFERED_PARTIAL body (end_of_stream false) is waved through unscheduled: the gateway ignores a pick there.
* NONE, and STREAMED without `send_body_without_waiting_for_header_response`: the gateway routes when the headers are
  answered, so the choice is made on headers alone.
* STREAMED with that flag: headers and body come together, and the headers answer waits for the body, as under full
  duplex. A gateway that buffers in front of ext_proc announces it with the initial metadata `fairlead-whole-body`:
  the first body message is then all of it, even when trailers follow (end_of_stream false).
* Leaving (ending the gRPC stream with OK) must not lose a byte. In a STREAMED or BUFFERED response the gateway keeps
  each chunk until it is answered: leaving is safe at any moment. With NONE nothing follows. In a FULL_DUPLEX response
  it hands chunks over and forgets them: the only safe moment is the pick itself, and only when everything fits into
  one write; later the response is echoed to its end.
* Leaving early needs somebody else to tell the request's end. A gateway that sends us its access log announces it with
  the initial metadata `fairlead-access-log` of each stream; while such a log is connected we leave, else we stay.
  An answer that is not streamed is left at the pick: its first byte comes when all is done.
* Whoever leaves last releases the lease: the access log if wired, else this session.
* When this process hung, sockets hold requests that the gateway gave up meanwhile, each followed by its reset. Nobody
  would end the lease of such a one, so for a moment after a hang no session leaves at the pick.
"""

from collections.abc import Callable, Mapping
from math import inf
from typing import Protocol

from fairlead.io.receive.answers import Answers, client_error, refusal
from fairlead.io.receive.driver import Driver
from fairlead.io.receive.response import ResponseWatch
from fairlead.io.receive.stream import ServerStream
from fairlead.io.receive.understand import Understanding
from fairlead.model.endpoint import Endpoint
from fairlead.model.errors import ClientError, ProtocolError
from fairlead.model.events import RequestArrived, StreamLost, UsageReported
from fairlead.model.instructions import Reject
from fairlead.model.request import Request
from fairlead.route.headers import ACCESS_LOG_METADATA, CONTROL_HEADERS, WHOLE_BODY_METADATA
from fairlead.wire import ext_proc
from fairlead.wire.ext_proc import CONTINUE, BodyMode, Incoming, Kind

_INVALID_ARGUMENT = 3

#: Seconds without a turn of the event loop after which requests may have been given up unseen: twice the period of its
#: heartbeat, and no more than gateways wait for us. For as long afterwards they are looked at with doubt.
HANG = 1.0


class Incidents(Protocol):
    """Who wants to know of requests that the pipeline never saw."""

    def on_client_error(self, api: str, status: int) -> None:
        """A request was answered with an error before it could be scheduled."""

    def on_fallback(self, address: str, status: int) -> None:
        """The gateway served a request at `address` without asking us."""


class Host:
    """What all sessions of a process share."""

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
        #: Access-log streams that are connected, and how to end each: they have no end of their own.
        self.access_logs = 0
        self.log_ends: set[Callable[[], None]] = set()
        self._beat = inf
        self._doubt_until = -inf

    def end_access_logs(self) -> None:
        for end in list(self.log_ends):
            end()

    def beat(self) -> None:
        """Called twice a second or more often while the event loop turns. Who never calls it never hangs."""
        now = self.now()
        self.doubtful(now)  # after a hang, timers may come before what the sockets hold
        self._beat = now

    def doubtful(self, now: float) -> bool:
        """Whether a request read now may have been given up by its gateway while we hung."""
        if now - self._beat > HANG:
            self._doubt_until = now + HANG
        return now < self._doubt_until

    def session(self, stream: ServerStream, metadata: Mapping[str, str]) -> "Session":
        return Session(stream, self, ACCESS_LOG_METADATA in metadata, WHOLE_BODY_METADATA in metadata)


class Session:
    """See the module's rules. States: collecting → waiting → routed → closed."""

    __slots__ = (
        "_announced", "_awaited", "_begun", "_body", "_chunks", "_closed", "_collected", "_eager", "_headers", "_host",
        "_parts", "_request", "_request_mode", "_response_mode", "_size", "_stream", "_subset", "_trailers", "_watch",
        "_whole",
    )  # fmt: skip

    def __init__(self, stream: ServerStream, host: Host, announced: bool, whole: bool) -> None:
        self._stream = stream
        self._host = host
        self._announced = announced
        self._whole = whole
        self._request_mode = self._response_mode = BodyMode.FULL_DUPLEX  # what the protocol demands of gateways
        self._eager = False
        #: A message was taken. Only the first one may be the headers, or tell the modes.
        self._begun = False
        self._headers: Mapping[str, str] = {}
        self._subset: frozenset[str] | None = None
        self._parts: list[bytes] = []
        self._size = 0
        #: Once collected: the whole body (under full duplex, where it is handed back) and in how many messages it came.
        self._body = b""
        self._chunks = 0
        self._collected = False
        #: The message that the pick answers.
        self._awaited = Kind.REQUEST_HEADERS
        self._trailers = False
        self._request: Request | None = None
        self._closed = False
        self._watch: ResponseWatch | None = None

    # ---- the transport calls ----

    def on_message(self, data: bytes) -> None:
        if self._closed:
            return
        try:
            message = Incoming(data)
            modes = None if self._begun else message.modes()
            if modes is not None:
                self._request_mode, self._response_mode, self._eager = modes
            _HANDLERS[message.kind](self, message)
            self._begun = True
        except ProtocolError as error:
            self._give_up()
            self._stream.finish(_INVALID_ARGUMENT, str(error))

    def on_half_close(self) -> None:
        self._give_up()
        self._stream.finish()

    def on_lost(self, why: str) -> None:
        self._give_up()

    # ---- the request ----

    def _request_headers(self, message: Incoming) -> None:
        if self._begun:
            raise ProtocolError("request headers that are not the first message")
        self._headers, eos = message.headers()
        self._subset = message.subset()
        mode = self._request_mode
        if eos or mode is BodyMode.NONE or (mode is BodyMode.STREAMED and not self._eager):
            self._complete(Kind.REQUEST_HEADERS)
        elif mode in (BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL):
            self._stream.send(CONTINUE[Kind.REQUEST_HEADERS])

    def _request_body(self, message: Incoming) -> None:
        if self._trailers:
            raise ProtocolError("a request body after the trailers")
        chunk, eos = message.body()
        mode = self._request_mode
        if self._collected:
            if mode is BodyMode.STREAMED:
                self._stream.send(CONTINUE[Kind.REQUEST_BODY])
            return
        self._size += len(chunk)
        if self._size > self._host.max_body:
            self._fail(ClientError(f"the request body is larger than {self._host.max_body} bytes", 413))
            return
        self._parts.append(chunk)
        if mode is BodyMode.BUFFERED_PARTIAL and not eos:
            self._wave_through(Kind.REQUEST_BODY)
        elif mode is BodyMode.BUFFERED or mode is BodyMode.BUFFERED_PARTIAL:
            self._complete(Kind.REQUEST_BODY)
        elif eos or self._whole:
            self._complete(Kind.REQUEST_HEADERS)

    def _request_trailers(self, message: Incoming) -> None:
        if self._trailers:
            raise ProtocolError("request trailers for the second time")
        self._trailers = True
        if self._collected:
            self._stream.send(CONTINUE[Kind.REQUEST_TRAILERS])
        elif self._request_mode in (BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL):
            self._wave_through(Kind.REQUEST_TRAILERS)  # no body, and the headers are answered: nothing can carry a pick
        else:
            self._complete(Kind.REQUEST_HEADERS)

    def _complete(self, awaited: Kind) -> None:
        """The request is whole (or as whole as it will get before the choice): have it scheduled."""
        self._collected = True
        self._awaited = awaited
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        host = self._host
        try:
            self._request = host.understanding.request(self._headers, body, self._subset)
        except ClientError as error:
            self._fail(error)
            return
        self._chunks = len(self._parts)
        self._parts.clear()
        if self._request_mode is BodyMode.FULL_DUPLEX:
            self._body = body
        host.driver.waiting[self._request.id] = self
        host.driver.feed(RequestArrived(self._request))

    def _wave_through(self, kind: Kind) -> None:
        """Let the gateway go on without a choice of ours."""
        self._closed = True
        self._stream.send(CONTINUE[kind])
        self._stream.finish()

    def _fail(self, error: ClientError) -> None:
        api = "chat" if "chat" in self._headers.get(":path", "") else "other"
        self._closed = True
        self._host.incidents.on_client_error(api, error.status)
        self._stream.send(client_error(api, error.status, error.message, error.param, error.code))
        self._stream.finish()

    # ---- the answer ----

    def reject(self, reject: Reject) -> None:
        self._closed = True
        self._stream.send(refusal(reject))
        self._stream.finish()

    def route(self, endpoint: Endpoint) -> None:
        request = self._request
        assert request is not None
        spoofed = CONTROL_HEADERS.intersection(self._headers)
        messages = [self._host.answers.pick(self._awaited, endpoint, request.id, spoofed)]
        if self._awaited is Kind.REQUEST_HEADERS:
            messages += self._rest_of_request()
        self._body = b""
        leaving = self._may_leave_at_pick(messages)
        self._stream.send(*messages)
        if leaving:
            self._leave()
        else:
            if self._wired():
                self._stream.watch_cancel(False)  # the access log tells the end in any case
            self._watch = ResponseWatch(request.arrived, request.stream, self._host.now)

    def _rest_of_request(self) -> list[bytes]:
        """Answers to the body messages (and trailers) that came before the pick."""
        messages: list[bytes] = []
        if self._request_mode is BodyMode.FULL_DUPLEX and self._chunks:
            messages = ext_proc.streamed_body(Kind.REQUEST_BODY, self._body, end_of_stream=not self._trailers)
        elif self._request_mode is BodyMode.STREAMED:
            messages = [CONTINUE[Kind.REQUEST_BODY]] * self._chunks
        if self._trailers:
            messages.append(CONTINUE[Kind.REQUEST_TRAILERS])
        return messages

    def _wired(self) -> bool:
        """The gateway will tell us the end of this request."""
        return self._announced and self._host.access_logs > 0

    def _may_leave_at_pick(self, messages: list[bytes]) -> bool:
        request = self._request
        if request is None or not self._wired() or self._host.doubtful(request.arrived):
            return False
        if self._response_mode is BodyMode.NONE:
            return self._request_mode is not BodyMode.STREAMED or self._eager
        if self._response_mode is BodyMode.FULL_DUPLEX:
            # 16 bytes a message cover the gRPC prefix and HTTP/2 framing; the trailers are not flow-controlled.
            return sum(map(len, messages)) + 16 * len(messages) <= self._stream.room()
        # The first byte of an answer that is not streamed is its end: the access log tells it as well as we could.
        return not request.stream and request.api != "other" and not self._host.inspect(False)

    # ---- the response ----

    def _response_headers(self, message: Incoming) -> None:
        watch = self._watch
        if watch is None or watch.started:
            raise ProtocolError("response headers before the request was routed, or for the second time")
        headers, eos = message.headers()
        watch.headers(headers)
        self._stream.send(CONTINUE[Kind.RESPONSE_HEADERS])
        if eos or self._response_mode is BodyMode.NONE:
            self._end()

    def _response_body(self, message: Incoming) -> None:
        watch, request = self._watch, self._request
        if watch is None or request is None:
            raise ProtocolError("a response body before the request was routed")
        chunk, eos = message.body()
        if not watch.started:  # no headers message came; the status is an attribute then
            watch.status(message.attributes().get("response.code"))
        first = watch.chunk(chunk, self._host.driver, request.id)
        if self._response_mode is BodyMode.FULL_DUPLEX:
            self._stream.send(*ext_proc.echo(message))
        else:
            self._stream.send(CONTINUE[Kind.RESPONSE_BODY])
        if eos:
            self._end()
        elif first and self._response_mode is BodyMode.STREAMED and self._wired():
            inspected = watch.is_sse and self._host.inspect(True)
            if not inspected:
                self._end()

    def _response_trailers(self, message: Incoming) -> None:
        if self._watch is None:
            raise ProtocolError("response trailers before the request was routed")
        self._stream.send(CONTINUE[Kind.RESPONSE_TRAILERS])
        self._end()

    def _end(self) -> None:
        """Nothing more to see, or to wait for: report what was seen, and leave."""
        request, watch = self._request, self._watch
        if request is not None and watch is not None:
            usage = watch.usage()
            if not self._wired() or watch.error_status:
                self._host.driver.feed(watch.ended(request.id))
            elif usage is not None:
                self._host.driver.feed(UsageReported(request.id, usage))
        self._leave()

    def _leave(self) -> None:
        self._closed = True
        self._stream.finish()

    def _give_up(self) -> None:
        """The stream is gone. Before a response message that means the request is too; later the access log knows."""
        if self._closed:
            return
        self._closed = True
        self._parts.clear()
        self._body = b""
        request, watch = self._request, self._watch
        if request is None:
            return
        self._host.driver.waiting.pop(request.id, None)
        if watch is None or not watch.started:
            self._host.driver.feed(StreamLost(request.id))
        elif not self._wired():
            self._host.driver.feed(watch.ended(request.id, client_gone=True))


_HANDLERS: Mapping[Kind, Callable[[Session, Incoming], None]] = {
    Kind.REQUEST_HEADERS: Session._request_headers,
    Kind.REQUEST_BODY: Session._request_body,
    Kind.REQUEST_TRAILERS: Session._request_trailers,
    Kind.RESPONSE_HEADERS: Session._response_headers,
    Kind.RESPONSE_BODY: Session._response_body,
    Kind.RESPONSE_TRAILERS: Session._response_trailers,
}
