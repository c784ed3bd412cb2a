"""A running scheduler takes over a changed configuration file, or says why not."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from fairlead.config.load import load
from fairlead.live import Live
from fairlead.observe.log import setup
from fairlead.schedule.cycle import Context
from fairlead.testing import request

FILE = """
gateway: none
extProc: {{host: 127.0.0.1, port: 0}}
als: {{enabled: false}}
admin: {{port: {admin}}}
metrics: {{interval: 10s, idleInterval: 10s, staleness: 20s}}
scorers: [{{type: session-affinity, weight: {weight}}}]
selection: {{picker: max-score}}
endpoints: [{endpoints}]
{more}
"""


def write(file: Path, weight: float, endpoints: int = 2, admin: int = 0, more: str = "") -> None:
    listed = ", ".join(f"'127.0.0.1:{1 + i}'" for i in range(endpoints))
    new = file.with_suffix(".new")
    new.write_text(FILE.format(weight=weight, endpoints=listed, admin=admin, more=more))
    os.replace(new, file)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.02)


def homes(live: Live) -> set[str]:
    """Where requests of one session go."""
    fleet = live.fleet
    asked = request(session="s")
    picks = [live.pipeline.policy.choose((asked,), fleet, Context(0.0, Random(i)))[0] for i in range(40)]
    return {fleet.table.ids[pick.slot] for pick in picks}


async def test_weights_endpoints_and_limits_while_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "f.yaml"
    write(file, weight=100)
    setup("info")
    live = Live(load(file))
    running = asyncio.create_task(live.run())
    try:
        await until(lambda: live.config.source == str(file) and hasattr(live, "admin"))
        assert len(homes(live)) == 1

        write(file, weight=0)
        await until(lambda: live.config.policy.scorers[0].weight == 0)
        assert len(homes(live)) == 2

        before = live.pipeline.policy
        write(file, weight=5, more="filters: [{type: nope}]")
        said = ""
        while "cannot be used" not in said:
            await asyncio.sleep(0.05)
            said += capsys.readouterr().err
        assert "unknown filter type 'nope'" in said
        assert live.pipeline.policy is before

        write(file, weight=100, endpoints=1, admin=1, more="ledger: {leaseTtl: 30s}\nparsing: {maxBodyBytes: 1MiB}")
        await until(lambda: live.fleet.table.count == 1)
        assert (live.fleet.ledger.ttl, live.host.max_body) == (30.0, 1 << 20)
        assert len(homes(live)) == 1
        said = capsys.readouterr().err
        assert "refused" in said and "$.admin.port" in said
        assert live.config.admin.port == 0
        live.pipeline.validate()
    finally:
        live.stop()
        await asyncio.wait_for(running, 40)
