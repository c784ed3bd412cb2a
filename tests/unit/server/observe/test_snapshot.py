"""What the dashboard is told, against the metrics page of the same moment."""

import re
from math import nan

import msgspec
import pytest

from fairlead.core.endpoint import BaseModels, Endpoint, Sample
from fairlead.core.fleet import Fleet
from fairlead.core.flow import LEFT, Refused
from fairlead.core.records import DecisionRecord, Forecast, OutcomeRecord, ShadowRecord, ShadowVerdict
from fairlead.core.request import Request
from fairlead.server.observe.endpoint_history import POINTS, STEP
from fairlead.server.observe.model_rows import ModelPoint
from fairlead.server.observe.snapshot import DECISIONS, MAX_FOUND, MODEL_ROWS, SnapshotMaker
from fairlead.server.observe.watch import Watch

REFUSED = Refused("rejected-no-endpoints", "no endpoint is available")


class Pool:
    """A watch over two endpoints, with a clock in hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.wall = 1_000_000.0
        self.reasons: list[str] = []
        self.fleet = Fleet()
        for name in ("a", "b"):
            self.fleet.up(Endpoint(f"default/{name}", f"10.0.0.{ord(name)}:80", {"llm-d.ai/role": "decode"}))
        self.watch = Watch(self.fleet, lambda: self.now, served=lambda: ["m", "n"])
        self.maker = SnapshotMaker(
            self.watch,
            lambda: self.now,
            lambda: self.wall,
            pool="default",
            policy=lambda: "cost-model",
            reasons=lambda: self.reasons,
        )

    def serve(
        self,
        number: int,
        endpoint: str = "default/a",
        ends: bool = True,
        status: int = 200,
        refused: Refused = REFUSED,
        prefill: str = "",
        **fields,
    ) -> None:
        """Decide about a request, and end it 50 ms later. Without an endpoint it is `refused`."""
        shown = {"model": "m", "prompt_tokens": 200, "stream": True} | fields
        request = Request(id=number, arrived=self.now, **shown)
        forecast = Forecast() if prefill else Forecast(ttft_ms=20.0, low_ms=10.0, high_ms=40.0)
        record = DecisionRecord(
            request=request,
            at=self.now,
            policy="p",
            endpoint=endpoint,
            address="x:1" if endpoint else "",
            prefill=prefill,
            hit_tokens=50 if endpoint else 0,
            outcome="routed" if endpoint else refused.reason,
            status=200 if endpoint else refused.status,
            forecast=forecast if endpoint else None,
        )
        self.watch.on_decision(record, 2e-4)
        if endpoint and ends:
            self.watch.on_outcome(
                OutcomeRecord(
                    request=request, at=self.now + 0.05, endpoint=endpoint, status=status, ttft_ms=30.0,
                    duration_ms=50.0, prompt_tokens=200, completion_tokens=5, cached_tokens=40, hit_tokens=50,
                    forecast=forecast,
                )
            )  # fmt: skip

    def metric(self, name: str) -> float:
        page = b"".join(self.watch.exposition()).decode()
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE))


@pytest.fixture
def pool() -> Pool:
    return Pool()


def test_counts_are_those_of_the_metrics_page(pool):
    pool.maker.begin()
    for i in range(20):
        pool.serve(
            i, "default/a" if i % 3 else "default/b", ends=i % 5 > 0, model="m" if i % 2 else "n", priority=i % 2
        )
    pool.serve(20, endpoint="")
    shot = pool.maker.take()
    totals = shot.totals
    assert totals.requests == pool.metric("llm_d_epp_request_total") == 21
    assert totals.errors == pool.metric("llm_d_epp_request_error_total") == 1
    assert totals.refused == pool.metric("fairlead_rejected_total") == 1
    assert totals.running == pool.metric("llm_d_epp_request_running") == 4
    assert totals.hit_tokens == pool.metric("kv_cache_hit_total") == 1000
    assert totals.prompt_tokens == pool.metric("kv_cache_lookup_total")
    assert totals.forecasts == pool.metric("fairlead_ttft_forecasts_total") == 16
    assert shot.leases == pool.metric("fairlead_leases")
    assert shot.index_size == pool.metric("index_size")
    rows = {(row.model, row.priority): (row.requests, row.errors, row.running) for row in shot.traffic}
    assert rows == {("n", "0"): (10, 0, 2), ("m", "1"): (10, 0, 2), ("m", "0"): (1, 1, 0)}


def test_requests_that_cannot_be_read_have_a_rate_and_an_error_rate(pool):
    """They are counted before anybody looks: no decision tells of them."""
    for _ in range(19):
        pool.watch.on_client_error("chat", 400, "bad-request", {})
    pool.watch.on_client_error("chat", 400, "model", None)  # of a request that was decided about
    pool.now += 1.0
    pool.maker.begin()
    (row,) = pool.maker.take().models
    assert (row.model, row.requests, row.per_s, row.error_rate) == ("", 19, 2.0, 1.0)
    pool.now += 20.0
    (row,) = pool.maker.take().models
    assert (row.requests, row.per_s, row.error_rate) == (19, 0.0, None)


def test_an_endpoint_says_what_is_known_of_it(pool):
    pool.fleet.sampled("default/a", 99.0, 99.5, Sample(waiting=3, running=2, kv_usage=0.25))
    pool.maker.begin()
    pool.serve(1)
    pool.now += 1.0
    a, b = pool.maker.take().endpoints
    assert (a.id, a.role, a.fresh, a.age_s, a.waiting, a.running, a.kv) == (
        "default/a",
        "decode",
        True,
        1.5,
        3,
        2,
        0.25,
    )
    assert (a.sent, a.hit_rate, a.predicted_ms, a.actual_ms, a.judged, a.inside) == (1, 0.25, 20.0, 30.0, 1, 1.0)
    assert (a.source, a.trust) == ("learned", 0.8)
    assert (b.fresh, b.age_s, b.waiting, b.sent, b.hit_rate, b.actual_ms, b.trust) == (
        False,
        None,
        None,
        0,
        *[None] * 3,
    )


def test_a_pair_has_a_first_token_and_no_forecast(pool):
    pool.maker.begin()
    pool.serve(1, prefill="default/b")
    pool.now += 1.0
    shot = pool.maker.take()
    row, (a, _) = shot.decisions[0], shot.endpoints
    assert (row.predicted_ms, row.ttft_ms) == (None, 30.0)
    assert (a.predicted_ms, a.actual_ms, a.judged, a.inside) == (None, 30.0, 0, None)


def test_the_endpoint_that_computes_a_prompt_was_sent_it_and_has_its_hits(pool):
    pool.maker.begin()
    pool.serve(1, prefill="default/b")
    pool.serve(2)
    pool.now += 1.0
    shot = pool.maker.take()
    assert [(row.sent, row.hit_rate) for row in shot.endpoints] == [(2, 0.25), (1, 0.25)]
    assert [row.prefill for row in shot.decisions] == ["", "default/b"]
    assert pool.metric("fairlead_prefills_total") == 1
    assert [row.id for row in pool.maker.search({"endpoint": "default/b"}).decisions] == [1]


def test_the_models_of_an_endpoint_without_label_are_those_that_it_lists(pool):
    pool.fleet.up(Endpoint("default/c", "10.0.0.99:80", {"model-id": "labelled"}))
    for slot in (0, 2):
        pool.fleet.table.set_based(slot, BaseModels(frozenset({"qwen", "Qwen/Qwen3-32B"})))
    pool.maker.begin()
    assert [row.model for row in pool.maker.take().endpoints] == ["Qwen/Qwen3-32B, qwen", "", "labelled"]


def test_times_of_day_follow_a_clock_that_is_set(pool):
    pool.maker.begin()
    pool.serve(1)
    before = pool.maker.take()
    pool.wall += 3600.0
    after = pool.maker.take()
    assert after.at - before.at == after.decisions[0].at - before.decisions[0].at == 3600.0


def test_nothing_is_listened_to_while_nobody_looks(pool):
    assert pool.watch.recent is None
    pool.maker.begin()
    assert pool.watch.recent is not None
    pool.maker.end()
    assert pool.watch.recent is None


def test_who_comes_later_sees_what_was_before(pool):
    for i in range(40):
        pool.now += 0.5
        pool.serve(i)
        pool.maker.history.look(pool.now)
    pool.maker.begin()
    shot = pool.maker.take()
    assert shot.latency.ttft.n == 21
    assert (shot.latency.ttft.p50, shot.latency.predicted.p50) == (30.0, 20.0)
    assert shot.totals.per_s == 2.0
    assert [row.sent for row in shot.endpoints] == [40, 0]
    history = pool.maker.beginning().history
    assert [point.at for point in history] == [1_000_105.0, 1_000_110.0, 1_000_115.0, 1_000_120.0]
    assert history[-1].ttft == (30.0, 30.0, 30.0)


def test_the_last_minute_is_estimated_from_what_the_journal_reaches_back(pool):
    for i in range(3000):
        pool.now += 0.02
        pool.serve(i, "default/a" if i % 4 else "default/b")
    pool.maker.begin()
    sent = [row.sent for row in pool.maker.take().endpoints]
    assert sent == [pytest.approx(2250, rel=0.01), pytest.approx(750, rel=0.01)]
    for i in range(3000):
        pool.now += 0.02
        pool.serve(i, "default/a" if i % 4 else "default/b")
    sent = [row.sent for row in pool.maker.take().endpoints]
    assert 2750 <= sum(sent) <= 3000, "all of it, but for a part of the oldest bin of five seconds"


def test_the_last_minute_is_not_known_if_the_journal_reaches_back_no_second(pool):
    for i in range(1100):
        pool.serve(i)
    pool.now += 0.9
    pool.maker.begin()
    shot = pool.maker.take()
    assert [row.sent for row in shot.endpoints] == [None, None]
    assert (shot.models[0].per_s, shot.models[0].error_rate) == (None, None)


def test_the_error_rate_of_a_model_includes_refusals(pool):
    pool.maker.begin()
    for i in range(8):
        pool.serve(i, endpoint="" if i < 6 else "default/a")
    pool.serve(8, endpoint="", refused=LEFT)
    pool.serve(9, model="n")
    m, n = pool.maker.take().models
    assert (m.model, m.errors, m.requests, m.error_rate) == ("m", 6, 9, pytest.approx(0.75))
    assert n.error_rate == 0.0


def test_requests_without_series_of_their_own_are_counted_and_measured_as_other(pool):
    pool.maker.begin()
    for i in range(95):
        pool.serve(i, model=f"made-up-{i}", status=404, priority=i % 2)
        pool.serve(1000 + i, model=f"made-up-{i}", target="m", status=404)
    pool.serve(2000)
    shot = pool.maker.take()
    rows = {(row.model, row.target, row.priority): (row.requests, row.per_s) for row in shot.traffic}
    assert rows == {
        ("other", "", "0"): (48, 48 / 9.5),
        ("other", "", "1"): (47, 47 / 9.5),
        ("other", "m", "0"): (95, 10.0),
        ("m", "", "0"): (1, 1 / 9.5),
    }
    other, m = shot.models
    assert (other.model, other.per_s, other.error_rate) == ("other", pytest.approx(20.0), 1.0)
    assert (m.model, m.error_rate) == ("m", 0.0)


def test_an_outage_shows_in_rates_and_no_failure_counts_as_a_first_token(pool):
    for i in range(20):
        pool.now += 0.5
        request = Request(id=i, arrived=pool.now, model="m", stream=True)
        outcome = OutcomeRecord(request=request, at=pool.now, endpoint="default/a", status=404 if i % 4 else 503,
                                duration_ms=2.0)  # fmt: skip
        pool.watch.on_outcome(outcome)
        pool.maker.history.look(pool.now)
    pool.maker.begin()
    shot = pool.maker.take()
    assert (shot.totals.error_rate, shot.totals.client_errors_per_s, shot.totals.server_errors_per_s) == (1.0, 1.5, 0.5)
    assert (shot.latency.ttft.n, shot.latency.answer.n) == (0, 0)
    assert shot.point.server_errors_per_s == 0.5


def test_long_tables_end_somewhere(pool):
    pool.maker.begin()
    for i in range(MODEL_ROWS + 10):
        pool.serve(i, model=f"model-{i}")
    shot = pool.maker.take()
    assert (len(shot.traffic), shot.traffic_left_out, len(shot.decisions)) == (MODEL_ROWS, 10, DECISIONS)
    assert (len(shot.models), shot.models_left_out) == (MODEL_ROWS, 10)
    assert [row.id for row in shot.decisions] == [*range(MODEL_ROWS + 9, MODEL_ROWS + 9 - DECISIONS, -1)]


def test_failing_models_are_not_left_out(pool):
    pool.maker.begin()
    for i in range(MODEL_ROWS + 10):
        for again in range(2 if i == MODEL_ROWS + 5 else 3):
            pool.serve(i, model=f"model-{i}", status=503 if again and i == MODEL_ROWS + 5 else 200)
    shot = pool.maker.take()
    assert (shot.models[0].model, shot.models[0].error_rate) == (f"model-{MODEL_ROWS + 5}", 0.5)


def test_a_model_is_told_with_its_targets_and_where_its_adapter_is(pool):
    pool.watch.on_models(["chat", "m", "sql"], [])
    pool.fleet.table.set_listed(0, frozenset({"sql", "idle"}))
    pool.fleet.table.set_based(0, BaseModels(frozenset({"m"})))
    pool.maker.begin()
    for i in range(4):
        pool.serve(i, model="chat", target="sql" if i else "m")
    chat, idle = pool.maker.take().models
    assert (chat.model, chat.requests, chat.hit_rate, chat.error_rate) == ("chat", 4, 0.25, 0.0)
    assert (chat.ttft_p50_ms, chat.ttft_p95_ms) == (30.0, 30.0)
    targets = {target.name: (target.share, target.endpoints, target.adapter) for target in chat.targets}
    assert targets == {"m": (0.25, 1, False), "sql": (0.75, 1, True)}
    assert (idle.model, idle.requests, idle.per_s, idle.ttft_p50_ms) == ("idle", 0, None, None)
    assert [target.endpoints for target in idle.targets] == [1]


def test_a_search_reaches_all_decisions_that_are_held(pool):
    for i in range(150):
        pool.serve(i, fairness_id="t" if i < 120 else "u")
    found = pool.maker.search({"tenant": "t"})
    assert (found.matches, found.searched, len(found.decisions)) == (120, 150, MAX_FOUND)
    assert [row.id for row in found.decisions[:2]] == [119, 118]
    assert found.decisions[0].tenant == "t"


def test_the_last_hour_of_an_endpoint_is_there_while_the_endpoint_is(pool):
    pool.fleet.sampled("default/a", 99.0, 99.5, Sample(waiting=0, running=0))
    pool.maker.history.look(pool.now)
    past = pool.maker.endpoint({"id": "default/a"})
    assert past is not None and [point.time for point in past.points] == [1_000_100.0]
    assert pool.maker.endpoint({"id": "default/z"}) is None and pool.maker.endpoint({}) is None


def test_the_last_hour_of_a_model_whether_or_not_somebody_looks(pool):
    pool.maker.history.look(pool.now)
    for step in range(300):
        for i in range(3):
            pool.serve(3 * step + i, model="m" if i else "n", endpoint="" if i == 2 else "default/a")
        pool.now += STEP
        pool.maker.history.look(pool.now)
    past = pool.maker.model({"name": "m"})
    assert (past.point_s, len(past.points)) == (STEP, POINTS)
    assert past.points[-1] == ModelPoint(pool.now + 1e6, 2 / STEP, 1 / STEP, 30.0, 30.0)
    nothing = pool.maker.model({"name": "unheard-of"}).points
    assert {(point.per_s, point.ttft_p50_ms) for point in nothing} == {(0.0, None)}


def test_shadows_tell_how_often_they_agree(pool):
    verdicts = (ShadowVerdict("x", "default/a", True), ShadowVerdict("y", "default/b", False, regret_ms=4.0))
    pool.watch.shadows.on_shadow(ShadowRecord(1, 0.0, "default/a", 1.0, verdicts))
    pool.watch.shadows.cut = lambda: {"z": "too slow"}
    pool.maker.begin()
    x, y, z = pool.maker.take().shadows
    assert (x.name, x.agree, x.differ, x.regret_ms) == ("x", 1, 0, 0.0)
    assert (y.name, y.agree, y.differ, y.regret_ms, y.primary_regret_ms) == ("y", 0, 1, 4.0, 1.0)
    assert (z.name, z.cut, z.regret_ms) == ("z", "too slow", None)


def test_what_is_not_finite_is_null(pool):
    pool.fleet.sampled("default/a", 99.0, 99.5, Sample(waiting=nan, running=1, kv_usage=nan))
    pool.maker.begin()
    row = msgspec.json.decode(msgspec.json.encode(pool.maker.take()))["endpoints"][0]
    assert (row["waiting"], row["kv"], row["running"]) == (None, None, 1)


def test_the_uptime_does_not_depend_on_the_time_of_day() -> None:
    pool = Pool()
    pool.maker.begin()
    pool.now += 30.0
    pool.wall -= 7_200.0
    assert pool.maker.take().running_s == 30.0
