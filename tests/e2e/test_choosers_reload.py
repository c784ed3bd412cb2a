"""From shadow to canary to primary, and back: each step is a change of the file, none costs a request."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from gw_load import under_load
from gw_processes import Child, Serve, Upstream, sees_the_scheduler
from gw_schedulers import SchedulerProcess, build


async def until(happened: Callable[[], Awaitable[object]], what: str) -> None:
    async with asyncio.timeout(30):
        while not await happened():
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_promotion_applies_while_it_runs(
    upstream: Upstream, serve: Callable[..., Serve], tmp_path: Path, ending: Callable[[Child], Child]
) -> None:
    scheduler = SchedulerProcess("python", build("python", tmp_path), tmp_path)
    ending(scheduler)
    section = {"address": scheduler.again().address, "budget": 0.05}
    gateway = serve({"endpoints": upstream.addresses})
    await sees_the_scheduler(gateway.gateway)
    file = tmp_path / "serve.yaml"

    def write(**sections: object) -> None:
        file.write_text(json.dumps({**gateway.config, **sections}))

    async def rises(name: str, **labels: str) -> None:
        before = await gateway.metric(name, **labels)

        async def more() -> bool:
            return await gateway.metric(name, **labels) > before + 10

        await until(more, f"more of {name} {labels}")

    async def script(note: Callable[[str], None]) -> None:
        write(shadows={"policies": [{"name": "new", "scheduler": section}]})
        await rises("fairlead_shadow_decisions_total", shadow="new", verdict="agree")
        write(canary={"scheduler": section, "percent": 30})
        await rises("fairlead_scheduler_requests_total", scheduler="canary", event="answered")
        write(scheduler=section)
        await rises("fairlead_scheduler_requests_total", scheduler="scheduler", event="answered")
        write()

        async def gone() -> bool:
            return "fairlead_scheduler_connected{" not in await gateway.page("/metrics")

        await until(gone, "the built-in policy alone")

    story = await under_load(f"http://127.0.0.1:{gateway.port}", script, 80.0)
    assert story.failures == {}
    assert await gateway.settled(60.0) == {}
