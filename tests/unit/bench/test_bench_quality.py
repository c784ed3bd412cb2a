"""`bench/quality.py` on tiny scenarios: what it writes has the promised shape; nothing written by hand is touched."""

import importlib
import json
import re
from pathlib import Path

import pytest

from fairlead.lab.simulator.quality import cells, entries, names

ROOT = Path(__file__).parents[3]
FIGURES = {
    "ttft_mean_ms", "ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms", "e2e_mean_ms", "tpot_p50_ms", "output_tokens_per_s",
    "prefix_hit_rate", "shed", "failed",
}  # fmt: skip
PAGE = "# Mine\n\nkept above\n\n{begin}\nold figures\n{end}\n\nkept below\n"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    return importlib.import_module


@pytest.fixture
def page(bench, tmp_path):
    docs = bench("_quality_docs")
    path = tmp_path / "docs" / docs.PAGE
    path.parent.mkdir()
    path.write_text(PAGE.format(begin=docs.BEGIN, end=docs.END))
    return path


@pytest.mark.simulation
def test_a_tiny_run_writes_summary_section_and_plots(bench, page, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    quality, chosen = bench("quality"), ["default", "default-at-once", "round-robin"]
    arguments = ["--processes", "1", "--head", "30", "--fresh", "--traces", str(tmp_path), "--docs", str(page.parent)]
    for scenario in ("shared-prefix-10", "agents", "paced-prefix", "headline-stage-20", "apart-chat"):
        arguments += ["--scenario", scenario]
    for policy in chosen:
        arguments += ["--policy", policy]
    assert quality.main([*arguments, "--out", str(tmp_path / "out")]) == 0
    judged = json.loads((tmp_path / "out" / "summary.json").read_bytes())
    assert [*judged] == ["development"]
    for figures in judged["development"]["policies"].values():
        assert {*figures} == {"ttft_mean", "ttft_p99", "e2e_mean", "goodput"}
        assert all(1.0 <= figure["geomean"] <= figure["worst"] for figure in figures.values())
    document = json.loads((tmp_path / "out" / "scenarios.json").read_bytes())
    summary = document["scenarios"]
    assert {name: [*rows] for name, rows in document["known"].items()} == {key: ["default"] for key in [*summary][:4]}
    assert list(summary) == ["shared-prefix-10", "agents", "paced-prefix", "headline-stage-20", "apart-chat"]
    for scenario in list(summary)[:4]:
        assert list(summary[scenario]) == chosen
        for figures in summary[scenario].values():
            assert {*figures} >= FIGURES
            assert figures["ttft_p50_ms"] <= figures["ttft_p99_ms"] <= figures["e2e_p99_ms"]
            assert figures["shed"] == figures["failed"] == 0
    assert next(iter(summary["apart-chat"])) == "default"
    assert "prefill-decode, 2 prefill" in summary["apart-chat"]
    text = page.read_text()
    assert text.startswith("# Mine\n\nkept above\n") and text.endswith("\nkept below\n")
    assert "old figures" not in text
    for plot in re.findall(r"!\[.*?\]\((.*?)\)", text):
        assert (page.parent / plot).read_text().count("<svg") == 1
    calm = document["calm"]
    assert {name: [*rows] for name, rows in calm.items()} == dict.fromkeys([*summary][:4], chosen[:2])
    assert all(0.0 <= row["in_band"] <= 1.0 for name in calm for row in (*calm[name].values(), *summary[name].values()))
    assert "At half the pace" in text
    for scenario in list(summary)[:4]:
        assert f"| {scenario} |" in text
    assert len({line.count("|") for line in text.splitlines() if line.startswith("| shared-prefix-10 ")}) == 4


@pytest.mark.simulation
def test_drawn_scenarios_are_no_part_of_the_page(bench, page, tmp_path):
    before = page.read_text()
    arguments = ["--set", "drawn", "--policy", "default", "--head", "5", "--processes", "1", "--docs", str(page.parent)]
    assert bench("quality").main([*arguments, "--out", str(tmp_path / "out")]) == 0
    assert page.read_text() == before
    assert [*json.loads((tmp_path / "out" / "summary.json").read_bytes())] == ["drawn"]
    with pytest.raises(SystemExit, match="did you mean 'agents'"):
        bench("quality").main(["--scenario", "agenst"])


def test_every_scenario_that_is_promised_takes_part_with_every_policy():
    texts = entries()
    assert next(iter(texts)) == "default"
    found = {}
    for cell in cells(names(), texts, "", quick=False, seeds=1):
        found.setdefault(cell.scenario.name, []).append(cell.policy)
    promised = {
        "shared-prefix-10", "shared-prefix-14", "shared-prefix-20", "conversation-1x", "conversation-1.5x",
        "conversation-2x", "azure-code", "agents", "unlike-hardware",
    }  # fmt: skip
    assert promised <= {*found}
    assert all(found[name] == list(texts) for name in promised)
    assert all(found[f"{name}, truth known"] == ["default"] for name in promised)
    assert all(found[f"{name}, half the pace"] == ["default", "default-at-once"] for name in promised)
    assert len({*found} - promised) >= 10


def test_no_scenario_belongs_to_both_sets():
    development, held_out = names("development"), names("held_out")
    assert not {*development} & {*held_out}
    assert development + held_out == names() == list(dict.fromkeys(names()))
    assert {"hot-prefix", "lora-static", "endpoints-64"} <= {*development}
    assert {"one-hog", "lora-dynamic", "dp-ranks", "diurnal"} <= {*held_out}


def figures(ttft, e2e, **more):
    return {"ttft_mean_ms": ttft, "e2e_mean_ms": e2e, "done": 9, "shed": 0, "failed": 0, **more}


def test_who_beats_the_default_is_said_with_factor_and_reason(bench, page, monkeypatch, tmp_path):
    docs = bench("_quality_docs")
    reasons = tmp_path / "reasons.toml"
    reasons.write_text('[busy]\nwhy = "It copies less."\ntried = "this and that."\n')
    monkeypatch.setattr(docs, "REASONS", reasons)
    rows = {"default": figures(300.0, 1000.0), "rule": figures(100.0, 990.0), "liar": figures(1.0, 1.0, shed=9)}
    summary = {"busy": rows, "calm": {**rows, "default": figures(100.0, 980.0)}}
    docs.write_section(
        page.parent, docs.Comparison(scenarios=summary), docs.Run(cells=6, seeds=1, cpu_minutes=0.0, traces=False)
    )
    lines = page.read_text()
    assert "**busy**: mean TTFT 100 ms with `rule`, 300 with the default (3.00x). It copies less. Tried: this" in lines
    assert "calm" not in lines and "liar" not in lines


def test_a_page_without_markers_is_left_alone(bench, page):
    docs = bench("_quality_docs")
    page.write_text("all mine\n")
    with pytest.raises(SystemExit, match="must contain once"):
        docs.write_section(page.parent, docs.Comparison(), docs.Run(cells=0, seeds=1, cpu_minutes=0.0, traces=False))
    assert page.read_text() == "all mine\n"


def test_the_page_has_the_markers(bench):
    docs = bench("_quality_docs")
    text = (ROOT / "docs" / docs.PAGE).read_text()
    assert (text.count(docs.BEGIN), text.count(docs.END)) == (1, 1)
