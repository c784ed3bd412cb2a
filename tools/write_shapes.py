"""Writes tests/data/shapes: small traces in the shape of published ones, and how the default policy serves them.

    python tools/write_shapes.py

No request of a published trace is in them. Each is generated, with about the mean lengths and the reuse that are
published for it (`SHAPES`), and may be passed on under the project's license. They are for regression tests: `speedup`
keeps `SERVERS` servers busy enough that choices matter, so rates are not those of the published traces.
"""

import json
from pathlib import Path

from msgspec import Struct

from fairlead.lab.simulator.run import simulate
from fairlead.lab.simulator.world import Scenario, replicas
from fairlead.lab.workload.formats import read_native, write_native
from fairlead.lab.workload.generate import Pace, generate
from fairlead.lab.workload.record import Workload

DIRECTORY = Path(__file__).parents[1] / "tests" / "data" / "shapes"
FIGURES = DIRECTORY / "figures.json"
SERVERS = 4
#: What is recorded of a run.
KEPT = ("requests", "done", "shed", "failed", "ttft_mean_ms", "ttft_p99_ms", "e2e_mean_ms", "prefix_hit_rate")


class Shape(Struct, frozen=True, kw_only=True):
    """What is published of a trace, and the parameters of `fairlead sim workload generate` that come close."""

    origin: str
    #: Mean tokens of prompts and answers; share of prompt tokens that an endless cache has, `None` = not published.
    prompt_tokens: int
    output_tokens: int
    reuse: float | None
    kind: str = "conversation"
    pace: Pace
    #: In the simulation, times the trace's own pace.
    speedup: float
    parameters: dict[str, str]


def _words(**values: float) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}


SHAPES = {
    "mooncake-conversation-like": Shape(
        origin="Mooncake, FAST'25: conversation trace, 12,031 requests in 3,537 s",
        prompt_tokens=12_035, output_tokens=343, reuse=0.374,
        pace=Pace(rate=2.3, count=140, dispatch="timestamp"), speedup=3.0,
        parameters=_words(systems=10, system_tokens=512, turns=1.3, first_tokens=10000, turn_tokens=1500,
                          output_tokens=343, gap_s=20, spread=1.1, block_size=512),
    ),
    "mooncake-synthetic-like": Shape(
        origin="Mooncake, FAST'25: synthetic trace, 3,993 requests in 1,022 s",
        prompt_tokens=15_325, output_tokens=149, reuse=0.651,
        pace=Pace(rate=1.6, count=70, dispatch="timestamp"), speedup=3.0,
        parameters=_words(systems=3, system_tokens=4096, turns=2.4, first_tokens=8500, turn_tokens=2300,
                          output_tokens=149, gap_s=10, spread=0.7, block_size=512),
    ),
    "azure-code-like": Shape(
        origin="Azure Public Dataset 2023: code trace, 8,819 requests in 57 minutes",
        prompt_tokens=2048, output_tokens=28, reuse=0.0,
        pace=Pace(rate=2.6, count=200, arrivals="bursty", dispatch="timestamp"), speedup=15.0,
        parameters=_words(systems=1, system_tokens=0, turns=1, first_tokens=2048, output_tokens=28, spread=1),
    ),
    "azure-conversation-like": Shape(
        origin="Azure Public Dataset 2023: conversation trace, 19,366 requests in 58 minutes",
        prompt_tokens=1155, output_tokens=211, reuse=0.0,
        pace=Pace(rate=5.6, count=200, dispatch="timestamp"), speedup=15.0,
        parameters=_words(systems=1, system_tokens=0, turns=1, first_tokens=1155, output_tokens=211, spread=0.8),
    ),
    "shared-prefix-like": Shape(
        origin="llm-d's published comparison: groups of 5 users, 6,000 tokens in common of 7,200",
        prompt_tokens=7200, output_tokens=1000, reuse=0.67, kind="shared-prefix",
        pace=Pace(rate=5.0, count=120), speedup=1.0, parameters=_words(groups=24, prompts=5, block_size=400),
    ),
    "agents-like": Shape(
        origin="published means of agents' sessions: 49,141 tokens in, 659 out",
        prompt_tokens=49_141, output_tokens=659, reuse=None, kind="agentic-replay",
        pace=Pace(rate=0.2, count=6), speedup=1.0,
        parameters=_words(block_size=512, first_tokens=5000, turn_tokens=2300),
    ),
}  # fmt: skip


def made(name: str) -> Workload:
    shape = SHAPES[name]
    workload = generate(shape.kind, shape.pace, shape.parameters)
    workload.name = name
    return workload


def path(name: str) -> Path:
    return DIRECTORY / f"{name}.jsonl"


def figures(name: str, policy: str = "policy: default") -> dict[str, float]:
    """How a policy serves the shipped trace."""
    workload = read_native(path(name).read_bytes(), name, name)
    servers = replicas(SERVERS, block_size=int(SHAPES[name].parameters.get("block_size", "64")))
    scenario = Scenario(name=name, workload=workload, replicas=servers, speedup=SHAPES[name].speedup)
    found = simulate(scenario, policy).as_dict()
    return {key: found[key] for key in KEPT}


def main() -> None:
    DIRECTORY.mkdir(exist_ok=True)
    for name in SHAPES:
        path(name).write_bytes(write_native(made(name)))
    FIGURES.write_text(json.dumps({name: figures(name) for name in SHAPES}, indent=1) + "\n")


if __name__ == "__main__":
    main()
