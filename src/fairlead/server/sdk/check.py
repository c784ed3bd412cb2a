"""`fairlead scheduler check`: checks rule by rule whether a scheduler of any implementation keeps the contract.

A scheduler may refuse any request or have no opinion on it; an endpoint that it picks must exist and be allowed. `talk`
opens a stream for single messages, which benchmarks use too. The docstrings of the checks are the rules in the output.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any

import numpy as np
from msgspec import Struct

from fairlead.config.schema import SchedulerTls
from fairlead.core.errors import ConfigError, FairleadError, ProtocolError
from fairlead.core.events import Outcome, RemotePick
from fairlead.core.records import OutcomeRecord
from fairlead.core.request import Request
from fairlead.gateway.protobuf import field
from fairlead.server.remote.messages import (
    COLUMNS,
    Answer,
    Ask,
    Asked,
    Batch,
    EndpointState,
    Floats,
    Forecast,
    Hello,
    Speeds,
    State,
    decode_answer,
    encode_ask,
)
from fairlead.server.remote.stream import SchedulerStream, open_channel

#: Seconds that one answer may take before a check gives up.
PATIENCE = 5.0


class Failed(FairleadError):
    """The expected answer did not arrive. The text says what happened instead."""


class Dialogue:
    """One stream to the scheduler. Counts state versions, batch numbers and request numbers."""

    def __init__(self) -> None:
        self.stream: SchedulerStream | None = None
        self.batch = 0
        self.ended: str | None = None
        self._version = 0
        self._request = 0
        self._answers: asyncio.Queue[Answer | str] = asyncio.Queue()

    # ---- the stream ----

    def message(self, data: bytes) -> None:
        try:
            self._answers.put_nowait(decode_answer(data))
        except ProtocolError as error:
            self._answers.put_nowait(f"an answer that cannot be read: {error}")

    def over(self, why: str) -> None:
        self.ended = why
        self._answers.put_nowait(why if why.startswith("cannot connect") else f"the stream ended: {why}")

    def send_bytes(self, data: bytes) -> None:
        assert self.stream is not None
        self.stream.send(data)

    def send(self, ask: Ask) -> None:
        self.send_bytes(encode_ask(ask))

    async def answer(self) -> Answer:
        """The next answer. Raises `Failed`."""
        try:
            async with asyncio.timeout(PATIENCE):
                received = await self._answers.get()
        except TimeoutError:
            raise Failed(f"no answer within {PATIENCE:g} s") from None
        if isinstance(received, str):
            raise Failed(received)
        return received

    # ---- sending and receiving ----

    async def greet(self, endpoints: Sequence[EndpointState], **columns: Sequence[float]) -> Answer:
        """Send the hello and the whole state. Returns the answer, which has a valid welcome. Raises `Failed`."""
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
        """Make the next state. `columns`: by name, parallel to `endpoints`; missing ones have the values of idle
        endpoints."""
        self._version += 1
        state = State(version=self._version, full=self._version == 1, endpoints=list(endpoints), gone=list(gone))
        state.settled = self.batch
        if endpoints:
            state.slots = np.array([endpoint.slot for endpoint in endpoints], dtype=np.intp)
            numbers = {name: number for number, name in COLUMNS.items()}
            idle: dict[str, Any] = {"sampled_at": [1000.0] * len(endpoints)}
            for name, values in {**idle, **columns}.items():
                state.columns[numbers[name]] = np.array(values, dtype=np.float64)
        if state.full:
            state.speeds = Speeds(c0=13.0, c_pf=0.043, c_attn=1.6e-6, c_seq=0.026, c_kv=4.5e-5, hold_ms=1e4)
        return state

    def opened(self, stream: SchedulerStream) -> None:
        """Send to this stream from now on."""
        self.stream = stream

    def batched(self) -> None:
        """Count one more batch, which is about to be sent."""
        self.batch += 1

    def ask(self, count: int = 1, state: State | None = None, **fields: Any) -> list[int]:
        """Send a batch of `count` requests. Returns their ids. `fields`: fields of `Asked` for each request."""
        self.batched()
        requests = []
        for _ in range(count):
            self._request += 1
            request = Request(
                id=self._request, arrived=0.0, api="chat", model="m", stream=True, prompt_tokens=500, prompt_bytes=2000
            )
            requests.append(Asked(request=request, expected_output=200.0, **fields))
        self.send(Ask(state=state, batch=Batch(number=self.batch, now=1000.0 + self.batch, requests=requests)))
        return [asked.request.id for asked in requests]

    async def picks(self, wanted: Sequence[int]) -> list[RemotePick]:
        """Receive the picks for these requests, in the order of `wanted`. Raises `Failed` for a missing, double or
        unexpected pick."""
        received: dict[int, RemotePick] = {}
        while len(received) < len(wanted):
            answer = await self.answer()
            if answer.welcome is not None:
                raise Failed("a second welcome")
            for pick in answer.picks.picks if answer.picks is not None else ():
                if pick.request_id not in wanted:
                    raise Failed(f"a pick for request {pick.request_id}, which was not asked for (or not any more)")
                if pick.request_id in received:
                    raise Failed(f"two picks for request {pick.request_id}")
                received[pick.request_id] = pick
        return [received[number] for number in wanted]


@asynccontextmanager
async def talk(address: str, tls: SchedulerTls | None = None) -> AsyncIterator[Dialogue]:
    """A context with a `Dialogue`. If nothing listens at the address, this or the first `answer()` raises `Failed`."""
    dialogue = Dialogue()
    try:
        channel = await open_channel(address, tls)
    except (OSError, TimeoutError) as error:
        raise Failed(f"cannot connect to {address}: {error or 'timed out'}") from None
    try:
        stream = SchedulerStream(channel, address, dialogue.message, dialogue.over)
        dialogue.opened(stream)
        yield dialogue
        stream.end("done")
        await stream.closed()
    finally:
        await channel.close()


#: The latency is measured over this many batches, one after another.
_ROUNDS = 300


class Result(Struct, frozen=True):
    name: str
    rule: str
    ok: bool
    #: If it failed, what happened instead; else a figure, or empty.
    detail: str = ""


class Checker:
    """Runs the checks. `budget_ms`: how many milliseconds the 99th percentile of answers may take."""

    def __init__(self, address: str, tls: SchedulerTls | None = None, budget_ms: float = 100.0) -> None:
        self._address = address
        self._tls = tls
        self._budget_ms = budget_ms

    async def run(self) -> list[Result]:
        """Run all checks, each on a stream of its own. If the first check fails, the others are not run. Raises
        `ConfigError` if the address or a file for TLS is wrong."""
        results = []
        for check in CHECKS:
            result = await self._run_check(check)
            results.append(result)
            if not result.ok and check is CHECKS[0]:
                break
        return results

    async def _run_check(self, check: "Check") -> Result:
        name = check.__name__.removeprefix("_").replace("_", "-")
        rule = (check.__doc__ or "").strip()
        try:
            async with talk(self._address, self._tls) as dialogue:
                detail = await check(self, dialogue)
        except ConfigError:
            raise
        except FairleadError as error:
            return Result(name, rule, False, str(error))
        return Result(name, rule, True, detail or "")

    # ---- the checks ----

    async def _welcomes(self, say: Dialogue) -> str:
        """answers the hello with a welcome of version 1, and nothing else"""
        welcome = (await say.greet(_pool(3))).welcome
        assert welcome is not None
        return " ".join(part for part in (welcome.scheduler, welcome.policy) if part)

    async def _picks(self, say: Dialogue) -> str:
        """answers a request with an endpoint that exists, a refusal or no opinion"""
        await say.greet(_pool(3))
        (pick,) = await say.picks(_ask(say, 3))
        _allowed(pick, _names(3))
        if pick.outcome == Outcome.PICKED:
            return f"picked {pick.endpoint}"
        return "did not pick"

    async def _every_request_once(self, say: Dialogue) -> None:
        """answers each of 64 requests of one batch exactly once"""
        await say.greet(_pool(3))
        _all_allowed(await say.picks(_ask(say, 3, 64)), _names(3))
        await _nothing_more(say)

    async def _decides(self, say: Dialogue) -> None:
        """picks an endpoint for some of 64 plain requests"""
        await say.greet(_pool(3))
        if all(pick.outcome != Outcome.PICKED for pick in await say.picks(_ask(say, 3, 64))):
            raise Failed("it picked none; if its policy fails, its log has the error")

    async def _batches_in_flight(self, say: Dialogue) -> None:
        """answers 32 batches that are sent without waiting for answers"""
        await say.greet(_pool(3))
        wanted = [number for _ in range(32) for number in _ask(say, 3, 4)]
        _all_allowed(await say.picks(wanted), _names(3))
        await _nothing_more(say)

    async def _candidates(self, say: Dialogue) -> None:
        """picks only endpoints that the request names as candidates"""
        await say.greet(_pool(8))
        for slot in (5, 0, 7):
            picks = await say.picks(_ask(say, 8, 8, candidates=np.array([slot], dtype=np.intp)))
            _all_allowed(picks, {f"e{slot}"})
        _all_allowed(await say.picks(_ask(say, 8, 4, candidates=np.zeros(0, dtype=np.intp))), set())

    async def _empty_pool(self, say: Dialogue) -> None:
        """picks nothing while there are no endpoints, and picks again once there are"""
        await say.greet(())
        _all_allowed(await say.picks(_ask(say, 0, 2)), set())
        _all_allowed(await say.picks(say.ask(4, say.state(_pool(2)), forecast=_forecast(2))), _names(2))

    async def _departures(self, say: Dialogue) -> None:
        """does not pick endpoints that have left"""
        await say.greet(_pool(4))
        await say.picks(_ask(say, 4, 8))
        picks = await say.picks(say.ask(32, say.state(gone=[1, 2]), forecast=_forecast(4)))
        _all_allowed(picks, {"e0", "e3"})

    async def _slots_are_reused(self, say: Dialogue) -> None:
        """names the endpoint that has a slot now, not the one before"""
        await say.greet(_pool(2))
        newcomer = EndpointState(slot=0, id="newcomer", address="10.9.9.9:1")
        state = say.state([newcomer], gone=[0, 1])
        _all_allowed(await say.picks(say.ask(16, state, forecast=_forecast(2))), {"newcomer"})

    async def _labels_change(self, say: Dialogue) -> None:
        """treats an endpoint that is sent again as changed, not as a second one"""
        await say.greet(_pool(2))
        changed = EndpointState(slot=1, id="e1", address="10.0.0.1:8000", labels={"zone": "ü"}, adapters=("a", ""))
        _all_allowed(await say.picks(say.ask(16, say.state([changed]), forecast=_forecast(2))), _names(2))

    async def _unknown_fields(self, say: Dialogue) -> None:
        """skips fields that it does not know"""
        await say.greet(_pool(2))
        unknown = field(2000, b"later versions add fields") + b"\x98\x7d\x01"
        say.batched()
        asked = field(3, b"\x08\x01" + field(3, b"\x08\x07\x28\x10" + unknown) + unknown)
        say.send_bytes(asked + unknown)
        _all_allowed(await say.picks([7]), _names(2))

    async def _outcomes(self, say: Dialogue) -> str | None:
        """if it asks for outcomes, goes on after those of requests and endpoints that it does not know"""
        welcome = (await say.greet(_pool(2))).welcome
        assert welcome is not None
        if not welcome.wants_outcomes:
            return "does not ask for them"
        (number,) = _ask(say, 2)
        await say.picks([number])
        ends = [OutcomeRecord(request=Request(id=id, arrived=0.0), at=1000.0, endpoint="gone") for id in (number, 999)]
        say.send(Ask(ended=[*ends, OutcomeRecord(request=ends[0].request, at=1001.0, endpoint="e0", status=503)]))
        _all_allowed(await say.picks(_ask(say, 2, 4)), _names(2))
        return None

    async def _odd_requests(self, say: Dialogue) -> None:
        """answers odd requests: the whole prompt cached, endpoints that were never scraped or have huge queues"""
        endpoints = _pool(2)
        await say.greet(endpoints, sampled_at=[float("-inf")] * 2, queue=[1e9, 0.0], kv=[1.0, 0.0])
        share = {"hit_slots": np.array([0, 1], dtype=np.intp), "hit_shares": np.array([1.0, 0.5])}
        wanted = _ask(say, 2, 2, **share) + _ask(say, 2, 1)
        _all_allowed(await say.picks(wanted), _names(2))

    async def _large_pool(self, say: Dialogue) -> None:
        """answers 100 requests over 1,000 endpoints"""
        await say.greet(_pool(1000))
        _all_allowed(await say.picks(_ask(say, 1000, 100)), _names(1000))

    async def _streams_are_apart(self, say: Dialogue) -> None:
        """keeps the state of one stream from all others"""
        await say.greet(_pool(2))
        async with talk(self._address, self._tls) as dialogue:
            await dialogue.greet([EndpointState(slot=0, id="theirs", address="10.1.1.1:1")])
            theirs = dialogue.ask(8, forecast=_forecast(1))
            ours = _ask(say, 2, 8)
            _all_allowed(await dialogue.picks(theirs), {"theirs"})
            _all_allowed(await say.picks(ours), _names(2))

    async def _hello_first(self, say: Dialogue) -> None:
        """answers no batch on a stream that did not begin with a hello"""
        say.send(Ask(state=say.state(_pool(2))))
        say.ask(1, forecast=_forecast(2))
        try:
            answer = await say.answer()
        except Failed:
            return
        if answer.picks is not None:
            raise Failed("it answered a batch without a hello")
        raise Failed("it welcomed a stream without a hello")

    async def _survives_garbage(self, say: Dialogue) -> None:
        """serves other streams after one that sent garbage"""
        say.send_bytes(b"\xff" * 64)
        async with talk(self._address, self._tls) as dialogue:
            await dialogue.greet(_pool(2))
            _all_allowed(await dialogue.picks(_ask(dialogue, 2, 2)), _names(2))

    async def _in_time(self, say: Dialogue) -> str:
        """answers 99 of 100 batches within the budget"""
        await say.greet(_pool(8))
        took = []
        for _ in range(_ROUNDS):
            began = perf_counter()
            await say.picks(_ask(say, 8))
            took.append((perf_counter() - began) * 1e3)
        took.sort()
        middle, high = took[len(took) // 2], took[int(len(took) * 0.99)]
        figures = f"p50 {middle:.2f} ms, p99 {high:.2f} ms"
        if high > self._budget_ms:
            raise Failed(f"{figures}; the budget is {self._budget_ms:g} ms")
        return figures


Check = Callable[[Checker, Dialogue], Awaitable[str | None]]
CHECKS: tuple[Check, ...] = (
    Checker._welcomes, Checker._picks, Checker._every_request_once, Checker._decides, Checker._batches_in_flight,
    Checker._candidates, Checker._empty_pool, Checker._departures, Checker._slots_are_reused, Checker._labels_change,
    Checker._unknown_fields, Checker._outcomes, Checker._odd_requests, Checker._large_pool,
    Checker._streams_are_apart, Checker._hello_first, Checker._survives_garbage, Checker._in_time,
)  # fmt: skip


def _pool(count: int) -> list[EndpointState]:
    return [EndpointState(slot=i, id=f"e{i}", address=f"10.0.{i // 250}.{i % 250}:8000") for i in range(count)]


def _names(count: int) -> set[str]:
    return {f"e{i}" for i in range(count)}


def _forecast(slots: int) -> Forecast:
    column: Floats = np.linspace(10.0, 20.0, slots)
    return Forecast(ttft_ms=column, prefill_ms=column, step_ms=column, used=column * 0.0)


def _ask(say: Dialogue, slots: int, count: int = 1, **fields: Any) -> list[int]:
    """Send a batch whose requests carry forecasts, as for a scheduler that asked for them."""
    return say.ask(count, None, forecast=_forecast(slots), **fields)


def _allowed(pick: RemotePick, names: set[str]) -> None:
    if pick.outcome in (Outcome.PASSED, Outcome.REFUSED):
        return
    if pick.outcome != Outcome.PICKED:
        raise Failed(f"outcome {pick.outcome}; known are 1 (picked), 2 (refused), 3 (passed)")
    named = pick.endpoint, pick.prefill or pick.endpoint, *(name for name, _ in pick.alternatives)
    wrong = [name for name in named if name not in names]
    if wrong:
        expected = ", ".join(sorted(names)[:4]) if names else "nothing"
        raise Failed(f"it picked {wrong[0]!r}; allowed: {expected}{' …' if len(names) > 4 else ''}")


def _all_allowed(picks: Sequence[RemotePick], names: set[str]) -> None:
    for pick in picks:
        _allowed(pick, names)


async def _nothing_more(say: Dialogue) -> None:
    """Check that no further pick arrives for requests that were answered."""
    await asyncio.sleep(0.02)
    (number,) = say.ask(1, forecast=_forecast(3))
    await say.picks([number])
