"""Keeps one stream to a scheduler open, and carries questions and answers.

Rules
* Requests of one turn of the event loop travel in one message, with what has changed of the fleet.
* A scheduler counts as connected once it has welcomed us. Whenever the stream ends it is connected to again, after a
  pause that doubles from 50 ms up to 1 s, for as long as we live; nothing has to be restarted.
* What cannot be believed (malformed, another version, picks without a welcome) ends the stream.
"""

import asyncio
import contextlib
from collections.abc import Callable

from msgspec import Struct

from fairlead import __version__
from fairlead.fleet.fleet import Fleet
from fairlead.io.remote.address import ClientTls, authority, connect
from fairlead.io.remote.feed import StateFeed, asked
from fairlead.io.remote.h2_stream import GrpcStream
from fairlead.model.errors import ConfigError, ProtocolError
from fairlead.model.events import Event, RemoteDown, RemotePicked, RemoteUp
from fairlead.model.instructions import AskRemote
from fairlead.model.snapshot import Snapshot
from fairlead.wire.scheduler import PATH, VERSION, Answer, Ask, Batch, Hello, Welcome
from fairlead.wire.scheduler_answer import decode_answer
from fairlead.wire.scheduler_ask import encode_ask

#: Seconds between attempts to connect.
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
#: Seconds from the beginning of an attempt to the welcome.
WELCOME_WITHIN = 5.0
#: Batches that are remembered as undecided, at most.
_OPEN_BATCHES = 4096


class RemoteOptions(Struct, frozen=True, kw_only=True):
    """`budget` in seconds."""

    name: str
    address: str
    budget: float = 0.005
    pool: str = "default"
    tls: ClientTls | None = None


class _Open(Struct):
    #: Requests without an answer, and the clock seconds from which nobody waits for one.
    left: int
    until: float


class RemoteClient:
    """`start()`, then `await close()`. `feed` takes events; `told` hears what is worth a line in the log."""

    def __init__(
        self,
        options: RemoteOptions,
        fleet: Fleet,
        feed: Callable[[Event], None],
        told: Callable[[str, str], None] = lambda what, why: None,
    ) -> None:
        self.options = options
        #: Of the stream that is open; `None` while there is none.
        self.welcome: Welcome | None = None
        #: How often a welcome came.
        self.connections = 0
        self._fleet = fleet
        self._feed = feed
        self._told = told
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._stream: GrpcStream | None = None
        self._ended: asyncio.Future[str] | None = None
        self._state = StateFeed(fleet)
        self._waiting: list[AskRemote] = []
        self._batch = 0
        #: Batches of which something is undecided, oldest first.
        self._open: dict[int, _Open] = {}
        self._last_told = ""

    def start(self) -> None:
        """Connect, and keep connected."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"scheduler {self.options.name}")

    async def close(self) -> None:
        self._feed = lambda event: None  # whoever comes after us may have our name
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self._stream is not None:
            self._stream.end("closed")
            await asyncio.sleep(0)  # the socket closes in the loop's next turn

    def ask(self, instruction: AskRemote) -> None:
        """Carry out the instruction, together with the others of this turn of the loop."""
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append(instruction)

    def ask_as_of(self, instruction: AskRemote, fleet: Fleet, snapshot: Snapshot) -> bool:
        """Ask at once, about a moment that has passed: `fleet` and its numbers are as they were then. False = it cannot
        be asked, for it is not connected or endpoints have changed since."""
        if self.welcome is None or snapshot.floats.shape[1] != len(self._fleet.table):
            return False
        self._send([instruction], fleet, self._loop.time(), snapshot)
        return True

    # ---- the connection ----

    async def _run(self) -> None:
        pause = FIRST_PAUSE
        while True:
            began = self._loop.time()
            why = await self._once()
            if self._loop.time() - began > LONGEST_PAUSE:
                pause = FIRST_PAUSE
            if why != self._last_told:  # the same failure again and again is one line
                self._last_told = why
                self._told("the scheduler is not connected; the built-in policy decides", why)
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE)

    async def _once(self) -> str:
        """One connection from beginning to end; returns why it ended."""
        self._ended = ended = self._loop.create_future()
        address = self.options.address
        try:
            async with asyncio.timeout(WELCOME_WITHIN):
                await connect(address, self._make_stream, self.options.tls)
        except (OSError, ConfigError, TimeoutError) as error:
            return f"cannot connect to {address}: {error or 'timed out'}"
        deadline = self._loop.call_later(WELCOME_WITHIN, self._unwelcome)
        try:
            why: str = await ended
            return why
        finally:
            deadline.cancel()

    def _make_stream(self) -> GrpcStream:
        return GrpcStream(PATH, authority(self.options.address), self._opened, self._message, self._over)

    def _unwelcome(self) -> None:
        if self.welcome is None and self._stream is not None:
            self._stream.end(f"no welcome within {WELCOME_WITHIN:g} s")

    def _opened(self, stream: GrpcStream) -> None:
        self._stream = stream
        self._state = StateFeed(self._fleet)
        self._batch = 0
        self._open.clear()
        hello = Hello(
            version=VERSION,
            gateway=f"fairlead {__version__}",
            pool=self.options.pool,
            budget_us=round(self.options.budget * 1e6),
        )
        stream.send(encode_ask(Ask(hello=hello, state=self._state.changes(0))))

    def _over(self, why: str) -> None:
        was_welcome = self.welcome is not None
        self._stream = self.welcome = None
        self._waiting.clear()
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(why)
        if was_welcome:
            self._feed(RemoteDown(self.options.name))

    # ---- messages ----

    def _message(self, data: bytes) -> None:
        try:
            answer = decode_answer(data)
            if answer.welcome is not None:
                self._welcomed(answer.welcome)
            if answer.picks is not None:
                self._picked(answer)
        except ProtocolError as error:
            if self._stream is not None:
                self._stream.end(f"the scheduler broke the contract: {error}")

    def _welcomed(self, welcome: Welcome) -> None:
        if self.welcome is not None:
            raise ProtocolError("a second welcome")
        if welcome.version != VERSION:
            raise ProtocolError(f"it speaks version {welcome.version} of the contract, we speak {VERSION}")
        self.welcome = welcome
        self.connections += 1
        self._last_told = ""
        self._told("the scheduler is connected", f"{welcome.scheduler} {welcome.policy}".strip()[:200])
        self._feed(RemoteUp(self.options.name))

    def _picked(self, answer: Answer) -> None:
        picks = answer.picks
        assert picks is not None
        if self.welcome is None:
            raise ProtocolError("picks before the welcome")
        if not 0 < picks.batch <= self._batch:
            raise ProtocolError(f"picks of batch {picks.batch}, which was never sent")
        batch = self._open.get(picks.batch)
        if batch is not None:
            batch.left -= len(picks.picks)
        self._feed(RemotePicked(self.options.name, picks.picks))

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._send(waiting, self._fleet, self._loop.time())

    def _send(self, waiting: list[AskRemote], fleet: Fleet, now: float, snapshot: Snapshot | None = None) -> None:
        if self._stream is None:
            return
        forecasts = self.welcome is not None and self.welcome.wants_forecasts
        # Room is kept for these very requests: told of it, a scheduler would send them anywhere but there.
        with self._fleet.ledger.without_reserved():
            state = self._state.changes(self._settled(now), snapshot)
            requests = [asked(one, fleet, now, forecasts) for one in waiting]
        self._batch += 1
        self._open[self._batch] = _Open(len(waiting), now + 2 * self.options.budget)
        self._stream.send(encode_ask(Ask(state=state, batch=Batch(number=self._batch, now=now, requests=requests))))

    def _settled(self, now: float) -> int:
        """The last batch of which, and of all before it, everything is decided."""
        for number, batch in list(self._open.items()):
            if batch.left > 0 and batch.until > now and len(self._open) <= _OPEN_BATCHES:
                return number - 1
            del self._open[number]
        return self._batch
