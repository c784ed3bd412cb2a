"""Checks of a running scheduler: whether it is ready and fast, spreads load, and finds cached prompts."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from math import inf
from operator import attrgetter
from statistics import median

from msgspec import Struct, ValidationError, convert

from fairlead.core.endpoint import ROLE_LABEL
from fairlead.doctor.http import Answer, Unreached
from fairlead.doctor.run import Finding, Kind, Severity, check
from fairlead.doctor.site import Row, Site, series, tried

_SLOWNESS = "docs/runbook.md#epphighlatency"
_UNEVEN = "docs/runbook.md#load-is-uneven"
_LOW_HITS = "docs/runbook.md#lowcachehitrate"
_SELF_CHECK = "docs/kv-events.md#the-self-check"


NOT_READY = Kind(
    "scheduler.not-ready", Severity.CRITICAL, "the scheduler is not ready",
    "the evidence says what it waits for", "docs/runbook.md",
)  # fmt: skip
NO_METRICS = Kind(
    "scheduler.no-metrics", Severity.ERROR, "the scheduler's own metrics page fails",
    "its log has the reason. Dashboards, alerts and the checks hits and scheduling need this page",
    "docs/operations.md#the-admin-port",
)  # fmt: skip
OTHER_POOL = Kind(
    "scheduler.other-endpoints", Severity.ERROR, "the running scheduler's endpoints differ from the configuration's",
    "it could not apply the file (see its log), or it was started with another file",
    "docs/configuration.md#changes-while-it-runs",
)  # fmt: skip
HIDDEN = Kind(
    "scheduler.no-debug", Severity.WARNING, "the scheduler shows no endpoints, so none was examined",
    "set admin.debug, in the chart config.admin.debug=true, for as long as the doctor runs: the pages need no password",
    "docs/kubernetes.md#is-it-working",
)  # fmt: skip
PLUGINS = Kind(
    "scheduler.plugin-errors", Severity.ERROR, "a plugin fails and is left out of decisions",
    "the scheduler's log has the reason; correct the plugin or remove it", "docs/runbook.md#fairleadpluginfails",
)  # fmt: skip
FALLBACKS = Kind(
    "scheduler.bypassed", Severity.WARNING, "the gateway has served requests without asking the scheduler",
    "the scheduler was not running or slow; its log and `fairlead_loop_lag_seconds` say when",
    "docs/runbook.md#fairleadbypassed",
)  # fmt: skip
FORGETS = Kind(
    "scheduler.forgets", Severity.WARNING, "the state file cannot be written, so a restart begins cold",
    "let the scheduler write to the directory of state.file, with free space; each scheduler needs its own "
    "file", "docs/operations.md#what-a-restart-keeps",
)  # fmt: skip
RESTRICTED = Kind(
    "scheduler.restricted", Severity.ERROR, "the scheduler reports that something does not work",
    "the evidence is from /readyz; its log says more", "docs/runbook.md#fairleadtrouble",
)  # fmt: skip
FAILING = Kind(
    "scheduler.failing", Severity.ERROR, "an endpoint fails its requests, and is tried every few seconds",
    "read the model server's log; restart it or take it out", "docs/runbook.md#fairleadendpointfails",
)  # fmt: skip
HANGING = Kind(
    "scheduler.hanging", Severity.CRITICAL, "an endpoint hangs: its requests make no progress",
    "look at its engine process and GPU; restart it", "docs/runbook.md#fairleadendpointhangs",
)  # fmt: skip
_OUT = {"fails": (FAILING, "several answers in a row failed"), "hangs": (HANGING, "requests wait there in vain")}
REMOTE_DOWN = Kind(
    "scheduler.remote-down", Severity.ERROR, "a scheduler in another process is not connected",
    "check its log, its address and TLS; restart it. Meanwhile the built-in policy decides",
    "docs/runbook.md#fairleadschedulerdown",
)  # fmt: skip
REMOTE_FAILS = Kind(
    "scheduler.remote-fails", Severity.ERROR, "a scheduler in another process is late or wrong, and left alone",
    "`fairlead_scheduler_fallbacks_total` has the reasons", "docs/runbook.md#fairleadschedulerfallback",
)  # fmt: skip
CUT_OFF = Kind(
    "scheduler.shadow-cut-off", Severity.WARNING, "a policy on trial was cut off",
    "the scheduler's log has the reason; correct it, then restart or change a setting under shadows",
    "docs/runbook.md#fairleadshadowcutoff",
)  # fmt: skip
INDEXER_DOWN = Kind(
    "scheduler.indexer-down", Severity.ERROR, "the indexer does not answer, so prefixes are judged by what was learned",
    "check its log and network policy; restart it", "docs/runbook.md#fairleadindexerdown",
)  # fmt: skip
#: Gauges, their values while something is wrong, and the label that says where. A breaker has a series for each state.
_GAUGES = (
    ("fairlead_scheduler_connected", 0.0, "scheduler", REMOTE_DOWN),
    ("fairlead_scheduler_breaker", 1.0, "scheduler", REMOTE_FAILS),
    ("fairlead_shadow_cut_off", 1.0, "shadow", CUT_OFF),
    ("fairlead_indexer_up", 0.0, "", INDEXER_DOWN),
)
ERRORS = Kind(
    "scheduler.errors", Severity.ERROR, "more than 5 % of the requests failed",
    "the evidence names the codes; the runbook has the cause of each", "docs/runbook.md#fairleaderrorshigh",
)  # fmt: skip
REFUSES = Kind(
    "scheduler.gateway-refuses", Severity.ERROR, "the gateway itself refuses most requests",
    "see what a client gets: 401 or 403 is about keys, tokens or the clock, 404 about paths, 413 about sizes",
    "docs/runbook.md#fairleaderrorshigh",
)  # fmt: skip
OVERLOADED = Kind(
    "scheduler.overloaded", Severity.ERROR, "the pool is saturated: no endpoint in use has room",
    "add model servers, or lower the limit or priority of who floods. If no more are wanted, servers have become slow",
    "docs/runbook.md#fairleadsaturated",
)  # fmt: skip
LATE = Kind(
    "scheduler.late", Severity.WARNING, "first tokens take longer than autoscaling.ttft",
    "if all servers are late, run the check hits, or add servers; if one is, look at its GPU and log, and restart it",
    "docs/runbook.md#highttft",
)  # fmt: skip
ALONE = Kind(
    "scheduler.alone", Severity.ERROR, "the scheduler cannot send to the other replicas, so it decides alone",
    "let the scheduler reach the server in replicas.via, or write to the directory; the evidence says why it fails",
    "docs/replicas.md#when-something-fails",
)  # fmt: skip
APART = Kind(
    "scheduler.apart", Severity.WARNING, "the scheduler does not receive all decisions of the other replicas",
    "the log says which worker hangs or cannot start; the schedulers of one pool need the same endpoints, those of "
    "several pools another replicas.pool each", "docs/replicas.md#when-something-fails",
)  # fmt: skip
UNHEARD = Kind(
    "scheduler.no-peers", Severity.WARNING, "replicas.via is set, but nothing arrives from other replicas",
    "if there is only one, this is right. If not, compare replicas.via (with its database) and replicas.pool, which "
    "must be the same in all", "docs/replicas.md#what-to-watch",
)  # fmt: skip
#: Values of `what` in `fairlead_trouble` that have findings of their own.
_ELSEWHERE = {"replicas", "scrapes"}
#: The share of unscheduled requests above which there is a finding.
_MANY = 0.01
#: The share of failed requests above which there is a finding, and the `error_code`s of failures not caused by clients.
_MANY_FAIL = 0.05
_FAILURES = ("ModelServerError", "ServiceUnavailable", "Internal")
#: Seconds of which the failures count on their own, if there are more than so many.
_LOOK_S, _FEW = 2.0, 2


async def _ready(site: Site) -> list[Finding]:
    findings = []
    for worker, answer in enumerate(await site.each_worker("/readyz")):
        where = f"worker {worker}" if site.workers else ""
        if isinstance(answer, Unreached):
            findings.append(NOT_READY.at(where, str(answer)))
        elif answer.status != 200:
            findings.append(NOT_READY.at(where, " ".join(answer.body.decode("utf-8", "replace").split())[:300]))
    return findings


async def _pool(site: Site) -> list[Finding]:
    source = site.config.endpoints
    if not (source.static or source.file) or await site.admin_json("/debug/endpoints") is None:
        return []
    runs = {row.id: row.address for row in await site.rows()}
    listed = {endpoint.id: endpoint.address for endpoint in site.endpoints}
    names = sorted(
        name for name in {*runs, *listed} if runs.get(name) != listed.get(name) and name not in site.nameless
    )
    if not names:
        return []
    first = names[0]
    evidence = f"{first}: {runs.get(first, 'unknown')} in the scheduler, {listed.get(first, 'none')} in the file"
    return [OTHER_POOL.at(name, evidence) for name in names]


async def _hidden(site: Site) -> list[Finding]:
    source = site.config.endpoints
    if site.endpoints or source.static or source.file or b"/debug/endpoints" in (await site.admin("/")).body:
        return []
    return [HIDDEN.at("", "its port has no page /debug/endpoints")]


async def _metrics(site: Site) -> list[Finding]:
    answer = await tried(site.admin("/metrics"))
    if isinstance(answer, Unreached):
        return [NO_METRICS.at("", str(answer))]
    return [] if answer.status == 200 else [NO_METRICS.at("", f"GET /metrics: {answer.status}")]


async def _troubles(site: Site) -> list[Finding]:
    present = {labels.get("what", "") for labels, value in await site.metric("fairlead_trouble") if value}
    if not present - _ELSEWHERE:
        return []
    notes = await _notes(site)
    findings = []
    if "state" in present:
        findings.append(FORGETS.at("", next((note for note in notes if "a restart forgets" in note), "")))
    present -= {"state", *_ELSEWHERE}
    if present:
        findings.append(RESTRICTED.at(", ".join(sorted(present)), "; ".join(notes)[:300]))
    return findings


async def _notes(site: Site) -> list[str]:
    """The notes on `/readyz`: its lines that begin with a dash."""
    lines = (await site.admin("/readyz")).body.decode("utf-8", "replace").splitlines()
    return [line.removeprefix("- ") for line in lines if line.startswith("- ")]


Pages = Sequence[Answer | Unreached]


async def _present(site: Site) -> list[Finding]:
    """Findings from two readings of all workers' metrics: each counts its own requests, one of them all answers."""
    before = await site.each_worker("/metrics")
    await asyncio.sleep(_LOOK_S)
    pages = await site.each_worker("/metrics")
    # What one reading lacks would seem to have happened between the two.
    both = [
        pair
        for pair in zip(before, pages, strict=True)
        if all(isinstance(page, Answer) and page.status == 200 for page in pair)
    ]
    first, second = ([pair[number] for pair in both] for number in (0, 1))
    refused = _refused(first, second) if len(both) == len(pages) else []
    return [*_errors(first, second), *refused, *_crowded(pages, site.config.autoscaling.ttft)]


def _sum(pages: Pages, name: str) -> float:
    return sum(value for page in pages for _, value in series(page, name))


def _errors(before: Pages, pages: Pages) -> list[Finding]:
    """Of a scheduler that has run for weeks, the requests since its start say little about now."""
    failed, asked = _failed(pages), _sum(pages, "llm_d_epp_request_total")
    lately, asked_lately = failed - _failed(before), asked - _sum(before, "llm_d_epp_request_total")
    if failed.total() > _MANY_FAIL * asked:
        when = "since the start"
    elif lately.total() > max(_FEW, _MANY_FAIL * asked_lately):
        failed, asked, when = lately, asked_lately, "just now"
    else:
        return []
    codes = ", ".join(f"{code} {count}" for code, count in failed.most_common())
    return [ERRORS.at("", f"{failed.total()} of {asked:g} requests {when}: {codes}")]


def _failed(pages: Pages) -> Counter[str]:
    """The failures not caused by clients, by code."""
    failed = Counter[str]()
    for page in pages:
        for labels, count in series(page, "llm_d_epp_request_error_total"):
            if labels.get("error_code") in _FAILURES:
                failed[labels["error_code"]] += int(count)
    return +failed


def _refused(before: Pages, pages: Pages) -> list[Finding]:
    """Keys, tokens, paths and sizes are checked before a scheduler is asked."""
    answers = Counter[str]()
    for sign, each in ((1, pages), (-1, before)):
        for page in each:
            for labels, count in series(page, "fairlead_gateway_responses_total"):
                answers[labels.get("class", "")] += sign * int(count)
    decided = _sum(pages, "llm_d_epp_request_error_total") - _sum(before, "llm_d_epp_request_error_total")
    refused = answers["4xx"] + answers["5xx"] - int(decided)
    if refused <= max(_FEW, answers.total() / 2):
        return []
    return [REFUSES.at("gateway", f"{refused} of {answers.total()} answers just now are errors without a decision")]


def _crowded(pages: Pages, ttft: float) -> list[Finding]:
    """Sheddable requests are meant to wait. While no endpoint is in use, that is the finding."""
    heads = [head for page in pages for head in series(page, "fairlead_flow_head_age_seconds")]
    oldest = max((age for labels, age in heads if not labels.get("priority", "").startswith("-")), default=0.0)
    known, out = [len(series(pages[0], name)) for name in ("fairlead_endpoint_stale", "fairlead_endpoint_out")]
    if known <= out or not (oldest > ttft or _sum(pages, "fairlead_scale_up_wanted")):
        return []
    waiting, wanted = _sum(pages, "fairlead_flow_waiting_requests"), _sum(pages[:1], "fairlead_desired_replicas")
    evidence = f"{waiting:g} requests wait, the oldest for {oldest:.0f} s" if waiting else "requests found all full"
    desired = f", fairlead_desired_replicas is {wanted:g}" if wanted else ""
    return [OVERLOADED.at("", f"{evidence}; {known - out} endpoints serve{desired}")]


class _Mean(Struct):
    """The mean time from sending a request to its first token, of an endpoint's answers of the last minute."""

    id: str
    actual_ms: float | None = None


class _Endpoints(Struct, frozen=True):
    endpoints: list[_Mean] = []


class _Snapshot(Struct):
    now: _Endpoints = _Endpoints()


async def _late(site: Site) -> list[Finding]:
    shown = [page for page in (await site.each_pool("/dashboard/snapshot")).values() if page is not None]
    try:
        rows = [row for page in shown for row in convert(page, _Snapshot, strict=False).now.endpoints]
    except ValidationError:
        return []
    took = sorted(((row.actual_ms or 0.0) / 1e3, row.id) for row in rows)[::-1]
    return [
        LATE.at(name, f"{seconds:.1f} s at {name}, the mean of the last minute")
        for seconds, name in took
        if seconds > site.config.autoscaling.ttft
    ]


async def _gauges(site: Site) -> list[Finding]:
    return [
        kind.at(labels.get(label, ""), f"{name} is {value:g}")
        for name, wrong, label, kind in _GAUGES
        for labels, value in await site.metric(name)
        if value == wrong and labels.get("state", "open") == "open"
    ]


async def _alone(site: Site) -> list[Finding]:
    connected = await site.metric("fairlead_replicas_connected")
    if not connected:
        return []
    if not connected[0][1]:
        return [ALONE.at("", next((note for note in await _notes(site) if "decides alone" in note), ""))]
    if any(value for labels, value in await site.metric("fairlead_trouble") if labels.get("what") == "replicas"):
        page = await site.admin_json("/debug/replicas") or {}
        return [APART.at("", str(page.get("trouble", "")))]
    silent = max((seconds for _, seconds in await site.metric("fairlead_replicas_unheard_seconds")), default=0.0)
    lease = site.config.replicas.lease
    return [UNHEARD.at("", f"none for {silent:.0f} s")] if silent > lease else []


@check("scheduler", "the running scheduler is ready and has the configured endpoints", needs=("admin",))
async def scheduler(site: Site) -> list[Finding]:
    findings = [*await _ready(site), *await _metrics(site), *await _pool(site), *await _hidden(site)]
    findings += [*await _troubles(site), *await _alone(site), *await _gauges(site)]
    for labels, _ in await site.metric("fairlead_endpoint_out"):
        if labels.get("why") in _OUT:
            kind, evidence = _OUT[labels["why"]]
            findings.append(kind.at(labels.get("endpoint", ""), evidence))
    for labels, count in await site.metric("fairlead_plugin_errors_total"):
        if count:
            findings.append(PLUGINS.at(labels.get("plugin_name", ""), f"{count:g} times since the start"))
    unscheduled = sum(count for _, count in await site.metric("fairlead_fallback_requests_total"))
    asked = sum(count for _, count in await site.metric("llm_d_epp_request_total"))
    findings += [*await _present(site), *await _late(site)]
    if unscheduled > _MANY * (unscheduled + asked):
        findings.append(FALLBACKS.at("gateway", f"{unscheduled:g} of {unscheduled + asked:g} requests since the start"))
    return findings


CPU = Kind(
    "scheduling.cpu", Severity.ERROR, "the scheduler's process waits for the CPU",
    "give it its own core: raise its CPU request and limit, or move load generators off the machine", _SLOWNESS,
)  # fmt: skip
PLUGIN = Kind(
    "scheduling.plugin", Severity.ERROR, "one plugin takes most of the time of decisions",
    "remove it, or make it work over columns; `fairlead explain` shows what it adds to a decision", _SLOWNESS,
)  # fmt: skip
SLOW = Kind(
    "scheduling.slow", Severity.WARNING, "decisions take long",
    "check the sizes of prompts and pool; a remote scheduler adds network time, see scheduler.budget", _SLOWNESS,
)  # fmt: skip

_SLOW, _LATE = 0.05, 0.05
_QUANTILE = 0.95
#: The fewest observations from which a quantile is judged.
ENOUGH = 100
_MOST = 0.5


async def quantile(site: Site, name: str, share: float) -> tuple[float, float]:
    """(upper bound in seconds of the quantile's bucket; number of observations), over all series."""
    counts = {float(bound or inf): count for bound, count in (await _sums(site, f"{name}_bucket", "le")).items()}
    total = counts.get(inf, 0.0)
    bounds = sorted(bound for bound, count in counts.items() if count >= share * total)
    return (bounds[0] if bounds else 0.0), total


async def _sums(site: Site, metric: str, label: str) -> dict[str, float]:
    """The sum of a metric by the values of a label."""
    sums = defaultdict[str, float](float)
    for labels, value in await site.metric(metric):
        sums[labels.get(label, "")] += value
    return sums


@check("scheduling", "decisions are made quickly", needs=("admin",))
async def scheduling(site: Site) -> list[Finding]:
    lag, ticks = await quantile(site, "fairlead_loop_lag_seconds", _QUANTILE)
    findings = []
    if ticks >= ENOUGH and lag > _LATE:
        findings.append(CPU.at("", f"{_QUANTILE:.0%} of its timers fire within {lag:g} s"))
    slowest, decisions = await quantile(site, "llm_d_epp_scheduler_e2e_duration_seconds", _QUANTILE)
    if decisions < ENOUGH or slowest <= _SLOW:
        return findings
    evidence = f"{_QUANTILE:.0%} of {decisions:g} decisions within {slowest:g} s"
    sums = await _sums(site, "llm_d_epp_plugin_duration_seconds_sum", "plugin_name")
    worst = max(sums, key=lambda name: sums[name], default="")
    if worst and sums[worst] > _MOST * sum(sums.values()):
        return [
            *findings,
            PLUGIN.at(worst, f"{evidence}; {sums[worst]:.1f} s of {sum(sums.values()):.1f} s in plugins"),
        ]
    return findings or [SLOW.at("", evidence)]


SKEW = Kind(
    "balance.skew", Severity.WARNING, "one endpoint has a long queue while others have none",
    "with weights, lower those of prefix scorers against load. With the cost model, a cached prompt is worth the wait "
    "(`fairlead explain` shows it), or the server is slower than the others", _UNEVEN,
)  # fmt: skip
FOREIGN = Kind(
    "balance.foreign", Severity.WARNING, "an endpoint also serves requests from elsewhere",
    "send all clients through the gateway, and let one scheduler decide: independent ones do not see each other's "
    "requests, see docs/kubernetes.md#several-replicas", _UNEVEN,
)  # fmt: skip

UNLIKE = Kind(
    "balance.unlike-speeds", Severity.WARNING, "the learned speeds of equal servers differ",
    "if one is on slower or shared hardware this is right: label the hardware. If not, it computed something else "
    "while it was measured (requests past the gateway, another process). A restart of the server or the scheduler "
    "clears it", _UNEVEN,
)  # fmt: skip
STARVED = Kind(
    "balance.starved", Severity.WARNING, "an endpoint gets less than a tenth of its share for no visible reason",
    "`fairlead explain` shows what counts against it; filters, sessions and caches can keep requests away", _UNEVEN,
)  # fmt: skip

#: An endpoint with more waiting requests, and with more than this many times the others' median load, is overloaded.
_MANY_WAITING, _TIMES = 20.0, 4.0
#: There is a finding with more foreign requests than this, and more than this share of this scheduler's own requests.
#: A second scheduler sends as many requests as this one.
_STRANGERS, _STRANGE = 8.0, 0.5
#: A larger factor between the learned speeds of equal servers means that something is wrong.
_UNLIKE = 1.5
#: An endpoint with less than this share of its fair part of the last decisions is starved. Fair parts below the second
#: number of decisions are too small to judge.
_STARVED, _SHARE = 0.1, 10.0
#: How many decisions are read, and the cached share of a prompt from which on the cache determined the decision.
_LAST, _CACHED = 200, 0.3
#: Labels whose names contain one of these words may differ between equal servers: they name a pod or a place.
_OF_ONE = ("pod", "host", "index", "zone", "topology", "name")


def _group(row: Row) -> tuple[str, str]:
    return row.pool, row.labels.get(ROLE_LABEL, "")


def _serves(row: Row, model: str | None) -> bool:
    """Whether requests for a model may go there, as far as the scheduler knows its models."""
    return not (model and row.models) or model in row.models or model in row.adapters


def _peers(row: Row, rows: list[Row]) -> list[Row]:
    """The others that could have been chosen in its place."""
    names = {*row.models, *row.adapters}
    group = (peer for peer in rows if peer is not row and _group(peer) == _group(row))
    return [peer for peer in group if not names or any(_serves(peer, name) for name in names)]


def _looks(row: Row) -> Hashable:
    labels = {name: value for name, value in row.labels.items() if not any(word in name for word in _OF_ONE)}
    return row.block_size, row.num_blocks, frozenset(labels.items())


_prefill, _step = attrgetter("prefill_factor"), attrgetter("step_factor")


def _unlike(rows: list[Row]) -> list[Finding]:
    alike: dict[Hashable, list[Row]] = {}
    for row in rows:
        alike.setdefault(_looks(row), []).append(row)
    findings = []
    for group in alike.values():
        for part, factor in (("prefill", _prefill), ("steps", _step)):
            slowest, fastest = max(group, key=factor), min(group, key=factor)
            if factor(slowest) > _UNLIKE * factor(fastest):
                said = (
                    f"{part} take {factor(slowest):.2f} times the prior's there, {factor(fastest):.2f} at {fastest.id}"
                )
                findings.append(UNLIKE.at(slowest.id, said))
                break
    return findings


class _Decision(Struct):
    endpoint: str | None = None
    target_model: str | None = None
    prompt_tokens: int = 0
    predicted_hit_tokens: float = 0.0


class _Decisions(Struct):
    decisions: list[_Decision] = []


async def _starved(site: Site, rows: list[Row]) -> list[Finding]:
    """Findings from decisions that caches did not determine."""
    try:
        page = convert(await site.admin_json(f"/debug/decisions?last={_LAST}"), _Decisions, strict=False)
    except ValidationError:
        return []
    free = [made for made in page.decisions if made.predicted_hit_tokens < _CACHED * made.prompt_tokens]
    taken = Counter(made.endpoint for made in free)
    by_model = Counter((made.endpoint, made.target_model) for made in free)
    findings = []
    for row in rows:
        peers = _peers(row, rows)
        requests, share = 0, 0.0
        for model in {made.target_model for made in free if _serves(row, made.target_model)}:
            able = [each.id for each in (row, *peers) if _serves(each, model)]
            asked = sum(by_model[name, model] for name in able)
            requests, share = requests + asked, share + asked / len(able)
        if not peers or share < _SHARE or taken[row.id] >= _STARVED * share or row.suspicion != "well":
            continue
        busier = row.load > median(peer.load for peer in peers)
        fuller = (row.kv_usage or 0.0) > 0.1 + median(peer.kv_usage or 0.0 for peer in peers)
        slower = any(factor(row) > _UNLIKE * min(map(factor, peers)) for factor in (_prefill, _step))
        if not (busier or fuller or slower):
            said = f"{taken[row.id]} of the last {requests} requests without a cached beginning; {len(peers)} others"
            findings.append(STARVED.at(row.id, said))
    return findings


@check("balance", "load is spread over the endpoints", needs=("admin",))
async def balance(site: Site) -> list[Finding]:
    rows = [row for row in await site.rows() if row.fresh]
    findings = []
    for row in rows:
        peer_loads = [peer.load for peer in _peers(row, rows)]
        waiting, usual = row.waiting or 0.0, median(peer_loads) if peer_loads else 0.0
        if peer_loads and waiting > _MANY_WAITING and row.load > _TIMES * max(usual, 1.0):
            findings.append(SKEW.at(row.id, f"{waiting:g} wait there; the median of the others is {usual:g}"))
        if row.load - row.leases > max(_STRANGERS, _STRANGE * row.leases):
            findings.append(FOREIGN.at(row.id, f"it has {row.load:g} requests, {row.leases:g} of them from here"))
    return [*findings, *_unlike(rows), *await _starved(site, rows)]


DISTRUSTED = Kind(
    "hits.distrusted", Severity.ERROR, "KV events of an endpoint disagree with what it reports, and are ignored",
    "the evidence names the cause, and the table of causes says what to do; learned prefixes are used meanwhile",
    _SELF_CHECK,
)  # fmt: skip
NOT_REAL = Kind(
    "hits.not-real", Severity.ERROR, "engines report far fewer cached tokens than predicted",
    "other clients use the caches too, or caches are smaller than believed: check that every metrics page reports its "
    "blocks", "docs/runbook.md#fairleadhitsnotreal",
)  # fmt: skip
UNTOKENISED = Kind(
    "hits.no-tokens", Severity.WARNING, "KV events help few requests, because most prompts get no token ids",
    "set tokens.models for the models in use; docs/tokens.md lists the reasons", "docs/tokens.md",
)  # fmt: skip
LOW = Kind(
    "hits.low", Severity.WARNING, "few prompt tokens are found in caches",
    "prompts that begin with a date or an id never hit: let clients put it last. For new users and topics this is "
    "normal", _LOW_HITS,
)  # fmt: skip

#: The fewest requests and tokens from which a share is judged.
_REQUESTS, _TOKENS = 200, 100_000
_LOW, _HALF = 0.3, 0.5


async def _total(site: Site, name: str, without: str = "") -> float:
    """The sum of a metric over its label sets. `without`: a model that does not count."""
    return sum(value for labels, value in await site.metric(name) if not without or labels.get("model_name") != without)


async def _trust(site: Site) -> list[Finding]:
    connected = {labels.get("endpoint", "") for labels, _ in await site.metric("fairlead_kv_feed_connected")}
    causes: dict[str, dict[str, float]] = {}
    for labels, count in await site.metric("fairlead_kv_disagreements_total"):
        causes.setdefault(labels.get("endpoint", ""), {})[labels.get("cause", "")] = count
    findings = []
    for labels, now in await site.metric("fairlead_kv_source"):
        name = labels.get("endpoint", "")
        if labels.get("source") == "learned" and now and name in connected and causes.get(name):
            likely = max(causes[name], key=lambda cause: causes[name][cause])
            findings.append(DISTRUSTED.at(name, f"likely cause: {likely} ({causes[name][likely]:g} answers)"))
    return findings


async def _rate(site: Site) -> list[Finding]:
    # `other`: names that clients make up, with prompts that nobody computes.
    looked_up, hit = [await _total(site, f"kv_cache_{name}_total", without="other") for name in ("lookup", "hit")]
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


@check("hits", "enough prompt tokens are predicted to be cached, and engines confirm it", needs=("admin",))
async def hits(site: Site) -> list[Finding]:
    findings = await _trust(site)
    asked = await _total(site, "llm_d_epp_request_total")
    without = await _total(site, "fairlead_kv_prompts_without_tokens_total")
    if asked >= _REQUESTS and without > _HALF * asked:
        reasons = sorted(await site.metric("fairlead_kv_prompts_without_tokens_total"), key=lambda counted: -counted[1])
        evidence = f"{without:g} of {asked:g} requests; most often: {reasons[0][0].get('reason', '')}"
        findings.append(UNTOKENISED.at("", evidence))
    predicted = await _total(site, "fairlead_predicted_hit_tokens_total")
    reported = await _total(site, "fairlead_reported_cached_tokens_total")
    if predicted >= _TOKENS and reported < _HALF * predicted and not findings:
        findings.append(NOT_REAL.at("", f"{predicted:g} tokens predicted, {reported:g} reported"))
    return findings or await _rate(site)
