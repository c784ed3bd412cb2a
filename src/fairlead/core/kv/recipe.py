"""How the keys of a prompt's blocks are made, with which they are looked up in the exact index.

Own keys (the default) are hashes of token ids. They do not need the engine's algorithm, seed and block size, since
events have tokens and sizes. Engine keys are the engine's own hashes, for engines whose events have no tokens or whose
history is often incomplete. They need the engine's algorithm and seed. They do not work for prompts with media, nor for
adapters, whose hashes include the adapter's path, which is not in events.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np

from fairlead.core.kv.hashing import EngineHasher
from fairlead.core.kv.keys import EngineSpace, KeySpace, OwnSpace, prompt_keys
from fairlead.core.kv.match import BlockChain

#: Stands for the base model in all keys. An endpoint's blocks belong to the model that it serves, and token ids and
#: adapter identify the rest. So engines, topics and clients may use different names for one model.
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
        """Return what identifies each full block in addition to its tokens; `None` = nothing."""
        ...


class Recipe:
    """`seed`: the engine's PYTHONHASHSEED, `None` = not set. `block_size`: 0 = as in events.

    Raises `ValueError` for an algorithm whose hashes cannot be computed outside of the engine.
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
        #: Tokens whose keys take 0.3 ms to compute. An event loop should not do more at a time.
        self.long = 16_384 if self.hasher is None else 2_048

    def space(self) -> KeySpace:
        return OwnSpace() if self.hasher is None else EngineSpace()

    def chain(self, space: KeySpace, tokens: TokenIds, block_size: int, lora: str) -> BlockChain | None:
        """Return the prompt in blocks of that size; `None` = it can have no keys. Own keys take 0.2 µs per block,
        engine keys 2 µs."""
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
