"""The embedded gateway as one object: configuration, endpoint file, process, drain.

async with Gateway(options, endpoints=["10.0.0.1:8000"]) as gateway:
    print(gateway.address)
    gateway.set_endpoints(["10.0.0.1:8000", "10.0.0.2:8000"])
"""

from collections.abc import Iterable
from pathlib import Path

from msgspec import structs

from fairlead.core.endpoint import Endpoint
from fairlead.core.events import EndpointDown, EndpointUp
from fairlead.gateway.envoy.admin import EnvoyAdmin, GatewayError
from fairlead.gateway.envoy.clusters import PoolWriter
from fairlead.gateway.envoy.gateway import prepare
from fairlead.gateway.envoy.options import Options, parse_endpoint
from fairlead.gateway.envoy.process import GatewayProcess


class Gateway:
    """A running Envoy between `start` and `stop`, with its files. Belongs to one event loop."""

    def __init__(
        self,
        options: Options,
        endpoints: Iterable[str] = (),
        *,
        binary: str = "",
        directory: Path | None = None,
        start_timeout: float = 20.0,
    ) -> None:
        """`options.port` 0 takes any free port. `directory`: the parent of the gateway's own directory, by default the
        system's for temporary files. Raises `ConfigError` for invalid options or endpoints."""
        options.check()
        self._options = options
        self._endpoints = tuple(endpoints) or options.endpoints
        self._binary = binary
        self._base = directory
        self._start_timeout = start_timeout
        self._pool: PoolWriter | None = None
        self._process: GatewayProcess | None = None

    async def __aenter__(self) -> "Gateway":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def address(self) -> str:
        """The address for clients, e.g. `127.0.0.1:8080`; empty before `start`."""
        return self._process.address if self._process is not None else ""

    @property
    def pid(self) -> int:
        """The process id of the first Envoy; 0 while it does not run."""
        return self._process.supervisors[0].pid if self._process is not None else 0

    @property
    def restarts(self) -> int:
        return sum(envoy.restarts for envoy in self._process.supervisors) if self._process is not None else 0

    @property
    def admin(self) -> EnvoyAdmin:
        """The admin page of the first Envoy."""
        if self._process is None:
            raise GatewayError("the gateway is not running")
        return self._process.supervisors[0].admin

    async def start(self) -> None:
        """Start, and return when requests are served. Raises `GatewayError`: no Envoy, port taken, and so on."""
        plan = prepare(
            self._options,
            self._endpoints,
            binary=self._binary,
            directory=self._base,
            start_timeout=self._start_timeout,
        )
        process = GatewayProcess(**structs.asdict(plan))
        await process.start()
        self._process, self._pool = process, PoolWriter(plan.endpoints_file)

    def set_endpoints(self, addresses: Iterable[str]) -> None:
        """Set the pool for unscheduled requests. Envoy follows in less than 0.1 s.

        Raises `ConfigError` for an address that is not a literal `ip:port`; the old pool then stays in force.
        """
        wanted = tuple(addresses)
        for address in wanted:
            parse_endpoint(address)
        if self._pool is not None:
            for address in wanted:
                self._pool.changed(EndpointUp(Endpoint(address, address)))
            for address in {*self._endpoints} - {*wanted}:
                self._pool.changed(EndpointDown(address))
        self._endpoints = wanted

    async def stop(self, grace: float = 30.0) -> None:
        """Accept nothing new, let running requests finish for at most `grace` seconds, then end. Never raises."""
        process, self._process = self._process, None
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        if process is not None:
            await process.stop(grace)
