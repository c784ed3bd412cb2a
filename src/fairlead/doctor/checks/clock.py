"""`clock`: whether model servers and the scheduler have our time, as far as the `Date` of their answers tells."""

from fairlead.doctor.finding import Finding, Kind, Severity
from fairlead.doctor.http import Answer, Unreached
from fairlead.doctor.run import Check
from fairlead.doctor.site import Site
from fairlead.model.endpoint import Endpoint

#: Seconds beyond what the exchange and whole seconds explain.
TOLERANCE = 2.0

SKEW = Kind(
    "clock.skew", Severity.WARNING, "the clock of a machine differs from ours",
    "let both machines follow a time server (chrony, systemd-timesyncd): certificates and tokens expire early or late,"
    " logs and journals cannot be compared, ages of KV events are wrong", "docs/doctor.md",
)  # fmt: skip


def _judge(where: str, answer: Answer) -> list[Finding]:
    skew = answer.skew()
    if abs(skew) <= TOLERANCE:
        return []
    way = "ahead of" if skew > 0 else "behind"
    return [SKEW.at(where, f"it is at least {abs(skew):.0f} s {way} us")]


async def _endpoint(site: Site, endpoint: Endpoint) -> list[Finding]:
    try:
        return _judge(endpoint.id, await site.ask(endpoint, "/health"))
    except Unreached:
        return []


async def _run(site: Site) -> list[Finding]:
    found = await site.each(lambda endpoint: _endpoint(site, endpoint))
    if site.has("admin"):
        try:
            found += _judge("scheduler", await site.admin("/healthz"))
        except Unreached:
            return found
    return found


CHECK = Check(name="clock", about="all machines have the same time", kinds=(SKEW,), run=_run)
