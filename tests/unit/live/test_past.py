"""The embedded gateway's own count of requests that nobody scheduled."""

import asyncio
from pathlib import Path

import pytest
from aiohttp import web

from fairlead.io.envoy.admin import EnvoyAdmin
from fairlead.live.past import requests_past, watch_gateway
from fairlead.observe.exposition import Registry

NAME = b"fairlead_unscheduled_requests_total"


class Gateway:
    """Envoy's admin page on a socket."""

    def __init__(self) -> None:
        self.text = "cluster.all_endpoints.upstream_rq_total: 40\ncluster.all_endpoints_grpc.upstream_rq_total: 2\n"
        self.hangs = False
        self._over = asyncio.Event()
        self._runner: web.AppRunner | None = None

    async def serve(self, path: Path) -> None:
        app = web.Application()
        app.router.add_get("/stats", self._stats)
        self._runner = web.AppRunner(app, shutdown_timeout=0.0)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(path)).start()

    async def close(self) -> None:
        self._over.set()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _stats(self, request: web.Request) -> web.Response:
        if self.hangs:
            await self._over.wait()
        return web.Response(text=self.text)


async def test_both_clusters_count_and_the_last_count_stays_while_it_is_away(tmp_path: Path) -> None:
    gateway, registry, path = Gateway(), Registry(), tmp_path / "admin.sock"
    refresh = watch_gateway(str(path), registry)
    assert refresh is not None
    await refresh()
    assert b"\n" + NAME + b" " not in registry.render(), "nobody has told yet"
    await gateway.serve(path)
    try:
        await refresh()
        assert b"\n" + NAME + b" 42" in registry.render()
        gateway.hangs = True
        await refresh()
        assert b"\n" + NAME + b" 42" in registry.render()
    finally:
        await gateway.close()
    await refresh()
    assert b"\n" + NAME + b" 42" in registry.render()


@pytest.mark.parametrize("text", ["", "no such page\n", "cluster.all_endpoints.upstream_rq_total: many\n"])
async def test_other_answers_are_no_counts(tmp_path: Path, text: str) -> None:
    gateway = Gateway()
    gateway.text = text
    await gateway.serve(tmp_path / "admin.sock")
    try:
        assert await requests_past(EnvoyAdmin(str(tmp_path / "admin.sock"))) == 0
    finally:
        await gateway.close()


def test_who_has_no_gateway_shows_nothing() -> None:
    registry = Registry()
    assert watch_gateway("", registry) is None
    assert NAME not in registry.render()
