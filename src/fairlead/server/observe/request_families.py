"""The instruments that count requests, and the names under which metrics show them.

Names `llm_d_epp_*` and their deprecated twins, which are second views of the same instruments, are those of the Gateway
API Inference Extension and its llm-d picker. So published dashboards and alerts work unchanged. The names without a
prefix are those of the original requirements. Names `fairlead_*` are our own.
"""

from collections.abc import Collection

from fairlead.core.flow import EXPIRED, LEFT, NO_ENDPOINTS, SATURATED, SHUTTING_DOWN
from fairlead.core.models import MODEL_NOT_FOUND
from fairlead.core.remote import REFUSED
from fairlead.server.observe import instruments as buckets
from fairlead.server.observe.exposition import Registry
from fairlead.server.observe.instruments import Counter, Family, Histogram, counters, gauges, histograms

#: Labels whose values clients choose. Beyond the cap, their values become `other`.
CLIENT_LABELS = ("model_name", "target_model_name", "target_model", "fairness_id")
REQUEST_LABELS = ("model_name", "target_model_name", "fairness_id", "priority")
#: Other names of the same labels.
_REQUEST_LABEL = {"target_model": "target_model_name"}
_PREDICTED = ("model_name", "target_model_name")
_MODEL = {"model_name": "model_name", "target_model_name": "target_model_name"}
_MODEL_PRIORITY = {**_MODEL, "priority": "priority"}

_LLMD = "llm_d_epp_"
_OBJECTIVE = "inference_objective_"
_EXTENSION = "inference_extension_"
#: Names from the time when InferenceModel defined models. Dashboards of that time still query them.
_BY_MODEL = "inference_model_"
#: Why requests are refused.
_REASONS = (SATURATED, EXPIRED, NO_ENDPOINTS, SHUTTING_DOWN, LEFT.reason, MODEL_NOT_FOUND, REFUSED)
#: For metrics that need the usage in an answer. It is read only in a share of the answers, because that costs work for
#: every chunk.
_SAMPLED = " Of the share whose usage is read, inspect.usageSampling."


class RequestFamilies:
    """The instruments. `cap`: the most label sets of each; `SchedulerMetrics` stops making new ones long before."""

    def __init__(self, cap: int) -> None:
        def counted(*labels: str) -> Family[Counter]:
            return counters(*labels, cap=cap, fold=CLIENT_LABELS)

        def measured(bounds: tuple[float, ...], *more: str) -> Family[Histogram]:
            return histograms(*REQUEST_LABELS, *more, bounds=bounds, cap=cap, fold=CLIENT_LABELS)

        self.requests = counted(*REQUEST_LABELS)
        self.errors = counted(*REQUEST_LABELS, "error_code")
        self.running = gauges(*REQUEST_LABELS, cap=cap, fold=CLIENT_LABELS)
        self.duration = measured(buckets.GENERAL)
        self.failed_duration = histograms("error_code", bounds=buckets.GENERAL, cap=16)
        self.request_size = measured(buckets.SIZE)
        self.response_size = measured(buckets.RESPONSE)
        self.input_tokens = measured(buckets.TOKENS)
        self.output_tokens = measured(buckets.OUTPUT)
        self.cached_tokens = measured(buckets.TOKENS)
        self.ttft = measured(buckets.GENERAL, "streaming")
        self.ntpot = measured(buckets.NTPOT)
        self.tpot = measured(buckets.TPOT_TWIN)
        self.lookups = counted("model_name", "target_model_name")
        self.hits = counted("model_name", "target_model_name")
        self.predicted_hits = counted("model_name", "target_model_name")
        self.reported_hits = counted("model_name", "target_model_name")
        self.attempts = counted("status", "target_model_name", "endpoint_name", "namespace", "port")
        self.rewrites = counted("model_rewrite_name", "model_name", "target_model")
        self.rejected = counters("reason", cap=64, fold=("reason",))
        self.ends = counters("cause", cap=64, fold=("cause",))
        self.hit_ratio = histograms(bounds=buckets.HIT_RATIO)
        self.scheduling = histograms(bounds=buckets.SCHEDULING_LONG)
        self.plugin = histograms("extension_point", "plugin_type", "plugin_name", bounds=buckets.SCHEDULING)
        self.plugin_errors = counters("plugin_name", cap=256, fold=("plugin_name",))
        self.failed_instructions = counters("instruction", cap=16, fold=("instruction",))
        self.protocol_errors = counters()
        self.overloaded = counters()
        self.expired = counters()
        self.fallbacks = counters("endpoint", cap=cap, fold=("endpoint",))
        self.prefills = counters("endpoint", cap=cap, fold=("endpoint",))
        self.repeated = counters("endpoint", cap=cap, fold=("endpoint",))
        self.stalls = counters("endpoint", "level", cap=cap, fold=("endpoint",))
        self.loop_lag = histograms(bounds=buckets.LAG)
        self.predicted_ttft = histograms(*_PREDICTED, bounds=buckets.GENERAL, cap=cap, fold=CLIENT_LABELS)
        self.predicted_tpot = histograms(*_PREDICTED, bounds=buckets.TPOT_TWIN, cap=cap, fold=CLIENT_LABELS)
        self.slo_violations = counted(*_PREDICTED, "type")
        self.pairs = counted("plugin_name", "model_name", "decision_type")
        self.forecasts = counters("result")
        # Make all results and reasons at the start: the share of forecasts inside the band is undefined while a series
        # is missing, and `rate` does not see the first value of a series.
        for result in ("below", "inside", "above"):
            self.forecasts.child(result)
        for reason in _REASONS:
            self.rejected.child(reason)
        self.forecast_ratio = histograms(bounds=buckets.RATIO)

    def by_endpoint(self) -> tuple[tuple[Family[Counter], str], ...]:
        """Return the families that count by endpoint, with the label that has its name, id or address."""
        unnamed = self.fallbacks, self.prefills, self.repeated, self.stalls
        return (self.attempts, "endpoint_name"), *((family, "endpoint") for family in unnamed)

    def forget(self, kept: Collection[tuple[str, ...]]) -> None:
        """Drop the counts of all request labels (in the order of `REQUEST_LABELS`) except `kept`."""
        for family in vars(self).values():
            shared = [label for label in family.labels if _REQUEST_LABEL.get(label, label) in REQUEST_LABELS]
            if shared:
                places = [REQUEST_LABELS.index(_REQUEST_LABEL.get(label, label)) for label in shared]
                family.keep(shared, {tuple(labels[place] for place in places) for labels in kept})

    def show(self, registry: Registry) -> None:
        """Show all instruments in `registry`, under all their names."""
        self._show_requests(registry)
        self._show_by_model(registry)
        self._show_tokens(registry)
        self._show_scheduler(registry)
        self._show_predictions(registry)
        self._show_own(registry)

    def _show_requests(self, registry: Registry) -> None:
        show = registry.show
        text = "[ALPHA] Requests that were sent to an endpoint or refused; those that wait are not counted yet."
        show(_LLMD + "request_total", text, self.requests)
        show(_OBJECTIVE + "request_total", text, self.requests, labels=_MODEL_PRIORITY)
        text = "[ALPHA] Requests that were refused or failed."
        show(_LLMD + "request_error_total", text, self.errors)
        show(_OBJECTIVE + "request_error_total", text, self.errors, labels={**_MODEL, "error_code": "error_code"})
        text = "[ALPHA] Requests at an endpoint now."
        show(_LLMD + "request_running", text, self.running)
        show(_OBJECTIVE + "running_requests", text, self.running, labels={"model_name": "model_name"})
        text = "[ALPHA] Time from the first byte of a request to the last of its response."
        show(_LLMD + "request_duration_seconds", text, self.duration)
        show(_OBJECTIVE + "request_duration_seconds", text, self.duration, labels=_MODEL)
        text = "[ALPHA] Time from the first byte of a request to the first of its response's body, of 2xx responses."
        show(_LLMD + "request_ttft_seconds", text, self.ttft, bounds=buckets.TTFT)
        show(_OBJECTIVE + "request_ttft_seconds", text, self.ttft, labels=_MODEL)
        text = "[ALPHA] Duration of a request divided by its output tokens." + _SAMPLED
        show(_LLMD + "request_ntpot_seconds", text, self.ntpot)
        show(_OBJECTIVE + "normalized_time_per_output_token_seconds", text, self.ntpot, labels=_MODEL)
        text = "[ALPHA] Time per output token after the first, of streamed responses." + _SAMPLED
        text += " OpenAI clients must set stream_options.include_usage."
        show(_LLMD + "request_streaming_tpot_seconds", text, self.tpot, bounds=buckets.TPOT)
        show(_OBJECTIVE + "request_tpot_seconds", text, self.tpot, labels=_MODEL)

    def _show_by_model(self, registry: Registry) -> None:
        show = registry.show
        text = "[ALPHA] By the model asked for and the model that served: "
        show(_BY_MODEL + "request_total", text + "requests.", self.requests, labels=_MODEL)
        labels = {**_MODEL, "error_code": "error_code"}
        show(_BY_MODEL + "request_error_total", text + "refused or failed requests.", self.errors, labels=labels)
        show(_BY_MODEL + "running_requests", text + "requests now.", self.running, labels={"model_name": "model_name"})
        for family, name, what in (
            (self.duration, "request_duration_seconds", "durations."),
            (self.ntpot, "normalized_time_per_output_token_seconds", "durations by output tokens." + _SAMPLED),
            (self.request_size, "request_sizes", "sizes of requests."),
            (self.response_size, "response_sizes", "sizes of responses."),
            (self.input_tokens, "input_tokens", "prompt tokens." + _SAMPLED),
            (self.output_tokens, "output_tokens", "output tokens." + _SAMPLED),
        ):
            show(_BY_MODEL + name, text + what, family, labels=_MODEL)
        text = "[ALPHA] Requests whose target an InferenceModelRewrite decided."
        for prefix in (_LLMD, _EXTENSION):
            show(prefix + "model_rewrite_decisions_total", text, self.rewrites)

    def _show_tokens(self, registry: Registry) -> None:
        show = registry.show
        for family, name, twin, text in (
            (self.request_size, "request_size_bytes", "request_sizes", "Size of requests."),
            (self.response_size, "response_size_bytes", "response_sizes", "Size of responses."),
            (self.input_tokens, "request_input_tokens", "input_tokens", "Prompt tokens of requests." + _SAMPLED),
            (self.output_tokens, "request_output_tokens", "output_tokens", "Output tokens of responses." + _SAMPLED),
            (
                self.cached_tokens,
                "request_cached_tokens",
                "prompt_cached_tokens",
                "Prompt tokens found in a cache." + _SAMPLED,
            ),
        ):
            show(_LLMD + name, "[ALPHA] " + text, family)
            show(_OBJECTIVE + twin, "[ALPHA] " + text, family, labels=_MODEL)
        show("kv_cache_lookup_total", "Prompt tokens of routed requests, looked up in the prefix index.", self.lookups)
        show("kv_cache_hit_total", "Prompt tokens predicted to be cached at the chosen endpoint.", self.hits)
        text = "[ALPHA] Share of a prompt that was predicted to be cached at the chosen endpoint."
        learned = {"constant": {"plugin_name": "prefix-index", "plugin_type": "prefix-cache-scorer"}}
        for prefix in (_LLMD, _EXTENSION):
            show(prefix + "prefix_indexer_hit_ratio", text, self.hit_ratio, **learned)
        text = (
            "Predicted times to first token, by where the observed one was in the 90 % band; since requests were sent."
        )
        show("fairlead_ttft_forecasts_total", text, self.forecasts)
        text = "Observed time to first token since the request was sent, divided by the predicted one."
        show("fairlead_ttft_observed_to_predicted_ratio", text, self.forecast_ratio)
        text = "Prompt tokens predicted to be cached, of responses whose usage was read."
        show("fairlead_predicted_hit_tokens_total", text, self.predicted_hits)
        text = "Prompt tokens reported to have been cached, of the same responses."
        show("fairlead_reported_cached_tokens_total", text, self.reported_hits)

    def _show_scheduler(self, registry: Registry) -> None:
        show = registry.show
        text = "Time to decide about a request, from its arrival here to the decision, without waiting in a queue."
        show("epp_scheduling_duration_seconds", text, self.scheduling)
        for prefix in (_LLMD, _EXTENSION):
            name = prefix + "scheduler_e2e_duration_seconds"
            show(name, "[ALPHA] " + text, self.scheduling, bounds=buckets.SCHEDULING)
        text = "[ALPHA] Time to decide about a request, by policy."
        show(_LLMD + "plugin_duration_seconds", text, self.plugin)
        show(_EXTENSION + "plugin_duration_seconds", text, self.plugin)
        text = "[ALPHA] Decisions, by whether they found an endpoint, and which."
        show(_LLMD + "scheduler_attempts_total", text, self.attempts)
        renamed = {label: label for label in self.attempts.labels} | {"endpoint_name": "pod_name"}
        show(_EXTENSION + "scheduler_attempts_total", text, self.attempts, labels=renamed)

    def _show_predictions(self, registry: Registry) -> None:
        show = registry.show
        by = {"constant": {"plugin_name": "cost-model", "plugin_type": "cost-model"}}
        text = "[ALPHA] Predicted time to first token, of streamed responses."
        show(_LLMD + "request_predicted_ttft_seconds", text, self.predicted_ttft, **by)
        text = "[ALPHA] Predicted time per output token, of streamed responses."
        show(_LLMD + "request_predicted_tpot_seconds", text, self.predicted_tpot, **by)
        text = "[ALPHA] Responses that missed a latency objective of their request's headers, by objective."
        show(_LLMD + "request_slo_violation_total", text, self.slo_violations, **by)
        text = "[ALPHA] Requests routed by a policy that splits prefill from decode, by what it did."
        show(_LLMD + "disagg_decision_total", text, self.pairs, constant={"plugin_type": "prefill-decode"})

    def _show_own(self, registry: Registry) -> None:
        show = registry.show
        text = "Requests refused, by reason. rejected-context-cancelled: the gateway closed the stream."
        show("fairlead_rejected_total", text, self.rejected)
        text = (
            "Ends of routed requests, by cause: natural, client-disconnect, upstream-reset, endpoint-gone, evicted, "
            "stream-lost (the client left early, or the gateway died, gave up or showed no answer), expired or "
            "reconciled (the end was never reported)."
        )
        show("fairlead_request_end_total", text, self.ends)
        text = "Time from the first byte of a routed request to its failure. Such requests have no time to first token."
        show("fairlead_failed_request_duration_seconds", text, self.failed_duration)
        text = "Times that a plugin failed and was left out."
        show("fairlead_plugin_errors_total", text, self.plugin_errors)
        text = "Instructions of the scheduler that could not be carried out, a defect. Their requests were ended."
        show("fairlead_failed_instructions_total", text, self.failed_instructions)
        text = "Streams of the gateway that were ended because it broke the ext_proc protocol; the log says how."
        show("fairlead_protocol_errors_total", text, self.protocol_errors)
        show("fairlead_all_overloaded_total", "Decisions with every candidate overloaded.", self.overloaded)
        show("fairlead_lease_expired_total", "Requests whose end was never reported.", self.expired)
        show("fairlead_fallback_requests_total", "Requests the gateway served without asking.", self.fallbacks)
        show("fairlead_prefills_total", "Requests whose prompt this endpoint computes for another one.", self.prefills)
        text = "Requests answered elsewhere because this endpoint could not be reached, failed or was overdue."
        show("fairlead_repeated_total", text, self.repeated)
        show("fairlead_stalls_total", "Times that an endpoint began to hang, or recovered.", self.stalls)
        show("fairlead_loop_lag_seconds", "How late timers of the event loop fire.", self.loop_lag)
