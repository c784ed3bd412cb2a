"""Sessions over the own HTTP/2 transport: what arrives together is answered together."""

from functools import partial
from random import Random
from types import ModuleType
from typing import Any

import pytest

from fairlead.core.endpoint import Endpoint
from fairlead.core.events import EndpointUp
from fairlead.core.fleet import Fleet
from fairlead.core.prefix import ChainHasher
from fairlead.core.profile import Profile
from fairlead.core.scheduler import Pipeline
from fairlead.core.tokens import TokenEstimator
from fairlead.gateway import h2
from fairlead.gateway.answers import Answers
from fairlead.gateway.driver import Driver
from fairlead.gateway.grpc_frames import PREFIX
from fairlead.gateway.host import Host
from fairlead.gateway.session import Session
from fairlead.gateway.understand import Understanding
from fairlead.plugins.params import NoParams
from fairlead.plugins.pickers import RoundRobin
from fairlead.server.observe.watch import Watch
from fairlead.testing import SimClock

BODY = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": true}'
FULL_DUPLEX = 4


def host() -> Host:
    clock, fleet, tokens = SimClock(), Fleet(), TokenEstimator()
    watch = Watch(fleet, clock.time)
    pipeline = Pipeline(clock, Random(1), fleet, Profile("rr", [], [], RoundRobin(NoParams())), tokens)
    driver = Driver(pipeline, clock, watch)
    driver.feed(EndpointUp(Endpoint("e", "10.0.0.1:80")))
    return Host(driver, Understanding(tokens, ChainHasher(), clock.time), Answers("ab"), watch, clock.time)


class Gateway:
    """Speaks ext_proc in full-duplex mode on stream 1."""

    def __init__(self, connect: Any, pb: ModuleType) -> None:
        self.pb = pb
        self.peer = connect().shake()
        self.peer.make = partial(Session, host())
        self.peer.feed(self.peer.headers(1))

    def say(self, *messages: Any) -> None:
        """All of them in one read, each in a frame of its own."""
        whole = (message.SerializeToString() for message in messages)
        self.peer.feed(*(h2.frame(h2.DATA, 0, 1, PREFIX.pack(0, len(data)) + data) for data in whole))

    def request(self) -> None:
        headers, body = self.pb.ProcessingRequest(), self.pb.ProcessingRequest()
        headers.protocol_config.request_body_mode = headers.protocol_config.response_body_mode = FULL_DUPLEX
        headers.request_headers.headers.headers.add(key=":path", raw_value=b"/v1/chat/completions")
        body.request_body.body, body.request_body.end_of_stream = BODY, True
        self.say(headers, body)

    def response(self) -> None:
        message = self.pb.ProcessingRequest()
        for key, value in ((":status", b"200"), ("content-type", b"text/event-stream")):
            message.response_headers.headers.headers.add(key=key, raw_value=value)
        self.say(message)

    def chunk(self, body: bytes, last: bool = False) -> Any:
        message = self.pb.ProcessingRequest()
        message.response_body.body, message.response_body.end_of_stream = body, last
        return message

    def echoed(self) -> list[bytes]:
        frames = [payload for kind, _, _, payload in self.peer.frames() if kind == h2.DATA]
        answers = (self.pb.ProcessingResponse.FromString(payload[PREFIX.size :]) for payload in frames)
        return [answer.response_body.response.body_mutation.streamed_response.body for answer in answers]


@pytest.mark.parametrize("count", [1, 2, 40])
async def test_chunks_that_arrive_together_leave_in_one_write(connect: Any, pb: ModuleType, count: int) -> None:
    gateway = Gateway(connect, pb)
    gateway.request()
    gateway.response()
    gateway.peer.frames()
    writes = len(gateway.peer.transport.writes)
    chunks = [b'data: {"choices": [{"text": "%d"}]}\n\n' % number for number in range(count)]
    gateway.say(*(gateway.chunk(body) for body in chunks))
    assert len(gateway.peer.transport.writes) == writes + 1
    assert gateway.echoed() == chunks


async def test_headers_and_body_in_one_read_are_answered_in_one_write(connect: Any, pb: ModuleType) -> None:
    gateway = Gateway(connect, pb)
    writes = len(gateway.peer.transport.writes)
    gateway.request()
    assert len(gateway.peer.transport.writes) == writes + 1


async def test_the_last_chunk_and_the_end_of_the_stream_leave_together(connect: Any, pb: ModuleType) -> None:
    gateway = Gateway(connect, pb)
    gateway.request()
    gateway.response()
    writes = len(gateway.peer.transport.writes)
    gateway.say(gateway.chunk(b"data: 1\n\n"), gateway.chunk(b"data: [DONE]\n\n", last=True))
    assert len(gateway.peer.transport.writes) == writes + 1
    assert gateway.peer.trailers()["grpc-status"] == "0"
