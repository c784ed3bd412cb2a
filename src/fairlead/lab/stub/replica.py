"""One stub replica: an engine, its clock and timer, the requests that run on it, its faults and adapters.

Rules
* One timer per replica is set for the end of the running step. It fires at most once per `_TICK_S`, and steps that end
  in between are handled together. So a time ratio that makes steps shorter costs no more timer calls, and streams get
  merged events.
* Engine time follows from the loop's clock, not from the timers: a late timer delays single events, and delays do not
  add up.
"""

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from math import inf
from typing import TYPE_CHECKING

from fairlead.lab.engine.engine import Engine
from fairlead.lab.engine.request import EngineRequest, Phase, StepResult
from fairlead.lab.stub.config import NO_FAULTS, VERSION, Faults, StubConfig, changed
from fairlead.lab.stub.connection import Connection
from fairlead.lab.stub.fields import BUSY, DEAD, UNAVAILABLE, ApiError
from fairlead.lab.stub.generation import Choice, Generation, StreamGeneration
from fairlead.lab.stub.plans import Models, Plan
from fairlead.lab.stub.sampling import Stop


class EngineClock:
    """Engine time: the event loop's time since the start, multiplied by `ratio`. Unless it is frozen, `now` and `wall`
    are inverse to each other."""

    __slots__ = ("_frozen_at", "_origin", "_wall", "ratio")

    def __init__(self, wall: Callable[[], float], ratio: float) -> None:
        if not 0 < ratio < inf:
            raise ValueError(f"time_ratio must be above 0 and finite, got {ratio:g}")
        self._wall = wall
        self.ratio = ratio
        self._origin = wall()
        self._frozen_at: float | None = None

    @property
    def frozen(self) -> bool:
        return self._frozen_at is not None

    def now(self) -> float:
        """Engine seconds."""
        if self._frozen_at is not None:
            return self._frozen_at
        return (self._wall() - self._origin) * self.ratio

    def wall(self, engine: float) -> float:
        """The time on the loop's clock at engine time `engine`."""
        return self._origin + engine / self.ratio

    def freeze(self) -> None:
        if self._frozen_at is None:
            self._frozen_at = self.now()

    def thaw(self) -> None:
        """Continue from the time at which the clock was frozen."""
        if self._frozen_at is not None:
            self._origin = self._wall() - self._frozen_at / self.ratio
            self._frozen_at = None


#: The stub keeps this many label sets. The real server keeps them forever.
_MAX_SERIES = 1000


class LoraInfo:
    """The gauge `vllm:lora_requests_info`: its label sets, and when each was last true, in unix seconds.

    As measured on vLLM 0.32.0, an old label set stays on the page, the list of waiting adapters repeats the running
    ones, and an adapter that has only queued requests is never listed.
    """

    __slots__ = ("_series", "max_loras")

    def __init__(self, max_loras: int) -> None:
        self.max_loras = max_loras
        self._series: dict[str, float] = {}

    def note(self, running: tuple[str, ...], unix: float) -> None:
        names = ",".join(running)
        if names not in self._series and len(self._series) >= _MAX_SERIES:
            del self._series[next(iter(self._series))]
        self._series[names] = unix

    def series(self) -> list[tuple[str, float]]:
        """Pairs of a comma-separated list of adapters and its time, in the order of first appearance."""
        return list(self._series.items())


if TYPE_CHECKING:
    from fairlead.lab.stub.kv_publisher import KvPublisher

_TICK_S = 0.001
#: Share of refused streams whose 503 was inside a 200 (measured on vLLM 0.32.0: 11 of 20 and 17 of 20).
_IN_STREAM_COMPLETIONS = 0.55
_IN_STREAM_CHAT = 0.85


class Replica:
    """One model server without its HTTP side, `server.ReplicaServer`, which turns requests into calls of `submit`."""

    def __init__(self, config: StubConfig, name: str, index: int, loop: asyncio.AbstractEventLoop) -> None:
        self.config = config
        self.name = name
        self.spec = config.spec()
        self.block_size = self.spec.block_size
        self.details = config.prompt_tokens_details
        self.rng = random.Random(f"{config.seed}/{index}")
        self.fingerprint = f"vllm-{VERSION}-{self.rng.getrandbits(32):08x}"
        self.models = Models(config.served_model, config.loras, int(time.time()), config.aliases)
        self.lora_info = LoraInfo(self.spec.max_loras)
        self.clock = EngineClock(loop.time, config.time_ratio)
        self.engine = Engine(self.spec, self.clock.now(), chance=self.rng)
        self.rejections = 0
        #: The publisher of the cache's contents; `None` = they are not published.
        self.kv_events: KvPublisher | None = None
        self._loop = loop
        self._faults = NO_FAULTS
        self._generations: dict[Generation, None] = {}
        self._choices: dict[EngineRequest, Choice] = {}
        #: Choices of streams that have a first token and have not ended.
        self._streaming: dict[EngineRequest, Choice] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._woke = 0.0

    # ---------------------------------------------------------------- requests

    @property
    def in_flight(self) -> int:
        """Generation requests that are not answered yet, as shown by /load."""
        return len(self._generations)

    def submit(self, connection: Connection, plan: Plan, answer_id: str, created: int, orca: str) -> None:
        """Run a checked request and answer on the connection. Raises `ApiError` if it is refused with a status."""
        refusal, in_stream = self._refusal(plan)
        if refusal is not None and not in_stream:
            raise refusal
        make = StreamGeneration if plan.stream else Generation
        generation = make(self, connection, plan, plan.answer(answer_id, created, self.fingerprint), orca)
        if isinstance(generation, StreamGeneration) and self._draw(self._faults.disconnect_rate):
            generation.cut_after = self._faults.disconnect_after
        self._generations[generation] = None
        connection.exchange = generation
        generation.begin()
        if refusal is not None:
            generation.fail(refusal)
            return
        now = self.clock.now()
        self._catch_up(now)
        # An answer in `_catch_up` may have let its connection submit its next request, which advanced the engine.
        now = max(now, self.engine.now)
        for request, prompt, stop in self._requests(plan, answer_id):
            self._choices[request] = generation.add_choice(prompt, request, stop)
            self.engine.add(request, now)
        self._arm()

    def _requests(self, plan: Plan, answer_id: str) -> Iterator[tuple[EngineRequest, int, Stop | None]]:
        natural = self.config.natural_output
        for prompt, tokens in enumerate(plan.prompts):
            for sibling in range(plan.n):
                seed, limit = plan.seed(prompt, sibling), plan.max_tokens[prompt]
                ends = max(1, natural // 2 + seed % natural) if plan.stops else 0
                stop = plan.stop_strings.find(seed, min(limit, ends or limit)) if plan.stop_strings else None
                request = EngineRequest(
                    answer_id,
                    tokens,
                    limit,
                    seed=seed,
                    lora=_speakable(plan.lora),
                    salt=_speakable(plan.salt),
                    stop_after=stop.tokens if stop else ends,
                    params_n=plan.n if sibling == 0 else 0,
                )
                if stop:  # also if the last allowed token completes it
                    request.limit_reason = "stop"
                yield request, prompt, stop

    def _refusal(self, plan: Plan) -> tuple[ApiError | None, bool]:
        """The refusal of a request (`None` = it is not refused), and whether it comes inside a 200, as if the server
        had detected it too late."""
        faults = self._faults
        if faults.engine_dead:
            return ApiError(DEAD, 500), False
        if self._draw(faults.error_rate):
            return ApiError("Injected fault.", faults.error_status), plan.stream and faults.error_in_stream
        if not self._overloaded(plan):
            return None, False
        self.rejections += 1
        share = self.config.overload_in_stream
        if share < 0:
            share = _IN_STREAM_CHAT if plan.chat else _IN_STREAM_COMPLETIONS
        return ApiError(BUSY, 503, UNAVAILABLE), plan.stream and self._draw(share)

    def _overloaded(self, plan: Plan) -> bool:
        limit = self.config.max_queued
        if limit <= 0:
            return False
        free = max(0, self.spec.max_num_seqs - self.engine.running())
        return self.engine.queued() - free + len(plan.prompts) * plan.n > limit

    def _draw(self, share: float) -> bool:
        return share > 0 and self.rng.random() < share

    # ---------------------------------------------------------------- called by generations

    def forget(self, generation: Generation) -> None:
        self._generations.pop(generation, None)
        for choice in generation.choices:
            request = choice.request
            self._choices.pop(request, None)
            self._streaming.pop(request, None)
            if request.phase is not Phase.DONE:
                self.engine.abort(request, self.clock.now())

    # ---------------------------------------------------------------- time

    def _arm(self) -> None:
        due = self.engine.next_step_at()
        if due is None or self._timer is not None or self.clock.frozen:
            return
        when = max(self.clock.wall(due), self._woke + _TICK_S)
        self._timer = self._loop.call_at(when, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._woke = self._loop.time()
        self._catch_up(self.clock.now())
        self._arm()

    def _catch_up(self, now: float) -> None:
        """Do every engine step that is due by `now`, and pass the results on to the generations."""
        if not self.config.merge_events:
            while (due := self.engine.next_step_at()) is not None and due < now:
                self._pass_on(self.engine.step(due))
        self._pass_on(self.engine.step(now))

    def _pass_on(self, result: StepResult) -> None:
        if not result.steps:
            return
        if self.spec.max_loras:
            self.lora_info.note(self.engine.stats.gauges.running_loras, time.time())
        choices, streaming = self._choices, self._streaming
        for request in result.first:
            choice = choices[request]
            if choice.generation.plan.stream and request.phase is not Phase.DONE:
                streaming[request] = choice
        if streaming:
            self._stream()
        for request in result.finished:
            streaming.pop(request, None)
            # Before this loop ends, an answer may let its connection submit its next request, which may run more steps.
            ended = choices.get(request)
            if ended is not None:
                ended.generation.finished(ended)

    def _stream(self) -> None:
        interval = self.config.stream_interval
        output_tokens = self.engine.output_tokens
        for request, choice in list(self._streaming.items()):
            output = output_tokens(request)
            if request.phase is not Phase.DONE and (output - choice.emitted >= interval or choice.emitted == 0):
                choice.generation.progress(choice, output)

    # ---------------------------------------------------------------- faults and the end

    @property
    def faults(self) -> Faults:
        return self._faults

    @faults.setter
    def faults(self, faults: Faults) -> None:
        before, self._faults = self._faults, faults
        self.engine.slow_down(faults.slow_factor)
        if faults.stall or faults.asleep:
            self._stop_timer()
            self.clock.freeze()
        elif self.clock.frozen:
            self.clock.thaw()
        if faults.engine_dead:
            for generation in list(self._generations):
                generation.fail(ApiError(DEAD, 500))
        elif before.engine_dead:
            self.engine = Engine(self.spec, self.clock.now(), slow_factor=faults.slow_factor, chance=self.rng)
            if self.kv_events is not None:
                self.kv_events.attach(self.engine.blocks, self.block_size)
                self.kv_events.restart()
        self.engine.stats.gauges.awake = int(not faults.asleep)
        self._arm()

    def restart_engine(self) -> None:
        """Kill the engine process and start another: running requests fail, the cache is empty, and the numbers of KV
        events start again. The HTTP server and the faults stay; an engine that a fault keeps dead stays dead."""
        faults = self._faults
        # The engine is dead for a moment, so that the next request on the connection of a failed one is refused too.
        self.faults = changed(faults, {"engine_dead": True})
        self.faults = faults

    def publish(self, publisher: "KvPublisher") -> None:
        """Publish what the cache stores and forgets from now on, including after restarts of the engine."""
        self.kv_events = publisher
        publisher.attach(self.engine.blocks, self.block_size)

    def close(self) -> None:
        """Stop stepping. The remaining requests get no answer."""
        self._stop_timer()
        self.clock.freeze()
        for generation in list(self._generations):
            generation.end()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _speakable(text: str) -> str:
    """Replace lone surrogates, which are valid in JSON, because KV events contain the text as UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()
