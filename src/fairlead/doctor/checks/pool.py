"""Checks of the pool: endpoints that answer, their models, roles and TLS, and what the configuration itself notes."""

import asyncio

from fairlead.config.building import named_policy, schedulers
from fairlead.config.builtins import SPLITTING
from fairlead.config.checks import roles_by_model, stages, unsplit
from fairlead.config.registry import Registry
from fairlead.config.schema import Config
from fairlead.core.endpoint import ADAPTERS_LABEL, MODEL_LABEL, ROLE_LABEL, ROLES, STAGES, Endpoint
from fairlead.core.errors import ConfigError
from fairlead.core.models import Catalogue
from fairlead.doctor.http import Unreached, connects, speaks_http2, speaks_tls
from fairlead.doctor.run import Finding, Kind, Severity, check
from fairlead.doctor.site import Site, tried
from fairlead.gateway.ports import dialled
from fairlead.gateway.tls import ServerTls
from fairlead.pool.models_file import check_models, rules_of

_FAILING = "docs/runbook.md#fairleaderrorshigh"
_UNREADABLE = "docs/runbook.md#load-is-uneven"
_POLICIES = "docs/policies.md"


UNREACHABLE = Kind(
    "endpoints.unreachable", Severity.CRITICAL, "nothing answers at the address of an endpoint",
    "correct address and port under endpoints:, or start the model server; behind a firewall, open the port", _FAILING,
)  # fmt: skip
NAMELESS = Kind(
    "endpoints.no-address", Severity.CRITICAL, "the name of an endpoint has no address",
    "correct the host name under endpoints:, or the name service of this machine", _FAILING,
)  # fmt: skip
FILE = Kind(
    "endpoints.file", Severity.ERROR, "an entry of the endpoints file cannot be used",
    "correct it: a running scheduler ignores the entry, or keeps its present endpoints",
    "docs/configuration.md#endpoints",
)  # fmt: skip
SPEAKS_TLS = Kind(
    "endpoints.tls", Severity.CRITICAL, "an endpoint speaks TLS, and gateways send it plain HTTP",
    "serve plain HTTP within the cluster, or list the port that does under endpoints:",
    _FAILING,
)  # fmt: skip
STRANGER = Kind(
    "endpoints.no-model-server", Severity.CRITICAL, "something other than a model server answers at the address",
    "correct the port under endpoints: it may be the port of metrics, of KV events or of another service", _FAILING,
)  # fmt: skip
SICK = Kind(
    "endpoints.sick", Severity.CRITICAL, "a model server reports that it is unhealthy",
    "read its log and restart it; requests to it fail", _FAILING,
)  # fmt: skip
LOCKED = Kind(
    "endpoints.locked", Severity.CRITICAL, "a model server requires another key than the gateway sends, or any at all",
    "write the key into a file and name it in gateway.upstreamTokenFile", "docs/gateway.md#keys-and-tokens",
)  # fmt: skip


async def _locked(site: Site, endpoint: Endpoint) -> bool:
    """Whether a model server refuses what the gateway sends in place of clients' keys: its own token, or none."""
    asks = [each for each in (site.config.gateway.keys, site.config.gateway.jwt) if each is not None]
    token = site.config.gateway.upstream_token_file
    if not (asks or token) or any(each.forward for each in asks):
        return False
    listed = await tried(site.ask(endpoint, "/v1/models"))
    return not isinstance(listed, Unreached) and listed.status in (401, 403)


async def _endpoints_of(site: Site, endpoint: Endpoint) -> list[Finding]:
    try:
        health = await site.ask(endpoint, "/health")
    except Unreached as error:
        kind = {"tls": SPEAKS_TLS, "not-http": STRANGER}.get(error.trouble, UNREACHABLE)
        return [kind.at(endpoint.id, f"{endpoint.address}: {error}")]
    if health.status >= 500:
        return [SICK.at(endpoint.id, f"GET http://{endpoint.address}/health: {health.status}")]
    if await _locked(site, endpoint):
        return [LOCKED.at(endpoint.id, f"GET http://{endpoint.address}/v1/models is refused")]
    if await site.served(endpoint) or site.engine(endpoint).startswith("triton"):
        return []
    # Not every engine lists its models; a server with neither a list nor load gauges is not a model server.
    reading = await site.reading(endpoint)
    if health.status == 200 and reading is not None and not reading.empty:
        return []
    return [STRANGER.at(endpoint.id, f"http://{endpoint.address} has no list of models at /v1/models")]


@check("endpoints", "a healthy model server answers at every endpoint", budget=60.0)
async def endpoints(site: Site) -> list[Finding]:
    nameless = [NAMELESS.at(name, reason) for name, reason in site.nameless.items()]
    unusable = [FILE.at("", problem) for problem in site.file_problems]
    return nameless + unusable + await site.each(lambda endpoint: _endpoints_of(site, endpoint))


LABEL = Kind(
    "models.label", Severity.CRITICAL, "an endpoint does not serve the model that its label names",
    f"correct the label {MODEL_LABEL}, or start the engine with that --served-model-name", _FAILING,
)  # fmt: skip
MIXED = Kind(
    "models.mixed", Severity.CRITICAL, "endpoints without a label serve different models, and no lists are read",
    f"label each with {MODEL_LABEL}: its model, or set metrics.modelsInterval above 0: requests reach servers that do "
    "not know the model",
    _FAILING,
)  # fmt: skip
SEVERAL = Kind(
    "models.several", Severity.NOTE, "endpoints without a label serve different models",
    f"nothing, if you meant it: each request goes where /v1/models lists its model; with a label {MODEL_LABEL} the "
    "scheduler knows it from the start", "docs/models.md",
)  # fmt: skip
CONTEXTS = Kind(
    "models.contexts", Severity.WARNING, "endpoints serve the same model with different context lengths",
    "start all with the same --max-model-len: a request that is too long for some goes to the others only",
    "docs/models.md",
)  # fmt: skip
UNSERVED = Kind(
    "models.unserved", Severity.CRITICAL, "a name that clients may use leads to a model that no endpoint serves",
    "correct the target under models: or in the file of models.file, or start a server for it", "docs/models.md",
)  # fmt: skip
UNLISTED = Kind(
    "models.unlisted", Severity.WARNING, "a name leads to a model that no server lists, and some servers list nothing",
    f"correct the target, or label the endpoint that has it {MODEL_LABEL}: its name",
    "docs/models.md#which-name-counts",
)  # fmt: skip


UNDEFINED = Kind(
    "models.undefined", Severity.NOTE, "requests for models that a server lists get 404: only defined names pass",
    "define the names too, or set models.unmatched: pass; nothing, if clients should not use them",
    "docs/models.md#undefined-names",
)  # fmt: skip


UNKNOWN_NAMES = Kind(
    "models.without-scheduler", Severity.WARNING, "while no scheduler answers, requests for a defined name get 404: "
    "servers do not know it", "start all servers with the name too (vLLM: --served-model-name base name), or decide: "
    "gateway.failOpen: false answers 503, true confirms", "docs/models.md#without-the-scheduler",
)  # fmt: skip


UNKNOWN_ADAPTERS = Kind(
    "models.unknown-adapters", Severity.WARNING, "the scheduler does not know some adapters of a server",
    f"label its endpoint {ADAPTERS_LABEL}: name,name, or set metrics.modelsInterval above 0. A metrics page shows an "
    "adapter only while requests use it; until then all its requests go where it was seen "
    "first", "docs/models.md#adapters",
)  # fmt: skip
UNLABELLED = Kind(
    "models.unlabelled-adapters", Severity.NOTE, "a server lists adapters that no label names",
    f"nothing: the scheduler reads /v1/models; with a label {ADAPTERS_LABEL}: name,name it knows them from the "
    "start", "docs/models.md#adapters",
)  # fmt: skip


UNLOADED = Kind(
    "models.unloaded-adapters", Severity.WARNING, "a label names adapters that the server's list does not have",
    f"load them, or correct the label {ADAPTERS_LABEL}; nothing, if the server loads them when they are asked for",
    "docs/models.md#adapters",
)  # fmt: skip


async def _adapters(site: Site) -> list[Finding]:
    known = {row.id: row.adapters for row in await site.rows()}
    reads = bool(site.config.metrics.models_interval)

    async def differing(endpoint: Endpoint) -> list[Finding]:
        served = await site.served(endpoint)
        labelled = endpoint.promised
        unloaded = sorted(labelled - served.keys())[:5] if served else []
        findings = [UNLOADED.at(endpoint.id, f"/v1/models does not list {', '.join(unloaded)}")] if unloaded else []
        names = {name for name, adapter in served.items() if adapter} - labelled
        if names:
            kind = UNLABELLED if reads and names <= set(known.get(endpoint.id, names)) else UNKNOWN_ADAPTERS
            findings.append(kind.at(endpoint.id, f"/v1/models lists {', '.join(sorted(names)[:5])}"))
        return findings

    return await site.each(differing)


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
    # An engine may have several names; one name that all have is enough for a pool of one model.
    if len(by_name) < 2 or everywhere == len(known):
        return []
    kind = SEVERAL if site.config.metrics.models_interval else MIXED
    return [kind.at(ids[0], f"{name} at {', '.join(ids[:3])}") for name, ids in by_name.items()]


async def _contexts(site: Site) -> list[Finding]:
    lengths: dict[str, dict[int, str]] = {}
    for endpoint in site.endpoints:
        for model, tokens in (await site.contexts(endpoint)).items():
            lengths.setdefault(model, {}).setdefault(tokens, endpoint.id)
    alike: dict[tuple[tuple[int, str], ...], list[str]] = {}
    for model, ids in lengths.items():
        alike.setdefault(tuple(sorted(ids.items())), []).append(model)
    return [
        CONTEXTS.at(
            ids[0][1], f"{', '.join(models[:3])}: max_model_len is {', '.join(str(tokens) for tokens, _ in ids)}"
        )
        for ids, models in alike.items()
        if len(ids) > 1
    ]


async def _unserved(site: Site, catalogue: Catalogue) -> list[Finding]:
    known, listless = set[str](), list[str]()
    for endpoint in site.endpoints:
        listed, labelled = await site.served(endpoint), endpoint.labelled_models
        known |= listed.keys() | labelled
        if not listed and MODEL_LABEL not in endpoint.labels:
            listless.append(endpoint.id)
    if not known:
        return []  # a server without a list may serve anything
    kind, perhaps = (UNLISTED, f"; no list: {', '.join(listless[:3])}") if listless else (UNSERVED, "")
    return [kind.at(name, f"{name} leads to {target}{perhaps}") for name, target in catalogue.unserved(known)]


async def _undefined(site: Site, catalogue: Catalogue) -> list[Finding]:
    async def hidden(endpoint: Endpoint) -> list[Finding]:
        served = await site.served(endpoint)
        base = [name for name, adapter in served.items() if not adapter]
        names = sorted(catalogue.undefined(base, served.keys() - base))
        return [UNDEFINED.at(endpoint.id, f"/v1/models lists {', '.join(names[:5])}")] if names else []

    return await site.each(hidden)


async def _without_scheduler(site: Site, catalogue: Catalogue) -> list[Finding]:
    gateway = site.config.gateway
    if gateway.mode != "embedded" or "fail_open" in gateway.model_fields_set:
        return []
    served = {endpoint.id: await site.served(endpoint) for endpoint in site.endpoints}
    findings = []
    for name in (model.name for model in catalogue.offered({})):
        strangers = [endpoint for endpoint, known in served.items() if known and name not in known]
        if strangers:
            findings.append(UNKNOWN_NAMES.at(name, f"/v1/models does not list {name} at {', '.join(strangers[:3])}"))
    return findings


@check("models", "endpoints serve the models that labels and definitions say", needs=("endpoints",))
async def models(site: Site) -> list[Finding]:
    labels = await site.each(lambda endpoint: _label(site, endpoint))
    defined, _ = check_models(site.config.models)  # `fairlead validate` reports the problems
    catalogue = Catalogue(defined, rules_of(site.config.models))
    names = [*await _unserved(site, catalogue), *await _undefined(site, catalogue)]
    names += await _without_scheduler(site, catalogue)
    return [*labels, *await _mixed(site), *await _contexts(site), *names, *await _adapters(site)]


NOTED = Kind(
    "configuration.noted", Severity.NOTE, "a setting has no effect, or probably an unintended one",
    "read the notes of `fairlead validate FILE`; change what they name, or leave it if you meant it",
    "docs/configuration.md",
)  # fmt: skip


@check("configuration", "every setting of the configuration has an effect")
async def configuration(site: Site) -> list[Finding]:
    return [NOTED.at(note.path, str(note)) for note in site.config.notes]


NO_ENDPOINT = Kind(
    "roles.nobody", Severity.CRITICAL, "no endpoint has the role for a stage that every request needs",
    f"label endpoints with {ROLE_LABEL}, or remove the label where they do everything", _POLICIES,
)  # fmt: skip
UNKNOWN = Kind(
    "roles.unknown", Severity.ERROR, "an endpoint has an unknown role, and gets no requests",
    f"correct the label {ROLE_LABEL}: one of {', '.join(sorted(ROLES))}", _POLICIES,
)  # fmt: skip
NO_PREFILL = Kind(
    "roles.no-prefill", Severity.ERROR, "the policy splits prefill and decode, but no endpoint only prefills",
    f"label the endpoints that compute prompts with {ROLE_LABEL}: prefill, or use another policy", _POLICIES,
)  # fmt: skip
IDLE = Kind(
    "roles.idle", Severity.WARNING, "no stage of the policy uses the role of an endpoint",
    f"use the policy {SPLITTING} if it prefills, or remove the label: the endpoint gets no requests", _POLICIES,
)  # fmt: skip


def _used(config: Config) -> set[str]:
    """The roles that a policy may choose. A scheduler in another process may choose any endpoint that prefills."""
    canary = config.canary.policy
    policies = [config.policy, *([named_policy(canary, Registry())] if canary else [])]
    pairs = any(policy.may_split for policy in policies) or schedulers(config)
    used = set(STAGES["prefill"]) if pairs else set()
    return used.union(*(STAGES[stage] for policy in policies for stage in stages(policy) or STAGES))


@check("roles", "every stage of the policy has an endpoint", needs=("endpoints",))
async def roles(site: Site) -> list[Finding]:
    roles = {endpoint.id: endpoint.role for endpoint in site.endpoints}
    findings = [UNKNOWN.at(name, f"{ROLE_LABEL}: {role}") for name, role in roles.items() if role and role not in ROLES]
    needed = stages(site.config.policy)
    splits = site.config.policy.splits
    by_model = roles_by_model(await site.each(lambda endpoint: _model_and_role(site, endpoint)))
    for model, own in by_model.items():
        listed = ", ".join(sorted(role or "none" for role in own))
        evidence = f"roles {f'for {model}' if len(by_model) > 1 else 'there are'}: {listed}"
        findings += [NO_ENDPOINT.at(stage, evidence) for stage in needed if not own & STAGES[stage]]
        if splits and unsplit(own, by_model):
            findings.append(NO_PREFILL.at("", evidence))
    used = _used(site.config)
    idle = [name for name, role in roles.items() if role in ROLES - used]
    return findings + [IDLE.at(name, f"{ROLE_LABEL}: {roles[name]}") for name in idle]


async def _model_and_role(site: Site, endpoint: Endpoint) -> list[tuple[str, str]]:
    """The endpoint's model and role. The server is asked only without a label: it takes seconds if it hangs."""
    model = endpoint.labels.get(MODEL_LABEL) or await site.model(endpoint)
    return [(model, endpoint.role)]


EXT_PROC = Kind(
    "tls.ext-proc", Severity.CRITICAL, "the running scheduler's extProc port does not use TLS as configured",
    "restart the scheduler and set the gateway to the same, or it cannot reach the scheduler",
)  # fmt: skip
FILES = Kind(
    "tls.files", Severity.CRITICAL, "the certificate of a port cannot be used",
    "certDir must hold tls.crt and tls.key, a matching pair in PEM without a password",
)  # fmt: skip
EXPIRY = Kind(
    "tls.expiry", Severity.ERROR, "the certificate of a port has expired, or soon will",
    "renew it, and put it into certDir: it is read again within seconds",
)  # fmt: skip
PLAIN_URL = Kind(
    "tls.http-to-https", Severity.ERROR, "a metrics URL says http, but the server speaks TLS",
    "write https:// in metricsUrl, or set metrics.scheme: https for all; set metrics.tls.caFile if the certificate is "
    "not a public one", _UNREADABLE,
)  # fmt: skip
SECURE_URL = Kind(
    "tls.https-to-http", Severity.ERROR, "a metrics URL says https, but the server speaks plain HTTP",
    "write http:// in metricsUrl, leave metrics.scheme out, or serve the page with TLS", _UNREADABLE,
)  # fmt: skip
UNTRUSTED = Kind(
    "tls.untrusted", Severity.ERROR, "the certificate of a metrics page is not accepted",
    "set metrics.tls.caFile to the authority that signed it; renew it if it expired; use a host name that it contains",
    _UNREADABLE,
)  # fmt: skip


async def _metrics(site: Site, endpoint: Endpoint) -> list[Finding]:
    url = endpoint.scrape_url
    try:
        await site.page(endpoint)
    except Unreached as error:
        if error.trouble == "untrusted":
            return [UNTRUSTED.at(endpoint.id, f"{url}: {error}")]
        if url.startswith("https:"):
            if error.trouble == "refused":
                return []
            if not await site.is_tls(url):  # a plain HTTP server may also wait silently for the rest of a "request"
                return [SECURE_URL.at(endpoint.id, f"{url}: {error}; no TLS handshake succeeds there")]
            return [UNTRUSTED.at(endpoint.id, f"{url}: {error}")] if error.trouble == "tls" else []
        if error.trouble == "not-http" and not site.own_page(endpoint) and await site.is_tls(url):
            return [PLAIN_URL.at(endpoint.id, f"{url}: a TLS handshake succeeds there")]
    return []


async def _certificates(config: Config) -> list[Finding]:
    findings = []
    for name, settings in (("extProc", config.ext_proc.tls), ("admin", config.admin.tls)):
        if settings is not None:
            try:
                certificate = await asyncio.to_thread(ServerTls.from_directory, settings.cert_dir)
            except ConfigError as error:
                findings.append(FILES.at(name, str(error)))
            else:
                findings += [EXPIRY.at(name, expiry)] if (expiry := certificate.expiry()) else []
    return findings


async def _ext_proc(site: Site) -> list[Finding]:
    settings = site.config.ext_proc
    if not site.has("admin") or not settings.port:
        return []
    host = dialled(settings.host)
    if await connects(host, settings.port):
        return []  # the check `scheduler` reports that
    if settings.tls is None and await speaks_http2(host, settings.port):
        return []
    speaks = await speaks_tls(host, settings.port)
    if speaks == (settings.tls is not None):
        return []
    said = "TLS" if settings.tls is not None else "plaintext"
    return [
        EXT_PROC.at(
            "extProc", f"port {settings.port}: configured is {said}, it speaks {'TLS' if speaks else 'plaintext'}"
        )
    ]


@check("tls", "both ends of each connection agree on TLS")
async def tls(site: Site) -> list[Finding]:
    own = await _certificates(site.config)
    both = [] if any(finding.code == FILES.code for finding in own) else await _ext_proc(site)
    return [*await site.each(lambda endpoint: _metrics(site, endpoint)), *own, *both]
