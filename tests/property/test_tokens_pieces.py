"""A prompt that is encoded piece by piece, with whatever the cache has, gives the tokens of the whole.

Conversations grow at random, texts are cut where they like, and special tokens stand in them as clients may write them:
whole, cut short, doubled, with blanks around. Against both libraries, for each kind of tokenizer.
"""

import contextlib
import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from fairlead.apis.tokens.pieces import PieceCache
from fairlead.apis.tokens.tokeniser import Tokeniser, load

WORDS = [
    "the module",
    " user\n",
    "assistant",
    "  \n\n",
    "12345 678",
    "naïve",
    "你好",
    "👍🏽",
    "e\u0301",
    "▁a",
    "CONST",
    "_",
]
ADDED: list[dict[str, Any]] = [
    {"content": "<|s|>"},
    {"content": "<|e|>", "rstrip": True},
    {"content": "<|l|>", "lstrip": True},
    {"content": "<|w|>", "single_word": True},
    {"content": "qqq", "single_word": True, "special": False},
    {"content": "<|s|>long", "special": False},
    {"content": "<|n|>", "normalized": True},
    {"content": "|><|"},
    {"content": "abc"},
]
KINDS = ["byte-level", "prefix-space", "prepend", "metaspace-first", "metaspace-always", "unigram"]


@cache
def trained(kind: str) -> str:
    tokenizer = Tokenizer(models.Unigram() if kind == "unigram" else models.BPE(unk_token="<unk>"))
    if kind in ("byte-level", "prefix-space"):
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "prefix-space")
    elif kind == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        scheme = "first" if kind == "metaspace-first" else "always"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    if kind == "unigram":
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])
        trainer: Any = trainers.UnigramTrainer(
            vocab_size=120, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
        )
    else:
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator([" ".join(WORDS), "".join(WORDS), "user assistant the a module"] * 20, trainer)
    for token in ADDED:
        tokenizer.add_tokens([AddedToken(**{"special": True, "normalized": False, **token})])
    ids = [("<|s|>", tokenizer.token_to_id("<|s|>"))]
    tokenizer.post_processor = processors.TemplateProcessing(single="<|s|> $A", special_tokens=ids)
    return str(tokenizer.to_str())


PIECE = st.one_of(
    st.sampled_from([*WORDS, *(token["content"] for token in ADDED)]),
    st.sampled_from(["<|", "|>", "<|s", "s|>", " ", "\n", "l", "<|s|>lon"]),
    st.text(max_size=8),
)
TEXT = st.lists(PIECE, max_size=12).map("".join)


def made(kind: str, fast: bool, size: int) -> Tokeniser:
    import fastokens
    import tokenizers

    cache = PieceCache(size, contextlib.nullcontext())
    tokeniser, state = load(trained(kind).encode(), b"", cache, (fastokens if fast else None, tokenizers))
    assert tokeniser is not None, state
    return tokeniser


@cache
def tokeniser_and_oracle(kind: str, fast: bool) -> tuple[Tokeniser, Tokenizer]:
    return made(kind, fast, 6000), Tokenizer.from_str(trained(kind))


def encodable(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fast", [True, False])
@settings(max_examples=60, deadline=None)
@given(texts=st.lists(TEXT.filter(encodable), min_size=1, max_size=8), cut=st.integers(0, 40), special=st.booleans())
def test_growing_texts(kind: str, fast: bool, texts: list[str], cut: int, special: bool) -> None:
    tokeniser, oracle = tokeniser_and_oracle(kind, fast)
    grown = ""
    for number, text in enumerate(texts):
        grown += f"<|s|>user{number}\n{text}<|e|>" if number % 2 else text
        for one in (grown, grown[:cut], grown[cut:]):
            expected = oracle.encode(one, add_special_tokens=special).ids
            assert list(memoryview(tokeniser.encode(one, special)).cast("I")) == expected, one
    tokeniser.cache.validate()


def test_pieces_are_found_again() -> None:
    tokeniser = made("byte-level", True, 1 << 20)
    chat = "".join(f"<|s|>user\nmessage {number}<|e|>\n" for number in range(50))
    tokeniser.encode(chat)
    before = tokeniser.cache.asked - tokeniser.cache.hits
    tokeniser.encode(chat + "<|s|>user\nthe next<|e|>\n")
    assert tokeniser.cache.asked - tokeniser.cache.hits - before == len("<|s|>user\nthe next")


def test_every_kind_has_places_to_cut() -> None:
    for kind in KINDS:
        tokeniser = made(kind, False, 1 << 20)
        tokeniser.encode("<|s|>user\nhello<|e|>\n")
        before = tokeniser.cache.hits
        tokeniser.encode("<|s|>user\nhello<|e|>\n<|s|>user\nmore")
        assert tokeniser.cache.hits > before, kind
    assert json.loads(trained("byte-level"))["added_tokens"]
