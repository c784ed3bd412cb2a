"""Faults between a real Envoy, a real scheduler and stubs."""

import asyncio
import shutil
from collections.abc import Callable
from itertools import count
from typing import Any

import aiohttp
import pytest
from gw_modes import FULL_DUPLEX, Pair, bootstrap, connection_managers, embedded, ext_proc_filter
from ports import free_ports

from fairlead.doctor.checks import scheduler as scheduling
from fairlead.doctor.run import Examination
from fairlead.gateway.envoy.binary import find_envoy
from fairlead.lab.stub.kv_publisher import KvEventsConfig

pytestmark = [pytest.mark.envoy, pytest.mark.usefixtures("envoy_binary")]

Json = dict[str, Any]
Listed = Callable[..., list[Json]]


def codes(examination: Examination) -> set[str]:
    return {one.code for one in examination.findings}


@pytest.fixture(autouse=True)
def _busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """How busy the machine is that runs these tests is no fault of the installation."""
    monkeypatch.setattr(scheduling, "ENOUGH", 1_000_000)


async def test_a_whole_installation_that_is_well_gives_no_finding(world: Any, pool_of: Listed) -> None:
    addresses = await world.stubs(2, KvEventsConfig())
    config: Json = {
        "endpoints": pool_of(addresses),
        "kvEvents": {"enabled": True},
        "tokens": {"models": {"*": {"render": "engine"}}},
    }
    admin = await world.serve(config)
    port = free_ports(1)[0]
    envoy_admin = world.envoy(embedded(world.live.config, port, addresses))
    await world.answers(f"{envoy_admin}/ready")
    await world.answers(f"{admin}/readyz")
    gateway = f"http://127.0.0.1:{port}"
    found = await world.examined(config, admin=admin, gateway=gateway, gateway_admin=envoy_admin, probe=True)
    assert (found.findings, found.well) == ((), True)
    assert {one.check for one in found.outcomes if one.state != "well"} == {"kv-dialled"}


async def test_a_gateway_that_obeys_clients_is_named(world: Any, pool_of: Listed) -> None:
    """Somebody else's configuration that fails open, and no scheduler."""
    addresses = await world.stubs(1)
    port, nobody = free_ports(2)
    config = bootstrap(Pair("BUFFERED", "NONE"), port, f"127.0.0.1:{nobody}", addresses)
    ext_proc_filter(config)["failure_mode_allow"] = True
    envoy_admin = world.envoy(config)
    await world.answers(f"{envoy_admin}/ready")
    found = await world.examined({"endpoints": pool_of(addresses)}, gateway=f"http://127.0.0.1:{port}")
    assert "headers.obeyed" in codes(found)
    assert "POST /v1/chat/completions" in found.findings[0].evidence


async def test_a_gateway_that_does_not_strip_headers_is_named(world: Any, pool_of: Listed) -> None:
    """The embedded gateway's configuration with one extension taken out; all requests are served."""
    addresses = await world.stubs(1)
    config = {"endpoints": pool_of(addresses)}
    admin = await world.serve(config)
    port = free_ports(1)[0]
    stripped = embedded(world.live.config, port, addresses)
    for manager in connection_managers(stripped):
        manager.pop("early_header_mutation_extensions")
    envoy_admin = world.envoy(stripped)
    await world.answers(f"{envoy_admin}/ready")
    found = await world.examined(
        config, admin=admin, gateway=f"http://127.0.0.1:{port}", gateway_admin=envoy_admin, only=("headers",)
    )
    assert codes(found) == {"headers.not-stripped"}
    assert "x-" in found.findings[0].evidence


async def test_a_gateway_that_asks_nobody_is_named(world: Any, pool_of: Listed) -> None:
    addresses = await world.stubs(1)
    config = {"endpoints": pool_of(addresses)}
    admin = await world.serve(config)
    port, nobody = free_ports(2)
    envoy_admin = world.envoy(bootstrap(Pair("whole", "none", log=False), port, f"127.0.0.1:{nobody}", addresses))
    await world.answers(f"{envoy_admin}/ready")
    found = await world.examined(config, admin=admin, gateway=f"http://127.0.0.1:{port}", only=("asking",))
    assert codes(found) == {"asking.bypassed"}


async def test_a_gateway_that_fails_or_is_away_is_named(world: Any, pool_of: Listed) -> None:
    addresses = await world.stubs(1)
    port, nobody = free_ports(2)
    envoy_admin = world.envoy(bootstrap(Pair(FULL_DUPLEX, "NONE"), port, f"127.0.0.1:{nobody}", addresses))
    await world.answers(f"{envoy_admin}/ready")
    config = {"endpoints": pool_of(addresses)}
    found = await world.examined(config, gateway=f"http://127.0.0.1:{port}", only=("asking",))
    assert codes(found) == {"asking.failed"}
    found = await world.examined(config, gateway=f"http://127.0.0.1:{nobody}", only=("asking",))
    assert codes(found) == {"asking.no-answer"}


async def test_the_embedded_gateways_configuration_is_tried(
    world: Any, pool_of: Listed, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: Json = {"endpoints": pool_of(await world.stubs(1)), "gateway": "embedded"}
    assert (await world.examined(config, only=("gateway",))).well
    refusing = world.directory / "refusing"
    refusing.write_text(f'#!/bin/sh\nexec "{find_envoy()}" --no-such-option "$@"\n')
    refusing.chmod(0o755)
    monkeypatch.setenv("FAIRLEAD_ENVOY", str(refusing))
    found = await world.examined(config, only=("gateway",))
    assert codes(found) == {"gateway.refused"}
    assert "Envoy ended with code 1" in found.findings[0].evidence
    monkeypatch.setenv("FAIRLEAD_ENVOY", str(world.directory / "envoy"))
    assert codes(await world.examined(config, only=("gateway",))) == {"gateway.no-envoy"}


async def test_a_scheduler_that_runs_with_other_endpoints_is_named(world: Any, pool_of: Listed) -> None:
    addresses = await world.stubs(2)
    admin = await world.serve({"endpoints": pool_of(addresses[:1]), "gateway": {"mode": "none"}})
    found = await world.examined({"endpoints": pool_of(addresses)}, admin=admin)
    assert codes(found) == {"scheduler.other-endpoints"}
    assert found.findings[0].where == ("default/e1",)


async def test_a_scheduler_without_recent_metrics_is_named(world: Any, pool_of: Listed) -> None:
    config: Json = {
        "endpoints": pool_of(await world.stubs(2)),
        "metrics": {"staleness": "2500ms"},
        "gateway": {"mode": "none"},
    }
    admin = await world.serve(config)
    async with asyncio.timeout(30):  # a busy machine may be too late with its metrics at first
        while not (await world.examined(config, admin=admin)).well:
            await asyncio.sleep(0.2)
    await world.pool.stop(0)
    async with asyncio.timeout(30):  # on a busy machine those of the other may be late now and then
        while codes(await world.examined(config, admin=admin)) != {"endpoints.unreachable", "freshness.stale"}:
            await asyncio.sleep(0.2)


async def test_a_port_that_speaks_otherwise_than_configured_is_named(
    world: Any, pool_of: Listed, certificate: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """The certificate was configured after the scheduler had started. Where all is well, its log stays clean."""
    config: Json = {"endpoints": pool_of(await world.stubs(1)), "gateway": {"mode": "none"}}
    admin = await world.serve(config)
    config["extProc"] = {"port": world.live.config.ext_proc.port}
    with caplog.at_level("INFO"):
        assert not codes(await world.examined(config, admin=admin, only=("tls",)))
    assert "broke the protocol" not in caplog.text
    for file, name in zip(certificate, ("tls.crt", "tls.key"), strict=True):
        shutil.copy(file, world.directory / name)
        (world.directory / name).chmod(0o600)
    config["extProc"] = {"port": world.live.config.ext_proc.port, "tls": {"certDir": str(world.directory)}}
    found = await world.examined(config, admin=admin)
    assert codes(found) == {"tls.ext-proc"}
    assert found.findings[0].evidence.endswith("configured is TLS, it speaks plaintext")


async def test_predictions_that_a_running_scheduler_distrusts_are_named(
    world: Any, pool_of: Listed, stub_tokeniser: Callable[..., Any]
) -> None:
    """It reads chats with another template than the engine, and has seen that in answers."""
    addresses = await world.stubs(1, KvEventsConfig())
    config: Json = {"endpoints": pool_of(addresses), "kvEvents": {"enabled": True, "check": 1}}
    admin = await world.serve(config)
    world.live.core.kv.prompts.tokeniser = stub_tokeniser(b"<|be terse and kind|>...")
    port = free_ports(1)[0]
    envoy_admin = world.envoy(embedded(world.live.config, port, addresses))
    await world.answers(f"{envoy_admin}/ready")
    await world.answers(f"{admin}/readyz")
    prompts = (f"{number} " + "word " * 200 for number in count())
    async with aiohttp.ClientSession() as session, asyncio.timeout(30):
        while not codes(await world.examined(config, admin=admin, only=("hits",))):
            chat = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": next(prompts)}]}
            for place in (addresses[0], f"127.0.0.1:{port}"):  # past the scheduler: all it can know of this is events
                async with session.post(f"http://{place}/v1/chat/completions", json=chat) as answer:
                    assert answer.status == 200
    found = await world.examined(config, admin=admin, only=("hits",))
    assert codes(found) == {"hits.distrusted"}
    assert found.findings[0].evidence.startswith("likely cause: chat-template")


async def test_a_gateway_of_no_address_is_named(world: Any, pool_of: Listed) -> None:
    config = {"endpoints": pool_of(await world.stubs(1))}
    for url in ("http://gateway.invalid:80", "http://127.0.0.1:99999", "http://[::1"):
        found = await world.examined(config, gateway=url, only=("headers", "asking"))
        assert codes(found) == {"asking.no-answer"}
