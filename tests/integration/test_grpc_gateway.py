"""vLLM's gRPC engine service through the embedded gateway's Envoy: scheduled, over cleartext HTTP/2 on both sides."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from ports import free_ports

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e" / "support"))

from gw_live import running
from gw_modes import Pair, bootstrap
from gw_processes import Envoy, require_envoy, sees_the_scheduler

from fairlead.gateway.protobuf import field, number

grpc = pytest.importorskip("grpc", reason="needs grpcio: pip install 'fairlead[grpc]'")
pytestmark = pytest.mark.envoy

METHOD = "/vllm.grpc.engine.VllmEngine/Generate"
#: GenerateRequest: tokenized.input_ids (packed), sampling_params.max_tokens, stream.
ASK = field(2, field(2, bytes(range(1, 101)))) + field(4, number(8, 16)) + number(5, 1)
ANSWERS = [field(1, field(1, bytes([i]) * 1000)) for i in range(5)]
#: GenerateComplete: finish reason, tokens of the prompt and of the last chunk.
LAST = field(2, field(2, b"stop") + number(3, 100) + number(4, 1000))


class Engine:
    """A gRPC server that streams `ANSWERS` to whoever calls `METHOD`."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.metadata: list[dict[str, Any]] = []

    async def __aenter__(self) -> "Engine":
        self._server = grpc.aio.server()
        handler = grpc.unary_stream_rpc_method_handler(self._generate)
        service, _, method = METHOD[1:].rpartition("/")
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        await self._server.stop(None)

    async def _generate(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        self.asked.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        for answer in [*ANSWERS, LAST]:
            await asyncio.sleep(0.01)
            yield answer


class Failing(Engine):
    """Fails every call, every second time in mid-stream."""

    async def _generate(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        self.asked.append(request)
        if len(self.asked) % 2:
            yield ANSWERS[0]
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the engine is dead")


async def call(port: int, message: bytes) -> list[bytes]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        *answers, last = [answer async for answer in channel.unary_stream(METHOD)(message, timeout=20)]
        assert last == LAST
        return answers


async def test_a_generation_is_scheduled_and_streams_back(tmp_path: Path) -> None:
    require_envoy()
    async with Engine() as engine, Engine() as other:
        addresses = [engine.address, other.address]
        listed = [
            {"name": f"e{i}", "address": "127.0.0.1", "port": int(address.rpartition(":")[2])}
            for i, address in enumerate(addresses)
        ]
        async with running({"endpoints": listed}, tmp_path) as (live, _):
            ext_proc = f"127.0.0.1:{live.config.ext_proc.port}"
            envoy = Envoy(tmp_path)
            try:
                (port,) = free_ports(1)
                envoy.start(bootstrap(Pair("whole", "first-chunk"), port, ext_proc, addresses))
                await sees_the_scheduler(envoy.admin)
                for _ in range(6):
                    assert await call(port, ASK) == ANSWERS
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await call(port, b"\x12\x7f")
                async with asyncio.timeout(10):
                    while len(live.fleet.ledger):
                        await asyncio.sleep(0.02)
                decisions = live.watch.decisions(10)
            finally:
                envoy.end()
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert engine.asked + other.asked == [ASK] * 6
    assert {(decision["api"], decision["prompt_tokens"], decision["outcome"]) for decision in decisions} == {
        ("grpc", 100, "routed")
    }
    results = [decision["result"] for decision in decisions]
    assert [(result["prompt_tokens"], result["completion_tokens"]) for result in results] == [(100, 5000)] * 6


async def test_without_the_scheduler_it_still_goes_through(tmp_path: Path) -> None:
    require_envoy()
    async with Engine() as engine:
        envoy = Envoy(tmp_path)
        try:
            port, nobody = free_ports(2)
            envoy.start(bootstrap(Pair("whole", "first-chunk"), port, f"127.0.0.1:{nobody}", [engine.address]))
            assert await call(port, ASK) == ANSWERS
            await engine.stop()
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await call(port, ASK)
        finally:
            envoy.end()
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    assert failed.value.details().startswith("upstream connect error"), "a text, no JSON"


async def test_an_answer_that_ends_by_trailers_has_ended_although_nobody_says_so(tmp_path: Path) -> None:
    """No access log tells the end, and trailers are not shown: the answer's own last message does."""
    require_envoy()
    async with Engine() as engine:
        listed = [{"name": "e", "address": "127.0.0.1", "port": int(engine.address.rpartition(":")[2])}]
        async with running({"endpoints": listed}, tmp_path) as (live, _):
            envoy = Envoy(tmp_path)
            try:
                (port,) = free_ports(1)
                pair = Pair("buffered", "full", log=False)
                ext_proc = f"127.0.0.1:{live.config.ext_proc.port}"
                envoy.start(bootstrap(pair, port, ext_proc, [engine.address]))
                await sees_the_scheduler(envoy.admin)
                for _ in range(3):
                    assert await call(port, ASK) == ANSWERS
                async with asyncio.timeout(10):
                    while len(live.fleet.ledger):
                        await asyncio.sleep(0.02)
                results = [decision["result"] for decision in live.watch.decisions(10)]
            finally:
                envoy.end()
    assert [(result["status"], result["cause"]) for result in results] == [(200, "natural")] * 3


async def test_an_engine_that_fails_every_call_is_avoided(tmp_path: Path) -> None:
    require_envoy()
    async with Failing() as engine:
        listed = [{"name": "e", "address": "127.0.0.1", "port": int(engine.address.rpartition(":")[2])}]
        async with running({"endpoints": listed}, tmp_path) as (live, _):
            envoy = Envoy(tmp_path)
            try:
                (port,) = free_ports(1)
                ext_proc = f"127.0.0.1:{live.config.ext_proc.port}"
                envoy.start(bootstrap(Pair("whole", "first-chunk"), port, ext_proc, [engine.address]))
                await sees_the_scheduler(envoy.admin)
                for _ in range(3):
                    with pytest.raises(grpc.aio.AioRpcError):
                        await call(port, ASK)
                async with asyncio.timeout(10):
                    while len(live.fleet.ledger):
                        await asyncio.sleep(0.02)
                results = [decision["result"] for decision in live.watch.decisions(10)]
                errors = int(live.fleet.table.errors.sum())
            finally:
                envoy.end()
    assert [(result["status"], result["cause"]) for result in results] == [(503, "natural")] * 3
    assert errors == 3
