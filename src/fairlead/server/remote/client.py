"""Keeps one stream to a scheduler open: sends the state of the fleet and questions, receives answers.

Rules
* Requests of one turn of the event loop are sent in one message, together with the changes of the fleet.
* A scheduler counts as connected once it has sent its welcome. Whenever the stream ends, the client connects again
  after a pause that doubles from 50 ms up to 1 s, until `close`.
* Invalid answers (malformed, another version, picks before the welcome) end the stream.
* How requests ended is sent to a scheduler that asked for it. It is left out and counted while the scheduler is slow.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct, field
from msgspec.structs import asdict
from numpy.typing import NDArray

from fairlead import __version__
from fairlead.config.schema import SchedulerSettings
from fairlead.core.cost import cost
from fairlead.core.endpoint import Endpoint
from fairlead.core.errors import ConfigError, ProtocolError
from fairlead.core.events import Event, RemoteDown, RemotePicked, RemoteUp
from fairlead.core.fleet import Fleet
from fairlead.core.instructions import AskRemote
from fairlead.core.records import OutcomeRecord, Snapshot
from fairlead.core.table import FLOATS
from fairlead.pool.aio import cancelled
from fairlead.server.remote.messages import (
    COLUMNS,
    FACTORS,
    VERSION,
    Answer,
    Ask,
    Asked,
    Batch,
    EndpointState,
    Forecast,
    Hello,
    Speeds,
    State,
    Welcome,
    decode_answer,
    encode_ask,
)
from fairlead.server.remote.stream import MAX_MESSAGE, MAX_PENDING, SchedulerStream, open_channel

if TYPE_CHECKING:
    import grpc.aio

#: Seconds between two attempts to connect: at first, and at most.
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
#: Seconds from the start of an attempt to the welcome.
WELCOME_WITHIN = 5.0
#: Bytes that a scheduler may send for each request that it is asked about, and before the first one. Of what it did
#: not use, at most `MAX_MESSAGE` is kept. Decoding a megabyte of tiny fields holds the event loop for most of a second.
BYTES_PER_REQUEST, FIRST_BYTES = 4 << 10, 64 << 10
#: At most this many undecided batches are remembered.
_UNDECIDED_BATCHES = 4096
#: Outcomes are left out while more bytes wait until the scheduler reads.
MAX_UNREAD = MAX_PENDING // 64


class _Undecided(Struct):
    #: The number of requests without an answer; from when on (clock seconds) answers no longer count.
    left: int
    until: float


class RemoteClient:
    """A connection to one scheduler. Call `start()`, and `await close()` at the end. `feed` receives events; `report`
    receives what happened and why, for the log. `pool`, `max_endpoints`: sent to the scheduler in the hello."""

    def __init__(
        self,
        name: str,
        settings: SchedulerSettings,
        fleet: Fleet,
        feed: Callable[[Event], None],
        report: Callable[[str, str], None] = lambda what, why: None,
        *,
        pool: str = "default",
        max_endpoints: int = 2,
    ) -> None:
        self._name, self._settings, self._pool, self._max_endpoints = name, settings, pool, max_endpoints
        #: The welcome of the open stream; `None` while there is none.
        self.welcome: Welcome | None = None
        #: How many welcomes have been received.
        self.connections = 0
        #: How many outcomes it did not hear, because it was too slow.
        self.unheard = 0
        self._fleet = fleet
        self._feed = feed
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._channel: grpc.aio.Channel | None = None
        self._stream: SchedulerStream | None = None
        self._ended: asyncio.Future[str] | None = None
        self._state = StateFeed(fleet)
        self._waiting: list[AskRemote] = []
        self._batch = 0
        #: Bytes that the scheduler may still send.
        self._allowance = FIRST_BYTES
        #: Batches that are not fully decided, oldest first.
        self._undecided: dict[int, _Undecided] = {}
        self._last_report = ""

    def start(self) -> None:
        """Connect, and stay connected."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"scheduler {self._name}")

    async def close(self) -> None:
        self._feed = lambda event: None  # a new connection may already have the same name: feed no more events
        task, self._task = self._task, None
        await cancelled(task)
        if self._stream is not None:
            stream = self._stream
            stream.end("closed")
            await stream.closed()
        await self._hang_up()

    def ask(self, instruction: AskRemote) -> None:
        """Send the question, together with the others of this turn of the event loop."""
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append(instruction)

    def ask_as_of(self, instruction: AskRemote, fleet: Fleet, snapshot: Snapshot) -> bool:
        """Ask immediately, about an earlier moment: `fleet` and `snapshot` are from that moment. False = nothing is
        sent, because there is no connection or the number of slots has changed since."""
        if self.welcome is None or snapshot.floats.shape[1] != len(self._fleet.table):
            return False
        self._send([instruction], fleet, self._loop.time(), snapshot)
        return True

    def hear(self, outcomes: Sequence[OutcomeRecord]) -> None:
        """Send how requests ended, if the scheduler wants to know and reads fast enough."""
        stream = self._stream
        if stream is None or self.welcome is None or not self.welcome.wants_outcomes:
            return
        if stream.unread > MAX_UNREAD:
            self.unheard += len(outcomes)
        else:
            stream.send(encode_ask(Ask(ended=outcomes)))

    # ---- the connection ----

    async def _run(self) -> None:
        pause = FIRST_PAUSE
        while True:
            began = self._loop.time()
            why = await self._once()
            if self._loop.time() - began > LONGEST_PAUSE:
                pause = FIRST_PAUSE
            if why != self._last_report:  # log a repeated failure once
                self._last_report = why
                self._report("the scheduler is not connected; the built-in policy decides", why)
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE)

    async def _once(self) -> str:
        """Open one stream, and wait until it ends. Returns why it ended."""
        self._ended = ended = self._loop.create_future()
        address, before = self._settings.address, self.connections
        try:
            if self._channel is None:
                self._channel = await open_channel(address, self._settings.tls)
        except (OSError, ConfigError, TimeoutError) as error:
            return f"cannot connect to {address}: {error or 'timed out'}"
        deadline = self._loop.call_later(WELCOME_WITHIN, self._unwelcome)
        try:
            self._opened(SchedulerStream(self._channel, address, self._message, self._over))
            why: str = await ended
        finally:
            deadline.cancel()
        if self.connections == before:
            # No welcome came, so use a new channel next time: it reads certificates again and has no back-off. A
            # channel that worked is kept, because it has learned how often its server allows pings.
            await self._hang_up()
        return why

    async def _hang_up(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    def _unwelcome(self) -> None:
        if self.welcome is None and self._stream is not None:
            self._stream.end(f"no welcome within {WELCOME_WITHIN:g} s")

    def _opened(self, stream: SchedulerStream) -> None:
        self._stream = stream
        self._state = StateFeed(self._fleet)
        self._batch, self._allowance = 0, FIRST_BYTES
        self._undecided.clear()
        hello = Hello(
            version=VERSION,
            gateway=f"fairlead {__version__}",
            pool=self._pool,
            budget_us=round(self._settings.budget * 1e6),
            max_endpoints=self._max_endpoints,
        )
        stream.send(encode_ask(Ask(hello=hello, state=self._state.changes(0))))

    def _over(self, why: str) -> None:
        was_welcome = self.welcome is not None
        self._stream = self.welcome = None
        self._waiting.clear()
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(why)
        if was_welcome:
            self._feed(RemoteDown(self._name))

    # ---- messages ----

    def _message(self, data: bytes) -> None:
        self._allowance -= len(data)
        try:
            if self._allowance < 0:
                raise ProtocolError(f"it sends more than {BYTES_PER_REQUEST} bytes per request")
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
        self._last_report = ""
        self._report("the scheduler is connected", f"{welcome.scheduler} {welcome.policy}".strip()[:200])
        self._feed(RemoteUp(self._name))

    def _picked(self, answer: Answer) -> None:
        picks = answer.picks
        assert picks is not None
        if self.welcome is None:
            raise ProtocolError("picks before the welcome")
        if not 0 < picks.batch <= self._batch:
            raise ProtocolError(f"picks of batch {picks.batch}, which was never sent")
        batch = self._undecided.get(picks.batch)
        if batch is not None:
            batch.left -= len(picks.picks)
        self._feed(RemotePicked(self._name, picks.picks))

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._send(waiting, self._fleet, self._loop.time())

    def _send(self, waiting: list[AskRemote], fleet: Fleet, now: float, snapshot: Snapshot | None = None) -> None:
        if self._stream is None:
            return
        forecasts = self.welcome is not None and self.welcome.wants_forecasts
        # Leave out the reservations that the ledger holds for these requests. With them, the scheduler would avoid the
        # endpoints that the requests are reserved at.
        with self._fleet.ledger.without_reserved():
            state = self._state.changes(self._settled(now), snapshot)
            requests = [asked(question, fleet, now, forecasts) for question in waiting]
        self._batch += 1
        self._allowance = min(self._allowance, MAX_MESSAGE) + BYTES_PER_REQUEST * len(waiting)
        self._undecided[self._batch] = _Undecided(len(waiting), now + 2 * self._settings.budget)
        self._stream.send(encode_ask(Ask(state=state, batch=Batch(number=self._batch, now=now, requests=requests))))

    def _settled(self, now: float) -> int:
        """The number of the last batch that is decided, together with all batches before it."""
        for number, batch in list(self._undecided.items()):
            if batch.left > 0 and batch.until > now and len(self._undecided) <= _UNDECIDED_BATCHES:
                return number - 1
            del self._undecided[number]
        return self._batch


# The state of the fleet for a scheduler in another process: first the whole state, then only changes.
#
# Theory. Between two batches few numbers change: those of endpoints that were charged or scraped. All columns are in
# one array, so finding the changes is one comparison (5 µs for 8 endpoints, 60 µs for 1,000). Only changed columns of
# changed slots are sent.

_ROWS = [FLOATS.index(name) for name in list(COLUMNS.values())[: -len(FACTORS)]]
_NUMBERS = list(COLUMNS)
#: The values of a new endpoint, by the contract.
_NEW = np.array([-np.inf if COLUMNS[number] in ("sampled_at", "ejected_until") else 0.0 for number in COLUMNS])
_NEW[-len(FACTORS) :] = 1.0
#: Learned sums that changed by less than this share are not sent again.
_SAME = 0.01


class StateFeed(Struct, eq=False):
    """The state that was sent on one stream. Each stream needs one of its own."""

    _fleet: Fleet
    _version: int = 0
    _last_sent: list[tuple[Endpoint, frozenset[str] | None] | None] = []
    _table_version: int = -1
    _sent: NDArray[np.float64] = field(default_factory=lambda: np.zeros((len(COLUMNS), 0)))
    _speeds: Speeds = Speeds()

    def changes(self, settled: int, snapshot: Snapshot | None = None) -> State | None:
        """The changes since the last call; `None` = there are none. `settled`: the number of the last batch whose picks
        are charged in the ledger, or never will be.

        `snapshot`: send its numbers instead of the present ones; it must have the present slots.
        """
        state = State(full=self._version == 0, settled=settled)
        if self._fleet.table.version != self._table_version:
            self._endpoints(state)
        self._load(state, snapshot)
        self._learned(state)
        if not (state.full or state.endpoints or state.gone or len(state.slots) or state.speeds):
            return None
        self._version += 1
        state.version = self._version
        return state

    def _endpoints(self, state: State) -> None:
        table = self._fleet.table
        self._table_version = table.version
        while len(self._last_sent) < len(table):
            self._last_sent.append(None)
            self._sent = np.column_stack((self._sent, _NEW))
        for slot, before in enumerate(self._last_sent):
            endpoint = table.endpoints[slot]
            if before is not None and (endpoint is None or endpoint.id != before[0].id):
                state.gone.append(slot)
                self._sent[:, slot] = _NEW
                self._last_sent[slot] = before = None
            if endpoint is None:
                continue
            now = (endpoint, table.adapters[slot])
            if now != before:
                self._last_sent[slot] = now
                state.endpoints.append(_endpoint(slot, *now))

    def _load(self, state: State, snapshot: Snapshot | None) -> None:
        table, predictor = self._fleet.table, self._fleet.predictor
        floats, learned = table.floats, predictor.rates.columns
        if snapshot is not None:
            floats, learned = snapshot.floats, snapshot.learned
        # In the order of the messages: prefill, steps, first tokens, output tokens, load.
        current = np.concatenate((floats[_ROWS], learned[[2, 3, 0, 1, 4], : len(table)]))
        changed = current != self._sent
        if not changed.any():
            return
        slots = np.flatnonzero(changed.any(axis=0) & table.alive)
        if not len(slots):
            return
        state.slots = slots
        for row in np.flatnonzero(changed[:, slots].any(axis=1)).tolist():
            state.columns[_NUMBERS[row]] = current[row, slots]
        self._sent[:, slots] = current[:, slots]

    def _learned(self, state: State) -> None:
        predictor, before = self._fleet.predictor, self._speeds
        hold, steps = predictor.hold_ms, predictor.answer_steps
        near = abs(hold - before.hold_ms) <= _SAME * hold and abs(steps - before.answer_steps) <= _SAME * steps
        if near and before.c0:
            return
        state.speeds = self._speeds = Speeds(**asdict(predictor.rates.prior), hold_ms=hold, answer_steps=steps)


def _endpoint(slot: int, endpoint: Endpoint, adapters: frozenset[str] | None) -> EndpointState:
    return EndpointState(
        slot=slot,
        id=endpoint.id,
        address=endpoint.address,
        labels=dict(endpoint.labels),
        adapters=None if adapters is None else tuple(sorted(adapters)),
    )


def asked(ask: AskRemote, fleet: Fleet, now: float, forecasts: bool) -> Asked:
    """The message for a request, with what is known about it. Columns may be shorter than the fleet's table: they were
    made before the newest endpoints joined."""
    message = Asked(request=ask.request, expected_output=ask.expected_output)
    if ask.hits is not None:
        message.hit_slots = np.flatnonzero(ask.hits)
        message.hit_shares = ask.hits[message.hit_slots]
    if ask.able is not None:
        message.candidates = np.flatnonzero(ask.able)
    if ask.computes is not None:
        message.prefill_candidates = np.flatnonzero(ask.computes)
    if forecasts:
        message.forecast = _forecast(ask, fleet, now)
    return message


def _forecast(ask: AskRemote, fleet: Fleet, now: float) -> Forecast:
    size = len(fleet.table)
    hits = ask.hits
    if hits is not None and len(hits) < size:
        hits = np.concatenate((hits, np.zeros(size - len(hits))))
    tokens = ask.request.prompt_tokens
    loading = fleet.loading(ask.request) if fleet.table.lora else None
    terms = cost(tokens, None if hits is None else hits * tokens, fleet, now, loading)
    # A term that is the same at all endpoints is a single number: make it a column.
    ttft, prefill, step, used = (
        np.broadcast_to(term, (size,)) for term in (terms.ttft, terms.prefill, terms.step, terms.used)
    )
    return Forecast(ttft_ms=ttft, prefill_ms=prefill, step_ms=step, used=used)
