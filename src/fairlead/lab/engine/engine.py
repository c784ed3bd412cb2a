"""A model server as a step loop: continuous batching, chunked prefill, preemption, paged prefix cache.

Theory (as in vLLM 0.32's scheduler)
* Time is divided into steps. A step gives every decoding request one token and spends the rest of its token budget on
  prefill. Its duration is known when it begins (`LatencyModel`). Its effects appear when it ends, and the next step
  begins immediately.
* Running requests are served first, in the order of admission; then the queue, first come first served, as far as token
  budget, sequences, KV blocks and adapter slots allow. So at most one request is in the middle of its prefill, and it
  is the last of the batch.
* Without chunked prefill, a step computes either whole prompts or one token for every decoding request. With
  speculative decoding, the accepted drafts of a step are further steps that take no time and only decode.
* A request that needs a block when none is free takes the blocks of the last request of the batch. That request goes
  back to the head of the queue and starts again (its blocks may still be cached then). A step that preempted a request
  admits none.

Rules
* No clock, no I/O, and no randomness except the given generator. The caller passes the time in, in seconds, and it must
  never go backwards.
* `step(now)` finishes every step due by `now`.
* Requests that arrive during a step wait until it ends, as in the real engine's input queue, and no gauge shows them.
* Gauges change only when a step ends, or on an abort while nothing runs.
"""

from collections import deque
from math import inf, log, sqrt
from random import Random

from fairlead.lab.engine.blocks import BlockHooks, BlockManager, LoraSlots, RequestBlocks, adapters_of
from fairlead.lab.engine.decode import DecodeBatch, foresee, run_decode_steps
from fairlead.lab.engine.request import EngineRequest, Phase, StepResult
from fairlead.lab.engine.spec import EngineSpec
from fairlead.lab.engine.stats import EngineStats

#: The factor on the duration of a step while the engine hangs.
_FOREVER = 1e9


class Engine:
    """One replica. Only `add`, `abort`, `step` and the few other public methods change it."""

    def __init__(
        self,
        spec: EngineSpec,
        now: float,
        hooks: BlockHooks | None = None,
        fast_forward: bool = True,
        slow_factor: float = 1.0,
        chance: Random | None = None,
    ) -> None:
        """`fast_forward`: take steps that only decode in one loop. Off: one at a time, with the same result but slower.
        `chance`: the generator of noise and accepted drafts."""
        self.spec = spec
        self._fast_forward = fast_forward and spec.foreseeable
        self._chance = chance or Random(0)
        #: Standard deviation of the logarithm of a step's duration.
        self._sigma = sqrt(log(1.0 + spec.noise * spec.noise))
        #: Factors on the duration of a step: `_hang` is above 1 while this engine hangs. `_pace` is the product of
        #: `_hang` and the slowdown by busy engines on the same machine.
        self._pace = self._hang = 1.0
        self._peers = 0
        #: When the running step began, or when the last one ended.
        self.now = now
        #: Multiplies the duration of every step that begins from now on.
        self.slow_factor = slow_factor
        self.stats = EngineStats(spec.max_model_len)
        self.blocks = BlockManager(spec.usable_blocks, hooks)
        self._kv = RequestBlocks(self.blocks, spec.block_size, spec.prefix_caching)
        self._loras = LoraSlots(spec.max_loras, spec.max_cpu_loras)
        #: Seconds added to the step that begins, because adapters are loaded for it.
        self._loading_s = 0.0

        self._incoming: list[EngineRequest] = []
        #: With asynchronous scheduling: requests that arrived after the running step was scheduled.
        self._next: list[EngineRequest] = []
        self._waiting, self._deferred = deque[EngineRequest](), deque[EngineRequest]()
        #: The number of free blocks when they were too few for the head of the queue, which is tried again only when
        #: more are free. -1 = they were not too few.
        self._stuck_at = -1

        self._decoding = DecodeBatch(spec.block_size)
        #: The one request whose prefill needs more than the running step. It comes last in the batch.
        self._partial: EngineRequest | None = None
        #: The prefill of the running step: requests and tokens.
        self._chunks: list[tuple[EngineRequest, int]] = []
        self._step_tokens = 0
        #: Whether the running step only does prefill.
        self._prefill_only = False
        #: Accepted drafts of the last step whose tokens have not been handed out yet.
        self._accepted = 0
        self._ends = inf

    # ---------------------------------------------------------------- changes

    def slow_down(self, factor: float) -> None:
        """Multiply the duration of the steps that begin from now on by `factor`."""
        self.slow_factor = factor

    def share(self, peers: int, now: float) -> None:
        """Slow down for `peers` other engines that compute on the same machine from `now` on. This applies to the rest
        of the running step too. Steps due by `now` must have been finished."""
        self._peers = peers
        pace = self._hang * (1.0 + self.spec.contention * peers)
        if self._ends < inf:
            self._ends = now + (self._ends - now) * pace / self._pace
        self._pace = pace

    def hang(self, hangs: bool, now: float) -> None:
        """Stop making progress from `now` on, or continue. Steps due by `now` must have been finished."""
        self._hang = _FOREVER if hangs else 1.0
        self.share(self._peers, now)

    def add(self, request: EngineRequest, now: float) -> None:
        """Queue a request. Raises `ValueError` for a request that not even an empty engine could serve."""
        self.spec.check(request.prompt_tokens, request.max_tokens, request.lora)
        request.arrived = now
        self._incoming.append(request)
        if self._ends == inf:
            self._begin(now)

    def abort(self, request: EngineRequest, now: float) -> bool:
        """Forget a request; False if it had already ended. The duration of the running step does not change."""
        if request.phase is Phase.DONE:
            return False
        if request.phase is Phase.WAITING:
            for queue in (self._incoming, self._next, self._waiting, self._deferred):
                if request in queue:
                    queue.remove(request)
                    break
            self._stuck_at = -1
        else:
            self._leave(request)
        request.phase = Phase.DONE
        request.finish_reason = "abort"
        request.finished_at = now
        if self._ends == inf:
            self._show()
        return True

    def step(self, now: float) -> StepResult:
        """Finish every step due by `now`, and begin the next one after each."""
        result = StepResult()
        while self._ends <= now:
            if self._fast_forward and self._steady():
                self._run_decoding(now, result)
                if self._ends > now:
                    break
            ends = self._ends
            self._complete(ends, result)
            self._begin(ends)
        return result

    # ---------------------------------------------------------------- queries

    @property
    def ranks(self) -> "tuple[Engine, ...]":
        """The data-parallel engines behind this address: only this one."""
        return (self,)

    def next_step_at(self) -> float | None:
        """When the running step ends; `None` if there is nothing to do."""
        return None if self._ends == inf else self._ends

    def next_event_at(self) -> float | None:
        """When a request next gets its first token, ends or is preempted, if no request arrives and none is aborted.

        For simulators, which can skip the steps before it. `None` if there is nothing to do.
        """
        if self._ends == inf:
            return None
        if self._chunks or self._incoming or self._next or self._loras.changed or not self.spec.foreseeable:
            return self._ends
        return foresee(self._decoding, self.blocks.free, self.spec.latency, self.slow_factor, self._ends)

    def output_tokens(self, request: EngineRequest) -> int:
        """The output tokens of a request after the last step that ended."""
        return self._decoding.steps - request.base if request.phase is Phase.DECODE else request.output

    def queued(self) -> int:
        """Requests that have arrived and are not in the batch, including those that no gauge shows yet."""
        return len(self._incoming) + len(self._next) + len(self._waiting) + len(self._deferred)

    def running(self) -> int:
        return len(self._decoding.members) + len(self._chunks)

    # ---------------------------------------------------------------- steps that only decode

    def _steady(self) -> bool:
        """Whether the running step only decodes and no request can join the batch before another leaves it."""
        if self._chunks or self._incoming or self._next or self._loras.changed or not self._decoding.members:
            return False
        if not self._waiting:
            return True
        # Until a request leaves, free blocks only become fewer, so the head of the queue still does not fit.
        return self.blocks.free <= self._stuck_at or len(self._decoding.members) >= self.spec.max_num_seqs

    def _run_decoding(self, now: float, result: StepResult) -> None:
        """Finish the steps due by `now`, except a step in which a request ends or has to be preempted."""
        times = self.now, self._ends, now
        done = run_decode_steps(self._decoding, self._kv, self.spec.latency, self.slow_factor, self.stats, *times)
        if done.steps:
            self.now, self._ends = done.began, done.ends
            result.steps += done.steps
            self._show(done.taken)

    # ---------------------------------------------------------------- the end of a step

    def _complete(self, ended: float, result: StepResult) -> None:
        stats = self.stats
        result.steps += 1
        stats.iteration_tokens.observe(self._step_tokens)
        decoding = 0 if self._prefill_only else len(self._decoding.members)
        if decoding:
            stats.generation_tokens += decoding
            if ended > self.now:
                stats.itl.observe(ended - self.now, decoding)
        self.now = ended
        if not self._prefill_only:
            for request in self._decoding.advance():
                self._finish(request, ended, result)
        if not self._decoding.members:
            self._accepted = 0
        if self._chunks and not self._accepted:
            self._complete_prefill(ended, result)
        self._show()

    def _complete_prefill(self, ended: float, result: StepResult) -> None:
        chunks, self._chunks = self._chunks, []
        for request, count in chunks:
            request.computed += count
            if request.computed < request.target:
                continue
            if request is self._partial:
                self._partial = None
            self.stats.generation_tokens += 1
            request.output += 1
            if request.output == 1:
                request.first_token_at = ended
                self.stats.first_token(request)
                result.first.append(request)
            else:
                self.stats.itl.observe(ended - request.last_token_at)
            self._decoding.join(request)
            if request.output == request.limit:
                self._finish(request, ended, result)

    def _finish(self, request: EngineRequest, ended: float, result: StepResult) -> None:
        self._leave(request)
        request.phase = Phase.DONE
        request.finish_reason = request.limit_reason
        request.finished_at = ended
        self.stats.done(request)
        result.finished.append(request)

    def _leave(self, request: EngineRequest) -> None:
        """Remove a request from the batch and free its blocks and adapter slot."""
        if request.phase is Phase.DECODE:
            self._decoding.leave(request)
        else:
            self._chunks = [chunk for chunk in self._chunks if chunk[0] is not request]
            if self._partial is request:
                self._partial = None
        self._kv.drop(request)
        self._loras.leave(request.lora)

    def _show(self, taken: int = 0) -> None:
        """Set the gauges. `taken` blocks belong to the step that has already begun and are not shown yet."""
        gauges = self.stats.gauges
        gauges.running = len(self._decoding.members) + (self._partial is not None)
        gauges.waiting = len(self._waiting) + len(self._deferred)
        gauges.deferred = len(self._deferred)
        gauges.kv_usage = (self.blocks.used - taken) / self.blocks.total
        if self.spec.max_loras:
            gauges.running_loras = self._loras.running()
            gauges.waiting_loras = adapters_of([*self._deferred, *self._waiting])

    # ---------------------------------------------------------------- the beginning of a step

    def _begin(self, now: float) -> None:
        self.now = now
        if self._incoming or self._next:
            self._receive()
        self._prefill_only = False
        if not self.spec.chunked_prefill and not self._accepted and (self._waiting or self._deferred):
            self._admit(now, self.spec.max_batched_tokens)
            if self._chunks:
                self._prefill_only = True
                self._schedule_end(now)
                return
        decoding = self._decoding
        growing = decoding.growing()
        preempted = bool(growing) and self._grow(tuple(growing))
        if self._kv.caching:
            for request in decoding.filling():
                self._kv.seal_last(request)
        if self._accepted:
            self._accepted -= 1
            self._step_tokens = len(decoding.members)
            self._ends = now
            return
        if not self.spec.chunked_prefill:
            self._schedule_end(now)
            return
        budget = self.spec.max_batched_tokens - len(decoding.members) * (1 + self.spec.draft_tokens)
        if self._partial is not None:
            budget, gone = self._continue_prefill(self._partial, budget)
            preempted |= gone
        if not preempted and (self._waiting or self._deferred):
            self._admit(now, budget)
        self._schedule_end(now)

    def _receive(self) -> None:
        """Queue the requests that arrived before the step that begins now was scheduled."""
        self._waiting.extend(self._next)
        self._next.clear()
        if self.spec.async_scheduling and (self._decoding.members or self._partial is not None or self._waiting):
            self._next.extend(self._incoming)
        else:
            self._waiting.extend(self._incoming)
        self._incoming.clear()

    def _schedule_end(self, now: float) -> None:
        new = 0
        attention = 0.0
        for request, count in self._chunks:
            new += count
            attention += count * (request.computed + 0.5 * count)
        spec, members, kv_tokens = self.spec, len(self._decoding.members), self._decoding.kv_tokens
        if self._prefill_only:
            members = kv_tokens = 0
        decoding = members * (1 + spec.draft_tokens)
        self._step_tokens = new + decoding
        if self._step_tokens == 0:
            self._ends = inf
            return
        seconds = self.slow_factor * spec.latency.step_s(new, attention, decoding, kv_tokens) + self._loading_s
        self._loading_s = 0.0
        if self._sigma:
            seconds *= self._chance.lognormvariate(-0.5 * self._sigma**2, self._sigma)
        self._ends = now + self._pace * seconds
        if decoding > members:
            while self._accepted < spec.draft_tokens and self._chance.random() < spec.acceptance:
                self._accepted += 1

    def _grow(self, requests: tuple[EngineRequest, ...]) -> bool:
        """Take a new block for each request; True if a request was preempted for it."""
        preempted = False
        for request in requests:
            # A request that is not decoding was preempted a moment ago to free a block for another.
            while not self.blocks.free and request.phase is Phase.DECODE:
                self._preempt(self._partial or self._decoding.last())
                preempted = True
            if request.phase is Phase.DECODE:
                request.blocks += self.blocks.take(1)
        return preempted

    def _continue_prefill(self, request: EngineRequest, budget: int) -> tuple[int, bool]:
        """Returns the remaining token budget, and whether the request (the batch's last) was preempted for lack of
        blocks."""
        count = min(request.target - request.computed, budget)
        if not self._kv.extend(request, request.computed + count):
            self._preempt(request)
            return budget, True
        self._chunks.append((request, count))
        return budget - count, False

    def _preempt(self, request: EngineRequest) -> None:
        self._leave(request)
        request.phase = Phase.WAITING
        request.preemptions += 1
        request.last_token_at = self.now
        self.stats.preemptions += 1
        self._waiting.appendleft(request)
        self._stuck_at = -1

    def _admit(self, now: float, budget: int) -> None:
        if self._deferred and self._loras.changed:
            self._waiting.extendleft(reversed(self._deferred))
            self._deferred.clear()
            self._stuck_at = -1
        self._loras.changed = False
        waiting = self._waiting
        free_slots = self.spec.max_num_seqs - self.running()
        while waiting and budget > 0 and free_slots > 0:
            request = waiting[0]
            if not self.spec.chunked_prefill and request.prompt_tokens + request.output > budget:
                return
            if not self._loras.admits(request.lora):
                self._deferred.append(waiting.popleft())
                self._stuck_at = -1
                continue
            if self.blocks.free <= self._stuck_at:
                return
            if not self._kv.begin(request, request.prompt_tokens + request.output):
                self._stuck_at = self.blocks.free
                return
            self._stuck_at = -1
            waiting.popleft()
            budget -= self._start(request, now, budget)
            free_slots -= 1

    def _start(self, request: EngineRequest, now: float, budget: int) -> int:
        """Put an admitted request into this step; returns how many tokens of the budget it takes."""
        hits = request.computed
        request.phase = Phase.PREFILL
        if self._loras.enter(request.lora):
            self._loading_s += self.spec.lora_load_ms * 1e-3
        if request.cached_tokens < 0:
            request.cached_tokens = hits
            request.scheduled_at = now
            self.stats.prefix_queries += request.prompt_tokens
            self.stats.prefix_hits += hits
        count = min(request.target - hits, budget)
        self._kv.extend(request, hits + count)
        self._chunks.append((request, count))
        if hits + count < request.target:
            self._partial = request
        return count

    # ---------------------------------------------------------------- checks

    def validate(self) -> None:
        """Raise `AssertionError` if the parts contradict each other. For tests and debug modes."""
        batch = [*self._decoding.members, *(request for request, _ in self._chunks)]
        self.blocks.validate([request.blocks for request in batch])
        self._decoding.validate(self._prefill_only)
        assert self.running() <= self.spec.max_num_seqs, "too many sequences"
        assert self._step_tokens <= self.spec.max_batched_tokens, "too many tokens in a step"
        assert self._partial is None or self._chunks[0][0] is self._partial or self._chunks[-1][0] is self._partial
        for request in (*self._incoming, *self._next, *self._waiting, *self._deferred):
            assert request.phase is Phase.WAITING and not request.blocks, f"{request.id} waits and holds blocks"
        assert self._ends < inf or not (self.running() or self.queued()), "there is work, and no step runs"
