"""KV events of pools: whose addresses they are, what survives a restart, and what can be done to them."""

import asyncio
import json
import subprocess
import sys

import msgspec
import pytest
import zmq

from fairlead.core.kv.index import KvIndex
from fairlead.core.kv.snapshot import Place
from fairlead.lab.stub.config import StubConfig
from fairlead.lab.stub.kv_publisher import Encoding, KvEventsConfig
from fairlead.lab.stub.pool import PortTaken, StubPool
from fairlead.pool.kv_events.discovery import KvSource
from fairlead.pool.kv_events.subscriber import KvSubscriber, Publisher

ASKED = {"prompt": "z" * 400, "max_tokens": 1}


@pytest.fixture
def publishing(quick_config: StubConfig) -> StubConfig:
    return msgspec.structs.replace(quick_config, kv_events=KvEventsConfig())


async def _cached(http, address: str) -> int:
    status, body = await http.post(address, "/v1/completions", ASKED)
    assert status == 200, body
    return json.loads(body)["usage"]["prompt_tokens_details"]["cached_tokens"]


async def _source(http, address: str) -> dict[str, object]:
    (source,) = json.loads((await http.get(address, "/kv_event_sources"))[1]).values()
    return source


async def _do(http, address: str, **asked: object) -> dict[str, object]:
    status, body = await http.post(address, "/fault/kv_events", asked)
    assert status == 200, body
    return json.loads(body)


def test_without_events_zmq_is_not_even_imported():
    code = (
        "import sys, asyncio\nimport fairlead.cli.stub\n"
        "from fairlead.lab.stub.config import StubConfig\nfrom fairlead.lab.stub.pool import StubPool\n"
        "async def run():\n    async with StubPool(StubConfig()): pass\n"
        "asyncio.run(run())\nprint(sorted(name for name in sys.modules if name.split('.')[0] == 'zmq'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


async def test_without_events_there_are_no_sources_and_nothing_to_break(http, quick):
    assert await http.get(quick.addresses[0], "/kv_event_sources") == (404, b'{"detail":"Not Found"}')
    status, body = await http.post(quick.addresses[0], "/fault/kv_events", {"lose": 1})
    assert status == 404
    assert b"start it with --kv-events" in body


async def test_every_replica_has_its_own_sources(http, publishing):
    async with StubPool(publishing, replicas=2) as pool:
        sources = [await _source(http, address) for address in pool.addresses]
        assert len({source[name] for source in sources for name in ("endpoint", "replay_endpoint")}) == 4
        for address, source in zip(pool.addresses, sources, strict=True):
            assert source["topic"] == f"kv@{address}@tiny"
            assert await _do(http, address) == {"next_sequence": 0}


@pytest.mark.parametrize(
    ("events", "replay", "connect", "expected"),
    [
        ("tcp://*:5557", "tcp://*:5558", False, ("tcp://*:5563", "tcp://*:5564")),
        ("tcp://127.0.0.1:5557", "", False, ("tcp://127.0.0.1:5563", "")),
        ("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", False, ("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")),
        ("tcp://hub:5557", "tcp://*:6000", True, ("tcp://hub:5557", "tcp://*:6006")),
        ("ipc:///a/b", "", False, ("ipc:///a/b", "")),
    ],
)
def test_fixed_ports_count_up_in_pairs(events, replay, connect, expected):
    config = StubConfig(kv_events=KvEventsConfig(events=events, replay=replay, connect=connect))
    assert config.kv_events_of(0) == config.kv_events
    third = config.kv_events_of(3)
    assert third is not None
    assert (third.events, third.replay) == expected
    assert StubConfig().kv_events_of(3) is None


def test_ports_that_are_none_are_refused_before_anything_starts():
    config = StubConfig(kv_events=KvEventsConfig(events="tcp://*:65533", replay="tcp://*:65534"))
    StubPool(config, replicas=1)
    with pytest.raises(ValueError, match="need ports above 65535, 2 after tcp://\\*:65534"):
        StubPool(config, replicas=2)


async def test_a_taken_port_of_events_is_named_and_nothing_stays_behind(publishing):
    async with StubPool(publishing) as pool:
        publisher = pool.replica(0).kv_events
        assert publisher is not None
        taken = KvEventsConfig(events="tcp://127.0.0.1:*", replay=publisher.replay_address)
        second = StubPool(msgspec.structs.replace(publishing, kv_events=taken))
        with pytest.raises(PortTaken, match="cannot publish KV events: Address already in use") as caught:
            async with second:
                pass
        assert "--kv-events-port" in str(caught.value)
        assert second.replicas == []


async def test_a_restarted_replica_publishes_where_it_did(http, publishing):
    async with StubPool(publishing, replicas=2) as pool:
        before = [await _source(http, address) for address in pool.addresses]
        await _cached(http, pool.addresses[1])
        assert await _do(http, pool.addresses[1]) == {"next_sequence": 1}
        await pool.restart(1)
        assert [await _source(http, address) for address in pool.addresses] == before
        assert await _do(http, pool.addresses[1]) == {"next_sequence": 0}
        assert await _cached(http, pool.addresses[1]) == 0
        assert await _do(http, pool.addresses[1]) == {"next_sequence": 1}


@pytest.mark.parametrize("how", ["restart", "engine_dead", "engine_dead twice"])
async def test_a_new_engine_is_listened_to_and_counts_from_the_start(http, publishing, how):
    async with StubPool(publishing) as pool:
        address = pool.addresses[0]
        assert await _cached(http, address) == 0
        assert await _cached(http, address) == 96
        if how == "restart":
            pool.set_faults(0, slow_factor=0.5)
            assert await _do(http, address, restart=True) == {"next_sequence": 0}
            assert pool.replica(0).faults.slow_factor == pool.replica(0).engine.slow_factor == 0.5
        else:
            pool.set_faults(0, engine_dead=True)
            if "twice" in how:
                await _do(http, address, restart=True)
                assert pool.replica(0).faults.engine_dead
            pool.set_faults(0, engine_dead=False)
        assert await _do(http, address) == {"next_sequence": 0}
        assert await _cached(http, address) == 0
        assert await _do(http, address) == {"next_sequence": 1}


async def test_running_requests_do_not_survive_a_restart(http, publishing):
    async with StubPool(publishing) as pool:
        address = pool.addresses[0]
        long = ASKED | {"max_tokens": 30_000}
        asked = asyncio.create_task(http.post(address, "/v1/completions", long))
        # One behind the other on a connection: the second one must not be lost between two engines.
        pipelined = http.request("/v1/completions", long) + http.request("/v1/completions", ASKED, "connection: close")
        both = asyncio.create_task(http.ask(address, pipelined))
        await http.until(lambda: pool.replica(0).in_flight == 2, "two requests run")
        await _do(http, address, restart=True)
        assert (await asked)[0] == 500
        answers = await both
        assert answers.count(b"HTTP/1.1 ") == 2
        assert answers.startswith(b"HTTP/1.1 500 ")
        assert await _cached(http, address) in (0, 96)
        assert pool.replica(0).in_flight == 0


async def test_losing_offloading_and_dropping_over_http(http, publishing):
    index = KvIndex()
    index.add_slot(0)
    async with StubPool(publishing) as pool, KvSubscriber(index) as events:
        address = pool.addresses[0]
        source = await _source(http, address)
        events.watch(0, KvSource(source["endpoint"], source["replay_endpoint"], "tiny"))
        cache = index.rank(0, 0, "tiny")
        await _cached(http, address)
        await http.until(lambda: (events.place_of(cache) or Place()).last == 0, "the first batch comes")
        assert index.entries == 6
        assert (await _do(http, address, lose=1))["next_sequence"] == 1
        answer = await _do(http, address, offload=4)
        assert answer["next_sequence"] == 2
        assert len(answer["offloaded"]) == 4
        answer = await _do(http, address, offload=1, medium="disk")
        await http.until(lambda: index.entries == 6 + 4 + 1, "both offloads come, the first one by a replay")
        assert events.counts(0)[0].replayed >= 1
        assert (await _do(http, address, drop=answer["offloaded"], medium="disk"))["next_sequence"] == 4
        await http.until(lambda: index.entries == 6 + 4, "one block has left the disk")
        index.validate()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"nonsense": 1}, "unknown field `nonsense`"),
        ({"lose": -1}, "$.lose"),
        ({"lose": 1e9}, "$.lose"),
        ({"restart": 1}, "$.restart"),
        ({"offload": "all"}, "$.offload"),
        ({"offload": 100_001}, "$.offload"),
        ({"drop": [-1]}, "$.drop"),
        ({"drop": [1 << 64]}, "64 bits"),
        ({"drop": [10**30]}, "64 bits"),
        ({"medium": ""}, "$.medium"),
        ({"medium": "x" * 65, "offload": 1}, "$.medium"),
        ({"medium": "\ud800", "offload": 1}, "$.medium"),
        ([], "valid dictionary"),
    ],
)
async def test_what_cannot_be_done_is_refused_and_changes_nothing(http, publishing, wrong, says):
    async with StubPool(publishing) as pool:
        address = pool.addresses[0]
        await _cached(http, address)
        status, body = await http.post(address, "/fault/kv_events", wrong)
        assert status == 400
        assert says in body.decode()
        assert await _do(http, address) == {"next_sequence": 1}
        assert await _cached(http, address) == 96


async def test_names_that_are_no_text_are_published_all_the_same(http, quick_config):
    spec = msgspec.structs.replace(quick_config.engine, max_loras=1)
    config = msgspec.structs.replace(quick_config, engine=spec, kv_events=KvEventsConfig())
    async with StubPool(config) as pool:
        address = pool.addresses[0]
        for count, salt in enumerate(("\ud800", "\ud801", "plain"), 1):
            status, body = await http.post(address, "/v1/completions", ASKED | {"cache_salt": salt})
            assert (status, json.loads(body)["usage"]["prompt_tokens_details"]["cached_tokens"]) == (200, 0)
            assert await _do(http, address) == {"next_sequence": count}
        named = {"lora_name": "\udfff", "lora_path": "x"}
        assert (await http.post(address, "/v1/load_lora_adapter", named))[0] == 200
        assert (await http.post(address, "/v1/completions", ASKED | {"model": "\udfff"}))[0] == 200
        assert await _do(http, address) == {"next_sequence": 4}
        assert (await http.get(address, "/metrics"))[0] == 200


async def test_replicas_can_dial_one_subscriber(http, quick_config):
    index = KvIndex()
    async with KvSubscriber(index) as events:
        hub = events.bind("tcp://127.0.0.1:*")
        dialling = KvEventsConfig(events=hub, replay="", connect=True, encoding=Encoding(events="array"))
        config = msgspec.structs.replace(quick_config, kv_events=dialling)
        async with StubPool(config, replicas=2) as pool:
            for slot in range(2):
                index.add_slot(slot)
            events.allow({address: Publisher(slot) for slot, address in enumerate(pool.addresses)})
            source = await _source(http, pool.addresses[1])
            assert (source["endpoint"], source["replay_endpoint"]) == (hub, None)

            async def heard(slot: int) -> None:
                # What was published before the connection stood is gone, so something is, again and again.
                async with asyncio.timeout(15):
                    while not events.counts(slot):
                        await http.post(pool.addresses[slot], "/v1/completions", ASKED)
                        await http.post(pool.addresses[slot], "/reset_prefix_cache", None)
                        await asyncio.sleep(0.01)

            await heard(0)
            await heard(1)


async def test_an_address_that_is_none_says_what_to_give(quick_config):
    nowhere = KvEventsConfig(events="nowhere", connect=True)
    with pytest.raises(PortTaken, match="cannot publish KV events") as caught:
        async with StubPool(msgspec.structs.replace(quick_config, kv_events=nowhere)):
            pass
    assert "--kv-events-connect" in str(caught.value)


@pytest.mark.parametrize(("limit", "replicas"), [(200, 3), (150, 9)])
def test_open_files_are_enough_or_said_to_be_missing(limit, replicas):
    code = (
        "import asyncio, resource\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({limit // 2}, {limit}))\n"
        "from fairlead.lab.stub.config import StubConfig\nfrom fairlead.lab.stub.pool import PortTaken, StubPool\n"
        "from fairlead.lab.stub.kv_publisher import KvEventsConfig\n"
        "async def run():\n"
        f"    async with StubPool(StubConfig(kv_events=KvEventsConfig()), {replicas}): print('runs')\n"
        "try: asyncio.run(run())\n"
        "except PortTaken as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    if replicas == 3:
        assert done.stdout == "runs\n"
    else:
        assert done.stdout == "KV events of 9 replicas need 208 open files; raise the limit of 150\n"


async def test_the_port_is_free_again_after_the_pool(publishing):
    async with StubPool(publishing) as pool:
        publisher = pool.replica(0).kv_events
        assert publisher is not None
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.PUB) as socket:
        socket.bind(publisher.events_address)
