"""A gateway with the scheduler of the test's own process, and model servers that tell what reached them."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Self

from gw_http1 import Http1
from gw_live import running
from gw_messages import JSON, Ask, Got
from gw_mirror import Mirror, Told
from gw_modes import FULL_DUPLEX, Pair, bootstrap
from gw_processes import Envoy, sees_the_scheduler, stat
from ports import free_ports
from tcp import TcpServer

from fairlead.server.live import Live

Json = dict[str, Any]
#: Changes a bootstrap, given the model servers' addresses.
Patch = Callable[[Json, list[str]], None]

#: What `fairlead serve` runs with; and somebody else's gateway, with and without an access log.
EMBEDDED = Pair("whole", "first-chunk")
FOREIGN = Pair(FULL_DUPLEX, FULL_DUPLEX, log=False)
FOREIGN_WITH_LOG = Pair(FULL_DUPLEX, FULL_DUPLEX)
GATEWAYS = {"embedded": EMBEDDED, "foreign": FOREIGN, "foreign-log": FOREIGN_WITH_LOG}

CHAT = b'{"model": "m", "messages": [{"role": "user", "content": "Which way?"}]}'


def post(body: bytes = CHAT, *fields: tuple[str, str], path: str = "/v1/chat/completions", **more: Any) -> Ask:
    return Ask("POST", path, [JSON, *fields], [body] if body else [], **more)


GET = Ask("GET", "/v1/models")


def headers(told: Told) -> Mapping[str, str]:
    return dict(told["headers"])


class Cable:
    """What lies between the gateway and the scheduler. `cut` it: for the gateway the scheduler was killed."""

    def __init__(self, port: int) -> None:
        self._behind = port

    async def __aenter__(self) -> Self:
        self._server = await TcpServer(self._carry).start()
        self.address = self._server.address
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cut()

    async def cut(self) -> None:
        await self._server.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind_reader, behind_writer = await asyncio.open_connection("127.0.0.1", self._behind)
        try:
            await asyncio.gather(_pump(reader, behind_writer), _pump(behind_reader, writer))
        finally:
            behind_writer.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 18):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()


class Site:
    """All of it."""

    def __init__(self, gateway: Envoy, live: Live, mirrors: list[Mirror], cable: Cable) -> None:
        self.gateway, self.live, self.mirrors, self.cable = gateway, live, mirrors, cable

    @property
    def addresses(self) -> list[str]:
        return [mirror.address for mirror in self.mirrors]

    @property
    def told(self) -> list[Told]:
        """What reached any model server since `forget`."""
        return [told for mirror in self.mirrors for told in mirror.told]

    def forget(self) -> None:
        for mirror in self.mirrors:
            mirror.told.clear()

    async def ask(self, ask: Ask) -> Got:
        async with Http1(self.gateway.port) as client:
            return await client.ask(ask)

    async def answer(self, ask: Ask) -> Told:
        """What the model server tells."""
        got = await self.ask(ask)
        assert got.status == 200, got
        return dict(json.loads(got.body))

    async def stat(self, name: str) -> int:
        return await stat(self.gateway.admin, name)

    async def until(self, ready: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not ready():
                await asyncio.sleep(0.02)

    async def connect_log(self) -> None:
        """The gateway's access log connects when it has something to say."""
        await self.ask(GET)
        await self.until(lambda: self.live.host.logs.connected)


@asynccontextmanager
async def site(
    pair: Pair,
    directory: Path,
    *,
    hosts: tuple[str, ...] = ("127.0.0.1", "127.0.0.1"),
    patch: Patch | None = None,
    endpoints: bool = True,
    message_timeout: float = 5.0,
    **config: Any,
) -> AsyncIterator[Site]:
    """`hosts`: of the model servers. Without `endpoints` the scheduler knows none. `message_timeout`: of our own
    gateways, in seconds. `config`: of the scheduler."""
    async with AsyncExitStack() as stack:
        mirrors = [await stack.enter_async_context(Mirror(host)) for host in hosts]
        addresses = [mirror.address for mirror in mirrors]
        if endpoints:
            known: object = addresses
        else:
            nobody = directory / "nobody.json"
            nobody.write_text('{"endpoints": []}')
            known = {"file": str(nobody)}
        config = {"endpoints": known, "policy": "round-robin", **config}
        live, _ = await stack.enter_async_context(running(config, directory))
        cable = await stack.enter_async_context(Cable(live.config.ext_proc.port))
        (port,) = free_ports(1)
        built = bootstrap(pair, port, cable.address, addresses, message_timeout=message_timeout)
        if patch is not None:
            patch(built, addresses)
        gateway = Envoy(directory, f"envoy-{port}")
        stack.callback(gateway.end)
        await asyncio.to_thread(gateway.start, built)
        await sees_the_scheduler(gateway.admin)
        yield Site(gateway, live, mirrors, cable)
        assert not any(mirror.malformed for mirror in mirrors), "something was read as a request that was none"
