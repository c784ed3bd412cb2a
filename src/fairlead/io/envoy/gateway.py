"""The embedded gateway as one object: configuration, endpoint file, process, drain.

async with Gateway(options, endpoints=["10.0.0.1:8000"]) as gateway:
    print(gateway.address)
    gateway.set_endpoints(["10.0.0.1:8000", "10.0.0.2:8000"])
"""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import aiohttp
from msgspec import structs

from fairlead.io.envoy.admin import EnvoyAdmin
from fairlead.io.envoy.binary import find_envoy
from fairlead.io.envoy.config import STAT_PREFIX, build
from fairlead.io.envoy.endpoints_file import EndpointsFile
from fairlead.io.envoy.errors import GatewayError
from fairlead.io.envoy.log import FORMAT
from fairlead.io.envoy.options import Options, parse_endpoint
from fairlead.io.envoy.supervisor import Supervisor
from fairlead.io.ports import obstacle

log = logging.getLogger("fairlead.gateway")

_ADMIN_SOCKET = "admin.sock"
_POLL = 0.05
_COALESCE = 0.02
_ACTIVE = f"^http\\.{STAT_PREFIX}\\.downstream_rq_active$"


class Gateway:
    """A running Envoy between `start` and `stop`. Belongs to one event loop."""

    def __init__(
        self,
        options: Options,
        endpoints: Iterable[str] = (),
        *,
        binary: str = "",
        directory: Path | None = None,
        start_timeout: float = 20.0,
    ) -> None:
        """`options.port` 0 takes any free port. `directory`: where its own files go, default the system's for temporary
        files. Raises `ConfigError` for options or endpoints that are wrong."""
        options.check()
        self._options = options
        self._endpoints = tuple(endpoints) or options.endpoints
        self._binary = binary
        self._base = directory
        self._start_timeout = start_timeout
        self._directory: Path | None = None
        self._file: EndpointsFile | None = None
        self._known: set[str] = set()
        self._write: asyncio.TimerHandle | None = None
        self._supervisor: Supervisor | None = None
        #: Where clients connect, `127.0.0.1:8080`; empty before `start`.
        self.address = ""

    async def __aenter__(self) -> "Gateway":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def pid(self) -> int:
        """0 while no Envoy runs."""
        return self._supervisor.pid if self._supervisor is not None else 0

    @property
    def restarts(self) -> int:
        return self._supervisor.restarts if self._supervisor is not None else 0

    @property
    def admin(self) -> EnvoyAdmin:
        if self._supervisor is None:
            raise GatewayError("the gateway is not running")
        return self._supervisor.admin

    @property
    def admin_at(self) -> str:
        """Where the admin page is: a socket's path, or a port of 127.0.0.1; empty before `start`."""
        if self._options.admin_port:
            return str(self._options.admin_port)
        return str(self._directory / _ADMIN_SOCKET) if self._directory is not None else ""

    def speak_http2(self, wanted: bool) -> None:
        """To model servers, from the next `start` on."""
        self._options = structs.replace(self._options, upstream_http2=wanted)

    async def start(self) -> None:
        """Returns when requests are served. Raises `GatewayError`: no Envoy, port taken, and so on."""
        binary = self._binary or find_envoy()
        check_free(self._options.host, self._options.port)
        self._directory = directory = Path(tempfile.mkdtemp(prefix="fairlead-", dir=self._base))  # mode 0700
        try:
            self._file = EndpointsFile(directory / "endpoints.json")
            self._file.write(self._endpoints)
            options = structs.replace(
                self._options, admin_path=str(directory / _ADMIN_SOCKET), endpoints_file=str(self._file.path)
            )
            admin = EnvoyAdmin("" if options.admin_port else options.admin_path, options.admin_port)
            bootstrap = self._write_bootstrap(options)
            self._supervisor = Supervisor(
                command(binary, bootstrap, options.concurrency),
                admin,
                start_timeout=self._start_timeout,
                on_restart=lambda: Path(options.admin_path).unlink(missing_ok=True),
            )
            await self._supervisor.start()
            host, port = await admin.address()
            self._write_bootstrap(structs.replace(options, port=port))  # a restart must come back where it was
        except BaseException:
            await self.stop(0.0)
            raise
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        log.info("the gateway listens on %s, pid %d", self.address, self.pid)

    def _write_bootstrap(self, options: Options) -> Path:
        assert self._directory is not None
        path = self._directory / "bootstrap.json"
        path.write_text(json.dumps(build(options)))
        return path

    def set_endpoints(self, addresses: Iterable[str]) -> None:
        """The pool for requests that nobody scheduled is this from now on; Envoy follows in less than 0.1 s.

        Cheap: a burst of changes is written once. Raises `ConfigError` for what is not a literal `ip:port`; the old
        pool stays in force then.
        """
        wanted = tuple(addresses)
        for address in wanted:
            if address not in self._known:
                parse_endpoint(address)
        self._known = set(wanted)
        self._endpoints = wanted
        if self._file is not None and self._write is None:
            self._write = asyncio.get_running_loop().call_later(_COALESCE, self._write_endpoints)

    def _write_endpoints(self) -> None:
        self._write = None
        if self._file is not None:
            try:
                self._file.write(self._endpoints)
            except OSError as error:
                log.error("the gateway keeps its old endpoints: %s", error)

    async def stop(self, grace: float = 30.0) -> None:
        """Accept nothing new, let running requests finish for at most `grace` seconds, then end. Never raises."""
        supervisor, self._supervisor = self._supervisor, None
        if self._write is not None:
            self._write.cancel()
            self._write = None
        if supervisor is not None:
            if grace > 0 and supervisor.pid:
                with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                    await self._drain(supervisor.admin, grace)
            await supervisor.stop()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._directory = self._file = None
        self.address = ""

    async def _drain(self, admin: EnvoyAdmin, grace: float) -> None:
        await admin.post("/healthcheck/fail")  # from now on answers say `connection: close`
        await admin.post("/drain_listeners")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                while any((await admin.stats(_ACTIVE)).values()):
                    await asyncio.sleep(_POLL)
        # The last entries of the access log are still in its buffer.
        await asyncio.sleep(2 * self._options.als_interval if self._options.als else 0)


def command(binary: str, bootstrap: Path, concurrency: int) -> list[str]:
    """How Envoy is started.

    Hot restart is off: it needs shared memory by a number that two gateways might share. Without the scheduler ext_proc
    would log a warning for every request; the access log and `ext_proc.failure_mode_allowed` count them.
    """
    arguments = [binary, "-c", str(bootstrap), "--disable-hot-restart", "--log-level", "warning"]
    arguments += ["--component-log-level", "ext_proc:error"]
    arguments += ["--log-format", FORMAT, "--drain-strategy", "immediate", "--drain-time-s", "1"]
    return arguments + (["--concurrency", str(concurrency)] if concurrency else [])


def check_free(host: str, port: int) -> None:
    """Raises `GatewayError` when nobody can listen there: with several workers Envoy would share a taken port."""
    error = obstacle(host, port)
    if error is None:
        return
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if "in use" in os.strerror(error.errno or 0):
        cure = "stop what listens there, or choose another port for the gateway"
        raise GatewayError(f"{where} is taken: {cure}")
    raise GatewayError(f"the gateway cannot listen on {where}: {error.strerror}")
