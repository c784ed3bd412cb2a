"""How a prompt's blocks are named, so that they can be looked up in the exact index.

Own keys (the default) hash token ids; algorithm, seed and block size of the engine need not be known, since events tell
tokens and sizes. Engine keys are the engine's own hashes: for engines whose events have no tokens, or whose history is
often cut off. Then algorithm and seed must be the engine's, and blocks of adapters cannot be named: their hashes have
the adapter's path in them, which nobody tells.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np

from fairlead.core.kv.hashing import EngineHasher
from fairlead.core.kv.index import KvIndex
from fairlead.core.kv.keys import EngineSpace, KeySpace, OwnSpace, prompt_keys
from fairlead.core.kv.match import BlockChain

#: Stands for the base model in all keys. What an endpoint holds is of the model that it serves, and token ids with the
#: adapter say all else, so names that engines, topics and clients have for one model need no agreement.
ANY_MODEL = "*"


class TokenIds(Protocol):
    """A prompt as the engine's token ids; `fairlead.apis.tokens.PromptTokens` is one."""

    @property
    def ids(self) -> bytes:
        """Little-endian 32-bit integers."""
        ...

    @property
    def count(self) -> int: ...

    @property
    def salt(self) -> str: ...

    def extras(self, block_size: int) -> Sequence[tuple[str, ...]] | None:
        """What identifies each full block beside its tokens; `None` = nothing."""
        ...


class Recipe:
    """`seed` is the engine's PYTHONHASHSEED, `None` = not set. `block_size` 0 = as events say.

    Raises `ValueError` for an algorithm whose hashes nobody outside of the engine can know.
    """

    def __init__(
        self,
        keys: Literal["own", "engine"] = "own",
        algorithm: str = "sha256",
        seed: str | None = None,
        block_size: int = 0,
    ) -> None:
        self.keys = keys
        self.algorithm = algorithm
        self.seed = seed
        self.block_size = block_size
        self.hasher = EngineHasher(algorithm, seed) if keys == "engine" else None
        #: Tokens whose blocks take 0.3 ms to name; an event loop should not do more at a time.
        self.long = 16_384 if self.hasher is None else 2_048

    def space(self) -> KeySpace:
        return OwnSpace() if self.hasher is None else EngineSpace()

    def chain(self, space: KeySpace, tokens: TokenIds, block_size: int, lora: str) -> BlockChain | None:
        """The prompt in blocks of that size; `None` = it cannot be named. Own keys: 0.2 µs per block; engine: 2 µs."""
        if self.hasher is None:
            keys = prompt_keys(space.root(ANY_MODEL, lora), tokens.ids, block_size, tokens.extras(block_size))
            return BlockChain(keys, block_size)
        extras = tokens.extras(block_size)
        salted = bool(extras) and bool(tokens.salt)
        if lora or (extras and (any(extras[1:]) or extras[0] != ((tokens.salt,) if salted else ()))):
            return None
        ids = np.frombuffer(tokens.ids, "<u4").tolist()
        hashes = self.hasher.hashes(ids, block_size, salt=tokens.salt if salted else None)
        return BlockChain(np.array(hashes, np.uint64) ^ np.uint64(space.root(ANY_MODEL, "")), block_size)


def new_index(recipe: Recipe, max_blocks: int = 4_000_000) -> KvIndex:
    """An index whose keys are of that recipe."""
    return KvIndex(max_blocks, recipe.space())
