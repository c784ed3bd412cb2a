"""An answer of a policy that may come from anywhere is plain Python, or a failed decision with its cause."""

from random import Random
from typing import Any

import numpy as np
import pytest
from profiles import choose, fleet_of, profile

from fairlead.core import events as ev
from fairlead.core.endpoint import Endpoint
from fairlead.core.errors import PluginError
from fairlead.core.fleet import Fleet
from fairlead.core.policy import Answer, Context, Cycle, Picked, Refused, Stage, checked
from fairlead.core.records import DecisionRecord, Trace
from fairlead.core.request import Request
from fairlead.core.scheduler import Pipeline
from fairlead.core.tokens import TokenEstimator
from fairlead.plugins.guarding import GuardedFilter, GuardedPicker
from fairlead.server.journal.blocks import decided
from fairlead.server.journal.records import DECIDED, Packer, encode
from fairlead.server.sdk.simple import SimplePolicy
from fairlead.testing import SimClock, fleet


class Answers:
    name = "mine"

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def choose(self, request: Request, fleet: Fleet, context: Context) -> Answer:
        return self._answer  # type: ignore[no-any-return]


def cycle() -> Cycle:
    return Cycle(Context(0.0, Random(1)))


def decision(answer: Any) -> tuple[DecisionRecord, list[str]]:
    errors = list[PluginError]()
    pipeline = Pipeline(SimClock(), Random(1), Fleet(), Answers(answer), TokenEstimator(), errors.append)
    pipeline.handle(ev.EndpointUp(Endpoint("e0", "10.0.0.1:80")))
    made = pipeline.handle(ev.RequestArrived(Request(id=1, arrived=0.0)))
    (record,) = (each for each in made if isinstance(each, DecisionRecord))
    encode((DECIDED, 0.0, decided(record)))
    if record.trace is not None:
        Packer().pack(record)
    return record, [str(error) for error in errors]


NUMPY = Picked(
    np.int64(0),  # type: ignore[arg-type]
    overloaded=np.bool_(True),  # type: ignore[arg-type]
    hit_share=np.float32(0.5),  # type: ignore[arg-type]
    alternatives=(np.int64(0),),  # type: ignore[arg-type]
    trace=Trace(
        ("e0",),
        scorers=[("mine", np.float64(1.0), [0.5])],
        total=[np.float64(0.5)],
        outcome="picked",
    ),
)


@pytest.mark.parametrize("answer", [NUMPY, Refused("full", status=np.int64(429))], ids=["picked", "refused"])  # type: ignore[arg-type]
def test_numbers_of_numpy_become_plain(answer: Any) -> None:
    record, errors = decision(answer)
    assert not errors and type(record.overloaded) is bool and type(record.status) is int
    assert record.policy == "mine"


def test_every_number_of_a_pick_is_plain() -> None:
    pick = checked(NUMPY, fleet("e0"))
    assert isinstance(pick, Picked)
    plain = [type(value) for value in (pick.slot, *pick.alternatives, pick.overloaded, pick.hit_share)]
    assert plain == [int, int, bool, float]


WRONG: list[tuple[Any, str]] = [
    (0, "answered int, expected Picked or Refused; for slot 0 return Picked(0)"),
    (np.int64(0), "for slot 0 return Picked(0)"),
    (None, "answered NoneType, expected Picked or Refused"),
    (Picked(0.0), "a slot is float, expected int"),  # type: ignore[arg-type]
    (Picked(0, by=5), "by is int, expected str"),  # type: ignore[arg-type]
    (Picked(0, by=b"me"), "by is bytes, expected str"),  # type: ignore[arg-type]
    (Picked(0, by="\ud800"), "surrogates not allowed"),
    (Picked(0, overloaded="no"), "overloaded is str, expected bool"),  # type: ignore[arg-type]
    (Picked(0, hit_share=float("nan")), "must be finite"),
    (Picked(0, notify=lambda *given: None), "notify is function, expected that of a profile's pick"),  # type: ignore[arg-type]
    (Picked(0, trace="because"), "trace is str, expected Trace"),  # type: ignore[arg-type]
    (Picked(0, trace=Trace(("e0",), total=np.zeros(3))), "total of the trace is float64 of shape (3,)"),
    (Refused(5), "reason is int, expected str"),  # type: ignore[arg-type]
    (Refused("full", by=5), "by is int, expected str"),  # type: ignore[arg-type]
    (Refused("full", status=200), "HTTP status 200"),
]


@pytest.mark.parametrize(("answer", "cause"), WRONG, ids=[cause for _, cause in WRONG])
def test_a_wrong_answer_is_a_failed_decision(answer: Any, cause: str) -> None:
    record, errors = decision(answer)
    assert record.endpoint == "e0" and record.policy == "mine"
    assert len(errors) == 1 and errors[0].startswith("plugin mine: ") and cause in errors[0]


class Refuses:
    """A filter that leaves no endpoint, and answers what it was made with."""

    name, stage = "mine", Stage.ABILITY

    def __init__(self, refusal: Any, demotion: Any = None) -> None:
        self._refusal, self._demotion = refusal, demotion

    def keep(self, request: Any, fleet: Any, cycle: Any) -> Any:
        return [self._refusal is None] * len(fleet.table)

    def refusal(self, request: Any, fleet: Any, cycle: Any) -> Any:
        return self._refusal

    def demote(self, request: Any, fleet: Any, cycle: Any) -> Any:
        return self._demotion


@pytest.mark.parametrize("refusal", ["no", Refused(5)], ids=["text", "number"])  # type: ignore[arg-type]
def test_a_wrong_refusal_of_a_filter_is_reported_and_replaced(refusal: Any) -> None:
    errors: list[PluginError] = []
    pick = choose(profile([GuardedFilter(Refuses(refusal))], errors=errors), fleet_of(2))
    assert isinstance(pick, Refused) and pick.reason == "rejected-no-endpoints"
    assert [error.plugin for error in errors] == ["mine"]


@pytest.mark.parametrize(("demotion", "factor"), [([0.5, 9.0], 1.0), ([0.5, -1.0], 0.0)], ids=["above", "below"])
def test_a_demotion_stays_in_its_range(demotion: Any, factor: float) -> None:
    made = GuardedFilter(Refuses(None, demotion)).demote(Request(id=1, arrived=0.0), fleet_of(2), cycle())
    assert made is not None and made.tolist() == [0.5, factor]


@pytest.mark.parametrize("demotion", [[0.5, float("nan")], [0.5]], ids=["nan", "short"])
def test_a_wrong_demotion_is_reported(demotion: Any) -> None:
    with pytest.raises(ValueError, match="a demotion"):
        GuardedFilter(Refuses(None, demotion)).demote(Request(id=1, arrived=0.0), fleet_of(2), cycle())


def test_a_picker_gives_a_plain_slot() -> None:
    class Picks:
        name = "mine"

        def pick(self, request: Any, fleet: Any, totals: Any, cycle: Any) -> Any:
            return totals.argmax()

    slot = GuardedPicker(Picks()).pick(Request(id=1, arrived=0.0), fleet_of(2), np.array([0.0, 1.0]), cycle())
    assert (slot, type(slot)) == (1, int)


def test_a_simple_scheduler_that_returns_a_number_hears_what_is_expected() -> None:
    policy = SimplePolicy(lambda request, endpoints: 0, "mine")  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match="pick returned 0, expected the id of an endpoint"):
        policy.choose(Request(id=1, arrived=0.0), fleet("e0"), Context(0.0, Random(1)))
