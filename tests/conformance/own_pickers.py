"""Fairlead as the pickers that the cases want: in both transports, with and without TLS, and behind the real Envoy."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e" / "support"))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from check_picker import Result, judge
from gw_http1 import Http1
from gw_live import running
from gw_messages import JSON
from gw_modes import connection_manager
from gw_site import CHAT, FOREIGN, GET, Site, post, site
from picker_client import Picker
from protocol_cases import ALL, BUSY, EMPTY, Case

from fairlead.cli.epp import self_signed

TRANSPORTS = ("http2", "grpc-aio")
#: Nobody listens there: the cases play the gateway, and no request is sent on.
SOME = ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"]
FULL = {"saturation": {"type": "concurrency-detector", "maxConcurrency": 1}, "ttl": "100ms"}


async def ours(
    pb: ModuleType, directory: Path, transports: Sequence[str] = TRANSPORTS, tls: Sequence[bool] = (False, True)
) -> dict[str, list[Result]]:
    """The results of each, by a title."""
    found = {}
    nobody = directory / "nobody.json"
    nobody.write_text('{"endpoints": []}')
    kinds: dict[str, tuple[dict[str, Any], list[Case]]] = {
        "": ({"endpoints": SOME}, ALL),
        ", no endpoint": ({"endpoints": {"file": str(nobody)}}, EMPTY),
        ", endpoints full": ({"endpoints": SOME[:1], "flowControl": FULL}, BUSY),
    }
    for transport in transports:
        for secure in tls:
            for kind, (config, cases) in kinds.items():
                async with _picker(pb, directory, transport, secure, config) as picker:
                    title = f"Fairlead, transport {transport}{', TLS' if secure else ''}{kind}"
                    found[title] = await judge(picker, cases)
    found["Fairlead behind Envoy, full duplex, fail closed"] = await _behind_envoy(directory)
    return found


@asynccontextmanager
async def _picker(
    pb: ModuleType, directory: Path, transport: str, secure: bool, config: dict[str, Any]
) -> AsyncIterator[Picker]:
    ext_proc: dict[str, Any] = {"transport": transport}
    ca = b""
    if secure:
        ext_proc["tls"] = {"certDir": self_signed(directory)}
        ca = (directory / "tls.crt").read_bytes()
    async with running({**config, "policy": "round-robin", "extProc": ext_proc}, directory) as (live, _):
        yield Picker.at(
            f"127.0.0.1:{live.config.ext_proc.port}", pb, ca=ca, name="localhost" if secure else "", endpoints=SOME
        )


# ---- through Envoy ----


def _impatient(built: dict[str, Any], _: list[str]) -> None:
    connection_manager(built)["request_timeout"] = "0.3s"


async def _behind_envoy(directory: Path) -> list[Result]:
    checks = {
        "headers alone are routed": _get,
        "a request reaches the picked endpoint, its body unchanged": _post,
        "1 MB in one request reaches it unchanged": _large,
        "a streamed answer reaches the client whole": _events,
        "the gateway's own 408 reaches the client": _timeout,
        "a request that cannot be understood is answered 400": _bad,
    }
    found = []
    async with AsyncExitStack() as stack:
        at = await stack.enter_async_context(site(FOREIGN, directory, patch=_impatient))
        for sentence, check in checks.items():
            try:
                async with asyncio.timeout(20):
                    broken = await check(at)
            except Exception as error:
                broken = f"{type(error).__name__}: {error}"
            found.append(Result("MUST", sentence, broken))
    return found


async def _get(at: Site) -> str:
    told = await at.answer(GET)
    return "" if told["at"] in at.addresses else f"{told['at']}"


async def _post(at: Site) -> str:
    told = await at.answer(post())
    return "" if told["at"] in at.addresses and told["bytes"] == len(CHAT) else f"{told}"


async def _large(at: Site) -> str:
    body = CHAT.replace(b"Which", b"x" * 1_000_000)
    told = await at.answer(post(body))
    return "" if told["bytes"] == len(body) else f"{told['bytes']} of {len(body)} bytes"


async def _events(at: Site) -> str:
    got = await at.ask(post(path="/stream/fast"))
    return "" if got.body.count(b"data: ") == 31 else f"{got.body.count(b'data: ')} of 31 events"


async def _timeout(at: Site) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", at.gateway.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 9000\r\n\r\n" + CHAT)
    head = await reader.readline()
    writer.close()
    return "" if b" 408 " in head else f"{head!r}"


async def _bad(at: Site) -> str:
    async with Http1(at.gateway.port) as client:
        got = await client.ask(post(b"{", JSON))
    return "" if got.status == 400 else f"{got.status}"
