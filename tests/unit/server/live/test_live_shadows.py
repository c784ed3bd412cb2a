"""What a running scheduler counts of schedulers on trial in other processes that do not answer."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from fairlead.compat.load import load
from fairlead.config.schema import SchedulerSettings
from fairlead.core.endpoint import ROLE_LABEL, Endpoint
from fairlead.core.events import Event, RemoteDown, RequestArrived
from fairlead.core.instructions import AskRemote, JudgeShadows
from fairlead.core.policy import Picked
from fairlead.core.records import ShadowCase
from fairlead.core.scheduler import Pipeline
from fairlead.core.shadow import CaseTaker
from fairlead.core.tokens import TokenEstimator
from fairlead.gateway.driver import Driver
from fairlead.plugins.policies.cost_model import CostModel, CostModelParams
from fairlead.server.live import shadows
from fairlead.server.live.shadows import RemoteShadow, make_bench
from fairlead.testing import SimClock, builders

CONFIG = load("endpoints: ['10.0.0.1:8000', '10.0.0.2:8000']")


class Silent:
    """Stands for `RemoteClient`: takes every question and answers none."""

    welcome = object()

    def __init__(self, name: str, settings: Any, fleet: Any, feed: Callable[[Event], None], *rest: Any, **more: Any):
        self.feed = feed
        self.asked: list[AskRemote] = []

    def start(self) -> None: ...

    def ask_as_of(self, question: AskRemote, *rest: Any) -> bool:
        self.asked.append(question)
        return True

    async def close(self) -> None: ...


def taken(count: int, *endpoints: Endpoint) -> list[ShadowCase]:
    """The cases of so many decisions."""
    found: list[ShadowCase] = []
    fleet, clock = builders.fleet(*(endpoints or ("a", "b"))), SimClock()
    policy, taker = CostModel(CostModelParams()), CaseTaker(1.0, Random(2))
    pipeline = Pipeline(clock, Random(1), fleet, policy, TokenEstimator(), shadows=taker)
    driver = Driver(pipeline, clock, Host(), {JudgeShadows: lambda judge: found.append(judge.case)})
    for number in range(count):
        driver.feed(RequestArrived(builders.request(f"{number}")))
    assert len(found) == count
    return found


class Host:
    def on_decision(self, record: Any, duration_s: float) -> None: ...

    def on_outcome(self, record: Any) -> None: ...


@pytest.mark.parametrize("queued", [1, 10])
def test_regret_is_the_time_that_is_lost_not_its_square(queued: int) -> None:
    bench, fleet = make_bench(CONFIG), builders.fleet("a", "b")
    builders.busy(fleet, "a", [builders.request("x" * 100_000) for _ in range(queued)])
    (judge,) = CaseTaker(1.0, Random(2)).take(builders.request("hello"), Picked(1), fleet, 0.0, 0.0)
    assert isinstance(judge, JudgeShadows)
    bench.open(judge.case)
    verdict = bench.verdict("s", 0)
    assert 0.0 < -verdict.gain_ms <= verdict.regret_ms < -1.1 * verdict.gain_ms


async def test_questions_without_an_answer_are_counted_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(shadows.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(shadows, "RemoteClient", Silent)
    settings, fleet = SchedulerSettings(address="127.0.0.1:1"), builders.fleet("a", "b")
    shadow = RemoteShadow("silent", settings, CONFIG, fleet, make_bench(CONFIG), lambda record: None, 1e9)
    for case in taken(600):  # more than may be open at once, but one per second
        shadow.ask(case)
        now[0] += 1.0
    assert not shadow.cut
    assert 585 < shadow.skipped["unanswered"] < 600 and shadow.skipped["lost"] == 0
    shadow.client.feed(RemoteDown("silent"))  # type: ignore[attr-defined]
    assert shadow.skipped["unanswered"] + shadow.skipped["lost"] == 600


async def test_it_learns_which_endpoints_may_compute_a_prompt_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadows, "RemoteClient", Silent)
    config = load("{endpoints: ['10.0.0.1:1'], filters: [{type: role}, {type: label-selector, matchLabels: {p: x}}]}")
    roles = (("a", "decode", "x"), ("b", "prefill", "other"), ("c", "prefill", "x"))
    pool = [builders.endpoint(name, labels={ROLE_LABEL: role, "p": where}) for name, role, where in roles]
    settings, fleet = SchedulerSettings(address="127.0.0.1:1"), builders.fleet(*pool)
    shadow = RemoteShadow("silent", settings, config, fleet, make_bench(config), lambda record: None, 1e9)
    shadow.ask(taken(1, *pool)[0])
    (question,) = shadow.client.asked  # type: ignore[attr-defined]
    assert (question.able.tolist(), question.computes.tolist()) == ([True, False, False], [True, False, True])
