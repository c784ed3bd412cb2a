"""Sessions of requests that leave with another model name, in every way a gateway hands them over."""

import json
import random
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest

from fairlead.core.endpoint import Endpoint
from fairlead.core.events import EndpointUp, ModelsChanged
from fairlead.core.fleet import Fleet
from fairlead.core.headers import ACCESS_LOG_METADATA, RESIZABLE_METADATA, REWRITTEN, WHOLE_BODY_METADATA
from fairlead.core.models import InferenceModel, ModelSet, Origin, Target
from fairlead.core.prefix import ChainHasher
from fairlead.core.profile import Profile
from fairlead.core.request import Request
from fairlead.core.scheduler import Pipeline
from fairlead.core.tokens import TokenEstimator
from fairlead.gateway.answers import Answers
from fairlead.gateway.driver import Driver
from fairlead.gateway.host import Host
from fairlead.gateway.session import Session
from fairlead.gateway.understand import Understanding
from fairlead.plugins.params import NoParams
from fairlead.plugins.pickers import RoundRobin

NONE, STREAMED, BUFFERED, PARTIAL, FULL_DUPLEX = range(5)
BODY = b'{"model": "chat", "messages": [{"role": "user", "content": "hi"}]}'
CHANGED = BODY.replace(b"chat", b"a-longer-target", 1)
ANSWER = b'{"model":"a-longer-target","id":1}'


class Clock:
    """Timers are due when the test says so."""

    def __init__(self) -> None:
        self.due: list[tuple[Any, Any]] = []

    def time(self) -> float:
        return 100.0

    def call_at(self, when: float, callback: Any, *args: Any) -> "Clock":
        if when <= 100.0:
            self.due.append((callback, args))
        return self

    def cancel(self) -> None: ...


class Wire:
    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.status: int | None = None

    def send(self, *messages: bytes) -> None:
        self.sent += messages

    def send_last(self, *messages: bytes) -> None:
        self.send(*messages)
        self.finish()

    def finish(self, code: int = 0, message: str = "") -> None:
        self.status = code if self.status is None else self.status

    def writable_bytes(self) -> int:
        return 1 << 20

    def watch_cancel(self, on: bool) -> None: ...

    def hold(self, size: int, expected: int = 0) -> None: ...

    def connected(self) -> bool:
        return True


class Seen:
    def __init__(self) -> None:
        self.records: list[Any] = []
        self.errors: list[int] = []

    def on_decision(self, record: Any, duration_s: float) -> None:
        self.records.append(record)

    def on_outcome(self, record: Any) -> None:
        self.records.append(record)

    def on_client_error(
        self, api: str, status: int, reason: str, headers: Mapping[str, str] | None, tenant: str = ""
    ) -> None:
        self.errors.append(status)

    def on_left(self, request: Request) -> None: ...

    def on_protocol_error(self, reason: str) -> None: ...

    def on_fallback(self, address: str, status: int) -> None: ...


class Rig:
    def __init__(self, pb: ModuleType, modes: tuple[int, int, bool], *announced: str, wired: bool = False) -> None:
        self.pb, self.modes, self.clock, self.seen, self.wire = pb, modes, Clock(), Seen(), Wire()
        tokens = TokenEstimator()
        self.fleet = Fleet()
        profile = Profile("rr", [], [], RoundRobin(NoParams()))
        self.driver = Driver(Pipeline(self.clock, random.Random(1), self.fleet, profile, tokens), self.clock, self.seen)
        self.driver.feed(EndpointUp(Endpoint("e", "10.0.0.1:80")))
        origin = Origin(namespace="n", name="m")
        chat = InferenceModel(origin=origin, model="chat", targets=(Target("a-longer-target"),))
        self.driver.feed(ModelsChanged(ModelSet((chat,))))
        understanding = Understanding(tokens, ChainHasher(), self.clock.time)
        self.host = host = Host(self.driver, understanding, Answers("ab"), self.seen, self.clock.time)
        host.logs.connected = int(wired)
        self.session = Session(host, self.wire, dict.fromkeys(announced, "1"))
        self.first = True

    def message(self, **fields: Any) -> None:
        message = self.pb.ProcessingRequest(**fields)
        if self.first:
            config = message.protocol_config
            config.request_body_mode, config.response_body_mode = self.modes[:2]
            config.send_body_without_waiting_for_header_response = self.modes[2]
            config.SetInParent()
            self.first = False
        self.session.on_message(message.SerializeToString())

    def headers(self, fields: dict[str, str], eos: bool) -> Any:
        entries = [self.pb.HeaderValue(key=key, raw_value=value.encode()) for key, value in fields.items()]
        return self.pb.HttpHeaders(headers=self.pb.HeaderMap(headers=entries), end_of_stream=eos)

    def ask(self, body: bytes = BODY, path: str = "/v1/chat/completions", **fields: str) -> None:
        named = {":method": "POST", ":path": path, **{name.replace("_", "-"): value for name, value in fields.items()}}
        self.message(request_headers=self.headers(named, not body))
        if body:
            self.message(request_body=self.pb.HttpBody(body=body, end_of_stream=True))

    def respond(self, *chunks: bytes, kind: str = "application/json", shown: bool = True) -> None:
        if shown:
            self.message(response_headers=self.headers({":status": "200", "content-type": kind}, False))
        for i, chunk in enumerate(chunks):
            self.message(response_body=self.pb.HttpBody(body=chunk, end_of_stream=i == len(chunks) - 1))

    def answers(self) -> list[Any]:
        found = [self.pb.ProcessingResponse.FromString(message) for message in self.wire.sent]
        self.wire.sent.clear()
        return found


#: (request mode, response mode, eager), announced, and the messages that answer a request.
WAYS = [
    ((FULL_DUPLEX, FULL_DUPLEX, False), (), ["request_headers", "request_body"]),
    ((BUFFERED, STREAMED, False), (), ["request_headers", "request_body"]),
    ((BUFFERED, BUFFERED, False), (), ["request_headers", "request_body"]),
    ((STREAMED, STREAMED, True), (WHOLE_BODY_METADATA, RESIZABLE_METADATA), ["request_headers"]),
    ((PARTIAL, STREAMED, False), (), ["request_headers", "request_body"]),
]


def common(answer: Any) -> Any:
    return getattr(answer, answer.WhichOneof("response")).response


def body_of(answer: Any) -> bytes:
    mutation = common(answer).body_mutation
    found: bytes = mutation.body if mutation.WhichOneof("mutation") == "body" else mutation.streamed_response.body
    return found


def decision_of(answer: Any) -> int:
    """The request's number in the decision's id, which gateways show to clients."""
    lease = answer.dynamic_metadata.fields["envoy.lb"].struct_value.fields["fairlead-lease"].string_value
    return int(lease.removeprefix("ab."), 16)


@pytest.mark.parametrize(("modes", "announced", "kinds"), WAYS)
def test_there_and_back(
    pb: ModuleType, modes: tuple[int, int, bool], announced: tuple[str, ...], kinds: list[str]
) -> None:
    rig = Rig(pb, modes, *announced)
    rig.ask(x_llm_d_inference_objective="urgent", x_prefiller_host_port="6.6.6.6:6", accept_encoding="gzip")
    answers = rig.answers()
    assert [answer.WhichOneof("response") for answer in answers] == kinds
    assert b"".join(map(body_of, answers)) == CHANGED
    (pick,) = [answer for answer in answers if answer.HasField("dynamic_metadata")]
    assert REWRITTEN in pick.dynamic_metadata.fields["envoy.lb"].struct_value.fields
    mutation = common(pick).header_mutation
    removed = {"x-llm-d-inference-objective", "x-prefiller-host-port", "accept-encoding"}
    assert removed <= set(mutation.remove_headers)
    lengths = [h.header.raw_value for a in answers for h in common(a).header_mutation.set_headers]
    # CONTINUE_AND_REPLACE takes the length off; elsewhere it must be the new one.
    assert (str(len(CHANGED)).encode() in lengths) == (common(pick).status == 0)

    rig.respond(ANSWER[:15], ANSWER[15:], shown=not announced)
    answers = rig.answers()
    if not announced:
        assert list(common(answers.pop(0)).header_mutation.remove_headers) == ["content-length"]
    if modes[1] == BUFFERED:
        return  # then chunks are whole bodies
    assert b"".join(map(body_of, answers)) == ANSWER.replace(b"a-longer-target", b"chat")
    assert rig.wire.status == 0
    assert len(rig.fleet.ledger) == 0


def test_the_session_stays_although_it_could_leave(pb: ModuleType) -> None:
    rig = Rig(pb, (FULL_DUPLEX, FULL_DUPLEX, False), ACCESS_LOG_METADATA, wired=True)
    rig.ask()
    assert rig.wire.status is None
    rig.respond(b"data: " + ANSWER + b"\n\n", b"data: " + ANSWER + b"\n\n", kind="text/event-stream")
    assert b"".join(map(body_of, rig.answers())).count(b'"chat"') == 2
    assert rig.wire.status == 0


def test_other_requests_leave_as_before(pb: ModuleType) -> None:
    rig = Rig(pb, (STREAMED, STREAMED, True), ACCESS_LOG_METADATA, WHOLE_BODY_METADATA, wired=True)
    rig.driver.feed(ModelsChanged(ModelSet()))
    rig.ask()
    assert rig.wire.status == 0
    assert [answer.WhichOneof("response") for answer in rig.answers()] == ["request_headers", "request_body"]


def test_responses_that_are_not_shown_stay_as_they_are(pb: ModuleType) -> None:
    rig = Rig(pb, (BUFFERED, NONE, False), ACCESS_LOG_METADATA, wired=True)
    rig.ask()
    answers = rig.answers()
    assert body_of(answers[-1]) == CHANGED
    assert REWRITTEN not in answers[-1].dynamic_metadata.fields["envoy.lb"].struct_value.fields
    assert rig.wire.status == 0


def test_a_body_without_a_place_for_the_name(pb: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairlead.gateway.session.splice_model", lambda *_: None)
    rig = Rig(pb, (BUFFERED, STREAMED, False))
    rig.ask()
    answer = rig.answers()[-1]
    assert answer.immediate_response.status.code == 400
    error = json.loads(answer.immediate_response.body)["error"]
    assert error["param"] == "model" and "multipart/form-data" in error["message"]
    assert decision_of(answer) == 1
    for callback, arguments in rig.clock.due:
        callback(*arguments)
    assert len(rig.fleet.ledger) == 0
    assert [type(record).__name__ for record in rig.seen.records] == ["DecisionRecord", "OutcomeRecord"]


def test_an_unknown_model(pb: ModuleType) -> None:
    rig = Rig(pb, (FULL_DUPLEX, FULL_DUPLEX, False))
    rig.ask(BODY.replace(b"chat", b"nope", 1))
    (answer,) = rig.answers()
    refused = answer.immediate_response
    assert refused.status.code == 404
    assert json.loads(refused.body)["error"]["code"] == "model_not_found"
    names = [entry.header.key for entry in refused.headers.set_headers]
    assert names == ["content-type"]
    assert decision_of(answer) == 1
    assert rig.wire.status == 0


@pytest.mark.parametrize("shown", [False, True], ids=["at the headers", "by an empty chunk"])
@pytest.mark.parametrize(
    ("path", "refused"), [("/v1/chat/completions", True), ("/v1/responses/r1/cancel", False), ("/tokenize", False)]
)
def test_a_request_that_ends_without_a_body_names_no_model(
    pb: ModuleType, path: str, refused: bool, shown: bool
) -> None:
    rig = Rig(pb, (FULL_DUPLEX, FULL_DUPLEX, False))
    rig.message(request_headers=rig.headers({":method": "POST", ":path": path}, not shown))
    if shown:
        rig.message(request_body=pb.HttpBody(body=b"", end_of_stream=True))
    answer = rig.answers()[0].immediate_response
    assert answer.status.code == (400 if refused else 0)
    if refused:
        assert json.loads(answer.body)["error"]["code"] == "model_required"


def test_a_body_that_the_gateway_does_not_show_may_name_one(pb: ModuleType) -> None:
    rig = Rig(pb, (NONE, STREAMED, False))
    rig.message(request_headers=rig.headers({":method": "POST", ":path": "/v1/chat/completions"}, False))
    assert [answer.WhichOneof("response") for answer in rig.answers()] == ["request_headers"]


def test_the_list_of_models(pb: ModuleType) -> None:
    rig = Rig(pb, (FULL_DUPLEX, FULL_DUPLEX, False))
    entries = rig.headers({":method": "GET", ":path": "/v1/models"}, True)
    rig.message(request_headers=entries)
    (answer,) = rig.answers()
    assert [one["id"] for one in json.loads(answer.immediate_response.body)["data"]] == ["chat"]
    assert rig.wire.status == 0


def test_conformance_tests_are_told_who_served(pb: ModuleType) -> None:
    rig = Rig(pb, (FULL_DUPLEX, FULL_DUPLEX, False), ACCESS_LOG_METADATA, wired=True)
    rig.host.tells_served = True
    rig.driver.feed(ModelsChanged(ModelSet()))
    rig.ask()
    rig.answers()
    message = pb.ProcessingRequest(response_headers=rig.headers({":status": "200"}, False))
    fields = message.metadata_context.filter_metadata["envoy.lb"].fields
    fields["x-gateway-destination-endpoint-served"].string_value = "10.0.0.1:80"
    rig.session.on_message(message.SerializeToString())
    (answer,) = rig.answers()
    (told,) = answer.response_headers.response.header_mutation.set_headers
    assert (told.header.key, told.header.raw_value) == ("x-conformance-test-served-endpoint", b"10.0.0.1:80")
