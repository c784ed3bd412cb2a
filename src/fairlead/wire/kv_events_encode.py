"""KV events to bytes, in the forms that model servers of different age send: for the stub, and to test decoders."""

import sys
from array import array
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from fairlead.fleet.kv.events import BlocksRemoved, BlocksStored, KvEvent


class Encoding(Struct, frozen=True):
    """How a publisher writes. The defaults are those of vLLM 0.32.

    `fields`: of an array event, the tag included: 6 = 0.9, 7 = 0.11, 8 = 0.16, 9 = 0.18, 10 = 0.20, 12 = 0.23.
    """

    events: Literal["map", "array"] = "map"
    batch: Literal["array", "map"] = "array"
    hashes: Literal["unsigned", "signed", "bytes"] = "unsigned"
    #: Every event is wrapped into a byte string, as llm-d's storage back end does.
    wrapped: bool = False
    #: Whether the batch names the data-parallel rank.
    rank: bool = True
    fields: int = 12


#: vLLM's own order.
_STORED: tuple[str, ...] = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
_REMOVED: tuple[str, ...] = ("block_hashes", "medium", "group_idx")
_encoder = msgspec.msgpack.Encoder()


def encode_batch(ts: float, events: Sequence[KvEvent], rank: int = 0, encoding: Encoding = Encoding()) -> bytes:  # noqa: B008
    """One batch. Raises `OverflowError` for a hash beyond 64 bits."""
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
        values = [_hashes(event.hashes, encoding), event.medium or None, event.group]
    else:
        tag, names, values = "AllBlocksCleared", (), []
    if encoding.events == "array":
        # A removal got its medium and its group in the versions in which a store got them.
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
        event.group,
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
