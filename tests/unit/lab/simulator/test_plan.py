"""The least number of replicas: the search with made-up answers, objectives, and one small real plan."""

from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

import fairlead.lab.simulator.plan as searching
from fairlead.core.request import Request
from fairlead.lab.simulator.build import ScenarioSpec, build
from fairlead.lab.simulator.objective import decided_after_s, goodput, hopeless, objectives
from fairlead.lab.simulator.plan import Case, Trial, Tried, attempt, first_guess, impossible, least, plan, settle, sized
from fairlead.lab.simulator.plan_report import document, lines, print_plan, write_plan
from fairlead.lab.simulator.simulation import NOT_OVER, START
from fairlead.lab.simulator.world import Job
from fairlead.lab.workload.record import Record, arranged

SIZES = st.integers(1, 300)


# ---- the search ----


@given(border=SIZES, guess=SIZES, most=SIZES, width=st.integers(1, 5))
def test_the_border_is_found_with_few_questions(border, guess, most, width):
    asked = []

    def holds(sizes):
        asked.append(list(sizes))
        return [size >= border for size in sizes]

    assert least(holds, guess, most, width) == (border if border <= most else None)
    flat = [size for sizes in asked for size in sizes]
    assert len(flat) == len(set(flat)), "nothing is asked twice"
    assert all(1 <= size <= most and len(sizes) <= width for sizes in asked for size in sizes)
    assert len(asked) <= 2 + 2 * max(most, 2).bit_length()


@given(border=st.floats(2.0, 40.0), blur=st.floats(0.01, 1.0), guess=st.integers(1, 60), seed=st.integers(0, 10_000))
def test_noise_at_the_border_moves_the_answer_by_one_at_most(border, blur, guess, seed):
    """Each seed has its own border; what is meant is the size that half of the seeds hold."""
    chance = Random(seed)
    borders = [border + chance.uniform(-blur, blur) for _ in range(3)]

    def held(trial):
        return trial.replicas >= borders[trial.seed]

    planned = plan(_case(), _pretended(held), most=80, seeds=3, width=2)
    brute = next(n for n in range(1, 81) if sum(held(Trial(n, seed=s)) for s in range(3)) >= 2)
    assert planned.best is not None
    assert abs(planned.best.replicas - brute) <= 1
    assert planned.best.held >= 2
    assert {row.replicas for row in planned.rows} >= {planned.best.replicas, planned.best.replicas - 1} - {0}


def test_settling_goes_to_where_most_seeds_hold_on_both_sides():
    shares = {1: 0.0, 2: 0.0, 3: 0.4, 4: 0.7, 5: 1.0}

    def share(sizes):
        return [shares[size] for size in sizes]

    assert [settle(share, size, 5) for size in (2, 3, 4, 5)] == [4, 4, 4, 4]
    assert settle(lambda sizes: [0.0] * len(sizes), 4, 5) is None


def test_no_size_holds():
    planned = plan(_case(), _pretended(lambda trial: False), most=9, seeds=3, width=2)
    assert planned.best is None
    assert [row.replicas for row in planned.rows] == [7, 8, 9]
    assert document(planned, WANTED, 1.0, {})["replicas"] is None


def test_the_confidence_says_when_seeds_disagree():
    def words(borders):
        planned = plan(_case(), _pretended(lambda t: t.replicas >= borders[t.seed]), most=40, seeds=3)
        assert planned.best is not None
        return planned.best.replicas, planned.confidence

    assert words((7, 7, 7)) == (7, "clear")
    assert words((7, 8, 7)) == (7, "narrow")
    assert words((8, 7, 8)) == (8, "narrow")


def test_the_parts_of_a_split_pool_are_found():
    """Two of nine must prefill; fewer miss the first token, more miss the tokens after it."""

    def miss(trial):
        ttft, tpot = 2.0 / max(trial.prefill, 0.1), 7.0 / max(trial.replicas - trial.prefill, 0.1)
        return {"ttft_p95": ttft, "tpot_p95": tpot, "failed": 0.0}

    planned = plan(_case(), _pretended(lambda t: max(miss(t).values()) <= 1.0, miss), most=60, seeds=1, split=True)
    assert planned.best is not None
    assert (planned.best.replicas, planned.best.prefill) == (9, 2)


def test_what_is_there_now_is_shown_and_with_one_dead():
    planned = plan(_case(), _pretended(lambda t: t.replicas - t.dead >= 3), most=40, seeds=1, now=6)
    rows = {(row.replicas, row.dead): row.held for row in planned.rows}
    assert rows[6, 0] == rows[6, 1] == 1
    spare = plan(structs.replace(_case(), dead=2), _pretended(lambda t: t.replicas - t.dead >= 3), most=40, seeds=1)
    assert spare.best is not None
    assert (spare.best.replicas, spare.best.dead) == (5, 2)


WANTED = objectives("ttft_p95=2s,tpot_p95=50ms")


def _case():
    return Case(SMALL, WANTED, "policy: default\n")


def _pretended(holds, missed=lambda trial: {"ttft_p95": 2.0, "tpot_p95": 0.0, "failed": 0.0}):
    """Trials that nobody simulates. One that is missed is stopped, unless it is to be complete."""

    def run(trials):
        assert len(trials) == len(set(trials))
        made = []
        for trial in trials:
            held = holds(trial)
            ended = held or trial.complete
            measured = {"ttft_p95": 500.0 if held else 4000.0, "tpot_p95": 30.0, "failed": 0.0} if ended else {}
            made.append(Tried(trial, held, missed(trial), measured, 1.0 if held else 0.5, (1000, 100), 10.0))
        return made

    return run


# ---- objectives ----


def test_objectives_are_read_as_they_are_written():
    first, second, failed = objectives(" ttft_p95 = 1.5s, tpot_p99.5=50ms ")
    assert [str(one) for one in (first, second, failed)] == ["ttft_p95=1.5s", "tpot_p99.5=50ms", "failed=1%"]
    assert (first.limit, second.share) == (1500.0, 0.995)
    assert [str(one) for one in objectives("e2e_p50=1min,failed=0")] == ["e2e_p50=60s", "failed=0%"]


@pytest.mark.parametrize("text", ["ttft_p95=2s", "ttft_p95=2", "ttft_p95=2.0"])
def test_a_limit_may_be_a_number_of_seconds(text):
    assert objectives(text)[0].limit == 2000.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no objective for a latency"),
        ("failed=1%", "no objective for a latency"),
        ("ttft=2s", "'ttft=2s' is not an objective; expected e.g. ttft_p95=2s"),
        ("ttft_p95", "'ttft_p95' is not an objective"),
        ("ttft_p95=soon", "expected a duration"),
        ("ttft_p0=1s", "percentiles are between"),
        ("ttft_p95=0", "limits above 0"),
        ("ttft_p95=1s,ttft_p95=2s", "given twice"),
        ("ttft_p95=1s,failed=120%", "expected a share"),
    ],
)
def test_objectives_that_are_none_say_why(text, said):
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        objectives(text)


def _job(index, ttft_s=-1.0, e2e_s=-1.0, status="done", out=11, reason=""):
    record = Record(id=str(index), in_tokens=100, out_tokens=out)
    job = Job(index, record, 10.0, request=Request(id=index + 1, arrived=10.0), status=status, reason=reason)
    job.first_at = 10.0 + ttft_s if ttft_s >= 0 else -1.0
    job.ended_at = 10.0 + e2e_s if e2e_s >= 0 else -1.0
    job.output_tokens = out
    return job


def test_who_was_refused_was_never_quick():
    ttft, _, failed = objectives("ttft_p90=1s,tpot_p90=50ms")
    jobs = [_job(i, 0.1, 0.5) for i in range(8)]
    assert ttft.measured([*jobs, _job(8, status="shed"), _job(9, 0.2, 0.6)]) == pytest.approx(200.0)
    assert ttft.measured([*jobs, _job(8, status="shed"), _job(9, status="failed")]) == float("inf")
    assert failed.measured([*jobs, _job(8, status="shed"), _job(9, status="failed")]) == pytest.approx(0.2)
    late = _job(9, 0.2, status="failed", reason=NOT_OVER)
    assert ttft.measured([*jobs, late]) == pytest.approx(200.0)
    assert failed.measured([*jobs, late]) == 0.0


def test_goodput_needs_every_limit_and_leaves_out_who_left():
    wanted = objectives("ttft_p50=100ms,ttft_p95=1s,tpot_p95=50ms")
    good, slow, stutters = _job(0, 0.9, 1.2), _job(1, 1.1, 1.4), _job(2, 0.1, 0.8)
    assert goodput(wanted, [good, slow, stutters, _job(3, status="cancelled", e2e_s=0.1)]) == pytest.approx(1 / 3)


def test_a_run_is_hopeless_once_one_miss_too_many_is_certain():
    wanted = objectives("ttft_p90=1s,tpot_p90=50ms")
    waiting = [_job(i, status="waiting") for i in range(2)]
    jobs = [*waiting, *(_job(i, 0.1, 0.5) for i in range(2, 20))]
    assert not hopeless(wanted, jobs, 11.5), "two of twenty may miss"
    assert hopeless(wanted, [*jobs[:-1], _job(19, status="waiting")], 11.5)
    assert not hopeless(wanted, [*jobs[:-1], _job(19, status="waiting")], 10.5), "nobody has missed it yet"
    slow = [_job(i, 0.1, status="waiting") for i in range(3)]
    assert hopeless(wanted, [*slow, *jobs[3:]], 10.7), "even if the rest came at once"


def test_when_everything_is_decided():
    records = [(0.0, 11), (10.0, 101)]
    assert decided_after_s(objectives("ttft_p95=2s,tpot_p95=50ms"), iter(records)) == pytest.approx(10 + 2 + 101 * 0.05)
    assert decided_after_s(objectives("e2e_p95=30s"), iter(records)) == pytest.approx(40.0)
    assert decided_after_s(objectives("tpot_p95=50ms"), iter(records)) == float("inf")


# ---- real ones ----

SMALL = build(ScenarioSpec(name="shared-prefix-10", source="shared-prefix-10", head=150))


@pytest.mark.simulation
def test_a_small_plan_equals_brute_force(tmp_path, capsys):
    case = structs.replace(_case(), wanted=objectives("ttft_p90=1s,tpot_p90=40ms"))
    stopped = []

    def run(trials):
        made = [attempt(case, trial) for trial in trials]
        stopped.extend(tried for tried in made if not tried.measured)
        return made

    planned = plan(case, run, most=30, seeds=2, width=2)
    brute = next(n for n in range(1, 31) if any(attempt(case, Trial(n, seed=s, complete=True)).holds for s in (0, 1)))
    assert planned.best is not None and planned.best.replicas == brute
    assert stopped, "sizes that are far too small were left early"
    rows = {row.replicas: row.goodput for row in planned.rows}
    assert rows[brute - 1] < rows[brute]
    print_plan(planned, case.wanted, 2.0)
    table = capsys.readouterr().out
    assert f"* {brute}" in table and "goodput" in table and "…" not in table
    found = document(planned, case.wanted, 2.0, {"workload": "small"})
    assert found["cost"]["hour"] == pytest.approx(2.0 * brute)
    written, _ = write_plan(planned, case.wanted, 2.0, "small", found, tmp_path)
    assert {"plan.json", "report.html"} <= {path.name for path in written}
    assert msgspec.json.decode((tmp_path / "plan.json").read_bytes())["replicas"] == brute
    assert "<h1>How many replicas</h1>" in (tmp_path / "report.html").read_text()


@pytest.mark.simulation
def test_a_run_that_is_left_early_would_have_missed(monkeypatch):
    looked = []

    def look(wanted, jobs, now):
        looked.append(now)
        return hopeless(wanted, jobs, now)

    monkeypatch.setattr(searching, "hopeless", look)
    early = attempt(_case(), Trial(1))
    complete = attempt(_case(), Trial(1, complete=True))
    assert (early.holds, early.measured) == (False, {}) and not complete.holds
    assert complete.measured["ttft_p95"] > 2000.0 and max(early.missed.values()) >= 1.0
    assert looked[-1] < START + SMALL.workload.duration_s / 2, "most requests were still to arrive"
    assert min(early.cpu_s, complete.cpu_s) > 0.0


def test_sizes_repeat_the_replicas_and_break_the_last():
    slow = structs.replace(
        SMALL, replicas=tuple(structs.replace(r, speed=s) for r, s in zip(SMALL.replicas, (1.0, 0.5), strict=False))
    )
    made = sized(structs.replace(_case(), scenario=slow), Trial(5, dead=1))
    assert [replica.speed for replica in made.replicas] == [1.0, 0.5, 1.0, 0.5, 1.0]
    assert [(fault.kind, fault.replica) for fault in made.faults] == [("down", 4)]


def test_replicas_of_each_role_die_in_turn():
    pairs = structs.replace(_case(), policy="policy: {type: prefill-decode, parameters: {always: true}}")
    trial = Trial(5, prefill=2, dead=1)
    assert [[f.replica for f in sized(pairs, trial, role).faults] for role in ("prefill", "decode")] == [[1], [4]]
    assert [f.replica for f in sized(pairs, structs.replace(trial, dead=3), "prefill").faults] == [1, 0, 4]


@pytest.mark.simulation
def test_the_death_of_the_only_replica_that_prefills_counts():
    """A twenty-fifth of the requests fail with a replica that decodes, a fourth with the one that prefills."""
    scenario = build(ScenarioSpec(name="rag", source="rag-summaries", rate=3, seconds=60))
    pairs = "policy: {type: prefill-decode, parameters: {always: true}}"
    case = Case(scenario, objectives("e2e_p50=1000s,failed=10%"), pairs, dead=1)
    assert attempt(case, Trial(8, prefill=1, complete=True)).holds
    tried = attempt(case, Trial(8, prefill=1, complete=True, dead=1))
    assert not tried.holds
    assert tried.measured["failed"] > 0.2


def test_what_no_number_of_replicas_mends_is_said_at_once():
    assert impossible(SMALL, WANTED) == ""
    assert first_guess(SMALL, WANTED) in range(3, 12)
    said = impossible(SMALL, objectives("ttft_p95=100ms"))
    assert said.startswith("ttft_p95=100ms cannot be held by any number of replicas") and "prompt alone" in said
    said = impossible(SMALL, objectives("tpot_p95=5ms"))
    assert "tpot_p95=5ms" in said and "one step of an answer that is alone takes 13" in said
    assert "a request that is alone takes" in impossible(SMALL, objectives("e2e_p50=3s"))
    short = build(ScenarioSpec(name="s", source="shared-prefix-10", head=150, preset=SHORT))
    assert "100% of the requests are longer than the 4,096 tokens" in impossible(short, WANTED)


def test_the_time_of_a_prompt_ends_where_the_engine_refuses_it():
    said = set()
    for length in (SMALL.replicas[0].engine.max_model_len, 10**8):
        records = [structs.replace(SMALL.workload.records[0], in_tokens=length)]
        made = structs.replace(SMALL, workload=arranged("long", records))
        said.add(impossible(made, objectives("ttft_p95=100ms")))
    assert len(said) == 1


SHORT = "latency: {c0_ms: 10}\nmax_model_len: 4096\n"


def test_the_table_has_columns_for_what_differs():
    planned = plan(_case(), _pretended(lambda t: t.replicas >= 3), most=9, seeds=1)
    assert lines(planned, WANTED, 0.0)[0] == ["replicas", "goodput", "ttft_p95", "tpot_p95", "failed", "seeds"]
    assert lines(planned, WANTED, 1.0)[0][-1].startswith("per million")
