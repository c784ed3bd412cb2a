"""The simulator queues as the server does when its configuration says so."""

from fairlead.sim.run import scheduling_from, simulate
from fairlead.sim.scenarios import headline, mooncake

FLOW = "flowControl: {ttl: 590s}\n"


def test_a_configuration_with_flow_control_is_simulated_with_it(mooncake_head) -> None:
    assert scheduling_from("policy: default\n")[1] is None
    policy, desk = scheduling_from(FLOW)
    assert desk is not None and desk.policy == policy.name
    waited: list[float] = []
    scenario = mooncake(mooncake_head, 8.0)
    queued = simulate(scenario, FLOW, watch=lambda record: waited.append(getattr(record, "queued_ms", 0.0)))
    assert max(waited) > 0
    assert queued.failed == 0
    assert simulate(scenario, FLOW) == queued


def test_below_saturation_it_changes_nothing() -> None:
    calm = headline(2.0, seconds=20.0)
    assert simulate(calm, FLOW).decision_hash == simulate(calm, "policy: default").decision_hash


def test_who_waits_too_long_is_shed(mooncake_head) -> None:
    crowded = mooncake(mooncake_head, 50.0)
    summary = simulate(crowded, "flowControl: {ttl: 100ms}\n", validate=False)
    assert summary.shed > 0
    assert summary.shed + summary.done == summary.requests
