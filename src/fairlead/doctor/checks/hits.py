"""`hits`: why a running scheduler finds little of prompts in caches, if that is so."""

from fairlead.doctor.finding import Finding, Kind, Severity
from fairlead.doctor.run import Check
from fairlead.doctor.site import Site

_DOCS = "docs/troubleshooting.md#the-hit-rate-is-low"
_CAUSES = "docs/kv-events.md#the-self-check"

DISTRUSTED = Kind(
    "hits.distrusted", Severity.ERROR, "KV events of an endpoint disagree with what it reports, and are not relied on",
    "the cause in the evidence says what to set, see the table of causes; learned prefixes serve meanwhile", _CAUSES,
)  # fmt: skip
UNTOKENISED = Kind(
    "hits.no-tokens", Severity.WARNING, "KV events serve few requests, because most prompts have no token ids",
    "set tokens.models for the models that are asked for; the reasons are in docs/tokens.md", "docs/tokens.md",
)  # fmt: skip
NOT_REAL = Kind(
    "hits.not-real", Severity.ERROR, "engines report much less cached than was predicted",
    "other clients use the caches too, or caches are smaller than believed: see that every metrics page tells"
    " its blocks", "docs/runbook.md#fairleadhitsnotreal",
)  # fmt: skip
LOW = Kind(
    "hits.low", Severity.WARNING, "few tokens of prompts are found in caches",
    "prompts with a changing beginning (a date, an id) never hit: let clients put it last; for new users and topics"
    " it is normal", _DOCS,
)  # fmt: skip

#: Requests and tokens from which on shares mean something.
_REQUESTS, _TOKENS = 200, 100_000
_LOW, _HALF = 0.3, 0.5


async def _total(site: Site, name: str) -> float:
    return sum(value for _, value in await site.metric(name))


async def _trust(site: Site) -> list[Finding]:
    heard = {labels.get("endpoint", "") for labels, _ in await site.metric("fairlead_kv_feed_connected")}
    causes: dict[str, dict[str, float]] = {}
    for labels, count in await site.metric("fairlead_kv_disagreements_total"):
        causes.setdefault(labels.get("endpoint", ""), {})[labels.get("cause", "")] = count
    found = []
    for labels, now in await site.metric("fairlead_kv_source"):
        name = labels.get("endpoint", "")
        if labels.get("source") == "learned" and now and name in heard and causes.get(name):
            likely = max(causes[name], key=lambda cause: causes[name][cause])
            found.append(DISTRUSTED.at(name, f"likely cause: {likely} ({causes[name][likely]:g} answers)"))
    return found


async def _rate(site: Site) -> list[Finding]:
    looked_up, hit = await _total(site, "kv_cache_lookup_total"), await _total(site, "kv_cache_hit_total")
    if looked_up < _TOKENS or hit >= _LOW * looked_up:
        return []
    queries = hits = 0.0
    for endpoint in site.endpoints:
        reading = await site.reading(endpoint)
        if reading is not None:
            queries += reading.sample.prefix_queries or 0.0
            hits += reading.sample.prefix_hits or 0.0
    engines = f"; engines say {hits / queries:.0%}" if queries else ""
    return [LOW.at("", f"{hit / looked_up:.0%} of {looked_up:g} prompt tokens since the start{engines}")]


async def _run(site: Site) -> list[Finding]:
    found = await _trust(site)
    asked = await _total(site, "llm_d_epp_request_total")
    without = await _total(site, "fairlead_kv_prompts_without_tokens_total")
    if asked >= _REQUESTS and without > _HALF * asked:
        reasons = sorted(await site.metric("fairlead_kv_prompts_without_tokens_total"), key=lambda one: -one[1])
        evidence = f"{without:g} of {asked:g} requests; most often: {reasons[0][0].get('reason', '')}"
        found.append(UNTOKENISED.at("", evidence))
    predicted = await _total(site, "fairlead_predicted_hit_tokens_total")
    reported = await _total(site, "fairlead_reported_cached_tokens_total")
    if predicted >= _TOKENS and reported < _HALF * predicted and not found:
        found.append(NOT_REAL.at("", f"{predicted:g} tokens predicted, {reported:g} reported"))
    return found or await _rate(site)


CHECK = Check(
    name="hits",
    about="a fair share of prompts is found in caches, and is really there",
    kinds=(DISTRUSTED, NOT_REAL, UNTOKENISED, LOW),
    run=_run,
    needs=("admin",),
)
