"""The headers that steer an inference gateway, and who may set them.

Three kinds
* `CONTROL_HEADERS` name machines, or are the scheduler's own words. A client that could set them would choose its own
  replica, or make a sidecar call any host. They are taken off every request, whatever they say; nobody but the
  scheduler sets them.
* `STEERING_HEADERS` are a client's hints to the scheduler: priority, tenant, latency, another model. The
  configuration says which are listened to (`TRUST`). Model servers never see them, listened to or not.
* Sessions and request ids are read, and pass: applications and engines use them too. No state is keyed by a request id
  of a client.

Of a header with an older name the current name wins. Values come as Latin-1, byte for byte.
"""

from collections.abc import Mapping

#: Set by us toward the gateway.
DESTINATION = "x-gateway-destination-endpoint"
DROPPED_REASON = "x-llm-d-request-dropped-reason"
#: Set by us toward the sidecar of a decoding model server: who computes the prompt.
PREFILLER = "x-prefiller-host-port"

#: Never accepted from a client.
CONTROL_HEADERS = frozenset(
    {
        DESTINATION, "x-gateway-destination-endpoint-subset", "x-gateway-destination-endpoint-served",
        "x-gateway-destination-endpoint-scores", PREFILLER, "x-encoder-hosts-ports", "x-data-parallel-host-port",
        "x-kv-cache-source-host-port", "x-conformance-test-served-endpoint", DROPPED_REASON,
    }
)  # fmt: skip

#: Where a session id may stand, first one wins. The last is the OpenAI clients' way.
SESSION_HEADERS = ("x-session-id", "x-claude-code-session-id", "x-session-affinity", "session-id", "session_id")

FAIRNESS_HEADERS = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
OBJECTIVE_HEADERS = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
REWRITE_HEADERS = ("x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite")
TTFT_SLO_HEADERS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
TPOT_SLO_HEADERS = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
#: Milliseconds that the request may wait in our queue.
TTL_HEADERS = ("x-fairlead-ttl-ms",)
PATH_HEADERS = (":path", "x-original-path", "x-forwarded-path")
REQUEST_ID = "x-request-id"
#: W3C Trace Context: read where requests are traced, and always passed on.
TRACE_HEADERS = ("traceparent", "tracestate")

#: Conformance tests: addresses (`ip`, `ip:port`, comma list) to choose from, and who served, on the response. Model
#: servers get it: the extension's tests look for it there.
TEST_SELECTION = "test-epp-endpoint-selection"
TEST_SERVED = "x-conformance-test-served-endpoint"

#: What a configuration can call trusted, and what it stands for.
TRUST: Mapping[str, tuple[str, ...]] = {
    "objective": OBJECTIVE_HEADERS,
    "fairness": FAIRNESS_HEADERS,
    "slo": (*TTFT_SLO_HEADERS, *TPOT_SLO_HEADERS, *TTL_HEADERS),
    "session": SESSION_HEADERS,
    "model-rewrite": REWRITE_HEADERS,
    "test-selection": (TEST_SELECTION,),
}
#: The last one lets clients choose their replica: for tests of gateways only.
TRUSTED = frozenset(TRUST) - {"test-selection"}

STEERING_HEADERS = frozenset(
    {
        *OBJECTIVE_HEADERS,
        *FAIRNESS_HEADERS,
        *TTFT_SLO_HEADERS,
        *TPOT_SLO_HEADERS,
        *TTL_HEADERS,
        *REWRITE_HEADERS,
        "x-llm-d-video-fps",
        "x-llm-d-video-duration-seconds",
        "x-llm-d-video-resolution",
        "x-session-token",
        "x-prompt-hash",
        "epp-profile",
    }
)
#: What no model server gets from a client.
REMOVED_HEADERS = CONTROL_HEADERS | STEERING_HEADERS

#: Every header of a client's request that the scheduler reads.
READ_HEADERS = (
    ":path",
    ":method",
    "content-type",
    "content-encoding",
    REQUEST_ID,
    *PATH_HEADERS[1:],
    *SESSION_HEADERS,
    *OBJECTIVE_HEADERS,
    *FAIRNESS_HEADERS,
    *TTFT_SLO_HEADERS,
    *TPOT_SLO_HEADERS,
    *TTL_HEADERS,
    *REWRITE_HEADERS,
    *TRACE_HEADERS,
    TEST_SELECTION,
)

#: Initial metadata with which a gateway announces, on every ext_proc stream, that it sends us its access log, and that
#: the request body comes in one message.
ACCESS_LOG_METADATA = "fairlead-access-log"
WHOLE_BODY_METADATA = "fairlead-whole-body"
#: Likewise: the gateway takes the length off the response to a pick that carries `REWRITTEN` in its metadata, so that
#: chunks may become longer or shorter.
RESIZABLE_METADATA = "fairlead-resizable"
#: For a scheduler with several pools: `namespace/name` of the one that the stream is for.
POOL_METADATA = "fairlead-pool"
REWRITTEN = "fairlead-rewritten"
#: A namespace of its own for what `RESIZABLE_METADATA` also promises: with `FALLBACK` in it, the address of another
#: endpoint, a request whose endpoint cannot be reached is repeated there.
OWN_NAMESPACE = "fairlead"
#: The key is part of the configuration that gateways already run.
FALLBACK = "second"
#: What the gateway then tells beside the first chunk of the response, if that is the first message of it.
ATTEMPTS = "upstream.request_attempt_count"
ANSWERED_BY = "upstream.address"
#: Of a pick with a fallback endpoint, read by the gateway alone: that it may be repeated also after it has begun, and
#: after how many milliseconds it is sent there too.
RETRY_ON = "x-envoy-retry-on"
HEDGE_AFTER = "x-envoy-upstream-rq-per-try-timeout-ms"
