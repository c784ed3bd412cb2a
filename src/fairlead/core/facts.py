"""The messages between schedulers of one pool: facts ↔ bytes.

A batch has what its origin did and saw since the previous batch: leases charged, first tokens, ends, failures, and
prompts sent. A snapshot has all leases that its origin holds, and the prompts that it sent last.

Rules
* Messages have facts, never sums. So the views that peers keep of an origin converge even if messages arrive twice,
  late or not at all.
* An origin numbers its leases from 1. A message lists its endpoints once, as hashes of their ids; facts refer to them
  by position.
* A prompt's chain is sent as the blocks that no scheduler has sent since its dictionary began (`generation`). They
  follow `parent`, the last block that was sent before; 0 = the beginning of the prompt. All new blocks of a message
  are in one byte string. Their sizes are in another, unless all are those of the default `ChainHasher`.
* Any host that can reach the transport may send messages, so decoding refuses values that are out of bounds.
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
#: Characters of a policy's name, at most.
POLICY_NAME = 256
Name = Annotated[str, Meta(max_length=POLICY_NAME)]
#: Blocks of one chain, at most: `ChainHasher` makes at most 400.
CHAIN_BLOCKS = 512
#: Bytes of a block's hash, and of its size.
BLOCK_BYTES, SIZE_BYTES = 8, 2
#: Facts of one kind in a batch, at most: a batch is handled in one go, and has what happened in some milliseconds.
MOST_FACTS = 4096
_FEW = Meta(max_length=MOST_FACTS)
#: Endpoints, leases of a snapshot, and bytes of blocks: the longest chains of 512 prompts.
_MANY, _BLOCKS = Meta(max_length=1 << 18), Meta(max_length=512 * CHAIN_BLOCKS * BLOCK_BYTES)
#: `Ended.tokens` of an incomplete answer, and of one whose length is not known.
BROKEN, UNKNOWN = -2, -1
#: The unit of ages, in seconds.
AGE_UNIT = 1e-4
#: End offsets of the blocks of the default `ChainHasher`.
_USUAL = tuple(ChainHasher().borders(1 << 40))


class Charged(Struct, frozen=True, array_like=True, gc=False):
    """A lease at the endpoint of that position, with fields as in `Lease`. `age`: how long before the message it was
    charged, in `AGE_UNIT`. `ttft_ms`: the forecast. `more`: the request has another lease, too, because it was moved
    or this one is only for its prompt. `untimed`: as in `apis.untimed`."""

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
    more: bool = False
    untimed: bool = False


class Sent(Struct, frozen=True, array_like=True, gc=False):
    """A prompt that was sent to that endpoint: its chain up to `parent`, then the next `blocks` of the message's
    blocks."""

    endpoint: Count
    parent: Annotated[int, Meta(ge=0)]
    blocks: Annotated[int, Meta(ge=0, le=CHAIN_BLOCKS)]


class FirstToken(Struct, frozen=True, array_like=True, gc=False):
    """The first token of the lease numbered (number of the next lease) - `back`. `age`: as in `Charged`."""

    back: Count
    age: Count


class Ended(Struct, frozen=True, array_like=True, gc=False):
    """The end of a lease. `back`: as in `FirstToken`. `tokens`: of the answer if it is complete; see `BROKEN`."""

    back: Count
    tokens: Annotated[int, Meta(ge=BROKEN, le=1_000_000_000)] = BROKEN


class Held(Struct, frozen=True, array_like=True, gc=False):
    """The state of a flow, which replaces its earlier state. `count`: waiting requests, `age`: that of the first one in
    `AGE_UNIT`, `wanted`: requests waiting and at endpoints, `served_ms`: all work that this origin ever gave it."""

    priority: Annotated[int, Meta(ge=-(1 << 53), le=1 << 53)]
    model: str
    tenant: str
    count: Count
    age: Count
    wanted: Count
    served_ms: Annotated[float, Meta(ge=0.0, le=1e15)]


class Avoided(Struct, frozen=True, array_like=True, gc=False):
    """An endpoint that the origin avoids after failures, for `left_ms` milliseconds from now."""

    endpoint: Count
    left_ms: Tokens


class Batch(Struct, frozen=True, array_like=True, tag="batch", gc=False):
    """`sequence`: number of the batch, from 1. `number`: that of the first lease in `charged`; the others follow it.
    `held`: flows that changed. `failed`: endpoints, once for each failed response. `avoided`: all avoided endpoints;
    `None` = unchanged. `policy`: its name at the origin; empty = unchanged, or the origin is older."""

    version: Count
    sequence: Count
    generation: Count
    endpoints: Annotated[tuple[Id, ...], _MANY]
    number: Count
    charged: Annotated[tuple[Charged, ...], _FEW]
    first_tokens: Annotated[tuple[FirstToken, ...], _FEW]
    ended: Annotated[tuple[Ended, ...], _FEW]
    sent: Annotated[tuple[Sent, ...], _FEW]
    blocks: Annotated[bytes, _BLOCKS]
    sizes: bytes
    held: Annotated[tuple[Held, ...], _FEW] = ()
    failed: Annotated[tuple[Count, ...], _FEW] = ()
    avoided: Annotated[tuple[Avoided, ...], _MANY] | None = None
    policy: Name = ""


class Snapshot(Struct, frozen=True, array_like=True, tag="snapshot", gc=False):
    """The state after the batches up to `sequence`; it may include later facts. `numbers`: those of the leases in
    `charged`, all below `number`, the number of the next lease. `pending`: numbers of leases before their first token.
    `held`: all flows with requests. `policy`: as in `Batch`."""

    version: Count
    sequence: Count
    endpoints: Annotated[tuple[Id, ...], _MANY]
    number: Count
    numbers: Annotated[tuple[Count, ...], _MANY]
    charged: Annotated[tuple[Charged, ...], _MANY]
    pending: Annotated[tuple[Count, ...], _MANY]
    sent: Annotated[tuple[Sent, ...], _FEW]
    blocks: Annotated[bytes, _BLOCKS]
    sizes: bytes
    held: Annotated[tuple[Held, ...], _MANY] = ()
    avoided: Annotated[tuple[Avoided, ...], _MANY] = ()
    policy: Name = ""


_ENCODER = msgspec.msgpack.Encoder()
_Message = TypeVar("_Message", Batch, Snapshot)


def encode(message: Batch | Snapshot) -> bytes:
    return _ENCODER.encode(message)


class _Beginning(Struct, frozen=True, array_like=True, gc=False):
    """What messages of all versions begin with: the name of their kind, and their version."""

    kind: str
    version: Count


_BEGINNING = msgspec.msgpack.Decoder(_Beginning)


def _other_version(payload: bytes) -> str:
    """Return which version of the messages the other scheduler uses; empty = the same, or it is not known."""
    try:
        version = _BEGINNING.decode(payload).version
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    if version == VERSION:
        return ""
    older = "this one" if version > VERSION else "that one"
    return f"it speaks version {version}, this one {VERSION}: upgrade {older}, so that both run the same Fairlead"


def _reader(kind: type[_Message]) -> Callable[[bytes], _Message]:
    decoder = msgspec.msgpack.Decoder(kind)

    def decode(payload: bytes) -> _Message:
        """Return the message. Raise `ValueError` with the reason if any part of it is invalid."""
        try:
            message = decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(_other_version(payload) or str(error)) from None
        if message.version != VERSION:
            raise ValueError(_other_version(payload))
        facts: Iterable[Charged | Sent | Avoided] = chain(message.charged, message.sent, message.avoided or ())
        failed = message.failed if isinstance(message, Batch) else ()
        if max(chain([fact.endpoint for fact in facts], failed), default=-1) >= len(message.endpoints):
            raise ValueError("a fact refers to an endpoint that the message does not list")
        count = sum([sent.blocks for sent in message.sent])
        if len(message.blocks) != count * BLOCK_BYTES or len(message.sizes) not in (0, count * SIZE_BYTES):
            raise ValueError("its blocks do not match the counts of its prompts")
        if isinstance(message, Snapshot) and len(message.numbers) != len(message.charged):
            raise ValueError("it does not have one number for each lease")
        return message

    return decode


read_batch = _reader(Batch)
read_snapshot = _reader(Snapshot)


class Dictionary:
    """Blocks that one origin sent: block → a chain that has it, and its depth there. The previous generation is kept
    for peers that do not know yet that a new one began."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[PrefixChain, int]] = {}
        #: Blocks of all the chains. A chain that shares its beginning with another has that beginning, too.
        self.size = 0
        #: Bytes of the first block of each chain, which differ where another `hashBlockSize` is set; 0 = not known yet.
        self.cut = 0
        self._before: dict[int, tuple[PrefixChain, int]] = {}

    def begin(self) -> None:
        self._before, self.blocks, self.size = self.blocks, {}, 0

    def add(self, chain: PrefixChain, depth: int) -> None:
        """Add the blocks of a chain from `depth` on; those before it are already known."""
        if depth < len(chain.hashes):
            self.size, self.cut = self.size + len(chain.hashes), chain.ends[0]
        for position in range(depth, len(chain.hashes)):
            self.blocks[chain.hashes[position]] = chain, position + 1

    def find(self, block: int) -> tuple[PrefixChain, int] | None:
        return self.blocks.get(block) or self._before.get(block)


def endpoint_hash(endpoint_id: str) -> int:
    """Return the hash that stands for an endpoint in messages."""
    return xxh3_64_intdigest(endpoint_id.encode())


def block_bytes(hashes: Sequence[int]) -> bytes:
    return array("Q", hashes).tobytes()


def block_hashes(blocks: bytes) -> "array[int]":
    hashes = array("Q")
    hashes.frombytes(blocks)
    return hashes


def usual_ends(begin: int, count: int) -> tuple[int, ...] | None:
    """Return the end offsets of the `count` blocks after `begin`, as the default `ChainHasher` cuts them; `None` = it
    has no such blocks."""
    first = bisect_left(_USUAL, begin) + 1
    usual = _USUAL[first : first + count]
    return usual if len(usual) == count and _USUAL[first - 1] == begin else None


def block_sizes(parts: Iterable[tuple[int, Sequence[int]]]) -> bytes:
    """Return the sizes of all blocks; empty = all have default sizes. `parts`: for each part of a chain its begin and
    the ends of its blocks. Sizes are cut at 64 KiB, which only affects a block's weight in a cache."""
    if all(usual_ends(begin, len(ends)) == ends for begin, ends in parts):
        return b""
    sizes = array("H")
    for begin, ends in parts:
        sizes.extend([min(end - start, 0xFFFF) for start, end in zip((begin, *ends[:-1]), ends, strict=True)])
    return sizes.tobytes()


def sized_ends(begin: int, sizes: bytes) -> tuple[int, ...] | None:
    """Return the end offsets of blocks of these sizes; `None` = a size is 0, which is invalid."""
    read = array("H")
    read.frombytes(sizes)
    return None if 0 in read else tuple(accumulate(read, initial=begin))[1:]
