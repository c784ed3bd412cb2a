"""The key of a block in the index: own hashes of tokens, or the engine's.

Own space (the default): `key = xxh3_64(tokens of the block as LE32, seed = key of the block before)`, the first seeded
with a root that stands for model and adapter. What the engine calls a block is only an opaque name that events map to
a key, so the engine's algorithm, seed and version need no agreement, and salted or multimodal blocks differ because
their extras are hashed too. The request side must have the engine's token ids.

Engine space: the key is the engine's own 64-bit hash, set apart by model. It needs no tokens in events, so history
that is cut off in front is of full use; the request side must know algorithm and seed (`engine_hash`).

Blocks are as long as the engine's: blocks of different length have different keys, and a prompt is hashed once for
each length that a pool has, usually one. That is exact where translating between lengths is not.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from fairlead.core.kv.table import Keys

#: What identifies each block beside its tokens; `None` = nothing.
Extras = Sequence[tuple[str, ...]] | None

TOKEN_BYTES = 4
#: Changes whenever own keys do, so that snapshots of another version are not taken for ours.
VERSION = 1
#: Stands between tokens and extras. 32 bits that are no token id of any vocabulary.
_EXTRA = b"\xff\xff\xff\xff"


class KeySpace(Protocol):
    """How keys are made. `name` goes into snapshots."""

    name: str
    #: Whether blocks can be entered without token ids and without knowing what is before them.
    self_contained: bool

    def root(self, model: str, lora: str) -> int:
        """Stands before the first block."""
        ...

    def keys(
        self, before: int, root: int, hashes: Sequence[int], tokens: bytes, block_size: int, extras: Extras
    ) -> list[int]:
        """Keys of consecutive blocks. `before`: key of the block before, or `root`."""
        ...


class OwnSpace:
    """xxh3 over token ids; 35 ns per block of 16."""

    name = f"own-{VERSION}"
    self_contained = False

    def root(self, model: str, lora: str) -> int:
        return int(xxh3_64_intdigest(f"{model}\0{lora}".encode("utf-8", "surrogatepass"), VERSION))

    def keys(
        self, before: int, root: int, hashes: Sequence[int], tokens: bytes, block_size: int, extras: Extras
    ) -> list[int]:
        return block_keys(before, tokens, block_size, extras)


class EngineSpace:
    """The engine's hashes, set apart by model (not by adapter: the engine's hash knows it)."""

    name = "engine-1"
    self_contained = True

    def root(self, model: str, lora: str) -> int:
        return int(xxh3_64_intdigest(model.encode("utf-8", "surrogatepass"), VERSION))

    def keys(
        self, before: int, root: int, hashes: Sequence[int], tokens: bytes, block_size: int, extras: Extras
    ) -> list[int]:
        return [digest ^ root for digest in hashes]

    def of_hashes(self, model: str, hashes: Sequence[int]) -> Keys:
        """Keys of a prompt from the engine's hashes of its blocks."""
        return np.array(hashes, np.uint64) ^ np.uint64(self.root(model, ""))


def block_keys(before: int, tokens: bytes, block_size: int, extras: Extras = None) -> list[int]:
    """Keys of all full blocks in `tokens` (LE32) after the key `before`; a trailing part of a block has none."""
    width = block_size * TOKEN_BYTES
    digest = xxh3_64_intdigest
    keys: list[int] = []
    for start in range(0, len(tokens) - width + 1, width):
        content = tokens[start : start + width]
        if extras is not None and (more := extras[len(keys)]):
            content += b"".join(_EXTRA + item.encode("utf-8", "surrogatepass") for item in more)
        before = digest(content, before)
        keys.append(before)
    return keys


def prompt_keys(root: int, tokens: bytes, block_size: int, extras: Extras = None) -> Keys:
    """`block_keys` of a whole prompt as an array, without a Python int per block in between."""
    if extras is not None:
        return np.array(block_keys(root, tokens, block_size, extras), np.uint64)
    width = block_size * TOKEN_BYTES
    digests = []
    digest = root
    for start in range(0, len(tokens) - width + 1, width):
        raw = xxh3_64_digest(tokens[start : start + width], digest)
        digests.append(raw)
        digest = int.from_bytes(raw, "big")
    return np.frombuffer(b"".join(digests), ">u8").astype(np.uint64)
