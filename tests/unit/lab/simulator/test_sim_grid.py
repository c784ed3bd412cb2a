"""Comparisons: every cell once, resumed where they stopped, and a report that needs nothing else."""

import gzip
import re
import sys
from codecs import BOM_UTF8
from statistics import fmean

import msgspec
import pytest
import typer

from fairlead.cli.compare import compared_cells, end_with_errors, results_of, texts_of
from fairlead.core.errors import ConfigError
from fairlead.lab.simulator import grid
from fairlead.lab.simulator.build import ScenarioSpec, build, is_generated, read_workload, write_workload
from fairlead.lab.simulator.grid import (
    Cell,
    CellResult,
    judged,
    mean_figures,
    note_of_seeds,
    read_kept,
    regrets,
    run_cell,
    run_grid,
)
from fairlead.lab.simulator.quality import KEPT, comparison, judgement, print_table
from fairlead.lab.simulator.report import COLUMNS, print_comparison, write_report
from fairlead.lab.simulator.run import known_policies, policy_text, source_text
from fairlead.lab.simulator.scenarios import ADVERSARIAL, HELD_OUT, MOONCAKE, SITUATIONS, conversation_like, names
from fairlead.lab.workload.describe import ideal_hit

pytestmark = pytest.mark.simulation


def cells(count=2, policies=("round-robin", "least-requests")):
    spec = ScenarioSpec(name="paced-prefix", source="paced-prefix", head=6)
    return [
        Cell(scenario=spec, policy=name, text=f"policy: {name}", seed=seed)
        for name in policies
        for seed in range(count)
    ]


def test_results_come_in_the_order_of_the_cells_and_are_not_computed_again(tmp_path, monkeypatch):
    kept = tmp_path / "cells.jsonl"
    steps = []
    first = run_grid(cells(), processes=1, kept=kept, progress=lambda *step: steps.append(step[1:]))
    assert [(r.policy, r.seed) for r in first] == [
        *(("round-robin", 0), ("round-robin", 1)),
        *(("least-requests", 0), ("least-requests", 1)),
    ]
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]
    kept.write_bytes(b"".join(kept.read_bytes().splitlines(keepends=True)[:3]) + b'{"key": "cut o')
    ran = []
    monkeypatch.setattr(grid, "run_cell", lambda cell, key: ran.append(cell) or run_cell(cell, key))
    again = run_grid(cells(), processes=1, kept=kept)
    assert ran == cells()[3:]
    assert [result.key for result in read_kept(kept)] == [result.key for result in first]
    assert [msgspec.structs.replace(r, cpu_s=0.0) for r in again] == [
        msgspec.structs.replace(r, cpu_s=0.0) for r in first
    ]


def test_processes_give_the_results_of_one():
    def decided(processes):
        return [result.figures["decision_hash"] for result in run_grid(cells(), processes=processes)]

    assert decided(2) == decided(1)


def test_a_policy_that_ends_its_process_ends_no_comparison(tmp_path, capsys):
    (file := tmp_path / "dies.py").write_text(
        "import os\nfrom fairlead.plugins.policies.ranked import Ranked\n"
        "class Dies(Ranked):\n    type = 'dies'\n    def cost(self, request, fleet, cycle):\n        os._exit(3)\n"
    )
    made = cells(2)
    deadly = [msgspec.structs.replace(cell, policy="dies", text=source_text(file)) for cell in made[:2]]
    results = run_grid([*deadly, *made], processes=2)
    assert [result.policy for result in results if result.error] == ["dies", "dies"]
    assert [result.figures["done"] for result in results[2:]] == [6] * 4
    with pytest.raises(typer.Exit):
        end_with_errors(results)
    assert "dies on paced-prefix: a process that simulated this policy ended" in capsys.readouterr().err


def test_other_code_other_policy_other_seed_is_another_cell():
    one, other = cells(2, ("round-robin",))
    assert one.key("a") != one.key("b")
    assert one.key("a") != other.key("a")
    assert one.key("a") == cells(1, ("round-robin",))[0].key("a")


def test_a_changed_file_is_another_cell(tmp_path):
    """The workload, published traces, and modules that a policy imports, also from packages in its directory."""
    (traces := tmp_path / "traces").mkdir()
    (inner := tmp_path / "library" / "inner").mkdir(parents=True)
    (mine := tmp_path / "mine.py").write_text(POLICY)
    traffic, module, trace = tmp_path / "traffic.jsonl", tmp_path / "helper.py", traces / "trace.csv"
    files = (traffic, module, trace, inner.parent / "a.py", inner / "b.py")
    for path in files:
        path.write_text("1")
    spec = ScenarioSpec(name="t", source=str(traffic), traces=str(traces))
    cell = Cell(scenario=spec, policy="mine", text=source_text(mine))
    seen = {cell.key("")}
    for path in files:
        path.write_text("22")
        seen.add(cell.key(""))
    assert len(seen) == 6 and cell.key("") in seen


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """The module of an installed policy, `raises`."""
    (about := tmp_path / "fl_grid-1.0.dist-info").mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: fl-grid\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[fairlead.plugins]\nraises = fl_grid_plugin:Raises\n")
    (module := tmp_path / "fl_grid_plugin.py").write_text(POLICY)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield module
    sys.modules.pop("fl_grid_plugin", None)


def test_installed_policies_are_named_and_their_code_counts(plugin):
    assert policy_text("raises") == "policy: raises\n" and [*texts_of(["raises"])] == ["raises"]
    before = grid.version()
    assert before == grid.version()
    plugin.write_text(POLICY + "# changed\n")
    assert grid.version() != before


@pytest.mark.parametrize("listed", [True, False])
def test_the_code_of_all_modules_of_an_installed_policy_counts(listed, plugin):
    """Those that its distribution lists. Where it lists none, as in a directory of sources, those beside it."""
    (helper := plugin.parent / "fl_grid_helper.py").write_text("WEIGHT = 1\n")
    (inner := plugin.parent / "fl_grid_more").mkdir()
    (inner / "__init__.py").write_text("")
    (stranger := plugin.parent / "stranger.py").write_text("")
    if listed:
        files = (plugin.name, helper.name, "fl_grid_more/__init__.py", "fl_grid-1.0.dist-info/METADATA", "gone.py")
        (plugin.parent / "fl_grid-1.0.dist-info" / "RECORD").write_text("".join(f"{name},,\n" for name in files))
    seen = {grid.version()}
    for path in (helper, inner / "__init__.py"):
        path.write_text("WEIGHT = 2\n")
        seen.add(grid.version())
    assert len(seen) == 3
    stranger.write_text("# changed\n")
    assert (grid.version() in seen) == listed


def test_reused_results_are_said_to_be(tmp_path, capsys):
    said = []
    for fresh in (False, False, True):
        made = results_of(cells(1), tmp_path, fresh, 1)
        assert [result.policy for result in made] == ["round-robin", "least-requests"]
        said.append("2 of 2 results are an earlier run's" in capsys.readouterr().err)
    assert said == [False, True, False]


POLICY = """
from fairlead.plugins.policies.ranked import Ranked

class Raises(Ranked):
    type = "raises"

    def cost(self, request, fleet, cycle):
        raise RuntimeError("oops")
"""


def test_a_policy_that_fails_is_said_to(tmp_path, capsys):
    (mine := tmp_path / "mine.py").write_text(POLICY)
    text = source_text(mine)
    spec = ScenarioSpec(name="paced-prefix", source="paced-prefix", head=6)
    results = run_grid([Cell(scenario=spec, policy="mine", text=text)], processes=1)
    with pytest.raises(typer.Exit):
        end_with_errors(results)
    said = capsys.readouterr().err
    assert "mine on paced-prefix: a plugin failed 6 times" in said and "RuntimeError: oops" in said


def test_names_that_two_have_are_told_apart(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_workload(build(ScenarioSpec(name="x", source="agents", head=5)).workload, tmp_path / folder / "t.jsonl")
        (tmp_path / folder / "p.yaml").write_text("policy: random\n" if folder == "a" else "policy: round-robin\n")
    first, second = (str(tmp_path / folder / "t.jsonl") for folder in ("a", "b"))
    made = compared_cells(ScenarioSpec(name="", source=""), [first, second, first], ["random"], "1", 1)
    assert [cell.scenario.name for cell in made] == [first, second]
    (alone,) = compared_cells(ScenarioSpec(name="", source=""), [first], ["random"], "1", 1)
    assert alone.scenario.name == "t"
    policies = [f"mine={tmp_path / folder / 'p.yaml'}" for folder in ("a", "b")]
    with pytest.raises(ValueError, match="two policies are called 'mine'"):
        texts_of(policies)


def test_servers_do_both_for_a_policy_that_splits_nothing() -> None:
    """Otherwise it would be compared on the servers that do not only prefill."""
    made = compared_cells(
        ScenarioSpec(name="", source="", prefill=2), ["agents"], ["default", "prefill-decode"], "1", 1
    )
    assert {cell.policy: cell.scenario.prefill for cell in made} == {"default": 0, "prefill-decode": 2}


def test_servers_keep_what_is_not_given():
    own = build(ScenarioSpec(name="x", source="unlike-memory", head=5)).replicas
    more = build(ScenarioSpec(name="x", source="unlike-memory", head=5, servers=2 * len(own), speeds=(0.5,))).replicas
    assert [replica.engine for replica in more] == 2 * [replica.engine for replica in own]
    assert {replica.speed for replica in more} == {0.5}
    for preset in ("", "llama-8b-h100"):
        each = build(
            ScenarioSpec(name="x", source="agents", head=5, preset=preset, speeds=12 * (1.0,) + (0.4,))
        ).replicas
        assert [replica.speed for replica in each] == 12 * [1.0] + [0.4], "as many servers as speeds"
    small = build(ScenarioSpec(name="x", source="dp-ranks", head=5, kv_tokens=64_000)).replicas
    assert {replica.engine.kv_tokens for replica in small} == {64_000} and max(one.ranks for one in small) > 1


def test_a_part_of_a_longer_trace_begins_at_once(tmp_path):
    rows = [f'{{"timestamp": {1.7e12 + at}, "input_length": 9, "output_length": 2}}' for at in (50.0, 0.0)]
    (trace := tmp_path / "part.jsonl").write_text("\n".join(rows))
    assert [record.arrival_us for record in read_workload(trace).records] == [0, 50_000]
    lines = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:02,9,2\n2023-11-16 18:00:00,9,2\n"
    (trace := tmp_path / "azure.csv").write_text(lines)
    assert [record.arrival_us for record in read_workload(trace).records] == [0, 2_000_000]


@pytest.mark.parametrize("first", [b"", b'{"fairlead_workload":1}\n'])
def test_lines_of_json_may_begin_with_a_byte_order_mark(first, tmp_path):
    (trace := tmp_path / "bom.jsonl").write_bytes(BOM_UTF8 + first + b'{"id": "a", "in_tokens": 9, "out_tokens": 2}\n')
    assert [record.in_tokens for record in read_workload(trace).records] == [9]


def test_a_cell_that_fails_is_reported_and_tried_again(tmp_path):
    bad = Cell(scenario=ScenarioSpec(name="x", source="no-such"), policy="p", text="policy: default")
    (result,) = run_grid([bad], processes=1, kept=tmp_path / "k")
    assert "neither a scenario nor a file" in result.error
    assert list(read_kept(tmp_path / "k")) == []


def test_a_scenario_can_be_changed_by_plain_values(tmp_path, mooncake_head):
    made = build(ScenarioSpec(name="mine", source=str(mooncake_head), speeds=(1.0, 0.5, 1.0), head=10, speedup=2.0))
    assert (made.name, len(made.replicas), len(made.workload), made.speedup) == ("mine", 3, 10, 2.0)
    assert [replica.speed for replica in made.replicas] == [1.0, 0.5, 1.0]
    assert made.replicas[0].engine.block_size == 512
    bad = tmp_path / "odd.txt"
    bad.write_text("a b c\n")
    with pytest.raises(ConfigError, match="looks like none of"):
        build(ScenarioSpec(name="x", source=str(bad)))
    with pytest.raises(ConfigError, match="unknown format 'csv'"):
        build(ScenarioSpec(name="x", source=str(bad), format="csv"))
    for content, said in ((gzip.compress(b"{}"), "compressed"), ("{}".encode("utf-16"), "UTF-16")):
        bad.write_bytes(content)
        with pytest.raises(ConfigError, match=said):
            build(ScenarioSpec(name="x", source=str(bad), format="mooncake"))


@pytest.mark.parametrize("source", ["reasoning", "deep-research", "overload", "adapters", "agents"])
def test_a_wanted_rate_is_that_of_the_requests(source):
    made = build(ScenarioSpec(name="x", source=source, rate=9.0, seconds=30.0, head=50))
    assert len(made.workload) / made.workload.duration_s * made.speedup == pytest.approx(9.0)


def test_a_wanted_rate_is_that_of_the_sessions_of_a_kind():
    made = build(ScenarioSpec(name="x", source="rag-summaries", rate=9.0, seconds=30.0))
    assert made.speedup == 1.0
    assert len(made.workload) / 30.0 == pytest.approx(9.0, rel=0.2)


def test_every_named_scenario_can_be_built_without_traces():
    """Those of what happens to pools are built where they are run."""
    for name in {*names()} - {*ADVERSARIAL, *SITUATIONS, *HELD_OUT}:
        made = build(ScenarioSpec(name=name, source=name, head=5))
        assert (made.name, len(made.workload)) == (name, 5)


def test_policies_are_found_by_name_or_file(tmp_path):
    known = known_policies()
    assert next(iter(known)) == "default"
    assert {"round-robin", "least-requests", "random"} <= set(known)
    file = tmp_path / "mine.yaml"
    file.write_text("policy: random\n")
    assert policy_text(str(file)) == policy_text(f"mine={file}") == "policy: random\n"
    with pytest.raises(ValueError, match="neither a policy nor a file"):
        policy_text("no-such")
    equals = tmp_path / "a=1.yaml"
    equals.write_text("policy: least-requests\n")
    assert policy_text(str(equals)) == policy_text(f"mine={equals}") == "policy: least-requests\n"
    assert [*texts_of([str(equals), f"mine={equals}", "random"])] == [str(equals), "mine", "random"]


def result(scenario, policy, ttft, e2e, seed=0, **more):
    figures = {
        "ttft_mean_ms": ttft,
        "ttft_p99_ms": ttft * 2,
        "e2e_mean_ms": e2e,
        "goodput": 0.8,
        "done": 9,
        "shed": 0,
        "failed": 0,
    }
    figures |= more
    return CellResult(key="", scenario=scenario, policy=policy, seed=seed, figures=figures)


def test_regret_is_the_geometric_mean_over_scenarios():
    rows = [
        *(result("a", "good", 100.0, 1000.0), result("a", "bad", 400.0, 1000.0)),
        *(result("b", "good", 200.0, 1000.0), result("b", "bad", 200.0, 4000.0, shed=7, goodput=0.2)),
        result("b", "partly", 1.0, 1.0),
        *(result(scenario, "refuses", 0.0, 0.0, done=0, shed=9) for scenario in "ab"),
    ]
    found = regrets(mean_figures(rows))
    assert found["good"] == {
        "ttft_mean_ms": 1.0, "ttft_mean_ms_worst": 1.0, "ttft_p99_ms": 1.0, "ttft_p99_ms_worst": 1.0,
        "e2e_mean_ms": 1.0, "e2e_mean_ms_worst": 1.0, "goodput": 1.0, "goodput_worst": 1.0, "shed": 0, "failed": 0,
    }  # fmt: skip
    assert (found["bad"]["ttft_mean_ms"], found["bad"]["ttft_mean_ms_worst"]) == (2.0, 4.0)
    assert (found["bad"]["e2e_mean_ms"], found["bad"]["shed"]) == (2.0, 7)
    assert (found["bad"]["goodput"], found["bad"]["goodput_worst"]) == (2.0, 4.0)
    assert not {"partly", "refuses"} & set(found)


def test_seeds_are_averaged(monkeypatch, capsys):
    rest = {key: 0.0 for _, key, _ in COLUMNS}
    rows = [result("a", "p", 0.0, 0.0, seed, **rest | {"ttft_mean_ms": ms}) for seed, ms in enumerate((100.0, 300.0))]
    means = mean_figures(rows)["a"]["p"]
    assert (means["seeds"], means["ttft_mean_ms"], means["ttft_mean_ms_sd"]) == (2, 200.0, 141.4214)
    monkeypatch.setenv("COLUMNS", "400")
    print_comparison(rows)
    said = capsys.readouterr().out
    assert "means of 2 seeds ± standard deviation" in said and "200 ±141" in said


def test_each_seed_draws_other_traffic_but_the_same_of_what_is_recorded(mooncake_head, tmp_path):
    def made(source, seed, traces=""):
        spec = ScenarioSpec(name="x", source=source, traces=traces, head=30, seed=seed)
        return [(each.arrival_us, each.out_tokens) for each in build(spec).workload.records]

    for name in (*names(), "drawn-3-1", "rag-summaries"):
        assert is_generated(name)
    for name in ("agents", "shared-prefix-14", "hot-prefix", "restarts", "short-chat", "drawn-3-1", "rag-summaries"):
        assert made(name, 0) != made(name, 1) == made(name, 1)
    assert made(str(mooncake_head), 0) == made(str(mooncake_head), 1)
    (tmp_path / MOONCAKE).write_bytes(mooncake_head.read_bytes())
    assert not is_generated("conversation-2x", str(tmp_path)) and is_generated("azure-code", str(tmp_path))
    assert made("conversation-2x", 0, str(tmp_path)) == made("conversation-2x", 1, str(tmp_path))


def test_what_seeds_vary_is_said(mooncake_head):
    both = compared_cells(ScenarioSpec(name="", source="", head=9), ["agents", str(mooncake_head)], ["random"], "1", 2)
    assert [cell.scenario.seed for cell in both] == [0, 1, 0, 0]
    assert note_of_seeds(both) == (
        f"note: the traffic of {mooncake_head.stem} is recorded: seeds vary only ties and jitter"
    )
    assert note_of_seeds(both[:2]) == note_of_seeds(both[2:3]) == ""


def test_regrets_of_several_seeds_have_a_spread(capsys):
    more = dict.fromkeys(KEPT, 0.0) | {"tpot_p50_ms": 1.0}
    rows = [
        result("agents", policy, ttft, 100.0, seed, **more | {"ttft_mean_ms": ttft, "e2e_mean_ms": 100.0, "done": 9})
        for seed, worse in enumerate((200.0, 400.0))
        for policy, ttft in (("good", 100.0), ("bad", worse))
    ]
    assert "ttft_mean_ms_sd" not in judged(rows[:2])["bad"]
    found = judged(rows)["bad"]
    assert (found["ttft_mean_ms"], found["ttft_mean_ms_sd"]) == (3.0, 1.414)
    compared = comparison(rows)
    assert judgement(compared.regrets["development"])["bad"]["ttft_mean"] == {"geomean": 3.0, "worst": 3.0, "sd": 1.414}
    print_table(compared)
    said = " ".join(capsys.readouterr().out.split())
    assert "means of 2 seeds ± standard deviation" in said and "300 ±141" in said and "3.00 ±1.41 (3.0)" in said


def test_a_seed_that_served_nobody_has_no_latency():
    rows = [result("a", "p", 100.0, 300.0, 1), result("a", "p", 0.0, 0.0, 2, done=0, shed=9, goodput=0.0)]
    means = mean_figures(rows)["a"]["p"]
    assert (means["ttft_mean_ms"], means["e2e_mean_ms"]) == (100.0, 300.0)
    assert (means["goodput"], means["shed"], means["seeds"], means["ttft_mean_ms_sd"]) == (0.4, 4.5, 2, 0.0)


def test_the_report_stands_alone(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    made = cells(1)
    results = run_grid(made, processes=1)
    paths = write_report(results, made, tmp_path)
    print_comparison(results)
    assert "paced-prefix" in capsys.readouterr().out
    page = (tmp_path / "report.html").read_text()
    assert {path.name for path in paths} >= {"results.json", "report.html", "ttft.svg"}
    assert page.count("<svg") == 4
    assert 'name="viewport"' in page
    assert "src=" not in page
    assert "policy: least-requests" in page
    document = msgspec.json.decode((tmp_path / "results.json").read_bytes())
    assert document["summary"]["paced-prefix"]["round-robin"]["requests"] == 6
    assert set(document["regret"]) == {"round-robin", "least-requests"}


def test_a_narrow_terminal_gets_more_tables_and_every_figure(monkeypatch, capsys):
    figures = {key: 10_000.0 + number for number, (_, key, _) in enumerate(COLUMNS)} | {"done": 9}
    row = CellResult(key="", scenario="s", policy="a-policy-with-a-long-name-of-its-own", seed=0, figures=figures)
    shown = {}
    for width in ("80", "200"):
        monkeypatch.setenv("COLUMNS", width)
        print_comparison([row])
        shown[width] = capsys.readouterr().out
        assert max(map(len, shown[width].splitlines())) <= int(width)
        assert "…" not in shown[width]
        assert all(f" {10_000 + number:,}" in shown[width] for number in range(len(COLUMNS)))
    assert shown["80"].count("s, times in ms") > shown["200"].count("s, times in ms") == 1


@pytest.mark.parametrize("names", [("a", "b"), ("default", "a-policy-with-a-long-name-of-its-own")])
@pytest.mark.parametrize("seeds", [1, 2])
def test_no_column_of_a_table_is_cut_off_or_stands_alone(monkeypatch, capsys, names, seeds):
    """On a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    figures = {key: 10_000.0 for _, key, _ in COLUMNS} | dict.fromkeys(KEPT, 10.0) | {"done": 9}
    rows = [
        CellResult(key="", scenario="agents", policy=name, seed=seed, figures=figures)
        for name in names
        for seed in range(seeds)
    ]
    print_comparison(rows)
    print_table(comparison(rows))
    shown = capsys.readouterr().out
    assert max(map(len, re.sub("\x1b[^m]*m", "", shown).splitlines())) <= 80
    assert len([line for line in shown.splitlines() if "┃" in line and "shed" in line and "failed" in line]) == 3


def test_what_cannot_be_drawn_is_said(tmp_path, capsys, monkeypatch):
    row = run_cell(cells(1)[0])
    shed = msgspec.structs.replace(row, policy="sheds-all", figures=row.figures | {"ttft_mean_ms": 0.0})
    pytest.importorskip("matplotlib")
    write_report([row, shed], [], tmp_path)
    assert "No figure: sheds-all on paced-prefix" in (tmp_path / "report.html").read_text()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_report([row], [], tmp_path)
    assert "pip install 'fairlead[report]'" in capsys.readouterr().err
    assert "pip install 'fairlead[report]'" in (tmp_path / "report.html").read_text()


def test_names_cannot_break_out_of_the_report(tmp_path):
    row = run_cell(cells(1)[0])
    row = msgspec.structs.replace(row, policy="<script>alert(1)</script>", scenario="<b>x")
    write_report([row], [], tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page.replace("&lt;script", "")
    assert "<b>x" not in page.split("</svg>")[-1]


def test_the_stand_in_for_the_conversation_trace_is_about_like_it():
    """12,031 requests in 3,537 s; input 12,035 and output 343 tokens on average; an ideal cache hits 37.4 %."""
    records = conversation_like(1.0).workload.records
    assert len(records) == pytest.approx(12_031, rel=0.1)
    assert fmean(record.in_tokens for record in records) == pytest.approx(12_035, rel=0.1)
    assert fmean(record.out_tokens for record in records) == pytest.approx(343, rel=0.05)
    assert ideal_hit(conversation_like(1.0).workload) == pytest.approx(0.374, abs=0.08)
