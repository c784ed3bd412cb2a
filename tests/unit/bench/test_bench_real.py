"""The statistics of runs against real engines. The runs themselves need an installation: `make real`."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from fairlead.compat.load import problems


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "bench")
    return importlib.import_module


def row(policy: str, seed: int, ttft: float, **others: Any) -> dict[str, Any]:
    return {
        "policy": policy, "rate": 5.0, "seed": seed, "requests": 90, "fault": "none", "adapters": False, "valid": True,
        "ttft_ms": {"mean": ttft, "p95": 2 * ttft}, "e2e_ms": {"mean": 3 * ttft}, "hit_rate": 0.5, "failed": 0,
        "shares": {"e0": 0.6, "e1": 0.4}, "forecast": None, "others_share": 0.1,
    } | others  # fmt: skip


def test_shares_begin_with_the_busiest(bench: Any) -> None:
    assert list(bench("_real_table").shares(["e1", "e0", "e1", "e1"]).items()) == [("e1", 0.75), ("e0", 0.25)]


def test_calibration(bench: Any) -> None:
    judged = [
        (100.0, 100.0, 50.0, 200.0),
        (300.0, 100.0, 50.0, 200.0),
        (20.0, 40.0, 30.0, 60.0),
        (40.0, 40.0, 30.0, 60.0),
    ]
    found = bench("_real_table").calibration(judged)
    assert (found["inside"], found["below"], found["above"]) == (0.5, 0.25, 0.25)
    assert found["ratio_p50"] == 1.0
    assert bench("_real_table").calibration([]) is None


def test_the_interval_of_a_mean_is_students(bench: Any) -> None:
    mean, low, high = bench("_real_table").mean_interval([1.0, 2.0, 3.0])
    assert (mean, round(low, 3), round(high, 3)) == (2.0, -0.484, 4.484)


def test_policies_are_compared_where_both_have_run_and_the_load_was_in_time(bench: Any) -> None:
    rows = [
        row("default", 1, 50.0),
        row("round-robin", 1, 100.0),
        row("default", 2, 400.0),
        row("round-robin", 2, 200.0),
    ]
    ratio = bench("_real_table").ratio
    assert ratio(rows, "default", "round-robin", "ttft_ms")[0] == pytest.approx(1.0)
    late = [*rows[:3], row("round-robin", 2, 200.0, valid=False)]
    assert ratio(late, "default", "round-robin", "ttft_ms")[0] == pytest.approx(0.5)
    assert ratio(rows, "default", "least-requests", "ttft_ms") is None


def test_the_table_has_a_line_for_each_run_and_each_ratio(bench: Any) -> None:
    rows = [row("default", 1, 50.0), row("round-robin", 1, 100.0), row("default", 2, 55.0, valid=False)]
    table = bench("_real_table").lines(rows)
    assert sum(line.startswith("| default (invalid") for line in table) == 1
    assert sum(line.startswith(("| default |", "| round-robin |")) for line in table) == 2 + 2, "runs, and their means"
    assert "| default / round-robin | 1 | 0.50 | 0.50 |" in table
    assert "| default | 5 | none | 1 | 50 | 150 | 60% | - | 0 |" in table, "without the run that is invalid"


def test_pinned_runs_are_shown_apart_and_without_a_base_the_first_policy_is_one(bench: Any) -> None:
    rows = [row(policy, 1, ttft, pinned=True) for policy, ttft in (("default", 40.0), ("lpwl", 60.0))]
    table = bench("_real_table").lines([*rows, row("default", 1, 80.0)])
    assert "| default (pinned) | 5 | none | 1 | 40 | 120 | 60% | - | 0 |" in table
    assert "| default | 5 | none | 1 | 80 | 240 | 60% | - | 0 |" in table
    assert "| lpwl / default | 1 | 1.50 | 1.50 |" in table


def test_every_policy_begins_once(bench: Any) -> None:
    made = bench("real").in_turns(["a", "b", "c"], [("none", 5.0, seed) for seed in (1, 2, 3)], 90)
    assert [case.policy for case in made] == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert len({case.key for case in bench("real").everything(90)}) == 36 + 6 + 6 + 12


def test_traffic_is_the_same_for_all_policies_and_has_the_rate(bench: Any) -> None:
    run = bench("_real_run")
    traffic = [run.traffic(run.Case(policy, 5.0, 1, 400)) for policy in ("default", "round-robin")]
    assert traffic[0] == traffic[1]
    assert 400 / 5 * 0.8 < traffic[0][-1].arrival_us * 1e-6 < 400 / 5 * 1.2
    shared = {record.hash_ids[:7] for record in traffic[0]}
    assert len(shared) == run.SHAPES["28m"].systems


def test_a_fault_that_lasts_is_followed_by_further_requests(bench: Any) -> None:
    run = bench("_real_run")
    records = run.traffic(run.Case("default", 5.0, 1, 400))
    marks: dict[str, float] = {}
    arrivals = run.UntilHealed(records, 100, True, marks).offsets()
    for _ in range(150):
        next(arrivals)
    marks["healed"] = 1.0
    assert len(list(arrivals)) == run.AFTER
    assert len(list(run.UntilHealed(records, 100, False, {}).offsets())) == 100


def test_simulated_figures_stand_beside_the_real_ones(bench: Any) -> None:
    found = [{"key": "a", "problem": "", "ttft_ms": [100.4, 90.0], "e2e_ms": [1000.0, 950.0]}]
    found.append({"key": "b", "problem": "it failed", "ttft_ms": [100.4, None], "e2e_ms": [1000.0, None]})
    table = bench("_real_table").simulation_lines(found)
    assert "| a | 100 / 90 | 1,000 / 950 |" in table and "| b | it failed |  |" in table
    assert bench("_real_table").simulation_lines([]) == []


def test_runs_of_other_engines_and_models_have_keys_of_their_own(bench: Any) -> None:
    case = bench("_real_run").Case
    assert case("default", 5.0, 1, 90).key == "default_5rps_seed1_n90_none"
    keys = {case("default", 5.0, 1, 90, engine=engine, size=size).key for engine in ("vllm", "transformers")
            for size in ("28m", "8b")}  # fmt: skip
    assert len({*keys, case("default", 5.0, 1, 90, pinned=True).key}) == 5


def test_options_of_a_policy_become_a_configuration(bench: Any) -> None:
    scheduling = bench("_real_run").scheduling
    assert scheduling("default", ["events", "warm"]) == {"policy": "default"}
    assert scheduling("lpwl", ["at-once"]) == {"policy": "lpwl", "flowControl": {"enabled": False}}
    found = scheduling("default", ["interference=0.5", "decode=0"])
    assert found == {"policy": {"type": "default", "parameters": {"interference": 0.5, "decode": 0.0}}}
    assert problems(json.dumps({**found, "endpoints": ["127.0.0.1:1"]})) == []


def test_what_is_missing_in_a_home_is_named_for_each_engine(bench: Any, tmp_path: Path) -> None:
    home = bench("_real_pool").Home
    assert "vllm has to be installed" in home(tmp_path).missing()
    assert "transformers has to be installed" in home(tmp_path, "transformers").missing()
    python = tmp_path / "python"
    python.touch()
    given = home(tmp_path, "transformers", "8b", str(python))
    assert given.python == python and "a model has to be installed" in given.missing()
    (tmp_path / "model-8b").mkdir()
    (tmp_path / "model-8b" / "config.json").touch()
    assert given.missing() == ""
