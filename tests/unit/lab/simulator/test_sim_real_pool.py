"""A preset fitted to a real server, and captured traffic of two such servers: it takes as long in the simulator."""

from pathlib import Path
from statistics import fmean

import msgspec
import pytest

from fairlead.lab.engine.presets import write_preset
from fairlead.lab.load.tune import Facts, Measured, Observation
from fairlead.lab.simulator.build import ScenarioSpec, build, read_workload
from fairlead.lab.simulator.run import simulate

DATA = Path(__file__).parents[3] / "data" / "real-pool"
SERVER = Facts(model="tiny", max_model_len=2048, block_size=32, num_blocks=256, max_num_seqs=4, max_batched_tokens=2048)


@pytest.fixture(scope="module")
def preset():
    lines = (DATA / "observations.jsonl").read_bytes().splitlines()
    measured = Measured(SERVER, [msgspec.json.decode(line, type=Observation) for line in lines])
    return write_preset(measured.preset(measured.fit(), "real"))


#: Near saturation, as at 5 per second, repeated runs of the real servers are farther apart than that.
@pytest.mark.parametrize(("rate", "within"), [("2.5", 0.15), ("5", 0.20)])
def test_means_are_those_that_were_measured(preset, rate, within):
    path = DATA / f"round-robin-{rate}rps.jsonl"
    outcomes = [record.outcome for record in read_workload(path).records]
    scenario = build(ScenarioSpec(name=rate, source=str(path), servers=2, preset=preset))
    found = simulate(scenario, "policy: round-robin", seed=1)
    assert found.done == len(outcomes) == 90
    assert found.ttft_mean_ms == pytest.approx(fmean(outcome.ttft_ms for outcome in outcomes), rel=within)
    assert found.e2e_mean_ms == pytest.approx(fmean(outcome.e2e_ms for outcome in outcomes), rel=within)
    # Two engines beside a gateway on two cores slow each other down: without that it is too quick.
    alone = "".join(line for line in preset.splitlines(keepends=True) if not line.startswith("conten"))
    quick = simulate(build(ScenarioSpec(name=rate, source=str(path), servers=2, preset=alone)), "policy: round-robin")
    assert quick.ttft_mean_ms < 0.85 * fmean(outcome.ttft_ms for outcome in outcomes)
