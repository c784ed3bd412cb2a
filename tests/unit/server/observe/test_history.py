"""What is kept of the last hour whether or not somebody looks."""

import logging

import pytest
from waiting_rules import AbleRules

from fairlead.core.binding import PairBinder
from fairlead.core.endpoint import BaseModels, Endpoint, Sample
from fairlead.core.fairness import StartTimeFair
from fairlead.core.fleet import EJECT_SECONDS, Fleet
from fairlead.core.flow_control import FlowControl, FlowController
from fairlead.core.gates import LedgerGate
from fairlead.core.queues import Queues
from fairlead.core.records import OutcomeRecord
from fairlead.core.request import Request
from fairlead.core.stalls import FORGOTTEN_S, OUT_OF_USE, SUSPECT, TRIED, WELL
from fairlead.core.table import ON_DEMAND
from fairlead.plugins.flow_control import Fcfs
from fairlead.server.observe.history import HISTORY, POINT, History, Out
from fairlead.server.observe.model_rows import models_out
from fairlead.server.observe.snapshot_shape import HANGS
from fairlead.server.observe.watch import Watch


def test_adapters_of_endpoints_in_use_are_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of endpoints may have hundreds of adapters each, and any may change at any time."""
    table = Fleet().table
    for number in range(20):
        slot = table.add(Endpoint(f"e{number}", f"10.0.0.{number}:80", {"model-id": "m"}))
        table.set_listed(slot, frozenset(f"{number}-{each}" for each in range(20)))
    looked_up: list[str] = []
    known = table.listing
    monkeypatch.setattr(table, "listing", lambda name: looked_up.append(name) or known(name))
    assert models_out(table, ()) == set()
    assert models_out(table, {"e7"}) == {f"7-{each}" for each in range(20)}
    assert len(looked_up) < 30


class Pool:
    def __init__(self) -> None:
        self.now = 0.0
        self.fleet = Fleet()
        self.fleet.up(Endpoint("a", "10.0.0.1:80"))
        self.watch = Watch(self.fleet, lambda: self.now)
        self.history = History(self.watch, self.now, lambda: 1e6)

    def passes(self, seconds: float, *ends: tuple[int, str], took_s: float = 0.0) -> None:
        """With one request in each half second that ends so, after `took_s`."""
        for i in range(int(2 * seconds)):
            self.now += 0.5
            if ends:
                status, cause = ends[i % len(ends)]
                request = Request(id=i, arrived=self.now, model="m")
                record = OutcomeRecord(
                    request=request, at=self.now, endpoint="a", status=status, cause=cause, duration_ms=1e3 * took_s
                )
                self.watch.on_outcome(record)
            self.history.look(self.now)


def test_a_model_is_out_while_none_of_its_endpoints_can_answer() -> None:
    pool = Pool()
    fleet, troubles = pool.fleet, pool.watch.troubles

    def out() -> dict[str, float]:
        pool.passes(0.5)
        page = b"".join(pool.watch.exposition())
        shown = [line for line in page.splitlines() if line.startswith(b"fairlead_model_out{")]
        assert shown == [b'fairlead_model_out{model_name="%s"} 1' % name.encode() for name in pool.history.models_out]
        return pool.history.models_out

    for name, role, models, adapters in (("a", "", "m", "x y"), ("b", "prefill", "m", ""), ("c", "", "n", "x")):
        fleet.up(Endpoint(name, f"{name}:80", {"llm-d.ai/role": role}))
        slot = fleet.table.slot(name)
        assert slot is not None
        fleet.table.set_based(slot, BaseModels(frozenset(models.split())))
        fleet.table.set_listed(slot, frozenset(adapters.split()))
    assert out() == {} and "models-out" not in troubles.look()
    for _ in range(3):
        fleet.scrape_failed("a", pool.now)
    assert out() == {"m": 1.0, "y": 1.0}, "the other endpoint with the model only prefills"
    assert troubles.look()["models-out"] == "no endpoint in use can answer for m, y"
    fleet.table.set_listed(slot, frozenset({"x", ON_DEMAND}))
    assert out() == {"m": 1.0}, "c may load any adapter"
    fleet.up(Endpoint("new", "new:80"))
    assert out() == {}, "nobody knows what it serves"
    fleet.down("new")
    assert [*out()] == ["m"]
    fleet.table.set_listed(slot, None)
    assert [*out()] == ["m"], "nobody knows which adapters c has"
    fleet.table.set_listed(slot, frozenset())
    assert [*out()] == ["m", "x", "y"]
    fleet.up(Endpoint("c", "c:80", {"model-id": "n", "lora-adapters": "x, y"}))
    fleet.table.set_listed(slot, frozenset())
    assert [*out()] == ["m"], "c has them by its label"
    pool.watch.watch_roles(any_role=True)
    assert out() == {}, "requests go to b too, whatever its role"
    pool.watch.watch_roles(any_role=False)
    assert [*out()] == ["m"]
    fleet.sampled("a", pool.now, pool.now, Sample(waiting=0, running=0))
    assert out() == {}


def test_an_endpoint_that_answers_is_in_use_though_its_metrics_cannot_be_read() -> None:
    pool = Pool()
    slot = pool.fleet.table.slot("a")
    assert slot is not None
    pool.fleet.table.set_based(slot, BaseModels(frozenset({"m"})))
    pool.passes(5.0, (200, "natural"))
    for _ in range(3):
        pool.fleet.scrape_failed("a", pool.now)
    pool.passes(2.0, (500, "natural"))
    assert [*pool.history.out] == ["a"] and [*pool.history.models_out] == ["m"], "those answers were before"
    pool.passes(2.0, (200, "client-disconnect"), (200, "upstream-reset"))
    assert [*pool.history.out] == ["a"], "only headers may have come"
    pool.passes(2.0, (200, "natural"))
    assert not pool.history.out and not pool.history.models_out
    pool.passes(59.0)
    assert not pool.history.out
    pool.passes(3.0)
    assert pool.history.out["a"].since == 5.5 and [*pool.history.models_out] == ["m"]
    pool.passes(40.0)
    pool.passes(2.0, (200, "natural"), took_s=90.0)
    assert not pool.history.out, "an answer may take longer than a minute"


def test_a_target_that_no_endpoint_has_is_out() -> None:
    """Of a split, which goes on sending its share there."""
    pool = Pool()
    table = pool.fleet.table

    def out() -> list[str]:
        pool.passes(0.5)
        return [*pool.history.models_out]

    table.know({"chat", "m", "new"}, {"m", "new"})
    assert out() == [], "nobody knows what the endpoint serves"
    pool.fleet.up(Endpoint("a", "10.0.0.1:80", {"model-id": "m"}))
    assert out() == [], "or which adapters"
    table.set_listed(table.slot("a") or 0, frozenset())
    assert out() == ["new"]
    pool.fleet.up(Endpoint("b", "b:80", {"model-id": "new"}))
    table.set_listed(table.slot("b") or 0, frozenset())
    assert out() == []
    pool.fleet.down("b")
    assert out() == ["new"], "it left, but the definition sends requests there"
    table.know({"chat", "m"}, {"m"})
    assert out() == []


def test_an_hour_is_kept_and_no_more() -> None:
    pool = Pool()
    pool.passes(HISTORY + 300.0)
    points = pool.history.points
    assert len(points) == HISTORY / POINT
    assert points[0].at == 1e6 + 300.0 + POINT
    assert points[-1].at == 1e6 + pool.now


def test_rates_are_of_the_last_ten_seconds_however_often_somebody_looks() -> None:
    pool = Pool()
    pool.passes(0.5, (200, "natural"))
    assert pool.history.rates.error_rate is None, "too early to tell"
    pool.passes(30.0, (200, "natural"), (503, "natural"), (0, "endpoint-gone"), (400, "natural"))
    for _ in range(9):
        pool.history.look(pool.now)
    rates = pool.history.rates
    assert (rates.client_errors_per_s, rates.server_errors_per_s, rates.error_rate) == (0.5, 1.0, 0.75)
    pool.passes(20.0)
    assert pool.history.rates.error_rate is None


def test_every_request_fails_from_the_first_failure_to_the_first_answer() -> None:
    pool = Pool()
    pool.passes(10.0, (200, "natural"))
    pool.passes(1.5, (503, "natural"))
    assert pool.history.failing_since is None, "a few are no outage"
    pool.passes(10.0, (503, "natural"), (0, "endpoint-gone"), (404, "natural"))
    assert pool.history.failing_since == 10.0
    pool.passes(0.5, (200, "natural"))
    assert pool.history.failing_since is None


def test_an_outage_is_over_when_nobody_asks_any_more() -> None:
    pool = Pool()
    pool.passes(10.0, (503, "natural"))
    assert pool.history.failing_since == 0.0
    pool.passes(90.0)
    assert pool.history.failing_since is None


def test_why_an_endpoint_is_out_and_since_when() -> None:
    pool = Pool()
    pool.passes(5.0)
    for _ in range(3):
        pool.fleet.answered(0, False, pool.now)
    pool.passes(0.5)
    assert pool.history.out == {"a": Out("3 failed answers in a row", 5.5)}
    assert pool.history.notes() == ["endpoints whose answers fail: a"]
    pool.watch.on_silence("a", "cannot connect: Connection refused")
    for _ in range(3):
        pool.fleet.scrape_failed("a", pool.now)
    pool.passes(0.5)
    assert pool.history.out == {"a": Out("connection refused", 5.5)}
    assert pool.history.notes() == [], "the trouble `scrapes` says it"
    pool.fleet.sampled("a", pool.now, pool.now, Sample())
    pool.fleet.answered(0, True, pool.now)
    pool.passes(0.5)
    assert pool.history.out == {}


def test_a_hang_that_is_tested_is_one_outage() -> None:
    pool = Pool()
    for level, out in ((SUSPECT, False), (OUT_OF_USE, True), (TRIED, True), (SUSPECT, True), (WELL, False)):
        pool.fleet.table.set_suspicion(0, level)
        pool.passes(0.5)
        assert pool.history.out == ({"a": Out(HANGS, 1.0)} if out else {})
        assert pool.history.notes() == ["endpoints that hang: a"] * out


def test_an_endpoint_that_fails_again_after_each_try_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    pool = Pool()
    out = b'\nfairlead_endpoint_out{endpoint="a",why="fails"} 1\n'
    with caplog.at_level(logging.INFO, "fairlead"):
        for _ in range(3):
            for _ in range(3):
                pool.fleet.answered(0, False, pool.now)
            pool.passes(0.5)
            assert out in pool.watch.metrics.registry.render()
            pool.passes(EJECT_SECONDS + 0.5)
            assert out in pool.watch.metrics.registry.render(), "it is only tried"
            assert pool.history.out == {"a": Out("3 failed answers in a row", 0.5)}, "since the first time"
        pool.fleet.answered(0, True, pool.now)
        pool.passes(1.0)
        assert out not in pool.watch.metrics.registry.render()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_a_hang_goes_on_while_its_page_is_silent() -> None:
    pool = Pool()
    pool.fleet.table.set_suspicion(0, OUT_OF_USE)
    pool.passes(0.5)
    pool.watch.on_silence("a", "timeout")
    for _ in range(3):
        pool.fleet.scrape_failed("a", pool.now)
    pool.fleet.table.set_suspicion(0, SUSPECT)
    pool.passes(0.5)
    assert pool.history.out["a"].reason != HANGS
    pool.fleet.sampled("a", pool.now, pool.now, Sample())
    pool.passes(0.5)
    assert pool.history.out == {"a": Out(HANGS, 0.5)}


def test_an_endpoint_that_nobody_asks_fails_no_longer() -> None:
    pool = Pool()
    for _ in range(3):
        pool.fleet.answered(0, False, pool.now)
    pool.passes(EJECT_SECONDS + FORGOTTEN_S - 1.0)
    assert "a" in pool.history.out
    pool.passes(2.0)
    assert pool.history.out == {}


def test_metrics_that_cannot_be_read_take_no_endpoint_out() -> None:
    pool = Pool()
    pool.watch.on_silence("a", "status 404")
    pool.fleet.scrape_failed("a", pool.now, answered=True)
    pool.passes(0.5)
    assert pool.history.out == {}


def test_what_waits_has_arrived() -> None:
    """An overload is no falling traffic."""
    pool = Pool()
    flow = FlowControl(
        Queues(lambda priority: (StartTimeFair(), Fcfs())), LedgerGate(requests=1), PairBinder(AbleRules())
    )
    pool.watch.watch_queue(FlowController(flow, "p", 1.0))
    pool.fleet.charge(Request(id=0, arrived=0.0, prompt_tokens=10), 0, 0.0, 0, 10)
    for number in range(1, 31):
        flow.arrived(Request(id=number, arrived=pool.now, model="m", prompt_tokens=10), pool.fleet, pool.now)
        pool.passes(0.5)
    rates = pool.history.rates
    assert (rates.arrived_per_s, rates.per_s) == (2.0, 0.0)
    assert (pool.history.points[-1].arrived_per_s, pool.history.points[-1].waiting) == (2.0, 30)
