"""`freshness`: whether metrics pages tell the present.

A page that stands still looks like a calm server. So it is read twice, with an answered request of ours in between:
engines count requests to `/v1/models`, and their process uses CPU time. Where neither is on the page nothing is said.
"""

import asyncio

from fairlead.doctor.finding import Finding, Kind, Severity
from fairlead.doctor.http import Unreached
from fairlead.doctor.run import Check
from fairlead.doctor.site import Site
from fairlead.model.endpoint import Endpoint
from fairlead.wire.promfamily import find_family

_DOCS = "docs/troubleshooting.md#load-is-uneven"
_MOVING = (b"http_requests_total", b"process_cpu_seconds_total")
#: Seconds between the two pages: longer than servers keep a page for several readers.
_APART = 1.2

FROZEN = Kind(
    "freshness.frozen", Severity.ERROR, "the metrics page of an endpoint stands still",
    "something between answers from a cache, or the engine's metrics process hangs: read the page at the engine itself,"
    " and restart it if it does not move there either", _DOCS,
)  # fmt: skip
STALE = Kind(
    "freshness.stale", Severity.ERROR, "the running scheduler has no recent metrics of an endpoint",
    "see the findings of the checks endpoints, metrics and tls; if there are none, look at the scheduler's load", _DOCS,
)  # fmt: skip


async def _frozen(site: Site, endpoint: Endpoint) -> list[Finding]:
    try:
        first = await site.page(endpoint)
        if first.status != 200 or not any(find_family(first.body, name) for name in _MOVING):
            return []
        for path in ("/v1/models", "/v1/models"):
            if (await site.client.get(f"http://{endpoint.address}{path}")).status != 200:
                return []
        await asyncio.sleep(_APART)
        second = await site.client.scrape(endpoint.scrape_url)
    except Unreached:
        return []
    if second.status != 200 or first.body != second.body:
        return []
    return [FROZEN.at(endpoint.id, f"{endpoint.scrape_url}: not a byte differs after {_APART:g} s and two requests")]


async def _run(site: Site) -> list[Finding]:
    found = await site.each(lambda endpoint: _frozen(site, endpoint))
    for row in await site.rows():
        if not row.fresh:
            evidence = "it was never read" if row.age_s is None else f"the last one is {row.age_s:.1f} s old"
            found.append(STALE.at(row.id, evidence))
    return found


CHECK = Check(
    name="freshness",
    about="metrics pages tell the present",
    kinds=(FROZEN, STALE),
    run=_run,
    needs=("endpoints",),
    budget=60.0,
)
