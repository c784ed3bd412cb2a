"""`limits`: whether what is configured fits together, and fits the pool and this machine."""

import resource

from fairlead.doctor.finding import Finding, Kind, Severity
from fairlead.doctor.run import Check
from fairlead.doctor.site import Site

_DOCS = "docs/configuration.md"
#: Open files per endpoint (scraping, events, replay, their monitors; see `stub.pool`), and of everything else.
_FILES_PER_ENDPOINT, _FILES_WITH_EVENTS, _OTHER_FILES = 2, 6, 256

FILES = Kind(
    "limits.open-files", Severity.ERROR, "the limit of open files is too low for this pool",
    "raise it: ulimit -n, LimitNOFILE= of a systemd unit, or the container's settings", _DOCS,
)  # fmt: skip
BODY = Kind(
    "limits.body", Severity.WARNING, "the gateway passes larger bodies than the scheduler reads",
    "set parsing.maxBodyBytes to gateway.bodyLimit or more", _DOCS,
)  # fmt: skip
SCRAPES = Kind(
    "limits.scrape-rate", Severity.ERROR, "the pool is too large for metrics to stay fresh",
    "raise metrics.maxRate, or metrics.staleness", _DOCS,
)  # fmt: skip
INDEX = Kind(
    "limits.kv-index", Severity.WARNING, "the index of KV blocks is smaller than the caches of the pool",
    "raise kvEvents.maxBlocks: about 50 bytes each", "docs/kv-events.md",
)  # fmt: skip
LEASE = Kind(
    "limits.lease", Severity.WARNING, "leases expire before a request may end",
    "raise ledger.leaseTtl: a long answer would stop counting while it runs", _DOCS,
)  # fmt: skip
#: Answers of reasoning models take minutes.
_SHORT_LEASE = 60.0


async def _run(site: Site) -> list[Finding]:
    config, count = site.config, len(site.endpoints)
    found = []
    per_endpoint = _FILES_PER_ENDPOINT + (_FILES_WITH_EVENTS if config.kv_events.enabled else 0)
    needed, soft = count * per_endpoint + _OTHER_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft != resource.RLIM_INFINITY and soft < needed:
        found.append(FILES.at("", f"{soft}; {count} endpoints need about {needed}"))
    if config.gateway.mode == "embedded" and config.gateway.body_limit > config.parsing.max_body_bytes:
        evidence = (
            f"gateway.bodyLimit {config.gateway.body_limit}, parsing.maxBodyBytes {config.parsing.max_body_bytes}"
        )
        found.append(BODY.at("", evidence))
    between = max(config.metrics.idle_interval, count / config.metrics.max_rate)
    if between > config.metrics.staleness:
        evidence = f"{count} endpoints at {config.metrics.max_rate:g} scrapes/s: each is read every {between:.1f} s,"
        found.append(SCRAPES.at("", f"{evidence} and metrics.staleness is {config.metrics.staleness:g} s"))
    if config.ledger.lease_ttl < _SHORT_LEASE:
        found.append(LEASE.at("", f"ledger.leaseTtl is {config.ledger.lease_ttl:g} s"))
    if site.has("events"):
        readings = [await site.reading(endpoint) for endpoint in site.endpoints]
        blocks = sum(reading.sample.num_blocks for reading in readings if reading is not None)
        if blocks > config.kv_events.max_blocks:
            found.append(
                INDEX.at("", f"{blocks} blocks in all caches, kvEvents.maxBlocks is {config.kv_events.max_blocks}")
            )
    return found


CHECK = Check(
    name="limits",
    about="limits fit each other, the pool and this machine",
    kinds=(FILES, SCRAPES, BODY, INDEX, LEASE),
    run=_run,
)
