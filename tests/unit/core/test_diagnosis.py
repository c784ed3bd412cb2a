"""Causes of wrong predictions, each brought about on purpose."""

import numpy as np
import pytest
from msgspec.structs import replace

from fairlead.core.kv.cache import Head
from fairlead.core.kv.hashing import EngineHasher
from fairlead.core.kv.recipe import Recipe
from fairlead.core.trust import (
    ALGORITHM,
    BLOCK_SIZE,
    EVICTED,
    FULL,
    LORA,
    MISSING,
    SALT,
    SEED,
    TEMPLATE,
    TOKENISER,
    UNKNOWN,
    Case,
    diagnose,
)

BLOCK = 16
IDS = [(7919 * at) % 100_000 for at in range(400)]


def packed(ids: list[int]) -> bytes:
    return np.array(ids, "<u4").tobytes()


def case(ids: list[int] = IDS, *, predicted: int = 0, reported: int = 384, counted: int = 400, **more: str) -> Case:
    names = {"lora": "", "salt": ""} | more
    return Case(packed(ids), len(ids), names["lora"], names["salt"], predicted, reported, counted)


def head(
    ids: list[int] = IDS, hashes: tuple[int, ...] = (1, 2), first: bool = True, lora: str = "", salt: str = ""
) -> Head:
    extras = ((salt,), ()) if salt else ()
    return Head(first, hashes, packed(ids[:256]), BLOCK, lora, extras)


def cause(recipe: Recipe, wrong: Case, *heads: Head) -> str:
    return diagnose(recipe, wrong, heads).cause


def test_nothing_was_told() -> None:
    assert cause(Recipe(), case()) == MISSING


def test_block_size() -> None:
    found = diagnose(Recipe(block_size=32), case(), [head()])
    assert (found.cause, "32" in found.detail, "16" in found.detail) == (BLOCK_SIZE, True, True)


@pytest.mark.parametrize(
    ("algorithm", "seed", "expected"),
    [("sha256", "42", SEED), ("sha256", None, SEED), ("xxhash_cbor", "1", ALGORITHM), ("sha256", "unheard-of", SEED)],
)
def test_hash_seed_and_algorithm(algorithm: str, seed: str | None, expected: str) -> None:
    engine = EngineHasher(algorithm, seed)
    told = head(hashes=tuple(engine.hashes(IDS[:32], BLOCK)))
    found = diagnose(Recipe("engine", "sha256", "7"), case(), [told])
    assert found.cause == expected
    if seed != "unheard-of":
        assert (f"={seed}" if seed else "no PYTHONHASHSEED") in found.detail


def test_with_the_right_seed_the_cause_is_another() -> None:
    engine = EngineHasher("sha256", "7")
    told = head(hashes=tuple(engine.hashes(IDS[:32], BLOCK)))
    assert cause(Recipe("engine", "sha256", "7"), case(), told) == MISSING


def test_adapter() -> None:
    found = diagnose(Recipe(), case(), [head(lora="poet")])
    assert (found.cause, "'poet'" in found.detail) == (LORA, True)


def test_extra_keys() -> None:
    assert cause(Recipe(), case(), head(salt="pepper")) == SALT
    assert cause(Recipe(), case(salt="pepper"), head()) == SALT
    assert cause(Recipe(), case(salt="pepper"), head(salt="pepper")) == MISSING


def test_chat_template() -> None:
    other = [9_000_001, 9_000_002, 9_000_003, *IDS]
    assert cause(Recipe(), case(counted=403), head(other)) == TEMPLATE
    # Also where only what was new of the prompt was told.
    assert cause(Recipe(), case(counted=403), head(other[100:], first=False)) == TEMPLATE


def test_tokeniser() -> None:
    other = [1_000_000 + (31 * at) % 777_777 for at in range(330)]
    assert cause(Recipe(), case(counted=330), head(other)) == TOKENISER
    assert cause(Recipe(), case(reported=32), head(other)) == TOKENISER


def test_prompts_of_others_prove_nothing() -> None:
    other = [1_000_000 + at for at in range(300)]
    assert cause(Recipe(), case(), head(other)) == UNKNOWN


def test_what_was_evicted_or_not_told() -> None:
    assert cause(Recipe(), case(predicted=384, reported=0), head()) == EVICTED
    assert cause(Recipe(), case(), head()) == MISSING
    # The newest store that fits is taken, not the newest of all.
    assert cause(Recipe(), case(predicted=384, reported=0), head(), head([5] * 256)) == EVICTED


def test_the_rest_of_a_prompt_that_is_in_its_place_shows_no_other_template() -> None:
    rest = head(IDS[160:], first=False)
    assert cause(Recipe(), case(predicted=384, reported=160), rest) == EVICTED
    assert cause(Recipe(), case(), rest) == cause(Recipe(), case(salt="pepper"), rest) == MISSING
    assert cause(Recipe(), case(), head(IDS[160:], first=False, lora="poet")) == LORA
    # Nor does too much predicted.
    assert cause(Recipe(), case(predicted=384, reported=160), head(IDS[163:], first=False)) == EVICTED


def test_a_rest_is_in_its_place_although_its_text_comes_before_elsewhere_too() -> None:
    text = IDS[:160]
    ids = [1, 2, 3, 4, *text, *range(200_000, 200_012), *text]
    assert ids.index(text[0], 5) % BLOCK == 0
    assert cause(Recipe(), case(ids), head(text, first=False)) == MISSING
    same = [7] * 400
    assert cause(Recipe(), case(same), head(same[160:320], first=False)) == MISSING


def test_what_a_full_index_dropped() -> None:
    other = [1_000_000 + at for at in range(300)]
    for wrong in (case(), case(reported=32)):
        full = replace(wrong, full=True)
        assert cause(Recipe(), full, head()) == cause(Recipe(), full, head(other)) == FULL
        # It does not hide what else is wrong.
        assert cause(Recipe(), replace(full, counted=403), head(other)) == TOKENISER
        assert cause(Recipe(), full, head(lora="poet")) == LORA
    assert cause(Recipe(), replace(case(predicted=384, reported=0), full=True), head()) == EVICTED


def test_nothing_is_kept_of_the_prompt() -> None:
    assert cause(Recipe(), Case(b"", 400, "", "", 0, 384, 400), head()) == UNKNOWN
