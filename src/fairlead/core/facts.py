"""What schedulers that serve one pool tell each other ↔ bytes.

A batch has what its origin itself did and saw since the batch before: leases charged, first tokens, ends, and prompts
sent. A snapshot has the leases that its origin holds, and the prompts that it sent last.

Rules
* Only facts, never sums: whatever arrives twice, late or not at all, the views that others keep of an origin converge.
* Leases are numbered by their origin from 1. Endpoints are named once in a message, and referred to by position.
* A prompt's chain is told as its blocks that are new since the dictionary began (`generation`), behind `parent`, the
  last block of it that was told before; 0 = from the start. All new blocks of a message stand in one string of bytes.
* Values may come from anybody who can reach the transport. Decoding refuses what is out of bounds.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import lt
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

VERSION = 1
Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Tokens = Annotated[int, Meta(ge=0, le=1_000_000_000)]
#: Blocks of one chain, at most: `ChainHasher` cuts none of more than 400.
CHAIN_BLOCKS = 4096
#: Bytes of an encoded block: its hash, and where it ends.
BLOCK_BYTES = 8, 4
#: `Ended.tokens` of an answer that did not become complete, and of one whose length is not known.
BROKEN, UNKNOWN = -2, -1
#: Seconds in the unit of ages.
AGE_UNIT = 1e-4


class Charged(Struct, frozen=True, array_like=True, gc=False):
    """A lease at the endpoint of that position, with what `Lease` says of it. `ttft_ms`: the forecast."""

    endpoint: Count
    uncached: Tokens
    kv: Tokens
    growth: Tokens
    work_us: Annotated[int, Meta(ge=0, le=1_000_000_000_000)]
    blind: bool
    ttft_ms: Tokens
    adapter: str = ""


class Sent(Struct, frozen=True, array_like=True, gc=False):
    """A prompt went to that endpoint: its chain up to `parent`, and the next `blocks` of the message's blocks."""

    endpoint: Count
    parent: Annotated[int, Meta(ge=0)]
    blocks: Annotated[int, Meta(ge=0, le=CHAIN_BLOCKS)]


class FirstToken(Struct, frozen=True, array_like=True, gc=False):
    """`age`: how long before the message was made, in `AGE_UNIT`."""

    number: Count
    age: Count


class Ended(Struct, frozen=True, array_like=True, gc=False):
    """A lease is over. `tokens` of the answer, if it became complete."""

    number: Count
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


class Blocks(Struct, frozen=True, array_like=True, gc=False):
    """New blocks of all chains of a message: hashes, and ends in bytes of the prompt, both little-endian."""

    hashes: bytes = b""
    ends: bytes = b""

    @staticmethod
    def of(hashes: Sequence[int], ends: Sequence[int]) -> "Blocks":
        return Blocks(array("Q", hashes).tobytes(), array("I", ends).tobytes())

    def read(self) -> "tuple[array[int], array[int]]":
        hashes, ends = array("Q"), array("I")
        hashes.frombytes(self.hashes)
        ends.frombytes(self.ends)
        return hashes, ends


class Batch(Struct, frozen=True, array_like=True, tag="batch", gc=False):
    """`sequence` counts an origin's batches from 1. `number`: of the first lease charged; the others follow. `held`:
    flows that changed."""

    version: Count
    sequence: Count
    generation: Count
    names: tuple[str, ...]
    number: Count
    charged: tuple[Charged, ...]
    first_tokens: tuple[FirstToken, ...]
    ended: tuple[Ended, ...]
    sent: tuple[Sent, ...]
    blocks: Blocks
    held: tuple[Held, ...] = ()


class Snapshot(Struct, frozen=True, array_like=True, tag="snapshot", gc=False):
    """All that the batches up to `sequence` come to, and perhaps more. `numbers`: of the leases `charged`, all below
    `number`, which is the next one's. `pending`: of those before their first token. `held`: all flows with requests."""

    version: Count
    sequence: Count
    names: tuple[str, ...]
    number: Count
    numbers: tuple[Count, ...]
    charged: tuple[Charged, ...]
    pending: tuple[Count, ...]
    sent: tuple[Sent, ...]
    blocks: Blocks
    held: tuple[Held, ...] = ()


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
        endpoints = len(message.names)
        facts: Iterable[Charged | Sent] = chain(message.charged, message.sent)
        if any(fact.endpoint >= endpoints for fact in facts):
            raise ValueError("a fact is of an endpoint that it does not name")
        count = sum(sent.blocks for sent in message.sent)
        if (len(message.blocks.hashes), len(message.blocks.ends)) != tuple(count * size for size in BLOCK_BYTES):
            raise ValueError("it has other blocks than its prompts need")
        if isinstance(message, Snapshot) and len(message.numbers) != len(message.charged):
            raise ValueError("it has other leases than numbers")
        return message

    return decode


read_batch = _reader(Batch)
read_snapshot = _reader(Snapshot)


def rising(ends: Sequence[int]) -> bool:
    """Whether each block ends behind the one before."""
    return all(map(lt, ends, ends[1:]))
