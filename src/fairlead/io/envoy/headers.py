"""Which request headers the gateway takes away, and when.

Two moments. *At entry*, before routing and before the scheduler: headers that name a machine. Nobody but the scheduler
may set them; what it sets itself comes later and passes. *Toward the model server*: headers that only the scheduler
reads, and the destination, which this gateway takes from metadata.
"""

from fairlead.route.headers import CONTROL_HEADERS, DESTINATION, FAIRNESS_HEADERS, TPOT_SLO_HEADERS, TTFT_SLO_HEADERS

AT_ENTRY: tuple[str, ...] = tuple(sorted(CONTROL_HEADERS))

TOWARD_UPSTREAM: tuple[str, ...] = (
    DESTINATION,
    *FAIRNESS_HEADERS,
    *TTFT_SLO_HEADERS,
    *TPOT_SLO_HEADERS,
    "x-llm-d-inference-objective",
    "x-gateway-inference-objective",
    "x-llm-d-model-name-rewrite",
    "x-gateway-model-name-rewrite",
    "x-llm-d-video-fps",
    "x-llm-d-video-duration-seconds",
    "x-llm-d-video-resolution",
    "x-session-token",
    "x-prompt-hash",
    "epp-profile",
    "test-epp-endpoint-selection",
)
