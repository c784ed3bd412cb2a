"""Why exact predictions fail: the prompt as we read it, against what the engine told of what it stored lately.

Theory. An endpoint whose caches hit while nothing was predicted reads prompts otherwise than we do, and its events show
how. The tokens it stored for a prompt are either ours (then something else in the key differs: adapter, salt, hash
algorithm or seed, block size), or ours in another place (its chat template puts something else before or between), or
strange (another tokeniser). Single answers may deceive, since the store in question may not be among the last ones;
whoever counts causes sees which one dominates.
"""

from collections.abc import Sequence
from itertools import product

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from fairlead.fleet.kv.cache import Head
from fairlead.fleet.kv.engine_hash import ALGORITHMS, EngineHasher
from fairlead.fleet.recipe import Recipe

BLOCK_SIZE, SEED, ALGORITHM = "block-size", "hash-seed", "hash-algorithm"
LORA, SALT = "lora", "extra-keys"
TEMPLATE, TOKENISER = "chat-template", "tokeniser"
EVICTED, MISSING, UNKNOWN = "evicted", "events-missing", "unknown"
CAUSES = (BLOCK_SIZE, SEED, ALGORITHM, LORA, SALT, TEMPLATE, TOKENISER, EVICTED, MISSING, UNKNOWN)

#: Seeds that people set, tried in turn.
_SEEDS = (None, "0", "1", "42", "123", "1234", "12345")
#: Tokens in a row that hardly occur twice by accident, and the share of them that makes two texts one.
_GRAM = 4
_ALIKE = 0.5

Ids = NDArray[np.uint64]


class Finding(Struct, frozen=True):
    """`cause` is one of `CAUSES`; `detail` is for people."""

    cause: str
    detail: str = ""


class Case(Struct, frozen=True):
    """One wrong prediction. All numbers in tokens."""

    #: The prompt's token ids as we read it, little-endian 32-bit integers; perhaps only its beginning, or nothing.
    tokens: bytes
    count: int
    lora: str
    salt: str
    predicted: int
    reported: int
    #: Of the prompt, as the engine counted; -1 = not told.
    counted: int


def diagnose(recipe: Recipe, case: Case, heads: Sequence[Head]) -> Finding:
    """`heads`: what the endpoint stored lately, of beginnings and of rests the newest last."""
    if not heads:
        return Finding(MISSING, "its answers hit a cache of which no event told")
    newest = heads[-1]
    if recipe.block_size and recipe.block_size != newest.block_size:
        return Finding(BLOCK_SIZE, f"configured are {recipe.block_size} tokens, its events say {newest.block_size}")
    if recipe.hasher is not None:
        finding = _wrong_hashes(recipe, recipe.hasher, heads)
        if finding is not None:
            return finding
    return _by_tokens(case, heads)


def _wrong_hashes(recipe: Recipe, hasher: EngineHasher, heads: Sequence[Head]) -> Finding | None:
    """Whether the engine hashes otherwise than configured; `None` = it does not, or nothing tells."""
    plain = [head for head in heads if head.first and head.tokens and not head.lora and not any(head.extras)]
    if not plain or _makes(hasher, plain[-1]):
        return None
    for algorithm, seed in product(ALGORITHMS, (recipe.seed, *_SEEDS)):
        if seed is None and algorithm.startswith("xxhash"):
            continue
        if _makes(EngineHasher(algorithm, seed), plain[-1]):
            seeded = "no PYTHONHASHSEED" if seed is None else f"PYTHONHASHSEED={seed}"
            cause = SEED if algorithm == recipe.algorithm else ALGORITHM
            return Finding(cause, f"its hashes are those of {algorithm} with {seeded}")
    return Finding(SEED, f"its hashes are not those of {recipe.algorithm} with the configured seed, nor of a usual one")


def _makes(hasher: EngineHasher, head: Head) -> bool:
    """Whether this is how the engine came to its first hash."""
    ids = np.frombuffer(head.tokens, "<u4")[: head.block_size].tolist()
    return hasher.hashes(ids, head.block_size)[:1] == list(head.hashes[:1])


def _by_tokens(case: Case, heads: Sequence[Head]) -> Finding:
    ours = _grams(case.tokens)
    best, alike = heads[-1], 0.0
    for head in reversed(heads):
        theirs = _grams(head.tokens)
        share = float(np.isin(theirs, ours).mean()) if len(theirs) and len(ours) else 0.0
        if share > alike:
            best, alike = head, share
    if alike < _ALIKE:
        return _strange(case)
    width = 4 * best.block_size
    if best.first and best.tokens[:width] == case.tokens[:width]:
        return _same_tokens(case, best)
    return Finding(TEMPLATE, f"its prompts have our tokens, but {_divergence(case, heads)}")


def _divergence(case: Case, heads: Sequence[Head]) -> str:
    first = [head for head in heads if head.first]
    if not first:
        return "in other places"
    ours = np.frombuffer(case.tokens, "<u4")[:4].tolist()
    theirs = np.frombuffer(first[-1].tokens, "<u4")[:4].tolist()
    return f"begin with {theirs}, ours with {ours}"


def _same_tokens(case: Case, head: Head) -> Finding:
    if head.lora != case.lora:
        return Finding(LORA, f"it stores this prompt for the adapter {head.lora!r}, we look for {case.lora!r}")
    extras = head.extras[0] if head.extras else ()
    if extras != ((case.salt,) if case.salt else ()):
        return Finding(SALT, "it mixes other keys (salt, media) into the first block than we do")
    if case.predicted > case.reported:
        return Finding(EVICTED, "what was held at the decision was gone when it was needed, or is not told as removed")
    return Finding(MISSING, "its blocks have our tokens, but more were cached than its events told")


def _strange(case: Case) -> Finding:
    if case.counted >= 0 and case.counted != case.count:
        return Finding(
            TOKENISER, f"it counts {case.counted} tokens where we count {case.count}, and stores none of ours"
        )
    if case.predicted > case.reported:
        return Finding(EVICTED, "what was held at the decision was gone when it was needed, or is not told as removed")
    if case.reported < case.count // 2 and case.tokens:
        return Finding(TOKENISER, "none of the tokens that it stored lately are ours")
    return Finding(UNKNOWN, "the blocks in question are not among those that it stored lately")


def _grams(tokens: bytes) -> Ids:
    """A number for each `_GRAM` tokens in a row."""
    ids = np.frombuffer(tokens, "<u4").astype(np.uint64)
    size = max(len(ids) - _GRAM + 1, 0)
    mixed = np.zeros(size, np.uint64)
    for at in range(_GRAM):
        mixed = mixed * np.uint64(0x9E3779B97F4A7C15) + ids[at : at + size]
    return mixed
