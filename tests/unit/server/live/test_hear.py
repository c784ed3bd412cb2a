"""Schedulers in other processes and shadows hear how requests ended, if they want to."""

import asyncio
from pathlib import Path

import pytest

from fairlead.compat.load import load
from fairlead.core.endpoint import Endpoint
from fairlead.core.events import EndpointUp, RequestArrived, ResponseEnded
from fairlead.server.live.wiring import Core
from fairlead.server.sdk.server import SchedulerServer, policy_maker
from fairlead.testing import builders

MODULE = """
from fairlead.plugins.policies.by_load import LeastRequests

class Learns(LeastRequests):
    heard = []
    def ended(self, outcome):
        self.heard.append((outcome.endpoint, outcome.status, outcome.ttft_ms))
"""


@pytest.mark.parametrize("place", ["scheduler: {%s}", "shadows: {policies: [{name: s, scheduler: {%s}}]}"])
async def test_another_process_hears_of_outcomes(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "learns_elsewhere.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    server = SchedulerServer(policy_maker("learns_elsewhere:Learns"))
    from learns_elsewhere import Learns  # type: ignore[import-not-found]

    address = await server.start("127.0.0.1:0")
    text = place % f"address: '{address}'"
    config = load(f"{text}\ngateway: none\nendpoints: ['10.0.0.1:8000']\n")
    core = Core(config, asyncio.get_running_loop(), None, print, print)
    core.connections.follow(config)
    core.shadows.follow(config, core.builder.scheduling.on_trial)
    core.watch.set_listeners([*core.connections.listeners(), *core.shadows.listeners()])
    core.driver.feed(EndpointUp(Endpoint("e", "10.0.0.1:8000")))
    Learns.heard.clear()
    try:
        async with asyncio.timeout(20):
            while not Learns.heard:
                request = builders.request()
                core.driver.feed(RequestArrived(request))
                await asyncio.sleep(0.02)
                ended = ResponseEnded(request_id=request.id, status=200, ttft_ms=50.0, duration_ms=60.0)
                core.driver.feed(ended)
                page = b"".join(core.watch.exposition())
    finally:
        await core.connections.close()
        await core.shadows.close()
        await server.close()
    assert {*Learns.heard} == {("e", 200, 50.0)}
    assert b"fairlead_unheard_outcomes_total{" in page
