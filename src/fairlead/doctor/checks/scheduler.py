"""`scheduler`: what the running scheduler says of itself."""

from fairlead.doctor.finding import Finding, Kind, Severity
from fairlead.doctor.http import Unreached
from fairlead.doctor.run import Check
from fairlead.doctor.site import Site

_DOCS = "docs/runbook.md"

NOT_READY = Kind(
    "scheduler.not-ready", Severity.CRITICAL, "the scheduler is not ready",
    "the reasons say what it waits for", "docs/troubleshooting.md#requests-fail",
)  # fmt: skip
OTHER_POOL = Kind(
    "scheduler.other-endpoints", Severity.ERROR, "the scheduler runs with other endpoints than the configuration lists",
    "it could not take the file over: see its log; or it was started with another file", _DOCS,
)  # fmt: skip
PLUGINS = Kind(
    "scheduler.plugin-errors", Severity.ERROR, "a plugin fails and is left out of decisions",
    "see the scheduler's log for the reason; correct the plugin or take it out", "docs/runbook.md#fairleadpluginfails",
)  # fmt: skip
FALLBACKS = Kind(
    "scheduler.bypassed", Severity.WARNING, "the gateway has served requests without asking the scheduler",
    "it was away or slow then: see the times in its log and in `fairlead_loop_lag_seconds`",
    "docs/runbook.md#fairleadbypassed",
)  # fmt: skip
NO_METRICS = Kind(
    "scheduler.no-metrics", Severity.ERROR, "the scheduler's own metrics page fails",
    "see its log for the reason; dashboards and alerts are blind, and so are the checks hits and scheduling", _DOCS,
)  # fmt: skip
#: Share of requests that went past the scheduler from which on it is told.
_MANY = 0.01


async def _ready(site: Site) -> list[Finding]:
    try:
        answer = await site.admin("/readyz")
    except Unreached as error:
        return [NOT_READY.at("", str(error))]
    if answer.status == 200:
        return []
    return [NOT_READY.at("", " ".join(answer.body.decode("utf-8", "replace").split())[:300])]


async def _pool(site: Site) -> list[Finding]:
    source = site.config.endpoints
    if not (source.static or source.file) or not site.config.admin.debug:
        return []
    runs = {row.id: row.address for row in await site.rows()}
    listed = {endpoint.id: endpoint.address for endpoint in site.endpoints}
    names = sorted(
        name for name in {*runs, *listed} if runs.get(name) != listed.get(name) and name not in site.nameless
    )
    if not names:
        return []
    first = names[0]
    evidence = f"{first}: {runs.get(first, 'unknown')} in the scheduler, {listed.get(first, 'none')} in the file"
    return [OTHER_POOL.at(name, evidence) for name in names]


async def _metrics(site: Site) -> list[Finding]:
    try:
        answer = await site.admin("/metrics")
    except Unreached as error:
        return [NO_METRICS.at("", str(error))]
    return [] if answer.status == 200 else [NO_METRICS.at("", f"GET /metrics: {answer.status}")]


async def _run(site: Site) -> list[Finding]:
    found = [*await _ready(site), *await _metrics(site), *await _pool(site)]
    for labels, count in await site.metric("fairlead_plugin_errors_total"):
        if count:
            found.append(PLUGINS.at(labels.get("plugin_name", ""), f"{count:g} times since the start"))
    past = sum(count for _, count in await site.metric("fairlead_fallback_requests_total"))
    asked = sum(count for _, count in await site.metric("llm_d_epp_request_total"))
    if past > _MANY * (past + asked):
        found.append(FALLBACKS.at("gateway", f"{past:g} of {past + asked:g} requests since the start"))
    return found


CHECK = Check(
    name="scheduler",
    about="the running scheduler is ready and has the configured endpoints",
    kinds=(NOT_READY, NO_METRICS, OTHER_POOL, PLUGINS, FALLBACKS),
    run=_run,
    needs=("admin",),
)
