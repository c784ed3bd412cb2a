"""`metrics`: whether the scraper can have every endpoint's page in time, and read in it what it needs."""

from fairlead.config.schema import Config
from fairlead.doctor.finding import Finding, Kind, Severity
from fairlead.doctor.http import Answer, Unreached
from fairlead.doctor.run import Check
from fairlead.doctor.site import Site
from fairlead.model.endpoint import Endpoint
from fairlead.wire.engine_metrics import ENGINE_LABELS, unknown_engine
from fairlead.wire.problem import shorten
from fairlead.wire.promfamily import find_family
from fairlead.wire.promtext import Reading, read_page

_DOCS = "docs/troubleshooting.md#load-is-uneven"
#: Share of a limit from which on it is close.
_CLOSE = 0.8

UNREACHABLE = Kind(
    "metrics.unreachable", Severity.ERROR, "the metrics page of an endpoint cannot be had",
    "correct metricsUrl, or the labels metricsAddress and metricsPort; without it only own requests are counted", _DOCS,
)  # fmt: skip
REFUSED = Kind(
    "metrics.refused", Severity.ERROR, "the metrics page of an endpoint is refused",
    "401 or 403: set metrics.tokenFile to a token that may read it; 404: correct metricsUrl", _DOCS,
)  # fmt: skip
ENGINE = Kind(
    "metrics.engine", Severity.ERROR, "the metrics page is not one of the engine that it is read for",
    f"label the endpoint with {ENGINE_LABELS[0]}, set metrics.defaultEngine, or name its metrics under metrics.engines",
    _DOCS,
)  # fmt: skip
UNKNOWN_ENGINE = Kind(
    "metrics.unknown-engine", Severity.WARNING, "the label of an endpoint names an engine that is not known",
    f"correct {ENGINE_LABELS[0]}, or describe that engine under metrics.engines", _DOCS,
)  # fmt: skip
INCOMPLETE = Kind(
    "metrics.incomplete", Severity.WARNING, "the metrics page lacks something that decisions need",
    "an engine of another version may have other names: set them under metrics.engines", _DOCS,
)  # fmt: skip
SLOW = Kind(
    "metrics.slow", Severity.ERROR, "the metrics page takes longer than the scraper waits",
    "raise metrics.timeout, or find out why the server answers so slowly", _DOCS,
)  # fmt: skip
LARGE = Kind(
    "metrics.large", Severity.WARNING, "the metrics page is nearly, or already, too large",
    "raise metrics.maxPageBytes", _DOCS,
)  # fmt: skip
NO_CACHE = Kind(
    "metrics.no-prefix-cache", Severity.WARNING, "an engine runs without prefix caching",
    "start it with --enable-prefix-caching: without it no prompt is ever cheaper anywhere", _DOCS,
)  # fmt: skip


async def _one(site: Site, endpoint: Endpoint) -> list[Finding]:
    try:
        answer = await site.page(endpoint)
    except Unreached as error:
        if error.trouble in ("tls", "untrusted", "not-http") or await _away(site, endpoint):
            return []  # the checks `tls` and `endpoints` look into that
        if endpoint.scrape_url.startswith("https:") and not await site.is_tls(endpoint.scrape_url):
            return []
        if error.trouble == "silent":
            return [SLOW.at(endpoint.id, f"{endpoint.scrape_url}: {error}")]
        return [UNREACHABLE.at(endpoint.id, f"{endpoint.scrape_url}: {error}")]
    if answer.status != 200:
        return [REFUSED.at(endpoint.id, f"{endpoint.scrape_url}: {answer.status}")]
    reading = await site.reading(endpoint)
    assert reading is not None
    if answer.seconds > site.config.metrics.timeout:
        answer = await site.alone(lambda: site.client.scrape(endpoint.scrape_url), answer)
    return [*_limits(site.config, endpoint, answer), *_content(site, endpoint, answer.body, reading)]


async def _away(site: Site, endpoint: Endpoint) -> bool:
    """The page is the model server's own, which is not there at all."""
    if not site.own_page(endpoint):
        return False
    try:
        await site.ask(endpoint, "/health")
    except Unreached:
        return True
    return False


def _limits(config: Config, endpoint: Endpoint, answer: Answer) -> list[Finding]:
    found = []
    settings = config.metrics
    if answer.seconds > settings.timeout:
        evidence = f"{answer.seconds:.2f} s; metrics.timeout is {settings.timeout:g} s"
        found.append(SLOW.at(endpoint.id, evidence))
    if len(answer.body) > _CLOSE * settings.max_page_bytes:
        evidence = f"{len(answer.body)} bytes; metrics.maxPageBytes is {settings.max_page_bytes}"
        found.append(LARGE.at(endpoint.id, evidence))
    return found


def _content(site: Site, endpoint: Endpoint, page: bytes, reading: Reading) -> list[Finding]:
    engine = site.engine(endpoint)
    if reading.empty:
        fits = [name for name in site.engines if not read_page(page, site.specs(name)).empty]
        evidence = f"it is read for {engine}; " + (
            f"it is one of {fits[0]}" if fits else "it is one of no known engine"
        )
        fix = f"label the endpoint with {ENGINE_LABELS[0]}: {fits[0]}" if fits else ""
        return [ENGINE.at(endpoint.id, evidence, fix)]
    found = [INCOMPLETE.at(endpoint.id, "; ".join(reading.problems[:3]))] if reading.problems else []
    named = unknown_engine(endpoint.labels, site.engines)
    if named:
        evidence = f"'{shorten(named)}'; it is read for {engine}; known: {', '.join(sorted(site.engines))}"
        found.append(UNKNOWN_ENGINE.at(endpoint.id, evidence))
    for spec in site.specs(engine).cache_info:
        family = find_family(page, spec.family)
        labels = [one.labels() or {} for one in family.series] if family is not None else []
        if any(one.get("enable_prefix_caching") == "False" for one in labels):
            found.append(NO_CACHE.at(endpoint.id, f'{spec.family.decode()} has enable_prefix_caching="False"'))
    return found


async def _run(site: Site) -> list[Finding]:
    return await site.each(lambda endpoint: _one(site, endpoint))


CHECK = Check(
    name="metrics",
    about="every metrics page can be had in time and read",
    kinds=(UNREACHABLE, REFUSED, ENGINE, UNKNOWN_ENGINE, INCOMPLETE, SLOW, LARGE, NO_CACHE),
    run=_run,
    needs=("endpoints",),
    budget=60.0,
)
