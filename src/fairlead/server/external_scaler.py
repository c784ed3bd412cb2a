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
from functools import partial

from fairlead.config.problems import shorten
from fairlead.core.errors import ProtocolError, cannot_listen
from fairlead.gateway.calls import Unary, Watch
from fairlead.gateway.grpc_frames import Status
from fairlead.gateway.h2_server import H2Server
from fairlead.gateway.protobuf import field, number, walk
from fairlead.gateway.stream import Routes

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
        self._watches: set[Watch] = set()
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
        return len(self._watches)

    async def close(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        for watch in list(self._watches):
            watch.end("the scheduler ends")
        await self._server.close(0.0)

    def _active(self, role: str) -> bytes:
        desired = self._desired(role)
        return number(1, (self._present(role) if desired is None else desired) > 0)

    def _metrics(self, message: bytes) -> bytes | tuple[Status, str]:
        desired = self._desired(self._role(dict(_parts(message)).get(1, b"")))
        return (Status.UNAVAILABLE, "the number is not known yet") if desired is None else _metric(desired)

    def _spec(self, message: bytes) -> bytes:
        self._role(message)
        return _metric(1)

    def _watched(self, message: bytes) -> Callable[[], bytes]:
        role = self._role(message)
        if self._ticker is None:
            self._ticker = asyncio.get_running_loop().call_later(LOOK_S, self._tick)
        return partial(self._active, role)

    def _tick(self) -> None:
        for watch in list(self._watches):
            watch.look()
        self._ticker = asyncio.get_running_loop().call_later(LOOK_S, self._tick) if self._watches else None

    def _role(self, reference: bytes) -> str:
        """The role in a `ScaledObjectRef`. Raises `ProtocolError`, also if it is unknown."""
        role, roles = _role(reference), self._roles()
        if role and role not in roles:
            why = f"known: {', '.join(roles)}" if roles else "the policy splits no requests"
            raise ProtocolError(f"metadata of the trigger: unknown role '{shorten(role)}' ({why})")
        return role

    def _routes(self) -> Routes:
        return {
            SERVICE + "IsActive": lambda stream, _: Unary(stream, lambda message: self._active(self._role(message))),
            SERVICE + "GetMetricSpec": lambda stream, _: Unary(stream, self._spec),
            SERVICE + "GetMetrics": lambda stream, _: Unary(stream, self._metrics),
            SERVICE + "StreamIsActive": lambda stream, _: Watch(stream, self._watches, self._watched),
        }


def _metric(value: int) -> bytes:
    return field(1, field(1, METRIC) + number(2, value) + b"\x19" + struct.pack("<d", float(value)))


def _role(reference: bytes) -> str:
    for part, entry in _parts(reference):
        if part == 3 and (pair := dict(_parts(entry))).get(1) == b"role":  # the map `scalerMetadata`
            return pair.get(2, b"").decode(errors="replace")
    return ""


def _parts(message: bytes) -> list[tuple[int, bytes]]:
    return [(part, message[start:end]) for part, start, end in walk(message, 0, len(message))]
