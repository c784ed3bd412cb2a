"""Policies on trial beside the one that decides, under load through the real gateway; and what a canary takes."""

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from gw_http1 import Http1
from gw_load import under_load
from gw_messages import JSON, Ask
from gw_processes import Child, Serve, Upstream, sees_the_scheduler
from gw_schedulers import SchedulerProcess, build

RATE = 150.0

#: Schedulers that nobody wants: one that sleeps, one that raises.
NASTY = """
import time

class Sleeps:
    def pick(self, request, endpoints):
        time.sleep(0.5)
        return endpoints[0].id

class Raises:
    def pick(self, request, endpoints):
        raise RuntimeError("no")
"""


#: The same as policy plugins, which run in the scheduler's own process; and one that never comes back.
PLUGINS = """
import time
from fairlead.core.policy import Picked

class Policy:
    def __init__(self, params=None, name=""):
        self.name = name

class Sleeps(Policy):
    def choose(self, request, fleet, context):
        time.sleep(0.3)
        return Picked(0)

class Hangs(Policy):
    def choose(self, request, fleet, context):
        while True:
            pass

class Raises(Policy):
    def choose(self, request, fleet, context):
        raise RuntimeError("no")

class Nonsense(Policy):
    def choose(self, request, fleet, context):
        return Picked(10 ** 9)
"""
KINDS = ("Sleeps", "Hangs", "Raises", "Nonsense")


def path_with(directory: Path) -> str:
    """`PYTHONPATH` with this directory before what it has already."""
    return os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])])


def install(directory: Path) -> None:
    """A distribution with these plugins, for whoever has the directory on its path."""
    (directory / "nasty_plugins.py").write_text(PLUGINS)
    about = directory / "nasty_plugins-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: nasty-plugins\nVersion: 1.0\n")
    points = [f"nasty-{kind.lower()} = nasty_plugins:{kind}" for kind in KINDS]
    (about / "entry_points.txt").write_text("\n".join(["[fairlead.plugins]", *points, ""]))


@pytest.mark.slow
async def test_shadows_judge_and_change_nothing(
    upstream: Upstream, serve: Callable[..., Serve], tmp_path: Path, ending: Callable[[Child], Child]
) -> None:
    (tmp_path / "nasty_for_shadows.py").write_text(NASTY)
    nasty = {}
    for name in ("Sleeps", "Raises"):
        command = build("python", tmp_path)
        command[command.index("cost-model")] = f"nasty_for_shadows:{name}"
        child = SchedulerProcess(f"python-{name}", ["env", f"PYTHONPATH={path_with(tmp_path)}", *command], tmp_path)
        ending(child)
        nasty[name] = child.again().address
    good = SchedulerProcess("good", build("python", tmp_path), tmp_path)
    ending(good)
    nasty["Good"] = good.again().address
    policies = [{"policy": "cost-model", "name": "same"}, {"policy": "round-robin"}, {"policy": "lpwl"}]
    policies += [{"name": name, "scheduler": {"address": address}} for name, address in nasty.items()]
    gateway = serve({"endpoints": upstream.addresses, "shadows": {"policies": policies, "cpu": 0.5}})
    await sees_the_scheduler(gateway.gateway)

    async def script(note: Callable[[str], None]) -> None:
        await asyncio.sleep(4.0)

    # Slower than elsewhere: six shadows must keep up on a busy machine, or they are rightly cut off.
    story = await under_load(f"http://127.0.0.1:{gateway.port}", script, 0.4 * RATE)
    assert story.failures == {}
    assert await gateway.settled(60.0) == {}

    async def count(shadow: str, verdict: str) -> float:
        return await gateway.metric("fairlead_shadow_decisions_total", shadow=shadow, verdict=verdict)

    routed = await gateway.decisions()
    same = await count("same", "agree")
    assert same > 0.5 * routed
    # Equal costs are drawn among, so even the same policy differs at times.
    assert await count("round-robin", "differ") > 0.2 * routed
    assert await count("lpwl", "agree") + await count("lpwl", "differ") > 0.5 * routed
    assert await count("Good", "agree") > 0.3 * routed, "from the numbers of before the charge it decides the same"
    assert await count("Raises", "error") > 0
    assert await gateway.metric("fairlead_shadow_cut_off", shadow="Sleeps") == 1, "it left too many unanswered"
    assert await gateway.metric("fairlead_shadow_skipped_total", shadow="Sleeps", reason="lost") > 200
    assert await gateway.metric("fairlead_shadow_cut_off", shadow="Good") == 0
    assert await count("Raises", "agree") == await count("Raises", "differ") == 0
    assert await gateway.metric("fairlead_shadow_regret_milliseconds_total", shadow="round-robin") > 0


@pytest.mark.slow
async def test_shadows_that_sleep_hang_raise_or_talk_nonsense_are_cut_off_unseen(
    upstream: Upstream, serve: Callable[..., Serve], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    install(plugins)
    monkeypatch.setenv("PYTHONPATH", path_with(plugins))
    names = [f"nasty-{kind.lower()}" for kind in KINDS]
    policies = [{"policy": name} for name in (*names, "round-robin")]
    gateway = serve({"endpoints": upstream.addresses, "shadows": {"policies": policies, "cpu": 1.0}})
    await sees_the_scheduler(gateway.gateway)

    async def script(note: Callable[[str], None]) -> None:
        async with asyncio.timeout(30):
            for name in names:
                while await gateway.metric("fairlead_shadow_cut_off", shadow=name) != 1:
                    await asyncio.sleep(0.1)
            before = await judged()
            while await judged() < before + 20:
                await asyncio.sleep(0.1)

    async def judged() -> float:
        return await gateway.metric("fairlead_shadow_decisions_total", shadow="round-robin")

    story = await under_load(f"http://127.0.0.1:{gateway.port}", script, RATE)
    assert story.failures == {}
    unscheduled = await gateway.metric("fairlead_fallback_requests_total")
    assert unscheduled <= 0.05 * len(story.records), "the gateway did not have to go past the scheduler"
    assert await gateway.settled(60.0) == {}


@pytest.mark.slow
async def test_a_canary_takes_its_share(upstream: Upstream, serve: Callable[..., Serve]) -> None:
    gateway = serve({"endpoints": upstream.addresses, "canary": {"policy": "round-robin", "percent": 30}})
    await sees_the_scheduler(gateway.gateway)

    async def script(note: Callable[[str], None]) -> None:
        await asyncio.sleep(1.5)

    story = await under_load(f"http://127.0.0.1:{gateway.port}", script, RATE)
    assert story.failures == {}
    canary = await gateway.metric("fairlead_canary_decisions_total", side="canary")
    primary = await gateway.metric("fairlead_canary_decisions_total", side="primary")
    assert 0.15 < canary / (canary + primary) < 0.45
    assert await gateway.settled(60.0) == {}


async def test_a_conversation_stays_on_its_side_of_a_canary(upstream: Upstream, serve: Callable[..., Serve]) -> None:
    """It names no session, so its opening decides, which each turn has."""
    gateway = serve({"endpoints": upstream.addresses, "canary": {"policy": "round-robin", "percent": 50}})
    await sees_the_scheduler(gateway.gateway)
    sides = []
    async with Http1(gateway.port) as client:
        for number in range(16):
            before, turns = await canary_decisions(gateway), [{"role": "user", "content": f"question {number}"}]
            for answer in ("first", "second", "third"):
                body = json.dumps({"model": "m", "messages": turns, "max_tokens": 5}).encode()
                assert (await client.ask(Ask("POST", "/v1/chat/completions", [JSON], [body]))).status == 200
                turns += [{"role": "assistant", "content": answer}, {"role": "user", "content": "and then?"}]
            sides.append(await canary_decisions(gateway) - before)
    assert {*sides} == {0, 3}


async def canary_decisions(gateway: Serve) -> float:
    return await gateway.metric("fairlead_canary_decisions_total", side="canary")
