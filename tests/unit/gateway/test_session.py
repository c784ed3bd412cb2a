"""One ext_proc stream at a time, without a transport: every mode, every exit, and a ledger that returns to zero."""

import asyncio
import random
from functools import partial

import pytest

from fairlead.core.endpoint import Endpoint
from fairlead.core.events import EndpointUp, ModelsChanged, UsageReported
from fairlead.core.fleet import Fleet
from fairlead.core.headers import ACCESS_LOG_METADATA, RESIZABLE_METADATA, WHOLE_BODY_METADATA
from fairlead.core.instructions import Reject, Route
from fairlead.core.models import InferenceModel, ModelSet, Origin, Target
from fairlead.core.prefix import ChainHasher
from fairlead.core.profile import Profile
from fairlead.core.scheduler import Pipeline
from fairlead.core.tokens import TokenEstimator
from fairlead.gateway.access_log import AccessLogStream
from fairlead.gateway.answers import Answers
from fairlead.gateway.driver import Driver
from fairlead.gateway.host import Host
from fairlead.gateway.protobuf import field, number, string_struct
from fairlead.gateway.session import FIRST_INSPECTED, MOST_INSPECTED, Inspection, Session
from fairlead.gateway.understand import PromptKnown, Understanding
from fairlead.plugins.filters.ability import Subset
from fairlead.plugins.params import NoParams
from fairlead.plugins.pickers import RoundRobin
from fairlead.testing import builders

NONE, STREAMED, BUFFERED, PARTIAL, FULL_DUPLEX = range(5)
BODY = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": true}'


class Clock:
    def __init__(self):
        self.now, self.timers = 100.0, []

    def time(self):
        return self.now

    def call_at(self, when, callback, *args):
        self.timers.append(partial(callback, *args))
        return self

    def run_timers(self):
        timers, self.timers = self.timers, []
        for timer in timers:
            timer()

    def cancel(self):
        pass


class Wire:
    """A transport that remembers. `window` is what `room` reports."""

    def __init__(self, window=65_536):
        self.sent, self.status, self.window = [], None, window

    def send(self, *messages):
        self.sent += messages

    def send_last(self, *messages):
        self.send(*messages)
        self.finish()

    def finish(self, code=0, message=""):
        if self.status is None:
            self.status = code

    def writable_bytes(self):
        return self.window

    held = 0

    def hold(self, size, expected=0):
        self.held = max(size, expected)

    def watch_cancel(self, on):
        self.watching = on

    up = True

    def connected(self):
        return self.up


class Seen:
    def __init__(self):
        self.decisions, self.outcomes, self.errors, self.broken, self.left = [], [], [], [], []
        self.tenants = []

    def on_decision(self, record, duration_s):
        self.decisions.append(record)

    def on_outcome(self, record):
        self.outcomes.append(record)

    def on_client_error(self, api, status, reason, headers, tenant=""):
        self.errors.append((api, status))
        self.tenants.append(tenant)

    def on_protocol_error(self, reason):
        self.broken.append(reason)

    def on_left(self, request):
        self.left.append(request)


class Rig:
    """A host with two endpoints; `open` starts a session in the given modes."""

    def __init__(self, pb, inspect=False, max_body=1 << 20, endpoints=2, prompts=None):
        self.pb, self.clock, self.seen = pb, Clock(), Seen()
        tokens = TokenEstimator()
        self.fleet = Fleet()
        profile = Profile("rr", [Subset(NoParams())], [], RoundRobin(NoParams()))
        self.pipeline = Pipeline(self.clock, random.Random(1), self.fleet, profile, tokens)
        self.driver = Driver(self.pipeline, self.clock, self.seen)
        for i in range(endpoints):
            self.driver.feed(EndpointUp(Endpoint(f"e{i}", f"10.0.0.{i}:80")))
        understanding = Understanding(tokens, ChainHasher(), self.clock.time, prompts=prompts)
        self.host = Host(
            self.driver,
            understanding,
            Answers("ab"),
            self.seen,
            self.clock.time,
            max_body,
            lambda request, stream: inspect,
        )

    def open(self, request_mode, response_mode, wired=True, eager=False, window=65_536, whole=False, resizable=False):
        if wired and not self.host.logs.connected:
            self.host.logs.connected = 1
        wire = Wire(window)
        metadata = {ACCESS_LOG_METADATA: "1"} if wired else {}
        metadata |= {WHOLE_BODY_METADATA: "1"} if whole else {}
        metadata |= {RESIZABLE_METADATA: "1"} if resizable else {}
        session = Session(self.host, wire, metadata)
        self.modes = request_mode, response_mode, eager
        return wire, session

    def _message(self):
        message = self.pb.ProcessingRequest()
        if self.modes:
            config = message.protocol_config
            config.request_body_mode, config.response_body_mode = self.modes[:2]
            config.send_body_without_waiting_for_header_response = self.modes[2]
            config.SetInParent()
            self.modes = None
        return message

    def request_headers(self, session, eos=False, path="/v1/chat/completions", **headers):
        message = self._message()
        message.request_headers.end_of_stream = eos
        for key, value in {":path": path, **headers}.items():
            message.request_headers.headers.headers.add(key=key.replace("_", "-"), raw_value=value.encode())
        session.on_message(message.SerializeToString())

    def body(self, session, body=BODY, eos=True):
        message = self._message()
        message.request_body.body, message.request_body.end_of_stream = body, eos
        message.request_body.SetInParent()
        session.on_message(message.SerializeToString())

    def response_headers(self, session, status=200, eos=False, kind="text/event-stream", **more):
        message = self._message()
        message.response_headers.end_of_stream = eos
        for key, value in {":status": str(status), "content-type": kind, **more}.items():
            message.response_headers.headers.headers.add(key=key, raw_value=value.encode())
        session.on_message(message.SerializeToString())

    def chunk(self, session, body, eos=False, **attributes):
        message = self._message()
        if attributes:
            named = {name.replace("_", ".", 1): value for name, value in attributes.items()}
            message.attributes["envoy.filters.http.ext_proc"].update(named)
        message.response_body.body, message.response_body.end_of_stream = body, eos
        message.response_body.SetInParent()
        session.on_message(message.SerializeToString())

    def trailers(self, session, request=True, **trailers):
        message = self._message()
        part = message.request_trailers if request else message.response_trailers
        part.SetInParent()
        for key, value in trailers.items():
            part.trailers.headers.add(key=key.replace("_", "-"), raw_value=value.encode())
        session.on_message(message.SerializeToString())

    def answers(self, wire):
        return [self.pb.ProcessingResponse.FromString(m) for m in wire.sent]

    def kinds(self, wire):
        return [a.WhichOneof("response") for a in self.answers(wire)]

    def leases(self):
        self.pipeline.validate()
        return len(self.fleet.ledger)


@pytest.fixture
def rig(pb):
    return Rig(pb)


def test_buffered_and_streamed_leaves_after_the_first_chunk(rig):
    wire, session = rig.open(BUFFERED, STREAMED)
    rig.request_headers(session)
    assert rig.kinds(wire) == ["request_headers"]
    rig.body(session)
    answer = rig.answers(wire)[1]
    metadata = answer.dynamic_metadata["envoy.lb"]
    assert metadata["x-gateway-destination-endpoint"] == "10.0.0.0:80"
    assert metadata["fairlead-lease"] == "ab.0000000000000001"
    assert answer.request_body.response.clear_route_cache
    assert not answer.request_body.response.HasField("body_mutation")
    rig.response_headers(session)
    assert rig.fleet.table.pending[0] == 1
    rig.chunk(session, b"data: {}\n\n")
    assert rig.fleet.table.pending[0] == 0
    assert wire.status == 0
    assert rig.kinds(wire) == ["request_headers", "request_body", "response_headers", "response_body"]
    assert rig.leases() == 1, "the access log ends it"


def test_without_an_access_log_it_stays_to_the_end_and_ends_the_lease_itself(rig):
    wire, session = rig.open(BUFFERED, STREAMED, wired=False)
    rig.request_headers(session)
    rig.body(session)
    rig.response_headers(session)
    rig.chunk(session, b"data: {}\n\n")
    assert wire.status is None
    rig.chunk(session, b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":5}}\n\n', eos=True)
    assert wire.status == 0
    assert rig.leases() == 0
    (outcome,) = rig.seen.outcomes
    assert (outcome.status, outcome.prompt_tokens, outcome.completion_tokens) == (200, 9, 5)
    assert outcome.cause == "natural"


def test_full_duplex_hands_the_body_back_and_leaves_at_the_pick_when_it_fits_one_write(rig):
    wire, session = rig.open(FULL_DUPLEX, FULL_DUPLEX)
    rig.request_headers(session)
    rig.body(session, BODY[:10], eos=False)
    rig.body(session, BODY[10:], eos=False)
    assert wire.sent == []
    rig.body(session, b"", eos=True)
    headers, body = rig.answers(wire)
    assert headers.request_headers.response.header_mutation.set_headers[0].header.raw_value == b"10.0.0.0:80"
    streamed = body.request_body.response.body_mutation.streamed_response
    assert (streamed.body, streamed.end_of_stream) == (BODY, True)
    assert wire.status == 0


def test_header_and_metadata_name_several_endpoints_where_it_is_to_be_so(rig):
    rig.pipeline.alternatives = 1
    wire, session = rig.open(FULL_DUPLEX, FULL_DUPLEX)
    rig.request_headers(session)
    rig.body(session, BODY)
    headers = rig.answers(wire)[0]
    named = headers.request_headers.response.header_mutation.set_headers[0].header.raw_value.decode()
    assert named == headers.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"]
    assert named.split(",") in (["10.0.0.0:80", "10.0.0.1:80"], ["10.0.0.1:80", "10.0.0.0:80"])


def test_full_duplex_stays_when_the_window_is_too_small_and_echoes_to_the_end(rig):
    wire, session = rig.open(FULL_DUPLEX, FULL_DUPLEX, window=100)
    rig.request_headers(session)
    rig.body(session)
    assert wire.status is None
    rig.response_headers(session)
    rig.chunk(session, b"data: 1\n\n")
    assert wire.status is None, "leaving later than at the pick loses bytes"
    rig.chunk(session, b"data: 2\n\n", eos=True)
    echoed = [a.response_body.response.body_mutation.streamed_response for a in rig.answers(wire)[-2:]]
    assert [(e.body, e.end_of_stream) for e in echoed] == [(b"data: 1\n\n", False), (b"data: 2\n\n", True)]
    assert wire.status == 0


@pytest.mark.parametrize(
    ("turns", "broken", "failures"),
    [
        (12, lambda turn: (True, False), 1),
        (12, lambda turn: (True, True), 0),  # clients leave both
        (24, lambda turn: (turn % 11 < 10, False), 0),  # one that ends makes up for those before it
    ],
)
def test_an_endpoint_whose_answers_all_break_off_is_avoided_without_an_access_log(rig, turns, broken, failures):
    """Nobody tells whether a client left or the model server broke off."""
    for turn in range(turns):
        for unfinished in broken(turn):
            _, session = rig.open(FULL_DUPLEX, FULL_DUPLEX, wired=False)
            rig.request_headers(session)
            rig.body(session)
            rig.response_headers(session)
            rig.chunk(session, b"data: {}\n\n", eos=not unfinished)
            session.on_lost("reset")
    assert [outcome.cause for outcome in rig.seen.outcomes if outcome.endpoint == "e0"].count(
        "upstream-reset"
    ) == failures
    assert [until > rig.clock.now for until in rig.fleet.table.ejected_until[:2]] == [bool(failures), False]
    assert rig.leases() == 0


@pytest.mark.parametrize(
    ("prompt", "session", "elsewhere", "failures"),
    [
        (lambda turn: "same " * 100, "", "", 0),
        (lambda turn: f"{turn} " * 100, "one", "", 0),
        (lambda turn: f"{turn} " * 100, "", "", 1),
        (lambda turn: "same " * 100, "", "same " * 100, 1),
    ],
    ids=["one prompt", "one session", "many clients", "one prompt that ends well elsewhere"],
)
def test_a_client_that_leaves_its_answers_takes_no_endpoint_out_of_use(rig, prompt, session, elsewhere, failures):
    """Its prompts go to one endpoint, for their cache, so the others are not left as often."""

    def ask(text, ended):
        _, stream = rig.open(FULL_DUPLEX, FULL_DUPLEX, wired=False)
        rig.request_headers(stream, **{} if ended else {"x-session-id": session})
        rig.body(stream, BODY.replace(b"hi", text.encode()))
        rig.response_headers(stream)
        rig.chunk(stream, b"data: {}\n\n", eos=ended)
        stream.on_lost("reset")

    for turn in range(12):
        ask(prompt(turn), ended=False)
        ask(elsewhere or f"else {turn} " * 100, ended=True)
    assert [outcome.cause for outcome in rig.seen.outcomes].count("upstream-reset") == failures
    assert [until > rig.clock.now for until in rig.fleet.table.ejected_until[:2]] == [bool(failures), False]


def test_full_duplex_without_access_log_never_leaves_early(rig):
    wire, session = rig.open(FULL_DUPLEX, FULL_DUPLEX, wired=False)
    rig.request_headers(session)
    rig.body(session)
    assert wire.status is None
    rig.response_headers(session)
    rig.chunk(session, b"x")
    rig.trailers(session, request=False)
    assert rig.kinds(wire)[-1] == "response_trailers"
    assert wire.status == 0
    assert rig.leases() == 0


def test_a_request_that_ends_by_trailers(rig):
    wire, session = rig.open(FULL_DUPLEX, FULL_DUPLEX, wired=False)
    rig.request_headers(session)
    rig.body(session, eos=False)
    rig.trailers(session)
    assert rig.kinds(wire) == ["request_headers", "request_body", "request_trailers"]
    assert not rig.answers(wire)[1].request_body.response.body_mutation.streamed_response.end_of_stream


def test_a_bodyless_request_is_scheduled_on_its_headers(rig):
    wire, session = rig.open(BUFFERED, NONE)
    rig.request_headers(session, eos=True, path="/v1/models")
    assert rig.answers(wire)[0].dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"]
    assert wire.status == 0, "nothing follows, and the access log tells the end"


def test_response_mode_none_without_access_log_sees_the_status_and_releases(rig):
    wire, session = rig.open(BUFFERED, NONE, wired=False)
    rig.request_headers(session)
    rig.body(session)
    assert wire.status is None
    rig.response_headers(session, status=503)
    assert wire.status == 0
    assert rig.leases() == 0
    assert rig.seen.outcomes[0].status == 503


@pytest.mark.parametrize(("response_mode", "blind"), [(NONE, True), (FULL_DUPLEX, True), (STREAMED, False)])
def test_first_tokens_are_expected_where_responses_are_shown(rig, response_mode, blind):
    _, session = rig.open(STREAMED, response_mode, eager=True)
    rig.request_headers(session)
    rig.body(session, b'{"model": "m", "stream": true, "messages": [{"role": "user", "content": "hi"}]}')
    assert [lease.blind for lease in rig.fleet.ledger] == [blind]


def test_streamed_requests_are_chosen_on_headers_unless_the_body_comes_along(rig):
    wire, session = rig.open(STREAMED, STREAMED)
    rig.request_headers(session)
    assert rig.answers(wire)[0].dynamic_metadata["envoy.lb"]
    rig.body(session, eos=False)
    rig.body(session)
    assert rig.kinds(wire) == ["request_headers", "request_body", "request_body"]

    wire, session = rig.open(STREAMED, STREAMED, eager=True)
    rig.request_headers(session)
    rig.body(session, BODY[:20], eos=False)
    assert wire.sent == []
    rig.body(session, BODY[20:])
    assert rig.kinds(wire) == ["request_headers", "request_body", "request_body"]
    assert rig.seen.decisions[-1].request.model == "m"


def test_a_whole_body_needs_no_end_of_stream_and_both_answers_go_together(rig):
    wire, session = rig.open(STREAMED, STREAMED, eager=True, whole=True)
    rig.request_headers(session)
    assert wire.sent == []
    rig.body(session, eos=False)
    assert rig.kinds(wire) == ["request_headers", "request_body"]
    assert rig.answers(wire)[0].dynamic_metadata["envoy.lb"]
    message = rig.pb.ProcessingRequest()
    message.response_body.body = b"data: {}\n\n"
    message.attributes["envoy.filters.http.ext_proc"].update({"response.code": 429})
    session.on_message(message.SerializeToString())
    assert wire.status == 0


def test_a_body_that_is_said_to_be_whole_and_is_not_is_collected_to_its_end(rig):
    """A gateway without a buffer in front announces it all the same."""
    for modes in ((FULL_DUPLEX, FULL_DUPLEX, False), (STREAMED, STREAMED, True)):
        wire, session = rig.open(*modes[:2], eager=modes[2], whole=True)
        length = {} if modes[0] == FULL_DUPLEX else {"content-length": str(len(BODY))}
        rig.request_headers(session, **length)
        rig.body(session, BODY[:20], eos=False)
        assert wire.sent == []
        rig.body(session, BODY[20:])
        assert wire.sent and rig.seen.decisions[-1].request.model == "m"
        if modes[0] == FULL_DUPLEX:
            assert rig.answers(wire)[1].request_body.response.body_mutation.streamed_response.body == BODY


def test_an_answer_that_is_not_streamed_is_left_at_the_pick(rig):
    wire, session = rig.open(STREAMED, STREAMED, eager=True, whole=True)
    rig.request_headers(session)
    rig.body(session, BODY.replace(b"true", b"false"))
    assert wire.status == 0
    assert rig.leases() == 1


@pytest.mark.parametrize("response_mode", [NONE, STREAMED])
@pytest.mark.parametrize("timers_first", [True, False])
def test_after_a_hang_nobody_leaves_at_the_pick_because_the_gateway_may_have_given_up(rig, response_mode, timers_first):
    def pick():
        wire, session = rig.open(STREAMED, response_mode, eager=True, whole=True)
        rig.request_headers(session)
        rig.body(session, BODY.replace(b"true", b"false"))
        return wire, session

    rig.host.pulse.beat()
    rig.clock.now += 0.5
    rig.host.pulse.beat()
    assert pick()[0].status == 0
    assert rig.leases() == 1, "the access log ends it"
    rig.clock.now += 3.0
    if timers_first:
        rig.host.pulse.beat()
    wire, session = pick()
    assert wire.status is None
    session.on_lost("reset by the peer")
    rig.clock.run_timers()
    assert rig.leases() == 1, "the one that was given up is not held"
    for _ in range(3):
        rig.host.pulse.beat()
        rig.clock.now += 0.5
    assert pick()[0].status == 0


@pytest.mark.parametrize(
    ("served", "source", "inflight"),
    [
        ("10.0.0.1:80", "metadata", [0, 1]),
        ("10.0.0.0:80", "metadata", [1, 0]),
        ("10.9.9.9:80", "metadata", [1, 0]),  # nobody we know
        ("10.0.0.1:80", "header", [1, 0]),  # a model server says it
    ],
)
def test_the_lease_moves_to_who_served_as_the_gateway_says(rig, served, source, inflight):
    wire, session = rig.open(FULL_DUPLEX, FULL_DUPLEX, wired=False)
    rig.request_headers(session)
    rig.body(session)
    message = rig.pb.ProcessingRequest()
    message.response_headers.headers.headers.add(key=":status", raw_value=b"200")
    if source == "metadata":
        message.metadata_context.filter_metadata["envoy.lb"].update({"x-gateway-destination-endpoint-served": served})
    else:
        name = "x-gateway-destination-endpoint-served"
        message.response_headers.headers.headers.add(key=name, raw_value=served.encode())
    session.on_message(message.SerializeToString())
    rig.chunk(session, b"data: {}\n\n")
    assert list(rig.fleet.table.inflight[:2]) == inflight
    rig.chunk(session, b"data: {}\n\n", eos=True)
    assert (wire.status, rig.leases()) == (0, 0)


@pytest.mark.parametrize(("response", "ended"), [(FULL_DUPLEX, True), (STREAMED, True), (NONE, False)])
def test_who_served_is_believed_of_a_response_whose_body_is_not_seen(rig, response, ended):
    _, session = rig.open(FULL_DUPLEX, response, wired=False)
    rig.request_headers(session)
    rig.body(session)
    message = rig.pb.ProcessingRequest()
    message.response_headers.end_of_stream = ended
    message.response_headers.headers.headers.add(key=":status", raw_value=b"503")
    served = {"x-gateway-destination-endpoint-served": "10.0.0.1:80"}
    message.metadata_context.filter_metadata["envoy.lb"].update(served)
    session.on_message(message.SerializeToString())
    assert [(end.endpoint, end.unreached, end.status) for end in rig.seen.outcomes] == [("e1", "e0", 503)]
    assert rig.leases() == 0


def test_without_response_headers_the_status_is_an_attribute(rig):
    wire, session = rig.open(BUFFERED, STREAMED, wired=False)
    rig.request_headers(session)
    rig.body(session)
    message = rig.pb.ProcessingRequest()
    message.response_body.body, message.response_body.end_of_stream = b"data: {}\n\n", True
    message.attributes["envoy.filters.http.ext_proc"].update({"response.code": 429})
    session.on_message(message.SerializeToString())
    assert wire.status == 0
    assert rig.seen.outcomes[0].status == 429


def test_a_truncated_partial_body_is_waved_through(rig):
    wire, session = rig.open(PARTIAL, STREAMED)
    rig.request_headers(session)
    rig.body(session, BODY[:20], eos=False)
    assert rig.kinds(wire) == ["request_headers", "request_body"]
    assert wire.status == 0
    assert rig.seen.decisions == []


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"messages": 1}', b"\xff"])
def test_a_body_nobody_can_read_is_answered_400_in_the_api_s_shape(rig, body):
    wire, session = rig.open(BUFFERED, STREAMED)
    rig.request_headers(session, **{"x-llm-d-inference-fairness-id": "acme"})
    rig.body(session, body)
    immediate = rig.answers(wire)[1].immediate_response
    assert immediate.status.code == 400
    assert b'"error"' in immediate.body
    headers = {h.header.key: h.header.raw_value for h in immediate.headers.set_headers}
    assert headers["content-type"] == b"application/json"
    assert wire.status == 0
    assert (rig.seen.errors, rig.seen.tenants) == ([("chat", 400)], ["acme"])


def test_a_body_over_the_limit_is_answered_413_and_not_kept(pb):
    rig = Rig(pb, max_body=50)
    wire, session = rig.open(FULL_DUPLEX, FULL_DUPLEX)
    rig.request_headers(session)
    rig.body(session, b"x" * 40, eos=False)
    rig.body(session, b"x" * 40, eos=False)
    assert rig.answers(wire)[0].immediate_response.status.code == 413
    assert wire.status == 0


def test_no_endpoint_is_a_503_with_reason_and_retry_after(pb):
    rig = Rig(pb, endpoints=0)
    wire, session = rig.open(BUFFERED, STREAMED)
    rig.request_headers(session)
    rig.body(session)
    immediate = rig.answers(wire)[1].immediate_response
    headers = {h.header.key: h.header.raw_value for h in immediate.headers.set_headers}
    assert immediate.status.code == 503
    assert headers["x-llm-d-request-dropped-reason"] == b"rejected-no-endpoints"
    assert headers["retry-after"] == b"1"


def test_control_headers_of_the_client_are_removed(rig):
    wire, session = rig.open(BUFFERED, STREAMED)
    rig.request_headers(session, x_prefiller_host_port="evil:1", x_gateway_destination_endpoint="evil:2")
    rig.body(session)
    mutation = rig.answers(wire)[1].request_body.response.header_mutation
    assert list(mutation.remove_headers) == ["x-prefiller-host-port"]
    assert mutation.set_headers[0].header.raw_value == b"10.0.0.0:80"


def test_the_subset_hint_restricts_the_choice(rig):
    wire, session = rig.open(FULL_DUPLEX, FULL_DUPLEX)
    message = rig.pb.ProcessingRequest()
    message.request_headers.end_of_stream = True
    message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update(
        {"x-gateway-destination-endpoint-subset": ["10.0.0.1:80"]}
    )
    session.on_message(message.SerializeToString())
    assert rig.answers(wire)[0].dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"] == "10.0.0.1:80"


@pytest.mark.parametrize("moment", ["headers", "routed", "responding"])
@pytest.mark.parametrize("wired", [True, False])
def test_a_lost_stream_leaves_no_lease_behind(rig, moment, wired):
    _, session = rig.open(BUFFERED, STREAMED, wired)
    rig.request_headers(session)
    if moment != "headers":
        rig.body(session)
    if moment == "responding":
        rig.response_headers(session)
    session.on_lost("reset")
    rig.clock.run_timers()
    assert rig.leases() == (1 if moment == "responding" and wired else 0), "a running response ends by the access log"


def log_entry(rig, summary):
    """The access log of the gateway says this of a request."""
    entry = field(22, field(1, b"fairlead") + field(2, summary.encode()))
    AccessLogStream(Wire(), rig.host.logs).on_message(field(2, field(1, field(1, entry))))


@pytest.mark.parametrize(
    ("summary", "outcome"),
    [
        ("ab.0000000000000001 503 - 9 0 10.0.0.0:80 - 1 -;", ("natural", 503)),
        ("ab.0000000000000001 0 - 9 0 10.0.0.0:80 DC 1 -;", ("client-disconnect", 0)),
        (" 0 - 9 0 - DC 0 one;", ("stream-lost", 0)),
        ("", ("stream-lost", 0)),
    ],
)
@pytest.mark.parametrize("entry_first", [True, False])
@pytest.mark.parametrize("connected", [True, False])
def test_of_a_response_without_a_body_the_access_log_tells_the_status(rig, summary, outcome, entry_first, connected):
    """No message shows it. A client that leaves looks the same, and the log may have no entry, or open with it."""
    _, session = rig.open(STREAMED, STREAMED, eager=True, whole=True)
    rig.host.logs.connected = connected
    rig.request_headers(session, x_fairlead_id="one")
    rig.body(session)
    if entry_first and summary:
        log_entry(rig, summary)
    session.on_half_close()
    if not entry_first and summary:
        log_entry(rig, summary)
    assert rig.leases() == (0 if summary else 1)
    rig.clock.run_timers()
    assert [(record.cause, record.status) for record in rig.seen.outcomes] == [outcome]
    assert rig.fleet.table.errors.sum() == (outcome[1] == 503)
    assert rig.leases() == 0


@pytest.mark.parametrize(("flags", "cause"), [("UPE", "upstream-reset"), ("DC", "client-disconnect")])
def test_who_cut_a_response_short_is_known_from_the_log_that_opens_with_its_entry(rig, flags, cause):
    _, session = rig.open(BUFFERED, STREAMED)
    rig.host.logs.connected = 0
    rig.request_headers(session)
    rig.body(session)
    rig.response_headers(session)
    rig.chunk(session, b"data: {}\n\n")
    session.on_lost("reset")
    assert rig.leases() == 1
    log_entry(rig, f"ab.0000000000000001 200 9 9 9 10.0.0.0:80 {flags};")
    rig.clock.run_timers()
    assert [outcome.cause for outcome in rig.seen.outcomes] == [cause]
    assert [outcome.failed for outcome in rig.seen.outcomes] == [cause == "upstream-reset"]
    assert rig.fleet.table.errors.sum() == (cause == "upstream-reset")


def test_without_an_entry_a_response_that_was_cut_short_ends_all_the_same(rig):
    _, session = rig.open(BUFFERED, STREAMED)
    rig.host.logs.connected = 0
    rig.request_headers(session)
    rig.body(session)
    rig.response_headers(session)
    session.on_lost("reset")
    rig.clock.run_timers()
    assert [outcome.cause for outcome in rig.seen.outcomes] == ["client-disconnect"]


def test_a_stream_may_stay_to_learn_token_counts(pb):
    rig = Rig(pb, inspect=True)
    wire, session = rig.open(BUFFERED, STREAMED)
    rig.request_headers(session)
    rig.body(session)
    rig.response_headers(session)
    rig.chunk(session, b"data: {}\n\n")
    assert wire.status is None
    usage = (
        b'data: {"usage":{"prompt_tokens":50,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":32}}}\n\n'
    )
    rig.chunk(session, usage, eos=True)
    assert wire.status == 0
    assert rig.leases() == 1


CREATED = b'event: response.created\ndata: {"response": {"instructions": "'
PREAMBLES = {
    "a created response": ("/v1/responses", [CREATED + b'long"}}\n\n']),
    "one cut in its data": ("/v1/responses", [CREATED, b"long", b'"}}\n\nevent: response.in_progress\r\ndata: {}\n\n']),
    "comments": ("/v1/chat/completions", [b": keep", b"-alive\n\n:\n\n", b"\n"]),
    "one cut in its name": ("/v1/responses", [b"event: response.crea", b"ted\nda", b"ta: {}\r", b"\n\r\n"]),
    "one in two chunks": ("/v1/responses", [b"event: response.created\n", b"data: {}\n\n"]),
    "other fields": ("/v1/chat/completions", [b"retry: 100\n", b"id: 1\n\n"]),
}


@pytest.mark.parametrize(("path", "preamble"), PREAMBLES.values(), ids=PREAMBLES)
def test_what_comes_before_the_prompt_is_computed_is_no_first_token(rig, path, preamble):
    """It would hide a hang, and teach that prompts take no time."""
    wire, session = rig.open(STREAMED, STREAMED, eager=True, whole=True)
    rig.request_headers(session, path=path)
    rig.body(session, BODY[:-1] + b', "input": "hi"}')
    ((lease,),) = ([entry.lease for entry in rig.pipeline.requests],)
    for chunk in preamble:
        rig.chunk(session, chunk)
    assert (lease.first_token_at, wire.status, rig.fleet.table.pending[0]) == (-1.0, None, 1)
    rig.clock.now += 1.5
    rig.chunk(session, b'event: response.output_item.added\ndata: {"item": {}}\n\n')
    assert (lease.first_token_at, wire.status, rig.fleet.table.pending[0]) == (101.5, 0, 0)
    log_entry(rig, "ab.0000000000000001 200 9000 2000 9 10.0.0.0:80 - 1 -;")
    assert [outcome.ttft_ms for outcome in rig.seen.outcomes] == [1500.0]


@pytest.mark.parametrize("first", [b"data: {}\n\n", b": keep-alive\n\ndata: {}\n\n", b"event: message\n", b"{}"])
def test_what_follows_a_preamble_in_one_chunk_or_is_none_is_a_first_token(rig, first):
    wire, session = rig.open(STREAMED, STREAMED, eager=True, whole=True)
    rig.request_headers(session)
    rig.body(session)
    rig.chunk(session, first)
    assert wire.status == 0


def test_who_answers_a_repeated_request_has_its_first_token_after_the_preamble(rig):
    _, session = rig.open(STREAMED, STREAMED, eager=True, whole=True, resizable=True)
    rig.request_headers(session, path="/v1/responses")
    rig.body(session, BODY[:-1] + b', "input": "hi"}')
    ((entry,),) = [list(rig.pipeline.requests)]
    rig.chunk(session, b": keep-alive\n\n", response_code=200, upstream_request_attempt_count=2)
    rig.clock.now += 1.5
    rig.chunk(session, b"data: {}\n\n")
    assert (entry.lease.endpoint_id, entry.lease.unreached, entry.lease.first_token_at) == ("e1", "e0", 101.5)
    log_entry(rig, "ab.0000000000000001 200 9000 2000 9 10.0.0.1:80 - 2 -;")
    assert [outcome.ttft_ms for outcome in rig.seen.outcomes] == [1500.0]


def test_who_answers_a_repeated_request_without_a_body_is_known_too(rig):
    _, session = rig.open(STREAMED, STREAMED, eager=True, whole=True, resizable=True)
    rig.request_headers(session)
    rig.body(session)
    ((entry,),) = [list(rig.pipeline.requests)]
    rig.chunk(session, b"", eos=True, response_code=200, upstream_request_attempt_count=2)
    assert (entry.lease.endpoint_id, entry.lease.unreached) == ("e1", "e0")


@pytest.mark.parametrize("why", ["socket_creation_failure", "delayed_connect_error:_Connection_refused"])
@pytest.mark.parametrize("tries", [1, 2])
def test_what_the_gateway_has_no_socket_for_is_no_failure_of_an_endpoint(pb, why, tries):
    """It answers by itself, with an error that reads like a model server's."""
    rig = Rig(pb, inspect=True)
    _, session = rig.open(STREAMED, STREAMED, eager=True, whole=True, resizable=True)
    rig.request_headers(session)
    rig.body(session)
    local = b'{"error": {"message": "no model server answers", "type": "server_error", "code": 503}}'
    rig.chunk(session, local, eos=True, response_code=503, upstream_request_attempt_count=tries)
    log_entry(rig, f"ab.0000000000000001 503 9 9 86 10.0.0.{tries - 1}:80 UF/ {tries}/{why} -;")
    assert [(end.status, end.unreached) for end in rig.seen.outcomes] == [
        (503, "e0" if tries == 2 and "refused" in why else "")
    ]
    assert rig.fleet.table.errors.sum() == (tries if "refused" in why else 0)


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "broke off"])
@pytest.mark.parametrize("wired", [True, False], ids=["log", "no log"])
def test_a_repeated_request_that_is_answered_with_comments_only_has_no_first_token(rig, wired, ended):
    _, session = rig.open(STREAMED, STREAMED, wired=wired, eager=True, whole=True, resizable=True)
    rig.request_headers(session)
    rig.body(session)
    rig.chunk(session, b": keep-alive\n\n", response_code=200, upstream_request_attempt_count=2)
    rig.clock.now += 60
    if ended:
        rig.chunk(session, b"", eos=True)
    else:
        session.on_lost("")
    if wired:
        log_entry(rig, f"ab.0000000000000001 200 9000 60000 9 10.0.0.1:80 {'-' if ended else 'UC'} 2 -;")
    assert [(end.endpoint, end.unreached, end.ttft_ms) for end in rig.seen.outcomes] == [("e1", "e0", -1.0)]


@pytest.mark.parametrize("flags", ["DC", "UC"])
def test_a_stream_that_ends_after_comments_has_no_first_token(rig, flags):
    """An engine that hangs is no fast one."""
    _, session = rig.open(STREAMED, STREAMED, eager=True, whole=True)
    rig.request_headers(session)
    rig.body(session)
    rig.chunk(session, b": keep-alive\n\n")
    rig.chunk(session, b": keep-alive\n\n")
    rig.clock.now += 60
    log_entry(rig, f"ab.0000000000000001 200 9000 60000 9 10.0.0.0:80 {flags} 1 -;")
    assert [outcome.ttft_ms for outcome in rig.seen.outcomes] == [-1.0]


@pytest.mark.parametrize("endpoint", [0, 1], ids=["picked", "repeated"])
@pytest.mark.parametrize(("path", "ttft_ms"), [("/v1/responses", -1.0), ("/v1/chat/completions", 9.0)])
def test_where_no_response_is_shown_the_first_byte_may_not_be_the_first_token(rig, path, ttft_ms, endpoint):
    _, session = rig.open(STREAMED, NONE, eager=True, whole=True)
    rig.request_headers(session, path=path)
    rig.body(session, BODY[:-1] + b', "input": "hi"}')
    log_entry(rig, f"ab.0000000000000001 200 9000 2000 9 10.0.0.{endpoint}:80 - {endpoint + 1} -;")
    assert [outcome.ttft_ms for outcome in rig.seen.outcomes] == [ttft_ms]


def grpc_frame(message):
    return b"\0" + len(message).to_bytes(4, "big") + message


LAST_EVENT = b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}}\n\n%b'
LAST_MESSAGE = grpc_frame(field(2, field(2, b"stop") + number(3, 9) + number(4, 5)))


@pytest.mark.parametrize("entry_first", [False, True])
@pytest.mark.parametrize(
    ("chunk", "tokens"),
    [(LAST_EVENT % b"data: [DONE]\n\n", (9, 5)), (LAST_EVENT % b"", (-1, -1)), (LAST_MESSAGE, (9, 5))],
)
def test_a_complete_answer_whose_end_is_not_shown_has_its_usage(pb, chunk, tokens, entry_first):
    """gRPC's end by trailers, which are not shown, and clients leave with the last event. The log tells both. It has a
    connection of its own, so either end may be read first."""
    rig, is_grpc = Rig(pb, inspect=True), chunk is LAST_MESSAGE
    wire, session = rig.open(STREAMED, STREAMED, eager=True, whole=True)
    path = "/vllm.grpc.engine.VllmEngine/Generate" if is_grpc else "/v1/chat/completions"
    rig.request_headers(session, path=path)
    rig.body(session, grpc_frame(field(2, field(2, b"\x01\x02")) + number(5, 1)) if is_grpc else BODY)
    assert not wire.watching
    rig.chunk(session, grpc_frame(field(1, field(1, b"\x05"))) if is_grpc else b"data: {}\n\n", response_code=200)
    assert wire.watching, "it must hear of the end before the log does"
    rig.chunk(session, chunk)
    assert rig.leases() == 1
    if not entry_first and wire.status is None:
        session.on_lost("reset")
    assert rig.leases() == 1
    log_entry(rig, "ab.0000000000000001 200 9 9 9 10.0.0.0:80 -/ 1 -;")
    if wire.status is None:
        session.on_lost("reset")
    assert [(record.prompt_tokens, record.completion_tokens) for record in rig.seen.outcomes] == [tokens]


def test_of_several_grpc_completions_the_session_reads_all(pb):
    rig = Rig(pb, inspect=True)
    wire, session = rig.open(STREAMED, STREAMED, eager=True, whole=True)
    rig.request_headers(session, path="/vllm.grpc.engine.VllmEngine/Generate")
    rig.body(session, grpc_frame(field(2, field(2, b"\x01\x02")) + field(4, number(15, 2)) + number(5, 1)))
    rig.chunk(session, LAST_MESSAGE, response_code=200)
    assert wire.status is None
    rig.chunk(session, grpc_frame(field(2, field(2, b"stop") + number(3, 9) + number(4, 50))))
    assert wire.status == 0
    log_entry(rig, "ab.0000000000000001 200 9 9 9 10.0.0.0:80 -/ 1 -;")
    assert [(record.prompt_tokens, record.completion_tokens) for record in rig.seen.outcomes] == [(9, 55)]


def test_a_grpc_stream_whose_headers_are_shown_is_followed_too(pb):
    rig = Rig(pb, inspect=True)
    wire, session = rig.open(STREAMED, STREAMED, eager=True, whole=True)
    rig.request_headers(session, path="/vllm.grpc.engine.VllmEngine/Generate")
    rig.body(session, grpc_frame(field(2, field(2, b"\x01\x02")) + number(5, 1)))
    rig.response_headers(session, kind="application/grpc")
    rig.chunk(session, grpc_frame(field(1, field(1, b"\x05"))))
    assert wire.status is None
    rig.chunk(session, LAST_MESSAGE)
    assert wire.status == 0
    log_entry(rig, "ab.0000000000000001 200 9 9 9 10.0.0.0:80 -/ 1 -;")
    assert [(record.prompt_tokens, record.completion_tokens) for record in rig.seen.outcomes] == [(9, 5)]


@pytest.mark.parametrize("entry_first", [False, True])
@pytest.mark.parametrize(("response", "window"), [(STREAMED, 65_536), (FULL_DUPLEX, 65_536), (FULL_DUPLEX, 1)])
def test_a_session_that_must_stay_reports_usage_with_the_last_event(pb, response, window, entry_first):
    """Because the model has another name at the endpoint, or because its pick does not fit one write."""
    rig, events = Rig(pb, inspect=True), []
    feed = rig.host.feed
    rig.host.feed = lambda event: events.append(event) or feed(event)
    if window > 1:
        model = InferenceModel(origin=Origin(namespace="n", name="o"), model="m", targets=(Target("base"),))
        rig.driver.feed(ModelsChanged(ModelSet((model,))))
    wire, session = rig.open(response, response, eager=response == STREAMED, whole=True, resizable=True, window=window)
    rig.request_headers(session)
    rig.body(session)
    rig.chunk(session, b'data: {"model": "base"}\n\n', response_code=200)
    rig.chunk(session, LAST_EVENT % b"data: [DONE]\n\n")
    rig.chunk(session, b"\n")
    assert (wire.status, rig.leases()) == (None, 1)
    if not entry_first:
        session.on_lost("reset")
    log_entry(rig, "ab.0000000000000001 200 9 9 9 10.0.0.0:80 -/ 1 -;")
    if entry_first:
        rig.chunk(session, b"", eos=True)
        assert wire.status == 0
    assert [(record.prompt_tokens, record.completion_tokens) for record in rig.seen.outcomes] == [(9, 5)]
    assert [type(event) for event in events].count(UsageReported) == 1


@pytest.mark.parametrize("entry_first", [False, True])
def test_an_error_in_an_answer_whose_end_is_not_shown_is_its_status(pb, entry_first):
    rig = Rig(pb, inspect=True)
    wire, session = rig.open(STREAMED, STREAMED, eager=True, whole=True)
    rig.request_headers(session, path="/vllm.grpc.engine.VllmEngine/Generate")
    rig.body(session, grpc_frame(field(2, field(2, b"\x01\x02"))))
    older = field(1, b"id") + field(4, field(1, b"busy") + field(2, b"503"))
    rig.chunk(session, grpc_frame(older), response_code=200)
    if entry_first:
        log_entry(rig, "ab.0000000000000001 200 9 9 9 10.0.0.0:80 -/ 1 -;")
    if wire.status is None:
        session.on_lost("reset")
    assert [record.status for record in rig.seen.outcomes] == [503]


def test_of_an_answer_in_several_chunks_the_usage_is_read_too(pb):
    rig = Rig(pb, inspect=True)
    wire, session = rig.open(STREAMED, STREAMED, eager=True, whole=True)
    rig.request_headers(session, path="/v1/embeddings")
    rig.body(session, b'{"model": "m", "input": "hi"}')
    rig.chunk(session, b'{"data": [{"embedding": [0.25')
    assert wire.status is None
    rig.chunk(session, b']}], "usage": {"prompt_tokens": 7, "total_tokens": 7}}', eos=True)
    assert wire.status == 0
    log_entry(rig, "ab.0000000000000001 200 9 9 9 10.0.0.0:80 - 1 -;")
    assert [outcome.prompt_tokens for outcome in rig.seen.outcomes] == [7]


@pytest.mark.parametrize("stream", [False, True])
def test_the_first_ones_of_a_kind_are_followed_however_many_of_the_other_came_first(stream):
    inspection = Inspection(0.01, random.Random(1), Clock().time)
    before, after = ([inspection(builders.request("x"), kind) for _ in range(1000)] for kind in (stream, not stream))
    assert all(before[:20] + after[:20])
    assert sum(before[20:]) < 30 and sum(after[20:]) < 30


def test_the_first_answers_of_each_model_and_api_are_followed_and_later_a_share():
    clock = Clock()
    inspection = Inspection(0.1, random.Random(1), clock.time)

    def followed(count, stream=False, **fields):
        request = builders.request("x", **fields)
        return sum(inspection(request, stream) for _ in range(count))

    for model, api in [("a", "chat"), ("b", "chat"), ("b", "completions")]:
        for stream in (True, False):
            assert followed(20, stream, model=model, api=api) == 20
    assert 60 < followed(1000, model="a") < 140
    assert followed(1000, True, model="a") == 1, "a stream costs more: one a minute"
    clock.now += 1e6
    assert followed(1000, True, model="a") == 1
    assert sum(followed(20, model=f"m{number}") for number in range(1000)) < 14_000, "clients invent names"
    inspection.follow(0.0)
    assert followed(100, model="new") == followed(100, True, model="a") == 0


def test_names_that_clients_invent_leave_room_for_the_first_answers_of_a_model():
    inspection = Inspection(0.01, random.Random(1), Clock().time)
    for count in range(MOST_INSPECTED + 9):
        inspection(builders.request("x", model=f"invented-{count}"), False)
    assert all(inspection(builders.request("x", model="new"), False) for _ in range(FIRST_INSPECTED))


def test_names_that_nothing_serves_take_no_room_however_often_they_come():
    inspection = Inspection(0.01, random.Random(1), Clock().time, {"new"}.__contains__)
    invented = [builders.request("x", model=f"invented-{count}") for count in range(MOST_INSPECTED + 9)]
    assert sum(inspection(request, False) for request in invented * FIRST_INSPECTED) < 200
    assert all(inspection(builders.request("x", model="new"), False) for _ in range(FIRST_INSPECTED))


def test_with_a_share_of_1_every_answer_is_followed():
    """Not only one stream a minute: what tenants use would be counted without most of their streams."""
    inspection = Inspection(1.0, random.Random(1), Clock().time)
    assert all(inspection(builders.request("x"), stream) for stream in (True, False) for _ in range(100))


def test_an_error_inside_a_200_stream_counts_as_a_failure(rig):
    _, session = rig.open(BUFFERED, STREAMED)
    rig.request_headers(session)
    rig.body(session)
    rig.response_headers(session)
    rig.chunk(session, b'data: {"error": {"message": "busy", "type": "x", "code": 503}}\n\n')
    assert rig.leases() == 0
    assert rig.seen.outcomes[0].status == 503


@pytest.mark.parametrize("shown", [True, False])
@pytest.mark.parametrize("path", ["/v1/responses/resp_1", "/v1/models", "/mcp"])
def test_what_is_stored_or_not_the_models_is_neither_usage_nor_failure(rig, path, shown):
    """A stored response that failed, or a JSON-RPC error. A poll of a response is not its work again."""
    _, session = rig.open(BUFFERED, STREAMED, wired=False)
    rig.request_headers(session, path=path, eos=True, **{":method": "GET"})
    if shown:
        rig.response_headers(session, kind="application/json")
    answer = b'{"error": {"code": "server_error"}, "usage": {"input_tokens": 9, "output_tokens": 5}}'
    rig.chunk(session, answer, eos=True, **({} if shown else {"response_code": 200}))
    (outcome,) = rig.seen.outcomes
    assert (outcome.status, outcome.prompt_tokens, outcome.completion_tokens) == (200, -1, -1)
    assert rig.fleet.table.errors.sum() == 0


@pytest.mark.parametrize("wired", [True, False])
@pytest.mark.parametrize("without_body", [True, False])
def test_the_grpc_status_of_an_error_counts_as_a_failure_where_the_gateway_shows_it(pb, without_body, wired):
    rig = Rig(pb, inspect=True)
    _, session = rig.open(FULL_DUPLEX, FULL_DUPLEX, wired=wired, window=0)
    rig.request_headers(session, path="/vllm.grpc.engine.VllmEngine/Generate", content_type="application/grpc")
    rig.body(session, grpc_frame(field(2, field(2, b"\x01\x02"))))
    shown = {"grpc-status": "14"} if without_body else {}
    rig.response_headers(session, eos=without_body, kind="application/grpc", **shown)
    if not without_body:
        rig.chunk(session, grpc_frame(field(1, field(1, b"\x05"))))
        rig.trailers(session, request=False, grpc_status="14")
    assert [outcome.status for outcome in rig.seen.outcomes] == [503]
    assert rig.fleet.table.errors.sum() == 1
    assert rig.leases() == 0


ANY_PAGES = [b"<html>hello</html>", b"\r\n<!DOCTYPE html><p>hello", b"<h1>502 Bad Gateway</h1>", b"<center>hello",
             b"<title>Error", b"\xef\xbb\xbf<meta charset='utf-8'>"]  # fmt: skip


@pytest.mark.parametrize(
    ("page", "kind"), [(page, kind) for page in ANY_PAGES for kind in ("text/html", "")] + [(b"<blink>", "text/html")]
)
def test_a_page_of_html_in_place_of_an_answer_counts_as_a_failure(rig, page, kind):
    """Who fails at once looks idle, and would draw the most requests."""
    _, session = rig.open(BUFFERED, STREAMED)
    rig.request_headers(session)
    rig.body(session)
    ((lease,),) = ([entry.lease for entry in rig.pipeline.requests],)
    rig.response_headers(session, kind=kind)
    rig.chunk(session, page)
    assert rig.leases() == 0
    assert rig.seen.outcomes[0].status == 502
    assert lease.first_token_at < 0.0


def test_json_that_is_called_html_is_no_failure(rig):
    """So do frameworks that were not told."""
    _, session = rig.open(BUFFERED, STREAMED, wired=False)
    rig.request_headers(session)
    rig.body(session)
    rig.response_headers(session, kind="text/html; charset=utf-8")
    rig.chunk(session, b'{"choices": []}', eos=True)
    assert rig.seen.outcomes[0].status == 200


@pytest.mark.parametrize("answer", [b"<\x00\x80?", b"<p\x00\x80", b"<H1\x80"])
def test_an_embedding_whose_first_byte_is_that_of_markup_is_no_failure(rig, answer):
    """It may be sent as bytes. A client may not take servers out of use with what they rightly answer."""
    _, session = rig.open(BUFFERED, STREAMED, wired=False)
    rig.request_headers(session, path="/v1/embeddings")
    rig.body(session, b'{"model": "m", "input": "hi", "encoding_format": "bytes"}')
    rig.response_headers(session, kind="application/octet-stream")
    rig.chunk(session, answer, eos=True)
    assert rig.seen.outcomes[0].status == 200


def test_the_first_byte_of_an_error_is_no_first_token(rig):
    """Fast errors would teach the forecast that the endpoint is the fastest of all."""
    _, session = rig.open(BUFFERED, STREAMED, wired=False)
    rig.request_headers(session)
    rig.body(session)
    ((lease,),) = ([entry.lease for entry in rig.pipeline.requests],)
    rig.response_headers(session, status=503, kind="text/plain")
    rig.chunk(session, b"no healthy upstream", eos=True)
    assert lease.first_token_at < 0.0
    (outcome,) = rig.seen.outcomes
    assert (outcome.status, outcome.ttft_ms) == (503, -1.0)


def test_nonsense_ends_the_stream_with_invalid_argument(rig):
    wire, session = rig.open(BUFFERED, STREAMED)
    rig.request_headers(session)
    rig.body(session)
    session.on_message(b"\xff\xff")
    assert wire.status == 3
    rig.clock.run_timers()
    assert rig.leases() == 0


def test_the_access_log_ends_leases_and_counts_the_fallback(rig):
    _, session = rig.open(BUFFERED, NONE)
    rig.request_headers(session)
    rig.body(session)
    assert rig.leases() == 1
    fallback = []
    rig.seen.on_fallback = lambda address, status: fallback.append((address, status))
    log = AccessLogStream(Wire(), rig.host.logs)
    assert rig.host.logs.connected == 2

    def entry(metadata, address, status):
        socket = field(1, field(2, address.encode()) + number(3, 80))
        common = field(13, socket)
        if metadata:
            common += field(17, field(1, field(1, b"envoy.lb") + field(2, string_struct(metadata))))
        common += field(22, field(1, b"ttft_us") + field(2, b"51900")) + field(23, number(1, 2) + number(2, 5_000_000))
        response = field(1, number(1, status)) + number(3, 123)
        return field(1, field(1, common) + field(4, response))

    entries = entry({"fairlead-lease": b"ab.0000000000000001"}, "10.0.0.0", 200)
    entries += entry({"fairlead-lease": b"zz.0000000000000001"}, "10.0.0.0", 200) + entry(None, "fd00::1", 502)
    log.on_message(field(2, entries))
    assert rig.leases() == 0
    assert fallback == [("[fd00::1]:80", 502)]
    (outcome,) = rig.seen.outcomes
    assert (outcome.status, outcome.ttft_ms, outcome.duration_ms, outcome.response_bytes) == (200, 51.9, 2005.0, 123)
    log.on_lost("gone")
    assert rig.host.logs.connected == 1


@pytest.mark.parametrize("inspect", [True, False])
@pytest.mark.parametrize("left_at", ["pick", "first chunk"])
def test_a_gateway_that_dies_takes_the_leases_with_it_that_its_log_would_have_ended(pb, inspect, left_at):
    """Also those whose session stayed to read the answer, and saw a part of it."""
    rig = Rig(pb, inspect=inspect)
    log = AccessLogStream(Wire(), rig.host.logs)
    wire, session = rig.open(BUFFERED, NONE if left_at == "pick" else STREAMED)
    rig.request_headers(session)
    rig.body(session)
    if left_at == "first chunk":
        rig.response_headers(session)
        rig.chunk(session, b"data: {}\n\n")
    if wire.status is None:
        session.on_lost("the connection was lost")
    assert rig.leases() == 1
    log.on_lost("the connection was lost")
    wire.up = False
    rig.clock.run_timers()
    assert rig.leases() == 0


def test_an_entry_without_a_lease_ends_the_one_that_was_given_under_its_id(rig):
    for name in ("one", "two"):
        _, session = rig.open(BUFFERED, NONE)
        rig.request_headers(session, x_fairlead_id=name)
        rig.body(session)
    log_entry(rig, " 0  0 0  DC two;")
    assert rig.leases() == 1
    assert [outcome.request.id for outcome in rig.seen.outcomes] == [2]


def test_the_gateway_cannot_begin_a_second_request(rig):
    wire, session = rig.open(NONE, STREAMED, wired=False)
    rig.request_headers(session, eos=True)
    assert rig.leases() == 1
    rig.request_headers(session, eos=True)
    assert wire.status == 3
    assert rig.leases() == 0
    assert rig.kinds(wire) == ["request_headers"]


def test_only_the_first_message_tells_the_modes(rig):
    wire, session = rig.open(BUFFERED, STREAMED)
    rig.request_headers(session)
    rig.modes = FULL_DUPLEX, FULL_DUPLEX, False
    rig.body(session)
    assert rig.kinds(wire) == ["request_headers", "request_body"]


@pytest.mark.parametrize("mode", [BUFFERED, PARTIAL])
def test_a_request_of_trailers_alone_is_waved_through_where_its_headers_are_answered(rig, mode):
    wire, session = rig.open(mode, STREAMED)
    rig.request_headers(session)
    rig.trailers(session)
    assert rig.kinds(wire) == ["request_headers", "request_trailers"]
    assert (wire.status, rig.leases()) == (0, 0)


@pytest.mark.parametrize("second", ["body", "trailers"])
def test_nothing_follows_request_trailers(rig, second):
    wire, session = rig.open(FULL_DUPLEX, FULL_DUPLEX, wired=False)
    rig.request_headers(session)
    rig.trailers(session)
    getattr(rig, second)(session)
    assert (wire.status, rig.leases()) == (3, 0)


def test_response_headers_come_once(rig):
    wire, session = rig.open(BUFFERED, STREAMED, wired=False)
    rig.request_headers(session)
    rig.body(session)
    rig.response_headers(session)
    rig.response_headers(session)
    assert (wire.status, rig.leases()) == (3, 0)


@pytest.mark.parametrize("status", ["9" * 5000, "-1", "", "2e2", "٢٠٠"])
def test_a_status_that_is_none(rig, status):
    _, session = rig.open(BUFFERED, NONE, wired=False)
    rig.request_headers(session)
    rig.body(session)
    rig.response_headers(session, status=status)
    assert [outcome.status for outcome in rig.seen.outcomes] == [0]


def test_only_lease_ids_as_they_were_given_out_are_read(rig):
    answers = rig.host.answers
    assert answers.request_id(answers.lease(26)) == 26
    odd = ["ab.000000000000001A", "ab.0x0000000000001a", "ab.+00000000000001a", "ab.00000000000001_a", "ab.1a", "ab."]
    assert [answers.request_id(lease) for lease in odd] == [None] * len(odd)


class Reader:
    """Reads prompts as slowly as the test wants."""

    def __init__(self):
        self.answers, self.offered = [], []

    def read(self, parsed, body, targets):
        self.answers.append(asyncio.get_running_loop().create_future())
        return asyncio.get_running_loop().create_task(self._answer(self.answers[-1]))

    async def _answer(self, answer):
        return await answer

    def offer(self, known):
        self.offered.append(known.blocks)
        return f"offered {known.blocks}"


@pytest.fixture
async def asking(pb):
    reader = Reader()
    rig = Rig(pb, prompts=reader)
    wire, session = rig.open(BUFFERED, STREAMED)
    rig.request_headers(session)
    rig.body(session)
    assert (rig.kinds(wire), rig.seen.decisions) == (["request_headers"], []), "not there yet"
    return rig, reader, wire, session


async def turns():
    for _ in range(4):
        await asyncio.sleep(0)


async def test_a_request_arrives_with_what_was_read_of_its_prompt(asking):
    rig, reader, wire, _ = asking
    reader.answers[0].set_result(PromptKnown(77, "blocks"))
    await turns()
    assert rig.kinds(wire) == ["request_headers", "request_body"]
    assert [record.request.prompt_tokens for record in rig.seen.decisions] == [77]
    assert reader.offered == ["blocks"]
    assert [record.request.blocks for record in rig.seen.decisions] == ["offered blocks"]
    assert rig.leases() == 1


async def test_a_name_is_rewritten_by_a_rule_that_comes_while_the_prompt_is_read(asking):
    rig, reader, wire, _ = asking
    rule = InferenceModel(origin=Origin(namespace="n", name="r"), model="m", targets=(Target("another"),))
    rig.driver.feed(ModelsChanged(ModelSet((rule,))))
    reader.answers[0].set_result(PromptKnown())
    await turns()
    assert rig.kinds(wire) == ["request_headers", "request_body"]
    mutation = rig.answers(wire)[-1].request_body.response.body_mutation
    assert mutation.body == BODY.replace(b'"m"', b'"another"')


@pytest.mark.parametrize("how", ["fails", "is cancelled", "finds nothing"])
async def test_a_request_goes_on_without_what_cannot_be_read(asking, how):
    rig, reader, wire, _ = asking
    if how == "fails":
        reader.answers[0].set_exception(RuntimeError("no tokeniser"))
    elif how == "is cancelled":
        reader.answers[0].cancel()
    else:
        reader.answers[0].set_result(PromptKnown())
    await turns()
    assert rig.kinds(wire) == ["request_headers", "request_body"]
    assert rig.seen.decisions[0].request.prompt_tokens > 0
    assert reader.offered == []


async def test_a_client_that_goes_while_its_prompt_is_read_is_never_scheduled(asking):
    rig, reader, _, session = asking
    session.on_lost("reset")
    await turns()
    assert reader.answers[0].cancelled()
    assert (rig.seen.decisions, rig.leases()) == ([], 0)
    assert [request.api for request in rig.seen.left] == ["chat"]


async def test_a_prompt_is_read_on_when_the_last_message_of_its_body_comes_again(pb):
    reader = Reader()
    rig = Rig(pb, prompts=reader)
    wire, session = rig.open(FULL_DUPLEX, FULL_DUPLEX)
    rig.request_headers(session)
    rig.body(session)
    rig.body(session)
    reader.answers[0].set_result(PromptKnown(77, "blocks"))
    await turns()
    assert (rig.kinds(wire), len(rig.seen.decisions)) == (["request_headers", "request_body"], 1)


async def test_a_gateway_that_only_asks_gets_the_pick_when_it_is_made(asking):
    rig, reader, wire, session = asking
    session.on_half_close()
    await turns()
    assert wire.status is None, "its prompt is still read"
    reader.answers[0].set_result(PromptKnown(77, "blocks"))
    await turns()
    assert (rig.kinds(wire)[-1], wire.status) == ("request_body", 0)
    assert (len(rig.seen.decisions), rig.leases()) == (1, 0), "nobody will tell how it ends"


#: The messages that may come, by state. Everything else breaks the stream.
EARLY, LATE = {"headers", "body", "trailers"}, {"body", "trailers"}
RESPONSE = {"response_headers", "chunk", "response_trailers"}
LEGAL = {
    "opened": EARLY | RESPONSE,
    "collecting": LATE | RESPONSE,
    "waiting": LATE | RESPONSE,
    "local reply": LATE | {"chunk", "response_trailers"},
    "routed": LATE | RESPONSE,
    "answering": LATE | {"chunk", "response_trailers"},
}


@pytest.mark.parametrize("message", sorted(EARLY | RESPONSE))
@pytest.mark.parametrize("state", list(LEGAL))
def test_in_each_state_only_what_the_table_has_is_legal(pb, state, message):
    rig = Rig(pb)
    if state == "waiting":  # nobody answers
        rig.host.feed = lambda event: None
    wire, session = rig.open(STREAMED, FULL_DUPLEX, wired=False, eager=True)
    if state != "opened":
        rig.request_headers(session)
    if state not in ("opened", "collecting", "local reply"):
        rig.body(session)
    if state == "local reply":
        rig.response_headers(session)
    if state == "answering":
        rig.response_headers(session)
    {
        "headers": lambda: rig.request_headers(session),
        "body": lambda: rig.body(session),
        "trailers": lambda: rig.trailers(session),
        "response_headers": lambda: rig.response_headers(session),
        "chunk": lambda: rig.chunk(session, b"x"),
        "response_trailers": lambda: rig.trailers(session, request=False),
    }[message]()
    assert (wire.status == 3) == (message not in LEGAL[state]) == bool(rig.seen.broken)
    assert rig.leases() == 0 or wire.status is None


WEBSOCKET, CONNECT = {":method": "GET", "upgrade": "websocket"}, {":method": "CONNECT"}


@pytest.mark.parametrize("wired", [False, True])
@pytest.mark.parametrize("response", [NONE, STREAMED, FULL_DUPLEX])
@pytest.mark.parametrize("headers", [WEBSOCKET, CONNECT])
def test_a_tunnel_is_chosen_on_its_headers_and_echoed_to_its_end(rig, headers, response, wired):
    """Its body has no end to wait for. What the gateway has handed over must come back, in both directions."""
    wire, session = rig.open(FULL_DUPLEX, response, wired=wired)
    rig.request_headers(session, path="/v1/realtime", **headers)
    assert rig.kinds(wire) == ["request_headers"]
    rig.body(session, b"early", eos=False)
    rig.response_headers(session, status=101)
    assert wire.status is None
    rig.body(session, b"late", eos=False)
    echoed = [answer.request_body for answer in rig.answers(wire) if answer.WhichOneof("response") == "request_body"]
    streamed = [answer.response.body_mutation.streamed_response for answer in echoed]
    assert [(part.body, part.end_of_stream) for part in streamed] == [(b"early", False), (b"late", False)]
    if response != NONE:
        rig.chunk(session, b"answer")
        assert wire.status is None
    assert rig.leases() == 1
    session.on_lost("reset")
    assert rig.leases() == 0


@pytest.mark.parametrize("request_mode", [BUFFERED, PARTIAL])
def test_a_gateway_that_would_buffer_a_tunnel_is_left_at_the_pick(rig, request_mode):
    wire, session = rig.open(request_mode, STREAMED)
    rig.request_headers(session, **WEBSOCKET)
    assert rig.answers(wire)[0].dynamic_metadata["envoy.lb"]
    assert (rig.kinds(wire), wire.status, rig.leases()) == (["request_headers"], 0, 0)


@pytest.mark.parametrize(
    ("path", "headers", "ended", "why"),
    [
        ("/health", {":method": "GET"}, True, "empty"),
        ("/health", {":method": "HEAD"}, True, "empty"),
        ("/v1/realtime", WEBSOCKET, False, "no-body"),
        ("/v1/realtime", CONNECT, False, "no-body"),
        ("/some/generate", {":method": "POST"}, False, "no-body"),
        ("/some/generate", {":method": "POST"}, True, "no-body"),
        ("/v1/chat/completions", {":method": "POST"}, True, "empty"),
        ("/v1/chat/completions", {":method": "GET"}, True, "no-body"),
    ],
)
def test_only_what_surely_has_no_body_is_without_work_for_the_model(rig, path, headers, ended, why):
    _, session = rig.open(NONE, STREAMED)
    rig.request_headers(session, ended, path, **headers)
    assert rig.seen.decisions[-1].request.unread == why


def test_a_request_that_only_offers_another_protocol_is_read_as_ever(rig):
    wire, session = rig.open(FULL_DUPLEX, FULL_DUPLEX)
    rig.request_headers(session, **{":method": "POST", "upgrade": "h2c"})
    assert wire.sent == []
    rig.body(session)
    assert rig.seen.decisions[-1].request.model == "m"


@pytest.mark.parametrize("bodyless", [False, True])
def test_under_full_duplex_nothing_is_dropped_that_comes_after_the_end(rig, bodyless):
    wire, session = rig.open(FULL_DUPLEX, FULL_DUPLEX, wired=False)
    rig.request_headers(session, eos=bodyless)
    if not bodyless:
        rig.body(session)
    rig.body(session, b"more", eos=bodyless)
    assert (wire.status, rig.leases()) == (3, 0)


@pytest.mark.parametrize("repeated", [b"", BODY])
@pytest.mark.parametrize("chunks", [1, 2])
def test_under_full_duplex_the_last_message_of_a_body_may_come_again(rig, chunks, repeated):
    """As Envoy 1.35 to 1.37 may repeat it, at any time after the first one."""
    wire, session = rig.open(FULL_DUPLEX, FULL_DUPLEX, wired=False)
    rig.request_headers(session)
    if chunks == 2:
        rig.body(session, BODY[:10], eos=False)
        rig.body(session, BODY[10:])
    else:
        rig.body(session)
    rig.body(session, repeated)
    rig.response_headers(session)
    rig.body(session, repeated)
    assert (wire.status, rig.leases()) == (None, 1)
    rig.chunk(session, b"x", eos=True)
    assert rig.kinds(wire) == ["request_headers", "request_body", "response_headers", "response_body"]
    assert (wire.status, rig.leases()) == (0, 0)


def test_a_request_that_waits_stays_in_its_queue_when_the_last_message_of_its_body_comes_again(rig):
    events, feed = [], rig.host.feed
    rig.host.feed = events.append  # nobody answers
    wire, session = rig.open(FULL_DUPLEX, FULL_DUPLEX, wired=False)
    rig.request_headers(session)
    rig.body(session)
    rig.body(session)
    (arrived,) = events
    feed(arrived)
    assert rig.kinds(wire) == ["request_headers", "request_body"]
    assert (wire.status, rig.leases()) == (None, 1)


def test_what_comes_for_a_session_that_is_closed_is_ignored(rig):
    wire, session = rig.open(BUFFERED, STREAMED, wired=False)
    rig.request_headers(session)
    rig.body(session)
    session.on_lost("reset")
    sent = list(wire.sent)
    session.route(Route(1, Endpoint("e", "10.0.0.9:80"), client=session))
    session.hold(1.0)
    session.reject(Reject(request_id=1, status=503, reason="evicted", message=""))
    rig.chunk(session, b"x")
    assert wire.sent == sent


def test_a_session_that_fails_ends_its_stream_and_its_lease(rig):
    wire, session = rig.open(BUFFERED, STREAMED, wired=False)
    rig.request_headers(session)
    rig.body(session)
    session.fail()
    assert wire.status == 13
    session.fail()
    rig.chunk(session, b"x")
    assert wire.status == 13


def test_a_response_that_cannot_be_read_ends_the_request_as_if_none_had_come(rig):
    _, session = rig.open(BUFFERED, STREAMED)
    rig.request_headers(session)
    rig.body(session)
    session.on_message(b"\x1a\x04\x0a\x7f\x0a\x01")  # response headers whose map runs past the message
    rig.clock.run_timers()
    assert rig.leases() == 0
    assert [outcome.cause for outcome in rig.seen.outcomes] == ["stream-lost"]


#: How a gateway shows a response that it made by itself, and what answers that, without and with full duplex.
LOCAL_REPLIES = {
    "headers alone": [("response_headers", True)],
    "with a body": [("response_headers", False), ("chunk", True)],
    "a body in pieces": [("response_headers", False), ("chunk", False), ("chunk", True)],
    "with trailers": [("response_headers", False), ("chunk", False), ("response_trailers", True)],
    "headers not shown": [("chunk", False), ("chunk", True)],
}


def local_reply(rig, session, parts):
    for kind, ended in parts:
        if kind == "response_headers":
            rig.response_headers(session, 408, ended, "text/plain")
        elif kind == "chunk":
            rig.chunk(session, b"request timeout", ended)
        else:
            rig.trailers(session, request=False)


@pytest.mark.parametrize("parts", LOCAL_REPLIES.values(), ids=list(LOCAL_REPLIES))
@pytest.mark.parametrize("response", [NONE, STREAMED, BUFFERED, PARTIAL, FULL_DUPLEX])
@pytest.mark.parametrize("request_mode", [STREAMED, BUFFERED, PARTIAL, FULL_DUPLEX])
@pytest.mark.parametrize("moment", ["opened", "collecting", "waiting"])
def test_a_response_before_the_pick_goes_through_and_ends_the_request(pb, moment, request_mode, response, parts):
    rig = Rig(pb)
    fed = []
    wire, session = rig.open(request_mode, response, eager=True)
    if moment != "opened":
        rig.request_headers(session)
    if moment == "waiting":
        rig.host.feed = fed.append
        rig.body(session)
    before = len(wire.sent)
    local_reply(rig, session, parts)
    seen = parts if response == FULL_DUPLEX else parts[:1]
    names = {"response_headers": "response_headers", "chunk": "response_body", "response_trailers": "response_trailers"}
    assert rig.kinds(wire)[before:] == [names[kind] for kind, _ in seen]
    assert (wire.status, wire.held) == (0, 0)
    if response == FULL_DUPLEX:
        chunks = [a.response_body.response for a in rig.answers(wire) if a.WhichOneof("response") == "response_body"]
        assert [chunk.body_mutation.streamed_response.body for chunk in chunks] == [b"request timeout"] * len(chunks)
    assert [type(event).__name__ for event in fed] == (["RequestArrived", "StreamLost"] if moment == "waiting" else [])


async def test_a_response_while_its_prompt_is_read_ends_the_request(asking):
    rig, reader, wire, session = asking
    rig.response_headers(session, 408)
    await turns()
    assert (rig.kinds(wire), wire.status) == (["request_headers", "response_headers"], 0)
    assert reader.answers[0].cancelled()
    assert (rig.seen.decisions, rig.leases()) == ([], 0)


def test_what_comes_of_a_request_beside_a_local_reply_is_not_answered(rig):
    wire, session = rig.open(FULL_DUPLEX, FULL_DUPLEX)
    rig.request_headers(session)
    rig.response_headers(session, 408)
    rig.body(session, eos=False)
    rig.trailers(session)
    session.reject(Reject(request_id=1, status=503, reason="evicted", message=""))
    rig.chunk(session, b"request timeout", eos=True)
    assert (rig.kinds(wire), wire.status, rig.leases()) == (["response_headers", "response_body"], 0, 0)


@pytest.mark.parametrize("request_mode", [BUFFERED, FULL_DUPLEX])
@pytest.mark.parametrize("pieces", [1, 2])
def test_a_large_head_counts_in_the_budget_as_long_as_it_is_kept(pb, request_mode, pieces):
    rig, fed = Rig(pb), []
    rig.host.feed = fed.append
    wire, session = rig.open(request_mode, STREAMED, wired=False)
    rig.request_headers(session, x_small="a" * 10_000)
    assert wire.held == 0
    wire, session = rig.open(request_mode, STREAMED, wired=False)
    rig.request_headers(session, x_large="a" * 20_000)
    head = wire.held
    assert head > 20_000
    if request_mode == FULL_DUPLEX and pieces == 2:
        rig.body(session, BODY[:9], eos=False)
        assert wire.held > head
        rig.body(session, BODY[9:])
    else:
        rig.body(session)
    assert wire.held == head - 1 + (len(BODY) if request_mode == FULL_DUPLEX else 0)
    rig.driver.feed(fed[0])
    assert (rig.leases(), wire.status, wire.held) == (1, None, 0)


@pytest.mark.parametrize("eos", [True, False])
def test_a_head_without_room_is_the_end(rig, eos):
    wire, session = rig.open(BUFFERED, STREAMED)
    wire.hold = lambda size, expected=0: session.on_lost("")
    rig.request_headers(session, eos, x_large="a" * 20_000)
    assert wire.sent == [] and rig.leases() == 0
