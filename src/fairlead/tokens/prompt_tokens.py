"""A prompt as the engine's token ids, and what else the engine's block hashes depend on."""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

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

    #: Token ids as little-endian 32-bit integers: what `fleet.kv.keys.prompt_keys` takes, and
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
        found: list[tuple[str, ...]] = [()] * blocks
        for item in self.media:
            last = (item.offset + max(item.length, 1) - 1) // block_size
            for block in range(item.offset // block_size, min(last + 1, blocks)):
                found[block] += (item.digest,)
        if self.salt and blocks:
            found[0] += (self.salt,)
        return found


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
