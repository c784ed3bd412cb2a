"""A feed against an engine that loses batches, restarts and forgets its history, at random.

Whatever happened: once the feed has caught up and nothing was missing for good, the index holds what the engine holds.
The default run is short; FAIRLEAD_KV_STEPS sets the number of steps.
"""

import os
import random
from array import array
from collections import Counter

import pytest
from kv_blocks import copies_of

from fairlead.core.kv.events import AllCleared, BlocksRemoved, BlocksStored, KvEvent
from fairlead.core.kv.index import KvIndex
from fairlead.lab.stub.kv_publisher import Encoding, encode_batch
from fairlead.pool.kv_events.feed import Feed, Sync
from fairlead.pool.kv_events.wire import Frames

STEPS = int(os.environ.get("FAIRLEAD_KV_STEPS", "3000"))
ENCODINGS = (
    Encoding(),
    Encoding("array", hashes="bytes"),
    Encoding(batch="map", hashes="signed"),
    Encoding(wrapped=True),
)


class Engine:
    """The naive truth: copies per block; numbered batches with time stamps; a bounded history."""

    def __init__(self, rng: random.Random, history: int) -> None:
        self.rng = rng
        self.history = history
        self.ts = 0.0
        self.encoding = ENCODINGS[0]
        self.restart()

    def restart(self) -> None:
        self.copies: Counter[int] = Counter()
        self.buffer: list[Frames] = []
        self.number = 0
        self.encoding = self.rng.choice(ENCODINGS)

    def batch(self) -> Frames:
        events: list[KvEvent] = []
        for _ in range(self.rng.randint(1, 4)):
            draw = self.rng.random()
            held = [digest for digest, count in self.copies.items() if count]
            if draw < 0.6 or not held:
                digest = self.rng.randint(1, 40) << 58
                self.copies[digest] += 1
                events.append(BlocksStored([digest], 0, array("I", [digest >> 58]).tobytes(), 1, "", "GPU"))
            elif draw < 0.97:
                digest = self.rng.choice(held)
                self.copies[digest] -= 1
                events.append(BlocksRemoved([digest], "GPU"))
            else:
                self.copies.clear()
                events.append(AllCleared())
        self.ts += 1.0
        frames = Frames(b"", self.number, encode_batch(self.ts, events, 0, self.encoding))
        self.number += 1
        self.buffer = [*self.buffer, frames][-self.history :]
        return frames


class Net:
    """Between engine and feed: what is sent may be lost, a connection may break."""

    def __init__(self, seed: int, history: int, can_replay: bool = True) -> None:
        self.rng = random.Random(seed)
        self.engine = Engine(self.rng, history)
        self.index = KvIndex(max_blocks=10_000)
        self.index.add_slot(0)
        self.feed = Feed(self.index, self.index.rank(0, 0, "m"), can_replay)
        self.in_flight: list[Frames] = []
        self.breaks = 0

    def step(self) -> None:
        draw = self.rng.random()
        if draw < 0.80:
            self.in_flight.append(self.engine.batch())
        elif draw < 0.90:
            self.engine.batch()  # lost on the way
        elif draw < 0.96:
            # The connection breaks: what was in flight is lost, and so is what the engine says meanwhile.
            self.in_flight.clear()
            self.feed.connection_lost()
            for _ in range(self.rng.randint(0, 3)):
                self.engine.batch()
            if self.rng.random() < 0.3:
                self.engine.restart()
                for _ in range(self.rng.randint(0, 12)):
                    self.engine.batch()
            self.feed.connected()
            self.breaks += 1
        else:
            self.engine.restart()  # so soon that the connection does not notice
        if self.rng.random() < 0.5:
            self.deliver()

    def deliver(self) -> None:
        """Until the feed has all there is."""
        while True:
            if self.feed.step(0.0):
                continue
            if self.feed.sync is Sync.WANTED:
                self.replay()
            elif self.in_flight:
                self.feed.live(self.in_flight.pop(0))
            else:
                break
        while self.index.tend(0.0):
            pass

    def replay(self) -> None:
        start = self.feed.wanted
        self.feed.replay_begins()
        for frames in list(self.engine.buffer):
            if frames.sequence >= start:
                self.feed.replayed(frames)
                while self.feed.busy:
                    self.feed.step(0.0)
            if self.rng.random() < 0.02:
                # The engine goes on meanwhile.
                self.in_flight.append(self.engine.batch())
        self.feed.replay_ends(self.rng.random() < 0.95)

    def held(self) -> dict[int, int]:
        copies = {}
        for shelf in self.feed.cache.shelves.values():
            for number in range(1, 41):
                if count := copies_of(shelf, number << 58):
                    copies[number << 58] = count
        return copies


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_with_replay_the_index_ends_up_with_the_truth(seed: int) -> None:
    net = Net(seed, history=1_000_000)
    restarts = 0
    for step in range(STEPS // 3):
        net.step()
        if net.in_flight and net.rng.random() < 0.9:
            continue
        # One more batch tells the feed of everything that was lost before it, and that it is another life.
        net.in_flight.append(net.engine.batch())
        net.deliver()
        truth = {digest: count for digest, count in net.engine.copies.items() if count}
        assert net.held() == truth, f"step {step}"
        assert not net.feed.cache.provisional
        restarts = net.feed.count.restarts
        if len(net.engine.buffer) > 300:
            net.engine.restart()
    # What was missing of a former life was never asked for again; of the present one nothing ever was.
    assert net.feed.count.lost < restarts
    assert restarts > 3 and net.feed.count.replayed > 20 and net.breaks > 3
    net.index.validate()


@pytest.mark.parametrize("can_replay", [True, False])
def test_with_less_history_nothing_breaks_and_a_cleared_engine_is_known_again(can_replay: bool) -> None:
    net = Net(4, history=3, can_replay=can_replay)
    for step in range(STEPS // 3):
        net.step()
        if step % 50 == 0:
            net.deliver()
            net.index.validate()
            # After clearing, whatever was wrong is gone.
            cleared = Frames(b"", net.engine.number, encode_batch(net.engine.ts + 0.5, [AllCleared()]))
            net.engine.number += 1
            net.engine.buffer = [*net.engine.buffer, cleared][-3:]
            net.engine.copies.clear()
            net.in_flight.append(cleared)
            for _ in range(3):
                net.in_flight.append(net.engine.batch())
            net.deliver()
            truth = {digest: count for digest, count in net.engine.copies.items() if count}
            assert net.held() == truth, f"step {step}"
    assert net.feed.count.lost > 0
