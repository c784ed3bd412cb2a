"""Comparing what exact knowledge predicted with what engines report, and what follows from it.

An engine reports `cached_tokens` with an answer's usage. Against the prediction at the decision that shows, endpoint by
endpoint, whether its events can be relied on (`fleet.trust`) and, if not, why (`fleet.diagnosis`).
"""

from collections import OrderedDict
from collections.abc import Callable

from msgspec import Struct, field

from fairlead.fleet.diagnosis import UNKNOWN, Case, Finding, diagnose
from fairlead.fleet.kv.index import KvIndex
from fairlead.fleet.recipe import Recipe, TokenIds
from fairlead.fleet.trust import Trust, agrees
from fairlead.model.request import Usage

#: Answers that are awaited, and what is kept of each prompt for a diagnosis, in tokens.
MOST_AWAITED = 20_000
_KEPT = 4096


_ELSEWHERE = Finding(UNKNOWN, "what was stored is known to the indexer only")


class Verdict(Struct, frozen=True):
    """An endpoint's predictions are trusted from now on, or not any more; see `Trust`."""

    slot: int
    trusted: bool
    level: float
    finding: Finding | None
    predicted: int
    reported: int


class Judged(Struct):
    """Of one endpoint since it came. Answers, unless it says otherwise."""

    equal: int = 0
    #: Within the tolerance, and beyond.
    close: int = 0
    off: int = 0
    #: Says nothing: nothing cached and nothing predicted, the prompt was just being computed for another request, or
    #: events were known to be missing.
    idle: int = 0
    predicted_tokens: int = 0
    reported_tokens: int = 0
    causes: dict[str, int] = field(default_factory=dict)


class _State(Struct):
    #: Tells endpoints apart that had the same slot.
    tenure: int
    trust: Trust = field(default_factory=Trust)
    judged: Judged = field(default_factory=Judged)
    finding: Finding | None = None
    lives: int = 0


class _Awaited(Struct, gc=False):
    slot: int
    tenure: int
    predicted: int
    certain: bool
    tokens: bytes
    count: int
    lora: str
    salt: str


class SelfCheck:
    """`report` hears of verdicts that change."""

    def __init__(self, index: KvIndex, recipe: Recipe) -> None:
        self.report: Callable[[Verdict], None] = lambda verdict: None
        #: Called when an answer has reported its cached tokens.
        self.heard: Callable[[], None] = lambda: None
        #: What is known to be wrong with how prompts are read; named where stored blocks do not show the cause.
        self.suspect: Finding | None = None
        self._index = index
        self._recipe = recipe
        self._states: dict[int, _State] = {}
        self._tenures = 0
        self._awaited: OrderedDict[int, _Awaited] = OrderedDict()

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
        """Why its predictions were wrong lately; `None` = they were not."""
        return self._states[slot].finding

    def lived(self, slot: int, lives: int) -> None:
        """How often its engine was found to be another one. A new one must prove itself."""
        state = self._states[slot]
        if state.lives != lives:
            state.lives = lives
            state.trust.reset()
            state.finding = None

    def expect(self, request_id: int, slot: int, tokens: TokenIds, lora: str, predicted: int, certain: bool) -> None:
        """A request goes there. `predicted`: cached tokens; not `certain` if they rest on what was just sent there."""
        state = self._states.get(slot)
        if state is None:
            return
        # A settled endpoint is hardly ever diagnosed; its first disagreement unsettles it.
        kept = b"" if state.trust.settled else bytes(tokens.ids[: 4 * _KEPT])
        self._awaited[request_id] = _Awaited(
            slot, state.tenure, predicted, certain, kept, tokens.count, lora, tokens.salt
        )
        if len(self._awaited) > MOST_AWAITED:
            self._awaited.popitem(last=False)

    def ended(self, request_id: int, usage: Usage) -> int:
        """An answer is over. Returns the slot that was judged; -1 = none."""
        awaited = self._awaited.pop(request_id, None)
        if awaited is None or usage.cached_tokens < 0:
            return -1
        self.heard()
        state = self._states.get(awaited.slot)
        caches = self._index.caches_of(awaited.slot)
        if state is None or state.tenure != awaited.tenure or not any(cache.heard for cache in caches):
            return -1
        missing = not all(cache.linked and not cache.behind for cache in caches)
        self._judge(awaited, state, usage, max(cache.block_size for cache in caches), missing)
        return awaited.slot

    def _judge(self, awaited: _Awaited, state: _State, usage: Usage, block_size: int, missing: bool) -> None:
        """`missing`: events are on their way or lost; that too little was predicted is no wonder then."""
        predicted, reported, judged = awaited.predicted, usage.cached_tokens, state.judged
        judged.predicted_tokens += predicted
        judged.reported_tokens += reported
        if not awaited.certain or not (predicted or reported) or (missing and predicted < reported):
            judged.idle += 1
            return
        right = agrees(predicted, reported, awaited.count, max(block_size, 1))
        if not right:
            judged.off += 1
            self._diagnose(awaited, state, usage)
        elif predicted == reported:
            judged.equal += 1
        else:
            judged.close += 1
        if state.trust.judge(right):
            if not state.trust.distrusted:
                state.finding = None
            self.report(
                Verdict(awaited.slot, not state.trust.distrusted, state.trust.level, state.finding, predicted, reported)
            )

    def _diagnose(self, awaited: _Awaited, state: _State, usage: Usage) -> None:
        heads = [head for cache in self._index.caches_of(awaited.slot) for head in cache.stores()]
        case = Case(
            awaited.tokens, awaited.count, awaited.lora, awaited.salt, awaited.predicted, usage.cached_tokens,
            usage.prompt_tokens,
        )  # fmt: skip
        found = diagnose(self._recipe, case, heads)
        if found.cause == UNKNOWN or not heads:
            found = self.suspect or (found if self._index.tells_stores else _ELSEWHERE)
        state.finding = found
        state.judged.causes[found.cause] = state.judged.causes.get(found.cause, 0) + 1
