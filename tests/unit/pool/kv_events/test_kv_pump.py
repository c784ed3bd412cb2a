"""Sharing the loop: turns, budget, background work."""

import asyncio
import time

from fairlead.pool.kv_events.pump import Pump


class Job:
    """Some steps of work; each takes a time on a clock that the test owns."""

    def __init__(self, name: str, steps: int, log: list[str], clock: list[float]) -> None:
        self.name, self.steps, self.log, self.clock = name, steps, log, clock

    def step(self, now: float) -> bool:
        self.clock[0] += 0.0001
        self.log.append(self.name)
        self.steps -= 1
        return self.steps > 0


async def settle(turns: int = 50) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


async def held(clock: list[float]) -> list[float]:
    """How long each turn of the loop was held."""
    times = []
    for _ in range(50):
        before = clock[0]
        await asyncio.sleep(0)
        times.append(clock[0] - before)
    return [time for time in times if time]


async def test_no_turn_is_longer_than_allowed() -> None:
    clock, log = [0.0], list[str]()
    pump = Pump(asyncio.get_running_loop(), 0.0005, lambda now: False, lambda: clock[0])
    jobs = [Job(name, 40, log, clock) for name in "ab"]
    for job in jobs:
        pump.wake(job)
        pump.wake(job)
    times = await held(clock)
    assert log.count("a") == log.count("b") == 40
    assert max(times) <= 0.0006001
    assert len(times) >= 16
    assert "b" in log[:12]  # one does not wait for the other to finish


async def test_the_loop_serves_others_in_between() -> None:
    clock, log = [0.0], list[str]()
    loop = asyncio.get_running_loop()
    pump = Pump(loop, 0.0005, lambda now: False, lambda: clock[0])
    pump.wake(Job("a", 100, log, clock))

    def other() -> None:
        log.append("-")
        if len(log) < 90:
            loop.call_soon(other)

    loop.call_soon(other)
    await settle()
    assert log.count("-") >= 10


async def test_others_get_as_much_time_as_long_steps() -> None:
    log = list[str]()
    loop = asyncio.get_running_loop()
    pump = Pump(loop, 0.0005, lambda now: False)

    class Slow(Job):
        def step(self, now: float) -> bool:
            until = time.thread_time() + 0.02
            while time.thread_time() < until:
                pass
            return super().step(now)

    first, second = Slow("a", 5, log, [0.0]), Slow("b", 1, log, [0.0])
    pump.wake(first)
    pauses, turn = 0.0, loop.time()
    while len(log) < 6:
        before = len(log)
        await asyncio.sleep(0)
        pauses, turn = pauses + (loop.time() - turn if before == len(log) else 0.0), loop.time()
        if before != len(log) == 5:
            pump.wake(second)  # it has waited for nothing, but the turn before was a long one
    assert log == [*"aaaaab"] and pauses > 0.08


async def test_background_work_is_done_when_nobody_has_any() -> None:
    clock, log = [0.0], list[str]()
    left = [25]

    def tend(now: float) -> bool:
        clock[0] += 0.0001
        log.append("tend")
        left[0] -= 1
        return left[0] > 0

    pump = Pump(asyncio.get_running_loop(), 0.0005, tend, lambda: clock[0])
    pump.wake(Job("a", 10, log, clock))
    assert max(await held(clock)) <= 0.0006001
    assert log == ["a"] * 10 + ["tend"] * 25
    left[0] = 2
    pump.poke()
    await settle()
    assert left[0] == 0


async def test_a_closed_pump_does_nothing() -> None:
    log = list[str]()
    pump = Pump(asyncio.get_running_loop(), 0.0005, lambda now: False)
    pump.wake(Job("a", 1, log, [0.0]))
    pump.close()
    pump.wake(Job("b", 1, log, [0.0]))
    pump.poke()
    await settle()
    assert log == []


async def test_a_worker_that_fails_stops_nobody_and_is_woken_again() -> None:
    log = list[str]()
    pump = Pump(asyncio.get_running_loop(), 0.0005, lambda now: False)

    class Failing(Job):
        def step(self, now: float) -> bool:
            super().step(now)
            raise RecursionError

    failing = Failing("a", 1, log, [0.0])
    pump.wake(failing)
    pump.wake(Job("b", 2, log, [0.0]))
    await settle()
    assert log == ["a", "b", "b"]
    pump.wake(failing)
    await settle()
    assert log == ["a", "b", "b", "a"]
