"""Block hashes of other routers, for indexes that are shared or compared with them.

`cbor-fnv` and `xxh64` are the key spaces of llm-d-router 0.10 (precise prefix cache), `approximate` its approximate
producer's. Own keys are those of `keys.OwnSpace`; these here are slow, FNV above all (0.1 µs per byte).
"""

from collections.abc import Sequence

from xxhash import xxh64_intdigest

from fairlead.fleet.kv import cbor

_FNV_OFFSET = 0xCBF29CE484222325
_FNV_PRIME = 0x100000001B3
_MASK = (1 << 64) - 1


def fnv1a(content: bytes) -> int:
    digest = _FNV_OFFSET
    for byte in content:
        digest = (digest ^ byte) * _FNV_PRIME & _MASK
    return digest


class CborFnv:
    """FNV-1a 64 over canonical CBOR `[parent, [token ids], extras]`."""

    def __init__(self, model: str, seed: str = "") -> None:
        self.init = fnv1a(seed.encode())
        self.root = fnv1a(cbor.encode([self.init, None, model]))

    def block(self, parent: int, tokens: Sequence[int], extras: Sequence[str] | None = None) -> int:
        """`parent`: hash of the block before, `root` for the first. `extras` of `None` and of `[]` differ."""
        named = None if extras is None else [{"Hash": extra} for extra in extras]
        return fnv1a(cbor.encode([parent, list(tokens), named]))


class Xxh64:
    """XXH64 over `LE64(parent) ‖ tokens LE32 ‖ per extra LE64(length) ‖ text`; 0 is never a hash."""

    def __init__(self, model: str, seed: str = "") -> None:
        self.init = xxh64_intdigest(seed.encode())
        text = model.encode()
        self.root = _digest(_le64(self.init) + _le64(len(text)) + text)

    def block(self, parent: int, tokens: Sequence[int], extras: Sequence[str] | None = None) -> int:
        parts = [_le64(parent), *(token.to_bytes(4, "little") for token in tokens)]
        for extra in extras or ():
            text = extra.encode()
            parts += (_le64(len(text)), text)
        return _digest(b"".join(parts))


class Approximate:
    """XXH64 over `LE64(XXH64(tokens)) ‖ LE64(parent)`; the last block may be partial."""

    def __init__(self, model: str, salt: str = "") -> None:
        self.root = xxh64_intdigest((model + salt).encode())

    def block(self, parent: int, tokens: Sequence[int]) -> int:
        content = xxh64_intdigest(b"".join(token.to_bytes(4, "little") for token in tokens))
        return int(xxh64_intdigest(_le64(content) + _le64(parent)))

    def chain(self, tokens: Sequence[int], block_size: int) -> list[int]:
        before = self.root
        hashes = []
        for at in range(0, len(tokens), block_size):
            before = self.block(before, tokens[at : at + block_size])
            hashes.append(before)
        return hashes


def chain(space: CborFnv | Xxh64, tokens: Sequence[int], block_size: int = 16) -> list[int]:
    """Hashes of all full blocks of a prompt."""
    before = space.root
    hashes = []
    for at in range(0, len(tokens) - block_size + 1, block_size):
        before = space.block(before, tokens[at : at + block_size])
        hashes.append(before)
    return hashes


def _digest(content: bytes) -> int:
    return int(xxh64_intdigest(content)) or 1


def _le64(value: int) -> bytes:
    return value.to_bytes(8, "little")
