"""A running scheduler takes over a changed configuration file, or says why not."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest
from msgspec.structs import replace
from ports import free_ports

from fairlead.compat.load import load
from fairlead.core.events import FirstTokenSeen, RequestArrived, ResponseEnded
from fairlead.core.policy import Context
from fairlead.gateway.envoy.process import CONFIG
from fairlead.lab.simulator.journal import one_run
from fairlead.lab.simulator.replay import replay
from fairlead.server.journal.records import POLICY
from fairlead.server.live import Live
from fairlead.server.observe.log import setup
from fairlead.server.running_gateway import RunningGateway
from fairlead.testing import request

FILE = """
gateway: none
extProc: {{host: 127.0.0.1, port: 0}}
als: {{enabled: false}}
admin: {{port: {admin}}}
metrics: {{interval: 10s, idleInterval: 10s, staleness: 20s}}
scorers: [{{type: session-affinity, weight: {weight}}}]
selection: {{picker: max-score}}
endpoints: [{endpoints}]
{more}
"""


MORE = """
ledger: {leaseTtl: 30s}
parsing: {maxBodyBytes: 1MiB, maxBufferedBytes: 2MiB}
"""


def write(file: Path, weight: float, endpoints: int = 2, admin: int = 0, more: str = "") -> None:
    listed = ", ".join(f"'127.0.0.1:{1 + i}'" for i in range(endpoints))
    new = file.with_suffix(".new")
    new.write_text(FILE.format(weight=weight, endpoints=listed, admin=admin, more=more))
    os.replace(new, file)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.02)


def homes(live: Live) -> set[str]:
    """Where requests of one session go."""
    fleet = live.fleet
    asked = request(session="s")
    picks = [live.pipeline.policy.choose(asked, fleet, Context(0.0, Random(i))) for i in range(40)]
    return {fleet.table.ids[pick.slot] for pick in picks}


async def test_weights_endpoints_and_limits_while_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "f.yaml"
    write(file, weight=100)
    setup("info")
    live = Live(load(file))
    running = asyncio.create_task(live.run())
    try:
        await until(lambda: live.config.source == str(file) and hasattr(live, "admin"))
        assert len(homes(live)) == 1

        write(file, weight=0)
        await until(lambda: live.config.policy.scorers[0].weight == 0)
        assert len(homes(live)) == 2

        before = live.pipeline.policy
        write(file, weight=5, more="filters: [{type: nope}]")
        said = ""
        while "cannot be used" not in said:
            await asyncio.sleep(0.05)
            said += capsys.readouterr().err
        assert "unknown filter type 'nope'" in said
        assert live.pipeline.policy is before

        write(file, weight=100, endpoints=1, admin=1, more=MORE)
        await until(lambda: live.fleet.table.count == 1)
        assert (live.fleet.ledger.ttl, live.host.max_body) == (30.0, 1 << 20)
        assert b"\nfairlead_buffered_limit_bytes 2097152\n" in b"".join(live.watch.exposition())
        assert len(homes(live)) == 1
        said = capsys.readouterr().err
        assert "rejected" in said and "$.admin.port" in said
        assert live.config.admin.port == 0
        wanted = "the file has changes that need a restart: $.admin.port"
        assert live.serving.troubles.look() == {"restart": wanted}
        live.pipeline.validate()
        write(file, weight=100, endpoints=1, more=MORE)
        await until(lambda: not live.serving.troubles.look())
    finally:
        live.stop()
        await asyncio.wait_for(running, 40)


async def test_what_a_worker_has_of_its_own_hides_no_change_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that starts later has what the others were started with, and what applies while they run."""
    file, beside = tmp_path / "f.yaml", RunningGateway([], str(tmp_path), 1, 2)
    write(file, weight=100)
    (tmp_path / CONFIG).write_bytes(file.read_bytes())
    write(file, weight=0, admin=9, more="seed: 3")
    own: dict[str, Any] = {"admin": {"port": 0}, "seed": 5}
    config, begun = beside.configurations(file, own, file.read_bytes())
    assert config.policy.scorers[0].weight == 0, "before its first decision"
    live = Live(config, beside, begun)
    running = asyncio.create_task(live.run())
    try:
        await until(lambda: hasattr(live, "serving") and "restart" in live.serving.troubles.look())
        wanted = "the file has changes that need a restart: $.admin.port, $.seed"
        assert live.serving.troubles.look()["restart"] == wanted
        assert (live.config.admin.port, live.config.seed) == (0, 5)
    finally:
        live.stop()
        await asyncio.wait_for(running, 40)


async def test_the_port_takes_bodies_as_large_as_at_the_start(tmp_path: Path) -> None:
    """One that starts later may be asked to take them again."""
    file, beside = tmp_path / "f.yaml", RunningGateway([], str(tmp_path), 1, 2)
    write(file, weight=1, more="parsing: {maxBodyBytes: 2MiB}")
    (tmp_path / CONFIG).write_bytes(file.read_bytes())
    write(file, weight=1, more="parsing: {maxBodyBytes: 1MiB}")
    (port,) = free_ports(1)
    config, begun = beside.configurations(file, {"extProc": {"port": port}}, file.read_bytes())
    live = Live(config, beside, begun)
    running = asyncio.create_task(live.run())
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.stream_stream("/envoy.service.ext_proc.v3.ExternalProcessor/Process")(wait_for_ready=True)
            await call.write(b"\xff" * (3 << 19))
            assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT, "it was read"
    finally:
        live.stop()
        await asyncio.wait_for(running, 40)


async def test_models_of_the_configuration_while_it_runs(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    write(file, 1, more="models: [{name: chat, targets: {a: 90, b: 10}}]")
    live = Live(load(file))
    running = asyncio.create_task(live.run())
    try:
        await until(lambda: hasattr(live, "admin"))
        assert live.pipeline.models.known == {"chat", "a", "b"}
        write(file, 1, more="models: {list: [{name: chat, targets: {c: 1}}], unmatched: pass}")
        await until(lambda: live.pipeline.models.known == {"chat", "c"})
        assert not live.pipeline.models.strict
        write(file, 1)
        await until(lambda: live.pipeline.models.empty)
    finally:
        live.stop()
        await asyncio.wait_for(running, 40)


async def test_a_file_of_models_that_cannot_be_used_is_a_restriction_until_it_can(tmp_path: Path) -> None:
    file, names = tmp_path / "f.yaml", tmp_path / "names.yaml"
    names.write_text("kind: Other")
    write(file, 1, more=f"models: {{file: '{names}'}}")
    live = Live(load(file))
    running = asyncio.create_task(live.run())
    try:
        await until(lambda: hasattr(live, "admin"))
        for text, restricted in (("kind: [", True), ("kind: Other", False)):
            names.write_text(text)
            await until(lambda: ("models" in live.watch.troubles.present) is restricted)  # noqa: B023 awaited here
    finally:
        live.stop()
        await asyncio.wait_for(running, 40)


def burst(live: Live, first: int, count: int = 40) -> None:
    """Requests of some sessions come and end."""
    for number in range(first, first + count):
        asked = request("hello " * (number % 5), session=f"s{number % 4}", model="m")
        live.driver.feed(RequestArrived(replace(asked, id=number, arrived=0.0)))
        live.driver.feed(FirstTokenSeen(number))
        if number % 3:
            live.driver.feed(ResponseEnded(request_id=number, status=200))


async def test_a_run_with_two_reloads_replays_to_the_same_decisions(tmp_path: Path) -> None:
    file, journal = tmp_path / "f.yaml", tmp_path / "journal"
    more = f"journal: {{path: '{journal}'}}"
    write(file, weight=100, more=more)
    live = Live(load(file))
    running = asyncio.create_task(live.run())
    try:
        await until(lambda: hasattr(live, "admin"))
        burst(live, 1)
        write(file, weight=0, endpoints=4, more=more)
        await until(lambda: live.fleet.table.count == 4)
        burst(live, 101)
        write(file, weight=0, endpoints=4, more=more + "\nledger: {leaseTtl: 30s}")
        await until(lambda: live.fleet.ledger.ttl == 30.0)
        burst(live, 201)
    finally:
        live.stop()
        for number in range(301):
            live.driver.feed(ResponseEnded(request_id=number, status=200))
        await asyncio.wait_for(running, 40)
    run = one_run(journal)
    assert [kind for kind, _, _ in run.items()].count(POLICY) == 2
    result = replay(run)
    assert result.recorded.decisions == result.replayed.decisions == 120
    assert result.recorded.hash == result.replayed.hash
    assert result.identical and result.exact
