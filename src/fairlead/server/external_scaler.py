"""An external scaler for KEDA over gRPC (`externalscaler.proto` of KEDA 2): how many model servers there should be.

`GetMetrics` returns the value of `fairlead_desired_replicas`. While too little is known, it returns the present number
of pods, so that KEDA changes nothing. `GetMetricSpec` returns the target 1, because the value is the total number.
`IsActive` and `StreamIsActive` are true while `GetMetrics` does not return 0. KEDA uses them to scale to zero and back:
a request that waits in an empty pool is reported within `LOOK_S`.
"""

import asyncio
import struct
from collections.abc import Callable

from fairlead.core.errors import cannot_listen
from fairlead.gateway.grpc_frames import Status
from fairlead.gateway.h2_server import H2Server
from fairlead.gateway.protobuf import field, number
from fairlead.gateway.stream import Routes, ServerStream

SERVICE = "/externalscaler.ExternalScaler/"
METRIC = b"fairlead_desired_replicas"
#: Seconds between two checks for watching streams.
LOOK_S = 0.5


class ExternalScaler:
    """`desired()`: how many pods the load needs; `None` = unknown. `present()`: how many there are."""

    def __init__(self, desired: Callable[[], int | None], present: Callable[[], int]) -> None:
        self._desired, self._present = desired, present
        self._watchers: set[_Activity] = set()
        self._ticker: asyncio.TimerHandle | None = None
        self._server = H2Server(self._routes())

    async def start(self, host: str, port: int) -> int:
        """Listen. Returns the port. Raises `ConfigError` if it cannot be used."""
        try:
            return await self._server.listen(host, port)
        except OSError as error:
            raise cannot_listen(f"{host}:{port}", error, "$.autoscaling.port") from None

    @property
    def watchers(self) -> int:
        """The number of streams that receive changes."""
        return len(self._watchers)

    async def close(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        for watcher in list(self._watchers):
            watcher.end()
        await self._server.close(0.0)

    def wanted(self) -> int:
        desired = self._desired()
        return self._present() if desired is None else desired

    def active(self) -> bool:
        return self.wanted() != 0

    def _routes(self) -> Routes:
        return {
            SERVICE + "IsActive": lambda stream, _: _Unary(stream, lambda: number(1, self.active())),
            SERVICE + "GetMetricSpec": lambda stream, _: _Unary(stream, lambda: _metric(1)),
            SERVICE + "GetMetrics": lambda stream, _: _Unary(stream, lambda: _metric(self.wanted())),
            SERVICE + "StreamIsActive": lambda stream, _: _Activity(self, stream),
        }

    def watch(self, watcher: "_Activity") -> None:
        self._watchers.add(watcher)
        if self._ticker is None:
            self._tick()

    def forget(self, watcher: "_Activity") -> None:
        self._watchers.discard(watcher)

    def _tick(self) -> None:
        active = self.active()
        for watcher in list(self._watchers):
            watcher.tell(active)
        self._ticker = asyncio.get_running_loop().call_later(LOOK_S, self._tick) if self._watchers else None


def _metric(value: int) -> bytes:
    return field(1, field(1, METRIC) + number(2, value) + b"\x19" + struct.pack("<d", float(value)))


class _Unary:
    """Answers the first message without reading it: the answer is the same for all ScaledObjects."""

    def __init__(self, stream: ServerStream, answer: Callable[[], bytes]) -> None:
        self._stream, self._answer = stream, answer

    def on_message(self, message: bytes) -> None:
        self._stream.send(self._answer())
        self._stream.finish()

    def on_half_close(self) -> None:
        self._stream.finish(Status.INVALID_ARGUMENT, "no request")

    def on_lost(self, why: str) -> None:
        pass


class _Activity:
    """A `StreamIsActive` stream: sends whether the load needs an endpoint, first at once and then at each change."""

    def __init__(self, scaler: ExternalScaler, stream: ServerStream) -> None:
        self._scaler, self._stream = scaler, stream
        self._reported: bool | None = None

    def on_message(self, message: bytes) -> None:
        self._scaler.watch(self)

    def tell(self, active: bool) -> None:
        if active is not self._reported:
            self._reported = active
            self._stream.send(number(1, active))

    def end(self) -> None:
        self._scaler.forget(self)
        self._stream.finish(Status.UNAVAILABLE, "the scheduler ends")

    def on_half_close(self) -> None:
        """Ignored: KEDA sends nothing more, but still receives."""

    def on_lost(self, why: str) -> None:
        self._scaler.forget(self)
