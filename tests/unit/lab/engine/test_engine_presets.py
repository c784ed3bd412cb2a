"""Presets and the latency formula, against the figures that are known of the real servers."""

import pytest

from fairlead.lab.engine.presets import PRESETS, preset
from fairlead.lab.engine.spec import EngineSpec, LatencyModel
from fairlead.lab.simulator.world import replicas

QWEN = PRESETS["qwen3-32b-h100"]


def test_capacity_of_the_known_server():
    assert QWEN.kv_tokens == 270_000
    spec = QWEN.spec()
    assert spec.kv_tokens == 270_000 // 16 * 16
    assert spec.usable_blocks == 16_875


def test_other_capacities_are_in_the_range_of_their_hardware():
    sizes = {name: entry.kv_tokens for name, entry in PRESETS.items()}
    assert sizes["llama-8b-l40s"] == 142_000
    assert sizes["llama-8b-h100"] == 397_000
    assert sizes["llama-70b-h100-tp4"] < sizes["llama-70b-h100-tp8"]
    for h100, h200 in (("qwen3-32b-h100", "qwen3-32b-h200"), ("llama-8b-h100", "llama-8b-h200")):
        assert sizes[h100] < sizes[h200]


@pytest.mark.parametrize(
    ("decoding", "context", "measured_ms", "tolerance"),
    [(1, 100, 13.3, 0.02), (64, 2048, 21.6, 0.06), (128, 4096, 38.3, 0.06), (256, 8192, 108.0, 0.08)],
)
def test_decode_steps_match_the_measured_ones(decoding, context, measured_ms, tolerance):
    ms = QWEN.latency.step_s(0, 0.0, decoding, decoding * context) * 1e3
    assert ms == pytest.approx(measured_ms, rel=tolerance)


def test_a_mixed_step_is_what_the_sum_of_the_source_says():
    ms = QWEN.latency.step_s(8192, 8192 * 4096.0, 64, 64 * 8192) * 1e3
    assert ms == pytest.approx(449, abs=1)


def test_every_preset_makes_a_server_that_could_start():
    for entry in PRESETS.values():
        spec = entry.spec(block_size=128, max_num_seqs=8)
        assert spec.kv_tokens >= entry.max_model_len


def test_a_preset_carries_the_limits_of_its_server():
    text = "latency: {c0_ms: 14}\nkv_tokens: 12288\nmax_model_len: 4096\nmax_num_seqs: 4\nblock_size: 32\n"
    spec = preset(text).spec()
    limits = (spec.kv_tokens, spec.max_model_len, spec.max_num_seqs, spec.block_size)
    assert limits == (12288, 4096, 4, 32)
    assert preset(text).spec(max_num_seqs=8).max_num_seqs == 8
    assert replicas(2, preset(text))[1].engine == spec


def test_built_in_servers_take_what_their_memory_holds():
    assert replicas(1)[0].engine.max_model_len == 200_000
    small = replicas(1, "llama-8b-l40s")[0].engine
    assert small.max_model_len == small.kv_tokens == 142_000


def test_built_in_servers_start_as_vllm_does_by_itself():
    slots = {name: preset(name).spec().max_num_seqs for name in ("qwen3-32b-h100", "llama-8b-a100", "llama-8b-l40s")}
    assert slots == {"qwen3-32b-h100": 1024, "llama-8b-a100": 256, "llama-8b-l40s": 256}
    assert all(entry.spec().async_scheduling for entry in PRESETS.values())
    assert not preset("latency: {c0_ms: 14}\n").spec().async_scheduling


def test_an_unknown_preset_names_the_nearest_or_all():
    assert preset("Llama-8B-H100").model == "meta-llama/Llama-3.1-8B-Instruct"
    assert preset("h100-Qwen3-32b") is preset("qwen3-32b-h100")
    with pytest.raises(ValueError, match="unknown preset 'x'; known: llama-70b-h100-tp4, "):
        preset("x")
    with pytest.raises(ValueError, match="did you mean 'qwen3-32b-h200'"):
        preset("qwen-32b-h200")


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_size": 0},
        {"max_num_seqs": 0},
        {"max_num_seqs": 9000},
        {"num_blocks": 10},
        {"max_model_len": 10_000_000},
    ],
)
def test_impossible_limits_are_refused(wrong):
    with pytest.raises(ValueError):
        EngineSpec(**({"latency": LatencyModel(1.0), "num_blocks": 5000} | wrong))
