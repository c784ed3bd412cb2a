"""Replays of missed batches, and ZMQ sockets: non-blocking, bounded, and with CURVE if keys are set."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from fairlead.pool.aio import cancelled, set_within
from fairlead.pool.kv_events.discovery import Curve, Limits
from fairlead.pool.kv_events.feed import Feed, Sync
from fairlead.pool.kv_events.wire import END, bounded, replay_request, replayed

#: A connection attempt that hangs is given up after this time, in ms: the engine may be restarting.
_CONNECT_TIMEOUT = 3_000
#: Interval of the heartbeats that detect a vanished peer, in ms.
HEARTBEAT = 10_000
#: Replies of a replay, and their bytes, that are taken out of ZMQ's queue in a turn of the event loop.
_REPLIES, _REPLY_BYTES = 64, 1 << 20
#: Bytes of memory for each frame, besides its own.
_FRAME = 64

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
    # When libzmq (4.3.5) connects again by itself while the queue is full, the next read ends the process: "Assertion
    # failed: _input_stopped". So `Subscription` connects again, and a replay is requested again.
    socket.set(zmq.RECONNECT_IVL, -1)
    socket.set(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT)
    socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT)
    socket.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT)
    # Larger frames are not read into memory: libzmq drops the connection.
    socket.set(zmq.MAXMSGSIZE, limits.max_frame)
    secure(socket, curve)
    return socket


def secure(socket: Socket, curve: Curve | None) -> None:
    """Set the CURVE keys of a socket; `None` = no encryption. Call it before the socket is bound or connected."""
    if curve is not None:
        socket.set(zmq.CURVE_PUBLICKEY, curve.public.encode())
        socket.set(zmq.CURVE_SECRETKEY, curve.secret.encode())
        if curve.server:
            socket.set(zmq.CURVE_SERVERKEY, curve.server.encode())
        else:
            socket.set(zmq.CURVE_SERVER, 1)


def bound_to(socket: Socket) -> str:
    """The address of a bound socket, with its actual port."""
    address = socket.get(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return address.rstrip(b"\0").decode()


def receive(socket: Socket) -> list[bytes] | None:
    """The next message; `None` = there is none."""
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


def receive_from(socket: Socket) -> tuple[list[bytes], int] | None:
    """The next message, and the descriptor of the connection on which it came; `None` = there is none."""
    try:
        frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
    return [frame.bytes for frame in frames], int(frames[0].get(zmq.SRCFD))


#: Events of a monitor: how a handshake may fail. Without detail, the other side ended the connection.
AUTH, PROTOCOL, NO_DETAIL = _FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
)


class Monitor:
    """Reports when a socket's connection is up or lost, the descriptor of a lost one, and why a handshake failed."""

    def __init__(
        self,
        socket: Socket,
        connected: Callable[[], None],
        lost: Callable[[int], None],
        refused: Callable[[int], None],
    ) -> None:
        self._watched = socket
        events = sum(_FAILURES) | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._events: Any = socket.get_monitor_socket(events)
        self._connected = connected
        self._lost = lost
        self._refused = refused

    @property
    def descriptor(self) -> int:
        return int(self._events.get(zmq.FD))

    def read(self) -> None:
        """Read the socket's events, and report each connection that came up, was lost or failed."""
        while True:
            try:
                event = parse_monitor_message(self._events.recv_multipart(zmq.NOBLOCK))
            except (zmq.Again, zmq.ZMQError):
                return
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._lost(int(event["value"]))
            elif event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected()
            else:
                self._refused(event["event"])

    def close(self) -> None:
        with contextlib.suppress(zmq.ZMQError):
            self._watched.disable_monitor()
        self._events.close(linger=0)


# Fetches missed batches: one replay at a time per publisher, and a bounded number for all publishers.
#
# Rules
# * A replay has limits for its total time and for silence. A failed replay is tried again after a pause, and given up
#   after some attempts without a new batch. Then the feed continues with live batches, and no replay is requested until
#   a cool-down has passed or the publisher has connected again.
# * Each replay has a new socket, so that late replies are dropped.
# * A publisher sends faster than its batches can be applied, and ZMQ bounds only their number. So replies are taken out
#   of ZMQ's queue as they arrive. When too many bytes wait here, the replay is cut off, and another one follows once
#   these are applied.


class Replayer:
    """Makes the replays for a feed. `slots` bounds concurrent replays. `wake` is called when there is work."""

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
        #: Replies may have arrived, or those that were received have been passed to the feed.
        self._stirred = asyncio.Event()
        #: Replies that were received but not passed to the feed, and their bytes.
        self._replies: deque[list[bytes]] = deque()
        self._bytes = 0
        #: No more replies are received.
        self._cut = False
        self._over = False
        self._complete = False
        self._cool_until = 0.0
        self._cooldown = limits.replay_cooldown
        self._retry: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def _look(self) -> bool:
        """Start a replay if the feed wants one. Return true if no replay is possible now, so the feed continues without
        it."""
        if self._feed.sync is not Sync.WANTED:
            return False
        if self._loop.time() < self._cool_until:
            self._feed.give_up()
            return True
        self._task = self._loop.create_task(self._run())
        return False

    def connected(self) -> None:
        """The publisher has just come up, so a replay is likely to succeed: end the cool-down."""
        self._cool_until, self._cooldown = 0.0, self._limits.replay_cooldown

    def step(self) -> bool:
        """Start a replay, or pass a reply of the present one to the feed; only if the feed is not busy. Return false if
        there is nothing to do yet. A replay is read to its end even if its rest is ignored."""
        if self._task is None:
            return self._look()
        if self._over or not self._replies:
            return False
        frames = self._replies.popleft()
        self._bytes -= _size(frames)
        try:
            reply = replayed(bounded(frames, self._limits.max_batch))
        except ValueError:
            self._feed.unreadable()
        else:
            if reply is END:
                self._complete = self._over = True
            else:
                self._feed.replayed(reply)
        self._over = self._over or (self._cut and not self._replies)
        if self._over or not self._replies:
            self._stirred.set()
        return True

    async def close(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        await cancelled(self._task)

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
        """Try no replay for a while, because live batches wait during each attempt. The while grows each time."""
        self._feed.give_up()
        self._cool_until = self._loop.time() + self._cooldown
        self._retry = self._loop.call_at(self._cool_until, self._try_again)
        self._cooldown = min(2 * self._cooldown, 20 * self._limits.replay_cooldown)

    def _try_again(self) -> None:
        self._feed.retry()
        self._wake()

    async def _once(self, start: int) -> bool:
        """Request a replay and wait until its replies end. Return whether the end marker arrived."""
        self._complete = self._over = self._cut = False
        try:
            self._socket = socket = dealer(self._context, self._limits, self._curve)
        except zmq.ZMQError:  # too many open files
            return False
        try:
            socket.connect(self._address)
            self._feed.replay_begins()
            # A DEALER queues messages until it is connected.
            socket.send_multipart(replay_request(start), zmq.NOBLOCK)
            self._loop.add_reader(int(socket.get(zmq.FD)), self._stirred.set)
            async with asyncio.timeout(self._limits.replay_timeout):
                await self._until_over()
        except (TimeoutError, zmq.ZMQError):
            return False
        finally:
            self._hang_up()
            self._replies.clear()
            self._bytes = 0
        return self._complete

    async def _until_over(self) -> None:
        """Wait for the replay's end. Raises `TimeoutError` if the publisher is silent too long while all its replies
        are applied."""
        while not self._over:
            self._stirred.clear()
            if self._gather():
                await asyncio.sleep(0)
            elif not await set_within(self._stirred, self._limits.replay_silence):
                self._gather()  # ZMQ's descriptors can lose a wake-up
                if not self._replies and not self._feed.busy:
                    raise TimeoutError

    def _gather(self) -> bool:
        """Take some replies out of ZMQ's queue. Return whether there may be more."""
        until = self._bytes + _REPLY_BYTES
        for _ in range(_REPLIES):
            frames = receive(self._socket) if self._socket is not None else None
            if frames is None:
                return False
            if not self._replies:
                self._wake()
            self._replies.append(frames)
            self._bytes += _size(frames)
            if self._bytes > self._limits.replay_bytes:
                self._cut = True
                self._hang_up()
            if self._bytes > until:
                break
        return True

    def _hang_up(self) -> None:
        """Close the socket, with the replies that are in its queue."""
        if self._socket is not None:
            self._loop.remove_reader(int(self._socket.get(zmq.FD)))
            self._socket.close(linger=0)
            self._socket = None


def _size(frames: list[bytes]) -> int:
    return sum(map(len, frames)) + _FRAME * len(frames)
