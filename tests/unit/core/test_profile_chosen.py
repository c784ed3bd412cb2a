"""Plugins that want to know where requests go, and what failures among them cost: nothing but themselves."""

from random import Random

import numpy as np
import pytest

from fairlead.core.canary import Canary
from fairlead.core.columns import FloatColumn
from fairlead.core.errors import PluginError
from fairlead.core.fleet import Fleet
from fairlead.core.policy import Context, Cycle, Filter, Picked, Scorer, Stage, clamped, notified
from fairlead.core.profile import Profile
from fairlead.core.request import Request
from fairlead.plugins.params import NoParams
from fairlead.plugins.pickers import RoundRobin
from fairlead.plugins.policies.by_load import LeastRequests
from fairlead.server.observe.watch import Watch
from fairlead.testing import fleet, request


class Told:
    """A scorer and filter that notes what it is told."""

    def __init__(self, error: Exception | None = None, name: str = "told", hard: bool = False) -> None:
        self.name = name
        self.stage = Stage.ABILITY if hard else Stage.LOAD
        self.error = error
        self.slots: list[int] = []

    def keep(self, request: Request, fleet: Fleet, cycle: Cycle) -> None:
        return None

    def score(self, request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn | None:
        return None

    def chosen(self, request: Request, slot: int, fleet: Fleet, cycle: Cycle) -> None:
        self.slots.append(slot)
        if self.error is not None:
            raise self.error


class Nobody(Told):
    def keep(self, request: Request, fleet: Fleet, cycle: Cycle) -> np.ndarray:  # type: ignore[override,type-arg]
        return np.zeros(len(fleet.table), dtype=np.bool_)


def choose(
    filters: list[Filter], scorers: list[tuple[Scorer, float]], errors: list[PluginError] | None = None
) -> list[int]:
    report = None if errors is None else errors.append
    profile = Profile("p", filters, scorers, RoundRobin(NoParams()), report)
    context = Context(0.0, Random(1))
    asked, known = request(), fleet("e0", "e1")
    picks = [notified(profile.choose(asked, known, context), asked, known) for _ in range(3)]
    return [pick.slot if isinstance(pick, Picked) else -1 for pick in picks]


def test_every_choice_is_told_to_filters_and_scorers_even_behind_a_clamp() -> None:
    first, behind, filtering = Told(), Told(), Told()
    slots = choose([filtering], [(first, 1.0), (clamped(behind), 1.0)])
    assert first.slots == behind.slots == filtering.slots == slots == [0, 1, 0]


def test_the_fallback_is_told_too_and_a_refusal_is_not() -> None:
    shown = Told()
    assert choose([Nobody(hard=False)], [(shown, 1.0)]) == shown.slots == [0, 1, 0]
    refused = Told()
    assert choose([Nobody(hard=True)], [(refused, 1.0)]) == [-1, -1, -1]
    assert refused.slots == []


def test_one_that_raises_is_reported_and_the_others_still_hear() -> None:
    errors: list[PluginError] = []
    broken, shown = Told(RuntimeError("oops"), "broken"), Told()
    assert choose([], [(broken, 1.0), (shown, 1.0)], errors) == [0, 1, 0]
    assert shown.slots == [0, 1, 0]
    assert [error.plugin for error in errors] == ["broken"] * 3


class Raises(Told):
    def score(self, request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn | None:
        raise RuntimeError("oops")


class Strays(RoundRobin):
    def pick(self, request: Request, fleet: Fleet, totals: FloatColumn, cycle: Cycle) -> int:
        return 7


@pytest.mark.parametrize("where", ["scorer", "picker"])
def test_a_choice_that_is_discarded_for_a_failed_plugin_is_shown_to_none(where: str) -> None:
    errors: list[PluginError] = []
    shown, failing = Told(), Raises(name="failing")
    scorers: list[tuple[Scorer, float]] = [(shown, 1.0), *([(failing, 1.0)] if where == "scorer" else [])]
    profile = Profile("p", [], scorers, RoundRobin(NoParams()) if where == "scorer" else Strays(NoParams()))
    canary = Canary(LeastRequests(), profile, 100.0, errors.append)
    asked, known = request(), fleet("e0", "e1")
    pick = notified(canary.choose(asked, known, Context(0.0, Random(1))), asked, known)
    assert isinstance(pick, Picked) and pick.by == ""
    assert [error.plugin for error in errors] == ["failing" if where == "scorer" else profile.picker.name]
    assert shown.slots == failing.slots == []


def test_failures_are_counted_by_plugin(caplog: pytest.LogCaptureFixture) -> None:
    watch = Watch(Fleet(), lambda: 0.0)
    broken = Told(RuntimeError("oops"), "broken")
    profile = Profile("p", [], [(broken, 1.0)], RoundRobin(NoParams()), watch.on_plugin_error)
    asked, known = request(), fleet()
    for _ in range(3):
        notified(profile.choose(asked, known, Context(0.0, Random(1))), asked, known)
    page = b"".join(watch.exposition()).decode()
    assert 'fairlead_plugin_errors_total{plugin_name="broken"} 3' in page
    assert any("a plugin failed" in record.message for record in caplog.records)
