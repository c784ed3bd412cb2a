"""What Envoy reports of each request: to the scheduler (ALS), and to the operator (a JSON line)."""

from typing import Any

from fairlead.io.envoy.clusters import ALS, seconds
from fairlead.io.envoy.options import Options

Json = dict[str, Any]

_ALS = "type.googleapis.com/envoy.extensions.access_loggers.grpc.v3.HttpGrpcAccessLogConfig"
_FILE = "type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog"
_STDOUT = "type.googleapis.com/envoy.extensions.access_loggers.stream.v3.StdoutAccessLog"

#: From the request's first byte to the first byte of the response *body*; the built-in durations end at its headers,
#: which vLLM sends before the first token.
TTFT = "%COMMON_DURATION(DS_RX_BEG:US_RX_BODY_BEG:us)%"
#: The same from the moment the request had left: without the time it queued here.
PREFILL = "%COMMON_DURATION(US_TX_END:US_RX_BODY_BEG:us)%"

LINE = {
    "time": "%START_TIME%",
    "method": "%REQ(:METHOD)%",
    "path": "%REQ(X-ENVOY-ORIGINAL-PATH?:PATH)%",
    "status": "%RESPONSE_CODE%",
    "details": "%RESPONSE_CODE_DETAILS%",
    "flags": "%RESPONSE_FLAGS%",
    "endpoint": "%UPSTREAM_HOST%",
    "cluster": "%UPSTREAM_CLUSTER%",
    "request_bytes": "%BYTES_RECEIVED%",
    "response_bytes": "%BYTES_SENT%",
    "duration_ms": "%DURATION%",
    "ttft_us": TTFT,
    "request_id": "%REQ(X-REQUEST-ID)%",
    "client": "%DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT%",
}


def access_logs(options: Options) -> list[Json]:
    found = []
    if options.als:
        found.append(_als(options))
    if options.access_log:
        typed: Json = {"@type": _STDOUT if options.access_log == "-" else _FILE}
        if options.access_log != "-":
            typed["path"] = options.access_log
        typed["log_format"] = {"json_format": LINE}
        found.append({"name": "envoy.access_loggers.lines", "typed_config": typed})
    return found


def _als(options: Options) -> Json:
    """The entry also carries all dynamic metadata, the lease among them: no header has to reach the model server."""
    common = {
        "log_name": "fairlead",
        "transport_api_version": "V3",
        "buffer_flush_interval": seconds(options.als_interval),
        "buffer_size_bytes": 65_536,
        "grpc_service": {"envoy_grpc": {"cluster_name": ALS}},
        "custom_tags": [{"tag": "ttft_us", "value": TTFT}, {"tag": "prefill_us", "value": PREFILL}],
    }
    return {
        "name": "envoy.access_loggers.http_grpc",
        "typed_config": {
            "@type": _ALS,
            "common_config": common,
            "additional_request_headers_to_log": ["x-request-id"],
        },
    }
