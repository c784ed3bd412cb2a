"""Health checking over a stream that is a list."""

from typing import Any

import pytest

from fairlead.core.errors import ProtocolError
from fairlead.gateway import health
from fairlead.gateway.health import HealthService, ServingStatus


class Stream:
    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.ended: tuple[int, str] | None = None

    def send(self, *messages: bytes) -> None:
        self.sent += messages

    def send_last(self, *messages: bytes) -> None:
        self.send(*messages)
        self.finish()

    def finish(self, code: int = 0, message: str = "") -> None:
        assert self.ended is None
        self.ended = (code, message)

    def writable_bytes(self) -> int:
        return 0


def named(service: str) -> bytes:
    return b"\x0a" + bytes((len(service),)) + service.encode()


def call(service: HealthService, path: str, request: bytes) -> tuple[Any, Stream]:
    stream = Stream()
    handler = service.routes()[path](stream, {})
    handler.on_message(request)
    return handler, stream


SERVING, NOT_SERVING, SERVICE_UNKNOWN = b"\x08\x01", b"\x08\x02", b"\x08\x03"


@pytest.mark.parametrize(
    "service", ["", "readiness", "inference-extension", "envoy.service.ext_proc.v3.ExternalProcessor"]
)
def test_services_that_follow_readiness(service: str) -> None:
    made = HealthService()
    for ready, answer in ((False, NOT_SERVING), (True, SERVING), (False, NOT_SERVING)):
        made.set_ready(ready)
        _, stream = call(made, health.CHECK, named(service))
        assert (stream.sent, stream.ended) == ([answer], (0, ""))


def test_liveness_is_always_serving() -> None:
    made = HealthService()
    assert call(made, health.CHECK, named("liveness"))[1].sent == [SERVING]
    assert made.status("liveness") is ServingStatus.SERVING


def test_a_standby_is_warm_and_not_ready() -> None:
    made = HealthService()
    _, watching = call(made, health.WATCH, named("warm"))
    for ready, warm in ((False, False), (False, True), (True, True)):
        made.set_ready(ready, warm)
        assert call(made, health.CHECK, named("readiness"))[1].sent == [SERVING if ready else NOT_SERVING]
        assert call(made, health.CHECK, named("warm"))[1].sent == [SERVING if warm else NOT_SERVING]
    assert watching.sent == [NOT_SERVING, SERVING]
    made.set_ready(False)
    assert watching.sent == [NOT_SERVING, SERVING, NOT_SERVING], "left out, it is the same"


def test_unknown_services() -> None:
    made = HealthService()
    _, stream = call(made, health.CHECK, named("somebody"))
    assert stream.sent == [] and stream.ended is not None and stream.ended[0] == 5
    _, stream = call(made, health.WATCH, named("somebody"))
    assert (stream.sent, stream.ended) == ([SERVICE_UNKNOWN], None)
    made.set_ready(True)
    assert stream.sent == [SERVICE_UNKNOWN]


def test_watchers_hear_changes_until_they_go() -> None:
    made = HealthService()
    handler, stream = call(made, health.WATCH, named("readiness"))
    _, alive = call(made, health.WATCH, named("liveness"))
    handler.on_half_close()
    for ready in (True, True, False):
        made.set_ready(ready)
    assert stream.sent == [NOT_SERVING, SERVING, NOT_SERVING]
    assert alive.sent == [SERVING]
    handler.on_message(named("liveness"))  # one request a stream
    assert made.watchers == 2
    handler.on_lost("reset")
    made.set_ready(True)
    assert stream.sent == [NOT_SERVING, SERVING, NOT_SERVING]
    assert made.watchers == 1
    assert stream.ended is None


def test_watches_end_with_the_process() -> None:
    made = HealthService()
    streams = [call(made, health.WATCH, named(service))[1] for service in ("readiness", "liveness", "nobody")]
    made.end_watches()
    assert [stream.ended and stream.ended[0] for stream in streams] == [14, 14, 14]
    assert made.watchers == 0
    made.set_ready(True)
    assert streams[0].sent == [NOT_SERVING]


@pytest.mark.parametrize("path", [health.CHECK, health.WATCH])
@pytest.mark.parametrize("request_bytes", [b"\x0a\xff", b"\x0a\x02\xff\xff", b"\xff" * 20])
def test_malformed_requests(path: str, request_bytes: bytes) -> None:
    made = HealthService()
    _, stream = call(made, path, request_bytes)
    assert stream.sent == [] and stream.ended is not None and stream.ended[0] == 3
    assert made.watchers == 0


@pytest.mark.parametrize("path", [health.CHECK, health.WATCH])
def test_no_request_at_all(path: str) -> None:
    stream = Stream()
    HealthService().routes()[path](stream, {}).on_half_close()
    assert stream.ended is not None and stream.ended[0] == 3


def test_requests_are_read() -> None:
    assert health.read_request(b"") == ""
    assert health.read_request(named("x") + b"\x10\x01" + named("y")) == "y"
    with pytest.raises(ProtocolError):
        health.read_request(b"\x0a")
