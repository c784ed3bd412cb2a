"""`fairlead tune` against stub servers over real sockets: what is asked, and that all of it is bounded."""

import asyncio
import json
import signal
import subprocess
import sys
import time

import msgspec
import pytest
from commands import fairlead
from typer.testing import CliRunner

from fairlead.cli.app import build_app
from fairlead.config.schema import Metrics
from fairlead.lab.load import tune_probe
from fairlead.lab.load.tune import Observation, TooLittle, ask_facts
from fairlead.lab.load.tune_probe import Ask, probe
from fairlead.lab.stub.config import StubConfig
from fairlead.lab.stub.pool import StubPool

CONFIG = StubConfig(preset="llama-8b-h100", time_ratio=20.0, max_model_len=8192)
#: For tests that fit what was observed. Twenty times as fast as real, an answer takes 20 ms. A busy machine reads it
#: in one piece, or sees the first tokens of a group far apart, and nothing is left to fit.
MEASURED = msgspec.structs.replace(CONFIG, time_ratio=4.0)


#: Where a server has slots for all there is a try that succeeds, however busy the machine is.
MANY_TRIES = 200


@pytest.fixture
def little(monkeypatch):
    monkeypatch.setattr(tune_probe, "PREFILL_TOKENS", (128, 512, 2048, 9000))
    monkeypatch.setattr(tune_probe, "BATCHES", (1, 4, 6))
    monkeypatch.setattr(tune_probe, "LONG", 600)
    monkeypatch.setattr(tune_probe, "ROUNDS", 2)
    # On a busy machine a fast stub's first tokens are seen far apart; how long things took is not looked at here. And a
    # pause may be longer than a whole answer.
    monkeypatch.setattr(tune_probe, "TOGETHER", 1e6)
    monkeypatch.setattr(tune_probe, "SLOT_TRIES", 20)


def test_metrics_are_fetched_as_the_scheduler_does_by_default():
    assert (Metrics().interval, Metrics().timeout) == (tune_probe.FETCH_S, tune_probe.FETCH_TIMEOUT_S)


class Kept(list):
    """Observations; `facts` are the newest."""

    facts = None

    def __call__(self, more, facts):
        self.extend(more)
        self.facts = facts


async def asked(pool, **fields):
    target = f"http://{pool.addresses[0]}"
    facts = await asyncio.to_thread(ask_facts, target, {})
    return Ask(target=target, facts=facts, time_ratio=20.0, **fields)


async def test_each_probe_is_observed_and_says_what_it_is(little, monkeypatch):
    monkeypatch.setattr(tune_probe, "SLOT_TRIES", MANY_TRIES)
    async with StubPool(CONFIG) as pool:
        ask, found, seen = await asked(pool), Kept(), []
        facts = ask.facts
        assert (facts.model, facts.max_model_len, facts.block_size) == ("meta-llama/Llama-3.1-8B-Instruct", 8192, 16)
        assert facts.num_blocks > 1000
        await probe(ask, found, lambda *look: seen.append(look))
    assert {one.clients for one in found if one.completion_tokens == tune_probe.CLIENT_ANSWER} == {6}
    assert sum(one.clients for one in found) == 2 * 6 * 6 * tune_probe.CLIENT_REQUESTS
    alone = [one for one in found if one.completion_tokens == 2]
    # 9000 tokens are more than the model takes; the longest is as long as it takes.
    assert len(alone) == 8
    assert 6000 < max(one.prompt_tokens for one in alone) < 8192
    assert all(one.cached_tokens < 32 and one.ttft_ms > 0 for one in alone)
    decoding = [one for one in found if one.completion_tokens == tune_probe.ANSWER_TOKENS]
    assert {one.batch for one in decoding} <= {1, 4, 6} and len(decoding) > 1
    assert all(one.cached_tokens >= one.prompt_tokens - 32 for one in decoding)
    assert seen[-1] == (22, 22, "done")


async def test_the_servers_slots_are_found(little):
    """A page does not tell them, and a group that is larger does not decode together."""
    async with StubPool(msgspec.structs.replace(CONFIG, max_num_seqs=3)) as pool:
        found = Kept()
        await probe(await asked(pool), found)
    assert found.facts.max_num_seqs == 3
    assert {one.batch for one in found if not one.clients} == {1, 3}
    assert {one.clients for one in found} == {0, 3}


async def test_a_neighbour_is_kept_busy_meanwhile(little, monkeypatch):
    monkeypatch.setattr(tune_probe, "SLOT_TRIES", MANY_TRIES)
    async with StubPool(CONFIG, replicas=2) as pool:
        found = Kept()
        ask = await asked(pool, neighbour=f"http://{pool.addresses[1]}")
        await probe(ask, found)
        served = [replica.engine.stats.prefix_queries for replica in pool.replicas]
    assert {(one.neighbours, one.clients) for one in found} == {(0, 0), (0, 6), (1, 0), (1, 6)}
    assert served[1] > 0


async def test_the_end_of_time_ends_what_is_under_way_and_keeps_the_rest(little):
    """One request of this server takes minutes."""
    async with StubPool(msgspec.structs.replace(CONFIG, time_ratio=0.01)) as pool:
        found = Kept()
        await probe(await asked(pool, seconds=2.0), found)
    assert all(one.ttft_ms > 0 for one in found)


async def test_no_time_at_all(little):
    async with StubPool(CONFIG) as pool:
        found = Kept()
        await probe(await asked(pool, seconds=0.0), found)
    assert found == []


async def test_a_server_that_refuses_is_quoted(little):
    async with StubPool(CONFIG) as pool:
        ask = await asked(pool)
        ask = msgspec.structs.replace(ask, facts=msgspec.structs.replace(ask.facts, model="nobody"))
        with pytest.raises(TooLittle, match=r"probes failed: status_404: .*`nobody` does not exist"):
            await probe(ask, Kept())


async def test_the_command_prints_a_preset_that_is_simulated(little, tmp_path):
    out = tmp_path / "mine.yaml"
    async with StubPool(msgspec.structs.replace(MEASURED, max_num_seqs=4, max_model_len=2048, kv_tokens=8192)) as pool:
        arguments = ["tune", pool.addresses[0], "--time-ratio", "4", "--json", "--out", str(out)]
        done = await asyncio.to_thread(CliRunner().invoke, build_app(), arguments)
        gone = pool.addresses[0]
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    preset = document["preset"]
    limits = {name: preset[name] for name in ("max_num_seqs", "max_model_len", "kv_tokens", "block_size")}
    assert limits == {"max_num_seqs": 4, "max_model_len": 2048, "kv_tokens": 8192, "block_size": 16}
    assert document["fit"]["prefills"] >= 6 and document["fit"]["residuals"]
    ran = CliRunner().invoke(build_app(), ["sim", "run", "viral-prompt", "--requests", "4", "--engine", str(out)])
    assert ran.exit_code == 0, ran.output
    failed = await asyncio.to_thread(fairlead, "tune", gone)
    assert (failed.exit_code, "does not answer" in failed.output) == (1, True)


async def test_a_running_server_is_imitated_by_simulate(little, tmp_path):
    async with StubPool(msgspec.structs.replace(MEASURED, max_num_seqs=4)) as pool:
        arguments = ["sim", "run", "viral-prompt", "--requests", "4", "--engine", pool.addresses[0], "--json"]
        done = await asyncio.to_thread(CliRunner().invoke, build_app(), arguments)
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["figures"]["done"] == 4
    assert "max_num_seqs: 4" in document["configuration"]["preset"]
    assert "prefill of" in done.stderr


async def test_what_was_seen_until_it_was_stopped_is_kept(tmp_path):
    save, out = tmp_path / "seen.jsonl", tmp_path / "mine.yaml"
    async with StubPool(msgspec.structs.replace(MEASURED, max_num_seqs=4)) as pool:
        command = [sys.executable, "-m", "fairlead", "tune", pool.addresses[0], "--save", str(save), "--out", str(out)]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 60.0
        while not _enough(save) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        process.send_signal(signal.SIGINT)
        said, complaint = await process.communicate()
    assert process.returncode == 130, complaint
    assert b"error: stopped" in complaint and b"fitted from" in complaint
    assert b"latency" in said and b"latency" in out.read_bytes()


async def test_a_server_that_goes_away_leaves_what_it_told(little, monkeypatch, tmp_path):
    monkeypatch.setattr(tune_probe, "ROUNDS", 1000)
    save = tmp_path / "seen.jsonl"
    # Twenty times as fast, a busy machine's delays exceed the time of a step, and nothing can be fitted.
    async with StubPool(msgspec.structs.replace(CONFIG, time_ratio=2.0)) as pool:
        arguments = ["tune", pool.addresses[0], "--time-ratio", "2", "--seconds", "60", "--save", str(save)]
        probing = asyncio.create_task(asyncio.to_thread(CliRunner().invoke, build_app(), arguments))
        while not _enough(save) and not probing.done():
            await asyncio.sleep(0.02)
        await pool.stop(0)
        done = await probing
    assert done.exit_code == 1, done.output
    assert "probes failed" in done.stderr and "fitted from" in done.stderr
    assert "latency" in done.stdout, done.output


def _enough(save):
    lines = save.read_bytes().splitlines() if save.exists() else []
    seen = [msgspec.json.decode(line, type=Observation) for line in lines]
    return sum(one.tpot_ms > 0 for one in seen) >= 12 and sum(one.batch == 1 for one in seen) >= 8
