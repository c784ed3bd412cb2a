"""A bound socket that publishers connect to (centralised mode). Who they are, only their topics say.

Anyone who reaches the port could poison the index, so a publisher's pod must be on the allow-list; with CURVE keys it
must also own one of the allowed client keys. Without CURVE the port belongs behind a network policy. There is no
replay: a bound socket does not know where its publishers listen.
"""

import asyncio
from collections.abc import Callable

import zmq

from fairlead.io.kv_events.feed import Feed
from fairlead.io.kv_events.pump import Pump
from fairlead.io.kv_events.settings import Curve, Limits
from fairlead.io.kv_events.sockets import Context, bound_to, receive, subscriber
from fairlead.wire.kv_events import BatchDecoder
from fairlead.wire.kv_events_frames import live, topic_of

#: Ranks of one pod that are believed.
_MOST_RANKS = 256


class Hub:
    """`admit(pod, model, rank)` gives the feed of an allowed publisher, `None` for others."""

    def __init__(
        self,
        context: Context,
        address: str,
        curve: Curve | None,
        limits: Limits,
        pump: Pump,
        admit: Callable[[str, str, int], Feed | None],
    ) -> None:
        self._limits = limits
        self._pump = pump
        self._admit = admit
        self._loop = asyncio.get_running_loop()
        self._decoders: dict[bytes, BatchDecoder] = {}
        self._feeds: dict[tuple[bytes, int], Feed] = {}
        self._current: Feed | None = None
        #: Batches from publishers that are not allowed, and what was no batch at all.
        self.rejected = 0
        self.unreadable = 0
        self._socket = subscriber(context, limits, curve)
        try:
            self._socket.bind(address)
        except zmq.ZMQError:
            self._socket.close(linger=0)
            raise
        self.address = bound_to(self._socket)
        self._descriptor = int(self._socket.get(zmq.FD))
        self._loop.add_reader(self._descriptor, self._wake)
        self._wake()

    def step(self, now: float) -> bool:
        if self._socket.closed:
            return False
        if self._current is not None and self._current.step(now):
            return True
        self._current = None
        frames = receive(self._socket)
        if frames is None:
            return False
        self._take(frames)
        return True

    def forget(self, feed: Feed) -> None:
        """Its endpoint has left."""
        feed.gone()
        for name in [name for name, known in self._feeds.items() if known is feed]:
            del self._feeds[name]
            self._decoders.pop(name[0], None)

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)
        self._socket.close(linger=0)

    def _take(self, frames: list[bytes]) -> None:
        if sum(map(len, frames)) > self._limits.max_batch:
            self.unreadable += 1
            return
        try:
            received = live(frames)
            decoder = self._decoders.get(received.topic) or BatchDecoder()
            batch = decoder.decode(received.payload)
        except ValueError:
            self.unreadable += 1
            return
        feed = self._feed(received.topic, batch.rank)
        if feed is None:
            self.rejected += 1
            return
        # A topic is worth remembering only once it is allowed; others could be endless.
        self._decoders[received.topic] = decoder
        self._current = feed
        feed.live(received, batch)

    def _feed(self, name: bytes, rank: int) -> Feed | None:
        feed = self._feeds.get((name, rank))
        if feed is None and 0 <= rank < _MOST_RANKS:
            topic = topic_of(name)
            feed = self._admit(topic.pod, topic.model, rank)
            if feed is not None:
                self._feeds[name, rank] = feed
        return feed

    def _wake(self) -> None:
        self._pump.wake(self)
