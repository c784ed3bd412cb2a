"""Token ids, their text and the chained hashes of KV blocks.

A token is four bytes of text, and its id is these bytes as a little-endian 32-bit integer. So the UTF-8 bytes of a
prompt, padded to a multiple of four, *are* its token ids. Output that returns in the prompt of the next turn has the
ids it was generated with, so it hits the blocks that the decode filled, as on a real server.

Output is a slice of one fixed table of words, and the request's seed selects where the slice starts. Text at any
position costs one slice, so generated text need not be stored.
"""

from array import array
from collections.abc import Sequence
from hashlib import shake_128

import xxhash

TOKEN_BYTES = 4
#: The table of output text repeats after this many tokens.
PERIOD = 1 << 16


def _table() -> bytes:
    """Words of three letters and a space: safe inside JSON, and unchanged if a client strips whitespace."""
    chance = shake_128(b"fairlead").digest(3 * PERIOD)
    consonants, vowels = b"bcdfghjklmnprstv" * 16, b"aeio" * 64
    words = bytearray(b"    " * PERIOD)
    for letter, letters in enumerate((consonants, vowels, consonants)):
        words[letter::TOKEN_BYTES] = chance[letter::3].translate(letters)
    return bytes(words)


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
    return array("I", tokens).tolist()


def from_ids(values: Sequence[int]) -> bytes:
    """The opposite of `ids`. Raises `OverflowError` or `TypeError` if a value is not an unsigned 32-bit integer."""
    return array("I", values).tobytes()


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
