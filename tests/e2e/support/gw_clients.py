"""Clients that show a key or a token, and say to be somebody else."""

import asyncio
import json
import time
from typing import Any

from gw_http1 import Http1
from gw_messages import JSON, Ask, Got
from gw_processes import START_SECONDS, Serve, get_page

MINTED = ("x-llm-d-inference-fairness-id", "minted"), ("x-gateway-inference-fairness-id", "minted")
CHAT = "/v1/chat/completions"
#: Passed on inside Envoy, to its second listener.
LARGE = 400_000


def bearer(key: str) -> tuple[str, str]:
    return "authorization", f"Bearer {key}"


def request(*fields: tuple[str, str], path: str = CHAT, method: str = "POST", size: int = 5) -> Ask:
    asked = {"model": "m", "messages": [{"role": "user", "content": "a" * size}], "x-bench": "mode=json"}
    return Ask(method, path, [JSON, *fields], [json.dumps(asked).encode()] if method == "POST" else [])


async def ask(at: Serve, *fields: tuple[str, str], **other: Any) -> Got:
    async with Http1(at.port) as client:
        return await client.ask(request(*fields, **other))


async def tenant(at: Serve, *fields: tuple[str, str], **other: Any) -> str:
    """As whom the scheduler knows such a request. One that a busy machine let past the scheduler is sent anew."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        name = f"r{time.monotonic_ns()}"
        got = await ask(at, *fields, ("x-request-id", name), **other)
        assert got.status == 200, got
        status, text = await asyncio.to_thread(get_page, f"{at.admin}/debug/decisions/{name}")
        if status == 200:
            return str(json.loads(text)["fairness_id"])
    raise AssertionError("the gateway does not ask the scheduler")
