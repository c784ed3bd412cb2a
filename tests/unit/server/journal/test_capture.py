"""A journal becomes a workload: the same shape of traffic, and nobody's words or names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from fairlead.core.events import ModelsChanged
from fairlead.core.models import InferenceModel, InferenceModelRewrite, ModelSet, Origin, RewriteRule, Target
from fairlead.core.records import DecisionRecord
from fairlead.lab.simulator.capture import capture
from fairlead.lab.simulator.journal import decisions as journaled
from fairlead.lab.simulator.journal import one_run
from fairlead.lab.simulator.result import condition, of_jobs, of_journal
from fairlead.lab.simulator.simulation import Simulation
from fairlead.lab.simulator.world import Scenario, replicas
from fairlead.lab.workload.formats import FORMATS


def shared(records: Any, one: int, other: int) -> int:
    """Blocks that two prompts have in common at their beginnings."""
    count = 0
    for a, b in zip(records[one].hash_ids, records[other].hash_ids, strict=False):
        if a != b:
            break
        count += 1
    return count


def test_the_shape_of_the_traffic_is_kept(recorded: Any) -> None:
    made = capture(one_run(recorded.path), key=b"k", block_size=80)
    real, found = recorded.simulation.scenario.workload.records, made.workload.records
    assert len(found) == len(real)
    for ours, theirs in zip(found, real, strict=True):
        assert ours.arrival_us == pytest.approx(theirs.arrival_us - real[0].arrival_us, abs=2)
        assert ours.in_tokens == pytest.approx(theirs.in_tokens, rel=0.03)
        assert ours.outcome is not None
        assert ours.outcome.ttft_ms > 0
    for one in range(0, len(real), 9):
        for other in range(1, len(real), 13):
            if one != other:
                true = shared(real, one, other)
                assert true * 0.93 - 2 <= shared(found, one, other) <= true + 1, (one, other)


def test_ids_follow_the_salt_and_tell_nothing(recorded: Any) -> None:
    run = one_run(recorded.path)
    one, same, other = (capture(run, key=key).workload.records for key in (b"a", b"a", b"b"))
    assert one == same
    assert not {number for record in one for number in record.hash_ids} & {
        number for record in other for number in record.hash_ids
    }
    hashes = {
        number for kind, _, body in run.items() if kind == "RequestArrived" for number in body.request.prefix.hashes
    }
    assert not hashes & {number for record in one for number in record.hash_ids}
    assert {record.outcome.endpoint for record in one if record.outcome} == {"e0", "e1", "e2", "e3"}


@pytest.mark.parametrize("format", ["native", "mooncake"])
def test_it_is_written_and_read_again(format: str, recorded: Any) -> None:
    size = 512 if format == "mooncake" else 64
    made = capture(one_run(recorded.path), key=b"k", block_size=size).workload
    data = FORMATS[format].write(made)
    again = FORMATS[format].read("again", data, "again")
    assert len(again) == len(made)
    assert [record.hash_ids for record in again.records] == [record.hash_ids for record in made.records]
    assert b"sim/server" not in data


def test_times_are_stretched(recorded: Any) -> None:
    run = one_run(recorded.path)
    one, four = capture(run, key=b"k").workload, capture(run, key=b"k", stretch=4.0).workload
    assert four.duration_s == pytest.approx(4 * one.duration_s, rel=1e-3)


def test_the_captured_run_is_simulated_again_as_it_was(recorded: Any) -> None:
    """Same policy, same servers: the figures of the journal come out of the capture."""
    from fairlead.lab.simulator.run import policy_from

    made = capture(one_run(recorded.path), key=b"k", block_size=80).workload
    again = Simulation(
        Scenario(name="again", workload=made, replicas=replicas(4, block_size=80)), policy_from("policy: default"), 5
    )
    again.run()
    before, after = of_journal(one_run(recorded.path), []), of_jobs(again.jobs)
    assert after["ttft_p50"] == pytest.approx(before["ttft_p50"], rel=0.25)
    assert after["ttft_mean"] == pytest.approx(before["ttft_mean"], rel=0.25)


def test_the_journals_figures_are_the_runs(recorded: Any) -> None:
    real, found = of_jobs(recorded.simulation.jobs), of_journal(one_run(recorded.path), [])
    for name in ("ttft_mean", "ttft_p50", "ttft_p95", "e2e_mean"):
        assert found[name] == pytest.approx(real[name], rel=0.01)
    assert found["failed"] == real["failed"] == 0.0


@pytest.mark.parametrize(
    ("text", "before", "after", "broken"),
    [
        ("ttft_p95 > +5%", 100.0, 104.9, False),
        ("ttft_p95 > +5%", 100.0, 105.1, True),
        ("ttft_p95 < -10%", 100.0, 89.0, True),
        ("ttft_p95 < -10%", 100.0, 91.0, False),
        ("ttft_p95 > 200", 1.0, 201.0, True),
        ("ttft_p95 > 200", 999.0, 199.0, False),
    ],
)
def test_conditions(text: str, before: float, after: float, broken: bool) -> None:
    said = condition(text).broken({"ttft_p95": before}, {"ttft_p95": after})
    assert bool(said) is broken
    assert not broken or text in said


def test_a_figure_that_is_not_known_is_not_good() -> None:
    assert "not known of the newer run" in condition("tpot_p50 > 5").broken({}, {})
    assert "former run" in condition("tpot_p50 > +5%").broken({}, {"tpot_p50": 1.0})


@pytest.mark.parametrize("text", ["", "ttft_p95", "ttft_p95 > 5%", "ttft_p95 > +5", "speed > 1", "ttft_p95 = 3"])
def test_conditions_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"condition|figure|sign"):
        condition(text)


def test_sessions_follow_each_other(record_run: Callable[..., Any], tmp_path: Path) -> None:
    record_run(tmp_path, rate=6.0, seconds=12.0)
    made = capture(one_run(tmp_path), key=b"k").workload
    numbers = {record.id: index for index, record in enumerate(made.records)}
    for index, record in enumerate(made.records):
        if record.parent:
            assert numbers[record.parent] < index
            assert record.think_ms >= 0
            assert made.records[numbers[record.parent]].session == record.session != ""


def test_the_length_of_each_of_several_answers_is_estimated(record_run: Callable[..., Any], tmp_path: Path) -> None:
    record_run(tmp_path, seconds=4.0, fields={"n": 2, "out_tokens": 60, "max_tokens": 60})
    made = capture(one_run(tmp_path), key=b"k")
    assert made.estimated_answers > 0
    assert {(record.n, record.max_tokens) for record in made.workload.records} == {(2, 60)}
    assert [record.out_tokens for record in made.workload.records] == pytest.approx([60] * len(made.workload), abs=1)


@pytest.mark.parametrize("sample", [0.0, 1.0])
def test_what_was_decided_of_the_model_is_kept(sample: float, record_run: Callable[..., Any], tmp_path: Path) -> None:
    """Whether or not the reasons of a decision were written: requests arrive without a priority or a target."""
    here = Origin(namespace="default", name="chat")
    rule = RewriteRule(("chat",), (Target("llama-tuned"),))
    defined = ModelSet(
        models=(InferenceModel(origin=here, model="chat", targets=(Target("llama"),), criticality="Critical"),),
        rewrites=(InferenceModelRewrite(origin=here, rules=(rule,)),),
    )
    begin = {1: lambda simulation: simulation.feed(ModelsChanged(defined))}
    live = record_run(tmp_path, midway=begin, sample=sample, model="chat")
    requests = [entry.request for entry in live.decisions if isinstance(entry, DecisionRecord)]
    assert {(r.priority, r.target, r.rewritten_by) for r in requests} == {(10, "llama-tuned", "default/chat")}
    records = capture(one_run(tmp_path), key=b"k").workload.records
    assert len(records) == len(requests)
    assert {(r.priority, r.model, r.target) for r in records} == {(10, "chat", "llama-tuned")}
    assert {r.outcome.rewritten_by for r in records if r.outcome} == {"default/chat"}
    found = {entry.decision.request.id: entry.decision.request for entry in journaled(one_run(tmp_path))}
    assert all(structs.replace(found[r.id], prefix=r.prefix) == r for r in requests)
    again = FORMATS["native"].read("w", FORMATS["native"].write(capture(one_run(tmp_path), key=b"k").workload), "w")
    assert [r.target for r in again.records] == [r.target for r in records]


def test_adapters_are_told_from_models(record_run: Callable[..., Any], tmp_path: Path) -> None:
    servers = replicas(4, block_size=80, max_loras=1)
    path = record_run(tmp_path / "adapters", seconds=2.0, servers=servers, fields={"lora": "sql"}).path
    made = capture(one_run(path), key=b"k")
    assert {(record.model, record.lora) for record in made.workload.records} == {("sql", "sql")}
    alike = made.pool.like(replicas(4, block_size=80), list(made.pool.last.values()))
    assert [server.engine.max_loras for server in alike] == [1, 1, 1, 1]
    plain = record_run(tmp_path / "models", seconds=2.0, model="base").path
    assert {(record.model, record.lora) for record in capture(one_run(plain), key=b"k").workload.records} == {
        ("base", "")
    }
