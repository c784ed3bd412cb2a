"""gRPC health checking, version 1 (grpc/doc/health-checking.md): `Check` and `Watch` for both transports.

The service `liveness` is SERVING as long as the process answers. `readiness`, the empty name, the ext_proc service and
`inference-extension` (which the reference's chart probes) follow `set_ready`. `warm` is SERVING also on a standby that
could take over. For unknown services, `Check` ends with NOT_FOUND, and `Watch` sends SERVICE_UNKNOWN and stays open.
"""

from collections.abc import Callable
from enum import IntEnum

from fairlead.core.errors import ProtocolError
from fairlead.gateway.calls import Unary, Watch
from fairlead.gateway.grpc_frames import Status
from fairlead.gateway.protobuf import fields, number
from fairlead.gateway.stream import Routes

CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"

LIVENESS = "liveness"
READINESS = "readiness"
WARM = "warm"
REFERENCE = "inference-extension"
EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"


class ServingStatus(IntEnum):
    """grpc.health.v1.HealthCheckResponse.ServingStatus."""

    UNKNOWN = 0
    SERVING = 1
    NOT_SERVING = 2
    SERVICE_UNKNOWN = 3


def read_request(message: bytes) -> str:
    """The service name of a HealthCheckRequest. Raises `ProtocolError` if it is malformed."""
    service = ""
    for key, start, end in fields(message):
        if key == 1 and end >= 0:
            try:
                service = message[start:end].decode()
            except UnicodeDecodeError:
                raise ProtocolError("the service name is not UTF-8", Status.INVALID_ARGUMENT) from None
    return service


def answer(status: ServingStatus) -> bytes:
    """Encode a HealthCheckResponse."""
    return number(1, status)


class HealthService:
    """The health service, which starts as not ready."""

    def __init__(self) -> None:
        self._ready = self._warm = False
        #: The gateway takes no new clients. It still asks for those that it has: only the ext_proc service serves.
        self.leaving = False
        #: A gateway has asked for the ext_proc service and got SERVING.
        self.asked = False
        self._watches: set[Watch] = set()

    @property
    def watchers(self) -> int:
        return len(self._watches)

    def routes(self) -> Routes:
        return {
            CHECK: lambda stream, _: Unary(stream, self._check),
            WATCH: lambda stream, _: Watch(stream, self._watches, self._watched),
        }

    def set_ready(self, ready: bool, warm: bool | None = None) -> None:
        """Set the state, and notify all watchers whose service changes. `warm`: the process could take over
        immediately; default: as `ready`."""
        states = ready, ready if warm is None else warm
        if states != (self._ready, self._warm):
            self._ready, self._warm = states
            self._notify()

    def leave(self) -> None:
        self.leaving = True
        self._notify()

    def _notify(self) -> None:
        for watch in list(self._watches):
            watch.look()

    def end_watches(self) -> None:
        """End all watch streams, which would not end by themselves, before the process ends."""
        for watch in list(self._watches):
            watch.end("the server ends")

    def status(self, service: str) -> ServingStatus:
        if service == LIVENESS:
            return ServingStatus.SERVING
        if service in ("", READINESS, EXT_PROC, REFERENCE):
            ready = self._ready and (service == EXT_PROC or not self.leaving)
            return ServingStatus.SERVING if ready else ServingStatus.NOT_SERVING
        if service == WARM:
            return ServingStatus.SERVING if self._warm else ServingStatus.NOT_SERVING
        return ServingStatus.SERVICE_UNKNOWN

    def _check(self, message: bytes) -> bytes | tuple[Status, str]:
        service = read_request(message)
        status = self.status(service)
        if service == EXT_PROC and status is ServingStatus.SERVING:
            self.asked = True
        if status is ServingStatus.SERVICE_UNKNOWN:
            return Status.NOT_FOUND, "unknown service"
        return answer(status)

    def _watched(self, message: bytes) -> Callable[[], bytes]:
        service = read_request(message)
        return lambda: answer(self.status(service))
