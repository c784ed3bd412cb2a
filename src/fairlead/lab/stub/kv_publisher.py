"""Publishes the KV events of a replica as vLLM does: what the engine's cache stores and forgets, in batches.

    publisher = KvPublisher(KvEventsConfig(), name="127.0.0.1:8000", model="m")
    publisher.attach(replica.engine.blocks, block_size)

Rules (vLLM 0.32, measured)
* Batches are numbered from 0 after every start. Nothing is sent while nothing happens.
* What the cache forgets precedes what is stored in its place. A cleared cache is reported with the next batch.
* Replays are answered from a buffer of the last batches. Malformed requests get no answer.
* Explicit addresses are bound here (vLLM binds only `*`), because many stubs share a machine on given ports.
"""

import asyncio
import sys
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
import zmq
from msgspec import Struct, field

from fairlead.core.kv.events import AllCleared, BlocksRemoved, BlocksStored, KvEvent
from fairlead.core.kv.hashing import EngineHasher, short
from fairlead.lab.engine import tokens as tk
from fairlead.lab.engine.blocks import BlockManager
from fairlead.pool.kv_events.discovery import Curve
from fairlead.pool.kv_events.replay import Context, Socket, bound_to, secure
from fairlead.pool.kv_events.wire import replay_end, replay_reply, replay_start, sequence, topic

# The encodings of KV events in different versions of model servers, for the stub and for testing decoders.


class Encoding(Struct, frozen=True):
    """The encoding of a publisher's events. The defaults are those of vLLM 0.32.

    `fields`: the number of fields of an array event, including the tag. vLLM 0.9 sends 6, 0.11 sends 7, 0.16 sends 8,
    0.18 sends 9, 0.20 sends 10, 0.23 sends 12.
    """

    events: Literal["map", "array"] = "map"
    batch: Literal["array", "map"] = "array"
    hashes: Literal["unsigned", "signed", "bytes"] = "unsigned"
    #: Wrap every event into a byte string, as llm-d's storage back end does.
    wrapped: bool = False
    #: Whether the batch contains the data-parallel rank.
    rank: bool = True
    fields: int = 12


#: The field order of vLLM.
_STORED: tuple[str, ...] = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window",
)  # fmt: skip
_REMOVED: tuple[str, ...] = ("block_hashes", "medium", "group_idx")
_encoder = msgspec.msgpack.Encoder()


def encode_batch(ts: float, events: Sequence[KvEvent], rank: int = 0, encoding: Encoding = Encoding()) -> bytes:  # noqa: B008
    """Encode one batch. Raises `OverflowError` for a hash beyond 64 bits."""
    written: list[Any] = [_event(event, encoding) for event in events]
    if encoding.wrapped:
        written = [_encoder.encode(event) for event in written]
    if encoding.batch == "map":
        batch: Any = {"ts": ts, "events": written}
        if encoding.rank:
            batch["data_parallel_rank"] = rank
    else:
        batch = [ts, written, rank] if encoding.rank else [ts, written]
    return _encoder.encode(batch)


def _event(event: KvEvent, encoding: Encoding) -> Any:
    if isinstance(event, BlocksStored):
        tag, names, values = "BlockStored", _STORED, _stored(event, encoding)
    elif isinstance(event, BlocksRemoved):
        tag, names = "BlockRemoved", _REMOVED
        values = [_hashes(event.hashes, encoding), event.medium or None, max(event.group, 0)]
    else:
        tag, names, values = "AllBlocksCleared", (), []
    if encoding.events == "array":
        # `BlockRemoved` got its fields for medium and group in the same versions as `BlockStored`.
        most = encoding.fields if tag == "BlockStored" else 2 + (encoding.fields > 6) + (encoding.fields > 9)
        return [tag, *values][:most]
    return {"type": tag, **dict(zip(names, values, strict=True))}


def _stored(event: BlocksStored, encoding: Encoding) -> list[Any]:
    named = event.lora and not event.lora.startswith("#")
    number = 1 if named else int(event.lora[1:]) if event.lora else None
    extras: list[list[str] | None] | None = None
    if event.tokens:
        kept = event.extras if event.extras is not None else [()] * len(event.hashes)
        extras = [[*([event.lora] if named else []), *extra] or None for extra in kept]
    return [
        _hashes(event.hashes, encoding),
        _hashes([event.parent], encoding)[0] if event.parent else None,
        _ids(event),
        event.block_size,
        number,
        event.medium or None,
        event.lora if named else None,
        extras,
        max(event.group, 0),
        event.kind or None,
        None,
    ]


def _ids(event: BlocksStored) -> list[int]:
    tokens = event.tokens
    ids = array("I", tokens if isinstance(tokens, bytes) else tokens.take(len(tokens)))
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def _hashes(hashes: Sequence[int], encoding: Encoding) -> list[Any]:
    if encoding.hashes == "bytes":
        return [digest.to_bytes(32, "big") for digest in hashes]
    if encoding.hashes == "signed":
        return [digest - (1 << 64) if digest >> 63 else digest for digest in hashes]
    return list(hashes)


#: The number of blocks whose digest is kept. An older block is reported by the stub's own hash.
_MOST = 500_000


class BlockNames:
    """Maps the engine's block hashes to those of a vLLM with this algorithm, for subscribers that recompute them.

    Each block gets vLLM's full digest, chained from its parent's. Events contain the last eight bytes of a digest. vLLM
    also hashes an adapter's path, which here equals its name. `seed`: PYTHONHASHSEED; empty = not set. Raises
    `ValueError` for an algorithm whose hashes are random without a seed, if none is given.
    """

    def __init__(self, algorithm: str, seed: str = "") -> None:
        self._hasher = EngineHasher(algorithm, seed or None)
        self._digests: OrderedDict[int, bytes] = OrderedDict()

    def name(
        self, hashes: Sequence[int], parent: int, tokens: bytes, block_size: int, lora: str, salt: str
    ) -> tuple[list[int], int]:
        """(hashes of the blocks, hash of the parent) as in an event, for blocks in a row after `parent` (0 = none)."""
        before = self._digests.get(parent) if parent else None
        adapter = (lora, lora) if lora else None
        digests = self._hasher.digests(tk.ids(tokens), block_size, adapter, salt or None, parent=before)
        self._digests.update(zip(hashes, digests, strict=True))
        while len(self._digests) > _MOST:
            self._digests.popitem(last=False)
        return [short(digest) for digest in digests], short(before) if before is not None else parent

    def of(self, digest: int) -> int:
        """The hash of one block as in events."""
        known = self._digests.get(digest)
        return short(known) if known is not None else digest


# The sockets of a KV event publisher: a PUB socket, and a ROUTER socket for replays.

#: Messages that a publisher keeps for a slow subscriber (vLLM's default).
_HWM = 100_000

Batches = list[tuple[bytes | None, int, bytes]]


def _socket(context: Context, kind: int, curve: Curve | None) -> Socket:
    socket = context.socket(kind)
    socket.set(zmq.SNDHWM, _HWM)
    socket.set(zmq.LINGER, 0)
    secure(socket, curve)
    return socket


class Replays:
    """Answers replay requests. `batches(start)` returns (topic or `None`, number, payload) of the buffered batches from
    number `start` on."""

    def __init__(self, context: Context, address: str, curve: Curve | None, batches: Callable[[int], Batches]) -> None:
        self._batches = batches
        self._loop = asyncio.get_running_loop()
        self._socket = _socket(context, zmq.ROUTER, curve)
        self._socket.bind(address)
        self.address = bound_to(self._socket)
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
                continue  # vLLM does not answer malformed requests either
            self._answer(peer, start)

    def _answer(self, peer: bytes, start: int) -> None:
        with_topic = True
        for name, number, payload in self._batches(start):
            with_topic = name is not None
            self._socket.send_multipart([peer, *replay_reply(name, number, payload)], zmq.NOBLOCK)
        self._socket.send_multipart([peer, *replay_end(with_topic)], zmq.NOBLOCK)


class KvEventsConfig(Struct, frozen=True, kw_only=True):
    """The settings of a publisher. Addresses may end in `:*` for a free port. `connect`: connect to the subscriber
    instead of binding. `first`: the number of the first batch. `buffer_steps`: batches kept for replays."""

    events: str = "tcp://127.0.0.1:*"
    #: Empty = no replay socket.
    replay: str = "tcp://127.0.0.1:*"
    connect: bool = False
    #: Empty = `kv@<name>@<model>`; `-` = the empty topic, vLLM's default.
    topic: str = ""
    rank: int = 0
    first: int = 0
    buffer_steps: int = 10_000
    #: Whether replies have a topic; those of vLLM before 0.26 do not.
    replay_topic: bool = True
    encoding: Encoding = field(default_factory=Encoding)
    #: Send the hashes of a vLLM with this algorithm and PYTHONHASHSEED (see `BlockNames`); empty = the engine's own
    #: hashes.
    hashes: str = ""
    hash_seed: str = ""
    curve: Curve | None = None


class KvPublisher:
    """Publishes KV events as the engine's `BlockHooks`. Must be created and closed within a running loop."""

    def __init__(
        self, config: KvEventsConfig, name: str = "stub", model: str = "", unix: Callable[[], float] = time.time
    ) -> None:
        self.config = config
        self.block_size = 16
        self._unix = unix
        self._loop = asyncio.get_running_loop()
        self._topic = b"" if config.topic == "-" else config.topic.encode() or topic(name, model)
        self.next_sequence = config.first
        self._events: list[KvEvent] = []
        self._salt = ""
        self._names = BlockNames(config.hashes, config.hash_seed) if config.hashes else None
        self._flush_soon: asyncio.Handle | None = None
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._lose = 0
        self._published: deque[int] = deque(maxlen=100_000)
        self._context: Context = zmq.Context(1)
        try:
            self._socket, self.events_address = _socket(self._context, zmq.PUB, config.curve), config.events
            if config.connect:
                self._socket.connect(config.events)
            else:
                self._socket.bind(config.events)
                self.events_address = bound_to(self._socket)
            self._replays = None
            if config.replay:
                self._replays = Replays(self._context, config.replay, config.curve, self._from)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise

    @property
    def replay_address(self) -> str:
        return self._replays.address if self._replays is not None else ""

    def attach(self, blocks: BlockManager, block_size: int) -> None:
        """Publish what this cache stores and forgets from now on."""
        self.block_size = block_size
        blocks.hooks = self

    async def close(self) -> None:
        if self._flush_soon is not None:
            self._flush_soon.cancel()
        if self._replays is not None:
            self._replays.close()
        self._socket.close(linger=0)
        self._context.destroy(linger=0)

    # ---------------------------------------------------------------- called by the engine

    def salted(self, salt: str) -> None:
        self._salt = salt

    def stored(self, hashes: Sequence[int], parent: int, tokens: Callable[[], bytes], lora: str) -> None:
        extras: list[tuple[str, ...]] | None = None
        salt, self._salt = self._salt, ""
        if salt:
            extras = [(salt,), *[()] * (len(hashes) - 1)]
        named, content = list(hashes), tokens()
        if self._names is not None:
            named, parent = self._names.name(hashes, parent, content, self.block_size, lora, salt)
        self._published.extend(named)
        self.add(
            BlocksStored(named, parent, content, self.block_size, lora, "GPU", kind="full_attention", extras=extras)
        )

    def removed(self, digest: int) -> None:
        self.add(BlocksRemoved([digest if self._names is None else self._names.of(digest)], "GPU"))

    def cleared(self) -> None:
        # Published with the next step: vLLM answers /reset_prefix_cache immediately and publishes later.
        self._events.append(AllCleared())

    # ---------------------------------------------------------------- on demand

    def add(self, event: KvEvent) -> None:
        """Add an event to the current batch, which is sent after the loop's current callback."""
        self._events.append(event)
        if self._flush_soon is None:
            self._flush_soon = self._loop.call_soon(self.flush)

    def offload(self, count: int, medium: str = "CPU") -> list[int]:
        """Report that the latest `count` stored blocks are also in another tier. Returns their hashes, oldest first."""
        hashes = list(self._published)[-count:] if count else []
        if hashes:
            self.add(BlocksStored(hashes, medium=medium))
        return hashes

    def drop(self, hashes: Sequence[int], medium: str = "CPU") -> None:
        """Report that these blocks are no longer in a tier."""
        self.add(BlocksRemoved(list(hashes), medium))

    def lose(self, batches: int) -> None:
        """Do not send the next `batches` batches. They are still numbered and can be replayed."""
        self._lose = batches

    def restart(self) -> None:
        """Begin again without an announcement: batches are numbered from the start, and none can be replayed."""
        self._events.clear()
        self._buffer.clear()
        self._published.clear()
        self.next_sequence = self.config.first

    def flush(self) -> None:
        """Send the gathered events as one batch."""
        self._flush_soon = None
        events, self._events = self._events, []
        if not events:
            return
        payload = encode_batch(self._unix(), events, self.config.rank, self.config.encoding)
        self.send(payload)

    def send(self, payload: bytes) -> None:
        """Send any bytes as a batch, with the next number."""
        number = self.next_sequence
        self.next_sequence += 1
        self._buffer.append((number, payload))
        if self._lose:
            self._lose -= 1
            return
        try:
            self._socket.send_multipart([self._topic, sequence(number), payload], zmq.NOBLOCK)
        except zmq.Again:
            pass

    def _from(self, start: int) -> Batches:
        name = self._topic if self.config.replay_topic else None
        return [(name, number, payload) for number, payload in self._buffer if number >= start]
