"""`asking`: whether a request through the gateway is answered, and the gateway asked the scheduler about it."""

import asyncio

from fairlead.doctor.finding import Finding, Kind, Severity
from fairlead.doctor.http import Unreached
from fairlead.doctor.requests import gateway_request, marks, shown
from fairlead.doctor.run import Check
from fairlead.doctor.site import Site

_DOCS = "docs/troubleshooting.md#requests-fail"

UNANSWERED = Kind(
    "asking.no-answer", Severity.CRITICAL, "the gateway does not answer",
    "is it running, and is the URL that of --gateway? `fairlead serve` says at its start where clients connect", _DOCS,
)  # fmt: skip
FAILED = Kind(
    "asking.failed", Severity.CRITICAL, "a request through the gateway fails",
    "see the other findings; 503 with 'no healthy upstream' is a destination that the gateway cannot use, 404 a model"
    " that nobody defined", _DOCS,
)  # fmt: skip
NOT_ALLOWED = Kind(
    "asking.not-allowed", Severity.NOTE, "the gateway takes requests only with credentials",
    "nothing need be done; whether it asks the scheduler could not be tried", _DOCS,
)  # fmt: skip
BYPASSED = Kind(
    "asking.bypassed", Severity.ERROR, "the gateway serves requests without asking the scheduler",
    "set the ext_proc filter's address to this scheduler's extProc port; see the log of the gateway for why its health"
    " check fails", "docs/runbook.md#fairleadbypassed",
)  # fmt: skip
_SETTLED = 0.5


async def _run(site: Site) -> list[Finding]:
    path, body = await gateway_request(site)
    headers = marks()
    try:
        answer = await site.client.post(site.gateway + path, body, headers, seconds=10.0)
    except Unreached as error:
        return [UNANSWERED.at("gateway", f"{site.gateway}: {error}")]
    if answer.status in (401, 403):
        return [NOT_ALLOWED.at("gateway", shown(answer))]
    if answer.status != 200:
        return [FAILED.at("gateway", shown(answer))]
    if not site.has("admin") or not site.config.admin.debug:
        return []
    await asyncio.sleep(_SETTLED)
    found = await site.told(f"/debug/decisions/{headers['x-request-id']}")
    if found is None:
        evidence = f"the scheduler has no decision for the request {headers['x-request-id']}, which was answered"
        return [BYPASSED.at("gateway", evidence)]
    return []


CHECK = Check(
    name="asking",
    about="a request through the gateway is answered, and decided by the scheduler",
    kinds=(UNANSWERED, FAILED, BYPASSED, NOT_ALLOWED),
    run=_run,
    needs=("gateway",),
    budget=20.0,
)
