"""What Envoy reports of each request: to the scheduler (ALS), and to the operator (a JSON line)."""

from typing import Any

from fairlead.io.envoy.clusters import ALS, seconds
from fairlead.io.envoy.options import Options
from fairlead.wire.access_log import SUMMARY, SUMMARY_TAG, TTFT

Json = dict[str, Any]

_ALS = "type.googleapis.com/envoy.extensions.access_loggers.grpc.v3.HttpGrpcAccessLogConfig"
_FILE = "type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog"
_STDOUT = "type.googleapis.com/envoy.extensions.access_loggers.stream.v3.StdoutAccessLog"

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
    """The lease comes back out of dynamic metadata, so no header has to reach the model server. One tag says all that
    the scheduler reads: taking an entry apart field by field would cost it more than the decision."""
    common = {
        "log_name": "fairlead",
        "transport_api_version": "V3",
        "buffer_flush_interval": seconds(options.als_interval),
        "buffer_size_bytes": 65_536,
        "grpc_service": {"envoy_grpc": {"cluster_name": ALS}},
        "custom_tags": [{"tag": SUMMARY_TAG, "value": SUMMARY}],
    }
    return {
        "name": "envoy.access_loggers.http_grpc",
        "typed_config": {"@type": _ALS, "common_config": common},
    }
