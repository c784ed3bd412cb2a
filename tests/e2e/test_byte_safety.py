"""Every response byte through every supported pair of modes, against the real Envoy.

`FAIRLEAD_SOAK_STREAMS` sets the streams per pair, `FAIRLEAD_SOAK_PAIRS` (a comma list of parts of names) the pairs.
"""

import asyncio
import os
from collections.abc import Callable

import pytest
from gw_modes import PAIRS, Pair, bootstrap
from gw_processes import Envoy, Serve, Upstream, free_ports, sees_the_scheduler
from gw_traffic import Tally, exchanges, run

STREAMS = int(os.environ.get("FAIRLEAD_SOAK_STREAMS", "500"))
WANTED = [part for part in os.environ.get("FAIRLEAD_SOAK_PAIRS", "").split(",") if part]
CHOSEN = [pair for pair in PAIRS if not WANTED or any(part == pair.name for part in WANTED)]

#: Pairs of the embedded gateway that `fairlead serve` runs itself.
EMBEDDED = {"whole/first-chunk": "streamed", "whole/none": "none"}


@pytest.mark.parametrize("pair", CHOSEN, ids=lambda pair: pair.name)
async def test_every_byte_arrives_and_no_lease_stays(
    pair: Pair,
    upstream: Upstream,
    serve: Callable[..., Serve],
    envoy: Callable[..., Envoy],
    tallies: list[Tally],
) -> None:
    config = {"endpoints": upstream.addresses, "policy": "least-requests", "seed": 1}
    if pair.name in EMBEDDED:
        scheduler = serve({**config, "gateway": {"responseMode": EMBEDDED[pair.name]}})
        port, admin = scheduler.port, scheduler.gateway
    else:
        scheduler = serve({**config, "gateway": "none"})
        (port,) = free_ports(1)
        admin = envoy(bootstrap(pair, port, scheduler.ext_proc, upstream.addresses)).admin
    await sees_the_scheduler(admin)
    tally = Tally(pair.name)
    tallies.append(tally)
    await run(tally, port, exchanges(seed=STREAMS, count=STREAMS))
    assert tally.differences[:5] == []
    assert await scheduler.settled() == {}
    decided = await scheduler.decisions()
    if pair.request == "BUFFERED_PARTIAL":  # truncated bodies are waved through, and counted when the log tells of them
        assert 0 < decided < STREAMS
        async with asyncio.timeout(20):
            while decided + await scheduler.metric("fairlead_fallback_requests_total") < STREAMS:
                await asyncio.sleep(0.05)
    else:
        assert decided == STREAMS, "everything was scheduled"
    assert decided + await scheduler.metric("fairlead_fallback_requests_total") == STREAMS
