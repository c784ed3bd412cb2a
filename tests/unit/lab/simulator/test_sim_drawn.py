"""Drawn scenarios can be simulated, are the same for the same name, and load pools by what these can do."""

from collections import Counter
from contextlib import nullcontext
from random import Random

import msgspec
import pytest

from fairlead.lab.simulator.build import ScenarioSpec, build
from fairlead.lab.simulator.drawn import (
    COUNT,
    FAULTS,
    capacity,
    draw,
    drawn_names,
    drawn_scenario,
    lengths,
    requests_of,
)
from fairlead.lab.simulator.grid import CellResult
from fairlead.lab.simulator.quality import KEPT, comparison, named, names, print_table, write_summary
from fairlead.lab.simulator.scenarios import APART, AZURE_CODE, MOONCAKE, QUALITY, TRACES, usable_traces
from fairlead.lab.simulator.world import replicas
from fairlead.lab.workload.arrivals import poisson
from fairlead.lab.workload.formats import TraceError


def test_all_requests_fit_into_every_server():
    kinds, faults = set(), set()
    for number in range(60):
        scenario = draw(5, number, 200).scenario
        longest = min(replica.engine.max_model_len for replica in scenario.replicas)
        records = scenario.workload.records
        assert max(record.in_tokens + record.out_tokens for record in records) <= longest
        assert all(len(record.hash_ids) * record.block_size >= record.in_tokens for record in records)
        assert 100 <= len(records) <= 400
        kinds.add(scenario.workload.name.partition("-")[0])
        for fault in scenario.faults:
            faults.add(fault.kind)
            assert fault.replica < len(scenario.replicas)
            assert fault.for_s > 0.0, "0 would mean to the end"
    assert kinds == {"conversations", "agents", "shared", "documents", "unshared"}
    assert faults == {*FAULTS}


def test_long_sessions_end_where_servers_with_much_memory_end_them():
    scenario = draw(9, 23).scenario
    longest = min(replica.engine.max_model_len for replica in scenario.replicas)
    most = max(record.in_tokens + record.out_tokens for record in scenario.workload.records)
    assert longest / 2 < most <= longest


def test_the_same_name_draws_the_same():
    for number in range(6):
        name = f"drawn-5-{number}"
        made = build(ScenarioSpec(name=name, source=name))
        draw.cache_clear()
        again = drawn_scenario(name)
        assert again is not None
        assert (made.workload, made.replicas, made.faults) == (
            again.scenario.workload,
            again.scenario.replicas,
            again.scenario.faults,
        )
        other = draw(6, number).scenario
        assert other.workload != made.workload


@pytest.mark.parametrize(
    "name", ["drawn", "drawn-", "drawn-x", "drawn-1-", "drawn-1-2-3", "drawn--1", "drawn-" + "9" * 30]
)
def test_what_is_no_name_draws_nothing(name):
    assert drawn_names(name) == []
    assert drawn_scenario(name) is None
    with pytest.raises(ValueError, match="neither a scenario nor a file"):
        build(ScenarioSpec(name=name, source=name))
    with pytest.raises(ValueError, match="not a scenario of quality"):
        named([name])


def test_a_seed_is_all_its_scenarios():
    assert named(["drawn-7", "agents", "drawn-7-30"]) == [*drawn_names("drawn-7"), "agents", "drawn-7-30"]
    assert len(drawn_names("drawn-7")) == COUNT == len(names("drawn"))
    assert drawn_scenario("drawn-7") is None, "several"
    assert not {*names("drawn")} & {*names()}


def test_only_traces_that_are_used_are_missed(tmp_path):
    assert usable_traces("", names("drawn")) == ("", "")
    missed = "note: no mooncake_conversation.jsonl and no azure_2023_code.csv in --traces; made-up workloads stand in"
    assert usable_traces("", names()) == ("", missed)
    (tmp_path / AZURE_CODE).touch()
    assert usable_traces(str(tmp_path), ["azure-code", "agents"]) == (str(tmp_path), "")
    directory, note = usable_traces(str(tmp_path), ["conversation-2x"])
    assert directory == str(tmp_path)
    assert note.startswith(f"note: no mooncake_conversation.jsonl in {tmp_path};")


@pytest.mark.parametrize("name", [*QUALITY, *APART])
def test_the_trace_of_a_scenario_is_known(tmp_path, name):
    """One that cannot be read fails exactly the scenarios that use it."""
    for trace in (MOONCAKE, AZURE_CODE):
        (tmp_path / trace).write_text("no trace")
    make = {**QUALITY, **APART}[name]
    with pytest.raises(TraceError) if name in TRACES else nullcontext():
        make(tmp_path, 0)


def test_they_are_judged_by_themselves_and_tables_say_what_they_are(capsys):
    figures = dict.fromkeys(KEPT, 100.0)
    rows = [("agents", figures), ("drawn-7-3", figures), ("drawn-9-30", {**figures, "ttft_mean_ms": 300.0})]
    results = [
        CellResult(key="", scenario=scenario, policy=policy, seed=0, figures=row)
        for scenario, best in rows
        for policy, row in (("default", best), ("mine", figures))
    ]
    compared = comparison(results)
    assert [*compared.regrets] == ["development", "drawn"]
    assert compared.regrets["development"]["default"]["ttft_mean_ms"] == 1.0
    assert compared.regrets["drawn"]["default"]["ttft_mean_ms_worst"] == 3.0
    print_table(compared)
    told = capsys.readouterr().out
    for seed, number in ((7, 3), (9, 30)):
        assert f"drawn-{seed}-{number}: {draw(seed, number).words}" in told


def test_the_load_is_a_share_of_what_the_servers_can_do():
    spec = lengths("groups", Random(1), 200_000)
    records = requests_of("groups", spec, poisson(1.0), 0, 300).records
    per_s = capacity(records, replicas(2))
    assert capacity(records, replicas(6)) == pytest.approx(3 * per_s)
    assert capacity(records, replicas(2, speeds=(0.5,))) == pytest.approx(per_s / 2)


def test_few_documents_are_asked_about_often():
    spec = lengths("documents", Random(1), 200_000)
    records = requests_of("documents", spec, poisson(1.0), 0, 1000).records
    asked = Counter(record.hash_ids[0] for record in records)
    assert len(asked) > 50
    assert asked.most_common(1)[0][1] > 20 * sorted(asked.values())[len(asked) // 2]
    questions = [record.hash_ids[-1] for record in records]
    assert len({*questions}) == len(questions)


def test_who_serves_nothing_is_neither_the_best_nor_part_of_the_regrets(tmp_path, capsys):
    served = dict.fromkeys(KEPT, 100.0)
    nothing = {**dict.fromkeys(KEPT, 0.0), "shed": 100.0, "requests": 100.0}
    results = [
        CellResult(key="", scenario=scenario, policy=policy, seed=0, figures=row)
        for scenario in ("agents", "hot-prefix")
        for policy, row in (
            ("mine", served),
            ("refuses", nothing),
            ("partly", served if scenario == "agents" else nothing),
        )
    ]
    compared = write_summary(tmp_path, results)
    regret = compared.regrets["development"]
    assert [*regret] == ["mine"] and regret["mine"]["ttft_mean_ms"] == 1.0
    row = msgspec.json.decode((tmp_path / "scenarios.json").read_bytes())["scenarios"]["agents"]["refuses"]
    assert (row["ttft_mean_ms"], row["shed"]) == (None, 100.0)
    print_table(compared)
    assert "–*" in capsys.readouterr().out
