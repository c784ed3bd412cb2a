"""The token ids of a prompt, and a cache of pieces of text that were encoded before."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np
from msgspec import Struct

# Token ids in protobuf messages are varints: seven bits per byte, and the last byte of each is below 128.

#: The longest varint of an unsigned 32-bit number.
_MOST_BYTES = 5


def ids_of(segments: Sequence[bytes | memoryview]) -> bytes:
    """Convert concatenated varints to little-endian 32-bit integers. Raises `ValueError` if malformed or too large."""
    data = np.frombuffer(b"".join(segments), np.uint8)
    if not len(data):
        return b""
    ends = np.flatnonzero(data < 0x80)
    if not len(ends) or ends[-1] != len(data) - 1:
        raise ValueError("a number that is cut off")
    starts = np.concatenate(([0], ends[:-1] + 1))
    lengths = ends - starts + 1
    if lengths.max() > _MOST_BYTES:
        raise ValueError("a number of more than 32 bits")
    places = np.arange(len(data)) - np.repeat(starts, lengths)
    values = np.add.reduceat((data & 0x7F).astype(np.uint64) << (7 * places).astype(np.uint64), starts)
    if values.max() >> 32:
        raise ValueError("a number of more than 32 bits")
    return values.astype("<u4").tobytes()


# A prompt as the engine's token ids, and the other inputs of the engine's block hashes.

TOKEN_BYTES = 4

# Reasons for having no ids: few and fixed, because they are labels of metrics. `PromptTokens.detail` says more.
#: No tokeniser is configured for this model, or it could not be loaded.
NO_TOKENISER = "no-tokeniser"
#: The body was not read, or strict decoding failed.
UNREAD = "unread"
#: The API's prompt does not go through the engine's cache, or is not translated here.
API = "api"
#: Images, sounds and the like: only the engine knows their tokens.
MEDIA = "media"
#: There is no chat template, or it refused the messages.
TEMPLATE = "template"
#: Part of the prompt is stored on the server (Responses API).
STORED = "stored"
#: A field of the body changes the prompt in a way that only the engine knows.
FIELDS = "fields"
#: The prompt exceeds a bound on size or nesting.
TOO_LONG = "too-long"
#: The engine did not answer in time, or answered without ids.
ENGINE = "engine"
REASONS = (NO_TOKENISER, UNREAD, API, MEDIA, TEMPLATE, STORED, FIELDS, TOO_LONG, ENGINE)
_MAX_DETAIL = 200
#: The content that a chat template takes, by the names of vLLM: one text, or a list of parts.
STRING, PARTS = "string", "openai"


class MediaItem(Struct, frozen=True, gc=False):
    """An image, sound or video. Its placeholder tokens are at `offset`..`offset + length` of the prompt."""

    #: The engine's identifier of the content.
    digest: str
    offset: int
    length: int


class PromptTokens(Struct, frozen=True, gc=False):
    """The `ids` of a prompt, or a `reason` why there are none."""

    #: Token ids as little-endian 32-bit integers, as `core.kv.keys.prompt_keys` takes them and
    #: `numpy.frombuffer(ids, "<u4")` reads them without a copy. If a request has several prompts, those of the first.
    ids: bytes = b""
    #: Tokens of all prompts of the request; equals `count` unless there are several.
    total: int = 0
    #: One of `REASONS`; empty = `ids` is valid.
    reason: str = ""
    #: The reason in words: what was missing or refused, at most 200 characters.
    detail: str = ""
    #: The request's cache salt, an extra of the first block; empty = none.
    salt: str = ""
    #: The media in the prompt, sorted by offset.
    media: tuple[MediaItem, ...] = ()

    @property
    def count(self) -> int:
        return len(self.ids) // TOKEN_BYTES

    def extras(self, block_size: int) -> list[tuple[str, ...]] | None:
        """The extra inputs of each full block's key in addition to its tokens, as `prompt_keys` takes them: the digests
        of the media that overlap it and, for the first block, the salt. `None` = no block has any. An adapter is not an
        extra, but part of the key space's root."""
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
    """There are no ids. Used only inside this package; callers get a `PromptTokens` with the reason."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


def absent(reason: str, detail: str = "") -> PromptTokens:
    """A result without ids, with the reason."""
    return PromptTokens(reason=reason, detail=detail[:_MAX_DETAIL])


def packed(ids: Sequence[int]) -> bytes:
    """Pack ids into little-endian 32-bit integers. Raises `OverflowError` if an id is out of range."""
    return np.asarray(ids, np.uint32).astype("<u4", copy=False).tobytes()


# Caches the tokens of pieces of text, so that only the new messages of a growing chat are encoded.
#
# A piece is the text between two places where a text may be cut (`tokeniser.Boundaries`); in chats, it is a message.
# Conversations that share a system prompt share its piece, and a growing conversation keeps its earlier pieces. Keys
# are the texts, not hashes of them, so that a client cannot cause a collision.

#: Memory of an entry in addition to its text and ids: two object headers, the hash table's slot, the list links.
ENTRY_BYTES = 300
#: Python stores 2 or 4 bytes per character if a text has characters beyond Latin-1; these are the limits.
_WIDE, _WIDER = "\u0100", "\U00010000"


class PieceCache:
    """A cache of encoded pieces that drops the least recently used first. Several threads may use it if `lock`
    excludes them from each other. The lock is never held while text is encoded."""

    def __init__(self, max_bytes: int, lock: AbstractContextManager[object]) -> None:
        self._ids: OrderedDict[str, bytes] = OrderedDict()
        self._max_bytes = max_bytes
        self._lock = lock
        #: Bytes in use.
        self.bytes = 0
        #: Characters looked up, and those of them that were found: counters for metrics.
        self.asked = 0
        self.hits = 0

    def __len__(self) -> int:
        return len(self._ids)

    def encode(self, pieces: Sequence[str], encode: Callable[[Sequence[str]], list[bytes]]) -> bytes:
        """The concatenated ids of all pieces. `encode` is called at most once, with the pieces that are not cached; its
        errors are raised."""
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
        """Raise `AssertionError` if the accounts are wrong."""
        assert self.bytes == sum(_size(piece, ids) for piece, ids in self._ids.items())
        assert self.bytes <= self._max_bytes

    def _get(self, piece: str) -> bytes | None:
        self.asked += len(piece)
        ids = self._ids.get(piece)
        if ids is not None:
            self.hits += len(piece)
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
