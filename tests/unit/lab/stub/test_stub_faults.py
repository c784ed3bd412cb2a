"""Faults, over HTTP and from Python."""

import asyncio
import json

import pytest

from fairlead.lab.stub.pool import StubPool


async def test_faults_are_shown_changed_and_ended_over_http(http, quick):
    address = quick.addresses[0]
    assert (await http.post(address, "/fault", {"error_rate": 1.0, "error_status": 429}))[0] == 200
    status, body = await http.post(address, "/v1/completions", {"prompt": "x"})
    assert (status, json.loads(body)["error"]["code"]) == (429, 429)
    for wrong in ({"nonsense": 1}, {"error_rate": 2}, {"slow_factor": 0}, {"error_rate": 0, "stall": 3}):
        status, body = await http.post(address, "/fault", wrong)
        assert status == 400, body
    assert json.loads((await http.get(address, "/fault"))[1])["error_status"] == 429
    assert (await http.post(address, "/v1/completions", {"prompt": "x"}))[0] == 429
    assert (await http.post(address, "/fault", None, "DELETE"))[0] == 200
    assert (await http.post(address, "/v1/completions", {"prompt": "x", "max_tokens": 1}))[0] == 200


async def test_an_injected_error_may_come_inside_the_stream(http, quick):
    quick.set_faults(0, error_rate=1.0, error_status=503, error_in_stream=True)
    asked = {"prompt": "x", "max_tokens": 1}
    status, body = await http.post(quick.addresses[0], "/v1/completions", asked | {"stream": True})
    assert status == 200
    assert http.events(body)[0]["error"]["code"] == 503
    assert (await http.post(quick.addresses[0], "/v1/completions", asked))[0] == 503
    quick.set_faults(0, error_rate=0.0)


@pytest.mark.parametrize("in_stream", [False, True])
async def test_about_the_wanted_share_of_requests_fails(http, quick, in_stream):
    quick.set_faults(0, error_rate=0.3, error_status=503, error_in_stream=in_stream)
    asked = {"prompt": "x", "max_tokens": 1, "stream": True}
    failed = 0
    for _ in range(200):
        status, body = await http.post(quick.addresses[0], "/v1/completions", asked)
        failed += status == 503 or b'"code": 503' in body
    assert 40 <= failed <= 80


async def test_a_stalled_replica_hangs_and_goes_on_where_it_stood(http, quick):
    replica = quick.replica(0)
    quick.set_faults(0, stall=True)
    asked = asyncio.create_task(http.post(quick.addresses[0], "/v1/completions", {"prompt": "x", "max_tokens": 3}))
    await http.until(lambda: replica.in_flight == 1, "the request arrives")
    for _ in range(3):
        assert (await http.get(quick.addresses[0], "/health"))[0] == 200
    assert not asked.done()
    assert replica.engine.stats.iteration_tokens.count == 0 and replica.engine.stats.generation_tokens == 0
    quick.set_faults(0, stall=False)
    assert (await asyncio.wait_for(asked, 10))[0] == 200


async def test_a_sleeping_replica_says_so_and_serves_nothing_until_it_wakes(http, quick):
    address = quick.addresses[0]
    awake = b'engine="0",model_name="%s",sleep_state="awake"} ' % quick.replica(0).config.served_model.encode()
    quick.set_faults(0, asleep=True)
    assert (await http.get(address, "/is_sleeping"))[1] == b'{"is_sleeping":true}'
    assert awake + b"0.0" in (await http.get(address, "/metrics"))[1]
    asked = asyncio.create_task(http.post(address, "/v1/completions", {"prompt": "x", "max_tokens": 3}))
    await http.until(lambda: quick.replica(0).in_flight == 1, "the request arrives")
    assert quick.replica(0).engine.stats.iteration_tokens.count == 0
    quick.set_faults(0, asleep=False)
    assert (await asyncio.wait_for(asked, 10))[0] == 200
    assert awake + b"1.0" in (await http.get(address, "/metrics"))[1]


async def test_a_stream_can_be_cut_after_some_tokens(http, quick):
    quick.set_faults(0, disconnect_rate=1.0, disconnect_after=3)
    reader, writer = await http.open(
        quick.addresses[0], "/v1/completions", {"prompt": "x", "max_tokens": 900, "stream": True}
    )
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await asyncio.wait_for(reader.readuntil(b"[DONE]"), 10)
    await http.until(lambda: quick.replica(0).in_flight == 0, "the request is aborted")
    writer.close()


async def test_a_dead_engine_fails_everything_and_health_may_lie(stuck_config, http):
    async with StubPool(stuck_config) as pool:
        address = pool.addresses[0]
        reader, writer = await http.open(address, "/v1/completions", {"prompt": "x", "stream": True})
        whole = asyncio.create_task(http.post(address, "/v1/completions", {"prompt": "x"}))
        await http.until(lambda: pool.replica(0).in_flight == 2, "both requests arrive")
        pool.set_faults(0, engine_dead=True)
        tail = await asyncio.wait_for(reader.readuntil(b"[DONE]"), 10)
        assert b'"code": 500' in tail
        assert (await whole)[0] == 500
        assert (await http.post(address, "/v1/completions", {"prompt": "x", "stream": True}))[0] == 500
        assert (await http.get(address, "/health"))[0] == 503
        pool.set_faults(0, health_status=200)
        assert (await http.get(address, "/health"))[0] == 200
        pool.set_faults(0, engine_dead=False, health_status=0)
        assert (await http.get(address, "/health"))[0] == 200
        assert pool.replica(0).engine.running() == 0
        writer.close()


async def test_metrics_can_be_frozen_slow_or_broken(http, quick):
    address = quick.addresses[0]
    quick.set_faults(0, metrics_frozen=True)
    before = (await http.get(address, "/metrics"))[1]
    await http.post(address, "/v1/completions", {"prompt": "x", "max_tokens": 3})
    assert (await http.get(address, "/metrics"))[1] == before
    quick.set_faults(0, metrics_frozen=False, metrics_delay_s=3600)
    slow = asyncio.create_task(http.get(address, "/metrics"))
    await http.until(lambda: quick.connections(0) == 1, "the request arrives")
    for _ in range(3):
        assert (await http.get(address, "/health"))[0] == 200
    assert not slow.done()
    slow.cancel()
    quick.set_faults(0, metrics_delay_s=0, metrics_status=503)
    assert (await http.get(address, "/metrics"))[0] == 503
    quick.set_faults(0, metrics_status=0)
    assert b'vllm:generation_tokens_total{engine="0",model_name="tiny"} 3.0' in (await http.get(address, "/metrics"))[1]
