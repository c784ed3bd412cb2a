"""A request that asks for several answers is that many sequences in the engine, and is charged and learned as such."""

from random import Random

import pytest

from fairlead.core import events as ev
from fairlead.core.endpoint import Sample
from fairlead.core.facts import Charged
from fairlead.core.fleet import Fleet
from fairlead.core.instructions import Route
from fairlead.core.request import Request, Usage
from fairlead.core.scheduler import Pipeline
from fairlead.core.tokens import TokenEstimator
from fairlead.lab.simulator.run import policy_from, simulate
from fairlead.lab.simulator.world import Scenario, replicas
from fairlead.lab.workload.record import Record, arranged
from fairlead.testing import SimClock, builders


def of_four(stream: bool = True, most: int = 0) -> Request:
    return builders.request("x" * 4000, stream=stream, sequences=4, max_tokens=most)


def load(fleet: Fleet) -> tuple[float, float]:
    fleet.validate()
    return fleet.table.queue.item(0), fleet.table.active.item(0)


def test_the_endpoint_runs_as_many_and_computes_the_prompt_once() -> None:
    fleet = builders.fleet("e0")
    lease = fleet.charge(of_four(), 0, 1.0, 0, 4 * 100.0)
    table = fleet.table
    assert load(fleet) == (4, 0)
    assert (table.inflight[0], table.queued_tokens[0], table.kv_tokens[0]) == (4, 1000, 1000 + 4 * 50)
    fleet.sampled("e0", 2.0, 2.0, Sample(waiting=0, running=4))
    assert load(fleet) == (0, 4), "all four are ours"
    fleet.first_token(lease, 3.0)
    assert load(fleet) == (0, 4)
    fleet.sampled("e0", 4.0, 4.0, Sample(waiting=0, running=6))
    assert load(fleet) == (0, 6), "two are others'"
    fleet.ledger.release(lease)
    assert load(fleet) == (0, 2)


def test_a_scrape_that_shows_one_of_them_running_shows_that_the_prompt_is_being_computed() -> None:
    fleet = builders.fleet("e0")
    leases = [fleet.charge(of_four(False), 0, 0.0, 0, 400.0) for _ in range(3)]
    account = fleet.ledger.account(0)
    account.reconcile(1.0, waiting=7.0, running=5.0)
    assert account.begun(1.0) == leases[:2]
    account.validate()
    assert sum(account.row()[:2]) == 12


def test_sequences_that_ended_before_the_others_stop_counting() -> None:
    fleet = builders.fleet("e0")
    lease = fleet.charge(of_four(), 0, 1.0, 0, 400.0)
    fleet.first_token(lease, 1.5)
    for i in range(3):
        fleet.sampled("e0", 5.0 + i, 5.0 + i, Sample(waiting=0, running=1))
    assert load(fleet) == (0, 1)


def test_peers_are_told_how_many_they_are() -> None:
    assert Charged(0, 0, 1, 1, 0, 0, False, 0).sequences == 1, "of an origin of a former version"


class Rig:
    def __init__(self) -> None:
        self.clock, self.fleet = SimClock(), builders.fleet("e0")
        policy = policy_from("policy: least-requests\n")
        self.pipeline = Pipeline(self.clock, Random(1), self.fleet, policy, TokenEstimator())

    def serve(self, request: Request, tokens: int, took_s: float) -> None:
        """One request from its arrival to its end; first token after a second."""
        found = self.pipeline.handle(ev.RequestArrived(request))
        assert any(isinstance(one, Route) for one in found)
        self.clock.advance(1.0)
        self.pipeline.handle(ev.FirstTokenSeen(request.id))
        self.clock.advance(took_s)
        self.pipeline.handle(ev.ResponseEnded(request_id=request.id, status=200, usage=Usage(completion_tokens=tokens)))
        self.pipeline.validate()


def test_the_length_of_an_answer_is_learned_of_each() -> None:
    rig = Rig()
    for _ in range(300):
        rig.serve(of_four(), 4 * 30, 1.0)
    assert rig.pipeline.tokens.estimate_output("", 0, "chat") == pytest.approx(30, abs=2)


@pytest.mark.parametrize(("most", "taught"), [(50, True), (0, False)])
def test_an_engine_is_not_taken_for_faster_because_several_answers_come_at_once(most: int, taught: bool) -> None:
    rig, one = Rig(), Rig()
    for _ in range(40):
        rig.serve(of_four(most=most), 4 * 50, 2.0)
        one.serve(builders.request("x" * 4000, stream=True, max_tokens=most), 50, 2.0)
    learned, expected = rig.fleet.predictor.tpot_kappa[0], one.fleet.predictor.tpot_kappa[0]
    assert learned == pytest.approx(expected, rel=0.05) if taught else learned == 1.0


def test_the_simulated_server_computes_one_prompt_and_gives_all_answers() -> None:
    def served(n: int) -> tuple[float, float, float]:
        record = Record(
            id="0", in_tokens=4096, out_tokens=40, max_tokens=40, block_size=64, hash_ids=tuple(range(64)), n=n
        )
        workload = arranged("several", [record])
        found = simulate(
            Scenario(name="several", workload=workload, replicas=replicas(1, block_size=64)), validate=True
        )
        return found.ttft_mean_ms, found.e2e_mean_ms, found.output_tokens_per_s * found.duration_s

    one, eight = served(1), served(8)
    assert eight[0] == pytest.approx(one[0], rel=0.25), "the last block of the prompt is computed eight times"
    assert one[1] < eight[1] < 1.3 * one[1]
    assert (one[2], eight[2]) == (pytest.approx(40), pytest.approx(320))
