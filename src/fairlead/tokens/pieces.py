"""Tokens of pieces of text that came before, so that a growing chat has only its new messages encoded.

A piece is what lies between two places where a text may be cut (`boundaries`), in chats a message. Conversations that
share a system prompt share its piece, and a conversation that grows keeps the pieces it had. Keys are the texts
themselves, not hashes of them: a client cannot bring about a collision.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

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
