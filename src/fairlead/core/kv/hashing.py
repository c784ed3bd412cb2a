"""vLLM's hashes of KV blocks, and the canonical CBOR that some of them need."""

import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence

from xxhash import xxh3_128_digest

# The part of canonical CBOR (RFC 8949 §4.2) that vLLM's block hashes need: shortest encodings, definite lengths.

#: Values that can be encoded. Booleans and floats do not occur in block hashes.
Value = int | str | bytes | None | Sequence["Value"] | Mapping[str, "Value"]

_UNSIGNED, _NEGATIVE, _BYTES, _TEXT, _ARRAY, _MAP = 0x00, 0x20, 0x40, 0x60, 0x80, 0xA0
_NULL = b"\xf6"


def encode(value: Value) -> bytes:
    """Return the encoded value. Raise `ValueError` for integers beyond 64 bits, `TypeError` for other types."""
    parts: list[bytes] = []
    _add(parts, value)
    return b"".join(parts)


def _add(parts: list[bytes], value: Value) -> None:
    if value is None:
        parts.append(_NULL)
    elif isinstance(value, bool):
        raise TypeError("no booleans in block hashes")
    elif isinstance(value, int):
        parts.append(_head(_UNSIGNED, value) if value >= 0 else _head(_NEGATIVE, -1 - value))
    elif isinstance(value, bytes):
        parts += (_head(_BYTES, len(value)), value)
    elif isinstance(value, str):
        text = value.encode()
        parts += (_head(_TEXT, len(text)), text)
    elif isinstance(value, Mapping):
        parts.append(_head(_MAP, len(value)))
        for name, item in sorted((encode(name), item) for name, item in value.items()):
            parts.append(name)
            _add(parts, item)
    elif isinstance(value, Sequence):
        parts.append(_head(_ARRAY, len(value)))
        for item in value:
            _add(parts, item)
    else:
        raise TypeError(f"{type(value).__name__} has no place in a block hash")


def _head(major: int, argument: int) -> bytes:
    if argument < 24:
        return bytes((major | argument,))
    for size, information in ((1, 24), (2, 25), (4, 26), (8, 27)):
        if argument < 1 << 8 * size:
            return bytes((major | information,)) + argument.to_bytes(size, "big")
    raise ValueError(f"{argument} needs more than 64 bits")


# vLLM's own block hashes, for the key space of engine hashes and for checking events.
#
#     NONE_HASH = H(seed)
#     block     = H((parent digest, token ids, extra))       parent of the first block: NONE_HASH
#     extra     = None, or a tuple of ("lora", name, path), ("mm", id, offset), ("prompt_embeds", digest),
#                 and ("cache_salt", salt) on the first block
#
# H is one of `ALGORITHMS`: SHA-256 or 128-bit xxh3 over Python's pickle (protocol 5) or over canonical CBOR. The whole
# digest is chained; the 64-bit hash in an event is its last 8 bytes, big-endian. With vLLM 0.32.0, all 88 captured
# vectors agree.
#
# The seed is the text of PYTHONHASHSEED. If it is unset, the seed is "vllm-none-hash" for SHA-256 (0.29 and later). For
# xxhash it is then random, so the hashes are not known outside the process. An adapter's path is the one that was given
# to the server; it is not in events. Up to 0.30 the adapter's part of `extra` was only its name.

#: The seed that vLLM hashes if PYTHONHASHSEED is not set.
DEFAULT_SEED = "vllm-none-hash"

Extra = tuple[tuple[str | int, ...] | str, ...]


def _pickled(value: object) -> bytes:
    return pickle.dumps(value, protocol=5)


def _sha256(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


_ENCODERS: dict[str, tuple[Callable[..., bytes], Callable[[bytes], bytes]]] = {
    "sha256": (_pickled, _sha256),
    "sha256_cbor": (encode, _sha256),
    "xxhash": (_pickled, xxh3_128_digest),
    "xxhash_cbor": (encode, xxh3_128_digest),
}
ALGORITHMS = tuple(_ENCODERS)


class EngineHasher:
    """Hashes like a vLLM server with that algorithm and PYTHONHASHSEED. Raises `ValueError` if its seed is random."""

    def __init__(self, algorithm: str = "sha256", seed: str | None = None) -> None:
        if algorithm not in _ENCODERS:
            raise ValueError(f"unknown hash algorithm {algorithm!r}; choose one of {', '.join(ALGORITHMS)}")
        if seed is None and algorithm.startswith("xxhash"):
            raise ValueError(
                f"{algorithm} without PYTHONHASHSEED is seeded at random: set PYTHONHASHSEED on the server"
            )
        self._encode, self._digest = _ENCODERS[algorithm]
        self.none_hash = self.hash(DEFAULT_SEED if seed is None else seed)

    def hash(self, value: object) -> bytes:
        return self._digest(self._encode(value))

    def digests(
        self,
        tokens: Sequence[int],
        block_size: int,
        lora: tuple[str, str] | None = None,
        salt: str | None = None,
        extras: Sequence[Extra] | None = None,
        parent: bytes | None = None,
    ) -> list[bytes]:
        """Return the digests of all full blocks. `lora`: name and path. `extras`: further parts of each block's
        identity."""
        before = parent if parent is not None else self.none_hash
        digests: list[bytes] = []
        for block in range(len(tokens) // block_size):
            extra: list[object] = []
            if lora is not None:
                extra.append(("lora", *map(_fresh, lora)))
            if extras is not None:
                extra += extras[block]
            if salt is not None and not block and parent is None:
                extra.append(("cache_salt", _fresh(salt)))
            content = tuple(tokens[block * block_size : (block + 1) * block_size])
            before = self.hash((before, content, tuple(extra) if extra else None))
            digests.append(before)
        return digests

    def hashes(
        self, tokens: Sequence[int], block_size: int, lora: tuple[str, str] | None = None, salt: str | None = None
    ) -> list[int]:
        """Return the hashes of all full blocks, as in events."""
        return [short(digest) for digest in self.digests(tokens, block_size, lora, salt)]


def short(digest: bytes) -> int:
    """Return the 64-bit hash of events: the last 8 bytes, big-endian. Fewer bytes are padded on the left."""
    return int.from_bytes(digest[-8:], "big")


def _fresh(text: str) -> str:
    """Return an equal string that is a new object: pickle encodes a second reference to the same object differently."""
    return text.encode().decode()
