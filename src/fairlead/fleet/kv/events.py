"""What an engine says about its KV cache, whatever bytes it said it in. `fairlead.wire.kv_events` decodes into these.

`hashes` are 64-bit patterns as unsigned integers. Names in other texts: `block_created` = `BlocksStored`,
`block_evicted` = `BlocksRemoved`, `block_offloaded` = `BlocksStored` without tokens and with a slower medium.
"""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct


class TokenStream(Protocol):
    """Token ids that are read piece by piece, because there are too many to read at once."""

    def __len__(self) -> int: ...

    def take(self, count: int) -> bytes:
        """The next `count` token ids as little-endian 32-bit integers. Raises `ValueError` for what is none."""
        ...


class BlocksStored(Struct, gc=False):
    """Consecutive full blocks of one request were stored."""

    hashes: list[int]
    #: Hash of the block before the first; 0 = the sequence starts here.
    parent: int = 0
    #: Token ids as little-endian 32-bit integers, `block_size` of them for every hash. Empty: the same blocks were put
    #: into another tier, and only their hashes are told.
    tokens: bytes | TokenStream = b""
    block_size: int = 0
    #: Name of the LoRA adapter; of older engines that tell only its number: `#3`. Empty = base model.
    lora: str = ""
    medium: str = ""
    group: int = 0
    #: Kind of the group's attention; empty = not told.
    kind: str = ""
    #: Per block what else is part of its identity (multimodal items, cache salt), not the adapter; `None` = nothing.
    extras: Sequence[tuple[str, ...]] | None = None


class BlocksRemoved(Struct, gc=False):
    """One copy of each of these blocks is gone."""

    hashes: list[int]
    medium: str = ""
    group: int = 0


class AllCleared(Struct, gc=False):
    """The rank has forgotten everything, in all tiers."""


KvEvent = BlocksStored | BlocksRemoved | AllCleared
