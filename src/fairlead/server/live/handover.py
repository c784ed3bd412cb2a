"""What the leader learned, for the replica that leads next.

Rules
* A leader serves its state files on a page of its admin port. Its lease has the page's URL, which contains a random
  key, so only those who may read the lease find the page: the files have hashes of prompts.
* Standbys read the page about every `state.interval`. So a leader that dies takes with it what it learned in the last
  two intervals.
* A leader that stops writes its files before it gives the lease back. The next one reads the page once more, while the
  last one still answers.
* Nothing waits for this. A new leader answers at once, by what it knows.
* A leader that loses its lease and gets it back has the newest knowledge, unless another one led meanwhile. That one
  serves its files only once it has taken over, because what it knew as a standby is old.
"""

import asyncio
import secrets
from collections.abc import Callable, Mapping

import aiohttp
from aiohttp import web

from fairlead.config.checks import is_loopback
from fairlead.config.schema import Admin
from fairlead.core.endpoint import host_port
from fairlead.pool.aio import read_at_most, set_within
from fairlead.pool.kube.elector import Elector
from fairlead.server.http_port import send_file
from fairlead.server.observe.log import get
from fairlead.server.state import StateFile

log = get("state")

#: Seconds that a leader, which may be gone or hang, may be silent, and for a whole file.
SILENT_S, READ_S = 1.0, 20.0
#: Reading may take this share of the time.
_BUSY = 0.1
#: Seconds that a leader waits for its files to be written.
WRITE_S = 3.0


def reachable(admin: Admin, address: str) -> str:
    """The URL at which other pods, which know no certificate of ours, reach the admin port of this one at `address`;
    empty = they do not."""
    host, port = admin.host, admin.port
    if admin.metrics_port:
        host, port = admin.metrics_host or host, admin.metrics_port
    usable = address and port and not admin.tls and not is_loopback(host)
    return f"http://{host_port(address, port)}" if usable else ""


class Handover:
    """`states()`: the state files of this replica's pools by name, "" of its only one. `await run(elector)` never
    returns; call `changed` when this replica begins or ceases to lead."""

    def __init__(self, states: Callable[[], Mapping[str, StateFile]], url: str) -> None:
        self.path = f"/learned/{secrets.token_urlsafe(24)}"
        #: The URL of this replica's page.
        self.page = url + self.path
        self._states = states
        self._woken = asyncio.Event()
        #: This replica has taken over, and has not begun to lead anew since: its files say what the last leader knew.
        self._tells = False
        #: The files of the last leader by pool, as last read, and its page.
        self._read: dict[str, bytes] = {}
        self._read_at = ""

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """The page: the file of the pool `?pool=`."""
        state = self._states().get(request.query.get("pool", ""))
        if state is None or not self._tells or not state.path.exists():
            raise web.HTTPNotFound
        return await send_file(request, state.path, READ_S)

    def changed(self, leading: bool) -> None:
        if leading:  # another one may have led since this one did
            self._tells = False
        self._woken.set()

    async def run(self, elector: Elector) -> None:
        async with aiohttp.ClientSession() as session:
            pause_s, taken_over = 0.0, ""
            while True:
                await set_within(self._woken, pause_s)
                self._woken.clear()
                began, leads, former = asyncio.get_running_loop().time(), elector.leading, elector.former
                if not (leads and self._tells) and former.acquired != taken_over:
                    await self._look(session, former.page)
                if leads and not self._tells:  # one that began to lead meanwhile reads once more
                    await self._inherit()
                    await self.prepare()
                    taken_over = former.acquired
                    self._tells = taken_over == elector.former.acquired  # else another one has led meanwhile
                took_s = asyncio.get_running_loop().time() - began
                intervals = [state.settings.interval for state in self._states().values()]
                pause_s = max(*intervals, 1.0, took_s / _BUSY) if intervals else 1.0

    async def _look(self, session: aiohttp.ClientSession, page: str) -> None:
        """Read the files of the leader. What cannot be read stays as last read."""
        if page != self._read_at:
            self._read.clear()
            self._read_at = page
        for name, state in self._states().items() if page else ():
            try:
                timeout = aiohttp.ClientTimeout(READ_S, sock_connect=SILENT_S, sock_read=SILENT_S)
                async with session.get(page, params={"pool": name}, timeout=timeout, allow_redirects=False) as answer:
                    if answer.status == 200:
                        too_large = ValueError("no state file is so large")
                        self._read[name] = await read_at_most(answer.content, state.settings.max_bytes, too_large)
            except (OSError, aiohttp.ClientError, TimeoutError, ValueError) as error:
                log.debug("cannot read what the leader learned", page=page.rpartition("/")[0], reason=str(error))
                if not isinstance(error, ValueError):
                    return  # it is gone or hangs, and each pool's file would take as long

    async def _inherit(self) -> None:
        for name, state in self._states().items():
            if name in self._read:
                await state.inherit(self._read[name], self._read_at.rpartition("/")[0])
        self._read.clear()

    async def prepare(self) -> None:
        """Write the files for the next leader."""
        writing = [asyncio.create_task(state.write()) for state in self._states().values()]
        if writing:
            await asyncio.wait(writing, timeout=WRITE_S)
