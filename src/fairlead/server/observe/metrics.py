"""Counts decisions and their outcomes. Each call takes many records and counts them column by column, which is fast.

Rules
* Each decision is passed once to `on_decisions`, and later the end of each routed request once to `on_outcomes`.
* Cache figures are in prompt tokens: `kv_cache_lookup_total` grows by the prompt of each routed request,
  `kv_cache_hit_total` by what was predicted to be cached at the chosen endpoint. Their ratio is the hit rate.
* A set of request labels gets its own series once its names are declared (`declare`) or served, or once a request with
  it was answered 2xx; all other sets are counted as `other`. At most `cap` sets have series only because of an answer
  (they are *earned*), and each is dropped after `idle_s` seconds without a request. So names that clients make up never
  become series, not even briefly.
* At most `MOST_DECLARED` models have series because of declared names, and together as many further sets: those of
  their tenants, priorities and targets. While there are as many, sets without a request for `idle_s` seconds make room.
* A request whose label set has no series yet (it is *unproven*) is counted at its end, when it is known whether the set
  earns one. Until then only the gauge of running requests includes it, as `other`.
* `fairlead_scale_up_wanted` is 1 for `SCALE_UP_HOLD_S` after a decision found every candidate overloaded.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import compress, islice, repeat
from math import inf
from operator import attrgetter, truediv
from typing import Any, TypeVar

from fairlead import __version__
from fairlead.core.flow import EVICTED, EXPIRED, LEFT, SATURATED, SHUTTING_DOWN
from fairlead.core.models import MODEL_NOT_FOUND
from fairlead.core.records import LOST, DecisionRecord, Forecast, OutcomeRecord
from fairlead.core.request import Request
from fairlead.server.observe.exposition import Registry
from fairlead.server.observe.fleet_gauges import FleetGauges, FleetStatus
from fairlead.server.observe.instruments import OTHER, Counter, Gauge, Histogram, gauges
from fairlead.server.observe.request_families import RequestFamilies

SCALE_UP_HOLD_S = 60.0
_MAX_LABEL = 200
#: The published fairness id of requests that name none.
NO_TENANT = "default-flow"
#: Children per label set of requests: error codes, streaming or not, endpoints.
_FAMILY_ROOM = 10
#: At most this many unproven requests wait for their end; further ones are counted as `other` immediately.
_MOST_UNPROVEN = 4096
#: At most this many names of served models are read from endpoints; seconds between two readings.
_MOST_SERVED, _SERVED_S = 10_000, 1.0
#: Seconds between two sweeps, at least.
_SWEEP_S = 30.0
_POLICIES = 64
#: Declared models that have series, and their further sets of request labels: each takes 90 kB, about 700 lines.
MOST_DECLARED = 200

#: The published `error_code` of an answer that failed, and of refusals by HTTP status. Other statuses: `error_code()`.
_SERVER_ERROR = "ModelServerError"
_ERROR_CODES = {429: "ResourceExhausted", 503: "ServiceUnavailable", 500: "Internal"}
#: Refusals before or without a search for an endpoint. As in the reference picker, they are no failed attempts.
UNDECIDED = (SATURATED, EXPIRED, SHUTTING_DOWN, LEFT.reason, MODEL_NOT_FOUND)


_REQUEST_ID, _ENDPOINT, _OVERLOADED = attrgetter("request.id"), attrgetter("endpoint"), attrgetter("overloaded")
_POLICY, _PLACE, _PREFILL = attrgetter("policy"), attrgetter("endpoint", "address"), attrgetter("prefill")
_REWRITTEN_BY = attrgetter("request.rewritten_by")
_NAMES = ("request.model", "request.target", "request.fairness_id", "request.priority")
_LABELS, _LABELS_AND_STREAM = attrgetter(*_NAMES), attrgetter(*_NAMES, "request.stream")
_END, _UNREACHED, _SLO = attrgetter("status", "cause"), attrgetter("unreached"), attrgetter("request.slo_ttft_ms")
_DURATION, _TTFT = attrgetter("duration_ms"), attrgetter("ttft_ms")
_REQUEST_BYTES, _RESPONSE_BYTES = attrgetter("request.body_bytes"), attrgetter("response_bytes")
_PROMPT_TOKENS, _HIT_TOKENS = attrgetter("request.prompt_tokens"), attrgetter("hit_tokens")
_INPUT_TOKENS, _COMPLETION_TOKENS = attrgetter("prompt_tokens"), attrgetter("completion_tokens")
_CACHED_TOKENS = attrgetter("cached_tokens")
#: Whether a figure is known (not negative). A method of `float` takes integers too.
_KNOWN = (0.0).__le__
_AT_LEAST_ONE = partial(max, 1)
#: Milliseconds → seconds.
_SECONDS = (1000.0).__rtruediv__

V = TypeVar("V")
#: Requested model, serving model, fairness id, priority.
RequestLabels = tuple[str, str, str, int]


def grouped(keys: list[Any], values: Sequence[V]) -> Iterable[tuple[Any, Sequence[V]]]:
    """Values by their keys, each group in the order of the values. Usually all have the same key."""
    if keys and keys.count(keys[0]) == len(keys):
        return ((keys[0], values),)
    groups: dict[Any, list[V]] = {}
    for key, value in zip(keys, values, strict=True):
        groups.setdefault(key, []).append(value)
    return groups.items()


def _counted(values: Iterable[V]) -> Iterable[tuple[V, int]]:
    """Each distinct value with its count, in order of first appearance. Faster than `collections.Counter` for batches,
    which have few distinct values."""
    listed = list(values)
    return [(value, listed.count(value)) for value in dict.fromkeys(listed)]


def _with_known(
    records: Sequence[OutcomeRecord], column: Callable[[OutcomeRecord], Any]
) -> tuple[Sequence[OutcomeRecord], list[Any]]:
    """The records whose value in `column` is known (not negative), and these values."""
    figures = list(map(column, records))
    if not figures or min(figures) >= 0:
        return records, figures
    if max(figures) < 0:
        return (), []
    known = list(compress(records, map(_KNOWN, figures)))
    return known, list(map(column, known))


class _Bundle:
    """The instruments of one set of request labels, looked up once."""

    def __init__(self, families: RequestFamilies, labels: tuple[str, str, str, str]) -> None:
        model = labels[:2]
        self.families = families
        self.labels = labels
        self.requests = families.requests.child(*labels)
        self.running = families.running.child(*labels)
        self.duration = families.duration.child(*labels)
        self.request_size = families.request_size.child(*labels)
        self.response_size = families.response_size.child(*labels)
        self.input = families.input_tokens.child(*labels)
        self.output = families.output_tokens.child(*labels)
        self.cached = families.cached_tokens.child(*labels)
        self.ntpot = families.ntpot.child(*labels)
        self.tpot = families.tpot.child(*labels)
        self.ttft: Histogram = families.ttft.child(*labels, "false")
        self.ttft_stream: Histogram = families.ttft.child(*labels, "true")
        self.lookups = families.lookups.child(*model)
        self.hits = families.hits.child(*model)
        self.predicted = families.predicted_hits.child(*model)
        self.reported = families.reported_hits.child(*model)
        families.errors.child(*labels, _SERVER_ERROR)  # begin at 0: `rate` does not see the first value of a series
        #: Counters of attempts by endpoint id and address.
        self.attempts: dict[tuple[str, str], Counter] = {}
        #: When a request with these labels was last decided or ended.
        self.used = 0.0

    def attempt(self, endpoint: str, address: str) -> Counter:
        """Look up a counter for `attempts`, which does not have it yet."""
        namespace, _, name = endpoint.rpartition("/")
        port = address.rpartition(":")[2]
        counter = self.families.attempts.child("success", self.labels[1], name, namespace, port)
        self.attempts[endpoint, address] = counter
        return counter


class SchedulerMetrics:
    """The metrics of a scheduler. `now` is the clock of the records' `at`. `status` returns the state of the fleet when
    metrics are rendered, `served` the models that endpoints report, `desired` how many pods the load needs by role,
    where it is known. All series have the labels `constant`."""

    def __init__(
        self,
        now: Callable[[], float],
        status: Callable[[], FleetStatus],
        *,
        pool: str = "default",
        served: Callable[[], Iterable[str]] = tuple,
        desired: Callable[[], Mapping[str, int]] = dict,
        cap: int = 100,
        idle_s: float = 900.0,
        constant: Mapping[str, str] | None = None,
    ) -> None:
        self.registry = Registry(constant)
        self.families = RequestFamilies(_FAMILY_ROOM * cap)
        self._now = now
        self._status = status
        self._cap = cap
        self._idle_s = idle_s
        #: Defined models, and models that endpoints report.
        self._defined: frozenset[str] = frozenset()
        self._served: frozenset[str] = frozenset()
        self._served_read_at = -inf
        self._list_served = served
        self._bundles: dict[RequestLabels, _Bundle] = {}
        #: The label sets that have series only because of an answer.
        self._earned: set[RequestLabels] = set()
        #: Called after label sets were dropped, with the sets that are kept.
        self.on_forget: Callable[[Collection[tuple[str, ...]]], object] = lambda kept: None
        #: Decisions with unproven labels, by request, and the gauge that counts them as running.
        self._unproven: dict[int, tuple[DecisionRecord, Gauge]] = {}
        #: Since the start: answers that are no error, 4xx, and all other failures.
        self.answered = self.client_errors = self.server_errors = 0
        #: Since the start: routed requests, their prompt tokens, those predicted to be cached; requests sent unasked.
        self.routed = self.prompt_tokens = self.cached_tokens = self.bypassed = 0
        self._overloaded_at: float | None = None
        self._swept_at = -inf
        #: Names and addresses of endpoints that have counters but were gone at the last sweep.
        self._departed: set[str] = set()
        self._splitting: set[str] = set()
        families = self.families
        self._scheduling = families.scheduling.child()
        self._overloaded = families.overloaded.child()
        self._hit_ratio = families.hit_ratio.child()
        families.show(self.registry)
        self.registry.before(self._sweep)
        follow = self.registry.follow
        follow("gauge", "fairlead_scale_up_wanted", "1 while more replicas are wanted.", self.scale_up_wanted)
        text = "Pods that the load asks for, by role if the pool has roles; absent while too little is known of it."
        follow("gauge", "fairlead_desired_replicas", text, desired, "role", sparse=True)
        text = "Sets of request labels with their own series because a request with them was answered 2xx."
        follow("gauge", "fairlead_metrics_label_sets", text, lambda: len(self._earned))
        text = "Counted as `other`: the labels had earned no series of their own, or there was no room for more."
        follow("counter", "fairlead_metrics_folded_total", text, self._folds, "metric")
        FleetGauges(self.registry, pool, status)
        info = gauges("commit", "build_ref")
        info.child("", __version__).set(1)
        for name in ("llm_d_epp_info", "inference_extension_info"):
            self.registry.show(name, "[ALPHA] What is running.", info)

    def declare(self, models: Iterable[str]) -> None:
        """Replace the defined model names. Requests for them keep their own series without any traffic."""
        self._defined = frozenset(models)

    @property
    def unproven(self) -> int:
        """The number of requests that are decided but not counted yet."""
        return len(self._unproven)

    def render(self) -> bytes:
        """The whole exposition; `registry.parts()` returns it piece by piece."""
        return self.registry.render()

    # ---------------- per request ----------------

    def on_decisions(self, records: Sequence[DecisionRecord], durations: Sequence[float]) -> None:
        """Count decisions. `durations`: the seconds that each took."""
        self._scheduling.observe_all(durations, list(map(_REQUEST_ID, records)))
        for policy, spent in grouped(list(map(_POLICY, records)), durations):
            self.families.plugin.child("Schedule", policy, policy).observe_all(spent)
        if any(map(_OVERLOADED, records)):
            overloaded = [record for record in records if record.overloaded]
            self._overloaded.value += len(overloaded)
            self._overloaded_at = overloaded[-1].at
        if not all(map(_ENDPOINT, records)):
            for record in records:
                if not record.endpoint:
                    self._refused(record)
            records = [record for record in records if record.endpoint]
        self.routed += len(records)
        prompts, hits = list(map(_PROMPT_TOKENS, records)), list(map(_HIT_TOKENS, records))
        self.prompt_tokens += sum(prompts)
        self.cached_tokens += sum(hits)
        self._hit_ratio.observe_all(list(map(truediv, hits, map(_AT_LEAST_ONE, prompts))))
        for labels, group in grouped(list(map(_LABELS, records)), records):
            key = _key(*labels)
            bundle = self._known(key)
            if bundle is None:
                self._wait(key, group)
            else:
                bundle.running.value += len(group)
                self._routed(bundle, group)

    def _wait(self, key: RequestLabels, records: Sequence[DecisionRecord]) -> None:
        """Hold decisions of unproven requests until these end. Meanwhile count them as running under `other`."""
        folded = self._folded(key)
        folded.running.value += len(records)
        for record in records:
            if len(self._unproven) < _MOST_UNPROVEN:
                self._unproven[record.request.id] = record, folded.running
            else:
                self.families.requests.folded += 1
                self._routed(folded, (record,))

    def _routed(self, bundle: _Bundle, records: Sequence[DecisionRecord]) -> None:
        bundle.requests.value += len(records)
        bundle.lookups.value += sum(map(_PROMPT_TOKENS, records))
        bundle.hits.value += sum(map(_HIT_TOKENS, records))
        for place, number in _counted(map(_PLACE, records)):
            attempt = bundle.attempts.get(place)
            if attempt is None:
                attempt = bundle.attempt(*place)
            attempt.value += number
        if any(map(_REWRITTEN_BY, records)):
            for name, number in _counted(map(_REWRITTEN_BY, records)):
                if name:
                    name = name.rpartition("/")[2]  # as published: without the namespace
                    self.families.rewrites.child(name, *bundle.labels[:2]).value += number
        if self._splitting or any(map(_PREFILL, records)):
            for record in records:
                if record.prefill or record.policy in self._splitting:
                    self._split(record, bundle)

    def on_outcomes(self, records: Sequence[OutcomeRecord]) -> None:
        """Count the ends of routed requests."""
        for (*labels, stream), group in grouped(list(map(_LABELS_AND_STREAM, records)), records):
            key = _key(*labels)
            bundle = self._known(key) or self._earn(key, group)
            bundle.used = self._now()
            ran = self._prove(bundle, group) if self._unproven else len(group)
            bundle.running.value = max(bundle.running.value - ran, 0)
            for (status, cause), number in _counted(map(_END, group)):
                if status >= 400 or cause != "natural":
                    self.families.ends.child(cause).value += number
                    if cause == "expired":
                        self.families.expired.child().value += number
                    # A client that disconnects is not an error.
                    if status >= 400 or cause in LOST or cause == EVICTED.reason:
                        failed = compress(group, map((status, cause).__eq__, map(_END, group)))
                        self._failed(bundle, status, cause, list(failed))
                else:
                    self.families.ends.child(cause).value += number
                    self.answered += number
            for name, number in _counted(map(_UNREACHED, group)):
                if name:
                    self.families.repeated.child(name).value += number
            self._times(bundle, group, stream)
            self._sizes(bundle, group)

    def _failed(self, bundle: _Bundle, status: int, cause: str, records: Sequence[OutcomeRecord]) -> None:
        code = "BadRequest" if 400 <= status < 500 and status != 429 else _SERVER_ERROR
        if cause == EVICTED.reason:
            status = EVICTED.status
            code = error_code(status)
        self._error(bundle, code, status, len(records))
        took = _with_known(records, _DURATION)[1]
        self.families.failed_duration.child(code).observe_all(list(map(_SECONDS, took)))

    def _earn(self, key: RequestLabels, records: Sequence[OutcomeRecord]) -> _Bundle:
        """The labels' own bundle if one of these answers is 2xx and there is room, else the bundle of `other`. For
        declared names there was no room before."""
        folded = self._folded(key)
        full = self._declared(key) or len(self._earned) >= self._cap
        if full or not any(200 <= record.status < 300 for record in records):
            self.families.requests.folded += len(records)
            return folded
        bundle = self._bundles.get(key)
        if bundle is None:
            bundle = self._make(key)
            self._earned.add(key)
        return bundle

    def _prove(self, bundle: _Bundle, records: Sequence[OutcomeRecord]) -> int:
        """Count the held decisions of these requests. Returns how many of the requests had no held decision."""
        waited = list(map(self._unproven.pop, map(_REQUEST_ID, records), repeat(None)))
        for decision, folded in filter(None, waited):
            folded.value -= 1
            self._routed(bundle, (decision,))
        return waited.count(None)

    def _times(self, bundle: _Bundle, records: Sequence[OutcomeRecord], stream: bool) -> None:
        known, milliseconds = _with_known(records, _DURATION)
        bundle.duration.observe_all(list(map(_SECONDS, milliseconds)), list(map(_REQUEST_ID, known)))
        counted, _ = _with_known(known, _COMPLETION_TOKENS)
        finished = [r for r in counted if r.completion_tokens > 0]
        bundle.ntpot.observe_all([r.duration_ms / 1000 / r.completion_tokens for r in finished])
        known, milliseconds = _with_known(records, _TTFT)
        ttft = bundle.ttft_stream if stream else bundle.ttft
        ttft.observe_all(list(map(_SECONDS, milliseconds)), list(map(_REQUEST_ID, known)))
        missed = {"ttft": sum(0.0 < r.request.slo_ttft_ms < r.ttft_ms for r in known) if any(map(_SLO, known)) else 0}
        if stream:
            paced = [(r, ms) for r in finished if (ms := r.tpot_ms) >= 0.0]
            bundle.tpot.observe_all([_SECONDS(ms) for _, ms in paced])
            missed["tpot"] = sum(0.0 < r.request.slo_tpot_ms < ms for r, ms in paced)
            for record in known:
                if record.forecast is not None:
                    self._judge(bundle, record, record.forecast)
        for which, number in missed.items():
            if number:
                self.families.slo_violations.child(*bundle.labels[:2], which).value += number

    def _sizes(self, bundle: _Bundle, records: Sequence[OutcomeRecord]) -> None:
        bundle.request_size.observe_all(list(map(_REQUEST_BYTES, records)))
        bundle.response_size.observe_all(_with_known(records, _RESPONSE_BYTES)[1])
        bundle.input.observe_all(_with_known(records, _INPUT_TOKENS)[1])
        bundle.output.observe_all(_with_known(records, _COMPLETION_TOKENS)[1])
        known, cached = _with_known(records, _CACHED_TOKENS)
        bundle.cached.observe_all(cached)
        bundle.reported.value += sum(cached)
        bundle.predicted.value += sum(map(_HIT_TOKENS, known))

    def _judge(self, bundle: _Bundle, record: OutcomeRecord, forecast: Forecast) -> None:
        """Record how good the forecast was. Only for streams: in other answers the first byte arrives with the last."""
        if forecast.ttft_ms <= 0.0:
            return
        # Dashboards compare this with the histogram of TTFTs since arrival, so add the time in the queue.
        self.families.predicted_ttft.child(*bundle.labels[:2]).observe((record.queued_ms + forecast.ttft_ms) / 1e3)
        if forecast.tpot_ms > 0.0:
            self.families.predicted_tpot.child(*bundle.labels[:2]).observe(forecast.tpot_ms / 1e3)
        came_ms = record.sent_ttft_ms
        place = "below" if came_ms < forecast.low_ms else "above" if came_ms > forecast.high_ms else "inside"
        self.families.forecasts.child(place).value += 1
        self.families.forecast_ratio.child().observe(came_ms / forecast.ttft_ms)

    def on_client_error(self, status: int, tenant: str = "", decided: bool = False) -> None:
        """Count a request of this tenant that was refused because it cannot be read or changed. `decided`: as a
        request, it counts by its decision."""
        bundle = self._without_model("", tenant)
        bundle.requests.value += not decided
        self._error(bundle, error_code(status), status)

    def on_fallback(self, address: str) -> None:
        """Count a request that the gateway sent to this address without asking the scheduler."""
        self.bypassed += 1
        self.families.fallbacks.child(address).value += 1

    # ---------------- rare events ----------------

    def _split(self, record: DecisionRecord, bundle: _Bundle) -> None:
        """Count a decision of a policy that splits prefill from decode. Once a policy has split a request, its requests
        that are not split are counted too."""
        if len(self._splitting) < _POLICIES:
            self._splitting.add(record.policy)
        kind = "prefill-decode" if record.prefill else "decode-only"
        self.families.pairs.child(record.policy, bundle.labels[0], kind).value += 1
        if record.prefill:
            self.families.prefills.child(record.prefill).value += 1

    def _refused(self, record: DecisionRecord) -> None:
        # If the model is not defined, the client may have made up its name, which must not become a label.
        unknown = record.outcome == MODEL_NOT_FOUND
        tenant = record.request.fairness_id
        bundle = self._without_model(OTHER, tenant) if unknown else self._bundle(_key(*_LABELS(record)))
        bundle.requests.value += 1
        families = self.families
        families.rejected.child(record.outcome).value += 1
        if record.outcome != LEFT.reason:  # a client that disconnects is no error
            self._error(bundle, error_code(record.status), record.status)
        if record.outcome not in UNDECIDED:
            families.attempts.child("failure", bundle.labels[1], "", "", "").value += 1
        if record.outcome == SATURATED:
            self._overloaded_at = record.at

    def _error(self, bundle: _Bundle, code: str, status: int, number: int = 1) -> None:
        if 400 <= status < 500:
            self.client_errors += number
        else:
            self.server_errors += number
        self.families.errors.child(*bundle.labels, code).value += number

    def _bundle(self, key: RequestLabels) -> _Bundle:
        """The bundle of these labels, or that of `other` if they have no series of their own."""
        bundle = self._known(key)
        if bundle is None:
            self.families.requests.folded += 1
            bundle = self._folded(key)
        bundle.used = self._now()
        return bundle

    def _without_model(self, model: str, tenant: str) -> _Bundle:
        """The bundle of a tenant's requests for no known model. Only a tenant that was answered 2xx before has one of
        its own, because clients may make up names. These take a quarter of all sets at most."""
        key = _key(model, model, tenant, 0)
        if key not in self._bundles and key[2] and any(known == key[2] for _, _, known, _ in self._earned):
            refused = sum(name in ("", OTHER) for name, *_ in self._earned)
            if len(self._earned) < self._cap and refused < self._cap // 4:
                self._make(key)
                self._earned.add(key)
        return self._bundle(key)

    def _known(self, key: RequestLabels) -> _Bundle | None:
        """The bundle of these labels; `None` = they have no series of their own."""
        bundle = self._bundles.get(key)
        if bundle is None and self._declared(key) and self._has_room(key[0]):
            bundle = self._make(key)
        return bundle

    def _has_room(self, model: str) -> bool:
        """Whether another set of the model may have series because of declared names. Clients choose tenants, so the
        sets of known models take no room from other models."""
        models, further = self._sets()
        return (further if model in models else len(models)) < MOST_DECLARED

    def _sets(self) -> tuple[set[str], int]:
        """The models that have series because of declared names, and how many sets these have beyond one each."""
        models = [model for model, *_ in self._bundles.keys() - self._earned if model != OTHER]
        return set(models), len(models) - len(set(models))

    def _declared(self, key: RequestLabels) -> bool:
        model, target, fairness_id, _ = key
        return fairness_id in ("", NO_TENANT, OTHER) and self._name(model) == model and self._name(target) == target

    def _name(self, model: str) -> str:
        if not model or model in self._defined:
            return model
        if self._now() - self._served_read_at >= _SERVED_S:
            self._served_read_at = self._now()
            self._served = frozenset(islice(self._list_served(), _MOST_SERVED))
        return model if model in self._served else OTHER

    def folded(self, model: str, target: str) -> tuple[str, str]:
        """The model and target that metrics show for a request without series of its own."""
        return self._name(model), self._name(target)

    def _folded(self, key: RequestLabels) -> _Bundle:
        folded = self._folded_labels(key)
        return self._bundles.get(folded) or self._make(folded)

    def _folded_labels(self, key: RequestLabels) -> RequestLabels:
        model, target, fairness_id, priority = key
        folded = self._name(model), self._name(target), fairness_id and OTHER, priority
        if folded in self._bundles or self._has_room(folded[0]):
            return folded
        return OTHER, OTHER, fairness_id and OTHER, priority

    def _make(self, key: RequestLabels) -> _Bundle:
        model, target, fairness_id, priority = key
        labels = model, target, fairness_id or NO_TENANT, str(priority)
        bundle = self._bundles[key] = _Bundle(self.families, labels)
        return bundle

    def labels(self, request: Request) -> tuple[str, str, str, int]:
        """The model, target, fairness id and priority that metrics show for a request."""
        key = _key(request.model, request.target_model, request.fairness_id, request.priority)
        if key not in self._bundles and not (self._declared(key) and self._has_room(key[0])):
            key = self._folded_labels(key)
        model, target, fairness_id, priority = key
        return model, target, fairness_id or NO_TENANT, priority

    def _sweep(self) -> None:
        if self._now() - self._swept_at >= _SWEEP_S:
            self._swept_at = self._now()
            self._forget_departed()
            self._forget_idle()

    def _folds(self) -> dict[str, int]:
        views = reversed(self.registry.views)  # of several names of a family, the first one shown is kept
        return dict({id(view.family): (view.name, view.family.folded) for view in views if view.family.folded}.values())

    def _forget_idle(self) -> None:
        """Drop label sets that were not used for `idle_s` and are not declared, or all of these if there is no room."""
        models, further = self._sets()
        until, full = self._now() - self._idle_s, max(len(models), further) >= MOST_DECLARED
        idle = [
            key
            for key, bundle in self._bundles.items()
            if bundle.used < until and not bundle.running.value and (full or not self._declared(key))
        ]
        for key in idle:
            del self._bundles[key]
            self._earned.discard(key)
        if idle:
            kept = {bundle.labels for bundle in self._bundles.values()}
            self.families.forget(kept)
            self.on_forget(kept)

    def scale_up_wanted(self) -> bool:
        since = self._overloaded_at
        return since is not None and self._now() - since < SCALE_UP_HOLD_S

    def _forget_departed(self) -> None:
        """Drop the counters of endpoints that are gone and were gone at the last sweep, after which a page showed their
        last values. Endpoints come and go under new names, so counters would pile up."""
        present = {"", OTHER}
        for endpoint in self._status().endpoints:
            present.update((endpoint.id, endpoint.id.rpartition("/")[2], endpoint.address))
        stale, self._departed = self._departed - present, set()
        for family, label in self.families.by_endpoint():
            place = family.labels.index(label)
            names = {key[place] for key in family.children} - stale
            family.keep([label], {(name,) for name in names})
            self._departed |= names - present
        if stale:
            for bundle in self._bundles.values():
                bundle.attempts.clear()


def _key(model: str, target: str, fairness_id: str, priority: int) -> RequestLabels:
    return model[:_MAX_LABEL], (target or model)[:_MAX_LABEL], fairness_id[:_MAX_LABEL], priority


def error_code(status: int) -> str:
    """The published `error_code` for a status that Fairlead itself answered with."""
    code = _ERROR_CODES.get(status)
    return code or ("BadRequest" if 400 <= status < 500 else "Internal")
