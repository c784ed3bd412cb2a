"""Every known pitfall of Envoy's ext_proc protocol that concerns a scheduler, against the real Envoy 1.40.

| Pitfall | Test |
|---|---|
| a body answer before the headers answer; headers answered without a destination | every POST: `bodies` |
| `request_header_mode: SKIP`: the endpoint is chosen before anybody was asked | `routing`: chooses before it asks |
| no end of stream: the request hangs; a body not handed back is lost | `bodies`: uploads, trailers |
| a window of 64 KiB for what is handed back | `bodies`: uploads |
| a length that does not fit the body shifts the connection | `bodies`, `changed_bodies` |
| full duplex cannot fail open; failures are 500 | `scheduler`: 503 |
| a scheduler that dies in a full-duplex stream cuts it | `scheduler`: left streams live on |
| every stream ends with a reset; few streams per connection | `scheduler`: one connection |
| Envoy's timeouts: not in full duplex, and in other modes only when asked for more | `scheduler`: waits, more time |
| one literal address, IPv6 in brackets, no host name | `routing`: dials |
| HPACK: the first block uses the dynamic table | `bodies`: header blocks |
| without clear_route_cache the first route stays, also for the body answer | `routing` |
| late data after leaving eats the connection's window | `bodies`: large responses |
| failing open hides a dead scheduler | `scheduler`: it is counted |
| repeated headers are overwritten, clients' control headers stay | `bodies`: headers; `routing`: steering |
| the subset hint | `routing` |
| a response without a request, or before its end | `local_replies` |

Not here, because they do not concern us:
* Answers above 64 KiB: Envoy 1.40 takes them. We cut all the same; `tests/unit/gateway/test_ext_proc.py`.
* Two ext_proc filters, observability mode, mode_override: no configuration of ours uses them.
* One HTTP/2 connection per Envoy worker and scheduler host: one process schedules.
* A second busy thread, uvloop, handlers of grpc.aio: matters of speed; `bench/transport.py` measures ours.
* BUFFERED holds a body while its request queues: memory of the gateway, bounded by `max_streams` and `body_limit`.
* Death under load: `tests/e2e/test_survival.py`. Bytes of thousands of streams: `tests/e2e/test_byte_safety.py`.
"""

import asyncio
import functools
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

sys.path.insert(0, str(Path(__file__).parents[2] / "e2e" / "support"))

from gw_processes import require_envoy
from gw_site import GATEWAYS, Site, site

#: Many a pitfall shows as a request that never ends.
PATIENCE_SECONDS = 60.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and isinstance(item, pytest.Function):
            item.add_marker(pytest.mark.envoy)
            item.obj = _bounded(item.obj)


def _bounded(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    @functools.wraps(test)
    async def bounded(**arguments: Any) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await test(**arguments)

    return bounded


@pytest.fixture(scope="session", autouse=True)
def envoy_binary() -> str:
    return require_envoy()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=GATEWAYS)
async def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    async with site(GATEWAYS[request.param], tmp_path_factory.mktemp("gateway")) as at:
        yield at


@pytest.fixture
def at(shared: Site) -> Site:
    """Each of the gateways; the tests of a file share it, and leave it as it was."""
    shared.forget()
    return shared
