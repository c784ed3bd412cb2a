"""KV events of a replica, published as vLLM does: what the engine's cache stores and forgets, batch by batch.

    publisher = KvPublisher(KvEventsConfig(), name="127.0.0.1:8000", model="m")
    publisher.attach(replica.engine.blocks, block_size)

Rules (vLLM 0.32, measured)
* Batches are numbered from 0 after every start. Nothing is sent while nothing happens.
* What the cache forgets stands before what is stored in its place. A cleared cache is told with the next batch.
* Replays are answered from a buffer of the last batches; requests of a wrong form get no answer.
* Explicit addresses are bound here (vLLM binds only `*`): many stubs share a machine, on ports that they are given.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

import zmq
from msgspec import Struct, field

from fairlead.engine.blocks import BlockManager
from fairlead.fleet.kv.events import AllCleared, BlocksRemoved, BlocksStored, KvEvent
from fairlead.stub.kv_names import BlockNames
from fairlead.stub.kv_sockets import CurveServer, Replays, publisher_socket
from fairlead.wire.kv_events_encode import Encoding, encode_batch
from fairlead.wire.kv_events_frames import sequence, topic


class KvEventsConfig(Struct, frozen=True, kw_only=True):
    """Addresses may end in `:*` for a free port. `connect` dials the subscriber instead of binding."""

    events: str = "tcp://127.0.0.1:*"
    #: Empty = no replay socket.
    replay: str = "tcp://127.0.0.1:*"
    connect: bool = False
    #: Empty = `kv@<name>@<model>`; `-` = the empty topic, vLLM's default.
    topic: str = ""
    rank: int = 0
    first: int = 0
    buffer_steps: int = 10_000
    #: Replies of vLLM before 0.26 have no topic.
    replay_topic: bool = True
    encoding: Encoding = field(default_factory=Encoding)
    #: Tell hashes as a vLLM with this algorithm and PYTHONHASHSEED would (see `kv_names`); empty = the engine's own.
    hashes: str = ""
    hash_seed: str = ""
    curve: CurveServer | None = None


class KvPublisher:
    """Implements the engine's `BlockHooks`. Must be made and closed within a running loop."""

    def __init__(
        self, config: KvEventsConfig, name: str = "stub", model: str = "", unix: Callable[[], float] = time.time
    ) -> None:
        self.config = config
        self.block_size = 16
        self._unix = unix
        self._loop = asyncio.get_running_loop()
        self._topic = b"" if config.topic == "-" else config.topic.encode() or topic(name, model)
        self._next = config.first
        self._events: list[KvEvent] = []
        self._salt = ""
        self._names = BlockNames(config.hashes, config.hash_seed) if config.hashes else None
        self._flush_soon: asyncio.Handle | None = None
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._lose = 0
        self._told: deque[int] = deque(maxlen=100_000)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(1)
        try:
            self._socket, self.events_address = publisher_socket(
                self._context, config.events, config.connect, config.curve
            )
            self._replays = None
            if config.replay:
                self._replays = Replays(self._context, config.replay, config.curve, self._from)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise

    @property
    def replay_address(self) -> str:
        return self._replays.address if self._replays is not None else ""

    @property
    def next_sequence(self) -> int:
        return self._next

    def attach(self, blocks: BlockManager, block_size: int) -> None:
        """Publish what this cache does from now on."""
        self.block_size = block_size
        blocks.hooks = self

    async def close(self) -> None:
        if self._flush_soon is not None:
            self._flush_soon.cancel()
        if self._replays is not None:
            self._replays.close()
        self._socket.close(linger=0)
        self._context.destroy(linger=0)

    # ---------------------------------------------------------------- the engine's side

    def salted(self, salt: str) -> None:
        self._salt = salt

    def stored(self, hashes: Sequence[int], parent: int, tokens: Callable[[], bytes], lora: str) -> None:
        extras: list[tuple[str, ...]] | None = None
        salt, self._salt = self._salt, ""
        if salt:
            extras = [(salt,), *[()] * (len(hashes) - 1)]
        told, content = list(hashes), tokens()
        if self._names is not None:
            told, parent = self._names.name(hashes, parent, content, self.block_size, lora, salt)
        self._told.extend(told)
        self.add(
            BlocksStored(told, parent, content, self.block_size, lora, "GPU", kind="full_attention", extras=extras)
        )

    def removed(self, digest: int) -> None:
        self.add(BlocksRemoved([digest if self._names is None else self._names.of(digest)], "GPU"))

    def cleared(self) -> None:
        # Told with the next step: vLLM answers /reset_prefix_cache at once and publishes later.
        self._events.append(AllCleared())

    # ---------------------------------------------------------------- on demand

    def add(self, event: KvEvent) -> None:
        """Publish an event with the batch that is under way; it is sent once the loop's current callback is over."""
        self._events.append(event)
        if self._flush_soon is None:
            self._flush_soon = self._loop.call_soon(self.flush)

    def offload(self, count: int, medium: str = "CPU") -> list[int]:
        """Say that the latest `count` stored blocks lie in another tier too; returns their hashes, oldest first."""
        hashes = list(self._told)[-count:] if count else []
        if hashes:
            self.add(BlocksStored(hashes, medium=medium))
        return hashes

    def drop(self, hashes: Sequence[int], medium: str = "CPU") -> None:
        """Say that these blocks are no longer in a tier."""
        self.add(BlocksRemoved(list(hashes), medium))

    def lose(self, batches: int) -> None:
        """Do not send the next batches. They are numbered and can be replayed."""
        self._lose = batches

    def restart(self) -> None:
        """Begin another life without saying so: numbers from the start, nothing to replay."""
        self._events.clear()
        self._buffer.clear()
        self._told.clear()
        self._next = self.config.first

    def flush(self) -> None:
        """Send what has been gathered as one batch."""
        self._flush_soon = None
        events, self._events = self._events, []
        if not events:
            return
        payload = encode_batch(self._unix(), events, self.config.rank, self.config.encoding)
        self.send(payload)

    def send(self, payload: bytes) -> None:
        """Number and send any bytes as a batch."""
        number = self._next
        self._next += 1
        self._buffer.append((number, payload))
        if self._lose:
            self._lose -= 1
            return
        try:
            self._socket.send_multipart([self._topic, sequence(number), payload], zmq.NOBLOCK)
        except zmq.Again:
            pass

    def _from(self, start: int) -> list[tuple[bytes | None, int, bytes]]:
        name = self._topic if self.config.replay_topic else None
        return [(name, number, payload) for number, payload in self._buffer if number >= start]
