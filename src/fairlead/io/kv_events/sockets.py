"""ZMQ sockets as the subscriber needs them: never blocking, bounded, with CURVE where keys are set."""

import contextlib
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from fairlead.io.kv_events.settings import Curve, Limits

#: A restarted engine behind the same address: connection attempts that hang are given up after that, in ms.
_CONNECT_TIMEOUT = 3_000
#: Probes that find a peer that vanished without a word, in ms.
_HEARTBEAT = 10_000

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]


def subscriber(context: Context, limits: Limits, curve: Curve | None) -> Socket:
    """A SUB socket for all topics, not yet connected: vLLM's default topic is empty."""
    socket = _socket(context, zmq.SUB, limits, curve)
    socket.set(zmq.RCVHWM, limits.queue)
    socket.set(zmq.SUBSCRIBE, b"")
    return socket


def dealer(context: Context, limits: Limits, curve: Curve | None) -> Socket:
    """A DEALER socket for replay requests, not yet connected."""
    socket = _socket(context, zmq.DEALER, limits, curve)
    socket.set(zmq.RCVHWM, limits.replay_queue)
    return socket


def _socket(context: Context, kind: int, limits: Limits, curve: Curve | None) -> Socket:
    socket = context.socket(kind)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.IPV6, 1)
    socket.set(zmq.RECONNECT_IVL, int(limits.reconnect_min * 1000))
    socket.set(zmq.RECONNECT_IVL_MAX, int(limits.reconnect_max * 1000))
    socket.set(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT)
    socket.set(zmq.HEARTBEAT_IVL, _HEARTBEAT)
    socket.set(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT)
    if curve is not None:
        socket.set(zmq.CURVE_PUBLICKEY, curve.public.encode())
        socket.set(zmq.CURVE_SECRETKEY, curve.secret.encode())
        if curve.server:
            socket.set(zmq.CURVE_SERVERKEY, curve.server.encode())
        else:
            socket.set(zmq.CURVE_SERVER, 1)
    return socket


def bound_to(socket: Socket) -> str:
    """The address that a socket is bound to, with the port that it was given."""
    address = socket.get(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return address.rstrip(b"\0").decode()


def receive(socket: Socket) -> list[bytes] | None:
    """One message if there is one."""
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


class Monitor:
    """Tells when a socket's connection comes up or is lost."""

    def __init__(self, socket: Socket, connected: Callable[[], None], lost: Callable[[], None]) -> None:
        self._watched = socket
        self._events: Any = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._connected = connected
        self._lost = lost

    @property
    def descriptor(self) -> int:
        return int(self._events.get(zmq.FD))

    def read(self) -> None:
        """Pass on what has happened."""
        while True:
            try:
                event = parse_monitor_message(self._events.recv_multipart(zmq.NOBLOCK))
            except (zmq.Again, zmq.ZMQError):
                return
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._lost()
            elif event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected()

    def close(self) -> None:
        with contextlib.suppress(zmq.ZMQError):
            self._watched.disable_monitor()
        self._events.close(linger=0)
