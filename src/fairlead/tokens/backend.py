"""The two tokeniser libraries behind one small face.

`fastokens` is 10 to 100 times as fast; `tokenizers` is what engines use, so it is right by definition. Neither is
needed to import this package: `library()` gives `None` for what is not installed.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import pairwise
from types import ModuleType
from typing import Any, Protocol, TypeVar

import numpy as np

from fairlead.tokens.boundaries import AddedToken
from fairlead.tokens.prompt_tokens import packed

FAST = "fastokens"
ORACLE = "tokenizers"


class Backend(Protocol):
    """Encodes. Any exception is possible; all are told as `ValueError`."""

    name: str

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """Ids of each text by itself, little-endian 32 bit, without special tokens around it."""
        ...

    def encode_whole(self, text: str) -> bytes:
        """Ids of a text with the special tokens that the tokenizer puts around one."""
        ...


def library(name: str) -> ModuleType | None:
    try:
        return import_module(name)
    except ImportError:
        return None


class FastBackend:
    name = FAST

    def __init__(self, module: ModuleType, document: str, more: Sequence[AddedToken] = ()) -> None:
        """Raises `ValueError` for a tokenizer that the library cannot load."""
        self._tokenizer = _made(module.Tokenizer.from_json_str, document)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if more:
            _made(self._tokenizer.add_tokens, list(more))

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        return self._flat(list(texts), False)

    def encode_whole(self, text: str) -> bytes:
        return self._flat([text], True)[0]

    def _flat(self, texts: list[str], special: bool) -> list[bytes]:
        ids, offsets = _made(lambda given: self._tokenizer.encode_batch_flat(given, special), texts)
        if len(texts) == 1:
            return [ids]
        ends = (np.frombuffer(offsets, "<u8") * 4).tolist()
        return [ids[start:end] for start, end in pairwise(ends)]


class OracleBackend:
    name = ORACLE

    def __init__(self, module: ModuleType, document: str, more: Sequence[AddedToken] = ()) -> None:
        """Raises `ValueError` for a tokenizer that the library cannot load."""
        self._tokenizer = _made(module.Tokenizer.from_str, document)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        for token in more:
            named = module.AddedToken(
                token.content,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=token.special,
            )
            _made(self._tokenizer.add_special_tokens if token.special else self._tokenizer.add_tokens, [named])

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        return [_made(self._ids, (text, False)) for text in texts]

    def encode_whole(self, text: str) -> bytes:
        return _made(self._ids, (text, True))

    def _ids(self, given: tuple[str, bool]) -> bytes:
        text, special = given
        # The batch form lets other threads run meanwhile, which `encode` does not; `fast` leaves offsets out.
        return packed(self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids)


T = TypeVar("T")


def _made(make: Callable[[Any], T], given: Any) -> T:
    try:
        return make(given)
    except Exception as exc:  # both libraries raise bare Exception, and one panics as BaseException
        raise ValueError(str(exc)[:200] or type(exc).__name__) from None
    except BaseException as exc:
        if type(exc).__name__ != "PanicException":
            raise
        raise ValueError(f"the library failed: {exc}"[:200]) from None
