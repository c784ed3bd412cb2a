"""Flow-control plugins that misbehave cost nobody a request."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from leases import dispatched

from fairlead.core.errors import PluginError
from fairlead.core.fairness import RoundRobin
from fairlead.core.fleet import Fleet
from fairlead.core.flow import Waiting
from fairlead.core.queues import Queues
from fairlead.core.request import Request
from fairlead.plugins.flow_control import Fcfs
from fairlead.plugins.guarding import GuardedFairness, GuardedOrdering, GuardedSaturation


def boom(*_: object) -> Any:
    raise RuntimeError("boom")


class Forgetful(RoundRobin):
    """Offers nobody."""

    def turns(self, window: int) -> Any:
        return iter(())


class Stale(RoundRobin):
    """Offers those that have left too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Waiting] = []

    def queued(self, waiting: Waiting) -> None:
        super().queued(waiting)
        self.seen.append(waiting)

    def turns(self, window: int) -> Any:
        return [self.seen]


class Garbled(RoundRobin):
    """Offers what is no request."""

    def turns(self, window: int) -> Any:
        return [[5]]


def failing(method: str) -> Callable[[], RoundRobin]:
    def make() -> RoundRobin:
        made = RoundRobin()
        setattr(made, method, boom)
        return made

    return make


KINDS = [*(pytest.param(failing(name), True, id=name) for name in ("queued", "left", "turns", "spent"))]
KINDS += [
    pytest.param(Garbled, True, id="garbled"),
    pytest.param(Forgetful, False, id="forgetful"),
    pytest.param(Stale, False, id="stale"),
]


def served(queues: Queues, now: float) -> Iterable[int]:
    band = queues.bands()[0]
    while band.count:
        waiting = next(iter(queues.turns(band, 4)))[0]
        dispatched(queues, waiting, now, 5.0)
        queues.validate()
        yield waiting.request.id


@pytest.mark.parametrize(("make", "reported"), KINDS)
def test_fairness(make: Callable[[], Any], reported: bool) -> None:
    errors: list[PluginError] = []
    queues = Queues(lambda priority: (GuardedFairness(make(), errors.append), Fcfs()))
    waiting = []
    for i in range(12):
        waiting.append(queues.put(Request(id=i, arrived=0.0, model="ab"[i % 2]), float(i), 100.0, 1.0)[0])
        if i == 5:
            queues.remove(waiting[3])
    assert sorted(served(queues, 20.0)) == [i for i in range(12) if i != 3]
    assert bool(errors) is reported
    assert len(errors) <= 1, "it is not asked again"
    assert sum(flow.served for flow in queues.bands()[0].flows.values()) == 55


def test_an_ordering_that_fails_ranks_by_arrival() -> None:
    class Wild:
        name = "wild"

        def key(self, waiting: Waiting) -> Any:
            return [float("nan"), None, "x", 1e309][waiting.number % 4]

    errors: list[PluginError] = []
    queues = Queues(lambda priority: (RoundRobin(), GuardedOrdering(Wild(), errors.append)))
    for i in range(8):
        queues.put(Request(id=i, arrived=0.0), 10.0 - i, 100.0, 1.0)
    assert list(served(queues, 20.0)) == [7, 6, 5, 4, 3, 2, 1, 0]
    assert len(errors) == 8 and errors[0].plugin == "wild"


@pytest.mark.parametrize("level", [boom, lambda *_: float("nan"), lambda *_: None])
def test_a_saturation_that_fails_stops_nobody(level: Any) -> None:
    class Full:
        name = "full"

        def level(self, fleet: Fleet, now: float) -> Any:
            return level()

    errors: list[PluginError] = []
    assert GuardedSaturation(Full(), errors.append).level(Fleet(), 1.0) == 0.0
    assert len(errors) == 1
