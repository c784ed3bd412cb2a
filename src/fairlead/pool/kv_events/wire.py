"""Decode KV event batches: frames (topic, sequence number, payload), replay messages, and events from msgpack.

A live batch is `topic, sequence (8 bytes big-endian), payload`. A replay is requested with `empty, start`. The
publisher replies with `empty, topic, sequence, payload` (vLLM since 0.26) or `empty, sequence, payload` for each
buffered batch from `start` on, and with `empty, [empty,] ff×8, empty` at the end. A request without the empty frame, or
with two, gets no answer (0.32.0, measured).
"""

import re
import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Generic, TypeVar, overload

import msgspec
from msgspec import Meta, Raw, Struct

from fairlead.core.kv.cache import MOST_GROUPS, UNNAMED
from fairlead.core.kv.events import AllCleared, BlocksRemoved, BlocksStored, KvEvent

_END = b"\xff" * 8
_LAST = (1 << 64) - 1


class Frames(Struct, gc=False):
    """A batch as received. `topic` is empty if the publisher has none, or leaves it out in replays."""

    topic: bytes
    sequence: int
    payload: bytes


class Topic(Struct, frozen=True):
    """The topic `kv@<pod>@<model>`. Any other topic is taken as a pod's name."""

    pod: str
    model: str = ""


#: The reply that ends a replay.
END = Frames(b"", _LAST, b"")


def bounded(frames: list[bytes], most: int) -> list[bytes]:
    """Return a message's frames. Raises `ValueError` if they have more than `most` bytes together."""
    if sum(map(len, frames)) > most:
        raise ValueError(f"a message of more than {most} bytes")
    return frames


def live(frames: Sequence[bytes]) -> Frames:
    """Read a live batch. Raises `ValueError` unless there are three frames with a sequence number in the second."""
    if len(frames) != 3:
        raise ValueError(f"{len(frames)} frames instead of topic, sequence and payload")
    topic, sequence, payload = frames
    return Frames(topic, sequence_of(sequence), payload)


def sequence_of(frame: bytes) -> int:
    """Read a sequence number. Raises `ValueError` if the frame does not have 8 bytes."""
    if len(frame) != 8:
        raise ValueError(f"a sequence number of {len(frame)} bytes instead of 8")
    return int.from_bytes(frame, "big")


def topic_of(frame: bytes) -> Topic:
    """The pod and model that a topic names. The model may contain `@`."""
    text = frame.decode("utf-8", "replace")
    parts = text.split("@", 2)
    return Topic(parts[1], parts[2]) if len(parts) == 3 else Topic(text)


def topic(pod: str, model: str) -> bytes:
    return f"kv@{pod}@{model}".encode()


def sequence(number: int) -> bytes:
    return number.to_bytes(8, "big")


def replay_request(start: int) -> list[bytes]:
    """The request for all buffered batches from `start` on."""
    return [b"", start.to_bytes(8, "big")]


def replay_start(frames: Sequence[bytes]) -> int:
    """Read the start from a replay request; it may have 1 to 8 bytes. Raises `ValueError`."""
    if len(frames) != 2 or frames[0] or not 0 < len(frames[1]) <= 8:
        raise ValueError("a replay request is an empty frame and a start of at most 8 bytes")
    return int.from_bytes(frames[1], "big")


def replay_reply(topic: bytes | None, number: int, payload: bytes) -> list[bytes]:
    """The reply with a buffered batch. `topic`: `None` = the form before vLLM 0.26."""
    return [b"", *([] if topic is None else [topic]), sequence(number), payload]


def replay_end(with_topic: bool = True) -> list[bytes]:
    return [b"", *([b""] if with_topic else []), _END, b""]


def replayed(frames: Sequence[bytes]) -> Frames:
    """Read a reply in either form; `END` at the end. Raises `ValueError` for anything else."""
    parts = list(frames[1:]) if frames and not frames[0] and len(frames) > 2 else list(frames)
    if len(parts) == 2:
        parts.insert(0, b"")
    if len(parts) != 3:
        raise ValueError(f"a replay reply of {len(frames)} frames")
    if parts[1] == _END:
        return END
    return Frames(parts[0], sequence_of(parts[1]), parts[2])


# Single values of KV events: hashes, token ids and extra keys, in the forms of different engine versions.

_MASK = (1 << 64) - 1
_NIL = 0xC0
_INTS = msgspec.msgpack.Decoder(list[int])
_ANY = msgspec.msgpack.Decoder()
_RAWS = msgspec.msgpack.Decoder(list[Raw])
#: Extra keys are decoded for this many blocks at a time. The next two limit their bytes and entries.
_EXTRAS_STEP, _MOST_EXTRA_BYTES, _MOST_EXTRAS = 128, 1 << 18, 8192
#: Up to this many bytes, token ids are decoded in one step: 5,000 ids in 0.2 ms.
_AT_ONCE = 16_384
#: A non-negative integer of up to 32 bits, in any of msgpack's sizes.
_TOKEN = rb"(?:[\x00-\x7f]|\xcc.|\xcd..|\xce....|\xd2[\x00-\x7f]...|\xcf\x00\x00\x00\x00....)"
#: `re` compiles one pattern per repeat count, so chunks have one size, and the rest is read as single ids.
_CHUNK = 2048
_CHUNK_PATTERN = re.compile(_TOKEN + b"{%d}" % _CHUNK, re.DOTALL)
_REST_PATTERN = re.compile(_TOKEN + b"{0,%d}" % _CHUNK, re.DOTALL)
_CHUNK_HEAD = b"\xdc" + _CHUNK.to_bytes(2, "big")


def hash_of(value: int | bytes) -> int:
    """A block hash as an unsigned 64-bit integer; of a byte string, the last 8 bytes in big-endian order. 0 = none."""
    if isinstance(value, bytes):
        return int.from_bytes(value[-8:], "big")
    if not -1 << 63 <= value <= _MASK:
        raise ValueError(f"block hash {value} has more than 64 bits")
    return value & _MASK


def hashes_of(values: list[int | bytes]) -> list[int]:
    """`hash_of` for a list. A list of unsigned integers is returned unchanged."""
    if not values:
        return []
    try:
        if min(values) >= 0:  # type: ignore[operator]
            return values  # type: ignore[return-value]
        return [value & _MASK for value in values]  # type: ignore[operator]
    except TypeError:
        pass
    return [hash_of(value) for value in values]


def tokens_of(raw: bytes) -> "bytes | RawTokens":
    """Read token ids from a msgpack array: as little-endian 32-bit integers or, if there are many, as a stream of them.

    Raises `ValueError` unless it is an array of 32-bit unsigned integers; a stream may raise it while being read.
    """
    if len(raw) > _AT_ONCE:
        return RawTokens(raw)
    return _packed(raw)


def _packed(raw: bytes) -> bytes:
    try:
        ids = array("I", _INTS.decode(raw))
    except (OverflowError, msgspec.DecodeError) as error:
        raise ValueError(f"token_ids: {error}") from None
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


class RawTokens:
    """Token ids that are decoded a few thousand at a time, because decoding a million takes 50 ms."""

    def __init__(self, raw: bytes) -> None:
        """`raw`: a msgpack array. Raises `ValueError` if it is not."""
        self._count, self._offset = _array(raw, "token_ids")
        self._raw = raw
        self._ready = b""

    def __len__(self) -> int:
        return self._count

    def take(self, count: int) -> bytes:
        """The next `count` token ids as little-endian 32-bit integers. Raises `ValueError` for anything else."""
        chunks, size = [self._ready], len(self._ready)
        while size < 4 * count:
            chunks.append(self._more())
            size += len(chunks[-1])
        ready = b"".join(chunks)
        self._ready = ready[4 * count :]
        return ready[: 4 * count]

    def _more(self) -> bytes:
        match = _CHUNK_PATTERN.match(self._raw, self._offset)
        head = _CHUNK_HEAD
        if match is None:
            match = _REST_PATTERN.match(self._raw, self._offset)
            assert match is not None
            if match.end() == self._offset or match.end() < len(self._raw):
                raise ValueError("token_ids: not only 32-bit token ids")
            # Less than a chunk is left. The number of ids is known only after splitting them.
            count = len(re.findall(_TOKEN, match.group(), re.DOTALL))
            head = b"\xdc" + count.to_bytes(2, "big")
        self._offset = match.end()
        return _packed(head + match.group())


def _array(raw: bytes, name: str) -> tuple[int, int]:
    """The number of items of a msgpack array, and the offset of the first. Raises `ValueError` for other values."""
    kind = raw[0]
    if kind == 0xDC:
        return int.from_bytes(raw[1:3], "big"), 3
    if kind == 0xDD:
        return int.from_bytes(raw[1:5], "big"), 5
    if kind & 0xF0 == 0x90:
        return kind & 0x0F, 1
    raise ValueError(f"{name} is no array")


def extras_of(raw: bytes, lora: str | None, blocks: int) -> Sequence[tuple[str, ...]] | None:
    """The extra keys of each block, without the adapter's name, which vLLM puts first; `None` if there are none.

    Raises `ValueError` for anything but a list with one list (or nil) for each of the `blocks`. If there are many
    blocks, the result may raise it later, while it is read.
    """
    if raw[0] == _NIL:
        return None
    count, start = _array(raw, "extra_keys")
    if raw.count(b"\xc0", start) + raw.count(b"\x90", start) == len(raw) - start:
        return None
    if count != blocks:
        raise ValueError(f"{blocks} blocks, but extra keys for {count}")
    extras = Extras(raw, lora)
    if blocks > _EXTRAS_STEP:
        return extras
    decoded = extras[:]
    return decoded if any(decoded) else None


class Extras(Sequence[tuple[str, ...]]):
    """Extra keys that are decoded when they are asked for, because those of 40,000 blocks take 70 ms."""

    def __init__(self, raw: bytes, lora: str | None) -> None:
        """`raw`: a msgpack array."""
        self._lora = lora
        try:
            self._blocks = _RAWS.decode(raw)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"extra_keys: {error}") from None

    def __len__(self) -> int:
        return len(self._blocks)

    @overload
    def __getitem__(self, which: int) -> tuple[str, ...]: ...
    @overload
    def __getitem__(self, which: slice) -> Sequence[tuple[str, ...]]: ...
    def __getitem__(self, which: int | slice) -> tuple[str, ...] | Sequence[tuple[str, ...]]:
        """Raises `ValueError` if the keys cannot be decoded, or are too many or too long for this number of blocks."""
        if isinstance(which, int):
            return self[which : which + 1][0]
        blocks = self._blocks[which]
        if sum(len(memoryview(block)) for block in blocks) > _MOST_EXTRA_BYTES:
            raise ValueError(f"extra_keys: more than {_MOST_EXTRA_BYTES} bytes for {len(blocks)} blocks")
        extras, left = [], _MOST_EXTRAS
        for block in blocks:
            entries = self._entries(block, left)
            left -= len(entries)
            extras.append(entries)
        return extras

    def _entries(self, block: Raw, most: int) -> tuple[str, ...]:
        try:
            entries = _ANY.decode(block)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"extra_keys: {error}") from None
        if entries is None:
            return ()
        if not isinstance(entries, list):
            raise ValueError("extra_keys is not a list of lists")
        if len(entries) > most:
            raise ValueError("extra_keys: too many for so few blocks")
        if self._lora and entries and entries[0] == self._lora:
            del entries[0]
        return tuple(map(_extra, entries))


def _extra(entry: Any) -> str:
    """The identifier in an extra key: the key itself, or in older versions the first item of `[identifier, offset]`."""
    if isinstance(entry, list) and entry:
        entry = entry[0]
    if isinstance(entry, str):
        return entry
    if isinstance(entry, bytes):
        return entry.hex()
    if isinstance(entry, int):
        return str(entry)
    raise ValueError(f"extra_keys: {type(entry).__name__} is not an identifier")


# Decodes batches of KV events from msgpack to `fairlead.core.kv.events`.
#
# Formats (vLLM 0.9 to 0.32, SGLang, llm-d's storage back end and simulator)
# * A batch is an array `[ts, events, data_parallel_rank]` or a map with these names; the rank may be missing.
# * An event is a map with `type` (vLLM since 0.24), an array with the tag first (earlier versions and SGLang), or a
#   byte string that contains one of the two. Trailing fields may be missing, and unknown fields are ignored.
# * Hashes are unsigned or signed 64-bit integers, or byte strings, of which the last 8 bytes count.
# * `block_created`, `block_evicted` and `block_offloaded` are maps with `block_hashes`, `blocks` or `block_hash`,
#   `medium` or `tier`, and the other fields of a `BlockStored`.
#
# Rules
# * A bad event affects no other event. Only an unreadable batch raises `ValueError`.
# * Decoding has two steps: first the whole batch without its token ids (8 µs instead of 32 for 1,024 ids), then each
#   event when it is applied.
# * Publishers do not change their encoding, so each has its own decoder, which tries the last encoding first.

_Hash = int | bytes
#: The hashes of one event. A batch of 1 MiB has at most 116,000 of an engine.
_Hashes = Annotated[list[_Hash], Meta(max_length=1 << 17)]
_NO_TOKENS, _NO_EXTRAS = Raw(b"\x90"), Raw(b"\xc0")
#: The deepest nesting of byte strings around an event.
_DEEPEST = 2
#: The most events of a batch. Decoding 10,000 removals takes 2 ms. A larger batch is unreadable.
_NOT_ENDLESS = Meta(max_length=20_000)


class _MapStored(Struct, tag_field="type", tag="BlockStored"):
    block_hashes: _Hashes
    parent_block_hash: _Hash | None = None
    token_ids: Raw = _NO_TOKENS
    block_size: int = 0
    lora_id: int | str | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Raw = _NO_EXTRAS
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class _MapRemoved(Struct, tag_field="type", tag="BlockRemoved"):
    block_hashes: _Hashes
    medium: str | None = None
    group_idx: int | None = None


class _MapCleared(Struct, tag_field="type", tag="AllBlocksCleared"):
    pass


class _ArrayStored(_MapStored, tag="BlockStored", array_like=True):
    pass


class _ArrayRemoved(_MapRemoved, tag="BlockRemoved", array_like=True):
    pass


class _ArrayCleared(_MapCleared, tag="AllBlocksCleared", array_like=True):
    pass


_MapEvent = _MapStored | _MapRemoved | _MapCleared
_ArrayEvent = _ArrayStored | _ArrayRemoved | _ArrayCleared
_Event = TypeVar("_Event")
_RawEvent = _MapStored | _MapRemoved | _MapCleared | Raw


class _StrictMapBatch(Struct, Generic[_Event]):
    ts: float
    events: Annotated[list[_Event], _NOT_ENDLESS]
    data_parallel_rank: int | None = None


class _StrictArrayBatch(_StrictMapBatch[_Event], array_like=True):
    pass


class _ArrayBatch(Struct, array_like=True):
    ts: Any
    events: Annotated[list[Raw], _NOT_ENDLESS]
    data_parallel_rank: Any = None


class _MapBatch(Struct):
    events: Annotated[list[Raw], _NOT_ENDLESS]
    ts: Any = 0.0
    data_parallel_rank: Any = None


class _Plain(Struct):
    """The events `block_created`, `block_evicted` and `block_offloaded`."""

    type: str
    block_hashes: _Hashes = []
    blocks: _Hashes = []
    block_hash: _Hash | None = None
    parent_block_hash: _Hash | None = None
    token_ids: Raw = _NO_TOKENS
    block_size: int = 0
    medium: str | None = None
    tier: str | None = None


_STRICT: tuple[msgspec.msgpack.Decoder[Any], ...] = tuple(
    msgspec.msgpack.Decoder(kind)
    for kind in (_StrictArrayBatch[_MapEvent], _StrictArrayBatch[_ArrayEvent], _StrictMapBatch[_MapEvent])
)
_LOOSE: tuple[msgspec.msgpack.Decoder[Any], ...] = tuple(
    msgspec.msgpack.Decoder(kind) for kind in (_ArrayBatch, _MapBatch)
)
_ONE_MAP: msgspec.msgpack.Decoder[_MapEvent] = msgspec.msgpack.Decoder(_MapEvent)
_ONE_ARRAY: msgspec.msgpack.Decoder[_ArrayEvent] = msgspec.msgpack.Decoder(_ArrayEvent)
_ONE_PLAIN = msgspec.msgpack.Decoder(_Plain)
_BYTES = msgspec.msgpack.Decoder(bytes)


class Batch(Struct, eq=False):
    """A batch whose events are decoded during iteration, which is possible only once.

    `ts`: the engine's clock at sending, Unix seconds. `rank`: data-parallel rank, 0 if missing. `bad`: events skipped
    so far. `bad_reason`: why the last of them was skipped.
    """

    ts: float
    rank: int
    _raw: list[_RawEvent]
    bad: int = 0
    bad_reason: str = ""

    def __len__(self) -> int:
        """The number of events, including bad events."""
        return len(self._raw)

    def __iter__(self) -> Iterator[KvEvent]:
        return (event for event in self.each() if event is not None)

    def each(self) -> Iterator[KvEvent | None]:
        """Yield the events, and `None` for each bad event, so that bad events do not hold the caller for long."""
        for raw in self._raw:
            try:
                yield _event(raw)
            except (ValueError, msgspec.DecodeError, RecursionError) as error:
                self.bad, self.bad_reason = self.bad + 1, str(error)
                yield None


class BatchDecoder:
    """Decodes the batches of one publisher."""

    def __init__(self) -> None:
        self._first = 0

    def decode(self, payload: bytes) -> Batch:
        """Decode a batch. Raises `ValueError` if the bytes are not a batch."""
        try:
            batch = _STRICT[self._first].decode(payload)
        except (msgspec.DecodeError, RecursionError):
            return self._search(payload)
        return Batch(batch.ts, batch.data_parallel_rank or 0, batch.events)

    def _search(self, payload: bytes) -> Batch:
        for number, decoder in enumerate(_STRICT):
            if number == self._first:
                continue
            try:
                batch = decoder.decode(payload)
            except (msgspec.DecodeError, RecursionError):
                continue
            self._first = number
            return Batch(batch.ts, batch.data_parallel_rank or 0, batch.events)
        problem = "it is empty"
        for decoder in _LOOSE:
            try:
                batch = decoder.decode(payload)
            except (msgspec.DecodeError, RecursionError) as error:
                problem = str(error)
                continue
            return Batch(_number(batch.ts), int(_number(batch.data_parallel_rank)), batch.events)
        raise ValueError(f"no batch of KV events: {problem}")


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e15 else 0.0


def _event(raw: _RawEvent) -> KvEvent:
    """Decode an event. Raises `ValueError` or `msgspec.DecodeError`."""
    if isinstance(raw, Raw):
        return _loose(bytes(raw), 0)
    if isinstance(raw, _MapStored):
        return _stored(raw)
    if isinstance(raw, _MapRemoved):
        return BlocksRemoved(hashes_of(raw.block_hashes), raw.medium or "", _group(raw.group_idx))
    return AllCleared()


def _stored(raw: _MapStored) -> BlocksStored:
    lora = raw.lora_name or (f"#{raw.lora_id}" if raw.lora_id else "")
    hashes, tokens = hashes_of(raw.block_hashes), tokens_of(bytes(raw.token_ids))
    return BlocksStored(
        hashes,
        hash_of(raw.parent_block_hash or 0),
        tokens,
        raw.block_size,
        lora,
        raw.medium or "",
        _group(raw.group_idx),
        raw.kv_cache_spec_kind or "",
        extras_of(bytes(raw.extra_keys), raw.lora_name, len(hashes)) if tokens else None,
        raw.kv_cache_spec_sliding_window or 0,
    )


def _group(number: int | None) -> int:
    if number is None:
        return UNNAMED
    if not 0 <= number < MOST_GROUPS:  # a prompt's shortest match over groups counts, so one such group would hide all
        raise ValueError(f"group_idx {number} is not between 0 and {MOST_GROUPS - 1}")
    return number


def _loose(content: bytes, depth: int) -> KvEvent:
    """Decode an event in any form."""
    kind = content[0] if content else 0xC0
    if kind in (0xC4, 0xC5, 0xC6) and depth < _DEEPEST:
        return _loose(_BYTES.decode(content), depth + 1)
    if kind & 0xF0 == 0x90 or kind in (0xDC, 0xDD):
        return _event(_ONE_ARRAY.decode(content))
    try:
        return _event(_ONE_MAP.decode(content))
    except msgspec.ValidationError as error:
        try:
            return _plain(_ONE_PLAIN.decode(content))
        except msgspec.DecodeError:
            raise error from None


def _plain(raw: _Plain) -> KvEvent:
    hashes = hashes_of(raw.block_hashes or raw.blocks or ([] if raw.block_hash is None else [raw.block_hash]))
    if not hashes:
        raise ValueError(f"{raw.type!r} without block_hashes, blocks or block_hash")
    medium = raw.medium or raw.tier or ""
    if raw.type == "block_created":
        parent, tokens = hash_of(raw.parent_block_hash or 0), tokens_of(bytes(raw.token_ids))
        return BlocksStored(hashes, parent, tokens, raw.block_size, medium=medium)
    if raw.type == "block_evicted":
        return BlocksRemoved(hashes, medium)
    if raw.type == "block_offloaded":
        return BlocksStored(hashes, medium=medium or "cpu")
    raise ValueError(f"unknown event {raw.type!r}")
