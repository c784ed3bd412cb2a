"""A simulated model server: its engine or data-parallel ranks, the timer of its next event, and delayed KV events."""

from collections.abc import Callable, Sequence
from random import Random

import numpy as np
from msgspec import Struct

from fairlead.core.clock import Timer, VirtualClock
from fairlead.core.columns import FloatColumn
from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.exact import ExactKnowledge
from fairlead.core.request import Request, Usage
from fairlead.lab.engine.blocks import BlockHooks
from fairlead.lab.engine.engine import Engine
from fairlead.lab.engine.request import EngineRequest, StepResult
from fairlead.lab.simulator.world import Replica

#: Called with the result of the steps whenever steps ended that affected a request.
Watcher = Callable[[StepResult], None]


class Server:
    """`up`: whether the server answers at all. Times are the kernel's seconds."""

    def __init__(
        self,
        index: int,
        replica: Replica,
        kernel: VirtualClock,
        watcher: Watcher,
        hooks: BlockHooks | None = None,
        seed: int = 0,
    ) -> None:
        self.endpoint = Endpoint(f"sim/server-{index}", f"10.0.{index // 250}.{index % 250 + 1}:8000", replica.labels)
        self.replica = replica
        self.up = True
        #: The fault of the metrics page: `mute` = no answer, `freeze` = old values, empty = none.
        self.page = ""
        self._slow = 1.0
        self._kernel = kernel
        self._hooks = hooks
        self._watcher = watcher
        self._timer: Timer | None = None
        self._frozen: Sample | None = None
        self._wakes_at = -1.0
        #: The other servers on the same machine.
        self.neighbours: list[Server] = []
        self._busy = False
        self._chance = Random(f"engine/{seed}/{index}")
        #: When the API server has processed all requests that arrived so far.
        self._api_free_at = 0.0
        self.engine = self._fresh()

    def share_machine(self, servers: list["Server"]) -> None:
        """Let these servers, which include this one, share a machine."""
        self.neighbours = [server for server in servers if server is not self]

    def _fresh(self) -> "Engine | Ranks":
        slow, replica, now = self._slow / self.replica.speed, self.replica, self._kernel.now
        engines = [
            Engine(replica.engine, now, self._hooks, slow_factor=slow, chance=self._chance)
            for _ in range(replica.ranks)
        ]
        engine = engines[0] if len(engines) == 1 else Ranks(engines)
        self.asked_for = dict[str, None]()
        engine.share(sum(server._busy for server in self.neighbours), self._kernel.now)
        return engine

    # ---- changes ----

    def add(self, request: EngineRequest) -> None:
        """Add a request. Raises `ValueError` for a request that the server could never serve."""
        self._catch_up()
        self.engine.add(request, self._kernel.now)
        if request.lora:
            self.asked_for[request.lora] = None
        self._schedule()

    def received(self, time_s: float, tokens: int) -> float:
        """When the API server has processed a request with `tokens` prompt tokens that arrives at `time_s`."""
        took_s = self.replica.api_ms * 1e-3 + self.replica.api_us_per_token * 1e-6 * tokens
        self._api_free_at = max(time_s, self._api_free_at) + took_s
        return self._api_free_at if took_s else time_s

    def abort(self, request: EngineRequest) -> None:
        self._catch_up()
        if self.engine.abort(request, self._kernel.now):
            # Blocks that an abort frees may let requests in at the next step, sooner than the engine foresees.
            self._schedule(self.engine.next_step_at())

    def slow(self, factor: float) -> None:
        self._catch_up()
        self._slow = factor
        self.engine.slow_down(factor / self.replica.speed)
        self._schedule()

    def crash(self) -> None:
        """Lose all state and go down."""
        self._catch_up()
        self.up = False
        self.engine = self._fresh()
        self._schedule()

    def restart(self) -> None:
        self.engine = self._fresh()
        self.up = True

    def hang(self, hangs: bool) -> None:
        """Stop making progress, or continue. The metrics page still answers."""
        self._catch_up()
        self.engine.hang(hangs, self._kernel.now)
        self._schedule(self.engine.next_step_at())

    def freeze(self, page: str) -> None:
        self.page = page
        self._frozen = None

    # ---- queries ----

    @property
    def idle(self) -> bool:
        return self.engine.next_step_at() is None

    @property
    def overhead_s(self) -> float:
        """The seconds that a request arriving now takes in addition to its steps."""
        contended = any(server._busy for server in self.neighbours)
        return (self.replica.contended_overhead_ms if contended else self.replica.overhead_ms) * 1e-3

    def cached_tokens(self, request: EngineRequest) -> int:
        """The prompt tokens whose KV the server holds now."""
        size = self.replica.engine.block_size
        blocks = (request.prompt_tokens - 1) // size
        return max(len(engine.blocks.find(request.hashes or [], blocks)) for engine in self.engine.ranks) * size

    def sample(self) -> Sample | None:
        """The metrics page; `None` if the server does not answer."""
        if not self.up or self.page == "mute":
            return None
        if self._frozen is not None:
            return self._frozen
        self._catch_up()
        self._schedule()
        spec, stats = self.replica.engine, [engine.stats for engine in self.engine.ranks]
        gauges = [each.gauges for each in stats]
        sample = Sample(
            ranks=len(gauges),
            waiting=sum([gauge.waiting for gauge in gauges]),
            running=sum([gauge.running for gauge in gauges]),
            kv_usage=max([gauge.kv_usage for gauge in gauges]),
            adapters=frozenset([name for gauge in gauges for name in gauge.running_loras]) if spec.max_loras else None,
            waiting_adapters=frozenset([name for gauge in gauges for name in gauge.waiting_loras]),
            max_adapters=spec.max_loras,
            block_size=spec.block_size,
            num_blocks=spec.num_blocks * len(gauges),
            prefix_queries=sum([each.prefix_queries for each in stats]),
            prefix_hits=sum([each.prefix_hits for each in stats]),
            generation_tokens=sum([each.generation_tokens for each in stats]),
        )
        if self.page == "freeze":
            self._frozen = sample
        return sample

    # ---- time ----

    def _catch_up(self) -> int:
        """Finish the steps due by now and return their number. Required before the engine takes requests or aborts."""
        due = self.engine.next_step_at()
        if due is None or due > self._kernel.now:
            return 0
        result = self.engine.step(self._kernel.now)
        if result.first or result.finished:
            self._watcher(result)
        return result.steps

    def _wake(self) -> None:
        self._wakes_at = -1.0
        # The engine foresees a time by another sum than its steps make, so it may be early by a rounding error. No step
        # has ended then; wake again when the running step ends.
        self._schedule(None if self._catch_up() else self.engine.next_step_at())

    def _shared(self) -> None:
        """Update the pace, because a neighbour began or stopped computing."""
        self._catch_up()
        self.engine.share(sum(server._busy for server in self.neighbours), self._kernel.now)
        self._schedule()

    def _schedule(self, wakes_at: float | None = None) -> None:
        """Wake at `wakes_at`, or at the engine's next event. An unchanged time keeps its timer."""
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


class Ranks:
    """Engines behind one address, for vLLM's `--data-parallel-size`. Its API server sends a request to the rank with
    the least 4 · waiting + running, whatever the caches hold, and shows all ranks on one page. The ranks do not step
    together, unlike those of a mixture of experts. The methods are those of an `Engine`."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.ranks = engines
        self._turn = 0
        self._of: dict[EngineRequest, Engine] = {}

    def add(self, request: EngineRequest, now: float) -> None:
        order = [*self.ranks[self._turn :], *self.ranks[: self._turn]]
        engine = min(order, key=lambda engine: 4 * engine.queued() + engine.running())
        engine.add(request, now)
        self._turn = (self._turn + 1) % len(order)
        self._of[request] = engine

    def abort(self, request: EngineRequest, now: float) -> bool:
        engine = self._of.pop(request, None)
        return engine is not None and engine.abort(request, now)

    def step(self, now: float) -> StepResult:
        result = StepResult()
        for engine in self.ranks:
            result.add(engine.step(now))
        for request in result.finished:
            del self._of[request]
        return result

    def next_step_at(self) -> float | None:
        return min((time for engine in self.ranks if (time := engine.next_step_at()) is not None), default=None)

    def next_event_at(self) -> float | None:
        return min((time for engine in self.ranks if (time := engine.next_event_at()) is not None), default=None)

    def slow_down(self, factor: float) -> None:
        for engine in self.ranks:
            engine.slow_down(factor)

    def share(self, peers: int, now: float) -> None:
        for engine in self.ranks:
            engine.share(peers, now)

    def hang(self, hangs: bool, now: float) -> None:
        for engine in self.ranks:
            engine.hang(hangs, now)

    def validate(self) -> None:
        for engine in self.ranks:
            engine.validate()


# Delayed KV events: the scheduler knows the contents of every server's cache as reported `lag` ago.
#
# The blocks come from the hooks of the simulated engines, as those of a live server come over ZMQ. The hashes, recipes,
# trust and gaps of the live index (`fairlead.core.exact`) are not simulated: every event arrives, late and correct.
#
# Rules
# * What the engine stores and forgets is known `lag` later. The state of a busy engine is read when a request makes
#   progress and at every scrape, so blocks that answers fill may be another scrape interval late.
# * A sent prompt counts as held from the decision until the events of its first token have arrived. Otherwise late
#   events would cause a burst to be computed once per server.
# * The blocks of a server that leaves are forgotten. After its return, only what it stores from then on is known.


#: Seconds after the first token and the lag until the events of a sent prompt are known.
SETTLING = 0.05
#: (hashes of a request's full prompt blocks, tokens per block, tokens of the prompt)
Blocks = tuple[Sequence[int], int, int]


class OnItsWay(Struct, eq=False, gc=False):
    """A prompt that was sent and whose events have not arrived."""

    blocks: frozenset[int]


class LateEvents(ExactKnowledge):
    """Replaces the exact knowledge of a `Fleet`. Slots are the fleet's; `Request.blocks` are its `Blocks`."""

    def __init__(self, kernel: VirtualClock, lag_s: float) -> None:
        super().__init__()
        self._kernel = kernel
        self._lag = lag_s
        #: By slot, the number of copies of each block.
        self._known: list[dict[int, int]] = []
        #: By slot, the sent prompts whose events have not arrived, as ordered sets.
        self._sent: list[dict[OnItsWay, None]] = []

    def add_slot(self, slot: int) -> None:
        while slot >= len(self._known):
            self._known.append({})
            self._sent.append({})

    def drop_slot(self, slot: int) -> None:
        self._known[slot] = {}
        self._sent[slot] = {}

    def emptied(self, slot: int) -> None:
        """Nothing to do: the slot of a server that fails is dropped, and what came since is of the new one."""

    def later(self, slot: int | None, hashes: Sequence[int], change: int) -> None:
        """Deliver an event that leaves the server now."""
        if slot is not None:
            known = self._known[slot]
            self._kernel.call_at(self._kernel.now + self._lag, self._change, slot, known, tuple(hashes), change)

    def _change(self, slot: int, known: dict[int, int], hashes: Sequence[int], change: int) -> None:
        if self._known[slot] is not known:  # the server has left since it sent the event
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

    def sent(self, request: Request, slot: int, prefill_slot: int, now: float, doubtful: bool = False) -> "OnItsWay":
        sent = OnItsWay(frozenset(request.blocks[0]))
        self._sent[prefill_slot if prefill_slot >= 0 else slot][sent] = None
        return sent

    def dropped(self, request: Request) -> None:
        """Nothing is stored for the request."""

    def first_token(self, predicted: "OnItsWay", now: float) -> None:
        self._kernel.call_at(now + self._lag + SETTLING, self._settled, predicted)

    def _settled(self, predicted: "OnItsWay") -> None:
        for sent in self._sent:
            sent.pop(predicted, None)

    def ended(self, predicted: "OnItsWay", usage: Usage, served: bool, now: float) -> None:
        self.first_token(predicted, now)

    def validate(self) -> None:
        assert all(count > 0 for known in self._known for count in known.values())


class Hooks(Struct, frozen=True):
    """The `fairlead.lab.engine.blocks.BlockHooks` of one server. `slot()` returns the server's slot in the fleet;
    `None` = it is not in the pool."""

    knowledge: LateEvents
    slot: Callable[[], int | None]

    def salted(self, salt: str) -> None:
        """Simulated prompts have no salt."""

    def stored(self, hashes: Sequence[int], parent: int, tokens: Callable[[], bytes], lora: str) -> None:
        self.knowledge.later(self.slot(), hashes, 1)

    def removed(self, digest: int) -> None:
        self.knowledge.later(self.slot(), (digest,), -1)

    def cleared(self) -> None:
        """The simulator never clears a cache; a restarted server is forgotten with its slot."""
