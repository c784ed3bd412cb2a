"""KV-cache event batches of model servers: msgpack bytes to `fairlead.fleet.kv.events`.

What is read (vLLM 0.9 to 0.32, SGLang, llm-d's storage back end and simulator)
* A batch is an array `[ts, events, data_parallel_rank]` or a map of these; the rank may be missing.
* An event is a map with `type` (vLLM since 0.24), an array with the tag first (before that, and SGLang), or a byte
  string that holds one of the two. Trailing fields may be missing, further ones are ignored.
* Hashes are unsigned or signed 64-bit integers, or byte strings of which the last 8 bytes count.
* `block_created`, `block_evicted`, `block_offloaded` are read as maps with `block_hashes` or `block_hash`, and
  `medium` or `tier`.

Rules
* One bad event costs only itself. An unreadable batch raises `ValueError`, nothing else ever does.
* Decoding is in two steps: the batch at once, without its token ids (8 µs for 1,024 of them against 32), then event by
  event while they are applied.
* Publishers do not change their encoding, so each has a decoder of its own, which tries the last one first.
"""

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from fairlead.fleet.kv.events import AllCleared, BlocksRemoved, BlocksStored, KvEvent
from fairlead.wire.kv_events_values import extras_of, hash_of, hashes_of, tokens_of

_Hash = int | bytes
_NO_TOKENS, _NIL = Raw(b"\x90"), Raw(b"\xc0")
#: A byte string that holds a byte string that holds … an event.
_DEEPEST = 2
#: Events of one batch: 10,000 removals take 2 ms to decode. A batch with more is none.
_NOT_ENDLESS = Meta(max_length=20_000)


class _MapStored(Struct, tag_field="type", tag="BlockStored"):
    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None = None
    token_ids: Raw = _NO_TOKENS
    block_size: int = 0
    lora_id: int | str | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Raw = _NIL
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _MapRemoved(Struct, tag_field="type", tag="BlockRemoved"):
    block_hashes: list[_Hash]
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
_RawEvent = _MapStored | _MapRemoved | _MapCleared | Raw


class _MapBatchOfMaps(Struct):
    ts: float
    events: Annotated[list[_MapEvent], _NOT_ENDLESS]
    data_parallel_rank: int | None = None


class _ArrayBatchOfMaps(Struct, array_like=True):
    ts: float
    events: Annotated[list[_MapEvent], _NOT_ENDLESS]
    data_parallel_rank: int | None = None


class _ArrayBatchOfArrays(Struct, array_like=True):
    ts: float
    events: Annotated[list[_ArrayEvent], _NOT_ENDLESS]
    data_parallel_rank: int | None = None


class _ArrayBatch(Struct, array_like=True):
    ts: Any
    events: Annotated[list[Raw], _NOT_ENDLESS]
    data_parallel_rank: Any = None


class _MapBatch(Struct):
    events: Annotated[list[Raw], _NOT_ENDLESS]
    ts: Any = 0.0
    data_parallel_rank: Any = None


class _Plain(Struct):
    """The requirement texts' own events."""

    type: str
    block_hashes: list[_Hash] = []
    block_hash: _Hash | None = None
    medium: str | None = None
    tier: str | None = None


_WHOLE: tuple[msgspec.msgpack.Decoder[Any], ...] = tuple(
    msgspec.msgpack.Decoder(kind) for kind in (_ArrayBatchOfMaps, _ArrayBatchOfArrays, _MapBatchOfMaps)
)
_LOOSE: tuple[msgspec.msgpack.Decoder[Any], ...] = tuple(
    msgspec.msgpack.Decoder(kind) for kind in (_ArrayBatch, _MapBatch)
)
_ONE_MAP: msgspec.msgpack.Decoder[_MapEvent] = msgspec.msgpack.Decoder(_MapEvent)
_ONE_ARRAY: msgspec.msgpack.Decoder[_ArrayEvent] = msgspec.msgpack.Decoder(_ArrayEvent)
_ONE_PLAIN = msgspec.msgpack.Decoder(_Plain)
_BYTES = msgspec.msgpack.Decoder(bytes)


class Batch:
    """A batch whose events are decoded one by one while one iterates, once.

    `ts`: the engine's clock at sending, Unix seconds; `rank`: data-parallel rank, 0 if it is not told; `bad`: events
    that had to be skipped so far.
    """

    __slots__ = ("_raw", "bad", "rank", "ts")

    def __init__(self, ts: float, rank: int, raw: list[_RawEvent]) -> None:
        self.ts = ts
        self.rank = rank
        self.bad = 0
        self._raw = raw

    def __len__(self) -> int:
        """Events, bad ones included."""
        return len(self._raw)

    def __iter__(self) -> Iterator[KvEvent]:
        return (event for event in self.each() if event is not None)

    def each(self) -> Iterator[KvEvent | None]:
        """`None` for each bad event, so that a batch of nothing else does not take long at a time."""
        for raw in self._raw:
            try:
                yield _event(raw)
            except (ValueError, msgspec.DecodeError):
                self.bad += 1
                yield None


class BatchDecoder:
    """Decodes the batches of one publisher."""

    def __init__(self) -> None:
        self._first = 0

    def decode(self, payload: bytes) -> Batch:
        """Raises `ValueError` when the bytes are no batch at all."""
        try:
            batch = _WHOLE[self._first].decode(payload)
        except (msgspec.DecodeError, RecursionError):
            return self._search(payload)
        return Batch(batch.ts, batch.data_parallel_rank or 0, batch.events)

    def _search(self, payload: bytes) -> Batch:
        for number, decoder in enumerate(_WHOLE):
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
    """Raises `ValueError` or `msgspec.DecodeError` for what is no event."""
    if isinstance(raw, Raw):
        return _loose(bytes(raw), 0)
    if isinstance(raw, _MapStored):
        return _stored(raw)
    if isinstance(raw, _MapRemoved):
        return BlocksRemoved(hashes_of(raw.block_hashes), raw.medium or "", raw.group_idx or 0)
    return AllCleared()


def _stored(raw: _MapStored) -> BlocksStored:
    lora = raw.lora_name or (f"#{raw.lora_id}" if raw.lora_id else "")
    return BlocksStored(
        hashes_of(raw.block_hashes),
        hash_of(raw.parent_block_hash or 0),
        tokens_of(bytes(raw.token_ids)),
        raw.block_size,
        lora,
        raw.medium or "",
        raw.group_idx or 0,
        raw.kv_cache_spec_kind or "",
        extras_of(bytes(raw.extra_keys), raw.lora_name),
    )


def _loose(content: bytes, depth: int) -> KvEvent:
    """An event in any form."""
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
    hashes = hashes_of(raw.block_hashes or ([] if raw.block_hash is None else [raw.block_hash]))
    medium = raw.medium or raw.tier or ""
    if raw.type == "block_created":
        return BlocksStored(hashes, medium=medium)
    if raw.type == "block_evicted":
        return BlocksRemoved(hashes, medium)
    if raw.type == "block_offloaded":
        return BlocksStored(hashes, medium=medium or "cpu")
    raise ValueError(f"unknown event {raw.type!r}")
