"""A plugin that raises no `Exception` fails like any other; Ctrl+C, and what ends its thread, passes."""

import asyncio
import signal
import threading
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest

from fairlead.core import events as ev
from fairlead.core.endpoint import Endpoint
from fairlead.core.errors import EndsThread, PluginError, Stray, described
from fairlead.core.explain import asked_again
from fairlead.core.instructions import Route
from fairlead.core.policy import Context, Picked, choose_or_raise, interruptible
from fairlead.core.records import ShadowCase, Trace
from fairlead.core.request import Request
from fairlead.core.scheduler import Pipeline
from fairlead.core.shadow import Bench
from fairlead.core.snapshot import Snapshots
from fairlead.core.tokens import TokenEstimator
from fairlead.testing import SimClock, endpoint, fleet, request


class Panic(BaseException):
    """As what code in Rust raises."""


STRAY = [asyncio.CancelledError("no"), GeneratorExit("no"), Panic("no")]


class Raises:
    name = "raises"

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def choose(self, request: Any, fleet: Any, context: Any) -> Picked:
        raise self._error


@pytest.mark.parametrize("error", STRAY, ids=repr)
def test_a_request_is_routed_though_the_policy_raises_it(error: BaseException) -> None:
    clock, errors = SimClock(), list[PluginError]()
    pipeline = Pipeline(clock, Random(1), fleet(), Raises(error), TokenEstimator(), errors.append)
    pipeline.handle(ev.EndpointUp(Endpoint("e0", "10.0.0.1:80")))
    route = pipeline.handle(ev.RequestArrived(Request(id=1, arrived=clock.time())))[0]
    assert isinstance(route, Route)
    (told,) = errors
    assert str(told).startswith(f"plugin raises: {type(error).__name__}: no (test_stray_errors.py, line ")


@pytest.mark.parametrize("error", STRAY, ids=repr)
def test_a_shadow_that_raises_it_has_a_verdict(error: BaseException) -> None:
    known = fleet(endpoint("e0"))
    bench = Bench(lambda request, view, cycle: np.zeros(len(view.table)), lambda *_: None, Random(1))
    bench.open(ShadowCase(request(), 0, "e0", Snapshots()(known, 0.0), None))
    assert bench.decide("c", Raises(error)).error.startswith(f"{type(error).__name__}: no (")


def test_what_ends_the_thread_passes() -> None:
    with pytest.raises(EndsThread):
        choose_or_raise(Raises(EndsThread()), request(), fleet(), Context(0.0, Random(1)))


def again() -> None:
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        raise


def for_long() -> None:
    threading.Timer(0.05, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
    while True:
        pass


def in_a_loop() -> None:
    async def waits() -> None:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(60)

    asyncio.run(waits())


@pytest.mark.parametrize("call", [lambda: signal.raise_signal(signal.SIGINT), again, for_long, in_a_loop])
def test_ctrl_c_in_a_plugin_passes(call: Callable[[], None]) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            interruptible(call)
    finally:
        signal.signal(signal.SIGINT, before)


def test_its_description_is_that_of_its_cause() -> None:
    with pytest.raises(Stray) as caught:
        interruptible(Raises(Panic("no")).choose, None, None, None)
    assert described(caught.value).startswith("Panic: no (test_stray_errors.py, line ")


def test_explain_fails_by_it_as_by_any_error() -> None:
    known = fleet(endpoint("e0"))
    trace = Trace(endpoints=known.table.ids, snapshot=Snapshots()(known, 0.0))
    with pytest.raises(Stray):
        asked_again(Raises(asyncio.CancelledError()), request(), trace)
