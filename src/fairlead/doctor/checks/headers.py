"""`headers`: whether clients can steer the gateway to a machine of their choice.

Theory. A destination header that a client sets must not survive: who can name the upstream can reach any address that
the gateway can reach. What a foreign gateway does cannot be read anywhere, but it can be tried: a request names a
listener of ours as its destination. If that is called, whatever arrives there is what any address would have got.
A scheduler that answers corrects such a header, so that this shows what gets past it. Where Envoy's admin page can be
read (`--gateway-admin`, or `gateway.adminPort`), its configuration is looked through as well: what it does not take off
reaches model servers, and sidecars that obey it, whenever the scheduler is not asked.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from fairlead.doctor.finding import Finding, Kind, Severity
from fairlead.doctor.http import Unreached
from fairlead.doctor.requests import gateway_request
from fairlead.doctor.run import Check, Skipped
from fairlead.doctor.site import Site
from fairlead.route.headers import CONTROL_HEADERS, DESTINATION, PREFILLER

_DOCS = "docs/gateway.md"
_NAMING = (DESTINATION, f"{DESTINATION}-subset", PREFILLER)
#: Seconds that our listener waits after the answer.
_PATIENCE = 0.5

OBEYED = Kind(
    "headers.obeyed", Severity.CRITICAL, "the gateway sends requests wherever a header of the client says",
    "take the control headers off in front of ext_proc (early_header_mutation of the connection manager):"
    " `fairlead envoy-config` prints how; the header must then be set by the scheduler alone", _DOCS,
)  # fmt: skip
NOT_STRIPPED = Kind(
    "headers.not-stripped", Severity.ERROR, "the gateway does not take control headers off what clients send",
    "remove them in early_header_mutation_extensions of the connection manager: `fairlead envoy-config` prints how;"
    " sidecars of model servers obey some of them", _DOCS,
)  # fmt: skip


class _Trap:
    """Notes the first line of what arrives."""

    def __init__(self) -> None:
        self.caught: list[str] = []
        self.address = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(2.0):
                line = await reader.readline()
            if line:
                self.caught.append(line.decode("latin-1").strip()[:80])
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        except (TimeoutError, OSError, ValueError):
            return
        finally:
            writer.close()


def _own_address(gateway: str) -> str:
    """The address of this machine that the gateway sees; empty = there is no way to it."""
    try:
        parts = urlsplit(gateway)
        family, kind, _, _, there = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as route:
            route.connect(there)  # sends nothing: it only chooses the address
            return str(route.getsockname()[0])
    except (OSError, ValueError):
        return ""


@asynccontextmanager
async def _listening(host: str) -> AsyncIterator[_Trap]:
    trap = _Trap()
    server = await asyncio.start_server(trap.serve, host, 0)
    port = server.sockets[0].getsockname()[1]
    trap.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        yield trap
    finally:
        server.close()


async def _tried(site: Site) -> list[Finding]:
    host = await asyncio.to_thread(_own_address, site.gateway) if site.gateway else ""
    if not host:
        return []  # the check `asking` tells of a gateway that is not there
    path, body = await gateway_request(site)
    async with _listening(host) as trap:
        names = dict.fromkeys(_NAMING, trap.address)
        try:
            answer = await site.client.post(site.gateway + path, body, names)
            said = f"the gateway answered {answer.status}"
        except Unreached as error:
            said = str(error)
        await asyncio.sleep(_PATIENCE)
        if not trap.caught:
            return []
        evidence = f"a request with {_NAMING[0]}: {trap.address} arrived there ({trap.caught[0]}); {said}"
        return [OBEYED.at("gateway", evidence)]


async def _configured(site: Site) -> list[Finding]:
    if not site.gateway_admin:
        return []
    try:
        answer = await site.client.get(f"{site.gateway_admin}/config_dump")
        document = answer.json()
    except (Unreached, ValueError) as error:
        if not site.gateway:
            raise Skipped(f"Envoy's admin page cannot be read: {site.gateway_admin}: {error}") from None
        return []
    removed = set(_removals(document))
    left = sorted(CONTROL_HEADERS - removed)
    if not left:
        return []
    return [NOT_STRIPPED.at("gateway", f"Envoy's configuration does not remove {', '.join(left[:4])}")]


#: Where Envoy is told to take headers off: at entry, by a filter, at a route.
_MUTATIONS, _AT_ROUTE = ("early_header_mutation_extensions", "request_mutations"), "request_headers_to_remove"


def _removals(node: Any, within: bool = False) -> Iterator[str]:
    """Names of headers that a configuration takes off requests, wherever in it that stands."""
    if isinstance(node, list):
        for one in node:
            yield from _removals(one, within)
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        if within and key == "remove" and isinstance(value, str):
            yield value.lower()
        elif key == _AT_ROUTE and isinstance(value, list):
            yield from (str(name).lower() for name in value)
        else:
            yield from _removals(value, within or key in _MUTATIONS)


async def _run(site: Site) -> list[Finding]:
    return [*await _tried(site), *await _configured(site)]


CHECK = Check(
    name="headers",
    about="no client can name the machine that its request goes to",
    kinds=(OBEYED, NOT_STRIPPED),
    run=_run,
    needs=("any-gateway",),
)
