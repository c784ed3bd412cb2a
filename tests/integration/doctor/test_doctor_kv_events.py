"""Faults of KV events, with stubs that publish what their caches do."""

import asyncio
import re
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import zmq
import zmq.asyncio
from aiohttp import web
from msgspec.structs import replace
from ports import free_ports

from fairlead.doctor.checks import kv_events as kv_dialled
from fairlead.doctor.requests import CHAT
from fairlead.doctor.run import Examination
from fairlead.lab.stub.kv_publisher import KvEventsConfig, encode_batch
from fairlead.pool.kv_events.discovery import Curve
from fairlead.pool.kv_events.wire import replay_reply

Json = dict[str, Any]
Listed = Callable[..., list[Json]]
Made = Callable[..., Any]
ON: Json = {"kvEvents": {"enabled": True}}
BY_ENGINE: Json = {"tokens": {"models": {"*": {"render": "engine"}}}}


def codes(examination: Examination) -> set[str]:
    return {one.code for one in examination.findings}


def dialling(port: int, topic: str = "") -> KvEventsConfig:
    return KvEventsConfig(events=f"tcp://127.0.0.1:{port}", replay="", connect=True, topic=topic)


async def test_events_that_nobody_hears_are_named(world: Any, pool_of: Listed) -> None:
    endpoints = pool_of(await world.stubs(2, KvEventsConfig()))
    found = await world.examined({"endpoints": endpoints}, ("kv-unheard",))
    assert codes(found) == {"kv-unheard.published"}
    assert found.findings[0].where == ("default/e0", "default/e1")
    heard = await world.examined({"endpoints": endpoints, **ON, **BY_ENGINE}, ("kv-unheard",))
    assert codes(heard) == set()
    silent = await world.examined({"endpoints": pool_of(await world.stubs())}, ("kv-unheard",))
    assert codes(silent) == set()


async def test_events_without_token_ids_to_look_up_are_named(world: Any) -> None:
    for more, expected in ((ON, {"kv-tokens.missing"}), ({**ON, **BY_ENGINE}, set()), ({}, set())):
        found = await world.examined({"endpoints": ["127.0.0.1:9"], **more}, ("kv-tokens",))
        assert codes(found) == expected


async def test_events_that_flow_and_agree_give_no_finding(world: Any, pool_of: Listed) -> None:
    config = {"endpoints": pool_of(await world.stubs(2, KvEventsConfig())), **ON, **BY_ENGINE}
    found = await world.examined(config, probe=True)
    assert (found.findings, found.well) == ((), True)
    ran = {one.check: one.state for one in found.outcomes}
    assert [ran[name] for name in ("kv-events", "kv-agreement", "tokens")] == ["well"] * 3


async def test_an_engine_that_takes_another_rank_each_time_gives_no_finding(world: Any) -> None:
    ports, replays = free_ports(3), free_ports(3)
    ranks = []
    for rank, (port, replay) in enumerate(zip(ports, replays, strict=True)):
        events = KvEventsConfig(events=f"tcp://127.0.0.1:{port}", replay=f"tcp://127.0.0.1:{replay}", rank=rank)
        ranks += await world.stubs(1, events)
    turns = cycle(ranks)

    async def engine(request: web.Request) -> web.Response:
        url = f"http://{next(turns) if request.path == CHAT else ranks[0]}{request.path_qs}"
        kind = {"Content-Type": request.content_type}
        async with session.request(request.method, url, data=await request.read(), headers=kind) as sent:
            return web.Response(body=await sent.read(), status=sent.status, content_type=sent.content_type)

    address = await world.server(web.route("*", "/{path:.*}", engine))
    settings = {"enabled": True, "port": ports[0], "replayPort": replays[0], "ranks": 3}
    config = {"endpoints": [address], "kvEvents": settings, **BY_ENGINE}
    async with aiohttp.ClientSession() as session:
        found = await world.examined(config, ("kv-agreement",), probe=True)
    assert (found.findings, found.outcomes[0].state) == ((), "well")


async def large_blocks(world: Any, pool_of: Listed, **stub: int) -> list[Examination]:
    """What the two checks find that send prompts: without token ids of chats, with them, and with `kvEvents.bind`."""
    heard = {"endpoints": pool_of(await world.stubs(1, KvEventsConfig(), **stub)), **ON}
    found = [
        await world.examined(config, ("kv-events", "kv-agreement"), probe=True)
        for config in (heard, {**heard, **BY_ENGINE})
    ]
    port = free_ports(1)[0]
    dialled = {"endpoints": pool_of(await world.stubs(1, dialling(port), **stub))}
    settings = {"enabled": True, "bind": f"tcp://127.0.0.1:{port}"}
    return [*found, await world.examined({**dialled, "kvEvents": settings}, ("kv-dialled",), probe=True)]


@pytest.mark.parametrize(("size", "context"), [(160, 0), (544, 0), (1024, 2048), (4096, 0), (4096, 4352)])
async def test_large_blocks_give_no_finding(world: Any, pool_of: Listed, size: int, context: int) -> None:
    """The prompt is no longer than it must be, nor than `max_model_len` allows."""
    by_ids, by_engine, dialled = await large_blocks(world, pool_of, block_size=size, max_model_len=context)
    assert codes(by_ids) <= {"kv-agreement.no-tokens"}
    assert codes(by_engine) | codes(dialled) == set()


async def test_blocks_that_no_prompt_fills_are_not_probed(world: Any, pool_of: Listed) -> None:
    by_ids, by_engine, dialled = await large_blocks(world, pool_of, block_size=4096, max_model_len=4200)
    assert codes(by_ids) == codes(by_engine) == {"kv-agreement.no-answers"}
    assert codes(dialled) == {"kv-dialled.no-answers"}
    evidence = {one.evidence for examination in (by_ids, dialled) for one in examination.findings}
    needed = "blocks of 4,096 tokens: needs 4,352 tokens with the answer, max_model_len is 4,200; not probed"
    assert evidence == {needed}


@pytest.mark.parametrize("embeds", [True, False])
async def test_an_embedding_model_answers_no_prompts_and_that_is_no_fault(world: Any, embeds: bool) -> None:
    """A server of answers behind a wrong address says 404 too."""

    async def engine(request: web.Request) -> web.Response:
        if embeds and request.path == "/v1/embeddings":
            return web.json_response({"data": [{"embedding": [0.5]}]})
        if request.path not in ("/v1/models", "/metrics"):
            return web.json_response({"detail": "Not Found"}, status=404)
        async with session.get(f"http://{stub}{request.path}") as sent:
            return web.Response(body=await sent.read(), content_type=sent.content_type)

    events, replay = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    (stub,) = await world.stubs(1, KvEventsConfig(events=events, replay=replay))
    address = await world.server(web.route("*", "/{path:.*}", engine))
    pool = {"endpoints": [address]}
    port, own, of_replays = (int(url.rpartition(":")[2]) for url in (f":{free_ports(1)[0]}", events, replay))
    async with aiohttp.ClientSession() as session:
        settings = {"enabled": True, "port": own, "replayPort": of_replays}
        found = await world.examined({**pool, "kvEvents": settings}, ("kv-agreement",), probe=True)
        assert codes(found) == {"kv-agreement.no-answers" if embeds else "kv-agreement.failed"}
        settings = {"enabled": True, "bind": f"tcp://127.0.0.1:{port}"}
        found = await world.examined({**pool, "kvEvents": settings}, ("kv-dialled",), probe=True)
        assert codes(found) == {"kv-dialled.no-answers" if embeds else "kv-dialled.nobody"}
        assert '/v1/completions: 404 {"detail": "Not Found"}' in found.findings[0].evidence


@pytest.mark.parametrize("ranks", [1, 2])
async def test_ranks_that_dial_where_nobody_listens_are_named(world: Any, ranks: int) -> None:
    async def metrics(request: web.Request) -> web.Response:
        lines = (f'vllm:num_requests_{name}{{engine="{rank}"}} 0' for name in ("running", "waiting") for rank in (0, 1))
        return web.Response(text="\n".join(lines) + "\n")

    address = await world.server(web.get("/metrics", metrics))
    settings = {"enabled": True, "bind": f"tcp://127.0.0.1:{free_ports(1)[0]}", "ranks": ranks}
    config = {"endpoints": [address], "kvEvents": settings, **BY_ENGINE}
    found = await world.examined(config, admin=await world.serve(config), only=("kv-dialled",))
    assert codes(found) == ({"kv-dialled.ranks"} if ranks == 1 else set())


async def test_events_that_are_off_are_named(world: Any, pool_of: Listed) -> None:
    config = {"endpoints": pool_of(await world.stubs()), **ON, **BY_ENGINE}
    found = await world.examined(config, probe=True)
    assert codes(found) == {"kv-events.off"}
    assert found.findings[0].where == ("default/e0", "default/e1")


async def test_a_wrong_port_of_events_is_named(world: Any, pool_of: Listed) -> None:
    endpoints = pool_of(await world.stubs(1, KvEventsConfig()))
    settings = {"enabled": True, "port": free_ports(1)[0]}
    found = await world.examined({"endpoints": endpoints, "kvEvents": settings, **BY_ENGINE}, probe=True)
    assert codes(found) == {"kv-events.unconnected"}


async def test_a_wrong_port_of_replays_is_named(world: Any, pool_of: Listed) -> None:
    events, replay = free_ports(2)
    addresses = await world.stubs(1, KvEventsConfig(events=f"tcp://127.0.0.1:{events}"))
    settings = {"enabled": True, "port": events, "replayPort": replay}
    config = {"endpoints": pool_of(addresses), "kvEvents": settings, **BY_ENGINE}
    found = await world.examined(config, only=("kv-events",))
    assert codes(found) == {"kv-events.replay"}


async def test_a_replay_that_is_long_is_no_finding(world: Any, pool_of: Listed) -> None:
    events, replay = free_ports(2)
    addresses = await world.stubs(1, KvEventsConfig(events=f"tcp://127.0.0.1:{events}"))
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.bind(f"tcp://127.0.0.1:{replay}")

        async def answer_without_end() -> None:
            peer, *_ = await router.recv_multipart()
            for number in range(1_000_000):
                await router.send_multipart([peer, *replay_reply(b"", number, encode_batch(number, []))])
                await asyncio.sleep(0.01)

        answering = asyncio.create_task(answer_without_end())
        settings = {"enabled": True, "port": events, "replayPort": replay}
        config = {"endpoints": pool_of(addresses), "kvEvents": settings, **BY_ENGINE}
        try:
            assert (await world.examined(config, only=("kv-events",))).findings == ()
        finally:
            answering.cancel()
            await asyncio.wait([answering])


async def test_a_wrong_block_size_is_named(world: Any, pool_of: Listed) -> None:
    endpoints = pool_of(await world.stubs(1, KvEventsConfig()))
    config = {"endpoints": endpoints, "kvEvents": {"enabled": True, "blockSize": 32}, **BY_ENGINE}
    found = await world.examined(config)
    assert codes(found) == {"kv-events.block-size"}
    assert found.findings[0].evidence == "kvEvents.blockSize is 32, its metrics page says 16"
    assert codes(await world.examined(config, probe=True)) == {"kv-events.block-size", "kv-agreement.block-size"}


async def test_a_wrong_hash_seed_is_named(world: Any, pool_of: Listed) -> None:
    events = KvEventsConfig(hashes="sha256_cbor", hash_seed="7")
    endpoints = pool_of(await world.stubs(1, events))

    def config(**changes: str) -> Json:
        settings = {"enabled": True, "keys": "engine", "hashAlgorithm": "sha256_cbor", "hashSeed": "7", **changes}
        return {"endpoints": endpoints, "kvEvents": settings, **BY_ENGINE}

    assert (await world.examined(config(), probe=True)).findings == ()
    found = await world.examined(config(hashSeed="42"), probe=True)
    assert codes(found) == {"kv-events.hash-seed", "kv-agreement.hash"}
    assert "hash-seed" in next(one.evidence for one in found.findings if one.code == "kv-agreement.hash")
    found = await world.examined(config(hashAlgorithm="sha256"))
    assert codes(found) == {"kv-events.hash-algorithm"}
    assert found.findings[0].evidence == "its hashes are those of sha256_cbor with PYTHONHASHSEED=7"


async def test_a_wrong_chat_template_is_named(world: Any, pool_of: Listed, stub_tokeniser: Made) -> None:
    config = {"endpoints": pool_of(await world.stubs(1, KvEventsConfig())), **ON}
    assert (await world.examined(config, tokeniser=stub_tokeniser(), probe=True)).findings == ()
    found = await world.examined(config, tokeniser=stub_tokeniser(b"<|be terse and kind|>..."), probe=True)
    assert codes(found) == {"tokens.chat-template", "kv-agreement.chat-template"}


async def test_a_wrong_tokeniser_is_named(world: Any, pool_of: Listed, stub_tokeniser: Made) -> None:
    config = {"endpoints": pool_of(await world.stubs(1, KvEventsConfig())), **ON}
    found = await world.examined(config, tokeniser=stub_tokeniser(width=3), probe=True)
    assert codes(found) == {"tokens.tokeniser", "kv-agreement.tokeniser"}


async def test_a_cache_that_is_not_reported_is_named(world: Any, pool_of: Listed) -> None:
    addresses = await world.stubs(1, KvEventsConfig(), prompt_tokens_details=False)
    found = await world.examined({"endpoints": pool_of(addresses), **ON, **BY_ENGINE}, probe=True)
    assert codes(found) == {"kv-agreement.not-told"}


async def test_a_publisher_that_tells_nothing_is_named(world: Any, pool_of: Listed) -> None:
    config = {"endpoints": pool_of(await world.stubs(1, KvEventsConfig())), **ON, **BY_ENGINE}
    world.pool.replicas[0].kv_events.lose(1_000)
    found = await world.examined(config, probe=True)
    assert codes(found) == {"kv-agreement.silent"}


async def test_a_wrong_topic_is_named(world: Any, pool_of: Listed) -> None:
    port = free_ports(1)[0]
    settings = {"enabled": True, "bind": f"tcp://127.0.0.1:{port}"}
    config = {"endpoints": pool_of(await world.stubs(1, dialling(port))), "kvEvents": settings, **BY_ENGINE}
    assert (await world.examined(config, probe=True)).findings == ()
    wrong = dialling(port, "kv@vllm-7.example@tiny")
    config = {"endpoints": pool_of(await world.stubs(1, wrong)), "kvEvents": settings, **BY_ENGINE}
    found = await world.examined(config, probe=True)
    assert "kv-dialled.topic" in codes(found)
    assert found.findings[0].evidence == "received: kv@vllm-7.example@tiny"


def reports_late(world: Any) -> None:
    """What a publisher sends before it has dialled again is lost, as its first two batches are here."""
    for replica in world.pool.replicas:
        replica.kv_events.lose(2)


async def test_a_wrong_topic_is_named_by_what_a_scheduler_refused(world: Any, pool_of: Listed) -> None:
    port = free_ports(1)[0]
    endpoints = pool_of(await world.stubs(1, dialling(port, "kv@nobody@tiny")))
    config = {
        "endpoints": endpoints,
        "kvEvents": {"enabled": True, "bind": f"tcp://127.0.0.1:{port}"},
        **BY_ENGINE,
    }
    admin = await world.serve(config)
    reports_late(world)
    found = await world.examined(config, admin=admin, probe=True, only=("kv-dialled",))
    assert codes(found) == {"kv-dialled.topic"}
    assert found.findings[0].where == ("default/e0",)
    assert "unknown publishers" in found.findings[0].evidence


@pytest.mark.parametrize("served", [True, False])
async def test_a_publisher_that_dials_late_is_heard(world: Any, pool_of: Listed, served: bool) -> None:
    port = free_ports(1)[0]
    endpoints = pool_of(await world.stubs(2, dialling(port)))
    config = {"endpoints": endpoints, "kvEvents": {"enabled": True, "bind": f"tcp://127.0.0.1:{port}"}, **BY_ENGINE}
    admin = await world.serve(config) if served else ""
    reports_late(world)
    found = await world.examined(config, admin=admin, probe=True, only=("kv-dialled",))
    assert (found.findings, found.outcomes[0].state) == ((), "well")


@pytest.mark.parametrize("served", [True, False])
async def test_how_long_nobody_was_heard_is_said(
    world: Any, pool_of: Listed, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_dialled, "ROUNDS", (0.1, 0.2))
    port = free_ports(1)[0]
    heard, elsewhere = await world.stubs(1, dialling(port)), await world.stubs(1)
    config = {
        "endpoints": pool_of([*heard, *elsewhere]),
        "kvEvents": {"enabled": True, "bind": f"tcp://127.0.0.1:{port}"},
        **BY_ENGINE,
    }
    admin = await world.serve(config) if served else ""
    found = await world.examined(config, admin=admin, probe=True, only=("kv-dialled",))
    silent = [finding for finding in found.findings if "default/e1" in finding.where]
    assert [finding.code for finding in silent] == ["kv-dialled.nobody"]
    assert re.fullmatch(r"nothing was heard in \d+\.\d s, after 2 requests to it", silent[0].evidence)


@pytest.mark.parametrize("listed", [True, False])
async def test_a_publisher_that_is_not_listed_is_not_heard(
    world: Any, pool_of: Listed, tmp_path: Path, listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a running scheduler too, which would refuse it."""
    if not listed:
        monkeypatch.setattr(kv_dialled, "ROUNDS", (0.2, 0.3))
    own, client, other = (tuple(key.decode() for key in zmq.curve_keypair()) for _ in range(3))
    files = {"publicKeyFile": own[0], "secretKeyFile": own[1], "clientsFile": client[0] if listed else other[0]}
    for name, key in files.items():
        (tmp_path / name).write_text(key)
    port = free_ports(1)[0]
    events = replace(dialling(port), curve=Curve(*client, own[0]))
    curve = {name: str(tmp_path / name) for name in files}
    settings = {"enabled": True, "bind": f"tcp://127.0.0.1:{port}", "curve": curve}
    config = {"endpoints": pool_of(await world.stubs(1, events)), "kvEvents": settings, **BY_ENGINE}
    found = await world.examined(config, probe=True, only=("kv-dialled",))
    assert codes(found) == (set() if listed else {"kv-dialled.nobody"})


async def test_events_without_token_ids_of_chats_are_named(world: Any, pool_of: Listed) -> None:
    found = await world.examined({"endpoints": pool_of(await world.stubs(1, KvEventsConfig())), **ON}, probe=True)
    assert codes(found) == {"kv-tokens.missing", "kv-agreement.no-tokens"}


async def test_a_topic_of_another_endpoint_is_named(world: Any, pool_of: Listed) -> None:
    addresses = [*await world.stubs(1), *await world.stubs(1, KvEventsConfig())]
    addresses += await world.stubs(1, KvEventsConfig(topic=f"kv@{addresses[0]}@tiny"))
    config = {"endpoints": pool_of(addresses), **ON, **BY_ENGINE}
    found = await world.examined(config, only=("kv-events",))
    assert codes(found) == {"kv-events.off", "kv-events.topic-of-another"}
    assert found.findings[1].where == ("default/e2",)
