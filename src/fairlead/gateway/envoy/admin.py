"""Envoy's admin page, and errors of the gateway."""

import asyncio
import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from fairlead.core.errors import FairleadError

# Errors of the gateway itself.


class GatewayError(FairleadError):
    """Envoy is missing, refuses its configuration, or does not start. The message says what to do."""


# A client of Envoy's admin page, on a Unix socket or on 127.0.0.1.

#: The name of the listener that clients connect to.
LISTENER = "gateway"
_TIMEOUT = 2.0
#: The cluster of unscheduled requests, and the same cluster for gRPC.
_UNSCHEDULED = r"^cluster\.all_endpoints(_grpc)?\.upstream_rq_total$"
#: Percentage of the heap limit in use (`Options.max_heap`).
_HEAP = r"^overload\.envoy\.resource_monitors\.fixed_heap\.pressure$"
#: Requests for the admin page. The uptime would not tell that an Envoy was replaced: it follows the wall clock, and is
#: 0 for five seconds.
_ASKED = r"^http\.admin\.downstream_rq_total$"
#: All answers to clients, by class.
_ANSWERS = rf"^http\.{LISTENER}\.downstream_rq_[2-5]xx$"
_HEALTHY = r"^cluster\.ext_proc\.membership_healthy$"
#: Fetches of the issuer's keys that failed, for each filter that needs them; and servers with a certificate that the
#: gateway does not trust.
_KEYS_FAIL = r"^http\..+\.jwt_authn\.jwks_fetch_failed$"
_UNTRUSTED = r"^cluster\.jwks\.ssl\.fail_verify_(error|san)$"
_POOL = r"^cluster\.all_endpoints\.membership_total$"
#: Seconds to wait for the counters of a gateway that does not answer.
_PATIENCE = 0.5
_VITALS = (_UNSCHEDULED, _HEAP, _KEYS_FAIL, _UNTRUSTED, _ASKED, _ANSWERS)


class Vitals(NamedTuple):
    """Counters of Envoy since its start, and its heap."""

    #: Unscheduled requests, which Envoy balanced itself.
    unscheduled: int
    #: The share of the heap limit in use.
    heap: float
    #: Fetches of the issuer's keys that failed, and how often the server's certificate was why.
    key_failures: int = 0
    untrusted: int = 0
    #: Requests for the admin page; each look is one.
    asked: int = 0
    #: Answers to clients by class: 2xx to 5xx.
    answers: Mapping[str, int] = {}


class EnvoyAdmin:
    """A client of the admin page. Every call is one short connection and raises `TimeoutError` or `OSError` if Envoy
    does not run.

    Written by hand, so that the process that supervises Envoy need not load an HTTP library. Each answer ends with its
    connection.
    """

    def __init__(self, path: str = "", port: int = 0) -> None:
        self._path = path
        self._port = port

    @classmethod
    def from_address(cls, where: str) -> "EnvoyAdmin":
        """A client for `where`: a socket's path or a port of 127.0.0.1."""
        return cls(port=int(where)) if where.isdigit() else cls(where)

    async def ready(self, command: Sequence[str]) -> bool:
        """Whether the Envoy that this command started serves: clusters are warm, listeners are open. Another Envoy may
        have taken the port of the admin page, and answers in its place."""
        try:
            _, text = await self._ask("GET", "/server_info")
            info = json.loads(text)
            return info["state"] == "LIVE" and info["command_line_options"]["config_path"] in command
        except (ValueError, LookupError, TypeError):  # no Envoy answers there
            return False

    async def lives(self) -> bool:
        """Whether Envoy answers at all."""
        try:
            return bool(await self._ask("GET", "/ready"))
        except (TimeoutError, OSError, ValueError):
            return False

    async def address(self, listener: str) -> tuple[str, int] | None:
        """(host, port) of a listener; `None` while it does not listen."""
        _, text = await self._ask("GET", "/listeners?format=json")
        for status in json.loads(text).get("listener_statuses", ()):
            if status["name"] == listener:
                socket: dict[str, Any] = status["local_address"]["socket_address"]
                return str(socket["address"]), int(socket["port_value"])
        return None

    async def stats(self, pattern: str) -> dict[str, int]:
        """The counters and gauges whose names match a regular expression."""
        _, text = await self._ask("GET", f"/stats?filter={quote(pattern, safe='')}")
        pairs = (line.rsplit(": ", 1) for line in text.splitlines())
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}

    async def vitals(self) -> Vitals | None:
        """The counters; `None` if Envoy does not answer."""
        try:
            async with asyncio.timeout(_PATIENCE):
                values = await self.stats("|".join(_VITALS))
        except (TimeoutError, OSError):
            return None

        def total(pattern: str) -> int:
            return sum(value for name, value in values.items() if re.match(pattern, name))

        return Vitals(
            unscheduled=total(_UNSCHEDULED),
            heap=total(_HEAP) / 100,
            key_failures=total(_KEYS_FAIL),
            untrusted=total(_UNTRUSTED),
            asked=total(_ASKED),
            answers={name[-3:]: value for name, value in values.items() if re.match(_ANSWERS, name)},
        )

    async def asks_scheduler(self, count: int = 1) -> bool:
        """Whether Envoy considers `count` schedulers healthy, and would query one. False if Envoy does not answer."""
        return await self._total(_HEALTHY) >= count

    async def pool_size(self) -> int:
        """How many endpoints Envoy balances over by itself; 0 if it does not answer."""
        return await self._total(_POOL)

    async def _total(self, pattern: str) -> int:
        try:
            return sum((await self.stats(pattern)).values())
        except (TimeoutError, OSError):
            return 0

    async def listens(self) -> bool:
        """Whether clients can connect. False if Envoy does not answer."""
        try:
            return await self.address(LISTENER) is not None
        except (TimeoutError, OSError, ValueError):
            return False

    async def post(self, path: str) -> int:
        return (await self._ask("POST", path))[0]

    async def _ask(self, method: str, target: str) -> tuple[int, str]:
        async with asyncio.timeout(_TIMEOUT):
            if self._path:
                reader, writer = await asyncio.open_unix_connection(self._path)
            else:
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            try:
                writer.write(f"{method} {target} HTTP/1.1\r\nhost: envoy\r\nconnection: close\r\n\r\n".encode())
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
        status = head[9:12]
        if not head.startswith(b"HTTP/1.1 ") or not status.isdigit():
            raise ConnectionError("Envoy's admin page did not answer")
        if b"\ntransfer-encoding: chunked" in head.lower():
            body = _dechunked(body)
        return int(status), body.decode()


def _dechunked(body: bytes) -> bytes:
    """The content of a chunked body. Raises `ConnectionError` if its end is missing."""
    pieces: list[bytes] = []
    while True:
        line, separator, body = body.partition(b"\r\n")
        try:
            size = int(line, 16)
        except ValueError:
            size = -1
        if not separator or size < 0 or len(body) < size:
            raise ConnectionError("Envoy's admin page broke off")
        if not size:
            return b"".join(pieces)
        pieces.append(body[:size])
        body = body[size + 2 :]
