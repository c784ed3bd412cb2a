"""One rank of one endpoint that we connect to: its SUB socket, its replay, its feed."""

import asyncio

import zmq

from fairlead.io.kv_events.feed import Feed, Sync
from fairlead.io.kv_events.pump import Pump
from fairlead.io.kv_events.replay import Replayer
from fairlead.io.kv_events.settings import Curve, Limits
from fairlead.io.kv_events.sockets import Context, Monitor, receive, subscriber
from fairlead.wire.kv_events_frames import live


class Subscription:
    """A worker of the pump. Raises `zmq.ZMQError` when the address is none."""

    def __init__(
        self,
        context: Context,
        addresses: tuple[str, str],
        curve: Curve | None,
        limits: Limits,
        feed: Feed,
        pump: Pump,
        slots: asyncio.Semaphore,
    ) -> None:
        self.feed = feed
        self._stopped = False
        self._limits = limits
        self._pump = pump
        self._loop = asyncio.get_running_loop()
        self._socket = subscriber(context, limits, curve)
        events, replay = addresses
        self._address = events
        try:
            self._monitor = Monitor(self._socket, self._connected, self._lost)
            self._socket.connect(events)
        except zmq.ZMQError:
            self._socket.close(linger=0)
            raise
        self._replayer = Replayer(context, replay, curve, limits, feed, slots, self._wake) if replay else None
        self._descriptors = (int(self._socket.get(zmq.FD)), self._monitor.descriptor)
        self._loop.add_reader(self._descriptors[0], self._wake)
        self._loop.add_reader(self._descriptors[1], self._monitor.read)
        self._loop.call_soon(self._monitor.read)
        self._wake()

    def step(self, now: float) -> bool:
        feed = self.feed
        if self._stopped:
            return False
        if feed.step(now):
            return True
        if feed.sync is Sync.LIVE:
            frames = receive(self._socket)
            if frames is None:
                return False
            self._take(frames)
            if feed.sync is Sync.LIVE:
                return True
        if self._replayer is None:
            return False
        if self._replayer.under_way:
            return self._replayer.step()
        return self._replayer.look()

    def sweep(self) -> None:
        """Look for what no descriptor has told."""
        self._monitor.read()
        self._wake()

    def engine_started(self, at: float) -> None:
        """See `Feed.engine_started`."""
        self.feed.engine_started(at)
        self._wake()

    def cut(self) -> None:
        """Lose the connection, as when the network breaks; `mend` dials again. For tests and drills."""
        self._socket.disconnect(self._address)
        self._lost()  # of a disconnection that was asked for the monitor does not tell

    def mend(self) -> None:
        self._socket.connect(self._address)

    def stop(self) -> None:
        """Take nothing more, from this moment on: the slot may soon be another endpoint's."""
        self._stopped = True
        self.feed.gone()
        self.feed.cache.linked = False

    async def close(self) -> None:
        """Leave; nothing of it stays in the loop."""
        self.stop()
        for descriptor in self._descriptors:
            self._loop.remove_reader(descriptor)
        if self._replayer is not None:
            await self._replayer.close()
        self._monitor.close()
        self._socket.close(linger=0)

    def _take(self, frames: list[bytes]) -> None:
        if sum(map(len, frames)) > self._limits.max_batch:
            self.feed.unreadable()
            return
        try:
            received = live(frames)
        except ValueError:
            self.feed.unreadable()
            return
        self.feed.live(received)

    def _wake(self) -> None:
        self._pump.wake(self)

    def _connected(self) -> None:
        self.feed.cache.linked = True
        self.feed.connected()
        self._wake()

    def _lost(self) -> None:
        self.feed.cache.linked = False
        self.feed.connection_lost()
