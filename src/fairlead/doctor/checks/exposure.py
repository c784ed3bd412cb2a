"""A check of settings and files that are exposed by mistake: to the network, or to other users of this machine."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from fairlead.config.checks import is_loopback
from fairlead.config.schema import Config, SchedulerSettings
from fairlead.core.errors import ConfigError
from fairlead.doctor.run import Finding, Kind, Severity, check
from fairlead.doctor.site import Site
from fairlead.gateway.envoy.routes import let_in
from fairlead.pool.kube.auth import find_access
from fairlead.server.replicas import split_via

_REACHABLE = "docs/security.md#what-is-reachable-from-where"

GATEWAY = Kind(
    "exposure.gateway", Severity.WARNING, "anyone who reaches the gateway can send requests in any tenant's name",
    "set gateway.keys or gateway.jwt, bind gateway.host to 127.0.0.1, or put a proxy in front that authenticates "
    "clients and sets their headers", _REACHABLE,
)  # fmt: skip
CLEAR = Kind(
    "exposure.clear-keys", Severity.WARNING, "clients' keys and tokens cross the network without TLS",
    "put a TLS proxy in front of the gateway, and allow only the proxy to reach its port", _REACHABLE,
)  # fmt: skip
AUDIENCE = Kind(
    "exposure.audience", Severity.WARNING, "a token that the issuer made for another service is accepted",
    "set gateway.jwt.audiences to the claim aud of tokens for this service", "docs/gateway.md#keys-and-tokens",
)  # fmt: skip
FORWARD = Kind(
    "exposure.forward", Severity.NOTE, "model servers get clients' keys or tokens",
    "leave gateway.keys.forward and gateway.jwt.forward at false, unless model servers check them too", _REACHABLE,
)  # fmt: skip
PATHS = Kind(
    "exposure.paths", Severity.WARNING, "clients on the network reach administrative paths of the model servers",
    "list in gateway.paths only what clients need: other paths put servers to sleep or load adapters",
    "docs/gateway.md#what-is-let-in",
)  # fmt: skip
UPLOADS = Kind(
    "exposure.uploads", Severity.WARNING, "one client may fill the gateway's memory with unfinished uploads",
    "lower gateway.uploadShare, unless all clients come through one proxy that limits them",
    "docs/gateway.md#uploads",
)  # fmt: skip
HEADERS = Kind(
    "exposure.test-selection", Severity.ERROR, "clients on the network choose the endpoint of their requests",
    "remove test-selection from headers.trust: it is for tests", _REACHABLE,
)  # fmt: skip
TENANTS = Kind(
    "exposure.tenants", Severity.NOTE, "clients name their own tenant unless your gateway prevents it",
    "have the gateway set or remove the fairness header, or leave fairness out of headers.trust",
    "docs/security.md#tenants",
)  # fmt: skip
ENVOY = Kind(
    "exposure.envoy-admin", Severity.NOTE, "every user and web page on this machine can control Envoy",
    "set gateway.adminPort to 0 when you do not need the page: it has no password and can stop Envoy", _REACHABLE,
)  # fmt: skip
ADMIN = Kind(
    "exposure.admin", Severity.WARNING, "anyone who reaches the admin port can read endpoints, tenants, decisions and "
    "the journal",
    "bind admin.host to 127.0.0.1, set admin.tokenFile and admin.tls, or admin.debug: false", _REACHABLE,
)  # fmt: skip
HOSTS = Kind(
    "exposure.hosts", Severity.WARNING, "a web page in an operator's browser can read the admin port",
    "list whole names in admin.hosts, or a domain whose names are all yours; or set admin.tokenFile",
    "docs/operations.md#the-admin-port",
)  # fmt: skip
EXT_PROC = Kind(
    "exposure.ext-proc", Severity.WARNING, "requests reach extProc over the network without TLS",
    "set extProc.tls.certDir, or bind extProc.host to 127.0.0.1 if the gateway is on this machine", _REACHABLE,
)  # fmt: skip
KV_EVENTS = Kind(
    "exposure.kv-events", Severity.WARNING, "KV events are accepted over the network without authentication",
    "set kvEvents.curve, or isolate that network; false events cost cache hits until the self-check "
    "notices", _REACHABLE,
)  # fmt: skip
INDEXER = Kind(
    "exposure.indexer", Severity.WARNING, "an indexer on another machine is asked without TLS",
    "write https:// and put a TLS proxy in front of it, or isolate that network; false answers cost cache hits",
    _REACHABLE,
)  # fmt: skip
REPLICAS = Kind(
    "exposure.replicas", Severity.WARNING, "whoever is on the network can read or mislead the replicas",
    "write valkeys:// for TLS in replicas.via, and set replicas.passwordFile", "docs/security.md#other-replicas",
)  # fmt: skip
PASSWORD = Kind(
    "exposure.password", Severity.WARNING, "the configuration contains a password",
    "move it into a file and name that in replicas.passwordFile", "docs/replicas.md",
)  # fmt: skip
REMOTE = Kind(
    "exposure.scheduler", Severity.WARNING, "a scheduler on another machine is asked without TLS",
    "set scheduler.tls, or address it by 127.0.0.1 or a Unix socket", _REACHABLE,
)  # fmt: skip
TRACES = Kind(
    "exposure.traces", Severity.NOTE, "traces cross the network without TLS",
    "write https:// in tracing.endpoint; spans name models, tenants and endpoints", _REACHABLE,
)  # fmt: skip
CLUSTER = Kind(
    "exposure.api-server", Severity.WARNING, "the API server's certificate is not checked",
    "remove insecure-skip-tls-verify from the kubeconfig, and name the authority there: whoever answers in its place "
    "gets the token and chooses the endpoints", _REACHABLE,
)  # fmt: skip
UNVERIFIED = Kind(
    "exposure.unverified", Severity.WARNING, "any certificate is accepted",
    "set caFile to the authority, and leave verify at true", _REACHABLE,
)  # fmt: skip
TOKEN = Kind(
    "exposure.token", Severity.ERROR, "a bearer token is sent without TLS",
    "set admin.tls for admin.tokenFile; for metrics.tokenFile write https:// in metricsUrl or set metrics.scheme; or "
    "remove the token", _REACHABLE,
)  # fmt: skip
SECRETS = Kind(
    "exposure.secrets", Severity.WARNING, "every user of this machine can read a secret",
    "chmod o-rwx the file", _REACHABLE,
)  # fmt: skip
WRITABLE = Kind(
    "exposure.writable", Severity.ERROR, "every user of this machine can add a key that is accepted",
    "chmod o-w the file", _REACHABLE,
)  # fmt: skip
RECORDS = Kind(
    "exposure.records", Severity.WARNING, "every user of this machine can read who sent how much, and prompts' hashes",
    "chmod o-rwx the files; publish captures (`fairlead journal capture`), whose hashes are salted, never journals",
    "docs/security.md#what-it-does-not-protect",
)  # fmt: skip
#: vLLM's administrative paths, which clients should not reach.
_ADMINISTRATIVE = (
    *("/sleep", "/wake_up", "/pause", "/resume", "/shutdown_weight_transfer_engine", "/v1/load_lora_adapter"),
    *("/v1/unload_lora_adapter", "/update_weights", "/collective_rpc", "/scale_elastic_ep", "/reset_prefix_cache"),
    *("/abort_requests", "/inference/v1/abort_requests", "/start_profile", "/server_info", "/metrics"),
)


#: Matches a whole top-level domain, in which anyone can register a name, unless it is a private one.
_PUBLIC = re.compile(r"\.(?!(internal|intranet|lan|local|localhost|private|corp|home|test)$)[^.]+")


def _local_at(address: str) -> bool:
    """Whether `host:port` is on this machine, or the address is a Unix socket."""
    return address.startswith("unix:") or is_loopback(address.rpartition(":")[0])


def _clients(config: Config) -> Iterator[Finding]:
    """What is unsafe about the way clients connect."""
    gateway, trusted = config.gateway, config.headers.trust
    ours = gateway.mode == "embedded"
    host = gateway.host if ours else config.ext_proc.host
    if not is_loopback(host) and "test-selection" in trusted:
        yield HEADERS.at("headers.trust")
    if not ours:
        if not is_loopback(host) and "fairness" in trusted:
            yield TENANTS.at("headers.trust")
        return
    if not is_loopback(host):
        yield (CLEAR if gateway.asks else GATEWAY).at("gateway.host", host)
        for path in gateway.paths:
            known = re.compile(let_in((path,)))
            if open_ := [admin for admin in _ADMINISTRATIVE if known.fullmatch(admin)]:
                yield PATHS.at("gateway.paths", f"{path} lets in {', '.join(open_[:3])}" + " …" * (len(open_) > 3))
        if gateway.upload_share >= 1:
            yield UPLOADS.at("gateway.uploadShare", f"{gateway.upload_share:g}")
    if gateway.jwt and not gateway.jwt.audiences:
        yield AUDIENCE.at("gateway.jwt.audiences")
    for name, asked in (("keys", gateway.keys), ("jwt", gateway.jwt)):
        if asked and asked.forward:
            yield FORWARD.at(f"gateway.{name}.forward")
    if gateway.admin_port:
        yield ENVOY.at("gateway.adminPort", str(gateway.admin_port))


def _incoming(config: Config) -> Iterator[Finding]:
    yield from _clients(config)
    admin, ext_proc = config.admin, config.ext_proc
    pages = [("admin.host", admin.host)]
    if admin.metrics_port:
        pages.append(("admin.metricsHost", admin.metrics_host or admin.host))
    if admin.debug and not admin.token_file and not is_loopback(admin.host):
        yield ADMIN.at("admin.host", admin.host)
    if admin.debug and not admin.token_file:
        yield from (HOSTS.at("admin.hosts", host) for host in admin.hosts if _PUBLIC.fullmatch(host.lower()))
    if admin.token_file and admin.tls is None:
        yield from (TOKEN.at("admin.tokenFile", f"{name} {host}") for name, host in pages if not is_loopback(host))
    if ext_proc.tls is None and not is_loopback(ext_proc.host):
        yield EXT_PROC.at("extProc.host", ext_proc.host)


def _schedulers(config: Config) -> Iterator[tuple[str, SchedulerSettings]]:
    yield "scheduler", config.scheduler
    if config.canary.scheduler is not None:
        yield "canary.scheduler", config.canary.scheduler
    for shadow in config.shadows.policies:
        if shadow.scheduler is not None:
            yield f"shadow {shadow.name}", shadow.scheduler


def _clear(url: str) -> bool:
    """Whether the URL leads to another machine without TLS."""
    parts = urlsplit(url)
    return parts.scheme == "http" and not is_loopback(parts.hostname or "")


def _services(config: Config) -> Iterator[Finding]:
    """What is unsafe about connections other than those to model servers and schedulers."""
    indexer, replicas = config.kv_events.indexer, config.replicas
    for name, url in (("url", indexer.url), ("warmFrom", indexer.warm_from)):
        if _clear(url):
            yield INDEXER.at(f"kvEvents.indexer.{name}")
    via = split_via(replicas.via)
    hosts = [urlsplit(f"//{place}").hostname for place in via.places]
    away, password = any(host and not is_loopback(host) for host in hosts), ":" in via.user
    if away and via.scheme.partition("+")[0] in ("valkey", "redis"):
        yield REPLICAS.at("replicas.via", "no TLS")
    elif away and not (password or replicas.password_file):
        yield REPLICAS.at("replicas.via", "no password")
    if password:
        yield PASSWORD.at("replicas.via")
    if _clear(config.tracing.endpoint):
        yield TRACES.at("tracing.endpoint")
    if config.kubernetes.on:
        with contextlib.suppress(ConfigError):  # there is none, or it cannot be read: another check reports that
            where = find_access(config.kubernetes.kubeconfig, config.kubernetes.context).where
            if where.server.startswith("https:") and not where.verify:
                yield CLUSTER.at("kubernetes.kubeconfig", where.server)


def _outgoing(site: Site) -> Iterator[Finding]:
    config = site.config
    yield from _services(config)
    events = config.kv_events
    if events.enabled and events.curve is None and not events.indexer.url:
        if events.bind:
            if not _local_at(events.bind.partition("://")[2]):
                yield KV_EVENTS.at("kvEvents.bind", events.bind)
        else:
            far = [endpoint for endpoint in site.endpoints if not _local_at(endpoint.address)]
            yield from (KV_EVENTS.at(endpoint.id, endpoint.address) for endpoint in far)
    if not config.metrics.tls.verify:
        yield UNVERIFIED.at("metrics.tls.verify")
    for name, scheduler in _schedulers(config):
        if scheduler.tls is not None and not scheduler.tls.verify:
            yield UNVERIFIED.at(f"{name}.tls.verify")
        if scheduler.address and scheduler.tls is None and not _local_at(scheduler.address):
            yield REMOTE.at(name, scheduler.address)
    if config.metrics.token_file:
        for endpoint in site.endpoints:
            if _clear(endpoint.scrape_url):
                yield TOKEN.at(endpoint.id, endpoint.scrape_url)


def _files(config: Config) -> Iterator[tuple[Kind, int, str]]:
    """Yield (kind of finding, mode bits that are unsafe, file) for each configured file with secrets or records."""
    curve, gateway = config.kv_events.curve, config.gateway
    secrets = [
        config.metrics.token_file,
        config.admin.token_file,
        config.replicas.password_file,
        gateway.upstream_token_file,
    ]
    secrets += [curve.secret_key_file] if curve else []
    pairs = [
        config.ext_proc.tls,
        config.admin.tls,
        config.replicas,
        *(scheduler.tls for _, scheduler in _schedulers(config)),
    ]
    secrets += [str(Path(tls.cert_dir, "tls.key")) for tls in pairs if tls and tls.cert_dir]
    yield from ((SECRETS, 0o007, file) for file in secrets)
    accepted = [gateway.keys.file if gateway.keys else "", gateway.jwt.jwks_file if gateway.jwt else ""]
    accepted += [curve.clients_file] if curve else []
    yield from ((WRITABLE, 0o002, file) for file in accepted)
    journal = Path(config.journal.path).glob("*") if config.journal.path else ()
    records = {*map(str, journal), config.state.path(config.journal), config.kv_events.snapshot}
    yield from ((RECORDS, 0o004, file) for file in sorted(records))


def _modes(config: Config) -> Iterator[Finding]:
    for kind, unsafe, file in _files(config):
        try:
            mode = Path(file).stat().st_mode & 0o777 if file else 0
        except OSError:
            continue  # other checks report that
        if mode & unsafe:
            yield kind.at(file, f"mode {mode:o}")


@check("exposure", "nothing is open to the network by mistake")
async def exposure(site: Site) -> list[Finding]:
    return [*_incoming(site.config), *_outgoing(site), *_modes(site.config)]
