"""Replays of missed batches, and ZMQ sockets that never block, are bounded, and use CURVE where keys are set."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from fairlead.pool.kv_events.discovery import Curve, Limits
from fairlead.pool.kv_events.feed import Feed, Sync
from fairlead.pool.kv_events.wire import END, replay_request, replayed

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
    secure(socket, curve)
    return socket


def secure(socket: Socket, curve: Curve | None) -> None:
    """Before it is bound or connected."""
    if curve is not None:
        socket.set(zmq.CURVE_PUBLICKEY, curve.public.encode())
        socket.set(zmq.CURVE_SECRETKEY, curve.secret.encode())
        if curve.server:
            socket.set(zmq.CURVE_SERVERKEY, curve.server.encode())
        else:
            socket.set(zmq.CURVE_SERVER, 1)


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


# Fetching what was missed: one replay at a time per publisher, some over all.
#
# Rules
# * A replay has a time limit over all and one for silence. One that fails is tried again after a pause, and given up
#   after some attempts without a single new batch; then the feed goes on with what comes, and no replay is asked for
#   until a cool-down has passed.
# * A new socket per replay: replies that come late belong to nobody.


class Replayer:
    """The replay side of one feed. `slots` bounds the replays at once; `wake` is called when there is work."""

    def __init__(
        self,
        context: Context,
        address: str,
        curve: Curve | None,
        limits: Limits,
        feed: Feed,
        slots: asyncio.Semaphore,
        wake: Callable[[], None],
    ) -> None:
        self._context = context
        self._address = address
        self._curve = curve
        self._limits = limits
        self._feed = feed
        self._slots = slots
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._socket: Socket | None = None
        self._heard = asyncio.Event()
        self._over = False
        self._complete = False
        self._cool_until = 0.0
        self._cooldown = limits.replay_cooldown
        self._retry: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def look(self) -> bool:
        """Begin if the feed wants a replay and none is under way. True: none can be had now, the feed goes on."""
        if self._feed.sync is not Sync.WANTED or self._task is not None:
            return False
        if self._loop.time() < self._cool_until:
            self._feed.give_up()
            return True
        self._task = self._loop.create_task(self._run())
        return False

    @property
    def under_way(self) -> bool:
        """Whether replies may come. A replay whose rest is of no use is read to its end all the same."""
        return self._task is not None

    def step(self) -> bool:
        """Give one reply to the feed; only when it is not busy. False: there is none yet."""
        socket = self._socket
        if socket is None or self._over:
            return False
        frames = receive(socket)
        if frames is None:
            return False
        self._heard.set()
        if sum(map(len, frames)) > self._limits.max_batch:
            self._feed.unreadable()
            return True
        try:
            reply = replayed(frames)
        except ValueError:
            self._feed.unreadable()
            return True
        if reply is END:
            self._complete = True
            self._over = True
        else:
            self._feed.replayed(reply)
        return True

    async def close(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        feed, limits = self._feed, self._limits
        fruitless = 0
        try:
            while feed.sync is Sync.WANTED:
                before = feed.count.replayed
                async with self._slots:
                    complete = await self._once(feed.wanted)
                feed.replay_ends(complete)
                if complete:
                    self._cooldown = limits.replay_cooldown
                fruitless = fruitless + 1 if feed.count.replayed == before else 0
                if feed.sync is Sync.WANTED:
                    if fruitless >= limits.replay_attempts:
                        self._cool_down()
                    elif not complete:
                        await asyncio.sleep(limits.replay_backoff * 2**fruitless)
        finally:
            self._task = None
            self._wake()

    def _cool_down(self) -> None:
        """Give up for a while, for longer each time: while a replay is tried, live batches wait."""
        self._feed.give_up()
        self._cool_until = self._loop.time() + self._cooldown
        self._retry = self._loop.call_at(self._cool_until, self._try_again)
        self._cooldown = min(2 * self._cooldown, 20 * self._limits.replay_cooldown)

    def _try_again(self) -> None:
        self._feed.retry()
        self._wake()

    async def _once(self, start: int) -> bool:
        """Ask, and wait until the replies are over. Returns whether the end marker came."""
        self._complete = False
        self._over = False
        self._heard.clear()
        self._socket = socket = dealer(self._context, self._limits, self._curve)
        descriptor = int(socket.get(zmq.FD))
        try:
            socket.connect(self._address)
            self._feed.replay_begins()
            # A DEALER queues what it is given before it is connected.
            socket.send_multipart(replay_request(start), zmq.NOBLOCK)
            self._loop.add_reader(descriptor, self._wake)
            self._wake()
            async with asyncio.timeout(self._limits.replay_timeout):
                await self._until_over()
        except (TimeoutError, zmq.ZMQError):
            return False
        finally:
            self._loop.remove_reader(descriptor)
            self._socket = None
            socket.close(linger=0)
        return self._complete

    async def _until_over(self) -> None:
        """Raises `TimeoutError` when the publisher is silent for too long while we wait for it."""
        while not self._over:
            self._heard.clear()
            try:
                async with asyncio.timeout(self._limits.replay_silence):
                    await self._heard.wait()
            except TimeoutError:
                if not self._feed.busy:
                    raise
