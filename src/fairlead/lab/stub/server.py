"""The HTTP side of one replica: a listening socket, its connections, and requests to their routes."""

import asyncio
import logging
import time
import uuid
from http import HTTPMethod

from fairlead.lab.stub.connection import Connection, Heads, Held
from fairlead.lab.stub.exposition import HttpStats, Part
from fairlead.lab.stub.fields import ApiError
from fairlead.lab.stub.metrics_page import MetricsPage
from fairlead.lab.stub.replica import Replica
from fairlead.lab.stub.routes import routes
from fairlead.pool.http1 import HttpRequest

_METRICS_TYPE = b"text/plain; version=1.0.0; charset=utf-8"
_BACKLOG = 1024
_SWEEP_S = 1.0
_METHODS = frozenset(HTTPMethod)

log = logging.getLogger(__name__)


class ReplicaServer:
    """Serves one replica on one port. A server is used once: a restart makes a new one."""

    def __init__(self, replica: Replica, process: list[Part]) -> None:
        config = replica.config
        self.replica = replica
        self.heads = Heads()
        self.max_head = config.max_head
        self.max_body = config.max_body
        self.address = ""
        self._routes = routes(adapters=replica.spec.max_loras > 0)
        self._http = HttpStats(replica.unix())
        full = config.full_metrics
        self._page = MetricsPage(replica, process if full else [], self._http.parts() if full else [])
        self._frozen_page: bytes | None = None
        self._connections: set[Connection] = set()
        self._listener: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises `OSError` when it is taken."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(lambda: Connection(self), host, port, backlog=_BACKLOG)
        port = int(self._listener.sockets[0].getsockname()[1])
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        config = self.replica.config
        if config.identity_headers:
            self.heads = Heads(
                (
                    ("x-inference-pod", self.replica.name),
                    ("x-inference-namespace", config.namespace),
                    ("x-inference-port", str(port)),
                )
            )
        self._sweep()
        return port

    async def stop(self) -> None:
        """Close the port and cut every connection, like a killed server."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        self.replica.close()
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        for connection in list(self._connections):
            connection.cut()
        if listener is not None:
            await listener.wait_closed()
        await asyncio.sleep(0)  # the cut connections report themselves closed in the next turn of the loop

    @property
    def connections(self) -> int:
        return len(self._connections)

    @property
    def held(self) -> list[Held]:
        """By each connection, in no order."""
        return [connection.held for connection in self._connections]

    # ---------------------------------------------------------------- connection's side

    def opened(self, connection: Connection) -> None:
        self._connections.add(connection)

    def closed(self, connection: Connection) -> None:
        self._connections.discard(connection)

    def unix(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def serve(self, connection: Connection, request: HttpRequest) -> None:
        connection.request_id = ""
        if self.replica.config.request_id_headers:
            connection.request_id = (
                request.headers.get("x-request-id") or uuid.UUID(int=self.replica.rng.getrandbits(128)).hex
            )
        entry = self._routes.get(request.path)
        if entry is None:
            connection.reply(404, b'{"detail":"Not Found"}')
            return
        methods, handler = entry
        if request.method not in methods:
            allow = f"allow: {', '.join(methods)}\r\n".encode()
            body = b'{"detail":"Method Not Allowed"}'
            connection.reply(405, body, before=allow, head_only=request.method == "HEAD")
            return
        try:
            handler(self, connection, request)
        except ApiError as error:
            connection.reply(error.status, error.body())
        except Exception:
            log.exception("request to %s failed", request.path)
            if connection.responded:
                connection.cut()
            else:
                connection.reply(500, ApiError("Internal server error", 500).body())

    def answered(self, request: HttpRequest, status: int, seconds: float) -> None:
        # What clients make up must not become a new label each time; the real server says "none" for such paths.
        path = request.path if request.path in self._routes else "none"
        method = request.method if request.method in _METHODS else "OTHER"
        self._http.answered(path, method, status, seconds, len(request.body))

    # ---------------------------------------------------------------- metrics

    def metrics(self, connection: Connection) -> None:
        delay = self.replica.faults.metrics_delay_s
        if delay > 0:
            timer = asyncio.get_running_loop().call_later(delay, self._send_metrics, connection)
            connection.exchange = _Delayed(timer)
        else:
            self._send_metrics(connection)

    def _send_metrics(self, connection: Connection) -> None:
        faults = self.replica.faults
        if not faults.metrics_frozen:
            self._frozen_page = None
        elif self._frozen_page is None:
            self._frozen_page = self._page.render()
        if faults.metrics_status:
            connection.reply(faults.metrics_status, b"", content_type=b"")
            return
        connection.reply(200, self._frozen_page or self._page.render(), content_type=_METRICS_TYPE)

    # ---------------------------------------------------------------- idle connections

    def _sweep(self) -> None:
        """Close connections that keep still for too long, between requests or in the middle of one."""
        config = self.replica.config
        now = self.monotonic()
        for connection in list(self._connections):
            since = connection.quiet_since
            if since is None:
                continue
            limit = config.request_timeout_s if connection.mid_request else config.idle_timeout_s
            if 0 < limit < now - since:
                connection.close()
        limits = [limit / 2 for limit in (config.request_timeout_s, config.idle_timeout_s) if limit > 0]
        self._sweeper = asyncio.get_running_loop().call_later(min([_SWEEP_S, *limits]), self._sweep)


class _Delayed:
    """A metrics page that is to come."""

    def __init__(self, timer: asyncio.TimerHandle) -> None:
        self._timer = timer

    def lost(self) -> None:
        self._timer.cancel()

    def writable(self) -> None:
        """Nothing was written yet."""
