"""What the dashboard and `fairlead top` receive: plain structs, and notices of problems.

Field names end in their units; `None` = not known. Times of day are seconds since 1970. Counts are since the start,
rates over the last ten seconds, sums per endpoint over the last minute.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from fairlead.core.endpoint import PREFILL_ONLY, STAGES
from fairlead.core.fleet import ERRORS_TO_EJECT
from fairlead.core.kv.answered import AnsweredIndex
from fairlead.core.remote import CLOSED
from fairlead.core.trust import Finding
from fairlead.server.observe.component_metrics import SPEED
from fairlead.server.observe.troubles import NAMED, Happened, named
from fairlead.server.observe.watch import Watch


class Notice(Struct, frozen=True):
    """A problem in one sentence: `text`, then `since` (a time of day; `None` = not shown), then `detail`. `level`:
    `bad` (requests fail or are slower) or `watch`. `key`: the same as long as the problem lasts. A new `text` is read
    out, so figures that keep changing are in `detail`."""

    level: str
    key: str
    text: str
    since: float | None = None
    detail: str = ""
    #: The section of docs/runbook.md that says what to do; empty = there is none.
    runbook: str = ""


class EndpointRow(Struct, frozen=True, kw_only=True, gc=False):
    """One endpoint; rows are in the order in which endpoints joined."""

    id: str
    address: str
    #: Its base models, with commas; empty = not known.
    model: str
    role: str
    #: `serving`; `unread` (its metrics cannot be read) and `suspect` (it may hang) still get requests; `out` gets none
    #: but tests while another endpoint is available.
    state: str
    #: Why the state is not `serving`, and since when the endpoint is out.
    reason: str
    since: float | None
    fresh: bool
    #: Seconds since its last good scrape.
    age_s: float | None
    #: Requests as the engine reported them.
    waiting: float | None
    running: float | None
    #: Share of its KV blocks in use: as reported, or estimated while the report is not fresh.
    kv: float | None
    #: Requests before and past their first token, as decisions use them: the report, corrected by our requests since.
    queue: float
    active: float
    #: Our own requests in flight.
    leases: int
    #: For how many more seconds the endpoint is out of use because of failed responses in a row.
    avoided_s: float
    #: Whether it hangs: `well`, `suspect`, `out`.
    suspicion: str
    #: In the last minute: requests sent, and the share of the prompt tokens computed there that was predicted to be
    #: cached. If the journal held less than the minute when somebody began to look, `sent` is estimated from that for a
    #: minute; `None` = it held less than a second.
    sent: int | None
    hit_rate: float | None
    #: Streamed answers of the last minute: the mean times from sending to the first token, predicted and actual; the
    #: number of those with a forecast, which pairs lack; the share of these within the forecast's 90 % band.
    predicted_ms: float | None
    actual_ms: float | None
    judged: int
    inside: float | None
    #: Requests of the last minute that failed there, also those that another endpoint then answered.
    failed: int
    #: Where knowledge of its cache comes from: `learned`, or how far KV events are trusted.
    #: `trust`: 0..1, how often that knowledge was right. For KV events, the share of compared answers; for learned
    #: prefixes, how well predicted and reported cached tokens agree.
    source: str
    trust: float | None


class TrafficRow(Struct, frozen=True, kw_only=True):
    """Requests for one model in one band. The model `other` has those without series of their own."""

    model: str
    #: The name of the target model; empty = the same as `model`.
    target: str
    priority: str
    requests: int
    errors: int
    running: int
    per_s: float | None
    #: Without those whose clients left.
    refused_per_s: float | None
    hit_rate: float | None


class TargetRow(Struct, frozen=True):
    """A target model to which requests for a model are sent."""

    name: str
    #: Share of the model's requests; `None` = there were none.
    share: float | None
    #: How many endpoints report that they serve it.
    endpoints: int
    adapter: bool


class ModelRow(Struct, frozen=True, kw_only=True):
    """One model that clients request or endpoints serve. Rates and latencies are of the last ten seconds."""

    model: str
    targets: list[TargetRow]
    requests: int
    errors: int
    running: int
    per_s: float | None
    #: Share of the requests that were refused, ended with 4xx or 5xx, or were lost.
    error_rate: float | None
    #: Times to first token of streamed answers.
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    hit_rate: float | None


class FlowRow(Struct, frozen=True):
    """The waiting requests of one tenant for one model. `tenant`: empty = the requests name none."""

    tenant: str
    model: str
    waiting: int
    oldest_s: float
    bytes: int


class BandRow(Struct, frozen=True, kw_only=True):
    """The waiting requests of one band."""

    priority: int
    waiting: int
    bytes: int
    flows: int
    oldest_s: float
    #: Seconds at the present pace until the queues of this band and of all higher bands are empty.
    delay_s: float
    #: The used share of the limit that is used most (requests or bytes, band or whole queue); 0 = there is no limit.
    used: float
    #: The flows with the most waiting requests.
    longest: list[FlowRow] = []


class Queues(Struct, frozen=True, kw_only=True):
    """The queues of flow control; absent while it is off."""

    waiting: int
    #: How full the endpoints are on average; 1 = they take no more.
    saturation: float
    delay_s: float
    wanted_endpoints: int
    bands: list[BandRow]


class Quantiles(Struct, frozen=True):
    """Percentiles over the last ten seconds. `n`: the number of values."""

    n: int
    p50: float | None
    p95: float | None
    p99: float | None


class Latency(Struct, frozen=True, kw_only=True):
    """Latencies in milliseconds. `ttft` and `predicted`: actual and predicted times to first token of streamed answers.
    `answer`: durations of all good answers."""

    ttft: Quantiles
    predicted: Quantiles
    answer: Quantiles


class DecisionRow(Struct, frozen=True, kw_only=True):
    """One of the last decisions. `endpoint` is empty if the request was refused."""

    #: The request's number, as in `/debug/decisions/ID`.
    id: int
    at: float
    model: str
    tenant: str
    priority: int
    endpoint: str
    #: The endpoint that computes the prompt; empty = `endpoint` does.
    prefill: str
    #: The endpoint that answered instead; empty = `endpoint` did, or nobody has.
    answered_by: str
    outcome: str
    status: int
    stream: bool
    prompt_tokens: int
    hit_tokens: int
    queued_ms: float
    predicted_ms: float | None
    ttft_ms: float | None
    duration_ms: float | None
    #: HTTP status of the answer; 0 = it has not ended.
    ended: int
    cause: str


class ShadowRow(Struct, frozen=True, kw_only=True):
    """A policy on trial (shadow). Milliseconds are forecasts, as means per decision."""

    name: str
    agree: int
    differ: int
    refuse: int
    error: int
    regret_ms: float | None
    primary_regret_ms: float | None
    #: Why the shadow is cut off; empty = it is not.
    cut: str


class Totals(Struct, frozen=True, kw_only=True):
    """Counts since the start; `running` and the rates are present values. `requests` does not include requests that
    wait in the queue."""

    requests: int
    errors: int
    refused: int
    #: Requests at endpoints now.
    running: int
    #: Requests that arrived; requests that were decided, that is, sent to an endpoint or refused; refused requests.
    arrived_per_s: float | None
    per_s: float | None
    refused_per_s: float | None
    #: Answers with 4xx, and all other failures.
    client_errors_per_s: float | None
    server_errors_per_s: float | None
    #: Share of the ended requests that failed in one of these ways; `None` = none ended.
    error_rate: float | None
    prompt_tokens: float
    hit_tokens: float
    #: Forecasts of times to first token, and those that were right within their 90 % band.
    forecasts: int
    inside: int


class Point(Struct, frozen=True, kw_only=True):
    """One moment of the charts. Latencies are milliseconds; `None` = not known."""

    at: float
    ttft: tuple[float | None, float | None, float | None]
    predicted: float | None
    answer: tuple[float | None, float | None, float | None]
    arrived_per_s: float | None
    per_s: float | None
    client_errors_per_s: float | None
    server_errors_per_s: float | None
    waiting: int | None
    engines_waiting: float
    engines_running: float


class About(Struct, frozen=True, kw_only=True):
    """What stays the same in all snapshots."""

    version: str
    pool: str
    #: Seconds since 1970.
    started: float
    #: Seconds between two snapshots, and between two points of the charts.
    tick_s: float
    point_s: float


class Snapshot(Struct, frozen=True, kw_only=True):
    """Everything that the dashboard shows at one moment."""

    at: float
    #: Seconds since the start. Setting the system's clock does not change this.
    running_s: float
    policy: str
    notices: list[Notice]
    endpoints: list[EndpointRow]
    totals: Totals
    traffic: list[TrafficRow]
    #: How many rows of `traffic` were left out. Their requests are included in `totals`.
    traffic_left_out: int
    models: list[ModelRow]
    #: How many rows of `models` were left out.
    models_left_out: int
    latency: Latency
    queues: Queues | None
    decisions: list[DecisionRow]
    shadows: list[ShadowRow]
    #: Requests in flight that are charged to an endpoint.
    leases: int
    #: Entries of the prefix index, and whether KV events are subscribed to.
    index_size: int
    kv_events: bool
    #: The state of the link to other schedulers of the pool, as a text for people; empty = there is no link.
    replicas: str
    #: How many schedulers the pool has, this one included. `leases` are those of all schedulers; other counts are of
    #: this one only.
    schedulers: int
    #: The newest point of the charts.
    point: Point


class Beginning(Struct, frozen=True, kw_only=True):
    """The first event that a viewer receives."""

    about: About
    history: list[Point]


# Notices: sentences about problems and their consequences, the gravest first.
#
# Rules
# * One sentence per cause, not per endpoint: a hundred silent endpoints are one sentence with a count.
# * Only problems that exist now or existed within the last minute.

BAD, WATCH = "bad", "watch"
#: The name of the trouble, and the key of the notice.
MODELS_OUT = "models-out"
#: There are at most so many notices, and one sentence lists at most so many names.
_MOST = 6
#: Forecasts per minute that are enough to judge them, and the least share of them that must be within the 90 % band.
_ENOUGH, _LEAST_INSIDE = 50, 0.6
#: With at least this share of failed requests, the notice is `bad`, and a model is listed first.
MANY_FAIL = 0.05
#: Why an endpoint is out: the words for one endpoint and for several, and the section of the runbook.
REFUSED, HANGS, FAILS = "connection refused", "hangs", f"{ERRORS_TO_EJECT} failed answers in a row"
_DOES = {
    REFUSED: ("refuses connections", "refuse connections"),
    HANGS: ("hangs: nothing moves while there is work", "hang: nothing moves while there is work"),
    FAILS: (f"failed {ERRORS_TO_EJECT} answers in a row", f"failed {ERRORS_TO_EJECT} answers in a row"),
}
_RUNBOOK = {HANGS: "FairleadEndpointHangs", FAILS: "FairleadEndpointFails"}
#: A queue is mentioned if it uses more than this share of its limit.
_FULL = 0.9
#: A waiting request is mentioned after this many seconds.
_LONG_WAIT = 5.0


class Failures(Struct, frozen=True):
    """`since`: the time of day since when every request fails; `None` = some are answered, or there are no requests.
    `rate`: share of failed requests in the last seconds, without errors of clients (4xx)."""

    since: float | None = None
    rate: float = 0.0
    #: Models that no endpoint in use can answer, and since when (time of day).
    models: Mapping[str, float] = {}


def notices(
    watch: Watch,
    endpoints: Sequence[EndpointRow],
    failures: Failures,
    queues: Queues | None,
    reasons: Sequence[str],
    happened: Happened,
    now: float,
    schedulers: int = 1,
) -> list[Notice]:
    """All present notices, `bad` ones first, beyond `_MOST` only their number; empty = there are no problems.
    `reasons`: why this scheduler is not ready. `schedulers`: how many schedulers the pool has."""
    listed = [*_outage(endpoints, failures)]
    if reasons:
        listed.append(Notice(BAD, "ready", "Not ready", detail=f": {'; '.join(reasons)}."))
    listed += _unread(endpoints)
    listed += _suspect(endpoints)
    listed += _pressure(watch, queues, schedulers)
    listed += _choosers(watch)
    listed += _failing(watch, happened, now)
    listed += _events(watch, endpoints)
    listed += _forecasts(endpoints)
    listed += _troubles(watch)
    listed.sort(key=lambda notice: notice.level != BAD)
    if len(listed) > _MOST:
        first, left = listed[: _MOST - 1], listed[_MOST - 1 :]
        return [*first, Notice(left[0].level, "more", f"And {len(left)} more problems.")]
    return listed


def _outage(endpoints: Sequence[EndpointRow], failures: Failures) -> Iterable[Notice]:
    """Notices about models that are out, and about endpoints, one per reason; not about these if all requests fail."""
    by_reason: dict[str, list[EndpointRow]] = {}
    for row in endpoints:
        if row.state == "out":
            by_reason.setdefault(row.reason, []).append(row)
    out, all_of = sum(map(len, by_reason.values())), len(endpoints)
    if failures.since is not None:
        causes = [f"{_of(len(rows), all_of)} {_does(reason, rows)}" for reason, rows in by_reason.items()]
        why = ", ".join(causes) or (
            "the answers are errors, though endpoints are in use" if all_of else "no endpoint is known"
        )
        section = "FairleadNoEndpoints" if out == all_of else "FairleadErrorsHigh"
        yield Notice(BAD, "every", "Every request has failed", failures.since, f": {why}.", section)
    elif failures.rate > 0.0:
        level = BAD if failures.rate >= MANY_FAIL else WATCH
        what = f": {failures.rate:.1%} of those of the last 10 seconds."
        yield Notice(level, "some", "Requests fail", detail=what, runbook="FairleadErrorsHigh")
    if failures.models and out < all_of:
        what = f": {'its' if len(failures.models) == 1 else 'their'} requests fail."
        text, since = f"No endpoint has served {named([*failures.models])}", max(failures.models.values())
        yield Notice(BAD, MODELS_OUT, text, since, what, "FairleadModelOut")
    if failures.since is not None:
        return
    for reason, rows in by_reason.items():
        subject, verb = ("it", "has") if len(rows) == 1 else ("they", "have")
        if substitutes := _substitutes(rows, endpoints):
            elsewhere = f" Requests go to the other {substitutes}."
        elif out == all_of:
            elsewhere = " Requests fail or wait."
        else:
            elsewhere = " Requests are not split." if all(row.role in PREFILL_ONLY for row in rows) else ""
        since = max(row.since or 0.0 for row in rows)
        section = _RUNBOOK.get(reason, "FairleadEndpointStale") if out < all_of else "FairleadNoEndpoints"
        what = f": {subject} {_does(reason, rows)}.{elsewhere}"
        text = f"{_listed(rows, all_of, 'Endpoint')} {verb} been out of use"
        yield Notice(BAD, f"out {reason}", text, since, what, section)


def _substitutes(rows: Iterable[EndpointRow], endpoints: Iterable[EndpointRow]) -> int:
    """The number of endpoints in use that can do a stage of one of `rows`, for a model of it (not known = any)."""
    lost = {(row.model, row.role) for row in rows}
    left = Counter((row.model, row.role) for row in endpoints if row.state != "out")
    return sum(count for kind, count in left.items() if any(_replaces(kind, gone) for gone in lost))


def _replaces(kind: tuple[str, str], lost: tuple[str, str]) -> bool:
    (models, role), (lost_models, lost_role) = kind, lost
    shared = not models or not lost_models or {*models.split(", ")} & {*lost_models.split(", ")}
    return bool(shared) and any(role in roles and lost_role in roles for roles in STAGES.values())


def _does(reason: str, rows: Sequence[EndpointRow]) -> str:
    singular, plural = _DOES.get(reason, (f"does not answer ({reason})", f"do not answer ({reason})"))
    return singular if len(rows) == 1 else plural


def _of(count: int, of: int) -> str:
    return f"{count} of {of} endpoint" + ("s" if of != 1 else "")


def _unread(endpoints: Sequence[EndpointRow]) -> Iterable[Notice]:
    rows = [row for row in endpoints if row.state == "unread"]
    if rows:
        level = BAD if len(rows) == len(endpoints) else WATCH
        reasons = [*dict.fromkeys(row.reason for row in rows if row.reason)][:NAMED]
        why = f" ({', '.join(reasons)})" if reasons else ""
        text = f"The metrics of {_listed(rows, len(endpoints))} cannot be read{why}; load is estimated."
        yield Notice(level, "unread", text, runbook="FairleadEndpointStale")


def _suspect(endpoints: Sequence[EndpointRow]) -> Iterable[Notice]:
    rows = [row for row in endpoints if row.state == "suspect"]
    if rows:
        verb = "seems" if len(rows) == 1 else "seem"
        text = f"{_listed(rows, len(endpoints), 'Endpoint')} {verb} to hang: nothing moves while there is work."
        yield Notice(BAD, "suspect", text, runbook="FairleadEndpointHangs")


def _pressure(watch: Watch, queues: Queues | None, schedulers: int) -> Iterable[Notice]:
    if watch.metrics.scale_up_wanted():
        text = "Within the last minute, all endpoints that could serve a request were overloaded: add replicas."
        yield Notice(BAD, "scale-up", text, runbook="FairleadScaleUp")
    full = max((band.used for band in queues.bands), default=0.0) if queues is not None else 0.0
    if full > _FULL:
        what = f": {full:.0%} of its limit; beyond it requests are refused."
        yield Notice(BAD, "full", "The queue is nearly full", detail=what, runbook="FairleadQueueFull")
    if queues is not None and queues.waiting:
        oldest = max(band.oldest_s for band in queues.bands)
        if oldest >= _LONG_WAIT:
            whose = "the" if schedulers == 1 else "this scheduler's"
            what = f": {queues.waiting:,}, the longest for {_seconds(oldest)}; no endpoint that can serve has room."
            yield Notice(WATCH, "waiting", f"Requests wait in {whose} queue", detail=what, runbook="FairleadSaturated")


def _choosers(watch: Watch) -> Iterable[Notice]:
    for name, policy in watch.choosers.remotes.items():
        text = ""
        if not policy.connected:
            text = f"The external scheduler '{name}' is not connected; the built-in policy decides."
        elif policy.breaker.state != CLOSED:
            text = f"The external scheduler '{name}' failed too often; the built-in policy decides for now."
        if text:
            yield Notice(BAD, f"external {name}", text, runbook="FairleadSchedulerFallback")
    for name, reason in watch.shadows.cut().items():
        text = f"The shadow '{name}' is cut off ({reason}); traffic is not affected."
        yield Notice(WATCH, f"shadow {name}", text, runbook="FairleadShadowCutOff")


def _events(watch: Watch, endpoints: Sequence[EndpointRow]) -> Iterable[Notice]:
    """Notices about KV events of endpoints that are in use: one per cause of distrust, one about lost connections."""
    exact = watch.fleet.exact
    if exact is None:
        return
    stopped: list[EndpointRow] = []
    distrusted: dict[str, tuple[dict[str, None], list[EndpointRow]]] = {}
    for (slot, _), row in zip(watch.fleet.table.slots(), endpoints, strict=True):
        if row.state == "out":
            continue
        if exact.check.trust(slot).distrusted:
            finding = exact.check.finding(slot) or Finding("")
            details, rows = distrusted.setdefault(finding.cause, ({}, []))
            details[finding.detail or finding.cause] = None
            rows.append(row)
        elif any(cache.heard and not cache.linked for cache in exact.index.caches_of(slot)):
            stopped.append(row)
    for cause, (details, rows) in distrusted.items():
        why = f" Likely cause: {'; '.join([*details][:NAMED])}." if cause else ""
        at_most = "at most " if len(rows) > 1 else ""
        what = (
            f": predictions came true in {at_most}{max(row.trust or 0.0 for row in rows):.0%} of the last answers; "
            f"learned knowledge is used instead.{why}"
        )
        text = f"KV events of {_listed(rows, len(endpoints))} are not trusted"
        yield Notice(WATCH, f"distrusted {cause}", text, detail=what, runbook="FairleadIndexNotTrusted")
    if stopped:
        caches = "its cache" if len(stopped) == 1 else "their caches"
        verb, section = "have stopped", "FairleadKvFeedDown"
        if isinstance(exact.index, AnsweredIndex):
            verb, section = "do not come from the indexer", "FairleadIndexerDown"
        text = f"KV events of {_listed(stopped, len(endpoints))} {verb}; later changes of {caches} are unknown."
        yield Notice(WATCH, "stopped", text, runbook=section)


def _forecasts(endpoints: Iterable[EndpointRow]) -> Iterable[Notice]:
    rows = [row for row in endpoints if row.judged]
    judged = sum(row.judged for row in rows)
    if judged < _ENOUGH:
        return
    inside = sum(row.judged * (row.inside or 0.0) for row in rows) / judged
    if inside < _LEAST_INSIDE:
        text = "Few first tokens come within their forecast's 90 % band"
        what = f": {inside:.0%} of the last minute's; decisions rest on forecasts that are off."
        yield Notice(WATCH, "forecasts", text, detail=what, runbook="FairleadForecastsOff")


#: Sections of the runbook for restrictions whose names begin so; the others share one.
_SECTIONS = {
    "gateway-uploads": "FairleadUploadsEnded",
    "journal": "FairleadJournalLoses",
    "kubernetes": "FairleadKubeLost",
    SPEED: "EPPHighLatency",
}


def _troubles(watch: Watch) -> Iterable[Notice]:
    for what, reason in watch.troubles.look().items():
        if what not in ("scrapes", "gateway", MODELS_OUT):  # other notices name these, and say why it is not ready
            section = next((section for name, section in _SECTIONS.items() if what.startswith(name)), "FairleadTrouble")
            # A second bad configuration may follow on a first one: its reason is new, and contains no changing figures.
            text, detail = ("Restricted", f": {reason}.") if what != "configuration" else (f"Restricted: {reason}.", "")
            yield Notice(BAD, f"trouble {what}", text, detail=detail, runbook=section)


def _listed(rows: Sequence[EndpointRow], of: int, single: str = "endpoint") -> str:
    names = named([row.id for row in rows])
    return f"{single} {names}" if len(rows) == 1 else f"{len(rows)} of {of} endpoints ({names})"


def _seconds(value: float) -> str:
    if value < 120.0:
        return f"{value:.0f} s"
    return f"{value / 60.0:.0f} min" if value < 7200.0 else f"{value / 3600.0:.0f} h"


def momentary(watch: Watch) -> dict[str, float]:
    """The counters that should not grow, by name."""
    plugins = watch.metrics.families.plugin_errors.children.items()
    return {
        "bypassed": watch.metrics.bypassed,
        "expired": watch.metrics.families.expired.child().value,
        **{f"plugin {name}": counter.value for (name,), counter in plugins},
    }


def _failing(watch: Watch, happened: Happened, now: float) -> Iterable[Notice]:
    for name, count in momentary(watch).items():
        if not happened.lately(name, count, now):
            continue
        so_often = f" ({count:,.0f} since the start)"
        if name == "bypassed":
            slow = watch.tempo.trouble()
            what = f"{so_often}; {slow or 'it could not reach the scheduler, or not in time'}."
            text = "The gateway serves requests without asking us"
            yield Notice(BAD, name, text, detail=what, runbook="EPPHighLatency" if slow else "FairleadBypassed")
        elif name == "expired":
            what = f"{so_often}; check the gateway's access log."
            text = "Some requests' ends are never reported"
            yield Notice(WATCH, name, text, detail=what, runbook="FairleadLeasesExpire")
        else:
            text, what = f"The plugin '{name.partition(' ')[2]}' fails", f"{so_often} and is left out."
            yield Notice(BAD, name, text, detail=what, runbook="FairleadPluginFails")
