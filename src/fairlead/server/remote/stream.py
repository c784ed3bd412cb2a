"""One gRPC stream to a scheduler: messages both ways, in order, until one side ends it. Also opens the channel for it.

Rules of the stream
* `on_message` is called for each message, then `on_end` once, with the reason. Nothing is called after that.
* Messages that the scheduler has not read yet wait here, up to `MAX_PENDING` bytes. Beyond that the stream ends, and
  the fallback policy decides the requests.
"""

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairlead.config.schema import SchedulerTls
from fairlead.core.errors import ConfigError
from fairlead.pool.authorities import trusting
from fairlead.server.remote.messages import PATH

if TYPE_CHECKING:
    import grpc.aio

MAX_PENDING = 8 << 20
#: Seconds that gRPC gets to stop reading and writing after the end.
STOPS_WITHIN = 5.0


class SchedulerStream:
    """A stream. The constructor opens it; the event loop must be running. `send` may be called before the connection is
    established."""

    def __init__(
        self,
        channel: "grpc.aio.Channel",
        address: str,
        on_message: Callable[[bytes], None],
        on_end: Callable[[str], None],
    ) -> None:
        """`address` is used only in the texts of reasons."""
        self._call = channel.stream_stream(PATH)()
        self._address = address
        self._on_message, self._on_end = on_message, on_end
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._ended = False
        self._writer: asyncio.Task[None] | None = None
        self._reader = asyncio.create_task(self._read(), name="scheduler stream")

    @property
    def unread(self) -> int:
        """How many bytes wait until the scheduler reads."""
        return self._pending_bytes

    def send(self, message: bytes) -> None:
        """Queue one message. Ignored after the end."""
        if self._ended:
            return
        self._pending.append(message)
        self._pending_bytes += len(message)
        if self._pending_bytes > MAX_PENDING:
            self.end("the peer does not read")
        elif self._writer is None:
            self._writer = asyncio.create_task(self._write(), name="scheduler stream's writer")

    def end(self, why: str) -> None:
        """Close the stream and report why, once."""
        if self._ended:
            return
        self._ended = True
        self._call.cancel()
        self._pending.clear()
        self._on_end(why)

    async def closed(self) -> None:
        """Wait until reading and writing have stopped after the end. If gRPC has not noticed the end within
        `STOPS_WITHIN` seconds, they are cancelled."""
        directions = [task for task in (self._reader, self._writer) if task is not None]
        _, left = await asyncio.wait(directions, timeout=STOPS_WITHIN)
        for task in left:
            task.cancel()

    async def _write(self) -> None:
        from grpc.aio import AioRpcError

        try:
            while self._pending:
                pending, self._pending = self._pending, []
                for message in pending:
                    await self._call.write(message)
                    self._pending_bytes -= len(message)
        except (AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            pass  # the call is over; `_read` reports why
        finally:
            self._writer = None

    async def _read(self) -> None:
        from grpc import StatusCode
        from grpc.aio import EOF, AioRpcError

        call, why, answered = self._call, "it was cancelled", False
        try:
            while (message := await call.read()) is not EOF:
                answered = True
                self._on_message(message)
                if self._ended:
                    return
            why = "the peer ended the stream: gRPC status 0"
        except AioRpcError as error:
            code, text = error.code(), (error.details() or "")[:200]
            if code is StatusCode.UNAVAILABLE and not answered:
                why = f"cannot connect to {self._address}: {text}"
            else:
                why = f"the peer ended the stream: gRPC status {code.value[0]} {text}".rstrip()
        except asyncio.CancelledError:
            pass  # we cancelled it, or the channel was closed
        finally:
            self.end(why)


# Where a scheduler is (`host:port` or `unix:/path`), and a gRPC channel to it.
#
# Rules
# * On the client's side gRPC is imported only here, and only once a channel is opened.
# * The peer must answer a ping every `KEEPALIVE` seconds. gRPC pings less often if the server objects.
# * The connection is retried for as long as the channel lives, after pauses of 0.1 to 1 s.

UNIX = "unix:"
#: Seconds between two pings, and until a ping must be answered; seconds that one attempt to connect may take.
KEEPALIVE = 5.0
CONNECT_WITHIN = 5.0
#: The most bytes of one message from the scheduler. A batch of 4096 picks with two alternatives each is smaller.
MAX_MESSAGE = 1 << 20

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", round(KEEPALIVE * 1000)),
    ("grpc.keepalive_timeout_ms", round(KEEPALIVE * 1000)),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # gRPC's shortest back-off is also the longest time that one attempt to connect may take.
    ("grpc.min_reconnect_backoff_ms", round(CONNECT_WITHIN * 1000)),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.service_config_disable_resolution", 1),
)


def check_tls(tls: SchedulerTls) -> None:
    """Raises `ConfigError` if a file cannot be used."""
    try:
        trusting(tls.ca_file, tls.cert_dir)
    except (OSError, ValueError) as error:
        raise ConfigError(f"TLS files of the scheduler's connection: {error}", "$.scheduler.tls") from error


async def open_channel(address: str, tls: SchedulerTls | None = None) -> "grpc.aio.Channel":
    """A channel, which connects once it is used. Raises `ConfigError`. Without `tls.verify` the server's certificate is
    fetched first; if that fails, raises `OSError`."""
    import grpc
    import grpc.aio

    if not address.startswith(UNIX):
        host, _, port = address.rpartition(":")
        if not host or not (port.isdecimal() and 0 < int(port) < 65_536):
            raise ConfigError(f"{address!r} is neither host:port nor unix:/path", "$.scheduler.address")
    if tls is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    check_tls(tls)
    roots, name = _roots(tls), tls.server_name
    if not tls.verify:
        roots, name = await _certificate(address)
    elif not name and address.startswith(UNIX):
        name = "localhost"
    options = (*_OPTIONS, ("grpc.ssl_target_name_override", name)) if name else _OPTIONS
    key = chain = None
    if tls.cert_dir:
        key, chain = (Path(tls.cert_dir, file).read_bytes() for file in ("tls.key", "tls.crt"))
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(roots, key, chain), options=options)


def _roots(tls: SchedulerTls) -> bytes | None:
    """The trusted certificate authorities as PEM: those of `ca_file`, else the system's; `None` = gRPC's own list."""
    file = tls.ca_file or ssl.get_default_verify_paths().cafile
    return Path(file).read_bytes() if file else None


async def _certificate(address: str) -> tuple[bytes, str]:
    """The server's certificate as PEM, and a name in it. gRPC in Python always checks both. So without verification,
    the certificate that the server shows now is trusted."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    shown = await _handshake(address, context)
    pem = ssl.DER_cert_to_PEM_cert(shown.getpeercert(binary_form=True))
    # Python decodes only verified certificates, so verify this one with itself as the authority.
    context = ssl.create_default_context(cadata=pem)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    decoded = (await _handshake(address, context)).getpeercert()
    names = [value for kind, value in decoded.get("subjectAltName", ()) if kind in ("DNS", "IP Address")]
    names += [value for part in decoded.get("subject", ()) for key, value in part if key == "commonName"]
    return pem.encode(), names[0].replace("*", "any") if names else ""


async def _handshake(address: str, context: ssl.SSLContext) -> Any:
    """Connect, and close the connection after the TLS handshake. Returns its `ssl` object."""
    context.set_alpn_protocols(["h2"])
    async with asyncio.timeout(CONNECT_WITHIN):
        if address.startswith(UNIX):
            _, writer = await asyncio.open_unix_connection(
                address.removeprefix(UNIX), ssl=context, server_hostname="localhost"
            )
        else:
            host, _, port = address.rpartition(":")
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
    shown = writer.get_extra_info("ssl_object")
    writer.transport.abort()
    return shown
