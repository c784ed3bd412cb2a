"""The standalone indexer as a whole."""

import asyncio
import os
from pathlib import Path

import aiohttp
import pytest

from fairlead.compat.load import load
from fairlead.server.files import lock
from fairlead.server.live.indexer import LiveIndexer


async def test_a_snapshot_that_another_process_writes_is_a_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("settle_memory", "keep_heap"):  # they last, and would change the tests that come later
        monkeypatch.setattr(f"fairlead.server.live.indexer.{name}", lambda: None)
    path = tmp_path / "index.kv"
    held = lock(tmp_path / "index.kv.lock", "ours")
    events = f"kvEvents: {{enabled: true, port: 1, snapshot: '{path}', snapshotInterval: 10ms}}"
    indexer = LiveIndexer(load(f"endpoints: ['127.0.0.1:1']\n{events}\n"), "127.0.0.1", 0)
    running = asyncio.create_task(indexer.run())
    async with asyncio.timeout(30), aiohttp.ClientSession() as session:
        while not indexer.port:
            await asyncio.sleep(0.01)

        async def page(name: str) -> str:
            async with session.get(f"http://127.0.0.1:{indexer.port}/{name}") as answer:
                assert answer.status == 200
                return await answer.text()

        while "another scheduler or indexer writes there" not in await page("readyz"):
            await asyncio.sleep(0.05)
        assert 'fairlead_trouble{what="kv-snapshot"} 1' in await page("metrics")
    indexer.stop()
    await running
    assert not path.exists()
    os.close(held)
