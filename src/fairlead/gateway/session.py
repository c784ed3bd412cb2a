"""One ext_proc stream = one HTTP request: collect it, schedule it, answer the gateway, leave as soon as that is safe.

    opened → collecting → (asking knowledge) → waiting → routed → answering → closed
    without a pick: → local reply → closed

Rules (Envoy 1.40; tests/integration/pitfalls/README.md has the measurements)
* `_LEGAL` lists the messages that each state accepts; any other message breaks the stream. Every state can become
  `closed`. If the endpoint is chosen by the headers alone, the request body may still arrive during the response. Its
  messages are legal until the request's trailers.
* The answer to the headers precedes every answer to a body. Under full duplex, the answer to the headers waits for the
  whole body, and the session must hand the body back. In the other modes the gateway keeps the body itself. Envoy 1.35
  to 1.37 may repeat the last message of a body above 1 MB there (envoyproxy/envoy#46237): the repetition is ignored.
* BUFFERED and BUFFERED_PARTIAL: headers are answered immediately; the answer to the body carries the pick. A truncated
  BUFFERED_PARTIAL body (end_of_stream false) passes unscheduled: the gateway ignores a pick there.
* NONE, and STREAMED without `send_body_without_waiting_for_header_response`: the gateway routes as soon as the headers
  are answered, so the endpoint is chosen by the headers alone.
* The endpoint for a WebSocket or CONNECT is chosen by its headers. Under full duplex the session echoes both directions
  to the end (if it left at the pick, Envoy would reset the tunnel). With a gateway that buffers, it leaves at the pick.
* STREAMED with that flag: headers and body arrive together, and the answer to the headers waits for the body, as under
  full duplex. A gateway that buffers before ext_proc announces it with the initial metadata `fairlead-whole-body`: the
  first body message is then the whole body, even if trailers follow (end_of_stream false).
* Leaving (ending the gRPC stream with OK) must not lose a byte. With a STREAMED or BUFFERED response the gateway keeps
  each chunk until it is answered, so leaving is safe at any moment. With NONE no more messages follow. With a
  FULL_DUPLEX response the gateway does not keep the chunks that it sends. Then leaving is only safe at the pick, and
  only if all answers fit into one write; otherwise the session echoes the response to its end.
* A session that leaves early relies on the access log to report the request's end. A gateway that sends us its access
  log announces that with the initial metadata `fairlead-access-log` on each stream. While such a log is connected,
  sessions leave early; otherwise they stay. The session of a response that is not streamed leaves at the pick, because
  the first byte of that response comes when all tokens are done. A share of the responses is nevertheless followed to
  the end, to learn token counts (`Inspection`).
* A gateway may half-close after the request: it forwards the request itself and does not show the response. It still
  gets its pick, even if the request has to wait. Nobody reports the end of such a request, so its lease is released at
  the pick, and its load is what the scrapes show.
* A response before the pick is a local reply: the gateway or one of its filters refused the request, often before
  showing us any of it. The session passes the reply on unchanged and gives up the request.
* Only the gateway's metadata (`Incoming.served`) says which endpoint served: neither clients nor model servers can set
  it. If it is not the picked endpoint, the lease moves.
* If the model has another name at the endpoint, the session changes the request body and follows the response to its
  end, to map the name back (`response.Renaming`).
* The last observer releases the lease: the access log if the gateway sends one, otherwise this session. `access_log`
  explains what the log cannot report, and why no session leaves at the pick for a moment after this process hung.
"""

from collections.abc import Callable, Mapping
from enum import IntEnum
from functools import partial
from random import Random

from msgspec.structs import replace

from fairlead.apis.splice import splice_model
from fairlead.core.apis import OTHER
from fairlead.core.errors import ClientError, ProtocolError
from fairlead.core.events import FirstTokenSeen, RequestArrived, RequestMoved, ResponseBegan, StreamLost, UsageReported
from fairlead.core.headers import ACCESS_LOG_METADATA, REQUEST_ID, RESIZABLE_METADATA, WHOLE_BODY_METADATA
from fairlead.core.instructions import Reject, Route
from fairlead.core.request import Request
from fairlead.gateway import ext_proc
from fairlead.gateway.access_log import GATEWAY_ID, GRACE
from fairlead.gateway.answers import client_error, client_is_told, models_page, refusal, rest_of_request
from fairlead.gateway.ext_proc import (
    CONTINUE,
    BodyMode,
    Incoming,
    Kind,
    Modes,
    opens_tunnel,
    read_last_chunk,
    read_opening,
)
from fairlead.gateway.host import Host, Leave, ProcessingMode, processing_mode, without_access_log
from fairlead.gateway.response import Renaming, ResponseWatch
from fairlead.gateway.stream import HandlerFactory, ServerStream
from fairlead.gateway.understand import MAX_NAME, NO_HEAD, Reading

_INVALID_ARGUMENT, _INTERNAL = 3, 13
#: Headers messages above this size (bytes) count toward the memory budget. Envoy's own limit for headers is 60 KiB.
_SMALL_HEAD = 16 << 10
_BODY_CONTINUES = CONTINUE[Kind.REQUEST_BODY]


class SessionState(IntEnum):
    """Where a session is in its stream. The rules of the module explain the transitions."""

    #: No message was read yet.
    OPENED = 0
    #: The headers were read; the rest of the request is still arriving.
    COLLECTING = 1
    #: The request is complete, and its prompt is being read.
    ASKING_KNOWLEDGE = 2
    #: The scheduler has the request.
    WAITING = 3
    #: The gateway has the pick. No part of the response was seen.
    ROUTED = 4
    #: Part of the response was seen.
    ANSWERING = 5
    #: A response arrives although there was no pick.
    LOCAL_REPLY = 6
    #: The last answer was sent, or the stream is gone.
    CLOSED = 7


#: Enum members on the path of every request, as module names: one look-up instead of two.
_OPENED, _COLLECTING, _WAITING = SessionState.OPENED, SessionState.COLLECTING, SessionState.WAITING
_CLOSED, _HEADERS = SessionState.CLOSED, Kind.REQUEST_HEADERS
_ALWAYS, _UNSTREAMED = Leave.ALWAYS, Leave.UNSTREAMED


class RequestEnd(IntEnum):
    """How much of the request's end was seen."""

    OPEN = 0
    #: The request's last message had end_of_stream set.
    MARKED = 1
    TRAILERS = 2


_MARKED = RequestEnd.MARKED


class Session:
    """A `StreamHandler` for the transport and a `Client` for the driver. See the module's rules."""

    # Initial values as class attributes: an instance stores only what changes.
    _state = SessionState.OPENED
    _request_end = RequestEnd.OPEN
    _head = NO_HEAD
    # Size in bytes of a large headers message, which counts toward the memory budget; 0 = small.
    _head_size = 0
    # The gateway's own id of the request, and the x-request-id.
    _gateway_id = _request_id = ""
    # Chunks of a body that comes in several messages, and their total size in bytes.
    _parts: list[bytes] | None = None
    _size = 0
    # The gateway has half-closed and only waits for the pick.
    _only_asks = False
    # Set by the first message.
    _mode: ProcessingMode
    # Set when the request is complete. `_awaited`: the message whose answer carries the pick. `_body`: kept only if it
    # must be handed back or may change. `_chunks`: the number of messages that it came in.
    _request: Request
    _awaited = Kind.REQUEST_HEADERS
    _body = b""
    _chunks = 1
    # Set while the prompt is being read.
    _reading: Reading
    # Set at the pick. `_picked`: the endpoint's address. `_fallback`: the address of the endpoint that gets the request
    # if the picked one does not answer; empty = none. `_renaming`: set if the response will be changed.
    _picked: str
    _fallback: str
    _renaming: Renaming | None = None
    _watch: ResponseWatch
    # Set if the session reads the whole response to learn its token counts.
    _followed = False
    # Whether the pipeline knows the token counts, from the last event of a response that goes on.
    _reported = False
    # Whether the pipeline knows that the response began before its first token.
    _began = False
    # Address of the endpoint that answers instead of the picked one, until reported; empty = none does, or unknown.
    _moved_to = ""

    def __init__(self, host: Host, stream: ServerStream, metadata: Mapping[str, str]) -> None:
        self._host = host
        self._stream = stream
        self._metadata = metadata

    # ---- the transport calls ----

    def on_message(self, data: bytes) -> None:
        try:
            if self._state is _OPENED:
                opening = read_opening(data)
                if opening is not None:
                    known, self._gateway_id, self._request_id = opening
                    self._head = self._host.understanding.known_head(known)
                    mode = self._begin(known.modes)
                    if known.ended or mode.at_once:
                        self._after_headers(known.ended)
                    return
            elif self._state is _COLLECTING:
                chunk = read_last_chunk(data)
                if chunk is not None:
                    if self._parts is None and not self._mode.buffered and len(chunk) <= self._host.max_body:
                        self._request_end = _MARKED
                        self._complete(chunk)
                    else:
                        self._take_chunk(chunk, True)
                    return
            elif self._state is _CLOSED:
                return
            message = Incoming(data)
            handler = _LEGAL[self._state].get(message.kind)
            if handler is None:
                raise ProtocolError(f"unexpected message {message.kind.name} in state {self._state.name}")
            if self._state is _OPENED:
                self._begin(message.modes())
            handler(self, message)
        except ProtocolError as error:
            self._host.incidents.on_protocol_error(str(error))
            self.on_lost("")
            self._stream.finish(_INVALID_ARGUMENT, str(error))

    def on_half_close(self) -> None:
        if self._state in (SessionState.ASKING_KNOWLEDGE, _WAITING):
            self._only_asks = True
            return
        self.on_lost("")
        self._stream.finish()

    def on_lost(self, why: str) -> None:
        """The stream broke. Before the pick the request is lost. After it, the access log reports the end: no message
        shows a response without a body, such as that of an error. A complete response has ended by trailers, or the
        client left with its last event."""
        state = self._state
        self._close()
        if state is SessionState.ROUTED and self._mode.access_log and not self._only_asks:
            host, number = self._host, self._request.id
            if self._gateway_id:
                host.logs.left(self._gateway_id, number)
            host.driver.later(GRACE, lambda: host.feed(StreamLost(number)))
        elif state is _WAITING or state is SessionState.ROUTED:
            self._host.feed(StreamLost(self._request.id))
        elif state is SessionState.ASKING_KNOWLEDGE:
            self._reading.cancel()
            self._host.incidents.on_left(self._request)
        elif state is SessionState.ANSWERING and self._wired():
            if self._watch.complete or self._watch.error_status:
                self._report()
        elif state is SessionState.ANSWERING:
            host, watch = self._host, self._watch
            self._move()
            end = watch.ended(host.now(), client_gone=not watch.complete)
            if end.client_gone and self._mode.access_log:  # the log may open within GRACE, with this request's entry
                host.driver.later(GRACE, lambda: host.feed(end))
            else:
                host.feed(end)

    # ---- the request ----

    def _begin(self, modes: Modes | None) -> ProcessingMode:
        """Set the processing mode. `modes`: as announced in the first message."""
        self._state = _COLLECTING
        metadata = self._metadata
        mode = self._mode = processing_mode(
            modes, ACCESS_LOG_METADATA in metadata, WHOLE_BODY_METADATA in metadata, RESIZABLE_METADATA in metadata
        )
        return mode

    def _on_request_headers(self, message: Incoming) -> None:
        headers, ended = message.headers()
        if len(message.data) > _SMALL_HEAD and not self._has_room(len(message.data), ended):
            return
        self._head = self._host.understanding.head(headers, message.subset())
        self._gateway_id, self._request_id = headers.get(GATEWAY_ID, ""), headers.get(REQUEST_ID, "")[:MAX_NAME]
        if opens_tunnel(headers, ended):
            self._open_tunnel()
        else:
            self._after_headers(ended)

    def _open_tunnel(self) -> None:
        mode = self._mode
        if BodyMode.FULL_DUPLEX in mode.modes:
            self._mode = without_access_log(mode)
        self._only_asks = mode.buffered
        self._chunks = 0
        self._complete(b"")

    def _has_room(self, size: int, ended: bool) -> bool:
        """Charge a large headers message to the memory budget. False = no room, and the stream has been ended."""
        self._head_size, self._parts = size, []
        self._stream.hold(size, size + 1)
        if ended or self._mode.on_headers:
            self._stream.hold(size)
        return self._state is _COLLECTING

    def _after_headers(self, ended: bool) -> None:
        if ended:
            self._request_end = _MARKED
        if ended or self._mode.on_headers:
            self._chunks = 0
            self._complete(b"")
        elif self._mode.buffered:
            self._stream.send(CONTINUE[Kind.REQUEST_HEADERS])

    def _on_request_body(self, message: Incoming) -> None:
        self._take_chunk(*message.body())

    def _take_chunk(self, chunk: bytes, ended: bool) -> None:
        self._request_end = _MARKED if ended else RequestEnd.OPEN
        self._size += len(chunk)
        if self._size > self._host.max_body:
            self._fail(ClientError(f"the request body is larger than {self._host.max_body} bytes", 413))
            return
        if self._parts is None:
            self._parts = [chunk]
        else:
            self._parts.append(chunk)
        mode = self._mode
        if mode.request is BodyMode.BUFFERED_PARTIAL and not ended:
            self._answer(CONTINUE[Kind.REQUEST_BODY])  # truncated: passes unscheduled
        elif mode.buffered:
            self._awaited = Kind.REQUEST_BODY
            self._complete_parts()
        elif ended or (mode.whole_body and self._size >= self._announced_length()):
            self._complete_parts()
        else:
            expected = min(max(self._announced_length(), self._size + 1), self._host.max_body)
            self._stream.hold(self._head_size + self._size, self._head_size + expected)

    def _announced_length(self) -> int:
        length = self._head.headers.get("content-length", "")
        return int(length) if length.isdecimal() and len(length) < 12 else 0

    def _on_request_trailers(self, message: Incoming) -> None:
        self._request_end = RequestEnd.TRAILERS
        if self._mode.buffered:
            # Passes unscheduled. There is no body, and the headers were already answered: no answer can carry a pick.
            self._answer(CONTINUE[Kind.REQUEST_TRAILERS])
        else:
            self._complete_parts()

    def _on_late_body(self, message: Incoming) -> None:
        """Take a body message that arrives after the request was scheduled by its headers, or the last one repeated."""
        self._refuse_after_trailers()
        full_duplex = self._mode.full_duplex
        _, ended = message.body()
        if full_duplex and self._request_end is _MARKED and ended and self._chunks:
            return
        if full_duplex and (self._request_end is _MARKED or self._state < SessionState.ROUTED):
            raise ProtocolError("the request goes on after its end, or before its tunnel is open")
        self._request_end = _MARKED if ended else RequestEnd.OPEN
        if full_duplex:
            self._stream.send(*ext_proc.echo(message))
        elif self._mode.request is BodyMode.STREAMED:
            self._stream.send(CONTINUE[Kind.REQUEST_BODY])

    def _on_late_trailers(self, message: Incoming) -> None:
        self._refuse_after_trailers()
        self._request_end = RequestEnd.TRAILERS
        self._stream.send(CONTINUE[Kind.REQUEST_TRAILERS])

    def _refuse_after_trailers(self) -> None:
        if self._request_end is RequestEnd.TRAILERS:
            raise ProtocolError("the request goes on after its trailers")

    def _complete_parts(self) -> None:
        parts, self._parts = self._parts or [], None
        self._chunks = len(parts)
        if len(parts) > 1 or self._head_size:
            self._stream.hold(self._head_size)
        self._complete(b"".join(parts))

    def _complete(self, body: bytes) -> None:
        """Schedule the request, which is complete, or as complete as it gets before the choice of an endpoint."""
        host, mode = self._host, self._mode
        if not body:
            page = models_page(host.driver.pipeline.models, self._head.headers, host.served)
            if page is not None:
                self._answer(page)
                return
            if self._request_end is not RequestEnd.OPEN:
                self._head = replace(self._head, empty=True)
        try:
            request, reading = host.understanding.request(self._head, body, mode.blind, self._request_id)
        except ClientError as error:
            self._fail(error)
            return
        self._request = request
        # Keep the body if the name may change. A rule that renames models may arrive while the prompt is being read.
        if mode.full_duplex or host.driver.pipeline.models.rewrites or request.rewrite or reading is not None:
            self._body = body
            if body:
                self._stream.hold(len(body) + self._head_size)
        if reading is None:
            self._state = _WAITING
            host.feed(RequestArrived(request, self))
        else:
            self._state = SessionState.ASKING_KNOWLEDGE
            self._reading = reading
            reading.add_done_callback(self._on_knowledge)

    def _on_knowledge(self, reading: Reading) -> None:
        """Reading the prompt ended. If it failed, the request arrives with what its bytes alone showed."""
        if self._state is SessionState.ASKING_KNOWLEDGE:
            if not reading.cancelled() and reading.exception() is None:
                self._request = self._host.understanding.known(self._request, reading.result(), self._head)
            self._state = _WAITING
            self._host.feed(RequestArrived(self._request, self))

    def _fail(self, error: ClientError, lease: str = "") -> None:
        """Answer with this error. `lease`: the id of the decision, if the pipeline has made one."""
        headers = self._head.headers
        api = self._host.understanding.api(headers)
        unseen = None if lease else {**headers, REQUEST_ID: self._request_id}
        tenant = self._head.hints.fairness_id
        self._host.incidents.on_client_error(api, error.status, error.code or "bad-request", unseen, tenant)
        self._answer(client_error(api, error.status, error.message, error.param, error.code, lease))

    # ---- the driver calls ----

    def hold(self, seconds: float) -> None:
        if self._state is _WAITING and not self._mode.full_duplex:
            self._stream.send(ext_proc.message_timeout(seconds))  # under full duplex Envoy sets no time limit

    def reject(self, reject: Reject) -> None:
        if self._state < SessionState.LOCAL_REPLY:
            self._answer(refusal(reject, self._host.answers.lease(reject.request_id)))

    def connected(self) -> bool:
        return self._stream.connected()

    def fail(self) -> None:
        self._close()
        self._stream.finish(_INTERNAL, "internal error")

    def route(self, route: Route) -> None:
        if self._state is not _WAITING:
            return
        host, mode, request = self._host, self._mode, self._request
        if route.evictable:  # stay to the end: only an open stream can evict the request
            mode = self._mode = without_access_log(mode)
        # A retry of a request with trailers would make Envoy send the body twice.
        marked = self._request_end is _MARKED
        fallback = route.fallback if mode.resizable and marked else ""
        retry = host.answers.retry_headers(route.repeatable, route.hedge_after_ms) if fallback else b""
        trace = request.trace.traceparent if request.trace is not None else ""
        if route.target:
            messages = self._rewritten(route, fallback, trace, retry)
            if not messages:
                place = "a JSON object or a multipart/form-data form"
                text = f"the servers of this model use another name, which can only be written into {place}"
                error = ClientError(text, 400, "model")
                self._fail(error, host.answers.lease(request.id))
                host.feed(StreamLost(request.id))
                return
        else:
            messages = [
                host.answers.pick(
                    self._awaited,
                    route.destination or route.endpoint.address,
                    request.id,
                    self._head.removed,
                    route.prefill,
                    fallback,
                    trace,
                    retry,
                )
            ]
            if self._awaited is _HEADERS:
                if marked and mode.streamed:  # the common case
                    messages += [_BODY_CONTINUES] * self._chunks
                else:
                    trailers = self._request_end is RequestEnd.TRAILERS
                    messages += rest_of_request(mode.request, self._body, self._chunks, trailers)
        if self._may_leave_at_pick(messages):
            self._stream.send_last(*messages)
            self._state = _CLOSED
            self._head = NO_HEAD
            if self._body:
                self._body = b""
            if self._gateway_id:
                host.logs.left(self._gateway_id, request.id)
        else:
            self._stream.send(*messages)
            if self._wired():
                self._stream.watch_cancel(False)  # the access log reports the end in any case
            self._state = SessionState.ROUTED
            if self._body or self._head_size:
                self._body, self._head = b"", NO_HEAD
                self._stream.hold(0)
            self._picked, self._fallback = route.endpoint.address, route.fallback
            self._watch = ResponseWatch(request)
            if self._only_asks:
                self.on_half_close()

    def _rewritten(self, route: Route, fallback: str, trace: str, retry: bytes) -> list[bytes]:
        """The pick, with another model name in the body. Empty if the body has no place for the name."""
        request, mode = self._request, self._mode
        body = splice_model(self._body, route.target, self._head.content_type, request.api)
        if body is None:
            return []
        if route.shown and mode.response is not BodyMode.NONE:
            self._renaming = Renaming(route.shown, mode.response, request.stream, mode.resizable)
        return self._host.answers.pick_with_body(
            mode.modes,
            route.destination or route.endpoint.address,
            request.id,
            self._head.removed,
            body,
            self._request_end is RequestEnd.TRAILERS,
            self._renaming is not None,
            route.prefill,
            fallback,
            trace,
            retry,
        )

    def _may_leave_at_pick(self, messages: list[bytes]) -> bool:
        host, request, leave = self._host, self._request, self._mode.leave
        if not leave or not host.logs.connected or self._renaming is not None or host.tells_served:
            return False
        if not host.pulse.sure_from <= request.arrived <= host.pulse.sure_until:
            return False
        if leave is _UNSTREAMED:
            if request.stream or request.api == OTHER:
                return False
            self._followed = host.inspect(request, False)
            return not self._followed
        # 16 bytes a message cover the gRPC prefix and HTTP/2 framing; the trailers are not flow-controlled.
        return leave is _ALWAYS or sum(map(len, messages)) + 16 * len(messages) <= self._stream.writable_bytes()

    def _wired(self) -> bool:
        """Whether an access log is connected that will report the end of this request."""
        return self._mode.access_log and self._host.logs.connected > 0

    # ---- the response ----

    def _on_response_headers(self, message: Incoming) -> None:
        headers, ended = message.headers()
        self._state = SessionState.ANSWERING
        self._watch.headers(headers)
        served = message.served()
        if served and served != self._picked:
            self._moved_to = served
        if self._renaming is not None:
            answer = self._renaming.headers(headers)
        elif served and self._host.tells_served:
            answer = client_is_told(served)
        else:
            answer = CONTINUE[Kind.RESPONSE_HEADERS]
        self._stream.send(answer)
        if ended or (self._mode.response is BodyMode.NONE and not self._echoes_request()):
            self._end()

    def _echoes_request(self) -> bool:
        """Whether a tunnel is open whose request bytes the session must echo."""
        return self._mode.full_duplex and self._request_end is RequestEnd.OPEN

    def _on_response_body(self, message: Incoming) -> None:
        host, watch = self._host, self._watch
        chunk, ended = message.body()
        if self._state is SessionState.ROUTED:  # the gateway shows no headers; the status is an attribute
            answered_by = watch.attributes(message.attributes())
            self._state = SessionState.ANSWERING
            # An error may be the gateway's own, which only the access log tells.
            if answered_by is not None and self._fallback and not (watch.refused and self._wired()):
                self._moved_to = answered_by or self._fallback
        if first := watch.chunk(chunk, host.now):
            if self._moved_to:
                self._move(first_token=not watch.refused)
            if not watch.refused:
                host.feed(FirstTokenSeen(self._request.id))
        if watch.preceded and not self._began:
            self._began = True
            host.feed(ResponseBegan(self._request.id))
        if self._renaming is not None or self._mode.response is BodyMode.FULL_DUPLEX:
            renaming = self._renaming
            self._stream.send(*(ext_proc.echo(message) if renaming is None else renaming.chunk(chunk, ended)))
            if watch.finished and not ended and self._wired():  # the log's entry may come before what follows
                self._report()
        else:
            self._stream.send(CONTINUE[Kind.RESPONSE_BODY])
            ended = ended or self._may_leave_at_chunk(first)
        if ended:
            self._end()
        elif first:
            self._stream.watch_cancel(True)  # the answer may end by trailers, which are not shown

    def _may_leave_at_chunk(self, first: bool) -> bool:
        """Whether nothing is left to see. What follows the last event is not waited for: it may be trailers, which are
        not shown, and the access log, on another connection, may report the end before the stream ends."""
        if self._mode.response is not BodyMode.STREAMED or not self._wired():
            return False
        if first and not (self._followed or (self._request.stream and self._host.inspect(self._request, True))):
            return True
        return self._watch.finished

    def _move(self, first_token: bool = False) -> None:
        """Report that another endpoint answers: with the first token, or at the end if none came."""
        if self._moved_to:
            self._host.feed(RequestMoved(self._request.id, self._moved_to, first_token))
            self._moved_to = ""

    def _on_response_trailers(self, message: Incoming) -> None:
        self._watch.trailers(message.headers()[0])
        if self._renaming is not None:
            self._stream.send(*self._renaming.tail())
        self._stream.send(CONTINUE[Kind.RESPONSE_TRAILERS])
        self._end()

    def _end(self) -> None:
        """The session has nothing left to see or wait for: report what it saw, and leave."""
        self._report()
        self._leave()

    def _report(self) -> None:
        host, request, watch = self._host, self._request, self._watch
        self._move()
        usage = watch.usage()
        if not self._wired() or watch.error_status:
            host.feed(watch.ended(host.now()))
        elif usage is not None and not self._reported:
            self._reported = True
            host.feed(UsageReported(request.id, usage))

    def _on_local_reply(self, message: Incoming) -> None:
        if self._state is not SessionState.LOCAL_REPLY:
            self.on_lost("")
            self._stream.hold(0)
            self._state = SessionState.LOCAL_REPLY
        full_duplex, ended = self._mode.response is BodyMode.FULL_DUPLEX, True
        if message.kind is Kind.RESPONSE_HEADERS:
            _, ended = message.headers()
        elif message.kind is Kind.RESPONSE_BODY:
            _, ended = message.body()
        if message.kind is Kind.RESPONSE_BODY and full_duplex:
            self._stream.send(*ext_proc.echo(message))
        else:
            self._stream.send(CONTINUE[message.kind])
        if ended or not full_duplex:
            self._leave()

    def _on_given_up(self, message: Incoming) -> None:
        """Ignore what remains of a request that a local reply has answered."""

    # ---- the end ----

    def _answer(self, message: bytes) -> None:
        """Send this as the last message, and end the stream."""
        self._close()
        self._stream.send_last(message)

    def _leave(self) -> None:
        self._close()
        self._stream.finish()

    def _close(self) -> None:
        """Drop what is no longer needed: the registry may keep a reference to this session for hours."""
        self._state = _CLOSED
        self._head, self._body = NO_HEAD, b""
        self._parts = None


#: How many responses of one kind (model, API, streamed or not) are followed to their end before sampling begins; for
#: how many kinds this is done; and the seconds between two followed streams after that.
FIRST_INSPECTED, MOST_INSPECTED = 20, 512
STREAM_GAP = 60.0


class _Shares(dict[tuple[str, str, bool], float]):
    """Share of responses to follow, per model, API and whether streamed. 1 until the first ones of a kind are done.
    Clients choose the names of models: those that nothing serves take no room, and the oldest kind that is not done
    makes room for a new one."""

    def __init__(self, share: float, serves: Callable[[str], bool]) -> None:
        super().__init__()
        self.usual, self._serves = share, serves
        #: How many of the first responses are left, of kinds of which one was followed.
        self.left: dict[tuple[str, str, bool], int] = {}

    def __missing__(self, kind: tuple[str, str, bool]) -> float:
        if self.usual <= 0.0 or not self._serves(kind[0]):
            return self.usual
        if len(self) >= MOST_INSPECTED:
            oldest = next((known for known, share in self.items() if share > self.usual), None)
            if oldest is None:
                return self.usual
            del self[oldest]
            self.left.pop(oldest, None)
        self[kind] = 1.0
        return 1.0


class Inspection:
    """Decides which responses are followed to their end to learn token counts: a `share` of them, 0 = none.

    The first responses of each model and API are all followed, so that their token counts are known soon. Following a
    stream costs work for every chunk, so later at most one stream in `STREAM_GAP` seconds is followed, unless the share
    is 1. Call it with a request and whether its response is a stream. `serves`: whether a model has first responses.
    """

    def __init__(
        self, share: float, rng: Random, now: Callable[[], float], serves: Callable[[str], bool] = lambda model: True
    ) -> None:
        self._rng, self._serves = rng, serves
        self._now = now
        self._next_at = 0.0
        self._begin(share)

    def __call__(self, request: Request, stream: bool) -> bool:
        if self._rng.random() >= self._shares[request.model, request.api, stream]:
            return False
        return self._follow(request, stream)

    def _follow(self, request: Request, stream: bool) -> bool:
        kind, shares = (request.model, request.api, stream), self._shares
        left = shares.left.get(kind, FIRST_INSPECTED if kind in shares else 0)
        if left:
            shares.left[kind] = left - 1
            if left == 1:
                shares[kind] = shares.usual
            return True
        if not stream or shares.usual >= 1.0:
            return True
        if self._now() < self._next_at:
            return False
        self._next_at = self._now() + STREAM_GAP
        return True

    def follow(self, share: float) -> None:
        """Change the share. If it differs, the first responses of each kind are followed again."""
        if share != self._shares.usual:
            self._begin(share)

    def _begin(self, share: float) -> None:
        self._shares = _Shares(share, self._serves)
        self._next_at = 0.0


def sessions(host: Host) -> HandlerFactory:
    """The handler factory of ext_proc streams."""
    return partial(Session, host)


_Handlers = Mapping[Kind, Callable[[Session, Incoming], None]]

_REQUEST: _Handlers = {
    Kind.REQUEST_BODY: Session._on_request_body,
    Kind.REQUEST_TRAILERS: Session._on_request_trailers,
}
_LATE: _Handlers = {Kind.REQUEST_BODY: Session._on_late_body, Kind.REQUEST_TRAILERS: Session._on_late_trailers}
_RESPONSE: _Handlers = {
    Kind.RESPONSE_BODY: Session._on_response_body,
    Kind.RESPONSE_TRAILERS: Session._on_response_trailers,
}

_REPLY: _Handlers = {
    Kind.RESPONSE_BODY: Session._on_local_reply,
    Kind.RESPONSE_TRAILERS: Session._on_local_reply,
}
_LOCAL_REPLY: _Handlers = {Kind.RESPONSE_HEADERS: Session._on_local_reply, **_REPLY}

#: The messages that each state accepts, and their handlers. If a gateway sends no headers, the body comes first.
_LEGAL: tuple[_Handlers, ...] = (
    {Kind.REQUEST_HEADERS: Session._on_request_headers, **_REQUEST, **_LOCAL_REPLY},  # OPENED
    {**_REQUEST, **_LOCAL_REPLY},  # COLLECTING
    {**_LATE, **_LOCAL_REPLY},  # ASKING_KNOWLEDGE
    {**_LATE, **_LOCAL_REPLY},  # WAITING
    {Kind.RESPONSE_HEADERS: Session._on_response_headers, **_LATE, **_RESPONSE},  # ROUTED
    {**_LATE, **_RESPONSE},  # ANSWERING
    {Kind.REQUEST_BODY: Session._on_given_up, Kind.REQUEST_TRAILERS: Session._on_given_up, **_REPLY},  # LOCAL_REPLY
    {},  # CLOSED
)
