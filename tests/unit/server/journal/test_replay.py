"""A journal replayed decides the same; changed, it says what changes; cut, it says what it lacks."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, get_args

import numpy as np
import pytest
from msgspec.structs import replace

from fairlead import __version__
from fairlead.compat.load import load
from fairlead.compat.recorded import changed, record, restore, with_policy
from fairlead.config.building import build_pipeline
from fairlead.core.endpoint import Endpoint
from fairlead.core.errors import ConfigError
from fairlead.core.events import (
    EndpointUp,
    Outcome,
    PeerHeard,
    PeerLost,
    Reconfigured,
    RemotePick,
    RemotePicked,
    RemoteUp,
    RequestArrived,
    Restored,
    ShadowsJudged,
    StreamLost,
)
from fairlead.core.facts import encode as encode_facts
from fairlead.core.facts import read_batch
from fairlead.core.learned import EndpointLearned, Part
from fairlead.core.records import DecisionRecord, OutcomeRecord, ShadowRecord, ShadowVerdict
from fairlead.core.reports import SharedFleet
from fairlead.core.request import Request
from fairlead.core.state import taken
from fairlead.lab.simulator.capture import capture
from fairlead.lab.simulator.journal import Faults, JournalError, one_run, runs, search
from fairlead.lab.simulator.replay import Player, compare, needs_guide, replay, steps
from fairlead.plugins.pickers import RoundRobin
from fairlead.plugins.policies.by_load import LeastRequests
from fairlead.server.journal.blocks import MAGIC, block, decided
from fairlead.server.journal.records import DECIDED, POLICY, SEGMENT, Segment, encode, joined
from fairlead.testing import SimClock

STATEFUL = {
    "default": "policy: default",
    "profile with draws": "scorers: [{type: prefix-aware, weight: 3}, {type: load-aware, weight: 1}]",
    "session affinity": "scorers: [{type: session-affinity, weight: 2}, {type: no-hit-lru, weight: 1}]",
    "round-robin": "policy: round-robin",
    "power of two": "policy: power-of-two",
    "queue": "policy: default\nflowControl: {ttl: 20s}",
}


@pytest.mark.parametrize("policy", STATEFUL.values(), ids=STATEFUL)
def test_the_replay_decides_the_very_same(policy: str, record_run: Callable[..., Any], tmp_path: Path) -> None:
    made = record_run(tmp_path, policy, rate=20.0, seconds=5.0)
    result = replay(one_run(tmp_path))
    decided = [one for one in made.decisions if isinstance(one, DecisionRecord)]
    assert result.replayed.decisions == result.recorded.decisions == len(decided) > 50
    assert result.identical
    assert result.exact
    assert result.notes == []
    assert len({one.endpoint for one in decided}) == 4


def test_the_hash_is_that_of_the_decisions(recorded: Any) -> None:
    first = replay(one_run(recorded.path))
    assert first.recorded.hash == replay(one_run(recorded.path)).replayed.hash
    another = replay(one_run(recorded.path), lambda config: changed(config, "interference=5"))
    assert another.replayed.hash != first.replayed.hash
    assert not another.identical
    assert another.different


@pytest.mark.parametrize("flow", ["", "\nflowControl: {ttl: 20s}"])
def test_a_run_that_began_with_what_another_had_learned_is_replayed(
    flow: str, record_run: Callable[..., Any], tmp_path: Path
) -> None:
    before = record_run(tmp_path / "before", "policy: default" + flow, rate=20.0, seconds=5.0).simulation
    parts = list(taken(before.pipeline.fleet, before.pipeline.tokens, before.kernel.now, 1 << 20))
    assert {type(part) for part in parts} == set(get_args(Part))

    def restore(simulation: Any) -> None:
        for part in parts:
            if isinstance(part, EndpointLearned):  # engines that begin anew would have forgotten all
                part = replace(part, sample=None)
            simulation.feed(Restored(part, 1.0))

    cold = record_run(tmp_path / "cold", "policy: default" + flow, rate=20.0, seconds=5.0)
    warm = record_run(tmp_path / "warm", "policy: default" + flow, rate=20.0, seconds=5.0, midway={6: restore})
    result = replay(one_run(tmp_path / "warm"))
    assert result.identical
    assert result.exact
    assert result.notes == []
    first = [next(one for one in made.decisions if isinstance(one, DecisionRecord)) for made in (cold, warm)]
    assert [one.hit_tokens > 0 for one in first] == [False, True]


def test_what_peers_told_is_replayed(record_run: Callable[..., Any], tmp_path: Path) -> None:
    """A peer sends forty requests to one endpoint, and is lost soon after: decisions change, and are replayed."""
    peer = build_pipeline(load("policy: default", need_endpoints=False), SimClock(), Random(1), fleet=SharedFleet())

    def tell(simulation: Any) -> None:
        (first, *_) = simulation.servers
        peer.handle(EndpointUp(first.endpoint))
        for number in range(1, 41):
            peer.handle(RequestArrived(Request(number, 0.0, prompt_tokens=8000, stream=True)))
        simulation.feed(PeerHeard("p", peer.fleet.reports.batch(0.0)))  # type: ignore[attr-defined]

    def lose(simulation: Any) -> None:
        simulation.feed(PeerHeard("q", b"nonsense"))
        simulation.feed(PeerLost("p"))

    alone = record_run(tmp_path / "alone", "policy: default", rate=20.0, seconds=5.0)
    told = record_run(tmp_path / "told", "policy: default", rate=20.0, seconds=5.0, midway={60: tell, 110: lose})
    result = replay(one_run(tmp_path / "told"))
    assert result.identical and result.exact and result.notes == []
    endpoints = [[made.endpoint for made in run.decisions if isinstance(made, DecisionRecord)] for run in (alone, told)]
    assert endpoints[0] != endpoints[1]


def test_a_peer_leaves_out_what_it_knows_from_us(record_run: Callable[..., Any], tmp_path: Path) -> None:
    """The replay knows it from the reports that the scheduler made."""
    config = load("flowControl: {enabled: false}", need_endpoints=False)
    peer = build_pipeline(config, SimClock(), Random(1), fleet=SharedFleet())

    def exchange(simulation: Any) -> None:
        reports, now = simulation.pipeline.fleet.reports, simulation.kernel.now
        (first, *_) = simulation.servers
        peer.handle(EndpointUp(first.endpoint))
        peer.handle(PeerHeard("live", reports.batch(now)))
        chains = [lease.request.prefix for lease in simulation.pipeline.fleet.ledger]
        for number, chain in enumerate(chains, 1):
            peer.handle(RequestArrived(Request(number, 0.0, prompt_tokens=80, stream=True, prefix=chain)))
        message = read_batch(peer.fleet.reports.batch(0.0))  # type: ignore[attr-defined]
        assert message.sent and not message.blocks, "all of them were reported"
        simulation.feed(PeerHeard("p", encode_facts(message)))
        assert not simulation.pipeline.peers.gaps()

    record_run(tmp_path, "policy: default", rate=20.0, seconds=5.0, midway={60: exchange}, shared=True)
    result = replay(one_run(tmp_path))
    assert result.identical and result.exact and result.notes == []


def test_the_runs_of_other_workers_are_read_too(record_run: Callable[..., Any], tmp_path: Path) -> None:
    """In directories beside the first worker's segments; those of an earlier start are not mixed in."""
    made = record_run(tmp_path, "policy: default", rate=20.0, seconds=5.0)
    other = record_run(tmp_path / "worker-1", "policy: default", rate=10.0, seconds=3.0, run="0000beef")
    (file,) = (tmp_path / "worker-1").glob("*.journal")
    (tmp_path / "worker-2").mkdir()
    run = one_run(tmp_path / "worker-1")
    values = {name: getattr(run.head, name) for name in Segment.__struct_fields__} | {"run": "old", "epoch": -1e6}
    head = block(joined([encode((SEGMENT, 0.0, Segment(**values)))], 1))
    first = MAGIC + block(joined([encode((SEGMENT, 0.0, run.head))], 1))
    (tmp_path / "worker-2" / "old.journal").write_bytes(MAGIC + head + file.read_bytes()[len(first) :])
    assert {each.id for each in runs(tmp_path)} == {"0000cafe", "0000beef", "old"}
    both = one_run(tmp_path)
    assert (both.id, [each.id for each in both.beside]) == ("0000cafe", ["0000beef"])
    count = [len([one for one in each.decisions if isinstance(one, DecisionRecord)]) for each in (made, other)]
    assert len(capture(both, key=b"").workload.records) == sum(count)
    result = replay(both)
    assert result.identical and result.exact and "--run: 0000beef" in result.notes[0]
    assert search(tmp_path, "0000beef.0000000000000003").run == "0000beef"
    last = max((made.decisions[-1].at, "0000cafe"), (other.decisions[-1].at, "0000beef"))[1]
    assert search(tmp_path, "last").run == last


def test_the_earlier_run_of_a_worker_that_died_is_read_too(record_run: Callable[..., Any], tmp_path: Path) -> None:
    """The first worker has two runs, and the second one's overlaps both."""
    record_run(tmp_path, "policy: default", rate=20.0, seconds=5.0)
    record_run(tmp_path / "worker-1", "policy: default", rate=20.0, seconds=5.0, run="0000beef")
    (last,) = tmp_path.glob("*.journal")
    (other,) = (tmp_path / "worker-1").glob("*.journal")
    run = one_run(last)
    for content, made, name, shift_s in (
        (last, tmp_path / "0.journal", "early", -40.0),
        (other, other, "beside", -20.0),
    ):
        head = one_run(content).head
        values = {field: getattr(head, field) for field in Segment.__struct_fields__}
        values |= {"run": name, "epoch": head.epoch + shift_s}
        first = MAGIC + block(joined([encode((SEGMENT, 0.0, head))], 1))
        begun = MAGIC + block(joined([encode((SEGMENT, 0.0, Segment(**values)))], 1))
        made.write_bytes(begun + content.read_bytes()[len(first) :])
    early, beside, again = (
        next(each for each in runs(tmp_path) if each.id == name) for name in ("early", "beside", run.id)
    )
    assert early.until() < again.since() and beside.since() < early.until() and again.since() < beside.until()
    both = one_run(tmp_path)
    assert (both.id, sorted(each.id for each in both.beside)) == (run.id, ["beside", "early"])


def test_other_chance_gives_other_decisions(recorded: Any, tmp_path: Path) -> None:
    """The journal's state of the generator counts: without it the draws differ."""
    (run,) = runs(recorded.path)
    segment = run.segments[0][0].read_bytes()
    values = {name: getattr(run.head, name) for name in Segment.__struct_fields__} | {
        "chance": None,
        "program": "0.0.1",
    }
    head = block(joined([encode((SEGMENT, 0.0, Segment(**values)))], 1))
    first = MAGIC + block(joined([encode((SEGMENT, 0.0, run.head))], 1))
    (tmp_path / "other.journal").write_bytes(MAGIC + head + segment[len(first) :])
    result = replay(one_run(tmp_path))
    assert not result.identical
    assert [note for note in result.notes if "wrote it" in note] == [
        f"version 0.0.1 of Fairlead wrote it and this is {__version__}, which may decide differently"
    ]


def reloaded(text: str) -> Callable[[Any], None]:
    config = load(text, need_endpoints=False)
    return lambda simulation: simulation.feed(Reconfigured(config))


@pytest.mark.parametrize(
    "flow", ["", "\nflowControl: {ttl: 20s, saturation: {type: concurrency-detector, maxConcurrency: 4}}"]
)
def test_two_reloads_midway_are_replayed(flow: str, record_run: Callable[..., Any], tmp_path: Path) -> None:
    """The second one keeps the policy, with the turn that it has come to: only the leases' time is another one."""
    midway = {
        400: reloaded("policy: round-robin" + flow),
        700: reloaded("policy: round-robin\nledger: {leaseTtl: 7s}" + flow),
    }
    made = record_run(tmp_path, "policy: default" + flow, midway=midway)
    decided = [one for one in made.decisions if isinstance(one, DecisionRecord)]
    assert {"cost-model", "round-robin"} <= {one.policy for one in decided}
    assert made.simulation.pipeline.fleet.ledger.ttl == 7.0
    run = one_run(tmp_path)
    assert [kind for kind, _, _ in run.items()].count(POLICY) == 2
    result = replay(run)
    assert result.replayed.decisions == len(decided)
    assert result.identical
    assert result.exact
    compared = compare(run, lambda config: config)
    assert compared.share == 0.0
    assert compared.before.hash == compared.after.hash == result.recorded.hash


def test_flow_control_that_reloads_turn_off_and_on_is_replayed(record_run: Callable[..., Any], tmp_path: Path) -> None:
    on = "policy: default\nflowControl: {saturation: {type: concurrency-detector, maxConcurrency: 4}}"
    off = reloaded("policy: default\nflowControl: {enabled: false}")
    waited = []
    for number, midway in enumerate(({}, {100: off}, {100: off, 200: reloaded(on)})):
        path = tmp_path / str(number)
        path.mkdir()
        made = record_run(path, on, midway=midway)
        assert (made.simulation.pipeline.flow_controller is None) == (number == 1)
        waited.append(sum(one.queued_ms > 0.0 for one in made.decisions if isinstance(one, DecisionRecord)))
        result = replay(one_run(path))
        assert result.identical and result.exact
    always, before, twice = waited
    assert 0 < before < twice < always


def test_a_canary_that_comes_by_a_reload_is_replayed(record_run: Callable[..., Any], tmp_path: Path) -> None:
    canary = "canary: {policy: {type: cost-model, parameters: {interference: 9}}, percent: 40}"
    made = record_run(tmp_path, midway={400: reloaded(canary)})
    by = {one.policy for one in made.decisions if isinstance(one, DecisionRecord)}
    assert by == {"cost-model", "canary:cost-model"}
    result = replay(one_run(tmp_path))
    assert result.identical and result.exact


def test_a_canary_in_another_process_is_said_and_its_decisions_are_followed(
    record_run: Callable[..., Any], tmp_path: Path
) -> None:
    record_run(tmp_path, midway={400: reloaded("canary: {scheduler: {address: '127.0.0.1:1'}, percent: 40}")})
    result = replay(one_run(tmp_path))
    assert result.notes[0] == "a scheduler in another process decided too"
    assert "follows the recorded decisions" in result.notes[1]
    assert not result.exact
    assert result.same == result.both == 110, "it was never connected, so the policy decided all"
    same = compare(one_run(tmp_path), lambda config: config)
    assert same.notes == result.notes
    assert same.changed == []


def test_the_decisions_of_a_scheduler_in_another_process_are_followed(tmp_path: Path) -> None:
    """Three answers, a refusal, and a request whose client leaves: the replay charges what was charged."""
    config = load("policy: cost-model\nscheduler: {address: '127.0.0.1:1', budget: 400ms}\n", need_endpoints=False)
    clock = SimClock()
    pipeline = build_pipeline(config, clock, Random(1))
    items = [encode((SEGMENT, 0.0, Segment(run="r", program=__version__, scheduling=record(config))))]

    def handle(event: Any) -> None:
        items.append(encode((type(event).__name__, clock.time(), event)))
        made = pipeline.handle(event)
        items.extend(encode((DECIDED, clock.time(), decided(r))) for r in made if isinstance(r, DecisionRecord))

    for name in "ab":
        handle(EndpointUp(Endpoint(id=name, address=f"{name}:1")))
    (remote,) = pipeline.parking.remotes if pipeline.parking is not None else ()
    handle(RemoteUp(remote))
    for number in range(1, 6):
        handle(RequestArrived(Request(number, clock.time(), prompt_tokens=1000, prompt_bytes=4000, stream=True)))
        clock.advance(0.01)
    handle(RemotePicked(remote, tuple(RemotePick(number, endpoint="a") for number in (3, 1))))
    handle(StreamLost(4))
    handle(RemotePicked(remote, (RemotePick(5, endpoint="b"), RemotePick(2, outcome=Outcome.REFUSED))))
    (tmp_path / "r.journal").write_bytes(MAGIC + block(joined(items, len(items))))
    result = replay(one_run(tmp_path))
    assert (result.recorded.decisions, result.both) == (4, 4)
    assert result.notes[-1] == "it follows the recorded decisions, compared with what the policy would have done"
    assert result.same == 1 and len(result.different) == 3
    other = compare(one_run(tmp_path), lambda config: config)
    assert other.spread[0] == {"a": 2, "b": 1, "": 1}
    assert other.before.hash == result.recorded.hash
    run = one_run(tmp_path)
    player = Player(run.head, None, needs_guide(run))
    for _ in steps(run, player, Faults(), []):
        pass
    there = pipeline.fleet.table
    assert player.pipeline.fleet.table.queued_tokens.tolist() == there.queued_tokens.tolist()
    leases = [[(e.request.id, e.queued_ms) for e in p.fleet.ledger] for p in (pipeline, player.pipeline)]
    assert leases[0] == leases[1]


def test_a_reload_that_cannot_be_built_changes_nothing_there_either(
    record_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any, *arguments: Any, **more: Any) -> None:
        raise RuntimeError("not today")

    monkeypatch.setattr(RoundRobin, "__init__", refuse)
    made = record_run(tmp_path, midway={400: reloaded("policy: round-robin\nledger: {leaseTtl: 7s}")})
    assert {one.policy for one in made.decisions if isinstance(one, DecisionRecord)} == {"cost-model"}
    assert made.simulation.pipeline.fleet.ledger.ttl == 900.0
    assert replay(one_run(tmp_path)).identical


def test_one_changed_weight(recorded: Any) -> None:
    same = compare(one_run(recorded.path), lambda config: changed(config, "interference=0.1"))
    assert same.share == 0.0
    assert same.before.hash == same.after.hash
    other = compare(one_run(recorded.path), lambda config: changed(config, "interference=2"))
    assert 0.0 < other.share < 1.0
    assert set(other.reasons) <= {"policy", "chance"}
    assert other.before.hash == same.before.hash != other.after.hash
    for one in other.changed:
        assert one.before != one.after
        if one.reason == "policy":
            assert one.gain is not None
            assert one.gain > 0.0, "the changed policy rates its choice higher"


def test_verdicts_of_shadows_are_recorded_and_change_nothing(record_run: Callable[..., Any], tmp_path: Path) -> None:
    judged = ShadowsJudged((ShadowRecord(7, 1.0, "sim/server-1", 2.0, (ShadowVerdict("rr", "sim/server-2"),)),))
    record_run(tmp_path, seconds=5.0, midway={60: lambda simulation: simulation.feed(judged)})
    run = one_run(tmp_path)
    assert [body for kind, _, body in run.items(Faults()) if kind == "ShadowsJudged"] == [judged]
    result = replay(run)
    assert result.identical and result.exact


LIMITED = "flowControl: {ttl: 7s}"


@pytest.mark.parametrize(
    ("before", "other", "ttl"),
    [
        (f"policy: lpwl\n{LIMITED}", "policy: lpwl", 7.0),
        (f"policy: lpwl\n{LIMITED}", "policy: default", 7.0),
        (f"policy: default\n{LIMITED}", "policy: round-robin", 7.0),
        (f"policy: lpwl\n{LIMITED}", "policy: round-robin\nflowControl: {ttl: 9s}", 9.0),
        (f"policy: lpwl\n{LIMITED}", "policy: prefill-decode", None),
        ("policy: lpwl", "policy: default", 590.0),
        ("policy: lpwl", "policy: round-robin", None),
        ("policy: default", "policy: round-robin", None),
        ("policy: default", "policy: default", 590.0),
        ("policy: default\ngateway: none", "policy: default", None),
        (f"policy: lpwl\n{LIMITED}", "policy: lpwl\nflowControl: {enabled: false}", "off"),
    ],
)
def test_another_policy_keeps_the_recorded_flow_control(before: str, other: str, ttl: float | str | None) -> None:
    recorded = restore(record(load(before, need_endpoints=False)))
    made = with_policy(recorded, load(other, need_endpoints=False))
    flow = made.flow_control
    assert made.policy.name == load(other, need_endpoints=False).policy.name
    assert (None if flow is None else flow.settings.ttl if flow.settings.enabled else "off") == ttl


def test_another_policy_has_no_canary_of_the_recorded_one() -> None:
    recorded = restore(record(load("canary: {policy: lpwl, percent: 5}", need_endpoints=False)))
    assert (recorded.canary.policy, recorded.canary.percent) == ("lpwl", 5.0)
    assert not with_policy(recorded, load("policy: round-robin", need_endpoints=False)).canary.policy


def test_round_robin_does_not_choose_by_chance(recorded: Any) -> None:
    other = compare(one_run(recorded.path), lambda config: load("policy: round-robin", need_endpoints=False))
    assert other.reasons["policy"] > other.reasons["chance"]
    for one in other.changed:
        assert one.gain is None
        assert one.cost is not None


def test_cut_anywhere_it_is_read_up_to_there(recorded: Any, tmp_path: Path) -> None:
    (run,) = runs(recorded.path)
    data = run.segments[0][0].read_bytes()
    whole = replay(run)
    counts = []
    for cut in range(len(data) // 7, len(data), len(data) // 7):
        (tmp_path / "cut.journal").write_bytes(data[:cut])
        result = replay(one_run(tmp_path))
        counts.append(result.replayed.decisions)
        assert result.same == result.both
        assert any("unfinished" in note for note in result.notes)
    assert counts == sorted(counts)
    assert 0 < counts[-1] <= whole.replayed.decisions
    assert counts[0] < whole.replayed.decisions / 2


def test_damage_in_the_middle_is_counted_and_no_longer_exact(recorded: Any, tmp_path: Path) -> None:
    (run,) = runs(recorded.path)
    data = bytearray(run.segments[0][0].read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "hit.journal").write_bytes(data)
    faults = Faults()
    list(one_run(tmp_path).items(faults))
    assert faults.damaged > 0
    assert not replay(one_run(tmp_path)).exact


def test_what_was_rotated_away_is_said(record_run: Callable[..., Any], tmp_path: Path) -> None:
    record_run(tmp_path, turns=20, seconds=30.0, max_bytes=360_000, segment_bytes=120_000)
    run = one_run(tmp_path)
    assert not run.complete
    assert run.head.number > 0
    assert len(run.head.endpoints) == 4
    result = replay(run)
    assert not result.exact
    assert "are gone" in result.notes[0]
    assert result.both > 20
    # A quarter would be chance. Like endpoints are equal to the policy, and the prompts of before are gone.
    assert result.same > 0.45 * result.both, "it follows the recorded decisions, so its knowledge becomes theirs"
    same = compare(run, lambda config: config)
    assert same.share == 0.0
    assert not same.exact


def test_several_processes_in_one_directory(recorded: Any, tmp_path: Path) -> None:
    (run,) = runs(recorded.path)
    data = run.segments[0][0].read_bytes()
    (tmp_path / "a.journal").write_bytes(data)
    values = {name: getattr(run.head, name) for name in Segment.__struct_fields__} | {"run": "0000beef"}
    (tmp_path / "b.journal").write_bytes(MAGIC + block(joined([encode((SEGMENT, 0.0, Segment(**values)))], 1)))
    assert [one.id for one in runs(tmp_path)] == ["0000cafe", "0000beef"]
    assert one_run(tmp_path).id == "0000beef"
    assert one_run(tmp_path, "0000cafe").complete
    with pytest.raises(JournalError, match="0000cafe, 0000beef"):
        one_run(tmp_path, "else")


def test_no_journal(tmp_path: Path) -> None:
    (tmp_path / "x.journal").write_bytes(b"something else")
    with pytest.raises(JournalError, match="holds no journal"):
        one_run(tmp_path)


@pytest.mark.parametrize("policy", STATEFUL.values(), ids=STATEFUL)
def test_a_recorded_configuration_is_the_configuration(policy: str) -> None:
    config = load(policy, need_endpoints=False)
    again = restore(record(config))
    assert record(again) == record(config)
    assert [spec.parameters for spec in again.policy.plugins()] == [spec.parameters for spec in config.policy.plugins()]
    assert (again.flow_control is None) == (config.flow_control is None)


def test_settings_are_changed_by_name() -> None:
    profile = load(STATEFUL["profile with draws"], need_endpoints=False)
    weights = {spec.name: spec.weight for spec in changed(profile, "load-aware=7.5").policy.scorers}
    assert weights == {"prefix-aware": 3.0, "load-aware": 7.5}
    model = changed(load("policy: default", need_endpoints=False), "memory=2").policy.plugin
    assert model is not None
    assert model.parameters.memory == 2.0
    with pytest.raises(ConfigError, match=r"it has: .*interference"):
        changed(load("policy: default", need_endpoints=False), "wrong=1")
    with pytest.raises(ConfigError, match="no weight"):
        changed(profile, "load-aware=much")
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        changed(profile, "load-aware")


def test_what_decides_beside_the_journal_is_said(recorded: Any, tmp_path: Path) -> None:
    (run,) = runs(recorded.path)
    values = {name: getattr(run.head, name) for name in Segment.__struct_fields__} | {
        "beside": ("an oracle decided too",)
    }
    (tmp_path / "b.journal").write_bytes(MAGIC + block(joined([encode((SEGMENT, 0.0, Segment(**values)))], 1)))
    result = replay(one_run(tmp_path))
    assert not result.exact
    assert result.notes[0] == "an oracle decided too"


def test_a_policy_that_learns_from_outcomes_is_replayed(
    record_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside it and guided: what it learns is the same."""

    class Learning(LeastRequests):
        """A class of its own: whether a class has `ended` is asked once, and the answer kept for the whole process."""

        def cost(self, request: Any, fleet: Any, cycle: Any) -> Any:
            return np.array([vars(self).get(name, 0.0) for name in fleet.table.ids])

        def ended(self, outcome: OutcomeRecord) -> None:
            vars(self)[outcome.endpoint] = outcome.duration_ms

    monkeypatch.setattr("fairlead.plugins.policies.by_load.LeastRequests", Learning)
    record_run(tmp_path, "policy: least-requests", seconds=20.0)
    run = one_run(tmp_path)
    result = replay(run)
    assert result.identical and result.exact and result.replayed.decisions > 100
    assert compare(run, lambda config: config).share == 0.0
    guided = Player(run.head, guided=True)
    chosen = [
        (record.endpoint, guided.own[record.request.id])
        for step in steps(run, guided, Faults(), [])
        for record in step.decided
    ]
    assert len({own for _, own in chosen}) == 4 and all(endpoint == own for endpoint, own in chosen)


def test_an_infinite_cost_is_no_number_of_a_difference(recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def cost(self: Any, request: Any, fleet: Any, cycle: Any) -> Any:
        costs = np.full(len(fleet.table), np.inf)
        costs[request.id % len(costs)] = 1.0
        return costs

    monkeypatch.setattr(LeastRequests, "cost", cost)
    other = load("policy: least-requests", need_endpoints=False)
    result = compare(one_run(recorded.path), lambda config: with_policy(config, other))
    assert len(result.changed) > 50 and {one.gain for one in result.changed} == {None}


@pytest.mark.usefixtures("never_returns")
def test_a_policy_that_never_returns_rests_and_the_comparison_goes_on(
    recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LeastRequests, "__module__", "theirs")
    other = load("policy: least-requests", need_endpoints=False)
    result = compare(one_run(recorded.path), lambda config: with_policy(config, other))
    assert result.before.decisions == result.after.decisions > 50 and result.decisions == 0
    assert result.failed == 2 and "2 times a plugin failed" in result.notes[-1]
