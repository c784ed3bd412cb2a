"""Two tenants, one of them light, through `fairlead serve` and its Envoy to a `fairlead stub` server, all defaults.

The server is as slow as a real one, so that an answer takes 0.2 s and this machine's own pauses are small beside it.
"""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Awaitable, Callable

import pytest
from gw_http1 import Http1
from gw_messages import JSON, Ask
from gw_processes import Serve, Stub, sees_the_scheduler

MODEL = "Qwen/Qwen3-32B"
SECONDS, WARM_UP_S = 6.0, 2.0
#: Until the first answers nobody knows who wants how much.
BEGINNING = 1.0
#: What this machine may add to a time by itself.
PAUSES_S = 0.05


def ask(tenant: str, text: str, tokens: int = 16) -> Ask:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": tokens, "ignore_eos": True}
    fields = [JSON, ("x-llm-d-inference-fairness-id", tenant)]
    return Ask(path="/v1/chat/completions", fields=fields, pieces=[json.dumps(body).encode()])


async def worker(at: Serve, tenant: str, number: int, until: float) -> list[tuple[float, float]]:
    """When each of its requests began, and how long it took."""
    took = []
    async with Http1(at.port) as client:
        while (begun := time.monotonic()) < until:
            got = await client.ask(ask(tenant, f"{tenant} {number} {len(took)} says something short"))
            assert got.status == 200
            took.append((begun, time.monotonic() - begun))
    return took


async def times(
    at: Serve, beside: Callable[[float], Awaitable[object]] | None = None, seconds: float = SECONDS
) -> list[float]:
    """Of two workers, sorted."""
    begun = time.monotonic()
    until = begun + seconds
    others = asyncio.ensure_future(beside(until)) if beside else None
    found = await asyncio.gather(*(worker(at, "few", number, until) for number in range(2)))
    if others is not None:
        await others
    return sorted(took for each in found for when, took in each if when > begun + BEGINNING)


async def sixty(at: Serve, until: float) -> None:
    await asyncio.gather(*(worker(at, "many", number, until) for number in range(60)))


def _huge(port: int, until: float, statuses: list[bytes]) -> None:
    """One worker that sends 30 MiB, which is more than any context. Who waits at the end is left."""
    whole = ask("huge", "word " * (30 * 2**20 // 5)).pieces[0]
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"x-llm-d-inference-fairness-id: huge\r\ncontent-length: %d\r\n\r\n" % len(whole)
    )
    while (left := until - time.monotonic()) > 0:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), left) as client:
            client.sendall(head)
            client.sendall(whole)
            statuses.append(client.recv(4096)[9:12])


@pytest.mark.slow
@pytest.mark.parametrize("rival", ["sixty workers", "30 MiB"])
async def test_a_light_tenant_is_served_as_if_alone(
    rival: str, stub: Callable[..., Stub], serve: Callable[..., Serve], figures: list[str]
) -> None:
    servers = await asyncio.to_thread(stub, 1, "--time-ratio", "1")
    at = await asyncio.to_thread(serve, {"endpoints": servers.addresses, "flowControl": {}})
    await sees_the_scheduler(at.gateway)
    statuses: list[bytes] = []

    async def beside(until: float) -> None:
        if rival == "sixty workers":
            await sixty(at, until)
        else:
            await asyncio.to_thread(_huge, at.port, until, statuses)

    await times(at, seconds=WARM_UP_S)
    for last in (False, False, True):
        alone, both = await times(at), await times(at, beside)
        middle, slow = (
            [found[min(int(len(found) * share), len(found) - 1)] for found in (alone, both)] for share in (0.5, 0.9)
        )
        figures.append(
            f"light tenant beside {rival}: p50 {middle[0] * 1e3:.0f} → {middle[1] * 1e3:.0f} ms,"
            f" p90 {slow[0] * 1e3:.0f} → {slow[1] * 1e3:.0f} ms"
        )
        # Whoever else uses the machine makes times longer, never shorter: one run in peace says it. Of some 40 times,
        # the 99th percentile would be the longest, which is the machine's.
        good = middle[1] <= 1.5 * middle[0] + PAUSES_S and slow[1] <= 1.5 * slow[0] + PAUSES_S
        if last or good:
            break
    assert good
    assert set(statuses) == ({b"400"} if rival == "30 MiB" else set()), "nobody's prompt is held for ever"
    assert await at.settled() == {}
