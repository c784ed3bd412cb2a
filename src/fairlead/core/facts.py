"""What schedulers that serve one pool tell each other ↔ bytes.

A batch has what its origin itself did and saw since the batch before: leases charged, first tokens, ends, failures,
and prompts sent. A snapshot has the leases that its origin holds, and the prompts that it sent last.

Rules
* Only facts, never sums: whatever arrives twice, late or not at all, the views that others keep of an origin converge.
* Leases are numbered by their origin from 1. Endpoints are told once in a message, by a hash of their id, and referred
  to by position.
* A prompt's chain is told as its blocks that nobody told since their dictionary began (`generation`), behind `parent`,
  the last block of it that somebody did; 0 = from the start. All new blocks of a message stand in one string of
  bytes. Their sizes follow in another, unless all are cut as `ChainHasher` does by default.
* Values may come from anybody who can reach the transport. Decoding refuses what is out of bounds.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct
from xxhash import xxh3_64_intdigest

from fairlead.core.prefix import ChainHasher
from fairlead.core.request import PrefixChain

VERSION = 2
Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Tokens = Annotated[int, Meta(ge=0, le=1_000_000_000)]
Id = Annotated[int, Meta(ge=0)]
#: Blocks of one chain, at most: `ChainHasher` cuts none of more than 400.
CHAIN_BLOCKS = 4096
#: Bytes of a block's hash, and of its size.
BLOCK_BYTES, SIZE_BYTES = 8, 2
#: `Ended.tokens` of an answer that did not become complete, and of one whose length is not known.
BROKEN, UNKNOWN = -2, -1
#: Seconds in the unit of ages.
AGE_UNIT = 1e-4
#: Where blocks end that are cut as by default.
_USUAL = tuple(ChainHasher().borders(1 << 40))


class Charged(Struct, frozen=True, array_like=True, gc=False):
    """A lease at the endpoint of that position, with what `Lease` says of it. `age`: how long before the message was
    made, in `AGE_UNIT`. `ttft_ms`: the forecast."""

    endpoint: Count
    age: Count
    uncached: Tokens
    kv: Tokens
    growth: Tokens
    work_us: Annotated[int, Meta(ge=0, le=1_000_000_000_000)]
    blind: bool
    ttft_ms: Tokens
    adapter: str = ""
    sequences: Annotated[int, Meta(ge=1, le=1 << 20)] = 1


class Sent(Struct, frozen=True, array_like=True, gc=False):
    """A prompt went to that endpoint: its chain up to `parent`, and the next `blocks` of the message's blocks."""

    endpoint: Count
    parent: Annotated[int, Meta(ge=0)]
    blocks: Annotated[int, Meta(ge=0, le=CHAIN_BLOCKS)]


class FirstToken(Struct, frozen=True, array_like=True, gc=False):
    """Of the lease that was charged `back` leases before the next one. `age` is that of `Charged`."""

    back: Count
    age: Count


class Ended(Struct, frozen=True, array_like=True, gc=False):
    """A lease is over, see `FirstToken`. `tokens` of the answer, if it became complete."""

    back: Count
    tokens: Annotated[int, Meta(ge=BROKEN, le=1_000_000_000)] = BROKEN


class Held(Struct, frozen=True, array_like=True, gc=False):
    """A flow: requests that wait, the age of the first of them in `AGE_UNIT`; those and the ones at endpoints;
    milliseconds of work that it was given by this origin, ever. It replaces what was told of it before."""

    priority: Annotated[int, Meta(ge=-(1 << 53), le=1 << 53)]
    model: str
    tenant: str
    count: Count
    age: Count
    wanted: Count
    served_ms: Annotated[float, Meta(ge=0.0, le=1e15)]


class Avoided(Struct, frozen=True, array_like=True, gc=False):
    """An endpoint that its origin avoids, after failures, for so many milliseconds from now."""

    endpoint: Count
    left_ms: Tokens


class Batch(Struct, frozen=True, array_like=True, tag="batch", gc=False):
    """`sequence` counts an origin's batches from 1. `number`: of the first lease charged; the others follow. `held`:
    flows that changed. `failed`: endpoints, once for each response that they failed. `avoided`: all that are; `None` =
    they are as before."""

    version: Count
    sequence: Count
    generation: Count
    endpoints: tuple[Id, ...]
    number: Count
    charged: tuple[Charged, ...]
    first_tokens: tuple[FirstToken, ...]
    ended: tuple[Ended, ...]
    sent: tuple[Sent, ...]
    blocks: bytes
    sizes: bytes
    held: tuple[Held, ...] = ()
    failed: tuple[Count, ...] = ()
    avoided: tuple[Avoided, ...] | None = None


class Snapshot(Struct, frozen=True, array_like=True, tag="snapshot", gc=False):
    """All that the batches up to `sequence` come to, and perhaps more. `numbers`: of the leases `charged`, all below
    `number`, which is the next one's. `pending`: of those before their first token. `held`: all flows with requests."""

    version: Count
    sequence: Count
    endpoints: tuple[Id, ...]
    number: Count
    numbers: tuple[Count, ...]
    charged: tuple[Charged, ...]
    pending: tuple[Count, ...]
    sent: tuple[Sent, ...]
    blocks: bytes
    sizes: bytes
    held: tuple[Held, ...] = ()
    avoided: tuple[Avoided, ...] = ()


_ENCODER = msgspec.msgpack.Encoder()
_Message = TypeVar("_Message", Batch, Snapshot)


def encode(message: Batch | Snapshot) -> bytes:
    return _ENCODER.encode(message)


def _reader(kind: type[_Message]) -> Callable[[bytes], _Message]:
    decoder = msgspec.msgpack.Decoder(kind)

    def decode(payload: bytes) -> _Message:
        """Raises `ValueError`, with the reason, unless all of it makes sense."""
        try:
            message = decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(str(error)) from None
        if message.version != VERSION:
            raise ValueError(
                f"it has version {message.version}, and this is {VERSION}; run the same Fairlead everywhere"
            )
        facts: Iterable[Charged | Sent | Avoided] = chain(message.charged, message.sent, message.avoided or ())
        failed = message.failed if isinstance(message, Batch) else ()
        if max(chain([fact.endpoint for fact in facts], failed), default=-1) >= len(message.endpoints):
            raise ValueError("a fact is of an endpoint that it does not name")
        count = sum([sent.blocks for sent in message.sent])
        if len(message.blocks) != count * BLOCK_BYTES or len(message.sizes) not in (0, count * SIZE_BYTES):
            raise ValueError("it has other blocks than its prompts need")
        if isinstance(message, Snapshot) and len(message.numbers) != len(message.charged):
            raise ValueError("it has other leases than numbers")
        return message

    return decode


read_batch = _reader(Batch)
read_snapshot = _reader(Snapshot)


class Dictionary:
    """Blocks that one origin told: block → a chain that has it, and how deep. Those of the generation before are kept
    for others who have not heard yet that a new one began."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[PrefixChain, int]] = {}
        self._before: dict[int, tuple[PrefixChain, int]] = {}

    def begin(self) -> None:
        """A new generation."""
        self._before, self.blocks = self.blocks, {}

    def add(self, chain: PrefixChain, depth: int) -> None:
        """All of it is told, and its blocks from that depth on were not."""
        for position in range(depth, len(chain.hashes)):
            self.blocks[chain.hashes[position]] = chain, position + 1

    def find(self, block: int) -> tuple[PrefixChain, int] | None:
        return self.blocks.get(block) or self._before.get(block)


def endpoint_hash(endpoint_id: str) -> int:
    """By which an endpoint is told."""
    return xxh3_64_intdigest(endpoint_id.encode())


def block_bytes(hashes: Sequence[int]) -> bytes:
    return array("Q", hashes).tobytes()


def block_hashes(blocks: bytes) -> "array[int]":
    hashes = array("Q")
    hashes.frombytes(blocks)
    return hashes


def usual_ends(begin: int, count: int) -> tuple[int, ...] | None:
    """Where `count` blocks behind `begin` end that are cut as by default; `None` = none begins there."""
    first = bisect_left(_USUAL, begin) + 1
    usual = _USUAL[first : first + count]
    return usual if len(usual) == count and _USUAL[first - 1] == begin else None


def block_sizes(parts: Iterable[tuple[int, Sequence[int]]]) -> bytes:
    """Of all blocks, given where each part of a chain begins, and where its blocks end; empty = they are as usual. A
    block of more than 64 KiB counts as one of so many: only its weight in a cache depends on that."""
    if all(usual_ends(begin, len(ends)) == ends for begin, ends in parts):
        return b""
    sizes = array("H")
    for begin, ends in parts:
        sizes.extend([min(end - start, 0xFFFF) for start, end in zip((begin, *ends[:-1]), ends, strict=True)])
    return sizes.tobytes()


def sized_ends(begin: int, sizes: bytes) -> tuple[int, ...] | None:
    """Where blocks of these sizes end; `None` = nowhere."""
    read = array("H")
    read.frombytes(sizes)
    return None if 0 in read else tuple(accumulate(read, initial=begin))[1:]
