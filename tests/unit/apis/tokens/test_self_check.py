"""Which library encodes, and that the check finds a library that is wrong."""

import json
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import fastokens
import msgspec
import pytest
import tokenizers

from fairlead.apis.tokens import tokeniser
from fairlead.apis.tokens.pieces import PieceCache
from fairlead.apis.tokens.tokeniser import TEXTS, AddedToken, FastBackend, OracleBackend, disagreement, texts_for

Libraries = tuple[ModuleType | None, ModuleType | None]


def added_tokens(document: bytes) -> list[AddedToken]:
    return msgspec.json.decode(msgspec.json.encode(json.loads(document)["added_tokens"]), type=list[AddedToken])


def test_both_libraries_agree_on_every_text(byte_level: bytes) -> None:
    text = byte_level.decode()
    added = added_tokens(byte_level)
    fast, oracle = FastBackend(fastokens, text), OracleBackend(tokenizers, text)
    assert disagreement(fast, oracle, texts_for(added)) == ""
    assert len(texts_for(added)) > len(TEXTS) + len(added)


def test_what_is_chosen_encodes_as_the_oracle(document: bytes, cache_: PieceCache) -> None:
    made, _ = tokeniser.load(document, b"", cache_)
    oracle = OracleBackend(tokenizers, document.decode())
    assert made is not None
    for text in texts_for(added_tokens(document)):
        assert made.encode(text) == oracle.encode([text])[0], text
        assert made.encode(text, special=True) == oracle.encode_whole(text), text


def test_a_form_that_fastokens_does_not_know(metaspace: bytes, cache_: PieceCache) -> None:
    made, said = tokeniser.load(metaspace, b"", cache_)
    assert made is not None and made.library == "tokenizers"
    assert said.startswith("tokenizers (fastokens cannot load it: pre-tokenizer error")


@pytest.mark.parametrize(
    ("libraries", "state"),
    [
        ((fastokens, tokenizers), "fastokens"),
        ((None, tokenizers), "tokenizers (fastokens is not installed)"),
        ((fastokens, None), "fastokens (unchecked: tokenizers is not installed)"),
    ],
)
def test_states(byte_level: bytes, cache_: PieceCache, libraries: Libraries, state: str) -> None:
    made, said = tokeniser.load(byte_level, b"", cache_, libraries)
    assert said == state
    assert made is not None and made.state == state
    assert made.library == state.split(" ")[0]
    assert len(made.encode("Hello")) % 4 == 0 and made.encode("Hello")


def test_no_library(byte_level: bytes, cache_: PieceCache) -> None:
    made, said = tokeniser.load(byte_level, b"", cache_, (None, None))
    assert made is None
    assert said == "none (neither fastokens nor tokenizers is installed)"


def lying(change: Callable[[list[str]], list[str]]) -> ModuleType:
    """fastokens, but the texts are changed before they are encoded."""

    class Tokenizer:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        @staticmethod
        def from_json_str(document: str) -> "Tokenizer":
            return Tokenizer(fastokens.Tokenizer.from_json_str(document))

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def encode_batch_flat(self, texts: list[str], special: bool) -> Any:
            return self._inner.encode_batch_flat(change(texts), special)

    return cast(ModuleType, SimpleNamespace(Tokenizer=Tokenizer))


@pytest.mark.parametrize(
    "change",
    [
        lambda texts: [text.replace("\t", " ") for text in texts],
        lambda texts: [text.replace("\u0301", "") for text in texts],
        lambda texts: [text.replace("<|im_end|>", "") for text in texts],
        lambda texts: [text.strip("\n") for text in texts],
        lambda texts: [text.replace("👩‍👩‍👧‍👦", "👩") for text in texts],
    ],
    ids=["tabs", "marks", "special", "ends", "emoji"],
)
def test_a_library_that_is_wrong_is_not_used(
    byte_level: bytes, cache_: PieceCache, change: Callable[[list[str]], list[str]]
) -> None:
    made, said = tokeniser.load(byte_level, b"", cache_, (lying(change), tokenizers))
    assert said.startswith("tokenizers (fastokens disagreed: text ")
    assert made is not None and made.library == "tokenizers"


@pytest.mark.parametrize(
    "document", [b"", b"[]", b"{}", b"\xff", b'{"added_tokens": 1}', b'{"model": {"type": "BPE"}}']
)
def test_what_is_no_tokenizer(document: bytes, cache_: PieceCache) -> None:
    made, said = tokeniser.load(document, b"", cache_)
    assert made is None
    assert said.startswith("none (")
    assert len(said) < 600


def test_truncation_and_padding_of_the_file_do_not_count(byte_level: bytes, cache_: PieceCache) -> None:
    document = json.loads(byte_level)
    document["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    document["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<s>",
    }  # fmt: skip
    plain, _ = tokeniser.load(byte_level, b"", cache_)
    for libraries in ((fastokens, tokenizers), (None, tokenizers)):
        made, _ = tokeniser.load(json.dumps(document).encode(), b"", cache_, libraries)
        cache_.clear()
        assert plain is not None and made is not None
        assert made.encode("one two three four five six") == plain.encode("one two three four five six")
        assert made.encode("a", special=True) == plain.encode("a", special=True)


def test_added_tokens_of_the_configuration(byte_level: bytes, cache_: PieceCache) -> None:
    more = {"9000": {"content": "<|late|>", "normalized": False, "special": True}, "x": {"content": "<|bad|>"}}
    config = json.dumps({"added_tokens_decoder": more}).encode()
    for libraries in ((fastokens, tokenizers), (None, tokenizers)):
        cache_.clear()
        plain, _ = tokeniser.load(byte_level, b"", cache_)
        made, state = tokeniser.load(byte_level, config, cache_, libraries)
        assert made is not None and plain is not None and "disagreed" not in state
        cache_.clear()
        with_it = made.encode("a<|late|>b")
        cache_.clear()
        assert len(with_it) == 12 < len(plain.encode("a<|late|>b"))


def test_special_tokens_around(metaspace: bytes, byte_level: bytes, cache_: PieceCache) -> None:
    oracle = tokenizers.Tokenizer.from_str(metaspace.decode())
    made, _ = tokeniser.load(metaspace, b"", cache_)
    assert made is not None
    for text in ("", " a b", "<|im_start|>user", "x<s>"):
        expected = oracle.encode(text, add_special_tokens=True).ids
        assert list(memoryview(made.encode(text, special=True)).cast("I")) == expected
        assert expected[0] == oracle.token_to_id("<s>") and expected[-1] == oracle.token_to_id("</s>")
    cache_.clear()
    bare, _ = tokeniser.load(byte_level, b"", cache_)
    assert bare is not None and bare.encode("a", special=True) == bare.encode("a")
