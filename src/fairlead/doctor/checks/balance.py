"""`balance`: whether one endpoint of a running pool carries far more than the others, and why."""

from statistics import median

from fairlead.doctor.finding import Finding, Kind, Severity
from fairlead.doctor.rows import Row
from fairlead.doctor.run import Check
from fairlead.doctor.site import Site
from fairlead.model.endpoint import MODEL_LABEL, ROLE_LABEL

_DOCS = "docs/troubleshooting.md#load-is-uneven"

SKEW = Kind(
    "balance.skew", Severity.WARNING, "one endpoint has a long queue while others have none",
    "with weights: lower those of prefix scorers against load; with the cost model it means that a prompt's cache is"
    " worth the wait: `fairlead explain` tells; else the server is slower than the others", _DOCS,
)  # fmt: skip
FOREIGN = Kind(
    "balance.foreign", Severity.WARNING, "an endpoint works for others than this scheduler",
    "let all clients go through the gateway: the scheduler cannot foresee what it does not send", _DOCS,
)  # fmt: skip

#: Waiting requests that are many, and how many times the median they are.
_MANY, _TIMES = 20.0, 4.0
_STRANGERS = 8.0


def _group(row: Row) -> tuple[str, str]:
    return row.labels.get(MODEL_LABEL, ""), row.labels.get(ROLE_LABEL, "")


async def _run(site: Site) -> list[Finding]:
    rows = [row for row in await site.rows() if row.fresh]
    found = []
    for row in rows:
        # Only endpoints that could have been taken instead say anything.
        others = [one.load for one in rows if one is not row and _group(one) == _group(row)]
        waiting, usual = row.waiting or 0.0, median(others) if others else 0.0
        if others and waiting > _MANY and row.load > _TIMES * max(usual, 1.0):
            found.append(SKEW.at(row.id, f"{waiting:g} wait there; the median of the others is {usual:g}"))
        if row.load - row.leases > max(_STRANGERS, row.leases):
            found.append(FOREIGN.at(row.id, f"it has {row.load:g} requests, {row.leases:g} of them from here"))
    return found


CHECK = Check(
    name="balance",
    about="load is spread over the endpoints",
    kinds=(SKEW, FOREIGN),
    run=_run,
    needs=("admin",),
)
