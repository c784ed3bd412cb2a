"""A scheduler that sends everything to one place and changes bodies on its way, by our codec alone."""

import json
from collections.abc import Callable, Mapping
from hashlib import sha256

from gw_messages import Got

from fairlead.core.headers import WHOLE_BODY_METADATA
from fairlead.gateway import ext_proc
from fairlead.gateway import ext_proc as bodies
from fairlead.gateway.ext_proc import CONTINUE, DESTINATION, BodyMode, Incoming, Kind, Modes
from fairlead.gateway.h2_server import H2Server
from fairlead.gateway.health import EXT_PROC, HealthService
from fairlead.gateway.stream import ServerStream

#: What to make of a chunk: (chunk, end of stream) -> other bytes; `None`: responses are left alone.
Chunks = Callable[[bytes, bool], bytes]


class Rewriter:
    """`body`: instead of every request's, where that is possible. `chunks`: for responses."""

    def __init__(self) -> None:
        self.destination = ""
        self.body: bytes | None = None
        self.chunks: Chunks | None = None
        #: Bytes of the headers answer when responses are rewritten.
        self.response_head = bodies.resizable_response()
        #: End the stream with the pick.
        self.leave = False
        #: Whether the request's body could be changed, one entry per stream.
        self.possible: list[bool] = []
        health = HealthService()
        health.set_ready(True)
        self._server = H2Server({f"/{EXT_PROC}/Process": self._session, **health.routes()})

    async def __aenter__(self) -> "Rewriter":
        self.address = f"127.0.0.1:{await self._server.listen('127.0.0.1', 0)}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()

    def _session(self, stream: ServerStream, metadata: Mapping[str, str]) -> "_Session":
        return _Session(self, stream, WHOLE_BODY_METADATA in metadata)


class _Session:
    def __init__(self, rewriter: Rewriter, stream: ServerStream, whole: bool) -> None:
        self._rewriter, self._stream, self._whole = rewriter, stream, whole
        self._modes: Modes = (BodyMode.FULL_DUPLEX, BodyMode.FULL_DUPLEX, False)
        self._messages: list[Incoming] = []
        self._picked = False

    def on_message(self, data: bytes) -> None:
        message = Incoming(data)
        self._modes = message.modes() or self._modes
        if message.kind.name.startswith("REQUEST"):
            self._request(message)
        else:
            self._response(message)

    def _request(self, message: Incoming) -> None:
        mode, _, eager = self._modes
        kind, last = message.kind, True
        if self._picked:
            self._stream.send(CONTINUE[kind])
        elif kind is Kind.REQUEST_HEADERS:
            if message.headers()[1] or mode is BodyMode.NONE or (mode is BodyMode.STREAMED and not eager):
                self._pick(kind, possible=False)
            elif mode in (BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL):
                self._stream.send(CONTINUE[kind])
        else:
            if kind is Kind.REQUEST_BODY:
                self._messages.append(message)
                last = message.body()[1]
            if last or self._whole or mode in (BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL):
                self._pick(kind, _all_seen(self._modes, last))

    def _pick(self, kind: Kind, possible: bool) -> None:
        self._picked = True
        where = self._rewriter.destination.encode()
        self._rewriter.possible.append(possible)
        pick = ext_proc.set_header(DESTINATION, where), ext_proc.lb_metadata({DESTINATION: where})
        if possible and self._rewriter.body is not None:
            trailers = kind is Kind.REQUEST_TRAILERS
            self._stream.send(*bodies.rewrite_request(self._modes, self._rewriter.body, *pick, trailers=trailers))
        elif self._modes[0] in (BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL, BodyMode.NONE) or not self._messages:
            self._stream.send(ext_proc.answer(kind, *pick, reroute=True))
        else:
            rest = [CONTINUE[Kind.REQUEST_BODY]]
            if self._modes[0] is BodyMode.FULL_DUPLEX:
                rest = [answer for message in self._messages for answer in ext_proc.echo(message)]
            self._stream.send(ext_proc.answer(Kind.REQUEST_HEADERS, *pick, reroute=True), *rest)
        if self._rewriter.leave:
            self._stream.finish()

    def _response(self, message: Incoming) -> None:
        chunks, mode = self._rewriter.chunks, self._modes[1]
        if message.kind is Kind.RESPONSE_HEADERS and chunks:
            self._stream.send(self._rewriter.response_head)
        elif message.kind is Kind.RESPONSE_BODY and (chunks or mode is BodyMode.FULL_DUPLEX):
            chunk, last = message.body()
            self._stream.send(*bodies.rewrite_chunk(mode, chunks(chunk, last) if chunks else chunk, last))
        else:
            self._stream.send(CONTINUE[message.kind])

    def on_half_close(self) -> None:
        self._stream.finish()

    def on_lost(self, why: str) -> None: ...


def arrived(got: Got) -> tuple[int, str]:
    """(bytes, sha256) of the request body, as the model server tells them. Its framing must fit."""
    assert got.status == 200, got
    told = json.loads(got.body)
    framing = {name: value for name, value in told["headers"] if name in ("content-length", "transfer-encoding")}
    assert framing in ({"content-length": str(told["bytes"])}, {"transfer-encoding": "chunked"}), framing
    return told["bytes"], told["sha256"]


def made(body: bytes) -> tuple[int, str]:
    return len(body), sha256(body).hexdigest()


def _all_seen(modes: Modes, end_of_stream: bool) -> bool:
    """Whether a request can leave with another body: the headers were not answered without it, and not only its
    beginning was seen, to which Envoy would append the rest."""
    mode, _, eager = modes
    if mode is BodyMode.BUFFERED_PARTIAL:
        return end_of_stream
    return mode in (BodyMode.BUFFERED, BodyMode.FULL_DUPLEX) or (mode is BodyMode.STREAMED and eager)
