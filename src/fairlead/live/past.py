"""How many requests the embedded gateway balanced by itself, by its own count.

The access log tells of most of them, one by one and with the endpoint, but of none that ended while no scheduler was
there to be told. Envoy counts them all, and a scheduler that dies takes nothing of that along.
"""

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp

from fairlead.io.envoy.admin import EnvoyAdmin
from fairlead.observe.exposition import Registry
from fairlead.observe.gateway_metrics import show_unscheduled

#: The cluster of those that nobody scheduled, and its twin for gRPC.
_PAST = r"^cluster\.all_endpoints(_grpc)?\.upstream_rq_total$"
#: Seconds that whoever asks is kept waiting for a gateway that does not answer.
_PATIENCE = 0.5


async def requests_past(admin: EnvoyAdmin) -> int | None:
    """Since the gateway's start; `None` while it does not answer."""
    try:
        async with asyncio.timeout(_PATIENCE):
            return sum((await admin.stats(_PAST)).values())
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None


def watch_gateway(where: str, registry: Registry) -> Callable[[], Awaitable[None]] | None:
    """Show the count on the metrics page. Returns what to await before the page is made; `None` = nothing to ask.

    `where`: the gateway's admin page, a socket's path or a port of 127.0.0.1; empty = it is not ours.
    """
    if not where:
        return None
    admin = EnvoyAdmin(port=int(where)) if where.isdigit() else EnvoyAdmin(where)
    past = show_unscheduled(registry)

    async def ask() -> None:
        found = await requests_past(admin)
        if found is not None:
            past.values = {(): found}

    return ask
