"""The ports for gateways: one for ext_proc, access log and health, and optionally another for health."""

import contextlib

from fairlead.core.errors import cannot_listen
from fairlead.gateway import access_log
from fairlead.gateway.grpc_server import GrpcServer
from fairlead.gateway.h2_limits import ByteBudget, H2Limits
from fairlead.gateway.h2_server import H2Server
from fairlead.gateway.health import HealthService
from fairlead.gateway.host import Host
from fairlead.gateway.pools import PoolHosts
from fairlead.gateway.session import sessions
from fairlead.gateway.stream import Routes
from fairlead.gateway.tls import ServerTls

_Transport = H2Server | GrpcServer

EXT_PROC = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"


def routes(host: Host | PoolHosts, health: HealthService) -> Routes:
    """The methods that a gateway may call. An access log does not name its pool, so there is none for several pools."""
    if isinstance(host, PoolHosts):
        return {EXT_PROC: host.begin, **health.routes()}
    return {
        EXT_PROC: sessions(host),
        access_log.PATH: access_log.factory(host.logs),
        **health.routes(),
    }


class Server:
    """`await start()`, `drain()`, `await close()`. `transport`: `http2` (built-in) or `grpc-aio` (reference)."""

    def __init__(
        self,
        transport: str,
        host: Host | PoolHosts,
        health: HealthService,
        tls: ServerTls | None,
        max_body: int,
        budget: ByteBudget | None = None,
    ) -> None:
        limits = H2Limits(max_message=max_body + (64 << 10))
        self._health = health
        if transport == "http2":
            self._main: _Transport = H2Server(routes(host, health), limits, tls=tls, merge_wakeups=True, budget=budget)
        else:
            self._main = GrpcServer(routes(host, health), limits, tls=tls, budget=budget)
        self._extra: list[H2Server] = []

    @property
    def addresses(self) -> list[str]:
        return self._main.addresses

    async def start(self, host: str, port: int, health_port: int = 0, log_port: int = 0) -> int:
        """Listen, and return the port. `log_port`: a further port for all methods, for a gateway's access log.

        Raises a `ConfigError` that names the setting if a port is taken.
        """
        bound = await self._listen(self._main, host, port, "$.extProc.port")
        if log_port and log_port != port:
            await self._listen(self._main, host, log_port, "$.als.port")
        if health_port:
            extra = H2Server(self._health.routes())
            self._extra.append(extra)
            await self._listen(extra, host, health_port, "$.extProc.healthPort")
        return bound

    async def _listen(self, server: _Transport, host: str, port: int, path: str) -> int:
        try:
            return await server.listen(host, port)
        except OSError as error:
            raise cannot_listen(f"{host or '*'}:{port}", error, path) from None

    def drain(self) -> None:
        """Accept no new streams. Running streams continue."""
        self._main.drain()

    async def close(self, grace_s: float) -> None:
        await self._main.close(grace_s)
        for server in self._extra:
            with contextlib.suppress(OSError):
                await server.close()
