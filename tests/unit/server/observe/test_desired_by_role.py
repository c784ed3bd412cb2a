"""What a simulated pool with prefill and decode servers asks for when prompts grow, and when answers do."""

from typing import Any

from msgspec import structs

from fairlead.compat.load import load
from fairlead.core.records import DecisionRecord, OutcomeRecord
from fairlead.lab.simulator.scenarios import parted
from fairlead.lab.simulator.simulation import START, Simulation
from fairlead.lab.simulator.world import WARM_UP, Scenario, replicas
from fairlead.lab.workload.conversation import Conversation, conversation
from fairlead.lab.workload.record import Record, Workload
from fairlead.server.observe.watch import Watch

PREFILL, DECODE, SECONDS, RATE = 2, 4, 90.0, 5.0
#: Prompt tokens, answer tokens.
PHASES = ((2000, 200), (10_000, 200), (2000, 2000))


def phase(number: int) -> list[Record]:
    prompt, answer = PHASES[number]
    lengths = {"first_tokens": prompt, "output_tokens": answer, "spread": 0.2}
    spec = Conversation(systems=1, system_tokens=64, turns=1, **lengths)
    made = conversation(spec, seconds=SECONDS, rate=RATE, seed=number, dispatch="timestamp")
    later = round(number * SECONDS * 1e6)
    return [structs.replace(r, id=f"{number}-{r.id}", arrival_us=r.arrival_us + later) for r in made.records]


def test_longer_prompts_ask_for_prefill_servers_and_longer_answers_for_decode_servers() -> None:
    records = tuple(record for number in range(len(PHASES)) for record in phase(number))
    pool = Scenario(
        name="phases",
        workload=Workload(name="phases", records=records, dispatch="timestamp"),
        replicas=replicas(PREFILL + DECODE, block_size=64),
    )
    config = load("policy: prefill-decode\n", need_endpoints=False)
    sim = Simulation(parted(pool, PREFILL), config, 0, watch=lambda record: take(record))
    watch = Watch(sim.pipeline.fleet, lambda: sim.kernel.now)
    assert config.policy.plugin is not None
    watch.watch_prompts(config.policy.plugin.parameters.may_split)
    asked: dict[float, list[int | None]] = {}

    def take(record: Any) -> None:
        if isinstance(record, DecisionRecord):
            watch.on_decision(record, 0.0)
        elif isinstance(record, OutcomeRecord):
            watch.on_outcome(record)

    def look(at: float) -> None:
        asked[at] = [watch.desired_endpoints(role) for role in watch.roles]
        if at < SECONDS * len(PHASES):
            sim.kernel.call_at(START + WARM_UP + at + 5.0, look, at + 5.0)

    sim.kernel.call_at(START + WARM_UP, look, 0.0)
    sim.run()
    usual, prompts, answers = (asked[SECONDS * (number + 1) - 5.0] for number in range(len(PHASES)))
    assert usual == [1, 1]
    assert prompts[0] is not None and prompts[0] > PREFILL and prompts[1] == 1
    assert answers[1] is not None and answers[1] > 2 and answers[0] == 1
