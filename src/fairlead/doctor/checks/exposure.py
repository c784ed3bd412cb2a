"""A check of settings that are safe on one machine and are not on a network."""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from fairlead.config.checks import is_loopback
from fairlead.config.schema import Config, SchedulerSettings
from fairlead.doctor.run import Finding, Kind, Severity, check
from fairlead.doctor.site import Site

_REACHABLE = "docs/security.md#what-is-reachable-from-where"

GATEWAY = Kind(
    "exposure.gateway", Severity.WARNING, "anyone who reaches the gateway can send requests in any tenant's name",
    "set gateway.keys or gateway.jwt, bind gateway.host to 127.0.0.1, or put a proxy in front that "
"authenticates clients and sets their headers", _REACHABLE,
)  # fmt: skip
CLEAR = Kind(
    "exposure.clear-keys", Severity.WARNING, "clients' keys and tokens cross the network without TLS",
    "put a TLS proxy in front of the gateway, and allow only the proxy to reach its port", _REACHABLE,
)  # fmt: skip
PATHS = Kind(
    "exposure.paths", Severity.WARNING, "clients on the network reach every path of the model servers",
    "list in gateway.paths only what clients need: other paths put servers to sleep or load adapters",
    "docs/gateway.md#what-is-let-in",
)  # fmt: skip
HEADERS = Kind(
    "exposure.test-selection", Severity.ERROR, "clients on the network choose the endpoint of their requests",
    "remove test-selection from headers.trust: it is for tests", _REACHABLE,
)  # fmt: skip
ADMIN = Kind(
    "exposure.admin", Severity.WARNING, "anyone who reaches the admin port can read endpoints, tenants and decisions",
    "bind admin.host to 127.0.0.1, set admin.tokenFile and admin.tls, or admin.debug: false", _REACHABLE,
)  # fmt: skip
EXT_PROC = Kind(
    "exposure.ext-proc", Severity.WARNING, "requests reach extProc over the network without TLS",
    "set extProc.tls.certDir, or bind extProc.host to 127.0.0.1 if the gateway is on this machine", _REACHABLE,
)  # fmt: skip
KV_EVENTS = Kind(
    "exposure.kv-events", Severity.WARNING, "KV events are accepted over the network without authentication",
    "set kvEvents.curve, or isolate that network; false events cost cache hits until the self-check "
"notices",
    _REACHABLE,
)  # fmt: skip
REMOTE = Kind(
    "exposure.scheduler", Severity.WARNING, "a scheduler on another machine is asked without TLS",
    "set scheduler.tls, or address it by 127.0.0.1 or a Unix socket", _REACHABLE,
)  # fmt: skip
UNVERIFIED = Kind(
    "exposure.unverified", Severity.WARNING, "any certificate is accepted",
    "set caFile to the authority, and leave verify at true", _REACHABLE,
)  # fmt: skip
TOKEN = Kind(
    "exposure.token", Severity.ERROR, "a bearer token is sent without TLS",
    "set admin.tls for admin.tokenFile; for metrics.tokenFile write https:// in metricsUrl; or remove"
" the token",
    _REACHABLE,
)  # fmt: skip
SECRETS = Kind(
    "exposure.secrets", Severity.WARNING, "every user of this machine can read a secret",
    "chmod o-rwx the file", _REACHABLE,
)  # fmt: skip


def _local_at(address: str) -> bool:
    """Of `host:port`, or of a Unix socket."""
    return address.startswith("unix:") or is_loopback(address.rpartition(":")[0])


def _incoming(config: Config) -> Iterator[Finding]:
    gateway, admin, ext_proc = config.gateway, config.admin, config.ext_proc
    embedded = gateway.mode == "embedded"
    if embedded and not is_loopback(gateway.host):
        yield (CLEAR if gateway.asks else GATEWAY).at("gateway.host", gateway.host)
        if "test-selection" in config.headers.trust:
            yield HEADERS.at("headers.trust")
        yield from (PATHS.at("gateway.paths", path) for path in gateway.paths if path in ("*", "/*"))
    if admin.port and not is_loopback(admin.host):
        if admin.debug and not admin.token_file:
            yield ADMIN.at("admin.host", admin.host)
        if admin.token_file and admin.tls is None:
            yield TOKEN.at("admin.tokenFile", f"admin.host {admin.host}, no admin.tls")
    host = ext_proc.host or ("127.0.0.1" if embedded else "0.0.0.0")
    if ext_proc.tls is None and not is_loopback(host):
        yield EXT_PROC.at("extProc.host", host)


def _schedulers(config: Config) -> Iterator[tuple[str, SchedulerSettings]]:
    yield "scheduler", config.scheduler
    if config.canary.scheduler is not None:
        yield "canary.scheduler", config.canary.scheduler
    for shadow in config.shadows.policies:
        if shadow.scheduler is not None:
            yield f"shadow {shadow.name}", shadow.scheduler


def _outgoing(site: Site) -> Iterator[Finding]:
    config = site.config
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
            url = urlsplit(endpoint.scrape_url)
            if url.scheme == "http" and not is_loopback(url.hostname or ""):
                yield TOKEN.at(endpoint.id, endpoint.scrape_url)


def _secrets(config: Config) -> Iterator[Finding]:
    curve = config.kv_events.curve
    files = [config.metrics.token_file, config.admin.token_file, curve.secret_key_file if curve else ""]
    files += [str(Path(tls.cert_dir, "tls.key")) for tls in (config.ext_proc.tls, config.admin.tls) if tls]
    for file in filter(None, files):
        try:
            mode = Path(file).stat().st_mode & 0o777
        except OSError:
            continue  # other checks tell
        if mode & 0o007:
            yield SECRETS.at(file, f"mode {mode:o}")


@check(
    "exposure",
    "nothing is open to the network by mistake",
    (GATEWAY, CLEAR, PATHS, HEADERS, ADMIN, EXT_PROC, KV_EVENTS, REMOTE, UNVERIFIED, TOKEN, SECRETS),
)
async def exposure(site: Site) -> list[Finding]:
    return [*_incoming(site.config), *_outgoing(site), *_secrets(site.config)]
