"""Whether an endpoint's KV events can be trusted, and why not: the cached tokens that they predict against those that
the engine reports.

Rules
* Only informative pairs count: tokens were predicted or reported, and the prediction did not depend on a prompt that
  was still on its way to the endpoint, nor on the blocks of an unfinished replay, whose removals may still follow.
* Of several ranks the engine chooses one, so a report is compared with the rank whose blocks come closest. If that is
  a rank without any, the pair is not informative.
* Some error is normal, because blocks are stored and dropped between the decision and the prefill. A pair agrees if it
  differs by at most one block or a tenth of the prompt, whichever is more.
* `PROOFS` agreements in a row make an endpoint proven. It is distrusted once more than half of the last `WINDOW` pairs,
  and at least three, disagree. It is trusted again after `RECOVERY` agreements in a row.
* Nothing predicted and much reported is typical of keys that can never match. An engine under memory pressure causes
  errors in both directions, and only at times; a wrong recipe causes them all the time.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from fairlead.core.kv.cache import Head
from fairlead.core.kv.hashing import ALGORITHMS, EngineHasher
from fairlead.core.kv.index import KvIndex
from fairlead.core.kv.recipe import Recipe, TokenIds
from fairlead.core.request import Usage

PROOFS = 3
WINDOW = 16
RECOVERY = 4
_LEAST = 3
_TOLERANCE = 0.1


class Trust:
    __slots__ = ("_row", "_window", "distrusted", "proven")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything, because there is a new engine."""
        self._window: deque[bool] = deque(maxlen=WINDOW)
        #: Agreements since the last disagreement.
        self._row = 0
        self.proven = False
        self.distrusted = False

    @property
    def level(self) -> float | None:
        """The share of the last pairs that agreed; `None` = there are none."""
        return sum(self._window) / len(self._window) if self._window else None

    @property
    def settled(self) -> bool:
        """Whether it is proven and the last `WINDOW` pairs all agreed: then checking a sample of answers is enough."""
        return self.proven and self._row >= WINDOW

    def judge(self, agrees: bool) -> bool:
        """Take the result of one pair. Return whether the verdict has changed."""
        before = (self.proven, self.distrusted)
        self._window.append(agrees)
        self._row = self._row + 1 if agrees else 0
        if self.distrusted:
            if self._row >= RECOVERY:
                self.distrusted, self.proven = False, True
                self._window.clear()
                self._window.extend([True] * RECOVERY)
        elif self._row >= PROOFS:
            self.proven = True
        if not self.distrusted:
            wrong = len(self._window) - sum(self._window)
            if wrong >= _LEAST and 2 * wrong > len(self._window):
                self.distrusted, self.proven = True, False
        return (self.proven, self.distrusted) != before


def agrees(predicted: int, reported: int, prompt: int, block_size: int) -> bool:
    """Whether the pair agrees within the tolerance of the module's rules. All in tokens."""
    return abs(predicted - reported) <= max(block_size, _TOLERANCE * prompt)


# Why exact predictions fail: our token ids of the prompt against the blocks that the engine reported as stored.
#
# Theory. If an endpoint has cache hits that were not predicted, it reads prompts in another way than we do, and its
# events show how. If it stored our tokens in the same places, another part of the key differs: adapter, salt, hash
# algorithm or seed, block size. If it stored our tokens in other places, its chat template adds something else before
# or between them. If it stored different tokens, it has another tokeniser. A single diagnosis may be wrong, because the
# store in question may not be among the last ones; counting the causes shows which one dominates.

BLOCK_SIZE, SEED, ALGORITHM = "block-size", "hash-seed", "hash-algorithm"
LORA, SALT = "lora", "extra-keys"
TEMPLATE, TOKENISER = "chat-template", "tokeniser"
EVICTED, FULL, MISSING, UNKNOWN = "evicted", "index-full", "events-missing", "unknown"
CAUSES = (BLOCK_SIZE, SEED, ALGORITHM, LORA, SALT, TEMPLATE, TOKENISER, EVICTED, FULL, MISSING, UNKNOWN)

#: Commonly used seeds, tried in turn.
_SEEDS = (None, "0", "1", "42", "123", "1234", "12345")
#: Length of token sequences that rarely repeat by chance, and the share of common ones that makes two texts alike.
_GRAM = 4
_ALIKE = 0.5

Ids = NDArray[np.uint64]


class Finding(Struct, frozen=True):
    """The cause of wrong predictions. `cause` is one of `CAUSES`; `detail` explains it in words."""

    cause: str
    detail: str = ""


_EVICTED = Finding(EVICTED, "blocks cached at the decision were gone when needed, or removed without an event")
_FULL = Finding(FULL, "the index dropped blocks that it still has, to stay within kvEvents.maxBlocks")


class Case(Struct, frozen=True):
    """One wrong prediction. All numbers are in tokens."""

    #: Our token ids of the prompt, little-endian 32-bit integers; possibly only the beginning, or none.
    tokens: bytes
    count: int
    lora: str
    salt: str
    predicted: int
    reported: int
    #: The engine's count of the prompt's tokens; -1 = not reported.
    counted: int
    #: Whether the index dropped blocks that the engine still has.
    full: bool = False


def diagnose(recipe: Recipe, case: Case, heads: Sequence[Head]) -> Finding:
    """Return the likely cause. `heads`: what the endpoint stored recently, rests and beginnings of prompts, each with
    the newest last."""
    if not heads:
        if case.full and case.predicted < case.reported:
            return _FULL
        return Finding(MISSING, "its answers report cached tokens, but no event reported stored blocks")
    newest = heads[-1]
    if recipe.block_size and recipe.block_size != newest.block_size:
        return Finding(BLOCK_SIZE, f"{recipe.block_size} tokens are configured, its events report {newest.block_size}")
    return wrong_hashes(recipe, heads) or _by_tokens(case, heads)


def wrong_hashes(recipe: Recipe, heads: Sequence[Head]) -> Finding | None:
    """Return the finding if the engine's hashes differ from the configured ones; `None` = they agree, cannot be
    compared, or are not used."""
    plain = [head for head in heads if head.first and head.tokens and not head.lora and not any(head.extras)]
    if recipe.hasher is None or not plain or _makes(recipe.hasher, plain[-1]):
        return None
    for algorithm, seed in product(ALGORITHMS, (recipe.seed, *_SEEDS)):
        if seed is None and algorithm.startswith("xxhash"):
            continue
        if _makes(EngineHasher(algorithm, seed), plain[-1]):
            seeded = "no PYTHONHASHSEED" if seed is None else f"PYTHONHASHSEED={seed}"
            cause = SEED if algorithm == recipe.algorithm else ALGORITHM
            return Finding(cause, f"its hashes are those of {algorithm} with {seeded}")
    return Finding(SEED, f"its hashes do not match {recipe.algorithm} with the configured seed or a common one")


def _makes(hasher: EngineHasher, head: Head) -> bool:
    """Whether this hasher gives the engine's first hash."""
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
    places = (0,) if best.first else range(width, len(case.tokens), width)
    if any(case.tokens.startswith(best.tokens[:width], place) for place in places):
        return _same_tokens(case, best)
    if case.predicted > case.reported:  # keys of another template's prompts never match
        return _EVICTED
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
    if head.first and extras != ((case.salt,) if case.salt else ()):
        return Finding(SALT, "its extra keys (salt, media) of the first block differ from ours")
    if case.predicted > case.reported:
        return _EVICTED
    if case.full:
        return _FULL
    return Finding(MISSING, "its blocks have our tokens, but more were cached than its events reported")


def _strange(case: Case) -> Finding:
    if case.counted >= 0 and case.counted != case.count:
        return Finding(
            TOKENISER, f"it counts {case.counted} tokens where we count {case.count}, and stores none of ours"
        )
    if case.predicted > case.reported:
        return _EVICTED
    if case.full:
        return _FULL
    if case.reported < case.count // 2 and case.tokens:
        return Finding(TOKENISER, "none of the tokens that it stored recently are ours")
    return Finding(UNKNOWN, "the blocks concerned are not among those that it stored recently")


def _grams(tokens: bytes) -> Ids:
    """Return a number for each sequence of `_GRAM` tokens."""
    ids = np.frombuffer(tokens, "<u4").astype(np.uint64)
    size = max(len(ids) - _GRAM + 1, 0)
    mixed = np.zeros(size, np.uint64)
    for start in range(_GRAM):
        mixed = mixed * np.uint64(0x9E3779B97F4A7C15) + ids[start : start + size]
    return mixed


# The comparison of predictions from the exact index with the engines' reports, and its consequences.
#
# An engine reports `cached_tokens` in the usage of an answer. Compared with the prediction of the decision, it shows
# for each endpoint whether its events can be relied on and, if not, why.

#: Awaited answers whose prompts are kept for a diagnosis, and the tokens kept of each.
MOST_AWAITED = 20_000
_KEPT = 4096


_ELSEWHERE = Finding(UNKNOWN, "only the indexer knows which blocks were stored")


class Verdict(Struct, frozen=True):
    """An endpoint's predictions are trusted from now on, or no longer; see `Trust`."""

    slot: int
    trusted: bool
    level: float | None
    finding: Finding | None
    predicted: int
    reported: int


class Judged(Struct):
    """Counts for one endpoint since it joined. Unless noted, they count answers."""

    equal: int = 0
    #: Within the tolerance, and beyond it.
    close: int = 0
    off: int = 0
    #: Not informative: nothing was cached and nothing predicted, the prompt was just being computed for another
    #: request, or events were known to be missing or on their way.
    idle: int = 0
    predicted_tokens: int = 0
    reported_tokens: int = 0
    causes: dict[str, int] = field(default_factory=dict)


class _State(Struct):
    #: Distinguishes successive endpoints in the same slot.
    tenure: int
    trust: Trust = field(default_factory=Trust)
    judged: Judged = field(default_factory=Judged)
    finding: Finding | None = None
    lives: int = 0


class Awaited(Struct, eq=False, gc=False):
    """The prediction that an answer is compared with. `ranks`: see `SelfCheck.expect`."""

    slot: int
    tenure: int
    predicted: int
    certain: bool
    tokens: bytes
    count: int
    lora: str
    salt: str
    ranks: tuple[int, ...]


class SelfCheck:
    """Compares answers with predictions, endpoint by endpoint."""

    def __init__(self, index: KvIndex, recipe: Recipe) -> None:
        self._report: Callable[[Verdict], None] = lambda verdict: None
        self._on_cached: Callable[[], None] = lambda: None
        self._suspicion: Callable[[int], Finding | None] = lambda slot: None
        self._index = index
        self._recipe = recipe
        self._states: dict[int, _State] = {}
        self._tenures = 0
        #: Awaited answers whose prompts are kept.
        self._kept = 0

    def tell(self, report: Callable[[Verdict], None], on_cached: Callable[[], None]) -> None:
        """Set callbacks: `report` gets changed verdicts, `on_cached` is called if an answer reported cached tokens."""
        self._report, self._on_cached = report, on_cached

    def suspect(self, suspicion: Callable[[int], Finding | None]) -> None:
        """Set a callback that returns a known problem with the reading of an endpoint's prompts. It is reported if
        stored blocks do not show the cause."""
        self._suspicion = suspicion

    def add_slot(self, slot: int) -> None:
        self._tenures += 1
        self._states[slot] = _State(self._tenures)

    def drop_slot(self, slot: int) -> None:
        del self._states[slot]

    def trust(self, slot: int) -> Trust:
        return self._states[slot].trust

    def judged(self, slot: int) -> Judged:
        return self._states[slot].judged

    def finding(self, slot: int) -> Finding | None:
        """Return why its recent predictions were wrong; `None` = they were not."""
        return self._states[slot].finding

    def lived(self, slot: int, lives: int) -> None:
        """Reset the trust if its engine is a new one. `lives`: how often a new engine was found there."""
        state = self._states[slot]
        if state.lives != lives:
            state.lives = lives
            state.trust.reset()
            state.finding = None

    def expect(
        self, slot: int, tokens: TokenIds, lora: str, predicted: int, certain: bool, ranks: tuple[int, ...] = ()
    ) -> Awaited | None:
        """Note the prediction for a request that is sent there. `predicted`: cached tokens; not `certain` if they
        include prompts that were just sent there. `ranks`: the cached tokens of each rank, if there are several.
        Return what `ended` needs; `None` = there is no endpoint."""
        state = self._states.get(slot)
        if state is None:
            return None
        certain = certain and not any(cache.behind for cache in self._index.caches_of(slot))
        # A settled endpoint hardly ever needs a diagnosis; its first disagreement ends that state.
        kept = b"" if state.trust.settled or self._kept >= MOST_AWAITED else bytes(tokens.ids[: 4 * _KEPT])
        self._kept += bool(kept)
        return Awaited(slot, state.tenure, predicted, certain, kept, tokens.count, lora, tokens.salt, ranks)

    def ended(self, awaited: Awaited, usage: Usage) -> int:
        """Judge the prediction for an answer that ended. Return the slot that was judged; -1 = none."""
        self._kept -= bool(awaited.tokens)
        if usage.cached_tokens < 0:
            return -1
        self._on_cached()
        state = self._states.get(awaited.slot)
        caches = self._index.caches_of(awaited.slot)
        if state is None or state.tenure != awaited.tenure or not any(cache.heard for cache in caches):
            return -1
        missing = not all(cache.linked and not cache.behind and not cache.holds for cache in caches)
        self._judge(awaited, state, usage, max(cache.block_size for cache in caches), missing)
        return awaited.slot

    def _judge(self, awaited: Awaited, state: _State, usage: Usage, block_size: int, missing: bool) -> None:
        """Judge one prediction. `missing`: events are on their way or lost, so predicting too little is expected."""
        reported, judged = usage.cached_tokens, state.judged
        predicted = min(awaited.ranks, key=lambda cached: abs(cached - reported), default=awaited.predicted)
        judged.predicted_tokens += awaited.predicted
        judged.reported_tokens += reported
        if not awaited.certain or not (predicted or reported) or (missing and predicted < reported):
            judged.idle += 1
            return
        right = agrees(predicted, reported, awaited.count, max(block_size, 1))
        if not right:
            judged.off += 1
            self._diagnose(awaited, state, usage, predicted)
        elif predicted == reported:
            judged.equal += 1
        else:
            judged.close += 1
        if state.trust.judge(right):
            if not state.trust.distrusted:
                state.finding = None
            self._report(
                Verdict(awaited.slot, not state.trust.distrusted, state.trust.level, state.finding, predicted, reported)
            )

    def _diagnose(self, awaited: Awaited, state: _State, usage: Usage, predicted: int) -> None:
        caches = self._index.caches_of(awaited.slot)
        heads = [head for cache in caches for head in cache.stores()]
        case = Case(
            awaited.tokens, awaited.count, awaited.lora, awaited.salt, predicted, usage.cached_tokens,
            usage.prompt_tokens, any(cache.dropped for cache in caches),
        )  # fmt: skip
        finding = diagnose(self._recipe, case, heads)
        if finding.cause == UNKNOWN or not heads:
            known = self._index.tells_stores or finding.cause == FULL
            finding = self._suspicion(awaited.slot) or (finding if known else _ELSEWHERE)
        state.finding = finding
        state.judged.causes[finding.cause] = state.judged.causes.get(finding.cause, 0) + 1
