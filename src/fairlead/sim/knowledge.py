"""KV events that come late: what the scheduler knows of every server's cache is what the server told `lag` ago.

The blocks themselves come from the simulated engines' hooks, as the live server's come over ZMQ; hashes, recipes, trust
and gaps of the live index (`fairlead.fleet.exact`) are not simulated: here every event arrives, late, and is right.

Rules
* What the engine stores and forgets is known `lag` later. A busy engine is looked at when something comes of a request
  and at every scrape, so blocks that answers fill may be another scrape interval late.
* A prompt that was sent counts as held from the decision until its first token's events have come: with them late, a
  burst would otherwise be computed once per server.
* A server that left is forgotten; it tells anew what it stores.
"""

from collections.abc import Callable, Sequence

import numpy as np

from fairlead.fleet.columns import FloatColumn
from fairlead.fleet.exact import ExactKnowledge
from fairlead.model.request import Request, Usage
from fairlead.sim.kernel import Kernel

#: Seconds after the first token, and the lag, until a sent prompt's own events are known.
SETTLING = 0.05
#: (hashes of a request's full prompt blocks, tokens per block, tokens of the prompt)
Blocks = tuple[Sequence[int], int, int]


class LateEvents(ExactKnowledge):
    """Stands in for the exact knowledge of a `Fleet`. Slots are the fleet's."""

    def __init__(self, kernel: Kernel, lag_s: float, blocks_of: Callable[[Request], Blocks]) -> None:
        super().__init__()
        self._kernel = kernel
        self._lag = lag_s
        self._blocks_of = blocks_of
        #: Copies of each block, by slot.
        self._known: list[dict[int, int]] = []
        self._asked: dict[int, Blocks] = {}
        #: Blocks of prompts on their way, by slot and request.
        self._sent: list[dict[int, frozenset[int]]] = []

    def add_slot(self, slot: int) -> None:
        while slot >= len(self._known):
            self._known.append({})
            self._sent.append({})

    def drop_slot(self, slot: int) -> None:
        self._known[slot] = {}
        self._sent[slot] = {}

    def hooks(self, slot: Callable[[], int | None]) -> "Hooks":
        """For the engine of a server. `slot()` is where it stands now, `None` = nowhere."""
        return Hooks(self, slot)

    def later(self, slot: int | None, hashes: Sequence[int], change: int) -> None:
        """An event leaves the server now."""
        if slot is not None:
            known = self._known[slot]
            self._kernel.call_at(self._kernel.now + self._lag, self._change, slot, known, tuple(hashes), change)

    def _change(self, slot: int, known: dict[int, int], hashes: Sequence[int], change: int) -> None:
        if self._known[slot] is not known:  # of a server that left since
            return
        for digest in hashes:
            count = known.get(digest, 0) + change
            if count > 0:
                known[digest] = count
            else:
                known.pop(digest, None)

    def refine(
        self, request: Request, learned: FloatColumn | None, slots: int, recompute_ms: FloatColumn
    ) -> FloatColumn | None:
        hashes, size, tokens = self._blocks(request)
        held = np.zeros(slots)
        for slot in range(min(slots, len(self._known))):
            held[slot] = self._longest(slot, hashes) * size
        return np.minimum(held / max(tokens, 1), 1.0) if held.any() else None

    def _blocks(self, request: Request) -> Blocks:
        found = self._asked.get(request.id)
        if found is None:
            found = self._asked[request.id] = self._blocks_of(request)
        return found

    def _longest(self, slot: int, hashes: Sequence[int]) -> int:
        known, sent = self._known[slot], self._sent[slot]
        for count, digest in enumerate(hashes):
            if digest not in known and not any(digest in blocks for blocks in sent.values()):
                return count
        return len(hashes)

    def sent(self, request: Request, slot: int, prefill_slot: int, now: float) -> None:
        computing = prefill_slot if prefill_slot >= 0 else slot
        self._sent[computing][request.id] = frozenset(self._blocks(request)[0])

    def first_token(self, request_id: int, now: float) -> None:
        self._kernel.call_at(now + self._lag + SETTLING, self._settled, request_id)

    def _settled(self, request_id: int) -> None:
        self._asked.pop(request_id, None)
        for sent in self._sent:
            sent.pop(request_id, None)

    def ended(self, request_id: int, usage: Usage, served: bool, now: float) -> None:
        self.first_token(request_id, now)

    def validate(self) -> None:
        assert all(count > 0 for known in self._known for count in known.values())


class Hooks:
    """`fairlead.engine.blocks.BlockHooks` of one server."""

    def __init__(self, knowledge: LateEvents, slot: Callable[[], int | None]) -> None:
        self._knowledge = knowledge
        self._slot = slot

    def salted(self, salt: str) -> None:
        """Simulated prompts have none."""

    def stored(self, hashes: Sequence[int], parent: int, tokens: Callable[[], bytes], lora: str) -> None:
        self._knowledge.later(self._slot(), hashes, 1)

    def removed(self, digest: int) -> None:
        self._knowledge.later(self._slot(), (digest,), -1)

    def cleared(self) -> None:
        """The simulator never clears a cache; a server that restarts is forgotten with its slot."""
