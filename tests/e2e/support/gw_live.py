"""The scheduler in the test's own process, where everything it knows can be looked into."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gw_processes import START_SECONDS
from ports import free_ports

from fairlead.compat.load import load
from fairlead.gateway.health import ServingStatus
from fairlead.server.live import Live


@asynccontextmanager
async def running(config: dict[str, Any], directory: Path) -> AsyncIterator[tuple[Live, asyncio.Task[None]]]:
    """Runs the scheduler until the block ends; gives it and its task. No gateway is started, whatever is configured.

    Ports that the configuration leaves out are free ones.
    """
    ext_proc, gateway = free_ports(2)
    ports = {"extProc": {"host": "127.0.0.1", "port": ext_proc}, "admin": {"port": 0}, "gateway": {"port": gateway}}
    file = directory / f"live-{ext_proc}.json"
    file.write_text(json.dumps({**config, **{name: {**own, **config.get(name, {})} for name, own in ports.items()}}))
    collector = gc.get_threshold()
    live = Live(load(file))
    task = asyncio.create_task(live.run())
    try:
        await _serving(live, task)
        yield live, task
    finally:
        live.stop()
        await task
        # `Live` tunes the collector for a process of its own.
        gc.unfreeze()
        gc.set_threshold(*collector)


async def _serving(live: Live, task: asyncio.Task[None]) -> None:
    async with asyncio.timeout(START_SECONDS):
        while not task.done():
            await asyncio.sleep(0.01)
            if live.health.status("") is ServingStatus.SERVING:
                return
    await task
