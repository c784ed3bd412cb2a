"""API keys at the embedded gateway: who shows none gets nothing, and who shows one is the tenant that it names."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from gw_clients import LARGE, MINTED, ask, bearer, request, tenant
from gw_http1 import Http1
from gw_http2 import Http2
from gw_messages import Ask
from gw_mirror import Mirror
from gw_processes import Serve, Upstream, get_page, sees_the_scheduler

from fairlead.core.errors import ConfigError
from fairlead.gateway.envoy.authentication import Key, new_key
from fairlead.server.followed_files import read_upstream_token
from fairlead.server.journal.blocks import Damage, blocks

Start = Callable[..., Serve]


class Keys:
    """A file of keys."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kept: dict[str, Key] = {}

    def add(self, tenant: str) -> str:
        key, self.kept[tenant] = new_key(tenant)
        self.write()
        return key

    def write(self, further: str = "") -> None:
        aside = self.path.with_suffix(".aside")
        aside.write_text("# who may\n" + "".join(f"{key.line}\n" for key in self.kept.values()) + further)
        os.replace(aside, self.path)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys.txt")


@pytest.fixture
def start(serve: Start, upstream: Upstream, keys: Keys) -> Start:
    """`start(**config)`: a gateway that asks for these keys."""

    def begin(gateway: dict[str, Any] | None = None, **config: Any) -> Serve:
        asking = {"paths": [], "keys": {"file": str(keys.path)}, **(gateway or {})}
        return serve({"endpoints": upstream.addresses, "gateway": asking, **config})

    return begin


async def becomes(status: int, at: Serve, *fields: tuple[str, str]) -> None:
    """Wait until a request is answered so."""
    until = time.monotonic() + 20
    while (got := await ask(at, *fields)).status != status:
        assert time.monotonic() < until, got
        await asyncio.sleep(0.05)


async def test_who_has_no_key_gets_nothing(start: Start, keys: Keys) -> None:
    key = keys.add("team-a")
    hashed = sha256(key.encode()).hexdigest()
    nothing = sha256(b"").hexdigest()
    keys.write(f"{nothing} anybody\n{sha256(b'expired-' * 4).hexdigest()} late expires=2020-01-01\n")
    at = await asyncio.to_thread(start)
    shown = [
        *([], [bearer("")], [bearer("fl-wrong")], [bearer(hashed)], [bearer(key[:-1])], [bearer(key + "x")]),
        *([bearer(key.upper())], [bearer("x" * 600)], [bearer("expired-" * 4)], [("authorization", f"Basic {key}")]),
        *([bearer(key), bearer("other")], [("authorization", key)], [("x-api-key", "")], [("x-api-key", hashed)]),
        [("authorization", "Bearer '\"]] \\ {}")],
    ]
    for fields in shown:
        for size in (5, LARGE):
            assert (await ask(at, *fields, *MINTED, size=size)).status == 401, fields
    for path in ("/v1/models", "/v1/messages", "/sleep", "/health/x"):
        assert (await ask(at, path=path, method="GET")).status == 401
    assert (await ask(at, path="/health")).status == 401, "with a body it is no probe"
    upgrade = ("connection", "upgrade"), ("upgrade", "websocket")
    assert (await ask(at, *upgrade, path="/v1/realtime", method="GET")).status == 401
    assert await at.decisions() == 0
    assert await at.metric("fairlead_unscheduled_requests_total") == 0

    refused = await ask(at)
    error = json.loads(refused.body)["error"]
    assert (error["type"], error["code"], error["param"]) == ("AuthenticationError", 401, None)
    assert "Authorization: Bearer" in error["message"]
    assert refused.field("www-authenticate") == "bearer"  # the client lowers values
    anthropic = json.loads((await ask(at, path="/v1/messages")).body)
    assert (anthropic["type"], anthropic["error"]["type"]) == ("error", "authentication_error")

    assert (await ask(at, path="/health", method="GET")).status == 200, "probes have no key"
    assert (await ask(at, path="/health", method="OPTIONS")).status == 401
    async with Http2(at.port) as client:
        assert (await client.ask(Ask("GET", "/health"))).status == 200
        assert (await client.ask(Ask("GET", "/health", pieces=[b"a" * 50_000], chunked=True))).status == 413
        assert (await client.ask(request())).status == 401
        assert (await client.ask(request(bearer(key)))).status == 200
    assert (await ask(at, bearer(key), path="/sleep")).status == 404
    assert (await ask(at, bearer(key))).status == 200


async def test_the_key_names_the_tenant_whatever_the_client_says(start: Start, keys: Keys) -> None:
    key = keys.add("team-a")
    at = await asyncio.to_thread(start, headers={"trust": []}, flowControl={})
    ways = [bearer(key)], [bearer(key), *MINTED], [("x-api-key", key), *MINTED], [("authorization", f"bearer  {key}")]
    for fields in ways:
        for size in (5, LARGE):
            assert await tenant(at, *fields, size=size) == "team-a"
    metrics = await at.page("/metrics")
    assert 'fairness_id="team-a"' in metrics and "minted" not in metrics


async def test_keys_come_and_go_while_it_runs(start: Start, keys: Keys) -> None:
    first = keys.add("team-a")
    at = await asyncio.to_thread(start)
    second = keys.add("team-b")
    await becomes(200, at, bearer(second))
    del keys.kept["team-a"]
    async with Http1(at.port) as connected:
        assert (await connected.ask(request(bearer(first)))).status == 200
        keys.write()
        await becomes(401, at, bearer(first))
        assert (await connected.ask(request(bearer(first)))).status == 401
        assert connected.opened == 1

    third, kept = new_key("team-c")
    keys.write(f"{kept.line}\n{third} team-c\n")  # somebody wrote the key itself
    until = time.monotonic() + 20
    while "line 4" not in await at.page("/readyz"):
        assert time.monotonic() < until
        await asyncio.sleep(0.05)
    assert "those read before stay in force" in await at.page("/readyz")
    assert await at.metric("fairlead_trouble", what="keys") == 1
    assert [(await ask(at, bearer(key))).status for key in (first, second, third)] == [401, 200, 401]
    assert third not in at.said()

    keys.write(f"{kept.line}\n")
    await becomes(200, at, bearer(third))
    assert get_page(at.admin + "/readyz")[0] == 200
    keys.kept.clear()
    keys.write()
    await becomes(401, at, bearer(second))


async def test_model_servers_get_a_key_of_their_own(serve: Start, keys: Keys, tmp_path: Path) -> None:
    key, token = keys.add("team-a"), tmp_path / "engine-key.txt"
    token.write_text("engine-1\n")
    gateway = {"paths": [], "keys": {"file": str(keys.path)}, "upstreamTokenFile": "engine-key.txt"}

    async def sent(size: int) -> str:
        told = json.loads((await ask(at, bearer(key), size=size)).body)
        return dict(told["headers"])["authorization"]

    async def becomes_sent(value: str) -> None:
        until = time.monotonic() + 20
        while await sent(5) != value:
            assert time.monotonic() < until

    async with Mirror() as mirror:
        at = await asyncio.to_thread(serve, {"endpoints": [mirror.address], "gateway": gateway})
        assert [await sent(size) for size in (5, LARGE)] == ["bearer engine-1"] * 2
        token.write_text("x" * 99_999)
        with pytest.raises(ConfigError, match="no usable token"):
            read_upstream_token(str(token))
        token.write_text("")
        until = time.monotonic() + 20
        while "the keys of model servers cannot be used" not in await at.page("/readyz"):
            assert time.monotonic() < until
            await asyncio.sleep(0.05)
        assert await sent(5) == "bearer engine-1"
        token.write_text("engine-2")
        await becomes_sent("bearer engine-2")
        dump = await asyncio.to_thread(
            get_page, f"http://127.0.0.1:{at.config['gateway']['adminPort']}/config_dump?include_eds"
        )
        assert "credential_injector" in dump[1] and "engine-2" not in dump[1]
        assert "engine-1" not in at.said() and "engine-2" not in at.said()
        assert (await ask(at)).status == 401


async def test_a_key_expires(start: Start, keys: Keys) -> None:
    key = keys.add("team-a")
    at = await asyncio.to_thread(start)
    now = int(datetime.now(UTC).timestamp())
    keys.kept["team-a"] = Key(keys.kept["team-a"].digest, "team-b", now + 3600)
    keys.write()
    until = time.monotonic() + 20
    while await tenant(at, bearer(key)) != "team-b":
        assert time.monotonic() < until
    keys.kept["team-a"] = Key(keys.kept["team-a"].digest, "team-b", now - 1)
    keys.write()
    await becomes(401, at, bearer(key))


async def test_without_the_scheduler_keys_are_asked_for(start: Start, keys: Keys) -> None:
    """Nothing but the embedded gateway is left, and it serves by itself."""
    key = keys.add("team-a")
    at = await asyncio.to_thread(start)
    await sees_the_scheduler(at.gateway)
    at.file.write_text("nonsense: true")  # so that none comes back
    os.kill(at.scheduler_pid(), signal.SIGKILL)
    for size in (5, LARGE):
        assert (await ask(at, *MINTED, size=size)).status == 401
        assert (await ask(at, bearer("x" * 40), *MINTED, size=size)).status == 401
        assert (await ask(at, bearer(key), size=size)).status == 200
    os.kill(at.envoy_pid(), signal.SIGKILL)  # a new one has the keys that were in force
    until = time.monotonic() + 20
    while True:
        try:
            got = [(await ask(at, *fields)).status for fields in ([], [bearer(key)])]
            break
        except Exception:
            assert time.monotonic() < until
            await asyncio.sleep(0.05)
    assert got == [401, 200]


async def test_nobody_is_told_a_key(start: Start, keys: Keys, tmp_path: Path) -> None:
    key, wrong = keys.add("team-a"), "fl-albatross-91c2-albatross-91c2"
    journal = tmp_path / "journal"
    at = await asyncio.to_thread(
        start, log={"level": "debug"}, journal={"path": str(journal), "explain": True}, flowControl={}
    )
    for way in (bearer, lambda shown: ("x-api-key", shown)):
        assert await tenant(at, way(key)) == "team-a"
        assert (await ask(at, way(wrong))).status == 401
    assert await at.settled() == {}
    pages = ("/metrics", "/readyz", "/debug/endpoints", "/debug/decisions?last=100", "/dashboard/snapshot")
    told = {page: await at.page(page) for page in pages}
    at.end()
    told["the log"] = at.said()
    for file in journal.iterdir():
        found = [one for one in blocks(file.read_bytes()) if not isinstance(one, Damage)]
        told[file.name] = b"".join(content for _, content in found).decode("latin-1")
    assert any("team-a" in told[file.name] for file in journal.iterdir())
    secrets = key, wrong, sha256(key.encode()).hexdigest()
    assert [where for where, text in told.items() if any(secret in text for secret in secrets)] == []
