"""Text → token ids, as the engine's tokenizer makes them."""

from collections.abc import Sequence
from types import ModuleType

from msgspec import DecodeError, Struct, ValidationError
from msgspec.json import Decoder

from fairlead.tokens import backend
from fairlead.tokens.backend import Backend
from fairlead.tokens.boundaries import AddedToken, Boundaries
from fairlead.tokens.pieces import PieceCache
from fairlead.tokens.self_check import choose

#: A word that any tokenizer knows how to encode, to see what it puts around a text.
_PROBE = "around"


class _Document(Struct):
    added_tokens: list[AddedToken] = []


class _Config(Struct):
    added_tokens_decoder: dict[str, AddedToken] = {}


_decode_document = Decoder(_Document).decode
_decode_config = Decoder(_Config).decode


class Tokeniser:
    """One model's. `state` names the library that encodes, see docs/tokens.md."""

    def __init__(self, backend: Backend, state: str, boundaries: Boundaries, cache: PieceCache) -> None:
        self.state = state
        #: The name of the library that encodes.
        self.library = backend.name
        self.cache = cache
        self._backend = backend
        self._boundaries = boundaries
        self._around = _around(backend)

    def encode(self, text: str, special: bool = False) -> bytes:
        """Ids, little-endian 32 bit. `special`: with the special tokens that the tokenizer puts around a text.

        Raises `ValueError` for a text that has no encoding (an unpaired surrogate).
        """
        if not special:
            return self._encode(text)
        if self._around is None:
            return self._backend.encode_whole(text)
        before, after = self._around
        return before + self._encode(text) + after

    def _encode(self, text: str) -> bytes:
        return self.cache.encode(self._boundaries.pieces(text), self._backend.encode)


def load(
    document: bytes,
    config: bytes,
    cache: PieceCache,
    libraries: tuple[ModuleType | None, ModuleType | None] | None = None,
) -> tuple[Tokeniser | None, str]:
    """From the content of `tokenizer.json` and `tokenizer_config.json` (may be empty). Without a tokeniser the text
    says why, else it is the tokeniser's state. Takes seconds for a large vocabulary: not for an event loop.

    `libraries`: fastokens and tokenizers, each `None` if it is missing; taken from what is installed unless given.
    """
    fast, oracle = libraries or (backend.library(backend.FAST), backend.library(backend.ORACLE))
    try:
        added = _decode_document(document).added_tokens
        text = document.decode()
    except (DecodeError, ValidationError, UnicodeDecodeError, RecursionError) as exc:
        return None, f"none (tokenizer.json is not readable: {exc})"
    more = _more(config, added)
    choice = choose(text, more, [*added, *more], fast, oracle)
    if choice.backend is None:
        return None, choice.state
    return Tokeniser(choice.backend, choice.state, Boundaries([*added, *more]), cache), choice.state


def _more(config: bytes, added: Sequence[AddedToken]) -> list[AddedToken]:
    """Added tokens that only `tokenizer_config.json` has; the engine's loader adds them to the vocabulary, in the order
    of their ids."""
    try:
        decoder = _decode_config(config).added_tokens_decoder if config else {}
    except (DecodeError, ValidationError, UnicodeDecodeError, RecursionError):
        return []
    known = {token.content for token in added}
    missing = [(int(number), token) for number, token in decoder.items() if number.isdecimal()]
    return [token for _, token in sorted(missing, key=lambda pair: pair[0]) if token.content not in known]


def _around(backend: Backend) -> tuple[bytes, bytes] | None:
    """What is put before and after any text; `None` if that cannot be told from one."""
    try:
        inner, whole = backend.encode([_PROBE])[0], backend.encode_whole(_PROBE)
    except ValueError:
        return None
    at = whole.find(inner)
    while at >= 0 and at % 4:
        at = whole.find(inner, at + 1)
    return None if at < 0 or not inner else (whole[:at], whole[at + len(inner) :])
