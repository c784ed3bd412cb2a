"""The reference transport: the same `Routes` on grpc.aio, for comparison and as a fallback.

It takes about forty times the CPU time of `h2_server` when busy, and eight times at 200 exchanges/s
(bench/transport.py). For a handler, the differences are:
* `writable_bytes()` is always 0: grpc does not report its windows, so no message is known to leave in one write.
* `connected()` is always true: grpc does not report connections. So the leases of a gateway that died end only when
  they expire or when the model servers report themselves idle.
* For errors that the transport finds itself, the status texts are grpc's.
* Binary metadata (`-bin`) is passed as base64, as sent. Pseudo-headers, `content-type` and grpc's own headers are not
  passed.
* The byte budget covers only whole messages. grpc holds unfinished messages itself, each up to `max_message`, and gives
  credit for them itself. A stream that waits for room is not read.

grpc.aio cancels a handler's task when the peer resets the stream, and Envoy resets every ext_proc stream. So `finally`
reports the end of a stream. Each listener has its own server, because grpc cannot add ports to a running server.
"""

import asyncio
import base64
import contextlib
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from fairlead.core.endpoint import host_port
from fairlead.gateway.grpc_frames import Status
from fairlead.gateway.h2_limits import ByteBudget, Claim, H2Limits
from fairlead.gateway.stream import HandlerFactory, Routes, StreamHandler
from fairlead.gateway.tls import ServerTls

log = logging.getLogger(__name__)

_TICK = 1.0
_CANCEL_FOLLOWS = 0.002
#: A grace period in seconds that never ends: draining lasts until `close`.
_UNTIL_CLOSED = 10**6


def _load_grpc() -> Any:
    import grpc
    import grpc.aio

    return grpc


class AioStream:
    """A `ServerStream` whose messages are written by a task, one after another."""

    def __init__(self, budget: ByteBudget | None = None) -> None:
        self._budget = budget
        self._claim = Claim(self)
        self._may_read = asyncio.Event()
        self._may_read.set()
        self.finished = False
        self.code = 0
        self.message = ""
        self.handler: StreamHandler | None = None
        self._queue: deque[bytes] = deque()
        self._wake = asyncio.Event()

    def send(self, *messages: bytes) -> None:
        if not self.finished:
            self._queue.extend(messages)
            self._wake.set()

    def send_last(self, *messages: bytes) -> None:
        self.send(*messages)
        self.finish()

    def finish(self, code: int = 0, message: str = "") -> None:
        if not self.finished:
            self.finished = True
            self.handler = None
            self.code, self.message = code, message
            self._wake.set()

    def hold(self, size: int, expected: int = 0) -> None:
        budget = self._budget
        if budget is None or self.finished:
            return
        if expected <= size:
            budget.count(self._claim, size)
        elif not budget.ask(self._claim, expected):
            self.fail(Status.RESOURCE_EXHAUSTED, "too many unfinished requests are held already")
        if budget.starved(self._claim):
            self._may_read.clear()
        else:
            self._may_read.set()

    def granted(self) -> None:
        """Continue to read: there is room for the message that waited."""
        self._may_read.set()

    def fail(self, code: int, why: str) -> None:
        """End the stream because of an error in the transport."""
        if not self.finished:
            self.code, self.message = code, why
            self.lost(why)

    async def may_read(self) -> None:
        """Wait while the next message has to wait for memory."""
        await self._may_read.wait()

    def released(self) -> None:
        """Release all held bytes at the end of the stream."""
        if self._budget is not None:
            self._budget.count(self._claim, 0)
        self._may_read.set()

    def writable_bytes(self) -> int:
        return 0

    def connected(self) -> bool:
        return True

    def watch_cancel(self, on: bool) -> None:
        """Do nothing: grpc always reports a reset immediately."""

    def lost(self, why: str) -> None:
        """Tell the handler that the stream is gone, or that the transport ends it."""
        handler = self.handler
        self.finished = True
        self.handler = None
        self._wake.set()
        if handler is not None:
            try:
                handler.on_lost(why)
            except Exception:
                log.exception("a stream handler raised in on_lost")

    def deliver(self, message: bytes | None) -> None:
        """Pass a message of the peer, or its half-close (`None`), to the handler."""
        if self.handler is None:
            return
        try:
            if message is None:
                self.handler.on_half_close()
            else:
                self.handler.on_message(message)
        except Exception:
            log.exception("a stream handler raised")
            self.crashed()

    def crashed(self) -> None:
        self.fail(Status.INTERNAL, "internal error")

    async def write_all(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Write messages until the stream is finished and none is queued."""
        while True:
            while self._queue:
                await write(self._queue.popleft())
            if self.finished:
                return
            self._wake.clear()
            await self._wake.wait()


class GrpcServer:
    """A server with the interface of `H2Server`. Raises `ImportError` if grpcio is not installed."""

    def __init__(
        self,
        routes: Routes,
        limits: H2Limits | None = None,
        *,
        tls: ServerTls | None = None,
        budget: ByteBudget | None = None,
    ) -> None:
        self._budget = budget
        self.limits = limits or H2Limits()
        self.addresses: list[str] = []
        self._grpc = _load_grpc()
        self._routes = routes
        self._tls = tls
        self._servers: list[Any] = []
        self._paths: list[str] = []
        self._stopping: list[asyncio.Task[None]] = []
        self._ticker: asyncio.TimerHandle | None = None
        #: The exceptions of reads and writes if the call ends meanwhile.
        self._ended_errors = (self._grpc.RpcError, self._grpc.aio.BaseError, asyncio.InvalidStateError)
        self._codes = {code.value[0]: code for code in self._grpc.StatusCode}

    # ---- listening ----

    async def listen(self, host: str = "", port: int = 0) -> int:
        """As `H2Server.listen`."""
        name = host or "::"
        bound = await self._start(host_port(name, port))
        self.addresses.append(host_port(name, bound))
        return bound

    async def listen_unix(self, path: str) -> None:
        """As `H2Server.listen_unix`; grpc makes the socket, so the permissions apply a moment after it is open."""
        await self._start(f"unix:{path}")
        os.chmod(path, 0o600)
        self._paths.append(path)
        self.addresses.append(path)

    async def _start(self, address: str) -> int:
        server = self._grpc.aio.server(options=self._options())
        server.add_generic_rpc_handlers((self._generic_handler(),))
        try:
            if self._tls is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, self._credentials(self._tls))
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: {error}") from error
        await server.start()
        self._servers.append(server)
        if (self._tls is not None or self._budget is not None) and self._ticker is None:
            self._tick()
        return int(port)

    def _options(self) -> list[tuple[str, int]]:
        limits = self.limits
        return [
            ("grpc.max_receive_message_length", limits.max_message),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_concurrent_streams", limits.max_streams),
            ("grpc.max_metadata_size", limits.max_header_list),
            ("grpc.http2.max_frame_size", limits.max_frame),
            ("grpc.keepalive_time_ms", int(limits.keepalive * 1000) or 2**31 - 1),
            ("grpc.so_reuseport", 0),
        ]

    def _credentials(self, tls: ServerTls) -> Any:
        """Credentials that ask for the current certificate at each handshake. grpc calls this from its own threads."""

        def configuration() -> Any:
            return self._grpc.ssl_server_certificate_configuration([tls.pem])

        return self._grpc.dynamic_ssl_server_credentials(configuration(), configuration)

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        self._ticker = loop.call_later(_TICK, self._tick)
        if self._budget is not None:
            self._budget.tick()
        if self._tls is not None:
            self._tls.refresh(loop.time())

    # ---- streams ----

    def _generic_handler(self) -> Any:
        server = self

        class Handler(self._grpc.GenericRpcHandler):  # type: ignore[misc, name-defined]
            def service(self, call: Any) -> Any:
                factory = server._routes.get(call.method)
                if factory is None:
                    return None

                async def serve(requests: Any, context: Any) -> None:
                    await server._serve(factory, context)

                return server._grpc.stream_stream_rpc_method_handler(serve)

        return Handler()

    async def _serve(self, factory: HandlerFactory, context: Any) -> None:
        stream = AioStream(self._budget)
        reader: asyncio.Task[None] | None = None
        try:
            try:
                handler = factory(stream, _headers(context))
                stream.handler = None if stream.finished else handler
            except Exception:
                log.exception("could not create a stream handler")
                stream.crashed()
            reader = asyncio.create_task(self._read(stream, context))
            with contextlib.suppress(*self._ended_errors):
                await stream.write_all(context.write)
                context.set_code(self._codes.get(stream.code, self._grpc.StatusCode.UNKNOWN))
                context.set_details(stream.message)
        finally:
            if reader is not None:
                reader.cancel()
            stream.lost("reset by the peer, or the connection was lost")
            stream.released()

    async def _read(self, stream: AioStream, context: Any) -> None:
        with contextlib.suppress(*self._ended_errors):
            while stream.handler is not None:
                await stream.may_read()
                message = await context.read()
                if message is self._grpc.aio.EOF:
                    # A reset looks like this too; its cancellation follows, and is reported as `lost` (grpcio 1.85).
                    await asyncio.sleep(_CANCEL_FOLLOWS)
                    stream.deliver(None)
                    return
                stream.deliver(message)

    # ---- the end ----

    def drain(self) -> None:
        """As `H2Server.drain`."""
        if not self._stopping:
            self._stopping = [asyncio.ensure_future(server.stop(_UNTIL_CLOSED)) for server in self._servers]

    async def close(self, grace_s: float = 0.0) -> None:
        """As `H2Server.close`."""
        self.drain()
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
        await asyncio.gather(*(server.stop(grace_s or None) for server in self._servers))
        await asyncio.gather(*self._stopping)
        for path in self._paths:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _headers(context: Any) -> dict[str, str]:
    return {
        name: base64.b64encode(value).decode() if isinstance(value, bytes) else value
        for name, value in context.invocation_metadata()
    }
