"""`explain`, `replay`, `capture` and the gate of `compare`, as a user calls them."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from commands import fairlead

from fairlead.cli.explain import show
from fairlead.compat.load import load
from fairlead.config import building
from fairlead.core.errors import ConfigError
from fairlead.core.events import Reconfigured
from fairlead.core.records import DecisionRecord, OutcomeRecord, SplitCosts
from fairlead.lab.simulator import plan_live
from fairlead.lab.simulator.journal import one_run, runs
from fairlead.lab.simulator.plan_live import fit
from fairlead.lab.simulator.scenarios import headline, parted
from fairlead.lab.simulator.world import replicas
from fairlead.plugins.policies.by_load import LeastRequests
from fairlead.server.observe.decisions import explained

QUICK = ("--seeds", 1, "--processes", 1)


def call(*arguments: object, columns: int = 200) -> Any:
    return fairlead(*arguments, columns=columns)


def test_replay(recorded: Any) -> None:
    done = call("journal", "replay", recorded.path)
    assert done.exit_code == 0, done.output
    assert "identical" in done.output
    figures = json.loads(call("journal", "replay", recorded.path, "--json").output)
    assert figures["identical"]
    assert figures["recorded"] == figures["replayed"]
    changed = call("journal", "replay", recorded.path, "--set", "interference=3", "--changes", 2)
    assert changed.exit_code == 0, changed.output
    assert "decisions change" in changed.output
    assert "and" in changed.output
    other = json.loads(call("journal", "replay", recorded.path, "--policy", "round-robin", "--json").output)
    assert other["policy"] == "round-robin"
    assert 0 < other["changed"] <= other["decisions"]


def test_an_explanation_shows_names_and_does_not_obey_them(recorded: Any, capsys: pytest.CaptureFixture[str]) -> None:
    record = next(one for one in recorded.decisions[::-1] if isinstance(one, DecisionRecord))
    explained = json.loads(call("explain", record.request.id, recorded.path, "--json").output)
    name = "\x1b]0;PWNED\x07\x1b[2J\x1b[Hall is well\u202e"
    explained["target_model"] = explained["external_id"] = name
    explained["prefill_endpoint"] = "first"
    show(explained, 3)
    output = capsys.readouterr().out
    assert f"{record.endpoint} (prompt: first) by " in output
    assert output.count("PWNED") == 2 and all(letter.isprintable() for letter in output.replace("\n", ""))


def test_explain(recorded: Any) -> None:
    record = next(one for one in recorded.decisions[::-1] if isinstance(one, DecisionRecord))
    done = call("explain", record.request.id, recorded.path)
    assert done.exit_code == 0, done.output
    for word in (record.endpoint, "prefill", "interference", "needed to tie", "TTFT forecast", "behind"):
        assert word in done.output
    shown = json.loads(call("explain", f"0000cafe.{record.request.id:016x}", recorded.path, "--json").output)
    for one in shown["explanation"]["candidates"]:
        assert sum(one["terms"].values()) == pytest.approx(one["total"], rel=1e-12)
    instead = json.loads(
        call("explain", record.request.id, recorded.path, "--policy", "least-requests", "--json").output
    )["instead"]
    assert instead["policy"] == "least-requests"
    assert "on the same numbers" in call("explain", record.request.id, recorded.path, "--set", "decode=1").output


@pytest.mark.parametrize("columns", [70, 200])
def test_costs_that_are_not_milliseconds_are_shown_as_the_policy_gave_them(recorded: Any, columns: int) -> None:
    record = [one for one in recorded.decisions if isinstance(one, DecisionRecord)][60]
    asked = ("explain", record.request.id, recorded.path, "--policy", "least-requests")
    chosen = json.loads(call(*asked, "--json").output)["instead"]["candidates"][0]
    said = call(*asked, columns=columns).output.partition("on the same numbers")[2]
    assert chosen["total"] < 0.0
    assert " cost " in said and "points" not in said and "scores" not in said
    (row,) = [line for line in said.splitlines() if line.startswith(" * ")]
    assert f" {-chosen['total']:.1f} " in row and "-" not in row.replace(chosen["endpoint"], "")


def test_a_policy_in_a_file_is_asked_about_a_recorded_decision(recorded: Any, tmp_path: Path) -> None:
    record = [one for one in recorded.decisions if isinstance(one, DecisionRecord)][60]
    file = tmp_path / "mine.py"
    file.write_text(
        "from fairlead.plugins.policies.ranked import Ranked\n"
        "class Mine(Ranked):\n"
        "    type = 'mine'\n"
        "    def terms(self, request, fleet, cycle):\n"
        "        return [('running', fleet.table.active), ('waiting', fleet.table.queue)]\n"
        "    def cost(self, request, fleet, cycle):\n"
        "        return fleet.table.active + fleet.table.queue\n"
    )
    asked = ("explain", record.request.id, recorded.path, "--policy", file)
    assert "mine on the same numbers" in call(*asked).output
    instead = json.loads(call(*asked, "--json").output)["instead"]
    assert (instead["policy"], instead["unit"], instead["reproduced"]) == ("mine", "cost", True)
    assert {*instead["candidates"][0]["terms"]} == {"running", "waiting"}


def test_a_policy_in_a_file_is_asked_about_a_whole_journal(recorded: Any, tmp_path: Path) -> None:
    (mine := tmp_path / "mine.py").write_text(
        "from fairlead.plugins.policies.by_load import LeastRequests\nclass Mine(LeastRequests):\n    type = 'mine'\n"
    )
    asked = ("journal", "replay", recorded.path, "--json", "--policy")
    figures, usual = (json.loads(call(*asked, policy).output) for policy in (mine, "least-requests"))
    assert figures.pop("policy") == "mine" and usual.pop("policy") == "least-requests"
    assert figures == usual and figures["decisions"] > 0


def test_an_explanation_tells_how_long_another_process_was_asked(
    recorded: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    record = next(one for one in recorded.decisions[::-1] if isinstance(one, DecisionRecord) and one.endpoint)
    request = msgspec.structs.replace(record.request, arrived=record.at - 0.0061)
    record = msgspec.structs.replace(record, request=request, asked_ms=4.04)
    show(explained(record, None, None), 3)
    output = " ".join(capsys.readouterr().out.split())
    assert "decided after 6.1 ms, 4.0 ms asking another process" in output and "from when it was sent" in output


@pytest.mark.parametrize(
    ("status", "end"),
    [(0, " after 1,500 ms; its answer had begun and was cut off"), (429, ", status 429 after 1,500 ms")],
)
def test_an_explanation_says_why_fairlead_ended_a_request(
    recorded: Any, capsys: pytest.CaptureFixture[str], status: int, end: str
) -> None:
    record = next(one for one in recorded.decisions[::-1] if isinstance(one, DecisionRecord) and one.endpoint)
    request = msgspec.structs.replace(record.request, arrived=record.at - 0.5)
    record = msgspec.structs.replace(record, request=request)
    at = record.at + 1.0
    outcome = OutcomeRecord(request=request, at=at, endpoint=record.endpoint, cause="evicted", status=status)
    show(explained(record, outcome, None), 3)
    assert f"ended: evicted for a more important request{end}" in " ".join(capsys.readouterr().out.split())


def test_an_explanation_names_the_endpoint_that_answered_instead(
    recorded: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    record = next(one for one in recorded.decisions[::-1] if isinstance(one, DecisionRecord) and one.forecast)
    request = msgspec.structs.replace(record.request, stream=True)
    record = msgspec.structs.replace(record, request=request)
    outcome = OutcomeRecord(request=request, at=record.at, endpoint="the-other", status=200, ttft_ms=7.4)
    page = explained(record, outcome, None)
    assert (page["answered_by"], page["prediction"]["ttft_ms"]["actual"]) == ("the-other", 7.4)
    assert page["prediction"]["ttft_ms"]["within"] is page["prediction"]["ttft_ms"]["ratio"] is None
    show(page, 3)
    output = " ".join(capsys.readouterr().out.split())
    assert f" → {record.endpoint} by {record.policy}, answered by the-other" in output
    assert f"measured at the-other: {record.endpoint} could not be reached, failed or was overdue" in output
    assert explained(record, msgspec.structs.replace(outcome, endpoint=record.endpoint), None)["answered_by"] is None


def test_the_costs_of_both_ways_are_shown_where_the_numbers_were_not_kept(
    recorded: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    record = next(one for one in recorded.decisions[::-1] if isinstance(one, DecisionRecord) and one.endpoint)
    assert record.trace is not None
    trace = msgspec.structs.replace(record.trace, split=SplitCosts(20.5, 12.25, "p", True))
    page = explained(msgspec.structs.replace(record, trace=trace, prefill="p"), None, None)
    assert (page["split"]["alone_ms"], page["split"]["pair_ms"], page["explanation"]) == (20.5, 12.25, None)
    show(page, 3)
    output = " ".join(capsys.readouterr().out.split())
    assert f"p computes the prompt and {record.endpoint} decodes: 12.2 ms together, 20.5 ms at one endpoint" in output


@pytest.mark.parametrize("columns", [60, 80, 100, 200])
def test_explain_cuts_nothing_at_any_width(columns: int, recorded: Any) -> None:
    record = [one for one in recorded.decisions if isinstance(one, DecisionRecord)][60]
    asked = ("explain", record.request.id, recorded.path)
    explanation = json.loads(call(*asked, "--json").output)["explanation"]
    shown = call(*asked, columns=columns).output
    assert "…" not in shown and max(map(len, shown.splitlines())) <= columns
    for one in explanation["candidates"]:
        (row,) = [line for line in shown.splitlines() if re.match(rf" [* ] {one['endpoint']} ", line)]
        assert f" {-one['total']:,.1f} " in row
    words = " ".join(shown.split())
    for name, value in explanation["candidates"][0]["terms"].items():
        assert abs(value) < 0.05 or f"{name} {-value:,.1f}" in words or (columns == 200 and f" {-value:,.1f} " in shown)
    (rival,) = [line for line in explanation["why"] if " costs " in line]
    assert rival in words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("explain", "99999", "JOURNAL"), "no decision '99999'"),
        (("explain", "1", "--admin", "http://127.0.0.1:1", "--policy", "random"), "need a journal"),
        (("explain", "1", "--admin", "http://127.0.0.1:1"), "refused"),
        (("journal", "replay", "/nowhere"), "No such file"),
        (("journal", "replay", "JOURNAL", "--set", "x=1"), "no setting 'x'"),
        (("journal", "replay", "JOURNAL", "--policy", "nobody"), "neither a policy nor a file"),
        (("journal", "replay", "JOURNAL", "--run", "other"), "0000cafe"),
        (("journal", "capture", "JOURNAL", "--out", "OUT", "--format", "tape"), "unknown format"),
    ],
)
def test_what_goes_wrong_is_said(arguments: tuple[str, ...], words: str, recorded: Any, tmp_path: Path) -> None:
    known = {"JOURNAL": recorded.path, "OUT": tmp_path / "out"}
    done = call(*(known.get(argument, argument) for argument in arguments))
    assert done.exit_code != 0
    said = done.output
    assert words in said


def test_a_capture_may_have_a_name_that_is_not_unicode(recorded: Any, tmp_path: Path) -> None:
    """Or that the locale cannot express."""
    file = Path(os.fsdecode(bytes(tmp_path) + b"/\xff.jsonl"))
    assert call("journal", "capture", recorded.path, "--out", file).exit_code == 0
    assert file.stat().st_size


def test_capture_and_simulate(recorded: Any, tmp_path: Path) -> None:
    file = tmp_path / "traffic.jsonl"
    done = call("journal", "capture", recorded.path, "--out", file, "--salt", "s", "--block-size", 80)
    assert done.exit_code == 0, done.output
    assert "blocks of 80 tokens" in done.output
    ran = call("sim", "run", file, "--replicas", 4, "--json")
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.output)["figures"]["done"] > 50
    table = tmp_path / "mooncake.jsonl"
    assert call("journal", "capture", recorded.path, "--out", table, "--format", "mooncake").exit_code == 0
    assert b'"input_length"' in table.read_bytes()


def test_of_several_models_one_is_taken_and_a_simulation_notes_them(
    record_run: Callable[..., Any], tmp_path: Path
) -> None:
    file, journal = tmp_path / "traffic.jsonl", tmp_path / "journal"
    record_run(journal, model="big", seconds=2.0)
    none = call("journal", "capture", journal, "--out", file, "--model", "small")
    assert none.exit_code == 2 and "holds no request of small to repeat" in none.output
    assert call("journal", "capture", journal, "--out", file, "--model", "big").exit_code == 0
    assert "note:" not in call("sim", "run", file).output
    text = file.read_text()
    assert text.count('"model":"big"') > 3
    file.write_text(text.replace('"model":"big"', '"model":"small"', 3))
    ran = call("sim", "run", file)
    assert ran.exit_code == 0 and "note: the workload is for 2 models or adapters (big, small); " in ran.output


def test_the_gate_takes_a_python_file(recorded: Any, tmp_path: Path) -> None:
    (mine := tmp_path / "mine.py").write_text(
        "from fairlead.plugins.policies.by_load import LeastRequests\nclass Mine(LeastRequests):\n    type = 'mine'\n"
    )
    done = call("sim", "compare", "--against", recorded.path, "--policy", mine)
    assert done.exit_code == 0 and "mine.py" in done.output, done.output


def test_the_gate_takes_a_python_file_beside_installed_plugins(
    record_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (about := tmp_path / "fl_gate-1.0.dist-info").mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: fl-gate\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[fairlead.plugins]\nfl-late = fl_gate_plugin:Late\nmine = fl_gate_plugin:Late\n"
    )
    (tmp_path / "fl_gate_plugin.py").write_text(
        "class Late:\n"
        "    def __init__(self, params, name): self.name = name\n"
        "    def key(self, waiting): return -waiting.since\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    record_run(tmp_path / "journal", "policy: default\nflowControl: {ordering: {type: fl-late}}", seconds=2.0)
    (mine := tmp_path / "mine.py").write_text(
        "from fairlead.plugins.policies.by_load import LeastRequests\nclass Mine(LeastRequests):\n    type = 'mine'\n"
    )
    done = call("sim", "compare", "--against", tmp_path / "journal", "--policy", mine)
    assert done.exit_code == 0 and "mine.py" in done.output, done.output


@pytest.mark.usefixtures("never_returns")
def test_a_policy_that_never_returns_does_not_hold_up_an_explanation(recorded: Any) -> None:
    done = call("explain", "last", recorded.path, "--policy", "least-requests")
    assert done.exit_code == 1 and "least-requests: NeverReturned: did not return" in done.output, done.output


def test_the_gate(recorded: Any) -> None:
    good = call("sim", "compare", "--against", recorded.path, "--policy", "default", "--fail-if", "ttft_p95 > +5%")
    assert good.exit_code == 0, good.output
    bad = call("sim", "compare", "--against", recorded.path, "--policy", "round-robin", "--fail-if", "hit_rate < -5%")
    assert bad.exit_code == 1, bad.output
    assert "hit_rate is" in bad.output
    same = call(
        "sim", "compare", "--against", recorded.path, "--journal", recorded.path, "--fail-if", "ttft_p50 > +0.1%"
    )
    assert same.exit_code == 0, same.output
    assert call("sim", "compare", "--against", recorded.path, "--fail-if", "nonsense").exit_code == 2


def test_the_gate_says_which_run_it_takes(record_run: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "journal"
    for run, seconds in (("0000aaaa", 3.0), ("0000bbbb", 1.0)):
        one = record_run(tmp_path / run, "policy: default", seconds=seconds, run=run).path
        path.mkdir(exist_ok=True)
        for number, file in enumerate(sorted(one.glob("*.journal"))):
            file.rename(path / f"{run}-{number}.journal")
    ids = [run.id for run in runs(path)]
    assert len(ids) == 2
    last = call("sim", "compare", "--against", path, "--policy", "default")
    assert f"1 more runs than the last one, {ids[1]}" in last.output and ids[0] in last.output
    former = call("sim", "compare", "--against", path, "--policy", "default", "--run", ids[0])
    assert "more runs" not in former.output
    counts = [int(re.search(r"^requests +(\d+)", done.output, re.M)[1]) for done in (former, last)]  # type: ignore[index]
    assert counts[0] > counts[1] > 0
    assert call("sim", "compare", "--against", path, "--policy", "default", "--run", "nobody").exit_code == 2


def test_the_recorded_policy_is_the_one_that_decided_most(record_run: Callable[..., Any], tmp_path: Path) -> None:
    """A reload put it in the place of the first one."""

    def reload(simulation: Any) -> None:
        simulation.feed(Reconfigured(load("policy: round-robin", need_endpoints=False)))

    def changes(policy: str) -> tuple[set[str], str]:
        done = call("sim", "compare", "--against", tmp_path, "--policy", policy)
        return {*re.findall(r"[+-]\d+\.\d%", done.output)}, done.output

    record_run(tmp_path, "policy: default\nflowControl: {enabled: false}", seconds=4.0, midway={40: reload})
    same, said = changes("round-robin")
    assert same == {"+0.0%"}, said
    assert "note: the configuration changed; the recorded one is that of 79% of the decisions" in said
    assert changes("default")[0] != {"+0.0%"}


def test_a_policy_against_itself_is_the_same_also_with_flow_control(
    record_run: Callable[..., Any], tmp_path: Path
) -> None:
    path = record_run(tmp_path / "journal", "policy: lpwl\nflowControl: {ttl: 5s}", rate=30.0, seconds=3.0).path
    done = call("sim", "compare", "--against", path, "--policy", "lpwl", "--load", "4")
    changes = re.findall(r"[+-]\d+\.\d%", done.output)
    assert changes and {*changes} == {"+0.0%"}, done.output


@pytest.mark.parametrize("method", ["choose", "cost"])
def test_a_failure_of_another_policy_is_no_answer(method: str, recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, *arguments: Any) -> Any:
        raise RuntimeError("no idea")

    before = json.loads(call("journal", "replay", recorded.path, "--policy", "round-robin", "--json").output)
    monkeypatch.setattr(LeastRequests, method, fail)
    replayed = call("journal", "replay", recorded.path, "--policy", "least-requests", "--json")
    figures = json.loads(replayed.output)
    assert (replayed.exit_code, figures["decisions"], figures["changed"]) == (1, 0, 0)
    assert (figures["hash"]["before"], figures["spread"]["before"]) == (
        before["hash"]["before"],
        before["spread"]["before"],
    ), "the recorded decisions are not touched"
    (note,) = figures["notes"]
    why = "plugin least-requests: RuntimeError: no idea"
    assert f"times a plugin failed, so these are not its decisions: {why}" in note
    record = next(one for one in recorded.decisions[::-1] if isinstance(one, DecisionRecord))
    explained = call("explain", record.request.id, recorded.path, "--policy", "least-requests")
    assert (explained.exit_code, explained.stdout) == (1, "")
    assert f"error: {why}" in explained.stderr


def test_a_policy_that_fails_does_not_pass_the_gate(recorded: Any, tmp_path: Path) -> None:
    (broken := tmp_path / "broken.py").write_text(
        "from fairlead.plugins.policies.ranked import Ranked\n"
        "class Broken(Ranked):\n    type = 'broken'\n"
        "    def cost(self, request, fleet, cycle):\n        raise RuntimeError('no idea')\n"
    )
    done = call("sim", "compare", "--against", recorded.path, "--policy", broken, "--fail-if", "failed > 0")
    assert done.exit_code == 1 and "passed" not in done.output, done.output
    assert "broken.py: a plugin failed" in done.output and "so these are not its figures; first: " in done.output


@pytest.mark.simulation
def test_the_roles_of_the_pool_are_simulated(record_run: Callable[..., Any], tmp_path: Path) -> None:
    """Every request was a pair of one of two endpoints that prefill and one of two that decode."""
    servers = parted(headline(servers=replicas(4, block_size=80)), 2).replicas
    always = "policy: {type: prefill-decode, parameters: {always: true}}"
    path = record_run(tmp_path / "journal", always, servers=servers, seconds=5.0).path
    gate = call("sim", "compare", "--against", path, "--policy", "default", "--fail-if", "ttft_p50 > -5%")
    assert gate.exit_code == 0, gate.output
    there = plan_live.recorded(one_run(path), 1e9)
    assert there.preset is not None
    fitted = fit(there, there.preset)
    assert fitted is not None
    assert fitted.simulated == pytest.approx(fitted.recorded, rel=0.15)
    out = ("--out", tmp_path / "plan", *QUICK, "--slo", "ttft_p90=4s,tpot_p90=50ms", "--json")
    rows = json.loads(call("plan", "--live", path, *out).stdout)["rows"]
    assert {row["replicas"]: row["prefill"] for row in rows}[4] == 2


def test_plan_says_that_unstreamed_answers_fit_nothing(record_run: Callable[..., Any], tmp_path: Path) -> None:
    path = record_run(tmp_path / "journal", seconds=3.0, fields={"stream": False}).path
    done = call("plan", "--live", path, "--out", tmp_path / "plan", "-n", 10, *QUICK, "--slo", "e2e_p90=90s")
    assert "note: the engine could not be fitted to the journal" in done.stderr and "engine as learned" in done.stdout


@pytest.mark.simulation
def test_plan_from_a_journal(recorded: Any, tmp_path: Path) -> None:
    """Four servers were there; the engine comes out as fast as that of the recorded run."""
    there = plan_live.recorded(one_run(recorded.path), 1e9)
    assert there.replicas == 4 and len(there.workload) == len(recorded.simulation.jobs)
    assert there.preset is not None
    fitted = fit(there, there.preset)
    assert fitted is not None
    assert fitted.simulated == pytest.approx(fitted.recorded, rel=0.15)
    assert plan_live.recorded(one_run(recorded.path), 3.0).workload.duration_s <= 3.0
    out = ("--out", tmp_path / "plan", "-n", 40, *QUICK, "--slo", "ttft_p90=2s,tpot_p90=50ms", "--json")
    done = call("plan", "--live", recorded.path, *out)
    assert done.exit_code == 0, done.output
    now = json.loads(done.stdout)
    assert now["now"] == 4
    assert {(row["replicas"], row["dead"]) for row in now["rows"]} >= {(4, 0), (4, 1)}
    assert now["policy"] == "as recorded"
    split = json.loads(call("plan", "--live", recorded.path, "--split", *out).stdout)
    assert split["policy"] == "prefill-decode", "the recorded policy splits nothing"
    slower = json.loads(call("plan", "--live", recorded.path, "--engine", "llama-70b-h100-tp4", *out).stdout)
    more = json.loads(call("plan", "--live", recorded.path, "--traffic", "3x", *out).stdout)
    assert max(slower["replicas"], more["replicas"]) > now["replicas"]


def test_a_canarys_decisions_are_explained_by_its_own_parameters(record_run: Any, tmp_path: Path) -> None:
    canary = "canary: {policy: {type: cost-model, parameters: {interference: 9}}, percent: 50}"
    made = record_run(tmp_path, canary, rate=25.0, seconds=2.0)
    seen = set()
    for record in [one for one in made.decisions if isinstance(one, DecisionRecord)][::4]:
        explained = json.loads(call("explain", record.request.id, tmp_path, "--json").output)
        assert explained["explanation"]["reproduced"], explained
        seen.add(explained["policy"])
    assert seen == {"cost-model", "canary:cost-model"}


def test_the_others_are_explained_where_the_canarys_plugin_is_not_installed(
    record_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(node: object, registry: object) -> None:
        raise ConfigError("unknown policy", "$.policy")

    made = record_run(tmp_path, "canary: {policy: power-of-two, percent: 50}", rate=25.0, seconds=1.0)
    monkeypatch.setattr(building, "named_policy", unknown)
    record = next(one for one in made.decisions if isinstance(one, DecisionRecord) and one.policy == "cost-model")
    explained = json.loads(call("explain", record.request.id, tmp_path, "--json").output)
    assert explained["explanation"]["reproduced"]
