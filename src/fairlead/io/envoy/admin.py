"""A client of Envoy's admin page, on a Unix socket or on 127.0.0.1."""

import json
from typing import Any

import aiohttp

_TIMEOUT = aiohttp.ClientTimeout(total=2.0)


class EnvoyAdmin:
    """Every call is one short connection. All raise `aiohttp.ClientError`, `TimeoutError` or `OSError` while Envoy is
    not there."""

    def __init__(self, path: str = "", port: int = 0) -> None:
        self._path = path
        self._base = f"http://127.0.0.1:{port}" if port else "http://envoy"

    async def ready(self) -> bool:
        """Envoy serves: clusters are warm, listeners are open."""
        return (await self._ask("GET", "/ready"))[0] == 200

    async def address(self) -> tuple[str, int]:
        """(host, port) where the first listener listens."""
        _, text = await self._ask("GET", "/listeners?format=json")
        socket: dict[str, Any] = json.loads(text)["listener_statuses"][0]["local_address"]["socket_address"]
        return str(socket["address"]), int(socket["port_value"])

    async def stats(self, pattern: str) -> dict[str, int]:
        """Counters and gauges whose names match a regular expression."""
        _, text = await self._ask("GET", "/stats", {"filter": pattern})
        pairs = (line.rsplit(": ", 1) for line in text.splitlines())
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}

    async def post(self, path: str) -> int:
        return (await self._ask("POST", path))[0]

    async def _ask(self, method: str, path: str, query: dict[str, str] | None = None) -> tuple[int, str]:
        connector = aiohttp.UnixConnector(self._path) if self._path else aiohttp.TCPConnector()
        async with (
            aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT, trust_env=False) as session,
            session.request(method, self._base + path, params=query) as response,
        ):
            return response.status, await response.text()
