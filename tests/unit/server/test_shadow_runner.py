"""Shadows in their thread: the event loop goes on whatever they do, and who misbehaves is cut off."""

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from fairlead.core.errors import PluginError
from fairlead.core.records import OutcomeRecord, ShadowCase, ShadowRecord, ShadowVerdict, Snapshot
from fairlead.core.request import Request
from fairlead.server import shadow_runner
from fairlead.server.shadow_runner import MAX_FAILURES, MAX_WAITING, ShadowRunner


def case(number: int) -> ShadowCase:
    snapshot = Snapshot(0.0, (), (), (), np.zeros((1, 0)), ())
    return ShadowCase(Request(id=number, arrived=0.0), 0, "e0", snapshot, None)


class Bench:
    """Asks policies that are plain functions of the case."""

    def open(self, case: ShadowCase) -> None:
        self._case = case

    def decide(self, name: str, policy: Callable[[ShadowCase], str]) -> ShadowVerdict:
        try:
            return ShadowVerdict(name, policy(self._case))
        except RuntimeError as error:
            return ShadowVerdict(name, error=str(error))

    def record(self, verdicts: Any) -> ShadowRecord:
        return ShadowRecord(self._case.request.id, 0.0, "e0", 0.0, tuple(verdicts))


class Rig:
    """A runner and what it told."""

    def __init__(self, policies: dict[str, Any], **options: Any) -> None:
        self.records: list[ShadowRecord] = []
        self.cut: dict[str, str] = {}
        self.errors: list[PluginError] = []
        options = {"cpu": 1.0, "limit": 30.0, **options}
        told = self.records.append, self.cut.__setitem__, self.errors.append
        self.runner = ShadowRunner(policies, Bench, *told, **options)

    async def until(self, ready: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not ready():
                await asyncio.sleep(0.001)


@pytest.fixture
async def rig() -> AsyncIterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(policies: dict[str, Any], **options: Any) -> Rig:
        made.append(Rig(policies, **options))
        return made[-1]

    yield make
    for one in made:
        one.runner.close()


def picks(case: ShadowCase) -> str:
    return "e1"


async def test_cases_are_judged_in_order_elsewhere(rig: Callable[..., Rig]) -> None:
    threads: set[int] = set()

    def where(case: ShadowCase) -> str:
        threads.add(threading.get_ident())
        return "e0"

    one = rig({"a": picks, "b": where})
    for number in range(20):
        one.runner.judge(case(number))
        await asyncio.sleep(0)
    await one.until(lambda: len(one.records) == 20)
    assert [record.request_id for record in one.records] == list(range(20))
    assert [verdict.shadow for verdict in one.records[0].verdicts] == ["a", "b"]
    assert threads and threading.get_ident() not in threads
    assert one.runner.stats.judged == 20 and one.runner.stats.cpu_s > 0


async def test_the_loop_goes_on_while_a_shadow_hangs_and_the_others_are_judged_after_it_is_cut_off(
    rig: Callable[..., Rig],
) -> None:
    inside, free = threading.Event(), threading.Event()

    def hangs(case: ShadowCase) -> str:
        inside.set()
        free.wait(30)
        return "e0"

    one = rig({"good": picks, "hangs": hangs}, limit=0.05)
    try:
        one.runner.judge(case(1))
        await one.until(inside.is_set)
        turns = 0
        while not one.cut:
            turns += 1
            await asyncio.sleep(0.001)
            assert turns < 20_000
        assert "did not come back" in one.cut["hangs"] and turns > 5, "the loop turned while it hung"
        one.runner.judge(case(2))
        await one.until(lambda: one.records)
        assert [verdict.shadow for verdict in one.records[0].verdicts] == ["good"]
        assert one.runner.stats.cut.keys() == {"hangs"}
    finally:
        free.set()


async def test_one_that_computes_without_end_does_not_do_so_for_ever(rig: Callable[..., Rig]) -> None:
    inside: list[threading.Thread] = []

    def computes(case: ShadowCase) -> str:
        inside.append(threading.current_thread())
        while True:
            pass

    one = rig({"computes": computes}, limit=0.02)
    one.runner.judge(case(1))
    await one.until(lambda: one.cut and not inside[0].is_alive())
    assert "did not come back" in one.cut["computes"]


async def test_one_that_takes_longer_than_the_limit_is_cut_off_though_it_came_back(rig: Callable[..., Rig]) -> None:
    one = rig({"slow": picks}, limit=1e-9)
    one.runner.judge(case(1))
    await one.until(lambda: one.cut)
    assert "slow" in one.runner.stats.cut


class Clocks:
    """The module `time` as the runner sees it, with seconds that did not pass."""

    def __init__(self) -> None:
        self.waited = 0.0
        self.asked = 0
        self.sleep, self.thread_time = time.sleep, time.thread_time

    def monotonic(self) -> float:
        self.asked += 1
        return time.monotonic() + self.waited


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    made = Clocks()
    monkeypatch.setattr(shadow_runner, "time", made)
    return made


async def test_a_wait_for_the_interpreter_is_not_the_shadows_time(rig: Callable[..., Rig], clocks: Clocks) -> None:
    def waits(case: ShadowCase) -> str:
        clocks.waited += 90.0
        return "e1"

    one = rig({"waits": waits})
    one.runner.judge(case(1))
    await one.until(lambda: one.records)
    assert not one.cut and one.records[0].verdicts[0].took_us < 1e6


async def test_a_busy_event_loop_cuts_nobody_off(rig: Callable[..., Rig], clocks: Clocks) -> None:
    inside, free = threading.Event(), threading.Event()

    def waits(case: ShadowCase) -> str:
        inside.set()
        free.wait(30)
        return "e1"

    one = rig({"waits": waits, "good": picks}, limit=0.05)
    try:
        one.runner.judge(case(1))
        inside.wait(30)
        one.runner.judge(case(2))
        clocks.waited += 90.0
        before = clocks.asked
        await one.until(lambda: one.cut)
        assert "did not come back" in one.cut["waits"]
        assert clocks.asked - before >= 3, "it looked late, and then again"
        one.runner.judge(case(3))
        await one.until(lambda: len(one.records) == 2)
        assert [record.request_id for record in one.records] == [2, 3], "what waited is judged by the next thread"
    finally:
        free.set()


async def test_failures_in_a_row_cut_off_and_one_success_begins_anew(rig: Callable[..., Rig]) -> None:
    def fails(case: ShadowCase) -> str:
        raise RuntimeError("no")

    def mostly(case: ShadowCase) -> str:
        if case.request.id % MAX_FAILURES:
            raise RuntimeError("no")
        return "e0"

    one = rig({"fails": fails, "mostly": mostly})
    for number in range(3 * MAX_FAILURES):
        one.runner.judge(case(number))
        await one.until(lambda number=number: len(one.records) == number + 1)
    assert one.cut.keys() == {"fails"} and "20 times in a row: no" in one.cut["fails"]
    assert [len(record.verdicts) for record in one.records[-3:]] == [1, 1, 1]


async def test_what_is_too_much_is_left_out_and_counted(rig: Callable[..., Rig]) -> None:
    free = threading.Event()

    def waits(case: ShadowCase) -> str:
        free.wait(30)
        return "e0"

    one = rig({"waits": waits})
    for number in range(MAX_WAITING + 50):
        one.runner.judge(case(number))
    assert 48 <= one.runner.stats.crowded <= 50
    free.set()
    await one.until(lambda: one.runner.stats.judged >= MAX_WAITING)


async def test_the_cpu_budget_holds(rig: Callable[..., Rig]) -> None:
    one = rig({"a": picks}, cpu=1e-9)
    one.runner.stats.cpu_s = 1.0
    one.runner.judge(case(1))
    assert one.runner.stats.over_budget == 1 and one.runner.stats.judged == 0


async def test_a_broken_bench_is_told_and_ends_nothing(rig: Callable[..., Rig]) -> None:
    class Broken(Bench):
        def open(self, case: ShadowCase) -> None:
            if case.request.id == 1:
                raise KeyError("x")
            super().open(case)

    records: list[ShadowRecord] = []
    runner = ShadowRunner({"a": picks}, Broken, records.append, limit=30.0, cpu=1.0)
    try:
        runner.judge(case(1))
        runner.judge(case(2))
        async with asyncio.timeout(20):
            while len(records) < 2:
                await asyncio.sleep(0.001)
        assert records[0].verdicts[0].error.startswith("KeyError") and not records[1].verdicts[0].error
    finally:
        runner.close()


async def test_closing_gives_the_switch_interval_back() -> None:
    before = sys.getswitchinterval()
    one = Rig({"a": picks})
    assert sys.getswitchinterval() <= before
    one.runner.judge(case(1))
    one.runner.close()
    one.runner.judge(case(2))
    await asyncio.sleep(0.02)
    assert sys.getswitchinterval() == before and one.records == []


class Learns:
    """A policy that hears of outcomes, and ends its call with `error` or not before `free`."""

    name = "learns"

    def __init__(self, error: Exception | None = None, free: threading.Event | None = None) -> None:
        self.heard: list[str] = []
        self.threads: set[int] = set()
        self._error, self._free = error, free

    def __call__(self, case: ShadowCase) -> str:
        return "e0"

    def ended(self, outcome: OutcomeRecord) -> None:
        self.heard.append(outcome.endpoint)
        self.threads.add(threading.get_ident())
        if self._free is not None:
            self._free.wait(30)
        if self._error is not None:
            raise self._error


def ends(*endpoints: str) -> list[OutcomeRecord]:
    return [OutcomeRecord(request=Request(id=1, arrived=0.0), at=1.0, endpoint=name) for name in endpoints]


async def test_shadows_that_learn_hear_of_outcomes_in_their_thread(rig: Callable[..., Rig]) -> None:
    policy, fails = Learns(), Learns(ValueError("oops"))
    one = rig({"a": picks, "b": policy, "c": fails})
    one.runner.hear(ends("e0", "e1"))
    one.runner.judge(case(1))
    await one.until(lambda: one.records and one.errors[1:])
    assert policy.heard == fails.heard == ["e0", "e1"] and threading.get_ident() not in policy.threads
    assert [verdict.error for verdict in one.records[0].verdicts] == ["", "", ""]
    assert "oops" in str(one.errors[0]) and not one.cut
    assert one.runner.stats.judged == 1 and one.runner.stats.unheard == 0


async def test_one_that_never_learns_to_return_is_cut_off(rig: Callable[..., Rig]) -> None:
    free = threading.Event()
    one = rig({"good": picks, "hangs": Learns(free=free)}, limit=0.05)
    try:
        one.runner.hear(ends("e0"))
        await one.until(lambda: one.cut)
        assert "did not come back" in one.cut["hangs"]
        one.runner.hear(ends("e0"))
        one.runner.judge(case(1))
        await one.until(lambda: one.records)
        assert [verdict.shadow for verdict in one.records[0].verdicts] == ["good"]
    finally:
        free.set()


async def test_outcomes_are_left_out_and_counted_when_it_is_too_much(rig: Callable[..., Rig]) -> None:
    free = threading.Event()
    one = rig({"slow": Learns(free=free)})
    try:
        for _ in range(MAX_WAITING + 10):
            one.runner.hear(ends("e0", "e1"))
        assert 2 * 9 <= one.runner.stats.unheard <= 2 * 10
    finally:
        free.set()
