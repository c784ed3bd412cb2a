"""Headers that steer an inference gateway, and who may set them; metadata that gateway and scheduler exchange.

Three kinds
* `CONTROL_HEADERS` name hosts, or carry the scheduler's decisions. A client that could set them would choose its own
  replica, or make a sidecar call any host. So they are removed from every request; only the scheduler sets them.
* `STEERING_HEADERS` are a client's hints to the scheduler: priority, tenant, latency, another model. The configuration
  says which are trusted (`TRUST`). Model servers never see them, trusted or not.
* Session and request ids are read and passed on: applications and engines use them, too. No state is keyed by a
  client's request id.

If a header has a current and an older name, the current name wins. Values arrive as Latin-1, byte for byte.
"""

from collections.abc import Mapping

#: Set by us for the gateway.
DESTINATION = "x-gateway-destination-endpoint"
DROPPED_REASON = "x-llm-d-request-dropped-reason"
#: Set by us for the sidecar of a decoding model server: the endpoint that computes the prompt.
PREFILLER = "x-prefiller-host-port"

#: Never accepted from a client.
CONTROL_HEADERS = frozenset(
    {
        DESTINATION, "x-gateway-destination-endpoint-subset", "x-gateway-destination-endpoint-served",
        "x-gateway-destination-endpoint-scores", PREFILLER, "x-encoder-hosts-ports", "x-data-parallel-host-port",
        "x-data-parallel-rank", "x-kv-cache-source-host-port", "x-conformance-test-served-endpoint", DROPPED_REASON,
    }
)  # fmt: skip

#: Headers with a session id; the first one present wins. OpenAI clients use the last one.
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
#: Of an answer: in its trailers, or if it has no body in its headers.
GRPC_STATUS = "grpc-status"
#: W3C Trace Context: read if requests are traced, and always passed on.
TRACE_HEADERS = ("traceparent", "tracestate")

#: For conformance tests: addresses to choose from (`ip`, `ip:port`, comma-separated), and the endpoint that served, on
#: the response. Model servers receive the former, because the extension's tests look for it there.
TEST_SELECTION = "test-epp-endpoint-selection"
TEST_SERVED = "x-conformance-test-served-endpoint"

#: Names that a configuration can list as trusted, and their headers.
TRUST: Mapping[str, tuple[str, ...]] = {
    "objective": OBJECTIVE_HEADERS,
    "fairness": FAIRNESS_HEADERS,
    "slo": (*TTFT_SLO_HEADERS, *TPOT_SLO_HEADERS, *TTL_HEADERS),
    "session": SESSION_HEADERS,
    "model-rewrite": REWRITE_HEADERS,
    "test-selection": (TEST_SELECTION,),
    # Fields of the body, not headers; see `apis.body.TransferError`.
    "kv-transfer": (),
}
#: Without those that let clients choose their replica, or a host that a model server connects to.
TRUSTED = frozenset(TRUST) - {"test-selection", "kv-transfer"}

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
#: Headers of clients that no model server receives.
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

#: Initial metadata of an ext_proc stream. A gateway announces that it sends us its access log, and that the request
#: body arrives in one message.
ACCESS_LOG_METADATA = "fairlead-access-log"
WHOLE_BODY_METADATA = "fairlead-whole-body"
#: Also initial metadata: if a pick has `REWRITTEN` in its metadata, the gateway removes the content length of the
#: response, so that chunks may become longer or shorter.
RESIZABLE_METADATA = "fairlead-resizable"
#: For a scheduler with several pools: `namespace/name` of the pool that the stream belongs to.
POOL_METADATA = "fairlead-pool"
REWRITTEN = "fairlead-rewritten"
#: Metadata namespace of a second promise of `RESIZABLE_METADATA`: if it has the key `FALLBACK` with the address of
#: another endpoint, a request whose endpoint cannot be reached is repeated there.
OWN_NAMESPACE = "fairlead"
#: The value cannot change: it is part of the configuration of gateways already in use.
FALLBACK = "second"
#: Attributes that the gateway then sends with the first chunk of the response, if that is its first message.
ATTEMPTS = "upstream.request_attempt_count"
ANSWERED_BY = "upstream.address"
#: Headers of a pick with a fallback endpoint, read only by the gateway: that the request may be repeated even after it
#: has begun, and after how many milliseconds it is also sent to the fallback endpoint.
RETRY_ON = "x-envoy-retry-on"
HEDGE_AFTER = "x-envoy-upstream-rq-per-try-timeout-ms"
