"""The sockets of a KV event publisher: PUB, and ROUTER for replays."""

import asyncio
from collections.abc import Callable

import zmq
from msgspec import Struct

from fairlead.wire.kv_events_frames import replay_end, replay_reply, replay_start

#: Messages that a publisher keeps for a slow subscriber (vLLM's default).
_HWM = 100_000

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]
Batches = list[tuple[bytes | None, int, bytes]]


class CurveServer(Struct, frozen=True):
    """Z85 key pair of the publisher; `server`: the subscriber's public key, when the publisher dials."""

    public: str
    secret: str
    server: str = ""


def publisher_socket(context: Context, address: str, connect: bool, curve: CurveServer | None) -> tuple[Socket, str]:
    """A PUB socket and the address that it has. Raises `zmq.ZMQError` when it is taken or none."""
    socket = context.socket(zmq.PUB)
    socket.set(zmq.SNDHWM, _HWM)
    socket.set(zmq.LINGER, 0)
    _secure(socket, curve)
    if connect:
        socket.connect(address)
        return socket, address
    socket.bind(address)
    return socket, _bound_to(socket)


class Replays:
    """Answers replay requests. `batches(start)`: topic (or `None`), number and payload of all that is buffered."""

    def __init__(
        self, context: Context, address: str, curve: CurveServer | None, batches: Callable[[int], Batches]
    ) -> None:
        self._batches = batches
        self._loop = asyncio.get_running_loop()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.set(zmq.SNDHWM, _HWM)
        self._socket.set(zmq.LINGER, 0)
        _secure(self._socket, curve)
        self._socket.bind(address)
        self.address = _bound_to(self._socket)
        #: Requests that got no answer because of their form.
        self.invalid = 0
        self._descriptor = int(self._socket.get(zmq.FD))
        self._loop.add_reader(self._descriptor, self._read)
        self._read()

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)
        self._socket.close(linger=0)

    def _read(self) -> None:
        while True:
            try:
                peer, *request = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                start = replay_start(request)
            except ValueError:
                self.invalid += 1
                continue
            self._answer(peer, start)

    def _answer(self, peer: bytes, start: int) -> None:
        with_topic = True
        for name, number, payload in self._batches(start):
            with_topic = name is not None
            self._socket.send_multipart([peer, *replay_reply(name, number, payload)], zmq.NOBLOCK)
        self._socket.send_multipart([peer, *replay_end(with_topic)], zmq.NOBLOCK)


def _secure(socket: Socket, curve: CurveServer | None) -> None:
    if curve is not None:
        socket.set(zmq.CURVE_PUBLICKEY, curve.public.encode())
        socket.set(zmq.CURVE_SECRETKEY, curve.secret.encode())
        if curve.server:
            socket.set(zmq.CURVE_SERVERKEY, curve.server.encode())
        else:
            socket.set(zmq.CURVE_SERVER, 1)


def _bound_to(socket: Socket) -> str:
    address = socket.get(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return address.rstrip(b"\0").decode()
