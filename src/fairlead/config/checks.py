"""Checks that involve several fields of a configuration, and values that are derived from other values."""

import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import IPv6Address, ip_address
from operator import itemgetter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from msgspec.structs import replace

from fairlead.apis.engine_metrics import (
    ENGINES,
    TRTLLM_PATH,
    EngineMetrics,
    engine_of,
    parse_spec,
    unknown_engine,
)
from fairlead.config.endpoint_list import HOST_LABEL, NO_HOST, PORT_LABEL, Listed, is_host, port_number
from fairlead.config.problems import Place, Report, shorten
from fairlead.config.schema import (
    CHECKED_ELSEWHERE,
    LONGEST_QUESTION,
    RELATIVE,
    EngineNames,
    Gateway,
    Kubernetes,
    KvCurve,
    KvEvents,
    Metrics,
    Models,
    PolicySpec,
    Section,
    Settings,
    Tokens,
)
from fairlead.core.endpoint import (
    MAX_PORTS,
    MODEL_LABEL,
    PREFILL_ONLY,
    ROLE_LABEL,
    ROLES,
    STAGES,
    Endpoint,
    host_port,
)
from fairlead.core.errors import ConfigError
from fairlead.plugins.params import camel

#: The scraper reports an idle endpoint's unchanged sample again after this interval, in seconds.
REPEAT = 1.0
#: `retryPeriod` times this factor must be shorter than `renewDeadline`, to leave time for jitter.
_JITTER = 1.2
_NO_TOKENS = "name a modelPath or a tokenizerFile, or set render: engine"
#: Fields of `EngineNames` that are not metrics.
_LABELS = ("rank_label", "block_size_label", "num_blocks_label")


def resolve(settings: Settings, base: Path | None, report: Report) -> Settings:
    """Fill in values that depend on other sections and on the file's directory, and report contradictions."""
    ext_proc, als = settings.ext_proc, settings.als
    if not ext_proc.host:
        host = "127.0.0.1" if settings.gateway.mode == "embedded" else "::"
        ext_proc = ext_proc.model_copy(update={"host": host})
    if not als.port:
        als = als.model_copy(update={"port": ext_proc.port})
    settings = settings.model_copy(update={"ext_proc": ext_proc, "als": als})
    _check_hosts(settings, report)
    _check_ports(settings, report)
    if settings.gateway.mode == "none" and settings.gateway.asks:
        hint = "let your gateway know its clients and set x-llm-d-inference-fairness-id"
        report.add(("gateway",), "only the embedded gateway asks for keys and tokens", hint)
    if settings.gateway.mode == "embedded" and ext_proc.max_endpoints > 1:
        hint = "leave it out: answers name a fallback endpoint for it in any case"
        report.add(("extProc", "maxEndpoints"), "the embedded gateway takes one endpoint", hint)
    if settings.gateway.mode == "embedded":
        _check_listener(settings.gateway, report)
        _check_budgets(settings, report)
    _check_metrics(settings.metrics, report)
    _check_tokens(settings.tokens, report)
    _check_kv_events(settings.kv_events, report)
    _check_kubernetes(settings.kubernetes, report)
    if settings.kubernetes.namespaces:
        _check_several(settings, report)
    return settings if base is None else located(settings, base)


def _check_budgets(settings: Settings, report: Report) -> None:
    canary = settings.canary.scheduler
    budgets = {("scheduler",): settings.scheduler.budget, ("canary", "scheduler"): canary.budget if canary else 0.0}
    for place, budget in budgets.items():
        if budget > LONGEST_QUESTION:
            problem = f"is above {LONGEST_QUESTION:g}s: the embedded gateway gives up requests after a second"
            report.add((*place, "budget"), problem)


def located(section: Section, base: Path) -> Any:
    """The section with its relative paths resolved against the directory `base`."""
    changes: dict[str, Any] = {}
    for name, value in section:
        if isinstance(value, Section):
            changes[name] = located(value, base)
        elif isinstance(value, dict):
            changes[name] = {
                key: located(item, base) if isinstance(item, Section) else item for key, item in value.items()
            }
        elif isinstance(value, tuple):
            changes[name] = tuple(located(item, base) if isinstance(item, Section) else item for item in value)
        elif value and RELATIVE in type(section).model_fields[name].metadata:
            changes[name] = str(base / os.path.expanduser(value))
    return section.model_copy(update=changes)


def sections(section: Section, place: Place = ()) -> Iterator[tuple[Place, Section]]:
    """The section and all sections in it, each with its place."""
    yield place, section
    for name, value in section:
        here = (*place, type(section).model_fields[name].alias or name)
        nested = value if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, tuple) else {}
        for key, item in [(here, value), *(((*here, key), item) for key, item in nested.items())]:
            if isinstance(item, Section):
                yield from sections(item, key)


def check_files(settings: Settings, report: Report) -> None:
    """Check the files and directories that the settings name, without opening them. Add a note for each that this
    machine does not have, or that this user cannot read or write: Fairlead may run elsewhere, or as another user."""
    for place, section in sections(settings):
        for name, value in section:
            field = type(section).model_fields[name]
            if not value or RELATIVE not in field.metadata:
                continue
            here = (*place, field.alias or name)
            pair = [os.path.join(value, file) for file in ("tls.crt", "tls.key")] if name == "cert_dir" else []
            for file in (value, *pair):
                if is_special(file):
                    report.add(here, f"{file} is {SPECIAL}")
                elif not os.access(file, os.R_OK) and CHECKED_ELSEWHERE not in field.metadata:
                    why = f"this user cannot read {file}" if os.path.exists(file) else f"there is no {file}"
                    report.note(here, f"{why} on this machine")
                    break
    journal, state, snapshot = settings.journal.path, settings.state.file, settings.kv_events.snapshot
    _check_directory(journal, ("journal", "path"), report)
    _check_directory(os.path.dirname(state), ("state", "file"), report)
    _check_directory(os.path.dirname(snapshot), ("kvEvents", "snapshot"), report)


#: What is wrong with a path for which `is_special` is true.
SPECIAL = "neither a file nor a directory"


def is_special(path: str) -> bool:
    """Whether this is a pipe, whose reader would wait for a writer, a device, which may have no end, or no path."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    except ValueError:  # it has a NUL
        return True
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _check_directory(path: str, place: Place, report: Report) -> None:
    """Check that a directory can be written to, or made. Empty = there is none."""
    if not path:
        return
    while not os.path.exists(path):
        path = os.path.dirname(path) or os.curdir
    if not os.path.isdir(path):
        report.add(place, f"{path} is not a directory")
    elif not os.access(path, os.W_OK | os.X_OK):
        report.note(place, f"this user cannot write to {path} on this machine")


def _check_listener(gateway: Gateway, report: Report) -> None:
    """Check what `gateway.envoy.options` would refuse at a start. Envoy resolves no names of listeners."""
    host, hint = ("gateway", "host"), "e.g. 127.0.0.1, or '::' for all addresses"
    try:
        address = ip_address(gateway.host)
    except ValueError:
        report.add(host, f"expected an IP address, got {shorten(gateway.host)!r}", hint)
    else:
        if isinstance(address, IPv6Address) and (address.scope_id or address.is_link_local):
            report.add(host, "the gateway cannot listen on a link-local address or in an IPv6 zone", hint)
    if gateway.envoys > 1 and not gateway.port:
        report.add(("gateway", "port"), "several Envoys need a port that they share, so it cannot be 0")
    if gateway.admin_port and gateway.admin_port + gateway.envoys > 65536:
        report.add(("gateway", "adminPort"), f"{gateway.envoys} Envoys have no {gateway.envoys} ports from there on")


def _check_hosts(settings: Settings, report: Report) -> None:
    """Check addresses at which a start would fail."""
    ext_proc, admin = settings.ext_proc.host, settings.admin
    hosts = {("extProc", "host"): ext_proc, ("admin", "host"): admin.host, ("admin", "metricsHost"): admin.metrics_host}
    for place, host in hosts.items():
        if host and not is_host(host):
            report.add(place, f"{shorten(host)!r} {NO_HOST}", "no port, scheme, brackets or IPv6 zone")
    via = settings.replicas.via
    urls = {("tracing", "endpoint"): settings.tracing.endpoint, ("replicas", "via"): "" if "+sentinel:" in via else via}
    for place, url in urls.items():
        try:
            _ = urlsplit(url).port
        except ValueError as error:
            report.add(place, f"no URL: {error}")


def _check_ports(settings: Settings, report: Report) -> None:
    """Check that no two listeners have the same port."""
    gateway, ext_proc, als = settings.gateway, settings.ext_proc, settings.als
    wanted: list[tuple[Place, int]] = []
    if gateway.mode == "embedded":
        if not ext_proc.port:
            report.add(("extProc", "port"), "the embedded gateway has to know the port, so it cannot be 0")
        wanted.append((("gateway", "port"), gateway.port))
        admin_ports = range(gateway.admin_port, gateway.admin_port + gateway.envoys) if gateway.admin_port else ()
        wanted += [(("gateway", "adminPort"), port) for port in admin_ports]
    wanted += [(("extProc", "port"), ext_proc.port), (("extProc", "healthPort"), ext_proc.health_port)]
    admin = settings.admin
    hosts = {_address(admin.host), _address(admin.metrics_host or admin.host)}
    apart = len(hosts) == 2 and "" not in hosts  # both can have one port
    wanted.append((("admin", "port"), admin.port))
    if not (apart and admin.metrics_port == admin.port):
        wanted.append((("admin", "metricsPort"), admin.metrics_port))
    wanted.append((("autoscaling", "port"), settings.autoscaling.port))
    if als.enabled and als.port != ext_proc.port:
        wanted.append((("als", "port"), als.port))
    taken: dict[int, str] = {}
    for place, port in wanted:
        if port and port in taken:
            report.add(place, f"port {port} is taken by {taken[port]} already")
        taken.setdefault(port, ".".join(map(str, place)))


# ---- metrics ----


def engine_table(metrics: Metrics) -> dict[str, EngineMetrics]:
    """Metric names per engine. A built-in engine keeps the names that the configuration does not mention."""
    table = dict(ENGINES)
    for name, names in metrics.engines.items():
        table[name] = replace(table.get(name, EngineMetrics()), **_given(names))
    return table


def with_page(endpoint: Endpoint, metrics: Metrics) -> Endpoint:
    """The endpoint with the URL of its metrics page by `metrics` and its labels, unless it has a `metrics_url`."""
    labels = endpoint.labels
    engine = engine_of(labels, {*ENGINES, *metrics.engines}, metrics.default_engine)
    path = metrics.path or (TRTLLM_PATH if engine == "trtllm-serve" else "/metrics")
    host, _, port = endpoint.address.rpartition(":")
    own = port_number(labels.get(PORT_LABEL, "")) or metrics.port or int(port)
    where = host_port(labels.get(HOST_LABEL) or host.strip("[]"), own)
    url = f"{metrics.scheme}://{where}{path}"
    return endpoint if endpoint.metrics_url or url == endpoint.scrape_url else replace(endpoint, metrics_url=url)


def _given(names: EngineNames) -> dict[str, Any]:
    """The configured metric names of an engine. A single name and a list of names both become a tuple."""
    said: dict[str, Any] = {}
    for field, value in names:
        if field in (*_LABELS, "extra"):
            said |= {field: value} if value else {}
        elif value is not None:
            said[field] = (value,) if isinstance(value, str) else tuple(value)
    return said


def outlasting(metrics: Metrics, report: Report) -> Metrics:
    """The section with a staleness, unless it is given, that outlasts the intervals. A longer one is noted."""
    name, interval = _longest_interval(metrics)
    longest = interval + REPEAT
    if "staleness" in metrics.model_fields_set or metrics.staleness >= longest:
        return metrics
    why = f"metrics.staleness is {longest:g}s here, so that it outlasts the interval between two scrapes"
    report.note(("metrics", name), why)
    return metrics.model_copy(update={"staleness": longest})


def _longest_interval(metrics: Metrics) -> tuple[str, float]:
    """The longer of the two intervals between scrapes, in seconds, with the name of its field."""
    return max(("idleInterval", metrics.idle_interval), ("interval", metrics.interval), key=itemgetter(1))


def _check_metrics(metrics: Metrics, report: Report) -> None:
    name, longest = _longest_interval(metrics)
    if metrics.staleness < longest + REPEAT:
        field = "staleness" if "staleness" in metrics.model_fields_set else name
        hint = f"staleness at least {longest + REPEAT:g}s with {name} {longest:g}s; numbers without a unit are seconds"
        report.add(("metrics", field), "endpoints would look stale between two reports", hint)
    for name, names in metrics.engines.items():
        for field, value in names:
            if field not in _LABELS and value is not None:
                _check_specs(value, ("metrics", "engines", name, camel(field)), report)
    known = engine_table(metrics)
    if metrics.default_engine not in known:
        report.unknown(("metrics", "defaultEngine"), "engine", metrics.default_engine, known)


def _check_specs(value: str | list[str] | Mapping[str, str], place: Place, report: Report) -> None:
    specs: list[tuple[Place, str]]
    if isinstance(value, str):
        specs = [(place, value)]
    elif isinstance(value, Mapping):
        specs = [((*place, key), spec) for key, spec in value.items()]
    else:
        specs = [((*place, i), spec) for i, spec in enumerate(value)]
    for where, spec in specs:
        try:
            parse_spec(spec, "")
        except ConfigError as error:
            report.add(where, str(error).removeprefix(": "))


def note_unknown_engines(
    entries: Sequence[Listed], metrics: Metrics, place: Place, report: Report, file: str = ""
) -> None:
    """Add a note for labels that name an unknown engine. The pages of such endpoints are read with the metric names of
    the default engine.

    `entries` are at `place`, or in `file`, which `place` refers to. One note covers all endpoints of one engine.
    """
    known = engine_table(metrics)
    strange: dict[str, list[int]] = {}
    for i, entry in enumerate(entries):
        engine = unknown_engine(entry.endpoint.labels, known)
        if engine:
            strange.setdefault(engine, []).append(i)
    for engine, (first, *more) in strange.items():
        who = f"endpoint {entries[first].endpoint.id}" + (f" and {len(more)} more" if more else "")
        report.note(
            place if file else (*place, first),
            f"{file + ': ' if file else ''}{who}: the label names the engine '{shorten(engine)}', which is not known; "
            f"metrics are read as those of {metrics.default_engine} "
            f"(known: {', '.join(sorted(known))}; describe others under metrics.engines)",
        )


def note_unranked(models: Models, report: Report) -> None:
    """Add a note if criticalities have no effect because there is no flow control."""
    ranked = [entry for entry in models.list if entry.criticality != "Standard"]
    if ranked:
        said = f"{shorten(ranked[0].name)} is {ranked[0].criticality}"
        report.note(("models",), f"{said}, but without flow control nothing waits or is shed: set flowControl: {{}}")


def note_pool(
    entries: Sequence[Listed], policy: PolicySpec, settings: Settings, place: Place, report: Report, file: str = ""
) -> None:
    """Add notes for what is allowed but probably not intended: roles that no endpoint has, a `topK` as large as the
    pool, a gateway that only this machine reaches. `entries` are at `place`, or in `file`, which `place` refers to."""

    def note(message: str, entry: Place = place) -> None:
        report.note(place if file else entry, f"{file + ': ' if file else ''}{message}")

    for i, entry in enumerate(entries):
        role, name = entry.endpoint.role, entry.endpoint.id
        if role and role not in ROLES:
            words = f"endpoint {name}: no request goes to the role '{shorten(role)}'; known: {', '.join(sorted(ROLES))}"
            note(words, (*place, i))
        elif not role and entry.endpoint.labels.get("role", "") in ROLES:
            note(f"endpoint {name}: the label 'role' has no effect; its name is {ROLE_LABEL}", (*place, i))
    if not entries:
        return
    labels = [entry.endpoint.labels for entry in entries]
    by_model = roles_by_model([(own.get(MODEL_LABEL, ""), own.get(ROLE_LABEL, "")) for own in labels])
    for model, roles in by_model.items():
        of = f" for {shorten(model)}" if len(by_model) > 1 else ""
        missing = [stage for stage in stages(policy) if not roles & STAGES[stage]]
        for stage in missing:
            note(f"every request{of} is refused: no endpoint {stage}s ({ROLE_LABEL}: {stage})")
        if policy.splits and not missing and unsplit(roles, by_model):
            note(f"no request{of} is split: no endpoint has the label {ROLE_LABEL}: prefill")
    k = policy.picker.parameters.k if policy.picker is not None and policy.picker.type == "top-k" else 0
    if 1 < len(entries) <= k:
        note(
            f"selection.topK is {k}, and there are {len(entries)} endpoints: one of all of them is picked at random, "
            "whatever their scores"
        )
    _note_several_models(
        len({entry.endpoint.labels.get(MODEL_LABEL, "") for entry in entries} - {""}), settings, report
    )
    gateway, remote = settings.gateway, [entry.host for entry in entries if not is_loopback(entry.host)]
    if gateway.mode == "embedded" and is_loopback(gateway.host) and remote:
        report.note(
            ("gateway",),
            f"the gateway listens on {gateway.host}, where only this machine reaches it; gateway.host: '::' opens "
            "it to the network",
        )


def _note_several_models(models: int, settings: Settings, report: Report) -> None:
    if models < 2:
        return
    gateway = settings.gateway
    if gateway.mode == "embedded" and "fail_open" not in gateway.model_fields_set:
        report.note(
            ("gateway",),
            f"without the scheduler, requests go to any endpoint, and endpoints serve {models} models: some get 404. "
            "gateway.failOpen: false answers 503; true confirms",
        )
    if settings.autoscaling.port:
        report.note(
            ("autoscaling", "port"),
            f"the desired number is of all endpoints, which serve {models} models: give each a scheduler of its own",
        )


def stages(policy: PolicySpec) -> list[str]:
    """The stages that an endpoint must be able to do to get a request from the policy."""
    given = (spec.given for spec in policy.filters if spec.type == "role")
    return list(dict.fromkeys(params.stage if params else "decode" for params in given))  # importing no plugin


def roles_by_model(endpoints: Sequence[tuple[str, str]]) -> dict[str, set[str]]:
    """The roles of each model's endpoints. `endpoints`: (model, role) of each; one without a model counts for every
    model."""
    anywhere = {role for model, role in endpoints if not model}
    models = sorted({model for model, _ in endpoints if model}) or [""]
    return {name: anywhere | {role for model, role in endpoints if model == name} for name in models}


def unsplit(roles: set[str], by_model: Mapping[str, set[str]]) -> bool:
    """Whether to report that no request for a model can be split into prefill and decode. `roles`: of its endpoints.

    If another model has prefill endpoints and this one has no roles at all, it is meant to be served whole.
    """
    return not roles & PREFILL_ONLY and (roles != {""} or not any(own & PREFILL_ONLY for own in by_model.values()))


def _address(host: str) -> str:
    """An address in one form; empty = all addresses."""
    try:
        address = ip_address("127.0.0.1" if host == "localhost" else host.strip("[]"))
    except ValueError:
        return host
    return "" if address.is_unspecified else str(address)


def is_loopback(host: str) -> bool:
    """Whether a host can only be reached from this machine."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


# ---- tokens ----


def _check_tokens(section: Tokens, report: Report) -> None:
    for name, model in section.models.items():
        place = ("tokens", "models", name)
        if model.render == "local" and not model.model_path and not model.tokenizer_file:
            report.add(place, "there is nothing to make tokens with", _NO_TOKENS)
        if model.render == "engine":
            given = model.model_path, model.tokenizer_file, model.chat_template, model.template_kwargs
            for field, value in zip(
                ("modelPath", "tokenizerFile", "chatTemplate", "templateKwargs"), given, strict=True
            ):
                if value:
                    hint = "leave it out, or take render: local"
                    report.add((*place, field), "the engine renders with its own", hint)


# ---- KV events ----


def _check_kv_events(section: KvEvents, report: Report) -> None:
    if section.replay_port and not section.port:
        hint = "set port: too, or leave replayPort out"
        report.add(("kvEvents", "replayPort"), "without port:, engines report their replay ports themselves", hint)
    if section.bind and section.port:
        report.add(("kvEvents", "bind"), "either publishers connect to bind:, or Fairlead to port:", "leave out one")
    if section.bind and not re.fullmatch(r"tcp://.+:([0-9]+|\*)|ipc://.+", section.bind):
        report.add(
            ("kvEvents", "bind"), f"expected tcp://HOST:PORT, got {shorten(section.bind)!r}", "e.g. tcp://*:5555"
        )
    if section.keys == "engine" and section.hash_seed is None and section.hash_algorithm.startswith("xxhash"):
        hint = "set PYTHONHASHSEED on the servers and hashSeed here"
        report.add(("kvEvents", "hashAlgorithm"), "without a seed these hashes are random", hint)
    _check_indexer(section, report)
    if section.curve is not None:
        _check_curve(section.curve, bool(section.bind), report)


def _check_curve(curve: KvCurve, bound: bool, report: Report) -> None:
    """`bound`: publishers connect to Fairlead, so it must know their keys."""
    place, unused = ("kvEvents", "curve"), "serverKey" if bound else "clientsFile"
    if bound and not curve.clients_file:
        hint = "set clientsFile: one public key per line"
        report.add(place, "without the publishers' public keys, anyone may connect to bind:", hint)
    if not bound and not curve.server_key:
        report.add(place, "to connect, the publishers' public key is needed", "set serverKey")
    if curve.server_key and curve.clients_file:
        report.note((*place, unused), f"has no effect {'with' if bound else 'without'} bind:")


def _check_indexer(section: KvEvents, report: Report) -> None:
    indexer = section.indexer
    for field, url in (("url", indexer.url), ("warmFrom", indexer.warm_from)):
        if url and not is_url(url):
            place: Place = ("kvEvents", "indexer", field)
            report.add(place, "expected http://host:port", "e.g. http://kv-cache-indexer:9090")
    if not indexer.url:
        return
    if not section.enabled:
        report.add(("kvEvents", "indexer", "url"), "no indexer is asked while KV events are off", "set enabled: true")
    here = {"port": section.port, "bind": section.bind, "snapshot": section.snapshot, "curve": section.curve}
    for field, value in (here | {"warmFrom": indexer.warm_from}).items():
        if value:
            place = ("kvEvents", "indexer", field) if field == "warmFrom" else ("kvEvents", field)
            report.add(place, "with indexer.url, no events are received here", "leave out this or indexer.url")


def asked_elsewhere(section: KvEvents, urls: Sequence[str], report: Report) -> KvEvents:
    """The section with `indexer.url` from `urls`, the `cacheIndexerURL`s of plugins. It stays unchanged if this process
    listens to KV events."""
    urls = [url for url in urls if url]
    if not urls:
        return section
    if section.enabled:
        text = "cacheIndexerURL is not asked: kvEvents says where prefix knowledge comes from"
        if urls[0] != section.indexer.url:
            report.note(("kvEvents",), text)
        return section
    if len(set(urls)) > 1 or not is_url(urls[0]):
        report.add(("kvEvents", "indexer", "url"), f"cacheIndexerURL: expected one http://host:port, got {urls[0]!r}")
        return section
    return section.model_copy(update={"enabled": True, "indexer": section.indexer.model_copy(update={"url": urls[0]})})


def is_url(text: str) -> bool:
    """Whether a text is an HTTP URL with a host, to which a page's path can be appended."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not parts.query
    except ValueError:
        return False


# ---- Kubernetes ----


def _check_kubernetes(section: Kubernetes, report: Report) -> None:
    key = "kubernetes"
    if section.pool and section.selector:
        report.add((key, "selector"), "give 'pool' or 'selector', not both")
    if section.namespaces and (section.pool or section.selector):
        single = "pool" if section.pool else "selector"
        report.add((key, "namespaces"), f"give '{single}' or 'namespaces', not both", "namespaces: serves every pool")
    if not all(section.namespaces):
        report.add((key, "namespaces"), "a namespace has no name", "name it, or '*' for all")
    for field, labels in (("poolSelector", section.pool_selector), ("podSelector", section.pod_selector)):
        if labels and not section.namespaces:
            report.add((key, field), "it is for several pools", "set namespaces:, or leave it out")
    if bool(section.selector) != bool(section.target_ports):
        has, lacks = ("selector", "targetPorts") if section.selector else ("targetPorts", "selector")
        report.add((key, has), f"field '{lacks}' is missing", "pods without an InferencePool need both")
    if len({*section.target_ports}) < len(section.target_ports):
        report.add((key, "targetPorts"), "port numbers must be unique")
    if len(section.target_ports) > MAX_PORTS:
        report.add((key, "targetPorts"), f"at most {MAX_PORTS} ports, got {len(section.target_ports)}")
    election = section.leader_election
    if election.enabled and not section.on:
        report.add((key, "leaderElection"), "there is no pool to lead", "name it: pool:")
    if election.renew_deadline >= election.lease_duration:
        report.add((key, "leaderElection", "renewDeadline"), "must be shorter than leaseDuration")
    if election.retry_period * _JITTER >= election.renew_deadline:
        report.add((key, "leaderElection", "retryPeriod"), f"{_JITTER} times this must be shorter than renewDeadline")
    if election.service and section.namespaces:
        hint = "leave it out: the service that each pool names is kept"
        report.add((key, "leaderElection", "service"), "several pools have a service each", hint)
    if election.service and not election.enabled:
        report.add((key, "leaderElection", "service"), "there is no leader to lead to", "enabled: true")
    if election.lease_duration < 1:
        report.add((key, "leaderElection", "leaseDuration"), "must be at least 1s, as leases count whole seconds")


#: The advice for settings that one process with several pools cannot have.
_ONE_POOL_EACH = "leave it out, or run a scheduler for each pool (kubernetes.pool)"


def _check_several(settings: Settings, report: Report) -> None:
    """Report settings that belong to one pool but exist once per process."""
    refused: list[tuple[Place, bool, str]] = [
        (("gateway", "mode"), settings.gateway.mode == "embedded", "the embedded gateway has one pool"),
        (
            ("extProc", "transport"),
            settings.ext_proc.transport != "http2",
            "it cannot tell which pool a stream is for",
        ),
        (("replicas", "via"), bool(settings.replicas.via), "schedulers of several pools do not share what they know"),
        (("autoscaling", "port"), bool(settings.autoscaling.port), "KEDA asks for one pool; the metrics have each"),
        (("kvEvents", "bind"), bool(settings.kv_events.bind), "engines that connect do not name their pool"),
        (("als", "port"), settings.als.port != settings.ext_proc.port, "an access log does not name its pool"),
    ]
    for place, wrong, why in refused:
        if wrong:
            hint = "gateway: none" if place[0] == "gateway" else _ONE_POOL_EACH
            report.add(place, f"not with several pools: {why}", hint)
