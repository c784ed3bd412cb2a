"""The keys of blocks in the index: our own hashes of tokens, or the engine's hashes.

Own space (the default): `key = xxh3_64(tokens of the block as LE32, seed = key of the block before)`; the seed of the
first block is a root that stands for model and adapter. The engine's hash of a block is only an opaque name that events
map to a key. So the engine's algorithm, seed and version do not matter. Salted or multimodal blocks get other keys,
because their extras are hashed, too. To look up a prompt, the engine's token ids are needed.

Engine space: the key is the engine's own 64-bit hash, combined with the model. It needs no tokens in events, so events
whose earlier history is missing can be used. To look up a prompt, algorithm and seed are needed (`hashing`).

Blocks have the engine's length. Blocks of different lengths have different keys, so a prompt is hashed once for each
length in the pool, usually one. This is exact; translating between lengths would not be.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from fairlead.core.kv.table import Keys

#: What identifies each block in addition to its tokens; `None` = nothing.
Extras = Sequence[tuple[str, ...]] | None

TOKEN_BYTES = 4
#: Changes whenever own keys change, so that snapshots with keys of another version are refused.
VERSION = 1
#: Separates tokens and extras: 32 bits that are not a token id of any vocabulary.
_EXTRA = b"\xff\xff\xff\xff"


class KeySpace(Protocol):
    """How keys are made. `name` goes into snapshots."""

    name: str
    #: Whether blocks can be stored without their token ids and without the blocks before them.
    self_contained: bool

    def root(self, model: str, lora: str) -> int:
        """Return the key that stands before the first block."""
        ...

    def keys(
        self, before: int, root: int, hashes: Sequence[int], tokens: bytes, block_size: int, extras: Extras
    ) -> list[int]:
        """Return the keys of consecutive blocks. `before`: key of the block before them, or `root`."""
        ...


class OwnSpace:
    """xxh3 over token ids. Takes 35 ns per block of 16 tokens."""

    name = f"own-{VERSION}"
    self_contained = False

    def root(self, model: str, lora: str) -> int:
        return int(xxh3_64_intdigest(f"{model}\0{lora}".encode("utf-8", "surrogatepass"), VERSION))

    def keys(
        self, before: int, root: int, hashes: Sequence[int], tokens: bytes, block_size: int, extras: Extras
    ) -> list[int]:
        return block_keys(before, tokens, block_size, extras)


class EngineSpace:
    """The engine's hashes, combined with the model. The adapter is already part of the engine's hash."""

    name = "engine-1"
    self_contained = True

    def root(self, model: str, lora: str) -> int:
        return int(xxh3_64_intdigest(model.encode("utf-8", "surrogatepass"), VERSION))

    def keys(
        self, before: int, root: int, hashes: Sequence[int], tokens: bytes, block_size: int, extras: Extras
    ) -> list[int]:
        return [digest ^ root for digest in hashes]


def block_keys(before: int, tokens: bytes, block_size: int, extras: Extras = None) -> list[int]:
    """Return the keys of all full blocks in `tokens` (LE32) after the key `before`. An incomplete block has no key."""
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
    """Return `block_keys` of a whole prompt as an array, without creating a Python int per block."""
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
