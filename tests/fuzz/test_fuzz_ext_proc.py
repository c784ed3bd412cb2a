"""Random bytes, and mutated and shuffled conversations, against ext_proc sessions: they never raise, leak or babble.

Valid messages are built, and all answers are read, by generated protobuf classes that know nothing of our codec.
"""

import contextlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Struct

from fairlead.core.endpoint import Endpoint
from fairlead.core.errors import ProtocolError
from fairlead.core.events import EndpointDown, EndpointUp
from fairlead.core.headers import ACCESS_LOG_METADATA, CONTROL_HEADERS, DESTINATION, WHOLE_BODY_METADATA
from fairlead.gateway.access_log import AccessLogStream
from fairlead.gateway.ext_proc import LEASE_KEY, SUBSET_KEY, SUBSET_NAMESPACE, Incoming
from fairlead.gateway.session import Session

fuzz = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
sessions = pytest.mark.fuzzer("sessions")
codec = pytest.mark.fuzzer("ext_proc messages")

NONE, STREAMED, BUFFERED, PARTIAL, FULL_DUPLEX = range(5)
REQUEST = ("request_headers", "request_body", "request_trailers")
RESPONSE = ("response_headers", "response_body", "response_trailers")
BODY = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": %s}'
ODD_BODIES = [b"", b"{", b"[]", b'{"messages": 1}', b"\xff", b"x" * 150, b'{"model":"\\ud800","prompt":"a"}']
SSE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":5}}\n\n'
CHUNKS = [b"", b"data: {}\n\n", SSE, b'data: {"error":{"code":503}}\n\n', b"data: [DONE]\n\n", b"\xff", b"y" * 70_000]
ODD_HEADERS = [":status", "content-length", "x-session-id", "x-slo-ttft-ms", "x-original-path", "X-Case", "",
               *sorted(CONTROL_HEADERS)]  # fmt: skip


class Message(Struct, frozen=True):
    """A ProcessingRequest to be."""

    kind: str
    eos: bool = False
    body: bytes = b""
    headers: tuple[tuple[str, bytes], ...] = ()
    modes: tuple[int, int, bool] | None = None
    subset: tuple[Any, ...] | None = None
    attributes: tuple[tuple[str, Any], ...] = ()

    def encode(self, pb: ModuleType) -> bytes:
        message = pb.ProcessingRequest()
        part = getattr(message, self.kind)
        part.SetInParent()
        if self.kind.endswith("body"):
            part.body, part.end_of_stream = self.body, self.eos
        else:
            headers = part.trailers if self.kind.endswith("trailers") else part.headers
            for name, value in self.headers:
                headers.headers.add(key=name, raw_value=value)
            if self.kind.endswith("headers"):
                part.end_of_stream = self.eos
        if self.modes is not None:
            config = message.protocol_config
            config.request_body_mode, config.response_body_mode = self.modes[:2]
            config.send_body_without_waiting_for_header_response = self.modes[2]
            config.SetInParent()
        if self.subset is not None:
            message.metadata_context.filter_metadata[SUBSET_NAMESPACE].update({SUBSET_KEY: list(self.subset)})
        if self.attributes:
            message.attributes["envoy.filters.http.ext_proc"].update(dict(self.attributes))
        return bytes(message.SerializeToString())


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5).filter(lambda text: text.isascii()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "response.code"]), inner),
    max_leaves=5,
)
values = st.sampled_from([b"", b"200", b"5" * 5000, b"nan", b"text/event-stream", b"gzip"]) | st.binary(max_size=200)
odd_headers = st.lists(st.tuples(st.sampled_from(ODD_HEADERS), values), max_size=4)
subsets = st.lists(st.sampled_from(["10.0.0.1:80", " 10.0.0.0 ", "10.9.9.9:1"]) | json_values, max_size=3).map(tuple)


@st.composite
def heads(draw: st.DrawFn, modes: tuple[int, int, bool]) -> Message:
    path = draw(st.sampled_from([b"/v1/chat/completions"] * 5 + [b"/v1/completions", b"/v1/models", b"", b"\xff"]))
    headers = ((":path", path), ("content-type", b"application/json"), *draw(odd_headers))
    subset = draw(st.none() | st.none() | st.none() | subsets)
    return Message("request_headers", draw(st.integers(0, 9)) == 0, b"", headers, modes, subset)


@st.composite
def requests(draw: st.DrawFn, modes: tuple[int, int, bool], one: bool) -> list[Message]:
    """What a gateway in these modes sends of one request; `one` = the body in one message."""
    messages = [draw(heads(modes))]
    if messages[0].eos or modes[0] == NONE:
        return messages
    body = draw(st.sampled_from([BODY % b"true"] * 5 + [BODY % b"false"] * 3 + ODD_BODIES))
    cut = draw(st.integers(0, len(body)))
    pieces = (
        [body] if one or modes[0] in (BUFFERED, PARTIAL) else draw(st.sampled_from([[body], [body[:cut], body[cut:]]]))
    )
    trailers = draw(st.integers(0, 5)) == 0
    whole = modes[0] != PARTIAL or draw(st.booleans())
    for i, piece in enumerate(pieces):
        last = i == len(pieces) - 1
        messages.append(Message("request_body", last and whole and not trailers, piece))
    if trailers:
        messages.append(Message("request_trailers", headers=(("grpc-status", b"0"),)))
    return messages


@st.composite
def responses(draw: st.DrawFn, modes: tuple[int, int, bool]) -> list[Message]:
    status = draw(st.sampled_from([b"200", b"200", b"200", b"404", b"503", b"0", b"-1", b"\xb2", b"9" * 5000]))
    kind = draw(st.sampled_from([b"text/event-stream", b"application/json", b"text/html"]))
    headers = ((":status", status), ("content-type", kind), *draw(odd_headers))
    messages = []
    if draw(st.integers(0, 4)):
        messages.append(Message("response_headers", draw(st.integers(0, 7)) == 0, b"", headers))
        if messages[0].eos or modes[1] == NONE:
            return messages
    chunks = draw(st.lists(st.sampled_from(CHUNKS), max_size=4))
    trailers = draw(st.integers(0, 4)) == 0
    code = (("response.code", draw(st.sampled_from([200.0, float("nan"), "x", -1.0, 1e300]) | json_values)),)
    for i, chunk in enumerate(chunks):
        attributes = code if i == 0 and draw(st.booleans()) else ()
        messages.append(Message("response_body", i == len(chunks) - 1 and not trailers, chunk, attributes=attributes))
    if trailers:
        messages.append(Message("response_trailers"))
    return messages


class Plan(Struct, frozen=True):
    """One stream: how it is announced, its messages, and how it ends if we do not end it."""

    messages: tuple[Message, ...]
    wired: bool
    whole: bool
    window: int
    cancelled: bool


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    modes = draw(st.tuples(st.integers(0, 4), st.integers(0, 4), st.booleans()))
    whole = modes[0] == STREAMED and draw(st.booleans())
    messages = [*draw(requests(modes, whole)), *draw(responses(modes))]
    messages = messages[: draw(st.integers(1, 20))]
    return Plan(
        tuple(messages), draw(st.booleans()), whole, draw(st.sampled_from([0, 100, 65_536])), draw(st.booleans())
    )


KINDS = ["flip", "flip", "cut", "add", "double", "swap", "drop"]
some = st.integers(0, 10**6)
changes = st.lists(st.tuples(some, st.sampled_from(KINDS), some), min_size=1, max_size=5)


def mutate(messages: Sequence[bytes], how: Sequence[tuple[int, str, int]]) -> list[bytes]:
    """Change bytes of some messages, and the order of messages."""
    found = list(messages)
    for place, what, number in how:
        if not found:
            break
        i = place % len(found)
        message = bytearray(found[i])
        at = number % (min(len(message), 60) + 1)
        if what == "flip" and message:
            message[at % len(message)] ^= 1 << place % 8
            found[i] = bytes(message)
        elif what == "cut":
            found[i] = bytes(message[:at])
        elif what == "add":
            found[i] = bytes(message[:at]) + number.to_bytes(3, "big") * (place % 9) + bytes(message[at:])
        elif what == "double":
            found.insert(i, found[number % len(found)])
        elif what == "swap":
            j = number % len(found)
            found[i], found[j] = found[j], found[i]
        elif what == "drop":
            del found[i]
    return found


class Stream:
    """One session and the gateway's side of it."""

    def __init__(self, rig: Any, wire: Any, pb: ModuleType, wired: bool = True, whole: bool = False) -> None:
        metadata = {name: "1" for name, on in ((ACCESS_LOG_METADATA, wired), (WHOLE_BODY_METADATA, whole)) if on}
        self.rig, self.wire, self.pb = rig, wire, pb
        self.session = Session(rig.host, wire, metadata)

    def message(self, data: bytes) -> None:
        if self.wire.status is None:
            self.session.on_message(data)
            self.rig.check()

    def end(self, cancelled: bool) -> None:
        if self.wire.status is None:
            if cancelled:
                self.session.on_lost("reset")
            else:
                self.session.on_half_close()
                assert self.wire.status == 0
        self.rig.check()
        self.check_answers()

    def check_answers(self) -> None:
        """Readable for others, in the order that the protocol demands, with one destination at most."""
        answers = [self.pb.ProcessingResponse.FromString(message) for message in self.wire.sent]
        kinds = [answer.WhichOneof("response") for answer in answers]
        assert "immediate_response" not in kinds[:-1]
        for side in (REQUEST, RESPONSE):
            own = [side.index(kind) for kind in kinds if kind in side]
            assert own == sorted(own)
            assert own.count(0) <= 1 and own.count(2) <= 1
        assert set(kinds) <= {*REQUEST, *RESPONSE, "immediate_response"}
        refusals = [answer for answer in answers if answer.WhichOneof("response") == "immediate_response"]
        picks = [answer for answer in answers if answer.HasField("dynamic_metadata") and answer not in refusals]
        assert len(picks) <= 1
        for answer in picks:
            (header,) = getattr(answer, answer.WhichOneof("response")).response.header_mutation.set_headers
            assert header.header.key == DESTINATION
            assert header.header.raw_value.decode() == answer.dynamic_metadata["envoy.lb"][DESTINATION]
        for answer in refusals:
            assert answer.immediate_response.status.code in (400, 413, 503) and answer.immediate_response.body
            if answer.HasField("dynamic_metadata"):
                assert [*answer.dynamic_metadata["envoy.lb"]] == [LEASE_KEY]


def finish(rig: Any, wires: Any) -> None:
    """The access log ends what nobody else has."""
    log = wires()
    stream = AccessLogStream(log, rig.host.logs)
    for lease in rig.leased():
        stream.on_message(b"\x0a\x08fairlead\x12\x7f" + lease.encode() + b" 200 - - 0 - -;")
    assert log.status is None
    stream.on_lost("gone")
    rig.end()


@sessions
@given(st.lists(st.binary(max_size=60), max_size=6), st.booleans())
@fuzz
def test_random_bytes(pb: ModuleType, rigs: Any, wires: Any, messages: list[bytes], cancelled: bool) -> None:
    rig = rigs()
    rig.host.logs.connected = 1
    stream = Stream(rig, wires(), pb)
    for message in messages:
        stream.message(message)
    stream.end(cancelled)
    finish(rig, wires)


@pytest.mark.slow
@sessions
@given(plans(), st.integers(0, 2), st.booleans())
@fuzz
def test_what_gateways_send_is_never_refused(
    pb: ModuleType, rigs: Any, wires: Any, plan: Plan, endpoints: int, inspect: bool
) -> None:
    rig = rigs(endpoints, 200, inspect)
    rig.host.logs.connected = 1
    stream = Stream(rig, wires(plan.window), pb, plan.wired, plan.whole)
    for message in plan.messages:
        stream.message(message.encode(pb))
    assert stream.wire.status in (None, 0)
    stream.end(plan.cancelled)
    finish(rig, wires)


@pytest.mark.slow
@sessions
@given(st.lists(st.tuples(plans(), changes), min_size=1, max_size=3), st.lists(st.integers(0, 30), max_size=30))
@fuzz
def test_mutated_and_mixed(
    pb: ModuleType, rigs: Any, wires: Any, mutated: list[tuple[Plan, Any]], turns: list[int]
) -> None:
    """Several streams at once; in between endpoints and access logs come and go."""
    rig = rigs()
    log = AccessLogStream(wires(), rig.host.logs)
    streams = []
    for plan, how in mutated:
        messages = [message.encode(pb) for message in plan.messages]
        stream = Stream(rig, wires(plan.window), pb, plan.wired, plan.whole)
        streams.append((stream, mutate(messages, how), plan))
    for turn in turns:
        stream, messages, _ = streams[turn % len(streams)]
        if turn == 28:
            rig.driver.feed(EndpointDown("default/e0"))
        elif turn == 29:
            rig.driver.feed(EndpointUp(Endpoint("default/e0", "10.0.0.9:80")))
        elif turn == 30:
            log.on_lost("gone")
        elif messages:
            stream.message(messages.pop(0))
    for stream, messages, plan in streams:
        for message in messages:
            stream.message(message)
        stream.end(plan.cancelled)
    log.on_lost("gone")
    finish(rig, wires)


@codec
@given(plans())
@fuzz
def test_the_codec_reads_what_others_wrote(pb: ModuleType, plan: Plan) -> None:
    for message in plan.messages:
        incoming = Incoming(message.encode(pb))
        assert incoming.kind.name.lower() == message.kind
        assert incoming.modes() == message.modes
        if message.kind.endswith("body"):
            assert incoming.body() == (message.body, message.eos)
        elif message.kind.endswith("headers"):
            expected = {name.lower(): value.decode("latin-1") for name, value in message.headers}
            assert incoming.headers() == (expected, message.eos)
        hint = message.subset
        wanted = None if hint is None else frozenset(entry.strip() for entry in hint if isinstance(entry, str))
        assert incoming.subset() == wanted
        assert incoming.attributes().keys() == dict(message.attributes).keys()


@codec
@given(plans(), changes)
@fuzz
def test_the_codec_on_mutated_messages(pb: ModuleType, plan: Plan, how: Any) -> None:
    """Whatever it is asked: an answer or `ProtocolError`."""
    for data in mutate([message.encode(pb) for message in plan.messages], how):
        try:
            incoming = Incoming(data)
        except ProtocolError:
            continue
        for question in (incoming.modes, incoming.headers, incoming.body, incoming.subset, incoming.attributes):
            with contextlib.suppress(ProtocolError):
                question()
