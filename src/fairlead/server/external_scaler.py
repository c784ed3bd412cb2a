"""An external scaler for KEDA over gRPC (`externalscaler.proto` of KEDA 2): how many model servers there should be.

`GetMetrics` returns the value of `fairlead_desired_replicas`. While too little is known, it ends with UNAVAILABLE: an
autoscaler without a number changes nothing. `GetMetricSpec` returns the target 1, because the value is the total.
`IsActive` and `StreamIsActive` are true while that number, or if it is unknown the number of pods, is not 0. KEDA uses
them to scale to zero and back: a request that waits in an empty pool is reported within `LOOK_S`.

The trigger's metadata, which KEDA sends as `scalerMetadata`, may name a `role`. Then all these numbers are of the pods
with that role. Without it they are of the whole pool.
"""

import asyncio
import struct
from collections.abc import Callable, Sequence

from fairlead.config.problems import shorten
from fairlead.core.errors import ProtocolError, cannot_listen
from fairlead.gateway.grpc_frames import Status
from fairlead.gateway.h2_server import H2Server
from fairlead.gateway.protobuf import field, number, walk
from fairlead.gateway.stream import Routes, ServerStream

SERVICE = "/externalscaler.ExternalScaler/"
METRIC = b"fairlead_desired_replicas"
#: Seconds between two checks for watching streams.
LOOK_S = 0.5


class ExternalScaler:
    """`desired(role)`: how many pods the load needs; `None` = unknown. `present(role)`: how many there are. An empty
    role = the whole pool. `roles()`: the others."""

    def __init__(
        self, desired: Callable[[str], int | None], present: Callable[[str], int], roles: Callable[[], Sequence[str]]
    ) -> None:
        self._desired, self._present, self._roles = desired, present, roles
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

    def active(self, role: str) -> bool:
        desired = self._desired(role)
        return (self._present(role) if desired is None else desired) > 0

    def _metrics(self, role: str) -> bytes | None:
        desired = self._desired(role)
        return None if desired is None else _metric(desired)

    def role(self, message: bytes, nested: bool) -> str:
        """The role in a `ScaledObjectRef`, or in the one in field 1. Raises `ProtocolError`, also if it is unknown."""
        role, roles = _role(dict(_parts(message)).get(1, b"") if nested else message), self._roles()
        if role and role not in roles:
            why = f"known: {', '.join(roles)}" if roles else "the policy splits no requests"
            raise ProtocolError(f"metadata of the trigger: unknown role '{shorten(role)}' ({why})")
        return role

    def _routes(self) -> Routes:
        return {
            SERVICE + "IsActive": lambda stream, _: _Unary(self, stream, lambda role: number(1, self.active(role))),
            SERVICE + "GetMetricSpec": lambda stream, _: _Unary(self, stream, lambda role: _metric(1)),
            SERVICE + "GetMetrics": lambda stream, _: _Unary(self, stream, self._metrics, nested=True),
            SERVICE + "StreamIsActive": lambda stream, _: _Activity(self, stream),
        }

    def watch(self, watcher: "_Activity") -> None:
        self._watchers.add(watcher)
        if self._ticker is None:
            self._tick()

    def forget(self, watcher: "_Activity") -> None:
        self._watchers.discard(watcher)

    def _tick(self) -> None:
        for watcher in list(self._watchers):
            watcher.tell(self.active(watcher.role))
        self._ticker = asyncio.get_running_loop().call_later(LOOK_S, self._tick) if self._watchers else None


def _metric(value: int) -> bytes:
    return field(1, field(1, METRIC) + number(2, value) + b"\x19" + struct.pack("<d", float(value)))


def _role(reference: bytes) -> str:
    for part, entry in _parts(reference):
        if part == 3 and (pair := dict(_parts(entry))).get(1) == b"role":  # the map `scalerMetadata`
            return pair.get(2, b"").decode(errors="replace")
    return ""


def _parts(message: bytes) -> list[tuple[int, bytes]]:
    return [(part, message[start:end]) for part, start, end in walk(message, 0, len(message))]


class _Unary:
    """Answers the first message; no answer = the number is not known. `nested`: the `ScaledObjectRef` is in its field
    1."""

    def __init__(
        self, scaler: ExternalScaler, stream: ServerStream, answer: Callable[[str], bytes | None], nested: bool = False
    ) -> None:
        self._scaler, self._stream, self._answer, self._nested = scaler, stream, answer, nested

    def on_message(self, message: bytes) -> None:
        try:
            role = self._scaler.role(message, self._nested)
        except ProtocolError as error:
            self._stream.finish(Status.INVALID_ARGUMENT, str(error))
            return
        answer = self._answer(role)
        if answer is None:
            self._stream.finish(Status.UNAVAILABLE, "the number is not known yet")
            return
        self._stream.send(answer)
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
        self.role = ""

    def on_message(self, message: bytes) -> None:
        try:
            self.role = self._scaler.role(message, False)
        except ProtocolError as error:
            self._stream.finish(Status.INVALID_ARGUMENT, str(error))
            return
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
