"""The indexer's HTTP port.

    POST /query      which endpoints hold how much of a prompt
    GET  /state      the ranks of each endpoint, for schedulers that use this indexer
    GET  /snapshot   the index as bytes, for a warm start elsewhere
    PUT  /snapshot   load a snapshot, where that is allowed
    GET  /healthz, /readyz, /metrics

Rules
* Every error is JSON, `{"error": {"status": 400, "message": "..."}}`, and says how to correct the request.
* Bodies are bounded. Larger ones are refused before they are read to the end.
* A snapshot is made from the live index, segment by segment, with other work in between; one at a time. While a client
  reads it, later clients get the same snapshot if it is younger than `SHARED_S` seconds, or if two are being read.
* A client is disconnected if it takes longer than `STALL_S` seconds for a MiB of a snapshot. It gets status 408 if it
  takes longer than `ASK_S` seconds to send a question.
* Clients cannot change the index, except by `PUT /snapshot`, which is off by default.
"""

import asyncio
import contextlib
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from msgspec import Struct

from fairlead.pool.aio import in_turns, read_at_most
from fairlead.server.http_port import HttpPort, healthz, readiness, send
from fairlead.server.indexer.service import IndexService
from fairlead.server.indexer.wire import JSON, MSGPACK, QueryError, read_query, write
from fairlead.server.observe.exposition import TEXT_TYPE

MAX_QUERY, MAX_SNAPSHOT = 8 << 20, 1 << 30
SHARED_S, STALL_S, ASK_S = 60.0, 10.0, 30.0
_CHUNK = 1 << 20

_PAGES = {
    "POST /query": 'who holds how much: {"prompt_hash": [...], "pods": [...]}',
    "GET /state": "the ranks of each endpoint (JSON)",
    "GET /snapshot": "the index as bytes, for a warm start",
    "GET /healthz": "200 while the process is alive",
    "GET /readyz": "200 when the index can be asked, else 503 and why not",
    "GET /metrics": "Prometheus text",
}


class IndexSources(Struct, frozen=True, kw_only=True):
    """Callables that return the content of the pages."""

    metrics: Callable[[], Iterable[bytes]]
    #: Why the indexer is not ready; empty = ready.
    unready: Callable[[], Sequence[str]]
    #: What it cannot do, although it is ready.
    notes: Callable[[], Sequence[str]] = lambda: ()
    #: The pieces of a new snapshot.
    snapshot: Callable[[], Generator[bytes, None, None]]
    #: Loads a snapshot and returns how many endpoints get blocks from it; raises `ValueError`. `None` = not allowed.
    take: Callable[[bytes], int] | None = None
    on_error: Callable[[str, Exception], object] = lambda page, error: None


class _Snapshot(Struct, eq=False):
    """A snapshot, when it was made (the event loop's clock), and how many clients are reading it."""

    pieces: list[bytes]
    made: float
    readers: int = 0


class IndexServer(HttpPort):
    """The indexer's port. Call `await start()`, then read `port`; `await close()` at the end. `start` raises `OSError`
    if the port is taken."""

    def __init__(self, service: IndexService, sources: IndexSources, host: str, port: int) -> None:
        super().__init__(host, port, grace_s=5.0)
        self._service = service
        self._sources = sources
        self._saving = asyncio.Lock()
        self._snapshots: list[_Snapshot] = []

    def make_app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_QUERY, middlewares=[self._refusals])
        app.router.add_get("/", self._index)
        app.router.add_post("/query", self._query)
        app.router.add_get("/state", self._state)
        app.router.add_get("/snapshot", self._snapshot)
        app.router.add_put("/snapshot", self._take)
        app.router.add_get("/healthz", healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        return app

    @web.middleware
    async def _refusals(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except QueryError as error:
            return self._refused(request, error.status, str(error))
        except web.HTTPException as error:
            if error.status < 400:
                raise
            return self._refused(request, error.status, _reason(request, error), error.headers.get("Allow", ""))
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception as error:
            self._sources.on_error(request.path, error)
            return self._refused(request, 500, f"{request.path} failed: {type(error).__name__}")

    def _refused(self, request: web.Request, status: int, message: str, allow: str = "") -> web.Response:
        if request.path == "/query":
            refused = self._service.asked.refused
            refused[status] = refused.get(status, 0) + 1
        response = web.json_response({"error": {"status": status, "message": message}}, status=status)
        if allow:
            response.headers["Allow"] = allow
        return response

    async def _index(self, request: web.Request) -> web.Response:
        return web.Response(
            text="fairlead indexer\n\n" + "".join(f"{page:<16}{text}\n" for page, text in _PAGES.items())
        )

    async def _query(self, request: web.Request) -> web.Response:
        content_type = MSGPACK if request.content_type == MSGPACK else JSON
        try:
            async with asyncio.timeout(ASK_S):
                body = await request.read()
        except TimeoutError:
            raise QueryError(408, f"the body did not come within {ASK_S:g} seconds") from None
        query = read_query(body, content_type)
        return _written(await self._service.answer(query), content_type)

    async def _state(self, request: web.Request) -> web.Response:
        return _written(self._service.state(), JSON)

    async def _snapshot(self, request: web.Request) -> web.StreamResponse:
        async with self._saving:
            snapshot = await self._newest()
            snapshot.readers += 1
        try:
            kind = {"Content-Type": "application/octet-stream"}
            return await send(request, snapshot.pieces, kind, chunk=_CHUNK, chunk_s=STALL_S)
        finally:
            snapshot.readers -= 1
            if not snapshot.readers:  # free its memory: it may be hundreds of megabytes
                self._snapshots.remove(snapshot)

    async def _newest(self) -> _Snapshot:
        now = asyncio.get_running_loop().time()
        if not self._snapshots or (len(self._snapshots) == 1 and now - self._snapshots[0].made > SHARED_S):
            with contextlib.closing(self._sources.snapshot()) as made:
                self._snapshots.append(_Snapshot(await in_turns(made), now))
        return self._snapshots[-1]

    async def _take(self, request: web.Request) -> web.Response:
        take = self._sources.take
        if take is None:
            raise QueryError(403, "snapshots are not taken in here; start with --accept-snapshots to allow it")
        async with self._saving:
            try:
                taken = take(await _body(request, MAX_SNAPSHOT))
            except QueryError:
                raise
            except ValueError as error:
                raise QueryError(400, str(error)) from None
        return web.json_response({"endpoints": taken})

    async def _readyz(self, request: web.Request) -> web.Response:
        return readiness(self._sources.unready(), self._sources.notes())

    async def _metrics(self, request: web.Request) -> web.Response:
        parts = await in_turns(self._sources.metrics())
        return web.Response(body=b"".join(parts), headers={"Content-Type": TEXT_TYPE})


def _written(answer: Any, content_type: str) -> web.Response:
    try:
        body = write(answer, content_type)
    except (UnicodeEncodeError, msgspec.MsgspecError):  # half a surrogate pair, in the name of a pod for example
        raise QueryError(400, "a name in the question cannot be written as UTF-8") from None
    return web.Response(body=body, content_type=content_type)


def _reason(request: web.Request, error: web.HTTPException) -> str:
    if error.status == 404:
        return f"there is no page {request.path[:80]}; GET / lists them"
    if error.status == 405:
        return f"{request.method} is not for {request.path[:80]}; GET / says what is"
    if error.status == 413:
        return f"the body is larger than {MAX_QUERY} bytes"
    return error.reason


async def _body(request: web.Request, most: int) -> bytes:
    """Read the request's whole body. Raises `QueryError` if it has more than `most` bytes."""
    large = QueryError(413, f"the snapshot is larger than {most} bytes")
    if (request.content_length or 0) > most:
        raise large
    return await read_at_most(request.content, most, large)
