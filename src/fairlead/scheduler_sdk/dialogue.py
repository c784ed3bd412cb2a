"""Talks to a scheduler by hand: for checks and benchmarks of one that may be wrong."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from fairlead.io.remote.address import ClientTls, authority, connect
from fairlead.io.remote.h2_stream import GrpcStream
from fairlead.model.errors import FairleadError, ProtocolError
from fairlead.model.remote import RemotePick
from fairlead.model.request import Request
from fairlead.wire.scheduler import COLUMNS, PATH, Answer, Ask, Asked, Batch, EndpointState, Hello, Speeds, State
from fairlead.wire.scheduler_answer import decode_answer
from fairlead.wire.scheduler_ask import encode_ask

#: Seconds that one answer may take before a check gives up.
PATIENCE = 5.0


class Failed(FairleadError):
    """What was expected did not come; the text says what came."""


class Dialogue:
    """One stream. State versions, batch and request numbers are counted here."""

    def __init__(self) -> None:
        self.stream: GrpcStream | None = None
        self.batch = 0
        self.ended: str | None = None
        self._version = 0
        self._request = 0
        self._answers: asyncio.Queue[Answer | str] = asyncio.Queue()

    # ---- the stream ----

    def opened(self, stream: GrpcStream) -> None:
        self.stream = stream

    def message(self, data: bytes) -> None:
        try:
            self._answers.put_nowait(decode_answer(data))
        except ProtocolError as error:
            self._answers.put_nowait(f"an answer that cannot be read: {error}")

    def over(self, why: str) -> None:
        self.ended = why
        self._answers.put_nowait(f"the stream ended: {why}")

    def send_bytes(self, data: bytes) -> None:
        assert self.stream is not None
        self.stream.send(data)

    def send(self, ask: Ask) -> None:
        self.send_bytes(encode_ask(ask))

    async def answer(self) -> Answer:
        """The next one. Raises `Failed`."""
        try:
            async with asyncio.timeout(PATIENCE):
                found = await self._answers.get()
        except TimeoutError:
            raise Failed(f"no answer within {PATIENCE:g} s") from None
        if isinstance(found, str):
            raise Failed(found)
        return found

    # ---- what is said ----

    async def greet(self, endpoints: Sequence[EndpointState], **columns: Sequence[float]) -> Answer:
        """Hello and everything; returns the welcome, checked."""
        state = self.state(endpoints, (), **columns)
        self.send(Ask(hello=Hello(gateway="fairlead check", budget_us=5000), state=state))
        answer = await self.answer()
        if answer.welcome is None or answer.picks is not None:
            raise Failed("the first answer is not a welcome alone")
        if answer.welcome.version != 1:
            raise Failed(f"the welcome says version {answer.welcome.version}, expected 1")
        return answer

    def state(
        self, endpoints: Sequence[EndpointState] = (), gone: Iterable[int] = (), **columns: Sequence[float]
    ) -> State:
        """The next version. `columns` by name are parallel to `endpoints`; those of idle endpoints where not given."""
        self._version += 1
        state = State(version=self._version, full=self._version == 1, endpoints=list(endpoints), gone=list(gone))
        state.settled = self.batch
        if endpoints:
            state.slots = np.array([one.slot for one in endpoints], dtype=np.intp)
            numbers = {name: number for number, name in COLUMNS.items()}
            idle: dict[str, Any] = {"sampled_at": [1000.0] * len(endpoints)}
            for name, values in {**idle, **columns}.items():
                state.columns[numbers[name]] = np.array(values, dtype=np.float64)
        if state.full:
            state.speeds = Speeds(c0=13.0, c_pf=0.043, c_attn=1.6e-6, c_seq=0.026, c_kv=4.5e-5, hold_ms=1e4)
        return state

    def ask(self, count: int = 1, state: State | None = None, **fields: Any) -> list[int]:
        """Send a batch; returns the ids of its requests. `fields` are those of `Asked`."""
        self.batch += 1
        requests = []
        for _ in range(count):
            self._request += 1
            request = Request(
                id=self._request, arrived=0.0, api="chat", model="m", stream=True, prompt_tokens=500, prompt_bytes=2000
            )
            requests.append(Asked(request=request, expected_output=200.0, **fields))
        self.send(Ask(state=state, batch=Batch(number=self.batch, now=1000.0 + self.batch, requests=requests)))
        return [one.request.id for one in requests]

    async def picks(self, wanted: Sequence[int]) -> list[RemotePick]:
        """The picks for these requests, in their order. Raises `Failed` when one is missing, twice or not asked for."""
        found: dict[int, RemotePick] = {}
        while len(found) < len(wanted):
            answer = await self.answer()
            if answer.welcome is not None:
                raise Failed("a second welcome")
            for pick in answer.picks.picks if answer.picks is not None else ():
                if pick.request_id not in wanted:
                    raise Failed(f"a pick for request {pick.request_id}, which was not asked for (or not any more)")
                if pick.request_id in found:
                    raise Failed(f"two picks for request {pick.request_id}")
                found[pick.request_id] = pick
        return [found[number] for number in wanted]


@asynccontextmanager
async def talk(address: str, tls: ClientTls | None = None) -> AsyncIterator[Dialogue]:
    """A `Dialogue`. Raises `Failed` when nobody is there."""
    dialogue = Dialogue()

    def make() -> GrpcStream:
        return GrpcStream(PATH, authority(address), dialogue.opened, dialogue.message, dialogue.over)

    try:
        async with asyncio.timeout(PATIENCE):
            await connect(address, make, tls)
    except (OSError, TimeoutError) as error:
        raise Failed(f"cannot connect to {address}: {error or 'timed out'}") from None
    try:
        yield dialogue
    finally:
        if dialogue.stream is not None:
            dialogue.stream.end("done")
