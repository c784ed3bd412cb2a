"""Simulated against published: the same trace, the same servers, somebody else's simulator.

Needs the Mooncake conversation trace (3 MB): set FAIRLEAD_TRACES to the directory of `mooncake_conversation.jsonl`.

The other simulator is the mocker of Dynamo 1.6.1 (`ai-dynamo-runtime`, offline replay, polynomial engine, 8 workers,
blocks of 64 tokens). Its engine takes `4.21e-7 n² + 1.518e-2 n + 16.5` ms for n new tokens, whatever came before them,
and `-25.74 p² + 54.01 p + 5.74` ms for a decode, p being the share of the KV cache in use. The first is used as it is;
the second as the straight line that is closest to it up to p = 0.9, since our engine jumps over decode steps.
"""

import os
from pathlib import Path

import pytest

from fairlead.lab.engine.spec import EngineSpec, LatencyModel
from fairlead.lab.simulator.run import simulate
from fairlead.lab.simulator.scenarios import MOONCAKE, mooncake, unlike
from fairlead.lab.simulator.world import Replica

TRACE = Path(os.environ.get("FAIRLEAD_TRACES", "traces")) / MOONCAKE
pytestmark = pytest.mark.skipif(not TRACE.is_file(), reason=f"no {TRACE}; set FAIRLEAD_TRACES to have this compared")


class Polynomial(LatencyModel, frozen=True):
    """`c_kv_ns` is the slope of the decode line."""

    def step_s(self, new: int, attention: float, decoding: int, kv_tokens: int) -> float:
        prefill = 4.21e-7 * new * new + 1.518e-2 * new + 16.5 if new else 0.0
        return (prefill + self.c0_ms * (decoding > 0) + self.c_kv_ns * 1e-6 * kv_tokens) * 1e-3

    def decode_s(self, decoding: int) -> tuple[float, float]:
        return self.c0_ms * 1e-3, self.c_kv_ns * 1e-9


def mocked(speedup: float, blocks: int) -> object:
    tokens = blocks * 64
    spec = EngineSpec(
        latency=Polynomial(c0_ms=7.8, c_kv_ns=30.8e6 / tokens),
        num_blocks=blocks + 1,
        block_size=64,
        max_model_len=200_000,
    )
    return mooncake(TRACE, speedup, [Replica(engine=spec)] * 8)


#: (speedup, KV blocks per worker): mean, p50, p90, p99 of TTFT in ms under round robin.
MOCKER = {
    (1.0, 4096): (359, 213, 764, 2199),
    (2.0, 16384): (347, 207, 766, 2147),
}


@pytest.mark.parametrize(("speedup", "blocks"), MOCKER)
def test_round_robin_takes_what_the_mocker_takes(speedup, blocks):
    summary = simulate(mocked(speedup, blocks), "policy: round-robin")
    found = (summary.ttft_mean_ms, summary.ttft_p50_ms, summary.ttft_p90_ms, summary.ttft_p99_ms)
    assert found == pytest.approx(MOCKER[speedup, blocks], rel=0.05)


def test_when_memory_is_short_balance_is_worth_more_than_with_plenty():
    """The mocker: 1382 ms round robin, 450 load only at twice the speed and 4096 blocks."""
    even = simulate(mocked(2.0, 4096), "policy: round-robin").ttft_mean_ms
    least = simulate(mocked(2.0, 4096), "policy: least-requests").ttft_mean_ms
    assert even == pytest.approx(1382, rel=0.6)
    assert even > 1.5 * least


#: Mean TTFT in s, published for another simulator of 8 Qwen3-32B servers on two H100 (whole prompts, no preemption).
SECONDS = {(1.5, "round-robin"): 8.16, (1.5, "least-requests"): 2.45, (2.0, "round-robin"): 92.6}


@pytest.mark.parametrize(("speedup", "policy"), SECONDS)
def test_the_published_comparison_comes_out_alike(speedup, policy):
    summary = simulate(mooncake(TRACE, speedup), f"policy: {policy}")
    assert summary.ttft_mean_ms / 1e3 == pytest.approx(SECONDS[speedup, policy], rel=0.25)


def test_unlike_servers_ruin_round_robin_as_published():
    summary = simulate(unlike(mooncake(TRACE)), "policy: round-robin")
    assert summary.ttft_mean_ms / 1e3 == pytest.approx(220, rel=0.15)
