"""`roles`: whether there is an endpoint for every stage that the policy wants."""

from collections.abc import Iterator

from fairlead.config.load import SPLITTING
from fairlead.doctor.finding import Finding, Kind, Severity
from fairlead.doctor.run import Check
from fairlead.doctor.site import Site
from fairlead.model.endpoint import ROLE_LABEL
from fairlead.plugins.filters.role import STAGES, RoleParams

_DOCS = "docs/policies.md"

UNKNOWN = Kind(
    "roles.unknown", Severity.ERROR, "the role of an endpoint is none that is known; it gets no request",
    f"correct the label {ROLE_LABEL}: one of {', '.join(sorted(set().union(*STAGES.values()) - {''}))}", _DOCS,
)  # fmt: skip
NOBODY = Kind(
    "roles.nobody", Severity.CRITICAL, "no endpoint has a role for a stage that every request needs",
    f"label endpoints with {ROLE_LABEL}, or leave the label out where they do everything", _DOCS,
)  # fmt: skip
NO_PREFILL = Kind(
    "roles.no-prefill", Severity.ERROR, "the policy splits prefill and decode, and no endpoint prefills only",
    f"label the endpoints that compute prompts with {ROLE_LABEL}: prefill, or take another policy", _DOCS,
)  # fmt: skip
IDLE = Kind(
    "roles.idle", Severity.WARNING, "an endpoint prefills only, and the policy never splits a request",
    f"take the policy {SPLITTING}, or the label off: it gets no request", _DOCS,
)  # fmt: skip

_PREFILL_ONLY = STAGES["prefill"] - STAGES["decode"]


def _stages(site: Site) -> Iterator[str]:
    for plugin in site.config.policy.filters:
        if isinstance(plugin.parameters, RoleParams):
            yield plugin.parameters.stage


async def _run(site: Site) -> list[Finding]:
    roles = {endpoint.id: endpoint.labels.get(ROLE_LABEL, "") for endpoint in site.endpoints}
    known = set().union(*STAGES.values())
    found = [UNKNOWN.at(name, f"{ROLE_LABEL}: {role}") for name, role in roles.items() if role not in known]
    told = ", ".join(sorted({role or "none" for role in roles.values()}))
    stages = dict.fromkeys(_stages(site))
    missing = [stage for stage in stages if not any(role in STAGES[stage] for role in roles.values())]
    found += [NOBODY.at(stage, f"roles there are: {told}") for stage in missing]
    prefill_only = [name for name, role in roles.items() if role in _PREFILL_ONLY]
    plugin = site.config.policy.plugin
    splits = plugin is not None and plugin.type == SPLITTING
    if splits and not prefill_only:
        found.append(NO_PREFILL.at("", f"roles there are: {told}"))
    if not splits and "prefill" not in stages:
        found += [IDLE.at(name, f"{ROLE_LABEL}: {roles[name]}") for name in prefill_only]
    return found


CHECK = Check(
    name="roles",
    about="there is an endpoint for every stage that the policy wants",
    kinds=(NOBODY, UNKNOWN, NO_PREFILL, IDLE),
    run=_run,
    needs=("endpoints",),
)
