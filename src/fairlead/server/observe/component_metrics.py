"""Metrics of optional parts: remote schedulers, shadows, Kubernetes, tokenisers, the journal and others.

Most values are read whenever the metrics page is rendered.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import DecodeError, Struct
from msgspec.json import decode, encode
from msgspec.structs import asdict

from fairlead.apis.tokens import PromptTokeniser
from fairlead.core.beginnings import Beginnings
from fairlead.core.canary import Canary
from fairlead.core.policy import Policy
from fairlead.core.records import DecisionRecord, ShadowRecord, ShadowVerdict
from fairlead.core.remote import STATES, RemotePolicy
from fairlead.gateway.envoy.admin import Vitals
from fairlead.gateway.h2_limits import ByteBudget
from fairlead.server.journal.recorder import Counts
from fairlead.server.observe.exposition import Registry
from fairlead.server.observe.instruments import Histogram, Readings, counters, gauges, histograms
from fairlead.server.observe.log import get
from fairlead.server.observe.metrics import UNDECIDED
from fairlead.server.observe.troubles import HOLD_S, Happened
from fairlead.server.replicas import Replicas
from fairlead.server.state import StateCounts

if TYPE_CHECKING:
    from fairlead.pool.kube.reflector import Reflector

log = get("gateway")

#: Bounds of histograms of answer times, in seconds.
BOUNDS = (0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_SUMS = ("asked", "queued", "answered", "refused", "late", "alternatives")


class ChooserMetrics:
    """Metrics of remote schedulers and of a canary. `follow` sets which of them exist."""

    def __init__(self, registry: Registry) -> None:
        #: Schedulers in other processes, by name.
        self.remotes: Mapping[str, RemotePolicy] = {}
        #: The name under which a canary's decisions are recorded; empty = there is no canary.
        self._label = ""
        self._sums = counters("scheduler", "event")
        self._fallbacks = counters("scheduler", "reason")
        self._connected = gauges("scheduler")
        self._breaker = gauges("scheduler", "state")
        self._opened = counters("scheduler")
        self._took = histograms("scheduler", bounds=BOUNDS)
        self._canary = counters("side")
        registry.before(self._refresh)
        show = registry.show
        show("fairlead_scheduler_requests_total", "Requests of a scheduler in another process, by event.", self._sums)
        show("fairlead_scheduler_fallbacks_total", "Requests the fallback policy decided, by reason.", self._fallbacks)
        show("fairlead_scheduler_connected", "1 while the scheduler is connected.", self._connected)
        show("fairlead_scheduler_breaker", "1 for the current state of the circuit breaker.", self._breaker)
        show("fairlead_scheduler_breaker_opened_total", "How often the circuit breaker opened.", self._opened)
        show("fairlead_scheduler_answer_seconds", "Time from question to answer, within the budget.", self._took)
        show("fairlead_canary_decisions_total", "Decisions, by the side that made them.", self._canary)

    def follow(self, remotes: Mapping[str, RemotePolicy], policy: Policy) -> None:
        """Call this at the start and after each reload. `policy` is the deciding one, which may be a canary."""
        self.remotes = remotes
        self._label = policy.label if isinstance(policy, Canary) else ""

    def on_decisions(self, records: Sequence[DecisionRecord]) -> None:
        if self._label:
            for record in records:
                if record.outcome not in UNDECIDED:
                    self._canary.child("canary" if record.policy == self._label else "primary").value += 1

    def took(self, scheduler: str) -> Histogram:
        """The histogram of how many seconds the scheduler's answers take."""
        return self._took.child(scheduler)

    def _refresh(self) -> None:
        for family in (self._connected, self._breaker):
            family.children.clear()
        for name, policy in self.remotes.items():
            stats = policy.stats
            sums = asdict(stats)
            for event in _SUMS:
                self._sums.child(name, event).value = sums[event]
            for reason, count in stats.fallbacks.items():
                self._fallbacks.child(name, reason).value = count
            self._connected.child(name).set(policy.connected)
            for state in STATES:
                self._breaker.child(name, state).set(policy.breaker.state == state)
            self._opened.child(name).value = policy.breaker.opened


#: Bounds of the histogram of seconds that a shadow takes for a decision.
REGRET_BOUNDS = (0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1)


class ShadowMetrics:
    """How shadows differ from the deciding policy. All milliseconds are forecasts. `skipped` returns the number of
    cases without a verdict by shadow (empty = built-in ones) and reason, `cut` the shadows that are cut off → why."""

    def __init__(
        self,
        registry: Registry,
        skipped: Callable[[], Mapping[tuple[str, str], int]],
        cut: Callable[[], Mapping[str, str]],
    ) -> None:
        self.skipped = skipped
        self.cut = cut
        #: Records so far. A decision has one record for all built-in shadows, and one for each remote shadow.
        self.judged = 0
        self._decisions = counters("shadow", "verdict")
        self._regret = counters("shadow")
        self._gain = counters("shadow", "sign")
        self._primary = counters()
        self._took = histograms("shadow", bounds=REGRET_BOUNDS)
        self._skipped = counters("shadow", "reason")
        registry.before(self._refresh)
        show = registry.show
        text = "What shadows would have done: agree, differ, refuse, error."
        show("fairlead_shadow_decisions_total", text, self._decisions)
        text = "Reference cost of a shadow's choices above the lowest possible, without patience."
        show("fairlead_shadow_regret_milliseconds_total", text, self._regret)
        text = "Reference cost of the choices that were made above the lowest possible, without patience."
        show("fairlead_shadow_primary_regret_milliseconds_total", text, self._primary)
        text = "Forecast TTFT where requests went, less that of the shadow's choice, by sign."
        show("fairlead_shadow_predicted_gain_milliseconds_total", text, self._gain)
        show("fairlead_shadow_seconds", "Time that a shadow took for a decision.", self._took)
        text = "Decisions without a shadow's verdict, by reason; without a name: all built-in shadows."
        show("fairlead_shadow_skipped_total", text, self._skipped)
        text = "1 for a shadow that was cut off."
        registry.follow("gauge", "fairlead_shadow_cut_off", text, lambda: dict.fromkeys(self.cut(), 1), "shadow")

    def on_shadow(self, record: ShadowRecord) -> None:
        self.judged += 1
        self._primary.child().value += record.regret_ms
        for verdict in record.verdicts:
            name = verdict.shadow
            self._decisions.child(name, _kind(verdict)).value += 1
            self._took.child(name).observe(verdict.took_us * 1e-6)
            if verdict.endpoint:
                self._regret.child(name).value += verdict.regret_ms
                sign = "gain" if verdict.gain_ms >= 0 else "loss"
                self._gain.child(name, sign).value += abs(verdict.gain_ms)

    def totals(self) -> dict[str, dict[str, float]]:
        """By shadow: decisions by verdict, and milliseconds of regret."""
        by_shadow: dict[str, dict[str, float]] = {}
        for (name, verdict), counter in self._decisions.children.items():
            by_shadow.setdefault(name, {})[verdict] = counter.value
        for (name,), counter in self._regret.children.items():
            by_shadow.setdefault(name, {})["regret_ms"] = counter.value
        return by_shadow

    @property
    def primary_regret_ms(self) -> float:
        """The regret of the deciding policy, summed over all records of shadows, in milliseconds."""
        return self._primary.child().value

    def _refresh(self) -> None:
        for (shadow, reason), count in self.skipped().items():
            self._skipped.child(shadow, reason).value = count


def _kind(verdict: ShadowVerdict) -> str:
    if verdict.error:
        return "error"
    if not verdict.endpoint:
        return "refuse"
    return "agree" if verdict.agrees else "differ"


#: The name of the trouble that `Tempo` reports.
SPEED = "speed"
#: The event loop is too slow if its timers fire this many seconds late, smoothed: each turn has the weight `_WEIGHT`.
SLOW_S, _WEIGHT = 0.2, 0.3
#: Seconds for which it is still reported as slow, so that a long pause every few seconds is one trouble.
CALM_S = 10.0
#: A policy is named as the cause if it takes at least this share of the time.
_DOMINATES = 0.3


class Tempo:
    """Whether the event loop is too slow, and the policy that takes most of its time. `policies`: the histograms of
    seconds for a decision, by labels that end with the policy's name."""

    def __init__(self, policies: Mapping[tuple[str, ...], Histogram], now: Callable[[], float]) -> None:
        self._policies, self._now = policies, now
        self._late_s = 0.0
        #: Until when the event loop is reported as slow (clock seconds), and the longest delay of its timers since.
        self._slow_until, self._worst_s = -inf, 0.0
        #: When the last turn began and, by policy: seconds and decisions until then.
        self._turned_time = now()
        self._before: dict[str, tuple[float, int]] = {}
        self._cause = ""

    def turned(self, late_s: float) -> None:
        """Take the seconds that a timer of the event loop fired late. Call it twice a second."""
        now, reported = self._now(), bool(self.trouble())
        self._late_s += _WEIGHT * (late_s - self._late_s)
        self._worst_s = max(late_s, self._worst_s if reported else 0.0)
        if self.slow():
            self._slow_until = now + CALM_S
        took = {key[-1]: (each.sum, sum(each.counts)) for key, each in self._policies.items()}
        passed, self._turned_time = now - self._turned_time, now
        cause = self._cause if self.trouble() else ""
        for name, (seconds, count) in took.items():
            before_s, before = self._before.get(name, (0.0, 0))
            if passed > 0.0 and seconds - before_s >= _DOMINATES * passed and count > before:
                each_ms = 1e3 * (seconds - before_s) / (count - before)
                cause = f"; the policy '{name}' takes {each_ms:.0f} ms for a decision"
        self._before, self._cause = took, cause

    def slow(self) -> bool:
        """Whether the event loop is too slow now, unlike `trouble`, which also tells of the last `CALM_S`."""
        return self._late_s >= SLOW_S

    def trouble(self) -> str:
        """Why requests wait for this process; empty = they do not."""
        if self._now() >= self._slow_until:
            return ""
        return f"the scheduler is too slow: its event loop is up to {self._worst_s:.1f} s late{self._cause}"


#: Seconds without an answer after which an Envoy counts as down.
DOWN_S = 3.0
#: What may go wrong with the issuer's keys, and its count.
_FAILURES = {"fetches": attrgetter("key_failures"), "certificates": attrgetter("untrusted")}


class GatewayMetrics:
    """Metrics from the statistics of the gateway's Envoys. `keep`: the file with their counts, from which the next
    scheduler continues; `None` = the counts are not kept. `envoys`: their number. `slow`: whether this process is
    too slow to read answers in time, or cannot ask."""

    def __init__(
        self,
        registry: Registry,
        keep: Path | None,
        envoys: int,
        now: Callable[[], float],
        slow: Callable[[], bool] = lambda: False,
    ) -> None:
        self._keep, self._now, self._slow = keep, now, slow
        #: When each Envoy last answered.
        self._answered = [now()] * envoys
        #: The sum of the last counts of all Envoys that died, and the last count of each present Envoy.
        self._before, self._last = self._kept(envoys)
        self._unscheduled, self._heap = Readings("counter"), Readings("gauge")
        #: The last vitals of each Envoy; since the first ones, how often an Envoy was replaced, and answers by class.
        self._seen: dict[int, Vitals] = {}
        self._restarts, self._answers = 0, Counter[str]()
        self._happened = Happened(HOLD_S)
        text = "Requests that the embedded gateway balanced on its own, by its own count, also without a scheduler."
        registry.show("fairlead_unscheduled_requests_total", text, self._unscheduled)
        text = "Share of its heap limit that the embedded gateway has taken; large uploads are ended from 0.6 on."
        registry.show("fairlead_gateway_heap_ratio", text, self._heap)
        text = "0 while an Envoy of the embedded gateway does not answer; else 1."
        registry.follow("gauge", "fairlead_gateway_up", text, lambda: int(not self.trouble()))
        text = "Times that an Envoy of the embedded gateway ended, with all its requests, and was started again."
        registry.follow("counter", "fairlead_gateway_restarts_total", text, lambda: self._restarts)
        text = "Answers of the embedded gateway to clients, by class, also those that it gave without the scheduler."
        registry.follow("counter", "fairlead_gateway_responses_total", text, lambda: self._answers, "class")

    def trouble(self) -> str:
        """Why the gateway is in trouble: an Envoy does not answer; empty = all answer, as far as one can tell. While
        this process is too slow, no Envoy is judged, and they have the usual time afterwards."""
        if self._slow():
            self._answered = [self._now()] * len(self._answered)
        silent = sum(self._now() - time_s > DOWN_S for time_s in self._answered)
        return f"the embedded gateway does not answer ({silent} of {len(self._answered)} Envoys)" if silent else ""

    def keyless(self) -> str:
        """Why the keys of `gateway.jwt.jwksUri` are missing or get old; empty = they are fetched."""
        now = self._now()
        failed, untrusted = (
            [self._happened.lately(f"{name} {number}", count(each), now) for number, each in self._seen.items()]
            for name, count in _FAILURES.items()
        )
        if not any(failed):
            return ""
        text = "the issuer's keys cannot be fetched from gateway.jwt.jwksUri, and tokens of keys not fetched before are"
        why = "its server's certificate is for another host, or not trusted (gateway.jwt.caFile)"
        return f"{text} refused: {why}" if any(untrusted) else f"{text} refused"

    def take(self, vitals: Sequence[Vitals | None]) -> None:
        """Take the vitals of each Envoy; `None` = it does not answer."""
        known = {number: each for number, each in enumerate(vitals) if each is not None}
        for number in known:
            self._answered[number] = self._now()
        if not known:
            return
        for number, each in known.items():
            if number not in self._seen:  # a scheduler that died may have reported these
                for name, failures in _FAILURES.items():
                    self._happened.begin(f"{name} {number}", failures(each))
            before = self._seen.get(number, each)
            self._seen[number] = each
            replaced = each.asked < before.asked
            self._restarts += replaced
            earlier = {} if replaced else before.answers
            for kind, count in each.answers.items():
                self._answers[kind] += max(count - earlier.get(kind, 0), 0)
        counts = [known[number].unscheduled if number in known else last for number, last in enumerate(self._last)]
        if counts != self._last:
            # If a count went down, a new Envoy has replaced one that died.
            self._before += sum(last for count, last in zip(counts, self._last, strict=True) if count < last)
            self._last = counts
            if self._keep is not None:
                with suppress(OSError):
                    self._keep.write_bytes(encode((self._before, counts)))
        self._unscheduled.take({(): self._before + sum(counts)})
        self._heap.take({(): max(each.heap for each in known.values())})

    def _kept(self, envoys: int) -> tuple[int, list[int]]:
        if self._keep is not None:
            with suppress(OSError, DecodeError):
                before, last = decode(self._keep.read_bytes(), type=tuple[int, list[int]])
                if len(last) == envoys:
                    return before, last
        return 0, [0] * envoys


#: Seconds between two log lines about uploads, and for how many seconds `/readyz` shows them.
_UPLOADS_GAP = 10.0
_MAX_CLIENTS, _NAMED = 256, 3
_WORDS = {
    "memory": "to keep its memory",
    "paused": "that paused",
    "slow": "that took too long",
    "address": "because others from the same address held their share",
}


class UploadMetrics:
    """Uploads that the embedded gateway ended before they were complete, by client and reason."""

    def __init__(self, registry: Registry, now: Callable[[], float]) -> None:
        self._now = now
        self._ended = counters("reason", cap=16, fold=("reason",))
        for reason in _WORDS:
            self._ended.child(reason)
        self._since = -inf
        #: Recent bytes by client, and recent uploads by reason.
        self._clients: dict[str, int] = {}
        self._reasons: dict[str, int] = {}
        self._logged_at = -inf
        text = "Uploads that the embedded gateway ended: memory (it was short of it), paused, slow, address (others "
        text += "from the same address held its share of the memory)."
        registry.show("fairlead_uploads_ended_total", text, self._ended)

    def ended(self, client: str, received: int, reason: str) -> None:
        """Count an upload of `client` that the gateway ended. `received`: the bytes that had arrived."""
        self._ended.child(reason).inc()
        now = self._now()
        if now - self._since > _UPLOADS_GAP:
            self._since = now
            self._clients.clear()
            self._reasons.clear()
        if client in self._clients or len(self._clients) < _MAX_CLIENTS:
            self._clients[client] = self._clients.get(client, 0) + received
        self._reasons[reason] = self._reasons.get(reason, 0) + 1
        if now - self._logged_at > _UPLOADS_GAP:
            self._logged_at = now
            log.warning("the gateway is ending uploads", **self._reasons, megabytes_by_client=self._who())

    def note(self) -> str:
        """One sentence about uploads that were ended in the last seconds; empty = there were none."""
        if self._now() - self._since > _UPLOADS_GAP:
            return ""
        what = ", ".join(f"{count} {_WORDS.get(reason, reason)}" for reason, count in self._reasons.items())
        return f"overloaded by uploads: the gateway ended {what}; megabytes by client: {self._who()}"

    def _who(self) -> str:
        most = sorted(self._clients.items(), key=lambda item: -item[1])[:_NAMED]
        return ", ".join(f"{client} {size / 1e6:.1f}" for client, size in most)


def show_unheard(registry: Registry, unheard: Callable[[], Mapping[str, int]]) -> None:
    text = (
        "Outcomes that a scheduler in another process or a shadow was too slow to hear; no name: all built-in shadows."
    )
    registry.follow("counter", "fairlead_unheard_outcomes_total", text, unheard, "listener")


def show_spans(registry: Registry, dropped: Callable[[], int]) -> None:
    text = "Spans that could not be sent to the collector."
    registry.follow("counter", "fairlead_spans_dropped_total", text, dropped)


def show_budget(registry: Registry, budget: ByteBudget) -> None:
    """Show the memory that unfinished and waiting requests hold."""
    follow = registry.follow
    text = "Bytes of request bodies that are incomplete or wait here."
    follow("gauge", "fairlead_buffered_bytes", text, lambda: budget.used)
    text = "The limit of the bytes of bodies that wait here."
    follow("gauge", "fairlead_buffered_limit_bytes", text, lambda: budget.limit)
    follow("gauge", "fairlead_buffered_waiting", "Uploads that wait for room in the buffer.", lambda: budget.waiting)
    text = "Streams ended for lack of room: refused at the start (full), or too slow while others waited."
    ended = "fairlead_buffered_refused_total"
    follow("counter", ended, text, lambda: {"full": budget.refused, "slow": budget.cut}, "why")


#: The counts of a reflector, and their help texts.
_KUBE_COUNTS = {
    "lists": "Full lists read.",
    "watches": "Watches that were started.",
    "failures": "Requests to the API server that failed or were refused.",
    "events": "Changes received from watches.",
    "unreadable": "Objects that could not be read.",
}


class KubeMetrics:
    """Metrics of the connection to Kubernetes. Without values until `follow` is called."""

    def __init__(self, registry: Registry) -> None:
        #: Return the reflectors by resource (plural name), and the status conditions written by pool.
        self._followed: Callable[[], Mapping[str, Reflector[Any]]] = dict
        self._writes: Callable[[], Mapping[str, int]] = dict
        self.leader = gauges("lease")
        text = "1 while the API server answers for this resource."
        registry.follow("gauge", "fairlead_kube_connected", text, lambda: self._each("connected"), "resource")
        registry.follow("gauge", "fairlead_kube_objects", "Objects currently known.", self._objects, "resource")
        for name, text in _KUBE_COUNTS.items():
            registry.follow("counter", f"fairlead_kube_{name}_total", text, partial(self._each, name), "resource")
        registry.show("fairlead_kube_leader", "1 while this replica leads.", self.leader)
        text = "Status conditions written."
        registry.follow("counter", "fairlead_kube_status_writes_total", text, lambda: self._writes(), "pool")

    @property
    def standby(self) -> bool:
        """Whether there is leader election and this replica does not lead."""
        return any(not leads.value for leads in self.leader.children.values())

    def follow(
        self, source: "Callable[[], Mapping[str, Reflector[Any]]]", writes: Callable[[], Mapping[str, int]] = dict
    ) -> None:
        self._followed, self._writes = source, writes

    def trouble(self) -> str:
        """The resources whose changes are not seen, and why, as a sentence; empty = none."""
        lost: dict[str, list[str]] = {}
        for resource, reflector in self._followed().items():
            stats = reflector.stats
            if stats.trouble or not stats.connected:
                lost.setdefault(stats.trouble or "no answer yet", []).append(resource)
        what = "; ".join(f"changes of {', '.join(resources)} are not seen: {why}" for why, resources in lost.items())
        return f"{what}; the last known state stays in force" if lost else ""

    def _objects(self) -> dict[str, int]:
        return {name: len(reflector.items) for name, reflector in self._followed().items()}

    def _each(self, field: str) -> dict[str, int]:
        return {name: asdict(reflector.stats)[field] for name, reflector in self._followed().items()}


_STATES = ("agrees", "differs", "unknown")


class TokenMetrics:
    """Metrics of tokenisers, their cache, and whether engines agree with them. `tokeniser` returns the tokenisers that
    are loaded now, `check_states` the result of the token check by model. `without`: prompts without token ids, by
    reason; `None` = not shown here."""

    def __init__(
        self,
        registry: Registry,
        tokeniser: Callable[[], PromptTokeniser],
        check_states: Callable[[], Mapping[str, str]],
        without: Mapping[str, int] | None = None,
    ) -> None:
        self._tokeniser, self._check_states = tokeniser, check_states
        follow, prefix = registry.follow, "fairlead_tokens_cache_"
        text = "1 for the library and the template that turn a model's prompts into tokens; none = there is none."
        follow("gauge", "fairlead_tokens_model", text, self._loaded, "model", "tokeniser", "template")
        text = "1 for the result of comparing token ids with an engine: agrees, differs, unknown."
        follow("gauge", "fairlead_tokens_parity", text, self._agreement, "model", "state")
        text = "Size of the cache of tokens, in bytes."
        follow("gauge", prefix + "bytes", text, lambda: cache.bytes if (cache := tokeniser().cache) is not None else 0)
        text = "Characters looked up in the cache of tokens."
        asked = prefix + "asked_total"
        follow("counter", asked, text, lambda: cache.asked if (cache := tokeniser().cache) is not None else 0)
        text = "Characters found in the cache of tokens."
        hits = prefix + "found_total"
        follow("counter", hits, text, lambda: cache.hits if (cache := tokeniser().cache) is not None else 0)
        if without is not None:
            text = "Prompts without token ids, whose tokens were estimated, by reason."
            follow("counter", "fairlead_tokens_missing_total", text, lambda: without, "reason")

    def _loaded(self) -> dict[tuple[str, str, str], int]:
        models = self._tokeniser().states().items()
        libraries = {name: model.tokeniser.library if model.tokeniser is not None else "none" for name, model in models}
        return {(name, libraries[name], "ok" if model.templates else "none"): 1 for name, model in models}

    def _agreement(self) -> dict[tuple[str, str], int]:
        results = self._check_states().items()
        return {(model, state): int(result == state) for model, result in results for state in _STATES}


def show_journal(registry: Registry, counts: Counts) -> None:
    """Show the counts of the journal on disk, which are read at each rendering."""
    prefix, follow = "fairlead_journal_", registry.follow
    follow("counter", prefix + "records_total", "Records written to the journal.", lambda: counts.records)
    text = "Records that are missing in the journal."

    def lost() -> dict[str, int]:
        return {"busy": counts.dropped, "disk": counts.unwritten, "encoding": counts.unencoded}

    follow("counter", prefix + "lost_total", text, lost, "why")
    follow("counter", prefix + "bytes_total", "Bytes written to the journal.", lambda: counts.bytes)
    follow("counter", prefix + "segments_total", "Segments that were started.", lambda: counts.segments)
    follow("counter", prefix + "errors_total", "Failures of the journal's disk.", lambda: counts.errors)
    follow("gauge", prefix + "size_bytes", "Bytes of all segments in the journal's directory.", lambda: counts.size)


def show_state(registry: Registry, counts: StateCounts) -> None:
    """Show the counts of the state file, which are read at each rendering."""
    prefix, follow = "fairlead_state_", registry.follow
    follow("counter", prefix + "writes_total", "Times that the state file was written.", lambda: counts.written)
    follow("counter", prefix + "errors_total", "Times that the state file could not be written.", lambda: counts.errors)
    follow("gauge", prefix + "size_bytes", "Bytes of the state file.", lambda: counts.bytes)
    text = "Blocks of prompts that the state file gave back."
    follow("gauge", prefix + "restored_prefixes", text, lambda: counts.prefixes)


class WarmingCounts(Struct):
    """Counts of beginnings that were sent to cold endpoints, and of their prompt tokens. `kept`: the beginnings that
    are kept in memory."""

    kept: Beginnings
    sent: int = 0
    failed: int = 0
    tokens: int = 0


def show_warming(registry: Registry, counts: WarmingCounts) -> None:
    prefix, follow = "fairlead_warming_", registry.follow
    text = "Beginnings of prompts sent to cold endpoints, by result."
    follow("counter", prefix + "requests_total", text, lambda: {"sent": counts.sent, "failed": counts.failed}, "result")
    follow("counter", prefix + "tokens_total", "Prompt tokens that cold endpoints were sent.", lambda: counts.tokens)
    text = "Text of shared beginnings that is kept in memory."
    follow("gauge", prefix + "text_bytes", text, lambda: counts.kept.bytes)


#: Counts that exist for sending and for receiving: name, help text, and the fields of `Counts`.
_REPLICA_FLOWS = (
    ("batches", "Batches of facts, to and from other replicas.", "sent", "received"),
    ("bytes", "Bytes of batches and snapshots.", "sent_bytes", "received_bytes"),
    ("snapshots", "Snapshots, to and from other replicas.", "snapshots_sent", "snapshots_received"),
)


def show_replicas(registry: Registry, replicas: Replicas | None) -> None:
    """Show what is sent to other replicas and received from them. `replicas`: `None` = only names, no values."""

    def follow(kind: str, name: str, text: str, read: Callable[[Replicas], Any], *labels: str) -> None:
        name = f"fairlead_replicas_{name}"
        registry.follow(kind, name, text, lambda: None if replicas is None else read(replicas), *labels)

    text = "1 while facts go to other replicas and come from them."
    follow("gauge", "connected", text, lambda peers: not peers.problem)
    follow("gauge", "peers", "Other replicas that hold a lease.", lambda peers: len(peers.peers))
    text = "Time without any other replica; 0 while there is one."
    follow("gauge", "unheard_seconds", text, lambda peers: peers.unheard_s)
    text = "Other replicas whose facts are incomplete until their snapshot arrives."
    follow("gauge", "missing", text, lambda peers: len(peers.missing))
    text = "Time from writing facts to reading them."
    follow("gauge", "lag_seconds", text, lambda peers: peers.lag_s)
    for name, text, sent, received in _REPLICA_FLOWS:

        def both(peers: Replicas, sent: str = sent, received: str = received) -> dict[str, int]:
            counts = asdict(peers.counts)
            return {"sent": counts[sent], "received": counts[received]}

        follow("counter", f"{name}_total", text, both, "direction")
    text = "Batches that could not be sent for too long; a snapshot replaces them."
    follow("counter", "dropped_total", text, lambda peers: peers.counts.dropped)
    text = "Times that facts of another replica were missing."
    follow("counter", "gaps_total", text, lambda peers: peers.counts.gaps)
    text = "Times that the server between replicas went away."
    follow("counter", "outages_total", text, lambda peers: peers.counts.outages)
