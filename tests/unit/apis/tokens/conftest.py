"""Small tokenizers, trained here: one like Llama 3's and Qwen's, three like those made by SentencePiece."""

import contextlib
import json
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from fairlead.apis.tokens.pieces import PieceCache
from fairlead.apis.tokens.prompt_tokeniser import ModelFiles, ModelTokens, PromptTokeniser, build

CORPUS = [
    "You are a helpful assistant. What does the os module do? It talks to the operating system.",
    "def main(argv):\n    for line in open(argv[1]):\n        print(line.strip(), len(line))\n",
    "Zahlen wie 1234567890 und 3,14; naïve café, Straße, 你好世界, привет мир, 👍🏽 end of line.\n\n",
    "system user assistant tool function name arguments content role message messages",
] * 5
SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|tool|>"]
CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@cache
def trained(kind: str) -> bytes:
    """`tokenizer.json` of a kind."""
    if kind == "byte-level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
    elif kind in ("metaspace", "prepend"):
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        if kind == "metaspace":
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        else:
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=tokens, show_progress=False)
    else:
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        trainer = trainers.UnigramTrainer(
            vocab_size=300, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
        )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken("<|im_start|>x", normalized=False), AddedToken("CONST", normalized=True)])
    if kind != "byte-level":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>",
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")],
        )
    return tokenizer.to_str().encode()


@pytest.fixture(params=["byte-level", "prepend", "metaspace", "unigram"], scope="session")
def document(request: pytest.FixtureRequest) -> bytes:
    return trained(request.param)


@pytest.fixture(scope="session")
def byte_level() -> bytes:
    return trained("byte-level")


@pytest.fixture(scope="session")
def metaspace() -> bytes:
    return trained("metaspace")


def at_noon() -> datetime:
    return datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.fixture
def cache_() -> PieceCache:
    return PieceCache(1 << 20, contextlib.nullcontext())


@pytest.fixture
def model(cache_: PieceCache) -> Callable[..., ModelTokens]:
    """A model with a byte-level tokenizer and ChatML."""

    def made(template: str = CHATML, config: dict[str, Any] | None = None, kind: str = "byte-level") -> ModelTokens:
        files = ModelFiles(tokenizer=trained(kind), config=json.dumps(config or {}).encode(), template=template)
        return build(files, cache_, at_noon)

    return made


@pytest.fixture
def prompts(model: Callable[..., ModelTokens], cache_: PieceCache) -> PromptTokeniser:
    return PromptTokeniser({"*": model()}, cache_)
