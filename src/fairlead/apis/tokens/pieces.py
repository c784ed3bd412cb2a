"""Token ids of a prompt, and the pieces of text that were encoded before."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np
from msgspec import Struct

# Token ids of protobuf messages: varints, seven bits a byte, the last byte of each below 128.

#: Of an unsigned 32-bit number.
_MOST_BYTES = 5


def ids_of(segments: Sequence[bytes | memoryview]) -> bytes:
    """Varints one after another → little-endian 32-bit integers. Raises `ValueError` for what is none or is larger."""
    data = np.frombuffer(b"".join(segments), np.uint8)
    if not len(data):
        return b""
    ends = np.flatnonzero(data < 0x80)
    if not len(ends) or ends[-1] != len(data) - 1:
        raise ValueError("a number without its end")
    starts = np.concatenate(([0], ends[:-1] + 1))
    lengths = ends - starts + 1
    if lengths.max() > _MOST_BYTES:
        raise ValueError("a number of more than 32 bits")
    places = np.arange(len(data)) - np.repeat(starts, lengths)
    values = np.add.reduceat((data & 0x7F).astype(np.uint64) << (7 * places).astype(np.uint64), starts)
    if values.max() >> 32:
        raise ValueError("a number of more than 32 bits")
    return values.astype("<u4").tobytes()


# A prompt as the engine's token ids, and what else the engine's block hashes depend on.

TOKEN_BYTES = 4

# Why there are no ids: labels of metrics, few and fixed. `PromptTokens.detail` says more.
#: None is configured for this model, or it could not be loaded.
NO_TOKENISER = "no-tokeniser"
#: The body was not read, or cannot be decoded as strictly as text must be.
UNREAD = "unread"
#: This API's prompt does not go through the engine's cache, or is not translated here.
API = "api"
#: Images, sounds and the like: only the engine knows their tokens.
MEDIA = "media"
#: There is no chat template, or it refused.
TEMPLATE = "template"
#: Part of the prompt is stored on the server (Responses API).
STORED = "stored"
#: A field of the body changes the prompt in a way that only the engine knows.
FIELDS = "fields"
#: Past a bound on size or nesting.
TOO_LONG = "too-long"
#: The engine was asked and did not answer in time, or not with ids.
ENGINE = "engine"
REASONS = (NO_TOKENISER, UNREAD, API, MEDIA, TEMPLATE, STORED, FIELDS, TOO_LONG, ENGINE)
_MAX_DETAIL = 200


class MediaItem(Struct, frozen=True, gc=False):
    """An image, sound or video. Its placeholder tokens stand at `offset`..`offset + length` of the prompt."""

    #: The engine's identifier of its content.
    digest: str
    offset: int
    length: int


class PromptTokens(Struct, frozen=True, gc=False):
    """Either `ids`, or a `reason` why there are none."""

    #: Token ids as little-endian 32-bit integers: what `core.kv.keys.prompt_keys` takes, and
    #: `numpy.frombuffer(ids, "<u4")` without a copy. Of a request with several prompts, those of the first.
    ids: bytes = b""
    #: Tokens of all prompts of the request; `count` unless there are several.
    total: int = 0
    #: One of `REASONS`; empty = there are ids.
    reason: str = ""
    #: The same for people: what was missing or refused, at most 200 characters.
    detail: str = ""
    #: The request's cache salt, an extra of the first block; empty = none.
    salt: str = ""
    #: Sorted by offset.
    media: tuple[MediaItem, ...] = ()

    @property
    def count(self) -> int:
        """Tokens in `ids`."""
        return len(self.ids) // TOKEN_BYTES

    def extras(self, block_size: int) -> list[tuple[str, ...]] | None:
        """What each full block's key needs beside its tokens, as `prompt_keys` takes it: digests of the media that
        overlap it, and on the first block the salt. `None` = nothing for any block. An adapter is no extra: it is part
        of the key space's root."""
        if not self.salt and not self.media:
            return None
        blocks = self.count // block_size
        by_block: list[tuple[str, ...]] = [()] * blocks
        for item in self.media:
            last = (item.offset + max(item.length, 1) - 1) // block_size
            for block in range(item.offset // block_size, min(last + 1, blocks)):
                by_block[block] += (item.digest,)
        if self.salt and blocks:
            by_block[0] += (self.salt,)
        return by_block


class Absent(Exception):
    """There are no ids. Inside this package only; callers get a `PromptTokens` with the reason."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


def absent(reason: str, detail: str = "") -> PromptTokens:
    """No ids, and why."""
    return PromptTokens(reason=reason, detail=detail[:_MAX_DETAIL])


def packed(ids: Sequence[int]) -> bytes:
    """Ids as little-endian 32-bit integers. Raises `OverflowError` if one is not of that range."""
    return np.asarray(ids, np.uint32).astype("<u4", copy=False).tobytes()


# Tokens of pieces of text that came before, so that a growing chat has only its new messages encoded.
#
# A piece is what lies between two places where a text may be cut (`boundaries`), in chats a message. Conversations
# that share a system prompt share its piece, and a conversation that grows keeps the pieces it had. Keys are the texts
# themselves, not hashes of them: a client cannot bring about a collision.

#: What an entry costs beside its text and ids: two objects' headers, the hash table's slot, the order's links.
ENTRY_BYTES = 300
#: Of texts with letters beyond Latin-1, Python keeps 2 or 4 bytes per character.
_WIDE, _WIDER = "\u0100", "\U00010000"


class PieceCache:
    """Least recently used pieces go first. Several threads may use it if `lock` excludes them from each other; the
    lock is never held while text is encoded."""

    def __init__(self, max_bytes: int, lock: AbstractContextManager[object]) -> None:
        self._ids: OrderedDict[str, bytes] = OrderedDict()
        self._max_bytes = max_bytes
        self._lock = lock
        #: Bytes held.
        self.bytes = 0
        #: Characters looked for, and those of them that were there: counters for metrics.
        self.asked = 0
        self.found = 0

    def __len__(self) -> int:
        return len(self._ids)

    def encode(self, pieces: Sequence[str], encode: Callable[[Sequence[str]], list[bytes]]) -> bytes:
        """Ids of all pieces one after another. `encode` is called once, with the pieces that are not held, and its
        errors pass through."""
        with self._lock:
            held = [self._get(piece) for piece in pieces]
        missing = [piece for piece, ids in zip(pieces, held, strict=True) if ids is None]
        if missing:
            new = encode(missing)
            left = iter(new)
            held = [next(left) if ids is None else ids for ids in held]
            with self._lock:
                for piece, ids in zip(missing, new, strict=True):
                    self._put(piece, ids)
        return b"".join(held)  # type: ignore[arg-type]

    def clear(self) -> None:
        with self._lock:
            self._ids.clear()
            self.bytes = 0

    def validate(self) -> None:
        """Raises `AssertionError` when the accounts are wrong."""
        assert self.bytes == sum(_size(piece, ids) for piece, ids in self._ids.items())
        assert self.bytes <= self._max_bytes

    def _get(self, piece: str) -> bytes | None:
        self.asked += len(piece)
        ids = self._ids.get(piece)
        if ids is not None:
            self.found += len(piece)
            self._ids.move_to_end(piece)
        return ids

    def _put(self, piece: str, ids: bytes) -> None:
        size = _size(piece, ids)
        if size > self._max_bytes or piece in self._ids:
            return
        self._ids[piece] = ids
        self.bytes += size
        while self.bytes > self._max_bytes:
            old, gone = self._ids.popitem(last=False)
            self.bytes -= _size(old, gone)


def _size(piece: str, ids: bytes) -> int:
    if piece.isascii():
        return ENTRY_BYTES + len(piece) + len(ids)
    widest = max(piece)
    return ENTRY_BYTES + len(piece) * (1 if widest < _WIDE else 2 if widest < _WIDER else 4) + len(ids)
