"""One simulated model server: an engine, and a timer for the next moment at which anything can come of it. What its KV
events tell, and when.
"""

from collections.abc import Callable, Sequence
from random import Random

import numpy as np
from msgspec import Struct

from fairlead.core.columns import FloatColumn
from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.exact import ExactKnowledge
from fairlead.core.request import Request, Usage
from fairlead.lab.engine.blocks import BlockHooks
from fairlead.lab.engine.engine import Engine, StepResult
from fairlead.lab.engine.request import EngineRequest
from fairlead.lab.simulator.world import Kernel, Replica, Timer

#: Told (result of the steps) whenever steps ended in which something came of a request.
Watcher = Callable[[StepResult], None]


class Server:
    """`up` is whether it answers at all. Times are the kernel's seconds."""

    def __init__(
        self,
        index: int,
        replica: Replica,
        kernel: Kernel,
        watcher: Watcher,
        hooks: BlockHooks | None = None,
        seed: int = 0,
    ) -> None:
        self.endpoint = Endpoint(f"sim/server-{index}", f"10.0.{index // 250}.{index % 250 + 1}:8000", replica.labels)
        self.replica = replica
        self.up = True
        #: Why a scrape fails or lies: `mute`, `freeze`, or empty.
        self.page = ""
        self._slow = 1.0
        self._kernel = kernel
        self._hooks = hooks
        self._watcher = watcher
        self._timer: Timer | None = None
        self._frozen: Sample | None = None
        self._wakes_at = -1.0
        #: On the same machine.
        self.neighbours: list[Server] = []
        self._busy = False
        self._chance = Random(f"engine/{seed}/{index}")
        self.engine = self._fresh()

    def share_machine(self, servers: list["Server"]) -> None:
        """These, itself among them, share a machine."""
        self.neighbours = [server for server in servers if server is not self]

    def _fresh(self) -> Engine:
        slow = self._slow / self.replica.speed
        engine = Engine(self.replica.engine, self._kernel.now, self._hooks, slow_factor=slow, chance=self._chance)
        engine.share(sum(server._busy for server in self.neighbours), self._kernel.now)
        return engine

    # ---- what happens to it ----

    def add(self, request: EngineRequest) -> None:
        """Raises `ValueError` for a request that it could never serve."""
        self._catch_up()
        self.engine.add(request, self._kernel.now)
        self._schedule()

    def abort(self, request: EngineRequest) -> None:
        self._catch_up()
        if self.engine.abort(request, self._kernel.now):
            # Room that an abort makes may let others in at the next step, sooner than the engine foresees.
            self._schedule(self.engine.next_step_at())

    def slow(self, factor: float) -> None:
        self._catch_up()
        self._slow = factor
        self.engine.slow_down(factor / self.replica.speed)
        self._schedule()

    def crash(self) -> None:
        """Everything in it is lost; `up` goes off."""
        self._catch_up()
        self.up = False
        self.engine = self._fresh()
        self._schedule()

    def restart(self) -> None:
        self.engine = self._fresh()
        self.up = True

    def hang(self, hangs: bool) -> None:
        """Its page answers all the same."""
        self._catch_up()
        self.engine.hang(hangs, self._kernel.now)
        self._schedule(self.engine.next_step_at())

    def freeze(self, page: str) -> None:
        self.page = page
        self._frozen = None

    # ---- what it shows ----

    @property
    def overhead_s(self) -> float:
        """What a request that comes now takes besides its steps."""
        contended = any(server._busy for server in self.neighbours)
        return (self.replica.contended_overhead_ms if contended else self.replica.overhead_ms) * 1e-3

    def cached_tokens(self, request: EngineRequest) -> int:
        """Prompt tokens of which it holds the KV now."""
        size = self.replica.engine.block_size
        return len(self.engine.blocks.find(request.hashes or [], (request.prompt_tokens - 1) // size)) * size

    def sample(self) -> Sample | None:
        """Its metrics page; `None` when it does not answer."""
        if not self.up or self.page == "mute":
            return None
        if self._frozen is not None:
            return self._frozen
        self._catch_up()
        self._schedule()
        engine = self.engine
        stats, spec = engine.stats, engine.spec
        gauges = stats.gauges
        sample = Sample(
            waiting=gauges.waiting,
            running=gauges.running,
            kv_usage=gauges.kv_usage,
            adapters=frozenset(gauges.running_loras) if spec.max_loras else None,
            waiting_adapters=frozenset(gauges.waiting_loras),
            max_adapters=spec.max_loras,
            block_size=spec.block_size,
            num_blocks=spec.num_blocks,
            prefix_queries=stats.prefix_queries,
            prefix_hits=stats.prefix_hits,
            generation_tokens=stats.generation_tokens,
        )
        if self.page == "freeze":
            self._frozen = sample
        return sample

    # ---- its clockwork ----

    def _catch_up(self) -> int:
        """Finish the steps due by now; returns how many. The engine takes requests and aborts only when it has."""
        due = self.engine.next_step_at()
        if due is None or due > self._kernel.now:
            return 0
        result = self.engine.step(self._kernel.now)
        if result.first or result.finished:
            self._watcher(result)
        return result.steps

    def _wake(self) -> None:
        self._wakes_at = -1.0
        # The foreseen moment is a sum of steps in another order, so it may lie a rounding error before the true one.
        self._schedule(None if self._catch_up() else self.engine.next_step_at())

    def _shared(self) -> None:
        """A neighbour began to compute, or is done."""
        self._catch_up()
        self.engine.share(sum(server._busy for server in self.neighbours), self._kernel.now)
        self._schedule()

    def _schedule(self, wakes_at: float | None = None) -> None:
        """Wake at `wakes_at`, or when the engine foresees something. An unchanged time keeps its timer."""
        busy = self.engine.next_step_at() is not None
        if busy != self._busy:
            self._busy = busy
            for server in self.neighbours:
                server._shared()
        wakes_at = wakes_at if wakes_at is not None else self.engine.next_event_at()
        if wakes_at == self._wakes_at:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wakes_at = -1.0
        if wakes_at is not None:
            self._wakes_at = wakes_at
            self._timer = self._kernel.call_at(wakes_at, self._wake)


# KV events that come late: what the scheduler knows of every server's cache is what the server told `lag` ago.
#
# The blocks themselves come from the simulated engines' hooks, as the live server's come over ZMQ; hashes, recipes,
# trust and gaps of the live index (`fairlead.core.exact`) are not simulated: here every event arrives, late, and is
# right.
#
# Rules
# * What the engine stores and forgets is known `lag` later. A busy engine is looked at when something comes of a
#   request and at every scrape, so blocks that answers fill may be another scrape interval late.
# * A prompt that was sent counts as held from the decision until its first token's events have come: with them late, a
#   burst would otherwise be computed once per server.
# * A server that left is forgotten; it tells anew what it stores.


#: Seconds after the first token, and the lag, until a sent prompt's own events are known.
SETTLING = 0.05
#: (hashes of a request's full prompt blocks, tokens per block, tokens of the prompt)
Blocks = tuple[Sequence[int], int, int]


class OnItsWay(Struct, eq=False, gc=False):
    """A prompt that was sent, and whose events have not come."""

    blocks: frozenset[int]


class LateEvents(ExactKnowledge):
    """Stands in for the exact knowledge of a `Fleet`. Slots are the fleet's; `Request.blocks` are its `Blocks`."""

    def __init__(self, kernel: Kernel, lag_s: float) -> None:
        super().__init__()
        self._kernel = kernel
        self._lag = lag_s
        #: Copies of each block, by slot.
        self._known: list[dict[int, int]] = []
        #: Prompts on their way, by slot; ordered sets.
        self._sent: list[dict[OnItsWay, None]] = []

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
        hashes, size, tokens = request.blocks
        held = np.zeros(slots)
        for slot in range(min(slots, len(self._known))):
            held[slot] = self._longest(slot, hashes) * size
        return np.minimum(held / max(tokens, 1), 1.0) if held.any() else None

    def _longest(self, slot: int, hashes: Sequence[int]) -> int:
        known, sent = self._known[slot], self._sent[slot]
        for count, digest in enumerate(hashes):
            if digest not in known and not any(digest in event.blocks for event in sent):
                return count
        return len(hashes)

    def sent(self, request: Request, slot: int, prefill_slot: int, now: float) -> "OnItsWay":
        sent = OnItsWay(frozenset(request.blocks[0]))
        self._sent[prefill_slot if prefill_slot >= 0 else slot][sent] = None
        return sent

    def dropped(self, request: Request) -> None:
        """Nothing is kept of it."""

    def first_token(self, predicted: "OnItsWay", now: float) -> None:
        self._kernel.call_at(now + self._lag + SETTLING, self._settled, predicted)

    def _settled(self, predicted: "OnItsWay") -> None:
        for sent in self._sent:
            sent.pop(predicted, None)

    def ended(self, predicted: "OnItsWay", usage: Usage, served: bool, now: float) -> None:
        self.first_token(predicted, now)

    def validate(self) -> None:
        assert all(count > 0 for known in self._known for count in known.values())


class Hooks:
    """`fairlead.lab.engine.blocks.BlockHooks` of one server."""

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
