"""The HTTP client of all checks: limited in time and size, follows no redirects, uses no proxy of the environment."""

import asyncio
import json
import os
import ssl
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Literal

import aiohttp
from msgspec import Struct

from fairlead.config.schema import Metrics
from fairlead.gateway import h2
from fairlead.pool.aio import read_at_most
from fairlead.pool.authorities import trusting
from fairlead.pool.scrape import TokenFile

Trouble = Literal["refused", "silent", "not-http", "tls", "untrusted", "other"]
TIMEOUT = 3.0
#: The most requests in flight, over all endpoints. The time limit of a request begins when it is sent.
AT_ONCE = 128
_MOST_BYTES = 16 << 20
#: How many times longer than the scraper to wait for a page, to distinguish slow pages from missing ones.
_PATIENCE = 3.0
#: Seconds to wait for a connection.
_CONNECTING = 2.0


class Unreached(Exception):
    """There is no answer. `trouble`: the kind of failure. The message is the reason."""

    def __init__(self, trouble: Trouble, reason: str) -> None:
        super().__init__(reason)
        self.trouble = trouble


class Answer(Struct, frozen=True):
    """An HTTP response. Header names are in lower case. `sent`, `came`: Unix seconds before and after the exchange."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    sent: float
    came: float

    def json(self) -> Any:
        """Decode the body as JSON. Raises `ValueError`, also for JSON that is nested too deeply."""
        try:
            return json.loads(self.body)
        except RecursionError:
            raise ValueError("nested too deeply") from None

    @property
    def seconds(self) -> float:
        return self.came - self.sent

    def skew(self) -> float:
        """Seconds by which the server's clock is at least ahead of this machine's (negative: behind); 0 = within the
        precision of the header `Date`, which has whole seconds."""
        try:
            server_time = parsedate_to_datetime(self.headers.get("date", "")).timestamp()
        except (ValueError, TypeError, OverflowError):
            return 0.0
        return max(server_time - self.came, 0.0) + min(server_time + 1.0 - self.sent, 0.0)


class Client:
    """Use it as `async with Client(config.metrics) as client:`. It verifies certificates as the scraper does."""

    def __init__(self, metrics: Metrics, most_bytes: int = _MOST_BYTES) -> None:
        self._metrics = metrics
        self._token = TokenFile(metrics.token_file)
        self._most_bytes = most_bytes
        self._ssl: ssl.SSLContext | bool = True
        self._turn = asyncio.Semaphore(AT_ONCE)

    async def __aenter__(self) -> "Client":
        """Open the client. Raises `OSError` if `metrics.tls.caFile` cannot be read."""
        tls = self._metrics.tls
        if not tls.verify:
            self._ssl = False
        elif tls.ca_file:
            self._ssl = await asyncio.to_thread(trusting, tls.ca_file)
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            headers={"User-Agent": "fairlead-doctor", "Accept-Encoding": "identity"},
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def get(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        seconds: float = TIMEOUT,
        tls: ssl.SSLContext | None = None,
    ) -> Answer:
        """GET a page within `seconds`. `tls`: what is trusted; `None` = as for metrics pages. Raises `Unreached`."""
        return await self._ask("GET", url, None, headers, seconds, tls)

    async def post(
        self, url: str, body: bytes, headers: Mapping[str, str] | None = None, seconds: float = TIMEOUT
    ) -> Answer:
        """Post JSON. Raises `Unreached`."""
        return await self._ask("POST", url, body, {"Content-Type": "application/json", **(headers or {})}, seconds)

    async def scrape(self, url: str) -> Answer:
        """GET a metrics page, with the token that the scraper sends. Raises `Unreached`."""
        try:
            headers = await self._token.headers()
        except OSError as error:
            raise Unreached("other", f"cannot read {self._metrics.token_file}: {error.strerror or error}") from None
        except ValueError as error:
            raise Unreached("other", str(error)) from None
        return await self.get(url, headers, _PATIENCE * self._metrics.timeout)

    async def _ask(
        self,
        method: str,
        url: str,
        body: bytes | None,
        headers: Mapping[str, str] | None,
        seconds: float,
        tls: ssl.SSLContext | None = None,
    ) -> Answer:
        try:
            async with self._turn, asyncio.timeout(seconds):
                sent = time.time()
                async with self.session.request(
                    method, url, data=body, headers=headers, ssl=tls or self._ssl, allow_redirects=False
                ) as response:
                    large = Unreached("other", f"more than {self._most_bytes} bytes")
                    content = await read_at_most(response.content, self._most_bytes, large)
                    heads = {name.lower(): value for name, value in response.headers.items()}
                    return Answer(response.status, heads, content, sent, time.time())
        except Unreached:
            raise
        except TimeoutError:
            raise Unreached("silent", f"no answer within {seconds:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Unreached(_trouble(error), _reason(error)) from None


def _trouble(error: Exception) -> Trouble:
    if isinstance(error, aiohttp.ClientConnectorCertificateError | ssl.SSLCertVerificationError):
        return "untrusted"
    if isinstance(error, aiohttp.ClientSSLError | ssl.SSLError):
        return "tls"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "refused"
    if isinstance(error, aiohttp.ClientResponseError | aiohttp.ServerDisconnectedError | ConnectionResetError):
        return "not-http"
    return "other"


def _reason(error: Exception) -> str:
    cause: Exception = error
    if isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error or error
    elif isinstance(error, aiohttp.ClientConnectorCertificateError):
        cause = error.certificate_error or error
    code, said = (cause.errno, cause.strerror) if isinstance(cause, OSError) else (None, None)
    plain = os.strerror(code) if code and code > 0 and not isinstance(cause, ssl.SSLError) else ""
    text = plain or said or str(cause) or type(error).__name__
    return " ".join(text.split())[:300]


def trusting_only(certificate: Path) -> ssl.SSLContext:
    """A context that trusts just this certificate, whoever signed it, for whatever name. Raises `OSError`."""
    context = ssl.create_default_context(cafile=certificate)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = False
    return context


async def speaks_tls(host: str, port: int) -> bool:
    """Whether a TLS handshake succeeds at this port, whatever the certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        async with asyncio.timeout(_CONNECTING):
            _, writer = await asyncio.open_connection(host, port, ssl=context)
    except (OSError, TimeoutError, ValueError):
        return False
    writer.transport.abort()
    return True


async def speaks_http2(host: str, port: int) -> bool:
    """Whether this port speaks HTTP/2 without TLS. The server sees a connection that opens well and has no requests."""
    try:
        async with asyncio.timeout(_CONNECTING):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(h2.PREFACE + h2.frame(h2.SETTINGS, 0, 0))
                head = await reader.readexactly(9)
            finally:
                writer.transport.abort()
    except (OSError, TimeoutError, ValueError, EOFError):
        return False
    return head[3] == h2.SETTINGS


async def connects(host: str, port: int) -> str:
    """Why no TCP connection to this port is possible; empty = connections are accepted."""
    try:
        async with asyncio.timeout(_CONNECTING):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return f"no connection within {_CONNECTING:g} s"
    except (OSError, ValueError) as error:
        return _reason(error)
    writer.transport.abort()
    return ""
