"""The same workload through the simulator's kernel and through asyncio and the live driver, in virtual time: the same
decisions, or something in the pure core looked at a clock, at chance, or at the order of a set."""

import asyncio
import heapq
import selectors
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from fairlead.core import events as ev
from fairlead.core.clock import VirtualClock
from fairlead.core.instructions import Reject, Route
from fairlead.gateway.driver import Driver
from fairlead.lab.simulator.run import policy_from
from fairlead.lab.simulator.scenarios import headline, mooncake
from fairlead.lab.simulator.simulation import START, Simulation

_order = count()


class Ordered(asyncio.TimerHandle):
    """Timers of the same moment fire in the order in which they were set; asyncio leaves that open."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.order = next(_order)

    def __lt__(self, other: "Ordered") -> bool:  # type: ignore[override]
        return (self.when(), self.order) < (other.when(), other.order)


class NoWait(selectors.DefaultSelector):
    """Time jumps to the next timer instead of passing."""

    loop: "VirtualLoop"

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout and self.loop._scheduled:
            self.loop.now = max(self.loop.now, self.loop._scheduled[0].when())
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, start: float) -> None:
        selector = NoWait()
        super().__init__(selector)
        selector.loop = self
        self.now = start
        # asyncio fires what is due before now + resolution: as little as a float can tell.
        self._clock_resolution = 1e-12
        self.set_exception_handler(self._failed)
        self.failures: list[dict[str, Any]] = []

    def _failed(self, _loop: Any, context: dict[str, Any]) -> None:
        self.failures.append(context)
        self.stop()

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[..., object], *args: Any, context: Any = None) -> Ordered:
        timer = Ordered(when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True
        return timer


class LoopKernel(VirtualClock):
    """The simulator's clock, on an event loop."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    @property
    def now(self) -> float:  # type: ignore[override]
        return self._loop.time()

    def time(self) -> float:
        return self._loop.time()

    def call_at(self, when: float, callback: Callable[..., object], /, *args: Any) -> Ordered:  # type: ignore[override]
        return self._loop.call_at(when, self._fire, callback, args)

    def _fire(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        if self._going():
            callback(*args)
        if not self._going():
            self._loop.stop()

    def run(self, going: Callable[[], bool], until: float) -> bool:
        self._going = going
        end = self._loop.call_at(until, self._loop.stop)
        self._loop.run_forever()
        end.cancel()
        return self._loop.time() < until


class Answer:
    """What `fairlead.gateway.session` is to the live driver."""

    def __init__(self, simulation: "UnderAsyncio", number: int) -> None:
        self._simulation, self._number = simulation, number

    def route(self, route: Route) -> None:
        self._simulation._route(route)

    def reject(self, reject: Reject) -> None:
        self._simulation._reject(reject)

    def hold(self, seconds: float) -> None: ...

    def fail(self) -> None:
        raise AssertionError(f"request {self._number} could not be answered")


class UnderAsyncio(Simulation):
    """Fed through the live driver, which also keeps the pipeline's timers."""

    def __init__(self, loop: VirtualLoop, *arguments: Any) -> None:
        super().__init__(*arguments, kernel=LoopKernel(loop))
        self.driver = Driver(self.pipeline, loop, self)

    def on_decision(self, record: Any, duration_s: float) -> None: ...

    def on_outcome(self, record: Any) -> None: ...

    def feed(self, event: ev.Event) -> None:
        if isinstance(event, ev.RequestArrived):
            event = ev.RequestArrived(event.request, Answer(self, event.request.id))
        self.driver.feed(event)

    def _do(self, instructions: Any) -> None:
        """Only the first instructions come this way."""
        self.driver.start()


@pytest.mark.parametrize("policy", ["default", "weights-322", "random"])
def test_the_kernel_and_asyncio_decide_alike(mooncake_head, policy):
    for scenario in (mooncake(mooncake_head, 8.0), headline(12.0, seconds=15.0)):
        simulated = Simulation(scenario, policy_from(f"policy: {policy}"), 5)
        simulated.run()
        loop = VirtualLoop(START)
        try:
            live = UnderAsyncio(loop, scenario, policy_from(f"policy: {policy}"), 5)
            assert live.run()
            assert not loop.failures
        finally:
            loop.close()
        assert live.decision_hash == simulated.decision_hash
        assert [job.server for job in live.jobs] == [job.server for job in simulated.jobs]
        assert len(live.pipeline.fleet.ledger) == len(simulated.pipeline.fleet.ledger) == 0
