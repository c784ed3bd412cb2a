"""Prefill/decode pairs through the real Envoy: the decoder learns from us alone where its prompt is computed."""

import asyncio
import json
import sys
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from ports import free_ports

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e" / "support"))

from gw_http1 import Http1
from gw_live import running
from gw_messages import JSON, Ask
from gw_modes import Pair, bootstrap
from gw_processes import Envoy, require_envoy, sees_the_scheduler
from tcp import TcpServer

from fairlead.core.endpoint import ROLE_LABEL
from fairlead.core.headers import PREFILLER
from fairlead.server.observe.log import setup

pytestmark = pytest.mark.envoy

ANSWER = b'{"id": "x", "choices": [], "usage": {"prompt_tokens": 3}}'


class Server:
    """Answers everything, and keeps what the requests said of their prefill."""

    def __init__(self) -> None:
        self.told: Counter[str] = Counter()

    async def start(self, stack: AsyncExitStack) -> str:
        return (await stack.enter_async_context(TcpServer(self._serve, limit=1 << 22))).address

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            fields = [line.lower().split(": ", 1) for line in lines if line]
            await reader.readexactly(int(dict(fields).get("content-length", 0)))
            if first.startswith("POST"):
                self.told.update([",".join(value for name, value in fields if name == PREFILLER)])
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            writer.write(head % len(ANSWER) + ANSWER)


NATIVE = {"policy": {"type": "prefill-decode", "parameters": {"always": True}}}
REFERENCE = yaml.safe_load((Path(__file__).parents[1] / "data" / "epp-configs" / "pd-epp-config.yaml").read_text())


@pytest.mark.parametrize("policy", [NATIVE, REFERENCE], ids=["native", "reference"])
async def test_the_decoder_is_told_the_prefill_server_and_nothing_that_a_client_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: dict[str, Any]
) -> None:
    require_envoy()
    setup("info")
    async with AsyncExitStack() as stack:
        prefill, decode = Server(), Server()
        roles = {await prefill.start(stack): "prefill", await decode.start(stack): "decode"}
        endpoints = [
            {"name": role, "address": "127.0.0.1", "port": int(address[10:]), "labels": {ROLE_LABEL: role}}
            for address, role in roles.items()
        ]
        live, _ = await stack.enter_async_context(running({"endpoints": endpoints, **policy}, tmp_path))
        assert ("is split where 'prefix-based-pd-decider' says so" in capsys.readouterr().err) == (policy is REFERENCE)
        (port,) = free_ports(1)
        gateway = Envoy(tmp_path, f"envoy-{port}")
        stack.callback(gateway.end)
        ext_proc = f"127.0.0.1:{live.config.ext_proc.port}"
        made = bootstrap(Pair("whole", "first-chunk"), port, ext_proc, list(roles), message_timeout=10.0)
        await asyncio.to_thread(gateway.start, made)
        await sees_the_scheduler(gateway.admin)
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "long " * 500}]}).encode()
        async with Http1(port) as client:
            for spoofed in ([], [(PREFILLER, "169.254.169.254:80")]):
                got = await client.ask(Ask("POST", "/v1/chat/completions", [JSON, *spoofed], [body]))
                assert (got.status, got.body) == (200, ANSWER)
        (address,) = (address for address, role in roles.items() if role == "prefill")
        assert decode.told == {address: 2}
        assert not prefill.told
        async with asyncio.timeout(10):
            while len(live.fleet.ledger):
                await asyncio.sleep(0.05)
