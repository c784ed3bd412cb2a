"""Decoding KV events: everything that was captured, older forms, and what is broken."""

import gzip
import json
import random
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fairlead.core.kv.events import AllCleared, BlocksRemoved, BlocksStored, KvEvent
from fairlead.lab.stub.kv_publisher import Encoding, encode_batch
from fairlead.pool.kv_events import wire as frames
from fairlead.pool.kv_events.wire import BatchDecoder, RawTokens, tokens_of

DATA = Path(__file__).parents[3] / "data" / "kv-events"


def rows(name: str) -> Iterator[dict[str, Any]]:
    with gzip.open(DATA / name) as file:
        yield from map(json.loads, file)


def pattern(value: Any) -> int:
    """What a hash in the capture means: ints as they are, byte strings by their last 8 bytes."""
    if value is None:
        return 0
    if isinstance(value, int):
        return value
    raw: str = value["__bytes__"]
    return int(raw[-16:], 16)


def check(event: KvEvent, recorded: dict[str, Any]) -> None:
    if recorded["type"] == "AllBlocksCleared":
        assert isinstance(event, AllCleared)
        return
    assert isinstance(event, (BlocksStored, BlocksRemoved))
    assert event.hashes == [pattern(one) for one in recorded["block_hashes"]]
    assert event.medium == recorded["medium"]
    assert event.group == recorded["group_idx"]
    if isinstance(event, BlocksStored):
        assert event.parent == pattern(recorded["parent_block_hash"])
        assert isinstance(event.tokens, bytes)
        assert array("I", event.tokens).tolist() == recorded["token_ids"]
        assert event.block_size == recorded["block_size"]
        assert event.lora == (recorded["lora_name"] or "")
        expected = [tuple(one for one in entry or () if one != event.lora) for entry in recorded["extra_keys"]]
        assert event.extras == (expected if any(expected) else None)
        assert event.kind == "full_attention"


def test_every_captured_batch_is_read_as_recorded() -> None:
    decoders: dict[str, BatchDecoder] = {}
    seen = 0
    for row in rows("streams.jsonl.gz"):
        received = frames.live([bytes.fromhex(frame) for frame in row["frames"]])
        batch = decoders.setdefault(row["stream"], BatchDecoder()).decode(received.payload)
        ts, recorded, rank = row["decoded"]
        assert batch.ts == ts and batch.rank == rank
        events = list(batch)
        assert batch.bad == 0
        for event, one in zip(events, recorded, strict=True):
            check(event, one)
            seen += 1
    assert seen > 400 and len(decoders) == 15


def test_captured_replays() -> None:
    by_name = {row["name"]: row for row in rows("replay.jsonl.gz")}
    for name, count in (("DEALER from 0", 38), ("DEALER from 30", 8), ("DEALER 1-byte start 0x25", 1)):
        replies = [frames.replayed([bytes.fromhex(frame) for frame in reply]) for reply in by_name[name]["replies"]]
        assert replies[-1] is frames.END
        start = replies[0].sequence
        assert [reply.sequence for reply in replies[:-1]] == list(range(start, start + count))
        request = [bytes.fromhex(frame) for frame in by_name[name]["request"]]
        assert frames.replay_start(request) == start
        for reply in replies[:-1]:
            assert len(list(BatchDecoder().decode(reply.payload)))
    for name in ("DEALER without empty delimiter", "DEALER with an extra frame"):
        assert by_name[name]["replies"] == []
        with pytest.raises(ValueError):
            frames.replay_start([bytes.fromhex(frame) for frame in by_name[name]["request"]])


def test_replays_before_0_26_have_no_topic() -> None:
    assert frames.replayed([b"", frames.sequence(7), b"x"]) == frames.Frames(b"", 7, b"x")
    assert frames.replayed([b"", b"", frames.sequence(7), b"x"]) == frames.Frames(b"", 7, b"x")
    assert frames.replayed(frames.replay_end(False)) is frames.END
    assert frames.replayed(frames.replay_end(True)) is frames.END


def test_older_encodings() -> None:
    for case in json.loads((DATA / "legacy.json").read_text()):
        batch = BatchDecoder().decode(bytes.fromhex(case["payload"]))
        stored, removed, cleared = list(batch)
        assert isinstance(stored, BlocksStored) and isinstance(stored.tokens, bytes)
        assert stored.hashes == [111, 222] and stored.block_size == 16 and len(stored.tokens) == 128
        assert isinstance(removed, BlocksRemoved) and removed.hashes == [111]
        assert isinstance(cleared, AllCleared) and batch.bad == 0, case["version"]


STORED = BlocksStored(
    [2**64 - 5, 7], 2**63 + 1, array("I", range(8)).tobytes(), 4, "ad", "CPU", 2, "full_attention", [("salt",), ()]
)
EVENTS: list[KvEvent] = [STORED, BlocksRemoved([2**63], "CPU", 2), AllCleared()]


@pytest.mark.parametrize("events", ["map", "array"])
@pytest.mark.parametrize("batch", ["array", "map"])
@pytest.mark.parametrize("hashes", ["unsigned", "signed", "bytes"])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("rank", [False, True])
def test_every_form_means_the_same(events: Any, batch: Any, hashes: Any, wrapped: bool, rank: bool) -> None:
    encoding = Encoding(events, batch, hashes, wrapped, rank)
    read = BatchDecoder().decode(encode_batch(1.5, EVENTS, 3, encoding))
    assert list(read) == EVENTS
    assert (read.ts, read.rank, read.bad) == (1.5, 3 if rank else 0, 0)


def test_sglang_arrays_are_padded_and_later_versions_add_fields() -> None:
    sglang = ["BlockStored", [1], None, [1, 2], 2, None, "GPU", None, None]
    longer = ["BlockStored", [1], 0, [1, 2], 2, None, None, None, None, 0, "mla_attention", None, "new", {"more": 1}]
    removed = ["BlockRemoved", [1], None]
    batch = BatchDecoder().decode(msgspec.msgpack.encode([1, [sglang, longer, removed]]))
    first, second, third = list(batch)
    assert first == BlocksStored([1], 0, array("I", [1, 2]).tobytes(), 2, "", "GPU")
    assert isinstance(second, BlocksStored) and second.kind == "mla_attention" and not second.medium
    assert third == BlocksRemoved([1])


def test_an_adapter_that_is_only_numbered_keeps_its_blocks_apart() -> None:
    batch = BatchDecoder().decode(msgspec.msgpack.encode([1, [["BlockStored", [1], None, [1], 1, 3]]]))
    (event,) = batch
    assert isinstance(event, BlocksStored) and event.lora == "#3"


def test_extra_keys() -> None:
    keys = [["ad", "image-1", ["image-2", 16], "salt"], None, ["ad"], ["other"], [b"\x01\xff"]]
    event = {"type": "BlockStored", "block_hashes": [1, 2, 3, 4, 5], "token_ids": [1, 2, 3, 4, 5], "block_size": 1,
             "lora_name": "ad", "extra_keys": keys}  # fmt: skip
    (read,) = BatchDecoder().decode(msgspec.msgpack.encode([1.0, [event], 0]))
    assert isinstance(read, BlocksStored)
    assert read.extras == [("image-1", "image-2", "salt"), (), (), ("other",), ("01ff",)]


def stored(**fields: Any) -> bytes:
    event = {"type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": 1, **fields}
    return msgspec.msgpack.encode([1.0, [event], 0])


def test_extra_keys_of_many_blocks_are_read_in_pieces() -> None:
    size = 10_000
    keys = [["ad", f"image-{number}"] for number in range(size - 1)] + [[{}]]
    ids = list(range(size))
    (read,) = BatchDecoder().decode(stored(block_hashes=ids, token_ids=ids, lora_name="ad", extra_keys=keys))
    assert isinstance(read, BlocksStored)
    assert read.extras is not None and len(read.extras) == size
    assert read.extras[128:130] == [("image-128",), ("image-129",)]
    with pytest.raises(ValueError, match="not an identifier"):
        read.extras[size - 1]


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (stored(extra_keys=[["a"]] * 1_000_000), "1 blocks, but extra keys for 1000000"),
        (stored(extra_keys=[["a"] * 10_000]), "too many"),
        (stored(extra_keys=[["a" * 300_000]]), "bytes for 1 blocks"),
        (stored(extra_keys=[["a"], ["a"]]), "1 blocks, but extra keys for 2"),
        (stored(block_hashes=[-1] * 900_000), "`array` of length <= 131072 - at `$.block_hashes`"),
    ],
    ids=["blocks", "entries", "bytes", "two", "hashes"],
)
def test_endless_events_cost_only_themselves(payload: bytes, why: str) -> None:
    batch = BatchDecoder().decode(payload)
    assert list(batch.each()) == [None]
    assert batch.bad == 1 and why in batch.bad_reason


@pytest.mark.parametrize("head", [b"\xabBlockStored\xaaextra_keys", b"\xacBlockRemoved\xa1x", b"\xabblock_moved\xa1x"])
def test_events_that_are_nested_too_deeply_cost_only_themselves(head: bytes) -> None:
    deep = b"\x82\xa4type" + head + b"\x91" * 100_000 + b"\xc0"
    batch = BatchDecoder().decode(msgspec.msgpack.encode([1.0, [deep, ["AllBlocksCleared"]], 0]))
    assert list(batch.each()) == [None, AllCleared()]
    assert batch.bad == 1 and "recursion" in batch.bad_reason


def test_signed_hashes() -> None:
    (read,) = BatchDecoder().decode(msgspec.msgpack.encode([1.0, [["BlockRemoved", [-1, 5, -(2**63), 2**64 - 1]]], 0]))
    assert read == BlocksRemoved([2**64 - 1, 5, 2**63, 2**64 - 1])


def test_requirement_names() -> None:
    events = [
        {"type": "block_created", "block_hash": 5, "pod": "p"},
        {"type": "block_evicted", "block_hashes": [5], "tier": "cpu"},
        {"type": "block_offloaded", "block_hashes": [6]},
        {"type": "block_created", "blocks": [7, 8], "token_ids": [1, 2], "block_size": 1, "parent_block_hash": 5},
        {"type": "block_evicted", "blocks": [7]},
        {"type": "block_created", "keys": [9]},
        {"type": "block_created", "blocks": [{"hash": 9}]},
    ]
    batch = BatchDecoder().decode(msgspec.msgpack.encode({"ts": 1, "events": events}))
    stored, evicted, offloaded, created, gone = list(batch)
    assert [stored, evicted] == [BlocksStored([5]), BlocksRemoved([5], "cpu")]
    assert [offloaded, gone] == [BlocksStored([6], medium="cpu"), BlocksRemoved([7])]
    assert isinstance(created, BlocksStored)
    assert (created.hashes, created.parent, created.block_size, len(created.tokens)) == ([7, 8], 5, 1, 8)
    assert batch.bad == 2 and "block_created" in batch.bad_reason


BAD = [
    {"type": "Unheard", "x": 1},
    {"type": "BlockStored"},
    {"type": "BlockStored", "block_hashes": "abc"},
    {"type": "BlockStored", "block_hashes": [1], "token_ids": [-1], "block_size": 1},
    {"type": "BlockStored", "block_hashes": [1], "token_ids": [2**32], "block_size": 1},
    {"type": "BlockStored", "block_hashes": [1], "token_ids": ["a"], "block_size": 1},
    {"type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": 1, "extra_keys": "x"},
    {"type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": 1, "extra_keys": [[{}]]},
    {"type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": 1, "group_idx": -5},
    {"type": "BlockRemoved", "block_hashes": [1], "group_idx": 64},
    ["BlockStored"],
    ["Nothing", 1],
    {"no": "type"},
    [],
    7,
    None,
    b"\xc1",
    b"",
]


@pytest.mark.parametrize("bad", BAD, ids=[str(bad)[:40] for bad in BAD])
@pytest.mark.parametrize("encoding", ["map", "array"])
def test_a_bad_event_costs_only_itself(bad: Any, encoding: Any) -> None:
    good = msgspec.msgpack.decode(encode_batch(1.0, EVENTS, 0, Encoding(encoding)))[1]
    batch = BatchDecoder().decode(msgspec.msgpack.encode([1.0, [good[0], bad, *good[1:]], 0]))
    assert list(batch) == EVENTS
    assert batch.bad == 1


def test_endless_batches_are_none() -> None:
    for events in ([None] * 20_001, [["AllBlocksCleared"]] * 20_001):
        with pytest.raises(ValueError):
            BatchDecoder().decode(msgspec.msgpack.encode([1.0, events, 0]))
    batch = BatchDecoder().decode(msgspec.msgpack.encode([1.0, [None, ["AllBlocksCleared"]], 0]))
    assert list(batch.each()) == [None, AllCleared()]


def test_unreadable_batches_raise_value_error() -> None:
    whole = encode_batch(1.0, EVENTS)
    for payload in (
        b"",
        b"\xc0",
        b"\x93",
        b"\x81\xa2ts\x01",
        b"\xff" * 50,
        msgspec.msgpack.encode("text"),
        b"\x91" * 5000,
    ):
        with pytest.raises(ValueError):
            BatchDecoder().decode(payload)
    for cut in range(len(whole)):
        with pytest.raises(ValueError):
            BatchDecoder().decode(whole[:cut])


def test_flipped_bytes_never_raise_anything_else() -> None:
    rng = random.Random(3)
    for encoding in (Encoding(), Encoding("array"), Encoding(wrapped=True), Encoding(batch="map", hashes="bytes")):
        whole = encode_batch(1.0, EVENTS, 0, encoding)
        for _ in range(400):
            damaged = bytearray(whole)
            for _ in range(rng.randint(1, 3)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            try:
                batch = BatchDecoder().decode(bytes(damaged))
            except ValueError:
                continue
            assert len(list(batch)) + batch.bad == len(batch)


def test_many_tokens_are_read_in_pieces() -> None:
    rng = random.Random(1)
    ids = [rng.choice((5, 200, 60_000, 100_000, 2**32 - 1)) for _ in range(10_000)]
    raw = msgspec.msgpack.encode(ids)
    stream = tokens_of(raw)
    assert isinstance(stream, RawTokens) and len(stream) == 10_000
    read = b"".join(stream.take(count) for count in (1, 15, 2048, 4000, 3936))
    assert array("I", read).tolist() == ids
    with pytest.raises(ValueError):
        stream.take(1)


@pytest.mark.parametrize("bad", [-1, 2**32, "x", 1.5, None, [1]])
@pytest.mark.parametrize("at", [0, 3000, 9_999])
def test_a_stream_of_tokens_finds_what_is_none(bad: Any, at: int) -> None:
    ids: list[Any] = [100_000] * 10_000
    ids[at] = bad
    stream = tokens_of(msgspec.msgpack.encode(ids))
    assert isinstance(stream, RawTokens)
    with pytest.raises(ValueError):
        b"".join(stream.take(1000) for _ in range(10))


def test_topics() -> None:
    assert frames.topic_of(b"kv@10.0.0.1:8000@org/m@v1") == frames.Topic("10.0.0.1:8000", "org/m@v1")
    assert frames.topic_of(b"") == frames.Topic("")
    assert frames.topic_of(b"pod-1") == frames.Topic("pod-1")
    assert frames.topic_of(frames.topic("p", "m")) == frames.Topic("p", "m")
    assert frames.topic_of(b"\xff\xfe").pod


@pytest.mark.parametrize("bad", [[], [b""], [b"", b"1", b"x"], [b"", b"12345678", b"x", b"y"]])
def test_frames_that_are_no_batch(bad: list[bytes]) -> None:
    with pytest.raises(ValueError):
        frames.live(bad)


@pytest.mark.parametrize("bad", [[], [b"x"], [b"", b"1", b"x"], [b"", b"t", b"1", b"x"], [b"a"] * 6])
def test_replies_that_are_none(bad: list[bytes]) -> None:
    with pytest.raises(ValueError):
        frames.replayed(bad)
