"""What is learned from usage reaches the next request's estimate."""

import asyncio

import pytest

from fairlead.compat.load import load
from fairlead.core.endpoint import Endpoint
from fairlead.core.events import EndpointUp, RequestArrived, ResponseEnded
from fairlead.core.request import Usage
from fairlead.server.live.wiring import Core

BODY = b'{"model": "m", "messages": [{"role": "user", "content": "%s"}]}' % (b"x" * 4000)


@pytest.mark.parametrize("settings", ["", "warming: {enabled: true}\n"])
async def test_an_estimate_uses_the_ratio_that_was_learned(settings: str) -> None:
    config = load(f"{settings}gateway: none\njournal: {{explain: false}}\nendpoints: ['10.0.0.1:8000']\n")
    core = Core(config, asyncio.get_running_loop(), None, print, print)
    core.driver.feed(EndpointUp(Endpoint("e", "10.0.0.1:8000")))
    understanding = core.host.understanding
    estimates = []
    for _ in range(10):
        request, _ = understanding.request(understanding.head({":path": "/v1/chat/completions"}), BODY)
        estimates.append(request.prompt_tokens)
        core.driver.feed(RequestArrived(request))
        usage = Usage(prompt_tokens=request.prompt_bytes, completion_tokens=1)
        core.driver.feed(ResponseEnded(request_id=request.id, status=200, usage=usage))
    assert estimates[-1] > 3.0 * estimates[0]
