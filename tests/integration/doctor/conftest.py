"""Installations for `fairlead doctor`: real stubs, schedulers and gateways, well or with one fault."""

import asyncio
import json
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from ports import free_ports

sys.path.insert(0, str(Path(__file__).parents[2] / "e2e" / "support"))

from gw_live import running
from gw_processes import require_envoy

from fairlead.apis.parsed import ParsedRequest
from fairlead.apis.tokens import PromptTokeniser, PromptTokens
from fairlead.compat.load import load
from fairlead.doctor.checks import CHECKS
from fairlead.doctor.checks import metrics as freshness
from fairlead.doctor.run import Examination, examine
from fairlead.doctor.site import Site
from fairlead.gateway.envoy.binary import find_envoy
from fairlead.gateway.envoy.gateway import command
from fairlead.lab.engine.tokens import TOKEN_BYTES
from fairlead.lab.stub.config import StubConfig
from fairlead.lab.stub.kv_publisher import KvEventsConfig
from fairlead.lab.stub.plans import render_chat
from fairlead.lab.stub.pool import StubPool
from fairlead.server.live import Live

MODEL = "tiny"
PATIENCE_SECONDS = 120.0


class StubTokeniser(PromptTokeniser):
    """Tokens as the stub makes them. `before` stands before every chat; `width` is another number of bytes a token."""

    def __init__(self, before: bytes = b"", width: int = TOKEN_BYTES) -> None:
        super().__init__()
        self._before = before
        self._width = width

    def knows(self, model: str) -> bool:
        return True

    def in_thread(self, parsed: ParsedRequest, model: str) -> bool:
        return False

    def tokens_of(self, parsed: ParsedRequest, body: bytes, model: str) -> PromptTokens:
        fields = json.loads(body)
        if "messages" in fields:
            text = self._before + render_chat(fields["messages"], fields.get("tools"))
        elif isinstance(fields.get("prompt"), str):
            text = fields["prompt"].encode()
        else:
            return PromptTokeniser().tokens_of(parsed, body, model)
        text += b"\0" * (-len(text) % self._width)
        ids = b"".join(text[at : at + self._width].ljust(4, b"\1") for at in range(0, len(text), self._width))
        return PromptTokens(ids=ids, total=len(ids) // 4)


class World:
    """What a test examines. `configuration` is written to a file, as users have it."""

    def __init__(self, directory: Path, stack: AsyncExitStack) -> None:
        self.directory = directory
        self.stack = stack
        self.pool: StubPool
        self.live: Live

    async def stubs(self, replicas: int = 2, events: KvEventsConfig | None = None, **settings: Any) -> list[str]:
        """Addresses of new model servers."""
        config = StubConfig(**{"model": MODEL, "time_ratio": 50.0, "kv_events": events, **settings})
        self.pool = await self.stack.enter_async_context(StubPool(config, replicas))
        return self.pool.addresses

    async def server(self, *routes: web.AbstractRouteDef) -> str:
        """Run a model server of the test's own; returns its address."""
        app = web.Application()
        app.router.add_routes(routes)
        runner = web.AppRunner(app)
        await runner.setup()
        self.stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"127.0.0.1:{runner.addresses[0][1]}"

    async def serve(self, config: dict[str, Any]) -> str:
        """Run the scheduler in this process; returns the URL of its admin port."""
        self.live, _ = await self.stack.enter_async_context(running(config, self.directory))
        return f"http://127.0.0.1:{int(self.live.admin.port)}"

    def envoy(self, bootstrap: dict[str, Any]) -> str:
        """Run Envoy with this; returns the URL of its admin page."""
        admin = free_ports(1)[0]
        bootstrap["admin"] = {"address": {"socket_address": {"address": "127.0.0.1", "port_value": admin}}}
        file = self.directory / f"envoy-{admin}.json"
        file.write_text(json.dumps(bootstrap))
        log = self.stack.enter_context((self.directory / f"envoy-{admin}.log").open("wb"))
        self.child([*command(find_envoy(), file, 1)], log)
        return f"http://127.0.0.1:{admin}"

    def child(self, arguments: list[str], log: Any = subprocess.DEVNULL) -> None:
        """A process that ends with the test."""
        process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        self.stack.callback(_end, process)

    async def answers(self, url: str) -> None:
        """Wait until a page is there."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not await asyncio.to_thread(_there, url):
                await asyncio.sleep(0.05)

    async def examined(
        self, config: dict[str, Any], only: tuple[str, ...] = (), tokeniser: StubTokeniser | None = None, **options: Any
    ) -> Examination:
        """All checks but that of the Envoy binary, unless `only` some; every one must have come to its end."""
        file = self.directory / "fairlead.yaml"
        near = {"host": "127.0.0.1", **config.get("extProc", {})}
        if tokeniser is not None:
            config = {**config, "tokens": {"models": {"*": {"modelPath": "lent"}}}}
        file.write_text(json.dumps({"admin": {"port": 0}, "gateway": "none", **config, "extProc": near}))
        checks = [one for one in CHECKS if (one.name in only if only else one.name != "gateway")]
        async with Site(load(file), **options) as site:
            if tokeniser is not None:
                await site.once("tokeniser", lambda: asyncio.sleep(0, tokeniser))
            found = await examine(site, checks)
        assert [one for one in found.outcomes if one.state in ("failed", "unfinished")] == []
        return found


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _there(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def listed(addresses: list[str], **labels: str) -> list[dict[str, Any]]:
    """`endpoints:` of a configuration."""
    return [
        {"name": f"e{at}", "address": address, "labels": {"model-id": MODEL, **labels}}
        for at, address in enumerate(addresses)
    ]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing caches the pages of a stub."""
    monkeypatch.setattr(freshness, "APART", 0.05)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack, asyncio.timeout(PATIENCE_SECONDS):
        yield World(tmp_path, stack)


@pytest.fixture
def pool_of() -> Callable[..., list[dict[str, Any]]]:
    return listed


@pytest.fixture
def stub_tokeniser() -> Callable[..., StubTokeniser]:
    return StubTokeniser


@pytest.fixture(scope="session")
def envoy_binary() -> str:
    return require_envoy()


@pytest.fixture
def later_stub(world: World, tmp_path: Path) -> Callable[[float], Awaitable[str]]:
    """`await later_stub(90)` starts a stub, a process whose clock is that many seconds ahead; gives its address."""

    async def start(seconds: float) -> str:
        port = free_ports(1)[0]
        shifted = f"import time; now = time.time; time.time = lambda: now() + {seconds}"
        arguments = f"['stub', '--port', '{port}', '--model', '{MODEL}', '--time-ratio', '50']"
        code = f"{shifted}; from fairlead.cli.main import main; main({arguments})"
        world.child([sys.executable, "-c", code])
        await world.answers(f"http://127.0.0.1:{port}/health")
        return f"127.0.0.1:{port}"

    return start


@pytest.fixture(scope="session")
def certificate() -> tuple[str, str]:
    """Files of a certificate for another name, signed by nobody, and of its key."""
    folder = Path(__file__).parents[2] / "data" / "metrics" / "tls"
    return str(folder / "server.pem"), str(folder / "server.key")
