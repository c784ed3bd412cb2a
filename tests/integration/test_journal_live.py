"""The journal of a real run: Envoy, scheduler and stubs in processes of their own."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from ports import free_ports
from typer.testing import CliRunner

from fairlead.cli.app import build_app
from fairlead.lab.demo import Child
from fairlead.lab.simulator.journal import decisions, one_run
from fairlead.lab.simulator.replay import replay

CANARY = "sphinx of black quartz"
REQUESTS = 60
HEADER = "x-fairlead-decision"
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
#: A name that is refused.
RESERVED = "reserved"


class Running:
    def __init__(self, folder: Path, ports: list[int]) -> None:
        self.journal = folder / "journal"
        self.gateway, self.admin = (f"http://127.0.0.1:{port}" for port in (ports[0], ports[2]))


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    ports = free_ports(6)
    endpoints = [f"127.0.0.1:{port}" for port in ports[3:]]
    found = Running(tmp_path, ports)
    config = {
        "gateway": {"mode": "embedded", "port": ports[0], "concurrency": 1},
        "extProc": {"port": ports[1]},
        "admin": {"port": ports[2]},
        "endpoints": endpoints,
        "models": {"list": [{"name": RESERVED, "targets": {MODEL: 0}}], "unmatched": "pass"},
        "journal": {"path": str(found.journal), "flush": 0.05, "header": HEADER},
    }
    file = tmp_path / "fairlead.yaml"
    file.write_text(json.dumps(config))
    stubs = [Child("stub", f"--port={port}", "--engine=llama-8b-h100", "--time-ratio=50") for port in ports[3:]]
    async with stubs[0], stubs[1], stubs[2]:
        for port, stub in zip(ports[3:], stubs, strict=True):
            await stub.ready(f"http://127.0.0.1:{port}/health")
        async with Child("serve", str(file)) as serve:
            await serve.ready(f"{found.admin}/readyz")
            yield found


async def ask(session: aiohttp.ClientSession, url: str, number: int, model: str = MODEL) -> tuple[int, str]:
    body = {
        "model": model,
        "max_tokens": 4,
        "stream": number % 3 > 0,
        "messages": [{"role": "user", "content": f"{CANARY} {number % 7} " * 300 + str(number)}],
    }
    headers = {"x-request-id": f"mine-{number}"}
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
        await answer.read()
        return answer.status, answer.headers.get(HEADER, "")


def call(*arguments: object) -> Any:
    return CliRunner(env={"COLUMNS": "200"}).invoke(build_app(), [str(argument) for argument in arguments])


async def test_a_live_run_is_explained_replayed_and_holds_no_words(running: Running, tmp_path: Path) -> None:
    async with aiohttp.ClientSession() as session:
        answers = []
        for begin in range(0, REQUESTS, 10):
            group = (ask(session, running.gateway, number) for number in range(begin, begin + 10))
            answers += await asyncio.gather(*group)
        assert {status for status, _ in answers} == {200}
        ids = [name for _, name in answers]
        assert len({*ids}) == REQUESTS
        assert "" not in ids
        async with session.get(f"{running.admin}/debug/decisions/nobody.ffff") as answer:
            assert answer.status == 404
        written = Counter[str]()
        while (written["decided"], written["ended"]) != (REQUESTS, REQUESTS):
            await asyncio.sleep(0.05)
            written = Counter(kind for kind, _, _ in one_run(running.journal).items())
        async with session.get(f"{running.admin}/debug/decisions/{ids[-1]}") as answer:
            page = await answer.json()
        async with session.get(f"{running.admin}/metrics") as answer:
            metrics = await answer.text()
    assert 'fairlead_journal_lost_total{why="busy"} 0' in metrics
    for one in page["explanation"]["candidates"]:
        assert sum(one["terms"].values()) == pytest.approx(one["total"], rel=1e-9)
    assert page["explanation"]["reproduced"]
    shown = await asyncio.to_thread(call, "explain", ids[30], "--admin", running.admin)
    assert "to tie" in shown.output
    journaled = json.loads((await asyncio.to_thread(call, "explain", ids[-1], running.journal, "--json")).stdout)
    assert journaled == page, "explained from the journal as live"
    live = await asyncio.to_thread(call, "explain", "last", "--admin", running.admin, "--json")
    on_disk = await asyncio.to_thread(call, "explain", "last", running.journal, "--json")
    assert json.loads(live.stdout) == json.loads(on_disk.stdout), "the newest decision"
    plan = ("plan", "--live", running.admin, "--slo", "ttft_p90=1s", "--out", tmp_path / "plan")
    planned = await asyncio.to_thread(call, *plan, "--json")
    assert planned.exit_code == 0, planned.output
    assert json.loads(planned.stdout)["now"] == 3
    run = one_run(running.journal)
    result = replay(run)
    assert result.replayed.decisions == REQUESTS
    assert result.identical
    assert result.exact
    found = {item.decision.request.external_id: item for item in decisions(run)}
    assert set(found) == {f"mine-{number}" for number in range(REQUESTS)}
    file = tmp_path / "capture.jsonl"
    assert call("journal", "capture", running.journal, "--out", file).exit_code == 0
    everything = b"".join(repr(item).encode() for item in run.items()) + file.read_bytes()
    everything += b"".join(path.read_bytes() for path in running.journal.iterdir())
    for word in CANARY.split():
        if len(word) > 2:
            assert word.encode() not in everything, word
    assert b"mine-" not in file.read_bytes()


async def test_a_refusal_names_its_decision(running: Running) -> None:
    async with aiohttp.ClientSession() as session:
        status, name = await ask(session, running.gateway, 1, model=RESERVED)
    assert status == 404
    shown = await asyncio.to_thread(call, "explain", name, "--admin", running.admin)
    assert "nowhere (model_not_found)" in shown.output
