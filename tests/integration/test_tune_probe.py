"""`fairlead tune` against stub servers over real sockets: what is asked, and that all of it is bounded."""

import asyncio
import json

import pytest
from typer.testing import CliRunner

from fairlead.cli.main import build_app
from fairlead.lab.load import tune_probe
from fairlead.lab.load.tune import TooLittle, ask_facts
from fairlead.lab.load.tune_probe import Ask, probe
from fairlead.lab.stub.config import StubConfig
from fairlead.lab.stub.pool import StubPool

CONFIG = StubConfig(preset="llama-8b-h100", time_ratio=20.0, max_model_len=8192)


@pytest.fixture
def little(monkeypatch):
    monkeypatch.setattr(tune_probe, "PREFILL_TOKENS", (128, 512, 2048, 9000))
    monkeypatch.setattr(tune_probe, "BATCHES", {64: (1, 4), 600: (2,)})
    # On a busy machine a fast stub's first tokens are seen far apart; how long things took is not looked at here.
    monkeypatch.setattr(tune_probe, "TOGETHER", 1e6)


async def test_each_probe_is_observed_and_says_what_it_is(little):
    async with StubPool(CONFIG) as pool:
        target, seen = f"http://{pool.addresses[0]}", []
        facts = await asyncio.to_thread(ask_facts, target, {})
        assert (facts.model, facts.max_model_len, facts.block_size) == ("meta-llama/Llama-3.1-8B-Instruct", 8192, 16)
        assert facts.num_blocks > 1000
        ask = Ask(target=target, model=facts.model, max_model_len=facts.max_model_len, time_ratio=20.0)
        found = await probe(ask, lambda *look: seen.append(look))
    alone = [one for one in found if one.batch == 1 and one.completion_tokens == 2]
    # 9000 tokens are more than the model takes.
    assert len(alone) == 9
    assert all(one.cached_tokens < 32 and one.ttft_ms > 0 for one in alone)
    decoding = [one for one in found if one.completion_tokens == tune_probe.ANSWER_TOKENS]
    assert {one.batch for one in decoding} <= {1, 2, 4}
    assert all(one.cached_tokens >= one.prompt_tokens - 32 for one in decoding)
    assert seen[-1] == (6, 6, "done")


async def test_time_ends_it(little):
    async with StubPool(CONFIG) as pool:
        ask = Ask(target=f"http://{pool.addresses[0]}", model="", max_model_len=8192, seconds=0.0)
        assert await probe(ask) == []


async def test_a_server_that_refuses_is_said(little):
    async with StubPool(CONFIG) as pool:
        with pytest.raises(TooLittle, match="probes failed: status_404"):
            await probe(Ask(target=f"http://{pool.addresses[0]}", model="nobody"))


async def test_the_command_prints_a_preset(little):
    async with StubPool(CONFIG) as pool:
        arguments = ["tune", pool.addresses[0], "--time-ratio", "20", "--json"]
        done = await asyncio.to_thread(CliRunner().invoke, build_app(), arguments)
        gone = pool.addresses[0]
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["preset"]["model"] == "meta-llama/Llama-3.1-8B-Instruct"
    assert document["preset"]["kv_tokens"] > 100_000
    assert document["fit"]["prefills"] >= 9
    failed = await asyncio.to_thread(CliRunner().invoke, build_app(), ["tune", gone])
    assert failed.exit_code == 1 or "does not answer" in str(failed.exception)
