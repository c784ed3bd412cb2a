"""The real sessions behind both transports: what the real Envoy sent, and what it might, is answered alike to the byte.

Rules
* Both sides are a whole scheduler of their own, built alike. Time stands still and chance is seeded, so nothing but the
  transport differs. Each plays the same streams in the same order.
* A stream is sent as fast as the windows allow, without waiting for answers, by the h2 library.
* Lease ids are masked: each scheduler counts its own.
* One thing a session may ask differs by design. grpc.aio cannot tell `room`, so behind it no session leaves a
  full-duplex response at the pick. Where that matters the client grants a window too small for any pick, so that
  neither has room; one test shows the difference itself.
"""

import asyncio
import itertools
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Self

import pytest
from ext_proc_player import Heard, Player, hang_up
from ext_proc_streams import FULL_DUPLEX, MODES, NONE, WIDE, Generator, Stream, recorded

from fairlead.core.endpoint import Endpoint
from fairlead.core.events import EndpointUp, ModelsChanged
from fairlead.core.fleet import Fleet
from fairlead.core.headers import DESTINATION
from fairlead.core.models import InferenceModel, ModelSet, Origin, Target
from fairlead.core.prefix import ChainHasher
from fairlead.core.profile import Profile
from fairlead.core.scheduler import Pipeline
from fairlead.core.tokens import TokenEstimator
from fairlead.gateway import access_log
from fairlead.gateway.answers import Answers
from fairlead.gateway.driver import Driver
from fairlead.gateway.grpc_server import GrpcServer
from fairlead.gateway.h2_limits import H2Limits
from fairlead.gateway.h2_server import H2Server
from fairlead.gateway.health import HealthService
from fairlead.gateway.host import Host
from fairlead.gateway.server import EXT_PROC, routes
from fairlead.gateway.understand import Understanding
from fairlead.plugins.filters.ability import Subset
from fairlead.plugins.params import NoParams
from fairlead.plugins.pickers import RoundRobin
from fairlead.server.observe.watch import Watch
from fairlead.testing import SimClock

DATA = Path(__file__).parents[1] / "data" / "ext-proc"
RECORDINGS = sorted(DATA.glob("*.json"))
STREAMS = 250
MAX_BODY = 150_000
INSTANCE = "ab12cd34"
LEASE = re.compile(INSTANCE.encode() + rb"\.[0-9a-f]{16}")
MASK = b"-" * 25
OK, INVALID_ARGUMENT = b"0", b"3"
PATIENCE = 20.0


# ---- who answers ----

#: Requests for it leave with another body, and their responses are changed back.
ALIAS = InferenceModel(origin=Origin(namespace="n", name="a"), model="alias", targets=(Target("m"),))


class Side:
    """A scheduler, one of the transports before it, and what plays gateways to it."""

    def __init__(self, transport: type[H2Server] | type[GrpcServer], models: bool = True) -> None:
        clock = SimClock()
        self.fleet = Fleet()
        watch = Watch(self.fleet, clock.time)
        tokens = TokenEstimator()
        profile = Profile("rr", [Subset(NoParams())], [], RoundRobin(NoParams()))
        self.pipeline = Pipeline(clock, Random(1), self.fleet, profile, tokens)
        driver = Driver(self.pipeline, clock, watch)
        for number in range(3):
            driver.feed(EndpointUp(Endpoint(f"default/e{number}", f"10.0.0.{number}:80")))
        if models:
            driver.feed(ModelsChanged(ModelSet((ALIAS,))))
        understanding = Understanding(tokens, ChainHasher(), clock.time)
        self.clock = clock
        self.host = Host(driver, understanding, Answers(INSTANCE), watch, clock.time, MAX_BODY)
        given = routes(self.host, HealthService()), H2Limits(max_message=MAX_BODY + (64 << 10))
        self.server = H2Server(*given, merge_wakeups=True) if transport is H2Server else GrpcServer(*given)
        self.leases: set[bytes] = set()

    async def __aenter__(self) -> Self:
        self._port = await self.server.listen("127.0.0.1")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.close()

    async def play(self, stream: Stream, path: str = EXT_PROC) -> Heard:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            async with asyncio.timeout(PATIENCE):
                heard = await Player(reader, writer, stream).play(path)
        finally:
            await hang_up(writer)
        self.leases.update(LEASE.findall(heard.body))
        self.clock.advance(0.0)  # what was put off to a turn of its own
        self.pipeline.validate()
        return heard._replace(body=LEASE.sub(MASK, heard.body))

    def is_empty(self) -> bool:
        """Whether no lease is left. Some sessions wait a moment for the entry with which an access log opens."""
        self.clock.advance(0.1)
        return len(self.fleet.ledger) == 0

    async def log(self, stack: AsyncExitStack) -> None:
        """Connect an access log, until the stack ends. It tells the end of everything then."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        player = Player(reader, writer, Stream((), [], WIDE))
        await player.begin(access_log.PATH)
        await player.flush()
        await until(lambda: self.host.logs.connected == 1)

        async def end() -> None:
            for lease in sorted(self.leases):
                # The tag of the embedded gateway's entries; the rest of an entry is not read then.
                summary = lease + b" 200 - - 0 - -;"
                player.send(b"\x0a\x08fairlead\x12" + bytes([len(summary)]) + summary)
                await player.flush()
            await until(lambda: len(self.fleet.ledger) == 0)

        stack.push_async_callback(hang_up, writer)
        stack.push_async_callback(end)


async def until(ready: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not ready():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def sides(log: bool, models: bool = True) -> AsyncIterator[tuple[Side, Side]]:
    """The own transport's, and the reference's. At the end nothing is left of any request on either."""
    async with AsyncExitStack() as stack:
        own = await stack.enter_async_context(Side(H2Server, models))
        reference = await stack.enter_async_context(Side(GrpcServer, models))
        if log:
            for side in (own, reference):
                await side.log(stack)
        yield own, reference
        for side in (own, reference) if not log else ():
            await until(side.is_empty)
    for side in (own, reference):
        side.pipeline.validate()
        assert len(side.fleet.ledger) == 0
        assert side.host.logs.connected == 0


async def both(pair: tuple[Side, Side], stream: Stream) -> tuple[Heard, Heard]:
    own, reference = await asyncio.gather(*(side.play(stream) for side in pair))
    return own, reference


def answers(heard: Heard) -> Iterator[bytes]:
    body = heard.body
    while body:
        size = int.from_bytes(body[1:5], "big")
        yield body[5 : 5 + size]
        body = body[5 + size :]


# ---- the tests ----

LOGS = pytest.mark.parametrize("log", [False, True], ids=["without log", "with log"])


@LOGS
async def test_recorded_streams_are_answered_alike(log: bool) -> None:
    assert len(RECORDINGS) >= 10
    async with sides(log, models=False) as pair:
        for file in RECORDINGS:
            own, reference = await both(pair, recorded(file))
            assert own == reference, file.name
            assert own.status == OK and own.reset is None, file.name
            assert own.body.count(MASK) == 1 and DESTINATION.encode() in own.body, file.name


@LOGS
async def test_generated_streams_are_answered_alike(pb: ModuleType, log: bool) -> None:
    statuses: Counter[bytes] = Counter()
    kinds: Counter[str] = Counter()
    async with sides(log) as pair:
        for seed in range(STREAMS):
            stream = Generator(pb, seed).stream()
            own, reference = await both(pair, stream)
            assert own == reference, f"seed {seed}"
            statuses[own.status] += 1
            kinds.update(pb.ProcessingResponse.FromString(each).WhichOneof("response") for each in answers(own))
        assert pair[0].leases == pair[1].leases and len(pair[0].leases) > STREAMS / 3
    assert statuses.keys() == {OK, INVALID_ARGUMENT}
    assert min(statuses.values()) > STREAMS / 20
    assert len(kinds) == 7 and min(kinds.values()) >= 5, "every answer there is"


async def test_responses_of_the_gateway_itself_are_answered_alike(pb: ModuleType) -> None:
    """Before it has shown any of the request, and before the request is complete."""
    async with sides(log=False) as pair:
        for request, response, seen in itertools.product(MODES, MODES, (False, True)):
            if seen and request == NONE:  # the choice is made then
                continue
            own, reference = await both(pair, Generator(pb, 0).refused((request, response, True), seen))
            assert own == reference, (request, response, seen)
            told = [pb.ProcessingResponse.FromString(each) for each in answers(own)]
            kinds = [each.WhichOneof("response") for each in told if each.WhichOneof("response") != "request_headers"]
            assert own.status == OK and kinds[0] == "response_headers", (request, response, seen)
            if response == FULL_DUPLEX:
                assert told[-1].response_body.response.body_mutation.streamed_response.body == b"request timeout"
            assert len(kinds) == (2 if response == FULL_DUPLEX else 1)
        assert not pair[0].leases


@LOGS
async def test_streams_that_are_cancelled_leave_nothing_behind(pb: ModuleType, log: bool) -> None:
    """What is answered before a half-close is answered before a reset."""
    async with sides(log) as pair:
        for seed in range(1000, 1000 + STREAMS // 5):
            stream = Generator(pb, seed).stream()
            ended, _ = await both(pair, stream)
            own, reference = await both(pair, stream._replace(reset_after=len(ended.body)))
            # Each request goes to the next endpoint, and their addresses are equally long.
            assert own.body == reference.body and len(own.body) == len(ended.body), f"seed {seed}"


async def test_the_reference_never_leaves_a_full_duplex_response_at_the_pick(pb: ModuleType) -> None:
    """The only difference: it cannot tell whether everything fits into one write."""
    left, stayed = (recorded(DATA / f"{name}.json") for name in ("json-full-duplex-log", "json-full-duplex"))
    async with sides(log=True, models=False) as pair:
        own, reference = await both(pair, left._replace(messages=stayed.messages, window=WIDE))
        kinds = [pb.ProcessingResponse.FromString(each).WhichOneof("response") for each in answers(reference)]
        assert kinds == ["request_headers", "request_body", "response_headers", "response_body", "response_body"]
        assert own.status == reference.status == OK
        assert list(answers(own)) == list(answers(reference))[:2]
