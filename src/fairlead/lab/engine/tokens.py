"""Token ids, their text and the chained hashes of KV blocks.

A token is four bytes of text, and its id is these bytes as a little-endian 32-bit integer. So the UTF-8 bytes of a
prompt, padded to a multiple of four, *are* its token ids. Output that returns in the prompt of the next turn has the
ids it was generated with, so it hits the blocks that the decode filled, as on a real server.

Output is a slice of one fixed table of words, and the request's seed selects where the slice starts. Text at any
position costs one slice, so generated text need not be stored.
"""

from collections.abc import Sequence

import numpy as np
import xxhash

TOKEN_BYTES = 4
#: The table of output text repeats after this many tokens.
PERIOD = 1 << 16


def _table() -> bytes:
    """Words of three letters and a space: safe inside JSON, and unchanged if a client strips whitespace."""
    x = np.arange(1, PERIOD + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    consonants = np.frombuffer(b"bcdfghjklmnprstv", dtype=np.uint8)
    vowels = np.frombuffer(b"aeio", dtype=np.uint8)
    words = np.full((PERIOD, TOKEN_BYTES), ord(" "), dtype=np.uint8)
    words[:, 0] = consonants[(x >> np.uint64(8)) & np.uint64(15)]
    words[:, 1] = vowels[(x >> np.uint64(20)) & np.uint64(3)]
    words[:, 2] = consonants[(x >> np.uint64(32)) & np.uint64(15)]
    return words.tobytes()


_TEXT = _table() * 2


def output(seed: int, start: int, stop: int) -> bytes:
    """The text of output tokens `start` to before `stop`, also their token ids; `4 * (stop - start)` bytes."""
    position = (seed + start) % PERIOD
    count = stop - start
    if count <= PERIOD:
        return _TEXT[TOKEN_BYTES * position : TOKEN_BYTES * (position + count)]
    turns, remainder = divmod(count, PERIOD)
    turn = _TEXT[TOKEN_BYTES * position : TOKEN_BYTES * (position + PERIOD)]
    return turn * turns + turn[: TOKEN_BYTES * remainder]


def encode(text: bytes) -> bytes:
    """Token ids of a text, as the bytes of little-endian 32-bit integers. The last token is padded with NUL."""
    return text + b"\0" * (-len(text) % TOKEN_BYTES)


def ids(tokens: bytes) -> list[int]:
    """Token ids as integers."""
    return list(map(int, np.frombuffer(tokens, dtype="<u4").tolist()))


def from_ids(values: Sequence[int]) -> bytes:
    """The opposite of `ids`. Raises `OverflowError` or `TypeError` if a value is not an unsigned 32-bit integer."""
    return np.array(values, dtype="<u4").tobytes()


def text(tokens: bytes) -> str:
    """The text of these tokens. Invalid UTF-8 becomes U+FFFD, as with a real detokenizer."""
    return tokens.replace(b"\0", b"").decode("utf-8", "replace")


def root_hash(lora: str = "", salt: str = "") -> int:
    """The parent of a chain's first block. Chains of different adapters or cache salts have no hash in common."""
    if not lora and not salt:
        return 0
    return int(xxhash.xxh3_64_intdigest(f"{lora}\0{salt}".encode("utf-8", "surrogatepass"), 1))


def block_hash(parent: int, tokens: bytes) -> int:
    """The hash of a full block after `parent`."""
    return int(xxhash.xxh3_64_intdigest(tokens, parent))


def chain(tokens: bytes, block_size: int, parent: int) -> list[int]:
    """Hashes of all full blocks; `parent` is the hash before the first one. A trailing part of a block has no hash."""
    width = TOKEN_BYTES * block_size
    digest = xxhash.xxh3_64_intdigest
    hashes = []
    for position in range(0, len(tokens) - width + 1, width):
        parent = digest(tokens[position : position + width], parent)
        hashes.append(parent)
    return hashes
