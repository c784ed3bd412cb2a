"""Which endpoints' lists of models are awaited."""

from contextlib import AsyncExitStack

import pytest

from fairlead.compat.load import load
from fairlead.core.endpoint import Endpoint
from fairlead.core.events import EndpointUp
from fairlead.server.live.pool_scheduler import PoolScheduler


@pytest.mark.parametrize("interval", [0, 30])
async def test_the_list_of_a_new_endpoint_is_awaited_if_lists_are_read(interval: int) -> None:
    pool = PoolScheduler(load(f"policy: default\nmetrics: {{modelsInterval: {interval}}}", need_endpoints=False), None)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(pool.core.served.close)
        pool.endpoint(EndpointUp(Endpoint("a", "127.0.0.1:1")))
        assert pool.fleet.table.based[0].unread == (interval > 0)
