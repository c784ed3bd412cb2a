"""The admin port: health, metrics and debug pages. Bound to 127.0.0.1 by default, separate from all traffic.

Rules
* All content comes from callables that are called per request; this file knows nothing about the scheduler.
* If a callable raises, its page answers 500; the process and all other pages continue.
* Pages are made piece by piece, and long ones take no more than a fifth of the loop's time (`_paced`).
* All clients that ask for metrics at the same time get the same page, made once. Debug pages are made one at a time; a
  client that finds `MOST_AT_ONCE` others waiting gets 503. So does one that finds as many others reading segments of
  the journal, which may take minutes: they are counted apart.
* A client that takes longer than `SEND_S` seconds to read a page is disconnected: pages being sent hold memory.
* Debug pages and the dashboard show addresses, labels and model names. They can be switched off; health and metrics
  cannot. Health and metrics can have a port of their own for the network, while the admin port stays on loopback.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from msgspec import Struct, field

from fairlead.core.errors import ADMIN_PORT
from fairlead.gateway.tls import ServerTls
from fairlead.server import openapi
from fairlead.server.dashboard import Dashboard
from fairlead.server.http_port import Access, HttpPort, OnError, Tokens, healthz, readiness, reported, send, send_file
from fairlead.server.observe.exposition import OPENMETRICS_TYPE, TEXT_TYPE, wants_openmetrics
from fairlead.server.observe.snapshot import SnapshotMaker

#: The most decisions that one request gets.
MAX_DECISIONS = 200
_DEFAULT_DECISIONS = 20

#: How many debug pages may be requested at the same time.
MOST_AT_ONCE = 8
#: How many seconds a client may take to read a page.
SEND_S = 10.0
#: While this many bytes of metrics pages are being sent, no new page is made.
MOST_SENT = 32 << 20
#: Seconds of work on a page before a pause, and how many times longer than the work the pause is.
_TURN_S, _PAUSE = 0.002, 4.0
_PROBES = ("/healthz", "/readyz")

_PAGES = {
    "/healthz": "200 while the process is alive",
    "/readyz": "200 when requests can be served, else 503 and why not",
    "/metrics": "Prometheus text",
    openapi.PATH: "these pages as an OpenAPI document",
}
_DASHBOARD = {
    "/": "the dashboard, for browsers",
    "/dashboard/snapshot": "what it shows, at this moment (JSON)",
    "/dashboard/stream": "the same twice a second (server-sent events)",
    "/dashboard/decisions?model=m": "the last decisions by id, model, tenant, endpoint or outcome (JSON)",
    "/dashboard/endpoint?id=e": "the last hour of one endpoint (JSON)",
    "/dashboard/model?name=m": "the last hour of one model (JSON)",
    "/dashboard/runbook.md": "what to do about what it says",
}
_DEBUG_PAGES = {
    "/debug/endpoints": "all endpoints and what is known of them (JSON)",
    "/debug/replicas": "the link to other schedulers of the pool, and its counts (JSON)",
    "/debug/knowledge": "tokenisers, whether engines agree, how far KV events are relied on (JSON)",
    "/debug/decisions/{name}": "one decision in full: terms in milliseconds, and what it would have taken (JSON)",
    "/debug/decisions?last=n": f"the last n decisions with their scores, at most {MAX_DECISIONS} (JSON)",
    "/debug/journal": "the segments of the decision journal, oldest first: name and bytes (JSON)",
    "/debug/journal/{name}": "one of them",
}


class AdminSources(Struct, frozen=True, kw_only=True):
    """Callables that return the content of the pages."""

    #: The pieces of the metrics page (Prometheus text).
    metrics: Callable[[], Iterable[bytes]]
    #: Awaited before a metrics page is made; `None` = there is nothing to wait for.
    refresh: Callable[[], Awaitable[None]] | None = None
    #: The metrics page as OpenMetrics, for clients that ask for it; `None` = there is none.
    openmetrics: Callable[[], Iterable[bytes]] | None = None
    #: Why the scheduler is not ready; empty = ready.
    unready: Callable[[], Sequence[str]]
    #: The endpoints, as anything that msgspec can encode, such as a list of `EndpointStatus`.
    endpoints: Callable[[], Any]
    #: The newest n decisions as plain values, made one by one.
    decisions: Callable[[int], Iterable[Any]]
    #: Problems that do not keep the scheduler from serving requests.
    notes: Callable[[], Iterable[str]] = tuple
    #: One decision in full, by one of its names; `None` = it is unknown or no longer kept.
    decision: Callable[[str], Any] = lambda name: None
    #: What is known about prompts from tokenisers and KV events; `None` = neither is configured.
    knowledge: Callable[[], Any] = lambda: None
    #: The segments of the journal, oldest first; `None` = none is kept.
    journal: Callable[[], Sequence[Path] | None] = lambda: None
    #: The page of the link to other replicas; `None` = facts are not shared.
    replicas: Callable[[], Any] = lambda: None
    #: What the dashboard at `/` shows; `None` = there is no dashboard, and `/` lists the pages.
    dashboard: SnapshotMaker | None = None


async def _paced(pieces: Iterable[bytes]) -> list[bytes]:
    """Make all pieces, with pauses for other work: after more than `_TURN_S` of work a pause `_PAUSE` times as long,
    after less only one turn of the event loop."""
    made: list[bytes] = []
    worked, started = 0.0, perf_counter()
    for piece in pieces:
        made.append(piece)
        worked += perf_counter() - started
        if worked > _TURN_S:
            await asyncio.sleep(worked * _PAUSE)
            worked = 0.0
        else:
            await asyncio.sleep(0)
        started = perf_counter()
    return made


class _Page(Struct, eq=False):
    """A metrics page, and how many clients are reading it."""

    parts: list[bytes]
    size: int
    readers: int = 0


@web.middleware
async def _elsewhere(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer requests for unknown pages with a hint: most are model requests, or look for the dashboard."""
    if isinstance(request.match_info.http_exception, web.HTTPNotFound):
        where = "Its pages begin at /. Send model requests to the gateway (gateway.port, default 8080)"
        return web.Response(status=404, text=f"{ADMIN_PORT}: it has no {request.path}. {where}\n")
    return await handler(request)


class SharedPage(Struct, eq=False):
    """A page that is made once for all clients that asked before its making began, so that no client gets an old one.

    While pages that are still being sent hold `MOST_SENT` bytes, the last one is served again. It is no older than
    `SEND_S` seconds, because its readers are disconnected by then.
    """

    _pieces: Callable[[], Iterable[bytes]]
    _refresh: Callable[[], Awaitable[None]] | None
    _next: asyncio.Task[_Page] | None = None
    _making: asyncio.Lock = field(default_factory=asyncio.Lock)
    _sent: list[_Page] = []

    @asynccontextmanager
    async def read(self) -> AsyncIterator[list[bytes]]:
        """A context with the pieces of a new page. The page counts as being read while the context lasts."""
        page = await self._newest()
        page.readers += 1
        try:
            yield page.parts
        finally:
            page.readers -= 1

    async def _newest(self) -> _Page:
        self._sent = [page for page in self._sent if page.readers]
        if sum(page.size for page in self._sent) >= MOST_SENT:
            return self._sent[-1]
        if self._next is None:
            self._next = asyncio.create_task(self._make())
        return await asyncio.shield(self._next)

    async def _make(self) -> _Page:
        async with self._making:
            self._next = None
            if self._refresh is not None:
                await self._refresh()
            parts = await _paced(self._pieces())
        page = _Page(parts, sum(map(len, parts)))
        self._sent.append(page)
        return page


class _Bound:
    """Lets `MOST_AT_ONCE` clients in at the same time."""

    def __init__(self) -> None:
        self._clients = 0

    def limited(self, handler: Handler) -> Handler:
        async def answer(request: web.Request) -> web.StreamResponse:
            if self._clients >= MOST_AT_ONCE:
                text = f"{MOST_AT_ONCE} other clients wait for debug pages; try again\n"
                return web.Response(status=503, text=text, headers={"Retry-After": "1"})
            self._clients += 1
            try:
                return await handler(request)
            finally:
                self._clients -= 1

        return answer


class Admin(HttpPort):
    """The admin port. Call `await start()`, then read `port`; `await close()` at the end. `start` raises `OSError` if
    a port is taken."""

    def __init__(
        self,
        sources: AdminSources,
        *,
        host: str = "127.0.0.1",
        port: int = 9090,
        debug: bool = True,
        access: Access | None = None,
        tls: ServerTls | None = None,
        metrics: tuple[str, int] | None = None,
        on_error: OnError = lambda path, error: None,
        pools: Callable[[], Mapping[str, AdminSources]] | None = None,
        secret: tuple[str, Handler] | None = None,
    ) -> None:
        """`metrics`: host and port of a second port for health and metrics only; `None` = no second port. `pools`
        returns the sources of each pool's debug pages by name (`?pool=`); `None` = all pages come from `sources`.
        `secret`: a path that nobody can guess, and the handler of its page, which needs no token."""
        super().__init__(host, port, 1.0, tls)
        self._sources, self._pools = sources, pools
        self._debug = debug
        self._access = access or Access(free=_PROBES)
        self._secret = secret
        self._on_error = on_error
        self._dashboard: Dashboard | None = None
        if debug and sources.dashboard is not None:
            self._dashboard = Dashboard(sources.dashboard, on_error=on_error, allows=self._allows)
        self._text = SharedPage(sources.metrics, sources.refresh)
        self._openmetrics = SharedPage(sources.openmetrics, sources.refresh) if sources.openmetrics else None
        self._pages_asked, self._segments_read = _Bound(), _Bound()
        self._making = asyncio.Lock()
        self._public = None if metrics is None else HttpPort(*metrics, 1.0, tls, self._public_app)

    async def start(self) -> None:
        await super().start()
        if self._public is not None:
            try:
                await self._public.start()
            except BaseException:
                await super().close()
                raise

    async def close(self) -> None:
        if self._public is not None:
            await self._public.close()
        await super().close()

    @property
    def metrics_port(self) -> int:
        """The port of the metrics page, once started."""
        return self.port if self._public is None else self._public.port

    def _public_app(self) -> web.Application:
        app = web.Application(client_max_size=1024, middlewares=[self._access.guard])
        self._add(app, "/healthz", healthz)
        self._add(app, "/readyz", self._readyz)
        self._add(app, "/metrics", self._metrics)
        if self._secret is not None:
            path, handler = self._secret
            app.router.add_get(path, reported(handler, self._on_error, "the secret page"))
        return app

    def make_app(self) -> web.Application:
        app = self._public_app()
        if self._dashboard is not None:
            self._dashboard.add_to(app)
        self._add(app, "/", self._index)
        self._add(app, openapi.PATH, self._heavy(lambda request: _one_piece(openapi.document(self._pages()))))
        if self._debug:
            endpoints = self._heavy(lambda request: _one_piece({"endpoints": self._of(request).endpoints()}))
            self._add(app, "/debug/endpoints", endpoints)
            self._add(app, "/debug/knowledge", self._heavy(lambda request: _one_piece(self._of(request).knowledge())))
            self._add(app, "/debug/replicas", self._heavy(lambda request: _one_piece(self._of(request).replicas())))
            self._add(app, "/debug/decisions", self._heavy(self._decisions))
            self._add(app, "/debug/decisions/{name}", self._heavy(self._decision))
            self._add(app, "/debug/journal", self._heavy(self._journal))
            self._add(app, "/debug/journal/{name}", self._segments_read.limited(self._segment))
        app.middlewares.append(_elsewhere)
        return app

    def _add(self, app: web.Application, path: str, handler: Handler) -> None:
        app.router.add_get(path, reported(handler, self._on_error, path))

    def _heavy(self, pieces: Callable[[web.Request], Iterable[bytes]]) -> Handler:
        """Return a handler for a JSON page. Only one such page is made at a time."""

        async def answer(request: web.Request) -> web.StreamResponse:
            async with self._making:
                parts = await _paced(pieces(request))
            return await send(request, list(parts), {"Content-Type": "application/json"}, whole_s=SEND_S)

        return self._pages_asked.limited(answer)

    async def _index(self, request: web.Request) -> web.Response:
        """The page `/`: the dashboard for browsers, a list of the pages for other clients."""
        if self._dashboard is not None and "text/html" in request.headers.get("Accept", ""):
            return self._dashboard.page(request)
        return web.Response(
            text="fairlead\n\n" + "".join(f"{path:<30}{text}\n" for path, text in self._pages().items())
        )

    def _pages(self) -> dict[str, str]:
        return _PAGES | (_DEBUG_PAGES if self._debug else {}) | (_DASHBOARD if self._dashboard is not None else {})

    def _allows(self, request: web.Request) -> bool:
        return self._access.refusal(request) is None

    async def _readyz(self, request: web.Request) -> web.Response:
        reasons = self._sources.unready()
        return readiness(reasons, () if reasons else self._sources.notes())

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        page, kind = self._text, TEXT_TYPE
        if self._openmetrics is not None and wants_openmetrics(",".join(request.headers.getall("Accept", ()))):
            page, kind = self._openmetrics, OPENMETRICS_TYPE
        async with page.read() as parts:
            return await send(request, list(parts), {"Content-Type": kind, "Vary": "Accept"}, whole_s=SEND_S)

    def _of(self, request: web.Request) -> AdminSources:
        """The sources of pages about the requested pool. Raises 404 for an unknown pool."""
        if self._pools is None:
            return self._sources
        pools, name = self._pools(), request.query.get("pool", "")
        if name in pools:
            return pools[name]
        there = ", ".join(sorted(pools)) or "none yet"
        raise web.HTTPNotFound(text=f"no pool {name[:200]!r}: add ?pool=NAMESPACE/NAME; there are: {there}\n")

    def _decisions(self, request: web.Request) -> Iterable[bytes]:
        unknown = set(request.query) - {"last", "pool"}
        if unknown:
            raise web.HTTPBadRequest(text=f"unknown parameter {sorted(unknown)[0]!r}, expected: last\n")
        sources = self._of(request)
        text = request.query.get("last", str(_DEFAULT_DECISIONS))
        if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0):
            raise web.HTTPBadRequest(text=f"last={text[:40]!r} is no positive number\n")
        before = b'{"decisions":['
        for decision in sources.decisions(min(int(text), MAX_DECISIONS)):
            yield before + _json(decision)
            before = b","
        yield b"]}\n" if before == b"," else before + b"]}\n"

    def _decision(self, request: web.Request) -> Iterable[bytes]:
        name = request.match_info["name"]
        decision = self._of(request).decision(name)
        if decision is None:
            text = f"no decision {name[:80]!r} among the last ones of this scheduler; other workers and replicas have "
            text += "their own at their ports, and `fairlead explain ID JOURNAL` searches a journal on disk\n"
            raise web.HTTPNotFound(text=text)
        return _one_piece(decision)

    def _segments(self, request: web.Request) -> Sequence[Path]:
        there = self._of(request).journal()
        if there is None:
            raise web.HTTPNotFound(text="no journal is kept here; set journal.path and let it serve for a while\n")
        return there

    def _journal(self, request: web.Request) -> Iterable[bytes]:
        return _one_piece({"segments": [(path.name, path.stat().st_size) for path in self._segments(request)]})

    async def _segment(self, request: web.Request) -> web.StreamResponse:
        """Send a segment of the journal."""
        for path in self._segments(request):
            if path.name == request.match_info["name"] and path.exists():
                return await send_file(request, path, SEND_S)
        raise web.HTTPNotFound(text="there is no such segment of the journal (any more)\n")


def _json(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # half a surrogate pair, in a model name for example
        return json.dumps(msgspec.to_builtins(value)).encode()


def _one_piece(value: Any) -> tuple[bytes]:
    """The JSON of a page, as one piece."""
    return (_json(value) + b"\n",)


def admin_access(hosts: Iterable[str], token_file: str, required: bool = True, free: Iterable[str] = ()) -> Access:
    """The access control of an admin port. `token_file`: empty = no token is needed. If the file cannot be used, raise
    `ConfigError` if it is `required`; else nobody gets in until it can be. `free`: more paths without checks."""
    return Access(hosts, Tokens(token_file, required) if token_file else None, free={*_PROBES, *free})
