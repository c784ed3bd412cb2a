"""Checks of metrics pages, of clocks, and of limits that depend on each other."""

import asyncio
import resource
from urllib.parse import urljoin

from fairlead.apis.engine_metrics import ENGINE_LABELS, TRTLLM_PATH, unknown_engine
from fairlead.apis.prometheus import Reading, came_instead, find_family
from fairlead.config.endpoint_list import PORT_LABEL, port_number
from fairlead.config.problems import shorten
from fairlead.config.schema import Config
from fairlead.core.endpoint import Endpoint
from fairlead.core.models import Catalogue
from fairlead.doctor.http import Answer, Unreached
from fairlead.doctor.run import Finding, Kind, Severity, check
from fairlead.doctor.site import Site, tried
from fairlead.gateway.memory import FEW_FILES, memory_limit
from fairlead.pool.models_file import check_models
from fairlead.server.observe.metrics import MOST_DECLARED

_UNEVEN = "docs/runbook.md#load-is-uneven"
_SETTINGS = "docs/configuration.md"
_NAMES = "docs/configuration.md#metrics-of-model-servers"

#: A value of at least this share of a limit counts as close to the limit.
_CLOSE = 0.8

UNREACHABLE = Kind(
    "metrics.unreachable", Severity.ERROR, "an endpoint's metrics page cannot be reached",
    "correct metricsUrl, the label metricsPort, or metrics.scheme, path and port; without the page only our own "
    "requests count", _UNEVEN,
)  # fmt: skip
REFUSED = Kind(
    "metrics.refused", Severity.ERROR, "an endpoint refuses to serve its metrics page",
    "401 or 403: set metrics.tokenFile to a token with access; 404: correct metricsUrl or metrics.path; 5xx: read the "
    "server's log, restart it", _UNEVEN,
)  # fmt: skip
ENGINE = Kind(
    "metrics.engine", Severity.ERROR, "the metrics page is not one of the configured engine",
    f"label the endpoint with {ENGINE_LABELS[0]}, set metrics.defaultEngine, or name its metrics under metrics.engines",
    _UNEVEN,
)  # fmt: skip
UNKNOWN_ENGINE = Kind(
    "metrics.unknown-engine", Severity.WARNING, "an endpoint's label names an unknown engine",
    f"correct {ENGINE_LABELS[0]}, or describe that engine under metrics.engines", _NAMES,
)  # fmt: skip
WRONG_PORT = Kind(
    "metrics.port-label", Severity.WARNING, f"an endpoint's label {PORT_LABEL} is not a port and has no effect",
    "write a port from 1 to 65535, or remove the label", _NAMES,
)  # fmt: skip
INCOMPLETE = Kind(
    "metrics.incomplete", Severity.WARNING, "the metrics page lacks metrics that decisions need",
    "another version of the engine may use other names: set them under metrics.engines", _NAMES,
)  # fmt: skip
SLOW = Kind(
    "metrics.slow", Severity.ERROR, "the metrics page takes longer than metrics.timeout",
    "raise metrics.timeout, or find out why the server is so slow", _UNEVEN,
)  # fmt: skip
LARGE = Kind(
    "metrics.large", Severity.WARNING, "the metrics page is too large, or almost",
    "raise metrics.maxPageBytes", _UNEVEN,
)  # fmt: skip
NO_CACHE = Kind(
    "metrics.no-prefix-cache", Severity.WARNING, "an engine runs without prefix caching",
    "start it with --enable-prefix-caching; without it no prompt is cheaper anywhere",
    "docs/runbook.md#lowcachehitrate",
)  # fmt: skip


async def _metrics_of(site: Site, endpoint: Endpoint) -> list[Finding]:
    try:
        answer = await site.page(endpoint)
    except Unreached as error:
        if error.trouble in ("tls", "untrusted", "not-http") or await _away(site, endpoint):
            return []  # the checks `tls` and `endpoints` examine that
        if endpoint.scrape_url.startswith("https:") and not await site.is_tls(endpoint.scrape_url):
            return []
        if error.trouble == "silent":
            return [SLOW.at(endpoint.id, f"{endpoint.scrape_url}: {error}")]
        return [UNREACHABLE.at(endpoint.id, f"{endpoint.scrape_url}: {error}")]
    if answer.status != 200:
        return [REFUSED.at(endpoint.id, f"{endpoint.scrape_url}: {answer.status}")]
    coding = answer.headers.get("content-encoding", "identity")
    if coding != "identity" and endpoint.scrape_url.startswith("http:") and not site.config.metrics.token_file:
        evidence = f"{endpoint.scrape_url}: compressed ({shorten(coding)}), which was not asked for"
        return [REFUSED.at(endpoint.id, evidence, "serve the page uncompressed to clients that ask for that")]
    reading = await site.reading(endpoint)
    assert reading is not None
    if answer.seconds > site.config.metrics.timeout:
        answer = await site.alone(lambda: site.client.scrape(endpoint.scrape_url), answer)
    content = await _unfit(site, endpoint, answer) if reading.empty else _content(site, endpoint, answer.body, reading)
    return [*_limits(site.config, endpoint, answer), *content]


async def _away(site: Site, endpoint: Endpoint) -> bool:
    """Whether the page is the model server's own, and the server does not answer at all."""
    return site.own_page(endpoint) and isinstance(await tried(site.ask(endpoint, "/health")), Unreached)


def _limits(config: Config, endpoint: Endpoint, answer: Answer) -> list[Finding]:
    findings = []
    settings = config.metrics
    if answer.seconds > settings.timeout:
        evidence = f"{answer.seconds:.2f} s; metrics.timeout is {settings.timeout:g} s"
        findings.append(SLOW.at(endpoint.id, evidence))
    if len(answer.body) > _CLOSE * settings.max_page_bytes:
        evidence = f"{len(answer.body)} bytes; metrics.maxPageBytes is {settings.max_page_bytes}"
        findings.append(LARGE.at(endpoint.id, evidence))
    return findings


async def _unfit(site: Site, endpoint: Endpoint, page: Answer) -> list[Finding]:
    """Findings for a page that has no load metric of the engine that it is read for."""
    evidence, fits = f"it is read for {site.engine(endpoint)}; it is one of ", site.fitting(page)[0]
    if fits:
        return [ENGINE.at(endpoint.id, evidence + fits, f"label the endpoint with {ENGINE_LABELS[0]}: {fits}")]
    fits, _ = site.fitting(await tried(site.client.scrape(urljoin(endpoint.scrape_url, TRTLLM_PATH))))
    if not fits and (instead := came_instead(page.body)):
        beginning = shorten(" ".join(page.body[:400].decode("utf-8", "replace").split()))
        evidence = f"{endpoint.scrape_url}: {instead} came instead of metrics{beginning and ': '}{beginning}"
        return [REFUSED.at(endpoint.id, evidence, "correct metricsUrl or metrics.path, or let no proxy answer there")]
    there = urljoin(endpoint.scrape_url, TRTLLM_PATH)
    fix = f"set the label {ENGINE_LABELS[0]}: {fits}; its page is {there}, unless metricsUrl or metrics.path differ"
    return [ENGINE.at(endpoint.id, f"{evidence}no known engine", fix if fits else "")]


def _content(site: Site, endpoint: Endpoint, page: bytes, reading: Reading) -> list[Finding]:
    engine = site.engine(endpoint)
    findings = [INCOMPLETE.at(endpoint.id, "; ".join(reading.problems[:3]))] if reading.problems else []
    named = unknown_engine(endpoint.labels, site.engines)
    if named:
        evidence = f"'{shorten(named)}'; it is read for {engine}; known: {', '.join(sorted(site.engines))}"
        findings.append(UNKNOWN_ENGINE.at(endpoint.id, evidence))
    if not reading.sample.prefix_caching:
        families = [spec.family for spec in site.specs(engine).parsed["cache_info"]]
        read = next(family.decode() for family in families if find_family(page, family) is not None)
        findings.append(NO_CACHE.at(endpoint.id, f'{read} has enable_prefix_caching="False"'))
    return findings


@check("metrics", "every metrics page is reachable, fast and readable", needs=("endpoints",), budget=60.0)
async def metrics(site: Site) -> list[Finding]:
    labels = ((endpoint, endpoint.labels.get(PORT_LABEL, "")) for endpoint in site.endpoints)
    wrong = [
        WRONG_PORT.at(endpoint.id, f"'{shorten(port)}'; the page is read at {endpoint.scrape_url}")
        for endpoint, port in labels
        if port and not port_number(port)
    ]
    return wrong + await site.each(lambda endpoint: _metrics_of(site, endpoint))


# `freshness`: whether metrics pages are current.
#
# A page that does not change looks like an idle server. So the check reads it twice and sends requests in between:
# engines count requests to `/v1/models`, and their process uses CPU time. If the page shows neither, there is no
# finding.


_MOVING = (b"http_requests_total", b"process_cpu_seconds_total")
#: Seconds between the two readings: longer than servers cache a page for several readers.
APART = 1.2

FROZEN = Kind(
    "freshness.frozen", Severity.ERROR, "the metrics page of an endpoint does not change",
    "a cache in between answers, or the engine's metrics process hangs: read the page at the engine itself, and "
    "restart the engine if it does not change there", _UNEVEN,
)  # fmt: skip
STALE = Kind(
    "freshness.stale", Severity.ERROR, "the running scheduler has no recent metrics of an endpoint",
    "see the findings of the checks `endpoints`, `metrics` and `tls`; if there are none, check the scheduler's "
    "load", _UNEVEN,
)  # fmt: skip


async def _frozen(site: Site, endpoint: Endpoint) -> list[Finding]:
    try:
        first = await site.page(endpoint)
        if first.status != 200 or not any(find_family(first.body, name) for name in _MOVING):
            return []
        for path in ("/v1/models", "/v1/models"):
            if (await site.client.get(f"http://{endpoint.address}{path}")).status != 200:
                return []
        await asyncio.sleep(APART)
        second = await site.client.scrape(endpoint.scrape_url)
    except Unreached:
        return []
    if second.status != 200 or first.body != second.body:
        return []
    return [FROZEN.at(endpoint.id, f"{endpoint.scrape_url}: not a byte differs after {APART:g} s and two requests")]


@check("freshness", "metrics pages are current", needs=("endpoints",), budget=60.0)
async def freshness(site: Site) -> list[Finding]:
    findings = await site.each(lambda endpoint: _frozen(site, endpoint))
    for row in await site.rows():
        if not row.fresh:
            evidence = "it was never read" if row.age_s is None else f"the last one is {row.age_s:.1f} s old"
            findings.append(STALE.at(row.id, evidence))
    return findings


#: Seconds of clock difference that are accepted, beyond what the exchange's duration and whole seconds explain.
TOLERANCE = 2.0

SKEW = Kind(
    "clock.skew", Severity.WARNING, "the clock of a machine differs from this machine's",
    "synchronise both machines with a time server (chrony, systemd-timesyncd). Otherwise certificates and tokens "
    "expire early or late, logs and journals cannot be compared, and ages of KV events are wrong", "docs/doctor.md",
)  # fmt: skip


def _judge(where: str, answer: Answer | Unreached) -> list[Finding]:
    skew = 0.0 if isinstance(answer, Unreached) else answer.skew()
    if abs(skew) <= TOLERANCE:
        return []
    way = "ahead of" if skew > 0 else "behind"
    return [SKEW.at(where, f"it is at least {abs(skew):.0f} s {way} us")]


@check("clock", "all machines have the same time")
async def clock(site: Site) -> list[Finding]:
    async def ask(endpoint: Endpoint) -> list[Finding]:
        return _judge(endpoint.id, await tried(site.ask(endpoint, "/health")))

    scheduler = _judge("scheduler", await tried(site.admin("/healthz"))) if site.has("admin") else []
    return [*await site.each(ask), *scheduler]


#: Open files per endpoint (scraping, events, replay, their monitors; see `lab.stub.pool`), and of everything else.
_FILES_PER_ENDPOINT, _FILES_WITH_EVENTS, _OTHER_FILES = 2, 6, 256

FILES = Kind(
    "limits.open-files", Severity.ERROR, "the limit of open files is too low for this pool",
    "raise it: ulimit -n, LimitNOFILE= of a systemd unit, or the container's settings", _SETTINGS,
)  # fmt: skip
HEAP = Kind(
    "limits.heap", Severity.ERROR, "the gateway's heap limit is above the memory that it has",
    "lower gateway.maxHeap, or leave it out for half of the memory: otherwise the kernel kills Envoy before it ends"
    " an upload", "docs/gateway.md#uploads",
)  # fmt: skip
SCRAPES = Kind(
    "limits.scrape-rate", Severity.ERROR, "the pool is too large for metrics to stay fresh",
    "raise metrics.maxRate, or metrics.staleness", _SETTINGS,
)  # fmt: skip
BODY = Kind(
    "limits.body", Severity.WARNING, "the gateway passes larger bodies than the scheduler reads",
    "set parsing.maxBodyBytes to gateway.bodyLimit or more", _SETTINGS,
)  # fmt: skip
INDEX = Kind(
    "limits.kv-index", Severity.WARNING, "the index of KV blocks is smaller than the caches of the pool",
    "raise kvEvents.maxBlocks: about 50 bytes each", "docs/kv-events.md",
)  # fmt: skip
LEASE = Kind(
    "limits.lease", Severity.WARNING, "leases expire before a request may end",
    "raise ledger.leaseTtl: a long answer stops counting while it runs", _SETTINGS,
)  # fmt: skip
MODELS = Kind(
    "limits.models", Severity.WARNING, "there are more models, adapters and defined names than have metrics",
    "split the pool: those that are asked for last count as `other`", "docs/metrics.md",
)  # fmt: skip
#: Answers of reasoning models take minutes.
_SHORT_LEASE = 60.0
#: Memory that Envoy takes in addition to the limited heap.
_BESIDE_HEAP = 80 << 20


@check("limits", "limits fit each other, the pool and this machine")
async def limits(site: Site) -> list[Finding]:
    config, count = site.config, len(site.endpoints)
    findings = []
    per_endpoint = _FILES_PER_ENDPOINT + (_FILES_WITH_EVENTS if config.kv_events.enabled else 0)
    needed, hard = count * per_endpoint + _OTHER_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < needed:  # `serve` raises the soft limit to the hard one
        findings.append(FILES.at("", f"{hard}; {count} endpoints need about {needed}"))
    elif config.gateway.mode == "embedded" and hard != resource.RLIM_INFINITY and hard < FEW_FILES:
        findings.append(FILES.at("", f"{hard}; the gateway takes two for each request at a time"))
    if config.gateway.mode == "embedded" and config.gateway.body_limit > config.parsing.max_body_bytes:
        evidence = (
            f"gateway.bodyLimit {config.gateway.body_limit}, parsing.maxBodyBytes {config.parsing.max_body_bytes}"
        )
        findings.append(BODY.at("", evidence))
    heap, memory = config.gateway.max_heap, memory_limit()
    if config.gateway.mode == "embedded" and heap and heap + _BESIDE_HEAP > memory:
        findings.append(
            HEAP.at("", f"gateway.maxHeap {heap >> 20} MiB of {memory >> 20} MiB, and Envoy needs 80 besides")
        )
    between = max(config.metrics.idle_interval, count / config.metrics.max_rate)
    if between > config.metrics.staleness:
        evidence = f"{count} endpoints at {config.metrics.max_rate:g} scrapes/s: each is read every {between:.1f} s,"
        findings.append(SCRAPES.at("", f"{evidence} and metrics.staleness is {config.metrics.staleness:g} s"))
    if config.ledger.lease_ttl < _SHORT_LEASE:
        findings.append(LEASE.at("", f"ledger.leaseTtl is {config.ledger.lease_ttl:g} s"))
    names = {*await site.each(site.served), *Catalogue(check_models(config.models)[0]).known}
    if len(names) > MOST_DECLARED:
        evidence = f"{len(names)} models and adapters are listed or defined, {MOST_DECLARED} have metrics"
        findings.append(MODELS.at("", evidence))
    if site.has("events"):
        readings = [await site.reading(endpoint) for endpoint in site.endpoints]
        blocks = sum(reading.sample.num_blocks for reading in readings if reading is not None)
        if blocks > config.kv_events.max_blocks:
            findings.append(
                INDEX.at("", f"{blocks} blocks in all caches, kvEvents.maxBlocks is {config.kv_events.max_blocks}")
            )
    return findings
