"""A traced request leaves with our `traceparent`; all others leave as before."""

from fairlead.core.endpoint import Endpoint
from fairlead.gateway.answers import Answers
from fairlead.gateway.ext_proc import BodyMode, Kind

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
ENDPOINT = Endpoint("ns/a", "10.0.0.1:8000")
MODES = BodyMode.STREAMED, BodyMode.STREAMED, True
NOTHING: frozenset[str] = frozenset()


def test_a_pick() -> None:
    answers, plain = Answers("0badcafe"), Answers("0badcafe")
    spoofed = frozenset({"x-prefiller-host-port"})
    for kind in (Kind.REQUEST_HEADERS, Kind.REQUEST_BODY):
        told = answers.pick(kind, ENDPOINT.address, 7, spoofed, trace=TRACE)
        assert told.count(TRACE.encode()) == 1
        assert b"traceparent" in told
        assert answers.lease(7).encode() in told
        assert b"x-prefiller-host-port" in told
        assert answers.pick(kind, ENDPOINT.address, 8, spoofed) == plain.pick(kind, ENDPOINT.address, 8, spoofed)
        assert TRACE.encode() not in answers.pick(kind, ENDPOINT.address, 8, spoofed)


def test_a_pick_with_another_body() -> None:
    answers, plain = Answers("0badcafe"), Answers("0badcafe")

    def sent(by: Answers, number: int, trace: str) -> bytes:
        return b"".join(
            by.pick_with_body(MODES, ENDPOINT.address, number, NOTHING, b'{"model":"b"}', False, True, trace=trace)
        )

    assert sent(answers, 7, TRACE).count(TRACE.encode()) == 1
    assert sent(answers, 8, "") == sent(plain, 8, "")
    assert b"traceparent" not in sent(plain, 7, "")
