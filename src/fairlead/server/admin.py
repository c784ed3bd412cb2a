"""The admin port: health, metrics and debug pages. Bound to 127.0.0.1 unless told otherwise, apart from all traffic.

Rules
* Everything shown comes from callables, asked at the moment of the request; this file knows nothing of the scheduler.
* A provider that raises costs its own page (500), never the process.
* Long expositions are made piece by piece with the loop running in between.
* Debug pages and the dashboard tell addresses, labels and model names. They can be switched off; health and metrics
  cannot.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Struct

from fairlead.gateway.accept import OPENMETRICS_TYPE, TEXT_TYPE, wants_openmetrics
from fairlead.server.dashboard import Dashboard, DashboardSources
from fairlead.server.http_port import HttpPort

#: Most decisions that one request may ask for.
MAX_DECISIONS = 200
_DEFAULT_DECISIONS = 20

_PAGES = {
    "/healthz": "200 while the process is alive",
    "/readyz": "200 when requests can be served, else 503 and why not",
    "/metrics": "Prometheus text",
}
_DASHBOARD = {
    "/": "the dashboard, for browsers",
    "/dashboard/snapshot": "what it shows, at this moment (JSON)",
    "/dashboard/stream": "the same twice a second (server-sent events)",
}
_DEBUG_PAGES = {
    "/debug/endpoints": "all endpoints and what is known of them (JSON)",
    "/debug/knowledge": "tokenisers, whether engines agree, how far KV events are relied on (JSON)",
    "/debug/decisions/id": "one decision in full: terms in milliseconds, and what it would have taken (JSON)",
    "/debug/decisions?last=n": f"the last n decisions with their scores, at most {MAX_DECISIONS} (JSON)",
}

Handler = Callable[[web.Request], Any]


class AdminSources(Struct, frozen=True, kw_only=True):
    """Where the pages come from."""

    #: Pieces of the exposition.
    metrics: Callable[[], Iterable[bytes]]
    #: Awaited before either is asked for; `None` = all is there.
    refresh: Callable[[], Awaitable[None]] | None = None
    #: The same as OpenMetrics, for clients that ask for it; `None` = there is none.
    openmetrics: Callable[[], Iterable[bytes]] | None = None
    #: Why we are not ready; empty = ready.
    unready: Callable[[], Sequence[str]]
    #: Anything msgspec can encode, such as a list of `EndpointStatus`.
    endpoints: Callable[[], Any]
    #: The newest n decisions as plain values.
    decisions: Callable[[int], Sequence[Any]]
    #: What is wrong although requests can be served.
    notes: Callable[[], Sequence[str]] = list
    #: One of them in full, by one of its names; `None` = it is not, or no longer, there.
    decision: Callable[[str], Any] = lambda name: None
    #: What is known of prompts: tokenisers, KV events; `None` = nothing beyond their bytes.
    knowledge: Callable[[], Any] = lambda: None
    #: What the dashboard at `/` shows; `None` = there is none, and a list of pages in its place.
    dashboard: DashboardSources | None = None


class Admin(HttpPort):
    """`await start()`, then `port`; `await close()`. Raises `OSError` when the port is taken."""

    def __init__(
        self,
        sources: AdminSources,
        *,
        host: str = "127.0.0.1",
        port: int = 9090,
        debug: bool = True,
        on_error: Callable[[str, Exception], object] | None = None,
    ) -> None:
        super().__init__(host, port, grace_s=1.0)
        self._sources = sources
        self._debug = debug
        self._on_error = on_error
        self._dashboard: Dashboard | None = None
        if debug and sources.dashboard is not None:
            self._dashboard = Dashboard(sources.dashboard, on_error=on_error)

    def make_app(self) -> web.Application:
        app = web.Application(client_max_size=1024)
        if self._dashboard is not None:
            self._dashboard.add_to(app)
        self._add(app, "/", self._index)
        self._add(app, "/healthz", self._healthz)
        self._add(app, "/readyz", self._readyz)
        self._add(app, "/metrics", self._metrics)
        if self._debug:
            self._add(app, "/debug/endpoints", self._endpoints)
            self._add(app, "/debug/knowledge", self._knowledge)
            self._add(app, "/debug/decisions", self._decisions)
            self._add(app, "/debug/decisions/{name}", self._decision)
        return app

    def _add(self, app: web.Application, path: str, handler: Handler) -> None:
        async def guarded(request: web.Request) -> web.StreamResponse:
            try:
                response: web.StreamResponse = await handler(request)
            except (web.HTTPException, asyncio.CancelledError):
                raise
            except Exception as error:
                if self._on_error is not None:
                    self._on_error(path, error)
                return web.Response(status=500, text=f"{path} failed: {type(error).__name__}\n")
            return response

        app.router.add_get(path, guarded)

    async def _index(self, request: web.Request) -> web.Response:
        """For browsers the dashboard, for others a list of what there is."""
        if self._dashboard is not None and "text/html" in request.headers.get("Accept", ""):
            return self._dashboard.page(request)
        pages = _PAGES | (_DEBUG_PAGES if self._debug else {}) | (_DASHBOARD if self._dashboard is not None else {})
        return web.Response(text="fairlead\n\n" + "".join(f"{path:<26}{text}\n" for path, text in pages.items()))

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        reasons = self._sources.unready()
        if reasons:
            return web.Response(status=503, text="not ready\n" + "".join(f"- {reason}\n" for reason in reasons))
        return web.Response(text="ready\n" + "".join(f"- {note}\n" for note in self._sources.notes()))

    async def _metrics(self, request: web.Request) -> web.Response:
        source, kind = self._sources.metrics, TEXT_TYPE
        if self._sources.openmetrics and wants_openmetrics(",".join(request.headers.getall("Accept", ()))):
            source, kind = self._sources.openmetrics, OPENMETRICS_TYPE
        if self._sources.refresh is not None:
            await self._sources.refresh()
        parts = []
        for part in source():
            parts.append(part)
            await asyncio.sleep(0)
        return web.Response(body=b"".join(parts), headers={"Content-Type": kind, "Vary": "Accept"})

    async def _endpoints(self, request: web.Request) -> web.Response:
        return _json({"endpoints": self._sources.endpoints()})

    async def _knowledge(self, request: web.Request) -> web.Response:
        return _json(self._sources.knowledge())

    async def _decisions(self, request: web.Request) -> web.Response:
        unknown = set(request.query) - {"last"}
        if unknown:
            raise web.HTTPBadRequest(text=f"unknown parameter {sorted(unknown)[0]!r}, expected: last\n")
        text = request.query.get("last", str(_DEFAULT_DECISIONS))
        if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0):
            raise web.HTTPBadRequest(text=f"last={text[:40]!r} is no positive number\n")
        return _json({"decisions": self._sources.decisions(min(int(text), MAX_DECISIONS))})

    async def _decision(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        decision = self._sources.decision(name)
        if decision is None:
            text = f"no decision {name[:80]!r} among the last ones; `fairlead explain` searches a journal on disk\n"
            raise web.HTTPNotFound(text=text)
        return _json(decision)


def _json(value: Any) -> web.Response:
    try:
        body = msgspec.json.encode(value)
    except UnicodeEncodeError:  # half a surrogate pair, in a model name for example
        body = json.dumps(msgspec.to_builtins(value)).encode()
    return web.Response(body=body + b"\n", content_type="application/json")
