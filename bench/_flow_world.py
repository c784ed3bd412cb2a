"""A scheduler's core under virtual time, and requests for it."""

import gc
import time
from collections.abc import Callable
from heapq import heapify
from random import Random
from typing import Any

from fairlead.compat.load import load
from fairlead.config.plugins import build_policy
from fairlead.core import events as ev
from fairlead.core.binding import PairBinder, WaitingRules
from fairlead.core.endpoint import Endpoint
from fairlead.core.fairness import StartTimeFair
from fairlead.core.fleet import Fleet
from fairlead.core.flow import Limit, Limits
from fairlead.core.flow_control import FlowControl, FlowController
from fairlead.core.gates import LedgerGate
from fairlead.core.instructions import Reject, Route
from fairlead.core.prefix import ChainHasher
from fairlead.core.profile import Profile
from fairlead.core.queues import Queues
from fairlead.core.request import PrefixChain, Request
from fairlead.core.scheduler import Pipeline
from fairlead.core.tokens import TokenEstimator
from fairlead.gateway.answers import Answers, refusal
from fairlead.gateway.driver import Driver, Observer
from fairlead.gateway.ext_proc import Kind
from fairlead.plugins.flow_control import LeastWork
from fairlead.plugins.pickers import MaxScore, MaxScoreParams
from fairlead.server.live.memory import settle_memory
from fairlead.server.observe.watch import Watch
from fairlead.testing import SimClock

FLOWS = 1000
ENDPOINTS = 100
_NOTHING: frozenset[str] = frozenset()


class Silent:
    """Hears everything, says nothing."""

    def on_decision(self, record: object, duration_s: float) -> None: ...

    def on_outcome(self, record: object) -> None: ...

    def on_failure(self, instruction: str) -> None: ...


class Stream:
    """A gateway's request: its answers are encoded, and go nowhere."""

    def __init__(self, number: int, answers: Answers) -> None:
        self._number = number
        self._answers = answers

    def route(self, route: Route) -> None:
        address = route.endpoint.address
        self._answers.pick(Kind.REQUEST_HEADERS, address, self._number, _NOTHING, route.prefill, route.fallback)

    def reject(self, reject: Reject) -> None:
        refusal(reject)

    def hold(self, seconds: float) -> None: ...

    def fail(self) -> None: ...


class Clock(SimClock):
    """Forgets cancelled timers as asyncio does: left alone they would be most of what the cycle collector looks at."""

    def call_at(self, when: float, callback: Callable[..., object], /, *args: Any) -> Any:
        if len(self._heap) > 200:
            self._heap = [entry for entry in self._heap if not entry[2].cancelled]
            heapify(self._heap)
        return super().call_at(when, callback, *args)


class World:
    """Fleet, pipeline and driver. `observer`: `None` = what `fairlead serve` has: metrics, decisions, log."""

    def __init__(self, flow_control: bool, observer: Observer | None = None) -> None:
        self.clock = Clock()
        self.fleet = Fleet()
        profile = Profile("bench", [], [], MaxScore(MaxScoreParams()))
        rules = WaitingRules(profile, profile)
        queues = Queues(
            lambda priority: (StartTimeFair(), LeastWork()), Limits(total=Limit(20_000), band=Limit(20_000))
        )
        self.flow_controller = FlowController(FlowControl(queues, LedgerGate(requests=8), PairBinder(rules)))
        policy = build_policy(load("endpoints: []", need_endpoints=False))
        flow_controller = self.flow_controller if flow_control else None
        self.pipeline = Pipeline(
            self.clock, Random(1), self.fleet, policy, TokenEstimator(), flow_controller=flow_controller
        )
        self.driver = Driver(self.pipeline, self.clock, observer or Watch(self.fleet, self.clock.time))
        self._answers = Answers("bench")
        self.driver.start()
        for number in range(ENDPOINTS):
            self.join(number)
        # As the server does once it has started. What former worlds left may be collected.
        gc.unfreeze()
        settle_memory()

    def join(self, number: int) -> None:
        self.driver.feed(ev.EndpointUp(Endpoint(f"e{number}", f"10.0.{number // 250}.{number % 250}:8000")))

    def arrive(self, request: Request) -> None:
        self.driver.feed(ev.RequestArrived(request, Stream(request.id, self._answers)))

    def serve(self, requests: list[Request]) -> float:
        """CPU seconds; each request ends before the next arrives."""
        feed = self.driver.feed
        start = time.process_time()
        for request in requests:
            feed(ev.RequestArrived(request))
            feed(ev.ResponseEnded(request_id=request.id, status=200))
        return time.process_time() - start


def chains(seed: int, count: int, size: int) -> list[PrefixChain]:
    """The beginnings of so many different prompts of `size` bytes."""
    hasher, rng = ChainHasher(), Random(seed)
    return [hasher.chain(b"bench", rng.randbytes(size)) for _ in range(count)]


def request(number: int, tokens: int, chain: PrefixChain) -> Request:
    return Request(
        id=number,
        arrived=0.0,
        api="chat",
        model=f"model-{number % 10}",
        fairness_id=f"tenant-{number % FLOWS // 10}",
        prompt_tokens=tokens,
        prompt_bytes=tokens * 4,
        prefix=chain,
        stream=True,
    )
