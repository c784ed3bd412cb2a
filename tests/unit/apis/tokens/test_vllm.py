"""What a real vLLM made of prompts is what is made here."""

import json
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from fairlead.apis.request import parse_request
from fairlead.apis.tokens import PromptTokeniser
from fairlead.apis.tokens.pieces import PieceCache
from fairlead.apis.tokens.prompt_tokeniser import ModelFiles, build
from fairlead.core.kv.hashing import EngineHasher

CAPTURED = json.loads((Path(__file__).parents[3] / "data" / "tokens" / "vllm-0.32.json").read_text())
CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
#: The tokens of these prompts, read off the captured ids and `/tokenize`'s token texts (`hi`: only that it is one).
PIECES = {
    "system": 2781, "user": 1506, " does": 1101, " the": 294, " module": 658, " do": 546, " are": 556, " a": 270,
    " help": 1259, "ful": 1963, " ass": 1752, "ass": 3402, "ist": 633, "ant": 850, " Y": 2771, "import": 768,
    " os": 581, "\n": 202, " ": 224, "?": 34, ".": 17, "Y": 60, "ou": 576, "W": 58, "h": 75, "at": 274, "hi": 9999,
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny() -> PromptTokeniser:
    """A vocabulary of just these words: the rest of the way, template and special tokens, is the real one."""
    tokenizer = Tokenizer(models.WordLevel({**PIECES, "[UNK]": 0}, unk_token="[UNK]"))
    pattern = Regex(
        "|".join(word.replace("?", r"\?").replace(".", r"\.") for word in sorted(PIECES, key=len, reverse=True))
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    document: dict[str, Any] = json.loads(tokenizer.to_str())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    document["added_tokens"] = [
        {"id": number, "content": content, **plain} for number, content in ((1, "<|im_start|>"), (2, "<|im_end|>"))
    ]
    document["model"]["vocab"] |= {"<|im_start|>": 1, "<|im_end|>": 2}
    files = ModelFiles(tokenizer=json.dumps(document).encode(), template=CHATML)
    cache = PieceCache(1 << 20, nullcontext())
    return PromptTokeniser({"*": build(files, cache, datetime.now)}, cache)


@pytest.mark.parametrize("case", CAPTURED["cases"], ids=lambda case: case["path"])
def test_ids(tiny: PromptTokeniser, case: dict[str, Any]) -> None:
    body = json.dumps(case["body"]).encode()
    found = tiny.tokens_of(parse_request(case["path"], body), body, "tiny")
    assert found.reason == ""
    assert np.frombuffer(found.ids, "<u4").tolist() == case["token_ids"]


@pytest.mark.parametrize("case", CAPTURED["counted"], ids=lambda case: case["path"])
def test_counts_of_other_apis(tiny: PromptTokeniser, case: dict[str, Any]) -> None:
    body = json.dumps(case["body"]).encode()
    found = tiny.tokens_of(parse_request(case["path"], body), body, "tiny")
    assert (found.reason, found.total) == ("", case["input_tokens"])


def test_a_salted_prompt_hashes_as_in_the_events() -> None:
    hashed = CAPTURED["hashed"]
    body = json.dumps(hashed["body"]).encode()
    found = PromptTokeniser().tokens_of(parse_request("/v1/completions", body), body, "tiny")
    hasher = EngineHasher(hashed["algorithm"], hashed["seed"])
    tokens = np.frombuffer(found.ids, "<u4").tolist()
    assert [str(one) for one in hasher.hashes(tokens, hashed["block_size"], salt=found.salt)] == hashed["hashes"]


def test_the_capture_is_of_use() -> None:
    assert len(CAPTURED["cases"]) == 3
    assert len(CAPTURED["hashed"]["hashes"]) == 3
