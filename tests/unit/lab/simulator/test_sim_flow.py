"""The simulator queues as the server does when its configuration says so."""

from msgspec import structs

from fairlead.core.records import OutcomeRecord
from fairlead.core.scheduler import Pipeline
from fairlead.lab.simulator.run import config_from, simulate
from fairlead.lab.simulator.scenarios import conversation_like, cut, headline, mooncake
from fairlead.lab.simulator.simulation import Simulation

FLOW = "flowControl: {ttl: 590s}\n"


def pipeline_of(text: str) -> Pipeline:
    return Simulation(headline(2.0, seconds=1.0), config_from(text)[0]).pipeline


def test_a_configuration_with_flow_control_is_simulated_with_it(mooncake_head) -> None:
    assert pipeline_of("policy: default\nflowControl: {enabled: false}\n").flow_controller is None
    pipeline = pipeline_of(FLOW)
    assert pipeline.flow_controller is not None and pipeline.flow_controller.policy == pipeline.policy.name
    waited: list[float] = []
    scenario = mooncake(mooncake_head, 8.0)
    queued = simulate(scenario, FLOW, watch=lambda record: waited.append(getattr(record, "queued_ms", 0.0)))
    assert max(waited) > 0
    assert queued.failed == 0
    assert simulate(scenario, FLOW) == queued


def test_forecasts_of_those_that_waited_hold_what_they_promise() -> None:
    """From when they were sent: what they waited before was known."""
    crowded = conversation_like(3.5)
    ended: list[OutcomeRecord] = []

    def watch(record: object) -> None:
        if isinstance(record, OutcomeRecord) and record.queued_ms and record.ttft_ms >= 0.0:
            ended.append(record)

    simulate(structs.replace(crowded, workload=cut(crowded.workload, 1500)), FLOW, watch=watch, validate=False)
    judged = [(one.forecast, one.sent_ttft_ms) for one in ended[len(ended) // 10 :]]
    inside = sum(f is not None and f.low_ms <= came <= f.high_ms for f, came in judged)
    assert len(judged) > 300
    assert 0.85 <= inside / len(judged) <= 0.95


def test_below_saturation_it_changes_nothing() -> None:
    calm = headline(2.0, seconds=20.0)
    assert simulate(calm, FLOW).decision_hash == simulate(calm, "policy: default").decision_hash


def test_who_waits_too_long_is_shed(mooncake_head) -> None:
    crowded = mooncake(mooncake_head, 50.0)
    summary = simulate(crowded, "flowControl: {ttl: 100ms}\n", validate=False)
    assert summary.shed > 0
    assert summary.shed + summary.done == summary.requests


def test_a_gateway_that_shows_no_responses_costs_little() -> None:
    """First tokens are known when the answer is over: until then an engine is not taken for one that hangs."""
    made = headline(8.0, seconds=20.0)
    seen = simulate(made, FLOW)
    blind = simulate(structs.replace(made, world=structs.replace(made.world, watched=False)), FLOW, validate=False)
    assert (blind.done, blind.failed) == (seen.done, 0)
    assert blind.ttft_mean_ms < 1.2 * seen.ttft_mean_ms
