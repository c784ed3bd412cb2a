"""Every response byte through every supported pair of modes, against the real Envoy.

`FAIRLEAD_SOAK_STREAMS` sets the streams per pair, `FAIRLEAD_SOAK_PAIRS` (a comma list of names) the pairs.
"""

import asyncio
import os
from collections.abc import Callable, Iterator

import pytest
from gw_modes import MORE_PAIRS, PAIRS, Pair, bootstrap
from gw_processes import Envoy, Serve, Upstream, sees_the_scheduler
from gw_traffic import Tally, exchanges, run
from ports import free_ports

FEW = 200
STREAMS = int(os.environ.get("FAIRLEAD_SOAK_STREAMS", FEW))
WANTED = [part for part in os.environ.get("FAIRLEAD_SOAK_PAIRS", "").split(",") if part]
KNOWN = (*PAIRS, *MORE_PAIRS)
CHOSEN = [pair for pair in KNOWN if pair.name in WANTED] if WANTED else KNOWN if STREAMS > FEW else PAIRS
assert len(CHOSEN) >= len(WANTED), f"FAIRLEAD_SOAK_PAIRS: choose among {', '.join(pair.name for pair in KNOWN)}"

#: Pairs of the embedded gateway that `fairlead serve` runs itself.
EMBEDDED = {"whole/first-chunk": "streamed", "whole/none": "none"}


@pytest.fixture(scope="module")
def scheduler(upstream: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """One for all gateways that it does not run itself."""
    child = Serve(tmp_path_factory.mktemp("scheduler"))
    try:
        yield child.start({**_config(upstream), "gateway": "none"})
    finally:
        child.end()


def _config(upstream: Upstream) -> dict[str, object]:
    return {"endpoints": upstream.addresses, "policy": "least-requests", "seed": 1}


@pytest.mark.parametrize("pair", CHOSEN, ids=lambda pair: pair.name)
async def test_every_byte_arrives_and_no_lease_stays(
    pair: Pair,
    upstream: Upstream,
    serve: Callable[..., Serve],
    envoy: Callable[..., Envoy],
    tallies: list[Tally],
    request: pytest.FixtureRequest,
) -> None:
    if pair.name in EMBEDDED:
        asked = serve({**_config(upstream), "gateway": {"responseMode": EMBEDDED[pair.name]}})
        port, admin = asked.port, asked.gateway
    else:
        asked = request.getfixturevalue("scheduler")
        (port,) = free_ports(1)
        admin = envoy(bootstrap(pair, port, asked.ext_proc, upstream.addresses)).admin
    await sees_the_scheduler(admin)
    decided_before, passed_before = await asked.decisions(), await _passed(asked)
    tally = Tally(pair.name)
    tallies.append(tally)
    await run(tally, port, exchanges(seed=STREAMS, count=STREAMS))
    assert tally.differences[:5] == []
    assert tally.streams == STREAMS
    assert await asked.settled() == {}
    decided = await asked.decisions() - decided_before
    if pair.request == "BUFFERED_PARTIAL":  # truncated bodies are waved through, and counted when the log tells of them
        assert 0 < decided < STREAMS
        async with asyncio.timeout(20):
            while pair.log and decided + await _passed(asked) - passed_before < STREAMS:
                await asyncio.sleep(0.05)
    else:
        assert decided == STREAMS, "everything was scheduled"
        assert await _passed(asked) == passed_before


async def _passed(scheduler: Serve) -> int:
    """Requests that the gateway served without a choice of the scheduler."""
    return int(await scheduler.metric("fairlead_fallback_requests_total"))
