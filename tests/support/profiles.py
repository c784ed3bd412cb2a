"""Profiles of filters, scorers and pickers with fixed answers, and what a trace must add up to."""

from math import inf
from random import Random
from typing import Any

import numpy as np

from fairlead.core.columns import BoolColumn, FloatColumn
from fairlead.core.endpoint import Endpoint
from fairlead.core.errors import PluginError
from fairlead.core.fleet import Fleet
from fairlead.core.policy import Context, Cycle, Filter, Picked, Picker, Scorer, Stage
from fairlead.core.prefix import ChainHasher
from fairlead.core.profile import Profile
from fairlead.core.request import Request
from fairlead.plugins.pickers import MaxScore, MaxScoreParams

CHAIN = ChainHasher().chain(b"m", b"x" * 4096)
REQUEST = Request(id=1, arrived=0.0, prompt_tokens=1000, prompt_bytes=4096, prefix=CHAIN, session="s")


class Fixed:
    """A filter, scorer or picker with a fixed answer; an exception is raised."""

    def __init__(self, answer: object, name: str = "fixed", hard: bool = False) -> None:
        self.name = name
        self.stage = Stage.ABILITY if hard else Stage.LOAD
        self.answer = answer

    def _give(self) -> object:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def keep(self, request: Request, fleet: Fleet, cycle: Cycle) -> BoolColumn | None:
        return self._give()  # type: ignore[return-value]

    def score(self, request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn | None:
        return self._give()  # type: ignore[return-value]

    def pick(self, request: Request, fleet: Fleet, totals: FloatColumn, cycle: Cycle) -> int:
        return self._give()  # type: ignore[return-value]


class Demoting(Fixed):
    """Keeps all, demotes by the given factors."""

    def keep(self, request: Request, fleet: Fleet, cycle: Cycle) -> BoolColumn | None:
        return None

    def demote(self, request: Request, fleet: Fleet, cycle: Cycle) -> FloatColumn | None:
        return self._give()  # type: ignore[return-value]


def mask(*kept: int) -> BoolColumn:
    return np.array(kept, dtype=np.bool_)


def column(*values: float) -> FloatColumn:
    return np.array(values, dtype=np.float64)


def fleet_of(count: int) -> Fleet:
    fleet = Fleet()
    for number in range(count):
        fleet.up(Endpoint(f"e{number}", f"10.0.0.{number}:8000"))
    return fleet


def profile(
    filters: list[Filter] | None = None,
    scorers: list[tuple[Scorer, float]] | None = None,
    picker: Picker | None = None,
    errors: list[PluginError] | None = None,
) -> Profile:
    report = None if errors is None else errors.append
    return Profile("p", filters or [], scorers or [], picker or MaxScore(MaxScoreParams(near_tie=0)), report)


def choose(plan: Profile, fleet: Fleet, request: Request = REQUEST, trace: bool = True) -> Any:
    return plan.choose(request, fleet, Context(0.0, Random(1), trace))


def adds_up(pick: Picked) -> None:
    """Σ weight · score is the total wherever something was left."""
    trace = pick.trace
    assert trace is not None
    assert trace.total is not None
    total = np.zeros(len(trace.endpoints))
    for _, weight, scores in trace.scorers:
        assert scores.shape == total.shape
        total += weight * scores
    left = trace.total > -inf
    np.testing.assert_allclose(trace.total[left], total[left], rtol=1e-12, atol=1e-9)
    expected = np.ones(len(total), dtype=bool) if trace.candidates is None else trace.candidates
    np.testing.assert_array_equal(left, expected)
