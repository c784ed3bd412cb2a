"""A gRPC model server that cannot be reached: the call is repeated at the other one."""

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
from gw_processes import Envoy, require_envoy, sees_the_scheduler, stat

from fairlead.gateway.protobuf import field, number

grpc = pytest.importorskip("grpc", reason="needs grpcio: pip install 'fairlead[grpc]'")
pytestmark = pytest.mark.envoy

METHOD = "/vllm.grpc.engine.VllmEngine/Generate"
ASK = field(2, field(2, bytes(range(1, 101)))) + field(4, number(8, 16)) + number(5, 1)
CALLS = 6


async def generate(request: bytes, context: Any) -> AsyncIterator[bytes]:
    for answer in range(3):
        yield request + bytes([answer])


async def test_calls_are_repeated_over_http2(tmp_path: Path) -> None:
    require_envoy()
    server = grpc.aio.server()
    handler = grpc.unary_stream_rpc_method_handler(generate)
    service, _, method = METHOD[1:].rpartition("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    ports = [server.add_insecure_port("127.0.0.1:0"), *free_ports(1)]
    await server.start()
    listed = [{"name": f"e{i}", "address": "127.0.0.1", "port": port} for i, port in enumerate(ports)]
    blind = {"endpoints": listed, "policy": "round-robin", "builtinFilters": False}
    envoy = Envoy(tmp_path)
    try:
        async with running(blind, tmp_path) as (live, _):
            (port,) = free_ports(1)
            ext_proc = f"127.0.0.1:{live.config.ext_proc.port}"
            addresses = [f"127.0.0.1:{port}" for port in ports]
            await asyncio.to_thread(envoy.start, bootstrap(Pair("whole", "first-chunk"), port, ext_proc, addresses))
            await sees_the_scheduler(envoy.admin)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                for _ in range(CALLS):
                    answers = [answer async for answer in channel.unary_stream(METHOD)(ASK, timeout=20)]
                    assert answers == [ASK + bytes([number]) for number in range(3)]
            async with asyncio.timeout(10):
                while len(live.fleet.ledger):
                    await asyncio.sleep(0.02)
            assert await stat(envoy.admin, "cluster.dst_or_second_grpc.upstream_rq_retry") == CALLS // 2
    finally:
        envoy.end()
        await server.stop(None)
