"""Requests wait in Fairlead while the only model server is busy: `fairlead serve`, its Envoy, `fairlead stub`.

The stub serves one request at a time as slowly as a real server, so that whoever waits does so for seconds.
"""

import asyncio
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gw_http1 import Http1
from gw_messages import JSON, Ask, Got
from gw_processes import Serve, Stub

MODEL = "Qwen/Qwen3-32B"
MANIFEST = """
apiVersion: inference.networking.x-k8s.io/v1alpha2
kind: InferenceModel
metadata: {name: %s}
spec: {modelName: %s, criticality: %s, poolRef: {name: pool}, targetModels: [{name: %s}]}
---
"""
NAMES = {"urgent": "Critical", "usual": "Standard", "idle": "Sheddable"}


def body(tokens: int, model: str = MODEL, stream: bool = True) -> bytes:
    message = {"role": "user", "content": f"hello {tokens}"}
    return json.dumps(
        {"model": model, "messages": [message], "max_tokens": tokens, "ignore_eos": True, "stream": stream}
    ).encode()


async def ask(at: Serve, tokens: int, model: str = MODEL, stream: bool = True, **headers: str) -> Got:
    fields = [JSON, *((name.replace("_", "-"), value) for name, value in headers.items())]
    async with Http1(at.port) as client:
        return await client.ask(Ask(fields=fields, pieces=[body(tokens, model, stream)]))


class Block:
    """Keeps the model server busy with one long answer for as long as the block lasts, or `tokens` take."""

    def __init__(self, at: Serve, tokens: int = 4000, model: str = MODEL) -> None:
        self._client = Http1(at.port)
        self._body = body(tokens, model)

    async def __aenter__(self) -> asyncio.StreamReader:
        reader = await self._client.begin(Ask(fields=[JSON], pieces=[self._body]))
        await reader.readuntil(b"data: ")
        return reader

    async def __aexit__(self, *_: object) -> None:
        self._client.abort()


async def whole(answer: asyncio.StreamReader) -> bool:
    """Whether it comes to its end."""
    seen = b""
    while b"[DONE]" not in seen:
        chunk = await answer.read(65_536)
        if not chunk:
            return False
        seen = seen[-8:] + chunk
    return True


async def decisions(at: Serve) -> list[dict[str, Any]]:
    """The newest first."""
    return list(json.loads(await at.page("/debug/decisions?last=100"))["decisions"])


async def waiting(at: Serve, count: int) -> None:
    """Until so many wait."""
    async with asyncio.timeout(20):
        while await at.metric("llm_d_epp_flow_control_queue_size") != count:
            await asyncio.sleep(0.02)


def check_refusal(got: Got, status: int, reason: str) -> None:
    headers = {name.lower(): value for name, value in got.fields}
    assert (got.status, headers["x-llm-d-request-dropped-reason"]) == (status, reason), got.body
    assert 1 <= int(headers["retry-after"]) <= 60
    assert headers["content-type"] == "application/json"
    error = json.loads(got.body)["error"]
    assert error["code"] == reason and error["message"] and error["type"]


@pytest.fixture
def shop(tmp_path: Path, stub: Callable[..., Stub], serve: Callable[..., Serve]) -> Callable[..., Serve]:
    def start(**flow: object) -> Serve:
        servers = stub(1, "--time-ratio", "1", "--max-num-seqs", "1")
        (tmp_path / "names.yaml").write_text("".join(MANIFEST % (n, n, c, MODEL) for n, c in NAMES.items()))
        return serve(
            {
                "endpoints": servers.addresses,
                "models": {"file": str(tmp_path / "names.yaml"), "unmatched": "pass"},
                "flowControl": flow,
            }
        )

    return start


@pytest.fixture
async def one_by_one(shop: Callable[..., Serve]) -> Serve:
    """The queue lets one request go at a time."""
    return await asyncio.to_thread(
        shop,
        saturation={"type": "concurrency-detector", "maxConcurrency": 1},
        limits={"band": {"requests": 4}},
    )


@pytest.mark.slow
async def test_the_urgent_go_first(shop: Callable[..., Serve]) -> None:
    at = await asyncio.to_thread(shop, saturation={"type": "concurrency-detector", "maxConcurrency": 9})
    async with Block(at, 250), asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(ask(at, 2))
        while await at.metric("fairlead_leases") < 9:
            await asyncio.sleep(0.02)
        for i, model in enumerate(["idle", "usual", "urgent"] * 4):
            group.create_task(ask(at, 3, model))
            await waiting(at, i + 1)
    found = [d for d in reversed(await decisions(at)) if d["queued_ms"] > 0]
    assert [d["priority"] for d in found] == [10] * 4 + [0] * 4 + [-10] * 4
    assert {d["outcome"] for d in found} == {"routed"}
    assert await at.settled() == {}


async def test_those_that_wait(one_by_one: Serve) -> None:
    at = one_by_one
    async with Block(at):
        usual = [asyncio.create_task(ask(at, 2, "usual")) for _ in range(4)]
        await waiting(at, 4)
        check_refusal(await ask(at, 2, "usual"), 429, "rejected-saturated")
        check_refusal(await ask(at, 2, "urgent", x_fairlead_ttl_ms="300"), 429, "rejected-ttl-expired")
        gone = Http1(at.port)
        await gone.begin(Ask(fields=[JSON], pieces=[body(2, "urgent")]))
        await waiting(at, 5)
        gone.abort()
        await waiting(at, 4)
        newest = (await decisions(at))[0]
        assert (newest["outcome"], newest["status"]) == ("rejected-context-cancelled", None)
        await asyncio.sleep(3.0)
        assert await at.metric("fairlead_desired_replicas") > 1
    for got in await asyncio.gather(*usual):
        assert got.status == 200, "Envoy's own limit is 1 s: it was told to be patient"
    routed = [d for d in await decisions(at) if d["model"] == "usual" and d["outcome"] == "routed"]
    assert len(routed) == 4 and all(d["queued_ms"] > 3000 for d in routed)
    assert await at.metric("fairlead_fallback_requests_total") == 0
    assert await at.settled() == {}
    assert await at.metric("llm_d_epp_flow_control_requests_total", outcome="EvictedContextCancelled") == 1


async def test_what_runs_makes_way(shop: Callable[..., Serve]) -> None:
    """An answer that has begun (a stream begins before its first token) is cut, another is refused instead; the model
    server is free both times."""
    at = await asyncio.to_thread(
        shop, saturation={"type": "concurrency-detector", "maxConcurrency": 2}, eviction={"after": "200ms"}
    )
    async with Block(at, 4000, "idle") as begun:
        queued = asyncio.create_task(ask(at, 2, "idle", stream=False))
        while await at.metric("fairlead_leases") < 2:
            await asyncio.sleep(0.02)
        assert (await ask(at, 2, "urgent")).status == 200, "the only place was taken for another 50 s"
        check_refusal(await queued, 429, "evicted")
        assert not await whole(begun)
    assert await at.settled() == {}
    outcomes = [d for d in await decisions(at) if d["priority"] == -10]
    assert len(outcomes) == 2


@pytest.mark.slow
async def test_nobody_of_the_same_urgency_makes_way(shop: Callable[..., Serve]) -> None:
    at = await asyncio.to_thread(
        shop, saturation={"type": "concurrency-detector", "maxConcurrency": 1}, eviction={"after": "100ms"}
    )
    async with Block(at, 100, "idle") as begun:
        assert (await ask(at, 2, "idle")).status == 200
        assert await whole(begun)
    async with Block(at, 100, "usual") as begun:
        assert (await ask(at, 2, "urgent")).status == 200
        assert await whole(begun)
    assert await at.settled() == {}


async def test_whoever_waits_when_it_ends_is_told(one_by_one: Serve) -> None:
    at = one_by_one
    async with Block(at, 300) as answer:
        waits = [asyncio.create_task(ask(at, 2, model)) for model in ("urgent", "usual", "idle")]
        await waiting(at, 3)
        at.signal(signal.SIGTERM)
        for got in await asyncio.gather(*waits):
            check_refusal(got, 503, "rejected-shutting-down")
        assert b"[DONE]" in await answer.read(), "what runs is finished"
    assert await at.wait() == 0
