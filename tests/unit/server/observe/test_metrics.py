"""What is counted for decisions, outcomes and the fleet, under all its names."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from fairlead.core.records import DecisionRecord, Forecast, OutcomeRecord
from fairlead.core.request import Request
from fairlead.server.observe.fleet_gauges import EndpointStatus, FleetStatus
from fairlead.server.observe.metrics import SCALE_UP_HOLD_S, SchedulerMetrics


class Totals:
    ok, failed, bytes, seconds = 40, 2, 1000, 1.5


class Watched:
    """Metrics with a clock and a fleet of our own, read through prometheus_client's parser."""

    def __init__(self, **options: Any) -> None:
        self.now = 100.0
        self.status = FleetStatus()
        served = options.pop("served", ["m", "x" * 200])
        self.metrics = SchedulerMetrics(
            lambda: self.now, lambda: self.status, pool="pool-a", served=lambda: served, **options
        )

    def samples(self) -> dict[str, float]:
        """`name{a=1,b=2}` to value."""
        found = {}
        for family in text_string_to_metric_families(self.metrics.render().decode()):
            for sample in family.samples:
                labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
                key = f"{sample.name}{{{labels}}}" if labels else sample.name
                assert key not in found
                found[key] = sample.value
        return found


@pytest.fixture
def watched() -> Watched:
    return Watched()


def request(**fields: Any) -> Request:
    return Request(**({"id": 1, "arrived": 99.0, "model": "m", "prompt_tokens": 100, "stream": True} | fields))


def routed(asked: Request | None = None, **fields: Any) -> DecisionRecord:
    base = {"at": 100.0, "policy": "p", "endpoint": "ns/vllm-0", "address": "10.0.0.1:8000", "hit_tokens": 40}
    return DecisionRecord(request=asked or request(), **(base | fields))


def refused(outcome: str, status: int, asked: Request | None = None) -> DecisionRecord:
    return DecisionRecord(request=asked or request(), at=100.0, policy="p", outcome=outcome, status=status)


def ended(asked: Request | None = None, **fields: Any) -> OutcomeRecord:
    base: dict[str, Any] = {"at": 101.0, "endpoint": "ns/vllm-0", "status": 200}
    return OutcomeRecord(request=asked or request(), **(base | fields))


ML = "fairness_id=default-flow,model_name=m,priority=0,target_model_name=m"
M = "model_name=m,target_model_name=m"


def test_a_routed_request(watched: Watched) -> None:
    watched.metrics.on_decisions([routed()], [0.0003])
    found = watched.samples()
    assert found[f"llm_d_epp_request_total{{{ML}}}"] == 1
    assert found["inference_objective_request_total{model_name=m,priority=0,target_model_name=m}"] == 1
    assert found[f"llm_d_epp_request_running{{{ML}}}"] == 1
    assert found["inference_objective_running_requests{model_name=m}"] == 1
    assert found[f"kv_cache_lookup_total{{{M}}}"] == 100
    assert found[f"kv_cache_hit_total{{{M}}}"] == 40
    index = "plugin_name=prefix-index,plugin_type=prefix-cache-scorer"
    assert [found[f"llm_d_epp_prefix_indexer_hit_ratio_bucket{{le={le},{index}}}"] for le in (0.3, 0.4)] == [0, 1]
    where = "namespace=ns,port=8000,status=success,target_model_name=m"
    assert found[f"llm_d_epp_scheduler_attempts_total{{endpoint_name=vllm-0,{where}}}"] == 1
    assert (
        found["inference_extension_scheduler_attempts_total{" + where.replace("port", "pod_name=vllm-0,port", 1) + "}"]
        == 1
    )
    assert found["epp_scheduling_duration_seconds_bucket{le=0.0002}"] == 0
    assert found["epp_scheduling_duration_seconds_bucket{le=0.0005}"] == 1
    assert found["epp_scheduling_duration_seconds_bucket{le=1}"] == 1
    assert found["llm_d_epp_scheduler_e2e_duration_seconds_bucket{le=0.1}"] == 1
    assert "llm_d_epp_scheduler_e2e_duration_seconds_bucket{le=0.2}" not in found
    assert found["inference_extension_scheduler_e2e_duration_seconds_count"] == 1


def test_requests_of_no_tenant_are_those_of_the_default_flow(watched: Watched) -> None:
    watched.metrics.on_decisions([routed(), routed(request(fairness_id="default-flow"))], [0.001, 0.001])
    assert watched.samples()[f"llm_d_epp_request_total{{{ML}}}"] == 2
    assert watched.metrics.labels(request()) == ("m", "m", "default-flow", 0)


def test_an_outcome(watched: Watched) -> None:
    watched.metrics.on_decisions([routed()], [0.001])
    watched.metrics.on_outcomes(
        [
            ended(
                request(body_bytes=400),
                ttft_ms=90.0,
                duration_ms=1090.0,
                response_bytes=9000,
                prompt_tokens=100,
                completion_tokens=11,
                cached_tokens=32,
                hit_tokens=40,
            )
        ]
    )
    found = watched.samples()
    assert found[f"llm_d_epp_request_running{{{ML}}}"] == 0
    for name, value in {
        "request_duration_seconds": 1.09,
        "request_size_bytes": 400,
        "response_size_bytes": 9000,
        "request_input_tokens": 100,
        "request_output_tokens": 11,
        "request_cached_tokens": 32,
        "request_ntpot_seconds": 1.09 / 11,
        "request_streaming_tpot_seconds": 0.1,
    }.items():
        assert found[f"llm_d_epp_{name}_sum{{{ML}}}"] == pytest.approx(value), name
        assert found[f"llm_d_epp_{name}_count{{{ML}}}"] == 1
    for name in (
        "request_duration_seconds",
        "request_sizes",
        "response_sizes",
        "input_tokens",
        "output_tokens",
        "prompt_cached_tokens",
        "normalized_time_per_output_token_seconds",
        "request_tpot_seconds",
        "request_ttft_seconds",
    ):
        assert found[f"inference_objective_{name}_count{{{M}}}"] == 1, name
    assert found[f"llm_d_epp_request_ttft_seconds_sum{{{ML.replace('target', 'streaming=true,target')}}}"] == 0.09
    assert found[f"fairlead_predicted_hit_tokens_total{{{M}}}"] == 40
    assert found[f"fairlead_reported_cached_tokens_total{{{M}}}"] == 32
    assert found["fairlead_request_end_total{cause=natural}"] == 1
    errors = {key: value for key, value in found.items() if key.startswith("llm_d_epp_request_error_total{")}
    assert errors == {f"llm_d_epp_request_error_total{{error_code=ModelServerError,{ML}}}": 0}, "the first is seen"


def test_several_sequences_at_once_are_not_faster_tokens(watched: Watched) -> None:
    asked = request(sequences=4, slo_tpot_ms=50.0)
    watched.metrics.on_decisions([routed(asked)], [0.001])
    watched.metrics.on_outcomes([ended(asked, ttft_ms=90.0, duration_ms=1090.0, completion_tokens=44)])
    found = watched.samples()
    assert found[f"llm_d_epp_request_streaming_tpot_seconds_sum{{{ML}}}"] == pytest.approx(0.1)
    assert found[f"llm_d_epp_request_ntpot_seconds_sum{{{ML}}}"] == pytest.approx(1.09 / 44), "of all tokens"
    assert [value for name, value in found.items() if "slo_violation" in name and "tpot" in name] == [1.0]


def test_of_several_sequences_one_may_be_longer(watched: Watched) -> None:
    asked = request(sequences=64, slo_tpot_ms=150.0)
    watched.metrics.on_decisions([routed(asked)], [0.001])
    watched.metrics.on_outcomes([ended(asked, ttft_ms=90.0, duration_ms=190.0, completion_tokens=65)])
    found = watched.samples()
    assert found[f"llm_d_epp_request_streaming_tpot_seconds_sum{{{ML}}}"] == pytest.approx(0.1), "it has two tokens"
    assert not any("slo_violation" in name and "tpot" in name and value for name, value in found.items())


def test_refusals_are_counted_from_zero_on(watched: Watched) -> None:
    """`rate` sees nothing of what a series begins with."""
    refusals = {key: value for key, value in watched.samples().items() if key.startswith("fairlead_rejected_total{")}
    assert {key.partition("=")[2][:-1] for key in refusals} == {
        *("rejected-saturated", "rejected-ttl-expired", "rejected-no-endpoints", "rejected-shutting-down"),
        *("rejected-context-cancelled", "rejected-by-scheduler", "model_not_found"),
    }
    assert set(refusals.values()) == {0}


def test_how_long_failures_took_is_told_apart(watched: Watched) -> None:
    ends: list[dict[str, Any]] = [{}, {"status": 503}, {"status": 503}, {"status": 400}, {"cause": "endpoint-gone"}]
    watched.metrics.on_outcomes([ended(duration_ms=1000.0, **end) for end in ends])
    found = watched.samples()
    failed = "fairlead_failed_request_duration_seconds"
    assert found[f"{failed}_sum{{error_code=ModelServerError}}"] == 3.0
    assert found[f"{failed}_count{{error_code=BadRequest}}"] == 1
    assert found[f"llm_d_epp_request_duration_seconds_count{{{ML}}}"] == 5, "the published one has them all"


def test_published_bounds_differ_between_twins(watched: Watched) -> None:
    watched.metrics.on_outcomes([ended(ttft_ms=300_000.0, duration_ms=400_000.0, completion_tokens=2)])
    found = watched.samples()
    streaming = ML.replace(",model", ",le=120,model").replace("target", "streaming=true,target")
    assert found[f"llm_d_epp_request_ttft_seconds_bucket{{{streaming}}}"] == 0
    assert f"llm_d_epp_request_ttft_seconds_bucket{{{streaming.replace('le=120', 'le=300')}}}" not in found
    assert found[f"inference_objective_request_ttft_seconds_bucket{{le=300,{M}}}"] == 1
    assert found[f"inference_objective_request_tpot_seconds_bucket{{le=120,{M}}}"] == 1
    assert f"llm_d_epp_request_streaming_tpot_seconds_bucket{{{ML.replace(',model', ',le=120,model')}}}" not in found


def test_what_is_not_known_is_not_counted(watched: Watched) -> None:
    watched.metrics.on_decisions([routed()], [0.001])
    watched.metrics.on_outcomes([ended(hit_tokens=40)])
    found = watched.samples()
    sized = "request_size"
    assert not any("_count{" in key and "model_name=m" in key and sized not in key for key in found)
    assert found[f"fairlead_predicted_hit_tokens_total{{{M}}}"] == 0


def test_running_never_goes_below_zero(watched: Watched) -> None:
    watched.metrics.on_outcomes([ended()])
    assert watched.samples()[f"llm_d_epp_request_running{{{ML}}}"] == 0


@pytest.mark.parametrize(
    ("outcome", "status", "code"),
    [
        ("rejected-no-endpoints", 503, "ServiceUnavailable"),
        ("rejected-saturated", 429, "ResourceExhausted"),
        ("rejected-shutting-down", 500, "Internal"),
        ("rejected-other", 404, "BadRequest"),
        ("rejected-context-cancelled", 503, ""),
    ],
)
def test_a_refused_request(watched: Watched, outcome: str, status: int, code: str) -> None:
    watched.metrics.on_decisions([refused(outcome, status)], [0.001])
    found = watched.samples()
    assert found[f"llm_d_epp_request_total{{{ML}}}"] == 1
    assert found.get(f"llm_d_epp_request_error_total{{error_code={code},{ML}}}", 0) == (code != "")
    assert found.get(f"inference_objective_request_error_total{{error_code={code},{M}}}", 0) == (code != "")
    assert watched.metrics.client_errors + watched.metrics.server_errors == (code != "")
    assert found[f"fairlead_rejected_total{{reason={outcome}}}"] == 1
    failure = "endpoint_name=,namespace=,port=,status=failure,target_model_name=m"
    decided = outcome in ("rejected-no-endpoints", "rejected-other")
    assert found.get(f"llm_d_epp_scheduler_attempts_total{{{failure}}}", 0) == decided
    assert found[f"llm_d_epp_request_running{{{ML}}}"] == 0
    assert found[f"kv_cache_lookup_total{{{M}}}"] == 0


@pytest.mark.parametrize(
    ("status", "cause", "code"),
    [
        (500, "natural", "ModelServerError"),
        (429, "natural", "ModelServerError"),
        (404, "natural", "BadRequest"),
        (0, "stream-lost", None),
        (0, "endpoint-gone", "ModelServerError"),
        (0, "client-disconnect", None),
        (429, "evicted", "ResourceExhausted"),
        (0, "evicted", "ResourceExhausted"),
        (0, "expired", None),
    ],
)
def test_bad_ends(watched: Watched, status: int, cause: str, code: str | None) -> None:
    watched.metrics.on_outcomes([ended(status=status, cause=cause)])
    found = watched.samples()
    errors = {key for key in found if key.startswith("llm_d_epp_request_error_total{") and found[key]}
    assert errors == ({f"llm_d_epp_request_error_total{{error_code={code},{ML}}}"} if code else set())
    assert found[f"fairlead_request_end_total{{cause={cause}}}"] == 1
    assert found["fairlead_lease_expired_total"] == (cause == "expired")


def test_errors_before_a_request_is_understood(watched: Watched) -> None:
    watched.metrics.on_client_error(400)
    found = watched.samples()
    labels = "fairness_id=default-flow,model_name=,priority=0,target_model_name="
    assert found[f"llm_d_epp_request_error_total{{error_code=BadRequest,{labels}}}"] == 1
    assert found[f"llm_d_epp_request_total{{{labels}}}"] == 1, "the share of errors is at most 1"
    watched.metrics.on_client_error(400, decided=True)
    found = watched.samples()
    assert found[f"llm_d_epp_request_error_total{{error_code=BadRequest,{labels}}}"] == 2
    assert found[f"llm_d_epp_request_total{{{labels}}}"] == 1


def test_errors_of_a_tenant_that_was_answered_before_are_shown_as_its_own(watched: Watched) -> None:
    def errors() -> dict[str, float]:
        unknown = refused("model_not_found", 404, request(model="made-up", fairness_id="acme"))
        watched.metrics.on_decisions([unknown], [0.001])
        watched.metrics.on_client_error(400, "acme")
        found = watched.samples()
        totals = {key: found[key] for key in found if key.startswith("llm_d_epp_request_total{") and found[key]}
        assert sum(totals.values()) == sum(found[key] for key in found if key.startswith("llm_d_epp_request_error_"))
        return {key.partition("fairness_id=")[2].partition(",target")[0]: number for key, number in totals.items()}

    assert errors() == dict.fromkeys(("other,model_name=,priority=0", "other,model_name=other,priority=0"), 1)
    asked = request(fairness_id="acme")
    watched.metrics.on_outcomes([ended(asked)])
    assert errors() == {
        **dict.fromkeys(("other,model_name=,priority=0", "other,model_name=other,priority=0"), 1),
        **dict.fromkeys(("acme,model_name=,priority=0", "acme,model_name=other,priority=0"), 1),
    }


def test_scale_up_is_wanted_for_a_while_after_overload(watched: Watched) -> None:
    assert watched.samples()["fairlead_scale_up_wanted"] == 0
    watched.metrics.on_decisions([routed(overloaded=True)], [0.001])
    assert watched.samples()["fairlead_scale_up_wanted"] == 1
    assert watched.samples()["fairlead_all_overloaded_total"] == 1
    watched.now = 100.0 + SCALE_UP_HOLD_S
    assert watched.samples()["fairlead_scale_up_wanted"] == 0
    watched.metrics.on_decisions([refused("rejected-saturated", 429)], [0.001])
    watched.now = 101.0
    assert watched.samples()["fairlead_scale_up_wanted"] == 1


def test_the_fleet(watched: Watched) -> None:
    watched.status = FleetStatus(
        endpoints=[
            EndpointStatus(id="a", address="x", fresh=True, age_s=0.1, waiting=2, running=4, kv_usage=0.2, leases=3),
            EndpointStatus(id="b", address="y", fresh=True, age_s=0.2, waiting=4, running=4, kv_usage=None),
            EndpointStatus(id="c", address="z", fresh=False, age_s=9.0, waiting=100, running=100, kv_usage=1),
            EndpointStatus(id="d", address="z"),
        ],
        index_size=77,
        leases=3,
        scrapes=Totals(),
    )
    found = watched.samples()
    for prefix in ("llm_d_epp", "inference_pool"):
        assert found[prefix + "_average_queue_size{name=pool-a}"] == 3
        assert found[prefix + "_average_running_requests{name=pool-a}"] == 4
        assert found[prefix + "_average_kv_cache_utilization{name=pool-a}"] == 0.2
    assert found["llm_d_epp_std_dev_queue_size{name=pool-a}"] == pytest.approx(2**0.5)
    assert found["llm_d_epp_std_dev_kv_cache_utilization{name=pool-a}"] != found["fairlead_leases"]
    assert found["llm_d_epp_ready_endpoints{name=pool-a}"] == 2
    assert found["inference_pool_ready_pods{name=pool-a}"] == 2
    assert found["llm_d_epp_per_endpoint_queue_size{model_server_endpoint=c,name=pool-a}"] == 100
    assert found["inference_pool_per_pod_queue_size{model_server_pod=a,name=pool-a}"] == 2
    assert "llm_d_epp_per_endpoint_queue_size{model_server_endpoint=d,name=pool-a}" not in found
    assert [found[f"fairlead_endpoint_stale{{endpoint={name}}}"] for name in "abcd"] == [0, 0, 1, 1]
    assert (found["index_size"], found["fairlead_leases"]) == (77, 3)
    assert found["fairlead_endpoint_leases{endpoint=a}"] == 3
    assert found["fairlead_scrape_total{result=ok}"] == 40
    assert found["fairlead_scrape_total{result=failed}"] == 2
    watched.status = FleetStatus()
    found = watched.samples()
    assert str(found["llm_d_epp_average_queue_size{name=pool-a}"]) == "nan"
    assert found["llm_d_epp_ready_endpoints{name=pool-a}"] == 0
    assert not any(key.startswith("fairlead_endpoint_") for key in found)


def test_long_names_are_cut_and_still_one() -> None:
    watched = Watched()
    for _ in range(3):
        watched.metrics.on_decisions([routed(request(model="x" * 5000))], [0.001])
    assert watched.samples()[f"llm_d_epp_request_total{{{ML.replace('=m', '=' + 'x' * 200)}}}"] == 3


def test_departed_endpoints_are_forgotten(watched: Watched) -> None:
    for i in range(2000):
        name = f"vllm-{i:04}"
        watched.status = FleetStatus(endpoints=[EndpointStatus(id=f"ns/{name}", address="10.0.0.1:8000")])
        watched.metrics.on_decisions([routed(endpoint=f"ns/{name}")], [0.001])
        if i % 100 == 99:
            watched.now += 60.0
            watched.metrics.render()
    attempts = [key for key in watched.samples() if key.startswith("llm_d_epp_scheduler_attempts_total{")]
    assert len(attempts) == 101, "those that are there, and those that left since the last sweep"
    assert any("vllm-1999" in key for key in attempts)


def test_counters_of_an_endpoint_are_shown_once_more_after_it_has_left(watched: Watched) -> None:
    families = watched.metrics.families
    stays, leaves = (EndpointStatus(id=f"ns/{name}", address=f"10.0.0.{n}:8000") for n, name in enumerate("ab"))
    watched.status = FleetStatus(endpoints=[stays, leaves])

    def count() -> None:
        for endpoint in (stays, leaves):
            watched.metrics.on_decisions([routed(endpoint=endpoint.id)], [0.001])
            watched.metrics.on_fallback(endpoint.address)
            families.prefills.child(endpoint.id).inc()
            families.repeated.child(endpoint.id).inc()
            families.stalls.child(endpoint.id, "suspect").inc()

    def shown(endpoint: EndpointStatus) -> list[float]:
        watched.now += 31.0
        samples = watched.samples()
        name = endpoint.id.removeprefix("ns/")
        labels = (
            f"llm_d_epp_scheduler_attempts_total{{endpoint_name={name},",
            f"fairlead_fallback_requests_total{{endpoint={endpoint.address}}}",
            f"fairlead_prefills_total{{endpoint={endpoint.id}}}",
            f"fairlead_repeated_total{{endpoint={endpoint.id}}}",
            f"fairlead_stalls_total{{endpoint={endpoint.id},",
        )
        return [value for label in labels for key, value in samples.items() if key.startswith(label)]

    count()
    watched.status = FleetStatus(endpoints=[stays])
    assert shown(leaves) == [1] * 5
    assert shown(leaves) == []
    assert shown(stays) == [1] * 5
    count()
    watched.status = FleetStatus(endpoints=[stays, leaves])
    assert shown(leaves) == shown(leaves) == [1] * 5, "it came back"
    assert shown(stays) == [2] * 5
    assert watched.metrics.bypassed == 4


def test_fallbacks_plugins_lag_and_info(watched: Watched) -> None:
    watched.metrics.on_fallback("10.0.0.1:8000")
    watched.metrics.on_decisions([routed()], [0.0003])
    watched.metrics.families.loop_lag.child().observe(0.004)
    found = watched.samples()
    assert found["fairlead_fallback_requests_total{endpoint=10.0.0.1:8000}"] == 1
    labels = "extension_point=Schedule,plugin_name=p,plugin_type=p"
    assert found[f"llm_d_epp_plugin_duration_seconds_count{{{labels}}}"] == 1
    assert found[f"inference_extension_plugin_duration_seconds_count{{{labels}}}"] == 1
    assert found["fairlead_loop_lag_seconds_bucket{le=0.005}"] == 1
    assert any(key.startswith("llm_d_epp_info{build_ref=") for key in found)


def test_a_share_of_forecasts_is_a_number_though_none_was_inside(watched: Watched) -> None:
    """A rule that divides by a sum keeps silent over a series that is not there."""
    samples = watched.samples()
    assert [samples[f"fairlead_ttft_forecasts_total{{result={r}}}"] for r in ("below", "inside", "above")] == [0, 0, 0]


def test_forecasts_are_judged_by_streamed_answers(watched: Watched) -> None:
    forecast = Forecast(ttft_ms=100.0, low_ms=80.0, high_ms=150.0)
    for ttft in (90.0, 140.0, 50.0, 400.0):
        watched.metrics.on_outcomes([ended(ttft_ms=ttft, forecast=forecast)])
    watched.metrics.on_outcomes([ended(request(stream=False), ttft_ms=900.0, forecast=forecast)])
    watched.metrics.on_outcomes([ended(ttft_ms=900.0)])
    samples = watched.samples()
    assert [samples[f"fairlead_ttft_forecasts_total{{result={r}}}"] for r in ("below", "inside", "above")] == [1, 2, 1]
    assert samples["fairlead_ttft_observed_to_predicted_ratio_count"] == 4
    assert samples["fairlead_ttft_observed_to_predicted_ratio_bucket{le=1}"] == 2


def test_a_forecast_is_judged_from_when_the_request_was_sent(watched: Watched) -> None:
    """A queue of ours is no error of the forecast, which was made behind it."""
    forecast = Forecast(ttft_ms=100.0, low_ms=80.0, high_ms=150.0)
    watched.metrics.on_outcomes([ended(ttft_ms=5110.0, queued_ms=5000.0, forecast=forecast)])
    samples = watched.samples()
    assert samples["fairlead_ttft_forecasts_total{result=inside}"] == 1
    assert samples["fairlead_ttft_observed_to_predicted_ratio_sum"] == pytest.approx(1.1)
    (predicted,) = (v for k, v in samples.items() if k.startswith("llm_d_epp_request_predicted_ttft_seconds_sum"))
    assert predicted == pytest.approx(5.1), "beside the histogram of whole times"


requests = st.builds(
    request,
    model=st.sampled_from(["m", "n"]),
    target=st.sampled_from(["", "t"]),
    rewritten_by=st.sampled_from(["", "r"]),
    stream=st.booleans(),
    body_bytes=st.sampled_from([0, 400]),
    slo_ttft_ms=st.sampled_from([0.0, 50.0]),
    slo_tpot_ms=st.sampled_from([0.0, 20.0]),
)
decisions = st.one_of(
    st.builds(
        routed,
        requests,
        policy=st.sampled_from(["p", "q"]),
        endpoint=st.sampled_from(["ns/a", "ns/b"]),
        overloaded=st.booleans(),
        prefill=st.sampled_from(["", "", "ns/p"]),
    ),
    st.builds(refused, st.just("rejected-saturated"), st.just(429), requests),
    st.builds(refused, st.just("model-not-found"), st.just(404), requests),
)
outcomes = st.builds(
    ended,
    requests,
    status=st.sampled_from([0, 200, 404, 429, 503]),
    cause=st.sampled_from(["natural", "client-disconnect", "expired"]),
    ttft_ms=st.sampled_from([-1.0, 10.0, 90.0]),
    duration_ms=st.sampled_from([-1.0, 10.0, 500.0]),
    response_bytes=st.sampled_from([-1, 9000]),
    prompt_tokens=st.sampled_from([-1, 100]),
    completion_tokens=st.sampled_from([-1, 0, 1, 11]),
    cached_tokens=st.sampled_from([-1, 32]),
    hit_tokens=st.sampled_from([0, 40]),
    forecast=st.sampled_from([None, Forecast(ttft_ms=100.0, low_ms=80.0, high_ms=150.0, tpot_ms=9.0)]),
    unreached=st.sampled_from(["", "ns/c"]),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(decisions, max_size=6), st.lists(outcomes, max_size=6))
def test_many_at_once_count_like_one_after_the_other(decided: list[DecisionRecord], over: list[OutcomeRecord]) -> None:
    whole, single = Watched(served=["m", "n", "t"]), Watched(served=["m", "n", "t"])
    whole.metrics.on_decisions(decided, [0.001 * i for i in range(len(decided))])
    whole.metrics.on_outcomes(over)
    for i, record in enumerate(decided):
        single.metrics.on_decisions([record], [0.001 * i])
    for outcome in over:
        single.metrics.on_outcomes([outcome])
    found, expected = whole.samples(), single.samples()
    # A policy that splits some request of a batch is known to split from the batch's first one on.
    compared = [key for key in expected if "decision_type=decode-only" not in key]
    assert [found.get(key) for key in compared] == pytest.approx([expected[key] for key in compared], nan_ok=True)
