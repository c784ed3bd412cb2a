"""`models`: whether endpoints serve the models that their labels, and the names that are defined, say."""

from fairlead.doctor.finding import Finding, Kind, Severity
from fairlead.doctor.run import Check
from fairlead.doctor.site import Site
from fairlead.io.models_file import check_models
from fairlead.model.endpoint import MODEL_LABEL, Endpoint

_DOCS = "docs/troubleshooting.md#requests-fail"

LABEL = Kind(
    "models.label", Severity.CRITICAL, "an endpoint does not serve the model that its label names",
    f"correct the label {MODEL_LABEL}, or start the engine with that --served-model-name", _DOCS,
)  # fmt: skip
MIXED = Kind(
    "models.mixed", Severity.CRITICAL, "endpoints without a label serve different models",
    f"label each with {MODEL_LABEL}: its model, or split the pool: requests reach servers that do not know the model",
    _DOCS,
)  # fmt: skip
UNSERVED = Kind(
    "models.unserved", Severity.CRITICAL, "a name that clients may use leads to a model that nobody serves",
    "correct the target in the file of models.file, or start a server for it", "docs/models.md",
)  # fmt: skip


async def _label(site: Site, endpoint: Endpoint) -> list[Finding]:
    label = endpoint.labels.get(MODEL_LABEL, "")
    served = await site.served(endpoint)
    if not label or not served or label in served:
        return []
    return [LABEL.at(endpoint.id, f"{MODEL_LABEL}: {label}; /v1/models lists {', '.join(list(served)[:5])}")]


async def _mixed(site: Site) -> list[Finding]:
    unlabelled = [endpoint for endpoint in site.endpoints if not endpoint.labels.get(MODEL_LABEL)]
    by_name: dict[str, list[str]] = {}
    for endpoint in unlabelled:
        served = await site.served(endpoint)
        for name, adapter in served.items():
            if not adapter:
                by_name.setdefault(name, []).append(endpoint.id)
    everywhere = max(map(len, by_name.values()), default=0)
    known = {name for ids in by_name.values() for name in ids}
    # An engine may have several names; one that all have is enough for a pool of one model.
    if len(by_name) < 2 or everywhere == len(known):
        return []
    return [MIXED.at(ids[0], f"{name} at {', '.join(ids[:3])}") for name, ids in by_name.items()]


async def _unserved(site: Site) -> list[Finding]:
    settings = site.config.models
    if not settings.file:
        return []
    defined, problems = check_models(settings.file)
    if problems:
        return []  # `fairlead validate` tells them
    served: set[str] = set()
    for endpoint in site.endpoints:
        names = await site.served(endpoint)
        if not names:
            return []  # who does not tell may serve anything
        served |= names.keys()
    targets: dict[str, str] = {}
    for model in defined.models:
        targets |= {target.name: model.model for target in model.targets}
        targets |= {} if model.targets else {model.model: model.model}
    for rule in (rule for rewrite in defined.rewrites for rule in rewrite.rules):
        targets |= {target.name: ", ".join(rule.models) or "every name" for target in rule.targets}
    missing = sorted(name for name in targets if name not in served)
    return [UNSERVED.at(targets[name], f"{targets[name]} leads to {name}") for name in missing]


async def _run(site: Site) -> list[Finding]:
    labels = await site.each(lambda endpoint: _label(site, endpoint))
    return [*labels, *await _mixed(site), *await _unserved(site)]


CHECK = Check(
    name="models",
    about="endpoints serve the models that labels and definitions say",
    kinds=(LABEL, MIXED, UNSERVED),
    run=_run,
    needs=("endpoints",),
)
