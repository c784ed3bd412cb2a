"""The dashboard: one static page, the stream of server-sent events that feeds it, and answers to its queries.

Rules
* Each tick, one snapshot is made for all viewers and encoded once. Without viewers there is no tick. If snapshots take
  long to make, there are fewer.
* A viewer that reads slowly misses snapshots, but never gets old ones: little is buffered for it. A viewer that reads
  nothing for `PATIENCE` seconds is disconnected.
* There are at most `viewers` viewers at a time; further ones get 503 and the reason.
* The page loads nothing from other hosts and runs no inline script: its content security policy allows only its own
  files. The dashboard only reads; it cannot change anything.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from hashlib import blake2s
from importlib.resources import files
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Struct, field

from fairlead.server.http_port import OnError, reported
from fairlead.server.journal.records import writable
from fairlead.server.observe.snapshot import SnapshotMaker

VIEWERS = 16
#: Seconds that one write to a viewer may take, and the most bytes in one: the first frame alone may be 200 kB.
PATIENCE, _PIECE = 10.0, 65_536
#: Bytes that the kernel may hold for a viewer. By default it holds megabytes, which on a slow link are minutes.
_BUFFER = 65_536
#: Making snapshots may take this share of the process's time. Two are at most `SLOWEST` seconds apart: viewers see each
#: second.
SHARE, SLOWEST = 0.003, 0.8

PREFIX = "/dashboard/"
STREAM, SNAPSHOT = PREFIX + "stream", PREFIX + "snapshot"
PAGE = "index.html"
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SECURE = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_STREAM_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Accel-Buffering": "no",
}
_GONE = "There is nothing of that name (any more). The dashboard and /debug/endpoints show what is there.\n"
_TOO_MANY = "{} viewers are connected; close one and try again\n"


class _Viewer(Struct, eq=False):
    """Holds the newest frame that was not sent to this viewer yet; `None` = there is none."""

    frame: bytes | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    closed: bool = False

    def offer(self, frame: bytes) -> None:
        self.frame = frame
        self.wake.set()

    def close(self) -> None:
        self.closed = True
        self.wake.set()


class Dashboard:
    """Call `add_to(app)` before the application starts. The dashboard ends with the application."""

    def __init__(
        self,
        sources: SnapshotMaker,
        *,
        viewers: int = VIEWERS,
        patience: float = PATIENCE,
        on_error: OnError = lambda path, error: None,
        allows: Callable[[web.Request], bool] = lambda request: True,
    ) -> None:
        """`allows`: whether a viewer may still look."""
        self._sources = sources
        self._most = viewers
        self._patience = patience
        self._on_error, self._allows = on_error, allows
        self._viewers: set[_Viewer] = set()
        self._ticking: asyncio.Task[None] | None = None
        self._files = _read_files()
        #: Changes with the page's files. A page is out of date if this is no longer what it was.
        self._tag = _tag(b"".join(tag.encode() for _, (_, tag) in sorted(self._files.items())))
        self._shot: tuple[float, bytes] | None = None
        self._closed = False
        #: How many viewers were dropped because they read nothing.
        self.dropped = 0

    def add_to(self, app: web.Application) -> None:
        app.router.add_get(STREAM, self._stream, allow_head=False)
        app.router.add_get(SNAPSHOT, reported(self._snapshot, self._on_error))
        app.router.add_get(PREFIX + "{name}", reported(self._file, self._on_error))
        app.on_shutdown.append(self._shut)

    def __len__(self) -> int:
        """The number of viewers."""
        return len(self._viewers)

    async def _shut(self, app: web.Application) -> None:
        self._closed = True
        for viewer in self._viewers:
            viewer.close()
        if self._ticking is not None:
            self._ticking.cancel()

    # ---- files ----

    def page(self, request: web.Request) -> web.Response:
        return self._send(request, PAGE)

    async def _file(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name in self._sources.answers:
            return self._answer(request, name)
        if name not in self._files or name == PAGE:  # its addresses are relative to `/`
            raise web.HTTPNotFound(text=f"there is no {name[:80]!r} here\n")
        return self._send(request, name)

    def _send(self, request: web.Request, name: str) -> web.Response:
        body, tag = self._files[name]
        headers = {**_SECURE, "ETag": tag, "Vary": "Accept"}
        if tag in request.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers=headers)
        kind = _TYPES.get(name.rpartition(".")[2], "text/plain")
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=headers)

    def _answer(self, request: web.Request, name: str) -> web.Response:
        try:
            answer = self._sources.answers[name](dict(request.query))
        except msgspec.ValidationError as error:
            return web.Response(status=400, text=f"{error}\n")
        if answer is None:
            return web.Response(status=404, text=_GONE)
        return web.Response(body=encode(answer), content_type="application/json", headers={"Cache-Control": "no-store"})

    # ---- one snapshot ----

    async def _snapshot(self, request: web.Request) -> web.Response:
        """Answer with one snapshot as JSON. At most one per tick is made, however often clients ask."""
        now = asyncio.get_running_loop().time()
        if self._shot is None or now - self._shot[0] >= self._sources.tick:
            self._shot = now, self._take_once()
        return web.Response(body=self._shot[1], content_type="application/json", headers={"Cache-Control": "no-store"})

    def _take_once(self) -> bytes:
        sources = self._sources
        alone = not self._viewers
        if alone:
            sources.begin()
        try:
            return encode({"about": sources.beginning(), "now": sources.take()})
        finally:
            if alone:
                sources.end()

    # ---- the stream ----

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        if self._closed or len(self._viewers) >= self._most:
            text = _TOO_MANY.format(self._most)
            return web.Response(status=503, text=text, headers={"Retry-After": "10"})
        viewer = _Viewer()
        if not self._viewers:
            self._sources.begin()
            self._ticking = asyncio.create_task(self._tick())
        self._viewers.add(viewer)
        try:
            response = web.StreamResponse(headers=_STREAM_HEADERS)
            await response.prepare(request)
            if request.transport is not None:
                request.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
            start = b"retry: 1000\nid: %b\n" % self._tag.encode()
            await self._write(response, start + frame("beginning", self._sources.beginning()))
            viewer.offer(frame("now", self._sources.take()))
            while await viewer.wake.wait() and not viewer.closed:
                viewer.wake.clear()
                newest, viewer.frame = viewer.frame, None
                if not self._allows(request):  # its token was revoked
                    break
                if newest is not None:
                    await self._write(response, newest)
        except TimeoutError:
            self.dropped += 1
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            pass  # the viewer left
        except Exception as error:
            self._on_error(STREAM, error)
        finally:
            self._leave(viewer)
        return response

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        for start in range(0, len(data), _PIECE):
            async with asyncio.timeout(self._patience):
                await response.write(data[start : start + _PIECE])

    def _leave(self, viewer: _Viewer) -> None:
        self._viewers.discard(viewer)
        if not self._viewers and self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None
            with contextlib.suppress(Exception):
                self._sources.end()

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + self._sources.tick, loop.time())
            await asyncio.sleep(due - loop.time())
            began = time.thread_time()
            try:
                made = frame("now", self._sources.take())
            except Exception as error:
                made = b"event: broken\ndata: {}\n\n"
                self._on_error(STREAM, error)
            # If this snapshot took long, extend the pause so that snapshots take no more than `SHARE` of the time.
            due += max(min((time.thread_time() - began) / SHARE, SLOWEST) - self._sources.tick, 0.0)
            for viewer in self._viewers:
                viewer.offer(made)


def frame(event: str, value: Any) -> bytes:
    """One server-sent event, with `value` as JSON."""
    return b"event: %b\ndata: %b\n\n" % (event.encode(), encode(value))


def encode(value: Any) -> bytes:
    """JSON in one line. Numbers that are not finite become null. Half of a surrogate pair (in a model name) becomes
    `?`."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(writable(msgspec.to_builtins(value), "replace"))


def _read_files() -> dict[str, tuple[bytes, str]]:
    """The page's files by name: content and entity tag."""
    by_name = {}
    for path in files("fairlead.server.pages").iterdir():
        if path.name.rpartition(".")[2] in (*_TYPES, "txt", "md"):
            body = path.read_bytes()
            by_name[path.name] = body, f'"{_tag(body)}"'
    return by_name


def _tag(content: bytes) -> str:
    return blake2s(content, digest_size=12).hexdigest()
