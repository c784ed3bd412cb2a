"""Explanations: terms that add up on every record of a run, and break-evens that hold when they are tried."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from fairlead.compat.load import load
from fairlead.compat.recorded import restore
from fairlead.config.plugins import build_policy
from fairlead.core.errors import NeverReturned
from fairlead.core.events import RequestArrived
from fairlead.core.explain import Candidate, Explanation, asked_again, explain, restored, terms_of, why
from fairlead.core.policy import Context, Policy
from fairlead.core.records import DecisionRecord
from fairlead.core.request import Request
from fairlead.core.snapshot import Snapshots
from fairlead.lab.simulator.journal import JournalError, decisions, one_run, runs, search
from fairlead.lab.simulator.replay import replay
from fairlead.plugins.policies.by_load import LeastRequests
from fairlead.server.journal.blocks import MAGIC, block
from fairlead.server.journal.records import DECIDED, ENDED, SEGMENT, Decided, Ended, Segment, encode, joined
from fairlead.server.observe.decisions import RecentDecisions, explained
from fairlead.testing import builders

PROFILE = "scorers: [{type: prefix-aware, weight: 3}, {type: queue, weight: 1}, {type: kv-utilization, weight: 2}]"


def maker(policy: str = "policy: default") -> Callable[[], Policy]:
    config = load(policy, need_endpoints=False)
    return lambda: build_policy(config)


def records(run: Any) -> list[DecisionRecord]:
    return [one for one in run.decisions if isinstance(one, DecisionRecord)]


QUEUE = "\nflowControl: {ttl: 300s, saturation: {type: concurrency-detector, maxConcurrency: 12}}"


@pytest.mark.parametrize(
    "policy",
    ["policy: default", "policy: {type: cost-model, parameters: {interference: 3}}", "policy: least-requests", PROFILE],
    ids=["cost model", "its weights", "a policy that ranks", "profile"],
)
def test_a_request_that_waited_is_explained_to_the_last_digit(
    policy: str, record_run: Callable[..., Any], tmp_path: Path
) -> None:
    made = record_run(tmp_path, policy + QUEUE, rate=25.0, seconds=4.0)
    assert replay(one_run(tmp_path)).identical
    waited = [record for record in records(made) if record.queued_ms > 0.0 and record.endpoint]
    assert len(waited) > 30
    fresh = maker(policy)
    for record in waited[::5]:
        trace = search(tmp_path, str(record.request.id)).decision.trace
        assert trace is not None and trace.waited is not None and record.trace is not None
        assert trace.waited == record.trace.waited
        assert trace.waited.closed_ms + trace.waited.kept_ms == pytest.approx(record.queued_ms, abs=1e-6)
        assert trace.waited.passed <= trace.waited.compared
        found = explain(fresh, record.request, trace, record.endpoint)
        assert found.reproduced and found.unit == "ms" and found.waited == trace.waited
        for one in found.candidates:
            assert sum(one.terms.values()) == pytest.approx(one.total, rel=1e-12)
        assert any("no endpoint was open" in line for line in found.why)
    assert max(one.trace.waited.sent for one in waited if one.trace and one.trace.waited) > 3


def test_who_was_refused_in_the_queue_is_told_why_it_waited(record_run: Callable[..., Any], tmp_path: Path) -> None:
    made = record_run(tmp_path, "policy: default" + QUEUE.replace("300s", "200ms"), rate=25.0, seconds=3.0)
    late = [record for record in records(made) if record.outcome == "rejected-ttl-expired"]
    assert late
    page = explained(late[-1], None, maker())
    assert page["explanation"] is None and "refused" in page["unexplained"]
    assert page["waiting"]["closed_ms"] == pytest.approx(late[-1].queued_ms, abs=0.01)
    assert "no endpoint was open" in page["waiting"]["why"][0]


@pytest.mark.parametrize(
    ("policy", "shown"),
    [("policy: default", "ms"), ("policy: least-requests", "cost"), (PROFILE, "points")],
    ids=["cost model", "a policy that ranks", "profile"],
)
def test_terms_add_up_on_every_record_of_a_run(
    policy: str, shown: str, record_run: Callable[..., Any], tmp_path: Path
) -> None:
    record_run(tmp_path, policy, rate=25.0, seconds=5.0)
    seen = set[str]()
    count = 0
    for found in decisions(one_run(tmp_path)):
        trace, request = found.decision.trace, found.decision.request
        assert trace is not None
        view = restored(trace)
        terms, unit = terms_of(build_policy(restore(found.scheduling)), request, view, trace)
        rated = np.isfinite(trace.total)
        total = sum(column for _, column in terms)
        assert np.allclose(total[rated], trace.total[rated], rtol=1e-12, atol=1e-9)
        seen |= {name for name, column in terms if np.any(column)}
        count += 1
    assert count > 100
    assert unit == shown
    if unit == "ms":
        assert seen >= {"prefill", "queue", "steps", "interference", "decode"}


def test_the_cost_models_terms_with_full_memory(recorded: Any) -> None:
    """The run's servers are never full, so the last term is tried by filling them."""
    record = records(recorded)[60]
    assert record.trace is not None
    view = restored(record.trace)
    view.table.kv[:] = 0.95
    view.table.capacity_tokens[:] = 50_000.0
    view.table.per_capacity[:] = 1 / 50_000.0
    policy: Any = maker()()
    terms, _ = terms_of(policy, record.request, view, record.trace)
    pick = policy.choose(record.request, view, _context(record))
    assert np.allclose(sum(column for _, column in terms), pick.trace.total, rtol=1e-12)
    assert (dict(terms)["memory"] < 0).all()


def _context(record: DecisionRecord) -> Any:
    from random import Random

    from fairlead.core.policy import Context

    return Context(record.at, Random(0))


def test_every_decision_is_reproduced(recorded: Any) -> None:
    fresh = maker()
    for record in records(recorded)[::7]:
        assert record.trace is not None
        found = explain(fresh, record.request, record.trace, record.endpoint)
        assert found.reproduced
        assert found.candidates[0].chosen
        assert found.candidates[0].endpoint == record.endpoint
        for one in found.candidates:
            assert one.total is not None
            assert sum(one.terms.values()) == pytest.approx(one.total, rel=1e-12)


def test_what_it_would_have_taken_is_true(recorded: Any) -> None:
    """With the tokens that are said an endpoint ties; with fewer it does not."""
    tried, fresh = 0, maker()
    for record in records(recorded)[::5]:
        trace = record.trace
        assert trace is not None
        found = explain(fresh, record.request, trace, record.endpoint)
        goal = found.candidates[0].total
        assert goal is not None
        for one in found.candidates[1:]:
            slot = trace.endpoints.index(one.endpoint)
            if one.behind is None or one.behind <= 0.0 or not one.more_cached_tokens:
                continue
            tried += 1
            for extra, enough in ((one.more_cached_tokens, True), (one.more_cached_tokens - 2, False)):
                changed = msgspec.structs.replace(trace, held=_held(trace, slot, extra / record.request.prompt_tokens))
                _, repeated = asked_again(fresh(), record.request, changed)
                assert (repeated.total[slot] >= goal - 1e-9) is enough or bool(repeated.total[slot] >= goal) is enough
    assert tried > 20


def _held(trace: Any, slot: int, more: float) -> Any:
    held = np.zeros(len(trace.endpoints)) if trace.held is None else trace.held.copy()
    held[slot] = min(held[slot] + more, 1.0)
    return held


@pytest.fixture(scope="module")
def crowded(record_run: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> list[DecisionRecord]:
    """Decisions of a run with more requests."""
    return records(record_run(tmp_path_factory.mktemp("crowded"), rate=36.0, seconds=8.0))


def test_who_held_more_and_lost_is_named(crowded: list[DecisionRecord]) -> None:
    fresh = maker()
    for record in reversed(crowded):
        assert record.trace is not None
        found = explain(fresh, record.request, record.trace, record.endpoint)
        chosen = found.candidates[0]
        best = max(found.candidates, key=lambda one: one.cached_tokens)
        if best.cached_tokens > chosen.cached_tokens + 1000:
            line = next(line for line in found.why if line.startswith(best.endpoint))
            assert f"{best.cached_tokens - chosen.cached_tokens:,} more cached tokens" in line
            assert " ms more although it holds " in line or " ms less and holds " in line
            return
    pytest.fail("the run has no decision against the larger hit")


def test_who_cost_less_and_has_less_free_cache_is_named(crowded: list[DecisionRecord]) -> None:
    told, fresh = 0, maker()
    for record in crowded[-80:]:
        assert record.trace is not None
        found = explain(fresh, record.request, record.trace, record.endpoint)
        chosen, *others = found.candidates
        for rival in others:
            if any(line.startswith(rival.endpoint) and "leave more of its cache free" in line for line in found.why):
                assert rival.behind is not None and rival.behind < 0 and rival.free_cache < chosen.free_cache
                told += 1
    assert told > 5


def test_the_page_of_one_decision(recorded: Any) -> None:
    journal = RecentDecisions(size=1000)
    for one in recorded.decisions:
        (journal.on_decisions if isinstance(one, DecisionRecord) else journal.on_outcomes)([one])
    record = records(recorded)[-1]
    assert journal.find("nobody") is None
    assert journal.find("last") == journal.find(str(record.request.id))
    for name in (str(record.request.id), f"0000cafe.{record.request.id:016x}", f"resp_{record.request.id}"):
        found = journal.find(name)
        assert found is not None
        assert found[0] is record
    assert journal.find(f"0000cafe.{record.request.id:016x}", "0000cafe.{:016x}".format) == found
    for name in (f"0000beef.{record.request.id:016x}", f"user.{record.request.id:x}"):
        assert journal.find(name, "0000cafe.{:016x}".format) is None, "an id of another run, and one of a client"
    page = explained(*found, maker())
    assert json.loads(json.dumps(page, allow_nan=False)) == msgspec.json.decode(msgspec.json.encode(page))
    assert page["explanation"]["candidates"][0]["endpoint"] == record.endpoint
    assert page["prediction"]["ttft_ms"]["actual"] > 0
    assert page["unexplained"] is None
    bare = explained(found[0], None, None)
    assert bare["explanation"] is None
    assert "journal.explain" in bare["unexplained"]


def test_the_journal_and_the_memory_say_the_same(recorded: Any) -> None:
    record = records(recorded)[40]
    outcome = next(
        one for one in recorded.decisions if not isinstance(one, DecisionRecord) and one.request.id == record.request.id
    )
    found = search(recorded.path, str(record.request.id))
    there = explained(found.decision, found.outcome, maker())
    assert there == explained(record, outcome, maker())
    assert search(recorded.path, f"0000cafe.{record.request.id:016x}").decision.request == record.request
    with pytest.raises(JournalError, match="no decision"):
        search(recorded.path, "99999999")


def arrived(at: float, number: int, external_id: str = "") -> Any:
    request = Request(id=number, arrived=at - 0.1, model="m", external_id=external_id or f"x{number}")
    return RequestArrived.__name__, at, RequestArrived(request)


def decided(at: float, number: int) -> Any:
    return DECIDED, at, Decided(request_id=number, endpoint="a")


def write(path: Path, kept: Iterable[Iterable[Any]], run: str = "0000cafe", label: str = "t") -> None:
    """Write a run with the records of some segments."""
    path.mkdir(exist_ok=True)
    for number, items in enumerate(kept):
        head = (SEGMENT, 0.0, Segment(run=run, number=number, epoch=0.0))
        encoded = [encode(item) for item in (head, *items)]
        (path / f"{label}-{number}.journal").write_bytes(MAGIC + block(joined(encoded, len(encoded))))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were read as a whole."""
    read = list[str]()
    read_bytes = Path.read_bytes

    def counted(path: Path) -> bytes:
        read.append(path.name)
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", counted)
    return read


def test_each_segment_is_read_once_however_many_requests_of_an_id_wait(tmp_path: Path, read: list[str]) -> None:
    """A client may send the same x-request-id with all requests."""
    waiting = [[arrived(second, 100 * second + i, "same") for i in range(50)] for second in range(4)]
    waiting[0] += [decided(0.5, 3), decided(0.6, 2), (ENDED, 0.7, Ended(request_id=2, endpoint="a"))]
    write(tmp_path, waiting)
    for wanted in ("same", "last"):
        read.clear()
        assert search(tmp_path, wanted).decision.request.id == 2
        assert sorted(read) == [f"t-{number}.journal" for number in range(4)]
    with pytest.raises(JournalError):
        search(tmp_path, "other")


def test_a_client_that_sends_a_number_hides_no_decision(tmp_path: Path) -> None:
    write(tmp_path, [(arrived(1.0, 1), decided(1.0, 1)), (arrived(2.0, 2, "1"), decided(2.0, 2))])
    last = (arrived(3.0, 3, "77"), decided(3.0, 3)), (arrived(4.0, 4, "02"), decided(4.0, 4))
    write(tmp_path, [*last], "0000beef", "u")
    recent = RecentDecisions(size=9)
    for number, name in ((1, "x1"), (2, "1"), (3, "77"), (4, "02")):
        asked = Request(id=number, arrived=0.0, model="m", external_id=name)
        recent.on_decisions([DecisionRecord(request=asked, at=1.0, policy="p", endpoint="a")])
    for wanted, number in (("1", 1), ("2", 2), ("77", 3), ("02", 4), ("x1", 1)):
        found = recent.find(wanted)
        assert found is not None
        assert search(tmp_path, wanted).decision.request.id == found[0].request.id == number


def test_who_arrived_before_a_lower_number_is_found_over_the_edge_of_a_segment(tmp_path: Path) -> None:
    """Numbers are given before prompts are read, and some take longer to read."""

    kept = (
        (arrived(1.0, 100), decided(1.0, 100), arrived(2.0, 102), arrived(2.0, 105), decided(2.0, 105)),
        (arrived(2.1, 101), decided(2.2, 101), decided(2.3, 102)),
        (arrived(2.4, 103), decided(2.4, 103)),
    )
    write(tmp_path, kept)
    for number in (100, 101, 102, 103, 105):
        for wanted in (f"0000cafe.{number:016x}", str(number), f"x{number}"):
            assert search(tmp_path, wanted).decision.request.external_id == f"x{number}"


def test_of_several_that_waited_over_the_edge_the_one_decided_last_is_the_newest(tmp_path: Path) -> None:
    later = [(decided(2.1, 2), decided(2.4, 1)), (decided(2.5, 3), arrived(2.6, 5))]
    write(tmp_path, [(arrived(1.0, 1, "same"), arrived(1.1, 2, "same"), arrived(1.2, 3), arrived(1.3, 4)), *later])
    assert search(tmp_path, "same").decision.request.id == 1
    assert search(tmp_path, "chatcmpl-same").decision.request.id == 1, "vLLM makes the answer's id of it"
    assert search(tmp_path, "last").decision.request.id == 3


def test_the_last_decision_may_be_of_a_run_before_the_newest(tmp_path: Path) -> None:
    """The scheduler or a worker has restarted and has decided nothing yet."""
    write(tmp_path, [(arrived(1.0, 1), decided(100.0, 1))], "0000aaaa", "20260101-a")
    write(tmp_path / "worker-1", [(arrived(1.0, 1), decided(200.0, 1))], "0000bbbb", "20260101-b")
    write(tmp_path / "worker-1", [(arrived(201.0, 9),)], "0000cccc", "20260102-c")
    assert search(tmp_path, "last").run == "0000bbbb"


@pytest.mark.parametrize(("queue", "part"), [("", 0.5), (QUEUE, 0.8)], ids=["at once", "after a long wait"])
def test_only_the_segments_that_can_have_the_decision_are_searched(
    queue: str, part: float, record_run: Callable[..., Any], tmp_path: Path, read: list[str]
) -> None:
    """A journal may have GiB; and the newest decision is asked for most often."""
    made = record_run(tmp_path, "policy: default" + queue, rate=25.0, seconds=5.0, turns=10, segment_bytes=25_000)
    (run,) = runs(tmp_path)
    assert len(run.segments) > 8
    all_of = {entry.decision.request.id: entry for entry in decisions(run)}
    newest = max(all_of.values(), key=lambda entry: (entry.decision.at, entry.decision.request.id))
    for wanted, entry in [
        ("last", newest),
        (f"0000cafe.{newest.decision.request.id:016x}", newest),
        *((str(record.request.id), all_of[record.request.id]) for record in records(made)[::40]),
        *((f"0000cafe.{record.request.id:016x}", all_of[record.request.id]) for record in records(made)[::40]),
    ]:
        read.clear()
        found = search(tmp_path, wanted)
        assert (found.decision.request, found.decision.at) == (entry.decision.request, entry.decision.at)
        assert (found.outcome, found.scheduling) == (entry.outcome, entry.scheduling)
        assert found.decision.queued_ms == entry.decision.queued_ms
        if entry is newest:
            assert len(read) <= len(run.segments) * part


def test_another_policy_on_the_same_numbers(recorded: Any) -> None:
    record = records(recorded)[50]
    assert record.trace is not None
    same, _ = asked_again(maker()(), record.request, record.trace)
    assert same == record.endpoint
    least, _ = asked_again(maker("policy: least-requests")(), record.request, record.trace)
    view = restored(record.trace)
    load_of = view.table.queue + view.table.active
    assert load_of[view.table.ids.index(least)] == load_of.min()


async def test_the_admin_page_of_one_decision(recorded: Any) -> None:
    from aiohttp.test_utils import TestClient, TestServer

    from fairlead.core.fleet import Fleet
    from fairlead.server.admin import Admin, AdminSources
    from fairlead.server.observe.watch import Watch

    watch = Watch(Fleet(), lambda: 0.0)
    for one in recorded.decisions:
        watch.on_decision(one, 0.0) if isinstance(one, DecisionRecord) else watch.on_outcome(one)
    sources = AdminSources(
        metrics=watch.exposition,
        unready=list,
        endpoints=watch.endpoints,
        decisions=watch.decisions,
        decision=lambda name: watch.decision(name, lambda policy: maker()()),
    )
    record = records(recorded)[-1]
    async with TestClient(TestServer(Admin(sources).make_app())) as client:
        found = await client.get(f"/debug/decisions/{record.request.id}")
        assert found.status == 200
        page = await found.json()
        assert page["explanation"]["reproduced"]
        assert page["endpoint"] == record.endpoint
        for name in ("nobody", "99999999", "x.zz", "%ff"):
            missing = await client.get(f"/debug/decisions/{name}")
            assert missing.status == 404
            assert "fairlead explain" in await missing.text()


def test_the_gateway_tells_the_id_only_when_asked_to() -> None:
    from fairlead.core.errors import ConfigError
    from fairlead.gateway.envoy.config import route_config
    from fairlead.gateway.envoy.options import Options

    assert "response_headers_to_add" not in route_config(Options())
    (added,) = route_config(Options(decision_header="x-fairlead-decision"))["response_headers_to_add"]
    assert added["header"] == {
        "key": "x-fairlead-decision",
        "value": "%DYNAMIC_METADATA(envoy.lb:fairlead-lease)%",
    }
    for name in ("content-length", ":status", "x-a b", "x-%REQ(authorization)%"):
        with pytest.raises(ConfigError, match="decision_header"):
            Options(decision_header=name).check()
        with pytest.raises(ConfigError, match=r"journal\.header"):
            load(f"journal: {{header: '{name}'}}", need_endpoints=False)


def test_a_copy_for_later_requests_is_said_to_be_one() -> None:
    terms = {"queue": -120.0}
    holder = Candidate(endpoint="old", chosen=False, total=-120.0, behind=20.0, cached_tokens=5000, terms=terms)
    new = Candidate(endpoint="new", chosen=True, total=-100.0, terms={"prefill": -250.0, "reuse": 150.0})
    said = "new has far fewer requests than the holders; later requests will use its copy too"
    assert said in why([new, holder], "ms")
    plain = Candidate(endpoint="new", chosen=True, total=-100.0, terms={"prefill": -100.0})
    assert said not in why([plain, holder], "ms")


@pytest.mark.parametrize(
    ("chosen", "rival", "said"),
    [
        (-0.412, -0.447, "old costs 0.035 ms more: load +0.035"),
        (0.0, -0.31, "old costs 0.310 ms more: load +0.310"),
        (-3.25, -4.12, "old costs 0.87 ms more: load +0.87"),
        (-139.93, -141.0, "old costs 1.1 ms more: load +1.1"),
    ],
)
def test_numbers_have_significant_digits(chosen: float, rival: float, said: str) -> None:
    new = Candidate(endpoint="new", chosen=True, total=chosen, terms={"load": chosen})
    old = Candidate(endpoint="old", chosen=False, total=rival, behind=chosen - rival, terms={"load": rival})
    assert why([new, old], "ms") == [said]
    assert why([new, old], "cost") == [said.replace(" ms", "")]


class Fails(LeastRequests):
    def terms(self, request: Any, fleet: Any, cycle: Any) -> Any:
        raise NeverReturned


def test_a_policy_that_fails_when_it_is_asked_again_is_said_to(recorded: Any) -> None:
    record = records(recorded)[0]
    page = explained(record, None, Fails)
    assert page["explanation"] is None
    assert page["unexplained"].startswith("cost-model failed when it was asked again: NeverReturned: did not return")


class Avoids(LeastRequests):
    """The first endpoint only if there is no other."""

    def cost(self, request: Any, fleet: Any, cycle: Any) -> Any:
        return np.where(np.arange(len(fleet.table)) == 0, np.inf, 1.0 + np.arange(len(fleet.table)))


def test_an_infinite_cost_is_named_and_is_no_number() -> None:
    known, asked = builders.fleet("e0", "e1", "e2"), builders.request()
    trace = Avoids().choose(asked, known, Context(0.0, Random(0), trace=True)).trace
    assert trace is not None
    trace.snapshot = Snapshots()(known, 0.0)
    found = explain(Avoids, asked, trace, "e1")
    rows = [(one.endpoint, one.total, one.behind, one.removed_by, one.terms) for one in found.candidates]
    assert rows == [
        ("e1", -2.0, None, (), {"cost": -2.0}),
        ("e2", -3.0, 1.0, (), {"cost": -3.0}),
        ("e0", None, None, ("infinite cost",), {}),
    ]
    assert found.why[-1] == "1 of 3 endpoints were filtered out by infinite cost"


def test_a_policy_without_costs_is_said_to_have_named_none() -> None:
    record = DecisionRecord(request=builders.request(), at=0.0, policy="mine", endpoint="e0", trace=None)
    assert explained(record, None, maker())["unexplained"].startswith("mine gave none: it names no costs")


def failed(cost: Callable[[], Any], *names: str) -> Explanation:
    """The explanation of a decision for the last endpoint by a policy with this `cost`."""

    class Failing(LeastRequests):
        def cost(self, *_: Any) -> Any:
            return cost()

    fleet, request = builders.fleet(*names), builders.request()
    snapshot = Snapshots()(fleet, 0.0)
    trace = Failing().choose(request, fleet, Context(0.0, Random(0), trace=True)).trace
    assert trace is not None
    trace.snapshot = snapshot
    return explain(Failing, request, trace, names[-1])


@pytest.mark.parametrize("cost", [lambda: np.full(2, np.nan), lambda: 1 / 0], ids=["nan", "raises"])
def test_a_policy_that_failed_is_the_reason(cost: Callable[[], Any]) -> None:
    found = failed(cost, "e0", "e1")
    assert len(found.why) == 2 and " failed: " in found.why[0] and "drawn at random" in found.why[1]
    assert not any(one.removed_by for one in found.candidates)


def test_where_a_policy_failed_nothing_was_drawn_if_there_was_no_choice() -> None:
    for cost in (lambda: np.full(1, np.nan)), (lambda: 1 / 0):
        found = failed(cost, "e0")
        assert " failed: " in found.why[0] and found.why[1:] == ("e0 was the only endpoint",)
        assert not found.candidates[0].removed_by
    found = failed(lambda: np.array([np.nan, 1.0]), "e0", "e1")
    assert found.why[1:] == ("1 of 2 endpoints were filtered out by NaN or infinite cost",)


def test_a_long_error_of_a_policy_keeps_its_line() -> None:
    def cost() -> None:
        raise ValueError("x" * 5000)

    why = failed(cost, "e0", "e1").why[0]
    assert "xxx (test_explain.py, line " in why and len(why) < 300
