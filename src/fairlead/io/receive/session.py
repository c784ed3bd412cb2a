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
* A request whose model has another name at its endpoint leaves with another body, and its response is followed to its
  end, to map the name back (`renaming`).
* Whoever leaves last releases the lease: the access log if wired, else this session. What the log cannot tell see
  `departures`; why no session leaves at the pick for a moment after this process hung, `pulse`.
"""

from collections.abc import Callable, Mapping

from fairlead.io.receive.answers import client_error, client_is_told, refusal, rest_of_request
from fairlead.io.receive.models_page import models_page
from fairlead.io.receive.renaming import Renaming
from fairlead.io.receive.response import ResponseWatch
from fairlead.io.receive.shared import Shared
from fairlead.io.receive.stream import ServerStream
from fairlead.model.endpoint import Endpoint
from fairlead.model.errors import ClientError, ProtocolError
from fairlead.model.events import StreamLost, UsageReported
from fairlead.model.instructions import Reject
from fairlead.model.request import Request
from fairlead.parse.splice import splice_model
from fairlead.route.headers import ACCESS_LOG_METADATA, REMOVED_HEADERS, RESIZABLE_METADATA, WHOLE_BODY_METADATA
from fairlead.wire import ext_proc
from fairlead.wire.access_log import GATEWAY_ID
from fairlead.wire.ext_proc import CONTINUE, BodyMode, Incoming, Kind

_INVALID_ARGUMENT = 3


class Host(Shared):
    """Opens sessions."""

    def session(self, stream: ServerStream, metadata: Mapping[str, str]) -> "Session":
        announced, whole = ACCESS_LOG_METADATA in metadata, WHOLE_BODY_METADATA in metadata
        return Session(stream, self, announced, whole, RESIZABLE_METADATA in metadata)


class Session:
    """See the module's rules. States: collecting → waiting → routed → closed."""

    __slots__ = (
        "_announced", "_awaited", "_begun", "_body", "_chunks", "_closed", "_collected", "_eager", "_ended", "_headers",
        "_host", "_parts", "_renaming", "_request", "_request_mode", "_resizable", "_response_mode", "_size",
        "_stream", "_subset", "_trailers", "_watch", "_whole",
    )  # fmt: skip

    def __init__(self, stream: ServerStream, host: Host, announced: bool, whole: bool, resizable: bool) -> None:
        self._stream = stream
        self._host = host
        self._announced = announced
        self._whole = whole
        self._resizable = resizable
        self._request_mode = self._response_mode = BodyMode.FULL_DUPLEX  # what the protocol demands of gateways
        self._eager = False
        #: A message was taken. Only the first one may be the headers, or tell the modes.
        self._begun = self._collected = self._ended = False
        self._headers: Mapping[str, str] = {}
        self._subset: frozenset[str] | None = None
        self._parts: list[bytes] = []
        self._size = 0
        #: Once collected: the whole body (under full duplex, where it is handed back) and in how many messages it came.
        self._body = b""
        self._chunks = 0
        #: The message that the pick answers.
        self._awaited = Kind.REQUEST_HEADERS
        self._trailers = self._closed = False
        self._request: Request | None = None
        self._watch: ResponseWatch | None = None
        self._renaming: Renaming | None = None  # the response is going to be changed

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
        self._headers, self._ended = message.headers()
        self._subset = message.subset()
        mode = self._request_mode
        if self._ended or mode is BodyMode.NONE or (mode is BodyMode.STREAMED and not self._eager):
            self._complete(Kind.REQUEST_HEADERS)
        elif mode in (BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL):
            self._stream.send(CONTINUE[Kind.REQUEST_HEADERS])

    def _request_body(self, message: Incoming) -> None:
        if self._trailers:
            raise ProtocolError("a request body after the trailers")
        chunk, self._ended = message.body()
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
        if mode is BodyMode.BUFFERED_PARTIAL and not self._ended:
            self._answer(CONTINUE[Kind.REQUEST_BODY])  # waved through
        elif mode is BodyMode.BUFFERED or mode is BodyMode.BUFFERED_PARTIAL:
            self._complete(Kind.REQUEST_BODY)
        elif self._ended or self._whole:
            self._complete(Kind.REQUEST_HEADERS)

    def _request_trailers(self, message: Incoming) -> None:
        if self._trailers:
            raise ProtocolError("request trailers for the second time")
        self._trailers = True
        if self._collected:
            self._stream.send(CONTINUE[Kind.REQUEST_TRAILERS])
        elif self._request_mode in (BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL):
            # Waved through. There is no body, and the headers are answered: nothing can carry a pick.
            self._answer(CONTINUE[Kind.REQUEST_TRAILERS])
        else:
            self._complete(Kind.REQUEST_HEADERS)

    def _complete(self, awaited: Kind) -> None:
        """The request is whole (or as whole as it will get before the choice): have it scheduled."""
        self._collected = True
        self._awaited = awaited
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        host = self._host
        page = None if body else models_page(host.driver.pipeline.models, self._headers)
        if page is not None:
            self._answer(page)
            return
        try:
            self._request = host.understanding.request(self._headers, body, self._subset)
        except ClientError as error:
            self._fail(error)
            return
        self._chunks = len(self._parts)
        self._parts.clear()
        if self._request_mode is BodyMode.FULL_DUPLEX or host.driver.pipeline.models.may_rewrite(self._request):
            self._body = body
        host.driver.waiting[self._request.id] = self
        host.arrive(self._request)

    def _fail(self, error: ClientError) -> None:
        api = self._host.understanding.api(self._headers)
        self._host.incidents.on_client_error(api, error.status)
        self._answer(client_error(api, error.status, error.message, error.param, error.code))

    # ---- the answer ----

    def hold(self, seconds: float) -> None:
        if self._request_mode is not BodyMode.FULL_DUPLEX:  # which Envoy gives no time limit
            self._stream.send(ext_proc.message_timeout(seconds))

    def stay(self) -> None:
        """To the end, as if no access log told it: whoever may be evicted must be within reach."""
        self._announced = False

    def _answer(self, message: bytes) -> None:
        """Say this, and no more."""
        self._closed = True
        self._stream.send(message)
        self._stream.finish()

    def reject(self, reject: Reject) -> None:
        self._answer(refusal(reject))

    def route(self, endpoint: Endpoint, target: str = "", shown: str = "", prefill: str = "", second: str = "") -> None:
        request = self._request
        assert request is not None
        removed = REMOVED_HEADERS.intersection(self._headers)
        others = prefill, second if self._resizable and self._ended else ""  # with trailers Envoy would double the body
        if target:
            messages = self._rewritten(request, endpoint, removed, target, shown, *others)
        else:
            messages = [self._host.answers.pick(self._awaited, endpoint, request.id, removed, *others)]
            if self._awaited is Kind.REQUEST_HEADERS:
                messages += rest_of_request(self._request_mode, self._body, self._chunks, self._trailers)
        self._body = b""
        if not messages:
            # In a turn of its own: the decision is not recorded yet.
            self._host.driver.later(0.0, self._host.driver.feed, StreamLost(request.id))
            self._fail(ClientError("the model's name cannot be replaced in this body", 400, "model"))
            return
        leaving = self._may_leave_at_pick(messages)
        self._stream.send(*messages)
        if leaving:
            self._host.departures.left(request.id, self._headers.get(GATEWAY_ID, ""), self._stream)
            self._leave()
        else:
            if self._wired():
                self._stream.watch_cancel(False)  # the access log tells the end in any case
            self._watch = ResponseWatch(request.arrived, request.stream, self._host.now, request.api, second)

    def _rewritten(
        self, request: Request, endpoint: Endpoint, removed: frozenset[str], target: str, shown: str, *others: str
    ) -> list[bytes]:
        """The pick with another model name in the body; nothing if there is no place for it."""
        body = splice_model(self._body, target, self._headers.get("content-type", ""), request.api)
        if body is None:
            return []
        mode = self._response_mode
        if shown and mode is not BodyMode.NONE:
            self._renaming = Renaming(target, shown, mode, request.stream, self._resizable)
        modes, mapped = (self._request_mode, mode, self._eager), self._renaming is not None
        rest = self._trailers, mapped
        return self._host.answers.pick_with_body(modes, endpoint, request.id, removed, body, *rest, *others)

    def _wired(self) -> bool:
        """The gateway will tell us the end of this request."""
        return self._announced and self._host.access_logs > 0

    def _may_leave_at_pick(self, messages: list[bytes]) -> bool:
        request = self._request
        if self._renaming is not None or self._host.tells_served:
            return False
        if request is None or not self._wired() or self._host.pulse.doubtful(request.arrived):
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
        self._stream.send(self._response_head(message, headers))
        if eos or self._response_mode is BodyMode.NONE:
            self._end()

    def _response_head(self, message: Incoming, headers: Mapping[str, str]) -> bytes:
        if self._renaming is not None:
            return self._renaming.headers(headers)
        served = message.served() if self._host.tells_served else ""
        return client_is_told(served) if served else CONTINUE[Kind.RESPONSE_HEADERS]

    def _response_body(self, message: Incoming) -> None:
        watch, request = self._watch, self._request
        if watch is None or request is None:
            raise ProtocolError("a response body before the request was routed")
        chunk, eos = message.body()
        if not watch.started:  # no headers message came; the status is an attribute then
            watch.attributes(message.attributes(), self._host.driver, request.id)
        first = watch.chunk(chunk, self._host.driver, request.id)
        if self._renaming is not None:
            self._stream.send(*self._renaming.chunk(chunk, eos))
        elif self._response_mode is BodyMode.FULL_DUPLEX:
            self._stream.send(*ext_proc.echo(message))
        else:
            self._stream.send(CONTINUE[Kind.RESPONSE_BODY])
        may_leave = first and self._response_mode is BodyMode.STREAMED and self._wired() and self._renaming is None
        if eos or (may_leave and not (watch.is_sse and self._host.inspect(True))):
            self._end()

    def _response_trailers(self, message: Incoming) -> None:
        if self._watch is None:
            raise ProtocolError("response trailers before the request was routed")
        if self._renaming is not None:
            self._stream.send(*self._renaming.rest())
        self._stream.send(CONTINUE[Kind.RESPONSE_TRAILERS])
        self._end()

    def _end(self) -> None:
        """Nothing more to see, or to wait for: report what was seen, and leave."""
        request, watch = self._request, self._watch
        if request is not None and watch is not None:
            usage = watch.usage()
            if not self._wired() or watch.error_status:
                self._host.driver.feed(watch.ended(request.id))
            else:
                self._host.departures.left(request.id, "", self._stream)
                if usage is not None:
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
        elif self._wired():
            self._host.departures.left(request.id, "", self._stream)
        else:
            self._host.driver.feed(watch.ended(request.id, client_gone=not watch.complete))


_HANDLERS: Mapping[Kind, Callable[[Session, Incoming], None]] = {
    Kind.REQUEST_HEADERS: Session._request_headers,
    Kind.REQUEST_BODY: Session._request_body,
    Kind.REQUEST_TRAILERS: Session._request_trailers,
    Kind.RESPONSE_HEADERS: Session._response_headers,
    Kind.RESPONSE_BODY: Session._response_body,
    Kind.RESPONSE_TRAILERS: Session._response_trailers,
}
