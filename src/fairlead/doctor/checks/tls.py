"""`tls`: whether both ends of each connection agree on TLS, and certificates are accepted."""

import asyncio

from fairlead.doctor.finding import Finding, Kind, Severity
from fairlead.doctor.http import Unreached, connects, speaks_tls
from fairlead.doctor.run import Check
from fairlead.doctor.site import Site
from fairlead.io.tls import ServerTls
from fairlead.model.endpoint import Endpoint
from fairlead.model.errors import ConfigError

_DOCS = "docs/doctor.md"

PLAIN_URL = Kind(
    "tls.http-to-https", Severity.ERROR, "a metrics URL says http, and the server speaks TLS",
    "write https:// in metricsUrl (with a label metricsPort alone the URL is http), and metrics.tls.caFile if the"
    " certificate is not a public one", _DOCS,
)  # fmt: skip
SECURE_URL = Kind(
    "tls.https-to-http", Severity.ERROR, "a metrics URL says https, and the server speaks plain HTTP",
    "write http:// in metricsUrl, or serve the page with TLS", _DOCS,
)  # fmt: skip
UNTRUSTED = Kind(
    "tls.untrusted", Severity.ERROR, "the certificate of a metrics page is not accepted",
    "name the authority that signed it in metrics.tls.caFile; renew it if it expired; ask for it by a name that it has",
    _DOCS,
)  # fmt: skip
FILES = Kind(
    "tls.files", Severity.CRITICAL, "the certificate for extProc cannot be used",
    "extProc.tls.certDir must hold tls.crt and tls.key, a matching pair in PEM without a password", _DOCS,
)  # fmt: skip
EXT_PROC = Kind(
    "tls.ext-proc", Severity.CRITICAL, "the running scheduler's extProc port speaks otherwise than configured",
    "restart the scheduler, and set the gateway to the same: it reaches no scheduler otherwise", _DOCS,
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
            if not await site.is_tls(url):  # a server may also wait in silence for the rest of what it takes for HTTP
                return [SECURE_URL.at(endpoint.id, f"{url}: {error}; no TLS handshake succeeds there")]
            return [UNTRUSTED.at(endpoint.id, f"{url}: {error}")] if error.trouble == "tls" else []
        if error.trouble == "not-http" and not site.own_page(endpoint) and await site.is_tls(url):
            return [PLAIN_URL.at(endpoint.id, f"{url}: a TLS handshake succeeds there")]
    return []


async def _ext_proc(site: Site) -> list[Finding]:
    settings = site.config.ext_proc
    if settings.tls is not None:
        try:
            await asyncio.to_thread(ServerTls.from_directory, settings.tls.cert_dir)
        except ConfigError as error:
            return [FILES.at("extProc", str(error))]
    if not site.has("admin") or not settings.port:
        return []
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(settings.host, settings.host)
    if await connects(host, settings.port):
        return []  # the check `scheduler` tells that
    speaks = await speaks_tls(host, settings.port)
    if speaks == (settings.tls is not None):
        return []
    said = "TLS" if settings.tls is not None else "plaintext"
    return [
        EXT_PROC.at(
            "extProc", f"port {settings.port}: configured is {said}, it speaks {'TLS' if speaks else 'plaintext'}"
        )
    ]


async def _run(site: Site) -> list[Finding]:
    return [*await site.each(lambda endpoint: _metrics(site, endpoint)), *await _ext_proc(site)]


CHECK = Check(
    name="tls",
    about="both ends of each connection agree on TLS",
    kinds=(EXT_PROC, FILES, PLAIN_URL, SECURE_URL, UNTRUSTED),
    run=_run,
)
