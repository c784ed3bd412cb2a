"""The headers that steer an inference gateway, and who may set them.

A client that could set these would choose its own replica, or make a sidecar call any host. They are taken off every
request, whatever they say; what the scheduler itself needs is read before.
"""

#: Set by us toward the gateway.
DESTINATION = "x-gateway-destination-endpoint"
DROPPED_REASON = "x-llm-d-request-dropped-reason"

#: Never accepted from a client.
CONTROL_HEADERS = frozenset(
    {
        DESTINATION,
        "x-gateway-destination-endpoint-subset",
        "x-gateway-destination-endpoint-served",
        "x-gateway-destination-endpoint-scores",
        "x-prefiller-host-port",
        "x-encoder-hosts-ports",
        "x-data-parallel-host-port",
        "x-kv-cache-source-host-port",
        "x-conformance-test-served-endpoint",
        DROPPED_REASON,
    }
)

#: Where a session id may stand, first one wins. The last is the OpenAI clients' way.
SESSION_HEADERS = ("x-session-id", "x-claude-code-session-id", "x-session-affinity", "session-id", "session_id")

FAIRNESS_HEADERS = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
TTFT_SLO_HEADERS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
TPOT_SLO_HEADERS = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
PATH_HEADERS = (":path", "x-original-path", "x-forwarded-path")
REQUEST_ID = "x-request-id"

#: Headers that few requests carry.
RARE_HEADERS = frozenset((*SESSION_HEADERS, *FAIRNESS_HEADERS, *TTFT_SLO_HEADERS, *TPOT_SLO_HEADERS))

#: Every header of a client's request that the scheduler reads.
READ_HEADERS = (
    ":path",
    ":method",
    "content-type",
    "content-encoding",
    REQUEST_ID,
    *PATH_HEADERS[1:],
    *SESSION_HEADERS,
    *FAIRNESS_HEADERS,
    *TTFT_SLO_HEADERS,
    *TPOT_SLO_HEADERS,
)

#: Initial metadata with which a gateway announces, on every ext_proc stream, that it sends us its access log, and that
#: the request body comes in one message.
ACCESS_LOG_METADATA = "fairlead-access-log"
WHOLE_BODY_METADATA = "fairlead-whole-body"
