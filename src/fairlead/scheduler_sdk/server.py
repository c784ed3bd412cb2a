"""Serves a policy to gateways: the other end of `scheduler:` in their configuration."""

from collections.abc import Callable

from fairlead.io.receive.h2_limits import H2Limits
from fairlead.io.receive.h2_server import H2Server
from fairlead.io.receive.health import HealthService
from fairlead.io.tls import ServerTls
from fairlead.model.errors import ConfigError
from fairlead.schedule.framework import Policy
from fairlead.scheduler_sdk.session import SchedulerStats, Session
from fairlead.wire.scheduler import PATH

UNIX = "unix:"


class SchedulerServer:
    """`await start(address)`, then `await close()`. `make` gives a policy per stream."""

    def __init__(self, make: Callable[[], Policy], tls: ServerTls | None = None) -> None:
        self.stats = SchedulerStats()
        self._health = HealthService()
        routes = {
            PATH: lambda stream, metadata: Session(stream, metadata, make, self.stats),
            **self._health.routes(),
        }
        self._server = H2Server(routes, H2Limits(max_message=16 << 20, keepalive=20.0), tls=tls)

    async def start(self, address: str) -> str:
        """Listen on `host:port` (0 = any free one) or `unix:/path`. Returns the address to connect to.

        Raises `ConfigError`.
        """
        try:
            if address.startswith(UNIX):
                await self._server.listen_unix(address.removeprefix(UNIX))
                bound = address
            else:
                host, _, port = address.rpartition(":")
                bound = f"{host}:{await self._server.listen(host.strip('[]'), int(port))}"
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot listen on {address!r} (host:port or unix:/path): {error}") from None
        self._health.set_ready(True)
        return bound

    async def close(self, grace_s: float = 0.0) -> None:
        self._health.set_ready(False)
        await self._server.close(grace_s)
