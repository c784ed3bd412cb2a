"""Send requests to a Kubernetes API server, and explain its refusals.

Rules
* After a 401, credentials are fetched again, and the request is repeated once.
* If the authority does not verify the server's certificate, the authority's file is read again for the next request.
* The error for a 403 names the missing verb and resource, and the line to add to the role.
* The size of answers is bounded. A watch is read line by line, and the size of each line is bounded.
* TCP keepalive detects within half a minute that a server has vanished. While a watch is silent, the server is asked
  for its health, which detects a server that hangs while its kernel still answers.
"""

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from random import Random
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from fairlead.core.errors import ConfigError, FairleadError
from fairlead.pool.aio import read_at_most
from fairlead.pool.kube.auth import Access
from fairlead.pool.kube.objects import read_failure

#: Limits of an answer, and of a watched object, in bytes. etcd accepts objects of 1.5 MiB.
MAX_ANSWER = 256 << 20
MAX_LINE = 16 << 20
_TIMEOUT_S = 30.0
_CONNECT_S = 3.0
#: The most seconds of a `Retry-After` that are respected.
_AFTER_MAX_S = 10.0
#: Seconds of silence in a watch before the server is asked for its health, and seconds to wait for that answer.
QUIET_S, ANSWER_S = 10.0, 8.0

_LOOPBACK = ("127.0.0.1", "::1", "localhost")

APPLY = "application/apply-patch+yaml"


class KubeError(FairleadError):
    """The API server refused a request. `code` is the HTTP status."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        self.code = code
        self.reason = reason
        super().__init__(message)


class Unreachable(FairleadError):
    """The API server gave no answer, or reported a failure of its own. A later attempt may succeed, but not within the
    next `after` seconds, if the server said so."""

    def __init__(self, message: str, after: float = 0.0) -> None:
        self.after = after
        super().__init__(message)


class Resource(msgspec.Struct, frozen=True):
    """A kind in a namespace, e.g. `Resource("", "v1", "pods", "serving")`; empty namespace = all namespaces."""

    group: str
    version: str
    plural: str
    namespace: str

    @property
    def path(self) -> str:
        base = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        return f"{base}/namespaces/{self.namespace}/{self.plural}" if self.namespace else f"{base}/{self.plural}"

    def role(self, verb: str, part: str = "") -> str:
        """The rule of a role that allows `verb`."""
        plural = f"{self.plural}/{part}" if part else self.plural
        return f'- {{apiGroups: ["{self.group}"], resources: ["{plural}"], verbs: ["{verb}"]}}'


class KubeClient:
    """A session with the API server; `await close()` at the end. Methods raise `KubeError` and `Unreachable`. `rng`:
    for the pauses between requests."""

    def __init__(self, access: Access, rng: Random | None = None) -> None:
        self._access = access
        self.rng = rng or Random()
        self._session: aiohttp.ClientSession | None = None
        #: The health request in flight, which all watches share.
        self._asked: asyncio.Task[None] | None = None

    @property
    def server(self) -> str:
        return self._access.where.server

    @property
    def namespace(self) -> str:
        """The default namespace of the credentials; empty = unknown."""
        return self._access.where.namespace

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None
            await asyncio.sleep(0)  # aborted connections close in the loop's next turn

    async def get(self, resource: Resource, query: Mapping[str, str]) -> bytes:
        return await self._request("GET", resource.path, resource, "list", query)

    async def read(self, resource: Resource, name: str) -> bytes:
        return await self._request("GET", f"{resource.path}/{name}", resource, "get")

    async def put(self, resource: Resource, name: str, value: object, version: str) -> bytes:
        """Replace an object. `version`: the one that was read; empty = the object does not exist, so create it."""
        if not version:
            return await self._request("POST", resource.path, resource, "create", body=value)
        return await self._request("PUT", f"{resource.path}/{name}", resource, "update", body=value)

    async def patch(self, resource: Resource, name: str, value: object, query: Mapping[str, str]) -> bytes:
        """Apply a patch to an object's status on the server's side."""
        path = f"{resource.path}/{name}/status"
        return await self._request("PATCH", path, resource, "patch", query, value, APPLY, "status")

    async def probe(self, path: str) -> bytes | None:
        """Get a page such as `/apis/llm-d.ai/v1alpha2`; `None` = it does not exist."""
        try:
            return await self._request("GET", path)
        except KubeError as error:
            if error.code == 404:
                return None
            raise

    async def _lives(self) -> None:
        """Check the API server's health. A refusal counts as healthy. Raises `Unreachable`."""
        if self._asked is None:
            self._asked = asyncio.create_task(self._live(), name="kubernetes health")
        asked = self._asked
        try:
            await asyncio.shield(asked)
        finally:
            if asked.done() and self._asked is asked:
                self._asked = None

    async def _live(self) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._request("GET", "/livez")
        except KubeError:
            return  # a server that refuses is alive
        except TimeoutError:
            raise Unreachable(f"the API server has not answered for {QUIET_S + ANSWER_S:g} s") from None

    async def watch(self, resource: Resource, query: Mapping[str, str], idle_s: float) -> AsyncGenerator[list[bytes]]:
        """Yield lists of lines that arrived together; first an empty list, once the server has accepted the watch.

        Ends when the server ends the watch. Raises `Unreachable` if it breaks off or is silent for `idle_s` seconds.
        """
        query = {**query, "watch": "true", "allowWatchBookmarks": "true"}
        try:
            async with self._open("GET", resource.path, query, None, "", None, idle_s) as response:
                if response.status != 200:
                    raise _refusal(response, await _body(response), resource, "watch", "")
                try:
                    yield []
                    pieces: list[bytes] = []
                    size = 0
                    while chunk := await self._chunk(response):
                        pieces.append(chunk)
                        size += len(chunk)
                        if b"\n" in chunk:
                            *lines, unfinished = b"".join(pieces).split(b"\n")
                            pieces, size = [unfinished], len(unfinished)
                            yield lines
                        if size > MAX_LINE:
                            raise Unreachable(
                                f"a watched object of {resource.plural} is larger than {MAX_LINE >> 20} MiB"
                            )
                finally:
                    _drop(response)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._unreachable(error) from None

    async def _chunk(self, response: aiohttp.ClientResponse) -> bytes:
        """The next bytes of a response; empty at its end."""
        while True:
            try:
                async with asyncio.timeout(QUIET_S) as quiet:
                    return await response.content.readany()
            except TimeoutError:
                if not quiet.expired():  # the session's timeout
                    raise
            await self._lives()

    async def _request(
        self,
        method: str,
        path: str,
        resource: Resource | None = None,
        verb: str = "get",
        query: Mapping[str, str] | None = None,
        body: object = None,
        kind: str = "application/json",
        part: str = "",
    ) -> bytes:
        data = None if body is None else msgspec.json.encode(body)
        for may_retry in (True, False):
            try:
                async with self._open(method, path, query, data, kind, _TIMEOUT_S, None) as response:
                    answer = await _body(response)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                raise self._unreachable(error) from None
            if response.status == 401 and may_retry:
                self._access.refused()
                continue
            if response.status >= 300:
                raise _refusal(response, answer, resource, verb, part)
            return answer
        raise AssertionError("unreachable")

    @asynccontextmanager
    async def _open(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        data: bytes | None,
        kind: str,
        total: float | None,
        idle: float | None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            headers, context = await self._access.credentials()
        except ConfigError as error:
            raise Unreachable(str(error)) from None
        headers["Accept"] = "application/json"
        if data is not None:
            headers["Content-Type"] = kind
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, socket_factory=_socket)
            # Use the proxies of the environment, except for a server on this machine.
            proxies = urlsplit(self.server).hostname not in _LOOPBACK
            self._session = aiohttp.ClientSession(connector=connector, trust_env=proxies)
        where = self._access.where
        async with asyncio.timeout(total or QUIET_S + ANSWER_S):  # a watch is silent, but the server accepts it at once
            response = await self._session.request(
                method,
                where.server + path,
                params=query,
                data=data,
                headers=headers,
                ssl=context,
                proxy=where.proxy or None,
                server_hostname=where.server_name or None,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=total, sock_connect=_CONNECT_S, sock_read=idle),
            )
        async with response:
            yield response

    def _unreachable(self, error: Exception) -> Unreachable:
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            self._access.distrusted()
        return Unreachable(str(error) or type(error).__name__)


def _drop(response: aiohttp.ClientResponse) -> None:
    """Abort the connection of a response that is no longer read. Closing would wait for the peer's part of the TLS
    shutdown and outlive the session."""
    connection = response.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()


async def _body(response: aiohttp.ClientResponse) -> bytes:
    large = Unreachable(f"the answer is larger than {MAX_ANSWER >> 20} MiB")
    return await read_at_most(response.content, MAX_ANSWER, large)


def _refusal(
    response: aiohttp.ClientResponse, answer: bytes, resource: Resource | None, verb: str, part: str
) -> FairleadError:
    status, failure = response.status, read_failure(answer)
    said = failure.message or answer[:200].decode(errors="replace") or f"HTTP {status}"
    if status == 429 or status >= 500:
        after = response.headers.get("Retry-After", "")
        return Unreachable(f"HTTP {status}: {said}", min(float(after), _AFTER_MAX_S) if after.isdecimal() else 0.0)
    if status == 403 and resource is not None and f"cannot {verb}" in said:  # else a webhook or a quota refuses
        plural = f"{resource.plural}/{part}" if part else resource.plural
        where = (
            f"namespace {resource.namespace}; add to the role"
            if resource.namespace
            else "all namespaces; add to a ClusterRole"
        )
        said = f"not allowed to {verb} {plural} in {where}: {resource.role(verb, part)}"
    elif status == 404 and resource is not None and verb in ("list", "watch"):
        version = f"{resource.group}/{resource.version}"
        said = f"the API server has no {resource.plural} in {version}: is the CRD installed?"
    elif status == 401:
        said = f"the API server does not know us (401): {said}"
    return KubeError(status, failure.reason, said)


def _socket(info: Any) -> socket.socket:
    family, kind, protocol, _, _ = info
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made
