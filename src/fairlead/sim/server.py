"""One simulated model server: an engine, and a timer for the next moment at which anything can come of it."""

from collections.abc import Callable

from fairlead.engine.blocks import BlockHooks
from fairlead.engine.engine import Engine, StepResult
from fairlead.engine.request import EngineRequest
from fairlead.model.endpoint import Endpoint, Sample
from fairlead.sim.kernel import Kernel, Timer
from fairlead.sim.world import Replica

#: Told (result of the steps) whenever steps ended in which something came of a request.
Watcher = Callable[[StepResult], None]


class Server:
    """`up` is whether it answers at all. Times are the kernel's seconds."""

    def __init__(
        self, index: int, replica: Replica, kernel: Kernel, watcher: Watcher, hooks: BlockHooks | None = None
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
        self.engine = self._fresh()

    def _fresh(self) -> Engine:
        engine = Engine(self.replica.engine, self._kernel.now, self._hooks)
        engine.slow_factor = self._slow / self.replica.speed
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
        self.engine.slow_factor = factor / self.replica.speed
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

    def freeze(self, page: str) -> None:
        self.page = page
        self._frozen = None

    # ---- what it shows ----

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

    def _schedule(self, at: float | None = None) -> None:
        """Wake at `at`, or when the engine foresees something. An unchanged time keeps its timer."""
        at = at if at is not None else self.engine.next_event_at()
        if at == self._wakes_at:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wakes_at = -1.0
        if at is not None:
            self._wakes_at = at
            self._timer = self._kernel.call_at(at, self._wake)
