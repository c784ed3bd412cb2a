"""A plugin that never returns is interrupted, and the event loop goes on."""

import asyncio
import logging
import time
from random import Random
from threading import Thread
from typing import Any

import pytest

from fairlead.core.canary import Canary
from fairlead.core.errors import NeverReturned, PluginError
from fairlead.core.fairness import Strict
from fairlead.core.flow import Waiting
from fairlead.core.policy import Context, Key, Picked, choose_or_raise, clamped, notified
from fairlead.core.profile import Profile
from fairlead.plugins.guarding import GuardedCeiling, GuardedFairness, GuardedOrdering, Measuring, Parsing
from fairlead.plugins.params import NoParams
from fairlead.plugins.pickers import RoundRobin
from fairlead.plugins.policies.by_load import LeastRequests
from fairlead.server import plugin_watch
from fairlead.server.observe.log import LogfmtFormatter
from fairlead.server.plugin_watch import PluginWatch, watched
from fairlead.testing import cycle, endpoint, fleet, request

WAITING = Waiting(request(), 0.0, 60.0, 1.0, 1)


class Endless:
    """As a policy or scorer; catches what it can."""

    name = "endless"

    def choose(self, request: Any, fleet: Any, context: Any) -> Any:
        while True:
            try:
                sum(range(10))
            except Exception:
                continue

    def score(self, request: Any, fleet: Any, cycle: Any) -> Any:
        return self.choose(request, fleet, cycle)


class EndlessPart(Endless):
    """As a parser, metric source, ordering or ceiling."""

    paths: tuple[str, ...] = ("/v1/rank",)
    provides: tuple[str, ...] = ("load",)

    def parse(self, path: Any, body: Any) -> Any:
        return self.choose(path, body, None)

    def measure(self, endpoint: Any, page: Any) -> Any:
        return self.choose(endpoint, page, None)

    def key(self, waiting: Any) -> Any:
        return self.choose(waiting, None, None)

    def allowed(self, level: Any, priorities: Any) -> Any:
        return self.choose(level, priorities, None)


class EndlessQueue(Strict):
    def queued(self, waiting: Any) -> Any:
        return EndlessPart().key(waiting)


class EndlessTurns(Strict):
    def turns(self, window: int) -> Any:
        yield EndlessPart().key(window)


class Stubborn(Endless):
    """Ends once this many exceptions came."""

    def __init__(self, count: int) -> None:
        self.count = count

    def choose(self, request: Any, fleet: Any, context: Any) -> Any:
        while self.count:
            try:
                super().choose(request, fleet, context)
            except BaseException:
                self.count -= 1
        return Picked(1)


@pytest.fixture
async def watch() -> Any:
    made = PluginWatch(asyncio.get_running_loop(), limit_s=0.02)
    yield made
    made.close()


def scoring() -> Profile:
    return Profile("profile", [], [(clamped(Endless()), 1.0)], RoundRobin(NoParams()))


def context() -> Context:
    return Context(0.0, Random(1))


@pytest.mark.parametrize("canary", [Endless(), scoring()], ids=["policy", "scorer"])
async def test_the_primary_goes_on_and_a_canary_that_did_not_return_decides_no_more(watch: Any, canary: Any) -> None:
    errors: list[PluginError] = []
    policy = Canary(LeastRequests(), canary, 100.0, errors.append)
    for _ in range(2):
        pick = policy.choose(request(), fleet("e0", "e1"), context())
        assert isinstance(pick, Picked) and pick.by == ""
        await asyncio.sleep(0)
    assert watch.count == 1
    (error,) = errors
    assert error.plugin == "endless" and "did not return and was interrupted" in str(error)
    assert "(test_plugin_watch.py, line " in str(error) and "this canary decides nothing more" in str(error)


def test_without_an_event_loop_it_is_interrupted_in_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_watch, "ALONE_S", 0.05)
    errors: list[str] = []

    def play() -> None:
        with watched():
            for _ in range(2):
                try:
                    choose_or_raise(Endless(), request(), fleet("e0", "e1"), context())
                except NeverReturned as error:
                    errors.append(str(error))

    play()
    thread = Thread(target=play)
    thread.start()
    thread.join(20)
    assert errors == ["did not return and was interrupted"] * 4


class Remembers(LeastRequests):
    def chosen(self, request: Any, slot: int, fleet: Any, cycle: Any) -> None:
        EndlessPart().key(slot)


async def test_a_policy_that_is_told_of_its_picks_is_interrupted(watch: Any) -> None:
    errors: list[PluginError] = []
    policy, asked, known = Remembers(), request(), fleet("e0", "e1")
    policy.report_to(errors.append)
    for _ in range(3):
        assert isinstance(notified(policy.choose(asked, known, context()), asked, known), Picked)
        await asyncio.sleep(0)
    assert watch.count == 2 and "it is left out for 60 s" in str(errors[-1])


async def test_a_scorer_is_left_out_of_that_decision(watch: Any) -> None:
    errors: list[PluginError] = []
    profile = scoring()
    profile.report_to(errors.append)
    assert isinstance(profile.choose(request(), fleet("e0", "e1"), context()), Picked)
    assert [error.plugin for error in errors] == ["endless"] and watch.count == 1


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda report: Parsing([EndlessPart()], report)("/v1/rank", b"{}"), "endless"),
        (lambda report: Measuring([EndlessPart()], report)(endpoint("a"), b""), "endless"),
        (lambda report: GuardedOrdering(EndlessPart(), report).key(WAITING), "endless"),
        (lambda report: GuardedCeiling(EndlessPart(), report).allowed(0.5, [0]), "endless"),
        (lambda report: GuardedFairness(EndlessQueue(), report).queued(WAITING), Strict.name),
        (lambda report: list(GuardedFairness(EndlessTurns(), report).turns(8)), Strict.name),
    ],
    ids=["parser", "source", "ordering", "ceiling", "fairness queued", "fairness turns"],
)
async def test_plugins_of_all_kinds_are_interrupted(watch: Any, call: Any, name: str) -> None:
    errors: list[PluginError] = []
    call(errors.append)
    (error,) = errors
    assert error.plugin == name and "did not return and was interrupted" in str(error) and watch.count == 1


async def test_it_can_be_closed_at_any_moment() -> None:
    for _ in range(20):
        watch = PluginWatch(asyncio.get_running_loop(), limit_s=0.002)
        for number in range(100_000):
            str(number)
        watch.close()


async def test_one_that_goes_on_is_named(watch: Any, caplog: pytest.LogCaptureFixture) -> None:
    policy = Canary(LeastRequests(), Stubborn(9), 100.0)
    policy.choose(request(), fleet("e0", "e1"), context())
    (record,) = [record for record in caplog.records if "held up" in record.getMessage()]
    assert "Stubborn.choose (test_plugin_watch.py" in LogfmtFormatter().format(record)


async def test_what_is_no_plugin_is_named_by_where_it_is(watch: Any, caplog: pytest.LogCaptureFixture) -> None:
    def held_up() -> list[logging.LogRecord]:
        return [record for record in caplog.records if "held up" in record.getMessage()]

    def busy() -> None:
        deadline = time.monotonic() + 60.0
        while not held_up() and time.monotonic() < deadline:
            sum(range(10))

    cycle().once(Key[None]("busy"), busy)
    assert 'plugin=false where="Cycle.once (policy.py, line' in LogfmtFormatter().format(held_up()[0])
